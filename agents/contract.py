"""The protocol that a training loop expects of an agent, and helpers that the agents share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy


@runtime_checkable
class Agent(Protocol):
    """A learner whose policy changes only in `learn`.

    The loop takes `policy`, plays complete episodes with it, keeps the held-out ones back and gives
    the rest to `learn`. An agent for another kind of environment needs no more than this one, which
    moves the mean of a Gaussian to the actions of the better half of the episodes:

    >>> from ope_gym.policies import DiagonalGaussian
    >>> class BetterHalf:
    ...     def __init__(self) -> None:
    ...         self.policy = DiagonalGaussian(np.zeros((1, 1)), np.zeros(1), np.zeros(1))
    ...
    ...     def learn(self, episodes: Trajectories) -> None:
    ...         returns = episodes.returns()
    ...         better = episodes.select(episodes=returns >= np.median(returns))
    ...         mean = better.actions.mean(axis=0)
    ...         self.policy = DiagonalGaussian(np.zeros((1, 1)), mean, self.policy.log_std)
    >>> agent: Agent = BetterHalf()
    >>> rng = np.random.default_rng(0)
    >>> for _ in range(10):  # episodes of one step, the best action is 3
    ...     states = np.zeros((100, 1))
    ...     actions = agent.policy.sample(states, rng)
    ...     rewards = -np.abs(actions[:, 0] - 3.0)
    ...     log_probs = agent.policy.log_prob(states, actions)
    ...     agent.learn(Trajectories.from_arrays(
    ...         states, actions, rewards, log_probs,
    ...         offsets=np.arange(101), policies=[agent.policy], terminated=True,
    ...     ))
    >>> bool(abs(agent.policy.bias[0] - 3.0) < 0.5)
    True
    """

    @property
    def policy(self) -> Policy:
        """Frozen snapshot that acts now; only `learn` replaces it."""
        ...

    def learn(self, episodes: Trajectories) -> None:
        """Update the policy from complete episodes, none of them held out; if none, do nothing."""
        ...


def refuse_held_out(episodes: Trajectories) -> None:
    """Raise if an episode is held out from the learner."""
    if episodes.held_out.any():
        raise ValueError(
            f"episode {int(episodes.held_out.argmax())} is held out: learning from it would bias "
            "an evaluation that uses it; call learn(episodes.select(held_out=False))"
        )


def rewards_to_go(episodes: Trajectories, gamma: float = 1.0) -> FloatArray:
    """Return (S,) Σ_{u ≥ t} γ^(u-t) r_u, summed within the episode of each step."""
    if len(episodes) == 0:
        return np.empty(0)
    if len(episodes) == 1:  # the same sums, faster for agents that learn after each episode
        backwards = accumulate(episodes.rewards[::-1].tolist(), lambda later, r: r + gamma * later)
        return np.array(list(backwards))[::-1]
    where = (episodes.steps, episodes.episode_ids)
    sums = np.zeros((int(episodes.lengths.max()), len(episodes)))  # (T, n), 0 after an end
    sums[where] = episodes.rewards
    for t in range(len(sums) - 2, -1, -1):
        sums[t] += gamma * sums[t + 1]
    return np.asarray(sums[where])


def centred_rewards_to_go(episodes: Trajectories, gamma: float) -> FloatArray:
    """Return (S,) G_i,t - b_t, exactly 0 where G is equal in all episodes that reach step t."""
    to_go = rewards_to_go(episodes, gamma)
    mean = np.bincount(episodes.steps, to_go) / np.bincount(episodes.steps)
    centred = to_go - mean[episodes.steps]
    # agents take only the direction or the proportions of these, so rounding errors alone would
    # move the policy
    centred[np.abs(centred) <= 1e-9 * np.abs(to_go).max()] = 0.0
    return np.asarray(centred)


def standardised(
    x: FloatArray, mean: FloatArray, std: FloatArray
) -> tuple[FloatArray, Callable[[FloatArray], tuple[FloatArray, FloatArray]]]:
    """Return (S, d + 1) standardised observations and a column of ones, and the way back.

    That is a function which turns (m, d + 1) weights of these into weights and bias of raw ones.
    """
    scale = np.where(std < 1e-8, 1.0, std)  # a constant feature is 0 then: its weight stays

    def raw(weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        slopes = weights[:, :-1] / scale
        return slopes, weights[:, -1] - slopes @ mean

    return np.column_stack([(x - mean) / scale, np.ones(len(x))]), raw
