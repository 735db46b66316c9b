"""Small neural networks as policies, in numpy: a file holds them completely, and needs no torch.

Observations become float32, are standardised with frozen statistics where there are any, and pass
through linear layers with one activation between them (`Network`). What the outputs mean is the
policy's: logits, values of actions, or a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym.arguments import probability
from ope_gym.arrays import FloatArray
from ope_gym.batches import Tree
from ope_gym.policies.base import Finite, Gaussian, Snapshot, register_policy
from ope_gym.policies.numerics import epsilon_greedy, log_softmax, within

Layer: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Weights (outputs, inputs) and bias (outputs,)."""


def _relu(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.maximum(x, 0.0, out=x))


def _tanh(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.tanh(x, out=x))


def _elu(x: NDArray[Any]) -> NDArray[Any]:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


def _leaky_relu(x: NDArray[Any]) -> NDArray[Any]:
    return np.where(x > 0, x, x * x.dtype.type(0.01))


def _silu(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(x * (0.5 + 0.5 * np.tanh(0.5 * x)))


ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "Tanh": _tanh,
    "ReLU": _relu,
    "ELU": _elu,
    "LeakyReLU": _leaky_relu,
    "SiLU": _silu,
}
_NAMES = tuple(ACTIVATIONS)  # a file holds the position: only ever append


@dataclass(frozen=True, eq=False)
class Standardiser:
    """clip((x - mean) / scale, -clip, clip), in float64 and then float32, as VecNormalize does."""

    mean: FloatArray
    scale: FloatArray
    clip: float

    def __call__(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Return the observations as the network sees them."""
        x = (observations - self.mean) / self.scale
        return np.clip(x, -self.clip, self.clip, out=x)


@dataclass(frozen=True, eq=False)
class Network:
    """Linear layers with an activation between them.

    Args:
        layers: Weights and biases, read-only copies.
        activation: Its name, one of `ACTIVATIONS`.
        standardiser: What is done to the observations first, if anything.
        n_states: Number of states where observations are integers (one-hot coded), else 0.
    """

    layers: tuple[Layer, ...]
    activation: str = "Tanh"
    standardiser: Standardiser | None = None
    n_states: int = 0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {self.activation!r}; there are {', '.join(ACTIVATIONS)}"
            )
        layers = tuple((parameter("weights", w), parameter("bias", b)) for w, b in self.layers)
        if any(weights.ndim != 2 or bias.ndim != 1 for weights, bias in layers):
            raise ValueError(
                f"layers of shapes {[(w.shape, b.shape) for w, b in layers]}: weights are a table, "
                "biases a row"
            )
        for (weights, bias), (later, _) in pairwise(layers):
            if len(weights) != len(bias) or later.shape[1] != len(weights):
                raise ValueError(
                    f"layers of shapes {[w.shape for w, _ in layers]} do not follow one another"
                )
        if self.n_states and layers[0][0].shape[1] != self.n_states:
            raise ValueError(
                f"n_states is {self.n_states}, but the first layer takes {layers[0][0].shape[1]}"
            )
        object.__setattr__(self, "layers", layers)

    def __call__(self, observations: Tree, dtype: Any = np.float32) -> NDArray[Any]:
        """Return the last layer (n, outputs)."""
        seen = np.asarray(observations)
        if seen.ndim == 0:
            raise TypeError(
                f"observations are a {type(observations).__name__}: the network needs one array"
            )
        x = self._inputs(seen).astype(dtype, copy=False)
        for depth, (weights, bias) in enumerate(self.layers):
            if depth:
                x = ACTIVATIONS[self.activation](x)
            x = x @ weights.T.astype(dtype, copy=False)
            x += bias.astype(dtype, copy=False)
        return x

    def _inputs(self, block: NDArray[Any]) -> NDArray[np.float32]:
        width = self.layers[0][0].shape[1]
        if self.n_states:
            states = within("observations", block.reshape(len(block)), self.n_states)
            coded = np.zeros((len(states), self.n_states), dtype=np.float32)
            coded[np.arange(len(states)), states] = 1.0
            return coded
        if self.standardiser is not None:
            block = self.standardiser(block)
        flat = block.reshape(len(block), math.prod(block.shape[1:])).astype(np.float32)
        if flat.shape[1] != width:
            raise ValueError(
                f"observations have shape {block.shape}: the network needs {width} numbers a row; "
                "give a policy of the environment that these observations come from"
            )
        return flat

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything as numbers."""
        arrays: dict[str, NDArray[Any]] = {
            "activation": np.array(_NAMES.index(self.activation)),
            "n_states": np.array(self.n_states),
        }
        for i, (weights, bias) in enumerate(self.layers):
            arrays |= {f"weights_{i}": weights, f"bias_{i}": bias}
        if self.standardiser is not None:
            s = self.standardiser
            arrays |= {"mean": s.mean, "scale": s.scale, "clip": np.array(s.clip)}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Network:
        """Return the network whose `arrays()` these are."""
        depth = sum(name.startswith("weights_") for name in arrays)
        standardiser = None
        if "mean" in arrays:
            standardiser = Standardiser(arrays["mean"], arrays["scale"], float(arrays["clip"]))
        activation = int(arrays["activation"])
        if not (depth and 0 <= activation < len(_NAMES)):
            raise ValueError(f"{depth} layers and activation {activation} make no network")
        return cls(
            tuple((arrays[f"weights_{i}"], arrays[f"bias_{i}"]) for i in range(depth)),
            _NAMES[activation],
            standardiser,
            int(arrays["n_states"]),
        )

    def __repr__(self) -> str:
        sizes = [self.layers[0][0].shape[1], *(len(bias) for _, bias in self.layers)]
        seen = "" if self.standardiser is None else ", standardised"
        return f"{'-'.join(map(str, sizes))}, {self.activation}{seen}"


def parameter(name: str, value: ArrayLike) -> NDArray[np.float32]:
    """Return a read-only float32 copy; raise if it is not finite."""
    array = np.array(value, dtype=np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} is not finite: take the snapshot before training diverged")
    array.setflags(write=False)
    return array


class _NetworkPolicy(Snapshot):
    """Base of policies that are a network and numbers."""

    network: Network

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the network, and the numbers."""
        numbers = (field.name for field in fields(self) if field.name != "network")  # type: ignore[arg-type]
        return self.network.arrays() | {name: np.asarray(getattr(self, name)) for name in numbers}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return the policy whose `arrays()` these are."""
        numbers = [field.name for field in fields(cls) if field.name != "network"]  # type: ignore[arg-type]
        return cls(Network.from_arrays(arrays), *(arrays[name][()] for name in numbers))  # type: ignore[call-arg]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.network!r})"


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxMlp(_NetworkPolicy, Finite):
    """P(a | x) = softmax(network(x))_a."""

    kind: ClassVar[str] = "softmax-mlp"
    network: Network

    def log_table(self, observations: Tree) -> FloatArray:
        """Return the log-softmax of the outputs, shape (n, A)."""
        return log_softmax(self.network(observations).T.astype(np.float64, order="C")).T


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class EpsilonGreedyMlp(_NetworkPolicy, Finite):
    """The action of the largest output with probability 1 - ε, else any, each equally likely."""

    kind: ClassVar[str] = "epsilon-greedy-mlp"
    network: Network
    epsilon: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", probability("epsilon", self.epsilon))

    def probs(self, observations: Tree) -> FloatArray:
        """Return ε/A for each action, and 1 - ε more for the greedy one; shape (n, A)."""
        # float64: which of two outputs is larger must not depend on how rows are batched
        values = self.network(observations, np.float64)
        return epsilon_greedy(values.argmax(axis=1), self.epsilon, values.shape[1])

    def __repr__(self) -> str:
        return f"EpsilonGreedyMlp({self.network!r}, epsilon={self.epsilon:.4g})"


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class GaussianMlp(_NetworkPolicy, Gaussian):
    """Continuous actions, a ~ N(network(x), diag exp(log_std)²); a density."""

    kind: ClassVar[str] = "gaussian-mlp"
    network: Network
    log_std: NDArray[np.float32]  # (m,)

    def __post_init__(self) -> None:
        log_std, width = parameter("log_std", self.log_std), len(self.network.layers[-1][1])
        if log_std.shape != (width,):
            raise ValueError(f"log_std has shape {log_std.shape}: the network has {width} outputs")
        object.__setattr__(self, "log_std", log_std)

    def mean(self, observations: Tree) -> FloatArray:
        """Return the outputs, shape (n, m)."""
        return self.network(observations).astype(np.float64)
