"""What pack, unpack and verify share: arguments, signals, sentences."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wcodec.cli import console
from wcodec.units import number, percent, size

if TYPE_CHECKING:
    from wcodec.container import Result

workers_option = click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Threads to use. [default: one per processor]"
)
force_option = click.option("-f", "--force", is_flag=True, help="Replace DST if it exists.")


def path_argument(name: str) -> Callable[[Any], Any]:
    """A file or folder; whether it exists and fits is the container's question, which answers better."""
    return click.argument(name, type=click.Path(readable=False), callback=_local_path)


def _local_path(ctx: click.Context, param: click.Parameter, value: str) -> Path:
    if not value:  # an unset variable in a script shall not mean the current folder
        raise click.BadParameter("the path is empty", ctx, param)
    if value == "-":
        raise click.BadParameter("no pipe can be read here and there or renamed; name a file", ctx, param)
    if "://" in value:
        raise click.BadParameter("is an address, which only analyze and info read; download it", ctx, param)
    return Path(value)


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that temp files go away.

    An exception that a signal raises inside a callback of a C library is lost there; then we leave
    afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    caught: list[int] = []

    def leave(number: int, frame: object) -> None:
        caught.append(number)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
        if caught:
            raise SystemExit(128 + caught[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def weight_bytes(path: Path) -> int:
    """Bytes that a progress bar counts to: the safetensors files of a path, 0 where that is unknown."""
    try:
        files = path.rglob("*.safetensors") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def report(result: Result, packed_bytes: int, original_bytes: int, *, quiet: bool) -> None:
    """Print what was done in one line, and remarks to stderr."""
    for note in result.notes:
        console.remark(note, quiet=quiet)
    files = f"{number(result.files, 'file')}, " if result.files != 1 else ""
    share = percent(packed_bytes / original_bytes)
    console.result(
        f"{result.destination}: {size(result.bytes_in)} → {size(result.bytes_out)} ({share}), {files}"
        f"{result.packed_tensors:,} of {number(result.tensors, 'tensor')} packed, {result.seconds:.1f} s"
    )
