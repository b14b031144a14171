"""``wcodec info``: what a file holds, from its headers alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wcodec.cli import console
from wcodec.cli.files import path_argument

if TYPE_CHECKING:
    from wcodec.container.describe import Description

EPILOG = """\b
Examples:
  wcodec info packed.safetensors
  wcodec info Llama-3.1-8B-packed --format json | jq .totals
"""


@click.command(epilog=EPILOG, short_help="What a file holds, from its headers alone.")
@path_argument("file")
@click.option(
    "--format", "format_", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
def command(file: Path, format_: str) -> None:
    """Show what FILE holds: formats, sizes and digests of its tensors. Nothing is decoded.

    FILE is a packed file or directory, or anything that `wcodec analyze` reads.
    """
    from wcodec.container.describe import describe

    description = describe(file)
    if format_ == "json":
        click.echo(json.dumps(description.to_json(), ensure_ascii=False, indent=1, allow_nan=False))
    else:
        _print_table(description)


def _print_table(description: Description) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for title in ("format", "dtype", "shape"):
        table.add_column(title, no_wrap=True)
    for title in ("bytes", "stored", "bits/weight"):
        table.add_column(title, justify="right", no_wrap=True)
    if description.packed:
        table.add_column("xxh3-128", style="dim", overflow="ellipsis", no_wrap=True, max_width=12)
    for tensor in description.tensors:
        bits = tensor.bits_per_weight
        row = [
            escape(tensor.name),
            tensor.format,
            escape(tensor.dtype),
            " × ".join(map(str, tensor.shape)) or "scalar",
            console.size(tensor.nbytes),
            console.size(tensor.stored_bytes),
            "–" if math.isnan(bits) else f"{bits:.3f}",
        ]
        if description.packed:
            row.append(tensor.digest.hex() if tensor.digest is not None else "")
        table.add_row(*row)
    out = console.stdout()
    out.print(f"[bold]{escape(str(description.path))}[/bold]: {description.kind}")
    for source in description.sources:
        out.print(
            f"{escape(source.file)}: original {console.size(source.nbytes)},"
            f" xxh3-128 {source.digest.hex()}, written by {escape(source.tool)}"
        )
    out.print(table)
    totals = description.totals
    share = f" ({100 * totals['ratio']:.2f} %)" if description.packed and totals["ratio"] else ""
    packed = f", {totals['packed_tensors']} packed" if description.packed else ""
    out.print(
        f"{totals['tensors']} tensors{packed}, {totals['weights']:,} weights:"
        f" {console.size(totals['bytes'])}"
        + (f" → {console.size(totals['stored_bytes'])}{share}" if description.packed else "")
    )
