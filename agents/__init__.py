"""The agents: PoWER, epsilon-greedy Monte-Carlo control, softmax-linear natural gradient."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym

from agents.contract import Agent
from agents.monte_carlo import MonteCarloControl, epsilon_1, epsilon_2, table_shape
from agents.power import Power
from agents.softmax_linear import SoftmaxLinearAgent

__all__ = [
    "Agent",
    "MonteCarloControl",
    "Power",
    "SoftmaxLinearAgent",
    "epsilon_1",
    "epsilon_2",
    "make_agent",
]


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
    if isinstance(actions, gym.spaces.Discrete) and actions.start == 0:
        if name == "Blackjack-v1":
            return MonteCarloControl(table_shape(observations), int(actions.n), gamma=gamma)
        if isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1:
            if re.fullmatch(r"CartPole-v\d+", name) and actions.n == 2:
                return Power(observations.shape[0], gamma=gamma, seed=seed)
            return SoftmaxLinearAgent(observations.shape[0], int(actions.n), gamma=gamma)
    raise ValueError(
        f"no agent for {name or env} with observations {observations} and actions {actions}. "
        "Supported: "
        "CartPole-v1 and -v0 (PoWER); Blackjack-v1 (Monte-Carlo control); any env with a Box "
        "observation of one axis and Discrete actions from 0, e.g. Acrobot-v1 and MountainCar-v0 "
        "(softmax-linear). FlattenObservation makes a Box of most spaces; for anything else write "
        "a class with `policy` and `learn`, see agents.contract.Agent"
    )
