"""The manifest of a packed directory: what each file was, so that each can be given back.

The layout is section 6 of ``docs/container.md``.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from wcodec.container.atomic import naming, replace_file
from wcodec.container.pipeline import CHUNK_BYTES
from wcodec.container.record import parse_digest
from wcodec.errors import MalformedError, UnsupportedError

MANIFEST_NAME = "wcodec.manifest.json"
SCHEMA = "wcodec.manifest/1"
KINDS = ("packed", "rewritten", "copied")
_MAX_ORIGINAL_BYTES = 1 << 30


@dataclass(frozen=True)
class FileFacts:
    """One file of the directory.

    Attributes
    ----------
    kind : {"packed", "rewritten", "copied"}
        A packed safetensors file, a text that had to change (the index), or a copy.
    nbytes : int
        Size of the original.
    digest : bytes
        xxh3-128 of the original.
    stored_bytes : int
        Size in the packed directory.
    original : bytes, optional
        The original text of a rewritten file.
    stored_digest : bytes, optional
        xxh3-128 of the text that a rewritten file has now.
    """

    kind: str
    nbytes: int
    digest: bytes
    stored_bytes: int
    original: bytes | None = None
    stored_digest: bytes | None = None


@dataclass
class Manifest:
    """Facts by relative POSIX path.

    Attributes
    ----------
    profile : str
        Profile the weight files were packed with.
    files : dict of str to FileFacts
    """

    profile: str
    files: dict[str, FileFacts] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, atomically; the same facts give the same bytes."""
        from wcodec import __version__

        document = {
            "schema": SCHEMA,
            "tool": f"wcodec {__version__}",
            "profile": self.profile,
            "files": {path: _to_json(facts) for path, facts in sorted(self.files.items())},
        }
        text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
        with replace_file(folder / MANIFEST_NAME, overwrite=True) as out:
            out.write_at(
                0, text.encode(errors="backslashreplace")
            )  # names that are not UTF-8, as JSON escapes

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a packed directory.

        Raises
        ------
        MalformedError
            If it contradicts itself.
        UnsupportedError
            If there is none, or a newer wcodec wrote it.
        """
        path = folder / MANIFEST_NAME
        if not path.exists():
            raise UnsupportedError(
                f"has no {MANIFEST_NAME}",
                file=folder,
                mend="name its packed files one by one, or pack it again",
            )
        with naming(path, "read"):
            text = path.read_bytes()
        try:
            document = json.loads(text)
            schema = document["schema"]
            if schema != SCHEMA:
                raise UnsupportedError(f"has the schema {schema!r}", file=path, mend="upgrade wcodec")
            files = {_checked(name): _from_json(facts) for name, facts in document["files"].items()}
            return cls(str(document["profile"]), files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MalformedError(
                f"is no manifest ({error})", file=path, mend="pack the directory again"
            ) from None


def _to_json(facts: FileFacts) -> dict[str, Any]:
    document: dict[str, Any] = {
        "kind": facts.kind,
        "bytes": facts.nbytes,
        "xxh3_128": facts.digest.hex(),
        "stored_bytes": facts.stored_bytes,
    }
    if facts.original is not None and facts.stored_digest is not None:
        import zstandard

        frame = zstandard.ZstdCompressor(level=9).compress(facts.original)
        document["stored_xxh3_128"] = facts.stored_digest.hex()
        document["original"] = base64.b64encode(frame).decode()
    return document


def _from_json(document: dict[str, Any]) -> FileFacts:
    kind, nbytes, stored = document["kind"], document["bytes"], document["stored_bytes"]
    digest = parse_digest(document["xxh3_128"])
    if kind not in KINDS or not all(type(n) is int and n >= 0 for n in (nbytes, stored)):
        raise ValueError(f"{kind!r} is not described as it should be")
    if kind != "rewritten":
        return FileFacts(kind, nbytes, digest, stored)
    original = _decompress(document["original"], nbytes)
    return FileFacts(kind, nbytes, digest, stored, original, parse_digest(document["stored_xxh3_128"]))


def _decompress(text: str, nbytes: int) -> bytes:
    import zstandard

    frame = base64.b64decode(text, validate=True)
    try:
        if nbytes > _MAX_ORIGINAL_BYTES or zstandard.frame_content_size(frame) != nbytes:
            raise ValueError(f"an original text does not have {nbytes} bytes")
        return bytes(zstandard.ZstdDecompressor().decompress(frame))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _checked(name: str) -> str:
    """A relative path that stays inside the directory."""
    path = PurePosixPath(name)
    inside = path.parts and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    if not inside or str(path) != name or name == MANIFEST_NAME:
        raise ValueError(f"{name!r} is no path inside the directory")
    return name


def file_digest(path: Path) -> tuple[int, bytes]:
    """Size and xxh3-128 of a file."""
    hasher, nbytes = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with naming(path, "read"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while got := os.readv(fd, [buffer]):
                hasher.update(buffer[:got])
                nbytes += got
        finally:
            os.close(fd)
    return nbytes, hasher.digest()
