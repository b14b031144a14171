"""transformers: packing while loading, packed directories, and what is left as it is."""

from __future__ import annotations

import copy
import filecmp
import importlib
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.24")

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    conversion_mapping,
)
from transformers.core_model_loading import Transpose, WeightConverter

import wcodec.integrations.loading as loading
import wcodec.integrations.transformers as integration
from tests.integrations.tiny import (
    PROMPT,
    assert_same_weights,
    load,
    load_packing,
    packed_names,
    sum_in_fp32,
    write_model,
)
from wcodec.analysis.plan import plan_model
from wcodec.container import pack_directory, unpack_directory
from wcodec.container.describe import describe
from wcodec.errors import UnsupportedError
from wcodec.integrations.transformers import WCodecConfig, report, unpack_
from wcodec.nn import PackedLinear

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def test_packs_every_linear_layer_while_loading(llama: Path) -> None:
    model = load_packing(llama)
    plain = load(llama)
    linears = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    assert packed_names(model) == linears
    assert "lm_head" in linears
    assert_same_weights(model, plain)
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert model.model.layers[0].self_attn.q_proj.bias.dtype == torch.bfloat16
    assert model.dtype == torch.bfloat16
    assert not model.training


def test_generates_the_tokens_of_the_same_arithmetic_on_uncompressed_weights(llama: Path) -> None:
    model, plain = load_packing(llama), sum_in_fp32(load(llama))
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits.view(torch.int16), plain(PROMPT).logits.view(torch.int16))
    assert torch.equal(model.generate(PROMPT, **GREEDY), plain.generate(PROMPT, **GREEDY))
    assert torch.equal(
        model.generate(PROMPT, cache_implementation="static", **GREEDY), plain.generate(PROMPT, **GREEDY)
    )


def test_logits_are_close_to_torch_in_bf16(llama: Path) -> None:
    with torch.no_grad():
        ours, theirs = load_packing(llama)(PROMPT).logits.float(), load(llama)(PROMPT).logits.float()
    assert (ours - theirs).norm() <= 4e-3 * theirs.norm()


def test_at_most_one_unpacked_layer_is_alive_while_packing(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    prepare_one = loading.preparation.prepare_one

    def spy(weight: torch.Tensor, *args: Any, **settings: Any) -> Any:
        alive.append(sum(each() is not None for each in before))
        before.append(weakref.ref(weight))
        return prepare_one(weight, *args, **settings)

    monkeypatch.setattr(loading.preparation, "prepare_one", spy)
    model = load_packing(llama)
    assert len(before) == len(packed_names(model))
    assert max(alive) <= 1


def test_a_saved_directory_loads_without_repacking(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_packing(llama, max_tokens=32)
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "wcodec"
    monkeypatch.setattr(loading.preparation, "prepare_one", None)  # whoever packs again fails
    again = load(tmp_path / "packed")
    assert packed_names(again) == packed_names(model)
    assert again.lm_head.max_tokens == 32
    assert_same_weights(again, model)
    with torch.no_grad():
        assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)


def test_save_pretrained_and_pack_store_the_same_tensors(llama: Path, tmp_path: Path) -> None:
    load_packing(llama).save_pretrained(tmp_path / "saved")
    pack_directory(llama, tmp_path / "packed")
    saved, packed = (load_file(tmp_path / kind / "model.safetensors") for kind in ("saved", "packed"))
    del packed["__wcodec__.header"]
    assert saved.keys() == packed.keys()
    for name in saved:
        assert saved[name].dtype == packed[name].dtype, name
        assert torch.equal(saved[name], packed[name]), name
    blobs = [name for name in saved if saved[name].dtype == torch.uint8]
    assert "model.embed_tokens.weight" in blobs
    assert all(saved[name].dim() == 1 for name in blobs)


def test_info_and_plan_know_what_a_saved_directory_holds(llama: Path, tmp_path: Path) -> None:
    load_packing(llama).save_pretrained(tmp_path / "saved")
    pack_directory(llama, tmp_path / "packed")
    saved, packed = (describe(tmp_path / kind) for kind in ("saved", "packed"))
    assert {each.name: each for each in saved.tensors if each.format != "raw"} == {
        each.name: each for each in packed.tensors if each.format != "raw"
    }
    assert saved.packed
    totals = plan_model(tmp_path / "packed").totals
    assert plan_model(tmp_path / "saved").totals == pytest.approx(totals)
    assert not describe(llama).packed


@pytest.mark.parametrize("profile", ["run", "storage"])
def test_a_directory_made_by_pack_loads_and_unpacks(profile: str, llama: Path, tmp_path: Path) -> None:
    pack_directory(llama, tmp_path / "packed", profile=profile)
    model, info = load(tmp_path / "packed", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert packed_names(model) == packed_names(load_packing(llama))
    assert_same_weights(model, load(llama))
    unpack_directory(tmp_path / "packed", tmp_path / "back")
    names = sorted(path.name for path in llama.iterdir())
    assert filecmp.cmpfiles(llama, tmp_path / "back", names, shallow=False) == (names, [], [])


def test_shards(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", shard="200KB")
    assert len(list(plain.glob("*.safetensors"))) > 2
    pack_directory(plain, tmp_path / "packed")
    model = load(tmp_path / "packed")
    assert_same_weights(model, load(plain))
    model.save_pretrained(tmp_path / "saved", max_shard_size="150KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    assert_same_weights(load(tmp_path / "saved"), model)


def test_a_tied_head_stays_tied_and_says_so(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", tie_word_embeddings=True)
    pack_directory(plain, tmp_path / "packed")
    load_packing(plain).save_pretrained(tmp_path / "saved")
    for model in (load_packing(plain), load(tmp_path / "packed"), load(tmp_path / "saved")):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert "lm_head" not in packed_names(model)
        assert_same_weights(model, load(plain))
        left = [row for row in report(model) if row.reason]
        assert [row.name for row in left] == ["model.embed_tokens"]  # counted once
        assert model.hf_quantizer.reasons["lm_head.weight"] == "is tied to an embedding"
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")


def test_modules_to_not_convert(llama: Path, tmp_path: Path) -> None:
    model = load_packing(llama, modules_to_not_convert=["lm_head", "model.layers.1", "o_proj"])
    names = packed_names(model)
    assert "model.layers.0.self_attn.q_proj" in names
    assert not [n for n in names if "lm_head" in n or "layers.1." in n or n.endswith("o_proj")]
    reasons = {row.name: row.reason for row in report(model)}
    assert reasons["lm_head"] == "is in modules_to_not_convert"
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert packed_names(again) == names
    assert_same_weights(again, model)


def test_report_counts_what_memory_holds(llama: Path) -> None:
    model = load_packing(llama)
    rows = report(model)
    for row in rows:
        if row.reason is None:
            assert row.after_bytes == model.get_submodule(row.name).packed.nbytes < row.before_bytes
        else:
            assert row.after_bytes == row.before_bytes
    assert {row.name for row in rows if row.reason} == {"model.embed_tokens"}


def test_experts_stay_bf16_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = write_model(tmp_path / "plain", "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    with safe_open(plain / "model.safetensors", "pt") as file:
        assert any(".experts.3." in name for name in file.keys())  # noqa: SIM118  # stored one by one
    pack_directory(plain, tmp_path / "packed")
    load_packing(plain).save_pretrained(tmp_path / "saved")
    for model in (load_packing(plain), load(tmp_path / "packed"), load(tmp_path / "saved")):
        assert_same_weights(model, load(plain))
        assert "model.layers.0.self_attn.q_proj" in packed_names(model)
        reasons = {row.name: row.reason for row in report(model)}
        experts = [name for name in reasons if "experts" in name]
        assert experts
        assert all("multiplies it by itself" in str(reasons[name]) for name in experts)
    assert caplog.text.count("stay as they are") == 4  # once per load: most of the bytes stay


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2", "Phi3", "Cohere", "Olmo2", "GPTNeoX"])
def test_other_architectures(kind: str, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", kind, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    pack_directory(plain, tmp_path / "packed")
    model = load(tmp_path / "packed")
    assert packed_names(model)
    assert_same_weights(model, load(plain))
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, sum_in_fp32(load(plain))(PROMPT).logits)
    model.save_pretrained(tmp_path / "saved")
    assert_same_weights(load(tmp_path / "saved"), model)


def test_dequantize_gives_the_original_back(llama: Path, tmp_path: Path) -> None:
    model = load_packing(llama)
    model.dequantize()
    assert not packed_names(model)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    old, new = (load_file(folder / "model.safetensors") for folder in (llama, tmp_path / "plain"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name].view(torch.int16), new[name].view(torch.int16)) for name in old)


def test_unpack_in_place_keeps_device_dtype_and_bias(llama: Path) -> None:
    model = load_packing(llama)
    assert unpack_(model) == 15
    assert_same_weights(model, load(llama))
    assert unpack_(model) == 0


def test_a_model_can_be_pickled(llama: Path) -> None:
    model = load_packing(llama)
    again = pickle.loads(pickle.dumps(model))
    assert_same_weights(again, model)


def test_importing_twice_works(llama: Path) -> None:
    again = importlib.reload(integration)
    model = load(llama, quantization_config=again.WCodecConfig())
    assert packed_names(model)
    import wcodec.integrations.transformers as third

    assert third is again


def test_fp32_checkpoints_are_packed_as_bf16_when_asked(llama: Path, tmp_path: Path) -> None:
    load(llama, dtype=torch.float32).save_pretrained(tmp_path / "fp32")
    model = load(tmp_path / "fp32", dtype=torch.bfloat16, quantization_config=WCodecConfig())
    assert_same_weights(model, load(llama))
    assert "lm_head" in packed_names(model)


def test_device_map_of_one_cpu(llama: Path) -> None:
    model = load(llama, device_map="cpu", quantization_config=WCodecConfig())
    assert packed_names(model)
    assert_same_weights(model, load(llama))


def test_a_packed_weight_is_readable_but_cannot_be_changed(llama: Path) -> None:
    head = load_packing(llama).lm_head
    assert head.weight.shape == (320, 128)
    assert head.weight.dtype == torch.bfloat16
    assert head.weight.device.type == "cpu"
    with pytest.raises(UnsupportedError, match="unpack"):
        head.weight.data.add_(1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend: str, llama: Path) -> None:
    model = load_packing(llama)
    compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
    with torch.no_grad():
        for prompt in (PROMPT, PROMPT[:, :3]):
            assert torch.equal(compiled(prompt).logits, model(prompt).logits)


def test_an_encoder(tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "num_hidden_layers": 2}
    BertModel(BertConfig(vocab_size=320, **sizes)).bfloat16().save_pretrained(tmp_path / "plain")
    pack_directory(tmp_path / "plain", tmp_path / "packed")
    plain, model = (BertModel.from_pretrained(tmp_path / kind) for kind in ("plain", "packed"))
    assert len(packed_names(model)) == 13
    assert_same_weights(model, plain)
    with torch.no_grad():
        ours, theirs = model(PROMPT), sum_in_fp32(plain)(PROMPT)
    assert torch.equal(ours.pooler_output, theirs.pooler_output)


def test_an_encoder_and_decoder(tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = T5Config(vocab_size=320, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path / "plain")
    pack_directory(tmp_path / "plain", tmp_path / "packed")
    plain, model = (
        T5ForConditionalGeneration.from_pretrained(tmp_path / each) for each in ("plain", "packed")
    )
    assert {f"encoder.block.0.layer.1.DenseReluDense.{each}" for each in ("wi", "wo")} <= packed_names(model)
    assert_same_weights(model, plain)
    with torch.no_grad():
        logits = model(input_ids=PROMPT, decoder_input_ids=PROMPT).logits
        expected = sum_in_fp32(plain)(input_ids=PROMPT, decoder_input_ids=PROMPT).logits
    assert torch.equal(logits, expected)


def test_weights_that_the_model_converts_are_converted_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_model(tmp_path / "plain")
    pack_directory(plain, tmp_path / "packed")
    before = load(plain).model.layers[0].self_attn.q_proj.weight
    turned = WeightConverter("q_proj.weight", "q_proj.weight", operations=[Transpose(0, 1)])
    original = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: [copy.deepcopy(turned)] if kind == "llama" else original(kind),
    )
    for model in (load_packing(plain), load(tmp_path / "packed")):
        layer = model.model.layers[0].self_attn.q_proj
        assert isinstance(layer, PackedLinear)
        assert torch.equal(layer.packed_weight().to_bf16(), before.T)
        model.save_pretrained(tmp_path / "saved")
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert torch.equal(saved["model.layers.0.self_attn.q_proj.weight"], before)
        assert saved["model.layers.0.self_attn.k_proj.weight"].dtype == torch.uint8
        assert_same_weights(load(tmp_path / "saved"), model)


def test_unpacked_blobs_get_the_dtype_that_the_model_keeps(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_directory(llama, tmp_path / "packed")
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"o_proj"})
    for model in (load(llama), load_packing(llama), load(tmp_path / "packed")):
        weight = model.model.layers[1].self_attn.o_proj.weight
        assert isinstance(weight, torch.nn.Parameter)
        assert weight.dtype == torch.float32
        reasons = getattr(model, "hf_quantizer", None) and model.hf_quantizer.reasons
        assert not reasons or "FP32" in reasons["model.layers.1.self_attn.o_proj.weight"]
        assert torch.equal(weight, load(llama).model.layers[1].self_attn.o_proj.weight)
