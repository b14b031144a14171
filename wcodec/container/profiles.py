"""What a profile packs, and how: the run profile for kernels, the storage profile for disks and networks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wcodec.errors import UnsupportedError
from wcodec.formats import bf16_store
from wcodec.formats.bf16_w12 import OVERFLOW_LIMIT, TILE, Bf16W12, Plan, StreamEncoder, count_high_exponents
from wcodec.readers.safetensors import Entry

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


class Encoder(Protocol):
    """Encodes one tensor; the blob is the head, the bodies in order, and what `finish` returns."""

    #: Bytes of the head, which is written last.
    head_bytes: int

    def encode(self, data: U8) -> tuple[U8, U32]:
        """Encode whole units, in any thread: their body, and what `append` wants to know."""
        ...

    def append(self, body: U8, extra: U32) -> None:
        """Take the next piece, in order; completes `body` in place."""
        ...

    def fits(self) -> bool:
        """Whether the format can hold what was appended."""
        ...

    def head(self) -> bytes:
        """The head, once all is appended."""
        ...

    def finish(self, digest: bytes) -> bytes:
        """What follows the bodies, given the xxh3-128 of the original."""
        ...


class Profile(Protocol):
    """Which tensors to pack, and into which format."""

    name: str

    def unit(self, entry: Entry) -> int:
        """Bytes of the original that encode on their own; 0 for a tensor that cannot shrink."""
        ...

    def count(self, data: U8) -> I64 | None:
        """What the encoder must know of all data before it begins; counts of parts add up."""
        ...

    def encoder(self, entry: Entry, counts: Any) -> Encoder:
        """An encoder for one tensor, given the sum of its counts."""
        ...


class RunProfile:
    """`bf16-w12`: what the fused kernels read."""

    name = "run"

    def unit(self, entry: Entry) -> int:
        """One row tile, where bricks alone make the tensor smaller."""
        if entry.dtype != "BF16" or entry.begin == entry.end:
            return 0
        plan = Plan(tuple(range(8)), 0, entry.shape)
        shrinks = Bf16W12().blob_bytes(plan, 0) < entry.end - entry.begin
        return 2 * TILE * plan.matrix[1] if shrinks else 0

    def count(self, data: U8) -> I64 | None:
        """Counts of the high exponent values, from which the table is chosen."""
        return count_high_exponents(data.view("<u2"))

    def encoder(self, entry: Entry, counts: Any) -> Encoder:
        """See `Profile.encoder`."""
        return _BrickEncoder(Bf16W12().plan_from_counts(counts, entry.shape))


class _BrickEncoder:
    head_bytes = 0

    def __init__(self, plan: Plan) -> None:
        self._stream = StreamEncoder(plan)

    def encode(self, data: U8) -> tuple[U8, U32]:
        return self._stream.encode(data.view("<u2").reshape(-1, self._stream.plan.matrix[1]))

    def append(self, body: U8, extra: U32) -> None:
        self._stream.append(body, extra)

    def fits(self) -> bool:
        return self._stream.overflow_count <= OVERFLOW_LIMIT

    def head(self) -> bytes:
        return b""

    def finish(self, digest: bytes) -> bytes:
        return self._stream.finish(digest)


class StorageProfile:
    """`bf16-store`: the smallest files; loading converts them."""

    name = "storage"

    def unit(self, entry: Entry) -> int:
        """One chunk of any BF16 tensor that has weights."""
        return 2 * bf16_store.CHUNK_WEIGHTS if entry.dtype == "BF16" and entry.end > entry.begin else 0

    def count(self, data: U8) -> I64 | None:
        """Nothing: chunks are coded one by one."""
        return None

    def encoder(self, entry: Entry, counts: Any) -> Encoder:
        """See `Profile.encoder`."""
        return _ChunkEncoder(entry)


class _ChunkEncoder:
    def __init__(self, entry: Entry) -> None:
        self._stream = bf16_store.StreamEncoder(entry.shape)
        self.head_bytes = self._stream.head_bytes

    def encode(self, data: U8) -> tuple[U8, U32]:
        return self._stream.encode(data.view("<u2"))

    def append(self, body: U8, extra: U32) -> None:
        self._stream.append(extra)

    def fits(self) -> bool:
        return True

    def head(self) -> bytes:
        return self._stream.head()

    def finish(self, digest: bytes) -> bytes:
        return self._stream.finish(digest)


PROFILES: dict[str, Profile] = {profile.name: profile for profile in (RunProfile(), StorageProfile())}


def profile_by_name(name: str) -> Profile:
    """The profile called `name`.

    Raises
    ------
    UnsupportedError
        If there is none.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise UnsupportedError(f"no profile {name!r}", mend=f"known: {', '.join(PROFILES)}") from None
