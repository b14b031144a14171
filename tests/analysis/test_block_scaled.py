"""`wcodec analyze` on small NVFP4 and MXFP4 checkpoints of three exporters, as people type it."""

from __future__ import annotations

import csv
import io
import json
import math
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import wcodec
from tests.container.weightfiles import Tensor, gaussian, write
from wcodec.analysis import analyzer, scan
from wcodec.cli import main
from wcodec.formats.nvfp4_s5 import encode_pair
from wcodec.readers import TensorInfo, parse_header

NaN, NEGATIVE = 0x7F, 0x90


def bell(shape: tuple[int, ...], center: int, spread: float, seed: int) -> np.ndarray:
    """Bytes around a center, as block scales are."""
    values = np.random.default_rng(seed).normal(center, spread, shape)
    return np.clip(np.rint(values), 0, 126).astype(np.uint8)


def codes(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """4-bit codes, two a byte, the smaller magnitudes more often."""
    drawn = np.random.default_rng(seed).binomial(7, 0.4, (*shape, 2)) | (
        np.random.default_rng(seed + 1).integers(0, 2, (*shape, 2)) << 3
    )
    return (drawn[..., 0] | drawn[..., 1] << 4).astype(np.uint8)


def u8(array: np.ndarray, dtype: str = "U8") -> Tensor:
    return dtype, array.shape, array.tobytes()


def f32(*values: float, shape: tuple[int, ...] = ()) -> Tensor:
    return "F32", shape, np.array(values, "<f4").tobytes()


def modelopt(
    stem: str = "q", shape: tuple[int, int] = (128, 256), seed: int = 0, spread: float = 5
) -> dict[str, Tensor]:
    rows, columns = shape
    return {
        f"{stem}.weight": u8(codes((rows, columns // 2), seed)),
        f"{stem}.weight_scale": u8(bell((rows, columns // 16), 100, spread, seed + 2), "F8_E4M3"),
        f"{stem}.weight_scale_2": f32(0.001),
        f"{stem}.input_scale": f32(1.0),
    }


def compressed(divisor: float | None = 2048.0) -> dict[str, Tensor]:
    tensors = {
        "q.weight_packed": u8(codes((128, 128), 3)),
        "q.weight_scale": u8(bell((128, 16), 60, 4, 4), "F8_E4M3"),
    }
    return tensors if divisor is None else {**tensors, "q.weight_global_scale": f32(divisor, shape=(1,))}


def gpt_oss(experts: int = 2) -> dict[str, Tensor]:
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    return {
        f"{stem}_blocks": u8(codes((experts, 64, 4, 16), 5)),
        f"{stem}_scales": u8(bell((experts, 64, 4), 120, 2, 6)),
    }


def with_scales(tensors: dict[str, Tensor], *values: int) -> dict[str, Tensor]:
    """The checkpoint with its first scale bytes replaced."""
    name = next(name for name in tensors if name.endswith(("weight_scale", "_scales")))
    dtype, shape, data = tensors[name]
    return {**tensors, name: (dtype, shape, bytes(values) + data[len(values) :])}


def run(path: Path, *args: str) -> Result:
    return CliRunner().invoke(main, ["analyze", str(path), *args])


def report(folder: Path, tensors: dict[str, Tensor], *args: str) -> tuple[dict[str, Any], str]:
    """The JSON report and what stderr says."""
    done = run(write(folder / "m.safetensors", tensors), "--format", "json", *args)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def entropy(data: np.ndarray) -> float:
    p = np.unique(data, return_counts=True)[1] / data.size
    return float(-(p * np.log2(p)).sum())


def outside(scales: np.ndarray, width: int) -> float:
    return min(np.mean((scales < base) | (scales >= base + width)) for base in range(257 - width))


def as_bytes(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor[2], np.uint8).reshape(tensor[1])


def check_counts(found: dict[str, Any], weight: np.ndarray, scales: np.ndarray) -> None:
    nibbles = np.concatenate([weight.reshape(-1) & 15, weight.reshape(-1) >> 4])
    assert found["nibble_entropy"] == pytest.approx(entropy(nibbles))
    assert found["scale_entropy"] == pytest.approx(entropy(scales))
    assert found["scale_windows"] == {
        str(width): pytest.approx(outside(scales.astype(int), width)) for width in (16, 32, 64)
    }


@pytest.mark.parametrize("spread", [1, 5, 7])
def test_modelopt_takes_what_the_encoder_writes(tmp_path: Path, spread: float) -> None:
    tensors = modelopt(spread=spread)
    weight, scales = as_bytes(tensors["q.weight"]), as_bytes(tensors["q.weight_scale"])
    data, stderr = report(tmp_path, tensors)
    (found,) = data["tensors"]
    assert (found["kind"], found["shape"], stderr) == ("nvfp4", [128, 256], "")
    check_counts(found, weight, scales)
    packed = encode_pair(weight, scales)
    assert packed is not None
    assert found["nvfp4_s5"] == {
        "bytes": packed.nbytes,
        "bits_per_weight": pytest.approx(8 * packed.nbytes / weight.size / 2),
    }
    assert found["flags"] == data["sources"][0]["remarks"] == []
    assert (found["format"], found["verdict"]["action"]) == ("nvfp4-s5", "pack")
    assert found["verdict"]["saves_bytes"] == found["bytes"] - found["packed_bytes"] > 0
    shown = " ".join(run(tmp_path / "m.safetensors").stdout.split())
    assert f"nibbles hold {found['nibble_entropy']:.2f} of 4 bits" in shown
    assert f"nvfp4-s5 takes {found['nvfp4_s5']['bits_per_weight']:.2f} bits per weight" in shown


def test_it_says_what_pack_writes(tmp_path: Path) -> None:
    odd = {
        **with_scales(modelopt("nan"), NaN),
        **with_scales(modelopt("negative"), NEGATIVE),
        **{name: t for name, t in modelopt("alone").items() if name != "alone.weight_scale_2"},
        **{**modelopt("zero"), "zero.weight_scale_2": f32(0.0)},
    }
    other = {name.replace("q.", "k."): tensor for name, tensor in compressed().items()}
    tensors = {**modelopt(), **gpt_oss(), **odd, **other}
    data, _ = report(tmp_path, tensors)
    wcodec.pack_file(tmp_path / "m.safetensors", tmp_path / "p.safetensors")
    header = parse_header(tmp_path / "p.safetensors")
    text = json.dumps(json.loads(header.raw), separators=(",", ":"))
    stored = {entry.name: entry for entry in header.entries}
    for found in data["tensors"]:
        codes, scales, *others = found["parts"]
        if found["format"] == "raw":
            assert (found["packed_bytes"], found["verdict"]["saves_bytes"]) == (found["bytes"], 0)
            assert {n: (stored[n].dtype, stored[n].shape) for n in found["parts"]} == {
                n: tensors[n][:2] for n in found["parts"]
            }
            continue
        entries = sum(
            len(re.search(rf'"{re.escape(name)}":{{.*?}}', text)[0]) + 1 for name in (codes, scales)
        )
        rest = sum(len(tensors[name][2]) for name in others)
        assert found["packed_bytes"] == stored[codes].nbytes + entries + rest
        assert stored[scales].nbytes == 0
    assert [t["name"] for t in data["tensors"] if t["format"] != "raw"] == ["q.weight", "k.weight_packed"]
    reasons = {t["name"]: t["verdict"]["reason"] for t in data["tensors"]}
    assert reasons["nan.weight"].endswith("; but 1 NaN scales")
    assert reasons["alone.weight"].endswith("; but no global scale beside it")


@pytest.mark.parametrize("apart", ["q.weight_scale", "q.weight_scale_2", "q.input_scale"])
def test_parts_in_several_files(tmp_path: Path, apart: str) -> None:
    """Shards are packed one by one; what is no part of the blob may lie anywhere."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = modelopt()
    write(folder / "a.safetensors", {name: t for name, t in tensors.items() if name != apart})
    write(folder / "b.safetensors", {apart: tensors[apart]})
    (found,) = json.loads(run(folder, "--format", "json").stdout)["tensors"]
    packed = wcodec.pack_directory(folder, tmp_path / "packed").packed_tensors
    assert (found["format"] == "nvfp4-s5", packed) == ((True, 2) if apart == "q.input_scale" else (False, 0))
    if not packed:
        assert found["verdict"]["reason"].endswith("; but its parts lie in several files")


@pytest.mark.parametrize(
    ("divisor", "flag"),
    [
        (2048.0, None),
        (None, "no global scale beside it"),
        (0.0, "1 zero global scales"),
        (math.inf, "1 infinite global scales"),
        (math.nan, "1 NaN global scales"),
    ],
)
def test_compressed_tensors_and_its_divisor(tmp_path: Path, divisor: float | None, flag: str | None) -> None:
    data, stderr = report(tmp_path, compressed(divisor), "--strict")
    (found,) = data["tensors"]
    assert (found["kind"], found["name"], found["shape"]) == ("nvfp4", "q.weight_packed", [128, 256])
    assert found["flags"] == ([flag] if flag else [])
    assert found["nvfp4_s5"]["bits_per_weight"] < 4.5
    remarks = data["sources"][0]["remarks"]
    assert len(remarks) == stderr.count("\n") == bool(flag)
    if flag:
        assert f"q.weight_packed: {flag}" in remarks[0]
        assert remarks[0] in stderr


def test_gpt_oss_blocks(tmp_path: Path) -> None:
    tensors = with_scales(gpt_oss(), 0xFF, 0xFF)
    data, stderr = report(tmp_path, tensors)
    (found,) = data["tensors"]
    assert (found["kind"], found["shape"], found["numel"]) == ("mxfp4", [2, 64, 128], 2 * 64 * 128)
    blocks, scales = (as_bytes(tensor) for tensor in tensors.values())
    check_counts(found, blocks, scales)
    assert found["nvfp4_s5"] is None
    assert "leave it as it is, 4.25 bits per weight" in found["verdict"]["reason"]
    assert "no format for MXFP4" in found["verdict"]["reason"]
    assert found["flags"] == ["2 NaN scales"]
    assert "2 NaN scales" in stderr


def test_odd_scales_are_flagged_and_judged_all_the_same(tmp_path: Path) -> None:
    tensors = with_scales(modelopt(), NaN, NaN, 0xFF, NEGATIVE)
    data, stderr = report(tmp_path, tensors)
    assert data["tensors"][0]["flags"] == ["3 NaN scales", "1 negative scales"]
    assert data["tensors"][0]["nvfp4_s5"] is not None
    assert stderr.startswith("wcodec: q.weight: 3 NaN scales, 1 negative scales")
    assert run(tmp_path / "m.safetensors", "--quiet").stderr == ""


def test_many_flags_are_one_line(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for i in range(5):
        tensors |= with_scales(modelopt(f"layers.{i}"), NaN)
    data, stderr = report(tmp_path, tensors)
    assert stderr.count("\n") == 1
    assert "and 4 more tensors with flags" in stderr
    assert all(t["flags"] == ["1 NaN scales"] for t in data["tensors"])


def test_missing_siblings_are_remarks(tmp_path: Path) -> None:
    lonely = {
        "a.weight_scale": u8(bell((8, 2), 100, 5, 1), "F8_E4M3"),
        "b.weight_packed": u8(codes((8, 16), 2)),
        "c.weight": u8(codes((8, 16), 2)),
        "c.weight_scale_2": f32(1.0),
        "d.weight": u8(codes((8, 16), 2)),  # bytes may be anything
        "e.weight": u8(codes((64, 64), 2), "F8_E4M3"),
        "e.weight_scale": u8(bell((64, 2), 120, 2, 3), "F8_E8M0"),  # FP8 weights have larger blocks
        "f_scales": u8(bell((8, 2), 120, 2, 1)),
    }
    data, stderr = report(tmp_path, lonely, "--strict")
    assert data["sources"][0]["remarks"] == [
        "a.weight_scale: block scales without a weight that they fit (and 1 more such scales)",
        "b.weight_packed: 4-bit codes without block scales that fit (and 1 more such tensors)",
    ]
    assert stderr.count("\n") == 2
    assert {t["kind"] for t in data["tensors"]} == {"fp8", "bytes", "fp32", "e8m0"}


def test_what_globs_leave_out_is_not_missing(tmp_path: Path) -> None:
    data, stderr = report(tmp_path, compressed(), "--exclude", "*global_scale")
    assert (data["tensors"][0]["kind"], data["tensors"][0]["flags"], stderr) == ("nvfp4", [], "")
    assert data["tensors"][0]["format"] == "nvfp4-s5"
    assert report(tmp_path, compressed(), "--include", "*_scale")[1] == ""


def test_small_thin_and_ragged_weights_stay(tmp_path: Path) -> None:
    ragged = {"r.weight": u8(codes((64, 20), 1)), "r.weight_scale": u8(bell((64, 3), 100, 5, 2), "F8_E4M3")}
    data, _ = report(tmp_path, {**modelopt(shape=(8, 64)), **modelopt("n", spread=80), **ragged})
    small, noisy, short = data["tensors"]
    assert small["nvfp4_s5"] is noisy["nvfp4_s5"] is short["nvfp4_s5"] is None
    assert "too small or too thin" in small["verdict"]["reason"]
    assert "of its scale bytes miss a 5-bit window" in noisy["verdict"]["reason"]
    assert "rows end inside a block" in short["verdict"]["reason"]
    assert "4.60 bits per weight" in short["verdict"]["reason"]  # three scales per 40 weights


def test_samples_are_marked_as_estimates(tmp_path: Path) -> None:
    tensors = {**modelopt(shape=(512, 1024)), **modelopt("small", (64, 64))}
    (exact, _), (guess, small) = (
        report(tmp_path, tensors, *a)[0]["tensors"] for a in ((), ("--sample", "20kB"))
    )
    assert (exact["sampled"], guess["sampled"], small["sampled"]) == (False, True, False)
    assert guess["nibble_entropy"] == pytest.approx(exact["nibble_entropy"], abs=0.02)
    assert guess["nvfp4_s5"]["bytes"] == pytest.approx(exact["nvfp4_s5"]["bytes"], rel=0.005)


def test_headers_alone_assume_that_scales_fit(tmp_path: Path) -> None:
    data, stderr = report(tmp_path, {**modelopt(spread=1), **gpt_oss()}, "--sample", "0")
    nvfp4, mxfp4 = data["tensors"]
    assert stderr == ""
    assert nvfp4["sampled"]
    assert mxfp4["sampled"]
    assert nvfp4["nibble_entropy"] is nvfp4["scale_entropy"] is None
    assert nvfp4["scale_windows"] == {"16": None, "32": None, "64": None}
    assert nvfp4["nvfp4_s5"] == report(tmp_path, modelopt(spread=1))[0]["tensors"][0]["nvfp4_s5"]
    assert (nvfp4["format"], nvfp4["verdict"]["action"]) == ("nvfp4-s5", "pack")
    assert "leave it as it is, 4.25 bits per weight" in mxfp4["verdict"]["reason"]


def test_chunks_and_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.safetensors", {**with_scales(modelopt(), NaN), **gpt_oss()})
    want = wcodec.analyze(path).to_json()
    (task,) = analyzer._tasks(analyzer._logical(analyzer.open_source(path)), None)
    assert len(pickle.dumps(scan.scan(task))) < 4000
    with ProcessPoolExecutor(2) as executor:
        assert wcodec.analyze(path, executor=executor).to_json() == want
    monkeypatch.setattr(TensorInfo.chunks, "__defaults__", (1000,))
    assert wcodec.analyze(path).to_json() == want


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.safetensors", modelopt())
    seen: list[tuple[str, int]] = []
    read_range = TensorInfo.read_range

    def counted(self: TensorInfo, start: int, stop: int) -> Any:
        seen.append((self.name, stop - start))
        return read_range(self, start, stop)

    monkeypatch.setattr(TensorInfo, "read_range", counted)
    wcodec.analyze(path)
    assert sorted(seen) == [("q.weight", 16384), ("q.weight_scale", 2048), ("q.weight_scale_2", 4)]


def test_others_have_the_keys_without_values(tmp_path: Path) -> None:
    found = report(tmp_path, {"w": gaussian((64, 64))})[0]["tensors"][0]
    for key in ("nibble_entropy", "scale_entropy", "scale_windows", "nvfp4_s5"):
        assert found[key] is None
    assert found["flags"] == []


def test_csv_and_html_say_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.safetensors", {**with_scales(modelopt(), NaN, NEGATIVE), "w": gaussian((64, 64))}
    )
    found = json.loads(run(path, "--format", "json").stdout)["tensors"][0]
    line, other = csv.DictReader(io.StringIO(run(path, "--format", "csv").stdout))
    assert float(line["h_nibble"]) == found["nibble_entropy"]
    assert float(line["h_scale_byte"]) == found["scale_entropy"]
    assert float(line["scales_outside_32"]) == found["scale_windows"]["32"]
    assert int(line["nvfp4_s5_bytes"]) == found["nvfp4_s5"]["bytes"]
    assert line["flags"] == "1 NaN scales; 1 negative scales"
    assert (other["h_nibble"], other["nvfp4_s5_bytes"], other["flags"]) == ("", "", "")
    page = run(path, "--format", "html").stdout
    assert page.count("nvfp4-s5 takes") >= 2  # above, and in the table
    assert "1 NaN scales" in page


def test_many_layers_share_one_reason(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for i in range(45):
        tensors |= modelopt(f"layers.{i}", (128, 128), i, spread=2)
    lines = run(write(tmp_path / "m.safetensors", tensors)).stdout.splitlines()
    assert len([line for line in lines if line.startswith("layers")]) == 1
    assert "×45" in "".join(lines)
    assert "".join(lines).count("NVFP4: nibbles hold") == 1
    mixed = run(write(tmp_path / "x.safetensors", {**tensors, "w": gaussian((128, 128))})).stdout
    assert mixed.replace("\n", " ").count("NVFP4: nibbles hold") == 1
