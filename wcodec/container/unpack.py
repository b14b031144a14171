"""From a packed file back to the file it was made from, and the check that this would work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from wcodec.container.atomic import replace_file
from wcodec.container.destination import check_file
from wcodec.container.packedfile import PackedFile, Part
from wcodec.container.pipeline import CHUNK_BYTES, Advance, default_workers, ordered_map, workers_pool
from wcodec.container.results import Result, Verdict
from wcodec.dtypes import numel
from wcodec.errors import MismatchError, WCodecError
from wcodec.readers.bytefile import LocalFile

U8 = npt.NDArray[np.uint8]
Span = tuple[Part | None, int, int]


def unpack_file(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    workers: int | None = None,
    advance: Advance | None = None,
) -> Result:
    """Give back the file that a packed file was made from, byte for byte.

    Every digest is compared before the destination appears under its name.

    Parameters
    ----------
    source : path-like
        A packed file.
    destination : path-like
        File to write.
    force : bool
        Replace an existing file.
    workers : int, optional
        Threads; by default one per processor.
    advance : callable, optional
        Called with the number of original bytes done since the last call.

    Returns
    -------
    Result

    Raises
    ------
    MalformedError
        If the packed file contradicts itself.
    MismatchError
        If a digest differs; nothing is written then.
    UnsupportedError
        If it is not a packed file.
    WCodecError
        If the destination must not or cannot be written.
    """
    begun = time.perf_counter()
    source, destination = Path(source), Path(destination)
    packed = PackedFile(source)
    check_file(source, destination, force=force)
    with replace_file(destination, mode=source.stat().st_mode, overwrite=force) as out:
        for difference in compare(packed, out.write_at, workers=workers, advance=advance):
            raise difference
    return Result(
        source,
        destination,
        files=1,
        tensors=len(packed.parts),
        packed_tensors=sum(part.packed is not None for part in packed.parts),
        weights=sum(numel(part.entry.shape) for part in packed.parts),
        bytes_in=packed.header.file_size,
        bytes_out=packed.size,
        digest=packed.record.digest,
        seconds=time.perf_counter() - begun,
    )


def verify_file(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    advance: Advance | None = None,
) -> Verdict:
    """Decode every tensor of a packed file and compare all digests, without writing anything.

    Parameters
    ----------
    source : path-like
        A packed file.
    against : path-like, optional
        File to compare the rebuilt original with, byte for byte.
    workers, advance
        As for `unpack_file`.

    Returns
    -------
    Verdict

    Raises
    ------
    MalformedError
        If the packed file contradicts itself.
    UnsupportedError
        If it is not a packed file.
    WCodecError
        If `against` is a folder or cannot be read.
    """
    begun = time.perf_counter()
    packed = PackedFile(source)
    if against is not None and Path(against).is_dir():
        raise WCodecError(
            f"is a folder, but {packed.path} is a file", file=against, mend="name the file it was made from"
        )
    sink = _Comparison(Path(against)) if against is not None else None
    found = [
        _words(error)
        for error in compare(packed, sink.take if sink else _forget, workers=workers, advance=advance)
    ]
    if sink:
        found += sink.differences(packed)
    ours = packed.header.metadata or {}
    found += [
        f"metadata key {key!r} is not what the source has"
        for key, value in (packed.source.metadata or {}).items()
        if ours.get(key) != value
    ]
    return Verdict(
        packed.path,
        files=1,
        tensors=len(packed.parts),
        nbytes=packed.size,
        digest=packed.record.digest,
        differences=tuple(found),
        seconds=time.perf_counter() - begun,
    )


def compare(
    packed: PackedFile,
    sink: Callable[[int, U8], Any],
    *,
    workers: int | None = None,
    advance: Advance | None = None,
) -> Iterator[MismatchError]:
    """Rebuild the original in order, hand it to `sink(offset, bytes)`, and yield each digest that differs."""
    workers = default_workers() if workers is None else workers
    whole, hasher = xxhash.xxh3_128(), xxhash.xxh3_128()
    differs = False

    def read(span: Span) -> tuple[Span, U8]:
        _, start, stop = span
        return span, packed.read_at(start, stop - start)

    with workers_pool(workers) as pool:
        for (part, start, stop), data in ordered_map(
            pool, (workers + 2) * CHUNK_BYTES, read, packed.spans(), lambda span: span[2] - span[1]
        ):
            whole.update(data.data)
            sink(start, data)
            if advance is not None:
                advance(data.size)
            if part is None:
                continue
            hasher.update(data.data)
            if stop == packed.source.data_start + part.entry.end:
                if hasher.digest() != part.digest:
                    differs = True
                    yield _mismatch(
                        "the decoded bytes have another digest than the original had", packed, part
                    )
                elif part.packed is not None and part.within is None:
                    for rest in packed.read_after(part):
                        hasher.update(rest.data)
                    if hasher.digest() != part.packed.digest:
                        differs = True
                        yield _mismatch("its blob names another digest than the original had", packed, part)
                hasher.reset()
    if whole.digest() != packed.record.digest and not differs:
        yield _mismatch("the rebuilt file has another digest than the original had", packed, None)


def _mismatch(problem: str, packed: PackedFile, part: Part | None) -> MismatchError:
    name = part.entry.name if part is not None else None
    return MismatchError(problem, file=packed.path, tensor=name, mend="the file is damaged; copy it again")


def _words(error: MismatchError) -> str:
    return f"tensor {error.tensor!r}: {error.problem}" if error.tensor is not None else error.problem


def _forget(offset: int, data: U8) -> None:
    """Take bytes and do nothing with them."""


class _Comparison:
    """Compares the rebuilt bytes with another file as they come."""

    def __init__(self, path: Path) -> None:
        self.file = LocalFile(path)
        self.first: int | None = None

    def take(self, offset: int, data: U8) -> None:
        """Compare one piece."""
        if self.first is not None or offset >= self.file.size:
            return
        theirs = self.file.read_at(offset, min(data.size, self.file.size - offset))
        ours = data[: theirs.size]
        if not np.array_equal(ours, theirs):
            self.first = offset + int(np.argmax(ours != theirs))

    def differences(self, packed: PackedFile) -> list[str]:
        """What differs, named by the tensor it is in."""
        path = self.file.path
        if self.first is not None:
            return [f"{path} differs from byte {self.first} on, {_place(packed, self.first)}"]
        if self.file.size != packed.size:
            return [f"{path} has {self.file.size} bytes, the original has {packed.size}"]
        return []


def _place(packed: PackedFile, offset: int) -> str:
    start = packed.source.data_start
    if offset < start:
        return "in the header"
    for part in packed.parts:
        if start + part.entry.begin <= offset < start + part.entry.end:
            return f"in tensor {part.entry.name!r}"
    return "after the last tensor"
