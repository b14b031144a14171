"""Where a result may be written: never over the input, never inside it, never over something by surprise."""

from __future__ import annotations

import os
from pathlib import Path

from wcodec.errors import WCodecError

_CACHE_FOLDERS = ("blobs", "snapshots")
_FORCE = "pass --force to replace it, or choose another name"


def check_file(source: Path, destination: Path, *, force: bool) -> None:
    """Refuse a destination that would hurt something.

    Parameters
    ----------
    source : Path
        What is read.
    destination : Path
        File to be written.
    force : bool
        Whether an existing file may be replaced.

    Raises
    ------
    WCodecError
        Naming the destination and the way out.
    """
    _check_parent(destination)
    if _same(source, destination):
        raise WCodecError("is the source itself", file=destination, mend="choose another name")
    if os.path.lexists(destination):
        if destination.is_dir() and not destination.is_symlink():
            raise WCodecError("is a folder", file=destination, mend="name the file to write")
        if destination.exists() and not destination.is_file():  # a device or a pipe: a rename would remove it
            raise WCodecError("is no regular file", file=destination, mend="choose another name")
        if not force:
            raise WCodecError("already exists", file=destination, mend=_FORCE)


def check_folder(source: Path, destination: Path, *, force: bool) -> None:
    """As `check_file`, for a whole folder."""
    _check_parent(destination)
    from_, to = source.resolve(), destination.resolve()
    if from_ == to or _same(source, destination):
        raise WCodecError("is the source itself", file=destination, mend="choose another folder")
    if from_ in to.parents:
        raise WCodecError("lies inside the source", file=destination, mend="choose a folder outside it")
    if to in from_.parents:
        raise WCodecError("contains the source", file=destination, mend="choose a folder outside it")
    if destination.name in ("", ".."):  # it could not be renamed into place
        raise WCodecError("is a folder somebody may be in", file=destination, mend="name a new folder")
    if os.path.lexists(destination):
        if not destination.is_dir():
            raise WCodecError("is a file", file=destination, mend="name a new folder")
        if not force:
            raise WCodecError("already exists", file=destination, mend=_FORCE)


def _check_parent(destination: Path) -> None:
    parent = destination.parent
    if not parent.is_dir():
        raise WCodecError("is not a folder", file=parent, mend="create it first")
    for folder in (parent.resolve(), *parent.resolve().parents):
        if folder.name in _CACHE_FOLDERS and all((folder.parent / name).is_dir() for name in _CACHE_FOLDERS):
            raise WCodecError(
                "lies inside a Hugging Face cache", file=destination, mend="choose a folder outside it"
            )


def _same(source: Path, destination: Path) -> bool:
    try:
        return source.samefile(destination)
    except OSError:
        return False
