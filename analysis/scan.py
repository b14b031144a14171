"""What one worker does: read tensors, count their bits, and work out what packing them would take.

Tasks and results are small and can be pickled, so any `concurrent.futures.Executor` runs them: results are
counts, never bytes of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wcodec.analysis.coverage import high_exponent_counts
from wcodec.analysis.fields import (
    LAYOUTS,
    NO_ENTROPY,
    Entropy,
    Layout,
    count_fields,
    fold,
    nibble_histogram,
)
from wcodec.analysis.findings import Exceptions, Window
from wcodec.analysis.grouping import BLOCKS, Logical
from wcodec.bits import byte_histogram
from wcodec.readers.base import CHUNK, TensorInfo
from wcodec.readers.bytefile import Bytes
from wcodec.units import percent

if TYPE_CHECKING:
    from wcodec.analysis.nvfp4 import Findings

I64 = npt.NDArray[np.int64]

THIN = "too small or too thin to fill 64 × 64 bricks"
#: What people call the kinds.
NAMES = {
    "fp16": "FP16",
    "fp32": "FP32",
    "fp64": "FP64",
    "fp8": "FP8",
    "fp4": "FP4",
    "e8m0": "E8M0 scales",
}


@dataclass(frozen=True)
class ScanTask:
    """Some tensors to scan.

    Attributes
    ----------
    tensors : tuple of (Logical, tuple of TensorInfo)
        Logical tensors and their stored parts.
    sample_bytes : int, optional
        Read at most this much of every stored tensor, and estimate; 0 reads nothing and takes every BF16
        matrix for one without exceptions.
    """

    tensors: tuple[tuple[Logical, tuple[TensorInfo, ...]], ...]
    sample_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(logical.nbytes for logical, _ in self.tensors)


@dataclass(frozen=True)
class Scan:
    """What was found in one logical tensor.

    Attributes
    ----------
    entropy : Entropy
    exponent_counts : tuple of int
        Weights per value of the exponent; empty where it was not counted.
    format : str
        Format that ``wcodec pack`` would use.
    payload_bytes : int
        Bytes of the blob, or of the tensor where it is left raw.
    leave_reason : str
        Why it is left raw, if it is.
    window : Window, optional
    exceptions : Exceptions, optional
    sampled : bool
        Whether the figures are estimates from a part of the tensor.
    blocks : Findings, optional
        Of block-scaled kinds.
    """

    entropy: Entropy
    exponent_counts: tuple[int, ...]
    format: str
    payload_bytes: int
    leave_reason: str = ""
    window: Window | None = None
    exceptions: Exceptions | None = None
    sampled: bool = False
    blocks: Findings | None = None


def scan(task: ScanTask) -> list[Scan]:
    """Scan the tensors of a task, in order."""
    return [scan_tensor(logical, parts, task.sample_bytes) for logical, parts in task.tensors]


def scan_tensor(logical: Logical, parts: tuple[TensorInfo, ...], sample_bytes: int | None = None) -> Scan:
    """Scan one logical tensor.

    Parameters
    ----------
    logical : Logical
    parts : tuple of TensorInfo
        Its stored tensors, codes first.
    sample_bytes : int, optional
        Read at most this much of every part; see `ScanTask`.

    Raises
    ------
    WCodecError
        If a part cannot be read.
    """
    layout = _layout(logical, parts[0])
    if not logical.numel or layout is None:
        reason = "without floating-point weights" if logical.numel else "without weights"
        return Scan(NO_ENTROPY, (), "raw", logical.nbytes, reason)
    if sample_bytes == 0:
        return _guess(logical, parts)
    if logical.kind == "bf16":
        found = _scan_bf16(parts[0], sample_bytes)
    elif logical.kind in BLOCKS:
        found = _scan_blocks(logical, parts, sample_bytes)
    else:
        counts = count_fields(_chunks(parts[0], sample_bytes), layout)
        reason = f"no format for {NAMES[logical.kind]} yet"
        if logical.kind == "fp32" and counts.mantissa[1][0] == logical.numel:
            reason = "FP32 that holds only BF16 values: cast it to BF16, which is exact, and pack that"
        found = Scan(counts.entropy(), _tuple(counts.exponent), "raw", logical.nbytes, reason)
    if sample_bytes is not None and any(part.nbytes > sample_bytes for part in parts):
        return replace(found, sampled=True)
    return found


def _guess(logical: Logical, parts: tuple[TensorInfo, ...]) -> Scan:
    """What dtype and shape alone say."""
    from wcodec.formats.bf16_w12 import Bf16W12, Plan

    left, tensor = Scan(NO_ENTROPY, (), "raw", logical.nbytes, sampled=True), parts[0]
    if logical.kind in BLOCKS:
        from wcodec.analysis.nvfp4 import assume

        return _with_blocks(left, logical, parts, assume(logical.kind, logical.shape))
    if logical.kind != "bf16":
        return replace(left, leave_reason=f"no format for {NAMES[logical.kind]} yet")
    size = Bf16W12().blob_bytes(Plan((), 0, tensor.shape), 0)
    if size >= tensor.nbytes:
        return replace(left, leave_reason=THIN)
    return replace(left, format=Bf16W12.id, payload_bytes=size)


def _scan_bf16(tensor: TensorInfo, sample_bytes: int | None) -> Scan:
    from wcodec.formats.bf16_w12 import Bf16W12, Plan, choose_table

    packing = Bf16W12()
    whole = sample_bytes is None or tensor.nbytes <= sample_bytes
    # A small tensor is read once and stays in the processor's cache; a large one is read twice, in pieces.
    kept = tensor.read() if whole and tensor.nbytes <= CHUNK else None
    chunks = [kept] if kept is not None else _chunks(tensor, sample_bytes)
    counts = count_fields(chunks, LAYOUTS["BF16"])
    left = Scan(counts.entropy(), _tuple(counts.exponent), "raw", tensor.nbytes)
    bricks_only = Plan((), 0, tensor.shape)
    columns = bricks_only.matrix[1]
    size = packing.blob_bytes(bricks_only, 0)
    if size >= tensor.nbytes:
        return replace(left, leave_reason=THIN)
    high = high_exponent_counts(counts.exponent)
    table = choose_table(high)
    plan = Plan(table, int(high.sum() - high[list(table)].sum()), tensor.shape)
    missed = plan.exceptions / counts.total
    if not whole:
        size = packing.blob_bytes(plan, _expected_overflow(tensor.numel, missed))
    elif plan.exceptions:
        tiles = [kept] if kept is not None else _row_tiles(tensor, 2 * columns)
        views = (tile.view("<u2").reshape(-1, columns) for tile in tiles)
        size = packing.blob_bytes(plan, sum(packing.count_overflow(view, plan) for view in views))
    if size >= tensor.nbytes:
        return replace(left, leave_reason=f"{percent(missed)} of its weights are outside the best window")
    return replace(
        left,
        format=packing.id,
        payload_bytes=size,
        window=Window(plan.kind, plan.table),
        exceptions=Exceptions(round(missed * tensor.numel), missed),
    )


def _scan_blocks(logical: Logical, parts: tuple[TensorInfo, ...], sample_bytes: int | None) -> Scan:
    """Count the codes, the scale bytes and the global scales of a block-scaled weight, each once."""
    from wcodec.analysis.nvfp4 import inspect, roles

    nibbles = sum(map(nibble_histogram, _chunks(parts[0], sample_bytes)), np.zeros(16, np.int64))
    scales = sum(map(byte_histogram, _chunks(parts[1], sample_bytes)), np.zeros(256, np.int64))
    name = roles(logical, parts).global_scale
    beside = next((part for part in parts[2:] if part.name == name), None)
    globals_ = _floats(beside, sample_bytes) if beside is not None else None
    blocks = inspect(logical.kind, nibbles, scales, globals_, logical.shape)
    if sample_bytes is not None and any(part.nbytes > sample_bytes for part in parts):
        blocks = replace(blocks, verdict=f"from a sample: {blocks.verdict}")
    counts = fold(nibbles, LAYOUTS["F4"])
    per_weight = parts[1].nbytes / logical.numel
    entropies = replace(counts.entropy(), scale=blocks.scale_entropy * per_weight)
    return _with_blocks(
        Scan(entropies, _tuple(counts.exponent), "raw", logical.nbytes), logical, parts, blocks
    )


def _with_blocks(left: Scan, logical: Logical, parts: tuple[TensorInfo, ...], blocks: Findings) -> Scan:
    """A scan with its findings; packed where `wcodec pack` does it (``docs/packing.md`` has its rule)."""
    from wcodec.analysis.nvfp4 import roles
    from wcodec.formats.nvfp4_s5 import Nvfp4S5

    if blocks.packed_bytes is None:
        return replace(left, leave_reason=blocks.verdict, blocks=blocks)
    found = roles(logical, parts)
    needed = (found.codes, found.scale, found.global_scale)
    files = {str(part.file) for part in parts if part.name in needed}
    packed = replace(left, format=Nvfp4S5.id, payload_bytes=blocks.packed_bytes, blocks=blocks)
    odd = (*blocks.flags, *(["its parts lie in several files"] if len(files) > 1 else []))
    return left_as_it_is(packed, logical, odd) if odd else packed


def left_as_it_is(packed: Scan, logical: Logical, why: Sequence[str]) -> Scan:
    """The scan of a block-scaled weight that would get smaller, but for what is odd about it."""
    assert packed.blocks is not None
    reason = f"{packed.blocks.verdict}; but {', '.join(why)}"
    return replace(packed, format="raw", payload_bytes=logical.nbytes, leave_reason=reason)


def _floats(tensor: TensorInfo, sample_bytes: int | None) -> npt.NDArray[np.float64]:
    """Values of an FP32 tensor that should be small; of one that is not, a sample."""
    data = tensor.sample(min(CHUNK, sample_bytes or CHUNK))
    with np.errstate(invalid="ignore"):  # signalling NaNs are NaNs
        return data.view("<f4").astype(np.float64)


def _layout(logical: Logical, codes: TensorInfo) -> Layout | None:
    """How to count the weights of a tensor; None where that makes no sense."""
    if logical.kind in BLOCKS:
        return LAYOUTS["F4"]
    return LAYOUTS.get(codes.dtype)


def _expected_overflow(numel: int, missed: float) -> int:
    """Overflow entries where exceptions fall anywhere with probability `missed`.

    The number in a quarter of 1,024 weights is close to Poisson with mean m, and a quarter with seven or more
    sends all of them to the overflow list: Σ k P(k), k ≥ 7, is m P(k ≥ 6).
    """
    mean = 1024 * missed
    few = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(6))
    return round(numel * missed * max(0.0, 1 - few))


def _chunks(tensor: TensorInfo, sample_bytes: int | None) -> Iterable[Bytes]:
    if sample_bytes is None or tensor.nbytes <= sample_bytes:
        return tensor.chunks()
    return [tensor.sample(sample_bytes)]


def _row_tiles(tensor: TensorInfo, row_bytes: int) -> Iterable[Bytes]:
    """Pieces of whole row tiles of 64 rows, the last one as it comes."""
    return tensor.chunks(max(CHUNK // (64 * row_bytes), 1) * 64 * row_bytes)


def _tuple(counts: I64) -> tuple[int, ...]:
    return tuple(counts.tolist())
