"""What a training loop needs of an agent, and what the agents here share."""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np

from ope_gym.data.trajectories import Trajectories
from ope_gym.policies.base import Floats, Policy


@runtime_checkable
class Agent(Protocol):
    """A learner whose policy stands still between two calls of `learn`.

    The loop takes `policy`, plays complete episodes with it, keeps the held-out ones back and hands
    over the rest. An agent for another kind of env needs nothing more than this one, which moves
    the mean of a Gaussian to the actions of the better half of the episodes:

    >>> from ope_gym.policies.closed_form import DiagonalGaussian
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
        """The frozen snapshot that acts now; only `learn` changes it."""
        ...

    def learn(self, episodes: Trajectories) -> None:
        """One update from complete episodes, none of them held out; nothing if there are none."""
        ...


def refuse_held_out(episodes: Trajectories) -> None:
    """Raise ValueError if an episode was to be kept from the learner."""
    if episodes.held_out.any():
        raise ValueError(
            f"episode {int(episodes.held_out.argmax())} is held out, and an evaluation that relies "
            "on it would be wrong if it were learned from: give "
            "learn(episodes.select(held_out=False))"
        )


def rewards_to_go(episodes: Trajectories, gamma: float = 1.0) -> Floats:
    """(S,) Σ_{u ≥ t} γ^(u-t) r_u inside the episode of each step."""
    if len(episodes) == 0:
        return np.empty(0)
    if len(episodes) == 1:  # the same sums; agents that learn after each episode need them quickly
        backwards = accumulate(episodes.rewards[::-1].tolist(), lambda later, r: r + gamma * later)
        return np.array(list(backwards))[::-1]
    where = (episodes.steps, episodes.episode_ids)
    sums = np.zeros((int(episodes.lengths.max()), len(episodes)))  # (T, n), 0 after an end
    sums[where] = episodes.rewards
    for t in range(len(sums) - 2, -1, -1):
        sums[t] += gamma * sums[t + 1]
    return np.asarray(sums[where])
