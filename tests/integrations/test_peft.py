"""PEFT: adapters on packed layers train and run; merging says how to unpack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("peft")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.integrations.tiny import PROMPT, assert_same_weights, write_model
from wcodec.errors import UnsupportedError
from wcodec.integrations.peft import on_packed, unpack_
from wcodec.integrations.transformers import WCodecConfig
from wcodec.nn import PackedLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "bf16")


@pytest.fixture
def packed(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=WCodecConfig())


def lora(**changes: Any) -> LoraConfig:
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**settings, **changes})


def trained(packed: Any) -> Any:
    """Return the model with an adapter after one step, which makes it differ from zero."""
    torch.manual_seed(5)
    model = get_peft_model(packed, on_packed(lora(init_lora_weights=False)))
    model(PROMPT, labels=PROMPT).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found
    assert all("lora_" in name and bool(grad.abs().sum() > 0) for name, grad in found.items())
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    return model.eval()


def test_an_adapter_trains_and_its_base_stays_packed(packed: Any, folder: Path) -> None:
    before = packed(PROMPT).logits.detach()
    model = trained(packed)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, PackedLinear)
    assert not torch.equal(model(PROMPT).logits, before)
    with model.disable_adapter():
        assert torch.equal(model(PROMPT).logits, before)


def test_a_saved_adapter_loads_on_a_packed_model(packed: Any, folder: Path, tmp_path: Path) -> None:
    model = trained(packed)
    expected = model(PROMPT).logits
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 100_000
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=WCodecConfig())
    config = on_packed(LoraConfig.from_pretrained(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(base, tmp_path / "adapter", config=config)
    assert torch.equal(again(PROMPT).logits, expected)


def test_merging_says_how_to_unpack_and_then_works(packed: Any, folder: Path) -> None:
    model = trained(packed)
    with pytest.raises(UnsupportedError, match=r"unpack_\(model\)"):
        model.merge_adapter()
    with pytest.raises(UnsupportedError, match=r"unpack_\(model\)"):
        model.merge_and_unload()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    delta = layer.get_delta_weight("default")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    unpack_(model)
    merged = model.merge_and_unload()
    original = plain.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(merged.model.layers[0].self_attn.q_proj.weight, (original + delta).bfloat16())
    for module in (merged, plain):
        for each in module.model.layers:
            each.self_attn.q_proj = each.self_attn.v_proj = torch.nn.Identity()
    assert_same_weights(merged, plain)  # what no adapter touched


def test_a_layer_that_works_warns_of_nothing(packed: Any, recwarn: pytest.WarningsRecorder) -> None:
    get_peft_model(packed, on_packed(lora()))
    assert not [each for each in recwarn if "Unsupported layer" in str(each.message)]


def test_without_our_mapping_peft_names_the_layer(packed: Any) -> None:
    with pytest.raises(ValueError, match="PackedLinear"):
        get_peft_model(packed, lora())


@pytest.mark.parametrize(
    ("changes", "mend"),
    [
        ({"target_modules": "all-linear"}, "name them"),
        ({"use_dora": True}, "unpack_"),
        ({"init_lora_weights": "pissa"}, "unpack_"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], mend: str) -> None:
    with pytest.raises(UnsupportedError, match=mend):
        on_packed(lora(**changes))
