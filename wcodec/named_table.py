"""A table of things with names, such as tensors, for consoles of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

Cell = str | Text
#: Characters that a name gets before columns are dropped for it.
NAME_WIDTH = 46
#: Priority of a column that stays as long as it fits.
ALWAYS = 99
_LEAST_NAME_WIDTH = 12
_GAP = 2


@dataclass(frozen=True)
class Column:
    """One column; where the console is narrow, the lowest priority goes first, empty ones before."""

    title: str
    cells: Sequence[Cell]
    priority: int
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Characters of the widest cell or of the title."""
        return max(cell_len(self.title), *map(_length, self.cells))


class NamedTable:
    """What `named_table` laid out, for `rich` to print: a hundred thousand rows take a second or two."""

    def __init__(self, columns: Sequence[Column], widths: Sequence[int], styles: Sequence[str]) -> None:
        self._columns = columns
        self._widths = widths
        self._styles = styles

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from self._line(console, [column.title for column in self._columns], "dim")
        for i, cells in enumerate(zip(*(column.cells for column in self._columns), strict=True)):
            yield from self._line(console, cells, self._styles[i] if self._styles else "")

    def _line(self, console: Console, cells: Sequence[Cell], style: str) -> Iterator[Segment]:
        segments, plain = [], ""
        for column, width, cell in zip(self._columns, self._widths, cells, strict=True):
            space = " " * (width - _length(cell))
            before, after = (space, "") if column.justify == "right" else ("", space)
            if isinstance(cell, str):
                plain += before + cell
            else:
                segments += [Segment(plain + before), *cell.render(console)]
                plain = ""
            plain += after + " " * _GAP
        segments.append(Segment(plain.rstrip()))
        yield from Segment.apply_style(segments, console.get_style(style) if style else None)
        yield Segment.line()


def named_table(
    heading: str, names: Sequence[Cell], columns: Sequence[Column], width: int, styles: Sequence[str] = ()
) -> NamedTable:
    """Lay out a table whose first column are names.

    Parameters
    ----------
    heading : str
        Title of the first column.
    names : sequence of str or rich.text.Text
        At least one. Where one does not fit, its middle is left out: its end says what it is.
    columns : sequence of Column
        Each with a cell per name.
    width : int
        Characters of the console.
    styles : sequence of str
        One per row, if any.
    """
    widths = [column.width + _GAP for column in columns]
    longest = max(cell_len(heading), *map(_length, names))
    kept = [i for i, column in enumerate(columns) if any(map(_length, column.cells))]
    for i in sorted(kept, key=lambda i: columns[i].priority):
        room = width - sum(widths[k] for k in kept)
        if room >= min(longest, NAME_WIDTH) or columns[i].priority == ALWAYS:
            break
        kept.remove(i)
    while kept and width - sum(widths[k] for k in kept) < min(longest, _LEAST_NAME_WIDTH):
        kept.pop()  # half a number would be another number
    room = max(width - sum(widths[k] for k in kept), _LEAST_NAME_WIDTH)
    first = Column(heading, [_shorten(name, room) for name in names], ALWAYS, "left")
    return NamedTable(
        [first, *(columns[k] for k in kept)], [first.width, *(widths[k] - _GAP for k in kept)], styles
    )


def _length(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else cell.cell_len


def _shorten(cell: Cell, room: int) -> Cell:
    if _length(cell) <= room:
        return cell
    plain = cell if isinstance(cell, str) else cell.plain
    head = _fitting(plain, max(room // 3, 1))
    tail = _fitting(plain[::-1], room - cell_len(plain[:head]) - len("…"))
    end = len(plain) - tail
    if isinstance(cell, str):
        return f"{cell[:head]}…{cell[end:]}"
    return Text.assemble(cell[:head], "…", cell[end:])


def _fitting(text: str, room: int) -> int:
    """Characters from the start that take at most `room` cells: each takes none, one or two."""
    for i, character in enumerate(text):
        room -= cell_len(character)
        if room < 0:
            return i
    return len(text)
