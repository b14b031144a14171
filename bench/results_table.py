"""Print a results file of bench/muse_bf16_proj.py as the Markdown tables of the README.

python bench/results_table.py bench/results/2026-11-30-h200-muse_bf16_proj.json
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

NAME = re.compile(r"(?P<shape>\w+) (?P<n>\d+)x(?P<k>\d+) m=(?P<m>\d+) (?P<policy>packed|both) (?P<path>\w+)")


def main() -> None:
    """Print µs raw of cuBLAS and of us, and the net ratio, per shape and token count; then the six loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--policy", choices=("packed", "both"), default="packed")
    options = parser.parse_args()
    report = json.loads(options.file.read_text())

    cells: dict[str, dict[int, str]] = {}
    for row in report["rows"]:
        found = NAME.match(row["name"])
        if found is None or found["policy"] != options.policy:
            continue
        text = f"{row['base_raw']:.1f} → {row['ours_raw']:.1f}, **{row['x_net']['value']:.2f}**"
        cells.setdefault(f"{found['shape']} {found['n']}×{found['k']}", {})[int(found["m"])] = text

    tokens = sorted({m for row in cells.values() for m in row})
    print(f"{report['gpu']}, torch {report['torch']}, {report['date'][:10]}; `{report['command']}`.")
    print("µs raw, cuBLAS → wcodec, and how many times faster (net of an empty launch).\n")
    print("| shape N×K | " + " | ".join(f"m={m}" for m in tokens) + " |")
    print("|---" * (len(tokens) + 1) + "|")
    for shape, row in cells.items():
        print(f"| {shape} | " + " | ".join(row.get(m, "") for m in tokens) + " |")
    means = [report["summary"].get(f"{options.policy} table {m}") for m in tokens]
    print(
        "| geometric mean¹ (lowest) |"
        + "|".join(f" **{e[0]:.2f}** ({e[1]:.2f}) " if e else " " for e in means)
        + "|"
    )
    print("\n¹ of the six BF16 matrices, without the slice.\n")
    for key, (value, low, high) in report["summary"].items():
        policy, kind, what = key.split(" ", 2)
        if policy == options.policy and kind in ("load", "six"):
            plural = "" if what == "1" else "s"
            label = "six loads, geometric mean" if kind == "six" else f"load of {what} token{plural}"
            print(f"- {label}: {value:.2f}× [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
