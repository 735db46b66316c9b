"""Playing episodes of a policy on a recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.vector import AutoresetMode

from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.spaces import Space
from ope_gym.policies.closed_form import Policy
from wrappers import vector
from wrappers.record import RecordTrajectories
from wrappers.recording.rows import flatten, unflatten

OnEpisode = Callable[[int], object]


def collect(
    env: RecordTrajectories | vector.RecordTrajectories,
    policy: Policy,
    episodes: int,
    rng: np.random.Generator | int,
    *,
    seed: int | None = None,
    on_episode: OnEpisode | None = None,
) -> int:
    """Play and record complete episodes with a policy; returns the number of the policy.

    Each sub-env of a vector env plays a share of the episodes that is fixed in advance, the first
    `episodes % num_envs` one more than the others. (The first episodes to end, whichever they are,
    would be the short ones.) What a sub-env plays beyond its share is not recorded. An episode that
    is open when the call begins is dropped.

    >>> import gymnasium as gym
    >>> from ope_gym.policies.closed_form import Uniform
    >>> env = vector.RecordTrajectories(gym.make_vec("CartPole-v1", num_envs=4))
    >>> collect(env, Uniform(2), 10, np.random.default_rng(0), seed=1)
    0
    >>> len(env.buffer)
    10

    Args:
        env: A recorder.
        policy: The policy, which the recorder is told to follow.
        episodes: How many, at least 1.
        rng: Draws the actions; a generator, or a seed.
        seed: Of the first reset; None goes on with the environment's own random numbers.
        on_episode: Called after each episode with the number of those finished so far.
    """
    if episodes < 1:
        raise ValueError(f"episodes={episodes} must be at least 1")
    if isinstance(env, vector.RecordTrajectories):
        play: Callable[..., int] = _play_vector
    elif isinstance(env, RecordTrajectories):
        play = _play_single
    else:
        raise TypeError(f"env is {env}, not a recorder: wrap it in RecordTrajectories, outermost")
    env.abandon()
    try:
        return play(env, policy, episodes, np.random.default_rng(rng), seed, on_episode)
    except BaseException:
        env.abandon()
        raise


def _play_single(
    env: RecordTrajectories,
    policy: Policy,
    episodes: int,
    rng: np.random.Generator,
    seed: int | None,
    on_episode: OnEpisode | None,
) -> int:
    seen, chosen = env.observation_space, env.action_space
    k = -1
    for i in range(episodes):
        observation, _ = env.reset(seed=seed if i == 0 else None)
        if i == 0:  # after the reset: no episode is under way
            k = env.follow(policy)
        over = False
        while not over:
            actions = policy.sample(spaces.stack(seen, [observation]), rng)
            observation, _, terminated, truncated, _ = env.step(_first(chosen, actions))
            over = terminated or truncated
        if on_episode is not None:
            on_episode(i + 1)
    return k


def _play_vector(
    env: vector.RecordTrajectories,
    policy: Policy,
    episodes: int,
    rng: np.random.Generator,
    seed: int | None,
    on_episode: OnEpisode | None,
) -> int:
    n = env.num_envs
    seen, chosen = env.single_observation_space, env.single_action_space
    simple = spaces.is_column(seen)
    by_hand = env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    before, done = env.finished_episodes, 0
    env.limit(episodes // n + (np.arange(n) < episodes % n))
    try:
        observations, _ = env.reset(seed=seed)
        k = env.follow(policy)
        while done < episodes:
            batch = observations if simple else unflatten(seen, iter(flatten(seen, observations)))
            actions = _executable(chosen, policy.sample(batch, rng))
            observations, _, terminations, truncations, _ = env.step(actions)
            finished = env.finished_episodes - before
            if on_episode is not None:
                for i in range(done, finished):
                    on_episode(i + 1)
            done = finished
            if by_hand and done < episodes:
                over = terminations | truncations
                if over.any():
                    observations, _ = env.reset(options={"reset_mask": over})
    finally:
        env.limit(None)
    return k


def _executable(space: Space, actions: Tree) -> Any:
    """A batch of actions as the environment takes it, floats in the precision it computes with."""
    if isinstance(space, gym_spaces.Tuple):
        return tuple(_executable(part, x) for part, x in zip(space.spaces, actions, strict=True))
    if isinstance(space, gym_spaces.Dict):
        return {key: _executable(part, actions[key]) for key, part in space.spaces.items()}
    if isinstance(space, gym_spaces.Box):
        return np.asarray(actions).astype(space.dtype, copy=False)
    return actions if spaces.is_column(space) else tuple(actions)


def _first(space: Space, actions: Tree) -> Any:
    """The only action of a batch of one."""
    if isinstance(space, gym_spaces.Tuple):
        return tuple(_first(part, x) for part, x in zip(space.spaces, actions, strict=True))
    if isinstance(space, gym_spaces.Dict):
        return {key: _first(part, actions[key]) for key, part in space.spaces.items()}
    return _executable(space, actions)[0]
