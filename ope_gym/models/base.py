"""Define Q models: the protocol of all models in this room.

A Q model learns q(s, a, t), the expected return of the target from step t on, from recorded
episodes. Doubly robust estimators subtract it from the rewards; the direct method (DM) is its mean
at the start. An episode that ends, by itself or at the time limit, pays nothing afterwards.

The values at an episode must come from other episodes, or the estimate would be biased.
`ope_gym.models.folds` splits the episodes, has a model learn, and computes q and v of every step.

A new model is a class derived from `QModel` with `fit`, which returns one derived from
`ActionValues` with `q`. All else has a default here: one fit for each fold, q of all actions by
asking for one after the other, no visits, no fit to chunks of episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ope_gym.arguments import refusal
from ope_gym.arrays import FloatArray, IntArray, annuity, check_column, check_finite
from ope_gym.batches import Tree, take
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

SAMPLES = 16  # actions drawn from the target to average over, if they are continuous
_PAIRS = 5  # differences between actions from which their spread is known well enough
_ROWS = 1 << 16  # steps evaluated at once, to bound the memory


@dataclass(frozen=True, eq=False)
class Problem:
    """The task of a Q model: learn the expected discounted returns of the target.

    Args:
        target: the policy to evaluate.
        gamma: discount.
        horizon: longest possible episode.
        rng: source of the learner's random numbers, and of the target's continuous actions.
        answers: those of the target about the very episodes to learn from, if it was asked already.
    """

    target: Policy
    gamma: float
    horizon: int
    rng: np.random.Generator
    answers: Answers | None = None

    def asked(self, data: Trajectories) -> Answers:
        """Return the target's answers about the episodes to learn from."""
        return Answers(self.target, data) if self.answers is None else self.answers


@dataclass(frozen=True, eq=False)
class Visits:
    """How often the target comes by the recorded steps, relative to the recorded policies.

    Args:
        ratio: (S,) discounted visits of the target to the state and action of the step, divided
            by the mean number of recorded visits in an episode.
        residuals: (S,) r - q + gamma v of the next step, averaged over the times of these visits;
            NaN for that at the time of the step, None if all are.
        unknown: (4, S) visits to the state of the step, as a ratio; those of them to actions that
            no other fold has data of, what these may be worth, and whether the recorded action is
            one; see `Known`. None if the model cannot tell.
    """

    ratio: FloatArray
    residuals: FloatArray | None = None
    unknown: FloatArray | None = None


class Known(NamedTuple):
    """The actions at n recorded steps that a model has data of.

    Args:
        actions: (A, n).
        ratio: (n,) visits of the target to the state, relative to the recorded ones.
    """

    actions: NDArray[np.bool_]
    ratio: FloatArray


@dataclass(frozen=True, eq=False)
class Baseline:
    """The values of a Q model on the recorded steps.

    Args:
        q: (S,) of the recorded action.
        v: (S,) mean of q over the target's actions, from the same clipped q.
        visits: how often the target comes by each step; None if the model cannot tell.
        direct: (n,) v at the start of each episode, learned from all episodes; None if only those
            of the other folds were learned from.
    """

    q: FloatArray
    v: FloatArray
    visits: Visits | None = None
    direct: FloatArray | None = None

    def marginal(self, residuals: FloatArray) -> FloatArray | None:
        """Return ratios of visits and residuals at these visits, (2, S); None if unknown.

        Args:
            residuals: (S,) at the time of each step, see `residuals`.
        """
        if self.visits is None:
            return None
        averaged = self.visits.residuals
        if averaged is not None:
            residuals = np.where(np.isnan(averaged), residuals, averaged)
        return np.stack([self.visits.ratio, residuals])

    def at_start(self, offsets: IntArray) -> FloatArray:
        """Return v (n,) at the first step of each episode."""
        return self.v[offsets[:-1]]

    def residuals(self, rewards: FloatArray, offsets: IntArray, gamma: float) -> FloatArray:
        """Return e_t = r_t - q_t + gamma v_{t+1}, (S,), with v = 0 after the end.

        The doubly robust estimate is the mean of v at the start plus the weighted estimate of e
        in the place of r: sum_t gamma^t [w_t (r_t - q_t) + w_{t-1} v_t] sorted by weight.
        """
        residuals = rewards - self.q
        ahead = gamma * self.v[1:]
        ahead[offsets[1:-1] - 1] = 0.0
        residuals[:-1] += ahead
        return np.asarray(residuals)


class ActionValues(ABC):
    """A fitted q of one target."""

    @abstractmethod
    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return the expected return (n,) of the target from step `steps` on, after `actions`."""

    def q_all(self, observations: Tree, steps: IntArray, actions: int = 0) -> FloatArray:
        """Return q (n, A) of every action.

        Args:
            observations: n of them.
            steps: (n,) numbers of the steps.
            actions: A, for values that do not know it.
        """
        columns = [self.q(observations, np.full(steps.size, a), steps) for a in range(actions)]
        return np.stack(columns, axis=1)

    def visits(self, answers: Answers, rows: IntArray) -> Visits | None:
        """Return how often the target comes by recorded steps (n,); None if these cannot tell."""
        return None

    def knows(self, answers: Answers, rows: IntArray) -> Known | None:
        """Return of which actions at recorded steps there are data; None if these cannot tell."""
        return None

    @classmethod
    def of_targets(
        cls, values: Sequence[Any], answers: Sequence[Answers], rows: IntArray, visits: bool
    ) -> tuple[FloatArray, list[Visits | None]]:
        """Return q (P, A, n) of every action, and visits, at recorded steps of P targets.

        Args:
            values: those of each target, of this class.
            answers: Answers of each target.
            rows: (n,) the steps.
            visits: whether visits are wanted.
        """
        data = answers[0].data
        observations, steps = take(data.observations, rows), data.steps[rows]
        actions = [asked.columns(rows[:1]).shape[0] for asked in answers]
        q = [own.q_all(observations, steps, a).T for own, a in zip(values, actions, strict=True)]
        seen = [
            own.visits(asked, rows) if visits else None
            for own, asked in zip(values, answers, strict=True)
        ]
        return np.stack(q).astype(np.float64, copy=False), seen

    @classmethod
    def at_once(cls, targets: int) -> int:
        """Return how many steps to evaluate in one call of `of_targets`."""
        return _ROWS


class QModel(ABC):
    """A way to learn q.

    Attributes:
        one_pass: whether `fit_folds` learns for all folds in one pass over the episodes, so that
            its values may tell how often the target visits these.
        shared: whether several targets share the work, so that they are evaluated together.
    """

    one_pass: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    @abstractmethod
    def fit(self, data: Trajectories, problem: Problem) -> ActionValues:
        """Learn from all episodes of `data`."""

    def fit_folds(
        self, data: Trajectories, fold: IntArray, problems: Sequence[Problem]
    ) -> list[Iterable[ActionValues | None]]:
        """Return for each target what was learned for each fold, from all episodes outside of it.

        A model that learns in one pass adds, last, the values learned from all episodes.

        Args:
            data: recorded episodes.
            fold: (n,) fold 0, 1, … of each.
            problems: one for each target; they differ in the target alone.
        """

        def one_by_one(problem: Problem) -> Iterator[ActionValues]:
            for k in range(int(fold.max()) + 1):
                others = data.select(episodes=np.flatnonzero(fold != k))
                yield self.fit(others, replace(problem, answers=None))

        return [one_by_one(problem) for problem in problems]

    def survey(self, target: Policy) -> Survey | None:
        """Return what gathers the facts to fit to chunks of episodes; None if all are needed."""
        return None


class Survey(Protocol):
    """The first pass over chunks of episodes: what must be known before sums can be made."""

    def update(self, data: Trajectories) -> None:
        """Add a chunk of whole episodes."""

    def merge(self, other: Any) -> None:
        """Add the chunks that another one has seen."""

    def at_once(self, horizon: int, folds: int, targets: int) -> list[slice]:
        """Return which of so many targets to sum for at once, as memory allows."""
        ...

    def equations(self, targets: int, *, gamma: float, horizon: int, folds: int) -> FoldSums:
        """Return empty sums for so many targets."""
        ...


class FoldSums(Protocol):
    """The second pass over chunks of episodes: sums by fold, from which values follow."""

    def update(self, data: Trajectories, fold: IntArray, answers: Sequence[Answers]) -> None:
        """Add a chunk of whole episodes with their folds (n,)."""

    def merge(self, other: Any) -> None:
        """Add the chunks that another one has summed."""

    def cross_fitted(self) -> list[CrossFitted]:
        """Return what was learned for each target."""
        ...


@dataclass(frozen=True, eq=False)
class CrossFitted:
    """Values that a model has learned for one target.

    Args:
        values: for each fold the values that it may use, learned from other episodes; None where
            there was nothing to learn from. After those of the last fold there may be the values
            learned from all episodes. An iterator will do if they are evaluated once.
        gamma: discount.
        horizon: longest possible episode.
        bounds: (2, folds) lowest and highest reward that each fold's values learned from.
        visits: whether all folds learned in one pass over the episodes to be evaluated, so that
            their values may tell how often the target visits a step.
        shared: whether the values of several targets are evaluated together.
    """

    values: Iterable[ActionValues | None]
    gamma: float
    horizon: int
    bounds: FloatArray
    visits: bool = False
    shared: bool = False

    def possible(self, fold: int | slice) -> tuple[FloatArray, FloatArray]:
        """Return the lowest and the highest return (horizon + 1,) of so many steps left."""
        unit, (low, high) = annuity(self.gamma, self.horizon), self.bounds[:, fold]
        return min(np.min(low), 0.0) * unit, max(np.max(high), 0.0) * unit


def of_chosen(everything: FloatArray, actions: Tree) -> FloatArray:
    """Return the values (n,) of the chosen actions, from those of all actions (n, A)."""
    chosen = choices(actions, *everything.shape)
    return np.asarray(everything[np.arange(chosen.size), chosen])


def unknown_part(q: FloatArray, probs: FloatArray, known: Known, chosen: IntArray) -> FloatArray:
    """Return visits, those to actions without data, and what these may be worth, see `Visits`.

    A guess of their q is as far off as the known actions of a state are apart, whose pooled
    standard deviation is taken; where hardly a state shows two of them, that of all known q.

    Args:
        q: (A, n) of the actions at n steps.
        probs: (A, n) of the target.
        known: the actions that there are data of.
        chosen: (n,) recorded actions.
    """
    actions, nothing = known.actions, np.zeros(known.ratio.size)
    if actions.all():
        return np.stack([known.ratio, nothing, nothing, nothing])
    unit = float(np.abs(q).max()) or 1.0  # by which squares stay within floats
    q, count = q / unit, actions.sum(axis=0)
    mean = np.where(actions, q, 0.0).sum(axis=0) / np.maximum(count, 1)
    freedom = float(np.maximum(count - 1, 0).sum())
    if freedom >= _PAIRS:
        spread = np.sqrt(np.sum(np.where(actions, q - mean, 0.0) ** 2) / freedom)
    else:
        spread = np.std(q[actions]) if actions.any() else 0.0
    spread *= unit * np.sqrt(2.0 * np.log(max(len(q), 2)))  # the best of so many lies so far above
    visits = known.ratio * np.where(actions, 0.0, probs).sum(axis=0)
    guessed = ~actions[chosen, np.arange(chosen.size)]
    return np.stack([known.ratio, visits, visits * spread, guessed])


def each_action(chosen: IntArray) -> Iterator[tuple[int, slice | IntArray]]:
    """Yield each action with where it was chosen: a slice, which needs no copy, if side by side."""
    for a in np.unique(chosen).tolist():
        rows = np.flatnonzero(chosen == a)
        first, end = int(rows[0]), int(rows[-1]) + 1
        yield a, slice(first, end) if end - first == rows.size else rows


def check_baseline(baseline: Baseline, steps: int, offsets: IntArray) -> Baseline:
    """Return a baseline of finite numbers, one a step, or raise."""
    for name, values in (("q", baseline.q), ("v", baseline.v)):
        check_finite(check_column(values, f"baseline {name}", steps), f"baseline {name}", offsets)
    return baseline


def baseline_of(values: Any, steps: int, offsets: IntArray) -> Baseline:
    """Return a baseline from (q, v), one number a step each; raise for anything else."""
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise refusal("baseline", values, "give (q, v), numbers of each step")
    return check_baseline(Baseline(*values), steps, offsets)
