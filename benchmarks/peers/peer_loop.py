"""What recorders of several libraries are measured on: environments, a loop and a clock.

Needs only gymnasium and numpy, because a recorder is also run by the environment of its library.
"""

import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

Run = Callable[[], object]


class NullEnv(gym.Env[Any, Any]):
    """Environment that does nothing, for 200 steps an episode."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._observation = np.zeros(4, dtype=np.float32)
        self._left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start counting steps."""
        self._left = 200
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count a step."""
        self._left -= 1
        return self._observation, 1.0, self._left == 0, False, {}


ENVS: dict[str, tuple[Callable[[], gym.Env[Any, Any]], int]] = {
    "CartPole-v1": (lambda: gym.make("CartPole-v1"), 8_000),
    "an environment that does nothing": (NullEnv, 10_000),
}
"""Title to how the environment is made, and the number of steps of a run."""


def random_actions(steps: int) -> list[int]:
    """The actions of all runs."""
    return np.random.default_rng(0).integers(2, size=steps).tolist()


def play(env: Any, actions: list[int], **given: float) -> None:
    """Take these actions, in as many episodes as it takes."""
    env.reset(seed=0)
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action, **given)
        if terminated or truncated:
            env.reset()


def cpu_seconds(runs: dict[str, Run], repetitions: int) -> dict[str, list[float]]:
    """Seconds of the processor of each run in each repetition, all runs one after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if repetition:  # the first one warms up
                seconds[name].append(time.process_time() - start)
    return seconds
