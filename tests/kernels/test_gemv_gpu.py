"""The small-m product on the GPU: exact weights, whatever their bits, at every m and every odd shape."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.kernels.gemv_instances import EXAMPLES
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
from tests.kernels.products import POISON, Matrix, on_gpu
from wcodec.errors import WCodecError
from wcodec.kernels.gemv import Gemv, GemvConfig

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@functools.cache
def matrix(name: str) -> Matrix:
    return Matrix(
        {
            "patterns": all_patterns,
            "lone patterns": lone_patterns,
            "gaussian": lambda: gaussian(256, 1024),
            "few": lambda: few_exceptions(192, 512),
            "half": lambda: half_zero(160, 448),
            "only": lambda: only_exceptions(128, 256),
            "crowded": lambda: crowded(208, 448),
        }[name]()
    )


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("weights", ["few", "half", "only", "crowded"])
def test_one_hot_tokens_read_every_weight_back(name: str, weights: str) -> None:
    config = EXAMPLES[name]
    w = matrix(weights)
    want = w.bits.T.copy()
    want[want == 0x8000] = 0  # −0 + 0 is +0
    got = np.empty_like(want)
    for first in range(0, w.cols, config.tokens):
        m = min(config.tokens, w.cols - first)
        x = torch.zeros(m, w.cols, device="cuda", dtype=torch.bfloat16)
        x[torch.arange(m), first + torch.arange(m)] = 1
        got[first : first + m] = bits_of(w.product(config, x))
    assert (got == want).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_all_patterns_reach_the_sum(name: str) -> None:
    # One pattern per row beside zeros. NaN payloads do not survive a sum: see the dump below.
    config = EXAMPLES[name]
    x = torch.ones(config.tokens, 64, device="cuda", dtype=torch.bfloat16)
    got = bits_of(matrix("lone patterns").product(config, x))
    want = np.arange(65536, dtype=np.uint16)
    want[0x8000] = 0
    nan = (want & 0x7FFF) > 0x7F80
    assert (got[:, ~nan] == want[~nan]).all()
    assert ((got[:, nan] & 0x7FFF) > 0x7F80).all()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("weights", ["patterns", "few", "half", "only", "crowded"])
def test_a_registers_hold_the_original_bits(name: str, weights: str) -> None:
    w = matrix(weights)
    assert (w.dump(EXAMPLES[name]) == w.bits).all()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("weights", ["gaussian", "few", "half", "only", "crowded"])
def test_same_bits_as_uncompressed_bricks(name: str, weights: str) -> None:
    config = EXAMPLES[name]
    w = matrix(weights)
    plain = GemvConfig(**{**vars(config), "decoder": "bf16", "min_ctas": 1})
    torch.manual_seed(3)
    for m in sorted({1, (config.tokens + 1) // 2, config.tokens}):
        x = torch.randn(m, w.cols, device="cuda").bfloat16()
        assert (bits_of(w.product(config, x)) == bits_of(w.product(plain, x))).all()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 15), (7, 17), (160, 232), (232, 160), (65, 1), (64, 4096), (1000, 72), (200, 1031)]
)
def test_odd_shapes_and_every_m(name: str, rows: int, cols: int) -> None:
    config = EXAMPLES[name]
    w = Matrix(gaussian(rows, cols, seed=rows + cols))
    torch.manual_seed(rows)
    bias = torch.randn(rows, device="cuda").bfloat16()
    exact = on_gpu(w.bits).double()
    for m in range(1, config.tokens + 1):
        x = torch.randn(m, cols, device="cuda").bfloat16()
        want = x.double() @ exact.T + bias.double()
        got = w.product(config, x, bias).double()
        limit = 2**-8 * want.abs() + 2**-18 * (x.double().abs() @ exact.abs().T)
        assert ((got - want).abs() <= limit).all(), m


@pytest.mark.parametrize("name", EXAMPLES)
def test_fp32_output_rounds_to_the_bf16_output(name: str) -> None:
    config = EXAMPLES[name]
    w = matrix("gaussian")
    wide = GemvConfig(**{**vars(config), "out_f32": True, "min_ctas": 1})
    x = torch.randn(config.tokens, w.cols, device="cuda").bfloat16()
    assert (bits_of(w.product(wide, x).bfloat16()) == bits_of(w.product(config, x))).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_thousand_runs_give_the_same_bits(name: str) -> None:
    config = EXAMPLES[name]
    w = matrix("few")
    x = torch.randn(config.tokens, w.cols, device="cuda").bfloat16()
    first = w.product(config, x).view(torch.int16)
    out = torch.empty(config.tokens, w.rows, device="cuda", dtype=torch.bfloat16)
    run = Gemv(config, w.bricks[config.decoder], config.tokens, 0)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        out.view(torch.int16).fill_(POISON)
        run(torch.cuda.current_stream().cuda_stream, x.data_ptr(), w.cols, out.data_ptr(), w.rows)
        different += (out.view(torch.int16) != first).sum()
    assert int(different) == 0


def test_more_tokens_than_an_instance_holds_are_refused() -> None:
    with pytest.raises(WCodecError, match="at most 8"):
        Gemv(next(c for c in EXAMPLES.values() if c.tokens == 8), matrix("few").bricks["bf16-w12"], 9, 0)
