"""Features of LinearQ, and values linear in them.

A map is any callable from a batch of observations (or of observations and actions) to (n, d)
numbers. `Polynomial` needs the scale of the columns first, which is gathered chunk by chunk
(`ColumnSums`); `fixed(columns)` is its map. `Phi` applies a map to recorded steps, with the time
that is left, and `LinearValues` are the fitted values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arguments import whole
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.models.base import SAMPLES, ActionValues, Visits, each_action, of_chosen
from ope_gym.policies.numerics import Columns, choices, flat_leaves
from ope_gym.weights.answers import Answers

Map: TypeAlias = Callable[[Tree], FloatArray]
_Real = TypeVar("_Real", np.float32, np.float64)

CATEGORIES = 64  # an integer column that takes more values is a number
_LARGEST_LOG_WEIGHT = 3.0
_CACHED = 1 << 16  # steps times targets whose values stay in the cache
_FEWEST, _MOST = 1 << 10, 1 << 13  # steps at once: each call has its price, and features theirs


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
        whole("degree", self.degree)

    def learn(self, batch: Tree) -> Map:
        """Return the map with the means, deviations and categories of the batch."""
        return self.fixed(columns_of(batch))

    def fixed(self, columns: Columns) -> Map:
        """Return the map for these means, deviations and categories."""
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
class Phi:
    """The features of recorded steps.

    Args:
        features: Map from a batch to (n, columns).
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
        values = np.asarray(self.features(batch), dtype=np.float64)
        if values.shape != (n, self.columns):
            expected = (n, self.columns)
            raise ValueError(f"features gave shape {values.shape}; expected {expected}")
        if not np.all(np.isfinite(values)):
            row, column = np.argwhere(~np.isfinite(values))[0].tolist()
            raise ValueError(
                f"features gave {values[row, column]} in row {row}, column {column}: must be finite"
            )
        return np.ascontiguousarray(values.T)

    def left(self, steps: IntArray) -> FloatArray:
        """Return the share (n,) of the horizon that is left at some steps."""
        return np.asarray(np.maximum(self.horizon - np.asarray(steps), 0) / self.horizon)

    def raised(self, plain: FloatArray, left: FloatArray, powers: int) -> FloatArray:
        """Return features (columns, n) times powers u^0, u^1, ... of the share u that is left."""
        products = np.empty((powers, *plain.shape))
        products[0] = plain
        for power in range(1, powers):
            np.multiply(products[power - 1], left, out=products[power])
        return products.reshape(powers * self.columns, -1)

    def weigh(self, weights: FloatArray, plain: FloatArray, left: FloatArray) -> FloatArray:
        """Return weights·phi, (m, n), of weights (m, d) and of features without their time."""
        if len(weights) >= self.columns:  # one product, for which the powers are the smaller part
            return np.asarray(weights @ self.raised(plain, left, self.powers + 1))
        terms = weights.reshape(-1, self.columns) @ plain
        terms = terms.reshape(len(weights), self.powers + 1, -1)
        sums = terms[:, -1].copy()
        for power in range(self.powers - 1, -1, -1):
            sums *= left
            sums += terms[:, power]
        return sums

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


@dataclass(frozen=True, eq=False)
class LinearValues(ActionValues):
    """The fitted q.

    Args:
        phi: the features.
        theta: (A, d) weights; A is 1 for continuous actions.
        dual: (A, d) weights of the visits.
        nearness: exponent of the weights of the steps in the equations.
    """

    phi: Phi
    theta: FloatArray
    dual: FloatArray
    nearness: float

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        if self.phi.actions:
            return of_chosen(self.q_all(observations, steps), actions)
        return np.asarray(self.phi((observations, actions), steps) @ self.theta[0])

    def q_all(self, observations: Tree, steps: IntArray, actions: int = 0) -> FloatArray:
        """Return q (n, A) of every action, of which there are finitely many."""
        plain = self.phi.plain(observations, len(steps))
        return self.phi.weigh(self.theta, plain, self.phi.left(steps)).T

    def visits(self, answers: Answers, rows: IntArray) -> Visits:
        """Return the ratio of visits (n,) at recorded steps, w alpha·phi(s, a).

        The mean value at the start is b0'A^-1 b with b = sum w phi r, so a reward, or a residual,
        of that step counts w b0'A^-1 phi in it: no product of ratios over time.
        """
        if self.phi.actions:
            seen = self.of_targets([self], [answers], rows, True)[1][0]
            assert seen is not None
            return seen
        data = answers.data
        batch = batches.take(data.observations, rows), batches.take(data.actions, rows)
        dual = self.phi(batch, data.steps[rows]) @ self.dual[0]
        return Visits(near_weights(answers, self.nearness)[rows] * dual)

    @classmethod
    def of_targets(
        cls,
        values: Sequence[LinearValues],
        answers: Sequence[Answers],
        rows: IntArray,
        visits: bool,
    ) -> tuple[FloatArray, list[Visits | None]]:
        """Return q (P, A, n) and visits of P targets; the features are made once for all."""
        phi, data = values[0].phi, answers[0].data
        plain = phi.plain(batches.take(data.observations, rows), rows.size)
        left = phi.left(data.steps[rows])
        q = phi.weigh(np.concatenate([own.theta for own in values]), plain, left)
        everything = q.reshape(len(values), phi.actions, -1)
        if not visits:
            return everything, [None] * len(values)
        chosen = choices(data.actions, data.n_steps, phi.actions)[rows]
        dual = np.empty((len(values), rows.size))
        for a, some in each_action(chosen):
            weights = np.stack([own.dual[a] for own in values])
            dual[:, some] = phi.weigh(weights, plain[:, some], left[some])
        return everything, [
            Visits(near_weights(asked, own.nearness).take(rows) * row)
            for asked, own, row in zip(answers, values, dual, strict=True)
        ]

    @classmethod
    def at_once(cls, targets: int) -> int:
        """Return how many steps to evaluate at once."""
        return int(np.clip(_CACHED // targets, _FEWEST, _MOST))


def near_weights(answers: Answers, nearness: float) -> FloatArray:
    """Return the tempered weights (S,) of the steps, clipped at e^3; their scale cancels."""
    data = answers.data
    if nearness == 0:
        return np.ones(data.n_steps)
    from ope_gym.kernels import prefix_sums

    known = answers.near.get(nearness)
    if known is not None:
        return known
    ratio = np.maximum(answers.log_probs - data.log_probs, -1e6)
    total: FloatArray = prefix_sums(ratio, data.offsets.astype(np.int64, copy=False))
    total *= nearness
    np.minimum(total, _LARGEST_LOG_WEIGHT, out=total)
    answers.near[nearness] = np.exp(total, out=total)
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
        categories: Distinct whole numbers of each column; None for a column of numbers.
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
    values = np.unique(numbers)
    return values if values.size <= CATEGORIES else None
