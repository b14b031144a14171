"""Paths that are not UTF-8, printed by a terminal that is strict about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.container.weightfiles import gaussian, write

NAME = os.fsdecode(b"w\xff.safetensors")


def run(*args: str | Path) -> bytes:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "wcodec", *map(os.fsencode, args)]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write(tmp_path / "model" / NAME, {"w": gaussian((64, 64))})


def test_pack_and_unpack(tmp_path: Path, model: Path) -> None:
    packed, back = tmp_path / f"packed-{NAME}", tmp_path / f"back-{NAME}"
    assert os.fsencode(packed) in run("pack", model, packed)
    run("verify", packed, "--against", model)
    run("unpack", packed, back)
    assert back.read_bytes() == model.read_bytes()


def test_a_directory(tmp_path: Path, model: Path) -> None:
    packed = tmp_path / "packed"
    run("pack", model.parent, packed)
    json.loads((packed / "wcodec.manifest.json").read_text(encoding="utf-8"))
    run("verify", packed, "--against", model.parent)
    run("unpack", packed, tmp_path / "back")
    assert (tmp_path / "back" / NAME).read_bytes() == model.read_bytes()


def test_reports(tmp_path: Path, model: Path) -> None:
    for command in (["analyze"], ["info"]):
        document = json.loads(run(*command, model, "--format", "json").decode())
        assert str(model) in (document.get("path") or document["sources"][0]["path"])
    for suffix in ("json", "csv", "html"):
        run("analyze", model, "-o", tmp_path / f"report.{suffix}")
        assert "w" in (tmp_path / f"report.{suffix}").read_text(encoding="utf-8")
    assert os.fsencode(NAME) in run("analyze", model)


def test_csv_keeps_control_characters(tmp_path: Path) -> None:
    model = write(tmp_path / "a.safetensors", {"\x1b[31mred": gaussian((64, 64))})
    assert b"\n\x1b[31mred," in run("analyze", model, "--format", "csv")
