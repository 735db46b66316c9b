"""Feature maps of LinearQ: observations (or observations and actions) to (n, d) numbers.

A map is any callable from a batch to (n, d). Features that must see the data first have
`learn(batch)`, which returns the map. If all they need is the scale of the columns, they also have
`fixed(columns)`: then the scale may be gathered chunk by chunk (`ColumnSums`), and `learn` is the
case of one chunk.

`columns_of` finds the scale of a batch for `ope_gym.policies.encoding.Columns`; `Phi` applies a map
to recorded steps, with the time that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import comb
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.models.base import SAMPLES
from ope_gym.models.tabular import StateNumbers
from ope_gym.policies.encoding import Columns, flat_leaves
from ope_gym.weights.answers import Answers

Map: TypeAlias = Callable[[Tree], FloatArray]
_Real = TypeVar("_Real", np.float32, np.float64)

CATEGORIES = 64  # an integer column that takes more values is a number


@runtime_checkable
class Learned(Protocol):
    """Features that see the data before they can be computed; never the rewards."""

    def learn(self, batch: Tree) -> Map:
        """Return the map for data like this batch."""
        ...


@runtime_checkable
class Scaled(Protocol):
    """Features that need no more of the data than the scale of their columns."""

    def fixed(self, columns: Columns) -> Map:
        """Return the map for this scale."""
        ...


@dataclass(frozen=True)
class Polynomial:
    """1 and all monomials up to a degree, of the standardised numbers.

    Numbers are clipped at 10 standard deviations from their mean. An integer column of at most 64
    values is a category: one 0/1 column a value, which enters as it is, without products.

    Cost: (k + degree choose degree) columns for k numbers; 15 for CartPole.
    Weakness: it cannot follow an edge, such as a pole about to fall.
    """

    degree: int = 2

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"degree is {self.degree}: it must be at least 1")

    def learn(self, batch: Tree) -> Map:
        """Return the map with the means, deviations and categories of the batch."""
        return self.fixed(columns_of(batch))

    def fixed(self, columns: Columns) -> Map:
        """Return the map for this scale."""
        return partial(_polynomial, columns, self.degree)


def _polynomial(columns: Columns, degree: int, batch: Tree) -> FloatArray:
    plain = columns(batch).T  # column by column, each of which lies in one piece
    numbers = columns.numbers
    products = monomials(plain[:numbers], degree)
    if numbers == len(plain):
        return products.T
    first = 1 + numbers
    return np.concatenate([products[:first], plain[numbers:], products[first:]]).T


def monomials(z: NDArray[_Real], degree: int) -> NDArray[_Real]:
    """Return the products (F, n) of at most `degree` of the d columns of z (d, n), 1 first.

    >>> monomials(np.array([[2.0], [3.0]]), 2).T
    array([[1., 2., 3., 4., 6., 9.]])
    """
    out = np.empty((comb(len(z) + degree, degree), z.shape[1]), dtype=z.dtype)
    out[0] = 1.0
    first, row = 0, 1
    for k in range(1, degree + 1):
        begin = row
        for j, column in enumerate(z):  # products of k - 1 columns, none after j, are neighbours
            size = comb(j + k - 1, k - 1)
            np.multiply(out[first : first + size], column, out=out[row : row + size])
            row += size
        first = begin
    return out


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
        """Return the map with the scale of the batch."""
        return self.fixed(columns_of(batch))

    def fixed(self, columns: Columns) -> Map:
        """Return the map for this scale."""
        rng = np.random.default_rng(self.seed)
        waves = rng.standard_normal((columns.width, self.n)) / self.scale
        return partial(_cosines, columns, waves, rng.uniform(0.0, 2 * np.pi, self.n))


def _cosines(columns: Columns, waves: FloatArray, phase: FloatArray, batch: Tree) -> FloatArray:
    plain = columns(batch)
    ones = np.ones((len(plain), 1))
    return np.hstack([ones, plain, np.sqrt(2.0) * np.cos(plain @ waves + phase)])


@dataclass(frozen=True)
class OneHot:
    """One 0/1 column for each distinct observation of whole numbers; all 0 for a new one."""

    limit: int = 2000

    def learn(self, batch: Tree) -> Map:
        """Return the map with the distinct observations of the batch."""
        states = StateNumbers.of(batch)
        width = states.codes.size
        if width > self.limit:
            raise ValueError(
                f"{width} distinct observations are more than {self.limit} columns: use TabularQ"
            )
        return partial(_indicators, states)


def _indicators(states: StateNumbers, batch: Tree) -> FloatArray:
    number = states.numbers(batch)
    return np.asarray(number[:, None] == np.arange(states.codes.size), dtype=np.float64)


@dataclass(frozen=True)
class Phi:
    """The features of recorded steps.

    Args:
        features: from a batch to (n, columns).
        actions: how many; 0 where they are continuous.
        columns: how many the features have.
        powers: highest power of the share of the horizon that is left.
        horizon: longest possible episode.
    """

    features: Map
    actions: int
    columns: int
    powers: int
    horizon: int

    @property
    def width(self) -> int:
        """Return the number d of columns with the powers of time."""
        return self.columns * (self.powers + 1)

    @property
    def weights(self) -> int:
        """Return the number of weights to solve for."""
        return self.width * max(self.actions, 1)

    def __call__(self, batch: Tree, steps: IntArray) -> FloatArray:
        """Return (n, d), the features times the powers of the share of the horizon that is left."""
        return self._timed(self.plain(batch, len(steps)), steps)

    def plain(self, batch: Tree, n: int) -> FloatArray:
        """Return the features (columns, n) of a batch of n steps, without their time."""
        found = np.asarray(self.features(batch), dtype=np.float64)
        if found.shape != (n, self.columns):
            expected = (n, self.columns)
            raise ValueError(f"features gave shape {found.shape}; expected {expected}")
        if not np.all(np.isfinite(found)):
            row, column = np.argwhere(~np.isfinite(found))[0].tolist()
            raise ValueError(
                f"features gave {found[row, column]} in row {row}, column {column}: must be finite"
            )
        return np.ascontiguousarray(found.T)

    def left(self, steps: IntArray) -> FloatArray:
        """Return the share (n,) of the horizon that is left at some steps."""
        return np.asarray(np.maximum(self.horizon - np.asarray(steps), 0) / self.horizon)

    def raised(self, plain: FloatArray, left: FloatArray, powers: int) -> FloatArray:
        """Return features (columns, n) times powers u^0, u^1, ... of the share u that is left."""
        found = np.empty((powers, *plain.shape))
        found[0] = plain
        for power in range(1, powers):
            np.multiply(found[power - 1], left, out=found[power])
        return found.reshape(powers * self.columns, -1)

    def weigh(self, weights: FloatArray, plain: FloatArray, left: FloatArray) -> FloatArray:
        """Return weights·phi, (m, n), of weights (m, d) and of features without their time."""
        if len(weights) >= self.columns:  # one product, for which the powers are the smaller part
            return np.asarray(weights @ self.raised(plain, left, self.powers + 1))
        terms = weights.reshape(-1, self.columns) @ plain
        terms = terms.reshape(len(weights), self.powers + 1, -1)
        found = terms[:, -1].copy()
        for power in range(self.powers - 1, -1, -1):
            found *= left
            found += terms[:, power]
        return found

    def expected_next(
        self,
        answers: Answers,
        rows: slice,
        ends: NDArray[np.bool_],
        rng: np.random.Generator,
    ) -> FloatArray:
        """Return E_pi of the next step's features, (columns, n), 0 at an end, without their time.

        With continuous actions.
        """
        ahead = np.zeros((self.columns, rows.stop - rows.start))
        on = np.flatnonzero(~ends)
        if on.size:
            following = np.arange(rows.start, rows.stop)[on] + 1
            ahead[:, on] = self._mean(answers, following, rng)
        return ahead

    def expected(self, answers: Answers, rows: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return E_pi phi, (d,), summed over some recorded steps, with continuous actions."""
        plain = self._mean(answers, rows, rng)
        return np.asarray(self._timed(plain, answers.data.steps[rows]).sum(axis=0))

    def _timed(self, plain: FloatArray, steps: IntArray) -> FloatArray:
        """Return phi (n, d) of features (columns, n) at some steps."""
        return self.raised(plain, self.left(steps), self.powers + 1).T

    def _mean(self, answers: Answers, rows: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return the mean (columns, n) of the features over actions that the target draws."""
        seen = batches.take(answers.data.observations, rows)
        total = np.zeros((self.columns, rows.size))
        for _ in range(SAMPLES):
            total += self.plain((seen, answers.target.sample(seen, rng)), rows.size) / SAMPLES
        return total


def columns_of(batch: Tree) -> Columns:
    """Return the columns with the scale and the categories of a batch."""
    sums = ColumnSums()
    sums.update(batch)
    return sums.columns()


@dataclass
class ColumnSums:
    """Gather the mean, the deviation and the categories of m columns, chunk by chunk.

    Two chunks are merged by the formula of Chan, Golub and LeVeque: with their sizes n, their sums
    of squared deviations M, and the difference d of their means,
    M = M_1 + M_2 + d² n_1 n_2 / (n_1 + n_2).

    Args:
        count: rows so far.
        mean: (m,).
        squares: (m,) sum of squared deviations from the mean.
        categories: for each column its distinct whole numbers; None for a column of numbers.
    """

    count: int = 0
    mean: FloatArray = field(default_factory=lambda: np.zeros(0))
    squares: FloatArray = field(default_factory=lambda: np.zeros(0))
    categories: list[FloatArray | None] = field(default_factory=list)

    def update(self, batch: Tree) -> None:
        """Add the rows of a batch."""
        count = batches.length(batch)
        if not count:
            return
        columns = [leaf[:, j] for leaf in flat_leaves(batch) for j in range(leaf.shape[1])]
        mean = np.array([np.mean(column, dtype=np.float64) for column in columns])
        squares = np.empty(len(columns))
        for j, column in enumerate(columns):
            away = np.subtract(column, mean[j], dtype=np.float64)
            squares[j] = np.sum(away * away)
        whole = [column.dtype.kind in "iub" for column in columns]
        few = [_few(x) if integer else None for x, integer in zip(columns, whole, strict=True)]
        self.merge(ColumnSums(count, mean, squares, few))

    def merge(self, other: ColumnSums) -> None:
        """Add the rows that another one has seen."""
        if not other.count:
            return
        if not self.count:
            self.count, self.mean, self.squares = other.count, other.mean, other.squares
            self.categories = other.categories
            return
        total, gap = self.count + other.count, other.mean - self.mean
        self.squares = self.squares + other.squares + gap**2 * (self.count * other.count / total)
        self.mean = self.mean + gap * (other.count / total)
        self.count = total
        self.categories = [
            None if a is None or b is None else _few(np.append(a, b))
            for a, b in zip(self.categories, other.categories, strict=True)
        ]

    def columns(self) -> Columns:
        """Return the scale and the categories of all rows."""
        number = np.array([few is None for few in self.categories], dtype=np.bool_)
        mean, deviation = self.mean[number], np.sqrt(self.squares[number] / self.count)
        constant = (deviation <= 1e-12 * np.abs(mean)) | (deviation == 0)
        scale = np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, deviation))
        values = [few for few in self.categories if few is not None]
        category = np.repeat(np.arange(len(values)), [few.size for few in values])
        return Columns(mean, scale, number, category, np.concatenate([*values, np.empty(0)]))


def _few(column: NDArray[np.generic]) -> FloatArray | None:
    """Return the distinct values of a column of whole numbers, or None if they are too many."""
    numbers = column.astype(np.float64)
    if np.ptp(numbers) >= 1e6:  # an identifier or a clock: no need to sort it
        return None
    found = np.unique(numbers)
    return found if found.size <= CATEGORIES else None
