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
from wrappers.recording.finished import GivenLogProbs

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
        self._spaces = (observation_space, action_space)
        self._simple = tuple(map(spaces.is_column, self._spaces))
        self._shapes = [
            [(num_envs, *leaf.shape[1:]) for leaf in flatten(space, spaces.empty(space))]
            for space in self._spaces
        ]
        self._num_envs = num_envs
        self._base = 0
        self._carried = 0
        self._carried_at = np.zeros(num_envs, dtype=np.int64)
        self._at = 0  # row of the first sub-env at `clock`
        self._capacity = 0
        self._seen: list[NDArray[Any]] = []
        self._chosen: list[NDArray[Any]] = []
        self._rewards = np.empty(0)
        self._ever_given = False  # until then, the two columns below are not needed
        self._log_probs = np.empty(0)
        self._given = np.empty(0, dtype=bool)

    @property
    def full(self) -> bool:
        """Whether there is no room for the next step and the observation after it."""
        return self._at + 2 * self._num_envs > self._capacity

    def see(self, observations: Any) -> None:
        """Store the observations that the policy acts on at `clock`."""
        if not self._seen:
            leaves = flatten(self._spaces[0], observations)
            width = sum(leaf.nbytes for leaf in leaves) // self._num_envs + 1
            self._capacity = max(4 * self._num_envs, min(_ROWS, _BYTES // width))
            self._rewards = np.empty(self._capacity)
        self._put(self._seen, observations, 0)

    def act(self, actions: Any, log_prob: ArrayLike | None) -> None:
        """Store the actions at `clock`, and their log-probabilities if the loop gives them."""
        self._put(self._chosen, actions, 1)
        if not self._ever_given and log_prob is None:
            return
        if not self._ever_given:
            self._ever_given = True
            self._log_probs = np.empty(self._capacity)
            self._given = np.zeros(self._capacity, dtype=bool)
        here = slice(self._at, self._at + self._num_envs)
        self._given[here] = log_prob is not None
        if log_prob is not None:
            given = np.asarray(log_prob, dtype=np.float64)
            if given.shape != (self._num_envs,):
                raise ValueError(
                    f"log_prob has shape {given.shape}, expected ({self._num_envs},): one number "
                    "for each sub-env"
                )
            self._log_probs[here] = given

    def advance(self, rewards: ArrayLike) -> None:
        """Store the rewards and advance the clock."""
        self._rewards[self._at : self._at + self._num_envs] = rewards
        self._at += self._num_envs
        self.clock += 1

    def _put(self, columns: list[NDArray[Any]], batch: Any, what: int) -> None:
        first, last = self._at, self._at + self._num_envs
        if self._simple[what] and columns:  # the usual case, as fast as possible
            array, column = np.asarray(batch), columns[0]
            if array.dtype == column.dtype and array.shape == self._shapes[what][0]:
                column[first:last] = array
                return
        leaves = flatten(self._spaces[what], batch)
        for leaf, shape in zip(leaves, self._shapes[what], strict=True):
            if leaf.shape != shape:
                name = ("observations", "actions")[what]
                raise ValueError(
                    f"{name} has shape {leaf.shape}, expected {shape}: a row for each sub-env, as "
                    f"in {self._spaces[what]}"
                )
        if not columns:
            columns += [np.empty((self._capacity, *x.shape[1:]), dtype=x.dtype) for x in leaves]
        for i, leaf in enumerate(leaves):
            if leaf.dtype != columns[i].dtype:  # widen the column: no digit may be lost
                both = np.promote_types(columns[i].dtype, leaf.dtype)
                wider = np.empty(columns[i].shape, dtype=both)
                wider[:first] = columns[i][:first]  # further rows are not written yet
                columns[i] = wider
            columns[i][first:last] = leaf

    def read(
        self, envs: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[Tree, Tree, NDArray[np.float64], GivenLogProbs]:
        """Return observations, actions, rewards and given log-probabilities of whole episodes."""
        rows = self._index(envs, starts, lengths)
        seen, chosen = (
            unflatten(space, iter([column.take(rows, axis=0) for column in columns]))
            for space, columns in zip(self._spaces, (self._seen, self._chosen), strict=True)
        )
        given = (self._log_probs[rows], self._given[rows]) if self._ever_given else None
        return seen, chosen, self._rewards[rows], given

    def _index(
        self, envs: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the rows of episodes; each has a stretch of carried and one of later rows."""
        late = np.maximum(starts, self._base) - self._base
        firsts = late * self._num_envs + (envs + self._carried)
        carried = self._base - starts
        if carried.max(initial=0) <= 0:
            return _stretches(firsts, self._num_envs, lengths)
        carried = np.clip(carried, 0, lengths)
        counts = np.stack([carried, lengths - carried], axis=1).reshape(-1)
        firsts = np.stack([self._carried_at[envs], firsts], axis=1).reshape(-1)
        strides = np.tile([1, self._num_envs], len(envs))
        used = counts > 0
        return _stretches(firsts[used], strides[used], counts[used])

    def make_room(self, envs: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Forget all rows except those of these open episodes."""
        n, lengths = self._num_envs, self.clock - starts
        rows = self._index(envs, starts, lengths)
        kept = len(rows)
        # as much free room as carried rows, so that a row is moved about twice in its life
        self._capacity = max(self._capacity, 2 * kept + 4 * n)

        def moved(column: NDArray[Any], last: int) -> NDArray[Any]:
            carried = column[:last].take(rows, axis=0)
            current = column[self._at : last].copy()
            if len(column) < self._capacity:
                column = np.empty((self._capacity, *column.shape[1:]), dtype=column.dtype)
            column[:kept] = carried
            column[kept : kept + len(current)] = current
            return column

        at = self._at  # from this row on: the observation that waits for its action
        self._seen = [moved(column, at + n) for column in self._seen]
        self._chosen = [moved(column, at) for column in self._chosen]
        self._rewards = moved(self._rewards, at)
        if self._ever_given:
            self._log_probs, self._given = moved(self._log_probs, at), moved(self._given, at)
        self._carried_at[envs] = np.cumsum(lengths) - lengths
        self._carried, self._base, self._at = kept, self.clock, kept


def _stretches(
    firsts: NDArray[np.int64], strides: NDArray[np.int64] | int, counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return arithmetic progressions, one after the other, of at least one number each.

    >>> _stretches(np.array([3, 10]), np.array([1, 5]), np.array([2, 3]))
    array([ 3,  4, 10, 15, 20])
    """
    begins = np.cumsum(counts)
    n = begins[-1] if len(begins) else 0
    begins -= counts
    jumps = np.full(n, strides) if isinstance(strides, int) else np.repeat(strides, counts)
    if n:
        lasts = firsts + strides * (counts - 1)
        jumps[begins] = firsts
        jumps[begins[1:]] -= lasts[:-1]
    return np.cumsum(jumps, out=jumps)
