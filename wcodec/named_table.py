"""A table of things with names, such as tensors, for consoles of any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

#: Characters that a name gets before columns are dropped for it.
NAME_WIDTH = 46
#: Priority of a column that stays, however narrow the console.
ALWAYS = 99
_LEAST_NAME_WIDTH = 12
_GAP = 2


@dataclass(frozen=True)
class Column:
    """One column; where the console is narrow, the lowest priority goes first, empty ones before."""

    title: str
    cells: Sequence[Text]
    priority: int
    justify: Literal["left", "right"] = "right"


def named_table(
    heading: str, names: Sequence[Text], columns: Sequence[Column], width: int, styles: Sequence[str] = ()
) -> Table:
    """Lay out a table whose first column are names.

    Parameters
    ----------
    heading : str
        Title of the first column.
    names : sequence of rich.text.Text
        At least one. Where one does not fit, its middle is left out: its end says what it is.
    columns : sequence of Column
        Each with a cell per name.
    width : int
        Characters of the console.
    styles : sequence of str
        One per row, if any.
    """
    widths = [max(len(column.title), *(cell.cell_len for cell in column.cells)) + _GAP for column in columns]
    longest = max(name.cell_len for name in names)
    kept = [i for i, column in enumerate(columns) if any(cell.cell_len for cell in column.cells)]
    for i in sorted(kept, key=lambda i: columns[i].priority):
        room = width - sum(widths[k] for k in kept)
        if room >= min(longest, NAME_WIDTH) or columns[i].priority == ALWAYS:
            break
        kept.remove(i)
    room = max(width - sum(widths[k] for k in kept), _LEAST_NAME_WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column(heading, no_wrap=True)
    for k in kept:
        table.add_column(columns[k].title, justify=columns[k].justify, no_wrap=True)
    for i, name in enumerate(names):
        cells = (columns[k].cells[i] for k in kept)
        table.add_row(_shorten(name, room), *cells, style=styles[i] if styles else "")
    return table


def _shorten(text: Text, room: int) -> Text:
    excess = text.cell_len - room
    if excess <= 0:
        return text
    head = max(room // 3, 1)
    return Text.assemble(text[:head], "…", text[head + excess + 1 :])
