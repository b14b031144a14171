"""`nvfp4-s5`: round trips, the independent decoder, the decode header, canonical choices, malformed blobs."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wcodec.decoders_cuda
from tests.formats import reference_nvfp4
from wcodec.bits import byte_histogram
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.formats.nvfp4_s5 import (
    BRICK_BYTES,
    Nvfp4S5,
    Plan,
    StreamEncoder,
    best_window,
    encode_pair,
)
from wcodec.packed import Footer, PackedTensor, assemble

GOLDEN = Path(__file__).parents[1] / "golden" / "nvfp4-s5-v1"
BAD = Path(__file__).parents[1] / "golden" / "nvfp4-s5-bad"
Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def pair(rng: np.random.Generator, rows: int, cols: int, *, outside: float = 0.01) -> Pair:
    """Random nibbles; scale bytes mostly within 25 values."""
    weight = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    scale = np.clip(rng.normal(100, 4, (rows, cols // 16)), 88, 112).astype(np.uint8)
    wild = rng.random(scale.shape) < outside
    scale[wild] = rng.integers(0, 256, int(wild.sum()))
    return weight, scale


def encode(weight: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], base: int | None = -1) -> PackedTensor:
    """Encode by the canonical plan, or with the given window (None: raw scales)."""
    packing = Nvfp4S5()
    shape = (*weight.shape[:-1], weight.shape[-1] * 2)
    plan = packing.plan(np.bincount(scale.ravel(), minlength=256), shape)
    if base != -1:
        count = 0 if base is None else int(((scale < base) | (scale > base + 31)).sum())
        plan = Plan(base, count, shape)
    return packing.encode(np.concatenate([weight.ravel(), scale.ravel()]), plan)


def halves(packed: PackedTensor, weight: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> Pair:
    decoded = packed.decode()
    return decoded[: weight.size].reshape(weight.shape), decoded[weight.size :].reshape(scale.shape)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 150),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([-1, None, 0, 224]),
)
def test_round_trip(rows: int, blocks: int, outside: float, base: int | None) -> None:
    weight, scale = pair(np.random.default_rng(rows * blocks), rows, 16 * blocks, outside=outside)
    packed = encode(weight, scale, base)
    got = halves(PackedTensor.from_blob(packed.blob), weight, scale)
    assert np.array_equal(got[0], weight)
    assert np.array_equal(got[1], scale)
    assert packed.check(packed.decode())
    nibbles, scales = reference_nvfp4.decode(packed.blob.tobytes())
    assert np.array_equal(nibbles, weight)
    assert np.array_equal(scales, scale)


@pytest.mark.parametrize("base", [None, 0, 100, 224])
def test_every_scale_byte_with_every_nibble(base: int | None) -> None:
    scale = np.repeat(np.arange(256, dtype=np.uint8), 2).reshape(256, 2)
    block = (np.arange(0, 16, 2) | np.arange(1, 16, 2) << 4).astype(np.uint8)
    weight = np.tile(block, (256, 2))
    got = halves(encode(weight, scale, base), weight, scale)
    assert np.array_equal(got[0], weight)
    assert np.array_equal(got[1], scale)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (1 << 40, 0), (2, 5, 48), (32,)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    weight = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scale = rng.integers(0, 256, (*shape[:-1], shape[-1] // 16), dtype=np.uint8)
    packed = PackedTensor.from_blob(encode(weight, scale).blob)
    assert packed.shape == shape
    assert np.array_equal(packed.decode(), np.concatenate([weight.ravel(), scale.ravel()]))


def test_threads_write_the_same_bytes() -> None:
    weight, scale = pair(np.random.default_rng(2), 2048, 2048)
    bits = np.concatenate([weight.ravel(), scale.ravel()])
    packing = Nvfp4S5()
    plan = packing.plan(np.bincount(scale.ravel(), minlength=256), (2048, 2048))
    one, two = packing.encode(bits, plan), packing.encode(bits, plan, workers=3)
    assert np.array_equal(one.blob, two.blob)
    assert np.array_equal(packing.decode(two, workers=3), bits)


@pytest.mark.parametrize(("rows", "cols"), [(200, 192), (130, 80), (64, 64), (7, 16)])
@pytest.mark.parametrize("base", [None, 90, 224])
def test_any_range(rows: int, cols: int, base: int | None) -> None:
    rng = np.random.default_rng(rows)
    weight, scale = pair(rng, rows, cols, outside=0.2)
    packed, packing = encode(weight, scale, base), Nvfp4S5()
    content = weight.tobytes() + scale.tobytes()
    assert packing.content_bytes(packed) == len(content)
    ends = [0, weight.size, len(content), *rng.integers(0, len(content) + 1, 12)]
    for start in ends:
        for stop in ends:
            if start <= stop:
                got = packing.decode_range(packed, int(start), int(stop))
                assert got.tobytes() == content[start:stop]


def test_pieces_make_the_same_blob() -> None:
    weight, scale = pair(np.random.default_rng(9), 300, 144, outside=0.05)
    whole = encode(weight, scale)
    encoder = StreamEncoder(Nvfp4S5().plan(byte_histogram(scale), whole.shape))
    pieces = [encoder.encode(weight[at : at + 128], scale[at : at + 128]) for at in (256, 128, 0)]
    with pytest.raises(ValueError, match="0 of 15 bricks"):
        encoder.finish(whole.digest)
    body = b""
    for bricks, patches in reversed(pieces):
        encoder.append(bricks, patches)
        body += bricks.tobytes()
    assert body + encoder.finish(whole.digest) == whole.blob.tobytes()


def test_more_exceptions_than_were_counted_are_refused() -> None:
    weight, scale = pair(np.random.default_rng(9), 512, 1024, outside=0.5)
    content = np.concatenate([weight.reshape(-1), scale.reshape(-1)])
    with pytest.raises(MalformedError, match="exceptions where 10 were counted"):
        Nvfp4S5().encode(content, Plan(100, 10, (512, 1024)))


def test_consecutive_ranges_look_at_every_patch() -> None:
    weight, scale = pair(np.random.default_rng(10), 128, 128, outside=0.1)
    packed, packing = encode(weight, scale, 85), Nvfp4S5()
    count = packed.overflow_count // 2
    for index in range(count):
        blob = packed.blob.copy()
        words = blob[4 * 2208 :][: 8 * count].view("<u4").reshape(-1, 2)
        words[index, 0] = words[index - 1, 0]
        damaged = PackedTensor.from_blob(blob)
        starts = range(0, weight.size, 64 * 64)
        with pytest.raises(MalformedError, match="patch"):
            [packing.decode_range(damaged, start, start + 64 * 64) for start in starts]


def test_window_and_mode_are_canonical() -> None:
    counts = np.zeros(256, dtype=np.int64)
    counts[[10, 41]] = 5
    assert best_window(counts) == (10, 0)
    counts[42] = 5
    assert best_window(counts) == (10, 5)
    rng = np.random.default_rng(3)
    assert encode(*pair(rng, 64, 64)).table[0] == 1
    assert encode(*pair(rng, 64, 64, outside=1.0)).table[0] == 0
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        Nvfp4S5().plan(counts, (4, 8))


def test_bits_per_weight() -> None:
    weight, scale = pair(np.random.default_rng(4), 1024, 1024, outside=0.0007)
    packed = encode_pair(weight, scale)
    assert packed is not None
    assert packed.bits_per_weight <= 4.33
    # One row of a tile: 64 rows would be stored.
    assert encode_pair(weight[:1], scale[:1]) is None
    noisy = np.random.default_rng(5).integers(0, 256, scale.shape, dtype=np.uint8)
    assert encode_pair(weight, noisy) is None
    with pytest.raises(ValueError, match="do not belong"):
        encode_pair(weight, scale[:, :-1])


@pytest.mark.parametrize("windowed", [False, True])
def test_decode_header(tmp_path: Path, windowed: bool) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = Path(next(iter(wcodec.decoders_cuda.__path__)))
    library = tmp_path / "decoder.so"
    source = Path(__file__).with_name("nvfp4_host_decoder.cpp")
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{sources}",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    weight, scale = pair(np.random.default_rng(6), 64, 64, outside=0.0 if windowed else 0.5)
    base = 85 if windowed else None
    brick = Nvfp4S5().parts(encode(weight, scale, base))[0][0].copy()
    placed, both, placed_scales = (np.zeros(n, dtype=np.uint32) for n in (2048, 128, 128))
    pointer = ctypes.POINTER(ctypes.c_uint)
    ctypes.CDLL(str(library)).decode_brick(
        brick.ctypes.data_as(ctypes.c_char_p), int(windowed), base or 0,
        *(array.ctypes.data_as(pointer) for array in (placed, both, placed_scales)),
    )  # fmt: skip
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack([weight & 15, weight >> 4], -1).reshape(64, 64)
    signs = np.where((nibbles >> 3) ^ np.repeat(scale >> 7, 16, axis=1), -1.0, 1.0)
    wanted = signs * values[nibbles & 7]
    halves16 = placed.view(np.uint16).reshape(4, 32, 4, 4, 2)
    got = (halves16.astype(np.uint32) << 16).view(np.float32).astype(np.float64) * 2.0**126
    for quarter, lane, step, register, half in np.ndindex(4, 32, 4, 4, 2):
        row = 16 * quarter + lane // 4 + 8 * (register % 2)
        column = 16 * (lane % 4) + 4 * step + 2 * (register // 2) + half
        value = got[quarter, lane, step, register, half]
        assert value == wanted[row, column]
        assert np.signbit(value) == np.signbit(wanted[row, column])
    lanes = scale.reshape(4, 2, 8, 4).transpose(0, 2, 3, 1).reshape(128, 2)
    assert np.array_equal(both.view(np.uint8).reshape(128, 4)[:, :2], lanes)
    magnitude = (placed_scales.view(np.uint16).reshape(128, 2).astype(np.uint32) << 16).view(
        np.float32
    ) * 2.0**120
    exponent, mantissa = (lanes & 0x7F) >> 3, lanes & 7
    e4m3 = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7), mantissa * 2.0**-9)
    assert np.array_equal(magnitude, e4m3)


def test_products_are_exact_in_bf16() -> None:
    """E2M1 × E4M3 has at most six significant bits: the operand of the product is no approximation."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.arange(127)
    scales = np.where(codes >> 3, (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3) - 7.0), (codes & 7) * 2.0**-9)
    products = (values[:, None] * scales * 2.0**-8).astype(np.float32)
    assert not (products.view(np.uint32) & 0xFFFF).any()


def golden_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.blob"))


@pytest.mark.parametrize("name", golden_names())
def test_golden_blobs_decode(name: str) -> None:
    packed = PackedTensor.from_blob((GOLDEN / f"{name}.blob").read_bytes())
    wanted = (GOLDEN / f"{name}.bits").read_bytes()
    assert packed.decode().tobytes() == wanted
    nibbles, scales = reference_nvfp4.decode(packed.blob.tobytes())
    assert nibbles.tobytes() + scales.tobytes() == wanted


def test_golden_blobs_are_what_encode_writes() -> None:
    assert len(golden_names()) >= 3
    for name in golden_names():
        packed = PackedTensor.from_blob((GOLDEN / f"{name}.blob").read_bytes())
        bits = np.frombuffer((GOLDEN / f"{name}.bits").read_bytes(), dtype=np.uint8)
        scales = bits[packed.numel // 2 :]
        packing = Nvfp4S5()
        plan = packing.plan(np.bincount(scales, minlength=256), packed.shape)
        assert np.array_equal(packing.encode(bits, plan).blob, packed.blob)


@pytest.mark.parametrize("path", sorted(BAD.glob("*.blob")), ids=lambda path: path.stem)
def test_bad_blobs_are_refused(path: Path) -> None:
    with pytest.raises(MalformedError):
        PackedTensor.from_blob(path.read_bytes()).decode()


def bad_blobs() -> dict[str, bytes]:
    """Blobs that contradict themselves, by what is wrong with them."""
    weight, scale = pair(np.random.default_rng(7), 60, 48, outside=0.1)
    packed = encode(weight, scale, 85)
    body = packed.blob[: BRICK_BYTES[True] + 4 * packed.overflow_count]

    def blob(*, patches: np.ndarray[Any, Any] | None = None, **changes: Any) -> bytes:
        fields = {name: getattr(packed.footer, name) for name in Footer.__dataclass_fields__} | changes
        parts = [body[: BRICK_BYTES[True]], body[BRICK_BYTES[True] :]]
        if patches is not None:
            parts[1] = patches.astype("<u4").ravel().view(np.uint8)
            fields["overflow_count"] = patches.size
        return assemble(parts, Footer(**fields)).tobytes()

    patches = Nvfp4S5().parts(packed)[1].copy()
    moved = {name: patches.copy() for name in ("padding", "outside", "byte", "order")}
    moved["padding"][-1, 0] = 255  # row 63 of a matrix of 60
    moved["outside"][-1, 0] = 256
    moved["byte"][0, 1] = 256
    moved["order"][[0, 1]] = moved["order"][[1, 0]]
    return {
        "mode-2": blob(table=bytes([2, 85, 0, 0, 0, 0, 0, 0])),
        "window-past-255": blob(table=bytes([1, 225, 0, 0, 0, 0, 0, 0])),
        "table-not-zero": blob(table=bytes([1, 85, 0, 0, 0, 0, 0, 1])),
        "raw-with-patches": blob(table=bytes(8)),
        "half-a-patch": blob(overflow_count=packed.overflow_count - 1),
        "split-not-last": blob(split=0),
        "odd-columns": blob(shape=(60, 40)),
        "dtype": blob(dtype="U8"),
        **{f"patch-{name}": blob(patches=value) for name, value in moved.items()},
    }


def good_pairs() -> dict[str, Pair]:
    """Small pairs that between them use every feature."""
    rng = np.random.default_rng(8)
    return {
        "windowed": pair(rng, 70, 80),
        "raw": pair(rng, 64, 64, outside=1.0),
        "row": pair(rng, 1, 16),
    }


if __name__ == "__main__":
    for folder, blobs in ((BAD, bad_blobs()),):
        folder.mkdir(exist_ok=True)
        for label, data in blobs.items():
            (folder / f"{label}.blob").write_bytes(data)
    GOLDEN.mkdir(exist_ok=True)
    for label, (nibbles, scales) in good_pairs().items():
        (GOLDEN / f"{label}.blob").write_bytes(encode(nibbles, scales).blob.tobytes())
        (GOLDEN / f"{label}.bits").write_bytes(nibbles.tobytes() + scales.tobytes())
