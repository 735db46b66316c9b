"""Numbers of the distinct observations, where these are whole numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym import batches
from ope_gym.arrays import IntArray
from ope_gym.batches import Tree


@dataclass(frozen=True, eq=False)
class StateNumbers:
    """Numbers 0, 1, ... of the distinct rows of integer leaves.

    Args:
        low: (c,) least value of each column.
        size: (c,) how many values each column may take.
        codes: (n_states,) sorted, one number a distinct row.
        first: (n_states,) a row of the data in each state.
    """

    low: IntArray
    size: IntArray
    codes: IntArray
    first: IntArray

    @classmethod
    def of(cls, observations: Tree) -> StateNumbers:
        """Number the distinct observations."""
        table = _integers(observations)
        low = table.min(axis=0)
        size = table.max(axis=0) - low + 1
        if np.log2(size.astype(np.float64)).sum() > 62:
            raise ValueError(
                f"observations are {size.size} columns of up to {int(size.max())} values: too many "
                "for a table; use LinearQ"
            )
        codes, first = np.unique(_encode(table, low, size), return_index=True)
        return cls(low, size, codes, first)

    def numbers(self, observations: Tree) -> IntArray:
        """(n,) the state of each row, -1 where it was never seen."""
        table = _integers(observations)
        if table.shape[1] != self.low.size:
            raise ValueError(
                f"observations have {table.shape[1]} columns, the model learned {self.low.size}"
            )
        inside = np.all((table >= self.low) & (table < self.low + self.size), axis=1)
        codes = _encode(np.where(inside[:, None], table, self.low), self.low, self.size)
        found = np.minimum(np.searchsorted(self.codes, codes), self.codes.size - 1)
        return np.where(inside & (self.codes[found] == codes), found, -1)


def _integers(observations: Tree) -> IntArray:
    """(n, c) all leaves side by side."""
    n = batches.length(observations)
    found = [leaf.reshape(n, -1) for leaf in batches.leaves(observations)]
    wrong = [str(leaf.dtype) for leaf in found if leaf.dtype.kind not in "iub"]
    if wrong:
        raise ValueError(
            f"observations have dtype {wrong[0]}: a table is of whole numbers; use LinearQ, or "
            "round the observations to cells"
        )
    return np.hstack(found).astype(np.int64)


def _encode(table: IntArray, low: IntArray, size: IntArray) -> IntArray:
    base = np.concatenate([[1], np.cumprod(size[::-1])[:-1]])[::-1]
    return np.asarray((table - low) @ base)
