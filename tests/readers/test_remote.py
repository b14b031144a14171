"""Addresses: web servers on this machine, with and without ranges, and memory in place of a bucket."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.malformed import entry, valid_gguf, valid_safetensors
from tests.malformed import safetensors as build
from wcodec.errors import MalformedError, UnsupportedError, WCodecError
from wcodec.readers import open_source
from wcodec.readers.remote import HEAD, Address, RemoteFile, RemoteFolder, is_address

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class Handler(SimpleHTTPRequestHandler):
    """Serves a directory; understands Range, and misbehaves on demand."""

    server: Server

    def do_GET(self) -> None:
        mode = self.server.mode
        if mode == "down":
            self.send_error(503)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not path.is_file() or wanted is None or mode == "no-ranges":
            super().do_GET()
            return
        data = path.read_bytes()
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        part = data[first : last + 1]
        self.server.sent.append((path.name, first, len(part)))
        if mode == "short":
            part = part[:-1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def list_directory(self, path: str | os.PathLike[str]) -> Any:
        if self.server.mode == "no-listing":
            self.send_error(404)
            return None
        if self.server.mode == "sortable":
            links = "?C=N;O=D", "/elsewhere/", "sub/", "sub/x.bin", "a%20b.safetensors", "https://x.org/y.bin"
            body = "".join(f'<a href="{link}">x</a>' for link in links).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            return io.BytesIO(body)
        return super().list_directory(path)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """The server, its root, and what it sent as (file, first byte, bytes)."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(
            ("127.0.0.1", 0), lambda *args: Handler(*args, directory=str(root)), bind_and_activate=True
        )
        self.root = root
        self.mode = ""
        self.sent: list[tuple[str, int, int]] = []
        self.errors: list[BaseException | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep what went wrong; a reader that has seen enough and hangs up is no error."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            self.errors.append(error)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()
    assert found.errors == []


def large(path: Path, n: int = 1 << 20, name: str = "w") -> np.ndarray:
    """A file of one BF16 tensor of `n` random elements."""
    bits = np.random.default_rng(n).integers(0, 1 << 16, n, dtype=np.uint16)
    path.write_bytes(build({name: entry("BF16", [n], 0, 2 * n)}, bits.tobytes()))
    return bits


def test_only_the_header_is_read(server: Server) -> None:
    bits = large(server.root / "m.safetensors")
    source = open_source(f"{server.url}/m.safetensors?download=true")
    assert server.sent == [("m.safetensors", 0, HEAD)]
    tensor = source["w"]
    assert (tensor.dtype, tensor.shape) == ("BF16", bits.shape)
    assert str(tensor.file) == f"{server.url}/m.safetensors?download=true"
    assert tensor.file.name == "m.safetensors"
    assert source.files == [tensor.file]
    assert np.array_equal(tensor.read().view("<u2"), bits)
    assert not tensor.read().flags.writeable
    assert [n for _, _, n in server.sent] == [HEAD, tensor.nbytes, tensor.nbytes]


def test_chunks_and_samples_fetch_their_ranges(server: Server) -> None:
    bits = large(server.root / "m.safetensors")
    tensor = open_source(f"{server.url}/m.safetensors")["w"]
    server.sent.clear()
    assert b"".join(chunk.tobytes() for chunk in tensor.chunks(1 << 19)) == bits.tobytes()
    assert [n for _, _, n in server.sent] == [1 << 19] * 4
    server.sent.clear()
    sample = tensor.sample(1 << 18, blocks=4).view("<u2")
    assert sample.size == 1 << 17
    assert np.array_equal(sample[-100:], bits[-100:])
    assert sum(n for _, _, n in server.sent) <= HEAD + (1 << 18)


def test_header_longer_than_the_first_request(server: Server) -> None:
    n = 5000
    header = {f"tensor.number.{i:06}": entry("U8", [1], i, i + 1) for i in range(n)}
    raw = build(header, bytes(i % 256 for i in range(n)))
    assert len(raw) > 2 * HEAD
    (server.root / "m.safetensors").write_bytes(raw)
    source = open_source(f"{server.url}/m.safetensors")
    assert len(source.tensors) == n
    assert source.tensors[300].read().tobytes() == bytes([300 % 256])


def test_small_file(server: Server) -> None:
    (server.root / "m.safetensors").write_bytes(valid_safetensors({"a": "b"}))
    source = open_source(f"{server.url}/m.safetensors")
    assert source.metadata == {"a": "b"}
    assert source["b"].read().tobytes() == bytes(range(12, 17))
    assert source["none"].read().size == 0
    assert len(server.sent) == 1


def test_gguf(server: Server) -> None:
    pytest.importorskip("gguf")
    (server.root / "m.gguf").write_bytes(valid_gguf())
    source = open_source(f"{server.url}/m.gguf")
    assert source.kind == "gguf"
    assert source["q"].read().tobytes() == bytes(range(34))


def sharded(root: Path) -> None:
    """Two shards with a right index."""
    large(root / "1.safetensors", 1000, "a")
    large(root / "2.safetensors", 2000, "b")
    index = {"metadata": {"total_size": 6000}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("mode", "path"),
    [("", "/"), ("no-listing", "/"), ("", "/model.safetensors.index.json")],
    ids=["listing", "no-listing", "index"],
)
def test_directory(server: Server, mode: str, path: str) -> None:
    sharded(server.root)
    server.mode = mode
    source = open_source(server.url + path)
    assert [(t.name, t.file.name, t.nbytes) for t in source.tensors] == [
        ("a", "1.safetensors", 2000),
        ("b", "2.safetensors", 4000),
    ]
    assert source.notes == []
    assert str(source.index) == f"{server.url}/model.safetensors.index.json"


def test_listings_hold_other_links_too(server: Server) -> None:
    (server.root / "d").mkdir()
    server.mode = "sortable"
    assert RemoteFolder(Address(f"{server.url}/d/")).names() == ["a b.safetensors", "sub/"]


def test_directory_without_index_or_listing(server: Server) -> None:
    large(server.root / "model.safetensors", 10)
    server.mode = "no-listing"
    assert [t.name for t in open_source(f"{server.url}/").tensors] == ["w"]


@pytest.mark.parametrize(
    ("mode", "file", "problem"),
    [
        ("", "absent.safetensors", "does not exist or cannot be reached"),
        ("down", "m.safetensors", "cannot be read"),
        ("short", "m.safetensors", "the server sent"),
        ("", "cut.safetensors", "the file is truncated: 1 of the tensor's 2000 bytes"),
        ("", "m.pt", "cannot be read in ranges; download it"),
        ("", "m.txt", "is of an unknown kind"),
    ],
)
def test_errors_are_one_line(server: Server, mode: str, file: str, problem: str) -> None:
    large(server.root / "m.safetensors", 1000)
    (server.root / "cut.safetensors").write_bytes((server.root / "m.safetensors").read_bytes()[:-1])
    (server.root / "m.pt").write_bytes(b"x")
    (server.root / "m.txt").write_bytes(b"hello, world")
    server.mode = mode
    with pytest.raises(WCodecError) as caught:
        open_source(f"{server.url}/{file}")
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"{server.url}/{file}: ")
    assert "\n" not in str(caught.value)


def test_server_without_ranges(server: Server) -> None:
    """The header can be read, the rest would come whole each time: refused, not downloaded."""
    large(server.root / "m.safetensors")
    server.mode = "no-ranges"
    source = open_source(f"{server.url}/m.safetensors")
    with pytest.raises(UnsupportedError, match="does not serve ranges; download it") as caught:
        source["w"].read_range(1 << 20, (1 << 20) + 2)
    assert caught.value.tensor == "w"


def test_connection_refused() -> None:
    with pytest.raises(WCodecError, match="does not exist or cannot be reached; check the address"):
        open_source("http://127.0.0.1:9/m.safetensors")


def test_remote_tensors_travel_between_processes(server: Server) -> None:
    bits = large(server.root / "m.safetensors", 1000)
    tensor = pickle.loads(pickle.dumps(open_source(f"{server.url}/m.safetensors")["w"]))
    assert np.array_equal(tensor.read().view("<u2"), bits)


def test_reads_stay_inside(server: Server) -> None:
    (server.root / "m.safetensors").write_bytes(valid_safetensors())
    file = RemoteFile(Address(f"{server.url}/m.safetensors"))
    for offset, n in [(-1, 2), (file.size, 1), (0, -1), (0, file.size + 1)]:
        with pytest.raises(MalformedError):
            file.read_at(offset, n)
    assert file.read_at(file.size, 0).size == 0


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """A sharded model in an object store; directories exist only as prefixes there."""
    sharded(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/*", "/bucket/model/")
    memory.pipe("/bucket/other/readme.txt", b"x")
    yield "memory://bucket"
    memory.rm("/bucket", recursive=True)


def test_object_store(bucket: str) -> None:
    for path in (f"{bucket}/model", f"{bucket}/model/", f"{bucket}/model/model.safetensors.index.json"):
        source = open_source(path, include=["b"])
        assert [t.nbytes for t in source.tensors] == [4000]
        assert source.notes == []
        assert source.tensors[0].read().size == 4000
    with pytest.raises(UnsupportedError, match=r"holds no weight files; files are \.bin"):
        open_source(f"{bucket}/other")
    with pytest.raises(UnsupportedError, match="give one of its directories instead: model/"):
        open_source(bucket)
    fsspec.filesystem("memory").rm("/bucket/model/2.safetensors")
    with pytest.raises(MalformedError, match=r"is missing, but model.safetensors.index.json lists it"):
        open_source(f"{bucket}/model")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be read .Protocol not known: nosuch"):
        open_source("nosuch://x/y.safetensors")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UnsupportedError, match=r"Install s3fs.*; pip install 'wcodec\[s3\]'$"):
        open_source("s3://bucket/m.safetensors")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnsupportedError, match=r"needs fsspec; pip install 'wcodec\[remote\]'"):
        open_source("https://example.org/m.safetensors")


@pytest.mark.parametrize(
    ("url", "mend"),
    [
        ("hf://", "write hf://owner/model"),
        ("hf:///", "write hf://owner/model"),
        ("s3://", "write s3://bucket/model"),
        ("https://", "write https://host/model"),
        ("http:///", "write all of it"),
    ],
)
def test_a_scheme_alone(url: str, mend: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        open_source(url)
    assert str(caught.value) == f"{url}: names no file or folder; {mend}"


def test_a_host_that_is_not_there_is_named() -> None:
    with pytest.raises(WCodecError, match=r"ftp://localhost:1/x\.safetensors: cannot be reached .*; check"):
        open_source("ftp://localhost:1/x.safetensors")


def test_addresses() -> None:
    assert is_address("hf://org/name")
    assert is_address("s3://bucket")
    assert not is_address("models/a.safetensors")
    assert not is_address("/models/a:b//c.safetensors")
    assert not is_address(Path("C:/models"))
    address = Address("https://host/a%20b/m.v1.safetensors?x=1#y")
    assert (address.name, address.suffix) == ("m.v1.safetensors", ".safetensors")
    assert str(address.parent) == "https://host/a%20b/"
    assert address.parent.name == "a b"
    assert str(address.parent / "n.json") == "https://host/a%20b/n.json"
    assert os.fspath(address) == str(address) == address.url
    assert address == Address(address.url)
    assert len({address, Address(address.url)}) == 1
