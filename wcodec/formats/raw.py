"""`raw`: the original bytes and a footer, for tensors that no format makes smaller."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import digest
from wcodec.errors import MalformedError
from wcodec.formats.base import Format, Shape
from wcodec.packed import Footer, PackedTensor, assemble, blob_bytes

_BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "BF16": 16}


def _nbytes(dtype: str, numel: int) -> int:
    width = _BITS.get(dtype) or int(dtype[1:])
    return -(-numel * width // 8)


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
        body = packed.blob[: _nbytes(packed.dtype, packed.numel)]
        bits = body.view("<u2").reshape(packed.shape) if packed.dtype == "BF16" else body
        if out is None:
            return bits.copy()
        if out.nbytes != body.nbytes or not out.flags.c_contiguous:
            raise ValueError(f"out must be C-contiguous with {body.nbytes} bytes")
        out.reshape(-1).view(np.uint8)[:] = body
        return out

    def validate(self, packed: PackedTensor) -> None:
        """See `Format.validate`."""
        want = blob_bytes(_nbytes(packed.dtype, packed.numel), len(packed.shape))
        if packed.nbytes != want:
            raise MalformedError(f"the blob has {packed.nbytes} bytes where its footer implies {want}")
