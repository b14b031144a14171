"""Read floors: µs to read N bytes with L2 cold. ``python -m bench.floor [--megabytes 8.4 16.8 …]``."""

from __future__ import annotations

import argparse

from bench.harness import Session

SIZES = (4.2, 6.3, 8.4, 12.6, 16.8, 25.2, 28.3, 37.7, 50.3, 67.1, 88.1, 117.4, 176.2, 234.9)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="*", default=SIZES)
    session = Session()
    print(f"empty graph {session.empty:.2f} µs")
    for size in parser.parse_args().megabytes:
        raw = session.floor(int(size * 1e6))
        net = raw - session.empty
        print(f"{size:7.1f} MB  {raw:6.2f} µs raw  {net:6.2f} µs net  {size / net:5.2f} TB/s net")


if __name__ == "__main__":
    main()
