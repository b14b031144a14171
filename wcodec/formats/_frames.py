"""What the formats for disks share: chunks, whose lengths come first, and zstandard frames in them."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt

from wcodec.errors import MalformedError
from wcodec.formats.base import Format, Shape
from wcodec.packed import U8, Footer, PackedTensor, tail_bytes

U32 = npt.NDArray[np.uint32]

#: Symbols per chunk, so that what it takes to code them stays in a core's own cache.
CHUNK_LOG = 18
CHUNK = 1 << CHUNK_LOG
_MIN_CHUNK_LOG, _MAX_CHUNK_LOG = 10, 24
#: What a frame of incompressible bytes takes beyond them, at most.
SLACK_BYTES = 4096
#: Matches find nothing here that Huffman codes do not, and cost time. These make the match finder give up at
#: once while literals are still Huffman-coded, which target length 0 keeps on.
_HASH_LOG, _CHAIN_LOG, _MIN_MATCH, _TARGET_LENGTH = 6, 6, 7, 0

_local = threading.local()


def chunk_count(numel: int, size: int = CHUNK) -> int:
    """Chunks of a tensor of `numel` elements."""
    return -(-numel // size)


def chunk_elements(packed: PackedTensor) -> int:
    """Elements per chunk of a blob."""
    return 1 << packed.footer.table[0]


def chunk_lengths(packed: PackedTensor) -> U32:
    """What the blob says of each chunk's length."""
    return packed.blob[: 4 * chunk_count(packed.numel, chunk_elements(packed))].view("<u4")


def check_chunk_size(packed: PackedTensor) -> None:
    """Refuse a footer whose chunk size is not one of the format."""
    table = packed.footer.table
    if not _MIN_CHUNK_LOG <= table[0] <= _MAX_CHUNK_LOG or any(table[1:]):
        raise MalformedError(f"the chunk size {list(table)} is not one of {packed.format}")


class ChunkEncoder:
    """Puts chunks together that were encoded piece by piece, in bounded memory.

    The blob is what `head` returns, the bodies of consecutive pieces, and what `finish` returns. The head's
    size is known from the start, its content when all pieces are appended.

    Parameters
    ----------
    form : type of Format
    shape : tuple of int
        Logical shape of the tensor.
    dtype : str
        Safetensors name of its type.
    plain_bytes : int
        Bytes of all chunks that their lengths do not count.
    """

    def __init__(self, form: type[Format], shape: Shape, dtype: str, plain_bytes: int = 0) -> None:
        self.form, self.shape, self.dtype = form, tuple(shape), dtype
        self.head_bytes = 4 * chunk_count(math.prod(shape))
        self._lengths: list[U32] = []
        self._body_bytes = self.head_bytes + plain_bytes

    def append(self, lengths: U32) -> None:
        """Take the lengths of the next piece, in order."""
        self._lengths.append(lengths)
        self._body_bytes += int(lengths.sum(dtype=np.int64))

    def head(self) -> bytes:
        """What precedes the chunks, once all were appended."""
        head = b"".join(part.astype("<u4").tobytes() for part in self._lengths)
        if len(head) != self.head_bytes:
            raise ValueError(f"{len(head) // 4} of {self.head_bytes // 4} chunks were appended")
        return head

    def footer(self, original_digest: bytes) -> Footer:
        """The footer: the digest is all that is not known from the start."""
        split = max(len(self.shape) - 1, 0)
        table = bytes([CHUNK_LOG, *bytes(7)])
        return Footer(
            self.form.code, self.form.version, self.dtype, self.shape, split, table, 0, original_digest
        )

    def finish(self, original_digest: bytes) -> bytes:
        """What follows the chunks: padding, dims and footer."""
        return tail_bytes(self._body_bytes, self.footer(original_digest))


def scratch(name: str, size: int) -> U8:
    """This thread's buffer of a name: fresh memory would cost page faults for every chunk."""
    buffer: U8 | None = getattr(_local, name, None)
    if buffer is None or buffer.size < size:
        buffer = np.empty(max(size, CHUNK + 1), dtype=np.uint8)
        if size <= CHUNK + 1:  # larger chunks come from elsewhere: keep nothing of theirs
            setattr(_local, name, buffer)
    return buffer[:size]


def compress(plain: U8) -> U8:
    """One frame of `plain`; the same bytes with the same zstandard."""
    # Compressors cannot be shared by threads, and making one costs as much as a chunk.
    if not hasattr(_local, "compressor"):
        import zstandard

        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=CHUNK_LOG,
            hash_log=_HASH_LOG,
            chain_log=_CHAIN_LOG,
            search_log=1,
            min_match=_MIN_MATCH,
            target_length=_TARGET_LENGTH,
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return np.frombuffer(_local.compressor.compress(plain.data), dtype=np.uint8)


def decompress(frame: U8, size: int, index: int) -> U8:
    """The content of chunk `index`'s frame, checked to be `size` bytes; this thread's next call reuses it."""
    import zstandard

    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    content = scratch("content", size + 1)  # a byte more, which a second frame would fill
    try:
        if zstandard.frame_content_size(frame.data) != size:
            raise MalformedError(f"chunk {index} does not hold {size} bytes")
        with _local.decompressor.stream_reader(frame.data, read_across_frames=True) as reader:
            found = reader.readinto(content.data)
    except zstandard.ZstdError as error:
        raise MalformedError(f"chunk {index} does not decompress ({error})") from None
    if found != size:
        raise MalformedError(f"chunk {index} does not hold {size} bytes")
    return content[:size]
