"""Encode one tensor, choosing the format."""

from __future__ import annotations

from typing import Any

from wcodec.bits import as_bits
from wcodec.errors import UnsupportedError
from wcodec.packed import PackedTensor


def encode(array: Any, *, format: str | None = None, workers: int = 1) -> PackedTensor:
    """Pack a BF16 tensor, bit for bit.

    Parameters
    ----------
    array : numpy.ndarray or torch.Tensor
        BF16 weights of any shape: uint16 bit patterns, ``ml_dtypes.bfloat16``, or ``torch.bfloat16``.
    format : {"bf16-w12", "bf16-store", "raw"}, optional
        Force a format. By default ``bf16-w12`` where it makes the tensor smaller, else ``raw``.
    workers : int, optional
        Threads to use.

    Returns
    -------
    PackedTensor

    Raises
    ------
    TypeError
        If the elements are not BF16 patterns.
    UnsupportedError
        If there is no such format for BF16 tensors.

    Examples
    --------
    >>> import numpy as np, wcodec
    >>> bits = np.full((64, 64), 0x3C23, dtype=np.uint16)
    >>> packed = wcodec.encode(bits)
    >>> packed.format, bool((packed.decode() == bits).all())
    ('bf16-w12', True)
    """
    from wcodec.formats.bf16_store import Bf16Store
    from wcodec.formats.bf16_w12 import Bf16W12, count_high_exponents
    from wcodec.formats.raw import Raw

    known = (Bf16W12.id, Bf16Store.id, Raw.id)
    if format not in (None, *known):
        raise UnsupportedError(
            f"format {format!r} does not hold BF16 tensors", mend=f"use {', '.join(known)}"
        )
    bits = as_bits(array)
    if format == Bf16Store.id:
        return Bf16Store().encode(bits, bits.shape, workers=workers)
    if format != Raw.id:
        packing = Bf16W12()
        plan = packing.plan_from_counts(count_high_exponents(bits, workers=workers), bits.shape)
        # Bricks alone may already be too large (thin or tiny tensors): do not encode to find that out.
        if format == Bf16W12.id or (bits.size and packing.blob_bytes(plan, 0) < bits.nbytes):
            packed = packing.encode(bits, plan, workers=workers)
            if format == Bf16W12.id or packed.nbytes < bits.nbytes:
                return packed
    return Raw().encode(bits, bits.shape)
