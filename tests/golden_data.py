"""Fixed episodes for `tests.golden`: arrays from uniform numbers, without Gymnasium or ope_gym.

Only `Generator.random` is drawn from, and states are rounded after every step, so that another
numpy or another processor makes the same episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Recording:
    """Recorded episodes as plain arrays; S steps, n episodes.

    Args:
        observations: (S, ...).
        actions: (S, ...).
        rewards: (S,).
        offsets: (n + 1,).
        policy_ids: (S,) number of the policy that acted.
        terminated: (n,) whether the environment ended the episode; the others were cut.
        held_out: (n,).
        horizon: time limit.
        changes: (clock, policy) pairs if policies change by the clock of the loop.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: Floats
    offsets: Ints
    policy_ids: Ints
    terminated: NDArray[np.bool_]
    held_out: NDArray[np.bool_]
    horizon: int
    changes: tuple[tuple[int, int], ...] = ()

    def part(self, begin: int, end: int) -> Recording:
        """Return episodes `begin` to `end`."""
        rows = slice(int(self.offsets[begin]), int(self.offsets[end]))
        return Recording(
            self.observations[rows],
            self.actions[rows],
            self.rewards[rows],
            self.offsets[begin : end + 1] - self.offsets[begin],
            self.policy_ids[rows],
            self.terminated[begin:end],
            self.held_out[begin:end],
            self.horizon,
        )


def _recording(
    episodes: Sequence[tuple[list[Any], list[Any], list[float], bool]],
    policies: Sequence[int],
    horizon: int,
    *,
    held_out_every: int = 0,
) -> Recording:
    """Join episodes (observations, actions, rewards, terminated), one policy each."""
    lengths = [len(rewards) for _, _, rewards, _ in episodes]
    number = np.arange(len(episodes))
    return Recording(
        np.concatenate([np.asarray(o) for o, _, _, _ in episodes]),
        np.concatenate([np.asarray(a) for _, a, _, _ in episodes]),
        np.concatenate([np.asarray(r, dtype=np.float64) for _, _, r, _ in episodes]),
        np.cumsum([0, *lengths]),
        np.repeat(np.asarray(policies, dtype=np.int64), lengths),
        np.array([t for _, _, _, t in episodes]),
        number % held_out_every == 0 if held_out_every else np.zeros(number.size, dtype=bool),
        horizon,
    )


def cartpole(
    seed: int, thetas: Floats, counts: Sequence[int], horizon: int, *, held_out_every: int = 0
) -> Recording:
    """Balance a pole with P(push right) = sigmoid(x · theta); the reward falls with the angle."""
    rng = np.random.default_rng(seed)
    policies = np.repeat(np.arange(len(counts)), counts)
    episodes = []
    for k in policies.tolist():
        state = np.round(rng.random(4) * 0.1 - 0.05, 6)
        seen: list[Any] = []
        actions: list[int] = []
        rewards: list[float] = []
        ended = False
        while not ended and len(rewards) < horizon:
            likely = 1.0 / (1.0 + np.exp(-float((state * thetas[k]).sum())))
            action = int(rng.random() < likely)
            seen.append(state)
            actions.append(action)
            state = _push(state, action)
            rewards.append(round(1.0 - min(abs(float(state[2])), 0.25), 6))
            ended = abs(float(state[0])) > 2.4 or abs(float(state[2])) > 0.2095
        episodes.append((seen, actions, rewards, ended))
    return _recording(episodes, policies.tolist(), horizon, held_out_every=held_out_every)


def _push(state: Floats, action: int) -> Floats:
    """Return the next state of the cart and pole (Barto, Sutton and Anderson 1983, Euler)."""
    x, speed, angle, turning = state.tolist()
    force = 10.0 if action else -10.0
    cos, sin = float(np.cos(angle)), float(np.sin(angle))
    pushed = (force + 0.05 * turning**2 * sin) / 1.1
    turn = (9.8 * sin - cos * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    faster = pushed - 0.05 * turn * cos / 1.1
    return np.round(
        [x + 0.02 * speed, speed + 0.02 * faster, angle + 0.02 * turning, turning + 0.02 * turn], 6
    )


class Grid:
    """A random decision problem with `states` states and three rewards."""

    def __init__(self, seed: int, states: int, actions: int, horizon: int) -> None:
        rng = np.random.default_rng(seed)
        self.horizon = horizon
        self.moves = rng.random((states, actions, states + 1)) ** 2  # the last one ends an episode
        self.moves /= self.moves.sum(axis=2, keepdims=True)
        self.pays = rng.random((states, actions, 3))
        self.pays /= self.pays.sum(axis=2, keepdims=True)
        self.rewards = (-1.0, 0.5, 2.0)

    def episode(
        self, rng: np.random.Generator, probs: Callable[[int], Floats]
    ) -> tuple[list[Any], list[Any], list[float], bool]:
        """Play an episode; probs(t) holds the probabilities (states, actions) at step t."""
        states = self.moves.shape[0]
        state = int(rng.random() * states)
        seen: list[int] = []
        actions: list[int] = []
        rewards: list[float] = []
        while state < states and len(seen) < self.horizon:
            action = _draw(rng, probs(len(seen))[state])
            seen.append(state)
            actions.append(action)
            rewards.append(self.rewards[_draw(rng, self.pays[state, action])])
            state = _draw(rng, self.moves[state, action])
        return seen, actions, rewards, state == states

    def record(
        self, seed: int, tables: Sequence[Floats], counts: Sequence[int], *, held_out_every: int = 0
    ) -> Recording:
        """Record counts[k] episodes of each table of probabilities, in turns."""
        rng = np.random.default_rng(seed)
        left, policies = list(counts), []
        while any(left):
            for k in range(len(left)):
                if left[k]:
                    left[k] -= 1
                    policies.append(k)
        episodes = [self.episode(rng, lambda t, k=k: tables[k]) for k in policies]  # type: ignore[misc]
        return _recording(episodes, policies, self.horizon, held_out_every=held_out_every)

    def record_clocked(
        self, seed: int, tables: Sequence[Floats], episodes: int, every: int
    ) -> Recording:
        """Record a loop that takes the next table after every `every` steps, also mid-episode."""
        rng = np.random.default_rng(seed)
        played, clock = [], 0
        ids: list[int] = []
        for _ in range(episodes):
            begin = clock
            played.append(self.episode(rng, lambda t, b=begin: tables[_at(b + t, every, tables)]))  # type: ignore[misc]
            clock += len(played[-1][2])
            ids += [_at(c, every, tables) for c in range(begin, clock)]
        found = _recording(played, [0] * episodes, self.horizon)
        changes = tuple((k * every, k) for k in range(len(tables)))
        return Recording(**{**vars(found), "policy_ids": np.array(ids), "changes": changes})


def _at(clock: int, every: int, tables: Sequence[Floats]) -> int:
    return min(clock // every, len(tables) - 1)


def _draw(rng: np.random.Generator, probs: Floats) -> int:
    """Draw an index; the last one where rounding leaves a sum below 1."""
    return min(int(np.searchsorted(probs.cumsum(), rng.random(), side="right")), probs.size - 1)


def epsilon_greedy(greedy: Sequence[int], epsilon: float, actions: int) -> Floats:
    """Return the probabilities (states, actions) of an epsilon-greedy policy."""
    table = np.full((len(greedy), actions), epsilon / actions)
    table[np.arange(len(greedy)), greedy] += 1.0 - epsilon
    return table


def driven(
    seed: int, gains: Sequence[float], stds: Sequence[float], counts: Sequence[int], horizon: int
) -> Recording:
    """Drive two coordinates to 0 with Gaussian actions of mean gain · x (two parts)."""
    rng, normal = np.random.default_rng(seed), NormalDist()

    def noise() -> Floats:
        return np.array([normal.inv_cdf(u) for u in rng.random(2).tolist()])

    policies = np.repeat(np.arange(len(counts)), counts).tolist()
    episodes = []
    for k in policies:
        state = np.round(rng.random(2) * 2.0 - 1.0, 6)
        seen, actions, rewards = [], [], []
        length = horizon if rng.random() < 0.7 else 1 + int(rng.random() * horizon)
        for _ in range(length):
            action = np.round(gains[k] * state + stds[k] * noise(), 6)
            seen.append(state)
            actions.append(action)
            state = np.round(0.9 * state + 0.5 * action + 0.1 * noise(), 6)
            rewards.append(round(1.0 - float((state**2).sum()) - 0.1 * float(action[0] ** 2), 6))
        episodes.append((seen, actions, rewards, length < horizon))
    return _recording(episodes, policies, horizon)
