"""A Llama's forward pass with a static cache that a CUDA graph can hold, on modules of transformers.

Only the linear layers differ between what is compared, so everything else is written once, here, the same for
all: norms, rotary embedding, attention and greedy choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from wcodec.dispatch import DECODE
from wcodec.errors import WCodecError
from wcodec.formats.bf16_w12 import TILE
from wcodec.kernels.gemv import GemvConfig
from wcodec.nn import PackedLinear
from wcodec.paths import product

Call = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


class Decoder:
    """Greedy decoding of a batch, one token per `step`.

    Parameters
    ----------
    model : transformers.LlamaForCausalLM
    batch : int
        Sequences.
    context : int
        Most tokens per sequence.
    call : callable, optional
        ``(module, x) -> y`` for linear layers; the module itself by default.
    """

    def __init__(self, model: Any, batch: int, context: int, call: Call | None = None) -> None:
        config, weight = model.config, model.model.embed_tokens.weight
        self.model, self.batch = model, batch
        self.call = call or (lambda module, x: module(x))
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = config.hidden_size // self.heads
        shape = (config.num_hidden_layers, 2, batch, self.kv_heads, context, self.width)
        self.cache = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.cos, self.sin = _rotations(model, context)
        self.columns = torch.arange(context, device=weight.device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.position = torch.zeros(1, dtype=torch.long, device=weight.device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits after the last of `tokens`, shape (batch, vocabulary), and fill the cache.

        `tokens` has the shape (batch, T), `positions` (T,).
        """
        cos, sin = self.cos[positions], self.sin[positions]
        groups = self.heads // self.kv_heads
        # The query heads of a group are rows of one product with their key head. As numbers, because every
        # layer would convert a mask of booleans anew.
        mask = torch.where(self.columns <= positions[:, None], 0.0, float("-inf"))
        mask = mask.to(self.cache.dtype).repeat(groups, 1)
        hidden = self.model.model.embed_tokens(tokens)
        for layer, cache in zip(self.model.model.layers, self.cache, strict=True):
            normed, attention = _normed(layer.input_layernorm, hidden), layer.self_attn
            q, k, v = (
                self._heads(getattr(attention, name), normed) for name in ("q_proj", "k_proj", "v_proj")
            )
            q, k = _rotated(torch.cat((q, k), dim=1), cos, sin).split((self.heads, self.kv_heads), dim=1)
            cache[0].index_copy_(2, positions, k)
            cache[1].index_copy_(2, positions, v)
            q = q.reshape(self.batch, self.kv_heads, -1, self.width)
            mixed = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask)
            mixed = mixed.reshape(self.batch, self.heads, -1, self.width).transpose(1, 2).flatten(2)
            hidden = hidden + self.call(attention.o_proj, mixed)
            normed, mlp = _normed(layer.post_attention_layernorm, hidden), layer.mlp
            gated = F.silu(self.call(mlp.gate_proj, normed)) * self.call(mlp.up_proj, normed)
            hidden = hidden + self.call(mlp.down_proj, gated)
        last = _normed(self.model.model.norm, hidden[:, -1])
        return self.call(self.model.lm_head, last)

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Read a prompt, shape (batch, T); the next `step` continues it. Returns its last logits."""
        length = prompt.shape[1]
        logits = self.forward(prompt, self.columns[:length])
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.position.fill_(length)
        return logits

    def step(self) -> torch.Tensor:
        """Read the current token, choose the next and return the logits; every address stays the same."""
        logits = self.forward(self.tokens, self.position)
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.position.add_(1)
        return logits

    def _heads(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.call(module, x).view(self.batch, x.shape[1], -1, self.width).transpose(1, 2)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """An RMS norm as one kernel instead of the model's eight, which would hide what is compared."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotations(model: Any, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position, from the model's own frequencies."""
    positions = torch.arange(context, device=model.model.embed_tokens.weight.device)[None]
    cos, sin = model.model.rotary_emb(model.model.embed_tokens.weight[:1], positions)
    return cos[0], sin[0]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def uncompressed_bricks(weight: torch.Tensor) -> torch.Tensor:
    """Lay a BF16 matrix out as the kernels read it, without compressing it: 1-D, 4,096 weights per brick.

    The order is that of ``docs/format.md`` 2.2, with a plane of 32 lanes × 8 weights per step.
    """
    n, k = weight.shape
    rows, cols = -(-n // TILE), -(-k // TILE)
    padded = F.pad(weight, (0, cols * TILE - k, 0, rows * TILE - n))
    # row = 64r + 16w + 8h + g, column = 64c + 16j + 8i + 2t + e  ->  brick, quarter, step, lane, weight
    parts = padded.view(rows, 4, 2, 8, cols, 4, 2, 4, 2)
    return parts.permute(0, 4, 1, 5, 3, 7, 6, 2, 8).contiguous().view(-1)


class UncompressedBricks:
    """The same kernels on uncompressed bricks: a ``call`` for `Decoder` whose results must be equal.

    Raises
    ------
    LookupError
        On a call for a product that runs on the host, or has no counterpart.
    """

    def __init__(self) -> None:
        self._bricks: dict[int, torch.Tensor] = {}
        self._runs: dict[tuple[int, int], Any] = {}
        self._configs: dict[Any, Any] = {}  # by that of the packed weight

    def warm_up(self, model: torch.nn.Module, tokens: Iterable[int]) -> None:
        """Compile what products with these token counts need, in parallel."""
        modules = [each for each in model.modules() if isinstance(each, PackedLinear)]
        shapes = {(each.out_features, each.in_features): each for each in modules}
        jobs = [(module, count) for module in shapes.values() for count in tokens]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda job: self._bind(*job), jobs))

    def __call__(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(module, PackedLinear)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = flat.new_empty(flat.shape[0], module.out_features)
        key = (id(module), flat.shape[0])
        if key not in self._runs:
            self._runs[key] = self._bind(module, flat.shape[0])
        self._runs[key](flat, out, module.bias)
        return out.view(*x.shape[:-1], -1)

    def _bind(self, module: PackedLinear, tokens: int) -> Any:
        from wcodec.fused import KERNELS

        weight = module.packed_weight()
        choice = weight.plan(tokens).choice
        if choice.path == DECODE:  # there cuBLAS multiplies by the decoded weight
            plain = weight.to_bf16()
            return lambda x, out, bias: product(x, plain, out, bias)
        if choice.path not in KERNELS or choice.config is None:
            raise LookupError(f"{tokens} tokens of {weight.n} × {weight.k} run by {choice.path}")
        if id(module) not in self._bricks:
            self._bricks[id(module)] = uncompressed_bricks(weight.to_bf16())
        address = self._bricks[id(module)].data_ptr()
        stand_in: Any = SimpleNamespace(
            device=weight.device,
            n=weight.n,
            k=weight.k,
            bricks=address,
            overflow=address,
            footer=weight.footer,
            workspaces=weight.workspaces,
        )
        known = self._configs.get(choice.config)
        for config in _uncompressed(choice.config) if known is None else (known,):
            with contextlib.suppress(WCodecError):  # it spills: uncompressed weights need more registers
                run = KERNELS[choice.path].bind(stand_in, tokens, config).run
                self._configs[choice.config] = config
                return run
        raise LookupError(f"{choice.config} has no counterpart for uncompressed bricks")


def _uncompressed(config: Any) -> Iterator[Any]:
    """Configurations for uncompressed bricks that sum in the same order, the likeliest first.

    Bricks are larger: the ring may have to be shorter, or the CTA smaller, which changes no sum.
    """
    smaller = ({"min_ctas": 1}, {"min_ctas": 1, "row_warps": 1}) if isinstance(config, GemvConfig) else ()
    for stages in range(config.stages, 0, -1):
        for changes in ({}, *smaller):
            with contextlib.suppress(ValueError):
                yield replace(config, stages=stages, decoder="bf16", **changes)
