"""Router logits in one launch: BF16 tokens times the exact FP32 weights, FP32 out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wcodec.cuda.device import device_index, device_info
from wcodec.cuda.module import load

if TYPE_CHECKING:
    import torch

CLUSTER = 8
WARPS = 8
THREADS = 32 * WARPS
MAX_TOKENS = 256


@dataclass(frozen=True)
class RouterConfig:
    """How one instance of ``router.cu`` cuts its work (see the file's header).

    Attributes
    ----------
    row_tiles, token_tiles : int
        Tiles of 16 rows and of 8 tokens per warp.
    warp_rows, warp_tokens : int
        Warps along rows and tokens; the rest of the eight shares K.
    depth : int
        Chunks of 32 columns in flight per warp.
    """

    row_tiles: int
    token_tiles: int
    warp_rows: int
    warp_tokens: int
    depth: int

    def defines(self, parts: int) -> dict[str, int]:
        """Macros of the instance; `parts` BF16 values per weight."""
        return {
            "WC_PARTS": parts,
            "WC_ROW_TILES": self.row_tiles,
            "WC_TOKEN_TILES": self.token_tiles,
            "WC_WARP_ROWS": self.warp_rows,
            "WC_WARP_TOKENS": self.warp_tokens,
            "WC_DEPTH": self.depth,
            "WC_CTAS_PER_SM": 2,  # clusters of 8 do not fill 132 SMs: some SMs must take two CTAs at once
        }

    def grid(self, rows: int, tokens: int) -> tuple[int, int, int]:
        """CTAs: cluster, row tiles, token tiles."""
        tile_rows, tile_tokens = 16 * self.row_tiles * self.warp_rows, 8 * self.token_tiles * self.warp_tokens
        return CLUSTER, -(-rows // tile_rows), -(-tokens // tile_tokens)

    @property
    def inbox_bytes(self) -> int:
        """Dynamic shared memory: 64 bytes per tile and per warp that shares K in a cluster."""
        return self.row_tiles * self.token_tiles * WARPS * CLUSTER * 64


# Fastest on an H200 for 256 × 8192 weights, by the largest number of tokens they serve.
CONFIGS: dict[int, RouterConfig] = {
    8: RouterConfig(1, 1, 1, 1, 4),
    16: RouterConfig(1, 2, 1, 1, 4),
    32: RouterConfig(1, 4, 1, 1, 2),
    64: RouterConfig(1, 4, 1, 2, 2),
    128: RouterConfig(2, 4, 1, 2, 1),
    MAX_TOKENS: RouterConfig(2, 4, 2, 2, 1),
}


def choose(tokens: int) -> RouterConfig:
    """Return the instance for 1 … 256 tokens."""
    return next(config for most, config in CONFIGS.items() if tokens <= most)


def exact_parts(weight: torch.Tensor) -> int | None:
    """Return how many BF16 values add up to every FP32 weight exactly: 2, 3, or None where three do not.

    Each value is the BF16 nearest to the rest of the ones before it, as the kernel takes them. Three always
    do, except for infinities, NaN, magnitudes next to the largest and some below 2^-100.
    """
    import torch

    if weight.dtype != torch.float32:
        raise TypeError(f"expected FP32 weights, got {weight.dtype}")
    rest = weight.detach()
    for part in range(1, 4):
        rest = rest - rest.to(torch.bfloat16).to(torch.float32)
        if part >= 2 and not bool(rest.count_nonzero()):
            return part
    return None


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes these operands: Hopper or newer, aligned rows, at most 256 tokens."""
    return (
        device_info(device_index(weight.device)).capability >= (9, 0)
        and 0 < x.shape[0] <= MAX_TOKENS
        and weight.numel() > 0
        and weight.shape[1] % 8 == 0
        and all(m.stride(1) == 1 and m.data_ptr() % 16 == 0 for m in (x, weight))
        and (x.shape[0] == 1 or x.stride(0) % 8 == 0)
        and weight.stride(0) % 4 == 0
    )


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    parts: int,
    *,
    config: RouterConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply tokens by FP32 weights, ``x @ weight.T``, accumulating exact products in FP32.

    Parameters
    ----------
    x : torch.Tensor of bfloat16, shape (m, K)
        1 … 256 finite tokens (an infinity would meet the zeros among the parts and give NaN).
    weight : torch.Tensor of float32, shape (N, K)
    parts : int
        From `exact_parts`.
    config : RouterConfig, optional
        From `choose` by default.
    out : torch.Tensor of float32, shape (m, N), optional
        Contiguous; new where None.

    Returns
    -------
    torch.Tensor of float32, shape (m, N)
        The same bits in every run.
    """
    import torch

    tokens, cols = x.shape
    rows = weight.shape[0]
    config = config or choose(tokens)
    if out is None:
        out = torch.empty(tokens, rows, dtype=torch.float32, device=x.device)
    kernel = load("router.cu", config.defines(parts), weight.device)
    launch = kernel.frame("PQPQPIII", config.grid(rows, tokens), THREADS, config.inbox_bytes, (CLUSTER, 1, 1))
    launch(
        torch.cuda.current_stream(x.device).cuda_stream,
        weight.data_ptr(),
        weight.stride(0),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        rows,
        cols,
        tokens,
    )
    return out
