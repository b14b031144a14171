"""`analyze`: open sources, spread the scanning over an executor, and judge what was found."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from itertools import islice

from wcodec.analysis.cost import DEFAULT_GPU, Gpu, find_gpu, judge
from wcodec.analysis.findings import TensorReport
from wcodec.analysis.grouping import BLOCKS, Logical, group
from wcodec.analysis.nvfp4 import roles
from wcodec.analysis.remarks import remarks
from wcodec.analysis.report import Report, SourceReport
from wcodec.analysis.scan import Scan, ScanTask, left_as_it_is, scan
from wcodec.container.record import RECORD_NAME
from wcodec.errors import UnsupportedError
from wcodec.readers import Source, TensorInfo, open_source
from wcodec.readers.remote import is_address

PathLike = str | os.PathLike[str]
Found = tuple[Logical, tuple[TensorInfo, ...]]

#: Small tensors share a task until it has this many bytes: a task costs about as much as reading 1 MB.
TASK_BYTES = 32 << 20
#: Threads that wait for answers from elsewhere at the same time.
REMOTE_THREADS = 16


def analyze(
    paths: PathLike | Sequence[PathLike],
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    gpu: str | Gpu = DEFAULT_GPU,
    workers: int | None = None,
    executor: Executor | None = None,
    sample_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Say what model files hold, bit for bit, and what packing them would gain.

    Parameters
    ----------
    paths : path-like or sequence of path-like
        Files, directories or addresses that `wcodec.readers.open_source` opens. One that is given twice is
        counted once, with a remark.
    include, exclude : iterable of str
        Globs on tensor names.
    gpu : str or Gpu
        Whose memory bandwidth turns bytes into time; see `wcodec.analysis.cost.find_gpu`.
    workers : int, optional
        Threads; by default one per processor, and more where files are elsewhere.
    executor : concurrent.futures.Executor, optional
        Runs the tasks instead of threads, and is left open. Its workers reach the files by the same paths.
    sample_bytes : int, optional
        Read at most this many bytes of each stored tensor, from evenly spaced ranges, and estimate; 0 reads
        headers only.
    progress : callable, optional
        Called with the bytes done and the bytes in all: once before the first task and after each.

    Returns
    -------
    Report

    Raises
    ------
    WCodecError
        If a path cannot be read; the message names file, tensor and mend.

    Examples
    --------
    >>> import numpy as np, tempfile, wcodec
    >>> from safetensors.numpy import save_file
    >>> file = tempfile.mkstemp(suffix=".safetensors")[1]
    >>> save_file({"w": np.ones((64, 64), np.float32)}, file)
    >>> report = wcodec.analyze(file)
    >>> report.tensors[0].kind, report.tensors[0].entropy.total
    ('fp32', 0.0)
    """
    target = find_gpu(gpu) if isinstance(gpu, str) else gpu
    names = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    include, exclude = tuple(include), tuple(exclude)
    places = Counter(map(_place, names))
    first = {_place(path): path for path in reversed(names)}
    sources = [open_source(first[place], include=include, exclude=exclude) for place in places]
    found = [(source, _logical(source)) for source in sources]
    tensors = [each for _, logical in found for each in logical]
    tasks = list(_tasks(tensors, sample_bytes))
    if executor is not None:
        scans = _run(executor, tasks, progress)
    else:
        with ThreadPoolExecutor(workers or _threads(sources), "wcodec-analyze") as threads:
            scans = _run(threads, tasks, progress)
    # What a glob keeps out is not missing.
    whole = not include and not exclude
    reports = list(_judge(tensors, scans, target, whole))
    mine = iter(reports)
    return Report(
        tuple(
            _source_report(source, list(islice(mine, len(logical))), whole, times)
            for (source, logical), times in zip(found, places.values(), strict=True)
        ),
        tuple(reports),
        target,
    )


def _place(path: PathLike) -> str:
    """What a path leads to: the same under all its names."""
    return os.fspath(path) if is_address(path) else os.path.realpath(path)


def _logical(source: Source) -> list[Found]:
    """The source's logical tensors with their parts."""
    by_name = {tensor.name: tensor for tensor in source.tensors}
    if RECORD_NAME in by_name:
        raise UnsupportedError(
            "is packed already",
            file=source.path,
            mend="`wcodec info` shows what it holds",
        )
    return [(each, tuple(by_name[name] for name in each.parts)) for each in group(source.tensors)]


def _threads(sources: Sequence[Source]) -> int:
    processors = len(os.sched_getaffinity(0))
    return max(processors, REMOTE_THREADS) if any(is_address(s.path) for s in sources) else processors


def _tasks(tensors: Sequence[Found], sample_bytes: int | None) -> Iterator[ScanTask]:
    batch: list[Found] = []
    size = 0
    for each in tensors:
        nbytes = each[0].nbytes
        if batch and size + nbytes > TASK_BYTES:
            yield ScanTask(tuple(batch), sample_bytes)
            batch, size = [], 0
        batch.append(each)
        size += nbytes
    if batch:
        yield ScanTask(tuple(batch), sample_bytes)


def _run(
    executor: Executor, tasks: Sequence[ScanTask], progress: Callable[[int, int], None] | None
) -> list[Scan]:
    """Scans of all tasks, in order; the first error cancels what has not begun."""
    report = progress or (lambda done, total: None)
    total, done = sum(task.nbytes for task in tasks), 0
    report(0, total)
    # The largest first: a late large one would leave the other workers idle.
    futures = {
        executor.submit(scan, tasks[i]): i for i in sorted(range(len(tasks)), key=lambda i: -tasks[i].nbytes)
    }
    results: dict[int, list[Scan]] = {}
    try:
        for future in as_completed(futures):
            i = futures[future]
            results[i] = future.result()
            done += tasks[i].nbytes
            report(done, total)
    finally:
        for future in futures:
            future.cancel()
    return [each for i in range(len(tasks)) for each in results[i]]


def _judge(tensors: Sequence[Found], scans: Sequence[Scan], gpu: Gpu, whole: bool) -> Iterator[TensorReport]:
    """Reports of all tensors. Blobs lie at the start of their packed file, one after another.

    `whole` says that sources show all their tensors, so that siblings can be called missing.
    """
    ends: Counter[str] = Counter()
    for (logical, parts), scanned in zip(tensors, scans, strict=True):
        missing = roles(logical, parts).flags if whole and logical.kind in BLOCKS else ()
        found = left_as_it_is(scanned, logical, missing) if missing and scanned.format != "raw" else scanned
        packed_bytes = found.payload_bytes
        if found.format != "raw":
            file = str(parts[0].file)
            packed_bytes += _entry_bytes(logical.name, ends[file], found.payload_bytes)
            ends[file] += found.payload_bytes
            if found.blocks is not None:  # the blob holds the block scales as well; what else there is stays
                packed_bytes += _entry_bytes(logical.parts[1], ends[file], 0)
                packed_bytes += sum(part.nbytes for part in parts[2:])
        yield _tensor_report(logical, parts, found, packed_bytes, gpu, missing)


def _entry_bytes(name: str, begin: int, nbytes: int) -> int:
    """Bytes of a blob's entry in the header of its packed file, the comma behind it included."""
    fields = {"dtype": "U8", "shape": [nbytes], "data_offsets": [begin, begin + nbytes]}
    text = json.dumps({name: fields}, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode(errors="surrogatepass")) - len("{}") + len(",")


def _tensor_report(
    logical: Logical,
    parts: tuple[TensorInfo, ...],
    found: Scan,
    packed_bytes: int,
    gpu: Gpu,
    missing: tuple[str, ...],
) -> TensorReport:
    return TensorReport(
        name=logical.name,
        file=str(parts[0].file),
        dtype=logical.dtype,
        kind=logical.kind,
        parts=logical.parts,
        shape=logical.shape,
        numel=logical.numel,
        nbytes=logical.nbytes,
        entropy=found.entropy,
        format=found.format,
        window=found.window,
        exceptions=found.exceptions,
        packed_bytes=packed_bytes,
        verdict=judge(
            nbytes=logical.nbytes,
            packed_bytes=packed_bytes,
            format=found.format,
            leave_reason=found.leave_reason,
            gpu=gpu,
        ),
        exponent_counts=found.exponent_counts,
        sampled=found.sampled,
        flags=missing + (found.blocks.flags if found.blocks else ()),
        blocks=found.blocks,
    )


def _source_report(source: Source, reports: Sequence[TensorReport], whole: bool, times: int) -> SourceReport:
    again = [f"{source.path}: given {times} times, counted once"] if times > 1 else []
    return SourceReport(
        str(source.path),
        source.kind,
        tuple(str(file) for file in source.files),
        tuple(source.differences),
        (*again, *source.remarks, *remarks(reports, source.tensors if whole else ())),
    )
