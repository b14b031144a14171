"""Lossless weight compression that GPUs read directly: fewer bytes, exactly the same weights.

The names below are loaded when first used, so that ``import wcodec`` costs next to nothing and needs neither
torch nor a GPU:

>>> import wcodec
>>> report = wcodec.analyze("model.safetensors")             # doctest: +SKIP
>>> packed = wcodec.encode(weight)                           # doctest: +SKIP
>>> state = wcodec.prepare({"o": weight}, device="cuda")     # doctest: +SKIP
>>> y = wcodec.linear(x, state["o"])                         # doctest: +SKIP
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Where each public name lives.
_HOMES = {
    "analyze": "wcodec.analysis",
    "encode": "wcodec.codec",
    "PackedTensor": "wcodec.packed",
    "pack_file": "wcodec.container",
    "pack_directory": "wcodec.container",
    "unpack_file": "wcodec.container",
    "unpack_directory": "wcodec.container",
    "verify_file": "wcodec.container",
    "verify_directory": "wcodec.container",
    "prepare": "wcodec.preparation",
    "linear": "wcodec.ops",
    "compress_": "wcodec.nn",
    "WCodecError": "wcodec.errors",
    "MalformedError": "wcodec.errors",
    "MismatchError": "wcodec.errors",
    "UnsupportedError": "wcodec.errors",
}

#: Those that multiply; the rest of the package does without torch.
_NEED_TORCH = ("prepare", "linear", "compress_")

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from wcodec.analysis import analyze as analyze
    from wcodec.codec import encode as encode
    from wcodec.container import pack_directory as pack_directory
    from wcodec.container import pack_file as pack_file
    from wcodec.container import unpack_directory as unpack_directory
    from wcodec.container import unpack_file as unpack_file
    from wcodec.container import verify_directory as verify_directory
    from wcodec.container import verify_file as verify_file
    from wcodec.errors import MalformedError as MalformedError
    from wcodec.errors import MismatchError as MismatchError
    from wcodec.errors import UnsupportedError as UnsupportedError
    from wcodec.errors import WCodecError as WCodecError
    from wcodec.nn import compress_ as compress_
    from wcodec.ops import linear as linear
    from wcodec.packed import PackedTensor as PackedTensor
    from wcodec.preparation import prepare as prepare


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wcodec' has no attribute {name!r}")
    if name in _NEED_TORCH and importlib.util.find_spec("torch") is None:
        from wcodec.errors import UnsupportedError

        raise UnsupportedError(f"wcodec.{name} needs torch", mend="pip install 'wcodec[torch]'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
