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

from ope_gym.arrays import (
    FloatArray,
    IntArray,
    annuity_of,
    ends_of,
    longest_of,
    step_numbers,
)
from ope_gym.inference.intervals import Interval

EQUAL = 1e-9  # of the largest return: returns that differ by less are equal
_PLACES = 512  # columns whose candidates stay in the first-level cache
_PRIOR = 5.0  # effective episodes that the spread inside the behaviours counts for


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

    def merge(self, other: RewardSums) -> None:
        """Add the rewards of further episodes."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.running += other.running
        self.steps += other.steps


def tally(
    rewards: FloatArray,
    offsets: IntArray,
    gamma: float,
    ends: tuple[float, float] | None = None,
) -> tuple[FloatArray, FloatArray, RewardSums]:
    """Sum rewards (S,): returns (n,), discounted returns (n,), and `RewardSums`.

    Args:
        rewards: (S,).
        offsets: (n + 1,) first step of each episode, and S.
        gamma: Discount.
        ends: The lowest and the highest reward, where a check has looked for them already.
    """
    low, high = ends or ends_of(rewards)
    longest = longest_of(offsets)
    if longest == 1:
        return rewards, rewards, RewardSums(low, high, 0.0, 0)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite return is judged later
        returns = np.add.reduceat(rewards, offsets[:-1])
        running = float(np.sum(returns - rewards[offsets[1:] - 1]))
        discounted = returns
        if gamma != 1.0:
            discount = gamma ** np.arange(longest)
            discounted = np.add.reduceat(discount[step_numbers(offsets)] * rewards, offsets[:-1])
    return returns, discounted, RewardSums(low, high, running, rewards.size - returns.size)


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
        largest: the largest |return| that was seen.
        stated: whether somebody who knows the environment said which returns are possible: `seen`
            and `allowed` are these.
    """

    returns: FloatArray
    seen: tuple[float, float]
    allowed: tuple[float, float] | None
    limited: bool
    largest: float
    stated: bool = False

    @classmethod
    def of(
        cls,
        returns: FloatArray,
        rewards: RewardSums,
        gamma: float,
        longest: int,
        limited: bool,
        return_range: tuple[float, float] | None = None,
    ) -> Outcomes:
        """Describe the outcomes of episodes with discounted returns (n,).

        Args:
            returns: (n,) discounted.
            rewards: What else is known of the rewards.
            gamma: Discount.
            longest: Steps of the longest possible episode.
            limited: Whether that is known, from a time limit.
            return_range: The lowest and the highest possible return, if somebody knows them.
        """
        unit = annuity_of(gamma, longest)
        rate = unit * rewards.running / rewards.steps if rewards.steps else 0.0
        low, high = (rewards.low, rewards.high) if longest == 1 else ends_of(returns)
        if return_range is not None:
            _refuse_beyond(return_range, low, high)
            return cls(returns, return_range, return_range, True, max(-low, high), stated=True)
        ends = np.array([low, high, 0.0, rate])
        allowed = min(rewards.low, 0.0) * unit, max(rewards.high, 0.0) * unit
        known = rewards.low != 0.0 or rewards.high != 0.0
        seen = float(ends.min()), float(ends.max())
        return cls(returns, seen, allowed if known else None, limited, max(-low, high))

    def majority(self, weights: FloatArray) -> float:
        """Return the share s of the weights (n,) that the most common return has, if above 1/2."""
        if self.stated:  # whatever was seen, the rest of the range is possible
            return 1.0
        unit = EQUAL * max(self.largest, float(np.finfo(np.float64).tiny))
        return majority_share(self.returns, weights, unit)

    def unseen(self, value: float, ess: float, share: float) -> tuple[float, float]:
        """Return by how much outcomes of a chance of 1 / ESS would lower and raise the value.

            max(0, 2 s - 1) |end - value| / ESS,   s the share of the most common return

        The factor is 1 where all episodes agree and 0 where no return has a majority: only beside a
        majority are the others rare outcomes, of which more kinds may be missing. Where the range
        of returns was stated, the factor is 1.

        Args:
            value: the estimate.
            ess: effective sample size.
            share: s, see `majority`.
        """
        if not (np.isfinite(value) and ess > 1.0):
            return 0.0, 0.0
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

    def deviation(
        self, weights: FloatArray, strata: IntArray, sizes: IntArray | None = None
    ) -> float:
        """Estimate the standard deviation of one return of the target; 0 if it is but rounding.

        From the weighted variance with ESS m, and the unweighted one inside strata as if it came
        from five more episodes: it decides where the weights leave next to nothing.

        Args:
            weights: (n,) of whole episodes, in any unit.
            strata: (n,) the groups inside which episodes are alike.
            sizes: how many episodes each of them has, if it is known.
        """
        unit = self.largest
        if unit == 0.0:
            return 0.0
        returns = self.returns
        if 1e-100 < unit < 1e100:
            unit = 1.0
        else:  # squares could overflow or underflow
            returns = returns / unit
        counts = np.bincount(strata) if sizes is None else sizes
        means = np.bincount(strata, returns, minlength=counts.size) / np.maximum(counts, 1)

        freedom = max(returns.size - int(np.count_nonzero(counts)), 1)
        apart = means.take(strata)
        np.subtract(returns, apart, out=apart)
        inside = float(apart @ apart) / freedom
        total, square = float(weights.sum()), float(weights @ weights)
        size = total**2 / square if total > 0.0 else 0.0
        variance = inside
        if size > 1.0 + 1e-9:
            np.subtract(returns, weights @ returns / total, out=apart)
            weighted = float(weights @ np.square(apart, out=apart)) / total * size / (size - 1.0)
            variance = (size * weighted + _PRIOR * inside) / (size + _PRIOR)
        deviation = unit * float(np.sqrt(variance))
        return 0.0 if deviation <= EQUAL * self.largest else deviation


def _refuse_beyond(return_range: tuple[float, float], low: float, high: float) -> None:
    """Raise if a recorded return lies beyond the range of those that are possible."""
    slack = EQUAL * max(map(abs, return_range))
    if low < return_range[0] - slack or high > return_range[1] + slack:
        beyond = low if low < return_range[0] - slack else high
        raise ValueError(
            f"return_range is {return_range!r}, but an episode returned {beyond:.6g}: give the "
            "lowest and the highest (discounted) return that an episode can have"
        )


def unseen_beside(
    returns: FloatArray, value: float, seen: tuple[float, float]
) -> tuple[float, float]:
    """Return what `Outcomes.unseen` does, of episodes of the policy itself.

    Infinite where no return but 0 was ever seen: nothing shows how large one can be.

    Args:
        returns: (n,) of the episodes.
        value: the estimate.
        seen: the lowest and the highest return that was ever seen; 0 may always come.
    """
    low, high = min(seen[0], 0.0), max(seen[1], 0.0)
    if low == high:
        return np.inf, np.inf
    kinds, middle = np.round(returns / (EQUAL * max(high, -low))), returns.size // 2
    median = np.partition(kinds, middle)[middle]  # which a majority holds
    share = float(np.mean(kinds == median))
    lump = max(0.0, 2.0 * share - 1.0) / returns.size
    return lump * max(0.0, value - low), lump * max(0.0, high - value)


def majority_share(values: FloatArray, weights: FloatArray, unit: float) -> float:
    """Return the share of the weights (n,) that the value (n,) with more than half of them has.

    Values are equal if they are so many units after rounding. If no value has a majority, the share
    of some value.

    >>> majority_share(np.array([1.0, 3.0, 1.0]), np.array([0.3, 0.4, 0.3]), 1e-9)
    0.6
    """
    total = float(weights.sum())
    if not total > 0.0:
        return np.nan
    kinds = values / unit
    np.round(kinds, out=kinds)
    return float(weights @ (kinds == _majority(kinds, weights))) / total


def _majority(values: FloatArray, weights: FloatArray) -> float:
    """Return the value (n,) that has more than half of the weights; some value if none has."""
    from ope_gym.kernels import vote

    winners, leads = np.zeros((2, min(_PLACES, values.size)))  # columns vote side by side
    whole = values.size // winners.size * winners.size
    columns = values[:whole].reshape(-1, winners.size), weights[:whole].reshape(-1, winners.size)
    vote(*columns, winners, leads)
    left = np.append(winners, values[whole:]), np.append(leads, weights[whole:])
    winner, lead = np.zeros((2, 1))
    vote(left[0][:, None], left[1][:, None], winner, lead)
    return float(winner[0])
