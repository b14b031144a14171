"""Files appear whole or not at all, and what was there stays until then."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcodec.container.atomic import copy_file, part_path, remove, replace_file, swap_folder
from wcodec.errors import WCodecError


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def put(path: Path, data: bytes, **how: object) -> None:
    with replace_file(path, **how) as out:  # type: ignore[arg-type]
        out.write_at(0, data)


def test_nothing_shows_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replace_file(path) as out:
        assert out.write_at(0, b"abc") == 3
        assert names(tmp_path) == {".a.wcodec-part"}
    assert path.read_bytes() == b"abc"
    assert names(tmp_path) == {"a"}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o644, 0o600, 0o777, 0o444, 0o6755])
def test_mode_of_the_source_and_the_umask(tmp_path: Path, mode: int) -> None:
    put(tmp_path / "a", b"x", mode=mode)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode & 0o777 & ~0o027


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, WCodecError("x")])
def test_an_exception_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail() -> None:
        with replace_file(path, overwrite=True) as out:
            out.write_at(0, b"new")
            raise error

    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        fail()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"a"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WCodecError, match=os.strerror(code)) as caught:
        put(path, b"new", overwrite=True)
    assert caught.value.exit_code == 2
    assert caught.value.file == str(path)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"a"}


def test_a_signal_between_creating_the_file_and_knowing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def interrupted(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = opened(path, flags, mode)
        if flags & os.O_CREAT:
            os.close(fd)
            raise KeyboardInterrupt
        return fd

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "a", b"x")
    assert names(tmp_path) == set()


def test_a_disk_that_fills_up_when_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WCodecError, match="No space left"):
        put(tmp_path / "a", b"new")
    assert names(tmp_path) == set()


def test_content_and_name_are_synced_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []

    def record(fd: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), (tmp_path / "a").exists()))

    monkeypatch.setattr(os, "fsync", record)
    with replace_file(tmp_path / "a") as out:
        out.write_at(0, b"x")
    assert synced == [(str(part_path(tmp_path / "a")), False), (str(tmp_path), True)]


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(WCodecError, match="ulimit"):
            put(tmp_path / "a", bytes(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == set()


def test_partial_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[:7], at))
    put(tmp_path / "a", bytes(range(100)))
    assert (tmp_path / "a").read_bytes() == bytes(range(100))


def test_a_file_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def race() -> None:
        with replace_file(path):
            path.write_bytes(b"theirs")

    with pytest.raises(WCodecError, match="exists now"):
        race()
    assert path.read_bytes() == b"theirs"
    assert names(tmp_path) == {"a"}


@pytest.mark.parametrize("mode", [0o644, 0o000])
def test_what_a_killed_run_left_goes_away(tmp_path: Path, mode: int) -> None:
    part_path(tmp_path / "a").write_bytes(b"half")
    part_path(tmp_path / "a").chmod(mode)
    put(tmp_path / "a", b"whole")
    assert names(tmp_path) == {"a"}
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    part = part_path(tmp_path / "a")
    with part.open("wb") as file:
        file.write(b"theirs")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WCodecError, match="another wcodec process"):
            put(tmp_path / "a", b"ours")
        assert part.read_bytes() == b"theirs"


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    with replace_file(tmp_path / "a") as out:
        out.write_at(0, b"first")
        with pytest.raises(WCodecError, match="another wcodec process"):
            put(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert names(tmp_path) == {"a"}


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    part_path(tmp_path / "a").symlink_to(tmp_path / "victim")
    with pytest.raises(WCodecError):
        put(tmp_path / "a", b"x")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    put(path, b"x")
    assert names(tmp_path) == {path.name}


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WCodecError, match="cannot write"):
        put(tmp_path / "missing" / "a", b"x")


def test_copy_keeps_bytes_and_mode(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(os.urandom(100_000))
    source.chmod(0o600)
    (tmp_path / "link").symlink_to(source)
    nbytes, _ = copy_file(tmp_path / "link", tmp_path / "b")
    assert nbytes == 100_000
    assert not (tmp_path / "b").is_symlink()
    assert (tmp_path / "b").read_bytes() == source.read_bytes()
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    with pytest.raises(WCodecError, match="missing"):
        copy_file(tmp_path / "missing", tmp_path / "c")
    assert "c" not in names(tmp_path)


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for name in ("part", "dst"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(b"x")
    with pytest.raises(WCodecError, match="exists now"):
        swap_folder(tmp_path / "part", tmp_path / "dst", overwrite=False)
    assert names(tmp_path / "dst") == {"dst"}
    swap_folder(tmp_path / "part", tmp_path / "dst", overwrite=True)
    assert names(tmp_path / "dst") == {"part"}
    assert names(tmp_path) == {"dst"}
    remove(tmp_path / "dst")
    remove(tmp_path / "dst")
    assert names(tmp_path) == set()


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """A real kill -9: the old file is intact, the rest is recognisable, the next run removes it."""
    (tmp_path / "a").write_bytes(b"old")
    code = (
        "import os, signal, sys; from pathlib import Path; from wcodec.container.atomic import replace_file\n"
        "with replace_file(Path(sys.argv[1]), overwrite=True) as out:\n"
        "    out.write_at(0, b'new'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False)
    assert done.returncode == -9
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == {"a", ".a.wcodec-part"}
    put(tmp_path / "a", b"newer", overwrite=True)
    assert names(tmp_path) == {"a"}
