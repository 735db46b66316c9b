"""Value a policy in an environment learned from the latest steps, and correct that value.

The environment is that of `ope_gym.models.dynamics`: how it moves does not depend on who acts, so
all recent steps count, whichever policy took them. Where states are a few numbers that move
smoothly, this is worth more than all episodes of the training.

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
from ope_gym.models.dynamics import Environment, Played, Steps, learn, sampling
from ope_gym.models.features import Polynomial
from ope_gym.online.advantages import Advantages, timed, timed_sum
from ope_gym.online.stream import Window, blocks
from ope_gym.policies.acting import ActingPolicy

_MOST_FEATURES = 84  # of a polynomial: degree 3 of up to six numbers, degree 2 of up to eleven
_STEPS_PER_FEATURE = 4  # least, for each action
_EPISODES = 100  # played for a value
_VALUED = 8192  # played steps that v is fitted to


def latest_steps(
    columns: Mapping[str, NDArray[Any]],
    n_actions: int,
    bounds: tuple[FloatArray, FloatArray] | None = None,
) -> Steps:
    """Return recorded steps (S, ...) to learn an environment from.

    Args:
        columns: observations, following, actions, rewards, and terminated: the episode ended with
            this step, before its time limit.
        n_actions: how many there are, 0 for real numbers.
        bounds: lowest and highest action, to which the loop clips.
    """
    rows = len(columns["rewards"])
    actions = columns["actions"].reshape(rows, -1)
    if n_actions:
        actions = actions[:, 0].astype(np.int64)
    elif bounds is not None:
        actions = np.clip(actions, *bounds)
    return Steps(
        _numbers(columns["observations"]),
        _numbers(columns["following"]),
        np.ones(rows, dtype=np.bool_),
        actions,
        columns["rewards"],
        columns["terminated"],
        n_actions,
    )


def usable_degree(steps: Steps) -> int:
    """Return the degree of the polynomials to learn, 1 to 3; 0 if there are too few steps."""
    width = steps.width
    degree = max((k for k in (1, 2, 3) if comb(width + k, k) <= _MOST_FEATURES), default=0)
    least = _STEPS_PER_FEATURE * comb(width + degree, degree) * max(steps.n_actions, 1)
    return degree if len(steps.states) >= least else 0


@dataclass(frozen=True, eq=False)
class Simulation:
    """The value of a policy in a learned environment.

    Args:
        environment: what was learned.
        value: mean return of the played episodes.
        noise: its squared error: the episodes are finitely many.
        v: value of states (n, d) at steps (n,).
        n_actions: how many there are, 0 for real numbers.
        horizon: time limit.
        gamma: discount.
        bounds: of the actions.
    """

    environment: Environment
    value: float
    noise: float
    v: Callable[[FloatArray, NDArray[np.int64]], FloatArray]
    n_actions: int
    horizon: int
    gamma: float
    bounds: tuple[FloatArray, FloatArray] | None

    def corrected(self, window: Window) -> Advantages:
        """Return the value with its corrections at each step of a window."""
        names = ("observations", "following", "actions", "rewards", "ended")
        parts = [
            self.wrong({name: getattr(window, name)[part] for name in names}, window.step[part])
            for part in blocks(window.size)
        ]
        wrong = np.concatenate(parts) * self.gamma**window.step
        return Advantages(window, np.stack([wrong, np.zeros_like(wrong)]), self.value)

    def wrong(self, rows: Mapping[str, NDArray[Any]], step: NDArray[np.int64]) -> FloatArray:
        """Return (S,) what the learned environment gets wrong at some steps.

        Args:
            rows: observations, following, actions, rewards and ended, (S, ...) each.
            step: (S,) number of each step in its episode.
        """
        environment = self.environment
        steps = latest_steps({**rows, "terminated": rows["ended"]}, self.n_actions, self.bounds)
        predicted, rewards, end = environment.step(steps.states, steps.actions)
        in_time = step + 1 < self.horizon
        here = np.where(steps.terminated, 0.0, self.v(steps.following, step + 1)) * in_time
        there = (1.0 - end) * self.v(predicted, step + 1) * in_time
        missed = steps.rewards - rewards - environment.terminal_bonus * end
        return np.asarray(missed + self.gamma * (here - there))


def simulate(
    steps: Steps,
    policy: ActingPolicy,
    starts: NDArray[Any],
    *,
    horizon: int,
    gamma: float,
    rng: np.random.Generator,
    bounds: tuple[FloatArray, FloatArray] | None = None,
) -> Simulation | None:
    """Play a policy in the environment learned from steps; None if these are too few."""
    degree = usable_degree(steps)
    if not degree:
        return None
    environment = learn(steps, degree)
    chosen = starts[rng.integers(len(starts), size=_EPISODES)]
    act = sampling(policy, starts, rng, bounds)
    played = environment.play(act, _numbers(chosen), horizon=horizon, gamma=gamma, rng=rng)
    value, noise = played.returns.mean(), played.returns.var(ddof=1) / len(played.returns)
    v = _fit_v(played, horizon, rng)
    return Simulation(
        environment, float(value), float(noise), v, steps.n_actions, horizon, gamma, bounds
    )


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
