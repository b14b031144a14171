"""The fused kernels as the dispatcher sees them: where they run, how configured, bound to a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wcodec.cuda.device import DeviceInfo, device_info
from wcodec.kernels import gemm_rule, gemv
from wcodec.kernels.gemm import Bricks, Gemm, GemmConfig
from wcodec.kernels.gemv import Gemv, GemvConfig
from wcodec.kernels.pack import split_table
from wcodec.kernels.router import Router, serves
from wcodec.paths import Run
from wcodec.state import ROW_ELEMENTS

if TYPE_CHECKING:
    import torch

    from wcodec.state import PackedWeight

GEMV, GEMM = "gemv", "gemm"


@dataclass(frozen=True)
class Bound:
    """A kernel bound to one weight and token count, the workspace a launch needs, a remark for people."""

    run: Run
    workspace_bytes: int
    remark: str = ""


@dataclass(frozen=True)
class Kernel:
    """One fused kernel.

    Attributes
    ----------
    supported : callable
        Whether it runs on a GPU.
    config : callable
        Makes a configuration of a table's JSON values.
    default : callable
        The rule for shapes that no table holds: ``(n, k, tokens, info) -> config``.
    bind : callable
        ``(weight, tokens, config) -> Bound``; compiles and loads.
    candidates : callable
        What ``wcodec tune`` tries: ``(n, k, tokens, info) -> configurations``.
    """

    supported: Callable[[DeviceInfo], bool]
    config: Callable[[Mapping[str, Any]], Any]
    default: Callable[[int, int, int, DeviceInfo], Any]
    bind: Callable[[PackedWeight, int, Any], Bound]
    candidates: Callable[[int, int, int, DeviceInfo], list[Any]]


def row_stride(k: int) -> int:
    """Elements between the rows of x as `wcodec.linear` hands it to kernels."""
    return k + -k % ROW_ELEMENTS


def bricks_of(weight: PackedWeight) -> Bricks:
    """Describe where a weight's bricks lie."""
    footer = weight.footer
    table = split_table(footer.table)
    return Bricks(weight.bricks, weight.overflow, footer.overflow_count, table, weight.n, weight.k)


def _bind_gemm(weight: PackedWeight, tokens: int, config: GemmConfig) -> Bound:
    import torch

    index = weight.device.index
    processors = device_info(index).multiprocessors
    nbytes = config.partial_bytes(weight.n, weight.k, tokens, processors)
    kernel = Gemm(config, bricks_of(weight), tokens, index, processors)
    stride, n, workspaces = row_stride(weight.k), weight.n, weight.workspaces
    current_stream = torch._C._cuda_getCurrentRawStream

    def run(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        stream = current_stream(index)
        kernel(
            stream,
            x.data_ptr(),
            stride,
            out.data_ptr(),
            n,
            partials=workspaces.block(stream, nbytes) if nbytes else 0,
            bias=0 if bias is None else bias.data_ptr(),
        )

    return Bound(run, nbytes)


def _bind_gemv(weight: PackedWeight, tokens: int, config: GemvConfig) -> Bound:
    import torch

    index = weight.device.index
    kernel = Gemv(config, bricks_of(weight), tokens, index)
    stride, n = row_stride(weight.k), weight.n
    current_stream = torch._C._cuda_getCurrentRawStream

    def run(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        kernel(
            current_stream(index),
            x.data_ptr(),
            stride,
            out.data_ptr(),
            n,
            bias=0 if bias is None else bias.data_ptr(),
        )

    return Bound(run, 0)


def bind_router(weight: PackedWeight, tokens: int, plain: Run) -> Bound | None:
    """Bind the router kernel to a router's weights; None where it does not serve them.

    FP32 tokens go the `plain` way: the kernel takes BF16.
    """
    import torch

    index, matrix = weight.device.index, weight.original
    if not weight.is_router or matrix is None:
        return None
    if not serves(matrix, tokens, weight.router_parts, device_info(index)):
        return None
    kernel = Router(matrix, tokens, weight.router_parts)
    k, nbytes, workspaces = weight.k, kernel.workspace_bytes, weight.workspaces
    current_stream = torch._C._cuda_getCurrentRawStream

    def run(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        if x.dtype != torch.bfloat16:
            plain(x, out, bias)
            return
        stream = current_stream(index)
        workspace = workspaces.block(stream, nbytes) if nbytes else 0
        kernel(stream, x.data_ptr(), k, out.data_ptr(), workspace=workspace)
        if bias is not None:
            out += bias

    return Bound(run, nbytes, kernel.arithmetic)


KERNELS: dict[str, Kernel] = {
    GEMV: Kernel(
        supported=lambda info: info.capability >= (8, 0),
        config=lambda values: GemvConfig(**values),
        default=gemv.default_config,
        bind=_bind_gemv,
        candidates=gemv.candidates,
    ),
    GEMM: Kernel(
        supported=lambda info: info.has_wgmma,
        config=lambda values: GemmConfig(**values),
        default=gemm_rule.default_config,
        bind=_bind_gemm,
        candidates=gemm_rule.candidates,
    ),
}


def supported(name: str, info: DeviceInfo) -> bool:
    """Whether a path of the tables runs on a GPU; decode + cuBLAS runs on all."""
    return KERNELS[name].supported(info) if name in KERNELS else True
