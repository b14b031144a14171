"""What pack, unpack and verify refuse: one line that names file and mend, and nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.container.weightfiles import build, gaussian, mixed, write
from tests.malformed import safetensors_cases, valid_gguf
from wcodec.cli import main
from wcodec.container import pack_directory, pack_file, unpack_file, verify_file, writer
from wcodec.errors import MalformedError, UnsupportedError, WCodecError


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return write(tmp_path / "in" / "a.safetensors", {"w": gaussian((64, 64))})


@pytest.mark.parametrize("name", ["a.gguf", "a.pt", "a.pth", "a.bin", "a.npy", "a.NPZ"])
def test_other_kinds_are_for_analyze(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(UnsupportedError, match=r"wcodec analyze.*convert"):
        pack_file(tmp_path / name, tmp_path / "p")
    assert names(tmp_path) == {name}


@pytest.mark.parametrize("case", safetensors_cases(), ids=str)
def test_malformed_sources(tmp_path: Path, case: object) -> None:
    (tmp_path / "a.safetensors").write_bytes(case.data)  # type: ignore[attr-defined]
    with pytest.raises(WCodecError) as caught:
        pack_file(tmp_path / "a.safetensors", tmp_path / "p")
    assert caught.value.exit_code == 2
    assert caught.value.file == str(tmp_path / "a.safetensors")
    assert caught.value.mend
    assert names(tmp_path) == {"a.safetensors"}


def test_packed_twice(tmp_path: Path, source: Path) -> None:
    pack_file(source, tmp_path / "p.safetensors")
    with pytest.raises(UnsupportedError, match="packed already"):
        pack_file(tmp_path / "p.safetensors", tmp_path / "q.safetensors")


def test_unpacking_what_is_not_packed(tmp_path: Path, source: Path) -> None:
    for call in (verify_file, lambda path: unpack_file(path, tmp_path / "q")):
        with pytest.raises(UnsupportedError, match="not a packed file"):
            call(source)  # type: ignore[operator]
    assert names(tmp_path) == {"in"}


@pytest.mark.parametrize("name", ["a.gguf", "a.npy", "a.pt"])
def test_unpacking_another_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(valid_gguf() if name == "a.gguf" else b"\x93NUMPY")
    with pytest.raises(UnsupportedError, match="not a packed file"):
        unpack_file(tmp_path / name, tmp_path / "q")


def test_an_existing_destination_needs_force(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "p"
    target.write_bytes(b"precious")
    with pytest.raises(WCodecError, match=r"already exists.*--force"):
        pack_file(source, target)
    assert target.read_bytes() == b"precious"
    pack_file(source, target, force=True)
    with pytest.raises(WCodecError, match="already exists"):
        unpack_file(target, source)
    assert unpack_file(target, source, force=True).bytes_out == source.stat().st_size


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("force", [False, True])
def test_the_source_under_another_name(tmp_path: Path, source: Path, make: object, force: bool) -> None:
    before = source.read_bytes()
    make(tmp_path / "p", source)  # type: ignore[operator]
    for target in (tmp_path / "p", source, source.parent / "." / "a.safetensors"):
        with pytest.raises(WCodecError, match="is the source itself"):
            pack_file(source, target, force=force)
    assert source.read_bytes() == before


def test_a_dangling_link_is_something(tmp_path: Path, source: Path) -> None:
    (tmp_path / "p").symlink_to(tmp_path / "nowhere")
    with pytest.raises(WCodecError, match="already exists"):
        pack_file(source, tmp_path / "p")
    pack_file(source, tmp_path / "p", force=True)
    assert not (tmp_path / "p").is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_pipe_is_not_replaced(tmp_path: Path, source: Path) -> None:
    pack_file(source, tmp_path / "packed")
    os.mkfifo(tmp_path / "p")
    for write_to in (pack_file, lambda _, path, force: unpack_file(tmp_path / "packed", path, force=force)):
        with pytest.raises(WCodecError, match="no regular file"):
            write_to(source, tmp_path / "p", force=True)
    assert (tmp_path / "p").is_fifo()


def test_folders_in_the_way(tmp_path: Path, source: Path) -> None:
    with pytest.raises(WCodecError, match="is a folder"):
        pack_file(source, tmp_path, force=True)
    with pytest.raises(WCodecError, match="create it first"):
        pack_file(source, tmp_path / "missing" / "p")
    with pytest.raises(WCodecError, match="does not exist"):
        pack_file(tmp_path / "missing.safetensors", tmp_path / "p")
    with pytest.raises(WCodecError, match="regular file"):
        pack_file(source.parent, tmp_path / "p")


@pytest.mark.parametrize("target", ["in", "in/out", "in/../in/out", "."])
def test_a_directory_into_itself(tmp_path: Path, source: Path, target: str) -> None:
    with pytest.raises(WCodecError):
        pack_directory(source.parent, tmp_path / target, force=True)
    assert names(tmp_path) == {"in"}
    assert names(source.parent) == {"a.safetensors"}


@pytest.mark.parametrize("target", [".", ".."])
def test_the_current_folder_has_no_name_to_appear_under(
    tmp_path: Path, source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    done = CliRunner().invoke(main, ["pack", str(source.parent), target, "--force"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "name a new folder" in done.stderr
    assert names(tmp_path) == {"here", "in"}
    assert names(tmp_path / "here") == {"below"}


def test_nothing_is_written_into_a_hugging_face_cache(tmp_path: Path, source: Path) -> None:
    model = tmp_path / "hub" / "models--a--b"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(WCodecError, match="Hugging Face cache"):
        pack_file(source, model / "snapshots" / "abc" / "p.safetensors")
    with pytest.raises(WCodecError, match="Hugging Face cache"):
        pack_file(source, model / "blobs" / "p.safetensors")
    with pytest.raises(WCodecError, match="Hugging Face cache"):
        pack_directory(source.parent, model / "snapshots" / "def")


def test_a_source_that_changes_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", 10_000)
    source = write(tmp_path / "a.safetensors", {"w": gaussian((640, 64))})
    steps = []

    def disturb(nbytes: int) -> None:
        if not steps:
            data = bytearray(source.read_bytes())
            data[-1] ^= 1
            source.write_bytes(data)
            os.utime(source, ns=(1, 1))
        steps.append(nbytes)

    with pytest.raises(MalformedError, match="changed while"):
        pack_file(source, tmp_path / "p", workers=1, advance=disturb)
    assert names(tmp_path) == {"a.safetensors"}


def test_a_source_that_is_replaced_while_it_is_packed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.safetensors", {"w": gaussian((64, 64))})

    def disturb(nbytes: int) -> None:
        source.unlink()
        source.write_bytes(build({"w": gaussian((64, 64), 1)}))

    with pytest.raises(WCodecError):
        pack_file(source, tmp_path / "p", workers=1, advance=disturb)
    assert names(tmp_path) == {"a.safetensors"}


@pytest.mark.parametrize("cut", [1, 8, 100, 3000, 30_000])
def test_truncated_packed_files(tmp_path: Path, cut: int) -> None:
    source = write(tmp_path / "a.safetensors", mixed())
    pack_file(source, tmp_path / "p")
    data = (tmp_path / "p").read_bytes()
    (tmp_path / "p").write_bytes(data[:-cut])
    for call in (verify_file, lambda path: unpack_file(path, tmp_path / "q")):
        with pytest.raises(MalformedError):
            call(tmp_path / "p")  # type: ignore[operator]
    assert names(tmp_path) == {"a.safetensors", "p"}


def test_trailing_bytes_of_a_packed_file(tmp_path: Path, source: Path) -> None:
    pack_file(source, tmp_path / "p")
    with (tmp_path / "p").open("ab") as file:
        file.write(b"x")
    with pytest.raises(MalformedError, match="1 bytes follow"):
        verify_file(tmp_path / "p")
