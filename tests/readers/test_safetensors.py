"""Valid safetensors files: every type, every form of metadata, any alignment, any size."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.malformed import entry, valid_safetensors
from tests.malformed import safetensors as build
from wcodec.dtypes import DTYPES, numel
from wcodec.errors import MalformedError, WCodecError
from wcodec.readers import LocalFile, open_source, parse_header
from wcodec.readers.bytefile import MAP_FROM, page_by_page


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_every_dtype_of_the_package(tmp_path: Path) -> None:
    """The package's own reader accepts each name, and finds the same shape and bytes."""
    header, data = {}, b""
    for name in DTYPES:
        n = 24 * DTYPES[name].bits // 8
        header[name] = entry(name, [3, 8], len(data), len(data) + n)
        data += np.random.default_rng(len(data)).bytes(n)
    path = write(tmp_path / "a.safetensors", build(header, data))
    stock = dict(safetensors.deserialize(path.read_bytes()))
    with open_source(path) as source:
        assert [t.name for t in source.tensors] == list(DTYPES)
        for tensor in source.tensors:
            assert tensor.dtype == stock[tensor.name]["dtype"] == tensor.name
            assert list(tensor.shape) == stock[tensor.name]["shape"]
            assert tensor.numel == 24
            assert not tensor.opaque
            assert 8 * tensor.nbytes == DTYPES[tensor.dtype].bits * numel(tensor.shape)
            assert tensor.read().tobytes() == bytes(stock[tensor.name]["data"])
        assert source.notes == []


def test_field_widths_add_up() -> None:
    for dtype in DTYPES.values():
        if dtype.fields is not None:
            assert sum(dtype.fields) == dtype.bits
        if dtype.value is not None:
            assert 8 * dtype.value.itemsize == dtype.bits
        assert dtype.words.itemsize == max(dtype.bits // 8, 1)
        assert 8 * dtype.unit % dtype.bits == 0
    assert [DTYPES[name].unit for name in ("F4", "F6_E2M3", "BF16", "C64")] == [1, 3, 2, 8]


numpy_types = st.sampled_from(
    ["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8"]
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(deadline=None, max_examples=60)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.tuples(numpy_types, shapes)
    ),
    metadata=st.none() | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.just("é")),
)
def test_files_of_the_package(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str] | None,
) -> None:
    tensors.pop("__metadata__", None)
    if not tensors and metadata == {}:
        return  # the package writes a file that it cannot read itself
    generator = np.random.default_rng(0)
    arrays = {name: generator.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in tensors.items()}
    path = tmp_path_factory.mktemp("stock") / "a.safetensors"
    path.write_bytes(safetensors.numpy.save(arrays, metadata))
    header = parse_header(path)
    assert header.metadata == metadata
    assert header.data_end == header.file_size == path.stat().st_size
    with open_source(path) as source:
        assert {t.name for t in source.tensors} == set(arrays)
        for tensor in source.tensors:
            assert tensor.shape == arrays[tensor.name].shape
            assert tensor.numel == arrays[tensor.name].size
            assert tensor.read().tobytes() == arrays[tensor.name].tobytes()


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        (..., None),
        (None, None),
        ({}, {}),
        ({"format": "pt"}, {"format": "pt"}),
        ({"": "\n\u2028"}, {"": "\n\u2028"}),
    ],
    ids=["absent", "null", "empty", "usual", "odd-text"],
)
def test_metadata(tmp_path: Path, metadata: object, found: dict[str, str] | None) -> None:
    path = write(tmp_path / "a.safetensors", valid_safetensors(metadata))
    header = parse_header(path)
    assert header.metadata == found
    assert [e.name for e in header.entries] == ["a", "none", "b"]
    assert header.raw + bytes(range(17)) == path.read_bytes()[8:]
    with open_source(path) as source:
        assert source.metadata == (found or {})


@pytest.mark.parametrize("pad", range(9))
def test_unaligned_data(tmp_path: Path, pad: int) -> None:
    """BF16 at any absolute offset, odd ones included; arrays are aligned in memory all the same."""
    bits = np.arange(1 << 18, dtype="<u2")
    data = b"x" + bits.tobytes()
    header = {"x": entry("U8", [1], 0, 1), "w": entry("BF16", [bits.size], 1, len(data))}
    path = write(tmp_path / "a.safetensors", build(header, data, pad=pad))
    tensor = open_source(path)["w"]
    words = tensor.read().view("<u2")
    assert words.flags.aligned
    assert np.array_equal(words, bits)
    assert all(chunk.view("<u2").flags.aligned for chunk in tensor.chunks(MAP_FROM + 1))


def test_large_ranges_are_mapped_not_copied(tmp_path: Path) -> None:
    data = bytes(4 << 20)
    path = write(tmp_path / "a.safetensors", build({"w": entry("BF16", [2 << 20], 0, len(data))}, data))
    view = open_source(path)["w"].read()
    assert view.base is not None
    assert not view.flags.writeable
    assert not view.flags.owndata


def test_pages_of_a_mapped_file_can_come_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(2 * MAP_FROM))

    def is_random() -> bool:
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(tmp_path / "a"))
        return " rr" in mapping[mapping.index("VmFlags:") :].splitlines()[0]

    file = LocalFile(tmp_path / "a")
    data, small = file.read_at(0, file.size), file.read_at(0, 100)
    with page_by_page(data), page_by_page(small):
        assert is_random()
        assert not data.any()
    assert not is_random()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("nbytes", [1, 2, 3, 7, 1000, MAP_FROM, 1 << 30])
def test_chunks(tmp_path: Path, mapped: bool, nbytes: int) -> None:
    n = 3001 if nbytes < 1000 else 1 << 19
    words = np.random.default_rng(1).integers(0, 1 << 16, n, dtype=np.uint16)
    header = {"w": entry("BF16", [n], 0, 2 * n), "e": entry("BF16", [0], 2 * n, 2 * n)}
    path = write(tmp_path / "a.safetensors", build(header, words.tobytes()))
    source = open_source(path, mapped=mapped)
    chunks = list(source["w"].chunks(nbytes))
    assert all(chunk.size % 2 == 0 and 0 < chunk.size <= max(nbytes, 2) for chunk in chunks)
    assert all(chunk.dtype == np.uint8 and chunk.ndim == 1 and not chunk.flags.writeable for chunk in chunks)
    assert b"".join(chunk.tobytes() for chunk in chunks) == words.tobytes()
    assert list(source["e"].chunks(nbytes)) == []


def test_chunks_cut_between_elements_of_six_bits(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", build({"w": entry("F6_E3M2", [8], 0, 6)}, bytes(range(6))))
    assert [chunk.size for chunk in open_source(path)["w"].chunks(4)] == [3, 3]


def test_mapping_falls_back_to_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).bytes(MAP_FROM)
    path = write(tmp_path / "a.safetensors", build({"w": entry("U8", [MAP_FROM], 0, MAP_FROM)}, data))

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no mmap here")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert open_source(path)["w"].read().tobytes() == data


def test_sample(tmp_path: Path) -> None:
    words = np.arange(10_000, dtype="<u2")
    path = write(
        tmp_path / "a.safetensors", build({"w": entry("BF16", [words.size], 0, 20_000)}, words.tobytes())
    )
    tensor = open_source(path)["w"]
    part = tensor.sample(1600, blocks=8).view("<u2")
    assert part.size == 800
    assert part[0] == 0
    assert part[-1] == 9999
    assert np.all(np.diff(part.astype(np.int64)) > 0)
    assert np.array_equal(tensor.sample(20_000).view("<u2"), words)
    assert tensor.sample(3).size == 2


@pytest.mark.parametrize("shape", [[], [0], [2, 0], [1], [0, 1 << 62]])
def test_empty_shapes(tmp_path: Path, shape: list[int]) -> None:
    n = 2 * int(0 not in shape)
    path = write(tmp_path / "a.safetensors", build({"w": entry("BF16", shape, 0, n)}, b"\1\2"[:n]))
    tensor = open_source(path)["w"]
    assert tensor.shape == tuple(shape)
    assert tensor.numel == n // 2
    assert tensor.read().tobytes() == b"\1\2"[:n]
    assert sum(chunk.size for chunk in tensor.chunks()) == n


def test_no_tensors(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.safetensors", build("{}")))
    assert source.tensors == []
    assert source.nbytes == 0


def test_trailing_bytes_are_not_truncation(tmp_path: Path) -> None:
    good = valid_safetensors()
    path = write(tmp_path / "a.safetensors", good + b"more")
    header = parse_header(path)
    assert (header.data_end, header.file_size) == (len(good), len(good) + 4)
    source = open_source(path)
    assert source.differences == ["a.safetensors: 4 bytes after the last tensor"]
    assert source["b"].read().tobytes() == bytes(range(12, 17))


def test_unknown_dtype_is_opaque(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", build({"w": entry("F2\n", [7], 0, 3)}, b"abc"))
    source = open_source(path)
    tensor = source["w"]
    assert tensor.opaque
    assert tensor.shape == (7,)
    assert tensor.read().tobytes() == b"abc"
    assert [chunk.size for chunk in tensor.chunks(2)] == [2, 1]
    assert "unknown" in source.remarks[0]
    assert "\n" not in source.remarks[0]


def test_unknown_keys_of_an_entry_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", build({"w": entry("U8", [1], 0, 1, comment="x")}, b"a"))
    assert open_source(path)["w"].read().tobytes() == b"a"


def test_order_is_that_of_the_data(tmp_path: Path) -> None:
    header = {"late": entry("U8", [2], 1, 3), "early": entry("U8", [1], 0, 1)}
    source = open_source(write(tmp_path / "a.safetensors", build(header, b"abc")))
    assert [t.name for t in source.tensors] == ["early", "late"]
    assert [t.offset for t in source.tensors] == sorted(t.offset for t in source.tensors if t.offset)


def test_tensor_of_more_than_2_31_elements(tmp_path: Path) -> None:
    """A sparse file of 10 GiB: offsets beyond 4 GiB, lengths beyond 2^32 bytes, little memory."""
    first, second = 1 << 31, (1 << 31) + 3
    header = {
        "a": entry("BF16", [first], 0, 2 * first),
        "b": entry("BF16", [second], 2 * first, 2 * (first + second)),
    }
    path = tmp_path / "a.safetensors"
    head = build(header)
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + 2 * (first + second) - 2)
        file.write(b"\x80\x3f")
    source = open_source(path)
    a, b = source.tensors
    assert (a.numel, b.numel, b.nbytes) == (first, second, 2 * second)
    assert b.offset == len(head) + (1 << 32)
    assert b.read()[-2:].tobytes() == b"\x80\x3f"
    assert b.read_range(b.nbytes - 4, b.nbytes).tobytes() == b"\0\0\x80\x3f"
    last = b""
    for chunk in b.chunks(1 << 30):
        last = chunk[-2:].tobytes()
    assert last == b"\x80\x3f"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(MalformedError, match=f"1 of the tensor's {2 * second} bytes"):
        open_source(path)


def test_limit_of_the_header(tmp_path: Path) -> None:
    """A header of exactly 100,000,000 bytes is read, in bounded time, though it is nearly all padding."""
    text = json.dumps({"w": entry("U8", [1], 0, 1)}).encode()
    path = write(tmp_path / "a.safetensors", build(text, b"a", pad=100_000_000 - len(text)))
    header = parse_header(path)
    assert len(header.raw) == 100_000_000
    assert open_source(path)["w"].read().tobytes() == b"a"


@pytest.mark.slow
def test_a_million_tensors(tmp_path: Path) -> None:
    """About as many as fit into the largest header; seconds, not minutes, and no descriptor each."""
    n = 1_300_000
    text = ",".join(f'"{i:x}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(n))
    path = write(tmp_path / "a.safetensors", build("{" + text + "}", bytes(n)))
    start = time.process_time()
    source = open_source(path)
    assert len(source.tensors) == n
    assert time.process_time() - start < 30
    assert source.tensors[-1].read().tobytes() == b"\0"


def test_truncated_after_opening(tmp_path: Path) -> None:
    """The size is checked again before every mapping: an error, not SIGBUS."""
    n = 4 * MAP_FROM
    path = write(tmp_path / "a.safetensors", build({"w": entry("U8", [n], 0, n)}, bytes(n)))
    source = open_source(path)
    chunks = source["w"].chunks(MAP_FROM)
    next(chunks)
    os.truncate(path, 2 * MAP_FROM)
    with pytest.raises(MalformedError, match="changed while") as caught:
        next(chunks)
    assert caught.value.tensor == "w"


def test_replaced_after_opening(tmp_path: Path) -> None:
    """A file renamed over the one that was opened has other bytes at the same places."""
    path = write(tmp_path / "a.safetensors", valid_safetensors())
    source = open_source(path)
    view = source["b"].read()
    write(tmp_path / "new", valid_safetensors()[:-5] + b"other").rename(path)
    assert view.tobytes() == bytes(range(12, 17))
    with pytest.raises(MalformedError, match="changed while"):
        source["b"].read()


def test_reads_stay_inside(tmp_path: Path) -> None:
    file = LocalFile(write(tmp_path / "a", b"abcdef"))
    assert file.read_at(2, 4).tobytes() == b"cdef"
    assert file.read_at(6, 0).size == 0
    for offset, n in [(-1, 2), (5, 2), (7, 0), (0, -1), (1 << 70, 1)]:
        with pytest.raises(MalformedError):
            file.read_at(offset, n)
    tensor = open_source(write(tmp_path / "a.safetensors", valid_safetensors()))["a"]
    with pytest.raises(IndexError):
        tensor.read_range(0, 13)


def test_many_files_need_no_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for i in range(80):
        write(tmp_path / f"{i:03}.safetensors", build({f"w{i}": entry("U8", [1], 0, 1)}, bytes([i])))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        source = open_source(tmp_path)
        assert [int(t.read()[0]) for t in source.tensors] == list(range(80))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sources_travel_between_processes(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.safetensors", valid_safetensors()))
    copy = pickle.loads(pickle.dumps(source["b"]))
    assert copy == source["b"]
    assert copy.read().tobytes() == bytes(range(12, 17))


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's refusal is put in its mouth."""
    path = write(tmp_path / "a.safetensors", valid_safetensors())

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(WCodecError, match="may not be read; check its permissions"):
        open_source(path)
