"""Rows of a report for people: the same tensor of every layer folded into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wcodec.analysis.blocks import blocks_reason
from wcodec.analysis.cost import ratio
from wcodec.analysis.fields import Entropy
from wcodec.analysis.findings import TensorReport
from wcodec.analysis.names import place
from wcodec.analysis.totals import mean_entropy

#: Tensors up to which every one gets a row of its own.
FEW = 40


@dataclass(frozen=True)
class Row:
    """One tensor, or the same tensor of several layers.

    Attributes
    ----------
    name : str
        Name, with ``*`` for the layer where there are several.
    tensors : tuple of TensorReport
    """

    name: str
    tensors: tuple[TensorReport, ...]

    @property
    def first(self) -> TensorReport:
        """The first of the tensors: all share its kind and its shape."""
        return self.tensors[0]

    @property
    def entropy(self) -> Entropy:
        """Mean, weighted by weights."""
        return mean_entropy([t for t in self.tensors if t.numel])

    @property
    def weights(self) -> int:
        """Weights of all."""
        return sum(t.numel for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all as they are."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all as ``wcodec pack`` would write them."""
        return sum(t.packed_bytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits that ``wcodec pack`` would write per weight."""
        return ratio(8 * self.packed_bytes, self.weights)

    @property
    def ratio(self) -> float:
        """Packed size over original size."""
        return ratio(self.packed_bytes, self.nbytes)

    @property
    def exception_fraction(self) -> float | None:
        """Weights outside their tensor's window; None where no tensor has one."""
        windowed = [(t, t.exceptions) for t in self.tensors if t.exceptions is not None]
        if not windowed:
            return None
        return ratio(sum(e.count for _, e in windowed), sum(t.numel for t, _ in windowed))

    @property
    def exponent_counts(self) -> list[int]:
        """Weights per exponent of all; empty where none was counted."""
        counted = [t.exponent_counts for t in self.tensors if t.exponent_counts]
        total: list[int] = np.sum(np.array(counted, np.int64), axis=0).tolist() if counted else []
        return total

    @property
    def action(self) -> str:
        """``pack``, ``leave``, or how many are packed where layers differ."""
        packed = sum(t.verdict.action == "pack" for t in self.tensors)
        if packed in (0, len(self.tensors)):
            return self.first.verdict.action
        return f"pack {packed} of {len(self.tensors)}"

    @property
    def reason(self) -> str:
        """Why tensors are left; empty where all are packed."""
        if len(self.tensors) > 1 and self.first.blocks is not None:
            return blocks_reason(self.tensors)
        return next((t.verdict.reason for t in self.tensors if t.verdict.action == "leave"), "")

    @property
    def saves_bytes(self) -> int:
        """Bytes that packing saves."""
        return sum(t.verdict.saves_bytes for t in self.tensors)

    @property
    def saves_us(self) -> float:
        """Microseconds less to read all of them once."""
        return sum(t.verdict.read_us - t.verdict.packed_read_us for t in self.tensors)


def single_rows(tensors: Sequence[TensorReport]) -> list[Row]:
    """One row per tensor."""
    return [Row(t.name, (t,)) for t in tensors]


def folded_rows(tensors: Sequence[TensorReport]) -> list[Row]:
    """One row per role: tensors whose names differ in numbers only and that share kind and shape."""
    folded: dict[tuple[str, str, tuple[int, ...]], list[TensorReport]] = {}
    for t in tensors:
        folded.setdefault((place(t.name).pattern, t.kind, t.shape), []).append(t)
    return [
        Row(pattern if len(members) > 1 else members[0].name, tuple(members))
        for (pattern, _, _), members in folded.items()
    ]


def by_block_kind(rows: Sequence[Row]) -> list[Row]:
    """Rows with those of block-scaled kinds folded into one per kind: their reasons differ in figures."""
    folded: dict[str, list[TensorReport]] = {}
    for row in rows:
        if row.first.blocks is not None:
            folded.setdefault(row.first.kind, []).extend(row.tensors)
    others = [row for row in rows if row.first.blocks is None]
    return others + [Row(kind, tuple(members)) for kind, members in folded.items()]


def sparkline(counts: Sequence[int], width: int = 16) -> str:
    """The busiest `width` neighbouring values as bars whose height is the logarithm of the count.

    Parameters
    ----------
    counts : sequence of int
        Weights per exponent.
    width : int
        Characters.
    """
    if not any(counts):
        return ""
    values = np.asarray(counts, np.float64)
    below = np.concatenate([np.zeros(1), np.cumsum(values)])
    start = int(np.argmax(below[width:] - below[:-width])) if values.size > width else 0
    shown = values[start : start + width]
    heights = np.log1p(shown) / np.log1p(shown.max())
    return "".join(" ▁▂▃▄▅▆▇█"[round(height * 8)] for height in heights)
