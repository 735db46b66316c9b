"""Compute tasks in threads of this process, which share its memory.

Kernels, numpy, checksums and the reading of files release the interpreter's lock, so several
threads work at once. They begin at once, while a process takes a second to import what it needs.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from ope_gym.scale.tasks import Outcome, Pool, WorkerError, one_thread


class LocalThreads(Pool):
    """Compute in threads of this process; they start with the first items.

    Args:
        count: how many.
    """

    fewest = 2  # a single item is not worth a thread

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._around, self._modules = ExitStack(), 0
        self._own = threading.local()  # `warnings`, of the item that a thread computes
        self._stopped = False

    def size(self) -> int:
        """Return the number of threads."""
        return self._count

    def send(self, function: Callable[[Any], Any], item: Any, name: str) -> Future[Outcome]:
        """Give an item to a thread."""
        if self._pool is None:
            self._around.enter_context(_warnings_of_threads(self._own))
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="ope_gym")
        if self._modules != len(sys.modules):
            # Some libraries have one limit for all threads: a thread that left would lift it.
            self._around.enter_context(one_thread())
            self._modules = len(sys.modules)
        return self._pool.submit(self._compute, function, item)

    def _compute(self, function: Callable[[Any], Any], item: Any) -> Outcome:
        caught: list[tuple[type[Warning], str]] = []
        self._own.warnings = caught
        with one_thread():
            try:
                self.checkpoint(0)
                return Outcome(function(item), warnings=caught)
            except Exception as error:
                failed = error
                return Outcome(error=lambda: failed, warnings=caught)

    def checkpoint(self, steps: int) -> None:
        """Raise in a thread whose item nobody waits for any more."""
        if self._stopped:
            raise WorkerError("stopped")

    def receive(self, handle: Future[Outcome], name: str) -> Outcome:
        """Wait for the outcome of an item."""
        return handle.result()

    def stop(self, at_once: bool) -> None:
        """End the threads, at their next checkpoint, and wait: they may write to a folder."""
        self._stopped = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._around.close()


@contextmanager
def _warnings_of_threads(own: threading.local) -> Iterator[None]:
    """Keep warnings of a thread in its `own.warnings`, to be shown in the order of the items.

    `warnings.catch_warnings` would catch those of all threads.
    """
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        caught = getattr(own, "warnings", None)
        if caught is None:
            before(message, category, filename, lineno, file, line)
        else:
            caught.append((category, str(message)))

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:  # else somebody else has put back theirs
            warnings.showwarning = before
