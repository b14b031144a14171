"""Routed experts with NVFP4 weights: ``python -m bench.muse_moe_w4a16 [--seeds 20] [--repeats 30]``.

Six loads and five tests of one layer: 256 experts, 32 of them here, top 8, hidden and intermediate width
4096, expert popularity ∝ rank^−1.3. Every routing makes this GPU the busiest of eight. Timed beside it, in
the same run: a plain read of as many bytes as the touched experts have at 4.5 bits per weight, and a simple
unfused baseline.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.harness import RESULTS, Session, environment, poison
from wcodec import moe

HIDDEN = INTERMEDIATE = 4096
EXPERTS, LOCAL, TOP_K = 256, 32, 8
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 9 // 16
LOADS = (1, 16, 32, 8, 128, 256)
TESTS = ((4, False), (33, False), (257, False), (128, True), (1, False))
# What the whole call may take, in plain reads of the touched experts' bytes.
TARGETS = {1: 2.0, 8: 1.6, 16: 1.5, 32: 1.5, 128: 1.5, 256: 1.6}
BOUND, ROW_BOUND = 0.015, 5 * 0.015
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Inputs(NamedTuple):
    """One call: BF16 tokens, global expert ids and gate values."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def prepare(weights: moe.Weights) -> moe.State:
    """Untimed: bring the local experts into the kernels' order."""
    return moe.prepare(weights, moe.Config(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, range(LOCAL)))


def kernel_fn(data: Inputs, state: moe.State) -> torch.Tensor:
    """Timed: the local experts' share of the output, BF16 [tokens, hidden]."""
    return moe.forward(data.x, data.topk_ids, data.topk_weights, state)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4 by ModelOpt's formula: bytes [N, K/2], E4M3 scales [N, K/16] as bytes, FP32 global multiplier."""
    rows, cols = weight.shape
    blocks = weight.float().reshape(rows, cols // 16, 16)
    overall = weight.abs().max().float() / (6.0 * 448.0)
    scale = (blocks.abs().amax(-1) / 6.0 / overall).clamp(max=448.0).to(torch.float8_e4m3fn)
    step = scale.float().mul(overall)[..., None]
    values = torch.where(step > 0, blocks / step, 0.0)
    limits = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    codes = torch.bucketize(values.abs(), limits).to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    codes = codes.reshape(rows, cols // 2, 2)
    return codes[..., 0] | codes[..., 1] << 4, scale.view(torch.uint8), overall


def make_weights(
    device: Any = "cuda",
    seed: int = 0,
    experts: int = LOCAL,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> moe.Weights:
    """Random experts, quantised; gate and up have global scales of their own."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spread = 0.5 + torch.rand(rows, 1, generator=generator, device=device)
        return quantise(torch.randn(rows, cols, generator=generator, device=device) * spread * cols**-0.5)

    parts: list[list[torch.Tensor]] = [[], [], [], [], [], []]
    for _ in range(experts):
        gate, up = matrix(intermediate, hidden), matrix(intermediate, hidden)
        down = matrix(hidden, intermediate)
        for part, tensor in zip(
            parts,
            (torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]]), torch.stack([gate[2], up[2]]), *down),
            strict=True,
        ):
            part.append(tensor)
    norm = (torch.randn(experts, hidden, generator=generator, device=device) * 0.1).bfloat16()
    return moe.Weights(*(torch.stack(part) for part in parts), norm)


def make_inputs(tokens: int, seed: int, *, skewed: bool = False, device: Any = "cuda") -> Inputs:
    """Draw one routing and its tokens; the busiest of eight GPUs becomes this one."""
    rng = np.random.default_rng([seed, tokens, skewed])
    rank = rng.permutation(EXPERTS) + 1
    logits = -(2.5 if skewed else 1.3) * np.log(rank) + rng.gumbel(size=(tokens, EXPERTS))
    ids = np.argsort(-logits, axis=1)[:, :TOP_K]
    busiest = int(np.bincount(ids.ravel() // LOCAL, minlength=EXPERTS // LOCAL).argmax())
    ids = (ids - busiest * LOCAL) % EXPERTS
    gates = rng.random((tokens, TOP_K)) + 0.1
    gates /= gates.sum(1, keepdims=True)
    x = rng.standard_normal((tokens, HIDDEN))
    return Inputs(
        torch.tensor(x, device=device).bfloat16(),
        torch.tensor(ids, device=device),
        torch.tensor(gates, device=device, dtype=torch.float32),
    )


def touched(data: Inputs) -> np.ndarray[Any, Any]:
    """Tokens per local expert."""
    ids = data.topk_ids.cpu().numpy().ravel()
    return np.bincount(ids[(ids >= 0) & (ids < LOCAL)], minlength=LOCAL)


@functools.cache
def e2m1_values(device: torch.device) -> torch.Tensor:
    """Value of every nibble; made once per device, because a graph cannot capture a copy from the host."""
    return torch.tensor([*E2M1, *(-v for v in E2M1)], device=device)


def dequantise(packed: torch.Tensor, scale: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
    """FP32 weights [N, K] of bytes [N, K/2] and scale bytes [N, K/16]; `overall` scalar or one per row."""
    table = e2m1_values(packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()
    values = table[codes].reshape(packed.shape[0], -1, 16)
    return (values * scale.view(torch.float8_e4m3fn).float()[..., None]).flatten(1) * overall


def reference(
    data: Inputs,
    weights: moe.Weights,
    dtype: torch.dtype = torch.float32,
    experts: Sequence[int] | None = None,
) -> torch.Tensor:
    """The computation in plain PyTorch, FP32 unless told otherwise, one touched expert after the other."""
    out = torch.zeros(data.x.shape, dtype=torch.float32, device=data.x.device)
    x, intermediate = data.x.to(dtype), weights.w2.shape[2] * 2
    for e in experts if experts is not None else np.flatnonzero(touched(data)).tolist():
        halves = weights.w13_global[e].repeat_interleave(intermediate)[:, None]
        gate, up = (x @ dequantise(weights.w13[e], weights.w13_scale[e], halves).to(dtype).T).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate.float()) * up.float()
        y = (
            hidden.to(dtype)
            @ dequantise(weights.w2[e], weights.w2_scale[e], weights.w2_global[e]).to(dtype).T
        )
        z = y.float() * (1 + weights.post_norm[e].float())
        z = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        out += torch.where(data.topk_ids == e, data.topk_weights, 0.0).sum(1, keepdim=True) * z
    return out


def errors(out: torch.Tensor, ref: torch.Tensor) -> tuple[float, float]:
    """Relative L2 error of the whole output and of the worst row.

    Small rows are measured against a tenth of the average row.
    """
    diff = (out.float() - ref).norm(dim=1)
    norms = ref.norm(dim=1)
    total = float(diff.norm() / norms.norm())
    return total, float((diff / norms.clamp(min=0.1 * float(norms.mean()))).max())


@dataclass(frozen=True)
class Result:
    """Medians over the seeds of one load; times in µs, raw (a graph replay's fixed cost included)."""

    tokens: int
    experts: float
    routes: float
    most: float
    megabytes: float
    ours: float
    floor: float
    ratio: float
    target: float
    error: float
    worst_row: float


def measure(
    session: Session,
    weights: moe.Weights,
    state: moe.State,
    tokens: int,
    seeds: int,
    run: Callable[[Inputs, moe.State], torch.Tensor] = kernel_fn,
) -> Result:
    """Time one load over `seeds` routings and check every one of them."""
    rows = []
    for seed in range(seeds):
        data = make_inputs(tokens, seed)
        counts = touched(data)
        size = int((counts > 0).sum()) * EXPERT_BYTES
        poison(torch.empty_like(data.x))  # freed at once: the output's memory
        out = run(data, state)
        error, worst = errors(out, reference(data, weights))
        graph = session.capture(lambda data=data: run(data, state))
        ours = float(np.median(session.times([graph])[0]))
        floor = session.floor(size)
        rows.append(
            (
                (counts > 0).sum(),
                counts.sum(),
                counts.max(),
                size / 1e6,
                ours,
                floor,
                ours / floor,
                error,
                worst,
            )
        )
    middle = np.median(np.array(rows, dtype=float), axis=0)
    worst_of = np.max(np.array(rows, dtype=float), axis=0)
    return Result(
        tokens, *(float(v) for v in middle[:7]), TARGETS[tokens], float(worst_of[7]), float(worst_of[8])
    )


def baseline_us(session: Session, weights: moe.Weights, tokens: int) -> float:
    """Raw µs of the unfused baseline on the first routing: dequantise to BF16, then torch."""
    data = make_inputs(tokens, 0)
    experts = np.flatnonzero(touched(data)).tolist()
    graph = session.capture(lambda: reference(data, weights, torch.bfloat16, experts))
    return float(np.median(session.times([graph], 5)[0]))


def main() -> None:
    """Run the tests, then the loads; print a table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--loads", type=int, nargs="*", default=LOADS)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    session = Session(arguments.repeats)
    weights = make_weights()
    state = prepare(weights)
    failed = 0
    for tokens, skewed in TESTS:
        data = make_inputs(tokens, 1000, skewed=skewed)
        total, worst = errors(kernel_fn(data, state), reference(data, weights))
        good = total <= BOUND and worst <= ROW_BOUND
        failed += not good
        verdict = "" if good else "  FAILED"
        print(f"test bs {tokens}{' skewed' * skewed}: error {total:.4f}, worst row {worst:.4f}{verdict}")
    print(
        "    bs  experts routes most     MB | ours µs  floor µs  ratio  target | baseline µs |  error   row"
    )
    results, baselines = [], {}
    for tokens in arguments.loads:
        r = measure(session, weights, state, tokens, arguments.seeds)
        baselines[tokens] = baseline_us(session, weights, tokens)
        failed += r.error > BOUND or r.worst_row > ROW_BOUND
        print(
            f"{r.tokens:6} {r.experts:8.0f} {r.routes:6.0f} {r.most:4.0f} {r.megabytes:6.0f} |"
            f" {r.ours:7.1f} {r.floor:9.1f} {r.ratio:6.2f} {r.target:7.1f} | {baselines[tokens]:11.0f} |"
            f" {r.error:.4f} {r.worst_row:.4f}",
            flush=True,
        )
        results.append(r)
    RESULTS.mkdir(exist_ok=True)
    report = {
        **environment(),
        "seeds": arguments.seeds,
        "repeats": arguments.repeats,
        "empty_us": session.empty,
    }
    report |= {"baseline_us": baselines, "loads": [asdict(r) for r in results]}
    (RESULTS / "muse_moe_w4a16.json").write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
