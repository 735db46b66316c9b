"""Run one task in a worker, and carry its outcome back: result, error and warnings.

`compute` is what local processes and Ray run. Functions, items and outcomes travel there as bytes
of cloudpickle, and each task runs in one thread: see `ope_gym.scale.workers`.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from ope_gym.arrays import keep_freed_memory


class WorkerError(RuntimeError):
    """Raised if a worker is lost, or cannot say what happened, or runs other code."""


@dataclass(frozen=True)
class Outcome:
    """The result of an item, or its error, and its warnings.

    Args:
        result: of the item.
        error: returns the error.
        trace: where the error was raised, in words, if it does not say so itself.
        warnings: by class and text.
    """

    result: Any = None
    error: Callable[[], Exception] | None = None
    trace: str = ""
    warnings: list[tuple[type[Warning], str]] = field(default_factory=list)


class Pool:
    """Whoever computes tasks beside the caller; a subclass says where."""

    fewest = 1  # with fewer items than this, the caller computes them itself
    remote = False  # whether functions and items are sent to other processes
    # called after each chunk of an item; raises once nobody waits for it, so that it ends early
    checkpoint: Callable[[int], object] | None = None

    def share(self, function: Callable[[Any], Any]) -> Any:
        """Return what `send` needs to find the function."""
        return function

    def size(self) -> int:
        """Return the number of items that are computed at the same time."""
        raise NotImplementedError

    def send(self, function: Any, item: Any, name: str) -> Any:
        """Send an item, which has a name for messages, to a worker; return a handle of it."""
        raise NotImplementedError

    def receive(self, handle: Any, name: str) -> Outcome:
        """Wait for the outcome of an item."""
        raise NotImplementedError

    def stop(self, at_once: bool) -> None:
        """End the workers, in the midst of their items if `at_once`."""
        raise NotImplementedError


def compute(function: bytes, item: bytes, place: str) -> bytes:
    """Return the packed outcome of an item; called in a worker.

    Args:
        function: to be called, packed.
        item: its argument, packed.
        place: name of this worker, for messages.
    """
    import cloudpickle

    result, error, trace = None, None, ""
    with warnings.catch_warnings(record=True) as caught:
        try:
            with one_thread():
                result = _unpacked(function)(cloudpickle.loads(item))
        except Exception as raised:
            error = _sendable(raised)
            trace = f"{place}:\n{''.join(traceback.format_exception(raised))}"
    outcome = Outcome(result, error, trace, [(x.category, str(x.message)) for x in caught])
    return packed(outcome, "the result")


@lru_cache(maxsize=1)
def _unpacked(function: bytes) -> Callable[[Any], Any]:
    """Return the function, unpacked once for all its items: it may hold thousands of policies."""
    import cloudpickle

    return cloudpickle.loads(function)  # type: ignore[no-any-return]


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold BLAS, OpenMP and torch to one thread, if they are loaded by now."""
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


def packed(value: Any, name: str = "the function, with what it refers to,") -> bytes:
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
