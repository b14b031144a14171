"""The main job on real trained weights, and the figures it is known to give."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import wcodec
from wcodec import demo
from wcodec.analysis import Report

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(demo.PACKAGE) is None, reason="the extra [demo] is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    result = CliRunner().invoke(demo.main, [str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def report(output: str, folder: Path) -> Report:
    return wcodec.analyze(folder / "model.safetensors")


@needs_weights
def test_every_step_is_told(output: str, folder: Path) -> None:
    for step in ("ready", "cast", "analyze", "pack", "verify", "unpack", "compare"):
        assert f"✓ {step}" in output
    assert "all equal" in output
    assert "2.614 of 8 bits" in output
    left = {file.name for file in folder.iterdir()}
    assert left == {f"{name}.safetensors" for name in ("model", "packed", "back")} | {
        "report.html",
        "report.png",
    }
    assert (folder / "back.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@needs_weights
def test_known_figures_of_minilm(report: Report) -> None:
    """Per-tensor windows: H(exponent) 2.614, floor 10.58, 1.375e-4 outside, at most 12.15 bits per weight."""
    bf16 = report.bf16
    assert bf16.entropy.exponent == pytest.approx(2.614, abs=0.001)
    assert bf16.entropy.total == pytest.approx(10.58, abs=0.01)
    assert bf16.exceptions.fraction <= 1.375e-4 * 1.02
    assert bf16.bits_per_weight <= 12.15
    for t in report.tensors:
        if t.format == "bf16-w12" and t.numel >= 147_456 and all(n % 64 == 0 for n in t.shape):
            assert t.bits_per_weight <= 12.15, t.name


@needs_weights
def test_exceptions_of_minilm_with_consecutive_windows(report: Report) -> None:
    missed = sum(
        (1 - t.coverage.high_exponent[8]) * t.numel for t in report.tensors if t.kind == "bf16" and t.coverage
    )
    assert missed / report.bf16.weights == pytest.approx(1.375e-4, rel=0.02)


@needs_weights
def test_whole_patterns_hold_hardly_less_than_their_fields(folder: Path, report: Report) -> None:
    """What docs/analyze.md says of the floor."""
    from wcodec.analysis.fields import entropy
    from wcodec.bits import histogram
    from wcodec.readers import open_source

    name = "embeddings.word_embeddings.weight"
    with open_source(folder / "model.safetensors") as model:
        joint = entropy(histogram(model[name].read().view("<u2")))
    fields = next(t.floor_bits_per_weight for t in report.tensors if t.name == name)
    assert (round(joint, 2), round(fields, 2)) == (10.53, 10.58)


@needs_weights
def test_the_cast_is_to_nearest_even(folder: Path, output: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    def raw(tensor: torch.Tensor) -> np.ndarray:
        return tensor.reshape(-1).view(torch.uint8).numpy()

    want, got = load_file(demo.find_weights()), load_file(folder / "model.safetensors")
    assert list(want) == list(got)
    for name, tensor in want.items():
        expected = tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
        assert got[name].dtype == expected.dtype
        same = (
            got[name].reshape(-1).view(torch.uint8).numpy() == expected.reshape(-1).view(torch.uint8).numpy()
        )
        assert np.all(same)


def test_missing_weights_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_of_weights")
    result = CliRunner().invoke(demo.main, [str(tmp_path / "new")])
    assert result.exit_code == 2
    assert "wcodec[demo]" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


@needs_weights
def test_a_changed_byte_fails_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wcodec.container

    unpack = wcodec.container.unpack_file

    def damage(source: Path, destination: Path, **how: object) -> None:
        unpack(source, destination, **how)
        data = bytearray(destination.read_bytes())
        data[-1] ^= 1
        destination.write_bytes(data)

    monkeypatch.setattr(wcodec.container, "unpack_file", damage)
    result = CliRunner().invoke(demo.main, [str(tmp_path)])
    assert result.exit_code == 1
    assert "differs" in result.stderr
