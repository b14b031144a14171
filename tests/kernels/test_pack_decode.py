"""The packer and the decoder, run on the CPU from their CUDA sources, against the host encoder."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.matrices import MATRICES, Bits, all_patterns, few_exceptions, gaussian
from tests.kernels.simt import HostKernel
from wcodec.bits import histogram
from wcodec.codec import encode
from wcodec.formats.bf16_w12 import Bf16W12, high_exponent_counts
from wcodec.kernels import decode, pack
from wcodec.packed import PackedTensor

u32, u64 = ctypes.c_uint32, ctypes.c_uint64
Build = Callable[..., HostKernel]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("simt")
    made: dict[tuple[object, ...], HostKernel] = {}

    def get(name: str, defines: dict[str, int]) -> HostKernel:
        key = (name, *defines.values())
        if key not in made:
            made[key] = HostKernel(name, defines, folder)
        return made[key]

    return get


def strided(bits: Bits, stride: int) -> Bits:
    """Copy a matrix into rows `stride` elements apart, with 0xFFFF between; the base is 16-byte aligned."""
    store = np.full(bits.shape[0] * stride + 8, 0xFFFF, dtype=np.uint16)
    start = -store.ctypes.data % 16 // 2
    view = np.lib.stride_tricks.as_strided(store[start:], bits.shape, (2 * stride, 2))
    view[...] = bits
    return view


def strides(cols: int) -> dict[int, int]:
    """Row strides to try: one for each width of load."""
    return {8: cols + -cols % 8 + 8, 1: cols + 1 if cols % 2 == 0 else cols}


def pack_on_host(build: Build, bits: Bits, vector: int) -> bytes:
    """Bricks and overflow as the two passes of the kernel write them."""
    plan = Bf16W12().plan(histogram(bits), bits.shape)
    stride = strides(bits.shape[1])[vector]
    matrix = strided(bits, stride)
    quarters = plan.brick_count * pack.QUARTERS
    grid = -(-quarters // pack.WARPS)
    size = [u64(stride), *(u32(n) for n in bits.shape), *(u32(word) for word in pack.split_table(plan.table))]
    counts = np.full(quarters, 0xFFFF, dtype=np.uint32)
    build("bf16_w12_pack", pack.pack_defines(True, vector))(
        grid, pack.THREADS, matrix, *size, counts, None, None, None
    )
    ends = np.cumsum(counts, dtype=np.uint64)
    body = np.full(plan.brick_count * 6208 + 4 * int(ends[-1]), 0xA5, dtype=np.uint8)
    bricks, overflow = body[: plan.brick_count * 6208], body[plan.brick_count * 6208 :]
    build("bf16_w12_pack", pack.pack_defines(False, vector))(
        grid, pack.THREADS, matrix, *size, None, ends, bricks, overflow
    )
    return body.tobytes()


@pytest.mark.parametrize("vector", [8, 1])
@pytest.mark.parametrize("name", MATRICES)
def test_the_packer_writes_the_host_encoders_bytes(build: Build, name: str, vector: int) -> None:
    bits = MATRICES[name]()
    body = pack_on_host(build, bits, vector)
    expected = encode(bits, format="bf16-w12").blob
    assert body == expected[: len(body)].tobytes()
    assert len(expected) - len(body) < 256 + 64 + 16


@pytest.mark.parametrize("vector", [8, 1])
@pytest.mark.parametrize("name", MATRICES)
def test_the_histogram_counts_high_exponent_bits(build: Build, name: str, vector: int) -> None:
    bits = MATRICES[name]()
    stride = strides(bits.shape[1])[vector]
    counts = np.zeros(128, dtype=np.uint64)
    build("bf16_w12_histogram", pack.histogram_defines(vector))(
        2, pack.HISTOGRAM_THREADS, strided(bits, stride), u64(stride), *(u64(n) for n in bits.shape), counts
    )
    assert (counts == high_exponent_counts(histogram(bits)).astype(np.uint64)).all()


def decode_on_host(
    build: Build,
    blob: np.ndarray,
    bits: Bits,
    rows: tuple[int, int],
    vector: int,
    quarters: int = decode.QUARTERS_PER_WARP,
) -> None:
    """Decode `rows`; compare them with `bits`, and what lies between the rows with what lay there before."""
    packed = PackedTensor.from_blob(blob)
    cols = bits.shape[1]
    stride = strides(cols)[vector]
    out = strided(np.full((rows[1] - rows[0], cols), 0x7FC1, dtype=np.uint16), stride)
    bricks, overflow = Bf16W12().parts(packed)
    build("bf16_w12_unpack", decode.unpack_defines(vector, quarters))(
        decode.unpack_grid(rows, cols, quarters),
        pack.THREADS,
        bricks,
        overflow if overflow.size else None,
        u64(packed.overflow_count),
        *(u32(word) for word in pack.split_table(bytes(packed.table))),
        u32(cols),
        *(u32(row) for row in rows),
        out,
        u64(stride),
    )
    assert (out == bits[rows[0] : rows[1]]).all()
    whole = np.lib.stride_tricks.as_strided(out, (rows[1] - rows[0] - 1, stride), (2 * stride, 2))
    assert (whole[:, cols:] == 0xFFFF).all()


@pytest.mark.parametrize("vector", [8, 1])
@pytest.mark.parametrize("name", MATRICES)
def test_the_decoder_returns_the_original_bits(build: Build, name: str, vector: int) -> None:
    bits = MATRICES[name]()
    decode_on_host(build, encode(bits, format="bf16-w12").blob, bits, (0, bits.shape[0]), vector)


@pytest.mark.parametrize("rows", [(0, 64), (64, 128), (64, 200), (17, 18), (63, 65), (100, 100 + 124)])
def test_the_decoder_writes_only_the_rows_asked_for(build: Build, rows: tuple[int, int]) -> None:
    bits = few_exceptions(224, 136)
    decode_on_host(build, encode(bits, format="bf16-w12").blob, bits, rows, 8)


def test_the_decoder_may_take_one_quarter_per_warp(build: Build) -> None:
    bits = all_patterns()
    decode_on_host(build, encode(bits, format="bf16-w12").blob, bits, (0, 256), 8, quarters=1)


def test_the_decoder_never_reads_past_the_overflow_list(build: Build) -> None:
    """A patch word that lies about its range costs wrong weights, not a stray read."""
    bits = few_exceptions(64, 64)
    blob = encode(bits, format="bf16-w12").blob.copy()
    packed = PackedTensor.from_blob(blob)
    bricks, overflow = Bf16W12().parts(packed)
    lying = bricks.copy()
    lying[0, 6144:6160] = np.frombuffer(bytes([255] * 4 + [0, 4, 0, 0] + [0] * 7 + [255]), dtype=np.uint8)
    out = np.zeros_like(bits)
    build("bf16_w12_unpack", decode.unpack_defines(8))(
        1,
        pack.THREADS,
        lying,
        overflow if overflow.size else None,
        u64(packed.overflow_count),
        *(u32(word) for word in pack.split_table(bytes(packed.table))),
        *(u32(n) for n in (64, 0, 64)),
        out,
        u64(64),
    )
    assert (out[16:] == bits[16:]).all()


def test_the_decoder_accepts_patches_in_any_order(build: Build) -> None:
    bits = gaussian(64, 64)
    bits[3, 5], bits[9, 40], bits[12, 63] = 0x7F81, 0xFFC2, 0x7003
    blob = encode(bits, format="bf16-w12").blob.copy()
    word = int.from_bytes(blob[6144:6160].tobytes(), "little")
    assert word >> 120 == 3
    first, rest = word & 0xFFFFF, word >> 20 & 0xFFFFFFFFFF
    blob[6144:6160] = np.frombuffer((rest | first << 40 | 3 << 120).to_bytes(16, "little"), dtype=np.uint8)
    decode_on_host(build, blob, bits, (0, 64), 8)


@pytest.mark.parametrize(
    ("address", "stride", "width"), [(0, 64, 8), (16, 8, 8), (8, 64, 1), (0, 12, 1), (2, 7, 1)]
)
def test_wide_accesses_need_aligned_rows(address: int, stride: int, width: int) -> None:
    assert pack.vector_width(address, stride) == width
