"""Timing on a GPU for ``wcodec tune`` and ``wcodec bench``: graph replay, cold L2, alternation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_FLUSH_BYTES = 256 << 20
_READ_THREADS = 512
_READ_CTAS_PER_SM = 2
_LOADS_PER_THREAD = 8
_WARM_UP_CALLS = 3


class Timer:
    """Captures calls in CUDA graphs and times their replays.

    256 MB are *read* before every replay, so that nothing is found in L2; a write would leave dirty lines
    whose eviction the next kernel pays for. Captures happen on one stream that ran the calls before, so
    that split-K workspaces are ready and no memset enters the graphs.

    Parameters
    ----------
    device : int
        CUDA device index.

    Attributes
    ----------
    empty_us : float
        Replaying a graph of one empty kernel: the part of every time that is not the kernel's.
    """

    def __init__(self, device: int) -> None:
        import torch

        from wcodec.cuda import device_info, load

        self.device = torch.device("cuda", device)
        self._alive: list[Any] = []
        self._side: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._lines = torch.randint(0, 256, (_FLUSH_BYTES,), dtype=torch.uint8, device=self.device)
        self._sink = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._read = load(
            "read_floor.cu", {"WC_UNROLL_LOADS": _LOADS_PER_THREAD, "WC_ONCE": 0}, device
        ).frame("PQP", _READ_CTAS_PER_SM * device_info(device).multiprocessors, _READ_THREADS)
        empty = load("empty.cu", {}, device).frame("", 1, 32)
        graph = self.capture(lambda: empty(self._stream()))
        self.empty_us = float(np.median(self.times([graph], 100)))

    def capture(self, run: Callable[[], Any]) -> Any:
        """Return a graph of one call, after a few calls outside of it; its outputs stay alive."""
        import torch

        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(_WARM_UP_CALLS):
                run()
        self._side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._side):
            output = run()
        current.wait_stream(self._side)
        self._alive += [graph, output, run]
        return graph

    def times(self, graphs: Sequence[Any], repeats: int) -> npt.NDArray[np.float64]:
        """Return replay times in µs, shape (graphs, repeats); every second round runs in reverse order."""
        import torch

        event: Any = torch.cuda.Event
        events = [[[event(enable_timing=True) for _ in range(2)] for _ in range(repeats)] for _ in graphs]
        for graph in graphs:
            graph.replay()
        for i in range(repeats):
            order = range(len(graphs)) if i % 2 == 0 else reversed(range(len(graphs)))
            for index in order:
                start, end = events[index][i]
                self._read(self._stream(), self._lines.data_ptr(), _FLUSH_BYTES // 16, self._sink.data_ptr())
                start.record()
                graphs[index].replay()
                end.record()
        torch.cuda.synchronize(self.device)
        return np.array([[1e3 * start.elapsed_time(end) for start, end in row] for row in events])

    def medians(self, runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
        """Capture several calls and return the median of each in µs, measured in alternation."""
        graphs = [self.capture(run) for run in runs]
        return [float(us) for us in np.median(self.times(graphs, repeats), axis=1)]

    def release(self) -> None:
        """Let go of every captured graph, once nothing of them runs any more."""
        import torch

        torch.cuda.synchronize(self.device)
        self._alive.clear()

    def _stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.device).cuda_stream)
