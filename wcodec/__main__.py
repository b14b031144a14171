"""``python -m wcodec`` is the ``wcodec`` command."""

from wcodec.cli import main

main(prog_name="wcodec")
