"""The one cast: FP32 to BF16, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from wcodec.bits import bf16_from_f32


def f32(bits: np.ndarray | list[int]) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def test_ties_go_to_even_and_others_to_the_nearest() -> None:
    kept, dropped = np.meshgrid(
        np.array([0, 1, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x8001, 0xBF81], np.uint32),
        np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32),
    )
    for high, low, got in zip(
        kept.flat, dropped.flat, bf16_from_f32(f32(kept << 16 | dropped)).flat, strict=True
    ):
        up = Fraction(int(low), 1 << 16) + (0 if high % 2 == 0 else Fraction(1, 1 << 20)) > Fraction(1, 2)
        assert got == high + up, (hex(high), hex(low))


def test_nan_stays_nan_and_infinity_infinity() -> None:
    signs = np.array([0, 0x80000000], np.uint32)
    payloads = np.array([1, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7FFFFF], np.uint32)
    nans = (signs[:, None] | 0x7F800000 | payloads).reshape(-1)
    got = bf16_from_f32(f32(nans))
    assert ((got & 0x7FFF) > 0x7F80).all()
    np.testing.assert_array_equal(got >> 15, nans >> 31)
    np.testing.assert_array_equal(bf16_from_f32(f32(signs | 0x7F800000)), [0x7F80, 0xFF80])


def test_shape_and_out() -> None:
    values = f32([[0x3F800000, 0xC0490FDB]])
    out = np.full((1, 2), 0xDEAD, np.uint16)
    assert bf16_from_f32(values, out) is out
    np.testing.assert_array_equal(out, [[0x3F80, 0xC049]])
    assert bf16_from_f32(values[0, 0]).shape == ()
