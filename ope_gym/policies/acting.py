"""Say what free evaluation asks of a policy: its actions, never the probability of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.policies.base import as_policy

_DRAWS = 32  # actions drawn for the moments of a policy that cannot tell them
# Nine nodes integrate a squashed normal number to 1e-3 of its range, even where it saturates.
_NODES, _WEIGHTS = hermegauss(9)
_LOG_STD = (-20.0, 2.0)  # to which SAC and TQC clip it


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


@dataclass(frozen=True)
class Argmax:
    """The most probable of finitely many actions of a policy."""

    policy: Any

    def probs(self, observations: Any) -> FloatArray:
        """Return 1 for the most probable action, else 0; (n, A)."""
        probs = self.policy.probs(observations)
        return np.asarray(np.eye(probs.shape[1])[probs.argmax(axis=1)])

    def sample(self, observations: Any, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the most probable actions; nothing is drawn."""
        return np.asarray(self.policy.probs(observations).argmax(axis=1))


@dataclass(frozen=True)
class Mean:
    """The mean action of a policy over real numbers."""

    policy: Any

    def action_moments(self, observations: Any) -> tuple[FloatArray, FloatArray]:
        """Return the mean of each part of the action, and no variance; (n, m)."""
        mean = action_moments(self.policy, observations, np.random.default_rng(0))[0]
        return mean, np.zeros_like(mean)

    def sample(self, observations: Any, rng: np.random.Generator) -> FloatArray:
        """Return the means; nothing is drawn."""
        return self.action_moments(observations)[0]


@dataclass(frozen=True)
class Squashed:
    """Actions in a box, from a network whose outputs tanh squashes to [-1, 1].

        u = tanh(mu(x) + sigma(x) z)        SAC, TQC: the network returns mu and log sigma
        u = clip(tanh(mu(x)) + noise z)     TD3, DDPG

    with normal numbers z, and u stretched to the box.

    Args:
        network: Outputs of observations.
        low: Lower end of the box.
        high: Upper end of the box.
        noise: Standard deviation of the noise; None if the network knows sigma.
        deterministic: Whether z is 0.
    """

    network: Callable[[Any], NDArray[Any]]
    low: FloatArray
    high: FloatArray
    noise: FloatArray | None = None
    deterministic: bool = False

    def _actions(self, observations: Any, z: NDArray[Any] | float) -> FloatArray:
        outputs = self.network(observations).astype(np.float64)
        mu, rest = outputs[:, : self.low.size], outputs[:, self.low.size :]
        if self.noise is None:
            squashed = np.tanh(mu + np.exp(np.clip(rest, *_LOG_STD)) * z)
        else:
            squashed = np.clip(np.tanh(mu) + self.noise * z, -1.0, 1.0)
        return np.asarray(self.low + 0.5 * (squashed + 1.0) * (self.high - self.low))

    def sample(self, observations: Any, rng: np.random.Generator) -> FloatArray:
        """Return one action a row, (n, m)."""
        z = 0.0 if self.deterministic else rng.standard_normal((len(observations), self.low.size))
        return self._actions(observations, z)

    def action_moments(self, observations: Any) -> tuple[FloatArray, FloatArray]:
        """Return mean and variance of each part of the action, (n, m), by Gauss-Hermite."""
        if self.deterministic:
            actions = self._actions(observations, 0.0)
            return actions, np.zeros_like(actions)
        actions, weights = self._actions(observations, _NODES[:, None, None]), _WEIGHTS
        mean = np.average(actions, axis=0, weights=weights)
        return mean, np.average((actions - mean) ** 2, axis=0, weights=weights)
