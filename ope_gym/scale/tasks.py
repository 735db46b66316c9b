"""One function over many items: the results as they finish, or in order.

A result may depend on its item only, to the last bit, so it does not matter who computes it, when,
or how often: an item whose worker is lost may be computed again. Errors and warnings of a worker
come up here as themselves. A few items for each worker are on their way at once, counted from the
oldest that is not done, so that results that wait for their turn take bounded memory.
"""

from __future__ import annotations

import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 4  # items on their way for each worker


class WorkerError(RuntimeError):
    """Workers were lost, or are not those that were asked for."""


class Crew:
    """Workers; these compute one item after the other, here."""

    remote = False  # whether functions and items are sent to other processes

    def run(
        self, function: Callable[[T], R], items: Sequence[T]
    ) -> Generator[tuple[int, R], None, None]:
        """The index and the result of each item, as they finish."""
        for index, item in enumerate(items):
            yield index, _single(function, item)

    def in_order(self, function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        """The results in the order of the items."""
        early: dict[int, R] = {}
        turn = 0
        for index, result in self.run(function, items):
            early[index] = result
            while turn in early:
                yield early.pop(turn)
                turn += 1


class Elsewhere(Crew):
    """Workers that are sent bytes and send bytes back."""

    remote = True

    def run(
        self, function: Callable[[T], R], items: Sequence[T]
    ) -> Generator[tuple[int, R], None, None]:
        """The index and the result of each item, as they finish."""
        shared = self.share(_packed(function, "what the workers share"))
        sent: dict[Any, int] = {}
        begun = 0
        while sent or begun < len(items):
            limit = min(sent.values(), default=begun) + _AHEAD * self.size()
            while begun < min(limit, len(items)):
                handle = self.send(shared, _packed(items[begun], f"item {begun}"))
                sent[handle] = begun
                begun += 1
            for handle in self.finished(list(sent)):
                yield sent.pop(handle), _opened(self.result(handle))

    def share(self, function: bytes) -> Any:
        """What `send` needs to find the function."""
        return function

    def size(self) -> int:
        """Items computed at once."""
        raise NotImplementedError

    def send(self, function: Any, item: bytes) -> Any:
        """A handle of the result to be."""
        raise NotImplementedError

    def finished(self, handles: list[Any]) -> list[Any]:
        """Wait for some."""
        raise NotImplementedError

    def result(self, handle: Any) -> bytes:
        """What `answer` gave."""
        raise NotImplementedError

    def stop(self) -> None:
        """At once: nobody wants the results."""
        raise NotImplementedError

    def close(self) -> None:
        """All is done."""


def _single(function: Callable[[T], R], item: T) -> R:
    """In one thread: with several, BLAS and torch add numbers in another order, to other bits."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        return function(item)


def answer(function: bytes, item: bytes, place: str = "a worker") -> bytes:
    """Of a worker: the packed result, or error, and the warnings."""
    import cloudpickle

    with warnings.catch_warnings(record=True) as heard:
        try:
            found = _single(_unpacked_function(function), cloudpickle.loads(item))
        except Exception as error:
            found = _Failure(error, place)
    said = [(warning.category, str(warning.message)) for warning in heard]
    return _packed((found, said), "the result")


@lru_cache(maxsize=1)
def _unpacked_function(function: bytes) -> Callable[[Any], Any]:
    """Once for all items of a worker in a row: it may hold thousands of policies."""
    import cloudpickle

    return cloudpickle.loads(function)  # type: ignore[no-any-return]


def failed(error: Exception) -> bytes:
    """The answer of a worker that refuses."""
    return _packed((_Failure(error, "a worker"), []), "an error")


class _Failure:
    """An error of a worker: itself if it can be packed, else in parts, else in words alone."""

    def __init__(self, error: Exception, place: str) -> None:
        self._words = f"in {place}:\n" + "".join(traceback.format_exception(error))
        self._said = "".join(traceback.format_exception_only(error)).strip()
        self._packed = next((one for one in _ways(error) if _is_again(one, error)), b"")

    def error(self) -> Exception:
        """What is to be raised here."""
        cause = RuntimeError(self._words)
        try:
            made = _unpacked(self._packed)
        except Exception:
            made = WorkerError(f"{self._said} (of a class that cannot be sent from a worker)")
        made.__cause__ = cause
        return made


def _ways(error: Exception) -> Iterator[bytes]:
    """Some classes cannot be made again by pickle, some not from their parts."""
    import cloudpickle

    for way in (error, (type(error), error.args, dict(vars(error)))):
        with suppress(Exception):
            yield cloudpickle.dumps(way)


def _unpacked(packed: bytes) -> Exception:
    import cloudpickle

    made = cloudpickle.loads(packed)
    if isinstance(made, tuple):
        kind, args, state = made
        made = kind.__new__(kind, *args)
        vars(made).update(state)
    assert isinstance(made, Exception)
    return made


def _is_again(packed: bytes, error: Exception) -> bool:
    try:
        made = _unpacked(packed)
        return type(made) is type(error) and str(made) == str(error)
    except Exception:
        return False


def _packed(value: Any, name: str) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"{name} cannot be sent to another process ({error}): give files, or functions and "
            "policies that can be pickled, or use workers=1 without Ray"
        ) from error


def _opened(answer: bytes) -> Any:
    """The result of an answer; its error is raised, its warnings are given."""
    import cloudpickle

    found, said = cloudpickle.loads(answer)
    for category, words in said:
        warnings.warn(words, category, stacklevel=2)
    if isinstance(found, _Failure):
        raise found.error()
    return found


@contextmanager
def deaf() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
