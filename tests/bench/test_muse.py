"""The summary of the projection bench, from made-up timings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench import muse_bf16_proj as muse  # noqa: E402
from bench.harness import Row  # noqa: E402
from bench.intervals import Pairs, geometric_mean  # noqa: E402


def measured(shape: str, tokens: int, base: float, ours: float, policy: str = "packed") -> muse.Measured:
    pairs = Pairs(np.full(20, base + 3.0), np.full(20, ours + 3.0), 3.0)
    row = Row(shape, "F.linear", *[1.0] * 4, pairs.raw_ratio(), pairs.net_ratio(), 1, *[1.0] * 4)
    return muse.Measured(policy, shape, tokens, "gemv", pairs, row)


def test_a_load_sums_its_five_matrices_and_takes_the_slice_only_at_one_token() -> None:
    items = [measured(shape, m, 10.0, 5.0) for shape in muse.SHAPES for m in muse.LOADS]
    items = [item for item in items if item.shape != "slice" or item.tokens == 1]
    items[0] = measured("qkv_gate", 1, 20.0, 5.0)  # the first: one of five at one token
    summary = muse.summarise(items)
    assert summary["packed load 1"].value == pytest.approx(60 / 25)
    assert summary["packed load 8"].value == pytest.approx(2)
    assert summary["packed six loads"].value == pytest.approx(geometric_mean([2.4, 2, 2, 2, 2, 2]))
    assert summary["packed table 1"].value == pytest.approx(geometric_mean([4, 2, 2, 2, 2, 2]))


def test_a_load_with_a_matrix_missing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    summary = muse.summarise([measured("o", 8, 10.0, 8.0, "both"), measured("pooler", 8, 10.0, 5.0, "both")])
    assert set(summary) == {"both table 8"}
    assert (summary["both table 8"].low, summary["both table 8"].high) == (1.25, 2.0)
    assert "least o 1.25" in capsys.readouterr().out


def test_a_time_below_the_read_floor_is_called_out() -> None:
    row = measured("o", 8, 10.0, 5.0).row
    assert row.is_cold
    assert "NOT COLD" not in str(row)
    warm = dataclasses.replace(row, base_floor_raw=1.1)
    assert not warm.is_cold
    assert "NOT COLD" in str(warm)
