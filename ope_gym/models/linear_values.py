"""The fitted values of LinearQ, and the weights of the steps it is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import of_chosen
from ope_gym.models.features import Phi
from ope_gym.policies import Policy
from ope_gym.weights.answers import Answers

_LARGEST_LOG_WEIGHT = 3.0


@dataclass(frozen=True)
class LinearValues:
    """The fitted q of continuous actions.

    Args:
        phi: the features.
        theta: (A, d) weights; A is 1 for continuous actions.
        dual: (A, d) weights of the visits.
        near: weights of the steps in the equations.
    """

    phi: Phi
    theta: FloatArray
    dual: FloatArray
    near: NearWeights

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        return np.asarray(self.phi((observations, actions), steps) @ self.theta[0])

    def visits(self, data: Trajectories, rows: IntArray) -> tuple[FloatArray, None]:
        """Return the ratio of visits (n,) at recorded steps, w alpha·phi(s, a).

        The mean value at the start is b0'A^-1 b with b = sum w phi r, so a reward, or a residual,
        of that step counts w b0'A^-1 phi in it: no product of ratios over time.
        """
        seen, actions = batches.take(data.observations, rows), batches.take(data.actions, rows)
        return self.near.of(data)[rows] * self._visits(seen, actions, data.steps[rows]), None

    def _visits(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        return np.asarray(self.phi((observations, actions), steps) @ self.dual[0])


class FiniteLinearValues(LinearValues):
    """The fitted q of a finite action set."""

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        return of_chosen(self.q_all(observations, steps), actions)

    def q_all(self, observations: Tree, steps: IntArray) -> FloatArray:
        """Return q (n, A) of every action."""
        plain = self.phi.plain(observations, len(steps))
        return self.phi.weigh(self.theta, plain, self.phi.left(steps)).T

    @staticmethod
    def of_targets(
        values: Sequence[FiniteLinearValues], data: Trajectories, rows: IntArray, action: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return q (P, A, n) and alpha·phi (P, n), as in `visits`, at recorded steps of P targets.

        The features are made once for all of them.

        Args:
            values: of each target.
            data: the episodes.
            rows: (n,) the steps.
            action: of which alpha·phi is wanted: that of all these steps.
        """
        phi = values[0].phi
        plain = phi.plain(batches.take(data.observations, rows), rows.size)
        thetas, duals = [own.theta for own in values], [own.dual[action][None] for own in values]
        found = phi.weigh(np.concatenate([*thetas, *duals]), plain, phi.left(data.steps[rows]))
        q, visited = np.split(found, [len(values) * phi.actions])
        return q.reshape(len(values), phi.actions, -1), visited

    def visit_weights(self, answers: Answers) -> FloatArray:
        """Return the weights w (S,) of `visits`, of the episodes the target was asked about."""
        return self.near.of(answers.data, answers)

    def _visits(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        plain = self.phi.plain(observations, len(steps))
        return of_chosen(self.phi.weigh(self.dual, plain, self.phi.left(steps)).T, actions)


class NearWeights:
    """The weights of the steps in the equations; those of the last episodes are kept.

    Args:
        target: the policy to evaluate.
        nearness: of the model.
    """

    def __init__(self, target: Policy, nearness: float) -> None:
        self._target, self._nearness = target, nearness
        self._last: tuple[Trajectories, FloatArray] | None = None

    def of(self, data: Trajectories, answers: Answers | None = None) -> FloatArray:
        """Return the weights (S,) of episodes; `answers` if the target was asked about them."""
        if self._last is None or self._last[0] is not data:
            answers = Answers(self._target, data) if answers is None else answers
            self._last = data, near_weights(data, self._nearness, answers)
        return self._last[1]

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_last": None}  # other processes have other episodes


def near_weights(data: Trajectories, nearness: float, answers: Answers) -> FloatArray:
    """Return the tempered weights (S,) of the steps, clipped at e^3; their scale cancels."""
    if nearness == 0:
        return np.ones(data.n_steps)
    from ope_gym.kernels import prefix_sums

    found = answers.near.get(nearness)
    if found is not None:
        return found
    ratio = np.maximum(answers.log_probs - data.log_probs, -1e6)
    total: FloatArray = prefix_sums(ratio, data.offsets.astype(np.int64, copy=False))
    total *= nearness
    np.minimum(total, _LARGEST_LOG_WEIGHT, out=total)
    answers.near[nearness] = np.exp(total, out=total)
    return total
