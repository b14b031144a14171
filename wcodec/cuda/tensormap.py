"""Tensor maps: how the copy engine (TMA) is told the shape of a tensor in device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from wcodec.cuda import driver
from wcodec.errors import WCodecError

_BYTES = 128
_DTYPES = {
    "u8": ("UINT8", 1),
    "u16": ("UINT16", 2),
    "u32": ("UINT32", 4),
    "bf16": ("BFLOAT16", 2),
    "f16": ("FLOAT16", 2),
    "f32": ("FLOAT32", 4),
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


@dataclass(frozen=True)
class TensorMap:
    """The 128 bytes of a ``CUtensorMap``: a kernel parameter by value, ``__grid_constant__``."""

    data: bytes


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
    """Describe a tensor of up to five dimensions, innermost first.

    Parameters
    ----------
    pointer : int
        Device address, 16-byte aligned.
    dtype : str
        ``u8``, ``u16``, ``u32``, ``bf16``, ``f16`` or ``f32``.
    shape : sequence of int
        Elements per dimension, innermost first. Reads beyond it return zeros.
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
        Where the copy engine cannot address the tensor so.
    """
    name, width = _DTYPES[dtype]
    rank = len(shape)
    if strides is None:
        dense, step = [], width
        for extent in shape[:-1]:
            step *= extent
            dense.append(step)
        strides = dense
    if pointer % 16 or any(stride % 16 for stride in strides):
        raise WCodecError(f"tensor map of unaligned rows: address {pointer:#x}, strides {list(strides)}")
    if not 1 <= rank <= 5 or not len(box) == len(strides) + 1 == rank or not 0 < min(box) <= max(box) <= 256:
        raise WCodecError(f"no tensor map of shape {list(shape)} and box {list(box)}")
    cuda = driver.bindings()
    encoded = driver.call(
        "cuTensorMapEncodeTiled",
        getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        rank,
        pointer,
        [cuda.cuuint64_t(extent) for extent in shape],
        [cuda.cuuint64_t(stride) for stride in strides],
        [cuda.cuuint32_t(extent) for extent in box],
        [cuda.cuuint32_t(1)] * rank,
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle]}"),
        getattr(cuda.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTIONS[l2_promotion]}"),
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return TensorMap(ctypes.string_at(encoded.getPtr(), _BYTES))
