"""docs/integration.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("peft")

PAGE = Path(__file__).parent.parent.parent / "docs" / "integration.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec("\n".join(blocks), names)  # one after the other, as a reader would
    assert (tmp_path / "packed-model" / "config.json").exists()
