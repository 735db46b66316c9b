"""Who computes: this process, worker processes of this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from ope_gym.tasks import Crew, Elsewhere, R, T, WorkerError, answer, deaf


@contextmanager
def crew(workers: int = 1, ray: bool | str = False) -> Iterator[Crew]:
    """Workers that end with the block, at once if it fails or is stopped.

    >>> with crew() as hands:
    ...     list(hands.in_order(abs, [-1, -2]))
    [1, 2]

    Args:
        workers: processes; 1 computes everything in this one.
        ray: an address of a Ray cluster, or True for the one that Ray finds or starts; Ray then
            says how many items are computed at once.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}: give 1 or more")
    if ray is not False:
        from ope_gym.ray_crew import RayCrew, connected

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
        self._workers = workers
        self._others = set(multiprocessing.active_children())
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # they share the cores; before they start
        # spawn: the parent may have threads (numba, BLAS), which do not survive a fork
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, _die_with_parent)

    def run(
        self, function: Callable[[T], R], items: Sequence[T]
    ) -> Generator[tuple[int, R], None, None]:
        here = len(items) < 2  # not worth a process
        return Crew().run(function, items) if here else super().run(function, items)

    def size(self) -> int:
        return self._workers

    def send(self, function: bytes, item: bytes) -> Future[bytes]:
        with deaf():  # workers inherit this: Ctrl-C is for the command alone
            return self._pool.submit(answer, function, item)

    def finished(self, handles: list[Any]) -> list[Any]:
        return list(wait(handles, return_when=FIRST_COMPLETED).done)

    def result(self, handle: Any) -> bytes:
        try:
            return bytes(handle.result())
        except BrokenProcessPool as error:
            raise WorkerError(
                "a worker process was killed, perhaps for want of memory: use fewer workers"
            ) from error

    def stop(self) -> None:
        for child in set(multiprocessing.active_children()) - self._others:
            child.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)  # one may have died with a lock

    def close(self) -> None:
        self._pool.shutdown()


def cores() -> int:
    """That this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _die_with_parent() -> None:
    """Workers of a killed command would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
