"""`decode(out=)`: formats take the arrays that can hold the bits, and refuse others before writing."""

from __future__ import annotations

import numpy as np
import pytest

from wcodec.codec import encode
from wcodec.formats.byte_store import ByteStore
from wcodec.formats.nvfp4_s5 import Nvfp4S5
from wcodec.formats.raw import Raw
from wcodec.packed import PackedTensor

SHAPE = (96, 128)


def packed_tensors() -> dict[str, PackedTensor]:
    rng = np.random.default_rng(11)
    bits = (rng.normal(0, 0.02, SHAPE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pair = rng.integers(100, 120, 96 * 128 * 9 // 16).astype(np.uint8)
    experts = Nvfp4S5()
    scales = np.bincount(pair[96 * 64 :], minlength=256)
    return {
        **{name: encode(bits, format=name) for name in ("bf16-w12", "bf16-store", "raw")},
        "raw F32": Raw().encode(rng.normal(size=(3, 5)).astype("<f4"), (3, 5), dtype="F32"),
        "byte-store": ByteStore().encode(pair, pair.shape),
        "nvfp4-s5": experts.encode(pair, experts.plan(scales, SHAPE)),
    }


PACKED = packed_tensors()


@pytest.fixture(params=PACKED)
def packed(request: pytest.FixtureRequest) -> PackedTensor:
    return PACKED[request.param]


def test_bits_go_where_they_are_asked_to(packed: PackedTensor) -> None:
    want = packed.decode()
    signed = np.dtype(f"i{want.itemsize}")
    odd = np.zeros(want.nbytes + 1, np.uint8)[1:].view(want.dtype).reshape(want.shape)
    for out in (np.full(want.shape, 0x5A, want.dtype), np.full(want.shape, 0x5A, signed), odd):
        assert packed.decode(out) is out
        np.testing.assert_array_equal(out.view(want.dtype), want)


def test_what_cannot_hold_them_is_refused(packed: PackedTensor) -> None:
    want = packed.decode()
    whole = np.full((*want.shape, 2), 0x5A, want.dtype)
    read_only = np.full_like(want, 0x5A)
    read_only.flags.writeable = False
    outs = [
        whole[..., 0],
        whole.reshape(-1),
        read_only,
        np.full(want.shape, 0x5A, f">u{2 * want.itemsize}"),
        np.full((want.size + 1,), 0x5A, want.dtype),
    ]
    if want.itemsize == 2:
        outs.append(np.full(want.shape, 0x5A, ">u2"))  # its elements would read as other bits
    for out in outs:
        with pytest.raises(ValueError, match="out must be"):
            packed.decode(out)
        assert (out == 0x5A).all()
