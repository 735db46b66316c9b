"""Compute one function over many items: in this process, in other processes, or on Ray.

A result depends on its item alone, to the last bit, so any worker may compute it, at any time and
more than once. Each item is computed in one thread, because BLAS and torch add numbers in another
order with several, which changes the last bits. Errors and warnings of a worker appear here as if
the item had been computed here.

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
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ope_gym.arrays import positive
from ope_gym.scale.ray import RayTasks, connected
from ope_gym.scale.tasks import (
    Outcome,
    Pool,
    WorkerError,
    compute,
    ignoring_interrupts,
    in_one_thread,
    outcome_of,
    packed,
)

T = TypeVar("T")
R = TypeVar("R")

# Items sent for each worker, counted from the oldest that is not done, which bounds the results
# that wait for their turn. loky's queue holds as many: it fails to drop what is not yet in there.
_AHEAD = 2
_LIBRARIES = ("OMP", "OPENBLAS", "MKL", "NUMBA")


@contextmanager
def start_workers(
    workers: int = 1, ray: bool | str | None = False, *, helped: bool = False
) -> Iterator[Workers]:
    """Start workers that end with the block, at once if it fails or is stopped.

    >>> with start_workers() as crew:
    ...     list(crew.in_order(abs, [-1, -2]))
    [1, 2]

    Args:
        workers: number of processes; 1 computes everything in this one.
        ray: address of a Ray cluster, or True for the one that Ray finds or starts; Ray then
            decides how many items are computed at once. False or None: no Ray.
        helped: whether this process is one of the workers: it begins at once, while the others
            still start. For items that take no longer than a moment.
    """
    if not positive(workers):
        raise ValueError(f"workers is {workers!r}: give a whole number of processes, 1 or more")
    if ray == "" or not (ray is None or isinstance(ray, bool | str)):
        raise ValueError(
            f"ray is {ray!r}: give True, an address such as 'auto' or 'host:port', or False"
        )
    if ray:
        with connected(ray), RemoteWorkers(RayTasks()) as crew:
            yield crew
    elif workers == 1:
        yield Workers()
    else:
        with RemoteWorkers(LocalProcesses(workers, helped)) as crew:
            yield crew


class Workers:
    """Compute items one after the other in this process."""

    remote = False  # whether functions and items are sent to other processes

    def in_order(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield the results in the order of the items."""
        for item in items:
            yield in_one_thread(function, item)


class _Sent(NamedTuple):
    """An item that was sent to a pool, or computed here.

    Args:
        number: of the item.
        handle: of the pool; None if it was computed here.
        outcome: of an item that was computed here.
    """

    number: int
    handle: Any
    outcome: Outcome | None = None


def _computed_here(function: Callable[[Any], Any], number: int, item: Any) -> _Sent:
    return _Sent(number, None, outcome_of(partial(function, item), "this process"))


class RemoteWorkers(Workers):
    """Send items as bytes to the processes of a pool, which ends with the block."""

    remote = True

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def in_order(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield the results in the order of the items, whichever finishes first."""
        if len(items) < self._pool.fewest:
            yield from super().in_order(function, items)
            return
        shared = self._pool.share(packed(function, "the function, with what it refers to,"))
        rest, sent, left = iter(enumerate(items)), deque[_Sent](), len(items)
        while True:
            sending = sum(one.outcome is None for one in sent)
            # What is sent to workers that still start would wait for the last of them.
            room = _AHEAD * self._pool.size() - sending if self._pool.ready() else 0
            if self._pool.helped and sending:
                room = min(room, left - 1)  # the last one is for this process, which else waits
            for index, item in itertools.islice(rest, max(room, 0)):
                handle = self._pool.send(shared, packed(item, f"item {index}"))
                sent.append(_Sent(index, handle))
                left -= 1
            if self._helps(sent) and (following := next(rest, None)) is not None:
                sent.append(_computed_here(function, *following))
                left -= 1
                continue
            if not sent:
                return
            yield self._result(sent.popleft())

    def _helps(self, sent: Sequence[_Sent]) -> bool:
        """Return whether to compute an item here: the oldest is not done, and few results wait."""
        if not self._pool.helped or sum(one.outcome is not None for one in sent) >= _AHEAD:
            return False
        return not sent or (sent[0].outcome is None and not self._pool.done(sent[0].handle))

    def _result(self, one: _Sent) -> Any:
        """Return the result of an item, with its warnings, or raise its error."""
        import cloudpickle

        outcome = one.outcome
        if outcome is None:
            outcome = cloudpickle.loads(self._pool.receive(one.handle, f"item {one.number}"))
        for category, message in outcome.warnings:
            warnings.warn(message, category, stacklevel=3)
        if outcome.error is not None:
            raise outcome.error() from WorkerError(f"item {one.number} failed in {outcome.trace}")
        return outcome.result

    def __enter__(self) -> RemoteWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with ignoring_interrupts():
            self._pool.stop(at_once=kind is not None)


class LocalProcesses(Pool):
    """Compute in processes of this machine; they start with the first items.

    Args:
        count: how many.
        helped: whether this process is one of them.
    """

    fewest = 2  # a single item is not worth a process

    def __init__(self, count: int, helped: bool = False) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        self.helped, self._count = helped, count - helped
        self._started: Any = None  # done when a process has started
        self._pool = ProcessPoolExecutor(
            self._count,
            initializer=_prepare_worker,
            initargs=(os.getpid(),),
            env={f"{library}_NUM_THREADS": "1" for library in _LIBRARIES},
        )

    def size(self) -> int:
        """Return the number of processes, without this one."""
        return self._count

    def ready(self) -> bool:
        """Return whether a process has started; if this one does not help, there is no hurry."""
        if self.helped and self._started is None:
            self._started = self._submit(_load)
        return not self.helped or bool(self._started.done())

    def send(self, function: Any, item: bytes) -> Any:
        """Send an item to a process; the first one starts them all."""
        handle = self._submit(compute, function, item, "a worker process")
        self._started = self._started or handle
        return handle

    def _submit(self, *call: Any) -> Any:
        # A terminal sends Ctrl-C to workers, too, which would print a traceback each. So they
        # start with the signal ignored: it may come while they are still importing.
        quiet = nullcontext() if self._started else ignoring_interrupts()
        with _telling_of_lost_processes(), quiet:
            return self._pool.submit(*call)

    def done(self, handle: Any) -> bool:
        """Return whether the outcome of an item is here."""
        return bool(handle.done())

    def receive(self, handle: Any, name: str) -> bytes:
        """Wait for the outcome of an item."""
        with _telling_of_lost_processes():
            return bytes(handle.result())

    def stop(self, at_once: bool) -> None:
        """End the processes and wait until they are gone: they may write to a scratch folder."""
        at_once = at_once or (self._started is not None and not self.ready())
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


def _load() -> None:
    """Load what tasks need; that takes a second, and this process does their work meanwhile."""
    import numpy as np

    import ope_gym.data.reader
    import ope_gym.weights.propensities  # noqa: F401
    from ope_gym import kernels

    kernels.cumulate(np.zeros(1), 0, 1, np.array([0, 1]), np.empty(1))


def _prepare_worker(parent: int) -> None:
    """Ignore Ctrl-C, and end once the parent is gone: a killed parent ends no worker itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
