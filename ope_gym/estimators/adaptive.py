"""Adaptive data: a target fixed in advance, behaviours learned from the episodes before them.

    Gamma_i = v_i,0 + sum_t gamma^t w_i,t e_i,t,   w = P_e / P_own,   e_t = r_t - q_t + gamma v_t+1
    J = sum_i h_b(i) Gamma_i / sum_i h_b(i)

Behaviours 0, 1, ... are rounds in the order of time. The q of round k is learned from earlier
rounds alone (`past_only`), the weights are basic, and h_k is known before round k: given the past,
each Gamma has the mean J, so h (Gamma - J) is a sequence of martingale differences. Fused weights
have no such property: their mixture contains policies that later rewards have shaped.

    SE^2 = sum_i h_b(i)^2 (Gamma_i - J)^2 / (sum_i h_b(i))^2

`stable_weights` takes h_k proportional to 1 / sigma_k, which makes all rounds equally noisy, as the
central limit theorem for martingales asks; sigma_k^2 is the variance of Gamma under behaviour k as
earlier episodes, reweighted to it, let one expect it.

Exact: with h fixed in advance (for example all 1) the mean of the estimate is J, for any learner
and any past-only q, if each behaviour can do whatever the target can, and if policies change only
between episodes. Not exact: with h from the data, h is still known in advance but the division by
sum h leaves a bias of order 1 / n; the interval is asymptotic. An episode during which the policy
changed is counted to the round in which it began.

Use it where policies learn from the data and no held-out episodes exist. Weakness: basic weights
are noisier than fused ones, hopeless where early policies are far from the target; the first round
has no q. It does not help a target that was trained on these very episodes.
Cost: one fit of q a round, and for h one pass over (K, S) log-probabilities and O(n K) memory.

References: Hadad et al. (2021), Confidence intervals for policy evaluation in adaptive experiments;
Bibaut et al. (2021), Post-contextual-bandit inference; Zhan et al. (2021), Off-policy evaluation
via adaptive weighting with data from contextual bandits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import Baseline, QModel, values_at
from ope_gym.policies import Policy
from ope_gym.weights.behaviours import Behaviours
from ope_gym.weights.formula import LogProbRows, block_of, chunks_of

_RANGE = 10.0  # h stays within this factor of that of the first round
_SEEN = 5.0  # effective earlier episodes below which sigma_k is not estimated
_ROWS = 1 << 16  # steps evaluated at once


@dataclass(frozen=True, eq=False)
class AdaptiveDR:
    """The estimate and its rounds; K behaviours.

    Args:
        value: the estimate.
        influence: (n,) J + n h (Gamma - J) / sum h, whose mean is the value. Its standard error
            inside strata is SE but for the means of the rounds, which it takes out.
        standard_error: SE, of the martingale.
        weights: (K,) h.
        means: (K,) mean Gamma of each round; NaN without episodes.
        ess: (sum h)^2 / sum h^2, what uneven h leave of n.
    """

    value: float
    influence: FloatArray
    standard_error: float
    weights: FloatArray
    means: FloatArray
    ess: float


def adaptive_dr(terms: FloatArray, ids: IntArray, weights: FloatArray) -> AdaptiveDR:
    """The weighted mean of the terms.

    Args:
        terms: (n,) Gamma: plain influence of basic weights on residuals, plus v at the start.
        ids: (n,) round of each trajectory.
        weights: (K,) h, not negative; ones give the plain mean.
    """
    weights = np.asarray(weights, dtype=np.float64)
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        k = int(np.argmax(bad))
        raise ValueError(
            f"weights is {weights[k]} for round {k}: it must be finite and not below 0"
        )
    if ids.max() >= weights.size:
        raise ValueError(
            f"weights has {weights.size} rounds, but ids has a round {ids.max()}: give one a round"
        )
    h = weights[ids]
    total = float(h.sum())
    if total <= 0.0:
        raise ValueError("weights are 0 for every round that has episodes: one must be above 0")
    counts = np.bincount(ids, minlength=weights.size)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.bincount(ids, terms, minlength=weights.size) / counts
        value = float(h @ terms / total)
        errors = h * (terms - value)
        influence = value + terms.size * errors / total
        error = float(np.sqrt(np.sum(errors**2)) / total)
    if terms.size < 2:  # a single term is its own mean: nothing is known of its error
        error = np.nan
    return AdaptiveDR(value, influence, error, weights, means, total**2 / float(h @ h))


def stable_weights(
    target_log_probs: FloatArray,
    behaviour_log_probs: FloatArray | LogProbRows,
    ids: IntArray,
    offsets: IntArray,
    gamma: float,
    start: FloatArray,
    residuals: FloatArray,
) -> FloatArray:
    """(K,) h_k = sigma_0 / sigma_k, both as the episodes before round k let one expect them.

        sigma_k^2 = sum_{i before k} u (Gamma_i,k - mean)^2 / sum u,   u = P_k / mixture of the past

    Gamma_i,k is episode i with weights P_e / P_k and the residuals of its own round: those of round
    k would need its q on all earlier episodes, and differ little in how h changes. h_0 = 1; where
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
    from ope_gym import kernels

    n, rounds = ids.size, behaviour_log_probs.shape[0]
    prefix = np.empty(target_log_probs.size)
    kernels.cumulate(target_log_probs, 0, n, offsets, prefix)
    discount = gamma ** np.arange(int(np.diff(offsets).max()))
    terms, last = np.empty((rounds, n)), np.empty((rounds, n))
    for begin, end in chunks_of(offsets, rounds):
        first, stop = int(offsets[begin]), int(offsets[end])
        block = block_of(behaviour_log_probs, first, stop)
        kernels.rival_terms(
            block, first, begin, end, offsets, prefix, residuals, discount, terms, last
        )
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
    """Variance of terms weighted by u; NaN where u leaves too few of them, or they are equal."""
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


def past_only(
    model: QModel,
    data: Trajectories,
    target: Policy,
    behaviours: Behaviours,
    gamma: float,
    horizon: int,
    rng: np.random.Generator,
) -> Baseline:
    """The values in each round, learned from the episodes of earlier rounds; 0 in the first.

    The bounds q is clipped to come from earlier rewards, too.

    Args:
        model: what learns; it is fitted once a round.
        data: recorded episodes.
        target: the policy to evaluate.
        behaviours: who acted, in the order of time.
        gamma: discount.
        horizon: longest possible episode.
        rng: of the learner, and of the target's continuous actions.
    """
    q, v = np.zeros(data.n_steps), np.zeros(data.n_steps)
    round_of = behaviours.ids[data.episode_ids]
    annuity = np.append(0.0, np.cumsum(gamma ** np.arange(horizon)))
    for k in np.unique(behaviours.ids)[1:]:
        past = data.select(episodes=np.flatnonzero(behaviours.ids < k))
        values = model.fit(past, target, gamma=gamma, horizon=horizon, rng=rng)
        seen = past.rewards
        bounds = min(float(seen.min()), 0.0) * annuity, max(float(seen.max()), 0.0) * annuity
        rows = np.flatnonzero(round_of == k)
        for begin in range(0, rows.size, _ROWS):
            some = rows[begin : begin + _ROWS]
            q[some], v[some] = values_at(values, data, target, some, bounds, rng)
    return Baseline(q, v)
