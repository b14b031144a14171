"""What is in a packed file, checked against docs/container.md and with the safetensors package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tests.container.weightfiles import Tensor, gaussian, mixed, noise, write
from tests.formats import reference
from wcodec.container import layout, pack_file, unpack_file
from wcodec.container.record import RECORD_NAME, SourceRecord
from wcodec.dtypes import DTYPES
from wcodec.errors import UnsupportedError
from wcodec.readers import parse_header


def packed(folder: Path, tensors: dict[str, Tensor], **how: object) -> Path:
    source = write(folder / "a.safetensors", tensors, **how)
    pack_file(source, folder / "p.safetensors", force=True, workers=1)
    return folder / "p.safetensors"


def known(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the dtype that the safetensors package refuses."""
    return {name: tensor for name, tensor in tensors.items() if tensor[0] in DTYPES}


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    tensors = known(mixed())
    path = packed(tmp_path, tensors, metadata={"format": "pt", "author": "Ä"})
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert found.keys() == {*tensors, RECORD_NAME}
    for name, (dtype, shape, data) in tensors.items():
        if (found[name]["dtype"], found[name]["shape"]) == (dtype, list(shape)):
            assert bytes(found[name]["data"]) == data
        else:
            assert found[name]["dtype"] == "U8"
            assert found[name]["shape"] == [len(found[name]["data"])]
            bits = reference.decode(bytes(found[name]["data"]))
            assert bits.shape == shape
            assert bits.tobytes() == data
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "author": "Ä", "wcodec": "1", "wcodec.profile": "run"}


def test_a_loader_that_does_not_know_us_meets_one_dimension(tmp_path: Path) -> None:
    path = packed(tmp_path, {"w": gaussian((64, 64))})
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.get_tensor("w").ndim == 1


def test_order_and_alignment(tmp_path: Path) -> None:
    path = packed(tmp_path, mixed(), padding=b" ")
    header = parse_header(path)
    assert header.data_start % 256 == 0
    assert header.data_end == header.file_size
    kinds = []
    for entry in header.entries:
        source = mixed().get(entry.name)
        is_blob = source is not None and entry.dtype != source[0]
        kinds.append("blob" if is_blob else "raw")
        unit = 256 if is_blob else layout.alignment(entry.dtype)
        assert (header.data_start + entry.begin) % unit == 0
        if is_blob:
            assert (entry.end - entry.begin) % 256 == 0
    assert kinds == sorted(kinds)
    assert header.entries[-1].name == RECORD_NAME
    blobs = [e.name for e in header.entries if e.dtype == "U8" and e.name in mixed() and e.name != "odd.u8"]
    assert blobs == [name for name in mixed() if name in blobs]


def test_a_matrix_costs_at_most_12_15_bits_with_its_header_entry(tmp_path: Path) -> None:
    """147,456 weights is where the limit begins to hold; the name is as long as models have them."""
    name = "encoder.layer.11.attention.self.query.weight"
    path = packed(tmp_path, {name: gaussian((384, 384))})
    header = parse_header(path)
    entry = next(e for e in header.entries if e.name == name)
    text = json.dumps(
        {name: {"dtype": "U8", "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}},
        separators=(",", ":"),
    )
    assert 8 * (entry.end - entry.begin + len(text)) / 384**2 <= 12.15


def test_the_record_says_what_the_specification_says(tmp_path: Path) -> None:
    tensors = {"w": gaussian((64, 64)), "n": noise((3, 5))}
    path = packed(tmp_path, tensors, trailing=b"after", padding=b"   ")
    source = (tmp_path / "a.safetensors").read_bytes()
    header = parse_header(path)
    entry = header.entries[-1]
    record = SourceRecord.parse(path.read_bytes()[header.data_start + entry.begin :])
    length = int.from_bytes(source[:8], "little")
    assert record.header == source[8 : 8 + length]
    assert record.trailing == b"after"
    assert record.nbytes == len(source)
    assert record.raw.keys() == {"n"}


def test_a_file_that_another_tool_saved_again_is_still_packed(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in known(mixed()).items() if tensor[0] in ("BF16", "F32", "U8")}
    path = packed(tmp_path, tensors)
    found = dict(safetensors.deserialize(path.read_bytes()))
    entries: dict[str, Tensor] = {
        name: (found[name]["dtype"], tuple(found[name]["shape"]), bytes(found[name]["data"]))
        for name in sorted(found, reverse=True)
    }
    write(tmp_path / "again.safetensors", entries, padding=b"", metadata={"format": "np"})
    unpack_file(tmp_path / "again.safetensors", tmp_path / "back.safetensors", workers=1)
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_a_header_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.safetensors", {f"t{i}": ("U8", (1,), b"x") for i in range(100)})
    size = len(parse_header(source).raw)
    monkeypatch.setattr(layout, "MAX_HEADER", size)
    with pytest.raises(UnsupportedError, match="shard the model"):
        pack_file(source, tmp_path / "p.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors"}


@pytest.mark.parametrize("count", [1, 9, 10, 99, 100, 1000])
def test_the_reserved_header_always_suffices(tmp_path: Path, count: int) -> None:
    tensors = {f"t{i}": gaussian((64, 64), i) if i % 7 == 0 else ("U8", (1,), b"x") for i in range(count)}
    path = packed(tmp_path, tensors)
    header = parse_header(path)
    assert len(header.raw) - len(header.raw.rstrip(b" ")) < 256 + 16 * (count + 2)


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    first = packed(tmp_path, mixed()).read_bytes()
    assert packed(tmp_path, mixed()).read_bytes() == first
    np.testing.assert_array_equal(np.frombuffer(first[:8], "<u8") % 256, 248)
