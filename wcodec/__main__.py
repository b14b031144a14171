"""The ``wcodec`` command, also as ``python -m wcodec``.

It stands outside `wcodec.cli`, so that Ctrl-C during the first imports is answered like any later one.
"""

import sys


def main() -> None:
    """Run the command; the process ends with its exit status."""
    try:
        from wcodec.cli import main as command

        command(prog_name="wcodec")
    except KeyboardInterrupt:
        sys.stderr.write("wcodec: error: interrupted\n")
        sys.exit(130)  # 128 + SIGINT, as `wcodec.cli.EXIT_INTERRUPT`, which may not be there yet


if __name__ == "__main__":
    main()
