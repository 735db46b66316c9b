"""Prepare episodes in files: fit, weigh and sum them in passes, a block at a time.

A pass goes task by task, and merges in the order of the tasks. How tasks are cut depends on the
files alone, so one process, several, or a Ray cluster give equal results. The result of a task
depends on its item and the job alone: computed again, because a worker was lost, it is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ope_gym.arguments import shortened
from ope_gym.arrays import FloatArray, IntArray, folds_within
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.reductions import Weighted
from ope_gym.estimators.run import Aimed, Reduce, merge_all, parts_of
from ope_gym.models import base, default_linear
from ope_gym.models.base import Baseline, CrossFitted, FoldSums, QModel
from ope_gym.models.folds import FOLDS, baselines
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.base import Snapshot, ask_once, is_ours
from ope_gym.preparing.survey import Survey
from ope_gym.preparing.weighing import Shared, Weighing
from ope_gym.scale.sources import Section, Source, Task, changed
from ope_gym.scale.workers import Workers
from ope_gym.weights.answers import Answers

_STEPS = 1 << 26  # steps times targets of one pass
_WORTH_STARTING = 1 << 22  # steps from which a q model is fitted faster in processes
_IN_BLOCKS = (
    "these are read from files in blocks: load them with Trajectories.load, or raise "
    "Compute(block_steps=...)"
)


class Files:
    """Episodes in files, to be evaluated.

    Args:
        survey: Who recorded them.
    """

    capacity = _STEPS

    def __init__(self, survey: Survey) -> None:
        self._survey, compute = survey, survey.options.compute
        self._workers = Workers(compute.workers, compute.ray)

    def policy(self, policy: Policy) -> Policy:
        """Return a policy as it can be asked; its steps are not at hand yet."""
        return policy

    def lacks(self, target: Policy) -> dict[str, str]:
        """Return why needs of estimators are not met, in words."""
        return {**self._survey.lacks, "rounds": _IN_BLOCKS, "one step": _IN_BLOCKS}

    def check_model(self, model: QModel | Baseline | None, target: Policy) -> QModel | None:
        """Return a q model that can be fitted to files in blocks, or raise."""
        if isinstance(model, Baseline) or (model is not None and model.survey(target) is None):
            raise TypeError(
                f"q_model is {shortened(model)}, but episodes that are read from files in blocks "
                "take a LinearQ, 'default' or None: load them with Trajectories.load, or raise "
                "Compute(block_steps=...)"
            )
        return model

    def default_model(self, target: Policy) -> QModel | None:
        """Return the default q model, which needs a finite target."""
        source = self._survey.source
        _, chunk = next(source.chunks(source.tasks[0]))
        if not isinstance(ask_once(target, chunk.observations, chunk.actions), FinitePolicy):
            return None
        return default_linear(chunk, target)

    def model_name(self, model: Any) -> str | None:
        """Return the name of a q model that is wanted, or why there is none."""
        if model is not None:
            return type(model).__name__
        return None if self._survey.options.q_model is None else "none that can be fitted in blocks"

    def reward_model(self, model: Any, used: bool) -> str | tuple[FloatArray, FloatArray]:
        """Return the reward model, or raise."""
        if not (isinstance(model, str) and model == "deterministic"):
            raise ValueError(
                f"reward_model is {shortened(model)}, which needs all episodes in memory, but "
                f"{_IN_BLOCKS}"
            )
        return "deterministic"

    def deterministic(self, target: Policy) -> bool:
        """Tell whether a policy takes one action for certain, which nobody looks for here."""
        return False

    def prepare(
        self, weighing: Weighing, targets: Sequence[Policy], model: Any
    ) -> tuple[Reduce, None]:
        """Return what answers requests, in passes; errors of propensities need the memory."""
        survey, source = self._survey, self._survey.source
        job = Job(
            source,
            tuple(targets),
            weighing,
            threads=fit_for_threads(source, targets, model),
            done=survey.options.compute.progress,
        )
        ids, fold = survey.behaviours.ids, None
        if model is not None:
            values, fold = fit_chunks(job, model, ids, survey.roster.longest, self._workers)
            job = dataclasses.replace(job, q=values)
        return reduce_in_passes(job, self._workers, ids, fold), None


# Passes ------------------------------------------------------------------------------------------


class Mergeable(Protocol):
    """Sums over some episodes."""

    def merge(self, other: Any) -> None:
        """Add the sums over later episodes."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """The facts that all tasks of an evaluation share.

    Args:
        source: The episodes, without their roster.
        targets: The policies to evaluate.
        weighing: How episodes are weighed.
        q: Values of a q model that was fitted to chunks, for each target; empty without one.
        threads: Whether tasks may be done in threads of this process, see `fit_for_threads`.
        done: Called with the number of steps just done, or None.
    """

    source: Source
    targets: tuple[Policy, ...]
    weighing: Weighing
    q: tuple[CrossFitted, ...] = ()
    threads: bool = False
    done: Callable[[int], object] | None = None

    def chunks(self, task: Task, ids: IntArray) -> Iterator[tuple[str, Trajectories, slice]]:
        """Yield the episodes of a task in chunks: origin, episodes, place in the task."""
        starts = np.array([plan[0][1] for plan in self.weighing.behaviours.plans])
        begin = 0
        for name, chunk in self.source.chunks(task):
            here = slice(begin, begin + len(chunk))
            acted = chunk.policy_ids[chunk.offsets[:-1]]
            if not np.array_equal(starts[ids[here]], acted):
                raise changed(task, here.stop)
            yield name, chunk, here
            begin = here.stop
            if self.done is not None:
                self.done(chunk.n_steps)

    def weighted(
        self, task: Task, ids: IntArray, fold: IntArray | None
    ) -> Iterator[list[Weighted]]:
        """Yield the chunks of a task, each with the weights of every target."""
        bounds = self.q[0].bounds if self.q else None
        for name, data, here in self.chunks(task, ids):
            first, shared = task.episodes.start + here.start, Shared()
            answers = [Answers(target, data) for target in self.targets]
            values: list[Baseline | None] = [None] * len(answers)
            try:
                if self.q and fold is not None:
                    values = [*baselines(self.q, fold[here], answers, first=first)]
                yield [
                    self.weighing.weigh(one, ids[here], first, baseline, shared, bounds)
                    for one, baseline in zip(answers, values, strict=True)
                ]
            except ValueError as error:
                raise ValueError(f"{name}, episodes counted over all files: {error}") from error


def fit_for_threads(source: Source, targets: Sequence[Policy], model: Any) -> bool:
    """Return whether to do tasks in threads of this process, not in processes of their own.

    Threads need no code of a user, which may hold the interpreter's lock, or change something as
    it runs. Our snapshots of policies never change, and leave the work to numpy. A q model takes
    many short calls, which hold the lock for a third of the time: for many steps processes are
    faster, although they take a second to start.
    """
    if model is not None and source.roster.steps >= _WORTH_STARTING:
        return False
    return (
        all(isinstance(x, Snapshot) and is_ours(x) for x in (*targets, *source.policies))
        and all(x is None or is_ours(x) for x in (model, getattr(model, "features", None)))
        and all(isinstance(x.content, Section) for t in source.tasks for x in t.pieces)
    )


@dataclass(frozen=True, eq=False)
class Item:
    """A task with the behaviours, folds and reductions of its episodes.

    Args:
        task: the task.
        ids: (n,) behaviours of its episodes.
        fold: (n,) their folds; None without a q model.
        requests: the reductions, cut to these episodes.
    """

    task: Task
    ids: IntArray
    fold: IntArray | None = None
    requests: tuple[Aimed, ...] = ()


class Items(Sequence[Item]):
    """The items of a pass, made when they are asked for."""

    def __init__(
        self,
        tasks: Sequence[Task],
        ids: IntArray,
        fold: IntArray | None,
        requests: Sequence[Aimed] = (),
    ) -> None:
        self._tasks, self._ids, self._fold, self._requests = tasks, ids, fold, requests

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, i: Any) -> Any:
        task = self._tasks[i]
        here = task.episodes
        fold = None if self._fold is None else self._fold[here]
        own = tuple(request.slice(here) for request in self._requests)
        return Item(task, self._ids[here], fold, own)


def one_pass(
    job: Job, workers: Workers, function: Callable[[Job, Item], Any], items: Items
) -> Iterator[Any]:
    """Yield the result of a function on each task, in order."""
    nobody = job.source.roster.select(np.zeros(len(job.source.roster), dtype=bool))
    sent = dataclasses.replace(
        job,
        source=dataclasses.replace(job.source, roster=nobody, tasks=(), owners=()),
        # of several workers whole tasks are counted, when they are done
        done=job.done if workers.alone else None,
    )
    with closing(workers.in_order(partial(function, sent), items, threads=job.threads)) as parts:
        for i, part in enumerate(parts):
            yield part
            if not workers.alone and job.done is not None:
                job.done(items[i].task.steps)


def reduce_task(job: Job, item: Item) -> list[Mergeable]:
    """Compute the parts of reductions over the chunks of a task."""
    merged: list[Mergeable] = []
    for chunks in job.weighted(item.task, item.ids, item.fold):
        merge_all(merged, parts_of(item.requests, chunks))
    return merged


def reduce_in_passes(job: Job, workers: Workers, ids: IntArray, fold: IntArray | None) -> Reduce:
    """Answer requests, each time in a pass over the files.

    Args:
        job: What the tasks share.
        workers: Who reads the files.
        ids: (n,) behaviours of the episodes.
        fold: (n,) their folds; None without a q model.
    """

    def reduce(requests: Sequence[Any]) -> list[Any]:
        items = Items(job.source.tasks, ids, fold, requests)
        merged: list[Any] = []
        for parts in one_pass(job, workers, reduce_task, items):
            merge_all(merged, parts)
        return [r.total(parts) for r, parts in zip(requests, merged, strict=True)]

    return reduce


# A q model, in two passes ------------------------------------------------------------------------


def fit_chunks(
    job: Job, model: QModel, ids: IntArray, horizon: int, workers: Workers
) -> tuple[tuple[CrossFitted, ...], IntArray]:
    """Fit a q model to chunks; return for each target its cross-fitted values, and the folds (n,).

    Args:
        job: the episodes and the targets.
        model: Model to be fitted.
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


def _survey(model: QModel, job: Job, item: Item) -> base.Survey:
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
