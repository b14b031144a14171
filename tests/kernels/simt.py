"""Compile a kernel of ``decoders_cuda`` with the host's C++ compiler and run it on the CPU (see simt.hpp)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wcodec.decoders_cuda

_SOURCES = Path(next(iter(wcodec.decoders_cuda.__path__)))
_HERE = Path(__file__).parent


# Inline variables, shared memory among them, are one per process under the default visibility: instances of a
# kernel would then overwrite each other's, which differ in size.
OWN_SYMBOLS = ("-shared", "-fPIC", "-fvisibility=hidden")
EXPORTED = 'extern "C" __attribute__((visibility("default")))'


class HostKernel:
    """One kernel as a shared library; called like a launch, with NumPy arrays as pointers.

    Parameters
    ----------
    name : str
        Kernel and file stem.
    defines : mapping
        Macros of the instance.
    folder : pathlib.Path
        Where to build.
    header : str
        What stands for the GPU: simt.hpp, or simt_mma.hpp with tensor cores and asynchronous copies.
    """

    def __init__(self, name: str, defines: Mapping[str, int], folder: Path, header: str = "simt.hpp") -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        stem = "-".join([name, *(str(value) for value in defines.values())])
        source, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
        source.write_text(
            f'#include "{header}"\n#include "{name}.cu"\n'
            "#ifndef SIMT_LAUNCH\n#define SIMT_LAUNCH simt::launch\n#endif\n"
            f"{EXPORTED} void launch(unsigned grid, unsigned block, void** args)"
            f" {{ SIMT_LAUNCH({name}, grid, block, args); }}\n"
        )
        macros = [f"-D{key}={value}" for key, value in defines.items()]
        command = [compiler, "-std=c++20", "-O1", *OWN_SYMBOLS, "-pthread", "-w"]
        command += [f"-I{_HERE}", f"-I{_SOURCES}", *macros, str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self._launch = ctypes.CDLL(str(library)).launch

    def __call__(self, grid: int, block: int, *args: Any) -> None:
        values = [
            ctypes.c_void_p(arg.ctypes.data)
            if isinstance(arg, np.ndarray)
            else arg
            if arg is not None
            else ctypes.c_void_p()
            for arg in args
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._launch(ctypes.c_uint(grid), ctypes.c_uint(block), pointers)


def _value(arg: Any) -> Any:
    if arg is None:
        return ctypes.c_void_p()
    return ctypes.c_void_p(arg.ctypes.data) if isinstance(arg, np.ndarray) else arg
