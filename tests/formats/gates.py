"""The two ways into the package for a blob from outside; both must refuse what is malformed."""

from __future__ import annotations

import numpy as np
import pytest

from wcodec.packed import PackedTensor


def decode_on_host(raw: bytes) -> np.ndarray:
    """Check footer and lengths, then patch words while decoding."""
    return PackedTensor.from_blob(raw, file="model.safetensors", tensor="a.weight").decode()


def check_for_gpu(raw: bytes) -> None:
    """Check everything before a kernel follows it, as for a blob on a GPU."""
    torch = pytest.importorskip("torch")
    from wcodec.state import wrap_blob

    wrap_blob(torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()), tensor="a.weight")
