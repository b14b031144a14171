"""Small safetensors files with any header, for tests of what is built from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Tensor = tuple[str, tuple[int, ...], bytes]


def gaussian(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A BF16 tensor that packs."""
    values = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
    return "BF16", shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def noise(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A BF16 tensor of random bits: nearly all exceptions, so it stays raw."""
    bits = np.random.default_rng(seed).integers(0, 65536, shape, dtype=np.uint16)
    return "BF16", shape, bits.astype("<u2").tobytes()


def outliers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A BF16 tensor that packs although some quarters overflow."""
    dtype, _, data = gaussian(shape, seed)
    bits = np.frombuffer(data, dtype="<u2").reshape(shape).copy()
    rng = np.random.default_rng(seed + 1)
    for row in range(0, shape[0], 64):
        bits[row, :40] = rng.integers(0, 65536, bits[row, :40].shape)
    return dtype, shape, bits.tobytes()


def build(
    tensors: Mapping[str, Tensor],
    *,
    metadata: Any = ...,
    padding: bytes | None = None,
    trailing: bytes = b"",
    first: str = "metadata",
    reverse: bool = False,
) -> bytes:
    """Bytes of a safetensors file.

    Parameters
    ----------
    tensors : mapping of str to (dtype, shape, bytes)
        In the order of the data.
    metadata
        Value of ``__metadata__``; absent where it is `...`.
    padding : bytes, optional
        After the JSON text; by default spaces up to a multiple of 8.
    trailing : bytes
        After the last tensor.
    first : {"metadata", "tensors"}
        What the header begins with.
    reverse : bool
        Whether the header lists the tensors against the order of their data.
    """
    entries, offset = [], 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [offset, offset + len(data)]
        entries.append((name, {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}))
        offset += len(data)
    if reverse:
        entries.reverse()
    extra = [] if metadata is ... else [("__metadata__", metadata)]
    pairs = [*extra, *entries] if first == "metadata" else [*entries, *extra]
    text = json.dumps(dict(pairs), ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8) if padding is None else padding
    return len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values()) + trailing


def write(path: Path, tensors: Mapping[str, Tensor], **how: Any) -> Path:
    """Write what `build` returns."""
    path.write_bytes(build(tensors, **how))
    return path


def mixed(seed: int = 0) -> dict[str, Tensor]:
    """Tensors of many kinds: packed, raw, empty, scalar, odd, not BF16."""
    rng = np.random.default_rng(seed)
    return {
        "embed": gaussian((250, 128), seed),
        "odd.u8": ("U8", (3,), b"\1\2\3"),
        "norm": gaussian((96,), seed + 1),
        "scalar": ("F32", (), rng.bytes(4)),
        "layers.0.weight": outliers((256, 190), seed + 2),
        "none": ("BF16", (0,), b""),
        "none.2d": ("F32", (2, 0), b""),
        "noise": noise((64, 64), seed + 3),
        "f64": ("F64", (5,), rng.bytes(40)),
        "fp4": ("F4", (6, 4), rng.bytes(12)),
        "fp8": ("F8_E4M3", (7,), rng.bytes(7)),
        "future": ("Q9_Z", (3, 3), rng.bytes(11)),
        "layers.1.weight": gaussian((64, 2, 32), seed + 4),
        "flags": ("BOOL", (2,), b"\0\1"),
        'höher/名前 \\ " x': gaussian((128, 60), seed + 5),
    }
