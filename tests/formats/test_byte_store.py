"""`byte-store`: round trips, ranges, size, and blobs that contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from wcodec.errors import MalformedError, UnsupportedError
from wcodec.formats._frames import CHUNK
from wcodec.formats.byte_store import ByteStore, StreamEncoder
from wcodec.packed import Footer, PackedTensor, assemble

FORMAT = ByteStore()
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def scales(shape: tuple[int, ...], seed: int = 0) -> Bytes:
    found = np.rint(np.random.default_rng(seed).normal(100, 3, shape))
    return np.clip(found, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 5), (CHUNK,), (3, CHUNK - 1), (2, 2, CHUNK)])
@pytest.mark.parametrize("dtype", ["U8", "F8_E4M3", "F8_E8M0"])
def test_round_trip(shape: tuple[int, ...], dtype: str) -> None:
    data = scales(shape)
    packed = PackedTensor.from_blob(FORMAT.encode(data, shape, dtype=dtype).blob)
    assert (packed.format, packed.dtype, packed.shape) == ("byte-store", dtype, shape)
    assert packed.decode().tobytes() == data.tobytes()
    assert packed.check(packed.decode())


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=3000))
def test_any_bytes(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    assert PackedTensor.from_blob(FORMAT.encode(array, array.shape).blob).decode().tobytes() == data


def test_it_comes_close_to_the_entropy() -> None:
    data = scales((4, CHUNK))
    p = np.bincount(data.ravel()) / data.size
    entropy = -(p[p > 0] * np.log2(p[p > 0])).sum()
    assert FORMAT.encode(data, data.shape).bits_per_weight < entropy + 0.06
    noise = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    assert FORMAT.encode(noise, noise.shape).nbytes < noise.size + 1024


def test_any_range_and_pieces() -> None:
    data = scales((2 * CHUNK + 1000,))
    packed = FORMAT.encode(data, data.shape)
    assert FORMAT.granule(packed) == CHUNK
    for start, stop in ((0, 0), (5, 9), (CHUNK - 1, CHUNK + 1), (CHUNK, 2 * CHUNK), (100, data.size)):
        assert np.array_equal(FORMAT.decode_range(packed, start, stop), data[start:stop])
    encoder = StreamEncoder(data.shape, "U8")
    one, two = encoder.encode(data[:CHUNK]), encoder.encode(data[CHUNK:])
    encoder.append(one[1])
    with pytest.raises(ValueError, match="1 of 3 chunks"):
        encoder.head()
    encoder.append(two[1])
    whole = encoder.head() + one[0].tobytes() + two[0].tobytes() + encoder.finish(packed.digest)
    assert whole == packed.blob.tobytes()


def blob(*frames: bytes, lengths: list[int] | None = None, **changes: Any) -> bytes:
    """A blob of 1,500 bytes in chunks of 1,024, put together from the specification."""
    footer = Footer(4, 1, "U8", (1500,), 0, bytes([10, *bytes(7)]), 0, bytes(16))
    sizes = [len(frame) for frame in frames] if lengths is None else lengths
    return assemble([np.array(sizes, "<u4").tobytes(), *frames], replace(footer, **changes)).tobytes()


def frame(n: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(n))


GOOD = blob(frame(1024), frame(476))
BAD = {
    "a chunk too long": blob(frame(1025), frame(476)),
    "a chunk too short": blob(frame(1024), frame(475)),
    "two frames": blob(frame(1024) + frame(1), frame(476)),
    "no frame": blob(frame(1024), b"nonsense"),
    "a frame without its size": blob(
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024)), frame(476)
    ),
    "lengths past the end": blob(frame(1024), frame(476), lengths=[1 << 31, 1 << 31]),
    "one length": blob(frame(1024), lengths=[len(frame(1024))]),
    "chunks too small": blob(frame(1024), frame(476), table=bytes([9, *bytes(7)])),
    "chunks too large": blob(frame(1024), frame(476), table=bytes([25, *bytes(7)])),
    "another table": blob(frame(1024), frame(476), table=bytes([10, 1, *bytes(6)])),
    "overflow": blob(frame(1024), frame(476), overflow_count=1),
    "two bytes each": blob(frame(1024), frame(476), dtype="BF16"),
    "half a byte each": blob(frame(1024), frame(476), dtype="F4"),
    "a huge shape": blob(frame(1024), frame(476), shape=(1 << 59,)),
}


def test_other_chunk_sizes_decode() -> None:
    assert not PackedTensor.from_blob(GOOD).decode().any()


@pytest.mark.parametrize("name", BAD)
def test_bad_blobs_are_refused(name: str) -> None:
    with pytest.raises(MalformedError):
        PackedTensor.from_blob(BAD[name]).decode()


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="newer"):
        PackedTensor.from_blob(blob(frame(1024), frame(476), version=2))
