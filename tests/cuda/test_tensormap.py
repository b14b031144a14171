"""Tensor maps: what reaches the driver, and what is refused before it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from wcodec.cuda import driver, tensormap
from wcodec.cuda.tensormap import TensorMapEncoder, encode_tiled
from wcodec.errors import WCodecError


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace ``cuTensorMapEncodeTiled`` by one that records its arguments and writes a pattern."""
    seen: dict[str, Any] = {"codes": []}
    word, pointer = ctypes.c_int, ctypes.c_void_p
    prototype = ctypes.CFUNCTYPE(word, pointer, word, ctypes.c_uint32, *[pointer] * 5, *[word] * 4)

    def stand_in(out: int, dtype: int, rank: int, address: int, *rest: int) -> int:
        shape, strides, box, steps, *enums = rest
        seen["aligned"] = out % 64 == 0
        seen["dtype"], seen["address"] = dtype, address
        seen["shape"] = list((ctypes.c_uint64 * rank).from_address(shape))
        seen["strides"] = list((ctypes.c_uint64 * (rank - 1)).from_address(strides))
        seen["box"] = list((ctypes.c_uint32 * rank).from_address(box))
        seen["steps"] = list((ctypes.c_uint32 * rank).from_address(steps))
        seen["enums"] = enums
        ctypes.memset(out, 7, 128)
        return seen["codes"].pop(0) if seen["codes"] else 0

    seen["function"] = prototype(stand_in)
    monkeypatch.setattr(driver, "function", lambda name: seen["function"])
    monkeypatch.setattr(driver, "error_name", lambda code: f"CUDA_ERROR_{code}")
    return seen


def test_dense_strides_and_defaults(encoded: dict[str, Any]) -> None:
    tensor_map = encode_tiled(0x7000_0000_0100, "bf16", (8192, 100, 3), (64, 128, 1))
    assert tensor_map.data == b"\7" * 128
    assert encoded["aligned"]
    assert encoded["address"] == 0x7000_0000_0100
    assert encoded["shape"] == [8192, 100, 3]
    assert encoded["strides"] == [16384, 1638400]
    assert encoded["box"] == [64, 128, 1]
    assert encoded["steps"] == [1, 1, 1]
    assert encoded["enums"] == [0, 3, 3, 0]


def test_given_strides_and_swizzle(encoded: dict[str, Any]) -> None:
    TensorMapEncoder("u8", (100, 4), (16, 2), strides=(112,), swizzle=0, l2_promotion=128)(4096)
    assert encoded["strides"] == [112]
    assert encoded["enums"] == [0, 0, 2, 0]


def test_enumerations_are_the_drivers() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    names = {
        "u8": "UINT8",
        "u16": "UINT16",
        "u32": "UINT32",
        "f16": "FLOAT16",
        "f32": "FLOAT32",
        "bf16": "BFLOAT16",
    }
    for ours, theirs in names.items():
        value = getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{theirs}")
        assert int(value) == tensormap._DTYPES[ours][0]
    swizzle = cuda.CUtensorMapSwizzle
    assert int(swizzle.CU_TENSOR_MAP_SWIZZLE_128B) == tensormap._SWIZZLES[128]
    assert int(swizzle.CU_TENSOR_MAP_SWIZZLE_32B) == tensormap._SWIZZLES[32]
    assert int(cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B) == tensormap._PROMOTIONS[256]


@pytest.mark.parametrize(
    ("shape", "box", "strides"),
    [((8,), (8, 1), None), ((8, 8), (512, 1), None), ((8, 8), (8, 8), (17,)), ((7, 8), (7, 8), None)],
)
def test_impossible_maps_are_refused(
    encoded: dict[str, Any], shape: tuple[int, ...], box: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    with pytest.raises(WCodecError, match="tensor map"):
        TensorMapEncoder("bf16", shape, box, strides=strides)


def test_a_driver_error_names_the_map(encoded: dict[str, Any]) -> None:
    encoded["codes"] = [1]
    with pytest.raises(WCodecError, match=r"tensor map of bf16 \[64, 8\].* at 0x8: CUDA_ERROR_1"):
        encode_tiled(8, "bf16", (64, 8), (64, 8))


def test_a_thread_without_a_context_gets_one(
    encoded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    monkeypatch.setattr(driver, "enter_context", entered.append)
    monkeypatch.setattr(tensormap, "device_index", lambda device: 3)
    encoded["codes"] = [driver.INVALID_CONTEXT, 0]
    assert encode_tiled(64, "bf16", (64, 8), (64, 8)).data == b"\7" * 128
    assert entered == [3]
