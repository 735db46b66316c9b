"""Tianshou: a hook of the collector that trains.

    values = FreeValues(lambda: TorchPolicy(actor, forward=logits), num_envs=8, horizon=500)
    Collector(policy, envs, buffer, on_step_hook=StepHook(values))

The collector must step all environments at a time: ask it for steps, not for episodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wrappers.loops.values import FreeValues

__all__ = ["StepHook"]

_WAITING = 64  # vector steps that are handed over together
_NAMES = {
    "observations": "obs",
    "actions": "act",
    "rewards": "rew",
    "terminated": "terminated",
    "truncated": "truncated",
    "following": "obs_next",
}


class StepHook:
    """Hands the steps of a collector to free values, in the middle of a rollout.

    Args:
        values: Where steps go; its policy acts while the hook is called.
    """

    def __init__(self, values: FreeValues) -> None:
        self._values = values
        self._rows: list[dict[str, Any]] = []

    def __call__(self, action_batch: Any, rollout_batch: Any) -> None:
        """Take a step of all environments."""
        if len(rollout_batch) != self._values.free.stream.num_envs:
            raise ValueError(
                f"the collector stepped {len(rollout_batch)} environments, not all "
                f"{self._values.free.stream.num_envs}: collect steps (collection_step_num_env_steps"
                "), not episodes, and as many as a multiple of the environments"
            )
        self._rows.append({n: np.array(rollout_batch[key]) for n, key in _NAMES.items()})
        if len(self._rows) == _WAITING:
            rows, self._rows = self._rows, []
            self._values.add(**{name: np.stack([row[name] for row in rows]) for name in _NAMES})
