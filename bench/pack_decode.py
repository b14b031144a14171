"""GPU packer and whole-matrix decode: ``python -m bench.pack_decode``. Raw times; TB/s are of BF16."""

from __future__ import annotations

import argparse

import numpy as np
import torch

from bench.harness import Row, Session, poison, save
from wcodec.kernels import decode, pack

SHAPES = {"o": (8192, 1024), "pooler": (4096, 8192), "gate_up": (28672, 4096), "odd": (4095, 8191)}


def rate(nbytes: int, us: float) -> str:
    """Time and TB/s as text."""
    return f"{us:.1f} µs {nbytes / us / 1e6:.2f} TB/s"


def measure(session: Session, name: str) -> Row:
    """Time the passes of the packer; compare the decode with a copy of the same output in pairs."""
    rows, cols = SHAPES[name]
    weight = (torch.randn(rows, cols, device="cuda") * 0.02).bfloat16()
    plan = pack.make_plan(weight)
    count, ends = pack.overflow_ends(weight, plan)
    blob, out = pack.pack(weight, plan=plan), poison(torch.empty_like(weight))
    values = torch.zeros(128, dtype=torch.int64, device="cuda")
    quarters = torch.zeros(pack.QUARTERS * plan.brick_count, dtype=torch.int32, device="cuda")

    def unpack() -> None:
        decode.unpack(blob, (rows, cols), bytes(plan.table), count, out=out)

    unpack()
    if not torch.equal(out.view(torch.int16), weight.view(torch.int16)):
        raise SystemExit(f"{name} does not decode to its source")
    passes = {
        "histogram": lambda: pack.launch_histogram(weight, values),
        "count": lambda: pack.launch_count(weight, plan, quarters),
        "pack": lambda: pack.launch_pack(weight, plan, ends, blob),
    }
    times = session.times([session.capture(run) for run in passes.values()])
    medians = dict(zip(passes, np.median(times, axis=1), strict=True))
    pairs = session.pair(session.capture(lambda: out.copy_(weight)), session.capture(unpack))
    medians |= {"decode": pairs.ours_us, "copy_": pairs.base_us}
    print(f"{name:<8}", ", ".join(f"{label} {rate(weight.nbytes, us)}" for label, us in medians.items()))
    return session.row(f"decode {name} {rows}x{cols}", "copy_", pairs, blob.nbytes, weight.nbytes)


def main() -> None:
    """Measure, print, and write ``bench/results/pack_decode.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    session = Session()
    rows = [measure(session, name) for name in options.shapes]
    for row in rows:
        print(row)
    save("pack_decode", session, rows)


if __name__ == "__main__":
    main()
