"""The command itself: help, errors, exit statuses, signals and start-up time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import wcodec
from tests.container.weightfiles import gaussian, write
from wcodec import cli
from wcodec.cli import console
from wcodec.errors import MalformedError, MismatchError, WCodecError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wcodec", *args],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """A CLI whose ``info`` raises what the test gives it."""

    def make(error: BaseException):
        @click.command()
        def command() -> None:
            raise error

        monkeypatch.setattr(cli.Commands, "get_command", lambda self, ctx, name: command)
        return CliRunner().invoke(cli.main, ["info"])

    return make


def test_help_lists_every_command_without_importing_one() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from wcodec.cli import main\n"
        "result = CliRunner().invoke(main, ['--help']); print(result.output); assert result.exit_code == 0\n"
        "slow = {'numpy', 'numba', 'torch', 'rich', 'zstandard', 'matplotlib', 'wcodec.cli.analyze'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, help_line in cli.COMMANDS.items():
        assert name in done.stdout
        assert help_line in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself_without_heavy_imports(name: str) -> None:
    code = (
        f"import sys; from click.testing import CliRunner; from wcodec.cli import main\n"
        f"result = CliRunner().invoke(main, [{name!r}, '--help']); print(result.output)\n"
        "assert result.exit_code == 0, result.output\n"
        "slow = {'numba', 'torch', 'zstandard', 'matplotlib', 'cuda'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: wcodec {name}")
    assert "Example" in done.stdout


@pytest.mark.parametrize("args", [["--help"], ["analyze", "--help"]])
def test_help_is_instant(args: list[str]) -> None:
    def seconds() -> float:
        """Of processor time: what a busy machine adds by the clock is not ours."""
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(*args).returncode == 0
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option '--nonsense'"),
        (["analyze"], "Missing argument"),
    ],
)
def test_usage_errors_are_one_line(args: list[str], says: str) -> None:
    done = run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("wcodec: error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (MalformedError("cut short", file="a.safetensors", tensor="w", mend="copy it again"), 2,
         "wcodec: error: a.safetensors: tensor 'w': cut short; copy it again"),
        (MismatchError("digests differ", file="a"), 1, "wcodec: error: a: digests differ"),
        (MismatchError("digests differ", tensor=""), 1, "wcodec: error: tensor '': digests differ"),
        (FileNotFoundError(2, "No such file", "x"), 2, "wcodec: error: x: No such file"),
        (OSError(28, "No space left on device", "y"), 2, "wcodec: error: y: No space left on device"),
        (PermissionError(13, "Permission denied", b"y"), 2,
         "wcodec: error: y: Permission denied; check its permissions"),
        (MalformedError("cut short", file="a\n\x1b[1m\u202eb"), 2,
         r"wcodec: error: a\n\x1b[1m\u202eb: cut short; it is damaged or was written wrongly: get it again"),
        (WCodecError("says \x1b[1m"), 2, r"wcodec: error: says \x1b[1m"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2,
         "wcodec: error: torch is not installed; pip install 'wcodec[torch]'"),
        (KeyboardInterrupt(), 130, "wcodec: error: interrupted"),
        (ValueError("a\nb"), 2,
         "wcodec: error: internal error, ValueError: a b; WCODEC_DEBUG=1 shows the traceback to report"),
    ],
)  # fmt: skip
def test_errors_are_one_line(failing, error: BaseException, status: int, line: str) -> None:
    result = failing(error)
    assert result.exit_code == status
    assert result.stdout == ""
    assert result.stderr == line + "\n"


def test_debug_shows_the_traceback(failing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WCODEC_DEBUG", "1")
    error = MalformedError("cut short")
    assert failing(error).exception is error


def test_a_command_may_return_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli.Commands, "get_command", lambda self, ctx, name: click.Command("x", callback=lambda: 1)
    )
    assert CliRunner().invoke(cli.main, ["x"]).exit_code == 1


def test_closed_pipe_is_silent() -> None:
    code = (
        "import sys, click; from wcodec import cli\n"
        "def callback():\n    for i in range(100_000): print('line', i)\n"
        "cli.Commands.get_command = lambda self, ctx, name: click.Command('x', callback=callback)\n"
        "cli.main(['x'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.wait(timeout=30) == 141
        assert child.stderr.read() == b""


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["pack", "--help"]])
def test_closed_pipe_is_silent_for_help_too(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "wcodec", *args], stdout=writer, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_is_no_error(tmp_path: Path, closed: str) -> None:
    path = write(tmp_path / "m.safetensors", {"w": gaussian((64, 64))})
    for args in (["doctor"], ["analyze", str(path)]):
        command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "wcodec", *args]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "args", [("analyze", ""), ("pack", "", "x"), ("unpack", "x", ""), ("verify", ""), ("info", "")]
)
def test_an_empty_path_is_not_the_current_folder(args: tuple[str, ...]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert "the path is empty" in done.stderr


@pytest.mark.parametrize(
    "args", [("pack", "-", "x"), ("pack", "x", "-"), ("unpack", "-", "x"), ("verify", "-")]
)
def test_pipes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.main, args)
    assert done.exit_code == 2
    assert "name a file" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args", [("pack", "hf://a/b", "x"), ("pack", "x", "s3://a/b"), ("verify", "https://a/b")]
)
def test_only_what_reads_alone_takes_addresses(args: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli.main, args)
    assert done.exit_code == 2
    assert "only analyze and info read" in done.stderr


def hear_ctrl_c() -> None:
    """Run in a child: shells start what runs in the background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_leaves_with_130() -> None:
    code = (
        "import time, click; from wcodec import cli\n"
        "def callback():\n    print('ready', flush=True); time.sleep(60)\n"
        "cli.Commands.get_command = lambda self, ctx, name: click.Command('x', callback=callback)\n"
        "cli.main(['x'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_ctrl_c,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 130
        assert child.stderr.read() == b"wcodec: error: interrupted\n"


@pytest.mark.parametrize("how", [["-m", "wcodec"], ["-c", "from wcodec.__main__ import main; main()"]])
def test_ctrl_c_during_the_first_imports(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "click.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [sys.executable, *how, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        preexec_fn=hear_ctrl_c,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 130
        assert child.stderr.read() == b"wcodec: error: interrupted\n"


def test_the_installed_command_is_the_guarded_one() -> None:
    assert PROJECT["scripts"] == {"wcodec": "wcodec.__main__:main"}


def test_s3_is_an_extra_of_its_own() -> None:
    extras = PROJECT["optional-dependencies"]
    assert [spec.partition(">")[0] for spec in extras["s3"]] == ["s3fs"]
    assert not any("s3" in spec for spec in extras["dev"])


def test_version_is_the_packages() -> None:
    declared = PROJECT["version"]
    assert wcodec.__version__ == declared
    assert run("--version").stdout == f"wcodec {declared}\n"


def test_completion_script_is_offered() -> None:
    done = run(env={"_WCODEC_COMPLETE": "bash_source"})
    assert "wcodec_completion" in done.stdout


def test_importing_wcodec_imports_nothing_slow() -> None:
    code = (
        "import sys, wcodec; assert not {'numpy', 'numba', 'torch', 'click'} & set(sys.modules); dir(wcodec)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", wcodec.__all__)
def test_every_public_name_is_there(name: str) -> None:
    if name in ("prepare", "linear", "compress_"):
        pytest.importorskip("torch")
    assert getattr(wcodec, name)
    assert name in dir(wcodec)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = wcodec.nonsense


def test_small_steps_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.01, 1.02, 1.2, 1.21])
    reported: list[int] = []
    monkeypatch.setattr("wcodec.cli.console.time.monotonic", lambda: next(clock))
    advance = console._in_turns(reported.append)
    for nbytes in (1, 2, -1, 4, 8):
        advance(nbytes)
    assert reported == [1, 5]
