"""Compiled loops run where nothing can be written."""

from __future__ import annotations

import errno
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import caching

import wcodec._compiled
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


def test_a_change_in_any_source_compiles_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    compiled()(add)(np.arange(5))
    again = compiled()(add)
    again(np.arange(5))
    assert again.stats.cache_hits
    # As after an edit of a file that a loop inlines, but is not defined in.
    monkeypatch.setattr(wcodec._compiled, "source_stamp", lambda: (("_bf16_w12_simd.py", 1, 2),))
    changed = compiled()(add)
    assert changed(np.arange(5)) == 10
    assert not changed.stats.cache_hits


def test_the_stamp_sees_every_compiled_source() -> None:
    names = {name for name, _, _ in wcodec._compiled.source_stamp()}
    assert {"_bits_jit.py", "_bf16_w12_jit.py", "_bf16_w12_simd.py"} <= names
