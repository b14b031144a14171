"""NVFP4 weights and their block scales, which become one blob of `nvfp4-s5`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wcodec.bits import byte_histogram
from wcodec.container.targets import I64, U8, U32, Encoder, Target
from wcodec.formats.nvfp4_s5 import BLOCK, TILE, Nvfp4S5, Plan, StreamEncoder
from wcodec.readers.safetensors import Entry

_WEIGHT_DTYPES = {"U8", "I8", "F4"}
_SCALE_DTYPE = "F8_E4M3"
_NAN = (0x7F, 0xFF)
_ODD = ("a zero", "an infinite", "a NaN as", "a negative")  # global scales, in the order of their counts
_NO_WEIGHT = "no weight that fits these block scales in this file"


def pair_shape(weight: Entry, scale: Entry) -> tuple[int, ...] | None:
    """Logical shape of a weight with its block scales; None where the two do not fit each other.

    Blocks may be an axis of their own, as in a weight of shape (…, K / 16, 8).
    """
    if weight.dtype not in _WEIGHT_DTYPES or scale.dtype != _SCALE_DTYPE or not scale.shape:
        return None
    shape = (*scale.shape[:-1], scale.shape[-1] * BLOCK)
    above = weight.shape[:-1]
    if above not in (scale.shape[:-1], scale.shape) or 2 * weight.nbytes != math.prod(shape):
        return None
    return shape


def find_scales(entries: Sequence[Entry]) -> tuple[list[Entry], dict[str, list[str]]]:
    """Block scales of NVFP4 and MXFP4 weights; and, as `find_pairs`, what looks like such and stays."""
    from wcodec.analysis.nvfp4 import group_logical, orphans

    by_name = {entry.name: entry for entry in entries}
    weights = group_logical(entries)
    left = orphans(entries, {name for found in weights for name in found.parts})
    return [by_name[found.scale] for found in weights], {_NO_WEIGHT: left} if left else {}


def find_pairs(entries: Sequence[Entry]) -> tuple[list[Target], dict[str, list[str]]]:
    """NVFP4 weights whose siblings are all in the file and that may shrink.

    Returns
    -------
    pairs : list of Target
    left : dict of str to list of str
        Names of block-scaled weights, and of what looks like a part of one, by why they stay as they are.
    """
    from wcodec.analysis.nvfp4 import group_logical, orphans, unscaled

    by_name = {entry.name: entry for entry in entries}
    pairs: list[Target] = []
    left: dict[str, list[str]] = {}
    weights = group_logical(entries)
    for found in weights:
        weight, scale = by_name[found.codes], by_name[found.scale]
        shape = pair_shape(weight, scale)
        if found.kind != "nvfp4":
            reason = f"the run profile has no format for {found.kind.upper()}"
        elif shape is None:
            reason = f"rows end inside a block of {BLOCK}"
        elif found.global_scale is None:
            reason = "no global scale beside it in this file"
        else:
            if Plan(0, 0, shape).shrinks:
                pairs.append(_Pair(weight, scale, by_name[found.global_scale], shape))
            continue
        left.setdefault(reason, []).append(weight.name)
    used = {name for found in weights for name in found.parts}
    for reason, names in (
        ("no block scales that fit in this file", unscaled(entries, used)),
        (_NO_WEIGHT, orphans(entries, used)),
    ):
        if names:
            left[reason] = names
    return pairs, left


class _Pair:
    """A weight and its block scales; its unit is one row tile of both."""

    def __init__(self, weight: Entry, scale: Entry, global_scale: Entry, shape: tuple[int, ...]) -> None:
        columns = shape[-1]
        self.parts = (weight, scale)
        self.units = (TILE * columns // 2, TILE * columns // BLOCK)
        self.others = (global_scale,)
        self._shape = shape

    def count(self, entry: Entry, data: U8) -> I64 | None:
        """Counts of the scale bytes, and of odd values of the global scale."""
        weight, scale = self.parts
        if entry.name == weight.name:
            return None
        if entry.name == scale.name:
            return byte_histogram(data)
        values = data.view("<f4")
        with np.errstate(invalid="ignore"):  # signalling NaNs are NaNs
            odd = (values == 0, np.isinf(values), np.isnan(values), values < 0)
        return np.array([found.sum() for found in odd], dtype=np.int64)

    def encoder(self, counts: Mapping[str, Any]) -> Encoder | str:
        """See `Target.encoder`: what no exporter means to write is hardly NVFP4."""
        scales = counts[self.parts[1].name]
        for word, count in zip(_ODD, counts[self.others[0].name], strict=True):
            if count:
                return f"{word} global scale"
        if scales[list(_NAN)].any():
            return "NaN among the block scales"
        if scales[0x80:].any():
            return "negative block scales"
        plan = Nvfp4S5().plan(scales, self._shape)
        return _PairEncoder(plan) if plan.shrinks else "block scales too far apart to get smaller"


class _PairEncoder(Encoder):
    def __init__(self, plan: Plan) -> None:
        self._stream = StreamEncoder(plan)
        self._columns = plan.matrix[1]

    def encode(self, data: Sequence[U8]) -> tuple[U8, U32]:
        weight, scale = data
        return self._stream.encode(
            weight.reshape(-1, self._columns // 2), scale.reshape(-1, self._columns // BLOCK)
        )

    def append(self, body: U8, extra: U32) -> None:
        self._stream.append(body, extra)

    def finish(self, digest: bytes) -> bytes:
        return self._stream.finish(digest)
