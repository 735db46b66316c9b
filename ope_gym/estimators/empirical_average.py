"""EA, the empirical average: for one-step data and a finite action set.

    J = 1/n sum_i sum_a pi_e(a|x_i) r(x_i, a)

with r(x, a) the mean reward of the action in that context, 0 where it was never sampled.
"""

from __future__ import annotations

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import standard_error
from ope_gym.inference import intervals, regimes
from ope_gym.inference.diagnostics import judge, weight_diagnostics
from ope_gym.inference.estimate import Estimate, Sample
from ope_gym.options import Options
from ope_gym.policies import Policy


def empirical_average(
    data: Trajectories,
    target: Policy,
    sample: Sample,
    behaviour_ids: IntArray,
    options: Options,
    resamples: intervals.Resamples,
) -> Estimate:
    """The EA estimate of `target`.

    Influence values: psi_i = v(x_i) + w_i (r_i - r(x_i, a_i)), w_i = n_x pi_e(a_i|x_i) / n_x,a.
    For the standard error residuals are scaled by sqrt(n_x,a / (n_x,a - 1)).
    """
    probs, actions = _one_step(data, target)
    n = len(data)
    context = context_ids(data.observations)
    # a cell is a sampled (context, action); the rest of the target's mass earns 0
    cells, cell = np.unique(context * probs.shape[1] + actions, return_inverse=True)
    cell_context = cells // probs.shape[1]
    mass = np.empty(cells.size)  # pi_e(a|x) of each cell
    mass[cell] = probs[np.arange(n), actions]
    n_context, n_cell = np.bincount(context), np.bincount(cell)
    mean = np.bincount(cell, data.rewards) / n_cell
    worth = np.bincount(cell_context, mass * mean, minlength=n_context.size)  # v(x)
    weights = n_context[context] * mass[cell] / n_cell[cell]
    residual = weights * (data.rewards - mean[cell])
    influence = worth[context] + residual
    value = float(np.mean(worth[context]))
    total, square = weights.sum(), np.sum(weights**2)
    if total == 0:  # as for weights: no estimate, not an estimate of 0
        value, influence = np.nan, np.full(n, np.nan)
    with np.errstate(divide="ignore"):
        log_last = np.log(weights)
    ess = np.array([total**2 / square if square > 0 else 0.0])
    scaled = np.array([[total / max(weights.max(), np.finfo(float).tiny)]])
    diagnostics = weight_diagnostics(
        scaled, ess, log_last, behaviour_ids, sample.counts.size, 0.0, None, None
    )
    # residuals from a fitted mean are too small by (n - 1) / n; those of a single draw are 0
    freedom = np.sqrt(n_cell / np.maximum(n_cell - 1, 1))
    spread = influence + (freedom[cell] - 1.0) * residual
    error = standard_error(spread, sample.strata)
    replicates = None
    if options.interval == "ess-t":
        cautious = intervals.cautious_error(spread, sample.strata)
        interval = intervals.ess_t(value, cautious, diagnostics.ess, options.level)
    elif not np.isfinite(error):
        interval = intervals.undefined(options.level, options.interval)
    else:
        replicates = _replicates(resamples, data.rewards, context, cell, cell_context, mass)
        interval = (
            intervals.bca(replicates, value, influence, sample.strata, options.level)
            if options.interval == "bca"
            else intervals.percentile(replicates, options.level)
        )
    notes = []
    if diagnostics.uncovered > 1e-9:
        notes.append(
            f"{diagnostics.uncovered:.1%} of the target's actions were never sampled and count as 0"
        )
    single = float(np.sum(weights[n_cell[cell] == 1]) / max(total, np.finfo(float).tiny))
    cautions = list(regimes.cautions(sample.regime, ""))
    if single > 0:
        cautions.append(f"{single:.0%} of it rests on actions sampled once: the error is too small")
    verdict = judge(
        diagnostics,
        value,
        error,
        n,
        sample.counts,
        sample.behaviours,
        notes=notes,
        cautions=cautions,
    )
    seed = options.seed if replicates is not None else None
    return Estimate(
        "EA", value, error, interval, diagnostics, verdict, influence, sample, replicates, seed
    )


def _one_step(data: Trajectories, target: Policy) -> tuple[FloatArray, IntArray]:
    """The target's action probabilities (n, A) and the taken actions (n,), or why EA is refused."""
    longest = int(data.lengths.max())
    if longest > 1:
        episode = int(np.argmax(data.lengths))
        raise ValueError(
            f"EA is defined for one-step data, but episode {episode} has {longest} steps: for "
            "longer episodes the like of it is a direct method (DM, fitted Q evaluation)"
        )
    if not hasattr(target, "probs"):
        raise ValueError(
            "EA sums over a finite action set, but the target has no probs(observations): use FIS"
        )
    actions = np.asarray(data.actions)
    if actions.shape != (len(data),) or actions.dtype.kind not in "iub":
        raise ValueError(
            f"EA needs one whole number as an action, but actions have shape {actions.shape} and "
            f"type {actions.dtype}: use FIS"
        )
    return target.probs(data.observations), actions.astype(np.int64)


def context_ids(observations: batches.Tree) -> IntArray:
    """(n,) numbers of the distinct observations."""
    leaves = [
        np.asarray(leaf).reshape(batches.length(observations), -1)
        for leaf in batches.leaves(observations)
    ]
    ids = np.zeros(leaves[0].shape[0], dtype=np.int64)
    for leaf in leaves:
        _, part = np.unique(leaf, axis=0, return_inverse=True)
        _, ids = np.unique(ids * (part.max() + 1) + part.ravel(), return_inverse=True)
    return ids


def _replicates(
    resamples: intervals.Resamples,
    rewards: FloatArray,
    context: IntArray,
    cell: IntArray,
    cell_context: IntArray,
    mass: FloatArray,
) -> FloatArray:
    """The whole estimator on each bootstrap draw; a cell that is not drawn counts as 0."""
    order, by_context = np.argsort(cell, kind="stable"), np.argsort(context, kind="stable")
    starts = np.searchsorted(cell[order], np.arange(mass.size))
    context_starts = np.searchsorted(context[by_context], np.arange(context.max() + 1))
    values = []
    for counts in resamples:
        drawn = counts[:, order]
        size = np.add.reduceat(drawn, starts, axis=1)
        paid = np.add.reduceat(drawn * rewards[order], starts, axis=1)
        mean = np.divide(paid, size, out=np.zeros_like(paid), where=size > 0)
        share = np.add.reduceat(counts[:, by_context], context_starts, axis=1) / rewards.size
        values.append(np.sum(share[:, cell_context] * mass * mean, axis=1))
        resamples.done(counts.shape[0])
    return np.concatenate(values)
