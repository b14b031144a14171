"""``wcodec bench``: the kernels beside torch's own product on this GPU, for the user's shapes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import click

from wcodec.cli import console
from wcodec.cli.shapes import parse_shapes, parse_tokens

EPILOG = """\b
Examples:
  wcodec bench
  wcodec bench 4096x8192 8192x1024 --tokens 1,16,64
  wcodec bench 28672x4096 --keep both --format json
"""

_SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
_TOKENS = (1, 8, 16, 32, 64, 128, 256)
_REPEATS = 60


@dataclass(frozen=True)
class Line:
    """One product; times are raw medians in µs, ratios are of times less the empty graph's."""

    n: int
    k: int
    tokens: int
    path: str
    cublas_us: float
    wcodec_us: float
    ratio_raw: float
    ratio_net: float
    gb_per_s: float


@click.command(epilog=EPILOG, short_help="Time the kernels beside torch's own on this GPU.")
@click.argument("shapes", callback=parse_shapes, nargs=-1, metavar="[NxK]...")
@click.option(
    "--tokens",
    callback=parse_tokens,
    metavar="M,M,…",
    help="Token counts. [default: 1,8,16,32,64,128,256]",
)
@click.option(
    "--keep",
    type=click.Choice(["packed", "both"]),
    default="packed",
    show_default=True,
    help="both: the BF16 weights stay, and cuBLAS runs where a table calls it faster.",
)
@click.option("--device", default="cuda", show_default=True, metavar="CUDA", help="GPU to measure on.")
@click.option("--repeats", type=click.IntRange(3), default=_REPEATS, show_default=True, help="Pairs.")
@click.option(
    "--format", "format_", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
def command(
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...] | None,
    keep: str,
    device: str,
    repeats: int,
    format_: str,
) -> None:
    """Time products with weights of NxK (out x in features) and Gaussian values beside cuBLAS.

    Graph replay with a cold L2, cuBLAS and wcodec in alternation, medians. Without NxK: three matrices of a
    Llama 8B.
    """
    lines, empty_us = measure(shapes or _SHAPES, tokens or _TOKENS, keep, device, repeats)
    if format_ == "json":
        report = {"schema": "wcodec.bench/1", "empty_us": empty_us, "lines": [asdict(line) for line in lines]}
        click.echo(json.dumps(report, indent=1))
    else:
        _print(lines, empty_us)


def measure(
    shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...], keep: str, device: Any, repeats: int
) -> tuple[list[Line], float]:
    """Time every shape and token count; return the lines and the empty graph's time in µs."""
    import torch

    import wcodec
    from wcodec.cli.gpu import gpu_index
    from wcodec.timing import Timer
    from wcodec.tune import random_weight

    timer = Timer(gpu_index(device))
    empty = timer.empty_us
    lines = []
    for n, k in shapes:
        w = random_weight(n, k, timer.device)
        packed = wcodec.prepare({"w": w}, timer.device, keep=keep)["w"]
        for m in tokens:
            x = torch.randn(m, k, device=timer.device).bfloat16()
            runs = [
                lambda x=x, w=w: torch.nn.functional.linear(x, w),
                lambda x=x, packed=packed: wcodec.linear(x, packed),
            ]
            base, ours = timer.medians(runs, repeats)
            timer.release()
            read = (packed.blob.nbytes if packed.plan(m).choice.path != "cublas" else w.nbytes) + x.nbytes
            path, net = packed.plan(m).choice.path, ours - empty
            ratios = base / ours, (base - empty) / net
            lines.append(Line(n, k, m, path, base, ours, *ratios, gb_per_s=read / net / 1e3))
    return lines, empty


def _print(lines: list[Line], empty_us: float) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("weight", "tokens", "path", "cuBLAS µs", "wcodec µs", "× raw", "× net", "GB/s"):
        table.add_column(title, justify="left" if title in ("weight", "path") else "right", no_wrap=True)
    for line in lines:
        style = "green" if line.ratio_net >= 1 else "yellow"
        table.add_row(
            f"{line.n}x{line.k}",
            str(line.tokens),
            line.path,
            f"{line.cublas_us:.1f}",
            f"{line.wcodec_us:.1f}",
            f"{line.ratio_raw:.2f}",
            f"[{style}]{line.ratio_net:.2f}[/]",
            f"{line.gb_per_s:.0f}",
        )
    console.stdout().print(table)
    click.echo(f"times are raw; net ratios are without the {empty_us:.1f} µs of an empty graph")
