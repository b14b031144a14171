"""Shared by all rooms: device tests are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest


@functools.cache
def no_gpu_reason() -> str | None:
    """Return why device tests cannot run here, or None where they can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {torch.cuda.get_device_capability()} is below 8.0"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what carries the `gpu` marker as skipped where no GPU can run it."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = no_gpu_reason() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a compiled-kernel cache of its own and return its directory."""
    monkeypatch.setenv("WCODEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the largest of every figure that tests recorded with `record_property`."""
    largest: dict[str, float] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                largest[name] = max(largest.get(name, value), value)
    for name, value in sorted(largest.items()):
        terminalreporter.write_line(f"largest {name}: {value:.2e}")
