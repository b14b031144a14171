"""Bits of weights: integer views, histograms, digests and the one cast we make (FP32 to BF16)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]


def as_bits(array: Any) -> U16:
    """View BF16 weights as the integers of their bits, without a conversion.

    Parameters
    ----------
    array : numpy.ndarray or torch.Tensor
        A uint16 (or int16) array of bit patterns, an ``ml_dtypes.bfloat16`` array, or a CPU or CUDA
        ``torch.bfloat16`` tensor (CUDA tensors are copied to the host). Any shape; big-endian arrays are
        converted.

    Returns
    -------
    numpy.ndarray of uint16
        Same shape, little-endian, C-contiguous; a view where the input already is.

    Raises
    ------
    TypeError
        If the elements are not 16-bit BF16 patterns. Floats are refused: casting is the caller's decision.
    """
    if type(array).__module__.split(".")[0] == "torch":
        import torch

        if array.dtype not in (torch.bfloat16, torch.int16, torch.uint16):
            raise TypeError(f"expected a torch.bfloat16 tensor, got {array.dtype}")
        array = array.detach().resolve_neg().cpu().contiguous().view(torch.int16).numpy()
    array = np.asarray(array)
    if array.dtype.kind in "ui" and array.dtype.itemsize == 2:
        return (
            np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            .view(np.uint16)
            .reshape(array.shape)
        )
    if array.dtype.name == "bfloat16":
        return np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)
    raise TypeError(f"expected BF16 weights (uint16 bit patterns or bfloat16), got {array.dtype}")


def bf16_from_f32(values: npt.NDArray[np.float32], out: U16 | None = None) -> U16:
    """Cast FP32 to BF16 bit patterns, rounding to nearest, ties to even; NaN stays NaN.

    Parameters
    ----------
    values : numpy.ndarray of float32
        Any shape.
    out : numpy.ndarray of uint16, optional
        Where to write; same shape.

    Returns
    -------
    numpy.ndarray of uint16
        BF16 bit patterns, same shape.
    """
    u = np.ascontiguousarray(values, dtype="<f4").view(np.uint32).reshape(np.shape(values))
    # Half of the dropped part, less one unless the kept LSB is odd: the carry does the rounding.
    rounded = ((u + (0x7FFF + ((u >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    # A NaN whose payload sits in the dropped half would round to Inf: keep its top bits, set the quiet bit.
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    rounded = np.where(nan, (u >> 16).astype(np.uint16) | np.uint16(0x40), rounded)
    if out is None:
        return rounded
    out[...] = rounded
    return out


def histogram(bits: U16) -> I64:
    """Count how often each of the 65,536 bit patterns occurs.

    Parameters
    ----------
    bits : numpy.ndarray of uint16
        Any shape.

    Returns
    -------
    numpy.ndarray of int64, shape (65536,)
        Histograms of parts of a tensor add up to the histogram of the whole, exactly.
    """
    from wcodec._bits_jit import count_patterns

    counts = np.zeros(65536, dtype=np.int64)
    count_patterns(np.ascontiguousarray(bits).reshape(-1), counts)
    return counts


def byte_histogram(data: U8) -> I64:
    """Count how often each byte occurs.

    Parameters
    ----------
    data : numpy.ndarray of uint8
        Any shape.

    Returns
    -------
    numpy.ndarray of int64, shape (256,)
        Those of parts of a tensor add up, as those of `histogram` do.
    """
    from wcodec._bits_jit import count_bytes

    counts = np.zeros(256, dtype=np.int64)
    count_bytes(np.ascontiguousarray(data).reshape(-1), counts)
    return counts


def digest(data: Any) -> bytes:
    """xxh3-128 of a tensor's bytes in the canonical (big-endian) form.

    Parameters
    ----------
    data : bytes-like or numpy.ndarray
        C-contiguous.

    Returns
    -------
    bytes
        16 bytes.
    """
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_digest(data)
