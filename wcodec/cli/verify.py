"""``wcodec verify``: decode everything and compare digests."""

from __future__ import annotations

from pathlib import Path

import click

from wcodec.cli.console import progress, quiet_option, remark, result
from wcodec.cli.files import leaving_nothing, path_argument, workers_option
from wcodec.units import number, size

EPILOG = """\b
Examples:
  wcodec verify packed.safetensors
  wcodec verify packed.safetensors --against model.safetensors
  wcodec verify Llama-3.1-8B-packed --against ~/models/Llama-3.1-8B

\b
Exit status: 0 exact, 1 a digest or the comparison differs, 2 malformed or unreadable.
"""


@click.command(epilog=EPILOG, short_help="Check digests, or compare with the source.")
@path_argument("packed")
@click.option(
    "--against",
    metavar="SRC",
    type=click.Path(path_type=Path, readable=False),
    help="Compare with this file or directory, byte for byte.",
)
@workers_option
@quiet_option
def command(packed: Path, against: Path | None, workers: int | None, quiet: bool) -> int:
    """Check that PACKED gives its original back, without writing anything.

    Every tensor is decoded and its digest compared, and so is that of the whole rebuilt file.
    """
    from wcodec.container import original_bytes, verify_directory, verify_file

    verify = verify_directory if packed.is_dir() else verify_file
    with leaving_nothing(), progress("verify", original_bytes(packed), quiet=quiet) as advance:
        verdict = verify(packed, against=against, workers=workers, advance=advance)
    for note in verdict.notes:
        remark(note, quiet=quiet)
    for difference in verdict.differences:
        result(f"{packed}: {difference}")
    files = f"{number(verdict.files, 'file')}, " if verdict.files != 1 else ""
    word = "exact" if verdict.exact else "DIFFERENT"
    compared = f", same as {against}" if against and verdict.exact else ""
    result(
        f"{packed}: {word}{compared}: {files}{number(verdict.tensors, 'tensor')}, {size(verdict.nbytes)},"
        f" {verdict.seconds:.1f} s"
    )
    return 0 if verdict.exact else 1
