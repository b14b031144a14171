"""Weight files that contradict their own format, made in memory, and what a reader must say about each.

Use the generators in any test that feeds bad input to something that reads weights::

    from tests.malformed import safetensors_cases

    @pytest.mark.parametrize("case", safetensors_cases(), ids=str)
    def test_refuses(case, tmp_path): ...
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Malformed:
    """One bad file.

    Attributes
    ----------
    name : str
        Short identifier.
    data : bytes
        The whole file.
    problem : str
        Words that the error must contain.
    tensor : str, optional
        Tensor that the error must name.
    """

    name: str
    data: bytes
    problem: str
    tensor: str | None = None

    def __str__(self) -> str:
        return self.name


def entry(dtype: Any, shape: Any, begin: Any, end: Any, **more: Any) -> dict[str, Any]:
    """A header entry of a safetensors file."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def safetensors(header: Any, data: bytes = b"", *, pad: int | None = None) -> bytes:
    """A safetensors file with any header at all.

    Parameters
    ----------
    header : dict, str or bytes
        Taken as it is where it is text or bytes.
    data : bytes
        What follows the header.
    pad : int, optional
        Spaces behind the header; by default as many as align the data to 8 bytes, as the stock writer does.
    """
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    spaces = -len(text) % 8 if pad is None else pad
    text += b" " * spaces
    return struct.pack("<Q", len(text)) + text + data


def valid_safetensors(metadata: Any = ...) -> bytes:
    """A good file of three tensors, one of them empty, that the bad ones are cut and bent from."""
    header = {"__metadata__": metadata} if metadata is not ... else {}
    header |= {
        "a": entry("BF16", [2, 3], 0, 12),
        "none": entry("F32", [0, 4], 12, 12),
        "b": entry("U8", [5], 12, 17),
    }
    return safetensors(header, bytes(range(17)))


def safetensors_cases() -> list[Malformed]:
    """Every way in which a safetensors file can be wrong by itself, one file each."""
    good = valid_safetensors()
    two = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 4, 8)}
    deep = "{" + '"a":{' * 100_000

    def one(problem_entry: Any, data: bytes = b"") -> bytes:
        return safetensors({"t": problem_entry}, data)

    cases = [
        Malformed("empty", b"", "is empty"),
        Malformed("seven-bytes", b"\x01" * 7, "only 7 bytes"),
        Malformed("length-only", struct.pack("<Q", 0), "does not begin with"),
        Malformed(
            "length-limit-plus-1",
            struct.pack("<Q", MAX_HEADER + 1) + b"{}",
            "claims 100000001 bytes, the format allows",
        ),
        Malformed(
            "length-2^63",
            struct.pack("<Q", 1 << 63) + b"{}",
            "claims 9223372036854775808 bytes, the format allows",
        ),
        Malformed(
            "length-all-ones", b"\xff" * 8 + b"{}", "claims 18446744073709551615 bytes, the format allows"
        ),
        Malformed("length-beyond-file", struct.pack("<Q", 1000) + b"{}", "only 2 follow"),
        Malformed(
            "git-lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"
        ),
        Malformed("web-page", b"<!DOCTYPE html><title>404</title>", "web page"),
        Malformed("gguf-inside", b"GGUF" + bytes(60), "GGUF"),
        Malformed("not-json", safetensors("{nonsense}"), "not JSON"),
        Malformed("array", safetensors("[]"), "does not begin with"),
        Malformed("leading-space", safetensors(" {}"), "does not begin with"),
        Malformed("text-after", safetensors("{} {}"), "not JSON"),
        Malformed("nul-padding", safetensors(b"{}\0\0\0\0\0\0"), "not JSON"),
        Malformed("not-utf8", safetensors(b'{"\xff":0}'), "not UTF-8"),
        Malformed(
            "half-surrogate",
            safetensors('{"\\ud800":' + json.dumps(entry("U8", [0], 0, 0)) + "}"),
            "not UTF-8",
        ),
        Malformed("nested-deep", safetensors(deep), "not JSON"),
        Malformed("nan", safetensors('{"__metadata__":{"a":NaN}}'), "not JSON"),
        Malformed("long-number", safetensors('{"a":' + "9" * 10_000 + "}"), "not JSON"),
        Malformed("duplicate-name", safetensors('{"t":{},"t":{}}'), "'t' twice"),
        Malformed("duplicate-key", safetensors('{"t":{"dtype":"U8","dtype":"U8"}}'), "'dtype' twice"),
        Malformed("metadata-number", safetensors({"__metadata__": {"n": 1}}), "__metadata__"),
        Malformed("metadata-list", safetensors({"__metadata__": []}), "__metadata__"),
        Malformed("entry-number", one(1), "not an object", "t"),
        Malformed("entry-null", one(None), "not an object", "t"),
        Malformed("no-dtype", one({"shape": [1], "data_offsets": [0, 1]}, b"\0"), "no dtype", "t"),
        Malformed("no-shape", one({"dtype": "U8", "data_offsets": [0, 1]}, b"\0"), "no shape", "t"),
        Malformed("no-offsets", one({"dtype": "U8", "shape": [1]}, b"\0"), "no data_offsets", "t"),
        Malformed("dtype-number", one(entry(16, [1], 0, 1), b"\0"), "dtype is not a string", "t"),
        Malformed("shape-number", one(entry("U8", 1, 0, 1), b"\0"), "shape", "t"),
        Malformed("shape-negative", one(entry("U8", [-1], 0, 1), b"\0"), "shape", "t"),
        Malformed("shape-two-negatives", one(entry("U8", [-1, -1], 0, 1), b"\0"), "shape", "t"),
        Malformed("shape-float", one(entry("U8", [1.0], 0, 1), b"\0"), "shape", "t"),
        Malformed("shape-bool", one(entry("U8", [True], 0, 1), b"\0"), "shape", "t"),
        Malformed("shape-2^63", one(entry("U8", [1 << 63], 0, 1), b"\0"), "counts below 2^63", "t"),
        Malformed("shape-wraps-to-1", one(entry("U8", [3, 12297829382473034411], 0, 1), b"\0"), "shape", "t"),
        Malformed("shape-wraps-to-0", one(entry("U8", [1 << 32, 1 << 32], 0, 0)), "span 0", "t"),
        Malformed("shape-many-axes", one(entry("U8", [1] * 65, 0, 1), b"\0"), "65 axes", "t"),
        Malformed(
            "offsets-one", one({"dtype": "U8", "shape": [1], "data_offsets": [0]}), "data_offsets", "t"
        ),
        Malformed(
            "offsets-three",
            one({"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}),
            "data_offsets",
            "t",
        ),
        Malformed("offsets-negative", one(entry("U8", [1], -1, 0)), "data_offsets", "t"),
        Malformed("offsets-float", one(entry("U8", [1], 0, 1.0), b"\0"), "data_offsets", "t"),
        Malformed("offsets-2^63", one(entry("U8", [1], 0, 1 << 63), b"\0"), "two counts below 2^63", "t"),
        Malformed("offsets-reversed", one(entry("U8", [1], 1, 0), b"\0"), "end before", "t"),
        Malformed("range-too-long", one(entry("BF16", [2], 0, 5), bytes(5)), "takes 4 bytes", "t"),
        Malformed("range-too-short", one(entry("BF16", [2], 0, 3), bytes(3)), "takes 4 bytes", "t"),
        Malformed("f4-half-byte", one(entry("F4", [3], 0, 2), bytes(2)), "whole bytes", "t"),
        Malformed("f6-part-byte", one(entry("F6_E2M3", [2], 0, 2), bytes(2)), "whole bytes", "t"),
        Malformed("hole-first", one(entry("U8", [4], 1, 5), bytes(5)), "belong to no tensor", "t"),
        Malformed(
            "hole", safetensors(two | {"b": entry("U8", [4], 6, 10)}, bytes(10)), "2 bytes before it", "b"
        ),
        Malformed("overlap", safetensors(two | {"b": entry("U8", [4], 2, 6)}, bytes(6)), "overlap", "b"),
        Malformed("same-range", safetensors(two | {"b": entry("U8", [4], 0, 4)}, bytes(4)), "overlap", "b"),
        Malformed("empty-inside", safetensors(two | {"c": entry("U8", [0], 2, 2)}, bytes(8)), "overlap", "c"),
        Malformed("truncated-1", good[:-1], "1 of the tensor's 5 bytes are missing, 1 bytes in all", "b"),
        Malformed("truncated-8", good[:-8], "3 of the tensor's 12 bytes are missing, 8 bytes in all", "a"),
        Malformed(
            "truncated-all", good[:-17], "12 of the tensor's 12 bytes are missing, 17 bytes in all", "a"
        ),
        Malformed("truncated-in-header", good[:40], "only 32 follow"),
        Malformed("claims-4-EiB", one(entry("U8", [1 << 62], 0, 1 << 62), b"\0"), "truncated", "t"),
    ]
    return cases


def gguf_string(text: str) -> bytes:
    """A length-prefixed string."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_tensor(name: str, dims: list[int], type_id: int, offset: int) -> bytes:
    """A tensor's entry; `dims` in GGUF order, contiguous axis first."""
    return (
        gguf_string(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", type_id, offset)
    )


def gguf(
    tensors: list[bytes],
    data: bytes = b"",
    *,
    fields: list[bytes] = [],  # noqa: B006 - never changed
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; `counts` lies about the numbers of tensors and of metadata keys."""
    n_tensors, n_fields = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_fields) + b"".join([*fields, *tensors])
    return head + bytes(-len(head) % alignment) + data


def gguf_field(key: str, type_id: int, value: bytes) -> bytes:
    """A metadata key with its type and its encoded value."""
    return gguf_string(key) + struct.pack("<I", type_id) + value


def valid_gguf() -> bytes:
    """A good file: metadata of several types, an F32 tensor [3, 2] and a Q8_0 tensor [1, 32]."""
    fields = [
        gguf_field("general.architecture", 8, gguf_string("llama")),
        gguf_field("general.alignment", 4, struct.pack("<I", 64)),
        gguf_field("scores", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        gguf_field("tokens", 9, struct.pack("<IQ", 8, 2) + gguf_string("x") + gguf_string("yz")),
    ]
    tensors = [gguf_tensor("w", [2, 3], 0, 0), gguf_tensor("q", [32, 1], 8, 64)]
    data = np.arange(6, dtype="<f4").tobytes() + bytes(40) + bytes(range(34))
    return gguf(tensors, data, fields=fields, alignment=64)


def gguf_cases() -> list[Malformed]:
    """GGUF files that lie."""
    good = valid_gguf()
    u8 = 24  # GGML type I8: one byte an element
    huge = struct.pack("<Q", 1 << 63)
    return [
        Malformed("empty", b"", "is empty"),
        Malformed("magic", b"GGML" + bytes(40), "does not begin"),
        Malformed("magic-cut", b"GG", "ends inside"),
        Malformed("version-1", gguf([], version=1), "version 1"),
        Malformed("version-99", gguf([], version=99), "version 99"),
        Malformed("big-endian", gguf([], version=3 << 24), "big-endian"),
        Malformed("tensor-count", gguf([], counts=(1 << 62, 0)), "4611686018427387904 tensors"),
        Malformed("field-count", gguf([], counts=(0, 1 << 62)), "metadata keys"),
        Malformed("key-length", gguf([], fields=[huge + bytes(20)]), "ends inside a metadata key"),
        Malformed("key-not-utf8", gguf([], fields=[struct.pack("<Q", 1) + b"\xff" + bytes(12)]), "not UTF-8"),
        Malformed("key-twice", gguf([], fields=[gguf_field("k", 0, b"\1")] * 2, alignment=64), "'k' twice"),
        Malformed("value-type", gguf([], fields=[gguf_field("k", 77, bytes(8))]), "unknown type 77"),
        Malformed(
            "array-length", gguf([], fields=[gguf_field("k", 9, struct.pack("<I", 0) + huge)]), "items in 'k'"
        ),
        Malformed(
            "array-of-strings",
            gguf([], fields=[gguf_field("k", 9, struct.pack("<I", 8) + huge)]),
            "items in 'k'",
        ),
        Malformed(
            "array-type",
            gguf([], fields=[gguf_field("k", 9, struct.pack("<IQ", 77, 1) + bytes(8))]),
            "unknown type",
        ),
        Malformed(
            "array-nested", gguf([], fields=[gguf_field("k", 9, struct.pack("<IQ", 9, 1) * 50)]), "too deeply"
        ),
        Malformed(
            "alignment-3",
            gguf([], fields=[gguf_field("general.alignment", 4, struct.pack("<I", 3))]),
            "alignment is 3",
        ),
        Malformed(
            "alignment-0", gguf([], fields=[gguf_field("general.alignment", 4, bytes(4))]), "alignment is 0"
        ),
        Malformed(
            "alignment-text",
            gguf([], fields=[gguf_field("general.alignment", 8, gguf_string("x"))]),
            "alignment is x",
        ),
        Malformed("axes", gguf([gguf_tensor("t", [1] * 5, u8, 0)], bytes(32)), "5 axes", "t"),
        Malformed("type", gguf([gguf_tensor("t", [1], 999, 0)], bytes(32)), "GGML type 999", "t"),
        Malformed("block", gguf([gguf_tensor("t", [33], 8, 0)], bytes(64)), "do not fill Q8_0 blocks", "t"),
        Malformed("offset", gguf([gguf_tensor("t", [1], u8, 5)], bytes(32)), "not a multiple", "t"),
        Malformed(
            "twice",
            gguf([gguf_tensor("t", [1], u8, 0), gguf_tensor("t", [1], u8, 32)], bytes(64)),
            "twice",
            "t",
        ),
        Malformed(
            "overlap",
            gguf([gguf_tensor("t", [40], u8, 0), gguf_tensor("u", [1], u8, 32)], bytes(64)),
            "overlap",
            "u",
        ),
        Malformed("product", gguf([gguf_tensor("t", [1 << 32, 1 << 32], u8, 0)], bytes(32)), "missing", "t"),
        Malformed("truncated", good[:-1], "1 of the tensor's 34 bytes", "q"),
        Malformed("truncated-header", good[:100], "ends inside"),
    ]


def npy_bytes(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """A .npy file with any header text."""
    text = header.encode("latin1") + b"\n"
    return (
        b"\x93NUMPY"
        + bytes(version)
        + struct.pack("<H" if version == (1, 0) else "<I", len(text))
        + text
        + data
    )


def npy_cases() -> list[Malformed]:
    """NumPy files that lie."""
    whole = io.BytesIO()
    np.save(whole, np.arange(6, dtype=np.float32).reshape(2, 3))
    objects = io.BytesIO()
    np.save(objects, np.array([{}, None], dtype=object), allow_pickle=True)

    def head(shape: str, descr: str = "'<f4'") -> str:
        return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"

    return [
        Malformed("empty", b"", "is empty"),
        Malformed("magic", b"\x93NUMPX" + bytes(100), "no valid NumPy header"),
        Malformed("version", npy_bytes(head("(1,)"), bytes(4), (9, 0)), "version 9.0"),
        Malformed("not-python", npy_bytes("{'descr': "), "no valid NumPy header"),
        Malformed("code", npy_bytes("__import__('os').abort()"), "no valid NumPy header"),
        Malformed("negative", npy_bytes(head("(-1,)"), bytes(4)), "shape"),
        Malformed("huge", npy_bytes(head("(9223372036854775807, 16)"), bytes(4)), "truncated"),
        Malformed("dtype", npy_bytes(head("(1,)", "'<q9'"), bytes(16)), "no valid NumPy header"),
        Malformed("truncated", whole.getvalue()[:-1], "1 of its 24 bytes are missing"),
        Malformed("objects", objects.getvalue(), "Python objects"),
    ]


def npz_cases() -> list[Malformed]:
    """Archives of NumPy arrays that lie."""
    good = io.BytesIO()
    np.savez(good, a=np.arange(100, dtype=np.int32))
    packed = io.BytesIO()
    np.savez_compressed(packed, a=np.arange(1000, dtype=np.int32))
    short, objects = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(short, "w") as archive:
        archive.writestr("a.npy", npy_cases()[8].data)
    with zipfile.ZipFile(objects, "w") as archive:
        archive.writestr("a.npy", npy_cases()[9].data)
    return [
        Malformed("empty", b"", "not a readable .npz"),
        Malformed("not-a-zip", b"hello" * 100, "not a readable .npz"),
        Malformed("truncated", good.getvalue()[:-5], "not a readable .npz"),
        Malformed("member-truncated", short.getvalue(), "truncated", "a"),
        Malformed("objects", objects.getvalue(), "Python objects", "a"),
    ]
