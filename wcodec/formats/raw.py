"""`raw`: the original bytes and a footer, for tensors that no format makes smaller."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import digest
from wcodec.errors import MalformedError
from wcodec.formats.base import Format, Shape, check_tail, original_bytes, output
from wcodec.packed import Footer, PackedTensor, assemble


class Raw(Format):
    """The original bytes as they are: the choice when nothing pays."""

    id = "raw"
    code = 0
    version = 1

    def plan(self, histogram: npt.NDArray[np.int64], shape: Shape) -> Shape:
        """Nothing to choose: the plan is the shape."""
        return tuple(shape)

    def encode(self, bits: npt.NDArray[Any], plan: Shape, *, dtype: str = "BF16") -> PackedTensor:
        """Wrap the bytes of `bits`; `dtype` is the original's safetensors name."""
        footer = Footer(
            self.code, self.version, dtype, plan, max(len(plan) - 1, 0), bytes(8), 0, digest(bits)
        )
        return PackedTensor(assemble([bits.reshape(-1).view(np.uint8)], footer), footer)

    def decode(
        self, packed: PackedTensor, out: npt.NDArray[Any] | None = None, *, workers: int = 1
    ) -> npt.NDArray[Any]:
        """See `Format.decode`; a copy does not gain from threads."""
        body = packed.blob[: original_bytes(packed.dtype, packed.numel)]
        out = output(out, packed.shape, 2) if packed.dtype == "BF16" else output(out, body.shape, 1)
        out.reshape(-1).view(np.uint8)[:] = body
        return out

    def validate(self, packed: PackedTensor) -> None:
        """See `Format.validate`."""
        if packed.overflow_count or packed.table.any():
            raise MalformedError("the footer is not one of raw")
        check_tail(packed, original_bytes(packed.dtype, packed.numel))
