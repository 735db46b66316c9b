"""Simulate finite decision processes, hidden ones too, and compute values exactly.

    setup = Setup(process, loggers, target)
    data = setup.simulate(200, np.random.default_rng(0))
    setup.truth

A policy sees the observation of a state, which may tell less than the state. Values are computed by
backward induction over the states, so they are exact for hidden ones, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym import Trajectories
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.policies import Snapshot

Noise: TypeAlias = Literal["", "normal", "t", "pareto", "pareto 1.5", "lognormal"]
Logits: TypeAlias = FloatArray  # (..., O, A)

WRONG_TEMPERATURE = 1.3  # of the propensities that a faulty recorder keeps


@dataclass(frozen=True, eq=False, repr=False)
class TablePolicy(Snapshot):
    """A table of probabilities: a row for each observation 0 … O-1, a column for each action."""

    kind: ClassVar[str] = "outside-table"
    table: FloatArray  # (O, A)

    def probs(self, observations: Any) -> FloatArray:
        """Return the probability of every action, shape (n, A)."""
        return np.asarray(self.table[_numbers(observations)])

    def log_prob(self, observations: Any, actions: Any) -> FloatArray:
        """Return the log-probability of each action, -inf where it is impossible; shape (n,)."""
        return np.asarray(self._logs[_numbers(observations), np.asarray(actions)])

    @classmethod
    def log_prob_stack(
        cls, policies: Sequence[TablePolicy], observations: Any, actions: Any
    ) -> FloatArray:
        """Return `log_prob` of K policies as one (K, n) array."""
        return np.stack([policy.log_prob(observations, actions) for policy in policies])

    def sample(self, observations: Any, rng: np.random.Generator) -> IntArray:
        """Draw one action a row; one uniform number each decides."""
        edges = self.probs(observations).cumsum(axis=1)
        return draw(edges, rng.random(len(edges)))

    @cached_property
    def _logs(self) -> FloatArray:
        with np.errstate(divide="ignore"):
            return np.log(self.table)

    def __repr__(self) -> str:
        return f"TablePolicy({self.table.shape})"


@dataclass(frozen=True, eq=False)
class Process:
    """A finite decision process; S states, A actions, M possible outcomes of each action.

    Args:
        start: (S,) distribution of the first state.
        chances: (S, A, M) probability of each outcome.
        moves: (S, A, M) next state of each outcome.
        rewards: (S, A, M) mean reward of each outcome.
        ends: (S, A, M) whether the episode ends with it.
        seen: (S,) the observation of each state.
        horizon: the time limit.
        noise: added to each reward: none, N(0, 1), t with 2.5 degrees of freedom, or, less its
            mean, Pareto with tail index 2.5 or 1.5 or the exponential of N(0, 1.5^2).
    """

    start: FloatArray
    chances: FloatArray
    moves: IntArray
    rewards: FloatArray
    ends: NDArray[np.bool_]
    seen: IntArray
    horizon: int
    noise: Noise = ""

    def value(self, table: FloatArray) -> float:
        """Return the expected return of a policy, given its probabilities (O, A)."""
        probs, ahead = table[self.seen], np.zeros(len(self.start))
        for _ in range(self.horizon):
            later = self.rewards + np.where(self.ends, 0.0, ahead[self.moves])
            ahead = np.sum(probs * np.sum(self.chances * later, axis=2), axis=1)
        return float(self.start @ ahead)

    def best_q(self, gamma: float = 0.99, sweeps: int = 400) -> FloatArray:
        """Return the discounted values (S, A) of the best policy that knows the state."""
        q = np.zeros(self.chances.shape[:2])
        for _ in range(sweeps):
            later = self.rewards + np.where(self.ends, 0.0, gamma * q.max(axis=1)[self.moves])
            q = np.sum(self.chances * later, axis=2)
        return q

    def play(self, tables: FloatArray, ids: IntArray, rng: np.random.Generator) -> Episodes:
        """Play one episode for each entry of ids (n,), all at once, by the policies (K, O, A)."""
        edges = self.chances.cumsum(axis=2)
        policies = tables.cumsum(axis=2)
        n, horizon = len(ids), self.horizon
        seen, actions = np.zeros((2, horizon, n), dtype=np.int64)
        rewards, alive = np.zeros((horizon, n)), np.zeros((horizon, n), dtype=np.bool_)
        state, running = draw(self.start.cumsum()[None], rng.random(n)), np.ones(n, dtype=np.bool_)
        for t in range(horizon):
            u = rng.random((2, n))
            seen[t], alive[t] = self.seen[state], running
            actions[t] = draw(policies[ids, seen[t]], u[0])
            outcome = draw(edges[state, actions[t]], u[1])
            at = state, actions[t], outcome
            rewards[t] = self.rewards[at]
            running = running & ~self.ends[at]
            state = self.moves[at]
            if not running.any():
                break
        rewards += _noise(self.noise, rewards.shape, rng)
        return Episodes(seen.T, actions.T, rewards.T, alive.T, ids, running)


@dataclass(frozen=True, eq=False)
class Episodes:
    """Episodes padded to the horizon, (n, H) each; `running` (n,) where the time limit ended it."""

    seen: IntArray
    actions: IntArray
    rewards: FloatArray
    alive: NDArray[np.bool_]
    ids: IntArray
    running: NDArray[np.bool_]

    def recorded(self, tables: FloatArray, numbers: bool = False) -> Trajectories:
        """Return the episodes as a recorder would keep them.

        Args:
            tables: (K, O, A) what it knows of the policies.
            numbers: whether observations are real numbers, not the names of states.
        """
        lengths = self.alive.sum(axis=1)
        seen, actions = self.seen[self.alive], self.actions[self.alive]
        ids = np.repeat(self.ids, lengths)
        return Trajectories.from_arrays(
            seen[:, None].astype(np.float64) if numbers else seen,
            actions,
            self.rewards[self.alive],
            np.log(tables[ids, seen, actions]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            policies=[TablePolicy(table) for table in tables],
            policy_ids=ids,
            terminated=~self.running,
            truncated=self.running,
            held_out=True,
            horizon=self.alive.shape[1],
        )


@dataclass(frozen=True, eq=False)
class Setup:
    """A process with its loggers and the target.

    Args:
        process: the decision process.
        loggers: (K, O, A) probabilities of the policies that act.
        target: (O, A) probabilities of the policy to evaluate.
        recorded: (K, O, A) probabilities that the recorder believes; those of `loggers` unless
            propensities are wrong.
        numbers: whether observations are real numbers, so that models have to generalise.
    """

    process: Process
    loggers: FloatArray
    target: FloatArray
    recorded: FloatArray | None = None
    numbers: bool = False

    @property
    def policy(self) -> TablePolicy:
        """Return the target."""
        return TablePolicy(self.target)

    @cached_property
    def truth(self) -> float:
        """The exact value of the target."""
        return self.process.value(self.target)

    def simulate(self, n: int, rng: np.random.Generator) -> Trajectories:
        """Return n episodes, shared out evenly among the loggers."""
        ids = shared_out(n, len(self.loggers))
        played = self.process.play(self.loggers, ids, rng)
        tables = self.loggers if self.recorded is None else self.recorded
        return played.recorded(tables, self.numbers)

    def misrecorded(self) -> Setup:
        """Return the setup with propensities recorded at the wrong temperature."""
        wrong = softmax(np.log(self.loggers) / WRONG_TEMPERATURE)
        return Setup(self.process, self.loggers, self.target, wrong)

    def unsupported(self, share: float = 0.2) -> Setup:
        """Return the setup with an action that no logger takes, with a share in the target.

        It is the target's rarest action in the state that the loggers see most often.
        """
        at = self._most_seen()
        action = int(np.argmin(self.target[at]))
        loggers, target = self.loggers.copy(), self.target.copy()
        loggers[:, at, action] = 0.0
        loggers[:, at] /= loggers[:, at].sum(axis=1, keepdims=True)
        target[at] *= (1.0 - share) / (1.0 - target[at, action])
        target[at, action] = share
        return Setup(self.process, loggers, target)

    def _most_seen(self) -> int:
        """Return the observation that is most frequent in 1000 episodes of all loggers."""
        ids = shared_out(1000, len(self.loggers))
        played = self.process.play(self.loggers, ids, np.random.default_rng(0))
        return int(np.bincount(played.seen[played.alive]).argmax())


def _numbers(observations: Any) -> IntArray:
    """Return which rows of a table observations stand for."""
    seen = np.asarray(observations)
    return seen if seen.dtype.kind in "iu" else np.rint(seen[:, 0]).astype(np.int64)


def soft_history(
    target: Logits, count: int, rng: np.random.Generator, distance: float, least: float = 0.4
) -> FloatArray:
    """Return loggers (K, O, A) that approach a target with logits (O, A), as in a training run.

    Logger k has the target's logits times a share that grows from `least` towards 1, and noise of
    standard deviation `distance`, which the later half has less of. One logger is from the middle.
    """
    shares = np.linspace(least, 1.0, count + 1)[:-1] if count > 1 else np.array([(1.0 + least) / 2])
    noise = distance * rng.normal(size=(count, *target.shape))
    return softmax(shares[:, None, None] * target + (1.5 - shares)[:, None, None] * noise)


def shared_out(n: int, count: int) -> IntArray:
    """Return which of `count` loggers plays each of n episodes, in blocks of about equal size."""
    return np.arange(n) * count // n


def softmax(logits: FloatArray) -> FloatArray:
    """Return probabilities along the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def draw(edges: FloatArray, u: FloatArray) -> IntArray:
    """Draw indices (n,) from cumulative probabilities (n or 1, m) and uniform numbers (n,)."""
    return np.asarray((u[:, None] >= edges[:, :-1]).sum(axis=1))


def _noise(kind: Noise, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray | float:
    """Return noise of mean 0."""
    if kind == "normal":
        return rng.normal(size=shape)
    if kind == "t":
        return np.asarray(rng.standard_t(2.5, size=shape))
    if kind == "pareto":
        return np.asarray(rng.pareto(2.5, size=shape) - 1.0 / 1.5)
    if kind == "pareto 1.5":
        return np.asarray(rng.pareto(1.5, size=shape) - 1.0 / 0.5)
    if kind == "lognormal":
        return np.asarray(rng.lognormal(0.0, 1.5, size=shape) - np.exp(1.125))
    return 0.0
