"""EA, the empirical average: for one-step data and a finite action set.

    J = 1/n sum_i sum_a pi_e(a|x_i) r(x_i, a)

with r(x, a) the mean reward of the action in that context, 0 where it was never sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.reductions import Steps, Whole, ask
from ope_gym.estimators.table import Composition
from ope_gym.estimators.weighted import Setting
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.computed import Computed, Weights
from ope_gym.verdict import Reason


@dataclass(frozen=True, eq=False)
class OneStep:
    """One-step trajectories of a finite action set; A actions.

    Args:
        contexts: (n,) numbers of the distinct observations.
        actions: (n,).
        probs: (n, A) of the target.
        rewards: (n,).
    """

    contexts: IntArray
    actions: IntArray
    probs: FloatArray
    rewards: FloatArray


def empirical_average(c: Composition, setting: Setting) -> Steps[Computed]:
    """Compute the empirical average, EA of Nedelec, Le Roux & Perchet (2017).

    https://arxiv.org/abs/1704.00773

    Influence values: psi_i = v(x_i) + w_i (r_i - r(x_i, a_i)), w_i = n_x pi_e(a_i|x_i) / n_x,a.
    For the standard error residuals are scaled by sqrt(n_x,a / (n_x,a - 1)).
    """
    data: OneStep = yield from ask(Whole("one step"))
    n, context = data.rewards.size, data.contexts
    # a cell is a sampled (context, action); the rest of the target's mass earns 0
    cells, cell = np.unique(context * data.probs.shape[1] + data.actions, return_inverse=True)
    cell_context = cells // data.probs.shape[1]
    mass = np.empty(cells.size)  # pi_e(a|x) of each cell
    mass[cell] = data.probs[np.arange(n), data.actions]
    n_context, n_cell = np.bincount(context), np.bincount(cell)
    mean = np.bincount(cell, data.rewards) / n_cell
    average = np.bincount(cell_context, mass * mean, minlength=n_context.size)  # v(x)
    weights = n_context[context] * mass[cell] / n_cell[cell]
    residual = weights * (data.rewards - mean[cell])
    influence = average[context] + residual
    value, total = float(np.mean(average[context])), weights.sum()
    if total == 0:  # as for weights: no estimate, not an estimate of 0
        value, influence = np.nan, np.full(n, np.nan)
    largest = weights.max() if total > 0 else 1.0
    with np.errstate(divide="ignore"):
        log_last = np.log(weights)
    # residuals from a fitted mean are too small by (n - 1) / n; those of a single draw are 0
    freedom = np.sqrt(n_cell / np.maximum(n_cell - 1, 1))
    single = float(np.sum(weights[n_cell[cell] == 1]) / max(total, np.finfo(float).tiny))
    missing, reasons = 1.0 - float(weights.mean()), []
    if missing > 1e-9:
        reasons.append(Reason("actions_never_sampled", share=missing))
    if single > 0.0:
        reasons.append(Reason("actions_sampled_once", share=single))
    replicates = None
    if setting.draws is not None and np.isfinite(value):
        replicates = _replicates(setting.draws, data.rewards, context, cell, cell_context, mass)
    return Computed(
        value,
        influence,
        Weights(np.array([[total / largest], [np.sum(weights**2) / largest**2], [0.0]]), log_last),
        spread=influence + (freedom[cell] - 1.0) * residual,
        replicates=replicates,
        reasons=tuple(reasons),
    )


def _replicates(
    draws: Resamples,
    rewards: FloatArray,
    context: IntArray,
    cell: IntArray,
    cell_context: IntArray,
    mass: FloatArray,
) -> FloatArray:
    """Recompute the whole estimator on each bootstrap draw; a cell not drawn counts as 0."""
    order, by_context = np.argsort(cell, kind="stable"), np.argsort(context, kind="stable")
    starts = np.searchsorted(cell[order], np.arange(mass.size))
    context_starts = np.searchsorted(context[by_context], np.arange(context.max() + 1))
    values = []
    for counts in draws.by_replicates():
        drawn = counts[:, order]
        size = np.add.reduceat(drawn, starts, axis=1)
        paid = np.add.reduceat(drawn * rewards[order], starts, axis=1)
        mean = np.divide(paid, size, out=np.zeros_like(paid), where=size > 0)
        share = np.add.reduceat(counts[:, by_context], context_starts, axis=1) / rewards.size
        values.append(np.sum(share[:, cell_context] * mass * mean, axis=1))
    return np.concatenate(values)
