"""The decode header of the GPU kernels, compiled for the CPU: proof of the bits where there is no GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from wcodec.codec import encode
from wcodec.formats.bf16_w12 import Bf16W12
from wcodec.packed import PackedTensor

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(scope="module")
def host_decoder(tmp_path_factory):
    """`decode(packed)` through `bf16_w12.cuh`."""
    if COMPILER is None:
        pytest.skip("no C++ compiler on this machine")
    library = tmp_path_factory.mktemp("header") / "decoder.so"
    headers = resources.files("wcodec.decoders_cuda")
    source = Path(__file__).with_name("host_decoder.cpp")
    subprocess.run(
        [
            COMPILER,
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            f"-I{headers}",
            source,
            "-o",
            library,
        ],
        check=True,
    )
    compiled = ctypes.CDLL(str(library)).decode_bricks

    def decode(packed: PackedTensor) -> np.ndarray:
        rows, cols = packed.matrix
        bricks, overflow = Bf16W12().parts(packed)
        out = np.full((rows, cols), 0xDEAD, dtype=np.uint16)
        overflow = np.ascontiguousarray(overflow)
        table = np.ascontiguousarray(packed.table)
        compiled(
            bricks.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_long(len(bricks)),
            ctypes.c_long(-(-cols // 64)),
            overflow.ctypes.data_as(ctypes.c_void_p),
            table.ctypes.data_as(ctypes.c_void_p),
            out.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_long(rows),
            ctypes.c_long(cols),
        )
        return out.reshape(packed.shape)

    return decode


def test_all_patterns(host_decoder, rng):
    patterns = rng.permutation(np.arange(65536, dtype=np.uint16)).reshape(256, 256)
    np.testing.assert_array_equal(host_decoder(encode(patterns, format="bf16-w12")), patterns)


@pytest.mark.parametrize("fraction", [0, 0.0005, 0.006, 0.05, 1])
@pytest.mark.parametrize("shape", [(64, 64), (1, 15), (7, 232), (160, 17), (232, 65)])
def test_exceptions_and_odd_shapes(host_decoder, rng, shape, fraction):
    bits = (rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    outside = rng.random(shape) < fraction
    bits[outside] = rng.integers(0, 65536, outside.sum())
    np.testing.assert_array_equal(host_decoder(encode(bits, format="bf16-w12")), bits)
