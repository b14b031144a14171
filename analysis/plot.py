"""The exponent histogram and the layer × role heat map as a PNG, for papers and model cards."""

from __future__ import annotations

import io
import math
import warnings
from pathlib import PurePath
from typing import Any

import numpy as np

from wcodec.analysis.cost import ratio
from wcodec.analysis.figures import METRICS, ExponentFigure, HeatMap, exponent_figure, heat_map
from wcodec.analysis.report import Report
from wcodec.errors import UnsupportedError
from wcodec.units import bits, percent, shorten, size, visible

#: Characters that fit into ten inches of headline, and beside the heat map.
TITLE_ROOM, ROLE_ROOM = 90, 36
INSIDE, OUTSIDE, WINDOW, INK, SOFT = "#0b7a6b", "#c8372d", "#e3efec", "#1c1d1f", "#6a6d73"


def draw(report: Report) -> bytes:
    """Draw a report.

    Parameters
    ----------
    report : Report

    Returns
    -------
    bytes
        A PNG image.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "drawing needs matplotlib", mend="pip install 'wcodec[plot]', or use --format html"
        ) from None

    exponents, heat = exponent_figure(report.tensors), heat_map(report)
    heights = [0.75, 3.6]  # inches; the heat map grows with its roles
    if heat is not None:
        heights.append(0.9 + 0.3 * len(heat.roles))
    figure = Figure(
        figsize=(10, sum(heights)),
        dpi=160,
        facecolor="white",
    )
    figure.set_layout_engine("constrained", w_pad=0.14, h_pad=0.1)
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    _write_head(parts[0], report)
    _draw_exponents(parts[1].subplots(), exponents, report)
    if heat is not None:
        _draw_heat(parts[2], heat)
    image = io.BytesIO()
    with warnings.catch_warnings():  # names in scripts that the font lacks show boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(image, format="png", metadata={"Software": "wcodec"})
    return image.getvalue()


def _literal(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return visible(text).replace("$", r"\$")


def _write_head(figure: Any, report: Report) -> None:
    names = ", ".join(PurePath(source.path).name or source.path for source in report.sources)
    title = _literal(shorten(names, TITLE_ROOM))
    figure.text(0.02, 0.8, title, va="top", fontsize=13, fontweight="bold", color=INK)
    saved = report.nbytes - report.packed_bytes
    claim = f"{size(report.nbytes)}: nothing here would get smaller"
    if saved > 0:
        sizes = f"{size(report.nbytes)} → {size(report.packed_bytes)}"
        claim = f"{sizes}: {percent(ratio(saved, report.nbytes))} fewer bytes, every bit recoverable"
    figure.text(0.02, 0.38, claim, va="top", fontsize=10.5, color=INSIDE if saved > 0 else SOFT)


def _draw_exponents(axes: Any, figure: ExponentFigure | None, report: Report) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=SOFT, labelsize=9)
    if figure is None:
        axes.set_axis_off()
        axes.text(
            0.5,
            0.5,
            "no BF16 weights were read",
            ha="center",
            va="center",
            color=SOFT,
            transform=axes.transAxes,
        )
        return
    x = figure.first + np.arange(len(figure.counts)) - 127
    counts, inside = np.array(figure.counts), np.array(figure.inside)
    window = _main_window(report)
    if window is not None:
        axes.axvspan(window[0] - 0.5, window[1] + 0.5, color=WINDOW, zorder=0, label="the commonest window")
    axes.bar(x, counts, width=0.86, color=OUTSIDE, label="outside its window: patched", zorder=2)
    axes.bar(x, inside, width=0.86, color=INSIDE, label="inside: 3-bit code", zorder=3)
    axes.set_yscale("log")
    axes.set_ylim(0.7, None)
    axes.set_xlim(x[0] - 0.9, x[-1] + 0.9)
    ticks = x[3 if figure.pooled else 0 :][::-1][:: max(1, len(x) // 10)]
    labels = [f"$2^{{{power}}}$" for power in ticks]
    if figure.pooled:  # the first bar holds everything smaller, zero among it
        ticks, labels = np.append(ticks, x[0]), [*labels, "0…"]
    axes.set_xticks(ticks, labels)
    axes.set_xlabel("power of two of a weight", color=SOFT, fontsize=9)
    axes.set_ylabel("BF16 weights", color=SOFT, fontsize=9)
    entropy = report.bf16.entropy
    axes.set_title(
        f"Exponents: {bits(entropy.exponent, 3)} of 8 bits used,"
        f" {percent(report.bf16.exceptions.fraction)} outside the windows",
        loc="left",
        fontsize=10.5,
        color=INK,
    )
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left")


def _main_window(report: Report) -> tuple[int, int] | None:
    """Powers of two that the range with the most weights spans; None where no tensor has a range."""
    weights: dict[tuple[int, ...], int] = {}
    for t in report.tensors:
        if t.window is not None and t.window.kind == "range":
            weights[t.window.values] = weights.get(t.window.values, 0) + t.numel
    if not weights:
        return None
    values = max(weights, key=lambda key: weights[key])
    return 2 * values[0] - 127, 2 * values[-1] + 1 - 127


def _draw_heat(figure: Any, heat: HeatMap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    axes = figure.subplots()
    metric = METRICS[0]
    grid = np.full((len(heat.roles), len(heat.layers)), math.nan)
    for i, role in enumerate(heat.roles):
        for k, layer in enumerate(heat.layers):
            row = heat.cells.get((role, layer))
            if row is not None:
                grid[i, k] = metric.value(row)
    colors = LinearSegmentedColormap.from_list("wcodec", ["#eef1ee", "#0b6a5e"])
    mesh = axes.pcolormesh(grid, cmap=colors, edgecolors="white", linewidth=1.2)
    axes.invert_yaxis()
    labels = [_literal(shorten(role, ROLE_ROOM)) for role in heat.roles]
    axes.set_yticks(np.arange(len(heat.roles)) + 0.5, labels)
    step = max(1, len(heat.layers) // 16)
    axes.set_xticks(np.arange(0, len(heat.layers), step) + 0.5, heat.layers[::step])
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("layer", color=SOFT, fontsize=9)
    axes.set_title("Bits in the exponent, layer by layer", loc="left", fontsize=10.5, color=INK)
    bar = figure.colorbar(mesh, ax=axes, pad=0.015, aspect=max(8, 3 * len(heat.roles)), fraction=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=SOFT, length=0)
