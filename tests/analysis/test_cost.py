"""GPUs by name, and what bytes cost."""

from __future__ import annotations

import pytest

from wcodec.analysis.cost import GPUS, find_gpu, judge
from wcodec.errors import UnsupportedError


@pytest.mark.parametrize(
    ("name", "is_"), [("H200", "H200"), ("h100 pcie", "H100-PCIe"), ("NVIDIA GeForce RTX 4090", "RTX-4090")]
)
def test_names_in_any_spelling(name: str, is_: str) -> None:
    assert find_gpu(name) is GPUS[is_]


@pytest.mark.parametrize(("given", "rate"), [("3.2TB/s", 3.2e12), ("864 gb/s", 8.64e11)])
def test_a_bandwidth_instead_of_a_name(given: str, rate: float) -> None:
    assert find_gpu(given).bandwidth == pytest.approx(rate)


@pytest.mark.parametrize("name", ["", "rtx", "H1", "0TB/s", "-1TB/s"])
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(UnsupportedError, match="H200"):
        find_gpu(name)


def test_every_gpu_is_found_by_its_own_name_and_has_a_source() -> None:
    for gpu in GPUS.values():
        assert find_gpu(gpu.name) is gpu
        assert gpu.source
        assert 1e11 < gpu.bandwidth < 2e13


def test_roofline() -> None:
    gpu = find_gpu("1TB/s")
    pack = judge(nbytes=4_000_000, packed_bytes=3_000_000, format="bf16-w12", leave_reason="", gpu=gpu)
    assert (pack.action, pack.saves_bytes, pack.read_us, pack.packed_read_us) == ("pack", 1_000_000, 4.0, 3.0)
    leave = judge(nbytes=4_000_000, packed_bytes=4_000_000, format="raw", leave_reason="why", gpu=gpu)
    assert (leave.action, leave.reason, leave.saves_bytes) == ("leave", "why", 0)
    assert leave.read_us == leave.packed_read_us
