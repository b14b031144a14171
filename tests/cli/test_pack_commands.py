"""``wcodec pack``, ``unpack`` and ``verify`` as a shell sees them: exit status, streams, signals."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.container.weightfiles import gaussian, mixed, write
from wcodec import container
from wcodec.cli import main
from wcodec.cli.files import leaving_nothing
from wcodec.container import pack_directory, pack_file, shards
from wcodec.errors import WCodecError


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "a.safetensors", mixed(), metadata={"format": "pt"}, trailing=b"x")


def test_the_round_trip(tmp_path: Path, source: Path) -> None:
    packed, back = tmp_path / "p.safetensors", tmp_path / "b.safetensors"
    done = run("pack", source, packed)
    assert done.exit_code == 0
    assert "4 of 15 tensors packed" in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    done = run("verify", packed, "--against", source)
    assert done.exit_code == 0
    assert f"exact, same as {source}" in done.stdout
    assert run("unpack", packed, back, "--workers", "1").exit_code == 0
    assert back.read_bytes() == source.read_bytes()


def test_packing_what_does_not_get_smaller(tmp_path: Path) -> None:
    source = write(tmp_path / "a.safetensors", {"f32": ("F32", (64,), bytes(256))})
    done = run("pack", source, tmp_path / "p.safetensors")
    assert done.exit_code == 0
    assert "nothing got smaller" in done.stderr
    assert "0 of 1 tensor packed" in done.stdout
    assert run("pack", source, tmp_path / "p.safetensors", "-qf").stderr == ""
    assert "exact" in run("verify", tmp_path / "p.safetensors", "--against", source).stdout


@pytest.mark.parametrize("command", ["pack", "unpack", "verify"])
def test_workers_reach_the_container(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    pack_file(source, tmp_path / "p")
    seen: list[int | None] = []

    def stop(*_: object, workers: int | None, **__: object) -> None:
        seen.append(workers)
        raise WCodecError("seen")

    monkeypatch.setattr(container, f"{command}_file", stop)
    paths = [
        source if command == "pack" else tmp_path / "p",
        *([tmp_path / "x"] if command != "verify" else []),
    ]
    run(command, *paths)
    run(command, *paths, "--workers", "3")
    assert seen == [None, 3]


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path, source: Path) -> None:
    packed, precious = tmp_path / "p.safetensors", tmp_path / "precious"
    assert run("pack", source, packed).exit_code == 0
    for command, path in (("pack", source), ("unpack", packed)):
        precious.write_bytes(b"precious")
        done = run(command, path, precious)
        assert done.exit_code == 2
        assert "--force" in done.stderr
        assert precious.read_bytes() == b"precious"
        assert run(command, path, precious, "--force").exit_code == 0
        assert precious.read_bytes() != b"precious"


def test_unreadable_paths_are_named_by_whoever_reads_them(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_file(source, tmp_path / "p")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The superuser may read anything: let the file system say no.
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "open", refuse)
    for command in (["pack", source, "x"], ["unpack", tmp_path / "p", "x"], ["verify", tmp_path / "p"]):
        done = run(*command)
        assert done.exit_code == 2
        assert done.stderr == f"wcodec: error: {command[1]}: may not be read; check its permissions\n"


def test_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / ".git").mkdir(parents=True)
    for i in range(2):
        write(folder / f"{i}.safetensors", mixed(i))
    done = run("pack", folder, tmp_path / "packed")
    assert done.exit_code == 0
    assert "2 files, 8 of 30 tensors packed" in done.stdout
    assert done.stderr == "wcodec: .git is left out: it is not part of the model\n"
    assert run("pack", folder, tmp_path / "packed", "--force", "--quiet").stderr == ""
    assert "2 files" in run("verify", tmp_path / "packed").stdout
    (folder / ".git").rmdir()
    assert run("verify", tmp_path / "packed", "--against", folder).exit_code == 0
    assert run("unpack", tmp_path / "packed", tmp_path / "back").exit_code == 0
    assert (tmp_path / "back" / "1.safetensors").read_bytes() == (folder / "1.safetensors").read_bytes()


def test_an_interrupted_directory_says_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for i in range(2):
        write(folder / f"{i}.safetensors", mixed(i))
    packed = shards.pack_file

    def full(source: Path, target: Path, **how: object) -> object:
        if source.name == "1.safetensors":
            raise WCodecError("cannot write: No space left on device", file=target)
        return packed(source, target, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "pack_file", full)
    done = run("pack", folder, tmp_path / "p", "--workers", "1")
    assert done.exit_code == 2
    kept, error = done.stderr.splitlines()
    assert ".p.wcodec-part; the same command goes on" in kept
    assert "No space left" in error
    monkeypatch.undo()
    assert run("pack", folder, tmp_path / "p").exit_code == 0
    assert names(tmp_path) == {"model", "p"}


def test_the_storage_profile_and_back(tmp_path: Path, source: Path) -> None:
    stored, packed = tmp_path / "s.safetensors", tmp_path / "p.safetensors"
    assert "4 of 15 tensors packed" in run("pack", "--profile", "storage", source, stored).stdout
    assert run("verify", stored, "--against", source).exit_code == 0
    assert run("pack", stored, packed).exit_code == 0
    assert run("pack", source, tmp_path / "q").exit_code == 0
    assert packed.read_bytes() == (tmp_path / "q").read_bytes()
    done = run("pack", "--profile", "storage", stored, tmp_path / "x")
    assert done.exit_code == 2
    assert "packed already" in done.stderr


def test_verify_tells_different_from_malformed(tmp_path: Path, source: Path) -> None:
    packed = tmp_path / "p.safetensors"
    run("pack", source, packed)
    good = packed.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    data = bytearray(good)
    data[start + 5] ^= 1  # a low byte of the first blob
    packed.write_bytes(data)
    done = run("verify", packed)
    assert done.exit_code == 1
    assert "tensor 'embed'" in done.stdout
    assert "DIFFERENT" in done.stdout
    done = run("unpack", packed, tmp_path / "b")
    assert done.exit_code == 1
    assert done.stderr.startswith("wcodec: error: ")
    assert "tensor 'embed'" in done.stderr
    packed.write_bytes(good[:-1])
    done = run("verify", packed)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert names(tmp_path) == {"a.safetensors", "p.safetensors"}


@pytest.mark.parametrize(
    ("change", "where"), [(20, "header"), (-1, "after the last tensor"), (-5000, "in tensor")]
)
def test_verify_against_another_file(tmp_path: Path, source: Path, change: int, where: str) -> None:
    packed, other = tmp_path / "p.safetensors", tmp_path / "o.safetensors"
    run("pack", source, packed)
    data = bytearray(source.read_bytes())
    data[change] ^= 1
    other.write_bytes(data)
    done = run("verify", packed, "--against", other)
    assert done.exit_code == 1
    assert where in done.stdout
    for cut in (data[:-1], data + b"x"):
        cut[change] ^= 1
        other.write_bytes(cut)
        assert run("verify", packed, "--against", other).exit_code == 1
    assert run("verify", packed, "--against", tmp_path / "missing").exit_code == 2


def test_verify_against_a_file_and_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = write(folder / "a.safetensors", mixed())
    pack_file(file, tmp_path / "f")
    pack_directory(folder, tmp_path / "d")
    for packed, against, words in [
        ("f", folder, f"is a folder, but {tmp_path / 'f'} is a file; name the file it was made from"),
        ("d", file, f"is a file, but {tmp_path / 'd'} is a folder; name the folder it was made from"),
    ]:
        done = run("verify", tmp_path / packed, "--against", against)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == f"wcodec: error: {against}: {words}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("pack", "a.gguf", "p"), "convert it to safetensors"),
        (("pack", "missing.safetensors", "p"), "does not exist"),
        (("pack", "a.safetensors", "a.safetensors"), "source itself"),
        (("pack", "a.safetensors", "there"), "already exists"),
        (("pack", "a.safetensors", "no/where"), "create it first"),
        (("unpack", "a.safetensors", "p"), "not a packed file"),
        (("verify", "a.safetensors"), "not a packed file"),
        (("pack", "a.safetensors", "p", "--workers", "0"), "--workers"),
        (("pack", "a.safetensors"), "DST"),
    ],
)
def test_refusals_are_one_line_and_exit_2(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "there").write_bytes(b"old")
    before = names(tmp_path)
    done = run(*args)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert names(tmp_path) == before
    assert (tmp_path / "there").read_bytes() == b"old"


def start(*args: object, **how: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wcodec", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signals_leave_nothing(tmp_path: Path, number: int, status: int) -> None:
    """The signal comes while the temp file is there; the old destination stays."""
    source = write(tmp_path / "a.safetensors", {f"w{i}": gaussian((1024, 2048), i) for i in range(24)})
    (tmp_path / "p").write_bytes(b"old")
    # Shells start what runs in the background with SIGINT ignored.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start("pack", source, tmp_path / "p", "--force", preexec_fn=hears)
    part = tmp_path / ".p.wcodec-part"
    deadline = time.monotonic() + 60
    while not part.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert names(tmp_path) == {"a.safetensors", "p"}
    if (tmp_path / "p").read_bytes() != b"old":  # it was faster: the signal found it done, or ending
        assert process.returncode in (0, status, -number)
        return
    # Python ends by SIGINT whatever it is told, once that has come in code of `exec`, which numba makes a lot
    # of; shells see the same status.
    assert process.returncode in (status, -number)
    assert "Traceback" not in errors


def test_a_signal_whose_exception_is_lost_ends_the_command_all_the_same() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, leaving_nothing(), contextlib.suppress(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)  # what runs a callback of a C library suppresses it like this
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_full_disk(tmp_path: Path) -> None:
    source = write(tmp_path / "a.safetensors", {"w": gaussian((1024, 1024))})

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(
        "pack", source, tmp_path / "p", preexec_fn=limit, env={**os.environ, "NUMBA_DISABLE_JIT": "0"}
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "p: cannot write: File too large" in errors
    assert errors.count("\n") == 1
    assert names(tmp_path) == {"a.safetensors"}


def test_pack_needs_no_torch_and_imports_it_never(tmp_path: Path, source: Path) -> None:
    code = (
        "import sys; from wcodec.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'matplotlib', 'dask'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "pack", str(source), str(tmp_path / "p")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["pack", "unpack", "verify", "info"])
def test_help_teaches_by_example(name: str) -> None:
    done = run(name, "--help")
    assert done.exit_code == 0
    assert f"wcodec {name} " in done.stdout.partition("Examples:")[2]
