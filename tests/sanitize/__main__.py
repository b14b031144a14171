"""Run kernels under compute-sanitizer and print who is clean: ``python -m tests.sanitize``.

memcheck finds accesses outside of buffers, racecheck shared memory that is read or written without a barrier
between, synccheck barriers that not all threads reach. Each kernel has a process of its own per tool. First
comes a launch that is wrong on purpose: where memcheck does not see it (not every machine lets the tool look
at the GPU), nothing is run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.sanitize.launches import CONTROL, KERNELS

TOOLS = ("memcheck", "racecheck", "synccheck")
ROOT = Path(__file__).parents[2]
CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")
FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+ \w+)")
REPORT_LINES = 12

#: Kernels in which racecheck sees races that are none, and why.
_ELECTED = (
    "one lane gives a stage back for its warp, which wgmma holds together; racecheck looks for an arrival of "
    "every lane that read, and finds nothing if all 32 arrive"
)
_NAMED = (
    "{what} behind a barrier of the whole CTA, which racecheck loses where groups of warps met at named "
    "barriers before; it finds nothing if there are two in a row"
)
FALSE_ALARMS = {
    "gemv, shared ring": _NAMED.format(what="sums are read"),
    "experts, at most 8 tokens": _NAMED.format(what="routes and sums are read"),
    "experts, at most 16 tokens": _NAMED.format(what="routes and sums are read"),
    "gemm, unsplit": _ELECTED,
    "gemm, split": _ELECTED,
    "gemm, dealt evenly": _ELECTED,
    "gemm, cluster": _ELECTED,
}


_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Outcome:
    """What one tool said about one kernel: a word for the table, and all of it."""

    word: str
    said: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether the tool watched the kernel to its end and found nothing."""
        return self.word == "clean"


def sanitizer() -> str | None:
    """Where compute-sanitizer is installed, if anywhere."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [f"{home}/bin" for home in homes if home]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(places)
    )


def watch(command: str, tool: str, name: str, function: str, seconds: int) -> Outcome:
    """Launch one kernel under one tool, which looks at that kernel only."""
    arguments = [command, "--tool", tool, "--kernel-name", f"kernel_substring={function}"]
    if tool == "memcheck":
        arguments += ["--report-api-errors", "no"]  # torch asks the driver for functions it may not have
    process = subprocess.Popen(
        [*arguments, sys.executable, "-m", f"{__package__}.launches", name],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _running.add(process)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        said, _ = process.communicate()
        return Outcome(f"over {seconds} s", said)
    finally:
        _running.discard(process)
    found = FOUND.search(said)
    if CLEAN.search(said) and f"launched {name}" in said:
        return Outcome("clean", said)
    return Outcome(found[1] if found else "failed", said)


def kill(process: subprocess.Popen[str]) -> None:
    """End a tool and what it watches, which would go on using the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def stop(*_: object) -> NoReturn:
    """Answer SIGTERM and Ctrl-C: leave nothing behind on the GPU."""
    for process in list(_running):
        kill(process)
    os._exit(1)  # at once: the pool would start what waits


def is_false_alarm(name: str, tool: str) -> bool:
    """Whether what a tool finds in a kernel was looked into and is no fault."""
    return tool == "racecheck" and name in FALSE_ALARMS


def main() -> None:
    """Print a table of kernels and tools, then what the tools found; exit with 1 for what is not known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--seconds", type=int, default=120, help="limit of one process")
    parser.add_argument("--logs", type=Path, help="folder for all that the tools say")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    options = parser.parse_args()

    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    command = sanitizer()
    if command is None:
        raise SystemExit("not run: compute-sanitizer is not installed")
    control = watch(command, "memcheck", CONTROL, KERNELS["gemv, register ring"][0], options.seconds)
    if not re.match(r"[1-9]\d* error", control.word):
        raise SystemExit(f"not run: memcheck does not see a store outside of its buffer\n{control.said}")

    def job(name: str, tool: str) -> Outcome:
        outcome = watch(command, tool, name, KERNELS[name][0], options.seconds)
        if options.logs is not None:  # now, and not at the end: a run that is stopped keeps what it has
            file = f"{name.replace(', ', '-').replace(' ', '-')}.{tool}"
            (options.logs / file).write_text(outcome.said)
        return outcome

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = {
            (name, tool): pool.submit(job, name, tool) for name in options.kernels for tool in options.tools
        }
        width = max(map(len, options.kernels))
        print(" " * width, *(f"{tool:<12}" for tool in options.tools))
        for name in options.kernels:
            words = [pending[name, tool].result().word for tool in options.tools]
            print(f"{name:<{width}}", *(f"{word:<12}" for word in words), flush=True)
    outcomes = {key: future.result() for key, future in pending.items()}
    unclean = {key: outcome for key, outcome in outcomes.items() if not outcome.is_clean}
    for (name, tool), outcome in unclean.items():
        lines = [line for line in outcome.said.splitlines() if line.startswith("========= ")]
        print(f"\n{name}, {tool}: {outcome.word}", *lines[:REPORT_LINES], sep="\n")
        if is_false_alarm(name, tool):
            print(f"known to be none: {FALSE_ALARMS[name]}")
    sys.exit(not all(is_false_alarm(*key) for key in unclean))


if __name__ == "__main__":
    main()
