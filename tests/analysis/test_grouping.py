"""Which stored tensors are one logical tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from wcodec.analysis.grouping import Logical, group, kind_of
from wcodec.dtypes import DTYPES


@dataclass(frozen=True)
class T:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].bits // 8


def only(*tensors: T) -> Logical:
    (found,) = group(tensors)
    return found


def test_modelopt_nvfp4() -> None:
    found = only(
        T("q.weight", "U8", (64, 32)),
        T("q.weight_scale", "F8_E4M3", (64, 4)),
        T("q.weight_scale_2", "F32", ()),
        T("q.input_scale", "F32", ()),
    )
    assert (found.name, found.kind, found.shape) == ("q.weight", "nvfp4", (64, 64))
    assert found.parts == ("q.weight", "q.weight_scale", "q.weight_scale_2", "q.input_scale")
    assert found.nbytes == 64 * 32 + 64 * 4 + 8


def test_scale_before_codes_and_no_input_scale() -> None:
    found = only(T("w.weight_scale", "F8_E4M3", (64, 4)), T("w.weight", "U8", (64, 32)))
    assert (found.kind, found.parts) == ("nvfp4", ("w.weight", "w.weight_scale"))


def test_compressed_tensors_nvfp4_and_mxfp4() -> None:
    nv = only(
        T("q.weight_packed", "U8", (8, 16)),
        T("q.weight_scale", "F8_E4M3", (8, 2)),
        T("q.weight_global_scale", "F32", (1,)),
    )
    mx = only(T("q.weight_packed", "U8", (8, 16)), T("q.weight_scale", "U8", (8, 1)))
    assert (nv.kind, mx.kind) == ("nvfp4", "mxfp4")
    assert nv.shape == mx.shape == (8, 32)


def test_gpt_oss_blocks_of_their_own_axis() -> None:
    found = only(
        T("experts.gate_up_proj_blocks", "U8", (4, 6, 3, 16)),
        T("experts.gate_up_proj_scales", "U8", (4, 6, 3)),
    )
    assert (found.kind, found.shape, found.numel) == ("mxfp4", (4, 6, 96), 4 * 6 * 96)


def test_mxfp4_as_signed_bytes_beside_fp8_siblings() -> None:
    found = group(
        [
            T("experts.0.w1.weight", "I8", (32, 64)),
            T("experts.0.w1.scale", "F8_E8M0", (32, 4)),
            T("attn.weight", "F8_E4M3", (256, 256)),
            T("attn.weight_scale_inv", "F32", (2, 2)),
        ]
    )
    assert [(t.name, t.kind) for t in found] == [
        ("experts.0.w1.weight", "mxfp4"),
        ("attn.weight", "fp8"),
        ("attn.weight_scale_inv", "fp32"),
    ]


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        (T("q.weight", "U8", (64, 32)), T("q.weight_scale", "F8_E4M3", (64, 5))),  # ratio
        (T("q.weight", "U8", (64, 32)), T("q.weight_scale", "F8_E4M3", (32, 4))),  # rows
        (T("q.weight", "U8", (64, 32)), T("q.weight_scale", "F16", (64, 4))),  # dtype
        (T("q.weight", "U8", (64, 32)), T("k.weight_scale", "F8_E4M3", (64, 4))),  # sibling
        (T("q.weight", "I32", (64, 8)), T("q.weight_scale", "F8_E4M3", (64, 4))),  # codes are words
    ],
)
def test_names_alone_group_nothing(codes: T, scale: T) -> None:
    assert [t.kind for t in group([codes, scale])] == [kind_of(codes.dtype), kind_of(scale.dtype)]


def test_short_last_block_and_f4() -> None:
    assert only(T("q.weight", "F4", (2, 40)), T("q.weight_scale", "F8_E4M3", (2, 3))).shape == (2, 40)


def test_kinds_of_lonely_tensors() -> None:
    dtypes = ("BF16", "F16", "F32", "F64", "F8_E5M2", "U8", "I8", "BOOL", "Q4_1")
    kinds = ["bf16", "fp16", "fp32", "fp64", "fp8", "bytes", "int", "bool", "bytes"]
    assert [kind_of(dtype) for dtype in dtypes] == kinds
