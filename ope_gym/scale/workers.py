"""Compute one function over many items: here, in threads or processes by joblib, or on Ray.

A result depends on its item alone, so it does not matter who computes it, or how often. Results
come in the order of the items. Errors and warnings appear here as if the items had been computed
here, and Ctrl-C ends whoever is still at work.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from ope_gym.arguments import whole
from ope_gym.scale import ray

_IDLE = 20  # seconds after which processes end that nobody gives work, their parent killed perhaps
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Workers:
    """The executor of the items.

    >>> list(Workers().in_order(abs, [-1, -2]))
    [1, 2]

    Args:
        count: How many items are computed at once on this machine; 1 for the calling thread alone.
        ray: Address of a Ray cluster, or True for the one that Ray finds or starts: Ray then
            decides how many items are computed at once. False or None for no Ray.
    """

    count: int = 1
    ray: bool | str | None = False

    def __post_init__(self) -> None:
        whole("workers", self.count, expected="give a whole number of workers, 1 or more")
        if self.ray == "" or not (self.ray is None or isinstance(self.ray, bool | str)):
            raise ValueError(
                f"ray is {self.ray!r}: give True, an address such as 'auto' or 'host:port', or "
                "False"
            )
        if self.ray and self.count != 1:
            raise ValueError(
                f"workers is {self.count!r} and ray is {self.ray!r}: Ray's resources say how many "
                "tasks run at once; give one of them"
            )

    @property
    def alone(self) -> bool:
        """Whether items are computed one after the other in the calling thread."""
        return self.count == 1 and not self.ray

    def in_order(
        self, function: Callable[[T], R], items: Sequence[T], *, threads: bool = False
    ) -> Generator[R, None, None]:
        """Yield the results in the order of the items, whichever finishes first.

        Args:
            function: What is computed of an item.
            items: Arguments of the tasks.
            threads: Whether threads can do the work at once, without waiting for each other: it is
                our own code, which gives up the interpreter's lock wherever it takes long and
                changes nothing that another thread sees. Nothing is then sent to a process.
        """
        if self.ray:
            yield from _told(ray.in_order(self.ray, _packed(function), items))
        elif self.alone or len(items) < 2:  # a single item is not worth a thread
            yield from map(function, items)
        elif threads:
            yield from self._by_joblib("threading", function, items)
        else:
            yield from _told(self._by_joblib("loky", _packed(function), items))

    def _by_joblib(
        self, backend: str, function: Any, items: Sequence[Any]
    ) -> Generator[Any, None, None]:
        from joblib import Parallel, delayed, parallel_config

        loky: dict[str, Any] = {"inner_max_num_threads": 1, "idle_worker_timeout": _IDLE}
        loky["initializer"] = _leave_signals
        with parallel_config(backend, **(loky if backend == "loky" else {})):
            parallel = Parallel(self.count, return_as="generator", batch_size=1, max_nbytes=None)
        results = parallel(delayed(function)(item) for item in items)
        try:
            for result in results:  # noqa: UP028, which would close `results` with its warnings
                yield result
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of items for which nobody waits any more
                results.close()


def _leave_signals() -> None:
    """Leave Ctrl-C to the parent, which ends the workers: each would print where it was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class Packed:
    """A function as bytes, packed once for all its items: it may hold thousands of policies."""

    function: bytes

    def __call__(self, item: Any) -> tuple[Any, list[tuple[type[Warning], str]]]:
        """Return the result of an item, and its warnings."""
        with warnings.catch_warnings(record=True) as caught:
            result = _unpacked(self.function)(item)
        return result, [(one.category, str(one.message)) for one in caught]


def _packed(function: Callable[[Any], Any]) -> Packed:
    import cloudpickle

    try:
        return Packed(cloudpickle.dumps(function))
    except Exception as error:
        raise TypeError(
            f"the policies, models or functions cannot be sent to another process ({error}): give "
            "some that can be pickled, or use workers=1 without Ray"
        ) from error


@lru_cache(maxsize=1)
def _unpacked(function: bytes) -> Callable[[Any], Any]:
    import cloudpickle

    return cloudpickle.loads(function)  # type: ignore[no-any-return]


def _told(outcomes: Generator[Any, None, None]) -> Iterator[Any]:
    """Yield the results that other processes made, and repeat their warnings here."""
    with closing(outcomes):  # at once: the garbage collector would print what Ctrl-C interrupts
        for result, caught in outcomes:
            for category, message in caught:
                warnings.warn(message, category, stacklevel=2)
            yield result
