"""List the modules that a reader passes on the way through an evaluation.

    python benchmarks/route.py

CartPole is recorded, a policy evaluated and the headline read; then one line a module, by the order
in which its functions are first called, with those functions. Compiled kernels leave no trace.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import gymnasium as gym
import numpy as np

import ope_gym
from ope_gym.policies import LinearSigmoid
from wrappers.record import RecordTrajectories

_EPISODES = 40


def record() -> tuple[Any, LinearSigmoid]:
    """Return a recorder of episodes of two policies, and another policy."""
    env = RecordTrajectories(gym.make("CartPole-v1"))
    rng = np.random.default_rng(0)
    policies = [LinearSigmoid(rng.normal(size=4)) for _ in range(3)]
    for policy in policies[:2]:
        env.follow(policy)
        for episode in range(_EPISODES):
            observation, _ = env.reset(seed=episode)
            ended = False
            while not ended:
                action = policy.sample(np.asarray(observation)[None], rng)[0]
                observation, _, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated
    return env, policies[2]


def called(env: Any, target: LinearSigmoid) -> dict[str, list[str]]:
    """Return the functions called from `evaluate` to the headline, by module of ope_gym."""
    found: dict[str, list[str]] = {}

    def profile(frame: Any, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        code: CodeType = frame.f_code
        if event == "call" and module.startswith("ope_gym.") and code.co_name != "<module>":
            names = found.setdefault(module, [])
            if code.co_qualname not in names:
                names.append(code.co_qualname)

    sys.setprofile(profile)
    try:
        print(ope_gym.evaluate(env, target).headline)
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    env, target = record()
    ope_gym.evaluate(env, target)  # imports and compiles
    modules = called(env, target)
    for module, names in modules.items():
        print(f"{module:34} {len(names):3}  {', '.join(names)}")
    print(f"{len(modules)} modules, {sum(map(len, modules.values()))} functions")


if __name__ == "__main__":
    main()
