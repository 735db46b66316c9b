"""Fit a q model to episodes that are read in chunks, in two passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from ope_gym.arrays import IntArray, folds_within
from ope_gym.models.base import CrossFitted, FoldSums, QModel, Survey
from ope_gym.models.folds import FOLDS
from ope_gym.policies import FinitePolicy
from ope_gym.scale.passes import Item, Items, Job, one_pass
from ope_gym.scale.workers import Workers
from ope_gym.weights.answers import Answers


def fit_chunks(
    job: Job, model: QModel, ids: IntArray, horizon: int, workers: Workers
) -> tuple[tuple[CrossFitted, ...], IntArray]:
    """Fit a q model to chunks; return for each target its cross-fitted values, and the folds (n,).

    Args:
        job: the episodes and the targets.
        model: to be fitted.
        ids: (n,) behaviours of the episodes, inside which the folds are cut.
        horizon: longest possible episode.
        workers: who reads the files.
    """
    folds = min(FOLDS, ids.size)
    if folds < 2:
        raise ValueError("q_model needs at least 2 episodes: it learns from one to judge another")
    if not isinstance(job.targets[0], FinitePolicy):
        raise ValueError(
            f"q_model is {type(model).__name__}, which draws actions of a target that has no "
            "probs(observations), but these are read from files in blocks, on which the draws "
            "would depend: load them with Trajectories.load, raise Compute(block_steps=...), or "
            "give q_model=None"
        )
    fold = folds_within(ids, folds)
    items = Items(job.source.tasks, ids, fold)
    survey = model.survey(job.targets[0])
    assert survey is not None  # an evaluation refuses models that cannot be fitted to chunks
    for seen in one_pass(job, workers, partial(_survey, model), items):
        survey.merge(seen)
    fitted: list[CrossFitted] = []
    for some in survey.at_once(horizon, folds, len(job.targets)):
        part = dataclasses.replace(job, targets=job.targets[some])
        make = partial(
            survey.equations,
            len(part.targets),
            gamma=job.weighing.gamma,
            horizon=horizon,
            folds=folds,
        )
        equations = make()
        for others in one_pass(part, workers, partial(_equations, make), items):
            equations.merge(others)
        fitted += equations.cross_fitted()
    return tuple(fitted), fold


def _survey(model: QModel, job: Job, item: Item) -> Survey:
    """Survey the chunks of a task."""
    survey = model.survey(job.targets[0])
    assert survey is not None
    for _, chunk, _ in job.chunks(item.task, item.ids):
        survey.update(chunk)
    return survey


def _equations(make: Callable[[], FoldSums], job: Job, item: Item) -> FoldSums:
    """Sum the equations of all targets over the chunks of a task."""
    equations = make()
    assert item.fold is not None
    for _, chunk, here in job.chunks(item.task, item.ids):
        answers = [Answers(target, chunk) for target in job.targets]
        equations.update(chunk, item.fold[here], answers)
    return equations
