"""``wcodec info --plan``: memory and reading time per layer, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.container.weightfiles import Tensor, gaussian, write
from wcodec.analysis.plan import plan_model
from wcodec.cli import main
from wcodec.container import PackedFile, pack_file
from wcodec.errors import UnsupportedError


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["info", "--plan", *map(str, args)])


def model() -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": gaussian((500, 128))}
    for layer in range(3):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = gaussian((256, 128), layer)
        tensors[f"model.layers.{layer}.norm.weight"] = gaussian((128,), layer)
    return {**tensors, "lm_head.weight": gaussian((500, 128), 9), "experts": gaussian((2, 64, 64), 3)}


def test_bytes_and_times(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", model())
    plan = plan_model(path, gpu="2TB/s")
    layers = {layer.name: layer for layer in plan.layers}
    assert list(layers) == [
        "model.embed_tokens.weight",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "lm_head.weight",
        "experts",
    ]
    embed, layer = layers["model.embed_tokens.weight"], layers["model.layers.1"]
    assert embed.packed_bytes == embed.nbytes == 500 * 128 * 2
    assert embed.read_us == 0
    assert layer.nbytes == 2 * (256 * 128 + 128)
    bricks = 4 * 2 * 6208
    assert layer.packed_bytes == -(-(bricks + 80) // 256) * 256 + 256
    assert layer.read_us == pytest.approx(layer.nbytes / 2e12 * 1e6)
    assert layer.transient_bytes == 2 * 256 * 128
    assert layers["experts"].packed_bytes == layers["experts"].nbytes  # only matrices are packed for products
    assert plan.totals["peak_bytes"] == plan.totals["packed_bytes"] + 500 * 128 * 2
    assert plan.totals["weights"] == sum(layer.weights for layer in plan.layers)


def test_a_packed_model_is_planned_exactly(tmp_path: Path) -> None:
    source = write(tmp_path / "m.safetensors", model())
    pack_file(source, tmp_path / "p.safetensors")
    parts = {part.entry.name: part for part in PackedFile(tmp_path / "p.safetensors").parts}
    stored = parts["lm_head.weight"].stored
    plan = {layer.name: layer for layer in plan_model(tmp_path / "p.safetensors").layers}
    assert plan["lm_head.weight"].packed_bytes == stored.end - stored.begin
    assert plan["lm_head.weight"].nbytes == 500 * 128 * 2
    assert [layer.packed_bytes for layer in plan_model(source).layers] == [
        layer.packed_bytes for layer in plan.values()
    ]


def test_the_table_folds_equal_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", model())
    done = run(path, "--gpu", "h100")
    assert done.exit_code == 0
    for text in ("model.layers.0 … 2", "looked up", "3.35 TB/s", "GPU memory"):
        assert text in done.stdout


def test_json_and_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", model())
    document = json.loads(run(path, "--format", "json").stdout)
    assert document["schema"] == "wcodec.plan/1"
    assert document["gpu"]["name"] == "H200"
    assert len(document["layers"]) == 6
    assert document["totals"]["packed_bytes"] < document["totals"]["bytes"]
    done = run(path, "--gpu", "abacus")
    assert done.exit_code == 2
    assert "no GPU called 'abacus'" in done.stderr
    with pytest.raises(UnsupportedError):
        plan_model(path, gpu="")
