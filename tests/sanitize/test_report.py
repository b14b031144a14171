"""What the tools print, read on a machine without a GPU; and what racecheck's kernels differ in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.gemm_instances import EXAMPLES as GEMM
from tests.kernels.gemv_instances import EXAMPLES as GEMV
from tests.kernels.sass import disassemble
from tests.sanitize import report
from tests.sanitize.report import Known, judge
from wcodec.cuda import compiler

ROW = "gemm, split"
DONE = f"launched {ROW}\n"
COPY, LOAD = "wc::bulk_copy(unsigned int, const void *, unsigned int)", "wc::load_smem(unsigned int)"
STORE = "wc::store_smem(unsigned int, wc::u32x4)"
SETUP = "wc::barrier_init(unsigned int, unsigned int)", "wc::barrier_expect(unsigned int, unsigned int)"


def said(summary: str, *reports: str, launches: str = DONE) -> str:
    return f"========= COMPUTE-SANITIZER\n(200, 330) 64\n{''.join(reports)}{launches}========= {summary}\n"


def race(level: str, first: str, *others: str) -> str:
    """Write what racecheck reports; accesses are ``Read`` or ``Write`` and a function."""

    def access(words: str) -> str:
        kind, function = words.split(maxsplit=1)
        return f"{kind} access at {function}+0x1180 in ptx.cuh:112"

    lines = [f"========= {level}: Race reported between {access(first)}"]
    lines += [f"=========     and {access(other)} [24 hazards]" for other in others]
    return "".join(f"{line}\n" for line in [*lines, "========= "])


def races(errors: int, warnings: int, displayed: int | None = None) -> str:
    shown = errors + warnings if displayed is None else displayed
    return f"RACECHECK SUMMARY: {shown} hazards displayed ({errors} errors, {warnings} warnings)"


RING = race("Error", f"Read {LOAD}", f"Write {COPY}", f"Write {COPY}")
RING_AGAIN = race("Error", f"Write {COPY}", "Read wc::load_smem_word(unsigned int)")
SET_UP = race("Warning", f"Write {SETUP[0]}", f"Read {SETUP[1]}")
KNOWN = (
    Known(
        "Error", frozenset({"wc::load_smem", "wc::load_smem_word"}), frozenset({"wc::bulk_copy"}), "a ring"
    ),
    Known("Warning", frozenset({"wc::barrier_expect"}), frozenset({"wc::barrier_init"}), "a barrier"),
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "KNOWN", KNOWN)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (said("ERROR SUMMARY: 0 errors"), "clean"),
        (said(races(0, 0)), "clean"),
        (said("ERROR SUMMARY: 1 error"), "1 error"),
        (said("ERROR SUMMARY: 12 errors"), "12 errors"),
        (said("RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"), "1 hazard"),
        (said(races(300, 2, displayed=100)), "302 hazards"),
        (said("ERROR SUMMARY: 0 errors", launches="a wrong result\n"), "failed"),
        (said("ERROR SUMMARY: 0 errors", launches=f"launched {ROW} in 2\n"), "failed"),
        (RING + DONE, "failed"),
        ("", "failed"),
    ],
)
def test_only_a_kernel_that_was_watched_to_its_end_is_clean(text: str, word: str) -> None:
    outcome = judge(text, ROW)
    assert (outcome.word, outcome.is_good) == (word, word == "clean")
    assert outcome.is_finding == (word not in ("clean", "failed"))


def test_what_is_known_is_said_and_is_good() -> None:
    outcome = judge(said(races(2, 1), RING, SET_UP, RING_AGAIN), ROW)
    assert (outcome.word, outcome.known) == ("3 known", KNOWN)
    assert outcome.is_good
    assert outcome.is_finding
    assert judge(said(races(0, 1), SET_UP), ROW).known == KNOWN[1:]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (said(races(2, 0), RING, race("Error", f"Write {COPY}", f"Write {COPY}")), "two writes"),
        (said(races(1, 0), race("Error", f"Read {COPY}", f"Write {LOAD}")), "swapped"),
        (said(races(0, 1), RING.replace("Error", "Warning")), "within a warp"),
        (said(races(1, 0), SET_UP.replace("Warning", "Error")), "between warps"),
        (said(races(1, 0), race("Error", f"Read {SETUP[1]}", f"Write {COPY}")), "one end of each"),
        (said(races(1, 0), race("Error", f"Read {LOAD}", f"Write {COPY}", f"Write {STORE}")), "one of two"),
        (said(races(1, 0), RING.replace("load_smem", "load_smem_byte")), "another function"),
        (said(races(1, 0), race("Error", f"Read {LOAD}")), "no second access"),
        (said(races(2, 0, displayed=1), RING), "not displayed"),
        (said(races(1, 0), RING, launches=""), "not launched to the end"),
    ],
)
def test_only_what_is_known_is_good(text: str, why: str) -> None:
    outcome = judge(text, ROW)
    assert not outcome.is_good, why
    assert outcome.known == ()


def instructions(
    source: str, defines: compiler.Defines, folder: Path, *options: str, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, *options))
        cubin = compiler.compile_cubin(source, defines, "sm_90a")
    lines = disassemble(cubin.data, folder).splitlines()
    return [line for line in lines if line.lstrip().startswith("/*")]


@pytest.mark.parametrize("source", ["sm80_gemv.cu", "sm90_gemm.cu"])
def test_options_change_what_racecheck_needs_and_nothing_else(
    source: str, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    launches = pytest.importorskip("tests.sanitize.launches")
    config = GEMV["1 token, shared"] if source == "sm80_gemv.cu" else GEMM["narrow tiles"]

    def compiled(*options: str) -> list[str]:
        return instructions(source, config.defines(), tmp_path, *options, monkeypatch=monkeypatch)

    def barriers(lines: list[str]) -> int:
        return sum("BAR.SYNC.DEFER_BLOCKING 0x0" in line for line in lines)

    shipped = compiled()
    assert compiled(*launches.options(ROW, "memcheck")) == shipped
    assert barriers(compiled(*launches.options(ROW, "racecheck"))) == 2 * barriers(shipped) == 2
    assert barriers(compiled(*launches.options(launches.CONTROL, "racecheck"))) == 0
    assert (compiled("-DWC_ARRIVALS=32") != shipped) == (source == "sm90_gemm.cu")
