"""`wcodec tune`, `bench` and `doctor`, as far as they go without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from wcodec.cli import main
from wcodec.cuda.device import DeviceInfo
from wcodec.errors import WCodecError
from wcodec.fused import Bound, Kernel
from wcodec.kernels.gemm import GemmConfig
from wcodec.tables import Entry, read_table, tuned_path

torch = pytest.importorskip("torch")

from wcodec import timing, tune  # noqa: E402  (they need torch)

H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20, 150 << 30)


def run(*args: str) -> Any:
    return CliRunner().invoke(main, list(args))


@pytest.mark.parametrize("command", ["tune", "bench"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["4096"], "'4096' is no shape; write it like 4096x8192"),
        (["0x64"], "is no shape"),
        (["64x64", "--tokens", "1,two"], "'1,two' is no list of token counts"),
        (["64x64", "--tokens", "0"], "is no list of token counts"),
    ],
)
def test_bad_shapes_are_said_in_one_line(command: str, args: list[str], message: str) -> None:
    result = run(command, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_table_without_a_place_is_refused_at_once() -> None:
    result = run("tune", "64x64", "--output", "nowhere/table.json")
    assert result.exit_code == 2
    assert "there is no folder 'nowhere'" in result.stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu"])
@pytest.mark.parametrize("command", [["tune", "64x64"], ["bench"]])
def test_without_a_gpu_they_say_so(command: list[str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*command, "--device", device)
    assert result.exit_code == 2
    assert result.stderr == (
        "wcodec: error: this command measures on an NVIDIA GPU, and torch sees none;"
        " `wcodec doctor` says what is missing\n"
    )


@dataclass(frozen=True)
class Config:
    """A configuration that says how long it takes."""

    us: float


class FakeTimer:
    """Times a call by asking it."""

    empty_us = 3.4
    device = torch.device("cuda", 0)

    def __init__(self, index: int) -> None:
        self.released = 0

    def medians(self, runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
        return [run() or 50.0 for run in runs]

    def release(self) -> None:
        self.released += 1


def bind(weight: Any, m: int, config: Config) -> Bound:
    if config.us < 0:
        raise WCodecError("spills")
    return Bound(lambda x, out, bias: config.us, 0)


def kernel(times: Sequence[float]) -> Kernel:
    return Kernel(
        supported=lambda info: True,
        config=lambda values: Config(**values),
        default=lambda n, k, m, info: Config(times[0]),
        bind=bind,
        candidates=lambda n, k, m, info: [Config(us) for us in times],
    )


def test_tuning_keeps_the_fastest_of_each_kernel(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = SimpleNamespace(reserve=lambda nbytes: None)
    monkeypatch.setattr(tune, "KERNELS", {"gemv": kernel([30, 10, -1, 20, 25, 11, 12]), "gemm": kernel([40])})
    monkeypatch.setattr(tune, "device_info", lambda index: H200)
    monkeypatch.setattr(tune, "_without_original", lambda weight: weight)
    monkeypatch.setattr(timing, "Timer", FakeTimer)
    monkeypatch.setattr("wcodec.state.PackedWeight.workspaces", spaces)
    seen: list[Any] = []
    entries = tune.tune([(128, 64)], "cpu", tokens=(8, 1), report=seen.append)
    assert [len(product) for product in seen] == [3, 3]
    assert seen[0] + seen[1] == entries
    assert [(e.m, e.kernel, e.us) for e in entries] == [
        (1, "decode", 50.0),
        (1, "gemv", 10),
        (1, "gemm", 40),
        (8, "decode", 50.0),
        (8, "gemv", 10),
        (8, "gemm", 40),
    ]
    _, _, kept = read_table(tuned_path("NVIDIA H200").read_text(), "")
    assert kept == entries
    out = kernel_cache / "table.json"
    tune.tune([(64, 64)], "cpu", tokens=(1,), out=out)
    assert {(e.n, e.kernel) for e in read_table(out.read_text(), "")[2]} == {
        (64, "decode"),
        (64, "gemv"),
        (64, "gemm"),
    }
    assert read_table(tuned_path("NVIDIA H200").read_text(), "")[2] == entries


def test_a_tie_goes_to_the_instance_that_exceptions_delay_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = GemmConfig(64, 1, 7, 2, 1, column_groups=2)
    early = replace(late, early_patches=True)
    wide = GemmConfig(64, 2, 8, 1, 1)
    times = {  # an empty launch takes 3.4
        late: 10.0,
        early: 10.05,
        replace(early, stages=6): 10.06,
        replace(early, stages=5): 10.08,
        wide: 10.3,
    }
    product = replace(
        kernel([1]),
        bind=lambda weight, m, config: Bound(lambda x, out, bias: times[config], 0),
        candidates=lambda n, k, m, info: list(times),
    )
    monkeypatch.setattr(tune, "KERNELS", {"gemm": product})
    monkeypatch.setattr(tune, "device_info", lambda index: H200)
    monkeypatch.setattr(tune, "_without_original", lambda weight: weight)
    monkeypatch.setattr(timing, "Timer", FakeTimer)
    monkeypatch.setattr("wcodec.state.PackedWeight.workspaces", SimpleNamespace(reserve=lambda nbytes: None))

    def kept() -> GemmConfig:
        _, entry = tune.tune([(128, 64)], "cpu", tokens=(64,), out=tmp_path / "table.json")
        assert entry.us == times[GemmConfig(**entry.config)]
        return GemmConfig(**entry.config)

    assert kept() == replace(early, stages=6)
    times[wide] = 10.0  # two row tiles hide each other's patches
    assert kept() == wide


def test_tuning_says_a_line_per_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shapes: Any, device: str, tokens: Any, report: Callable[[Any], None], out: Path) -> None:
        assert (shapes, device, tokens, out) == (((64, 128),), "cuda", (1,), tmp_path / "table.json")
        times = [("decode", 14.94), ("gemv", 7.2)]
        report([Entry(64, 128, 1, kernel, None, us, 10.6) for kernel, us in times])

    monkeypatch.setattr(tune, "tune", measure)
    monkeypatch.setattr("wcodec.cli.gpu.gpu_index", lambda device: 0)
    monkeypatch.setattr("wcodec.cuda.device.device_info", lambda index: H200)
    result = run("tune", "64x128", "--tokens", "1", "--output", str(tmp_path / "table.json"))
    assert result.stdout == f"{tmp_path / 'table.json'}\n"
    assert result.stderr == "wcodec: 64x128, 1 token: decode 14.9, gemv 7.2, cuBLAS 10.6 µs; gemv 1.47x\n"


def test_doctor_examines_everything(kernel_cache: Path) -> None:
    result = run("doctor", "--format", "json")
    report = json.loads(result.stdout)
    assert report["schema"] == "wcodec.doctor/1"
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["host codec"]["state"] == "ok"
    assert checks["torch"]["state"] == "ok"
    assert str(kernel_cache) in checks["kernel cache"]["found"]
    assert result.exit_code == 0
    assert "host codec" in run("doctor").stdout


def test_doctor_finds_what_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("WCODEC_CACHE_DIR", str(blocked))
    result = run("doctor")
    assert result.exit_code == 1
    assert "set WCODEC_CACHE_DIR" in result.stdout


def test_doctor_says_what_is_missing(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = {c["name"]: c for c in json.loads(run("doctor", "--format", "json").stdout)["checks"]}
    assert checks["gguf"]["state"] == "missing"
    assert checks["gguf"]["mend"] == "pip install 'wcodec[gguf]'"
    assert checks["GPU"]["state"] == "missing"
