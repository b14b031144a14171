"""Weights ready to multiply: a blob on its device and everything the kernels ask of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.formats._bf16_w12_layout import INLINE_PATCHES, OVERFLOW_TAG, PATCHES_AT, QUARTER_WEIGHTS
from wcodec.formats.bf16_w12 import BRICK_BYTES, TILE, Bf16W12
from wcodec.formats.raw import Raw
from wcodec.packed import ALIGNMENT_BYTES, FOOTER_BYTES, TAIL_BYTES, Footer, PackedTensor
from wcodec.units import number, size

if TYPE_CHECKING:
    import torch

    from wcodec.dispatch import Plan
    from wcodec.workspace import Workspaces

MAX_TOKENS = 256
KEEP = ("packed", "both")
VIEW_BYTES = 16  # where what kernels read as vectors, or torch as wider types, may begin
ROW_ELEMENTS = VIEW_BYTES // 2  # rows of x start where its base may: the copy engine asks for both

_ROUTER_ROWS = 1024  # FP32 matrices of up to this many rows are taken for routers

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class PackedWeight:
    """One weight on one device, in packed form.

    Made by `wcodec.prepare`; `wcodec.linear` multiplies by it.

    Parameters
    ----------
    blob : torch.Tensor of uint8, 1-D
        A whole blob (``docs/format.md``), whose contents were checked and do not change from here on.
    footer : Footer
        Its parsed end.
    original : torch.Tensor, optional
        The unpacked weight, kept beside the blob (``keep="both"``).
    max_tokens : int
        Most tokens one kernel call gets; more are decoded for.
    workspaces : Workspaces, optional
        Scratch of the state that it belongs to; the device's shared one where None.
    """

    def __init__(
        self,
        blob: torch.Tensor,
        footer: Footer,
        *,
        original: torch.Tensor | None = None,
        max_tokens: int = MAX_TOKENS,
        workspaces: Workspaces | None = None,
    ) -> None:
        import torch

        self.blob = blob
        self.device: torch.device = blob.device
        self.index = blob.device.index if blob.is_cuda else None
        self.footer = footer
        self.is_matrix = len(footer.shape) == 2
        self.max_tokens = max_tokens
        packed = PackedTensor(np.empty(0, dtype=np.uint8), footer)  # only for what the footer says
        self.n, self.k = packed.matrix
        self.is_raw = footer.format_code == Raw.code
        self.format = Raw.id if self.is_raw else Bf16W12.id
        if footer.format_code not in (Raw.code, Bf16W12.code):
            raise UnsupportedError(f"no product with a weight of format code {footer.format_code}")
        if footer.dtype not in _TORCH_NAMES:
            raise UnsupportedError(f"no product with a weight of dtype {footer.dtype}")
        self.dtype: torch.dtype = getattr(torch, _TORCH_NAMES[footer.dtype])
        self.original = original
        if self.is_raw and original is None:
            body = packed.numel * self.dtype.itemsize
            self.original = blob[:body].view(self.dtype).view(self.shape)
        self.is_router = self._is_router()
        self.router_parts = self._router_parts() if self.is_router else None
        self.plans: dict[int, Plan] = {}
        self.bricks = blob.data_ptr()
        self.brick_bytes = 0 if self.is_raw else -(-self.n // TILE) * -(-self.k // TILE) * BRICK_BYTES
        self.overflow = self.bricks + self.brick_bytes
        self._workspaces = workspaces
        self._lock = threading.Lock()
        # What torch._dynamo.mark_static_address sets; importing that takes seconds. Without it a compiled
        # function with CUDA graphs would copy the whole weight into its graph's pool on every call.
        blob._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        # Of several handles of one blob the first stays the one that ops find, while any of them lives.
        owner = _registry.get(self.bricks)
        same = owner is not None and owner.footer == footer and owner.device == self.device
        self._owner = owner if same else None
        if not same:
            _registry[self.bricks] = self

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the weight."""
        return self.footer.shape

    @property
    def nbytes(self) -> int:
        """Bytes held: the blob, and the original where it is kept beside it."""
        extra = 0 if self.is_raw or self.original is None else self.original.nbytes
        return self.blob.nbytes + extra

    @property
    def workspaces(self) -> Workspaces:
        """Counters of the split-K kernels."""
        if self._workspaces is None:
            from wcodec.workspace import shared_workspaces

            self._workspaces = shared_workspaces(self.device)
        return self._workspaces

    def _is_router(self) -> bool:
        """Whether the router kernels take this weight: few rows of FP32, read where they lie."""
        import torch

        rows_fit = self.is_matrix and 0 < self.n <= _ROUTER_ROWS and self.k % 8 == 0
        return rows_fit and self.dtype == torch.float32 and self.device.type == "cuda"

    def _router_parts(self) -> int | None:
        """How many BF16 values add up to the FP32 weights exactly; None if three do not."""
        from wcodec.kernels.router import exact_parts

        assert self.original is not None
        return exact_parts(self.original)

    def plan(self, tokens: int) -> Plan:
        """Return how a product with this many tokens runs, made once per count."""
        found = self.plans.get(tokens)
        if found is None:
            from wcodec.dispatch import make_plan

            with self._lock:
                found = self.plans.get(tokens)
                if found is None:
                    found = self.plans[tokens] = make_plan(self, tokens)
        return found

    def to_bf16(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the original weight, bit for bit.

        Parameters
        ----------
        out : torch.Tensor, optional
            Contiguous tensor of the weight's shape, dtype and device to write into.
        """
        import torch

        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        elif out.shape != self.shape or out.dtype != self.dtype or out.device != self.device:
            raise WCodecError(
                f"out is {out.dtype} of shape {list(out.shape)} on {out.device}, "
                f"the weight {self.dtype} of shape {list(self.shape)} on {self.device}"
            )
        elif not out.is_contiguous():
            raise WCodecError("out must be contiguous")
        if self.original is not None:
            return out.copy_(self.original)
        self.decode_rows(0, self.n, out.view(self.n, self.k))
        return out

    def decode_rows(self, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        """Decode rows ``first`` … ``last - 1`` of the matrix view into `out`, shape (rows, K).

        On the CPU `first` must be a multiple of 64.
        """
        import torch

        if self.device.type == "cuda":
            from wcodec.kernels.decode import unpack

            table, count = self.footer.table, self.footer.overflow_count
            return unpack(self.blob, (self.n, self.k), table, count, rows=(first, last), out=out)
        bits = out.view(torch.int16).numpy().view(np.uint16)
        Bf16W12().decode_tiles(self.to_packed(), first // TILE, -(-last // TILE), bits)
        return out

    def to_packed(self) -> PackedTensor:
        """Return the blob as a host `PackedTensor`; no copy where it already lies on the host."""
        return PackedTensor(self.blob.cpu().numpy(), self.footer)

    def explain(self, tokens: Iterator[int] | tuple[int, ...] | None = None) -> list[dict[str, Any]]:
        """Say which path serves which token count, and what it should cost against cuBLAS.

        Parameters
        ----------
        tokens : iterable of int, optional
            Token counts to ask for; the classes of the measured tables by default.

        Returns
        -------
        list of dict
            Keys ``tokens, path, why, us, cublas_us, source``; µs are raw medians with a cold L2, None where
            nothing comparable was measured; `source` says what they rest on.
        """
        from wcodec.dispatch import CLASSES

        return [self.plan(count).describe() for count in (tokens or (*CLASSES, 4096))]

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, {list(self.shape)}, {self.dtype}, device={str(self.device)!r})"

    def __reduce__(self) -> tuple[Callable[..., PackedWeight], tuple[Any, ...]]:
        original = None if self.is_raw else self.original
        return _restore, (self.blob, original, self.max_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        original = None if self.is_raw or self.original is None else self.original.clone()
        return _restore(self.blob.clone(), original, self.max_tokens)


class PackedState(Mapping[str, PackedWeight]):
    """What `wcodec.prepare` returns: packed weights by name, sharing one device and one set of workspaces."""

    def __init__(self, weights: Mapping[str, PackedWeight], device: torch.device) -> None:
        self._weights = dict(weights)
        self.device = device

    def __getitem__(self, name: str) -> PackedWeight:
        try:
            return self._weights[name]
        except KeyError:
            raise KeyError(f"{name!r} is not in this state; it has {', '.join(self._weights)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(weight.nbytes for weight in self._weights.values())

    def explain(self) -> dict[str, list[dict[str, Any]]]:
        """Return `PackedWeight.explain` of every weight."""
        return {name: weight.explain() for name, weight in self._weights.items()}

    def __repr__(self) -> str:
        held = f"{number(len(self), 'weight')}, {size(self.nbytes)}"
        return f"PackedState({held}, device={str(self.device)!r})"


# Weights alive, by the address of their blob: an op gets tensors, not Python objects.
_registry: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


def weight_of(blob: torch.Tensor) -> PackedWeight:
    """Return the weight that owns a blob; a blob that has none yet is checked, which waits for the device."""
    found = _registry.get(blob.data_ptr())
    if found is not None and found.blob.numel() == blob.numel() and found.device == blob.device:
        return found
    return wrap_blob(blob)


def starts_aligned(blob: torch.Tensor) -> bool:
    """Whether kernels' 16-byte loads, and views as wider types, may begin where the blob does."""
    return not (blob.storage_offset() % VIEW_BYTES or (blob.is_cuda and blob.data_ptr() % VIEW_BYTES))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it, contiguous and where kernels' 16-byte loads may begin."""
    import torch

    if tensor.is_contiguous() and tensor.data_ptr() % VIEW_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def wrap_blob(
    blob: torch.Tensor,
    *,
    original: torch.Tensor | None = None,
    max_tokens: int = MAX_TOKENS,
    workspaces: Workspaces | None = None,
    tensor: str | None = None,
) -> PackedWeight:
    """Check a blob that lies on its device already and make a weight of it.

    Only the footer crosses to the host; the patch words are checked where they lie.

    Raises
    ------
    MalformedError
        If the bytes contradict themselves.
    WCodecError
        If it is no blob by its dtype, shape or alignment, or if a CUDA graph is being captured, where nothing
        may be read back.
    """
    import torch

    if blob.device.type == "meta":
        raise WCodecError("the weight is on the meta device", tensor=tensor, mend="load its contents first")
    if blob.is_cuda and torch.cuda.is_current_stream_capturing():
        raise WCodecError(
            "a weight is used for the first time inside a CUDA graph capture",
            tensor=tensor,
            mend="call it once before",
        )
    if blob.dtype != torch.uint8 or blob.dim() != 1 or not blob.is_contiguous():
        raise WCodecError(f"a blob is 1-D uint8, not {blob.dtype} of shape {list(blob.shape)}", tensor=tensor)
    if not starts_aligned(blob):
        raise WCodecError(
            f"a blob starts on {VIEW_BYTES} bytes, this one does not", tensor=tensor, mend="pass blob.clone()"
        )
    footer = _check_blob(blob, tensor)
    return PackedWeight(blob, footer, original=original, max_tokens=max_tokens, workspaces=workspaces)


def _check_blob(blob: torch.Tensor, tensor: str | None) -> Footer:
    """Validate a blob where it lies: footer and lengths on the host, padding and patch words in place."""
    from wcodec.formats import by_code

    try:
        if blob.numel() % ALIGNMENT_BYTES:
            raise MalformedError(f"the length {blob.numel()} is not a multiple of {ALIGNMENT_BYTES}")
        footer = Footer.parse(blob[-TAIL_BYTES:].cpu().numpy())
        lengths_only = PackedTensor(np.broadcast_to(np.uint8(0), (blob.numel(),)), footer)
        by_code(footer.format_code, footer.version).validate(lengths_only)
        if footer.format_code == Bf16W12.code:
            _check_patches(blob, footer, lengths_only.matrix)
    except (MalformedError, UnsupportedError) as error:
        raise type(error)(error.problem, tensor=tensor, mend=error.mend) from None
    return footer


def _check_patches(blob: torch.Tensor, footer: Footer, matrix: tuple[int, int]) -> None:
    """Check every patch word that a decoder follows (``docs/format.md`` 2.3), on the blob's own device."""
    import torch

    rows, cols = matrix
    count = -(-rows // TILE) * -(-cols // TILE)
    end = count * BRICK_BYTES + 4 * footer.overflow_count
    padding = blob[end : blob.numel() - FOOTER_BYTES - 8 * len(footer.shape)]
    words = blob[: count * BRICK_BYTES].view(count, BRICK_BYTES)[:, PATCHES_AT:].reshape(-1, 16)
    tag = words[:, 15]
    overflowing = words[tag == OVERFLOW_TAG]
    first, number = (overflowing[:, 4 * i : 4 * i + 4].contiguous().view(torch.int32).long() for i in (0, 1))
    first = first.view(-1) & 0xFFFFFFFF
    number = number.view(-1)
    impossible = (number <= INLINE_PATCHES) | (number > QUARTER_WEIGHTS)
    checks = {
        "a patch word has an unknown tag": (tag > INLINE_PATCHES) & (tag != OVERFLOW_TAG),
        "a patch word's overflow range leaves the list": first + number > footer.overflow_count,
        "a patch word's overflow count is impossible": impossible,
        "the padding before the dims is not zero": padding,
    }
    bad = torch.stack([found.any() for found in checks.values()]).cpu()
    for problem, found in zip(checks, bad, strict=True):
        if found:
            raise MalformedError(problem, mend="the data are damaged; copy them again")


def _restore(blob: torch.Tensor, original: torch.Tensor | None, max_tokens: int) -> PackedWeight:
    return wrap_blob(blob, original=original, max_tokens=max_tokens)
