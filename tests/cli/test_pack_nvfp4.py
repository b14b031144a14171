"""``wcodec pack``, ``verify``, ``unpack`` and ``info`` on NVFP4 checkpoints, as a shell sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.container.nvfp4files import compressed, f32, gpt_oss, modelopt
from tests.container.weightfiles import gaussian, write
from wcodec.bits import digest
from wcodec.cli import main
from wcodec.container import PackedFile

TENSORS = {**modelopt(), **gpt_oss(), **compressed(), "lm_head": gaussian((128, 128))}


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    done = run("pack", write(tmp_path / "a.safetensors", TENSORS), tmp_path / "p.safetensors")
    assert done.exit_code == 0
    assert "5 of 10 tensors packed" in done.stdout
    return tmp_path / "p.safetensors"


def test_the_round_trip(tmp_path: Path, packed: Path) -> None:
    source, back = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert "exact, same as" in run("verify", packed, "--against", source).stdout
    assert run("unpack", packed, back).exit_code == 0
    assert back.read_bytes() == source.read_bytes()


def test_what_stays_gets_a_line_unless_it_is_to_be_quiet(tmp_path: Path) -> None:
    tensors = {**TENSORS, "q.weight_scale_2": f32(0.0)}
    source = write(tmp_path / "a", tensors)
    done = run("pack", source, tmp_path / "p")
    assert done.stderr.splitlines() == [
        "wcodec: mlp.experts.gate_up_proj_blocks stays as it is: the run profile has no format for MXFP4",
        "wcodec: q.weight stays as it is: a zero global scale",
    ]
    assert run("pack", "--quiet", "--force", source, tmp_path / "p").stderr == ""
    assert run("pack", "--profile", "storage", source, tmp_path / "s").stderr == ""


def test_info(packed: Path) -> None:
    lines = {line.split()[0]: line for line in run("info", packed).stdout.splitlines() if line.split()}
    assert "nvfp4-s5" in lines["q.weight"]
    assert "192 × 128" in lines["q.weight"]
    assert "with weight" in lines["q.weight_scale"]
    tensors = {t["name"]: t for t in json.loads(run("info", packed, "--format", "json").stdout)["tensors"]}
    weight, scale = tensors["q.weight"], tensors["q.weight_scale"]
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("U8", [192, 128], 192 * 128)
    assert weight["bits_per_weight"] == 8 * weight["stored_bytes"] / (192 * 256)
    assert (scale["format"], scale["stored_bytes"], scale["bits_per_weight"]) == ("nvfp4-s5", 0, None)
    assert scale["within"] == "q.weight"
    assert "within" not in weight
    for name, (_, _, data) in TENSORS.items():
        assert tensors[name]["xxh3_128"] == digest(data).hex()


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    file = PackedFile(packed)
    part = next(part for part in file.parts if part.entry.name == "q.weight")
    bricks = file.header.data_start + part.stored.begin + 3 * 4 * 2208
    data[bricks : bricks + 4] = b"\xff" * 4
    packed.write_bytes(data)
    for command in (["unpack", packed, tmp_path / "b"], ["verify", packed]):
        done = run(*command)
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "tensor 'q.weight': patch 0 is malformed" in done.stderr
    assert not (tmp_path / "b").exists()
