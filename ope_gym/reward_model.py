"""Cross-fitted mean and variance of the rewards, for the optimal scheme with noisy rewards."""

from __future__ import annotations

import numpy as np

from ope_gym import trees
from ope_gym.empirical import context_ids
from ope_gym.likelihood import behaviours_of
from ope_gym.trajectories import Trajectories
from ope_gym.weights import FloatArray, IntArray, log_weights

_FOLDS = 2


def cross_fitted_log_weights(data: Trajectories, target_log_probs: FloatArray) -> FloatArray:
    """Log weights (S,) of the optimal scheme, rewards modelled on the other half of the episodes.

    Each half is weighted against its own mixture (its own shares of the behaviours), so that each
    half, and their average, is unbiased for policies fixed in advance.
    """
    behaviours = behaviours_of(data)
    fold = folds_within(behaviours.ids, _FOLDS)
    row_fold = np.repeat(fold, data.lengths)
    log_w = np.empty(data.n_steps)
    for k in np.unique(fold):
        inside, outside = row_fold == k, row_fold != k
        mean, variance = fit_rewards(data, outside if outside.any() else inside, inside)
        part = data.select(episodes=np.flatnonzero(fold == k))
        own = behaviours_of(part)
        log_w[inside] = log_weights(
            target_log_probs[inside], own.rows(part), own.ids, part.offsets, ["optimal"],
            counts=own.counts, reward_model=(mean, variance),
        )["optimal"]  # fmt: skip
    return log_w


def folds_within(groups: IntArray, folds: int) -> IntArray:
    """(n,) fold of each trajectory: 0, 1, ..., 0, 1, ... inside each group."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    rank = np.arange(groups.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    result = np.empty(groups.size, dtype=np.int64)
    result[order] = rank % folds
    return result


def fit_rewards(
    data: Trajectories, fit: IntArray, predict: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Mean and variance of the reward at rows `predict`, learned from rows `fit` (masks (S,)).

    Discrete observations: the mean and variance of each (observation, action); otherwise a linear
    regression on observation and action with one variance.
    """
    rewards = data.rewards
    columns = [*trees.leaves(data.observations), *trees.leaves(data.actions)]
    if all(np.issubdtype(column.dtype, np.integer) for column in columns):
        cell = context_ids(tuple(columns))
        size = np.bincount(cell[fit], minlength=cell.max() + 1)
        safe = np.maximum(size, 1)
        mean = np.bincount(cell[fit], rewards[fit], minlength=size.size) / safe
        square = np.bincount(cell[fit], rewards[fit] ** 2, minlength=size.size) / safe
        unseen = size == 0
        mean = np.where(unseen, rewards[fit].mean(), mean)
        variance = np.where(unseen, rewards[fit].var(), np.maximum(square - mean**2, 0.0))
        return mean[cell[predict]], variance[cell[predict]]
    flat = [column.reshape(column.shape[0], -1).astype(np.float64) for column in columns]
    features = np.hstack([np.ones((data.n_steps, 1)), *flat])
    solution, *_ = np.linalg.lstsq(features[fit], rewards[fit], rcond=None)
    residual = np.mean((rewards[fit] - features[fit] @ solution) ** 2)
    count = int(np.count_nonzero(predict))
    return features[predict] @ solution, np.full(count, residual)
