"""What every command prints with: results on stdout, progress and remarks on stderr.

rich is imported when something is printed, not when a command is defined.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import click

from wcodec.units import visible

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int], None]

_REPORT_S = 0.1

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Only the result: no progress, no remarks.")


def stdout() -> Console:
    """Console for results; wide enough for any table where the output is no terminal."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Console for progress and remarks."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    from rich.console import Console

    class PipeAwareConsole(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError  # `wcodec.cli` ends the process the way shells expect

    # A pipe has no width: cutting names to 80 columns would lose them for grep.
    width = None if stream.isatty() else 10_000
    return PipeAwareConsole(file=stream, highlight=False, width=width, soft_wrap=False)


@contextlib.contextmanager
def progress(label: str, total_bytes: int, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a bar with speed and time left on stderr, where stderr is a terminal.

    Parameters
    ----------
    label : str
        What is going on, such as ``"analyze"``.
    total_bytes : int
        Bytes of the whole job.
    quiet : bool
        Show nothing.

    Yields
    ------
    callable
        Takes the number of bytes done since the last call; any thread may call it.
    """
    if quiet or not sys.stderr.isatty() or total_bytes <= 0:
        yield lambda nbytes: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield _in_turns(lambda nbytes: bar.advance(task, nbytes))


def _in_turns(advance: Advance) -> Advance:
    """Add up what is done and report it ten times a second.

    rich takes the speed from a thousand reports, which tiny tensors make in no time.
    """
    lock, waiting, last = threading.Lock(), 0, 0.0

    def report(nbytes: int) -> None:
        nonlocal waiting, last
        with lock:
            waiting += nbytes
            now = time.monotonic()
            if now - last < _REPORT_S:
                return
            due, waiting, last = waiting, 0, now
        advance(due)

    return report


def result(text: str) -> None:
    """Print one line of a result to stdout."""
    click.echo(visible(text))


def remark(text: str, *, quiet: bool = False) -> None:
    """Print one line to stderr that is neither a result nor an error."""
    if not quiet:
        click.echo(f"wcodec: {visible(text)}", err=True)
