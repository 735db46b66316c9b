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
    """The agent that suits an env, or a vector of them.

    Args:
        env: Only its spaces and the id of its spec are looked at.
        gamma: Discount of the returns the agent maximises.
        seed: Of the agent's own random numbers, if it has any.

    Raises:
        ValueError: If no agent suits it; the message lists what is supported.
    """
    seen = getattr(env, "single_observation_space", env.observation_space)
    done = getattr(env, "single_action_space", env.action_space)
    name = env.spec.id if env.spec is not None else ""
    if isinstance(done, gym.spaces.Discrete) and done.start == 0:
        if name == "Blackjack-v1":
            return MonteCarloControl(table_shape(seen), int(done.n), gamma=gamma)
        if isinstance(seen, gym.spaces.Box) and len(seen.shape) == 1:
            if re.fullmatch(r"CartPole-v\d+", name) and done.n == 2:
                return Power(seen.shape[0], gamma=gamma, seed=seed)
            return SoftmaxLinearAgent(seen.shape[0], int(done.n), gamma=gamma)
    raise ValueError(
        f"no agent for {name or env} with observations {seen} and actions {done}. Supported: "
        "CartPole-v1 and -v0 (PoWER); Blackjack-v1 (Monte-Carlo control); any env with a Box "
        "observation of one axis and Discrete actions from 0, e.g. Acrobot-v1 and MountainCar-v0 "
        "(softmax-linear). FlattenObservation makes a Box of most spaces; for anything else write "
        "a class with `policy` and `learn`, see agents.contract.Agent"
    )
