"""Simulate the bandit of section 2.3 and compute the estimators from counts of actions.

Counts are enough for one-step data, and much faster than a call of the library for each of half a
million data sets. `library` evaluates a data set with the library, to check the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym import Trajectories, evaluate
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.policies import SoftmaxLinear
from studies import oracle

NAMES = ("BIS", "NIS", "EA", "ω*")


@dataclass(frozen=True)
class Problem:
    """The bandit of section 2.3 with K actions; Z(K) = Z(0) = 0.

    >>> Problem(20).scale[[0, 9, 18, 19]]
    array([0.05, 0.5 , 0.05, 0.  ])
    """

    actions: int

    @property
    def policy(self) -> FloatArray:
        """Return π(i) = 2 i / (K (K + 1)), (A,)."""
        return 2.0 * np.arange(1, self.actions + 1) / (self.actions * (self.actions + 1))

    @property
    def target(self) -> FloatArray:
        """Return π_test (A,): 0.475 for the actions K/2 and K, equal shares for the others."""
        probs = np.full(self.actions, 0.05 / (self.actions - 2))
        probs[[self.actions // 2 - 1, self.actions - 1]] = 0.475
        return probs

    @property
    def scale(self) -> FloatArray:
        """Return Z (A,): Z(i) = i / K up to K/2, then Z(K − i)."""
        i = np.arange(1, self.actions + 1)
        return np.asarray(np.minimum(i, self.actions - i) / self.actions)


def tally(
    actions: IntArray, luck: FloatArray, sizes: IntArray, grid: FloatArray, n_actions: int
) -> tuple[IntArray, IntArray]:
    """Count draws (R, N, A) and successes (R, N, p, A) of each action among the first N draws.

    A draw succeeds at p if its luck is below p: all p share the luck and all N share the path.
    """
    runs, top = actions.shape
    part = np.searchsorted(sizes, np.arange(top), side="right")
    level = np.searchsorted(grid, luck, side="right")  # succeeds from grid[level] on
    shape = (runs, sizes.size, grid.size + 1, n_actions)
    cell = np.ravel_multi_index((np.arange(runs)[:, None], part[None], level, actions), shape)
    cells = np.bincount(cell.ravel(), minlength=int(np.prod(shape))).reshape(shape).cumsum(axis=1)
    return cells.sum(axis=2), cells[:, :, :-1].cumsum(axis=2)


def estimates(
    problem: Problem,
    sizes: IntArray,
    grid: FloatArray,
    counts: IntArray,
    wins: IntArray,
) -> FloatArray:
    """Return the values of BIS, NIS, EA and ω*, (R, 4, N, p): the library's formulas on counts."""
    k = counts[:, :, None].astype(np.float64)  # (R, N, 1, A)
    p, scale = grid[:, None], problem.scale
    paid = wins * scale / np.sqrt(p)  # Σ r of each action
    w = problem.target / problem.policy
    basic = (w * paid).sum(axis=-1)
    average = (problem.target * paid / np.maximum(k, 1)).sum(axis=-1)
    value = (problem.target @ scale) * np.sqrt(grid)
    # Σ_a ω* π_e r̂ = J Σ k (r̂ / r̄) / (V / r̄² + Σ k) over Z > 0; k r̂ / r̄ is successes / p
    pays = scale > 0
    total = (1 - grid) / grid + (k * pays).sum(axis=-1)
    best = value * (wins * pays).sum(axis=-1) / grid / np.where(total > 0, total, 1.0)
    return np.stack([basic / sizes[:, None], basic / (w * k).sum(axis=-1), average, best], axis=1)


def given_counts(problem: Problem, counts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of BIS, NIS and EA given the counts, (R, 3, N), r̄ = Z and V = Z²."""
    k = counts.astype(np.float64)
    basic = k / (problem.policy * k.sum(axis=-1, keepdims=True))
    normal = basic / (problem.target * basic).sum(axis=-1, keepdims=True)
    omega = np.stack([basic, normal, (k > 0) * 1.0], axis=1)  # (R, 3, N, A)
    term = omega * problem.target * problem.scale
    return term.sum(axis=-1), (term**2 / np.maximum(k, 1)[:, None]).sum(axis=-1)


def library(problem: Problem, p: float, actions: IntArray, rewards: FloatArray) -> FloatArray:
    """Return BIS, NIS, EA by `ope_gym.evaluate` and ω* by `studies.oracle` on one data set."""
    n, none = actions.size, np.zeros((problem.actions, 0))
    behaviour = SoftmaxLinear(none, np.log(problem.policy))
    data = Trajectories.from_arrays(
        np.zeros((n, 0)),
        actions,
        rewards,
        np.log(problem.policy[actions]),
        offsets=np.arange(n + 1),
        policies=[behaviour],
        terminated=True,
    )
    target = SoftmaxLinear(none, np.log(problem.target))
    found = evaluate(data, target, estimators=["BIS", "NBIS", "EA"])
    counts = np.bincount(actions, minlength=problem.actions)
    mean = np.bincount(actions, rewards, minlength=problem.actions) / np.maximum(counts, 1)
    omega = oracle.optimal_weights(
        counts, problem.scale * np.sqrt(p), (1 - p) * problem.scale**2, problem.target
    )
    return np.array([*(e.value for e in found.values()), (omega * problem.target) @ mean])
