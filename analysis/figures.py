"""The numbers behind the charts, for HTML and PNG alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wcodec.analysis.findings import TensorReport
from wcodec.analysis.names import place
from wcodec.analysis.report import Report
from wcodec.analysis.rows import Row

#: Roles that the heat map shows, those with the most weights first.
MAX_ROLES = 24
#: Exponents that the histogram shows; zero lies far below the others.
MAX_BARS = 32


@dataclass(frozen=True)
class ExponentFigure:
    """Weights per exponent, and how many of them have a code.

    Attributes
    ----------
    first : int
        Exponent (biased, as stored) of the first bar.
    counts : tuple of int
        Weights per exponent from `first` on.
    inside : tuple of int
        Those of them inside their own tensor's window.
    pooled : bool
        Whether the first bar holds all smaller exponents, zero among them, too.
    """

    first: int
    counts: tuple[int, ...]
    inside: tuple[int, ...]
    pooled: bool

    def heights(self) -> list[tuple[float, float]]:
        """Per bar, the heights of all its weights and of those inside, on a logarithmic scale from 0 to 1."""
        top = math.log10(max(self.counts) + 1)
        return [
            (math.log10(count + 1) / top, math.log10(held + 1) / top)
            for count, held in zip(self.counts, self.inside, strict=True)
        ]


def exponent_figure(tensors: Sequence[TensorReport]) -> ExponentFigure | None:
    """Pool the exponents of the BF16 tensors that get a window, or of all where none does.

    None where nothing was counted.
    """
    counted = [t for t in tensors if t.kind == "bf16" and t.exponent_counts]
    counts, inside = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for t in [t for t in counted if t.window] or counted:
        mine = np.array(t.exponent_counts, np.int64)
        counts += mine
        # A tensor that stays raw has no window: none of its weights needs a patch.
        inside += mine if t.window is None else np.where(_in_window(t.window.values), mine, 0)
    if not counts.any():
        return None
    last = int(np.flatnonzero(counts)[-1])
    first = max(int(np.flatnonzero(counts)[0]), last + 1 - MAX_BARS)
    pooled = bool(counts[:first].any())
    counts[first] = counts[: first + 1].sum()
    inside[first] = inside[: first + 1].sum()
    shown = slice(first, last + 1)
    return ExponentFigure(first, tuple(counts[shown].tolist()), tuple(inside[shown].tolist()), pooled)


def _in_window(values: Sequence[int]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(256, np.bool_)
    for value in values:
        mask[2 * value : 2 * value + 2] = True
    return mask


@dataclass(frozen=True)
class Metric:
    """What the heat map can show.

    Attributes
    ----------
    key, title : str
    value : callable
        From a row to the number, None where it does not apply.
    """

    key: str
    title: str
    value: Callable[[Row], float | None]


METRICS = (
    Metric("exponent", "bits in the exponent", lambda row: row.entropy.exponent),
    Metric("outside", "weights outside the window", lambda row: row.exception_fraction),
    Metric("bits", "bits per weight, packed", lambda row: row.bits_per_weight),
)


@dataclass(frozen=True)
class HeatMap:
    """Layers by roles.

    Attributes
    ----------
    layers : tuple of int
    roles : tuple of str
    cells : dict of (role, layer) to Row
        Where a layer has that role; several tensors (experts) are folded.
    hidden_roles : int
        Roles with fewer weights that are not shown.
    """

    layers: tuple[int, ...]
    roles: tuple[str, ...]
    cells: dict[tuple[str, int], Row]
    hidden_roles: int

    def span(self, metric: Metric) -> tuple[float, float]:
        """Smallest and largest value of a metric."""
        values = [value for value in map(metric.value, self.cells.values()) if value is not None]
        return (min(values), max(values)) if values else (math.nan, math.nan)


def heat_map(report: Report) -> HeatMap | None:
    """Fold BF16 matrices by layer and role; None for fewer than two layers."""
    folded: dict[tuple[str, int], list[TensorReport]] = {}
    stacks = {place(t.name).stack for t in report.tensors if place(t.name).layer is not None and t.window}
    for t in report.tensors:
        where = place(t.name)
        if t.kind == "bf16" and t.window is not None and where.layer is not None:
            role = where.role if len(stacks) == 1 else f"{where.stack} {where.role}"
            folded.setdefault((role.removesuffix(".weight"), where.layer), []).append(t)
    layers = sorted({layer for _, layer in folded})
    if len(layers) < 2:
        return None
    cells = {key: Row(key[0], tuple(members)) for key, members in folded.items()}
    weights: dict[str, int] = {}
    for (role, _), row in cells.items():
        weights[role] = weights.get(role, 0) + row.weights
    kept = sorted(weights, key=lambda role: -weights[role])[:MAX_ROLES]
    roles = tuple(role for role in weights if role in kept)
    shown = {key: row for key, row in cells.items() if key[0] in roles}
    return HeatMap(tuple(layers), roles, shown, len(weights) - len(roles))
