"""The GPU of commands that measure one."""

from __future__ import annotations

from wcodec.errors import UnsupportedError


def gpu_index(device: str) -> int:
    """Return the CUDA index of ``--device``.

    Raises
    ------
    UnsupportedError
        Where there is no GPU to measure on.
    """
    import torch

    from wcodec.cuda.device import device_index

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "this command measures on an NVIDIA GPU, and torch sees none",
            mend="`wcodec doctor` says what is missing",
        )
    return device_index(device)
