"""Which stored tensors are one logical tensor: block-scaled 4-bit weights and their scales.

Names differ between exporters and lie, so a group needs a code tensor and a scale tensor whose dtypes and
shapes fit; names only say which tensors are siblings. One-byte tensors that fit nothing stay bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wcodec.dtypes import DTYPES


class Stored(Protocol):
    """What grouping needs to know of a stored tensor; `wcodec.readers.TensorInfo` is one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Logical:
    """A tensor as a model uses it.

    Attributes
    ----------
    name : str
        Name of the tensor that holds the weights.
    kind : str
        ``bf16``, ``fp16``, ``fp32``, ``fp64``, ``fp8``, ``e8m0``, ``nvfp4``, ``mxfp4``, ``fp4``, ``int``,
        ``bool`` or ``bytes``.
    dtype : str
        Stored dtype of the tensor that holds the weights.
    shape : tuple of int
        Weights along each axis, packed nibbles unfolded.
    parts : tuple of str
        Names of all stored tensors in it; the codes first, then the block scales.
    nbytes : int
        Bytes of all parts.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


#: Weights that share a scale, and the dtypes a scale may be stored in, by kind.
BLOCKS = {"nvfp4": (16, {"F8_E4M3"}), "mxfp4": (32, {"F8_E8M0", "U8"})}
#: Dtypes that 4-bit codes may be stored in.
CODES = {"U8", "I8", "F4"}
_ROLE = re.compile(
    r"(?P<stem>.*?)[._](?P<role>weight_packed|weight_scale_2|weight_global_scale|weight_scale|input_scale|input_global_scale"
    r"|blocks|scales|scale|weight)"
)
_SCALE_ROLES = ("weight_scale", "scales", "scale")
_SIDE_ROLES = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
_KINDS = {
    "BF16": "bf16",
    "F16": "fp16",
    "F32": "fp32",
    "F64": "fp64",
    "F8_E4M3": "fp8",
    "F8_E5M2": "fp8",
    "F8_E8M0": "e8m0",
    "F4": "fp4",
    "BOOL": "bool",
}


def kind_of(dtype: str) -> str:
    """Kind of a tensor that stands alone."""
    known = DTYPES.get(dtype)
    if dtype in _KINDS:
        return _KINDS[dtype]
    # One unsigned byte is how exporters store anything at all.
    return "int" if known is not None and known.kind in ("int", "uint") and dtype != "U8" else "bytes"


def stem_and_role(name: str) -> tuple[str, str]:
    """What siblings' names share, and what the name says its tensor is: ``("q", "weight_scale")``."""
    match = _ROLE.fullmatch(name)
    return (match["stem"], match["role"]) if match else (name, "weight")


def group(tensors: Sequence[Stored]) -> list[Logical]:
    """Fold stored tensors into logical ones, in the order of their first part.

    Parameters
    ----------
    tensors : sequence of Stored
        All tensors of one source.
    """
    families: dict[str, dict[str, Stored]] = {}
    for tensor in tensors:
        stem, role = stem_and_role(tensor.name)
        families.setdefault(stem, {}).setdefault(role, tensor)
    leaders: dict[str, Logical] = {}
    followers: set[str] = set()
    for family in families.values():
        found = _block_scaled(family)
        if found is not None:
            leaders[found.name] = found
            followers.update(found.parts[1:])
    return [
        leaders.get(t.name) or Logical(t.name, kind_of(t.dtype), t.dtype, t.shape, (t.name,), t.nbytes)
        for t in tensors
        if t.name not in followers
    ]


def _block_scaled(family: dict[str, Stored]) -> Logical | None:
    codes = next((family[role] for role in ("weight_packed", "blocks", "weight") if role in family), None)
    if codes is None or codes.dtype not in CODES:
        return None
    for scale in (family[role] for role in _SCALE_ROLES if role in family):
        for kind, (block, dtypes) in BLOCKS.items():
            shape = _unfold(codes, scale.shape, block)
            if scale.dtype in dtypes and shape is not None:
                sides = [family[role] for role in _SIDE_ROLES if role in family]
                parts = [codes, scale, *sides]
                names = tuple(part.name for part in parts)
                return Logical(
                    codes.name, kind, codes.dtype, shape, names, sum(part.nbytes for part in parts)
                )
    return None


def _unfold(codes: Stored, scale: tuple[int, ...], block: int) -> tuple[int, ...] | None:
    """Logical shape of 4-bit codes with one scale per `block` weights; None if the shapes do not fit."""
    per_element = 1 if codes.dtype == "F4" else 2
    if len(codes.shape) == len(scale) + 1 and codes.shape[:-1] == scale:
        # Blocks are an axis of their own.
        return (*scale[:-1], scale[-1] * block) if scale and codes.shape[-1] * per_element == block else None
    if len(codes.shape) != len(scale) or not scale or codes.shape[:-1] != scale[:-1]:
        return None
    weights = codes.shape[-1] * per_element
    # The last block of a row may be short.
    return (*codes.shape[:-1], weights) if -(-weights // block) == scale[-1] else None
