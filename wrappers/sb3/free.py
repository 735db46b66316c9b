"""Hand the steps that a Stable-Baselines3 model trains on to a free evaluation of its policy."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.online import FreeEstimate, FreeEvaluation
from ope_gym.online.stream import MOST_NUMBERS
from ope_gym.policies import Policy
from wrappers.sb3.environments import horizon_of
from wrappers.sb3.episodes import check_snapshot, raw_observations, split_dones
from wrappers.sb3.snapshots import observation_normaliser

__all__ = ["FreeSteps"]

_MOST_ROWS = 4096  # vector steps that wait: short rollouts are handed over together


class FreeSteps:
    """Collects the steps of `learn` cheaply, and values the policies that take them.

    Arrays are joined when an evaluation is due. Observations are those before VecNormalize, rewards
    those of the environment, and actions those of the policy, before they are clipped.

    Args:
        model: PPO, A2C or another on-policy algorithm.
        gamma: Discount of the value.
        level: Of the intervals.
        seed: Of the episodes that are played in a learned environment.
    """

    def __init__(self, model: Any, *, gamma: float, level: float, seed: int) -> None:
        env, actions = model.get_env(), model.action_space
        self.model = model
        self.free = FreeEvaluation(
            env.num_envs,
            horizon=horizon_of(env),
            action_bounds=(actions.low, actions.high) if isinstance(actions, spaces.Box) else None,
            gamma=gamma,
            level=level,
            seed=seed,
        )
        self._rows: list[tuple[Any, Any, NDArray[Any], NDArray[Any]]] = []
        self._ends: list[tuple[int, int, Any, bool]] = []  # row, sub-env, observation, truncated
        self._timesteps = -1  # of the model after the last step
        self._after: Any = None  # what it observed then
        self._raw: Any = None  # the same before VecNormalize
        self._unchecked: Policy | None = None  # a snapshot that has not acted yet
        self._normalised = model.get_vec_normalize_env()
        self._standardised = observation_normaliser(model) is not None
        numbers = int(np.prod(model.observation_space.shape, dtype=int))
        self._kept = None if numbers <= MOST_NUMBERS else np.empty((env.num_envs, 0), np.float32)

    def begin(self) -> None:
        """Prepare for `learn`; open episodes go on only if it continues where the last one ended.

        A model may also continue episodes whose first steps were not seen, or, after a callback
        stopped it, from an observation that is one step old: these are left out.
        """
        self.hand_over()
        model = self.model
        continues = model.num_timesteps == self._timesteps
        if continues and model._last_obs is self._after:
            return
        self._raw = raw_observations(model, model._last_obs)
        if not continues and np.all(model._last_episode_starts):
            self.free.stream.restart()
        else:
            self.free.stream.lose_track()

    def follow(self, policy: Policy) -> None:
        """Say that this policy acts from the next step on."""
        self.hand_over()
        self._unchecked = policy
        self.free.follow(policy)

    def step(self, local: dict[str, Any]) -> None:
        """Keep a step.

        Args:
            local: The local variables of `collect_rollouts`, after a step of the environment.
        """
        if self._unchecked is not None:
            check_snapshot(self._unchecked, self._raw, local)
            self._unchecked = None
        new, dones = local["new_obs"], local["dones"]
        # Rewards now, because SB3 later adds the value of the last state to those of cut episodes.
        normalised = self._normalised
        rewards = (
            local["rewards"].copy() if normalised is None else normalised.get_original_reward()
        )
        if dones.any():
            self._note_ends(dones, local["infos"])
        seen = self._raw if self._kept is None else self._kept
        self._rows.append((seen, local["actions"], rewards, dones))
        self._raw = normalised.get_original_obs() if self._standardised else new
        self._timesteps, self._after = self.model.num_timesteps, new
        if len(self._rows) >= _MOST_ROWS:
            self.hand_over()

    def hand_over(self) -> None:
        """Give the steps so far to the evaluation."""
        if not self._rows:
            return
        seen, actions, rewards, dones = zip(*self._rows, strict=True)
        observations = np.stack([*seen, self._raw if self._kept is None else self._kept])
        following = observations[1:].copy()
        truncated = np.zeros((len(seen), self.free.stream.num_envs), dtype=bool)
        for row, env, last, cut in self._ends:
            following[row, env] = last if self._kept is None else 0.0
            truncated[row, env] = cut
        terminated = np.stack(dones).astype(bool) & ~truncated
        self._rows, self._ends = [], []
        self.free.add(
            observations[:-1],
            np.stack(actions),
            np.stack(rewards),
            terminated,
            truncated,
            following,
        )

    def evaluate(self, timesteps: int, fresh: NDArray[Any] | None) -> FreeEstimate | None:
        """Return a provisional value of the policy followed; None while no episode has begun."""
        self.hand_over()
        return self.free.evaluate(timesteps, fresh=fresh)

    def settle(self) -> list[FreeEstimate]:
        """Return settled values of earlier policies."""
        if not self.free.may_settle(len(self._rows)):
            return []
        self.hand_over()
        return self.free.settle()

    def _note_ends(self, dones: NDArray[Any], infos: Any) -> None:
        """Keep the last observations of the episodes that ended: `new_obs` has the next ones."""
        _, cut = split_dones(dones, infos)
        row = len(self._rows)
        for i in np.flatnonzero(dones):
            last = infos[i].get("terminal_observation")
            if last is None:  # a VecEnv that does not tell: as if nothing had happened
                last = self._raw[i]
            elif self._standardised:
                last = self._normalised.unnormalize_obs(last)
            self._ends.append((row, int(i), last, bool(cut[i])))
