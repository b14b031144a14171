"""The ways one product can run, each as a function of (x, out, bias).

x has shape (m, K), out (m, N); both lie on the weight's device, which is current. The functions launch on
torch's current stream and return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wcodec.formats.bf16_w12 import TILE

if TYPE_CHECKING:
    import torch

    from wcodec.state import PackedWeight

Run = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], None]

# Decoded weights of at most this many bytes exist at once; larger matrices go through in row groups.
DECODE_BYTES = 1 << 30
_CPU_DECODE_BYTES = 32 << 20


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Write ``x · weightᵀ + bias`` to `out` with torch's own product (cuBLAS on a GPU)."""
    import torch

    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def original_path(weight: PackedWeight) -> Run:
    """Return the product with the uncompressed weight."""
    import torch

    assert weight.original is not None
    matrix = weight.original.view(weight.n, weight.k)
    if weight.dtype != torch.float32:
        return lambda x, out, bias: product(x, matrix, out, bias)

    return lambda x, out, bias: product(x.float(), matrix, out, bias)


def decode_path(weight: PackedWeight, decode_bytes: int = DECODE_BYTES) -> Run:
    """Return decode + cuBLAS: the weight exists as BF16 for the time of the call only."""
    import torch

    rows = max(TILE, decode_bytes // max(2 * weight.k, 1) // TILE * TILE)

    def run(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        buffer = torch.empty(min(rows, weight.n), weight.k, dtype=torch.bfloat16, device=weight.device)
        for first in range(0, weight.n, rows):
            last = min(first + rows, weight.n)
            part = weight.decode_rows(first, last, buffer[: last - first])
            product(x, part, out[:, first:last], None if bias is None else bias[first:last])

    return run


def cpu_path(weight: PackedWeight) -> Run:
    """Return decode and multiply on the host, summed in FP32, in row groups of bounded memory."""
    import torch

    rows = max(TILE, _CPU_DECODE_BYTES // max(2 * weight.k, 1) // TILE * TILE)

    def run(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        wide = x.float()
        for first in range(0, weight.n, rows):
            last = min(first + rows, weight.n)
            if weight.original is not None:
                part = weight.original.view(weight.n, weight.k)[first:last]
            else:
                part = torch.empty(last - first, weight.k, dtype=torch.bfloat16)
                weight.decode_rows(first, last, part)
            sums = wide @ part.float().t()
            if bias is not None:
                sums += bias[first:last].float()
            out[:, first:last] = sums.to(out.dtype)

    return run


def chunked_path(run_whole: Run, run_rest: Run | None, chunk: int) -> Run:
    """Return a path for many tokens: whole chunks go by `run_whole`, the rest by `run_rest`."""

    def run(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        whole = x.shape[0] // chunk * chunk
        for first in range(0, whole, chunk):
            run_whole(x[first : first + chunk], out[first : first + chunk], bias)
        if run_rest is not None:
            run_rest(x[whole:], out[whole:], bias)

    return run
