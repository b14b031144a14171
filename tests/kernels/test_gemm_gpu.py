"""The wgmma product on the GPU: exact weights, whatever their bits, at every width, split and odd shape."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.gemm_instances import EXAMPLES
from tests.kernels.matrices import (
    all_patterns,
    bits_of,
    crowded,
    few_exceptions,
    gaussian,
    half_zero,
    lone_patterns,
    only_exceptions,
)
from tests.kernels.products import POISON, Matrix, on_gpu, workspace
from wcodec.cuda.device import device_info
from wcodec.kernels.gemm import Gemm, GemmConfig

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def wgmma() -> None:
    if not device_info(0).has_wgmma:
        pytest.skip("the wgmma product needs compute capability 9.0")


@functools.cache
def matrix(name: str) -> Matrix:
    return Matrix(
        {
            "patterns": all_patterns,
            "lone patterns": lone_patterns,
            "gaussian": lambda: gaussian(512, 1024),
            "few": lambda: few_exceptions(192, 1024),
            "half": lambda: half_zero(160, 960),
            "only": lambda: only_exceptions(128, 1024),
            "crowded": lambda: crowded(208, 1024),
        }[name]()
    )


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("weights", ["few", "half", "only", "crowded"])
def test_one_hot_tokens_read_every_weight_back(name: str, weights: str) -> None:
    config, w = EXAMPLES[name], matrix(weights)
    want = w.bits.T.copy()
    want[want == 0x8000] = 0  # −0 + 0 is +0
    for first in range(0, w.cols, config.tokens):
        m = min(config.tokens, w.cols - first)
        x = torch.zeros(m, w.cols, device="cuda", dtype=torch.bfloat16)
        x[torch.arange(m), first + torch.arange(m)] = 1
        assert (bits_of(w.product(config, x)) == want[first : first + m]).all()


@pytest.mark.parametrize("name", ["wide tiles", "256 tokens, cluster of 2", "dealt evenly"])
def test_all_patterns_reach_the_sum(name: str) -> None:
    # One pattern per row beside zeros. NaN payloads do not survive a sum: see the dump below.
    config, w = EXAMPLES[name], matrix("lone patterns")
    if not w.served(config, config.tokens):
        config = replace(config, split=1, cluster=False)
    x = torch.ones(config.tokens, 64, device="cuda", dtype=torch.bfloat16)
    got = bits_of(w.product(config, x))
    want = np.arange(65536, dtype=np.uint16)
    want[0x8000] = 0
    nan = (want & 0x7FFF) > 0x7F80
    assert (got[:, ~nan] == want[~nan]).all()
    assert ((got[:, nan] & 0x7FFF) > 0x7F80).all()


@pytest.mark.parametrize("weights", ["patterns", "few", "half", "only", "crowded"])
@pytest.mark.parametrize("row_groups", [1, 2])
def test_a_registers_hold_the_original_bits(weights: str, row_groups: int) -> None:
    w = matrix(weights)
    assert (w.dump(GemmConfig(16, row_groups, 4, 2, 1)) == w.bits).all()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("weights", ["gaussian", "few", "half", "only", "crowded"])
def test_same_bits_as_uncompressed_bricks(name: str, weights: str) -> None:
    config, w = EXAMPLES[name], matrix(weights)
    plain = replace(config, decoder="bf16", stages=2)
    torch.manual_seed(3)
    for m in {config.tokens, config.tokens - 5}:
        x = torch.randn(m, w.cols, device="cuda").bfloat16()
        assert (bits_of(w.product(config, x)) == bits_of(w.product(plain, x))).all()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 15), (7, 17), (160, 232), (232, 160), (200, 1031), (1000, 72), (2304, 1090)]
)
def test_odd_shapes_and_numbers_of_tokens(name: str, rows: int, cols: int) -> None:
    config = EXAMPLES[name]
    w = Matrix(gaussian(rows, cols, seed=rows + cols))
    exact = on_gpu(w.bits).double()
    torch.manual_seed(rows)
    bias = torch.randn(rows, device="cuda").bfloat16()
    for m in (17, 33, 64, 65, 100, 128, 200, 256):
        if not w.served(config, m):
            continue
        x = torch.randn(m, cols, device="cuda").bfloat16()
        want = x.double() @ exact.T + bias.double()
        got = w.product(config, x, bias).double()
        limit = 2**-8 * want.abs() + 2**-16 * (x.double().abs() @ exact.abs().T)
        assert ((got - want).abs() <= limit).all(), m


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_thousand_runs_give_the_same_bits(name: str) -> None:
    config, w = EXAMPLES[name], matrix("few")
    m = config.tokens
    x = torch.randn(m, w.cols, device="cuda").bfloat16()
    first = w.product(config, x).view(torch.int16)
    run = Gemm(config, w.bricks[config.decoder], m, 0, device_info(0).multiprocessors)
    out = torch.empty(m, w.rows, device="cuda", dtype=torch.bfloat16)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        out.view(torch.int16).fill_(POISON)
        run(
            torch.cuda.current_stream().cuda_stream,
            x.data_ptr(),
            w.cols,
            out.data_ptr(),
            w.rows,
            partials=workspace().data_ptr(),
        )
        different += (out.view(torch.int16) != first).sum()
    assert int(different) == 0


def test_a_vocabulary_of_odd_size() -> None:
    w = Matrix(gaussian(41387, 320, seed=9))
    exact = on_gpu(w.bits).double()
    for name in ("dealt evenly", "wide tiles, two bricks a stage"):
        x = torch.randn(64, w.cols, device="cuda").bfloat16()
        want = x.double() @ exact.T
        error = (w.product(EXAMPLES[name], x).double() - want).norm() / want.norm()
        assert error < 2e-3
