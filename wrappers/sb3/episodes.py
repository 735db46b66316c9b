"""Episodes of a Stable-Baselines3 model: fresh ones that it plays, and those that are recorded."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import estimator_names
from ope_gym.evaluation import evaluate
from ope_gym.files import PathLike
from ope_gym.policies import Policy
from ope_gym.policies.acting import ActingPolicy
from ope_gym.results import Evaluation
from wrappers.recording.autoreset import SAME_STEP
from wrappers.recording.batched import BatchedSession, equal_shares
from wrappers.recording.file import EpisodeFile, check_path
from wrappers.recording.session import Settings
from wrappers.sb3.environments import (
    check_eval_env,
    check_not_normalised,
    horizon_of,
    shared_time_limit,
)
from wrappers.sb3.snapshots import known_policy, why_not_fixed, why_not_recorded
from wrappers.sb3.steps import TrainingSteps, split_dones

__all__ = ["FreshEpisodes", "Played", "Record", "Recording"]

_MOST_STEPS = 100_000  # of an episode without a time limit: a longer one may never end


@dataclass(frozen=True)
class Played:
    """Fresh episodes of one policy.

    Args:
        returns: (n,) of the episodes.
        lengths: (n,) their steps.
        successes: Whether they succeeded, where the environment says so (`info["is_success"]`).
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    successes: list[bool] = field(default_factory=list)


class FreshEpisodes:
    """Plays fresh episodes on an environment of its own.

    Nothing of the training run is touched: neither its environment nor its random numbers.

    Args:
        env: A Gymnasium environment or a VecEnv, like that of the training. A VecNormalize around
            it is left out: policies are played with the statistics of the training.
        model: Any algorithm.
        seed: Seed of the environment and of the actions; None for that of the model, if any.
        deterministic: Whether to take the most probable action, or the mean.
        gamma: Discount of the returns.
    """

    def __init__(
        self, env: Any, model: Any, *, seed: int | None, deterministic: bool, gamma: float
    ) -> None:
        training = model.get_env()
        self._model = model
        self._env = check_eval_env(env, training)
        self._horizon = shared_time_limit(self._env, training)
        self._deterministic, self._gamma = deterministic, gamma
        self._rng = np.random.default_rng(model.seed if seed is None else seed)
        self._env.seed(int(self._rng.integers(2**31 - self._env.num_envs)))
        takes = inspect.signature(model.policy.predict).parameters
        self._masked = "action_masks" in takes  # sb3-contrib's MaskablePPO
        self.session: BatchedSession | None = None

    def record(self, file: EpisodeFile | None) -> None:
        """Record the episodes of policies that know the probabilities of their actions."""
        env = self._env
        settings = Settings(env.observation_space, env.action_space, self._horizon, held_out=1.0)
        self.session = BatchedSession(settings, env.num_envs, SAME_STEP, file)

    def play(self, episodes: int, policy: ActingPolicy | None) -> Played:
        """Play a snapshot, or by the model's `predict`; the share of each sub-env is fixed."""
        env, session = self._env, self.session if isinstance(policy, Policy) else None
        left = equal_shares(episodes, env.num_envs)
        paid, steps = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=np.int64)
        ended: list[tuple[float, int, bool | None]] = []
        observations, states, dones = env.reset(), None, np.ones(env.num_envs, dtype=bool)
        if session is not None and isinstance(policy, Policy):
            session.quota = left.copy()
            session.restart(observations)
            session.follow(policy)
        try:
            while left.any():
                actions, states = self._choose(policy, observations, states, dones)
                if session is not None:
                    session.act(actions, None)
                observations, rewards, dones, infos = env.step(self._clip(actions))
                if session is not None:
                    session.advance(observations, rewards, *split_dones(dones, infos))
                    session.hand_over_if_due()
                paid += rewards * self._gamma**steps
                steps += 1
                for i in np.flatnonzero(dones):
                    if left[i]:
                        ended.append((paid[i], int(steps[i]), infos[i].get("is_success")))
                        left[i] -= 1
                    paid[i], steps[i] = 0.0, 0
                if self._horizon is None and steps[left > 0].max(initial=0) > _MOST_STEPS:
                    raise RuntimeError(
                        f"a fresh episode is not over after {_MOST_STEPS:,} steps, and eval_env "
                        "names no time limit: make it and the training env with the same "
                        "max_episode_steps"
                    )
            if session is not None:
                session.hand_over()  # readers of the file wait for this evaluation
        finally:
            if session is not None:
                session.drop(warn=False)
                session.quota = None
        returns, lengths, successes = zip(*ended, strict=True)
        told = [bool(success) for success in successes if success is not None]
        return Played(np.array(returns), np.array(lengths), told)

    def _choose(
        self, policy: ActingPolicy | None, observations: Any, states: Any, starts: NDArray[Any]
    ) -> tuple[Any, Any]:
        if policy is None:
            with torch.random.fork_rng():  # the training's own numbers stay as they are
                torch.manual_seed(int(self._rng.integers(2**31)))
                return self._predict(observations, states, starts)
        space, drawn = self._env.action_space, np.asarray(policy.sample(observations, self._rng))
        if isinstance(space, spaces.Box):  # rounded before it is recorded and executed
            drawn = drawn.reshape(-1, *space.shape).astype(space.dtype)
        return drawn, None

    def _predict(self, observations: Any, states: Any, starts: NDArray[Any]) -> tuple[Any, Any]:
        model, env = self._model, self._env
        normaliser = model.get_vec_normalize_env()
        if normaliser is not None:
            observations = normaliser.normalize_obs(observations)
        more = {}
        if self._masked and env.has_attr("action_masks"):
            more["action_masks"] = np.stack(env.env_method("action_masks"))
        actions, states = model.policy.predict(
            observations, states, starts, deterministic=self._deterministic, **more
        )
        if hasattr(model, "exploration_rate") and not self._deterministic:  # DQN
            space: Any = env.action_space
            other = space.start + self._rng.integers(space.n, size=len(actions))
            explores = self._rng.random(len(actions)) < model.exploration_rate
            actions = np.where(explores, other, actions)
        return actions, states

    def _clip(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions to execute, as SB3 executes those of its policies."""
        space = self._env.action_space
        return np.clip(actions, space.low, space.high) if isinstance(space, spaces.Box) else actions


@dataclass(frozen=True)
class Recording:
    """Settings of what is recorded beside the values, and of how it is weighed at the end.

    Args:
        training: Whether to keep the episodes of PPO and A2C in training, with a snapshot for each
            rollout; by default only if they are saved to a file, or are all that `estimators` have.
        append: Whether to continue an existing file; see `RecordTrajectories`.
        estimators: Names from `ope_gym.ESTIMATORS`: at the end the recorded episodes are also
            evaluated with importance weights. The result is in `report`, and in TensorBoard.
        window: Number of latest policies whose episodes that report uses.
    """

    training: bool | None = None
    append: bool | None = None
    estimators: str | Sequence[str] | None = None
    window: int = 20

    def __post_init__(self) -> None:
        if self.estimators is not None:
            estimator_names(self.estimators)
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")


class Record:
    """Recorded episodes of a run: fresh ones, and those of the training.

    Args:
        path: File to which they are appended as they end, if any.
        settings: What to record.
    """

    def __init__(self, path: PathLike | None, settings: Recording) -> None:
        self.settings = settings
        self._file: EpisodeFile | None = None
        if path is not None:  # an error now, not after hours of training
            check_path(path, settings.append, stacklevel=4)
            self._file = EpisodeFile(path, patient=True)
        self._fresh: BatchedSession | None = None
        self._training: TrainingEpisodes | None = None

    def open(self, model: Any, fresh: FreshEpisodes | None, *, deterministic: bool) -> None:
        """Prepare to record what a model does, as far as its probabilities are known."""
        why = why_not_recorded(model)
        changing = why or why_not_fixed(model)
        wanted = self.settings.training
        needed = self._file or (self.settings.estimators is not None and fresh is None)
        if (needed if wanted is None else wanted) and not changing:
            check_not_normalised(model.get_env(), "the training env", rewards=True)
            self._training = TrainingEpisodes(model, self._file)
        if fresh is not None and not why and not deterministic:
            fresh.record(self._file)
            self._fresh = fresh.session
        if self._file is not None and not (self._training or self._fresh):
            reason = changing or "Recording(training=False)"
            instead = ", or deterministic=True" if deterministic else ""
            instead += ", or give an eval_env" if not why and fresh is None else ""
            raise ValueError(
                f"the file of path would stay empty: {reason}, so that no episode can be recorded "
                f"with the probabilities of its actions. Leave path out{instead}"
            )

    @property
    def fresh(self) -> TrajectoryBuffer:
        """The fresh episodes."""
        return self._fresh.buffer if self._fresh else TrajectoryBuffer()

    @property
    def training(self) -> TrajectoryBuffer:
        """The episodes of the training."""
        return self._training.session.buffer if self._training else TrajectoryBuffer()

    def begin(self) -> None:
        """Prepare for `learn`."""
        if self._training is not None:
            self._training.begin()
        if self._file is not None:
            self._file.write()

    def begin_rollout(self) -> None:
        """Record that the policy as it is now acts from the next step on."""
        if self._training is not None:
            self._training.follow()

    def step(self, local: dict[str, Any]) -> None:
        """Take in a step of the training; see `TrainingSteps.step`."""
        if self._training is not None:
            self._training.step(local)

    def close(self) -> None:
        """Let the file have everything."""
        if self._file is not None:
            self._file.close()

    def conclude(self, model: Any, gamma: float) -> tuple[Evaluation, Trajectories] | None:
        """Return what the latest episodes say of a model's policy, and these; None without any."""
        data = None
        if self._fresh is not None:
            data = self.fresh.select(last=self.settings.window)
        elif self._training is not None:
            data = self._training.settled(self.settings.window)
            self.training.add_policy(known_policy(model))  # it plays no episode, but belongs there
        if self.settings.estimators is None or data is None or not len(data):
            return None
        return evaluate(data, known_policy(model), self.settings.estimators, gamma=gamma), data


class TrainingEpisodes(TrainingSteps):
    """Records the episodes of a model in `learn`.

    Args:
        model: PPO or A2C.
        file: Gets the episodes as they end.
    """

    def __init__(self, model: Any, file: EpisodeFile | None = None) -> None:
        super().__init__(model)
        env = model.get_env()
        settings = Settings(env.observation_space, env.action_space, horizon_of(env), audit=False)
        self.session = BatchedSession(settings, env.num_envs, SAME_STEP, file)

    def follow(self) -> None:
        """Record that the policy as it is now acts from the next step on."""
        changing = why_not_fixed(self.model)
        if changing:
            raise ValueError(f"{changing}: use OPECallback(recording=Recording(training=False))")
        self._unchecked = known_policy(self.model)
        self.session.follow(self._unchecked)

    def _restart(self, starts: NDArray[np.bool_]) -> None:
        self.session.drop(warn=False)
        self.session.restart(self._raw, starts)

    def _take(self, seen: Any, rewards: NDArray[Any], local: dict[str, Any]) -> None:
        self.session.act(local["actions"], local["log_probs"].detach().cpu().numpy())
        self.session.advance(self._raw, rewards, *split_dones(local["dones"], local["infos"]))
        self.session.hand_over_if_due()

    def settled(self, last: int) -> Trajectories:
        """Return the settled episodes of the `last` policies; all, if no time limit is known."""
        data = self.session.buffer.view()
        if data.horizon is None:
            return data.select(last=last)
        # One selection: the record of a long training is not copied twice.
        settled = self.session.settled_mask()
        first = data.first_policies
        return data.select(episodes=settled & np.isin(first, np.unique(first[settled])[-last:]))
