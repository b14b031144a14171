"""Files of torch.save."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.malformed import valid_safetensors
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.readers import open_source
from wcodec.readers.torch_file import _DTYPES

torch = pytest.importorskip("torch")


def save(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("zipped", [True, False])
def test_every_pattern_of_bf16(tmp_path: Path, zipped: bool) -> None:
    """All 65,536, NaNs and subnormals included: bits are viewed, never converted."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(256, 256)
    path = save(tmp_path / "m.bin", {"w": weight}, _use_new_zipfile_serialization=zipped)
    source = open_source(path)
    assert source.kind == "torch"
    tensor = source["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("BF16", (256, 256), 1 << 17)
    assert np.array_equal(tensor.read().view("<u2"), bits)
    assert not tensor.read().flags.writeable


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {}
    for name in _DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            raw = torch.arange(64, dtype=torch.uint8) % 2
            tensors[name] = raw.view(dtype).reshape(2, -1)
    source = open_source(save(tmp_path / "m.pt", tensors))
    assert len(source.tensors) == len(tensors) >= 15
    for tensor in source.tensors:
        assert tensor.dtype == _DTYPES[tensor.name]
        assert tensor.read().tobytes() == b"\0\1" * 32
        assert not tensor.opaque
    assert source.notes == []
    if "float4_e2m1fn_x2" in tensors:
        assert source["float4_e2m1fn_x2"].shape == (2, 64)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_one_level_of_nesting(tmp_path: Path, key: str) -> None:
    inner = OrderedDict(w=torch.ones(2, 3), step=torch.tensor(7))
    path = save(tmp_path / "m.ckpt", {key: inner, "epoch": 3, "lr": [0.1]})
    source = open_source(path)
    assert [(t.name, t.dtype, t.shape) for t in source.tensors] == [("w", "F32", (2, 3)), ("step", "I64", ())]
    assert source["step"].read().view("<i8")[0] == 7


def test_tied_storages_are_counted_once(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"embed": weight, "head": weight, "part": weight[:1], "copy": weight.clone(), "e": weight[:0]}
    source = open_source(save(tmp_path / "m.pt", tensors | {"e2": weight[:0]}))
    assert [t.name for t in source.tensors] == ["embed", "part", "copy", "e", "e2"]
    assert source.ties == {"head": "embed"}
    assert source["head"] is source["embed"]
    assert source.remarks == ["m.pt: 'head' is tied to 'embed' and counted once"]
    assert source.differences == []


@pytest.mark.parametrize("nbytes", [16, 1 << 20])
def test_expanded_tensors_are_read_in_full(tmp_path: Path, nbytes: int) -> None:
    tensors = {"all": torch.full((1,), 3.0).expand(5, 7), "rows": torch.arange(5.0)[:, None].expand(5, 7)}
    source = open_source(save(tmp_path / "m.pt", tensors))
    for name, tensor in tensors.items():
        want = tensor.contiguous().numpy().tobytes()
        assert b"".join(bytes(chunk) for chunk in source[name].chunks(nbytes)) == want, name


def test_views_with_other_signs_are_read_as_they_read(tmp_path: Path) -> None:
    w, z = torch.arange(1.0, 7.0), torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"w": w, "negative": torch._neg_view(w), "z": z, "conjugate": z.conj()}
    source = open_source(save(tmp_path / "m.pt", tensors))
    assert source.ties == {}
    for name, tensor in tensors.items():
        want = tensor.resolve_conj().resolve_neg().numpy()
        assert source[name].read().tobytes() == want.tobytes(), name
        assert b"".join(bytes(chunk) for chunk in source[name].chunks(8)) == want.tobytes()


def test_a_transpose_is_not_tied(tmp_path: Path) -> None:
    """One storage and one shape, but other bytes in C order."""
    weight = torch.arange(9.0).reshape(3, 3)
    source = open_source(save(tmp_path / "m.pt", {"w": weight, "t": weight.T}))
    assert source.ties == {}
    assert source["t"].read().tobytes() == weight.T.contiguous().numpy().tobytes()


@pytest.mark.parametrize("nbytes", [1, 5, 16, 1000])
def test_transposed_tensors_are_in_c_order(tmp_path: Path, nbytes: int) -> None:
    weight = torch.arange(15, dtype=torch.bfloat16).reshape(3, 5).T
    assert not weight.is_contiguous()
    tensor = open_source(save(tmp_path / "m.pt", {"w": weight}))["w"]
    expected = weight.contiguous().view(torch.int16).numpy().tobytes()
    assert tensor.shape == (5, 3)
    assert tensor.read().tobytes() == expected
    assert b"".join(chunk.tobytes() for chunk in tensor.chunks(nbytes)) == expected


def test_parameters_and_single_tensors(tmp_path: Path) -> None:
    source = open_source(save(tmp_path / "one.pt", torch.nn.Parameter(torch.ones(2))))
    assert [t.name for t in source.tensors] == ["one"]
    assert source["one"].read().view("<f4").tolist() == [1, 1]


def test_tensors_without_plain_bytes_are_left_out(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(3, device="meta")
    source = open_source(save(tmp_path / "m.pt", {"s": sparse, "m": meta, "w": torch.ones(1)}))
    assert [t.name for t in source.tensors] == ["w"]
    assert source.remarks == [
        "m.pt: 's' is of the layout sparse_coo and left out",
        "m.pt: 'm' is on the device meta, without data and left out",
    ]


def test_tensors_travel_between_processes_without_their_bytes(tmp_path: Path) -> None:
    weight = torch.arange(100_000, dtype=torch.float32).reshape(100, -1).T
    path = save(tmp_path / "m.pt", {"state_dict": {"w": weight, "b": torch.ones(3)}})
    tensor = open_source(path)["w"]
    pickled = pickle.dumps(tensor)
    assert len(pickled) < 2000
    assert pickle.loads(pickled).read().tobytes() == tensor.read().tobytes()
    save(path, {"w": torch.zeros(2)})
    with pytest.raises(MalformedError, match="changed while"):
        tensor.read()
    with pytest.raises(MalformedError, match="changed while"):
        pickle.loads(pickled).read()


class Evil:
    """Pickles to a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code from the file was run",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_the_file_is_not_run(tmp_path: Path, zipped: bool, capfd: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "m.pt", {"w": torch.ones(1), "x": Evil()}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsupportedError, match="does not run code") as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", MalformedError),
        (b"hello", MalformedError),
        (b"PK\x03\x04" + bytes(100), MalformedError),
        (pickle.dumps(print, protocol=2), UnsupportedError),
        (valid_safetensors(), MalformedError),
    ],
    ids=["empty", "text", "zip", "pickle", "safetensors"],
)
def test_not_torch(tmp_path: Path, raw: bytes, kind: type[Exception]) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(raw)
    with pytest.raises((MalformedError, UnsupportedError)) as caught:
        open_source(path)
    assert isinstance(caught.value, kind)
    assert "\n" not in str(caught.value)


def test_truncated(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", {"w": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MalformedError, match="torch cannot read it"):
        open_source(path)


@pytest.mark.parametrize("value", [{}, {"epoch": 3}, [1, 2], "text"])
def test_no_state_dict(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"save model.state_dict\(\)"):
        open_source(save(tmp_path / "m.pt", value))


def test_sharded_bin_files(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model-00001-of-00002.bin", {"a": torch.ones(2)})
    save(tmp_path / "pytorch_model-00002-of-00002.bin", {"b": torch.ones(3)})
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"metadata": {"total_size": 20}, "weight_map": {"a": "pytorch_model-00001-of-00002.bin",'
        ' "b": "pytorch_model-00002-of-00002.bin"}}'
    )
    source = open_source(tmp_path)
    assert [t.name for t in source.tensors] == ["a", "b"]
    assert source.differences == ["pytorch_model.bin.index.json: does not list training_args.bin, left out"]


def test_directory_of_a_trainer(tmp_path: Path) -> None:
    """Arguments and optimizers lie beside the weights; what holds no tensors is left out and said so."""
    save(tmp_path / "optimizer.pt", {"state": {0: {"exp_avg": torch.ones(2)}}})
    with pytest.raises(UnsupportedError, match="holds no tensors"):
        open_source(tmp_path)
    save(tmp_path / "pytorch_model.bin", {"a": torch.ones(2)})
    save(tmp_path / "training_args.bin", Evil())
    source = open_source(tmp_path)
    assert [t.name for t in source.tensors] == ["a"]
    assert len(source.remarks) == 2
    assert source.differences == []


def test_missing_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "m.pt", {"w": torch.ones(1)})
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"needs torch; pip install 'wcodec\[torch\]'"):
        open_source(path)


def test_torch_is_imported_only_for_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(valid_safetensors())
    code = f"""
import sys
from wcodec.readers import open_source
open_source({str(tmp_path)!r}).tensors[0].read()
print([name for name in ("torch", "gguf", "fsspec", "numba", "zstandard") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
