"""What exceptions cost the fused products: ``python -m bench.patches``.

A weight whose high exponent bits are not in the matrix' table of eight is stored as a patch. Each matrix is
timed beside one that has no exceptions, through `wcodec.prepare` and `wcodec.linear`, in alternation:

- *gaussian*: as random weights come, about 8 exceptions in 100,000 weights;
- *dense*: 5 in 10,000, and 231 of them in one brick of 64 × 64, the worst that a public checkpoint showed.

Where bytes lie in memory makes up to 4 % of a difference: every matrix is there six times, twice in each of
three orders, and a round's time is the mean over its copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

import wcodec
from bench.harness import Row, Session, relative_error, save
from bench.intervals import Estimate, Pairs
from wcodec.kernels import pack

SHAPES = {"o": (8192, 1024), "pooler": (4096, 8192), "unpooler": (8192, 4096)}
TOKENS = (1, 16, 64, 128, 256)
LIMITS = {"gaussian": 0.03, "dense": 0.08}
BRICK, CROWDED = 64, 231
DENSE_FRACTION = 0.0005
# High exponent bits of numbers below 10⁻¹⁷, which are nothing to a product; so many that none of them is
# frequent enough for the table.
RARE_FIRST, RARE_COUNT = 0x18, 16
ERROR_BOUND = 4e-3
COPIES = 6
HIGH_BITS = 0x7F00


def with_high_bits(weight: torch.Tensor, where: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the weights with the high exponent bits `high` where told; signs and low bytes stay."""
    bits = weight.view(torch.int16)
    changed = (bits & ~HIGH_BITS) | (high.to(torch.int16) << 8)
    return torch.where(where, changed, bits).view(torch.bfloat16)


def without_exceptions(weight: torch.Tensor) -> torch.Tensor:
    """Give every exception the smallest high bits of the table."""
    high = (weight.view(torch.int16) & HIGH_BITS) >> 8
    table = torch.tensor(sorted(pack.make_plan(weight).table), dtype=high.dtype, device=high.device)
    return with_high_bits(weight, ~torch.isin(high, table), table[0])


def dense(clean: torch.Tensor) -> torch.Tensor:
    """Spread exceptions over a matrix that has none, and crowd one brick."""
    chosen = torch.rand(clean.shape, device=clean.device) < DENSE_FRACTION
    crowd = torch.zeros(BRICK * BRICK, dtype=torch.bool, device=clean.device)
    crowd[torch.randperm(BRICK * BRICK, device=clean.device)[:CROWDED]] = True
    chosen[:BRICK, :BRICK] = crowd.view(BRICK, BRICK)
    return with_high_bits(
        clean, chosen, RARE_FIRST + torch.randint(RARE_COUNT, clean.shape, device=clean.device)
    )


def cost(ratio: Estimate) -> Estimate:
    """How much longer ours takes, of a ratio base / ours."""
    return Estimate(1 / ratio.value - 1, 1 / ratio.high - 1, 1 / ratio.low - 1)


def measure(session: Session, name: str, tokens: list[int]) -> Iterator[Row]:
    """Yield a row per kind of exceptions and token count."""
    n, k = SHAPES[name]
    gaussian = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
    clean = without_exceptions(gaussian)
    weights = {"clean": clean, "gaussian": gaussian, "dense": dense(clean)}
    counts = {kind: pack.make_plan(weight).exceptions for kind, weight in weights.items()}
    if counts["clean"]:
        raise SystemExit(f"{name}: {counts['clean']} exceptions where none were expected")
    kinds = list(weights)
    orders = [kinds[i % len(kinds) :] + kinds[: i % len(kinds)] for i in range(COPIES)]
    copies = [wcodec.prepare({kind: weights[kind] for kind in order}) for order in orders]
    for m in tokens:
        x = torch.randn(m, k, device="cuda").bfloat16()
        for kind, weight in weights.items():
            error = relative_error(wcodec.linear(x, copies[0][kind]), x.float() @ weight.float().t())
            if not error < ERROR_BOUND:
                raise SystemExit(f"{name} m={m} {kind}: relative error {error:.1e}")
        graphs = [
            session.capture(lambda packed=state[kind], x=x: wcodec.linear(x, packed))
            for kind in kinds
            for state in copies
        ]
        times = session.times(graphs).reshape(len(kinds), COPIES, -1).mean(axis=1)
        took = dict(zip(kinds, times, strict=True))
        for kind, limit in LIMITS.items():
            pairs = Pairs(took["clean"], took[kind], session.empty)
            packed = copies[0][kind]
            label = f"{name} {n}x{k} m={m} {kind} {counts[kind]} exceptions {packed.explain((m,))[0]['path']}"
            nbytes = packed.blob.nbytes + x.nbytes
            row = session.row(label, "clean", pairs, nbytes, copies[0]["clean"].blob.nbytes + x.nbytes)
            net, raw = cost(row.x_net), cost(row.x_raw)
            verdict = "ok" if net.value <= limit else f"OVER {limit:.0%}"
            print(
                f"{label:<52} {row.base_raw:6.1f} -> {row.ours_raw:6.1f} µs raw, net {net.value:+.1%}"
                f" [{net.low:+.1%}, {net.high:+.1%}], raw {raw.value:+.1%}  {verdict}",
                flush=True,
            )
            yield row


def main() -> None:
    """Measure, print, and write ``bench/results/patches.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    session = Session(options.repeats)
    rows = [row for name in options.shapes for row in measure(session, name, options.tokens)]
    save("patches", session, rows)


if __name__ == "__main__":
    main()
