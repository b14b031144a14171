"""A report as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from wcodec.analysis.findings import TensorReport

COLUMNS: dict[str, Callable[[TensorReport], Any]] = {
    "name": lambda t: t.name,
    "file": lambda t: t.file,
    "dtype": lambda t: t.dtype,
    "kind": lambda t: t.kind,
    "shape": lambda t: "x".join(map(str, t.shape)),
    "numel": lambda t: t.numel,
    "bytes": lambda t: t.nbytes,
    "h_sign": lambda t: t.entropy.sign,
    "h_exponent": lambda t: t.entropy.exponent,
    "h_mantissa": lambda t: t.entropy.mantissa,
    "h_scale": lambda t: t.entropy.scale,
    "floor_bits_per_weight": lambda t: t.floor_bits_per_weight,
    "format": lambda t: t.format,
    "window_kind": lambda t: t.window and t.window.kind,
    "window_values": lambda t: t.window and " ".join(map(str, t.window.values)),
    "exceptions": lambda t: t.exceptions and t.exceptions.count,
    "exception_fraction": lambda t: t.exceptions and t.exceptions.fraction,
    "packed_bytes": lambda t: t.packed_bytes,
    "bits_per_weight": lambda t: t.bits_per_weight,
    "ratio": lambda t: t.ratio,
    "action": lambda t: t.verdict.action,
    "saves_bytes": lambda t: t.verdict.saves_bytes,
    "read_us": lambda t: t.verdict.read_us,
    "packed_read_us": lambda t: t.verdict.packed_read_us,
    "reason": lambda t: t.verdict.reason,
    "h_nibble": lambda t: t.blocks and t.blocks.nibble_entropy,
    "h_scale_byte": lambda t: t.blocks and t.blocks.scale_entropy,
    "scales_outside_16": lambda t: t.blocks and t.blocks.windows[16],
    "scales_outside_32": lambda t: t.blocks and t.blocks.windows[32],
    "scales_outside_64": lambda t: t.blocks and t.blocks.windows[64],
    "nvfp4_s5_bytes": lambda t: t.blocks and t.blocks.packed_bytes,
    "flags": lambda t: "; ".join(t.flags),
}


def to_csv(tensors: Iterable[TensorReport]) -> str:
    """One line per tensor, with a header line; empty cells where a figure does not apply."""
    lines: list[str] = []
    # The writer quotes what holds a character of its line ends, and a name may hold either.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(value(t)) for value in COLUMNS.values()] for t in tensors)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    # Tensor names come from strangers' files: a spreadsheet must show them, not run them.
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
