"""Packed layers inside somebody else's model: put them in, take them out, say which they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from wcodec.formats.bf16_w12 import Bf16W12, Plan
from wcodec.nn import PackedLinear, Swapped, replace_layer
from wcodec.state import PackedWeight


def may_shrink(tensor: torch.Tensor) -> bool:
    """Whether bricks alone, without overflow, are smaller than a BF16 tensor."""
    if tensor.dtype != torch.bfloat16 or not tensor.numel():
        return False
    return Bf16W12().blob_bytes(Plan(tuple(range(8)), 0, tuple(tensor.shape)), 0) < tensor.nbytes


def put_packed(model: torch.nn.Module, name: str, weight: PackedWeight) -> None:
    """Replace the linear layer that owns the weight `name`; its bias may still be on the meta device."""
    old = model.get_submodule(name.removesuffix(".weight"))
    new = PackedLinear.from_packed(weight)
    new.register_parameter("bias", old._parameters["bias"])
    new.train(old.training)
    new._is_hf_initialized = True  # type: ignore[assignment]  # nothing is left to initialise
    replace_layer(model, old, new)


def packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield the packed layers of a model by name."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name, module


def unpack_(model: torch.nn.Module) -> int:
    """Replace every packed layer by an ``nn.Linear`` with the original weight, in place.

    Parameters
    ----------
    model : torch.nn.Module
        Any model, with adapters on it or not.

    Returns
    -------
    int
        How many layers were replaced.
    """
    names = [name for name, _ in packed_layers(model)]
    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, PackedLinear)
        replace_layer(model, old, old.unpack())
    return len(names)


def report(model: torch.nn.Module) -> list[Swapped]:
    """Say which weights of a model are packed and why the others are not.

    Parameters
    ----------
    model : torch.nn.Module
        A loaded model.

    Returns
    -------
    list of Swapped
        One per packed layer and per BF16 parameter of two or more dimensions, in the order of the model.
    """
    reasons: dict[str, str] = getattr(getattr(model, "hf_quantizer", None), "reasons", {})
    rows = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            weight = module.packed_weight()
            before = 2 * weight.n * weight.k
            rows.append(Swapped(name, (weight.n, weight.k), before, weight.nbytes))
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != torch.bfloat16 or parameter.dim() < 2 or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            key = f"{name}.{attribute}" if name else attribute
            reason = reasons.get(key) or _reason(module, parameter)
            nbytes, shape = parameter.nbytes, tuple(parameter.shape)
            rows.append(Swapped(key.removesuffix(".weight"), shape, nbytes, nbytes, reason))  # type: ignore[arg-type]
    return rows


def _reason(module: torch.nn.Module, parameter: torch.Tensor) -> str:
    if type(module) is torch.nn.Linear:
        return "no format makes it smaller"
    if isinstance(module, torch.nn.Embedding):
        return "is an embedding: rows are looked up, not multiplied"
    return f"is a parameter of {type(module).__name__}, which multiplies it by itself"
