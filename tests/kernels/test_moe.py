"""Routed experts: layout, routing, products (on the CPU, through moe_host), builds and instruction counts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import muse_moe_w4a16 as bench
from tests.kernels import moe_host
from wcodec import moe
from wcodec.cuda.compiler import compile_cubin
from wcodec.cuda.device import DeviceInfo
from wcodec.errors import UnsupportedError, WCodecError
from wcodec.kernels import moe as kernels

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, ALL = 192, 128, 5, 3, 9


def weights(hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, experts: int = EXPERTS) -> moe.Weights:
    """Random experts, some block scales negative."""
    made = bench.make_weights("cpu", seed=3, experts=experts, hidden=hidden, intermediate=intermediate)
    negative = torch.rand(made.w13_scale.shape, generator=torch.Generator().manual_seed(5)) < 0.1
    return made._replace(w13_scale=made.w13_scale ^ (negative.to(torch.uint8) << 7))


def state(local: Sequence[int], made: moe.Weights, num_experts: int = ALL, top_k: int = TOP_K) -> moe.State:
    hidden, intermediate = made.w2.shape[1], made.w2.shape[2] * 2
    return moe.prepare(made, moe.Config(hidden, intermediate, num_experts, top_k, local))


def inputs(tokens: int, ids: np.ndarray[Any, Any], hidden: int = HIDDEN) -> bench.Inputs:
    rng = np.random.default_rng(tokens)
    return bench.Inputs(
        torch.tensor(rng.standard_normal((tokens, hidden))).bfloat16(),
        torch.tensor(ids),
        torch.tensor(rng.random(ids.shape) + 0.1, dtype=torch.float32),
    )


def local_ids(ids: torch.Tensor, local: Sequence[int], num_experts: int) -> torch.Tensor:
    table = torch.full((num_experts,), -1)
    table[torch.tensor(local)] = torch.arange(len(local))
    return table.to(ids.device)[ids]


def check(
    out: torch.Tensor, data: bench.Inputs, made: moe.Weights, local: Sequence[int], num_experts: int
) -> None:
    here = data._replace(topk_ids=local_ids(data.topk_ids, local, num_experts))
    reference = bench.reference(here, made, experts=range(len(local)))
    total, worst = bench.errors(out, reference)
    assert total <= 0.006
    assert worst <= 0.03


ROUTINGS = {
    # name: tokens, route 0 of every token, local experts, CTAs, most tokens of a pass
    "one token": (1, None, range(5), 3, 128),
    "few tokens": (7, None, range(5), 3, 128),
    "a subset of the experts": (20, None, [0, 2, 3, 7, 8], 2, 128),
    "one busy expert": (70, 1, range(5), 3, 128),
    "several passes": (150, 1, range(5), 4, 64),
    "wide passes": (300, 1, range(5), 3, 128),
    "more CTAs than work": (3, None, range(5), 40, 128),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_matches_the_reference(name: str) -> None:
    tokens, busy, local, grid, wide = ROUTINGS[name]
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(ALL)[:TOP_K] for _ in range(tokens)])
    if busy is not None:
        ids[:, 0] = busy
    made, data = weights(), inputs(tokens, ids)
    out = moe_host.forward(
        data.x,
        data.topk_ids,
        data.topk_weights,
        state(list(local), made),
        grid=grid,
        wide=wide,
    )
    check(out, data, made, list(local), ALL)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "tokens", "grid"),
    [(4096, 128, 9, 3), pytest.param(128, 4096, 17, 3, marks=pytest.mark.slow)],
)
def test_shares_may_end_at_half_a_row_tile(hidden: int, intermediate: int, tokens: int, grid: int) -> None:
    """Only where the weights in flight make up half of a row tile's columns, as on the benchmark's model."""
    ids = np.stack([np.random.default_rng(token).permutation(ALL)[:TOP_K] for token in range(tokens)])
    made, data = weights(hidden, intermediate, 3), inputs(tokens, ids, hidden)
    out = moe_host.forward(data.x, data.topk_ids, data.topk_weights, state(range(3), made), grid=grid)
    check(out, data, made, range(3), ALL)


@pytest.mark.slow
def test_a_full_grid_leaves_nothing_out() -> None:
    """132 CTAs, 40 experts from none to 90 tokens: every local route is computed once, by someone."""
    rng = np.random.default_rng(0)
    logits = -1.3 * np.log(rng.permutation(64) + 1) + rng.gumbel(size=(90, 64))
    ids = np.argsort(-logits, axis=1)[:, :4]
    made, data = weights(64, 128, 40), inputs(90, ids, 64)
    ready = state(range(40), made, 64, 4)
    out = moe_host.forward(data.x, data.topk_ids, data.topk_weights, ready, grid=132)
    check(out, data, made, range(40), 64)


def test_prepared_weights_restore_bit_for_bit() -> None:
    made = weights()
    made.w2_scale[1, 5, 2] = 0xFF
    for part, back in zip(made, moe.restore(state(range(5), made)), strict=True):
        assert torch.equal(part.view(torch.uint8), back.view(torch.uint8))


def test_an_expert_twice_in_one_token() -> None:
    made, data = weights(), inputs(9, np.full((9, TOP_K), 2))
    out = moe_host.forward(data.x, data.topk_ids, data.topk_weights, state(range(5), made))
    reference = bench.reference(data, made, experts=range(5))
    assert bench.errors(out, reference)[0] <= 0.006


def test_tokens_without_local_experts_get_zeros() -> None:
    ids = np.array([[5, 6, 7], [0, 6, 7], [-1, 9, 1 << 40]])
    made, data = weights(), inputs(3, ids)
    out = moe_host.forward(data.x, data.topk_ids, data.topk_weights, state(range(5), made))
    assert not out[[0, 2]].any()
    assert out[1].any()
    assert torch.isfinite(out).all()


def test_ids_may_have_4_bytes() -> None:
    ids = np.random.default_rng(0).integers(0, ALL, (6, TOP_K))
    made, data = weights(), inputs(6, ids)
    ready = state(range(5), made)
    wide = moe_host.forward(data.x, data.topk_ids, data.topk_weights, ready)
    narrow = moe_host.forward(data.x, data.topk_ids.int(), data.topk_weights, ready)
    assert torch.equal(wide, narrow)


def test_a_nan_scale_reaches_its_expert_only() -> None:
    made = weights()
    made.w2_scale[1, 5, 2] = 0x7F
    ids = np.array([[1, 5, 6], [0, 5, 6]])
    data = inputs(2, ids)
    out = moe_host.forward(data.x, data.topk_ids, data.topk_weights, state(range(5), made))
    assert out[0].isnan().all()
    assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 64, 128])
def test_operands_are_the_checkpoint_s_bit_for_bit(tokens: int) -> None:
    """One-hot tokens bring every decoded weight out through the product, whatever its width."""
    rng = np.random.default_rng(tokens)
    packed = torch.tensor(rng.integers(0, 256, (64, 64), dtype=np.uint8))
    scale = torch.tensor(rng.integers(0, 256, (64, 8), dtype=np.uint8))
    scale[(scale & 0x7F) == 0x7F] = 0x81
    x = torch.eye(128).bfloat16()
    ordered = torch.empty_like(x)
    moe_host.run("sm80_moe_order", {"THREADS": 512}, 16, 512, x, ordered, x.numel() // 2)
    which = kernels.Product(64, 128, 1, 1, 512, 8, False, 24)
    out = torch.empty(128, 64, dtype=torch.bfloat16)
    factors = torch.tensor([moe.DECODED_FACTOR])
    ids = torch.zeros(tokens, dtype=torch.int64)
    moe_host.product(which, 1, moe.to_bricks(packed, scale), factors, x, ordered, out, ids)
    wanted = bench.dequantise(packed, scale, torch.tensor(1.0)).T.bfloat16()
    assert torch.equal(out[:tokens], wanted[:tokens])


def model(tokens: int) -> list[kernels.Product]:
    """Both products of the benchmark's model."""
    routes = next(size for size in (128, 512, 2048, 4096) if tokens * bench.TOP_K <= size)
    shape = (bench.LOCAL, bench.TOP_K, routes, 8)
    few, many = kernels.kinds(tokens, 24)
    return [
        kernels.Product(2 * 4096, 4096, *shape, True, few, many),
        kernels.Product(4096, 4096, *shape, False, few, many),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 16, 64, 256, 512])
def test_builds_without_spilling(tokens: int) -> None:
    for which in model(tokens):
        assert kernels.compiled(which, "sm_90a").wide == 128
        assert which.smem <= moe_host.SHARED_BYTES


@pytest.mark.slow
def test_odd_shapes_build() -> None:
    for rows, cols, experts, top_k in ((640, 512, 6, 4), (2304, 2880, 32, 4), (7168, 2048, 32, 8)):
        kernels.compiled(kernels.Product(rows, cols, experts, top_k, 512, 8, False, 8), "sm_90a")


@pytest.mark.slow
def test_decoding_stays_within_its_instruction_budget(tmp_path: Path) -> None:
    """At 4.2 TB/s an H200 has 2.0 … 2.2 integer slots per 4.5-bit weight; few tokens take at most 1.6."""
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        from nvidia import cu13

        disassembler = str(Path(next(iter(cu13.__path__))) / "bin" / "nvdisasm")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compile_cubin(kernels.SOURCE, model(64)[1].defines(), "sm_90a").data)
    text = subprocess.run([disassembler, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    loops = _product_loops(text)
    for shape in ("HMMA.16816", "HGMMA.64x24x16"):
        integer, products = min(counts for kind, counts in loops if kind.startswith(shape))
        assert integer / (8 * products) <= 1.6, shape


_INTEGER = {"LOP3", "IMAD", "SHF", "IADD3", "VIADD", "PRMT", "ISETP", "LEA", "SEL"}


def _product_loops(text: str) -> list[tuple[str, tuple[int, int]]]:
    """Innermost loops around tensor-core products: their kind, integer instructions and products."""
    listing: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*);", line)
        if label:
            labels[label[1]] = len(listing)
        elif found:
            listing.append((found[1], found[2]))
    loops = []
    for at, (name, operands) in enumerate(listing):
        target = re.search(r"\.L_x_\d+", operands) if name == "BRA" else None
        if target and labels.get(target[0], at) < at:
            body = [kind for kind, _ in listing[labels[target[0]] : at + 1]]
            kinds = {kind for kind in body if kind.startswith(("HMMA", "HGMMA"))}
            if len(kinds) == 1:
                products = sum(kind in kinds for kind in body)
                integer = sum(kind.split(".")[0] in _INTEGER for kind in body)
                loops.append((kinds.pop(), (integer, products)))
    return loops


def test_prepare_names_what_does_not_fit() -> None:
    made = weights()
    with pytest.raises(WCodecError, match=r"w2_scale is torch\.uint8"):
        state(range(5), made._replace(w2_scale=made.w2_scale[:, :-1]))
    with pytest.raises(WCodecError, match="4 ids for 5 experts"):
        state(range(4), made)
    with pytest.raises(WCodecError, match="outside 0 … 8"):
        state([0, 1, 2, 3, 9], made)
    with pytest.raises(UnsupportedError, match="multiples of 64"):
        moe.prepare(made, moe.Config(100, 64, 9, 3))
    with pytest.raises(WCodecError, match="post_norm is on meta, w13 on cpu"):
        state(range(5), made._replace(post_norm=made.post_norm.to("meta")))
    with pytest.raises(WCodecError, match="weights of 5 experts where the layer has 9"):
        moe.prepare(made, moe.Config(HIDDEN, INTERMEDIATE, 9, 3))
    for top_k in (0, -1, 10):
        with pytest.raises(WCodecError, match=f"top_k is {top_k} of 9 experts"):
            state(range(5), made, top_k=top_k)


def test_norms_are_brought_to_where_vector_loads_may_begin() -> None:
    made = weights()
    odd = torch.empty(made.post_norm.numel() + 8, dtype=torch.bfloat16)
    odd = odd[1 - odd.data_ptr() // 2 % 8 :][: made.post_norm.numel()].view_as(made.post_norm)
    ready = state(range(5), made._replace(post_norm=odd.copy_(made.post_norm)))
    assert odd.data_ptr() % 16
    assert ready.norms.data_ptr() % 16 == 0
    assert torch.equal(ready.norms, made.post_norm)


@pytest.mark.parametrize("what", ["device", "alignment"])
def test_an_output_that_kernels_cannot_write_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20, 141 << 30)
    monkeypatch.setattr("wcodec.cuda.device.device_info", lambda index: info)
    ready, data = state(range(5), weights()), inputs(3, np.zeros((3, TOP_K), np.int64))
    out = torch.empty(3 * HIDDEN + 8, dtype=torch.bfloat16)
    out = out[1 - out.data_ptr() // 2 % 8 :][: 3 * HIDDEN].view(3, HIDDEN)
    if what == "device":
        out = torch.empty(3, HIDDEN, dtype=torch.bfloat16, device="meta")
    with pytest.raises(WCodecError, match="out is"):
        moe.forward(data.x, data.topk_ids, data.topk_weights, ready, out)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 9, 33, 70, 300, 1500])
def test_on_the_device(tokens: int) -> None:
    local = [1, 3, 4, 5, 6]
    made = moe.Weights(*(part.cuda() for part in weights()))
    rng = np.random.default_rng(tokens)
    ids = (
        np.stack([rng.permutation(ALL)[:TOP_K] for _ in range(tokens)])
        if tokens
        else np.zeros((0, TOP_K), int)
    )
    if tokens:
        ids[:, 0] = 3
    data = bench.Inputs(*(part.cuda() for part in inputs(tokens, ids)))
    ready = state(local, made)
    out = moe.forward(data.x, data.topk_ids, data.topk_weights, ready)
    assert out.shape == data.x.shape
    if tokens:
        check(out, data, made, local, ALL)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = moe.forward(data.x, data.topk_ids, data.topk_weights, ready)
        for _ in range(20):
            again.fill_(float("nan"))
            graph.replay()
            assert torch.equal(again, out)
