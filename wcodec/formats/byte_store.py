"""`byte-store`: for disks and networks, entropy-coded bytes (``docs/container.md`` section 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import digest
from wcodec.dtypes import DTYPES
from wcodec.errors import MalformedError
from wcodec.formats._frames import (
    CHUNK,
    SLACK_BYTES,
    U32,
    ChunkEncoder,
    check_chunk_size,
    chunk_count,
    chunk_elements,
    chunk_lengths,
    compress,
    decompress,
)
from wcodec.formats.base import Format, Shape, check_tail, output
from wcodec.packed import U8, PackedTensor, assemble


class ByteStore(Format):
    """Tensors of one-byte elements, such as block scales; no kernel reads it, `decode` does."""

    id = "byte-store"
    code = 4
    version = 1

    def plan(self, histogram: npt.NDArray[np.int64], shape: Shape) -> Shape:
        """Nothing to choose: the plan is the shape."""
        return tuple(shape)

    def encode(self, bits: npt.NDArray[Any], plan: Shape, *, dtype: str = "U8") -> PackedTensor:
        """Encode bytes; the same bytes give the same blob with the same zstandard.

        Parameters
        ----------
        bits : numpy.ndarray of uint8
            C-contiguous, of the plan's shape.
        plan : tuple of int
            The shape.
        dtype : str
            Safetensors name of the elements' type.
        """
        encoder = StreamEncoder(plan, dtype)
        body, lengths = encoder.encode(bits.reshape(-1))
        encoder.append(lengths)
        footer = encoder.footer(digest(bits))
        return PackedTensor(assemble([encoder.head(), body], footer), footer)

    def decode(
        self, packed: PackedTensor, out: npt.NDArray[Any] | None = None, *, workers: int = 1
    ) -> npt.NDArray[Any]:
        """See `Format.decode`; one thread does it: block scales are small."""
        out = output(out, (packed.numel,), 1)
        self._decode_chunks(packed, 0, out.view(np.uint8))
        return out

    def granule(self, packed: PackedTensor) -> int:
        """See `Format.granule`: one chunk."""
        return chunk_elements(packed)

    def decode_range(self, packed: PackedTensor, start: int, stop: int) -> U8:
        """See `Format.decode_range`."""
        size = self.granule(packed)
        first, last = start // size, -(-stop // size)
        out = np.empty(max(min(last * size, packed.numel) - first * size, 0), dtype=np.uint8)
        self._decode_chunks(packed, first, out)
        return out[start - first * size : stop - first * size]

    def _decode_chunks(self, packed: PackedTensor, first: int, out: U8) -> None:
        """Decode chunks from `first` on into `out`, as many as it holds."""
        size, lengths = self.granule(packed), chunk_lengths(packed)
        at = 4 * lengths.size + int(lengths[:first].sum(dtype=np.int64))
        for start in range(0, out.size, size):
            index = first + start // size
            chunk = out[start : start + size]
            chunk[:] = decompress(packed.blob[at : at + int(lengths[index])], chunk.size, index)
            at += int(lengths[index])

    def validate(self, packed: PackedTensor) -> None:
        """See `Format.validate`."""
        footer = packed.footer
        if DTYPES[footer.dtype].bits != 8 or footer.overflow_count:
            raise MalformedError("the footer is not one of byte-store")
        check_chunk_size(packed)
        count = chunk_count(packed.numel, chunk_elements(packed))
        if 4 * count > packed.nbytes:
            raise MalformedError(f"{packed.nbytes} bytes are too few for {count} chunks")
        check_tail(packed, 4 * count + int(chunk_lengths(packed).sum(dtype=np.int64)))


class StreamEncoder(ChunkEncoder):
    """Encodes a tensor piece by piece: see `ChunkEncoder`.

    Parameters
    ----------
    shape : tuple of int
        Logical shape of the tensor.
    dtype : str
        Safetensors name of its type, of one byte.
    """

    def __init__(self, shape: Shape, dtype: str) -> None:
        super().__init__(ByteStore, shape, dtype)

    def encode(self, data: U8) -> tuple[U8, U32]:
        """Encode whole chunks on their own: in any order, from any thread.

        Parameters
        ----------
        data : numpy.ndarray of uint8, 1-D
            A multiple of `CHUNK` bytes unless they are the last.

        Returns
        -------
        body : numpy.ndarray of uint8, 1-D
        lengths : numpy.ndarray of uint32
            Bytes of each chunk's frame, for `append`.
        """
        count = chunk_count(data.size)
        body = np.empty(data.size + count * SLACK_BYTES, dtype=np.uint8)
        lengths, at = np.empty(count, dtype=np.uint32), 0
        for index in range(count):
            frame = compress(data[index * CHUNK : (index + 1) * CHUNK])
            body[at : at + frame.size] = frame
            lengths[index] = frame.size
            at += frame.size
        return body[:at], lengths
