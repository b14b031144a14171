"""`bf16-w12`: 12 bits per BF16 weight, exceptions patched in their brick (``docs/format.md`` section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wcodec.bits import digest
from wcodec.errors import MalformedError
from wcodec.formats._bf16_w12_layout import BRICK_BYTES as BRICK_BYTES
from wcodec.formats._bf16_w12_layout import TILE as TILE
from wcodec.formats.base import Format, Shape, check_counted, check_tail, output, share, split_axis
from wcodec.packed import U8, Footer, PackedTensor, blob_bytes, tail_bytes

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

TABLE_SIZE = 8
OVERFLOW_LIMIT = (1 << 32) - 1


def high_exponent_counts(histogram: I64) -> I64:
    """Counts of the 128 values of the 7 high exponent bits, from the counts of the 65,536 patterns."""
    return histogram.reshape(2, 128, 256).sum(axis=(0, 2))


@dataclass(frozen=True)
class Plan:
    """What the encoder needs to know about a matrix.

    Attributes
    ----------
    table : tuple of 8 int
        Values of the 7 high exponent bits that get a code, ascending.
    exceptions : int
        Weights outside the table.
    shape : tuple of int
        Logical shape.
    """

    table: tuple[int, ...]
    exceptions: int
    shape: Shape

    @property
    def kind(self) -> str:
        """``"range"`` if the values are consecutive, else ``"table"``."""
        return "range" if self.table[-1] - self.table[0] == TABLE_SIZE - 1 else "table"

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (N, K) of the matrix view."""
        axis = split_axis(self.shape, TILE)
        return math.prod(self.shape[:axis]), math.prod(self.shape[axis:])

    @property
    def brick_count(self) -> int:
        """Bricks of the matrix view."""
        rows, cols = self.matrix
        return -(-rows // TILE) * -(-cols // TILE)

    @property
    def config(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        return {"table": list(self.table), "exceptions": self.exceptions, "shape": list(self.shape)}


def count_high_exponents(bits: U16, *, workers: int = 1) -> I64:
    """Counts of the 128 values of the 7 high exponent bits, straight from the weights.

    Parameters
    ----------
    bits : numpy.ndarray of uint16
        C-contiguous, any shape.
    workers : int
        Threads to use.
    """
    from wcodec.formats._bf16_w12_jit import count_high_exponents

    flat = bits.reshape(-1)

    def count(first: int, last: int) -> I64:
        counts = np.zeros(128, dtype=np.int64)
        count_high_exponents(flat[first * TILE : last * TILE], counts)
        return counts

    return sum(share(-(-flat.size // TILE), TILE, workers, count), np.zeros(128, dtype=np.int64))


def choose_table(counts: I64) -> tuple[int, ...]:
    """Choose the eight high-exponent values (canonical: ``docs/format.md`` 2.1).

    Parameters
    ----------
    counts : numpy.ndarray of int64, shape (128,)
        From `high_exponent_counts`.
    """
    covered = np.lib.stride_tricks.sliding_window_view(counts, TABLE_SIZE).sum(axis=1)
    base = int(np.argmax(covered))
    frequent = np.argsort(-counts, kind="stable")[:TABLE_SIZE]
    if counts[frequent].sum() > covered[base]:
        return tuple(sorted(int(value) for value in frequent))
    return tuple(range(base, base + TABLE_SIZE))


class Bf16W12(Format):
    """The 12-bit format of BF16 matrices that the fused kernels read."""

    id = "bf16-w12"
    code = 1
    version = 1

    def plan(self, histogram: I64, shape: Shape) -> Plan:
        """See `Format.plan`."""
        return self.plan_from_counts(high_exponent_counts(histogram), shape)

    def plan_from_counts(self, counts: I64, shape: Shape) -> Plan:
        """Choose the table from the counts of the 128 values of the 7 high exponent bits."""
        table = choose_table(counts)
        return Plan(table, int(counts.sum() - counts[list(table)].sum()), tuple(shape))

    def encode(self, bits: npt.NDArray[Any], plan: Plan, *, workers: int = 1) -> PackedTensor:
        """Encode BF16 bit patterns.

        Parameters
        ----------
        bits : numpy.ndarray of uint16
            C-contiguous, of the plan's shape.
        plan : Plan
        workers : int
            Threads to use.

        Returns
        -------
        PackedTensor
        """
        encoder = StreamEncoder(plan, workers=workers)
        blob = np.empty(blob_bytes(encoder.brick_bytes, len(plan.shape)), dtype=np.uint8)
        encoder.feed(bits.reshape(plan.matrix), out=blob[: encoder.brick_bytes])
        tail = np.frombuffer(encoder.finish(digest(bits)), dtype=np.uint8)
        if encoder.brick_bytes + tail.size == blob.size:
            blob[encoder.brick_bytes :] = tail
        else:  # an overflow list follows the bricks
            blob = np.concatenate([blob[: encoder.brick_bytes], tail])
        return PackedTensor(blob, encoder.footer(digest_bytes(blob)))

    def blob_bytes(self, plan: Plan, overflow_count: int) -> int:
        """Exact length of the blob that `encode` returns, given the overflow count (see `count_overflow`)."""
        return blob_bytes(plan.brick_count * BRICK_BYTES + 4 * overflow_count, len(plan.shape))

    def count_overflow(self, rows: U16, plan: Plan) -> int:
        """Overflow entries of some rows of the matrix view, without encoding them.

        Parameters
        ----------
        rows : numpy.ndarray of uint16, shape (rows, K)
            Row tiles: a multiple of 64 rows, or the last rows of the matrix.
        plan : Plan
        """
        from wcodec.formats._bf16_w12_jit import count_overflow

        return int(count_overflow(rows, np.array(plan.table, dtype=np.uint8))) if plan.exceptions else 0

    def decode(
        self, packed: PackedTensor, out: npt.NDArray[Any] | None = None, *, workers: int = 1
    ) -> npt.NDArray[Any]:
        """See `Format.decode`; `workers` threads share the row tiles."""
        out = output(out, packed.shape, 2)
        rows = out.view(np.uint16).reshape(packed.matrix)

        def decode(first: int, last: int) -> None:
            self.decode_tiles(packed, first, last, rows[first * TILE : last * TILE])

        share(-(-rows.shape[0] // TILE), TILE * rows.shape[1], workers, decode)
        return out

    def decode_tiles(self, packed: PackedTensor, first: int, last: int, out: U16) -> None:
        """Decode row tiles `first` … `last` − 1 into `out`, their rows of the matrix view.

        Parameters
        ----------
        packed : PackedTensor
        first, last : int
            Row tiles of 64 rows.
        out : numpy.ndarray of uint16, shape (rows, K)
            C-contiguous.

        Raises
        ------
        MalformedError
            If a patch word is malformed.
        """
        from wcodec.formats._bf16_w12_jit import decode_rows

        tile_columns = -(-out.shape[1] // TILE)
        bricks, overflow = self.parts(packed)
        bad = decode_rows(bricks[first * tile_columns : last * tile_columns], packed.table, overflow, out)
        if bad >= 0:
            raise MalformedError(f"the patch word of brick {first * tile_columns + bad} is malformed")

    def granule(self, packed: PackedTensor) -> int:
        """See `Format.granule`: one row tile."""
        return max(2 * TILE * packed.matrix[1], 1)

    def decode_range(self, packed: PackedTensor, start: int, stop: int) -> U8:
        """See `Format.decode_range`."""
        rows, cols = packed.matrix
        unit = self.granule(packed)
        first, last = start // unit, -(-stop // unit)
        out = np.empty((max(min(last * TILE, rows) - first * TILE, 0), cols), dtype=np.uint16)
        self.decode_tiles(packed, first, last, out)
        return out.reshape(-1).view(np.uint8)[start - first * unit : stop - first * unit]

    def parts(self, packed: PackedTensor) -> tuple[U8, U32]:
        """Views of the bricks, shape (bricks, 6208), and of the overflow list."""
        rows, cols = packed.matrix
        count = -(-rows // TILE) * -(-cols // TILE)
        bricks = packed.blob[: count * BRICK_BYTES].reshape(count, BRICK_BYTES)
        start = count * BRICK_BYTES
        return bricks, packed.blob[start : start + 4 * packed.overflow_count].view("<u4")

    def validate(self, packed: PackedTensor) -> None:
        """See `Format.validate`."""
        footer = packed.footer
        if footer.dtype != "BF16":
            raise MalformedError(f"bf16-w12 cannot hold {footer.dtype}")
        if footer.split != split_axis(footer.shape, TILE):
            raise MalformedError(f"split axis {footer.split} does not suit the shape {list(footer.shape)}")
        table = list(footer.table)
        if table != sorted(set(table)) or table[-1] > 0x7F:
            raise MalformedError(f"the table {table} is not ascending below 128")
        rows, cols = packed.matrix
        bricks = -(-rows // TILE) * -(-cols // TILE)
        check_tail(packed, bricks * BRICK_BYTES + 4 * footer.overflow_count)


class StreamEncoder:
    """Encodes a matrix piece by piece, in bounded memory.

    Feed row tiles in order, write what `feed` returns, then write what `finish` returns: together they are
    the blob. `Bf16W12.encode` is this class fed once.

    Parameters
    ----------
    plan : Plan
    workers : int
        Threads to use.
    """

    def __init__(self, plan: Plan, *, workers: int = 1) -> None:
        self.plan = plan
        self.workers = workers
        self.brick_bytes = plan.brick_count * BRICK_BYTES
        self._table = np.array(plan.table, dtype=np.uint8)
        self._overflow: list[U32] = []
        self._overflow_count = 0
        self._bricks_left = plan.brick_count

    def feed(self, rows: U16, out: U8 | None = None) -> U8:
        """Encode the next rows.

        Parameters
        ----------
        rows : numpy.ndarray of uint16, shape (rows, K)
            A multiple of 64 rows unless they are the last.
        out : numpy.ndarray of uint8, optional
            Where to write the bricks.

        Returns
        -------
        numpy.ndarray of uint8, 1-D
            The bricks.
        """
        total, cols = self.plan.matrix
        tile_columns, tiles = -(-cols // TILE), -(-rows.shape[0] // TILE)
        is_last = tiles * tile_columns == self._bricks_left
        if rows.shape[1] != cols or (rows.shape[0] % TILE and not is_last):
            raise ValueError(f"rows {rows.shape} do not continue a {total} × {cols} matrix by row tiles")
        if out is None:
            out = np.empty(tiles * tile_columns * BRICK_BYTES, dtype=np.uint8)
        brick_row = tile_columns * BRICK_BYTES

        def encode(first: int, last: int) -> tuple[U8, U32]:
            return self.encode(rows[first * TILE : last * TILE], out[first * brick_row : last * brick_row])

        for bricks, overflow in share(tiles, TILE * cols, self.workers, encode):
            self.append(bricks, overflow)
        return out

    def encode(self, rows: U16, out: U8 | None = None) -> tuple[U8, U32]:
        """Encode row tiles on their own, for `append`: in any order, from any thread.

        Parameters
        ----------
        rows, out
            As for `feed`.

        Returns
        -------
        bricks : numpy.ndarray of uint8, 1-D
            Complete but for overflow starts, which count from these rows' first entry.
        overflow : numpy.ndarray of uint32
        """
        from wcodec.formats._bf16_w12_jit import encode_rows

        bricks = -(-rows.shape[0] // TILE) * -(-rows.shape[1] // TILE)
        if out is None:
            out = np.empty(bricks * BRICK_BYTES, dtype=np.uint8)
        overflow = np.empty(min(self.plan.exceptions, rows.size), dtype=np.uint32)
        used = encode_rows(rows, self._table, out.reshape(bricks, BRICK_BYTES), overflow)
        check_counted(used, overflow.size)
        return out, overflow[:used].copy()

    def append(self, bricks: U8, overflow: U32) -> None:
        """Take the next row tiles that `encode` made, in order; completes `bricks` in place."""
        from wcodec.formats._bf16_w12_jit import shift_overflow

        if overflow.size and self._overflow_count:
            shift_overflow(bricks.reshape(-1, BRICK_BYTES), self._overflow_count)
        if overflow.size:
            self._overflow.append(overflow)
            self._overflow_count += overflow.size
        self._bricks_left -= bricks.size // BRICK_BYTES

    @property
    def overflow_count(self) -> int:
        """Overflow entries of the rows so far."""
        return self._overflow_count

    def footer(self, original_digest: bytes) -> Footer:
        """The footer as far as it is known: complete once every row was fed."""
        return Footer(
            Bf16W12.code,
            Bf16W12.version,
            "BF16",
            self.plan.shape,
            split_axis(self.plan.shape, TILE),
            bytes(self.plan.table),
            self._overflow_count,
            original_digest,
        )

    def finish(self, original_digest: bytes) -> bytes:
        """Everything that follows the bricks: overflow, padding, dims and footer.

        Parameters
        ----------
        original_digest : bytes
            xxh3-128 of the original tensor's bytes.
        """
        if self._bricks_left:
            raise ValueError(f"{self._bricks_left} of {self.plan.brick_count} bricks are missing")
        if self._overflow_count > OVERFLOW_LIMIT:
            raise ValueError("more overflow entries than a u32 can index: store the tensor raw")
        overflow = b"".join(part.astype("<u4").tobytes() for part in self._overflow)
        return overflow + tail_bytes(self.brick_bytes + len(overflow), self.footer(original_digest))


def digest_bytes(blob: U8) -> bytes:
    """The digest of the original that a finished blob holds."""
    return Footer.parse(blob).digest
