"""`prepare`: weights in, packed weights out, on the device where they will be multiplied. Once, untimed."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from wcodec.bits import digest
from wcodec.codec import encode
from wcodec.errors import MismatchError, UnsupportedError, WCodecError
from wcodec.formats.bf16_w12 import TILE, Bf16W12
from wcodec.formats.raw import Raw
from wcodec.packed import Footer, PackedTensor, blob_bytes, tail_bytes
from wcodec.state import KEEP, MAX_TOKENS, PackedState, PackedWeight, wrap_blob

if TYPE_CHECKING:
    import torch

    from wcodec.workspace import Workspaces

CHECK_BYTES = 16 << 20  # decoded at once when a packed weight is compared with its source
_HASHING_THREADS = 4  # one hashes 5 … 9 GB/s, less than a GPU takes in


def prepare(
    weights: Any,
    device: Any = "cuda",
    max_tokens: int = MAX_TOKENS,
    keep: str = "packed",
) -> PackedState:
    """Pack weights onto a device and get their kernels ready.

    Packing runs on the GPU and gives the bytes that `wcodec.encode` gives; every weight is decoded again and
    compared with its source before it is used. Weights go through one at a time: the peak of GPU memory is
    what is packed and one matrix. For a GPU, tensors on the host are hashed ahead: a mapping that makes its
    tensors when asked has five of them at once.

    Parameters
    ----------
    weights : mapping of str to torch.Tensor, PackedTensor or PackedWeight, or torch.nn.Module
        BF16 matrices to pack; a `PackedTensor` is uploaded as it is. Tensors that no format makes smaller,
        and FP16 and FP32 ones, are kept raw and multiplied by cuBLAS. Of a module, the weights of its
        ``nn.Linear`` layers are taken.
    device : torch.device or str
        CUDA device, or ``"cpu"`` for a correct and unhurried host path.
    max_tokens : int
        Most tokens that one kernel call gets. More are served all the same, by decoding first or in chunks.
    keep : {"packed", "both"}
        ``"packed"`` keeps the packed bytes alone; ``"both"`` keeps the originals too, and products take
        cuBLAS wherever that was measured faster.

    Returns
    -------
    PackedState
        `PackedWeight` by name.

    Raises
    ------
    WCodecError
        If an argument makes no sense; names the tensor.
    MismatchError
        If a weight does not decode to its source bits.
    """
    import torch

    if keep not in KEEP:
        raise WCodecError(f"keep is {keep!r}", mend=f"use one of {', '.join(KEEP)}")
    if max_tokens < 1:
        raise WCodecError(f"max_tokens is {max_tokens}", mend="give a positive number")
    target = resolve(torch.device(device))
    workspaces = new_workspaces(target)
    state: dict[str, PackedWeight] = {}
    shared: dict[Any, tuple[weakref.ref[Any], PackedWeight]] = {}
    settings: dict[str, Any] = {"keep": keep, "max_tokens": max_tokens, "workspaces": workspaces}
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for name, weight, hashed in _hashed_ahead(_named(weights), target, pool):
            key = identity(weight)
            if key in shared and shared[key][0]() is not None:
                state[name] = shared[key][1]
                continue
            state[name] = prepare_one(weight, target, name=name, hashed=hashed, **settings)
            # Of a mapping that makes its tensors when asked, the next may lie where a freed one lay.
            shared[key] = weakref.ref(weight), state[name]
    get_ready({id(weight): weight for weight in state.values()}.values())
    return PackedState(state, target)


def prepare_one(
    weight: Any,
    device: torch.device,
    *,
    name: str | None = None,
    keep: str = "packed",
    max_tokens: int = MAX_TOKENS,
    workspaces: Workspaces | None = None,
    hashed: Future[bytes] | None = None,
) -> PackedWeight:
    """Pack or upload one weight; see `prepare`. `hashed` is its digest, where somebody is at it already."""
    import torch

    settings: dict[str, Any] = {"max_tokens": max_tokens, "workspaces": workspaces, "tensor": name}
    if isinstance(weight, PackedWeight):
        weight = weight.to_packed()
    if isinstance(weight, PackedTensor):
        with _device(device):
            with warnings.catch_warnings():  # torch warns of read-only arrays; nothing writes to a blob
                warnings.simplefilter("ignore", UserWarning)
                blob = _upload(torch.from_numpy(weight.blob), device)
            packed = wrap_blob(blob, **settings)
            if keep == "both" and not packed.is_raw:
                packed.original = packed.to_bf16()
        return packed
    if not isinstance(weight, torch.Tensor):
        raise WCodecError(
            f"a {type(weight).__name__} is no weight", tensor=name, mend="pass tensors or packed tensors"
        )
    weight = weight.detach().resolve_neg()
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedError(f"no product with {weight.dtype} weights", tensor=name, mend="pass BF16")
    if weight.device.type == "meta":
        raise WCodecError("the weight is on the meta device", tensor=name, mend="load its contents first")
    with _device(device):
        source = _upload(weight, device)
        if hashed is None:
            # The host hashes while the copy and the packer run.
            with ThreadPoolExecutor(1) as pool:
                blob = _pack(source, _hash(weight, device, pool))
        else:
            blob = _pack(source, hashed)
        packed = wrap_blob(blob, **settings)
        if not packed.is_raw:
            _check(packed, source, name)
            if keep == "both":
                packed.original = source.contiguous()
    return packed


def get_ready(weights: Iterable[PackedWeight]) -> None:
    """Compile and load what the weights' kernels need, in parallel, and size their workspaces."""
    from wcodec.dispatch import warm_up

    warm_up([weight for weight in weights if weight.device.type == "cuda"])


def _named(weights: Any) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(weights, torch.nn.Module):
        for name, module in weights.named_modules():
            if isinstance(module, torch.nn.Linear):
                yield f"{name}.weight" if name else "weight", module.weight
    elif isinstance(weights, Mapping):
        yield from weights.items()
    else:
        raise WCodecError(
            f"cannot prepare a {type(weights).__name__}", mend="pass a mapping of tensors or an nn.Module"
        )


def identity(weight: Any) -> Any:
    """Return a key that tied tensors share as long as they live, so that they are packed once."""
    import torch

    if isinstance(weight, torch.Tensor) and weight.numel() and weight.device.type != "meta":
        view = tuple(weight.shape), weight.stride(), weight.dtype, weight.is_neg()
        return weight.device, weight.data_ptr(), *view
    return id(weight)


def resolve(device: torch.device) -> torch.device:
    """Return the device with its index.

    Raises
    ------
    UnsupportedError
        Where nothing can run there.
    """
    import torch

    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UnsupportedError(f"wcodec does not run on {device.type}", mend="use 'cuda' or 'cpu'")
    from wcodec.cuda.device import device_index, device_info

    index = device_index(device)
    _ = device_info(index).arch  # raises on GPUs that are too old
    return torch.device("cuda", index)


def new_workspaces(device: torch.device) -> Workspaces | None:
    """Return scratch for the weights of one state; None on the host, which needs none."""
    if device.type != "cuda":
        return None
    from wcodec.workspace import Workspaces

    return Workspaces(device)


def _device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device; pinned host memory is copied without waiting."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def _hash(weight: Any, device: torch.device, pool: ThreadPoolExecutor) -> Future[bytes] | None:
    """Start hashing a host tensor that is packed on a GPU; None for others, which the packers hash."""
    import torch

    if device.type == "cuda" and isinstance(weight, torch.Tensor) and weight.device.type == "cpu":
        return pool.submit(lambda: digest(_host_bits(weight)))
    return None


def _hashed_ahead(
    named: Iterable[tuple[str, Any]], device: torch.device, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, Any, Future[bytes] | None]]:
    """Yield weights with their digests, of those after them some under way.

    Only tensors on the host are taken from a mapping before it is their turn: of others, there is to be one.
    """
    ahead: deque[tuple[str, Any, Future[bytes] | None]] = deque()
    for name, weight in named:
        hashed = _hash(weight, device, pool)
        ahead.append((name, weight, hashed))
        while ahead and (hashed is None or len(ahead) > _HASHING_THREADS):
            yield ahead.popleft()
    yield from ahead


def _pack(source: torch.Tensor, hashed: Future[bytes] | None) -> torch.Tensor:
    """Return the blob of `source` on its own device, with a digest that may be under way."""
    import torch

    if source.dtype == torch.bfloat16 and source.device.type == "cpu":
        return torch.from_numpy(encode(source).blob)
    if source.dtype == torch.bfloat16:
        from wcodec.kernels.pack import make_plan, pack

        plan = make_plan(source)
        if source.numel() and Bf16W12().blob_bytes(plan, 0) < source.nbytes:
            blob = pack(source, plan=plan, digest=hashed.result() if hashed else None)
            if blob.numel() < source.nbytes:
                return blob
    return _raw_blob(source, hashed.result() if hashed else digest(_host_bits(source)))


def _raw_blob(source: torch.Tensor, known: bytes) -> torch.Tensor:
    """Return the ``raw`` blob of a tensor on its own device."""
    import torch

    dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[source.dtype]
    shape = tuple(source.shape)
    body = source.contiguous().view(-1).view(torch.uint8)
    footer = Footer(Raw.code, Raw.version, dtype, shape, max(len(shape) - 1, 0), bytes(8), 0, known)
    blob = torch.empty(blob_bytes(body.numel(), len(shape)), dtype=torch.uint8, device=source.device)
    blob[: body.numel()] = body
    tail = torch.frombuffer(bytearray(tail_bytes(body.numel(), footer)), dtype=torch.uint8)
    blob[body.numel() :] = tail.to(source.device)
    return blob


def _host_bits(tensor: torch.Tensor) -> Any:
    import torch

    flat = tensor.detach().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).cpu().numpy()


def _check(packed: PackedWeight, source: torch.Tensor, name: str | None) -> None:
    """Decode in row groups and compare with the source, bit by bit, on the weight's own device."""
    import torch

    matrix = source.reshape(packed.n, packed.k)
    rows = max(TILE, CHECK_BYTES // max(2 * packed.k, 1) // TILE * TILE)
    buffer = torch.empty(min(rows, packed.n), packed.k, dtype=torch.bfloat16, device=source.device)
    for first in range(0, packed.n, rows):
        last = min(first + rows, packed.n)
        part = packed.decode_rows(first, last, buffer[: last - first])
        if not torch.equal(part.view(torch.int16), matrix[first:last].view(torch.int16)):
            raise MismatchError(
                f"rows {first} … {last - 1} do not decode to their source", tensor=name, mend="report this"
            )
