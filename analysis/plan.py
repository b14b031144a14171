"""What a model would take on a GPU, layer by layer, from its headers alone: `wcodec info --plan`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from wcodec.analysis.cost import DEFAULT_GPU, Gpu, find_gpu
from wcodec.analysis.names import place
from wcodec.container.describe import TensorFacts, describe
from wcodec.formats.bf16_w12 import Bf16W12, Plan

SCHEMA = "wcodec.plan/1"
#: Tables that are looked up by row: no matrix product reads them, so they stay as they are.
_LOOKED_UP = re.compile(r"(^|[._])(embed\w*|wte|wpe|shared)([._]|$)")


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a model, or what stands outside of layers.

    Attributes
    ----------
    name : str
        Such as ``"model.layers.3"``, or a tensor's role outside of layers.
    weights : int
        Elements of all its tensors.
    nbytes : int
        GPU memory as it is.
    packed_bytes : int
        GPU memory with its matrices packed.
    transient_bytes : int
        What its matrices take until they are packed.
    read_us, packed_read_us : float
        Microseconds to read all of it once at the GPU's memory bandwidth; 0 for tables that are looked up.
    """

    name: str
    weights: int
    nbytes: int
    packed_bytes: int
    transient_bytes: int
    read_us: float
    packed_read_us: float


@dataclass(frozen=True)
class ModelPlan:
    """What `plan_model` found.

    Attributes
    ----------
    path : str
        As it was given.
    gpu : Gpu
    layers : list of LayerPlan
        In the order of the file.
    """

    path: str
    gpu: Gpu
    layers: list[LayerPlan]

    @property
    def totals(self) -> dict[str, Any]:
        """Sums, and the most memory that packing layer by layer while loading needs."""
        packed = sum(layer.packed_bytes for layer in self.layers)
        return {
            "weights": sum(layer.weights for layer in self.layers),
            "bytes": sum(layer.nbytes for layer in self.layers),
            "packed_bytes": packed,
            "peak_bytes": packed + max((layer.transient_bytes for layer in self.layers), default=0),
            "read_us": sum(layer.read_us for layer in self.layers),
            "packed_read_us": sum(layer.packed_read_us for layer in self.layers),
        }

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; the schema is ``wcodec.plan/1``."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "gpu": {"name": self.gpu.name, "bytes_per_second": self.gpu.bandwidth, "source": self.gpu.source},
            "layers": [
                {
                    "name": layer.name,
                    "weights": layer.weights,
                    "bytes": layer.nbytes,
                    "packed_bytes": layer.packed_bytes,
                    "read_us": layer.read_us,
                    "packed_read_us": layer.packed_read_us,
                }
                for layer in self.layers
            ],
            "totals": self.totals,
        }


def plan_model(path: str | os.PathLike[str], *, gpu: str = DEFAULT_GPU) -> ModelPlan:
    """Say what a model takes on a GPU as it is and packed, and how long reading it takes at least.

    Only headers are read: exceptions beyond six per quarter brick, which cost four bytes each and are rare,
    are not counted unless the model is packed already.

    Parameters
    ----------
    path : path-like
        A model that `wcodec.readers.open_source` reads, or a packed one.
    gpu : str
        Name or bandwidth, as `wcodec.analysis.cost.find_gpu` takes it.

    Raises
    ------
    WCodecError
        If the model cannot be read or the GPU is unknown.
    """
    found = find_gpu(gpu)
    layers: dict[str, list[TensorFacts]] = {}
    described = describe(path)
    for tensor in described.tensors:
        where = place(tensor.name)
        name = where.role if where.layer is None else f"{where.stack}.{where.layer}".lstrip(".")
        layers.setdefault(name, []).append(tensor)
    return ModelPlan(
        described.path, found, [_layer(name, tensors, found) for name, tensors in layers.items()]
    )


def _layer(name: str, tensors: Iterable[TensorFacts], gpu: Gpu) -> LayerPlan:
    tensors = list(tensors)
    read = [tensor for tensor in tensors if not _LOOKED_UP.search(tensor.name)]
    return LayerPlan(
        name,
        weights=sum(tensor.numel for tensor in tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        packed_bytes=sum(map(_resident_bytes, tensors)),
        transient_bytes=sum(t.nbytes for t in tensors if _resident_bytes(t) < t.nbytes),
        read_us=gpu.read_us(sum(tensor.nbytes for tensor in read)),
        packed_read_us=gpu.read_us(sum(map(_resident_bytes, read))),
    )


def _resident_bytes(tensor: TensorFacts) -> int:
    """GPU memory of one tensor of a packed model: matrices of products as bricks, the rest as it is."""
    if tensor.dtype != "BF16" or len(tensor.shape) != 2 or _LOOKED_UP.search(tensor.name):
        return tensor.nbytes
    if tensor.format == Bf16W12.id:
        return tensor.stored_bytes
    bricks = Bf16W12().blob_bytes(Plan(tuple(range(8)), 0, tensor.shape), 0)
    return min(bricks, tensor.nbytes)
