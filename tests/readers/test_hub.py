"""hf:// against a stand-in for the hub on this machine that answers the four requests it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.malformed import valid_safetensors

pytest.importorskip("huggingface_hub")

MODEL = valid_safetensors()
FILE = {"type": "file", "oid": "0" * 40, "size": len(MODEL), "path": "model.safetensors"}


class Hub(BaseHTTPRequestHandler):
    """One model, org/name, with one file."""

    def do_GET(self) -> None:
        if not self.path.startswith(("/api/models/org/name", "/org/name")):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif "/tree/" in self.path:
            self.answer(json.dumps([FILE]).encode())
        elif "/resolve/" in self.path:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.answer(MODEL[first : last + 1], 206)
        else:
            self.answer(json.dumps({"id": "org/name", "sha": "0" * 40, "siblings": []}).encode())

    def answer(self, body: bytes, status: int = 200) -> None:
        """Send a body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def read(endpoint: str, address: str) -> str:
    """Open an address in a process of its own, as the hub's package fixes its endpoint when imported."""
    code = f"""
from wcodec.errors import WCodecError
from wcodec.readers import open_source
try:
    for tensor in open_source({address!r}).tensors:
        print(tensor.name, tensor.dtype, tensor.read().tobytes().hex(), tensor.file)
except WCodecError as error:
    print(error)
"""
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return ran.stdout


@pytest.mark.parametrize("address", ["hf://org/name", "hf://org/name@main/model.safetensors"])
def test_model(endpoint: str, address: str) -> None:
    lines = read(endpoint, address).splitlines()
    assert [line.split(" ")[:3] for line in lines] == [
        ["a", "BF16", bytes(range(12)).hex()],
        ["none", "F32", ""],
        ["b", "U8", bytes(range(12, 17)).hex()],
    ]
    assert all(line.endswith("/model.safetensors") for line in lines)


def test_absent_model(endpoint: str) -> None:
    (line,) = read(endpoint, "hf://org/absent").splitlines()
    assert line.startswith("hf://org/absent: ")
    assert "check the address" in line
