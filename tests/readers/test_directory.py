"""Directories: indexes that lie, shards without an index, Hugging Face caches, and what is no checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.malformed import entry, valid_gguf, valid_safetensors
from tests.malformed import safetensors as build
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.readers import open_source

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(path: Path, **tensors: bytes) -> Path:
    """A safetensors file of U8 tensors."""
    header, data = {}, b""
    for name, raw in tensors.items():
        header[name] = entry("U8", [len(raw)], len(data), len(data) + len(raw))
        data += raw
    path.write_bytes(build(header, data))
    return path


def index(path: Path, weight_map: Any, total: Any = ...) -> Path:
    found: dict[str, Any] = {"weight_map": weight_map}
    if total is not ...:
        found["metadata"] = {"total_size": total}
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and a right index."""
    shard(tmp_path / FIRST, a=b"aa", b=b"bbb")
    shard(tmp_path / SECOND, c=b"cccc")
    index(tmp_path / INDEX, {"a": FIRST, "b": FIRST, "c": SECOND}, 9)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def names(path: Path, **options: Any) -> list[str]:
    return [tensor.name for tensor in open_source(path, **options).tensors]


def test_index(model: Path) -> None:
    source = open_source(model)
    assert [(t.name, t.file.name, t.read().tobytes()) for t in source.tensors] == [
        ("a", FIRST, b"aa"),
        ("b", FIRST, b"bbb"),
        ("c", SECOND, b"cccc"),
    ]
    assert source.kind == "safetensors"
    assert source.files == [model / FIRST, model / SECOND]
    assert source.index == model / INDEX
    assert source.notes == []
    assert source.nbytes == 9


def test_the_index_itself_is_a_path(model: Path) -> None:
    assert names(model / INDEX) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("weight_map", "total", "difference"),
    [
        (
            {"a": FIRST, "b": FIRST, "c": SECOND, "ghost": FIRST},
            9,
            "1 tensor ('ghost') listed, but in no shard",
        ),
        ({"a": FIRST, "c": SECOND}, 9, "1 tensor ('b') not listed, but in the shards"),
        ({"a": SECOND, "b": FIRST, "c": SECOND}, 9, "1 tensor ('a') listed under another shard"),
        ({"a": FIRST, "b": FIRST, "c": SECOND}, 10, "total_size is 10, the shards hold 9 bytes"),
        ({"a": FIRST, "b": FIRST, "c": SECOND}, 0, "total_size is 0, the shards hold 9 bytes"),
    ],
)
def test_index_disagrees(model: Path, weight_map: dict[str, str], total: int, difference: str) -> None:
    """The headers are the truth: every tensor is there, and the difference is reported."""
    index(model / INDEX, weight_map, total)
    source = open_source(model)
    assert [t.name for t in source.tensors] == ["a", "b", "c"]
    assert len(source.differences) == 1
    assert difference in source.differences[0]
    assert source.differences[0].startswith(INDEX)


def test_many_differences_stay_short(model: Path) -> None:
    ghosts = {f"ghost{i:04}": FIRST for i in range(1000)}
    index(model / INDEX, {"a": FIRST, "b": FIRST, "c": SECOND} | ghosts)
    (difference,) = open_source(model).differences
    assert "1000 tensors ('ghost0000', 'ghost0001', 'ghost0002' and 997 more)" in difference


@pytest.mark.parametrize("total", [9.0, "9", None, ..., True, "large", [9], 1e400])
def test_forms_of_total_size(model: Path, total: Any) -> None:
    """Writers print floats and text; what is no number says nothing."""
    index(model / INDEX, {"a": FIRST, "b": FIRST, "c": SECOND}, total)
    assert open_source(model).notes == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no weight_map"),
        ('{"weight_map": {}}', "lists no tensors"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file of this directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not a file of this directory"),
        ('{"weight_map": {"a": ""}}', "not a file of this directory"),
    ],
)
def test_bad_index(model: Path, text: str, problem: str) -> None:
    (model / INDEX).write_text(text)
    with pytest.raises(MalformedError, match=problem) as caught:
        open_source(model)
    assert caught.value.file == str(model / INDEX)


def test_missing_shard(model: Path) -> None:
    (model / SECOND).unlink()
    with pytest.raises(MalformedError) as caught:
        open_source(model)
    assert str(caught.value) == f"{model / SECOND}: is missing, but {INDEX} lists it; finish the download"


def test_truncated_shard(model: Path) -> None:
    os.truncate(model / SECOND, (model / SECOND).stat().st_size - 1)
    with pytest.raises(MalformedError, match="1 of the tensor's 4 bytes are missing") as caught:
        open_source(model)
    assert (caught.value.file, caught.value.tensor) == (str(model / SECOND), "c")


def test_file_that_the_index_does_not_list(model: Path) -> None:
    """Some repositories ship the same weights twice, under other names in one consolidated file."""
    shard(model / "consolidated.safetensors", layers=b"x")
    source = open_source(model)
    assert [t.name for t in source.tensors] == ["a", "b", "c"]
    assert "consolidated.safetensors" in source.differences[0]


def test_same_name_in_two_shards(model: Path) -> None:
    """Counted once, where the index says."""
    shard(model / SECOND, c=b"cccc", a=b"AAA")
    index(model / INDEX, {"a": SECOND, "b": FIRST, "c": SECOND})
    source = open_source(model)
    assert sorted(t.name for t in source.tensors) == ["a", "b", "c"]
    assert source["a"].read().tobytes() == b"AAA"
    assert source.differences == [
        f"tensor 'a' is in {SECOND} and in {FIRST} with another dtype or shape, counted once"
    ]
    (model / INDEX).unlink()
    source = open_source(model)
    assert source["a"].read().tobytes() == b"aa"
    assert len(source.tensors) == 3


def test_several_files_without_index(model: Path) -> None:
    (model / INDEX).unlink()
    source = open_source(model)
    assert [t.name for t in source.tensors] == ["a", "b", "c"]
    assert source.index is None
    assert source.notes == []


def test_safetensors_are_preferred(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"never read")
    (model / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    (model / "m.gguf").write_bytes(valid_gguf())
    assert names(model) == ["a", "b", "c"]
    (model / INDEX).unlink()
    source = open_source(model)
    assert [t.name for t in source.tensors] == ["a", "b", "c"]
    assert source.remarks == [
        "left out beside the safetensors files: m.gguf",
        "left out beside the safetensors files: pytorch_model.bin",
    ]


def test_metadata_of_all_shards(tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").write_bytes(build({"__metadata__": {"a": "1", "b": "1"}}))
    (tmp_path / "2.safetensors").write_bytes(build({"__metadata__": {"b": "2", "c": "2"}}))
    assert open_source(tmp_path).metadata == {"a": "1", "b": "1", "c": "2"}


def test_other_index_names(model: Path) -> None:
    (model / INDEX).rename(model / "model.fp16.safetensors.index.json")
    assert names(model) == ["a", "b", "c"]
    index(model / "model.fp32.safetensors.index.json", {"a": FIRST})
    with pytest.raises(WCodecError, match=r"several checkpoints.*give the index file itself"):
        open_source(model)
    assert names(model / "model.fp32.safetensors.index.json") == ["a", "b"]


@pytest.fixture
def cache(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the Hugging Face cache keeps it: relative links into blobs."""
    root = tmp_path_factory.mktemp("hub") / "models--org--name"
    snapshot = root / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc123")
    for i, file in enumerate(sorted(model.iterdir())):
        file.rename(root / "blobs" / f"{i:064}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:064}")
    return root


def test_snapshot_of_links(cache: Path) -> None:
    before = sorted(os.walk(cache))
    snapshot = cache / "snapshots" / "abc123"
    source = open_source(snapshot)
    assert [t.read().tobytes() for t in source.tensors] == [b"aa", b"bbb", b"cccc"]
    assert source.tensors[0].file == snapshot / FIRST
    assert sorted(os.walk(cache)) == before


def test_cache_entry_is_entered(cache: Path) -> None:
    assert names(cache) == ["a", "b", "c"]
    (cache / "snapshots" / "def456").mkdir()
    assert names(cache) == ["a", "b", "c"]
    (cache / "refs" / "main").unlink()
    with pytest.raises(
        WCodecError, match="2 snapshots and no main; give one of them as the path: abc123, def456"
    ):
        open_source(cache)


def test_dangling_link(cache: Path) -> None:
    snapshot = cache / "snapshots" / "abc123"
    link = snapshot / SECOND
    target = str(link.readlink())
    (snapshot / target).resolve().unlink()
    with pytest.raises(WCodecError) as caught:
        open_source(snapshot)
    assert str(caught.value) == (
        f"{link}: is a link to {target}, which does not exist; download the file again or remove the link"
    )


def test_blob_without_suffix(cache: Path) -> None:
    blob = (cache / "snapshots" / "abc123" / FIRST).resolve()
    assert blob.suffix == ""
    assert names(blob) == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "does not exist; check the path"),
        (lambda path: path.mkdir(), "is empty"),
        (lambda path: (path / "unet").mkdir(parents=True), "holds no weight files; files are .bin"),
        (lambda path: path.write_text("hello"), "is of an unknown kind"),
        (lambda path: path.write_text("not JSON{"), "is of an unknown kind"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which does not exist"),
        (lambda path: path.symlink_to(path), "cannot be opened: Too many levels of symbolic links"),
        (os.mkfifo, "is not a regular file"),
    ],
    ids=["absent", "empty-directory", "nothing-readable", "unknown", "brace", "dangling", "loop", "pipe"],
)
def test_no_checkpoint(tmp_path: Path, make: Any, problem: str) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(WCodecError) as caught:
        open_source(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WCodecError, match="cannot be opened: Not a directory"):
        open_source(tmp_path / "file" / "a.safetensors")


def test_pipeline_directory_names_its_parts(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "docs").mkdir()
    shard(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", a=b"a")
    with pytest.raises(UnsupportedError, match=r"give one of its directories instead: unet/$"):
        open_source(tmp_path)


def test_hidden_files_are_not_weights(tmp_path: Path) -> None:
    (tmp_path / "._model.safetensors").write_bytes(b"resource fork")
    (tmp_path / "model.safetensors").write_bytes(valid_safetensors())
    assert names(tmp_path) == ["a", "none", "b"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"include": ["a"]}, ["a"]),
        ({"include": ["[ab]"]}, ["a", "b"]),
        ({"exclude": ["a", "c"]}, ["b"]),
        ({"include": ["*"], "exclude": ["b"]}, ["a", "c"]),
        ({"include": iter(["?"])}, ["a", "b", "c"]),
    ],
)
def test_globs(model: Path, options: dict[str, Any], left: list[str]) -> None:
    assert names(model, **options) == left


def test_globs_are_case_sensitive_and_must_match(model: Path) -> None:
    with pytest.raises(
        WCodecError, match=r"no tensor name passes include .*'A'.*names look like 'a', 'b', 'c'"
    ):
        open_source(model, include=["A"])


def test_directory_of_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    np.save(tmp_path / "y.npy", np.ones(2, np.uint8))
    source = open_source(tmp_path)
    assert [(t.name, t.dtype) for t in source.tensors] == [("x", "F32"), ("y", "U8")]
    assert source.kind == "numpy"
