"""A Dask cluster as an executor: the tasks of analyze and pack, on workers that are other machines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from wcodec.errors import UnsupportedError, WCodecError

#: Seconds to wait for the scheduler.
TIMEOUT = 20


@contextmanager
def dask_executor(address: str, *, timeout: float = TIMEOUT) -> Iterator[Executor]:
    """Connect to a Dask scheduler for the length of the block.

    Its workers need this version of wcodec and reach the files by the same paths. Dask runs the tasks of a
    worker that died on another one.

    Parameters
    ----------
    address : str
        Address of the scheduler, such as ``"tcp://10.0.0.1:8786"``.
    timeout : float
        Seconds to wait for it.

    Yields
    ------
    concurrent.futures.Executor

    Raises
    ------
    UnsupportedError
        If ``distributed`` is missing, or the workers have another wcodec.
    WCodecError
        If nobody answers.
    """
    try:
        import distributed
        from distributed.scheduler import KilledWorker
    except ImportError:
        raise UnsupportedError("--dask needs Dask distributed", mend="pip install 'wcodec[dask]'") from None
    try:
        client: Any = distributed.Client(address, timeout=timeout, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise WCodecError(
            f"no Dask scheduler answers at {address!r} ({error or 'timed out'})",
            mend="give the address that `dask scheduler` prints",
        ) from None
    try:
        _check_workers(client)
        yield client.get_executor()
    except KilledWorker as error:
        raise WCodecError(
            f"a task ended {error.allowed_failures + 1} workers one after another",
            mend="look at the memory of the workers and into their logs",
        ) from None
    finally:
        client.close()


def _check_workers(client: Any) -> None:
    from wcodec import __version__

    for worker, version in client.run(_version).items():
        if version != __version__:
            raise UnsupportedError(
                f"worker {worker} has {'no wcodec' if version is None else f'wcodec {version}'}",
                mend=f"install wcodec {__version__} there",
            )


def _version() -> str | None:
    try:
        import wcodec
    except ImportError:
        return None
    return wcodec.__version__
