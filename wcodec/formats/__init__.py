"""The formats, by id and by footer code."""

from __future__ import annotations

from wcodec.errors import UnsupportedError
from wcodec.formats.base import Format
from wcodec.formats.bf16_store import Bf16Store
from wcodec.formats.bf16_w12 import Bf16W12
from wcodec.formats.byte_store import ByteStore
from wcodec.formats.nvfp4_s5 import Nvfp4S5
from wcodec.formats.raw import Raw

FORMATS: dict[str, Format] = {f.id: f for f in (Raw(), Bf16W12(), Bf16Store(), Nvfp4S5(), ByteStore())}


def by_id(name: str) -> Format:
    """The format called `name`.

    Raises
    ------
    UnsupportedError
        If there is none.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise UnsupportedError(f"no format {name!r}", mend=f"known: {', '.join(FORMATS)}") from None


def by_code(code: int, version: int) -> Format:
    """The format with this footer code, if this wcodec reads this version of it.

    Raises
    ------
    UnsupportedError
        If the code or the version is unknown.
    """
    for known in FORMATS.values():
        if known.code == code and version in (known.version, *known.older):
            return known
    raise UnsupportedError(
        f"format code {code} version {version} is unknown to this wcodec", mend="install a newer wcodec"
    )
