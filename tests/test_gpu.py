"""`prepare` and `linear` on a GPU: numbers on every path, streams, graphs, threads, compilation."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import wcodec
from wcodec.cuda import module
from wcodec.errors import WCodecError
from wcodec.state import PackedWeight

torch = pytest.importorskip("torch")

from wcodec.nn import PackedLinear, compress_  # noqa: E402  (it needs torch)

pytestmark = pytest.mark.gpu

# Every path, on whole and on ragged bricks: tiny, thin, odd, one row, deep K, a benchmark's shape.
SHAPES = [(64, 64), (160, 232), (7, 1024), (1, 2048), (130, 200), (1000, 72), (8192, 1024), (2304, 8192)]
TOKENS = [1, 2, 5, 8, 13, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 200, 256, 257, 300, 512, 1030]
RELATIVE_L2 = 2.5e-3  # one rounding to BF16 gives 1.7e-3


def weight(n: int, k: int, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    w = torch.randn(n, k, generator=generator, device=device) * 0.02
    w[w.abs() < 1e-4] *= 1e-4  # exceptions, here and there
    return w.bfloat16()


def tokens(m: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def bricks(w: torch.Tensor, **settings: object) -> PackedWeight:
    """Prepare a weight in bricks even where they do not get smaller."""
    return wcodec.prepare({"w": wcodec.encode(w, format="bf16-w12")}, **settings)["w"]


def exact(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = x.double() @ w.double().t()
    return out if bias is None else out + bias.double()


def relative_l2(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("shape", [*SHAPES, (41387, 64)])
def test_the_gpu_packs_the_host_encoders_bytes(shape: tuple[int, int]) -> None:
    w = weight(*shape)
    host = wcodec.encode(w)
    for source in (w, w.cpu().pin_memory(), w.cpu()):
        p = wcodec.prepare({"w": source})["w"]
        assert p.format == host.format
        np.testing.assert_array_equal(p.blob.cpu().numpy(), host.blob)
        assert torch.equal(p.to_bf16(), w)


def test_strided_sources_and_other_dtypes() -> None:
    w = weight(256, 192)
    for view in (w.t(), w[::2, ::3], w[:, 64:], w[3:, 1:]):
        assert torch.equal(wcodec.prepare({"w": view})["w"].to_bf16(), view)
    for dtype in (torch.float32, torch.float16):
        p = wcodec.prepare({"w": w.to(dtype)})["w"]
        assert (p.format, p.dtype) == ("raw", dtype)
        x = tokens(9, 192).to(dtype)
        assert relative_l2(wcodec.linear(x, p), exact(x, w.to(dtype))) < 2e-3


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_at_every_token_count(n: int, k: int) -> None:
    w, bias = weight(n, k), tokens(1, n)[0]
    p = bricks(w)
    assert torch.equal(p.to_bf16(), w)
    for m in TOKENS:
        x = tokens(m, k, seed=m)
        for b in (None, bias):
            out, reference = wcodec.linear(x, p, b), exact(x, w, b)
            assert relative_l2(out, reference) < RELATIVE_L2, (m, p.plan(m).choice)
            if n >= 64:
                rows = (out.double() - reference).norm(dim=1) / reference.norm(dim=1)
                assert float(rows.max()) < 5 * RELATIVE_L2, (m, p.plan(m).choice)


@pytest.mark.parametrize("m", [1, 5, 8, 13, 16, 31, 32, 64, 100, 256, 300])
def test_one_hot_tokens_give_the_weights_bits_back(m: int) -> None:
    w = weight(192, 256)
    w[:16, :40] *= 1e6  # a quarter whose patches overflow
    w[100, 77] = -1e-38
    p = bricks(w)
    for column in (0, 5, 39, 77, 255):
        x = torch.zeros(m, 256, device="cuda", dtype=torch.bfloat16)
        x[m // 2, column] = 1
        out = wcodec.linear(x, p)
        assert torch.equal(out[m // 2], w[:, column])
        assert int(out.count_nonzero()) == int(w[:, column].count_nonzero())


def test_any_shape_stride_and_alignment_of_x() -> None:
    for k in (128, 200, 73):
        w = weight(192, k)
        p = bricks(w)
        base = tokens(70, 2 * k + 9)
        for m in (1, 7, 40, 70):
            for x in (base[:m, 3 : 3 + k], base[:m, 8 : 8 + k], base.t()[:k, :m].t() if m <= 70 else base):
                out = wcodec.linear(x, p)
                assert torch.equal(out, wcodec.linear(x.clone(), p))
                assert relative_l2(out, exact(x, w)) < RELATIVE_L2
        for lead in ((), (0,), (2, 3), (1, 1, 4)):
            x = tokens(max(1, int(np.prod(lead))), k)[: int(np.prod(lead))].view(*lead, k)
            assert wcodec.linear(x, p).shape == (*lead, 192)


@pytest.mark.parametrize("m", [1, 8, 32, 64, 200])
def test_repeats_are_bitwise_equal(m: int) -> None:
    p, x = bricks(weight(2304, 4096)), tokens(m, 4096)
    first = wcodec.linear(x, p)
    for _ in range(200):
        assert torch.equal(wcodec.linear(x, p), first)


def test_it_runs_on_the_current_stream() -> None:
    p = bricks(weight(512, 1024))
    stream = torch.cuda.Stream()
    for m in (1, 64, 300):
        x = tokens(m, 1024)
        expected = wcodec.linear(x * 2, p)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            late = torch.empty_like(x)
            torch.cuda._sleep(20_000_000)
            late.copy_(x * 2)
            out = wcodec.linear(late, p)
        stream.synchronize()
        assert torch.equal(out, expected)


def test_streams_do_not_share_scratch() -> None:
    p = bricks(weight(1024, 4096))
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [tokens(64, 4096, seed=i) for i in range(4)]
    expected = [wcodec.linear(x, p) for x in inputs]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[] for _ in streams]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[i].append(wcodec.linear(inputs[i], p))
    torch.cuda.synchronize()
    for i, outs in enumerate(outputs):
        assert all(torch.equal(out, expected[i]) for out in outs)


def test_threads_share_a_module() -> None:
    layer = torch.nn.Linear(2048, 1024, device="cuda", dtype=torch.bfloat16)
    module = PackedLinear.from_linear(layer)
    inputs = [tokens(m, 2048, seed=m) for m in (1, 8, 64, 128)]
    with torch.no_grad():
        expected = [module(x) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(i: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    if not torch.equal(module(inputs[i]), expected[i]):
                        wrong.append(i)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def capture(run: object, stream: object = None) -> tuple[object, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    return graph, out


@pytest.mark.parametrize("m", [1, 16, 64, 256, 300])
def test_graphs_replay_what_eager_calls_give(m: int) -> None:
    p = bricks(weight(1024, 4096))
    x = tokens(m, 4096)
    expected = wcodec.linear(x, p)
    graph, out = capture(lambda: wcodec.linear(x, p))
    other = tokens(64, 4096, seed=5)
    eager = wcodec.linear(other, p)
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(wcodec.linear(other, p), eager)
        assert torch.equal(out, expected)


def test_graphs_captured_apart_may_run_side_by_side() -> None:
    p = bricks(weight(1024, 8192))
    inputs = [tokens(64, 8192, seed=i) for i in range(6)]
    expected = [wcodec.linear(x, p) for x in inputs]
    captured = [capture(lambda x=x: wcodec.linear(x, p)) for x in inputs]
    streams = [torch.cuda.Stream() for _ in captured]
    torch.cuda.synchronize()
    for _ in range(30):
        for _, out in captured:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for (graph, _), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, good) for (_, out), good in zip(captured, expected, strict=True))


@pytest.mark.parametrize("m", [1, 64, 1030])
def test_kernels_may_be_loaded_in_a_capture(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = weight(1024, 2048), tokens(m, 2048)
    expected = wcodec.linear(x, bricks(w))
    p = wcodec.prepare({"w": wcodec.encode(w, format="bf16-w12")})["w"]  # uploaded: nothing is decoded yet
    p.plans.clear()
    monkeypatch.setattr(module, "_loaded", {})
    graph, out = capture(lambda: wcodec.linear(x, p))
    assert module._loaded
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_a_fresh_weight_in_a_capture_is_refused_plainly() -> None:
    blob = bricks(weight(64, 64)).blob.clone()
    x = tokens(1, 64)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WCodecError, match="first time inside a CUDA graph capture"), torch.cuda.graph(graph):
        torch.ops.wcodec.linear(x, blob, None, 64, 64, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_give_the_same_bits(mode: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512)).bfloat16().cuda()
    compress_(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=mode == "default", mode=mode)
        for m in (1, 8, 64, 1, 300):
            for _ in range(3):
                x = tokens(m, 512, seed=m)
                assert torch.equal(compiled(x).clone(), model(x))


@pytest.mark.slow
def test_graphs_of_a_compiled_function_do_not_copy_the_weight() -> None:
    torch._dynamo.reset()
    p = bricks(weight(4096, 4096))
    compiled = torch.compile(lambda x: wcodec.linear(x, p), fullgraph=True, mode="reduce-overhead")
    x = tokens(8, 4096)
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(compiled(x).clone(), wcodec.linear(x, p))
    assert torch.cuda.memory_allocated() - before < p.blob.nbytes // 2


def test_the_op_follows_pytorchs_rules() -> None:
    p = bricks(weight(128, 64))
    ops = torch.ops.wcodec
    args = (p.blob, tokens(1, 128)[0], 128, 64, torch.bfloat16)
    torch.library.opcheck(ops.linear.default, (tokens(3, 64), *args))
    torch.library.opcheck(ops.linear_grad.default, (tokens(40, 64).requires_grad_(), *args))


def test_a_router_gets_fp32_logits_in_one_launch() -> None:
    w = torch.randn(256, 4096, device="cuda")
    p = wcodec.prepare({"router": w})["router"]
    for m in (1, 8, 16, 32, 128, 256, 300):
        x = tokens(m, 4096)
        for bias in (None, torch.randn(256, device="cuda")):
            out = wcodec.linear(x, p, bias)
            assert out.dtype == torch.float32
            assert relative_l2(out, exact(x, w, bias)) < 1e-5
    if p.router_parts is not None:
        assert p.explain((1, 300))[0]["path"] == "router"
        assert "in BF16" in p.explain((32,))[0]["why"]


def test_keep_both_and_few_max_tokens() -> None:
    w, x = weight(512, 1024), tokens(100, 1024)
    p = wcodec.prepare({"w": w}, keep="both", max_tokens=32)["w"]
    assert relative_l2(wcodec.linear(x, p), exact(x, w)) < RELATIVE_L2
    q = wcodec.prepare({"w": w}, max_tokens=64)["w"]
    for m in (64, 100, 128, 129):
        x = tokens(m, 1024)
        assert relative_l2(wcodec.linear(x, q), exact(x, w)) < RELATIVE_L2


def test_every_path_explains_itself() -> None:
    for row in bricks(weight(2304, 8192)).explain():
        assert row["path"] in {"gemv", "gemm", "decode", "cublas"}
        assert row["why"]
        assert (row["us"] is None) == (row["source"] == "not measured")


def test_preparing_peaks_at_what_is_packed_and_one_matrix() -> None:
    matrix = torch.randn(4096, 4096).bfloat16()
    weights = {str(i): (matrix * (i + 1)).bfloat16().pin_memory() for i in range(6)}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state = wcodec.prepare(weights)
    peak = torch.cuda.max_memory_allocated() - before
    slack = 96 << 20  # comparison buffer, workspaces
    assert peak <= state.nbytes + matrix.nbytes + slack


def test_modules_move_between_devices() -> None:
    layer = torch.nn.Linear(256, 128, dtype=torch.bfloat16)
    x = tokens(5, 256)
    module = PackedLinear.from_linear(layer, device="cuda")
    with torch.no_grad():
        first = module(x)
        on_host = module.cpu()(x.cpu())
        again = module.cuda()(x)
    assert torch.equal(first, again)
    assert relative_l2(on_host.cuda(), first.double()) < 5e-3


@pytest.mark.skipif("not __import__('torch').cuda.device_count() > 1", reason="needs two GPUs")
def test_the_weights_device_decides_where_it_runs() -> None:
    w = weight(512, 1024).to("cuda:1")
    p = wcodec.prepare({"w": w}, device="cuda:1")["w"]
    with torch.cuda.device(0):
        for m in (1, 64, 300):
            x = torch.randn(m, 1024, device="cuda:1").bfloat16()
            assert relative_l2(wcodec.linear(x, p), exact(x, w)) < RELATIVE_L2
