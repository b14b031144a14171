"""Damaged packed files: an error, or exactly the original; never a crash, an over-read or wrong data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.container.weightfiles import build, gaussian, mixed, outliers
from wcodec.container import pack_file, packedfile, unpack_file, verify_file
from wcodec.errors import WCodecError

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SOURCE = build(
    {**mixed(), "z": outliers((128, 120)), "tail": gaussian((64, 64), 8)}, metadata={"a": "b"}, trailing=b"t"
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a").write_bytes(SOURCE)
    pack_file(folder / "a", folder / "p", workers=1)
    return (folder / "p").read_bytes()


def outcome(folder: Path, data: bytes) -> str:
    """Unpack `data`: the name of the error, or "exact"; anything else fails the test."""
    (folder / "p").write_bytes(data)
    try:
        unpack_file(folder / "p", folder / "b", force=True, workers=1)
        exact, text = "exact", ""
    except WCodecError as error:
        exact, text = type(error).__name__, str(error)
    assert "\n" not in text
    assert (folder / "b").exists() == (exact == "exact")
    if exact == "exact":
        assert (folder / "b").read_bytes() == SOURCE
        (folder / "b").unlink()
    try:
        verdict = verify_file(folder / "p", workers=1)
        if exact != "exact":
            assert not verdict.exact
    except WCodecError:
        assert exact != "exact"
    return exact


@SETTINGS
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4)
)
def test_flipped_bits(tmp_path: Path, packed: bytes, flips: list[tuple[float, int]]) -> None:
    data = bytearray(packed)
    for where, bit in flips:
        data[int(where * len(data))] ^= 1 << bit
    outcome(tmp_path, bytes(data))


@SETTINGS
@given(where=st.floats(0, 1, exclude_max=True), byte=st.binary(min_size=1, max_size=40))
def test_overwritten_bytes_at_the_ends(tmp_path: Path, packed: bytes, where: float, byte: bytes) -> None:
    """The header and the record take little room; hit them often."""
    start = 8 + int.from_bytes(packed[:8], "little")
    for span in ((0, start), (len(packed) - 1200, len(packed) - 40)):
        data = bytearray(packed)
        at = span[0] + int(where * (span[1] - span[0]))
        data[at : at + len(byte)] = byte
        outcome(tmp_path, bytes(data[: len(packed)]))


@SETTINGS
@given(length=st.floats(0, 1, exclude_max=True))
@example(0.0)
def test_truncations(tmp_path: Path, packed: bytes, length: float) -> None:
    assert outcome(tmp_path, packed[: int(length * len(packed))]) != "exact"


@SETTINGS
@given(data=st.data())
def test_footers_and_patch_words(tmp_path: Path, packed: bytes, data: st.DataObject) -> None:
    """Random bytes where decoders follow pointers: tags, overflow starts and counts, footers."""
    path = tmp_path / "p"
    path.write_bytes(packed)
    blobs = [part for part in packedfile.PackedFile(path).parts if part.packed]
    part = data.draw(st.sampled_from(blobs))
    assert part.packed is not None
    start = 8 + int.from_bytes(packed[:8], "little") + part.stored.begin
    end = start + part.packed.nbytes
    tags = [start + 6208 * b + 6144 + 16 * q for b in range(part.packed.nbytes // 6208) for q in range(4)]
    at = data.draw(st.sampled_from([*tags, end - 64, end - 40, end - 80]))
    changed = bytearray(packed)
    changed[at : at + 16] = data.draw(
        st.binary(min_size=16, max_size=16)
        | st.integers(0, 1 << 64).map(lambda n: n.to_bytes(15, "little") + b"\xff")
    )
    outcome(tmp_path, bytes(changed))


def rewrite(packed: bytes, change: Any) -> bytes:
    """Apply `change` to the JSON of the header."""
    length = int.from_bytes(packed[:8], "little")
    header = json.loads(packed[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + packed[8 + length :]


def swap(one: str, two: str) -> Any:
    def change(header: dict[str, Any]) -> None:
        header[one], header[two] = header[two], header[one]

    return change


CHANGES: dict[str, Any] = {
    "swapped blobs of one shape": (swap("embed", "tail"), "MalformedError"),
    "swapped blobs": (swap("embed", "z"), "MalformedError"),
    "renamed": (lambda h: h.update(other=h.pop("embed")), "MalformedError"),
    "renamed raw": (lambda h: h.update(other=h.pop("norm")), "MalformedError"),
    "raw of another shape": (lambda h: h["norm"].update(shape=[48, 2]), "MalformedError"),
    "raw of another dtype": (lambda h: h["norm"].update(dtype="F16"), "MalformedError"),
    "blob of another dtype": (lambda h: h["embed"].update(dtype="I8"), "MalformedError"),
    "blob of two dimensions": (
        lambda h: h["embed"].update(shape=[h["embed"]["shape"][0], 1]),
        "MalformedError",
    ),
    "one more tensor": (
        lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        "MalformedError",
    ),
    "no record": (lambda h: h.update(record=h.pop("__wcodec__.header")), "UnsupportedError"),
    "a blob as the record": (swap("__wcodec__.header", "embed"), "MalformedError"),
    "other metadata": (lambda h: h.update(__metadata__={"a": "c"}), "exact"),
    "no metadata": (lambda h: h.pop("__metadata__"), "exact"),
    "other order": (lambda h: h.update(embed=h.pop("embed")), "exact"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_headers(tmp_path: Path, packed: bytes, name: str) -> None:
    change, want = CHANGES[name]
    (tmp_path / "p").write_bytes(rewrite(packed, change))
    try:
        unpack_file(tmp_path / "p", tmp_path / "b", workers=1)
        got = "exact"
        assert (tmp_path / "b").read_bytes() == SOURCE
    except WCodecError as error:
        got = type(error).__name__
    assert got == want


def test_changed_metadata_is_a_difference(tmp_path: Path, packed: bytes) -> None:
    (tmp_path / "p").write_bytes(rewrite(packed, CHANGES["other metadata"][0]))
    assert verify_file(tmp_path / "p").differences == ("metadata key 'a' is not what the source has",)


def test_two_tensors_of_one_shape_swapped(tmp_path: Path) -> None:
    """Both blobs are sound and fit: only the digest of the whole file can tell."""
    (tmp_path / "a").write_bytes(build({"one": gaussian((64, 64), 1), "two": gaussian((64, 64), 2)}))
    pack_file(tmp_path / "a", tmp_path / "p")
    (tmp_path / "p").write_bytes(rewrite((tmp_path / "p").read_bytes(), swap("one", "two")))
    verdict = verify_file(tmp_path / "p")
    assert verdict.differences == ("the rebuilt file has another digest than the original had",)


def test_a_flip_in_every_kind_of_byte_is_seen(tmp_path: Path, packed: bytes) -> None:
    """One flip in each part of a tensor's bytes changes what it decodes to, and is refused."""
    (tmp_path / "p").write_bytes(packed)
    file = packedfile.PackedFile(tmp_path / "p")
    base = file.header.data_start
    raw = next(part for part in file.parts if part.entry.name == "norm")
    blob = next(part for part in file.parts if part.entry.name == "z")
    places = {
        "raw": base + raw.stored.begin,
        "low byte": base + blob.stored.begin + 5,
        "code": base + blob.stored.begin + 1024 + 3,
        "digest": base + blob.stored.end - 32,
        "record": file.header.file_size - 3,
    }
    for name, at in places.items():
        data = bytearray(packed)
        data[at] ^= 0x10
        assert outcome(tmp_path, bytes(data)) in ("MismatchError", "MalformedError"), name
