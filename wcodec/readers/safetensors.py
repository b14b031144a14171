"""Safetensors: an own header parser that trusts nothing, and views of the bytes behind it.

The stock readers cannot hand out BF16, FP8 or FP4 without a framework, and say the same of a truncated
file as of one with trailing bytes. Here every number of the header is checked against the file before
anything is allocated or read.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from wcodec.dtypes import DTYPES, numel
from wcodec.errors import MalformedError
from wcodec.readers.base import Content, FileRange, TensorInfo, first_line
from wcodec.readers.bytefile import ByteFile, FilePath, LocalFile

MAX_AXES = 64
"""Most axes of a tensor; no array library holds more, and a product of millions of axes takes hours."""

MAX_HEADER = 100_000_000
"""Largest header in bytes that the safetensors format allows."""

_NOT_OURS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the weights", "run `git lfs pull`"),
    (b"<!DOCTYPE", "is a web page, not weights", "download it again"),
    (b"<html", "is a web page, not weights", "download it again"),
    (b"GGUF", "is a GGUF file", "give it the suffix .gguf"),
    (b"PK\x03\x04", "is a zip archive", "give it the suffix .pt or .npz, whichever it is"),
)


class Entry(NamedTuple):
    """One tensor of a header; `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header and where its parts lie in the file.

    Attributes
    ----------
    path : path-like
    raw : bytes
        Header text as it is in the file, padding included, without the 8 bytes of its length.
    metadata : dict of str to str, optional
        ``__metadata__``; None where it is absent or null.
    entries : list of Entry
        In the order of the data, without holes or overlaps, the first at 0.
    file_size : int
        Bytes of the file.
    """

    path: FilePath
    raw: bytes
    metadata: dict[str, str] | None
    entries: list[Entry]
    file_size: int

    @property
    def data_start(self) -> int:
        """Offset in the file of the first tensor's bytes."""
        return 8 + len(self.raw)

    @property
    def data_end(self) -> int:
        """Offset in the file behind the last tensor's bytes."""
        return self.data_start + (self.entries[-1].end if self.entries else 0)


def parse_header(file: str | os.PathLike[str] | ByteFile) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Parameters
    ----------
    file : path-like or ByteFile

    Raises
    ------
    MalformedError
        The header contradicts the format or the file; for a truncated file the message names the first
        tensor that is cut and the missing bytes.
    WCodecError
        The file cannot be opened.
    """
    source = file if isinstance(file, ByteFile) else LocalFile(file)
    raw = _read_text(source)
    with _no_collections():
        table = _decode(raw, source.path)
        metadata = _metadata(table.pop("__metadata__", None), source.path)
        entries = [_entry(name, fields, source.path) for name, fields in table.items()]
        entries.sort(key=lambda entry: entry[3:])
        _check_layout(entries, source.path)
    header = SafetensorsHeader(source.path, raw, metadata, entries, source.size)
    if header.data_end > source.size:
        _refuse_truncated(header)
    return header


def read_safetensors(file: ByteFile) -> Content:
    """Tensors of one safetensors file, in the order of the data."""
    header = parse_header(file)
    start = header.data_start
    path = file.path
    with _no_collections():
        tensors = [
            TensorInfo(name, path, dtype, shape, end - begin, FileRange(file, start + begin))
            for name, dtype, shape, begin, end in header.entries
        ]
    content = Content("safetensors", tensors, dict(header.metadata or {}))
    extra = header.file_size - header.data_end
    if extra:
        content.differences.append(f"{path.name}: {extra} bytes after the last tensor")
    for dtype in sorted({entry.dtype for entry in header.entries} - DTYPES.keys()):
        content.remarks.append(f"{path.name}: dtype {dtype!r} is unknown and read as plain bytes")
    return content


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pause the cycle collector, which would walk a million live entries again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_text(source: ByteFile) -> bytes:
    path, size = source.path, source.size
    if size < 8:
        what = "is empty" if size == 0 else f"has only {size} bytes, too few for a safetensors file"
        raise MalformedError(what, file=path, mend="download it again")
    head = source.read_at(0, min(size, 32)).tobytes()
    length = int.from_bytes(head[:8], "little")
    for magic, problem, mend in _NOT_OURS:
        if head.startswith(magic):
            raise MalformedError(problem, file=path, mend=mend)
    if length > MAX_HEADER:
        raise MalformedError(
            f"the header claims {length} bytes, the format allows {MAX_HEADER}",
            file=path,
            mend="it is corrupt or not a safetensors file",
        )
    if length > size - 8:
        raise MalformedError(
            f"the header claims {length} bytes, but only {size - 8} follow",
            file=path,
            mend="it is truncated or not a safetensors file; download it again",
        )
    return source.read_at(8, length).tobytes()


def _decode(raw: bytes, path: FilePath) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise MalformedError("the header does not begin with '{'", file=path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise MalformedError(f"the header has the key {twice!r} twice", file=path)
        return found

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        text = raw.decode("utf-8")
        table = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
        if "\\u" in text:
            for name in table:
                name.encode("utf-8")  # half a surrogate pair cannot be printed or written again
    except UnicodeError as error:
        raise MalformedError(f"the header is not UTF-8: {error.reason}", file=path) from None  # type: ignore[attr-defined]
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the header is not JSON: {first_line(error)}", file=path) from None
    return table


def _metadata(found: Any, path: FilePath) -> dict[str, str] | None:
    if found is None:
        return None
    if type(found) is not dict or any(type(value) is not str for value in found.values()):
        raise MalformedError("__metadata__ is not an object of strings", file=path)
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, fields: Any, path: FilePath) -> Entry:
    def refuse(problem: str) -> NoReturn:
        raise MalformedError(problem, file=path, tensor=name)

    if type(fields) is not dict:
        refuse("its entry in the header is not an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in fields:
            refuse(f"its entry in the header has no {key}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str:
        refuse("its dtype is not a string")
    if type(shape) is not list or not all(map(_is_count, shape)):
        refuse("its shape is not a list of counts below 2^63")
    if len(shape) > MAX_AXES:
        refuse(f"its shape has {len(shape)} axes, more than {MAX_AXES}")
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_count, offsets)):
        refuse("its data_offsets are not two counts below 2^63")
    begin, end = offsets
    if begin > end:
        refuse(f"its data begin at {begin} and end before, at {end}")
    known = DTYPES.get(dtype)
    if known is not None:
        bits = numel(shape) * known.bits
        if bits % 8:
            refuse(f"{numel(shape)} elements of {dtype} do not fill whole bytes")
        if bits != 8 * (end - begin):
            refuse(f"{dtype} {shape} takes {bits // 8} bytes, but its data_offsets span {end - begin}")
    return Entry(name, dtype, tuple(shape), begin, end)


def _check_layout(entries: list[Entry], path: FilePath) -> None:
    position, before = 0, ""
    for entry in entries:
        if entry.begin != position:
            if entry.begin > position:
                problem = f"{entry.begin - position} bytes before it belong to no tensor"
            else:
                problem = f"its data overlap those of {before!r} by {position - entry.begin} bytes"
            raise MalformedError(problem, file=path, tensor=entry.name)
        position, before = entry.end, entry.name


def _refuse_truncated(header: SafetensorsHeader) -> NoReturn:
    room = header.file_size - header.data_start
    cut = next(entry for entry in header.entries if entry.end > room)
    missing = header.data_end - header.file_size
    raise MalformedError(
        f"the file is truncated: {min(cut.end - room, cut.end - cut.begin)} of the tensor's"
        f" {cut.end - cut.begin} bytes are missing, {missing} bytes in all",
        file=header.path,
        tensor=cut.name,
        mend="download it again",
    )
