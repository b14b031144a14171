"""Compiled loops of `wcodec.bits`: kept apart so that importing wcodec does not import numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from wcodec._compiled import compiled


@compiled()
def count_patterns(bits: Any, counts: Any) -> None:
    """Add the histogram of uint16 `bits` (1-D) to int64 `counts` (65,536)."""
    # 32-bit counters halve the cache footprint (6.3 against 4.7 GB/s); a round ends before they can wrap.
    # Several tables taking turns were slower: weights are spread enough that neighbours rarely collide.
    round_size = 1 << 31
    table = np.zeros(65536, dtype=np.uint32)
    for start in range(0, bits.size, round_size):
        for i in range(start, min(bits.size, start + round_size)):
            table[bits[i]] += np.uint32(1)
        for k in range(65536):
            counts[k] += np.int64(table[k])
            table[k] = 0


@compiled()
def count_bytes(data: Any, counts: Any) -> None:
    """Add the histogram of uint8 `data` (1-D) to int64 `counts` (256)."""
    # Bytes of a tensor are often alike, so that neighbours hit one counter: eight tables take turns to hide
    # its latency.
    tables = np.zeros((8, 256), dtype=np.int64)
    words = data[: data.size // 8 * 8].view(np.uint64)
    for i in range(words.size):
        for j in range(8):
            tables[j, words[i] >> np.uint64(8 * j) & np.uint64(0xFF)] += 1
    for i in range(8 * words.size, data.size):
        tables[0, data[i]] += 1
    for j in range(8):
        for value in range(256):
            counts[value] += tables[j, value]
