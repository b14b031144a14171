"""Medians and ratios with 95 % intervals, from repeated timings; no GPU needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_interval(values: Sequence[float] | F64) -> Estimate:
    """Median with the 95 % interval between two order statistics: no assumption about the distribution.

    The number of values below the true median is binomial (n, 1/2); the interval is the narrowest symmetric
    pair of ranks that holds it with 95 %.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = ordered.size
    if n == 0:
        raise ValueError("no values")
    below, rank = 0.0, -1
    while rank + 1 < n // 2:  # ranks 0 … rank lie outside
        below += math.comb(n, rank + 1) / 2**n
        if below > 0.025:
            break
        rank += 1
    low = max(rank, 0)
    return Estimate(float(np.median(ordered)), float(ordered[low]), float(ordered[n - 1 - low]))


@dataclass(frozen=True)
class Pairs:
    """Timings of two graphs that were replayed in alternation.

    Attributes
    ----------
    base, ours : numpy.ndarray of float64, shape (repeats,)
        Raw µs; index i of both belongs to the same pair.
    empty : float
        µs of the graph of an empty kernel in the same run.
    """

    base: F64
    ours: F64
    empty: float

    def raw_ratio(self) -> Estimate:
        """How many times faster ours is: median of the pairs' ratios."""
        return median_interval(self.base / self.ours)

    def net_ratio(self) -> Estimate:
        """The same with the fixed cost of a replay taken off both sides."""
        return median_interval((self.base - self.empty) / (self.ours - self.empty))

    @property
    def base_us(self) -> float:
        """Median raw µs of the base."""
        return float(np.median(self.base))

    @property
    def ours_us(self) -> float:
        """Median raw µs of ours."""
        return float(np.median(self.ours))


def ratio_of_sums(loads: Sequence[Sequence[Pairs]], *, net: bool = True, draws: int = 2000) -> Estimate:
    """Geometric mean over loads of (sum of base medians / sum of our medians), with a bootstrap interval.

    Parameters
    ----------
    loads : sequence of sequence of Pairs
        For each load the matrices it multiplies.
    net : bool
        Whether the empty graph's time is taken off every matrix.
    draws : int
        Bootstrap samples; pairs are drawn with replacement, base and ours together.
    """
    rng = np.random.default_rng(0)

    def medians(pairs: Pairs) -> tuple[F64, F64]:
        n = pairs.base.size
        picks = np.concatenate([np.arange(n)[None], rng.integers(0, n, (draws, n))])
        off = pairs.empty if net else 0.0
        return np.median(pairs.base[picks], axis=1) - off, np.median(pairs.ours[picks], axis=1) - off

    logs = np.zeros(draws + 1)
    for load in loads:
        both = [medians(pairs) for pairs in load]
        logs += np.log(sum(base for base, _ in both) / sum(ours for _, ours in both))
    ratios = np.exp(logs / len(loads))
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    return Estimate(float(ratios[0]), float(low), float(high))


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(math.log(value) for value in values) / len(values))
