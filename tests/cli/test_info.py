"""``wcodec info``: the table a person reads and the JSON a program reads."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from rich.text import Text

from tests.container.weightfiles import build, gaussian, mixed, write
from wcodec.bits import digest
from wcodec.cli import console, main
from wcodec.container import pack_directory, pack_file
from wcodec.container.describe import describe
from wcodec.container.record import RECORD_NAME
from wcodec.named_table import ALWAYS, Column, named_table


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["info", *map(str, args)])


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack_file(write(tmp_path / "a.safetensors", mixed()), tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


def test_a_packed_file_is_known_by_its_content(packed: Path) -> None:
    renamed = packed.rename(packed.with_name("p.packed"))
    assert describe(renamed).kind == "packed file"


def test_json(packed: Path) -> None:
    done = run(packed, "--format", "json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["schema"] == "wcodec.info/1"
    assert document["kind"] == "packed file"
    source = build(mixed())
    assert document["sources"] == [
        {
            "file": "p.safetensors",
            "bytes": len(source),
            "xxh3_128": digest(source).hex(),
            "tool": document["sources"][0]["tool"],
        }
    ]
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors.keys() == mixed().keys()
    for name, (dtype, shape, data) in mixed().items():
        found = tensors[name]
        assert (found["dtype"], found["shape"], found["bytes"]) == (dtype, list(shape), len(data))
        assert found["xxh3_128"] == digest(data).hex()
    assert tensors["embed"]["format"] == "bf16-w12"
    assert tensors["embed"]["bits_per_weight"] == 8 * tensors["embed"]["stored_bytes"] / (250 * 128)
    assert tensors["norm"]["format"] == "raw"
    assert tensors["fp4"]["bits_per_weight"] == 4
    assert tensors["none"]["bits_per_weight"] is None
    totals = document["totals"]
    assert totals["tensors"] == 15
    assert totals["packed_tensors"] == 4
    assert totals["stored_bytes"] == sum(tensor["stored_bytes"] for tensor in tensors.values())
    assert totals["ratio"] == totals["stored_bytes"] / totals["bytes"]


def test_table(packed: Path) -> None:
    done = run(packed)
    assert done.exit_code == 0
    for text in ("embed", "bf16-w12", "250 × 128", "höher/名前", "15 tensors, 4 packed", "scalar"):
        assert text in done.stdout


def test_a_packed_directory(tmp_path: Path, packed: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("1", "2"):
        write(folder / f"{name}.safetensors", mixed(int(name)))
    pack_directory(folder, tmp_path / "out")
    found = describe(tmp_path / "out")
    assert found.kind == "packed directory"
    assert [source.file for source in found.sources] == ["1.safetensors", "2.safetensors"]
    assert found.totals["tensors"] == 30
    assert "30 tensors, 8 packed" in run(tmp_path / "out").stdout


def test_what_is_not_packed(tmp_path: Path, packed: Path) -> None:
    found = describe(tmp_path / "a.safetensors")
    assert not found.packed
    assert {tensor.format for tensor in found.tensors} == {"raw"}
    assert "15 tensors" in run(tmp_path / "a.safetensors").stdout
    (tmp_path / "nothing").write_bytes(b"")
    for name in ("nothing", "missing"):
        done = run(tmp_path / name)
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_names_cannot_steer_the_terminal(tmp_path: Path, plan: list[str]) -> None:
    tensors = {"a\nb\x1b[31m": gaussian((64, 64)), "w": gaussian((64, 64))}
    write(tmp_path / "a.safetensors", tensors)
    pack_file(tmp_path / "a.safetensors", tmp_path / "p.safetensors")
    for name in ("a.safetensors", "p.safetensors"):
        done = run(tmp_path / name, *plan)
        assert r"a\nb\x1b[31m" in done.stdout
        assert "\x1b" not in done.stdout


def test_an_address_is_described_from_its_headers() -> None:
    fsspec = pytest.importorskip("fsspec")
    source, packed = "memory://info/a.safetensors", "memory://info/p.safetensors"
    fsspec.filesystem("memory").pipe(source, build({"w": gaussian((128, 64))}))
    assert "128 × 64" in run(source).stdout
    plan = run("--plan", source)
    assert "GPU memory 16.4 kB" in plan.stdout, plan.stderr
    fsspec.filesystem("memory").pipe(packed, build({RECORD_NAME: ("U8", (4,), b"abcd")}))
    done = run(packed)
    assert done.exit_code == 2
    assert "download it first" in done.stderr


@pytest.mark.parametrize("plan", [[], ["--plan"]])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: list[str], width: int
) -> None:
    names = ("embeddings.word_embeddings.weight", f"{'a' * 90}.tail", "short")
    write(tmp_path / "a.safetensors", {name: gaussian((64, 64)) for name in names})
    pack_file(tmp_path / "a.safetensors", tmp_path / "p.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "stdout", lambda: Console(file=sys.stdout, width=width, highlight=False))
    lines = run("p.safetensors", *plan).stdout.splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "kB" in line and line.startswith(("embed", "aaa", "short"))]
    assert len(rows) == 3  # no name is folded
    assert any(".tail " in row and "…" in row for row in rows)
    assert all(word in " ".join(lines) for word in ("format", "stored") if not plan)


def test_no_number_is_cut_where_columns_do_not_fit() -> None:
    cells = ["12.5 kB", Text("3 B", style="cyan")]
    columns = [Column(title, cells, ALWAYS) for title in ("stored", "packed")]
    out = io.StringIO()
    Console(file=out, width=24).print(named_table("tensor", ["a", "b" * 9 + "c" * 9], columns, 24))
    assert out.getvalue() == "tensor            stored\na                12.5 kB\nbbbbb…ccccccccc      3 B\n"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("層" * 9 + ".weight", "層層…層層.weight"),
        ("a" * 9 + "層" * 9, "aaaaa…層層層層層"),
        (
            "e\N{COMBINING ACUTE ACCENT}" * 20 + ".weight",
            "e\u0301" * 5 + "…" + "\u0301" + "e\u0301" * 3 + ".weight",
        ),
    ],
)
def test_wide_and_combining_characters_keep_the_end_of_a_name(name: str, shown: str) -> None:
    out = io.StringIO()
    columns = [Column("stored", ["12.5 kB"], ALWAYS)]
    Console(file=out, width=25).print(named_table("tensor", [name], columns, 25))
    row = out.getvalue().splitlines()[1]
    assert row.split("  ")[0] == shown
    assert row.endswith("12.5 kB")
