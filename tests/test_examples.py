"""Every example runs, and says what it promises."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "analyze_file": ["up", "pack", "norm", "leave", "bits/weight", "->"],
    "pack_and_unpack": ["1 tensors packed", "every digest matches", "same bytes: True"],
    "linear": ["relative error", "same bits: True", "layer 0", "(4, 512)"],
    "transformers_model": ["lm_head", "is an embedding", "same tokens: True"],
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "transformers_model":
        pytest.importorskip("transformers", minversion="5.24")
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 40
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    for text in SAYS[name]:
        assert text in said, said
