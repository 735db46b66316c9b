"""Fresh episodes of a Stable-Baselines3 model, and their returns."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import VecEnv

from wrappers.recording.batched import equal_shares
from wrappers.sb3.environments import check_eval_env, shared_time_limit

__all__ = ["Played", "PredictedEpisodes", "Tally", "never_ends"]


@dataclass(frozen=True)
class Played:
    """Fresh episodes of one policy.

    Args:
        returns: (n,) of the episodes.
        lengths: (n,) their steps.
        successes: whether they succeeded, where the environment says so (`info["is_success"]`).
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    successes: list[bool] = field(default_factory=list)


class Tally:
    """Counts the episodes of a VecEnv, a share of each sub-env that is fixed in advance.

    Args:
        episodes: how many in all.
        num_envs: sub-envs.
        gamma: discount of the returns.
    """

    def __init__(self, episodes: int, num_envs: int, gamma: float) -> None:
        self._left = equal_shares(episodes, num_envs)
        self._gamma = gamma
        self._paid, self._steps = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
        self._ended: list[tuple[float, int]] = []
        self._successes: list[bool] = []

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return not self._left.any()

    @property
    def longest(self) -> int:
        """Steps so far of the longest episode that is under way and counts."""
        return int(self._steps[self._left > 0].max(initial=0))

    def step(self, rewards: NDArray[Any], dones: NDArray[Any], infos: Any) -> None:
        """Add a step of all sub-envs."""
        self._paid += rewards if self._gamma == 1.0 else rewards * self._gamma**self._steps
        self._steps += 1
        for i in np.flatnonzero(dones):
            if self._left[i]:
                self._left[i] -= 1
                self._ended.append((float(self._paid[i]), int(self._steps[i])))
                if infos[i].get("is_success") is not None:
                    self._successes.append(bool(infos[i]["is_success"]))
            self._paid[i], self._steps[i] = 0.0, 0

    def played(self) -> Played:
        """Return the episodes in the order in which they ended."""
        returns, lengths = zip(*self._ended, strict=True)
        return Played(np.array(returns), np.array(lengths), self._successes)


class PredictedEpisodes:
    """Plays fresh episodes of a model by its own `predict`, and keeps no record.

    For policies whose probabilities are unknown or of no use. The random numbers of the training
    are left alone.

    Args:
        env: A Gymnasium environment or a VecEnv, like that of the training. A VecNormalize around
            it is left out: the statistics of the training are used.
        model: Any algorithm.
        seed: Seed of the environment and of the actions; None for that of the model, if any.
        max_steps: Length above which an episode is an error, because it may never end.
        deterministic: Whether to take the most probable action, or the mean.
        epsilon: Exploration rate of DQN; by default its current one.
        gamma: Discount of the returns.
    """

    def __init__(
        self,
        env: Any,
        model: Any,
        seed: int | None,
        max_steps: int,
        *,
        deterministic: bool,
        epsilon: float | None = None,
        gamma: float = 1.0,
    ) -> None:
        training = model.get_env()
        self.model = model
        self._env: VecEnv = check_eval_env(env, training)
        self.horizon = shared_time_limit(self._env, training)
        self._max_steps, self._gamma = max_steps, gamma
        self._deterministic, self._epsilon = deterministic, epsilon
        self._rng = np.random.default_rng(model.seed if seed is None else seed)
        self._env.seed(int(self._rng.integers(2**31 - self._env.num_envs)))
        takes = inspect.signature(model.policy.predict).parameters
        self._masked = "action_masks" in takes  # sb3-contrib's MaskablePPO

    def play(self, episodes: int) -> Played:
        """Play episodes of the model as it is now."""
        env, tally = self._env, Tally(episodes, self._env.num_envs, self._gamma)
        observations, states = env.reset(), None
        starts = np.ones(env.num_envs, dtype=bool)
        with torch.random.fork_rng():
            torch.manual_seed(int(self._rng.integers(2**31)))
            while not tally.done:
                actions, states = self._choose(observations, states, starts)
                observations, rewards, dones, infos = env.step(actions)
                tally.step(rewards, dones, infos)
                starts = dones
                if self.horizon is None and tally.longest > self._max_steps:
                    raise never_ends(self._max_steps)
        return tally.played()

    def _choose(self, observations: Any, states: Any, starts: NDArray[Any]) -> tuple[Any, Any]:
        model, env = self.model, self._env
        normaliser = model.get_vec_normalize_env()
        if normaliser is not None:
            observations = normaliser.normalize_obs(observations)
        more = {}
        if self._masked and env.has_attr("action_masks"):
            more["action_masks"] = np.stack(env.env_method("action_masks"))
        actions, states = model.policy.predict(
            observations, states, starts, deterministic=self._deterministic, **more
        )
        if isinstance(model, DQN) and not self._deterministic:
            epsilon = model.exploration_rate if self._epsilon is None else self._epsilon
            space: Any = env.action_space
            other = space.start + self._rng.integers(space.n, size=len(actions))
            actions = np.where(self._rng.random(len(actions)) < epsilon, other, actions)
        return actions, states


def never_ends(max_steps: int) -> RuntimeError:
    """Return the error of an episode that is too long."""
    return RuntimeError(
        f"a held-out episode is not over after max_steps={max_steps:,} steps, and eval_env names "
        "no time limit: make it and the training env with the same max_episode_steps, or give "
        "OPECallback a larger max_steps"
    )
