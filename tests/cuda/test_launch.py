"""Launch frames, checked on the host: a stand-in for the driver reads what a launch hands to it."""

from __future__ import annotations

import ctypes
import struct
import timeit
from types import SimpleNamespace
from typing import Any

import pytest

from wcodec.cuda import driver
from wcodec.cuda.module import Frame, Kernel
from wcodec.errors import WCodecError

Seen = dict[str, Any]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Replace ``cuLaunchKernelEx`` and return the dict it fills: `sizes` says how to read each parameter."""
    seen: Seen = {"sizes": [], "code": 0, "codes": []}
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(driver.LaunchConfig), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )

    def stand_in(config: Any, function: int, params: int, extra: int) -> int:
        c = config.contents
        count = len(seen["sizes"])
        pointers = (ctypes.c_void_p * count).from_address(params) if count else []
        seen["grid"], seen["block"] = list(c.grid), list(c.block)
        seen["shared_bytes"], seen["stream"] = c.shared_bytes, c.stream
        seen["attributes"] = {
            c.attributes[i].id: list(c.attributes[i].value[:3]) for i in range(c.attribute_count)
        }
        seen["addresses"] = list(pointers)
        seen["params"] = [ctypes.string_at(p, size) for p, size in zip(pointers, seen["sizes"], strict=True)]
        return seen["codes"].pop(0) if seen["codes"] else 0

    seen["function"] = prototype(stand_in)
    monkeypatch.setattr(driver, "function", lambda name: seen["function"])
    monkeypatch.setattr(driver, "error_name", lambda code: f"CUDA_ERROR_{code}")
    return seen


def kernel() -> Any:
    stand_in = SimpleNamespace(
        handle=ctypes.c_void_p(0x1234),
        cubin=SimpleNamespace(entry="tiny"),
        device=0,
        allow=lambda smem, cluster: None,
        _frames={},
    )
    stand_in.frame = lambda *args, **more: Kernel.frame(stand_in, *args, **more)
    return stand_in


def test_parameters_are_laid_out_as_the_abi_wants_them(launched: Seen) -> None:
    frame = Frame(kernel(), "iPTfq", 7, (32, 4), 1024, 1, False)
    tensor_map = bytes(range(128))
    launched["sizes"] = [4, 8, 128, 4, 8]
    frame(0xABC, -3, 0xDEAD_BEEF_0000, tensor_map, 1.5, -(2**40))
    assert launched["params"] == [
        struct.pack("<i", -3),
        struct.pack("<Q", 0xDEAD_BEEF_0000),
        tensor_map,
        struct.pack("<f", 1.5),
        struct.pack("<q", -(2**40)),
    ]
    assert launched["addresses"][2] % 64 == 0
    assert launched["grid"] == [7, 1, 1]
    assert launched["block"] == [32, 4, 1]
    assert (launched["shared_bytes"], launched["stream"]) == (1024, 0xABC)
    assert launched["attributes"] == {}


def test_a_frame_is_reused_with_new_values_and_streams(launched: Seen) -> None:
    frame = Frame(kernel(), "I", 1, 32, 0, 1, False)
    launched["sizes"] = [4]
    for value, stream in ((1, 10), (2, 20), (2**32 - 1, 0)):
        frame(stream, value)
        assert launched["params"] == [struct.pack("<I", value)]
        assert launched["stream"] == (stream or None)


def test_cluster_and_pdl_attributes(launched: Seen) -> None:
    Frame(kernel(), "", (8, 2), 64, 0, (2, 2), True)(1)
    assert launched["attributes"][driver.CLUSTER_DIMENSION] == [2, 2, 1]
    assert launched["attributes"][driver.PROGRAMMATIC_STREAM_SERIALIZATION][0] == 1


def test_attribute_ids_are_the_drivers() -> None:
    ids = pytest.importorskip("cuda.bindings.driver").CUlaunchAttributeID
    assert int(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) == driver.CLUSTER_DIMENSION
    assert (
        int(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        == driver.PROGRAMMATIC_STREAM_SERIALIZATION
    )


def test_a_failed_launch_names_the_kernel_and_the_error(launched: Seen) -> None:
    launched["codes"] = [701]
    with pytest.raises(WCodecError, match=r"launch of tiny failed: CUDA_ERROR_701 \(grid \[4, 1, 1\]"):
        Frame(kernel(), "", 4, 1024, 0, 1, False)(0)


def test_a_thread_without_a_context_gets_one(launched: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(driver, "call", lambda *args: calls.append(args))
    monkeypatch.setattr(driver, "primary_context", lambda device: f"context {device}")
    launched["codes"] = [201, 0]
    Frame(kernel(), "", 1, 32, 0, 1, False)(0)
    assert calls == [("cuCtxSetCurrent", "context 0")]


def test_a_call_costs_little_host_time(launched: Seen) -> None:
    frame = Frame(kernel(), "PPPPii", 132, 512, 0, 1, False)
    frame._launch = lambda *args: 0
    seconds = min(timeit.repeat(lambda: frame(0, 1, 2, 3, 4, 5, 6), number=2000, repeat=5)) / 2000
    assert seconds < 10e-6  # about 0.6 µs on an idle core
