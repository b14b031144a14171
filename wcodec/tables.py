"""Measured times of the kernels, as data: which one was fastest for which shape and token count.

A table is JSON (schema ``wcodec.tune/1``): one entry per ``(n, k, m, kernel)`` with the configuration, its
time and cuBLAS's on the uncompressed weight, both raw medians in µs (graph replay, cold L2, in alternation).
``wcodec tune`` writes tables: the package brings one of an H200, users add their own beside the compiled
kernels. Of two tables that measured the same product the user's counts, whole: times of one run compare.
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

#: Tables in ``wcodec.kernels``.
PACKAGED = ("h200.json",)


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
        ``"gemv"``, ``"gemm"`` or ``"decode"`` (decode to BF16, then cuBLAS).
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
        What cuBLAS took beside them.
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


def packaged() -> list[tuple[str, tuple[int, int], list[Entry]]]:
    """Return the tables that the package brings, each as `read_table` does."""
    folder = resources.files("wcodec.kernels")
    return [read_table(folder.joinpath(name).read_text(encoding="utf-8"), name) for name in PACKAGED]


def table_text(info: DeviceInfo, entries: Iterable[Entry], **about: Any) -> str:
    """Return a table of one GPU as JSON, an entry a line; `about` says more about the run."""
    head = {"schema": SCHEMA, "device": info.name, "capability": list(info.capability), **about}
    lines = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in entries)
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "entries": [\n{lines}\n ]\n}}\n'


def write_tuned(info: DeviceInfo, entries: Iterable[Entry], **about: Any) -> Path:
    """Merge new measurements into this GPU's own table and return the file.

    A product that was measured again loses all its older entries.
    """
    path, new = tuned_path(info.name), list(entries)
    again = {(entry.n, entry.k, entry.m) for entry in new}
    old = read_table(path.read_text(encoding="utf-8"), str(path))[2] if path.exists() else []
    kept = [entry for entry in old if (entry.n, entry.k, entry.m) not in again]
    write_atomic(path, table_text(info, kept + new, **about).encode())
    tables_for.cache_clear()
    return path


class Tables:
    """The measurements that hold on one GPU.

    Parameters
    ----------
    sources : iterable of (str, list of Entry)
        GPU name and entries; of two that measured the same product, the earlier counts.
    """

    def __init__(self, sources: Iterable[tuple[str, list[Entry]]]) -> None:
        # Shape -> tokens -> GPU and entries.
        self._by_shape: dict[tuple[int, int], dict[int, tuple[str, list[Entry]]]] = {}
        for device, entries in sources:
            found: dict[tuple[int, int, int], list[Entry]] = {}
            for entry in entries:
                found.setdefault((entry.n, entry.k, entry.m), []).append(entry)
            for (n, k, m), product in found.items():
                self._by_shape.setdefault((n, k), {}).setdefault(m, (device, product))

    def find(self, n: int, k: int, tokens: int) -> Found | None:
        """Return the entries of a shape and token count, or of the nearest measured shape.

        The class is the smallest measured one that holds `tokens`; shapes are near by the ratios of N and K.
        Counts that kernels serve have nothing to learn from prefill, where only decoding was measured.
        """
        most = math.inf if tokens > CLASSES[-1] else CLASSES[-1]
        best: tuple[float, tuple[int, int], int] | None = None
        for shape, classes in self._by_shape.items():
            fitting = [m for m in classes if tokens <= m <= most]
            if not fitting:
                continue
            distance = abs(math.log(n / shape[0])) + abs(math.log(k / shape[1]))
            if best is None or distance < best[0]:
                best = (distance, shape, min(fitting))
        if best is None:
            return None
        _, shape, m = best
        device, product = self._by_shape[shape][m]
        entries = tuple(sorted(product, key=lambda entry: entry.us))
        return Found(entries, entries[0].cublas_us, shape == (n, k), device)


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
    sources += [
        (device, entries) for device, capability, entries in packaged() if capability == info.capability
    ]
    return Tables(sources)
