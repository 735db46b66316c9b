"""How often a policy can be evaluated within a share of the CPU time of its training.

Both times are counted, not measured: vector steps and gradient steps of the training, features and
steps of an evaluation. So a run with a seed is evaluated at the same timesteps on every machine,
and its best policy and `stop_after` do not depend on how busy that is. A count is right within a
factor of about two; where it errs it is meant to space evaluations too far: a training is taken for
one of small networks on an environment that costs next to nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from ope_gym.online.stream import MOST_NUMBERS

__all__ = ["spacing"]

_SHARE = 0.03  # of the CPU time: next to nothing
_FEWEST = 2  # evaluations of a short training, whatever they cost: one alone shows no progress
_OFTEN, _POINTS = 10_000, 50  # timesteps between evaluations, and how many of these are enough

# CPU milliseconds of one machine; only their ratios matter (`benchmarks/callback_overhead.py`).
_STEP, _UPDATE = 0.42, 1.5  # a step of all environments, and a gradient step
_RECORD = 0.008  # recording a step of all environments
_FIT, _COLUMN, _PRODUCT = 60.0, 1.5, 3e-3  # least squares, at once and settled, by its columns
_PLAY = 0.11  # a step of all episodes that are played in a learned environment


def spacing(model: Any, horizon: int | None) -> int:
    """Return the timesteps between evaluations; the last one comes at the end of the training.

    Args:
        model: Any algorithm.
        horizon: Time limit of an episode; None without one.
    """
    left = int(model._total_timesteps) - model.num_timesteps
    steps = left / model.n_envs
    rollout = model.n_envs
    if isinstance(model, OnPolicyAlgorithm):
        rollout *= model.n_steps
        batches = -(-rollout // getattr(model, "batch_size", rollout))
        updates = left / rollout * getattr(model, "n_epochs", 1) * batches
    else:
        every = getattr(model.train_freq, "frequency", 1)  # at least: it may count episodes
        updates = steps / every * (model.gradient_steps if model.gradient_steps > 0 else every)
    time = _SHARE * (steps * _STEP + updates * _UPDATE) - steps * _RECORD
    affordable = max(int(time / _evaluation(model, horizon)), _FEWEST)
    usual = max(_OFTEN, int(model._total_timesteps) // _POINTS)
    return int(max(usual, -(-left // affordable) - rollout // 2))  # the nearest rollout


def _evaluation(model: Any, horizon: int | None) -> float:
    """Return what it takes to value a policy, at once and when it is settled."""
    numbers = int(np.prod(model.observation_space.shape or (), dtype=int))
    if not 0 < numbers <= MOST_NUMBERS:
        return _FIT
    features = 1 + numbers + (numbers * (numbers + 1) // 2 if numbers <= 16 else 0)
    actions = model.action_space
    finite = isinstance(actions, spaces.Discrete)
    columns = features * (
        int(actions.n) if finite else int(np.prod(actions.shape or (), dtype=int))
    )
    return _FIT + _COLUMN * columns + _PRODUCT * columns**2 + _PLAY * (horizon or 0)
