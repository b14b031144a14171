"""What an analysis found: per tensor and in all, as objects, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wcodec.analysis.cost import Gpu, Verdict, ratio
from wcodec.analysis.fields import NO_ENTROPY, Entropy

from wcodec import __version__

SCHEMA = "wcodec.analyze/1"


@dataclass(frozen=True)
class Window:
    """The values of the 7 high exponent bits that get a code.

    Attributes
    ----------
    kind : str
        ``"range"`` if the values are consecutive, else ``"table"``.
    values : tuple of int
        Ascending.
    """

    kind: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Exceptions:
    """Weights outside the window; they are stored in patches.

    Attributes
    ----------
    count : int
    fraction : float
        Of the tensor's weights.
    """

    count: int
    fraction: float


@dataclass(frozen=True)
class Coverage:
    """Fraction of the weights that the best window of so many consecutive values holds.

    Attributes
    ----------
    exponent : dict of int to float
        Windows of exponents, by window size.
    high_exponent : dict of int to float
        Windows of values of the 7 high exponent bits, two exponents each.
    """

    exponent: Mapping[int, float]
    high_exponent: Mapping[int, float]


@dataclass(frozen=True)
class TensorReport:
    """One logical tensor.

    Attributes
    ----------
    name, file : str
    dtype : str
        Stored dtype, by its safetensors name.
    kind : str
        ``bf16``, ``nvfp4``, ``fp8``, … (`wcodec.analysis.grouping.Logical`).
    parts : tuple of str
        Stored tensors in it; more than one for block-scaled kinds.
    shape : tuple of int
        Weights along each axis.
    numel : int
        Number of weights.
    nbytes : int
        Bytes as stored now.
    entropy : Entropy
    format : str
        Format that ``wcodec pack`` would use.
    window : Window, optional
        Where the format has one.
    coverage : Coverage, optional
        Where the kind has exponents.
    exceptions : Exceptions, optional
        Where the format has a window.
    packed_bytes : int
        Bytes that ``wcodec pack`` writes for the tensor: its blob and the blob's entry in the file's header;
        a tensor that is left raw counts as it is.
    verdict : Verdict
    exponent_counts : tuple of int
        Weights per value of the exponent; empty where it was not counted.
    sampled : bool
        Whether the figures are estimates from a part of the tensor.
    """

    name: str
    file: str
    dtype: str
    kind: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    entropy: Entropy
    format: str
    window: Window | None
    coverage: Coverage | None
    exceptions: Exceptions | None
    packed_bytes: int
    verdict: Verdict
    exponent_counts: tuple[int, ...] = field(repr=False, default=())
    sampled: bool = False

    @property
    def floor_bits_per_weight(self) -> float:
        """Sum of the fields' entropies: what no coder of separate fields can beat."""
        return self.entropy.total

    @property
    def bits_per_weight(self) -> float:
        """Bits that ``wcodec pack`` would write per weight; NaN for an empty tensor."""
        return ratio(8 * self.packed_bytes, self.numel)

    @property
    def ratio(self) -> float:
        """Packed size over original size; NaN for an empty tensor."""
        return ratio(self.packed_bytes, self.nbytes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in the order of the schema."""
        first, counts = _trim(self.exponent_counts)
        return {
            "name": self.name,
            "file": self.file,
            "dtype": self.dtype,
            "kind": self.kind,
            "parts": list(self.parts),
            "shape": list(self.shape),
            "numel": self.numel,
            "bytes": self.nbytes,
            "entropy": _entropy_dict(self.entropy),
            "floor_bits_per_weight": self.floor_bits_per_weight,
            "format": self.format,
            "window": asdict(self.window) if self.window else None,
            "exceptions": asdict(self.exceptions) if self.exceptions else None,
            "packed_bytes": self.packed_bytes,
            "bits_per_weight": self.bits_per_weight,
            "ratio": self.ratio,
            "coverage": _coverage_dict(self.coverage),
            "exponents": {"first": first, "counts": counts} if counts else None,
            "sampled": self.sampled,
            "verdict": asdict(self.verdict),
        }


@dataclass(frozen=True)
class Bf16Totals:
    """All BF16 tensors together; averages are weighted by weights.

    Attributes
    ----------
    tensors, weights, nbytes, packed_bytes : int
    entropy : Entropy
    exceptions : Exceptions
        Of the tensors that get a window.
    coverage : Coverage
        Every tensor with its own best window.
    """

    tensors: int
    weights: int
    nbytes: int
    packed_bytes: int
    entropy: Entropy
    exceptions: Exceptions
    coverage: Coverage

    @property
    def bits_per_weight(self) -> float:
        """Bits that ``wcodec pack`` would write per weight."""
        return ratio(8 * self.packed_bytes, self.weights)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "tensors": self.tensors,
            "weights": self.weights,
            "bytes": self.nbytes,
            "packed_bytes": self.packed_bytes,
            "ratio": ratio(self.packed_bytes, self.nbytes),
            "entropy": _entropy_dict(self.entropy),
            "floor_bits_per_weight": self.entropy.total,
            "bits_per_weight": self.bits_per_weight,
            "exceptions": asdict(self.exceptions),
            "coverage": _coverage_dict(self.coverage),
        }


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
        """Bytes at the floor; tensors without entropies count as they are."""
        return sum(
            t.nbytes if math.isnan(t.floor_bits_per_weight) else t.floor_bits_per_weight * t.numel / 8
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
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """One line per tensor, with a header line; empty cells where a figure does not apply."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        writer.writerows(_csv_row(t) for t in self.tensors)
        return text.getvalue()

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


CSV_COLUMNS = [
    "name",
    "file",
    "dtype",
    "kind",
    "shape",
    "numel",
    "bytes",
    "h_sign",
    "h_exponent",
    "h_mantissa",
    "h_scale",
    "floor_bits_per_weight",
    "format",
    "window_kind",
    "window_values",
    "exceptions",
    "exception_fraction",
    "packed_bytes",
    "bits_per_weight",
    "ratio",
    "action",
    "saves_bytes",
    "read_us",
    "packed_read_us",
    "reason",
]


def _csv_row(t: TensorReport) -> list[Any]:
    window, exceptions = t.window, t.exceptions
    row = [
        t.name,
        t.file,
        t.dtype,
        t.kind,
        "x".join(map(str, t.shape)),
        t.numel,
        t.nbytes,
        t.entropy.sign,
        t.entropy.exponent,
        t.entropy.mantissa,
        t.entropy.scale,
        t.floor_bits_per_weight,
        t.format,
        window.kind if window else None,
        " ".join(map(str, window.values)) if window else None,
        exceptions.count if exceptions else None,
        exceptions.fraction if exceptions else None,
        t.packed_bytes,
        t.bits_per_weight,
        t.ratio,
        t.verdict.action,
        t.verdict.saves_bytes,
        t.verdict.read_us,
        t.verdict.packed_read_us,
        t.verdict.reason,
    ]
    return ["" if value is None or _is_nan(value) else _inert(value) for value in row]


def _inert(value: Any) -> Any:
    """A cell that spreadsheets show rather than run: tensor names come from strangers' files."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def bf16_totals(tensors: Sequence[TensorReport]) -> Bf16Totals:
    """Totals and weighted averages of BF16 tensors."""
    weights = sum(t.numel for t in tensors)
    filled = [t for t in tensors if t.numel]
    windowed = [(t, t.exceptions) for t in filled if t.exceptions is not None]
    count = sum(exceptions.count for _, exceptions in windowed)
    return Bf16Totals(
        tensors=len(tensors),
        weights=weights,
        nbytes=sum(t.nbytes for t in tensors),
        packed_bytes=sum(t.packed_bytes for t in tensors),
        entropy=mean_entropy(filled),
        exceptions=Exceptions(count, ratio(count, sum(t.numel for t, _ in windowed))),
        coverage=Coverage(
            _mean_coverage((t.coverage.exponent, t.numel) for t in filled if t.coverage),
            _mean_coverage((t.coverage.high_exponent, t.numel) for t in filled if t.coverage),
        ),
    )


def mean_entropy(tensors: Sequence[TensorReport]) -> Entropy:
    """Entropies averaged over the weights of non-empty tensors; NaN for none."""
    weights = sum(t.numel for t in tensors)
    if not weights:
        return NO_ENTROPY

    def mean(name: str) -> float:
        return sum(getattr(t.entropy, name) * t.numel for t in tensors) / weights

    return Entropy(mean("sign"), mean("exponent"), mean("mantissa"), mean("scale"))


def _mean_coverage(parts: Iterable[tuple[Mapping[int, float], int]]) -> dict[int, float]:
    total: dict[int, float] = {}
    weights = 0
    for fractions, numel in parts:
        weights += numel
        for size, fraction in fractions.items():
            total[size] = total.get(size, 0.0) + fraction * numel
    return {size: held / weights for size, held in total.items()}


def _entropy_dict(entropy: Entropy) -> dict[str, float]:
    return {**asdict(entropy), "total": entropy.total}


def _coverage_dict(coverage: Coverage | None) -> dict[str, dict[str, float]] | None:
    if coverage is None:
        return None
    return {
        "exponent": {str(size): value for size, value in coverage.exponent.items()},
        "high_exponent": {str(size): value for size, value in coverage.high_exponent.items()},
    }


def _trim(counts: Sequence[int]) -> tuple[int, list[int]]:
    """The first value that occurs, and the counts from it to the last that does."""
    present = [value for value, count in enumerate(counts) if count]
    return (present[0], list(counts[present[0] : present[-1] + 1])) if present else (0, [])


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
