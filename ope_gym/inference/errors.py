"""Standard errors from influence values, inside strata of like trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray

NEIGHBOURS = 8  # behaviours of one episode each that make a stratum


def standard_error(influence: FloatArray, strata: IntArray) -> float:
    """Return the standard error of the mean of influence values psi (n,).

        SE^2 = sum_k rho_k^2 s_k^2 / n_k,   s_k^2 the variance of psi inside stratum k

    A stratum of one trajectory is joined to a neighbour, since its own spread cannot be seen. NaN
    when all are alone.
    """
    strata = join_single(strata)
    n, counts = influence.size, np.bincount(strata)
    if counts.max() < 2 or not np.all(np.isfinite(influence)):
        return np.nan
    with np.errstate(over="ignore"):  # an infinite error is reported as such
        # means first: sum x^2 - n mean^2 would lose all digits of a small spread
        squares = np.bincount(strata, centre(influence, strata) ** 2)
        return float(np.sqrt(np.sum(counts * squares / (counts - 1.0))) / n)


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


def centre(influence: FloatArray, strata: IntArray) -> FloatArray:
    """Return influence values minus their means inside each stratum."""
    counts = np.bincount(strata)
    means = np.bincount(strata, influence) / np.maximum(counts, 1)
    return influence - means[strata]


def join_single(strata: IntArray) -> IntArray:
    """Join each stratum of a single trajectory to the one before (or after); number from 0.

    If all strata are single they are left alone: no spread can be seen inside any of them.
    """
    strata = _renumber(strata)
    counts = np.bincount(strata)
    if counts.max() < 2 or counts.min() >= 2:
        return strata
    first = int(np.argmax(counts >= 2))
    home = np.where(counts >= 2, np.arange(counts.size), 0)
    home = np.maximum(np.maximum.accumulate(home), first)
    return _renumber(home[strata])


def _renumber(strata: IntArray) -> IntArray:
    """Number the groups 0, 1, ... without gaps, in their order."""
    present = np.bincount(strata) > 0
    return strata if present.all() else (np.cumsum(present) - 1)[strata]


def _scaled(influence: FloatArray, strata: IntArray) -> tuple[FloatArray, float] | None:
    """Return u (n,) over the largest |u|, whose squares could overflow, and that largest."""
    strata = join_single(strata)
    counts = np.bincount(strata)
    if counts.max() < 2 or not np.all(np.isfinite(influence)):
        return None
    u = centre(influence, strata) * np.sqrt(counts / (counts - 1.0))[strata]
    scale = float(np.abs(u).max())
    return (u / scale, scale / influence.size) if scale > 0.0 else (u, 0.0)


def cautious_error(influence: FloatArray, strata: IntArray) -> float:
    """Return the error of ess-t, sqrt(SE^2 + u_max^2 + u_min^2), from influence values psi (n,).

    u_i = sqrt(n_k / (n_k - 1)) (psi_i - mean of its stratum k) / n is what a trajectory adds to the
    standard error, SE^2 = sum_i u_i^2; u_max and u_min are the largest above and below 0. A sample
    lacks the rare trajectories that would have moved the estimate most, and where they are missing
    SE is too small as well: estimate and SE err together. So the most extreme trajectory on each
    side counts once more. At most sqrt(2) SE, and SE itself as no trajectory matters by itself any
    more. NaN where `standard_error` is.
    """
    found = _scaled(influence, strata)
    if found is None:
        return np.nan
    u, scale = found
    extremes = max(float(u.max()), 0.0) ** 2 + min(float(u.min()), 0.0) ** 2
    return scale * float(np.sqrt(u @ u + extremes))


@dataclass(frozen=True)
class Tails:
    """Describe the tails of influence values, u as in `cautious_error`; NaN without an error.

    Args:
        skew: sum u^3 / sum u^2: on which side, and how far, the tail reaches.
        freedom: degrees of freedom of the standard error, 2 / (sum u^4 / (sum u^2)^2 - 1 / n):
            about n for normal values, about 2 if a single trajectory makes all of the error.
        largest: share of one trajectory in the squared error, max u^2 / sum u^2.
    """

    skew: float
    freedom: float
    largest: float


def tails(influence: FloatArray, strata: IntArray) -> Tails:
    """Describe the tails of influence values psi (n,) inside strata."""
    found = _scaled(influence, strata)
    if found is None or found[1] == 0.0:
        return Tails(0.0 if found else np.nan, np.inf, np.nan)
    u, scale = found
    square = float(u @ u)
    peaked = float(np.sum(u**4)) / square**2 - 1.0 / u.size
    freedom = max(1.0, 2.0 / peaked) if peaked > 0.0 else np.inf
    return Tails(scale * float(np.sum(u**3)) / square, freedom, 1.0 / square)


def joined(strata: IntArray) -> IntArray:
    """Join neighbours among strata of one trajectory each, so that their spread can be seen.

    The mean of `NEIGHBOURS` in a row stands for the mean of each, and what their means differ by
    counts as spread: for independent trajectories errors come out too large, never too small in
    expectation; a little where neighbours are alike, as in the history of a learner. Strata of
    several trajectories, and few of one, are left as they are.
    """
    order, counts = np.unique(strata, return_inverse=True, return_counts=True)[1:]
    single = counts == 1
    lone = int(np.count_nonzero(single))
    if lone < 2 * NEIGHBOURS:
        return strata
    last = lone // NEIGHBOURS - 1
    names = last + np.cumsum(~single)  # numbers of the other strata, after the joined ones
    names[single] = np.minimum(np.arange(lone) // NEIGHBOURS, last)
    return np.asarray(names[order])
