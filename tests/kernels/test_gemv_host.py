"""The small-m product, run on the CPU from its CUDA source: exact weights, odd shapes, every ring."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.matrices import (
    CROWDS,
    Bits,
    all_patterns,
    crowded,
    few_exceptions,
    gaussian,
    half_zero,
    only_exceptions,
    plain_bricks,
)
from tests.kernels.simt import HostKernel
from wcodec.bits import bf16_from_f32
from wcodec.codec import encode
from wcodec.kernels.gemm import Bricks
from wcodec.kernels.gemv import GemvConfig

u32 = ctypes.c_uint32

# Few warps, for a CPU; otherwise the structures that ship.
CONFIGS = {
    "1 token, registers": GemvConfig(1, 3, 1, 1, 1, True, 1),
    "1 token, registers, row warps": GemvConfig(1, 2, 2, 1, 1, True, 1),
    "1 token, shared": GemvConfig(1, 2, 2, 1, 3, False, 1),
    "8 tokens, registers": GemvConfig(8, 2, 1, 2, 1, True, 1),
    "8 tokens, shared": GemvConfig(8, 3, 1, 1, 4, False, 1),
    "8 tokens, shared, eager": GemvConfig(8, 3, 1, 2, 2, False, 1, eager=True),
    "16 tokens, registers": GemvConfig(16, 2, 1, 2, 1, True, 1),
    "32 tokens, shared": GemvConfig(32, 2, 4, 1, 2, False, 1),
    "16 tokens, split in 2": GemvConfig(16, 2, 2, 1, 2, False, 1, 2),
    "32 tokens, split in 3": GemvConfig(32, 1, 2, 2, 2, False, 1, 3),
    "32 tokens, 128 rows": GemvConfig(32, 1, 4, 2, 2, False, 1),
}


class Product:
    """One instance, built for the CPU."""

    def __init__(self, config: GemvConfig, folder: Path, **extra: int) -> None:
        self.config = config
        self._kernel = HostKernel("sm80_gemv", {**config.defines(), **extra}, folder, "simt_mma.hpp")

    def launch(self, bits: Bits, x: Bits, bias: Bits | None, out: np.ndarray[Any, Any], ldo: int) -> None:
        rows, cols = bits.shape
        packed = encode(bits, format="bf16-w12")
        plain = self.config.decoder == "bf16"
        data = plain_bricks(bits) if plain else np.asarray(packed.blob)
        store = np.zeros(data.size + 16, np.uint8)  # a base on 16 bytes, as on the GPU
        start = -store.ctypes.data % 16
        store[start : start + data.size] = data
        address = store.ctypes.data + start
        bricks = Bricks(address, 0, 0, (0, 0), rows, cols) if plain else Bricks.of(packed, address)
        assert x.ctypes.data % 16 == 0 or not x.size
        self._kernel(
            self.config.grid(rows),
            self.config.threads,
            *(ctypes.c_void_p(bricks.address), ctypes.c_void_p(bricks.overflow)),
            *(u32(word) for word in bricks.table),
            *(x, u32(x.strides[0] // 2), bias, out, u32(ldo), u32(rows), u32(cols), u32(x.shape[0])),
            u32(bricks.overflow_sectors),
        )

    def __call__(self, bits: Bits, x: Bits, bias: Bits | None = None) -> Bits:
        """Return x · Wᵀ (+ bias); what surrounds the output must stay untouched."""
        m, rows = x.shape[0], bits.shape[0]
        out = np.full((m + 1, rows + 3), 0xA5A5, np.uint16)
        self.launch(bits, x, bias, out, rows + 3)
        assert (out[m] == 0xA5A5).all()
        assert (out[:, rows:] == 0xA5A5).all()
        return out[:m, :rows]


@pytest.fixture(scope="module", params=CONFIGS)
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Product:
    return Product(CONFIGS[request.param], tmp_path_factory.mktemp("gemv"))


def aligned(m: int, cols: int) -> Bits:
    """Return zeroed tokens with rows on 16 bytes."""
    stride = cols + -cols % 8
    store = np.zeros(m * stride + 8, np.uint16)
    start = -store.ctypes.data % 16 // 2
    return store[start : start + m * stride].reshape(m, stride)


def f32(bits: Bits) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    "bits",
    [few_exceptions(48, 256), half_zero(33, 160), only_exceptions(64, 128), crowded(112, 448)],
    ids=["few exceptions", "half zero", "only exceptions", "crowded"],
)
def test_one_hot_tokens_read_every_weight_back(product: Product, bits: Bits) -> None:
    m = product.config.tokens
    columns = np.random.default_rng(1).permutation(bits.shape[1])[: 2 * m]
    for first in range(0, columns.size, m):
        some = columns[first : first + m]
        x = aligned(some.size, bits.shape[1])
        x[np.arange(some.size), some] = 0x3F80
        want = bits[:, some].T.copy()
        want[want == 0x8000] = 0  # −0 + 0 is +0
        assert (product(bits, x) == want).all()


@pytest.mark.parametrize(("rows", "cols"), [(1, 15), (7, 17), (65, 130), (160, 72)])
def test_odd_shapes(product: Product, rows: int, cols: int) -> None:
    bits, random = gaussian(rows, cols, seed=rows), np.random.default_rng(cols)
    bias = bf16_from_f32(random.normal(size=rows).astype(np.float32))
    for m in sorted({1, (product.config.tokens + 1) // 2, product.config.tokens}):
        x = aligned(m, cols)
        x[:, :cols] = bf16_from_f32(random.normal(size=(m, cols)).astype(np.float32))
        a, w = f32(x[:, :cols]).astype(np.float64), f32(bits).astype(np.float64)
        want = a @ w.T + f32(bias)
        limit = 2**-8 * abs(want) + 2**-18 * (abs(a) @ abs(w).T)
        assert (abs(f32(product(bits, x, bias)) - want) <= limit).all()


def test_crowded_quarters_have_the_exceptions_they_are_made_for() -> None:
    packed = encode(crowded(112, 448), format="bf16-w12")
    words = np.asarray(packed.blob)[: 2 * 7 * 6208].reshape(2, 7, 6208)[:, :, 6144:].reshape(2, 7, 4, 16)
    tags = words[..., 15].transpose(0, 2, 1).reshape(-1)[:49]  # quarter rows, then tile columns
    counts = [CROWDS[i % len(CROWDS)] for i in range(49)]
    assert tags.tolist() == [count if count <= 6 else 255 for count in counts]
    assert packed.overflow_count == sum(count for count in counts if count > 6)


@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits_as_uncompressed_bricks(name: str, tmp_path: Path) -> None:
    config, bits = CONFIGS[name], crowded(112, 448)
    x = aligned(config.tokens, 448)
    x[:] = gaussian(config.tokens, 448, seed=9, sigma=1.0)
    ours, plain = (Product(replace(config, decoder=name), tmp_path) for name in ("bf16-w12", "bf16"))
    assert (ours(bits, x) == plain(bits, x)).all()


@pytest.mark.parametrize("bits", [all_patterns(), crowded(256, 256)], ids=["all patterns", "crowded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_registers_hold_the_original_bits(name: str, bits: Bits, tmp_path: Path) -> None:
    # All 65,536 patterns, NaN payloads and −0 included: a debug instance writes the A operand to `out`.
    out = np.zeros(bits.size, np.uint16)
    Product(CONFIGS[name], tmp_path, WC_DUMP=1).launch(bits, aligned(1, 256), None, out, 0)
    fragments = out.reshape(
        4, 4, 4, 4, 8, 4, 2, 2, 2
    )  # tile, tile column, quarter, step, g, t, +8 cols, +8 rows
    rows = fragments.transpose(
        0, 2, 7, 4, 1, 3, 6, 5, 8
    )  # tile, quarter, +8, g | tile column, step, +8, t, pair
    assert (rows.reshape(bits.shape) == bits).all()


def test_fp32_output_rounds_to_the_bf16_output(tmp_path: Path) -> None:
    config = CONFIGS["8 tokens, shared"]
    bits, x = gaussian(80, 192), aligned(5, 192)
    x[:] = gaussian(5, 192, seed=9, sigma=1.0)
    wide = np.zeros((5, 80), np.float32)
    Product(replace(config, out_f32=True), tmp_path).launch(bits, x, None, wide, 80)
    assert (bf16_from_f32(wide) == Product(config, tmp_path)(bits, x)).all()
