"""RLlib: a callback of the environment runners, for PPO and others whose module gives logits.

    config = PPOConfig().environment("CartPole-v1").callbacks(on_sample_end=SampleHook())

Each runner values the policy from its own steps, and logs `ope/value`, `ope/low` and `ope/high`:
`algorithm.train()["env_runners"]["ope"]` has them, averaged over the runners.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from ope_gym.policies.torch import TorchPolicy
from wrappers.loops.values import FreeValues

__all__ = ["SampleHook"]


class SampleHook:
    """Values the policy of a runner when it has sampled.

    Args:
        options: Arguments of `FreeValues`, such as `eval_freq`; of steps of one runner.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.values: FreeValues | None = None  # in the process of the runner

    def __call__(
        self, *, env_runner: Any, metrics_logger: Any, samples: list[Any], **_: Any
    ) -> None:
        """Take the pieces of episodes that a runner has sampled."""
        if env_runner.config.in_evaluation:
            return
        if self.values is None:
            limit = gym.spec(env_runner.config.env).max_episode_steps
            count = env_runner.config.num_envs_per_env_runner
            self.values = FreeValues(
                lambda: TorchPolicy(env_runner.module, forward=_acting),
                count,
                **{"horizon": limit, **self._options},
            )
            self._pieces = Pieces(count)
        for episode in samples:
            self._pieces.append(episode.id_, _steps_of(episode))
        steps = self._pieces.take()
        if steps:
            self.values.add(**steps)
        for estimate in self.values.evaluations[-1:]:
            for name in ("value", "low", "high"):
                metrics_logger.log_value(("ope", name), getattr(estimate, name), window=1)


class Pieces:
    """Puts pieces of episodes into columns, as if environments had been stepped side by side.

    An episode stays in its column until it ends; a new one gets the shortest column that is free.

    Args:
        columns: Number of environments.
    """

    def __init__(self, columns: int) -> None:
        self._queues: list[list[dict[str, Any]]] = [[] for _ in range(columns)]
        self._column: dict[str, int] = {}  # of open episodes

    def append(self, episode: str, steps: dict[str, Any]) -> None:
        """Add the next steps (n, ...) of an episode."""
        if episode not in self._column:
            free = set(range(len(self._queues))) - set(self._column.values())
            self._column[episode] = min(free, key=self._length)
        self._queues[self._column[episode]].append(steps)
        if steps["terminated"][-1] or steps["truncated"][-1]:
            del self._column[episode]

    def take(self) -> dict[str, Any]:
        """Return the steps (T, N, ...) of which all columns have one; nothing if T is 0."""
        length = min(map(self._length, range(len(self._queues))))
        if not length:
            return {}
        joined = [_joined(queue) for queue in self._queues]
        self._queues = [[{k: v[length:] for k, v in steps.items()}] for steps in joined]
        return {k: np.stack([steps[k][:length] for steps in joined], axis=1) for k in joined[0]}

    def _length(self, column: int) -> int:
        return sum(len(steps["rewards"]) for steps in self._queues[column])


def _joined(queue: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([steps[name] for steps in queue]) for name in queue[0]}


def _steps_of(episode: Any) -> dict[str, Any]:
    """Return the steps of a piece of an episode."""
    seen, count = np.array(episode.get_observations()), len(episode)
    last = np.arange(count) == count - 1
    return {
        "observations": seen[:-1],
        "actions": np.array(episode.get_actions()),
        "rewards": np.array(episode.get_rewards(), dtype=np.float64),
        "terminated": last & bool(episode.is_terminated),
        "truncated": last & bool(episode.is_truncated and not episode.is_terminated),
        "following": seen[1:],
    }


def _acting(module: Any, observations: torch.Tensor) -> Any:
    """Return the distribution of a module's actions: logits, or a normal one."""
    numbers = module.forward_exploration({"obs": observations})["action_dist_inputs"]
    if isinstance(module.action_space, gym.spaces.Discrete):
        return numbers
    mean, log_std = numbers.chunk(2, dim=-1)
    return torch.distributions.Normal(mean, log_std.exp())
