"""Value a policy in an environment learned from the latest steps, and test that value.

The environment is that of `ope_gym.models.dynamics`: how it moves does not depend on who acts, so
all recent steps count, whichever policy took them. Where states are a few numbers that move
smoothly, this is worth more than all episodes of the training.

What it gets wrong shows in the recorded steps. With v, the value of the policy there, and hats for
what it predicts (the simulation lemma),

    V = V_simulated + E sum_t [r - r_hat + gamma (v(s') - v(s_hat'))]

The bracket compares one recorded step with its prediction, given state and action, so it is right
for steps of any policy, and of those near the one in question the sum is right but for products of
two errors. It tells a good environment from a bad one; so does an environment of one degree less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.models.dynamics import Environment, Played, Steps, learn, sampling
from ope_gym.models.features import Polynomial
from ope_gym.online.advantages import Terms, timed, timed_sum
from ope_gym.online.rules import Simulated, Value
from ope_gym.online.stream import Window, blocks
from ope_gym.policies.acting import ActingPolicy, count_actions

_MOST_FEATURES = 84  # of a polynomial: degree 3 of up to six numbers, degree 2 of up to eleven
_STEPS_PER_FEATURE = 4  # least, for each action
_EPISODES = 100  # played for a value: their noise is a tenth of the spread of a return
_VALUED = 8192  # played steps that v is fitted to
_RARE = 1e-3  # share of recorded states on either side that may be there by chance,
_ROOM = 0.05  # and how far beyond the others a state is as good as seen, in their range

Bounds = tuple[FloatArray, FloatArray]


@dataclass(frozen=True)
class Task:
    """Rules of an episode, beside the environment.

    Args:
        horizon: Time limit.
        gamma: Discount.
        bounds: Lowest and highest action, to which the loop clips; None if it does not.
    """

    horizon: int
    gamma: float
    bounds: Bounds | None


def recorded_steps(
    window: Window, rows: slice | NDArray[np.bool_], n_actions: int, task: Task
) -> Steps:
    """Return steps of a window as an environment is learned from them.

    Args:
        window: Recorded steps.
        rows: Those to return.
        n_actions: How many there are, 0 for real numbers, which are clipped as in the loop.
        task: Time limit, at which an episode does not end by itself.
    """
    step, rewards = window.step[rows], window.rewards[rows]
    actions = window.actions[rows].reshape(len(rewards), -1)
    if n_actions:
        actions = actions[:, 0].astype(np.int64)
    elif task.bounds is not None:
        actions = np.clip(actions, *task.bounds)
    return Steps(
        _numbers(window.observations[rows]),
        _numbers(window.following[rows]),
        np.ones(len(rewards), dtype=np.bool_),
        actions,
        rewards,
        window.ended[rows] & (step + 1 < task.horizon),
        n_actions,
    )


def usable_degree(steps: Steps) -> int:
    """Return the degree of the polynomials to learn, 2 or 3; 0 if there are too few steps."""
    width = steps.width
    degree = max((k for k in (2, 3) if comb(width + k, k) <= _MOST_FEATURES), default=0)
    least = _STEPS_PER_FEATURE * comb(width + degree, degree) * max(steps.n_actions, 1)
    return degree if len(steps.states) >= least else 0


@dataclass(frozen=True, eq=False)
class Learned:
    """Two environments learned from the same steps, to play policies in.

    Args:
        environment: The better one.
        rough: One degree less.
        n_actions: How many there are, 0 for real numbers.
        task: Time limit, discount and bounds.
        low: (d,) least state that counts as seen.
        high: (d,) largest.
    """

    environment: Environment
    rough: Environment
    n_actions: int
    task: Task
    low: FloatArray
    high: FloatArray

    @classmethod
    def of(cls, window: Window, clock: int, policy: ActingPolicy, task: Task) -> Learned | None:
        """Learn from the steps of a window; None if these are too few, or observations too large.

        Args:
            window: Recorded steps.
            clock: The first to learn from.
            policy: Any of the loop, for its kind of actions.
            task: Time limit, discount and bounds.
        """
        if not window.observations.size or window.observations.dtype.kind != "f":
            return None
        n_actions = count_actions(policy, window.observations)
        steps = recorded_steps(window, window.clock >= clock, n_actions, task)
        degree = usable_degree(steps)
        if not degree:
            return None
        low, high = np.quantile(steps.states, [_RARE, 1.0 - _RARE], axis=0)
        room = _ROOM * (high - low)
        environment, rough = learn(steps, degree), learn(steps, degree - 1)
        return cls(environment, rough, steps.n_actions, task, low - room, high + room)

    def value(
        self, policy: ActingPolicy, starts: NDArray[Any], rng: np.random.Generator
    ) -> tuple[Simulated, Played]:
        """Return the value of a policy that is not tested yet, and the episodes it played.

        Args:
            policy: The policy to play.
            starts: (m, ...) first observations.
            rng: Source of starts, actions and ends.
        """
        played = self._play(self.environment, policy, starts, rng)
        outside = ((played.states < self.low) | (played.states > self.high)).any(axis=1)
        returns = played.returns
        reach = float(returns.min()), float(returns.max())
        spread, unseen = float(returns.std(ddof=1)), float(outside.mean())
        return Simulated(_mean(played), spread, unseen, reach), played

    def tested(
        self,
        policy: ActingPolicy,
        starts: NDArray[Any],
        correct: Callable[[Terms], Value],
        window: Window,
        rng: np.random.Generator,
    ) -> Simulated:
        """Return the value of a policy, with what tells whether it is right.

        Args:
            policy: The policy to play.
            starts: (m, ...) first observations.
            correct: How the terms of a window become a value.
            window: Recorded steps, to correct by.
            rng: Source of starts, actions and ends.
        """
        simulated, played = self.value(policy, starts, rng)
        rough = _mean(self._play(self.rough, policy, starts, rng))
        wrong = self._corrections(window, _fit_v(played, self.task.horizon, rng))
        corrected = correct(Terms(window, wrong, simulated.raw.mean))
        return replace(simulated, rough=rough, corrected=corrected)

    def _play(
        self,
        environment: Environment,
        policy: ActingPolicy,
        starts: NDArray[Any],
        rng: np.random.Generator,
    ) -> Played:
        task, first = self.task, _numbers(starts[rng.integers(len(starts), size=_EPISODES)])
        act = sampling(policy, starts, rng, task.bounds)
        return environment.play(act, first, horizon=task.horizon, gamma=task.gamma, rng=rng)

    def _corrections(
        self, window: Window, v: Callable[[FloatArray, NDArray[np.int64]], FloatArray]
    ) -> FloatArray:
        """Return (2, S) what the environment gets wrong at each step, discounted, and zeros."""
        wrong, task = np.zeros((2, window.size)), self.task
        for part in blocks(window.size):
            steps = recorded_steps(window, part, self.n_actions, task)
            step, ended = window.step[part], window.ended[part]
            predicted, rewards, end = self.environment.step(steps.states, steps.actions)
            in_time = step + 1 < task.horizon
            here = np.where(ended, 0.0, v(steps.following, step + 1)) * in_time
            there = (1.0 - end) * v(predicted, step + 1) * in_time
            missed = steps.rewards - rewards - self.environment.terminal_bonus * end
            wrong[0, part] = missed + task.gamma * (here - there)
        return wrong * task.gamma**window.step


def _mean(played: Played) -> Value:
    """Return the mean return of played episodes, and its squared error."""
    returns = played.returns
    return Value(float(returns.mean()), float(returns.var(ddof=1) / returns.size))


def _fit_v(
    played: Played, horizon: int, rng: np.random.Generator
) -> Callable[[FloatArray, NDArray[np.int64]], FloatArray]:
    """Return v(states, step), fitted to what the played episodes were paid from each step on."""
    some = rng.integers(played.times.size, size=min(played.times.size, _VALUED))
    features = Polynomial(2 if played.states.shape[1] <= 16 else 1).learn(played.states)
    phi = timed(features(played.states[some]), played.times[some], horizon)
    gram = phi.T @ phi
    gram[np.diag_indices_from(gram)] *= 1.0 + 1e-4
    gram[np.diag_indices_from(gram)] += 1e-9 * np.trace(gram)
    theta = np.asarray(np.linalg.solve(gram, phi.T @ played.ahead[some]), dtype=np.float64)
    low, high = played.ahead.min(), played.ahead.max()

    def v(states: FloatArray, step: NDArray[np.int64]) -> FloatArray:
        return np.asarray(np.clip(timed_sum(features(states), step, horizon, theta), low, high))

    return v


def _numbers(observations: NDArray[Any]) -> FloatArray:
    """Return observations (n, ...) as rows (n, d) of float64."""
    return observations.reshape(len(observations), -1).astype(np.float64)
