"""Packed files and directories: valid safetensors files that give the original back, byte for byte."""

from __future__ import annotations

from wcodec.container.directory import pack_directory, unpack_directory, verify_directory
from wcodec.container.packedfile import PackedFile, original_bytes
from wcodec.container.results import Result, Verdict
from wcodec.container.unpack import unpack_file, verify_file
from wcodec.container.writer import pack_file

__all__ = [
    "PackedFile",
    "Result",
    "Verdict",
    "original_bytes",
    "pack_directory",
    "pack_file",
    "unpack_directory",
    "unpack_file",
    "verify_directory",
    "verify_file",
]
