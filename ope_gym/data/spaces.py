"""Gymnasium spaces as columns.

A batch of a Box, Discrete, MultiDiscrete or MultiBinary space is an array with one row a step; of a
Tuple or Dict space, a tuple or dict of batches. Elements of Text, Graph, Sequence and OneOf do not
stack: they are rows of an object array, and go to a file as JSON.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.arguments import instance
from ope_gym.batches import Tree

Space: TypeAlias = gym.Space[Any]
Where: TypeAlias = Callable[[int | None], str]
"""Names a row in an error message ("episode 3, step 7"); None stands for the whole batch."""

# The dtypes that a file may hold.
NUMERIC_DTYPES = frozenset(
    ["|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]
)
_COLUMN_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_kind(observation_space: object, action_space: object) -> None:
    """Raise unless both are spaces of Gymnasium, or unknown."""
    for name, space in (("observation", observation_space), ("action", action_space)):
        expected = "give a space of gymnasium.spaces, or None"
        instance(f"{name}_space", space, gym.Space | None, expected)


def is_column(space: Space) -> bool:
    """Return whether the elements of a space are rows of one numeric array."""
    return isinstance(space, _COLUMN_SPACES)


def is_discrete(space: Space | None) -> bool | None:
    """Tell whether actions have probabilities (True) or densities (False); None if unknown.

    >>> is_discrete(spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]))
    True
    """
    if space is None:
        return None
    if isinstance(space, spaces.Box):
        return bool(space.dtype.kind != "f")
    if isinstance(space, spaces.Tuple | spaces.OneOf):
        return all(is_discrete(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return all(is_discrete(part) for part in space.spaces.values())
    if isinstance(space, spaces.Sequence):
        return is_discrete(space.feature_space)
    if isinstance(space, spaces.Graph):
        return bool(is_discrete(space.node_space)) and is_discrete(space.edge_space) is not False
    known = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text
    return True if isinstance(space, known) else None


def brief(space: object, *, bounds: bool = False) -> str:
    """Describe a space without the bounds of its boxes, or with the lowest and highest of them.

    >>> brief(spaces.Dict(x=spaces.Box(-1, 1, (3,)), y=spaces.Discrete(2)))
    "Dict('x': Box((3,), float32), 'y': Discrete(2))"
    >>> brief(spaces.Box(np.float32([-2, 0]), np.float32([1, np.inf])), bounds=True)
    'Box((2,), float32, -2 to inf)'
    """
    if isinstance(space, spaces.Box):
        ends = ""
        if bounds and space.low.size:
            ends = f", {space.low.min():.4g} to {space.high.max():.4g}"
        return f"Box({space.shape}, {space.dtype}{ends})"
    if isinstance(space, spaces.Dict):
        parts = [f"{key!r}: {brief(x, bounds=bounds)}" for key, x in space.spaces.items()]
        return f"Dict({', '.join(parts)})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(brief(x, bounds=bounds) for x in space.spaces)})"
    return str(space)


def mismatch(name: str, one: object, other: object) -> ValueError:
    """Return the error for episodes whose spaces or time limits differ."""
    difference = f"{brief(one)} and {brief(other)}"
    if brief(one) == brief(other):
        difference += " with other bounds"
    return ValueError(
        f"{name} differs: {difference}; only episodes of one environment can be put together"
    )


# Columns -------------------------------------------------------------------------------------


def stack(space: Space | None, samples: Sequence[Any]) -> Tree:
    """Make one batch of single observations or actions, one a step.

    >>> stack(spaces.Tuple([spaces.Discrete(32), spaces.Discrete(2)]), [(14, 0), (20, 1)])
    (array([14, 20]), array([0, 1]))
    """
    if isinstance(space, spaces.Tuple) or (space is None and isinstance(samples[0], tuple)):
        parts = space.spaces if isinstance(space, spaces.Tuple) else (None,) * len(samples[0])
        columns = zip(*samples, strict=True)
        return tuple(stack(part, column) for part, column in zip(parts, columns, strict=True))
    if isinstance(space, spaces.Dict):
        return {key: stack(part, [s[key] for s in samples]) for key, part in space.spaces.items()}
    if space is None and isinstance(samples[0], Mapping):
        return {key: stack(None, [sample[key] for sample in samples]) for key in samples[0]}
    if space is not None and not is_column(space):
        return object_array(samples)
    return np.array(samples)


def env_actions(space: Space, actions: Tree) -> Any:
    """Return a batch of actions as the vector env takes it, floats with the space's precision."""
    if isinstance(space, spaces.Tuple):
        return tuple(env_actions(part, x) for part, x in zip(space.spaces, actions, strict=True))
    if isinstance(space, spaces.Dict):
        return {key: env_actions(part, actions[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Box):
        return np.asarray(actions).astype(space.dtype, copy=False)
    return actions if is_column(space) else tuple(actions)


def only_action(space: Space, actions: Tree) -> Any:
    """Return the action of a batch of one, as a single env takes it."""
    if isinstance(space, spaces.Tuple):
        return tuple(only_action(part, x) for part, x in zip(space.spaces, actions, strict=True))
    if isinstance(space, spaces.Dict):
        return {key: only_action(part, actions[key]) for key, part in space.spaces.items()}
    return env_actions(space, actions)[0]


def empty(space: Space | None) -> Tree:
    """Return a batch without rows."""
    if isinstance(space, spaces.Tuple):
        return tuple(empty(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return {key: empty(part) for key, part in space.spaces.items()}
    if space is None or not is_column(space):
        return np.empty(0, dtype=np.float64 if space is None else object)
    return np.empty((0, *(space.shape or ())), dtype=space.dtype)


def to_columns(
    space: Space | None, batch: Tree, n: int, *, name: str, where: Where, copy: bool = True
) -> Tree:
    """Check a batch and return it as columns of `n` rows.

    Integers take the dtype of their space. Floats keep their own: a policy computed its
    probabilities from them, and a cast would change these. Bounds of a float Box are not checked,
    since Gaussian policies choose actions outside them.

    Args:
        space: The space of one row; None takes arrays, tuples and dicts of arrays as they come.
        batch: Array, tuple, dict or sequence of elements, as `stack` gives them.
        n: Number of rows.
        name: The argument's name in messages.
        where: Names a row in messages.
        copy: Whether the columns may not share memory with the batch.
    """
    if isinstance(space, spaces.Tuple) or (space is None and isinstance(batch, tuple)):
        parts = space.spaces if isinstance(space, spaces.Tuple) else (None,) * len(batch)
        if not isinstance(batch, tuple) or len(batch) != len(parts):
            raise ValueError(
                f"{where(None)}: {name} must be a tuple of {len(parts)} batches for {space}, got "
                f"{_describe(batch)}; ope_gym.data.spaces.stack makes it from a list of elements"
            )
        return tuple(
            to_columns(part, branch, n, name=f"{name}[{i}]", where=where, copy=copy)
            for i, (part, branch) in enumerate(zip(parts, batch, strict=True))
        )
    if isinstance(space, spaces.Dict) or (space is None and isinstance(batch, Mapping)):
        by_key = space.spaces if isinstance(space, spaces.Dict) else dict.fromkeys(batch)
        if not isinstance(batch, Mapping) or batch.keys() != by_key.keys():
            raise ValueError(
                f"{where(None)}: {name} must be a dict of batches with the keys {list(by_key)}, "
                f"got {_describe(batch)}; ope_gym.data.spaces.stack makes it from a list"
            )
        return {
            key: to_columns(part, batch[key], n, name=f"{name}[{key!r}]", where=where, copy=copy)
            for key, part in by_key.items()
        }
    if space is not None and not is_column(space):
        return _check_elements(space, batch, n, name, where, copy)
    try:
        array = np.asarray(batch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where(None)}: {name} is not an array: {error}") from error
    shape = array.shape[1:] if space is None else space.shape
    if array.ndim == 0 or array.shape != (n, *(shape or ())):
        expected = f"({n}, ...)" if space is None else f"{(n, *(shape or ()))} for {space}"
        raise ValueError(
            f"{where(None)}: {name} has shape {array.shape}, expected {expected} "
            "(one row for each reward)"
        )
    return array.astype(_check_values(space, array, name, where), order="C", copy=copy)


def signature(tree: Tree) -> Any:
    """Describe structure, row shapes and kinds of numbers; batches that agree can be joined."""
    if isinstance(tree, tuple):
        return tuple(signature(branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: signature(branch) for key, branch in tree.items()}
    return f"{tree.dtype.kind}{tree.shape[1:]}"


def _check_values(
    space: Space | None, array: NDArray[Any], name: str, where: Where
) -> np.dtype[Any]:
    """Return the dtype in which to keep an array, or raise if a value is not in the space."""
    kind = array.dtype.kind
    if kind not in "iufb":
        raise ValueError(
            f"{where(None)}: {name} has dtype {array.dtype}, expected numbers; "
            "elements of another kind need their Gymnasium space"
        )
    if space is None:
        return np.dtype(np.float64) if array.dtype.itemsize > 8 else array.dtype
    dtype: np.dtype[Any] = np.dtype(space.dtype)
    if dtype.kind == "f":
        kept = np.result_type(array.dtype, dtype if kind != "f" else array.dtype)
        return np.dtype(np.float64) if kept.itemsize > 8 else kept
    if kind == "f":
        raise ValueError(
            f"{where(None)}: {name} has dtype {array.dtype}, but {space} holds integers; "
            "pass what the env received, as integers"
        )
    low: Any
    high: Any
    if isinstance(space, spaces.Discrete):
        low, high = int(space.start), int(space.start) + int(space.n) - 1
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + (space.nvec - 1)
    elif isinstance(space, spaces.MultiBinary) or dtype.kind == "b":
        low, high = 0, 1
    else:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if array.size and isinstance(low, int):
        outside = array.min() < low or array.max() > high
    else:
        outside = bool(((array < low) | (array > high)).any())
    if outside:
        bad = ((array < low) | (array > high)).reshape(len(array), -1).any(axis=1)
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{where(row)}: {name} is {array[row]}, which is not in {space}")
    return dtype


def _check_elements(
    space: Space, batch: Any, n: int, name: str, where: Where, copy: bool
) -> NDArray[np.object_]:
    if isinstance(batch, str | bytes | Mapping) or not hasattr(batch, "__len__"):
        raise ValueError(
            f"{where(None)}: {name} must be a sequence of elements of {space}, "
            f"got {_describe(batch)}"
        )
    if len(batch) != n:
        raise ValueError(f"{where(None)}: {name} has {len(batch)} rows, but there are {n} rewards")
    for row, element in enumerate(batch):
        try:
            inside = space.contains(element)
        except (TypeError, ValueError, AttributeError, IndexError):
            inside = False
        except (gym.error.Error, gym.error.CustomSpaceError):
            inside = False
        if not inside:
            raise ValueError(f"{where(row)}: {name} is {element!r}, which is not in {space}")
    return object_array([copying.deepcopy(element) if copy else element for element in batch])


def object_array(elements: Sequence[Any]) -> NDArray[np.object_]:
    """Return the elements as rows of an object array, whatever they are."""
    array = np.empty(len(elements), dtype=object)
    for row, element in enumerate(elements):  # a slice assignment would unpack tuples
        array[row] = element
    return array


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {list(batch)}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    shape = getattr(batch, "shape", None)
    return type(batch).__name__ if shape is None else f"an array of shape {shape}"
