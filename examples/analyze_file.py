"""What would packing save? Analyze weights and read the answer as data.

Run: python examples/analyze_file.py [model.safetensors or directory]
Without an argument it makes random weights, with torch.
"""

import sys
import tempfile
from pathlib import Path

import wcodec

if len(sys.argv) > 1:
    path = Path(sys.argv[1])
else:
    import torch
    from safetensors.torch import save_file

    path = Path(tempfile.mkdtemp()) / "random.safetensors"
    made = {"up": torch.randn(512, 256) / 16, "down": torch.randn(256, 512) / 23, "norm": torch.ones(256)}
    save_file({name: tensor.bfloat16() for name, tensor in made.items()}, path)

report = wcodec.analyze(path, gpu="H200")
for tensor in report.tensors:
    exceptions = "" if tensor.exceptions is None else f"{tensor.exceptions.count} exceptions"
    print(
        f"{tensor.name:30} {tensor.verdict.action:6} {tensor.bits_per_weight:6.3f} bits/weight {exceptions}"
    )
before = sum(tensor.nbytes for tensor in report.tensors)
after = sum(tensor.packed_bytes for tensor in report.tensors)
print(f"{before:,} -> {after:,} bytes")
