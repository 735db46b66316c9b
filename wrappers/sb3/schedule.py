"""How often a policy can be evaluated within a share of the CPU time of its training.

Both times are counted, not measured: vector steps and gradient steps of the training, rows and
features of an evaluation. So a run with a seed is evaluated at the same timesteps on every machine,
and its best policy and `stop_after` do not depend on how busy that is. A count is right within a
factor of about two; where it errs it is meant to space evaluations too far: a training is taken for
one of small networks on an environment that costs next to nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from ope_gym.online.free import widest_window
from ope_gym.online.stream import MOST_NUMBERS

__all__ = ["affordable_spacing"]

# CPU milliseconds of one machine; only their ratios matter (`benchmarks/callback_overhead.py`).
_STEP, _UPDATE = 0.42, 1.5  # a step of all environments, and a gradient step
_RECORD = 0.008  # recording a step of all environments
_FIT, _COLUMN, _PRODUCT = 25.0, 0.5, 1e-3  # least squares on `_ROWS` rows of few to many columns
_ROWS = 32_768
_LEARN, _PLAY = 10.0, 0.11  # learning an environment, and a step of all episodes played there


def affordable_spacing(model: Any, horizon: int | None, timesteps: int, share: float) -> int:
    """Return the timesteps between evaluations that take a share of a training's CPU time.

    The last evaluation comes at the end. If that is all that can be afforded, the spacing is the
    whole training.

    Args:
        model: PPO, A2C or another on-policy algorithm.
        horizon: Time limit of an episode; None without one.
        timesteps: Timesteps of the training.
        share: Share of its CPU time.
    """
    rollout = model.n_steps * model.n_envs
    updates = getattr(model, "n_epochs", 1) * -(-rollout // getattr(model, "batch_size", rollout))
    training = timesteps / rollout * (model.n_steps * _STEP + updates * _UPDATE)
    first, again = _evaluation(model, horizon)
    left = share * training - timesteps / model.n_envs * _RECORD
    count = int((left + again) / (first + again))  # the last one is not valued again
    return -(-timesteps // max(count, 1))


def _evaluation(model: Any, horizon: int | None) -> tuple[float, float]:
    """Return what it takes to value a policy at once, and to value it again when it is settled."""
    numbers, actions = int(np.prod(model.observation_space.shape, dtype=int)), model.action_space
    features = 1 + numbers + (numbers * (numbers + 1) // 2 if numbers <= 16 else 0)
    features = features if numbers <= MOST_NUMBERS else 1
    if isinstance(actions, spaces.Discrete):
        columns = features * (int(actions.n) - 1)
    else:
        columns = int(np.prod(actions.shape or (), dtype=int)) * (features + min(features, 17))
    timed = features * (1 if horizon is None else 2)
    rows = widest_window(model.n_envs, horizon or 0) * model.n_envs / _ROWS
    fit = rows * (_FIT + _COLUMN * (columns + timed) + _PRODUCT * columns**2)
    if horizon is None or numbers > MOST_NUMBERS:
        return fit, fit
    return fit + _LEARN + _PLAY * horizon + _COLUMN * timed, fit
