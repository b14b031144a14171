"""Pack BF16 matrices on the GPU: the same blob, byte for byte, as the host encoder's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from wcodec.cuda.module import load
from wcodec.errors import UnsupportedError, WCodecError
from wcodec.formats.base import split_axis
from wcodec.formats.bf16_w12 import BRICK_BYTES, OVERFLOW_LIMIT, TILE, Bf16W12, Plan, choose_table
from wcodec.packed import Footer, blob_bytes, tail_bytes

if TYPE_CHECKING:
    import torch

QUARTERS = 4
WARPS = 8  # per CTA of the pack and unpack kernels, one quarter each
THREADS = 32 * WARPS
HISTOGRAM_THREADS = 512
_HISTOGRAM_CTAS_PER_SM = 4
_INLINE_MAX = 6  # exceptions that fit into a patch word
_DIGEST_CHUNK_BYTES = 64 << 20


def histogram_defines(vector: int) -> dict[str, int]:
    """Macros of ``bf16_w12_histogram.cu``; `vector` from `vector_width`."""
    return {"WC_VECTOR": vector, "WC_THREADS": HISTOGRAM_THREADS}


def pack_defines(counting: bool, vector: int) -> dict[str, int]:
    """Macros of ``bf16_w12_pack.cu``: the counting or the packing pass."""
    return {"WC_PASS": 0 if counting else 1, "WC_VECTOR": vector}


def vector_width(address: int, stride: int) -> int:
    """Elements a 16-bit matrix can be moved at once: 8 where every row starts on 16 bytes, else 1."""
    return 8 if address % 16 == 0 and stride % 8 == 0 else 1


def split_table(table: tuple[int, ...] | bytes) -> tuple[int, int]:
    """Return a table's eight values as the two words the kernels take."""
    raw = bytes(table)
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:], "little")


def matrix_view(weight: torch.Tensor) -> torch.Tensor:
    """Fold a BF16 tensor into its N × K matrix view (``docs/format.md`` section 1).

    A view where the strides allow it: for a matrix, rows may lie any distance apart.

    Raises
    ------
    TypeError
        If it is not a BF16 tensor.
    UnsupportedError
        If it is not on a CUDA device.
    """
    import torch

    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"expected a torch.bfloat16 tensor, got {getattr(weight, 'dtype', type(weight).__name__)}"
        )
    if not weight.is_cuda:
        raise UnsupportedError(
            f"the packer takes CUDA tensors, not {weight.device}", mend="use wcodec.encode"
        )
    weight = weight.detach()
    if weight.dim() == 2 and weight.stride(1) == 1:
        return weight
    axis = split_axis(tuple(weight.shape), TILE)
    rows = int(np.prod(weight.shape[:axis], dtype=np.int64))
    return weight.contiguous().view(rows, -1) if weight.numel() else weight.reshape(rows, 0)


def histogram(matrix: torch.Tensor) -> npt.NDArray[np.int64]:
    """Count the 128 values of the 7 high exponent bits; waits for the result.

    Parameters
    ----------
    matrix : torch.Tensor
        From `matrix_view`.

    Returns
    -------
    numpy.ndarray of int64, shape (128,)
    """
    import torch

    counts = torch.zeros(128, dtype=torch.int64, device=matrix.device)
    launch_histogram(matrix, counts)
    return counts.cpu().numpy()


def launch_histogram(matrix: torch.Tensor, counts: torch.Tensor) -> None:
    """Add a matrix's 128 counts to `counts` (int64) and return at once."""
    import torch

    if not matrix.numel():
        return
    rows, cols, stride = *matrix.shape, matrix.stride(0)
    if rows == 1 or stride == cols:
        rows, cols, stride = 1, rows * cols, rows * cols + (-rows * cols) % 8
    defines = histogram_defines(vector_width(matrix.data_ptr(), stride))
    kernel = load("bf16_w12_histogram.cu", defines, matrix.device)
    processors = torch.cuda.get_device_properties(matrix.device).multi_processor_count
    launch = kernel.frame("PQQQP", _HISTOGRAM_CTAS_PER_SM * processors, HISTOGRAM_THREADS)
    with torch.cuda.device(matrix.device):
        launch(_stream(matrix), matrix.data_ptr(), stride, rows, cols, counts.data_ptr())


def make_plan(weight: torch.Tensor) -> Plan:
    """Choose the table of a BF16 tensor on the GPU, as the host encoder does.

    Parameters
    ----------
    weight : torch.Tensor
        CUDA, BF16, any shape.
    """
    counts = histogram(matrix_view(weight))
    table = choose_table(counts)
    return Plan(table, int(counts.sum() - counts[list(table)].sum()), tuple(weight.shape))


def overflow_ends(matrix: torch.Tensor, plan: Plan) -> tuple[int, torch.Tensor | None]:
    """Find where each quarter's overflow entries end in the overflow list.

    Parameters
    ----------
    matrix : torch.Tensor
        From `matrix_view`.
    plan : Plan

    Returns
    -------
    count : int
        Entries of the whole list.
    ends : torch.Tensor of int64 or None
        Inclusive sums over the quarters in the order of the blob; None where no quarter overflows.
    """
    import torch

    if plan.exceptions <= _INLINE_MAX:
        return 0, None
    counts = torch.empty(QUARTERS * plan.brick_count, dtype=torch.int32, device=matrix.device)
    launch_count(matrix, plan, counts)
    ends = counts.cumsum(0)
    count = int(ends[-1])
    return count, ends if count else None


def pack(weight: torch.Tensor, *, plan: Plan | None = None, digest: bytes | None = None) -> torch.Tensor:
    """Pack a BF16 tensor into a ``bf16-w12`` blob on its own GPU.

    Three reads of the weights (histogram, overflow count, pack) and two waits for small results; the peak of
    memory is the weights and the blob.

    Parameters
    ----------
    weight : torch.Tensor
        CUDA, BF16, any shape. Rows of a matrix may lie any distance apart.
    plan : Plan, optional
        From `make_plan`, where the caller already has it.
    digest : bytes, optional
        xxh3-128 of the original bytes, where the caller has them on the host. Otherwise the weights are
        copied back for it, which costs more than packing them.

    Returns
    -------
    torch.Tensor of uint8, 1-D
        The blob, equal to ``wcodec.encode(weight, format="bf16-w12").blob``.

    Raises
    ------
    TypeError
        If it is not a BF16 tensor.
    UnsupportedError
        If it is not on a CUDA device.
    WCodecError
        If it has more overflow entries than the format can index.
    """
    import torch

    if plan is None:
        plan = make_plan(weight)
    matrix = matrix_view(weight)
    count, ends = overflow_ends(matrix, plan)
    if count > OVERFLOW_LIMIT:
        raise WCodecError("more overflow entries than a u32 can index", mend="store the tensor raw")
    body = plan.brick_count * BRICK_BYTES + 4 * count
    blob = torch.empty(blob_bytes(body, len(plan.shape)), dtype=torch.uint8, device=weight.device)
    launch_pack(matrix, plan, ends, blob)
    footer = Footer(
        Bf16W12.code,
        Bf16W12.version,
        "BF16",
        plan.shape,
        split_axis(plan.shape, TILE),
        bytes(plan.table),
        count,
        original_digest(matrix) if digest is None else digest,
    )
    tail = torch.frombuffer(bytearray(tail_bytes(body, footer)), dtype=torch.uint8)
    blob[body:].copy_(tail)
    return blob


def original_digest(matrix: torch.Tensor) -> bytes:
    """Copy a matrix back in chunks and return the xxh3-128 of its bytes."""
    import torch

    state = xxhash.xxh3_128()
    rows = max(1, _DIGEST_CHUNK_BYTES // max(2 * matrix.shape[1], 1))
    for first in range(0, matrix.shape[0], rows):
        chunk: Any = matrix[first : first + rows].contiguous().view(torch.int16).cpu().numpy()
        state.update(chunk)
    return state.digest()


def launch_count(matrix: torch.Tensor, plan: Plan, counts: torch.Tensor) -> None:
    """Write every quarter's number of overflow entries to `counts` (int32) and return at once."""
    _launch(matrix, plan, counts.data_ptr(), 0, 0)


def launch_pack(matrix: torch.Tensor, plan: Plan, ends: torch.Tensor | None, blob: torch.Tensor) -> None:
    """Write bricks and overflow entries to `blob` and return at once; `ends` from `overflow_ends`."""
    _launch(matrix, plan, 0, 0 if ends is None else ends.data_ptr(), blob.data_ptr())


def _launch(matrix: torch.Tensor, plan: Plan, counts: int, ends: int, bricks: int) -> None:
    import torch

    if not matrix.numel():
        return
    rows, cols = matrix.shape
    stride = matrix.stride(0) if rows > 1 else cols + -cols % 8
    defines = pack_defines(not bricks, vector_width(matrix.data_ptr(), stride))
    kernel = load("bf16_w12_pack.cu", defines, matrix.device)
    launch = kernel.frame("PQIIIIPPPP", -(-plan.brick_count * QUARTERS // WARPS), THREADS)
    overflow = bricks + plan.brick_count * BRICK_BYTES
    words = split_table(plan.table)
    with torch.cuda.device(matrix.device):
        launch(_stream(matrix), matrix.data_ptr(), stride, rows, cols, *words, counts, ends, bricks, overflow)


def _stream(tensor: torch.Tensor) -> Any:
    import torch

    return torch.cuda.current_stream(tensor.device).cuda_stream
