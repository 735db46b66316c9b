"""Cross-fitted mean and variance of the rewards, for the optimal scheme with noisy rewards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import (
    FloatArray,
    folds_within,
)
from ope_gym.data.trajectories import Trajectories
from ope_gym.weights.behaviours import BehaviourRows, Behaviours
from ope_gym.weights.formula import log_weights

_FOLDS = 2


def cross_fitted_log_weights(
    data: Trajectories, target_log_probs: FloatArray, behaviours: Behaviours, rows: BehaviourRows
) -> FloatArray:
    """Compute optimal log weights (S,), with rewards modelled on the other half of the episodes.

    Each half is weighted against its own mixture (its own shares of the behaviours), so that each
    half, and their average, is unbiased for policies fixed in advance.
    """
    few = np.flatnonzero(behaviours.counts < _FOLDS)
    if few.size:
        raise ValueError(
            f"reward_model='cross-fit' splits the episodes of each behaviour, but "
            f"{behaviours.names[few[0]]} has only {behaviours.counts[few[0]]}: record more of it, "
            "or use 'deterministic' or (mean, variance)"
        )
    fold = folds_within(behaviours.ids, _FOLDS)
    row_fold = np.repeat(fold, data.lengths)
    log_w = np.empty(data.n_steps)
    for k in np.unique(fold):
        inside = row_fold == k
        log_ws = log_weights(
            target_log_probs,
            rows,
            behaviours.ids,
            data.offsets,
            ["optimal"],
            counts=np.bincount(behaviours.ids[fold == k], minlength=behaviours.counts.size),
            reward_model=None if inside.all() else fit_rewards(data, ~inside),
        )
        log_w[inside] = log_ws["optimal"][inside]
    return log_w


def fit_rewards(data: Trajectories, fit: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """Learn the mean (S,) and variance (S,) of the reward at every step, from the steps of `fit`.

    Discrete observations: the mean and variance of each (observation, action); otherwise a linear
    regression on observation and action with one variance.
    """
    rewards = data.rewards
    columns = [*batches.leaves(data.observations), *batches.leaves(data.actions)]
    if all(np.issubdtype(column.dtype, np.integer) for column in columns):
        cell = batches.distinct(tuple(columns))
        size = np.bincount(cell[fit], minlength=cell.max() + 1)
        safe = np.maximum(size, 1)
        mean = np.bincount(cell[fit], rewards[fit], minlength=size.size) / safe
        square = np.bincount(cell[fit], rewards[fit] ** 2, minlength=size.size) / safe
        unseen = size == 0
        mean = np.where(unseen, rewards[fit].mean(), mean)
        variance = np.where(unseen, rewards[fit].var(), np.maximum(square - mean**2, 0.0))
        return mean[cell], variance[cell]
    if any(column.dtype.kind not in "biuf" for column in columns):
        kinds = ", ".join(str(column.dtype) for column in columns)
        raise ValueError(
            f"reward_model='cross-fit' regresses on numbers, but observations and actions are "
            f"{kinds}: pass (mean, variance)"
        )
    flat = [column.reshape(column.shape[0], -1).astype(np.float64) for column in columns]
    features = np.hstack([np.ones((data.n_steps, 1)), *flat])
    solution, *_ = np.linalg.lstsq(features[fit], rewards[fit], rcond=None)
    residual = np.mean((rewards[fit] - features[fit] @ solution) ** 2)
    return features @ solution, np.full(data.n_steps, residual)
