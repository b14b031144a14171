"""Files of NumPy: byte order, memory order, types that NumPy does not know."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.malformed import npy_bytes
from wcodec.readers import open_source

NAMES = {
    "?": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "u2": "U16",
    "i2": "I16",
    "f2": "F16",
    "u4": "U32",
    "i4": "I32",
    "f4": "F32",
    "u8": "U64",
    "i8": "I64",
    "f8": "F64",
    "c8": "C64",
}


def sample(dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 100, (5, 7))
    return values.astype(dtype)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize("dtype", list(NAMES))
@pytest.mark.parametrize("store", ["npy", "npz", "compressed"])
def test_bytes_are_little_endian_c_order(
    tmp_path: Path, order: str, layout: str, dtype: str, store: str
) -> None:
    array = np.asarray(sample(dtype).astype(order + dtype), order=layout)
    path = tmp_path / ("w.npy" if store == "npy" else "m.npz")
    if store == "npy":
        np.save(path, array)
    elif store == "npz":
        np.savez(path, w=array)
    else:
        np.savez_compressed(path, w=array)
    source = open_source(path)
    tensor = source["w"]
    expected = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
    assert (tensor.dtype, tensor.shape) == (NAMES[dtype], (5, 7))
    assert tensor.read().tobytes() == expected
    assert b"".join(chunk.tobytes() for chunk in tensor.chunks(10)) == expected
    assert tensor.read_range(3, 11).tobytes() == expected[3:11]
    assert not tensor.read().flags.writeable
    big = order == ">" and array.dtype.itemsize > 1
    assert [remark.endswith("is big-endian and converted to little-endian") for remark in source.remarks] == (
        [True] if big else []
    )
    # Only what lies in the file as it is has an offset.
    assert (tensor.offset is None) == (big or layout == "F" or store == "compressed")


def test_uint16_is_not_taken_for_bf16(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.arange(1 << 16, dtype=np.uint16))
    tensor = open_source(tmp_path / "w.npy")["w"]
    assert tensor.dtype == "U16"
    assert np.array_equal(tensor.read().view("<u2"), np.arange(1 << 16, dtype=np.uint16))


def test_bfloat16_of_ml_dtypes_is_explained(tmp_path: Path) -> None:
    """It is stored as V2, which says nothing about its meaning."""
    header = "{'descr': '|V2', 'fortran_order': False, 'shape': (3,), }"
    (tmp_path / "w.npy").write_bytes(npy_bytes(header, b"abcdef"))
    source = open_source(tmp_path / "w.npy")
    tensor = source["w"]
    assert tensor.opaque
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("V2", (3,), 6)
    assert tensor.read().tobytes() == b"abcdef"
    assert "save it as safetensors to have it read as BF16" in source.remarks[0]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,)])
def test_empty_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for order in "<>":
        np.save(tmp_path / "w.npy", np.zeros(shape, order + "f4"))
        tensor = open_source(tmp_path / "w.npy")["w"]
        assert tensor.shape == shape
        assert tensor.read().size == tensor.nbytes == 4 * tensor.numel


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_header_versions(tmp_path: Path, version: tuple[int, int]) -> None:
    with (tmp_path / "w.npy").open("wb") as file:
        np.lib.format.write_array(file, np.arange(4, dtype="<i4"), version)
    assert open_source(tmp_path / "w.npy")["w"].read().view("<i4").tolist() == [0, 1, 2, 3]


def test_trailing_bytes(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.arange(4, dtype="<i4"))
    with (tmp_path / "w.npy").open("ab") as file:
        file.write(b"more")
    source = open_source(tmp_path / "w.npy")
    assert source["w"].nbytes == 16
    assert source.differences == ["w.npy: 4 bytes after the array 'w'"]


def test_archives(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", np.zeros(2, np.float16), **{"layer/w": np.ones(3, np.uint8)})
    source = open_source(tmp_path / "m.npz")
    assert sorted(t.name for t in source.tensors) == ["arr_0", "layer/w"]
    assert source["layer/w"].read().tobytes() == b"\1\1\1"


def test_compressed_members_travel_between_processes(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "m.npz", w=np.arange(1000))
    tensor = open_source(tmp_path / "m.npz")["w"]
    assert tensor.read_range(800, 808).view("<i8")[0] == 100
    copy = pickle.loads(pickle.dumps(tensor))
    assert copy.read().tobytes() == np.arange(1000).tobytes()
    # Backwards after forwards: the stream starts again.
    assert tensor.read_range(0, 8).view("<i8")[0] == 0
