"""Choosing how one product runs: a fused kernel, decode + cuBLAS, or plain cuBLAS.

Where the shape was measured, the fastest measured path runs. Elsewhere the nearest measured shape says which
kind of path to take and what to expect, and a rule gives the kernel's configuration. On GPUs that nobody
measured, the small-m kernel serves up to 32 tokens, the wgmma kernel up to 256 where the GPU has it, decode +
cuBLAS the rest.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wcodec.cuda.device import DeviceInfo, device_info
from wcodec.errors import WCodecError
from wcodec.fused import GEMM, GEMV, KERNELS, bind_router, supported
from wcodec.kernels.gemm import GemmConfig
from wcodec.paths import Run, chunked_path, cpu_path, decode_path, original_path
from wcodec.tables import CLASSES, Entry, Found, tables_for, token_class

if TYPE_CHECKING:
    from wcodec.state import PackedWeight

__all__ = ["CLASSES", "Choice", "Plan", "choose", "make_plan", "warm_up"]

CPU, CUBLAS, DECODE, ROUTER = "cpu", "cublas", "decode", "router"

_GEMV_TOKENS = 32
_KERNEL_TOKENS = 256
_REACH = 1.5  # a class of more than this many times the tokens says nothing about their time
_FIXED_US = 4.5  # of every product, however small: launch and first access to memory, in a graph's replay
_CHUNKS = 2  # more chunks than this read the packed weight more often than decoding it costs


@dataclass(frozen=True)
class Choice:
    """What the dispatcher decided for one shape and token count.

    Attributes
    ----------
    path : str
        ``gemv``, ``gemm``, ``decode`` (decode + cuBLAS), ``cublas``, ``router`` or ``cpu``.
    why : str
        The reason, for people.
    config : object or None
        The kernel's configuration.
    us, cublas_us : float or None
        Expected raw times in µs, of this path and of cuBLAS on the uncompressed weight.
    source : str
        What the times rest on.
    """

    path: str
    why: str
    config: Any = None
    us: float | None = None
    cublas_us: float | None = None
    source: str = "not measured"


@dataclass(frozen=True)
class Plan:
    """A choice, ready to run: ``run(x, out, bias)`` takes x (m, K) and out (m, N).

    `by_address` says that it asks x and out for their addresses alone: leading dimensions need no view.
    """

    tokens: int
    choice: Choice
    run: Run
    workspace_bytes: int = 0
    by_address: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the choice as JSON-ready values (see `PackedWeight.explain`)."""
        c = self.choice
        return {
            "tokens": self.tokens,
            "path": c.path,
            "why": c.why,
            "us": c.us,
            "cublas_us": c.cublas_us,
            "source": c.source,
        }


def make_plan(weight: PackedWeight, tokens: int) -> Plan:
    """Decide how a weight serves a token count and bind everything that does not change between calls."""
    if weight.device.type != "cuda":
        choice = Choice(CPU, "no GPU: decode and multiply on the host, summed in FP32")
        return Plan(tokens, choice, cpu_path(weight))
    if weight.is_raw:
        return _raw_plan(weight, tokens)
    if not (weight.n and weight.k):  # kernels' rules divide by the work there is
        return Plan(tokens, Choice(DECODE, "nothing to multiply"), decode_path(weight))
    info = device_info(weight.device.index)
    choice = choose(weight.n, weight.k, tokens, info, weight.max_tokens, weight.original is not None)
    if choice.path == CUBLAS:
        return Plan(tokens, choice, original_path(weight))
    if choice.path == DECODE:
        return Plan(tokens, choice, decode_path(weight))
    limit = min(weight.max_tokens, _KERNEL_TOKENS)
    if tokens > limit:
        whole = make_plan(weight, limit)
        rest = make_plan(weight, tokens % limit) if tokens % limit else None
        return Plan(tokens, choice, chunked_path(whole.run, rest.run if rest else None, limit))
    bound = KERNELS[choice.path].bind(weight, tokens, choice.config)
    return Plan(tokens, choice, bound.run, bound.workspace_bytes, by_address=True)


def choose(n: int, k: int, tokens: int, info: DeviceInfo, max_tokens: int, has_original: bool) -> Choice:
    """Choose the path of a ``bf16-w12`` weight of shape (n, k) on a GPU.

    Parameters
    ----------
    n, k, tokens : int
        Sizes of the product.
    info : DeviceInfo
        The GPU.
    max_tokens : int
        Most tokens one kernel call gets.
    has_original : bool
        Whether the uncompressed weight is there too, so that cuBLAS is a choice (``keep="both"``).
    """
    limit = min(max_tokens, _KERNEL_TOKENS)
    found = tables_for(info.index).find(n, k, tokens)
    if tokens > limit:
        return _choose_many(n, k, tokens, limit, info, has_original, found)
    usable = [entry for entry in found.entries if supported(entry.kernel, info)] if found else []
    if not usable:
        if has_original:
            return Choice(CUBLAS, "no kernel was measured for this GPU, and the original is there")
        path = GEMV if tokens <= _GEMV_TOKENS else GEMM if supported(GEMM, info) else DECODE
        return Choice(path, "rule: nothing was measured for this GPU", _default(path, n, k, tokens, info))
    assert found is not None
    best = usable[0]
    us, cublas_us, source = _expect(best, found, n, k)
    if has_original and cublas_us <= us:
        return Choice(CUBLAS, "faster than every kernel", None, cublas_us, cublas_us, source)
    if not found.exact:
        config = _default(best.kernel, n, k, tokens, info)
        why = f"rule: fastest for the nearest measured shape {best.n}×{best.k}"
    else:
        config, why = _measured_config(best, n, k, tokens, info), "fastest measured"
        if config is None and best.kernel in KERNELS:
            why = f"rule: what was fastest on {found.device} does not run here"
            return Choice(best.kernel, why, _default(best.kernel, n, k, tokens, info))
    return Choice(best.kernel, why, config, us, cublas_us, source)


def _choose_many(
    n: int, k: int, tokens: int, limit: int, info: DeviceInfo, has_original: bool, found: Found | None
) -> Choice:
    """Choose for more tokens than one kernel call gets."""
    if has_original:
        return Choice(CUBLAS, f"more than {limit} tokens, and the original is there")
    if found is not None and found.entries[0].m > _REACH * tokens:
        found = None
    measured = {entry.kernel: entry for entry in found.entries} if found else {}
    us = cublas_us = None
    source = "not measured"
    if found is not None and DECODE in measured:
        us, cublas_us, source = _expect(measured[DECODE], found, n, k)
    chunks = -(-tokens // limit)
    if chunks <= _CHUNKS and limit > _GEMV_TOKENS and supported(GEMM, info):
        one = choose(n, k, limit, info, limit, False)
        if us is None or (one.us is not None and chunks * one.us < us):
            total = None if one.us is None else chunks * one.us
            return Choice(GEMM, f"{chunks} calls of at most {limit} tokens", None, total, cublas_us, source)
    return Choice(DECODE, f"more than {limit} tokens: decode, then cuBLAS", None, us, cublas_us, source)


def _raw_plan(weight: PackedWeight, tokens: int) -> Plan:
    plain = original_path(weight)
    bound = bind_router(weight, tokens, plain)
    if bound is None:
        why = "the weight is stored raw: no format makes it smaller"
        return Plan(tokens, Choice(CUBLAS, why), plain)
    why = f"FP32 logits of BF16 tokens in one launch, {bound.remark}"
    return Plan(tokens, Choice(ROUTER, why), bound.run, bound.workspace_bytes)


def _default(path: str, n: int, k: int, tokens: int, info: DeviceInfo) -> Any:
    """Return the rule's configuration of a fused kernel; None for other paths.

    One per class, so that whatever a served token count needs was compiled when the weight was prepared.
    """
    return KERNELS[path].default(n, k, token_class(tokens), info) if path in KERNELS else None


def _measured_config(entry: Entry, n: int, k: int, tokens: int, info: DeviceInfo) -> Any | None:
    """Return the configuration of a kernel's entry; None for other paths, and where it does not run here.

    GPUs of one kind differ in multiprocessors, and a table may be older than the kernel.
    """
    if entry.kernel not in KERNELS:
        return None
    try:
        config = KERNELS[entry.kernel].config(entry.config or {})
        if isinstance(config, GemmConfig):
            config.grid(n, k, tokens, info.multiprocessors)
    except (TypeError, ValueError, WCodecError):
        return None
    return config


def _expect(entry: Entry, found: Found, n: int, k: int) -> tuple[float, float, str]:
    """Return the expected times of an entry's kernel and of cuBLAS for a shape, and what they rest on."""
    if found.exact:
        return entry.us, found.cublas_us, f"measured on {found.device}"
    scale = n * k / (entry.n * entry.k)

    def scaled(us: float) -> float:
        return round(_FIXED_US + max(us - _FIXED_US, 0) * scale, 2)

    source = f"scaled by size from {entry.n}×{entry.k} on {found.device}"
    return scaled(entry.us), scaled(found.cublas_us), source


def warm_up(weights: list[PackedWeight]) -> None:
    """Compile and load the kernels that weights need, in parallel, and get their workspaces ready."""
    jobs = {}
    for weight in weights:
        for tokens in CLASSES:
            if tokens <= weight.max_tokens:
                jobs[weight.n, weight.k, weight.is_raw, weight.original is None, tokens] = weight
    if not jobs:
        return
    with ThreadPoolExecutor() as pool:
        plans = list(pool.map(lambda job: job[1].plan(job[0][-1]), jobs.items()))
    need = max(plan.workspace_bytes for plan in plans)
    for spaces in {id(weight.workspaces): weight.workspaces for weight in weights}.values():
        spaces.reserve(need)
