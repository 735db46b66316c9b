"""One function over many items: in this process, in worker processes, or on a Ray cluster.

    with crew(workers=4) as workers:
        for index, result in workers.run(function, items):  # as they finish
        for result in workers.in_order(function, items):

A result may depend on its item only, so it does not matter who computes it, when, or how often: an
item whose worker or node is lost is computed again. Errors and warnings of a worker come up here as
themselves. A few items for each worker are on their way at once, counted from the oldest that is
not done, so that results that wait for their turn take bounded memory.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import platform
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 4  # items on their way for each worker
_RETRIES = 5  # of an item whose worker or node is lost
RAY_HELP = (
    "compute on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT; alone, the one of RAY_ADDRESS, "
    "or that runs on this machine, or a new one here"
)


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
            yield index, function(item)

    def in_order(self, function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
        """The results in the order of the items."""
        early: dict[int, R] = {}
        turn = 0
        for index, result in self.run(function, items):
            early[index] = result
            while turn in early:
                yield early.pop(turn)
                turn += 1


@contextmanager
def crew(workers: int = 1, ray: bool | str = False) -> Iterator[Crew]:
    """Workers that end with the block, at once if it fails or is stopped.

    Args:
        workers: processes; 1 computes everything in this one.
        ray: an address of a Ray cluster, or True for the one that Ray finds or starts; Ray then
            says how many items are computed at once.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}: give 1 or more")
    if ray is not False:
        with connected(ray):
            yield from _ending(_RayCrew())
    elif workers == 1:
        yield Crew()
    else:
        yield from _ending(_Processes(workers))


def _ending(workers: _Elsewhere) -> Iterator[Crew]:
    try:
        yield workers
    except BaseException:
        with deaf():
            workers.stop()
        raise
    workers.close()


class _Elsewhere(Crew):
    """Workers that are sent bytes and send bytes back."""

    remote = True

    def run(
        self, function: Callable[[T], R], items: Sequence[T]
    ) -> Generator[tuple[int, R], None, None]:
        shared = self.share(_packed(function, f"{function!r}"))
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
        """What `_answer` gave."""
        raise NotImplementedError

    def stop(self) -> None:
        """At once: nobody wants the results."""
        raise NotImplementedError

    def close(self) -> None:
        """All is done."""


class _Processes(_Elsewhere):
    """Processes of this machine."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._others = set(multiprocessing.active_children())
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # they share the cores; before they start
        # spawn: the parent may have threads (numba, BLAS), which do not survive a fork
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, context, _die_with_parent)

    def size(self) -> int:
        return self._workers

    def send(self, function: bytes, item: bytes) -> Future[bytes]:
        with deaf():  # workers inherit this: Ctrl-C is for the command alone
            return self._pool.submit(_answer, function, item)

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


class _RayCrew(_Elsewhere):
    """The workers of the Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        import ray

        self._ray, self._sent = ray, set[Any]()
        # a worker serves one item at a time: its libraries need no more threads than one
        environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        self._answer = ray.remote(
            num_cpus=1, max_retries=_RETRIES, runtime_env=environment
        )(_answer_on_node)  # fmt: skip

    def share(self, function: bytes) -> Any:
        return self._ray.put(function)

    def size(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def send(self, function: Any, item: bytes) -> Any:
        handle = self._answer.remote(function, item, code_mark())
        self._sent.add(handle)
        return handle

    def finished(self, handles: list[Any]) -> list[Any]:
        done, _ = self._ray.wait(handles, num_returns=1)
        return list(done)

    def result(self, handle: Any) -> bytes:
        self._sent.discard(handle)
        try:
            return bytes(self._ray.get(handle))
        except self._ray.exceptions.RayError as error:
            raise WorkerError(
                f"Ray could not compute an item, after {_RETRIES} retries where its worker or node "
                f"was lost; the same ope_gym must be installed on every node: {error}"
            ) from error

    def stop(self) -> None:
        for handle in self._sent:
            self._ray.cancel(handle, force=True)


@contextmanager
def connected(address: bool | str) -> Iterator[None]:
    """Connected to Ray; a connection that is there already is used, and kept.

    Args:
        address: "auto", "local", "host:port" or "ray://host:port". True leaves it to Ray: the
            environment variable RAY_ADDRESS, else a cluster that `ray start` began on this machine,
            else a new one that ends with the block.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            'Ray is not installed: pip install "ope-gym[ray]", or leave it out: workers on this '
            "machine need none"
        ) from error
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library reports nothing by itself
    try:
        ray.init(
            address=None if address is True else address, include_dashboard=False,
            logging_level="ERROR", log_to_driver=False,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster at {'this machine' if address is True else address}: {error}"
        ) from error
    try:
        yield
    finally:
        with deaf():
            ray.shutdown()  # leaves a cluster that was there before


def ray_address(text: str) -> str:
    """The address of a cluster, as --ray takes it."""
    if text not in ("auto", "local") and ":" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of a Ray cluster: give auto, local, HOST:PORT or "
            "ray://HOST:PORT, or --ray alone, after all files"
        )
    return text


def cores() -> int:
    """That this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


@cache
def code_mark() -> str:
    """Of this library and of numpy: different ones need not give the same bits."""
    known = hashlib.sha256(np.__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        known.update(path.read_bytes())
    return known.hexdigest()[:16]


def _answer_on_node(function: bytes, item: bytes, mark: str) -> bytes:
    """As `_answer`, if the node runs the same code."""
    if mark != code_mark():
        return _failed(
            WorkerError(
                f"a Ray worker on {platform.node()} runs another ope_gym or numpy "
                f"({code_mark()} instead of {mark}): install the same on all nodes, and restart "
                "their Ray if they changed"
            )
        )
    return _answer(function, item)


def _answer(function: bytes, item: bytes) -> bytes:
    """Of a worker: the packed result, or error, and the warnings."""
    import cloudpickle

    with warnings.catch_warnings(record=True) as heard:
        try:
            result = cloudpickle.loads(function)(cloudpickle.loads(item))
        except Exception as error:
            return _failed(error)
    said = [(warning.category, str(warning.message)) for warning in heard]
    return _packed((result, said), "the result")


def _failed(error: Exception) -> bytes:
    """An error in parts: some classes cannot be made again from their words."""
    words = "".join(traceback.format_exception(error))
    return _packed(_Failure(type(error), error.args, dict(vars(error)), words), f"{error!r}")


class _Failure:
    """An error of a worker."""

    def __init__(self, kind: type[Exception], args: Any, state: dict[str, Any], words: str) -> None:
        self._made = kind, args, state, words

    def error(self) -> Exception:
        kind, args, state, words = self._made
        made = kind.__new__(kind, *args)
        vars(made).update(state)
        made.__cause__ = RuntimeError(f"in a worker:\n{words}")
        return made


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

    found = cloudpickle.loads(answer)
    if isinstance(found, _Failure):
        raise found.error()
    result, said = found
    for category, words in said:
        warnings.warn(words, category, stacklevel=2)
    return result


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
