"""Compile, load and launch the CUDA sources of ``decoders_cuda``: NVRTC, a disk cache, the driver API."""

from wcodec.cuda.compiler import Cubin, Resources, arch_of, compile_cubin, compile_many
from wcodec.cuda.device import DeviceInfo, device_index, device_info
from wcodec.cuda.module import Frame, Kernel, load
from wcodec.cuda.tensormap import TensorMap, TensorMapEncoder, encode_tiled

__all__ = [
    "Cubin",
    "DeviceInfo",
    "Frame",
    "Kernel",
    "Resources",
    "TensorMap",
    "TensorMapEncoder",
    "arch_of",
    "compile_cubin",
    "compile_many",
    "device_index",
    "device_info",
    "encode_tiled",
    "load",
]
