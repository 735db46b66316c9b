"""The rows of a vector env: written a vector step at a time, read an episode at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces
from numpy.typing import ArrayLike, NDArray

from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.spaces import Space

_ROWS, _BYTES = 65_536, 2**24  # room at first: so many rows, but not more bytes of observations


def flatten(space: Space, batch: Any) -> list[NDArray[Any]]:
    """Return the arrays of a vector env's batch, in the order of its space.

    Elements that do not stack become copies in an object array.

    >>> flatten(gym_spaces.Dict(a=gym_spaces.Discrete(2), b=gym_spaces.Text(3)),
    ...         {"a": np.array([0, 1]), "b": ("x", "yz")})
    [array([0, 1]), array(['x', 'yz'], dtype=object)]
    """
    if isinstance(space, gym_spaces.Tuple):
        parts = zip(space.spaces, batch, strict=True)
        return [leaf for part, branch in parts for leaf in flatten(part, branch)]
    if isinstance(space, gym_spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in flatten(part, batch[key])]
    if spaces.is_column(space):
        return [np.asarray(batch)]
    return [spaces.stack(space, copy.deepcopy(list(batch)))]


def unflatten(space: Space, leaves: Iterator[NDArray[Any]]) -> Tree:
    """Return the batch that has these arrays, the inverse of `flatten`."""
    if isinstance(space, gym_spaces.Tuple):
        return tuple(unflatten(part, leaves) for part in space.spaces)
    if isinstance(space, gym_spaces.Dict):
        return {key: unflatten(part, leaves) for key, part in space.spaces.items()}
    return next(leaves)


class _Columns:
    """The arrays of one space, with a row for each sub-env and step.

    Args:
        name: How messages name the batch.
        space: Space of one row.
        num_envs: N.
    """

    def __init__(self, name: str, space: Space, num_envs: int) -> None:
        self.arrays: list[NDArray[Any]] = []  # made when the first batch shows their dtypes
        self._name = name
        self._space = space
        self._plain = spaces.is_column(space)  # whether it is a single array of numbers
        self._shapes = [(num_envs, *leaf.shape[1:]) for leaf in flatten(space, spaces.empty(space))]

    def put(self, batch: Any, first: int, last: int, capacity: int) -> None:
        """Write a batch to the rows first … last - 1, in arrays of `capacity` rows."""
        if self._plain and self.arrays:  # the usual case, without a loop
            array = np.asarray(batch)
            if array.dtype == self.arrays[0].dtype and array.shape == self._shapes[0]:
                self.arrays[0][first:last] = array
                return
        leaves = flatten(self._space, batch)
        for leaf, shape in zip(leaves, self._shapes, strict=True):
            if leaf.shape != shape:
                raise ValueError(
                    f"{self._name} has shape {leaf.shape}, expected {shape}: a row for each "
                    f"sub-env, as in {self._space}"
                )
        if not self.arrays:
            self.arrays = [np.empty((capacity, *x.shape[1:]), dtype=x.dtype) for x in leaves]
        for i, leaf in enumerate(leaves):
            if leaf.dtype != self.arrays[i].dtype:  # widen the column: no digit may be lost
                narrow = self.arrays[i]
                both = np.promote_types(narrow.dtype, leaf.dtype)
                self.arrays[i] = np.empty(narrow.shape, dtype=both)
                self.arrays[i][:first] = narrow[:first]  # the others are not written yet
            self.arrays[i][first:last] = leaf

    def read(self, rows: NDArray[np.int64]) -> Tree:
        """Return the batch of these rows."""
        return unflatten(self._space, iter([array.take(rows, axis=0) for array in self.arrays]))


class Rows:
    """Keeps the rows of N sub-envs from the oldest open episode on.

    The carried rows come first: they belong to episodes that were open when room was last made,
    sub-env by sub-env. Then come N rows for each vector step since clock `_base`. Rows that belong
    to no episode (a step that only resets the sub-env) are written too, and never read.

    Args:
        observation_space: Space of one sub-env.
        action_space: Space of one sub-env.
        num_envs: N.
    """

    def __init__(self, observation_space: Space, action_space: Space, num_envs: int) -> None:
        self.clock = 0
        self._observation_space = observation_space
        self._observations = _Columns("observations", observation_space, num_envs)
        self._actions = _Columns("actions", action_space, num_envs)
        self._num_envs = num_envs
        self._base = 0
        self._carried = 0
        self._carried_at = np.zeros(num_envs, dtype=np.int64)
        self._at = 0  # row of the first sub-env at `clock`
        self._capacity = 0
        self._rewards = np.empty(0)
        self._log_probs = np.empty(0)  # that the loop gave, NaN for none

    @property
    def full(self) -> bool:
        """Whether there is no room for the next step and the observation after it."""
        return self._at + 2 * self._num_envs > self._capacity

    def see(self, observations: Any) -> None:
        """Store the observations that the policy acts on at `clock`."""
        if not self._observations.arrays:
            leaves = flatten(self._observation_space, observations)
            width = sum(leaf.nbytes for leaf in leaves) // self._num_envs + 1
            self._capacity = max(4 * self._num_envs, min(_ROWS, _BYTES // width))
            self._rewards, self._log_probs = np.empty((2, self._capacity))
        last = self._at + self._num_envs
        self._observations.put(observations, self._at, last, self._capacity)

    def act(self, actions: Any, log_prob: ArrayLike | None) -> None:
        """Store the actions at `clock`, and their log-probabilities if the loop gives them."""
        last = self._at + self._num_envs
        given = None if log_prob is None else np.asarray(log_prob, dtype=np.float64)
        if given is not None and given.shape != (self._num_envs,):
            raise ValueError(
                f"log_prob has shape {given.shape}, expected ({self._num_envs},): one number for "
                "each sub-env"
            )
        self._actions.put(actions, self._at, last, self._capacity)
        self._log_probs[self._at : last] = np.nan if given is None else given

    def advance(self, rewards: ArrayLike) -> None:
        """Store the rewards and advance the clock."""
        self._rewards[self._at : self._at + self._num_envs] = rewards
        self._at += self._num_envs
        self.clock += 1

    def read(
        self, envs: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[Tree, Tree, NDArray[np.float64], NDArray[np.float64]]:
        """Return observations, actions, rewards and given log-probabilities of whole episodes."""
        rows = self._index(envs, starts, lengths)
        numbers = self._rewards[rows], self._log_probs[rows]
        return self._observations.read(rows), self._actions.read(rows), *numbers

    def _index(
        self, envs: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the rows of episodes: some carried, one after the other, and then every N-th."""
        begins = np.cumsum(lengths) - lengths
        n, places = self._num_envs, np.arange(lengths.sum())
        first = (starts - self._base) * n + envs + self._carried  # as if no row were carried
        rows: NDArray[np.int64] = np.repeat(first - begins * n, lengths) + places * n
        if self._carried and len(early := np.flatnonzero(rows < self._carried)):
            rows[early] = np.repeat(self._carried_at[envs] - begins, lengths)[early] + early
        return rows

    def make_room(self, envs: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Forget all rows except those of these open episodes."""
        n, at, lengths = self._num_envs, self._at, self.clock - starts
        rows = self._index(envs, starts, lengths)
        # as much free room as carried rows, so that a row is moved about twice in its life
        self._capacity = max(self._capacity, 2 * len(rows) + 4 * n)
        rows = np.append(rows, np.arange(at, at + n))  # observations that wait for their actions

        def moved(column: NDArray[Any]) -> NDArray[Any]:
            kept = column.take(rows, axis=0)
            if len(column) < self._capacity:
                column = np.empty((self._capacity, *column.shape[1:]), dtype=column.dtype)
            column[: len(rows)] = kept
            return column

        self._observations.arrays = [moved(x) for x in self._observations.arrays]
        self._actions.arrays = [moved(x) for x in self._actions.arrays]
        self._rewards, self._log_probs = moved(self._rewards), moved(self._log_probs)
        self._carried_at[envs] = np.cumsum(lengths) - lengths
        self._carried = self._at = len(rows) - n
        self._base = self.clock
