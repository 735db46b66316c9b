"""Weights of the rounds of an adaptive experiment; see `ope_gym.estimators.adaptive`."""

from __future__ import annotations

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, step_numbers
from ope_gym.weights.formula import LogProbRows, block_of, chunks_of

_RANGE = 10.0  # h stays within this factor of that of the first round
_LARGEST = 700.0  # log of the largest ratio of two paths, near that of the largest float
_SEEN = 5.0  # effective earlier episodes below which sigma_k is not estimated


def stable_weights(
    target_log_probs: FloatArray,
    behaviour_log_probs: FloatArray | LogProbRows,
    ids: IntArray,
    offsets: IntArray,
    gamma: float,
    start: FloatArray,
    residuals: FloatArray,
) -> FloatArray:
    """Return (K,) h_k = sigma_0 / sigma_k, both estimated from the episodes before round k.

        sigma_k^2 = sum_{i before k} u (Gamma_i,k - mean)^2 / sum u,   u = P_k / mixture of the past

    Gamma_i,k is episode i with weights P_e / P_k and the residuals of its own round: residuals of
    round k would need its q on all earlier episodes, and change h little. h_0 = 1; where
    the past is too unlike behaviour k to say (an effective number of episodes below 5), h is that
    of the round before; h is kept within a factor 10 of 1.

    Args:
        target_log_probs: (S,) log-probability of the taken actions under the target.
        behaviour_log_probs: (K, S) the same under each behaviour, or a source of such blocks.
        ids: (n,) round of each trajectory.
        offsets: (n + 1,).
        gamma: discount.
        start: (n,) past-only v at the start.
        residuals: (S,) e of the past-only q.
    """
    from ope_gym.kernels import prefix_sums

    n, rounds = ids.size, behaviour_log_probs.shape[0]
    prefix = prefix_sums(target_log_probs, offsets)
    paid = gamma ** step_numbers(offsets) * residuals
    terms, last = np.empty((rounds, n)), np.empty((rounds, n))
    for begin, end in chunks_of(offsets, rounds):
        rows = slice(int(offsets[begin]), int(offsets[end]))
        inside = offsets[begin : end + 1] - rows.start
        for k, steps in enumerate(block_of(behaviour_log_probs, rows.start, rows.stop)):
            path = prefix_sums(steps, inside)
            last[k, begin:end] = path[inside[1:] - 1]
            log_w = np.full(path.size, -np.inf)
            np.subtract(prefix[rows], path, out=log_w, where=prefix[rows] > -np.inf)
            weights = np.exp(np.minimum(log_w, _LARGEST))
            terms[k, begin:end] = np.add.reduceat(weights * paid[rows], inside[:-1])
    terms += start
    with np.errstate(divide="ignore"):
        log_counts = np.log(np.bincount(ids, minlength=rounds))
    h, mixture = np.ones(rounds), np.full(n, -np.inf)  # of the rounds before k, times their size
    for k in range(1, rounds):
        mixture = np.logaddexp(mixture, log_counts[k - 1] + last[k - 1])
        past = ids < k
        h[k] = h[k - 1]
        if past.any():
            scale = mixture[past]
            ratio = _spread(terms[0, past], last[0, past] - scale) / _spread(
                terms[k, past], last[k, past] - scale
            )
            if np.isfinite(ratio):
                h[k] = np.clip(np.sqrt(ratio), 1 / _RANGE, _RANGE)
    return h


def _spread(terms: FloatArray, log_u: FloatArray) -> float:
    """Return the variance of terms weighted by u; NaN if too few count, or all are equal."""
    if log_u.max() == -np.inf:
        return np.nan
    u = np.exp(log_u - log_u.max())
    total = u.sum()
    if total**2 / (u @ u) < _SEEN:
        return np.nan
    known = u > 0  # a prefix that behaviour k cannot take has no weight, and no term
    u, values = u[known], terms[known]
    with np.errstate(over="ignore", invalid="ignore"):
        variance = float(u @ (values - u @ values / total) ** 2 / total)
    return variance if variance > 0 else np.nan
