"""The rows of a vector env: written a vector step at a time, read an episode at a time."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as gym_spaces
from numpy.typing import ArrayLike, NDArray

from ope_gym.batches import Tree
from ope_gym.data import encoding, spaces
from ope_gym.data.schema import Floats
from ope_gym.data.spaces import Space

_ROWS, _BYTES = 65_536, 2**24  # room at first: so many rows, but not more bytes


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


class _Kind(NamedTuple):
    """Kind of a column: the dtype and shape of a vector step, and its rows as blocks of bytes.

    NumPy copies a block with a row at once, and the few numbers of an array in a row one by one.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # (N, ...)
    block: np.dtype[Any] | None  # None where a row is one number or object

    @classmethod
    def of(cls, dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Kind:
        size = math.prod(shape[1:])
        is_block = len(shape) > 1 and size and dtype.kind != "O"
        return cls(dtype, shape, np.dtype(f"V{dtype.itemsize * size}") if is_block else None)

    def values(self, column: NDArray[Any]) -> NDArray[Any]:
        """Return a column of records as an array of its own."""
        copied = np.array(column, order="C")
        return (
            copied if self.block is None else copied.view(self.dtype).reshape(-1, *self.shape[1:])
        )


def _blocks(values: NDArray[Any], block: np.dtype[Any]) -> NDArray[Any]:
    if values.ndim > 2 or not values.flags.c_contiguous:
        values = np.ascontiguousarray(values).reshape(len(values), -1)
    return values.view(block)[:, 0]


class Rows:
    """Keeps the rows of N sub-envs from the oldest open episode on, as records of all columns.

    The carried rows come first: they belong to episodes that were open when room was last made,
    sub-env by sub-env. Then come N rows for each vector step since clock `_base`. Rows that belong
    to no episode (a step that only resets the sub-env) are written too, and never read.

    Args:
        observation_space: Space of one sub-env.
        action_space: Space of one sub-env.
        num_envs: N.

    Attributes:
        layout: Layout of the records in a tail; None if they cannot be written as they are.
    """

    def __init__(self, observation_space: Space, action_space: Space, num_envs: int) -> None:
        self.clock = 0
        self.layout: str | None = None
        self._spaces = {"observations": observation_space, "actions": action_space}
        self._num_envs = num_envs
        self._base = 0
        self._carried = 0
        self._carried_at = np.zeros(num_envs, dtype=np.int64)
        self._at = 0  # row of the first sub-env at `clock`
        self._plain = {name: spaces.is_column(x) for name, x in self._spaces.items()}
        empty = {name: flatten(x, spaces.empty(x)) for name, x in self._spaces.items()}
        self._fields = {
            name: [f"{name}.{i}" for i in range(len(leaves))] for name, leaves in empty.items()
        }
        self._kinds = {
            field: _Kind.of(leaf.dtype, (num_envs, *leaf.shape[1:]))
            for name, leaves in empty.items()
            for field, leaf in zip(self._fields[name], leaves, strict=True)
        }
        number = _Kind.of(np.dtype(np.float64), (num_envs,))
        self._kinds |= {"rewards": number, "log_probs": number}
        self._capacity = max(4 * num_envs, min(_ROWS, _BYTES // self._dtype().itemsize))
        self._set(np.empty(0, self._dtype()))

    def _dtype(self) -> np.dtype[Any]:
        """Return the dtype of the records."""
        return np.dtype(
            [
                (field, x.block or x.dtype, x.shape[1:] if x.block is None else ())
                for field, x in self._kinds.items()
            ]
        )

    def _set(self, table: NDArray[np.void]) -> None:
        """Take a table, and give it as much room as there should be."""
        self._table = np.empty(self._capacity, table.dtype)
        self._table[: len(table)] = table
        self._view()
        self.layout = None
        if not table.dtype.hasobject and sys.byteorder == "little":
            columns = dict(zip(encoding.STORED, self.columns(self._records[:0]), strict=True))
            described = {f"{name[:-1]}_space": space for name, space in self._spaces.items()}
            text, _ = encoding.encode(SimpleNamespace(**columns, **described))
            self.layout = f'{{"by_row":{text}}}'

    def _view(self) -> None:
        """Make the views of the table."""
        self._column = {field: self._table[field] for field in self._kinds}
        # without fields: NumPy compares those whenever arrays are joined
        size = self._table.dtype.itemsize
        self._records = self._table if self._table.dtype.hasobject else self._table.view(f"V{size}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the views anew: those of a copy are arrays of their own."""
        self.__dict__ |= state
        self._view()

    @property
    def full(self) -> bool:
        """Whether there is no room for the next step and the observation after it."""
        return self._at + 2 * self._num_envs > self._capacity

    def see(self, observations: Any) -> None:
        """Store the observations that the policy acts on at `clock`."""
        self._put("observations", observations)

    def act(self, actions: Any, log_prob: ArrayLike | None) -> None:
        """Store the actions at `clock`, and their log-probabilities if the loop gives them."""
        given = None if log_prob is None else np.asarray(log_prob, dtype=np.float64)
        if given is not None and given.shape != (self._num_envs,):
            raise ValueError(
                f"log_prob has shape {given.shape}, expected ({self._num_envs},): one number for "
                "each sub-env"
            )
        self._put("actions", actions)
        rows = slice(self._at, self._at + self._num_envs)
        self._column["log_probs"][rows] = np.nan if given is None else given

    def _put(self, name: str, batch: Any) -> None:
        """Write a batch to the rows at `clock`."""
        space, rows = self._spaces[name], slice(self._at, self._at + self._num_envs)
        # what most environments have needs no search for its leaves
        leaves = [np.asarray(batch)] if self._plain[name] else flatten(space, batch)
        for field, leaf in zip(self._fields[name], leaves, strict=True):
            dtype, shape, block = self._kinds[field]
            if leaf.shape != shape:
                raise ValueError(
                    f"{name} has shape {leaf.shape}, expected {shape}: a row for each sub-env, as "
                    f"in {space}"
                )
            if leaf.dtype != dtype:
                dtype, _, block = self._widened(field, leaf.dtype)
                leaf = leaf.astype(dtype)
            if block is not None:
                leaf = _blocks(leaf, block)
            self._column[field][rows] = leaf

    def _widened(self, field: str, dtype: np.dtype[Any]) -> _Kind:
        """Return the kind of a column that holds numbers of this dtype, too: no digit is lost."""
        narrow = self._kinds[field]
        wide = _Kind.of(np.promote_types(narrow.dtype, dtype), narrow.shape)
        if wide.dtype != narrow.dtype:
            written = self._table[: self._at + self._num_envs]
            values = narrow.values(written[field]).astype(wide.dtype)
            self._kinds[field] = wide
            wider = np.empty(len(written), self._dtype())
            for name in self._kinds:
                if name != field:
                    wider[name] = written[name]
            wider[field] = values if wide.block is None else _blocks(values, wide.block)
            self._set(wider)
        return wide

    def advance(self, rewards: ArrayLike) -> None:
        """Store the rewards and advance the clock."""
        self._column["rewards"][self._at : self._at + self._num_envs] = rewards
        self._at += self._num_envs
        self.clock += 1

    def read(
        self, envs: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.void]:
        """Return the records of whole episodes."""
        return self._records.take(self._index(envs, starts, lengths))

    def columns(self, records: NDArray[np.void]) -> tuple[Tree, Tree, Floats, Floats]:
        """Return observations, actions, rewards and given log-probabilities of records."""
        table = records.view(self._table.dtype)
        seen, chosen = (
            unflatten(self._spaces[name], (self._kinds[x].values(table[x]) for x in fields))
            for name, fields in self._fields.items()
        )
        return seen, chosen, table["rewards"].copy(), table["log_probs"].copy()

    def _index(
        self, envs: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the rows of episodes: some carried, one after the other, and then every N-th."""
        begins = lengths.cumsum() - lengths
        n = self._num_envs
        first = (starts - self._base - begins) * n + (envs + self._carried)  # as if none is carried
        rows: NDArray[np.int64] = first.repeat(lengths)
        rows += np.arange(0, n * len(rows), n)
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
        kept = self._table.take(rows)
        if len(self._table) < self._capacity:
            self._set(kept)
        else:
            self._table[: len(rows)] = kept
        self._carried_at[envs] = np.cumsum(lengths) - lengths
        self._carried = self._at = len(rows) - n
        self._base = self.clock
