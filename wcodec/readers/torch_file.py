"""Files of torch.save (.pt, .pth, .bin, .ckpt): state dicts, loaded without running code from the file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from wcodec.dtypes import numel
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.readers.base import Content, TensorInfo, first_line
from wcodec.readers.bytefile import Bytes, LocalFile

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which trainers put the state dict; one level of them is unwrapped."""

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}

_NEEDS_CODE = (
    "Unsupported global",
    "unsupported GLOBAL",
    "Trying to call reduce",
    "Can only create new object",
    "Can only build",
    "TorchScript",
)
"""Parts of the messages with which torch refuses a file that is whole but holds more than tensors."""


class _TorchPayload:
    """Bytes of a torch tensor in C order; contiguous tensors are viewed, others copied when read.

    Pickled, it is the name of the tensor in its file, which the other process loads again.
    """

    __slots__ = ("_file", "_name", "_tensor")

    def __init__(self, file: LocalFile, name: str, tensor: Any) -> None:
        self._file = file
        self._name = name
        self._tensor = tensor.detach()

    def __reduce__(self) -> tuple[object, ...]:
        return _reload, (self._file, self._name)

    def read_at(self, start: int, n: int) -> Bytes:
        import torch

        self._file.check()  # torch has mapped it
        tensor, width = self._tensor, self._tensor.element_size()
        first, last = start // width, -(-(start + n) // width)
        if tensor.is_contiguous() or last - first == tensor.numel():
            elements = tensor.reshape(-1)[first:last]
        else:
            # Only the elements asked for are gathered, so that chunks stay bounded.
            elements = tensor[torch.unravel_index(torch.arange(first, last), tensor.shape)]
        # A view may repeat elements, or promise signs that are not in memory yet.
        plain = elements.contiguous().resolve_conj().resolve_neg()
        data: Bytes = plain.view(torch.uint8).numpy()[start - first * width :][:n]
        data.flags.writeable = False
        return data


def read_torch(file: LocalFile) -> Content:
    """Tensors of one torch.save file: the state dict itself, or one level below a key of `WRAPPERS`.

    Names that share one storage with the same shape are tied: the first holds the data.

    Raises
    ------
    MalformedError
        torch cannot read the file.
    UnsupportedError
        torch is missing, or the file needs code from its writer to be run.
    """
    path = file.path
    loaded = _load(file)
    content = Content("torch", [])
    if not isinstance(loaded, Mapping):
        raise UnsupportedError(
            f"holds a {type(loaded).__name__}, not a state dict", file=path, mend="save model.state_dict()"
        )
    stored: dict[tuple[Any, ...], str] = {}
    for name, tensor in _walk(loaded):
        problem = _unreadable(tensor)
        if problem:
            content.remarks.append(f"{path.name}: {name!r} is {problem} and left out")
            continue
        dtype, shape = _describe(tensor)
        where = _place(tensor)
        if where is not None and where in stored:
            content.ties[name] = stored[where]
            content.remarks.append(f"{path.name}: {name!r} is tied to {stored[where]!r} and counted once")
            continue
        if where is not None:
            stored[where] = name
        nbytes = tensor.numel() * tensor.element_size()
        content.tensors.append(
            TensorInfo(name, path, dtype, shape, nbytes, _TorchPayload(file, name, tensor))
        )
    if not content.tensors:
        raise UnsupportedError("holds no tensors", file=path, mend="save model.state_dict()")
    return content


@lru_cache(maxsize=4)
def _load_again(file: LocalFile) -> dict[str, Any]:
    return dict(_walk(_load(file)))


def _reload(file: LocalFile, name: str) -> _TorchPayload:
    return _TorchPayload(file, name, _load_again(file)[name])


def _load(file: LocalFile) -> Any:
    try:
        torch = import_module("torch")
    except ImportError:
        raise UnsupportedError(
            "reading files of torch.save needs torch", file=file.path, mend="pip install 'wcodec[torch]'"
        ) from None
    if file.size == 0:
        raise MalformedError("is empty", file=file.path, mend="download it again")
    zipped = file.read_at(0, min(4, file.size)).tobytes() == b"PK\x03\x04"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapped = zipped and file.mapped  # torch maps zip archives only
            loaded = torch.load(file.path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except Exception as error:  # torch raises a dozen kinds, none of them promised
        if any(sign in str(error) for sign in _NEEDS_CODE):
            raise UnsupportedError(
                "holds Python objects, which wcodec does not run code to load",
                file=file.path,
                mend="load it in the program that wrote it and save model.state_dict()",
            ) from None
        raise MalformedError(
            f"torch cannot read it ({_detail(error)})",
            file=file.path,
            mend="it is corrupt or not a file of torch.save",
        ) from None
    return {file.path.stem: loaded} if _is_tensor(loaded) else loaded


def _detail(error: Exception) -> str:
    """What is wrong in one line; torch puts a paragraph of advice before it."""
    return first_line(Exception(str(error).rpartition("WeightsUnpickler error:")[2]))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "is_contiguous")


def _walk(loaded: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the state dict; a wrapper's key is not part of the names."""
    for key in WRAPPERS:
        inner = loaded.get(key)
        if isinstance(inner, Mapping) and any(map(_is_tensor, inner.values())):
            loaded = inner
            break
    for key, value in loaded.items():
        if _is_tensor(value):
            yield str(key), value


def _unreadable(tensor: Any) -> str | None:
    """Why a tensor has no plain bytes, or None."""
    if tensor.is_quantized:
        return "quantised by torch"
    if str(tensor.layout) != "torch.strided":
        return f"of the layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type != "cpu":
        return f"on the device {tensor.device.type}, without data"
    return None


def _describe(tensor: Any) -> tuple[str, tuple[int, ...]]:
    name = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if name == "float4_e2m1fn_x2" and shape:
        shape = (*shape[:-1], 2 * shape[-1])  # torch counts bytes
    return _DTYPES.get(name, name), shape


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """What two tensors have in common exactly when they are one tensor under two names."""
    if numel(tensor.shape) == 0:
        return None
    signs = tensor.is_neg(), tensor.is_conj()
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, *signs
