"""A tiny Llama on disk, shared by the tests of whole models."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random BF16 Llama with biases; not to be written into."""
    from tests.integrations.tiny import write_model

    return write_model(tmp_path_factory.mktemp("llama") / "bf16", attention_bias=True)
