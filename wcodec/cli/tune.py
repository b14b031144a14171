"""``wcodec tune``: measure the kernels on this GPU and keep what was fastest."""

from __future__ import annotations

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
"""


@click.command(epilog=EPILOG, short_help="Measure and keep the fastest kernel settings for this GPU.")
@click.argument("shapes", callback=parse_shapes, nargs=-1, required=True, metavar="NxK...")
@click.option("--tokens", callback=parse_tokens, metavar="M,M,…", help="Token counts, such as 1,16,64.")
@click.option("--device", default="cuda", show_default=True, help="GPU to measure on.")
@console.quiet_option
def command(
    shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...] | None, device: str, quiet: bool
) -> None:
    """Time every kernel and configuration for weights of NxK (out x in features, per GPU).

    What is found is kept beside the compiled kernels and used from the next start on.
    """
    from wcodec.cli.gpu import gpu_index
    from wcodec.cuda.device import device_info
    from wcodec.tables import CLASSES, tuned_path
    from wcodec.tune import PREFILL, tune

    def report(entry: Entry) -> None:
        gain = entry.cublas_us / entry.us
        console.remark(
            f"{entry.n}x{entry.k}, {entry.m} tokens, {entry.kernel}: {entry.us:.1f} µs, "
            f"cuBLAS {entry.cublas_us:.1f} µs ({gain:.2f}x)",
            quiet=quiet,
        )

    info = device_info(gpu_index(device))
    tune(shapes, device, tokens or (*CLASSES, *PREFILL), report)
    click.echo(str(tuned_path(info.name)))
