"""TabularQ: the target's values in the empirical decision process, for finite observations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import ActionValues, Known, Problem, QModel, Visits, of_chosen
from ope_gym.models.process import Process
from ope_gym.policies import FinitePolicy
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers


@dataclass(frozen=True)
class TabularQ(QModel):
    """Fitted Q evaluation in closed form, from counts.

        q_1 = r(s, a),   q_{j+1} = r(s, a) + gamma sum_s' p(s'|s, a) sum_a' pi(a'|s') q_j(s', a')

    with the mean rewards r and the frequencies p of the next states. q(s, a, t) is q_j with j =
    horizon - t steps left: backward induction, exact for problems that a time limit ends. A step at
    the time limit, or one that was truncated, does not show the next state and is left out of p.
    With `time=False` q is the fixed point, the same at all steps; every episode that stopped then
    counts as ended, because without ends and without a discount there is no fixed point.

    An action never seen in a state is given the mean of the actions seen there, a state never seen
    the mean of all recorded steps.

    Cost: one pass over the steps for all folds, then O(horizon × distinct transitions).
    Use it where observations are whole numbers (Discrete, MultiDiscrete, tuples and dicts of them)
    and states recur. Weakness: it does not generalise; where most states are seen once, use
    LinearQ.

    Args:
        time: whether q depends on the steps that are left.
    """

    one_pass: ClassVar[bool] = True

    time: bool = True

    def fit(self, data: Trajectories, problem: Problem) -> TableValues:
        """Return the values learned from all episodes; nothing is drawn at random."""
        nowhere = np.full(len(data), -1)
        (values,) = self._fit(data, nowhere, 1, problem)
        return values

    def fit_folds(
        self, data: Trajectories, fold: IntArray, problems: Sequence[Problem]
    ) -> list[Iterable[ActionValues | None]]:
        """Return for each target the values of each fold, then those learned from all episodes."""
        folds = int(fold.max()) + 2  # no episode is in the last one
        return [self._fit(data, fold, folds, problem) for problem in problems]

    def _fit(
        self, data: Trajectories, fold: IntArray, folds: int, problem: Problem
    ) -> Iterator[TableValues]:
        target, horizon = problem.target, problem.horizon
        if not isinstance(target, FinitePolicy):
            raise ValueError(
                f"TabularQ sums over a finite action set, but {target!r} has no "
                "probs(observations): use LinearQ"
            )
        states = StateNumbers.of(data.observations)
        state, first = states.numbers(data.observations), states.first
        probs = np.asarray(target.probs(batches.take(data.observations, first)), dtype=np.float64)
        n_states, n_actions = probs.shape
        pair = state * n_actions + choices(data.actions, data.n_steps, n_actions)
        following, known = self._next(data, state, n_states, horizon)
        # a transition is a distinct (s, a, s'); s' = n_states is the end
        codes, number = np.unique(
            pair[known] * (n_states + 1) + following[known], return_inverse=True
        )
        transition = np.full(data.n_steps, -1)
        transition[known] = number.ravel()
        part = fold[data.episode_ids]  # -1 for episodes that every fold learns from
        size = n_states * n_actions
        origin, to = np.divmod(codes, n_states + 1)
        recorded = _Recorded(
            len(data),
            pair,
            transition,
            np.bincount(pair, minlength=size),
            np.bincount(pair[known], minlength=size),
            origin,
            to,
            np.bincount(state[data.offsets[:-1]], minlength=n_states) / len(data),
        )
        seen = _by_fold(pair, part, folds, size, None)
        paid = _by_fold(pair, part, folds, size, data.rewards)
        moved = _by_fold(transition[known], part[known], folds, codes.size, None)
        for k in range(folds):
            process = Process.of(
                codes,
                moved[k],
                seen[k].reshape(n_states, n_actions),
                paid[k].reshape(n_states, n_actions),
                probs,
                problem.gamma,
            )
            share = float(np.mean(fold == k))
            yield TableValues(states, process, horizon if self.time else None, recorded, share)

    def _next(
        self, data: Trajectories, state: IntArray, end: int, horizon: int
    ) -> tuple[IntArray, Any]:
        """Return the next state (S,), or the end, and whether it is known (S,)."""
        following = np.append(state[1:], end)
        last = data.offsets[1:] - 1
        following[last] = end
        known = np.ones(data.n_steps, dtype=np.bool_)
        if self.time:
            known[last] = data.terminated & (data.lengths < horizon)
        return following, known


@dataclass(frozen=True, eq=False)
class _Recorded:
    """All recorded steps, in the numbers of the table; N steps, M distinct transitions.

    Args:
        episodes: how many.
        pair: (N,) state and action of each step, one number.
        transition: (N,) transition of each step, -1 where the next state is not known.
        seen: (S A,) how often each pair was recorded.
        moved: (S A,) how often with a next state that is known.
        origin: (M,) pair from which each transition starts.
        to: (M,) next state of each transition; S is the end.
        start: (S,) share of the episodes that begin in each state.
    """

    episodes: int
    pair: IntArray
    transition: IntArray
    seen: IntArray
    moved: IntArray
    origin: IntArray
    to: IntArray
    start: FloatArray


class TableValues(ActionValues):
    """The fitted q of TabularQ, computed when it is needed: no (T, S, A) array is kept.

    Args:
        states: the numbers of the states.
        process: what was learned.
        horizon: longest possible episode; None for the fixed point.
        recorded: all recorded steps.
        share: share of the episodes that were left out.
    """

    def __init__(
        self,
        states: StateNumbers,
        process: Process,
        horizon: int | None,
        recorded: _Recorded,
        share: float,
    ) -> None:
        self._states, self._process, self._horizon = states, process, horizon
        self._recorded, self._share = recorded, share
        self._fixed = process.q(process.fixed_point()) if horizon is None else None

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        return of_chosen(self.q_all(observations, steps), actions)

    def q_all(self, observations: Tree, steps: IntArray, actions: int = 0) -> FloatArray:
        """Return q (n, A) of every action."""
        state = self._states.numbers(observations)
        values = np.empty((state.size, self._process.probs.shape[1]))
        if self._fixed is not None or self._horizon is None:
            assert self._fixed is not None
            self._put(values, slice(None), state, self._fixed)
            return values
        before = np.maximum(self._horizon - np.asarray(steps), 1) - 1  # steps left afterwards
        order = np.argsort(before, kind="stable")
        longest = int(before.max(initial=0))
        bounds = np.searchsorted(before[order], np.arange(longest + 2))
        for j, v in enumerate(self._process.values(longest + 1)):
            rows = order[bounds[j] : bounds[j + 1]]
            if rows.size:
                self._put(values, rows, state[rows], self._process.q(v))
        return values

    def visits(self, answers: Answers, rows: IntArray) -> Visits:
        """Return for recorded steps the ratio of visits (n,) and the residual at these visits (n,).

        Their product is the influence of the step on the value, see `ope_gym.models.process`. The
        visits of the target are those in the process of the other folds, the recorded ones are
        counted over all folds, so that no step counts more than the target comes by.
        """
        pair, transition = self._recorded.pair[rows], self._recorded.transition[rows]
        ratio, moves = self._ratios
        paid = answers.data.rewards[rows] - self._process.rewards.ravel()[pair]
        influence = ratio[pair] * paid + np.append(moves, 0.0)[transition]  # 0 where it is -1
        unseen = self._process.seen.ravel()[pair] == 0
        influence[unseen & (transition < 0)] = 0.0  # a guess of q that no next state corrects
        residuals = np.divide(
            influence, ratio[pair], out=np.zeros(rows.size), where=ratio[pair] > 0
        )
        # what only this fold has seen corrects the guess of this fold alone, one part of all
        return Visits(np.where(unseen, self._share, 1.0) * ratio[pair], residuals)

    def knows(self, answers: Answers, rows: IntArray) -> Known:
        """Return which actions other folds have seen in the states of recorded steps."""
        known, kept = self._process.seen > 0, self._recorded
        # the visits of a state are spread over its known actions, and once more over the others
        visits = self._ratios[0] * np.maximum(kept.seen, 1)
        spread = known.any(axis=1) + np.where(known, 0.0, self._process.probs).sum(axis=1)
        steps = kept.seen.reshape(known.shape).sum(axis=1)
        ratio = visits.reshape(known.shape).sum(axis=1) / spread / np.maximum(steps, 1)
        state = kept.pair[rows] // known.shape[1]
        return Known(known.T[:, state], ratio[state])

    @cached_property
    def _ratios(self) -> tuple[FloatArray, FloatArray]:
        """Ratios of visits (S A,), and the influence of each transition (M,)."""
        kept = self._recorded
        visits, moves = self._process.visits(kept.start, kept.to, kept.origin, self._horizon)
        ratio = visits * kept.episodes / np.maximum(kept.seen, 1)
        return ratio, moves * kept.episodes / kept.moved[kept.origin]

    def _put(
        self, values: FloatArray, rows: IntArray | slice, state: IntArray, q: FloatArray
    ) -> None:
        values[rows] = np.where(state[:, None] >= 0, q[state], self._process.overall(q))


def _by_fold(
    cell: IntArray, part: IntArray, folds: int, size: int, amounts: FloatArray | None
) -> FloatArray:
    """Return the sums (folds, size) over the steps outside of each fold."""
    whole = np.bincount(cell, amounts, minlength=size).astype(np.float64)
    inside = part >= 0
    own = np.bincount(
        part[inside] * size + cell[inside],
        None if amounts is None else amounts[inside],
        minlength=folds * size,
    )
    return np.asarray(whole - own.reshape(folds, size))


@dataclass(frozen=True, eq=False)
class StateNumbers:
    """Numbers 0, 1, ... of the distinct rows of integer leaves.

    Args:
        low: (c,) least value of each column.
        size: (c,) how many values each column may take.
        codes: (n_states,) sorted, one number a distinct row.
        first: (n_states,) a row of the data in each state.
    """

    low: IntArray
    size: IntArray
    codes: IntArray
    first: IntArray

    @classmethod
    def of(cls, observations: Tree) -> StateNumbers:
        """Number the distinct observations."""
        table = _integers(observations)
        low = table.min(axis=0)
        size = table.max(axis=0) - low + 1
        if np.log2(size.astype(np.float64)).sum() > 62:
            raise ValueError(
                f"observations are {size.size} columns of up to {int(size.max())} values: too many "
                "for a table; use LinearQ"
            )
        codes, first = np.unique(_encode(table, low, size), return_index=True)
        return cls(low, size, codes, first)

    def numbers(self, observations: Tree) -> IntArray:
        """Return the state (n,) of each row, -1 where it was never seen."""
        table = _integers(observations)
        if table.shape[1] != self.low.size:
            raise ValueError(
                f"observations have {table.shape[1]} columns, the model learned {self.low.size}"
            )
        inside = np.all((table >= self.low) & (table < self.low + self.size), axis=1)
        codes = _encode(np.where(inside[:, None], table, self.low), self.low, self.size)
        places = np.minimum(np.searchsorted(self.codes, codes), self.codes.size - 1)
        return np.where(inside & (self.codes[places] == codes), places, -1)


def _integers(observations: Tree) -> IntArray:
    """Return all leaves side by side, (n, c)."""
    n = batches.length(observations)
    columns = [leaf.reshape(n, -1) for leaf in batches.leaves(observations)]
    wrong = [str(leaf.dtype) for leaf in columns if leaf.dtype.kind not in "iub"]
    if wrong:
        raise ValueError(
            f"observations have dtype {wrong[0]}: a table is of whole numbers; use LinearQ, or "
            "round the observations to cells"
        )
    return np.hstack(columns).astype(np.int64)


def _encode(table: IntArray, low: IntArray, size: IntArray) -> IntArray:
    base = np.concatenate([[1], np.cumprod(size[::-1])[:-1]])[::-1]
    return np.asarray((table - low) @ base)
