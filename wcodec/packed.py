"""The packed tensor: one run of bytes that is the same on disk, in host memory and on the GPU.

The layout is section 1 of ``docs/format.md``.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from wcodec.errors import MalformedError, UnsupportedError

U8 = npt.NDArray[np.uint8]

MAGIC = b"WCTENSOR"
FOOTER_BYTES = 64
ALIGNMENT_BYTES = 256
MAX_NDIM = 64  # as many as any reader of ours accepts
#: Enough of a blob's end to hold footer and dims, a multiple of the alignment.
TAIL_BYTES = -(-(FOOTER_BYTES + 8 * MAX_NDIM) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
_FIELDS = struct.Struct("<8sHHBBBB8sQ16sQ")  # everything before the checksum
assert _FIELDS.size == FOOTER_BYTES - 8

#: Numbers of the original dtypes in a footer, by safetensors name.
DTYPE_CODES = {
    "BF16": 1,
    "U8": 2,
    "I8": 3,
    "BOOL": 4,
    "I16": 5,
    "U16": 6,
    "F16": 7,
    "I32": 8,
    "U32": 9,
    "F32": 10,
    "I64": 11,
    "U64": 12,
    "F64": 13,
    "F8_E4M3": 14,
    "F8_E5M2": 15,
    "F8_E8M0": 16,
    "F4": 17,
}
_DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class Footer:
    """The last 64 bytes of a blob and the dims before them."""

    format_code: int
    version: int
    dtype: str
    shape: tuple[int, ...]
    split: int
    table: bytes
    overflow_count: int
    digest: bytes

    def pack(self) -> bytes:
        """Serialise dims and footer."""
        dims = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        fields = _FIELDS.pack(
            MAGIC,
            self.format_code,
            self.version,
            DTYPE_CODES[self.dtype],
            len(self.shape),
            self.split,
            0,
            self.table,
            self.overflow_count,
            self.digest,
            0,
        )
        return dims + fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(dims + fields))

    @classmethod
    def parse(cls, blob: U8) -> Footer:
        """Read dims and footer off the end of a blob; errors name no file and no tensor."""
        if blob.size < FOOTER_BYTES:
            raise MalformedError(f"{blob.size} bytes are too few for a packed tensor")
        if blob.size % ALIGNMENT_BYTES:
            raise MalformedError(f"the length {blob.size} is not a multiple of {ALIGNMENT_BYTES}")
        raw = blob[-FOOTER_BYTES:].tobytes()
        magic, code, version, dtype, ndim, split, zero, table, overflow, digest, zero2 = _FIELDS.unpack(
            raw[:-8]
        )
        if magic != MAGIC:
            raise MalformedError("the footer does not start with WCTENSOR", mend="this is no packed tensor")
        if ndim > MAX_NDIM or blob.size < FOOTER_BYTES + 8 * ndim:
            raise MalformedError(f"{ndim} dims do not fit")
        dims = blob[-FOOTER_BYTES - 8 * ndim : blob.size - FOOTER_BYTES].tobytes()
        if struct.unpack("<Q", raw[-8:])[0] != xxhash.xxh3_64_intdigest(dims + raw[:-8]):
            raise MalformedError("the footer's checksum is wrong", mend="the file is damaged; copy it again")
        if dtype not in _DTYPE_NAMES or zero or zero2 or (split >= ndim if ndim > 1 else split):
            raise MalformedError("the footer holds values this version does not know")
        shape = struct.unpack(f"<{ndim}Q", dims)
        if math.prod(d for d in shape if d) >= 1 << 60:
            raise MalformedError(f"the shape {list(shape)} is too large")
        return cls(code, version, _DTYPE_NAMES[dtype], shape, split, table, overflow, digest)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in packed form.

    Attributes
    ----------
    blob : numpy.ndarray of uint8, 1-D
        Everything a decoder needs, a multiple of 256 bytes; ``docs/format.md`` says what each byte is.
    footer : Footer
        The parsed end of the blob.
    """

    blob: U8
    footer: Footer

    @classmethod
    def from_blob(
        cls, blob: Any, *, file: str | os.PathLike[str] | None = None, tensor: str | None = None
    ) -> PackedTensor:
        """Check a blob and wrap it, without copying.

        Parameters
        ----------
        blob : bytes-like or numpy.ndarray of uint8
            One packed tensor.
        file, tensor : optional
            Named in errors.

        Raises
        ------
        MalformedError
            If the bytes contradict themselves.
        UnsupportedError
            If a newer wcodec wrote them.
        """
        from wcodec.formats import by_code

        array = (
            blob.reshape(-1).view(np.uint8) if isinstance(blob, np.ndarray) else np.frombuffer(blob, np.uint8)
        )
        try:
            footer = Footer.parse(array)
            packed = cls(array, footer)
            by_code(footer.format_code, footer.version).validate(packed)
        except (MalformedError, UnsupportedError) as error:
            raise type(error)(error.problem, file=file, tensor=tensor, mend=error.mend) from None
        return packed

    @property
    def format(self) -> str:
        """Id of the format, such as ``"bf16-w12"``."""
        from wcodec.formats import by_code

        return by_code(self.footer.format_code, self.footer.version).id

    @property
    def version(self) -> int:
        """Version of the format's byte layout."""
        return self.footer.version

    @property
    def dtype(self) -> str:
        """Dtype of the original tensor, by its safetensors name."""
        return self.footer.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the original tensor."""
        return self.footer.shape

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (N, K) of the matrix view that the bricks tile."""
        if not self.shape:
            return 1, 1
        return math.prod(self.shape[: self.footer.split]), math.prod(self.shape[self.footer.split :])

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return int(self.blob.size)

    @property
    def bits_per_weight(self) -> float:
        """Bits of the blob per weight; NaN for an empty tensor."""
        return 8 * self.nbytes / self.numel if self.numel else math.nan

    @property
    def table(self) -> U8:
        """The footer's table: 8 values."""
        return np.frombuffer(self.footer.table, dtype=np.uint8)

    @property
    def overflow_count(self) -> int:
        """Entries in the overflow list."""
        return self.footer.overflow_count

    @property
    def digest(self) -> bytes:
        """xxh3-128 of the original tensor's bytes."""
        return self.footer.digest

    def decode(self, out: npt.NDArray[Any] | None = None, *, workers: int = 1) -> npt.NDArray[Any]:
        """Return the original bits.

        Parameters
        ----------
        out : numpy.ndarray, optional
            Writable, C-contiguous, little-endian array of the same shape and element size to write into.
        workers : int, optional
            Threads to use.

        Returns
        -------
        numpy.ndarray
            uint16 bit patterns for BF16, raw bytes (uint8, 1-D) for other dtypes; `out` where given.

        Raises
        ------
        MalformedError
            If a patch points outside its tensor. Digests are not checked here: see `check`.
        ValueError
            If `out` cannot take the bits.
        """
        from wcodec.formats import by_code

        return by_code(self.footer.format_code, self.footer.version).decode(self, out, workers=workers)

    def check(self, bits: npt.NDArray[Any]) -> bool:
        """Whether decoded `bits` have the digest the original had."""
        from wcodec.bits import digest

        return digest(bits) == self.digest


def assemble(body: list[Any], footer: Footer) -> U8:
    """Join body parts, padding, dims and footer into one blob.

    Parameters
    ----------
    body : list of bytes-like
        Bricks, then the overflow list.
    footer : Footer
        What follows.
    """
    parts = [np.frombuffer(part, dtype=np.uint8) for part in body]
    tail = tail_bytes(sum(part.size for part in parts), footer)
    return np.concatenate([*parts, np.frombuffer(tail, dtype=np.uint8)])


def tail_bytes(body_bytes: int, footer: Footer) -> bytes:
    """Padding, dims and footer for a body of `body_bytes` bytes."""
    return bytes(
        blob_bytes(body_bytes, len(footer.shape)) - body_bytes - FOOTER_BYTES - 8 * len(footer.shape)
    ) + (footer.pack())


def blob_bytes(body_bytes: int, ndim: int) -> int:
    """Length of a blob whose bricks and overflow take `body_bytes` bytes."""
    return -(-(body_bytes + 8 * ndim + FOOTER_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
