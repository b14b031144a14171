"""`raw`: any bytes of any dtype, and a footer that says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wcodec.dtypes import DTYPES
from wcodec.errors import MalformedError
from wcodec.formats.raw import Raw
from wcodec.packed import DTYPE_CODES, PackedTensor, assemble

RAW = Raw()


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_every_dtype(rng, dtype):
    nbytes = 24 * DTYPES[dtype].bits // 8
    data = rng.integers(0, 256, nbytes).astype(np.uint8)
    packed = PackedTensor.from_blob(RAW.encode(data, (2, 3, 4), dtype=dtype).blob.tobytes())
    assert (packed.format, packed.dtype, packed.shape) == ("raw", dtype, (2, 3, 4))
    found = packed.decode()
    np.testing.assert_array_equal(found.reshape(-1).view(np.uint8), data)
    assert found.shape == ((2, 3, 4) if dtype == "BF16" else (nbytes,))


def test_what_lies_behind_the_bytes_is_checked():
    data = np.arange(10, dtype=np.uint8)
    good = RAW.encode(data, (10,), dtype="U8")
    blob = good.blob.copy()
    blob[10] = 1
    with pytest.raises(MalformedError, match="padding"):
        PackedTensor.from_blob(blob)
    for wrong in ({"overflow_count": 1}, {"table": b"\1" + bytes(7)}):
        with pytest.raises(MalformedError, match="not one of raw"):
            PackedTensor.from_blob(assemble([data], replace(good.footer, **wrong)))
    with pytest.raises(MalformedError, match="footer implies"):
        PackedTensor.from_blob(assemble([data], replace(good.footer, shape=(600,))))


def test_an_empty_tensor_may_not_claim_any_axes():
    blob = RAW.encode(np.empty(0, dtype=np.uint16), (0, 1 << 61)).blob
    with pytest.raises(MalformedError, match="too large"):
        PackedTensor.from_blob(blob)
