"""``wcodec analyze``: what a model would gain, losslessly, before anything is written."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wcodec.cli import console
from wcodec.cli.files import workers_option
from wcodec.errors import MismatchError, WCodecError

if TYPE_CHECKING:
    from wcodec.analysis.report import Report

EPILOG = """\b
Examples:
  wcodec analyze model.safetensors
  wcodec analyze ./Llama-3.1-8B --gpu H100 --format html -o report.html
  wcodec analyze model.gguf --include '*ffn*' --format csv > ffn.csv
  wcodec analyze model.safetensors --format json | jq .totals
  wcodec analyze hf://owner/model --sample 4MB      before downloading it; extra [remote]

\b
Columns:
  H(exp)   entropy of the 8 exponent bits, in bits
  floor    entropy of sign + exponent + mantissa: no coder of fields beats it
  window   values of the 7 high exponent bits that get a 3-bit code
  outside  weights outside the window; they are patched, exactly
  bits     bits per weight that `wcodec pack` would write
  saves    bytes that it saves

Many layers are folded into one line; --all shows every tensor. JSON (schema wcodec.analyze/1), CSV and HTML
always have every tensor. Times are bytes over the GPU's memory bandwidth: what reading must take at least.
"""


@click.command(epilog=EPILOG, short_help="What a model would gain, losslessly.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "csv", "html"]),
    help="Form of the report. Without it, the suffix of -o decides, else a table.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Where to write it.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.png",
    help="Draw exponents and layers, too (extra [plot]).",
)
@click.option("--include", metavar="GLOB", multiple=True, help="Only tensors with such names; repeatable.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="No tensors with such names; repeatable.")
@click.option("--all", "every", is_flag=True, help="One line per tensor, however many there are.")
@workers_option
@click.option(
    "--sample",
    metavar="SIZE",
    help="Estimate from at most so much of each tensor, such as 4MB; 0 reads headers only.",
)
@click.option("--dask", metavar="ADDRESS", help="Spread the work over a Dask cluster (extra [dask]).")
@click.option("--strict", is_flag=True, help="Exit 1 where index and headers disagree.")
@click.option(
    "--gpu",
    default="H200",
    show_default=True,
    metavar="NAME",
    help="GPU whose memory bandwidth sets predicted times, or a bandwidth such as 3.2TB/s.",
)
@console.quiet_option
def command(
    paths: tuple[str, ...],
    format_: str | None,
    output: Path | None,
    plot: Path | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    every: bool,
    workers: int | None,
    sample: str | None,
    dask: str | None,
    strict: bool,
    gpu: str,
    quiet: bool,
) -> None:
    """Say what the weights in PATH hold, bit for bit, and what packing them would gain. Nothing is changed.

    PATH is a .safetensors, .gguf, .pt, .bin, .npy or .npz file, a directory of shards, a Hugging Face
    snapshot, or the address of one: https://…, s3://…, hf://owner/model.
    """
    from wcodec.analysis import analyze

    if "" in paths:  # an unset variable in a script shall not mean the current folder
        raise click.BadParameter("the path is empty", param_hint="PATH")
    format_ = format_ or _format_of(output)
    for target in (output, plot):
        if target is not None:
            _check_target(target, paths)
    if plot is not None and plot.suffix.lower() not in ("", ".png"):
        raise WCodecError("plots are PNG images", file=plot, mend=f"name it {plot.with_suffix('.png').name}")
    sample_bytes = None if sample is None else _bytes(sample)
    with contextlib.ExitStack() as stack:
        executor = None
        if dask is not None:
            from wcodec.cluster import dask_executor

            executor = stack.enter_context(dask_executor(dask))
        report = analyze(
            paths,
            include=include,
            exclude=exclude,
            gpu=gpu,
            workers=workers,
            executor=executor,
            sample_bytes=sample_bytes,
            progress=stack.enter_context(_bar(quiet)),
        )
    for source in report.sources:
        for text in (*source.differences, *source.remarks):
            console.remark(text, quiet=quiet)
    if plot is not None:
        _write_file(plot, report.to_png())
    _write(report, format_, output, every=every)
    if strict and report.differences:
        more = len(report.differences) - 1
        raise MismatchError(report.differences[0] + (f" (and {more} more)" if more else ""))


def _bytes(text: str) -> int:
    """A size such as ``4MB``, in powers of ten."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size such as 4MB or 500kB", param_hint="--sample")
    return round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])


def _format_of(output: Path | None) -> str:
    known = {".json": "json", ".csv": "csv", ".html": "html", ".htm": "html"}
    return known.get(output.suffix.lower(), "table") if output is not None else "table"


def _check_target(target: Path, paths: tuple[str, ...]) -> None:
    """Refuse to replace what is being analysed, and find out now whether there is a folder to write to."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError):  # `analyze` will say what is wrong with a path
            inside = path.rglob("*") if path.is_dir() else [path]
            if target.exists() and any(target.samefile(file) for file in inside if file.is_file()):
                if _is_report(target):
                    continue
                raise WCodecError("is one of the inputs", file=target, mend="write the report elsewhere")
    if not target.parent.is_dir():
        raise WCodecError("there is no such folder", file=target.parent, mend="create it first")


def _is_report(target: Path) -> bool:
    """Whether an earlier run wrote the file: then it is no input, although it lies among them."""
    with target.open("rb") as file:
        head = file.read(1024)
    return b"wcodec" in head or head.startswith(b"name,file,dtype,kind,")


@contextlib.contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that appears when the size of the job is known."""
    with contextlib.ExitStack() as stack:
        advance: console.Advance = lambda nbytes: None  # noqa: E731
        shown = 0

        def progress(done: int, total: int) -> None:
            nonlocal advance, shown
            if not done:
                advance = stack.enter_context(console.progress("analyze", total, quiet=quiet))
            advance(done - shown)
            shown = done

        yield progress


def _write(report: Report, format_: str, output: Path | None, *, every: bool) -> None:
    if format_ == "table" and output is None:
        from wcodec.analysis.table import print_table

        print_table(report, console.stdout(), every=every)
        return
    text = {
        "table": lambda: report.to_text(every=every),
        "json": report.to_json,
        "csv": report.to_csv,
        "html": report.to_html,
    }[format_]()
    if output is None:
        click.echo(text, nl=False, color=True)  # as it is: names may hold control characters
    else:
        _write_file(output, text.encode(errors="backslashreplace"))


def _write_file(path: Path, data: bytes) -> None:
    from wcodec.container.atomic import replace_file

    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_bytes(data)
        return
    with replace_file(path, overwrite=True) as out:
        out.write_at(0, data)
