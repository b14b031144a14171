"""Instances of the small-m product that the device tests run: each structure, each number of tokens."""

from __future__ import annotations

from wcodec.kernels.gemv import GemvConfig

EXAMPLES = {
    "1 token, registers": GemvConfig(1, 16, 1, 1, 1, True, 2),
    "1 token, registers, row warps": GemvConfig(1, 8, 2, 1, 1, True, 1),
    "1 token, shared": GemvConfig(1, 8, 2, 1, 4, False, 2),
    "8 tokens, registers": GemvConfig(8, 8, 1, 1, 1, True, 4),
    "8 tokens, shared": GemvConfig(8, 4, 4, 1, 3, False, 1),
    "16 tokens, registers": GemvConfig(16, 8, 1, 2, 1, True, 2),
    "16 tokens, shared": GemvConfig(16, 12, 1, 2, 2, False, 1),
    "16 tokens, shared, eager": GemvConfig(16, 12, 1, 2, 2, False, 1, eager=True),
    "16 tokens, split in 2": GemvConfig(16, 4, 4, 1, 3, False, 1, 2),
    "32 tokens, shared": GemvConfig(32, 2, 4, 2, 2, False, 2),
    "32 tokens, split in 3": GemvConfig(32, 4, 2, 2, 2, False, 1, 3),
}
