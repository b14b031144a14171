"""transformers on a GPU: the peak of memory while packing, static caches, CUDA graphs, torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("accelerate")

import torch
from transformers import AutoModelForCausalLM

from bench.llama_steps import Decoder, UncompressedBricks
from tests.integrations.tiny import PROMPT, assert_same_weights, write_model
from wcodec.integrations.transformers import WCodecConfig, report
from wcodec.nn import PackedLinear

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 4096, "num_attention_heads": 8}
CHECK_BYTES = 24 << 20  # of comparing a packed weight with its source: decoded rows and what differs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "bf16", attention_bias=True, **WIDE)


@pytest.fixture(scope="module")
def packed(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", quantization_config=WCodecConfig())


def prompt() -> torch.Tensor:
    return PROMPT.cuda()


def test_weights_are_those_of_the_file(packed: Any, folder: Path) -> None:
    assert_same_weights(packed, AutoModelForCausalLM.from_pretrained(folder, device_map="cuda"))


def test_packing_takes_what_is_packed_and_one_layer(folder: Path, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    for where, config in ((folder, WCodecConfig()), (tmp_path / "packed", None)):
        more = {} if config is None else {"quantization_config": config}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = AutoModelForCausalLM.from_pretrained(where, device_map="cuda", **more)
        peak = torch.cuda.max_memory_allocated() - before
        held = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
        layer = max(row.before_bytes for row in report(model))
        assert peak <= held + layer + CHECK_BYTES
        if config is not None:
            model.save_pretrained(tmp_path / "packed")


def test_a_decode_step_in_a_cuda_graph_gives_the_eager_tokens(packed: Any) -> None:
    with torch.no_grad():
        eager = Decoder(packed, 2, 32)
        eager.prefill(prompt())
        expected = [eager.step().clone() for _ in range(6)]
        decoder = Decoder(packed, 2, 32)
        decoder.prefill(prompt())
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            decoder.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            logits = decoder.step()
        decoder.prefill(prompt())
        for each in expected:
            graph.replay()
            assert torch.equal(logits, each)


def test_tokens_equal_those_of_uncompressed_bricks(packed: Any) -> None:
    with torch.no_grad():
        ours, theirs = Decoder(packed, 2, 32), Decoder(packed, 2, 32, UncompressedBricks())
        assert torch.equal(ours.prefill(prompt()), theirs.prefill(prompt()))
        for _ in range(12):
            assert torch.equal(ours.step(), theirs.step())
            assert torch.equal(ours.tokens, theirs.tokens)


def test_generate_with_a_static_cache(packed: Any) -> None:
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = packed.generate(prompt(), **greedy)
    found = packed.generate(prompt(), cache_implementation="static", disable_compile=True, **greedy)
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_generate_compiles_its_steps(packed: Any) -> None:
    greedy: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = packed.generate(prompt(), cache_implementation="static", **greedy)
    assert found.shape == (2, PROMPT.shape[1] + 4)


@pytest.mark.slow
def test_the_forward_pass_compiles_without_a_break(packed: Any) -> None:
    compiled = torch.compile(packed.forward, fullgraph=True)
    with torch.no_grad():
        ours, theirs = compiled(prompt()).logits.float(), packed(prompt()).logits.float()
    assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


def test_moving_a_model_moves_its_packed_weights(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=WCodecConfig())
    with torch.no_grad():
        host = model(PROMPT).logits.float()
        moved = model.cuda()(prompt()).logits.float().cpu()
    assert all(m.packed.is_cuda for m in model.modules() if isinstance(m, PackedLinear))
    assert (host - moved).norm() <= 2e-2 * host.norm()
