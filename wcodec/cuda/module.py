"""Loaded kernels and how to launch them in a few microseconds.

``load`` compiles (or takes from the cache), loads into the device's primary context and remembers. A launch
goes through a `Frame`: the launch configuration and the parameter block are laid out once, and a call writes
the values that it is given and the stream into them, in one `struct` call.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping
from typing import Any

from wcodec.cuda import driver
from wcodec.cuda.compiler import Cubin, Defines, compile_cubin
from wcodec.cuda.device import device_index, device_info
from wcodec.errors import WCodecError

Dim = int | tuple[int, ...]

# Layout code -> (struct code, size, alignment). P pointer, T tensor map; the rest are struct's own codes.
_CODES: Mapping[str, tuple[str, int, int]] = {
    "P": ("Q", 8, 8),
    "Q": ("Q", 8, 8),
    "q": ("q", 8, 8),
    "I": ("I", 4, 4),
    "i": ("i", 4, 4),
    "f": ("f", 4, 4),
    "d": ("d", 8, 8),
    "T": ("128s", 128, 64),
}
_MAX_PORTABLE_CLUSTER = 8


class Frame:
    """One prepared launch: grid, block, shared memory, cluster and the places of the parameters.

    Calling it with a raw stream handle and one plain value per parameter (int, float, or the 128 bytes of a
    tensor map) launches. The driver copies the parameters before it returns, so one frame serves every
    call, graph captures included; a lock keeps threads apart.
    """

    def __init__(
        self, kernel: Kernel, layout: str, grid: Dim, block: Dim, smem: int, cluster: Dim, pdl: bool
    ) -> None:
        self.kernel = kernel
        self.layout = layout
        code, offsets = "<", []
        size = 0
        for letter in layout:
            item, width, alignment = _CODES[letter]
            gap = -size % alignment
            code += f"{gap}x{item}" if gap else item
            offsets.append(size + gap)
            size += gap + width
        self._pack_into = struct.Struct(code).pack_into
        raw = ctypes.create_string_buffer(size + 64)
        shift = -ctypes.addressof(raw) % 64  # tensor maps must lie on 64 bytes
        self._values = (ctypes.c_char * size).from_buffer(raw, shift) if size else raw
        base = ctypes.addressof(raw) + shift
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self._config, self._attributes = _config(grid, block, smem, cluster, pdl)
        self._config_ref = ctypes.byref(self._config)
        self._launch = driver.function("cuLaunchKernelEx")
        self._lock = threading.Lock()
        kernel.allow(smem, _volume(cluster))

    def __call__(self, stream: int, *values: Any) -> None:
        with self._lock:
            self._pack_into(self._values, 0, *values)
            self._config.stream = stream
            code = self._launch(self._config_ref, self.kernel.handle, self._pointers, None)
            if code == driver.INVALID_CONTEXT:
                driver.enter_context(self.kernel.device)
                code = self._launch(self._config_ref, self.kernel.handle, self._pointers, None)
        if code:
            c = self._config
            raise WCodecError(
                f"launch of {self.kernel.cubin.entry} failed: {driver.error_name(code)} "
                f"(grid {list(c.grid)}, block {list(c.block)}, {c.shared_bytes} bytes of shared memory)"
            )


class Kernel:
    """A kernel loaded on one device.

    Attributes
    ----------
    cubin : Cubin
        What was compiled, with its resource report.
    device : int
        CUDA device index.
    handle : ctypes.c_void_p
        ``CUfunction``.
    """

    def __init__(self, cubin: Cubin, device: int) -> None:
        self.cubin = cubin
        self.device = device
        with driver.current_context(device):
            self._module = driver.call("cuModuleLoadData", cubin.data)
            self._function = driver.call("cuModuleGetFunction", self._module, cubin.entry.encode())
            # Not at the first launch: that may happen inside a graph capture.
            driver.call("cuFuncLoad", self._function)
        self.handle = ctypes.c_void_p(int(self._function))
        local = self.attribute("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")
        if local:
            raise WCodecError(f"{cubin.entry}: {local} bytes of local memory per thread")
        self._allowed = 0
        self._frames: dict[tuple[Any, ...], Frame] = {}

    def attribute(self, name: str) -> int:
        """Return one ``CU_FUNC_ATTRIBUTE_…`` of the kernel."""
        kind = getattr(driver.bindings().CUfunction_attribute, name)
        return int(driver.call("cuFuncGetAttribute", kind, self._function))

    def allow(self, smem: int, cluster: int) -> None:
        """Opt in to `smem` bytes of dynamic shared memory and to clusters above the portable size."""
        kinds = driver.bindings().CUfunction_attribute
        with driver.current_context(self.device):
            if smem > self._allowed:
                limit = device_info(self.device).max_shared_bytes
                if smem > limit:
                    raise WCodecError(
                        f"{self.cubin.entry} wants {smem} bytes of shared memory, the device gives {limit}"
                    )
                kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.call("cuFuncSetAttribute", self._function, kind, smem)
                self._allowed = smem
            if cluster > _MAX_PORTABLE_CLUSTER:
                kind = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                driver.call("cuFuncSetAttribute", self._function, kind, 1)

    def frame(
        self, layout: str, grid: Dim, block: Dim, smem: int = 0, cluster: Dim = 1, pdl: bool = False
    ) -> Frame:
        """Return the prepared launch for this configuration, made once and remembered.

        Parameters
        ----------
        layout : str
            One letter per kernel parameter: ``P`` pointer, ``T`` tensor map (`TensorMap.data`), ``i`` ``I``
            32-bit, ``q`` ``Q`` 64-bit, ``f`` ``d`` floating point.
        grid, block, cluster : int or tuple of int
            Up to three dimensions.
        smem : int
            Dynamic shared memory in bytes.
        pdl : bool
            Let the kernel start while its predecessor drains (programmatic stream serialization).
        """
        key = (layout, grid, block, smem, cluster, pdl)
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = Frame(self, *key)
        return found


_loaded: dict[tuple[Any, ...], Kernel] = {}
_locks: dict[tuple[Any, ...], threading.Lock] = {}
_locks_lock = threading.Lock()


def load(source: str, defines: Defines, device: Any) -> Kernel:
    """Compile and load one kernel instance on one device, once per process.

    Parameters
    ----------
    source : str
        File name in ``decoders_cuda``.
    defines : Mapping[str, int or str]
        Macros of the instance.
    device : torch.device, str or int
        CUDA device.
    """
    index = device_index(device)
    key = (source, index, *sorted(defines.items()))
    found = _loaded.get(key)
    if found is None:
        with _locks_lock:
            lock = _locks.setdefault(key, threading.Lock())
        with lock:  # different instances compile side by side, one instance only once
            found = _loaded.get(key)
            if found is None:
                cubin = compile_cubin(source, defines, device_info(index).arch)
                found = _loaded[key] = Kernel(cubin, index)
    return found


def _triple(dim: Dim) -> tuple[int, int, int]:
    values = (dim,) if isinstance(dim, int) else tuple(dim)
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _volume(dim: Dim) -> int:
    x, y, z = _triple(dim)
    return x * y * z


def _config(
    grid: Dim, block: Dim, smem: int, cluster: Dim, pdl: bool
) -> tuple[driver.LaunchConfig, ctypes.Array[driver.LaunchAttribute]]:
    wanted: list[tuple[int, tuple[int, ...]]] = []
    if _volume(cluster) > 1:
        wanted.append((driver.CLUSTER_DIMENSION, _triple(cluster)))
    if pdl:
        wanted.append((driver.PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
    attributes = (driver.LaunchAttribute * max(len(wanted), 1))()
    for slot, (identity, words) in zip(attributes, wanted, strict=False):
        slot.id = identity
        slot.value[: len(words)] = words
    config = driver.LaunchConfig()
    config.grid[:] = _triple(grid)
    config.block[:] = _triple(block)
    config.shared_bytes = smem
    config.attributes = ctypes.cast(attributes, ctypes.POINTER(driver.LaunchAttribute))
    config.attribute_count = len(wanted)
    return config, attributes
