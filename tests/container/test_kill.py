"""kill -9 at many moments of packing a sharded directory: nothing is ever corrupt, and a rerun completes.

The child is forked and kills itself at its n-th system call that changes the disk, so the moments cover every
step and are the same in every run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.container.nvfp4files import modelopt
from tests.container.weightfiles import mixed, outliers, write
from wcodec.container import pack_directory, pack_file, verify_directory, verify_file
from wcodec.container.atomic import PART_SUFFIX, part_path, remove

MOMENTS = 20
_CALLS = ("pwrite", "fsync", "ftruncate", "mkdir")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for i in range(4):
        write(
            folder / f"model-{i}.safetensors",
            {**mixed(i), "big": outliers((640, 190), i), **modelopt(seed=i)},
        )
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1}, "weight_map": {}}')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run_until(work: Callable[[], object], last_call: int) -> tuple[bool, int]:
    """Run `work` in a forked child that dies before its `last_call`-th change of the disk.

    Returns
    -------
    killed : bool
    calls : int
        Changes it made, where it came to its end.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **how: object) -> object:
                nonlocal calls
                calls += 1
                if calls == last_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **how)

            return call

        for name in _CALLS:
            setattr(os, name, counted(getattr(os, name)))
        for name in ("replace", "rename", "unlink", "mkdir"):
            setattr(Path, name, counted(getattr(Path, name)))
        try:
            work()
            os.write(writer, str(calls).encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    counted_calls = int(os.read(reader, 20) or b"0")
    os.close(reader)
    return os.WIFSIGNALED(status), counted_calls


def test_a_directory_killed_at_twenty_moments(tmp_path: Path, model: Path) -> None:
    pack_directory(model, tmp_path / "want", workers=1)
    want = contents(tmp_path / "want")
    target = tmp_path / "packed"
    killed, total = run_until(lambda: pack_directory(model, tmp_path / "count", workers=1), 1 << 30)
    assert not killed
    assert total > 60
    moments = sorted(np.random.default_rng(0).choice(total, MOMENTS, replace=False) + 1)
    for moment in moments:
        killed, _ = run_until(lambda: pack_directory(model, target, workers=1), int(moment))
        assert killed
        assert not target.exists() or contents(target) == want
        leftovers = {p.name for p in tmp_path.iterdir()} - {"model", "want", "count", "packed"}
        assert leftovers <= {f".packed{PART_SUFFIX}"}
        pack_directory(model, target, workers=1, force=True)
        assert contents(target) == want
        assert {p.name for p in tmp_path.iterdir()} == {"model", "want", "count", "packed"}
        for path in sorted(target.rglob("*"), reverse=True):
            path.unlink()
        target.rmdir()


def test_killed_again_and_again_without_cleaning(tmp_path: Path, model: Path) -> None:
    """Every run gets a little further and dies; each keeps the shards of those before it."""
    target, moment, runs = tmp_path / "packed", 3, 0
    while run_until(lambda: pack_directory(model, target, workers=1), moment)[0]:
        assert not target.exists()
        moment, runs = moment + 17, runs + 1
    assert runs > 3
    assert verify_directory(target, against=model).exact
    assert {p.name for p in tmp_path.iterdir()} == {"model", "packed"}


def test_replacing_a_directory_never_loses_it(tmp_path: Path, model: Path) -> None:
    """With --force the old directory is there, under its name or a recognisable one, until the new one is."""
    target = tmp_path / "packed"
    _, total = run_until(lambda: pack_directory(model, target, workers=1), 1 << 30)
    want = contents(target)
    between = 0
    for moment in range(total - 20, total + 60):
        killed, _ = run_until(lambda: pack_directory(model, target, workers=1, force=True), moment)
        old = tmp_path / f".packed{PART_SUFFIX}-old"
        assert target.exists() or contents(old) == want
        if not killed:
            break
        if not target.exists():  # between the two renames: a rerun without --force ends it
            pack_directory(model, target, workers=1)
            assert not old.exists()
            between += 1
        remove(part_path(target))
    assert not killed
    assert between == 1
    assert {p.name for p in tmp_path.iterdir()} == {"model", "packed"}
    assert contents(target) == want


def test_a_file_killed_at_every_moment(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a", {**mixed(), **modelopt()}), tmp_path / "p"
    target.write_bytes(b"old")
    moment = 1
    while run_until(lambda: pack_file(source, target, workers=1, force=True), moment)[0]:
        assert target.read_bytes() == b"old" or verify_file(target, against=source).exact
        moment += 1
    assert moment > 10
    assert verify_file(target, against=source).exact
    assert {p.name for p in tmp_path.iterdir()} == {"a", "p"}
