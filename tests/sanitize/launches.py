"""Launch one kernel in all its structures: ``python -m tests.sanitize.launches KERNEL TOOL``.

Every tensor is a ``cudaMalloc`` of its own with exactly the bytes that a kernel may touch (the driver of this
package switches torch's caching off), so that an access one element too far is one outside of every buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from bench.muse_moe_w4a16 import make_weights as make_experts
from tests.kernels.gemm_instances import EXAMPLES as GEMM
from tests.kernels.gemv_instances import EXAMPLES as GEMV
from tests.kernels.matrices import Bits, few_exceptions
from tests.kernels.products import on_gpu, padded, processors, stream
from wcodec import moe
from wcodec.codec import encode
from wcodec.cuda import compiler
from wcodec.cuda.device import device_info
from wcodec.errors import WCodecError
from wcodec.formats.bf16_w12 import BRICK_BYTES, TILE
from wcodec.kernels import decode, pack
from wcodec.kernels.gemm import Bricks, Gemm, GemmConfig
from wcodec.kernels.gemv import Gemv, GemvConfig
from wcodec.kernels.router import Router, exact_parts, serves

# N = 1, K = 1, K not a multiple of 8, N not one of 64, several bricks each way, patches of both kinds.
SHAPES = ((1, 15), (65, 1), (130, 136), (200, 330))
SPLIT_SHAPE = (70, 1096)  # enough bricks along K for every split, an odd number of them
DEALING_PROCESSORS = 5  # so few that a CTA is dealt several tiles, and fills stages again

Config = TypeVar("Config", GemvConfig, GemmConfig)


class Weights:
    """A packed matrix without its footer: bricks and overflow list end where their buffers do."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.bits: Bits = few_exceptions(*shape)
        packed = encode(self.bits, format="bf16-w12")
        self.shape, self.table, self.overflow_count = shape, bytes(packed.table), packed.overflow_count
        bricks = -(-shape[0] // TILE) * -(-shape[1] // TILE) * BRICK_BYTES
        body = packed.blob[: bricks + 4 * packed.overflow_count]
        self.body = torch.from_numpy(body.copy()).cuda()
        self._bricks = torch.from_numpy(body[:bricks].copy()).cuda()
        self._overflow = torch.from_numpy(body[bricks:].copy()).cuda()
        table, count = pack.split_table(self.table), packed.overflow_count
        self.bricks = Bricks(self._bricks.data_ptr(), self._overflow.data_ptr(), count, table, *shape)


def token_counts(most: int) -> set[int]:
    """One, an odd number, as many as fit."""
    return {1, max(most - 3, 1), most}


def histogram() -> None:
    """Aligned rows, odd ones, rows apart."""
    for shape in (*SHAPES, (128, 192)):
        counts = torch.zeros(128, dtype=torch.int64, device="cuda")
        pack.launch_histogram(on_gpu(few_exceptions(*shape)), counts)
        pack.launch_histogram(on_gpu(few_exceptions(*shape))[:, : shape[1] - 3], counts)


def packing() -> None:
    """Both passes of the packer."""
    for shape in (*SHAPES, (128, 192)):
        weight = on_gpu(few_exceptions(*shape))
        plan = pack.make_plan(weight)
        count, ends = pack.overflow_ends(weight, plan)
        body = torch.zeros(plan.brick_count * BRICK_BYTES + 4 * count, dtype=torch.uint8, device="cuda")
        pack.launch_pack(weight, plan, ends, body)
        check(torch.equal(body, Weights(shape).body))


def unpacking() -> None:
    """Whole matrices and row ranges, by 16 bytes and by single weights."""
    for shape in (*SHAPES, (128, 192)):
        w = Weights(shape)
        for rows in ((0, shape[0]), (shape[0] // 3, shape[0] // 3 * 2)):
            got = decode.unpack(w.body, shape, w.table, w.overflow_count, rows=rows)
            check(torch.equal(got.view(torch.int16), on_gpu(w.bits)[slice(*rows)].view(torch.int16)))


def cases(
    examples: Mapping[str, Config], choose: Callable[[Config], bool]
) -> Iterator[tuple[Weights, Config, int]]:
    """Every matrix in the structures that `choose` takes, for several numbers of tokens."""
    for shape in (*SHAPES, SPLIT_SHAPE):
        w = Weights(shape)
        for config in filter(choose, examples.values()):
            for m in token_counts(config.tokens):
                print(shape, m, config, flush=True)  # what the tool reports next is of this
                yield w, config, m


def small_products(choose: Callable[[GemvConfig], bool]) -> Callable[[], None]:
    """The small-m kernel in the structures that `choose` takes."""

    def run() -> None:
        for w, config, m in cases(GEMV, choose):
            x, out, bias = operands(m, *w.shape)
            kernel = Gemv(config, w.bricks, m, 0)
            kernel(stream(), x.data_ptr(), x.stride(0), out.data_ptr(), w.shape[0], bias=bias.data_ptr())

    return run


def large_products(choose: Callable[[GemmConfig], bool]) -> Callable[[], None]:
    """The wgmma kernel in the structures that `choose` takes."""

    def run() -> None:
        for w, config, m in cases(GEMM, choose):
            large_product(w, config, m)

    return run


def large_product(w: Weights, config: GemmConfig, m: int) -> None:
    """One launch, where the instance can run the shape."""
    if config.cluster and config.units(w.shape[1]) > config.split * config.stages:
        return  # the tools keep a warp that has arrived at the cluster's barrier from waiting for free stages
    resident = processors() if config.split else DEALING_PROCESSORS
    try:
        nbytes = config.partial_bytes(*w.shape, m, resident)
        kernel = Gemm(config, w.bricks, m, 0, resident)
    except WCodecError:
        return
    x, out, bias = operands(m, *w.shape)
    partials = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    kernel(
        stream(),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        w.shape[0],
        partials=partials.data_ptr(),
        bias=bias.data_ptr(),
    )
    check(not partials.any())


def experts(*counts: int) -> Callable[[], None]:
    """All kernels of the routed experts, for numbers of tokens that one kind of call serves."""

    def run() -> None:
        for hidden, intermediate in ((128, 64), (192, 128), (512, 512), (4096, 64)):
            local = [1, 2, 4]
            made = make_experts(experts=len(local), hidden=hidden, intermediate=intermediate)
            state = moe.prepare(
                made, moe.Config(hidden, intermediate, num_experts=6, top_k=3, local_experts=local)
            )
            for m in counts:
                print(hidden, intermediate, m, flush=True)
                ids = torch.rand(m, 6, device="cuda").argsort(1)[:, :3].contiguous()
                ids[: m // 2, 0] = 2  # an expert with many tokens; some tokens meet it twice
                x, gates = torch.randn(m, hidden, device="cuda").bfloat16(), torch.rand(m, 3, device="cuda")
                check(moe.forward(x, ids, gates, state).isfinite().all().item())

    return run


def router(tokens: Iterable[int]) -> Callable[[], None]:
    """Logits for numbers of tokens that one of the two router kernels serves."""

    def run() -> None:
        for shape in ((1, 8), (8, 64), (100, 264), (257, 520), (2112, 2120)):  # the last fills stages again
            w = torch.randn(*shape, device="cuda")
            parts = exact_parts(w)
            for m in tokens:
                if not serves(w, m, parts, device_info(0)):
                    continue
                kernel = Router(w, m, parts)
                x, out = (
                    torch.randn(m, shape[1], device="cuda").bfloat16(),
                    torch.empty(m, shape[0], device="cuda"),
                )
                scratch = torch.zeros(kernel.workspace_bytes, dtype=torch.uint8, device="cuda")
                kernel(stream(), x.data_ptr(), shape[1], out.data_ptr(), workspace=scratch.data_ptr())
                check(not scratch.any())

    return run


def control() -> None:
    """A product without barriers into an output that is one element too short: what tools have to find."""
    shape = (64, 64)
    w, config = Weights(shape), next(iter(GEMV.values()))
    x, _, bias = operands(1, *shape)
    out = torch.empty(63, device="cuda", dtype=torch.bfloat16)
    kernel = Gemv(config, w.bricks, 1, 0)
    kernel(stream(), x.data_ptr(), x.stride(0), out.data_ptr(), 64, bias=bias.data_ptr())


def operands(m: int, n: int, k: int) -> tuple[Any, Any, Any]:
    """x, output and bias of a product."""
    x = padded(torch.randn(m, k, device="cuda"))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return x, out, torch.randn(n, device="cuda").bfloat16()


def check(right: bool) -> None:
    """Stop where a result is wrong: what is launched here is to be what the tests launch."""
    if not right:
        raise SystemExit("a wrong result")


#: By the name in the report: the name of the device function, and what launches it.
KERNELS: dict[str, tuple[str, Callable[[], None]]] = {
    "histogram": ("bf16_w12_histogram", histogram),
    "pack": ("bf16_w12_pack", packing),
    "unpack": ("bf16_w12_unpack", unpacking),
    "gemv, register ring": ("sm80_gemv", small_products(lambda c: c.register_ring)),
    "gemv, shared ring": ("sm80_gemv", small_products(lambda c: not c.register_ring and c.split == 1)),
    "gemv, cluster": ("sm80_gemv", small_products(lambda c: c.split > 1)),
    "gemm, unsplit": ("sm90_gemm", large_products(lambda c: c.split == 1)),
    "gemm, split": ("sm90_gemm", large_products(lambda c: c.split > 1 and not c.cluster)),
    "gemm, dealt evenly": ("sm90_gemm", large_products(lambda c: c.split == 0)),
    "gemm, cluster": ("sm90_gemm", large_products(lambda c: c.cluster)),
    "experts, at most 8 tokens": ("_moe_", experts(1, 8)),
    "experts, at most 16 tokens": ("_moe_", experts(9, 16)),
    "experts, more tokens": ("_moe_", experts(17, 150)),
    "router, few tokens": ("router_fma", router((1, 3, 8))),
    "router, more tokens": ("sm90_router", router((9, 16, 33, 100))),
}
CONTROL = "control"


def options(name: str, tool: str) -> Iterator[str]:
    """How kernels are compiled: with source lines, which the tools name and which change no instruction.

    For racecheck there are two barriers of the whole CTA in a row: it loses one where groups of warps have
    met at others before. And all lanes of a warp give a stage back, where one does for all: it asks each lane
    that reads for an arrival.
    """
    yield "--generate-line-info"
    if name == CONTROL:
        yield "-D__syncthreads()=((void)0)"
    elif tool == "racecheck":
        yield "-DWC_ARRIVALS=32"
        yield "-D__syncthreads()=(__syncthreads(),__syncthreads())"


def main() -> None:
    """Launch the kernels of one row of the report."""
    name, tool = sys.argv[1:]
    compiler._OPTIONS = (*compiler._OPTIONS, *options(name, tool))
    torch.manual_seed(0)
    (control if name == CONTROL else KERNELS[name][1])()
    torch.cuda.synchronize()
    print("launched", name)


if __name__ == "__main__":
    main()
