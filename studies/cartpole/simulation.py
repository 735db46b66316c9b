"""Simulate CartPole in compiled code: Gymnasium's steps with a linear-sigmoid policy.

The state is float64, the policy sees it as float32. An episode draws four random numbers for its
start and one for each action, in the order in which a loop over the environment would.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ope_gym import Trajectories
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.kernels import compiled
from ope_gym.policies import LinearSigmoid

HORIZON = {"CartPole-v0": 200, "CartPole-v1": 500}

_GRAVITY, _MASS_POLE, _LENGTH, _FORCE, _TAU = 9.8, 0.1, 0.5, 10.0, 0.02
_MASS = _MASS_POLE + 1.0
_MOMENT = _MASS_POLE * _LENGTH
_FALLEN = 12 * 2 * math.pi / 360
_EDGE = 2.4


def rollouts(
    policy: LinearSigmoid,
    episodes: int,
    horizon: int,
    rng: np.random.Generator,
    *,
    held_out: bool = False,
) -> Trajectories:
    """Return episodes of a policy as the recorder would have kept them."""
    states = np.empty((episodes * horizon, 4))
    actions = np.empty(episodes * horizon, dtype=np.int64)
    offsets = np.zeros(episodes + 1, dtype=np.int64)
    terminated = np.empty(episodes, dtype=np.bool_)
    _play(policy.theta, policy.bias, rng, horizon, states, actions, offsets, terminated)
    steps = int(offsets[-1])
    seen, chosen = states[:steps].astype(np.float32), actions[:steps]
    # both can be true: the pole may fall with the last step
    truncated = np.diff(offsets) == horizon
    return Trajectories.from_arrays(
        seen,
        chosen,
        np.ones(steps),
        policy.log_prob(seen, chosen),
        offsets=offsets,
        policies=[policy],
        terminated=terminated,
        truncated=truncated,
        held_out=held_out,
        horizon=horizon,
    )


def mean_return(
    policy: LinearSigmoid, episodes: int, horizon: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the mean return of a policy and its standard error."""
    returns = _returns(policy.theta, policy.bias, rng, horizon, episodes)
    return float(returns.mean()), float(returns.std(ddof=1) / math.sqrt(episodes))


def follow(start: FloatArray, actions: IntArray) -> FloatArray:
    """Return the states (T + 1, 4) after these actions, even after the pole has fallen."""
    states = np.empty((len(actions) + 1, 4))
    states[0] = start
    _follow(states, actions)
    return states


@compiled()
def _step(x: Any, v: Any, angle: Any, spin: Any, action: Any) -> Any:
    """Return the next state."""
    force = _FORCE if action == 1 else -_FORCE
    cos, sin = math.cos(angle), math.sin(angle)
    push = (force + _MOMENT * (spin * spin) * sin) / _MASS
    turn = (_GRAVITY * sin - cos * push) / (
        _LENGTH * (4.0 / 3.0 - _MASS_POLE * (cos * cos) / _MASS)
    )
    pull = push - _MOMENT * turn * cos / _MASS
    return x + _TAU * v, v + _TAU * pull, angle + _TAU * spin, spin + _TAU * turn


@compiled()
def _over(x: Any, angle: Any) -> Any:
    """Return whether the episode has ended."""
    return x < -_EDGE or x > _EDGE or angle < -_FALLEN or angle > _FALLEN


@compiled()
def _draw_start(rng: Any) -> Any:
    """Draw the first state."""
    # in separate statements, so that the order of the draws is certain
    x = -0.05 + 0.1 * rng.random()
    v = -0.05 + 0.1 * rng.random()
    angle = -0.05 + 0.1 * rng.random()
    spin = -0.05 + 0.1 * rng.random()
    return x, v, angle, spin


@compiled()
def _choose(theta: Any, bias: Any, rng: Any, x: Any, v: Any, angle: Any, spin: Any) -> Any:
    """Draw an action of the policy."""
    score = bias + np.float64(np.float32(x)) * theta[0] + np.float64(np.float32(v)) * theta[1]
    score += np.float64(np.float32(angle)) * theta[2] + np.float64(np.float32(spin)) * theta[3]
    return 1 if rng.random() < 1.0 / (1.0 + math.exp(-score)) else 0


@compiled()
def _play(
    theta: Any,
    bias: float,
    rng: Any,
    horizon: int,
    states: Any,
    actions: Any,
    offsets: Any,
    terminated: Any,
) -> None:
    """Play episodes and write them in place; see `rollouts`."""
    row = 0
    for i in range(terminated.size):
        x, v, angle, spin = _draw_start(rng)
        over = False
        start = row
        while not over and row - start < horizon:
            action = _choose(theta, bias, rng, x, v, angle, spin)
            states[row, 0], states[row, 1], states[row, 2], states[row, 3] = x, v, angle, spin
            actions[row] = action
            x, v, angle, spin = _step(x, v, angle, spin, action)
            over = _over(x, angle)
            row += 1
        offsets[i + 1] = row
        terminated[i] = over


@compiled()
def _returns(theta: Any, bias: float, rng: Any, horizon: int, episodes: int) -> Any:
    """Return the lengths of episodes, which are their returns."""
    returns = np.empty(episodes)
    for i in range(episodes):
        x, v, angle, spin = _draw_start(rng)
        over = False
        steps = 0
        while not over and steps < horizon:
            action = _choose(theta, bias, rng, x, v, angle, spin)
            x, v, angle, spin = _step(x, v, angle, spin, action)
            over = _over(x, angle)
            steps += 1
        returns[i] = steps
    return returns


@compiled()
def _follow(states: Any, actions: Any) -> None:
    """Write the states after these actions in place; see `follow`."""
    for t in range(actions.size):
        x, v, angle, spin = _step(
            states[t, 0], states[t, 1], states[t, 2], states[t, 3], actions[t]
        )
        states[t + 1, 0], states[t + 1, 1], states[t + 1, 2], states[t + 1, 3] = x, v, angle, spin
