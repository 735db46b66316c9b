"""Confidence intervals: ess-t, stratified bootstrap (percentile, BCa), betting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import centre, join_single

METHODS = ("ess-t", "percentile", "bca", "betting")
_REPLICATES = 128  # bootstrap replicates handled at once, at most
_COLUMNS = 1 << 22  # elements of a block of (replicates, trajectories) or (trajectories, steps)
_KEEP = 1 << 24  # elements of draws that are kept for the next pass
_LARGEST = 600.0  # log of the largest weight in a bet: a cap that keeps all sums within floats


@dataclass(frozen=True)
class Interval:
    """A confidence interval; undefined ends are NaN.

    Args:
        low: lower end.
        high: upper end.
        level: nominal coverage.
        method: how it was made, one of `METHODS`.
    """

    low: float
    high: float
    level: float
    method: str

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def undefined(level: float, method: str) -> Interval:
    """The interval of an estimate whose error cannot be known."""
    return Interval(np.nan, np.nan, level, method)


def cautious_error(influence: FloatArray, strata: IntArray) -> float:
    """The error of ess-t: sqrt(SE^2 + u_max^2 + u_min^2), from influence values psi (n,).

    u_i = sqrt(n_k / (n_k - 1)) (psi_i - mean of its stratum k) / n is what a trajectory adds to the
    standard error, SE^2 = sum_i u_i^2; u_max and u_min are the largest above and below 0. A sample
    lacks the rare trajectories that would have moved the estimate most, and where they are missing
    SE is too small as well: estimate and SE err together. So the most extreme trajectory on each
    side counts once more. At most sqrt(2) SE, and SE itself as no trajectory matters by itself any
    more. NaN where `standard_error` is.
    """
    strata = join_single(strata)
    counts = np.bincount(strata)
    if counts.max() < 2 or not np.all(np.isfinite(influence)):
        return np.nan
    u = centre(influence, strata) * np.sqrt(counts / (counts - 1.0))[strata]
    scale = float(np.abs(u).max())
    if scale == 0.0:
        return 0.0
    u /= scale * influence.size  # its squares could overflow
    extremes = max(float(u.max()), 0.0) ** 2 + min(float(u.min()), 0.0) ** 2
    return scale * float(np.sqrt(u @ u + extremes))


def ess_t(value: float, error: float, ess: float, level: float) -> Interval:
    """J ± t_{ESS-1} E sqrt(ESS / (ESS - 1)): degrees of freedom are what the weights leave.

    E is the `cautious_error` of the influence values: with the plain standard error intervals miss
    too often, and on one side, since returns are skewed. `python -m studies coverage` measures it.
    """
    if not (np.isfinite(value) and np.isfinite(error) and ess > 1.0 + 1e-9):
        return undefined(level, "ess-t")
    from scipy.special import stdtrit

    half = float(stdtrit(ess - 1.0, 0.5 + level / 2)) * error * np.sqrt(ess / (ess - 1.0))
    return Interval(value - half, value + half, level, "ess-t")


class Resamples:
    """Bootstrap draws: trajectories with replacement inside each stratum, the same on every pass.

    n_k - 1 of the n_k trajectories of stratum k are drawn and count n_k / (n_k - 1) times each, so
    that replicates spread like the standard error; n_k draws would spread too little by
    sqrt((n_k - 1) / n_k), .71 with two episodes a policy. Iterating gives counts (r, n), a block of
    replicates at a time: how much each trajectory counts. Equal data and seed give equal draws, so
    that two estimators, or two targets, share them.

    Args:
        strata: (n,) stratum of each trajectory.
        replicates: how many.
        seed: of the draws.
        progress: called with the number of replicates that an estimator has finished.
    """

    def __init__(
        self,
        strata: IntArray,
        replicates: int,
        seed: int,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.strata = join_single(strata)
        self.replicates = replicates
        self.seed = seed
        self.done = progress or (lambda replicates: None)
        self._kept: list[FloatArray] | None = None

    def __iter__(self) -> Iterator[FloatArray]:
        if self._kept is not None:
            yield from self._kept
        elif self.replicates * self.strata.size <= _KEEP:
            self._kept = list(self._draw())
            yield from self._kept
        else:
            yield from self._draw()

    def _draw(self) -> Iterator[FloatArray]:
        rng = np.random.default_rng(self.seed)
        n = self.strata.size
        order = np.argsort(self.strata, kind="stable")
        sizes = np.bincount(self.strata)
        slots = np.maximum(sizes - 1, 1)
        begin = np.repeat(np.cumsum(sizes) - sizes, slots)  # where the stratum of a draw begins
        size, scale = np.repeat(sizes, slots), (sizes / slots)[self.strata]
        block = max(1, min(_REPLICATES, _COLUMNS // n))  # the draws do not depend on it
        for done in range(0, self.replicates, block):
            rows = min(block, self.replicates - done)
            drawn = order[begin + (rng.random((rows, begin.size)) * size).astype(np.int64)]
            drawn += np.arange(rows)[:, None] * n
            counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
            yield counts * scale


def bootstrap_plain(influence: FloatArray, resamples: Resamples) -> FloatArray:
    """Replicates (R,) of the mean of psi: counts @ psi / n."""
    return np.concatenate([counts @ influence for counts in resamples]) / influence.size


def bootstrap_normalised(
    log_w: FloatArray,
    cap: float | None,
    rewards: FloatArray,
    offsets: IntArray,
    gamma: float,
    peak: FloatArray,
    resamples: Resamples,
) -> FloatArray:
    """Replicates (R,) of the whole normalised estimator, its denominators drawn anew as well.

    Per block of steps: (counts @ w r) / (counts @ w), two matrix products. A replicate in which
    some step has no weight at all is NaN.
    """
    from ope_gym import kernels

    n, horizon = offsets.size - 1, peak.size
    width = max(1, min(horizon, _COLUMNS // n))
    log_cap = np.inf if cap is None else float(np.log(cap))
    discount = gamma ** np.arange(horizon)
    result = np.zeros(resamples.replicates)
    for t0 in range(0, horizon, width):
        dense = np.empty((2, n, min(width, horizon - t0)))
        kernels.dense_columns(log_w, log_cap, rewards, offsets, peak, t0, dense)
        begin = 0
        for counts in resamples:
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = (counts @ dense[1]) / (counts @ dense[0])
            stop = begin + counts.shape[0]
            result[begin:stop] += mean @ discount[t0 : t0 + mean.shape[1]]
            begin = stop
    return result


def percentile(replicates: FloatArray, level: float) -> Interval:
    """The middle `level` of the replicates."""
    finite = replicates[np.isfinite(replicates)]
    if finite.size < 2:
        return undefined(level, "percentile")
    low, high = np.quantile(finite, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(float(low), float(high), level, "percentile")


def bca(
    replicates: FloatArray, value: float, influence: FloatArray, strata: IntArray, level: float
) -> Interval:
    """Bias-corrected and accelerated percentiles.

    z0 from the share of replicates below the estimate, the acceleration from the influence values:
    a = sum u^3 / (6 (sum u^2)^1.5), u centred inside strata.
    """
    from scipy.special import ndtr, ndtri

    finite = replicates[np.isfinite(replicates)]
    if finite.size < 2 or not np.isfinite(value) or np.ptp(finite) == 0:
        return replace(percentile(replicates, level), method="bca")
    below = np.mean(finite < value) + np.mean(finite == value) / 2
    bias = ndtri(np.clip(below, 0.5 / finite.size, 1 - 0.5 / finite.size))
    u = centre(influence, join_single(strata))
    u /= max(np.abs(u).max(), np.finfo(np.float64).tiny)  # its scale cancels, but could underflow
    acceleration = np.sum(u**3) / (6 * max(np.sum(u**2), 1.0) ** 1.5)
    z = bias + ndtri(np.array([0.5 - level / 2, 0.5 + level / 2]))
    left = np.maximum(1 - acceleration * z, 1e-9)  # at the pole and beyond: the last replicate
    low, high = np.quantile(finite, ndtr(bias + z / left))
    return Interval(float(low), float(high), level, "bca")


def betting_lower(x: FloatArray, alpha: float) -> float:
    """A lower confidence bound, at level 1 - alpha for every n, on the mean of values x >= 0.

    If the mean were m, prod_i (1 + s (x_i / m - 1)) for a fixed bet s in [0, 1] would have expected
    value at most 1: it is 1 for independent values of mean m, and by Jensen at most 1 when the
    values come from strata whose means only average to m (fused weights). An average over bets
    keeps this, so by Markov it exceeds 1 / alpha with probability at most alpha; it falls in m, and
    the bound is where it crosses 1 / alpha. No order of the data and no randomness enter.
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
    """Bets on n values, chosen before any is seen, and the logs of their shares of the stake.

    Values with coefficient of variation c want a bet of about sqrt(2 ln(1 / alpha) / n) / c: the
    bets go by factors of 2 from there, those for c near 1 with the largest shares.
    """
    power = np.arange(-8.0, 9.0)
    odds = 2.0**power * np.sqrt(2.0 * np.log(1.0 / alpha) / n)
    shares = (1.0 + np.abs(power)) ** -2.0
    return odds / (1.0 + odds), np.log(shares / shares.sum())


def _crossing(falling: Callable[[float], float], threshold: float, high: float) -> float:
    """Where a falling function of m in (0, high] crosses the threshold; 0 if it does nowhere."""
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
    log_w: FloatArray,
    cap: float | None,
    rewards: FloatArray,
    offsets: IntArray,
    gamma: float,
    horizon: int,
    reward_range: tuple[float, float],
    level: float,
) -> Interval:
    """Finite-sample interval for rewards within reward_range and episodes of at most `horizon`.

    Low end: a lower bound on E[sum_t gamma^t w (r - r_min)] plus sum_t gamma^t r_min. High end:
    sum_t gamma^t r_max minus a lower bound on E[sum_t gamma^t w (r_max - r)]. Sums run to the
    horizon; after its end an episode pays 0 with its last weight. A cap only lowers such sums, so
    both ends stay valid. NaN if they cross: such data cannot have come from these propensities.
    """
    r_min, r_max = min(reward_range[0], 0.0), max(reward_range[1], 0.0)  # 0 is paid after the end
    lengths = np.diff(offsets)
    log_cap = _LARGEST if cap is None else min(float(np.log(cap)), _LARGEST)
    weights = np.exp(np.minimum(log_w, log_cap))
    steps = np.arange(log_w.size) - np.repeat(offsets[:-1], lengths)
    discount = gamma ** np.arange(horizon + 1)
    annuity = np.concatenate([[0.0], np.cumsum(discount[:horizon])])  # sum of gamma^t for t < m
    after = weights[offsets[1:] - 1] * (annuity[horizon] - annuity[lengths])
    bounds = []
    for gain, idle in ((rewards - r_min, -r_min), (r_max - rewards, r_max)):
        paid = np.add.reduceat(weights * gain * discount[steps], offsets[:-1])
        bounds.append(betting_lower(paid + after * idle, (1 - level) / 2))
    low = annuity[horizon] * r_min + bounds[0]
    high = annuity[horizon] * r_max - bounds[1]
    if low > high:  # no mean is left: the data contradict the propensities or the range
        low = high = np.nan
    return Interval(float(low), float(high), level, "betting")
