"""``wcodec unpack``: give the original back."""

from __future__ import annotations

from pathlib import Path

import click

from wcodec.cli.console import progress, quiet_option
from wcodec.cli.files import force_option, leaving_nothing, path_argument, report, workers_option

EPILOG = """\b
Examples:
  wcodec unpack packed.safetensors model.safetensors
  wcodec unpack Llama-3.1-8B-packed Llama-3.1-8B
"""


@click.command(epilog=EPILOG, short_help="Give the original back, byte for byte.")
@path_argument("src")
@path_argument("dst")
@force_option
@workers_option
@quiet_option
def command(src: Path, dst: Path, force: bool, workers: int | None, quiet: bool) -> None:
    """Write the original that SRC was packed from to DST, byte for byte.

    SRC is a packed file or a packed directory. The digest of every tensor and of the whole file is compared
    before DST appears; a difference leaves nothing behind and exits with 1.
    """
    from wcodec.container import original_bytes, unpack_directory, unpack_file

    unpack = unpack_directory if src.is_dir() else unpack_file
    with leaving_nothing(), progress("unpack", original_bytes(src), quiet=quiet) as advance:
        result = unpack(src, dst, force=force, workers=workers, advance=advance)
    report(result, result.bytes_in, result.bytes_out, quiet=quiet)
