"""The source record survives, and damage to it is found before anything is believed."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import xxhash
import zstandard

from wcodec.container import record as module
from wcodec.container.record import SourceRecord
from wcodec.errors import MalformedError, UnsupportedError

RECORD = SourceRecord(
    tool="wcodec 0",
    header=b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   ',
    trailing=b"\0\1",
    nbytes=67,
    digest=bytes(range(16)),
    raw={"a": bytes(16), "höh\\e": b"\xff" * 16},
)


def prefix(
    frame: bytes, text: int, payload: int, *, magic: bytes = b"WCSOURCE", version: int = 1, zero: int = 0
) -> bytes:
    """A record put together from the specification."""
    checksum = xxhash.xxh3_64_intdigest(frame)
    return struct.pack("<8sHHIQQ", magic, version, zero, text, payload, checksum) + frame


def frame_of(payload: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(payload)


@pytest.mark.parametrize(
    "change", [{}, {"raw": {}}, {"header": b"", "trailing": b""}, {"header": b"x" * 10**6}]
)
def test_round_trip(change: dict[str, object]) -> None:
    record = dataclasses.replace(RECORD, **change)  # type: ignore[arg-type]
    assert SourceRecord.parse(record.pack()) == record
    assert record.pack() == record.pack()


def test_every_flipped_bit_is_found() -> None:
    data = RECORD.pack()
    for at in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[at // 8] ^= 1 << (at % 8)
        try:
            found = SourceRecord.parse(bytes(damaged))
        except (MalformedError, UnsupportedError):
            continue
        assert found == RECORD


@pytest.mark.parametrize("length", [0, 7, 8, 31, 32, 33])
def test_truncated(length: int) -> None:
    with pytest.raises(MalformedError):
        SourceRecord.parse(RECORD.pack()[:length])


FACTS = b'{"tool":"t","source":{"bytes":3,"xxh3_128":"%s","header_bytes":1,"trailing_bytes":1},"raw":{}}' % (
    b"0" * 32
)


@pytest.mark.parametrize(
    "facts",
    [
        b"[]",
        b"{}",
        b"nonsense",
        FACTS.replace(b'"bytes":3', b'"bytes":-3'),
        FACTS.replace(b'"bytes":3', b'"bytes":true'),
        FACTS.replace(b'"bytes":3', b'"bytes":3.0'),
        FACTS.replace(b'"header_bytes":1', b'"header_bytes":3'),
        FACTS.replace(b'"trailing_bytes":1', b'"trailing_bytes":2'),
        FACTS.replace(b"0" * 32, b"0" * 30),
        FACTS.replace(b"0" * 32, b"z" * 32),
        FACTS.replace(b'"raw":{}', b'"raw":[]'),
        FACTS.replace(b'"raw":{}', b'"raw":{"a":1}'),
    ],
)
def test_facts_that_are_none(facts: bytes) -> None:
    payload = facts + b"{}"
    with pytest.raises(MalformedError):
        SourceRecord.parse(prefix(frame_of(payload), len(facts), len(payload)))


def test_the_specification_is_enough_to_write_one() -> None:
    payload = FACTS + b"{}"
    record = SourceRecord.parse(prefix(frame_of(payload), len(FACTS), len(payload)))
    assert (record.header, record.trailing, record.nbytes) == (b"{", b"}", 3)


def test_a_bomb_is_not_set_off(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 29
    frame = frame_of(bytes(1 << 20))
    for claimed in (size + 1, (1 << 20) + 1, 1 << 62):
        with pytest.raises(MalformedError, match="the record claims"):
            SourceRecord.parse(prefix(frame, 2, claimed))
    monkeypatch.setattr(module, "MAX_PAYLOAD_BYTES", 1 << 19)
    with pytest.raises(MalformedError, match="the record claims"):
        SourceRecord.parse(prefix(frame, 2, 1 << 20))


def test_wrong_prefixes() -> None:
    payload = FACTS + b"{}"
    good = frame_of(payload), len(FACTS), len(payload)
    with pytest.raises(UnsupportedError, match="upgrade"):
        SourceRecord.parse(prefix(*good, version=3))
    with pytest.raises(MalformedError, match="WCSOURCE"):
        SourceRecord.parse(prefix(*good, magic=b"WCSOURCF"))
    with pytest.raises(MalformedError):
        SourceRecord.parse(prefix(*good, zero=1))
    with pytest.raises(MalformedError):
        SourceRecord.parse(prefix(b"no frame", 0, 8))


def test_too_much_to_carry_is_said_when_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAYLOAD_BYTES", 100)
    with pytest.raises(UnsupportedError, match="shard"):
        RECORD.pack()
