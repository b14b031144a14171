"""What a blob is made of: one tensor, or a weight with its block scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wcodec.readers.safetensors import Entry

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


class Encoder(ABC):
    """Encodes one target; the blob is the head, the bodies in order, and what `finish` returns."""

    #: Bytes of the head, which is written last.
    head_bytes = 0

    @abstractmethod
    def encode(self, data: Sequence[U8]) -> tuple[U8, U32]:
        """Encode whole units of every part, in any thread: their body, and what `append` wants to know."""

    @abstractmethod
    def append(self, body: U8, extra: U32) -> None:
        """Take the next piece, in order; completes `body` in place."""

    def fits(self) -> bool:
        """Whether the format can hold what was appended."""
        return True

    def head(self) -> bytes:
        """The head, once all is appended."""
        return b""

    @abstractmethod
    def finish(self, digest: bytes) -> bytes:
        """What follows the bodies, given the xxh3-128 of the parts' bytes, one part after the other."""


class Target(Protocol):
    """Tensors that may become one blob, under the name of the first."""

    @property
    def parts(self) -> tuple[Entry, ...]:
        """What the blob holds."""
        ...

    @property
    def units(self) -> tuple[int, ...]:
        """Bytes of each part that encode together."""
        ...

    @property
    def others(self) -> tuple[Entry, ...]:
        """Tensors that stay as they are, but are counted before the encoder begins."""
        ...

    def count(self, entry: Entry, data: U8) -> I64 | None:
        """What the encoder must know of `data`, some bytes of `entry`; counts of pieces add up."""
        ...

    def encoder(self, counts: Mapping[str, Any]) -> Encoder | str:
        """An encoder, given the sums of the counts by tensor; or why the tensors had better stay."""
        ...


class Profile(Protocol):
    """Which tensors to pack, and into which format."""

    name: str

    def targets(self, entries: Sequence[Entry]) -> tuple[list[Target], dict[str, list[str]]]:
        """The tensors that may shrink, and names of others that somebody may miss, by why they stay."""
        ...


def left_notes(left: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each reason why tensors stay as they are."""
    lines = []
    for reason, names in left.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        verb, pronoun = ("stay", "they are") if more else ("stays", "it is")
        lines.append(f"{names[0]}{more} {verb} as {pronoun}: {reason}")
    return lines
