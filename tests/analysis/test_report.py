"""JSON, CSV, HTML, text and PNG of a report."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wcodec
from tests.container.weightfiles import Tensor, gaussian, write
from wcodec.analysis import html
from wcodec.analysis.report import SCHEMA, Report
from wcodec.analysis.rows import folded_rows, sparkline
from wcodec.dtypes import DTYPES
from wcodec.errors import UnsupportedError
from wcodec.units import visible

GOLDEN = Path(__file__).parent / "golden.json"
HOSTILE = "</script><script>alert(1)</script>\"'&{{7*7}}[bold]$x^2$\n=1+1"


def scrambled(shape: tuple[int, ...], seed: int, outliers: int = 0) -> Tensor:
    """BF16 weights from integer arithmetic alone: half in one octave, a quarter in the next"""
    h = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) + np.uint64(seed << 20)
    h *= np.uint64(0x9E3779B97F4A7C15)
    octave = np.array([int(x).bit_length() for x in (h >> np.uint64(40)) & np.uint64(0xFFFFF)], np.uint64)
    bits = (
        (h >> np.uint64(63) << np.uint64(15)) | (octave + np.uint64(102)) << np.uint64(7) | h & np.uint64(127)
    )
    bits[:outliers] = h[:outliers] & np.uint64(0xFFFF)
    return "BF16", shape, bits.astype("<u2").tobytes()


TENSORS: dict[str, Tensor] = {
    **{f"model.layers.{i}.mlp.up.weight": scrambled((128, 64), i) for i in range(3)},
    **{f"model.layers.{i}.mlp.down.weight": scrambled((128, 128), i, outliers=90) for i in range(3)},
    "norm.weight": scrambled((64,), 9),
    "noise": scrambled((64, 128), 9, outliers=8192),
    "ids": ("I64", (2,), bytes(16)),
    "empty": ("F32", (0,), b""),
    "q.weight": ("U8", (8, 16), bytes(range(128))),
    "q.weight_scale": ("F8_E4M3", (8, 2), bytes(range(16))),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return wcodec.analyze(write(tmp_path_factory.mktemp("report") / "m.safetensors", TENSORS))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("hostile") / "a<b>&'\"$.safetensors"
    layers = {f"{HOSTILE}.{i}.{HOSTILE}": gaussian((128, 128), i) for i in range(2)}
    return wcodec.analyze(write(path, {HOSTILE: gaussian((128, 128)), "=cmd": gaussian((4,)), **layers}))


def keys(value: Any) -> Any:
    """The shape of a JSON value: keys and types, lists by their first element."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [keys(value[0])] if value else []
    return type(value).__name__


def test_schema(report: Report) -> None:
    data = json.loads(report.to_json())
    assert data["schema"] == SCHEMA == "wcodec.analyze/1"
    assert list(data["totals"])[:6] == ["tensors", "weights", "bytes", "packed_bytes", "ratio", "floor_ratio"]
    required = {
        "name", "file", "dtype", "kind", "parts", "shape", "numel", "entropy", "floor_bits_per_weight",
        "format", "window", "exceptions", "bits_per_weight", "ratio", "verdict", "coverage",
    }  # fmt: skip
    for tensor in data["tensors"]:
        assert required <= set(tensor)
        assert set(tensor["entropy"]) == {"sign", "exponent", "mantissa", "scale", "total"}
        if tensor["window"] is not None:
            assert len(tensor["window"]["values"]) == 8
            assert tensor["window"]["kind"] in ("range", "table")
            assert set(tensor["exceptions"]) == {"count", "fraction"}
            assert list(tensor["coverage"]["high_exponent"]) == [str(n) for n in range(4, 17)]


def test_the_documentation_names_every_key(report: Report) -> None:
    page = (Path(__file__).parents[2] / "docs" / "analyze.md").read_text()
    data = json.loads(report.to_json())
    totals = data["totals"]
    for group in (data, totals, totals["bf16"], data["sources"][0], data["gpu"], data["tensors"][0]):
        for key in group:
            assert f"`{key}`" in page or f"`{key}[]`" in page, key
    for kind in {t.kind for t in report.tensors}:
        assert f"`{kind}`" in page


def test_nan_is_null(report: Report) -> None:
    text = report.to_json()
    assert not re.search(r"\b(NaN|Infinity)\b", text)
    empty = next(t for t in json.loads(text)["tensors"] if t["name"] == "empty")
    assert empty["ratio"] is None
    assert set(empty["entropy"].values()) == {None}


def portable(report: Report) -> dict[str, Any]:
    """The report as JSON values, without what depends on the machine and the version."""
    folder = json.dumps(str(Path(report.sources[0].path).parent) + "/")[1:-1]
    data: dict[str, Any] = json.loads(report.to_json().replace(folder, ""))
    del data["wcodec"]
    return data


def test_golden_json(report: Report) -> None:
    """The report of a fixed file, kept: a change of any figure or key shows here first."""
    data, want = portable(report), json.loads(GOLDEN.read_text())
    assert keys(data) == keys(want)
    assert data == close(want)


def close(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: close(item) for key, item in value.items()}
    if isinstance(value, list):
        return [close(item) for item in value]
    return pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value


def test_csv_has_a_line_per_tensor(report: Report) -> None:
    lines = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [line["name"] for line in lines] == [t.name for t in report.tensors]
    assert float(lines[0]["h_exponent"]) == report.tensors[0].entropy.exponent
    assert lines[0]["window_values"] == " ".join(map(str, report.tensors[0].window.values))
    empty = next(line for line in lines if line["name"] == "empty")
    assert (empty["ratio"], empty["h_sign"]) == ("", "")


def test_csv_keeps_hostile_names_inert(hostile: Report) -> None:
    lines = list(csv.DictReader(io.StringIO(hostile.to_csv())))
    assert len(lines) == 4
    assert lines[0]["name"] == HOSTILE
    assert lines[1]["name"] == "'=cmd"


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_runs_no_formula(tmp_path: Path, first: str) -> None:
    report = wcodec.analyze(write(tmp_path / "m.safetensors", {f"{first}1+1": gaussian((4,))}))
    (line,) = csv.DictReader(io.StringIO(report.to_csv(), newline=""))
    assert line["name"] == f"'{first}1+1"


class Outline(HTMLParser):
    """Checks nesting, collects text and scripts, and what a page would fetch."""

    VOID = ("meta", "input", "wbr", "br", "link", "img", "hr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.fetched: list[str] = []
        self.feed(page)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.stack and self.stack[-1] == "script" else self.text).append(data)


def test_html_is_well_formed_and_fetches_nothing(report: Report) -> None:
    page = report.to_html()
    outline = Outline(page)
    assert outline.fetched == []
    assert "@import" not in page
    assert "url(" not in page
    text = "".join(outline.text)
    for t in report.tensors:
        assert t.name in text
    assert page.count("<tr data-at") == len(report.tensors)
    assert 'id="exponents"' in page
    assert 'class="heat"' in page


def test_html_takes_hostile_names_for_text(hostile: Report) -> None:
    page = hostile.to_html()
    outline = Outline(page)
    assert len(outline.scripts) == 2  # the data and our own code
    assert "<script>alert" not in page
    assert visible(HOSTILE) in "".join(outline.text)
    assert "49" not in "".join(outline.text).split("{{7*7}}")[0][-4:]
    assert len(json.loads(outline.scripts[0])) == len(hostile.tensors)


STEERING = "a\nb\x1b[31m\u202e"


@pytest.fixture(scope="module")
def steering(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Names that would break lines, colour a terminal or reorder what follows, and very long ones."""
    layers = {f"h.{i}.{STEERING}{'long.' * 60}up": gaussian((128, 128), i) for i in range(2)}
    tensors = {STEERING: gaussian((128, 128)), "": gaussian((64, 64)), **layers}
    path = tmp_path_factory.mktemp("steering") / f"{STEERING}.safetensors"
    return wcodec.analyze(write(path, tensors))


def test_names_cannot_steer_what_shows_them(steering: Report) -> None:
    shown = r"a\nb\x1b[31m\u202e"
    page = "".join(Outline(steering.to_html()).text)
    for text in (steering.to_text(), page):
        assert shown in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "(no name)" in page
    assert max(map(len, page.splitlines())) < 400  # the middle of long names is left out
    assert any(line.startswith(shown) for line in steering.to_text().splitlines())


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_picture(steering: Report) -> None:
    assert steering.to_png().startswith(b"\x89PNG")


def test_html_of_very_many_tensors_shows_the_largest(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_ROWS", 3)
    page = report.to_html()
    assert page.count("<tr data-at") == 3
    assert f"{len(report.tensors) - 3} more are in the CSV" in page
    assert "model.layers.2.mlp.down.weight" in page


def test_text_has_every_tensor_and_the_sum(report: Report, hostile: Report) -> None:
    text = report.to_text()
    for t in report.tensors:
        assert t.name in text
    assert "every bit recoverable" in text
    assert "[bold]$x^2$" in hostile.to_text()


def test_layers_are_folded_by_role_kind_and_shape(report: Report) -> None:
    rows = {row.name: row for row in folded_rows(report.tensors)}
    up = rows["model.layers.*.mlp.up.weight"]
    assert len(up.tensors) == 3
    assert up.packed_bytes == sum(t.packed_bytes for t in up.tensors)
    assert sum(up.exponent_counts) == up.weights == 3 * 128 * 64
    assert sum(len(row.tensors) for row in rows.values()) == len(report.tensors)


@pytest.mark.parametrize("width", [60, 80, 100, 130, 170, 250])
def test_text_fits_the_console(report: Report, width: int) -> None:
    from wcodec.analysis.table import to_text

    lines = to_text(report, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("layers.0" in line and "pack" in line for line in lines)


def test_kinds_of_as_many_bytes_are_in_order(tmp_path: Path) -> None:
    dtypes = ["U8", "F64", "BOOL", "F32", "F16", "I64", "F8_E8M0"]
    tensors = {dtype: (dtype, (8 * 8 // DTYPES[dtype].bits,), bytes(8)) for dtype in dtypes}
    found = wcodec.analyze(write(tmp_path / "m.safetensors", tensors))
    kinds = sorted({t.kind for t in found.tensors})
    assert f" · {' + '.join(kinds).upper()}" in found.to_text()


def test_no_line_ends_in_spaces(report: Report) -> None:
    assert not [line for line in report.to_text().splitlines() if line != line.rstrip()]


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == ""
    assert sparkline([0, 7, 0]) == " █ "
    assert sparkline([1] * 20) == "█" * 16
    assert sparkline([0, 10, 1000, 0]).strip() == "▃█"


def test_png(report: Report, hostile: Report) -> None:
    for each in (report, hostile):
        assert each.to_png().startswith(b"\x89PNG\r\n\x1a\n")


def test_png_without_matplotlib_names_the_extra(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"wcodec\[plot\]"):
        report.to_png()
