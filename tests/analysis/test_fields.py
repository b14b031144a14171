"""Counts and entropies on data whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wcodec.analysis.fields import (
    LAYOUTS,
    FieldCounts,
    count_fields,
    entropy,
    nibble_histogram,
)
from wcodec.bits import byte_histogram


def u8(values: object, dtype: str) -> np.ndarray:
    return np.asarray(values, dtype=dtype).reshape(-1).view(np.uint8)


def same(a: FieldCounts, b: FieldCounts) -> bool:
    pairs = zip((a.sign, a.exponent, *a.mantissa), (b.sign, b.exponent, *b.mantissa), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def naive_entropy(symbols: np.ndarray) -> float:
    counts = np.unique(symbols, return_counts=True)[1]
    return float(sum(-c / symbols.size * math.log2(c / symbols.size) for c in counts))


@pytest.mark.parametrize(
    ("counts", "bits"),
    [
        ([7], 0.0),
        ([1, 1], 1.0),
        ([5, 5, 5, 5], 2.0),
        ([3, 1], 0.811278),
        ([0, 9], 0.0),
        ([1] * 256, 8.0),
    ],
)
def test_entropy_of_known_distributions(counts: list[int], bits: float) -> None:
    assert entropy(np.array(counts)) == pytest.approx(bits, abs=1e-6)


def test_entropy_of_nothing_is_nan() -> None:
    assert math.isnan(entropy(np.zeros(4, np.int64)))


def test_every_bf16_pattern_once_is_sixteen_bits() -> None:
    found = count_fields([u8(np.arange(65536), "<u2")], LAYOUTS["BF16"]).entropy()
    assert (found.sign, found.exponent, found.mantissa, found.total) == (1.0, 8.0, 7.0, 16.0)


@pytest.mark.parametrize("size", [1, 100, 16383, 16384, 40000])
def test_one_value_holds_no_information(size: int) -> None:
    assert count_fields([u8(np.full(size, 0xBF83), "<u2")], LAYOUTS["BF16"]).entropy().total == 0.0


def test_signs_alone_are_one_bit() -> None:
    found = count_fields([u8([0x3F80, 0xBF80] * 9, "<u2")], LAYOUTS["BF16"]).entropy()
    assert (found.sign, found.exponent, found.mantissa) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F16"])
def test_every_pattern_of_narrow_floats(dtype: str) -> None:
    layout = LAYOUTS[dtype]
    if layout.bits == 16:
        data = u8(np.arange(65536), "<u2")
    elif layout.bits == 8:
        data = u8(np.arange(256), "u1")
    else:
        data = u8([lo | hi << 4 for lo in range(16) for hi in range(16)], "u1")
    found = count_fields([data], layout).entropy()
    assert (found.sign, found.exponent, found.mantissa) == (layout.sign, layout.exponent, layout.mantissa)


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_wide_floats_field_by_field(dtype: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal(5000).astype("<f4" if dtype == "F32" else "<f8")
    bits = values.view("<u4" if dtype == "F32" else "<u8").astype(np.uint64)
    layout = LAYOUTS[dtype]
    found = count_fields([values.view(np.uint8)], layout)
    top = layout.bits - 16
    mantissa = [(bits >> np.uint64(top)) & np.uint64((1 << (layout.mantissa - top)) - 1)]
    mantissa += [(bits >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in range(top - 16, -1, -16)]
    assert found.total == 5000
    assert found.entropy().sign == pytest.approx(naive_entropy(bits >> np.uint64(layout.bits - 1)))
    exponent = (bits >> np.uint64(layout.mantissa)) & np.uint64((1 << layout.exponent) - 1)
    assert found.entropy().exponent == pytest.approx(naive_entropy(exponent))
    assert found.entropy().mantissa == pytest.approx(sum(map(naive_entropy, mantissa)))


@settings(deadline=None)  # the first call may compile
@given(st.lists(st.integers(0, 65535), max_size=300), st.integers(1, 50))
def test_chunks_add_up_exactly(values: list[int], step: int) -> None:
    data = u8(values, "<u2")
    chunks = [data[i : i + 2 * step] for i in range(0, data.size, 2 * step)]
    whole = count_fields([data], LAYOUTS["BF16"])
    assert same(count_fields(chunks, LAYOUTS["BF16"]), whole)
    assert whole.total == len(values)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_few_and_many_are_counted_alike(dtype: str) -> None:
    data = u8(np.random.default_rng(2).integers(0, 65536, 60000), "<u2")
    pieces = [data[i : i + 2000] for i in range(0, data.size, 2000)]  # each below the limit
    assert same(count_fields(pieces, LAYOUTS[dtype]), count_fields([data], LAYOUTS[dtype]))


@settings(deadline=None)  # the first call may compile
@given(st.binary(max_size=200))
def test_bytes_and_nibbles(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    assert np.array_equal(byte_histogram(array), np.bincount(array, minlength=256))
    nibbles = np.concatenate([array & 15, array >> 4])
    assert np.array_equal(nibble_histogram(array), np.bincount(nibbles, minlength=16))
