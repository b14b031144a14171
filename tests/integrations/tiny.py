"""Tiny random models, and the same arithmetic as the packed layers' on uncompressed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from wcodec.integrations.transformers import WCodecConfig
from wcodec.nn import PackedLinear

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROMPT = torch.tensor([[7, 3, 250, 11, 42], [1, 1, 2, 3, 5]])


def write_model(folder: Path, kind: str = "Llama", shard: str = "1GB", **changes: Any) -> Path:
    """Save a random BF16 causal language model and return its directory."""
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


class Fp32Linear(torch.nn.Module):
    """A linear layer on plain BF16 weights that sums in FP32, as packed layers do on the host."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.plain = plain

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight: some models ask for its dtype."""
        return self.plain.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = x.reshape(-1, x.shape[-1]).float() @ self.plain.weight.float().t()
        if self.plain.bias is not None:
            sums = sums + self.plain.bias.float()
        return sums.to(x.dtype).view(*x.shape[:-1], -1)


def sum_in_fp32(model: torch.nn.Module) -> torch.nn.Module:
    """Let every linear layer of an uncompressed model sum in FP32."""
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    for name in linears:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Fp32Linear(model.get_submodule(name)))
    return model


def load(folder: Path, **settings: Any) -> Any:
    """Load a causal language model."""
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def load_packing(folder: Path, **settings: Any) -> Any:
    """Load and pack a model; `settings` are those of `WCodecConfig`."""
    return load(folder, quantization_config=WCodecConfig(**settings))


def packed_names(model: torch.nn.Module) -> set[str]:
    """Names of the packed layers."""
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of a model by name, packed ones unpacked, as bits."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found[f"{name}.weight"] = module.packed_weight().to_bf16()
    return {name: each.contiguous().view(torch.int16) for name, each in sorted(found.items())}


def assert_same_weights(left: torch.nn.Module, right: torch.nn.Module) -> None:
    """Compare two models bit by bit."""
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
