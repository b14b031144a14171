"""Measured times of the kernels, as data: which one was fastest for which shape and token count.

A table is JSON (schema ``wcodec.tune/1``): one entry per ``(n, k, m, kernel)`` with the configuration, its
time and cuBLAS's on the uncompressed weight, both raw medians in µs (graph replay, cold L2). The package
brings tables measured on H200; ``wcodec tune`` adds its own beside the compiled kernels, which come first.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from wcodec.cuda.cache import cache_dir, write_atomic
from wcodec.cuda.device import DeviceInfo
from wcodec.errors import MalformedError

SCHEMA = "wcodec.tune/1"

#: Token counts that tables hold; a class serves every count above the class before it.
CLASSES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

#: Where two runs disagree about a kernel, the earlier file counts; about cuBLAS, its faster time.
PACKAGED = ("gemv.json", "gemm.json", "products.json")

CUBLAS = "cublas"


@dataclass(frozen=True)
class Entry:
    """One measurement.

    Attributes
    ----------
    n, k : int
        Shape of the weight.
    m : int
        Tokens.
    kernel : str
        ``"gemv"``, ``"gemm"``, ``"decode"`` (decode to BF16, then cuBLAS) or ``"cublas"`` (cuBLAS alone).
    config : mapping or None
        The kernel's configuration.
    us, cublas_us : float
        Raw medians in µs.
    """

    n: int
    k: int
    m: int
    kernel: str
    config: Mapping[str, Any] | None
    us: float
    cublas_us: float


@dataclass(frozen=True)
class Found:
    """What the tables say about one product.

    Attributes
    ----------
    entries : tuple of Entry
        Kernels' entries of one shape and class, fastest first.
    cublas_us : float
        The fastest that cuBLAS was seen there.
    exact : bool
        Whether they are of the very shape; otherwise of the nearest one.
    device : str
        GPU that they were measured on.
    """

    entries: tuple[Entry, ...]
    cublas_us: float
    exact: bool
    device: str


def token_class(tokens: int) -> int:
    """Return the smallest class that holds this many tokens; `tokens` itself above the largest."""
    return next((m for m in CLASSES if m >= tokens), tokens)


def tuned_path(device_name: str) -> Path:
    """Return where ``wcodec tune`` keeps what it measured on this kind of GPU."""
    return cache_dir() / "tuned" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device_name).strip('-')}.json"


def read_table(text: str, file: str) -> tuple[str, tuple[int, int], list[Entry]]:
    """Parse a table; return the device's name, its compute capability, and the entries.

    Raises
    ------
    MalformedError
        If the text is not a table of this schema.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise MalformedError(f"schema {data['schema']!r} is not {SCHEMA!r}", file=file)
        fields = ("n", "k", "m", "kernel", "config", "us", "cublas_us")
        entries = [Entry(**{name: entry[name] for name in fields}) for entry in data["entries"]]
        major, minor = data["capability"]
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedError(
            f"not a table of measured times ({type(error).__name__}: {error})",
            file=file,
            mend="delete it and run wcodec tune",
        ) from None
    return str(data["device"]), (int(major), int(minor)), entries


def write_tuned(info: DeviceInfo, entries: Iterable[Entry], *, empty_us: float, date: str) -> Path:
    """Merge new measurements into this GPU's own table and return the file; the newer one of a pair wins."""
    path = tuned_path(info.name)
    merged: dict[tuple[Any, ...], Entry] = {}
    if path.exists():
        for entry in read_table(path.read_text(encoding="utf-8"), str(path))[2]:
            merged[entry.n, entry.k, entry.m, entry.kernel] = entry
    for entry in entries:
        merged[entry.n, entry.k, entry.m, entry.kernel] = entry
    data = {
        "schema": SCHEMA,
        "device": info.name,
        "capability": list(info.capability),
        "date": date,
        "empty_us": empty_us,
        "entries": [asdict(entry) for entry in merged.values()],
    }
    write_atomic(path, (json.dumps(data, indent=1) + "\n").encode())
    tables_for.cache_clear()
    return path


class Tables:
    """The measurements that hold on one GPU.

    Parameters
    ----------
    sources : iterable of (str, list of Entry)
        GPU name and entries; of two that measured the same, the earlier counts.
    """

    def __init__(self, sources: Iterable[tuple[str, list[Entry]]]) -> None:
        self._by_shape: dict[tuple[int, int], dict[int, dict[str, tuple[str, Entry]]]] = {}
        self._cublas: dict[tuple[int, int, int], float] = {}
        for device, entries in sources:
            for entry in entries:
                key = entry.n, entry.k, entry.m
                self._cublas[key] = min(self._cublas.get(key, entry.cublas_us), entry.cublas_us)
                if entry.kernel != CUBLAS:
                    kernels = self._by_shape.setdefault(key[:2], {}).setdefault(entry.m, {})
                    kernels.setdefault(entry.kernel, (device, entry))

    def find(self, n: int, k: int, tokens: int) -> Found | None:
        """Return the entries of a shape and token count, or of the nearest measured shape.

        The class is the smallest measured one that holds `tokens`; shapes are near by the ratios of N and K.
        """
        best: tuple[float, tuple[int, int], int] | None = None
        for shape, classes in self._by_shape.items():
            fitting = [m for m in classes if m >= tokens]
            if not fitting:
                continue
            distance = abs(math.log(n / shape[0])) + abs(math.log(k / shape[1]))
            if best is None or distance < best[0]:
                best = (distance, shape, min(fitting))
        if best is None:
            return None
        _, shape, m = best
        found = sorted(self._by_shape[shape][m].values(), key=lambda pair: pair[1].us)
        entries = tuple(entry for _, entry in found)
        return Found(entries, self._cublas[*shape, m], shape == (n, k), found[0][0])


@functools.cache
def tables_for(index: int) -> Tables:
    """Return the tables of a CUDA device: its own tuned ones, then those the package brings for its kind."""
    from wcodec.cuda.device import device_info

    info = device_info(index)
    sources = []
    tuned = tuned_path(info.name)
    if tuned.exists():
        device, capability, entries = read_table(tuned.read_text(encoding="utf-8"), str(tuned))
        if capability == info.capability:
            sources.append((device, entries))
    for name in PACKAGED:
        file = resources.files("wcodec.kernels").joinpath(name)
        if file.is_file():
            device, capability, entries = read_table(file.read_text(encoding="utf-8"), name)
            if capability == info.capability:
                sources.append((device, entries))
    return Tables(sources)
