"""What a packed weight shows to code that asks a layer for its ``weight``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wcodec.errors import UnsupportedError

if TYPE_CHECKING:
    from wcodec.nn import PackedLinear

UNPACK = "call unpack() on the module for an nn.Linear that can be changed"


class WeightInfo:
    """What a packed weight shows of itself: shape, dtype and device, but no values to compute with."""

    requires_grad = False
    _is_hf_initialized = True  # transformers asks every weight before it fills it with random values

    def __init__(self, module: PackedLinear) -> None:
        self._module = module

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return torch.Size((self._module.out_features, self._module.in_features))

    @property
    def dtype(self) -> torch.dtype:
        """The original's dtype, which `to_bf16` returns."""
        return self._module.weight_dtype

    @property
    def device(self) -> torch.device:
        """Where the packed bytes lie."""
        return self._module.packed.device

    @property
    def ndim(self) -> int:
        """Always 2."""
        return 2

    @property
    def data(self) -> Any:
        """Refused: a packed weight has no tensor to change in place."""
        raise UnsupportedError("a packed weight cannot be read or merged in place", mend=UNPACK)

    def dim(self) -> int:
        """Return 2."""
        return 2

    def size(self, axis: int | None = None) -> torch.Size | int:
        """Return the shape, or one axis of it."""
        return self.shape if axis is None else self.shape[axis]

    def numel(self) -> int:
        """Return the number of weights."""
        return self.shape.numel()

    def to_bf16(self) -> torch.Tensor:
        """Return the original weight, bit for bit."""
        return self._module.packed_weight().to_bf16()

    def __repr__(self) -> str:
        return f"WeightInfo(shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(f"{getattr(func, '__name__', func)} needs the unpacked weight", mend=UNPACK)
