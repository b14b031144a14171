"""The arithmetic of the benches: medians, intervals, ratios of sums."""

from __future__ import annotations

import numpy as np
import pytest

from bench.intervals import Pairs, geometric_mean, median_interval, ratio_of_sums


@pytest.mark.parametrize(("n", "rank"), [(6, 0), (9, 1), (10, 1), (20, 5), (100, 39)])
def test_the_interval_lies_between_the_tabled_order_statistics(n: int, rank: int) -> None:
    estimate = median_interval(np.arange(n)[::-1])
    assert (estimate.low, estimate.high) == (rank, n - 1 - rank)
    assert estimate.value == (n - 1) / 2


def test_too_few_values_give_the_whole_range() -> None:
    assert median_interval([3.0, 1.0]) == median_interval([1.0, 3.0])
    assert (median_interval([3.0, 1.0]).low, median_interval([3.0, 1.0]).high) == (1.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_the_interval_covers_the_median_about_95_times_in_100() -> None:
    rng = np.random.default_rng(3)
    estimates = [median_interval(rng.exponential(size=41)) for _ in range(2000)]
    covered = np.mean([e.low <= np.log(2) <= e.high for e in estimates])
    assert 0.945 < covered < 0.985


def pairs(base: float, ours: float, empty: float = 3.5, n: int = 50, noise: float = 0.0) -> Pairs:
    rng = np.random.default_rng(int(base * 10))
    return Pairs(base + noise * rng.normal(size=n), ours + noise * rng.normal(size=n), empty)


def test_net_takes_the_empty_graph_off_both_sides() -> None:
    one = pairs(13.5, 8.5)
    assert one.raw_ratio().value == pytest.approx(13.5 / 8.5)
    assert one.net_ratio().value == pytest.approx(10 / 5)


def test_drift_that_both_sides_share_leaves_the_ratio_tight() -> None:
    drift = 1 + 0.5 * np.linspace(0, 1, 60)
    estimate = Pairs(20 * drift, 10 * drift, 0.0).net_ratio()
    assert (estimate.low, estimate.high) == (pytest.approx(2), pytest.approx(2))


def test_a_load_is_the_ratio_of_its_sums_and_loads_are_averaged_geometrically() -> None:
    loads = [[pairs(13.5, 8.5), pairs(23.5, 13.5)], [pairs(7.5, 5.5)]]
    estimate = ratio_of_sums(loads)
    assert estimate.value == pytest.approx(geometric_mean([30 / 15, 4 / 2]))
    assert estimate.low == pytest.approx(estimate.high)


def test_the_bootstrap_interval_widens_with_noise_and_holds_the_truth() -> None:
    calm = ratio_of_sums([[pairs(20, 10, noise=0.05)]])
    rough = ratio_of_sums([[pairs(20, 10, noise=1.0)]])
    assert rough.high - rough.low > 4 * (calm.high - calm.low) > 0
    truth = (20 - 3.5) / (10 - 3.5)
    assert rough.low < truth < rough.high
