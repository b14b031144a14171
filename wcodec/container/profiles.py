"""What a profile packs, and how: the run profile for kernels, the storage profile for disks and networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wcodec.container.pairs import find_pairs, find_scales
from wcodec.container.targets import I64, U8, U32, Encoder, Profile, Target
from wcodec.errors import UnsupportedError
from wcodec.formats import bf16_store, byte_store
from wcodec.formats._frames import CHUNK
from wcodec.formats.bf16_w12 import OVERFLOW_LIMIT, TILE, Bf16W12, Plan, StreamEncoder, count_high_exponents
from wcodec.readers.safetensors import Entry


class RunProfile:
    """`bf16-w12`, which kernels read, and `nvfp4-s5`."""

    name = "run"

    def targets(self, entries: Sequence[Entry]) -> tuple[list[Target], dict[str, list[str]]]:
        """BF16 tensors whose bricks alone make them smaller, and NVFP4 weights with their block scales."""
        pairs, left = find_pairs(entries)
        matrices = (_Matrix(entry) for entry in entries if entry.dtype == "BF16" and entry.begin < entry.end)
        return [*pairs, *(matrix for matrix in matrices if matrix.shrinks)], left


class _Matrix:
    """A BF16 tensor in bricks; its unit is one row tile."""

    others = ()

    def __init__(self, entry: Entry) -> None:
        plan = Plan(tuple(range(8)), 0, entry.shape)
        self.shrinks = Bf16W12().blob_bytes(plan, 0) < entry.end - entry.begin
        self.parts = (entry,)
        self.units = (2 * TILE * plan.matrix[1],)

    def count(self, entry: Entry, data: U8) -> I64:
        """Counts of the high exponent values, from which the table is chosen."""
        return count_high_exponents(data.view("<u2"))

    def encoder(self, counts: Mapping[str, Any]) -> Encoder:
        """See `Target.encoder`."""
        (entry,) = self.parts
        return _BrickEncoder(Bf16W12().plan_from_counts(counts[entry.name], entry.shape))


class _BrickEncoder(Encoder):
    def __init__(self, plan: Plan) -> None:
        self._stream = StreamEncoder(plan)

    def encode(self, data: Sequence[U8]) -> tuple[U8, U32]:
        return self._stream.encode(data[0].view("<u2").reshape(-1, self._stream.plan.matrix[1]))

    def append(self, body: U8, extra: U32) -> None:
        self._stream.append(body, extra)

    def fits(self) -> bool:
        return self._stream.overflow_count <= OVERFLOW_LIMIT

    def finish(self, digest: bytes) -> bytes:
        return self._stream.finish(digest)


class StorageProfile:
    """`bf16-store` and `byte-store`: the smallest files; loading converts them."""

    name = "storage"

    def targets(self, entries: Sequence[Entry]) -> tuple[list[Target], dict[str, list[str]]]:
        """BF16 tensors of any shape, and block scales of 4-bit weights."""
        scales, left = find_scales(entries)
        found = [*scales, *(entry for entry in entries if entry.dtype == "BF16")]
        return [_Chunks(entry) for entry in found if entry.begin < entry.end], left


class _Chunks:
    """A tensor in chunks; its unit is one of them."""

    others = ()

    def __init__(self, entry: Entry) -> None:
        self.parts = (entry,)
        self.units = (2 * bf16_store.CHUNK_WEIGHTS if entry.dtype == "BF16" else CHUNK,)

    def count(self, entry: Entry, data: U8) -> None:
        """Nothing: chunks are coded one by one."""

    def encoder(self, counts: Mapping[str, Any]) -> Encoder:
        """See `Target.encoder`."""
        return _ChunkEncoder(self.parts[0])


class _ChunkEncoder(Encoder):
    def __init__(self, entry: Entry) -> None:
        self._stream: bf16_store.StreamEncoder | byte_store.StreamEncoder
        if entry.dtype == "BF16":
            self._stream, self._words = bf16_store.StreamEncoder(entry.shape), "<u2"
        else:
            self._stream, self._words = byte_store.StreamEncoder(entry.shape, entry.dtype), "u1"
        self.head_bytes = self._stream.head_bytes

    def encode(self, data: Sequence[U8]) -> tuple[U8, U32]:
        return self._stream.encode(data[0].view(self._words))

    def append(self, body: U8, extra: U32) -> None:
        self._stream.append(extra)

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
