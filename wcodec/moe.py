"""Routed experts with NVFP4 weights and BF16 activations, for the experts that live on one GPU.

Per token ``t`` and each of its routes ``(e, g)`` with a local expert ``e``::

    gate, up = split(x[t] @ dequant(w13[e]).T)
    y = (silu(gate) * up) @ dequant(w2[e]).T
    z = y * (1 + post_norm[e])
    out[t] += g * z * rsqrt(mean(z ** 2) + 1e-8)

Weights are stored as they came, bit for bit, in the order the kernels read them: `restore` gives the
checkpoint's bytes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from wcodec.errors import UnsupportedError, WCodecError
from wcodec.state import VIEW_BYTES, aligned

if TYPE_CHECKING:
    import torch

TILE = 64
BRICK_BYTES = 2304  # raw scales
#: What decoded operands lack, `kDecodedFactor` in ``decoders_cuda/nvfp4_operand.cuh``.
DECODED_FACTOR = 256.0
# Bits of (mantissa, low exponent, sign) of weight p of a step in its u32; the high exponent bit follows the
# low one. Weights 2r and 2r + 1 are the halves of A register r.
PLACES = (
    (6, 7, 15),
    (22, 23, 31),
    (0, 1, 9),
    (16, 17, 25),
    (10, 11, 19),
    (26, 27, 3),
    (4, 13, 21),
    (20, 29, 5),
)


@dataclass(frozen=True)
class Config:
    """Shape of one layer of routed experts.

    Attributes
    ----------
    hidden, intermediate : int
        Columns of an expert's input and of its hidden layer; multiples of 64.
    num_experts : int
        Experts of the whole layer, on all GPUs.
    top_k : int
        Routes per token.
    local_experts : sequence of int, optional
        Global ids of the experts whose weights are given, in their order; all by default.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    local_experts: Sequence[int] | None = None


class Weights(NamedTuple):
    """NVFP4 weights of the local experts, as checkpoints store them.

    Attributes
    ----------
    w13 : torch.Tensor of uint8, shape (experts, 2 · intermediate, hidden / 2)
        Two E2M1 values per byte, even columns in the low nibble; gate's rows, then up's.
    w13_scale : torch.Tensor of float8_e4m3fn or uint8, shape (experts, 2 · intermediate, hidden / 16)
        Block scales.
    w13_global : torch.Tensor of float32, shape (experts, 2)
        Multipliers of gate and of up.
    w2 : torch.Tensor of uint8, shape (experts, hidden, intermediate / 2)
    w2_scale : torch.Tensor of float8_e4m3fn or uint8, shape (experts, hidden, intermediate / 16)
    w2_global : torch.Tensor of float32, shape (experts,)
    post_norm : torch.Tensor of bfloat16, shape (experts, hidden)
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_global: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_global: torch.Tensor
    post_norm: torch.Tensor


@dataclass(frozen=True)
class State:
    """Prepared weights on one device; pass it to `forward`.

    Attributes
    ----------
    config : Config
    device : torch.device
    experts : int
        Local experts.
    w13, w2 : torch.Tensor of uint8
        Bricks, expert by expert; gate's and up's rows interleaved by eights.
    w13_global, w2_global : torch.Tensor of float32
        Global scales as they came.
    w13_factors, w2_factors : torch.Tensor of float32
        Global scales times `DECODED_FACTOR`; NaN where one of the expert's block scales is NaN.
    norms : torch.Tensor of bfloat16
    table : torch.Tensor of int32 or None
        Local expert or −1 per global one, where the local ones are not consecutive.
    first_expert : int
        First local expert where they are.
    """

    config: Config
    device: torch.device
    experts: int
    w13: torch.Tensor
    w13_global: torch.Tensor
    w13_factors: torch.Tensor
    w2: torch.Tensor
    w2_global: torch.Tensor
    w2_factors: torch.Tensor
    norms: torch.Tensor
    table: torch.Tensor | None
    first_expert: int


def prepare(weights: Weights, config: Config) -> State:
    """Bring experts into the kernels' order, on the device they are on.

    Parameters
    ----------
    weights : Weights
        On one CUDA device.
    config : Config

    Raises
    ------
    WCodecError
        Naming the tensor whose dtype or shape does not fit, ids that are no experts or are missing, or a
        `top_k` that no call could have.
    UnsupportedError
        Where hidden or intermediate is no multiple of 64.
    """
    import torch

    experts = _check(weights, config)
    if not experts:
        raise UnsupportedError("no local experts", mend="leave the layer out on this GPU")
    local = list(config.local_experts) if config.local_experts is not None else list(range(experts))
    first, table = local[0], None
    device = weights.w13.device
    if local != list(range(first, first + experts)):
        table = torch.full((config.num_experts,), -1, dtype=torch.int32)
        table[torch.tensor(local)] = torch.arange(experts, dtype=torch.int32)
        table = table.to(device)
    rows13 = _interleaved_rows(config.intermediate).to(device)
    scale13, scale2 = weights.w13_scale.view(torch.uint8), weights.w2_scale.view(torch.uint8)
    nan13, nan2 = ((s & 0x7F) == 0x7F for s in (scale13, scale2))
    factors13 = weights.w13_global.float() * DECODED_FACTOR
    factors2 = weights.w2_global.float() * DECODED_FACTOR
    return State(
        config,
        device,
        experts,
        _all_bricks(weights.w13, scale13, rows13),
        weights.w13_global,
        torch.where(nan13.flatten(1).any(1)[:, None], torch.nan, factors13).contiguous(),
        _all_bricks(weights.w2, scale2, slice(None)),
        weights.w2_global,
        torch.where(nan2.flatten(1).any(1), torch.nan, factors2).contiguous(),
        aligned(weights.post_norm),
        table,
        first,
    )


def forward(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    state: State,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the local experts' share of the layer's output.

    No host synchronisation and no branch on values: the call can be captured in a CUDA graph.

    Parameters
    ----------
    x : torch.Tensor of bfloat16, shape (tokens, hidden)
    topk_ids : torch.Tensor of int32 or int64, shape (tokens, top_k)
        Global expert ids; any id that is not local is skipped.
    topk_weights : torch.Tensor of float32, shape (tokens, top_k)
    state : State
    out : torch.Tensor of bfloat16, shape (tokens, hidden), optional
        Contiguous; new where None.

    Returns
    -------
    torch.Tensor of bfloat16, shape (tokens, hidden)
        Zero for tokens without a local route.

    Raises
    ------
    WCodecError
        Where a shape, dtype or device does not fit the state.
    """
    import torch

    from wcodec.cuda.device import device_info
    from wcodec.kernels import moe

    config = state.config
    tokens = x.shape[0]
    if not device_info(state.device.index).has_wgmma:
        raise UnsupportedError("routed experts need compute capability 9.0", mend="use an H100 or H200")
    for name, tensor, columns, dtypes in (
        ("x", x, config.hidden, (torch.bfloat16,)),
        ("topk_ids", topk_ids, config.top_k, (torch.int32, torch.int64)),
        ("topk_weights", topk_weights, config.top_k, (torch.float32,)),
    ):
        if tensor.shape != (tokens, columns) or tensor.dtype not in dtypes or tensor.device != state.device:
            raise WCodecError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}",
                mend=f"pass {dtypes[-1]} {[tokens, columns]} on {state.device}",
            )
    if out is None:
        out = torch.empty(tokens, config.hidden, dtype=torch.bfloat16, device=state.device)
    elif (
        out.shape != x.shape
        or out.dtype != torch.bfloat16
        or out.device != state.device
        or not out.is_contiguous()
        or out.data_ptr() % VIEW_BYTES
    ):
        raise WCodecError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}",
            mend=f"pass contiguous bfloat16 {list(x.shape)} on {state.device}, on {VIEW_BYTES} bytes",
        )
    step = moe.MAX_ROUTES // config.top_k
    with torch.cuda.device(state.device):
        for at in range(0, tokens, step):
            part = slice(at, at + step)
            moe.launch(
                aligned(x[part]),
                topk_ids[part].contiguous(),
                topk_weights[part].contiguous(),
                state,
                out[part],
            )
    return out


def restore(state: State) -> Weights:
    """Return the weights that `prepare` was given, bit for bit, on the CPU; block scales as uint8."""
    import numpy as np
    import torch

    from wcodec.formats import _nvfp4_s5_jit as jit

    def matrices(bricks: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = np.empty((state.experts, rows, cols // 2), dtype=np.uint8)
        scale = np.empty((state.experts, rows, cols // 16), dtype=np.uint8)
        for expert, raw in enumerate(bricks.cpu().numpy()):
            jit.decode_nibbles(raw.reshape(-1, BRICK_BYTES), weight[expert])
            jit.decode_scales(raw.reshape(-1, BRICK_BYTES), -1, scale[expert])
            jit.invert_signs(scale[expert], weight[expert])
        return torch.from_numpy(weight), torch.from_numpy(scale)

    hidden, intermediate = state.config.hidden, state.config.intermediate
    back = _interleaved_rows(intermediate).argsort()
    w13, w13_scale = (m[:, back] for m in matrices(state.w13, 2 * intermediate, hidden))
    w2, w2_scale = matrices(state.w2, hidden, intermediate)
    others = (state.w13_global.cpu(), state.w2_global.cpu(), state.norms.cpu())
    return Weights(w13, w13_scale, others[0], w2, w2_scale, others[1], others[2])


def to_bricks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One matrix to bricks with raw scales (``docs/format_nvfp4.md``).

    Parameters
    ----------
    weight : torch.Tensor of uint8, shape (N, K / 2)
        N and K multiples of 64.
    scale : torch.Tensor of uint8, shape (N, K / 16)

    Returns
    -------
    torch.Tensor of uint8, shape (N / 64 · K / 64 · 2304,)
    """
    import torch

    rows, tiles, chunks = weight.shape[0], weight.shape[0] // TILE, weight.shape[1] * 2 // TILE
    nibbles = torch.stack([weight & 15, weight >> 4], dim=-1).reshape(rows, -1, 16)
    nibbles = nibbles ^ (scale >> 7 << 3)[:, :, None]
    # tile, quarter, half, g, chunk, t, step, column in step
    nibbles = nibbles.reshape(tiles, 4, 2, 8, chunks, 4, 4, 4)
    words = torch.zeros((tiles, 4, 8, chunks, 4, 4), dtype=torch.int32, device=weight.device)
    for p, (mantissa, exponent, sign) in enumerate(PLACES):
        v = nibbles[:, :, p // 2 % 2, ..., p // 4 * 2 + p % 2].int()
        words |= (v & 1) << mantissa | (v >> 1 & 3) << exponent | v >> 3 << sign
    words = words.permute(0, 3, 1, 2, 4, 5).contiguous().view(torch.uint8)
    scales = scale.reshape(tiles, 4, 2, 8, chunks, 4).permute(0, 4, 1, 3, 5, 2)
    return torch.cat([words.reshape(tiles, chunks, -1), scales.reshape(tiles, chunks, -1)], dim=-1).flatten()


def _all_bricks(weights: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """Bricks of every expert, its rows in the order of `rows`; beside the result, one expert at a time."""
    import torch

    experts, bricks = weights.shape[0], weights[0].numel() * 2 // TILE**2
    out = torch.empty(experts, bricks * BRICK_BYTES, dtype=torch.uint8, device=weights.device)
    for expert in range(experts):
        out[expert] = to_bricks(weights[expert, rows], scales[expert, rows])
    return out


def _interleaved_rows(intermediate: int) -> torch.Tensor:
    """Row of w13 per row of the bricks: eight of gate, the same eight of up, and so on."""
    import torch

    eights = torch.arange(intermediate).reshape(-1, 1, 8)
    return torch.cat([eights, eights + intermediate], dim=1).flatten()


def _check(weights: Weights, config: Config) -> int:
    import torch

    hidden, intermediate = config.hidden, config.intermediate
    if hidden % TILE or intermediate % TILE or not hidden or not intermediate:
        raise UnsupportedError(f"hidden {hidden} and intermediate {intermediate} are not multiples of {TILE}")
    experts = weights.w13.shape[0]
    bytes_, scales = (torch.uint8,), (torch.uint8, torch.float8_e4m3fn)
    expected = {
        "w13": (bytes_, (experts, 2 * intermediate, hidden // 2)),
        "w13_scale": (scales, (experts, 2 * intermediate, hidden // 16)),
        "w13_global": ((torch.float32,), (experts, 2)),
        "w2": (bytes_, (experts, hidden, intermediate // 2)),
        "w2_scale": (scales, (experts, hidden, intermediate // 16)),
        "w2_global": ((torch.float32,), (experts,)),
        "post_norm": ((torch.bfloat16,), (experts, hidden)),
    }
    for name, (dtypes, shape) in expected.items():
        tensor = getattr(weights, name)
        if tensor.dtype not in dtypes or tensor.shape != shape:
            raise WCodecError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}", mend=f"pass {dtypes[-1]} {list(shape)}"
            )
        if tensor.device != weights.w13.device:
            raise WCodecError(
                f"{name} is on {tensor.device}, w13 on {weights.w13.device}", mend="move one of them"
            )
    if not 1 <= config.top_k <= config.num_experts:
        raise WCodecError(
            f"top_k is {config.top_k} of {config.num_experts} experts",
            mend=f"pass 1 to {config.num_experts}",
        )
    if config.local_experts is None:
        if experts != config.num_experts:
            raise WCodecError(
                f"weights of {experts} experts where the layer has {config.num_experts}",
                mend="pass the ids of these as local_experts",
            )
    else:
        local = list(config.local_experts)
        if len(local) != experts or len(set(local)) != experts:
            raise WCodecError(f"{len(local)} ids for {experts} experts", mend="pass one id per expert")
        if local and not 0 <= min(local) <= max(local) < config.num_experts:
            raise WCodecError(f"local experts outside 0 … {config.num_experts - 1}")
    return experts
