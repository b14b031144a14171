"""What every format is: one class with one contract, as numcodecs does it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.dtypes import DTYPES
from wcodec.errors import MalformedError
from wcodec.packed import FOOTER_BYTES, PackedTensor, blob_bytes

Shape = tuple[int, ...]

#: Starting a thread costs as much as some hundred thousand weights: small tensors stay on the caller's.
WEIGHTS_PER_WORKER = 1 << 20


class Format(ABC):
    """One way to store a tensor.

    Adding a format is adding one module here, one decode header in ``decoders_cuda/``, one section of the
    specification and one golden file.

    Attributes
    ----------
    id : str
        Name in JSON, on the command line and in the documentation.
    code : int
        Number in a blob's footer.
    version : int
        Version of the byte layout that `encode` writes.
    older : tuple of int
        Versions that `decode` still reads.
    """

    id: str
    code: int
    version: int
    older: tuple[int, ...] = ()

    @abstractmethod
    def plan(self, histogram: npt.NDArray[np.int64], shape: Shape) -> Any:
        """Choose the parameters from the histogram of the tensor's bit patterns.

        Parameters
        ----------
        histogram : numpy.ndarray of int64
            Counts per bit pattern.
        shape : tuple of int
            Logical shape of the tensor.

        Returns
        -------
        A frozen dataclass with a ``config`` dict that survives JSON.
        """

    @abstractmethod
    def encode(self, bits: npt.NDArray[Any], plan: Any) -> PackedTensor:
        """Encode a tensor's bit patterns; canonical, so the same bits and plan give the same bytes."""

    @abstractmethod
    def decode(
        self, packed: PackedTensor, out: npt.NDArray[Any] | None = None, *, workers: int = 1
    ) -> npt.NDArray[Any]:
        """Return the original bit patterns, in `out` where given; `workers` threads may share the work.

        Raises
        ------
        MalformedError
            If the blob contradicts itself where only decoding finds out.
        ValueError
            If `out` cannot take the bits: see `output`.
        """

    @abstractmethod
    def validate(self, packed: PackedTensor) -> None:
        """Check everything the footer and the blob claim that decoding relies on.

        Raises
        ------
        MalformedError
            Naming what contradicts what.
        """

    def content_bytes(self, packed: PackedTensor) -> int:
        """Bytes of the original: more than its tensor's where a blob holds another tensor as well."""
        return original_bytes(packed.dtype, packed.numel)

    def granule(self, packed: PackedTensor) -> int:
        """Bytes of the original that decode on their own; a range of whole granules costs nothing extra.

        Formats that cannot decode a part say the whole tensor. Of two tensors in a blob, a granule has the
        same share as the blob has.
        """
        return max(self.content_bytes(packed), 1)

    def decode_range(self, packed: PackedTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes ``start … stop`` of the original tensor.

        Raises
        ------
        MalformedError
            As `decode`.
        """
        return self.decode(packed).reshape(-1).view(np.uint8)[start:stop]


def output(out: npt.NDArray[Any] | None, shape: Shape, itemsize: int) -> npt.NDArray[Any]:
    """Where a decoder writes: `out`, which must be able to take the bits, or a new array.

    Parameters
    ----------
    out : numpy.ndarray, optional
        Any dtype whose elements have `itemsize` bytes: bits are written as they are.
    shape : tuple of int
    itemsize : int
        Bytes per element: 1 or 2.

    Returns
    -------
    numpy.ndarray
        `out`, or a new array of unsigned integers.

    Raises
    ------
    ValueError
        If `out` has another shape or element size, is not C-contiguous, is read-only, or is big-endian (its
        elements would read as other bits than the original's).
    """
    if out is None:
        return np.empty(shape, dtype=f"u{itemsize}")
    fits = out.shape == shape and out.dtype.itemsize == itemsize
    if not (fits and out.flags.c_contiguous and out.flags.writeable and out.dtype.byteorder != ">"):
        raise ValueError(
            f"out must be a writable, C-contiguous, little-endian array of {8 * itemsize}-bit elements"
            f" and of shape {shape}"
        )
    return out


def original_bytes(dtype: str, numel: int) -> int:
    """Bytes that a tensor takes outside wcodec."""
    return -(-numel * DTYPES[dtype].bits // 8)


def split_axis(shape: Shape, tile: int) -> int:
    """Axis at which a tensor is folded into a matrix, N = prod(shape[:a]) by K = prod(shape[a:]).

    The axis that needs the fewest ``tile`` × ``tile`` bricks; on a tie the largest, so that stacked experts
    and plain matrices keep their last axis as K (``docs/format.md`` section 1).
    """
    if len(shape) < 2:
        return 0

    def bricks(axis: int) -> int:
        rows, cols = math.prod(shape[:axis]), math.prod(shape[axis:])
        return -(-rows // tile) * -(-cols // tile)

    return min(range(len(shape) - 1, 0, -1), key=bricks)


def check_counted(exceptions: int, counted: int) -> None:
    """Refuse weights with more exceptions than were counted for their plan.

    Raises
    ------
    MalformedError
        They changed between counting and encoding.
    """
    if exceptions > counted:
        raise MalformedError(
            f"weights changed while they were packed: {exceptions} exceptions where {counted} were counted",
            mend="let what writes them finish, then run again",
        )


def check_tail(packed: PackedTensor, body_bytes: int) -> None:
    """Check that dims and footer follow a body of `body_bytes` bytes and zeros, and nothing else.

    Raises
    ------
    MalformedError
        If the blob has another length or other padding.
    """
    ndim = len(packed.shape)
    want = blob_bytes(body_bytes, ndim)
    if packed.nbytes != want:
        raise MalformedError(f"the blob has {packed.nbytes} bytes where its footer implies {want}")
    if packed.blob[body_bytes : packed.nbytes - FOOTER_BYTES - 8 * ndim].any():
        raise MalformedError("the padding before the dims is not zero")


def share(tiles: int, tile_weights: int, workers: int, task: Callable[[int, int], Any]) -> list[Any]:
    """Results of ``task(first, last)`` over `tiles` pieces cut into one run per worker, in order.

    Parameters
    ----------
    tiles : int
        Pieces that must not be cut: row tiles or chunks.
    tile_weights : int
        Weights per piece.
    workers : int
        Threads at most.
    task : callable
        Handles pieces `first` … `last` − 1.
    """
    workers = max(1, min(workers, tiles, tiles * tile_weights // WEIGHTS_PER_WORKER))
    if workers == 1:
        return [task(0, tiles)]
    cuts = [tiles * i // workers for i in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(task, cuts[:-1], cuts[1:]))
