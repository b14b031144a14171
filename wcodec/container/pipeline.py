"""Bounded parallel work in order."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Advance = Callable[[int], None]

#: Bytes of the original that one task handles: small enough for caches, large enough to hide Python's cost.
CHUNK_BYTES = 8 << 20
_MAX_WORKERS = 32
_MAX_WAITING = 4096  # tiny tasks are bounded by their number: each holds a future


def default_workers() -> int:
    """Processors this process may use, at most 32: memory bandwidth ends before that."""
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))


@contextlib.contextmanager
def workers_pool(workers: int) -> Iterator[Executor | None]:
    """Threads for `ordered_map`; None for one worker, which is the calling thread.

    On an exception, work that has not begun is dropped and work that has is waited for, so that no thread
    outlives the files it reads.
    """
    if workers <= 1:
        yield None
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="wcodec")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ordered_map(
    pool: Executor | None,
    budget: int,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    cost: Callable[[Item], int],
) -> Iterator[Result]:
    """Yield ``function(item)`` in the order of `items`, with a bound on what is in flight.

    Parameters
    ----------
    pool : Executor, optional
        Where to run; None runs in the caller, one item at a time.
    budget : int
        Bytes that items in flight (running, or done and not yet taken) may cost together. One item that costs
        more runs alone.
    function, items
        As for `map`; `items` may be lazy, and is then consumed just as far ahead as the budget goes.
    cost : callable
        Bytes that an item and its result occupy.
    """
    if pool is None:
        yield from map(function, items)
        return
    waiting: deque[tuple[int, Future[Result]]] = deque()
    in_flight = 0
    for item in items:
        nbytes = cost(item)
        while waiting and (in_flight + nbytes > budget or len(waiting) >= _MAX_WAITING):
            done, future = waiting.popleft()
            yield future.result()
            in_flight -= done
        waiting.append((nbytes, pool.submit(function, item)))
        in_flight += nbytes
    while waiting:
        yield waiting.popleft()[1].result()
