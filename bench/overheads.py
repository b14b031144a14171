"""What the host side costs, beside its targets: ``python -m bench.overheads``.

Eager calls at one token, the first use of the package (compiling), the start after it (compiled kernels on
disk), and `wcodec.prepare` of pinned host memory: seconds, GB/s of BF16, and the peak of device memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

import wcodec
from bench.harness import RESULTS, environment
from wcodec.nn import PackedLinear

SHAPE = (8192, 1024)  # small, so that the GPU is done before the host
START_SHAPE = (4096, 8192)
BIG_SHAPE = (28672, 4096)
CALLS, ROUNDS, WARM_UP_ROUNDS = 50, 60, 5


@dataclass(frozen=True)
class Figure:
    """One measured value and the most it should be; None where it only explains another."""

    name: str
    value: float
    unit: str
    target: float | None = None

    def __str__(self) -> str:
        goal = "" if self.target is None else f"target {self.target:g}"
        missed = self.target is not None and self.value > self.target
        return f"{self.name:<58} {self.value:8.2f} {self.unit:<5} {goal}{' MISSED' if missed else ''}"


def weight(shape: tuple[int, int]) -> torch.Tensor:
    """Return a Gaussian matrix on the GPU."""
    return (torch.randn(shape, device="cuda") * 0.02).bfloat16()


@torch.no_grad()
def call_times() -> list[Figure]:
    """Host µs of one eager call, medians of batches that alternate."""
    w = weight(SHAPE)
    packed = wcodec.prepare({"w": w})["w"]
    x = torch.randn(1, SHAPE[1], device="cuda").bfloat16()
    batch = x[None]  # as models call it
    layer = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False, device="cuda", dtype=torch.bfloat16)
    module = PackedLinear.from_linear(layer)
    calls: dict[str, tuple[Callable[[], object], float | None]] = {
        "wcodec.linear": (lambda: wcodec.linear(x, packed), 12.0),
        "F.linear": (lambda: F.linear(x, w), None),
        "wcodec.linear with a batch dimension": (lambda: wcodec.linear(batch, packed), None),
        "F.linear with a batch dimension": (lambda: F.linear(batch, w), None),
        "PackedLinear": (lambda: module(x), None),
        "nn.Linear": (lambda: layer(x), None),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, (run, _) in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
    label = f"a call of {{}} at m = 1, {SHAPE[0]}×{SHAPE[1]}"
    return [
        Figure(label.format(name), float(np.median(times[name][WARM_UP_ROUNDS:])), "µs", target)
        for name, (_, target) in calls.items()
    ]


def start() -> None:
    """In a process of its own: print the seconds until a first weight is ready."""
    w = weight(START_SHAPE)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    wcodec.prepare({"w": w})
    torch.cuda.synchronize()
    print(time.perf_counter() - begin)


def start_times() -> list[Figure]:
    """Seconds of the first `prepare` in fresh processes, without compiled kernels on disk and with them."""
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "WCODEC_CACHE_DIR": cache}
        command = [sys.executable, "-m", "bench.overheads", "--start"]
        seconds = [
            float(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout)
            for _ in range(3)
        ]
        kernels = len(list(Path(cache).rglob("*.cubin")))
    return [
        Figure(f"first use: {kernels} kernels compiled on {os.cpu_count()} cores", seconds[0], "s", 10.0),
        Figure("start with compiled kernels", float(np.median(seconds[1:])), "s", 0.2),
    ]


def pinned_weights(gigabytes: float) -> dict[str, torch.Tensor]:
    """Return pinned host matrices of at least so many GB, fewer where memory cannot be pinned."""
    weights: dict[str, torch.Tensor] = {}
    while sum(w.nbytes for w in weights.values()) < gigabytes * 1e9:
        try:
            host = torch.empty(BIG_SHAPE, dtype=torch.bfloat16, pin_memory=True)
        except RuntimeError as error:
            print(f"no more than {len(weights)} matrices pinned: {error}", file=sys.stderr)
            break
        weights[str(len(weights))] = host.copy_(weight(BIG_SHAPE))
    return weights


def prepare_times(gigabytes: float) -> list[Figure]:
    """Seconds of `prepare` from pinned memory, and its peak of device memory."""
    weights = pinned_weights(gigabytes)
    if not weights:
        return []
    nbytes, largest = sum(w.nbytes for w in weights.values()), next(iter(weights.values())).nbytes
    wcodec.prepare({"first": weights["0"]})
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    state = wcodec.prepare(weights)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    over = torch.cuda.max_memory_allocated() - before - state.nbytes - largest
    return [
        Figure(f"prepare, {nbytes / 1e9:.1f} GB of pinned memory", seconds, "s", 4.0 * nbytes / 16e9),
        Figure("prepare, BF16 read", nbytes / seconds / 1e9, "GB/s"),
        Figure(f"prepare, peak over {state.nbytes / 1e9:.1f} GB packed and a matrix", over / 1e6, "MB"),
    ]


def main() -> None:
    """Measure, print, and write ``bench/results/overheads.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=16, help="BF16 weights to prepare")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start()
        return
    figures = []
    for part in (call_times, start_times, lambda: prepare_times(options.gigabytes)):
        for figure in part():
            print(figure, flush=True)
            figures.append(figure)
    RESULTS.mkdir(exist_ok=True)
    report = {
        **environment(),
        "command": "python -m bench.overheads",
        "cores": os.cpu_count(),
        "figures": [asdict(figure) for figure in figures],
    }
    (RESULTS / "overheads.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
