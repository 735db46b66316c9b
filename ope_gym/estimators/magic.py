"""MAGIC: a q model for the far steps, importance weights for the near ones, mixed by their errors.

    g_j = 1/n sum_i v_i,0 + sum_{t <= j} gamma^t sum_i w~_i,t e_i,t,   e_t = r_t - q_t + gamma v_t+1

w~ are weights divided by their sum at each step. g_-1 is the direct method, g at the last step is
the weighted doubly robust estimate (WDR), and g_j between them trusts the weights up to step j and
the model beyond. MAGIC is J = sum_j x_j g_j over about ten cuts j, with x >= 0, sum x = 1 and

    x = argmin x' (Omega + b b') x,

Omega the covariance of the g_j from their influence values inside strata, and b_j the distance of
g_j from the ess-t interval of WDR at `LEVEL` (0 inside it): the least bias that the data prove. The
error of WDR itself counts as variance only, as if it had no bias.

A higher level believes the model more: better with a right one, worse with a wrong one.

Use it when the q model may be good or bad and the weights get uneven at later steps. Weakness: it
believes the model wherever the interval of WDR is too wide to contradict it, so few episodes or
very uneven weights hide a bias; and its influence values hold x and the model fixed, so those of a
mixture close to the direct method know only the spread of v at the start (`evaluate` reports the
error of WDR instead). Look at `weights`.
Cost: O(S) for one pass over the steps, O(n J) memory for J cuts, and a programme of size J.

Reference: Thomas & Brunskill (2016), Data-efficient off-policy policy evaluation for reinforcement
learning. They take the covariance from the sample and a bootstrap percentile interval.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.reductions import Column, Starts, Steps, ask, discounts, together
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import (
    Columns,
    Influence,
    Payer,
    Replicates,
    Setting,
    StepSums,
    normalise,
)
from ope_gym.inference.computed import Computed
from ope_gym.inference.errors import covariance_within
from ope_gym.inference.intervals import Interval, ess_t, undefined
from ope_gym.verdict import Reason

CUTS = 10
RIDGE = (
    1e-9  # of the largest error: of x that are as good, as with 2 or 3 trajectories, the evenest
)
LEVEL = 0.5  # of the interval of WDR: beyond it a bias counts


@dataclass(frozen=True, eq=False)
class Magic:
    """The mixture and its parts; m cuts.

    Args:
        value: the estimate; NaN where the error of WDR cannot be known.
        influence: (n,) of the mixture with x held fixed; they average to 0.
        cuts: (m,) last step whose weights each part uses: -1 is the direct method, T - 1 is WDR.
        parts: (m,) g_j.
        bias: (m,) distance of each part from `interval`.
        covariance: (m, m) of the parts.
        weights: (m,) x.
        interval: Interval of WDR, from which bias is measured.
    """

    value: float
    influence: FloatArray
    cuts: IntArray
    parts: FloatArray
    bias: FloatArray
    covariance: FloatArray
    weights: FloatArray
    interval: Interval


def spread_cuts(horizon: int) -> IntArray:
    """Return at most `CUTS` last steps from -1 to horizon - 1, closer together at first."""
    return np.unique(np.rint(horizon * np.linspace(0.0, 1.0, CUTS) ** 2).astype(np.int64)) - 1


def magic(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute MAGIC. Its error is that of FWDR.

    The bias of the blend is only known to lie within FWDR's own interval, so the spread of the
    blend alone, which may be the q model's, says too little.

    Thomas & Brunskill (2016), https://arxiv.org/abs/1604.00923.
    """
    column = setting.column(c)
    totals, start = yield StepSums(column, setting.gamma), Starts()
    columns, cuts = totals.columns, spread_cuts(totals.columns.peak.size)
    fwdr = normalise(column, totals, start, dataclasses.replace(setting, draws=None))
    wanted: list[Steps[Any]] = [mix(column, columns, start, cuts, setting), fwdr]
    if setting.draws is not None and np.isfinite(columns.value(setting.gamma)):
        payer = Payer(_payer(cuts, columns.peak.size, setting.gamma))
        wanted.append(ask(Replicates(column, columns, setting.draws, payer)))
    mixed: Magic
    shown: Computed
    mixed, shown, *drawn = yield from together(*wanted)
    weight = float(mixed.weights[0])
    replicates = None
    if setting.draws is not None and drawn and np.isfinite(mixed.value):
        replicates = bootstrap_magic(mixed, drawn[0], setting.draws.means(start))
    return dataclasses.replace(
        shown,
        value=mixed.value,
        influence=mixed.influence,
        spread=shown.influence,
        replicates=replicates,
        reasons=(Reason("mostly_direct", share=weight),) if weight > 0.5 else (),
        report={"weight of DM": weight},
    )


def mix(
    column: Column, columns: Columns, start: FloatArray, cuts: IntArray, setting: Setting
) -> Steps[Magic]:
    """Mix the parts g_j of one column of weights.

    Args:
        column: which weights; they multiply the residuals of the q model.
        columns: the sums of these weights and residuals over all trajectories.
        start: (n,) v at the start.
        cuts: (m,) rising, first -1 and last T - 1, from `spread_cuts`.
        setting: Setting of the evaluation.
    """
    n, horizon, size = start.size, columns.peak.size, cuts.size
    weight, square, paid = columns.sums
    if not np.all(weight > 0):  # at some step no weight is left: there is no WDR
        blank, nothing = np.full(n, np.nan), np.full(size, np.nan)
        spread, none = np.full((size, size), np.nan), undefined(LEVEL, "ess-t")
        return Magic(np.nan, blank, cuts, nothing, nothing, spread, nothing, none)
    ends = tuple((cuts[1:] + 1).tolist())
    (stretches,) = yield (Influence(column, setting.gamma, columns, n, ends),)
    influence = np.cumsum(np.vstack([start - start.mean(), stretches]), axis=0)
    paid_by = np.append(0.0, np.cumsum(discounts(setting.gamma, horizon) * paid / weight))
    parts = start.mean() + paid_by[cuts + 1]
    covariance = covariance_within(influence, setting.groups)
    ess = float(np.min(weight**2 / square))
    interval = ess_t(float(parts[-1]), float(np.sqrt(covariance[-1, -1])), ess, LEVEL)
    bias = distance(parts, interval)
    weights = blend(covariance, bias)
    value = float(weights @ parts)
    return Magic(value, weights @ influence, cuts, parts, bias, covariance, weights, interval)


def distance(values: FloatArray, interval: Interval) -> FloatArray:
    """Return how far values lie outside an interval, signed; 0 inside, NaN if undefined."""
    return np.asarray(values - np.clip(values, interval.low, interval.high))


def blend(covariance: FloatArray, bias: FloatArray) -> FloatArray:
    """Return the x of the simplex with least x' (Omega + b b') x; NaN if they are not numbers.

    Exact: y >= 0 of least y' A y + (sum y - 1)^2, a non-negative least squares problem, is that
    point times a positive number, because along any ray the least value rises with x' A x.
    """
    from scipy.optimize import nnls

    error = covariance + np.outer(bias, bias)
    if not np.all(np.isfinite(error)):
        return np.full(bias.size, np.nan)
    scale = float(np.max(np.diag(error)))
    if scale <= 0.0:  # no part has any error: all agree on one value
        return np.full(bias.size, 1.0 / bias.size)
    values, vectors = np.linalg.eigh(error / scale)
    root = np.sqrt(np.maximum(values, RIDGE))[:, None] * vectors.T
    best, _ = nnls(np.vstack([root, np.ones(bias.size)]), np.append(np.zeros(bias.size), 1.0))
    return np.asarray(best / best.sum())


def _payer(cuts: IntArray, horizon: int, gamma: float) -> FloatArray:
    """Return (T, m) gamma^t in the column of the stretch of steps to which t belongs."""
    shares = np.zeros((horizon, cuts.size))
    shares[np.arange(horizon), np.searchsorted(cuts, np.arange(horizon))] = discounts(
        gamma, horizon
    )
    return shares


def bootstrap_magic(magic: Magic, stretches: FloatArray, starts: FloatArray) -> FloatArray:
    """Return replicates (R,): all parts drawn anew, mixed by the weights that their biases give.

    The covariance and the width of the interval are those of the data; a replicate in which some
    step has no weight at all is NaN.

    Args:
        magic: MAGIC on the data.
        stretches: (R, m) normalised residuals of the stretches between cuts in each replicate.
        starts: (R,) mean of v at the start in each replicate.
    """
    parts = stretches.copy()
    parts[:, 0] += starts
    parts = np.cumsum(parts, axis=1)
    result = np.empty(len(parts))
    shift = parts[:, -1] - magic.parts[-1]
    for r, (part, by) in enumerate(zip(parts, shift, strict=True)):
        result[r] = blend(magic.covariance, distance(part - by, magic.interval)) @ part
    return result
