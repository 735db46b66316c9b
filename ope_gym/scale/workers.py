"""Compute one function over many items: in this process, in other processes, or on Ray.

A result depends on its item alone, to the last bit, so any worker may compute it, at any time and
more than once. Each item is computed in one thread, because BLAS and torch add numbers in another
order with several, which changes the last bits. Errors and warnings of a worker appear here as if
the item had been computed here.

Workers of this machine are processes, or threads of this process for work that is known to be safe
in them: see `Workers.within`. Threads start at once, and nothing is sent to them.

Local processes come from loky, which is part of joblib. Its executor is used directly rather
than `joblib.Parallel`, whose results pile up in memory if one item is slow or the caller is.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from ope_gym.arrays import positive
from ope_gym.scale.ray import RayTasks, connected
from ope_gym.scale.tasks import (
    Outcome,
    Pool,
    WorkerError,
    compute,
    ignoring_interrupts,
    one_thread,
    packed,
)
from ope_gym.scale.threads import LocalThreads

T = TypeVar("T")
R = TypeVar("R")

# Items sent for each worker, counted from the oldest that is not done, which bounds the results
# that wait for their turn. loky's queue holds as many: it fails to drop what is not yet in there.
_AHEAD = 2
_LIBRARIES = ("OMP", "OPENBLAS", "MKL", "NUMBA")


@contextmanager
def start_workers(workers: int = 1, ray: bool | str | None = False) -> Iterator[Workers]:
    """Start workers that end with the block, at once if it fails or is stopped.

    >>> with start_workers() as crew:
    ...     list(crew.in_order(abs, [-1, -2]))
    [1, 2]

    Args:
        workers: number of processes, or of threads; 1 computes everything in the calling thread.
        ray: address of a Ray cluster, or True for the one that Ray finds or starts; Ray then
            decides how many items are computed at once. False or None: no Ray.
    """
    if not positive(workers):
        raise ValueError(f"workers is {workers!r}: give a whole number of workers, 1 or more")
    if ray == "" or not (ray is None or isinstance(ray, bool | str)):
        raise ValueError(
            f"ray is {ray!r}: give True, an address such as 'auto' or 'host:port', or False"
        )
    if ray:
        with connected(ray), PoolWorkers(RayTasks()) as crew:
            yield crew
    elif workers == 1:
        yield Workers()
    else:
        with (
            PoolWorkers(LocalThreads(workers)) as threads,
            PoolWorkers(LocalProcesses(workers), threads) as crew,
        ):
            yield crew


class Workers:
    """Compute items one after the other in the calling thread."""

    alone = True  # whether items are computed one after the other in the calling thread
    remote = False  # whether functions and items are sent to other processes
    checkpoint: Callable[[int], object] | None = None  # see `Pool`

    def within(self, safe: bool) -> Workers:
        """Return the workers for some work: threads of this process where they can do it.

        Args:
            safe: whether several threads can do the work at once, without waiting for each other:
                it is our own code, which gives up the interpreter's lock wherever it takes long
                and changes nothing that another thread sees.
        """
        return self

    def in_order(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield the results in the order of the items."""
        for item in items:
            with one_thread():
                result = function(item)
            yield result


class PoolWorkers(Workers):
    """Give items to a pool, which ends with the block.

    Args:
        pool: who computes them.
        threads: workers in this process, where they can do the work.
    """

    alone = False

    def __init__(self, pool: Pool, threads: Workers | None = None) -> None:
        self._pool, self._threads = pool, threads or self
        self.remote, self.checkpoint = pool.remote, pool.checkpoint

    def within(self, safe: bool) -> Workers:
        """Return the threads for work that is safe in them."""
        return self._threads if safe else self

    def in_order(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield the results in the order of the items, whichever finishes first."""
        if len(items) < self._pool.fewest:
            yield from super().in_order(function, items)
            return
        shared = self._pool.share(function)
        numbered, sent = enumerate(items), deque[tuple[Any, str]]()
        while True:
            room = _AHEAD * self._pool.size() - len(sent)
            for number, item in itertools.islice(numbered, max(room, 0)):
                name = f"item {number}"
                sent.append((self._pool.send(shared, item, name), name))
            if not sent:
                return
            yield _result(self._pool, *sent.popleft())

    def __enter__(self) -> PoolWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with ignoring_interrupts():
            self._pool.stop(at_once=kind is not None)


def _result(pool: Pool, handle: Any, name: str) -> Any:
    """Wait for the result of an item; show its warnings, or raise its error."""
    outcome = pool.receive(handle, name)
    for category, message in outcome.warnings:
        warnings.warn(message, category, stacklevel=4)
    if outcome.error is not None:
        if not outcome.trace:
            raise outcome.error()
        raise outcome.error() from WorkerError(f"{name} failed in {outcome.trace}")
    return outcome.result


class LocalProcesses(Pool):
    """Compute in processes of this machine; they start with the first items.

    Args:
        count: how many.
    """

    fewest = 2  # a single item is not worth a process
    remote = True

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: Any = None

    def share(self, function: Callable[[Any], Any]) -> bytes:
        """Return the function as bytes."""
        return packed(function)

    def size(self) -> int:
        """Return the number of processes."""
        return self._count

    def send(self, function: bytes, item: Any, name: str) -> Any:
        """Send an item to a process; the first one starts them all."""
        # A terminal sends Ctrl-C to workers, too, which would print a traceback each. So they
        # start with the signal ignored: it may come while they are still importing.
        quiet = nullcontext() if self._pool else ignoring_interrupts()
        if self._pool is None:
            self._pool = self._start()
        with _telling_of_lost_processes(), quiet:
            return self._pool.submit(compute, function, packed(item, name), "a worker process")

    def _start(self) -> Any:
        from joblib.externals.loky import ProcessPoolExecutor

        return ProcessPoolExecutor(
            self._count,
            initializer=_prepare_worker,
            initargs=(os.getpid(),),
            env={f"{library}_NUM_THREADS": "1" for library in _LIBRARIES},
        )

    def receive(self, handle: Any, name: str) -> Outcome:
        """Wait for the outcome of an item."""
        import cloudpickle

        with _telling_of_lost_processes():
            outcome: Outcome = cloudpickle.loads(handle.result())
        return outcome

    def stop(self, at_once: bool) -> None:
        """End the processes and wait until they are gone: they may write to a scratch folder."""
        if self._pool is None:
            return
        if at_once:
            threading.excepthook = _ignore_loky(threading.excepthook)
        self._pool.shutdown(kill_workers=at_once)


def _ignore_loky(shown: Callable[[threading.ExceptHookArgs], object]) -> Any:
    """Return a hook that keeps quiet about loky's own threads, which killed workers disturb."""

    def hook(args: threading.ExceptHookArgs) -> None:
        name = "" if args.thread is None else args.thread.name
        if name not in ("ExecutorManagerThread", "QueueFeederThread"):
            shown(args)

    return hook


@contextmanager
def _telling_of_lost_processes() -> Iterator[None]:
    try:
        yield
    except BrokenExecutor as error:
        raise WorkerError(
            "a worker process was killed, perhaps because memory ran out: use fewer workers"
        ) from error


def _prepare_worker(parent: int) -> None:
    """Ignore Ctrl-C, and end once the parent is gone: a killed parent ends no worker itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
