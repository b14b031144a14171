"""Numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", " k", " M", " B", " T")


def visible(text: str) -> str:
    r"""Text for people's eyes: characters that would break a line or steer a terminal as escapes (``"\n"``).

    Names come from files of strangers. Bytes of paths that are not UTF-8 stay as they are.
    """
    if text.isprintable():
        return text
    kept = (c if c.isprintable() or "\udc80" <= c <= "\udcff" else repr(c)[1:-1] for c in text)
    return "".join(kept)


def shorten(text: str, room: int) -> str:
    """Text of at most `room` characters: the middle of a longer name goes, since its end says what it is."""
    if len(text) <= room:
        return text
    head = room // 3
    return f"{text[:head]}…{text[len(text) - (room - head - 1) :]}"


def size(nbytes: float) -> str:
    """Bytes in powers of ten, as GB/s are: ``"45.4 MB"``."""
    return _scaled(nbytes, _UNITS, " ")


def count(number: float) -> str:
    """A count: ``"22.7 M"``."""
    return _scaled(number, _COUNTS, "")


def _scaled(value: float, units: Sequence[str], gap: str) -> str:
    power = 0
    while abs(value) >= 999.5 and power + 1 < len(units):
        value /= 1000
        power += 1
    digits = 0 if not power or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{gap}{units[power]}"


def number(n: int, noun: str) -> str:
    """How many of something: ``"1 tensor"``, ``"3,183 tensors"``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def percent(fraction: float) -> str:
    """A fraction with two significant digits below 1 %: ``"24.1 %"``, ``"0.014 %"``."""
    if math.isnan(fraction):
        return "–"
    value = 100 * fraction
    if value == 0 or abs(value) >= 1:
        return f"{value:.1f} %" if value else "0 %"
    return f"{value:.{1 - math.floor(math.log10(abs(value)))}f} %"


def duration(us: float) -> str:
    """Microseconds in the unit that fits: ``"0.012 ns"``, ``"1.18 µs"``, ``"2.33 ms"``."""
    if 0 < us < 0.0001:
        return f"{us * 1000:.3g} ns"
    return f"{us:.3g} µs" if us < 999.5 else f"{us / 1000:.3g} ms" if us < 999_500 else f"{us / 1e6:.3g} s"


def bits(value: float, digits: int = 2) -> str:
    """Bits per weight; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape: ``"4096 × 8192"``; ``"scalar"`` without axes."""
    return " × ".join(map(str, shape)) if shape else "scalar"
