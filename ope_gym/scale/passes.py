"""Passes over the episodes of a source: weigh them, and make the parts of reductions.

A pass is done task by task and merged in the order of the tasks, which depend on the files alone.
So one process, several, or a Ray cluster give equal results. The result of a task depends on its
item and the job alone: computed again, because a worker was lost, it is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import (
    FloatArray,
    IntArray,
    check_finite,
    check_log_probs,
    one_step_earlier,
    step_numbers,
)
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.chunks import Weighted, within_discount
from ope_gym.estimators.reductions import Arrays
from ope_gym.estimators.run import Aimed, merge_all, parts_of
from ope_gym.inference.outcomes import RewardSums, tally
from ope_gym.models.base import Baseline, CrossFitted
from ope_gym.models.folds import baselines
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.base import Snapshot, asked, is_ours
from ope_gym.scale.sources import Section, Source, Task, changed
from ope_gym.scale.workers import Workers
from ope_gym.verdict import Reason
from ope_gym.weights.answers import Answers
from ope_gym.weights.behaviours import Behaviours
from ope_gym.weights.formula import log_weights
from ope_gym.weights.mixtures import partial_log_weights
from ope_gym.weights.propensities import PropensityReport, PropensitySums
from ope_gym.weights.reward_model import cross_fitted_log_weights

_WORTH_STARTING = 1 << 22  # steps from which a q model is fitted faster in processes
_PAST = 8  # columns of past actions, and of past observations


class Mergeable(Protocol):
    """Sums over some episodes."""

    def merge(self, other: Any) -> None:
        """Add the sums over later episodes."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """The facts that all tasks of an evaluation share; K behaviours.

    Args:
        source: the episodes, without their roster.
        behaviours: who could have recorded them, without the ids of the episodes.
        groups: (K,) of partial mixtures.
        targets: the policies to evaluate.
        schemes: weighting schemes that are needed.
        gamma: discount.
        reward_model: of the optimal scheme; arrays only if all episodes are in one chunk.
        q: for each target the values of a q model that was fitted to chunks; empty without one.
        threads: whether tasks may be done in threads of this process, see `fit_for_threads`.
        done: called with the number of steps just done, or None.
    """

    source: Source
    behaviours: Behaviours
    groups: IntArray
    targets: tuple[Policy, ...]
    schemes: tuple[str, ...]
    gamma: float = 1.0
    reward_model: str | tuple[FloatArray, FloatArray] = "deterministic"
    q: tuple[CrossFitted, ...] = ()
    threads: bool = False
    done: Callable[[int], object] | None = None

    @property
    def parted(self) -> bool:
        """Whether mixtures are partial, see `ope_gym.weights.mixtures`."""
        return int(self.groups.max()) > 0

    def fit_for_threads(self, model: Any) -> bool:
        """Return whether to do tasks in threads of this process, not in processes of their own.

        Threads need no code of a user, which may hold the interpreter's lock, or change something
        as it runs. Our snapshots of policies never change, and leave the work to numpy. A q model
        takes many short calls, which hold the lock for a third of the time: for many steps
        processes are faster, although they take a second to start.

        Args:
            model: q model that is fitted; None without one.
        """
        if model is not None and self.source.roster.steps >= _WORTH_STARTING:
            return False
        features = getattr(model, "features", None)
        return (
            all(isinstance(x, Snapshot) and is_ours(x) for x in self.targets)
            and all(isinstance(x, Snapshot) and is_ours(x) for x in self.source.policies)
            and all(x is None or is_ours(x) for x in (model, features))
            and all(isinstance(x.content, Section) for t in self.source.tasks for x in t.pieces)
        )

    def chunks(self, task: Task, ids: IntArray) -> Iterator[tuple[str, Trajectories, slice]]:
        """Yield the episodes of a task in chunks: origin, episodes, place in the task."""
        starts = np.array([plan[0][1] for plan in self.behaviours.plans])
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
        for name, data, here in self.chunks(task, ids):
            first, shared = task.episodes.start + here.start, Shared()
            answers = [Answers(target, data) for target in self.targets]
            found: list[Baseline | None] = [None] * len(answers)
            try:
                if self.q and fold is not None:
                    found = [*baselines(self.q, fold[here], answers, first=first)]
                yield [
                    self.weigh(asked, ids[here], first, baseline, shared)
                    for asked, baseline in zip(answers, found, strict=True)
                ]
            except ValueError as error:
                raise ValueError(f"{name}, episodes counted over all files: {error}") from error

    def weigh(
        self,
        answers: Answers,
        ids: IntArray,
        first: int,
        baseline: Baseline | None,
        shared: Shared,
    ) -> Weighted:
        """Compute the importance weights of some episodes.

        Args:
            answers: the episodes, and what the target says of them.
            ids: (n,) their behaviours.
            first: number of the first episode, for messages.
            baseline: q and v of their steps; None without a q model.
            shared: what was computed for other targets; the missing parts are added.
        """
        data = answers.data
        offsets = data.offsets.astype(np.int64, copy=False)
        check_finite(data.rewards, "rewards", offsets, first)
        behaviours = dataclasses.replace(self.behaviours, ids=ids, strata=ids)
        bases, log_w, own = shared.bases, dict[str, FloatArray](), np.empty(0)
        if self.schemes:
            own, prefix = self._target_prefix(answers, offsets, first)
            missing = sorted(set(self.schemes) - bases.keys())
            if missing:
                shared.mismatch = self._add_bases(bases, missing, data, behaviours, first)
            log_w = {scheme: bases[scheme] + prefix for scheme in self.schemes}
        residuals = start = direct = visits = past = ratios = None
        if baseline is not None:
            residuals = baseline.residuals(data.rewards, offsets, self.gamma)
            start, direct = baseline.at_start(offsets), baseline.direct
            visits = baseline.marginal(residuals)
            past = past_columns(data, answers.target)
            if visits is not None and "basic" in bases and own.size:
                basic = bases["basic"]
                ratios = own + (basic - one_step_earlier(basic, offsets, 0.0))
        groups = self.groups if self.parted else None
        recorded = Recorded(data, behaviours, groups, shared.mismatch, own)
        weighted = Weighted(
            offsets,
            data.rewards,
            log_w,
            residuals=residuals,
            start=start,
            direct=direct,
            visits=visits,
            past=past,
            step_ratios=ratios,
            unit=self._unit(data),
            first=first,
            episodes=recorded,
            kept=shared.kept,
        )
        return within_discount(weighted, self.gamma)

    def _unit(self, data: Trajectories) -> float:
        """Return the largest reward: of all chunks if a q model has seen them, or of these."""
        seen = self.q[0].bounds if self.q else data.rewards
        return float(np.abs(seen).max(initial=0.0)) or 1.0

    def _target_prefix(
        self, answers: Answers, offsets: IntArray, first: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return log-probabilities (S,) under the target, and their sums up to each step."""
        from ope_gym.kernels import prefix_sums

        data = answers.data
        if not data.has_propensities:
            raise ValueError(
                "an unknown policy acted, and weights need the probabilities of all actions: use "
                "DM or MDR, or select(policies=...) the episodes of known policies"
            )
        own = answers.log_probs
        check_log_probs(own, "target_log_probs", offsets, has_densities(data), first)
        return own, prefix_sums(own, offsets)

    def _add_bases(
        self,
        bases: dict[str, FloatArray],
        missing: list[str],
        data: Trajectories,
        behaviours: Behaviours,
        first: int,
    ) -> Reason | None:
        """Add log weights for a target with log-probability 0; return a mismatch, if any."""
        density, model = has_densities(data), self.reward_model
        given = model if isinstance(model, tuple) else None
        if self.parted and missing != ["basic"]:
            found, mismatch = partial_log_weights(
                data,
                behaviours,
                self.groups,
                missing,
                density=density,
                reward_model=given,
                first=first,
            )
            bases |= found
            return mismatch
        certain, episodes = np.zeros(data.n_steps), first + np.arange(len(data))
        rows = behaviours.rows(data, only_own=missing == ["basic"], episodes=episodes)
        if "optimal" in missing and model == "cross-fit" and not density:
            bases["optimal"] = cross_fitted_log_weights(data, certain, behaviours, rows)
            missing = [scheme for scheme in missing if scheme != "optimal"]
        if missing:
            bases |= log_weights(
                certain,
                rows,
                behaviours.ids,
                data.offsets,
                missing,
                counts=behaviours.counts,
                density=density,
                reward_model=given,
                names=(np.arange(behaviours.counts.size), episodes),
            )
        return rows.mismatch


@dataclass
class Shared:
    """Numbers made of some episodes that do not depend on the target, for the next target.

    Args:
        bases: by scheme, log weights for a target with log-probability 0; adding a target's own
            prefix sum gives its weights.
        mismatch: first logged number that its policy contradicts; None if none does.
        kept: by name, other numbers.
    """

    bases: dict[str, FloatArray] = field(default_factory=dict)
    mismatch: Reason | None = None
    kept: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Recorded:
    """The recorded episodes behind weighted ones.

    Args:
        data: the episodes.
        behaviours: who could have recorded them.
        groups: (K,) of partial mixtures; None for the mixture of all.
        mismatch: first logged number that its policy contradicts; None if none does.
        own: (S,) log-probabilities under the target; empty if no weights are needed.
    """

    data: Trajectories
    behaviours: Behaviours
    groups: IntArray | None
    mismatch: Reason | None
    own: FloatArray


def past_columns(data: Trajectories, target: Policy) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return columns of the actions (S, p), and of observations that are real numbers (S, m).

    A few finite actions are 0/1 columns, one less than there are actions. Where the columns are
    those of one array they are a part of it, not a copy.
    """
    taken = _numbers(data.actions, "iubf")
    target = asked(target, data.observations, data.actions)
    if isinstance(target, FinitePolicy) and taken.shape[1] == 1:
        actions = target.probs(batches.take(data.observations, slice(0, 1))).shape[1]
        if actions <= _PAST:
            taken = taken == np.arange(actions - 1)
    return taken, _numbers(data.observations, "f")


def _numbers(batch: batches.Tree, kinds: str) -> NDArray[Any]:
    """Return the first columns of the leaves that hold numbers of such kinds."""
    n = batches.length(batch)
    kept = [x for x in batches.leaves(batch) if x.dtype.kind in kinds]
    leaves = [x.reshape(n, -1)[:, :_PAST] for x in kept]
    if len(leaves) == 1:
        return leaves[0]
    return np.hstack([np.empty((n, 0)), *leaves])[:, :_PAST]


def has_densities(data: Trajectories) -> bool:
    """Tell whether actions are continuous; without a space, if they are not whole numbers."""
    if data.discrete is not None:
        return not data.discrete
    return any(leaf.dtype.kind not in "iub" for leaf in batches.leaves(data.actions))


# Passes over tasks ---------------------------------------------------------------------------


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


# Facts about the recorded data -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Gathered:
    """The facts that verdicts need, over all episodes.

    Args:
        returns: (n,) sum of the rewards of each episode.
        discounted: (n,) the same with discount.
        rewards: what possible returns follow from.
        log_probs: (n,) log-probability of its last action, 0 where it is not known.
        propensities: checks of the recorded propensities against the policies.
        mismatch: first logged number that its policy contradicts; None if none does.
    """

    returns: FloatArray
    discounted: FloatArray
    rewards: RewardSums
    log_probs: FloatArray
    propensities: PropensityReport
    mismatch: Reason | None


@dataclass(frozen=True, eq=False)
class Gathering:
    """Ask for the facts about the recorded data, in the first pass.

    Args:
        target: the policy to evaluate.
        policies: how many policies are known.
        gamma: discount.
    """

    target: Policy
    policies: int
    gamma: float = 1.0

    def part(self, chunk: Weighted) -> _GatheredPart:
        """Collect the facts about the recorded episodes of a chunk."""
        seen: Recorded = chunk.episodes
        data = seen.data
        propensities = PropensitySums(self.target, self.policies)
        kept = chunk.kept.setdefault("propensities", {})
        lost = propensities.update(data, seen.behaviours, seen.groups, kept)
        if lost is not None:  # weights may end before the episodes, where discount leaves nothing
            lost = lost[:, step_numbers(data.offsets) < np.diff(chunk.offsets).max()]
        for scheme, log_w in chunk.log_weights.items():
            propensities.leave(scheme, log_w, chunk.offsets, lost)
        sums, rewards = chunk.once(("tally", self.gamma), lambda: self._tally(data))
        # a copy, to which those of later chunks may be added
        rewards = dataclasses.replace(rewards)
        return _GatheredPart(Arrays(sums), rewards, propensities, seen.mismatch)

    def _tally(self, data: Trajectories) -> tuple[FloatArray, RewardSums]:
        """Return (3, n) returns, discounted returns and last log-probabilities; and all rewards."""
        returns, discounted, rewards = tally(data.rewards, data.offsets, self.gamma)
        last = np.nan_to_num(data.log_probs[data.offsets[1:] - 1])
        return np.stack([returns, discounted, last]), rewards

    def total(self, merged: _GatheredPart) -> Gathered:
        """Return the facts of all chunks together."""
        returns, discounted, log_probs = merged.sums.joined()
        report = merged.propensities.finalise()
        return Gathered(returns, discounted, merged.rewards, log_probs, report, merged.mismatch)


@dataclass
class _GatheredPart:
    sums: Arrays
    rewards: RewardSums
    propensities: PropensitySums
    mismatch: Reason | None

    def merge(self, other: _GatheredPart) -> None:
        self.sums.merge(other.sums)
        self.rewards.merge(other.rewards)
        self.propensities.merge(other.propensities)
        self.mismatch = self.mismatch or other.mismatch
