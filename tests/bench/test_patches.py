"""What the bench of exceptions makes of weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.matrices import gaussian
from wcodec.codec import encode

torch = pytest.importorskip("torch")

from bench import patches  # noqa: E402  (it needs torch)
from bench.intervals import Estimate  # noqa: E402


def test_dense_weights_have_as_many_exceptions_as_they_say() -> None:
    bits = gaussian(512, 512)
    high = (bits & patches.HIGH_BITS) >> 8
    table = np.argsort(np.bincount(high.reshape(-1), minlength=128))[-8:]
    bits[~np.isin(high, table)] &= 0x80FF  # zeros of the table's making: no exceptions
    bits[(bits & patches.HIGH_BITS) == 0] |= np.uint16(table[0] << 8)
    clean = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    torch.manual_seed(0)
    dense = patches.dense(clean).view(torch.int16).numpy().view(np.uint16)
    changed = (dense & patches.HIGH_BITS) != (bits & patches.HIGH_BITS)
    assert ((dense ^ bits) & ~np.uint16(patches.HIGH_BITS) == 0).all()  # signs and low bytes stay
    assert changed[:64, :64].sum() == patches.CROWDED
    assert (
        abs(changed.mean() - patches.DENSE_FRACTION)
        < 0.5 * patches.DENSE_FRACTION + patches.CROWDED / bits.size
    )
    packed = encode(dense, format="bf16-w12")
    words = np.asarray(packed.blob)[: 64 * 6208].reshape(64, 6208)[:, 6144:].reshape(64, 4, 16)
    tags = words[..., 15].astype(int)
    assert tags[0].tolist() == [255] * 4  # the crowded brick's quarters have lists
    assert tags[tags < 255].sum() + packed.overflow_count == changed.sum()


def test_cost_is_how_much_longer_ours_takes() -> None:
    cost = patches.cost(Estimate(0.8, 0.5, 1.0))
    assert (cost.value, cost.low, cost.high) == (0.25, 0.0, 1.0)
