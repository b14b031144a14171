"""Vector code of `bf16-w12` on the host: one row group of a quarter at a time.

A row group is rows g and g + 8 of a quarter, 128 weights. It takes 64 contiguous bytes of each of the
quarter's three planes, so it is three 64-byte vectors on the packed side and four (two rows of 128 bytes) on
the plain side; everything between is constant byte shuffles. Written as LLVM vectors: the compiler lowers
them to what the CPU has (AVX-512 VBMI, AVX2, NEON). Addresses are plain integers, and nothing here checks a
bound: the callers do.
"""

# mypy: ignore-errors
# (numba types what is below itself)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I1, I8, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)
BYTES = ir.VectorType(I8, 64)
LANES = 4  # lanes of a row group

# Fragment order (docs/format.md 2.2): byte 16 t + 8 s + p of a plane is weight p of step s in lane t,
# with p = 4 (k + 8) + 2 (row + 8) + (k odd).
_SLOTS = [(t, s, p) for t in range(LANES) for s in range(2) for p in range(8)]


def _column(t: int, s: int, p: int) -> int:
    """Column, 0 … 31 inside the plane's two steps, of weight p of step s in lane t."""
    return 16 * s + 8 * (p >> 2) + 2 * t + (p & 1)


class _Vector:
    """The few vector operations the two directions need, on one IR builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def load(self, address: ir.Value, offset: int) -> ir.Value:
        return self.builder.load(self._pointer(address, offset), align=1)

    def store(self, value: ir.Value, address: ir.Value, offset: int) -> None:
        self.builder.store(value, self._pointer(address, offset), align=1)

    def _pointer(self, address: ir.Value, offset: int) -> ir.Value:
        moved = self.builder.add(address, ir.Constant(I64, offset))
        return self.builder.inttoptr(moved, BYTES.as_pointer())

    def shuffle(self, a: ir.Value, b: ir.Value, order: Sequence[int]) -> ir.Value:
        """Byte i of the result is byte order[i] of a followed by b."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), 64), list(order))
        return self.builder.shuffle_vector(a, b, mask)

    def constant(self, values: Sequence[int]) -> ir.Constant:
        return ir.Constant(BYTES, list(values))

    def splat(self, value: int) -> ir.Constant:
        return self.constant([value] * 64)

    def blend(self, mask: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """a where the bytes of `mask` are 0xFF, b where they are zero."""
        inverse = self.builder.xor(mask, self.splat(0xFF))
        return self.builder.or_(self.builder.and_(a, mask), self.builder.and_(b, inverse))

    def table(self, packed: ir.Value) -> list[ir.Value]:
        """The eight bytes of a u64, each repeated over a vector."""
        b = self.builder
        entries = []
        for i in range(8):
            entry = b.trunc(b.lshr(packed, ir.Constant(I64, 8 * i)), I8)
            one = b.insert_element(ir.Constant(BYTES, ir.Undefined), entry, ir.Constant(ir.IntType(32), 0))
            entries.append(self.shuffle(one, one, [0] * 64))
        return entries

    def bit(self, value: ir.Value, mask: int) -> ir.Value:
        """Lanes whose `mask` bit is set, as booleans."""
        return self.builder.icmp_unsigned("!=", self.builder.and_(value, self.splat(mask)), self.splat(0))

    def lookup(self, code: ir.Value, table: list[ir.Value]) -> ir.Value:
        """The entry of each code, of whose bits as many count as the table needs: a tree of selects."""
        level, mask = table, 1
        while len(level) > 1:
            chosen = self.bit(code, mask)
            mask *= 2
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [self.builder.select(chosen, odd, even) for even, odd in pairs]
        return level[0]

    def find(self, high: ir.Value, table: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Index of each `high` in the table (0 where absent), and where it is present."""
        b = self.builder
        code: ir.Value = self.splat(0)
        present: ir.Value = ir.Constant(ir.VectorType(I1, 64), [0] * 64)
        for i, entry in enumerate(table):
            equal = b.icmp_unsigned("==", high, entry)
            code = b.select(equal, self.splat(i), code)
            present = b.or_(present, equal)
        return code, present


def _signature(result: types.Type, arity: int) -> Any:
    return result(*([types.uint64] * arity))


@intrinsic  # type: ignore[misc]
def decode_group(typingctx: Any, planes: Any, low_row: Any, high_row: Any, table: Any) -> Any:
    """Decode one row group.

    Parameters
    ----------
    planes : uint64
        Address of the group's 64 bytes in the quarter's first plane; the others follow 512 and 1,024 later.
    low_row, high_row : uint64
        Addresses of 128 bytes each for rows g and g + 8, 64 weights.
    table : uint64
        The eight high-exponent values, first entry in the lowest byte.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        planes, low_row, high_row, packed_table = args
        v = _Vector(builder)
        table = v.table(packed_table)
        codes = v.load(planes, 1024)
        odd = v.constant([0xFF if p & 1 else 0 for _, _, p in _SLOTS])
        upper = v.constant([0xFF if p >= 4 else 0 for _, _, p in _SLOTS])
        for half in range(2):  # two steps per plane of low bytes
            low = v.load(planes, 512 * half)
            words = [16 * t + 4 * (2 * half + s) for t, s, _ in _SLOTS]
            pairs = v.shuffle(
                codes, codes, [w + (p >> 1) for w, (_, _, p) in zip(words, _SLOTS, strict=True)]
            )
            signs = v.shuffle(codes, codes, [w + (p & 3) for w, (_, _, p) in zip(words, _SLOTS, strict=True)])
            code = v.blend(odd, builder.lshr(pairs, v.splat(4)), pairs)
            sign = v.blend(upper, builder.shl(signs, v.splat(4)), signs)
            high = builder.or_(v.lookup(code, table), builder.and_(sign, v.splat(0x80)))
            for row, address in enumerate((low_row, high_row)):
                slot = {_column(t, s, p): 16 * t + 8 * s + p for t, s, p in _SLOTS if (p >> 1) & 1 == row}
                order = [byte for column in range(32) for byte in (slot[column], 64 + slot[column])]
                v.store(v.shuffle(low, high, order), address, 64 * half)
        return context.get_dummy_value()

    return _signature(types.void, 4), codegen


@intrinsic  # type: ignore[misc]
def encode_group(typingctx: Any, low_row: Any, high_row: Any, planes: Any, table: Any) -> Any:
    """Encode one row group; the parameters are those of `decode_group`.

    Returns
    -------
    uint64
        Not zero if a weight is outside the table: its low byte is written, its code and sign are zero.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        low_row, high_row, planes, packed_table = args
        v = _Vector(builder)
        table = v.table(packed_table)
        code, sign = [], []
        missing: ir.Value = ir.Constant(I64, 0)
        for half in range(2):
            rows = [v.load(address, 64 * half) for address in (low_row, high_row)]
            order = [64 * ((p >> 1) & 1) + 2 * _column(t, s, p) for t, s, p in _SLOTS]
            v.store(v.shuffle(*rows, order), planes, 512 * half)
            high = v.shuffle(*rows, [byte + 1 for byte in order])
            index, present = v.find(builder.and_(high, v.splat(0x7F)), table)
            code.append(index)
            sign.append(builder.select(present, builder.and_(high, v.splat(0x80)), v.splat(0)))
            missing = builder.or_(missing, builder.bitcast(builder.not_(present), I64))
        # Byte b of word j of lane t: codes of weights 2b and 2b + 1, signs of weights 4 + b and b.
        words = [(t, j, b) for t in range(LANES) for j in range(4) for b in range(4)]
        base = [64 * (j >> 1) + 16 * t + 8 * (j & 1) for t, j, _ in words]
        pick = [
            v.shuffle(*pair, [start + position(b) for start, (_, _, b) in zip(base, words, strict=True)])
            for pair, position in (
                (code, lambda b: 2 * b),
                (code, lambda b: 2 * b + 1),
                (sign, lambda b: b),
                (sign, lambda b: 4 + b),
            )
        ]
        even = builder.or_(pick[0], builder.lshr(pick[3], v.splat(4)))
        odd = builder.or_(builder.shl(pick[1], v.splat(4)), pick[2])
        v.store(builder.or_(even, odd), planes, 1024)
        return missing

    return _signature(types.uint64, 4), codegen


@intrinsic  # type: ignore[misc]
def count_outside(typingctx: Any, row: Any, table: Any) -> Any:
    """How many of the 64 weights at address `row` are outside the table."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        row, packed_table = args
        v = _Vector(builder)
        high = v.shuffle(v.load(row, 0), v.load(row, 64), [2 * i + 1 for i in range(64)])
        _, present = v.find(builder.and_(high, v.splat(0x7F)), v.table(packed_table))
        return builder.ctpop(builder.bitcast(builder.not_(present), I64))

    return _signature(types.uint64, 2), codegen
