"""Episodes of a Stable-Baselines3 model: those it trains on, and fresh ones that are held out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy, policy_to_arrays
from wrappers.recording.autoreset import SAME_STEP
from wrappers.recording.batched import BatchedSession, equal_shares
from wrappers.recording.file import EpisodeFile
from wrappers.recording.session import Settings
from wrappers.sb3.environments import check_eval_env, shared_time_limit
from wrappers.sb3.fresh import Played, Tally, never_ends
from wrappers.sb3.snapshots import observation_normaliser

_TOLERANCE = 1e-2  # TF32 on a GPU differs by less, another policy by more

__all__ = [
    "HeldOutEpisodes",
    "TrainingEpisodes",
    "TrainingSteps",
    "split_dones",
]


class TrainingSteps:
    """Follows the steps of a model in `learn`, as its callback sees them.

    Observations are those before VecNormalize, rewards those of the environment, and actions those
    of the policy, before they are clipped to the bounds of their space.

    Args:
        model: PPO, A2C or another on-policy algorithm.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._timesteps = -1  # of the model after the last step
        self._after: Any = None  # what it observed then
        self._raw: Any = None  # the same before VecNormalize
        self._unchecked: Policy | None = None  # a snapshot that has not acted yet
        self._rescaled: Any = None  # the VecNormalize of the rewards, if there is one,
        self._standardised: Any = None  # and of the observations

    def begin(self) -> None:
        """Prepare for `learn`; open episodes go on only if it continues where the last one ended.

        Otherwise only those sub-envs count which, SB3 says, are at the start of an episode. A model
        may also continue episodes whose first steps were not seen, or, after a callback stopped it,
        from an observation that is one step old: these are left out.
        """
        model = self.model
        self._rescaled = model.get_vec_normalize_env()
        self._standardised = observation_normaliser(model)
        continues = model.num_timesteps == self._timesteps
        if continues and model._last_obs is self._after:
            return
        self._raw = self._before_vec_normalize(model._last_obs)
        self._restart(np.array(model._last_episode_starts, dtype=bool) & (not continues))

    def step(self, local: dict[str, Any]) -> None:
        """Take in a step.

        Args:
            local: The local variables of `collect_rollouts`, after a step of the environment.
        """
        if self._unchecked is not None:
            _check_snapshot(self._unchecked, self._raw, local)
            self._unchecked = None
        # Rewards now, because SB3 later adds the value of the last state to those of cut episodes.
        env, new = self._rescaled, local["new_obs"]
        rewards = local["rewards"].copy() if env is None else env.get_original_reward()
        seen, self._raw = self._raw, self._before_vec_normalize(new)
        self._take(seen, rewards, local)
        self._timesteps, self._after = self.model.num_timesteps, new

    def _before_vec_normalize(self, observations: Any) -> Any:
        env = self._standardised
        return observations if env is None else env.get_original_obs()

    def _restart(self, starts: NDArray[np.bool_]) -> None:
        """Begin episodes in the sub-envs `starts`, and drop those that are open."""
        raise NotImplementedError

    def _take(self, seen: Any, rewards: NDArray[Any], local: dict[str, Any]) -> None:
        """Keep a step from the observations `seen` to those in `_raw`."""
        raise NotImplementedError


class TrainingEpisodes(TrainingSteps):
    """Records the episodes of a model in `learn`.

    Args:
        model: PPO or A2C.
        horizon: The time limit of the episodes, None if it is not known.
        file: Gets the episodes as they end.
    """

    def __init__(self, model: Any, horizon: int | None, file: EpisodeFile | None = None) -> None:
        super().__init__(model)
        env = model.get_env()
        settings = Settings(env.observation_space, env.action_space, horizon, audit=False)
        self.session = BatchedSession(settings, env.num_envs, SAME_STEP, file)
        self._policy_bytes = 0  # of one snapshot

    def follow(self, policy: Policy) -> int:
        """Record that this policy acts from the next step on."""
        self._unchecked = policy
        return self.session.follow(policy)

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
        # One selection: the record of a long training is not copied twice at each evaluation.
        settled = self.session.settled_mask()
        first = data.first_policies
        return data.select(episodes=settled & np.isin(first, np.unique(first[settled])[-last:]))

    def n_bytes(self) -> int:
        """Return about how much memory the snapshots and steps take."""
        settings, policies = self.session.settings, self.session.buffer.policies
        boxes: Any = (settings.observation_space, settings.action_space)
        sizes = (math.prod(box.shape or ()) * np.dtype(box.dtype).itemsize for box in boxes)
        a_step = 40 + sum(sizes)  # five numbers beside observation and action
        if self._policy_bytes == 0:
            arrays = policy_to_arrays(policies[0])[1].values()
            self._policy_bytes = sum(array.nbytes for array in arrays)
        return int(len(policies) * self._policy_bytes + self.session.steps * a_step)


class HeldOutEpisodes:
    """Plays and records fresh episodes of frozen policies, on an environment of its own.

    Nothing of the training run is touched: neither its environment nor its random numbers.

    Args:
        env: A Gymnasium environment or a VecEnv, like that of the training. A VecNormalize around
            it is left out, because policies carry the statistics of their time.
        model: The model that will be evaluated.
        seed: Seed of the environment and of the actions; None for that of the model, if any.
        max_steps: Length above which an episode is an error, because it may never end.
        file: Gets the episodes as they end.
    """

    def __init__(
        self,
        env: Any,
        model: Any,
        seed: int | None,
        max_steps: int,
        file: EpisodeFile | None = None,
    ) -> None:
        training = model.get_env()
        self.model = model
        self._env = check_eval_env(env, training)
        self.horizon = shared_time_limit(self._env, training)
        self._max_steps = max_steps
        self._rng = np.random.default_rng(model.seed if seed is None else seed)
        self._env.seed(int(self._rng.integers(2**31 - self._env.num_envs)))
        self._actions = self._env.action_space
        settings = Settings(self._env.observation_space, self._actions, self.horizon, held_out=1.0)
        self.session = BatchedSession(settings, self._env.num_envs, SAME_STEP, file)

    def play(self, policy: Policy, episodes: int, gamma: float = 1.0) -> Played:
        """Play and record episodes, a fixed share in each sub-env; gamma discounts the returns."""
        env, session = self._env, self.session
        tally = Tally(episodes, env.num_envs, gamma)
        session.quota = equal_shares(episodes, env.num_envs)
        observations = env.reset()
        session.restart(observations)
        session.follow(policy)
        try:
            while not tally.done:
                actions = self._choose(policy, observations)
                session.act(actions, None)
                observations, rewards, dones, infos = env.step(self._clip(actions))
                session.advance(observations, rewards, *split_dones(dones, infos))
                session.hand_over_if_due()
                tally.step(rewards, dones, infos)
                if self.horizon is None and tally.longest > self._max_steps:
                    raise never_ends(self._max_steps)
            session.hand_over()  # readers of the file wait for this evaluation
        finally:
            session.drop(warn=False)
            session.quota = None
        return tally.played()

    def _choose(self, policy: Policy, observations: Any) -> NDArray[Any]:
        actions = np.asarray(policy.sample(observations, self._rng))
        if isinstance(self._actions, spaces.Box):  # rounded before it is recorded and executed
            return actions.reshape(-1, *self._actions.shape).astype(self._actions.dtype)
        return actions

    def _clip(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions to execute, as SB3 executes those of its policies."""
        if isinstance(self._actions, spaces.Box):
            return np.asarray(np.clip(actions, self._actions.low, self._actions.high))
        return actions


def _check_snapshot(policy: Policy, observations: Any, local: dict[str, Any]) -> None:
    """Raise if a snapshot does not act like the model's policy, up to float32 on any device.

    Called at the first step of a snapshot only. Recorders compare every step, but rounding alone
    should not end a training run.

    Args:
        policy: The snapshot.
        observations: What the policy acted on, before VecNormalize.
        local: The local variables of `collect_rollouts`, after a step of the environment.
    """
    actions, log_probs = local["actions"], local["log_probs"].detach().cpu().numpy()
    found = policy.log_prob(observations, actions)
    wrong = ~(np.abs(found - log_probs) <= _TOLERANCE * (1.0 + np.abs(log_probs)))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"the log-probability of action {actions[i]} in sub-env {i} is {log_probs[i]:.6g}, "
            f"SB3 says, but the snapshot {policy!r} gives {found[i]:.6g}: the policy class must "
            "choose its actions by get_distribution"
        )


def split_dones(dones: NDArray[Any], infos: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which sub-envs terminated and which were truncated; SB3 never says both."""
    cut = np.array([info.get("TimeLimit.truncated", False) for info in infos], dtype=bool) & dones
    return dones & ~cut, cut
