"""Check and encode what policies are given, and compute their probabilities, in plain numpy.

Shapes: K policies, n rows, d features, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.arguments import refusal, whole
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree

MOST_ACTIONS = 2**16  # a row of probabilities then takes half a mebibyte
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_FAR = 10.0  # standard deviations at which a standardised number is clipped

# Arguments ------------------------------------------------------------------------------------


def parameters(name: str, value: ArrayLike, ndim: int) -> FloatArray:
    """Return a read-only float64 copy of a policy's parameter; raise if it is not finite."""
    try:
        array = np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError):
        raise refusal(name, value, "give an array of numbers") from None
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}: give it {ndim} axes")
    if not np.isfinite(array).all():
        raise ValueError(f"{_first(name, array, ~np.isfinite(array))}: it must be finite")
    array += 0.0  # -0.0 becomes 0.0, so that equal parameters have equal bytes
    array.setflags(write=False)
    return array


def features(observations: Tree, width: int) -> FloatArray:
    """Return observations as (n, width) float64."""
    if isinstance(observations, tuple | dict):
        raise ValueError(
            f"observations are a {type(observations).__name__}: a linear policy needs one array of "
            f"shape (n, {width}); flatten them with gymnasium.wrappers.FlattenObservation"
        )
    array = np.asarray(observations, dtype=np.float64)
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(
            f"observations have shape {array.shape}: the policy needs (n, {width}); give a policy "
            "of the environment that these observations come from"
        )
    return array


def choices(actions: Tree, rows: int, n_actions: int) -> NDArray[np.intp]:
    """Return actions as (n,) indices; raise unless each is in 0 … n_actions - 1."""
    array = np.asarray(actions)
    if array.shape != (rows,):
        raise ValueError(f"actions have shape {array.shape}: {rows} observations need ({rows},)")
    if array.dtype.kind not in "iub":
        raise ValueError(f"actions have dtype {array.dtype}: a finite policy needs integers")
    return within("actions", array, n_actions)


def parts(actions: Tree, rows: int, width: int) -> FloatArray:
    """Return continuous actions as (n, width) float64."""
    array = np.asarray(actions, dtype=np.float64)
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    if array.shape != (rows, width):
        raise ValueError(
            f"actions have shape {array.shape}: {rows} observations need ({rows}, {width})"
        )
    return array


def cells(observations: Tree, dims: tuple[int, ...]) -> NDArray[np.intp]:
    """Return discrete observations as (n,) indices into a flattened table of shape `dims`."""
    if not dims:  # one state: a bandit
        return np.zeros(batches.length(observations), dtype=np.intp)
    given = observations
    if not isinstance(given, tuple):
        array = np.asarray(given)
        given = tuple(array.T) if array.ndim == 2 else (array,)
    columns = [np.asarray(column) for column in given]
    if len(columns) != len(dims) or any(column.ndim != 1 for column in columns):
        raise ValueError(
            f"observations have {len(columns)} parts of shapes {[c.shape for c in columns]}: a "
            f"table of shape {dims} needs {len(dims)} of shape (n,)"
        )
    if any(column.dtype.kind not in "iub" for column in columns):
        raise ValueError(
            f"observations have dtypes {[str(c.dtype) for c in columns]}: a table needs integers"
        )
    pairs = enumerate(zip(columns, dims, strict=True))
    indices = [within(f"observations[{i}]", column, size) for i, (column, size) in pairs]
    return np.atleast_1d(np.ravel_multi_index(indices, dims))


def within(name: str, indices: NDArray[Any], size: int) -> NDArray[np.intp]:
    """Return indices as intp; raise and name the first one outside 0 … size - 1."""
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        wrong = (indices < 0) | (indices >= size)
        raise ValueError(f"{_first(name, indices, wrong)}: it must be in 0 … {size - 1}")
    return indices.astype(np.intp, copy=False)


def _first(name: str, array: NDArray[Any], wrong: NDArray[np.bool_]) -> str:
    """Describe the first wrong element, as in "theta[3] is nan"."""
    where = tuple(np.argwhere(wrong)[0].tolist())
    return f"{name}{list(where) if where else ''} is {array[where]}"


def same_shape(name: str, arrays: Sequence[NDArray[Any]]) -> None:
    """Raise for a stack of no policies, or of policies that differ in shape."""
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1:
        raise ValueError(
            f"policies have {name} of shapes {shapes}: a stack needs one or more of one shape"
        )


def action_count(value: int) -> int:
    """Return a number of actions; raise if no array of their probabilities could be made."""
    number = whole("n_actions", value)
    if number > MOST_ACTIONS:
        raise ValueError(f"n_actions is {number:,}: there can be {MOST_ACTIONS:,} at most")
    return number


# Observations as rows of numbers -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Columns:
    """A batch as (n, width): first its standardised numbers, then its categories as 0/1 columns.

    Args:
        mean: (numbers,).
        scale: (numbers,) 1 / deviation, 0 for a constant.
        is_number: (columns,) of the flattened batch.
        category: (categories,) the column of each 0/1 column, among those that are no numbers.
        value: (categories,) the value for which it is 1.
    """

    mean: FloatArray
    scale: FloatArray
    is_number: NDArray[np.bool_]
    category: IntArray
    value: FloatArray

    @property
    def numbers(self) -> int:
        """Return how many columns are numbers."""
        return self.mean.size

    @property
    def width(self) -> int:
        """Return how many columns there are in all."""
        return self.mean.size + self.value.size

    def __call__(self, batch: Tree) -> FloatArray:
        """Return the columns (n, width) of a batch."""
        flat = [column for leaf in flat_leaves(batch) for column in leaf.T]
        if len(flat) != self.is_number.size:
            raise ValueError(
                f"the batch has {len(flat)} columns, the features learned {self.is_number.size}"
            )
        encoded = np.empty((self.width, batches.length(batch)))  # each column in one piece
        for row, j, mean, scale in zip(
            encoded, np.flatnonzero(self.is_number), self.mean, self.scale, strict=False
        ):
            np.subtract(flat[j], mean, out=row, dtype=np.float64)
            row *= scale
        numbers = encoded[: self.numbers]
        np.clip(numbers, -_FAR, _FAR, out=numbers)
        whole = np.flatnonzero(~self.is_number)
        for row, j, value in zip(encoded[self.numbers :], self.category, self.value, strict=True):
            np.equal(flat[whole[j]].astype(np.float64), value, out=row)
        return encoded.T


def flat_leaves(batch: Tree) -> list[FloatArray]:
    """Return the leaves as (n, columns) each."""
    n = batches.length(batch)
    flat = [leaf.reshape(n, -1) for leaf in batches.leaves(batch)]
    for leaf in flat:
        if leaf.dtype.kind not in "iubf":
            raise ValueError(
                f"the batch has dtype {leaf.dtype}: features are made of numbers; give "
                "features=, a callable from a batch to (n, d)"
            )
    return flat


# Probabilities --------------------------------------------------------------------------------


def sample_rows(probs: FloatArray, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw one action for each row of (n, A) probabilities, by inverting the cumulative sum.

    Dividing by the last sum makes it exactly 1 from the last possible action on, so an action
    of probability 0 is never drawn.
    """
    cumulative = np.cumsum(probs, axis=1)
    refuse_nan(cumulative[:, -1])
    cumulative /= cumulative[:, -1:]
    below = cumulative <= rng.random((len(probs), 1))
    return np.asarray(below.sum(axis=1, dtype=np.int64))


def refuse_nan(probs: FloatArray) -> None:
    """Raise if a probability is NaN: it fails every comparison and would pass for action 0."""
    if np.isnan(probs).any():
        row = int(np.flatnonzero(np.isnan(probs))[0])
        raise ValueError(f"the probabilities of row {row} are nan: look for nan in observations")


def moments_of(probs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of ln p under p for each row of (n, A); 0 ln 0 = 0."""
    if probs.min(initial=1.0) > 0.0:
        logs = np.log(probs)
    else:
        logs = np.log(probs, out=np.zeros_like(probs), where=probs > 0)
    mean = np.einsum("na,na->n", probs, logs)
    logs -= mean[:, None]
    return mean, np.einsum("na,na,na->n", probs, logs, logs)


def log_sigmoid(x: FloatArray) -> FloatArray:
    """Return ln σ(x) = min(x, 0) - log1p(exp(-|x|)) elementwise, without overflow for any x."""
    tail = np.abs(x)
    np.negative(tail, out=tail)
    np.exp(tail, out=tail)
    np.log1p(tail, out=tail)
    return np.subtract(np.minimum(x, 0.0), tail, out=tail)


def log_softmax(scores: FloatArray) -> FloatArray:
    """Return the log of the softmax of each column of (A, n); `scores` is overwritten.

    Actions come first because numpy reduces over a first axis several times as fast as over a
    short last one.
    """
    scores -= scores.max(axis=0)
    scores -= np.log(np.exp(scores).sum(axis=0))
    return scores


def epsilon_greedy(best: NDArray[np.intp], epsilon: float, n_actions: int) -> FloatArray:
    """Return (n, A) probabilities: ε/A for each action, and 1 - ε more for the best one."""
    probs = np.full((len(best), n_actions), epsilon / n_actions)
    probs[np.arange(len(best)), best] += 1.0 - epsilon
    return probs
