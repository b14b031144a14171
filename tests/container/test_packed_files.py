"""Pack and unpack give the source back byte for byte, whatever it looks like."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.container.weightfiles import build, gaussian, mixed, noise, outliers, write
from wcodec.container import (
    PackedFile,
    Result,
    pack_file,
    packedfile,
    profiles,
    unpack_file,
    verify_file,
    writer,
)
from wcodec.errors import MalformedError
from wcodec.readers.safetensors import MAX_AXES

SETTINGS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def there_and_back(folder: Path, data: bytes, workers: int = 1) -> tuple[Result, PackedFile]:
    """Pack and unpack `data`, compare, and return what is known of the packed file."""
    source, packed, back = folder / "a.safetensors", folder / "p.safetensors", folder / "b.safetensors"
    source.write_bytes(data)
    result = pack_file(source, packed, force=True, workers=workers)
    assert verify_file(packed, against=source, workers=workers).exact
    unpack_file(packed, back, force=True, workers=workers)
    assert back.read_bytes() == data
    return result, PackedFile(packed)


def formats(packed: PackedFile) -> dict[str, str]:
    return {part.entry.name: part.packed.format if part.packed else "raw" for part in packed.parts}


def test_many_kinds_in_one_file(tmp_path: Path) -> None:
    result, packed = there_and_back(tmp_path, build(mixed(), metadata={"format": "pt"}))
    chosen = formats(packed)
    assert {name for name, how in chosen.items() if how == "bf16-w12"} == {
        "embed",
        "layers.0.weight",
        "layers.1.weight",
        'höher/名前 \\ " x',
    }
    assert (result.tensors, result.packed_tensors) == (15, 4)
    assert result.bytes_in == len(build(mixed(), metadata={"format": "pt"}))
    assert result.bytes_out == (tmp_path / "p.safetensors").stat().st_size
    assert result.weights == sum(int(np.prod(shape)) for _, shape, _ in mixed().values())
    overflowing = next(part for part in packed.parts if part.entry.name == "layers.0.weight")
    assert overflowing.packed is not None
    assert overflowing.packed.overflow_count > 0


@pytest.mark.parametrize("metadata", [..., None, {}, {"format": "pt"}, {"wcodec": "mine", "ü": '"\\\n'}])
@pytest.mark.parametrize("first", ["metadata", "tensors"])
def test_metadata_forms(tmp_path: Path, metadata: object, first: str) -> None:
    _, packed = there_and_back(tmp_path, build({"w": gaussian((64, 64))}, metadata=metadata, first=first))
    ours = packed.header.metadata
    assert ours is not None
    assert ours["wcodec.profile"] == "run"
    want = {} if metadata in (..., None) else dict(metadata)  # type: ignore[call-overload]
    assert {"wcodec": "1", **want}.items() <= ours.items()


@pytest.mark.parametrize("padding", [b"", b" ", b" " * 7, b" " * 5000, b"\n\t "])
def test_header_padding_and_unaligned_data(tmp_path: Path, padding: bytes) -> None:
    there_and_back(tmp_path, build({"w": gaussian((64, 65)), "n": gaussian((3,))}, padding=padding))


def test_tensor_at_an_odd_offset(tmp_path: Path) -> None:
    data = build({"b": ("U8", (1,), b"x"), "w": gaussian((128, 120))}, padding=b"")
    assert formats(there_and_back(tmp_path, data)[1])["w"] == "bf16-w12"


@pytest.mark.parametrize("trailing", [b"x", b"\0" * 3, b"{}" * 50_000])
def test_trailing_bytes(tmp_path: Path, trailing: bytes) -> None:
    there_and_back(tmp_path, build({"w": gaussian((64, 64))}, trailing=trailing))


@pytest.mark.parametrize("profile", ["run", "storage"])
def test_as_many_axes_as_the_reader_accepts(tmp_path: Path, profile: str) -> None:
    source = write(tmp_path / "a", {"w": gaussian((1,) * (MAX_AXES - 2) + (128, 64))})
    assert pack_file(source, tmp_path / "p", profile=profile).packed_tensors == 1
    unpack_file(tmp_path / "p", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == source.read_bytes()


def test_header_order_is_kept(tmp_path: Path) -> None:
    there_and_back(tmp_path, build(mixed(), reverse=True))


@pytest.mark.parametrize("data", [build({}), build({}, metadata={}), build({}, trailing=b"abc")])
def test_no_tensors(tmp_path: Path, data: bytes) -> None:
    result, _ = there_and_back(tmp_path, data)
    assert result.tensors == 0


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (0, 64), (1, 1), (1, 500), (500, 1)])
def test_small_and_empty_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    there_and_back(tmp_path, build({"w": gaussian(shape), "after": gaussian((64, 64))}))


@pytest.mark.parametrize("rows", [1, 7, 63, 64, 65, 160, 232])
@pytest.mark.parametrize("cols", [15, 17, 64, 232])
def test_odd_matrices(tmp_path: Path, rows: int, cols: int) -> None:
    there_and_back(tmp_path, build({"w": gaussian((rows, cols))}))


def test_tied_weights_stay_two_tensors(tmp_path: Path) -> None:
    embed = gaussian((128, 64))
    _, packed = there_and_back(tmp_path, build({"embed": embed, "lm_head": embed}))
    first, second = packed.parts
    assert first.packed is not None
    assert second.packed is not None
    np.testing.assert_array_equal(first.packed.blob, second.packed.blob)


def test_every_bit_pattern(tmp_path: Path) -> None:
    """In one tensor, where they do not pack, and one at a time in tensors that do."""
    patterns = np.arange(65536, dtype="<u2")
    strange = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFBF, 0x7FC0, 0xFFFF, 0x7F7F]
    tensors = {"all": ("BF16", (256, 256), patterns.tobytes())}
    for i, pattern in enumerate(strange):
        dtype, shape, data = gaussian((64, 64), i)
        bits = np.frombuffer(data, "<u2").copy()
        bits[i * 37] = pattern
        tensors[f"one {pattern:04x}"] = (dtype, shape, bits.tobytes())
    _, packed = there_and_back(tmp_path, build(tensors))
    assert formats(packed) == {name: "raw" if name == "all" else "bf16-w12" for name in tensors}


@pytest.mark.parametrize("fill", [0, 0x8000, 0x3F80, 0x7FC0])
def test_constant_tensors(tmp_path: Path, fill: int) -> None:
    data = np.full((128, 100), fill, "<u2").tobytes()
    _, packed = there_and_back(tmp_path, build({"w": ("BF16", (128, 100), data)}))
    assert formats(packed) == {"w": "bf16-w12"}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut so small that every matrix is streamed in many pieces."""
    for module in (writer, packedfile):
        monkeypatch.setattr(module, "CHUNK_BYTES", 40_000)
    monkeypatch.setattr(writer, "_KEPT_BYTES", 200_000)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("workers", [1, 3])
def test_streamed_tensors(tmp_path: Path, workers: int) -> None:
    tensors = {
        "overflows": outliers((1000, 190)),
        "raw": ("F32", (50_000,), np.random.default_rng(1).bytes(200_000)),
        "noise": noise((640, 100)),
        "plain": gaussian((999, 250)),
        "wide": gaussian((60, 9000)),
        "last": noise((64, 64)),
    }
    result, packed = there_and_back(tmp_path, build(tensors, trailing=b"t" * 99), workers)
    assert result.packed_tensors == 3
    assert [p.packed.overflow_count > 0 for p in packed.parts if p.packed] == [True, False, False]


def test_chunks_and_workers_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.safetensors", {**mixed(), "long": outliers((2000, 60))})
    made = set()
    for chunk, kept in ((1, 0), (10_000, 1 << 20), (100_000, 70_000), (8 << 20, 64 << 20)):
        monkeypatch.setattr(writer, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(writer, "_KEPT_BYTES", kept)
        for workers in (1, 4):
            pack_file(source, tmp_path / "p", force=True, workers=workers)
            made.add((tmp_path / "p").read_bytes())
    assert len(made) == 1


@pytest.mark.usefixtures("small_chunks")
def test_any_range_of_the_original(tmp_path: Path) -> None:
    data = build({"a": outliers((300, 120)), "e": gaussian((0, 3)), "b": gaussian((9,))}, trailing=b"end")
    _, packed = there_and_back(tmp_path, data)
    rng = np.random.default_rng(3)
    cuts = [(0, len(data)), (len(data), len(data)), (0, 0), (5, 11), (len(data) - 4, len(data) - 1)]
    cuts += [tuple(sorted(rng.integers(0, len(data) + 1, 2).tolist())) for _ in range(200)]
    for start, stop in cuts:
        assert packed.read_at(start, stop - start).tobytes() == data[start:stop]
    for start, n in [(-1, 2), (0, len(data) + 1), (len(data), 1)]:
        with pytest.raises(MalformedError, match="were asked for"):
            packed.read_at(start, n)


@SETTINGS
@given(data=st.data())
def test_any_file(tmp_path: Path, data: st.DataObject) -> None:
    def tensor(seed: int) -> tuple[str, tuple[int, ...], bytes]:
        shape = tuple(data.draw(st.lists(st.integers(0, 90), max_size=3)))
        kind = data.draw(st.sampled_from([gaussian, noise, "F32", "I8", "U64", "F8_E5M2"]))
        if callable(kind):
            return kind(shape, seed)
        width = {"F32": 4, "U64": 8}.get(kind, 1)
        return kind, shape, np.random.default_rng(seed).bytes(width * int(np.prod(shape)))

    names = data.draw(st.lists(st.text(max_size=12), unique=True, max_size=6))
    names = [name for name in names if name != "__metadata__" and name.isprintable()]
    tensors = {name: tensor(seed) for seed, name in enumerate(names)}
    metadata = data.draw(st.sampled_from([..., None, {}, {"a": "b"}]))
    source = build(
        tensors,
        metadata=metadata,
        padding=b" " * data.draw(st.integers(0, 9)),
        trailing=data.draw(st.binary(max_size=9)),
        reverse=data.draw(st.booleans()),
    )
    there_and_back(tmp_path, source, workers=data.draw(st.sampled_from([1, 2])))


def test_more_overflow_than_can_be_indexed_stays_raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": outliers((256, 190)), "b": gaussian((64, 64))}
    assert there_and_back(tmp_path, build(tensors))[0].packed_tensors == 2
    monkeypatch.setattr(profiles, "OVERFLOW_LIMIT", 5)
    _, packed = there_and_back(tmp_path, build(tensors))
    assert formats(packed) == {"a": "raw", "b": "bf16-w12"}


def test_many_tensors_take_linear_time(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.scale": ("F32", (1,), i.to_bytes(4, "little")) for i in range(30_000)}
    begun = time.process_time()
    there_and_back(tmp_path, build(tensors))
    assert time.process_time() - begun < 40  # 6 s on an idle machine; a quadratic step alone took 25 s
