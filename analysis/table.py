"""The table that ``wcodec analyze`` prints."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from rich.markup import escape
from rich.text import Text

from wcodec.analysis.blocks import blocks_summary
from wcodec.analysis.cost import ratio
from wcodec.analysis.findings import Window
from wcodec.analysis.report import Report
from wcodec.analysis.rows import FEW, Row, by_block_kind, folded_rows, single_rows, sparkline
from wcodec.analysis.totals import Bf16Totals
from wcodec.named_table import ALWAYS, Cell, Column, NamedTable, named_table
from wcodec.units import bits, count, duration, number, percent, shape_text, size, visible

if TYPE_CHECKING:
    from rich.console import Console

#: Rows that are left as they are and hold less than this part of the bytes are summed up in one line.
MINOR = 0.01


def to_text(report: Report, *, every: bool = False, width: int = 200) -> str:
    """The table without colours, `width` characters wide."""
    from rich.console import Console

    text = io.StringIO()
    print_table(report, Console(file=text, width=width, no_color=True, highlight=False), every=every)
    return text.getvalue()


def print_table(report: Report, console: Console, *, every: bool = False) -> None:
    """Print heading, rows, and what it comes to.

    Parameters
    ----------
    report : Report
    console : rich.console.Console
        Narrow ones get fewer columns.
    every : bool
        One row per tensor, however many there are.
    """
    rows = single_rows(report.tensors)
    left: list[Row] = []
    if not every and len(rows) > FEW:
        rows = folded_rows(report.tensors)
        left = [row for row in rows if not row.saves_bytes and row.nbytes < MINOR * report.nbytes]
        rows = [row for row in rows if row not in left]
    console.print(_heading(report))
    if rows:
        console.print(_rows_table(rows, console.width))
    if left and report.packed_bytes < report.nbytes:  # else the last line has the reasons
        console.print(_left_line(left, report), style="dim")
    console.print()
    for line in summary(report, console.width):
        console.print(line)


def _heading(report: Report) -> str:
    names = ", ".join(PurePath(source.path).name or source.path for source in report.sources)
    kinds = sorted({t.kind for t in report.tensors}, key=lambda kind: (-_bytes_of(report, kind), kind))
    parts = [number(len(report.tensors), "tensor"), f"{count(report.weights)} weights", size(report.nbytes)]
    return f"\n[bold]{escape(visible(names))}[/]  [dim]{' · '.join([*parts, ' + '.join(kinds).upper()])}[/]\n"


def _bytes_of(report: Report, kind: str) -> int:
    return sum(t.nbytes for t in report.tensors if t.kind == kind)


def _rows_table(rows: list[Row], width: int) -> NamedTable:
    columns = [
        Column(title, [_cell(cell(row)) for row in rows], priority, justify)
        for title, cell, priority, justify in _COLUMNS
    ]
    styles = ["" if row.saves_bytes else "dim" for row in rows]
    return named_table("tensor", [_name(row) for row in rows], columns, width, styles)


def _cell(markup: str) -> Cell:
    return Text.from_markup(markup) if "[" in markup else markup


def _name(row: Row) -> Cell:
    name = visible(row.name)
    return Text.assemble(name, (f" ×{len(row.tensors)}", "cyan")) if len(row.tensors) > 1 else name


def _left_line(rows: list[Row], report: Report) -> str:
    share = percent(ratio(sum(row.nbytes for row in rows), report.nbytes))
    tensors = number(sum(len(row.tensors) for row in rows), "tensor")
    return f"and {tensors} with {share} of the bytes, left as they are: {_reasons(rows)}"


def _reasons(rows: list[Row]) -> str:
    reasons = Counter[str]()
    for row in by_block_kind(rows):
        kind = f"{row.name.upper()}: " if row.first.blocks is not None else ""
        reasons[kind + row.reason] += len(row.tensors)
    return ", ".join(f"{times} {escape(reason)}" for reason, times in reasons.most_common())


def _verdict(row: Row) -> str:
    if row.saves_bytes:
        return f"[green]{row.action}[/]"
    return "leave it"


def _saved(row: Row) -> str:
    return f"[green]−{size(row.saves_bytes)}[/]" if row.saves_bytes else ""


def _window(row: Row) -> str:
    windows = {t.window for t in row.tensors if t.window}
    if not windows:
        return ""
    first = min(min(w.values) for w in windows), max(max(w.values) for w in windows)
    return window_text(next(iter(windows))) if len(windows) == 1 else f"{first[0]}…{first[1]}"


def window_text(window: Window) -> str:
    """A window's values: ``"55–62"``, or ``"0, 56–62"`` for a table."""
    runs: list[list[int]] = []
    for value in window.values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _exceptions(row: Row) -> str:
    return "" if row.exception_fraction is None else percent(row.exception_fraction)


def _sparkline(row: Row) -> str:
    return f"[blue]{sparkline(row.exponent_counts)}[/]" if row.exponent_counts else ""


#: Title, cell as rich markup, priority, and side of each column.
_COLUMNS: list[tuple[str, Callable[[Row], str], int, Literal["left", "right"]]] = [
    ("kind", lambda row: row.first.kind, 5, "left"),
    ("shape", lambda row: shape_text(row.first.shape), 4, "right"),
    ("exponents", _sparkline, 2, "left"),
    ("H(exp)", lambda row: bits(row.entropy.exponent), 8, "right"),
    ("floor", lambda row: bits(row.entropy.total), 9, "right"),
    ("window", _window, 6, "right"),
    ("outside", _exceptions, 7, "right"),
    ("bits", lambda row: bits(row.bits_per_weight), ALWAYS, "right"),
    ("saves", _saved, ALWAYS, "right"),
    ("per read", lambda row: f"−{duration(row.saves_us)}" if row.saves_bytes else "", 3, "right"),
    ("verdict", _verdict, 10, "left"),
    ("why", lambda row: escape(row.reason), 1, "left"),
]


def summary(report: Report, width: int) -> Iterator[str]:
    """What the analysis comes to, as lines of rich markup for a console of `width` characters."""
    if not report.tensors:
        yield "no tensors"
        return
    bf16, gpu = report.bf16, report.gpu
    counted = not math.isnan(bf16.entropy.total)
    if counted:
        yield from _bars(bf16, 2 if width >= 100 else 1.5)
        yield ""
    saved = report.nbytes - report.packed_bytes
    if saved <= 0:
        reasons = _reasons(single_rows(report.tensors))
        yield f"[bold]leave it[/]: nothing here would get smaller [dim]({reasons})[/]"
        return
    about = "about " if any(t.sampled for t in report.tensors) else ""
    floor = percent(1 - ratio(report.floor_bytes, report.nbytes))
    yield (
        f"{size(report.nbytes)} → [bold green]{about}{size(report.packed_bytes)}[/], "
        f"[bold green]{percent(ratio(saved, report.nbytes))} less[/], every bit recoverable"
        + (f" [dim](floor: {floor})[/]" if counted else "")
    )
    before, after = duration(gpu.read_us(report.nbytes)), duration(gpu.read_us(report.packed_bytes))
    yield (
        f"{before} → [bold green]{about}{after}[/] to read all weights once at {escape(gpu.name)}'s"
        f" {gpu.bandwidth / 1e12:.3g} TB/s"
    )
    nvfp4 = blocks_summary(report.tensors)
    if nvfp4:
        yield f"[dim]{escape(nvfp4)}[/]"


def _bars(bf16: Bf16Totals, scale: float) -> Iterator[str]:
    """Bits per BF16 weight as it is, packed, and at the floor; `scale` characters per bit."""
    entropy, outside = bf16.entropy, percent(bf16.exceptions.fraction)
    patched = f"{outside} outside, patched" if bf16.exceptions.count else ""
    fields = f"sign {entropy.sign:.2f}, exponent {entropy.exponent:.2f}, mantissa {entropy.mantissa:.2f}"
    yield f"[dim]bits per weight of {count(bf16.weights)} BF16 weights[/]"
    yield _bar("stored", 16, "", "dim", scale)
    yield _bar("packed", bf16.bits_per_weight, patched, "green", scale)
    yield _bar("floor", entropy.total, fields, "blue", scale)


def _bar(label: str, value: float, remark: str, style: str, scale: float) -> str:
    eighths = round(8 * scale * value)
    bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    line = f"{label:7} [{style}]{bar:{round(16 * scale)}}[/] {value:5.2f}"
    return f"{line}  [dim]{remark}[/]" if remark else line
