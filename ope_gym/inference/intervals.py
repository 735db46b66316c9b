"""Confidence intervals: ess-t, bootstrap (percentile, BCa), betting.

A kind of interval is a small frozen class with a name and a method `interval(evidence, level)`; a
new one is a class here and a line in `KINDS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from ope_gym.arguments import choice, pair, whole
from ope_gym.arrays import FloatArray, IntArray, annuity
from ope_gym.inference.errors import Spread, Tails, centre, join_single

NORMAL = Tails(0.0, np.inf, np.nan)  # tails that call for nothing
_ROUNDING = 1e-12  # of the largest replicate, not to be called a difference
_TAILS = 16  # levels at which `widened` looks: twice as many move no end by a thousandth


@dataclass(frozen=True)
class Interval:
    """A confidence interval; undefined ends are NaN.

    Args:
        low: lower end.
        high: upper end.
        level: nominal coverage.
        method: how it was made, a name in `KINDS`.
    """

    low: float
    high: float
    level: float
    method: str

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, eq=False)
class Evidence:
    """The numbers from which an interval is made; n trajectories.

    Args:
        value: the estimate.
        influence: (n,) influence values.
        spread: Spread of the values behind the error, the influence values as a rule.
        strata: (n,) the groups inside which trajectories are alike.
        ess: smallest effective sample size over the steps.
        gamma: discount.
        replicates: (R,) of the bootstrap; None without one.
        bets: (2, n) sums for betting; None without it.
    """

    value: float
    influence: FloatArray
    spread: Spread
    strata: IntArray
    ess: float
    gamma: float = 1.0
    replicates: FloatArray | None = None
    bets: FloatArray | None = None


class IntervalKind(Protocol):
    """A way to make intervals."""

    @property
    def name(self) -> str:
        """The name by which users choose it."""
        ...

    def interval(self, evidence: Evidence, level: float) -> Interval:
        """Make the interval of an estimate."""
        ...


@dataclass(frozen=True)
class EssT:
    """Take Student's t with as many degrees of freedom as the weights leave; the default."""

    name: ClassVar[str] = "ess-t"

    def interval(self, evidence: Evidence, level: float) -> Interval:
        """Make the interval from influence values and effective sample size."""
        spread = evidence.spread
        return ess_t(evidence.value, spread.cautious, evidence.ess, level, spread.tails)


@dataclass(frozen=True)
class Bootstrap:
    """Draw trajectories anew inside each behaviour and recompute the whole estimator.

    Args:
        resamples: number of replicates.
        method: "percentile" or "bca" (bias-corrected and accelerated).
    """

    resamples: int = 1000
    method: str = "percentile"

    def __post_init__(self) -> None:
        whole("resamples", self.resamples, 2, "a bootstrap needs at least 2, better 1000")
        choice("method", self.method, ("percentile", "bca"))

    @property
    def name(self) -> str:
        """The name of the method."""
        return self.method

    def interval(self, evidence: Evidence, level: float) -> Interval:
        """Make the interval from the replicates."""
        if evidence.replicates is None:
            return undefined(level, self.name)
        if self.method == "percentile":
            return percentile(evidence.replicates, level)
        return bca(evidence.replicates, evidence.value, evidence.influence, evidence.strata, level)


@dataclass(frozen=True)
class Betting:
    """Bound the value for every n by betting against it; rewards must be bounded.

    It is made from plain weights, so it contains the value, but not always the normalised estimate.

    Args:
        reward_range: lowest and highest possible reward.
        horizon: longest possible episode; by default the recorded time limit.
    """

    reward_range: tuple[float, float] | None = None
    horizon: int | None = None
    name: ClassVar[str] = "betting"

    def __post_init__(self) -> None:
        if self.reward_range is None:
            raise ValueError(
                "interval='betting' needs the range that every reward obeys: give "
                "interval=Betting(reward_range=(0, 1)), for instance, for CartPole"
            )
        object.__setattr__(self, "reward_range", pair("reward_range", self.reward_range))
        if self.horizon is not None:
            whole("horizon", self.horizon, 1, "the longest possible episode has at least 1 step")

    def interval(self, evidence: Evidence, level: float) -> Interval:
        """Make the interval from the sums of weighted rewards above and below the bounds."""
        assert evidence.bets is not None  # asked for with every betting interval
        assert self.reward_range is not None  # checked when it was made
        assert self.horizon is not None  # filled in from the recorded time limit
        return betting(evidence.bets, evidence.gamma, self.horizon, self.reward_range, level)


@dataclass(frozen=True)
class NoInterval:
    """Leave error and interval out, and with them the passes that only they need."""

    name: ClassVar[str] = "none"

    def interval(self, evidence: Evidence, level: float) -> Interval:
        """Return an interval without ends."""
        return undefined(level, self.name)


KINDS: dict[str, Callable[[], IntervalKind]] = {
    "ess-t": EssT,
    "percentile": Bootstrap,
    "bca": lambda: Bootstrap(method="bca"),
    "betting": Betting,
}


def interval_kind(interval: str | IntervalKind | None) -> IntervalKind:
    """Return the kind that a name stands for; a kind is returned as it is."""
    if interval is None:
        return NoInterval()
    if isinstance(interval, str) and interval in KINDS:
        return KINDS[interval]()
    if isinstance(interval, str) or not hasattr(interval, "interval"):
        raise ValueError(
            f"interval is {interval!r}; choose one of {', '.join(KINDS)}, or give EssT(), "
            "Bootstrap(...), Betting(...), or None for the value alone"
        )
    return interval


def undefined(level: float, method: str) -> Interval:
    """Return the interval of an estimate whose error cannot be known."""
    return Interval(np.nan, np.nan, level, method)


def with_bias(interval: Interval, value: float, bias: float) -> Interval:
    """Widen an interval around an estimate by a bias of known size and unknown sign."""
    if bias == 0.0 or not np.isfinite(interval.low):
        return interval
    from scipy.special import ndtri

    reach = float(ndtri(0.5 + interval.level / 2)) * bias
    return dataclasses.replace(
        interval,
        low=value - float(np.hypot(max(value - interval.low, 0.0), reach)),
        high=value + float(np.hypot(max(interval.high - value, 0.0), reach)),
    )


def student_t(value: float, error: float, freedom: float, level: float) -> Interval:
    """Return value ± t error with these degrees of freedom."""
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, 0.5 + level / 2)) * error
    return Interval(value - half, value + half, level, "t")


def whatever_bias(interval: Interval, value: float, guess: float) -> Interval:
    """Return an interval that is short if a guess is good, and holds whatever its bias.

        low = clip(guess, value - far, value - near)
        high = clip(guess, value + near, value + far)

    near and far are the half widths of one-sided misses of 9/10 and 1/10 of all: on the side of
    the guess the interval hardly reaches beyond it, on the other not beyond near. Whatever the bias
    of the guess, the misses add up to 1 - level (Pratt, 1961, Length of confidence intervals,
    https://doi.org/10.2307/2282079).

    Args:
        interval: Around the estimate alone.
        value: The estimate.
        guess: Another, whose error is independent of that of the first; NaN if there is none.
    """
    if not np.isfinite(guess):
        return interval
    from scipy.special import ndtri

    miss = 1.0 - interval.level
    near, far = (float(ndtri(1.0 - share * miss) / ndtri(1.0 - miss / 2)) for share in (0.9, 0.1))
    below, above = max(value - interval.low, 0.0), max(interval.high - value, 0.0)
    low = np.clip(guess, value - far * below, value - near * below)
    high = np.clip(guess, value + near * above, value + far * above)
    return dataclasses.replace(interval, low=float(low), high=float(high))


def ess_t(value: float, error: float, ess: float, level: float, shape: Tails = NORMAL) -> Interval:
    """Return J ± t_f E sqrt(ESS / (ESS - 1)), and more on the side of the longer tail.

    E is the `cautious_error` of the influence values: with the plain standard error intervals miss
    too often. The weights leave ESS - 1 degrees of freedom, and tails those of `Tails`: f is the
    smaller. On the side of the longer tail the Cornish-Fisher term of a studentised mean,
    (2 z^2 + 1) / 6 times the skew, comes on top: values that reach far are the ones of which a
    sample has too few. The other end stays. `python -m studies coverage` measures it.
    """
    if not (np.isfinite(value) and np.isfinite(error) and ess > 1.0 + 1e-9):
        return undefined(level, "ess-t")
    from scipy.special import ndtri, stdtrit

    upper = 0.5 + level / 2
    quantile = float(stdtrit(min(ess - 1.0, shape.freedom), upper))
    half = quantile * error * float(np.sqrt(ess / (ess - 1.0)))
    reach = shape.skew * (2.0 * float(ndtri(upper)) ** 2 + 1.0) / 6.0
    low, high = value - half + min(reach, 0.0), value + half + max(reach, 0.0)
    return Interval(low, high, level, "ess-t")


def widened(
    ends: Callable[[float], Interval],
    value: float,
    level: float,
    ess: float,
    unseen: tuple[float, float],
) -> Interval:
    """Return an interval with room for outcomes that m effective episodes may not have shown.

    If such outcomes have probability p and return r, the value is (1 - p) V + p r, V the value of
    what can be seen. That they were not seen, and that V lies below the lower end L of level
    1 - 2 a, happen together with probability (1 - p)^m a at most. So

        low = min over p of (1 - p) L(a) + p r,   (1 - p)^m a = (1 - level) / 2

    lies above the value with probability (1 - level) / 2 at most, whatever p is: the rule of three
    at one end of p, the interval itself at the other. Where the spread that was seen is large
    beside m p r, the interval stays as it is.

    Args:
        ends: interval from what was seen, by its level.
        value: the estimate.
        level: confidence level.
        ess: m, the effective number of episodes.
        unseen: How much outcomes of a probability of 1 / m would lower the value, and raise it.
    """
    interval = ends(level)
    if np.isnan(interval.low) or np.isnan(interval.high) or not max(unseen) > 0.0:
        return interval
    least, most = value - unseen[0] * ess, value + unseen[1] * ess
    missed = (1.0 - level) / 2
    low, high = interval.low, interval.high
    for tail in [*np.geomspace(missed, 0.5, _TAILS)[1:-1].tolist(), 1.0]:
        p = -float(np.expm1(np.log(missed / tail) / ess))
        seen = ends(1.0 - 2.0 * tail) if tail < 1.0 else Interval(value, value, level, "")
        low = min(low, (1.0 - p) * seen.low + p * least)
        high = max(high, (1.0 - p) * seen.high + p * most)
    return dataclasses.replace(interval, low=low, high=high)


def percentile(replicates: FloatArray, level: float) -> Interval:
    """Return the interval that holds the middle `level` of the replicates."""
    finite = replicates[np.isfinite(replicates)]
    if finite.size < 2:
        return undefined(level, "percentile")
    low, high = np.quantile(finite, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(float(low), float(high), level, "percentile")


def bca(
    replicates: FloatArray, value: float, influence: FloatArray, strata: IntArray, level: float
) -> Interval:
    """Return bias-corrected and accelerated percentiles.

    z0 from the share of replicates below the estimate, the acceleration from the influence values:
    a = sum u^3 / (6 (sum u^2)^1.5), u centred inside strata.
    """
    from scipy.special import ndtr, ndtri

    finite = replicates[np.isfinite(replicates)]
    if finite.size < 2 or not np.isfinite(value) or np.ptp(finite) == 0:
        return dataclasses.replace(percentile(replicates, level), method="bca")
    # a replicate that draws every trajectory once is the estimate, but for rounding
    tied = np.abs(finite - value) <= _ROUNDING * np.abs(finite).max()
    below = np.mean((finite < value) & ~tied) + np.mean(tied) / 2
    bias = ndtri(np.clip(below, 0.5 / finite.size, 1 - 0.5 / finite.size))
    u = centre(influence, join_single(strata))
    u /= max(np.abs(u).max(), np.finfo(np.float64).tiny)  # its scale cancels, but could underflow
    acceleration = np.sum(u**3) / (6 * max(np.sum(u**2), 1.0) ** 1.5)
    z = bias + ndtri(np.array([0.5 - level / 2, 0.5 + level / 2]))
    left = np.maximum(1 - acceleration * z, 1e-9)  # at the pole and beyond: the last replicate
    low, high = np.quantile(finite, ndtr(bias + z / left))
    return Interval(float(low), float(high), level, "bca")


def betting_lower(x: FloatArray, alpha: float) -> float:
    """Bound the mean of values x >= 0 from below, at level 1 - alpha for every n.

    If the mean were m, prod_i (1 + s (x_i / m - 1)) for a fixed bet s in [0, 1] would have expected
    value at most 1: it is 1 for independent values of mean m, and by Jensen at most 1 when the
    values come from strata whose means only average to m (fused weights). An average over bets
    keeps this, so by Markov it exceeds 1 / alpha with probability at most alpha; it falls in m, and
    the bound is where it crosses 1 / alpha. No order of the data and no randomness enter.

    Waudby-Smith & Ramdas (2024), https://arxiv.org/abs/2010.09686.
    """
    total = float(x.mean())
    if total <= 0.0 or not np.isfinite(total):
        return 0.0
    bets, log_shares = _bets(x.size, alpha)
    threshold = float(np.log(1.0 / alpha))

    def wealth(mean: float) -> float:
        logs = log_shares.copy()
        for begin in range(0, x.size, 1 << 14):
            ratio = x[begin : begin + (1 << 14)] / mean - 1.0
            logs += np.log1p(np.outer(bets, ratio)).sum(axis=1)
        top = logs.max()
        return float(top + np.log(np.sum(np.exp(logs - top))))

    return _crossing(wealth, threshold, total)


def _bets(n: int, alpha: float) -> tuple[FloatArray, FloatArray]:
    """Choose bets on n values before any is seen, and the logs of their shares of the stake.

    Values with coefficient of variation c want a bet of about sqrt(2 ln(1 / alpha) / n) / c: the
    bets go by factors of 2 from there, those for c near 1 with the largest shares.
    """
    power = np.arange(-8.0, 9.0)
    odds = 2.0**power * np.sqrt(2.0 * np.log(1.0 / alpha) / n)
    shares = (1.0 + np.abs(power)) ** -2.0
    return odds / (1.0 + odds), np.log(shares / shares.sum())


def _crossing(falling: Callable[[float], float], threshold: float, high: float) -> float:
    """Find where a falling function of m in (0, high] crosses the threshold; 0 if nowhere."""
    low = high
    for _ in range(200):
        low /= 2
        if falling(low) >= threshold:
            break
        high = low
    else:
        return 0.0
    from scipy.optimize import brentq

    root = brentq(lambda m: falling(m) - threshold, low, high, xtol=1e-12 * low, rtol=1e-12)
    return float(root) * (1 - 1e-11)  # on the safe side of what brentq may be off


def betting(
    bets: FloatArray,
    gamma: float,
    horizon: int,
    reward_range: tuple[float, float],
    level: float,
) -> Interval:
    """Return an interval valid for every n, with rewards and episode lengths that are bounded.

    Low end: a lower bound on E[sum_t gamma^t w (r - r_min)] plus sum_t gamma^t r_min. High end:
    sum_t gamma^t r_max minus a lower bound on E[sum_t gamma^t w (r_max - r)]. Sums run to the
    horizon; after its end an episode pays 0 with its last weight. A cap only lowers such sums, so
    both ends stay valid. NaN if they cross: such data cannot have come from these propensities.

    Args:
        bets: (2, n) both sums of each trajectory, from `ope_gym.estimators.reductions.Bets`.
        gamma: discount.
        horizon: longest possible episode.
        reward_range: lowest and highest possible reward.
        level: confidence level.
    """
    r_min, r_max = min(reward_range[0], 0.0), max(reward_range[1], 0.0)  # 0 is paid after the end
    total = float(annuity(gamma, horizon)[horizon])
    bounds = [betting_lower(paid, (1 - level) / 2) for paid in bets]
    low, high = total * r_min + bounds[0], total * r_max - bounds[1]
    if low > high:  # no mean is left: the data contradict the propensities or the range
        low = high = np.nan
    return Interval(float(low), float(high), level, "betting")
