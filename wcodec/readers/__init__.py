"""Readers: from files, directories and addresses to named tensors whose bytes are read when asked for."""

from wcodec.readers.base import Content, Payload, Source, TensorInfo
from wcodec.readers.bytefile import ByteFile, LocalFile
from wcodec.readers.safetensors import Entry, SafetensorsHeader, parse_header
from wcodec.readers.source import open_source

__all__ = [
    "ByteFile",
    "Content",
    "Entry",
    "LocalFile",
    "Payload",
    "SafetensorsHeader",
    "Source",
    "TensorInfo",
    "open_source",
    "parse_header",
]
