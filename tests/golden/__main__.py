"""Write the golden files that are missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.formats import odd_blobs
from wcodec.codec import encode

HERE = Path(__file__).parent


def gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def tensors() -> dict[str, np.ndarray]:
    """Small tensors that between them use every feature of `bf16-w12`."""
    rng = np.random.default_rng(1)
    overflow = gaussian(rng, (65, 130))
    overflow[:20, 60:80] = rng.integers(0, 65536, (20, 20))
    pruned = gaussian(rng, (64, 64))
    pruned[rng.random(pruned.shape) < 0.5] = 0
    return {
        "overflow": overflow,
        "pruned": pruned,
        "row": gaussian(rng, (1, 200)),
        "stack": gaussian(rng, (2, 3, 64)),
        "empty": np.zeros((0, 3), np.uint16),
    }


def stored_tensors() -> dict[str, np.ndarray]:
    """Small tensors that between them use every way in which `bf16-store` codes a chunk."""
    rng = np.random.default_rng(3)
    escapes = gaussian(rng, (41, 101))
    escapes[::5, 7] = 0x7F80
    return {**tensors(), "escapes": escapes, "noise": rng.integers(0, 65536, (32, 64), dtype=np.uint16)}


def write(path: Path, data: bytes) -> None:
    if not path.exists():
        path.write_bytes(data)
        print("wrote", path.relative_to(HERE))


def main() -> None:
    good, bad = HERE / "bf16-w12-v1", HERE / "bf16-w12-bad"
    good.mkdir(exist_ok=True)
    bad.mkdir(exist_ok=True)
    for name, bits in tensors().items():
        write(good / f"{name}.blob", encode(bits, format="bf16-w12").blob.tobytes())
        write(good / f"{name}.bits", bits.tobytes())
    stored = HERE / "bf16-store-v2"
    stored.mkdir(exist_ok=True)
    for name, bits in stored_tensors().items():
        write(stored / f"{name}.blob", encode(bits, format="bf16-store").blob.tobytes())
        write(stored / f"{name}.bits", bits.tobytes())
    rng = np.random.default_rng(2)
    bits = gaussian(rng, (64, 64))
    bits[3, :9] = 0x7F80
    foreign = odd_blobs.blob(bits, [0, 9, 0x38, 0x39, 0x3A, 0x3B, 0x3C, 0x7E], rng, patch_more=0.01)
    write(good / "foreign.blob", foreign)
    write(good / "foreign.bits", bits.tobytes())
    small = encode(gaussian(rng, (64, 64)), format="bf16-w12").blob.tobytes()
    for name, blob in odd_blobs.bad_blobs(small):
        write(bad / f"{name.replace(' ', '-')}.blob", blob)


if __name__ == "__main__":
    main()
