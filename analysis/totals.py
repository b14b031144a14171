"""Sums and averages over tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wcodec.analysis.cost import ratio
from wcodec.analysis.fields import NO_ENTROPY, Entropy
from wcodec.analysis.findings import Coverage, Exceptions, TensorReport, coverage_dict, entropy_dict


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
            "entropy": entropy_dict(self.entropy),
            "floor_bits_per_weight": self.entropy.total,
            "bits_per_weight": self.bits_per_weight,
            "exceptions": asdict(self.exceptions),
            "coverage": coverage_dict(self.coverage),
        }


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
