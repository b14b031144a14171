"""Addresses (https://, hf://, s3://, …) through fsspec: headers first, then only the ranges asked for.

The parsers are those of local files; this module gives them a `ByteFile` and a `Folder` that fetch ranges.
Nothing is stored on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import unquote

import numpy as np

from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.readers.base import Source, first_line
from wcodec.readers.bytefile import Bytes
from wcodec.readers.directory import USUAL_INDEXES, open_directory, open_index
from wcodec.readers.files import SUFFIXES, open_file
from wcodec.readers.index import SUFFIX

HEAD = 128 * 1024
"""Bytes fetched and kept when the start of a file is first asked for: most headers in one request."""

_WHOLE = {"hf": "hf://owner/model", "s3": "s3://bucket/model", "https": "https://host/model"}
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address with a scheme, such as ``hf://org/name``."""
    return _SCHEME.match(os.fspath(path)) is not None


class Address:
    """An address, with the few operations of a path that readers use.

    Parameters
    ----------
    url : str
        With its scheme; a query (``?download=true``) stays part of the address but not of the name.
    """

    __slots__ = ("url",)

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def _path(self) -> str:
        return re.split(r"[?#]", self.url, maxsplit=1)[0].rstrip("/")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return unquote(self._path.rpartition("/")[2])

    @property
    def suffix(self) -> str:
        """Suffix of the name with its dot, or nothing."""
        stem, dot, suffix = self.name.rpartition(".")
        return dot + suffix if stem else ""

    @property
    def parent(self) -> Address:
        """Address of the directory."""
        return Address(self._path.rpartition("/")[0] + "/")

    def __truediv__(self, name: str, /) -> Address:
        return Address(f"{self._path}/{name}")

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Address({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)


class RemoteFile:
    """A file at an address, read in ranges; can be pickled to another process.

    Parameters
    ----------
    path : Address

    Raises
    ------
    WCodecError
        It cannot be reached.
    UnsupportedError
        fsspec or the package for the scheme is missing, or the server does not say how long the file is.
    """

    def __init__(self, path: Address) -> None:
        self.path = path
        self._fs, self._key = _filesystem(path)
        with _one_line(path):
            size = self._fs.info(self._key).get("size")
        if size is None:
            raise UnsupportedError(
                "the server does not say how long it is", file=path, mend="download it, then give the path"
            )
        self.size = int(size)
        self._head: Bytes | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteFile, (self.path,)

    def read_at(self, offset: int, n: int) -> Bytes:
        """Exactly the `n` bytes at `offset`; see `ByteFile.read_at`.

        Raises
        ------
        UnsupportedError
            The server does not serve ranges.
        """
        if offset < 0 or n < 0 or offset + n > self.size:
            raise MalformedError(
                f"bytes {offset} to {offset + n} were asked for, but the file has {self.size}", file=self.path
            )
        if offset + n > HEAD:
            return self._fetch(offset, n)
        if self._head is None:
            self._head = self._fetch(0, min(HEAD, self.size))
        return self._head[offset : offset + n]

    def _fetch(self, offset: int, n: int) -> Bytes:
        if n == 0:
            return np.empty(0, np.uint8)
        with (
            _one_line(self.path),
            self._fs.open(self._key, "rb", cache_type="none", size=self.size) as file,
        ):
            file.seek(offset)
            data = file.read(n)
        if len(data) != n:
            raise MalformedError(
                f"the server sent {len(data)} bytes where {n} were asked for",
                file=self.path,
                mend="try again; if it stays so, download it and give the path",
            )
        return np.frombuffer(data, np.uint8)


class RemoteFolder:
    """A directory at an address.

    Parameters
    ----------
    path : Address
    """

    workers = 8

    def __init__(self, path: Address) -> None:
        self.path = path
        self._fs, self._key = _filesystem(path)

    def names(self) -> list[str]:
        """See `Folder.names`."""
        with _one_line(self.path):
            found = self._fs.ls(self._key, detail=True)
        base = self._key.rstrip("/")
        names = set()
        for item in found:
            below = unquote(item["name"].rstrip("/").removeprefix(base).lstrip("/"))
            # Listings in HTML hold other links too: to sort the columns, to elsewhere.
            if below and not re.search(r"[/?#]", below):
                names.add(below + ("/" if item["type"] == "directory" else ""))
        return sorted(names)

    def open(self, name: str) -> RemoteFile:
        """See `Folder.open`."""
        return RemoteFile(self.path / name)

    def enter(self, name: str) -> RemoteFolder:
        """See `Folder.enter`."""
        return RemoteFolder(self.path / name)


def open_remote(url: str) -> Source:
    """Open a checkpoint at an address: a file, an index file or a directory.

    A directory of a web server that gives no listing is tried for the usual index and file names.

    Raises
    ------
    WCodecError
        It cannot be reached, or does not exist.
    UnsupportedError
        fsspec or the package for the scheme is missing.
    """
    path = Address(url)
    if path.name.endswith(SUFFIX):
        return open_index(RemoteFolder(path.parent), path.name)
    if path.suffix.lower() in SUFFIXES or not _is_directory(path):
        return open_file(RemoteFile(path))
    folder = RemoteFolder(path)
    if not url.startswith("http") or _has_listing(folder):
        return open_directory(folder)
    fs = _filesystem(path)[0]
    with _one_line(path):
        for index in USUAL_INDEXES:
            if fs.exists(f"{path / index}"):
                return open_index(folder, index)
    return open_file(folder.open("model.safetensors"))


def _has_listing(folder: RemoteFolder) -> bool:
    try:
        return bool(folder.names())
    except WCodecError:
        return False


def _is_directory(path: Address) -> bool:
    if path.url.startswith("http"):
        return path.url.endswith("/")  # a web server calls everything a file
    fs, key = _filesystem(path)
    with _one_line(path):
        return bool(fs.isdir(key))


def _filesystem(path: Address) -> tuple[Any, str]:
    """fsspec's file system for an address, and what it calls the file."""
    scheme, _, rest = path.url.partition("://")
    if not rest.strip("/"):
        whole = _WHOLE.get(scheme, "all of it")
        raise UnsupportedError("names no file or folder", file=path, mend=f"write {whole}")
    is_s3 = scheme in ("s3", "s3a")
    install = f"pip install 'wcodec[{'s3' if is_s3 else 'remote'}]'"
    try:
        fsspec = import_module("fsspec")
    except ImportError:
        raise UnsupportedError("reading addresses needs fsspec", file=path, mend=install) from None
    try:
        fs, key = fsspec.core.url_to_fs(path.url)
    except ImportError as error:
        # fsspec names the package: "Install s3fs to access S3".
        raise UnsupportedError(
            f"fsspec needs another package ({first_line(error)})",
            file=path,
            mend=install if is_s3 else f"install it, or {install} for https:// and hf://",
        ) from None
    except ValueError as error:
        raise UnsupportedError(f"cannot be read ({first_line(error)})", file=path) from None
    except OSError as error:  # some file systems connect at once
        raise WCodecError(
            f"cannot be reached ({first_line(error)})", file=path, mend="check the address"
        ) from None
    return fs, key


@contextmanager
def _one_line(path: Address) -> Iterator[None]:
    """Turn whatever a network library raises into one line that names the address."""
    try:
        yield
    except (WCodecError, MemoryError):
        raise
    except FileNotFoundError:
        raise WCodecError(
            "does not exist or cannot be reached", file=path, mend="check the address"
        ) from None
    except PermissionError:
        raise WCodecError("may not be read", file=path, mend="log in, or check the address") from None
    except Exception as error:  # aiohttp, botocore, huggingface_hub: each has its own kinds
        if "range requests" in str(error):
            raise UnsupportedError(
                "the server does not serve ranges", file=path, mend="download it, then give the path"
            ) from None
        raise WCodecError(
            f"cannot be read ({type(error).__name__}: {first_line(error)})",
            file=path,
            mend="check the address" if isinstance(error, ValueError) else "try again",
        ) from None
