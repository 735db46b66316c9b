"""Say how far estimated probabilities agree with what happened: slope, reliability, log loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray

_BINS = 10


@dataclass(frozen=True, eq=False)
class Reliability:
    """Compare estimated probabilities with how often the actions were taken; B bins.

    Args:
        predicted: (B,) mean of the estimated probabilities in a bin, over all steps and actions.
        observed: (B,) share of these actions that were taken.
        error: (B,) standard error of that share.
        count: (B,) number of pairs of a step and an action.
    """

    predicted: FloatArray
    observed: FloatArray
    error: FloatArray
    count: IntArray


def marginal_loss(chosen: IntArray, fold: IntArray, actions: int) -> float:
    """Return the mean of -ln of the share that an action has in the other folds.

    Args:
        chosen: (S,).
        fold: (S,).
        actions: how many there are; those that never occur do not count.
    """
    counts = np.zeros((int(fold.max()) + 1, actions))
    np.add.at(counts, (fold, chosen), 1.0)
    others = counts.sum(axis=0) - counts + 0.5 * (counts.sum(axis=0) > 0)
    shares = others / others.sum(axis=1, keepdims=True)
    return -float(np.log(shares[fold, chosen]).mean())


def calibration_slope(
    probs: FloatArray, chosen: IntArray, episode: IntArray
) -> tuple[float, float]:
    """Fit the exponent b of p_a^b / sum_c p_c^b to the chosen actions, with its standard error.

    The log-likelihood is concave in b: its score is sum [l_a - E_b l], l = ln p, its curvature
    - sum Var_b l, and Newton's method finds the root. The error is the sandwich by episodes, since
    what a model gets wrong it gets wrong all through an episode.

    Args:
        probs: (S, A) estimated, of left-out steps.
        chosen: (S,).
        episode: (S,).
    """
    with np.errstate(divide="ignore"):
        logs = np.log(probs)
    used = np.isfinite(logs)
    logs = np.where(used, logs, 0.0)
    taken = logs[np.arange(chosen.size), chosen]
    slope = 1.0
    for _ in range(50):
        parts = np.where(used, np.exp(slope * logs), 0.0)
        parts /= parts.sum(axis=1, keepdims=True)
        mean = np.einsum("na,na->n", parts, logs)
        score = taken - mean
        curvature = float(np.einsum("na,na->", parts, (logs - mean[:, None]) ** 2))
        if not curvature > 1e-12 * chosen.size:
            return 1.0, np.nan  # all actions are equally probable: there is no slope
        move = float(score.sum()) / curvature
        slope += float(np.clip(move, -0.5, 0.5))
        if abs(move) < 1e-10:
            break
    clusters = np.bincount(episode, weights=score)
    return slope, float(np.sqrt(clusters @ clusters)) / curvature


def reliability(
    probs: FloatArray, chosen: IntArray, episode: IntArray, bins: int = _BINS
) -> Reliability:
    """Sort all pairs of a step and an action into bins of equal size by estimated probability.

    Args:
        probs: (S, A).
        chosen: (S,).
        episode: (S,), for the errors.
        bins: how many.
    """
    hit = (chosen[:, None] == np.arange(probs.shape[1])).ravel()
    flat, where = probs.ravel(), np.repeat(episode, probs.shape[1])
    edges = np.unique(np.quantile(flat, np.linspace(0.0, 1.0, bins + 1)[1:-1]))
    bin_of = np.searchsorted(edges, flat, side="right")
    count = np.bincount(bin_of, minlength=edges.size + 1)
    some = np.flatnonzero(count)
    predicted = np.bincount(bin_of, weights=flat)[some] / count[some]
    observed = np.bincount(bin_of, weights=hit)[some] / count[some]
    error = np.empty(some.size)
    for i, b in enumerate(some):
        rows = bin_of == b
        apart = np.bincount(where[rows], weights=hit[rows] - observed[i])
        error[i] = np.sqrt(apart @ apart) / count[b]
    return Reliability(predicted, observed, error, count[some])
