"""TorchRL: the batches of a collector as steps.

values = FreeValues(lambda: TorchPolicy(network), num_envs=1, horizon=500)
for batch in collector:
    values.add(**steps_of(batch))
    ...  # the loss and the optimiser of the loop

The collector may step one environment or several.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["steps_of"]


def steps_of(batch: Any, observation: str = "observation") -> dict[str, Any]:
    """Return the steps of a batch as arguments of `FreeValues.add`.

    Args:
        batch: TensorDict of a collector, of shape (T,) for one environment or (N, T).
        observation: Key of the observations.
    """
    after = batch["next"]
    columns = {
        "observations": batch[observation],
        "actions": batch["action"],
        "rewards": after["reward"].squeeze(-1),
        "terminated": after["terminated"].squeeze(-1),
        "truncated": after["truncated"].squeeze(-1),
        "following": after[observation],
    }
    steps = {name: _by_time(column, batch.ndim) for name, column in columns.items()}
    if steps["actions"].dtype == bool:  # one-hot, as GymEnv gives discrete actions by default
        steps["actions"] = steps["actions"].argmax(axis=-1)
    return steps


def _by_time(column: Any, axes: int) -> Any:
    """Return (T, N, ...) of a tensor (T, ...) or (N, T, ...)."""
    array = column.detach().cpu().numpy()
    return array[:, None] if axes == 1 else np.swapaxes(array, 0, 1)
