"""TabularQ: the target's values in the empirical decision process, for finite observations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import Problem, checked_fold, of_chosen
from ope_gym.policies import FinitePolicy
from ope_gym.policies.numerics import choices

_STILL = 1e-14  # relative change of a sweep below which backward induction has converged


@dataclass(frozen=True)
class TabularQ:
    """Fitted Q evaluation in closed form, from counts.

        q_1 = r(s, a),   q_{j+1} = r(s, a) + gamma sum_s' p(s'|s, a) sum_a' pi(a'|s') q_j(s', a')

    with the mean rewards r and the frequencies p of the next states. q(s, a, t) is q_j with
    j = horizon - t steps left: backward induction, exact for problems that a time limit ends. A
    step at the time limit, or one that was truncated, does not show the next state and is left
    out of p. With `time=False` q is the fixed point, the same at all steps; there every episode
    that stopped counts as an end, for without ends and discount the fixed point does not exist.

    An action never seen in a state is given the mean of the actions seen there, a state never seen
    the mean of all recorded steps.

    Cost: one pass over the steps for all folds, then O(horizon × distinct transitions).
    Use it where observations are whole numbers (Discrete, MultiDiscrete, tuples and dicts of them)
    and states come again. Weakness: it does not generalise; where most states are seen once, use
    LinearQ.

    Args:
        time: whether q depends on the steps that are left.
    """

    time: bool = True

    def fit(self, data: Trajectories, problem: Problem) -> TableValues:
        """Return the values learned from all episodes; nothing is drawn at random."""
        nowhere = np.full(len(data), -1)
        (values,) = self._fit(data, nowhere, 1, problem)
        return values

    def fit_folds(
        self, data: Trajectories, fold: IntArray, problem: Problem
    ) -> Iterator[TableValues]:
        """Yield for each fold the values learned from the others: all counts less its own."""
        fold = checked_fold(fold, len(data))
        return self._fit(data, fold, int(fold.max()) + 1, problem)

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
        codes, transition = np.unique(
            pair[known] * (n_states + 1) + following[known], return_inverse=True
        )
        part = fold[data.episode_ids]  # -1 for episodes that every fold learns from
        size = n_states * n_actions
        seen = _by_fold(pair, part, folds, size, None)
        paid = _by_fold(pair, part, folds, size, data.rewards)
        moved = _by_fold(transition.ravel(), part[known], folds, codes.size, None)
        for k in range(folds):
            model = _Model.of(
                codes,
                moved[k],
                seen[k].reshape(n_states, n_actions),
                paid[k].reshape(n_states, n_actions),
                probs,
                problem.gamma,
            )
            yield TableValues(states, model, horizon if self.time else None)

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
class _Model:
    """The empirical decision process: mean rewards (S, A) and a sparse (S A, S) of next states."""

    rewards: FloatArray
    moves: Any
    moved: FloatArray  # (S, A) steps after which the next state, or the end, is known
    seen: FloatArray
    probs: FloatArray
    gamma: float

    @classmethod
    def of(
        cls,
        codes: IntArray,
        moved: FloatArray,
        seen: FloatArray,
        paid: FloatArray,
        probs: FloatArray,
        gamma: float,
    ) -> _Model:
        from scipy.sparse import csr_matrix

        n_states = probs.shape[0]
        pair, to = codes // (n_states + 1), codes % (n_states + 1)
        total: FloatArray = np.bincount(pair, moved, minlength=seen.size).astype(np.float64)
        inside = (to < n_states) & (moved > 0)
        share = moved[inside] / total[pair[inside]]
        moves = csr_matrix((share, (pair[inside], to[inside])), shape=(seen.size, n_states))
        return cls(paid / np.maximum(seen, 1), moves, total.reshape(seen.shape), seen, probs, gamma)

    def backup(self, q: FloatArray) -> FloatArray:
        """Return q (S, A) for one step more to go."""
        v = np.einsum("sa,sa->s", self.probs, q)
        ahead = _fill((self.moves @ v).reshape(q.shape), self.moved)  # truncated steps
        return self.filled(np.asarray(self.rewards + self.gamma * ahead))

    def overall(self, q: FloatArray) -> float:
        """Return the mean of q over the recorded steps."""
        return float(np.sum(self.seen * q) / max(self.seen.sum(), 1.0))

    def filled(self, q: FloatArray) -> FloatArray:
        """Give actions never seen in a state the mean of those seen there."""
        return _fill(q, self.seen)

    def fixed_point(self) -> FloatArray:
        """Solve q = r + gamma P_pi q, (S, A), the mean of seen actions standing for unseen ones.

        A state whose target actions lead nowhere but in a circle, without discount, has none.
        """
        from scipy.sparse import csr_matrix, diags, identity
        from scipy.sparse.linalg import MatrixRankWarning, spsolve

        n_states, n_actions = self.probs.shape
        known = self.seen > 0
        count = np.maximum(known.sum(axis=1), 1)
        # the weight of each seen action in the state's value: its own probability, and an equal
        # share of the probability of the unseen ones, whose value is the mean of the seen ones
        spare = np.where(known, 0.0, self.probs).sum(axis=1) / count
        part = np.where(known, self.probs + spare[:, None], 0.0)
        rows = np.repeat(np.arange(n_states), n_actions)
        mix = csr_matrix((part.ravel(), (rows, np.arange(part.size))), (n_states, part.size))
        visited = diags(known.any(axis=1).astype(np.float64))
        system = identity(n_states) - self.gamma * (visited @ mix @ self.moves)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MatrixRankWarning)
            v = np.asarray(spsolve(system.tocsc(), np.sum(part * self.rewards, axis=1)))
        if not np.all(np.isfinite(v)):
            raise ValueError(
                "TabularQ(time=False): some states never reach an end under the target, so that "
                f"with gamma={self.gamma} their values do not exist: use time=True"
            )
        ahead = (self.moves @ v).reshape(self.rewards.shape)
        return self.filled(np.asarray(self.rewards + self.gamma * ahead))


class TableValues:
    """The fitted q of TabularQ, computed when it is needed: no (T, S, A) array is kept."""

    def __init__(self, states: StateNumbers, model: _Model, horizon: int | None) -> None:
        self._states, self._model, self._horizon = states, model, horizon
        self._fixed = model.fixed_point() if horizon is None else None

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        return of_chosen(self.q_all(observations, steps), actions)

    def q_all(self, observations: Tree, steps: IntArray) -> FloatArray:
        """Return q (n, A) of every action."""
        state = self._states.numbers(observations)
        found = np.empty((state.size, self._model.probs.shape[1]))
        if self._fixed is not None or self._horizon is None:
            assert self._fixed is not None
            self._put(found, slice(None), state, self._fixed)
            return found
        left = np.maximum(self._horizon - np.asarray(steps), 1)
        order = np.argsort(left, kind="stable")
        longest = int(left.max(initial=0))
        bounds = np.searchsorted(left[order], np.arange(longest + 2))
        q = np.zeros_like(self._model.rewards)
        for j in range(1, longest + 1):
            before, q = q, self._model.backup(q)
            rows = order[bounds[j] : bounds[j + 1]]
            if np.max(np.abs(q - before)) <= _STILL * np.max(np.abs(q)):
                rows = order[bounds[j] :]  # converged: all longer horizons have these values
                self._put(found, rows, state[rows], q)
                break
            self._put(found, rows, state[rows], q)
        return found

    def _put(
        self, found: FloatArray, rows: IntArray | slice, state: IntArray, q: FloatArray
    ) -> None:
        found[rows] = np.where(state[:, None] >= 0, q[state], self._model.overall(q))


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


def _fill(values: FloatArray, seen: FloatArray) -> FloatArray:
    """Return values (S, A) where `seen`; elsewhere the mean of those in the state, or of all."""
    known = seen > 0
    count = known.sum(axis=1)
    mean = np.where(known, values, 0.0).sum(axis=1) / np.maximum(count, 1)
    mean[count == 0] = float(np.sum(seen * values) / max(seen.sum(), 1.0))
    return np.where(known, values, mean[:, None])


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
        found = np.minimum(np.searchsorted(self.codes, codes), self.codes.size - 1)
        return np.where(inside & (self.codes[found] == codes), found, -1)


def _integers(observations: Tree) -> IntArray:
    """Return all leaves side by side, (n, c)."""
    n = batches.length(observations)
    found = [leaf.reshape(n, -1) for leaf in batches.leaves(observations)]
    wrong = [str(leaf.dtype) for leaf in found if leaf.dtype.kind not in "iub"]
    if wrong:
        raise ValueError(
            f"observations have dtype {wrong[0]}: a table is of whole numbers; use LinearQ, or "
            "round the observations to cells"
        )
    return np.hstack(found).astype(np.int64)


def _encode(table: IntArray, low: IntArray, size: IntArray) -> IntArray:
    base = np.concatenate([[1], np.cumprod(size[::-1])[:-1]])[::-1]
    return np.asarray((table - low) @ base)
