"""``wcodec doctor``: what this machine can run, and what is missing for the rest."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import click

from wcodec.errors import WCodecError

EPILOG = """\b
Examples:
  wcodec doctor
  wcodec doctor --format json | jq '.checks[] | select(.state != "ok")'
"""

OK, MISSING, BROKEN = "ok", "missing", "broken"
_MARKS = {OK: "[green]✓[/]", MISSING: "[yellow]–[/]", BROKEN: "[red]✗[/]"}

#: What optional packages are for, and the extra that brings them.
_OPTIONAL = {
    "gguf": ("GGUF files", "gguf"),
    "matplotlib": ("--plot", "plot"),
    "huggingface_hub": ("hf:// addresses", "remote"),
    "aiohttp": ("https:// addresses", "remote"),
    "s3fs": ("s3:// addresses", "s3"),
    "distributed": ("--dask", "dask"),
    "transformers": ("loading packed models in transformers", "transformers"),
}


@dataclass(frozen=True)
class Check:
    """One thing looked at: `state` is ok, missing (optional) or broken; `mend` says what to do."""

    name: str
    state: str
    found: str
    mend: str | None = None


@click.command(epilog=EPILOG, short_help="What this machine can run and what is missing.")
@click.option(
    "--format", "format_", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
def command(format_: str) -> int:
    """Say what this machine can run and what is missing.

    Exit status 1 if something that should work is broken; what is merely not installed is no error.
    """
    checks = list(examine())
    if format_ == "json":
        report = {"schema": "wcodec.doctor/1", "checks": [asdict(check) for check in checks]}
        click.echo(json.dumps(report, ensure_ascii=False, indent=1))
    else:
        _print(checks)
    return 1 if any(check.state == BROKEN for check in checks) else 0


def examine() -> Iterator[Check]:
    """Look at everything, from the host codec to the GPU."""
    from wcodec import __version__

    yield Check("wcodec", OK, f"{__version__}, Python {platform.python_version()}, {platform.machine()}")
    yield _guarded("host codec", _host_codec)
    torch = _guarded("torch", _torch)
    yield torch
    compiler = _guarded("run-time compiler", _compiler)
    yield compiler
    yield _guarded("kernel cache", _cache)
    yield from _gpus(torch.state == OK, compiler.state == OK)
    for module, (purpose, extra) in _OPTIONAL.items():
        yield _optional(module, purpose, extra)


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    """Turn what a check raises into its finding: a doctor does not fall ill himself."""
    try:
        return look()
    except WCodecError as error:
        return Check(name, MISSING, error.problem, error.mend)
    except Exception as error:
        return Check(name, BROKEN, f"{type(error).__name__}: {error}", "reinstall wcodec")


def _host_codec() -> Check:
    import numpy as np

    from wcodec.codec import encode

    bits = np.arange(1 << 14, dtype=np.uint16).reshape(128, 128) % 2048 + 0x3C00
    packed = encode(bits, format="bf16-w12")
    if not np.array_equal(packed.decode(), bits):
        return Check("host codec", BROKEN, "a tensor did not decode to itself", "report this")
    return Check("host codec", OK, "encodes and decodes exactly; wcodec selfcheck proves all patterns")


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", MISSING, "not installed: no prepare(), no linear()", _install("torch"))
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return Check("torch", OK, f"{torch.__version__}, built {built}")


def _compiler() -> Check:
    from wcodec.cuda.compiler import compile_cubin, nvrtc_version, supported_archs

    major, minor = nvrtc_version()
    cubin = compile_cubin("empty.cu", {}, f"sm_{min(a for a in supported_archs() if a >= 80)}")
    newest = max(supported_archs())
    found = f"NVRTC {major}.{minor}, up to compute capability {newest // 10}.{newest % 10}"
    return Check("run-time compiler", OK, found + (", from the cache" if cubin.cached else ""))


def _cache() -> Check:
    from wcodec.cuda.cache import cache_dir, write_atomic

    place = cache_dir()
    try:
        write_atomic(place / "probe", b"")
        (place / "probe").unlink()
    except OSError as error:
        mend = "set WCODEC_CACHE_DIR to a directory that can be written"
        return Check(
            "kernel cache", BROKEN, f"{place}: {error.strerror}: kernels compile on every start", mend
        )
    entries = list((place / "cubin").glob("*.cubin"))
    megabytes = sum(entry.stat().st_size for entry in entries) / 1e6
    return Check("kernel cache", OK, f"{place}, {len(entries)} kernels, {megabytes:.1f} MB")


def _gpus(has_torch: bool, has_compiler: bool) -> Iterator[Check]:
    if not has_torch:
        yield Check("GPU", MISSING, "cannot look without torch", _install("torch"))
        return
    import torch

    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else "a CUDA build of torch and "
        mend = f"install {build}an NVIDIA driver; everything else works without"
        yield Check("GPU", MISSING, "torch sees no CUDA device: products run on the host", mend)
        return
    for index in range(torch.cuda.device_count()):
        yield _guarded(f"GPU {index}", functools.partial(_gpu, index, has_compiler))


def _gpu(index: int, has_compiler: bool) -> Check:
    from wcodec.cuda.compiler import supported_archs
    from wcodec.cuda.device import device_info
    from wcodec.tables import Tables, tables_for, tuned_path

    name = f"GPU {index}"
    info = device_info(index)
    major, minor = info.capability
    found = f"{info.name}, compute capability {major}.{minor}, {info.total_bytes / 1e9:.0f} GB"
    _ = info.arch  # too old: says so
    if not has_compiler:
        return Check(name, MISSING, f"{found}: no fused kernels without NVRTC", _install("cuda"))
    if 10 * major + minor not in supported_archs():
        return Check(name, MISSING, f"{found}: newer than NVRTC", "install a newer nvidia-cuda-nvrtc")
    paths = "fused up to 256 tokens (wgmma)" if info.has_wgmma else "fused up to 32 tokens (mma.sync)"
    tables: Tables = tables_for(index)
    if tuned_path(info.name).exists():
        times = "tuned here"
    elif tables.find(1, 1, 1) is not None:
        times = "tables of the package"
    else:
        times = "not measured: wcodec tune"
    return Check(name, OK, f"{found}; {paths}; {times}")


def _optional(module: str, purpose: str, extra: str) -> Check:
    if importlib.util.find_spec(module) is None:
        return Check(module, MISSING, f"not installed: {purpose}", _install(extra))
    return Check(module, OK, f"{importlib.metadata.version(module)}: {purpose}")


def _install(extra: str) -> str:
    return f"pip install 'wcodec[{extra}]'"


def _print(checks: list[Check]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from wcodec.cli import console

    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        mend = f"\n[dim]→ {escape(check.mend)}[/]" if check.mend and check.state != OK else ""
        table.add_row(_MARKS[check.state], check.name, escape(check.found) + mend)
    console.stdout().print(table)
