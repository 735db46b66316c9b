"""Keep the latest steps of a training loop, and cut windows out of them.

A loop steps N environments side by side. `Stream` keeps the latest of these steps, open episodes
included. `Stream.window` returns the episodes that began within a span of time. At step t of an
episode all those are *at risk* that began more than t steps before the end of the span, whether
they have ended since or not; whoever began later has not had the time to get there. So

    V = sum_t  1/n_t  sum_i r_i,t        n_t episodes at risk at step t

has no bias towards short episodes, although long ones are still open (administrative censoring, in
the words of survival analysis), and it uses the newest steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray

GROUPS = 8  # of episodes, to leave out one at a time
_CHUNK = 256  # vector steps that are kept together, if a loop adds fewer at a time


@dataclass(frozen=True, eq=False)
class Window:
    """The episodes that began within a span of time; S steps, E episodes, L the longest so far.

    Steps stand environment by environment, and in the order of time.

    Args:
        observations: (S, ...).
        following: (S, ...) the observations after each step, before any reset.
        actions: (S, ...).
        rewards: (S,).
        terminated: (S,) whether the episode ended by itself.
        ended: (S,) whether it terminated or was truncated.
        step: (S,) number of the step in its episode, from 0 on.
        first: (S,) whether it is the first step.
        group: (S,) of its episode, one of `GROUPS` or fewer.
        began: (E,) clock of the first step of each episode.
        groups: (E,) group of each episode.
        stop: clock at the end of the span.
    """

    observations: NDArray[Any]
    following: NDArray[Any]
    actions: NDArray[Any]
    rewards: FloatArray
    terminated: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    step: IntArray
    first: NDArray[np.bool_]
    group: IntArray
    began: IntArray
    groups: IntArray
    stop: int

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return int(self.groups.max(initial=-1)) + 1

    def part(self, start: int, stop: int) -> tuple[Window, NDArray[np.bool_]]:
        """Return the episodes that began from `start` on, up to `stop`, and which rows they are."""
        if start <= int(self.began.min(initial=start)) and stop >= self.stop:
            return self, np.ones(self.step.size, dtype=bool)
        clock = np.repeat(self.began, np.diff(np.append(np.flatnonzero(self.first), self.step.size)))
        rows = (clock >= start) & (clock + self.step < stop)
        episodes = (self.began >= start) & (self.began < stop)
        columns = {
            name: getattr(self, name)[rows]
            for name in (
                "observations",
                "following",
                "actions",
                "rewards",
                "terminated",
                "ended",
                "step",
                "first",
                "group",
            )
        }
        return Window(
            **columns, began=self.began[episodes], groups=self.groups[episodes], stop=stop
        ), rows

    def at_risk(self) -> FloatArray:
        """Return (groups, L) how many episodes of each group are at risk at each step."""
        longest = int(self.step.max(initial=-1)) + 1
        time = np.minimum(self.stop - self.began, longest)  # steps each had time for, at least 1
        found = np.zeros((self.n_groups, longest + 1))
        np.add.at(found, (self.groups, time), 1.0)
        return np.asarray(found[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:])

    def sums(self, values: FloatArray) -> FloatArray:
        """Return (groups, L) the sum of values (S,) of each group at each step."""
        longest = int(self.step.max(initial=-1)) + 1
        place = self.group * longest + self.step
        found = np.bincount(place, values, minlength=self.n_groups * longest)
        return found.reshape(self.n_groups, longest)


class Stream:
    """The latest steps of N environments.

    Args:
        num_envs: N.
        keep: vector steps to keep; older ones are forgotten.
    """

    def __init__(self, num_envs: int, keep: int) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs} must be at least 1")
        self.num_envs, self.keep = num_envs, keep
        self.clock = 0  # vector steps so far
        self.first_clock = 0  # of the oldest step that is kept
        self._chunks: list[dict[str, NDArray[Any]]] = []
        self._began = np.full(num_envs, -1)  # clock of the open episode's first step
        self._fresh = np.ones(num_envs, dtype=bool)  # the next step is a first one

    def lose_track(self) -> None:
        """Forget the open episodes: the next steps are of unknown ones, until they end."""
        self._fresh[:] = False
        self._began[:] = -1

    def restart(self) -> None:
        """Forget the open episodes: all environments were reset."""
        self._fresh[:] = True

    def add(
        self,
        observations: NDArray[Any],
        actions: NDArray[Any],
        rewards: NDArray[Any],
        terminated: NDArray[Any],
        truncated: NDArray[Any],
        following: NDArray[Any],
        skip: NDArray[Any] | None = None,
    ) -> None:
        """Append T vector steps, all arrays (T, N, ...).

        Args:
            observations: what the policy saw.
            actions: what it did.
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
        columns = {
            "observations": np.array(observations),
            "following": np.array(following),
            "actions": np.array(actions),
            "rewards": rewards,
            "terminated": np.asarray(terminated, dtype=bool),
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

    def longest(self, span: int) -> int:
        """Return the number of steps of the longest episode seen within the latest `span` steps."""
        best, clock = 0, self.clock
        for chunk in reversed(self._chunks):
            clock -= len(chunk["rewards"])
            now = clock + np.arange(len(chunk["rewards"]))[:, None]
            known = (chunk["began"] >= 0) & ~chunk["skip"]
            best = max(best, int(np.where(known, now - chunk["began"] + 1, 0).max()))
            if clock <= self.clock - span:
                break
        return best

    def window(self, start: int, stop: int) -> Window:
        """Return the episodes that began at clock `start` or later, up to clock `stop`."""
        parts, clock = [], self.first_clock
        for chunk in self._chunks:
            size = len(chunk["rewards"])
            low, high = max(start - clock, 0), min(stop - clock, size)
            if low < high:
                cut = {name: column[low:high] for name, column in chunk.items()}
                cut["clock"] = np.broadcast_to(
                    clock + np.arange(low, high)[:, None], cut["rewards"].shape
                )
                parts.append(cut)
            clock += size
        if not parts:
            raise ValueError(f"there are no steps between clocks {start} and {stop}")
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        env, place = np.nonzero(((joined["began"] >= start) & ~joined["skip"]).T)
        rows = {name: column[place, env] for name, column in joined.items()}
        began = rows["began"]
        first = np.ones(len(env), dtype=bool)
        first[1:] = (env[1:] != env[:-1]) | (began[1:] != began[:-1])
        groups = self._groups(env[first])
        return Window(
            observations=rows["observations"],
            following=rows["following"],
            actions=rows["actions"],
            rewards=rows["rewards"],
            terminated=rows["terminated"],
            ended=rows["ended"],
            step=rows["clock"] - began,
            first=first,
            group=groups[np.cumsum(first) - 1],
            began=began[first],
            groups=groups,
            stop=stop,
        )

    def _groups(self, env: IntArray) -> IntArray:
        """Return a group for each episode: environments, or runs of episodes if these are few."""
        if self.num_envs >= GROUPS // 2:
            return np.asarray(env % GROUPS if self.num_envs > GROUPS else env)
        return np.asarray(np.arange(env.size) * min(GROUPS, env.size) // max(env.size, 1))

    def starts(self) -> NDArray[Any]:
        """Return the first observations of all episodes that began in the steps kept."""
        found, clock = [], self.first_clock
        for chunk in self._chunks:
            now = clock + np.arange(len(chunk["rewards"]))[:, None]
            found.append(chunk["observations"][(chunk["began"] == now) & ~chunk["skip"]])
            clock += len(now)
        return np.concatenate(found)

    def latest(self, rows: int) -> dict[str, NDArray[Any]]:
        """Return about the latest `rows` steps as columns (S, ...), whichever episode they are."""
        found, count = [], 0
        for chunk in reversed(self._chunks):
            found.append({name: column[~chunk["skip"]] for name, column in chunk.items()})
            count += len(found[-1]["rewards"])
            if count >= rows:
                break
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]}
