"""Compute the values of Q models on recorded steps: cross-fitted and clipped.

`cross_fit` splits the episodes into folds, learns for each fold from all others, and returns a
`Baseline`: q and v of every step. `past_only` learns from earlier rounds instead. Both clip q to
the returns that are possible if rewards stay within those learned from (and 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, folds_within
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import (
    SAMPLES,
    ActionValues,
    Baseline,
    CrossFitted,
    Problem,
    QModel,
    Visits,
    each_action,
    unknown_part,
)
from ope_gym.policies import FinitePolicy
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

FOLDS = 5


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
    gamma, horizon = problems[0].gamma, problems[0].horizon
    fitted = [
        CrossFitted(values, gamma, horizon, bounds, model.one_pass, model.shared)
        for values in model.fit_folds(data, fold, problems)
    ]
    answers = [problem.asked(data) for problem in problems]
    return baselines(fitted, fold, answers, [problem.rng for problem in problems])


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
    fitted = CrossFitted(one_by_one(), problem.gamma, problem.horizon, bounds)
    return baselines([fitted], rounds, [problem.asked(data)], [problem.rng])[0]


def baselines(
    fitted: Sequence[CrossFitted],
    fold: IntArray,
    answers: Sequence[Answers],
    rngs: Sequence[np.random.Generator] = (),
    first: int = 0,
) -> list[Baseline]:
    """Return q and v of some episodes for several targets; 0 where there are no values.

    Args:
        fitted: the values of each target, which differ in the target alone.
        fold: (n,) of the episodes.
        answers: Answers of each target about the episodes.
        rngs: source of each target's actions, if they are continuous.
        first: number of the first episode, for messages.
    """
    targets = range(len(fitted))
    places = [list(targets)] if fitted[0].shared else [[i] for i in targets]
    values = list[Baseline]()
    for some in places:
        own_rngs = [rngs[i] if rngs else np.random.default_rng(0) for i in some]
        evaluation = _Evaluation([answers[i] for i in some], own_rngs, first)
        values += evaluation.run([fitted[i] for i in some], fold)
    return values


class _Evaluation:
    """Evaluate values of P targets at the steps of some episodes.

    Args:
        answers: Answers of each target about the episodes.
        rngs: source of each target's actions, if they are continuous.
        first: number of the first episode, for messages.
    """

    def __init__(
        self, answers: Sequence[Answers], rngs: Sequence[np.random.Generator], first: int
    ) -> None:
        self.answers, self.rngs, self.first = answers, rngs, first
        self.data = answers[0].data
        self.finite = isinstance(answers[0].target, FinitePolicy)
        self.chosen = np.zeros(self.data.n_steps, dtype=np.int64)
        if self.finite:
            actions = len(answers[0].columns(slice(0, 1)))
            self.chosen = choices(self.data.actions, self.data.n_steps, actions)

    def run(self, fitted: Sequence[CrossFitted], fold: IntArray) -> list[Baseline]:
        """Return the values of each target, fold by fold."""
        data, folds, targets = self.data, fitted[0].bounds.shape[1], range(len(fitted))
        part = fold[data.episode_ids]
        # steps of one fold and one action are neighbours: values are made and written in one piece
        order = np.lexsort((self.chosen, part))
        cuts = np.searchsorted(part[order], np.arange(folds + 1))
        q, v, ratio = np.zeros((3, len(fitted), part.size))
        residuals = np.full((len(fitted), part.size), np.nan)
        unknown = np.full((len(fitted), 4, part.size), np.nan)
        visited, averaged = [fitted[0].visits] * len(fitted), False
        direct: list[FloatArray | None] = [None] * len(fitted)
        for k, values in enumerate(zip(*(own.values for own in fitted), strict=True)):
            if values[0] is None or not part.size:
                continue
            if k == folds:
                bounds, starts = fitted[0].possible(slice(None)), data.offsets[:-1]
                direct = [*self.at(values, starts, bounds, visits=False)[1]]
                continue
            block, bounds = type(values[0]).at_once(len(fitted)), fitted[0].possible(k)
            for begin in range(cuts[k], cuts[k + 1], block):
                here = slice(begin, min(begin + block, int(cuts[k + 1])))
                q[:, here], v[:, here], seen = self.at(
                    values, order[here], bounds, fitted[0].visits
                )
                for i, visits in enumerate(seen):
                    if visits is None:
                        visited[i] = False
                        continue
                    ratio[i, here] = visits.ratio
                    if visits.unknown is not None:
                        unknown[i, :, here] = visits.unknown
                    if visits.residuals is not None:
                        residuals[i, here], averaged = visits.residuals, True
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        visits_of = [
            Visits(
                ratio[i].take(place),
                residuals[i].take(place) if averaged else None,
                unknown[i].take(place, axis=1),
            )
            if visited[i]
            else None
            for i in targets
        ]
        return [
            Baseline(q[i].take(place), v[i].take(place), visits_of[i], direct[i]) for i in targets
        ]

    def at(
        self,
        values: Sequence[ActionValues],
        rows: IntArray,
        bounds: tuple[FloatArray, FloatArray],
        visits: bool,
    ) -> tuple[FloatArray, FloatArray, Sequence[Visits | None]]:
        """Return q and v (P, n) of some rows, both from one clipped q, and visits of each target.

        Args:
            values: those of each target.
            rows: (n,) the steps.
            bounds: lowest and highest return (horizon + 1,) of so many steps left.
            visits: whether visits are wanted.
        """
        # a recorded step was possible, whatever the horizon
        left = np.maximum(bounds[0].size - 1 - self.data.steps[rows], 1)
        low, high = bounds[0][left], bounds[1][left]
        if self.finite:
            kind = type(values[0])
            everything, seen = kind.of_targets(values, self.answers, rows, visits)
            np.clip(everything, low, high, out=everything)  # (P, A, n)
            q = np.empty((len(values), rows.size))
            for a, some in each_action(self.chosen[rows]):
                q[:, some] = everything[:, a, some]
            for i, (table, asked) in enumerate(zip(everything, self.answers, strict=True)):
                probs = asked.columns(rows)
                visits_of = seen[i]
                known = None if visits_of is None else values[i].knows(asked, rows)
                if visits_of is not None and known is not None:
                    seen[i] = replace(
                        visits_of, unknown=unknown_part(table, probs, known, self.chosen[rows])
                    )
                table *= probs
            v = everything.sum(axis=1)
        else:
            askers = zip(values, self.answers, self.rngs, strict=True)
            q, v = np.stack([self._drawn(*asker, rows, low, high) for asker in askers], axis=1)
            seen = [
                own.visits(asked, rows) if visits else None
                for own, asked in zip(values, self.answers, strict=True)
            ]
        self._check_finite(rows, q, v)
        return q, v, seen

    def _drawn(
        self,
        values: ActionValues,
        answers: Answers,
        rng: np.random.Generator,
        rows: IntArray,
        low: FloatArray,
        high: FloatArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return q, and v by the mean over actions that the target draws."""
        seen, steps = batches.take(self.data.observations, rows), self.data.steps[rows]
        taken = batches.take(self.data.actions, rows)
        q, v = np.clip(values.q(seen, taken, steps), low, high), np.zeros(rows.size)
        for _ in range(SAMPLES):
            v += np.clip(values.q(seen, answers.target.sample(seen, rng), steps), low, high)
        return q, v / SAMPLES

    def _check_finite(self, rows: IntArray, q: FloatArray, v: FloatArray) -> None:
        if np.isfinite(v).all() and np.isfinite(q).all():
            return
        bad = ~(np.isfinite(v) & np.isfinite(q)).all(axis=0)
        row = int(rows[np.flatnonzero(bad)[0]])
        raise ValueError(
            f"q_model gave a value that is not finite at episode "
            f"{self.first + int(self.data.episode_ids[row])}, step {int(self.data.steps[row])}: "
            "check its features, or take another model"
        )


def reward_bounds(data: Trajectories, fold: IntArray, folds: int) -> FloatArray:
    """Return the lowest and the highest reward (2, folds) in each fold; inf, -inf without steps."""
    bounds = np.array([[np.inf] * folds, [-np.inf] * folds])
    np.minimum.at(bounds[0], fold, np.minimum.reduceat(data.rewards, data.offsets[:-1]))
    np.maximum.at(bounds[1], fold, np.maximum.reduceat(data.rewards, data.offsets[:-1]))
    return bounds


def bounds_of_others(bounds: FloatArray) -> FloatArray:
    """Return for each fold the lowest and the highest reward (2, folds) of all other folds."""
    others = [np.delete(bounds, k, axis=1) for k in range(bounds.shape[1])]
    return np.array([[some[0].min() for some in others], [some[1].max() for some in others]])
