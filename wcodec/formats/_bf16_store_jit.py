"""Compiled loops of `bf16-store`: weights to two byte planes and back. Simple enough for the vectoriser."""

from __future__ import annotations

from typing import Any

import numpy as np

from wcodec._compiled import compiled


@compiled()
def split(bits: Any, exponents: Any, rest: Any) -> None:
    """Split uint16 `bits` (1-D) into exponent bytes and sign-and-mantissa bytes (uint8, 1-D)."""
    for i in range(bits.size):
        word = bits[i]
        exponents[i] = np.uint8((word >> np.uint16(7)) & np.uint16(0xFF))
        rest[i] = np.uint8(((word >> np.uint16(8)) & np.uint16(0x80)) | (word & np.uint16(0x7F)))


@compiled()
def join(exponents: Any, rest: Any, bits: Any) -> None:
    """Undo `split`."""
    for i in range(bits.size):
        high = np.uint16(rest[i])
        sign = np.uint16((high & np.uint16(0x80)) << np.uint16(8))
        bits[i] = sign | np.uint16(np.uint16(exponents[i]) << np.uint16(7)) | (high & np.uint16(0x7F))
