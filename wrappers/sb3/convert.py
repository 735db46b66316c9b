"""Make policies of Stable-Baselines3 models, as they are or as they were saved."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from types import SimpleNamespace
from typing import Any

from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

from ope_gym.policies import Policy
from wrappers.sb3.snapshots import known_policy

__all__ = ["load_policy", "policy_of"]

# settings that only one class saves, in the order in which they tell
_SIGNS: tuple[tuple[str, type[BaseAlgorithm]], ...] = (
    ("exploration_fraction", DQN),
    ("clip_range", PPO),
    ("gae_lambda", A2C),
)


def policy_of(model: Any) -> Policy:
    """Return a model's policy as it is now; raise for its parts, which do not say everything."""
    if not isinstance(model, BaseAlgorithm):
        kind = type(model).__name__
        raise TypeError(
            f"this is {kind}, a part of a Stable-Baselines3 model: give the model itself, "
            "evaluate(data, model) instead of evaluate(data, model.policy), because the model also "
            "knows VecNormalize and its exploration rate"
        )
    return known_policy(model)


def load_policy(path: str) -> Policy:
    """Return the policy of a model that was saved as a .zip file: PPO, A2C or DQN.

    The statistics of a VecNormalize are those of `NAME_vecnormalize.pkl` beside `NAME.zip`.
    As with `PPO.load`, loading runs code in the file: load only files that you trust.
    """
    try:
        with zipfile.ZipFile(path) as file:
            saved = json.loads(file.read("data"))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a model that Stable-Baselines3 saved: {error}") from error
    kind = next((kind for sign, kind in _SIGNS if sign in saved), None)
    if kind is None:
        raise ValueError(
            f"{path} holds neither PPO, A2C nor DQN: load the model yourself and give it instead"
        )
    model: Any = kind.load(path, device="cpu")
    statistics = f"{os.path.splitext(path)[0]}_vecnormalize.pkl"
    if os.path.exists(statistics):
        env: Any = SimpleNamespace(  # the statistics need no environment
            num_envs=1, observation_space=model.observation_space, render_mode=None
        )
        model._vec_normalize_env = VecNormalize.load(statistics, env)
    elif saved.get("_last_original_obs") is not None:
        where = f"its statistics are not in {statistics}: load both, and give the model"
        if kind is not DQN:
            raise ValueError(f"{path} was trained with VecNormalize, and {where}")
        # off-policy algorithms keep the original observation of a step in any case
        warnings.warn(
            f"{path} does not say whether it was trained with VecNormalize; if so, {where}",
            stacklevel=2,
        )
    return known_policy(model)
