"""Valid GGUF files, against the gguf package's own reader."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.malformed import gguf as build
from tests.malformed import gguf_field, gguf_string, gguf_tensor, valid_gguf
from wcodec.errors import UnsupportedError
from wcodec.readers import open_source

gguf = pytest.importorskip("gguf")


def test_against_the_package(tmp_path: Path) -> None:
    """One tensor of each kind, written and read by the package; same places, shapes and bytes."""
    path = tmp_path / "m.gguf"
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.eps", 1e-5)
    writer.add_bool("llama.tied", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0])
    writer.add_tensor("f32", generator.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("f16", generator.normal(size=(2, 7)).astype(np.float16))
    writer.add_tensor("scalar-row", np.arange(1, dtype=np.int32))
    bits = generator.integers(0, 1 << 16, (4, 6), dtype=np.uint16)
    writer.add_tensor("bf16", bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    for name in ("Q4_1", "Q8_0", "Q6_K", "MXFP4"):
        kind = gguf.GGMLQuantizationType[name]
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        rows = generator.integers(0, 256, (2, 3 * nbytes), dtype=np.uint8)
        writer.add_tensor(name, rows, raw_dtype=kind)
        assert block * 3 == gguf.quant_shape_from_byte_shape(rows.shape, kind)[-1]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    theirs = gguf.GGUFReader(path)
    ours = open_source(path)
    assert ours.kind == "gguf"
    assert ours.notes == []
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for tensor, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert tensor.dtype == other.tensor_type.name
        assert tensor.shape == tuple(int(n) for n in reversed(other.shape))
        assert tensor.offset == other.data_offset
        assert tensor.nbytes == other.n_bytes
        assert tensor.numel == other.n_elements
        assert tensor.read().tobytes() == other.data.tobytes()
    assert ours["bf16"].read().tobytes() == bits.tobytes()
    assert {t.name: t.opaque for t in ours.tensors} == {
        "f32": False,
        "f16": False,
        "scalar-row": False,
        "bf16": False,
        "Q4_1": True,
        "Q8_0": True,
        "Q6_K": True,
        "MXFP4": True,
    }
    assert ours.metadata["general.architecture"] == "llama"
    assert ours.metadata["llama.block_count"] == "3"
    assert ours.metadata["tokenizer.ggml.tokens"] == "[3 items]"


def test_alignment_and_offset_zero(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(valid_gguf())
    source = open_source(path)
    first = source.tensors[0]
    assert first.offset is not None
    assert first.offset % 64 == 0
    assert np.array_equal(first.read().view("<f4"), np.arange(6, dtype="<f4"))
    assert source["q"].read().tobytes() == bytes(range(34))
    assert source["q"].shape == (1, 32)


def test_nested_arrays_and_version_2(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2B", 0, 2, 1, 2)
    outer = struct.pack("<IQ", 9, 2) + inner * 2
    raw = build(
        [gguf_tensor("t", [], 24, 0)],
        b"\7",
        fields=[gguf_field("nested", 9, outer), gguf_field("last", 8, gguf_string("ok"))],
        version=2,
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    source = open_source(path)
    assert source.metadata == {"nested": "[2 items]", "last": "ok"}
    assert source["t"].shape == ()
    assert source["t"].read().tobytes() == b"\7"


def test_no_tensors(tmp_path: Path) -> None:
    """A vocabulary-only file."""
    path = tmp_path / "m.gguf"
    path.write_bytes(build([]))
    assert open_source(path).tensors == []


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(valid_gguf())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match=r"needs the gguf package; pip install 'wcodec\[gguf\]'"):
        open_source(path)
