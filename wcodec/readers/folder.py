"""Where files lie together: a directory on this machine, seen as names that can be opened.

An address elsewhere is another `Folder`; the rules for directories do not know the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from wcodec.errors import WCodecError
from wcodec.readers.bytefile import ByteFile, FilePath, LocalFile, unreadable


class Folder(Protocol):
    """A place with named files."""

    @property
    def path(self) -> FilePath: ...
    @property
    def workers(self) -> int:
        """Files to open at the same time; more than one where opening waits for a network."""
        ...

    def names(self) -> list[str]:
        """Sorted names of what lies directly in it, directories with a trailing slash."""
        ...

    def open(self, name: str) -> ByteFile:
        """The file of that name; links are followed."""
        ...

    def enter(self, name: str) -> Folder:
        """The folder of that name."""
        ...


class LocalFolder:
    """A directory of this machine.

    Parameters
    ----------
    path : Path
    mapped : bool
        See `LocalFile`.
    """

    workers = 1

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        self.path = path
        self.mapped = mapped

    def names(self) -> list[str]:
        """See `Folder.names`."""
        try:
            return sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise unreadable(self.path, error) from None

    def open(self, name: str) -> LocalFile:
        """See `Folder.open`."""
        return LocalFile(self.path / name, mapped=self.mapped)

    def enter(self, name: str) -> LocalFolder:
        """See `Folder.enter`."""
        return LocalFolder(self.path / name, mapped=self.mapped)


def read_text(file: ByteFile, limit: int) -> str:
    """Text of a small file.

    Raises
    ------
    WCodecError
        The file is larger than `limit` bytes or not UTF-8.
    """
    if file.size > limit:
        raise WCodecError(f"has {file.size} bytes, more than the {limit} expected", file=file.path)
    try:
        return file.read_at(0, file.size).tobytes().decode("utf-8")
    except UnicodeDecodeError:
        raise WCodecError("is not UTF-8 text", file=file.path) from None
