"""Which environments held-out episodes of a Stable-Baselines3 model may be played on."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

__all__ = ["common_limit", "held_out_env", "horizon_of", "refuse_normalised"]


def held_out_env(env: Any, training: VecEnv) -> VecEnv:
    """As a VecEnv without VecNormalize; refused if it is not like that of the training."""
    wrapped = BaseAlgorithm._wrap_env(env.venv if isinstance(env, VecNormalize) else env)
    inner = unwrap_vec_normalize(wrapped)
    if inner is not None and (inner.norm_obs or inner.norm_reward):
        raise ValueError(
            f"eval_env is {type(wrapped).__name__} around VecNormalize, which changes the "
            "observations or rewards that are to be recorded: leave it out, or put VecNormalize "
            "outermost"
        )
    _refuse_shared(wrapped, training)
    refuse_normalised(wrapped, "eval_env", rewards=True)
    refuse_normalised(training, "the training env", rewards=False)
    for name in ("observation_space", "action_space"):
        here, there = getattr(wrapped, name), getattr(training, name)
        if here != there:
            raise ValueError(f"{name} of eval_env is {here}, but that of the model is {there}")
    return wrapped


def refuse_normalised(env: VecEnv, name: str, *, rewards: bool) -> None:
    """Raise if sub-envs normalise observations, or rewards, with Gymnasium's own wrappers.

    Args:
        env: The environment, whose sub-envs may be in other processes.
        name: For the message.
        rewards: Whether its rewards are recorded.
    """
    if _wrapped(env, gym.wrappers.NormalizeObservation):
        raise ValueError(
            f"{name} has gymnasium.wrappers.NormalizeObservation, whose statistics change at every "
            "step and differ between environments, so that they are no part of the policy. Use "
            "VecNormalize, outermost: policies carry its statistics"
        )
    if rewards and _wrapped(env, gym.wrappers.NormalizeReward):
        raise ValueError(
            f"{name} has gymnasium.wrappers.NormalizeReward: values would be those of rescaled "
            "rewards. Leave it out of eval_env; in training use VecNormalize(env, norm_obs=False), "
            "of which the rewards before are recorded, or record_training=False"
        )


def _wrapped(env: VecEnv, wrapper: Any) -> bool:
    try:
        return any(env.env_is_wrapped(wrapper))
    except AttributeError:  # of a VecEnv that steps many games itself, without sub-envs
        return False


def time_limit(env: VecEnv) -> float | None:
    """Of all sub-envs, ∞ if their specs name none; None if it is not known or they differ."""
    try:
        specs = env.get_attr("spec")
        limits = {math.inf if s.max_episode_steps is None else s.max_episode_steps for s in specs}
    except (AttributeError, TypeError, EOFError):  # sub-envs without a spec, or one not picklable
        return None
    return limits.pop() if len(limits) == 1 else None


def horizon_of(env: VecEnv) -> int | None:
    """The longest possible episode, None if there is no limit or it is not known."""
    limit = time_limit(env)
    return None if limit is None or math.isinf(limit) else int(limit)


def common_limit(env: VecEnv, training: VecEnv) -> int | None:
    """The time limit of both, None if there is none or one is not known; refused if they differ."""
    here, there = time_limit(env), time_limit(training)
    if here is None or there is None:
        return None
    if here != there:
        raise ValueError(
            f"eval_env has {_words(here)}, but the training env has {_words(there)}: the values of "
            "the two are not comparable. Make both with the same max_episode_steps"
        )
    return horizon_of(env)


def _words(limit: float) -> str:
    return "no time limit" if math.isinf(limit) else f"a time limit of {limit:.0f} steps"


def _refuse_shared(env: VecEnv, training: VecEnv) -> None:
    """Episodes on the environment of the training would break off those that it is in."""
    here, there = (getattr(x.unwrapped, "envs", None) or [x.unwrapped] for x in (env, training))
    mine = {id(getattr(x, "unwrapped", x)) for x in here}
    if any(id(getattr(x, "unwrapped", x)) in mine for x in there):
        raise ValueError("eval_env is the environment of the training: make another one")
