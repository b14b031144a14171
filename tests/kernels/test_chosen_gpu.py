"""Every kernel instance that the dispatcher can choose, on the GPU: the weights' own bits come out of it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels import chosen
from tests.kernels.matrices import Bits, all_patterns, few_exceptions, gaussian
from tests.kernels.products import Matrix
from wcodec.cuda.device import device_info
from wcodec.formats.bf16_w12 import choose_table, count_high_exponents
from wcodec.kernels.gemm import GemmConfig
from wcodec.kernels.gemv import GemvConfig

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TOKENS = (1, 5, 8, 13, 16, 31, 32)
COLUMNS = 96  # that hold exceptions and are read back
CHOSEN: dict[str, GemvConfig | GemmConfig] = {
    **{f"gemv {name}": config for name, config in chosen.GEMV.items()},
    **{f"gemm {name}": config for name, config in chosen.GEMM.items()},
}
LOOPS: dict[str, GemvConfig | GemmConfig] = {
    **{f"gemv {name}": config for name, config in chosen.GEMV.items()},
    **{f"gemm {name}": config for name, config in chosen.GEMM_LOOPS.items()},
}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if device_info(0).capability != (9, 0):
        pytest.skip("these are the choices for compute capability 9.0")


@functools.cache
def matrix(name: str) -> Matrix:
    # 17 columns of bricks: an odd number, enough for every split; neither N nor K fills its last brick.
    makers = {"few": lambda: few_exceptions(200, 1032), "patterns": all_patterns}
    return Matrix({**makers, "gaussian": lambda: gaussian(200, 1032)}[name]())


def exceptions(bits: Bits) -> np.ndarray:
    """Where a matrix's high exponent bits are not in its table: weights that only a patch brings back."""
    table = choose_table(count_high_exponents(bits))
    return ~np.isin(bits >> 8 & 0x7F, list(table))


def uncompressed(config: GemvConfig | GemmConfig) -> GemvConfig | GemmConfig:
    """The same instance for uncompressed bricks, its ring as short as it can be: sums do not depend on it."""
    spare = {"min_ctas": 1} if isinstance(config, GemvConfig) else {}
    for stages in range(1, config.stages):
        with contextlib.suppress(ValueError):
            return replace(config, decoder="bf16", stages=stages, **spare)
    return replace(config, decoder="bf16", **spare)


@pytest.mark.parametrize("name", CHOSEN)
def test_one_hot_tokens_read_columns_with_exceptions_back(name: str) -> None:
    config, w = CHOSEN[name], matrix("few")
    columns = np.flatnonzero(exceptions(w.bits).any(axis=0))
    columns = np.sort(np.random.default_rng(8).permutation(columns)[:COLUMNS])
    assert len(columns) == COLUMNS
    want = torch.from_numpy(w.bits.T[columns].view(np.int16)).cuda()
    want[want == -0x8000] = 0  # −0 + 0 is +0
    for m in {*TOKENS, config.tokens}:
        if not w.served(config, m):
            continue
        for first in range(0, COLUMNS, m):
            count = min(m, COLUMNS - first)
            x = torch.zeros(m, w.cols, device="cuda", dtype=torch.bfloat16)
            x[torch.arange(count), columns[first : first + count]] = 1
            got = w.product(config, x).view(torch.int16)
            assert torch.equal(got[:count], want[first : first + count]), (m, columns[first])
            assert not got[count:].any()


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("weights", ["patterns", "few"])  # most of a quarter is patched; some, inline
def test_registers_hold_the_original_bits(name: str, weights: str) -> None:
    w = matrix(weights)
    assert (w.dump(LOOPS[name]) == w.bits).all()


@pytest.mark.parametrize("name", CHOSEN)
def test_same_bits_as_uncompressed_bricks(name: str) -> None:
    config, w = CHOSEN[name], matrix("gaussian")
    if isinstance(config, GemmConfig) and (config.tokens, config.split) == (256, 0):
        pytest.skip("uncompressed bricks take three registers more than there are")
    plain = uncompressed(config)
    torch.manual_seed(3)
    for m in {1, config.tokens - config.tokens // 3, config.tokens}:
        x = torch.randn(m, w.cols, device="cuda").bfloat16()
        packed, unpacked = w.product(config, x), w.product(plain, x)
        assert torch.equal(packed.view(torch.int16), unpacked.view(torch.int16)), m
