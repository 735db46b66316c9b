"""Keep the latest steps of a training loop, and cut windows out of them.

A loop steps N environments side by side. `Stream` keeps the latest of these steps, open episodes
included, and `Stream.window` cuts out what happened between two clocks. A window ends in the middle
of episodes, mostly of long ones, and begins in the middle of others, so the mean return of those
that began and ended in it is far too low. A life table has no such bias. With n_t steps of age t in
the window (step t of whichever episode), of which d_t were the last of their episode,

    S_t = prod_{u < t} (1 - d_u / n_u)        the chance that an episode lasts to step t
    V = sum_t S_t r_t                         r_t the mean reward at age t

It is the life expectancy of a period, as statistical offices publish it: nobody has to be followed
from birth to death, so it is up to date, and a window may be shorter than an episode.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray

GROUPS = 8  # of steps, to leave out one at a time
MOST_NUMBERS = 64  # observations with more, such as images, are not kept
_STARTS = 1024  # latest first observations that are kept
_FULL = 40  # steps in each interval of ages, on average
_BLOCK = 4096  # rows whose features are computed together, where these are not kept
_CHUNK = 256  # vector steps that are kept together, if a loop adds fewer at a time


@dataclass(frozen=True, eq=False)
class Window:
    """The S steps between two clocks, environment by environment, in order of time.

    Args:
        observations: (S, ...).
        following: (S, ...) the observations after each step, before any reset.
        actions: (S, ...).
        rewards: (S,).
        ended: (S,) whether the episode ended with this step, by itself or not.
        step: (S,) number of the step in its episode, from 0 on: its age.
        place: (S,) number of the step among those of its episode in the window.
        clock: (S,) when it was taken.
        group: (S,) one of `GROUPS` or fewer.
    """

    observations: NDArray[Any]
    following: NDArray[Any]
    actions: NDArray[Any]
    rewards: FloatArray
    ended: NDArray[np.bool_]
    step: IntArray
    place: IntArray
    clock: IntArray
    group: IntArray

    @property
    def size(self) -> int:
        """Number of steps."""
        return self.step.size

    @cached_property
    def rows_by_place(self) -> list[IntArray]:
        """The steps of each place within an episode's part of the window, from 0 on."""
        return rows_by_place(self.place)

    def life_table(
        self,
        values: FloatArray,
        rows: NDArray[np.bool_] | None = None,
        known: dict[int, FloatArray] | None = None,
    ) -> FloatArray:
        """Return sum_t S_t mean_t of values (m, S): (m,), then without each group, (1 + groups, m).

        Ages are taken together in intervals. One that none of the rows is at takes its rates from
        the whole window. What nobody was at there either adds nothing, and takes the chance to end
        from the interval before.

        Args:
            values: of each step.
            rows: the steps to use; None for all.
            known: what earlier calls with these values have found of the whole window.
        """
        ages, groups = int(self.step.max()) + 1, int(self.group.max()) + 1
        size = self.size if rows is None else int(np.count_nonzero(rows))
        width = -(-ages // min(ages, max(1, size // _FULL)))
        spans = -(-ages // width)
        cell = self.group * spans + self.step // width
        going = self.ended & (self.step < ages - 1)  # after the last age nothing comes

        def sums(some: Any) -> FloatArray:
            weights = (np.ones(self.size), going, *values)
            tallied = [np.bincount(cell[some], w[some], minlength=groups * spans) for w in weights]
            return np.asarray(np.stack(tallied).reshape(-1, groups, spans), dtype=np.float64)

        table = sums(slice(None) if rows is None else rows)
        table = table[:, table[0].sum(axis=1) > 0]  # groups without a step
        whole = table.sum(axis=1, keepdims=True)
        known = {} if known is None else known
        if width not in known:
            known[width] = whole if rows is None else sums(slice(None)).sum(axis=1, keepdims=True)
        left = whole - table if table.shape[1] > 1 else whole[:, :0]  # nothing is left of one
        table = np.concatenate([whole, left], axis=1)  # (2 + m, 1 + groups, spans)
        table = np.where(table[0] > 0.5, table, known[width])
        rates = table[1:] / np.maximum(table[0], 1.0)
        seen = np.where(table[0] > 0.5, np.arange(spans), 0)
        seen = np.maximum.accumulate(seen, axis=1)
        rates[0] = np.take_along_axis(rates[0], seen, axis=1)
        rates = np.repeat(rates, width, axis=2)[:, :, :ages]
        lasts = np.cumprod(1.0 - rates[0], axis=1)
        lasts = np.concatenate([np.ones((len(lasts), 1)), lasts[:, :-1]], axis=1)
        return np.asarray(np.einsum("gt,mgt->gm", lasts, rates[1:]))


def rows_by_place(place: IntArray) -> list[IntArray]:
    """Return the rows of each place from 0 on, all of them in order."""
    small = place.astype(np.uint16) if place.max(initial=0) < 2**16 else place  # sorts faster
    order = np.argsort(small, kind="stable")
    return np.split(order, np.cumsum(np.bincount(place))[:-1])


def blocks(size: int) -> list[slice]:
    """Cut rows into blocks whose features stay in the cache: fresh memory for all is slow."""
    return [slice(at, at + _BLOCK) for at in range(0, size, _BLOCK)]


def runs(group: IntArray) -> list[tuple[int, slice]]:
    """Return each stretch of rows of one group, with its group."""
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), group.size]
    return [(int(group[a]), slice(a, b)) for a, b in itertools.pairwise(cuts) if a < b]


class Stream:
    """The latest steps of N environments.

    Args:
        num_envs: N.
        keep: vector steps to keep; older ones are forgotten.
    """

    def __init__(self, num_envs: int, keep: int) -> None:
        self.num_envs, self.keep = num_envs, keep
        self.clock = 0  # vector steps so far
        self.first_clock = 0  # of the oldest step that is kept
        self.ends = 0  # episodes that have ended
        self.longest = 0  # steps of the longest one so far, ended or not
        self._chunks: list[dict[str, NDArray[Any]]] = []
        self._began = np.full(num_envs, -1)  # clock of the open episode's first step
        self._fresh = np.ones(num_envs, dtype=bool)  # the next step is a first one
        self._firsts: list[NDArray[Any]] = []  # first observations, the latest last

    def lose_track(self) -> None:
        """Forget the open episodes: the next steps are of unknown ones, until they end."""
        self._fresh[:] = False
        self._began[:] = -1

    def restart(self) -> None:
        """Forget the open episodes: all environments were reset."""
        self._fresh[:] = True

    def add(
        self,
        observations: NDArray[Any] | None,
        actions: NDArray[Any] | None,
        rewards: NDArray[Any],
        terminated: NDArray[Any],
        truncated: NDArray[Any],
        following: NDArray[Any] | None = None,
        skip: NDArray[Any] | None = None,
    ) -> None:
        """Append T vector steps, all arrays (T, N, ...).

        Args:
            observations: what the policy saw; more than `MOST_NUMBERS` each are not kept, and None
                stands for what are no numbers, or do not hold the state.
            actions: what it did; None without observations.
            rewards: what the environments paid.
            terminated: whether the episode ended by itself.
            truncated: whether it was cut off.
            following: the observations after the steps, before any reset.
            skip: rows that are no steps, such as the resets of Gymnasium's NEXT_STEP mode.
        """
        rewards = np.asarray(rewards, dtype=np.float64)
        if rewards.ndim != 2 or rewards.shape[1] != self.num_envs:
            raise ValueError(f"rewards have shape {rewards.shape}: need (steps, {self.num_envs})")
        skip = np.zeros(rewards.shape, dtype=bool) if skip is None else np.asarray(skip, dtype=bool)
        if np.isnan(rewards[~skip]).any():
            step, env = np.argwhere(np.isnan(rewards) & ~skip)[0]
            raise ValueError(f"rewards[{step}, {env}] is nan: look for nan in the environment")
        columns = {
            "observations": _kept(observations, rewards),
            "following": _kept(following, rewards),
            "actions": np.zeros(rewards.shape) if actions is None else np.array(actions),
            "rewards": rewards,
            "ended": np.logical_or(terminated, truncated),
            "skip": skip,
        }
        for name, column in columns.items():
            if column.shape[:2] != rewards.shape:
                raise ValueError(
                    f"{name} have shape {column.shape}: the first two axes must be those of the "
                    f"rewards, {rewards.shape}"
                )
        if not len(rewards):
            return
        columns["began"] = self._starts(columns["ended"] & ~skip, skip)
        now = self.clock + np.arange(len(rewards))[:, None]
        columns["clock"] = np.broadcast_to(now, rewards.shape)
        self.ends += int(np.count_nonzero(columns["ended"] & ~skip))
        ages = np.where(columns["began"] >= 0, now - columns["began"] + 1, 0)
        self.longest = max(self.longest, int(ages.max()))
        first = columns["observations"][(columns["began"] == now) & ~skip]
        self._firsts = [np.concatenate([*self._firsts, first])[-_STARTS:]]
        if self._chunks and len(self._chunks[-1]["rewards"]) < _CHUNK:
            short = self._chunks.pop()
            columns = {name: np.concatenate([short[name], columns[name]]) for name in columns}
        self._chunks.append(columns)
        self.clock += len(rewards)
        while self.first_clock + len(self._chunks[0]["rewards"]) <= self.clock - self.keep:
            self.first_clock += len(self._chunks[0]["rewards"])
            del self._chunks[0]

    def _starts(self, ended: NDArray[np.bool_], skip: NDArray[np.bool_]) -> IntArray:
        """Return (T, N) the clock at which the episode of each step began; -1 if unknown."""
        over = ended | skip  # what follows is a first step, unless it is skipped itself
        before = np.vstack([self._fresh, over[:-1]])
        now = self.clock + np.arange(len(ended))[:, None]
        began = np.where(before & ~skip, now, -1)
        began[0] = np.where(before[0] & ~skip[0], now[0], self._began)
        began = np.maximum.accumulate(began, axis=0)
        self._began, self._fresh = began[-1].copy(), over[-1].copy()
        return began

    def window(self, start: int, stop: int) -> Window:
        """Return what happened between two clocks, in episodes whose beginning is known."""
        parts = []
        for chunk in self._chunks:
            oldest = int(chunk["clock"][0, 0])
            low, high = max(start - oldest, 0), min(stop - oldest, len(chunk["skip"]))
            if low < high:
                parts.append({name: column[low:high] for name, column in chunk.items()})
        if not parts:
            raise ValueError(f"there are no steps between clocks {start} and {stop}")
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(np.arange(self.num_envs) % GROUPS, kind="stable")
        env, row = np.nonzero(((joined["began"] >= 0) & ~joined["skip"]).T[order])
        env = order[env]  # those of a group are neighbours
        rows = {name: column[row, env] for name, column in joined.items() if name != "skip"}
        began, clock = rows.pop("began"), rows["clock"]
        first = np.ones(env.size, dtype=bool)
        first[1:] = (env[1:] != env[:-1]) | (began[1:] != began[:-1])
        segment = np.cumsum(first) - 1
        place = np.arange(env.size) - np.flatnonzero(first)[segment] if env.size else clock
        group = env % GROUPS
        if self.num_envs < GROUPS // 2:  # by time, if environments are few
            group = (clock - start) * GROUPS // max(stop - start, 1)
        return Window(**rows, step=clock - began, place=place, group=group)

    @property
    def numbers(self) -> int:
        """How many numbers of an observation are kept; 0 if none are, or none was seen."""
        return int(np.prod(self._firsts[0].shape[1:], dtype=int)) if self._firsts else 0

    def starts(self) -> NDArray[Any]:
        """Return the latest first observations of episodes: how these begin no policy decides."""
        return self._firsts[0]


def _kept(observations: NDArray[Any] | None, rewards: FloatArray) -> NDArray[Any]:
    """Return a copy of observations (T, N, ...), or nothing of each if there are none or many."""
    array = None if observations is None else np.asarray(observations)
    if array is None or np.prod(array.shape[2:], dtype=int) > MOST_NUMBERS:
        return np.empty((*rewards.shape[:2], 0), dtype=np.float32)
    return np.array(array)
