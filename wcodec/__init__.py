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

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Where each public name lives.
_HOMES = {
    "analyze": "wcodec.analysis",
    "encode": "wcodec.codec",
    "decode": "wcodec.codec",
    "PackedTensor": "wcodec.packed",
    "pack_file": "wcodec.container",
    "unpack_file": "wcodec.container",
    "verify_file": "wcodec.container",
    "prepare": "wcodec.preparation",
    "linear": "wcodec.ops",
    "compress_": "wcodec.nn",
    "WCodecError": "wcodec.errors",
    "MalformedError": "wcodec.errors",
    "MismatchError": "wcodec.errors",
    "UnsupportedError": "wcodec.errors",
}

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from wcodec.analysis import analyze as analyze
    from wcodec.errors import MalformedError as MalformedError
    from wcodec.errors import MismatchError as MismatchError
    from wcodec.errors import UnsupportedError as UnsupportedError
    from wcodec.errors import WCodecError as WCodecError
    from wcodec.packed import PackedTensor as PackedTensor


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wcodec' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
