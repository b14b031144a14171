"""Valid `bf16-w12` blobs that our encoder would never write, and blobs that no decoder may accept.

A small encoder of its own, from the text of `docs/format.md`, with the liberties the text leaves to others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import xxhash


def position(row: int, column: int) -> int:
    """Position of a weight inside its quarter."""
    p = 4 * (column % 16 // 8) + 2 * (row // 8) + column % 2
    return 4 * (row % 8) + column % 8 // 2 + 32 * (column // 16) + 128 * p


def blob(
    bits: np.ndarray,
    table: list[int],
    rng: np.random.Generator,
    *,
    patch_more: float = 0.0,
    shuffle: bool = True,
    dirty_codes: bool = True,
    unused_overflow: int = 0,
) -> bytes:
    """Encode a 2-D uint16 array with a given table.

    Parameters
    ----------
    patch_more : float
        Fraction of in-table weights that get a patch all the same.
    shuffle : bool
        Patches, and the quarters' ranges in the overflow list, come in random order.
    dirty_codes : bool
        Code and sign under a patch are random instead of zero.
    unused_overflow : int
        Overflow entries that no patch word refers to.
    """
    n, k = bits.shape
    tiles = -(-n // 64), -(-k // 64)
    padded = np.full((64 * tiles[0], 64 * tiles[1]), table[0] << 8, dtype=np.uint16)
    padded[:n, :k] = bits
    bricks = bytearray(tiles[0] * tiles[1] * 6208)
    lists: dict[int, list[int]] = {}
    for index in range(tiles[0] * tiles[1]):
        r0, c0 = index // tiles[1] * 64, index % tiles[1] * 64
        for quarter in range(4):
            patches = []
            for row in range(16):
                for column in range(64):
                    weight = int(padded[r0 + 16 * quarter + row, c0 + column])
                    high = weight >> 8
                    where = position(row, column)
                    lane, step, p = where & 31, where >> 5 & 3, where >> 7
                    at = 6208 * index + 1536 * quarter
                    bricks[at + 512 * (step // 2) + 16 * lane + 8 * (step % 2) + p] = weight & 0xFF
                    inside = high & 0x7F in table
                    code, sign = (table.index(high & 0x7F), high >> 7) if inside else (0, 0)
                    if not inside or rng.random() < patch_more:
                        patches.append(where | high << 10)
                        if dirty_codes:
                            code, sign = int(rng.integers(8)), int(rng.integers(2))
                    word = at + 1024 + 16 * lane + 4 * step
                    bricks[word + p // 2] |= code << (4 * (p % 2))
                    signs = (1, 3, 5, 7, 0, 2, 4, 6)[p]
                    bricks[word + signs // 2] |= sign << (4 * (signs % 2) + 3)
            if shuffle:
                rng.shuffle(patches)
            at = 6208 * index + 6144 + 16 * quarter
            if len(patches) <= 6:
                value = sum(patch << (20 * i) for i, patch in enumerate(patches)) | len(patches) << 120
                bricks[at : at + 16] = value.to_bytes(16, "little")
            else:
                lists[at] = patches
    order = list(lists)
    if shuffle:
        rng.shuffle(order)
    overflow: list[int] = [0x3FFFF] * unused_overflow
    for at in order:
        bricks[at : at + 16] = struct.pack("<II7xB", len(overflow), len(lists[at]), 255)
        overflow += lists[at]
    return finish(bytes(bricks), overflow, bits, table)


def finish(bricks: bytes, overflow: list[int], bits: np.ndarray, table: list[int]) -> bytes:
    """Append overflow list, padding, dims and footer."""
    body = bricks + struct.pack(f"<{len(overflow)}I", *overflow)
    body += bytes(-(len(body) + 16 + 64) % 256)
    dims = struct.pack("<2Q", *bits.shape)
    fields = struct.pack(
        "<8sHHBBBB8sQ16sQ",
        b"WCTENSOR",
        1,
        1,
        1,
        2,
        1,
        0,
        bytes(table),
        len(overflow),
        xxhash.xxh3_128_digest(bits.tobytes()),
        0,
    )
    return body + dims + fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(dims + fields))


def resign(blob: bytes, **fields: tuple[int, bytes]) -> bytes:
    """Overwrite footer bytes (offset, value) and make the checksum fit again."""
    raw = bytearray(blob)
    for offset, value in fields.values():
        start = len(raw) - 64 + offset
        raw[start : start + len(value)] = value
    ndim = raw[len(raw) - 64 + 13]
    signed = bytes(raw[max(0, len(raw) - 64 - 8 * ndim) : len(raw) - 8])
    raw[len(raw) - 8 :] = struct.pack("<Q", xxhash.xxh3_64_intdigest(signed))
    return bytes(raw)


def bad_blobs(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Malformed variants of a good 2-D blob of at least one brick, with a name each."""
    yield "empty", b""
    yield "footer only", good[-64:]
    yield "truncated", good[256:]
    yield "not a multiple of 256", good[1:]
    yield "wrong magic", resign(good, magic=(0, b"WCTENSOX"))
    yield "wrong checksum", good[:-1] + bytes([good[-1] ^ 1])
    yield "unknown format", resign(good, format=(8, struct.pack("<H", 77)))
    yield "future version", resign(good, version=(10, struct.pack("<H", 9)))
    yield "unknown dtype", resign(good, dtype=(12, b"\xfe"))
    yield "dtype of another format", resign(good, dtype=(12, b"\x0a"))
    yield "33 dims", resign(good, ndim=(13, b"\x21"))
    yield "split outside", resign(good, split=(14, b"\x02"))
    yield "reserved byte", resign(good, zero=(15, b"\x01"))
    yield "table descending", resign(good, table=(16, bytes([9, 8, 7, 6, 5, 4, 3, 2])))
    yield "table repeated", resign(good, table=(16, bytes([1, 1, 2, 3, 4, 5, 6, 7])))
    yield "table above 127", resign(good, table=(16, bytes([1, 2, 3, 4, 5, 6, 7, 200])))
    yield "overflow count too large", resign(good, overflow=(24, struct.pack("<Q", 1 << 40)))
    yield "overflow count wraps", resign(good, overflow=(24, struct.pack("<Q", 1 << 62)))
    yield "shape too large", resign(good, rows=(-16, struct.pack("<Q", 1 << 62)))
    yield "shape does not fit", resign(good, rows=(-16, struct.pack("<Q", 65)))
    yield "reserved word", resign(good, zero=(48, b"\x01"))

    def patched(change: Callable[[bytearray], None]) -> bytes:
        raw = bytearray(good)
        change(raw)
        return bytes(raw)

    yield "tag 7", patched(lambda raw: raw.__setitem__(6144 + 15, 7))
    yield "tag 254", patched(lambda raw: raw.__setitem__(6144 + 15, 254))
    few = struct.pack("<II7xB", 0, 6, 255)
    yield "overflow of six", patched(lambda raw: raw.__setitem__(slice(6144, 6160), few))
    overflowing = struct.pack("<II7xB", 0, 1025, 255)
    yield "more patches than weights", patched(lambda raw: raw.__setitem__(slice(6144, 6160), overflowing))
    outside = struct.pack("<II7xB", 0xFFFFFFF0, 8, 255)
    yield "overflow range outside", patched(lambda raw: raw.__setitem__(slice(6144, 6160), outside))
    count = struct.unpack_from("<Q", good, len(good) - 64 + 24)[0]
    past = struct.pack("<II7xB", max(count - 6, 0), 7, 255)
    yield "overflow range one too long", patched(lambda raw: raw.__setitem__(slice(6144, 6160), past))
