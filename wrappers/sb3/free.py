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
from wrappers.sb3.episodes import TrainingSteps

__all__ = ["FreeSteps"]

_MOST_ROWS = 4096  # vector steps that wait: short rollouts are handed over together


class FreeSteps(TrainingSteps):
    """Collects the steps of `learn` cheaply, and values the policies that take them.

    Arrays are joined when an evaluation is due.

    Args:
        model: PPO, A2C or another on-policy algorithm.
        gamma: Discount of the value.
        level: Level of the intervals.
        seed: Seed of the episodes that are played in a learned environment.
    """

    def __init__(self, model: Any, *, gamma: float, level: float, seed: int) -> None:
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
        self._rows: list[tuple[Any, Any, NDArray[Any], NDArray[Any]]] = []
        self._ends: list[tuple[int, int, Any, bool]] = []  # row, sub-env, observation, truncated
        numbers = int(np.prod(model.observation_space.shape, dtype=int))
        self._kept = None if numbers <= MOST_NUMBERS else np.empty((env.num_envs, 0), np.float32)

    def begin(self) -> None:
        """Prepare for `learn`."""
        self.hand_over()
        super().begin()

    def follow(self, policy: Policy) -> None:
        """Say that this policy acts from the next step on."""
        self.hand_over()
        self._unchecked = policy
        self.free.follow(policy)

    def _restart(self, starts: NDArray[np.bool_]) -> None:
        if starts.all():
            self.free.stream.restart()
        else:
            self.free.stream.lose_track()

    def _take(self, seen: Any, rewards: NDArray[Any], local: dict[str, Any]) -> None:
        dones = local["dones"]
        if True in dones.tolist():  # at every step, and faster than any()
            self._note_ends(seen, dones, local["infos"])
        self._rows.append(
            (seen if self._kept is None else self._kept, local["actions"], rewards, dones)
        )
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
        return self.free.settle()

    def _note_ends(self, seen: Any, dones: NDArray[Any], infos: Any) -> None:
        """Keep the last observations of the episodes that ended: `new_obs` has the next ones."""
        row = len(self._rows)
        for i in np.flatnonzero(dones).tolist():
            last = infos[i].get("terminal_observation")
            if last is None:  # a VecEnv that does not tell: as if nothing had happened
                last = seen[i]
            elif self._standardised is not None:
                last = self._standardised.unnormalize_obs(last)
            cut = bool(infos[i].get("TimeLimit.truncated", False))
            self._ends.append((row, i, last, cut))
