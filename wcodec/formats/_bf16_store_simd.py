"""Vector code of `bf16-store` on the host: 128 weights at a time, as in ``_bf16_w12_simd.py``."""

# mypy: ignore-errors
# (numba types what is below itself)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from wcodec.formats._bf16_w12_simd import I64, _signature, _Vector

GROUP = 128  # weights per call: 64 bytes of pairs
ESCAPE = 15


@intrinsic  # type: ignore[misc]
def split_group(typingctx: Any, bits: Any, rest: Any, pairs: Any, table: Any, table_end: Any) -> Any:
    """Undo `join_group`, with its result: here `bits` is read, `rest` and `pairs` are written."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        bits, rest, pairs, *tables = args
        v = _Vector(builder)
        table = [entry for packed in tables for entry in v.table(packed)][:ESCAPE]
        symbols, escaped = [], ir.Constant(I64, 0)
        for half in range(2):
            words = [v.load(bits, 128 * half + 64 * quarter) for quarter in range(2)]
            low, high = (v.shuffle(*words, [2 * i + byte for i in range(64)]) for byte in range(2))
            own = builder.or_(builder.and_(high, v.splat(0x80)), builder.and_(low, v.splat(0x7F)))
            v.store(own, rest, 64 * half)
            exponent = builder.or_(builder.shl(high, v.splat(1)), builder.lshr(low, v.splat(7)))
            symbol, present = v.find(exponent, table)
            symbols.append(builder.select(present, symbol, v.splat(ESCAPE)))
            escaped = builder.or_(escaped, builder.bitcast(builder.not_(present), I64))
        even, odd = (v.shuffle(*symbols, [2 * i + j for i in range(64)]) for j in range(2))
        v.store(builder.or_(even, builder.shl(odd, v.splat(4))), pairs, 0)
        return escaped

    return _signature(types.uint64, 5), codegen


@intrinsic  # type: ignore[misc]
def join_group(typingctx: Any, pairs: Any, rest: Any, bits: Any, table: Any, table_end: Any) -> Any:
    """Join the symbols and rest bytes of `GROUP` weights.

    Parameters
    ----------
    pairs, rest, bits : uint64
        Addresses of 64 bytes of symbol pairs, 128 rest bytes, and 256 bytes for the weights.
    table, table_end : uint64
        The sixteen exponents by symbol, first one in the lowest byte; that of `ESCAPE` is a placeholder.

    Returns
    -------
    uint64
        Not zero if a symbol is `ESCAPE`.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        pairs, rest, bits, *tables = args
        v = _Vector(builder)
        table = [entry for packed in tables for entry in v.table(packed)]
        both = v.load(pairs, 0)
        symbols = [builder.and_(both, v.splat(15)), builder.lshr(both, v.splat(4))]
        escapes = [builder.icmp_unsigned("==", each, v.splat(ESCAPE)) for each in symbols]
        exponents = [v.lookup(each, table) for each in symbols]
        for half in range(2):
            # Weights 2i and 2i + 1 are the low and the high half of byte i.
            order = [32 * half + (i >> 1) + 64 * (i & 1) for i in range(64)]
            exponent, own = v.shuffle(*exponents, order), v.load(rest, 64 * half)
            low = builder.or_(builder.shl(exponent, v.splat(7)), builder.and_(own, v.splat(0x7F)))
            high = builder.or_(builder.lshr(exponent, v.splat(1)), builder.and_(own, v.splat(0x80)))
            for quarter in range(2):
                words = [32 * quarter + (i >> 1) + 64 * (i & 1) for i in range(64)]
                v.store(v.shuffle(low, high, words), bits, 128 * half + 64 * quarter)
        return builder.bitcast(builder.or_(*escapes), I64)

    return _signature(types.uint64, 5), codegen
