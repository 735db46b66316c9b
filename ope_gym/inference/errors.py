"""Standard errors from influence values, inside strata of like trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, blocks

_SAME = 0.9  # slope of one estimate on another from which on the rest is mostly rounding
NEIGHBOURS = 8  # behaviours of one episode each that make a stratum


@dataclass(frozen=True)
class Tails:
    """Describe the tails of influence values, u as in `Spread`; NaN without an error.

    Args:
        skew: sum u^3 / sum u^2: on which side, and how far, the tail reaches.
        freedom: degrees of freedom of the standard error, 2 / (sum u^4 / (sum u^2)^2 - 1 / n):
            about n for normal values, about 2 if a single trajectory makes all of the error.
        largest: share of one trajectory in the squared error, max u^2 / sum u^2.
    """

    skew: float
    freedom: float
    largest: float


@dataclass(frozen=True)
class Spread:
    """Describe the spread of influence values psi (n,) inside strata of like trajectories.

        SE^2 = sum_i u_i^2,   u_i = sqrt(n_k / (n_k - 1)) (psi_i - mean of its stratum k) / n

    which is sum_k rho_k^2 s_k^2 / n_k, s_k^2 the variance of psi inside stratum k. A stratum of one
    trajectory is joined to a neighbour, since its own spread cannot be seen.

    Args:
        error: SE, the standard error of the mean of psi; NaN when all strata are single.
        cautious: the error of ess-t, sqrt(SE^2 + u_max^2 + u_min^2), u_max and u_min the largest
            above and below 0. A sample lacks the rare trajectories that would have moved the
            estimate most, and where they are missing SE is too small as well: estimate and SE err
            together. So the most extreme trajectory on each side counts once more. At most
            sqrt(2) SE, and SE itself as no trajectory matters by itself any more.
        tails: their shape.
    """

    error: float
    cautious: float
    tails: Tails


def spread_of(influence: FloatArray, strata: IntArray | None = None) -> Spread:
    """Describe the spread of influence values inside strata of like trajectories.

    Args:
        influence: (n,).
        strata: (n,); by default one of all.
    """
    n = influence.size
    strata, sizes = _groups(np.zeros(n, dtype=np.int64) if strata is None else strata)
    with np.errstate(invalid="ignore"):  # of values that are not finite
        means = np.bincount(strata, influence) / sizes
    if sizes.max() < 2 or not np.all(np.isfinite(means)):
        return Spread(np.nan, np.nan, Tails(np.nan, np.inf, np.nan))
    # by the means first: sum x^2 - n mean^2 would lose all digits of a small spread; and over the
    # largest |psi|, since squares could overflow
    unit = float(max(influence.max(), -influence.min(), np.finfo(np.float64).tiny))
    factors = np.sqrt(sizes / (sizes - 1.0)) / unit
    low = high = square = cube = fourth = 0.0
    for rows in blocks(n):
        some = strata[rows]
        u = influence[rows] - means.take(some)
        u *= factors.take(some)
        second = u * u
        low, high = min(float(u.min()), low), max(float(u.max()), high)
        square, cube = square + float(second.sum()), cube + float(second @ u)
        fourth += float(second @ second)
    scale, largest = unit / n, max(-low, high) ** 2
    if not square > 0.0:
        return Spread(scale * square, scale * square, Tails(0.0, np.inf, np.nan))  # 0, or NaN
    peaked = fourth / square**2 - 1.0 / n
    freedom = max(1.0, 2.0 / peaked) if peaked > 0.0 else np.inf
    return Spread(
        scale * float(np.sqrt(square)),
        scale * float(np.sqrt(square + low**2 + high**2)),
        Tails(scale * cube / square, freedom, largest / square),
    )


def standard_error(influence: FloatArray, strata: IntArray) -> float:
    """Return the standard error of the mean of influence values psi (n,); see `Spread`."""
    return spread_of(influence, strata).error


def cautious_error(influence: FloatArray, strata: IntArray) -> float:
    """Return the error of ess-t of influence values psi (n,); see `Spread`."""
    return spread_of(influence, strata).cautious


def tails(influence: FloatArray, strata: IntArray) -> Tails:
    """Describe the tails of influence values psi (n,) inside strata."""
    return spread_of(influence, strata).tails


def squares_of(influence: FloatArray, strata: IntArray) -> FloatArray:
    """Return (n,) the terms n^2 u^2 of influence values, u as in `Spread`."""
    strata, sizes = _groups(strata)
    scale = np.sqrt(sizes / np.maximum(sizes - 1.0, 1.0))
    return np.asarray((centre(influence, strata) * scale.take(strata)) ** 2)


def covariance_within(influence: FloatArray, strata: IntArray) -> FloatArray:
    """Return the (m, m) covariance of the means of influence values (m, n).

    As `standard_error`, for several means at once.
    NaN when all strata are single.
    """
    strata = join_single(strata)
    counts = np.bincount(strata)
    if counts.max() < 2:
        return np.full((len(influence), len(influence)), np.nan)
    scale = np.sqrt(counts / (counts - 1.0))[strata] / strata.size
    deviations = np.stack([centre(row, strata) * scale for row in influence])
    return np.asarray(deviations @ deviations.T)


def uncorrelated(
    guess: tuple[float, FloatArray], estimate: tuple[float, FloatArray], strata: IntArray
) -> float:
    """Return a guess without the part of its error that an estimate shares; NaN if that is all.

        (guess - k estimate) / (1 - k),   k the slope of the guess on the estimate

    Args:
        guess: Value and influence values (n,).
        estimate: The same.
        strata: (n,).
    """
    unit = float(np.abs(estimate[1]).max()) or 1.0
    covariance = covariance_within(np.stack([guess[1] / unit, estimate[1] / unit]), strata)
    k = covariance[0, 1] / covariance[1, 1] if covariance[1, 1] > 0.0 else 1.0
    return float((guess[0] - k * estimate[0]) / (1.0 - k)) if k < _SAME else np.nan


def centre(influence: FloatArray, strata: IntArray) -> FloatArray:
    """Return influence values minus their means inside each stratum."""
    counts = np.bincount(strata)
    means = np.bincount(strata, influence) / np.maximum(counts, 1)
    return influence - means[strata]


def join_single(strata: IntArray) -> IntArray:
    """Join each stratum of a single trajectory to the one before (or after); number from 0.

    If all strata are single they are left alone: no spread can be seen inside any of them.
    """
    return _groups(strata)[0]


def _groups(strata: IntArray) -> tuple[IntArray, IntArray]:
    """Return what `join_single` does, and how many trajectories each stratum has."""
    counts = np.bincount(strata)
    if counts.min() < 1:
        strata = (np.cumsum(counts > 0) - 1)[strata]  # without gaps, in their order
        counts = counts[counts > 0]
    if counts.max() < 2 or counts.min() >= 2:
        return strata, counts
    first = int(np.argmax(counts >= 2))
    home = np.where(counts >= 2, np.arange(counts.size), 0)
    home = np.maximum(np.maximum.accumulate(home), first)
    return _groups(home[strata])


def joined(strata: IntArray, counts: IntArray | None = None) -> IntArray:
    """Join neighbours among strata of one trajectory each, so that their spread can be seen.

    The mean of `NEIGHBOURS` in a row stands for the mean of each, and what their means differ by
    counts as spread: for independent trajectories errors come out too large, never too small in
    expectation; a little where neighbours are alike, as in the history of a learner. Strata of
    several trajectories, and few of one, are left as they are.

    Args:
        strata: (n,).
        counts: how many trajectories each stratum has, if it is known.
    """
    single = (np.bincount(strata) if counts is None else counts) == 1
    lone = int(np.count_nonzero(single))
    if lone < 2 * NEIGHBOURS:
        return strata
    order, counts = np.unique(strata, return_inverse=True, return_counts=True)[1:]
    single = counts == 1
    last = lone // NEIGHBOURS - 1
    names = last + np.cumsum(~single)  # numbers of the other strata, after the joined ones
    names[single] = np.minimum(np.arange(lone) // NEIGHBOURS, last)
    return np.asarray(names[order])
