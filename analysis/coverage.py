"""How many weights a window of a few values would hold."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

#: Window sizes that reports show, in values.
SIZES = tuple(range(4, 17))


def coverage(counts: I64) -> dict[int, float]:
    """Fraction of the weights in the best consecutive window of 4 … 16 values.

    Parameters
    ----------
    counts : int64 array, 1-D
        Weights per value of the exponent, or of the high exponent bits.

    Returns
    -------
    dict of int to float
        By window size, up to the number of values; empty if there are no weights.
    """
    below = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    total = int(below[-1])
    if not total:
        return {}
    starts, ends = _windows(counts.size)
    held = (below[ends] - below[starts]).max(axis=1).tolist()
    return {n: count / total for n, count in zip(SIZES, held, strict=True) if n <= counts.size}


@functools.cache
def _windows(values: int) -> tuple[I64, I64]:
    """First values of all windows, and the values behind their last, a row per size.

    Windows that would run past the end are cut there: they hold no more than the last whole one.
    """
    starts = np.arange(values)[None, :].repeat(len(SIZES), axis=0)
    return starts, np.minimum(starts + np.array(SIZES)[:, None], values)


def high_exponent_counts(exponent: I64) -> I64:
    """Counts of the 7 high exponent bits of BF16 (or FP32) from counts of its 8 exponent bits."""
    counts: I64 = exponent.reshape(-1, 2).sum(axis=1)
    return counts
