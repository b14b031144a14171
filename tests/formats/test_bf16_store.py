"""`bf16-store`: exact for every pattern and shape, decodable from its specification, safe when damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.golden
from wcodec.bits import digest
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.formats import bf16_store
from wcodec.formats.bf16_store import CHUNK_WEIGHTS, Bf16Store, StreamEncoder
from wcodec.packed import Footer, PackedTensor, assemble

FORMAT = Bf16Store()


def gaussian(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def exponents_of(coded: bytes, n: int, version: int) -> np.ndarray:
    """The exponents of a chunk of n weights, as docs/container.md section 5 says."""
    kind = coded[0] if version > 1 else 0
    if kind == 0:
        return np.frombuffer(zstandard.decompress(coded[version > 1 :]), np.uint8)
    assert kind == 1
    (count,) = struct.unpack_from("<I", coded, 16)
    pairs = np.frombuffer(zstandard.decompress(coded[20 + count :]), np.uint8)
    symbols = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
    assert symbols.size == n + n % 2
    assert not symbols[n:].any()
    symbols = symbols[:n]
    exponents = np.frombuffer(coded[1:16] + b"?", np.uint8)[symbols]
    exponents[symbols == 15] = np.frombuffer(coded, np.uint8, count, 20)
    return exponents


def from_the_specification(blob: bytes) -> np.ndarray:
    """A decoder written from docs/container.md section 5, with nothing of wcodec."""
    ndim = blob[-64 + 13]
    shape = struct.unpack(f"<{ndim}Q", blob[len(blob) - 64 - 8 * ndim : len(blob) - 64])
    magic, code, version = struct.unpack_from("<8sHH", blob, len(blob) - 64)
    assert (magic, code) == (b"WCTENSOR", 3)
    log = blob[-64 + 16]
    left = int(np.prod(shape, dtype=object))
    chunks = -(-left // 2**log)
    lengths = struct.unpack_from(f"<{chunks}I", blob)
    at, out = 4 * chunks, []
    for length in lengths:
        n = min(left, 2**log)
        rest = np.frombuffer(blob, np.uint8, n, at).astype(np.uint16)
        exponents = exponents_of(blob[at + n : at + n + length], n, version).astype(np.uint16)
        out.append((rest >> 7) << 15 | exponents << 7 | rest & 0x7F)
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


def kinds(packed: PackedTensor) -> list[int]:
    """How each chunk's exponents are coded."""
    found, at, left = [], 4 * bf16_store.chunk_lengths(packed).size, packed.numel
    for length in bf16_store.chunk_lengths(packed):
        n = min(left, CHUNK_WEIGHTS)
        found.append(int(packed.blob[at + n]))
        at, left = at + n + int(length), left - n
    return found


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


@pytest.mark.parametrize("size", [1023, 1024, 1025, 1151, 1152, 1153, 4095, 300_001])
def test_few_and_many_escapes(size: int) -> None:
    """Exponents beyond the fifteen common ones, up to the share from which pairs do not pay."""
    rng = np.random.default_rng(size)
    bits = (rng.integers(0, 15, size) + 100).astype(np.uint16) << 7 | rng.integers(0, 128, size).astype(
        np.uint16
    )
    limit = min(size, CHUNK_WEIGHTS) >> 6
    at = np.sort(rng.choice(np.arange(1, min(size, CHUNK_WEIGHTS)), limit + 1, replace=False))
    odd = rng.integers(200, 256, limit + 1).astype(np.uint16) << 7 | 0x8000 | 3
    bits[at[:limit]] = odd[:limit]
    assert kinds(check(bits))[0] == (size >= 1024)
    bits[at] = odd
    assert kinds(check(bits))[0] == 0


def test_a_symbol_behind_the_last_weight() -> None:
    bits = gaussian((5001,), 3)
    packed = FORMAT.encode(bits, bits.shape)
    coded = packed.blob[4 + 5001 : 4 + 5001 + int(bf16_store.chunk_lengths(packed)[0])].tobytes()
    start = 20 + coded[16]
    pairs = bytearray(zstandard.decompress(coded[start:]))
    assert pairs[-1] < 16
    pairs[-1] |= 16
    blob = with_coded(packed, coded[:start] + zstandard.compress(bytes(pairs)))
    with pytest.raises(MalformedError, match="contradicts"):
        PackedTensor.from_blob(blob).decode()


def test_escapes_at_every_place_of_a_group() -> None:
    for place in range(257):
        bits = np.full(1300, 0x3F80, np.uint16)
        bits[300:] += np.arange(1000, dtype=np.uint16) % 15 << 7
        bits[place + 1] = 0xFFFF
        assert kinds(check(bits)) == [1]


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


def coded_by_another(exponents: np.ndarray, version: int, rng: np.random.Generator) -> bytes:
    """Exponents coded in ways that our encoder does not choose."""
    compressor = zstandard.ZstdCompressor(level=19, write_checksum=True)
    if version == 1:
        return compressor.compress(exponents.tobytes())
    if rng.random() < 0.3:
        return b"\0" + compressor.compress(exponents.tobytes())
    table = rng.permutation(np.unique(exponents))[:3].repeat(5)  # symbols with equal exponents
    symbols = np.array([rng.choice([*np.flatnonzero(table == e), 15]) for e in exponents], np.uint8)
    escapes = exponents[symbols == 15]
    high = np.append(symbols[1::2], np.zeros(symbols.size % 2, np.uint8))
    frame = compressor.compress((symbols[::2] | high << 4).astype(np.uint8).tobytes())
    return b"\1" + table.tobytes() + struct.pack("<I", escapes.size) + escapes.tobytes() + frame


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("log", [10, 13, 24])
def test_blobs_that_our_encoder_does_not_write(log: int, version: int) -> None:
    """Other chunk sizes, other zstandard settings, other tables; and those of version 1."""
    bits = gaussian((3001,), 7)
    rng = np.random.default_rng(log)
    words = bits.astype(np.uint32)
    lengths, parts = [], []
    for start in range(0, bits.size, 1 << log):
        chunk = words[start : start + (1 << log)]
        coded = coded_by_another((chunk >> 7 & 0xFF).astype(np.uint8), version, rng)
        parts += [(chunk >> 8 & 0x80 | chunk & 0x7F).astype(np.uint8).tobytes(), coded]
        lengths.append(len(coded))
    footer = Footer(3, version, "BF16", bits.shape, 0, bytes([log, *bytes(7)]), 0, digest(bits))
    packed = PackedTensor.from_blob(assemble([np.array(lengths, "<u4").tobytes(), *parts], footer))
    np.testing.assert_array_equal(packed.decode(), bits)
    np.testing.assert_array_equal(from_the_specification(packed.blob.tobytes()), bits)


#: A frame that claims a terabyte: magic, one segment with eight bytes of content size, an empty last block.
BOMB = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"


def reassembled(packed: PackedTensor, body: bytes, **changes: object) -> bytes:
    import dataclasses

    return assemble([body], dataclasses.replace(packed.footer, **changes)).tobytes()  # type: ignore[arg-type]


def with_coded(packed: PackedTensor, coded: bytes) -> bytes:
    """The blob of one chunk with other coded exponents."""
    n = packed.numel
    rest = packed.blob[4 : 4 + n].tobytes()
    return reassembled(packed, struct.pack("<I", len(coded)) + rest + coded)


def test_malformed_blobs() -> None:
    bits = gaussian((2000,), 8)
    packed = FORMAT.encode(bits, bits.shape)
    length = int(bf16_store.chunk_lengths(packed)[0])
    body = packed.blob[: 4 + 2000 + length].tobytes()
    coded = body[2004:]
    count = coded[16]
    assert coded[0] == 1
    assert coded[17:20] == bytes(3)
    head, escapes, frame = coded[:16], coded[20 : 20 + count], coded[20 + count :]
    assert with_coded(packed, coded) == packed.blob.tobytes()

    def pairs(content: bytes, **settings: bool) -> bytes:
        return coded[: 20 + count] + zstandard.ZstdCompressor(**settings).compress(content)

    bad = {
        "a longer chunk": reassembled(packed, struct.pack("<I", length + 300) + body[4:]),
        "a shorter chunk": reassembled(packed, struct.pack("<I", 5) + body[4:]),
        "chunks of 512": reassembled(packed, body, table=bytes([9, *bytes(7)])),
        "chunks of 2^25": reassembled(packed, body, table=bytes([25, *bytes(7)])),
        "a second table byte": reassembled(packed, body, table=bytes([18, 1, *bytes(6)])),
        "overflow": reassembled(packed, body, overflow_count=1),
        "another dtype": reassembled(packed, body, dtype="F16"),
        "many more weights": reassembled(packed, body, shape=(1 << 40,)),
        "another version": reassembled(packed, body, version=3),
        "version 0": reassembled(packed, body, version=0),
        "the older version": reassembled(packed, body, version=1),
        "nothing": with_coded(packed, b""),
        "another kind": with_coded(packed, b"\2" + coded[1:]),
        "plain, but pairs": with_coded(packed, b"\0" + frame),
        "half a head": with_coded(packed, coded[:19]),
        "escapes beyond the chunk": with_coded(packed, head + struct.pack("<I", 1 << 31) + coded[20:]),
        "an escape too many": with_coded(
            packed, head + struct.pack("<I", count + 1) + b"\0" + escapes + frame
        ),
        "escapes that are missing": with_coded(packed, head + bytes(4) + zstandard.compress(b"\xff" * 1000)),
        "too few pairs": with_coded(packed, pairs(bytes(999))),
        "too many pairs": with_coded(packed, pairs(bytes(1001))),
        "no frame": with_coded(packed, coded[: 20 + count] + bytes(len(frame))),
        "two frames": with_coded(packed, coded + frame),
        "bytes behind the frame": with_coded(packed, coded + b"?"),
        "a bomb": with_coded(packed, coded[: 20 + count] + BOMB),
        "a plain bomb": with_coded(packed, b"\0" + BOMB),
        "no content size": with_coded(packed, pairs(bytes(1000), write_content_size=False)),
    }
    for name, blob in bad.items():
        with pytest.raises((MalformedError, UnsupportedError)):
            print(name, PackedTensor.from_blob(blob).decode())


GOLDEN = sorted(Path(tests.golden.__file__).parent.glob("bf16-store-v*/*.blob"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_golden_files(path: Path) -> None:
    want = np.frombuffer(path.with_suffix(".bits").read_bytes(), dtype="<u2")
    packed = PackedTensor.from_blob(path.read_bytes())
    assert path.parent.name == f"bf16-store-v{packed.version}"
    np.testing.assert_array_equal(packed.decode().reshape(-1), want)
    np.testing.assert_array_equal(from_the_specification(path.read_bytes()).reshape(-1), want)


def test_golden_files_are_there() -> None:
    assert {path.parent.name for path in GOLDEN} == {"bf16-store-v1", "bf16-store-v2"}


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
