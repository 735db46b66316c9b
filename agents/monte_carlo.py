"""Epsilon-greedy every-visit Monte-Carlo control on a table, with the paper's two schedules.

On Blackjack-v1, learning after each episode, the value of the policy falls short of the optimum,
-0.0431, by the numbers below: means over 20 seeds, with standard deviations between seeds of 0.001
to 0.016 (`python -m tests.test_monte_carlo`). The uniform policy falls short by 0.351.

    episodes                  300    1,000    5,000    20,000
    ε¹, greedy policy       0.127    0.100    0.072     0.039
    ε¹, as it acts          0.173    0.146    0.119     0.088
    ε², greedy policy       0.125    0.105    0.064     0.047
    ε², as it acts          0.334    0.293    0.076     0.061
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from agents.contract import refuse_held_out, rewards_to_go
from ope_gym.arrays import FloatArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import EpsilonGreedyTable
from ope_gym.policies.numerics import cells, choices


def epsilon_1(t: int) -> float:
    """Return ε¹_t = 2 / (2 + log t) for the t-th episode, t = 1, 2, … .

    >>> epsilon_1(1), round(epsilon_1(5000), 3)
    (1.0, 0.19)
    """
    return 2.0 / (2.0 + math.log(t))


def epsilon_2(t: int, n_iter: int = 5000) -> float:
    """Return ε²_t = 1 - 0.95 t / n_iter for the t-th episode; it stays at 0.05 after n_iter.

    For another n_iter, pass the agent `functools.partial(epsilon_2, n_iter=…)`.

    >>> epsilon_2(2500), round(epsilon_2(9999), 3)
    (0.525, 0.05)
    """
    return 1.0 - 0.95 * min(t, n_iter) / n_iter


class MonteCarloControl:
    """Acts ε-greedily on Q(s, a), the mean return that followed a in s.

    Ties go to the lowest action, and actions that were never tried have Q = 0. After t - 1
    episodes, in however many calls of `learn`, the policy has the ε of episode t.

    Args:
        dims: Size of the table: the n of each Discrete part of an observation (`table_shape`).
        n_actions: A, the number of actions.
        epsilon: ε as a function of the number of the episode, from 1.
        gamma: Discount of the returns.
    """

    def __init__(
        self,
        dims: Sequence[int],
        n_actions: int,
        *,
        epsilon: Callable[[int], float] = epsilon_1,
        gamma: float = 1.0,
    ) -> None:
        self.dims = tuple(dims)
        self.epsilon = epsilon
        self.gamma = gamma
        self.episodes_seen = 0
        shape = (math.prod(self.dims), n_actions)
        self._totals = np.zeros(shape)
        self._visits = np.zeros(shape, dtype=np.int64)
        self._greedy = np.zeros(shape[0], dtype=np.int64)
        self._policy: EpsilonGreedyTable | None = None

    @property
    def q(self) -> FloatArray:
        """(*dims, A) action values."""
        values = self._totals / np.maximum(self._visits, 1)
        return np.asarray(values.reshape(*self.dims, -1))

    @property
    def policy(self) -> EpsilonGreedyTable:
        """Frozen snapshot that acts in the next episode."""
        if self._policy is None:
            self._policy = EpsilonGreedyTable(
                self._greedy.reshape(self.dims),
                self.epsilon(self.episodes_seen + 1),
                self._totals.shape[1],
            )
        return self._policy

    def learn(self, episodes: Trajectories) -> None:
        """Update Q with every visit of every episode."""
        refuse_held_out(episodes)
        if len(episodes) == 0:
            return
        states = cells(episodes.observations, self.dims)
        actions = choices(episodes.actions, len(states), self._totals.shape[1])
        returns = rewards_to_go(episodes, self.gamma)
        count_visits(self._totals, self._visits, self._greedy, states, actions, returns)
        self.episodes_seen += len(episodes)
        self._policy = None


def count_visits(
    totals: FloatArray,
    visits: NDArray[np.int64],
    greedy: NDArray[np.int64],
    states: NDArray[np.intp],
    actions: NDArray[np.intp],
    returns: FloatArray,
) -> None:
    """Add S visits to the tables of N states, in place, and keep the greedy actions up to date.

    A running average is kept as the sum and the number of visits: with integer rewards it is exact,
    so ties do not depend on the order of episodes or on how they were grouped. The tables of many
    runs can be one table whose states are numbered run · N + state.

    Args:
        totals: (N, A) sums of returns.
        visits: (N, A) numbers of visits.
        greedy: (N,) argmax of totals / visits, the lowest of equals.
        states: (S,) visited states.
        actions: (S,) actions chosen there.
        returns: (S,) returns that followed.
    """
    np.add.at(totals, (states, actions), returns)
    np.add.at(visits, (states, actions), 1)
    greedy[states] = (totals[states] / np.maximum(visits[states], 1)).argmax(axis=1)


def table_shape(space: gym.Space[Any]) -> tuple[int, ...] | None:
    """Return the size of a table over observations that count from 0; None if there can be none.

    They are Discrete, MultiDiscrete of one axis, or a Tuple of Discrete.

    >>> table_shape(gym.spaces.Tuple([gym.spaces.Discrete(32), gym.spaces.Discrete(11)]))
    (32, 11)
    """
    if isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return None if space.start.any() else tuple(space.nvec.tolist())
    parts = space.spaces if isinstance(space, gym.spaces.Tuple) else (space,)
    sizes = [int(p.n) for p in parts if isinstance(p, gym.spaces.Discrete) and p.start == 0]
    return tuple(sizes) if len(sizes) == len(parts) > 0 else None
