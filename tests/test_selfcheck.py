"""The self-check passes on a sound installation and fails on a broken one."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import wcodec.selfcheck
from wcodec.cli.selfcheck import command
from wcodec.formats import FORMATS


def test_host_checks_pass():
    results = [r for r in wcodec.selfcheck.run() if r.name in wcodec.selfcheck.HOST_CHECKS]
    assert len(results) == len(wcodec.selfcheck.HOST_CHECKS)
    assert all(result.passed for result in results)


def test_every_format_is_checked():
    assert {name.partition(",")[0] for name in wcodec.selfcheck.HOST_CHECKS} == FORMATS.keys()


def test_a_broken_scale_is_noticed(monkeypatch):
    from wcodec.formats.nvfp4_s5 import Nvfp4S5

    sound = Nvfp4S5.decode

    def broken(self, packed, out=None, *, workers=1):
        out = sound(self, packed, out, workers=workers)
        out[-1] ^= 1
        return out

    monkeypatch.setattr(Nvfp4S5, "decode", broken)
    passed, detail = wcodec.selfcheck.HOST_CHECKS["nvfp4-s5, host, every nibble under every scale"]()
    assert not passed
    assert detail.startswith("2 of")


def test_a_broken_decoder_is_noticed(monkeypatch):
    from wcodec.formats.bf16_w12 import Bf16W12

    sound = Bf16W12.decode

    def broken(self, packed, out=None, *, workers=1):
        out = sound(self, packed, out, workers=workers)
        if 0x0001 in out:  # one subnormal, gone
            out[out == 0x0001] = 0
        return out

    monkeypatch.setattr(Bf16W12, "decode", broken)
    result = CliRunner().invoke(command, standalone_mode=False)
    assert result.return_value == 1
    assert "1 of 65,536 weights differ" in result.output


def test_a_decoder_that_fails_has_failed_its_check_and_the_others_go_on(monkeypatch):
    from wcodec.formats.bf16_w12 import Bf16W12

    def broken(self, packed, out=None, *, workers=1):
        raise ValueError("no such tag\nand more")

    monkeypatch.setattr(Bf16W12, "decode", broken)
    result = CliRunner().invoke(command, standalone_mode=False)
    assert result.return_value == 1
    assert "ValueError: no such tag (" in result.output
    assert "nvfp4-s5, host" in result.output
    assert "2 checks failed" in result.output


@pytest.mark.gpu
def test_device_checks_pass():
    for result in wcodec.selfcheck.run():
        assert result.passed, f"{result.name}: {result.detail}"


def test_the_patterns_are_all_there():
    assert len(np.unique(wcodec.selfcheck._together())) == 65536
    assert len(np.unique(wcodec.selfcheck._alone())) == 65536
