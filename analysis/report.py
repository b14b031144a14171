"""Everything an analysis found, as one object that writes itself as JSON, CSV, HTML, text and PNG."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from wcodec import __version__
from wcodec.analysis.cost import Gpu, ratio
from wcodec.analysis.findings import TensorReport
from wcodec.analysis.totals import Bf16Totals, bf16_totals

SCHEMA = "wcodec.analyze/1"


@dataclass(frozen=True)
class SourceReport:
    """One of the paths that were analysed.

    Attributes
    ----------
    path, kind : str
    files : tuple of str
    differences : tuple of str
        Contradictions inside the source that do no harm to the data.
    remarks : tuple of str
        Other things worth knowing.
    """

    path: str
    kind: str
    files: tuple[str, ...]
    differences: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything an analysis found.

    Attributes
    ----------
    sources : tuple of SourceReport
    tensors : tuple of TensorReport
        In the order of the files.
    gpu : Gpu
        Whose memory bandwidth the verdicts assume.
    """

    sources: tuple[SourceReport, ...]
    tensors: tuple[TensorReport, ...]
    gpu: Gpu

    @property
    def weights(self) -> int:
        """Weights of all tensors."""
        return sum(t.numel for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def packed_bytes(self) -> int:
        """Bytes that ``wcodec pack`` would write for all tensors."""
        return sum(t.packed_bytes for t in self.tensors)

    @property
    def floor_bytes(self) -> float:
        """Bytes at the floor; what has no entropies counts as it is. NaN where weights were not read."""
        return sum(
            t.floor_bits_per_weight * t.numel / 8
            if t.sampled or not math.isnan(t.floor_bits_per_weight)
            else t.nbytes
            for t in self.tensors
        )

    @property
    def differences(self) -> list[str]:
        """Contradictions of all sources: what ``--strict`` refuses."""
        return [text for source in self.sources for text in source.differences]

    @property
    def bf16(self) -> Bf16Totals:
        """Totals over the BF16 tensors."""
        return bf16_totals([t for t in self.tensors if t.kind == "bf16"])

    def to_dict(self) -> dict[str, Any]:
        """The report by the schema ``wcodec.analyze/1``; NaN becomes None."""
        report = {
            "schema": SCHEMA,
            "wcodec": __version__,
            "sources": [asdict(source) for source in self.sources],
            "gpu": asdict(self.gpu),
            "totals": {
                "tensors": len(self.tensors),
                "weights": self.weights,
                "bytes": self.nbytes,
                "packed_bytes": self.packed_bytes,
                "ratio": ratio(self.packed_bytes, self.nbytes),
                "floor_ratio": ratio(self.floor_bytes, self.nbytes),
                "bf16": self.bf16.to_dict(),
            },
            "tensors": [t.to_dict() for t in self.tensors],
        }
        finite: dict[str, Any] = _finite(report)
        return finite

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text.

        Parameters
        ----------
        indent : int, optional
            Spaces per level; None for one line.
        """
        text = json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
        return text.encode(errors="backslashreplace").decode()  # paths that are not UTF-8, as JSON escapes

    def to_csv(self) -> str:
        """One line per tensor, with a header line; empty cells where a figure does not apply."""
        from wcodec.analysis.spreadsheet import to_csv

        return to_csv(self.tensors)

    def to_html(self) -> str:
        """One self-contained HTML page."""
        from wcodec.analysis.html import render

        return render(self)

    def to_text(self, *, every: bool = False) -> str:
        """The table that ``wcodec analyze`` prints, without colours.

        Parameters
        ----------
        every : bool
            One line per tensor, however many there are; by default layers are folded where there are many.
        """
        from wcodec.analysis.table import to_text

        return to_text(self, every=every)

    def to_png(self) -> bytes:
        """The exponent histogram and the layer × role heat map as a PNG image.

        Raises
        ------
        UnsupportedError
            If matplotlib is missing.
        """
        from wcodec.analysis.plot import draw

        return draw(self)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
