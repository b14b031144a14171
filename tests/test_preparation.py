"""`wcodec.prepare`, host side: what goes in, what comes out, and how it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import wcodec
from wcodec.errors import MalformedError, MismatchError, UnsupportedError, WCodecError

torch = pytest.importorskip("torch")

from wcodec import preparation, state  # noqa: E402  (they need torch)


def weight(n: int, k: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) * scale).bfloat16()


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def with_exceptions(n: int, k: int) -> torch.Tensor:
    """Weights whose first quarter overflows its patch word."""
    w = weight(n, k)
    w[:16, :40] *= 1e6
    return w


@pytest.mark.parametrize("shape", [(64, 64), (1, 4096), (160, 232), (128, 136), (1000, 96)])
def test_prepared_weights_are_the_host_encoders_and_decode_exactly(shape: tuple[int, int]) -> None:
    w = weight(*shape)
    p = wcodec.prepare({"w": w}, device="cpu")["w"]
    assert (p.n, p.k) == shape
    assert p.shape == shape
    np.testing.assert_array_equal(p.blob.numpy(), wcodec.encode(w).blob)
    np.testing.assert_array_equal(bits(p.to_bf16()), bits(w))


def test_overflowing_patches_survive() -> None:
    w = with_exceptions(192, 256)
    p = wcodec.prepare({"w": w}, device="cpu")["w"]
    assert p.format == "bf16-w12"
    assert p.footer.overflow_count > 100
    np.testing.assert_array_equal(bits(p.to_bf16()), bits(w))


def test_a_packed_tensor_is_taken_as_it_is() -> None:
    packed = wcodec.encode(weight(192, 256))
    read_only = wcodec.PackedTensor.from_blob(packed.blob.tobytes())
    p = wcodec.prepare({"w": read_only}, device="cpu")["w"]
    np.testing.assert_array_equal(p.blob.numpy(), packed.blob)
    again = wcodec.prepare({"w": p}, device="cpu")["w"]
    np.testing.assert_array_equal(again.blob.numpy(), packed.blob)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_raw(dtype: torch.dtype) -> None:
    w = torch.randn(24, 48).to(dtype)
    p = wcodec.prepare({"w": w}, device="cpu")["w"]
    assert (p.format, p.dtype) == ("raw", dtype)
    assert torch.equal(p.to_bf16(), w)


def test_what_does_not_get_smaller_stays_raw() -> None:
    w = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16).reshape(256, 256)).view(
        torch.bfloat16
    )
    p = wcodec.prepare({"w": w}, device="cpu")["w"]
    assert p.format == "raw"
    np.testing.assert_array_equal(bits(p.to_bf16()), bits(w))


def test_strided_sources_are_read_right() -> None:
    w = weight(256, 192)
    for view in (w.t(), w[::2, ::3], w[:, 64:], torch._neg_view(w)):
        p = wcodec.prepare({"w": view}, device="cpu")["w"]
        np.testing.assert_array_equal(bits(p.to_bf16()), bits(view.clone().resolve_neg()))
        np.testing.assert_array_equal(wcodec.encode(view).blob, p.blob.numpy())


def test_to_bf16_writes_where_it_is_told_and_says_when_it_cannot() -> None:
    w = weight(128, 64)
    p = wcodec.prepare({"w": w}, device="cpu")["w"]
    out = torch.full((128, 64), float("nan"), dtype=torch.bfloat16)
    assert p.to_bf16(out) is out
    np.testing.assert_array_equal(bits(out), bits(w))
    for bad in (out[:64], out.float(), out.t()):
        with pytest.raises(WCodecError, match="out"):
            p.to_bf16(bad)
    with pytest.raises(WCodecError, match="contiguous"):
        p.to_bf16(torch.empty(64, 128, dtype=torch.bfloat16).t())


def test_a_module_gives_its_linear_weights_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64))
    prepared = wcodec.prepare(model.bfloat16(), device="cpu")
    assert list(prepared) == ["0.weight", "2.weight"]
    assert len(prepared) == 2
    assert prepared.nbytes == sum(p.nbytes for p in prepared.values())
    assert "2 weights" in repr(prepared)
    with pytest.raises(KeyError, match=r"'1\.weight' is not in this state"):
        prepared["1.weight"]


def test_tied_weights_are_packed_once() -> None:
    w = weight(128, 64)
    prepared = wcodec.prepare({"a": w, "b": w, "c": w.clone()}, device="cpu")
    assert prepared["a"] is prepared["b"]
    assert prepared["a"] is not prepared["c"]


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_made_when_asked_for_are_told_apart(packed: bool) -> None:
    class Lazy(dict[str, int]):
        """Every tensor is freed before the next is made, often in the same place."""

        def items(self) -> Any:
            for name, seed in super().items():
                yield name, (wcodec.encode(weight(256, 256, seed)) if packed else weight(256, 256, seed))

    seeds = {f"w{seed}": seed for seed in range(8)}
    state = wcodec.prepare(Lazy(seeds), device="cpu")
    for name, seed in seeds.items():
        assert torch.equal(state[name].to_bf16(), weight(256, 256, seed))


def test_keep_both_holds_the_original() -> None:
    w = weight(128, 128)
    p = wcodec.prepare({"w": w}, device="cpu", keep="both")["w"]
    assert p.original is not None
    assert p.nbytes == p.blob.nbytes + w.nbytes
    assert torch.equal(p.to_bf16(), w)
    q = wcodec.prepare({"w": wcodec.encode(w)}, device="cpu", keep="both")["w"]
    assert q.original is not None
    assert torch.equal(q.original, w)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("keep", ["packed", "both"])
def test_weights_can_be_copied_and_pickled(how: str, keep: str) -> None:
    p = wcodec.prepare({"w": weight(128, 128)}, device="cpu", keep=keep, max_tokens=7)["w"]
    q = copy.deepcopy(p) if how == "deepcopy" else pickle.loads(pickle.dumps(p))
    assert q.blob.data_ptr() != p.blob.data_ptr()
    assert torch.equal(q.blob, p.blob)
    assert q.max_tokens == 7
    assert (q.original is None) == (p.original is None)


def test_explain_names_the_path() -> None:
    p = wcodec.prepare({"w": weight(64, 64)}, device="cpu")
    rows = p["w"].explain((1, 300))
    assert [row["tokens"] for row in rows] == [1, 300]
    assert all(row["path"] == "cpu" and "no GPU" in row["why"] for row in rows)
    assert set(p.explain()) == {"w"}


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        ({"w": torch.zeros(4, 4, dtype=torch.int32)}, {}, r"tensor 'w': no product with torch.int32"),
        ({"w": [1, 2]}, {}, r"tensor 'w': a list is no weight"),
        ({"w": torch.empty(4, 4, device="meta")}, {}, r"tensor 'w': the weight is on the meta device"),
        ([weight(4, 4)], {}, "cannot prepare a list"),
        ({}, {"keep": "all"}, "keep is 'all'; use one of packed, both"),
        ({}, {"max_tokens": 0}, "max_tokens is 0"),
        ({}, {"device": "meta"}, "does not run on meta"),
    ],
)
def test_bad_arguments_get_one_line(weights: object, settings: dict[str, object], message: str) -> None:
    with pytest.raises(WCodecError, match=message) as caught:
        wcodec.prepare(weights, **{"device": "cpu", **settings})
    assert "\n" not in str(caught.value)


def test_no_gpu_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        wcodec.prepare({})


def test_a_wrong_decode_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = wcodec.encode

    def one_bit_off(array: object) -> wcodec.PackedTensor:
        blob = real(array).blob.copy()
        blob[5] ^= 1
        return wcodec.PackedTensor.from_blob(blob)

    monkeypatch.setattr(preparation, "encode", one_bit_off)
    with pytest.raises(MismatchError, match="tensor 'w': rows 0"):
        wcodec.prepare({"w": weight(128, 64)}, device="cpu")


def damaged(kind: str) -> torch.Tensor:
    """A valid blob with one thing wrong."""
    blob = wcodec.encode(with_exceptions(192, 256), format="bf16-w12").blob.copy()
    patch = blob[6144:6160]
    assert patch[15] == 255
    if kind == "tag":
        patch[15] = 7
    elif kind == "range":
        patch[0:4] = 255
    elif kind == "count":
        patch[4:8] = (6, 0, 0, 0)
    elif kind == "footer":
        blob[-40] ^= 1
    elif kind == "padding":
        used = 12 * 6208 + 4 * wcodec.PackedTensor.from_blob(blob).overflow_count
        blob[used] = 1
    else:
        blob = blob[:-256]
    return torch.from_numpy(blob)


@pytest.mark.parametrize("kind", ["tag", "range", "count", "footer", "padding", "length"])
def test_damaged_blobs_are_refused_before_anything_follows_them(kind: str) -> None:
    with pytest.raises(MalformedError, match="tensor 'w'"):
        state.wrap_blob(damaged(kind), tensor="w")


def test_blobs_of_the_wrong_type_are_refused() -> None:
    blob = torch.from_numpy(wcodec.encode(weight(64, 64)).blob)
    for bad in (blob.view(torch.int32), blob.view(2, -1), blob[::2]):
        with pytest.raises(WCodecError, match="1-D uint8"):
            state.wrap_blob(bad)


def test_blobs_that_start_anywhere_are_refused() -> None:
    for w in (weight(64, 64), torch.ones(8, 8)):
        blob = wcodec.prepare({"w": w}, "cpu")["w"].blob
        odd = torch.cat([torch.zeros(1, dtype=torch.uint8), blob])[1:]
        with pytest.raises(WCodecError, match="starts on 16 bytes"):
            state.wrap_blob(odd)


def test_views_that_begin_together_are_not_tied() -> None:
    w = weight(128, 128)
    views = {"all": w, "rows": w[:64], "columns": w[:, :64], "t": w.t(), "again": w}
    views["negative"] = torch._neg_view(w)
    prepared = wcodec.prepare(views, device="cpu")
    for name, view in views.items():
        want = bits(view.clone().resolve_neg())
        np.testing.assert_array_equal(bits(prepared[name].to_bf16()), want, err_msg=name)
    assert prepared["again"] is prepared["all"]


def test_a_tensor_where_a_freed_one_lay_is_another() -> None:
    memory = np.empty((64, 64), np.int16)

    def made_when_asked() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            memory[:] = 0x3C00 + i
            yield str(i), torch.from_numpy(memory).view(torch.bfloat16)

    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return dict(made_when_asked())[name]

        def __iter__(self) -> Iterator[str]:
            return iter("012")

        def __len__(self) -> int:
            return 3

        def items(self) -> Any:
            return made_when_asked()

    prepared = wcodec.prepare(Lazy(), device="cpu")
    for i in range(3):
        assert (bits(prepared[str(i)].to_bf16()) == 0x3C00 + i).all()


def numbered(taken: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(12):
        taken.append(i)
        yield str(i), torch.full((8, 8), i, dtype=torch.bfloat16)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_lies_on_the_host_is_hashed_ahead_for_a_gpu(device: str) -> None:
    taken: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        found = preparation._hashed_ahead(numbered(taken), torch.device(device), pool)
        for i, (name, w, hashed) in enumerate(found):
            assert name == str(i)
            if device == "cpu":
                assert hashed is None
                assert len(taken) == i + 1  # one at a time
            else:
                assert hashed.result() == wcodec.encode(w, format="raw").digest
                assert len(taken) == min(i + 1 + preparation._HASHING_THREADS, 12)
