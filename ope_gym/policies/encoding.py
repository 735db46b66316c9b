"""Turn batches of observations into rows of numbers: standardised numbers and 0/1 columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree

_FAR = 10.0  # standard deviations at which a standardised number is clipped


@dataclass(frozen=True, eq=False)
class Columns:
    """A batch as (n, width): first its standardised numbers, then its categories as 0/1 columns.

    Args:
        mean: (numbers,).
        scale: (numbers,) 1 / deviation, 0 for a constant.
        is_number: (columns,) of the flattened batch.
        category: (categories,) the column of each 0/1 column, among those that are no numbers.
        value: (categories,) the value for which it is 1.
    """

    mean: FloatArray
    scale: FloatArray
    is_number: NDArray[np.bool_]
    category: IntArray
    value: FloatArray

    @property
    def numbers(self) -> int:
        """Return how many columns are numbers."""
        return self.mean.size

    @property
    def width(self) -> int:
        """Return how many columns there are in all."""
        return self.mean.size + self.value.size

    def __call__(self, batch: Tree) -> FloatArray:
        """Return the columns (n, width) of a batch."""
        flat = [column for leaf in flat_leaves(batch) for column in leaf.T]
        if len(flat) != self.is_number.size:
            raise ValueError(
                f"the batch has {len(flat)} columns, the features learned {self.is_number.size}"
            )
        encoded = np.empty((self.width, batches.length(batch)))  # each column in one piece
        for row, j, mean, scale in zip(
            encoded, np.flatnonzero(self.is_number), self.mean, self.scale, strict=False
        ):
            np.subtract(flat[j], mean, out=row, dtype=np.float64)
            row *= scale
        numbers = encoded[: self.numbers]
        np.clip(numbers, -_FAR, _FAR, out=numbers)
        whole = np.flatnonzero(~self.is_number)
        for row, j, value in zip(encoded[self.numbers :], self.category, self.value, strict=True):
            np.equal(flat[whole[j]].astype(np.float64), value, out=row)
        return encoded.T


def flat_leaves(batch: Tree) -> list[FloatArray]:
    """Return the leaves as (n, columns) each."""
    n = batches.length(batch)
    flat = [leaf.reshape(n, -1) for leaf in batches.leaves(batch)]
    for leaf in flat:
        if leaf.dtype.kind not in "iubf":
            raise ValueError(
                f"the batch has dtype {leaf.dtype}: features are made of numbers; give "
                "features=, a callable from a batch to (n, d)"
            )
    return flat
