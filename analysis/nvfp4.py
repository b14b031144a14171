"""Block-scaled 4-bit weights: which stored tensors belong together, and where their bits are.

`group_logical` names the part that every stored tensor plays; `inspect` turns the counts of nibbles and scale
bytes into entropies, window coverage and a verdict. What is odd is flagged and kept: packing is lossless
whatever the values mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wcodec.analysis.fields import entropy
from wcodec.analysis.grouping import BLOCKS, Logical, Stored, group
from wcodec.formats.nvfp4_s5 import BRICK_BYTES, PATCH_BYTES, TILE, best_window
from wcodec.units import percent

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

WINDOWS = (16, 32, 64)
_NAN = (0x7F, 0xFF)


@dataclass(frozen=True)
class LogicalTensor:
    """A block-scaled weight with its parts.

    Attributes
    ----------
    name : str
        Name of the tensor that holds the nibbles.
    kind : str
        ``nvfp4`` (E4M3 per 16) or ``mxfp4`` (E8M0 per 32).
    shape : tuple of int
        Weights along each axis.
    codes, scale : str
        Names of the nibbles and of the block scales.
    global_scale : str or None
        Name of the FP32 scale of the whole tensor.
    others : tuple of str
        Further parts, such as the scale of the activations.
    flags : tuple of str
        What is odd, in plain words.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    codes: str
    scale: str
    global_scale: str | None
    others: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Findings:
    """What the bytes of a block-scaled weight hold.

    Attributes
    ----------
    nibble_entropy, scale_entropy : float
        Order-0, in bits per nibble and per scale byte.
    floor_bits_per_weight : float
        Both entropies per weight: what no order-0 code goes below.
    windows : dict of int to float
        Fraction of the scale bytes outside the best window of 16, 32 and 64 consecutive values.
    bits_per_weight : float
        What `nvfp4-s5` takes, footer and edge bricks aside; as stored for other kinds.
    flags : tuple of str
        What is odd, in plain words.
    verdict : str
    """

    nibble_entropy: float
    scale_entropy: float
    floor_bits_per_weight: float
    windows: dict[int, float]
    bits_per_weight: float
    flags: tuple[str, ...]
    verdict: str


def group_logical(tensors: Sequence[Stored]) -> list[LogicalTensor]:
    """Find the block-scaled weights among stored tensors: ModelOpt, compressed-tensors and gpt-oss layouts.

    Dtypes and the ratio of shapes decide; names only say which tensors are siblings. Tensors that are part
    of no block-scaled weight are left out (see `wcodec.analysis.grouping.group` for them).

    Parameters
    ----------
    tensors : sequence of Stored
        All tensors of one source.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    return [_roles(found, by_name) for found in group(tensors) if found.kind in BLOCKS]


def orphans(tensors: Sequence[Stored]) -> list[str]:
    """Names of block scales whose weight is missing: E4M3 or E8M0 tensors that scale nothing here."""
    used = {name for found in group(tensors) for name in (found.parts if len(found.parts) > 1 else ())}
    return [
        t.name
        for t in tensors
        if t.name not in used and t.dtype in ("F8_E4M3", "F8_E8M0") and "scale" in t.name.rsplit(".", 1)[-1]
    ]


def _roles(found: Logical, by_name: dict[str, Stored]) -> LogicalTensor:
    codes, scale, *sides = found.parts
    scalars = [
        name for name in sides if by_name[name].dtype == "F32" and "input" not in name.rsplit(".", 1)[-1]
    ]
    flags = ["no global scale beside it"] if found.kind == "nvfp4" and not scalars else []
    return LogicalTensor(
        found.name,
        found.kind,
        found.shape,
        codes,
        scale,
        scalars[0] if scalars else None,
        tuple(name for name in sides if name not in scalars[:1]),
        tuple(flags),
    )


def inspect(kind: str, nibbles: I64, scales: I64, global_scales: F64 | None = None) -> Findings:
    """Judge a block-scaled weight by its counts.

    Parameters
    ----------
    kind : str
        ``nvfp4`` or ``mxfp4``.
    nibbles : numpy.ndarray of int64, shape (16,)
        Counts of the 4-bit codes.
    scales : numpy.ndarray of int64, shape (256,)
        Counts of the scale bytes.
    global_scales : numpy.ndarray of float64, optional
        Values of the scale of the whole tensor.
    """
    block = BLOCKS[kind][0]
    in_nibbles, in_scales = entropy(nibbles), entropy(scales)
    count = int(scales.sum())
    missed = {width: best_window(scales, width)[1] for width in WINDOWS}
    stored = 4 + 8 / block
    takes = stored
    if kind == "nvfp4" and count:
        bricks = 8 * BRICK_BYTES[True] / TILE**2 + 8 * PATCH_BYTES * missed[32] / (block * count)
        takes = min(stored, bricks)
    floor = in_nibbles + in_scales / block
    flags = (*_scale_flags(kind, scales), *_global_flags(global_scales))
    return Findings(
        in_nibbles,
        in_scales,
        floor,
        {width: out / count if count else math.nan for width, out in missed.items()},
        takes,
        flags,
        _verdict(
            kind, in_nibbles, in_scales, floor, stored, takes, missed[32] / count if count else math.nan
        ),
    )


def _verdict(
    kind: str, nibbles: float, scales: float, floor: float, stored: float, takes: float, missed: float
) -> str:
    if math.isnan(floor):
        return "no weights"
    where = f"nibbles hold {nibbles:.2f} of 4 bits, scale bytes {scales:.1f} of 8: "
    if takes < stored:
        return (
            f"{where}only the scales can shrink; {percent(missed)} of them miss a 5-bit window, "
            f"so nvfp4-s5 takes {takes:.2f} bits per weight instead of {stored:.2f} (floor {floor:.2f})"
        )
    why = "they fill no 5-bit window" if kind == "nvfp4" else f"there is one per {BLOCKS[kind][0]} weights"
    return f"{where}leave it as it is, {stored:.2f} bits per weight (floor {floor:.2f}); {why}"


def _scale_flags(kind: str, scales: I64) -> list[str]:
    if kind != "nvfp4":  # E8M0 has no sign
        return [f"{scales[0xFF]} NaN scales"] if scales[0xFF] else []
    nan = int(scales[list(_NAN)].sum())
    negative = int(scales[0x80:].sum()) - int(scales[0xFF])
    flags = [f"{nan} NaN scales"] if nan else []
    return flags + ([f"{negative} negative scales"] if negative else [])


def _global_flags(values: F64 | None) -> list[str]:
    if values is None:
        return []
    kinds = {
        "zero": values == 0,
        "infinite": np.isinf(values),
        "NaN": np.isnan(values),
        "negative": values < 0,
    }
    return [f"{int(found.sum())} {name} global scales" for name, found in kinds.items() if found.any()]
