"""Runs in worker processes that end with the command, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

from studies.chunks import Runs
from studies.seeds import Span, seeds_of

if TYPE_CHECKING:
    from studies.frame import Study


def results_of(
    study: Study, seed: int, todo: Sequence[Span], workers: int
) -> Generator[tuple[Span, Runs], None, None]:
    """Chunks as they finish. Ctrl-C ends the workers at once."""
    if workers == 1 or len(todo) < 2:
        for span in todo:
            yield span, study.run(seeds_of(seed, span, study.name))
        return
    others = set(multiprocessing.active_children())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; set before they start
    # spawn: the parent may have threads (numba, BLAS), which do not survive a fork
    pool = ProcessPoolExecutor(
        min(workers, len(todo)), multiprocessing.get_context("spawn"), _die_with_parent
    )
    try:
        with deaf():  # workers inherit this: Ctrl-C is for the command alone
            futures = {
                pool.submit(study.run, seeds_of(seed, span, study.name)): span for span in todo
            }
        while futures:
            finished, _ = wait(futures, return_when=FIRST_COMPLETED)
            for future in finished:
                yield futures.pop(future), future.result()
    except BaseException:
        with deaf():
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            pool.shutdown(wait=False, cancel_futures=True)  # a worker may have died with a lock
        raise
    pool.shutdown()


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


def _die_with_parent() -> None:
    """Workers of a killed command would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
