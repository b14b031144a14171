"""``wcodec tune``: measure the kernels on this GPU and keep what was fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from wcodec.cli import console
from wcodec.cli.shapes import parse_shapes, parse_tokens

if TYPE_CHECKING:
    from wcodec.tables import Entry

EPILOG = """\b
Examples:
  wcodec tune 4096x8192 8192x1024
  wcodec tune 28672x4096 --tokens 1,16,64 --device cuda:1
  wcodec tune 4096x4096 -o table.json
"""


@click.command(epilog=EPILOG, short_help="Measure and keep the fastest kernel settings for this GPU.")
@click.argument("shapes", callback=parse_shapes, nargs=-1, required=True, metavar="NxK...")
@click.option(
    "--tokens",
    callback=parse_tokens,
    metavar="M,M,…",
    help="Token counts; each serves those down to the one before. [default: 1,2,4,…,256,512,4096]",
)
@click.option("--device", default="cuda", show_default=True, metavar="CUDA", help="GPU to measure on.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the table to FILE instead; this machine does not use it.",
)
@console.quiet_option
def command(
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...] | None,
    device: str,
    output: Path | None,
    quiet: bool,
) -> None:
    """Time every kernel and configuration for weights of NxK (out x in features, per GPU).

    What is found is kept beside the compiled kernels, joins what was found before, and is used from the next
    start on. The file's name is printed.
    """
    from wcodec.cli.gpu import gpu_index
    from wcodec.cuda.device import device_info
    from wcodec.tables import CLASSES, tuned_path
    from wcodec.tune import PREFILL, tune

    def report(product: list[Entry]) -> None:
        best = min(product, key=lambda entry: entry.us)
        what = f"{best.n}x{best.k}, {best.m} token{'s'[: best.m > 1]}"
        times = ", ".join(f"{entry.kernel} {entry.us:.1f}" for entry in product)
        gain = f"{best.kernel} {best.cublas_us / best.us:.2f}x"
        console.remark(f"{what}: {times}, cuBLAS {best.cublas_us:.1f} µs; {gain}", quiet=quiet)

    if output is not None and not output.parent.is_dir():  # said before minutes of measuring
        raise click.BadParameter(f"there is no folder {str(output.parent)!r}", param_hint="--output")
    info = device_info(gpu_index(device))
    tune(shapes, device, tokens or (*CLASSES, *PREFILL), report, output)
    click.echo(str(output or tuned_path(info.name)))
