"""Episodes of a Stable-Baselines3 VecEnv: those it trains on, and fresh ones that are held out."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.data.trajectories import Trajectories
from ope_gym.policies.closed_form import Policy
from wrappers.recording.batched import VectorRecorder
from wrappers.sb3.environments import common_limit, held_out_env
from wrappers.sb3.snapshots import normaliser

_TOLERANCE = 1e-2  # TF32 on a GPU differs by less, another policy by more

__all__ = ["HeldOutEpisodes", "TrainingEpisodes", "check", "observed"]


class TrainingEpisodes:
    """Records what a model does in `learn`, as its callback sees it.

    Observations are those before VecNormalize, rewards those of the environment, actions those of
    the policy, before they are clipped to the bounds of their space.

    Args:
        model: PPO or A2C.
        horizon: The time limit of the episodes, None if it is not known.
    """

    def __init__(self, model: Any, horizon: int | None) -> None:
        env = model.get_env()
        self.model = model
        self.recorder = VectorRecorder(
            env.observation_space,
            env.action_space,
            horizon,
            env.num_envs,
            held_out=0.0,
            path=None,
            audit=False,
        )
        self._timesteps = -1  # of the model after the last recorded step
        self._after: Any = None  # what it observed then
        self._now: Any = None  # the same before VecNormalize
        self._unchecked: Policy | None = None  # that has not acted yet

    def begin(self) -> None:
        """`learn` begins; open episodes go on only if it goes on where the last record ended.

        Otherwise those sub-envs are recorded that SB3 says are at the start of an episode. A model
        may also go on in the middle of episodes whose first steps nobody recorded, or, after a
        callback stopped it, from an observation that is one step old: these are left out.
        """
        recorder, model = self.recorder, self.model
        going_on = model.num_timesteps == self._timesteps
        if going_on and model._last_obs is self._after:
            return
        recorder.drop(warn=False)
        self._now = observed(model, model._last_obs)
        recorder.rows.see(self._now)
        if not going_on:
            recorder.begin(np.flatnonzero(model._last_episode_starts))

    def follow(self, policy: Policy) -> int:
        """From the next step on this policy acts."""
        recorder, self._unchecked = self.recorder, policy
        return recorder.follow(
            policy, recorder.rows.clock, mid_episode=bool(recorder.under_way().any())
        )

    def step(self, seen: dict[str, Any]) -> None:
        """The local variables of `collect_rollouts`, after a step of the environment."""
        recorder = self.recorder
        # now, since SB3 later adds the value of the last state to the rewards of cut episodes
        normalised = self.model.get_vec_normalize_env()
        rewards = seen["rewards"] if normalised is None else normalised.get_original_reward()
        log_probs = seen["log_probs"].detach().cpu().numpy()
        if self._unchecked is not None:
            check(self._unchecked, self._now, seen)
            self._unchecked = None
        recorder.act(seen["actions"], log_probs)
        self._now = observed(self.model, seen["new_obs"])
        recorder.advance(self._now, rewards, *ends(seen["dones"], seen["infos"]), seen["dones"])
        (over,) = np.nonzero(seen["dones"])
        if len(over):  # a VecEnv resets in the same step
            recorder.begin(over)
        recorder.drain_if_due()
        self._timesteps, self._after = self.model.num_timesteps, seen["new_obs"]

    def settled(self, last: int) -> Trajectories:
        """Of the `last` policies, without the bias against long episodes if their limit is known.

        (Selected at once: the record of a long training is not copied at each evaluation.)
        """
        recorder, data = self.recorder, self.recorder.buffer.view()
        if data.horizon is None:
            return data.select(last=last)
        settled = recorder.settled_mask(recorder.rows.clock, None)
        first = data.policy_ids[data.offsets[:-1]]
        return data.select(episodes=settled & np.isin(first, np.unique(first[settled])[-last:]))


class HeldOutEpisodes:
    """Plays and records fresh episodes of frozen policies, on an environment of its own.

    Nothing of the training run is touched: neither its environment nor its random numbers.

    Args:
        env: A Gymnasium environment or a VecEnv, like that of the training. A VecNormalize around
            it is left out, because policies carry the statistics of their time.
        model: That will be evaluated.
        seed: Of the environment and of the actions; None for that of the model, if it has one.
        max_steps: Of an episode; a longer one is an error, since it may never end.
    """

    def __init__(self, env: Any, model: Any, seed: int | None, max_steps: int) -> None:
        training = model.get_env()
        self.model = model
        self._env = held_out_env(env, training)
        self.horizon = common_limit(self._env, training)
        self._max_steps = max_steps
        self._rng = np.random.default_rng(model.seed if seed is None else seed)
        self._env.seed(int(self._rng.integers(2**31 - self._env.num_envs)))
        self._actions = self._env.action_space
        self.recorder = VectorRecorder(
            self._env.observation_space,
            self._actions,
            self.horizon,
            self._env.num_envs,
            held_out=1.0,
            path=None,
            audit=True,
        )

    def play(self, policy: Policy, episodes: int) -> int:
        """Record so many episodes, a share fixed in advance in each sub-env; the policy's number.

        (The first episodes to end, whichever they are, would be the short ones.)
        """
        env, recorder = self._env, self.recorder
        n, before = env.num_envs, recorder.finished_episodes
        recorder.quota = episodes // n + (np.arange(n) < episodes % n)
        observations = env.reset()
        recorder.rows.see(observations)
        recorder.begin(np.arange(n))
        k = recorder.follow(policy, recorder.rows.clock, mid_episode=False)
        try:
            while recorder.finished_episodes - before < episodes:
                actions = self._choose(policy, observations)
                recorder.act(actions, None)
                observations, rewards, dones, infos = env.step(self._executable(actions))
                recorder.advance(observations, rewards, *ends(dones, infos), dones)
                (over,) = np.nonzero(dones)
                if len(over):
                    recorder.begin(over)
                if self.horizon is None:
                    self._refuse_endless()
        finally:
            recorder.drop(warn=False)
            recorder.quota = None
        return k

    def _refuse_endless(self) -> None:
        if self.recorder.longest_open() > self._max_steps:
            raise RuntimeError(
                f"a held-out episode is not over after max_steps={self._max_steps:,} steps, and "
                "eval_env names no time limit: make it and the training env with the same "
                "max_episode_steps, or give OPECallback a larger max_steps"
            )

    def _choose(self, policy: Policy, observations: Any) -> NDArray[Any]:
        actions = np.asarray(policy.sample(observations, self._rng))
        if isinstance(self._actions, spaces.Box):  # rounded before it is recorded and executed
            return actions.reshape(-1, *self._actions.shape).astype(self._actions.dtype)
        return actions

    def _executable(self, actions: NDArray[Any]) -> NDArray[Any]:
        if isinstance(self._actions, spaces.Box):  # as SB3 does with the actions of its policies
            return np.asarray(np.clip(actions, self._actions.low, self._actions.high))
        return actions


def check(policy: Policy, observations: Any, seen: dict[str, Any]) -> None:
    """A snapshot must act like the policy: tried at its first step, up to float32 on any device.

    Not at every step, as recorders do: rounding alone should not end somebody's training run.

    Args:
        policy: The snapshot.
        observations: That the policy acted on, before VecNormalize.
        seen: The local variables of `collect_rollouts`, after a step of the environment.
    """
    actions, log_probs = seen["actions"], seen["log_probs"].detach().cpu().numpy()
    found = policy.log_prob(observations, actions)
    wrong = ~(np.abs(found - log_probs) <= _TOLERANCE * (1.0 + np.abs(log_probs)))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(
            f"the log-probability of action {actions[i]} in sub-env {i} is {log_probs[i]:.6g}, "
            f"SB3 says, but the snapshot {policy!r} gives {found[i]:.6g}: the policy class must "
            "choose its actions by get_distribution"
        )


def observed(model: Any, observations: Any) -> Any:
    """The latest observations of a model, as they are before VecNormalize."""
    env = normaliser(model)
    return observations if env is None else env.get_original_obs()


def ends(dones: NDArray[Any], infos: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which sub-envs terminated, and which were cut; SB3 calls both at once terminated."""
    cut = np.array([info.get("TimeLimit.truncated", False) for info in infos], dtype=bool) & dones
    return dones & ~cut, cut
