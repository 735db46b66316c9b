"""auto, the recommended estimator: NFIS, corrected by a q model as far as that helps.

    J = N - c (N - V), N = NFIS, V between FWDR and DM

    c = h clip(<psi_N, psi_N - psi_W> / |psi_N - psi_W|^2, 0, 1)
    h = min(1, (3 SE_{N-W} / (N - W))^2)
    V = DM + k d,  d = W - DM,  k = d^2 / (d^2 + SE_d^2 / 4)

W is FWDR with weights clipped at sqrt(n) times their mean at each step.

c: the blend (1 - c) N + c W has the variance |psi_N - c (psi_N - psi_W)|^2 / n^2, which is least
for the quotient in c, the slope of psi_N on psi_N - psi_W. It measures the q model: with a useless
one it is 0, and J is NFIS. Both influence values here are those with clipped weights, centred
within behaviours; N itself is not clipped, so for N and W c is near the optimum, not exactly there.

h: N and W estimate the same value. Where they are more than three standard errors apart, the
standard error is too small, as a rule because the sample lacks rare episodes; then h lowers c, and
the verdict says so.

k: W corrects DM by a noisy term d. The smaller d is beside its standard error, the more of it is
left out: most of it below half a standard error. The reported error stays that of N - c (N - W):
leaving out noise is not claimed as precision.

ESS and verdict are those of the weights before clipping. Bootstrap replicates keep c, the amount
left out and the clip. Without a q model J is NFIS.

Cost: that of NFIS thrice, and the fit of q. Weakness: the error knows nothing of q where no episode
went, and is too small where a fitted q explains almost everything else (one step, little noise, a
rare action); k adds a bias of up to a quarter of SE_d.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.reductions import Clip, Column, Columns, Reduction, Starts, StepSums
from ope_gym.estimators.run import together
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Setting, Steps, normalise, weigh_column
from ope_gym.inference.computed import Computed
from ope_gym.inference.errors import centre, join_single, standard_error

_APART = 3.0  # standard errors between NFIS and FWDR from which on auto takes less of FWDR
_DOUBT = 0.25  # of a squared standard error beside which a correction counts


def auto(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute the blend of NFIS, FWDR and DM that the head of this module derives."""
    column = setting.column(c)
    wanted: tuple[Reduction, ...] = (StepSums(column, setting.gamma),)
    totals, *starts = yield (*wanted, Starts()) if setting.has_q else wanted
    nfis = normalise(column, totals, None, setting)
    if not starts:
        return (yield from nfis)
    clip = clip_of(totals.columns, setting.trajectories)
    calmer = dataclasses.replace(column, clip=clip)
    fwdr = weigh_column(dataclasses.replace(calmer, baseline=True), True, setting)
    if clip is None:
        plain, robust = yield from together(nfis, fwdr)
        calm, clipped = plain, 0.0
    else:
        clipped_sums = _clipped(calmer, setting)
        plain, robust, (calm, clipped) = yield from together(nfis, fwdr, clipped_sums)
    found = blend(plain, calm.influence, robust, starts[0], setting.groups)
    return dataclasses.replace(found, report={**found.report, "truncated": clipped})


def _clipped(column: Column, setting: Setting) -> Steps[tuple[Computed, float]]:
    """Compute NFIS with clipped weights, and the share of the weights that were clipped."""
    (totals,) = yield (StepSums(column, setting.gamma),)
    found = yield from normalise(column, totals, None, dataclasses.replace(setting, draws=None))
    return found, totals.clipped_share


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
    found = dataclasses.replace(
        plain,
        cautions=_contradiction(agreed),
        report={"c": share, "k": kept, "left out": left_out},
    )
    if share == 0.0:
        return found
    replicates = None
    if plain.replicates is not None and robust.replicates is not None:
        replicates = (1.0 - share) * plain.replicates + share * robust.replicates - left_out
    return dataclasses.replace(
        found,
        value=(1.0 - share) * plain.value + share * robust.value - left_out,
        influence=(1.0 - share) * plain.influence + share * robust.influence,
        replicates=replicates,
    )


def _contradiction(agreed: float) -> tuple[str, ...]:
    """Caution the reader if NFIS and FWDR differ by more than three standard errors."""
    if agreed == 1.0:
        return ()
    apart = "far" if agreed == 0.0 else f"{_APART / np.sqrt(agreed):.1f}"
    return (
        f"NFIS and FWDR are {apart} standard errors apart: the episodes miss something, or the "
        "q model is wrong there; auto stays near NFIS",
    )


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
