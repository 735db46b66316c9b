"""What a worker does with a task: a part of a pass, to be merged in the order of the tasks.

Each is a function of the task and of what is the same for all tasks, and of nothing else: a task
that is done twice, because a worker was lost, gives the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.data.schema import join
from ope_gym.data.trajectories import Trajectories
from ope_gym.inference import bootstrap
from ope_gym.models.base import Baseline, CrossFitted, Folds, default_model
from ope_gym.models.linear import WIDEST, FeatureSurvey, LinearQ, NormalEquations
from ope_gym.options import Options
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.scale.census import Mixture
from ope_gym.scale.cut import CutSums, with_cut
from ope_gym.scale.passes import NormalisedPass, WeightedChunk, WeightPass, weigh
from ope_gym.scale.sources import Task, span
from ope_gym.scale.spool import Spool

Done = Callable[[int], object]


@dataclass(frozen=True)
class Setting:
    """What all tasks of an evaluation share.

    Args:
        mixture: what the first pass found.
        target: the policy to evaluate.
        options: of the evaluation.
        held_out: whether to take held-out episodes alone.
        steps: about how many to hold in memory at once.
        folder: for weights, or None.
        q: the q model's values, or None.
        limit: (T,) log of the largest fused weight that `auto` leaves uncut; None without it.
        done: called with the number of steps just done, or None.
    """

    mixture: Mixture
    target: Policy
    options: Options
    held_out: bool
    steps: int
    folder: Path | None = None
    q: CrossFitted | None = None
    limit: FloatArray | None = None
    done: Done | None = None

    def chunks(self, task: Task, number: int) -> Iterator[tuple[str, Trajectories]]:
        """In pass `number`, where they are from and some episodes; small pieces are joined."""
        policies, found = self.mixture.acted[task.behaviours], np.zeros_like(task.counts)
        names: list[str] = []
        waiting: list[Trajectories] = []
        for piece in task.pieces:
            for chunk in piece.chunks(self.steps, self.mixture):
                chosen = chunk.select(held_out=True) if self.held_out else chunk
                if len(chosen):
                    names.append(piece.name)
                    waiting.append(self.mixture.renumbered(piece.part, chosen))
                    acted = waiting[-1].policy_ids[waiting[-1].offsets[:-1]]
                    place = np.minimum(np.searchsorted(policies, acted), policies.size - 1)
                    found = found + np.bincount(place, minlength=found.size)
                    if np.any(policies[place] != acted) or np.any(found > task.counts):
                        raise _changed(task, found, number)
                if sum(part.n_steps for part in waiting) >= self.steps:
                    yield self._joined(names, waiting)
                    names, waiting = [], []
        if not np.array_equal(found, task.counts):
            raise _changed(task, found, number)
        if waiting:
            yield self._joined(names, waiting)

    def weighted(
        self, task: Task, number: int
    ) -> Iterator[tuple[str, Trajectories, Baseline | None]]:
        """The chunks with the values of the q model, if there is one."""
        folds = self.folds(task, 1 if self.q is None else self.q.bounds.shape[1])
        for name, chunk in self.chunks(task, number):
            fold = folds.of(self.mixture.behaviours(chunk).ids)
            yield name, chunk, None if self.q is None else self.q.of(chunk, fold)
            self.progress(chunk.n_steps)

    def folds(self, task: Task, folds: int) -> Folds:
        """Those of the episodes of a task."""
        before = np.zeros_like(self.mixture.counts)
        before[task.behaviours] = task.before
        return Folds(self.mixture.counts, folds, before)

    def progress(self, steps: int) -> None:
        """Tell that some are done."""
        if self.done is not None:
            self.done(steps)

    def _joined(self, names: list[str], parts: list[Trajectories]) -> tuple[str, Trajectories]:
        name = span(names)
        if len(parts) == 1:
            return name, parts[0]
        return name, dataclasses.replace(join(parts), policies=self.mixture.policies)


def _changed(task: Task, found: IntArray, number: int) -> ValueError:
    """Shards changed between two passes; `found` are the episodes of behaviours."""
    return ValueError(
        f"{task.name} had {task.counts.sum()} episodes in the first pass and {found.sum()} in pass "
        f"{number}, or of other policies: shards must not change while they are read; close the "
        "recorder, and give functions that always make the same episodes"
    )


def has_model(setting: Setting, task: Task) -> bool:
    """Whether `LinearQ` can be fitted to such observations, and `evaluate` had a model, too."""
    _, chunk = next(setting.chunks(task, 2))
    target = setting.target
    if default_model(chunk, target) is None or not isinstance(target, FinitePolicy):
        return False
    survey = FeatureSurvey(LinearQ(), target)
    survey.update(chunk)
    return survey.phi(1).weights <= WIDEST


def feature_survey(setting: Setting, model: LinearQ, task: Task) -> FeatureSurvey:
    """Gather the scale of the q model's features over one task."""
    found = FeatureSurvey(model, setting.target)
    for _, chunk in setting.chunks(task, 2):
        found.update(chunk)
        setting.progress(chunk.n_steps)
    return found


def normal_equations(
    setting: Setting, survey: FeatureSurvey, horizon: int, folds: int, task: Task
) -> NormalEquations:
    """Accumulate the q model's normal equations over one task."""
    found = survey.equations(gamma=setting.options.gamma, horizon=horizon, folds=folds)
    fold = setting.folds(task, folds)
    for _, chunk in setting.chunks(task, 2):
        found.update(chunk, fold.of(setting.mixture.behaviours(chunk).ids))
        setting.progress(chunk.n_steps)
    return found


def weight_pass(setting: Setting, task: Task) -> WeightPass:
    """The second pass; the weights are kept in the folder."""
    begin = task.episodes.start
    found = WeightPass(setting.mixture, setting.target, setting.options, begin)
    with Spool(setting.folder, task.number) as spool:
        for name, chunk, baseline in setting.weighted(task, 2):
            spool.add(found.update(name, chunk, baseline))
    return found


def normalised_pass(
    setting: Setting,
    empty: NormalisedPass,
    number: int,
    drawn: tuple[Task, bootstrap.PoissonDraws | None],
) -> tuple[NormalisedPass, CutSums | None]:
    """Pass `number` of a task and the draws of its episodes; weights are read or made again.

    The third one also makes the sums of the weights that are cut, if the limits are known.
    """
    task, draws = drawn
    found = NormalisedPass(empty.sums, empty.trajectories, draws)
    cut = None
    if setting.limit is not None and number == 3:
        cut = CutSums(setting.options.gamma)
    for chunk in _weights(setting, task, number):
        found.update(chunk)
        if cut is not None:
            cut.update(chunk)
    found.draws = None  # known where it is merged
    return found, cut


def _weights(setting: Setting, task: Task, number: int) -> Iterator[WeightedChunk]:
    limit = setting.limit
    for chunk in _uncut(setting, task, number):
        yield chunk if limit is None else with_cut(chunk, limit)


def _uncut(setting: Setting, task: Task, number: int) -> Iterator[WeightedChunk]:
    kept = Spool(setting.folder, task.number).chunks()
    if kept is not None:
        yield from kept
        setting.progress(task.steps)
        return
    first = task.begin
    for name, chunk, baseline in setting.weighted(task, number):
        yield weigh(setting.mixture, setting.target, setting.options, name, chunk, baseline, first)[
            0
        ]
        first += len(chunk)
