"""Files that earlier versions wrote decode to the same bits, and the current encoder still writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tests.golden
from tests.formats import gates, reference
from wcodec.codec import encode
from wcodec.errors import MalformedError, UnsupportedError
from wcodec.packed import PackedTensor

HERE = Path(tests.golden.__file__).parent
GOOD = sorted(HERE.glob("bf16-w12-v1/*.blob"))
BAD = sorted(HERE.glob("bf16-w12-bad/*.blob"))


def test_the_files_are_there():
    assert len(GOOD) >= 6
    assert len(BAD) >= 20


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_files_decode(path):
    want = np.frombuffer(path.with_suffix(".bits").read_bytes(), dtype="<u2")
    packed = PackedTensor.from_blob(path.read_bytes())
    assert packed.version == 1
    np.testing.assert_array_equal(packed.decode().reshape(-1), want)
    np.testing.assert_array_equal(reference.decode(path.read_bytes()).reshape(-1), want)


@pytest.mark.parametrize("path", [p for p in GOOD if p.stem != "foreign"], ids=lambda path: path.stem)
def test_the_encoder_is_canonical(path):
    packed = PackedTensor.from_blob(path.read_bytes())
    assert encode(packed.decode(), format="bf16-w12").blob.tobytes() == path.read_bytes()


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
@pytest.mark.parametrize("read", [gates.decode_on_host, gates.check_for_gpu])
def test_bad_files_are_refused(path, read):
    with pytest.raises((MalformedError, UnsupportedError)):
        read(path.read_bytes())
