"""Checks of recorded propensities against the policies, as sums: `update`, `merge`, `finalise`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, one_step_earlier
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy, log_prob_moments
from ope_gym.policies.numerics import moments_of
from ope_gym.verdict import Reason
from ope_gym.weights.behaviours import ROWS, Behaviours, parts
from ope_gym.weights.formula import SCHEMES

_FALSE_ALARM = 1e-3  # probability of an alarm about propensities that are right
_TESTS = 3  # that share it: each policy, all policies in one direction, all in any direction
_RATIO_LIMIT = 3.5  # standard errors: both sides together are rarer than such an alarm
_SMALL = 1e-3  # of a mean ratio: less is rounding, however many steps make it significant
_UNSEEN = 7.0  # steps with ratio 0 that may be missing: -ln(1e-3)
_LARGEST = 0.02  # share of one ratio in the sum of squares from which on the tail is too heavy
_FEWEST = 100  # steps: with fewer it cannot be told how heavy the tail is
_HUGE = 300.0  # log of the largest weight in these sums
_BYTES = 1 << 24  # of the observations that are put in order by policy at once
_ROUNDING = 1e-5  # of one log-probability, not to be called a surprise


@dataclass(frozen=True)
class PropensityReport:
    """Checks of the recorded propensities against the policies.

    The surprise ln pi(a|s) + H has mean 0 if the policy acted as recorded, and is the score of a
    wrong temperature. Three tests share the probability of a false alarm: each policy by itself,
    the sum over all policies (a wrong temperature of all), and the sum of the squares (other wrong
    things). Their tails are those of Bernstein's inequality with the largest single surprise as the
    jump: one rare but legal action raises no alarm.

    Args:
        calibration: (all policies,) Z_k = sum [ln pi(a|s) + H] / sqrt(sum Var[ln pi]) over the
            steps at which policy k acted, about standard normal if they were recorded rightly.
        pooled: the same over the steps of all policies; NaN if unknown.
        alarms: policies whose surprise is too large for chance.
        together: whether that of all policies together is.
        support: by scheme, visited steps at which the target may choose an action that its own
            behaviour (basic), or every behaviour (fused, optimal), never would.
        missing: Share of the target's episodes that do so at some step, by scheme.
    """

    calibration: FloatArray
    pooled: float
    alarms: tuple[int, ...]
    together: bool
    support: dict[str, int]
    missing: dict[str, float]

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Evidence against recorded propensities: of some policies, or of all together."""
        z = self.calibration
        if self.alarms:
            worst = max((float(z[k]) for k in self.alarms), key=abs)
            return (Reason("propensities_wrong", policies=self.alarms, z=worst),)
        if not self.together:
            return ()
        if abs(self.pooled) >= np.sqrt(2 * np.log(2 * _TESTS / _FALSE_ALARM)):
            return (Reason("propensities_wrong_together", z=self.pooled),)
        square = float(np.mean(z[np.isfinite(z) & (z != 0.0)] ** 2))
        return (Reason("propensities_wrong_squared", square=square),)

    @property
    def misfit(self) -> tuple[Reason, ...]:
        """Evidence against estimated propensities: the actions of left-out episodes."""
        if not self.alarms and not self.together:
            return ()
        largest = max([self.pooled, *self.calibration[list(self.alarms)]], key=abs)
        return (Reason("estimated_propensities_misfit", z=float(largest)),)


@dataclass
class _RatioSums:
    """Sums of R - 1 over some steps, see `StepRatios`."""

    steps: int
    log_top: float
    total: float
    square: float

    def merge(self, other: _RatioSums) -> None:
        self.steps += other.steps
        self.log_top = max(self.log_top, other.log_top)
        self.total += other.total
        self.square += other.square


@dataclass(frozen=True)
class StepRatios:
    """Test whether the ratios of each step average to 1, as those of right propensities do.

    R_t = w_t / w_{t-1}, the target's probability over that of the mixture given the steps before,
    has mean 1 whatever came before, so sum (R - 1) / sqrt(sum (R - 1)^2) is about standard normal.
    Above: R >= 0, and a few steps with R = 0 may be missing by chance; they are added. Below: large
    ratios may be missing. Two more of the largest are added, and where one holds more than 2 % of
    the sum of squares nothing is said, since the next one may be larger still.

    Args:
        scheme: Weighting scheme.
    """

    scheme: str
    in_threads: ClassVar[bool] = True

    def part(self, chunk: Any) -> _RatioSums:
        """Sum over the weights of a chunk."""
        log_w = chunk.log_weights[self.scheme]
        before = one_step_earlier(log_w, chunk.offsets, 0.0)
        known = before > -np.inf
        change = np.subtract(log_w, before, out=np.zeros(log_w.size), where=known)
        top = float(change.max())
        excess = np.exp(np.minimum(change, _HUGE, out=change), out=change)
        excess -= 1.0
        return _RatioSums(
            int(np.count_nonzero(known)), top, float(excess.sum()), float(excess @ excess)
        )

    def total(self, merged: _RatioSums) -> tuple[Reason, ...]:
        """Return what speaks against the propensities; empty if nothing does."""
        total, square = merged.total, merged.square
        if merged.steps == 0 or merged.log_top > _HUGE:
            return ()  # so large a ratio would decide alone
        top, mean = float(np.expm1(merged.log_top)), 1.0 + total / merged.steps
        if abs(mean - 1.0) < _SMALL:
            return ()
        if total - _UNSEEN > _RATIO_LIMIT * np.sqrt(square + _UNSEEN):
            return (Reason("ratios_high", mean=mean),)
        even = merged.steps >= _FEWEST and max(top, 0.0) ** 2 <= _LARGEST * square
        if even and total + 2 * top < -_RATIO_LIMIT * np.sqrt(square + 2 * top**2):
            return (Reason("ratios_low", mean=mean),)
        return ()


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
        gaps: steps at which the target may act as their own behaviour never would, and as no
            behaviour would.
        leaving: Summed weights of the target's actions there, by scheme.
        staying: Summed last weights of the episodes, by scheme.
        finite: whether all action sets are finite, so that support is known.
        covered: whether all policies give every action some probability: then the sums do not
            depend on the target.
    """

    target: Policy
    size: int
    surprise: FloatArray = field(init=False)
    variance: FloatArray = field(init=False)
    jump: FloatArray = field(init=False)
    acted: FloatArray = field(init=False)
    gaps: tuple[int, int] = (0, 0)
    leaving: dict[str, float] = field(default_factory=dict)
    staying: dict[str, float] = field(default_factory=dict)
    finite: bool = True
    covered: bool = True

    def __post_init__(self) -> None:
        self.surprise, self.variance = np.zeros(self.size), np.zeros(self.size)
        self.jump, self.acted = np.zeros(self.size), np.zeros(self.size)

    def update(
        self,
        data: Trajectories,
        behaviours: Behaviours,
        groups: IntArray | None = None,
        kept: dict[str, Any] | None = None,
    ) -> FloatArray | None:
        """Add trajectories whose policies are numbered as in all.

        Args:
            data: the trajectories.
            behaviours: who recorded them.
            groups: (K,) of partial mixtures, which cover what their own behaviours do; None for
                the mixture of all.
            kept: what was summed over the same trajectories for another target, if anything.

        Returns:
            (2, S) the probability with which the target does what its own behaviour, and what no
            behaviour, ever would; None if it is 0 everywhere.
        """
        lost = np.zeros((2, data.n_steps))
        if groups is not None:
            for part in parts(data, behaviours, groups):
                lost_there = self.update(part.data, part.behaviours)
                if lost_there is not None:
                    lost[:, part.rows] = lost_there
            return lost if lost.any() else None
        known = (self.target, *(data.policies[k] for k in behaviours.policies))
        self.finite &= all(hasattr(policy, "probs") for policy in known)
        actions = self._actions(data) if self.finite else 0
        if kept and self.finite and actions == kept["actions"]:
            self.merge(kept["sums"])
            return None
        for k, rows, seen in by_policy(data):
            probs = self._surprise(data.policies[k], k, seen, data.log_probs[rows])
            if self.finite and probs is not None:
                self._support(data, behaviours, k, probs, seen, rows, lost)
        self.acted += np.bincount(data.policy_ids, minlength=self.size)
        if kept is not None and self.finite and self.covered:
            kept["sums"], kept["actions"] = PropensitySums(self.target, self.size), actions
            kept["sums"].merge(self)
        return lost if lost.any() else None

    def _actions(self, data: Trajectories) -> int:
        """Return the number of actions of a finite target."""
        first = batches.take(data.observations, slice(0, 1))
        return int(self.target.probs(first).shape[1])  # type: ignore[attr-defined]

    def _surprise(
        self, policy: Policy, k: int, seen: batches.Tree, logged: FloatArray
    ) -> FloatArray | None:
        """Add the surprises of policy k at steps where it acted; return its probabilities (m, A).

        Args:
            policy: the policy.
            k: its number.
            seen: (m,) observations.
            logged: (m,) log-probabilities of its actions.
        """
        probs: FloatArray | None = policy.probs(seen) if hasattr(policy, "probs") else None
        moments = (
            moments_of(probs)
            if probs is not None and not hasattr(policy, "log_prob_moments")
            else log_prob_moments(policy, seen)
        )
        if moments is None:
            self.variance[k] = np.nan
            return None
        surprises = logged - moments[0]
        self.surprise[k] += np.sum(surprises)
        self.variance[k] += np.sum(moments[1])
        self.jump[k] = max(self.jump[k], np.abs(surprises).max())
        return probs

    def _support(
        self,
        data: Trajectories,
        behaviours: Behaviours,
        k: int,
        probs: FloatArray,
        seen: batches.Tree,
        rows: IntArray,
        lost: FloatArray,
    ) -> None:
        """Add up where the target may act as policy k, and all behaviours, never would.

        Args:
            data: the trajectories.
            behaviours: who recorded them.
            k: the policy that acted.
            probs: (m, A) its probabilities.
            seen: (m,) observations.
            rows: (m,) steps.
            lost: (2, S) written at these steps, as `update` returns it.
        """
        covered = bool(probs.min() > 0)  # then the target's own probabilities do not matter
        wanted = self.target.probs(batches.take(seen, slice(0, 1)) if covered else seen)  # type: ignore[attr-defined]
        if probs.shape[1] != wanted.shape[1]:
            raise ValueError(
                f"target has {wanted.shape[1]} actions, but policy {k} has {probs.shape[1]}: both "
                "must be policies of one environment"
            )
        if covered:
            return
        self.covered = False
        alone = np.sum(wanted * (probs == 0), axis=1)
        gap = np.flatnonzero(alone)
        if not gap.size:
            return
        nowhere = _uncovered(data, behaviours, batches.take(seen, gap), wanted[gap])
        lost[0, rows], lost[1, rows[gap]] = alone, nowhere
        self.gaps = self.gaps[0] + gap.size, self.gaps[1] + int(np.count_nonzero(nowhere))

    def leave(
        self, scheme: str, log_weights: FloatArray, offsets: IntArray, lost: FloatArray | None
    ) -> None:
        """Add the weights with which episodes of the target leave the support, and stay in it.

        An episode that has come to step t with weight w_{t-1} leaves there with probability lost_t;
        what is left at the end has weight w. Both sums have an expected value of n.

        Args:
            scheme: Weighting scheme.
            log_weights: (S,).
            offsets: (n + 1,).
            lost: (2, S) as `update` returns it, or None.
        """
        last = log_weights[offsets[1:] - 1]
        self.staying[scheme] = float(np.exp(np.minimum(last, _HUGE)).sum())
        self.leaving[scheme] = 0.0
        if lost is not None:
            weights = np.exp(np.minimum(log_weights, _HUGE))
            came = one_step_earlier(weights, offsets, 1.0)
            self.leaving[scheme] = float(came @ lost[0 if scheme == "basic" else 1])

    def merge(self, other: PropensitySums) -> None:
        """Add the steps of another, whose policies have the same numbers."""
        self.surprise += other.surprise
        self.variance += other.variance
        self.jump = np.maximum(self.jump, other.jump)
        self.acted += other.acted
        self.gaps = self.gaps[0] + other.gaps[0], self.gaps[1] + other.gaps[1]
        for mine, theirs in ((self.leaving, other.leaving), (self.staying, other.staying)):
            for scheme, weight in theirs.items():
                mine[scheme] = mine.get(scheme, 0.0) + weight
        self.finite &= other.finite

    def finalise(self) -> PropensityReport:
        """Return the calibration of each policy that acted, the alarms and the support."""
        own, nowhere = self.gaps
        # weights against a mixture lack support only where no policy at all can act so
        support = {scheme: own if scheme == "basic" else nowhere for scheme in SCHEMES}
        missing = {
            scheme: leaving / (leaving + self.staying[scheme])
            for scheme, leaving in self.leaving.items()
            if leaving + self.staying[scheme] > 0.0
        }
        surprise, variance, acted = self.surprise, self.variance, self.acted
        flat = variance <= acted * _ROUNDING**2  # uniform, deterministic: rounding is all there is
        exact = flat & (np.abs(surprise) <= acted * _ROUNDING)
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.where(exact, 0.0, surprise / np.sqrt(variance))
            exponent = surprise**2 / (2 * variance + self.jump * np.abs(surprise) / 1.5)
        z[acted == 0] = np.nan
        chance = _FALSE_ALARM / _TESTS
        limit = np.log(2 * np.count_nonzero(acted) / chance)
        alarms = np.flatnonzero(((exponent > limit) | flat) & ~exact & (acted > 0))
        pooled, together = self._together(exponent, (acted > 0) & ~flat, chance)
        return PropensityReport(
            z,
            pooled,
            tuple(alarms.tolist()),
            together,
            support if self.finite else {},
            missing if self.finite else {},
        )

    def _together(
        self, exponent: FloatArray, used: NDArray[np.bool_], chance: float
    ) -> tuple[float, bool]:
        """Return Z over all policies, and whether it, or the sum of squares, is an alarm."""
        from scipy.special import gammainccinv

        used &= np.isfinite(exponent)
        if not used.any():
            return np.nan, False
        surprise, variance = float(self.surprise[used].sum()), float(self.variance[used].sum())
        jump = float(self.jump[used].max())
        one_way = surprise**2 / (2 * variance + jump * abs(surprise) / 1.5)
        # 2 exponent is at most z^2, and their sum over K policies then at most chi2 with K degrees
        limit = float(gammainccinv(np.count_nonzero(used) / 2, chance))
        any_way = float(exponent[used].sum())
        return surprise / np.sqrt(variance), one_way > np.log(2 / chance) or any_way > limit


def by_policy(data: Trajectories) -> Iterator[tuple[int, IntArray, batches.Tree]]:
    """Yield, block by block, each policy's number, the steps at which it acted, and what it saw.

    Args:
        data: the trajectories.
    """
    block = _rows(data)
    for start in range(0, data.n_steps, block):
        acting = data.policy_ids[start : start + block]
        order = np.argsort(acting, kind="stable")
        observations = batches.take(data.observations, slice(start, start + acting.size))
        observations, acting = batches.take(observations, order), acting[order]
        bounds = np.append(0, np.flatnonzero(np.diff(acting)) + 1)
        for begin, end in zip(bounds, np.append(bounds[1:], acting.size), strict=True):
            seen = batches.take(observations, slice(begin, end))
            yield int(acting[begin]), start + order[begin:end], seen


def _rows(data: Trajectories) -> int:
    """Return how many steps to look at together: many, for a policy is asked once in each block."""
    size = sum(leaf.nbytes for leaf in batches.leaves(data.observations)) / data.n_steps
    return int(np.clip(_BYTES / max(size, 1.0), ROWS // 8, 8 * ROWS))


def _uncovered(
    data: Trajectories, behaviours: Behaviours, observations: batches.Tree, target: FloatArray
) -> FloatArray:
    """Return (n,) the probability with which the target acts as no behaviour policy does."""
    reachable = np.zeros(target.shape, dtype=bool)
    for k in behaviours.policies:
        reachable |= data.policies[k].probs(observations) > 0
        if np.all(reachable | (target == 0)):
            return np.zeros(len(target))
    return np.asarray(np.sum(target * ~reachable, axis=1))
