"""Proof on this machine: all 65,536 bit patterns through every format and every decoder that runs here."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wcodec.codec import encode
from wcodec.formats.byte_store import ByteStore
from wcodec.formats.nvfp4_s5 import WINDOW, Nvfp4S5
from wcodec.packed import PackedTensor
from wcodec.readers.base import first_line

PATTERNS = np.arange(65536, dtype=np.uint16)

#: Token counts that between them reach every product kernel.
TOKENS = (1, 8, 16, 32, 33, 64, 128, 200, 256, 300)


@dataclass(frozen=True)
class Result:
    """What one check found.

    Attributes
    ----------
    name : str
        What was checked.
    passed : bool or None
        None where the check cannot run on this machine.
    detail : str
        What was compared, or why it did not run.
    seconds : float
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float = 0.0


def run() -> Iterator[Result]:
    """Run every check, the host's first; results come as they are found."""
    for name, check in HOST_CHECKS.items():
        yield _timed(name, check)
    reason = _no_gpu_reason()
    for name, check in DEVICE_CHECKS.items():
        yield _timed(name, check) if reason is None else Result(name, None, reason)


def _timed(name: str, check: Callable[[], tuple[bool, str]]) -> Result:
    start = time.perf_counter()
    try:
        passed, detail = check()
    except Exception as error:  # a decoder that fails on good data has failed its check; the others go on
        passed, detail = False, f"{type(error).__name__}: {first_line(error)}"
    return Result(name, passed, detail, time.perf_counter() - start)


def _no_gpu_reason() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _together(seed: int = 0) -> np.ndarray:
    """All patterns in one matrix, in random order: most of them are exceptions."""
    return np.random.default_rng(seed).permutation(PATTERNS).reshape(256, 256)


def _alone() -> np.ndarray:
    """Each pattern alone in a quarter of otherwise Gaussian weights: every place, a patch or none."""
    rng = np.random.default_rng(1)
    normal = (rng.normal(0, 0.02, (16, 8192)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits = np.tile(normal, (512, 1))
    rows = np.arange(512)[:, None] * 16 + rng.integers(0, 16, (512, 128))
    cols = np.arange(128)[None, :] * 64 + rng.integers(0, 64, (512, 128))
    bits[rows, cols] = PATTERNS.reshape(512, 128)
    return bits


def _survives(bits: np.ndarray, format: str) -> tuple[PackedTensor, int]:
    """Pack, read the blob back as a stranger would, decode into poison; return how many weights differ."""
    packed = encode(bits, format=format)
    if packed.format != format:
        raise AssertionError(f"asked for {format}, got {packed.format}")
    out = np.full(bits.shape, 0xDEAD, dtype=np.uint16)
    PackedTensor.from_blob(packed.blob.tobytes()).decode(out)
    return packed, int((out != bits).sum())


def _verdict(wrong: int, total: int, what: str, passed: str | None = None) -> tuple[bool, str]:
    """Whether none is wrong, and `passed` (by default how many there are) or how many are."""
    if wrong:
        return False, f"{wrong:,} of {total:,} {what} differ"
    return True, passed or f"{total:,} {what}"


def _host(format: str, make: Callable[[], np.ndarray]) -> Callable[[], tuple[bool, str]]:
    def check() -> tuple[bool, str]:
        bits = make()
        packed, wrong = _survives(bits, format)
        held = f"{packed.overflow_count:,} in the overflow list" if packed.overflow_count else "all in bricks"
        found = f"{bits.size:,} weights, {held}" if format == "bf16-w12" else f"{bits.size:,} weights"
        return _verdict(wrong, bits.size, "weights", found)

    return check


def _nvfp4() -> tuple[bool, str]:
    """Every byte of two nibbles under every block scale, with the scales in a window and as they are."""
    nibbles = np.arange(256, dtype=np.uint8).repeat(256 * 8).reshape(256, 2048)
    scales = np.tile(PATTERNS[:256].astype(np.uint8), (256, 1))
    bits = np.concatenate([nibbles.reshape(-1), scales.reshape(-1)])
    packing = Nvfp4S5()
    raw = packing.plan(np.bincount(scales.reshape(-1), minlength=256), (256, 4096))
    wrong = 0
    for plan in (raw, replace(raw, base=100, exceptions=256 * (256 - WINDOW))):
        out = np.full(bits.size, 0xA5, dtype=np.uint8)
        PackedTensor.from_blob(packing.encode(bits, plan).blob.tobytes()).decode(out)
        wrong += int((out != bits).sum())
    return _verdict(wrong, bits.size, "bytes")


def _bytes() -> tuple[bool, str]:
    """Every pair of bytes, in random order, and one byte alone."""
    pairs = np.random.default_rng(3).permutation(PATTERNS).view(np.uint8)
    wrong = 0
    for data in (pairs, np.full(pairs.size, 0x7E, dtype=np.uint8)):
        out = np.full(data.size, 0xA5, dtype=np.uint8)
        PackedTensor.from_blob(ByteStore().encode(data, data.shape).blob.tobytes()).decode(out)
        wrong += int((out != data).sum())
    return _verdict(wrong, 2 * pairs.size, "bytes")


def _prepared(bits: np.ndarray) -> tuple[Any, Any]:
    import torch

    import wcodec

    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    state = wcodec.prepare({"w": weight}, device="cuda", max_tokens=256)
    return state["w"], weight


def _device_pack() -> tuple[bool, str]:
    """The GPU's packer writes the host encoder's bytes."""
    from wcodec.kernels.pack import pack

    sizes = []
    for bits in (_together(), _alone()):
        import torch

        weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).cuda()
        ours, theirs = encode(bits, format="bf16-w12").blob, pack(weight).cpu().numpy()
        if ours.tobytes() != theirs.tobytes():
            return False, "the blob differs from the host encoder's"
        sizes.append(ours.size)
    return True, f"{sum(sizes):,} bytes equal to the host encoder's"


def _device_decode() -> tuple[bool, str]:
    """The GPU decodes a whole matrix to the original bits."""
    import torch

    total = 0
    for bits in (_together(), _alone()):
        packed, _ = _prepared(bits)
        out = torch.full(bits.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        packed.to_bf16(out)
        wrong = int((out.view(torch.int16).cpu().numpy().view(np.uint16) != bits).sum())
        if wrong:
            return False, f"{wrong:,} of {bits.size:,} weights differ"
        total += bits.size
    return True, f"{total:,} weights"


def _device_products() -> tuple[bool, str]:
    """A product with a one-hot token reads a column of the weights back, pattern by pattern.

    Each row of the weight holds another pattern in one column, and Gaussian weights elsewhere. NaN payloads
    do not survive a multiplication and −0 + 0 is 0, so those compare by value; every other pattern must come
    back bit for bit.
    """
    import torch

    import wcodec

    rng = np.random.default_rng(2)
    column = 37
    bits = (rng.normal(0, 0.02, (65536, 128)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[:, column] = rng.permutation(PATTERNS)
    packed, _ = _prepared(bits)
    want = torch.from_numpy(bits[:, column].view(np.int16)).cuda().view(torch.bfloat16)
    by_value = want.isnan() | (want == 0)
    paths = []
    for tokens in TOKENS:
        x = torch.zeros((tokens, 128), dtype=torch.bfloat16, device="cuda")
        x[:, column] = 1
        y = wcodec.linear(x, packed)
        same = (y.view(torch.int16) == want.view(torch.int16)) | (
            by_value & (y.nan_to_num(1) == want.nan_to_num(1))
        )
        if not bool(same.all()):
            return False, f"{int((~same).sum()):,} of {same.numel():,} products differ at {tokens} tokens"
        paths.append(packed.explain((tokens,))[0]["path"])
    return True, f"{len(TOKENS)} token counts through {', '.join(dict.fromkeys(paths))}"


HOST_CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "raw, host": _host("raw", _together),
    "bf16-w12, host, all patterns together": _host("bf16-w12", _together),
    "bf16-w12, host, each pattern alone": _host("bf16-w12", _alone),
    "bf16-store, host, all patterns together": _host("bf16-store", _together),
    "bf16-store, host, each pattern alone": _host("bf16-store", _alone),
    "nvfp4-s5, host, every nibble under every scale": _nvfp4,
    "byte-store, host, every byte": _bytes,
}

DEVICE_CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "bf16-w12, GPU packer": _device_pack,
    "bf16-w12, GPU decoder": _device_decode,
    "bf16-w12, GPU products": _device_products,
}
