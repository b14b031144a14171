"""The few calls to the CUDA driver that wcodec makes, as functions that raise instead of returning codes.

Everything goes through cuda-bindings except what happens per matrix and token: ``cuLaunchKernelEx`` and
``cuTensorMapEncodeTiled`` are called by ctypes on prebuilt structures, because the bindings box every field
on every call.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from wcodec.errors import UnsupportedError, WCodecError


@functools.cache
def bindings() -> Any:
    """Return ``cuda.bindings.driver`` with the driver initialised.

    Raises
    ------
    UnsupportedError
        Where cuda-bindings or the NVIDIA driver is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(
            f"cuda-bindings is missing ({error})", mend="pip install 'wcodec[cuda]'"
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:
        raise UnsupportedError(f"no NVIDIA driver ({error})", mend="run on a machine with one") from error
    if int(result) != 0:
        raise UnsupportedError(f"the NVIDIA driver does not start ({result.name})", mend="check nvidia-smi")
    return driver


def call(name: str, *args: Any) -> Any:
    """Call a driver function; return its one value, a tuple of its values, or None."""
    result, *values = getattr(bindings(), name)(*args)
    if int(result) != 0:
        raise WCodecError(f"{name} failed: {result.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


def error_name(code: int) -> str:
    """Return the driver's name of a result code."""
    return str(bindings().CUresult(code).name)


@functools.cache
def primary_context(device: int) -> Any:
    """Return the primary context of a device, the one torch and the CUDA runtime use, and keep it alive."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


INVALID_CONTEXT = 201


def enter_context(device: int) -> None:
    """Make the device's primary context current for good: the first driver call of a thread needs that."""
    call("cuCtxSetCurrent", primary_context(device))


class current_context:  # noqa: N801  (a context manager, named like a function)
    """Make the device's primary context current inside the block."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        call("cuCtxPushCurrent", primary_context(self.device))

    def __exit__(self, *exception: object) -> None:
        call("cuCtxPopCurrent")


# CUlaunchAttributeID, fixed by the driver's ABI.
CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``: an id, padding to 8 bytes, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def function(name: str) -> Any:
    """Return a driver function as a raw C function that returns the result code."""
    bindings()
    return getattr(ctypes.CDLL("libcuda.so.1"), name)
