"""What one CUDA device is, asked once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from wcodec.cuda.compiler import arch_of
from wcodec.errors import UnsupportedError


@dataclass(frozen=True)
class DeviceInfo:
    """Properties that kernels and the dispatcher ask for; sizes in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    max_shared_bytes: int
    l2_bytes: int
    total_bytes: int

    @property
    def arch(self) -> str:
        """Compiler target, such as ``sm_90a``; raises UnsupportedError below 8.0."""
        return arch_of(self.capability)

    @property
    def has_wgmma(self) -> bool:
        """Whether the warpgroup kernels run here (9.0 only)."""
        return self.capability == (9, 0)


def device_index(device: Any) -> int:
    """Return the CUDA index of a torch device, a string such as ``cuda:1``, or an int.

    Raises
    ------
    UnsupportedError
        Where it is not a CUDA device or CUDA is not available.
    """
    if isinstance(device, int):
        return device
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        raise UnsupportedError(f"{device} is not a CUDA device")
    if device.index is not None:
        return int(device.index)
    if not torch.cuda.is_available():
        raise UnsupportedError("torch sees no CUDA device", mend="use device='cpu' or check nvidia-smi")
    return int(torch.cuda.current_device())


@functools.cache
def device_info(index: int) -> DeviceInfo:
    """Return the properties of one device."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("torch sees no CUDA device", mend="use device='cpu' or check nvidia-smi")
    p: Any = torch.cuda.get_device_properties(index)  # Any: torch's stubs lack some fields
    return DeviceInfo(
        index=index,
        name=str(p.name),
        capability=(int(p.major), int(p.minor)),
        multiprocessors=int(p.multi_processor_count),
        max_shared_bytes=int(p.shared_memory_per_block_optin),
        l2_bytes=int(p.L2_cache_size),
        total_bytes=int(p.total_memory),
    )
