"""Files that appear whole or not at all: temp file beside them, fsync, rename, fsync of the folder.

The temp file of ``model.safetensors`` is ``.model.safetensors.wcodec-part``: one fixed name per destination,
held under an advisory lock while its writer lives. A writer that was killed leaves the file without the lock,
so the next run knows that it is rubbish and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from wcodec.errors import WCodecError

PART_SUFFIX = ".wcodec-part"
NOTHING_WRITTEN = "nothing was written"
"""End of the mends of a full disk: true of one file, and of a folder of which no file was finished."""
_COPY_BYTES = 8 << 20
_NAME_MAX = 255  # bytes in one component of a path, on every file system we meet


@contextlib.contextmanager
def naming(file: str | os.PathLike[str], doing: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into one line that names `file` and what was being done."""
    try:
        yield
    except OSError as error:
        mend = {
            errno.ENOSPC: f"free some space or write to another disk; {NOTHING_WRITTEN}",
            errno.EDQUOT: f"the disk quota is used up; {NOTHING_WRITTEN}",
            errno.EFBIG: f"the file-size limit (ulimit -f) is too small; {NOTHING_WRITTEN}",
            errno.EACCES: "check the permissions of the file and of its folder",
            errno.EPERM: "check the permissions of the file and of its folder",
            errno.EROFS: "the disk is read-only: write to another one",
        }.get(error.errno or 0)
        raise WCodecError(f"cannot {doing}: {error.strerror or error}", file=file, mend=mend) from error


def part_path(path: Path) -> Path:
    """Where the unfinished content of `path` (a file or a folder) lives."""
    name = f".{path.name}{PART_SUFFIX}"
    if len(os.fsencode(name)) > _NAME_MAX:
        name = f".{xxhash.xxh3_64_hexdigest(os.fsencode(path.name))}{PART_SUFFIX}"
    return path.parent / name  # `with_name` refuses `.`


def sync_folder(path: Path) -> None:
    """Make renames inside folder `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync a folder; the rename is still atomic there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF):
            raise
    finally:
        os.close(fd)


def lock(fd: int, path: Path) -> None:
    """Take the writer's lock on an open temp file or folder, or say that somebody else holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(path) from None
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            raise  # a file system without locks still has atomic renames


def _busy(path: Path) -> WCodecError:
    return WCodecError("another wcodec process is writing it", file=path, mend="wait for it or stop it")


def _appeared(path: Path) -> WCodecError:
    return WCodecError("exists now, it did not before", file=path, mend="pass --force to replace it")


class AtomicFile:
    """A file under construction; `replace_file` makes one.

    Attributes
    ----------
    path : Path
        Where the file will appear.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def write_at(self, offset: int, data: Any) -> int:
        """Write all of the bytes-like `data` at `offset`; return the offset after it."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._fd, view, offset)
            offset += written
            view = view[written:]
        return offset

    def truncate(self, size: int) -> None:
        """Set the file's size, in bytes."""
        os.ftruncate(self._fd, size)


@contextlib.contextmanager
def replace_file(path: Path, *, mode: int = 0o666, overwrite: bool = False) -> Iterator[AtomicFile]:
    """Write a file that appears under its name only when the block ends without an exception.

    Parameters
    ----------
    path : Path
        Destination; its folder must exist.
    mode : int
        Permission bits asked for; the umask takes its part.
    overwrite : bool
        Replace what is there. Otherwise its presence is an error, also when it comes while we write.

    Yields
    ------
    AtomicFile

    Raises
    ------
    WCodecError
        For any `OSError` of writing; the temp file is gone then, and the destination is what it was.
    """
    part, fd = part_path(path), -1
    try:
        with naming(path, "write"):
            _remove_stale(part, path)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(part, flags, stat.S_IMODE(mode) & 0o777)
            lock(fd, path)
            if os.fstat(fd).st_nlink == 0:  # a rival took our file for rubbish before we had the lock
                raise _busy(path)
            yield AtomicFile(path, fd)
            os.fsync(fd)
            if not overwrite and os.path.lexists(path):
                raise _appeared(path)
            part.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError, WCodecError):
            if fd >= 0 and part.lstat().st_ino == os.fstat(fd).st_ino:
                part.unlink()
            elif fd < 0 and not isinstance(error, Exception):
                _remove_stale(part, path)  # a signal came between creating the file and knowing that
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    with naming(path, "sync the folder of"):
        sync_folder(path.parent)


def _remove_stale(part: Path, path: Path) -> None:
    """Remove the temp file that a killed run left; refuse when its writer lives."""
    try:
        fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except PermissionError:
        part.unlink()  # a mode without read permission: only its owner can get here and remove it
        return
    try:
        lock(fd, path)
        part.unlink()
    finally:
        os.close(fd)


def copy_file(source: Path, path: Path, *, overwrite: bool = False) -> tuple[int, bytes]:
    """Copy `source` (links followed) to `path` by `replace_file`, with its permission bits.

    Returns
    -------
    tuple of int and bytes
        Size and xxh3-128 of the bytes written.
    """
    hasher = xxhash.xxh3_128()
    offset = 0
    with naming(source, "read"):
        reader = source.open("rb", buffering=0)
    with reader:
        mode = os.fstat(reader.fileno()).st_mode
        buffer = memoryview(bytearray(_COPY_BYTES))
        with replace_file(path, mode=mode, overwrite=overwrite) as out:
            while True:
                with naming(source, "read"):
                    got = reader.readinto(buffer)
                if not got:
                    break
                hasher.update(buffer[:got])
                offset = out.write_at(offset, buffer[:got])
    return offset, hasher.digest()


def swap_folder(part: Path, path: Path, *, overwrite: bool) -> None:
    """Let the finished folder `part` appear as `path`; what `path` was goes away last.

    A kill between the two renames leaves both folders complete under recognisable names; the rerun finds
    every shard done and ends it.
    """
    old = path.with_name(part.name + "-old")
    with naming(path, "rename the finished folder to"):
        if os.path.lexists(path):
            if not overwrite:
                raise _appeared(path)
            remove(old)
            path.rename(old)
        try:
            part.rename(path)
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        sync_folder(path.parent)
        remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
