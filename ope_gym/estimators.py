"""The estimators: a table of compositions (scheme, cap, normalisation) and the sums they share.

    plain       J = 1/n sum_i sum_t gamma^t w_i,t r_i,t
    normalised  J = sum_t gamma^t (sum_i w_i,t r_i,t) / (sum_i w_i,t)
    capped      w <- min(w, c) on the cumulative weight, before normalising

After an episode ends its reward is 0 and its weight stays: the denominator at step t runs over all
n trajectories, never over the survivors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.weights import FloatArray, IntArray


@dataclass(frozen=True)
class Composition:
    """What an estimator is made of.

    Args:
        scheme: weighting scheme, a name in `ope_gym.weights.SCHEMES`.
        capped: weights are cut at the cap.
        normalised: each step's sum is divided by the sum of the weights instead of n.
        use: when to use it, in a line.
    """

    scheme: str
    capped: bool = False
    normalised: bool = False
    use: str = ""


ESTIMATORS: dict[str, Composition] = {
    "BIS": Composition(
        "basic", use="needs only the logged propensities; unbiased even on adaptive data; noisy"
    ),
    "BCIS": Composition("basic", capped=True, use="a lower bound in mean when rewards are positive"),
    "NBIS": Composition("basic", normalised=True, use="only logged propensities at hand"),
    "NBCIS": Composition("basic", True, True, use="the same, when a few weights dominate"),
    "FIS": Composition("fused", use="unbiased for policies fixed in advance; never noisier than BIS"),
    "FCIS": Composition("fused", capped=True, use="FIS when a few weights dominate"),
    "NFIS": Composition("fused", normalised=True, use="the first choice of this table"),
    "NFCIS": Composition("fused", True, True, use="NFIS when a few weights dominate"),
    "OUIS": Composition("optimal", use="to compare with the paper; not always better than FIS"),
    "NOUIS": Composition("optimal", normalised=True, use="to compare with the paper"),
}


@dataclass(frozen=True)
class Moments:
    """An estimator's sums on one data set; T is the longest episode.

    Args:
        value: the estimate.
        influence: (n,) psi_i. Plain: J is their mean. Normalised: they average to 0.
        peak: (T,) M_t, log of the largest weight at t.
        sums: (3, T) sum w, sum w^2, sum w r at t, with weights scaled by exp(-M_t).
        log_last: (n,) log of the last weight of each trajectory, after the cap.
        capped_share: share of the steps whose weight met the cap.
    """

    value: float
    influence: FloatArray
    peak: FloatArray
    sums: FloatArray
    log_last: FloatArray
    capped_share: float

    @property
    def supported(self) -> bool:
        """Whether every step has some trajectory of positive weight."""
        return bool(np.all(self.sums[0] > 0))

    @property
    def ess(self) -> FloatArray:
        """(T,) effective sample size (sum w)^2 / sum w^2 at each step; 0 without any weight."""
        weight, square = self.sums[0], self.sums[1]
        return np.divide(weight**2, square, out=np.zeros_like(weight), where=square > 0)


def moments(
    log_w: FloatArray,
    rewards: FloatArray,
    offsets: IntArray,
    gamma: float,
    *,
    cap: float | None = None,
    normalised: bool = False,
) -> Moments:
    """Value and sums of one composition from its log weights (S,)."""
    from ope_gym import kernels

    n, horizon = offsets.size - 1, int(np.diff(offsets).max())
    log_cap = np.inf if cap is None else float(np.log(cap))
    peak, sums, psi = np.empty(horizon), np.empty((3, horizon)), np.empty(n)
    discount = gamma ** np.arange(horizon)
    kernels.column_sums(log_w, log_cap, rewards, offsets, peak, sums)
    if normalised:
        if np.all(sums[0] > 0):
            kernels.normalised_influence(
                log_w, log_cap, rewards, offsets, discount, peak, sums, psi
            )
            value = float(np.sum(discount * sums[2] / sums[0]))
        else:
            value, psi[:] = np.nan, np.nan
    elif peak.max() > 700.0:  # not a float64 any more: infinite, and the verdict says so
        psi[:] = _overflowing(log_w, rewards, offsets, discount)
        value = float(psi.mean())
    else:
        kernels.plain_influence(log_w, log_cap, rewards, offsets, discount, psi)
        value = float(psi.mean()) if peak.max() > -np.inf else np.nan
    log_last = np.minimum(log_w[offsets[1:] - 1], log_cap)
    capped = 0.0 if cap is None else float(np.mean(log_w > log_cap))
    return Moments(value, psi, peak, sums, log_last, capped)


def _overflowing(
    log_w: FloatArray, rewards: FloatArray, offsets: IntArray, discount: FloatArray
) -> FloatArray:
    """psi of plain weights some of which exceed the largest float."""
    steps = np.arange(log_w.size) - np.repeat(offsets[:-1], np.diff(offsets))
    with np.errstate(over="ignore", invalid="ignore"):
        paid = np.where(rewards == 0, 0.0, np.exp(log_w) * rewards * discount[steps])
        return np.add.reduceat(paid, offsets[:-1])


def standard_error(influence: FloatArray, strata: IntArray) -> float:
    """SE^2 = sum_k rho_k^2 s_k^2 / n_k, s_k^2 the variance of psi inside stratum k.

    A stratum of one trajectory is joined to a neighbour, which can only widen the result. NaN when
    all are alone.
    """
    strata = join_single(strata)
    n, counts = influence.size, np.bincount(strata)
    if counts.max() < 2 or not np.all(np.isfinite(influence)):
        return np.nan
    deviation = centre(influence, strata)
    squares = np.bincount(strata, deviation**2)
    return float(np.sqrt(np.sum(counts * squares / (counts - 1.0))) / n)


def centre(influence: FloatArray, strata: IntArray) -> FloatArray:
    """psi minus its mean inside each stratum."""
    counts = np.bincount(strata)
    means = np.bincount(strata, influence) / np.maximum(counts, 1)
    return influence - means[strata]


def join_single(strata: IntArray) -> IntArray:
    """Strata renumbered 0, 1, ..., each single trajectory put with the neighbour before (or after).

    If all strata are single they are left alone: no spread can be seen inside any of them.
    """
    _, strata, counts = np.unique(strata, return_inverse=True, return_counts=True)
    if counts.max() < 2 or counts.min() >= 2:
        return strata
    first = int(np.argmax(counts >= 2))
    home = np.where(counts >= 2, np.arange(counts.size), 0)
    home = np.maximum(np.maximum.accumulate(home), first)
    _, joined = np.unique(home[strata], return_inverse=True)
    return joined
