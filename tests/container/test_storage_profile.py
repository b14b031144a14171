"""The storage profile: smaller files, the same promises, and the way to the run profile and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.container.weightfiles import build, gaussian, mixed, noise, outliers, write
from wcodec.container import (
    PackedFile,
    pack_directory,
    pack_file,
    packedfile,
    shards,
    unpack_directory,
    unpack_file,
    verify_directory,
    verify_file,
    writer,
)
from wcodec.container.manifest import MANIFEST_NAME, Manifest
from wcodec.errors import MismatchError, UnsupportedError, WCodecError
from wcodec.formats.bf16_store import CHUNK_WEIGHTS

SOURCES = {
    "mixed": build(mixed(), metadata={"format": "pt"}, padding=b"  ", trailing=b"t", reverse=True),
    "empty": build({}),
    "long": build({"w": outliers((3000, 190)), "n": gaussian((100,)), "bits": noise((300, 1000))}),
    "chunks": build({"a": gaussian((CHUNK_WEIGHTS + 1,)), "b": gaussian((3, CHUNK_WEIGHTS))}),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("workers", [1, 3])
def test_there_and_back_by_every_way(tmp_path: Path, name: str, workers: int) -> None:
    source, stored, packed = tmp_path / "a", tmp_path / "s", tmp_path / "p"
    source.write_bytes(SOURCES[name])
    pack_file(source, stored, profile="storage", workers=workers)
    pack_file(source, packed, workers=workers)
    assert verify_file(stored, against=source, workers=workers).exact
    unpack_file(stored, tmp_path / "b", workers=workers)
    assert (tmp_path / "b").read_bytes() == SOURCES[name]
    if not any(part.packed for part in PackedFile(stored).parts):
        return
    pack_file(stored, tmp_path / "p2", workers=workers)
    assert (tmp_path / "p2").read_bytes() == packed.read_bytes()
    pack_file(packed, tmp_path / "s2", profile="storage", workers=workers)
    assert (tmp_path / "s2").read_bytes() == stored.read_bytes()


def test_it_is_smaller_and_packs_vectors_too(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {"w": gaussian((640, 640)), "v": gaussian((5000,))})
    result = pack_file(source, tmp_path / "s", profile="storage")
    assert result.packed_tensors == 2
    assert result.ratio < 0.68
    header = PackedFile(tmp_path / "s").header
    assert header.metadata is not None
    assert header.metadata["wcodec.profile"] == "storage"
    assert all(
        (header.data_start + part.stored.begin) % 256 == 0 for part in PackedFile(tmp_path / "s").parts
    )


def test_small_chunks_of_work_do_not_change_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(SOURCES["chunks"])
    made = set()
    for chunk in (1, 8 << 20):
        for module in (writer, packedfile):
            monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
        for workers in (1, 4):
            pack_file(tmp_path / "a", tmp_path / "s", profile="storage", force=True, workers=workers)
            assert verify_file(tmp_path / "s", workers=workers).exact
            made.add((tmp_path / "s").read_bytes())
    assert len(made) == 1


def test_what_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a", mixed())
    for profile in ("run", "storage"):
        pack_file(source, tmp_path / profile, profile=profile)
        with pytest.raises(UnsupportedError, match="packed already"):
            pack_file(tmp_path / profile, tmp_path / "x", profile=profile)
    with pytest.raises(UnsupportedError, match="known: run, storage"):
        pack_file(source, tmp_path / "x", profile="fast")
    assert not (tmp_path / "x").exists()


def test_files_without_packed_tensors_are_converted_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "a.safetensors", {"w": gaussian((64, 64))})
    write(tmp_path / "model" / "b.safetensors", {"f": ("F32", (3,), bytes(12))})
    for profile, other in (("run", "storage"), ("storage", "run")):
        pack_directory(tmp_path / "model", tmp_path / profile, profile=profile)
        pack_directory(tmp_path / profile, tmp_path / f"to-{other}", profile=other)
    for profile in ("run", "storage"):
        for name in ("a.safetensors", "b.safetensors", MANIFEST_NAME):
            made = (tmp_path / f"to-{profile}" / name).read_bytes()
            assert made == (tmp_path / profile / name).read_bytes()
        with pytest.raises(UnsupportedError, match="packed already"):
            pack_file(tmp_path / profile / "b.safetensors", tmp_path / "x", profile=profile)


def test_a_damaged_file_is_not_converted(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {"w": gaussian((64, 64)), "n": ("U8", (3,), b"abc")})
    pack_file(source, tmp_path / "s", profile="storage")
    good = (tmp_path / "s").read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    for at in (start + 100, start + PackedFile(tmp_path / "s").parts[1].stored.begin):
        data = bytearray(good)
        data[at] ^= 1
        (tmp_path / "s").write_bytes(data)
        with pytest.raises(MismatchError, match="does not decode"):
            pack_file(tmp_path / "s", tmp_path / "p")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "s"}


def test_no_damaged_byte_changes_what_comes_back(tmp_path: Path) -> None:
    """Nearly all are refused; a zstandard frame holds a few bits without a meaning."""
    harmless = 0
    source = write(tmp_path / "a", {"w": gaussian((40, 25))})
    pack_file(source, tmp_path / "s", profile="storage")
    good = (tmp_path / "s").read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    for at in range(start, len(good), 7):
        data = bytearray(good)
        data[at] ^= 0x20
        (tmp_path / "s").write_bytes(data)
        try:
            unpack_file(tmp_path / "s", tmp_path / "b", workers=1)
        except WCodecError:
            continue
        assert (tmp_path / "b").read_bytes() == source.read_bytes()
        (tmp_path / "b").unlink()
        harmless += 1
    assert harmless <= 2


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for i in range(2):
        write(model / f"{i}.safetensors", mixed(i))
    index = {"metadata": {"total_size": 1}, "weight_map": {"embed": "0.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "notes.json").write_text("[]")
    pack_directory(model, tmp_path / "run")
    pack_directory(model, tmp_path / "stored", profile="storage")
    assert Manifest.read(tmp_path / "stored").profile == "storage"
    assert verify_directory(tmp_path / "stored", against=model).exact
    pack_directory(tmp_path / "stored", tmp_path / "converted")
    assert contents(tmp_path / "converted") == contents(tmp_path / "run")
    unpack_directory(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)
    with pytest.raises(UnsupportedError, match="packed already"):
        pack_directory(tmp_path / "stored", tmp_path / "again", profile="storage")

    # An interrupted conversion goes on; what another profile left does not count.
    seen: list[str] = []

    def failing(source: Path, target: Path, **how: object) -> object:
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(source.name)
        return pack_file(source, target, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "pack_file", failing)
    with pytest.raises(KeyboardInterrupt):
        pack_directory(tmp_path / "stored", tmp_path / "again", workers=1)
    with pytest.raises(KeyboardInterrupt):
        pack_directory(model, tmp_path / "again", profile="storage", workers=1)
    monkeypatch.undo()
    pack_directory(tmp_path / "stored", tmp_path / "again", workers=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "run")
    assert MANIFEST_NAME in contents(tmp_path / "again")


def test_shards_of_an_interrupted_run_of_another_profile_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for i in range(2):
        write(model / f"{i}.safetensors", mixed(i))
    pack_directory(model, tmp_path / "want", profile="storage")

    def failing(source: Path, target: Path, **how: object) -> object:
        if source.name == "1.safetensors":
            raise KeyboardInterrupt
        return pack_file(source, target, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "pack_file", failing)
    with pytest.raises(KeyboardInterrupt):
        pack_directory(model, tmp_path / "got", workers=1)
    assert (tmp_path / ".got.wcodec-part" / "0.safetensors").exists()
    monkeypatch.undo()
    pack_directory(model, tmp_path / "got", profile="storage", workers=1)
    assert contents(tmp_path / "got") == contents(tmp_path / "want")
