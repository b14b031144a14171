"""What other encoders may write must decode; what nobody may write must be refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats import gates, odd_blobs, reference
from wcodec.codec import encode
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.packed import MAX_NDIM, PackedTensor

LIBERTIES = [
    {},
    {"shuffle": False, "dirty_codes": False},
    {"patch_more": 0.002},
    {"patch_more": 0.3},
    {"patch_more": 1.0},
    {"patch_more": 0.01, "unused_overflow": 5},
]


def test_as_many_dims_as_a_footer_holds():
    packed = encode(np.full((1,) * (MAX_NDIM - 2) + (64, 64), 0x3C00, np.uint16), format="bf16-w12")
    assert gates.decode_on_host(packed.blob.tobytes()).shape == packed.shape
    gates.check_for_gpu(packed.blob.tobytes())


@pytest.mark.parametrize("liberties", LIBERTIES, ids=str)
@pytest.mark.parametrize(
    "table", [list(range(0x36, 0x3E)), [0, 5, 0x37, 0x3A, 0x3B, 0x3C, 0x7E, 0x7F]], ids=str
)
def test_every_decoder_reads_what_ours_never_writes(rng, table, liberties):
    bits = (rng.normal(0, 0.02, (70, 130)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[rng.random(bits.shape) < 0.003] = 0xFFC0
    raw = odd_blobs.blob(bits, table, rng, **liberties)
    np.testing.assert_array_equal(reference.decode(raw), bits)
    packed = PackedTensor.from_blob(raw)
    np.testing.assert_array_equal(packed.decode(), bits)
    assert packed.check(packed.decode())


def test_without_liberties_the_two_encoders_agree(rng):
    bits = (rng.normal(0, 0.02, (70, 130)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[rng.random(bits.shape) < 0.003] = 0x7F80
    ours = encode(bits, format="bf16-w12")
    # Overflow goes to the list in order of brick and quarter, patches ascend, codes under patches are zero.
    theirs = odd_blobs.blob(bits, ours.table.tolist(), rng, shuffle=False, dirty_codes=False)
    from_spec = PackedTensor.from_blob(theirs)
    np.testing.assert_array_equal(from_spec.decode(), ours.decode())
    assert len(theirs) == ours.nbytes


def good_blob() -> bytes:
    rng = np.random.default_rng(7)
    bits = (rng.normal(0, 0.02, (64, 65)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[:16, 32:] = rng.integers(0, 65536, (16, 33))
    return encode(bits, format="bf16-w12").blob.tobytes()


GOOD = good_blob()


@pytest.mark.parametrize(
    ("name", "bad"), list(odd_blobs.bad_blobs(GOOD)), ids=lambda v: v if isinstance(v, str) else ""
)
@pytest.mark.parametrize("read", [gates.decode_on_host, gates.check_for_gpu])
def test_bad_blobs_are_refused_in_one_line(name, bad, read):
    with pytest.raises((MalformedError, UnsupportedError)) as caught:
        read(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [gates.decode_on_host, gates.check_for_gpu])
def test_more_patches_than_weights_are_refused_where_the_list_has_them(rng, read):
    noise = rng.integers(0, 65536, (64, 64)).astype(np.uint16)
    good = encode(noise, format="bf16-w12")
    assert good.overflow_count > 1025
    raw = bytearray(good.blob.tobytes())
    raw[6144:6160] = struct.pack("<II7xB", 0, 1025, 255)
    with pytest.raises(MalformedError):
        read(bytes(raw))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_an_error_or_a_wrong_digest_or_harmless(data):
    at = data.draw(
        st.one_of(
            st.integers(0, len(GOOD) - 1), st.integers(6144, 6207), st.integers(len(GOOD) - 90, len(GOOD) - 1)
        )
    )
    raw = bytearray(GOOD)
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        packed = PackedTensor.from_blob(bytes(raw))
        bits = packed.decode()
    except (MalformedError, UnsupportedError):
        return
    original = PackedTensor.from_blob(GOOD).decode()
    assert packed.check(bits) == (bits.tobytes() == original.tobytes())
