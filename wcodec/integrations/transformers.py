"""transformers 5: ``import wcodec.integrations.transformers`` and ``from_pretrained`` knows packed weights.

>>> from wcodec.integrations.transformers import WCodecConfig  # doctest: +SKIP
>>> packed = AutoModelForCausalLM.from_pretrained(  # doctest: +SKIP
...     directory, quantization_config=WCodecConfig()
... )
>>> packed.save_pretrained(packed_directory)  # doctest: +SKIP
>>> again = AutoModelForCausalLM.from_pretrained(packed_directory)  # doctest: +SKIP
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from wcodec import preparation
from wcodec.container.record import RECORD_NAME
from wcodec.container.tree import QUANT_METHOD
from wcodec.errors import UnsupportedError, WCodecError
from wcodec.formats.bf16_w12 import BRICK_BYTES, TILE
from wcodec.integrations.loading import Decode, Place
from wcodec.integrations.saving import packed_state_dict
from wcodec.integrations.swapping import packed_layers, report, unpack_
from wcodec.state import MAX_TOKENS
from wcodec.units import size
from wcodec.workspace import Workspaces

__all__ = ["WCodecConfig", "WCodecHfQuantizer", "report", "unpack_"]

_HOOKS = ("get_new_dtype", "param_element_size", "get_state_dict_and_metadata", "get_quantize_ops")
_MUCH_LEFT = 0.5  # share of the BF16 bytes that stays unpacked from which on the user is told

logger = logging.get_logger(__name__)

if not all(hasattr(HfQuantizer, hook) for hook in _HOOKS):
    raise UnsupportedError(
        f"transformers {transformers.__version__} lacks the hooks that packed weights need",
        mend="install transformers 5.24 or newer",
    )
for _mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
    _mapping.pop(QUANT_METHOD, None)  # the decorators refuse a name twice, and modules may be reloaded


@register_quantization_config(QUANT_METHOD)
class WCodecConfig(QuantizationConfigMixin):
    """How a model is packed.

    Parameters
    ----------
    modules_to_not_convert : list of str, optional
        Layers to leave in BF16, by name, suffix or pattern as in transformers' own configs.
    max_tokens : int
        Most tokens that one kernel call gets; see `wcodec.prepare`.

    Raises
    ------
    UnsupportedError
        For a setting that this version does not know, such as one from a newer ``config.json``.
    """

    def __init__(
        self, modules_to_not_convert: list[str] | None = None, max_tokens: int = MAX_TOKENS, **others: Any
    ) -> None:
        method = others.pop("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD or others:
            unknown = f"quant_method {method!r}" if method != QUANT_METHOD else ", ".join(sorted(others))
            raise UnsupportedError(f"WCodecConfig does not know {unknown}", mend="upgrade wcodec")
        if max_tokens < 1:
            raise WCodecError(f"max_tokens is {max_tokens}", mend="give a positive number")
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # an enum of the built-in methods
        self.modules_to_not_convert = modules_to_not_convert
        self.max_tokens = max_tokens


@register_quantizer(QUANT_METHOD)
class WCodecHfQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a model with packed weights.

    The skeleton on the meta device keeps its ``nn.Linear`` layers; each becomes a `PackedLinear` when its
    weight arrives, packed or plain. So there is never more than one unpacked layer.

    Attributes
    ----------
    targets : set of str
        Names of the weights to be held packed.
    reasons : dict of str to str
        Why a linear layer is left, by the name of its weight.
    """

    quantization_config: WCodecConfig

    def __init__(self, quantization_config: WCodecConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.targets: set[str] = set()
        self.reasons: dict[str, str] = {}
        self._workspaces: dict[torch.device, Workspaces | None] = {}

    def workspaces(self, device: torch.device) -> Workspaces | None:
        """Return the scratch that the model's packed layers on a device share."""
        if device not in self._workspaces:
            self._workspaces[device] = preparation.new_workspaces(device)
        return self._workspaces[device]

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse offloading: a packed layer lives where it is multiplied."""
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise UnsupportedError(
                "packed weights cannot be offloaded to the CPU or to disk",
                mend="use a device_map of GPUs only, or of the CPU only",
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Refuse to load as anything but BF16, which is what the packed layers multiply."""
        if dtype != torch.bfloat16:
            raise UnsupportedError(
                f"wcodec packs BF16 weights, and the model is to be loaded as {dtype}",
                mend="pass dtype=torch.bfloat16, which rounds the weights if they are not BF16 already",
            )
        return dtype

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether this weight is to be held packed."""
        return param_name in self.targets

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes per weight on the device, from which device maps and the allocator's warm-up are computed."""
        if param_name in self.targets:
            return BRICK_BYTES / TILE**2
        return float(param.element_size())

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.targets, self.reasons = self._choose(model)
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, re.escape(RECORD_NAME)}

    def _choose(self, model: Any) -> tuple[set[str], dict[str, str]]:
        """Sort the linear layers into those to pack and those to leave, by the names of their weights."""
        tied = {*model.all_tied_weights_keys.keys(), *model.all_tied_weights_keys.values()}
        # Searched for in names, as the loader does; the patterns that are not strict count for FP16 alone.
        in_fp32 = [each.replace("*", ".*") for each in model._keep_in_fp32_modules_strict or ()]
        skipped = self.quantization_config.modules_to_not_convert or []
        targets, reasons = set(), {}
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            key = f"{name}.weight"
            if type(module) is not torch.nn.Linear:
                reasons[key] = f"is a {type(module).__name__}"
            elif key in tied:
                reasons[key] = "is tied to an embedding"
            elif not should_convert_module(name, skipped):
                reasons[key] = "is in modules_to_not_convert"
            elif any(re.search(pattern, key) for pattern in in_fp32):
                reasons[key] = "the model keeps it in FP32"
            else:
                targets.add(key)
        return targets, reasons

    def get_quantize_ops(self) -> Place:
        """Return what packs a plain weight; only asked for where the checkpoint is not packed."""
        return Place(self)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Let our operation have every tensor of a packed checkpoint, and blobs keep their dtype."""
        # The loader has no hook per tensor for packed checkpoints but this one, and it hands the tensor's
        # own copy of its converter over.
        if hasattr(converter, "operations") and not isinstance(converter.operations[0], Decode):
            converter.operations = [Decode(), *converter.operations]
        converter.quantization_operation = Place(self, dtype)
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        preparation.get_ready(layer.packed_weight() for _, layer in packed_layers(model))
        rows = report(model)
        whole = sum(row.before_bytes for row in rows)
        left = sum(row.before_bytes for row in rows if row.reason is not None)
        packed = sum(row.after_bytes for row in rows if row.reason is None)
        tell = logger.warning if left > _MUCH_LEFT * whole else logger.info
        tell(
            f"wcodec: {sum(row.reason is None for row in rows)} of {len(rows)} weights are packed, "
            f"{size(whole - left)} in {size(packed)}; {size(left)} stay as they are: "
            "wcodec.integrations.transformers.report(model) says why"
        )

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        unpack_(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return what ``save_pretrained`` writes: blobs under the names of the weights that they hold."""
        return packed_state_dict(model), {}

    def is_serializable(self) -> bool:
        """Packed models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on packed layers can be trained: gradients pass through, the weights stay."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Generation with a static cache may be compiled."""
        return True
