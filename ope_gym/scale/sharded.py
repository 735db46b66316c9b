"""Evaluation of episodes that do not fit into memory: a few passes over shards.

| pass | reads | finds |
|------|-------|-------|
| 1    | all bytes, for their checksums; keeps tables | the shares rho_k of the mixture, the tasks |
| q    | everything, twice | with a q model: the scale of its features, its normal equations |
| 2    | everything | weights, their sums at each step, plain influence values, diagnostics |
| 3    | everything, or the weights of pass 2 | normalised influence values, bootstrap replicates |
| 4    | the same, for `auto` with a q model | those of the weights that are cut |

So a file is read twice for plain estimators, three times for normalised ones (twice with a scratch
folder), and twice more with a q model, three times for `auto`.

Memory: some blocks of steps, and a few numbers a trajectory and a step of the longest episode;
never a number for every step. The third pass is there because a normalised influence value
compares a trajectory with the means R_t over all of them, and only if something needs it. Every
pass is a set of sums with `update` and `merge`, so the result is that of `ope_gym.evaluate` on all
episodes together, but for rounding, however they are cut. Their order gives the policies their
numbers, and with them the neighbours to which behaviours of a single episode are joined: with one
episode a policy, errors and bootstrap draws follow the order of the files. So do the folds of a q
model: estimators that use one change with it, within their error.

A pass is done task by task and merged in the order of the tasks, which depend on the shards alone.
So one process, several, or a Ray cluster give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ope_gym.data.blocks import PathLike
from ope_gym.estimators.reductions import WeightSums
from ope_gym.estimators.table import ESTIMATORS, SHARD_ESTIMATORS
from ope_gym.estimators.weighted import cut_limits
from ope_gym.inference import bootstrap
from ope_gym.models.base import FOLDS, CrossFitted
from ope_gym.models.linear import FeatureSurvey, LinearQ
from ope_gym.options import Options, check_options
from ope_gym.policies import FinitePolicy, Policy, check_target
from ope_gym.results import Evaluation
from ope_gym.scale.cut import Cut, CutSums
from ope_gym.scale.passes import FUSED, Key, NormalisedPass, WeightPass, keys_of
from ope_gym.scale.results import estimates_of
from ope_gym.scale.shard_tasks import (
    Setting,
    feature_survey,
    has_model,
    normal_equations,
    normalised_pass,
    weight_pass,
)
from ope_gym.scale.sources import Shard, Survey, Task, survey
from ope_gym.scale.spool import scratch_folder
from ope_gym.scale.workers import Workers, start_workers
from ope_gym.weights.mixtures import joined

T = TypeVar("T")
R = TypeVar("R")

_METHODS = ("weighted", "direct", "auto")
BLOCK_STEPS = 1 << 17  # held in memory at once


def evaluate_shards(
    shards: Shard | Iterable[Shard],
    target: Policy,
    *,
    estimators: str | Iterable[str] = SHARD_ESTIMATORS,
    data: str = "all",
    origin: str | None = None,
    q_model: LinearQ | str | None = "default",
    gamma: float = 1.0,
    cap: float = 10.0,
    interval: str = "ess-t",
    level: float = 0.95,
    rng: int | np.random.Generator | None = None,
    resamples: int = 1000,
    block_steps: int = BLOCK_STEPS,
    scratch: PathLike | None = None,
    mixture: str | int = "auto",
    workers: int = 1,
    ray: bool | str | None = False,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """The value of `target`, from episodes that need not fit into memory.

    The result is that of `ope_gym.evaluate` on all episodes together. Bootstrap intervals differ
    in their draws, which depend on the trajectories alone (`ope_gym.inference.bootstrap`). It does
    not depend on `workers`, `ray` and `scratch`, to the last bit.

    Args:
        shards: files of episodes, trajectories or buffers, functions that make them, or one of
            these. Each is visited once a pass. Equal policies are one behaviour; policies that
            change during episodes are refused. What is not a file is sent to the workers.
        target: the policy to evaluate.
        estimators: BIS, BCIS, NBIS, NBCIS, FIS, FCIS, NFIS, NFCIS, OUIS (deterministic rewards),
            NOUIS, auto; with a q model also DM, DR, WDR, FDR, FWDR. By default BIS, NBIS, FIS,
            NFIS and auto.
        data: "all" episodes, only the "held-out" ones, or "auto": these if there are any.
        origin: as in `ope_gym.evaluate`.
        q_model: a `LinearQ` for the estimators that use one, with polynomial features (its own) or
            a plain callable; the target then needs a finite action set. "default" is LinearQ(),
            also for whole numbers, or none where it cannot be used; None is no model.
        gamma: discount within [0, 1].
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile" or "bca".
        level: confidence level of the intervals.
        rng: seed or generator of the bootstrap draws.
        resamples: bootstrap replicates; they take (2, resamples, longest episode) numbers for every
            normalised estimator.
        block_steps: about how many steps to hold in memory at once.
        scratch: a folder on a disk for the weights of the second pass, 8 bytes a step for each
            weighting scheme and for the reward; without it the third pass evaluates all policies
            again, and so do nodes of a Ray cluster that do not share the folder.
        mixture: as in `ope_gym.evaluate`; what a partial one loses is not measured here.
        workers: processes of this machine; 1 does everything in this one. Not with `ray`.
        ray: an address of a Ray cluster, or True for the one that Ray finds or starts here; files
            must have the same paths on all nodes.
        progress: called with the number of steps just done; see `passes` for how often all are.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table.
    """
    options = check_options(estimators, gamma, cap, interval, level, rng, resamples, None, None)
    refuse(options, q_model)
    check_target(target)
    if ray and workers != 1:
        raise ValueError(
            f"workers is {workers!r} and ray is {ray!r}: Ray's resources say how many tasks run at "
            "once; give one of them"
        )
    with scratch_folder(scratch) as folder, start_workers(workers, ray) as crew:
        found = survey(shards, data, block_steps, crew)
        model = model_of(q_model, found, target, options, crew)
        return evaluate_survey(
            found,
            target,
            options,
            crew,
            origin=origin,
            q_model=model,
            folder=folder,
            mixture=mixture,
            progress=progress,
        )


def passes(options: Options, q_model: LinearQ | None) -> int:
    """How often `evaluate_survey` does all steps, as its progress counts them; see `model_of`."""
    found = 1 + bool(keys_of(options.estimators, normalised=True))
    if q_model is not None and _uses_q(options):
        found += 2 + ("auto" in options.estimators)
    return found


def _uses_q(options: Options) -> bool:
    return any(ESTIMATORS[name].uses_q for name in options.estimators)


def model_of(
    q_model: LinearQ | str | None, found: Survey, target: Policy, options: Options, crew: Workers
) -> LinearQ | None:
    """The q model; "default" is a `LinearQ` if it can be fitted to episodes like the first ones.

    For that the first task is read once more.
    """
    if not isinstance(q_model, str):
        return q_model
    if not _uses_q(options):
        return None
    if not isinstance(target, FinitePolicy):
        why = "a target without probs: load all episodes and use ope_gym.evaluate"
    elif found.mixture.trajectories < 2:
        why = "a single episode"
    else:
        setting = Setting(found.mixture, target, options, found.held_out, found.steps)
        (fits,) = crew.in_order(partial(has_model, setting), found.tasks[:1])
        if fits:
            return LinearQ()
        why = "such observations: give q_model=LinearQ(features=...), or load all episodes"
    for name in options.estimators:
        if ESTIMATORS[name].baseline:
            raise ValueError(
                f"estimators has {name!r}, which needs a q model, and shards have none for {why}"
            )
    return None


def evaluate_survey(
    found: Survey,
    target: Policy,
    options: Options,
    crew: Workers,
    *,
    origin: str | None = None,
    q_model: LinearQ | None = None,
    folder: Path | None = None,
    mixture: str | int = "auto",
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """What follows the first pass; see `evaluate_shards` and, for `folder`, `scratch_folder`."""
    found = replace(found, mixture=found.mixture.grouped(mixture))
    tasks, keys = found.tasks, keys_of(options.estimators, normalised=True)
    setting = Setting(found.mixture, target, options, found.held_out, found.steps)
    if not crew.remote:  # else whole tasks are counted, when they are done
        setting = replace(setting, done=progress)

    def done(task: Task) -> None:
        if crew.remote and progress is not None:
            progress(task.steps)

    named = None
    if _uses_q(options):
        named = "none" if q_model is None else type(q_model).__name__
    if q_model is not None and named is not None:
        setting = replace(setting, q=_fit(setting, q_model, tasks, crew, done))
    setting = replace(setting, folder=folder if keys else None)
    second = WeightPass(found.mixture, target, options)
    for task, part in _each(crew, partial(weight_pass, setting), tasks, tasks):
        second.merge(part)
        done(task)
    if setting.q is not None and "auto" in options.estimators:
        columns = second.sums[FUSED].columns
        limit = cut_limits(columns.peak, columns.sums[0], found.mixture.trajectories)
        setting = replace(setting, limit=limit)
    draws = _draws(second, options)

    def again(
        sums: Mapping[Key, WeightSums], number: int, cut: CutSums | None = None
    ) -> NormalisedPass:
        """Pass 3 or 4."""
        passed = NormalisedPass.after(sums, found.mixture.trajectories, draws)
        if not sums:
            return passed
        empty = NormalisedPass(passed.sums, passed.trajectories, None)
        drawn = _Drawn(tasks, draws)
        make = partial(normalised_pass, setting, empty, number)
        for task, (some, cut_sums) in _each(crew, make, drawn, tasks):
            passed.merge(some)
            if cut is not None and cut_sums is not None:
                cut.merge(cut_sums)
            done(task)
        return passed

    cut_sums = None if setting.limit is None else CutSums(options.gamma)
    third = again({key: second.sums[key] for key in keys}, 3, cut_sums)
    cut = None if cut_sums is None else Cut(cut_sums, again(cut_sums.sums, 4))
    return estimates_of(second, third, origin, cut, named)


def _each(
    crew: Workers, function: Callable[[T], R], items: Sequence[T], tasks: Sequence[Task]
) -> Iterator[tuple[Task, R]]:
    return zip(tasks, crew.in_order(function, items), strict=True)


class _Drawn(Sequence[tuple[Task, bootstrap.PoissonDraws | None]]):
    """Tasks with the draws of their episodes, made when they are asked for."""

    def __init__(self, tasks: Sequence[Task], draws: bootstrap.PoissonDraws | None) -> None:
        self._tasks, self._draws = tasks, draws

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, i: Any) -> Any:
        task = self._tasks[i]
        return task, None if self._draws is None else self._draws.part(task.episodes)


def _draws(second: WeightPass, options: Options) -> bootstrap.PoissonDraws | None:
    if options.interval == "ess-t":
        return None
    return bootstrap.PoissonDraws(
        bootstrap.identities(np.concatenate(second.hashes)),
        joined(np.concatenate(second.ids)),
        options.resamples,
        options.seed,
    )


def _fit(
    setting: Setting,
    model: LinearQ,
    tasks: Sequence[Task],
    crew: Workers,
    done: Callable[[Task], None],
) -> CrossFitted:
    """Fit the q model, cross-fitted."""
    mixture, target = setting.mixture, setting.target
    folds = min(FOLDS, mixture.trajectories)
    if folds < 2:
        raise ValueError("q_model needs at least 2 episodes: it learns from one for another")
    if not isinstance(target, FinitePolicy):
        raise ValueError(
            "target has no probs: a q model of shards needs a finite action set; leave "
            "q_model=None, or load all episodes and use ope_gym.evaluate"
        )
    survey = FeatureSurvey(model, target)
    for task, seen in _each(crew, partial(feature_survey, setting, model), tasks, tasks):
        survey.merge(seen)
        done(task)
    horizon = max(mixture.longest, mixture.described.horizon or 0)
    sums = survey.equations(gamma=setting.options.gamma, horizon=horizon, folds=folds)
    make = partial(normal_equations, setting, survey, horizon, folds)
    for task, part in _each(crew, make, tasks, tasks):
        sums.merge(part)
        done(task)
    return sums.cross_fitted()


def refuse(options: Options, q_model: LinearQ | str | None) -> None:
    """What cannot be done in shards."""
    default = isinstance(q_model, str) and q_model == "default"
    if not (q_model is None or default or isinstance(q_model, LinearQ)):
        raise TypeError(f"q_model is {q_model!r}; shards need a LinearQ, 'default' or None")
    for name in options.estimators:
        if ESTIMATORS[name].method not in _METHODS:
            known = (key for key, c in ESTIMATORS.items() if c.method in _METHODS)
            raise ValueError(
                f"estimators has {name!r}, which cannot be evaluated in shards; choose from "
                f"{', '.join(known)}, or load all episodes and use ope_gym.evaluate"
            )
        if ESTIMATORS[name].baseline and q_model is None:
            raise ValueError(
                f"estimators has {name!r}, which needs a q model: give q_model=LinearQ() or "
                "'default' (leave out --no-q-model)"
            )
    if options.interval == "betting":
        raise ValueError(
            "interval='betting' cannot be made from shards: choose 'ess-t', 'percentile' or 'bca'"
        )
