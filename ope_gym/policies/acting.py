"""Say what free evaluation asks of a policy: its actions, never the probability of one."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.policies.base import as_policy

_DRAWS = 32  # actions drawn for the moments of a policy that cannot tell them


class ActingPolicy(Protocol):
    """A frozen snapshot of a policy; it may also have `probs`, or `action_moments`."""

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        """Return one action a row, drawn with `rng` only."""
        ...


def check_acting(policy: object, name: str) -> ActingPolicy:
    """Return a policy, or what can be made one of, as one that acts; raise if it cannot."""
    acting = as_policy(policy, name)
    if callable(getattr(acting, "sample", None)):
        return acting  # type: ignore[no-any-return]
    raise TypeError(
        f"{name} is {policy!r}, which has no sample(observations, rng): give a frozen snapshot of "
        "the policy, or None if there can be none"
    )


def probs_of(policy: ActingPolicy, observations: NDArray[Any]) -> FloatArray | None:
    """Return the probabilities (n, A) of finitely many actions; None if they are real numbers."""
    late = isinstance(getattr(type(policy), "probs", None), property)
    if late and len(observations):  # a `TorchPolicy` knows what its actions are once it was asked
        policy.sample(observations[:1], np.random.default_rng(0))
    probs = getattr(policy, "probs", None)
    return None if probs is None else np.asarray(probs(observations))


def count_actions(policy: ActingPolicy, observations: NDArray[Any]) -> int:
    """Return how many actions there are, 0 for real numbers."""
    probs = probs_of(policy, observations[:1])
    return 0 if probs is None else probs.shape[1]


def action_moments(
    policy: ActingPolicy, observations: NDArray[Any], rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance (n, m) of the actions of a policy of real numbers."""
    ask = getattr(policy, "action_moments", None)
    exact = None if ask is None else ask(observations)
    if exact is not None:
        mean, variance = exact
        return np.asarray(mean), np.asarray(variance)
    drawn = [np.asarray(policy.sample(observations, rng)) for _ in range(_DRAWS)]
    stacked = np.stack(drawn).reshape(_DRAWS, len(observations), -1)
    return stacked.mean(axis=0), stacked.var(axis=0, ddof=1)
