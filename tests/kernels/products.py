"""A matrix on the GPU that any instance of the product kernels multiplies, into poison and between guards."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.kernels.matrices import Bits, bits_of, matrix_of_bricks, plain_bricks
from wcodec.codec import encode
from wcodec.cuda.device import device_info
from wcodec.cuda.module import load
from wcodec.errors import WCodecError
from wcodec.kernels import gemv
from wcodec.kernels.gemm import TILE, Bricks, Gemm, GemmConfig
from wcodec.kernels.gemv import Gemv, GemvConfig

POISON = 0x7FC1  # a NaN that no product gives
WORKSPACE_BYTES = 64 << 20


def on_gpu(bits: Bits) -> Any:
    """Return the weights as a BF16 tensor."""
    import torch

    return torch.from_numpy(bits.view(np.int16).copy()).cuda().view(torch.bfloat16)


def padded(x: Any) -> Any:
    """Copy x so that its rows start on 16 bytes, zeros after them."""
    import torch

    m, k = x.shape
    wide = torch.zeros(m, k + -k % 8, device="cuda", dtype=torch.bfloat16)
    wide[:, :k] = x
    return wide


def processors() -> int:
    """SMs of the first GPU."""
    return device_info(0).multiprocessors


def stream() -> int:
    """Handle of the current stream."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


@functools.cache
def workspace() -> Any:
    """Zeros for partial sums, which every launch leaves zero."""
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


class Matrix:
    """A matrix on the GPU, packed and as uncompressed bricks of the same order."""

    def __init__(self, bits: Bits) -> None:
        import torch

        self.bits = bits
        self.rows, self.cols = bits.shape
        packed = encode(bits, format="bf16-w12")
        self._blobs = [torch.from_numpy(b.copy()).cuda() for b in (packed.blob, plain_bricks(bits))]
        compressed, plain = (blob.data_ptr() for blob in self._blobs)
        self.bricks = {
            "bf16-w12": Bricks.of(packed, compressed),
            "bf16": Bricks(plain, 0, 0, (0, 0), self.rows, self.cols),
        }

    def served(self, config: GemvConfig | GemmConfig, m: int) -> bool:
        """Whether an instance can run a product with m tokens at all."""
        if isinstance(config, GemvConfig):
            return m <= config.tokens
        try:
            config.grid(self.rows, self.cols, m, processors())
        except WCodecError:
            return False
        return True

    def product(self, config: GemvConfig | GemmConfig, x: Any, bias: Any = None) -> Any:
        """Run one instance; check that it wrote its outputs only and left its workspace zero."""
        import torch

        m, wide = x.shape[0], padded(x)
        dtype = torch.float32 if isinstance(config, GemvConfig) and config.out_f32 else torch.bfloat16
        out = torch.empty(m + 1, self.rows + 3, device="cuda", dtype=dtype)
        out.view(torch.int16).fill_(POISON)
        arguments = (stream(), wide.data_ptr(), wide.stride(0), out.data_ptr(), out.stride(0))
        bias_at = 0 if bias is None else bias.data_ptr()
        if isinstance(config, GemvConfig):
            Gemv(config, self.bricks[config.decoder], m, 0)(*arguments, bias=bias_at)
        else:
            assert config.partial_bytes(self.rows, self.cols, m, processors()) <= WORKSPACE_BYTES
            run = Gemm(config, self.bricks[config.decoder], m, 0, processors())
            run(*arguments, bias=bias_at, partials=workspace().data_ptr())
            assert not workspace().any()
        for guard in (out[m], out[:, self.rows :].contiguous()):
            assert (guard.view(torch.int16) == POISON).all()
        return out[:m, : self.rows].contiguous()

    def dump(self, config: GemvConfig | GemmConfig) -> Bits:
        """Run the debug instance that writes the decoded A registers; return the matrix they stand for."""
        import torch

        bricks = self.bricks[config.decoder]
        if isinstance(config, GemmConfig):
            out = torch.full((self.rows, self.cols), float("nan"), device="cuda", dtype=torch.bfloat16)
            x = padded(torch.zeros(config.tokens, self.cols, device="cuda"))
            run = Gemm(config, bricks, config.tokens, 0, processors(), WC_DUMP=1)
            run(stream(), x.data_ptr(), x.stride(0), out.data_ptr(), self.cols)
            return bits_of(out)
        count = -(-self.rows // TILE) * -(-self.cols // TILE)
        out = torch.full((count * TILE * TILE,), float("nan"), device="cuda", dtype=torch.bfloat16)
        x = padded(torch.zeros(1, self.cols, device="cuda"))
        kernel = load(gemv.SOURCE, {**config.defines(), "WC_DUMP": 1, "WC_MIN_CTAS": 1}, 0)
        frame = kernel.frame(
            gemv.LAYOUT, config.grid(self.rows), config.threads, config.shared_bytes, config.split
        )
        operands = (bricks.address, bricks.overflow, *bricks.table, x.data_ptr(), x.stride(0), 0)
        frame(stream(), *operands, out.data_ptr(), 0, self.rows, self.cols, 1, bricks.overflow_sectors)
        return matrix_of_bricks(bits_of(out), self.bits.shape)
