"""Shard indexes: which file should hold which tensor, compared with what the files say.

The headers are the truth; every disagreement is reported and none changes what is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from wcodec.errors import MalformedError
from wcodec.readers.base import Content, first_line
from wcodec.readers.bytefile import ByteFile, FilePath
from wcodec.readers.folder import read_text

SUFFIX = ".index.json"
_MAX_BYTES = 1 << 30
_SHOWN = 3  # names spelled out per kind of disagreement


@dataclass(frozen=True, slots=True)
class Index:
    """An index as it was written.

    Attributes
    ----------
    path : path-like
    weight_map : dict of str to str
        Tensor name to file name.
    total_size : int, optional
        Bytes of all tensors, as claimed; None where the index does not say.
    """

    path: FilePath
    weight_map: dict[str, str]
    total_size: int | None

    @property
    def shards(self) -> list[str]:
        """Sorted names of the files it lists."""
        return sorted(set(self.weight_map.values()))


def read_index(file: ByteFile) -> Index:
    """Read a ``*.index.json``.

    Raises
    ------
    MalformedError
        It is not JSON of the expected form, or names a file outside its directory.
    """
    try:
        found = json.loads(read_text(file, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"is not JSON ({first_line(error)})", file=file.path) from None
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise MalformedError("has no weight_map of tensor names to file names", file=file.path)
    for shard in set(weight_map.values()):
        if not shard or shard.startswith("/") or "\\" in shard or ".." in shard.split("/"):
            raise MalformedError(f"lists {shard!r}, which is not a file of this directory", file=file.path)
    metadata = found.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers print the size as a float, or as text.
    try:
        total = None if size is None or isinstance(size, bool) else int(size)
    except (TypeError, ValueError, OverflowError):
        total = None
    return Index(file.path, weight_map, total)


def compare(index: Index, shards: dict[str, Content]) -> Iterator[str]:
    """One line for every way in which an index and the headers of its shards disagree.

    Parameters
    ----------
    index : Index
    shards : dict of str to Content
        What each listed file holds.
    """
    home = {tensor.name: shard for shard, content in shards.items() for tensor in content.tensors}
    home |= {name: shard for shard, content in shards.items() for name in content.ties}
    ghosts = [name for name in index.weight_map if name not in home]
    unlisted = [name for name in home if name not in index.weight_map]
    holders: dict[str, set[str]] = {}
    for shard, content in shards.items():
        for name in [*(tensor.name for tensor in content.tensors), *content.ties]:
            holders.setdefault(name, set()).add(shard)
    moved = [name for name, shard in index.weight_map.items() if shard not in holders.get(name, {shard})]
    where = index.path.name
    if ghosts:
        yield f"{where}: {_list(ghosts)} listed, but in no shard"
    if unlisted:
        yield f"{where}: {_list(unlisted)} not listed, but in the shards"
    if moved:
        yield f"{where}: {_list(moved)} listed under another shard than the one that holds them"
    total = sum(tensor.nbytes for content in shards.values() for tensor in content.tensors)
    if index.total_size is not None and index.total_size != total:
        yield f"{where}: total_size is {index.total_size}, the shards hold {total} bytes of tensors"


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown}{more})"
