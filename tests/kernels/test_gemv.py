"""The small-m product without a GPU: shipped instances compile, keep their registers, stay within budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.chosen import entries_of
from tests.kernels.gemv_instances import EXAMPLES
from tests.kernels.sass import disassemble, main_loop, waits_for_refill
from wcodec.cuda.compiler import compile_cubin, compile_many
from wcodec.cuda.device import DeviceInfo
from wcodec.kernels.gemv import (
    INSTANCES,
    MAX_TOKENS,
    NEAR,
    SOURCE,
    GemvConfig,
    candidates,
    default_config,
    instances,
)

pytest.importorskip("cuda.bindings.nvrtc")

_WEIGHTS_PER_LANE = 32  # of one quarter
BUDGETS = {1: (3.2, 1.9), 8: (3.5, 2.1), 16: (4.0, 2.4), 32: (5.0, 2.7)}  # by tokens: all slots, integer ones
GPUS = {
    "H200": DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20, 141 << 30),
    "A100": DeviceInfo(0, "NVIDIA A100", (8, 0), 108, 163 << 10, 40 << 20, 80 << 30),
    "A10": DeviceInfo(0, "NVIDIA A10", (8, 6), 72, 99 << 10, 6 << 20, 24 << 30),
    "B200": DeviceInfo(0, "NVIDIA B200", (10, 0), 148, 227 << 10, 126 << 20, 180 << 30),
}


def shipped(gpu: str) -> list[GemvConfig]:
    rule = [config for tokens in INSTANCES for _, config in instances(tokens, GPUS[gpu])]
    near = [config for configs in NEAR.values() for config in configs] if gpu == "H200" else []
    return list(dict.fromkeys(rule + near))


def measured() -> list[GemvConfig]:
    entries = entries_of("gemv")
    return sorted({GemvConfig(**(entry.config or {})) for entry in entries}, key=str)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_shipped_instance_compiles_without_spills(gpu: str) -> None:
    configs = shipped(gpu) + (measured() if gpu == "H200" else [])
    jobs = [(SOURCE, config.defines(), GPUS[gpu].arch) for config in dict.fromkeys(configs)]
    for cubin in compile_many(jobs):
        assert cubin.resources.stack_bytes == cubin.resources.spill_store_bytes == 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_compile_for_both_decoders_and_outputs(name: str) -> None:
    config = replace(EXAMPLES[name], min_ctas=1)
    variants = [config, replace(config, decoder="bf16"), replace(config, out_f32=True)]
    compile_many([(SOURCE, variant.defines(), "sm_90a") for variant in variants])


@pytest.mark.parametrize("config", list(dict.fromkeys(shipped("H200") + measured())), ids=str)
def test_instruction_budget(config: GemvConfig, tmp_path: Path) -> None:
    # An H200 that reads 12-bit weights as fast as its memory gives them has 10.6 issue slots and 5.3 integer
    # slots per weight. The decoder alone needs 11 integer instructions per 8 weights, 1.4 per weight.
    cubin = compile_cubin(SOURCE, config.defines(), "sm_90a")
    loop = main_loop(disassemble(cubin.data, tmp_path))
    weights = config.quarters * _WEIGHTS_PER_LANE
    issued, integer = BUDGETS[config.tokens]
    assert loop.issued / weights <= issued
    assert loop.integer / weights <= integer


@pytest.mark.parametrize("config", [c for c in shipped("H200") if c.register_ring], ids=str)
def test_nothing_waits_for_a_ring_in_registers_to_fill(config: GemvConfig, tmp_path: Path) -> None:
    cubin = compile_cubin(SOURCE, config.defines(), "sm_90a")
    assert waits_for_refill(disassemble(cubin.data, tmp_path, "-hex")) == []


@pytest.mark.parametrize(("n", "k"), [(1, 1), (160, 232), (2304, 8192), (4096, 14336), (151936, 5120)])
@pytest.mark.parametrize("gpu", GPUS)
def test_the_rule_serves_every_shape_on_every_gpu(n: int, k: int, gpu: str) -> None:
    info = GPUS[gpu]
    for tokens in range(1, MAX_TOKENS + 1):
        config = default_config(n, k, tokens, info)
        assert config in shipped(gpu)
        assert config.tokens >= tokens
        assert config.shared_bytes <= info.max_shared_bytes
        assert config.split == 1 or info.capability >= (9, 0)
        assert config.grid(n) * config.rows >= n * config.split
        worth_timing = candidates(n, k, tokens, info)
        assert worth_timing[0] == config
        assert len(set(worth_timing)) == len(worth_timing)


def test_nothing_is_worth_timing_above_the_limit() -> None:
    assert candidates(4096, 4096, 33, GPUS["H200"]) == []


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 9},
        {"quarters": 3},
        {"k_warps": 33},
        {"k_warps": 4, "row_warps": 3, "quarters": 1},
        {"stages": 1, "register_ring": False},
        {"stages": 2},
        {"k_warps": 16, "row_warps": 2, "register_ring": False},
        {"split": 9},
        {"stages": 40, "register_ring": False},
        {"eager": True},
        {"quarters": 4, "stages": 1, "tokens": 8},
    ],
)
def test_impossible_configurations_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        replace(EXAMPLES["1 token, registers"], **change)


def test_shared_memory_of_a_cta() -> None:
    ring = GemvConfig(8, 4, 4, 1, 3, False, 1)
    assert ring.shared_bytes == 4 * 3 * (8 * 128 + 4 * (1536 + 16))
    assert replace(ring, split=2).shared_bytes == ring.shared_bytes + 64 * 8 * 4 + 8
    registers = GemvConfig(8, 4, 2, 1, 1, True, 1)
    assert registers.shared_bytes == 8 * 2 * (8 * 128)
    assert replace(registers, tokens=1).shared_bytes == 8 * (2 * 128 + 1024)  # x leaves no room for patching
