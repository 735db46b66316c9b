"""The agents: PoWER, epsilon-greedy Monte-Carlo control, softmax-linear natural gradient.

`agents.deep` has those of Stable-Baselines3.
"""

from __future__ import annotations

import math
import re
from typing import Any

import gymnasium as gym

from agents.contract import Agent
from agents.gaussian_power import GaussianPower
from agents.monte_carlo import MonteCarloControl, epsilon_1, epsilon_2, table_shape
from agents.power import Power
from agents.softmax_linear import SoftmaxLinearAgent

__all__ = [
    "Agent",
    "GaussianPower",
    "MonteCarloControl",
    "Power",
    "SoftmaxLinearAgent",
    "epsilon_1",
    "epsilon_2",
    "make_agent",
]

_MOST_CELLS = 1_000_000  # of a table: more would never all be visited


def make_agent(
    env: gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any],
    *,
    gamma: float = 1.0,
    seed: int = 0,
) -> Agent:
    """Return an agent that suits an environment, or a vector of environments.

    Args:
        env: Its spaces and the id of its spec decide.
        gamma: Discount of the returns the agent maximises.
        seed: Seed of the agent's own random numbers, if it has any.

    Raises:
        ValueError: If no agent suits it; the message lists what is supported.
    """
    observations = getattr(env, "single_observation_space", env.observation_space)
    actions = getattr(env, "single_action_space", env.action_space)
    name = env.spec.id if env.spec is not None else ""
    width = 0  # of observations of one axis
    if isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1:
        width = observations.shape[0]
    if isinstance(actions, gym.spaces.Discrete) and actions.start == 0:
        dims = table_shape(observations)
        if dims is not None and math.prod(dims) <= _MOST_CELLS:
            return MonteCarloControl(dims, int(actions.n), gamma=gamma)
        if width and re.fullmatch(r"CartPole-v\d+", name) and actions.n == 2:
            return Power(width, gamma=gamma, seed=seed)
        if width:
            return SoftmaxLinearAgent(width, int(actions.n), gamma=gamma)
    if isinstance(actions, gym.spaces.Box) and width and len(actions.shape) == 1:
        return GaussianPower(width, actions.low, actions.high, gamma=gamma)
    raise ValueError(
        f"no small agent for {name or env} with observations {observations} and actions {actions}: "
        "they take discrete observations and actions (Monte-Carlo control), or observations of one "
        "axis with discrete (softmax-linear; PoWER on CartPole) or continuous actions (PoWER)"
    )
