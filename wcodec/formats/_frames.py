"""Zstandard frames of bytes that hardly repeat in order, one per chunk; used by the formats for disks."""

from __future__ import annotations

import threading

import numpy as np

from wcodec.errors import MalformedError
from wcodec.packed import U8

#: Symbols per chunk, so that what it takes to code them stays in a core's own cache.
CHUNK_LOG = 18
CHUNK = 1 << CHUNK_LOG
MIN_CHUNK_LOG, MAX_CHUNK_LOG = 10, 24
#: What a frame of incompressible bytes takes beyond them, at most.
SLACK_BYTES = 4096
#: Matches find nothing here that Huffman codes do not, and cost time. These make the match finder give up at
#: once while literals are still Huffman-coded, which target length 0 keeps on.
_HASH_LOG, _CHAIN_LOG, _MIN_MATCH, _TARGET_LENGTH = 6, 6, 7, 0

_local = threading.local()


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
