"""Block-scaled weights: grouping by dtype and shape, entropies, windows, flags and verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from wcodec.analysis.nvfp4 import group_logical, inspect, orphans


@dataclass(frozen=True)
class Stored:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = 0


MODELOPT = [
    Stored("a.weight", "U8", (64, 32)),
    Stored("a.weight_scale", "F8_E4M3", (64, 4)),
    Stored("a.weight_scale_2", "F32", ()),
    Stored("a.input_scale", "F32", ()),
]
COMPRESSED = [
    Stored("b.weight_packed", "U8", (64, 32)),
    Stored("b.weight_scale", "F8_E4M3", (64, 4)),
    Stored("b.weight_global_scale", "F32", (1,)),
]
COMPRESSED_MX = [Stored("c.weight_packed", "U8", (64, 32)), Stored("c.weight_scale", "U8", (64, 2))]
GPT_OSS = [Stored("d_blocks", "U8", (4, 64, 2, 16)), Stored("d_scales", "U8", (4, 64, 2))]


def test_layouts_of_four_exporters() -> None:
    found = group_logical([*MODELOPT, *COMPRESSED, *COMPRESSED_MX, *GPT_OSS, Stored("e", "BF16", (64, 64))])
    assert [(t.kind, t.shape, t.codes, t.scale, t.global_scale) for t in found] == [
        ("nvfp4", (64, 64), "a.weight", "a.weight_scale", "a.weight_scale_2"),
        ("nvfp4", (64, 64), "b.weight_packed", "b.weight_scale", "b.weight_global_scale"),
        ("mxfp4", (64, 64), "c.weight_packed", "c.weight_scale", None),
        ("mxfp4", (4, 64, 64), "d_blocks", "d_scales", None),
    ]
    assert found[0].others == ("a.input_scale",)
    assert not any(t.flags for t in found)


def test_missing_siblings_are_flagged() -> None:
    (found,) = group_logical(MODELOPT[:2])
    assert found.flags == ("no global scale beside it",)
    assert orphans(MODELOPT[1:], set()) == ["a.weight_scale"]
    (whole,) = group_logical(MODELOPT)
    assert whole.parts == tuple(t.name for t in MODELOPT)
    assert orphans(MODELOPT, whole.parts) == []


def test_names_alone_decide_nothing() -> None:
    assert group_logical([MODELOPT[0], Stored("a.weight_scale", "F8_E4M3", (64, 5))]) == []
    assert group_logical([MODELOPT[0], Stored("a.weight_scale", "BF16", (64, 4))]) == []


def counts(values: list[int], size: int) -> np.ndarray:
    return np.bincount(values, minlength=size)


def test_entropies_windows_and_verdict() -> None:
    nibbles, scales = np.full(16, 1024), np.zeros(256, dtype=np.int64)
    scales[90:106] = 64
    found = inspect("nvfp4", nibbles, scales)
    assert found.nibble_entropy == pytest.approx(4)
    assert found.scale_entropy == pytest.approx(4)
    assert found.floor_bits_per_weight == pytest.approx(4.25)
    assert found.windows == {16: 0, 32: 0, 64: 0}
    assert found.bits_per_weight == pytest.approx(4.3125)
    assert found.flags == ()
    assert "only the scales can shrink" in found.verdict
    scales[[0, 200]] = 8
    assert inspect("nvfp4", nibbles, scales).windows[64] == pytest.approx(16 / 1040)


def test_what_does_not_pay_stays() -> None:
    found = inspect("nvfp4", np.full(16, 1024), np.full(256, 4))
    assert found.bits_per_weight == 4.5
    assert "leave it as it is" in found.verdict
    assert inspect("mxfp4", np.full(16, 1024), counts([120] * 512, 256)).bits_per_weight == 4.25
    assert inspect("nvfp4", np.zeros(16, np.int64), np.zeros(256, np.int64)).verdict == "no weights"


def test_odd_values_are_flagged() -> None:
    scales = counts([100] * 50 + [0x7F, 0xFF, 0x81, 0x90], 256)
    odd = inspect("nvfp4", np.full(16, 54), scales, np.array([0.0, math.inf, math.nan, -1.0, 2.0]))
    assert odd.flags == (
        "2 NaN scales",
        "2 negative scales",
        "1 zero global scales",
        "1 infinite global scales",
        "1 NaN global scales",
        "1 negative global scales",
    )
    assert inspect("mxfp4", np.full(16, 2), counts([255, 120], 256)).flags == ("1 NaN scales",)
