"""Every configuration of the product kernels that can be chosen on GPUs of compute capability 9.0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from wcodec.cuda.device import DeviceInfo
from wcodec.kernels import gemm_rule, gemv
from wcodec.kernels.gemm import TILE, GemmConfig
from wcodec.kernels.gemv import GemvConfig
from wcodec.tables import Entry, packaged

Config = TypeVar("Config", GemvConfig, GemmConfig)

H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20, 141 << 30)

# Shapes in tiles of 64 that between them lead the wgmma rule to each of its branches: every split that fills
# the SMs, none, more tiles than SMs; K of few bricks, of many, and of an odd number.
_FEW_ROW_TILES = (*range(1, 6), *range(8, 15), *range(16, 21), 22, 23, 26, 27, 32, 33, 34, 36, 40, 44)
_MANY_ROW_TILES = (45, 66, 67, 88, 132, 133, 264, 265, 300)
_BRICKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 33, 34)
_TOKENS = (16, 32, 64, 128, 256)


def entries_of(kernel: str) -> list[Entry]:
    """Entries of one kernel in the tables that the package brings."""
    return [entry for _, _, table in packaged() for entry in table if entry.kernel == kernel]


def _gemv() -> set[GemvConfig]:
    tables = {GemvConfig(**(entry.config or {})) for entry in entries_of("gemv")}
    return tables | {config for row in gemv.INSTANCES.values() for _, config in row}


def _gemm() -> set[GemmConfig]:
    tables = {GemmConfig(**(entry.config or {})) for entry in entries_of("gemm")}
    shapes = itertools.product((*_FEW_ROW_TILES, *_MANY_ROW_TILES), _BRICKS, _TOKENS)
    return tables | {gemm_rule.default_config(TILE * n, TILE * k, m, H200) for n, k, m in shapes}


def _named(configs: Iterable[Config], name: Callable[[Config], str]) -> dict[str, Config]:
    """Configurations by name; no two may share one, because one of them would go untested."""
    ordered = sorted(configs, key=name)
    named = {name(config): config for config in ordered}
    assert len(named) == len(ordered)
    return named


def _gemv_name(c: GemvConfig) -> str:
    ring = "registers" if c.register_ring else "eager" if c.eager else "shared"
    return f"{c.tokens} tokens, {c.k_warps}x{c.row_warps}x{c.quarters}, {ring} {c.stages}, split {c.split}"


def _loop_name(c: GemmConfig) -> str:
    early = ", early patches" if c.early_patches else ""
    return (
        f"{c.tokens} tokens, {c.row_groups} rows, {c.column_groups} columns, {c.stage_bricks} bricks{early}"
    )


def _gemm_name(c: GemmConfig) -> str:
    exchange = "cluster" if c.cluster else "pairs, split" if c.pair else "split"
    return f"{_loop_name(c)}, {c.stages} stages, {exchange} {c.split}"


GEMV = _named(_gemv(), _gemv_name)
GEMM = _named(_gemm(), _gemm_name)

#: The decoding loops among `GEMM`, each once, unsplit: what a dump of the decoded registers runs.
GEMM_LOOPS = {_loop_name(c): replace(c, split=1, cluster=False, pair=False) for c in GEMM.values()}
