"""Make gridworlds, and Gymnasium's tabular tasks with the policies of a learner as loggers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray
from studies.outside.finite import Process, Setup, draw, soft_history, softmax

_SIDE = 8
_LIMITS = {"CliffWalking-v1": 100, "FrozenLake8x8-v1": 100, "Taxi-v4": 100}
_EPSILON = (0.6, 0.1)  # exploration of the first and the last policy of a learner
_ENVS, _UPDATES = 128, {"CliffWalking-v1": 600, "FrozenLake8x8-v1": 4000, "Taxi-v4": 5000}


def gridworld(rng: np.random.Generator, loggers: int, *, far: bool, horizon: int) -> Setup:
    """Return an 8 x 8 grid with a cost of 1 a step, six holes (-10) and a goal (+20) in a corner.

    A move goes astray with probability 0.1. The target is soft in the exact values; near loggers
    are about as good, far ones are close to uniform.
    """
    cells = _SIDE * _SIDE
    goal = cells - 1
    inner = np.setdiff1d(np.arange(1, goal), [1, _SIDE, goal - 1, goal - _SIDE])
    holes = rng.choice(inner, 6, replace=False)
    row, column = np.divmod(np.arange(cells), _SIDE)
    reached = np.stack(
        [
            np.clip(row + down, 0, _SIDE - 1) * _SIDE + np.clip(column + right, 0, _SIDE - 1)
            for down, right in ((-1, 0), (0, 1), (1, 0), (0, -1))
        ],
        axis=1,
    )  # (S, A)
    moves = np.broadcast_to(reached[:, None], (cells, 4, 4))
    chances = np.broadcast_to(np.where(np.eye(4), 0.9, 0.1 / 3), (cells, 4, 4))
    fallen = np.isin(moves, holes)
    ends = fallen | (moves == goal)
    rewards = -1.0 - 10.0 * fallen + 20.0 * (moves == goal)
    start = np.zeros(cells)
    start[0] = 1.0
    process = Process(start, chances, moves, rewards, ends, np.arange(cells), horizon)
    q = process.best_q()
    target = q - q.max(axis=1, keepdims=True) + 0.2 * rng.normal(size=q.shape)
    if far:
        played = softmax(0.15 * target + 0.1 * rng.normal(size=(loggers, *q.shape)))
    else:
        played = soft_history(target, loggers, rng, 0.15, least=0.7)
    return Setup(process, played, softmax(target))


def learned(rng: np.random.Generator, loggers: int, *, env: str) -> Setup:
    """Return a tabular task of Gymnasium with loggers from a run of Q-learning.

    Loggers are its policies along the training, the target is the one after it: soft in the learned
    values, and with exploration that falls from 0.6 to 0.1.
    """
    process = _tabular(env)
    tables = q_learning(process, loggers, _UPDATES[env], rng)
    return Setup(process, tables[:-1], tables[-1])


def q_learning(
    process: Process, loggers: int, updates: int, rng: np.random.Generator
) -> FloatArray:
    """Return the policies (K + 1, S, A) of a learner: K along its training, and the last.

    Many copies of the process act at once, and each step updates the value of every pair that was
    visited; where two copies visit one pair, one of them counts. The policies are from the second
    half of the training; of a single logger, from its three quarters.
    """
    shape = process.chances.shape[:2]
    edges, q = process.chances.cumsum(axis=2), np.zeros(shape)
    start = process.start.cumsum()[None]
    state = draw(start, rng.random(_ENVS))
    age = rng.integers(process.horizon, size=_ENVS)
    kept = np.linspace(0.5, 1.0, loggers + 1) if loggers > 1 else np.array([0.75, 1.0])
    keep = set(np.round(kept * updates).astype(int).tolist())
    tables = []
    for update in range(1, updates + 1):
        share = update / updates
        epsilon = _EPSILON[0] + share * (_EPSILON[1] - _EPSILON[0])
        u = rng.random((3, _ENVS))
        action = draw(_soft(q[state], epsilon).cumsum(axis=1), u[0])
        at = state, action, draw(edges[state, action], u[1])
        later = np.where(process.ends[at], 0.0, 0.98 * q[process.moves[at]].max(axis=1))
        rate = 0.5 + share * (0.05 - 0.5)
        q[state, action] += rate * (process.rewards[at] + later - q[state, action])
        age += 1
        over = process.ends[at] | (age >= process.horizon)
        state = np.where(over, draw(start, u[2]), process.moves[at])
        age = np.where(over, 0, age)
        if update in keep:
            tables.append(_soft(q, epsilon))
    return np.stack(tables)


def _soft(q: FloatArray, epsilon: float) -> FloatArray:
    """Return a softmax in values, relative to their usual gaps, mixed with uniform exploration."""
    gap = q - q.max(axis=-1, keepdims=True)
    scale = float(np.median(-gap[gap < 0])) if (gap < 0).any() else 1.0
    return np.asarray((1.0 - epsilon) * softmax(2.0 * gap / scale) + epsilon / q.shape[-1])


@cache
def _tabular(env: str) -> Process:
    """Return a task of Gymnasium with a time limit as a process."""
    import gymnasium

    inside: Any = gymnasium.make(env).unwrapped
    outcomes = max(len(found) for row in inside.P.values() for found in row.values())
    shape = (len(inside.P), len(inside.P[0]), outcomes)
    chances, rewards = np.zeros(shape), np.zeros(shape)
    moves, ends = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for state, row in inside.P.items():
        for action, found in row.items():
            for m, (chance, after, reward, end) in enumerate(found):
                at = state, action, m
                chances[at], moves[at], rewards[at], ends[at] = chance, after, reward, end
    start = np.asarray(inside.initial_state_distrib, dtype=np.float64)
    return Process(start, chances, moves, rewards, ends, np.arange(shape[0]), _LIMITS[env])
