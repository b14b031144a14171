"""How fast `wcodec pack`, `verify` and `unpack` are on files in memory, by the clock and in processor time.

    python -m bench.files                      # BF16 and NVFP4, 0.54 GB each, in /dev/shm
    python -m bench.files --folder DIR         # on a disk of yours
    python -m bench.files --json FILE

GB/s of the original file, medians; operations take turns, so that a slow moment hits all of them. CPU GB/s
divides by the processor time of all threads, so that neighbours on a busy machine do not count. The unpacked
file is compared with the original.
"""

from __future__ import annotations

import filecmp
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.analyze import write_gaussian
from bench.host import NVFP4_SHAPE, nvfp4
from wcodec.container import pack_file, unpack_file, verify_file
from wcodec.formats.nvfp4_s5 import BLOCK

MATRICES = 16  # of BF16
PAIRS = 56  # of NVFP4
Job = tuple[str, int]  # command, threads


def write_nvfp4(path: Path) -> None:
    """Write NVFP4 weights as ModelOpt names them, in the order of the safetensors library: scales first."""
    rows, columns = NVFP4_SHAPE
    codes = rows * columns // 2
    shapes = {
        "weight_scale_2": ("F32", ()),
        "weight_scale": ("F8_E4M3", (rows, columns // BLOCK)),
        "weight": ("U8", (rows, columns // 2)),
    }
    sizes = {"weight_scale_2": 4, "weight_scale": codes // 8, "weight": codes}
    header: dict[str, Any] = {}
    end = 0
    for role, (dtype, shape) in shapes.items():
        for i in range(PAIRS):
            begin, end = end, end + sizes[role]
            fields = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            header[f"layers.{i}.{role}"] = fields
    text = json.dumps(header).encode()
    tensors = nvfp4()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"\0\0\x80\x3f" * PAIRS)
        for part in (slice(codes, None), slice(codes)):
            for i in range(PAIRS):
                file.write(tensors[i % len(tensors)][part].tobytes())


def measure(jobs: Mapping[Job, Callable[[], object]], runs: int) -> dict[Job, tuple[float, float]]:
    """Median seconds of each job, by the clock and of the processors; jobs take turns."""
    seconds: dict[Job, list[tuple[float, float]]] = {key: [] for key in jobs}
    for _ in range(runs + 1):
        for key, job in jobs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            job()
            seconds[key].append((time.perf_counter() - start, time.process_time() - start_cpu))
    return {
        key: (statistics.median(clock), statistics.median(cpu))
        for key, (_, *timed) in seconds.items()  # the first run compiles
        for clock, cpu in [zip(*timed, strict=True)]
    }


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default="/dev/shm")
@click.option("--runs", default=5, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write the figures here, too.")
def main(folder: Path, runs: int, output: Path | None) -> None:
    rows = []
    for kind in ("BF16", "NVFP4"):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            source, packed, back = (Path(place) / name for name in ("source", "packed", "back"))
            write_nvfp4(source) if kind == "NVFP4" else write_gaussian(source, MATRICES)
            nbytes = source.stat().st_size
            commands: dict[str, Callable[..., object]] = {
                "pack": partial(pack_file, source, packed, force=True),
                "verify": partial(verify_file, packed),
                "unpack": partial(unpack_file, packed, back, force=True),
            }
            jobs = {
                (name, threads): partial(command, workers=threads)
                for threads in (1, 2)
                for name, command in commands.items()
            }
            for (name, threads), (clock, cpu) in measure(jobs, runs).items():
                rows.append((kind, name, threads, nbytes / 1e9 / clock, nbytes / 1e9 / cpu))
            if not filecmp.cmp(source, back, shallow=False):
                raise SystemExit(f"{kind}: the unpacked file differs from the original")
    table = Table("", "", "threads", "GB/s", "CPU GB/s", title=f"files in {folder}, median of {runs}")
    for kind, name, threads, clock, cpu in rows:
        table.add_row(kind, name, str(threads), f"{clock:.2f}", f"{cpu:.2f}")
    Console().print(table)
    if output is not None:
        keys = ("kind", "command", "threads", "gb_per_s", "cpu_gb_per_s")
        found = {
            "folder": str(folder),
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "rows": [dict(zip(keys, row, strict=True)) for row in rows],
        }
        output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
