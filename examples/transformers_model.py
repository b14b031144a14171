"""Load a BF16 model packed, save it packed, load that again.

Run: python examples/transformers_model.py [directory of a BF16 causal language model]
Needs the extra [transformers].
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from wcodec.integrations.transformers import WCodecConfig, report  # the import registers us

folder = Path(tempfile.mkdtemp())
if len(sys.argv) > 1:
    source = Path(sys.argv[1])
else:
    source = folder / "bf16"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).bfloat16().save_pretrained(source)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(source, device_map=device, quantization_config=WCodecConfig())
for row in report(model):
    print(f"{row.name:36} {row.before_bytes:>12,} -> {row.after_bytes:>12,} bytes  {row.reason or ''}")

model.save_pretrained(folder / "packed")
again = AutoModelForCausalLM.from_pretrained(folder / "packed", device_map=device)  # nothing is packed again
prompt = torch.tensor([[1, 2, 3]], device=device)
tokens = [each.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0) for each in (model, again)]
print("same tokens:", torch.equal(*tokens))
