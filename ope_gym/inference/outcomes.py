"""Returns that were seen, and returns that may not have been seen yet.

A sample in which nearly all episodes end alike shows no spread, and yet a rare outcome may be
missing. With m effective episodes an outcome of probability q is missing with probability
(1 - q)^m, so one of probability up to -ln(alpha) / m may be (the rule of three, for alpha = .05).
How far it would move the value depends on the returns that are possible.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, annuity_of, step_numbers
from ope_gym.inference.errors import centre
from ope_gym.inference.intervals import Interval

_EQUAL = 1e-9  # of the largest return: returns that differ by less are equal
_PRIOR = 5.0  # effective episodes that the spread inside the behaviours counts for


def discounted_returns(rewards: FloatArray, offsets: IntArray, gamma: float) -> FloatArray:
    """Return the discounted returns (n,) of episodes with rewards (S,)."""
    if gamma != 1.0:
        rewards = rewards * np.float64(gamma) ** step_numbers(offsets)
    return np.asarray(np.add.reduceat(rewards, offsets[:-1]))


@dataclass
class RewardSums:
    """Accumulate what possible returns follow from.

    Args:
        low: lowest reward.
        high: highest reward.
        running: sum of all rewards but those of last steps.
        steps: number of those steps.
    """

    low: float
    high: float
    running: float
    steps: int

    @classmethod
    def of(cls, rewards: FloatArray, offsets: IntArray) -> RewardSums:
        """Sum the rewards (S,) of some episodes."""
        running = float(rewards.sum() - rewards[offsets[1:] - 1].sum())
        steps = rewards.size - offsets.size + 1
        return cls(float(rewards.min()), float(rewards.max()), running, steps)

    def merge(self, other: RewardSums) -> None:
        """Add the rewards of further episodes."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.running += other.running
        self.steps += other.steps


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Describe the returns of the episodes and those that may be unseen; n trajectories.

    Args:
        returns: (n,) discounted.
        seen: lowest and highest return to expect of an episode: those that were seen, 0, and that
            of the longest episode at the mean reward of a step (last steps left out).
        allowed: lowest and highest return if every step of the longest episode paid the lowest or
            the highest reward that was seen, or 0; None if no reward but 0 was seen.
        limited: whether the longest possible episode is known, from a time limit.
    """

    returns: FloatArray
    seen: tuple[float, float]
    allowed: tuple[float, float] | None
    limited: bool

    @classmethod
    def of(
        cls, returns: FloatArray, rewards: RewardSums, gamma: float, longest: int, limited: bool
    ) -> Outcomes:
        """Describe the outcomes of episodes with discounted returns (n,)."""
        unit = annuity_of(gamma, longest)
        rate = unit * rewards.running / rewards.steps if rewards.steps else 0.0
        ends = np.append(returns, [0.0, rate])
        allowed = min(rewards.low, 0.0) * unit, max(rewards.high, 0.0) * unit
        known = rewards.low != 0.0 or rewards.high != 0.0
        return cls(
            returns, (float(ends.min()), float(ends.max())), allowed if known else None, limited
        )

    def unseen(self, value: float, ess: float, log_weights: FloatArray) -> tuple[float, float]:
        """Return by how much outcomes of a chance of 1 / ESS would lower and raise the value.

            max(0, 2 s - 1) |end - value| / ESS,   s the share of the most common return

        The factor is 1 where all episodes agree and 0 where no return has a majority: only beside a
        majority are the others rare outcomes, of which more kinds may be missing.

        Args:
            value: the estimate.
            ess: effective sample size.
            log_weights: (n,) of whole episodes.
        """
        top = float(log_weights.max())
        if not (np.isfinite(value) and np.isfinite(top) and ess > 1.0):
            return 0.0, 0.0
        weights = np.exp(log_weights - top)
        unit = _EQUAL * max(float(np.abs(self.returns).max()), np.finfo(np.float64).tiny)
        kinds = np.unique(np.round(self.returns / unit), return_inverse=True)[1].ravel()
        share = float(np.bincount(kinds, weights).max() / weights.sum())
        lump, (low, high) = max(0.0, 2.0 * share - 1.0) / ess, self.seen
        return lump * max(0.0, value - low), lump * max(0.0, high - value)

    def shifted(self, interval: Interval, missing: float) -> Interval:
        """Return the interval if a share of the episodes may have any return to expect."""
        if missing == 0.0:
            return interval
        low, high = ((1.0 - missing) * end for end in (interval.low, interval.high))
        least, most = (missing * end for end in self.seen)
        return dataclasses.replace(interval, low=low + least, high=high + most)

    def cut(self, interval: Interval) -> Interval:
        """Return the interval without values that the recorded rewards do not allow.

        A bound other than 0 rests on the longest episode, and is used only if that is known. An
        interval that would shrink to a point is left as it is.
        """
        if self.allowed is None:
            return interval
        least, most = self.allowed
        low = max(interval.low, least) if self.limited or least == 0.0 else interval.low
        high = min(interval.high, most) if self.limited or most == 0.0 else interval.high
        return dataclasses.replace(interval, low=low, high=high) if low < high else interval

    def deviation(self, log_weights: FloatArray, strata: IntArray) -> float:
        """Estimate the standard deviation of one return of the target.

        From the weighted variance with ESS m, and the unweighted one inside strata as if it came
        from five more episodes: it decides where the weights leave next to nothing.

        Args:
            log_weights: (n,) of whole episodes.
            strata: (n,) the groups inside which episodes are alike.
        """
        unit, top = float(np.abs(self.returns).max()), float(log_weights.max())
        if unit == 0.0:
            return 0.0
        returns = self.returns / unit  # whose squares could overflow
        weights = np.exp(log_weights - top) if np.isfinite(top) else np.zeros(log_weights.size)
        apart = centre(returns, strata)
        freedom = max(apart.size - int(np.count_nonzero(np.bincount(strata))), 1)
        inside = float(apart @ apart) / freedom
        total = float(weights.sum())
        size = total**2 / float(weights @ weights) if total > 0.0 else 0.0
        if size <= 1.0 + 1e-9:
            return unit * float(np.sqrt(inside))
        mean = float(weights @ returns) / total
        weighted = float(weights @ (returns - mean) ** 2) / total * size / (size - 1.0)
        return unit * float(np.sqrt((size * weighted + _PRIOR * inside) / (size + _PRIOR)))
