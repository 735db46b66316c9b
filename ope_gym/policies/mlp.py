"""Small neural networks as policies; a file holds them completely, and reads without torch.

What the outputs of the network mean is the policy's: logits, values of actions, or a mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.policies import inputs
from ope_gym.policies.base import Floats, Snapshot, register_policy
from ope_gym.policies.network import Network, parameter
from ope_gym.policies.numerics import moments_of, sample_rows

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class _MlpPolicy(Snapshot):
    """Compared by a digest: the content itself would double the memory of many snapshots."""

    network: Network

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        digest = hashlib.blake2b(self.kind.encode(), digest_size=16)
        for name, array in sorted(self.arrays().items()):
            digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return (self.kind, digest.digest())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.network!r})"


class _FiniteMlp(_MlpPolicy):
    def _log_probs(self, observations: Tree) -> Iterator[tuple[slice, Floats]]:
        """Normalised log-probabilities (rows, A), a block of rows at a time."""
        raise NotImplementedError

    def log_prob(self, observations: Tree, actions: Tree) -> Floats:
        """Log-probability of each action, shape (n,)."""
        n, n_actions = batches.length(observations), len(self.network.layers[-1][1])
        chosen = inputs.choices(actions, n, n_actions)
        out = np.empty(n)
        for rows, logs in self._log_probs(observations):
            out[rows] = logs[np.arange(len(logs)), chosen[rows]]
        return out

    def probs(self, observations: Tree) -> Floats:
        """The probability of every action, shape (n, A)."""
        return np.concatenate([np.exp(logs) for _, logs in self._log_probs(observations)])

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[np.int64]:
        """One action a row; one uniform number each decides."""
        return sample_rows(self.probs(observations), rng)

    def log_prob_moments(self, observations: Tree) -> tuple[Floats, Floats]:
        """Mean and variance of the log-probability of its own actions."""
        return moments_of(self.probs(observations))


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxMlp(_FiniteMlp):
    """P(a | x) = softmax(network(x))_a."""

    kind: ClassVar[str] = "softmax-mlp"
    network: Network

    def _log_probs(self, observations: Tree) -> Iterator[tuple[slice, Floats]]:
        for rows, scores in self.network(observations, np.float32):
            logs = scores.astype(np.float64)
            logs -= logs.max(axis=1, keepdims=True)
            logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
            yield rows, logs

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The network's."""
        return self.network.arrays()

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> SoftmaxMlp:
        """The policy whose `arrays()` these are."""
        return cls(Network.from_arrays(arrays))


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class EpsilonGreedyMlp(_FiniteMlp):
    """The action of the largest output with probability 1 - ε, else any, each equally likely.

    Computed in float64: which of two outputs is larger must not depend on how rows are batched.
    """

    kind: ClassVar[str] = "epsilon-greedy-mlp"
    network: Network
    epsilon: float

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}: it is a probability")
        object.__setattr__(self, "epsilon", float(self.epsilon))

    def _log_probs(self, observations: Tree) -> Iterator[tuple[slice, Floats]]:
        for rows, values in self.network(observations, np.float64):
            probs = np.full(values.shape, self.epsilon / values.shape[1])
            probs[np.arange(len(values)), values.argmax(axis=1)] += 1.0 - self.epsilon
            with np.errstate(divide="ignore"):
                yield rows, np.log(probs)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The network's, and ε."""
        return self.network.arrays() | {"epsilon": np.array(self.epsilon)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> EpsilonGreedyMlp:
        """The policy whose `arrays()` these are."""
        return cls(Network.from_arrays(arrays), float(arrays["epsilon"]))

    def __repr__(self) -> str:
        return f"EpsilonGreedyMlp({self.network!r}, epsilon={self.epsilon:.4g})"


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class GaussianMlp(_MlpPolicy):
    """Continuous actions, a ~ N(network(x), diag exp(log_std)²); a density."""

    kind: ClassVar[str] = "gaussian-mlp"
    network: Network
    log_std: NDArray[np.float32]  # (m,)

    def __post_init__(self) -> None:
        log_std, parts = parameter("log_std", self.log_std), len(self.network.layers[-1][1])
        if log_std.shape != (parts,):
            raise ValueError(f"log_std has shape {log_std.shape}: the network has {parts} outputs")
        object.__setattr__(self, "log_std", log_std)

    def log_prob(self, observations: Tree, actions: Tree) -> Floats:
        """Log density of each action, shape (n,)."""
        n = batches.length(observations)
        given = np.asarray(actions)
        flat = given.reshape(len(given), math.prod(given.shape[1:]))
        chosen = inputs.parts(flat, n, len(self.log_std))
        out, scale = np.empty(n), np.exp(self.log_std.astype(np.float64))
        for rows, mean in self.network(observations, np.float32):
            out[rows] = -0.5 * np.square((chosen[rows] - mean) / scale).sum(axis=1)
        return out - self._log_scale()

    def sample(self, observations: Tree, rng: np.random.Generator) -> Floats:
        """One normal number for each part of the action, shape (n, m)."""
        mean = np.concatenate([x for _, x in self.network(observations, np.float32)])
        scale = np.exp(self.log_std.astype(np.float64))
        return np.asarray(mean + scale * rng.standard_normal(mean.shape))

    def log_prob_moments(self, observations: Tree) -> tuple[Floats, Floats]:
        """The log density is a constant minus half a χ²_m: -m/2 on average, variance m/2."""
        n, m = batches.length(observations), len(self.log_std)
        return np.full(n, -0.5 * m - self._log_scale()), np.full(n, 0.5 * m)

    def _log_scale(self) -> float:
        return float(self.log_std.sum(dtype=np.float64)) + len(self.log_std) * HALF_LOG_2PI

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The network's, and the log standard deviations."""
        return self.network.arrays() | {"log_std": self.log_std}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> GaussianMlp:
        """The policy whose `arrays()` these are."""
        return cls(Network.from_arrays(arrays), arrays["log_std"])
