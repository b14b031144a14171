"""`nvfp4-s5`: NVFP4 nibbles as they are, block scales in five bits (``docs/format_nvfp4.md``)."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import byte_histogram, digest
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.formats.base import Format, Shape, check_counted, check_tail, output, share
from wcodec.packed import U8, Footer, PackedTensor, blob_bytes, tail_bytes

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

TILE = 64
BLOCK = 16
WINDOW = 32
BRICK_BYTES = {False: 2304, True: 2208}  # by whether the scales are windowed
PATCH_BYTES = 8
MAX_BRICKS = 1 << 24
_TOP = 0x80  # of a scale byte: where it is set, the signs of the block's nibbles are stored inverted


@dataclass(frozen=True)
class Plan:
    """What the encoder needs to know about a matrix.

    Attributes
    ----------
    base : int or None
        First value of the window; None for raw scales.
    exceptions : int
        Scale bytes outside the window.
    shape : tuple of int
        Logical shape, in weights.
    """

    base: int | None
    exceptions: int
    shape: Shape

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (N, K) of the matrix view."""
        return _matrix(self.shape)

    @property
    def brick_count(self) -> int:
        """Bricks of the matrix view."""
        rows, cols = self.matrix
        return -(-rows // TILE) * -(-cols // TILE)

    @property
    def brick_bytes(self) -> int:
        """Bytes of all bricks."""
        return self.brick_count * BRICK_BYTES[self.base is not None]

    @property
    def body_bytes(self) -> int:
        """Bytes of the bricks and patches."""
        return self.brick_bytes + PATCH_BYTES * self.exceptions

    @property
    def nbytes(self) -> int:
        """Exact length of the blob."""
        return blob_bytes(self.body_bytes, len(self.shape))

    @property
    def shrinks(self) -> bool:
        """Whether the format can hold the matrix, in fewer bytes than its two tensors take."""
        return self.brick_count < MAX_BRICKS and self.nbytes < content_bytes(math.prod(self.shape))

    @property
    def config(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        return {"base": self.base, "exceptions": self.exceptions, "shape": list(self.shape)}


def best_window(histogram: I64, width: int = WINDOW) -> tuple[int, int]:
    """First value of the best window, and how many scale bytes lie outside it.

    Parameters
    ----------
    histogram : numpy.ndarray of int64, shape (256,)
        Counts of the scale bytes.
    width : int
        Consecutive values that a window holds.
    """
    before = np.concatenate([[0], np.cumsum(histogram)])
    covered = before[width:] - before[:-width]
    base = int(np.argmax(covered))
    return base, int(before[-1] - covered[base])


def encode_pair(weight: U8, scale: U8, *, workers: int = 1) -> PackedTensor | None:
    """Pack an NVFP4 weight with its block scales.

    Parameters
    ----------
    weight : numpy.ndarray of uint8, shape (…, N, K / 2)
        Two E2M1 values per byte, even columns in the low nibble.
    scale : numpy.ndarray of uint8, shape (…, N, K / 16)
        E4M3 bytes.
    workers : int
        Threads to use.

    Returns
    -------
    PackedTensor or None
        None where the blob would not be smaller than the two tensors.

    Raises
    ------
    ValueError
        If the shapes do not belong together.
    """
    if not weight.ndim or weight.shape[:-1] != scale.shape[:-1] or weight.shape[-1] != 8 * scale.shape[-1]:
        raise ValueError(f"scales {scale.shape} do not belong to weights {weight.shape}")
    shape = (*weight.shape[:-1], 2 * weight.shape[-1])
    packing = Nvfp4S5()
    plan = packing.plan(byte_histogram(scale), shape)
    if not plan.shrinks:
        return None
    return packing.encode(np.concatenate([weight.reshape(-1), scale.reshape(-1)]), plan, workers=workers)


def content_bytes(numel: int) -> int:
    """Bytes that the two tensors of so many weights take."""
    return numel * 9 // 16


class Nvfp4S5(Format):
    """The format of NVFP4 weights with their block scales."""

    id = "nvfp4-s5"
    code = 2
    version = 1

    def plan(self, histogram: I64, shape: Shape) -> Plan:
        """Choose the window from the counts of the 256 scale bytes; `shape` counts weights."""
        shape = tuple(shape)
        if not shape or shape[-1] % BLOCK:
            raise UnsupportedError(f"the last axis of {list(shape)} is not a multiple of {BLOCK}")
        base, exceptions = best_window(histogram)
        windowed, raw = Plan(base, exceptions, shape), Plan(None, 0, shape)
        return windowed if windowed.body_bytes < raw.body_bytes else raw

    def encode(self, bits: U8, plan: Plan, *, workers: int = 1) -> PackedTensor:
        """Encode the bytes of a weight followed by those of its scales.

        Parameters
        ----------
        bits : numpy.ndarray of uint8, 1-D
            9/16 byte per weight of the plan's shape.
        plan : Plan
        workers : int
            Threads to use.
        """
        encoder = StreamEncoder(plan)
        weight, scale = _halves(bits, plan.shape)
        parts = share(
            -(-weight.shape[0] // TILE),
            TILE * plan.matrix[1],
            workers,
            lambda first, last: encoder.encode(
                weight[first * TILE : last * TILE], scale[first * TILE : last * TILE]
            ),
        )
        for bricks, patches in parts:
            encoder.append(bricks, patches)
        original_digest = digest(bits)
        tail = np.frombuffer(encoder.finish(original_digest), dtype=np.uint8)
        blob = np.concatenate([*(bricks for bricks, _ in parts), tail])
        return PackedTensor(blob, encoder.footer(original_digest))

    def decode(
        self, packed: PackedTensor, out: npt.NDArray[Any] | None = None, *, workers: int = 1
    ) -> npt.NDArray[Any]:
        """Return the weight's bytes followed by the scales' bytes.

        Parameters
        ----------
        packed : PackedTensor
        out : numpy.ndarray of uint8, 1-D, optional
            C-contiguous, 9/16 byte per weight.
        workers : int
            Threads to use.
        """
        out = output(out, (self.content_bytes(packed),), 1)
        weight, scale = _halves(out.reshape(-1).view(np.uint8), packed.shape)

        def decode(first: int, last: int) -> None:
            part = slice(first * TILE, last * TILE)
            self.decode_tiles(packed, first, last, weight[part], scale[part])

        share(-(-weight.shape[0] // TILE), TILE * packed.matrix[1], workers, decode)
        return out

    def decode_tiles(
        self, packed: PackedTensor, first: int, last: int, weight: U8 | None, scale: U8 | None
    ) -> None:
        """Decode row tiles `first` … `last` − 1.

        Parameters
        ----------
        packed : PackedTensor
        first, last : int
            Row tiles of 64 rows.
        weight : numpy.ndarray of uint8, shape (rows, K / 2), optional
            C-contiguous; left out where None.
        scale : numpy.ndarray of uint8, shape (rows, K / 16), optional
            C-contiguous; left out where None.

        Raises
        ------
        MalformedError
            If a patch is malformed. Consecutive calls for all row tiles look at every patch.
        """
        from wcodec.formats import _nvfp4_s5_jit as jit

        rows, cols = packed.matrix
        height, blocks, tile_columns = min(last * TILE, rows) - first * TILE, cols // BLOCK, -(-cols // TILE)
        bricks, patches = self.parts(packed)
        places, begin, end = patches[:, 0], first * tile_columns, last * tile_columns
        low = bisect_left(places, 256 * begin) if first else 0
        high = bisect_left(places, 256 * end) if last * TILE < rows else len(places)
        bricks, patches = bricks[begin:end], patches[low:high]
        bad = jit.check_patches(patches, begin, height, blocks)
        if bad >= 0:
            raise MalformedError(f"patch {low + bad} is malformed")
        base = int(packed.table[1]) if packed.table[0] else -1
        may_be_negative = base < 0 or base + WINDOW > _TOP or bool((patches[:, 1] >= _TOP).any())
        if weight is not None:
            jit.decode_nibbles(bricks, weight)
            if scale is None and may_be_negative:
                scale = np.empty((height, blocks), dtype=np.uint8)
        if scale is not None:
            jit.decode_scales(bricks, base, scale)
            jit.apply_patches(patches, begin, scale)
            if weight is not None and may_be_negative:
                jit.invert_signs(scale, weight)

    def decode_range(self, packed: PackedTensor, start: int, stop: int) -> U8:
        """See `Format.decode_range`: of the weight's bytes followed by the scales'."""
        nibbles = packed.numel // 2
        pieces = []
        if start < nibbles:
            pieces.append(self._decode_rows(packed, start, min(stop, nibbles), has_nibbles=True))
        if stop > nibbles:
            pieces.append(
                self._decode_rows(packed, max(start - nibbles, 0), stop - nibbles, has_nibbles=False)
            )
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.uint8)])

    def _decode_rows(self, packed: PackedTensor, start: int, stop: int, *, has_nibbles: bool) -> U8:
        """Bytes ``start … stop`` of the weight or of the scales."""
        rows, cols = packed.matrix
        unit = TILE * (cols // 2 if has_nibbles else cols // BLOCK)
        first, last = start // unit, -(-stop // unit)
        count = min(last * TILE, rows) - first * TILE
        found = np.empty((count, unit // TILE), dtype=np.uint8)
        wanted = (found, None) if has_nibbles else (None, found)
        self.decode_tiles(packed, first, last, *wanted)
        return found.reshape(-1)[start - first * unit : stop - first * unit]

    def parts(self, packed: PackedTensor) -> tuple[U8, U32]:
        """Views of the bricks, shape (bricks, bytes per brick), and of the patches, shape (patches, 2)."""
        rows, cols = packed.matrix
        size = BRICK_BYTES[bool(packed.table[0])]
        count = -(-rows // TILE) * -(-cols // TILE)
        end = count * size
        patches = packed.blob[end : end + 4 * packed.overflow_count].view("<u4").reshape(-1, 2)
        return packed.blob[:end].reshape(count, size), patches

    def content_bytes(self, packed: PackedTensor) -> int:
        """See `Format.content_bytes`: both tensors."""
        return content_bytes(packed.numel)

    def granule(self, packed: PackedTensor) -> int:
        """See `Format.granule`: one row tile of the weight and of the scales, which lie apart."""
        return max(content_bytes(TILE * packed.matrix[1]), 1)

    def validate(self, packed: PackedTensor) -> None:
        """See `Format.validate`."""
        footer = packed.footer
        if footer.dtype != "F4" or not footer.shape or footer.shape[-1] % BLOCK:
            raise MalformedError(f"nvfp4-s5 cannot hold {footer.dtype} {list(footer.shape)}")
        if footer.split != len(footer.shape) - 1:
            raise MalformedError(f"split axis {footer.split} is not the last of {list(footer.shape)}")
        mode, base = footer.table[0], footer.table[1]
        if (
            mode > 1
            or base > 256 - WINDOW
            or any(footer.table[2:])
            or (not mode and (base or footer.overflow_count))
        ):
            raise MalformedError(f"the table {list(footer.table)} names no way to store scales")
        if footer.overflow_count % 2:
            raise MalformedError(f"{footer.overflow_count} overflow words are no whole patches")
        rows, cols = packed.matrix
        bricks = -(-rows // TILE) * -(-cols // TILE)
        if bricks >= MAX_BRICKS:
            raise MalformedError(f"{bricks} bricks are more than patches can tell apart")
        check_tail(packed, bricks * BRICK_BYTES[bool(mode)] + 4 * footer.overflow_count)


class StreamEncoder:
    """Encodes a matrix piece by piece, in bounded memory.

    The blob is what `encode` returned for consecutive pieces, and what `finish` returns.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._patches: list[U32] = []
        self._patch_count = 0
        self._bricks = 0

    def encode(self, weight: U8, scale: U8) -> tuple[U8, U32]:
        """Encode row tiles on their own, for `append`: in any order, from any thread.

        Parameters
        ----------
        weight, scale : numpy.ndarray of uint8, shapes (rows, K / 2) and (rows, K / 16)
            A multiple of 64 rows unless they are the last.

        Returns
        -------
        bricks : numpy.ndarray of uint8, 1-D
        patches : numpy.ndarray of uint32, shape (patches, 2)
            Places count from these rows' first brick.
        """
        from wcodec.formats._nvfp4_s5_jit import encode_tiles

        base = self.plan.base
        count = -(-weight.shape[0] // TILE) * -(-self.plan.matrix[1] // TILE)
        bricks = np.empty((count, BRICK_BYTES[base is not None]), dtype=np.uint8)
        patches = np.empty((min(self.plan.exceptions, scale.size), 2), dtype=np.uint32)
        used = encode_tiles(weight, scale, -1 if base is None else base, 0, bricks, patches)
        check_counted(used, len(patches))
        return bricks.reshape(-1), patches[np.argsort(patches[:used, 0])]

    def append(self, bricks: U8, patches: U32) -> None:
        """Take the next row tiles that `encode` made, in order."""
        patches[:, 0] += 256 * self._bricks
        self._patches.append(patches)
        self._patch_count += len(patches)
        self._bricks += bricks.size // BRICK_BYTES[self.plan.base is not None]

    def footer(self, original_digest: bytes) -> Footer:
        """The footer, once every row was appended."""
        base = self.plan.base
        return Footer(
            Nvfp4S5.code,
            Nvfp4S5.version,
            "F4",
            self.plan.shape,
            len(self.plan.shape) - 1,
            bytes([base is not None, base or 0, 0, 0, 0, 0, 0, 0]),
            2 * self._patch_count,
            original_digest,
        )

    def finish(self, original_digest: bytes) -> bytes:
        """What follows the bricks: patches, padding, dims and footer.

        Parameters
        ----------
        original_digest : bytes
            xxh3-128 of the weight's bytes followed by those of its scales.
        """
        if self._bricks != self.plan.brick_count:
            raise ValueError(f"{self._bricks} of {self.plan.brick_count} bricks were appended")
        patches = b"".join(part.astype("<u4").tobytes() for part in self._patches)
        return patches + tail_bytes(self.plan.brick_bytes + len(patches), self.footer(original_digest))


def _matrix(shape: Shape) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _halves(bits: U8, shape: Shape) -> tuple[U8, U8]:
    """Views of the nibble bytes, shape (N, K / 2), and of the scale bytes, shape (N, K / 16)."""
    rows, cols = _matrix(shape)
    nibbles = rows * cols // 2
    if bits.size != content_bytes(rows * cols):
        raise ValueError(f"{bits.size} bytes are no NVFP4 weights of shape {list(shape)}")
    return bits[:nibbles].reshape(rows, cols // 2), bits[nibbles:].reshape(rows, cols // BLOCK)
