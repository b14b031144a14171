"""NVRTC: one CUDA source of ``decoders_cuda`` to one cubin, checked and cached; needs no GPU and no nvcc.

A kernel that spills registers, touches local memory or has its wgmma serialised still computes the right
values, only several times slower, so such a build is refused instead of shipped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any

import xxhash

from wcodec.cuda import cache
from wcodec.errors import UnsupportedError, WCodecError

Defines = Mapping[str, "int | str"]

# -v prints registers and spills into the log, which is where `Resources` comes from.
_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--ptxas-options=--warn-on-local-memory-usage")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, as ptxas reports it: registers per thread, the rest in bytes."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: `data` is the cubin, `log` what the compiler said, `entry` the kernel's name."""

    data: bytes
    log: str
    entry: str
    arch: str
    cached: bool

    @property
    def resources(self) -> Resources:
        return parse_resources(self.log)


@functools.cache
def source_text(name: str) -> str:
    """Return the text of one file of ``decoders_cuda``."""
    file = resources.files("wcodec.decoders_cuda").joinpath(name)
    if not file.is_file():
        raise WCodecError(f"no CUDA source named {name!r}", mend="reinstall wcodec")
    return file.read_text(encoding="utf-8")


@functools.cache
def headers_of(name: str) -> Mapping[str, str]:
    """Return the local headers that a source includes, directly or not, by name."""
    found: dict[str, str] = {}
    queue = _INCLUDE.findall(source_text(name))
    while queue:
        header = queue.pop()
        if header not in found:
            found[header] = source_text(header)
            queue += _INCLUDE.findall(found[header])
    return found


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"the CUDA run-time compiler is missing ({error})", mend="pip install 'wcodec[cuda]'"
        ) from error
    return nvrtc


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Return the (major, minor) version of the NVRTC in use."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Return the compute capabilities NVRTC can compile for, as 80 for 8.0."""
    nvrtc = _nvrtc()
    _, count = nvrtc.nvrtcGetNumSupportedArchs()
    _, archs = nvrtc.nvrtcGetSupportedArchs()
    return tuple(int(arch) for arch in archs[:count])


def arch_of(capability: tuple[int, int]) -> str:
    """Return the target for a compute capability: ``sm_90a`` for 9.0 (wgmma), else the plain target."""
    major, minor = capability
    if major < 8:
        raise UnsupportedError(
            f"compute capability {major}.{minor} is too old", mend="wcodec needs 8.0 (Ampere) or newer"
        )
    return "sm_90a" if capability == (9, 0) else f"sm_{major}{minor}"


def cache_key(source: str, defines: Defines, arch: str) -> str:
    """Return the digest of everything that decides the cubin's bytes."""
    digest = xxhash.xxh3_128()
    parts = [f"nvrtc {nvrtc_version()}", arch, *_OPTIONS, *_define_options(defines), source_text(source)]
    for name, text in sorted(headers_of(source).items()):
        parts += [name, text]
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # so that parts cannot run into each other
        digest.update(encoded)
    return digest.hexdigest()


def compile_cubin(source: str, defines: Defines, arch: str) -> Cubin:
    """Compile one source for one target, or take it from the cache.

    Parameters
    ----------
    source : str
        File name in ``decoders_cuda``; its one kernel is named like the file's stem.
    defines : Mapping[str, int or str]
        Preprocessor macros that configure the instance.
    arch : str
        Target such as ``"sm_90a"`` (see `arch_of`).

    Raises
    ------
    WCodecError
        Where the source does not compile, spills, uses local memory, or draws a C75xx warning.
    UnsupportedError
        Where NVRTC is missing or too old for the target.
    """
    entry = source.removesuffix(".cu")
    path = cache.cache_dir() / "cubin" / f"{entry}.{arch}.{cache_key(source, defines, arch)}.cubin"
    hit = cache.fetch(path)
    if hit is not None:
        return Cubin(hit[0], hit[1], entry, arch, cached=True)
    data, log = _compile(source, defines, arch)
    check_log(log, f"{source} for {arch} with {dict(defines)}")
    cache.store(path, data, log)
    return Cubin(data, log, entry, arch, cached=False)


def compile_many(instances: Iterable[tuple[str, Defines, str]], workers: int | None = None) -> list[Cubin]:
    """Compile several ``(source, defines, arch)`` at once; NVRTC runs in parallel outside the GIL."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda instance: compile_cubin(*instance), instances))


def _define_options(defines: Defines) -> list[str]:
    return [f"-D{name}={int(v) if isinstance(v, bool) else v}" for name, v in sorted(defines.items())]


def _compile(source: str, defines: Defines, arch: str) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    number = int(re.sub(r"\D", "", arch))
    if number not in supported_archs():
        major, minor = nvrtc_version()
        raise UnsupportedError(
            f"NVRTC {major}.{minor} cannot compile for {arch}", mend="install a newer nvidia-cuda-nvrtc"
        )
    options = [f"--gpu-architecture={arch}", *_OPTIONS, *_define_options(defines)]
    if nvrtc_version() >= (13, 0):
        options.append("--no-cache")  # NVRTC's own cache gives the cubin back without its log
    headers = headers_of(source)
    created, program = nvrtc.nvrtcCreateProgram(
        source_text(source).encode(),
        source.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    if int(created) != 0:
        raise WCodecError(f"NVRTC cannot open {source} ({created.name})")
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0").decode("utf-8", "replace").strip()
        if int(result) != 0:
            raise WCodecError(f"{source} does not compile for {arch} with {dict(defines)}: {text}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def parse_resources(log: str) -> Resources:
    """Read what ptxas -v printed; with several functions in one cubin, the worst of each."""

    def worst(pattern: str) -> int:
        return max((int(value) for value in re.findall(pattern, log)), default=0)

    return Resources(
        registers=worst(r"Used (\d+) registers"),
        stack_bytes=worst(r"(\d+) bytes stack frame"),
        spill_store_bytes=worst(r"(\d+) bytes spill stores"),
        spill_load_bytes=worst(r"(\d+) bytes spill loads"),
        static_shared_bytes=worst(r"(\d+) bytes smem"),
    )


def check_log(log: str, what: str) -> None:
    """Raise WCodecError where the log shows spills, local memory or a C75xx (wgmma, setmaxnreg) warning."""
    used = parse_resources(log)
    if used.stack_bytes or used.spill_store_bytes or used.spill_load_bytes:
        raise WCodecError(
            f"{what}: {used.stack_bytes} bytes of stack, {used.spill_store_bytes} of spill stores, "
            f"{used.spill_load_bytes} of spill loads; its registers must hold everything"
        )
    warned = re.search(r"\(C75\d\d\)[^\n]*|C75\d\d[^\n]*", log)
    if warned:
        raise WCodecError(f"{what}: the assembler gave up an optimisation: {warned.group(0).strip()}")
    if "Used" not in log:
        raise WCodecError(f"{what}: no resource report in the compiler's log")
