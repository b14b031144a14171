"""Router kernels on the GPU: exact weights, FP32 sums, the same bits every time."""

from __future__ import annotations

import pytest

from bench.harness import poison, relative_error
from wcodec.kernels.router import MAX_TOKENS, Router, exact_parts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 31, 32, 33, 64, 100, 128, 200, 256)


def weights(rows: int, cols: int, parts: int) -> torch.Tensor:
    w = torch.randn(rows, cols, device="cuda") * 0.02
    hi = w.bfloat16().float()
    return w if parts == 3 else hi + (w - hi).bfloat16().float()


def logits(x: torch.Tensor, w: torch.Tensor, parts: int | None, workspace: torch.Tensor) -> torch.Tensor:
    kernel = Router(w, x.shape[0], parts)
    assert kernel.workspace_bytes <= workspace.numel()
    out = poison(torch.empty(x.shape[0], w.shape[0], device="cuda"))
    stream = torch.cuda.current_stream().cuda_stream
    kernel(stream, x.data_ptr(), x.stride(0), out.data_ptr(), workspace=workspace.data_ptr())
    return out


@pytest.fixture
def workspace() -> torch.Tensor:
    return torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("shape", [(256, 8192), (100, 1000), (257, 2056), (8, 64)])
def test_logits_of_any_shape_and_token_count(
    shape: tuple[int, int], parts: int, workspace: torch.Tensor
) -> None:
    w = weights(*shape, parts)
    assert exact_parts(w) == parts
    for m in TOKENS:
        x = torch.randn(m, shape[1], device="cuda").bfloat16()
        # No wait between launches of different instances: they share a workspace, as in a model.
        first, second = logits(x, w, parts, workspace), logits(x, w, parts, workspace)
        assert relative_error(first, x.double() @ w.double().t()) < 5e-6, m
        assert torch.equal(first, second)
    assert not workspace.any()


def test_one_hot_tokens_return_the_weights_themselves(workspace: torch.Tensor) -> None:
    """Powers of two times one weight: a part that is lost or rounded shows in the bits."""
    w = weights(256, 8192, 3)
    for m in (1, 8, 16, 32, 256):
        cols = torch.randint(0, 8192, (m,), device="cuda")
        x = torch.zeros(m, 8192, dtype=torch.bfloat16, device="cuda")
        x[torch.arange(m), cols] = 2.0
        assert torch.equal(logits(x, w, 3, workspace), 2 * w[:, cols].t())


def test_weights_without_parts_serve_few_tokens(workspace: torch.Tensor) -> None:
    w = weights(64, 512, 3)
    w[5, 7] = 3.4e38
    x = torch.randn(4, 512, device="cuda").bfloat16()
    x[:, 7] = 2.0**-60
    assert relative_error(logits(x, w, None, workspace), x.double() @ w.double().t()) < 1e-6


def test_a_thousand_launches_give_the_same_bits(workspace: torch.Tensor) -> None:
    w = weights(256, 8192, 3)
    for m in (1, 32, MAX_TOKENS):
        x = torch.randn(m, 8192, device="cuda").bfloat16()
        kernel, first = Router(w, m, 3), logits(x, w, 3, workspace)
        out = torch.empty_like(first)
        stream = torch.cuda.current_stream().cuda_stream
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            poison(out)
            kernel(stream, x.data_ptr(), x.stride(0), out.data_ptr(), workspace=workspace.data_ptr())
            different += (out != first).sum()
        assert int(different) == 0


def test_a_replayed_graph_equals_the_eager_call(workspace: torch.Tensor) -> None:
    w = weights(256, 8192, 3)
    x = torch.randn(64, 8192, device="cuda").bfloat16()
    eager = logits(x, w, 3, workspace)
    kernel, out = Router(w, 64, 3), torch.empty_like(eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        kernel(stream, x.data_ptr(), x.stride(0), out.data_ptr(), workspace=workspace.data_ptr())
    for _ in range(3):
        poison(out)
        graph.replay()
        assert torch.equal(out, eager)
