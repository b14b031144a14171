"""What a model directory holds, and the text files in it that must change with the weights."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from wcodec.container.atomic import PART_SUFFIX, naming
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.readers.bytefile import LocalFile
from wcodec.readers.index import compare, read_index
from wcodec.readers.safetensors import read_safetensors

#: What ``quantization_config`` in a packed model's ``config.json`` calls us.
QUANT_METHOD = "wcodec"

_INDEX_SUFFIX = ".safetensors.index.json"
_CONFIG_NAME = "config.json"
_SKIPPED = {".git", ".cache"}  # histories and download state hold copies of the weights, not the model


def list_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Files of a model directory, links followed.

    Returns
    -------
    files : dict of str to Path
        Path by relative POSIX path, sorted.
    notes : list of str
        What was left out.

    Raises
    ------
    WCodecError
        For a dangling link, a link to a folder around it, something that is neither file nor folder, or a
        Hugging Face cache, which holds every file twice.
    """
    with naming(folder, "read"):
        cache = (folder / "snapshots").is_dir() and (folder / "blobs").is_dir()
    if cache:
        some = next((path for path in (folder / "snapshots").iterdir()), folder / "snapshots")
        raise UnsupportedError(
            "is a Hugging Face cache", file=folder, mend=f"give a snapshot, such as {some}"
        )
    notes: list[str] = []
    found = dict(_walk(folder, folder, (), notes))
    return dict(sorted(found.items())), notes


def _walk(
    top: Path, folder: Path, above: tuple[tuple[int, int], ...], notes: list[str]
) -> Iterator[tuple[str, Path]]:
    with naming(folder, "read"):
        info = folder.stat()
        names = sorted(path.name for path in folder.iterdir())
    here = (info.st_dev, info.st_ino)
    if here in above:
        raise WCodecError("is a link to a folder around it", file=folder, mend="remove the link")
    for name in names:
        path = folder / name
        if path.is_symlink() and not path.exists():
            raise WCodecError(
                f"is a link to {path.readlink()}, which does not exist",
                file=path,
                mend="download the file again or remove the link",
            )
        if name in _SKIPPED and path.is_dir():
            notes.append(f"{path.relative_to(top)} is left out: it is not part of the model")
        elif path.is_dir():
            yield from _walk(top, path, (*above, here), notes)
        elif name.endswith(PART_SUFFIX):
            notes.append(f"{path.relative_to(top)} is left out: an interrupted run left it")
        elif stat.S_ISREG(path.stat().st_mode):
            yield path.relative_to(top).as_posix(), path
        else:
            raise WCodecError("is neither a file nor a folder", file=path, mend="remove it")


def is_rewritable(name: str) -> bool:
    """Whether the file called `name` may have to change with the weights."""
    return name == _CONFIG_NAME or name.endswith(_INDEX_SUFFIX)


def index_notes(files: Mapping[str, Path]) -> Iterator[str]:
    """One line for every way in which an index and the safetensors files it lists disagree.

    Parameters
    ----------
    files : mapping of str to Path
        From `list_files`; the headers of the weight files are sound.
    """
    for name, path in files.items():
        if not name.endswith(_INDEX_SUFFIX):
            continue
        try:
            index = read_index(LocalFile(path))
        except MalformedError as error:
            yield f"{name}: {error.problem}; it is copied as it is"
            continue
        folder = name.rpartition("/")[0]
        shards = {shard: f"{folder}/{shard}" if folder else shard for shard in index.shards}
        for shard, place in shards.items():
            if place not in files:
                yield f"{name}: lists {shard}, which is missing"
        there = {shard: files[place] for shard, place in shards.items() if place in files}
        yield from compare(index, {shard: read_safetensors(LocalFile(at)) for shard, at in there.items()})


def rewritten(name: str, text: bytes, stored: Mapping[str, int], *, packed: bool) -> bytes | None:
    """The text of a file as it has to read beside packed weights; None where it stays.

    An index keeps its names, which packed files keep too; its total size becomes that of the packed tensors.
    The model's ``config.json`` says how the weights are stored, so that transformers picks our loader.

    Parameters
    ----------
    name : str
        Relative POSIX path.
    text : bytes
        What the file says in the source.
    stored : mapping of str to int
        Bytes of the source's tensors in each packed file, by relative path.
    packed : bool
        Whether any tensor got packed.
    """
    if name == _CONFIG_NAME:
        return _with_method(text) if packed else None
    if not name.endswith(_INDEX_SUFFIX):
        return None
    try:
        index = json.loads(text)
        folder = name.rpartition("/")[0]
        shards = {f"{folder}/{shard}" if folder else shard for shard in index["weight_map"].values()}
        index["metadata"]["total_size"] = sum(stored.get(shard, 0) for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # an index without weights or sizes has nothing that could be wrong
    return json.dumps(index, ensure_ascii=False, indent=2).encode(errors="backslashreplace") + b"\n"


def _with_method(text: bytes) -> bytes | None:
    """A model's configuration with our ``quantization_config``; None where it must not get one."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or "model_type" not in config or config.get("quantization_config"):
        return None
    config["quantization_config"] = {"quant_method": QUANT_METHOD}
    return json.dumps(config, ensure_ascii=False, indent=2).encode(errors="backslashreplace") + b"\n"
