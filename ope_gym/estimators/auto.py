"""auto, the recommended estimator: a q model as far as the data confirm it, else the weights.

    J = A + s (M - A),   A = N + c (W - N)

with N = NFIS, W = FWDR whose weights are clipped at sqrt(n) times their mean at each step, and
M = DM with the influence values of MDR, which is M to first order (`ope_gym.estimators.marginal`).

One principle decides: each estimate has a variance and a squared bias, and a squared bias is the
squared deviation from what should be, less the square of its standard error,

    b^2 = (d^2 - S^2)+

since d^2 exceeds the squared bias by S^2 in the mean.

A: weights average 1 in expectation. If their mean m is below it, they have lost a part of what the
target does, which would have paid like a return of spread tau: b_A^2 = ((1 - m)^2 - S^2)+ tau^2.

M: it should agree with A and with the rows of memory 1, 2, 4 and 8 (`marginal.Corrections`):
b_M^2 = max_j (g_j^2 - S_j^2)+, less b_A^2 where the gap is that to A. Its variance is at least that
of pooled residuals.

q: of actions that no episode shows it knows nothing, and can be off by b_u (`marginal.Support`). No
weight corrects it there, so W is off by b_u as M is, and A by c b_u.

c and s have the least mean square error, with influence values psi whose weights are clipped,

    c = Cov(psi_N, psi_N - psi_W) / (Var(psi_N - psi_W) + b_u^2),   within [0, 1]

which is 0 with a useless q model. (A bias of W by its distance from N gains nothing, and costs
where W is exact.) With Var A as the intervals of ess-t see it, and no smaller than that of ESS
returns, because less is luck, and b_u as a part of the biases, of the same sign in A and M,

    s = (Var A + b_A^2 - Cov) / (Var A + b_A^2 + Var M + b_M^2 - 2 Cov),   within [0, 1]

The check of `ope_gym.estimators.markov` is a veto: if it fails, M is known to be wrong, and
b_g = |g| + S; then neither noisy weights nor b_A are a reason to move towards it.

The squared error of J is Var J + (1 - s)^2 b_A^2 + s^2 b_M^2 + (c + s - c s)^2 b_u^2, and its
effective number of episodes that of Satterthwaite. ESS and diagnostics are those of the weights
before clipping. Bootstrap replicates keep c, s and the clip. Without a q model J is NFIS, without
ratios of visits it is A.

Cost: that of NFIS thrice, and the fit of q. Weakness: a bias of the model as small as the error of
the weights shows nowhere, and the interval covers less there: the second interval, whatever the
model, has room for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.marginal import MEMORIES, Marginal, marginal
from ope_gym.estimators.reductions import Clip, Column, Returns, Steps, ask, together
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Columns, Setting, StepSums, normalise, weigh_column
from ope_gym.inference.computed import Computed, Weights
from ope_gym.inference.errors import (
    cautious_error,
    centre,
    covariance_within,
    join_single,
    standard_error,
)

_LEAST = 1.2  # effective episodes below which Student's t says nothing: its quantile explodes


def auto(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute the blend that the head of this module derives."""
    column = setting.column(c)
    if not setting.has_q:
        return (yield from weigh_column(column, True, setting))
    parts, model, returns = yield from together(
        parts_of_weights(column, setting), marginal(setting, MEMORIES), ask(Returns(setting.gamma))
    )
    plain: Computed = parts.plain
    weights = blend(parts, model.support.guess if model.known else 0.0, setting.groups)
    if not model.known:
        return weights
    spread = spread_of_returns(plain.weights, returns, setting.groups)
    plain = dataclasses.replace(plain, bias=float(np.sqrt(lost_weight(plain.weights))) * spread)
    return dataclasses.replace(rest_on(weights, model, returns, setting), plain=plain)


# J, of A and M ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """An estimate that a blend is made of, in a unit by which squares stay within floats.

    Args:
        influence: (n,), their mean is 0.
        variance: NaN if unknown.
        bias: its square.
        freedom: effective number of episodes behind the variance.
        guess: Bias of what no episode shows; it has the same sign in all parts.
    """

    influence: FloatArray
    variance: float
    bias: float
    freedom: float
    guess: float = 0.0


def rest_on(weights: Computed, model: Marginal, returns: FloatArray, setting: Setting) -> Computed:
    """Move an estimate by weights towards that of the model, as far as the data confirm it.

    Args:
        weights: A.
        model: M, and the evidence for it.
        returns: (n,) of the trajectories.
        setting: What all estimators of the evaluation share.
    """
    groups, failed = setting.groups, model.markov.failed
    unit = _largest(weights.influence, model.influence, model.gaps, returns)
    a = part_of_weights(weights, returns / unit, groups, unit, failed)
    m = part_of_model(model, weights, a, groups, unit)
    a = dataclasses.replace(a, guess=weights.report.get("c", 0.0) * m.guess)
    s = _share(a, m, groups, failed, bool(np.isfinite(weights.value)))
    steady = model.influence - model.value
    drawn = setting.drawn(steady + model.direct)
    if s == 1.0:  # nothing of the weights, which may be no numbers
        value, influence, replicates = model.direct, steady, drawn
    else:
        value = weights.value + s * (model.direct - weights.value)
        influence = (1.0 - s) * weights.influence + s * steady
        replicates = weights.replicates
        if replicates is not None and drawn is not None:
            replicates = replicates + s * (drawn - replicates)
    hidden = model.hidden_error(groups) / unit
    bias = (1.0 - s) ** 2 * a.bias + s**2 * (m.bias + hidden**2)
    bias += ((1.0 - s) * a.guess + s * m.guess) ** 2
    parts = ((1.0 - s, a), (s, m))
    variances = [share**2 * part.variance if share else 0.0 for share, part in parts]
    return dataclasses.replace(
        weights,
        value=value,
        influence=influence,
        replicates=replicates,
        report={**weights.report, "s": s, "unknown": model.support.unknown},
        reasons=model.reasons if s >= 0.5 else model.guesses,
        share=s,
        model=(model.direct, steady),
        bias=unit * float(np.sqrt(bias)),
        freedom=satterthwaite(variances, (a.freedom, m.freedom)),
    )


def _share(a: Part, m: Part, groups: IntArray, failed: bool, known: bool) -> float:
    """Return s; all of the model where the weights give no error, unless it is wrong, or no value.

    Args:
        a: Estimate by weights.
        m: That of the model.
        groups: (n,) groups of like trajectories.
        failed: Whether the model is known to be wrong.
        known: Whether the weights give a value.
    """
    if not np.isfinite(a.variance):
        return 0.0 if known and (failed or np.isnan(m.variance)) else 1.0
    if not np.isfinite(m.variance):
        return 0.0
    covariance = covariance_within(np.stack([a.influence, m.influence]), groups)[0, 1]
    # a model that is known to be wrong does not gain by what the weights have lost
    return least_error(dataclasses.replace(a, bias=0.0) if failed else a, m, float(covariance))


def part_of_weights(
    weights: Computed, returns: FloatArray, groups: IntArray, unit: float, failed: bool
) -> Part:
    """Return A with the bias of lost weight, and with an error of no fewer than ESS returns.

    Args:
        weights: A.
        returns: (n,) in units.
        groups: (n,) groups of like trajectories.
        unit: Unit of the squares.
        failed: Whether the model is known to be wrong; then noisy weights are no reason to take it.
    """
    influence, own = weights.influence / unit, weights.weights
    ess = float(np.min(own.ess))
    error, spread = cautious_error(influence, groups), spread_of_returns(own, returns, groups)
    if not (failed and ess > _LEAST):
        error = max(widened(error, ess), spread / np.sqrt(max(ess, 1.0)))  # NaN if unknown
    bias = lost_weight(own) * spread**2
    return Part(influence, error**2, bias, max(ess, 1.0))


def part_of_model(
    model: Marginal, weights: Computed, a: Part, groups: IntArray, unit: float
) -> Part:
    """Return M with the bias that gaps show, and with that of what no episode shows.

    Args:
        model: M, and the evidence for it.
        weights: A, from which it has a gap.
        a: The same, as a part.
        groups: (n,) groups of like trajectories.
        unit: Unit of the squares.
    """
    influence = (model.influence - model.value) / unit
    gap = (model.direct - weights.value) / unit
    apart = widened(cautious_error(a.influence - influence, groups), a.freedom)
    rows = [(row.mean(), cautious_error(row, groups)) for row in model.gaps / unit]
    if model.markov.failed:
        known = [(abs(g), s) for g, s in [(gap, apart), *rows] if np.isfinite(g)]
        seen = max((float(g + np.nan_to_num(s)) ** 2 for g, s in known), default=0.0)
    else:
        seen = max(squared_bias(gap, apart) - a.bias, *(squared_bias(*row) for row in rows), 0.0)
    error, guess = model.error(groups) / unit, model.support.guess / unit
    return Part(influence, error**2, seen, float(influence.size), guess)


def squared_bias(deviation: float, error: float) -> float:
    """Return d^2 - S^2, or 0: a squared deviation less what chance explains; 0 if unknown."""
    square = deviation**2 - error**2
    return max(square, 0.0) if np.isfinite(square) else 0.0


def lost_weight(weights: Weights) -> float:
    """Return the squared share of the weight that is missing, less what chance explains."""
    return squared_bias(max(1.0 - weights.mean, 0.0), weights.mean_error)


def widened(error: float, ess: float) -> float:
    """Return the half width of an ess-t interval in normal standard errors; NaN if undefined."""
    from scipy.special import ndtri, stdtrit

    if not ess > _LEAST:
        return np.nan
    return float(error * stdtrit(ess - 1.0, 0.975) / ndtri(0.975) * np.sqrt(ess / (ess - 1.0)))


def spread_of_returns(weights: Weights, returns: FloatArray, groups: IntArray) -> float:
    """Return the standard deviation of one return, recorded or weighted: the larger one."""
    inside = np.nan_to_num(standard_error(returns, groups)) * np.sqrt(returns.size)
    total = float(weights.last.sum())
    if not total > 0.0:
        return float(inside)
    deviations = returns - weights.last @ returns / total
    unit = float(np.abs(deviations).max()) or 1.0  # squares of huge rewards overflow
    weighted = unit * np.sqrt(weights.last @ (deviations / unit) ** 2 / total)
    return float(max(inside, weighted))


def least_error(a: Part, m: Part, covariance: float) -> float:
    """Return the share of the second estimate that gives a blend the least mean square error."""
    covariance = min(covariance, a.variance, m.variance)  # the errors may be larger, cautious ones
    gain = a.variance + a.bias - covariance + a.guess * (a.guess - m.guess)
    apart = a.variance + a.bias + m.variance + m.bias - 2.0 * covariance + (m.guess - a.guess) ** 2
    return float(np.clip(gain / apart, 0.0, 1.0)) if apart > 0.0 else 1.0


def satterthwaite(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the effective number of episodes behind a sum of variances; NaN if one is unknown."""
    total = sum(variances)
    if total == 0.0:
        return max(freedoms)
    return total**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True))


def _largest(*arrays: FloatArray) -> float:
    """Return the largest finite absolute value; 1 if it is 0."""
    largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in arrays)
    return largest if largest > 0.0 else 1.0


# A, of N and W ---------------------------------------------------------------------------------


class WeightParts(NamedTuple):
    """The parts of A.

    Args:
        plain: N.
        calm: N with clipped weights.
        robust: W.
        clipped: Share of the weights that were clipped.
    """

    plain: Computed
    calm: Computed
    robust: Computed
    clipped: float


def parts_of_weights(column: Column, setting: Setting) -> Steps[WeightParts]:
    """Compute NFIS and FWDR."""
    (totals,) = yield (StepSums(column, setting.gamma),)
    plain: Computed
    nfis = normalise(column, totals, None, setting)
    clip = clip_of(totals.columns, setting.trajectories)
    calmer = dataclasses.replace(column, clip=clip)
    fwdr = weigh_column(dataclasses.replace(calmer, baseline=True), True, setting)
    if clip is None:
        plain, robust = yield from together(nfis, fwdr)
        calm, clipped = plain, 0.0
    else:
        clipped_sums = _clipped(calmer, setting)
        plain, robust, (calm, clipped) = yield from together(nfis, fwdr, clipped_sums)
    return WeightParts(plain, calm, robust, clipped)


def blend(parts: WeightParts, guess: float, groups: IntArray) -> Computed:
    """Return A, the blend of NFIS and FWDR.

    Args:
        parts: N and W.
        guess: Bias of W, what the actions may be worth that no episode shows.
        groups: (n,) groups of like trajectories.
    """
    plain, robust = parts.plain, parts.robust
    c = slope(parts.calm.influence, robust.influence, guess, groups)
    report = {"c": c, "truncated": parts.clipped}
    if c == 0.0:
        return dataclasses.replace(plain, report=report)
    replicates = None
    if plain.replicates is not None and robust.replicates is not None:
        replicates = (1.0 - c) * plain.replicates + c * robust.replicates
    return dataclasses.replace(
        plain,
        value=(1.0 - c) * plain.value + c * robust.value,
        influence=(1.0 - c) * plain.influence + c * robust.influence,
        replicates=replicates,
        report=report,
    )


def _clipped(column: Column, setting: Setting) -> Steps[tuple[Computed, float]]:
    """Compute NFIS with clipped weights, and the share of the weights that were clipped."""
    (totals,) = yield (StepSums(column, setting.gamma),)
    computed = yield from normalise(column, totals, None, dataclasses.replace(setting, draws=None))
    return computed, totals.clipped_share


def clip_of(columns: Columns, n: int) -> Clip | None:
    """Return a clip at sqrt(n) times the mean weight of each step; None if no weight is above.

    With sums scaled by exp(-peak), no weight exceeds sqrt(n) times the mean where the sum of the
    weights is at least sqrt(n).
    """
    sums = columns.sums[0]
    if np.all(sums >= np.sqrt(n)):
        return None
    with np.errstate(divide="ignore"):
        return Clip(np.asarray(columns.peak + np.log(sums) - 0.5 * np.log(n)))


def slope(plain: FloatArray, corrected: FloatArray, bias: float, groups: IntArray) -> float:
    """Return the c in [0, 1] for which (1 - c) plain + c corrected has the least square error.

    Args:
        plain: (n,) influence values.
        corrected: (n,) those of an estimate with a bias.
        bias: Its size.
        groups: (n,) groups inside which they vary.
    """
    groups = join_single(groups)  # else groups of one would not count
    base = centre(plain, groups)
    with np.errstate(invalid="ignore"):  # of values that are not finite
        change = base - centre(corrected, groups)
    largest = float(np.abs(change).max())
    if not np.isfinite(largest) or largest == 0.0:
        return 0.0
    base, change = base / largest, change / largest  # their squares could leave the floats
    penalty = (plain.size * bias / largest) ** 2
    return float(np.clip(base @ change / (float(change @ change) + penalty), 0.0, 1.0))
