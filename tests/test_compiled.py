"""Compiled loops run where nothing can be written."""

from __future__ import annotations

import errno

import numba
import numpy as np
import pytest
from numba.core import caching

from wcodec._compiled import compiled


def add(numbers: np.ndarray) -> int:
    total = 0
    for number in numbers:
        total += number
    return total


def test_a_read_only_machine_compiles_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # As numba finds it where neither the package's folder nor the user's cache can be written.
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(add)
    assert compiled()(add)(np.arange(5)) == 10


def test_a_full_disk_compiles_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "load", lambda *_: None)
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    with pytest.raises(OSError, match="No space"):
        numba.njit(cache=True)(add)(np.arange(5))
    assert compiled()(add)(np.arange(5)) == 10
