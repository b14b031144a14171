"""`bf16-store`: exact for every pattern and shape, decodable from its specification, safe when damaged."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from wcodec.bits import digest
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.formats import bf16_store
from wcodec.formats.bf16_store import CHUNK_WEIGHTS, Bf16Store, StreamEncoder
from wcodec.packed import Footer, PackedTensor, assemble

FORMAT = Bf16Store()


def gaussian(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def from_the_specification(blob: bytes) -> np.ndarray:
    """A decoder written from docs/container.md section 5, with nothing of wcodec."""
    ndim = blob[-64 + 13]
    shape = struct.unpack(f"<{ndim}Q", blob[len(blob) - 64 - 8 * ndim : len(blob) - 64])
    assert struct.unpack_from("<8sHH", blob, len(blob) - 64) == (b"WCTENSOR", 3, 1)
    log = blob[-64 + 16]
    left = int(np.prod(shape, dtype=object))
    chunks = -(-left // 2**log)
    lengths = struct.unpack_from(f"<{chunks}I", blob)
    at, out = 4 * chunks, []
    for length in lengths:
        n = min(left, 2**log)
        rest = np.frombuffer(blob, np.uint8, n, at).astype(np.uint16)
        exponents = zstandard.decompress(blob[at + n : at + n + length])
        out.append(
            (rest >> 7) << 15 | np.frombuffer(exponents, np.uint8).astype(np.uint16) << 7 | rest & 0x7F
        )
        at, left = at + n + length, left - n
    return np.concatenate([*out, np.empty(0, np.uint16)]).reshape(shape)


def check(bits: np.ndarray, workers: int = 1) -> PackedTensor:
    packed = FORMAT.encode(bits, bits.shape, workers=workers)
    again = PackedTensor.from_blob(packed.blob.tobytes())
    assert (again.format, again.dtype, again.shape) == ("bf16-store", "BF16", bits.shape)
    np.testing.assert_array_equal(again.decode(), bits)
    np.testing.assert_array_equal(FORMAT.decode(packed, workers=3), bits)
    np.testing.assert_array_equal(from_the_specification(packed.blob.tobytes()), bits)
    assert packed.check(bits)
    return packed


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (2, 0), (0, 3), (1, 1), (5,), (17, 33), (3, 4, 5), (1, 70_000)]
)
def test_shapes(shape: tuple[int, ...]) -> None:
    check(gaussian(shape))


def test_every_pattern_in_order_and_shuffled() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    check(patterns.reshape(256, 256))
    check(np.random.default_rng(0).permutation(patterns))
    for pattern in (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x0001):
        check(np.full((1000,), pattern, np.uint16))


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_chunk_borders(extra: int, workers: int) -> None:
    bits = gaussian((2 * CHUNK_WEIGHTS + extra,), 4)
    packed = check(bits, workers)
    np.testing.assert_array_equal(packed.blob, FORMAT.encode(bits, bits.shape).blob)


def test_the_ratio_of_trained_like_weights() -> None:
    bits = gaussian((1024, 1024))
    assert check(bits).nbytes / bits.nbytes < 0.67


def test_ranges() -> None:
    bits = gaussian((3 * CHUNK_WEIGHTS // 100, 100), 5)
    packed = FORMAT.encode(bits, bits.shape)
    raw = bits.tobytes()
    unit = FORMAT.granule(packed)
    assert unit == 2 * CHUNK_WEIGHTS
    for start, stop in [
        (0, 0),
        (0, 1),
        (5, 7),
        (unit, 2 * unit),
        (unit - 3, unit + 5),
        (len(raw) - 1, len(raw)),
    ]:
        assert FORMAT.decode_range(packed, start, stop).tobytes() == raw[start:stop]
    assert FORMAT.decode_range(packed, 0, len(raw)).tobytes() == raw


def test_pieces_make_the_same_blob() -> None:
    bits = gaussian((CHUNK_WEIGHTS * 5 // 2,), 6)
    encoder = StreamEncoder(bits.shape)
    pieces = [encoder.encode(part) for part in (bits[:CHUNK_WEIGHTS], bits[CHUNK_WEIGHTS:])]
    with pytest.raises(ValueError, match="0 of 3 chunks"):
        encoder.head()
    for _, lengths in pieces:
        encoder.append(lengths)
    blob = encoder.head() + b"".join(body.tobytes() for body, _ in pieces) + encoder.finish(digest(bits))
    assert blob == FORMAT.encode(bits, bits.shape).blob.tobytes()


@pytest.mark.parametrize("log", [10, 13, 24])
def test_blobs_that_our_encoder_does_not_write(log: int) -> None:
    """Other chunk sizes and other zstandard settings."""
    bits = gaussian((3000,), 7)
    words = bits.astype(np.uint32)
    lengths, parts = [], []
    for start in range(0, bits.size, 1 << log):
        chunk = words[start : start + (1 << log)]
        frame = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(
            (chunk >> 7 & 0xFF).astype(np.uint8).tobytes()
        )
        parts += [(chunk >> 8 & 0x80 | chunk & 0x7F).astype(np.uint8).tobytes(), frame]
        lengths.append(len(frame))
    footer = Footer(3, 1, "BF16", bits.shape, 0, bytes([log, *bytes(7)]), 0, digest(bits))
    packed = PackedTensor.from_blob(assemble([np.array(lengths, "<u4").tobytes(), *parts], footer))
    np.testing.assert_array_equal(packed.decode(), bits)
    np.testing.assert_array_equal(from_the_specification(packed.blob.tobytes()), bits)


#: A frame that claims a terabyte: magic, one segment with eight bytes of content size, an empty last block.
BOMB = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"


def reassembled(packed: PackedTensor, body: bytes, **changes: object) -> bytes:
    import dataclasses

    return assemble([body], dataclasses.replace(packed.footer, **changes)).tobytes()  # type: ignore[arg-type]


def test_malformed_blobs() -> None:
    bits = gaussian((2000,), 8)
    packed = FORMAT.encode(bits, bits.shape)
    length = int(bf16_store.chunk_lengths(packed)[0])
    body = packed.blob[: 4 + 2000 + length].tobytes()
    frame = body[2004:]
    assert reassembled(packed, body) == packed.blob.tobytes()
    other = zstandard.compress(bytes(1999))
    bad = {
        "a longer frame": reassembled(packed, struct.pack("<I", length + 300) + body[4:]),
        "a shorter frame": reassembled(packed, struct.pack("<I", 5) + body[4:]),
        "chunks of 512": reassembled(packed, body, table=bytes([9, *bytes(7)])),
        "chunks of 2^25": reassembled(packed, body, table=bytes([25, *bytes(7)])),
        "a second table byte": reassembled(packed, body, table=bytes([18, 1, *bytes(6)])),
        "overflow": reassembled(packed, body, overflow_count=1),
        "another dtype": reassembled(packed, body, dtype="F16"),
        "many more weights": reassembled(packed, body, shape=(1 << 40,)),
        "another version": reassembled(packed, body, version=2),
        "too few exponents": reassembled(packed, struct.pack("<I", len(other)) + body[4:2004] + other),
        "no frame": reassembled(packed, struct.pack("<I", length) + body[4:2004] + bytes(length)),
        "two frames": reassembled(packed, struct.pack("<I", 2 * length) + body[4:2004] + 2 * frame),
        "a bomb": reassembled(packed, struct.pack("<I", len(BOMB)) + body[4:2004] + BOMB),
        "no content size": reassembled(
            packed,
            (lambda f: struct.pack("<I", len(f)) + body[4:2004] + f)(
                zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2000))
            ),
        ),
    }
    for name, blob in bad.items():
        with pytest.raises((MalformedError, UnsupportedError)):
            PackedTensor.from_blob(blob).decode()
        assert name


def test_decode_into_the_wrong_array() -> None:
    packed = FORMAT.encode(gaussian((8, 8)), (8, 8))
    for out in (
        np.empty((8, 9), np.uint16),
        np.empty((8, 8), np.uint32),
        np.empty((8, 16), np.uint16)[:, ::2],
    ):
        with pytest.raises(ValueError, match="out must be"):
            packed.decode(out)


@settings(max_examples=200, deadline=None)
@given(flip=st.integers(0, 1 << 30), cut=st.none() | st.integers(0, 1 << 30))
def test_damage_never_crashes(flip: int, cut: int | None) -> None:
    bits = gaussian((40, 50), 9)
    good = FORMAT.encode(bits, bits.shape).blob
    blob = bytearray(good.tobytes() if cut is None else good.tobytes()[: cut % good.size])
    if blob:
        blob[flip // 8 % len(blob)] ^= 1 << flip % 8
    try:
        packed = PackedTensor.from_blob(bytes(blob))
        found = packed.decode()
    except WCodecError:
        return
    assert not packed.check(found) or (found == bits).all()
