"""A packed file that was written once is readable for ever, and the writer still writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.golden.container import FOLDER, PAIRS, pairs, source
from wcodec.container import PackedFile, pack_file, unpack_file, verify_file

SOURCES = {FOLDER: source, PAIRS: pairs}


@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", ["packed", "stored"])
def test_it_gives_its_source_back(tmp_path: Path, folder: Path, name: str) -> None:
    packed, original = folder / f"{name}.safetensors", folder / "source.safetensors"
    assert verify_file(packed, against=original).exact
    unpack_file(packed, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == original.read_bytes() == SOURCES[folder]()


def test_each_has_what_its_version_brought() -> None:
    for folder, formats in ((FOLDER, {"bf16-w12", "bf16-store"}), (PAIRS, {"nvfp4-s5", "byte-store"})):
        files = [PackedFile(folder / f"{name}.safetensors") for name in ("packed", "stored")]
        assert {part.packed.format for file in files for part in file.parts if part.packed} >= formats


@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: folder.name)
def test_the_writer_writes_it(tmp_path: Path, folder: Path) -> None:
    """The same bytes up to the record (its frame depends on zstandard), the same record but for the tool."""
    packed = folder / "packed.safetensors"
    pack_file(folder / "source.safetensors", tmp_path / "packed")
    old, new = PackedFile(packed), PackedFile(tmp_path / "packed")
    assert dataclasses.replace(old.record, tool="") == dataclasses.replace(new.record, tool="")
    assert old.header.data_start == new.header.data_start
    entries = [e for e in old.header.entries if e.name != "__wcodec__.header"]
    assert entries == [e for e in new.header.entries if e.name != "__wcodec__.header"]
    start, end = old.header.data_start, old.header.data_start + entries[-1].end
    assert packed.read_bytes()[start:end] == (tmp_path / "packed").read_bytes()[start:end]
