"""Directories: by index, several files without one, and Hugging Face caches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.readers.base import Content, Source, TensorInfo
from wcodec.readers.bytefile import FilePath
from wcodec.readers.files import SUFFIXES, read_file
from wcodec.readers.folder import Folder, read_text
from wcodec.readers.index import SUFFIX, Index, compare, read_index

_PREFERENCE = ("safetensors", "gguf", "torch", "numpy")
USUAL_INDEXES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")


def open_directory(folder: Folder) -> Source:
    """The checkpoint in a directory.

    With an index, the files it lists; otherwise every file of the first kind present, in the order
    safetensors, GGUF, torch, NumPy. A Hugging Face cache entry (``models--…``) is entered through its
    ``main`` or only snapshot.

    Raises
    ------
    WCodecError
        There is nothing readable, or it is not clear which checkpoint is meant.
    MalformedError
        A file is malformed, or the index lists one that is not there.
    """
    folder = _enter_cache(folder)
    names = folder.names()
    index = _choose_index(folder, names)
    if index is not None:
        return open_index(folder, index, names)
    by_kind: dict[str, list[str]] = {}
    for name in names:
        suffix = "." + name.rpartition(".")[2].lower()
        if suffix in SUFFIXES and not name.startswith("."):
            by_kind.setdefault(SUFFIXES[suffix], []).append(name)
    kind = next((kind for kind in _PREFERENCE if kind in by_kind), None)
    if kind is None:
        raise _nothing(folder, names)
    chosen = by_kind.pop(kind)
    source = _merge(folder.path, *_read_some(folder, chosen, kind))
    for other in by_kind.values():
        source.remarks.append(f"left out beside the {kind} files: {', '.join(other)}")
    return source


def open_index(folder: Folder, index_name: str, names: list[str] | None = None) -> Source:
    """The checkpoint that an index file describes.

    Parameters
    ----------
    folder : Folder
        Where the index and its shards lie.
    index_name : str
    names : list of str, optional
        What lies in the folder, where it can be listed; for the remark on files that were left out.
    """
    index = read_index(folder.open(index_name))
    if not index.weight_map:
        raise MalformedError("lists no tensors", file=index.path)
    if names is not None:
        for shard in index.shards:
            if "/" not in shard and shard not in names:
                raise MalformedError(
                    f"is missing, but {index_name} lists it",
                    file=folder.path / shard,
                    mend="finish the download",
                )
    shards = _read_all(folder, index.shards)
    source = _merge(folder.path, shards, index=index)
    source.differences[:0] = compare(index, shards)
    suffix = "." + index.shards[0].rpartition(".")[2]
    others = [name for name in names or () if name.endswith(suffix) and name not in shards]
    if others:
        source.differences.append(f"{index_name}: does not list {', '.join(others)}, left out")
    return source


def _read_all(folder: Folder, names: list[str]) -> dict[str, Content]:
    with ThreadPoolExecutor(folder.workers) as pool:
        contents = pool.map(lambda name: read_file(folder.open(name)), names)
        return dict(zip(names, contents, strict=True))


def _read_some(folder: Folder, names: list[str], kind: str) -> tuple[dict[str, Content], list[str]]:
    """What the files hold, and a remark on each that is whole but no weights.

    Only torch has such files: trainers save arguments and optimizers beside the weights.
    """
    if kind != "torch":
        return _read_all(folder, names), []
    contents: dict[str, Content] = {}
    refused: list[UnsupportedError] = []
    for name in names:
        try:
            contents[name] = read_file(folder.open(name))
        except UnsupportedError as error:
            refused.append(error)
    if not contents:
        raise refused[0]
    return contents, [f"left out: {error}" for error in refused]


def _merge(
    path: FilePath, contents: dict[str, Content], remarks: Sequence[str] = (), *, index: Index | None = None
) -> Source:
    """One source of several files; a name that occurs twice is counted once."""
    kind = next(iter(contents.values())).kind
    source = Source(path, kind, [], [], remarks=list(remarks), index=index.path if index else None)
    home: dict[str, tuple[str, TensorInfo]] = {}
    listed = index.weight_map if index else {}
    for file, content in contents.items():
        source.files.append(path / file)
        source.metadata = content.metadata | source.metadata
        source.ties |= content.ties
        source.differences += content.differences
        source.remarks += content.remarks
        for tensor in content.tensors:
            if tensor.name not in home:
                home[tensor.name] = (file, tensor)
                continue
            first, kept = home[tensor.name]
            same = (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)
            if listed.get(tensor.name) == file:
                home[tensor.name] = (file, tensor)
                first, file_left_out = file, first
            else:
                file_left_out = file
            source.differences.append(
                f"tensor {tensor.name!r} is in {first} and in {file_left_out}"
                f"{'' if same else ' with another dtype or shape'}, counted once"
            )
    source.tensors = [tensor for _, tensor in home.values()]
    return source


def _choose_index(folder: Folder, names: list[str]) -> str | None:
    """The index to follow: the usual names first, safetensors before others, never a guess between two."""
    indexes = [name for name in names if name.endswith(SUFFIX)]
    for usual in USUAL_INDEXES:
        if usual in indexes:
            return usual
    for ending in (f".safetensors{SUFFIX}", f".bin{SUFFIX}"):
        found = [name for name in indexes if name.endswith(ending)]
        if len(found) > 1:
            raise WCodecError(
                f"holds several checkpoints ({', '.join(found)})",
                file=folder.path,
                mend="give the index file itself as the path",
            )
        if found:
            return found[0]
        if any(name.endswith(".safetensors") for name in names):
            return None  # an index of .bin shards does not speak for the safetensors files beside it
    return None


def _enter_cache(folder: Folder) -> Folder:
    names = folder.names()
    if "snapshots/" not in names or "blobs/" not in names:
        return folder
    snapshots = folder.enter("snapshots")
    revisions = [name.rstrip("/") for name in snapshots.names() if name.endswith("/")]
    if "refs/" in names and "main" in folder.enter("refs").names():
        main = read_text(folder.enter("refs").open("main"), 1024).strip()
        if main in revisions:
            return snapshots.enter(main)
    if len(revisions) == 1:
        return snapshots.enter(revisions[0])
    raise WCodecError(
        f"is a Hugging Face cache with {len(revisions)} snapshots and no main",
        file=folder.path,
        mend=f"give one of them as the path: {', '.join(revisions)}" if revisions else "download it again",
    )


def _nothing(folder: Folder, names: list[str]) -> WCodecError:
    if not names:
        return UnsupportedError("is empty", file=folder.path, mend="give a directory that holds a checkpoint")
    inside = []
    for name in names:
        if name.endswith("/"):
            try:
                below = folder.enter(name.rstrip("/")).names()
            except WCodecError:
                continue
            if any("." + file.rpartition(".")[2].lower() in SUFFIXES for file in below):
                inside.append(name)
    mend = f"files are {', '.join(sorted(SUFFIXES))}"
    if inside:
        mend = f"give one of its directories instead: {', '.join(inside)}"
    return UnsupportedError("holds no weight files", file=folder.path, mend=mend)
