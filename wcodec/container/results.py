"""What the operations return: small, picklable facts, never tensor bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """Counts of one file or of a whole directory.

    Attributes
    ----------
    source, destination : Path
        What was read and what was written.
    files : int
        Weight files.
    tensors, packed_tensors : int
        Tensors in all, and those that are packed.
    weights : int
        Elements of all tensors.
    bytes_in, bytes_out : int
        Bytes of the files read and written.
    digest : bytes, optional
        xxh3-128 of the original file; None for a directory.
    seconds : float
        Wall-clock time.
    notes : tuple of str
        Things worth knowing that are no errors.
    left : mapping of str to sequence of str
        Names of tensors that one may miss among the packed, by why they stay as they are.
    """

    source: Path
    destination: Path
    files: int
    tensors: int
    packed_tensors: int
    weights: int
    bytes_in: int
    bytes_out: int
    digest: bytes | None
    seconds: float
    notes: tuple[str, ...] = ()
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Bytes out per byte in; NaN for an empty input."""
        return self.bytes_out / self.bytes_in if self.bytes_in else math.nan


@dataclass(frozen=True)
class Verdict:
    """What `verify` found in one file or in a whole directory.

    Attributes
    ----------
    source : Path
        The packed file or directory.
    files, tensors : int
        Weight files and tensors that were decoded.
    nbytes : int
        Bytes of the originals.
    digest : bytes, optional
        xxh3-128 that the packed file names for its original; None for a directory.
    differences : tuple of str
        One line per digest or comparison that does not hold; empty when everything is exact.
    seconds : float
        Wall-clock time.
    notes : tuple of str
        Things worth knowing that are no differences.
    """

    source: Path
    files: int
    tensors: int
    nbytes: int
    digest: bytes | None
    differences: tuple[str, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every digest and comparison holds."""
        return not self.differences
