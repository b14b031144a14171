"""The commands and the program of docs/packing.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.container.weightfiles import mixed, write
from wcodec.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "packing.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "model.safetensors", mixed(), metadata={"format": "pt"})
    Path("model-dir").mkdir()
    write(Path("model-dir") / "a.safetensors", mixed(1))
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 9
    for command in commands:
        program, *args = command.split()
        assert program == "wcodec"
        done = CliRunner().invoke(main, args)
        assert done.exit_code == 0, (command, done.output)
    assert Path("back.safetensors").read_bytes() == source.read_bytes()
    assert Path("packed-again.safetensors").read_bytes() == Path("packed.safetensors").read_bytes()
    [program] = blocks("python")
    names: dict[str, object] = {}
    exec(program, names)
    assert names["bits"].shape == names["part"].entry.shape  # type: ignore[attr-defined]
