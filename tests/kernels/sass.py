"""What a kernel costs, counted in its disassembly: instructions of the main loop that every pass executes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Pipes of sm_80 and newer: these share the integer ALU; IMAD runs beside it.
_INTEGER = (
    "PRMT",
    "LOP3",
    "SHF",
    "ISETP",
    "IADD3",
    "VIADD",
    "LEA",
    "SEL",
    "PLOP3",
    "VIADDMNMX",
    "VIMNMX",
    "IMNMX",
)
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z0-9_.]+)([^;]*);", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)


@dataclass(frozen=True)
class Loop:
    """Instructions of one pass of the main loop, rare branches left out."""

    issued: int
    integer: int


def nvdisasm() -> str:
    """Return the path of nvdisasm: of the toolkit, or of its wheel."""
    found = shutil.which("nvdisasm")
    if found is None:
        spec = importlib.util.find_spec("nvidia")
        roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
        found = next((str(p) for root in roots for p in root.glob("*/bin/nvdisasm")), None)
    assert found is not None, "nvdisasm is a development dependency: pip install nvidia-cuda-nvdisasm"
    return found


def disassemble(cubin: bytes, folder: Path, *options: str) -> str:
    """Return the SASS of a cubin."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [nvdisasm(), "-c", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main_loop(sass: str) -> Loop:
    """Count the loop that holds every matrix product.

    What a vote of the warp skips is rare: everything between the branch after a ``VOTE.ANY`` and its target
    is left out.
    """
    ops: list[tuple[str, str]] = []  # opcode, operands
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(ops)
        elif op := _LINE.match(line):
            ops.append((op[2], op[3]))
    targets = {
        i: labels[t[1]]
        for i, (code, operands) in enumerate(ops)
        if code == "BRA" and (t := re.search(r"`\((\.L_x_\d+)\)", operands)) and t[1] in labels
    }
    products = [i for i, (code, _) in enumerate(ops) if code.startswith("HMMA")]
    loops = [(end, start) for end, start in targets.items() if start <= products[0] and end >= products[-1]]
    end, start = min(loops, key=lambda loop: loop[0] - loop[1])
    rare: set[int] = set()
    for i in range(start, end):
        if ops[i][0] == "VOTE.ANY":
            branch = next(j for j in range(i, end) if j in targets)
            rare.update(range(branch + 1, targets[branch]))
    hot = [ops[i][0] for i in range(start, end + 1) if i not in rare and ops[i][0] != "NOP"]
    return Loop(len(hot), sum(code.split(".")[0] in _INTEGER for code in hot))


def waits_for_refill(sass: str) -> list[str]:
    """Return what waits for a ring in registers in the pass of the main loop that refills it.

    Registers that a load will fill have a scoreboard, and there are six. Where the compiler runs out of them,
    something else shares that of the weights and waits until the whole ring is there.

    Parameters
    ----------
    sass : str
        Of `disassemble` with ``-hex``: the high word of an instruction names its scoreboard and those that it
        waits for.
    """
    lines: list[tuple[str, int]] = []  # instruction, control bits
    for match in re.finditer(r"\*/\s+([^;]+);\s+/\* 0x\w+ \*/\s+/\* 0x(\w{16}) \*/", sass):
        lines.append((match[1].strip(), int(match[2], 16) >> 41))
    loads = [i for i, (text, _) in enumerate(lines) if "LDG.E.NA" in text]
    products = [i for i, (text, _) in enumerate(lines) if "HMMA" in text]
    refill = [i for i in loads if i > products[0]]  # those before are the prologue's
    boards = {lines[i][1] >> 5 & 7 for i in refill}
    return [
        text
        for text, control in lines[refill[0] : products[-1] + 1]
        if any(control >> 11 >> board & 1 for board in boards)
    ]
