"""A packed file that was written once is readable for ever, and the writer still writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.golden.container import FOLDER, source
from wcodec.container import PackedFile, pack_file, unpack_file, verify_file

SOURCE, PACKED, STORED = (FOLDER / f"{name}.safetensors" for name in ("source", "packed", "stored"))


@pytest.mark.parametrize("packed", [PACKED, STORED], ids=["run", "storage"])
def test_it_gives_its_source_back(tmp_path: Path, packed: Path) -> None:
    assert verify_file(packed, against=SOURCE).exact
    unpack_file(packed, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == SOURCE.read_bytes() == source()


def test_the_writer_writes_it(tmp_path: Path) -> None:
    """The same bytes up to the record (its frame depends on zstandard), the same record but for the tool."""
    pack_file(SOURCE, tmp_path / "packed")
    old, new = PackedFile(PACKED), PackedFile(tmp_path / "packed")
    assert dataclasses.replace(old.record, tool="") == dataclasses.replace(new.record, tool="")
    assert old.header.data_start == new.header.data_start
    entries = [e for e in old.header.entries if e.name != "__wcodec__.header"]
    assert entries == [e for e in new.header.entries if e.name != "__wcodec__.header"]
    start, end = old.header.data_start, old.header.data_start + entries[-1].end
    assert PACKED.read_bytes()[start:end] == (tmp_path / "packed").read_bytes()[start:end]
