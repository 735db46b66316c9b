"""Learn how the environment moves from the latest steps, play the policy there, and correct that.

The model of a step is in `ope_gym.models.transitions`. How the environment moves does not depend on
who acts, so all recent steps count, whichever policy took them. Where states are a few numbers that
move smoothly, this is worth more than all episodes of the training.

What the learned environment gets wrong shows in the recorded steps. With v, the value of the policy
there, and hats for what it predicts (the simulation lemma),

    V = V_simulated + E sum_t [r - r_hat + gamma (v(s') - v(s_hat'))]

The bracket compares one recorded step with its prediction, given state and action, so it is right
for steps of any policy, and of those near the one in question the sum is right but for products of
two errors. Where the learned environment is right the sum has no noise; where it is wrong the sum
is large and noisy, and the value counts for little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.models.features import Polynomial
from ope_gym.models.transitions import Steps, TransitionModel, fit_transitions, play
from ope_gym.online.advantages import Advantages, time_left, timed
from ope_gym.online.stream import Window
from ope_gym.policies import FinitePolicy, Policy

_MOST_FEATURES = 84  # of a polynomial: degree 3 of up to six numbers, degree 2 of up to eleven
_EPISODES = 100  # played for a value
_VALUED = 8192  # played steps that v is fitted to
_STEADY = 4096  # steps without an end from which ends are learned

Bounds = tuple[FloatArray, FloatArray]
"""Lowest and highest action, to which the loop clips what a policy says."""


def learn_environment(
    columns: Mapping[str, NDArray[Any]], n_actions: int, bounds: Bounds | None = None
) -> TransitionModel | None:
    """Learn from steps (S, ...); None if states are not a few numbers.

    Args:
        columns: observations, following, actions, rewards, and terminated: the episode ended with
            this step, before its time limit.
        n_actions: how many there are, 0 for real numbers.
        bounds: of the actions.
    """
    rows = len(columns["rewards"])
    if columns["observations"].dtype.kind != "f":
        return None
    states, following, actions = _numbers(columns, n_actions > 0, bounds)
    width = states.shape[1] + (0 if n_actions else actions.shape[1])
    degree = max((k for k in (1, 2, 3) if comb(width + k, k) <= _MOST_FEATURES), default=0)
    if not degree or rows < 4 * comb(width + degree, degree) * max(n_actions, 1):
        return None
    nowhere = np.zeros(rows, dtype=bool)
    steps = Steps(states, actions, columns["rewards"], columns["terminated"], nowhere, following)
    return fit_transitions(steps, n_actions, degree, _STEADY)


def _numbers(
    rows: Mapping[str, NDArray[Any]], finite: bool, bounds: Bounds | None
) -> tuple[FloatArray, FloatArray, NDArray[Any]]:
    """Return states and next states (S, d), and actions, (S,) numbers or (S, m) as executed."""
    count = len(rows["rewards"])
    states, following = (
        rows[name].reshape(count, -1).astype(np.float64) for name in ("observations", "following")
    )
    if finite:
        return states, following, rows["actions"].reshape(count).astype(np.int64)
    actions = rows["actions"].reshape(count, -1)
    return states, following, actions if bounds is None else np.clip(actions, *bounds)


@dataclass(frozen=True, eq=False)
class Simulation:
    """The value of a policy in a learned environment.

    Args:
        model: the learned environment.
        value: mean return of the played episodes.
        noise: its squared error: the episodes are finitely many.
        v: value of states (n, d) at steps (n,).
        horizon: time limit.
        gamma: discount.
        bounds: of the actions.
    """

    model: TransitionModel
    value: float
    noise: float
    v: Callable[[FloatArray, NDArray[np.int64]], FloatArray]
    horizon: int
    gamma: float
    bounds: Bounds | None

    def corrected(self, window: Window) -> Advantages:
        """Return the value with its corrections at each step of a window."""
        wrong = self.wrong(vars(window), window.step) * self.gamma**window.step
        return Advantages(window, np.stack([wrong, np.zeros_like(wrong)]), self.value)

    def wrong(self, rows: Mapping[str, NDArray[Any]], step: NDArray[np.int64]) -> FloatArray:
        """Return (S,) what the learned environment gets wrong at some steps.

        Args:
            rows: observations, following, actions, rewards and ended, (S, ...) each.
            step: (S,) number of each step in its episode.
        """
        states, following, actions = _numbers(rows, self.model.finite, self.bounds)
        predicted, rewards, end = self.model.take(states, actions)
        in_time = step + 1 < self.horizon
        here = np.where(rows["ended"], 0.0, self.v(following, step + 1)) * in_time
        there = (1.0 - end) * self.v(predicted, step + 1) * in_time
        return np.asarray(rows["rewards"] - rewards + self.gamma * (here - there))


def simulate(
    model: TransitionModel,
    policy: Policy,
    starts: NDArray[Any],
    *,
    horizon: int,
    gamma: float,
    rng: np.random.Generator,
    bounds: Bounds | None = None,
) -> Simulation:
    """Play a policy in a learned environment."""
    shape, kind, finite = starts.shape[1:], starts.dtype, isinstance(policy, FinitePolicy)

    def ask(states: FloatArray) -> FloatArray:
        seen = states.astype(kind).reshape(-1, *shape)
        if finite:
            return np.asarray(policy.probs(seen))  # type: ignore[attr-defined]
        actions = np.asarray(policy.sample(seen, rng)).reshape(len(seen), -1)
        return actions if bounds is None else np.clip(actions, *bounds)

    first = starts[rng.integers(len(starts), size=_EPISODES)].reshape(_EPISODES, -1)
    played = play(
        model,
        ask,
        first.astype(np.float64),
        np.zeros(_EPISODES, dtype=np.int64),
        gamma=gamma,
        horizon=horizon,
        rng=rng,
    )
    returns, ahead = np.zeros(_EPISODES), []
    for step in played[::-1]:
        returns[step.who] = step.rewards + gamma * returns[step.who]
        ahead.append(returns[step.who])
    states = np.concatenate([step.states for step in played])
    times = np.concatenate([step.times for step in played])
    v = _fit_v(states, times, np.concatenate(ahead[::-1]), horizon, rng)
    noise = float(returns.var(ddof=1)) / _EPISODES
    return Simulation(model, float(returns.mean()), noise, v, horizon, gamma, bounds)


def _fit_v(
    states: FloatArray,
    times: NDArray[np.int64],
    ahead: FloatArray,
    horizon: int,
    rng: np.random.Generator,
) -> Callable[[FloatArray, NDArray[np.int64]], FloatArray]:
    """Return v(states, step), fitted to what was paid `ahead` of the steps of played episodes."""
    some = rng.integers(len(times), size=min(len(times), _VALUED))
    features = Polynomial(2 if states.shape[1] <= 16 else 1).learn(states)
    phi = timed(features(states[some]), times[some], horizon)
    gram = phi.T @ phi
    gram[np.diag_indices_from(gram)] *= 1.0 + 1e-4
    gram[np.diag_indices_from(gram)] += 1e-9 * np.trace(gram)
    theta = np.linalg.solve(gram, phi.T @ ahead[some])
    low, high = ahead.min(), ahead.max()

    def v(states: FloatArray, step: NDArray[np.int64]) -> FloatArray:
        constant, slope = (features(states) @ theta.reshape(2, -1).T).T
        return np.asarray(np.clip(constant + slope * time_left(step, horizon), low, high))

    return v
