"""Tensor maps: how the copy engine (TMA) is told the shape of a tensor in device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from wcodec.cuda import driver
from wcodec.cuda.device import device_index
from wcodec.errors import WCodecError

_BYTES = 128
# CUtensorMapDataType and bytes per element.
_DTYPES = {"u8": (0, 1), "u16": (1, 2), "u32": (2, 4), "f16": (6, 2), "f32": (7, 4), "bf16": (9, 2)}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by span in bytes
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion by bytes


@dataclass(frozen=True)
class TensorMap:
    """The 128 bytes of a ``CUtensorMap``: a kernel parameter by value, ``__grid_constant__``."""

    data: bytes


class TensorMapEncoder:
    """Everything about a tensor map except the address, laid out once.

    Calling it with a device address returns the map's 128 bytes in about a microsecond, which matters where
    the activations move from call to call.

    Parameters
    ----------
    dtype : str
        ``u8``, ``u16``, ``u32``, ``bf16``, ``f16`` or ``f32``.
    shape : sequence of int
        Elements per dimension (one to five), innermost first. Reads beyond it return zeros.
    box : sequence of int
        Elements copied at once per dimension, each at most 256.
    strides : sequence of int, optional
        Bytes between neighbours in every dimension but the innermost, multiples of 16; dense where None.
    swizzle : int
        Swizzle span in bytes: 0, 32, 64 or 128.
    l2_promotion : int
        L2 fetch granularity in bytes: 0, 64, 128 or 256.

    Raises
    ------
    WCodecError
        Where the copy engine cannot address such a tensor.
    """

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        box: Sequence[int],
        *,
        strides: Sequence[int] | None = None,
        swizzle: int = 128,
        l2_promotion: int = 256,
    ) -> None:
        code, width = _DTYPES[dtype]
        rank = len(shape)
        if strides is None:
            strides, step = [], width
            for extent in shape[:-1]:
                step *= extent
                strides.append(step)
        if (
            not 1 <= rank <= 5
            or not len(box) == len(strides) + 1 == rank
            or not 0 < min(box) <= max(box) <= 256
        ):
            raise WCodecError(f"no tensor map of shape {list(shape)} and box {list(box)}")
        if any(stride % 16 for stride in strides):
            raise WCodecError(f"a tensor map's rows must lie on 16 bytes, not {list(strides)} bytes apart")
        self._what = f"tensor map of {dtype} {list(shape)}, box {list(box)}, strides {list(strides)}"
        self._before = (ctypes.c_int(code), ctypes.c_uint32(rank))
        self._after = (
            (ctypes.c_uint64 * rank)(*shape),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),  # no interleave
            ctypes.c_int(_SWIZZLES[swizzle]),
            ctypes.c_int(_PROMOTIONS[l2_promotion]),
            ctypes.c_int(0),  # out of bounds reads zero
        )
        self._encode = driver.function("cuTensorMapEncodeTiled")

    def __call__(self, pointer: int) -> bytes:
        """Return the map of the tensor at a device address, which must be 16-byte aligned."""
        raw = ctypes.create_string_buffer(_BYTES + 64)
        shift = -ctypes.addressof(raw) % 64  # the driver wants the map itself on 64 bytes
        args = (ctypes.byref(raw, shift), *self._before, ctypes.c_void_p(pointer), *self._after)
        code = self._encode(*args)
        if code == driver.INVALID_CONTEXT:
            driver.enter_context(device_index("cuda"))  # any device will do: nothing of it enters the map
            code = self._encode(*args)
        if code:
            raise WCodecError(f"{self._what} at {pointer:#x}: {driver.error_name(code)}")
        return raw.raw[shift : shift + _BYTES]


def encode_tiled(
    pointer: int,
    dtype: str,
    shape: Sequence[int],
    box: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    swizzle: int = 128,
    l2_promotion: int = 256,
) -> TensorMap:
    """Return the map of the tensor at a device address; see `TensorMapEncoder`."""
    encoder = TensorMapEncoder(dtype, shape, box, strides=strides, swizzle=swizzle, l2_promotion=l2_promotion)
    return TensorMap(encoder(pointer))
