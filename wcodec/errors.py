"""Errors that people read: one line that names the file, the tensor and the mend."""

from __future__ import annotations

import os

from wcodec.units import visible


class WCodecError(Exception):
    """Base of every error wcodec raises on purpose; the CLI prints it as one line.

    Parameters
    ----------
    problem : str
        What is wrong, in plain words, without a trailing period.
    file : path-like, optional
        File the problem is in.
    tensor : str, optional
        Tensor the problem is in.
    mend : str, optional
        What the reader can do about it; by default what the kind of error suggests.
    """

    exit_code = 2
    #: What the reader can do where the one who raises it knows nothing better.
    default_mend: str | None = None

    def __init__(
        self,
        problem: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        mend: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = os.fspath(file) if file is not None else None
        self.tensor = tensor
        self.mend = mend or self.default_mend
        super().__init__(problem)

    def __str__(self) -> str:
        where = "" if self.file is None else f"{visible(self.file)}: "
        where += "" if self.tensor is None else f"tensor {self.tensor!r}: "
        return f"{where}{self.problem}" + (f"; {self.mend}" if self.mend else "")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (executors): keep the fields, not just the message.
        return (_rebuild, (type(self), self.problem, self.file, self.tensor, self.mend))


class MalformedError(WCodecError):
    """The bytes contradict their own format: truncated, lying or corrupt."""

    default_mend = "it is damaged or was written wrongly: get it again"


class UnsupportedError(WCodecError):
    """The input is valid, but this installation or this version cannot handle it."""


class MismatchError(WCodecError):
    """Everything was readable, but a digest or a comparison says the data differ."""

    exit_code = 1


def _rebuild(
    cls: type[WCodecError], problem: str, file: str | None, tensor: str | None, mend: str | None
) -> WCodecError:
    return cls(problem, file=file, tensor=tensor, mend=mend)
