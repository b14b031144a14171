"""`wcodec.linear` on the host: numbers, shapes, errors, autograd and compilation."""

from __future__ import annotations

import dataclasses
import math

import pytest

import wcodec
from wcodec.errors import WCodecError
from wcodec.state import PackedWeight

torch = pytest.importorskip("torch")

F = torch.nn.functional


def weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) * 0.02).bfloat16()


def prepared(w: torch.Tensor) -> PackedWeight:
    """Prepare a weight, BF16 ones in bricks even where they do not get smaller."""
    forced = wcodec.encode(w, format="bf16-w12") if w.dtype == torch.bfloat16 and w.numel() else w
    return wcodec.prepare({"w": forced}, device="cpu")["w"]


def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = x.double() @ w.double().t()
    return out if bias is None else out + bias.double()


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("n", "k"), [(64, 64), (160, 232), (7, 1024), (1, 2048), (130, 200), (1000, 72)])
@pytest.mark.parametrize("m", [1, 3, 17])
def test_products_are_those_of_the_exact_weights(n: int, k: int, m: int) -> None:
    w, x, bias = weight(n, k), torch.randn(m, k).bfloat16(), torch.randn(n).bfloat16()
    p = prepared(w)
    assert p.format == "bf16-w12"
    for b in (None, bias):
        exact = reference(x, w, b)
        half_a_place = exact.abs() * 2**-8 + 1e-5  # of BF16; FP32 sums add the rest
        assert ((wcodec.linear(x, p, b).double() - exact).abs() <= half_a_place).all()
    # One rounding, of the FP32 sum: what FP32 arithmetic on the same operands gives.
    assert torch.equal(wcodec.linear(x, p), (x.float() @ w.float().t()).bfloat16())


def test_a_one_hot_x_gives_the_weights_bits_back() -> None:
    w = weight(192, 128)
    w[3, 5] = 3e20  # an exception
    w[4, 5] = -1e-30
    p = prepared(w)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 5] = 1
    assert torch.equal(wcodec.linear(x, p)[0], w[:, 5])


def test_row_groups_join_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wcodec.paths._CPU_DECODE_BYTES", 1)
    w, x = weight(200, 128), torch.eye(128)[7:12].bfloat16()  # one-hot: exact in any order
    assert torch.equal(wcodec.linear(x, prepared(w)), w[:, 7:12].t())


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 4), (0,), (3, 0)])
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    w, x = weight(128, 64), torch.randn(*lead, 64).bfloat16()
    out = wcodec.linear(x, prepared(w))
    assert out.shape == (*lead, 128)
    assert torch.equal(out, (x.float() @ w.float().t()).bfloat16())


def test_kernels_get_what_lies_in_rows_as_it_is() -> None:
    w = weight(128, 64)
    p = prepared(w)
    seen = []

    def by_address(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        seen.append((x.shape, x.data_ptr(), out.shape))
        plain.run(x.reshape(6, 64), out.view(6, 128), bias)

    plain = p.plan(6)
    p.plans[6] = dataclasses.replace(plain, run=by_address, by_address=True)
    x = torch.eye(64)[:6].view(2, 3, 64).bfloat16()
    expected = w[:, :6].t().reshape(2, 3, 128)
    assert torch.equal(wcodec.linear(x, p), expected)
    assert torch.equal(wcodec.linear(x.transpose(0, 1), p), expected.transpose(0, 1))
    assert seen[0] == ((2, 3, 64), x.data_ptr(), (2, 3, 128))  # no view, no copy
    assert seen[1][0] == (6, 64)
    assert seen[1][1] != x.data_ptr()


def test_x_may_have_any_strides() -> None:
    p = prepared(weight(128, 64))
    base = torch.randn(6, 131).bfloat16()
    for x in (base[:, 3:67], base[::2, :64], base[:, 64:128].flip(0), base.t()[:64].t(), base[0, 1:65]):
        assert torch.equal(wcodec.linear(x, p), wcodec.linear(x.clone(), p))
    one_hot = torch.eye(64)[:1].bfloat16()
    assert torch.equal(wcodec.linear(one_hot.expand(5, 64), p)[4], wcodec.linear(one_hot[0], p))


def test_the_bias_may_have_strides() -> None:
    p, x = prepared(weight(128, 64)), torch.randn(2, 64).bfloat16()
    bias = torch.randn(256).bfloat16()[::2]
    assert torch.equal(wcodec.linear(x, p, bias), wcodec.linear(x, p, bias.clone()))


def test_raw_weights_are_multiplied_too() -> None:
    x = torch.randn(3, 48)
    for dtype in (torch.float32, torch.float16):
        w = torch.randn(24, 48).to(dtype)
        out = wcodec.linear(x.to(dtype), prepared(w))
        assert out.dtype == dtype
        assert relative_error(out, reference(x.to(dtype), w)) < 1e-3


def test_a_router_gets_fp32_logits_from_bf16_tokens() -> None:
    w, x = torch.randn(256, 512), torch.randn(5, 512).bfloat16()
    out = wcodec.linear(x, prepared(w), torch.ones(256))
    assert out.dtype == torch.float32
    assert relative_error(out, reference(x, w) + 1) < 1e-6


def test_empty_k_and_empty_n() -> None:
    x, bias = torch.empty(3, 0, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    p = prepared(torch.empty(8, 0, dtype=torch.bfloat16))
    assert torch.equal(wcodec.linear(x, p), torch.zeros(3, 8, dtype=torch.bfloat16))
    assert torch.equal(wcodec.linear(x, p, bias), torch.ones(3, 8, dtype=torch.bfloat16))
    p = prepared(torch.empty(0, 8, dtype=torch.bfloat16))
    assert wcodec.linear(torch.ones(3, 8, dtype=torch.bfloat16), p).shape == (3, 0)


def test_repeats_are_bitwise_equal() -> None:
    p, x = prepared(weight(256, 512)), torch.randn(33, 512).bfloat16()
    first = wcodec.linear(x, p)
    assert all(torch.equal(wcodec.linear(x, p), first) for _ in range(5))


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (
            torch.zeros(2, 63).bfloat16(),
            None,
            r"shape \[2, 63\] does not fit a weight of shape \[128, 64\]",
        ),
        (torch.tensor(1.0).bfloat16(), None, r"x of shape \[\] does not fit"),
        (torch.zeros(2, 64), None, r"x is torch.float32, the weight torch.bfloat16; pass x.to"),
        (
            torch.zeros(2, 64).bfloat16(),
            torch.zeros(127).bfloat16(),
            r"bias of shape \[127\] does not fit 128",
        ),
        (torch.zeros(2, 64).bfloat16(), torch.zeros(128), r"the bias is torch.float32"),
        (torch.zeros(2, 64, device="meta").bfloat16(), None, r"x is on meta, the weight on cpu"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(
    x: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(WCodecError, match=message) as caught:
        wcodec.linear(x, prepared(weight(128, 64)), bias)
    assert "\n" not in str(caught.value)


def test_only_matrices_can_be_multiplied_by() -> None:
    p = prepared(weight(128, 64).view(2, 64, 64))
    with pytest.raises(WCodecError, match=r"linear needs a matrix, this weight has the shape \[2, 64, 64\]"):
        wcodec.linear(torch.zeros(1, p.k).bfloat16(), p)


def test_gradients_of_x_and_bias_are_linears() -> None:
    w = weight(128, 64)
    x, bias = torch.randn(2, 3, 64).bfloat16(), torch.randn(128).bfloat16()
    theirs = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    ours = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    seed = torch.randn(2, 3, 128).bfloat16()
    F.linear(theirs[0], w, theirs[1]).backward(seed)
    wcodec.linear(ours[0], prepared(w), ours[1]).backward(seed)
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        assert ours_one.grad is not None
        assert ours_one.grad.shape == theirs_one.grad.shape
        assert relative_error(ours_one.grad, theirs_one.grad.double()) < 5e-3


def test_the_op_follows_pytorchs_rules() -> None:
    p = prepared(weight(128, 64))
    ops = torch.ops.wcodec
    for bias in (None, torch.randn(128).bfloat16()):
        x = torch.randn(2, 3, 64).bfloat16()
        torch.library.opcheck(ops.linear.default, (x, p.blob, bias, 128, 64, torch.bfloat16))
        x.requires_grad_()
        torch.library.opcheck(ops.linear_grad.default, (x, p.blob, bias, 128, 64, torch.bfloat16))
    torch.library.opcheck(torch.ops.wcodec.decode.default, (p.blob, 128, 64, torch.bfloat16))


def test_the_op_refuses_a_blob_of_another_shape_or_dtype() -> None:
    p = prepared(weight(128, 64))
    with pytest.raises(WCodecError, match="128 × 64 matrix, not 64 × 64"):
        torch.ops.wcodec.linear(torch.zeros(1, 64).bfloat16(), p.blob, None, 64, 64, torch.bfloat16)
    with pytest.raises(WCodecError, match=r"bfloat16 weights, not torch\.float32"):
        torch.ops.wcodec.linear(torch.zeros(1, 64).bfloat16(), p.blob, None, 128, 64, torch.float32)


def test_the_op_takes_a_blob_that_no_weight_owns() -> None:
    w, x = weight(128, 64), torch.randn(3, 64).bfloat16()
    blob = torch.from_numpy(wcodec.encode(w).blob)
    out = torch.ops.wcodec.linear(x, blob, None, 128, 64, torch.bfloat16)
    assert torch.equal(out, wcodec.linear(x, prepared(w)))


@pytest.mark.slow
def test_compiles_whole_with_a_dynamic_token_count() -> None:
    p, bias = prepared(weight(128, 64)), torch.randn(128).bfloat16()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return F.relu(wcodec.linear(x * 2, p, bias)) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lead in ((1,), (5,), (17,), (2, 3)):
        x = torch.randn(*lead, 64).bfloat16()
        assert torch.equal(compiled(x), layer(x))
    assert math.isfinite(float(compiled(x).sum()))


def test_fake_tensors_take_the_op() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    p = prepared(weight(128, 64))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.zeros(5, 64).bfloat16())
        out = wcodec.linear(x, p)
    assert out.shape == (5, 128)
    assert out.dtype == torch.bfloat16
