"""`prepare` and `linear` over whole shapes and many token counts: the error is that of rounding to BF16."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import wcodec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SHAPES = {
    "qkv_gate": (2304, 8192),
    "o": (8192, 1024),
    "pooler": (4096, 8192),
    "unpooler": (8192, 4096),
    "down": (4096, 14336),
    "router": (256, 8192),  # FP32
}
# Either side of where kernels, their numbers of tokens and chunks change; a prefill.
TOKENS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 31, 32, 33, 64, 65, 100, 128, 200, 256, 257, 512, 4096)
# Of the whole product and of one token's row. Rounding sums to BF16 takes 1.7e-3 of either by itself.
LIMIT, ROW_LIMIT = 2e-3, 3e-3
FP32_LIMIT = 1e-5

Record = Callable[[str, object], None]


def normal(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, device="cuda").bfloat16()


def outliers(m: int, k: int) -> torch.Tensor:
    """Tokens as deep layers have them: a few channels hundreds of times as large as the others."""
    x = torch.randn(m, k, device="cuda")
    x[:, torch.randperm(k, device="cuda")[:4]] *= 300
    return x.bfloat16()


@pytest.mark.parametrize("tokens", [normal, outliers])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_the_error_is_that_of_rounding(
    name: str, seed: int, tokens: Callable[[int, int], torch.Tensor], record_property: Record
) -> None:
    torch.manual_seed(seed)
    n, k = SHAPES[name]
    w = torch.randn(n, k, device="cuda") * 0.02
    fp32 = name == "router"
    w = w if fp32 else w.bfloat16()
    p, exact = wcodec.prepare({name: w})[name], w.double().t()
    worst = worst_row = 0.0
    for m in TOKENS:
        x = tokens(m, k)
        want = x.double() @ exact
        error = wcodec.linear(x, p).double() - want
        worst = max(worst, float(error.norm() / want.norm()))
        worst_row = max(worst_row, float((error.norm(dim=1) / want.norm(dim=1)).max()))
    kind = "FP32" if fp32 else "BF16"
    record_property(f"relative L2 error, {kind} outputs", worst)
    record_property(f"relative L2 error of one token, {kind} outputs", worst_row)
    assert worst <= (FP32_LIMIT if fp32 else LIMIT)
    assert worst_row <= (FP32_LIMIT if fp32 else ROW_LIMIT)
