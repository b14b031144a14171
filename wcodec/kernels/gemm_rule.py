"""Which instance of the wgmma product serves a shape: the rule, and what is worth timing beside it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from wcodec.kernels.gemm import BLOCK_TOKENS, MAX_SPLIT, TILE, WHOLE_CLUSTER, GemmConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wcodec.cuda.device import DeviceInfo

MIN_TOKENS, MAX_TOKENS = 8, 256  # that `candidates` serves with one tile of tokens
_TILE_TOKENS = (16, 32, 64, 128, 256)
_MAX_STAGES = 12
_SHORT_BRICKS = 32  # K of at most 2,048: an exchange costs more than it saves
_LONG_BRICKS = 128  # K of more than 8,192: x is read so often that an exchange saves time
_MANY_CTAS = 4  # per tile, above which the exchange costs more than reading x more often
_LEAST_FILL = 0.7  # of the SMs
_LEAST_STAGES = 5  # of a ring that may be too deep
_VARIED_TOKENS = 64  # from which exceptions and rings decide between instances
_FEW_TOKENS = 32  # so few that posting whole tiles costs nothing: work may be dealt evenly whatever the fill


def _deepest(
    tokens: int,
    row_groups: int,
    stage_bricks: int,
    split: int,
    *,
    cluster: bool = False,
    column_groups: int = 1,
    pair: bool = False,
) -> GemmConfig | None:
    """Return the instance with as many stages as fit into shared memory; None where two do not."""
    for stages in range(_MAX_STAGES, 1, -1):
        try:
            return GemmConfig(
                tokens,
                row_groups,
                stages,
                stage_bricks,
                split,
                cluster=cluster,
                column_groups=column_groups,
                pair=pair,
            )
        except ValueError:
            continue
    return None


def default_config(n: int, k: int, tokens: int, info: DeviceInfo) -> GemmConfig:
    """Return the rule's instance for a product that nobody measured.

    Wide tiles (128 rows) read x half as often, narrow ones (64 rows, two column groups) need fewer CTAs per
    tile and so less exchange: up to 64 tokens x is small and narrow tiles win, above that wide ones, unless K
    is short or the rows are few. Of 256 tokens the exchange is large and narrow tiles win again, unless K is
    very long; nothing hides their patches, which are got ready early. Where there are more tiles than SMs,
    the work is dealt evenly to pairs of CTAs, or tiles of 256 rows fill the SMs once. Column groups take
    bricks in pairs: where K has an odd number of them, one group takes all.

    Parameters
    ----------
    n, k, tokens : int
        Sizes of the product.
    info : DeviceInfo
        The GPU.
    """
    tile = next((count for count in _TILE_TOKENS if tokens <= count), MAX_TOKENS)
    tokens_tiles = -(-tokens // tile)
    widest, wide, narrow = (-(-n // (groups * TILE)) * tokens_tiles for groups in (4, 2, 1))
    bricks, processors = -(-k // TILE), info.multiprocessors
    if wide > processors or (tile <= 64 and narrow > processors):
        if tile in (64, 128) and _LEAST_FILL * processors <= widest <= processors:
            config = _deepest(tile, 4, 128 // tile, 1)
        else:
            config = _deepest(tile, 2, 1 if tile == MAX_TOKENS else 2, 0, pair=True)
    else:
        split, narrow_split = processors // wide, processors // narrow
        crowded = split > _MANY_CTAS or (bricks <= _SHORT_BRICKS and narrow <= processors)
        if tile == MAX_TOKENS and 1 <= narrow_split <= WHOLE_CLUSTER and bricks <= _LONG_BRICKS:
            config = _split(tile, 1, 1, narrow_split, bricks, cluster=narrow_split > 1)
        elif tile > 64 and not crowded:
            config = _split(tile, 2, 1, split, bricks, cluster=split % 2 == 0)
        elif tile == MAX_TOKENS:
            config = _split(tile // 2, 2, 2, processors // (2 * wide), bricks)
        else:
            near = tile <= 64 and narrow_split in (2, 3)
            config = _split(tile, 1, 2, narrow_split, bricks, cluster=near, column_groups=2 - bricks % 2)
    assert config is not None, "a ring of two stages of these tiles fits"
    if tile == MAX_TOKENS and config.row_groups == 1:
        return dataclasses.replace(config, early_patches=True)
    return config


def _split(
    tokens: int,
    row_groups: int,
    stage_bricks: int,
    split: int,
    bricks: int,
    *,
    cluster: bool = False,
    column_groups: int = 1,
) -> GemmConfig | None:
    """Return the deepest instance whose split is `split` or as near to it as K and the tokens allow."""
    most = min(MAX_SPLIT, tokens // (BLOCK_TOKENS * column_groups), -(-bricks // stage_bricks))
    limited = max(1, min(split, most))
    return _deepest(
        tokens,
        row_groups,
        stage_bricks,
        limited,
        cluster=cluster and limited == split,
        column_groups=column_groups,
    )


def candidates(n: int, k: int, tokens: int, info: DeviceInfo) -> list[GemmConfig]:
    """Return the instances worth timing for a product, the rule's first; none outside 8 … 256 tokens.

    A tile of 16 tokens is too small to be summed by more than two CTAs, so 32 are tried there too. Structures
    that were never the fastest are left out: 256 rows with K split, pairs without work dealt evenly.
    """
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        return []
    found = list(_variants(default_config(n, k, tokens, info), k))
    tile = next(count for count in _TILE_TOKENS if tokens <= count)
    tiles_of_tokens = {MAX_TOKENS: (MAX_TOKENS, 128), 16: (16, 32)}.get(tile, (tile,))
    for count, (rows, columns), bricks, split, cluster, pair in itertools.product(
        tiles_of_tokens,
        ((1, 1), (1, 2), (2, 1), (4, 1)),
        (1, 2),
        range(MAX_SPLIT + 1),
        (False, True),
        (False, True),
    ):
        if (rows == 4 and split > 1) or (pair and (split != 0 or rows != 2)):
            continue
        config = _deepest(count, rows, bricks, split, cluster=cluster, column_groups=columns, pair=pair)
        odd = -(-k // TILE) % 2  # a brick without a partner
        if config is None or config in found or split > config.units(k) or (odd and columns == 2):
            continue
        tiles = config.tiles(n, tokens)
        fill = tiles * max(split, 1) / info.multiprocessors
        if (fill > 1 or count <= _FEW_TOKENS) if split == 0 else _LEAST_FILL <= fill <= 1:
            found += [variant for variant in _variants(config, k) if variant not in found]
    return found


def _variants(config: GemmConfig, k: int) -> Iterator[GemmConfig]:
    """Yield an instance and what is to be tried beside it.

    A single row tile has no other to hide its patches, and a ring that holds most of what a CTA reads delays
    the first bricks by asking for the last ones.
    """
    yield config
    if config.tokens < _VARIED_TOKENS:
        return
    shallower = config.stages - 1
    read = -(-config.units(k) // max(config.split, 1))
    crowded = config.split > 0 and _LEAST_STAGES <= shallower < read < 2 * config.stages
    for stages in (config.stages, shallower) if crowded else (config.stages,):
        for early in (False, True) if config.row_groups == 1 else (False,):
            variant = dataclasses.replace(config, stages=stages, early_patches=early)
            if variant != config:
                yield variant
