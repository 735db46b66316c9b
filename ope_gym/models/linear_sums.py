"""Linear fitted Q evaluation of episodes that come in chunks: `update`, `merge`, `finalise`.

The normal equations of `LinearQ` are sums over steps, so they can be made part by part, and so can
the scale of the features. The values are those that `LinearQ` learns from all episodes together,
cross-fitted over the same folds, but for rounding. The target needs a finite action set: the mean
over continuous actions is one of draws, which would depend on the order of the episodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import FOLDS, Baseline, values_at
from ope_gym.models.features import CATEGORIES, Columns, Learned, Map, Polynomial, flat_leaves
from ope_gym.models.linear import (
    NUMBERS,
    FiniteLinearValues,
    LinearQ,
    LinearValues,
    NormalEquations,
    Phi,
    near_weights,
)
from ope_gym.policies.closed_form import FinitePolicy, Policy
from ope_gym.policies.inputs import choices


@dataclass
class ScaleSums:
    """Mean, deviation and few values of every column of a batch; m columns.

    Args:
        count: rows so far.
        mean: (m,).
        squares: (m,) sum of squared deviations from the mean.
        values: for each column the distinct whole numbers; None if there are too many, or others.
    """

    count: int = 0
    mean: FloatArray = field(default_factory=lambda: np.zeros(0))
    squares: FloatArray = field(default_factory=lambda: np.zeros(0))
    values: list[NDArray[np.float64] | None] = field(default_factory=list)

    def update(self, batch: Tree) -> None:
        """Add the rows of a batch."""
        leaves = flat_leaves(batch)
        flat = np.hstack([leaf.astype(np.float64) for leaf in leaves])
        few = [
            _few(leaf[:, j]) if leaf.dtype.kind in "iub" else None
            for leaf in leaves
            for j in range(leaf.shape[1])
        ]
        mean = flat.mean(axis=0)
        self.merge(ScaleSums(len(flat), mean, ((flat - mean) ** 2).sum(axis=0), few))

    def merge(self, other: ScaleSums) -> None:
        """Add the rows of another."""
        if not self.count:
            self.count, self.mean, self.squares = other.count, other.mean, other.squares
            self.values = list(other.values)
            return
        total, gap = self.count + other.count, other.mean - self.mean
        self.squares = self.squares + other.squares + gap**2 * (self.count * other.count / total)
        self.mean = self.mean + gap * (other.count / total)
        self.count = total
        self.values = [
            None if a is None or b is None else _few(np.append(a, b))
            for a, b in zip(self.values, other.values, strict=True)
        ]

    def finalise(self) -> Columns:
        """The standardised columns and the categories."""
        number = np.array([few is None for few in self.values], dtype=np.bool_)
        mean, deviation = self.mean[number], np.sqrt(self.squares[number] / self.count)
        constant = (deviation <= 1e-12 * np.abs(mean)) | (deviation == 0)
        categories = [few for few in self.values if few is not None]
        return Columns(
            mean,
            np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, deviation)),
            number,
            np.repeat(np.arange(len(categories)), [few.size for few in categories]).astype(
                np.int64
            ),
            np.concatenate([*categories, np.empty(0)]),
        )


def _few(column: NDArray[np.generic]) -> NDArray[np.float64] | None:
    """The distinct values of a column of whole numbers, None if they are no categories."""
    found = np.unique(np.asarray(column, dtype=np.float64))
    return found if found.size <= CATEGORIES and found[-1] - found[0] < 1e6 else None


@dataclass
class LinearFit:
    """The normal equations by fold, over chunks of whole episodes.

    Args:
        model: what is fitted.
        features: a map that is fixed.
        target: the policy to evaluate, with a finite action set.
        gamma: discount.
        horizon: longest possible episode.
        folds: how many.
        nearest: the largest weight of a step.
        known: whether the probability of every action is known.
        bounds: (2, folds) lowest and highest reward in each fold.
    """

    model: LinearQ
    features: Map
    target: Policy
    gamma: float
    horizon: int
    folds: int = FOLDS
    nearest: float = 0.0
    known: bool = True
    bounds: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.target, FinitePolicy):
            raise ValueError(
                "target has no probs: a q model of shards needs a finite action set; leave "
                "q_model=None, or load all episodes and use ope_gym.evaluate"
            )
        self.bounds = np.array([[np.inf] * self.folds, [-np.inf] * self.folds])
        self._phi: Phi | None = None
        self._sums: NormalEquations | None = None

    def update(self, data: Trajectories, fold: IntArray) -> None:
        """Add episodes with their folds (n,)."""
        assert isinstance(self.target, FinitePolicy)
        some = slice(0, 1)
        if self._phi is None or self._sums is None:
            actions = self.target.probs(batches.take(data.observations, some)).shape[1]
            self._phi = Phi(self.features, self.target, actions, int(self.model.time), self.horizon)
            width = self._phi.of(data, some).shape[1]
            self._sums = NormalEquations.empty(self.folds, actions, width)
        phi, sums = self._phi, self._sums
        part = fold[data.episode_ids]
        for k in np.unique(fold):
            paid = data.rewards[part == k]
            self.bounds[0, k] = min(self.bounds[0, k], paid.min())
            self.bounds[1, k] = max(self.bounds[1, k], paid.max())
        self.known &= not np.isnan(data.log_probs).any()
        weights = near_weights(data, self.target, self.model.nearness)
        self.nearest = max(self.nearest, float(weights.max()))
        ends = np.zeros(data.n_steps, dtype=np.bool_)
        ends[data.offsets[1:] - 1] = True
        chosen = choices(data.actions, data.n_steps, phi.actions)
        block = max(256, NUMBERS // (phi.actions * sums.squares.shape[1]))
        rng = np.random.default_rng(0)  # nothing is drawn: the actions are finite
        for begin in range(0, data.n_steps, block):
            rows = slice(begin, min(begin + block, data.n_steps))
            now = phi.of(data, rows)
            ahead = phi.expected_next(data, rows, ends[rows], now, rng)
            sums.add(
                now, ahead, self.gamma, data.rewards[rows], weights[rows], part[rows], chosen[rows]
            )

    def merge(self, other: LinearFit) -> None:
        """Add the episodes of another."""
        self.nearest, self.known = max(self.nearest, other.nearest), self.known and other.known
        self.bounds[0] = np.minimum(self.bounds[0], other.bounds[0])
        self.bounds[1] = np.maximum(self.bounds[1], other.bounds[1])
        if self._sums is None or other._sums is None:
            self._phi, self._sums = self._phi or other._phi, self._sums or other._sums
            return
        self._sums.system[...] += other._sums.system
        self._sums.answer[...] += other._sums.answer
        self._sums.squares[...] += other._sums.squares

    @property
    def alike(self) -> LinearQ | None:
        """The model to begin again with: `LinearQ` takes all steps alike if some has no weight.

        That is, if who acted is not known somewhere, or the target never does what was done.
        """
        if self.model.nearness == 0 or (self.known and self.nearest > 0):
            return None
        return replace(self.model, nearness=0.0)

    def finalise(self) -> LinearBaseline:
        """For each fold the values learned from the others."""
        assert self._phi is not None  # there is at least one episode
        assert self._sums is not None
        model, phi, sums = self.model, self._phi, self._sums
        values = [phi.values(sums.solve(k, model.ridge, model.pull)) for k in range(self.folds)]
        return LinearBaseline(values, self.target, self.gamma, self.horizon, self.bounds)


@dataclass(frozen=True)
class LinearBaseline:
    """Cross-fitted values, one q a fold.

    Args:
        values: for each fold those learned from the others.
        target: the policy to evaluate.
        gamma: discount.
        horizon: longest possible episode.
        bounds: (2, folds) lowest and highest reward in each fold.
    """

    values: list[LinearValues | FiniteLinearValues]
    target: Policy
    gamma: float
    horizon: int
    bounds: FloatArray

    def of(self, data: Trajectories, fold: IntArray) -> Baseline:
        """The q and v of episodes with their folds (n,), clipped by the rewards of other folds."""
        q, v = np.empty(data.n_steps), np.empty(data.n_steps)
        part, rng = fold[data.episode_ids], np.random.default_rng(0)
        annuity = np.append(0.0, np.cumsum(self.gamma ** np.arange(self.horizon)))
        for k in np.unique(fold):
            rows = np.flatnonzero(part == k)
            others = np.delete(self.bounds, k, axis=1)
            low, high = min(float(others[0].min()), 0.0), max(float(others[1].max()), 0.0)
            bounds = low * annuity, high * annuity
            q[rows], v[rows] = values_at(self.values[k], data, self.target, rows, bounds, rng)
        return Baseline(q, v)


def needs_scale(model: LinearQ) -> bool:
    """Whether the features take their scale from the data, in a pass of its own."""
    features = Polynomial() if model.features is None else model.features
    if isinstance(features, Learned) and not isinstance(features, Polynomial):
        raise ValueError(
            f"features is {features!r}, which learns from all episodes at once: with shards give a "
            "Polynomial, or a callable from a batch to (n, d)"
        )
    return isinstance(features, Polynomial)


def scaled_features(model: LinearQ, columns: Columns) -> Map:
    """The polynomial features of a model, with the scale of all chunks."""
    features = Polynomial() if model.features is None else model.features
    assert isinstance(features, Polynomial)  # `needs_scale` said so
    powers = [
        np.array(chosen)
        for degree in range(2, features.degree + 1)
        for chosen in itertools.combinations_with_replacement(range(columns.numbers), degree)
    ]

    def polynomial(batch: Tree) -> FloatArray:
        plain = columns(batch)
        products = [np.prod(plain[:, chosen], axis=1)[:, None] for chosen in powers]
        return np.hstack([np.ones((len(plain), 1)), plain, *products])

    return polynomial


class Folds:
    """The folds of episodes that come in order: those of `folds_within` on all of them.

    Args:
        counts: (K,) episodes of each behaviour in all.
        folds: how many.
        before: (K,) episodes of each behaviour that came before the first.
    """

    def __init__(self, counts: IntArray, folds: int, before: IntArray | int = 0) -> None:
        self._next = np.cumsum(counts) - counts + before
        self._folds = folds

    def of(self, ids: IntArray) -> IntArray:
        """(n,) folds of the next episodes, of behaviours `ids` (n,)."""
        order = np.argsort(ids, kind="stable")
        sizes = np.bincount(ids, minlength=self._next.size)
        rank = np.arange(ids.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        fold = np.empty(ids.size, dtype=np.int64)
        fold[order] = (self._next[ids[order]] + rank) % self._folds
        self._next = self._next + sizes
        return fold
