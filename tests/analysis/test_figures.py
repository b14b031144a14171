"""The numbers behind the charts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import wcodec
from tests.container.weightfiles import Tensor, gaussian, noise, outliers, write
from wcodec.analysis.figures import MAX_BARS, MAX_ROLES, METRICS, exponent_figure, heat_map
from wcodec.analysis.report import Report


def analyze(folder: Path, tensors: dict[str, Tensor]) -> Report:
    return wcodec.analyze(write(folder / "m.safetensors", tensors))


def test_inside_and_outside_add_up_to_the_exceptions(tmp_path: Path) -> None:
    report = analyze(
        tmp_path, {"a": outliers((256, 192)), "b": gaussian((128, 128)), "raw": noise((128, 128))}
    )
    figure = exponent_figure(report.tensors)
    assert figure is not None
    # Only tensors with a window are drawn: noise would bury what the windows leave out.
    assert sum(figure.counts) == 256 * 192 + 128 * 128
    assert sum(figure.counts) - sum(figure.inside) == report.bf16.exceptions.count > 0
    assert all(0 <= held <= count for count, held in zip(figure.counts, figure.inside, strict=True))


def test_small_exponents_share_the_first_bar(tmp_path: Path) -> None:
    bits = np.frombuffer(gaussian((128, 128))[2], "<u2").reshape(128, 128).copy()
    bits[0, :7] = 0
    (tensor,) = analyze(tmp_path, {"w": ("BF16", (128, 128), bits.tobytes())}).tensors
    figure = exponent_figure([tensor])
    assert figure is not None
    assert figure.pooled
    assert len(figure.counts) == MAX_BARS
    assert sum(figure.counts) == 128 * 128
    assert figure.counts[0] >= 7


def test_a_tensor_without_window_is_drawn_whole(tmp_path: Path) -> None:
    figure = exponent_figure(analyze(tmp_path, {"w": noise((64, 64))}).tensors)
    assert figure is not None
    assert figure.inside == figure.counts


def test_the_heat_map_shows_the_largest_roles(tmp_path: Path) -> None:
    extra = 3
    tensors = {
        f"h.{layer}.r{role}.weight": gaussian((128 if role < extra else 192, 64), layer)
        for role in range(MAX_ROLES + extra)
        for layer in range(2)
    }
    heat = heat_map(analyze(tmp_path, tensors))
    assert heat is not None
    assert heat.roles == tuple(f"r{role}" for role in range(extra, MAX_ROLES + extra))
    assert heat.hidden_roles == extra
    assert {role for role, _ in heat.cells} == set(heat.roles)


def test_nothing_to_draw(tmp_path: Path) -> None:
    report = analyze(tmp_path, {"ids": ("I32", (2,), bytes(8)), "empty": ("BF16", (0,), b"")})
    assert exponent_figure(report.tensors) is None
    assert heat_map(report) is None


def test_heat_map_folds_experts_and_keeps_stacks_apart(tmp_path: Path) -> None:
    tensors = {
        f"{stack}.layers.{i}.mlp.experts.{k}.up.weight": gaussian((128, 64), 10 * i + k)
        for stack in ("encoder", "decoder")
        for i in (0, 1, 5)
        for k in range(2)
    }
    heat = heat_map(analyze(tmp_path, {**tensors, "lm_head.weight": gaussian((128, 64))}))
    assert heat is not None
    assert heat.layers == (0, 1, 5)
    assert heat.roles == ("encoder.layers mlp.experts.*.up", "decoder.layers mlp.experts.*.up")
    assert {len(row.tensors) for row in heat.cells.values()} == {2}
    low, high = heat.span(METRICS[0])
    assert 2 < low <= high < 3


def test_one_layer_is_no_map(tmp_path: Path) -> None:
    assert heat_map(analyze(tmp_path, {"layers.0.w": gaussian((128, 64))})) is None


@pytest.mark.parametrize("bars", [1, 2, 5])
def test_heights_are_between_zero_and_one(tmp_path: Path, bars: int) -> None:
    bits = np.repeat(np.arange(120, 120 + bars, dtype=np.uint16) << 7, 512)
    figure = exponent_figure(analyze(tmp_path, {"w": ("BF16", bits.shape, bits.tobytes())}).tensors)
    assert figure is not None
    assert len(figure.counts) == bars
    assert all(0 < inside <= whole <= 1 for whole, inside in figure.heights())
