"""`bf16-store`: for disks and networks, entropy-coded exponents (``docs/container.md`` section 5)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import digest
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
    scratch,
)
from wcodec.formats.base import Format, Shape, check_tail, output, share
from wcodec.packed import U8, PackedTensor, assemble

U16 = npt.NDArray[np.uint16]

#: Weights per chunk: 512 KB of BF16.
CHUNK_WEIGHTS = CHUNK
#: How a chunk's exponents are coded: as they are, or as two symbols per byte, half as much for zstandard.
_PLAIN, _PAIRS = 0, 1
_SYMBOLS = 15  # exponents with a symbol of their own; the sixteenth symbol stands for all others
_PAIRS_HEAD_BYTES = 1 + _SYMBOLS + 4
_PAIRS_WEIGHTS = 1024  # in smaller chunks the table costs more than it saves
_ESCAPES_SHIFT = 6  # one weight in 64 at most: above that exponents are coded as they are
_SAMPLE = 1 << 15  # which exponents are common shows in a third of this many to all of them


class Bf16Store(Format):
    """BF16 tensors of any shape at about 10.6 bits per weight; no kernel reads it, `decode` does."""

    id = "bf16-store"
    code = 3
    version = 2
    older = (1,)

    def plan(self, histogram: npt.NDArray[np.int64], shape: Shape) -> Shape:
        """Nothing to choose: the plan is the shape."""
        return tuple(shape)

    def encode(self, bits: npt.NDArray[Any], plan: Shape, *, workers: int = 1) -> PackedTensor:
        """Encode BF16 bit patterns; the same bits give the same bytes with the same zstandard.

        Parameters
        ----------
        bits : numpy.ndarray of uint16
            C-contiguous, of the plan's shape.
        plan : tuple of int
            The shape.
        workers : int
            Threads to use.
        """
        encoder = StreamEncoder(plan)
        flat = bits.reshape(-1)
        bodies = share(
            chunk_count(flat.size),
            CHUNK_WEIGHTS,
            workers,
            lambda first, last: encoder.encode(flat[first * CHUNK_WEIGHTS : last * CHUNK_WEIGHTS]),
        )
        for _, lengths in bodies:
            encoder.append(lengths)
        footer = encoder.footer(digest(bits))
        return PackedTensor(assemble([encoder.head(), *(body for body, _ in bodies)], footer), footer)

    def decode(
        self, packed: PackedTensor, out: npt.NDArray[Any] | None = None, *, workers: int = 1
    ) -> npt.NDArray[Any]:
        """See `Format.decode`; `workers` threads share the chunks."""
        out = output(out, packed.shape, 2)
        flat = out.view(np.uint16).reshape(-1)
        size = chunk_elements(packed)

        def decode(first: int, last: int) -> None:
            self.decode_chunks(packed, first, last, flat[first * size : last * size])

        share(chunk_count(packed.numel, size), size, workers, decode)
        return out

    def decode_chunks(self, packed: PackedTensor, first: int, last: int, out: U16) -> None:
        """Decode chunks `first` … `last` − 1 into `out`, their weights in order.

        Raises
        ------
        MalformedError
            If a chunk is damaged.
        """
        size, lengths = chunk_elements(packed), chunk_lengths(packed)
        at = 4 * lengths.size + first * size + int(lengths[:first].sum(dtype=np.int64))
        for index in range(first, last):
            weights = out[(index - first) * size : (index - first + 1) * size]
            rest = packed.blob[at : at + weights.size]
            coded = packed.blob[at + weights.size : at + weights.size + int(lengths[index])]
            if packed.version == 1:
                _decode_plain(coded, rest, weights, index)
            else:
                _decode_chunk(coded, rest, weights, index)
            at += weights.size + int(lengths[index])

    def granule(self, packed: PackedTensor) -> int:
        """See `Format.granule`: one chunk."""
        return 2 * chunk_elements(packed)

    def decode_range(self, packed: PackedTensor, start: int, stop: int) -> U8:
        """See `Format.decode_range`."""
        size = chunk_elements(packed)
        first, last = start // (2 * size), -(-stop // (2 * size))
        out = np.empty(max(min(last * size, packed.numel) - first * size, 0), dtype=np.uint16)
        self.decode_chunks(packed, first, last, out)
        return out.view(np.uint8)[start - 2 * first * size : stop - 2 * first * size]

    def validate(self, packed: PackedTensor) -> None:
        """See `Format.validate`."""
        footer = packed.footer
        if footer.dtype != "BF16" or footer.overflow_count:
            raise MalformedError("the footer is not one of bf16-store")
        check_chunk_size(packed)
        count = chunk_count(packed.numel, chunk_elements(packed))
        if 4 * count + packed.numel > packed.nbytes:
            raise MalformedError(f"{packed.nbytes} bytes are too few for {packed.numel} weights")
        body = 4 * count + packed.numel + int(chunk_lengths(packed).sum(dtype=np.int64))
        check_tail(packed, body)


class StreamEncoder(ChunkEncoder):
    """Encodes a tensor piece by piece: see `ChunkEncoder`.

    Parameters
    ----------
    shape : tuple of int
        Logical shape of the tensor.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(Bf16Store, shape, "BF16", plain_bytes=math.prod(shape))

    def encode(self, bits: U16) -> tuple[U8, U32]:
        """Encode whole chunks on their own: in any order, from any thread.

        Parameters
        ----------
        bits : numpy.ndarray of uint16, 1-D
            Weights in order; a multiple of `CHUNK_WEIGHTS` unless they are the last.

        Returns
        -------
        body : numpy.ndarray of uint8, 1-D
        lengths : numpy.ndarray of uint32
            Bytes of each chunk's coded exponents, for `append`.
        """
        chunks = chunk_count(bits.size)
        body = np.empty(2 * bits.size + chunks * SLACK_BYTES, dtype=np.uint8)
        lengths = np.empty(chunks, dtype=np.uint32)
        at = 0
        for index in range(chunks):
            chunk = bits[index * CHUNK_WEIGHTS : (index + 1) * CHUNK_WEIGHTS]
            coded = _encode_chunk(chunk, body[at : at + chunk.size])
            at += chunk.size
            for part in coded:
                body[at : at + part.size] = part
                at += part.size
            lengths[index] = sum(part.size for part in coded)
        return body[:at], lengths


def _encode_chunk(bits: U16, rest: U8) -> list[U8]:
    """Write the rest bytes of a chunk and return the parts of its coded exponents."""
    from wcodec.formats._bf16_store_jit import exponent_counts, split, split_pairs

    step = 1 + 2 * (bits.size // _SAMPLE)  # odd, so that it visits every column of a power of two
    counts = exponent_counts(bits, step)
    # A matrix has more exponents than symbols. With fewer, the table would hold bytes that nothing checks.
    if bits.size >= _PAIRS_WEIGHTS and np.count_nonzero(counts) >= _SYMBOLS:
        table = np.argsort(-counts, kind="stable")[:_SYMBOLS].astype(np.uint8)
        pairs = scratch("pairs", -(-bits.size // 2))
        escapes = scratch("escapes", bits.size >> _ESCAPES_SHIFT)
        count = split_pairs(bits, table, rest, pairs, escapes)
        if count >= 0:
            head = bytes([_PAIRS, *table]) + count.to_bytes(4, "little")
            return [np.frombuffer(head, dtype=np.uint8), escapes[:count], compress(pairs)]
    exponents = scratch("exponents", bits.size)
    split(bits, exponents, rest)
    return [np.array([_PLAIN], dtype=np.uint8), compress(exponents)]


def _decode_chunk(coded: U8, rest: U8, bits: U16, index: int) -> None:
    """Decode chunk `index` of version 2."""
    from wcodec.formats._bf16_store_jit import join_pairs

    kind = int(coded[0]) if coded.size else None
    if kind == _PLAIN:
        _decode_plain(coded[1:], rest, bits, index)
        return
    if kind != _PAIRS or coded.size < _PAIRS_HEAD_BYTES:
        raise MalformedError(f"chunk {index} is coded in no way that bf16-store knows")
    count = int.from_bytes(coded[1 + _SYMBOLS : _PAIRS_HEAD_BYTES].tobytes(), "little")
    end = _PAIRS_HEAD_BYTES + count
    if end > coded.size:
        raise MalformedError(f"chunk {index} claims {count} escapes")
    table, escapes = coded[1 : 1 + _SYMBOLS], coded[_PAIRS_HEAD_BYTES:end]
    pairs = decompress(coded[end:], -(-bits.size // 2), index)
    if join_pairs(pairs, table, escapes, rest, bits) != count:
        raise MalformedError(f"chunk {index} contradicts its {count} escapes")


def _decode_plain(frame: U8, rest: U8, bits: U16, index: int) -> None:
    """Decode a chunk whose frame holds its exponents."""
    from wcodec.formats._bf16_store_jit import join

    join(decompress(frame, bits.size, index), rest, bits)
