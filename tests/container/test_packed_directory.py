"""Whole model directories: packed, interrupted, continued, verified, given back."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.container.weightfiles import gaussian, mixed, outliers, write
from wcodec.container import (
    PackedFile,
    directory,
    pack_directory,
    pack_file,
    shards,
    unpack_directory,
    verify_directory,
    verify_file,
)
from wcodec.container.manifest import MANIFEST_NAME, Manifest
from wcodec.errors import MalformedError, MismatchError, UnsupportedError, WCodecError

SHARDS = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "sub/model.safetensors"]
INDEX = "model.safetensors.index.json"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face snapshot: relative links into blobs/, an index, other files, a file of no weights."""
    repo = tmp_path / "hub" / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc"
    (snapshot / "sub").mkdir(parents=True)
    write(repo / "blobs" / "0", mixed())
    write(repo / "blobs" / "1", {"x": outliers((320, 190)), "y": gaussian((10,))}, metadata={"format": "pt"})
    write(repo / "blobs" / "2", {"z": gaussian((64, 64))})
    weights = dict.fromkeys(mixed(), SHARDS[0]) | {"x": SHARDS[1], "y": SHARDS[1], "ghost": SHARDS[1]}
    index = {"metadata": {"total_size": 123, "total_parameters": 7}, "weight_map": weights}
    (repo / "blobs" / "3").write_text(json.dumps(index, indent=4, sort_keys=True))
    (repo / "blobs" / "4").write_text('{"model_type": "llama"}')
    (repo / "blobs" / "5").write_bytes(b"")
    links = {SHARDS[0]: 0, SHARDS[1]: 1, SHARDS[2]: 2, INDEX: 3, "config.json": 4, "empty": 5}
    for name, blob in links.items():
        (snapshot / name).symlink_to(os.path.relpath(repo / "blobs" / str(blob), (snapshot / name).parent))
    (repo / "blobs" / "4").chmod(0o600)
    return snapshot


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_there_and_back(tmp_path: Path, model: Path, workers: int) -> None:
    before = contents(model)
    result = pack_directory(model, tmp_path / "packed", workers=workers)
    assert (result.files, result.tensors, result.packed_tensors) == (3, 18, 6)
    assert contents(model) == before
    assert contents(tmp_path / "packed").keys() == {*before, MANIFEST_NAME}
    assert not any(path.is_symlink() for path in (tmp_path / "packed").rglob("*"))
    assert stat.S_IMODE((tmp_path / "packed" / "config.json").stat().st_mode) == 0o600
    assert verify_directory(tmp_path / "packed", against=model, workers=workers).exact
    unpack_directory(tmp_path / "packed", tmp_path / "back", workers=workers)
    assert contents(tmp_path / "back") == before
    assert names(tmp_path) == {"hub", "packed", "back"}


def test_the_index_keeps_its_names_and_gets_the_new_size(tmp_path: Path, model: Path) -> None:
    pack_directory(model, tmp_path / "packed")
    old, new = (json.loads((folder / INDEX).read_text()) for folder in (model, tmp_path / "packed"))
    assert new["weight_map"] == old["weight_map"]
    assert new["metadata"]["total_parameters"] == 7
    parts = [part for shard in SHARDS[:2] for part in PackedFile(tmp_path / "packed" / shard).parts]
    assert new["metadata"]["total_size"] == sum(part.stored.end - part.stored.begin for part in parts)


def test_a_text_that_utf8_cannot_hold(tmp_path: Path, model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").write_bytes(b'{"model_type": "llama", "x": "\\ud800"}')
    pack_directory(model, tmp_path / "p")
    assert json.loads((tmp_path / "p" / "config.json").read_bytes())["x"] == "\ud800"
    unpack_directory(tmp_path / "p", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(model)


def test_an_index_that_disagrees_is_reported(tmp_path: Path, model: Path) -> None:
    (model / SHARDS[1]).unlink()
    notes = pack_directory(model, tmp_path / "p").notes
    assert f"{INDEX}: lists {SHARDS[1]}, which is missing" in notes
    assert any(note.startswith(f"{INDEX}: 3 tensors ('ghost', 'x', 'y') listed, but in no") for note in notes)
    assert any(note.startswith(f"{INDEX}: total_size is 123") for note in notes)
    unpack_directory(tmp_path / "p", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(model)


def test_a_cache_is_refused_with_its_snapshot(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Hugging Face cache; give a snapshot, such as .*/abc"):
        pack_directory(model.parent.parent, tmp_path / "p")
    assert names(tmp_path) == {"hub"}


@pytest.mark.parametrize(
    "text", ["no json", "[]", "{}", '{"metadata": {}}', '{"metadata": 1, "weight_map": {}}']
)
def test_an_index_that_is_none_is_copied(tmp_path: Path, model: Path, text: str) -> None:
    (model / INDEX).resolve().write_text(text)
    result = pack_directory(model, tmp_path / "packed")
    assert any(INDEX in note for note in result.notes) or "weight_map" in text
    assert (tmp_path / "packed" / INDEX).read_text() == text
    unpack_directory(tmp_path / "packed", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)


@pytest.mark.parametrize(
    "text",
    ["no json", "[]", '{"a": 1}', '{"model_type": "x", "quantization_config": {"quant_method": "fp8"}}'],
)
def test_a_configuration_that_is_not_ours_to_change_is_copied(tmp_path: Path, model: Path, text: str) -> None:
    (model / "config.json").unlink()
    (model / "config.json").write_text(text)
    pack_directory(model, tmp_path / "packed")
    assert (tmp_path / "packed" / "config.json").read_text() == text
    unpack_directory(tmp_path / "packed", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)


def test_the_same_directory_gives_the_same_bytes(tmp_path: Path, model: Path) -> None:
    pack_directory(model, tmp_path / "one", workers=1)
    pack_directory(model, tmp_path / "two", workers=4)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_processes_pack_shards(tmp_path: Path, model: Path) -> None:
    """Tasks and results are picklable: any executor will do."""
    pack_directory(model, tmp_path / "one")
    packed: list[int] = []
    unpacked: list[int] = []
    with ProcessPoolExecutor(2) as executor:
        how: dict[str, Any] = {"executor": executor, "workers": 1}
        result = pack_directory(model, tmp_path / "two", advance=packed.append, **how)
        unpack_directory(tmp_path / "two", tmp_path / "back", advance=unpacked.append, **how)
    assert result.tensors == 18
    assert sum(packed) == sum(unpacked) == sum((model / name).stat().st_size for name in SHARDS)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert contents(tmp_path / "back") == contents(model)


def test_a_rerun_skips_what_is_done(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[str] = []

    def counting(source: Path, target: Path, **how: object) -> object:
        if len(packed) == 2:
            raise KeyboardInterrupt
        packed.append(source.name)
        return pack_file(source, target, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "pack_file", counting)
    with pytest.raises(KeyboardInterrupt):
        pack_directory(model, tmp_path / "packed", workers=1)
    assert names(tmp_path) == {"hub", ".packed.wcodec-part"}
    assert packed == [Path(name).name for name in SHARDS[:2]]
    # One finished shard changes in the source, one is damaged: only the other is kept.
    write((model / SHARDS[0]).resolve(), {"new": gaussian((64, 64), 9)})
    seen = []
    packed.clear()
    monkeypatch.setattr(
        shards, "pack_file", lambda s, t, **how: (seen.append(s.name), pack_file(s, t, **how))[1]
    )
    done: list[int] = []
    result = pack_directory(model, tmp_path / "packed", workers=1, advance=done.append)
    assert seen == [SHARDS[0], "model.safetensors"]
    assert (result.files, result.tensors) == (3, 4)
    assert sum(done) >= result.bytes_in * 0.9
    assert names(tmp_path) == {"hub", "packed"}
    assert verify_directory(tmp_path / "packed", against=model).exact
    monkeypatch.undo()
    pack_directory(model, tmp_path / "fresh")
    assert contents(tmp_path / "fresh") == contents(tmp_path / "packed")


def test_a_failing_shard_stops_the_others(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    def slow_or_bad(source: Path, target: Path, *, advance: object, **how: object) -> object:
        nonlocal steps
        if source.name == SHARDS[1]:
            time.sleep(0.05)
            raise MalformedError("bad", file=source)
        for _ in range(2000):
            time.sleep(0.005)
            steps += 1
            advance(1)  # type: ignore[operator]
        raise AssertionError("nobody stopped it")

    monkeypatch.setattr(shards, "pack_file", slow_or_bad)
    with pytest.raises(MalformedError, match="bad"):
        pack_directory(model, tmp_path / "packed", workers=3)
    assert steps < 1500
    assert names(tmp_path) == {"hub"}


def test_leftovers_of_another_model_are_not_kept(tmp_path: Path, model: Path) -> None:
    part = tmp_path / ".packed.wcodec-part"
    (part / "old").mkdir(parents=True)
    (part / "old" / "file").write_bytes(b"x")
    (part / MANIFEST_NAME).write_text("nonsense")
    (part / SHARDS[0]).write_bytes(b"half")
    pack_directory(model, tmp_path / "packed")
    assert contents(tmp_path / "packed").keys() == {*contents(model), MANIFEST_NAME}
    assert not (tmp_path / "packed" / "old").exists()


@pytest.mark.parametrize(
    ("finished", "left"), [(0, "nothing was written"), (1, "finished files are kept for the next run")]
)
def test_a_full_disk_names_the_destination_and_what_is_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, finished: int, left: str
) -> None:
    written = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if SHARDS[finished] in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WCodecError) as caught:
        pack_directory(model, tmp_path / "packed", workers=1)
    assert str(caught.value) == (
        f"{tmp_path / 'packed' / SHARDS[finished]}: cannot write: No space left on device;"
        f" free some space or write to another disk; {left}"
    )
    assert (names(tmp_path) == {"hub"}) is (finished == 0)
    monkeypatch.undo()
    pack_directory(model, tmp_path / "packed")
    assert verify_directory(tmp_path / "packed", against=model).exact


def test_an_unreadable_file_is_found_before_any_work(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_directory(model, tmp_path / "packed")
    opened = os.open

    def refuse(path: object, *args: int, **how: int) -> int:
        if str(path).endswith("/empty"):  # the superuser may read anything: say no in his place
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **how)  # type: ignore[arg-type]

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(directory, "run_shards", work)
    for act, source in ((pack_directory, model), (unpack_directory, tmp_path / "packed")):
        with pytest.raises(WCodecError, match=f"{source}/empty: may not be read; check its permissions"):
            act(source, tmp_path / "x")
    assert names(tmp_path) == {"hub", "packed"}


def test_an_error_in_one_shard_leaves_nothing(tmp_path: Path, model: Path) -> None:
    data = bytearray((model / SHARDS[1]).read_bytes())
    pack_directory(model, tmp_path / "packed")
    packed = tmp_path / "packed" / SHARDS[1]
    data = bytearray(packed.read_bytes())
    data[3000] ^= 1
    packed.write_bytes(data)
    with pytest.raises(MismatchError, match="'x'"):
        unpack_directory(tmp_path / "packed", tmp_path / "back")
    assert names(tmp_path) == {"hub", "packed"}
    verdict = verify_directory(tmp_path / "packed")
    assert not verdict.exact
    assert len(verdict.differences) == 1
    assert SHARDS[1] in verdict.differences[0]


def test_a_changed_copy_is_not_given_back(tmp_path: Path, model: Path) -> None:
    pack_directory(model, tmp_path / "packed")
    (tmp_path / "packed" / "empty").write_bytes(b"x")
    with pytest.raises(MismatchError, match="empty: is not what was packed"):
        unpack_directory(tmp_path / "packed", tmp_path / "back")
    assert names(tmp_path) == {"hub", "packed"}


def test_force(tmp_path: Path, model: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "precious").write_bytes(b"x")
    with pytest.raises(WCodecError, match="already exists"):
        pack_directory(model, tmp_path / "packed")
    assert names(tmp_path / "packed") == {"precious"}
    pack_directory(model, tmp_path / "packed", force=True)
    assert "precious" not in names(tmp_path / "packed")
    assert names(tmp_path) == {"hub", "packed"}
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "precious").write_bytes(b"x")
    with pytest.raises(WCodecError, match="already exists"):
        unpack_directory(tmp_path / "packed", tmp_path / "back")
    assert names(tmp_path / "back") == {"precious"}
    unpack_directory(tmp_path / "packed", tmp_path / "back", force=True)
    assert contents(tmp_path / "back") == contents(model)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(WCodecError, match="is a file"):
        pack_directory(model, tmp_path / "file", force=True)


def test_what_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedError, match=r"no \.safetensors file"):
        pack_directory(tmp_path / "none", tmp_path / "packed")
    pack_directory(model, tmp_path / "packed")
    with pytest.raises(UnsupportedError, match="packed already"):
        pack_directory(tmp_path / "packed", tmp_path / "again")
    for call in (verify_directory, lambda path: unpack_directory(path, tmp_path / "back")):
        with pytest.raises(UnsupportedError, match="has no wcodec"):
            call(model)  # type: ignore[operator]
    (tmp_path / "packed" / MANIFEST_NAME).unlink()
    with pytest.raises(UnsupportedError, match=r"00001.*packed already"):
        pack_directory(tmp_path / "packed", tmp_path / "again")
    assert names(tmp_path) == {"hub", "none", "packed"}


def test_odd_things_in_the_source(tmp_path: Path, model: Path) -> None:
    (model / "loop").symlink_to(model)
    with pytest.raises(WCodecError, match="folder around it"):
        pack_directory(model, tmp_path / "packed")
    (model / "loop").unlink()
    (model / "dangling").symlink_to("nowhere")
    with pytest.raises(WCodecError, match="link to nowhere"):
        pack_directory(model, tmp_path / "packed")
    (model / "dangling").unlink()
    os.mkfifo(model / "pipe")
    with pytest.raises(WCodecError, match="neither a file nor a folder"):
        pack_directory(model, tmp_path / "packed")
    (model / "pipe").unlink()
    (model / ".git").mkdir()
    (model / ".git" / "big").write_bytes(b"x")
    (model / ".x.wcodec-part").write_bytes(b"x")
    result = pack_directory(model, tmp_path / "packed")
    assert sum("left out" in note for note in result.notes) == 2
    assert ".git" not in names(tmp_path / "packed")
    assert names(tmp_path) == {"hub", "packed"}


def test_verify_finds_every_kind_of_difference(tmp_path: Path, model: Path) -> None:
    packed = tmp_path / "packed"
    pack_directory(model, packed)
    (packed / "config.json").write_text("{}")
    (packed / "empty").unlink()
    (packed / "README.md").write_text("mine")
    pack_file(write(tmp_path / "other", {"z": gaussian((64, 64), 5)}), packed / SHARDS[2], force=True)
    (model / SHARDS[0]).unlink()
    for name in "fedcba":
        (model / f"new.{name}").write_text("x")
    verdict = verify_directory(packed, against=model)
    text = "\n".join(verdict.differences)
    for part in ("config.json: is not what was packed", "empty: is missing", f"{SHARDS[2]}: holds another"):
        assert part in text
    assert f"{SHARDS[0]} is missing" in text
    new = [f"{model / f'new.{name}'} was not there when the directory was packed" for name in "abcdef"]
    assert list(verdict.differences[4:]) == new
    assert verdict.notes == ("README.md is not in the manifest and is left out",)
    with pytest.raises(WCodecError, match="empty: does not exist"):
        unpack_directory(packed, tmp_path / "back")
    (packed / "empty").touch()
    with pytest.raises(MismatchError):
        unpack_directory(packed, tmp_path / "back")
    assert names(tmp_path) == {"hub", "packed", "other"}


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_of_verify_names_every_wrong_file(
    tmp_path: Path, model: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed"
    pack_directory(model, packed)
    verified: set[str] = set()

    def verify(path: Path, **how: Any) -> Any:
        while workers > 1 and path.name == SHARDS[0] and SHARDS[1] not in verified:
            time.sleep(0.001)
        try:
            return verify_file(path, **how)
        finally:
            verified.add(path.name)

    monkeypatch.setattr(directory, "verify_file", verify)
    for name in SHARDS[:2]:
        (packed / name).write_bytes((packed / name).read_bytes()[:-1])
    (packed / "config.json").write_text("{}")
    with pytest.raises(MalformedError) as caught:
        verify_directory(packed, workers=workers)
    assert caught.value.file == str(packed / SHARDS[0])
    assert caught.value.problem.endswith(f" (also wrong: config.json, {SHARDS[1]})")
    assert len(verified) == len(SHARDS)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "", ".", "a//b", "a/\0", MANIFEST_NAME])
def test_a_manifest_cannot_write_elsewhere(tmp_path: Path, model: Path, name: str) -> None:
    pack_directory(model, tmp_path / "packed")
    path = tmp_path / "packed" / MANIFEST_NAME
    document = json.loads(path.read_text())
    document["files"][name] = document["files"].pop("config.json")
    path.write_text(json.dumps(document))
    with pytest.raises(MalformedError, match="no path inside"):
        unpack_directory(tmp_path / "packed", tmp_path / "back")
    assert names(tmp_path) == {"hub", "packed"}


def test_damaged_manifests(tmp_path: Path, model: Path) -> None:
    pack_directory(model, tmp_path / "packed")
    path = tmp_path / "packed" / MANIFEST_NAME
    good = path.read_text()
    document = json.loads(good)
    document["schema"] = "wcodec.manifest/2"
    path.write_text(json.dumps(document))
    with pytest.raises(UnsupportedError, match="upgrade"):
        Manifest.read(tmp_path / "packed")
    for bad in (
        good[:-5],
        "[]",
        "{}",
        good.replace('"copied"', '"moved"'),
        good.replace('"bytes": ', '"bytes": -'),
        good.replace('"xxh3_128": "', '"xxh3_128": "0'),
        good.replace('"original": "', '"original": "AAAA'),
        "[" * 100_000,
    ):
        path.write_text(bad)
        with pytest.raises(MalformedError):
            Manifest.read(tmp_path / "packed")


def test_two_runs_at_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rival(*args: object, **how: object) -> object:
        with pytest.raises(WCodecError, match="another wcodec process"):
            pack_directory(model, tmp_path / "packed")
        return pack_file(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "pack_file", rival)
    pack_directory(model, tmp_path / "packed", workers=1)
    assert verify_directory(tmp_path / "packed", against=model).exact
