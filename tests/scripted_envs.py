"""Environments that play a script, so that tests can write out every recorded array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.policies import Policy

# A step of a script: reward, and "." goes on, "T" terminated, "C" truncated (cut), "B" both.
Script = Sequence[str]

BOX = spaces.Box(-100.0, 100.0, (3,), np.float32)


def script(*episodes: str) -> list[str]:
    """Return episodes given as strings, one letter a step; the reward of step t is t + 1.

    >>> script("..T", "C")
    ['..T', 'C']
    """
    assert all(set(episode[:-1]) <= {"."} and episode[-1] in "TCB" for episode in episodes)
    return list(episodes)


class ScriptedEnv(gym.Env[Any, Any]):
    """Plays the episodes of a script in turn; observations are (who, episode, step).

    Args:
        episodes: The script.
        who: First number of each observation.
        observation_space: Space of the observations.
        action_space: Space of the actions.
        observe: Turns (who, episode, step) into an observation; a fresh float32 array by default.
        broken_at: (episode, step) whose step raises.
    """

    def __init__(
        self,
        episodes: Script,
        *,
        who: int = 0,
        observation_space: gym.Space[Any] = BOX,
        action_space: gym.Space[Any] | None = None,
        observe: Callable[[int, int, int], Any] | None = None,
        broken_at: tuple[int, int] | None = None,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.resets: list[tuple[int | None, Any]] = []
        self._episodes, self._who, self._observe = list(episodes), who, observe
        self._broken_at = broken_at
        self._episode, self._step = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets.append((seed, options))
        self._episode, self._step = self._episode + 1, 0
        return self._seen(), {"started": self._episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if (self._episode, self._step) == self._broken_at:
            self._broken_at = None
            raise OSError("the simulator is gone")
        mark = self._episodes[self._episode % len(self._episodes)][self._step]
        self._step += 1
        return self._seen(), float(self._step), mark in "TB", mark in "CB", {"step": self._step}

    def _seen(self) -> Any:
        if self._observe is None:
            return np.array([self._who, self._episode, self._step], dtype=np.float32)
        return self._observe(self._who, self._episode, self._step)


def reused() -> Callable[[int, int, int], NDArray[np.float32]]:
    """Return a function whose observations are always the same array, overwritten."""
    array = np.zeros(3, dtype=np.float32)

    def observe(who: int, episode: int, step: int) -> NDArray[np.float32]:
        array[:] = who, episode, step
        return array

    return observe


@dataclass(frozen=True)
class Constant(Policy):
    """Policy that gives every action the same log-probability."""

    value: float = -0.5

    def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
        assert batches.length(observations) == batches.length(actions)
        return np.full(batches.length(actions), self.value)

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.integers(2, size=batches.length(observations))
