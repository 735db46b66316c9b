"""Feature maps of LinearQ: observations (or observations and actions) to (n, d) numbers.

A map is any callable from a batch to (n, d). One that must see the data first, for their scale or
their values, has `learn(batch)`, which returns the callable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.models.states import StateNumbers

Map: TypeAlias = Callable[[Tree], FloatArray]

CATEGORIES = 64  # an integer column that takes more values is a number
_FAR = 10.0  # standard deviations beyond which a standardised number is cut


@runtime_checkable
class Learned(Protocol):
    """Features whose scale comes from the data; from observations only, never from rewards."""

    def learn(self, batch: Tree) -> Map:
        """The map, fixed to the scale of this batch."""
        ...


@dataclass(frozen=True)
class Polynomial:
    """1 and all monomials up to a degree, of the standardised numbers.

    Numbers are cut at 10 standard deviations from their mean. An integer column of at most 64
    values is a category: one 0/1 column a value, which enters as it is, without products.

    Cost: (k + degree choose degree) columns for k numbers; 15 for CartPole.
    Weakness: it cannot follow an edge, such as a pole about to fall.
    """

    degree: int = 2

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"degree is {self.degree}: it must be at least 1")

    def learn(self, batch: Tree) -> Map:
        """The map, with the means, deviations and categories of the batch."""
        columns = Columns.of(batch)
        powers = [
            np.array(chosen)
            for degree in range(2, self.degree + 1)
            for chosen in itertools.combinations_with_replacement(range(columns.numbers), degree)
        ]
        width = 1 + columns.width + len(powers)

        def polynomial(batch: Tree) -> FloatArray:
            plain = columns(batch)
            found = np.empty((plain.shape[0], width))
            found[:, 0] = 1.0
            found[:, 1 : 1 + columns.width] = plain
            for j, chosen in enumerate(powers, start=1 + columns.width):
                np.prod(plain[:, chosen], axis=1, out=found[:, j])
            return found

        return polynomial


@dataclass(frozen=True)
class Fourier:
    """1, the standardised numbers z, and n random waves √2 cos(w·z / scale + b).

    w is normal, b uniform: with many waves a regression on them nears one with a Gaussian kernel of
    that width.

    Args:
        n: waves.
        scale: width of the kernel in standard deviations.
        seed: of w and b.
    """

    n: int = 100
    scale: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or not self.scale > 0:
            raise ValueError(f"n={self.n}, scale={self.scale}: both must be above 0")

    def learn(self, batch: Tree) -> Map:
        """The map, with the scale of the batch."""
        columns = Columns.of(batch)
        rng = np.random.default_rng(self.seed)
        waves = rng.standard_normal((columns.width, self.n)) / self.scale
        phase = rng.uniform(0.0, 2 * np.pi, self.n)

        def fourier(batch: Tree) -> FloatArray:
            plain = columns(batch)
            ones = np.ones((plain.shape[0], 1))
            return np.hstack([ones, plain, np.sqrt(2.0) * np.cos(plain @ waves + phase)])

        return fourier


@dataclass(frozen=True)
class OneHot:
    """One 0/1 column for each distinct observation of whole numbers; all 0 for a new one."""

    limit: int = 2000

    def learn(self, batch: Tree) -> Map:
        """The map, with the observations of the batch."""
        states = StateNumbers.of(batch)
        width = states.codes.size
        if width > self.limit:
            raise ValueError(
                f"{width} distinct observations are more than {self.limit} columns: use TabularQ"
            )

        def one_hot(batch: Tree) -> FloatArray:
            number = states.numbers(batch)
            return np.asarray(number[:, None] == np.arange(width), dtype=np.float64)

        return one_hot


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

    @classmethod
    def of(cls, batch: Tree) -> Columns:
        """The scale and the categories of a batch."""
        leaves = flat_leaves(batch)
        is_number, mean, scale, category, value = [], [], [], [], []
        others = 0
        for leaf in leaves:
            for j in range(leaf.shape[1]):
                column = leaf[:, j]
                few = None
                if leaf.dtype.kind in "iub" and np.ptp(column.astype(np.float64)) < 1e6:
                    few = np.unique(column)
                if few is not None and few.size <= CATEGORIES:
                    is_number.append(False)
                    category += [others] * few.size
                    value += few.astype(np.float64).tolist()
                    others += 1
                else:
                    is_number.append(True)
                    deviation = float(np.std(column, dtype=np.float64))
                    centre = float(np.mean(column, dtype=np.float64))
                    mean.append(centre)
                    constant = deviation <= 1e-12 * abs(centre)
                    scale.append(0.0 if constant or deviation == 0 else 1.0 / deviation)
        return cls(
            np.array(mean),
            np.array(scale),
            np.array(is_number, dtype=np.bool_),
            np.array(category, dtype=np.int64),
            np.array(value),
        )

    @property
    def numbers(self) -> int:
        """How many columns are numbers."""
        return self.mean.size

    @property
    def width(self) -> int:
        """Columns in all."""
        return self.mean.size + self.value.size

    def __call__(self, batch: Tree) -> FloatArray:
        """(n, width)."""
        flat = np.hstack([leaf.astype(np.float64) for leaf in flat_leaves(batch)])
        if flat.shape[1] != self.is_number.size:
            raise ValueError(
                f"the batch has {flat.shape[1]} columns, the features learned {self.is_number.size}"
            )
        numbers = np.clip((flat[:, self.is_number] - self.mean) * self.scale, -_FAR, _FAR)
        if not self.value.size:
            return np.asarray(numbers)
        ones = flat[:, ~self.is_number][:, self.category] == self.value
        return np.hstack([numbers, ones.astype(np.float64)])


def flat_leaves(batch: Tree) -> list[FloatArray]:
    """The leaves as (n, columns) each."""
    n = batches.length(batch)
    found = [leaf.reshape(n, -1) for leaf in batches.leaves(batch)]
    for leaf in found:
        if leaf.dtype.kind not in "iubf":
            raise ValueError(
                f"the batch has dtype {leaf.dtype}: features are made of numbers; give "
                "features=, a callable from a batch to (n, d)"
            )
    return found
