"""What a partial mixture loses, measured on a sample of trajectories.

    efficiency = ESS_partial / ESS_whole,   ESS = (sum w)^2 / sum w^2

at the step where the partial weights are worst, over all recorded trajectories; those that were not
kept have no partial weight. The sums of partial weights p_i are known. Those of the whole mixture
are W1 = sum_i w_i and W2 = sum_i w_i^2, estimated from m draws of trajectories with probability

    q_i = (1 / n + p_i^2 / sum_j p_j^2) / 2:

half of them where the weight is. As ratios to what the same draws say of the partial sums,

    W2 / sum p^2 = (sum_draws w^2 / q) / (sum_draws p^2 / q),

and W1 alike: where the two weights agree there is no noise at all. Since the whole mixture is at
least n_g / n times that of a group, w is at most n / n_g times p, and no draw can surprise much.
Cost: m trajectories times all behaviours, linear in their number.
"""

from __future__ import annotations

import numpy as np

from ope_gym import kernels
from ope_gym.estimators import column_sums
from ope_gym.likelihood import Behaviours, behaviours_of, policy_log_probs
from ope_gym.mixtures import whole_mixture
from ope_gym.policies import Policy
from ope_gym.results import PartialMixture
from ope_gym.trajectories import Trajectories
from ope_gym.weights import FloatArray, IntArray

SAMPLED = 128  # draws


def partial_mixture(
    data: Trajectories,
    behaviours: Behaviours,
    groups: IntArray,
    target: Policy,
    log_w: FloatArray | None,
    gamma: float,
    seed: int,
    kept_from: Trajectories | None = None,
    kept: IntArray | None = None,
) -> PartialMixture | None:
    """What is said of weights that are not against all behaviours; None if they are.

    Args:
        data: the trajectories that are used.
        behaviours: theirs.
        groups: (K,) in which mixtures they stand.
        target: the policy to evaluate.
        log_w: (S,) log fused weights; None if there are but basic weights, which need no mixture.
        gamma: discount.
        seed: of the sample.
        kept_from: all recorded trajectories, if `data` are not all.
        kept: (n,) which of them `data` are.
    """
    sizes = np.array([groups.size]) if log_w is None else np.bincount(groups)
    whole = behaviours if kept_from is None else behaviours_of(kept_from)
    if sizes.size == 1 and len(whole.plans) == groups.size:
        return None
    found = np.nan, np.nan
    if log_w is not None:
        total, square, _ = column_sums(log_w, data.rewards, data.offsets, gamma, None).sums
        ess = np.divide(total**2, square, out=np.zeros(total.size), where=square > 0)
        step = int(np.argmin(ess))
        found = efficiency(
            data if kept_from is None else kept_from, whole, target,
            np.arange(len(data)) if kept is None else kept,
            log_w[rows_at(data.offsets, step)], step, seed,
        )  # fmt: skip
    return PartialMixture(len(whole.plans), groups.size, sizes.size, int(sizes.max()), *found)


def efficiency(
    data: Trajectories,
    behaviours: Behaviours,
    target: Policy,
    used: IntArray,
    log_partial: FloatArray,
    step: int,
    seed: int,
) -> tuple[float, float]:
    """The effective sample size as a share of that of the whole mixture, and its standard error.

    Args:
        data: all recorded trajectories.
        behaviours: theirs.
        target: the policy to evaluate.
        used: (m,) the trajectories that are used.
        log_partial: (m,) their log weights at `step`, against their own group.
        step: at which to compare; an episode that ended before counts with its last weight.
        seed: of the draws.
    """
    n = len(data)
    top = float(log_partial.max(initial=-np.inf))
    if top == -np.inf:
        return np.nan, np.nan
    partial = np.zeros(n)
    partial[used] = np.exp(log_partial - top)
    chance = 0.5 / n + 0.5 * partial**2 / np.sum(partial**2)
    drawn, exact = np.arange(n), n <= SAMPLED
    if exact:
        chance = np.full(n, 1.0 / n)
    else:
        drawn = np.random.default_rng(seed).choice(n, SAMPLED, p=chance / chance.sum())
    distinct, place = np.unique(drawn, return_inverse=True)
    log_w = _whole_log_weights(data.select(episodes=distinct), behaviours, target, step)
    shift = max(float(log_w.max()), top)
    w, p = np.exp(log_w - shift)[place], partial[drawn] * np.exp(top - shift)
    q = chance[drawn]
    if not (p.any() and w.any()):
        return np.nan, np.nan
    change, terms = [], []
    for power in (1, 2):
        ours, theirs = p**power / q, w**power / q
        change.append(float(theirs.sum() / ours.sum()))
        terms.append((theirs - change[-1] * ours) / theirs.mean())  # of the log of the ratio
    value = change[1] / change[0] ** 2
    noise = (terms[1] - 2 * terms[0]).std() / np.sqrt(drawn.size)
    return value, 0.0 if exact else float(value * noise)


def _whole_log_weights(
    data: Trajectories, behaviours: Behaviours, target: Policy, step: int
) -> FloatArray:
    """(n,) log weights against all behaviours at a step, or the last one before."""
    own, prefix = policy_log_probs(target, "target", data), np.empty(data.n_steps)
    kernels.cumulate(own, 0, len(data), data.offsets, prefix)
    at = rows_at(data.offsets, step)
    return np.asarray((prefix - whole_mixture(data, behaviours))[at])


def rows_at(offsets: IntArray, step: int) -> IntArray:
    """(n,) the row of each trajectory at a step, or its last row if it ended before."""
    return np.asarray(np.minimum(offsets[:-1] + step, offsets[1:] - 1))
