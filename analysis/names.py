"""Layer and role of a tensor, from its name: how reports fold a model's many layers."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a tensor sits in a model.

    Attributes
    ----------
    stack : str
        What the layers belong to, such as ``"model.layers"``; empty outside of layers.
    layer : int, optional
        Number of the layer; None outside of layers.
    role : str
        What the tensor does in its layer, further numbers as ``*``: ``"mlp.experts.*.up_proj.weight"``.
    """

    stack: str
    layer: int | None
    role: str

    @property
    def pattern(self) -> str:
        """Name with the layer as ``*``, shared by the same tensor of every layer."""
        return self.role if self.layer is None else f"{self.stack}.*.{self.role}".lstrip(".")


def place(name: str) -> Place:
    """Take a tensor's name apart.

    The first component that is a number, with something after it, is the layer:
    ``model.layers.3.mlp.up_proj.weight`` is layer 3 of ``model.layers`` in the role ``mlp.up_proj.weight``.
    """
    words = name.split(".")
    at = next((i for i, word in enumerate(words[:-1]) if word.isdecimal() and word.isascii()), None)
    if at is None or len(words[at]) > 9:
        return Place("", None, name)
    role = ".".join("*" if word.isdecimal() else word for word in words[at + 1 :])
    return Place(".".join(words[:at]), int(words[at]), role)
