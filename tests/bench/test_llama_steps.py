"""The bench's own forward pass and brick layout, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.24")

import torch
from transformers import AutoModelForCausalLM

import wcodec
from bench.llama_steps import Decoder, uncompressed_bricks
from tests.integrations.tiny import PROMPT, write_model


def test_logits_are_those_of_the_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path), dtype=torch.float32)
    decoder = Decoder(model, batch=2, context=16)
    with torch.no_grad():
        expected = model(PROMPT).logits
        torch.testing.assert_close(decoder.prefill(PROMPT[:, :4]), expected[:, 3], rtol=1e-4, atol=1e-5)
        decoder.tokens.copy_(PROMPT[:, 4:])
        torch.testing.assert_close(decoder.step(), expected[:, 4], rtol=1e-4, atol=1e-5)
    assert decoder.position.item() == 5


def test_greedy_tokens_are_those_of_generate(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path), dtype=torch.float32)
    decoder = Decoder(model, batch=2, context=32)
    with torch.no_grad():
        decoder.prefill(PROMPT)
        found = [decoder.tokens.clone()]
        for _ in range(7):
            decoder.step()
            found.append(decoder.tokens.clone())
        expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.cat(found, 1), expected[:, PROMPT.shape[1] :])


def test_uncompressed_bricks_have_the_order_of_packed_ones() -> None:
    """Low bytes lie in a packed brick where the format says; uncompressed ones must lie in the same order."""
    weight = torch.randn(128, 192).bfloat16()
    blob = torch.from_numpy(wcodec.encode(weight).blob.copy())
    packed = blob[: 2 * 3 * 6208].view(2 * 3, 6208)[:, :6144].view(6, 4, 1536)
    # A quarter begins with the low bytes of steps 0 and 1, then of steps 2 and 3, as lane, step, weight.
    low = packed[:, :, :1024].reshape(6, 4, 2, 32, 2, 8).permute(0, 1, 2, 4, 3, 5).reshape(-1)
    ours = uncompressed_bricks(weight).view(torch.uint8).view(-1, 2)[:, 0]
    assert torch.equal(ours, low)
    assert uncompressed_bricks(torch.ones(65, 63).bfloat16()).shape == (2 * 4096,)
