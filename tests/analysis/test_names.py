"""Layer and role from names."""

from __future__ import annotations

import pytest

from wcodec.analysis.names import place


@pytest.mark.parametrize(
    ("name", "stack", "layer", "role"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers", 3, "mlp.up_proj.weight"),
        ("layers.12.mlp.experts.7.down_proj.weight", "layers", 12, "mlp.experts.*.down_proj.weight"),
        ("lm_head.weight", "", None, "lm_head.weight"),
        ("0.weight", "", 0, "weight"),
        ("weights.4", "", None, "weights.4"),
        ("", "", None, ""),
        ("block.99999999999999999999.w", "", None, "block.99999999999999999999.w"),
        ("block.²." + "w", "", None, "block.².w"),
    ],
)
def test_place(name: str, stack: str, layer: int | None, role: str) -> None:
    assert place(name) == (stack, layer, role)


def test_pattern_is_shared_by_layers() -> None:
    assert {place(f"h.{i}.attn.w").pattern for i in range(4)} == {"h.*.attn.w"}
    assert place("3.weight").pattern == "*.weight"
