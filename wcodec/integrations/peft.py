"""PEFT: LoRA adapters on packed layers.

>>> config = wcodec.integrations.peft.on_packed(LoraConfig(target_modules=["q_proj"]))  # doctest: +SKIP
>>> model = get_peft_model(model, config)                                               # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from typing import Any

from peft import LoraConfig
from peft.tuners import lora

from wcodec.errors import UnsupportedError
from wcodec.integrations.swapping import unpack_
from wcodec.nn import PackedLinear

__all__ = ["PackedLora", "on_packed", "unpack_"]


class PackedLora(lora.Linear):
    """A LoRA adapter whose base layer is a `PackedLinear`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():  # of any class that PEFT has no case for
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(*args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse while the base is packed: merging makes other weights, which have to be packed anew."""
        if isinstance(self.get_base_layer(), PackedLinear):
            raise UnsupportedError(
                "an adapter cannot be merged into packed weights",
                mend="call wcodec.integrations.peft.unpack_(model) first, and pack the merged model again",
            )
        super().merge(safe_merge, adapter_names)


def on_packed(config: LoraConfig) -> LoraConfig:
    """Teach a LoRA configuration about packed layers, and return it.

    Parameters
    ----------
    config : peft.LoraConfig
        With its target modules named; changed in place.

    Raises
    ------
    UnsupportedError
        For ``"all-linear"``, which PEFT takes for ``nn.Linear`` alone, and for variants that read the weight.
    """
    if config.target_modules == "all-linear":
        raise UnsupportedError(
            "'all-linear' passes packed layers by", mend="name them: target_modules=['q_proj', 'v_proj', ...]"
        )
    if config.use_dora or config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        raise UnsupportedError(
            "this kind of LoRA computes with the weights themselves",
            mend="call wcodec.integrations.peft.unpack_(model) first",
        )
    mapping: dict[Any, Any] = {PackedLinear: PackedLora}
    config._register_custom_module(mapping)
    return config
