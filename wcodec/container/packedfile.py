"""Reading a packed file: checks first, then any range of the original's bytes on demand."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.container.manifest import Manifest
from wcodec.container.pairs import pair_shape
from wcodec.container.pipeline import CHUNK_BYTES
from wcodec.container.record import RECORD_NAME, SourceRecord
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.formats import by_id
from wcodec.formats.base import Format
from wcodec.packed import PackedTensor
from wcodec.readers.bytefile import LocalFile, page_by_page
from wcodec.readers.files import is_of_another_kind
from wcodec.readers.safetensors import Entry, parse_header

U8 = npt.NDArray[np.uint8]
_STORAGE_FORMATS = {"bf16-store", "byte-store"}


@dataclass(frozen=True)
class Part:
    """One tensor of the original and where its bytes come from.

    Attributes
    ----------
    entry : Entry
        Name, dtype, shape and offsets in the source.
    stored : Entry
        The same tensor in the packed file.
    packed : PackedTensor, optional
        None for a tensor that is stored unchanged.
    digest : bytes
        xxh3-128 of the original bytes.
    start : int
        Where its bytes begin in what the blob decodes to.
    within : str, optional
        Name of the tensor in whose blob it lies, where that is another.
    """

    entry: Entry
    stored: Entry
    packed: PackedTensor | None
    digest: bytes
    start: int = 0
    within: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the original."""
        return self.entry.end - self.entry.begin


class PackedFile:
    """A packed file, seen as the file it was made from.

    `size` and `read_at` speak of the original, so this is a `wcodec.readers.bytefile.ByteFile`: whatever
    reads a safetensors file reads a packed one, decoding as it goes.

    Parameters
    ----------
    path : path-like
        A packed file.

    Attributes
    ----------
    path : Path
    record : SourceRecord
    source : SafetensorsHeader
        Header of the original.
    header : SafetensorsHeader
        Header of the packed file.
    parts : list of Part
        In the order of the original's data.

    Raises
    ------
    MalformedError
        If the file contradicts itself.
    UnsupportedError
        If it is not a packed file, or a newer wcodec wrote it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        file = LocalFile(self.path)
        try:
            self.header = parse_header(file)
        except MalformedError:
            if is_of_another_kind(self.path):
                raise self._not_packed() from None
            raise
        self._data = file.read_at(0, file.size)  # one mapping for all tensors: systems limit their number
        stored = {entry.name: entry for entry in self.header.entries}
        if RECORD_NAME not in stored:
            raise self._not_packed()
        if self.header.file_size != self.header.data_end:
            extra = self.header.file_size - self.header.data_end
            raise MalformedError(
                f"{extra} bytes follow the last tensor", file=self.path, mend="copy it again"
            )
        self.record = SourceRecord.parse(self._bytes(stored.pop(RECORD_NAME)), file=self.path)
        self.source = parse_header(_OriginalHead(self.path, self.record))
        if self.source.file_size - self.source.data_end != len(self.record.trailing):
            raise MalformedError("the record's sizes contradict its header", file=self.path)
        with page_by_page(self._data):  # footers lie far apart
            pairs = dict(self._pairs(stored))
            self.parts = [pairs.get(e.name) or self._part(e, stored) for e in self.source.entries]
        self._after = {part.within: part for part in self.parts if part.within is not None}
        if len(stored) != len(self.parts):
            ours = {entry.name for entry in self.source.entries}
            name = next(name for name in stored if name not in ours)
            raise MalformedError("is not a tensor of the source", file=self.path, tensor=name)
        self._head = len(self.source.raw).to_bytes(8, "little") + self.source.raw
        self._starts = [self.source.data_start + part.entry.begin for part in self.parts]

    def _not_packed(self) -> UnsupportedError:
        return UnsupportedError(
            "is not a packed file", file=self.path, mend="`wcodec pack` makes one of a safetensors file"
        )

    def _bytes(self, entry: Entry) -> U8:
        start = self.header.data_start
        return self._data[start + entry.begin : start + entry.end]

    def _refuse(self, name: str, problem: str) -> MalformedError:
        return MalformedError(problem, file=self.path, tensor=name, mend="copy the file again")

    def _pairs(self, stored: dict[str, Entry]) -> Iterator[tuple[str, Part]]:
        """The tensors that share a blob, by name."""
        entries = {entry.name: entry for entry in self.source.entries}
        taken = set(self.record.raw)
        for name, pair in self.record.pairs.items():
            for one in (name, pair.scale):
                if one not in entries or one not in stored:
                    raise self._refuse(one, "is missing")
                if one in taken:
                    raise self._refuse(one, "is stored in two ways")
                taken.add(one)
            weight, scale = entries[name], entries[pair.scale]
            packed = self._blob(stored[name])
            if packed.format != "nvfp4-s5" or pair_shape(weight, scale) != packed.shape:
                raise self._refuse(name, f"is packed in another shape than it and {pair.scale!r} have")
            if (stored[pair.scale].dtype, stored[pair.scale].shape) != ("U8", (0,)):
                raise self._refuse(pair.scale, f"has bytes of its own beside those in the blob of {name!r}")
            yield name, Part(weight, stored[name], packed, pair.digests[0])
            yield pair.scale, Part(scale, stored[pair.scale], packed, pair.digests[1], weight.nbytes, name)

    def _blob(self, found: Entry) -> PackedTensor:
        if found.dtype != "U8" or len(found.shape) != 1:
            raise self._refuse(found.name, "is neither packed nor listed as raw")
        return PackedTensor.from_blob(self._bytes(found), file=self.path, tensor=found.name)

    def _part(self, entry: Entry, stored: dict[str, Entry]) -> Part:
        def refuse(problem: str) -> MalformedError:
            return self._refuse(entry.name, problem)

        if entry.name not in stored:
            raise refuse("is missing")
        found = stored[entry.name]
        if entry.name in self.record.raw:
            if (found.dtype, found.shape, found.end - found.begin) != (
                entry.dtype,
                entry.shape,
                entry.end - entry.begin,
            ):
                raise refuse("differs in dtype or shape from the source")
            return Part(entry, found, None, self.record.raw[entry.name])
        packed = self._blob(found)
        if (packed.dtype, packed.shape) != (entry.dtype, entry.shape):
            raise refuse("is packed with another dtype or shape than the source has")
        if _format(packed).content_bytes(packed) != entry.nbytes:
            raise refuse("is packed together with a tensor that the record does not name")
        return Part(entry, found, packed, packed.digest)

    @property
    def profile(self) -> str:
        """Profile it was packed with; told from the formats, since metadata may get lost."""
        formats = {part.packed.format for part in self.parts if part.packed is not None}
        if not formats:  # nothing but metadata tells the two apart
            return (self.header.metadata or {}).get("wcodec.profile", "run")
        return "storage" if formats & _STORAGE_FORMATS else "run"

    @property
    def size(self) -> int:
        """Bytes of the original file."""
        return self.record.nbytes

    def read_at(self, offset: int, n: int) -> U8:
        """Bytes ``offset … offset + n`` of the original file, decoded.

        Raises
        ------
        MalformedError
            The range does not lie inside the original, or a blob is malformed.
        """
        if offset < 0 or n < 0 or offset + n > self.size:
            raise MalformedError(
                f"bytes {offset} to {offset + n} of {self.size} were asked for", file=self.path
            )
        pieces = list(self._pieces(offset, offset + n))
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.uint8)])

    def _pieces(self, start: int, stop: int) -> Iterator[U8]:
        if start < len(self._head):
            yield np.frombuffer(self._head[start:stop], dtype=np.uint8)
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while index < len(self.parts) and self._starts[index] < stop:
            part, at = self.parts[index], self._starts[index]
            first, last = max(start - at, 0), min(stop - at, part.nbytes)
            if first < last:
                yield self.read_part(part, first, last)
            index += 1
        tail = self.source.data_end
        if stop > tail:
            yield np.frombuffer(self.record.trailing[max(start - tail, 0) : stop - tail], dtype=np.uint8)

    def read_part(self, part: Part, start: int, stop: int) -> U8:
        """Bytes ``start … stop`` of one tensor of the original.

        Whole multiples of `granule` from the tensor's start cost no more than they return.
        """
        if part.packed is None:
            return self._bytes(part.stored)[start:stop]
        try:
            return _format(part.packed).decode_range(part.packed, part.start + start, part.start + stop)
        except WCodecError as error:
            raise type(error)(
                error.problem,
                file=self.path,
                tensor=part.entry.name,
                mend="the file is damaged; copy it again",
            ) from None

    def read_after(self, part: Part) -> Iterator[U8]:
        """What the blob of `part` decodes to after its bytes: those of the tensor that lies there as well."""
        other = self._after.get(part.entry.name)
        if other is not None:
            step = _step(other)
            for start in range(0, other.nbytes, step):
                yield self.read_part(other, start, min(start + step, other.nbytes))

    def spans(self) -> Iterator[tuple[Part | None, int, int]]:
        """Cut the original into ranges worth reading at once, in order.

        Yields
        ------
        part : Part or None
            The tensor; None for the header and the trailing bytes.
        start, stop : int
            Offsets in the original file. A tensor without bytes has one empty range.
        """
        yield None, 0, self.source.data_start
        for part, at in zip(self.parts, self._starts, strict=True):
            step = _step(part)
            for start in range(0, max(part.nbytes, 1), step):
                yield part, at + start, at + min(start + step, part.nbytes)
        if self.record.trailing:
            yield None, self.source.data_end, self.size


def original_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the weight files that unpacking a packed file or directory gives.

    Raises
    ------
    MalformedError, UnsupportedError
        As `PackedFile` and `Manifest.read`.
    """
    path = Path(path)
    if path.is_dir():
        files = Manifest.read(path).files.values()
        return sum(facts.nbytes for facts in files if facts.kind == "packed")
    return PackedFile(path).size


class _OriginalHead:
    """The original as far as its header goes, then zeros: what `parse_header` needs to check it."""

    def __init__(self, path: Path, record: SourceRecord) -> None:
        self.path = path
        self.size = record.nbytes
        self._head = len(record.header).to_bytes(8, "little") + record.header

    def read_at(self, offset: int, n: int) -> Any:
        return np.frombuffer(self._head[offset : offset + n].ljust(n, b"\0"), dtype=np.uint8)


def _step(part: Part) -> int:
    """Bytes of a tensor that are worth reading at once."""
    if part.packed is None:
        return CHUNK_BYTES
    form = _format(part.packed)
    # A granule is a piece of all that the blob holds; the tensor has its share of it.
    unit = form.granule(part.packed) * part.nbytes // max(form.content_bytes(part.packed), 1)
    return max(CHUNK_BYTES // max(unit, 1), 1) * max(unit, 1)


def _format(packed: PackedTensor) -> Format:
    return by_id(packed.format)
