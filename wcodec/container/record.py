"""The source record: what ``__wcodec__.header`` holds, so that the source file can be rebuilt byte for byte.

The layout is section 3 of ``docs/container.md``.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass, field
from typing import Any

import xxhash

from wcodec.errors import MalformedError, UnsupportedError

RECORD_NAME = "__wcodec__.header"
MAGIC = b"WCSOURCE"
VERSIONS = (1, 2)  # the second says which tensors share a blob; a record without such is of the first
#: A header may have 100 MB; the digests and trailing bytes that come with it must fit as well.
MAX_PAYLOAD_BYTES = 512 << 20
_PREFIX = struct.Struct("<8sHHIQQ")  # magic, version, zero, JSON bytes, payload bytes, xxh3-64 of the frame
_LEVEL = 9  # zstandard: headers are small, and higher levels gain nothing on them


@dataclass(frozen=True)
class Pair:
    """A tensor that lies in the blob of another.

    Attributes
    ----------
    scale : str
        Name of the tensor whose bytes follow those of the one that the blob is named after.
    digests : tuple of two bytes
        xxh3-128 of either tensor, the one that the blob is named after first.
    """

    scale: str
    digests: tuple[bytes, bytes]


@dataclass(frozen=True)
class SourceRecord:
    """Everything about a source file that its tensors do not say.

    Attributes
    ----------
    tool : str
        Name and version of the writer.
    header : bytes
        The source's header text, exactly, with its padding (the 8 length bytes are its length).
    trailing : bytes
        Bytes of the source after its last tensor.
    nbytes : int
        Size of the source file.
    digest : bytes
        xxh3-128 of the source file.
    raw : dict of str to bytes
        xxh3-128 of each tensor that is stored unchanged.
    pairs : dict of str to Pair
        Tensors that share a blob, by the name of the blob.
    """

    tool: str
    header: bytes
    trailing: bytes
    nbytes: int
    digest: bytes
    raw: dict[str, bytes]
    pairs: dict[str, Pair] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The first version that can say this."""
        return VERSIONS[bool(self.pairs)]

    def pack(self) -> bytes:
        """Serialise; the same record gives the same bytes with the same zstandard."""
        import zstandard

        facts: dict[str, Any] = {
            "tool": self.tool,
            "source": {
                "bytes": self.nbytes,
                "xxh3_128": self.digest.hex(),
                "header_bytes": len(self.header),
                "trailing_bytes": len(self.trailing),
            },
            "raw": {name: digest.hex() for name, digest in self.raw.items()},
        }
        if self.pairs:
            facts["pairs"] = {
                name: {"scale": pair.scale, "xxh3_128": [digest.hex() for digest in pair.digests]}
                for name, pair in self.pairs.items()
            }
        text = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode()
        payload = text + self.header + self.trailing
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise UnsupportedError(
                f"{len(payload)} bytes of header and trailing bytes exceed the limit of {MAX_PAYLOAD_BYTES}",
                mend="cut the bytes after the last tensor, or shard the model",
            )
        frame = zstandard.ZstdCompressor(level=_LEVEL).compress(payload)
        checksum = xxhash.xxh3_64_intdigest(frame)
        return _PREFIX.pack(MAGIC, self.version, 0, len(text), len(payload), checksum) + frame

    @classmethod
    def parse(cls, data: Any, *, file: str | os.PathLike[str] | None = None) -> SourceRecord:
        """Read a record back.

        Raises
        ------
        MalformedError
            If it is damaged.
        UnsupportedError
            If a newer wcodec wrote it.
        """
        data = bytes(data)
        if len(data) < _PREFIX.size or data[: len(MAGIC)] != MAGIC:
            raise _malformed("the record does not start with WCSOURCE", file)
        _, version, zero, text_bytes, payload_bytes, checksum = _PREFIX.unpack_from(data)
        if version not in VERSIONS:
            raise UnsupportedError(
                f"the record has version {version}, this wcodec reads {VERSIONS[0]} to {VERSIONS[-1]}",
                file=file,
                tensor=RECORD_NAME,
                mend="upgrade wcodec",
            )
        frame = data[_PREFIX.size :]
        if zero or xxhash.xxh3_64_intdigest(frame) != checksum:
            raise _malformed("the record's checksum is wrong", file)
        payload = _decompress(frame, payload_bytes, file)
        try:
            facts = json.loads(payload[:text_bytes])
            source = facts["source"]
            header_end = text_bytes + _count(source["header_bytes"])
            record = cls(
                tool=str(facts["tool"]),
                header=payload[text_bytes:header_end],
                trailing=payload[header_end:],
                nbytes=_count(source["bytes"]),
                digest=parse_digest(source["xxh3_128"]),
                raw={str(name): parse_digest(text) for name, text in facts["raw"].items()},
                pairs={name: _pair(found) for name, found in facts["pairs"].items()} if version > 1 else {},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _malformed(f"the record is not what it should be ({error})", file) from None
        if text_bytes + source["header_bytes"] + source["trailing_bytes"] != len(payload):
            raise _malformed("the record's lengths contradict each other", file)
        return record


def _decompress(frame: bytes, size: int, file: Any) -> bytes:
    """Decompress a frame to exactly `size` bytes, checked before anything is allocated."""
    import zstandard

    try:
        if size > MAX_PAYLOAD_BYTES or zstandard.frame_content_size(frame) != size:
            raise _malformed(f"the record claims {size} bytes", file)
        payload = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(f"the record does not decompress ({error})", file) from None
    if len(payload) != size:
        raise _malformed(f"the record has {len(payload)} bytes and claims {size}", file)
    return bytes(payload)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _pair(found: dict[str, Any]) -> Pair:
    one, two = found["xxh3_128"]
    return Pair(str(found["scale"]), (parse_digest(one), parse_digest(two)))


def parse_digest(text: str) -> bytes:
    """The 16 bytes of an xxh3-128 in hexadecimal; ValueError or TypeError for anything else."""
    digest = bytes.fromhex(text)
    if len(digest) != 16:
        raise ValueError(f"{text!r} is no xxh3-128")
    return digest


def _malformed(problem: str, file: Any) -> MalformedError:
    return MalformedError(problem, file=file, tensor=RECORD_NAME, mend="the file is damaged; copy it again")
