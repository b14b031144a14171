"""The compressed wgmma product for up to 256 tokens a tile (``sm90_gemm.cu``), host side.

A `GemmConfig` is one compiled instance, a `Bricks` says where a matrix lies, a `Gemm` launches the two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wcodec.cuda.module import Frame, load
from wcodec.cuda.tensormap import encode_tiled
from wcodec.errors import WCodecError
from wcodec.kernels.pack import split_table

if TYPE_CHECKING:
    from wcodec.packed import PackedTensor

SOURCE = "sm90_gemm.cu"
TILE = 64
MAX_SPLIT = 8
SHARED_LIMIT_BYTES = 227 << 10
SM_SHARED_BYTES = 228 << 10  # what the CTAs of one SM share, 1 KB of it per CTA reserved
BRICK_BYTES = {"bf16-w12": 6208, "bf16": 8192}
_DECODERS = {"bf16-w12": 0, "bf16": 1}
_STAGING_BYTES = 1536  # per consumer warp
_SECTOR_BYTES = 32
_PREFETCH_BYTES = 64 << 10
_BLOCK_BYTES = 2048  # partial sums: 8 tokens × 64 rows, FP32
BLOCK_TOKENS = 8
_LAYOUT = "TPPIIPPPQIIIIPI"
_MANY_GROUPS_TOKENS = 128  # up to which four warpgroups have the registers
WHOLE_CLUSTER = 3  # CTAs per tile up to which all of them form one cluster; more form clusters of two


@dataclass(frozen=True)
class GemmConfig:
    """One instance of the kernel.

    Attributes
    ----------
    tokens : int
        Tokens per tile, a multiple of 16 up to 256.
    row_groups : int
        Row tiles (64 rows) per CTA, one consumer warpgroup each: 1, 2, or with up to 128 tokens 4.
    stages : int
        Depth of the ring in shared memory.
    stage_bricks : int
        Columns per stage in bricks of 64: 1 or 2.
    split : int
        CTAs per tile along K; 0 deals the work of all tiles evenly to the resident CTAs.
    ctas_per_sm : int
        CTAs that share one SM.
    cluster : bool
        The CTAs of a tile form clusters and exchange partial sums through shared memory: two or three of them
        one cluster, more of them clusters of two, which then exchange through L2.
    column_groups : int
        Consumer warpgroups that share a row tile and take every second brick: 1, or 2 with one row group and
        stages of two bricks.
    decoder : str
        ``bf16-w12``, or ``bf16`` for uncompressed bricks.
    pair : bool
        Two CTAs that are neighbours in rows form a cluster, and each brings half of the tokens for both.
    early_patches : bool
        Every quarter's patch word is read and its entries located before it is known whether it has any:
        slower without exceptions, faster with them.
    """

    tokens: int
    row_groups: int
    stages: int
    stage_bricks: int
    split: int
    ctas_per_sm: int = 1
    cluster: bool = False
    column_groups: int = 1
    decoder: str = "bf16-w12"
    pair: bool = False
    early_patches: bool = False

    def __post_init__(self) -> None:
        if self.column_groups != 1 and (self.column_groups, self.row_groups, self.stage_bricks) != (2, 1, 2):
            raise ValueError("two column groups take one row group and stages of two bricks")
        if self._groups == 4 and self.tokens > _MANY_GROUPS_TOKENS:
            raise ValueError(f"no registers for {self._groups} warpgroups of {self.tokens} tokens")
        if self.ctas_per_sm > 1 and self._groups > 1:
            raise ValueError("setmaxnreg leaves no registers for a second CTA")
        if not (self.tokens % 16 == 0 and 16 <= self.tokens <= 256 and self.row_groups in (1, 2, 4)):
            raise ValueError(f"no tile of {self.row_groups} × 64 rows and {self.tokens} tokens")
        if self.stages < 2 or self.stage_bricks not in (1, 2):
            raise ValueError(f"no ring of {self.stages} stages of {self.stage_bricks} bricks")
        if not 0 <= self.split <= min(MAX_SPLIT, self._own_blocks):
            raise ValueError(f"no split of {self.tokens} tokens over {self.split} CTAs")
        if self.cluster and (self.split < 2 or self.split % self.cluster_ctas):
            raise ValueError(f"the {self.split} CTAs of a tile are not whole clusters")
        if self.pair and (self.cluster or self.ctas_per_sm > 1):
            raise ValueError("a cluster is a pair or CTAs of one tile")
        if (
            self.shared_bytes > SHARED_LIMIT_BYTES
            or self.ctas_per_sm * (self.shared_bytes + 1024) > SM_SHARED_BYTES
        ):
            raise ValueError(f"{self.ctas_per_sm} × {self.shared_bytes} bytes do not fit into one SM")

    @property
    def cluster_ctas(self) -> int:
        """CTAs per cluster."""
        if self.pair:
            return 2
        return (self.split if self.split <= WHOLE_CLUSTER else 2) if self.cluster else 1

    @property
    def threads(self) -> int:
        """Threads per CTA: the consumers' warpgroups and the producer's."""
        return 128 * (self._groups + 1)

    @property
    def _groups(self) -> int:
        return self.row_groups * self.column_groups

    @property
    def _own_blocks(self) -> int:
        """Blocks of 8 tokens that a warpgroup sums and stores."""
        return self.tokens // (BLOCK_TOKENS * self.column_groups)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return self.stage_bricks * (self.tokens * 128 + self.row_groups * BRICK_BYTES[self.decoder])

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        merge = 0
        if self.split == 0 and self.column_groups == 2:
            merge = self.tokens // BLOCK_TOKENS * _BLOCK_BYTES
        groups = self._groups * (4 * _STAGING_BYTES + 8)
        return self.stages * (self.stage_bytes + 16) + groups + merge

    @property
    def _clusters(self) -> int:
        """Clusters per tile, which exchange partial sums through L2."""
        return max(self.split, 1) // (self.cluster_ctas if self.cluster else 1)

    @property
    def _letter_bytes(self) -> int:
        """Partial sums that one CTA sends another through L2."""
        near = -(-self._own_blocks // (self.cluster_ctas if self.cluster else 1))
        return self._groups * -(-near // self._clusters) * _BLOCK_BYTES

    def defines(self, **extra: int) -> dict[str, int | str]:
        """Macros of the instance; `extra` adds the experiments' (``WC_ABLATE``, …)."""
        return {
            "WC_TOKENS": self.tokens,
            "WC_ROW_GROUPS": self.row_groups,
            "WC_COLUMN_GROUPS": self.column_groups,
            "WC_STAGES": self.stages,
            "WC_STAGE_BRICKS": self.stage_bricks,
            "WC_SPLIT": self.split,
            "WC_CTAS_PER_SM": self.ctas_per_sm,
            "WC_CLUSTER": self.cluster_ctas if self.cluster else 1,
            "WC_PAIR": 1 + self.pair,
            "WC_EARLY_PATCHES": int(self.early_patches),
            "WC_DECODER": _DECODERS[self.decoder],
            "WC_SHARED_BYTES": self.shared_bytes,
            **extra,
        }

    def units(self, cols: int) -> int:
        """Stages along K."""
        return -(-cols // (TILE * self.stage_bricks))

    def tiles(self, rows: int, tokens: int) -> int:
        """Tiles of one product; of a pair's two tiles, both are computed."""
        pair = 1 + self.pair
        return -(-rows // (TILE * self.row_groups * pair)) * pair * -(-tokens // self.tokens)

    def grid(self, rows: int, cols: int, tokens: int, multiprocessors: int) -> int:
        """CTAs of one product.

        Raises
        ------
        WCodecError
            Where a split has more CTAs per tile than stages, or where more CTAs wait for one another than
            are resident.
        """
        tiles, units, resident = (
            self.tiles(rows, tokens),
            self.units(cols),
            multiprocessors * self.ctas_per_sm,
        )
        if self.split == 0:
            pair = 1 + self.pair
            return min(resident // pair, tiles // pair * units) * pair
        if self.split > units or (self._clusters > 1 and tiles * self.split > resident):
            raise WCodecError(f"{rows} × {cols} with {tokens} tokens cannot be split {self.split} ways")
        return tiles * self.split

    def partial_bytes(self, rows: int, cols: int, tokens: int, multiprocessors: int) -> int:
        """Workspace for partial sums: zero before the first launch, left zero by every launch."""
        if self.split == 0:
            return self.grid(rows, cols, tokens, multiprocessors) * self._letter_bytes
        return self.tiles(rows, tokens) * self.split * (self._clusters - 1) * self._letter_bytes


@dataclass(frozen=True)
class Bricks:
    """Where a matrix of bricks lies on the device.

    Attributes
    ----------
    address, overflow : int
        Device addresses of the bricks (16-byte aligned) and of the overflow list.
    overflow_count : int
        Entries in the list.
    table : tuple of int
        The footer's table as two words.
    rows, cols : int
        N and K.
    """

    address: int
    overflow: int
    overflow_count: int
    table: tuple[int, int]
    rows: int
    cols: int

    @classmethod
    def of(cls, packed: PackedTensor, address: int) -> Bricks:
        """Describe a validated ``bf16-w12`` blob that lies at `address` on the device."""
        rows, cols = packed.matrix
        bricks = -(-rows // TILE) * -(-cols // TILE) * BRICK_BYTES["bf16-w12"]
        table = split_table(bytes(packed.table))
        return cls(address, address + bricks, packed.overflow_count, table, rows, cols)

    @property
    def overflow_sectors(self) -> int:
        """How much of the list a product asks for at its start, in sectors of L2.

        A list so long that this limit cuts it belongs to a matrix whose warps all wait for their entries, and
        must not delay the weights.
        """
        return min(-(-4 * self.overflow_count // _SECTOR_BYTES), _PREFETCH_BYTES // _SECTOR_BYTES)


@functools.lru_cache(maxsize=4096)
def token_map(address: int, tokens: int, cols: int, stride: int, box: int) -> bytes:
    """Tensor map of x: `tokens` rows of `cols` BF16, `stride` elements apart, in boxes of 64 × `box`."""
    return encode_tiled(address, "bf16", (cols, tokens), (TILE, box), strides=(2 * stride,)).data


class Gemm:
    """One instance of the kernel on one device, ready for one matrix and number of tokens.

    Parameters
    ----------
    config : GemmConfig
    bricks : Bricks
    tokens : int
        m.
    device : torch.device, str or int
        CUDA device of compute capability 9.0.
    multiprocessors : int
        SMs of that device.
    extra : int
        Further macros, for experiments.
    """

    def __init__(
        self,
        config: GemmConfig,
        bricks: Bricks,
        tokens: int,
        device: object,
        multiprocessors: int,
        **extra: int,
    ) -> None:
        self.config, self.bricks, self.tokens = config, bricks, tokens
        grid = config.grid(bricks.rows, bricks.cols, tokens, multiprocessors)
        kernel = load(SOURCE, config.defines(**extra), device)
        self._frame: Frame = kernel.frame(
            _LAYOUT, grid, config.threads, config.shared_bytes, config.cluster_ctas
        )
        self._box = config.tokens // (1 + config.pair)
        self._token_tiles = -(-tokens // config.tokens)
        self._k_bricks = -(-bricks.cols // TILE)

    def __call__(
        self,
        stream: int,
        x: int,
        x_stride: int,
        out: int,
        out_stride: int,
        *,
        partials: int = 0,
        bias: int = 0,
        stamps: int = 0,
    ) -> None:
        """Launch ``out = x · Wᵀ + bias``.

        Parameters
        ----------
        stream : int
            CUDA stream handle.
        x, out, bias : int
            Device addresses: x (m × K, BF16, 16-byte aligned), out (m × N, BF16), bias (N, BF16) or 0.
        x_stride, out_stride : int
            Elements between rows; `x_stride` is a multiple of 8.
        partials : int
            Address of `GemmConfig.partial_bytes` bytes that no overlapping launch uses.
        stamps : int
            With ``WC_TIMELINE``: 8 × 8 bytes per CTA.
        """
        b = self.bricks
        tensor_map = token_map(x, self.tokens, b.cols, x_stride, self._box)
        self._frame(
            stream,
            tensor_map,
            b.address,
            b.overflow,
            *b.table,
            out,
            bias,
            partials,
            out_stride,
            b.rows,
            self.tokens,
            self._k_bricks,
            self._token_tiles,
            stamps,
            b.overflow_sectors,
        )
