"""Numbers and names for people."""

from __future__ import annotations

import math
import os

import pytest

from wcodec.units import bits, count, duration, number, percent, shorten, size, visible


def test_names_show_what_they_hold_and_stay_one_line() -> None:
    assert visible("model.layers.0.weight") == "model.layers.0.weight"
    assert visible("höher/名前 🙂") == "höher/名前 🙂"
    assert visible("a\nb\r\t\x00\x1b[31m\x7f\x9b\u2028\u202e") == r"a\nb\r\t\x00\x1b[31m\x7f\x9b\u2028\u202e"
    assert visible(visible("a\nb")) == r"a\nb"


def test_bytes_of_a_path_stay_as_they_are() -> None:
    path = os.fsdecode(b"w\xff\n.bin")
    assert os.fsencode(visible(path)) == rb"w" + b"\xff" + rb"\n.bin"


@pytest.mark.parametrize("room", [5, 10, 39, 40, 41])
def test_a_long_name_loses_its_middle(room: int) -> None:
    name = "model.layers.0.self_attn.q_proj.weight.x"
    found = shorten(name, room)
    assert len(found) == min(room, len(name))
    head, _, tail = found.partition("…")
    assert name.startswith(head)
    assert name.endswith(tail)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (number(1, "tensor"), "1 tensor"),
        (number(0, "tensor"), "0 tensors"),
        (number(3183, "tensor"), "3,183 tensors"),
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1000), "1.00 kB"),
        (size(999_499_999), "999 MB"),
        (size(999_500_000), "1.00 GB"),
        (count(22_700_000), "22.7 M"),
        (percent(0), "0 %"),
        (percent(0.241), "24.1 %"),
        (percent(0.000137), "0.014 %"),
        (percent(math.nan), "–"),
        (duration(0), "0 µs"),
        (duration(1.21e-05), "0.0121 ns"),
        (duration(0.0198), "0.0198 µs"),
        (duration(999.4), "999 µs"),
        (duration(2330), "2.33 ms"),
        (duration(1e6), "1 s"),
        (bits(math.nan), "–"),
        (bits(12.137, 3), "12.137"),
    ],
)
def test_numbers(shown: str, said: str) -> None:
    assert shown == said
