"""Agents of Stable-Baselines3, valued while they train, for what the small agents cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.report.training import Fresh
from ope_gym.results import Evaluation

INSTALL = 'pip install -e ".[sb3]" -c constraints.txt'
_OFF_POLICY = ("dqn", "sac", "td3")
NAMES = ("ppo", "a2c", *_OFF_POLICY)
# A minute or a few of training on one core: networks that learn after each step take longer.
_TIMESTEPS, _OFF_POLICY_TIMESTEPS = 50_000, 10_000
_BATCH = 2048  # timesteps of a rollout of PPO, from all environments: the default of one


class DeepRun:
    """One training run of a model of Stable-Baselines3; a callback values its policy.

    Args:
        name: One of `NAMES`.
        make_env: Function that makes an environment.
        timesteps: Steps of the training; by default 50,000, or 10,000 of an off-policy algorithm.
        vector_envs: Environments side by side; by default 8, or 1 of an off-policy algorithm.
        seed: Seed of model and environments.
        folder: Folder for the events of TensorBoard and the episodes.
        gamma: Discount of the value; the algorithm keeps its own.
        level: Confidence level of the intervals.
        estimators: Names of estimators that weigh the recorded episodes at the end, too.
        quiet: Whether to leave out the line of each evaluation.
    """

    fresh_episodes = 100  # of the final policy, to compare its value with: a network is slow

    def __init__(
        self,
        name: str,
        make_env: Callable[[], gym.Env[Any, Any]],
        *,
        folder: Path,
        timesteps: int | None = None,
        vector_envs: int | None = None,
        seed: int = 0,
        gamma: float = 1.0,
        level: float = 0.95,
        estimators: str | Sequence[str] | None = None,
        quiet: bool = False,
    ) -> None:
        import stable_baselines3
        import torch
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.logger import configure

        from wrappers.sb3 import OPECallback, Recording
        from wrappers.sb3.snapshots import why_not_recorded

        torch.set_num_threads(1)  # networks this small gain nothing from more
        make_plain = _without_tuples(make_env)
        off_policy = name in _OFF_POLICY
        self.timesteps = timesteps or (_OFF_POLICY_TIMESTEPS if off_policy else _TIMESTEPS)
        count = vector_envs or (1 if off_policy else 8)
        envs = make_vec_env(make_plain, count, seed=seed)
        _check_actions(name, envs.action_space)
        settings: dict[str, Any] = {}
        if name == "ppo":
            steps = max(min(_BATCH, self.timesteps) // count, 2)
            settings = {"n_steps": steps, "batch_size": min(64, steps * count)}
        elif off_policy:  # its own default would take gigabytes for images
            settings = {"buffer_size": self.timesteps}
        algorithm = getattr(stable_baselines3, name.upper())
        network = _network(envs.observation_space)
        self.model = algorithm(network, envs, seed=seed, device="cpu", **settings)
        self.model.set_logger(configure(str(folder), ["tensorboard"]))
        self._fresh_envs = make_vec_env(make_plain, count, seed=seed + 1000)
        recorded = not off_policy and not why_not_recorded(self.model)
        self.callback = OPECallback(
            gamma=gamma,
            level=level,
            path=folder / "episodes.ope" if recorded else None,
            recording=Recording(estimators=estimators) if recorded else None,
            verbose=0 if quiet else 1,
        )
        self._gamma, self._quiet = gamma, quiet

    @property
    def progress(self) -> str:
        """How far the training has come."""
        return f"{self.model.num_timesteps:,} of {self.timesteps:,} timesteps"

    def train(self, stop: Callable[[], bool]) -> None:
        """Train until a stop is asked for; the callback says what the policies are worth."""
        from stable_baselines3.common.callbacks import CallbackList, ConvertCallback

        asked = ConvertCallback(lambda local, world: not stop())
        self.model.learn(self.timesteps, callback=CallbackList([self.callback, asked]))

    def evaluate(self) -> Evaluation | None:
        """Return what estimators made of the recorded episodes, where some were asked for."""
        return self.callback.report

    def fresh_returns(self, episodes: int) -> FloatArray:
        """Return the returns of new episodes of the policy as it acts; none with a discount."""
        from stable_baselines3.common.evaluation import evaluate_policy

        if self._gamma < 1.0:  # these have none
            return np.empty(0)
        returns, _ = evaluate_policy(
            self.model,
            self._fresh_envs,
            episodes,
            deterministic=False,
            return_episode_rewards=True,
        )
        return np.array(returns)

    def report(self, truth: Fresh | None, settings: Mapping[str, Any]) -> str:
        """Return the value in words, unless the callback has printed it, and that of rollouts."""
        lines = [self.callback.result() if self._quiet else "", str(truth or "")]
        return "".join(f"{line}\n" for line in filter(None, lines))

    def save(self, path: Path | None) -> None:
        """Copy all recorded episodes to a file if one is named."""
        if path:
            self.callback.trajectories().save(path)

    def close(self) -> None:
        """Close the environments and the logger."""
        self.model.logger.close()
        self.model.get_env().close()
        self._fresh_envs.close()


def _without_tuples(make_env: Callable[[], gym.Env[Any, Any]]) -> Callable[[], gym.Env[Any, Any]]:
    """Return a function that makes the environment with tuples of observations as one array."""

    def make_plain() -> gym.Env[Any, Any]:
        env = make_env()
        is_tuple = isinstance(env.observation_space, gym.spaces.Tuple)
        return gym.wrappers.FlattenObservation(env) if is_tuple else env

    return make_plain


def _check_actions(name: str, space: gym.Space[Any]) -> None:
    """Raise if an algorithm cannot choose such actions."""
    is_box, is_discrete = (isinstance(space, x) for x in (gym.spaces.Box, gym.spaces.Discrete))
    if (name == "dqn" and not is_discrete) or (name in ("sac", "td3") and not is_box):
        others = "ppo, a2c or dqn" if is_discrete else "ppo, a2c, sac or td3" if is_box else "ppo"
        raise ValueError(f"agent is {name!r}: the actions are {space}; give {others}")


def _network(space: gym.Space[Any]) -> str:
    """Return the kind of policy that takes these observations."""
    from stable_baselines3.common.preprocessing import is_image_space

    if isinstance(space, gym.spaces.Dict):
        return "MultiInputPolicy"
    return "CnnPolicy" if is_image_space(space) else "MlpPolicy"
