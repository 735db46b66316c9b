"""Define Q models, and compute their values on recorded steps: cross-fitted and clipped.

A Q model learns q(s, a, t), the expected return of the target from step t on, from recorded
episodes. Doubly robust estimators subtract it from the rewards; the direct method (DM) is its mean
at the start. An episode that ends, by itself or at the time limit, pays nothing afterwards.

The values at an episode must come from other episodes, or the estimate would be biased. `cross_fit`
splits the episodes into folds, learns for each fold from all others, and returns a `Baseline`: q
and v of every step. `CrossFitted` holds what the folds have learned, to be evaluated on some
episodes at a time. `past_only` learns from earlier rounds instead of from other folds.

A new model is a class with `fit` in a file of this room, and a line in its `__init__`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ope_gym import batches
from ope_gym.arrays import (
    FloatArray,
    IntArray,
    annuity,
    check_column,
    check_finite,
    folds_within,
)
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

FOLDS = 5
SAMPLES = 16  # actions drawn from the target to average over, if they are continuous
_ROWS = 1 << 16  # steps evaluated at once, to bound the memory
_CACHED = 1 << 16  # steps times targets whose values stay in the cache
_FEWEST, _MOST = 1 << 10, 1 << 13  # steps at once: each call has its price, and features theirs


@dataclass(frozen=True, eq=False)
class Problem:
    """The task of a Q model: learn the expected discounted returns of the target.

    Args:
        target: the policy to evaluate.
        gamma: discount.
        horizon: longest possible episode.
        rng: of the learner, and of the target's continuous actions.
        answers: of the target about the very episodes to learn from, if it was asked already.
    """

    target: Policy
    gamma: float
    horizon: int
    rng: np.random.Generator
    answers: Answers | None = None


@runtime_checkable
class ActionValues(Protocol):
    """A fitted q.

    It may also offer `q_all(observations, steps)`, (n, A) of every action, and `visits(data,
    rows)`: how often the target comes by some recorded steps (n,) and the residuals there (n,),
    see `Visits`, or None for those at the time of the step. `of_targets`, of a finite action
    set, gives q and visits for several targets at steps with one action, as that of LinearQ, and
    `visit_weights(answers)` what these visits are to be multiplied with.
    """

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return the expected return (n,) of the target from step `steps` on, after `actions`."""
        ...


@runtime_checkable
class QModel(Protocol):
    """A way to learn q. It may also offer `fit_folds`, if it can learn for all folds in one pass.

    `fit_folds(data, fold, problem)` returns for each fold 0, 1, ... the values learned from all
    episodes outside of it, and last, if it can, those learned from all; `fold` is (n,).
    `fit_targets(data, fold, problems)` returns a list of these for several targets.
    """

    def fit(self, data: Trajectories, problem: Problem) -> ActionValues:
        """Learn from all episodes of `data`."""
        ...


@dataclass(frozen=True, eq=False)
class Visits:
    """How often the target comes by the recorded steps, relative to the recorded policies.

    Args:
        ratio: (S,) discounted visits of the target to the state and action of the step, divided
            by the mean number of recorded visits in an episode.
        residuals: (S,) r - q + gamma v of the next step, averaged over the times of these visits;
            NaN for that at the time of the step, None if all are.
    """

    ratio: FloatArray
    residuals: FloatArray | None = None


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
        found = rewards - self.q
        ahead = gamma * self.v[1:]
        ahead[offsets[1:-1] - 1] = 0.0
        found[:-1] += ahead
        return np.asarray(found)


@dataclass(frozen=True, eq=False)
class CrossFitted:
    """The values of all folds, to be evaluated on any of the episodes.

    Args:
        values: for each fold the values that it may use, learned from other episodes; None where
            there was nothing to learn from. After those of the last fold there may be the values
            learned from all episodes. An iterator will do if `of` is called once.
        target: the policy to evaluate.
        gamma: discount.
        horizon: longest possible episode.
        bounds: (2, folds) lowest and highest reward that each fold's values learned from.
        together: whether all folds learned in one pass over these very episodes, so that their
            values may tell how often the target visits a step.
    """

    values: Iterable[ActionValues | None]
    target: Policy
    gamma: float
    horizon: int
    bounds: FloatArray
    together: bool = False

    @classmethod
    def to(
        cls,
        problem: Problem,
        values: Iterable[ActionValues | None],
        bounds: FloatArray,
        together: bool = False,
    ) -> CrossFitted:
        """Return the values as an answer to that problem."""
        return cls(values, problem.target, problem.gamma, problem.horizon, bounds, together)

    def of(
        self,
        data: Trajectories,
        fold: IntArray,
        rng: np.random.Generator | None = None,
        first: int = 0,
        answers: Answers | None = None,
    ) -> Baseline:
        """Return q and v of episodes with their folds (n,); see `baselines`."""
        asked = Answers(self.target, data) if answers is None else answers
        return baselines([self], fold, [asked], rng, first)[0]

    def possible(self, fold: int | slice) -> tuple[FloatArray, FloatArray]:
        """Return the lowest and the highest return (horizon + 1,) of so many steps left."""
        unit, (low, high) = annuity(self.gamma, self.horizon), self.bounds[:, fold]
        return min(np.min(low), 0.0) * unit, max(np.max(high), 0.0) * unit


def baselines(
    several: Sequence[CrossFitted],
    fold: IntArray,
    answers: Sequence[Answers],
    rng: np.random.Generator | None = None,
    first: int = 0,
) -> list[Baseline]:
    """Return q and v of some episodes for several targets; 0 where there are no values.

    Both are clipped to the returns that are possible if rewards stay within the bounds (and 0).

    Args:
        several: the values of each target, which differ in the target alone.
        fold: (n,) of the episodes.
        answers: of each target about the episodes.
        rng: source of the targets' actions, if they are continuous.
        first: number of the first episode, for messages.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    places = [_Place(asked, rng, first) for asked in answers]
    part = fold[answers[0].data.episode_ids]
    rest = [iter(own.values if part.size else ()) for own in several]
    heads = [list(itertools.islice(values, 1)) for values in rest]  # a table may be large
    if all(
        own.together and head and hasattr(head[0], "of_targets")
        for own, head in zip(several, heads, strict=True)
    ):
        known = [[*head, *values] for head, values in zip(heads, rest, strict=True)]
        return _fill_together(several[0], known, places, part)
    return [
        _fill(own, itertools.chain(*values), place, part)
        for own, *values, place in zip(several, heads, rest, places, strict=True)
    ]


def _fill(
    fitted: CrossFitted, values: Iterable[ActionValues | None], place: _Place, part: IntArray
) -> Baseline:
    """Return the values at some steps, fold by fold.

    Args:
        fitted: what the folds have learned.
        values: of each fold, then those learned from all; None where there are none.
        place: where values are wanted.
        part: (S,) fold of each step.
    """
    data, folds = place.answers.data, fitted.bounds.shape[1]
    q, v, ratio = np.zeros((3, part.size))
    averaged, visited, direct = np.full(part.size, np.nan), True, None
    for k, own in enumerate(values):
        if own is None:
            continue
        if k == folds:
            bounds = fitted.possible(slice(None))
            direct = values_at(own, place, data.offsets[:-1], bounds)[1]
            continue
        rows = np.flatnonzero(part == k)
        for begin in range(0, rows.size, _ROWS):
            here = rows[begin : begin + _ROWS]
            q[here], v[here] = values_at(own, place, here, fitted.possible(k))
        visits = getattr(own, "visits", None) if fitted.together else None
        visited = visited and visits is not None
        if visits is not None and rows.size:
            ratio[rows], residuals = visits(data, rows)
            averaged[rows] = np.nan if residuals is None else residuals
    return Baseline(q, v, Visits(ratio, averaged) if visited else None, direct)


def _fill_together(
    fitted: CrossFitted,
    values: Sequence[Sequence[Any]],
    places: Sequence[_Place],
    part: IntArray,
) -> list[Baseline]:
    """Return the values of several targets at some steps, fold by fold and block by block.

    Args:
        fitted: what the folds have learned, of any of the targets.
        values: for each target those of each fold, and those learned from all if there are any.
        places: where values are wanted.
        part: (S,) fold of each step.
    """
    data, folds = places[0].answers.data, fitted.bounds.shape[1]
    block = int(np.clip(_CACHED // len(places), _FEWEST, _MOST))
    actions = places[0].answers.columns(slice(0, 1)).shape[0]
    chosen = choices(data.actions, data.n_steps, actions)
    # in the order of folds and actions: the steps of a block have one action, and are written in
    # one piece; they are put in their places once, at the end
    group = part * actions + chosen
    order = np.argsort(group, kind="stable")
    cuts = np.searchsorted(group[order], np.arange(folds * actions + 1)).tolist()
    found = np.empty((3, len(places), part.size))
    direct: list[FloatArray | None] = [None] * len(places)
    for k, own in enumerate(zip(*values, strict=True)):
        if k == folds:
            starts, bounds = data.offsets[:-1], fitted.possible(slice(None))
            made = np.empty((3, len(places), starts.size))
            _at_once(own, places, _columns(places, starts), starts, bounds, 0, made)
            direct = [*made[1]]
            continue
        edges = cuts[k * actions : (k + 1) * actions + 1]
        # put in the order of the fold once for each target, not block by block
        probs = _columns(places, order[edges[0] : edges[-1]])
        for a in range(actions):
            for begin in range(edges[a], edges[a + 1], block):
                here = slice(begin, min(begin + block, edges[a + 1]))
                some = probs[:, :, begin - edges[0] : here.stop - edges[0]]
                rows, bounds = order[here], fitted.possible(k)
                _at_once(own, places, some, rows, bounds, a, found[:, :, here])
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    for row in found[:2].reshape(-1, order.size):
        row[:] = row.take(back)
    q, v, ratio = found
    for row, (own, *_), place in zip(ratio, values, places, strict=True):
        np.multiply(row.take(back), own.visit_weights(place.answers), out=row)
    return [Baseline(q[i], v[i], Visits(ratio[i]), direct[i]) for i in range(len(places))]


def _columns(places: Sequence[_Place], rows: IntArray) -> FloatArray:
    """Return the probabilities (P, A, n) of several targets at some steps."""
    return np.stack([place.answers.columns(rows) for place in places])


def _at_once(
    values: Sequence[Any],
    places: Sequence[_Place],
    probs: FloatArray,
    rows: IntArray,
    bounds: tuple[FloatArray, FloatArray],
    action: int,
    out: FloatArray,
) -> None:
    """Write q, v and ratios of visits (3, P, n) of several targets, q and v as `values_at` does.

    q and ratios are those of one action; ratios lack the weights of the steps.

    Args:
        values: of each target.
        places: where values are wanted.
        probs: (P, A, n) of the targets at these steps.
        rows: (n,) the steps.
        bounds: lowest and highest return (horizon + 1,) of so many steps left.
        action: of all these steps.
        out: where to write.
    """
    data, (q, v, ratio) = places[0].answers.data, out
    left = steps_left(data.steps[rows], bounds[0].size - 1)
    everything, ratio[...] = type(values[0]).of_targets(values, data, rows, action)
    np.clip(everything, bounds[0][left], bounds[1][left], out=everything)  # (P, A, n)
    q[...] = everything[:, action]
    everything *= probs
    np.sum(everything, axis=1, out=v)
    if not np.isfinite(v).all():  # as it is wherever q, which the bounds hold, is not a number
        for place, *pair in zip(places, q, v, strict=True):
            place.finite(rows, *pair)


def cross_fit(
    model: QModel,
    data: Trajectories,
    groups: IntArray,
    problem: Problem,
    folds: int = FOLDS,
) -> Baseline:
    """Return q and v of every step, learned from the episodes of the other folds.

    Args:
        model: the Q model to fit.
        data: recorded episodes.
        groups: (n,) behaviour of each episode, so that each fold has its share of all behaviours.
        problem: what to learn.
        folds: how many; fewer where there are fewer episodes.
    """
    return cross_fit_targets(model, data, groups, [problem], folds)[0]


def cross_fit_targets(
    model: QModel,
    data: Trajectories,
    groups: IntArray,
    problems: Sequence[Problem],
    folds: int = FOLDS,
) -> list[Baseline]:
    """Return what `cross_fit` does for several problems, which differ in the target alone."""
    folds = min(folds, len(data))
    if folds < 2:
        raise ValueError("a Q model needs at least 2 episodes: it learns from one to judge another")
    fold = folds_within(groups, folds)
    bounds = bounds_of_others(reward_bounds(data, fold, folds))

    def one_by_one(problem: Problem) -> Iterator[ActionValues]:
        for k in range(folds):
            others = data.select(episodes=np.flatnonzero(fold != k))
            yield model.fit(others, replace(problem, answers=None))

    fit_folds = getattr(model, "fit_folds", None)
    values: list[Iterable[ActionValues]]
    if hasattr(model, "fit_targets"):
        values = model.fit_targets(data, fold, problems)
    else:
        fit = one_by_one if fit_folds is None else partial(fit_folds, data, fold)
        values = [fit(problem) for problem in problems]
    fitted = [
        CrossFitted.to(problem, own, bounds, fit_folds is not None)
        for problem, own in zip(problems, values, strict=True)
    ]
    answers = [problem.answers or Answers(problem.target, data) for problem in problems]
    return baselines(fitted, fold, answers, problems[0].rng)


def past_only(model: QModel, data: Trajectories, rounds: IntArray, problem: Problem) -> Baseline:
    """Return q and v of every step, learned from the episodes of earlier rounds; 0 in the first.

    Args:
        model: the Q model to fit, once a round.
        data: recorded episodes.
        rounds: (n,) round of each episode, in the order of time.
        problem: what to learn.
    """
    present = np.unique(rounds)

    def one_by_one() -> Iterator[ActionValues | None]:
        for k in range(int(present[-1]) + 1):
            if k == present[0] or k not in present:
                yield None
                continue
            past = data.select(episodes=np.flatnonzero(rounds < k))
            yield model.fit(past, replace(problem, answers=None))

    own = reward_bounds(data, rounds, int(present[-1]) + 1)
    # each round is clipped by the rewards of all rounds before it
    earlier = np.roll(own, 1, axis=1)
    earlier[:, 0] = np.inf, -np.inf
    bounds = np.stack([np.minimum.accumulate(earlier[0]), np.maximum.accumulate(earlier[1])])
    return CrossFitted.to(problem, one_by_one(), bounds).of(data, rounds, problem.rng)


def reward_bounds(data: Trajectories, fold: IntArray, folds: int) -> FloatArray:
    """Return the lowest and the highest reward (2, folds) in each fold; inf, -inf without steps."""
    begins, found = data.offsets[:-1], np.empty((2, folds))
    low, high = (f.reduceat(data.rewards, begins) for f in (np.minimum, np.maximum))
    for k in range(folds):
        own = fold == k
        found[:, k] = low[own].min(initial=np.inf), high[own].max(initial=-np.inf)
    return found


def bounds_of_others(bounds: FloatArray) -> FloatArray:
    """Return for each fold the lowest and the highest reward (2, folds) of all other folds."""
    others = [np.delete(bounds, k, axis=1) for k in range(bounds.shape[1])]
    return np.array([[some[0].min() for some in others], [some[1].max() for some in others]])


@dataclass(frozen=True, eq=False)
class _Place:
    """The episodes at which values are wanted.

    Args:
        answers: of the target about them.
        rng: source of the target's actions, if they are continuous.
        first: number of the first episode, for messages.
    """

    answers: Answers
    rng: np.random.Generator
    first: int = 0

    def clipped(
        self, rows: IntArray, everything: FloatArray, low: FloatArray, high: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return q and v (n,) of some rows from q (n, A) of every action, within bounds (n,)."""
        everything = np.clip(everything, low[:, None], high[:, None])
        q = of_chosen(everything, batches.take(self.answers.data.actions, rows))
        v = np.einsum("na,na->n", self.answers.probs(rows), everything)
        return self.finite(rows, q, v)

    def finite(self, rows: IntArray, q: FloatArray, v: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return q and v, or raise if a value is not finite."""
        if not (np.all(np.isfinite(q)) and np.all(np.isfinite(v))):
            data = self.answers.data
            row = int(rows[np.flatnonzero(~(np.isfinite(q) & np.isfinite(v)))[0]])
            raise ValueError(
                f"q_model gave a value that is not finite at episode "
                f"{self.first + int(data.episode_ids[row])}, step {int(data.steps[row])}: check "
                "its features, or take another model"
            )
        return q, v


def steps_left(steps: IntArray, horizon: int) -> IntArray:
    """Return how many steps are left; the recorded step itself was possible."""
    return np.asarray(np.maximum(horizon - steps, 1))


def values_at(
    values: ActionValues,
    place: _Place,
    rows: IntArray,
    bounds: tuple[FloatArray, FloatArray],
) -> tuple[FloatArray, FloatArray]:
    """Return q and v of some rows, both from q clipped to the bounds for the steps left."""
    data, target = place.answers.data, place.answers.target
    observations, actions = batches.take(data.observations, rows), batches.take(data.actions, rows)
    steps = data.steps[rows]
    left = steps_left(steps, bounds[0].size - 1)
    low, high = bounds[0][left], bounds[1][left]
    if isinstance(target, FinitePolicy):
        count = place.answers.probs(rows[:1]).shape[1]
        return place.clipped(rows, q_all(values, observations, steps, count), low, high)
    q = np.clip(values.q(observations, actions, steps), low, high)
    v = np.zeros(rows.size)
    for _ in range(SAMPLES):
        drawn = target.sample(observations, place.rng)
        v += np.clip(values.q(observations, drawn, steps), low, high)
    return place.finite(rows, q, v / SAMPLES)


def q_all(values: ActionValues, observations: Tree, steps: IntArray, actions: int) -> FloatArray:
    """Return q (n, A) of every action."""
    own = getattr(values, "q_all", None)
    if own is not None:
        return np.asarray(own(observations, steps), dtype=np.float64)
    return np.stack(
        [values.q(observations, np.full(steps.size, a), steps) for a in range(actions)], axis=1
    )


def of_chosen(everything: FloatArray, actions: Tree) -> FloatArray:
    """Return the values (n,) of the chosen actions, from those of all actions (n, A)."""
    chosen = choices(actions, *everything.shape)
    return np.asarray(everything[np.arange(chosen.size), chosen])


def checked_fold(fold: IntArray, episodes: int) -> IntArray:
    """Return the folds given to `fit_folds`; raise unless they are 0, 1, ..., at least two."""
    found = np.asarray(fold)
    if found.shape != (episodes,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"fold has shape {found.shape} and dtype {found.dtype}: {episodes} episodes need "
            f"({episodes},) whole numbers"
        )
    if found.min() < 0 or np.unique(found).size < max(2, int(found.max()) + 1):
        raise ValueError(
            f"fold has the numbers {np.unique(found).tolist()}: give 0, 1, ..., each at least once"
        )
    return found.astype(np.int64)


def check_baseline(baseline: Baseline, steps: int, offsets: IntArray) -> Baseline:
    """Return a baseline of finite numbers, one a step, or raise."""
    for name, values in (("q", baseline.q), ("v", baseline.v)):
        check_finite(check_column(values, f"baseline {name}", steps), f"baseline {name}", offsets)
    return baseline
