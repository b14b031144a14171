"""Loud failure: damage, misfits, impossible wishes, and loaders that do not know packed weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.24")

import torch
from safetensors.torch import load_file, save_file

from tests.integrations.tiny import load, load_packing, packed_names
from wcodec.container import pack_directory
from wcodec.errors import UnsupportedError, WCodecError
from wcodec.integrations.transformers import WCodecConfig

WITHOUT_US = """
import sys
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    conversion_mapping,
)
from transformers.core_model_loading import Transpose, WeightConverter
AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert "wcodec" not in sys.modules
print("loaded")
"""


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["nobody", "pack", "storage", "save_pretrained"])
def test_who_does_not_know_us_fails_loudly(made_by: str, llama: Path, tmp_path: Path) -> None:
    folder = llama if made_by == "nobody" else tmp_path / "packed"
    if made_by == "save_pretrained":
        load_packing(llama).save_pretrained(folder)
    elif made_by != "nobody":
        pack_directory(llama, folder, profile="storage" if made_by == "storage" else "run")
    command = [sys.executable, "-c", WITHOUT_US, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if made_by == "nobody":
        assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
        return
    assert done.returncode == 1
    assert not done.stdout
    assert "Unknown quantization type, got wcodec" in done.stderr
    assert "q_proj.weight" in done.stderr  # names what does not fit


def test_other_dtypes_are_refused_in_one_line(llama: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"float32.*pass dtype=torch\.bfloat16"):
        load(llama, dtype=torch.float32, quantization_config=WCodecConfig())


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"model": "cuda:0", "lm_head": "cpu"}])
def test_offloading_is_refused(device_map: dict[str, str], llama: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be offloaded"):
        load(llama, device_map=device_map, offload_folder="x", quantization_config=WCodecConfig())


def test_settings_that_nobody_knows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="blocks"):
        WCodecConfig(blocks=3)
    with pytest.raises(UnsupportedError, match="gptq"):
        WCodecConfig(quant_method="gptq")
    with pytest.raises(WCodecError, match="max_tokens"):
        WCodecConfig(max_tokens=0)
    assert WCodecConfig.from_dict(WCodecConfig(max_tokens=7).to_dict()).max_tokens == 7


def test_a_packed_directory_without_its_config_entry_says_what_is_wrong(llama: Path, tmp_path: Path) -> None:
    pack_directory(llama, tmp_path / "packed")
    (tmp_path / "packed" / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(RuntimeError):
        load(tmp_path / "packed")
    with pytest.raises(RuntimeError):
        load_packing(tmp_path / "packed")


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()


def damage(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][-70] ^= 1  # in the dims, which the footer's checksum covers


def damage_patch(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"][6144 + 15] = 77


def exchange(tensors: dict[str, torch.Tensor]) -> None:
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    tensors[up], tensors[down] = tensors[down], tensors[up]


def lose(tensors: dict[str, torch.Tensor]) -> None:
    # A random layer in place of a lost one: transformers reports it, and tells the caller by its own rules.
    del tensors["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("change", [cut, damage, damage_patch, exchange])
def test_damaged_blobs_are_refused(change: Any, llama: Path, tmp_path: Path) -> None:
    pack_directory(llama, tmp_path / "packed")
    rewrite(tmp_path / "packed", change)
    with pytest.raises(RuntimeError):
        load(tmp_path / "packed")


def test_a_lost_weight_is_reported_as_missing(llama: Path, tmp_path: Path) -> None:
    pack_directory(llama, tmp_path / "packed")
    rewrite(tmp_path / "packed", lose)
    _, info = load(tmp_path / "packed", output_loading_info=True)
    assert info["missing_keys"] == {"model.layers.0.mlp.up_proj.weight"}


def test_mismatched_sizes_may_be_ignored_by_request(llama: Path, tmp_path: Path) -> None:
    pack_directory(llama, tmp_path / "packed")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path / "packed", vocab_size=400)
    model, info = load(
        tmp_path / "packed", vocab_size=400, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {name for name, *_ in info["mismatched_keys"]} == {"lm_head.weight", "model.embed_tokens.weight"}
    assert "lm_head" not in packed_names(model)
    assert model.lm_head.weight.shape == (400, 128)


@pytest.mark.parametrize("where", [0.1, 0.3, 0.5, 0.7])
def test_any_damage_of_a_stored_blob_is_found(where: float, llama: Path, tmp_path: Path) -> None:
    pack_directory(llama, tmp_path / "packed", profile="storage")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        blob = tensors["lm_head.weight"]
        blob[int(where * blob.numel())] ^= 4

    rewrite(tmp_path / "packed", change)
    with pytest.raises(RuntimeError):
        load(tmp_path / "packed")


def test_the_reason_of_a_failed_load_is_a_line_of_its_own(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers ends with an error that names neither weight nor reason."""
    pack_directory(llama, tmp_path / "packed")
    rewrite(tmp_path / "packed", damage)
    with pytest.raises(RuntimeError):
        load(tmp_path / "packed")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("wcodec")]
    assert len(ours) == 1
    assert ours[0].startswith("wcodec: tensor 'lm_head.weight': ")
    assert "\n" not in ours[0]


def test_nvfp4_weights_are_named(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A packed NVFP4 weight where a BF16 one belongs: one line says what it is."""
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = 256, 128
    del tensors[name]
    tensors[name] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    tensors[f"{name}_scale"] = torch.full((rows, columns // 16), 1.0).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_2"] = torch.ones(())
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    pack_directory(source, tmp_path / "packed")
    with pytest.raises(RuntimeError):
        load(tmp_path / "packed")
    assert f"tensor '{name}': holds NVFP4 weights" in caplog.text
