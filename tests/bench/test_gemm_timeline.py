"""The timeline of the wgmma product, from made-up stamps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.gemm_timeline import STAMPS, Timeline


def stamps() -> np.ndarray:
    words = np.zeros((3, len(STAMPS)), np.int64)
    words[:, :7] = 10_000_000 + np.array([0, 1000, 1500, 9000, 9100, 11000, 11500])
    words[1, :7] += 250
    words[2, 4:6] = 0  # no exchange
    words[:, 7] = [5, 9, 131]
    return words


def test_times_begin_with_the_first_cta() -> None:
    timeline = Timeline.of(stamps().reshape(-1))
    assert timeline.at("start").tolist() == [0, 0.25, 0]
    assert timeline.at("end").tolist() == [11.5, 11.75, 11.5]
    assert timeline.sm.tolist() == [5, 9, 131]


def test_a_cta_without_exchange_collects_at_the_end_of_its_loop() -> None:
    timeline = Timeline.of(stamps())
    assert timeline.at("collected").tolist() == [11, 11.25, 9]
    assert "collected 11.00/11.12/11.25" in timeline.summary()


def test_a_stamp_nobody_reached_is_left_out() -> None:
    words = stamps()
    words[:, 4:6] = 0
    assert "collected" not in Timeline.of(words).summary()


def test_the_drawing_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Timeline.of(stamps()).draw(tmp_path / "timeline.png", "made up")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
