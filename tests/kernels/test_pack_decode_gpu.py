"""The packer and the decoder on the GPU: bytes of the host encoder, bits of the source."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.matrices import MATRICES, few_exceptions, gaussian
from wcodec.codec import encode
from wcodec.cuda.compiler import compile_many
from wcodec.errors import UnsupportedError
from wcodec.kernels import decode, pack
from wcodec.packed import PackedTensor

torch = pytest.importorskip("torch")

INSTANCES = [
    ("empty.cu", {}),
    ("read_floor.cu", {"WC_UNROLL_LOADS": 8, "WC_ONCE": 0}),
    ("read_floor.cu", {"WC_UNROLL_LOADS": 8, "WC_ONCE": 1}),
    *(("bf16_w12_histogram.cu", pack.histogram_defines(vector)) for vector in (8, 1)),
    *(("bf16_w12_pack.cu", pack.pack_defines(first, vector)) for first in (True, False) for vector in (8, 1)),
    *(("bf16_w12_unpack.cu", decode.unpack_defines(vector)) for vector in (8, 1)),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_every_instance_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for cubin in compile_many([(source, defines, arch) for source, defines in INSTANCES]):
        assert cubin.resources.stack_bytes == cubin.resources.spill_store_bytes == 0
        # A thousand threads of an SM must fit: these kernels live on loads in flight.
        assert cubin.resources.registers <= 60, cubin.entry


def on_gpu(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16)


def decoded(packed: PackedTensor, blob: torch.Tensor, **options: object) -> np.ndarray:
    out = decode.unpack(blob, packed.matrix, bytes(packed.table), packed.overflow_count, **options)
    return out.view(torch.int16).cpu().numpy().view(np.uint16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MATRICES)
def test_blobs_equal_the_host_encoders_and_decode_to_the_source(name: str) -> None:
    bits = MATRICES[name]()
    expected = encode(bits, format="bf16-w12")
    blob = pack.pack(on_gpu(bits))
    assert blob.cpu().numpy().tobytes() == expected.blob.tobytes()
    assert (decoded(expected, blob) == bits).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), (1,), (300,), (3, 70, 64), (128, 3, 3, 5), (0, 5), (64, 0)])
def test_tensors_of_any_rank_fold_as_on_the_host(shape: tuple[int, ...]) -> None:
    bits = gaussian(1, int(np.prod(shape)) or 1)[:, : int(np.prod(shape))].reshape(shape)
    blob = pack.pack(on_gpu(bits))
    assert blob.cpu().numpy().tobytes() == encode(bits, format="bf16-w12").blob.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("offset", "stride"), [(0, 208), (8, 208), (1, 201), (3, 208)])
def test_rows_may_lie_apart_and_anywhere(offset: int, stride: int) -> None:
    bits = gaussian(100, 200, seed=9)
    store = torch.full((offset + 100 * stride,), -1.5, dtype=torch.bfloat16, device="cuda")
    view = store[offset:].as_strided((100, 200), (stride, 1), offset)
    view.copy_(on_gpu(bits))
    expected = encode(bits, format="bf16-w12")
    blob = pack.pack(view)
    assert blob.cpu().numpy().tobytes() == expected.blob.tobytes()
    store.fill_(float("nan"))
    out = decoded(expected, blob, out=view)
    assert (out == bits).all()
    if stride > 200:
        assert store[offset:].as_strided((100, stride - 200), (stride, 1), offset + 200).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(0, 64), (64, 200), (17, 18), (5, 5)])
def test_row_ranges(rows: tuple[int, int]) -> None:
    bits = few_exceptions(224, 136)
    expected = encode(bits, format="bf16-w12")
    assert (decoded(expected, pack.pack(on_gpu(bits)), rows=rows) == bits[slice(*rows)]).all()


@pytest.mark.gpu
def test_packing_twice_gives_the_same_bytes_on_any_stream() -> None:
    weight = on_gpu(few_exceptions(1024, 512))
    first = pack.pack(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = pack.pack(weight)
    side.synchronize()
    assert torch.equal(first, second)


@pytest.mark.gpu
def test_a_given_digest_is_taken_as_it_is() -> None:
    bits = gaussian(64, 64)
    expected = encode(bits, format="bf16-w12")
    blob = pack.pack(on_gpu(bits), digest=expected.digest)
    assert blob.cpu().numpy().tobytes() == expected.blob.tobytes()


def test_only_cuda_tensors_of_bf16_are_taken() -> None:
    with pytest.raises(UnsupportedError, match="takes CUDA tensors"):
        pack.pack(torch.zeros(4, 4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"torch\.bfloat16"):
        pack.pack(torch.zeros(4, 4))
