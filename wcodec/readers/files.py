"""Which reader a file gets: by its suffix, and by its first bytes where the suffix says nothing."""

from __future__ import annotations

from wcodec.errors import UnsupportedError
from wcodec.readers.base import Content, Source
from wcodec.readers.bytefile import ByteFile, FilePath, LocalFile
from wcodec.readers.gguf import MAGIC, read_gguf
from wcodec.readers.numpy_file import read_npy, read_npz
from wcodec.readers.safetensors import MAX_HEADER, read_safetensors
from wcodec.readers.torch_file import read_torch

SUFFIXES = {
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
    ".npy": "numpy",
    ".npz": "numpy",
}
"""Suffixes that are read, and the kind of reader each gets."""


def is_of_another_kind(path: FilePath) -> bool:
    """Whether the suffix says that this is a weight file, but no safetensors file."""
    return SUFFIXES.get(path.suffix.lower(), "safetensors") != "safetensors"


def read_file(file: ByteFile) -> Content:
    """The tensors of one file.

    Raises
    ------
    UnsupportedError
        Nothing can be made of the file, or an extra is missing.
    MalformedError
        The file contradicts its own format.
    """
    suffix = file.path.suffix.lower()
    kind = SUFFIXES.get(suffix) or _sniff(file)
    if kind == "safetensors":
        return read_safetensors(file)
    if kind == "gguf":
        return read_gguf(file)
    if not isinstance(file, LocalFile):
        raise UnsupportedError(
            f"{suffix} files cannot be read in ranges", file=file.path, mend="download it, then give the path"
        )
    if kind == "torch":
        return read_torch(file)
    return read_npz(file) if suffix == ".npz" else read_npy(file)


def open_file(file: ByteFile) -> Source:
    """The checkpoint in one file; see `read_file`."""
    content = read_file(file)
    return Source(
        path=file.path,
        kind=content.kind,
        files=[file.path],
        tensors=content.tensors,
        metadata=content.metadata,
        ties=content.ties,
        differences=content.differences,
        remarks=content.remarks,
    )


def _sniff(file: ByteFile) -> str:
    """Kind of a file without a known suffix, for example a blob of a Hugging Face cache."""
    head = file.read_at(0, min(file.size, 9)).tobytes()
    if head.startswith(MAGIC):
        return "gguf"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER:
        return "safetensors"
    if head.startswith(b"\x93NUMPY"):
        return "numpy"
    raise UnsupportedError(
        f"is of an unknown kind (suffix {file.path.suffix!r})",
        file=file.path,
        mend=f"files are {', '.join(sorted(SUFFIXES))}",
    )
