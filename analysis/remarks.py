"""What is odd about block-scaled weights, in a few lines per source, however many tensors it concerns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wcodec.analysis.findings import TensorReport
from wcodec.analysis.grouping import BLOCKS, Stored
from wcodec.analysis.nvfp4 import orphans, unscaled


def remarks(reports: Sequence[TensorReport], stored: Sequence[Stored]) -> Iterator[str]:
    """Say which tensors have flags and which lack their siblings; none of it is an error.

    Parameters
    ----------
    reports : sequence of TensorReport
        Of one source.
    stored : sequence of Stored
        All its stored tensors; empty where some were left out, so that nothing can be called missing.
    """
    flagged = [f"{t.name}: {', '.join(t.flags)}{' in a sample' * t.sampled}" for t in reports if t.flags]
    if flagged:
        yield _line(flagged, "tensors with flags") + "; flagged tensors are kept as they are"
    used = {name for t in reports if t.kind in BLOCKS for name in t.parts}
    lonely = orphans(stored, used)
    if lonely:
        yield _line(
            [f"{name}: block scales without a weight that they fit" for name in lonely], "such scales"
        )
    codes = unscaled(stored, used)
    if codes:
        yield _line([f"{name}: 4-bit codes without block scales that fit" for name in codes], "such tensors")


def _line(texts: Sequence[str], others: str) -> str:
    more = len(texts) - 1
    return texts[0] + (f" (and {more} more {others})" if more else "")
