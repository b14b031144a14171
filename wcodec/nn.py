"""`PackedLinear`, an ``nn.Linear`` whose weight stays packed, and `compress_`, which puts it into a model."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from wcodec import preparation
from wcodec.errors import UnsupportedError, WCodecError
from wcodec.ops import dispatched_linear, linear
from wcodec.state import KEEP, MAX_TOKENS, PackedWeight, starts_aligned, wrap_blob
from wcodec.weight_info import UNPACK, WeightInfo
from wcodec.workspace import Workspaces

# What a module keeps about the hooks around forward and backward; those of state dicts are its own.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


class PackedLinear(torch.nn.Module):
    """``nn.Linear`` with a packed weight: ``y = x · Wᵀ + bias`` from the weight's exact bits.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether there is a bias.
    device : optional
        Device of the bias and of the weight once loaded.
    dtype : torch.dtype
        Dtype of the bias; the weight brings its own.

    Notes
    -----
    The state dict holds ``packed``, the blob as a 1-D uint8 tensor, and ``bias``. Loading also takes a plain
    ``weight`` and packs it. A module made this way holds no weight until then; `from_linear` makes a whole
    one. Load to change the weight: nothing may write into ``packed``, whose table is read once.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.max_tokens = MAX_TOKENS
        self.weight_dtype = torch.bfloat16
        self._weight: PackedWeight | None = None
        self._workspaces: Workspaces | None = None
        self.packed: torch.Tensor
        self.original: torch.Tensor | None
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8, device=device))
        self.register_buffer("original", None, persistent=False)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, **settings: Any) -> PackedLinear:
        """Pack a layer.

        Parameters
        ----------
        module : torch.nn.Linear
            Unchanged; its bias is shared.
        **settings
            ``device``, ``keep``, ``max_tokens`` as for `wcodec.prepare`.
        """
        device = preparation.resolve(torch.device(settings.pop("device", None) or module.weight.device))
        weight = preparation.prepare_one(module.weight, device, **settings)
        packed = cls.from_packed(weight, module.bias)
        packed.train(module.training)
        return packed

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
        """Wrap a weight that is packed already."""
        if not weight.is_matrix:
            raise WCodecError(f"a linear layer needs a matrix, not shape {list(weight.shape)}")
        module = cls(weight.k, weight.n, bias=False)
        module._adopt(weight)
        if bias is not None:
            parameter = bias if isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(bias)
            if parameter.device != weight.device:
                parameter = torch.nn.Parameter(parameter.detach().to(weight.device), parameter.requires_grad)
            module.register_parameter("bias", parameter)
        return module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x · Wᵀ + bias``; see `wcodec.linear`."""
        if torch.compiler.is_compiling():  # from the buffers alone: handles mean nothing to a compiler
            n, k = self.out_features, self.in_features
            return dispatched_linear(x, self.packed, self.bias, n, k, self.weight_dtype)
        return linear(x, self.packed_weight(), self.bias)

    @property
    def weight(self) -> WeightInfo:
        """Shape, dtype and device of the weight, for code that only asks for those."""
        return WeightInfo(self)

    def packed_weight(self) -> PackedWeight:
        """Return the `PackedWeight` of the buffer, made anew after the module moved or was loaded."""
        found = self._weight
        if found is None or found.blob is not self.packed:
            if not self.packed.numel() or self.packed.device.type == "meta":
                raise WCodecError(
                    "this PackedLinear holds no weight yet", mend="load a state dict or use from_linear"
                )
            found = wrap_blob(
                self.packed,
                original=self.original,
                max_tokens=self.max_tokens,
                workspaces=self._workspaces,
            )
            self._adopt(found)
        return found

    def unpack(self) -> torch.nn.Linear:
        """Return an ``nn.Linear`` with the original weight, bit for bit, and this module's bias."""
        weight = self.packed_weight().to_bf16()
        with torch.device("meta"):
            module = torch.nn.Linear(self.in_features, self.out_features, bias=False)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.register_parameter("bias", self.bias)
        return module.train(self.training)

    def explain(self) -> list[dict[str, Any]]:
        """Return `PackedWeight.explain` of the weight."""
        return self.packed_weight().explain()

    def extra_repr(self) -> str:
        """See ``nn.Module.extra_repr``."""
        form = self._weight.format if self._weight is not None else "not loaded"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={form}"
        )

    def _adopt(self, weight: PackedWeight) -> None:
        self._weight = weight
        self._workspaces = weight._workspaces
        self.max_tokens = weight.max_tokens
        self.weight_dtype = weight.dtype
        self.packed = weight.blob
        self.original = None if weight.is_raw else weight.original

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        before, original = self.packed.device, self.original
        self.original = None  # it moves, but its bits are never cast
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.packed.device != before:
            self.original = None if original is None else original.to(self.packed.device)
            self._forget()
        else:
            self.original = original
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # A blob's length depends on its contents, so it replaces the buffer instead of being copied into it.
        own = dict(state_dict)
        key = prefix + "packed"
        plain = own.pop(prefix + "weight", None) if key not in own else None
        if key in own or plain is not None:
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            try:
                self._load_weight(own.get(key), plain, assign, prefix)
                own[key] = self.packed
            except (WCodecError, torch.cuda.OutOfMemoryError) as error:
                error_msgs.append(str(error))
                own[key] = self.packed
        super()._load_from_state_dict(
            own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if plain is not None and prefix + "weight" in unexpected_keys:
            unexpected_keys.remove(prefix + "weight")

    def _load_weight(
        self, blob: torch.Tensor | None, plain: torch.Tensor | None, assign: bool, prefix: str
    ) -> None:
        given = blob if blob is not None else plain
        assert given is not None
        device = given.device if assign else self.packed.device
        if device.type == "meta":
            raise WCodecError(
                "the module is on the meta device", tensor=prefix + "packed", mend="load with assign=True"
            )
        if blob is None:
            weight = preparation.prepare_one(
                given, device, name=prefix + "weight", max_tokens=self.max_tokens
            )
        else:
            own = blob if assign and starts_aligned(blob) else blob.to(device, copy=True)
            weight = wrap_blob(own, max_tokens=self.max_tokens, tensor=prefix + "packed")
        if (weight.n, weight.k) != (self.out_features, self.in_features) or not weight.is_matrix:
            raise WCodecError(
                f"a weight of shape {list(weight.shape)} does not fit "
                f"[{self.out_features}, {self.in_features}]",
                tensor=prefix + "packed",
            )
        self._adopt(weight)

    def _forget(self) -> None:
        """Make the handle anew: it holds device addresses. Compiled calls find it only if it exists."""
        self._weight = self._workspaces = None
        # After to_empty() the buffer holds nothing yet; loading comes next.
        with contextlib.suppress(WCodecError):
            self.packed_weight()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight": None, "_workspaces": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise UnsupportedError("the weight of a PackedLinear cannot be replaced", mend=UNPACK)
        super().__setattr__(name, value)


@dataclass(frozen=True)
class Swapped:
    """What `compress_` did with one linear layer; `reason` says why it was left, or is None."""

    name: str
    shape: tuple[int, int]
    before_bytes: int
    after_bytes: int
    reason: str | None = None


def compress_(
    model: torch.nn.Module,
    *,
    device: Any = None,
    keep: str = "packed",
    max_tokens: int = MAX_TOKENS,
    skip: Iterable[str] = (),
) -> list[Swapped]:
    """Replace the ``nn.Linear`` layers of a model by `PackedLinear`, in place and one at a time.

    The peak of memory is what is packed and one layer. Layers that would not get smaller, that share their
    weight with something else (a tied embedding), or whose ``forward`` was replaced are left as they are.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place.
    device : optional
        Where the model shall lie afterwards; every layer stays on its own device where None.
    keep, max_tokens
        As for `wcodec.prepare`.
    skip : iterable of str
        Glob patterns of layer names to leave, such as ``"lm_head"`` or ``"*.gate"``.

    Returns
    -------
    list of Swapped
        One per linear layer.
    """
    if keep not in KEEP:
        raise WCodecError(f"keep is {keep!r}", mend=f"use one of {', '.join(KEEP)}")
    if isinstance(model, torch.nn.Linear):
        raise WCodecError("the model itself is an nn.Linear", mend="use PackedLinear.from_linear")
    target = None if device is None else preparation.resolve(torch.device(device))
    patterns = tuple(skip)
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    swapped: list[PackedLinear] = []
    workspaces: dict[torch.device, Workspaces | None] = {}
    report = []
    # By name, so that no list keeps the layers alive that were replaced.
    for name in [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]:
        module = model.get_submodule(name)
        assert isinstance(module, torch.nn.Linear)
        shape = (module.out_features, module.in_features)
        before = module.weight.nbytes
        reason = _reason_to_leave(name, module, owners, patterns)
        if reason is None:
            where = preparation.resolve(target or module.weight.device)
            if where not in workspaces:
                workspaces[where] = preparation.new_workspaces(where)
            packed = PackedLinear.from_linear(
                module,
                device=where,
                keep=keep,
                max_tokens=max_tokens,
                name=name,
                workspaces=workspaces[where],
            )
            if packed.packed_weight().is_raw:
                reason = "would not get smaller"
            else:
                swapped.append(packed)
                replace_layer(model, module, packed)
        after = before if reason is not None else packed.packed_weight().nbytes
        report.append(Swapped(name, shape, before, after, reason))
        del module
    if target is not None:
        model.to(target)
    preparation.get_ready(packed.packed_weight() for packed in swapped)
    return report


def _reason_to_leave(
    name: str, module: torch.nn.Linear, owners: dict[int, set[int]], patterns: tuple[str, ...]
) -> str | None:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return "skipped by name"
    if type(module) is not torch.nn.Linear:
        return f"is a {type(module).__name__}"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if module.weight.dtype != torch.bfloat16:
        return f"its weight is {module.weight.dtype}"
    if module.weight.device.type == "meta":
        return "its weight is on the meta device"
    if len(owners[id(module.weight)]) > 1:
        return "its weight is shared with another module"
    return None


def replace_layer(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Put `new` wherever `old` hangs in the model, with its hooks and how they are to be called."""
    for hooks in _HOOKS:  # the very dicts: handles that remove a hook know them
        setattr(new, hooks, getattr(old, hooks))
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
