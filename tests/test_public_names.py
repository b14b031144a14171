"""The names of the package: there when asked for, and plain about what they need."""

from __future__ import annotations

import importlib.util

import pytest

import wcodec


@pytest.mark.parametrize("name", ["prepare", "linear", "compress_"])
def test_what_multiplies_asks_for_torch_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "torch" else find(n))
    monkeypatch.delitem(vars(wcodec), name, raising=False)
    with pytest.raises(wcodec.UnsupportedError, match=r"pip install 'wcodec\[torch\]'"):
        getattr(wcodec, name)


@pytest.mark.parametrize("name", wcodec.__all__)
def test_every_public_name_leads_somewhere(name: str) -> None:
    if name in ("prepare", "linear", "compress_"):
        pytest.importorskip("torch")
    assert getattr(wcodec, name) is not None
    assert name in dir(wcodec)


def test_other_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prepares'"):
        wcodec.prepares  # noqa: B018
