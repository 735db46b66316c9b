"""The open episode of a single environment, and the finished ones that wait behind it."""

from __future__ import annotations

import copy
from bisect import bisect_left
from typing import Any, TypeAlias

import numpy as np
from numpy import ndarray

from ope_gym.batches import Tree
from ope_gym.data import spaces
from wrappers.recording.finished import Finished
from wrappers.recording.session import Session, Settings

SCALARS = frozenset([int, float, bool, str, np.int64, np.int32, np.float64, np.float32, np.bool_])

# Finished episodes go to the buffer together after so many steps, or bytes of observations.
_WAITING_STEPS, _WAITING_BYTES = 4096, 2**24

# Observations, actions, rewards and (row, given log-probability) of the episodes that wait and,
# after them, of the open one, which has one more observation; then the dtype of observations and
# their shape, None if they have one axis. A plain tuple, because every step unpacks it.
_Rows: TypeAlias = tuple[
    list[Any],
    list[Any],
    list[float],
    list[tuple[int, float]],
    "np.dtype[Any] | None",
    "tuple[int, ...] | None",
]


class SingleSession(Session):
    """Keeps the rows of a single env; `RecordTrajectories.step` appends to them itself.

    An observation that is an array like the very first one is kept as bytes, which takes half the
    time of copying an array. The step compares the shape only of observations with several axes;
    a vector of another length shows later, in its number of bytes.
    """

    _all_alike = True  # whether all observations are kept as bytes
    _enough = _WAITING_STEPS

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rows: _Rows = ([], [], [], [], None, None)
        self.held_out = False  # whether the current episode (after its end, the last) is
        self._first = 0  # row at which the open episode begins
        self._start = 0  # clock at which it begins
        self._number = 0  # of the open episode, in the order of start
        self._shape: tuple[int, ...] = ()  # of the very first observation
        self._n_bytes = 0

    @property
    def clock(self) -> int:
        """Number of steps so far."""
        return self._start + self._open_steps

    @property
    def mid_episode(self) -> bool:
        """Whether the open episode has a step."""
        return self._open_steps > 0

    @property
    def _open_steps(self) -> int:
        return len(self.rows[2]) - self._first

    def begin(self, observation: Any) -> None:
        """Begin an episode with its first observation."""
        observations, _, _, _, dtype, _ = self.rows
        is_array = observation.__class__ is ndarray
        if is_array and dtype is None and observation.dtype != object:
            dtype, self._shape = observation.dtype, observation.shape
            self._n_bytes = observation.nbytes
            self._enough = min(_WAITING_STEPS, _WAITING_BYTES // max(1, self._n_bytes))
            shape = None if observation.ndim == 1 else self._shape
            self.rows = (*self.rows[:4], dtype, shape)
        alike = is_array and observation.dtype is dtype and observation.shape == self._shape
        observations.append(observation.tobytes() if alike else self.keep_unlike(observation))
        self.held_out = self.settings.held_out > 0 and bool(self.is_held_out(self._number))

    def keep_unlike(self, observation: Any) -> Any:
        """Return a copy of an observation that is not an array like the first one."""
        self._all_alike = False
        return keep(observation)

    def skip_step(self) -> None:
        """Count a step that is not recorded."""
        self._start += 1

    def finish(self, terminated: bool, truncated: bool) -> None:
        """End the open episode; hand it over at once where an error or a crash cannot wait."""
        n = self._open_steps
        labels = (n, terminated, truncated, self.held_out, self._start, self._number)
        # no call in between: an interrupt cannot leave half of it
        self._waiting += ((self._first, labels),)
        self._first += n
        self._start += n
        self._number += 1
        if self._file is not None or self._first >= self._enough or not self._agrees():
            self.hand_over()

    def _agrees(self) -> bool:
        """Return whether the given log-probabilities of the last episode are the policy's own."""
        given = self.rows[3]
        if not self.settings.audit or not given or given[-1][0] < self._waiting[-1][0]:
            return True
        finished = self._columns(self._waiting[-1:])
        return self._found_log_probs(finished) is not None

    def drop(self, *, warn: bool) -> None:
        """Forget the open episode."""
        n, first, given = self._open_steps, self._first, self.rows[3]
        self._start += n
        self._number += n > 0  # an episode without a step has not begun
        for column in self.rows[:3]:
            del column[first:]
        while given and given[-1][0] >= first:
            given.pop()
        if n:
            self.count_dropped(1, n, warn=warn)

    # Episodes that wait: first row and (length, terminated, truncated, held out, clock at the
    # start, number) of each.

    def _batch(self) -> list[Any]:
        return self._waiting

    def _last(self) -> list[Any]:
        return self._waiting[-1:]

    def _part(self, batch: list[Any], first: int, last: int) -> list[Any]:
        return batch[first:last]

    def _size(self, batch: list[Any]) -> tuple[int, int]:
        return len(batch), sum(labels[0] for _, labels in batch)

    def _columns(self, batch: list[Any]) -> Finished:
        table = np.array([labels for _, labels in batch], dtype=np.int64)
        rows = slice(batch[0][0], batch[0][0] + int(table[:, 0].sum()))
        _, actions, rewards, pairs, _, _ = self.rows
        n = rows.stop - rows.start
        log_probs, given = np.zeros(n), np.zeros(n, dtype=bool)
        if some := pairs[bisect_left(pairs, (rows.start,)) : bisect_left(pairs, (rows.stop,))]:
            places, values = zip(*some, strict=True)
            at = np.array(places) - rows.start
            log_probs[at], given[at] = values, True
        return Finished(
            self._stacked_observations(rows),
            spaces.stack(self.buffer.action_space, actions[rows]),
            np.array(rewards[rows]),
            (log_probs, given) if pairs else None,
            lengths=table[:, 0],
            terminated=table[:, 1].astype(bool),
            truncated=table[:, 2].astype(bool),
            held_out=table[:, 3].astype(bool),
            start_clock=table[:, 4].copy(),
            numbers=table[:, 5],
        )

    def _stacked_observations(self, rows: slice) -> Tree:
        observations, _, _, _, dtype, shape = self.rows
        kept = observations[rows]
        if self._all_alike and set(map(len, kept)) == {self._n_bytes}:
            return np.frombuffer(bytearray().join(kept), dtype).reshape(len(kept), *self._shape)
        shape = shape or (-1,)
        kept = [np.frombuffer(x, dtype).reshape(shape) if type(x) is bytes else x for x in kept]
        return spaces.stack(self.buffer.observation_space, kept)

    def _forget_waiting(self) -> None:
        n = self._first
        observations, actions, rewards, given, dtype, shape = self.rows
        given = [(row - n, value) for row, value in given if row >= n]
        left: _Rows = (observations[n:], actions[n:], rewards[n:], given, dtype, shape)
        self._all_alike = self._all_alike or not left[0]
        # no call in between: an interrupt cannot leave half of it
        self._waiting, self.rows, self._first = [], left, 0


def keep(value: Any) -> Any:
    """Return a copy that neither the environment nor the loop can change."""
    kind = value.__class__
    if kind in SCALARS:
        return value
    if kind is ndarray:
        return value.copy()
    if kind is tuple:
        return tuple(map(keep, value))
    if kind is dict:
        return {key: keep(part) for key, part in value.items()}
    return copy.deepcopy(value)
