"""Workspaces, with a stand-in for streams and captures: nothing that may overlap shares a block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from wcodec import workspace  # noqa: E402  (it needs torch)
from wcodec.workspace import RESERVE, Workspaces  # noqa: E402


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let a test say which capture it is in; memory is the host's."""
    now = SimpleNamespace(capture=None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capture is not None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(workspace, "_capture_id", lambda stream: now.capture)
    return now


@pytest.mark.usefixtures("gpu")
def test_every_stream_has_its_own_block_and_keeps_it() -> None:
    spaces = Workspaces(torch.device("cpu"), 1024)
    blocks = [spaces.block(stream, 1000) for stream in range(8)]
    assert len(set(blocks)) == 8
    assert [spaces.block(stream, 1024) for stream in range(8)] == blocks


@pytest.mark.usefixtures("gpu")
def test_a_block_that_a_graph_may_use_is_never_freed() -> None:
    spaces = Workspaces(torch.device("cpu"), 64)
    small = spaces.block(1, 64)
    large = spaces.block(1, 4096)
    assert large != small
    assert spaces.block(1, 64) == large
    assert small in {block.data_ptr() for block in spaces._held}


def test_captures_on_a_used_stream_share_its_block(gpu: SimpleNamespace) -> None:
    spaces = Workspaces(torch.device("cpu"), 64)
    eager = spaces.block(1, 64)
    gpu.capture = 7
    assert spaces.block(1, 64) == eager


def test_captures_on_a_new_stream_share_nothing(gpu: SimpleNamespace) -> None:
    spaces = Workspaces(torch.device("cpu"), 64)
    eager = spaces.block(1, 64)
    seen = {eager}
    for capture in range(RESERVE):
        gpu.capture = capture
        first = spaces.block(2, 64)
        assert spaces.block(2, 64) == first  # one block through the whole capture
        assert spaces.block(3, 64) not in {first, *seen}  # another stream of the same capture
        seen.add(first)
    gpu.capture = None
    assert spaces.block(2, 64) not in seen


def test_blocks_of_graph_pools_are_let_go_after_their_capture(gpu: SimpleNamespace) -> None:
    spaces = Workspaces(torch.device("cpu"), 64)
    for capture in range(RESERVE + 3):
        gpu.capture = capture
        spaces.block(9, 64)
    assert len(spaces._by_capture) == 1
    assert len(spaces._held) == RESERVE  # reserved blocks stay: they are zeroed only once


@pytest.mark.usefixtures("gpu")
def test_blocks_start_zeroed_and_are_as_large_as_asked() -> None:
    spaces = Workspaces(torch.device("cpu"))
    assert spaces.nbytes == 0
    spaces.reserve(256)
    assert [block.numel() for block in spaces._reserve] == [256] * RESERVE
    spaces.reserve(128)
    assert [block.numel() for block in spaces._reserve] == [256] * RESERVE
    spaces.reserve(512)
    assert [block.numel() for block in spaces._reserve] == [512] * RESERVE
    spaces.block(1, 512)
    assert not spaces._held[0].any()
