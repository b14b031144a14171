"""`bf16-w12` on the host: every bit pattern, every odd shape, every number of exceptions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats import reference
from wcodec.bits import digest, histogram
from wcodec.codec import encode
from wcodec.errors import MalformedError
from wcodec.formats._bf16_w12_jit import decode_rows
from wcodec.formats.bf16_w12 import (
    BRICK_BYTES,
    TILE,
    Bf16W12,
    StreamEncoder,
    choose_table,
    count_high_exponents,
    high_exponent_counts,
)
from wcodec.packed import PackedTensor

W12 = Bf16W12()


def round_trip(bits: np.ndarray, *, by_reference: bool = True) -> PackedTensor:
    """Force the format, and require the same bits from both decoders and from a re-read blob."""
    packed = encode(bits, format="bf16-w12")
    assert packed.format == "bf16-w12"
    assert packed.shape == bits.shape
    poisoned = np.full(bits.shape, 0xDEAD, dtype=np.uint16)
    np.testing.assert_array_equal(packed.decode(poisoned), bits)
    again = PackedTensor.from_blob(packed.blob.tobytes())
    np.testing.assert_array_equal(again.decode(), bits)
    assert again.check(again.decode())
    if by_reference:
        np.testing.assert_array_equal(reference.decode(packed.blob.tobytes()), bits)
    return packed


def gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


ALL_PATTERNS = np.arange(65536, dtype=np.uint16)


def test_all_patterns_in_one_tensor(rng):
    packed = round_trip(ALL_PATTERNS.reshape(256, 256))
    assert packed.overflow_count == 65536 * 120 // 128
    round_trip(rng.permutation(ALL_PATTERNS).reshape(256, 256))


def test_each_pattern_alone_in_a_normal_tensor(rng):
    # One pattern per quarter at a random place, 65,536 quarters, the rest Gaussian.
    bits = np.tile(gaussian(rng, (16, 64 * 128)), (512, 1))
    rows = np.arange(512)[:, None] * 16 + rng.integers(0, 16, (512, 128))
    cols = np.arange(128)[None, :] * 64 + rng.integers(0, 64, (512, 128))
    bits[rows, cols] = ALL_PATTERNS.reshape(512, 128)
    assert round_trip(bits, by_reference=False).overflow_count == 0


@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 160, 232])
@pytest.mark.parametrize("k", [1, 15, 17, 64, 65, 232])
def test_odd_shapes(rng, n, k):
    bits = gaussian(rng, (n, k))
    bits[rng.random((n, k)) < 0.01] = 0x7FC1
    packed = round_trip(bits)
    bricks = -(-n // TILE) * -(-k // TILE)
    assert packed.nbytes == W12.blob_bytes(W12.plan(histogram(bits), bits.shape), packed.overflow_count)
    assert packed.nbytes >= bricks * BRICK_BYTES


@pytest.mark.parametrize("fraction", [0, 0.0005, 0.004, 0.01, 0.1, 0.5, 1.0])
def test_any_fraction_of_exceptions(rng, fraction):
    bits = gaussian(rng, (128, 192))
    outside = rng.random(bits.shape) < fraction
    bits[outside] = rng.integers(0x5000, 0x7FFF, outside.sum()).astype(np.uint16) | 0x8000
    round_trip(bits)


@pytest.mark.parametrize("in_quarter", [5, 6, 7, 8, 1023, 1024])
def test_the_edge_between_inline_and_overflow(rng, in_quarter):
    # Eight frequent values, so that 0x7F stays outside even when a whole quarter holds it.
    bits = (np.arange(0x30, 0x38).repeat(2048) << 8).astype(np.uint16).reshape(64, 256)
    place = rng.permutation(1024)[:in_quarter]
    bits[16 + place // 64, place % 64] = 0xFF80
    packed = round_trip(bits)
    assert packed.table.tolist() == list(range(0x30, 0x38))
    assert packed.overflow_count == (in_quarter if in_quarter > 6 else 0)


@pytest.mark.parametrize(
    "bits",
    [
        np.zeros((64, 64), np.uint16),
        np.full((64, 64), 0x8000, np.uint16),
        np.full((130, 70), 0x7F80, np.uint16),
        np.full((64, 64), 0xFFFF, np.uint16),
        np.zeros((0,), np.uint16),
        np.zeros((2, 0), np.uint16),
        np.zeros((0, 5), np.uint16),
        np.array(0x7F81, np.uint16),
        np.array([0x8001], np.uint16),
    ],
    ids=["zeros", "minus-zeros", "inf", "nan", "empty", "no-columns", "no-rows", "scalar", "one"],
)
def test_constant_and_empty(bits):
    round_trip(bits)


def test_pruned_tensor_puts_zero_in_the_table(rng):
    bits = gaussian(rng, (192, 192))
    bits[rng.random(bits.shape) < 0.5] = 0
    packed = round_trip(bits)
    assert packed.table[0] == 0
    assert packed.overflow_count == 0


def test_padding_decodes_to_the_smallest_value(rng):
    packed = encode(gaussian(rng, (1, 1)), format="bf16-w12")
    brick = np.empty((64, 64), dtype=np.uint16)
    bricks, overflow = W12.parts(packed)
    assert decode_rows(bricks, packed.table, overflow, brick) == -1
    assert set(brick.reshape(-1)[1:].tolist()) == {int(packed.table[0]) << 8}


def test_stacked_experts_keep_their_last_axis_and_convolutions_fold():
    stacked = encode(np.full((3, 64, 128), 0x3C00, np.uint16))
    assert stacked.matrix == (192, 128)
    convolution = encode(np.full((128, 64, 3, 3), 0x3C00, np.uint16))
    assert convolution.matrix == (128, 576)


def test_what_does_not_shrink_stays_raw(rng):
    for shape in ((384,), (3, 64), (1, 1), (0,), ()):
        packed = encode(gaussian(rng, shape))
        assert packed.format == "raw"
        again = PackedTensor.from_blob(packed.blob.tobytes())
        np.testing.assert_array_equal(again.decode(), packed.decode())
    noise = rng.integers(0, 65536, (256, 256)).astype(np.uint16)
    assert encode(noise).format == "raw"


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_same_bytes_however_many_threads_and_pieces(rng, workers):
    bits = gaussian(rng, (64 * 7 + 5, 200))
    outside = (
        rng.random(bits.shape) < 0.02
    )  # of many values, so that no table holds them: every quarter overflows
    bits[outside] = rng.integers(0x4000, 0x7FFF, outside.sum())
    bits[64:128] = rng.integers(0, 65536, (64, 200))
    whole = encode(bits, format="bf16-w12")
    np.testing.assert_array_equal(encode(bits, format="bf16-w12", workers=workers).blob, whole.blob)
    np.testing.assert_array_equal(W12.decode(whole, workers=workers), bits)

    encoder = StreamEncoder(W12.plan(histogram(bits), bits.shape), workers=workers)
    pieces, overflow = [], [0]
    for i in range(0, len(bits), 128):
        pieces.append(encoder.feed(bits[i : i + 128]).tobytes())
        overflow.append(encoder.overflow_count)
    assert (
        np.diff(overflow) > 100
    ).all()  # so that the starts of every later piece count from the first's end
    assert b"".join([*pieces, encoder.finish(digest(bits))]) == whole.blob.tobytes()


def test_count_overflow_is_what_encode_writes(rng):
    bits = gaussian(rng, (200, 333))
    outside = rng.random(bits.shape) < 0.006
    bits[outside] = rng.integers(0x4000, 0x7FFF, outside.sum())
    plan = W12.plan(histogram(bits), bits.shape)
    packed = encode(bits, format="bf16-w12")
    assert packed.overflow_count > 0
    assert W12.count_overflow(bits, plan) == packed.overflow_count
    assert W12.blob_bytes(plan, packed.overflow_count) == packed.nbytes


def test_more_exceptions_than_were_counted_are_refused(rng):
    plan = W12.plan(histogram(gaussian(rng, (128, 256))), (128, 256))
    with pytest.raises(MalformedError, match=f"exceptions where {plan.exceptions} were counted"):
        W12.encode(rng.integers(0, 65536, (128, 256), dtype=np.uint16), plan)


def test_table_choice_is_canonical():
    counts = np.zeros(128, dtype=np.int64)
    assert choose_table(counts) == tuple(range(8))
    counts[[10, 17]] = 5
    assert choose_table(counts) == tuple(range(10, 18))
    counts[[10, 18]] = 5
    counts[17] = 0
    assert choose_table(counts) == (0, 1, 2, 3, 4, 5, 10, 18)
    counts[:] = 1
    assert choose_table(counts) == tuple(range(8))


def test_high_exponent_counts_ignore_sign_and_low_byte():
    bits = np.array([0x3C01, 0xBCFF, 0x0000, 0x8000], dtype=np.uint16)
    counts = high_exponent_counts(histogram(bits))
    assert counts[0x3C] == 2
    assert counts[0] == 2
    assert counts.sum() == 4


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 150),
    k=st.integers(0, 150),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0, 1, 6, 9, 40, 127]),
    outliers=st.sampled_from([0, 0.001, 0.02, 0.7]),
)
def test_round_trip_of_anything(n, k, seed, spread, outliers):
    rng = np.random.default_rng(seed)
    high = rng.integers(0, spread + 1, (n, k)) + rng.integers(0, 128 - spread)
    bits = (high << 8 | rng.integers(0, 256, (n, k)) | rng.integers(0, 2, (n, k)) << 15).astype(np.uint16)
    loud = rng.random((n, k)) < outliers
    bits[loud] = rng.integers(0, 65536, int(loud.sum()))
    round_trip(bits, by_reference=n * k < 4096)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shape", [(0,), (1,), (9,), (63, 65), (300, 77)])
def test_counting_high_exponents_agrees_with_the_histogram(rng, shape, workers):
    bits = rng.integers(0, 65536, shape).astype(np.uint16)
    np.testing.assert_array_equal(
        count_high_exponents(bits, workers=workers), high_exponent_counts(histogram(bits))
    )
