"""Byte access: the one thing a reader needs from where a file lives.

A reader asks a `ByteFile` for its size and for ranges of its bytes, nothing else, so a file on another
machine is read by the same parser as one on this disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from wcodec.errors import MalformedError, WCodecError

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""Read-only 1-D uint8 array."""

MAP_FROM = 256 * 1024
"""Bytes from which a range is mapped; below, one pread is cheaper than a mapping."""


class FilePath(Protocol):
    """What `pathlib.Path` and an address elsewhere have in common."""

    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> Any: ...
    def __truediv__(self, name: str, /) -> Any: ...
    def __fspath__(self) -> str: ...


@runtime_checkable
class ByteFile(Protocol):
    """Random access to the bytes of one file.

    Attributes
    ----------
    path : path-like
        Where the file is, for messages and for its suffix.
    size : int
        Length in bytes when it was opened.
    """

    @property
    def path(self) -> FilePath: ...
    @property
    def size(self) -> int: ...

    def read_at(self, offset: int, n: int) -> Bytes:
        """Exactly the `n` bytes at `offset`, read-only.

        Raises
        ------
        MalformedError
            The range does not lie inside the file, or the file has changed since it was opened.
        """
        ...


class LocalFile:
    """A regular file on this machine.

    It holds no descriptor between reads, so thousands of shards can be open at once, and it can be pickled
    to another process. Every read opens the file and checks that it is still the one that was opened: same
    inode, size and modification time. Large ranges are mapped and never copied; the mapping lives as long
    as a view into it.

    The check comes immediately before mapping. A writer that truncates the file *in place* while a mapped
    view is in use still ends the process with SIGBUS, as for every mmap reader; writers that rename a new
    file over the old one (as wcodec does) are harmless. Pass ``mapped=False`` where writers truncate.

    Parameters
    ----------
    path : path-like
        Symbolic links are followed.
    mapped : bool
        Map large ranges (default) instead of reading them into memory.

    Raises
    ------
    WCodecError
        The file does not exist, may not be read, or is not a regular file.
    """

    __slots__ = ("_identity", "mapped", "path", "size")

    def __init__(self, path: str | os.PathLike[str], *, mapped: bool = True) -> None:
        self.path = Path(path)
        self.mapped = mapped
        try:
            found = self.path.stat()
        except OSError as error:
            raise unreadable(self.path, error) from None
        if not stat.S_ISREG(found.st_mode):
            raise WCodecError("is not a regular file", file=self.path)
        self.size = found.st_size
        self._identity = _identity(found)
        # Ask for permission now: an error in the middle of a long run helps nobody.
        self.check()

    def __repr__(self) -> str:
        return f"LocalFile({str(self.path)!r}, {self.size} bytes)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalFile) and (self.path, self._identity) == (other.path, other._identity)

    def __hash__(self) -> int:
        return hash((self.path, self._identity))

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(self.path, error) from None
        if _identity(os.fstat(fd)) != self._identity:
            os.close(fd)
            raise MalformedError(
                "changed while it was being read",
                file=self.path,
                mend="let its writer finish, then run again",
            )
        return fd

    def check(self) -> None:
        """Raise `MalformedError` where the file is no longer the one that was opened."""
        os.close(self._open())

    def read_at(self, offset: int, n: int) -> Bytes:
        """Exactly the `n` bytes at `offset`; see `ByteFile.read_at`."""
        if offset < 0 or n < 0 or offset + n > self.size:
            raise MalformedError(
                f"bytes {offset} to {offset + n} were asked for, but the file has {self.size}", file=self.path
            )
        if n == 0:
            return _read_only(np.empty(0, np.uint8))
        fd = self._open()
        try:
            if self.mapped and n >= MAP_FROM:
                try:
                    return _map(fd, offset, n)
                except (OSError, ValueError):
                    pass  # file systems without mmap: read instead
            return self._pread(fd, offset, n)
        finally:
            os.close(fd)

    def _pread(self, fd: int, offset: int, n: int) -> Bytes:
        out = np.empty(n, np.uint8)
        done = 0
        while done < n:
            try:
                got = os.preadv(fd, [out[done:].data], offset + done)
            except OSError as error:
                raise WCodecError(f"cannot be read: {error.strerror}", file=self.path) from None
            if got == 0:
                raise MalformedError(f"ends at byte {offset + done}, {n - done} bytes early", file=self.path)
            done += got
        return _read_only(out)


@contextlib.contextmanager
def page_by_page(data: Bytes) -> Iterator[None]:
    """Inside, what is touched of a mapped range comes from the disk alone, not with all that lies around it.

    Parameters
    ----------
    data : numpy.ndarray
        From `LocalFile.read_at`; nothing happens where it is not mapped.
    """
    mapping = getattr(data.base, "obj", None)
    if not isinstance(mapping, mmap.mmap):
        yield
        return
    mapping.madvise(mmap.MADV_RANDOM)
    try:
        yield
    finally:
        mapping.madvise(mmap.MADV_NORMAL)


def unreadable(path: PurePath, error: OSError) -> WCodecError:
    """The one-line error for a path that the operating system refuses."""
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):  # noqa: PTH114 - also for a path whose parents are files
            target = os.readlink(path)  # noqa: PTH115
            return WCodecError(
                f"is a link to {target}, which does not exist",
                file=path,
                mend="download the file again or remove the link",
            )
        return WCodecError("does not exist", file=path, mend="check the path")
    if isinstance(error, PermissionError):
        return WCodecError("may not be read", file=path, mend="check its permissions")
    return WCodecError(f"cannot be opened: {error.strerror or error}", file=path)


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _map(fd: int, offset: int, n: int) -> Bytes:
    lead = offset % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(fd, n + lead, prot=mmap.PROT_READ, offset=offset - lead)
    return np.frombuffer(mapping, np.uint8, count=n, offset=lead)


def _read_only(data: np.ndarray[Any, np.dtype[np.uint8]]) -> Bytes:
    data.flags.writeable = False
    return data
