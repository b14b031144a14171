"""Memory of packing does not grow with the file, and offsets beyond 4 GiB work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.container.nvfp4files import nibbles, scales
from tests.container.weightfiles import build, gaussian
from wcodec.container import PackedFile, pack_file
from wcodec.container.atomic import AtomicFile

# VmHWM, not ru_maxrss: a child inherits the latter from the process that started it.
PEAK = """
import re, sys
from pathlib import Path
from wcodec.container import pack_file
result = pack_file(sys.argv[1], sys.argv[2], workers=2)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(result.packed_tensors, result.bytes_in, int(peak[1]) * 1024)
"""


def repeated(path: Path, rows: int, cols: int) -> int:
    """A BF16 matrix of rows × cols that repeats 64 rows; returns the bytes of its file."""
    _, _, block = gaussian((64, cols))
    head = build({"w": ("BF16", (rows, cols), b"")}).split(b'"data_offsets":')[0][8:]
    text = head + b'"data_offsets":[0,%d]}}' % (2 * rows * cols)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(rows // 64):
            file.write(block)
    return path.stat().st_size


def packed_elsewhere(folder: Path) -> tuple[int, int, int]:
    """Pack `a` to `p` in a process of its own: tensors packed, bytes read, and the peak of its memory."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder / "a"), str(folder / "p")],
        capture_output=True,
        text=True,
        check=True,
    )
    packed, bytes_in, peak = map(int, done.stdout.split())
    return packed, bytes_in, peak


@pytest.mark.slow
def test_peak_memory_of_a_large_tensor(tmp_path: Path) -> None:
    """600 MB in one tensor, packed by two threads, in less than half of that; the JIT is most of it."""
    nbytes = repeated(tmp_path / "a", 64 * 600, 7680)
    assert nbytes > 580_000_000
    packed, bytes_in, peak = packed_elsewhere(tmp_path)
    assert (packed, bytes_in) == (1, nbytes)
    assert peak < 450 << 20
    (tmp_path / "a").unlink()


@pytest.mark.slow
def test_peak_memory_of_a_large_pair(tmp_path: Path) -> None:
    """330 MB in one NVFP4 weight and its scales, which come first in the file."""
    tiles, columns = 600, 15_360
    blocks = {
        "w.weight_scale_2": ("F32", (1,), np.ones(1, "<f4")),
        "w.weight_scale": ("F8_E4M3", (64 * tiles, columns // 16), scales((64, columns // 16), 1)),
        "w.weight": ("U8", (64 * tiles, columns // 2), nibbles((64, columns // 2), 0)),
    }
    header, at = {}, 0
    for name, (dtype, shape, block) in blocks.items():
        end = at + block.nbytes * (tiles if len(shape) == 2 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (tmp_path / "a").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape, block in blocks.values():
            for _ in range(tiles if len(shape) == 2 else 1):
                file.write(block.tobytes())
    nbytes = (tmp_path / "a").stat().st_size
    assert nbytes > 330_000_000
    packed, bytes_in, peak = packed_elsewhere(tmp_path)
    assert (packed, bytes_in) == (2, nbytes)
    assert peak < 450 << 20
    (tmp_path / "a").unlink()


@pytest.mark.slow
def test_more_than_2_to_the_31_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse 4.3 GB matrix of zeros that ends in real weights, and a tensor behind it.

    Its bricks are zeros but for the last, so a writer that leaves zeros out keeps it sparse.
    """
    write_at = AtomicFile.write_at

    def write_sparsely(self: AtomicFile, offset: int, data: Any) -> int:
        view = np.frombuffer(data, dtype=np.uint8)
        return write_at(self, offset, data) if view.any() else offset + view.size

    monkeypatch.setattr(AtomicFile, "write_at", write_sparsely)
    rows, cols = 65_600, 32_768
    assert rows * cols > 1 << 31
    nbytes = 2 * rows * cols
    _, _, ending = gaussian((64, 64))
    bits = np.frombuffer(ending, "<u2") & 0x07FF  # small exponents, beside zero in the window
    text = (
        b'{"w":{"dtype":"BF16","shape":[%d,%d],"data_offsets":[0,%d]},'
        b'"behind":{"dtype":"U8","shape":[3],"data_offsets":[%d,%d]}}'
    ) % (rows, cols, nbytes, nbytes, nbytes + 3)
    source = tmp_path / "a"
    with source.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(nbytes - bits.nbytes, os.SEEK_CUR)
        file.write(bits.tobytes() + b"abc")
    result = pack_file(source, tmp_path / "p", workers=2)
    assert (result.tensors, result.packed_tensors) == (2, 1)
    packed = PackedFile(tmp_path / "p")
    assert packed.size == source.stat().st_size == result.bytes_in
    assert packed.header.data_end > 3 << 30
    tail = packed.read_at(packed.size - 3 - bits.nbytes, bits.nbytes + 3).tobytes()
    assert tail == bits.tobytes() + b"abc"
    assert not packed.read_at(8 + len(text) + (1 << 32) - 5000, 4000).any()
    for path in tmp_path.iterdir():
        path.unlink()
