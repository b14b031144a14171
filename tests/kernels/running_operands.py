"""What a kernel writes to A registers of wgmma that running products still read, found in its disassembly.

Neither the language nor the assembler says so: a load may land in the registers of products that were started
before and are waited for later.
"""

from __future__ import annotations

import re

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Za-z0-9_.]+)\s*([^;]*);")
_RESULT = re.compile(r"(?:U?P\w+,\s*)?R(\d+)")
#: Instructions whose first operand is no register that they write.
_NO_RESULT = ("ST", "SYNCS", "BAR", "WARP", "BRA", "UB", "UT", "RED", "EXIT", "NOP", "ISETP", "PLOP3", "VOTE")
_MOST_GROUPS = 4  # in flight, of the paths that are told apart

Registers = frozenset[int]
State = tuple[
    int, tuple[Registers, ...], Registers
]  # place, groups in flight, the group that is being started


def _written(code: str, operands: str) -> Registers:
    found = None if code.startswith(_NO_RESULT) else _RESULT.match(operands)
    if found is None:
        return frozenset()
    first = int(found[1])
    width = 4 if ".128" in code else 2 if ".64" in code or "WIDE" in code or code == "CS2R" else 1
    return frozenset(range(first, first + width))


def writes_to_running_operands(sass: str) -> list[str]:
    """Return the instructions that do, on any path."""
    ops: list[tuple[bool, str, str]] = []  # is predicated, opcode, operands
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(ops)
        elif op := _LINE.match(line):
            ops.append((op[1] is not None, op[2], op[3]))
    found: set[str] = set()
    seen: set[State] = set()
    paths: list[State] = [(0, (), frozenset())]
    while paths:
        state = paths.pop()
        if state in seen or state[0] == len(ops):
            continue
        seen.add(state)
        at, running, started = state
        predicated, code, operands = ops[at]
        if code.startswith("HGMMA"):
            registers = re.match(r"R\d+, R(\d+)", operands)
            assert registers is not None, f"{code} {operands}: A is not in registers"
            started |= frozenset(range(int(registers[1]), int(registers[1]) + 4))
            if "gsb0" in operands:
                running, started = (*running, started)[-_MOST_GROUPS:], frozenset()
        elif code == "WARPGROUP.DEPBAR.LE":
            pending = int(operands.split("0x")[1], 16)
            running = running[-pending:] if pending else ()
        elif _written(code, operands) & started.union(*running):
            found.add(f"{code} {operands}")
        target = re.search(r"\.L_x_\d+", operands) if code.startswith("BRA") else None
        if target and target[0] in labels:
            paths.append((labels[target[0]], running, started))
        if predicated or (not target and code != "EXIT"):
            paths.append((at + 1, running, started))
    return sorted(found)
