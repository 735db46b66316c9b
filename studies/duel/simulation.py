"""Play many duels between two policies from pools of fresh episodes.

A pool stands for the environment: rounds are drawn from it with replacement, so the difference of
the two policies is that of the pool, known exactly. Controls are centred on the pool, where their
mean is 0 but for chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ope_gym import Trajectories, duel
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.inference.sequences import PairedSequence, Prior
from ope_gym.policies import LinearSigmoid, Policy, SoftmaxLinear
from studies.cartpole.simulation import rollouts
from studies.harness.small_grid import Loggers, Regime, table

HORIZON = 100  # of CartPole here
DIRECTION = np.array([0.1, 0.5, 2.0, 2.0])
LEVEL = 0.95


@dataclass(frozen=True)
class Problem:
    """Two policies, recorded episodes, and pools of fresh ones.

    Args:
        name: for the tables.
        data: recorded episodes.
        policies: a and b.
        pools: fresh episodes of a and b, as many of each.
        reward_range: of every reward.
        horizon: time limit.
    """

    name: str
    data: Trajectories
    policies: tuple[Policy, Policy]
    pools: tuple[Trajectories, Trajectories]
    reward_range: tuple[float, float]
    horizon: int


@dataclass(frozen=True)
class Outcome:
    """Hold what some duels came to: (R,) rounds each, and 1, -1 or 0 for a, b and neither."""

    rounds: FloatArray
    winner: FloatArray


def cartpole(
    scales: tuple[float, float], loggers: tuple[float, ...], pool: int, rng: np.random.Generator
) -> Problem:
    """Return stochastic linear policies of CartPole, recorded by others of the same kind."""
    a, b = (LinearSigmoid(scale * DIRECTION) for scale in scales)
    first, *others = (
        rollouts(LinearSigmoid(scale * DIRECTION), 40, HORIZON, rng, held_out=True)
        for scale in loggers
    )
    pools = tuple(rollouts(policy, pool, HORIZON, rng) for policy in (a, b))
    name = f"CartPole, {scales[0]:g} against {scales[1]:g}"
    return Problem(name, first.merge(*others), (a, b), (pools[0], pools[1]), (0.0, 1.0), HORIZON)


def small(
    loggers: Loggers, apart: float, pool: int, rng: np.random.Generator, seed: int
) -> Problem:
    """Return a small MDP: its target against the target with logits that are moved.

    Both play with the same random numbers, as environments with the same seeds do.
    """
    regime = Regime(loggers, "high", 8, 10, 30, seed=seed)
    data, target, _ = regime.simulate(rng)
    logits = np.log(table(target, regime.states))
    q = regime.exact_q(target)[0]
    better = logits + apart * (q - q.mean(axis=1, keepdims=True)) / q.std()
    fresh = Regime(loggers, "high", 8, 1, pool, seed=seed)
    number = int(rng.integers(2**31))
    pools = []
    for row in (better, logits):
        played = fresh._play(row[None], np.random.default_rng(number))
        pools.append(played.recorded(row[None], regime, held_out=True))
    policies = SoftmaxLinear(better.T), SoftmaxLinear(logits.T)
    name = f"small MDP, {loggers} loggers"
    return Problem(name, data, policies, (pools[0], pools[1]), (0.0, 1.0), 8)


def differences(problem: Problem) -> FloatArray:
    """Return (pool,) the differences of rounds in the pool."""
    a, b = problem.pools
    return np.asarray(a.returns() - b.returns())


def duels(problem: Problem, count: int, limit: int, rng: np.random.Generator) -> dict[str, Outcome]:
    """Play duels with and without recorded episodes, on the same rounds."""
    made = duel(
        *problem.policies,
        data=problem.data,
        reward_range=problem.reward_range,
        horizon=problem.horizon,
        limit=limit,
        level=LEVEL,
    )
    raw = differences(problem)
    columns = []
    limits = []
    for control, pool, sign in zip(made._controls, problem.pools, (1.0, -1.0), strict=True):
        if control is not None:
            luck = sign * control.of(pool, rng)
            columns.append(luck - luck.mean())
            limits.append(control.limit + abs(float(luck.mean())))
    controls = np.stack(columns, axis=1) if columns else np.zeros((raw.size, 0))
    drawn = rng.integers(raw.size, size=(limit, count))
    span = problem.horizon * (problem.reward_range[1] - problem.reward_range[0])
    none = np.zeros((raw.size, 0))
    return {
        "without": _played(raw, none, drawn, span, np.zeros(0), None),
        "with": _played(raw, controls, drawn, span, np.array(limits), made.prior),
    }


def _played(
    raw: FloatArray,
    controls: FloatArray,
    drawn: IntArray,
    span: float,
    limits: FloatArray,
    prior: Prior | None,
) -> Outcome:
    """Play duels side by side, each until it is decided."""
    limit, count = drawn.shape
    sequence = PairedSequence(
        span, limits, np.zeros(1), level=LEVEL, limit=limit, prior=prior, runs=count
    )
    rounds, winner = np.full(count, float(limit)), np.zeros(count)
    for t, places in enumerate(drawn):
        sequence.add(raw[places], controls[places])
        new = (winner == 0) & (sequence.above[:, 0] | sequence.below[:, 0])
        winner[new] = np.where(sequence.above[new, 0], 1.0, -1.0)
        rounds[new] = t + 1
        if winner.all():
            break
    return Outcome(rounds, winner)
