"""What transformers' weight loader runs on each tensor: pack, unpack, or put a blob into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.core_model_loading import ConversionOps
from transformers.utils import logging

from wcodec import preparation
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.formats.bf16_w12 import Bf16W12
from wcodec.formats.nvfp4_s5 import Nvfp4S5
from wcodec.formats.raw import Raw
from wcodec.integrations.swapping import may_shrink, put_packed
from wcodec.packed import TAIL_BYTES, Footer, PackedTensor
from wcodec.state import PackedWeight, aligned, wrap_blob

if TYPE_CHECKING:
    from wcodec.integrations.transformers import WCodecHfQuantizer

logger = logging.get_logger(__name__)


class Decode(ConversionOps):
    """Unpack the blobs among a converter's inputs, so that it merges or permutes the original weights."""

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inputs with every blob replaced by its tensor."""
        return {
            name: [_plain(each, name) for each in value] if isinstance(value, list) else _plain(value, name)
            for name, value in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving packs in its own step: this one has nothing to undo."""
        return _Nothing()


class _Nothing(ConversionOps):
    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Place(ConversionOps):
    """Put one weight into the model: packed where it is a target, unpacked where it is not.

    Parameters
    ----------
    quantizer : WCodecHfQuantizer
        Knows the targets.
    dtype : torch.dtype, optional
        What an unpacked blob is cast to; its own dtype where None.
    """

    def __init__(self, quantizer: WCodecHfQuantizer, dtype: torch.dtype | None = None) -> None:
        self._quantizer = quantizer
        self._dtype = dtype

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the tensors that the loader has to set; packed layers are in the model already."""
        model, missing_keys = kwargs["model"], kwargs["missing_keys"]
        rest = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            # The loader turns an error into a table's cell, goes on, and in the end raises one that names
            # neither the weight nor the reason. So a line of ours does.
            try:
                left = self._place(model, name, tensor)
            except WCodecError as error:
                logger.error(f"wcodec: {error}")
                raise error.with_traceback(None) from None  # a line for people; the frames say nothing more
            except Exception as error:
                logger.error(f"wcodec: tensor {name!r}: {type(error).__name__}: {error}")
                raise
            if left is not None:
                rest[name] = left
                self._quantizer.targets.discard(name)  # so that the loader compares its shape
            elif missing_keys is not None:
                missing_keys.discard(name)
        return rest

    def _place(self, model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        expected = _expected(model, name)
        is_target = name in self._quantizer.targets
        weight: PackedWeight | None = None
        if _is_blob(tensor) and expected.dtype != torch.uint8:
            if not self._quantizer.pre_quantized:
                raise UnsupportedError(
                    "is packed, but config.json has no quantization_config that says so",
                    tensor=name,
                    mend="make the directory with `wcodec pack` or save_pretrained",
                )
            opened = _open(tensor, name, **self._settings(tensor.device))
            if opened.shape != expected.shape:
                # The loader compares shapes and reports what does not fit, as for any checkpoint.
                return torch.empty(opened.shape, dtype=opened.dtype, device="meta")
            if isinstance(opened, torch.Tensor):
                tensor = opened
            elif is_target and not opened.is_raw:
                weight = opened
            else:
                tensor = opened.to_bf16()
            tensor = tensor if weight is not None else tensor.to(self._dtype or tensor.dtype)
        if weight is None and is_target and tensor.shape == expected.shape and may_shrink(tensor):
            settings = self._settings(tensor.device)
            made = preparation.prepare_one(tensor, tensor.device, name=name, **settings)
            weight = None if made.is_raw else made
        if weight is None:
            return tensor
        _refuse_shard(expected, name)
        put_packed(model, name, weight)
        return None

    def _settings(self, device: torch.device) -> dict[str, Any]:
        return {
            "max_tokens": self._quantizer.quantization_config.max_tokens,
            "workspaces": self._quantizer.workspaces(device),
        }


def _is_blob(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() == 1


def _open(blob: torch.Tensor, name: str, **settings: Any) -> PackedWeight | torch.Tensor:
    """Return the weight of a blob, or its tensor where no kernel reads its format (the storage profile)."""
    blob = aligned(blob)
    if _format_code(blob) in (Raw.code, Bf16W12.code):
        return wrap_blob(blob, tensor=name, **settings)
    packed = PackedTensor.from_blob(blob.cpu().numpy(), tensor=name)
    if packed.format == Nvfp4S5.id:
        raise UnsupportedError(
            "holds NVFP4 weights, which transformers loads from the original only",
            tensor=name,
            mend="`wcodec unpack` gives the original",
        )
    bits = packed.decode()
    if packed.dtype != "BF16" or not packed.check(bits):
        raise MalformedError("does not decode to what was packed", tensor=name, mend="copy the file again")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(blob.device)


def _format_code(blob: torch.Tensor) -> int:
    try:
        return Footer.parse(blob[-TAIL_BYTES:].cpu().numpy()).format_code
    except MalformedError:
        return Raw.code  # whoever opens it says what is wrong


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not _is_blob(tensor):
        return tensor
    opened = _open(tensor, name)
    return opened if isinstance(opened, torch.Tensor) else opened.to_bf16()


def _expected(model: Any, name: str) -> torch.Tensor:
    module, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(module), attribute)
    return found


def _refuse_shard(expected: torch.Tensor, name: str) -> None:
    if hasattr(expected, "device_mesh"):
        raise UnsupportedError(
            "transformers' tensor parallelism cannot hold packed weights",
            tensor=name,
            mend="load without tp_plan, or leave the layer out with modules_to_not_convert",
        )
