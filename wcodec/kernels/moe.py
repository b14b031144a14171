"""Routed experts on the GPU: configurations and launches of the two products and the closing sum."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wcodec.cuda.compiler import compile_cubin
from wcodec.cuda.device import device_info
from wcodec.cuda.module import load
from wcodec.errors import UnsupportedError, WCodecError

if TYPE_CHECKING:
    import torch

    from wcodec.moe import State

SOURCE = "sm90_moe_product.cu"
TILE = 64
THREADS = 512
SUM_THREADS = 512
ORDER_THREADS = 512
WARPGROUPS = 4
STAGES = 6
STAGE_BYTES = 32768
#: Most tokens of a pass over an expert with many; the widest that compiles without spilling is taken.
WIDTHS = (128, 96, 64)
RINGS = (8, 4, 2)
#: Most tokens of an expert that stay in shared memory: the first that fits.
FEW = (24, 16, 8)
#: Most tokens that mma.sync multiplies; from there on wgmma is faster.
SYNC_TOKENS = 16
#: Calls of at most so many tokens have kernels of their own, half as long.
SMALL_TOKENS = 8
# Measured prices, where a row tile of at most 8 tokens costs 64: of one with more tokens, of a group of four
# by the width of its products, of the first row of an expert.
PRICES = {
    "PART_PRICE": 40,
    "TILE_PRICE_16": 84,
    "TILE_PRICE_24": 92,
    "GROUP_PRICE_32": 420,
    "GROUP_PRICE_64": 480,
    "GROUP_PRICE_128": 800,
}
#: Routes that one launch can sort; more tokens are computed in slices.
MAX_ROUTES = 4096
_ROUTE_SIZES = (128, 512, 2048, MAX_ROUTES)


@dataclass(frozen=True)
class Product:
    """One of the two products for one model and one bound on the number of routes.

    Attributes
    ----------
    rows, cols : int
        N and K of each expert's matrix; multiples of 64.
    experts : int
        Local experts.
    top_k : int
        Routes per token.
    routes : int
        Most routes of one call.
    id_bytes : int
        Bytes per expert id.
    gated : bool
        Gate and up with SwiGLU, else a plain product.
    few : int
        Tokens up to which an expert's tokens stay in shared memory.
    many : bool
        Whether there are passes of wgmma. Calls of few tokens do without: a third of the instructions, which
        a cold call has to fetch.
    wide : int
        Most tokens of a pass over an expert with more.
    """

    rows: int
    cols: int
    experts: int
    top_k: int
    routes: int
    id_bytes: int
    gated: bool
    few: int
    many: bool = True
    wide: int = WIDTHS[0]

    @property
    def smem(self) -> int:
        """Dynamic shared memory in bytes: tokens, sums, routes (`sm90_moe_parts.cuh`)."""
        return _smem(self.cols, self.experts, self.routes, self.few, self.many, self.wide)

    @property
    def ring(self) -> int:
        """Chunks in flight per warp: as many as possible without more turns than the chunks need."""
        chunks = -(-self.cols // (TILE * WARPGROUPS))
        return min(RINGS, key=lambda ring: (-(-chunks // ring) * ring, -ring))

    def defines(self) -> dict[str, int]:
        """Macros of ``sm90_moe_product.cu``."""
        return {
            "N_ROWS": self.rows,
            "K_COLUMNS": self.cols,
            "EXPERTS": self.experts,
            "TOP_K": self.top_k,
            "ROUTES": self.routes,
            "ID_BYTES": self.id_bytes,
            "GATED": int(self.gated),
            "FEW_TOKENS": self.few,
            "RING": self.ring,
            "STAGES": STAGES,
            "MANY": int(self.many),
            "WIDE_TOKENS": self.wide,
            "SYNC_TOKENS": SYNC_TOKENS,
            **PRICES,
        }


def _smem(cols: int, experts: int, routes: int, few: int, many: bool, wide: int) -> int:
    sort = 4 * (experts + routes // few) + 2 * (THREADS // 32) * experts
    tokens = max(few * cols * 2, STAGES * STAGE_BYTES if many else -(-sort // 16) * 16)
    sums = WARPGROUPS * (24 if many else 16) * 68 * 4
    parts = experts + routes // wide + experts if many else experts + routes // few + 1
    table = 4 * wide + 8 * parts + 4 * experts + 32 + 2 * routes
    return tokens + sums + -(-table // 16) * 16


def kinds(tokens: int, few: int) -> tuple[int, bool]:
    """Return `few` and `many` of the products of a call with `tokens` tokens, where `few` is what fits."""
    if tokens > min(few, SYNC_TOKENS):
        return few, True
    return min(few, SMALL_TOKENS if tokens <= SMALL_TOKENS else SYNC_TOKENS), False


@functools.cache
def compiled(which: Product, arch: str) -> Product:
    """Return `which` with the widest pass that compiles without spilling registers.

    Raises
    ------
    WCodecError
        Where not even the narrowest does.
    """
    for wide in WIDTHS[:-1]:
        candidate = dataclasses.replace(which, wide=wide)
        try:
            compile_cubin(SOURCE, candidate.defines(), arch)
        except WCodecError:
            continue
        return candidate
    candidate = dataclasses.replace(which, wide=WIDTHS[-1])
    compile_cubin(SOURCE, candidate.defines(), arch)
    return candidate


def products(state: State, tokens: int, id_bytes: int) -> tuple[Product, Product]:
    """Return the configurations of both products for a call with `tokens` tokens."""
    config = state.config
    routes = next(size for size in _ROUTE_SIZES if tokens * config.top_k <= size)
    limit = device_info(state.device.index).max_shared_bytes
    # One bound for both products: it decides the order in which the first one stores columns.
    widest = max(config.hidden, config.intermediate)
    few = next((n for n in FEW if _smem(widest, state.experts, routes, n, True, WIDTHS[0]) <= limit), None)
    if few is None:
        raise UnsupportedError(f"8 tokens of {widest} columns do not fit into {limit} bytes of shared memory")
    few, many = kinds(tokens, few)

    def product(rows: int, cols: int, gated: bool) -> Product:
        return Product(rows, cols, state.experts, config.top_k, routes, id_bytes, gated, few, many)

    return (
        product(2 * config.intermediate, config.hidden, True),
        product(config.hidden, config.intermediate, False),
    )


def launch(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, state: State, out: torch.Tensor
) -> None:
    """Launch the products and the closing sum for at most ``MAX_ROUTES`` routes on torch's current stream.

    Parameters
    ----------
    x : torch.Tensor of bfloat16, shape (tokens, hidden)
        Contiguous.
    topk_ids : torch.Tensor of int32 or int64, shape (tokens, top_k)
        Global expert ids, contiguous.
    topk_weights : torch.Tensor of float32, shape (tokens, top_k)
        Contiguous.
    state : State
        From `wcodec.moe.prepare`.
    out : torch.Tensor of bfloat16, shape (tokens, hidden)
        Written in full.
    """
    import torch

    config = state.config
    tokens, routes = x.shape[0], topk_ids.numel()
    first, second = products(state, tokens, topk_ids.element_size())
    device = state.device
    hidden = torch.empty(routes, config.intermediate, dtype=torch.bfloat16, device=device)
    results = torch.empty(routes, config.hidden, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    info = device_info(device.index)
    grid = info.multiprocessors
    ids, table = topk_ids.data_ptr(), state.table.data_ptr() if state.table is not None else 0
    place: tuple[Any, ...] = (ids, table, state.first_expert, config.num_experts)

    def product(which: Product, weights: Any, factors: Any, source: Any, ordered: Any, to: Any) -> None:
        which = compiled(which, info.arch)
        kernel = load(SOURCE, which.defines(), device)
        # The first product of a small call follows a kernel that is not ours.
        follows = source is hidden or ordered is not source
        frame = kernel.frame("PPPPPPPIII", grid, THREADS, which.smem, pdl=follows)
        pointers = (tensor.data_ptr() for tensor in (weights, factors, source, ordered, to))
        frame(stream, *pointers, *place, routes)

    ordered = x
    if first.many:
        ordered = torch.empty_like(x)
        words = x.numel() // 2
        order = load("sm80_moe_order.cu", {"THREADS": ORDER_THREADS}, device)
        frame = order.frame("PPI", -(-words // ORDER_THREADS), ORDER_THREADS)
        frame(stream, x.data_ptr(), ordered.data_ptr(), words)
    product(first, state.w13, state.w13_factors, x, ordered, hidden)
    product(second, state.w2, state.w2_factors, hidden, hidden, results)
    defines = {
        "COLUMNS": config.hidden,
        "EXPERTS": state.experts,
        "TOP_K": config.top_k,
        "ID_BYTES": topk_ids.element_size(),
        "THREADS": SUM_THREADS,
    }
    frame = load("sm80_moe_sum.cu", defines, device).frame("PPPPPPII", tokens, SUM_THREADS, pdl=True)
    frame(
        stream,
        results.data_ptr(),
        state.norms.data_ptr(),
        topk_weights.data_ptr(),
        out.data_ptr(),
        *place,
    )
