"""Sign, exponent and mantissa of every float kind: counting them exactly, and their entropies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wcodec.bits import byte_histogram, histogram
from wcodec.dtypes import DTYPES

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

#: Elements below which clearing 65,536 counters would cost more than counting.
FEW = 16384


@dataclass(frozen=True)
class Layout:
    """Widths of a float's fields, from the most significant bit down.

    Attributes
    ----------
    sign, exponent, mantissa : int
        Bits of each field.
    """

    sign: int
    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return self.sign + self.exponent + self.mantissa


#: Layouts of the floats that are counted, by safetensors dtype name. F6 elements straddle bytes and are not.
LAYOUTS = {
    dtype.name: Layout(*dtype.fields)
    for dtype in DTYPES.values()
    if dtype.fields is not None and dtype.bits in (4, 8, 16, 32, 64)
}


@dataclass(frozen=True)
class Entropy:
    """Order-0 entropies of a tensor's fields, in bits per weight; NaN where there is nothing to count.

    Attributes
    ----------
    sign, exponent, mantissa : float
        Entropy of each field's own distribution; for a mantissa over several 16-bit words, their sum.
    scale : float
        Block scales' entropy shared among the weights of a block; 0 for formats without block scales.
    """

    sign: float
    exponent: float
    mantissa: float
    scale: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts: what coding each field on its own, perfectly, would take."""
        return self.sign + self.exponent + self.mantissa + self.scale


NO_ENTROPY = Entropy(math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class FieldCounts:
    """How often each value of each field occurs; counts of parts of a tensor add up exactly.

    Attributes
    ----------
    sign : int64 array, (2,) or (1,)
    exponent : int64 array, (2 ** exponent bits,)
    mantissa : tuple of int64 arrays
        One per 16-bit word that holds mantissa bits, most significant first.
    """

    sign: I64
    exponent: I64
    mantissa: tuple[I64, ...]

    def __add__(self, other: FieldCounts) -> FieldCounts:
        return FieldCounts(
            self.sign + other.sign,
            self.exponent + other.exponent,
            tuple(a + b for a, b in zip(self.mantissa, other.mantissa, strict=True)),
        )

    @property
    def total(self) -> int:
        """Elements counted."""
        return int(self.exponent.sum())

    def entropy(self) -> Entropy:
        """Entropies of the three fields."""
        if not self.total:
            return NO_ENTROPY
        mantissa = sum((entropy(piece) for piece in self.mantissa), 0.0)
        return Entropy(entropy(self.sign), entropy(self.exponent), mantissa)


def entropy(counts: I64) -> float:
    """Order-0 entropy of a distribution, -Σ p log2 p.

    Parameters
    ----------
    counts : numpy.ndarray of int64
        Occurrences of each symbol.

    Returns
    -------
    float
        Bits per symbol; NaN if nothing was counted.
    """
    present = counts[counts > 0].astype(np.float64)
    if not present.size:
        return math.nan
    p = present / present.sum()
    return max(0.0, float(-(p * np.log2(p)).sum()))


def fold(patterns: I64, layout: Layout) -> FieldCounts:
    """Marginal counts of the fields from counts of whole bit patterns.

    Parameters
    ----------
    patterns : int64 array, (2 ** layout.bits,)
        Occurrences of each bit pattern, of a layout of at most 16 bits.
    layout : Layout
        Where the fields lie.
    """
    table = patterns.reshape(1 << (layout.sign + layout.exponent), 1 << layout.mantissa)
    top = table.sum(axis=1).reshape(1 << layout.sign, 1 << layout.exponent)
    return FieldCounts(top.sum(axis=1), top.sum(axis=0), (table.sum(axis=0),))


def _count_words(words: npt.NDArray[np.uint16], layout: Layout) -> FieldCounts:
    """Count the fields of 32- and 64-bit floats, whose top 16 bits hold sign, exponent and some mantissa.

    Parameters
    ----------
    words : uint16 array, (elements, layout.bits / 16)
        The elements' 16-bit words, least significant first, as they lie in a little-endian file.
    layout : Layout
        Of 32 or 64 bits.
    """
    top = Layout(layout.sign, layout.exponent, 16 - layout.sign - layout.exponent)
    counts = fold(histogram(words[:, -1]), top)
    rest = tuple(histogram(words[:, i]) for i in range(words.shape[1] - 2, -1, -1))
    return FieldCounts(counts.sign, counts.exponent, counts.mantissa + rest)


def nibble_histogram(data: U8) -> I64:
    """Count the 4-bit codes of packed bytes.

    Parameters
    ----------
    data : uint8 array, 1-D
        Two codes a byte.

    Returns
    -------
    numpy.ndarray of int64, shape (16,)
    """
    square = byte_histogram(data).reshape(16, 16)
    counts: I64 = square.sum(axis=0) + square.sum(axis=1)
    return counts


def count_fields(chunks: Iterable[U8], layout: Layout) -> FieldCounts:
    """Count the fields of a tensor, chunk by chunk.

    Parameters
    ----------
    chunks : iterable of uint8 arrays, 1-D
        The tensor's bytes, cut between elements.
    layout : Layout
        The tensor's dtype.
    """
    parts = (_count_chunk(chunk, layout) for chunk in chunks)
    first = next(parts, None)
    return sum(parts, first if first is not None else _count_chunk(np.zeros(0, np.uint8), layout))


def _count_chunk(data: U8, layout: Layout) -> FieldCounts:
    if layout.bits > 16:
        return _count_words(_u16(data).reshape(-1, layout.bits // 16), layout)
    if layout.bits == 8:
        return fold(byte_histogram(data), layout)
    if layout.bits == 4:
        return fold(nibble_histogram(data), layout)
    bits = _u16(data)
    if bits.size >= FEW:
        return fold(histogram(bits), layout)
    return FieldCounts(
        np.bincount(bits >> 15, minlength=2),
        np.bincount((bits >> layout.mantissa) & ((1 << layout.exponent) - 1), minlength=1 << layout.exponent),
        (np.bincount(bits & ((1 << layout.mantissa) - 1), minlength=1 << layout.mantissa),),
    )


def _u16(data: U8) -> npt.NDArray[np.uint16]:
    return data.view("<u2")
