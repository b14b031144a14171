"""What was found in one tensor."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wcodec.analysis.cost import Verdict, ratio
from wcodec.analysis.coverage import coverage, high_exponent_counts
from wcodec.analysis.fields import Entropy

if TYPE_CHECKING:
    from wcodec.analysis.nvfp4 import Findings


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
    flags : tuple of str
        What is odd about a block-scaled kind's values and parts, in plain words.
    blocks : Findings, optional
        Nibbles and scale bytes of block-scaled kinds, and what ``nvfp4-s5`` takes.
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
    exceptions: Exceptions | None
    packed_bytes: int
    verdict: Verdict
    exponent_counts: tuple[int, ...] = field(repr=False, default=())
    sampled: bool = False
    flags: tuple[str, ...] = ()
    blocks: Findings | None = None

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

    @functools.cached_property
    def coverage(self) -> Coverage | None:
        """What windows of 4 … 16 values would hold; None where no exponents were counted."""
        counts = np.array(self.exponent_counts, np.int64)
        if not counts.any():
            return None
        wide = counts.size == 256  # only eight-bit exponents have seven high bits
        return Coverage(coverage(counts), coverage(high_exponent_counts(counts)) if wide else {})

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
            "entropy": entropy_dict(self.entropy),
            "floor_bits_per_weight": self.floor_bits_per_weight,
            "format": self.format,
            "window": asdict(self.window) if self.window else None,
            "exceptions": asdict(self.exceptions) if self.exceptions else None,
            "packed_bytes": self.packed_bytes,
            "bits_per_weight": self.bits_per_weight,
            "ratio": self.ratio,
            "coverage": coverage_dict(self.coverage),
            "exponents": {"first": first, "counts": counts} if counts else None,
            **_blocks_dict(self.blocks),
            "flags": list(self.flags),
            "sampled": self.sampled,
            "verdict": asdict(self.verdict),
        }


def _blocks_dict(blocks: Findings | None) -> dict[str, Any]:
    """What only block-scaled kinds have, as JSON-ready values; the keys are there for every tensor."""
    if blocks is None:
        return dict.fromkeys(("nibble_entropy", "scale_entropy", "scale_windows", "nvfp4_s5"))
    packed = {"bytes": blocks.packed_bytes, "bits_per_weight": blocks.bits_per_weight}
    return {
        "nibble_entropy": blocks.nibble_entropy,
        "scale_entropy": blocks.scale_entropy,
        "scale_windows": {str(width): missed for width, missed in blocks.windows.items()},
        "nvfp4_s5": packed if blocks.packed_bytes is not None else None,
    }


def entropy_dict(entropy: Entropy) -> dict[str, float]:
    """Entropies as JSON-ready values, their sum included."""
    return {**asdict(entropy), "total": entropy.total}


def coverage_dict(coverage: Coverage | None) -> dict[str, dict[str, float]] | None:
    """Coverage as JSON-ready values."""
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
