"""How probable it is that each of several policies is the best, given their estimates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.estimators.table import covariance_within
from ope_gym.results import Estimate

DRAWS = 20_000
_TIE = 1e-9  # of the winner's spread: draws this close are equal
_ROUNDING = 1e-13  # share of the largest variance, in own units, below which a direction has none
_WIDEST = 1e9  # factor by which little evidence widens a draw, at most


def probability_best(
    estimates: Sequence[Estimate], *, draws: int = DRAWS, seed: int = 0
) -> FloatArray:
    """(P,) share of joint draws of the values in which each is the largest; ties are shared.

        J_p + D_p f_p,    D ~ normal with the covariance of the influence values within strata,
                          or the deviations of shared bootstrap replicates,
        f_p = sqrt(ESS / (ESS - 1)) sqrt((ESS - 1) / chi2)

    With f_p every J_p has a t distribution with ESS - 1 degrees of freedom (and the plain standard
    error, not the cautious one of the ess-t interval): few effective episodes leave much open. One
    uniform number drives the chi2 of all policies, so that two that always agree are never told
    apart by it.

    At an ESS of 4 or less the draws are overconfident: a red verdict holds for this number as well.

    An estimate whose error is unknown has probability NaN and takes no part.

    Args:
        estimates: of one estimator on the same trajectories.
        draws: how many, if not as many as bootstrap replicates.
        seed: of the draws.
    """
    result = np.full(len(estimates), np.nan)
    known = [
        p
        for p, e in enumerate(estimates)
        if np.isfinite(e.value) and np.isfinite(e.standard_error) and e.diagnostics.ess > 1 + 1e-9
    ]
    if not known:
        return result
    taking = [estimates[p] for p in known]
    rng = np.random.default_rng([seed, 1])  # not the stream of the bootstrap
    deviations = _replicates(taking)
    if deviations is None:
        deviations = rng.standard_normal((draws, len(known))) @ _root(taking).T
    values = np.array([e.value for e in taking])
    ess = np.array([e.diagnostics.ess for e in taking])
    drawn = values + deviations * _widening(ess, rng.random(len(deviations)))
    winner = np.argmax(drawn, axis=1)
    best = drawn[np.arange(len(drawn)), winner]
    errors = np.array([e.standard_error for e in taking])
    scale = np.abs(best - values[winner]) + errors[winner]  # its own: that of others may be huge
    winners = drawn >= (best - _TIE * scale)[:, None]
    result[known] = np.mean(winners / winners.sum(axis=1, keepdims=True), axis=0)
    return result


def _root(estimates: Sequence[Estimate]) -> FloatArray:
    """(P, P) matrix whose square is the covariance: root of the correlations times errors."""
    influence = np.stack([e.influence for e in estimates])
    unit = np.abs(influence).max(axis=1, keepdims=True)
    unit[unit == 0.0] = 1.0
    covariance = covariance_within(influence / unit, estimates[0].sample.strata)
    errors = np.sqrt(np.diag(covariance))
    divisor = np.where(errors > 0.0, errors, 1.0)
    values, vectors = np.linalg.eigh(covariance / np.outer(divisor, divisor))
    values[values < _ROUNDING * values[-1]] = 0.0  # else policies that are equal part by chance
    return np.asarray(unit * errors[:, None] * vectors * np.sqrt(np.maximum(values, 0.0)))


def _replicates(estimates: Sequence[Estimate]) -> FloatArray | None:
    """(R, P) deviations of the bootstrap replicates that are defined for all; None without."""
    columns = [e.replicates - e.value for e in estimates if e.replicates is not None]
    if len(columns) < len(estimates) or len({e.seed for e in estimates}) > 1:
        return None
    stacked = np.stack(columns, axis=1)
    stacked = stacked[np.isfinite(stacked).all(axis=1)]
    return stacked if len(stacked) > 1 else None


def _widening(ess: FloatArray, uniform: FloatArray) -> FloatArray:
    """(R, P) factors f; gammaincinv(a, u) is half the u-quantile of chi2 with 2 a degrees."""
    from scipy.special import gammaincinv

    freedom = ess - 1.0
    with np.errstate(divide="ignore", over="ignore"):
        half = gammaincinv(freedom / 2, uniform[:, None])
        factor = np.sqrt(ess / freedom) * np.sqrt(freedom / 2 / half)
    return np.asarray(np.minimum(factor, _WIDEST))
