"""How every GPU bench of this project measures: one way, so that figures compare.

- A candidate is captured once in a CUDA graph and replayed between two events: no host time is in the figure.
- L2 is cold: 256 MB are *read* before every replay. A write would leave dirty lines whose eviction the next
  kernel pays for. L2 keeps some of what is used again and again all the same: a row says where a time lies
  below the read floor of its bytes, and `flush_bytes` reads more.
- Base and candidate alternate, A B then B A, so that drift of clocks and neighbours falls on both.
- The graph of an empty kernel is measured in the same run: *raw* is what the events say, *net* raw minus it.
- Inputs are random and fresh, outputs are poisoned before they are checked, and nothing is timed on zeros.
- Captured graphs stay alive for the session: a freed graph's pool takes library workspaces with it.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.intervals import F64, Estimate, Pairs
from wcodec.cuda.module import load

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 256 << 20
# (loads in flight per thread, CTAs per SM): which one reads fastest depends on the size.
READ_CONFIGS = ((4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (16, 2))
READ_THREADS = 512


@dataclass(frozen=True)
class Row:
    """One line of a results table; times in µs, `x` is base / ours."""

    name: str
    base: str
    base_raw: float
    base_net: float
    ours_raw: float
    ours_net: float
    x_raw: Estimate
    x_net: Estimate
    read_bytes: int
    gb_per_s: float
    floor_raw: float
    over_floor: float
    base_floor_raw: float

    @property
    def is_cold(self) -> bool:
        """Whether both sides took as long as reading their bytes; if not, L2 still held some of them."""
        slack = 0.97  # floors are measured too
        return self.base_raw >= slack * self.base_floor_raw and self.ours_raw >= slack * self.floor_raw

    def __str__(self) -> str:
        return (
            f"{self.name:<34} {self.base} {self.base_raw:6.1f} raw {self.base_net:6.1f} net | ours"
            f" {self.ours_raw:6.1f} raw {self.ours_net:6.1f} net | x {self.x_raw.value:5.2f} raw,"
            f" {self.x_net!s:>18} net | {self.gb_per_s:5.0f} GB/s, {self.over_floor:+5.1f} µs over the floor"
            f"{'' if self.is_cold else ' | below a floor: L2 WAS NOT COLD'}"
        )


class Session:
    """Captures, replays and compares on one GPU.

    Parameters
    ----------
    repeats : int
        Pairs per comparison.
    device : int
        CUDA device.
    flush_bytes : int
        Read before every replay.

    Attributes
    ----------
    empty : float
        Raw µs of the graph of an empty kernel.
    floors : dict of int to float
        Raw µs of a plain read, by bytes, as far as `floor` was asked.
    """

    def __init__(self, repeats: int = 100, device: int = 0, flush_bytes: int = FLUSH_BYTES) -> None:
        self.repeats = repeats
        self.flush_bytes = flush_bytes
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self._side = torch.cuda.Stream(self.device)
        self._alive: list[Any] = []
        self.floors: dict[int, float] = {}
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._sink = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._flush = self._read_graph(self.random_bytes(flush_bytes), *READ_CONFIGS[3], once=False)
        empty = load("empty.cu", {}, device).frame("", 1, 32)
        graph = self.capture(lambda: empty(self.stream()))
        self.empty = float(np.median(self.times([graph], 4 * repeats)[0]))

    def stream(self) -> int:
        """Raw handle of torch's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def random_bytes(self, count: int) -> torch.Tensor:
        """Return random bytes on the device, kept alive."""
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, device=self.device)
        self._alive.append(data)
        return data

    def capture(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Capture `run` after three warm-up calls; graph and outputs stay alive.

        Everything is warmed up and captured on one stream of the session: what libraries and kernels keep
        per stream (workspaces) is then there before the capture, and no memset of it gets into the graph.
        """
        graph, output = capture(run, self._side)
        self._alive += [graph, output, run]
        return graph

    def times(self, graphs: Sequence[torch.cuda.CUDAGraph], repeats: int | None = None) -> F64:
        """Cold-L2 replay times in µs, shape (graphs, repeats); every second round runs in reverse."""
        repeats = repeats or self.repeats
        events = [
            [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)] for _ in graphs
        ]
        for graph in graphs:
            graph.replay()
        for i in range(repeats):
            order = range(len(graphs)) if i % 2 == 0 else reversed(range(len(graphs)))
            for index in order:
                start, end = events[index][i]
                self._flush.replay()
                start.record()
                graphs[index].replay()
                end.record()
        torch.cuda.synchronize(self.device)
        return np.array([[1e3 * start.elapsed_time(end) for start, end in row] for row in events])

    def pair(
        self, base: torch.cuda.CUDAGraph, ours: torch.cuda.CUDAGraph, repeats: int | None = None
    ) -> Pairs:
        """Compare two graphs in alternation."""
        a, b = self.times([base, ours], repeats)
        return Pairs(a, b, self.empty)

    def best(self, graphs: Sequence[torch.cuda.CUDAGraph], repeats: int = 20) -> int:
        """Index of the graph with the smallest median."""
        return int(np.argmin(np.median(self.times(graphs, repeats), axis=1)))

    def floor(self, nbytes: int) -> float:
        """Raw µs that reading `nbytes` bytes takes: the fastest of several read kernels."""
        found = self.floors.get(nbytes)
        if found is None:
            data = self.random_bytes(max(-(-nbytes // 16), 1) * 16)
            times = self.times([self._read_graph(data, *config) for config in READ_CONFIGS], 30)
            found = self.floors[nbytes] = float(np.median(times, axis=1).min())
        return found

    def row(self, name: str, base_name: str, pairs: Pairs, read_bytes: int, base_bytes: int) -> Row:
        """Sum a comparison up; `read_bytes` and `base_bytes` are what ours and the base have to read."""
        net = pairs.ours_us - pairs.empty
        floor = self.floor(read_bytes)
        return Row(
            name,
            base_name,
            pairs.base_us,
            pairs.base_us - pairs.empty,
            pairs.ours_us,
            net,
            pairs.raw_ratio(),
            pairs.net_ratio(),
            read_bytes,
            read_bytes / net / 1e3,
            floor,
            pairs.ours_us - floor,
            self.floor(base_bytes),
        )

    def _read_graph(
        self, data: torch.Tensor, loads: int, per_sm: int, *, once: bool = True
    ) -> torch.cuda.CUDAGraph:
        kernel = load("read_floor.cu", {"WC_UNROLL_LOADS": loads, "WC_ONCE": int(once)}, self.device)
        frame = kernel.frame("PQP", per_sm * self._processors, READ_THREADS)
        return self.capture(
            lambda: frame(self.stream(), data.data_ptr(), data.numel() // 16, self._sink.data_ptr())
        )


def capture(
    run: Callable[[], Any], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture `run` on a stream, or one of its own, after three calls there; return its output, too."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = run()
    return graph, output


def poison(out: torch.Tensor) -> torch.Tensor:
    """Fill an output with NaN (floats) or a byte no kernel writes by chance, before it is checked."""
    return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(0xA5)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in FP64; NaN where anything was not written."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm())


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code: GPU, versions, date, command."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),  # as typed: argv has -m as an absolute path
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def save(name: str, session: Session, rows: Sequence[Row], **more: Any) -> Path:
    """Write ``bench/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    report = {**environment(), "repeats": session.repeats, "empty_us": session.empty}
    report |= {"flush_bytes": session.flush_bytes, **more}
    report["rows"] = [asdict(row) for row in rows]
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path
