"""Run kernels under compute-sanitizer and print who is clean: ``python -m tests.sanitize``.

memcheck finds accesses outside of buffers, racecheck shared memory that is read or written without a barrier
between, synccheck barriers that not all threads reach. Each kernel has a process of its own per tool, and all
must be clean but for what `report.KNOWN` explains. First comes a launch that is wrong on purpose: where a
tool does not see it (not every machine lets them look at the GPU), nothing is run. How the kernels are
compiled for the tools is in `launches.options`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tests.sanitize.launches import CONTROL, KERNELS
from tests.sanitize.report import Outcome, judge

TOOLS = ("memcheck", "racecheck", "synccheck")
ROOT = Path(__file__).parents[2]
REPORT_LINES = 12
#: Tools that find something in the launch that is wrong on purpose.
CONTROLLED = ("memcheck", "racecheck")

_running: set[subprocess.Popen[str]] = set()


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
    if tool == "racecheck":
        arguments += ["--print-limit", "0"]  # what is known must not crowd out what is not
    process = subprocess.Popen(
        [*arguments, sys.executable, "-m", f"{__package__}.launches", name, tool],
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
    return judge(said, name)


def kill(process: subprocess.Popen[str]) -> None:
    """End a tool and what it watches, which would go on using the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def stop(*_: object) -> NoReturn:
    """Answer SIGTERM and Ctrl-C: leave nothing behind on the GPU."""
    for process in list(_running):
        kill(process)
    os._exit(1)  # at once: the pool would start what waits


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

    def control(tool: str) -> Outcome:
        return watch(command, tool, CONTROL, KERNELS["gemv, register ring"][0], options.seconds)

    def job(name: str, tool: str) -> Outcome:
        outcome = watch(command, tool, name, KERNELS[name][0], options.seconds)
        if options.logs is not None:  # now, and not at the end: a run that is stopped keeps what it has
            file = f"{name.replace(', ', '-').replace(' ', '-')}.{tool}"
            (options.logs / file).write_text(outcome.said)
        return outcome

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with ThreadPoolExecutor(options.jobs) as pool:
        controls = [tool for tool in CONTROLLED if tool in options.tools] or CONTROLLED[:1]
        for tool, outcome in zip(controls, pool.map(control, controls), strict=True):
            if not outcome.is_finding:
                raise SystemExit(f"not run: {tool} does not see a launch that is wrong\n{outcome.said}")
        pending = {
            (name, tool): pool.submit(job, name, tool) for name in options.kernels for tool in options.tools
        }
        width = max(map(len, options.kernels))
        print(" " * width, *(f"{tool:<12}" for tool in options.tools))
        for name in options.kernels:
            words = [pending[name, tool].result().word for tool in options.tools]
            print(f"{name:<{width}}", *(f"{word:<12}" for word in words), flush=True)
    outcomes = {key: future.result() for key, future in pending.items()}
    for (name, tool), outcome in outcomes.items():
        for known in outcome.known:
            print(f"\n{name}, {tool}: {known.why}")
        if not outcome.is_good:
            lines = [line for line in outcome.said.splitlines() if line.startswith("========= ")]
            print(f"\n{name}, {tool}: {outcome.word}", *lines[:REPORT_LINES], sep="\n")
    sys.exit(not all(outcome.is_good for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
