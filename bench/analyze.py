"""How fast `wcodec analyze` reads a warm file, on one core and on all, beside reading the same bytes.

    python bench/analyze.py                    # 1 GB of N(0, 0.02) in 32 matrices, in a temporary file
    python bench/analyze.py --file MODEL       # a file of yours
    python bench/analyze.py --json FILE

GB/s of bytes on disk, medians. CPU GB/s divides by the processor time of the process instead of the clock, so
that neighbours on a busy machine do not count.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from wcodec.analysis import analyze
from wcodec.bits import bf16_from_f32
from wcodec.readers import open_source

MATRIX = (4096, 4096)


def write_gaussian(path: Path, matrices: int) -> None:
    """Write a safetensors file of BF16 matrices of N(0, 0.02)."""
    nbytes = 2 * MATRIX[0] * MATRIX[1]
    ends = range(nbytes, (matrices + 1) * nbytes, nbytes)
    header = {
        f"layers.{i}.weight": {"dtype": "BF16", "shape": MATRIX, "data_offsets": [end - nbytes, end]}
        for i, end in enumerate(ends)
    }
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in ends:
            values = rng.standard_normal(MATRIX, dtype=np.float32) * np.float32(0.02)
            file.write(bf16_from_f32(values).tobytes())


def read_all(path: Path) -> None:
    """Touch every byte once, as the analysis must: the sum of 64-bit words of each chunk."""
    with open_source(path) as source:
        for tensor in source.tensors:
            for chunk in tensor.chunks():
                chunk[: chunk.size & ~7].view("<u8").sum()


def measure(job: Callable[[], object], nbytes: int, repeats: int) -> tuple[float, float]:
    """Median GB/s by the clock and by processor time; one run before does not count."""
    job()
    clock, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        job()
        clock.append(nbytes / 1e9 / (time.perf_counter() - start))
        cpu.append(nbytes / 1e9 / (time.process_time() - start_cpu))
    return statistics.median(clock), statistics.median(cpu)


@click.command(help=__doc__)
@click.option("--file", type=click.Path(path_type=Path, exists=True), help="Analyse this instead.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write the figures here, too.")
def main(file: Path | None, repeats: int, output: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = file or Path(folder) / "model.safetensors"
        if file is None:
            write_gaussian(path, 32)
        with open_source(path) as source:
            nbytes = source.nbytes
        processors = len(os.sched_getaffinity(0))
        jobs: dict[str, Callable[[], object]] = {
            "read every byte, 1 thread": lambda: read_all(path),
            "analyze, 1 thread": lambda: analyze(path, workers=1),
            f"analyze, {processors} threads": lambda: analyze(path, workers=processors),
        }
        figures = {name: measure(job, nbytes, repeats) for name, job in jobs.items()}
    table = Table("job", "GB/s", "CPU GB/s", title=f"{nbytes / 1e9:.2f} GB, warm, {platform.machine()}")
    for name, (clock, cpu) in figures.items():
        table.add_row(name, f"{clock:.2f}", f"{cpu:.2f}")
    Console().print(table)
    if output is not None:
        rows = [{"job": job, "gb_per_s": clock, "cpu_gb_per_s": cpu} for job, (clock, cpu) in figures.items()]
        output.write_text(json.dumps({"bytes": nbytes, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
