"""``wcodec info``: what a file holds, from its headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from wcodec import units
from wcodec.cli import console
from wcodec.units import number, visible

if TYPE_CHECKING:
    from wcodec.analysis.plan import LayerPlan, ModelPlan
    from wcodec.container.describe import Description, TensorFacts

EPILOG = """\b
Examples:
  wcodec info packed.safetensors
  wcodec info Llama-3.1-8B-packed --format json | jq .totals
  wcodec info --plan ~/models/Llama-3.1-8B --gpu H100
  wcodec info --plan hf://owner/model      before downloading it; extra [remote]
"""


@click.command(epilog=EPILOG, short_help="What a file holds, from its headers alone.")
@click.argument("file")
@click.option(
    "--format", "format_", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
@click.option("--plan", is_flag=True, help="GPU memory and reading time per layer, as it is and packed.")
@click.option(
    "--gpu",
    default="H200",
    show_default=True,
    metavar="NAME",
    help="With --plan: GPU whose memory bandwidth sets the times, or a bandwidth such as 3.2TB/s.",
)
def command(file: str, format_: str, plan: bool, gpu: str) -> None:
    """Show what FILE holds: formats, sizes and digests of its tensors. Nothing is decoded.

    FILE is a packed file or directory, or anything that `wcodec analyze` reads. With --plan, say what it
    takes on a GPU before anything is packed or loaded.
    """
    if not file:  # an unset variable in a script shall not mean the current folder
        raise click.BadParameter("the path is empty", param_hint="FILE")
    if plan:
        from wcodec.analysis.plan import plan_model

        planned = plan_model(file, gpu=gpu)
        if format_ == "json":
            _print_json(planned.to_json())
        else:
            _print_plan(planned)
        return
    from wcodec.container.describe import describe

    description = describe(file)
    if format_ == "json":
        _print_json(description.to_json())
    else:
        _print_table(description)


def _print_json(document: dict[str, Any]) -> None:
    text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
    click.echo(text.encode(errors="backslashreplace").decode())  # paths that are not UTF-8, as JSON escapes


def _print_table(description: Description) -> None:
    from rich.markup import escape

    from wcodec.named_table import ALWAYS, Column, named_table

    def column(title: str, priority: int, cell: Callable[[TensorFacts], str]) -> Column:
        words = title in ("format", "dtype", "shape", "xxh3-128")
        cells = [cell(tensor) for tensor in description.tensors]
        return Column(title, cells, priority, "left" if words else "right")

    columns = [
        column("format", ALWAYS, lambda t: t.format),
        column("dtype", 4, lambda t: visible(t.dtype)),
        column("shape", 5, lambda t: units.shape_text(t.shape)),
        column("bytes", 3, lambda t: units.size(t.nbytes)),
        column("stored", ALWAYS, lambda t: "with weight" if t.within else units.size(t.stored_bytes)),
        column("bits/weight", 2, lambda t: units.bits(t.bits_per_weight, 3)),
    ]
    if description.packed:
        columns.append(column("xxh3-128", 1, lambda t: t.digest.hex()[:12] if t.digest else ""))
    out = console.stdout()
    out.print(f"[bold]{escape(visible(description.path))}[/bold]: {description.kind}")
    for source in description.sources:
        out.print(
            f"{escape(visible(source.file))}: original {units.size(source.nbytes)},"
            f" xxh3-128 {source.digest.hex()}, written by {escape(visible(source.tool))}"
        )
    if description.tensors:
        names = [visible(tensor.name) for tensor in description.tensors]
        out.print(named_table("tensor", names, columns, out.width))
    totals = description.totals
    share = f" ({units.percent(totals['ratio'])})" if description.packed and totals["ratio"] else ""
    packed = f", {totals['packed_tensors']:,} packed" if description.packed else ""
    out.print(
        f"{number(totals['tensors'], 'tensor')}{packed}, {number(totals['weights'], 'weight')}:"
        f" {units.size(totals['bytes'])}"
        + (f" → {units.size(totals['stored_bytes'])}{share}" if description.packed else "")
    )


def _print_plan(plan: ModelPlan) -> None:
    from rich.markup import escape

    from wcodec.named_table import ALWAYS, Column, named_table

    rows = list(_folded(plan.layers))

    def column(title: str, priority: int, cell: Callable[[LayerPlan], str]) -> Column:
        return Column(title, [cell(layer) for _, layer in rows], priority)

    columns = [
        column("weights", 1, lambda layer: units.count(layer.weights)),
        column("memory", ALWAYS, lambda layer: units.size(layer.nbytes)),
        column("→ packed", ALWAYS, lambda layer: units.size(layer.packed_bytes)),
        column(
            "reading", ALWAYS, lambda layer: units.duration(layer.read_us) if layer.read_us else "looked up"
        ),
        column(
            "→ packed", ALWAYS, lambda layer: units.duration(layer.packed_read_us) if layer.read_us else ""
        ),
    ]
    out, totals = console.stdout(), plan.totals
    out.print(f"[bold]{escape(visible(plan.path))}[/bold] on {escape(plan.gpu.name)}, per layer")
    if rows:
        out.print(named_table("layer", [visible(name) for name, _ in rows], columns, out.width))
    out.print(
        f"GPU memory {units.size(totals['bytes'])} → {units.size(totals['packed_bytes'])};"
        f" at most {units.size(totals['peak_bytes'])} while it is packed layer by layer"
    )
    out.print(
        f"Reading all that is multiplied once takes at least {units.duration(totals['read_us'])} →"
        f" {units.duration(totals['packed_read_us'])} at {plan.gpu.bandwidth / 1e12:g} TB/s"
        f" ({escape(plan.gpu.source)})"
    )


def _folded(layers: list[LayerPlan]) -> Iterator[tuple[str, LayerPlan]]:
    """Neighbouring layers of one size as one line, such as ``model.layers.0 … 31``."""
    at = 0
    while at < len(layers):
        end = at
        while end + 1 < len(layers) and _follows(layers[end], layers[end + 1]):
            end += 1
        last = layers[end].name.rpartition(".")[2]
        yield (layers[at].name if end == at else f"{layers[at].name} … {last}"), layers[at]
        at = end + 1


def _follows(one: LayerPlan, two: LayerPlan) -> bool:
    (stem, _, number), (stem2, _, number2) = one.name.rpartition("."), two.name.rpartition(".")
    numbered = number.isdecimal() and number2.isdecimal() and int(number2) == int(number) + 1
    return numbered and stem == stem2 and (one.nbytes, one.packed_bytes) == (two.nbytes, two.packed_bytes)
