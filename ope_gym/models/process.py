"""The empirical decision process: counts of a table, the target's values in it, and its visits.

Values run backward, with j steps left:

    q_j(s, a) = r(s, a) + gamma sum_s' p(s'|s, a) v_{j-1}(s'),   v_j(s) = sum_a pi(a|s) q_j(s, a)

Visits run forward: x_t(s) is the probability that the target is in s at step t. The two are dual:
a small error of r or p at (s, a) changes the value at the start by that error times the number of
times that the target comes by. So what a recorded step says beyond the table,

    c = 1 / d(s, a) sum_t gamma^t x_t(s) pi(a|s) [r + gamma v_{T-t-1}(s') - q_{T-t}(s, a)]

with d(s, a) the mean number of recorded visits in an episode, is the step's influence on the value.
Every recorded step speaks for all times t, because the process is the same at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray

_GONE = 1e-15  # probability that an episode still runs, not worth a step
_STILL = 1e-14  # relative change of a backup below which the values have converged


@dataclass(frozen=True, eq=False)
class Process:
    """The empirical process; S states, A actions.

    An action never seen in a state is given the mean of those seen there, a state never seen the
    mean of all recorded steps; the same for next states, which truncated steps do not show.

    Args:
        rewards: (S, A) mean rewards.
        moves: sparse (S A, S), frequencies of the next states; an end is no state.
        moved: (S, A) steps after which the next state, or the end, is known.
        seen: (S, A) steps.
        probs: (S, A) of the target.
        gamma: discount.
    """

    rewards: FloatArray
    moves: Any
    moved: FloatArray
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
    ) -> Process:
        """Make the process from counts.

        Args:
            codes: (M,) distinct transitions, pair (S + 1) + next state, S for the end.
            moved: (M,) how often each was seen.
            seen: (S, A) steps.
            paid: (S, A) sums of rewards.
            probs: (S, A) of the target.
            gamma: discount.
        """
        from scipy.sparse import csr_matrix

        n_states = probs.shape[0]
        pair, to = codes // (n_states + 1), codes % (n_states + 1)
        total: FloatArray = np.bincount(pair, moved, minlength=seen.size).astype(np.float64)
        inside = (to < n_states) & (moved > 0)
        share = moved[inside] / total[pair[inside]]
        moves = csr_matrix((share, (pair[inside], to[inside])), shape=(seen.size, n_states))
        return cls(paid / np.maximum(seen, 1), moves, total.reshape(seen.shape), seen, probs, gamma)

    @cached_property
    def shares(self) -> tuple[FloatArray, FloatArray]:
        """Return the weights (S, A) of each action's reward and next state in a state's value.

        They are the target's probabilities, with those of actions never seen (or never followed by
        a known state) spread evenly over the others; 0 in a state where there are no others.
        """
        paid = _spread(self.probs, self.seen > 0)
        return paid, _spread(paid, self.moved > 0)

    @cached_property
    def _policy_moves(self) -> Any:
        """Sparse (S, S): where the target goes from each state."""
        from scipy.sparse import csr_matrix

        share = self.shares[1]
        states = np.repeat(np.arange(len(share)), share.shape[1])
        mix = csr_matrix((share.ravel(), (states, np.arange(share.size))), (len(share), share.size))
        return csr_matrix(mix @ self.moves)

    @cached_property
    def _unknown(self) -> tuple[Any, Any]:
        """States without a recorded step (S,), and those without a known next state."""
        return self.seen.sum(axis=1) == 0, self.moved.sum(axis=1) == 0

    def q(self, v: FloatArray) -> FloatArray:
        """Return q (S, A) from the values (S,) with one step less to go."""
        ahead = _fill((self.moves @ v).reshape(self.seen.shape), self.moved)
        return _fill(np.asarray(self.rewards + self.gamma * ahead), self.seen)

    def backup(self, v: FloatArray) -> FloatArray:
        """Return v (S,) with one step more to go: the mean of `q` over the target's actions."""
        unseen, stuck = self._unknown
        if unseen.any() or stuck.any():
            return np.asarray(np.einsum("sa,sa->s", self.probs, self.q(v)))
        paid = self.shares[0]
        return np.asarray(
            np.einsum("sa,sa->s", paid, self.rewards) + self.gamma * (self._policy_moves @ v)
        )

    def overall(self, q: FloatArray) -> float:
        """Return the mean of q over the recorded steps."""
        return float(np.sum(self.seen * q) / max(self.seen.sum(), 1.0))

    def values(self, horizon: int) -> list[FloatArray]:
        """Return v_0 … v_{horizon - 1}, by the number of steps left.

        Where they converge, all longer horizons share the last of them.
        """
        values = [np.zeros(len(self.seen))]
        while len(values) < horizon:
            values.append(self.backup(values[-1]))
            change = np.max(np.abs(values[-1] - values[-2]))
            if change <= _STILL * np.max(np.abs(values[-1])):
                values += [values[-1]] * (horizon - len(values))
        return values

    def fixed_point(self) -> FloatArray:
        """Solve v = r + gamma P v, (S,).

        A state whose target actions lead nowhere but in a circle, without discount, has none.
        """
        v = self._solve(np.einsum("sa,sa->s", self.shares[0], self.rewards))
        if not np.all(np.isfinite(v)):
            raise ValueError(
                "TabularQ(time=False): some states never reach an end under the target, so that "
                f"with gamma={self.gamma} their values do not exist: use time=True"
            )
        return self.backup(v)  # the same, but in states never seen, of which it says nothing

    def visits(
        self, start: FloatArray, to: IntArray, pair: IntArray, horizon: int | None
    ) -> tuple[FloatArray, FloatArray]:
        """Return the visits (S A,) of the target, and what it makes of each transition (M,).

            visits    sum_t gamma^t x_t(s) pi(a|s)
            moves     sum_t gamma^(t+1) x_t(s) pi(a|s) [v(s') - sum_s' p(s'|s, a) v(s')],
                      v with T - t - 1 steps left

        For an action that this process has never seen in the state, q takes the place of the sum:
        it is a guess, which such a transition corrects.

        Args:
            start: (S,) distribution of the first state.
            to: (M,) next states of the transitions, S for the end.
            pair: (M,) states and actions that they start from.
            horizon: T; None for the fixed point.
        """
        paid, share = (weights.ravel().copy() for weights in self.shares)
        unseen = self.seen.ravel() == 0
        paid[unseen], share[unseen] = self.probs.ravel()[unseen], self.probs.ravel()[unseen]
        guessed = bool(unseen[pair].any())
        actions = self.seen.shape[1]
        if horizon is None:
            x, v = self._solve(start, transposed=True), self.fixed_point()
            steps = iter([(x, v)])
        else:
            steps = self._forward(start, horizon)
        total, moves = np.zeros(len(start)), np.zeros(to.size)
        mean, guess = np.zeros(paid.size), np.zeros(paid.size)
        discount = 1.0
        for x, v in steps:
            total += discount * x
            after = np.append(v, 0.0)
            if guessed:
                guess += np.repeat(discount * x, actions) * self.q(v).ravel()
            discount *= self.gamma
            moves += (discount * x)[pair // actions] * after[to]
            mean += np.repeat(discount * x, actions) * (self.moves @ v)
        mean = np.where(unseen, guess, mean)
        return np.repeat(total, actions) * paid, share[pair] * (moves - mean[pair])

    def _forward(self, start: FloatArray, horizon: int) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Yield for t = 0, 1, ... where the target is (S,), and the values one step later (S,)."""
        x, along = start, self._policy_moves.T.tocsr()
        for v in reversed(self.values(horizon)):
            yield x, v
            x = along @ x
            if not x.sum() > _GONE:
                return  # all episodes have ended

    def _solve(self, right: FloatArray, transposed: bool = False) -> FloatArray:
        """Solve (I - gamma P) y = right, or with the transposed matrix."""
        import warnings

        from scipy.sparse import identity
        from scipy.sparse.linalg import MatrixRankWarning, spsolve

        system = identity(right.size) - self.gamma * self._policy_moves
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MatrixRankWarning)
            return np.asarray(spsolve((system.T if transposed else system).tocsc(), right))


def _spread(probs: FloatArray, known: Any) -> FloatArray:
    """Spread the probabilities (S, A) of what is not known evenly over what is."""
    spare = np.where(known, 0.0, probs).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return np.where(known, probs + spare[:, None], 0.0)


def _fill(values: FloatArray, seen: FloatArray) -> FloatArray:
    """Return values (S, A) where `seen`; elsewhere the mean of those in the state, or of all."""
    known = seen > 0
    count = known.sum(axis=1)
    mean = np.where(known, values, 0.0).sum(axis=1) / np.maximum(count, 1)
    mean[count == 0] = float(np.sum(seen * values) / max(seen.sum(), 1.0))
    return np.where(known, values, mean[:, None])
