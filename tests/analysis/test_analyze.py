"""`wcodec.analyze` on files: what is found, and that it is what `pack` writes."""

from __future__ import annotations

import json
import math
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wcodec
from tests.container.weightfiles import Tensor, gaussian, mixed, noise, outliers, write
from wcodec.analysis import analyzer, scan
from wcodec.analysis.findings import TensorReport
from wcodec.analysis.report import Report
from wcodec.errors import MalformedError, UnsupportedError, WCodecError


def bf16(bits: np.ndarray) -> Tensor:
    return "BF16", bits.shape, bits.astype("<u2").tobytes()


def f32(values: np.ndarray) -> Tensor:
    return "F32", values.shape, values.astype("<f4").tobytes()


def analyze(folder: Path, tensors: dict[str, Tensor], **how: object) -> Report:
    return wcodec.analyze(write(folder / "m.safetensors", tensors), **how)


def one(folder: Path, tensor: Tensor) -> TensorReport:
    (found,) = analyze(folder, {"w": tensor}).tensors
    return found


MIXED: dict[str, Tensor] = {
    "model.layers.0.w": gaussian((192, 128), 1),
    "model.layers.1.w": outliers((256, 192), 2),
    "norm": gaussian((128,), 3),
    "noise": noise((128, 128), 4),
    "embed": gaussian((500, 250), 5),
    "ids": ("I64", (4,), bytes(32)),
    "half": ("F16", (64, 2), bytes(range(256))),
    "scalar": ("BF16", (), b"\x80\x3f"),
    "empty": ("BF16", (0, 64), b""),
    "stack": gaussian((3, 64, 128), 6),
}


def test_what_pack_writes_is_what_analyze_said(tmp_path: Path) -> None:
    source, packed = write(tmp_path / "m.safetensors", MIXED), tmp_path / "p.safetensors"
    wcodec.pack_file(source, packed)
    data = packed.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode()
    header = json.loads(text)
    report = wcodec.analyze(source)
    accounted = 0
    for t in report.tensors:
        begin, end = header[t.name]["data_offsets"]
        key = f'{json.dumps(t.name)}:{{"dtype"'
        entry = text[text.index(key) : text.index("]}", text.index(key)) + 2]
        blob = end - begin
        if t.format == "raw":
            assert (header[t.name]["dtype"], t.packed_bytes) == (t.dtype, blob)
        else:
            assert header[t.name]["dtype"] == "U8"
            assert t.packed_bytes == blob + len(entry) + 1
            assert t.bits_per_weight == 8 * t.packed_bytes / t.numel
            accounted += len(entry) + 1
        accounted += blob
    assert report.packed_bytes == accounted
    # Nothing else is in the file but its record, the rest of the header and its padding.
    begin, end = header["__wcodec__.header"]["data_offsets"]
    assert len(data) - 8 - length == sum(
        e["data_offsets"][1] - e["data_offsets"][0] for name, e in header.items() if name != "__metadata__"
    )
    assert len(data) - accounted - (end - begin) < length + 8
    assert {t.name for t in report.tensors if t.format != "raw"} == {
        "model.layers.0.w",
        "model.layers.1.w",
        "embed",
        "stack",
    }


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([gaussian, outliers, noise]),
            st.one_of(
                st.tuples(st.integers(1, 300), st.integers(64, 300)),
                st.tuples(st.integers(1, 4), st.sampled_from([63, 64, 65]), st.sampled_from([40, 128])),
                st.tuples(st.sampled_from([0, 1, 4096, 8192])),
            ),
        ),
        max_size=4,
    )
)
def test_sizes_are_the_encoders_for_any_shapes(
    tmp_path: Path, wanted: list[tuple[Any, tuple[int, ...]]]
) -> None:
    tensors = {
        f"w{i}": (gaussian if len(shape) == 1 else make)(shape, i) for i, (make, shape) in enumerate(wanted)
    }
    report = analyze(tmp_path, {**mixed(len(wanted)), **tensors})
    for t in report.tensors[len(report.tensors) - len(tensors) :]:
        packed = wcodec.encode(np.frombuffer(tensors[t.name][2], "<u2").reshape(t.shape))
        assert t.format == packed.format
        if t.format != "raw":
            assert 0 < t.packed_bytes - packed.nbytes < 100  # the entry in the header


def test_tied_tensors_are_counted_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    embed = torch.randn(256, 128).to(torch.bfloat16)
    torch.save({"embed.weight": embed, "lm_head.weight": embed, "norm": torch.ones(64)}, tmp_path / "m.pt")
    report = wcodec.analyze(tmp_path / "m.pt")
    assert [t.name for t in report.tensors] == ["embed.weight", "norm"]
    assert report.bf16.weights == 256 * 128
    assert len([text for text in report.sources[0].remarks if "lm_head.weight" in text]) == 1


def test_window_and_exceptions_are_the_encoders(tmp_path: Path) -> None:
    for tensor in (gaussian((192, 128), 1), outliers((256, 192), 2)):
        found = one(tmp_path, tensor)
        bits = np.frombuffer(tensor[2], "<u2").reshape(tensor[1])
        packed = wcodec.encode(bits)
        outside = ~np.isin((bits >> 8) & 0x7F, packed.table)
        assert found.window is not None
        assert found.exceptions is not None
        assert found.window.values == tuple(packed.table.tolist())
        assert found.exceptions.count == int(outside.sum())
        assert found.exceptions.fraction == pytest.approx(outside.mean())


def test_a_table_that_holds_zero(tmp_path: Path) -> None:
    bits = np.frombuffer(gaussian((128, 128))[2], "<u2").reshape(128, 128).copy()
    bits[:, ::2] = 0
    found = one(tmp_path, bf16(bits))
    assert found.window is not None
    assert found.window.kind == "table"
    assert found.window.values[0] == 0
    assert found.exceptions is not None
    assert found.exceptions.fraction < 0.001


@pytest.mark.parametrize(
    ("tensor", "action", "says"),
    [
        (gaussian((256, 256)), "pack", "fewer bytes"),
        (gaussian((384,)), "leave", "too small or too thin"),
        (noise((256, 256)), "leave", "outside the best window"),
        (f32(np.linspace(0, 1, 99)), "leave", "no format for FP32"),
        (f32(np.array([1, 0.5, -2, 0])), "leave", "cast it to BF16, which is exact"),
        (("F16", (8,), bytes(16)), "leave", "no format for FP16"),
        (("I32", (8,), bytes(32)), "leave", "without floating-point weights"),
        (("BF16", (0, 8), b""), "leave", "without weights"),
    ],
)
def test_verdicts(tmp_path: Path, tensor: Tensor, action: str, says: str) -> None:
    verdict = one(tmp_path, tensor).verdict
    assert verdict.action == action
    assert says in verdict.reason


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,), (1, 1)])
def test_empty_and_tiny_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    found = one(tmp_path, ("BF16", shape, b"\x80\x3f" * math.prod(shape)))
    assert (found.shape, found.numel, found.format) == (shape, math.prod(shape), "raw")
    if found.numel:
        assert found.bits_per_weight == 16
        assert found.entropy.total == 0
    else:
        assert math.isnan(found.ratio)
        assert math.isnan(found.floor_bits_per_weight)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    report = analyze(tmp_path, {})
    assert report.tensors == ()
    assert math.isnan(report.bf16.entropy.total)
    for text in (report.to_json(), report.to_csv(), report.to_html(), report.to_text()):
        assert text


def test_nan_and_infinity_weights_are_counted_like_any_other(tmp_path: Path) -> None:
    bits = np.frombuffer(gaussian((128, 128))[2], "<u2").reshape(128, 128).copy()
    bits[0, :4] = [0x7F80, 0xFF80, 0x7F81, 0x7FC1]
    found = one(tmp_path, bf16(bits))
    assert found.exponent_counts[255] == 4
    assert math.isfinite(found.entropy.total)


def test_totals_are_weighted_by_weights(tmp_path: Path) -> None:
    report = analyze(tmp_path, MIXED)
    mine = [t for t in report.tensors if t.kind == "bf16" and t.numel]
    weights = sum(t.numel for t in mine)
    totals = report.bf16
    assert totals.weights == weights
    assert totals.tensors == len(mine) + 1  # the empty one
    expected = sum(t.entropy.exponent * t.numel for t in mine) / weights
    assert totals.entropy.exponent == pytest.approx(expected)
    assert totals.entropy.total == pytest.approx(
        sum(t.floor_bits_per_weight * t.numel for t in mine) / weights
    )
    assert report.packed_bytes == sum(t.packed_bytes for t in report.tensors)


def test_small_chunks_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = analyze(tmp_path, MIXED)
    monkeypatch.setattr(scan, "CHUNK", 40_000)
    monkeypatch.setattr(analyzer, "TASK_BYTES", 1000)
    assert analyze(tmp_path, MIXED).to_json() == want.to_json()


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_any_executor_finds_the_same_and_stays_open(tmp_path: Path, pool: type) -> None:
    want = analyze(tmp_path, MIXED)
    with pool(2) as executor:
        # NaN differs from itself once it has been through a pickle; in JSON it is null.
        assert analyze(tmp_path, MIXED, executor=executor).to_json() == want.to_json()
        assert executor.submit(len, "abc").result() == 3


def test_tasks_and_results_hold_no_tensor_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": gaussian((512, 512))})
    (task,) = analyzer._tasks(analyzer._logical(analyzer.open_source(path)), None)
    assert len(pickle.dumps(task)) < 2000
    assert len(pickle.dumps(scan.scan(task))) < 4000


def test_progress_reaches_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyzer, "TASK_BYTES", 1000)
    seen: list[tuple[int, int]] = []
    report = analyze(tmp_path, MIXED, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, report.nbytes)
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert seen == sorted(seen)


def test_include_and_exclude(tmp_path: Path) -> None:
    report = analyze(tmp_path, MIXED, include=["model.*", "norm"], exclude=["*.1.*"])
    assert [t.name for t in report.tensors] == ["model.layers.0.w", "norm"]


def test_several_paths_and_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.safetensors", {"w": gaussian((128, 128))})
    report = wcodec.analyze([tmp_path / "a", tmp_path / "b" / "model.safetensors"])
    assert len(report.sources) == len(report.tensors) == 2
    # Offsets in a packed file's header begin again in every file, so both entries have the same length.
    assert len({t.packed_bytes for t in report.tensors}) == 1


def test_nvfp4_counts_as_one_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (64, 32), dtype=np.uint8), np.full((64, 4), 0x38, np.uint8)
    report = analyze(
        tmp_path,
        {
            "q.weight": ("U8", (64, 32), codes.tobytes()),
            "q.weight_scale": ("F8_E4M3", (64, 4), scales.tobytes()),
            "q.weight_scale_2": ("F32", (), bytes(4)),
        },
    )
    (found,) = report.tensors
    assert (found.kind, found.shape, found.numel, found.nbytes) == ("nvfp4", (64, 64), 4096, 2048 + 256 + 4)
    assert found.entropy.scale == 0.0
    assert found.entropy.sign == pytest.approx(1, abs=0.01)
    assert found.floor_bits_per_weight == pytest.approx(4, abs=0.02)


def test_mxfp4_scales_are_shared_among_32_weights(tmp_path: Path) -> None:
    scales = np.repeat(np.arange(64, dtype=np.uint8), 2).reshape(64, 2)  # 64 values alike: 6 bits each
    report = analyze(
        tmp_path,
        {"q_blocks": ("U8", (64, 2, 16), bytes(2048)), "q_scales": ("U8", (64, 2), scales.tobytes())},
    )
    (found,) = report.tensors
    assert (found.kind, found.numel) == ("mxfp4", 4096)
    assert found.entropy.scale == pytest.approx(6 / 32)


def test_a_packed_file_is_refused_with_advice(tmp_path: Path) -> None:
    source, packed = write(tmp_path / "m.safetensors", MIXED), tmp_path / "p.safetensors"
    wcodec.pack_file(source, packed)
    with pytest.raises(UnsupportedError, match="wcodec info"):
        wcodec.analyze(packed)


def test_errors_name_file_and_mend(tmp_path: Path) -> None:
    cut = write(tmp_path / "cut.safetensors", {"w": gaussian((64, 64))})
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(MalformedError, match=r"cut\.safetensors"):
        wcodec.analyze(cut)
    with pytest.raises(WCodecError, match=r"absent\.safetensors"):
        wcodec.analyze(tmp_path / "absent.safetensors")
    with pytest.raises(UnsupportedError, match="no GPU called"):
        wcodec.analyze(cut, gpu="nonsense")


def test_an_error_in_a_task_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.safetensors", MIXED)

    def shrink(source: object) -> list[object]:
        path.write_bytes(path.read_bytes()[:500])
        return found(source)

    found = analyzer._logical
    monkeypatch.setattr(analyzer, "_logical", shrink)
    with pytest.raises(MalformedError, match="changed"):
        wcodec.analyze(path)


def test_more_than_four_gigabytes(tmp_path: Path) -> None:
    """Counts and offsets beyond 32 bits, on a sparse file of which a sample is read."""
    shape, path = (80_000, 40_000), tmp_path / "m.safetensors"
    nbytes = 2 * math.prod(shape)
    entries = {
        "big": {"dtype": "BF16", "shape": shape, "data_offsets": [0, nbytes]},
        "last": {"dtype": "BF16", "shape": (128, 128), "data_offsets": [nbytes, nbytes + 32768]},
    }
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(nbytes, 1)
        file.write(gaussian((128, 128))[2])
    big, last = wcodec.analyze(path, sample_bytes=1 << 20).tensors
    assert big.numel == math.prod(shape) > 1 << 31
    assert (big.sampled, last.sampled) == (True, False)
    assert big.packed_bytes > 1 << 32
    assert big.bits_per_weight == pytest.approx(12.125, abs=0.001)
    assert last.exceptions == one(tmp_path, gaussian((128, 128))).exceptions
    # Its offsets in the packed file's header have ten digits instead of one and five.
    alone = one(tmp_path, gaussian((128, 128)))
    assert last.packed_bytes - alone.packed_bytes == 9 + 5 + len("last") - len("w")


def test_sampling_estimates(tmp_path: Path) -> None:
    tensors = {"w": gaussian((2048, 1024)), "small": gaussian((64, 64))}
    exact, guess = analyze(tmp_path, tensors), analyze(tmp_path, tensors, sample_bytes=200_000)
    assert [t.sampled for t in guess.tensors] == [True, False]
    assert guess.tensors[1] == exact.tensors[1]
    assert guess.bf16.entropy.exponent == pytest.approx(exact.bf16.entropy.exponent, abs=0.02)
    assert guess.packed_bytes == pytest.approx(exact.packed_bytes, rel=0.001)
