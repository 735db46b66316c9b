"""Simulate a grid of small MDPs with four kinds of behaviour policies and exact values.

    for regime in grid():
        data, target, truth = regime.simulate(np.random.default_rng(0))

The MDP, the behaviour policies ("loggers") and the target belong to the regime; only the episodes
are drawn. Observations are one-hot rows, rewards lie within [0, 1], gamma is 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ope_gym import Trajectories
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.policies import SoftmaxLinear

Loggers: TypeAlias = Literal["drifting", "similar", "unrelated", "one good"]
Noise: TypeAlias = Literal["low", "high"]
Source: TypeAlias = Literal["held-out", "adaptive", "in-sample"]

LOGGERS: tuple[Loggers, ...] = get_args(Loggers)
NOISES: tuple[Noise, ...] = get_args(Noise)
SOURCES: tuple[Source, ...] = get_args(Source)
HORIZONS = (1, 3, 8, 20, 50)
_SIZES = ((10, 30), (4, 50), (20, 10), (3, 100))  # policies, episodes of each
_FEW = (3, 12)
_STEP = 1.0  # how far a policy moves when it learns from a batch, as distances of `Regime`


@dataclass(frozen=True)
class World:
    """A finite MDP with S states and A actions; episodes may end before the horizon.

    Args:
        start: (S,) distribution of the first state.
        moves: (S, A, S) distribution of the next state if the episode goes on.
        ends: (S, A) probability that the episode ends after the action.
        means: (S, A) mean rewards.
    """

    start: FloatArray
    moves: FloatArray
    ends: FloatArray
    means: FloatArray


@dataclass(frozen=True)
class Regime:
    """One cell of the grid.

    The distance between policies is the root mean square difference of their logits times the
    square root of the horizon: equal distances spread weights about equally at every horizon.

    Args:
        loggers: "drifting" (a learner that approaches the target), "similar" (all near it),
            "unrelated" (all far, each in its own direction), "one good" (one near, the others very
            far).
        noise: of the rewards, "low" (within 0.1 of their mean) or "high" (0 or 1).
        horizon: length of the longest episode.
        policies: number of loggers.
        per_policy: episodes of each logger.
        states: number of states.
        actions: number of actions.
        seed: of the MDP and the policies.
    """

    loggers: Loggers
    noise: Noise
    horizon: int
    policies: int = 10
    per_policy: int = 30
    states: int = 4
    actions: int = 3
    seed: int = 0

    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    @property
    def name(self) -> str:
        """Return a name such as "drifting, low noise, horizon 8, 10 x 30"."""
        size = f"{self.policies} x {self.per_policy}"
        return f"{self.loggers}, {self.noise} noise, horizon {self.horizon}, {size}"

    @property
    def world(self) -> World:
        """Return the MDP."""
        return _made(self)[0]

    @property
    def target(self) -> SoftmaxLinear:
        """Return the policy to evaluate; "in-sample" data change it."""
        return as_policy(_made(self)[2])

    def simulate(
        self, rng: np.random.Generator, source: Source = "held-out"
    ) -> tuple[Trajectories, SoftmaxLinear, float]:
        """Return episodes of all loggers, the target, and its exact value.

        Args:
            rng: generator of the episodes.
            source: "held-out" (loggers and target fixed in advance), "adaptive" (each logger
                learned from the episodes of the one before; the target is fixed in advance) or
                "in-sample" (loggers fixed, the target learned from these episodes).
        """
        _, given, target = _made(self)
        logits = given.copy()
        batches: list[Episodes] = []
        if source == "adaptive":
            for k in range(self.policies):
                if k:
                    logits[k] += self._learned(batches[-1], logits[k - 1 : k])
                batches.append(self._play(logits[k : k + 1], rng))
        else:
            batches.append(self._play(logits, rng))
        data = Episodes.joined(batches)
        if source == "in-sample":
            target = target + self._learned(data, logits)
        recorded = data.recorded(logits, self, held_out=source == "held-out")
        policy = as_policy(target)
        return recorded, policy, self.value(policy)

    def exact_q(self, target: SoftmaxLinear) -> FloatArray:
        """Return the expected return from step t on, after action a in state s, (H, S, A)."""
        world, probs = self.world, table(target, self.states)
        q = np.empty((self.horizon, self.states, self.actions))
        ahead = np.zeros(self.states)
        for t in range(self.horizon - 1, -1, -1):
            q[t] = world.means + (1.0 - world.ends) * (world.moves @ ahead)
            ahead = np.sum(probs * q[t], axis=1)
        return q

    def value(self, target: SoftmaxLinear) -> float:
        """Return the expected return of a policy."""
        ahead = np.sum(table(target, self.states) * self.exact_q(target)[0], axis=1)
        return float(self.world.start @ ahead)

    def _play(self, logits: FloatArray, rng: np.random.Generator) -> Episodes:
        """Play `per_policy` episodes of each policy, given logits (K, S, A), all in parallel."""
        world, n = self.world, len(logits) * self.per_policy
        ids = np.repeat(np.arange(len(logits)), self.per_policy)
        policy = softmax(logits).cumsum(axis=-1)
        moves, start = world.moves.cumsum(axis=-1), world.start.cumsum()
        states, actions = np.zeros((2, n, self.horizon), dtype=np.int64)
        rewards, alive = np.zeros((n, self.horizon)), np.zeros((n, self.horizon), dtype=np.bool_)
        state, running = _draw(start[None], rng.random(n)), np.ones(n, dtype=np.bool_)
        for t in range(self.horizon):
            u = rng.random((4, n))
            action = _draw(policy[ids, state], u[0])
            mean = world.means[state, action]
            paid = mean + 0.2 * (u[1] - 0.5) if self.noise == "low" else u[1] < mean
            states[:, t], actions[:, t], rewards[:, t], alive[:, t] = state, action, paid, running
            running = running & (u[2] >= world.ends[state, action])
            state = _draw(moves[state, action], u[3])
        return Episodes(states, actions, rewards, alive, ids)

    def _learned(self, data: Episodes, logits: FloatArray) -> FloatArray:
        """Return a step (S, A) of the logits along the policy gradient estimated from the data."""
        to_go = np.flip(np.cumsum(np.flip(data.rewards * data.alive, 1), 1), 1)
        lived = np.maximum(data.alive.sum(axis=0), 1)
        gain = (to_go - (to_go * data.alive).sum(axis=0) / lived)[data.alive]
        states, actions = data.states[data.alive], data.actions[data.alive]
        ids = np.broadcast_to(data.ids[:, None], data.alive.shape)[data.alive]
        score = np.eye(self.actions)[actions] - softmax(logits)[ids, states]
        step = np.zeros((self.states, self.actions))
        np.add.at(step, states, gain[:, None] * score)
        size = np.sqrt(np.mean(step**2))
        scale = _STEP / np.sqrt(self.horizon)
        return np.asarray(scale * step / size) if size > 0 else step


@dataclass(frozen=True)
class Episodes:
    """Episodes padded to the horizon, (n, H) each, and the numbers `ids` (n,) of their loggers."""

    states: IntArray
    actions: IntArray
    rewards: FloatArray
    alive: NDArray[np.bool_]
    ids: IntArray

    @classmethod
    def joined(cls, batches: list[Episodes]) -> Episodes:
        """Join batches of one logger each; a single batch of all loggers stays as it is."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            np.concatenate([batch.states for batch in batches]),
            np.concatenate([batch.actions for batch in batches]),
            np.concatenate([batch.rewards for batch in batches]),
            np.concatenate([batch.alive for batch in batches]),
            np.repeat(np.arange(len(batches)), [len(batch.ids) for batch in batches]),
        )

    def recorded(self, logits: FloatArray, regime: Regime, *, held_out: bool) -> Trajectories:
        """Return the episodes as a recorder would have kept them."""
        lengths = self.alive.sum(axis=1)
        states, actions = self.states[self.alive], self.actions[self.alive]
        ids = np.repeat(self.ids, lengths)
        full = lengths == regime.horizon
        return Trajectories.from_arrays(
            np.eye(regime.states)[states],
            actions,
            self.rewards[self.alive],
            np.log(softmax(logits)[ids, states, actions]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            policies=[as_policy(row) for row in logits],
            policy_ids=ids,
            terminated=~full,
            truncated=full,
            held_out=held_out,
            horizon=regime.horizon,
        )


def grid(seed: int = 0) -> list[Regime]:
    """Return 48 regimes: all kinds of loggers, both noises, five horizons, and eight with few data.

    Args:
        seed: another seed gives other MDPs and policies of the same kinds.
    """
    cells = itertools.product(LOGGERS, NOISES, HORIZONS)
    made = [
        Regime(loggers, noise, horizon, *_SIZES[i % len(_SIZES)], seed=1000 * seed + i)
        for i, (loggers, noise, horizon) in enumerate(cells)
    ]
    few = itertools.product(LOGGERS, NOISES)
    return made + [
        Regime(loggers, noise, 8, *_FEW, seed=1000 * seed + len(made) + i)
        for i, (loggers, noise) in enumerate(few)
    ]


def states_of(observations: FloatArray) -> NDArray[np.intp]:
    """Return the states (n,) of one-hot observations (n, S)."""
    states: NDArray[np.intp] = np.argmax(observations, axis=1)
    return states


def as_policy(logits: FloatArray) -> SoftmaxLinear:
    """Return the policy with logits (S, A)."""
    return SoftmaxLinear(logits.T)


def table(policy: SoftmaxLinear, states: int) -> FloatArray:
    """Return the probabilities (S, A) of a policy."""
    return np.asarray(policy.probs(np.eye(states)))


def softmax(logits: FloatArray) -> FloatArray:
    """Return probabilities along the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


@cache
def _made(regime: Regime) -> tuple[World, FloatArray, FloatArray]:
    """Return the MDP, the loggers' logits (K, S, A) and the target's (S, A)."""
    rng = np.random.default_rng(np.random.SeedSequence(regime.seed))
    states, actions, count = regime.states, regime.actions, regime.policies
    world = World(
        rng.dirichlet(np.ones(states)),
        rng.dirichlet(np.ones(states), size=(states, actions)),
        2.0 * rng.random((states, actions)) / max(regime.horizon, 4),
        rng.uniform(0.1, 0.9, (states, actions)),
    )
    target = 2.0 * (world.means - 0.5) + 0.5 * rng.normal(size=(states, actions))
    apart = rng.normal(size=(count, states, actions))
    apart /= np.sqrt(np.mean(apart**2, axis=(1, 2), keepdims=True))
    distance = np.full(count, 0.5 if regime.loggers == "similar" else 2.5)
    if regime.loggers == "drifting":  # all in about the same direction, each nearer than the last
        apart = 0.9 * apart[:1] + 0.4 * apart
        distance = np.linspace(4.0, 1.0, count)
    elif regime.loggers == "one good":
        distance = np.where(np.arange(count) == count // 2, 0.4, 4.0)
    scale = distance / np.sqrt(regime.horizon)
    return world, target + scale[:, None, None] * apart, target


def _draw(edges: FloatArray, u: FloatArray) -> IntArray:
    """Draw indices (n,) from cumulative probabilities (n or 1, m) and uniform numbers (n,)."""
    return np.asarray((u[:, None] >= edges[:, :-1]).sum(axis=1))
