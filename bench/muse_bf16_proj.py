"""Projections of one layer and two Llama matrices beside cuBLAS: ``python bench/muse_bf16_proj.py``.

Six loads (1, 16, 32 tokens of decoding; 8, 128, 256 of verifying drafts) over the five matrices of a layer
split over eight GPUs, and a table over six BF16 matrices. Through the public calls, `wcodec.prepare` and
`wcodec.linear`, in CUDA graphs; bench/harness.py says how it is measured. A load's ratio is the sum of
cuBLAS's net times over the sum of ours; at one token a slice stands for the unpooler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

if __name__ == "__main__":  # run as a script: find the packages beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import wcodec
from bench.harness import Row, Session, poison, relative_error, save
from bench.intervals import Estimate, Pairs, geometric_mean, ratio_of_sums

ROUTER = "router"
SHAPES = {
    "qkv_gate": (2304, 8192),
    "o": (8192, 1024),
    "pooler": (4096, 8192),
    "unpooler": (8192, 4096),
    "slice": (1024, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    ROUTER: (256, 8192),  # last: its weights are FP32, and it is what most differs from the rest
}
TABLE = ("qkv_gate", "o", "pooler", "unpooler", "gate_up", "down")
LOADS = (1, 16, 32, 8, 128, 256)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 4096)
POLICIES = ("packed", "both")
PREFILL = 1024  # tokens from which products take a millisecond: fewer repeats
BF16_BOUND, FP32_BOUND = 4e-3, 1e-5  # of the relative L2 error


def load_shapes(tokens: int) -> tuple[str, ...]:
    """Matrices of one load."""
    return ("qkv_gate", "o", "pooler", "slice" if tokens == 1 else "unpooler", ROUTER)


@dataclass(frozen=True)
class Measured:
    """One product under one policy."""

    policy: str
    shape: str
    tokens: int
    path: str
    pairs: Pairs
    row: Row


def bases(x: torch.Tensor, w: torch.Tensor) -> dict[str, Any]:
    """What a product is compared with: cuBLAS; for the router the two usual ways to keep FP32 weights."""
    if w.dtype == torch.bfloat16:
        return {"F.linear": lambda: F.linear(x, w)}
    wide, hi = x.float(), w.bfloat16()
    lo = (w - hi.float()).bfloat16()

    def two_products() -> torch.Tensor:
        return torch.mm(x, hi.t(), out_dtype=torch.float32) + torch.mm(x, lo.t(), out_dtype=torch.float32)

    return {"F.linear": lambda: F.linear(wide, w), "mm + mm": two_products}


def measure(session: Session, name: str, tokens: Sequence[int], policies: Sequence[str]) -> list[Measured]:
    """Prepare one matrix and compare every token count under every policy."""
    n, k = SHAPES[name]
    w = torch.randn(n, k, device="cuda") * 0.02
    w = w if name == ROUTER else w.bfloat16()
    states = {policy: wcodec.prepare({name: w}, keep=policy)[name] for policy in policies}
    found = []
    for m in tokens:
        x = torch.randn(m, k, device="cuda").bfloat16()
        reference = x.double() @ w.double().t() if name == ROUTER else x.float() @ w.float().t()
        candidates = bases(x, w)
        graphs = {label: session.capture(run) for label, run in candidates.items()}
        base = list(graphs)[session.best(list(graphs.values()))] if len(graphs) > 1 else next(iter(graphs))
        for policy, packed in states.items():
            poison(torch.empty_like(reference, dtype=w.dtype))  # freed at once: the output's memory
            error = relative_error(wcodec.linear(x, packed), reference)
            if not error < (FP32_BOUND if name == ROUTER else BF16_BOUND):
                raise SystemExit(f"{name} m={m} keep={policy}: relative error {error:.1e}")
            ours = session.capture(lambda packed=packed, x=x: wcodec.linear(x, packed))
            pairs = session.pair(graphs[base], ours, session.repeats if m < PREFILL else 20)
            path = packed.explain((m,))[0]["path"]
            weight_bytes = w.nbytes if path == "cublas" else packed.blob.nbytes
            label = f"{name} {n}x{k} m={m} {policy} {path}"
            row = session.row(label, base, pairs, weight_bytes + x.nbytes, w.nbytes + x.nbytes)
            found.append(Measured(policy, name, m, path, pairs, row))
            print(row, flush=True)
    return found


def summarise(measured: Sequence[Measured]) -> dict[str, Any]:
    """Ratios of loads, their geometric mean, and the table over the BF16 matrices; printed and returned."""
    pairs = {(item.policy, item.shape, item.tokens): item.pairs for item in measured}
    summary: dict[str, Any] = {}
    for policy in sorted({item.policy for item in measured}, reverse=True):
        loads = {}
        for m in LOADS:
            parts = [pairs.get((policy, shape, m)) for shape in load_shapes(m)]
            if all(parts):
                loads[m] = [part for part in parts if part is not None]
        for m, parts in loads.items():
            net, raw = ratio_of_sums([parts]), ratio_of_sums([parts], net=False)
            base, ours = (sum(getattr(p, side) - p.empty for p in parts) for side in ("base_us", "ours_us"))
            print(f"load m={m:<4} keep={policy:<6} {base:6.1f} -> {ours:6.1f} µs net  x {net} net, {raw} raw")
            summary[f"{policy} load {m}"] = net
        if len(loads) == len(LOADS):
            net, raw = ratio_of_sums(list(loads.values())), ratio_of_sums(list(loads.values()), net=False)
            print(f"six loads   keep={policy:<6} geometric mean x {net} net, {raw} raw")
            summary[f"{policy} six loads"] = net
        for m in sorted({item.tokens for item in measured}):
            ratios = {
                shape: pairs[policy, shape, m].net_ratio().value
                for shape in TABLE
                if (policy, shape, m) in pairs
            }
            if ratios:
                mean, worst = geometric_mean(list(ratios.values())), min(ratios, key=lambda s: ratios[s])
                each = "  ".join(f"{shape} {ratio:.2f}" for shape, ratio in ratios.items())
                least = f"least {worst} {ratios[worst]:.2f}"
                print(f"table m={m:<4} keep={policy:<6} x {mean:.2f}, {least}: {each}")
                summary[f"{policy} table {m}"] = Estimate(mean, min(ratios.values()), max(ratios.values()))
    return summary


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write ``bench/results/<json>.json`` after every matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--keep", nargs="*", choices=POLICIES, default=POLICIES)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--flush", type=int, default=256, help="MB read before every replay")
    parser.add_argument("--json", default="muse_bf16_proj", help="name of the results file")
    options = parser.parse_args(argv)
    session = Session(options.repeats, flush_bytes=options.flush << 20)
    print(f"empty graph {session.empty:.2f} µs raw; times in µs, medians of {session.repeats} pairs")
    measured: list[Measured] = []
    for name in options.shapes:
        tokens = [m for m in options.tokens if (name != "slice" or m == 1) and (name != ROUTER or m <= 256)]
        measured += measure(session, name, tokens, options.keep)
        torch.cuda.empty_cache()
        save(options.json, session, [item.row for item in measured])
    summary = summarise(measured)
    warm = sum(not item.row.is_cold for item in measured)
    if warm:
        print(f"{warm} of {len(measured)} rows lie below a read floor: L2 was not cold, try --flush 2048")
    save(
        options.json,
        session,
        [item.row for item in measured],
        summary={key: [round(float(v), 4) for v in (e.value, e.low, e.high)] for key, e in summary.items()},
        floors={str(size): round(us, 3) for size, us in sorted(session.floors.items())},
    )


if __name__ == "__main__":
    main()
