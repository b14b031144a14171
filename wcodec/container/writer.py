"""Packing one file: survey it in order, encode what pays, copy the rest, all in bounded memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from wcodec.container.atomic import AtomicFile, replace_file
from wcodec.container.destination import check_file
from wcodec.container.layout import (
    Stored,
    alignment,
    header_bytes,
    raw_order,
    reserve,
    stored_metadata,
)
from wcodec.container.packedfile import PackedFile
from wcodec.container.pipeline import CHUNK_BYTES, Advance, default_workers, ordered_map, workers_pool
from wcodec.container.profiles import profile_by_name
from wcodec.container.record import RECORD_NAME, Pair, SourceRecord
from wcodec.container.results import Result
from wcodec.container.targets import Encoder, Profile, Target, left_notes
from wcodec.dtypes import numel
from wcodec.errors import MismatchError, UnsupportedError
from wcodec.readers.bytefile import ByteFile, LocalFile
from wcodec.readers.files import is_of_another_kind
from wcodec.readers.safetensors import Entry, SafetensorsHeader, parse_header

U8 = npt.NDArray[np.uint8]
#: Tensors up to this size are read once where nothing is to come that their blob needs as well: the survey's
#: bytes wait for the encoder. Others are read twice.
_KEPT_BYTES = 64 << 20


def pack_file(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    profile: str = "run",
    force: bool = False,
    workers: int | None = None,
    advance: Advance | None = None,
) -> Result:
    """Pack a safetensors file.

    The destination appears whole or not at all, and its bytes depend on the source only. Memory stays below
    1 GB plus one row tile (128 bytes per column) of the widest tensor, however large the file.

    Parameters
    ----------
    source : path-like
        A safetensors file of any dtypes; BF16 tensors, and NVFP4 weights together with their block scales,
        are packed where that makes them smaller. Or a packed file of another profile, which is converted.
    destination : path-like
        File to write; ``docs/container.md`` says what it holds.
    profile : {"run", "storage"}
        ``"run"`` for the format that kernels read, ``"storage"`` for the smallest files.
    force : bool
        Replace an existing file.
    workers : int, optional
        Threads; by default one per processor.
    advance : callable, optional
        Called with the number of source bytes done since the last call.

    Returns
    -------
    Result

    Raises
    ------
    MalformedError
        If the source contradicts itself or changes while it is read.
    UnsupportedError
        If it is no safetensors file, or is packed already.
    WCodecError
        If the destination must not or cannot be written.
    """
    begun = time.perf_counter()
    source, destination = Path(source), Path(destination)
    workers = default_workers() if workers is None else workers
    chosen = profile_by_name(profile)
    file, header = open_source(source, profile)
    check_file(source, destination, force=force)
    metadata = stored_metadata(header.metadata, profile)
    start = reserve(metadata, header.entries, header.file_size, source)
    with (
        replace_file(destination, mode=source.stat().st_mode, overwrite=force) as out,
        workers_pool(workers) as pool,
    ):
        packing = _Packing(file, header, chosen, pool, workers, advance)
        stored, end = packing.write_tensors(out, start)
        if isinstance(file, PackedFile) and packing.whole.digest() != file.record.digest:
            raise MismatchError("does not decode to what it was made from", file=source, mend="copy it again")
        source_record = packing.record()
        record = source_record.pack()
        stored.append(Stored(RECORD_NAME, "U8", (len(record),), len(record)))
        end = out.write_at(end, record)
        out.truncate(end)  # a tensor that was taken back may have reached further
        metadata = stored_metadata(header.metadata, profile, source_record.version)
        out.write_at(0, header_bytes(metadata, stored, start))
        file.read_at(0, 8)  # refuses if the source is not what it was when we began
    return Result(
        source,
        destination,
        files=1,
        tensors=len(header.entries),
        packed_tensors=len(packing.packed),
        weights=sum(numel(entry.shape) for entry in header.entries),
        bytes_in=header.file_size,
        bytes_out=end,
        digest=packing.whole.digest(),
        seconds=time.perf_counter() - begun,
        notes=tuple(left_notes(packing.left)),
        left=packing.left,
    )


def open_source(source: Path, profile: str) -> tuple[ByteFile, SafetensorsHeader]:
    """A file that can be packed, and its header; other kinds are refused in one line.

    A packed file of another profile appears as the file it was made from.
    """
    if is_of_another_kind(source) and source.exists():
        raise UnsupportedError(
            f"pack reads safetensors files, not {source.suffix}",
            file=source,
            mend="`wcodec analyze` reads it as it is; convert it to safetensors to pack it",
        )
    file = LocalFile(source, mapped=False)
    header = parse_header(file)
    if not any(entry.name == RECORD_NAME for entry in header.entries):
        return file, header
    packed = PackedFile(source)
    if packed.profile == profile:
        raise UnsupportedError("is packed already", file=source, mend="`wcodec unpack` gives the original")
    return packed, packed.source


@dataclass(frozen=True)
class _Span:
    """A range of the source file that is handled at once; `unit` is 0 for bytes that stay as they are."""

    entry: Entry | None
    start: int
    stop: int
    unit: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Job:
    """Units to encode, one span per part of the target; `data` of the first where the survey still had it."""

    target: Target
    encoder: Encoder
    spans: tuple[_Span, ...]
    is_last: bool
    data: U8 | None

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


class _Packing:
    """State of packing one file."""

    def __init__(
        self,
        file: ByteFile,
        header: SafetensorsHeader,
        profile: Profile,
        pool: Executor | None,
        workers: int,
        advance: Advance | None,
    ) -> None:
        self.file = file
        self.header = header
        self.pool = pool
        self.budget = (workers + 2) * CHUNK_BYTES
        self.advance = advance or (lambda nbytes: None)
        self.whole = xxhash.xxh3_128()
        self.digests: dict[str, bytes] = {}
        self.packed: set[str] = set()
        self.pairs: dict[str, Pair] = {}
        self.trailing: list[bytes] = []
        self.targets, self.left = profile.targets(header.entries)
        #: The target that waits for a tensor, and in what units the tensor is looked at.
        self._waiting: dict[str, tuple[Target, int]] = {}
        for target in self.targets:
            for entry, unit in zip(target.parts, target.units, strict=True):
                self._waiting[entry.name] = target, unit
            for entry in target.others:
                self._waiting[entry.name] = target, alignment(entry.dtype)
        #: States of the digests of tensors that others follow in their blob.
        self._hashers: dict[str, Any] = {}

    def write_tensors(self, out: AtomicFile, start: int) -> tuple[list[Stored], int]:
        """Write blobs, then raw tensors, from `start` on; return their entries and where they end."""
        stored: list[Stored] = []
        begin, position = start, -1
        jobs = ordered_map(self.pool, self.budget, self._encode, self._jobs(), lambda job: 2 * job.nbytes)
        for job, body, extra in jobs:
            target, encoder = job.target, job.encoder
            if position < 0:
                position = begin + encoder.head_bytes
            encoder.append(body, extra)
            position = out.write_at(position, body)
            self.advance(job.nbytes)
            if not job.is_last:
                continue
            fits = encoder.fits()
            nbytes = sum(part.nbytes for part in target.parts)
            if fits:
                position = out.write_at(position, encoder.finish(self._digest(target)))
            if fits and position - begin < nbytes:
                out.write_at(begin, encoder.head())
                stored += self._record_packed(target, position - begin)
                begin = position
            else:  # the tensor would not shrink: it stays raw, and the next one takes its place
                self.advance(-nbytes)
            position = -1
        position = begin
        for entry in raw_order(e for e in self.header.entries if e.name not in self.packed):
            for data in self._read_ahead(_cut(entry, self.header.data_start, 0)):
                position = out.write_at(position, data)
                self.advance(data.size)
            stored.append(Stored(entry.name, entry.dtype, entry.shape, entry.nbytes))
        return stored, position

    def record(self) -> SourceRecord:
        """The source record, once everything was read."""
        from wcodec import __version__

        return SourceRecord(
            tool=f"wcodec {__version__}",
            header=self.header.raw,
            trailing=b"".join(self.trailing),
            nbytes=self.header.file_size,
            digest=self.whole.digest(),
            raw={e.name: self.digests[e.name] for e in self.header.entries if e.name not in self.packed},
            pairs=self.pairs,
        )

    def _record_packed(self, target: Target, nbytes: int) -> Iterator[Stored]:
        """Remember that a target is packed, in so many bytes; its entries."""
        self.packed.update(part.name for part in target.parts)
        first, *rest = target.parts
        yield Stored(first.name, "U8", (nbytes,), nbytes)
        for other in rest:
            self.pairs[first.name] = Pair(other.name, (self.digests[first.name], self.digests[other.name]))
            yield Stored(other.name, "U8", (0,), 0)

    def _digest(self, target: Target) -> bytes:
        """xxh3-128 of the parts' bytes, one part after the other."""
        first, *rest = target.parts
        if not rest:
            return self.digests[first.name]
        hasher = self._hashers.pop(first.name)
        for other in rest:
            for data in self._read_ahead(_cut(other, self.header.data_start, 0)):
                hasher.update(data.data)
        return bytes(hasher.digest())

    def _jobs(self) -> Iterator[_Job]:
        """What to encode, in the order in which the survey has seen all of it."""
        for target, counts, kept in self._survey():
            encoder = target.encoder(counts)
            if isinstance(encoder, str):
                self.left.setdefault(encoder, []).append(target.parts[0].name)
                continue
            cuts = _cut_together(target, self.header.data_start)
            for index, spans in enumerate(cuts):
                yield _Job(target, encoder, spans, spans is cuts[-1], kept[index] if kept else None)

    def _survey(self) -> Iterator[tuple[Target, dict[str, Any], list[U8]]]:
        """Read the whole file in order, take every digest, and yield the targets that may shrink.

        Yields
        ------
        target, counts, kept
            `counts` are what the target counted, by tensor, `kept` the bytes of the spans of its first tensor
            if that is small and came last.
        """
        kept: list[U8] = []
        counts: dict[str, Any] = {}
        unseen = {t.parts[0].name: len(t.parts) + len(t.others) for t in self.targets}
        hasher = xxhash.xxh3_128()
        for span, data, found in ordered_map(
            self.pool, self.budget, self._look, self._spans(), lambda span: span.nbytes
        ):
            self.whole.update(data.data)
            entry = span.entry
            if entry is None:
                if span.start >= self.header.data_end:
                    self.trailing.append(data.tobytes())
                continue
            hasher.update(data.data)
            target = self._waiting[entry.name][0] if span.unit else None
            if target is not None:
                first = target.parts[0].name
                if entry.name == first and unseen[first] == 1 and entry.nbytes <= _KEPT_BYTES:
                    kept.append(data)
                if found is not None:
                    counts[entry.name] = counts.get(entry.name, 0) + found
            if span.stop < self.header.data_start + entry.end:
                continue
            self.digests[entry.name] = hasher.digest()
            if target is not None:
                if entry.name == first and len(target.parts) > 1:
                    self._hashers[first] = hasher.copy()
                unseen[first] -= 1
                if not unseen[first]:
                    names = [e.name for e in (*target.parts, *target.others)]
                    yield target, {name: counts.pop(name, None) for name in names}, kept
                kept = []
            hasher.reset()

    def _spans(self) -> Iterator[_Span]:
        """The whole file, cut."""
        yield _Span(None, 0, self.header.data_start)
        for entry in self.header.entries:
            unit = self._waiting[entry.name][1] if entry.name in self._waiting else 0
            yield from _cut(entry, self.header.data_start, unit)
        start, stop = self.header.data_end, self.header.file_size
        for at in range(start, stop, CHUNK_BYTES):
            yield _Span(None, at, min(at + CHUNK_BYTES, stop))

    def _look(self, span: _Span) -> tuple[_Span, U8, Any]:
        data = self._read(span)
        if span.entry is None or not span.unit:
            return span, data, None
        return span, data, self._waiting[span.entry.name][0].count(span.entry, data)

    def _encode(self, job: _Job) -> tuple[_Job, U8, Any]:
        first, *rest = job.spans
        data = self._read(first) if job.data is None else job.data
        return job, *job.encoder.encode([data, *map(self._read, rest)])

    def _read(self, span: _Span) -> U8:
        return self.file.read_at(span.start, span.nbytes)

    def _read_ahead(self, spans: list[_Span]) -> Iterator[U8]:
        yield from ordered_map(self.pool, self.budget, self._read, spans, lambda span: span.nbytes)


def _cut(entry: Entry, data_start: int, unit: int) -> list[_Span]:
    """Cut a tensor into spans of about `CHUNK_BYTES`, between units if it has any; at least one span."""
    return _cut_every(entry, data_start, unit, max(CHUNK_BYTES // max(unit, 1), 1) * max(unit, 1))


def _cut_every(entry: Entry, data_start: int, unit: int, step: int) -> list[_Span]:
    at = data_start + entry.begin
    return [
        _Span(entry, at + start, at + min(start + step, entry.nbytes), unit)
        for start in range(0, max(entry.nbytes, 1), step)
    ]


def _cut_together(target: Target, data_start: int) -> list[tuple[_Span, ...]]:
    """Cut the parts of a target between the same units, the first as `_cut` does."""
    count = max(CHUNK_BYTES // target.units[0], 1)
    parts = zip(target.parts, target.units, strict=True)
    cuts = [_cut_every(entry, data_start, unit, count * unit) for entry, unit in parts]
    return list(zip(*cuts, strict=True))
