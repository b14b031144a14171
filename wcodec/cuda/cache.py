"""A directory of compiled kernels that survives crashes, races and bit rot.

One entry is one file: a magic, a JSON header (the compiler's log, the cubin's length and digest), the cubin.
Files appear by atomic rename, so a reader sees a whole entry or none; an entry that does not check is dropped
and compiled again.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from pathlib import Path

import xxhash

_MAGIC = b"WCCUBIN1"
_LENGTH = struct.Struct("<I")


def cache_dir() -> Path:
    """Return the directory of compiled kernels and tuned tables.

    ``WCODEC_CACHE_DIR`` where set, else ``wcodec`` under ``XDG_CACHE_HOME``, else ``~/.cache/wcodec``.
    """
    explicit = os.environ.get("WCODEC_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "wcodec"


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that no reader and no crash ever leaves half a file there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def store(path: Path, cubin: bytes, log: str) -> None:
    """Write one entry; a directory that cannot be written only costs the next start its time."""
    header = json.dumps({"log": log, "bytes": len(cubin), "xxh3_128": _digest(cubin)}).encode()
    with contextlib.suppress(OSError):
        write_atomic(path, _MAGIC + _LENGTH.pack(len(header)) + header + cubin)


def fetch(path: Path) -> tuple[bytes, str] | None:
    """Return ``(cubin, log)`` of an entry, or None where it is missing or does not check."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + _LENGTH.size
    if len(data) < start or data[: len(_MAGIC)] != _MAGIC:
        return None
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    cubin = data[start + length :]
    try:
        header = json.loads(data[start : start + length])
        good = header["bytes"] == len(cubin) and header["xxh3_128"] == _digest(cubin)
        return (cubin, str(header["log"])) if good else None
    except (ValueError, KeyError, TypeError):
        return None


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
