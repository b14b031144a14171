"""Pack a file, check it, and get the same bytes back.

Run: python examples/pack_and_unpack.py [model.safetensors]
Without an argument it makes random weights, with torch.
"""

import sys
import tempfile
from pathlib import Path

import wcodec

folder = Path(tempfile.mkdtemp())
if len(sys.argv) > 1:
    source = Path(sys.argv[1])
else:
    import torch
    from safetensors.torch import save_file

    source = folder / "random.safetensors"
    save_file({"weight": (torch.randn(512, 256) / 16).bfloat16()}, source)

result = wcodec.pack_file(source, folder / "packed.safetensors")
print(f"{result.bytes_in:,} -> {result.bytes_out:,} bytes, {result.packed_tensors} tensors packed")

verdict = wcodec.verify_file(folder / "packed.safetensors", against=source)
print("every digest matches" if not verdict.differences else verdict.differences)

wcodec.unpack_file(folder / "packed.safetensors", folder / "back.safetensors")
print("same bytes:", (folder / "back.safetensors").read_bytes() == source.read_bytes())
