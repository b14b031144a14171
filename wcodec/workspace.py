"""Scratch memory of the split-K kernels: one block per stream, zero between launches.

Kernels that split K find their block zero and leave it zero, so no launch needs a memset and a captured graph
can be replayed. Two launches that may overlap must not share a block: every stream has its own, and a capture
on a stream that ran nothing before has its own too, because the graph may be replayed anywhere. Graphs
captured on one stream that was used before share that stream's block and follow the rule of cuBLAS's
workspaces: replay them one after the other.

A stream is known by its handle, here as in torch's allocator, and the driver gives the handle of a destroyed
stream to the next one at once: who makes streams of his own waits for their work before he destroys them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RESERVE = 2


class Workspaces:
    """The blocks of one state on one device.

    Parameters
    ----------
    device : torch.device
        CUDA device.
    nbytes : int
        Size of a block: the most that any launch of the state needs.
    """

    def __init__(self, device: torch.device, nbytes: int = 0) -> None:
        self.device = device
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._by_stream: dict[int, tuple[int, int]] = {}  # address and size
        self._by_capture: dict[tuple[int, int], torch.Tensor] = {}
        self._held: list[torch.Tensor] = []  # never freed: a captured graph may point into any of them
        self._reserve: list[torch.Tensor] = []
        self.reserve(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Get blocks of at least `nbytes` ready, so that new streams and captures need not allocate."""
        import torch

        self.nbytes = max(self.nbytes, nbytes)
        if not self.nbytes or sum(block.numel() >= self.nbytes for block in self._reserve) >= RESERVE:
            return
        self._reserve = [
            torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device) for _ in range(RESERVE)
        ]
        # Other streams will use them without waiting for this one.
        torch.cuda.current_stream(self.device).synchronize()

    def block(self, stream: int, nbytes: int) -> int:
        """Return the address of a zeroed block for launches on a stream.

        Parameters
        ----------
        stream : int
            Raw handle of the current stream.
        nbytes : int
            Bytes that the launch needs.
        """
        found = self._by_stream.get(stream)
        if found is not None and found[1] >= nbytes:
            return found[0]
        return self._new(stream, nbytes)

    def _new(self, stream: int, nbytes: int) -> int:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return self._captured((_capture_id(stream), stream), nbytes)
        with self._lock:
            block = self._take(nbytes)
            if block is None:
                block = torch.zeros(max(nbytes, self.nbytes), dtype=torch.uint8, device=self.device)
            self._held.append(block)
            self._by_stream[stream] = (block.data_ptr(), block.numel())
            return block.data_ptr()

    def _captured(self, key: tuple[int, int], nbytes: int) -> int:
        import torch

        with self._lock:
            block = self._by_capture.get(key)
            if block is None or block.numel() < nbytes:
                # What earlier captures took from their graphs' pools goes back to those pools.
                self._by_capture = {k: v for k, v in self._by_capture.items() if k[0] == key[0]}
                taken = self._take(nbytes)
                if taken is not None:
                    self._held.append(taken)
                # Otherwise a block of the graph's pool, which the graph itself zeroes on every replay.
                block = torch.zeros(nbytes, dtype=torch.uint8, device=self.device) if taken is None else taken
                self._by_capture[key] = block
            return block.data_ptr()

    def _take(self, nbytes: int) -> torch.Tensor | None:
        for index, block in enumerate(self._reserve):
            if block.numel() >= nbytes:
                return self._reserve.pop(index)
        return None


def _capture_id(stream: int) -> int:
    from wcodec.cuda import driver

    _, identity, *_ = driver.call("cuStreamGetCaptureInfo", stream)
    return int(identity)


_shared: dict[Any, Workspaces] = {}
_shared_lock = threading.Lock()


def shared_workspaces(device: torch.device) -> Workspaces:
    """Return the workspaces of the weights on a device that belong to no state."""
    with _shared_lock:
        if device not in _shared:
            _shared[device] = Workspaces(device)
        return _shared[device]
