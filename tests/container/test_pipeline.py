"""Parallel work keeps its order and its bounds, and ends when the consumer does."""

from __future__ import annotations

import threading
import time

import pytest

from wcodec.container.pipeline import default_workers, ordered_map, workers_pool


def test_order_is_kept() -> None:
    def slow_first(n: int) -> int:
        time.sleep(0.02 if n == 0 else 0)
        return n * n

    with workers_pool(4) as pool:
        assert list(ordered_map(pool, 100, slow_first, range(50), lambda n: 1)) == [n * n for n in range(50)]
    assert list(ordered_map(None, 1, slow_first, range(5), lambda n: 1)) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize(("budget", "cost", "bound"), [(10, 1, 10), (10, 4, 2), (10, 99, 1)])
def test_no_more_is_in_flight_than_the_budget_allows(budget: int, cost: int, bound: int) -> None:
    begun = taken = most = 0

    def items() -> object:
        nonlocal begun
        for n in range(40):
            begun += 1
            yield n

    with workers_pool(3) as pool:
        for _ in ordered_map(pool, budget, lambda n: n, items(), lambda n: cost):  # type: ignore[arg-type]
            most = max(most, begun - taken)
            taken += 1
    assert taken == 40
    assert most == bound + 1  # one item was asked for and waits until it fits


def test_an_error_stops_what_has_not_begun() -> None:
    ran = []

    def fail(n: int) -> None:
        ran.append(n)
        time.sleep(0.01)
        if n == 1:
            raise ValueError("one")

    before = threading.active_count()
    with pytest.raises(ValueError, match="one"), workers_pool(2) as pool:
        list(ordered_map(pool, 1000, fail, range(1000), lambda n: 1))
    assert len(ran) < 100
    assert threading.active_count() == before


def test_default_workers_follow_the_affinity() -> None:
    assert 1 <= default_workers() <= 32
