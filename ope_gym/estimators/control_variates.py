"""Control variates on the mixture: known means of ratios take noise out of the fused weights.

    J = mean(psi) - beta . (mean(c) - 1)

psi_i are the terms whose mean is FIS (or its doubly robust form), c_i,k = P_k / sum_j rho_j P_j at
the last step of trajectory i, one for each behaviour k. Over n_k episodes of each behaviour

    E mean(c_k) = sum_j rho_j E_j[P_k / mixture] = sum over episodes of P_k = 1,

exactly: the mixture is positive wherever P_k is. One more control is the last fused weight of the
target, P_e / mixture: its mean is 1 on the same condition that makes FIS unbiased, that some
behaviour can do whatever the target can. Beta is the least squares slope of psi on c with both
centred inside behaviours, that is, of least estimated variance for episodes drawn by behaviour.
Since sum_k rho_k c_k = 1 the controls are collinear; the pseudo-inverse takes the shortest beta.

Use it on policies fixed in advance, with several behaviours and many more episodes than behaviours.
In the limit it is never noisier than FIS and, for one step, than importance sampling from any one
behaviour with its n_k episodes. Weakness: beta is learned from the same episodes, so a bias of
order 1 / n is left (none with beta fixed), and p controls cost about p episodes. Two guards whose
effect fades with n: at most a quarter of the degrees of freedom are spent, on the principal
components of the controls, and a slope is not believed beyond one standard deviation of them. The
ratios of the last step say little about early rewards of long episodes. Cost: one more pass over
(K, S) log-probabilities in blocks, O(n K) memory, O(n K^2) time.

Reference: Owen & Zhou (2000), Safe and effective importance sampling.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.reductions import Whole
from ope_gym.estimators.run import ask, together
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Setting, Steps, weighted
from ope_gym.inference.computed import Computed
from ope_gym.inference.errors import centre, join_single

_SHARE = 4  # one control to so many degrees of freedom, at most
_FAR = 1.0  # standard deviations of the controls over which a slope is believed
_NEGLIGIBLE = 1e-9  # singular value, relative to the largest, of a direction that is only rounding


@dataclass(frozen=True, eq=False)
class Controlled:
    """The estimate and the effect of the controls; p controls.

    Args:
        value: the estimate.
        influence: (n,) psi - beta . (c - 1), whose mean is the value; deviations inside strata are
            stretched by sqrt(f / (f - rank)), f the degrees of freedom, for what beta has learned.
        plain: mean(psi), without controls.
        coefficients: (p,) beta, of the behaviours and last, if used, of the target.
        means: (p,) mean of each control, expected to be 1.
        rank: how many directions of the controls were used.
        variance_ratio: estimated variance over that of the plain estimate; 1 without controls.
    """

    value: float
    influence: FloatArray
    plain: float
    coefficients: FloatArray
    means: FloatArray
    rank: int
    variance_ratio: float


def fused_with_controls(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute FIS with the behaviours' own ratios as control variates."""
    plain: Computed
    plain, log_last = yield from together(weighted(c, setting), ask(Whole("path probabilities")))
    if not np.all(np.isfinite(plain.influence)):
        return plain
    ratios = mixture_ratios(log_last, setting.counts)
    found = control_variates(plain.influence, ratios, plain.log_last, setting.groups)
    return dataclasses.replace(
        plain,
        value=found.value,
        influence=found.influence,
        replicates=setting.drawn(found.influence),
        report={"variance of FIS kept": found.variance_ratio},
    )


def mixture_ratios(log_last: FloatArray, counts: IntArray) -> FloatArray:
    """Return (n, K') P_k / sum_j rho_j P_j, for the K' behaviours with episodes.

    Args:
        log_last: (n, K) log P_k, from `ope_gym.weights.formula.path_log_probs`.
        counts: (K,) episodes of each behaviour.
    """
    present = counts > 0
    if not present.any():
        raise ValueError(f"counts={counts.tolist()}: no behaviour has an episode")
    logs = log_last[:, present]
    share = logs + np.log(counts[present] / counts.sum())
    top = share.max(axis=1, keepdims=True)
    impossible = np.flatnonzero(~np.isfinite(top[:, 0]))
    if impossible.size:
        raise ValueError(
            f"log_last is {log_last[impossible[0]].tolist()} at episode {impossible[0]}: no "
            "behaviour could have drawn it; check the recorded policies"
        )
    mixture = top + np.log(np.exp(share - top).sum(axis=1, keepdims=True))
    return np.asarray(np.exp(logs - mixture))


def control_variates(
    psi: FloatArray,
    ratios: FloatArray,
    log_last_weight: FloatArray | None,
    strata: IntArray,
) -> Controlled:
    """Regress the terms of FIS on ratios whose means are known.

    A bootstrap that holds beta fixed is one of the mean of `found.influence`; what beta
    adds is of second order.

    Args:
        psi: (n,) influence of plain fused weights, without cap; with a q model, v at the start is
            added to that of its residuals.
        ratios: (n, K) from `mixture_ratios`.
        log_last_weight: (n,) log of the last fused weight, the control of the target; None leaves
            it out.
        strata: (n,) behaviour of each trajectory.
    """
    controls = ratios
    if log_last_weight is not None:
        with np.errstate(over="ignore"):
            controls = np.column_stack([ratios, np.exp(log_last_weight)])
    size = controls.shape[1]
    plain, means = float(psi.mean()), controls.mean(axis=0)
    if not (np.all(np.isfinite(psi)) and np.all(np.isfinite(controls))):
        blank = np.full(psi.size, np.nan)
        return Controlled(np.nan, blank, plain, np.full(size, np.nan), means, 0, np.nan)
    groups = join_single(strata)
    counts = np.bincount(groups)
    freedom = psi.size - counts.size
    scale = np.sqrt(counts / np.maximum(counts - 1.0, 1.0))[groups]  # single ones are 0 anyway
    x = np.stack([centre(column, groups) * scale for column in controls.T], axis=1)
    y = centre(psi, groups) * scale
    beta, rank = _slope(x, y, means - 1.0, freedom)
    influence = psi - (controls - 1.0) @ beta
    value = float(influence.mean())
    if rank:
        influence += (np.sqrt(freedom / (freedom - rank)) - 1.0) * centre(influence, groups)
    before, after = (
        float(np.sum((centre(values, groups) * scale) ** 2)) for values in (psi, influence)
    )  # alike, so that their ratio is 1 where nothing changed, on any machine
    ratio = after / before if before > 0 else 1.0
    return Controlled(value, influence, plain, beta, means, rank, ratio)


def _slope(x: FloatArray, y: FloatArray, gap: FloatArray, freedom: int) -> tuple[FloatArray, int]:
    """Return the least squares slope of y on the main directions of x, and their number.

    If the known mean of the controls lies m > 1 standard deviations of x away, over a `gap` that
    the data do not span, the slope shrinks by 1 / m^2: the correction stays within one deviation
    of y. Without this, a large weight that was not drawn could make the error thrice that of FIS.
    """
    length = np.sqrt(np.sum(x**2, axis=0))
    used = length > _NEGLIGIBLE * max(float(np.max(length, initial=0.0)), 1.0)
    beta, most = np.zeros(x.shape[1]), freedom // _SHARE
    if not used.any() or most < 1:
        return beta, 0
    left, singular, right = np.linalg.svd(x[:, used] / length[used], full_matrices=False)
    rank = min(int(np.count_nonzero(singular > _NEGLIGIBLE * singular[0])), most)
    left, singular, right = left[:, :rank], singular[:rank], right[:rank]
    away = freedom * float(np.sum((right @ (gap[used] / length[used]) / singular) ** 2))
    beta[used] = right.T @ (left.T @ y / singular) / length[used]
    return beta * min(1.0, _FAR**2 / away if away > 0 else 1.0), rank
