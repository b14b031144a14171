"""Small checkpoints with block-scaled 4-bit weights, as the three families of exporters lay them out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.container.weightfiles import Tensor, gaussian

U8 = np.ndarray[Any, np.dtype[np.uint8]]


def u8(array: U8, dtype: str = "U8") -> Tensor:
    return dtype, array.shape, array.astype(np.uint8).tobytes()


def f32(*values: float, shape: tuple[int, ...] = ()) -> Tensor:
    return "F32", shape, np.array(values, "<f4").tobytes()


def nibbles(shape: tuple[int, ...], seed: int) -> U8:
    """Two random codes a byte."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def scales(shape: tuple[int, ...], seed: int, center: int = 100, spread: float = 4) -> U8:
    """Bytes around a center, a few of them outside any window of 32."""
    rng = np.random.default_rng(seed)
    found = np.clip(np.rint(rng.normal(center, spread, shape)), 0, 126).astype(np.uint8)
    wild = rng.random(shape) < 0.003
    found[wild] = rng.integers(0, 127, int(wild.sum()), dtype=np.uint8)
    return found


def modelopt(stem: str = "q", rows: int = 192, columns: int = 256, seed: int = 0) -> dict[str, Tensor]:
    """A linear layer of ModelOpt."""
    return {
        f"{stem}.weight": u8(nibbles((rows, columns // 2), seed)),
        f"{stem}.weight_scale": u8(scales((rows, columns // 16), seed + 1), "F8_E4M3"),
        f"{stem}.weight_scale_2": f32(0.001),
        f"{stem}.input_scale": f32(1.0),
    }


def compressed(stem: str = "k", rows: int = 190, columns: int = 320, seed: int = 10) -> dict[str, Tensor]:
    """A linear layer of compressed-tensors."""
    return {
        f"{stem}.weight_packed": u8(nibbles((rows, columns // 2), seed)),
        f"{stem}.weight_scale": u8(scales((rows, columns // 16), seed + 1, 60), "F8_E4M3"),
        f"{stem}.weight_global_scale": f32(2048.0, shape=(1,)),
    }


def gpt_oss(stem: str = "mlp.experts.gate_up_proj", experts: int = 2, seed: int = 20) -> dict[str, Tensor]:
    """Stacked experts of gpt-oss: MXFP4, blocks on an axis of their own."""
    return {
        f"{stem}_blocks": u8(nibbles((experts, 64, 40, 16), seed)),
        f"{stem}_scales": u8(scales((experts, 64, 40), seed + 1, 120, 2)),
    }


def stacked(stem: str = "experts.w13", experts: int = 4, seed: int = 30) -> dict[str, Tensor]:
    """Stacked NVFP4 experts, blocks on an axis of their own, one global scale each."""
    return {
        f"{stem}_weight": u8(nibbles((experts, 96, 12, 8), seed)),
        f"{stem}_weight_scale": u8(scales((experts, 96, 12), seed + 1), "F8_E4M3"),
        f"{stem}_weight_scale_2": f32(*range(1, experts + 1), shape=(experts,)),
    }


def by_dtype(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the order in which the safetensors library writes them: wide dtypes first, then by name."""
    order = ["F32", "BF16", "F8_E4M3", "I8", "U8", "F4"]
    return dict(sorted(tensors.items(), key=lambda item: (order.index(item[1][0]), item[0])))


FAMILIES = {
    "modelopt": modelopt(),
    "compressed-tensors": compressed(),
    "gpt-oss": gpt_oss(),
    "stacked": stacked(),
}


def model(seed: int = 0) -> dict[str, Tensor]:
    """All of them beside BF16 tensors."""
    tensors = {
        "embed": gaussian((250, 128), seed),
        **modelopt("layers.0.q", seed=seed),
        **compressed("layers.0.k", seed=seed + 10),
        "layers.0.norm": gaussian((96,), seed + 1),
        **stacked("layers.0.experts.w13", seed=seed + 30),
        **gpt_oss("layers.0.experts.down", seed=seed + 20),
        **modelopt("layers.1.thin", 1, 64, seed=seed + 40),
    }
    return tensors
