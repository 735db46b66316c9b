"""What a partial mixture loses, measured on a sample of trajectories.

    efficiency = min_t ESS_partial,t / min_t ESS_whole,t,   ESS_t = (sum w_t)^2 / sum w_t^2

each sum over the trajectories that the weights are of. The partial weights p are known. The sums of
the weights w against all behaviours are estimated at every step from m draws of trajectories:

    sum w^a = sum g^a (sum_draws w^a / q) / (sum_draws g^a / q),   a = 1, 2

w is not known before it is drawn, but bounded, since any part of the mixture is at most the whole:

    w <= r = P_e / max(n_g / n mixture of the group, sum over the nearest behaviours n_k / n P_k).

g = min(p, r) is a guess of w. The proposal q is a mean over steps of x / sum x and x^2 / sum x^2
for x = r and x = g, so that at these steps no w / q is large beside sum r, no g / q beside sum g,
nor their squares. Where the guess is right there is no noise at all. Where few draws carry a sum
their spread says little, and no error is given. The least of a noisy curve is a little too small,
so that the efficiency comes out too large, by a fraction of its error.

Cost: all trajectories times the nearest behaviours, and m trajectories times all: linear.
"""

from __future__ import annotations

import numpy as np

from ope_gym import kernels
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import column_sums
from ope_gym.policies.closed_form import Policy
from ope_gym.results import PartialMixture
from ope_gym.weights.behaviours import Behaviours, behaviours_of, policy_log_probs
from ope_gym.weights.mixtures import interleaved, partial_log_weights, whole_mixture

SAMPLED = 128  # draws
_FEW = 16  # effective draws below which their spread says little
_GUIDE = 16  # nearest behaviours; and size of the groups where not all episodes are kept
_STEPS = 16  # that the proposal looks at
_UNIFORM = 0.1  # share of the proposal that is the same for all trajectories


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
            data, groups = kept_from, interleaved(whole.counts, _GUIDE)
            base = partial_log_weights(data, whole, groups, ["fused"], density=True)[0]["fused"]
            log_w = base + _prefix(policy_log_probs(target, "target", data), data)
        everything, error = whole_ess(data, whole, groups, target, log_w, seed)
        share = ess / everything
    return PartialMixture(
        len(whole.plans), behaviours.counts.size, sizes.size, int(sizes.max()), share, share * error
    )


def ess_curve(data: Trajectories, log_w: FloatArray) -> FloatArray:
    """(T,) effective sample size of log weights (S,) at each step."""
    total, square, _ = column_sums(log_w, data.rewards, data.offsets, 1.0, None).sums
    return np.asarray(np.divide(total**2, square, out=np.zeros(total.size), where=square > 0))


def whole_ess(
    data: Trajectories,
    behaviours: Behaviours,
    groups: IntArray,
    target: Policy,
    log_partial: FloatArray,
    seed: int,
) -> tuple[float, float]:
    """Least effective sample size against the mixture of all behaviours, and its relative error.

    Args:
        data: all recorded trajectories.
        behaviours: theirs.
        groups: (K,) of the behaviours.
        target: the policy to evaluate.
        log_partial: (S,) log weights against the groups.
        seed: of the draws.

    Returns:
        NaN twice if some step has no weight; an error of NaN if it rests on few draws.
    """
    n, own = len(data), policy_log_probs(target, "target", data)
    prefix = _prefix(own, data)
    if n <= SAMPLED:
        least = float(ess_curve(data, prefix - whole_mixture(data, behaviours)).min())
        return (least, 0.0) if least > 0.0 else (np.nan, np.nan)
    near = _nearest(data, behaviours, own)
    bound = _bound(data, behaviours, groups, near, prefix, log_partial)
    guess = np.minimum(log_partial, bound)
    q = _proposal(data, bound, guess)
    drawn, times = np.unique(
        np.random.default_rng(seed).choice(n, SAMPLED, p=q), return_counts=True
    )
    some, rows = data.select(episodes=drawn), _rows_of(data, drawn)
    log_w, log_g = prefix[rows] - whole_mixture(some, behaviours), guess[rows]
    carry = np.repeat(np.log(times / q[drawn]), some.lengths)
    horizon = int(data.lengths.max())
    log_ess = np.zeros(horizon)
    for power, sign in ((1, 2.0), (2, -1.0)):
        with np.errstate(invalid="ignore"):
            log_ess += sign * (
                _log_sums(some, carry + power * log_w, horizon)
                - _log_sums(some, carry + power * log_g, horizon)
                + _log_sums(data, power * guess, horizon)
            )
    if not np.isfinite(log_ess).all():
        return np.nan, np.nan
    step = int(np.argmin(log_ess))
    here = _rows_at(some, step)
    return float(np.exp(log_ess[step])), _error(log_w[here], log_g[here], times, q[drawn])


def _error(log_w: FloatArray, log_g: FloatArray, times: IntArray, q: FloatArray) -> float:
    """Standard error of the log of (sum w)^2 / sum w^2 from distinct draws; NaN from few."""
    w, g, noise = np.exp(log_w - log_w.max()), np.exp(log_g - log_g.max()), np.zeros(q.size)
    for power, sign in ((1, 2.0), (2, -1.0)):
        theirs, ours = w**power / q, g**power / q
        theirs, ours = theirs / (times @ theirs), ours / (times @ ours)
        if max(times @ theirs**2, times @ ours**2) > 1.0 / _FEW:
            return np.nan
        noise += sign * (theirs - ours)
    return float(np.sqrt(times @ noise**2))


def _nearest(data: Trajectories, behaviours: Behaviours, own: FloatArray) -> IntArray:
    """Behaviours with the least mean of x - 1 - log x over their own steps, x = pi_e / pi_k.

    Its expectation is the divergence of the target from the behaviour; it is never negative.
    """
    log_x = own - data.log_probs
    with np.errstate(over="ignore"):
        apart = np.exp(log_x) - 1.0 - log_x
    ids = np.repeat(behaviours.ids, data.lengths)
    far = np.bincount(ids, apart) / np.bincount(ids)
    return np.sort(np.argsort(far, kind="stable")[:_GUIDE])


def _bound(
    data: Trajectories,
    behaviours: Behaviours,
    groups: IntArray,
    near: IntArray,
    prefix: FloatArray,
    log_partial: FloatArray,
) -> FloatArray:
    """(S,) log r: what the weights against all behaviours cannot exceed."""
    share = np.bincount(groups, behaviours.counts)[groups[behaviours.ids]] / len(data)
    some = behaviours.part(near, np.zeros(len(data), dtype=np.int64))
    mixed = whole_mixture(data, some) + np.log(some.counts.sum() / len(data))
    with np.errstate(invalid="ignore"):  # what the target never does, under nobody near
        alone = np.where(np.isneginf(prefix), -np.inf, prefix - mixed)
    return np.asarray(np.minimum(log_partial - np.repeat(np.log(share), data.lengths), alone))


def _proposal(data: Trajectories, bound: FloatArray, guess: FloatArray) -> FloatArray:
    """(n,) chances of the draws: at some steps, more where the effective sample size is small."""
    ess, n = ess_curve(data, bound), len(data)
    result, total = np.zeros(n), 0.0
    even = np.linspace(0, ess.size - 1, _STEPS).round().astype(np.int64)
    for step in np.unique(np.append(even, np.argmin(ess))):
        rows = _rows_at(data, int(step))
        if guess[rows].max() > -np.inf:
            total += 1.0 / ess[step]
            for log_x in (bound[rows], guess[rows]):
                x = np.exp(log_x - log_x.max())
                result += (x / x.sum() + x**2 / np.sum(x**2)) / (4.0 * ess[step])
    if total:
        result *= (1.0 - _UNIFORM) / total
    result += (1.0 - result.sum()) / n
    return np.asarray(result / result.sum())


def _log_sums(data: Trajectories, log_w: FloatArray, horizon: int) -> FloatArray:
    """(T,) log of the sum of exp(log_w) at each step; what ended keeps its last number."""
    columns = column_sums(log_w, np.zeros(log_w.size), data.offsets, 1.0, None)
    with np.errstate(divide="ignore"):
        found = columns.peak + np.log(columns.sums[0])
    return np.append(found, np.full(horizon - found.size, found[-1]))


def _prefix(own: FloatArray, data: Trajectories) -> FloatArray:
    """(S,) log-probability of the actions up to each step, from that of each."""
    prefix = np.empty(data.n_steps)
    kernels.cumulate(own, 0, len(data), data.offsets, prefix)
    return prefix


def _rows_at(data: Trajectories, step: int) -> IntArray:
    """(n,) the row of each trajectory at a step, or its last row if it ended before."""
    return np.asarray(np.minimum(data.offsets[:-1] + step, data.offsets[1:] - 1))


def _rows_of(data: Trajectories, episodes: IntArray) -> IntArray:
    """The rows of some trajectories, one after the other."""
    begin, lengths = data.offsets[:-1][episodes], data.lengths[episodes]
    rows = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
    return np.asarray(rows + np.arange(rows.size))
