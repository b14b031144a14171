"""GGUF: tensor types from the `gguf` package, walked by an own cursor that never leaves the file.

The package's reader follows the counts and lengths of a file as they are, for ever where they lie; and it
maps local files only. The types, their names and block sizes are the package's, so new ones need no change.
"""

from __future__ import annotations

import struct
from importlib import import_module
from typing import Any

from wcodec.errors import MalformedError, UnsupportedError
from wcodec.readers.base import Content, FileRange, TensorInfo
from wcodec.readers.bytefile import ByteFile, FilePath

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
"""Most axes of a GGML tensor."""

_BLOCK = 1 << 20  # bytes fetched at a time: one request where the file is remote
_SCALARS = {
    "UINT8": "<B",
    "INT8": "<b",
    "UINT16": "<H",
    "INT16": "<h",
    "UINT32": "<I",
    "INT32": "<i",
    "FLOAT32": "<f",
    "BOOL": "<?",
    "UINT64": "<Q",
    "INT64": "<q",
    "FLOAT64": "<d",
}
_MAX_NESTING = 8  # arrays nested deeper are an attack, not metadata


class _Cursor:
    """Reads forward through a file, checking every length against what is left."""

    def __init__(self, source: ByteFile) -> None:
        self.source = source
        self.at = 0
        self._start = 0
        self._block = b""

    @property
    def left(self) -> int:
        return self.source.size - self.at

    def take(self, n: int, what: str) -> bytes:
        if n > self.left:
            raise MalformedError(
                f"ends inside {what}: {n} bytes are needed at {self.at}, {self.left} are left",
                file=self.source.path,
                mend="it is truncated or corrupt; download it again",
            )
        begin = self.at - self._start
        if begin + n > len(self._block):
            self._block = self.source.read_at(self.at, min(max(n, _BLOCK), self.left)).tobytes()
            self._start, begin = self.at, 0
        self.at += n
        return self._block[begin : begin + n]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.number("<Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise MalformedError(f"{what} is not UTF-8", file=self.source.path) from None

    def count(self, least: int, what: str) -> int:
        """A number of items that take at least `least` bytes each."""
        n: int = self.number("<Q", what)
        if n * least > self.left:
            raise MalformedError(
                f"claims {n} {what}, more than its {self.left} remaining bytes can hold",
                file=self.source.path,
                mend="it is truncated or corrupt; download it again",
            )
        return n


def read_gguf(file: ByteFile) -> Content:
    """Tensors of one GGUF file.

    Quantised types are opaque and keep their GGML name, for example ``"Q4_1"``; shapes are in the order of
    NumPy, the contiguous axis last. Scalar metadata are kept as text, arrays are skipped.

    Raises
    ------
    MalformedError
        The file contradicts the format, or is truncated.
    UnsupportedError
        The `gguf` package is missing, or the file is big-endian or of another version.
    """
    try:
        gguf = import_module("gguf")
    except ImportError:
        raise UnsupportedError(
            "reading GGUF needs the gguf package", file=file.path, mend="pip install 'wcodec[gguf]'"
        ) from None
    cursor = _Cursor(file)
    _check_version(cursor)
    tensor_count = cursor.count(24, "tensors")
    metadata = _read_metadata(cursor, gguf)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise MalformedError(f"general.alignment is {alignment}, not a power of two", file=file.path)
    found = [_read_tensor(cursor, gguf) for _ in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    tensors = [_locate(file, start, alignment, *fields) for fields in found]
    _check_disjoint(tensors, file.path)
    return Content("gguf", tensors, {key: str(value) for key, value in metadata.items()})


def _check_version(cursor: _Cursor) -> None:
    path = cursor.source.path
    if cursor.source.size == 0:
        raise MalformedError("is empty", file=path, mend="download it again")
    if cursor.take(4, "its magic") != MAGIC:
        raise MalformedError("does not begin with 'GGUF'", file=path, mend="it is not a GGUF file")
    version: int = cursor.number("<I", "its version")
    if version & 0xFFFF == 0:
        raise UnsupportedError(
            "is big-endian", file=path, mend="convert it with gguf-convert-endian FILE little"
        )
    if version not in VERSIONS:
        raise UnsupportedError(
            f"has GGUF version {version}, wcodec reads {VERSIONS[0]} and {VERSIONS[1]}", file=path
        )


def _read_metadata(cursor: _Cursor, gguf: Any) -> dict[str, Any]:
    # The number of tensors has been read; the number of keys is next.
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(13, "metadata keys")):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise MalformedError(f"has the metadata key {key!r} twice", file=cursor.source.path)
        metadata[key] = _read_value(cursor, gguf, cursor.number("<I", "a metadata type"), key, 0)
    return metadata


def _read_value(cursor: _Cursor, gguf: Any, type_id: int, key: str, depth: int) -> Any:
    what = f"the value of {key!r}"
    try:
        name = gguf.GGUFValueType(type_id).name
    except ValueError:
        raise MalformedError(f"{what} has the unknown type {type_id}", file=cursor.source.path) from None
    if name in _SCALARS:
        return cursor.number(_SCALARS[name], what)
    if name == "STRING":
        return cursor.string(what)
    if depth == _MAX_NESTING:
        raise MalformedError(f"{what} nests arrays too deeply", file=cursor.source.path)
    item = cursor.number("<I", what)
    item_name = gguf.GGUFValueType(item).name if item in list(gguf.GGUFValueType) else ""
    if item_name in _SCALARS:
        width = struct.calcsize(_SCALARS[item_name])
        n = cursor.count(width, f"items in {key!r}")
        cursor.at += n * width
    else:
        n = cursor.count(8, f"items in {key!r}")
        for _ in range(n):
            _read_value(cursor, gguf, item, key, depth + 1)
    return f"[{n} items]"


def _read_tensor(cursor: _Cursor, gguf: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    path = cursor.source.path
    name = cursor.string("a tensor's name")
    ndim: int = cursor.number("<I", f"the entry of {name!r}")
    if ndim > MAX_DIMS:
        raise MalformedError(f"has {ndim} axes, more than {MAX_DIMS}", file=path, tensor=name)
    dims = [cursor.number("<Q", f"the entry of {name!r}") for _ in range(ndim)]
    type_id = cursor.number("<I", f"the entry of {name!r}")
    offset: int = cursor.number("<Q", f"the entry of {name!r}")
    try:
        ggml_type = gguf.GGMLQuantizationType(type_id)
        block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError):
        raise UnsupportedError(
            f"has the GGML type {type_id}, which this gguf package does not know",
            file=path,
            tensor=name,
            mend="pip install --upgrade gguf",
        ) from None
    elements = 1
    for dim in dims:
        elements *= dim
    if (dims[0] if dims else 1) % block:
        raise MalformedError(
            f"rows of {dims[0] if dims else 1} do not fill {ggml_type.name} blocks of {block}",
            file=path,
            tensor=name,
        )
    return name, ggml_type.name, tuple(reversed(dims)), elements // block * block_bytes, offset


def _locate(
    file: ByteFile,
    start: int,
    alignment: int,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    nbytes: int,
    offset: int,
) -> TensorInfo:
    if offset % alignment:
        raise MalformedError(
            f"its offset {offset} is not a multiple of {alignment}", file=file.path, tensor=name
        )
    missing = start + offset + nbytes - file.size
    if missing > 0:
        raise MalformedError(
            f"the file is truncated: {min(missing, nbytes)} of the tensor's {nbytes} bytes are missing",
            file=file.path,
            tensor=name,
            mend="download it again",
        )
    return TensorInfo(name, file.path, dtype, shape, nbytes, FileRange(file, start + offset))


def _check_disjoint(tensors: list[TensorInfo], path: FilePath) -> None:
    names: set[str] = set()
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset or 0, tensor.nbytes)):
        if tensor.name in names:
            raise MalformedError("is in the file twice", file=path, tensor=tensor.name)
        names.add(tensor.name)
        begin = tensor.offset or 0
        if begin < end and tensor.nbytes:
            raise MalformedError(f"its data overlap those of {before!r}", file=path, tensor=tensor.name)
        if tensor.nbytes:
            end, before = begin + tensor.nbytes, tensor.name
