"""Packing a directory on a Dask cluster: workers die, runs are interrupted, the result is the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.container.weightfiles import mixed, outliers, write
from wcodec.cli import main
from wcodec.cluster import dask_executor
from wcodec.container import pack_directory, unpack_directory, verify_directory

SHARDS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
    ) as local:
        yield local


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for i in range(SHARDS):
        write(folder / f"{i}.safetensors", {**mixed(i), "big": outliers((6400, 190), i)})
    (folder / "config.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_killed_worker_costs_nothing_but_time(cluster: Any, tmp_path: Path, model: Path) -> None:
    pack_directory(model, tmp_path / "want")
    victims: list[int] = []

    def kill_once(nbytes: int) -> None:
        if not victims:
            victims.append(next(iter(cluster.workers.values())).pid)
            os.kill(victims[0], signal.SIGKILL)

    with dask_executor(cluster.scheduler_address) as executor:
        result = pack_directory(model, tmp_path / "got", executor=executor, advance=kill_once)
        unpack_directory(tmp_path / "got", tmp_path / "back", executor=executor)
    assert victims
    assert result.files == SHARDS
    assert contents(tmp_path / "got") == contents(tmp_path / "want")
    assert verify_directory(tmp_path / "got", against=model).exact
    assert contents(tmp_path / "back") == contents(model)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "want", "got", "back"}


def test_a_rerun_skips_what_the_cluster_has_done(cluster: Any, tmp_path: Path, model: Path) -> None:
    done: list[int] = []

    def interrupt(nbytes: int) -> None:
        done.append(nbytes)
        if len(done) == SHARDS - 1:
            raise KeyboardInterrupt

    with dask_executor(cluster.scheduler_address) as executor, pytest.raises(KeyboardInterrupt):
        pack_directory(model, tmp_path / "got", executor=executor, advance=interrupt)
    part = tmp_path / ".got.wcodec-part"
    finished = {path.name: path.stat().st_ino for path in part.glob("*.safetensors")}
    assert len(finished) >= SHARDS - 1
    with dask_executor(cluster.scheduler_address) as executor:
        pack_directory(model, tmp_path / "got", executor=executor)
    now = {path.name: path.stat().st_ino for path in (tmp_path / "got").glob("*.safetensors")}
    assert sum(now[name] == inode for name, inode in finished.items()) >= SHARDS - 1
    assert verify_directory(tmp_path / "got", against=model).exact


def test_the_option(cluster: Any, tmp_path: Path, model: Path) -> None:
    address = cluster.scheduler_address
    done = CliRunner().invoke(main, ["pack", str(model), str(tmp_path / "got"), "--dask", address])
    assert done.exit_code == 0, done.stderr
    assert f"{SHARDS} files" in done.stdout
    assert verify_directory(tmp_path / "got", against=model).exact
    one = str(model / "0.safetensors")
    done = CliRunner().invoke(main, ["pack", one, str(tmp_path / "p"), "--dask", address])
    assert done.exit_code == 2
    assert "files of a directory" in done.stderr
