"""The fused product for 1 … 32 tokens on mma.sync (``sm80_gemv.cu``), host side.

A `GemvConfig` is one compiled instance; a `Gemv` launches it for one matrix. `default_config` is the rule for
shapes that nobody measured, `candidates` what ``wcodec tune`` times; what it found on H200 lies beside this
file in ``h200.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wcodec.cuda.module import Frame, load
from wcodec.errors import WCodecError

if TYPE_CHECKING:
    from wcodec.cuda.device import DeviceInfo
    from wcodec.kernels.gemm import Bricks

SOURCE = "sm80_gemv.cu"
TOKENS = (1, 8, 16, 32)
MAX_TOKENS = 32
MAX_SPLIT = 8
_FIRST_CLUSTERS = (9, 0)
TILE = 64
QUARTER_ROWS = 16
SHARED_LIMIT_BYTES = 227 << 10
_CHUNK_ROW_BYTES = 2 * TILE
_SUM_STRIDE_BYTES = 20 * 4
_SLOT_BYTES = {"bf16-w12": 1536 + 16, "bf16": 2048}  # one quarter in a shared-memory ring
_HIGH_BYTES = 1024  # of one quarter, where a warp patches it
_BARRIER_BYTES = 8
_DECODERS = {"bf16-w12": 0, "bf16": 1}
LAYOUT = "PPIIPIPPIIIII"


@dataclass(frozen=True)
class GemvConfig:
    """One instance of the kernel.

    Attributes
    ----------
    tokens : int
        Tokens at most: 1, 8, 16 or 32.
    k_warps : int
        Groups of warps that share K.
    row_warps : int
        Warps of a group, one beside another along the rows.
    quarters : int
        Quarters (16 rows) per warp: 1, 2 or 4.
    stages : int
        Chunks of 64 columns in flight per warp: 1 in registers, from 2 on in shared memory.
    register_ring : bool
        Keep them in registers instead of shared memory.
    min_ctas : int
        CTAs that must fit into one SM; bounds the registers.
    split : int
        CTAs of a cluster that share rows and split K; above 1 only on compute capability 9.0 and newer.
    eager : bool
        Ask for the next chunk before waiting for the current one. For rings in shared memory, one row warp.
    decoder : str
        ``bf16-w12``, or ``bf16`` for uncompressed bricks.
    out_f32 : bool
        Write FP32 instead of BF16.
    """

    tokens: int
    k_warps: int
    row_warps: int
    quarters: int
    stages: int
    register_ring: bool
    min_ctas: int
    split: int = 1
    eager: bool = False
    decoder: str = "bf16-w12"
    out_f32: bool = False

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS or self.quarters not in (1, 2, 4):
            raise ValueError(f"no instance for {self.tokens} tokens and {self.quarters} quarters")
        if not 1 <= self.k_warps * self.row_warps <= 32:
            raise ValueError(f"no CTA of {self.k_warps} × {self.row_warps} warps")
        if self.rows < TILE and TILE % self.rows:
            # The last CTA would read behind the last brick: only CTAs of more rows are kept from it.
            raise ValueError(f"CTAs of {self.rows} rows do not divide a row tile")
        if self.stages != 1 if self.register_ring else self.stages < 2:
            memory = "registers" if self.register_ring else "shared memory"
            raise ValueError(f"no ring of {self.stages} stages in {memory}")
        if not self.register_ring and self.row_warps > 1 and self.k_warps > 15:
            raise ValueError(f"no ring of {self.k_warps} groups that share x")
        if self.eager and (self.register_ring or self.row_warps > 1):
            raise ValueError(f"no eager copies of {self.row_warps} row warps or into registers")
        if not 1 <= self.split <= MAX_SPLIT:
            raise ValueError(f"no cluster of {self.split} CTAs")
        if self._sum_pitch < self.quarters * self.tokens * _SUM_STRIDE_BYTES:
            raise ValueError(f"{self.stages} stages leave no room for the partial sums")
        if self.shared_bytes > SHARED_LIMIT_BYTES:
            raise ValueError(f"{self.shared_bytes} bytes of shared memory do not fit into one SM")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.k_warps * self.row_warps

    @property
    def rows(self) -> int:
        """Rows of W per CTA."""
        return self.row_warps * self.quarters * QUARTER_ROWS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        x_slot = self.tokens * _CHUNK_ROW_BYTES
        if self.register_ring:
            scratch = _HIGH_BYTES if x_slot < _HIGH_BYTES else 0
            ring = self.k_warps * self.row_warps * (2 * x_slot + scratch)
        else:
            weights = self.row_warps * self.quarters * _SLOT_BYTES[self.decoder]
            ring = self.k_warps * self.stages * (x_slot + weights)
        return ring + self._exchange_bytes

    @property
    def _exchange_bytes(self) -> int:
        if self.split == 1:
            return 0
        fours = self.rows * self.tokens // 4
        return self.split * -(-fours // self.split) * 16 + _BARRIER_BYTES

    @property
    def _sum_pitch(self) -> int:
        if self.register_ring:
            return 2 * self.tokens * _CHUNK_ROW_BYTES
        return self.stages * self.quarters * _SLOT_BYTES[self.decoder]

    def defines(self) -> dict[str, int | str]:
        """Macros of the instance."""
        return {
            "WC_TOKENS": self.tokens,
            "WC_K_WARPS": self.k_warps,
            "WC_ROW_WARPS": self.row_warps,
            "WC_QUARTERS": self.quarters,
            "WC_STAGES": self.stages,
            "WC_SPLIT": self.split,
            "WC_REGISTER_RING": int(self.register_ring),
            "WC_EAGER": int(self.eager),
            "WC_MIN_CTAS": self.min_ctas,
            "WC_DECODER": _DECODERS[self.decoder],
            "WC_OUT_F32": int(self.out_f32),
        }

    def grid(self, rows: int) -> int:
        """CTAs of one product."""
        return -(-rows // self.rows) * self.split


def _registers(tokens: int, k_warps: int, row_warps: int, quarters: int, min_ctas: int) -> GemvConfig:
    return GemvConfig(tokens, k_warps, row_warps, quarters, 1, True, min_ctas)


def _shared(
    tokens: int,
    k_warps: int,
    row_warps: int,
    quarters: int,
    stages: int,
    min_ctas: int,
    split: int = 1,
    *,
    eager: bool = False,
) -> GemvConfig:
    return GemvConfig(tokens, k_warps, row_warps, quarters, stages, False, min_ctas, split, eager)


def _eager(tokens: int, k_warps: int, min_ctas: int = 1) -> GemvConfig:
    return _shared(tokens, k_warps, 1, 2, 2, min_ctas, eager=True)


#: The rule. Per number of tokens, instances with the most rows (N) that they are given: those that won on the
#: shapes measured on H200. One wave of CTAs: 16 rows each up to 132 × 16, then 32, one or two CTAs per SM,
#: rings in shared memory; with many tokens 64 rows, side by side, so that they share x. More rows: as many
#: small CTAs per SM as fit, rings in registers; for 32 tokens 128 rows, in shared memory.
INSTANCES: dict[int, tuple[tuple[int, GemvConfig], ...]] = {
    1: (
        (2112, _shared(1, 16, 1, 1, 4, 1)),
        (4224, _eager(1, 16)),
        (8448, _shared(1, 10, 1, 2, 2, 2)),
        (1 << 32, _registers(1, 4, 1, 2, 7)),
    ),
    8: (
        (2112, _shared(8, 16, 1, 1, 3, 1)),
        (4224, _eager(8, 16)),
        (8448, _shared(8, 8, 1, 2, 2, 2)),
        (1 << 32, _registers(8, 4, 1, 2, 7)),
    ),
    16: (
        (2112, _shared(16, 16, 1, 1, 3, 1)),
        (3072, _eager(16, 16)),
        (4224, _eager(16, 12)),
        (8448, _shared(16, 4, 2, 2, 3, 1)),
        (1 << 32, _registers(16, 3, 1, 2, 7)),
    ),
    32: (
        (2112, _shared(32, 8, 1, 1, 3, 1)),
        (3072, _shared(32, 6, 2, 2, 3, 1, split=3)),
        (4224, _shared(32, 4, 2, 2, 3, 1, split=2)),
        (16384, _shared(32, 4, 2, 2, 3, 1)),
        (1 << 32, _shared(32, 2, 4, 2, 2, 2)),
    ),
}

#: Within 2 % of the best on some shape: worth timing beside the rule's.
NEAR: dict[int, tuple[GemvConfig, ...]] = {
    1: (
        _shared(1, 12, 1, 2, 3, 1),
        _shared(1, 8, 1, 2, 2, 2),
        _eager(1, 12),
    ),
    8: (
        _shared(8, 10, 1, 2, 2, 2),
        _shared(8, 12, 1, 2, 3, 1),
        _shared(8, 6, 2, 2, 3, 1),
        _eager(8, 12),
        _eager(8, 8, 2),
    ),
    16: (
        _shared(16, 12, 1, 2, 3, 1),
        _shared(16, 8, 1, 2, 2, 2),
        _shared(16, 6, 2, 2, 3, 1),
        _shared(16, 2, 4, 2, 2, 3),
        _eager(16, 8, 2),
    ),
    32: (
        _shared(32, 5, 2, 2, 3, 1, split=3),
        _shared(32, 6, 2, 2, 2, 1, split=2),
        _shared(32, 8, 2, 2, 2, 1),
    ),
}


def instances(tokens: int, info: DeviceInfo) -> tuple[tuple[int, GemvConfig], ...]:
    """Return the row of `INSTANCES` for a number of tokens, as far as a GPU can run it."""
    return tuple(
        (rows, config)
        for rows, found in INSTANCES[_most_tokens(tokens)]
        if (config := _adapted(found, info)) is not None
    )


def _most_tokens(tokens: int) -> int:
    return next(count for count in INSTANCES if tokens <= count)


def _adapted(config: GemvConfig, info: DeviceInfo) -> GemvConfig | None:
    """Return an instance as a GPU can run it.

    Other GPUs than Hopper's may have less shared memory and no clusters, and their code needs more registers
    than the timings on Hopper led to: no bound, and no register ring in CTAs so large that 64 is the limit.
    """
    if info.capability == _FIRST_CLUSTERS:
        return config
    if config.shared_bytes > info.max_shared_bytes or (config.register_ring and config.threads > 512):
        return None
    if config.split > 1 and info.capability < _FIRST_CLUSTERS:
        return None
    return replace(config, min_ctas=1)


def default_config(n: int, k: int, tokens: int, info: DeviceInfo) -> GemvConfig:
    """Return the rule's instance for a product that nobody measured.

    Parameters
    ----------
    n, k, tokens : int
        Sizes of the product; at most `MAX_TOKENS` tokens.
    info : DeviceInfo
        The GPU.
    """
    found = instances(tokens, info)
    return next((config for rows, config in found if n <= rows), found[-1][1])


def candidates(n: int, k: int, tokens: int, info: DeviceInfo) -> list[GemvConfig]:
    """Return the instances worth timing for a product, the rule's first; none above `MAX_TOKENS`."""
    if tokens > MAX_TOKENS:
        return []
    near = (_adapted(config, info) for config in NEAR[_most_tokens(tokens)])
    ruled = (config for _, config in instances(tokens, info))
    found = [default_config(n, k, tokens, info), *ruled, *(config for config in near if config)]
    return list(dict.fromkeys(found))


class Gemv:
    """One instance of the kernel on one device, ready for one matrix and number of tokens.

    Parameters
    ----------
    config : GemvConfig
    bricks : Bricks
        The matrix.
    tokens : int
        m, at most ``config.tokens``.
    device : torch.device, str or int
        CUDA device of compute capability 8.0 or newer.
    """

    def __init__(self, config: GemvConfig, bricks: Bricks, tokens: int, device: object) -> None:
        if not 1 <= tokens <= config.tokens:
            raise WCodecError(f"{tokens} tokens for an instance of at most {config.tokens}")
        self.config, self.bricks, self.tokens = config, bricks, tokens
        kernel = load(SOURCE, config.defines(), device)
        grid = config.grid(bricks.rows)
        self._frame: Frame = kernel.frame(LAYOUT, grid, config.threads, config.shared_bytes, config.split)

    def __call__(
        self, stream: int, x: int, x_stride: int, out: int, out_stride: int, *, bias: int = 0
    ) -> None:
        """Launch ``out = x · Wᵀ + bias``.

        Parameters
        ----------
        stream : int
            CUDA stream handle.
        x, out, bias : int
            Device addresses: x (m × K, BF16, 16-byte aligned), out (m × N, BF16 or FP32), bias (N, BF16)
            or 0.
        x_stride, out_stride : int
            Elements between rows. `x_stride` is a multiple of 8; where K is not, zeros fill x up to the next.
        """
        b = self.bricks
        self._frame(
            stream,
            b.address,
            b.overflow,
            *b.table,
            x,
            x_stride,
            bias,
            out,
            out_stride,
            b.rows,
            b.cols,
            self.tokens,
            b.overflow_sectors,
        )
