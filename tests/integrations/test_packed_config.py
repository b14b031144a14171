"""``wcodec pack`` names itself in a model's ``config.json``, and ``unpack`` takes that back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.container.weightfiles import gaussian, write
from wcodec.container import pack_directory, unpack_directory, verify_directory

CONFIG = b'{"model_type" : "llama",\n\t"torch_dtype": "bfloat16", "name": "\xc3\xa9"}'


def packed(folder: Path, config: bytes, *, small: bool = False) -> bytes:
    """Pack a directory with this configuration and return the one beside the packed weights."""
    source = folder / "source"
    source.mkdir()
    write(source / "model.safetensors", {"w": gaussian((8, 8) if small else (256, 256))})
    (source / "config.json").write_bytes(config)
    pack_directory(source, folder / "packed")
    unpack_directory(folder / "packed", folder / "back")
    assert (folder / "back" / "config.json").read_bytes() == config
    assert verify_directory(folder / "packed", against=source).differences == ()
    return (folder / "packed" / "config.json").read_bytes()


def test_the_method_is_added_and_the_rest_kept(tmp_path: Path) -> None:
    config = json.loads(packed(tmp_path, CONFIG))
    assert config.pop("quantization_config") == {"quant_method": "wcodec"}
    assert config == json.loads(CONFIG)


@pytest.mark.parametrize(
    "config",
    [
        b'{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}',
        b'{"_class_name": "UNet2DConditionModel"}',
        b'["model_type"]',
        b'{"model_type": ',
        b"",
        b"[" * 100_000,
    ],
)
def test_other_configurations_are_left_alone(config: bytes, tmp_path: Path) -> None:
    assert packed(tmp_path, config) == config


def test_nothing_packed_means_nothing_said(tmp_path: Path) -> None:
    assert packed(tmp_path, CONFIG, small=True) == CONFIG
