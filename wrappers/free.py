"""Turn what a loop over a Gymnasium vector environment has into steps for a free evaluation.

    steps = VectorSteps(envs)
    observations, _ = envs.reset(seed=1)
    steps.restart(observations)
    for rollout in training:
        free.follow(policy)
        for _ in range(128):
            actions = ...
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            steps.step(actions, observations, rewards, terminations, truncations, infos)
        free.add(**steps.take())

The autoreset mode decides what a row is. In NEXT_STEP mode the step after the end of an episode
only resets the sub-env: such rows are skipped. In SAME_STEP mode the observation of the end is in
the infos. In DISABLED mode the loop resets by itself, and says so by `restart`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from wrappers.recording.autoreset import autoreset_of

__all__ = ["VectorSteps"]


class VectorSteps:
    """Collects steps of a vector environment, as `ope_gym.online.FreeEvaluation.add` takes them.

    Args:
        envs: The vector environment, for its number of sub-envs and its autoreset mode.
    """

    def __init__(self, envs: VectorEnv[Any, Any, NDArray[Any]]) -> None:
        self._autoreset = autoreset_of(envs)
        self._num_envs = envs.num_envs
        self._seen: NDArray[Any] | None = None  # what the policy acts on next
        self._over = np.zeros(envs.num_envs, dtype=bool)  # sub-envs whose next step is a reset
        self._rows: list[dict[str, NDArray[Any]]] = []

    def restart(self, observations: NDArray[Any], mask: NDArray[np.bool_] | None = None) -> None:
        """Take the observations after a reset of all sub-envs, or of those in the mask.

        In the middle of episodes also call `free.stream.restart()`: these are cut off.
        """
        self._seen = _stacked(observations)
        self._over = np.zeros_like(self._over) if mask is None else self._over & ~np.asarray(mask)

    def step(
        self,
        actions: NDArray[Any],
        observations: NDArray[Any],
        rewards: NDArray[Any],
        terminations: NDArray[Any],
        truncations: NDArray[Any],
        infos: dict[str, Any],
        *,
        skip: NDArray[np.bool_] | None = None,
    ) -> None:
        """Take a step: the actions, and what `envs.step(actions)` returned.

        Args:
            actions: One for each sub-env.
            observations: As returned, like the next four.
            rewards: One for each sub-env.
            terminations: Whether episodes ended by themselves.
            truncations: Whether they were cut off.
            infos: They may hold the last observations.
            skip: Sub-envs whose whole episode is to be left out.
        """
        if self._seen is None:
            raise RuntimeError("step before restart: call restart(observations) after envs.reset()")
        if self._autoreset.by_hand and self._over.any():
            raise RuntimeError(
                f"sub-envs {np.flatnonzero(self._over).tolist()} have ended: reset them with "
                "options={'reset_mask': ...}, then call restart(observations, mask)"
            )
        done = np.logical_or(terminations, truncations)
        after = _stacked(observations)
        row = {
            "observations": self._seen,
            "actions": np.array(actions),
            "rewards": np.array(rewards, dtype=np.float64),
            "terminated": np.array(terminations, dtype=bool),
            "truncated": np.array(truncations, dtype=bool),
            "following": after,
            "skip": np.zeros(self._num_envs, dtype=bool) if skip is None else skip,
        }
        if self._autoreset.skips_step:
            row["skip"], self._over = row["skip"] | self._over, done
        elif self._autoreset.by_hand:
            self._over = done
        elif done.any():
            row["following"] = _with_ends(after, done, infos)
        self._rows.append(row)
        self._seen = after

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> dict[str, NDArray[Any]]:
        """Return the steps since the last call, arrays (T, N, ...), as arguments of `add`."""
        if not self._rows:
            raise RuntimeError("there are no steps since the last call")
        rows, self._rows = self._rows, []
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _stacked(observations: Any) -> NDArray[Any]:
    """Return a copy of observations; parts of tuples, one number each, become columns."""
    return (
        np.stack(observations, axis=-1)
        if isinstance(observations, tuple)
        else np.array(observations)
    )


def _with_ends(after: NDArray[Any], done: NDArray[np.bool_], infos: dict[str, Any]) -> NDArray[Any]:
    """Return the observations with those of the ends in place of those of the next episodes."""
    ends = infos.get("final_obs", infos.get("final_observation"))
    if ends is None:
        raise ValueError(
            "infos have no final_obs, although episodes ended: in SAME_STEP mode the observations "
            "of their ends are needed. Hand the infos of envs.step over as they are"
        )
    following = after.copy()
    for i in np.flatnonzero(done):
        following[i] = ends[i]
    return following
