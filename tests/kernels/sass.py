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


def disassemble(cubin: bytes, folder: Path) -> str:
    """Return the SASS of a cubin."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([nvdisasm(), "-c", str(file)], capture_output=True, text=True, check=True).stdout


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
