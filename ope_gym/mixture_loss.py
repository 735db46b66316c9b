"""What a partial mixture loses, measured on a sample of trajectories.

    efficiency = ESS_partial / ESS_whole,   ESS = (sum w)^2 / sum w^2 at the step where it is least

over all recorded trajectories. The sums of partial weights p_i are known. Those of the whole
mixture, W1 = sum_i w_i and W2 = sum_i w_i^2, are estimated from m draws of trajectories, half of
them where the weight is:

    q_i = (1 / n + p_i^2 / sum_j p_j^2) / 2
    W2 / sum p^2 = (sum_draws w^2 / q) / (sum_draws p^2 / q),   and W1 / sum p alike.

Where the two weights agree there is no noise at all; since the whole mixture is at least n_g / n
times that of a group, w is at most n / n_g times p, so that no draw can surprise much. Where only
the nearest behaviours are kept, small interleaved groups of all behaviours give the p of the draws.
Cost: m trajectories times all behaviours, linear in their number.
"""

from __future__ import annotations

import numpy as np

from ope_gym import kernels
from ope_gym.estimators import column_sums
from ope_gym.likelihood import Behaviours, behaviours_of, policy_log_probs
from ope_gym.mixtures import interleaved, partial_log_weights, whole_mixture
from ope_gym.policies import Policy
from ope_gym.results import PartialMixture
from ope_gym.trajectories import Trajectories
from ope_gym.weights import FloatArray, IntArray

SAMPLED = 128  # draws
_GUIDE = 16  # behaviours of the mixtures that guide the draws where not all episodes are kept


def partial_mixture(
    data: Trajectories,
    behaviours: Behaviours,
    groups: IntArray,
    target: Policy,
    log_w: FloatArray | None,
    seed: int,
    kept_from: Trajectories | None = None,
) -> PartialMixture | None:
    """What is said of weights that are not against all behaviours; None if they are.

    Args:
        data: the trajectories that are used.
        behaviours: theirs.
        groups: (K,) in which mixtures they stand.
        target: the policy to evaluate.
        log_w: (S,) log fused weights; None if there are but basic weights, which need no mixture.
        seed: of the sample.
        kept_from: all recorded trajectories, if `data` are not all.
    """
    sizes = np.array([groups.size]) if log_w is None else np.bincount(groups)
    whole = behaviours if kept_from is None else behaviours_of(kept_from)
    if sizes.size == 1 and len(whole.plans) == groups.size:
        return None
    share, error = np.nan, np.nan
    if log_w is not None:
        ess = float(ess_curve(data, log_w).min())
        if kept_from is not None:
            data, log_w = kept_from, _guide(kept_from, whole, target)
        everything, error = whole_ess(data, whole, target, log_w, seed)
        share = ess / everything
    return PartialMixture(
        len(whole.plans), groups.size, sizes.size, int(sizes.max()), share, share * error
    )


def ess_curve(data: Trajectories, log_w: FloatArray) -> FloatArray:
    """(T,) effective sample size of log weights (S,) at each step."""
    total, square, _ = column_sums(log_w, data.rewards, data.offsets, 1.0, None).sums
    return np.asarray(np.divide(total**2, square, out=np.zeros(total.size), where=square > 0))


def whole_ess(
    data: Trajectories, behaviours: Behaviours, target: Policy, log_partial: FloatArray, seed: int
) -> tuple[float, float]:
    """Effective sample size against the mixture of all behaviours, and its relative error.

    Args:
        data: all recorded trajectories.
        behaviours: theirs.
        target: the policy to evaluate.
        log_partial: (S,) log weights against a part of the behaviours each. The step is that at
            which their own effective sample size is least.
        seed: of the draws.
    """
    step, n = int(np.argmin(ess_curve(data, log_partial))), len(data)
    log_p = log_partial[_rows_at(data, step)]
    top = float(log_p.max())
    if top == -np.inf:
        return np.nan, np.nan
    p = np.exp(log_p - top)
    q, drawn = np.full(n, 1.0 / n), np.arange(n)
    if n > SAMPLED:
        q = 0.5 / n + 0.5 * p**2 / np.sum(p**2)
        drawn = np.random.default_rng(seed).choice(n, SAMPLED, p=q / q.sum())
    distinct, place = np.unique(drawn, return_inverse=True)
    log_w = _whole_log_weights(data.select(episodes=distinct), behaviours, target, step)
    shift = float(log_w.max())
    if shift == -np.inf:
        return np.nan, np.nan
    w, p_drawn = np.exp(log_w - shift)[place], p[drawn]
    sums, noise = [], np.zeros(drawn.size)
    for power, sign in ((1, 2.0), (2, -1.0)):
        ours, theirs = p_drawn**power / q[drawn], w**power / q[drawn]
        ratio = float(theirs.sum() / ours.sum())
        sums.append(ratio * float(np.sum(p**power)))
        noise += sign * (theirs - ratio * ours) / theirs.mean()  # of the log of (sum w)^2 / sum w^2
    error = float(noise.std()) / np.sqrt(drawn.size) if n > SAMPLED else 0.0
    return sums[0] ** 2 / sums[1], error


def _guide(data: Trajectories, behaviours: Behaviours, target: Policy) -> FloatArray:
    """(S,) log weights against small groups of all behaviours."""
    groups = interleaved(behaviours.counts, _GUIDE)
    base = partial_log_weights(data, behaviours, groups, ["fused"], density=True)[0]["fused"]
    return base + _prefix(data, target)


def _whole_log_weights(
    data: Trajectories, behaviours: Behaviours, target: Policy, step: int
) -> FloatArray:
    """(n,) log weights against all behaviours at a step, or the last one before."""
    weights = _prefix(data, target) - whole_mixture(data, behaviours)
    return np.asarray(weights[_rows_at(data, step)])


def _prefix(data: Trajectories, target: Policy) -> FloatArray:
    """(S,) log-probability of the actions up to each step under the target."""
    own, prefix = policy_log_probs(target, "target", data), np.empty(data.n_steps)
    kernels.cumulate(own, 0, len(data), data.offsets, prefix)
    return prefix


def _rows_at(data: Trajectories, step: int) -> IntArray:
    """(n,) the row of each trajectory at a step, or its last row if it ended before."""
    return np.asarray(np.minimum(data.offsets[:-1] + step, data.offsets[1:] - 1))
