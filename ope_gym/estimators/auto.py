"""auto, the recommended estimator: a q model as far as the data confirm it, else the weights.

    J = A + s (M - A),   M = DM,   A = N - c (N - V),   N = NFIS,   V between FWDR and DM

A rests on importance weights, and on the model only as far as it lowers their noise. M rests on the
model: far less noisy in long episodes, but wrong if the observation is not a Markov state or the
model has the wrong shape. Its influence values are those of MDR (`ope_gym.estimators.marginal`),
which is M to first order; M itself stays within what the rewards allow, where few episodes make the
correction of MDR wild. With variances and b, a bound on the bias of M that the data give, the share

    s = (Var A - Cov) / (Var A + Var M - 2 Cov + b^2),   within [0, 1]

has the least mean square error. What the data say of b are gaps g_j, each the distance of M from an
estimate that trusts the model less, with its standard error S_j:

    MDR from DM, the rows of memory 1, 2, 4 and 8 (`marginal.Corrections`) from MDR, and A from M

If the check of `ope_gym.estimators.markov` passes, only what chance does not explain counts,
b^2 = max_j (g_j^2 - 9 S_j^2), or 0. If it fails, M is known to be biased, and
b = max_j |g_j| + S_j. With too few steps for the check the gaps decide as if it had passed, but a
value that rests on the model is then amber at best. The error of J includes s b.

Errors here are the cautious ones of ess-t, widened as its intervals are: where few episodes carry
the weights, or the gap, it says little against M. Only Var A is not widened if the check fails:
noisy weights are no reason to take a model that is known to be wrong. If the check passes, the
error of A is at least that of ESS episodes with the spread of the recorded returns: a smaller one
is luck where the reward is rare, and M is as good where q explains the returns.

A, in terms of influence values psi:

    c = h clip(<psi_N, psi_N - psi_W> / |psi_N - psi_W|^2, 0, 1)
    h = min(1, (3 SE_{N-W} / (N - W))^2)
    V = DM + k d,  d = W - DM,  k = d^2 / (d^2 + SE_d^2 / 4)

W is FWDR with weights clipped at sqrt(n) times their mean at each step.

c: the blend (1 - c) N + c W has the variance |psi_N - c (psi_N - psi_W)|^2 / n^2, which is least
for the quotient in c, the slope of psi_N on psi_N - psi_W. It measures the q model: with a useless
one it is 0, and A is NFIS. Both influence values here are those with clipped weights, centred
within behaviours; N itself is not clipped, so for N and W c is near the optimum, not exactly there.

h: N and W estimate the same value. Where they are more than three standard errors apart, the
standard error is too small, as a rule because the sample lacks rare episodes; then h lowers c, and
the verdict says so.

k: W corrects DM by a noisy term d. The smaller d is beside its standard error, the more of it is
left out: most of it below half a standard error. The reported error stays that of N - c (N - W):
leaving out noise is not claimed as precision.

ESS and verdict are those of the weights before clipping. Bootstrap replicates keep c, s, the amount
left out and the clip. Without a q model J is NFIS, without ratios of visits it is A.

Cost: that of NFIS thrice, and the fit of q. Weakness: a hidden state that shows neither in the
residuals nor in the gaps; and the error knows nothing of q where no episode went.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.chunks import Clip, Column
from ope_gym.estimators.marginal import MEMORIES, Marginal, marginal
from ope_gym.estimators.reductions import Returns, Starts
from ope_gym.estimators.run import ask, together
from ope_gym.estimators.step_sums import Columns, StepSums
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Setting, Steps, normalise, weigh_column
from ope_gym.inference.computed import Computed
from ope_gym.inference.errors import (
    cautious_error,
    centre,
    covariance_within,
    join_single,
    standard_error,
)
from ope_gym.verdict import Reason

_APART = 3.0  # standard errors between two estimates that chance explains
_LEAST = 1.2  # effective trajectories below which an error counts as unknown
_DOUBT = 0.25  # of a squared standard error beside which a correction counts


def auto(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute the blend that the head of this module derives."""
    column = setting.column(c)
    if not setting.has_q:
        return (yield from weigh_column(column, True, setting))
    weights, model, returns = yield from together(
        weighted_blend(column, setting), marginal(setting, MEMORIES), ask(Returns(setting.gamma))
    )
    return rest_on(weights, model, returns, setting) if model.known else weights


def rest_on(weights: Computed, model: Marginal, returns: FloatArray, setting: Setting) -> Computed:
    """Move an estimate by weights towards that of the model, as far as the data confirm it.

    Args:
        weights: A.
        model: M, and the evidence for it.
        returns: (n,) of the trajectories.
        setting: of the evaluation.
    """
    own, steady = weights.influence, model.influence - model.value
    value, ess = model.direct, float(np.min(weights.weights.ess))
    share, bias, spread = _share(weights, model, returns, setting)
    drawn = setting.drawn(steady + value)
    if share == 1.0:  # nothing of the weights, which may be no numbers
        own, replicates = np.zeros_like(own), drawn
    else:
        value = weights.value + share * (value - weights.value)
        replicates = weights.replicates
        if replicates is not None and drawn is not None:
            replicates = replicates + share * (drawn - replicates)
    return dataclasses.replace(
        weights,
        value=value,
        influence=(1.0 - share) * own + share * steady,
        replicates=replicates,
        report={**weights.report, "s": share},
        # a quarrel of NFIS and FWDR is one of the weights
        reasons=model.markov.reasons if share >= 0.5 else weights.reasons,
        by_model=share >= 0.5,
        bias=share * bias,
        freedom=_freedom((1.0 - share) ** 2 * spread[0, 0], share**2 * spread[1, 1], ess, own.size),
    )


def _share(
    weights: Computed, model: Marginal, returns: FloatArray, setting: Setting
) -> tuple[float, float, FloatArray]:
    """Return s, the bound b, and the covariance (2, 2) of A and M up to a factor."""
    groups, passed = setting.groups, not model.markov.failed
    ess = float(np.min(weights.weights.ess))
    # in a unit by which squares stay within floats
    unit = _largest(weights.influence, model.influence, model.gaps, returns)
    own, steady = weights.influence / unit, (model.influence - model.value) / unit
    floor = 0.0  # a smaller error than that of ESS returns is luck
    if passed and ess > 0.0:
        floor = standard_error(returns / unit, groups) * np.sqrt(own.size / ess)
    apart = max(wary_error(own - steady, groups, ess), floor)
    bias = _bias(model, weights.value, apart, unit, groups)
    # a model that failed the check is not taken because the weights are noisy
    error = wary_error(own, groups, ess) if passed else cautious_error(own, groups)
    calm = cautious_error(steady, groups)
    if not np.isfinite(error):  # nothing is known of the weights, or of any spread
        stay = np.isfinite(weights.value) and (np.isnan(calm) or not passed)
        return (0.0 if stay else 1.0), bias * unit, np.eye(2)
    spread = covariance_within(np.stack([own, steady]), groups)
    share = least_error(max(error, floor), calm, float(spread[0, 1]), bias)
    return share, bias * unit, spread


def _bias(model: Marginal, by_weights: float, apart: float, unit: float, groups: IntArray) -> float:
    """Return b: the distances of MDR from M, of the rows of memory from MDR, and of A from M.

    Args:
        model: M, and the evidence for it.
        by_weights: value of A.
        apart: error of A - M, in units.
        unit: of the result.
        groups: (n,) behaviours.
    """
    influence = [(model.influence - model.start) / unit, *(model.gaps / unit)]
    gaps = [(model.value - model.direct) / unit, *(row.mean() for row in influence[1:])]
    errors = [*(wary_error(row, groups) for row in influence), apart]
    gaps.append((by_weights - model.direct) / unit)
    return model_bias(np.array(gaps), np.array(errors), not model.markov.failed)


def _largest(*arrays: FloatArray) -> float:
    """Return the largest finite absolute value; 1 if it is 0."""
    largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in arrays)
    return largest if largest > 0.0 else 1.0


def wary_error(influence: FloatArray, groups: IntArray, ess: float = np.inf) -> float:
    """Return the half width of an ess-t interval in normal standard errors; NaN if undefined.

    The effective sample size is at most that of the squared influence values: where few
    trajectories carry them, their spread is hardly known.
    """
    from scipy.special import ndtri, stdtrit

    error = cautious_error(influence, groups)
    if not error > 0.0:
        return error
    u = centre(influence, join_single(groups)) / error
    ess = min(ess, float(np.sum(u**2) ** 2 / np.sum(u**4)))
    if not ess > _LEAST:
        return np.nan
    return float(error * stdtrit(ess - 1.0, 0.975) / ndtri(0.975) * np.sqrt(ess / (ess - 1.0)))


def model_bias(gaps: FloatArray, errors: FloatArray, passed: bool) -> float:
    """Bound the bias of the model by its distances from estimates that trust it less.

    Args:
        gaps: (m,) the distances.
        errors: (m,) their standard errors; a gap whose error is unknown says nothing for a model
            that passed.
        passed: whether nothing else speaks against the model; then only what exceeds three
            standard errors counts, otherwise all, and one standard error more.
    """
    if not passed:
        errors = np.nan_to_num(errors, nan=0.0)  # an unknown error takes nothing from the gap
    known = np.isfinite(gaps) & np.isfinite(errors)
    if not known.any():
        return 0.0
    if passed:
        square = float(np.max(gaps[known] ** 2 - (_APART * errors[known]) ** 2))
        return float(np.sqrt(max(square, 0.0)))
    return float(np.max(np.abs(gaps[known]) + errors[known]))


def least_error(first: float, second: float, covariance: float, bias: float) -> float:
    """Return the share of the second estimate that gives a blend the least mean square error.

    Args:
        first: standard error of the first.
        second: standard error of the second.
        covariance: of the two.
        bias: of the second.
    """
    covariance = min(covariance, first**2, second**2)  # the errors may be the larger, cautious ones
    apart = first**2 + second**2 - 2.0 * covariance + bias**2
    return float(np.clip((first**2 - covariance) / apart, 0.0, 1.0)) if apart > 0.0 else 1.0


def _freedom(first: float, second: float, ess: float, n: int) -> float:
    """Return the effective number of trajectories of a blend, as Satterthwaite does.

    Args:
        first: variance of the part by weights.
        second: variance of the part by the model.
        ess: effective sample size of the weights.
        n: trajectories.
    """
    total = first + second
    return n if total == 0.0 else min(n, total**2 / (first**2 / max(ess, 1.0) + second**2 / n))


def weighted_blend(column: Column, setting: Setting) -> Steps[Computed]:
    """Compute A, the blend of NFIS, FWDR and DM."""
    totals, start = yield StepSums(column, setting.gamma), Starts()
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
    blended = blend(plain, calm.influence, robust, start, setting.groups)
    return dataclasses.replace(blended, report={**blended.report, "truncated": clipped})


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


def blend(
    plain: Computed, calm: FloatArray, robust: Computed, start: FloatArray, groups: IntArray
) -> Computed:
    """Blend NFIS and FWDR, as the head of this module derives.

    Args:
        plain: NFIS.
        calm: (n,) influence values of NFIS with clipped weights.
        robust: FWDR with clipped weights.
        start: (n,) the q model's v at the start.
        groups: (n,) behaviours.
    """
    agreed = agreement(plain.value - robust.value, plain.influence - robust.influence, groups)
    share = agreed * calibration(calm, robust.influence, groups)
    gap = robust.value - float(start.mean())
    kept = believed(gap, robust.influence - start, groups)  # of d: without the spread of starts
    left_out = share * (1.0 - kept) * gap if share else 0.0
    computed = dataclasses.replace(
        plain,
        reasons=_contradiction(agreed),
        report={"c": share, "k": kept, "left out": left_out},
    )
    if share == 0.0:
        return computed
    replicates = None
    if plain.replicates is not None and robust.replicates is not None:
        replicates = (1.0 - share) * plain.replicates + share * robust.replicates - left_out
    return dataclasses.replace(
        computed,
        value=(1.0 - share) * plain.value + share * robust.value - left_out,
        influence=(1.0 - share) * plain.influence + share * robust.influence,
        replicates=replicates,
    )


def _contradiction(agreed: float) -> tuple[Reason, ...]:
    """Doubt the estimate if NFIS and FWDR differ by more than three standard errors."""
    if agreed == 1.0:
        return ()
    errors = _APART / np.sqrt(agreed) if agreed > 0.0 else np.inf
    return (Reason("blends_apart", errors=float(errors)),)


def agreement(gap: float, influence: FloatArray, groups: IntArray) -> float:
    """Return the share h that is left of a correction: below 1 beyond three standard errors."""
    error = _relative_error(gap, influence, groups)
    return 1.0 if np.isnan(error) else float(min(1.0, (_APART * error) ** 2))


def believed(gap: float, influence: FloatArray, groups: IntArray) -> float:
    """Return the share k of a correction that is believed: near 1 if larger than its error."""
    error = _relative_error(gap, influence, groups)
    return 1.0 if np.isnan(error) else float(1.0 / (1.0 + _DOUBT * error**2))


def _relative_error(gap: float, influence: FloatArray, groups: IntArray) -> float:
    """Return the standard error of a gap as a share of it; NaN if either is unknown or 0."""
    if not np.isfinite(gap) or gap == 0.0:
        return np.nan
    with np.errstate(over="ignore"):
        return standard_error(influence / gap, groups)  # in this unit squares stay within floats


def calibration(plain: FloatArray, corrected: FloatArray, groups: IntArray) -> float:
    """Return the c in [0, 1] for which (1 - c) plain + c corrected varies least within groups."""
    groups = join_single(groups)  # else groups of one would not count
    base = centre(plain, groups)
    with np.errstate(invalid="ignore"):  # of values that are not finite
        change = base - centre(corrected, groups)
    largest = float(np.abs(change).max())
    if not np.isfinite(largest) or largest == 0.0:
        return 0.0
    base, change = base / largest, change / largest  # their squares could leave the floats
    size = float(change @ change)
    return float(np.clip(base @ change / size, 0.0, 1.0))
