"""The header of a packed file: which entries, in which order, in how many bytes.

The rules are sections 1 and 2 of ``docs/container.md``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

from wcodec.container.record import RECORD_NAME
from wcodec.dtypes import DTYPES
from wcodec.errors import UnsupportedError
from wcodec.readers.safetensors import MAX_HEADER, Entry

ALIGNMENT_BYTES = 256
_LENGTH_BYTES = 8
#: Room in the reserved digits for the record itself: its prefix, zstandard's overhead, JSON.
_RECORD_SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Stored:
    """One entry of the packed file's header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def alignment(dtype: str) -> int:
    """Bytes to which a raw tensor of this dtype is aligned; 1 for unknown dtypes and those below a byte."""
    return max(1, DTYPES[dtype].bits // 8) if dtype in DTYPES else 1


def raw_order(entries: Iterable[Entry]) -> list[Entry]:
    """Order in which raw tensors follow the blobs, so that each is aligned without padding."""
    return sorted(entries, key=lambda entry: -alignment(entry.dtype))


def stored_metadata(source: dict[str, str] | None, profile: str, version: int = 1) -> dict[str, str]:
    """The packed file's ``__metadata__``: the source's keys, and ours where they are free.

    The container's version is that of its source record; every version has one digit.
    """
    ours = {"wcodec": str(version), "wcodec.profile": profile}
    return {**(source or {}), **ours, **(source or {})}


def _entry_text(name: str, dtype: str, shape: Iterable[int], begin: int, end: int) -> str:
    dims = ",".join(map(str, shape))
    key, kind = json.dumps(name, ensure_ascii=False), json.dumps(dtype, ensure_ascii=False)
    return f'{key}:{{"dtype":{kind},"shape":[{dims}],"data_offsets":[{begin},{end}]}}'


def _text(metadata: dict[str, str], entries: Iterable[str]) -> bytes:
    head = '"__metadata__":' + json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))
    return ("{" + ",".join([head, *entries]) + "}").encode()


def reserve(
    metadata: dict[str, str], entries: list[Entry], source_size: int, file: str | os.PathLike[str]
) -> int:
    """Offset at which data start: room for the header whatever turns out to be packed.

    Blobs are written before their sizes are known, so the header's length is fixed by what is known: each
    entry at its longest, each offset with as many digits as the largest can have.

    Raises
    ------
    UnsupportedError
        If the header would exceed what safetensors allows.
    """
    largest = 10 ** len(str(4 * source_size + _RECORD_SLACK_BYTES)) - 1
    texts = [
        max(
            _entry_text(e.name, e.dtype, e.shape, largest, largest),
            _entry_text(e.name, "U8", (e.end - e.begin,), largest, largest),
            key=len,
        )
        for e in entries
    ]
    texts.append(_entry_text(RECORD_NAME, "U8", (largest,), largest, largest))
    length = _LENGTH_BYTES + len(_text(metadata, texts))
    start = -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if start - _LENGTH_BYTES > MAX_HEADER:
        raise UnsupportedError(
            f"the packed header would take {start - _LENGTH_BYTES} bytes, safetensors allows {MAX_HEADER}",
            file=file,
            mend="shard the model into files with fewer tensors",
        )
    return start


def header_bytes(metadata: dict[str, str], stored: Iterable[Stored], start: int) -> bytes:
    """Length and text of the header, padded with spaces to `start` bytes.

    Parameters
    ----------
    metadata : dict
        From `stored_metadata`.
    stored : iterable of Stored
        In the order of the data.
    start : int
        From `reserve`.
    """
    texts, offset = [], 0
    for entry in stored:
        texts.append(_entry_text(entry.name, entry.dtype, entry.shape, offset, offset + entry.nbytes))
        offset += entry.nbytes
    length = start - _LENGTH_BYTES
    text = _text(metadata, texts)
    assert len(text) <= length, "reserve() left too little room"
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
