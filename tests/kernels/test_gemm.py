"""The wgmma product without a GPU: instances compile to what they should, the rule serves every shape."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels import chosen
from tests.kernels.chosen import H200
from tests.kernels.gemm_instances import EXAMPLES
from tests.kernels.running_operands import writes_to_running_operands
from tests.kernels.sass import disassemble
from wcodec.cuda.compiler import compile_cubin, compile_many
from wcodec.errors import WCodecError
from wcodec.kernels.gemm import (
    BRICK_BYTES,
    SHARED_LIMIT_BYTES,
    SOURCE,
    TILE,
    Bricks,
    GemmConfig,
)
from wcodec.kernels.gemm_rule import MAX_TOKENS, MIN_TOKENS, candidates, default_config
from wcodec.tables import CLASSES

pytest.importorskip("cuda.bindings.nvrtc")

SHAPES = [(1, 15), (160, 232), (1024, 4096), (2304, 8192), (8192, 1024), (14336, 4096), (41387, 5120)]
SERVED = [m for m in CLASSES if MIN_TOKENS <= m <= MAX_TOKENS]


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_what_can_be_chosen_is_all_that_the_rule_gives(processors: int) -> None:
    info, known = replace(H200, multiprocessors=processors), set(chosen.GEMM.values())
    for n, k, m in itertools.product(range(1, 141), (*range(1, 20), 64, 65), (16, 32, 64, 128, 256)):
        assert default_config(TILE * n, TILE * k, m, info) in known, (n, k, m)


def test_what_can_be_chosen_compiles_without_spills_and_multiplies_on_wgmma(tmp_path: Path) -> None:
    # compile_many refuses spills, local memory and serialised wgmma (C75xx).
    configs = list(chosen.GEMM.values())
    for config, cubin in zip(
        configs, compile_many([(SOURCE, c.defines(), "sm_90a") for c in configs]), strict=True
    ):
        sass = disassemble(cubin.data, tmp_path)
        products = f"HGMMA.64x{config.tokens}x16.F32.BF16"
        assert sass.count(products) == (8 if config.tokens > 128 else 4)  # the loop is there as often as told
        assert writes_to_running_operands(sass) == []
        assert "UTMALDG.2D" in sass
        assert "UBLKCP" in sass
        assert "LDL" not in sass
        assert "STL" not in sass


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_compile_for_both_decoders(name: str, tmp_path: Path) -> None:
    configs = (EXAMPLES[name], replace(EXAMPLES[name], decoder="bf16", stages=2))
    for cubin in compile_many([(SOURCE, c.defines(), "sm_90a") for c in configs]):
        assert writes_to_running_operands(disassemble(cubin.data, tmp_path)) == []


def test_a_write_to_operands_of_running_products_is_found() -> None:
    loop = """
    .L_x_1:
        /*0010*/ LDS.128 R8, [R2] ;
        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/ @P0 LDS.64 R6, [R2] ;
        /*0040*/ HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0 ;
        /*0050*/ @P0 BRA `(.L_x_1) ;
        /*0060*/ EXIT ;
    """
    assert writes_to_running_operands(loop) == ["LDS.128 R8, [R2] "]
    assert writes_to_running_operands(loop.replace("R8, [R2]", "R12, [R2]")) == []
    assert writes_to_running_operands(loop.replace("@P0 BRA", "BRA").replace("0x0 ;", "0x1 ;")) != []


def test_experiments_compile() -> None:
    config = EXAMPLES["split in 2"].defines()
    extras = [{"WC_TIMELINE": 1}, *({"WC_ABLATE": bits} for bits in (1, 2, 4, 8, 15))]
    compile_many([(SOURCE, {**config, **extra}, "sm_90a") for extra in extras])
    compile_cubin(SOURCE, EXAMPLES["wide tiles"].defines(WC_DUMP=1), "sm_90a")


def test_host_and_device_agree_on_shared_memory() -> None:
    defines = EXAMPLES["cluster of 2"].defines()
    with pytest.raises(WCodecError, match="the host lays out shared memory differently"):
        compile_cubin(SOURCE, {**defines, "WC_SHARED_BYTES": int(defines["WC_SHARED_BYTES"]) + 16}, "sm_90a")


@pytest.mark.slow
def test_what_tune_tries_compiles() -> None:
    found = dict.fromkeys(c for m in SERVED for c in candidates(2304, 8192, m, H200))
    compile_many([(SOURCE, config.defines(), "sm_90a") for config in found])


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (1, 1), (64, 64), (151936, 5120)])
@pytest.mark.parametrize("processors", [78, 114, 132])
def test_the_rule_serves_every_shape(n: int, k: int, processors: int) -> None:
    info = replace(H200, multiprocessors=processors)
    for m in range(MIN_TOKENS, MAX_TOKENS + 1):
        config = default_config(n, k, m, info)
        ctas = config.grid(n, k, m, processors)
        assert config.shared_bytes <= SHARED_LIMIT_BYTES
        assert config.column_groups == 1 or -(-k // 64) % 2 == 0
        through_l2 = config.split > 1 and config.split != config.cluster_ctas
        if through_l2:
            assert ctas <= processors  # they wait for one another
        assert (config.partial_bytes(n, k, m, processors) > 0) == (through_l2 or config.split == 0)
        if m in SERVED:
            worth_timing = candidates(n, k, m, info)
            assert worth_timing[0] == config
            assert len(set(worth_timing)) == len(worth_timing)
    assert candidates(n, k, MAX_TOKENS + 1, info) == []


def test_variants_are_tried_where_they_can_pay() -> None:
    for (n, k), m in itertools.product(SHAPES, SERVED):
        found = set(candidates(n, k, m, H200))
        for config in found:
            single = config.row_groups == 1 and config.tokens >= 64
            assert single or not config.early_patches
            if single:
                assert replace(config, early_patches=not config.early_patches) in found


def test_rings_that_hold_most_of_what_a_cta_reads_are_tried_shallower() -> None:
    def depths(k: int, m: int = 64) -> list[set[int]]:
        """Return the depths that are tried of each instance with two column groups that is not split."""
        found: dict[GemmConfig, set[int]] = {}
        for c in candidates(8192, k, m, H200):
            if c.column_groups == 2 and c.split == 1:
                found.setdefault(replace(c, stages=2, early_patches=False), set()).add(c.stages)
        return list(found.values())

    assert depths(1024) == [{7, 6}]  # eight stages of two bricks
    assert depths(4096) == [{7}]  # the ring turns over four times
    assert depths(768) == [{7}]  # it never fills either ring
    assert depths(896, 128) == [{4}]  # three stages are too few for anything


def test_stage_and_partial_bytes() -> None:
    config = GemmConfig(128, 2, 3, 2, 4)
    assert config.stage_bytes == 2 * (128 * 128 + 2 * BRICK_BYTES["bf16-w12"])
    # 32 tiles, 4 ranks, 3 senders each, 2 warpgroups, 4 blocks of 8 tokens × 64 rows in FP32
    assert config.partial_bytes(4096, 8192, 128, 132) == 32 * 4 * 3 * 2 * 4 * 8 * 64 * 4
    # two clusters of two: half of it, once more halved, to one other CTA
    assert replace(config, cluster=True).partial_bytes(4096, 8192, 128, 132) == 32 * 4 * 2 * 4 * 8 * 64 * 4
    even = GemmConfig(64, 2, 4, 1, 0)
    assert even.partial_bytes(28672, 4096, 64, 132) == 132 * 128 * 64 * 4
    assert replace(even, pair=True).grid(28672, 4096, 64, 132) == 132


@pytest.mark.parametrize(
    ("count", "sectors"), [(0, 0), (1, 1), (8, 1), (9, 2), (16384, 2048), (1 << 31, 2048)]
)
def test_products_ask_for_a_list_and_for_no_more_than_64_kb(count: int, sectors: int) -> None:
    assert Bricks(0, 0, count, (0, 0), 64, 64).overflow_sectors == sectors


def test_pairs_compute_a_tile_too_many_rather_than_stand_alone() -> None:
    assert GemmConfig(64, 2, 4, 1, 1, pair=True).grid(3 * 128, 4096, 64, 132) == 4


@pytest.mark.parametrize(
    "values",
    [
        {"tokens": 24},
        {"tokens": 272},
        {"row_groups": 3},
        {"row_groups": 4, "tokens": 256, "stages": 2},
        {"stages": 1},
        {"stages": 9},
        {"stage_bricks": 3},
        {"split": 9},
        {"ctas_per_sm": 2},
        {"cluster": True},
        {"cluster": True, "split": 5},
        {"cluster": True, "split": 2, "pair": True},
        {"column_groups": 2},
    ],
    ids=str,
)
def test_impossible_instances_are_refused(values: dict[str, int]) -> None:
    good = {"tokens": 128, "row_groups": 2, "stages": 3, "stage_bricks": 1, "split": 1}
    GemmConfig(**good)
    with pytest.raises(ValueError):
        GemmConfig(**{**good, **values})


def test_splits_that_would_wait_forever_are_refused() -> None:
    with pytest.raises(WCodecError, match="cannot be split 7 ways"):
        GemmConfig(128, 2, 3, 1, 7).grid(4096, 8192, 128, 132)  # 224 CTAs on 132 SMs
    with pytest.raises(WCodecError, match="cannot be split 7 ways"):
        GemmConfig(128, 2, 3, 1, 7).grid(128, 256, 128, 132)  # four stages for seven CTAs
