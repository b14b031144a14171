"""The wgmma product's decoder, run on the CPU from its CUDA source: exact registers, whatever the weights."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.kernels.matrices import MATRICES, crowded, matrix_of_bricks
from tests.kernels.simt import HostKernel
from wcodec.codec import encode
from wcodec.kernels.gemm import Bricks

u32 = ctypes.c_uint32
WEIGHTS = {**MATRICES, "crowded": lambda: crowded(208, 1024)}


@pytest.fixture(scope="module", params=[0, 1], ids=["late patches", "early patches"])
def decode(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    folder = tmp_path_factory.mktemp("gemm")
    return HostKernel("gemm_decode", {"EARLY_PATCHES": request.param}, folder, "simt_mma.hpp")


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_registers_hold_the_original_bits(decode: HostKernel, name: str) -> None:
    bits = WEIGHTS[name]()
    packed = encode(bits, format="bf16-w12")
    bricks = Bricks.of(packed, np.asarray(packed.blob).ctypes.data)
    count = -(-bricks.rows // 64) * -(-bricks.cols // 64)
    registers = np.full(count * 4096, 0xA5A5, np.uint16)
    pointers = (ctypes.c_void_p(bricks.address), ctypes.c_void_p(bricks.overflow))
    decode(count, 32, *pointers, *(u32(word) for word in bricks.table), registers)
    assert (matrix_of_bricks(registers, bits.shape) == bits).all()
