"""Make problems of other kinds: sparse tables, many arms, aliasing, queues, thin support, tails.

Each function draws a process and a target from a generator, and returns them with loggers, as those
of `studies.outside.problems` do. Nothing in the design of `auto` was chosen on the report's seeds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ope_gym.arrays import FloatArray
from studies.outside.finite import Noise, Process, Setup, softmax
from studies.outside.problems import small_mdp


def bandit(
    rng: np.random.Generator,
    loggers: int,
    *,
    contexts: int,
    arms: int,
    explore: float = 1.0,
    greed: float = 1.0,
    noise: Noise = "normal",
) -> Setup:
    """Return one-step problems whose loggers choose evenly, or favour one arm and explore.

    Args:
        rng: draws rewards and policies.
        loggers: their number.
        contexts: observations.
        arms: actions.
        explore: share of the loggers' actions that is even; the rest is an arm of their own.
        greed: how strongly the target prefers good arms.
        noise: of the rewards.
    """
    mean = rng.normal(0.0, 1.0, (contexts, arms)) + rng.normal(0.0, 1.0, (contexts, 1))
    shape = (contexts, arms, 1)
    process = Process(
        rng.dirichlet(np.full(contexts, 3.0)),
        np.ones(shape),
        np.zeros(shape, dtype=np.int64),
        mean[..., None],
        np.ones(shape, dtype=np.bool_),
        np.arange(contexts),
        1,
        noise,
    )
    favourite = rng.integers(arms, size=(loggers, contexts))
    played = np.full((loggers, contexts, arms), explore / arms)
    played += (1.0 - explore) * (favourite[..., None] == np.arange(arms))
    return Setup(process, played, softmax(greed * (mean + 0.5 * rng.normal(size=mean.shape))))


def aliased(rng: np.random.Generator, loggers: int, *, horizon: int, merged: int) -> Setup:
    """Return a random process whose six states show in `merged` observations only."""
    made = small_mdp(rng, loggers, horizon=horizon)
    seen = np.arange(6) % merged
    first = [int(np.flatnonzero(seen == o)[0]) for o in range(merged)]
    process = replace(made.process, seen=seen)
    return Setup(process, made.loggers[:, first], made.target[first])


def queue(
    rng: np.random.Generator, loggers: int, *, horizon: int, room: int = 12, numbers: bool = False
) -> Setup:
    """Return a queue: serving fast costs more, waiting customers cost, a full queue loses some."""
    arrive, fast, slow = rng.uniform(0.45, 0.6), rng.uniform(0.7, 0.9), rng.uniform(0.3, 0.45)
    length = np.arange(room + 1)
    moves = np.stack([np.maximum(length - 1, 0), length, np.minimum(length + 1, room)], axis=1)
    chances = np.empty((room + 1, 2, 3))
    for a, serve in enumerate((slow, fast)):
        serves = np.where(length > 0, serve, 0.0)
        down, up = serves * (1.0 - arrive), (1.0 - serves) * arrive
        chances[:, a] = np.stack([down, 1.0 - down - up, up], axis=1)
    cost = (
        0.1 * length[:, None]
        + np.array([0.0, rng.uniform(0.2, 0.5)])
        + 2.0 * (length == room)[:, None]
    )
    shape = (room + 1, 2, 3)
    start = np.zeros(room + 1)
    start[:4] = 0.25
    process = Process(
        start,
        chances,
        np.broadcast_to(moves[:, None], shape),
        np.broadcast_to(-cost[..., None], shape),
        np.zeros(shape, dtype=np.bool_),
        length,
        horizon,
    )
    turn = rng.uniform(0.3, 0.8) * (length[:, None] - rng.uniform(2, 5)) * [-0.5, 0.5]
    played = np.stack([softmax(share * turn) for share in np.linspace(0.1, 0.8, loggers + 1)[1:]])
    return Setup(process, played, softmax(turn), numbers=numbers)


def inventory(
    rng: np.random.Generator, loggers: int, *, horizon: int, room: int = 10, numbers: bool = False
) -> Setup:
    """Return a store that orders 0, 2 or 4 pieces against a random demand."""
    demand = rng.dirichlet(np.full(5, 2.0))  # of 0 ... 4 pieces
    stock, order = np.arange(room + 1)[:, None, None], np.array([0, 2, 4])[None, :, None]
    held = np.minimum(stock + order, room)
    sold = np.minimum(held, np.arange(5))
    shape = (room + 1, 3, 5)
    price, keep, buy = rng.uniform(2.0, 3.0), 0.1, rng.uniform(0.5, 1.0)
    rewards = price * sold - keep * held - buy * (order + (order > 0)) - 1.0 * (np.arange(5) > sold)
    start = np.zeros(room + 1)
    start[room // 2] = 1.0
    process = Process(
        start,
        np.broadcast_to(demand, shape),
        held - sold,
        np.broadcast_to(rewards, shape),
        np.zeros(shape, dtype=np.bool_),
        np.arange(room + 1),
        horizon,
    )
    likes = 0.8 * (rng.uniform(3, 6) - np.arange(room + 1)[:, None]) * [0.0, 0.4, 0.8]
    played = softmax(0.3 * likes + 0.3 * rng.normal(size=(loggers, *likes.shape)))
    return Setup(process, played, softmax(likes), numbers=numbers)


def bad_logger(rng: np.random.Generator, loggers: int, *, horizon: int, rare: float) -> Setup:
    """Return a random process whose loggers seldom do what the target does most."""
    made = small_mdp(rng, loggers, horizon=horizon, noise="normal")
    best = made.target.argmax(axis=1)[:, None] == np.arange(3)
    base = rng.dirichlet(np.ones(3), (loggers, 6)) * ~best
    base = base / base.sum(axis=2, keepdims=True)
    return Setup(made.process, (1.0 - rare) * base + rare * best, made.target)


def catastrophe(
    rng: np.random.Generator, loggers: int, *, chance: float, horizon: int = 5
) -> Setup:
    """Return a process in which the target's favourite action may, seldom, cost 50 and end it."""
    made = small_mdp(rng, loggers, horizon=horizon)
    p, (states, actions) = made.process, made.target.shape
    shape = (states, actions, states + 1)
    chances, rewards = np.zeros(shape), np.zeros(shape)
    risk = np.where(made.target.argmax(axis=1)[:, None] == np.arange(actions), chance, 0.0)
    chances[..., :-1] = p.chances * (1.0 - risk[..., None])
    chances[..., -1], rewards[..., -1] = risk, -50.0
    rewards[..., :-1] = p.rewards
    moves = np.broadcast_to(np.append(np.arange(states), 0), shape)
    ends = np.broadcast_to(np.arange(states + 1) == states, shape)
    process = replace(p, chances=chances, moves=moves, rewards=rewards, ends=ends)
    return Setup(process, made.loggers, made.target)


def heavy(rng: np.random.Generator, loggers: int, *, noise: Noise) -> Setup:
    """Return a bandit with few arms whose rewards have a heavy tail."""
    made = bandit(rng, loggers, contexts=3, arms=3, noise=noise)
    return replace(made, loggers=_between(made, 0.5))


def _between(setup: Setup, share: float) -> FloatArray:
    """Return loggers moved towards the target by a share."""
    return np.asarray((1.0 - share) * setup.loggers + share * setup.target)
