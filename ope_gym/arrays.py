"""Arrays of ragged episodes: their types, checks where they enter, and small helpers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROWS = 1 << 14  # of `blocks`
MANY = 1 << 18  # rows from which threads are worth their start
T = TypeVar("T")
R = TypeVar("R")

LOG_PROB_TOLERANCE = 1e-9  # how far above 0 the log of a probability may round


def finite(value: float) -> float | None:
    """Return a number for JSON: None where it is undefined or infinite."""
    return float(value) if np.isfinite(value) else None


def check_offsets(offsets: ArrayLike, steps: int) -> IntArray:
    """Return offsets (n + 1,), or raise if they do not cut `steps` rows into episodes."""
    array = np.asarray(offsets)
    if array.ndim == 1 and array.size < 2:
        raise ValueError("offsets has no trajectory: record at least one episode first")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"offsets has shape {array.shape} and type {array.dtype}; "
            "it must be (n + 1,) integers: trajectory i is rows offsets[i]:offsets[i + 1]"
        )
    array = array.astype(np.int64, copy=False)
    longer = array[1:] > array[:-1]
    if not longer.all():
        i = int(np.argmin(longer))
        raise ValueError(
            f"offsets goes from {array[i]} to {array[i + 1]} at episode {i}; it must increase, "
            "because every episode has at least one step"
        )
    if array[0] != 0 or array[-1] != steps:
        raise ValueError(
            f"offsets runs from {array[0]} to {array[-1]}; it must run from 0 to the {steps} steps "
            "of rewards"
        )
    return array


def as_floats(values: ArrayLike, name: str) -> FloatArray:
    """Return a float64 array; copy only if it has another dtype."""
    try:
        return np.asarray(values).astype(np.float64, casting="same_kind", copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error


def as_integers(values: ArrayLike, name: str, dtype: Any = np.int64) -> NDArray[Any]:
    """Return a read-only copy of whole numbers; raise if they are of another kind."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name} has dtype {array.dtype}, expected integers")
    array = array.astype(dtype)
    array.setflags(write=False)
    return array


def check_column(values: ArrayLike, name: str, steps: int | None = None) -> FloatArray:
    """Return a float64 column (S,), or raise if it has another shape."""
    array = np.ascontiguousarray(as_floats(values, name))
    if array.ndim != 1 or (steps is not None and array.size != steps):
        expected = "(S,)" if steps is None else f"({steps},), one entry per step"
        raise ValueError(f"{name} has shape {array.shape}; expected {expected}")
    return array


def check_finite(
    values: FloatArray, name: str, offsets: IntArray, first: int = 0
) -> tuple[float, float]:
    """Return the smallest and the largest value; raise if one is NaN or infinite.

    `first` is the number of the first episode.
    """
    ends = ends_of(values) if values.size else (0.0, 0.0)
    if not np.all(np.isfinite(ends)):
        row = int(np.argmin(np.isfinite(values)))
        episode, step = place(row, offsets)
        raise ValueError(
            f"{name} is {values[row]} at episode {first + episode}, step {step}: "
            "drop or repair that episode before evaluating"
        )
    return ends


def check_log_probs(
    values: FloatArray, name: str, offsets: IntArray, density: bool, first: int = 0
) -> None:
    """Raise if a value is NaN, +inf, or above 0 without being a density; -inf is allowed."""
    limit = float(np.finfo(np.float64).max) if density else LOG_PROB_TOLERANCE
    row = first_outside(values, -np.inf, limit)
    if row >= 0:
        episode, step = place(row, offsets)
        raise bad_log_prob(name, float(values[row]), first + episode, step)


def first_outside(values: FloatArray, low: float, high: float) -> int:
    """Return the index of the first value that is NaN or outside [low, high]; -1 if none is.

    >>> first_outside(np.array([0.5, 2.0, np.nan]), 0.0, 1.0)
    1
    """
    if not values.size:
        return -1
    least, most = ends_of(values)
    if least >= low and most <= high:
        return -1
    return int(np.argmin((values >= low) & (values <= high)))


def ends_of(values: FloatArray) -> tuple[float, float]:
    """Return the smallest and the largest value; NaN if there is one."""
    return float(values.min()), float(values.max())


def offsets_of(lengths: ArrayLike) -> IntArray:
    """Return offsets (n + 1,) of episodes that follow each other: 0 and the sums of lengths.

    >>> offsets_of([2, 1]).tolist()
    [0, 2, 3]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    sizes.cumsum(out=offsets[1:])
    return offsets


def longest_of(offsets: IntArray) -> int:
    """Return the steps of the longest episode.

    >>> longest_of(np.array([0, 2, 3]))
    2
    """
    if offsets[-1] == len(offsets) - 1:
        return 1  # each has at least one step, so none has more
    return int(np.diff(offsets).max())


def step_numbers(offsets: IntArray) -> IntArray:
    """Number the steps (S,) within their episodes, from 0.

    >>> step_numbers(np.array([0, 2, 3])).tolist()
    [0, 1, 0]
    """
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def episode_ids(offsets: IntArray) -> IntArray:
    """Name the episode of each step (S,).

    >>> episode_ids(np.array([0, 2, 3])).tolist()
    [0, 0, 1]
    """
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def one_step_earlier(values: FloatArray, offsets: IntArray, start: float) -> FloatArray:
    """Return the values (S,) of the step before, `start` where an episode begins.

    >>> one_step_earlier(np.array([5.0, 6.0, 7.0]), np.array([0, 2, 3]), 0.0)
    array([0., 5., 0.])
    """
    earlier = np.append(start, values[:-1])
    earlier[offsets[:-1]] = start
    return earlier


def evenly(size: int, limit: int) -> IntArray:
    """Return the indices of at most `limit` of `size` items, spread from the first to the last.

    >>> evenly(9, 3).tolist()
    [0, 4, 8]
    """
    if size <= limit:
        return np.arange(size)
    return np.linspace(0, size - 1, limit).round().astype(np.int64)


def annuity(gamma: float, horizon: int) -> FloatArray:
    """Sum gamma^t over t < m, for m = 0, ..., horizon: the return of m rewards of 1.

    >>> annuity(0.5, 3).tolist()
    [0.0, 1.0, 1.5, 1.75]
    """
    return np.append(0.0, np.cumsum(gamma ** np.arange(horizon)))


def annuity_of(gamma: float, horizon: int) -> float:
    """Sum gamma^t over t < horizon, however long.

    >>> annuity_of(0.5, 3), annuity_of(1.0, 10**9)
    (1.75, 1000000000.0)
    """
    return float(horizon) if gamma == 1.0 else (1.0 - gamma**horizon) / (1.0 - gamma)


def place(row: int, offsets: IntArray) -> tuple[int, int]:
    """Return episode and step of a row."""
    episode = int(np.searchsorted(offsets, row, side="right")) - 1
    return episode, row - int(offsets[episode])


def folds_within(groups: IntArray, folds: int) -> IntArray:
    """Return the fold (n,) of each episode: 0, 1, ..., 0, 1, ... inside a group, then the next.

    >>> folds_within(np.array([0, 1, 0, 0, 1]), 2).tolist()
    [0, 1, 1, 0, 0]
    """
    result = np.empty(groups.size, dtype=np.int64)
    result[np.argsort(groups, kind="stable")] = np.arange(groups.size) % folds
    return result


def bad_log_prob(name: str, value: float, episode: int, step: int, whose: str = "") -> ValueError:
    """Return the error for a value that cannot be a log-probability."""
    if value > 0:
        remedy = "the log of a probability is at most 0; densities of continuous actions need "
        remedy += "density=True, or a continuous action_space"
    elif value == -np.inf:
        remedy = "the action was executed, so its probability was not 0; check the recorded policy"
    else:
        remedy = "check the policy that produced it"
    return ValueError(f"{name} is {value!r}{whose} at episode {episode}, step {step}: {remedy}")


def in_threads(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return call(item) of all items, in their order, made on all cores at once.

    It pays for calls that release the GIL and take a tenth of a millisecond or more. If some fail,
    the error of the first one is raised, and those that have not begun are left out.
    """
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(cores(), len(items))) as threads:
        calls = [threads.submit(call, item) for item in items]
        try:
            return [future.result() for future in calls]
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Raise malloc's mmap threshold so that freed arrays are reused.

    Large arrays go back to the system otherwise, and the next task gets them page by page, which
    took up to a quarter of its time. After an array of nearly 32 MiB was freed, glibc takes smaller
    ones from its heap and keeps up to 64 MiB at its end. The array is never touched, and so takes
    no memory.
    """
    np.empty(2**25 - 2**16, dtype=np.uint8)


def blocks(n: int) -> Iterator[slice]:
    """Cut n rows into blocks that stay in the cache: fresh arrays cost more than arithmetic."""
    yield from (slice(begin, min(begin + _ROWS, n)) for begin in range(0, n, _ROWS))


def cuts_of(offsets: IntArray, steps: int) -> list[tuple[int, int]]:
    """Cut episodes into ranges begin..end-1 of about so many steps, from the first to the last.

    >>> cuts_of(np.array([0, 2, 3, 9, 10]), 3)
    [(0, 2), (2, 3), (3, 4)]
    """
    places = np.searchsorted(offsets, np.arange(0, offsets[-1], steps))
    cuts = np.unique(np.append(places, offsets.size - 1)).tolist()
    return list(pairwise(cuts))


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


_held = threading.Lock()  # by whoever set the number of threads


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread: for matrices as small as ours more are slower, up to ten times.

    The number is one for the whole process. Of blocks that overlap in several threads the first
    sets and restores it, and the others leave it alone: they may see it restored early, which is
    slower and no worse.
    """
    from threadpoolctl import threadpool_limits

    if not _held.acquire(blocking=False):
        yield
        return
    try:
        with threadpool_limits(1, user_api="blas"):  # of the libraries that are loaded by now
            yield
    finally:
        _held.release()
