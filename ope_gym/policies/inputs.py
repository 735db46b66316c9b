"""Checks of what the closed-form policies are given; an error names the argument and the value."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.policies.base import Floats


def parameters(name: str, value: ArrayLike, ndim: int) -> Floats:
    """A read-only float64 copy of a policy's parameter, refused if not finite."""
    array = np.array(value, dtype=np.float64, order="C")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}: give it {ndim} axes")
    if not np.isfinite(array).all():
        raise ValueError(f"{_first(name, array, ~np.isfinite(array))}: it must be finite")
    array += 0.0  # -0.0 becomes 0.0, so that equal parameters have equal bytes
    array.setflags(write=False)
    return array


def features(observations: Tree, width: int) -> Floats:
    """Observations as (n, width) float64."""
    if isinstance(observations, tuple | dict):
        raise ValueError(
            f"observations are a {type(observations).__name__}: a linear policy needs one array of "
            f"shape (n, {width}); flatten them with gymnasium.wrappers.FlattenObservation"
        )
    array = np.asarray(observations, dtype=np.float64)
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"observations have shape {array.shape}: the policy needs (n, {width})")
    return array


def choices(actions: Tree, rows: int, n_actions: int) -> NDArray[np.intp]:
    """Actions as (n,) indices, each in 0 … n_actions - 1."""
    array = np.asarray(actions)
    if array.shape != (rows,):
        raise ValueError(f"actions have shape {array.shape}: {rows} observations need ({rows},)")
    if array.dtype.kind not in "iub":
        raise ValueError(f"actions have dtype {array.dtype}: a finite policy needs integers")
    return within("actions", array, n_actions)


def parts(actions: Tree, rows: int, width: int) -> Floats:
    """Continuous actions as (n, width) float64."""
    array = np.asarray(actions, dtype=np.float64)
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    if array.shape != (rows, width):
        raise ValueError(
            f"actions have shape {array.shape}: {rows} observations need ({rows}, {width})"
        )
    return array


def cells(observations: Tree, dims: tuple[int, ...]) -> NDArray[np.intp]:
    """Discrete observations as (n,) indices into a flattened table of shape `dims`."""
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
    """Indices as intp; the first one outside 0 … size - 1 is named."""
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        wrong = (indices < 0) | (indices >= size)
        raise ValueError(f"{_first(name, indices, wrong)}: it must be in 0 … {size - 1}")
    return indices.astype(np.intp, copy=False)


def _first(name: str, array: NDArray[Any], wrong: NDArray[np.bool_]) -> str:
    """The first wrong element, as in "theta[3] is nan"."""
    where = tuple(np.argwhere(wrong)[0].tolist())
    return f"{name}{list(where) if where else ''} is {array[where]}"


def same_shape(name: str, arrays: Sequence[NDArray[Any]]) -> None:
    """Refuse a stack of no policies, or of policies that differ in shape."""
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) != 1:
        raise ValueError(
            f"policies have {name} of shapes {shapes}: a stack needs one or more of one shape"
        )


def positive(name: str, value: int) -> int:
    """A whole number of at least 1."""
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} is {number}: it must be at least 1")
    return number
