"""NumPy files (.npy, .npz): plain arrays only, never pickled objects, always little-endian C order."""

from __future__ import annotations

import lzma
import math
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from wcodec.dtypes import from_numpy
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.readers.base import Content, FileRange, Payload, TensorInfo, first_line
from wcodec.readers.bytefile import Bytes, FilePath, LocalFile

_CORRUPT = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)
_BAD_HEADER = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    KeyError,
    MemoryError,
    RecursionError,
    OverflowError,
)


class _Converted:
    """An array that is not little-endian C order in its file, converted range by range."""

    __slots__ = ("_dtype", "_fortran", "_raw", "_shape")

    def __init__(self, raw: Payload, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> None:
        self._raw = raw
        self._dtype = dtype
        self._shape = shape
        self._fortran = fortran

    def read_at(self, start: int, n: int) -> Bytes:
        width = self._dtype.itemsize
        first, last = start // width, -(-(start + n) // width)
        if self._fortran:
            data = self._raw.read_at(0, math.prod(self._shape) * width)
            array = data.view(self._dtype).reshape(self._shape, order="F").flat[first:last]
        else:
            array = self._raw.read_at(first * width, (last - first) * width).view(self._dtype)
        swapped = np.ascontiguousarray(array, self._dtype.newbyteorder("<"))
        out = swapped.view(np.uint8)[start - first * width :][:n]
        out.flags.writeable = False
        return out


class _Deflated:
    """An array in a compressed member of a zip archive, after the `skip` bytes of its own header.

    The open stream is kept, so that reading chunk after chunk inflates the member once.
    """

    def __init__(self, path: FilePath, name: str, skip: int) -> None:
        self._path = path
        self._name = name
        self._skip = skip
        self._stream: IO[bytes] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return _Deflated, (self._path, self._name, self._skip)

    def read_at(self, start: int, n: int) -> Bytes:
        with self._lock:
            try:
                if self._stream is None:
                    with zipfile.ZipFile(self._path) as archive:
                        self._stream = archive.open(self._name)
                self._stream.seek(self._skip + start)
                data = self._stream.read(n)
            except _CORRUPT as error:
                raise MalformedError(f"is corrupt ({first_line(error)})", file=self._path) from None
        if len(data) != n:
            raise MalformedError(f"ends {n - len(data)} bytes early", file=self._path)
        return np.frombuffer(data, np.uint8)


def read_npy(file: LocalFile) -> Content:
    """The array of a .npy file, named after the file.

    Raises
    ------
    MalformedError
        The header is wrong, or the data are truncated.
    UnsupportedError
        The array holds Python objects.
    """
    content = Content("numpy", [])
    if file.size == 0:
        raise MalformedError("is empty", file=file.path)
    with file.path.open("rb") as stream:
        shape, fortran, dtype = _read_header(stream, file.path, None)
        start = stream.tell()
    _add(content, file, file.path.stem, FileRange(file, start), file.size - start, shape, fortran, dtype)
    return content


def read_npz(file: LocalFile) -> Content:
    """The arrays of a .npz file.

    Raises
    ------
    MalformedError
        The archive or a header is wrong.
    UnsupportedError
        An array holds Python objects, or the archive is encrypted.
    """
    content = Content("numpy", [])
    seen: set[str] = set()
    try:
        with zipfile.ZipFile(file.path) as archive:
            for member in _members(archive):
                name = member.filename.removesuffix(".npy")
                if name in seen:
                    raise MalformedError("is in the archive twice", file=file.path, tensor=name)
                seen.add(name)
                if member.flag_bits & 1:
                    raise UnsupportedError("is encrypted", file=file.path, tensor=name)
                with archive.open(member) as stream:
                    shape, fortran, dtype = _read_header(stream, file.path, name)
                    skip = stream.tell()
                payload = _payload(file, member, skip)
                _add(content, file, name, payload, member.file_size - skip, shape, fortran, dtype)
    except _CORRUPT as error:
        raise MalformedError(
            f"is not a readable .npz archive ({first_line(error)})", file=file.path, mend="save it again"
        ) from None
    return content


def _payload(file: LocalFile, member: zipfile.ZipInfo, skip: int) -> Payload:
    if member.compress_type != zipfile.ZIP_STORED:
        return _Deflated(file.path, member.filename, skip)
    # The local header repeats the name but may have other extra fields than the directory.
    local = file.read_at(member.header_offset, 30).tobytes()
    name_bytes, extra_bytes = struct.unpack("<HH", local[26:])
    start = member.header_offset + 30 + name_bytes + extra_bytes
    if start + member.file_size > file.size:
        raise MalformedError("is truncated", file=file.path, tensor=member.filename)
    return FileRange(file, start + skip)


def _members(archive: zipfile.ZipFile) -> Iterator[zipfile.ZipInfo]:
    return (member for member in archive.infolist() if member.filename.endswith(".npy"))


def _read_header(
    stream: IO[bytes], path: FilePath, name: str | None
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = npy.read_magic(stream)
        if version == (1, 0):
            return npy.read_array_header_1_0(stream)
        if version in ((2, 0), (3, 0)):
            # Version 3 differs only in the encoding of field names, which plain arrays do not have.
            return npy.read_array_header_2_0(stream)
        raise ValueError(f"version {version[0]}.{version[1]} is unknown")
    except _BAD_HEADER as error:
        raise MalformedError(
            f"has no valid NumPy header ({first_line(error)})", file=path, tensor=name, mend="save it again"
        ) from None


def _add(
    content: Content,
    file: LocalFile,
    name: str,
    payload: Payload,
    room: int,
    shape: tuple[int, ...],
    fortran: bool,
    dtype: np.dtype[Any],
) -> None:
    path = file.path
    if dtype.hasobject:
        raise UnsupportedError(
            "holds Python objects, which wcodec does not unpickle",
            file=path,
            tensor=name,
            mend="save an array of numbers",
        )
    if any(type(n) is not int or n < 0 for n in shape):
        raise MalformedError(f"has the shape {shape}", file=path, tensor=name)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > room:
        raise MalformedError(
            f"is truncated: {nbytes - room} of its {nbytes} bytes are missing",
            file=path,
            tensor=name,
            mend="download or save it again",
        )
    if nbytes < room:
        content.differences.append(f"{path.name}: {room - nbytes} bytes after the array {name!r}")
    known = from_numpy(dtype)
    big = dtype.str.startswith(">")
    reordered = fortran and sum(n > 1 for n in shape) > 1
    if known is None:
        remark = f"{path.name}: {name!r} has the NumPy type {dtype.str}, read as plain bytes"
        if dtype.str[1:] == "V2":
            remark += "; if it is ml_dtypes.bfloat16, save it as safetensors to have it read as BF16"
        content.remarks.append(remark)
    elif big:
        content.remarks.append(f"{path.name}: {name!r} is big-endian and converted to little-endian")
    if reordered or (big and known is not None):
        payload = _Converted(payload, dtype, shape, reordered)
    content.tensors.append(TensorInfo(name, path, known or dtype.str[1:], shape, nbytes, payload))
