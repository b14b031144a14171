"""Element types by their safetensors names: width, bit fields, and the integers that hold the bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type.

    Parameters
    ----------
    name : str
        Safetensors name, for example ``"BF16"``.
    bits : int
        Bits per element. Types narrower than a byte are stored densely, two F4 elements to a byte;
        shapes count elements, not bytes.
    kind : str
        ``"float"``, ``"int"``, ``"uint"``, ``"bool"`` or ``"complex"``.
    fields : tuple of int, optional
        Widths in bits of (sign, exponent, mantissa), most significant first; floats only.
    value : numpy.dtype, optional
        NumPy's own little-endian type for the values, where it has one.
    """

    name: str
    bits: int
    kind: str
    fields: tuple[int, int, int] | None = None
    value: np.dtype[Any] | None = None

    @property
    def words(self) -> np.dtype[Any]:
        """Unsigned little-endian integers that hold one element each; bytes where elements are narrower."""
        return np.dtype(f"<u{max(self.bits // 8, 1)}")

    @property
    def unit(self) -> int:
        """Bytes of the smallest whole number of elements that fills whole bytes (F6: 3 bytes, 4 elements)."""
        return math.lcm(self.bits, 8) // 8


def _float(name: str, sign: int, exponent: int, mantissa: int, value: str | None = None) -> Dtype:
    bits = sign + exponent + mantissa
    return Dtype(name, bits, "float", (sign, exponent, mantissa), np.dtype(value) if value else None)


_ALL = (
    Dtype("BOOL", 8, "bool", value=np.dtype("?")),
    _float("F4", 1, 2, 1),
    _float("F6_E2M3", 1, 2, 3),
    _float("F6_E3M2", 1, 3, 2),
    _float("F8_E4M3", 1, 4, 3),
    _float("F8_E5M2", 1, 5, 2),
    _float("F8_E4M3FNUZ", 1, 4, 3),
    _float("F8_E5M2FNUZ", 1, 5, 2),
    _float("F8_E8M0", 0, 8, 0),
    _float("BF16", 1, 8, 7),
    _float("F16", 1, 5, 10, "<f2"),
    _float("F32", 1, 8, 23, "<f4"),
    _float("F64", 1, 11, 52, "<f8"),
    Dtype("C64", 64, "complex", value=np.dtype("<c8")),
    *(Dtype(f"U{8 * n}", 8 * n, "uint", value=np.dtype(f"<u{n}")) for n in (1, 2, 4, 8)),
    *(Dtype(f"I{8 * n}", 8 * n, "int", value=np.dtype(f"<i{n}")) for n in (1, 2, 4, 8)),
)

DTYPES: dict[str, Dtype] = {dtype.name: dtype for dtype in _ALL}
"""Every type of the safetensors format by name. A name that is not here is opaque: bytes without elements."""

_FROM_NUMPY = {dtype.value.str: dtype.name for dtype in _ALL if dtype.value is not None}


def numel(shape: Iterable[int]) -> int:
    """Number of elements of a shape; 1 for the empty shape. Exact for any size."""
    return math.prod(shape)


def from_numpy(dtype: np.dtype[Any]) -> str | None:
    """Safetensors name of a NumPy type, whatever its byte order; None where there is none.

    Sixteen-bit integers stay integers: nothing in a NumPy file says that they are BF16.
    """
    return _FROM_NUMPY.get(dtype.newbyteorder("<").str)
