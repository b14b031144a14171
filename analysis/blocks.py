"""What block-scaled weights come to together: one sentence for many tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from wcodec.analysis.findings import TensorReport
from wcodec.analysis.nvfp4 import Findings, takes_in_words


def blocks_reason(tensors: Sequence[TensorReport]) -> str:
    """What tensors of one block-scaled kind hold, and what a format of ours takes for all of them.

    Parameters
    ----------
    tensors : sequence of TensorReport
        Of the same kind, each with its findings; figures are averages over weights.
    """
    stored = _mean(tensors, lambda found: found.stored_bits_per_weight)
    takes = _mean(tensors, lambda found: found.bits_per_weight)
    nibbles, scales = _mean(tensors, lambda f: f.nibble_entropy), _mean(tensors, lambda f: f.scale_entropy)
    where = f"nibbles hold {nibbles:.2f} of 4 bits, scale bytes {scales:.1f} of 8: "
    if math.isnan(nibbles):
        where = ""
    elif any(t.sampled for t in tensors):
        where = f"from a sample: {where}"
    if takes < stored:
        assumed = "" if where else "if their scales fit a 5-bit window, "
        return f"{where}{assumed}{takes_in_words(takes, stored)}"
    if tensors[0].kind == "nvfp4":
        return f"{where}nvfp4-s5 would not be smaller than {stored:.2f} bits per weight"
    return f"{where}no format for {tensors[0].kind.upper()} yet, {stored:.2f} bits per weight"


def blocks_summary(tensors: Sequence[TensorReport]) -> str:
    """What `nvfp4-s5` takes for all NVFP4 weights of a report; empty where it would save nothing."""
    mine = [t for t in tensors if t.kind == "nvfp4" and t.blocks is not None]
    if not any(t.blocks is not None and t.blocks.packed_bytes for t in mine):
        return ""
    return f"NVFP4: {blocks_reason(mine)}"


def _mean(tensors: Sequence[TensorReport], figure: Callable[[Findings], float]) -> float:
    """A figure's average over the weights."""
    counted = [(t.blocks, t.numel) for t in tensors if t.blocks is not None]
    return sum(figure(found) * numel for found, numel in counted) / sum(numel for _, numel in counted)
