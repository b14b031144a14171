"""Packed files with NVFP4 weights that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.container.nvfp4files import (
    compressed,
    modelopt,
    nibbles,
    scales,
)
from tests.container.weightfiles import gaussian, write
from wcodec.container import (
    PackedFile,
    pack_file,
    unpack_file,
    verify_file,
)
from wcodec.errors import MalformedError, MismatchError, WCodecError
from wcodec.formats.nvfp4_s5 import encode_pair


def pack_model(folder: Path) -> bytes:
    pack_file(write(folder / "a", {**modelopt(), **compressed(), "n": gaussian((5,))}), folder / "p")
    return (folder / "p").read_bytes()


def rebuilt(data: bytes, change: Any) -> bytes:
    """The packed file with its record and header changed by ``change(facts, header)``, checksums right."""
    import zstandard

    from tests.container.test_source_record import prefix

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin, end = header["__wcodec__.header"]["data_offsets"]
    body = data[8 + length :][:begin]
    record = data[8 + length :][begin:end]
    facts_bytes = int.from_bytes(record[12:16], "little")
    payload = zstandard.ZstdDecompressor().decompress(record[32:])
    facts = json.loads(payload[:facts_bytes])
    change(facts, header)
    text = json.dumps(facts).encode()
    frame = zstandard.ZstdCompressor().compress(text + payload[facts_bytes:])
    record = prefix(frame, len(text), len(text) + len(payload) - facts_bytes, version=2)
    header["__wcodec__.header"].update(data_offsets=[begin, begin + len(record)], shape=[len(record)])
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body + record


def facts_of(change: Any) -> Any:
    return lambda facts, header: change(facts["pairs"])


def own_bytes(facts: Any, header: Any) -> None:
    header["q.weight_scale"], header["q.weight_scale_2"] = (
        {**header["q.weight_scale_2"], "dtype": "U8", "shape": [4]},
        {**header["q.weight_scale"], "dtype": "F32"},
    )


HOSTILE: dict[str, tuple[Any, str]] = {
    "no pairs": (lambda facts, header: facts.pop("pairs"), "pairs"),
    "pairs of another type": (lambda facts, header: facts.update(pairs=[1]), "not what it should be"),
    "one digest": (facts_of(lambda pairs: pairs["q.weight"]["xxh3_128"].pop()), "not what it should be"),
    "no scale": (facts_of(lambda pairs: pairs["q.weight"].pop("scale")), "not what it should be"),
    "a scale that is no tensor": (facts_of(lambda pairs: pairs["q.weight"].update(scale="x")), "is missing"),
    "a weight that is no tensor": (
        facts_of(lambda pairs: pairs.update(x=pairs.pop("q.weight"))),
        "is missing",
    ),
    "the weight as its own scale": (
        facts_of(lambda pairs: pairs["q.weight"].update(scale="q.weight")),
        "stored in two ways",
    ),
    "one scale for two": (
        facts_of(lambda pairs: pairs["q.weight"].update(scale="k.weight_scale")),
        "another shape|stored in two ways",
    ),
    "a raw tensor as scale": (
        facts_of(lambda pairs: pairs["q.weight"].update(scale="q.input_scale")),
        "stored in two ways",
    ),
    "a pair forgotten": (facts_of(lambda pairs: pairs.pop("q.weight")), "too few for a packed tensor|dtype"),
    "the other blob": (
        lambda facts, header: header.update(
            {"q.weight": header["k.weight_packed"], "k.weight_packed": header["q.weight"]}
        ),
        "another shape",
    ),
    "the scale is gone": (lambda facts, header: header.pop("q.weight_scale"), "is missing"),
    "the weight is gone": (lambda facts, header: header.pop("q.weight"), "is missing|belong to no tensor"),
    "the scale of another dtype": (
        lambda facts, header: header["q.weight_scale"].update(dtype="F8_E4M3"),
        "bytes of its own",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_contradictions_are_refused(tmp_path: Path, name: str) -> None:
    change, problem = HOSTILE[name]
    (tmp_path / "p").write_bytes(rebuilt(pack_model(tmp_path), change))
    for work in (
        lambda: unpack_file(tmp_path / "p", tmp_path / "b", workers=1),
        lambda: verify_file(tmp_path / "p", workers=1),
        lambda: pack_file(tmp_path / "p", tmp_path / "b", profile="storage"),
    ):
        with pytest.raises(MalformedError, match=problem) as caught:
            work()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_digests_of_either_are_compared(tmp_path: Path) -> None:
    good = pack_model(tmp_path)
    for index, tensor in enumerate(("q.weight", "q.weight_scale")):

        def change(facts: Any, header: Any, index: int = index) -> None:
            facts["pairs"]["q.weight"]["xxh3_128"][index] = "0" * 32

        (tmp_path / "p").write_bytes(rebuilt(good, change))
        with pytest.raises(MismatchError, match="another digest") as caught:
            unpack_file(tmp_path / "p", tmp_path / "b")
        assert caught.value.tensor == tensor
    assert not (tmp_path / "b").exists()


def test_the_digest_in_the_blob_is_compared(tmp_path: Path) -> None:
    """A loader that has the blob alone relies on it."""
    from dataclasses import replace

    data = bytearray(pack_model(tmp_path))
    packed = PackedFile(tmp_path / "p")
    part = next(part for part in packed.parts if part.entry.name == "q.weight")
    assert part.packed is not None
    tail = replace(part.packed.footer, digest=bytes(16)).pack()
    end = packed.header.data_start + part.stored.end
    data[end - len(tail) : end] = tail
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(MismatchError, match="names another digest"):
        unpack_file(tmp_path / "p", tmp_path / "b")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.floats(0, 1, exclude_max=True),
    word=st.binary(min_size=1, max_size=8),
    near=st.sampled_from(["anywhere", "patches", "footer"]),
)
def test_damaged_blobs(tmp_path: Path, where: float, word: bytes, near: str) -> None:
    """An error, or exactly the original; never a crash or other weights."""
    if not (tmp_path / "good").exists():
        (tmp_path / "good").write_bytes(pack_model(tmp_path))
        (tmp_path / "p").rename(tmp_path / "good-p")
    data = bytearray((tmp_path / "good").read_bytes())
    packed = PackedFile(tmp_path / "good-p")
    part = next(part for part in packed.parts if part.entry.name == "k.weight_packed")
    assert part.packed is not None
    start, end = (packed.header.data_start + at for at in (part.stored.begin, part.stored.end))
    if near == "patches":
        start += 3 * 5 * 2208
        end = start + 4 * part.packed.overflow_count
    elif near == "footer":
        start = end - 96
    at = start + int(where * (end - start))
    data[at : at + len(word)] = word
    (tmp_path / "x").write_bytes(data)
    try:
        unpack_file(tmp_path / "x", tmp_path / "b", workers=1, force=True)
    except WCodecError:
        return
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_patches_out_of_range(tmp_path: Path) -> None:
    """With sums that are right, so that nothing else can tell."""
    good = pack_model(tmp_path)
    packed = PackedFile(tmp_path / "p")
    part = next(part for part in packed.parts if part.entry.name == "k.weight_packed")
    assert part.packed is not None
    assert part.packed.overflow_count > 2
    at = packed.header.data_start + part.stored.begin + 3 * 5 * 2208
    last = at + 4 * part.packed.overflow_count - 8
    for place, word in ((at, 0xFFFFFFFF), (last, 256 * 15), (last, 256 * 14 + 255), (at + 4, 256), (last, 0)):
        data = bytearray(good)
        data[place : place + 4] = word.to_bytes(4, "little")
        (tmp_path / "p").write_bytes(data)
        with pytest.raises(MalformedError, match=r"patch \d+ is malformed"):
            unpack_file(tmp_path / "p", tmp_path / "b", workers=1)
    assert not (tmp_path / "b").exists()


def test_a_blob_of_two_without_its_pair(tmp_path: Path) -> None:
    """An F4 tensor whose blob holds scales as well: not what a record of single tensors can mean."""
    weight, scale = nibbles((64, 32), 0), scales((64, 4), 1)
    blob = encode_pair(np.repeat(weight, 8, axis=1), np.repeat(scale, 8, axis=1))
    assert blob is not None
    data = np.repeat(weight, 8, axis=1).tobytes()
    pack_file(write(tmp_path / "a", {"w": ("F4", (64, 512), data), "m": gaussian((64, 64))}), tmp_path / "p")
    good = (tmp_path / "p").read_bytes()

    def change(facts: Any, header: Any) -> None:
        del facts["raw"]["w"]
        facts["pairs"] = {}

    raw = rebuilt(good, change)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    parts, offset = [], 0
    for name, entry in sorted(
        ((n, e) for n, e in header.items() if n != "__metadata__"), key=lambda item: item[1]["data_offsets"]
    ):
        begin, end = entry["data_offsets"]
        piece = raw[8 + length + begin : 8 + length + end]
        if name == "w":
            piece = blob.blob.tobytes()
            entry.update(dtype="U8", shape=[len(piece)])
        entry["data_offsets"] = [offset, offset + len(piece)]
        offset += len(piece)
        parts.append(piece)
    text = json.dumps(header).encode()
    (tmp_path / "p").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    with pytest.raises(MalformedError, match="does not name"):
        PackedFile(tmp_path / "p")
