"""Follow the steps that a Stable-Baselines3 model trains on, as its callbacks see them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from ope_gym.online import FreeEvaluation
from ope_gym.online.stream import MOST_NUMBERS
from ope_gym.policies import Policy
from wrappers.sb3.environments import horizon_of
from wrappers.sb3.snapshots import observation_normaliser, snapshot, why_no_snapshot

__all__ = ["FreeSteps", "TrainingSteps", "split_dones"]

_MOST_ROWS = 4096  # vector steps that wait: short rollouts are handed over together
_TOLERANCE = 1e-2  # of log-probabilities: TF32 on a GPU differs by less, another policy by more


class TrainingSteps:
    """Follows the steps of a model in `learn`.

    Observations are those before VecNormalize, rewards those of the environment, and actions those
    of the policy, before they are clipped to the bounds of their space.

    Args:
        model: Any algorithm.
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

        Otherwise only those sub-envs count which are at the start of an episode. A model may also
        continue episodes whose first steps were not seen, or, after a callback stopped it, from an
        observation that is one step old: these are left out.
        """
        model = self.model
        self._rescaled = model.get_vec_normalize_env()
        self._standardised = observation_normaliser(model)
        continues = model.num_timesteps == self._timesteps
        if continues and model._last_obs is self._after:
            return
        self._raw = self._before_vec_normalize(model._last_obs)
        starts = np.array(model._last_episode_starts, dtype=bool) & (not continues)
        if not isinstance(model, OnPolicyAlgorithm):  # SB3 does not keep these up to date there
            starts &= model.num_timesteps == 0
        self._restart(starts)

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


class FreeSteps(TrainingSteps):
    """Hands the steps of `learn` to a free evaluation, many at a time.

    Args:
        model: Any algorithm.
        gamma: Discount of the value.
        level: Confidence level of the intervals.
        seed: Seed of the episodes that are played in a learned environment.
        deterministic: Whether the value of the greedy policy is wanted.
    """

    def __init__(
        self, model: Any, *, gamma: float, level: float, seed: int, deterministic: bool
    ) -> None:
        super().__init__(model)
        env, actions = model.get_env(), model.action_space
        self.free = FreeEvaluation(
            env.num_envs,
            horizon=horizon_of(env),
            action_bounds=(actions.low, actions.high) if isinstance(actions, spaces.Box) else None,
            gamma=gamma,
            level=level,
            seed=seed,
        )
        self._deterministic = deterministic
        self.unknown = why_no_snapshot(model)  # why only returns count, "" if actions do too
        if not self.unknown:
            numbers = int(np.prod(model.observation_space.shape, dtype=int))
            if numbers > MOST_NUMBERS:
                self.unknown = f"its observations have {numbers:,} numbers, such as images"
        self._rows: list[tuple[Any, Any, NDArray[Any], NDArray[Any]]] = []
        self._ends: list[tuple[int, int, Any, bool]] = []  # row, sub-env, observation, truncated

    def begin(self) -> None:
        """Prepare for `learn`."""
        self.hand_over()
        super().begin()

    def follow(self) -> None:
        """Take a snapshot of the policy that acts from the next step on."""
        self.hand_over()
        if self.unknown:
            self.free.follow(None)
            return
        acting = snapshot(self.model)
        self._unchecked = acting if isinstance(acting, Policy) else None
        greedy = snapshot(self.model, deterministic=True) if self._deterministic else None
        self.free.follow(acting, greedy)

    def _restart(self, starts: NDArray[np.bool_]) -> None:
        if starts.all():
            self.free.stream.restart()
        else:
            self.free.stream.lose_track()

    def _take(self, seen: Any, rewards: NDArray[Any], local: dict[str, Any]) -> None:
        dones = local["dones"]
        if True in dones.tolist():  # at every step, and faster than any()
            self._note_ends(seen, dones, local["infos"])
        actions = np.array(local["actions"])  # thousands of tensors are slow to free at once
        self._rows.append((None if self.unknown else seen, actions, rewards, dones))
        if len(self._rows) >= _MOST_ROWS:
            self.hand_over()

    def hand_over(self) -> None:
        """Give the steps so far to the evaluation."""
        if not self._rows:
            return
        seen, actions, rewards, dones = zip(*self._rows, strict=True)
        ends, self._rows, self._ends = self._ends, [], []
        truncated = np.zeros((len(seen), self.free.stream.num_envs), dtype=bool)
        for row, env, _, cut in ends:
            truncated[row, env] = cut
        outcome = np.stack(rewards), np.stack(dones).astype(bool) & ~truncated, truncated
        if self.unknown:
            self.free.add(None, None, *outcome)
            return
        observations = np.stack([*seen, self._raw])
        following = observations[1:].copy()
        for row, env, last, _ in ends:
            following[row, env] = last
        self.free.add(observations[:-1], np.stack(actions), *outcome, following)

    def _note_ends(self, seen: Any, dones: NDArray[Any], infos: Any) -> None:
        """Keep the last observations of the episodes that ended: `new_obs` has the next ones."""
        row = len(self._rows)
        for i in np.flatnonzero(dones).tolist():
            last = None if self.unknown else infos[i].get("terminal_observation")
            if last is None:  # a VecEnv that does not tell: as if nothing had happened
                last = None if self.unknown else seen[i]
            elif self._standardised is not None:
                last = self._standardised.unnormalize_obs(last)
            cut = bool(infos[i].get("TimeLimit.truncated", False))
            self._ends.append((row, i, last, cut))


def _check_snapshot(policy: Policy, observations: Any, local: dict[str, Any]) -> None:
    """Raise if the first action of a snapshot is not as probable as SB3 says, up to float32."""
    if "log_probs" not in local:  # DQN
        return
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
