"""Router logits in one launch: BF16 tokens times the exact FP32 weights, FP32 out.

Few tokens go through plain FP32 multiply-adds (``router_fma.cu``), more through the tensor cores, for which
each weight is split in registers into two or three BF16 values that add up to it (``sm90_router.cu``). Both
read the checkpoint's own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wcodec.cuda import driver
from wcodec.cuda.device import DeviceInfo, device_index, device_info
from wcodec.cuda.module import load
from wcodec.cuda.tensormap import encode_tiled
from wcodec.errors import UnsupportedError
from wcodec.kernels.gemm import token_map

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 256

_ROW_TILE = 64
_STEP_COLS = 64
_BOX_COLS = 32
_MAX_SPLITS = 64
_SLOT_BYTES = 16
_SMEM_ALIGNMENT = 1024


@dataclass(frozen=True)
class FmaConfig:
    """How ``router_fma.cu`` cuts its work: rows per CTA, and weight loads in flight per row and thread."""

    rows: int
    depth: int

    threads = 256

    def defines(self, tokens: int) -> dict[str, int]:
        """Macros of the instance for up to 8 tokens."""
        at_least = next(size for size in (1, 2, 4, 8) if tokens <= size)
        return {"WC_TOKENS": at_least, "WC_ROWS": self.rows, "WC_DEPTH": self.depth}


@dataclass(frozen=True)
class WgmmaConfig:
    """How ``sm90_router.cu`` cuts its work: tokens per CTA, stages of the ring, consumer warpgroups."""

    tokens: int
    stages: int
    consumers: int

    def __post_init__(self) -> None:
        if self.stages % self.consumers:
            raise ValueError(f"{self.stages} stages are not dealt out evenly to {self.consumers} consumers")

    @property
    def threads(self) -> int:
        """Threads per CTA: the consumers and a warp that copies."""
        return 128 * self.consumers + 32

    @property
    def slots(self) -> int:
        """16-byte pieces of a tile's sums."""
        return 16 * self.tokens

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ring, sums of every warpgroup, barriers, alignment."""
        stage = 4 * _ROW_TILE * _STEP_COLS + 2 * self.tokens * _STEP_COLS
        sums = _SLOT_BYTES * self.slots * self.consumers
        return self.stages * (stage + 16) + sums + _SMEM_ALIGNMENT

    def defines(self, parts: int) -> dict[str, int]:
        """Macros of the instance; `parts` BF16 values per weight."""
        return {
            "WC_PARTS": parts,
            "WC_TOKENS": self.tokens,
            "WC_STAGES": self.stages,
            "WC_CONSUMERS": self.consumers,
        }

    def grid(self, rows: int, cols: int, tokens: int, processors: int) -> tuple[int, int, int]:
        """CTAs: K splits, row tiles, token tiles; K is split until one wave is full."""
        tiles = -(-rows // _ROW_TILE) * -(-tokens // self.tokens)
        most = min(processors // tiles, _MAX_SPLITS, -(-cols // _STEP_COLS))
        splits = 1 << max(most, 1).bit_length() - 1
        splits = max(splits, self.slots // (128 * self.consumers))  # a slice has a thread per slot
        return splits, -(-rows // _ROW_TILE), -(-tokens // self.tokens)

    def workspace_bytes(self, grid: tuple[int, int, int]) -> int:
        """Bytes of the inboxes, zero between launches."""
        return grid[0] * grid[1] * grid[2] * self.slots * _SLOT_BYTES


# Fastest on an H200 for 256 × 8192 weights, by the largest number of tokens they serve.
CONFIGS: dict[int, FmaConfig | WgmmaConfig] = {
    8: FmaConfig(2, 8),
    16: WgmmaConfig(16, 4, 1),
    MAX_TOKENS: WgmmaConfig(64, 8, 2),
}


def choose(tokens: int) -> FmaConfig | WgmmaConfig:
    """Return the configuration for 1 … 256 tokens."""
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


def serves(weight: torch.Tensor, tokens: int, parts: int | None, info: DeviceInfo) -> bool:
    """Whether one launch multiplies `tokens` tokens by an FP32 matrix exactly on a GPU.

    Parameters
    ----------
    weight : torch.Tensor of float32, shape (N, K)
    tokens : int
    parts : int or None
        From `exact_parts`.
    info : DeviceInfo
    """
    if not 0 < tokens <= MAX_TOKENS or not weight.numel() or weight.shape[1] % 8 or weight.stride(1) != 1:
        return False
    if weight.data_ptr() % 16 or weight.stride(0) % 4:
        return False
    config = choose(tokens)
    if isinstance(config, FmaConfig):
        return True
    rows, cols = weight.shape
    splits, row_tiles, token_tiles = config.grid(rows, cols, tokens, info.multiprocessors)
    # Its CTAs wait for each other, so all must be resident.
    one_wave = splits * row_tiles * token_tiles <= info.multiprocessors
    return info.has_wgmma and parts is not None and one_wave


class Router:
    """The logits of one router for one number of tokens, bound to its weights.

    Parameters
    ----------
    weight : torch.Tensor of float32, shape (N, K)
        On a CUDA device; kept alive.
    tokens : int
        m, 1 … 256.
    parts : int or None
        From `exact_parts`; None serves few tokens only.
    config : FmaConfig or WgmmaConfig, optional
        From `choose` by default.

    Attributes
    ----------
    workspace_bytes : int
        Zeroed bytes that a launch needs and leaves zero.
    arithmetic : str
        How the exact FP32 weights are multiplied, for people.

    Raises
    ------
    UnsupportedError
        Where `serves` is false.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        tokens: int,
        parts: int | None,
        *,
        config: FmaConfig | WgmmaConfig | None = None,
    ) -> None:
        index = device_index(weight.device)
        info = device_info(index)
        if not serves(weight, tokens, parts, info):
            raise UnsupportedError(f"no router kernel for {tokens} tokens and weights {list(weight.shape)}")
        self.weight, self.tokens = weight, tokens
        self._config = config = config or choose(tokens)
        rows, cols = weight.shape
        self.workspace_bytes = 0
        if isinstance(config, FmaConfig):
            self.arithmetic = "FP32 multiply-adds"
            kernel = load("router_fma.cu", config.defines(tokens), index)
            self._frame = kernel.frame("PQPQPIII", -(-rows // config.rows), config.threads)
            return
        assert parts is not None
        self.arithmetic = f"weights split exactly into {'hi + lo' if parts == 2 else 'hi + mid + lo'} in BF16"
        grid = config.grid(rows, cols, tokens, info.multiprocessors)
        self.workspace_bytes = config.workspace_bytes(grid)
        self._slice_shift = (config.slots // grid[0]).bit_length() - 1
        with driver.current_context(index):  # weights are prepared in threads that made no CUDA call yet
            self._weight_map = encode_tiled(
                weight.data_ptr(),
                "f32",
                (cols, rows),
                (_BOX_COLS, _ROW_TILE),
                strides=(4 * weight.stride(0),),
            ).data
        kernel = load("sm90_router.cu", config.defines(parts), index)
        self._frame = kernel.frame("TTPPIIII", grid, config.threads, config.shared_bytes)

    def __call__(self, stream: int, x: int, x_stride: int, out: int, *, workspace: int = 0) -> None:
        """Launch ``out = x · weightᵀ``; the same bits every time.

        Parameters
        ----------
        stream : int
            CUDA stream handle.
        x, out : int
            Device addresses: x (m × K, BF16, 16-byte aligned, finite), out (m × N, FP32, contiguous). An
            infinity in x would meet the zeros among the parts and give NaN.
        x_stride : int
            Elements between the rows of x, a multiple of 8.
        workspace : int
            Address of `workspace_bytes` zeroed bytes that no overlapping launch uses.
        """
        rows, cols = self.weight.shape
        config = self._config
        if isinstance(config, FmaConfig):
            stride = self.weight.stride(0)
            self._frame(stream, self.weight.data_ptr(), stride, x, x_stride, out, rows, cols, self.tokens)
            return
        tokens_map = token_map(x, self.tokens, cols, x_stride, config.tokens)
        self._frame(
            stream, self._weight_map, tokens_map, out, workspace, rows, cols, self.tokens, self._slice_shift
        )
