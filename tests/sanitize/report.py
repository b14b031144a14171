"""What a tool said about a kernel, in one word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SUMMARY = re.compile(
    r"^========= (?:ERROR SUMMARY: (?P<errors>\d+) errors?"
    r"|RACECHECK SUMMARY: \d+ hazards? displayed \((?P<sure>\d+) errors?, (?P<possible>\d+) warnings?\))$",
    re.MULTILINE,
)
_REPORT = re.compile(
    r"^========= (?P<level>Error|Warning): Race reported between (?P<first>.+)\n"
    r"(?P<others>(?:=========     and .+\n)+)",
    re.MULTILINE,
)
_ACCESS = re.compile(r"(?P<kind>Read|Write) access at (?:void )?(?P<function>[\w:]+)")


@dataclass(frozen=True)
class Known:
    """Races that racecheck sees and that are none.

    Attributes
    ----------
    level : str
        How racecheck calls them: ``Error``, or ``Warning`` for those between lanes of one warp.
    reads, writes : set of str
        The device functions that do the one and the other.
    why : str
        What racecheck does not know.
    """

    level: str
    reads: frozenset[str]
    writes: frozenset[str]
    why: str


KNOWN = (
    Known(
        "Warning",
        frozenset({"wc::barrier_expect"}),
        frozenset({"wc::barrier_init"}),
        "thread 0 sets up a barrier and arrives at it; ptxas makes the first an instruction of the whole "
        "warp under a predicate, and racecheck books it on the warp's last lane",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What one tool said about one kernel.

    Attributes
    ----------
    word : str
        For the table.
    said : str
        All of it.
    known : tuple of Known
        Where the tool found something: what explains all of it, if anything does.
    """

    word: str
    said: str = ""
    known: tuple[Known, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the tool watched the kernel to its end and found nothing that is not known."""
        return self.word == "clean" or bool(self.known)

    @property
    def is_finding(self) -> bool:
        """Whether the tool found something."""
        return re.match(r"[1-9]", self.word) is not None


def judge(said: str, name: str) -> Outcome:
    """Read what a tool and the launches of row `name` printed."""
    summary = _SUMMARY.search(said)
    if summary is None:
        return Outcome("failed", said)
    launched = f"launched {name}" in said.splitlines()
    if summary["errors"]:
        count, noun = int(summary["errors"]), "error"
    else:
        count, noun = int(summary["sure"]) + int(summary["possible"]), "hazard"
    if count == 0:
        return Outcome("clean" if launched else "failed", said)
    reports = list(_REPORT.finditer(said))
    found = {known for report in reports for known in _explanations(report)}
    known = tuple(known for known in KNOWN if known in found)
    if not launched or None in found or len(reports) != count:
        known = ()
    return Outcome(f"{count} known" if known else f"{count} {noun}{'s' * (count > 1)}", said, known)


def _explanations(report: re.Match[str]) -> Iterator[Known | None]:
    """What is known of each pair of accesses in one report; None where it is nothing."""
    for other in report["others"].splitlines():
        ends = [_ACCESS.search(line) for line in (report["first"], other)]
        functions = {end["kind"]: end["function"] for end in ends if end is not None}
        matching = (
            known
            for known in KNOWN
            if known.level == report["level"]
            and functions.get("Read") in known.reads
            and functions.get("Write") in known.writes
        )
        yield next(matching, None)
