"""Compiled loops of `bf16-store`: weights to rest bytes and exponents or symbols, and back."""

# mypy: ignore-errors
# (numba types what is below itself)

from __future__ import annotations

from typing import Any

import numpy as np

from wcodec._compiled import compiled
from wcodec.formats._bf16_store_simd import ESCAPE, GROUP, join_group, split_group
from wcodec.formats._bf16_w12_jit import as_word


@compiled(inline="always")
def _exponent(word):
    return np.uint8((word >> np.uint16(7)) & np.uint16(0xFF))


@compiled(inline="always")
def _rest(word):
    """Sign and mantissa."""
    return np.uint8(((word >> np.uint16(8)) & np.uint16(0x80)) | (word & np.uint16(0x7F)))


@compiled(inline="always")
def _weight(exponent, rest):
    high = np.uint16(rest)
    sign = np.uint16((high & np.uint16(0x80)) << np.uint16(8))
    return sign | np.uint16(np.uint16(exponent) << np.uint16(7)) | (high & np.uint16(0x7F))


@compiled()
def split(bits: Any, exponents: Any, rest: Any) -> None:
    """Split uint16 `bits` (1-D) into exponent bytes and sign-and-mantissa bytes (uint8, 1-D)."""
    for i in range(bits.size):
        word = bits[i]
        exponents[i] = _exponent(word)
        rest[i] = _rest(word)


@compiled()
def join(exponents: Any, rest: Any, bits: Any) -> None:
    """Undo `split`."""
    for i in range(bits.size):
        bits[i] = _weight(exponents[i], rest[i])


@compiled()
def exponent_counts(bits: Any, step: int) -> Any:
    """How often each exponent occurs among every `step`-th weight."""
    counts = np.zeros(256, dtype=np.int64)
    for i in range(0, bits.size, step):
        counts[_exponent(bits[i])] += 1
    return counts


@compiled()
def split_pairs(bits: Any, table: Any, rest: Any, pairs: Any, escapes: Any) -> int:
    """Split weights into rest bytes and two symbols per byte, the first in the low half.

    Parameters
    ----------
    bits : uint16, 1-D
    table : uint8
        The exponents of the first fifteen symbols, each once.
    rest, pairs, escapes : uint8, 1-D
        Written; `escapes` gets the exponents that have no symbol of their own.

    Returns
    -------
    int
        Number of escapes; -1 if there are more than fit.
    """
    first, second = as_word(table[:8]), as_word(table[8:])
    source, other = np.uint64(bits.ctypes.data), np.uint64(rest.ctypes.data)
    target = np.uint64(pairs.ctypes.data)
    count = 0
    groups = bits.size // GROUP
    for group in range(groups):
        at = np.uint64(group * GROUP)
        escaped = split_group(
            source + (at << np.uint64(1)), other + at, target + (at >> np.uint64(1)), first, second
        )
        if escaped:
            for i in range(group * GROUP, (group + 1) * GROUP):
                if _symbol(pairs, i) == ESCAPE:
                    if count == escapes.size:
                        return -1
                    escapes[count] = _exponent(bits[i])
                    count += 1
    for i in range(groups * GROUP, bits.size):
        exponent = _exponent(bits[i])
        rest[i] = _rest(bits[i])
        symbol = np.uint8(0)
        while symbol < ESCAPE and table[symbol] != exponent:
            symbol += np.uint8(1)
        if symbol == ESCAPE:
            if count == escapes.size:
                return -1
            escapes[count] = exponent
            count += 1
        if i & 1:
            pairs[i >> 1] |= symbol << np.uint8(4)
        else:
            pairs[i >> 1] = symbol
    return count


@compiled()
def _symbol(pairs: Any, i: int) -> Any:
    """Symbol of weight `i`."""
    return (pairs[i >> 1] >> np.uint8(4 * (i & 1))) & np.uint8(15)


@compiled()
def join_pairs(pairs: Any, table: Any, escapes: Any, rest: Any, bits: Any) -> int:
    """Undo `split_pairs`; `table` holds the exponents of the first fifteen symbols.

    Returns
    -------
    int
        Number of escapes used; -1 if `escapes` are too few or a symbol follows the last weight.
    """
    if bits.size % 2 and pairs[bits.size >> 1] >> np.uint8(4):
        return -1
    first, second = as_word(table[:8]), as_word(table[8:])
    source, other = np.uint64(pairs.ctypes.data), np.uint64(rest.ctypes.data)
    target = np.uint64(bits.ctypes.data)
    used = 0
    groups = bits.size // GROUP
    for group in range(groups):
        at = np.uint64(group * GROUP)
        escaped = join_group(
            source + (at >> np.uint64(1)), other + at, target + (at << np.uint64(1)), first, second
        )
        if escaped:
            for i in range(group * GROUP, (group + 1) * GROUP):
                if _symbol(pairs, i) == ESCAPE:
                    if used == escapes.size:
                        return -1
                    bits[i] |= np.uint16(np.uint16(escapes[used]) << np.uint16(7))
                    used += 1
    for i in range(groups * GROUP, bits.size):
        symbol = _symbol(pairs, i)
        if symbol < ESCAPE:
            exponent = table[symbol]
        elif used < escapes.size:
            exponent = escapes[used]
            used += 1
        else:
            return -1
        bits[i] = _weight(exponent, rest[i])
    return used
