"""Fit a linear q model to episodes that are read in chunks, in two passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ope_gym.arrays import IntArray, folds_within
from ope_gym.models.base import FOLDS, CrossFitted
from ope_gym.models.linear import FeatureSurvey, LinearQ, NormalEquations
from ope_gym.policies import FinitePolicy
from ope_gym.scale.passes import Item, Items, Job, one_pass
from ope_gym.scale.workers import Workers


def fit_chunks(
    job: Job, model: LinearQ, ids: IntArray, horizon: int, crew: Workers
) -> tuple[CrossFitted, IntArray]:
    """Fit a q model to chunks; return its cross-fitted values and the folds (n,).

    Args:
        job: the episodes and the target.
        model: to be fitted.
        ids: (n,) behaviours of the episodes, inside which the folds are cut.
        horizon: longest possible episode.
        crew: who reads the files.
    """
    folds = min(FOLDS, ids.size)
    if folds < 2:
        raise ValueError("q_model needs at least 2 episodes: it learns from one for another")
    if not isinstance(job.target, FinitePolicy):
        raise ValueError(
            f"q_model is {type(model).__name__}, which draws actions of a target that has no "
            "probs(observations), but these are read from files in blocks, on which the draws "
            "would depend: load them with Trajectories.load, raise Compute(block_steps=...), or "
            "give q_model=None"
        )
    fold = folds_within(ids, folds)
    items = Items(job.source.tasks, ids, fold)
    survey = FeatureSurvey(model, job.target)
    for seen in one_pass(job, crew, partial(_survey, model), items):
        survey.merge(seen)
    make = partial(survey.equations, gamma=job.gamma, horizon=horizon, folds=folds)
    equations = make()
    for part in one_pass(job, crew, partial(_equations, make), items):
        equations.merge(part)
    return equations.cross_fitted(), fold


def _survey(model: LinearQ, job: Job, item: Item) -> FeatureSurvey:
    """Survey the features of the chunks of a task."""
    found = FeatureSurvey(model, job.target)
    for _, chunk, _ in job.chunks(item.task, item.ids):
        found.update(chunk)
    return found


def _equations(make: Callable[[], NormalEquations], job: Job, item: Item) -> NormalEquations:
    """Accumulate the q model's normal equations over the chunks of a task."""
    found = make()
    assert item.fold is not None
    for _, chunk, here in job.chunks(item.task, item.ids):
        found.update(chunk, item.fold[here])
    return found
