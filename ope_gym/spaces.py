"""Gymnasium spaces as columns and as JSON.

A batch of a Box, Discrete, MultiDiscrete or MultiBinary space is an array with one row a step; of a
Tuple or Dict space, a tuple or dict of batches. Elements of Text, Graph, Sequence and OneOf do not
stack: they are rows of an object array, and go to a file as JSON.
"""

from __future__ import annotations

import copy as copying
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.trees import Tree

Space: TypeAlias = gym.Space[Any]
Where: TypeAlias = Callable[[int | None], str]
"""Names a row in an error message ("episode 3, step 7"); None stands for the whole batch."""

# All that a file may hold.
NUMERIC_DTYPES = frozenset(
    ["|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]
)
_COLUMN_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_MAX_BOX_SIZE = 2**26  # a few bytes of JSON must not make the reader allocate without bound


def is_column(space: Space) -> bool:
    """Whether the elements of a space are rows of one numeric array."""
    return isinstance(space, _COLUMN_SPACES)


def is_discrete(space: Space | None) -> bool | None:
    """Whether actions of a space have probabilities (True) or densities (False); None if unknown.

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


# Columns -------------------------------------------------------------------------------------


def stack(space: Space | None, samples: Sequence[Any]) -> Tree:
    """One batch from single observations or actions, one a step.

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
        return _object_array(samples)
    return np.array(samples)


def empty(space: Space | None) -> Tree:
    """The batch of no rows."""
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
    """The batch as checked columns of `n` rows.

    Integers take the dtype of their space. Floats keep their own: a policy computed its numbers
    from them, and a cast would change these. Bounds of a float Box are not checked, since Gaussian
    policies choose actions outside them.

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
                f"{_describe(batch)}; ope_gym.spaces.stack makes it from a list of elements"
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
                f"got {_describe(batch)}; ope_gym.spaces.stack makes it from a list of elements"
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
    """Structure, row shapes and kinds of numbers: equal for batches that may be concatenated."""
    if isinstance(tree, tuple):
        return tuple(signature(branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: signature(branch) for key, branch in tree.items()}
    return f"{tree.dtype.kind}{tree.shape[1:]}"


def _check_values(
    space: Space | None, array: NDArray[Any], name: str, where: Where
) -> np.dtype[Any]:
    """The dtype in which to keep an array of the right shape; ValueError if it does not fit."""
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
        except (TypeError, ValueError, AttributeError, IndexError, gym.error.Error):
            inside = False
        if not inside:
            raise ValueError(f"{where(row)}: {name} is {element!r}, which is not in {space}")
    return _object_array([copying.deepcopy(element) if copy else element for element in batch])


def _object_array(elements: Sequence[Any]) -> NDArray[np.object_]:
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


# Spaces as JSON ------------------------------------------------------------------------------


def space_to_json(space: Space | None) -> Any:
    """The space as plain JSON data, which `space_from_json` turns back.

    >>> space_from_json(space_to_json(spaces.Discrete(3, start=-1)))
    Discrete(3, start=-1)
    """
    if space is None:
        return None
    if isinstance(space, spaces.Box):
        _require_numeric(space)
        low, high = space.low, space.high
        return {
            "type": "Box",
            "dtype": np.dtype(space.dtype).name,
            "shape": list(space.shape),
            "low": _bounds_to_json(low, space.bounded_below),
            "high": _bounds_to_json(high, space.bounded_above),
        }
    if isinstance(space, spaces.Discrete):
        dtype = np.dtype(space.dtype).name
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": dtype}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "type": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
            "dtype": np.dtype(space.dtype).name,
        }
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    if isinstance(space, spaces.Text):
        return {
            "type": "Text",
            "min_length": space.min_length,
            "max_length": space.max_length,
            "charset": "".join(space.character_list),
        }
    if isinstance(space, spaces.Tuple | spaces.OneOf):
        name = "Tuple" if isinstance(space, spaces.Tuple) else "OneOf"
        return {"type": name, "spaces": [space_to_json(part) for part in space.spaces]}
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise TypeError(f"a Dict space needs string keys to be saved, got {list(space.spaces)}")
        # pairs, because the order of the keys is part of a Dict space
        pairs = [[key, space_to_json(part)] for key, part in space.spaces.items()]
        return {"type": "Dict", "spaces": pairs, "sort_keys": getattr(space, "sort_keys", True)}
    if isinstance(space, spaces.Sequence):
        feature = space_to_json(space.feature_space)
        return {"type": "Sequence", "space": feature, "stack": bool(space.stack)}
    if isinstance(space, spaces.Graph):
        nodes, edges = space_to_json(space.node_space), space_to_json(space.edge_space)
        return {"type": "Graph", "node_space": nodes, "edge_space": edges}
    raise TypeError(
        f"{type(space).__name__} is not one of Gymnasium's own spaces and cannot be saved; "
        "describe the data with Box, Discrete, Dict, ... instead"
    )


def space_from_json(data: Any) -> Space | None:
    """The space that `space_to_json` described; ValueError if the data describes none."""
    try:
        return None if data is None else _space_from_json(data)
    except ValueError:
        raise
    except (KeyError, TypeError, AssertionError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a Gymnasium space: {error!r}") from error


def _space_from_json(data: Any) -> Space:
    kind = data["type"]
    if kind == "Box":
        return _box_from_json(data)
    if kind == "Discrete":
        n, start, name = int(data["n"]), int(data["start"]), str(data["dtype"])
        if name == "int64":  # older versions of Gymnasium know no other, and no such argument
            return spaces.Discrete(n, start=start)
        return spaces.Discrete(n, start=start, dtype=name)
    if kind == "MultiDiscrete":
        dtype: Any = np.dtype(str(data["dtype"]))
        nvec, first = np.array(data["nvec"], dtype=dtype), np.array(data["start"], dtype=dtype)
        return spaces.MultiDiscrete(nvec, dtype=dtype, start=first)
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    if kind == "Text":
        return spaces.Text(
            int(data["max_length"]), min_length=int(data["min_length"]), charset=data["charset"]
        )
    if kind == "Tuple":
        return spaces.Tuple([_space_from_json(part) for part in data["spaces"]])
    if kind == "OneOf":
        return spaces.OneOf([_space_from_json(part) for part in data["spaces"]])
    if kind == "Dict":
        pairs = [(str(key), _space_from_json(part)) for key, part in data["spaces"]]
        # likewise
        return spaces.Dict(pairs) if data["sort_keys"] else spaces.Dict(pairs, sort_keys=False)
    if kind == "Sequence":
        return spaces.Sequence(_space_from_json(data["space"]), stack=bool(data["stack"]))
    if kind == "Graph":
        edges = data["edge_space"]
        return spaces.Graph(
            _space_from_json(data["node_space"]),
            None if edges is None else _space_from_json(edges),
        )
    raise ValueError(f"unknown space type {kind!r}; a newer version of ope_gym may know it")


def _require_numeric(space: spaces.Box[Any]) -> None:
    if np.dtype(space.dtype).newbyteorder("<").str not in NUMERIC_DTYPES:
        raise TypeError(f"{space} has dtype {space.dtype}, which cannot be saved; use float64")
    if math.prod(space.shape) > _MAX_BOX_SIZE:
        raise TypeError(f"{space} has more than {_MAX_BOX_SIZE} numbers and cannot be saved")


def _bounds_to_json(values: NDArray[Any], bounded: NDArray[np.bool_]) -> Any:
    """Bounds as nested lists, one number where all are equal; null stands for unbounded."""
    if values.size and (values == values.flat[0]).all() and (bounded == bounded.flat[0]).all():
        values, bounded = values.reshape(-1)[0], bounded.reshape(-1)[0]
    listed = np.asarray(values).astype(object)
    listed[~bounded] = None
    return listed.tolist()


def _box_from_json(data: Mapping[str, Any]) -> Space:
    dtype = np.dtype(str(data["dtype"]))
    shape = tuple(int(size) for size in data["shape"])
    if dtype.newbyteorder("<").str not in NUMERIC_DTYPES or min(shape, default=0) < 0:
        raise ValueError(f"not a Box: dtype {dtype}, shape {shape}")
    if math.prod(shape) > _MAX_BOX_SIZE:
        raise ValueError(f"a Box of shape {shape} is larger than {_MAX_BOX_SIZE} numbers")
    ends, bounded = [], []
    for name, unbounded in (("low", -np.inf), ("high", np.inf)):
        raw = np.array(data[name], dtype=object)
        if not all(x is None or isinstance(x, int | float) for x in raw.reshape(-1)):
            raise ValueError(f"the bounds {name} of a Box must be numbers")
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            unbounded = limits.min if name == "low" else limits.max
        known = np.asarray(raw != None, dtype=bool)  # noqa: E711  # element by element
        values = np.where(known, raw, unbounded).astype(dtype)
        if raw.ndim == 0:
            values, known = np.full(shape, values), np.full(shape, known)
        ends.append(values.reshape(shape))
        bounded.append(known.reshape(shape))
    box = spaces.Box(ends[0], ends[1], dtype=dtype)
    box.bounded_below, box.bounded_above = bounded  # of integers, Gymnasium cannot tell
    return box


# Elements of spaces that are not columns ----------------------------------------------------
#
# Space.to_jsonable is no way to do this: OneOf's keeps only the first part of a Tuple, and arrays
# without rows lose their shape.


def elements_to_json(space: Space, elements: NDArray[np.object_]) -> bytes:
    """Rows of an object column as JSON text."""
    return json.dumps([_to_json(space, element) for element in elements]).encode()


def elements_from_json(space: Space, text: bytes) -> NDArray[np.object_]:
    """The object column that `elements_to_json` wrote; ValueError if the text is none."""
    try:
        return _object_array([_from_json(space, data) for data in json.loads(text)])
    except (KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"not elements of {space}: {error!r}") from error


def _to_json(space: Space, element: Any) -> Any:
    if isinstance(space, spaces.Text):
        return str(element)
    if isinstance(space, spaces.Tuple):
        return [_to_json(part, x) for part, x in zip(space.spaces, element, strict=True)]
    if isinstance(space, spaces.Dict):
        return [_to_json(part, element[key]) for key, part in space.spaces.items()]
    if isinstance(space, spaces.OneOf):
        return [int(element[0]), _to_json(space.spaces[element[0]], element[1])]
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return _batch_to_json(space.feature_space, element)
        return [_to_json(space.feature_space, x) for x in element]
    if isinstance(space, spaces.Graph):
        nodes = _batch_to_json(space.node_space, element.nodes)
        if element.edges is None or space.edge_space is None:
            return [nodes, None, None]
        edges = _batch_to_json(space.edge_space, element.edges)
        return [nodes, edges, np.asarray(element.edge_links).tolist()]
    if not is_column(space):
        raise TypeError(f"elements of {space} cannot be saved: it is not one of Gymnasium's own")
    return np.asarray(element).tolist()


def _from_json(space: Space, data: Any) -> Any:
    if isinstance(space, spaces.Text):
        return str(data)
    if isinstance(space, spaces.Tuple):
        return tuple(_from_json(part, x) for part, x in zip(space.spaces, data, strict=True))
    if isinstance(space, spaces.Dict):
        pairs = zip(space.spaces.items(), data, strict=True)
        return {key: _from_json(part, x) for (key, part), x in pairs}
    if isinstance(space, spaces.OneOf):
        index, value = data
        return (np.int64(index), _from_json(space.spaces[index], value))
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return _batch_from_json(space.feature_space, data)
        return tuple(_from_json(space.feature_space, x) for x in data)
    if isinstance(space, spaces.Graph):
        nodes = _batch_from_json(space.node_space, data[0])
        if data[1] is None or space.edge_space is None:
            return spaces.GraphInstance(nodes, None, None)
        links = np.array(data[2], dtype=np.int32).reshape(-1, 2)
        return spaces.GraphInstance(nodes, _batch_from_json(space.edge_space, data[1]), links)
    array = np.array(data, dtype=space.dtype).reshape(space.shape or ())
    return array[()] if isinstance(space, spaces.Discrete) else array


def _batch_to_json(space: Space, batch: Tree) -> Any:
    if isinstance(space, spaces.Tuple):
        return [_batch_to_json(part, x) for part, x in zip(space.spaces, batch, strict=True)]
    if isinstance(space, spaces.Dict):
        return [_batch_to_json(part, batch[key]) for key, part in space.spaces.items()]
    if is_column(space):
        return np.asarray(batch).tolist()
    return [_to_json(space, element) for element in batch]


def _batch_from_json(space: Space, data: Any) -> Tree:
    if isinstance(space, spaces.Tuple):
        return tuple(_batch_from_json(part, x) for part, x in zip(space.spaces, data, strict=True))
    if isinstance(space, spaces.Dict):
        pairs = zip(space.spaces.items(), data, strict=True)
        return {key: _batch_from_json(part, x) for (key, part), x in pairs}
    if is_column(space):
        return np.array(data, dtype=space.dtype).reshape(len(data), *(space.shape or ()))
    return tuple(_from_json(space, x) for x in data)
