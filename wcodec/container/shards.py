"""Shards of a directory: one picklable task each, on threads, processes or other machines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from wcodec.container.manifest import FileFacts, file_digest
from wcodec.container.packedfile import PackedFile
from wcodec.container.pipeline import Advance, default_workers
from wcodec.container.results import Result
from wcodec.container.unpack import unpack_file
from wcodec.container.writer import pack_file
from wcodec.dtypes import numel
from wcodec.errors import MismatchError, UnsupportedError, WCodecError

Found = TypeVar("Found")


def run_shards(
    tasks: Mapping[str, Callable[..., Found]],
    done: Callable[[str, Found], None],
    *,
    workers: int | None,
    executor: Executor | None = None,
    advance: Advance | None,
) -> None:
    """Run one task per shard and report each as it ends; the first error stops the others.

    Tasks on threads of this process call `advance`; those of an executor do not.
    """
    if executor is not None:
        # Dask's submit has a parameter `workers` of its own: ours must not meet it.
        futures = {executor.submit(partial(task, workers=workers)): name for name, task in tasks.items()}
        try:
            _collect(futures, done)
        except BaseException:
            wait([future for future in futures if not future.cancel()])
            raise
        return
    workers = default_workers() if workers is None else workers
    threads = max(1, min(workers, len(tasks)))
    if threads == 1:
        for name, task in tasks.items():
            done(name, task(workers=workers, advance=advance))
        return
    stop = threading.Event()

    def step(nbytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        if advance is not None:
            advance(nbytes)

    with ThreadPoolExecutor(threads, thread_name_prefix="wcodec-shard") as pool:
        try:
            futures = {
                pool.submit(task, workers=max(1, workers // threads), advance=step): name
                for name, task in tasks.items()
            }
            _collect(futures, done)
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _collect(futures: dict[Future[Found], str], done: Callable[[str, Found], None]) -> None:
    for future in as_completed(futures):
        done(futures[future], future.result())


class _StoppedError(Exception):
    """Another shard failed or the user interrupted: leave, removing the temp file on the way."""


def pack_shard(
    source: Path,
    target: Path,
    before: FileFacts | None,
    *,
    profile: str,
    workers: int | None,
    advance: Advance | None = None,
) -> Result:
    """Pack one shard, unless it is there already."""
    if before is not None and before.kind == "packed" and target.is_file():
        with contextlib.suppress(WCodecError):
            packed = PackedFile(target)
            same = before.digest == packed.record.digest and before.stored_bytes == packed.header.file_size
            if same and _original_digest(source) == (before.nbytes, before.digest):
                if advance is not None:
                    advance(before.nbytes)
                return _result(packed, source, target)
    return pack_file(source, target, profile=profile, force=True, workers=workers, advance=advance)


def _original_digest(source: Path) -> tuple[int, bytes]:
    """Size and digest of a shard, or of the file that a packed shard was made from."""
    with contextlib.suppress(UnsupportedError):
        packed = PackedFile(source)
        return packed.size, packed.record.digest
    return file_digest(source)


def _result(packed: PackedFile, source: Path, target: Path) -> Result:
    """What packing `source` to the existing file `target` returned."""
    return Result(
        source,
        target,
        files=1,
        tensors=len(packed.parts),
        packed_tensors=sum(part.packed is not None for part in packed.parts),
        weights=sum(numel(part.entry.shape) for part in packed.parts),
        bytes_in=packed.size,
        bytes_out=packed.header.file_size,
        digest=packed.record.digest,
        seconds=0.0,
    )


def unpack_shard(
    source: Path, target: Path, facts: FileFacts, *, workers: int | None, advance: Advance | None = None
) -> Result:
    """Unpack one shard, which must be the one that the manifest tells of."""
    result = unpack_file(source, target, force=True, workers=workers, advance=advance)
    if result.digest != facts.digest:
        raise MismatchError("holds another file than the manifest says", file=source)
    return result
