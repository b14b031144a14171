"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from wcodec import __version__
from wcodec.analysis.blocks import blocks_summary
from wcodec.analysis.cost import ratio
from wcodec.analysis.figures import METRICS, ExponentFigure, HeatMap, exponent_figure, heat_map
from wcodec.analysis.findings import Coverage, TensorReport
from wcodec.analysis.report import Report
from wcodec.analysis.table import window_text
from wcodec.units import bits, count, duration, number, percent, shape_text, shorten, size, visible

#: Tensors in the table, the largest first: browsers slow down with more. CSV and JSON have all.
MAX_ROWS = 2000
#: Characters of a tensor's name in the table, and of a role's beside the heat map.
NAME_ROOM, ROLE_ROOM = 160, 80


def render(report: Report) -> str:
    """Render a report.

    Parameters
    ----------
    report : Report
        Names in it are taken for text, whatever they hold.
    """
    environment = Environment(
        loader=FileSystemLoader(PurePath(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(breakable=_breakable, shorten=shorten, visible=visible)
    environment.filters.update(size=size, count=count, number=number)
    environment.filters.update(percent=percent, duration=duration, bits=bits)
    figure = exponent_figure(report.tensors)
    heat = heat_map(report)
    shown = sorted(report.tensors, key=lambda t: -t.nbytes)[:MAX_ROWS]
    return environment.get_template("report.html.j2").render(
        version=__version__,
        title=visible(", ".join(PurePath(source.path).name or source.path for source in report.sources)),
        report=report,
        bf16=report.bf16,
        counted=not math.isnan(report.bf16.entropy.total),
        saved=ratio(report.nbytes - report.packed_bytes, report.nbytes),
        before_us=report.gpu.read_us(report.nbytes),
        after_us=report.gpu.read_us(report.packed_bytes),
        packed_tensors=sum(t.verdict.action == "pack" for t in report.tensors),
        histogram=_histogram(figure) if figure else None,
        coverage=_coverage(report.bf16.coverage),
        heat=_heat(heat) if heat else None,
        rows=[_row(t) for t in shown],
        name_room=NAME_ROOM,
        role_room=ROLE_ROOM,
        hidden_rows=len(report.tensors) - len(shown),
        pictures=[_picture(t) for t in shown],
        notes=[text for source in report.sources for text in (*source.differences, *source.remarks)],
        nvfp4=blocks_summary(report.tensors),
        sampled=any(t.sampled for t in report.tensors),
    )


def _breakable(name: str) -> Markup:
    """A name that lines may break after its dots and underscores."""
    return Markup("<wbr>").join(re.split(r"(?<=[._])", visible(name)))


def _histogram(figure: ExponentFigure) -> dict[str, Any]:
    """Bars, grid and ticks in percent of the chart's width and height."""
    size = len(figure.counts)
    width = 100 / size
    bars = [
        {
            "x": (i + 0.06) * width,
            "width": 0.88 * width,
            "all": 100 * height,
            "inside": 100 * held,
            "title": f"{_power(figure, i)}: {figure.counts[i]:,} weights",
        }
        for i, (height, held) in enumerate(figure.heights())
        if figure.counts[i]
    ]
    top = math.log10(max(figure.counts) + 1)
    powers = range(0, math.ceil(top), 2 if top > 4 else 1)
    grid = [{"y": 100 * power / top, "label": _round_count(power)} for power in powers]
    # From the right, so that the largest weights have a tick; every other one goes on narrow screens.
    marked = range(size - 1, 2 if figure.pooled else -1, -max(1, round(size / 10)))
    ticks = [
        {"x": (i + 0.5) * width, "power": figure.first + i - 127, "minor": bool(n % 2)}
        for n, i in enumerate(marked)
    ]
    return {"bars": bars, "grid": grid, "ticks": ticks, "pooled": figure.pooled}


def _power(figure: ExponentFigure, i: int) -> str:
    power = f"2^{figure.first + i - 127}"
    return f"up to {power}" if figure.pooled and i == 0 else power


def _round_count(power: int) -> str:
    return f"{10 ** (power % 3)}{('', ' k', ' M', ' B', ' T')[power // 3]}"


def _coverage(coverage: Coverage) -> list[dict[str, Any]]:
    """Weights that windows of each size miss, with bars on a logarithmic scale."""
    missed = {n: 1 - held for n, held in coverage.high_exponent.items()}
    least = math.log10(min((value for value in missed.values() if value > 0), default=0.1)) - 0.5
    return [
        {"size": n, "missed": value, "width": 100 * (1 - math.log10(value) / least) if value > 0 else 0.0}
        for n, value in missed.items()
    ]


def _heat(heat: HeatMap) -> dict[str, Any]:
    spans = {metric.key: heat.span(metric) for metric in METRICS}
    rows = []
    for role in heat.roles:
        cells = []
        for i, layer in enumerate(heat.layers):
            row = heat.cells.get((role, layer))
            if row is None:
                continue
            values = {metric.key: metric.value(row) for metric in METRICS}
            cells.append(
                {
                    "x": i,
                    "shades": {key: _shade(value, *spans[key]) for key, value in values.items()},
                    "title": f"layer {layer}, {visible(role)}: " + ", ".join(_said(values)),
                }
            )
        rows.append({"role": role, "cells": cells})
    legend = [
        {
            "key": metric.key,
            "title": metric.title,
            "low": _value(metric.key, low),
            "high": _value(metric.key, high),
        }
        for metric in METRICS
        for low, high in [spans[metric.key]]
    ]
    return {
        "rows": rows,
        "layers": heat.layers,
        "legend": legend,
        "hidden_roles": heat.hidden_roles,
    }


def _shade(value: float | None, low: float, high: float) -> float:
    return 0.0 if value is None or high <= low else (value - low) / (high - low)


def _value(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    return percent(value) if key == "outside" else bits(value)


def _said(values: dict[str, float | None]) -> list[str]:
    return [
        f"exponent {_value('exponent', values['exponent'])} bits",
        f"{_value('outside', values['outside'])} outside",
        f"{_value('bits', values['bits'])} bits per weight",
    ]


def _row(t: TensorReport) -> dict[str, Any]:
    """Cells of the table: what is shown, and what it is sorted by."""
    outside = t.exceptions.fraction if t.exceptions else math.nan
    cells: list[tuple[str, float]] = [
        (shape_text(t.shape), t.numel),
        (size(t.nbytes), t.nbytes),
        (bits(t.entropy.exponent), t.entropy.exponent),
        (bits(t.floor_bits_per_weight), t.floor_bits_per_weight),
        (window_text(t.window) if t.window else "–", t.window.values[0] if t.window else math.nan),
        (percent(outside), outside),
        (bits(t.bits_per_weight), t.bits_per_weight),
        (f"−{size(t.verdict.saves_bytes)}" if t.verdict.saves_bytes else "–", t.verdict.saves_bytes),
    ]
    return {
        "name": t.name,
        "kind": t.kind,
        "pack": t.verdict.action == "pack",
        "reason": t.verdict.reason,
        "cells": [{"text": text, "key": -1 if math.isnan(key) else key} for text, key in cells],
    }


def _picture(t: TensorReport) -> list[Any]:
    """What the page needs to draw a tensor's exponents: first exponent, counts, window."""
    figure = exponent_figure([t])
    return [figure.first, figure.counts, figure.inside, figure.pooled] if figure else []
