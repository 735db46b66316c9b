"""Checks of recorded propensities against the policies, as sums: `update`, `merge`, `finalise`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy, log_prob_moments
from ope_gym.policies.numerics import moments_of
from ope_gym.weights.behaviours import ROWS, Behaviours
from ope_gym.weights.formula import SCHEMES
from ope_gym.weights.mixtures import parts

_FALSE_ALARM = 1e-3  # probability of an alarm about propensities that are right
_ROUNDING = 1e-5  # of one log-probability, not to be called a surprise


@dataclass(frozen=True)
class PropensityReport:
    """Checks of the recorded propensities against the policies.

    Args:
        calibration: (all policies,) Z_k = sum [ln pi(a|s) + H] / sqrt(sum Var[ln pi]) over the
            steps at which policy k acted, about standard normal if they were recorded rightly.
        alarms: policies whose surprise is too large for chance, by Bernstein's inequality with the
            largest single surprise as the jump: one rare but legal action raises none.
        support: by scheme, visited steps at which the target may choose an action that its own
            behaviour (basic), or every behaviour (fused, optimal), never would.
    """

    calibration: FloatArray
    alarms: tuple[int, ...]
    support: dict[str, int]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each alarm."""
        return tuple(
            f"the propensities of policy {k} look wrongly recorded (Z = {self.calibration[k]:.1f})"
            for k in self.alarms
        )


@dataclass
class PropensitySums:
    """Surprises of the policies, and support of the target; P policies.

    Args:
        target: the policy to evaluate.
        size: P.
        surprise: (P,) sum of ln pi(a|s) + H over the steps at which each acted.
        variance: (P,) sum of Var[ln pi]; NaN where the policy cannot tell.
        jump: (P,) largest single surprise.
        acted: (P,) steps.
        missing: steps at which the target may act as their own behaviour never would, and as no
            behaviour would.
        finite: whether all action sets are finite, so that support is known.
    """

    target: Policy
    size: int
    surprise: FloatArray = field(init=False)
    variance: FloatArray = field(init=False)
    jump: FloatArray = field(init=False)
    acted: FloatArray = field(init=False)
    missing: tuple[int, int] = (0, 0)
    finite: bool = True

    def __post_init__(self) -> None:
        self.surprise, self.variance = np.zeros(self.size), np.zeros(self.size)
        self.jump, self.acted = np.zeros(self.size), np.zeros(self.size)

    def update(
        self, data: Trajectories, behaviours: Behaviours, groups: IntArray | None = None
    ) -> None:
        """Add trajectories whose policies are numbered as in all.

        Args:
            data: the trajectories.
            behaviours: who recorded them.
            groups: (K,) of partial mixtures, which cover what their own behaviours do; None for
                the mixture of all.
        """
        if groups is not None:
            for part in parts(data, behaviours, groups):
                self.update(part.data, part.behaviours)
            return
        known = (self.target, *(data.policies[k] for k in behaviours.policies))
        self.finite &= all(hasattr(policy, "probs") for policy in known)
        for start in range(0, data.n_steps, ROWS):
            rows = slice(start, min(start + ROWS, data.n_steps))
            acting = data.policy_ids[rows]
            order = np.argsort(acting, kind="stable")
            acting, logged = acting[order], data.log_probs[rows][order]
            observations = batches.take(batches.take(data.observations, rows), order)
            bounds = np.append(0, np.flatnonzero(np.diff(acting)) + 1)
            for begin, end in zip(bounds, np.append(bounds[1:], acting.size), strict=True):
                seen = batches.take(observations, slice(begin, end))
                self._add(data, behaviours, int(acting[begin]), seen, logged[begin:end])
        acted, steps = np.unique(data.policy_ids, return_counts=True)
        self.acted[acted] += steps

    def _add(
        self,
        data: Trajectories,
        behaviours: Behaviours,
        k: int,
        seen: batches.Tree,
        logged: FloatArray,
    ) -> None:
        """Add steps at which policy k acted, with the logged log-probabilities of its actions."""
        policy = data.policies[k]
        probs = policy.probs(seen) if hasattr(policy, "probs") else None
        moments = (
            moments_of(probs)
            if probs is not None and not hasattr(policy, "log_prob_moments")
            else log_prob_moments(policy, seen)
        )
        if moments is None:
            self.variance[k] = np.nan
            return
        surprises = logged - moments[0]
        self.surprise[k] += np.sum(surprises)
        self.variance[k] += np.sum(moments[1])
        self.jump[k] = max(self.jump[k], np.abs(surprises).max())
        if not self.finite or probs is None:
            return
        covered = bool(probs.min() > 0)  # then the target's own probabilities do not matter
        some = batches.take(seen, slice(0, 1)) if covered else seen
        wanted = self.target.probs(some)  # type: ignore[attr-defined]
        if probs.shape[1] != wanted.shape[1]:
            raise ValueError(
                f"target has {wanted.shape[1]} actions, but policy {k} has {probs.shape[1]}: both "
                "must be policies of one environment"
            )
        if covered:
            return
        gap = np.flatnonzero(np.any((probs == 0) & (wanted > 0), axis=1))
        if gap.size:
            nowhere = _uncovered(data, behaviours, batches.take(seen, gap), wanted[gap])
            self.missing = self.missing[0] + gap.size, self.missing[1] + nowhere

    def merge(self, other: PropensitySums) -> None:
        """Add the steps of another, whose policies have the same numbers."""
        self.surprise += other.surprise
        self.variance += other.variance
        self.jump = np.maximum(self.jump, other.jump)
        self.acted += other.acted
        self.missing = self.missing[0] + other.missing[0], self.missing[1] + other.missing[1]
        self.finite &= other.finite

    def finalise(self) -> PropensityReport:
        """Return the calibration of each policy that acted, the alarms and the support."""
        own, nowhere = self.missing
        # weights against a mixture lack support only where no policy at all can act so
        support = {scheme: own if scheme == "basic" else nowhere for scheme in SCHEMES}
        surprise, variance, acted = self.surprise, self.variance, self.acted
        flat = variance <= acted * _ROUNDING**2  # uniform, deterministic: rounding is all there is
        exact = flat & (np.abs(surprise) <= acted * _ROUNDING)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.where(exact, 0.0, surprise / np.sqrt(variance))
            exponent = surprise**2 / (2 * variance + self.jump * np.abs(surprise) / 1.5)
        z[acted == 0] = np.nan
        limit = np.log(2 * np.count_nonzero(acted) / _FALSE_ALARM)
        alarms = np.flatnonzero(((exponent > limit) | flat) & ~exact & (acted > 0))
        return PropensityReport(z, tuple(alarms.tolist()), support if self.finite else {})


def _uncovered(
    data: Trajectories, behaviours: Behaviours, observations: batches.Tree, target: FloatArray
) -> int:
    """Count the steps at which the target may act as no behaviour policy does."""
    reachable = np.zeros(target.shape, dtype=bool)
    for k in behaviours.policies:
        reachable |= data.policies[k].probs(observations) > 0
        if np.all(reachable | (target == 0)):
            return 0
    return int(np.count_nonzero(np.any((target > 0) & ~reachable, axis=1)))
