"""Router kernels without a GPU: how weights are split, how work is cut, and that every instance compiles."""

from __future__ import annotations

import numpy as np
import pytest

from wcodec.cuda.compiler import compile_many
from wcodec.cuda.device import DeviceInfo
from wcodec.kernels import router
from wcodec.kernels.router import FmaConfig, WgmmaConfig

torch = pytest.importorskip("torch")

H200 = DeviceInfo(0, "H200", (9, 0), 132, 232448, 60 << 20, 141 << 30)
A100 = DeviceInfo(0, "A100", (8, 0), 108, 166912, 40 << 20, 80 << 30)


def test_two_parts_where_hi_and_lo_are_exact_three_where_not() -> None:
    w = torch.randn(64, 256)
    hi = w.bfloat16().float()
    assert router.exact_parts(w) == 3
    assert router.exact_parts(hi + (w - hi).bfloat16().float()) == 2
    assert router.exact_parts(hi) == 2
    assert router.exact_parts(torch.zeros(8, 8)) == 2
    assert router.exact_parts(torch.tensor([[-0.0, 1 + 2**-23]])) == 2
    assert router.exact_parts(torch.tensor([[1 + 2**-10 + 2**-23]])) == 3


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.4e38, 2**-133 + 2**-149])
def test_no_parts_for_weights_that_three_bf16_values_cannot_add_up_to(value: float) -> None:
    w = torch.randn(8, 8)
    w[3, 4] = value
    assert router.exact_parts(w) is None


def test_parts_as_the_kernel_takes_them_add_up_exactly() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    exponent = bits >> 23 & 0xFF
    w = torch.from_numpy(bits[(exponent > 40) & (exponent < 250)].view(np.float32).reshape(1, -1))
    assert router.exact_parts(w) == 3
    total, rest = torch.zeros_like(w, dtype=torch.float64), w
    for _ in range(3):
        part = rest.bfloat16().float()
        total += part.double()
        rest = rest - part
    assert torch.equal(total, w.double())


def test_fp16_weights_are_refused() -> None:
    with pytest.raises(TypeError, match="FP32"):
        router.exact_parts(torch.zeros(2, 2, dtype=torch.float16))


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("shape", [(256, 8192), (64, 512), (100, 1000), (384, 7168)])
def test_work_is_cut_into_one_wave_with_slices_that_threads_can_own(
    shape: tuple[int, int], tokens: int
) -> None:
    config = router.choose(tokens)
    if isinstance(config, FmaConfig):
        assert tokens <= config.defines(tokens)["WC_TOKENS"] <= 8
        return
    grid = config.grid(*shape, tokens, 132)
    splits, row_tiles, token_tiles = grid
    assert row_tiles * 64 >= shape[0] > (row_tiles - 1) * 64
    assert token_tiles * config.tokens >= tokens > (token_tiles - 1) * config.tokens
    assert splits & (splits - 1) == 0
    assert config.slots % splits == 0
    assert config.slots // splits <= 128 * config.consumers
    assert config.workspace_bytes(grid) == int(np.prod(grid)) * config.tokens * 64 * 4
    assert config.shared_bytes <= 227 * 1024


def test_the_shapes_it_serves() -> None:
    w = torch.randn(256, 8192)
    assert router.serves(w, 1, None, A100)
    assert router.serves(w, 256, 3, H200)
    assert not router.serves(w, 256, 3, A100)
    assert not router.serves(w, 16, None, H200)
    assert not router.serves(w, 257, 3, H200)
    assert not router.serves(w, 0, 3, H200)
    assert not router.serves(w[:, :8001], 1, 3, H200)
    assert not router.serves(w[:, 1:8185], 1, 3, H200)
    assert not router.serves(torch.randn(16384, 64), 256, 3, H200)


def test_stages_are_dealt_out_evenly() -> None:
    with pytest.raises(ValueError, match="6 stages"):
        WgmmaConfig(16, 6, 4)


def instances(arch: str) -> list[tuple[str, dict[str, int], str]]:
    few = next(config for config in router.CONFIGS.values() if isinstance(config, FmaConfig))
    found = [("router_fma.cu", few.defines(tokens), arch) for tokens in (1, 2, 4, 8)]
    if arch == "sm_90a":
        wide = [config for config in router.CONFIGS.values() if isinstance(config, WgmmaConfig)]
        found += [("sm90_router.cu", config.defines(parts), arch) for config in wide for parts in (2, 3)]
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_every_instance_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for cubin in compile_many(instances(arch)):
        assert cubin.resources.stack_bytes == cubin.resources.spill_store_bytes == 0
