"""What fewer bytes are worth: time to read a tensor once at a GPU's memory bandwidth.

A memory-bound step cannot end before its weights are read, so bytes over bandwidth is a lower bound for both
forms, and its ratio is the most that packing can gain. ``wcodec bench`` measures the kernels themselves.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from wcodec.errors import UnsupportedError
from wcodec.units import duration, percent


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory, as its maker states it.

    Attributes
    ----------
    name : str
    bandwidth : float
        Bytes per second.
    source : str
        Where the figure is from.
    """

    name: str
    bandwidth: float
    source: str

    def read_us(self, nbytes: float) -> float:
        """Microseconds to read `nbytes` bytes once at full bandwidth."""
        return nbytes / self.bandwidth * 1e6


_SHEETS = [
    ("H200", 4.8, "NVIDIA H200 data sheet"),
    ("H100", 3.35, "NVIDIA H100 data sheet, SXM"),
    ("H100-NVL", 3.9, "NVIDIA H100 data sheet, NVL"),
    ("H100-PCIe", 2.0, "NVIDIA H100 PCIe product brief"),
    ("H20", 4.0, "NVIDIA H20 product brief"),
    ("GH200", 4.9, "NVIDIA GH200 data sheet, 144 GB HBM3e"),
    ("B200", 8.0, "NVIDIA DGX B200 data sheet, per GPU"),
    ("B300", 8.0, "NVIDIA DGX B300 data sheet, per GPU"),
    ("A100", 2.039, "NVIDIA A100 data sheet, 80 GB SXM"),
    ("A100-40GB", 1.555, "NVIDIA A100 data sheet, 40 GB"),
    ("L40S", 0.864, "NVIDIA L40S data sheet"),
    ("L4", 0.3, "NVIDIA L4 data sheet"),
    ("A10", 0.6, "NVIDIA A10 data sheet"),
    ("T4", 0.32, "NVIDIA T4 data sheet"),
    ("RTX-PRO-6000", 1.792, "NVIDIA RTX PRO 6000 Blackwell Workstation data sheet"),
    ("RTX-6000-Ada", 0.96, "NVIDIA RTX 6000 Ada data sheet"),
    ("RTX-5090", 1.792, "NVIDIA GeForce RTX 5090 specifications"),
    ("RTX-4090", 1.008, "NVIDIA GeForce RTX 4090 specifications"),
    ("RTX-3090", 0.936, "NVIDIA GeForce RTX 3090 specifications"),
]
GPUS = {name: Gpu(name, terabytes * 1e12, source) for name, terabytes, source in _SHEETS}
DEFAULT_GPU = "H200"

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|TB)/s", re.IGNORECASE)


def find_gpu(name: str) -> Gpu:
    """Look a GPU up by name, in any case and punctuation, or take a bandwidth such as ``"3.2TB/s"``.

    Raises
    ------
    UnsupportedError
        If the name is unknown.
    """
    given = _BANDWIDTH.fullmatch(name.strip())
    if given and float(given[1]) > 0:
        return Gpu(name.strip(), float(given[1]) * (1e12 if given[2].upper() == "TB" else 1e9), "given")
    wanted = _plain(name)
    for gpu in GPUS.values():
        if wanted and wanted == _plain(gpu.name):
            return gpu
    raise UnsupportedError(
        f"no GPU called {name!r}", mend=f"known: {', '.join(GPUS)}; or give a bandwidth such as 3.2TB/s"
    )


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|sxm|[^a-z0-9]", "", name.lower())


@dataclass(frozen=True)
class Verdict:
    """What to do with a tensor, and why.

    Attributes
    ----------
    action : str
        ``"pack"`` or ``"leave"``.
    reason : str
        One clause for people.
    saves_bytes : int
        Bytes that packing saves; 0 when left.
    read_us, packed_read_us : float
        Microseconds to read the tensor once at the GPU's memory bandwidth, as it is and packed.
    """

    action: str
    reason: str
    saves_bytes: int
    read_us: float
    packed_read_us: float


def judge(*, nbytes: int, packed_bytes: int, format: str, leave_reason: str, gpu: Gpu) -> Verdict:
    """Weigh a tensor's packed form against its original.

    Parameters
    ----------
    nbytes, packed_bytes : int
        Bytes as they are and as ``wcodec pack`` would write them.
    format : str
        Format it would be written in; ``"raw"`` means left as it is.
    leave_reason : str
        Why, where it is left.
    gpu : Gpu
        Whose bandwidth turns bytes into time.
    """
    before, after = gpu.read_us(nbytes), gpu.read_us(packed_bytes)
    if format == "raw":
        return Verdict("leave", leave_reason, 0, before, before)
    saved = nbytes - packed_bytes
    faster = duration(before - after)
    reason = f"{percent(saved / nbytes)} fewer bytes, {faster} less per read at {gpu.name}'s roofline"
    return Verdict("pack", reason, saved, before, after)


def ratio(part: float, whole: float) -> float:
    """part / whole, or NaN for an empty whole."""
    return part / whole if whole else math.nan
