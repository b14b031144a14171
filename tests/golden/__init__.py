"""Encoded files of every released format version: what was written once must be readable for ever.

`python -m tests.golden` writes the files of the current version that do not exist yet. It never rewrites one:
a layout that changes gets a new version and new files beside the old.
"""
