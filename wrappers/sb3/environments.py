"""Checks of the environments that a Stable-Baselines3 model trains on and is evaluated on."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

__all__ = [
    "check_eval_env",
    "check_not_normalised",
    "horizon_of",
    "rescales_rewards",
    "shared_time_limit",
]


def check_eval_env(env: Any, training: VecEnv) -> VecEnv:
    """Return an env as a VecEnv without VecNormalize; raise if it is unlike the training env."""
    wrapped = BaseAlgorithm._wrap_env(env.venv if isinstance(env, VecNormalize) else env)
    inner = unwrap_vec_normalize(wrapped)
    if inner is not None and (inner.norm_obs or inner.norm_reward):
        raise ValueError(
            f"eval_env is {type(wrapped).__name__} around VecNormalize, which changes observations "
            "or rewards: leave it out, or put VecNormalize outermost"
        )
    here, there = (getattr(x.unwrapped, "envs", None) or [x.unwrapped] for x in (wrapped, training))
    mine = {id(getattr(x, "unwrapped", x)) for x in here}
    if any(id(getattr(x, "unwrapped", x)) in mine for x in there):  # it would cut off its episodes
        raise ValueError("eval_env is the environment of the training: make another one")
    check_not_normalised(wrapped, "eval_env", rewards=True)
    check_not_normalised(training, "the training env", rewards=False)
    for name in ("observation_space", "action_space"):
        own, other = getattr(wrapped, name), getattr(training, name)
        if own != other:
            raise ValueError(f"{name} of eval_env is {own}, but that of the model is {other}")
    return wrapped


def check_not_normalised(env: VecEnv, name: str, *, rewards: bool) -> None:
    """Raise if sub-envs normalise observations, or rewards, with Gymnasium's own wrappers.

    Args:
        env: The environment, whose sub-envs may be in other processes.
        name: How the message names the environment.
        rewards: Whether its rewards count, and must not be normalised either.
    """
    if _has_wrapper(env, gym.wrappers.NormalizeObservation):
        raise ValueError(
            f"{name} has gymnasium.wrappers.NormalizeObservation, whose statistics change at every "
            "step and differ between environments: use VecNormalize, outermost, whose statistics "
            "are part of a snapshot of the policy"
        )
    if rewards and rescales_rewards(env):
        raise ValueError(
            f"{name} has gymnasium.wrappers.NormalizeReward: values would be those of rescaled "
            "rewards. Leave it out; in training use VecNormalize(env, norm_obs=False), before "
            "which rewards are recorded"
        )


def rescales_rewards(env: VecEnv) -> str:
    """Return why rewards are not those of the environment; "" if they are."""
    if _has_wrapper(env, gym.wrappers.NormalizeReward):
        return (
            "the training env has gymnasium.wrappers.NormalizeReward, and values would be those of "
            "rescaled rewards (VecNormalize(env, norm_obs=False) would do no harm)"
        )
    return ""


def _has_wrapper(env: VecEnv, wrapper: Any) -> bool:
    try:
        return any(env.env_is_wrapped(wrapper))
    except AttributeError:  # a VecEnv that steps many games itself, without sub-envs
        return False


def _time_limit(env: VecEnv) -> float | None:
    """Return the time limit of all sub-envs, ∞ for none; None if it is unknown or they differ."""
    try:
        specs = env.get_attr("spec")
        limits = {math.inf if s.max_episode_steps is None else s.max_episode_steps for s in specs}
    except (AttributeError, TypeError, EOFError):  # sub-envs without a spec, or one not picklable
        return None
    return limits.pop() if len(limits) == 1 else None


def horizon_of(env: VecEnv) -> int | None:
    """Return the length of the longest possible episode; None if it is unlimited or unknown."""
    limit = _time_limit(env)
    return None if limit is None or math.isinf(limit) else int(limit)


def shared_time_limit(env: VecEnv, training: VecEnv) -> int | None:
    """Return the time limit of both, None if unlimited or unknown; raise if they differ."""
    here, there = _time_limit(env), _time_limit(training)
    if here is None or there is None:
        return None
    if here != there:
        some = [f"a time limit of {x:.0f} steps" for x in (here, there)]
        words = [x.replace("a time limit of inf steps", "no time limit") for x in some]
        raise ValueError(
            f"eval_env has {words[0]}, but the training env has {words[1]}: values of the two are "
            "not comparable. Make both with the same max_episode_steps"
        )
    return horizon_of(env)
