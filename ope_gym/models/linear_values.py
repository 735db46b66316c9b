"""The fitted values of LinearQ, and the weights of the steps it is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.models.base import ActionValues, Visits, each_action, of_chosen
from ope_gym.models.features import Phi
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

_LARGEST_LOG_WEIGHT = 3.0
_CACHED = 1 << 16  # steps times targets whose values stay in the cache
_FEWEST, _MOST = 1 << 10, 1 << 13  # steps at once: each call has its price, and features theirs


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
