"""What every reader gives: tensors with a name, a type, a shape, and bytes on demand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import numpy as np

from wcodec.dtypes import DTYPES, numel
from wcodec.errors import WCodecError
from wcodec.readers.bytefile import ByteFile, Bytes, FilePath

CHUNK = 32 * 1024 * 1024
"""Default bytes of a chunk: large enough for full speed, small beside any limit on memory."""


class Payload(Protocol):
    """The bytes of one tensor, wherever they are."""

    def read_at(self, start: int, n: int) -> Bytes:
        """Exactly the `n` bytes that begin `start` bytes into the tensor."""
        ...


class FileRange:
    """A payload that is a range of a file.

    Parameters
    ----------
    source : ByteFile
    offset : int
        Bytes from the start of the file.
    """

    __slots__ = ("offset", "source")

    def __init__(self, source: ByteFile, offset: int) -> None:
        self.source = source
        self.offset = offset

    def read_at(self, start: int, n: int) -> Bytes:
        """See `Payload.read_at`."""
        return self.source.read_at(self.offset + start, n)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a source; its bytes are read when asked for.

    Attributes
    ----------
    name : str
    file : path-like
        File that holds the tensor.
    dtype : str
        Safetensors name of the element type, or another name (``"Q4_1"``) for opaque bytes.
    shape : tuple of int
        Elements along each axis; F4 counts nibbles.
    nbytes : int
        Bytes of data.
    """

    name: str
    file: FilePath
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    payload: Payload = field(repr=False, compare=False)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 where an axis is empty."""
        return numel(self.shape)

    @property
    def opaque(self) -> bool:
        """Whether the type is unknown, so that the data are bytes without elements."""
        return self.dtype not in DTYPES

    @property
    def offset(self) -> int | None:
        """Bytes from the start of `file`; None where the data must be unpacked or converted."""
        return self.payload.offset if isinstance(self.payload, FileRange) else None

    @property
    def _unit(self) -> int:
        return 1 if self.opaque else DTYPES[self.dtype].unit

    def read(self) -> Bytes:
        """All bytes: a read-only 1-D uint8 array, a view of the file wherever that is possible.

        The array begins at a multiple of the element's size in memory, so ``.view("<u2")`` is aligned.

        Raises
        ------
        MalformedError
            The file has changed since it was opened, or is corrupt.
        """
        return self.read_range(0, self.nbytes)

    def read_range(self, start: int, stop: int) -> Bytes:
        """Bytes `start` to `stop` of the tensor; see `read`."""
        if not 0 <= start <= stop <= self.nbytes:
            raise IndexError(f"bytes {start} to {stop} of a tensor of {self.nbytes}")
        try:
            data = self.payload.read_at(start, stop - start)
        except WCodecError as error:
            if error.tensor is None:
                raise type(error)(error.problem, file=error.file, tensor=self.name, mend=error.mend) from None
            raise
        width = DTYPES[self.dtype].words.itemsize if self.dtype in DTYPES else 1
        return data if data.ctypes.data % width == 0 else data.copy()

    def chunks(self, nbytes: int = CHUNK) -> Iterator[Bytes]:
        """Consecutive read-only uint8 arrays of at most `nbytes` that together are the tensor.

        Cuts fall between elements. One chunk is in memory at a time unless the caller keeps more; a tensor
        without elements has no chunks.

        Raises
        ------
        MalformedError
            The file has changed since it was opened, or is corrupt.
        """
        step = max(nbytes - nbytes % self._unit, self._unit)
        for start in range(0, self.nbytes, step):
            yield self.read_range(start, min(start + step, self.nbytes))

    def sample(self, nbytes: int, blocks: int = 16) -> Bytes:
        """At most `nbytes` from evenly spaced blocks of the tensor, in order; all of it where it is smaller.

        Deterministic, and cut between elements: what a histogram of a file elsewhere is estimated from.

        Parameters
        ----------
        nbytes : int
            Bytes to read in all.
        blocks : int
            Ranges to read, one request each where the file is remote.
        """
        unit = self._unit
        if nbytes >= self.nbytes:
            return self.read()
        block = max(nbytes // blocks // unit, 1) * unit
        blocks = max(min(blocks, nbytes // block), 1)
        last = self.nbytes - block
        starts = [last * i // max(blocks - 1, 1) // unit * unit for i in range(blocks)]
        return np.concatenate([self.read_range(start, start + block) for start in starts])


@dataclass(slots=True)
class Content:
    """What one file holds; see `Source` for the fields."""

    kind: str
    tensors: list[TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Source:
    """A checkpoint: the tensors of one file or of a directory of files. A context manager.

    Attributes
    ----------
    path : path-like
        What was opened.
    kind : str
        ``"safetensors"``, ``"gguf"``, ``"torch"`` or ``"numpy"``.
    files : list of path-like
        Files that hold the tensors.
    tensors : list of TensorInfo
        Each stored tensor once, file by file in the order of the data.
    metadata : dict of str to str
        Metadata of all files; the first file wins where two disagree.
    ties : dict of str to str
        Name of a tied tensor to the name under which its data are in `tensors`.
    differences : list of str
        Contradictions that do no harm to the data (an index that disagrees with the headers, bytes after
        the last tensor): what ``--strict`` refuses.
    remarks : list of str
        Other things worth knowing.
    index : path-like, optional
        Index file that named the shards.
    """

    path: FilePath
    kind: str
    files: list[FilePath]
    tensors: list[TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    index: FilePath | None = None

    @property
    def notes(self) -> list[str]:
        """Differences, then remarks."""
        return [*self.differences, *self.remarks]

    @property
    def nbytes(self) -> int:
        """Bytes of data of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def close(self) -> None:
        """Forget the tensors. Arrays that were read stay valid."""
        self.tensors = []

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> TensorInfo:
        name = self.ties.get(name, name)
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)


def first_line(error: BaseException, limit: int = 160) -> str:
    """The first line of another library's error, short enough for ours."""
    lines = str(error).strip().splitlines()
    line = lines[0].rstrip(".: ") if lines else type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"
