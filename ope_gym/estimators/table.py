"""The estimators: a table of compositions (scheme, cap, normalisation, q) and the sums they share.

    plain          J = 1/n sum_i sum_t gamma^t w_i,t r_i,t
    normalised     J = sum_t gamma^t (sum_i w_i,t r_i,t) / (sum_i w_i,t)
    capped         w <- min(w, c) on the cumulative weight, before normalising
    doubly robust  J = 1/n sum_i v_i,0 + either of the above with r_t - q_t + gamma v_t+1 for r_t

After an episode ends its reward is 0 and its weight stays: the denominator at step t runs over all
n trajectories, never over the survivors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class Composition:
    """What an estimator is made of.

    Args:
        scheme: weighting scheme, a name in `ope_gym.weights.formula.SCHEMES`; empty if none.
        capped: weights are cut at the cap.
        normalised: each step's sum is divided by the sum of the weights instead of n.
        baseline: needs a q model; as a weighted sum it is doubly robust.
        method: how it is computed, a name in `ope_gym.estimators.weighted.METHODS`.
        common: part of an evaluation that names no estimators.
        use: when to use it, in a line.
    """

    scheme: str
    capped: bool = False
    normalised: bool = False
    baseline: bool = False
    method: str = "weighted"
    common: bool = True
    use: str = ""

    @property
    def uses_q(self) -> bool:
        """Whether a q model changes it."""
        return self.baseline or self.method == "auto"


ESTIMATORS: dict[str, Composition] = {
    "BIS": Composition(
        "basic", use="needs only the logged propensities; unbiased even on adaptive data; noisy"
    ),
    "BCIS": Composition(
        "basic", capped=True, use="a lower bound in mean when rewards are positive"
    ),
    "NBIS": Composition("basic", normalised=True, use="only logged propensities at hand"),
    "NBCIS": Composition("basic", True, True, use="the same, when a few weights dominate"),
    # FIS is never noisier than BIS for one step or rewards of one sign, but not in general
    "FIS": Composition("fused", use="unbiased for policies fixed in advance"),
    "FCIS": Composition("fused", capped=True, use="FIS when a few weights dominate"),
    "NFIS": Composition("fused", normalised=True, use="the first choice without a q model"),
    "NFCIS": Composition("fused", True, True, use="NFIS when a few weights dominate"),
    "OUIS": Composition("optimal", use="to compare with the paper; not always better than FIS"),
    "NOUIS": Composition("optimal", normalised=True, use="to compare with the paper"),
    "DM": Composition(
        "",
        baseline=True,
        method="direct",
        use="the q model alone: steady, and as wrong as the model; its interval does not know that",
    ),
    "DR": Composition(
        "basic",
        baseline=True,
        common=False,
        use="unbiased with a q fitted elsewhere; as noisy as BIS where the model is poor",
    ),
    "WDR": Composition(
        "basic",
        normalised=True,
        baseline=True,
        common=False,
        use="doubly robust with only logged propensities at hand",
    ),
    "FDR": Composition(
        "fused", baseline=True, common=False, use="DR against the mixture: FIS with a q model"
    ),
    "FWDR": Composition(
        "fused",
        normalised=True,
        baseline=True,
        use="NFIS with a q model that is known to be good; a poor one can cost",
    ),
    "MAGIC": Composition(
        "fused",
        normalised=True,
        baseline=True,
        method="magic",
        common=False,
        use="to compare: a blend of DM and FWDR, better only where the q model is good",
    ),
    "FISCV": Composition(
        "fused",
        method="control variates",
        common=False,
        use="FIS with the behaviours' ratios as control variates: many episodes, few behaviours",
    ),
    "ADR": Composition(
        "basic",
        baseline=True,
        method="adaptive",
        common=False,
        use="policies learned from the data, target fixed in advance, nothing held out",
    ),
    "EA": Composition(
        "", method="average", common=False, use="one-step data with a finite action set only"
    ),
    "auto": Composition(
        "fused",
        normalised=True,
        method="auto",
        use="the first choice: NFIS, corrected by the q model as far as that helps",
    ),
}
SHARD_ESTIMATORS = ("BIS", "NBIS", "FIS", "NFIS", "auto")  # of shards, unless others are named
WEIGHTED = {name: c for name, c in ESTIMATORS.items() if c.method == "weighted" and not c.baseline}


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
    def ess(self) -> FloatArray:
        """(T,) effective sample size (sum w)^2 / sum w^2 at each step; 0 without any weight."""
        weight, square = self.sums[0], self.sums[1]
        ess: FloatArray = np.divide(weight**2, square, out=np.zeros_like(weight), where=square > 0)
        return ess


@dataclass(frozen=True)
class Columns:
    """Sums of weights (after a cap) over all n trajectories at each step, and plain influence.

    Args:
        log_cap: log of the cap, inf without one.
        peak: (T,) M_t, log of the largest weight at t; -inf if all weights are zero.
        sums: (3, T) sum w, sum w^2, sum w r at t, with weights scaled by exp(-M_t).
        psi: (n,) sum_t gamma^t w r.
    """

    log_cap: float
    peak: FloatArray
    sums: FloatArray
    psi: FloatArray


def column_sums(
    log_w: FloatArray, rewards: FloatArray, offsets: IntArray, gamma: float, cap: float | None
) -> Columns:
    """The sums that plain and normalised estimators with the same weights share."""
    from ope_gym import kernels

    n, horizon = offsets.size - 1, int(np.diff(offsets).max())
    log_cap = np.inf if cap is None else float(np.log(cap))
    peak, gone = np.full(horizon, -np.inf), np.full(horizon + 1, -np.inf)
    kernels.column_peaks(log_w, log_cap, offsets, peak, gone)
    gone = np.maximum.accumulate(gone)
    peak = np.maximum(peak, gone[:-1])
    scale = np.where(np.isneginf(peak), 0.0, peak)
    gone_scale = np.where(np.isneginf(gone), 0.0, gone)
    with np.errstate(over="ignore"):
        pay = gamma ** np.arange(horizon) * np.exp(np.minimum(scale, 700.0))
    sums, ended, psi = np.zeros((3, horizon)), np.zeros((2, horizon + 1)), np.empty(n)
    kernels.column_sums(log_w, log_cap, rewards, offsets, scale, gone_scale, pay, sums, ended, psi)
    kernels.add_ended(scale, gone, ended, sums)
    return Columns(log_cap, peak, sums, psi)


def moments(
    log_w: FloatArray,
    rewards: FloatArray,
    offsets: IntArray,
    gamma: float,
    columns: Columns,
    *,
    normalised: bool = False,
) -> Moments:
    """Value and influence of one composition from its log weights (S,) and their sums."""
    from ope_gym import kernels

    peak, sums, log_cap = columns.peak, columns.sums, columns.log_cap
    discount = np.float64(gamma) ** np.arange(peak.size)
    psi = columns.psi
    if normalised:
        psi = np.full(psi.size, np.nan)
        value = np.nan
        if np.all(sums[0] > 0):
            value = float(np.sum(discount * sums[2] / sums[0]))
            kernels.normalised_influence(
                log_w, log_cap, rewards, offsets, discount, peak, sums, psi
            )
    else:
        if peak.max() > 700.0:  # not a float64 any more: infinite, and the verdict says so
            psi = _overflowing(np.minimum(log_w, log_cap), rewards, offsets, discount)
        elif peak.max() == -np.inf:  # no weight at all is no estimate, not an estimate of 0
            psi = np.full(psi.size, np.nan)
        with np.errstate(invalid="ignore"):
            value = float(psi.mean())
    log_last = np.minimum(log_w[offsets[1:] - 1], log_cap)
    capped = 0.0 if np.isinf(log_cap) else float(np.mean(log_w > log_cap))
    return Moments(value, psi, peak, sums, log_last, capped)


def _overflowing(
    log_w: FloatArray, rewards: FloatArray, offsets: IntArray, discount: FloatArray
) -> FloatArray:
    """Influence values of plain weights some of which exceed the largest float."""
    steps = np.arange(log_w.size) - np.repeat(offsets[:-1], np.diff(offsets))
    with np.errstate(all="ignore"):
        paid = np.exp(log_w + np.log(discount)[steps]) * rewards
        paid[rewards == 0] = 0.0
        return np.add.reduceat(paid, offsets[:-1])


def standard_error(influence: FloatArray, strata: IntArray) -> float:
    """SE^2 = sum_k rho_k^2 s_k^2 / n_k, s_k^2 the variance of psi inside stratum k.

    A stratum of one trajectory is joined to a neighbour, since its own spread cannot be seen. NaN
    when all are alone.
    """
    from ope_gym import kernels

    strata = join_single(strata)
    n, counts = influence.size, np.bincount(strata)
    if counts.max() < 2 or not np.all(np.isfinite(influence)):
        return np.nan
    squares = kernels.squares_within(influence, strata, counts)
    return float(np.sqrt(np.sum(counts * squares / (counts - 1.0))) / n)


def covariance_within(influence: FloatArray, strata: IntArray) -> FloatArray:
    """(m, m) covariance of means from influence values (m, n): `standard_error` for several.

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
    """Influence values minus their means inside each stratum."""
    counts = np.bincount(strata)
    means = np.bincount(strata, influence) / np.maximum(counts, 1)
    return influence - means[strata]


def join_single(strata: IntArray) -> IntArray:
    """Strata renumbered 0, 1, ..., each single trajectory put with the neighbour before (or after).

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
    """The same groups numbered 0, 1, ... without gaps."""
    present = np.bincount(strata) > 0
    return strata if present.all() else (np.cumsum(present) - 1)[strata]
