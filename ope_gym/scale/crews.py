"""Who computes: this process, worker processes of this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from ope_gym.arrays import positive
from ope_gym.scale.tasks import Crew, Elsewhere, R, T, WorkerError, answer, deaf

_THREADS = "OMP_NUM_THREADS"
_PATIENCE = 5.0  # seconds, for killed processes to be gone
_starting = threading.Lock()


@contextmanager
def crew(workers: int = 1, ray: bool | str | None = False) -> Iterator[Crew]:
    """Workers that end with the block, at once if it fails or is stopped.

    >>> with crew() as hands:
    ...     list(hands.in_order(abs, [-1, -2]))
    [1, 2]

    Args:
        workers: processes; 1 computes everything in this one.
        ray: an address of a Ray cluster, or True for the one that Ray finds or starts; Ray then
            says how many items are computed at once. False or None: no Ray.
    """
    if not positive(workers):
        raise ValueError(f"workers is {workers!r}: give a whole number of processes, 1 or more")
    if ray == "" or not (ray is None or isinstance(ray, bool | str)):
        raise ValueError(
            f"ray is {ray!r}: give True, an address such as 'auto' or 'host:port', or False"
        )
    if ray:
        from ope_gym.scale.ray import RayCrew, connected

        with connected(ray):
            yield from _ending(RayCrew())
    elif workers == 1:
        yield Crew()
    else:
        yield from _ending(_Processes(workers))


def _ending(workers: Elsewhere) -> Iterator[Crew]:
    try:
        yield workers
    except BaseException:
        with deaf():
            workers.stop()
        raise
    workers.close()


class _Processes(Elsewhere):
    """Processes of this machine."""

    def __init__(self, workers: int) -> None:
        self._workers, self._answered = workers, False
        self._context = _Context()
        self._pool = ProcessPoolExecutor(workers, self._context, _die_with_parent)
        self._folder = tempfile.TemporaryDirectory(prefix="ope_gym-", ignore_cleanup_errors=True)
        self._shared = 0

    def run(
        self, function: Callable[[T], R], items: Sequence[T]
    ) -> Generator[tuple[int, R], None, None]:
        here = len(items) < 2  # not worth a process
        return Crew().run(function, items) if here else super().run(function, items)

    def share(self, function: bytes) -> Path:
        """Once for all items: each worker reads it from a file."""
        self._shared += 1
        path = Path(self._folder.name, str(self._shared))
        path.write_bytes(function)
        return path

    def size(self) -> int:
        return self._workers

    def send(self, function: Path, item: bytes) -> Future[bytes]:
        try:
            with deaf(), _one_thread_each():  # workers, which start here, inherit both
                return self._pool.submit(_answer, function, item)
        except BrokenProcessPool as error:
            raise self._lost() from error

    def finished(self, handles: list[Any]) -> list[Any]:
        return list(wait(handles, return_when=FIRST_COMPLETED).done)

    def result(self, handle: Any) -> bytes:
        try:
            found = bytes(handle.result())
        except BrokenProcessPool as error:
            raise self._lost() from error
        self._answered = True
        return found

    def _lost(self) -> WorkerError:
        words = "a worker process was killed, perhaps for want of memory: use fewer workers"
        if not self._answered:
            words = (
                "the worker processes ended before their first result. They import the script: it "
                'must be a file, and call this under `if __name__ == "__main__":`. If it does, '
                + words
            )
        return WorkerError(words)

    def stop(self) -> None:
        for child in self._context.started():
            child.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)  # one may have died with a lock
        for child in self._context.started():
            child.join(_PATIENCE)  # what they write to may be removed next
        self._folder.cleanup()

    def close(self) -> None:
        self._pool.shutdown()
        self._folder.cleanup()


class _Context(SpawnContext):
    """Knows the children of one crew: other threads of the process may have crews of their own.

    They are spawned: the parent may have threads (numba, BLAS), which do not survive a fork.
    """

    def __init__(self) -> None:
        self._children: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        """A child, as `multiprocessing.Process`."""
        self._children.append(SpawnProcess(*args, **options))
        return self._children[-1]

    def started(self) -> list[SpawnProcess]:
        """Without those that could not start."""
        return [child for child in self._children if child.pid is not None]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """For processes that start meanwhile, which share the cores; the user's own choice goes first.

    Only the environment that they inherit reaches libraries that are loaded with them.
    """
    with _starting:
        if _THREADS in os.environ:
            yield
            return
        os.environ[_THREADS] = "1"
        try:
            yield
        finally:
            del os.environ[_THREADS]


def _answer(function: Path, item: bytes) -> bytes:
    return answer(_read(function), item)


@lru_cache(maxsize=1)
def _read(path: Path) -> bytes:
    return path.read_bytes()


def _die_with_parent() -> None:
    """Workers of a killed command would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
