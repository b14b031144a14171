"""`nvfp4-s5`: NVFP4 nibbles as they are, block scales in five bits (``docs/format_nvfp4.md``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import digest
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.formats.base import Format, Shape, check_tail, output, share
from wcodec.packed import U8, Footer, PackedTensor, assemble, blob_bytes

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

TILE = 64
BLOCK = 16
WINDOW = 32
BRICK_BYTES = {False: 2304, True: 2208}  # by whether the scales are windowed
PATCH_BYTES = 8
MAX_BRICKS = 1 << 24


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
    def body_bytes(self) -> int:
        """Bytes of the bricks and patches."""
        rows, cols = self.matrix
        bricks = -(-rows // TILE) * -(-cols // TILE)
        return bricks * BRICK_BYTES[self.base is not None] + PATCH_BYTES * self.exceptions

    @property
    def nbytes(self) -> int:
        """Exact length of the blob."""
        return blob_bytes(self.body_bytes, len(self.shape))

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
    covered = np.lib.stride_tricks.sliding_window_view(histogram, width).sum(axis=1)
    base = int(np.argmax(covered))
    return base, int(histogram.sum() - covered[base])


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
    plan = packing.plan(np.bincount(scale.reshape(-1), minlength=256), shape)
    rows, cols = plan.matrix
    too_many = -(-rows // TILE) * -(-cols // TILE) >= MAX_BRICKS
    if too_many or plan.nbytes >= weight.nbytes + scale.nbytes:
        return None
    return packing.encode(np.concatenate([weight.reshape(-1), scale.reshape(-1)]), plan, workers=workers)


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
        from wcodec.formats._nvfp4_s5_jit import encode_tiles

        weight, scale = _halves(bits, plan.shape)
        rows, cols = plan.matrix
        tile_columns = -(-cols // TILE)
        windowed = plan.base is not None
        bricks = np.zeros((-(-rows // TILE) * tile_columns, BRICK_BYTES[windowed]), dtype=np.uint8)

        def encode(first: int, last: int) -> U32:
            part = slice(first * TILE, last * TILE)
            patches = np.empty((plan.exceptions, 2), dtype=np.uint32)
            used = encode_tiles(
                weight[part],
                scale[part],
                plan.base if plan.base is not None else -1,
                first * tile_columns,
                bricks[first * tile_columns : last * tile_columns],
                patches,
            )
            mine = patches[:used]
            return mine[np.argsort(mine[:, 0])]

        parts = share(-(-rows // TILE), TILE * cols, workers, encode)
        patches = np.concatenate([np.empty((0, 2), dtype=np.uint32), *parts]).astype("<u4")
        footer = Footer(
            self.code,
            self.version,
            "F4",
            plan.shape,
            len(plan.shape) - 1,
            bytes([windowed, plan.base or 0, 0, 0, 0, 0, 0, 0]),
            patches.size,
            digest(bits),
        )
        return PackedTensor(
            assemble([bricks.reshape(-1), patches.reshape(-1).view(np.uint8)], footer), footer
        )

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
        from wcodec.formats._nvfp4_s5_jit import decode_tiles

        out = output(out, (packed.numel * 9 // 16,), 1)
        weight, scale = _halves(out.reshape(-1).view(np.uint8), packed.shape)
        bricks, patches = self.parts(packed)
        tile_columns = -(-packed.matrix[1] // TILE)
        base = int(packed.table[1]) if packed.table[0] else -1
        if patches.size and (patches[:, 0] >= 256 * bricks.shape[0]).any():
            raise MalformedError("a patch lies outside the bricks")

        def decode(first: int, last: int) -> None:
            cut = np.searchsorted(patches[:, 0], [256 * first * tile_columns, 256 * last * tile_columns])
            part = slice(first * TILE, last * TILE)
            bad = decode_tiles(
                bricks[first * tile_columns : last * tile_columns],
                base,
                first * tile_columns,
                patches[cut[0] : cut[1]],
                weight[part],
                scale[part],
            )
            if bad >= 0:
                raise MalformedError(f"patch {cut[0] + bad} is malformed")

        if patches.shape[0] > 1 and (np.diff(patches[:, 0].astype(np.int64)) <= 0).any():
            raise MalformedError("the patches do not ascend")
        share(-(-weight.shape[0] // TILE), TILE * packed.matrix[1], workers, decode)
        return out

    def parts(self, packed: PackedTensor) -> tuple[U8, U32]:
        """Views of the bricks, shape (bricks, bytes per brick), and of the patches, shape (patches, 2)."""
        rows, cols = packed.matrix
        size = BRICK_BYTES[bool(packed.table[0])]
        count = -(-rows // TILE) * -(-cols // TILE)
        end = count * size
        patches = packed.blob[end : end + 4 * packed.overflow_count].view("<u4").reshape(-1, 2)
        return packed.blob[:end].reshape(count, size), patches

    def granule(self, packed: PackedTensor) -> int:
        """See `Format.granule`: the whole pair, since the scales come after all nibbles."""
        return max(packed.numel * 9 // 16, 1)

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


def _matrix(shape: Shape) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _halves(bits: U8, shape: Shape) -> tuple[U8, U8]:
    """Views of the nibble bytes, shape (N, K / 2), and of the scale bytes, shape (N, K / 16)."""
    rows, cols = _matrix(shape)
    nibbles = rows * cols // 2
    if bits.size != nibbles + rows * cols // BLOCK:
        raise ValueError(f"{bits.size} bytes are no NVFP4 weights of shape {list(shape)}")
    return bits[:nibbles].reshape(rows, cols // 2), bits[nibbles:].reshape(rows, cols // BLOCK)
