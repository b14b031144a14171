"""Files elsewhere and workers elsewhere: ranged reads over HTTP, and a Dask cluster that loses a worker."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import wcodec
from tests.container.weightfiles import Tensor, gaussian, noise, outliers, write
from tests.readers.test_remote import Server, server  # noqa: F401
from wcodec import cluster
from wcodec.analysis import analyzer
from wcodec.cli import main
from wcodec.errors import UnsupportedError, WCodecError

TENSORS: dict[str, Tensor] = {
    **{f"layers.{i}.w": gaussian((256, 512), i) for i in range(6)},
    "outliers": outliers((256, 256), 7),
    "noise": noise((512, 512), 8),
    "norm": gaussian((512,), 9),
}


def without_places(report: wcodec.analysis.Report) -> dict[str, Any]:
    data: dict[str, Any] = report.to_dict()
    del data["sources"]
    for tensor in data["tensors"]:
        tensor["file"] = Path(tensor["file"]).name
    return data


def test_http_gives_the_same_report(server: Server, tmp_path: Path) -> None:  # noqa: F811
    local = wcodec.analyze(write(tmp_path / "m.safetensors", TENSORS))
    there = wcodec.analyze(f"{server.url}/m.safetensors")
    assert without_places(there) == without_places(local)


def test_a_sample_reads_little(server: Server, tmp_path: Path) -> None:  # noqa: F811
    exact = wcodec.analyze(write(tmp_path / "m.safetensors", TENSORS))
    server.sent.clear()
    guess = wcodec.analyze(f"{server.url}/m.safetensors", sample_bytes=20_000)
    assert sum(sent for _, _, sent in server.sent) < 0.25 * exact.nbytes
    assert guess.bf16.entropy.exponent == pytest.approx(exact.bf16.entropy.exponent, rel=0.02)
    assert [t.format for t in guess.tensors] == [t.format for t in exact.tensors]  # noise stays raw
    assert guess.packed_bytes == pytest.approx(exact.packed_bytes, rel=0.01)
    assert [t.sampled for t in guess.tensors] == [t.nbytes > 20_000 for t in guess.tensors]


def test_headers_only_reads_headers_only(server: Server, tmp_path: Path) -> None:  # noqa: F811
    path = write(tmp_path / "m.safetensors", TENSORS)
    exact, header = wcodec.analyze(path), 8 + int.from_bytes(path.read_bytes()[:8], "little")
    opened = len(server.sent)
    analyzer.open_source(f"{server.url}/m.safetensors").close()
    opening = server.sent[opened:]
    server.sent.clear()
    guess = wcodec.analyze(f"{server.url}/m.safetensors", sample_bytes=0)
    assert server.sent == opening
    assert header <= sum(sent for _, _, sent in opening)
    assert all(t.sampled for t in guess.tensors)
    assert guess.to_dict()["totals"]["floor_ratio"] is None  # nothing was counted
    packed = {t.name: t for t in exact.tensors if t.format != "raw"}
    for t in guess.tensors:
        if t.name in packed and t.name != "outliers":
            assert t.packed_bytes == packed[t.name].packed_bytes
    data = json.loads(guess.to_json())
    assert data["totals"]["bf16"]["entropy"]["exponent"] is None
    assert guess.to_text()
    assert guess.to_html()
    assert guess.to_png()


def test_the_sample_option(tmp_path: Path) -> None:
    path = str(write(tmp_path / "m.safetensors", TENSORS))

    def run(size: str) -> Any:
        return CliRunner().invoke(main, ["analyze", path, "--sample", size, "--format", "json"])

    assert not any(t["sampled"] for t in json.loads(run("1GB").stdout)["tensors"])
    assert any(t["sampled"] for t in json.loads(run("1.5kB").stdout)["tensors"])
    largest = max(t["bytes"] for t in json.loads(run("1GB").stdout)["tensors"])
    assert not any(t["sampled"] for t in json.loads(run(str(largest)).stdout)["tensors"])  # all was read
    assert all(t["sampled"] for t in json.loads(run("0").stdout)["tensors"])
    for bad in ("lots", "-1MB", "4 m", ""):
        done = run(bad)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.fixture(scope="module")
def dask_cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
    ) as local:
        yield local


def test_a_killed_worker_costs_nothing_but_time(
    dask_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyzer, "TASK_BYTES", 1)  # a task per tensor
    path = write(
        tmp_path / "m.safetensors", {**TENSORS, **{f"more.{i}": gaussian((64, 128), i) for i in range(60)}}
    )
    want = wcodec.analyze(path)
    victims: list[int] = []

    def kill_once(done: int, total: int) -> None:
        if 0 < done < total and not victims:
            victims.append(next(iter(dask_cluster.workers.values())).pid)
            os.kill(victims[0], signal.SIGKILL)

    with cluster.dask_executor(dask_cluster.scheduler_address) as executor:
        got = wcodec.analyze(path, executor=executor, progress=kill_once)
    assert victims
    assert got.to_json() == want.to_json()


def test_the_dask_option(dask_cluster: Any, tmp_path: Path) -> None:
    path = str(write(tmp_path / "m.safetensors", TENSORS))
    address = dask_cluster.scheduler_address
    done = CliRunner().invoke(main, ["analyze", path, "--dask", address, "--format", "json"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout == wcodec.analyze(path).to_json()


def test_an_error_on_a_worker_keeps_its_name_and_mend(dask_cluster: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", TENSORS)

    def cut(done: int, total: int) -> None:
        if done == 0:
            path.write_bytes(path.read_bytes()[:1000])

    with cluster.dask_executor(dask_cluster.scheduler_address) as executor:  # noqa: SIM117
        with pytest.raises(WCodecError) as caught:
            wcodec.analyze(path, executor=executor, progress=cut)
    assert caught.value.file == str(path)
    assert caught.value.mend


def connect(address: str, **how: Any) -> None:
    with cluster.dask_executor(address, **how):
        pass


def test_nobody_at_the_address_is_one_line() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(WCodecError, match="no Dask scheduler"):
        connect("tcp://127.0.0.1:9", timeout=1)


def test_other_versions_on_workers_are_refused(dask_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wcodec, "__version__", "99.0")
    with pytest.raises(UnsupportedError, match=r"install wcodec 99\.0"):
        connect(dask_cluster.scheduler_address)


def test_missing_distributed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UnsupportedError, match=r"wcodec\[dask\]"):
        connect("tcp://127.0.0.1:9")
