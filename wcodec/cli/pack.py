"""``wcodec pack``: write a packed file or directory."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import click

from wcodec.cli.console import progress, quiet_option, remark
from wcodec.cli.files import (
    force_option,
    leaving_nothing,
    path_argument,
    report,
    weight_bytes,
    workers_option,
)

EPILOG = """\b
Examples:
  wcodec pack model.safetensors packed.safetensors
  wcodec pack ~/models/Llama-3.1-8B Llama-3.1-8B-packed
  wcodec pack --profile storage model.safetensors stored.safetensors
  wcodec pack stored.safetensors packed.safetensors      converts
"""


@click.command(epilog=EPILOG, short_help="Write a packed model.")
@path_argument("src")
@path_argument("dst")
@click.option(
    "--profile",
    type=click.Choice(["run", "storage"]),
    default="run",
    show_default=True,
    help="run: GPU kernels read the file as it is. storage: smaller, for disks and networks.",
)
@click.option(
    "--dask",
    metavar="ADDRESS",
    help="Pack the files of a directory on a Dask cluster that sees the same paths (extra [dask]).",
)
@force_option
@workers_option
@quiet_option
def command(
    src: Path, dst: Path, profile: str, dask: str | None, force: bool, workers: int | None, quiet: bool
) -> None:
    """Write a packed copy of SRC to DST: BF16 24 % smaller (storage: a third), every weight recoverable.

    SRC is a safetensors file or a model directory (links are followed, so a Hugging Face snapshot works).
    BF16 tensors, and NVFP4 weights with their block scales, are packed where that makes them smaller;
    everything else is stored unchanged. In a directory the index is rewritten and the other files are copied.
    SRC may be packed with the other profile: it is converted.

    DST appears when it is complete: an interruption or a full disk leaves nothing half-written. A directory
    that was interrupted goes on where it stopped when the same command runs again.
    """
    from wcodec.container import pack_directory, pack_file
    from wcodec.container.atomic import part_path

    if dask is not None and not src.is_dir():
        raise click.UsageError("--dask spreads the files of a directory; SRC is none")
    how: dict[str, Any] = {"profile": profile, "force": force, "workers": workers}
    with contextlib.ExitStack() as stack:
        stack.enter_context(leaving_nothing())
        if dask is not None:
            from wcodec.cluster import dask_executor

            how["executor"] = stack.enter_context(dask_executor(dask))
        if src.is_dir():
            stack.push(partial(_say_what_is_kept, part_path(dst), quiet))  # once the bar is gone
        how["advance"] = stack.enter_context(progress("pack", weight_bytes(src), quiet=quiet))
        result = pack_directory(src, dst, **how) if src.is_dir() else pack_file(src, dst, **how)
    if not result.packed_tensors:
        remark("nothing got smaller, so all is stored as it was; `wcodec analyze` says why", quiet=quiet)
    report(result, result.bytes_out, result.bytes_in, quiet=quiet)


def _say_what_is_kept(part: Path, quiet: bool, *error: object) -> None:
    """After an interruption: finished files wait for the next run."""
    if error[0] is not None and part.is_dir():
        remark(f"finished files are kept in {part}; the same command goes on from there", quiet=quiet)
