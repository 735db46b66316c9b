"""Run one task in a worker, and carry its outcome back: result, error and warnings.

`compute` is what local processes and Ray run. Functions, items and outcomes travel as bytes of
cloudpickle, and each task runs in one thread: see `ope_gym.scale.workers`.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from ope_gym.arrays import keep_freed_memory

T = TypeVar("T")
R = TypeVar("R")


class WorkerError(RuntimeError):
    """Raised if a worker is lost, or cannot say what happened, or runs other code."""


class Pool:
    """Processes that compute tasks; a subclass says where they are."""

    fewest = 1  # with fewer items than this, the caller computes them itself
    helped = False  # whether the caller also computes items while it waits

    def share(self, function: bytes) -> Any:
        """Return what `send` needs to find the function."""
        return function

    def size(self) -> int:
        """Return the number of items that are computed at the same time."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether the workers have started; asked to see whether to help them."""
        return True

    def send(self, function: Any, item: bytes) -> Any:
        """Send an item to a worker, which calls `compute`; return a handle of it."""
        raise NotImplementedError

    def done(self, handle: Any) -> bool:
        """Return whether `receive` would not wait; asked only if the pool is helped."""
        raise NotImplementedError

    def receive(self, handle: Any, name: str) -> bytes:
        """Wait for a worker and return what `compute` returned."""
        raise NotImplementedError

    def stop(self, at_once: bool) -> None:
        """End the workers, in the midst of their items if `at_once`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Outcome:
    """The result of an item, or its error and where it was raised, and the warnings."""

    result: Any
    error: Callable[[], Exception] | None
    trace: str
    warnings: list[tuple[type[Warning], str]]


def compute(function: bytes, item: bytes, place: str) -> bytes:
    """Return the packed outcome of an item; called in a worker.

    Args:
        function: to be called, packed.
        item: its argument, packed.
        place: name of this worker, for messages.
    """
    import cloudpickle

    def call() -> Any:
        return _unpacked(function)(cloudpickle.loads(item))

    return packed(outcome_of(call, place), "the result")


def outcome_of(call: Callable[[], Any], place: str) -> Outcome:
    """Return the outcome of a call in one thread; `place` names this process in messages."""
    result, error, trace = None, None, ""
    with warnings.catch_warnings(record=True) as caught:
        try:
            with _one_thread():
                result = call()
        except Exception as raised:
            error = _sendable(raised)
            trace = f"{place}:\n{''.join(traceback.format_exception(raised))}"
    return Outcome(result, error, trace, [(x.category, str(x.message)) for x in caught])


@lru_cache(maxsize=1)
def _unpacked(function: bytes) -> Callable[[Any], Any]:
    """Return the function, unpacked once for all its items: it may hold thousands of policies."""
    import cloudpickle

    return cloudpickle.loads(function)  # type: ignore[no-any-return]


def in_one_thread(function: Callable[[T], R], item: T) -> R:
    """Return function(item), computed with BLAS, OpenMP and torch held to one thread."""
    with _one_thread():
        return function(item)


@contextmanager
def _one_thread() -> Iterator[None]:
    keep_freed_memory()
    with _libraries(len(sys.modules)).limit(limits=1):
        yield


@lru_cache(maxsize=1)
def _libraries(modules: int) -> Any:
    """Return a controller of the libraries that have threads, which takes a while to find them.

    Args:
        modules: how many are imported: with another one a library may have come.
    """
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _sendable(error: Exception) -> Callable[[], Exception]:
    """Return a function that can be pickled and makes the error again, or one with its words.

    Pickle calls the class with `args`, which fails for classes whose arguments are not just those.
    """
    import cloudpickle

    for again in (lambda: error, partial(_rebuilt, type(error), error.args, vars(error))):
        with suppress(Exception):
            copy = cloudpickle.loads(cloudpickle.dumps(again))()
            if type(copy) is type(error) and str(copy) == str(error):
                return again
    said = "".join(traceback.format_exception_only(error)).strip()
    return partial(WorkerError, f"{said} (an error of this class cannot be sent from a worker)")


def _rebuilt(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


def packed(value: Any, name: str) -> bytes:
    """Return a value as bytes, or raise TypeError with its name if it cannot be sent."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"{name} cannot be sent to another process ({error}): give files, or functions and "
            "policies that can be pickled, or use workers=1 without Ray"
        ) from error


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside the block; only the main thread receives it, others change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
