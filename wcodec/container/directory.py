"""Whole directories: shards in parallel, a manifest that lets a rerun go on, and one rename at the end.

Everything is built in ``.NAME.wcodec-part`` beside the destination ``NAME``. A run that was killed leaves
that folder with its manifest; the next run keeps the shards whose digests still match and makes the others.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from wcodec import bits
from wcodec.container.atomic import (
    NOTHING_WRITTEN,
    copy_file,
    lock,
    naming,
    part_path,
    remove,
    replace_file,
    swap_folder,
)
from wcodec.container.destination import check_folder
from wcodec.container.manifest import MANIFEST_NAME, FileFacts, Manifest, file_digest
from wcodec.container.pipeline import Advance
from wcodec.container.record import RECORD_NAME
from wcodec.container.results import Result, Verdict
from wcodec.container.shards import pack_shard, run_shards, unpack_shard
from wcodec.container.targets import left_notes
from wcodec.container.tree import index_notes, is_rewritable, list_files, rewritten
from wcodec.container.unpack import verify_file
from wcodec.container.writer import open_source
from wcodec.errors import MismatchError, UnsupportedError, WCodecError
from wcodec.readers.bytefile import LocalFile
from wcodec.readers.safetensors import parse_header

_WEIGHTS = ".safetensors"


def pack_directory(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    profile: str = "run",
    force: bool = False,
    workers: int | None = None,
    executor: Executor | None = None,
    advance: Advance | None = None,
) -> Result:
    """Pack every safetensors file of a model directory and copy the rest.

    Links are followed, so a Hugging Face snapshot works; nothing is written into the source. The index is
    rewritten for the new sizes. The destination appears when everything is done; a rerun after an
    interruption skips the files that are done, by digest.

    Parameters
    ----------
    source : path-like
        Directory with at least one ``.safetensors`` file, or a packed directory of another profile.
    destination : path-like
        Directory to make.
    profile : {"run", "storage"}
        As for `pack_file`.
    force : bool
        Replace an existing directory.
    workers : int, optional
        Threads in all; by default one per processor.
    executor : concurrent.futures.Executor, optional
        Where shards are packed, one task each; tasks are picklable and return counts and digests only. By
        default threads of this process.
    advance : callable, optional
        Called with the number of weight bytes done since the last call.

    Returns
    -------
    Result

    Raises
    ------
    WCodecError
        As `pack_file`; the destination is untouched then.
    """
    begun = time.perf_counter()
    source, destination = Path(source), Path(destination)
    files, notes = list_files(source)
    shards = [name for name in files if name.endswith(_WEIGHTS)]
    before = _converted(source, files, profile)
    if not shards:
        raise UnsupportedError(f"has no {_WEIGHTS} file", file=source, mend="pack reads safetensors files")
    check_folder(source, destination, force=force)
    _ask_for_permission(files.values())
    for name in shards:
        open_source(files[name], profile)  # every refusal comes before hours of work
    if not before:
        notes += index_notes(files)
    with _folder_part(destination, keep=True) as part:
        manifest = _progress(part, profile)
        manifest.files = {name: facts for name, facts in manifest.files.items() if name in shards}
        results: dict[str, Result] = {}

        def done(name: str, result: Result) -> None:
            results[name] = result
            assert result.digest is not None
            manifest.files[name] = FileFacts("packed", result.bytes_in, result.digest, result.bytes_out)
            manifest.write(part)
            if executor is not None and advance is not None:
                advance(result.bytes_in)

        tasks = {
            name: partial(pack_shard, files[name], part / name, manifest.files.get(name), profile=profile)
            for name in shards
        }
        _prepare(part, files)
        run_shards(tasks, done, workers=workers, executor=executor, advance=advance)
        stored = {name: _tensor_bytes(part / name) for name in shards}
        packed = any(result.packed_tensors for result in results.values())
        for name, path in files.items():
            if name not in results:
                original = before[name].original if name in before else None
                manifest.files[name] = _place_other(name, path, part / name, stored, packed, original)
        manifest.write(part)
        swap_folder(part, destination, overwrite=force)
    return _total(source, destination, results.values(), begun, notes)


def unpack_directory(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    workers: int | None = None,
    executor: Executor | None = None,
    advance: Advance | None = None,
) -> Result:
    """Give back the directory that a packed directory was made from, every file byte for byte.

    Parameters are those of `pack_directory`. Files that the manifest does not name are left out, and noted.

    Raises
    ------
    MismatchError
        If a digest differs; the destination is untouched then.
    WCodecError
        As `unpack_file`.
    """
    begun = time.perf_counter()
    source, destination = Path(source), Path(destination)
    manifest = Manifest.read(source)
    notes = _strangers(source, manifest)
    check_folder(source, destination, force=force)
    _ask_for_permission(source / name for name in manifest.files)
    with _folder_part(destination, keep=False) as part:
        _prepare(part, dict.fromkeys(manifest.files, source))
        results: dict[str, Result] = {}

        def done(name: str, result: Result) -> None:
            results[name] = result
            if executor is not None and advance is not None:
                advance(result.bytes_out)

        tasks = {
            name: partial(unpack_shard, source / name, part / name, facts)
            for name, facts in manifest.files.items()
            if facts.kind == "packed"
        }
        run_shards(tasks, done, workers=workers, executor=executor, advance=advance)
        for name, facts in manifest.files.items():
            if facts.original is not None:
                with replace_file(part / name, mode=(source / name).stat().st_mode, overwrite=True) as out:
                    out.write_at(0, facts.original)
            elif facts.kind == "copied":
                _copy_checked(source / name, part / name, facts)
        swap_folder(part, destination, overwrite=force)
    return _total(source, destination, results.values(), begun, notes)


def verify_directory(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    advance: Advance | None = None,
) -> Verdict:
    """Check every file of a packed directory, and compare with the directory it was made from where given.

    Parameters are those of `verify_file`. An error names the other files that are wrong, too.
    """
    begun = time.perf_counter()
    source = Path(source)
    manifest = Manifest.read(source)
    if against is not None and Path(against).is_file():
        raise WCodecError(
            f"is a file, but {source} is a folder", file=against, mend="name the folder it was made from"
        )
    outcomes: dict[str, Verdict | WCodecError] = {}
    tasks = {
        name: partial(_verdict_or_error, source / name)
        for name, facts in manifest.files.items()
        if facts.kind == "packed" and (source / name).is_file()
    }
    run_shards(tasks, outcomes.__setitem__, workers=workers, advance=advance)
    wrong = dict(_wrong(source, manifest, outcomes))
    for name in wrong:  # in the order of the manifest, whichever thread came first
        error = outcomes.get(name)
        if isinstance(error, WCodecError):
            others = ", ".join(other for other in wrong if other != name)
            error.problem += f" (also wrong: {others})" if others else ""
            raise error
    verdicts = [outcome for outcome in outcomes.values() if isinstance(outcome, Verdict)]
    differences = [f"{name}: {text}" for name, texts in wrong.items() for text in texts]
    if against is not None:
        differences += _compare_tree(Path(against), manifest)
    return Verdict(
        source,
        files=len(verdicts),
        tensors=sum(verdict.tensors for verdict in verdicts),
        nbytes=sum(verdict.nbytes for verdict in verdicts),
        digest=None,
        differences=tuple(differences),
        seconds=time.perf_counter() - begun,
        notes=tuple(_strangers(source, manifest)),
    )


def _verdict_or_error(path: Path, *, workers: int | None, advance: Advance | None) -> Verdict | WCodecError:
    """What `verify_file` finds: a file that cannot be read does not hide what is wrong with others."""
    try:
        return verify_file(path, workers=workers, advance=advance)
    except WCodecError as error:
        return error


def _wrong(
    source: Path, manifest: Manifest, outcomes: Mapping[str, Verdict | WCodecError]
) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with each file that is not as it was packed, in the order of the manifest."""
    for name, facts in manifest.files.items():
        found: list[str] = []
        outcome = outcomes.get(name)
        if isinstance(outcome, Verdict):
            found += outcome.differences
            if outcome.digest != facts.digest:
                found.append("holds another file than the manifest says")
        elif outcome is not None:
            found.append(outcome.problem)
        elif not (source / name).is_file():
            found.append("is missing")
        elif file_digest(source / name) != (facts.stored_bytes, facts.stored_digest or facts.digest):
            found.append(_changed(name).problem)
        if found:
            yield name, found


def _compare_tree(folder: Path, manifest: Manifest) -> Iterator[str]:
    theirs, _ = list_files(folder)
    for name, facts in manifest.files.items():
        if name not in theirs:
            yield f"{folder / name} is missing"
        elif file_digest(theirs[name]) != (facts.nbytes, facts.digest):
            yield f"{folder / name} differs from the file that was packed"
    for name in sorted(theirs.keys() - manifest.files.keys()):
        yield f"{folder / name} was not there when the directory was packed"


def _strangers(source: Path, manifest: Manifest) -> list[str]:
    files, notes = list_files(source)
    extra = sorted(files.keys() - manifest.files.keys() - {MANIFEST_NAME})
    return [*notes, *(f"{name} is not in the manifest and is left out" for name in extra)]


def _changed(path: str | Path) -> MismatchError:
    return MismatchError("is not what was packed", file=path, mend="restore it or pack the directory again")


def _ask_for_permission(files: Iterable[Path]) -> None:
    """Open every file once: one that may not be read is found now, not after hours of work."""
    for path in files:
        LocalFile(path)


@contextlib.contextmanager
def _folder_part(destination: Path, *, keep: bool) -> Iterator[Path]:
    """The folder in which `destination` is built, under a lock.

    After an exception it goes away, unless `keep` is set and it holds finished shards for the next run.
    """
    part, fd = part_path(destination), -1
    try:
        with naming(destination, "write"):
            part.mkdir(exist_ok=True)
            fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        lock(fd, destination)
        try:
            yield part
        except BaseException as error:
            kept = keep and (part / MANIFEST_NAME).exists()
            if isinstance(error, WCodecError):
                _speak_of(destination, part, error, kept=kept)
            if not kept:
                remove(part)
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            part.rmdir()  # only if it is empty: nobody's work
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _speak_of(destination: Path, part: Path, error: WCodecError, *, kept: bool) -> None:
    """Let an error about a file in the hidden folder `part` name the destination, and say what is kept."""
    if error.file is None or not Path(error.file).is_relative_to(part):
        return
    error.file = str(destination / Path(error.file).relative_to(part))
    if kept and error.mend is not None:
        error.mend = error.mend.replace(NOTHING_WRITTEN, "finished files are kept for the next run")


def _progress(part: Path, profile: str) -> Manifest:
    """What an interrupted run has done; nothing where its manifest is unreadable or of another profile."""
    with contextlib.suppress(WCodecError):
        manifest = Manifest.read(part)
        if manifest.profile == profile:
            return manifest
    return Manifest(profile)


def _converted(source: Path, files: dict[str, Path], profile: str) -> dict[str, FileFacts]:
    """Facts of a packed directory that is to be packed otherwise; its manifest is no file of the model."""
    if files.pop(MANIFEST_NAME, None) is None:
        return {}
    manifest = Manifest.read(source)
    if manifest.profile == profile:
        raise UnsupportedError("is packed already", file=source, mend="`wcodec unpack` gives the original")
    return manifest.files


def _prepare(part: Path, files: dict[str, Path]) -> None:
    """Make the folders, and remove what an earlier run left that does not belong."""
    with naming(part, "write"):
        keep = {part / name for name in (*files, MANIFEST_NAME)}
        folders = {folder for path in keep for folder in path.parents}
        for path in sorted(part.rglob("*"), reverse=True):
            if path not in keep and path not in folders:
                remove(path)
        for name in files:
            (part / name).parent.mkdir(parents=True, exist_ok=True)


def _copy_checked(source: Path, target: Path, facts: FileFacts) -> None:
    if copy_file(source, target, overwrite=True) != (facts.nbytes, facts.digest):
        raise _changed(source)


def _tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a packed file, without the record."""
    return sum(entry.nbytes for entry in parse_header(path).entries if entry.name != RECORD_NAME)


def _place_other(
    name: str, source: Path, target: Path, stored: dict[str, int], packed: bool, original: bytes | None
) -> FileFacts:
    """Copy a file that holds no packed weights, or rewrite it.

    `original` is its text where `source` has rewritten it already.
    """
    text = original
    if text is None and is_rewritable(name):
        with naming(source, "read"):
            text = source.read_bytes()
    new = rewritten(name, text, stored, packed=packed) if text else None
    if new is None and original is None:
        nbytes, digest = copy_file(source, target, overwrite=True)
        return FileFacts("copied", nbytes, digest, nbytes)
    assert text is not None
    with replace_file(target, mode=source.stat().st_mode, overwrite=True) as out:
        out.write_at(0, text if new is None else new)
    if new is None:
        return FileFacts("copied", len(text), bits.digest(text), len(text))
    return FileFacts("rewritten", len(text), bits.digest(text), len(new), text, bits.digest(new))


def _total(source: Path, destination: Path, results: Any, begun: float, notes: Sequence[str]) -> Result:
    results = sorted(results, key=lambda result: os.fsencode(result.source))
    left: dict[str, list[str]] = {}
    for result in results:
        for reason, names in result.left.items():
            left.setdefault(reason, []).extend(names)
    return Result(
        source,
        destination,
        files=len(results),
        tensors=sum(r.tensors for r in results),
        packed_tensors=sum(r.packed_tensors for r in results),
        weights=sum(r.weights for r in results),
        bytes_in=sum(r.bytes_in for r in results),
        bytes_out=sum(r.bytes_out for r in results),
        digest=None,
        seconds=time.perf_counter() - begun,
        notes=(*notes, *left_notes(left)),
        left=left,
    )
