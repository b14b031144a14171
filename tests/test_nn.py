"""`PackedLinear` and `compress_`: a module like any other, whose weight is packed."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest

import wcodec
from wcodec.errors import UnsupportedError, WCodecError

torch = pytest.importorskip("torch")

from wcodec.integrations.swapping import unpack_  # noqa: E402  (these need torch)
from wcodec.nn import PackedLinear, compress_  # noqa: E402
from wcodec.state import weight_of  # noqa: E402

nn = torch.nn


def linear(k: int = 128, n: int = 192, bias: bool = True, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(0.1)
    return layer.bfloat16()


def tokens(k: int = 128, m: int = 5) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(7)).bfloat16()


def expected(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out = x.float() @ layer.weight.detach().float().t()
    return (out if layer.bias is None else out + layer.bias.detach().float()).bfloat16()


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_layer_it_came_from(bias: bool) -> None:
    layer, x = linear(bias=bias), tokens()
    packed = PackedLinear.from_linear(layer)
    assert torch.equal(packed(x), expected(layer, x))
    assert (packed.in_features, packed.out_features) == (128, 192)
    assert (packed.bias is None) == (not bias)
    assert "format=bf16-w12" in repr(packed)
    assert packed.packed.nbytes < layer.weight.nbytes


def test_the_weight_shows_its_shape_and_nothing_to_change() -> None:
    layer = linear()
    packed = PackedLinear.from_linear(layer)
    w = packed.weight
    assert (w.shape, w.dtype, w.device.type, w.ndim) == (layer.weight.shape, torch.bfloat16, "cpu", 2)
    assert (w.size(0), w.size(), w.dim(), w.numel()) == (192, layer.weight.shape, 2, 192 * 128)
    assert torch.equal(w.to_bf16(), layer.weight)
    with pytest.raises(UnsupportedError, match=r"merged in place; call unpack\(\)"):
        w.data += 1
    with pytest.raises(UnsupportedError, match=r"add needs the unpacked weight; call unpack\(\)"):
        torch.add(w, 1)
    with pytest.raises(UnsupportedError, match=r"cannot be replaced; call unpack\(\)"):
        packed.weight = layer.weight


def test_unpack_gives_the_original_layer() -> None:
    layer, x = linear(), tokens()
    back = PackedLinear.from_linear(layer).unpack()
    assert type(back) is nn.Linear
    assert torch.equal(back.weight, layer.weight)
    assert torch.equal(back(x), layer(x))


@pytest.mark.filterwarnings("ignore:for bias")
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("target", ["same", "empty", "meta"])
def test_state_dicts_round_trip(assign: bool, target: str) -> None:
    layer, x = linear(), tokens()
    source = PackedLinear.from_linear(layer)
    saved = io.BytesIO()
    torch.save(source.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved)  # weights_only, the default
    assert set(loaded) == {"packed", "bias"}
    if target == "same":
        module = PackedLinear.from_linear(linear(seed=1))
        assert not torch.equal(module(x), expected(layer, x))
    else:
        module = PackedLinear(128, 192, device="meta" if target == "meta" else None)
    if target == "meta" and not assign:
        with pytest.raises(RuntimeError, match="load with assign=True"):
            module.load_state_dict(loaded)
        return
    module.load_state_dict(loaded, assign=assign)
    assert torch.equal(module(x), expected(layer, x))
    assert (module.packed.data_ptr() == loaded["packed"].data_ptr()) == assign


def test_a_blob_that_starts_anywhere_is_copied_to_where_kernels_can_read() -> None:
    layer, x = linear(), tokens()
    saved = PackedLinear.from_linear(layer).state_dict()
    saved["packed"] = torch.cat([torch.zeros(1, dtype=torch.uint8), saved["packed"]])[1:]
    module = PackedLinear(128, 192, device="meta")
    module.load_state_dict(saved, assign=True)
    assert module.packed.storage_offset() % 16 == 0
    assert torch.equal(module(x), expected(layer, x))


@pytest.mark.parametrize("first", [True, False])
def test_compiled_calls_find_a_blob_s_handle_whichever_module_goes(first: bool) -> None:
    modules = [PackedLinear.from_linear(linear()), PackedLinear(128, 192, device="meta")]
    modules[1].load_state_dict(modules[0].state_dict(), assign=True)
    handle = weakref.ref(weight_of(modules[0].packed))
    assert weight_of(modules[1].packed) is handle()
    del modules[0 if first else 1]
    assert weight_of(modules[0].packed) is handle()


def test_blobs_of_different_lengths_load() -> None:
    layer, x = linear(), tokens()
    with torch.no_grad():
        layer.weight[:16, :40] *= 1e6
    source, module = PackedLinear.from_linear(layer), PackedLinear.from_linear(linear(seed=1))
    assert source.packed.numel() != module.packed.numel()
    module.load_state_dict(source.state_dict())
    assert torch.equal(module(x), expected(layer, x))


def test_a_plain_checkpoint_is_packed_while_loading() -> None:
    layer, x = linear(), tokens()
    module = PackedLinear(128, 192)
    module.load_state_dict(layer.state_dict())
    assert torch.equal(module(x), expected(layer, x))


def test_what_cannot_be_loaded_is_said() -> None:
    module = PackedLinear(128, 192, bias=False)
    with pytest.raises(WCodecError, match="holds no weight yet; load a state dict"):
        module(tokens())
    with pytest.raises(RuntimeError, match=r"Missing key.*packed"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"does not fit \[192, 128\]"):
        module.load_state_dict(PackedLinear.from_linear(linear(64, 64, bias=False)).state_dict())
    broken = PackedLinear.from_linear(linear(bias=False)).state_dict()
    broken["packed"] = broken["packed"].clone()
    broken["packed"][-30] ^= 1
    with pytest.raises(RuntimeError, match="checksum"):
        module.load_state_dict(broken)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(
            {**PackedLinear.from_linear(linear(bias=False)).state_dict(), "other": torch.ones(1)}
        )


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("keep", ["packed", "both"])
def test_modules_can_be_copied_and_pickled(how: str, keep: str) -> None:
    layer, x = linear(), tokens()
    source = PackedLinear.from_linear(layer, keep=keep)
    source(x)
    if how == "deepcopy":
        module = copy.deepcopy(source)
    elif how == "pickle":
        module = pickle.loads(pickle.dumps(source))
    else:
        saved = io.BytesIO()
        torch.save(source, saved)
        saved.seek(0)
        module = torch.load(saved, weights_only=False)
    assert module.packed.data_ptr() != source.packed.data_ptr()
    del source
    handle = module._weight
    assert handle is not None  # compiled calls cannot make one
    assert weight_of(module.packed) is handle
    assert torch.equal(module(x), expected(layer, x))


def test_to_empty_then_load() -> None:
    layer, x = linear(), tokens()
    module = PackedLinear.from_linear(layer)
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.to("meta").to_empty(device="cpu")
    module.load_state_dict(saved)
    assert torch.equal(module(x), expected(layer, x))


def test_moves_and_casts_keep_the_weight() -> None:
    layer, x = linear(bias=False), tokens()
    module = PackedLinear.from_linear(layer)
    module.to("cpu").float().bfloat16().half()
    assert torch.equal(module(x), expected(layer, x))
    both = PackedLinear.from_linear(layer, keep="both").half()
    assert both.original is not None
    assert torch.equal(both.original, layer.weight)
    with pytest.raises(WCodecError, match="holds no weight yet"):
        module.to("meta")(x)


def test_gradients_pass_through_and_the_weight_is_frozen() -> None:
    layer, x = linear(), tokens().requires_grad_()
    module = PackedLinear.from_linear(layer)
    module(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0].float(), layer.weight.float().sum(0), atol=1e-2)
    assert [name for name, _ in module.named_parameters()] == ["bias"]


@pytest.mark.slow
def test_a_compressed_model_compiles_whole() -> None:
    model = nn.Sequential(linear(128, 192), nn.GELU(), linear(192, 128))
    x = tokens()
    compress_(model)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (1, 4, 9):
            assert torch.equal(compiled(x[:1].expand(m, -1)), model(x[:1].expand(m, -1)))


class Model(nn.Module):
    """Every kind of linear layer that `compress_` meets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.up, self.down = linear(128, 256), linear(256, 128, bias=False)
        self.again = self.up
        self.tiny = linear(4, 3)
        self.wide = nn.Linear(128, 64)
        self.attention = nn.MultiheadAttention(128, 2).bfloat16()
        self.head = linear(128, 256, bias=False)
        self.embed.bfloat16()
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.head(self.down(self.again(h)))


def test_compress_swaps_what_it_can_and_reports_the_rest() -> None:
    model, ids = Model(), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(ids)
    calls: list[int] = []
    model.up.register_forward_hook(lambda *args: calls.append(1))
    report = {entry.name: entry for entry in compress_(model)}
    reasons = {name: entry.reason for name, entry in report.items()}
    assert reasons == {
        "up": None,
        "down": None,
        "tiny": "would not get smaller",
        "wide": "its weight is torch.float32",
        "attention.out_proj": "is a NonDynamicallyQuantizableLinear",
        "head": "its weight is shared with another module",
    }
    assert isinstance(model.up, PackedLinear)
    assert model.up is model.again
    assert report["up"].after_bytes < 0.77 * report["up"].before_bytes
    assert report["head"].after_bytes == report["head"].before_bytes
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        after = model(ids)
    assert calls == [1]
    assert float((after.float() - before.float()).norm() / before.float().norm()) < 1e-2


def test_compress_leaves_what_it_is_told_to() -> None:
    model = Model()
    report = {entry.name: entry.reason for entry in compress_(model, skip=["d*", "head", "u", "UP"])}
    assert report["down"] == report["head"] == "skipped by name"
    assert type(model.down) is nn.Linear
    assert report["up"] is None


def test_hooks_stay_what_they_were() -> None:
    model = nn.Sequential(linear(128, 128))
    seen: list[str] = []
    keep = [
        model[0].register_forward_pre_hook(lambda *_: seen.append("pre")),
        model[0].register_forward_pre_hook(lambda *_, **__: seen.append("pre kwargs"), with_kwargs=True),
        model[0].register_forward_hook(lambda m, args, kwargs, out: seen.append("forward"), with_kwargs=True),
        model[0].register_forward_hook(lambda *_: seen.append("always"), always_call=True),
        model[0].register_full_backward_pre_hook(lambda *_: seen.append("backward pre")),
        model[0].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    called = ["pre", "pre kwargs", "forward", "always", "backward pre", "backward"]

    def step() -> list[str]:
        seen.clear()
        model(torch.randn(2, 128).bfloat16().requires_grad_()).sum().backward()
        return list(seen)

    assert step() == called
    compress_(model)
    assert isinstance(model[0], PackedLinear)
    assert step() == called
    unpack_(model)
    assert step() == called
    for handle in keep:
        handle.remove()
    assert step() == []


def test_compress_leaves_layers_whose_forward_was_replaced() -> None:
    model = Model()
    model.down.forward = model.down.forward
    assert {e.name: e.reason for e in compress_(model)}["down"] == "its forward was replaced"


def test_compress_frees_each_layer_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    model = nn.Sequential(*(linear(64, 64, seed=i) for i in range(4)))
    alive = [weakref.ref(layer.weight) for layer in model]
    seen: list[int] = []
    real = wcodec.preparation.prepare_one

    def counted(*args: object, **settings: object) -> object:
        seen.append(sum(ref() is not None for ref in alive))
        return real(*args, **settings)

    monkeypatch.setattr(wcodec.preparation, "prepare_one", counted)
    compress_(model)
    assert seen == [4, 3, 2, 1]


def test_compress_refuses_a_bare_layer_and_bad_arguments() -> None:
    with pytest.raises(WCodecError, match=r"use PackedLinear\.from_linear"):
        compress_(linear())
    with pytest.raises(WCodecError, match="keep is 'none'"):
        compress_(Model(), keep="none")
