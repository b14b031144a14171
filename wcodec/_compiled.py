"""Loops that numba compiles: without the GIL, and kept for the next start where a folder can hold them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile the decorated function when it is first called.

    Machine code is kept beside the source, or in the user's cache. Where neither can be written, as in a
    container with a read-only file system or on a full disk, every start compiles anew: a few seconds.

    Parameters
    ----------
    **options
        Further options of `numba.njit`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            loop = numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # "cannot cache function …: no locator available"
            return numba.njit(nogil=True, **options)(function)
        # numba asks only whether the function's own file changed; what it inlines may lie in others.
        kept = loop._cache._cache_file
        kept._source_stamp = (kept._source_stamp, source_stamp())
        save = loop._cache.save_overload

        def save_if_possible(*args: Any) -> None:
            with contextlib.suppress(OSError):
                save(*args)

        loop._cache.save_overload = save_if_possible
        return loop

    return decorate


@functools.cache
def source_stamp() -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of every source that compiled loops are made of."""
    here = Path(__file__).parent
    patterns = ("*_jit.py", "*_simd.py", "*_layout.py")
    sources = sorted(path for pattern in patterns for path in here.rglob(pattern))
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sources)
