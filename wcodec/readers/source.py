"""The front door: a path or an address becomes a source."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable
from pathlib import Path

from wcodec.errors import WCodecError
from wcodec.readers.base import Source
from wcodec.readers.bytefile import LocalFile, unreadable
from wcodec.readers.directory import open_directory, open_index
from wcodec.readers.files import open_file
from wcodec.readers.folder import Folder, LocalFolder
from wcodec.readers.index import SUFFIX
from wcodec.readers.remote import is_address, open_remote


def open_source(
    path: str | os.PathLike[str],
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    mapped: bool = True,
) -> Source:
    """Open a checkpoint; headers are read and checked, data are read when asked for.

    Parameters
    ----------
    path : path-like
        A file, an index file, a directory, a Hugging Face snapshot or cache directory, or an address of
        one of these (``https://``, ``hf://``, ``s3://``; needs the extra ``[remote]``).
    include, exclude : iterable of str
        Globs on tensor names, case-sensitive. A tensor is kept where `include` is empty or one of its
        globs matches, and none of `exclude` does.
    mapped : bool
        Map large ranges of local files; see `LocalFile`.

    Returns
    -------
    Source

    Raises
    ------
    WCodecError
        The path does not exist or may not be read, or the globs leave no tensor.
    MalformedError
        A file contradicts its own format; truncated files are found here, before any data are read.
    UnsupportedError
        There is nothing to read, or an extra is missing.
    """
    source = open_remote(os.fspath(path)) if is_address(path) else _open_local(Path(path), mapped)
    return _keep(source, list(include), list(exclude))


def _open_local(path: Path, mapped: bool) -> Source:
    try:
        is_directory = path.stat() and path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from None
    if is_directory:
        return open_directory(LocalFolder(path, mapped=mapped))
    if path.name.endswith(SUFFIX):
        parent: Folder = LocalFolder(path.parent, mapped=mapped)
        return open_index(parent, path.name, parent.names())
    return open_file(LocalFile(path, mapped=mapped))


def _keep(source: Source, include: list[str], exclude: list[str]) -> Source:
    if not include and not exclude:
        return source
    wanted, unwanted = _matcher(include or ["*"]), _matcher(exclude)
    kept = [t for t in source.tensors if wanted.match(t.name) and not unwanted.match(t.name)]
    if source.tensors and not kept:
        names = ", ".join(repr(tensor.name) for tensor in source.tensors[:3])
        raise WCodecError(
            f"no tensor name passes include {include} and exclude {exclude}",
            file=source.path,
            mend=f"names look like {names}",
        )
    left = {tensor.name for tensor in kept}
    source.tensors = kept
    source.ties = {name: data for name, data in source.ties.items() if data in left}
    return source


def _matcher(globs: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, globs)) or r"(?!)")
