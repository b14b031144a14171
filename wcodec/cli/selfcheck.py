"""``wcodec selfcheck``: prove the codec exact on this machine."""

from __future__ import annotations

import click

MARKS = {True: ("exact", "green"), False: ("WRONG", "bold red"), None: ("not here", "dim")}


@click.command(
    epilog="""\b
Example:
  wcodec selfcheck && echo "every decoder here is exact"

\b
Exit status: 0 every check that can run here passed, 1 one failed.
"""
)
def command() -> int:
    """Send all 65,536 BF16 bit patterns through every format and every decoder of this machine.

    The host's encoder and decoder always run. Where there is an NVIDIA GPU, so do its packer, its
    whole-matrix decoder and every product kernel. What cannot run here is listed with the reason.
    """
    from wcodec.cli.console import stdout
    from wcodec.selfcheck import run
    from wcodec.units import number

    console = stdout()
    failed = skipped = 0
    for result in run():
        mark, style = MARKS[result.passed]
        seconds = f" [dim]({result.seconds:.1f} s)[/]" if result.passed is not None else ""
        console.print(f"[{style}]{mark:<8}[/] {result.name}: {result.detail}{seconds}")
        failed += result.passed is False
        skipped += result.passed is None
    if failed:
        console.print(f"[red]{number(failed, 'check')} failed[/]: do not trust results of this installation")
        return 1
    console.print(
        "[green]Every decoder that runs here is exact.[/]" + (f" {skipped} not run." if skipped else "")
    )
    return 0
