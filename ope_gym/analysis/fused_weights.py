"""Keep the target and the mixture of fused weights apart, so that the mixture can be changed.

P_e is the probability of the actions up to a step under the target, M = sum_k (n_k / n) P_k that
under the mixture; the weight is w = P_e / M.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ope_gym import batches
from ope_gym.arguments import refusal
from ope_gym.arrays import FloatArray, IntArray, check_finite, check_log_probs, offsets_of
from ope_gym.data.schema import BY_STEP
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.reductions import discounts
from ope_gym.estimators.run import sum_arrays, weigh_arrays
from ope_gym.estimators.weighted import normalised_influence
from ope_gym.inference.computed import Computed
from ope_gym.options import Options
from ope_gym.policies import Policy, Target, UnavailablePolicy
from ope_gym.scale.sources import Episodes, load_source
from ope_gym.weights.behaviours import Behaviours, behaviours_of, policy_log_probs
from ope_gym.weights.formula import log_weights

NORMALISED = {"NFIS": True, "FIS": False}  # by estimator


class FusedWeights:
    """Hold trajectories, a target, and the logs of P_e and M at every step.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`.
        target: the policy to evaluate, the number of a recorded one, or "last".
        estimator: "NFIS" or "FIS".
        held_out: as in `ope_gym.evaluate`.
        gamma: discount.
    """

    def __init__(
        self,
        episodes: Episodes,
        target: Target,
        *,
        estimator: str,
        held_out: bool | None,
        gamma: float,
    ) -> None:
        if estimator not in NORMALISED:
            raise refusal("estimator", estimator, f"choose one of {', '.join(NORMALISED)}")
        options = Options(held_out=held_out, gamma=gamma)  # checks both
        self.source = load_source(episodes, options.held_out)
        assert self.source.data is not None  # all of it is in memory
        self.data = _counted(self.source.data, options.gamma)
        check_finite(self.data.rewards, "rewards", self.data.offsets)
        self.target = self.source.policy(target)
        self.normalised, self.gamma = NORMALISED[estimator], options.gamma
        self.behaviours: Behaviours = behaviours_of(self.data)
        if not self.behaviours.available:
            missing, gone = next(
                (k, policy)
                for k in self.behaviours.policies
                if isinstance(policy := self.data.policies[k], UnavailablePolicy)
            )
            raise ValueError(
                f"policy {missing} cannot be asked for probabilities, so the mixture of the "
                f"behaviours is not known: {gone.remedy}. Or select the episodes of other policies"
            )
        self.log_m = self.log_mixture(self.data, self.behaviours.ids, self.behaviours.counts)
        self.log_e = self.prefix(self.target, "target")
        log_w, rewards, offsets = self.log_e - self.log_m, self.data.rewards, self.data.offsets
        self._columns = sum_arrays(log_w, rewards, offsets, gamma).columns
        self.current: Computed = self._weigh(log_w)

    @property
    def n(self) -> int:
        """Return the number of trajectories."""
        return len(self.data)

    @property
    def ends(self) -> IntArray:
        """Return (n,) the last row of each trajectory."""
        return np.asarray(self.data.offsets[1:] - 1)

    def prefix(self, policy: Policy, name: str) -> FloatArray:
        """Return (S,) the log-probability of the actions up to each step."""
        from ope_gym.kernels import prefix_sums

        log_probs = policy_log_probs(policy, name, self.data)
        check_log_probs(log_probs, name, self.data.offsets, True)
        return np.asarray(prefix_sums(log_probs, self.data.offsets))

    def influence(self, log_w: FloatArray) -> FloatArray:
        """Return (n,) influence values with other weights, but today's means over the data."""
        if not self.normalised:
            return self._weigh(log_w).influence
        counted = discounts(self.gamma, self._columns.peak.size) * self.n
        rewards, offsets = self.data.rewards, self.data.offsets
        (psi,) = normalised_influence(log_w, np.inf, rewards, offsets, self._columns, counted)
        return np.asarray(psi)

    def log_mixture(self, data: Trajectories, ids: IntArray, counts: IntArray) -> FloatArray:
        """Return (S,) the log of the mixture in which behaviour k has counts[k] episodes.

        Args:
            data: some of the trajectories.
            ids: (n,) their behaviours.
            counts: (K,) episodes of each behaviour in the mixture.
        """
        return -log_weights(
            np.zeros(data.n_steps),
            self.behaviours.rows(data),
            ids,
            data.offsets,
            ["fused"],
            counts=counts,
            density=True,
        )["fused"]

    def _weigh(self, log_w: FloatArray) -> Computed:
        return weigh_arrays(
            log_w, self.data.rewards, self.data.offsets, self.gamma, normalised=self.normalised
        )


def _counted(data: Trajectories, gamma: float) -> Trajectories:
    """Drop the steps to which gamma gives no weight: all but the first if gamma is 0."""
    counted = int(np.count_nonzero(gamma ** np.arange(data.lengths.max(), dtype=np.float64) > 0))
    if counted == data.lengths.max():
        return data
    rows = np.flatnonzero(data.steps < counted)
    offsets = offsets_of(np.minimum(data.lengths, counted))
    taken = {name: batches.take(getattr(data, name), rows) for name in BY_STEP}
    return dataclasses.replace(data, offsets=offsets, **taken)
