"""The episodes of all sub-envs of a vector env, cut out of their rows in bulk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym.data import blocks
from ope_gym.data.spaces import Space
from wrappers.recording.finished import Finished
from wrappers.recording.rows import Rows
from wrappers.recording.session import Recorder

# Finished episodes go to the buffer together after so many rows, or vector steps.
_WAITING_ROWS, _WAITING_STEPS = 24_576, 256
_NONE = np.empty(0, dtype=np.int64)


class VectorRecorder(Recorder):
    """Which episode each sub-env is in, and the rows of all."""

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        horizon: int | None,
        num_envs: int,
        *,
        held_out: float,
        path: blocks.PathLike | None,
        audit: bool,
    ) -> None:
        super().__init__(
            observation_space, action_space, horizon, held_out=held_out, path=path, audit=audit
        )
        self.rows = Rows(observation_space, action_space, num_envs)
        self.quota: NDArray[np.int64] | None = None  # (N,) episodes that may still begin
        self.finished_episodes = 0
        self.held_out = np.zeros(num_envs, dtype=bool)
        self._open = np.zeros(num_envs, dtype=bool)  # a recorded episode is under way, or about to
        self._start = np.zeros(num_envs, dtype=np.int64)
        self._number = np.zeros(num_envs, dtype=np.int64)
        self._numbered = 0
        self._patience = min(max(_WAITING_ROWS // num_envs, 1), _WAITING_STEPS)
        self._due = self._patience
        self._fresh = _NONE  # sub-envs about to take the first step of a recorded episode

    def under_way(self) -> NDArray[np.bool_]:
        """(N,) whether a recorded episode has begun and not ended."""
        return self._open & (self._start < self.rows.clock)

    def longest_open(self) -> int:
        """Steps so far of the longest episode that is under way."""
        return int((self.rows.clock - self._start)[self._open].max(initial=0))

    def begin(self, envs: NDArray[np.int64]) -> None:
        """Episodes of these sub-envs begin with the next step, as far as the quota goes.

        They have numbers now, but these are not taken before the step: a reset that is followed by
        another one begins no episode.
        """
        if self.quota is not None:
            self.held_out[envs] = False
            envs = envs[self.quota[envs] > 0]
        self._open[envs] = True
        self._start[envs] = self.rows.clock
        fresh = self._fresh = np.union1d(self._fresh, envs) if len(self._fresh) else envs
        self._number[fresh] = np.arange(self._numbered, self._numbered + len(fresh))
        if self.share:
            self.held_out[fresh] = self.is_held_out(self._number[fresh])

    @property
    def steps(self) -> int:
        """Of all sub-envs so far, recorded or not."""
        return self.rows.clock * len(self._open)

    def act(self, actions: Any, log_prob: ArrayLike | None) -> None:
        """What is about to be done."""
        if self.rows.full:
            self.drain()
            (under_way,) = self.under_way().nonzero()
            self.rows.make_room(under_way, self._start[under_way])
        self.rows.act(actions, log_prob)

    def advance(
        self,
        observations: Any,
        rewards: NDArray[Any],
        terminations: NDArray[Any],
        truncations: NDArray[Any],
        done: NDArray[np.bool_],
    ) -> None:
        """What came of it."""
        if len(self._fresh):
            self._numbered += len(self._fresh)
            if self.quota is not None:
                self.quota[self._fresh] -= 1
            self._fresh = _NONE
        self.rows.advance(rewards)
        self.rows.see(observations)
        (envs,) = (done & self._open).nonzero()
        if not len(envs):
            return
        labels = (self._start[envs], terminations[envs], truncations[envs], self._number[envs])
        self._waiting.append((envs, self.rows.clock, self.held_out[envs], *labels))
        self._open[envs] = False
        self.finished_episodes += len(envs)

    def drain_if_due(self) -> None:
        """With a file at once: a crash cannot wait."""
        if self._waiting and (self.path is not None or self.rows.clock >= self._due):
            self._due = self.rows.clock + self._patience
            self.drain()

    def drop(self, mask: NDArray[np.bool_] | None = None, *, warn: bool) -> None:
        """Forget the open episodes, of all sub-envs or of some."""
        gone = self._open.copy() if mask is None else self._open & mask
        lengths = (self.rows.clock - self._start)[gone]
        self._open[gone] = False
        self._fresh = self._fresh[~gone[self._fresh]]
        if lengths.any():
            self.count_dropped(int((lengths > 0).sum()), int(lengths.sum()), warn=warn)

    # Of waiting episodes: sub-env, clock at the start, length, terminated, truncated, held out,
    # number. An episode is a column.

    def _batch(self) -> NDArray[np.int64]:
        envs, ends, held_out, start, *ended, number = zip(*self._waiting, strict=True)
        table = np.array(
            [np.concatenate(x) for x in (envs, start, start, *ended, held_out, number)]
        )
        table[2] = np.repeat(ends, [len(x) for x in envs]) - table[1]
        return table

    def _part(self, batch: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
        return batch[:, first:last]

    def _size(self, batch: NDArray[np.int64]) -> tuple[int, int]:
        return batch.shape[1], int(batch[2].sum())

    def _columns(self, batch: NDArray[np.int64]) -> Finished:
        envs, start, length, terminated, truncated, held_out, number = batch
        return Finished(
            *self.rows.read(envs, start, length),
            length,
            terminated.astype(bool),
            truncated.astype(bool),
            held_out.astype(bool),
            start,
            number,
            envs,
        )
