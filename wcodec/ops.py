"""`linear`: the product with a packed weight, eagerly and under ``torch.compile``.

Eager calls run straight through. Whatever needs PyTorch's dispatcher (compilation, fake tensors, modes) goes
through ``torch.ops.wcodec.linear``, which does the same, and what needs gradients through
``torch.ops.wcodec.linear_grad``: a Python autograd formula costs every call as much as the launch, wanted or
not.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from wcodec.errors import WCodecError
from wcodec.state import ROW_ELEMENTS, VIEW_BYTES, PackedWeight, aligned, weight_of

_library: Any = torch.library.Library("wcodec", "DEF")  # type: ignore[no-untyped-call]
_expect: Any = torch._check
_ARGUMENTS = "(Tensor x, Tensor blob, Tensor? bias, SymInt n, SymInt k, ScalarType dtype) -> Tensor"
_library.define(f"linear{_ARGUMENTS}")
_library.define(f"linear_grad{_ARGUMENTS}")
_library.define("decode(Tensor blob, SymInt n, SymInt k, ScalarType dtype) -> Tensor")


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x · Wᵀ + bias`` for a packed weight W of shape (N, K).

    Parameters
    ----------
    x : torch.Tensor, shape (..., K)
        Any leading dimensions, any strides, zero tokens too. BF16 for BF16 weights; FP32 weights take FP32
        or BF16; other raw weights take their own dtype.
    packed : PackedWeight
        From `wcodec.prepare`.
    bias : torch.Tensor, shape (N,), optional

    Returns
    -------
    torch.Tensor, shape (..., N)
        In x's dtype, FP32 for FP32 weights. The weights' exact bits are multiplied, products are summed in
        FP32, and equal inputs give equal bits; the rounding need not be cuBLAS's.

    Raises
    ------
    WCodecError
        If shapes, dtypes or devices do not fit.
    UnsupportedError
        If the GPU is too old.
    """
    if is_dispatched(x, bias):
        return dispatched_linear(x, packed.blob, bias, packed.n, packed.k, packed.dtype)
    return _linear(x, packed, bias)


def is_dispatched(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether PyTorch's dispatcher has to see the call."""
    if torch.compiler.is_compiling() or _wants_grad(x, bias):
        return True
    kind = type(x)
    return (
        (kind is not torch.Tensor and kind is not torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def dispatched_linear(
    x: torch.Tensor, blob: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """Call the op that fits: with gradients or without."""
    ops = torch.ops.wcodec
    op = ops.linear_grad if _wants_grad(x, bias) else ops.linear
    out: torch.Tensor = op(x, blob, bias, n, k, dtype)
    return out


def _wants_grad(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def _linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    # Few tensor attributes are asked for twice: each costs a good part of a microsecond.
    shape, n, k, dtype = x.shape, packed.n, packed.k, packed.dtype
    rank = len(shape)
    if (
        not rank
        or shape[-1] != k
        or (x.dtype != dtype and not (dtype == torch.float32 and x.dtype == torch.bfloat16))
        or x.device != packed.device
        or not packed.is_matrix
        or (bias is not None and (bias.shape != (n,) or bias.device != packed.device or bias.dtype != dtype))
    ):
        raise _misfit(x, packed, bias)
    tokens = shape[0] if rank == 2 else math.prod(shape[:-1])
    out = torch.empty((tokens, n) if rank == 2 else (*shape[:-1], n), dtype=dtype, device=packed.device)
    if tokens and n and k:
        plan = packed.plans.get(tokens) or packed.plan(tokens)
        if not x.is_contiguous() or x.data_ptr() % VIEW_BYTES or k % ROW_ELEMENTS:
            x = _aligned(x.reshape(tokens, k), packed)
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        rows = out
        if rank != 2 and not plan.by_address:
            x, rows = x.reshape(tokens, k), out.view(tokens, n)
        if packed.index is None or packed.index == torch._C._cuda_getDevice():
            plan.run(x, rows, bias)
        else:
            with torch.cuda.device(packed.index):
                plan.run(x, rows, bias)
    elif tokens and n:  # an empty sum
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    return out


def _aligned(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """Return x, shape (m, K), with rows that start on 16 bytes; padded with zeros where K is odd-sized.

    The zeros lie behind the K columns of the result, whose row stride tells the kernels about them.
    """
    padding = -packed.k % ROW_ELEMENTS
    if not padding or packed.is_raw or not x.is_cuda:
        return aligned(x)
    wide = x.new_zeros(x.shape[0], packed.k + padding)
    wide[:, : packed.k] = x
    return wide[:, : packed.k]


def _misfit(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> WCodecError:
    """Return the error that says which argument of `linear` does not fit, and what would."""
    n, k, dtype, device = packed.n, packed.k, packed.dtype, packed.device
    if not packed.is_matrix:
        return WCodecError(f"linear needs a matrix, this weight has the shape {list(packed.shape)}")
    if not x.shape or x.shape[-1] != k:
        return WCodecError(f"x of shape {list(x.shape)} does not fit a weight of shape [{n}, {k}]")
    if x.device != device:
        return WCodecError(f"x is on {x.device}, the weight on {device}", mend="move one of them")
    if x.dtype != dtype and not (dtype == torch.float32 and x.dtype == torch.bfloat16):
        return WCodecError(f"x is {x.dtype}, the weight {dtype}", mend=f"pass x.to({dtype})")
    assert bias is not None
    if bias.device != device:
        return WCodecError(f"the bias is on {bias.device}, the weight on {device}", mend="move one of them")
    if bias.dtype != dtype:
        return WCodecError(f"the bias is {bias.dtype}, the weight {dtype}", mend=f"pass bias.to({dtype})")
    return WCodecError(f"a bias of shape {list(bias.shape)} does not fit {n} outputs")


def _op_linear(
    x: torch.Tensor, blob: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    packed = weight_of(blob)
    if (packed.n, packed.k) != (n, k):
        raise WCodecError(f"the blob holds a {packed.n} × {packed.k} matrix, not {n} × {k}")
    if packed.dtype != dtype:  # what compilers were told of the result
        raise WCodecError(f"the blob holds {packed.dtype} weights, not {dtype}")
    return _linear(x, packed, bias)


def _fake_linear(
    x: torch.Tensor, blob: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    _expect(x.dim() >= 1, lambda: "x needs at least one dimension")
    _expect(x.shape[-1] == k, lambda: f"x of shape {list(x.shape)} does not fit a weight of [{n}, {k}]")
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)


def _op_decode(blob: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return weight_of(blob).to_bf16().view(n, k)


def _fake_decode(blob: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return blob.new_empty((n, k), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, blob, bias, ctx.n, ctx.k, ctx.dtype = inputs
    ctx.save_for_backward(blob)
    ctx.x_dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of x and the bias; the packed weight is frozen."""
    (blob,) = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = torch.ops.wcodec.decode(blob, ctx.n, ctx.k, ctx.dtype)
        grad_x = (grad.to(weight.dtype) @ weight).to(ctx.x_dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.reshape(-1, ctx.n).sum(0).to(ctx.bias_dtype)
    return grad_x, None, grad_bias, None, None, None


for _key in ("CPU", "CUDA"):
    _library.impl("linear", _op_linear, _key)
    _library.impl("linear_grad", _op_linear, _key)
    _library.impl("decode", _op_decode, _key)
torch.library.register_fake("wcodec::linear", _fake_linear, lib=_library)
torch.library.register_fake("wcodec::linear_grad", _fake_linear, lib=_library)
torch.library.register_fake("wcodec::decode", _fake_decode, lib=_library)
torch.library.register_autograd("wcodec::linear_grad", _backward, setup_context=_save, lib=_library)
