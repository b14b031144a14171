"""Decode a ``bf16-w12`` matrix, or some of its rows, to BF16 on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wcodec.cuda.module import load
from wcodec.formats.bf16_w12 import BRICK_BYTES, TILE
from wcodec.kernels.pack import QUARTERS, THREADS, WARPS, split_table, vector_width

if TYPE_CHECKING:
    import torch

QUARTERS_PER_WARP = 2


def unpack_defines(vector: int, quarters: int = QUARTERS_PER_WARP) -> dict[str, int]:
    """Macros of ``bf16_w12_unpack.cu``; `vector` from `wcodec.kernels.pack.vector_width`."""
    return {"WC_VECTOR": vector, "WC_QUARTERS": quarters}


def unpack_grid(rows: tuple[int, int], cols: int, quarters: int = QUARTERS_PER_WARP) -> int:
    """CTAs that decode rows ``rows[0]`` … ``rows[1] - 1`` of a matrix of `cols` columns."""
    tiles = -(-rows[1] // TILE) - rows[0] // TILE
    return -(-tiles * -(-cols // TILE) * QUARTERS // (WARPS * quarters))


def unpack(
    blob: torch.Tensor,
    matrix: tuple[int, int],
    table: bytes,
    overflow_count: int,
    *,
    rows: tuple[int, int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode rows of a packed matrix.

    Parameters
    ----------
    blob : torch.Tensor of uint8, 1-D
        A validated ``bf16-w12`` blob on a CUDA device.
    matrix : tuple of int
        Shape (N, K) of the matrix view.
    table : bytes
        The footer's table.
    overflow_count : int
        The footer's overflow count.
    rows : tuple of int, optional
        First row and the row after the last; every row by default. Multiples of 64 waste no reads.
    out : torch.Tensor of bfloat16, optional
        Where to write, shape (rows, K), last stride 1. New where None.

    Returns
    -------
    torch.Tensor of bfloat16, shape (rows, K)

    Raises
    ------
    ValueError
        If `rows` or `out` do not fit the matrix.
    """
    import torch

    count, cols = matrix
    first, last = rows if rows is not None else (0, count)
    if not 0 <= first <= last <= count:
        raise ValueError(f"rows {first} … {last} are not in a matrix of {count} rows")
    if out is None:
        out = torch.empty(last - first, cols, dtype=torch.bfloat16, device=blob.device)
    elif out.shape != (last - first, cols) or out.dtype != torch.bfloat16 or out.device != blob.device:
        raise ValueError(f"out must be BF16 of shape {(last - first, cols)} on {blob.device}")
    elif cols > 1 and out.stride(1) != 1:
        raise ValueError("out must have contiguous rows")
    if not out.numel():
        return out
    stride = out.stride(0) if last - first > 1 else cols + -cols % 8
    kernel = load("bf16_w12_unpack.cu", unpack_defines(vector_width(out.data_ptr(), stride)), blob.device)
    launch = kernel.frame("PPQIIIIIPQ", unpack_grid((first, last), cols), THREADS)
    bricks = -(-count // TILE) * -(-cols // TILE)
    with torch.cuda.device(blob.device):
        launch(
            torch.cuda.current_stream(blob.device).cuda_stream,
            blob.data_ptr(),
            blob.data_ptr() + bricks * BRICK_BYTES,
            overflow_count,
            *split_table(table),
            cols,
            first,
            last,
            out.data_ptr(),
            stride,
        )
    return out
