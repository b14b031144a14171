"""Measuring which kernel and configuration is fastest on this GPU, for shapes that the user names."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wcodec.cuda.device import device_info
from wcodec.errors import WCodecError
from wcodec.fused import KERNELS, Bound
from wcodec.kernels.gemm import GemmConfig
from wcodec.paths import Run, decode_path, original_path
from wcodec.tables import CLASSES, Entry, table_text, write_tuned

if TYPE_CHECKING:
    import torch

    from wcodec.state import PackedWeight
    from wcodec.timing import Timer

_QUICK_REPEATS = 9
_FINAL_REPEATS = 41
_FINALISTS = 6
_TIE = 1.01  # times, less an empty launch, that differ less are equal
_WEIGHT_SCALE = 0.02

#: Token counts beyond the kernels' own classes at which decode + cuBLAS is measured too.
PREFILL = (512, 4096)


def tune(
    shapes: Iterable[tuple[int, int]],
    device: Any = "cuda",
    tokens: Iterable[int] = (*CLASSES, *PREFILL),
    report: Callable[[list[Entry]], None] | None = None,
    out: Path | None = None,
) -> list[Entry]:
    """Measure the paths of some shapes on a GPU and keep the result for every later start.

    All candidates of a product are timed quickly in alternation, then the best few of each kernel again, with
    cuBLAS in every round. The weights are Gaussian; of equally fast instances of the wgmma product the one is
    taken that more exceptions delay least.

    Parameters
    ----------
    shapes : iterable of (int, int)
        N and K of the weights, as they lie on one GPU.
    device : optional
        CUDA device.
    tokens : iterable of int
        Token counts to measure; each serves the counts down to the one before.
    report : callable, optional
        Called with the entries of every product as they are found.
    out : Path, optional
        Write the table there instead of adding to the GPU's own beside the cubin cache.

    Returns
    -------
    list of Entry
        The fastest configuration per shape, token count and kernel, or one as fast.
    """
    import torch

    from wcodec.preparation import prepare
    from wcodec.timing import Timer

    counts = sorted(set(tokens))
    entries: list[Entry] = []
    timer: Timer | None = None
    for n, k in shapes:
        state = prepare({"w": random_weight(n, k, device)}, device, keep="both")
        weight = state["w"]
        if weight.is_raw:
            raise WCodecError(f"a {n} × {k} matrix does not get smaller: there is nothing to tune")
        timer = timer or Timer(state.device.index)
        for m in counts:
            found = list(_measure(weight, m, timer))
            entries += found
            if report is not None:
                report(found)
    if timer is not None:
        info = device_info(timer.device.index)
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "torch": torch.__version__,
            "empty_us": round(timer.empty_us, 2),
        }
        if out is None:
            write_tuned(info, entries, **about)
        else:
            out.write_text(table_text(info, entries, **about), encoding="utf-8")
    return entries


def random_weight(n: int, k: int, device: Any) -> torch.Tensor:
    """Return Gaussian weights as trained ones look to the codec: standard deviation 0.02, BF16."""
    import torch

    return (torch.randn(n, k, device=device) * _WEIGHT_SCALE).bfloat16()


def _measure(weight: PackedWeight, m: int, timer: Timer) -> Iterator[Entry]:
    """Yield the best entry of every kernel for one shape and token count."""
    import torch

    x = torch.randn(m, weight.k, device=weight.device).bfloat16()
    out = torch.empty(m, weight.n, device=weight.device, dtype=torch.bfloat16)
    cublas = original_path(weight)
    packed_only = _without_original(weight)
    contenders: list[tuple[str, Any, Run]] = [("decode", None, decode_path(packed_only))]
    for name, config, run in _bound(packed_only, m):
        contenders.append((name, config, run))

    def calls(chosen: list[tuple[str, Any, Run]]) -> list[Callable[[], None]]:
        return [functools.partial(run, x, out, None) for run in (cublas, *(run for _, _, run in chosen))]

    quick = timer.medians(calls(contenders), _QUICK_REPEATS)[1:]
    best: list[tuple[str, Any, Run]] = []
    for name in dict.fromkeys(name for name, _, _ in contenders):
        ranked = sorted((us, i) for i, us in enumerate(quick) if contenders[i][0] == name)
        best += [contenders[i] for _, i in ranked[:_FINALISTS]]
    cublas_us, *final = timer.medians(calls(best), _FINAL_REPEATS)
    timer.release()
    for name in dict.fromkeys(name for name, _, _ in best):
        times = {i: us for i, us in enumerate(final) if best[i][0] == name}
        most = timer.empty_us + _TIE * (min(times.values()) - timer.empty_us)
        equal = (i for i, us in times.items() if us <= most)
        i = min(equal, key=lambda i: (*_patience(best[i][1]), times[i]))
        config = None if best[i][1] is None else asdict(best[i][1])
        yield Entry(weight.n, weight.k, m, name, config, round(times[i], 2), round(cublas_us, 2))


def _patience(config: Any) -> tuple[bool, bool, int]:
    """Order equally fast instances of the wgmma product: those first that many exceptions delay least.

    Row tiles hide each other's patches; one alone is helped by early patches, and by a ring that is not too
    deep.
    """
    if not isinstance(config, GemmConfig):
        return False, False, 0
    alone = config.row_groups == 1
    return alone and not config.early_patches, alone, config.stages


def _bound(weight: PackedWeight, m: int) -> Iterator[tuple[str, Any, Run]]:
    """Yield every candidate configuration of every kernel, bound; compiled in parallel."""
    info = device_info(weight.device.index)
    jobs = [
        (name, config)
        for name, kernel in KERNELS.items()
        if kernel.supported(info)
        for config in kernel.candidates(weight.n, weight.k, m, info)
    ]

    def bind(job: tuple[str, Any]) -> Bound | None:
        try:
            return KERNELS[job[0]].bind(weight, m, job[1])
        except WCodecError:  # the build refused it (spills), or the GPU cannot launch it
            return None

    with ThreadPoolExecutor() as pool:
        bound = list(pool.map(bind, jobs))
    weight.workspaces.reserve(max((one.workspace_bytes for one in bound if one), default=0))
    for (name, config), one in zip(jobs, bound, strict=True):
        if one is not None:
            yield name, config, one.run


def _without_original(weight: PackedWeight) -> PackedWeight:
    """Return a second handle of the same blob, so that decode + cuBLAS really decodes."""
    from wcodec.state import PackedWeight

    return PackedWeight(weight.blob, weight.footer, workspaces=weight.workspaces)
