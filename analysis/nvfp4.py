"""Block-scaled 4-bit weights: which stored tensors belong together, and where their bits are.

`group_logical` names the part that every stored tensor plays; `inspect` turns the counts of nibbles and scale
bytes into entropies, window coverage and a verdict. What is odd is flagged and kept: packing is lossless
whatever the values mean.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wcodec.analysis.fields import entropy
from wcodec.analysis.grouping import BLOCKS, CODES, Logical, Stored, group, stem_and_role
from wcodec.formats.nvfp4_s5 import (
    BLOCK,
    BRICK_BYTES,
    PATCH_BYTES,
    TILE,
    WINDOW,
    Plan,
    best_window,
)
from wcodec.units import percent

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

#: Widths of scale windows that findings compare.
WINDOWS = (16, 32, 64)
_NAN = (0x7F, 0xFF)
_FP8 = {"F8_E4M3", "F8_E5M2"}
_SCALE_DTYPES = {dtype for _, dtypes in BLOCKS.values() for dtype in dtypes}
_GLOBAL_ROLES = {"weight_scale_2", "weight_global_scale"}


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

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all stored tensors in it."""
        scales = (self.scale,) if self.global_scale is None else (self.scale, self.global_scale)
        return (self.codes, *scales, *self.others)


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
    stored_bits_per_weight : float
        Nibbles and scale bytes as they are.
    bits_per_weight : float
        What `nvfp4-s5` would take; as stored where it is not smaller, and for other kinds.
    packed_bytes : int or None
        Bytes of that blob; None where it is not smaller, and where the shape is unknown.
    flags : tuple of str
        What is odd, in plain words.
    verdict : str
    """

    nibble_entropy: float
    scale_entropy: float
    floor_bits_per_weight: float
    windows: dict[int, float]
    stored_bits_per_weight: float
    bits_per_weight: float
    packed_bytes: int | None
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
    return [
        roles(found, [by_name[name] for name in found.parts])
        for found in group(tensors)
        if found.kind in BLOCKS
    ]


def orphans(tensors: Sequence[Stored], used: Container[str]) -> list[str]:
    """Names of block scales whose weight is missing: one-byte scales that scale nothing here.

    E8M0 scales beside FP8 weights are none: those blocks are larger, and no format of ours is about them.

    Parameters
    ----------
    tensors : sequence of Stored
        All tensors of one source.
    used : container of str
        Names of all parts of its block-scaled weights.
    """
    scaled = {_module(t.name) for t in tensors if t.dtype in _FP8 and not _is_scale(t.name)}
    return [
        t.name
        for t in tensors
        if t.dtype in _SCALE_DTYPES
        and t.name not in used
        and _is_scale(t.name)
        and _module(t.name) not in scaled
    ]


def unscaled(tensors: Sequence[Stored], used: Container[str]) -> list[str]:
    """Names of 4-bit codes whose block scales are missing or do not fit: they are left as plain bytes.

    Only what an exporter calls packed or blocks is taken for codes, and what has a global scale beside it.
    Parameters are those of `orphans`.
    """
    roles_of = {t.name: stem_and_role(t.name) for t in tensors}
    with_global = {stem for stem, role in roles_of.values() if role in _GLOBAL_ROLES}
    found = []
    for t in tensors:
        stem, role = roles_of[t.name]
        codes = role in ("weight_packed", "blocks") or (role == "weight" and stem in with_global)
        if codes and t.dtype in CODES and t.name not in used:
            found.append(t.name)
    return found


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_scale(name: str) -> bool:
    return "scale" in name.rpartition(".")[2]


def roles(found: Logical, parts: Sequence[Stored]) -> LogicalTensor:
    """Say which part of a block-scaled weight is what.

    Parameters
    ----------
    found : Logical
        Of kind ``nvfp4`` or ``mxfp4``.
    parts : sequence of Stored
        Its stored tensors: codes, block scales, then the others.
    """
    scalars = [t.name for t in parts[2:] if t.dtype == "F32" and "input" not in t.name.rsplit(".", 1)[-1]]
    flags = ["no global scale beside it"] if found.kind == "nvfp4" and not scalars else []
    return LogicalTensor(
        found.name,
        found.kind,
        found.shape,
        parts[0].name,
        parts[1].name,
        scalars[0] if scalars else None,
        tuple(t.name for t in parts[2:] if t.name not in scalars[:1]),
        tuple(flags),
    )


def inspect(
    kind: str,
    nibbles: I64,
    scales: I64,
    global_scales: F64 | None = None,
    shape: tuple[int, ...] | None = None,
) -> Findings:
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
    shape : tuple of int, optional
        Weights along each axis. With it, the size in `nvfp4-s5` is that of the blob, to the byte where
        everything was counted; without it, the footer and bricks over the edge are left out.
    """
    in_nibbles, in_scales = entropy(nibbles), entropy(scales)
    count = int(scales.sum())
    windows = {width: best_window(scales, width)[1] / count if count else math.nan for width in WINDOWS}
    share = _scales_per_weight(kind, shape)
    stored = 4 + 8 * share
    floor = in_nibbles + in_scales * share
    takes, nbytes = _in_s5(kind, shape, windows[WINDOW], stored)
    found = Findings(
        in_nibbles,
        in_scales,
        floor,
        windows,
        stored,
        takes,
        nbytes,
        (*_scale_flags(kind, scales), *_global_flags(global_scales)),
        "",
    )
    return replace(found, verdict=_verdict(kind, shape, found))


def assume(kind: str, shape: tuple[int, ...]) -> Findings:
    """What dtype and shape alone say of a block-scaled weight: sizes as if every scale fitted the window.

    Parameters
    ----------
    kind : str
        ``nvfp4`` or ``mxfp4``.
    shape : tuple of int
        Weights along each axis.
    """
    stored = 4 + 8 * _scales_per_weight(kind, shape)
    takes, nbytes = _in_s5(kind, shape, 0.0, stored)
    if takes < stored:
        verdict = f"if its scales fit a 5-bit window, {takes_in_words(takes, stored)}"
    else:
        verdict = f"leave it as it is, {stored:.2f} bits per weight: {_why_left(kind, shape, math.nan)}"
    windows = dict.fromkeys(WINDOWS, math.nan)
    return Findings(math.nan, math.nan, math.nan, windows, stored, takes, nbytes, (), verdict)


def s5_bytes(shape: tuple[int, ...], missed: float) -> int | None:
    """Bytes of an NVFP4 weight as a blob of `nvfp4-s5`; None where it is not smaller than what is stored.

    Parameters
    ----------
    shape : tuple of int
        Weights along each axis.
    missed : float
        Fraction of the scale bytes outside the best window.
    """
    weights = math.prod(shape)
    if shape[-1] % BLOCK:
        return None
    plan = Plan(0, round(missed * weights / BLOCK), shape)
    return plan.nbytes if plan.shrinks else None


def _scales_per_weight(kind: str, shape: tuple[int, ...] | None) -> float:
    """Scale bytes per weight: a little more than one per block where the last block of a row is short."""
    block = BLOCKS[kind][0]
    return -(-shape[-1] // block) / shape[-1] if shape else 1 / block


def _in_s5(
    kind: str, shape: tuple[int, ...] | None, missed: float, stored: float
) -> tuple[float, int | None]:
    """Bits per weight that `nvfp4-s5` takes, and its bytes where they are known; else as stored."""
    if kind != "nvfp4" or math.isnan(missed):
        return stored, None
    if shape is None:
        return min(stored, 8 * BRICK_BYTES[True] / TILE**2 + 8 * PATCH_BYTES * missed / BLOCK), None
    nbytes = s5_bytes(shape, missed)
    return (stored, None) if nbytes is None else (8 * nbytes / math.prod(shape), nbytes)


def takes_in_words(takes: float, stored: float) -> str:
    """What `nvfp4-s5` comes to; both in bits per weight."""
    return f"nvfp4-s5 takes {takes:.2f} bits per weight instead of {stored:.2f}"


def _verdict(kind: str, shape: tuple[int, ...] | None, found: Findings) -> str:
    if math.isnan(found.floor_bits_per_weight):
        return "no weights"
    takes, stored = found.bits_per_weight, found.stored_bits_per_weight
    missed, floor = found.windows[WINDOW], f"(floor {found.floor_bits_per_weight:.2f})"
    where = f"nibbles hold {found.nibble_entropy:.2f} of 4 bits, scale bytes {found.scale_entropy:.1f} of 8: "
    if takes < stored:
        return (
            f"{where}only the scales can shrink; {percent(missed)} of them miss a 5-bit window, "
            f"so {takes_in_words(takes, stored)} {floor}"
        )
    why = _why_left(kind, shape, missed)
    return f"{where}leave it as it is, {stored:.2f} bits per weight {floor}: {why}"


def _why_left(kind: str, shape: tuple[int, ...] | None, missed: float) -> str:
    if kind != "nvfp4":
        block = BLOCKS[kind][0]
        return f"no format for {kind.upper()} yet, one scale byte per {block} weights leaves little to gain"
    if shape is not None and shape[-1] % BLOCK:
        return "its rows end inside a block, which nvfp4-s5 cannot hold"
    if shape is not None and s5_bytes(shape, 0.0) is None:
        return "nvfp4-s5 would not be smaller, the weight is too small or too thin to fill 64 × 64 bricks"
    return f"nvfp4-s5 would not be smaller, {percent(missed)} of its scale bytes miss a 5-bit window"


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
