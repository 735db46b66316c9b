"""Play many duels between two policies from pools of fresh episodes.

A pool holds pairs of episodes, of a and b with the same random numbers. Duels draw pairs from it,
and use one of the two where one is played alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ope_gym import Trajectories
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.inference.rounds import Rounds
from ope_gym.inference.sequences import Assumed
from ope_gym.kernels import compiled
from ope_gym.policies import LinearSigmoid, Policy, SoftmaxLinear
from studies.cartpole.simulation import _over, _step
from studies.harness.small_grid import Regime, table

HORIZON = 100  # of CartPole here
DIRECTION = np.array([0.1, 0.5, 2.0, 2.0])
LEVEL = 0.95


@dataclass(frozen=True)
class Problem:
    """Two policies and pools of fresh episodes.

    Args:
        policies: a and b.
        pools: fresh episodes of a and b, as many of each.
        reward_range: of every reward.
        horizon: time limit.
    """

    policies: tuple[Policy, Policy]
    pools: tuple[Trajectories, Trajectories]
    reward_range: tuple[float, float]
    horizon: int


@dataclass(frozen=True)
class Outcome:
    """Hold what some duels came to: (R,) episodes each, and 1, -1 or 0 for a, b and neither."""

    episodes: FloatArray
    winner: FloatArray


def cartpole(a: LinearSigmoid, b: LinearSigmoid, pool: int, rng: np.random.Generator) -> Problem:
    """Return stochastic linear policies of CartPole."""
    uniforms = rng.random((pool, 4 + HORIZON))
    pools = tuple(paired(policy, uniforms) for policy in (a, b))
    return Problem((a, b), (pools[0], pools[1]), (0.0, 1.0), HORIZON)


def paired(policy: LinearSigmoid, uniforms: FloatArray) -> Trajectories:
    """Return CartPole episodes played with given random numbers (n, 4 + T)."""
    n, horizon = uniforms.shape[0], uniforms.shape[1] - 4
    states = np.empty((n * horizon, 4))
    actions = np.empty(n * horizon, dtype=np.int64)
    offsets = np.zeros(n + 1, dtype=np.int64)
    _paired(policy.theta, policy.bias, uniforms, states, actions, offsets)
    steps = int(offsets[-1])
    seen, chosen = states[:steps].astype(np.float32), actions[:steps]
    return Trajectories.from_arrays(
        seen,
        chosen,
        np.ones(steps),
        policy.log_prob(seen, chosen),
        offsets=offsets,
        policies=[policy],
        terminated=np.diff(offsets) < horizon,
        truncated=np.diff(offsets) == horizon,
        horizon=horizon,
    )


@compiled()
def _paired(
    theta: Any, bias: float, uniforms: Any, states: Any, actions: Any, offsets: Any
) -> None:
    """Write episodes in place: four random numbers for the start, one for each action."""
    row = 0
    for i in range(len(uniforms)):
        u = uniforms[i]
        x, v, angle, spin = -0.05 + 0.1 * u[:4]
        over = False
        for t in range(u.size - 4):
            if over:
                break
            states[row, 0], states[row, 1], states[row, 2], states[row, 3] = x, v, angle, spin
            score = bias
            for k in range(4):
                score += np.float64(np.float32(states[row, k])) * theta[k]
            actions[row] = 1 if u[4 + t] < 1.0 / (1.0 + np.exp(-score)) else 0
            x, v, angle, spin = _step(x, v, angle, spin, actions[row])
            over = _over(x, angle)
            row += 1
        offsets[i + 1] = row


def small(apart: float, pool: int, rng: np.random.Generator, seed: int) -> Problem:
    """Return a small MDP: its target against the target with logits that are moved.

    Both play with the same random numbers, as environments with the same seeds do. With `apart` 0
    the logits are moved in such a way that both have the same value.
    """
    regime = Regime("similar", "high", 8, 10, 30, seed=seed)
    _, target, _ = regime.simulate(rng)
    logits = np.log(table(target, regime.states))
    q = regime.exact_q(target)[0]
    towards = (q - q.mean(axis=1, keepdims=True)) / q.std()
    other = logits + apart * towards
    if not apart:
        other = _equal(regime, target, logits + 0.5 * rng.normal(size=logits.shape), towards)
    fresh = Regime("similar", "high", 8, 1, pool, seed=seed)
    number = int(rng.integers(2**31))
    pools = []
    for row in (other, logits):
        played = fresh._play(row[None], np.random.default_rng(number))
        pools.append(played.recorded(row[None], regime, held_out=True))
    policies = SoftmaxLinear(other.T), SoftmaxLinear(logits.T)
    return Problem(policies, (pools[0], pools[1]), (0.0, 1.0), 8)


def _equal(
    regime: Regime, target: SoftmaxLinear, logits: FloatArray, towards: FloatArray
) -> FloatArray:
    """Return logits moved along a direction until they are worth what the target is."""
    wanted = regime.value(target)
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        better = regime.value(SoftmaxLinear((logits + middle * towards).T)) > wanted
        low, high = (low, middle) if better else (middle, high)
    return logits + low * towards


def differences(problem: Problem) -> FloatArray:
    """Return (pool,) the differences of pairs in the pool."""
    a, b = problem.pools
    return np.asarray(a.returns() - b.returns())


KINDS = ("pairs", "duel")


def duels(problem: Problem, count: int, limit: int, rng: np.random.Generator) -> list[Outcome]:
    """Play duels on the same episodes: pairs only, and freely."""
    low, high = (problem.horizon * end for end in problem.reward_range)
    played = np.stack([pool.returns() for pool in problem.pools], axis=1), log_ratios(problem)
    drawn = drawn_places(len(played[0]), (2 * limit, count), rng)
    lots = rng.random(drawn.shape)
    outcomes = []
    for kind in KINDS:
        rounds = Rounds(
            Assumed((low, high)),
            np.zeros(1),
            level=LEVEL,
            limit=limit,
            runs=count,
            pairs=kind == "pairs",
        )
        outcomes.append(play(rounds, played, drawn, lots, limit))
    return outcomes


def drawn_places(pool: int, shape: tuple[int, int], rng: np.random.Generator) -> IntArray:
    """Return places in a pool: each at most once if it is large enough."""
    size = shape[0] * shape[1]
    if pool < size:
        return rng.integers(pool, size=shape)
    return rng.permutation(pool)[:size].reshape(shape)


def log_ratios(problem: Problem) -> FloatArray:
    """Return (pool, 2) log p_a - log p_b of the fresh episodes."""
    a, b = problem.policies
    columns = []
    for pool in problem.pools:
        seen = pool.observations, pool.actions
        apart = a.log_prob(*seen) - b.log_prob(*seen)
        columns.append(np.add.reduceat(apart, pool.offsets[:-1]))
    return np.stack(columns, axis=1)


def oracle(problem: Problem) -> float:
    """Return the episodes that the best bet needs, pairs or single ones, of one who knows all.

    It knows the better policy and the distribution of x: log(1 / alpha) over the largest expected
    growth for each episode.
    """
    low, high = (problem.horizon * end for end in problem.reward_range)
    apart = np.stack([pool.returns() for pool in problem.pools], axis=1)
    sign = np.sign(differences(problem).mean())
    single = 2 * np.tanh(log_ratios(problem) / 2) * (apart - (low + high) / 2)
    bets = np.linspace(0.0, 1.0, 41)[1:-1, None] / (high - low)
    growths = [
        np.log1p(bets * sign * x.ravel()).mean(axis=1).max() / played
        for x, played in ((differences(problem), 2), (single, 1))
    ]
    return float(-np.log(1.0 - LEVEL) / max(growths))


def play(
    rounds: Rounds,
    played: tuple[FloatArray, FloatArray],
    drawn: IntArray,
    lots: FloatArray,
    limit: int,
) -> Outcome:
    """Play duels side by side, each until it is decided.

    Args:
        rounds: the duels.
        played: returns and log ratios of the pairs of a pool.
        drawn: (rounds, duels) places in the pool.
        lots: (rounds, duels) uniform numbers that say who plays alone.
        limit: most pairs.
    """
    count = drawn.shape[1]
    episodes, winner = np.full(count, 2.0 * limit), np.zeros(count)
    wealth = rounds.wealth
    for places, lot in zip(drawn, lots, strict=True):
        plan = rounds.plan()
        who = (lot >= plan.share).astype(np.int64)
        rounds.add(plan, who, *(column[places] for column in played))
        ended = (winner == 0) & (wealth.above[:, 0] | wealth.below[:, 0])
        ended &= rounds.episodes <= 2 * limit
        winner[ended] = np.where(wealth.above[ended, 0], 1.0, -1.0)
        episodes[ended] = rounds.episodes[ended]
        if np.all((winner != 0) | (rounds.episodes >= 2 * limit)):
            break
    return Outcome(episodes, winner)
