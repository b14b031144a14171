"""Multiply by packed weights: on the GPU where there is one, correct and unhurried on the CPU elsewhere.

Run: python examples/linear.py      (needs the extra [torch])
"""

import torch

import wcodec

device = "cuda" if torch.cuda.is_available() else "cpu"
weight = (torch.randn(1024, 512) / 22).bfloat16()
x = torch.randn(4, 512).bfloat16().to(device)

state = wcodec.prepare({"up": weight}, device=device)  # once: packs, checks every bit, gets kernels ready
y = wcodec.linear(x, state["up"])
exact = x.double() @ weight.to(device).double().T
print(f"{weight.nbytes:,} -> {state.nbytes:,} bytes on {state.device}")
print("relative error:", f"{((y - exact).norm() / exact.norm()).item():.1e}")
print("same bits:", torch.equal(state["up"].to_bf16().cpu().view(torch.int16), weight.view(torch.int16)))

model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 512))
for swapped in wcodec.compress_(model.bfloat16().to(device)):  # in place, layer by layer
    print(f"layer {swapped.name}: {swapped.before_bytes:,} -> {swapped.after_bytes:,} bytes")
with torch.no_grad():
    print(tuple(model(x).shape))
