"""The state dict of a packed directory: every blob under the name of the tensor that it holds.

A loader that does not know wcodec meets a 1-D tensor where it expects a matrix and stops, instead of starting
a layer with noise because its name is missing.
"""

from __future__ import annotations

from typing import Any

import torch

from wcodec import preparation
from wcodec.integrations.swapping import may_shrink, packed_layers


def packed_state_dict(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a packed directory, as ``wcodec pack`` would write them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With packed layers.

    Notes
    -----
    Weights that the model's own conversions still have to split or permute on their way to the file are
    unpacked: they are loaded, and packed, one by one again.
    """
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    layers = dict(packed_layers(model))
    is_converted = _conversions(model)
    saved: dict[str, torch.Tensor] = {}
    blobs: dict[Any, torch.Tensor] = {}
    for key, tensor in state.items():
        owner, _, attribute = key.rpartition(".")
        if owner in layers and attribute == "packed":
            key = f"{owner}.weight"
            saved[key] = layers[owner].packed_weight().to_bf16() if is_converted(key) else tensor
        elif may_shrink(tensor) and not is_converted(key):
            identity = preparation.identity(tensor)  # tied weights stay one tensor
            if identity not in blobs:
                weight = preparation.prepare_one(tensor, tensor.device, name=key)
                blobs[identity] = tensor if weight.is_raw else weight.blob
            saved[key] = blobs[identity]
        else:
            saved[key] = tensor
    return saved


def _conversions(model: Any) -> Any:
    """Return a predicate: whether saving runs an operation on the tensor of this name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    backwards: Any = [each.reverse_transform() for each in conversions if isinstance(each, WeightConverter)]
    return lambda key: bool(backwards) and apply_converters(key, backwards)[1] is not None
