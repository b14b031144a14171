"""The ``wcodec`` command. Subcommands are imported when they run, so that help is instant.

Adding one is adding ``wcodec/cli/<name>.py`` with a click command called ``command``, and a line below.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import click

from wcodec import __version__
from wcodec.errors import WCodecError
from wcodec.units import visible

#: Subcommands in the order of a first visit, with the help that ``wcodec --help`` shows.
COMMANDS = {
    "analyze": "What a model would gain, losslessly, before anything is written.",
    "pack": "Write a packed model: fewer bytes, every weight recoverable.",
    "unpack": "Give the original file back, byte for byte.",
    "verify": "Check a packed file's digests, or compare it with its source.",
    "info": "Show what a packed file holds, without decoding it.",
    "selfcheck": "Prove all 65,536 bit patterns exact on this machine.",
    "bench": "Time the kernels beside torch's own on this GPU.",
    "tune": "Measure and keep the fastest kernel settings for this GPU.",
    "doctor": "Say what this machine can run and what is missing.",
}

EPILOG = """\b
Examples:
  wcodec analyze model.safetensors
  wcodec pack model.safetensors packed.safetensors
  wcodec verify packed.safetensors --against model.safetensors
  wcodec unpack packed.safetensors back.safetensors

\b
Exit status: 0 done, 1 the data say no, 2 usage or unreadable input.
WCODEC_DEBUG=1 shows the traceback of an error.

\b
Completion for bash (zsh and fish alike: write zsh_source or fish_source):
  eval "$(_WCODEC_COMPLETE=bash_source wcodec)"
"""

#: Modules without which a whole command cannot run, and the extra that brings each.
EXTRAS = {"torch": "torch", "cuda": "cuda"}

EXIT_OK, EXIT_NO, EXIT_USAGE = 0, 1, 2
EXIT_INTERRUPT = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class OneLineErrors(click.Command):
    """A command that prints every error as one line and leaves with a meaningful exit status."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _shell_statuses():  # --help and --version print while options are parsed
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _shell_statuses():
            return super().invoke(ctx)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller, who wants to read nothing
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        with contextlib.suppress(AttributeError):  # paths that are not UTF-8 are printed as they are
            sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        try:
            status = super().main(args, prog_name or "wcodec", complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()  # a closed pipe is noticed here, not at interpreter exit
        except Exception as error:
            if os.environ.get("WCODEC_DEBUG") == "1":
                raise
            _report(error)
        sys.exit(status if isinstance(status, int) else EXIT_OK)


class Commands(OneLineErrors, click.Group):
    """A group that imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"wcodec.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click would import every subcommand to ask for its help.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@contextlib.contextmanager
def _shell_statuses() -> Iterator[None]:
    """Leave as shells expect where click would end the process itself, with 1 and with a blank line."""
    try:
        yield
    except KeyboardInterrupt:
        _leave(EXIT_INTERRUPT, "interrupted")
    except BrokenPipeError:
        _leave_quietly()


def _report(error: Exception) -> NoReturn:
    """Print `error` as one line that says what to do, and leave with its exit status."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        sys.exit(EXIT_USAGE)
    if isinstance(error, click.Abort):
        _leave(EXIT_INTERRUPT, "interrupted")
    if isinstance(error, click.ClickException):
        ctx = getattr(error, "ctx", None)
        hint = f"; see {ctx.command_path} --help" if ctx is not None else ""
        _leave(EXIT_USAGE, f"{error.format_message().rstrip('.')}{hint}")
    if isinstance(error, WCodecError):
        _leave(error.exit_code, str(error))
    if isinstance(error, BrokenPipeError):
        _leave_quietly()
    if isinstance(error, OSError):
        where = f"{visible(os.fsdecode(error.filename))}: " if error.filename else ""
        mend = "; check its permissions" if isinstance(error, PermissionError) else ""
        _leave(EXIT_USAGE, f"{where}{error.strerror or error}{mend}")
    if isinstance(error, MemoryError):
        _leave(EXIT_USAGE, "out of memory; fewer --workers need less")
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        _leave(EXIT_USAGE, f"{error.name} is not installed; pip install 'wcodec[{EXTRAS[error.name]}]'")
    name = type(error).__name__
    _leave(EXIT_USAGE, f"internal error, {name}: {error}; WCODEC_DEBUG=1 shows the traceback to report")


def _leave_quietly() -> NoReturn:
    """Whatever read our output has seen enough; Python must not complain again when it flushes at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_BROKEN_PIPE)


def _leave(status: int, message: str) -> NoReturn:
    click.echo(f"wcodec: error: {visible(' '.join(message.split()))}", err=True)
    sys.exit(status)


@click.group(
    "wcodec",
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", prog_name="wcodec", message="%(prog)s %(version)s")
def main() -> None:
    """Lossless compression for model weights: 24 % fewer bytes, exactly the same weights.

    Packed files are read by GPU kernels as they are, so a model takes less memory and, where reading weights
    is the limit, less time.
    """
