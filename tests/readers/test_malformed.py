"""Bad files: one line that names the file, the tensor and the problem; never a crash, never data."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.malformed import (
    Malformed,
    gguf_cases,
    npy_cases,
    npz_cases,
    safetensors_cases,
    valid_gguf,
    valid_safetensors,
)
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.readers import open_source, parse_header


def one_line(error: WCodecError) -> None:
    """Check that an error prints as one line that names a file."""
    assert error.file
    assert "\n" not in str(error)


def refuse(case: Malformed, path: Path) -> WCodecError:
    """Write the file, open it, and check the error's form."""
    path.write_bytes(case.data)
    with pytest.raises((MalformedError, UnsupportedError)) as caught:
        open_source(path)
    error = caught.value
    one_line(error)
    assert case.problem in str(error)
    assert error.file == str(path)
    assert error.tensor == case.tensor
    assert error.exit_code == 2
    return error


@pytest.mark.parametrize("case", safetensors_cases(), ids=str)
def test_safetensors(case: Malformed, tmp_path: Path) -> None:
    error = refuse(case, tmp_path / "shard-1.safetensors")
    assert type(error) is MalformedError
    with pytest.raises(MalformedError):
        parse_header(tmp_path / "shard-1.safetensors")


@pytest.mark.parametrize("case", gguf_cases(), ids=str)
def test_gguf(case: Malformed, tmp_path: Path) -> None:
    refuse(case, tmp_path / "m.gguf")


@pytest.mark.parametrize("case", npy_cases(), ids=str)
def test_npy(case: Malformed, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    refuse(Malformed(case.name, case.data, case.problem, _named(case)), path)


def _named(case: Malformed) -> str | None:
    # Once the header is read the array has a name: the file's stem.
    return None if "header" in case.problem or case.problem in ("is empty", "version 9.0") else "a"


@pytest.mark.parametrize("case", npz_cases(), ids=str)
def test_npz(case: Malformed, tmp_path: Path) -> None:
    refuse(case, tmp_path / "a.npz")


def test_nothing_is_allocated_for_a_lying_header(tmp_path: Path) -> None:
    """A sparse file makes the length plausible; the limit must come first."""
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((1 << 33).to_bytes(8, "little"))
        file.truncate(1 << 34)
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
from wcodec.errors import MalformedError
from wcodec.readers import open_source
try:
    open_source({str(path)!r})
except MalformedError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "claims 8589934592 bytes" in ran.stdout


def _exact_or_refused(path: Path, original: bytes) -> None:
    """Open a damaged file: either an error of ours, or tensors that are exactly ranges of the file."""
    try:
        with open_source(path) as source:
            for tensor in source.tensors:
                data = tensor.read()
                assert data.nbytes == tensor.nbytes
                assert tensor.offset is not None
                assert data.tobytes() == original[tensor.offset : tensor.offset + tensor.nbytes]
    except WCodecError as error:
        one_line(error)


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.parametrize(("suffix", "good"), [(".safetensors", valid_safetensors()), (".gguf", valid_gguf())])
def test_damage(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, good: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / f"a{suffix}"
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(0, 4))):
        bit = data.draw(st.integers(0, 8 * len(raw) - 1))
        raw[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.integers(0, len(raw)))
    damaged = bytes(raw[:cut]) if data.draw(st.booleans()) else bytes(raw)
    path.write_bytes(damaged)
    _exact_or_refused(path, damaged)


@pytest.mark.parametrize(("suffix", "good"), [(".safetensors", valid_safetensors()), (".gguf", valid_gguf())])
def test_every_truncation(tmp_path: Path, suffix: str, good: bytes) -> None:
    path = tmp_path / f"a{suffix}"
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(WCodecError):
            open_source(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt"])
def test_damage_to_archives(tmp_path: Path, suffix: str) -> None:
    """Formats read with other libraries: whatever they raise becomes one line of ours."""
    path = tmp_path / f"a{suffix}"
    array = np.arange(300, dtype=np.float32).reshape(20, 15)
    if suffix == ".npy":
        np.save(path, array)
    elif suffix == ".npz":
        np.savez_compressed(path, a=array, b=array.T)
    else:
        torch = pytest.importorskip("torch")
        torch.save({"a": torch.from_numpy(array)}, path)
    good = path.read_bytes()
    generator = random.Random(0)
    for _ in range(150):
        raw = bytearray(good)
        for _ in range(generator.randint(1, 6)):
            raw[generator.randrange(len(raw))] = generator.randrange(256)
        path.write_bytes(raw[: generator.choice([len(raw), generator.randrange(len(raw))])])
        try:
            with open_source(path) as source:
                for tensor in source.tensors:
                    assert tensor.read().nbytes == tensor.nbytes
        except WCodecError as error:
            one_line(error)
