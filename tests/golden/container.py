"""Write the golden packed files: ``python -m tests.golden.container`` (it never rewrites one)."""

from __future__ import annotations

from pathlib import Path

from tests.container.nvfp4files import compressed, gpt_oss
from tests.container.weightfiles import build, gaussian, noise, outliers
from wcodec.container import pack_file

FOLDER = Path(__file__).parent / "container-v1"
PAIRS = Path(__file__).parent / "container-v2"


def source() -> bytes:
    """A small source with every kind of entry: blobs, raw tensors, padding, trailing bytes, metadata."""
    tensors = {
        "packed": gaussian((64, 64), 1),
        "odd": ("U8", (3,), b"\1\2\3"),
        "overflow": outliers((128, 63), 2),
        "empty": ("BF16", (0, 3), b""),
        "raw": noise((5, 7), 3),
        "scalar": ("F64", (), b"\0\0\0\0\0\0\xf0\x3f"),
    }
    return build(
        tensors, metadata={"format": "pt", "ü": "\\"}, padding=b"     ", trailing=b"after", reverse=True
    )


def pairs() -> bytes:
    """A small source with block-scaled weights: a blob of two tensors, and scales that are stored."""
    tensors = {
        **compressed("nv", 64, 256, 4),
        "packed": gaussian((64, 64), 1),
        **gpt_oss("mx", 1, 5),
    }
    return build(tensors, metadata={"format": "pt"})


def main() -> None:
    for folder, make in ((FOLDER, source), (PAIRS, pairs)):
        folder.mkdir(exist_ok=True)
        original = folder / "source.safetensors"
        if not original.exists():
            original.write_bytes(make())
        for name, profile in (("packed", "run"), ("stored", "storage")):
            if not (folder / f"{name}.safetensors").exists():
                pack_file(original, folder / f"{name}.safetensors", profile=profile)


if __name__ == "__main__":
    main()
