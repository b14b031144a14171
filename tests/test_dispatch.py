"""Which path serves which product: tables, the rule for shapes nobody measured, and both policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wcodec import dispatch, tables
from wcodec.cuda.device import DeviceInfo
from wcodec.dispatch import choose
from wcodec.errors import MalformedError
from wcodec.fused import KERNELS
from wcodec.kernels import gemm_rule
from wcodec.tables import Entry, Tables, read_table, token_class, tuned_path, write_tuned

H200 = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20, 150 << 30)
A100 = DeviceInfo(0, "NVIDIA A100", (8, 0), 108, 166912, 40 << 20, 80 << 30)

GEMM = {"tokens": 128, "row_groups": 2, "stages": 5, "stage_bricks": 1, "split": 4}


def entry(n: int, k: int, m: int, kernel: str, us: float, cublas_us: float) -> Entry:
    config = GEMM if kernel == "gemm" else None
    return Entry(n, k, m, kernel, config, us, cublas_us)


MEASURED = [
    entry(4096, 8192, 128, "gemm", 24.0, 29.0),
    entry(4096, 8192, 128, "decode", 47.0, 29.0),
    entry(4096, 8192, 256, "gemm", 40.0, 35.9),
    entry(4096, 8192, 256, "decode", 54.0, 35.9),
    entry(4096, 8192, 512, "decode", 66.0, 48.0),
    entry(4096, 8192, 4096, "decode", 360.0, 339.0),
    entry(4096, 8192, 64, "gemm", 20.0, 19.0),
    entry(8192, 1024, 128, "gemm", 11.5, 10.5),
]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Tables([("NVIDIA H200", MEASURED)])
    monkeypatch.setattr(dispatch, "tables_for", lambda index: found)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "tables_for", lambda index: Tables([]))


@pytest.mark.usefixtures("measured")
def test_the_fastest_measured_path_serves_its_whole_class() -> None:
    for tokens in (65, 100, 128):
        choice = choose(4096, 8192, tokens, H200, 256, False)
        assert (choice.path, choice.us, choice.cublas_us) == ("gemm", 24.0, 29.0)
        assert choice.config.split == 4
        assert choice.source == "measured on NVIDIA H200"
        assert choice.why == "fastest measured"


@pytest.mark.usefixtures("measured")
def test_keep_both_takes_cublas_exactly_where_it_is_faster() -> None:
    assert choose(4096, 8192, 128, H200, 256, True).path == "gemm"
    slower = choose(4096, 8192, 256, H200, 256, True)
    assert (slower.path, slower.us) == ("cublas", 35.9)
    assert choose(4096, 8192, 256, H200, 256, False).path == "gemm"
    assert choose(8192, 1024, 100, H200, 256, True).path == "cublas"


@pytest.mark.usefixtures("measured")
def test_keep_packed_takes_the_kernel_and_says_what_cublas_takes() -> None:
    assert choose(4096, 8192, 64, H200, 256, True).path == "cublas"
    packed = choose(4096, 8192, 64, H200, 256, False)
    assert (packed.path, packed.us, packed.cublas_us) == ("gemm", 20.0, 19.0)


@pytest.mark.usefixtures("measured")
def test_times_of_far_more_tokens_are_not_quoted() -> None:
    choice = choose(4096, 8192, 1100, H200, 256, False)
    assert (choice.path, choice.us, choice.source) == ("decode", None, "not measured")


@pytest.mark.usefixtures("measured")
def test_an_unseen_shape_follows_the_nearest_and_says_so() -> None:
    choice = choose(4096, 4096, 100, H200, 256, False)
    assert choice.path == "gemm"
    assert choice.us == 4.5 + (24.0 - 4.5) / 2
    assert "scaled by size from 4096×8192" in choice.source
    assert "nearest measured shape 4096×8192" in choice.why
    assert choice.config == KERNELS["gemm"].default(4096, 4096, 128, H200)


def test_prefill_says_nothing_about_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [entry(4096, 4096, 4096, "decode", 190.0, 170.0)]
    found = Tables([("own", own), ("NVIDIA H200", MEASURED)])
    monkeypatch.setattr(dispatch, "tables_for", lambda index: found)
    assert choose(4096, 4096, 100, H200, 256, False).path == "gemm"
    assert choose(4096, 4096, 4096, H200, 256, False).us == 190.0


@pytest.mark.parametrize("config", [{"lanes": 3}, {**GEMM, "tokens": 17}])
def test_a_configuration_of_another_version_gives_way_to_the_rule(
    config: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Tables([("own", [replace(entry(4096, 8192, 128, "gemm", 24.0, 29.0), config=config)])])
    monkeypatch.setattr(dispatch, "tables_for", lambda index: stale)
    choice = choose(4096, 8192, 128, H200, 256, False)
    assert choice.config == KERNELS["gemm"].default(4096, 8192, 128, H200)
    assert choice.why == "rule: what was fastest on own does not run here"


@pytest.mark.usefixtures("measured")
def test_many_tokens_are_decoded_for_or_chunked() -> None:
    assert choose(4096, 8192, 4096, H200, 256, False).path == "decode"
    assert choose(4096, 8192, 4096, H200, 256, False).us == 360.0
    many = choose(4096, 8192, 512, H200, 256, False)
    assert many.path == "decode"  # two calls would take 80 µs
    small = choose(4096, 8192, 200, H200, 128, False)
    assert (small.path, small.us) == ("gemm", 48.0)
    assert "2 calls of at most 128" in small.why
    assert choose(4096, 8192, 4096, H200, 256, True).path == "cublas"


@pytest.mark.usefixtures("unmeasured")
def test_a_gpu_nobody_measured_gets_the_rule() -> None:
    assert choose(4096, 8192, 8, A100, 256, False).path == "gemv"
    assert choose(4096, 8192, 32, A100, 256, False).path == "gemv"
    assert choose(4096, 8192, 33, A100, 256, False).path == "decode"
    assert choose(4096, 8192, 33, H200, 256, False).path == "gemm"
    assert choose(4096, 8192, 300, A100, 256, False).path == "decode"
    both = choose(4096, 8192, 8, A100, 256, True)
    assert both.path == "cublas"
    assert both.us is None


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("tokens", [33, 64, 100, 256])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 64), (64, 64), (160, 232), (2304, 8192), (28672, 4096), (41387, 1024)]
)
def test_the_rule_gives_configurations_that_can_launch(n: int, k: int, tokens: int) -> None:
    config = choose(n, k, tokens, H200, 256, False).config
    grid = config.grid(n, k, tokens, H200.multiprocessors)
    assert np.prod(grid) >= 1


@pytest.mark.parametrize("processors", [16, 78, 114, 132])
def test_measured_configurations_serve_smaller_gpus_of_the_kind(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = replace(H200, multiprocessors=processors)
    entries = [entry for _, _, table in tables.packaged() for entry in table]
    monkeypatch.setattr(dispatch, "tables_for", lambda index: Tables([("NVIDIA H200", entries)]))
    for n, k, m in sorted({(entry.n, entry.k, entry.m) for entry in entries if 16 < entry.m <= 256}):
        choice = choose(n, k, m, info, 256, False)
        if choice.path == "gemm":
            assert choice.config.grid(n, k, m, processors) >= 1


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_packed_matrices_without_elements_get_a_plan(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(dispatch, "device_info", lambda index: H200)
    weight: Any = SimpleNamespace(
        device=torch.device("cuda", 0), is_raw=False, n=shape[0], k=shape[1], original=None, max_tokens=256
    )
    for tokens in dispatch.CLASSES:
        assert dispatch.make_plan(weight, tokens).workspace_bytes == 0


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (2304, 8192), (28672, 4096), (41387, 1024)])
def test_what_tuning_tries_can_launch_and_starts_with_the_rule(n: int, k: int, tokens: int) -> None:
    gemms = KERNELS["gemm"].candidates(n, k, tokens, H200)
    gemvs = KERNELS["gemv"].candidates(n, k, tokens, H200)
    assert bool(gemms) == (gemm_rule.MIN_TOKENS <= tokens <= 256)
    assert bool(gemvs) == (tokens <= 32)
    for config in gemms:
        config.grid(n, k, tokens, H200.multiprocessors)
    assert len(set(gemms)) == len(gemms)
    for name, found in (("gemm", gemms), ("gemv", gemvs)):
        if found:
            assert found[0] == KERNELS[name].default(n, k, tokens, H200)


def test_paths_the_gpu_cannot_run_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    only_wgmma = Tables([("x", [entry(64, 64, 64, "gemm", 1, 2)])])
    monkeypatch.setattr(dispatch, "tables_for", lambda index: only_wgmma)
    assert choose(64, 64, 64, A100, 256, False).path == "decode"


def test_classes() -> None:
    assert [token_class(m) for m in (1, 3, 8, 9, 33, 256, 257)] == [1, 4, 8, 16, 64, 256, 257]


def test_tables_prefer_the_users_own_and_the_nearest_shape() -> None:
    own = entry(64, 64, 8, "gemm", 5, 9)
    theirs = [entry(64, 64, 8, "gemm", 1, 7), entry(64, 64, 8, "decode", 2, 7)]
    found = Tables([("own", [own]), ("packaged", theirs)]).find(64, 64, 5)
    assert found is not None
    assert (found.device, found.entries, found.cublas_us) == ("own", (own,), 9)
    far = Tables([("x", [entry(64, 64, 8, "gemm", 1, 1), entry(4096, 64, 8, "gemm", 2, 2)])])
    near = far.find(2048, 64, 8)
    assert near is not None
    assert near.entries[0].n == 4096
    assert not near.exact
    assert far.find(64, 64, 9) is None


def test_tuning_merges_and_survives_a_restart(kernel_cache: Path) -> None:
    first = [
        entry(64, 64, 8, "gemm", 5, 9),
        entry(64, 64, 8, "decode", 7, 9),
        entry(64, 64, 16, "gemm", 6, 9),
    ]
    path = write_tuned(H200, first, empty_us=3.4, date="2026-11-29")
    assert path == tuned_path("NVIDIA H200")
    write_tuned(H200, [entry(64, 64, 8, "gemm", 4, 8)], empty_us=3.4, date="2026-11-30")
    device, capability, entries = read_table(path.read_text(), str(path))
    assert (device, capability) == ("NVIDIA H200", (9, 0))
    assert {(e.m, e.us, e.cublas_us) for e in entries} == {(8, 4, 8), (16, 6, 9)}
    assert json.loads(path.read_text())["date"] == "2026-11-30"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "other"}', '{"schema": "wcodec.tune/1"}'])
def test_a_broken_table_is_named(text: str) -> None:
    with pytest.raises(MalformedError, match=r"some\.json"):
        read_table(text, "some.json")


def test_packaged_tables_have_a_kernel_for_every_product() -> None:
    for device, capability, entries in tables.packaged():
        assert device
        assert capability == (9, 0)
        kernels: dict[tuple[int, int, int], set[str]] = {}
        for e in entries:
            assert min(e.n, e.k, e.m, e.us, e.cublas_us) > 0
            kernels.setdefault((e.n, e.k, e.m), set()).add(e.kernel)
            if e.kernel in KERNELS:
                KERNELS[e.kernel].config(e.config or {})
        for (_, _, m), found in kernels.items():
            assert ("gemv" in found) == (m <= 32)
            assert "gemm" in found or not 64 <= m <= 256
