"""Playing episodes of a policy in an environment that is recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ope_gym.arguments import whole
from ope_gym.data import spaces
from ope_gym.policies import Policy, check_target
from wrappers import vector
from wrappers.record import RecordTrajectories
from wrappers.recording.autoreset import autoreset_of
from wrappers.recording.batched import equal_shares
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
    """Play and record complete episodes with a policy, and return the number of the policy.

    Each sub-env of a vector env plays a share of the episodes that is fixed in advance, the first
    `episodes % num_envs` one more than the others. (To take the first episodes that end would
    favour short ones.) Episodes beyond the share of a sub-env are not recorded. An episode that is
    open when the call begins is dropped.

    >>> import gymnasium as gym
    >>> from ope_gym.policies import Uniform
    >>> env = vector.RecordTrajectories(gym.make_vec("CartPole-v1", num_envs=4))
    >>> collect(env, Uniform(2), 10, np.random.default_rng(0), seed=1)
    0
    >>> len(env.buffer)
    10

    Args:
        env: A recorder.
        policy: The policy, which the recorder is told to follow.
        episodes: How many, at least 1.
        rng: Generator that draws the actions, or a seed for one.
        seed: Seed of the first reset; None continues the environment's own random numbers.
        on_episode: Called after each episode with the number of episodes finished so far.
    """
    whole("episodes", episodes)
    if seed is not None:
        whole("seed", seed, 0)
    if isinstance(env, str):
        raise TypeError(
            f"env is {env!r}, the name of an environment: give a recorder, "
            f"RecordTrajectories(gym.make({env!r}))"
        )
    if not isinstance(rng, np.random.Generator):
        whole("rng", rng, 0, "give a generator of numpy, or a seed of 0 or more")
    policy = check_target(policy, "policy")
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
    observation_space, action_space = env.observation_space, env.action_space
    k = -1
    for i in range(episodes):
        observation, _ = env.reset(seed=seed if i == 0 else None)
        if i == 0:  # after the reset, so that no episode is under way
            k = env.follow(policy)
        over = False
        while not over:
            actions = policy.sample(spaces.stack(observation_space, [observation]), rng)
            action = spaces.only_action(action_space, actions)
            observation, _, terminated, truncated, _ = env.step(action)
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
    observation_space, action_space = env.single_observation_space, env.single_action_space
    is_column = spaces.is_column(observation_space)
    by_hand = autoreset_of(env).by_hand
    before, done = env.finished_episodes, 0
    env.limit(equal_shares(episodes, env.num_envs))
    try:
        observations, _ = env.reset(seed=seed)
        k = env.follow(policy)
        while done < episodes:
            batch = observations
            if not is_column:
                leaves = flatten(observation_space, observations)
                batch = unflatten(observation_space, iter(leaves))
            actions = spaces.env_actions(action_space, policy.sample(batch, rng))
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
