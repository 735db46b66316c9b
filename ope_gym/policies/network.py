"""A small neural network in numpy, which a file holds completely.

Observations become float32, are standardised with frozen statistics where there are any, and pass
through linear layers with one activation between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.policies import inputs
from ope_gym.policies.base import Floats

ROWS = 4_096  # rows a pass: the activations of a layer stay in cache

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

    mean: Floats
    scale: Floats
    clip: float

    def __call__(self, observations: NDArray[Any]) -> NDArray[Any]:
        """The observations as the network sees them."""
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
        for (weights, bias), (later, _) in pairwise(layers):
            if len(weights) != len(bias) or later.shape[1] != len(weights):
                raise ValueError(
                    f"layers of shapes {[w.shape for w, _ in layers]} do not follow one another"
                )
        object.__setattr__(self, "layers", layers)

    def __call__(self, observations: Tree, dtype: Any) -> Iterator[tuple[slice, NDArray[Any]]]:
        """The last layer (rows, outputs), a block of rows at a time; one empty block for none."""
        n = batches.length(observations)
        seen = np.asarray(observations)
        layers = [(w.T.astype(dtype), b.astype(dtype)) for w, b in self.layers]
        act = ACTIVATIONS[self.activation]
        for start in range(0, max(n, 1), ROWS):
            rows = slice(start, min(start + ROWS, n))
            x = self._inputs(seen[rows]).astype(dtype)
            for depth, (weights, bias) in enumerate(layers):
                x = x @ weights
                x += bias
                if depth < len(layers) - 1:
                    x = act(x)
            yield rows, x

    def _inputs(self, block: NDArray[Any]) -> NDArray[np.float32]:
        width = self.layers[0][0].shape[1]
        if self.n_states:
            states = inputs.within("observations", block.reshape(len(block)), self.n_states)
            return np.eye(self.n_states, dtype=np.float32)[states]
        if self.standardiser is not None:
            block = self.standardiser(block)
        flat = block.reshape(len(block), math.prod(block.shape[1:])).astype(np.float32)
        if flat.shape[1] != width:
            raise ValueError(
                f"observations have shape {block.shape}: the network needs {width} numbers a row"
            )
        return flat

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as numbers."""
        found: dict[str, NDArray[Any]] = {
            "activation": np.array(_NAMES.index(self.activation)),
            "n_states": np.array(self.n_states),
        }
        for i, (weights, bias) in enumerate(self.layers):
            found |= {f"weights_{i}": weights, f"bias_{i}": bias}
        if self.standardiser is not None:
            s = self.standardiser
            found |= {"mean": s.mean, "scale": s.scale, "clip": np.array(s.clip)}
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Network:
        """The network whose `arrays()` these are."""
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
    """A read-only float32 copy, refused if not finite."""
    array = np.array(value, dtype=np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} is not finite: take the snapshot before training diverged")
    array.setflags(write=False)
    return array
