"""Fused weights taken apart: the target and the mixture of the behaviours, to change the mixture.

P_e is the probability of the actions up to a step under the target, M = sum_k (n_k / n) P_k that
under the mixture; the weight is w = P_e / M.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, check_finite, check_log_probs
from ope_gym.data.schema import BY_STEP
from ope_gym.data.trajectories import Trajectories, Viewable
from ope_gym.estimators.table import Columns, Moments, column_sums, moments
from ope_gym.inference import regimes
from ope_gym.policies.closed_form import Policy, UnavailablePolicy
from ope_gym.weights.behaviours import Behaviours, behaviours_of, policy_log_probs
from ope_gym.weights.formula import log_weights

ESTIMATORS = {"NFIS": True, "FIS": False}  # whether normalised
_CANCELLED = 1e-6  # a mixture is not taken to be what subtraction leaves below this share


class Fused:
    """Trajectories, a target, and the logs of P_e and M at every step.

    Args:
        trajectories: recorded episodes.
        target: the policy to evaluate.
        estimator: "NFIS" or "FIS".
        data: "all" episodes, or only the "held-out" ones.
        gamma: discount.
    """

    def __init__(
        self, trajectories: Viewable, target: Policy, *, estimator: str, data: str, gamma: float
    ) -> None:
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator is {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma is {gamma!r}; a discount lies within [0, 1]")
        whole = trajectories.view()
        if not len(whole):
            raise ValueError("trajectories is empty: record at least one episode first")
        self.data = _counted(regimes.held_out_only(whole, data), gamma)
        check_finite(self.data.rewards, "rewards", self.data.offsets)
        self.normalised, self.gamma = ESTIMATORS[estimator], gamma
        self.behaviours: Behaviours = behaviours_of(self.data)
        if not self.behaviours.available:
            missing = next(
                k
                for k in self.behaviours.policies
                if isinstance(self.data.policies[k], UnavailablePolicy)
            )
            raise ValueError(
                f"policy {missing} cannot be asked for probabilities, so the mixture of the "
                "behaviours is not known: import the module that registers its class, or select "
                "the episodes of other policies"
            )
        self.log_m = -self._log_base(self.data, self.behaviours.ids, self.behaviours.counts)
        self.log_e = self.prefix(target, "target")
        self.columns = self._columns(self.log_e - self.log_m)
        self.current = self._moments(self.log_e - self.log_m, self.columns)

    @property
    def n(self) -> int:
        """Trajectories."""
        return len(self.data)

    @property
    def ends(self) -> IntArray:
        """(n,) last row of each trajectory."""
        return np.asarray(self.data.offsets[1:] - 1)

    def prefix(self, policy: Policy, name: str) -> FloatArray:
        """(S,) log-probability of the actions up to each step."""
        from ope_gym import kernels

        own = policy_log_probs(policy, name, self.data)
        check_log_probs(own, name, self.data.offsets, True)
        out = np.empty(own.size)
        kernels.cumulate(own, 0, self.n, self.data.offsets, out)
        return out

    def influence(self, log_w: FloatArray) -> FloatArray:
        """(n,) influence values with other weights, but the means over the data as they are."""
        from ope_gym import kernels

        if not self.normalised:
            return self._moments(log_w, self._columns(log_w)).influence
        peak, sums = self.columns.peak, self.columns.sums
        psi = np.full(self.n, np.nan)
        if np.all(sums[0] > 0):
            discount = self.gamma ** np.arange(peak.size, dtype=np.float64)
            kernels.normalised_influence(
                log_w, np.inf, self.data.rewards, self.data.offsets, discount, peak, sums, psi
            )
        return psi

    def without(self, left_out: NDArray[np.bool_]) -> Moments:
        """The estimate from the other episodes, against the mixture of who recorded them.

        Args:
            left_out: (n,) mask of episodes; all those of some behaviours.
        """
        kept, ids = np.flatnonzero(~left_out), self.behaviours.ids
        rows = np.flatnonzero(~np.repeat(left_out, self.data.lengths))
        lengths = self.data.lengths[kept]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        log_m = self._subtracted(ids[left_out], rows)
        poor = np.maximum.reduceat(np.isnan(log_m), offsets[:-1])
        if poor.any():
            log_m[np.repeat(poor, lengths)] = -self._log_base(
                self.data.select(episodes=kept[poor]),
                ids[kept[poor]],
                np.bincount(ids[kept], minlength=self.behaviours.counts.size),
            )
        log_w, rewards = self.log_e[rows] - log_m, self.data.rewards[rows]
        columns = column_sums(log_w, rewards, offsets, self.gamma, None)
        return moments(log_w, rewards, offsets, self.gamma, columns, normalised=self.normalised)

    def _subtracted(self, left_out: IntArray, rows: IntArray) -> FloatArray:
        """Log of the mixture without one policy at some rows; NaN where little is left of it."""
        plans = {self.behaviours.plans[k] for k in np.unique(left_out)}
        if len(plans) > 1 or len(next(iter(plans))) > 1:  # not one policy: compute it anew
            return np.full(rows.size, np.nan)
        ((_, number),) = plans.pop()
        log_p = self.prefix(self.data.policies[number], f"policy {number}")[rows]
        log_m, n = self.log_m[rows], self.n
        with np.errstate(over="ignore"):
            left = 1.0 - np.exp(np.log(left_out.size / n) + log_p - log_m)
        good = left > _CANCELLED
        result = np.full(rows.size, np.nan)
        result[good] = log_m[good] + np.log(left[good]) + np.log(n / (n - left_out.size))
        return result

    def _log_base(self, data: Trajectories, ids: IntArray, counts: IntArray) -> FloatArray:
        """(S,) minus the log of the mixture."""
        return log_weights(
            np.zeros(data.n_steps),
            self.behaviours.rows(data),
            ids,
            data.offsets,
            ["fused"],
            counts=counts,
            density=True,
        )["fused"]

    def _columns(self, log_w: FloatArray) -> Columns:
        return column_sums(log_w, self.data.rewards, self.data.offsets, self.gamma, None)

    def _moments(self, log_w: FloatArray, columns: Columns) -> Moments:
        return moments(
            log_w,
            self.data.rewards,
            self.data.offsets,
            self.gamma,
            columns,
            normalised=self.normalised,
        )


def _counted(data: Trajectories, gamma: float) -> Trajectories:
    """The steps that gamma leaves any weight: the first ones alone if gamma is 0."""
    counted = int(np.count_nonzero(gamma ** np.arange(data.lengths.max(), dtype=np.float64) > 0))
    if counted == data.lengths.max():
        return data
    rows = np.flatnonzero(data.steps < counted)
    offsets = np.concatenate([[0], np.cumsum(np.minimum(data.lengths, counted))])
    taken = {name: batches.take(getattr(data, name), rows) for name in BY_STEP}
    return dataclasses.replace(data, offsets=offsets, **taken)
