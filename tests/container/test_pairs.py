"""NVFP4 weights in packed files: round trips, and what stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.container.nvfp4files import (
    FAMILIES,
    by_dtype,
    compressed,
    f32,
    gpt_oss,
    model,
    modelopt,
    nibbles,
    scales,
    stacked,
    u8,
)
from tests.container.weightfiles import Tensor, gaussian, write
from wcodec.bits import digest
from wcodec.container import (
    PackedFile,
    pack_directory,
    pack_file,
    packedfile,
    unpack_directory,
    unpack_file,
    verify_directory,
    verify_file,
    writer,
)
from wcodec.container.record import Pair
from wcodec.formats.nvfp4_s5 import encode_pair

LAYOUTS = {
    **FAMILIES,
    "mixed": model(),
    "mixed, as the library writes it": by_dtype(model(5)),
    "scales last": dict(reversed(model(9).items())),
}


def packed_names(path: Path) -> set[str]:
    return {part.entry.name for part in PackedFile(path).parts if part.packed is not None}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_there_and_back(tmp_path: Path, name: str, workers: int) -> None:
    source = write(tmp_path / "a", LAYOUTS[name], metadata={"format": "pt"}, trailing=b"t", reverse=True)
    result = pack_file(source, tmp_path / "p", workers=workers)
    assert verify_file(tmp_path / "p", against=source, workers=workers).exact
    unpack_file(tmp_path / "p", tmp_path / "b", workers=workers)
    assert (tmp_path / "b").read_bytes() == source.read_bytes()
    assert result.packed_tensors == len(packed_names(tmp_path / "p"))
    assert bool(result.packed_tensors) == (name != "gpt-oss")
    packed = PackedFile(tmp_path / "p")
    assert packed.record.version == (1 if name == "gpt-oss" else 2)
    assert packed.header.metadata is not None
    assert packed.header.metadata["wcodec"] == str(packed.record.version)
    for part in packed.parts:
        dtype, shape, data = LAYOUTS[name][part.entry.name]
        assert (part.entry.dtype, part.entry.shape) == (dtype, shape)
        assert packed.read_part(part, 0, part.nbytes).tobytes() == data
        assert part.digest == digest(data)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_storage_profile_and_back(tmp_path: Path, name: str, workers: int) -> None:
    source, stored, packed = write(tmp_path / "a", LAYOUTS[name]), tmp_path / "s", tmp_path / "p"
    result = pack_file(source, stored, profile="storage", workers=workers)
    assert result.notes == ()
    assert verify_file(stored, against=source, workers=workers).exact
    scale_names = {n for n in LAYOUTS[name] if n.endswith(("weight_scale", "_scales")) and "thin" not in n}
    assert packed_names(stored) >= scale_names
    assert PackedFile(stored).record.version == 1
    pack_file(source, packed, workers=workers)
    assert stored.stat().st_size < packed.stat().st_size
    pack_file(stored, tmp_path / "p2", workers=workers)
    assert (tmp_path / "p2").read_bytes() == packed.read_bytes()
    if packed_names(packed):
        pack_file(packed, tmp_path / "s2", profile="storage", workers=workers)
        assert (tmp_path / "s2").read_bytes() == stored.read_bytes()


def test_stored_scales_without_weights_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {**without("q.weight"), **compressed()})
    result = pack_file(source, tmp_path / "s", profile="storage")
    assert result.notes == (
        "q.weight_scale stays as it is: no weight that fits these block scales in this file",
    )
    assert packed_names(tmp_path / "s") == {"k.weight_scale"}


def test_a_file_of_stored_scales_alone_is_known_by_its_formats(tmp_path: Path) -> None:
    pack_file(write(tmp_path / "a", gpt_oss()), tmp_path / "s", profile="storage")
    assert PackedFile(tmp_path / "s").profile == "storage"


def test_the_blob_is_that_of_the_format(tmp_path: Path) -> None:
    tensors = modelopt()
    pack_file(write(tmp_path / "a", tensors), tmp_path / "p")
    weight, scale = (np.frombuffer(t[2], np.uint8).reshape(t[1]) for t in list(tensors.values())[:2])
    wanted = encode_pair(weight, scale)
    assert wanted is not None
    parts = {part.entry.name: part for part in PackedFile(tmp_path / "p").parts}
    one, two = parts["q.weight"], parts["q.weight_scale"]
    assert one.packed is two.packed
    assert one.packed is not None
    assert np.array_equal(one.packed.blob, wanted.blob)
    assert one.packed.shape == (192, 256)
    assert (two.within, two.start) == ("q.weight", one.nbytes)
    assert (two.stored.dtype, two.stored.shape) == ("U8", (0,))
    assert PackedFile(tmp_path / "p").record.pairs == {
        "q.weight": Pair("q.weight_scale", (digest(weight), digest(scale)))
    }


def test_the_bytes_do_not_depend_on_how_they_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", by_dtype(model()))
    made = set()
    for chunk in (1, 20_000, 8 << 20):
        for module in (writer, packedfile):
            monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
        for workers in (1, 4):
            pack_file(tmp_path / "a", tmp_path / "p", force=True, workers=workers)
            assert verify_file(tmp_path / "p", against=tmp_path / "a", workers=workers).exact
            made.add((tmp_path / "p").read_bytes())
    assert len(made) == 1


def test_progress_comes_to_the_end(tmp_path: Path) -> None:
    tensors = {**model(), **modelopt("small", 64, 64)}
    source = write(tmp_path / "a", tensors)
    done: list[int] = []
    pack_file(source, tmp_path / "p", workers=2, advance=done.append)
    assert sum(done) == sum(len(data) for _, _, data in tensors.values())


def test_any_range_reads_as_the_original(tmp_path: Path) -> None:
    source = write(tmp_path / "a", by_dtype(model()))
    pack_file(source, tmp_path / "p")
    packed, data, rng = PackedFile(tmp_path / "p"), source.read_bytes(), np.random.default_rng(0)
    for _ in range(100):
        start, stop = sorted(rng.integers(0, len(data) + 1, 2))
        assert packed.read_at(int(start), int(stop - start)).tobytes() == data[start:stop]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 140),
    blocks=st.integers(1, 9),
    values=st.lists(st.integers(0, 0x7E), min_size=1, max_size=70),
    seed=st.integers(0, 99),
)
def test_all_scale_bytes(tmp_path: Path, rows: int, blocks: int, values: list[int], seed: int) -> None:
    """Any bytes that are scales of NVFP4, wherever the window falls; patches included."""
    scale = np.random.default_rng(seed).choice(np.array(values, np.uint8), (rows, blocks))
    scale.flat[: min(scale.size, len(values))] = values[: scale.size]
    tensors = {
        "w.weight": u8(nibbles((rows, 8 * blocks), seed)),
        "w.weight_scale": u8(scale, "F8_E4M3"),
        "w.weight_scale_2": f32(1.0),
    }
    source = write(tmp_path / "a", tensors)
    pack_file(source, tmp_path / "p", workers=1, force=True)
    unpack_file(tmp_path / "p", tmp_path / "b", workers=1, force=True)
    assert (tmp_path / "b").read_bytes() == source.read_bytes()


def with_scale(value: int) -> dict[str, Tensor]:
    tensors = modelopt()
    dtype, shape, data = tensors["q.weight_scale"]
    return {**tensors, "q.weight_scale": (dtype, shape, data[:-1] + bytes([value]))}


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in modelopt().items() if name not in names}


odd_rows = {
    "q.weight": u8(nibbles((128, 132), 0)),
    "q.weight_scale": u8(scales((128, 17), 1), "F8_E4M3"),
    "q.weight_scale_2": f32(1.0),
}
# What stays as it is, and why: what one line says.
LEFT: dict[str, tuple[dict[str, Tensor], str]] = {
    "positive NaN": (with_scale(0x7F), "q.weight stays as it is: NaN among the block scales"),
    "negative NaN": (with_scale(0xFF), "q.weight stays as it is: NaN among the block scales"),
    "negative scale": (with_scale(0x90), "q.weight stays as it is: negative block scales"),
    "zero": ({**modelopt(), "q.weight_scale_2": f32(0.0)}, "q.weight stays as it is: a zero global scale"),
    "infinite": (
        {**modelopt(), "q.weight_scale_2": f32(np.inf)},
        "q.weight stays as it is: an infinite global scale",
    ),
    "NaN": (
        {**modelopt(), "q.weight_scale_2": f32(np.nan)},
        "q.weight stays as it is: a NaN as global scale",
    ),
    "signalling NaN": (
        {**modelopt(), "q.weight_scale_2": ("F32", (), bytes.fromhex("0100807f"))},
        "q.weight stays as it is: a NaN as global scale",
    ),
    "negative": (
        {**modelopt(), "q.weight_scale_2": f32(-1.0)},
        "q.weight stays as it is: a negative global scale",
    ),
    "one odd among many": (
        {**stacked(), "experts.w13_weight_scale_2": f32(1, 0, 1, 1, shape=(4,))},
        "experts.w13_weight stays as it is: a zero global scale",
    ),
    "no global scale": (
        without("q.weight_scale_2"),
        "q.weight stays as it is: no global scale beside it in this file",
    ),
    "no scales": (
        without("q.weight_scale"),
        "q.weight stays as it is: no block scales that fit in this file",
    ),
    "no weight": (
        without("q.weight"),
        "q.weight_scale stays as it is: no weight that fits these block scales in this file",
    ),
    "short blocks": (odd_rows, "q.weight stays as it is: rows end inside a block of 16"),
    "all scale bytes alike often": (
        {**modelopt(), "q.weight_scale": u8(np.arange(192 * 16).reshape(192, 16) % 127, "F8_E4M3")},
        "q.weight stays as it is: block scales too far apart to get smaller",
    ),
    "MXFP4": (
        {**gpt_oss("a"), **gpt_oss("b")},
        "a_blocks and 1 more stay as they are: the run profile has no format for MXFP4",
    ),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("last", [False, True])
def test_what_stays_as_it_is_and_why(tmp_path: Path, name: str, last: bool) -> None:
    tensors, line = LEFT[name]
    source = write(tmp_path / "a", {**tensors, **compressed()} if last else {**compressed(), **tensors})
    result = pack_file(source, tmp_path / "p")
    assert result.notes == (line,)
    assert packed_names(tmp_path / "p") == {"k.weight_packed", "k.weight_scale"}
    assert verify_file(tmp_path / "p", against=source).exact


def test_small_and_thin_ones_stay_without_a_word(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {**modelopt("thin", 1, 256), **modelopt("small", 16, 16)})
    result = pack_file(source, tmp_path / "p")
    assert (result.packed_tensors, result.notes) == (0, ())
    assert verify_file(tmp_path / "p", against=source).exact
    record = PackedFile(tmp_path / "p").header.entries[-1]
    assert result.bytes_out < result.bytes_in + record.nbytes + 4096


def test_empty_weights(tmp_path: Path) -> None:
    empty = {
        "e.weight": u8(np.empty((0, 32), np.uint8)),
        "e.weight_scale": u8(np.empty((0, 4), np.uint8), "F8_E4M3"),
        "e.weight_scale_2": f32(1.0),
    }
    source = write(tmp_path / "a", {**empty, **modelopt()})
    assert pack_file(source, tmp_path / "p").packed_tensors == 2
    assert verify_file(tmp_path / "p", against=source).exact


# Directories.


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def sharded(folder: Path) -> Path:
    """A model whose second shard begins inside a group."""
    folder.mkdir()
    tensors = model()
    cut = {"layers.0.k.weight_scale", "layers.0.k.weight_global_scale"}
    shards = {
        "model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if n not in cut},
        "model-00002-of-00002.safetensors": {**{n: tensors[n] for n in sorted(cut)}, **modelopt("z")},
    }
    for name, content in shards.items():
        write(folder / name, content)
    index = {
        "metadata": {"total_size": sum(len(t[2]) for content in shards.values() for t in content.values())},
        "weight_map": {name: shard for shard, content in shards.items() for name in content},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "x", "quantization_config": {"quant_method": "m"}}')
    return folder


def test_a_directory_is_restored_file_by_file(tmp_path: Path) -> None:
    source = sharded(tmp_path / "model")
    result = pack_directory(source, tmp_path / "packed", workers=2)
    assert result.notes == (
        "layers.0.experts.down_blocks stays as it is: the run profile has no format for MXFP4",
        "layers.0.k.weight_packed stays as it is: no block scales that fit in this file",
        "layers.0.k.weight_scale stays as it is: no weight that fits these block scales in this file",
    )
    assert result.packed_tensors == 1 + 2 + 2 + 2
    assert (tmp_path / "packed" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
    stored = sum(
        part.stored.nbytes
        for name in set(index["weight_map"].values())
        for part in PackedFile(tmp_path / "packed" / name).parts
    )
    assert index["metadata"]["total_size"] == stored
    assert verify_directory(tmp_path / "packed", against=source).exact
    unpack_directory(tmp_path / "packed", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    pack_directory(source, tmp_path / "stored", profile="storage")
    pack_directory(tmp_path / "stored", tmp_path / "converted")
    assert contents(tmp_path / "converted") == contents(tmp_path / "packed")


def test_other_tools_read_it_and_save_it_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = write(tmp_path / "a", {**modelopt(), "n": gaussian((64, 64))})
    pack_file(source, tmp_path / "p")
    tensors = load_file(tmp_path / "p")
    assert tensors["q.weight"].dim() == 1
    assert tensors["q.weight_scale"].shape == (0,)
    save_file(dict(reversed(tensors.items())), tmp_path / "again")
    unpack_file(tmp_path / "again", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == source.read_bytes()
