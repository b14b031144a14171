"""``wcodec analyze`` as people type it."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.container.weightfiles import build, gaussian, write
from wcodec import analysis
from wcodec.analysis.rows import FEW
from wcodec.cli import main
from wcodec.errors import WCodecError


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["analyze", *map(str, args)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    layers = {f"model.layers.{i}.w": gaussian((128, 128), i) for i in range(2)}
    return write(tmp_path / "model.safetensors", {**layers, "norm": gaussian((64,))})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    for i in range(2):
        write(folder / f"model-{i}.safetensors", {f"w{i}": gaussian((128, 128), i)})
    weight_map = {"w0": "model-0.safetensors", "w1": "model-1.safetensors", "ghost": "model-1.safetensors"}
    index = {"metadata": {"total_size": 65536}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_table_on_stdout(model: Path) -> None:
    done = run(model)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    for said in ("model.layers.0.w", "model.layers.1.w", "norm", "pack", "leave it", "every bit recoverable"):
        assert said in done.stdout


def test_piped_names_are_whole_and_uncoloured(tmp_path: Path) -> None:
    name = "a" * 300
    model = write(tmp_path / "m.safetensors", {name: gaussian((128, 128))})
    done = subprocess.run([sys.executable, "-m", "wcodec", "analyze", model], capture_output=True, text=True)
    assert name in done.stdout
    assert "\x1b" not in done.stdout


def test_formats(model: Path) -> None:
    assert json.loads(run(model, "--format", "json").stdout)["schema"] == "wcodec.analyze/1"
    assert len(list(csv.reader(io.StringIO(run(model, "--format", "csv").stdout)))) == 4
    assert run(model, "--format", "html").stdout.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("name", "start"),
    [("r.json", "{"), ("r.csv", "name,"), ("r.HTML", "<!doctype"), ("r.txt", "\nmodel")],
)
def test_output_file_by_suffix(model: Path, tmp_path: Path, name: str, start: str) -> None:
    done = run(model, "-o", tmp_path / name)
    assert (done.exit_code, done.stdout) == (0, "")
    assert (tmp_path / name).read_text().startswith(start)
    assert {f.name for f in tmp_path.iterdir()} == {"model.safetensors", name}


def test_format_wins_over_the_suffix_and_an_old_report_is_replaced(model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("old")
    assert run(model, "-o", tmp_path / "r.html", "--format", "csv").exit_code == 0
    assert (tmp_path / "r.html").read_text().startswith("name,")


def test_a_failed_run_leaves_the_old_report(model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("old")
    model.write_bytes(model.read_bytes()[:-1])
    assert run(model, "-o", tmp_path / "r.json").exit_code == 2
    assert (tmp_path / "r.json").read_text() == "old"


@pytest.mark.parametrize("option", ["-o", "--plot"])
def test_an_input_is_never_overwritten(model: Path, tmp_path: Path, option: str) -> None:
    before = model.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(model)
    (tmp_path / "hard.safetensors").hardlink_to(model)
    for target in (model, tmp_path / "link.safetensors", tmp_path / "hard.safetensors"):
        done = run(model, option, target)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "is one of the inputs" in done.stderr
    assert model.read_bytes() == before


def test_a_file_of_an_analysed_directory_is_an_input(sharded: Path) -> None:
    done = run(sharded, "-o", sharded / "model.safetensors.index.json")
    assert done.exit_code == 2
    assert "is one of the inputs" in done.stderr
    assert run(sharded, "-o", sharded / "report.html").exit_code == 0
    assert run(sharded, "-o", sharded / "report.html").exit_code == 0  # its own report may be replaced


def test_options_reach_the_analysis(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def stop(paths: object, **how: object) -> None:
        seen.update(how, paths=paths)
        raise WCodecError("seen")

    monkeypatch.setattr(analysis, "analyze", stop)
    run(
        model,
        "--include",
        "a",
        "--include",
        "b",
        "--exclude",
        "c",
        "--workers",
        "3",
        "--gpu",
        "L4",
        "--sample",
        "4kB",
    )
    want = {"include": ("a", "b"), "exclude": ("c",), "workers": 3, "gpu": "L4", "sample_bytes": 4000}
    assert {key: seen[key] for key in want} == want
    assert seen["paths"] == (str(model),)


def test_many_tensors_are_folded_unless_all_are_asked_for(tmp_path: Path) -> None:
    model = write(tmp_path / "m.safetensors", {f"h.{i}.w": gaussian((64, 64), i) for i in range(FEW + 1)})
    assert f"h.*.w ×{FEW + 1}" in run(model).stdout
    every = run(model, "--all").stdout
    assert all(f"h.{i}.w " in every for i in range(FEW + 1))
    run(model, "--all", "-o", tmp_path / "r.txt")
    assert f"h.{FEW}.w " in (tmp_path / "r.txt").read_text()


def test_strict_fails_where_index_and_headers_disagree(sharded: Path) -> None:
    relaxed, strict = run(sharded), run(sharded, "--strict")
    assert relaxed.exit_code == 0
    assert "ghost" in relaxed.stderr
    assert strict.exit_code == 1
    assert "w0" in strict.stdout  # the report is there all the same
    assert "ghost" in strict.stderr.splitlines()[-1]
    assert run(sharded, "--strict", "--quiet").stderr.count("\n") == 1
    (sharded / "model.safetensors.index.json").unlink()
    assert run(sharded / "model-0.safetensors", "--strict").exit_code == 0


def test_trailing_bytes_are_a_difference(tmp_path: Path) -> None:
    model = write(tmp_path / "m.safetensors", {"w": gaussian((64, 64))}, trailing=b"xyz")
    assert run(model).exit_code == 0
    assert run(model, "--strict").exit_code == 1


BAD = {
    "empty": b"",
    "short": b"1234567",
    "huge": (100_000_001).to_bytes(8, "little") + b"{}",
    "lying": (1 << 63).to_bytes(8, "little") + b"{}",
    "text": b"hello, this is no weight file at all" * 3,
    "cut": build({"w": gaussian((64, 64))})[:-1],
    "overlap": b'\x60\0\0\0\0\0\0\0{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
    b'"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}' + b"   ",
}


@pytest.mark.parametrize("kind", [*BAD, "absent", "directory"])
def test_bad_input_is_one_line_and_two(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bad.safetensors"
    if kind == "directory":
        path.mkdir()
    elif kind != "absent":
        path.write_bytes(BAD[kind])
    done = run(path, "-o", tmp_path / "r.json", "--plot", tmp_path / "r.png")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("wcodec: error: ")
    assert done.stderr.count("\n") == 1
    assert "bad.safetensors" in done.stderr
    assert "internal error" not in done.stderr
    assert {f.name for f in tmp_path.iterdir()} <= {"bad.safetensors"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gpu", "nonsense"], "no GPU called 'nonsense'"),
        (["--workers", "0"], "--workers"),
        (["--format", "xml"], "--format"),
        (["--include", "nothing*"], "no tensor name passes"),
        (["-o", "no/such/folder/r.json"], "there is no such folder"),
    ],
)
def test_bad_options_are_one_line_and_two(model: Path, args: list[str], says: str) -> None:
    done = run(model, *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_names_that_the_font_lacks_are_drawn_without_a_word(tmp_path: Path) -> None:
    layers = {f"層.{i}.重み": gaussian((128, 128), i) for i in range(3)}
    command = [sys.executable, "-m", "wcodec", "analyze", str(write(tmp_path / "m.safetensors", layers))]
    done = subprocess.run([*command, "--plot", str(tmp_path / "p.png")], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_plot(model: Path, tmp_path: Path) -> None:
    assert run(model, "--plot", tmp_path / "p.png").exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_gpu_changes_the_times_only(model: Path) -> None:
    fast = json.loads(run(model, "--format", "json", "--gpu", "h100").stdout)
    slow = json.loads(run(model, "--format", "json", "--gpu", "1.675TB/s").stdout)
    assert fast["totals"] == slow["totals"]
    for a, b in zip(fast["tensors"], slow["tensors"], strict=True):
        assert b["verdict"]["read_us"] == pytest.approx(2 * a["verdict"]["read_us"])


def test_a_path_given_twice_is_counted_once(model: Path, sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(model)
    paths = model, sharded, sharded.parent / "." / f"{sharded.name}/", tmp_path / "link.safetensors", model
    done, once = run(*paths, "--format", "json"), run(model, sharded, "--format", "json")
    report, expected = json.loads(done.stdout), json.loads(once.stdout)
    assert report["totals"] == expected["totals"]
    assert report["tensors"] == expected["tensors"]
    assert [source["path"] for source in report["sources"]] == [str(model), str(sharded)]
    added = [
        f"wcodec: {model}: given 3 times, counted once",
        f"wcodec: {sharded}: given 2 times, counted once",
    ]
    assert sorted(done.stderr.splitlines()) == sorted([*once.stderr.splitlines(), *added])


@pytest.mark.parametrize("name", ["p.jpg", "p.PDF"])
def test_a_plot_is_no_other_kind_of_image(model: Path, tmp_path: Path, name: str) -> None:
    done = run(model, "--plot", tmp_path / name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"wcodec: error: {tmp_path / name}: plots are PNG images; name it p.png\n"
    assert not (tmp_path / name).exists()


def test_analyze_imports_neither_torch_nor_matplotlib(model: Path) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from wcodec.cli import main\n"
        f"for form in ('table', 'json', 'csv', 'html'):\n"
        f"    assert CliRunner().invoke(main, ['analyze', {str(model)!r}, '--format', form]).exit_code == 0\n"
        "assert not {'torch', 'matplotlib', 'zstandard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_is_for_terminals(model: Path) -> None:
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "wcodec", "analyze", model, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
    ) as child:
        out = child.communicate(timeout=60)[0]
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert json.loads(out)["totals"]["tensors"] == 3
    assert "analyze" in shown
