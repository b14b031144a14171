"""Compile the routed-experts kernels with the host's C++ compiler; run them on the CPU (see moe_host.hpp)."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import wcodec.decoders_cuda
from tests.kernels.simt import EXPORTED, OWN_SYMBOLS
from wcodec import moe
from wcodec.kernels import moe as kernels

_SOURCES = Path(next(iter(wcodec.decoders_cuda.__path__)))
_HERE = Path(__file__).parent
_COPIED = (
    "ptx.cuh",
    "moe_local.cuh",
    "moe_routes.cuh",
    "nvfp4_s5.cuh",
    "nvfp4_operand.cuh",
    "sm90_moe_parts.cuh",
    "sm90_moe_loops.cuh",
    "sm90_moe_product.cu",
    "sm80_moe_sum.cu",
    "sm80_moe_order.cu",
)
SHARED_BYTES = 232448


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="wcodec-moe-"))
    for name in _COPIED:
        shutil.copy(_SOURCES / name, folder)
    shutil.copy(_HERE / "moe_host.hpp", folder / "ptx_moe.cuh")
    return folder


@functools.cache
def _library(name: str, defines: tuple[tuple[str, int], ...]) -> Any:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = _folder()
    stem = f"{name}-{abs(hash(defines)):x}"
    source, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
    source.write_text(
        f'#include "ptx_moe.cuh"\n#include "{name}.cu"\n'
        f"namespace wc {{ namespace moe {{ alignas(1024) u8 shared[{SHARED_BYTES}]; }} }}\n"
        f"{EXPORTED} void launch(unsigned grid, unsigned block, void** args) {{\n"
        f"    simt::launch([](void** a) {{ simt::call({name}, a); }}, grid, block, args);\n}}\n"
        f"{EXPORTED} unsigned char* shared_memory() {{ return wc::moe::shared; }}\n"
    )
    shared = "static" if name == "sm80_moe_sum" else ""
    macros = [f"-DSHARED={shared}", *(f"-D{key}={value}" for key, value in defines)]
    command = [
        compiler,
        "-std=c++20",
        "-O2",
        *OWN_SYMBOLS,
        "-w",
        *macros,
        str(source),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(library))


def run(name: str, defines: dict[str, int], grid: int, block: int, *args: Any) -> None:
    """Run one kernel on `grid` blocks; arrays go as pointers, ints as u32, None as a null pointer."""
    library = _library(name, tuple(sorted(defines.items())))
    if name == "sm90_moe_product":
        # What a CTA finds in shared memory at its start is anything: here NaN.
        address = library.shared_memory
        address.restype = ctypes.c_void_p
        ctypes.memset(address(), 0xFF, SHARED_BYTES)
    values: list[Any] = []
    for arg in args:
        if isinstance(arg, int):
            values.append(ctypes.c_uint32(arg))
        else:
            values.append(ctypes.c_void_p(arg.data_ptr() if arg is not None else 0))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    library.launch(ctypes.c_uint(grid), ctypes.c_uint(block), pointers)


def product(
    which: kernels.Product,
    grid: int,
    bricks: torch.Tensor,
    factors: torch.Tensor,
    x: torch.Tensor,
    ordered: torch.Tensor,
    out: torch.Tensor,
    ids: torch.Tensor,
    state: moe.State | None = None,
) -> None:
    """One product, as `wcodec.kernels.moe.launch` does it."""
    assert which.smem <= SHARED_BYTES
    place = (state.table, state.first_expert, state.config.num_experts) if state else (None, 0, which.experts)
    run(
        "sm90_moe_product",
        which.defines(),
        grid,
        kernels.THREADS,
        bricks,
        factors,
        x,
        ordered,
        out,
        ids,
        *place,
        ids.numel(),
    )


def forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    state: moe.State,
    *,
    grid: int = 3,
    few: int = 24,
    wide: int = 128,
) -> torch.Tensor:
    """`wcodec.moe.forward` on the CPU."""
    config, tokens = state.config, x.shape[0]
    routes = 512 if ids.numel() <= 512 else 2048
    common = (state.experts, config.top_k, routes, ids.element_size())
    few, many = kernels.kinds(tokens, few)
    first = kernels.Product(2 * config.intermediate, config.hidden, *common, True, few, many, wide)
    second = kernels.Product(config.hidden, config.intermediate, *common, False, few, many, wide)
    ordered = torch.empty_like(x)
    pairs = x.numel() // 2
    run("sm80_moe_order", {"THREADS": 512}, -(-pairs // 512), 512, x, ordered, pairs)
    nan = float("nan")
    hidden = torch.full((ids.numel(), config.intermediate), nan, dtype=torch.bfloat16)
    results = torch.full((ids.numel(), config.hidden), nan, dtype=torch.bfloat16)
    out = torch.full((tokens, config.hidden), nan, dtype=torch.bfloat16)
    product(first, grid, state.w13, state.w13_factors, x, ordered, hidden, ids, state)
    product(second, grid, state.w2, state.w2_factors, hidden, hidden, results, ids, state)
    defines = {
        "COLUMNS": config.hidden,
        "EXPERTS": state.experts,
        "TOP_K": config.top_k,
        "ID_BYTES": ids.element_size(),
        "THREADS": kernels.SUM_THREADS,
    }
    run(
        "sm80_moe_sum",
        defines,
        tokens,
        kernels.SUM_THREADS,
        results,
        state.norms,
        gates,
        out,
        ids,
        state.table,
        state.first_expert,
        config.num_experts,
    )
    return out
