"""NVRTC without a GPU: builds, refusals, and a cache that can be trusted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcodec.cuda import cache, compiler
from wcodec.errors import UnsupportedError, WCodecError

SOURCES = {
    "tiny.cu": """
#include "tiny.cuh"
extern "C" __global__ void tiny(int* out) { out[threadIdx.x] = shared_answer() * SCALE; }
""",
    "tiny.cuh": '#include "deeper.cuh"\n__device__ int shared_answer() { return ANSWER; }\n',
    "deeper.cuh": "#define ANSWER 42\n",
    "broken.cu": 'extern "C" __global__ void broken(int* out) { out[0] = undeclared; }\n',
    "local.cu": """
extern "C" __global__ void local(int* out, int n) {
    int indexed[64];
    for (int i = 0; i < 64; ++i) indexed[(i * n) & 63] = i + n;
    out[threadIdx.x] = indexed[n & 63];
}
""",
}


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> Iterator[dict[str, str]]:
    """Put test sources where the compiler looks for ``decoders_cuda``."""
    pytest.importorskip("cuda.bindings.nvrtc")
    texts = dict(SOURCES)
    monkeypatch.setattr(compiler, "source_text", texts.__getitem__)
    compiler.headers_of.cache_clear()
    yield texts
    compiler.headers_of.cache_clear()


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = compiler._compile

    def counted(source: str, defines: compiler.Defines, arch: str) -> tuple[bytes, str]:
        seen.append(source)
        return real(source, defines, arch)

    monkeypatch.setattr(compiler, "_compile", counted)
    return seen


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_compiles_with_nested_headers_and_reports_resources(arch: str) -> None:
    cubin = compiler.compile_cubin("tiny.cu", {"SCALE": 2}, arch)
    assert cubin.data[:4] == b"\x7fELF"
    assert not cubin.cached
    assert 0 < cubin.resources.registers < 32
    assert cubin.resources.spill_store_bytes == 0


def test_second_build_comes_from_the_cache_and_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_compiles(monkeypatch)
    first = compiler.compile_cubin("tiny.cu", {"SCALE": 2}, "sm_80")
    second = compiler.compile_cubin("tiny.cu", {"SCALE": 2}, "sm_80")
    assert seen == ["tiny.cu"]
    assert second.cached
    assert (second.data, second.log, second.resources) == (first.data, first.log, first.resources)


def test_the_key_covers_source_headers_defines_and_arch(sources: dict[str, str]) -> None:
    keys = {compiler.cache_key("tiny.cu", {"SCALE": 2}, "sm_80")}
    keys.add(compiler.cache_key("tiny.cu", {"SCALE": 3}, "sm_80"))
    keys.add(compiler.cache_key("tiny.cu", {"SCALE": 2}, "sm_90a"))
    sources["deeper.cuh"] = "#define ANSWER 43\n"
    compiler.headers_of.cache_clear()
    keys.add(compiler.cache_key("tiny.cu", {"SCALE": 2}, "sm_80"))
    sources["tiny.cu"] += "\n"
    keys.add(compiler.cache_key("tiny.cu", {"SCALE": 2}, "sm_80"))
    assert len(keys) == 5


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_a_damaged_entry_is_compiled_again(
    damage: str, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = compiler.compile_cubin("tiny.cu", {"SCALE": 2}, "sm_80")
    (entry,) = (kernel_cache / "cubin").iterdir()
    data = bytearray(entry.read_bytes())
    if damage == "truncate":
        data = data[:-7]
    elif damage == "flip":
        data[-100] ^= 1
    elif damage == "empty":
        data.clear()
    else:
        data = bytearray(b"not a cubin at all, but long enough to be read as a header")
    entry.write_bytes(data)
    seen = count_compiles(monkeypatch)
    again = compiler.compile_cubin("tiny.cu", {"SCALE": 2}, "sm_80")
    assert seen == ["tiny.cu"]
    assert again.data == good.data
    assert cache.fetch(entry) == (again.data, again.log)


def test_an_unwritable_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("WCODEC_CACHE_DIR", str(blocked))
    assert compiler.compile_cubin("tiny.cu", {"SCALE": 2}, "sm_80").data[:4] == b"\x7fELF"


def test_no_temporary_files_stay_behind(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    compiler.compile_cubin("tiny.cu", {"SCALE": 2}, "sm_80")
    assert list((kernel_cache / "cubin").iterdir()) == []


def test_a_compile_error_carries_the_compilers_words() -> None:
    with pytest.raises(WCodecError, match=r"broken\.cu does not compile for sm_80.*undeclared"):
        compiler.compile_cubin("broken.cu", {}, "sm_80")


def test_local_memory_fails_the_build() -> None:
    with pytest.raises(WCodecError, match="bytes of stack"):
        compiler.compile_cubin("local.cu", {}, "sm_80")


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "ptxas warning : (C7508) setmaxnreg ignored to maintain minimum register requirements",
    ],
)
def test_assembler_warnings_fail_the_build(line: str) -> None:
    with pytest.raises(WCodecError, match="gave up an optimisation"):
        compiler.check_log(f"{line}\nptxas info    : Used 70 registers", "kernel")


def test_spills_fail_the_build() -> None:
    log = "0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nUsed 255 registers"
    with pytest.raises(WCodecError, match="8 of spill stores, 4 of spill loads"):
        compiler.check_log(log, "kernel")


def test_a_target_the_compiler_does_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot compile for sm_999"):
        compiler.compile_cubin("tiny.cu", {"SCALE": 1}, "sm_999")


def test_targets() -> None:
    assert compiler.arch_of((9, 0)) == "sm_90a"
    assert compiler.arch_of((8, 6)) == "sm_86"
    with pytest.raises(UnsupportedError, match="too old"):
        compiler.arch_of((7, 5))


def test_parallel_builds_agree_with_serial_ones() -> None:
    instances = [("tiny.cu", {"SCALE": scale}, "sm_80") for scale in (1, 2, 1, 3)]
    built = compiler.compile_many(instances)
    assert built[0].data == built[2].data
    assert len({cubin.data for cubin in built}) == 3


def test_concurrent_writers_leave_a_whole_entry(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    payloads = [bytes([i]) * 100_000 for i in range(8)]
    threads = [threading.Thread(target=cache.store, args=(path, p, "log")) for p in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hit = cache.fetch(path)
    assert hit is not None
    assert hit[0] in payloads
    assert list(tmp_path.iterdir()) == [path]


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WCODEC_CACHE_DIR", "/somewhere")
    assert cache.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("WCODEC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_dir() == Path("/xdg/wcodec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == Path.home() / ".cache" / "wcodec"
