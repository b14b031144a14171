"""Windows of consecutive values, against the plainest search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcodec.analysis.coverage import SIZES, coverage, high_exponent_counts


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=40))
def test_best_window(counts: list[int]) -> None:
    found = coverage(np.array(counts))
    if not sum(counts):
        assert found == {}
        return
    for size in SIZES:
        if size > len(counts):
            assert size not in found
            continue
        best = max(sum(counts[i : i + size]) for i in range(len(counts) - size + 1))
        assert found[size] == pytest.approx(best / sum(counts))


def test_high_exponents_are_pairs_of_exponents() -> None:
    exponent = np.arange(256)
    assert high_exponent_counts(exponent).tolist() == [4 * i + 1 for i in range(128)]
