"""Whole steps of two models in alternation; nothing is flushed: what L2 keeps, it keeps for both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.intervals import Pairs


def alternate(base: Callable[[], None], ours: Callable[[], None], calls: int, blocks: int) -> Pairs:
    """Time blocks of `calls` calls in alternation; µs per call."""
    times = np.zeros((2, blocks))
    for block in range(blocks):
        order = (0, 1) if block % 2 == 0 else (1, 0)
        for index in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            (base, ours)[index]()
            end.record()
            torch.cuda.synchronize()
            times[index, block] = 1e3 * start.elapsed_time(end) / calls
    return Pairs(times[0], times[1], 0.0)


def speeds(pairs: Pairs, per_call: int) -> dict[str, float]:
    """Items per second of both sides and their ratio with its 95 % interval."""
    ratio = pairs.raw_ratio()
    return {
        "bf16_us": pairs.base_us,
        "packed_us": pairs.ours_us,
        "bf16_per_s": per_call / pairs.base_us * 1e6,
        "packed_per_s": per_call / pairs.ours_us * 1e6,
        "x": ratio.value,
        "x_low": ratio.low,
        "x_high": ratio.high,
    }
