"""Write Gymnasium spaces as JSON, and elements of spaces that are not columns; and read them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ope_gym.batches import Tree
from ope_gym.data.spaces import NUMERIC_DTYPES, Space, is_column, object_array

# A few bytes of JSON must not make the reader allocate without bound.
_MOST_BYTES = 48 * 2**20
_SPACE_BYTES = 4096  # of a space without its arrays, generously
_DEEPEST = 64  # spaces inside each other: code that goes through them calls itself
_SHORT = 4096  # characters of an element that takes little, whatever it is
_DECODER, _BLANKS = json.JSONDecoder(), re.compile(r"[ \t\n\r]*")
# By name; np.dtype understands more, and hands what looks like a tuple to Python's compiler.
_DTYPES = {np.dtype(text).name: np.dtype(text) for text in NUMERIC_DTYPES}


# The fields of each kind of space, beside its type.
_FIELDS = {
    "Box": {"dtype", "shape", "low", "high"},
    "Discrete": {"n", "start", "dtype"},
    "MultiDiscrete": {"nvec", "start", "dtype"},
    "MultiBinary": {"n"},
    "Text": {"min_length", "max_length", "charset"},
    "Tuple": {"spaces"},
    "OneOf": {"spaces"},
    "Dict": {"spaces", "sort_keys"},
    "Sequence": {"space", "stack"},
    "Graph": {"node_space", "edge_space"},
}


@dataclass
class Budget:
    """The bytes that all spaces of a file may still take, together."""

    left: int = _MOST_BYTES


def space_to_json(space: Space | None, budget: Budget | None = None) -> Any:
    """Describe a space as plain JSON data, which `space_from_json` turns back.

    >>> space_from_json(space_to_json(spaces.Discrete(3, start=-1)))
    Discrete(3, start=-1)
    """
    data = _described(space)
    _require_size(data, budget or Budget())
    return data


def _described(space: Space | None) -> Any:
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
        return {"type": name, "spaces": [_described(part) for part in space.spaces]}
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise TypeError(f"a Dict space needs string keys to be saved, got {list(space.spaces)}")
        # pairs, because the order of the keys is part of a Dict space
        pairs = [[key, _described(part)] for key, part in space.spaces.items()]
        return {"type": "Dict", "spaces": pairs, "sort_keys": getattr(space, "sort_keys", True)}
    if isinstance(space, spaces.Sequence):
        feature = _described(space.feature_space)
        return {"type": "Sequence", "space": feature, "stack": bool(space.stack)}
    if isinstance(space, spaces.Graph):
        nodes, edges = _described(space.node_space), _described(space.edge_space)
        return {"type": "Graph", "node_space": nodes, "edge_space": edges}
    raise TypeError(
        f"{type(space).__name__} is not one of Gymnasium's own spaces and cannot be saved; "
        "describe the data with Box, Discrete, Dict, ... instead"
    )


def env_to_json(
    observation_space: Space | None, action_space: Space | None, horizon: int | None
) -> dict[str, Any]:
    """Describe what episodes say of their environment: both spaces and the time limit."""
    budget = Budget()
    return {
        "observation_space": space_to_json(observation_space, budget),
        "action_space": space_to_json(action_space, budget),
        "horizon": horizon,
    }


def space_from_json(data: Any, budget: Budget | None = None) -> Space | None:
    """Return the space that `space_to_json` described; ValueError if the data describes none.

    Args:
        data: The JSON data.
        budget: What the spaces of the same file may still take; is reduced.
    """
    try:
        _require_size(data, budget or Budget())
        return None if data is None else _space_from_json(data)
    except ValueError:
        raise
    except (KeyError, TypeError, AssertionError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a Gymnasium space: {error!r}") from error


def _require_size(data: Any, budget: Budget) -> None:
    """Raise if spaces, however nested, are too large or too deep; before any of them is made."""
    size, waiting = 0, [(data, 0, 1)]
    while waiting:
        part, depth, copies = waiting.pop()
        if isinstance(part, list):
            waiting += [(x, depth, copies) for x in part if isinstance(x, list | dict)]
        elif isinstance(part, dict):
            if depth == _DEEPEST:
                raise ValueError(
                    f"not a Gymnasium space that can be kept in a file: more than {_DEEPEST} "
                    "spaces are inside each other"
                )
            size += copies * _SPACE_BYTES
            if part.get("type") == "Box":
                numbers = math.prod(max(int(n), 0) for n in part["shape"])
                size += copies * numbers * _number_bytes(part)
            else:
                copies *= 2 if part.get("stack") else 1  # Gymnasium keeps a batch of it, too
                waiting += [(x, depth + 1, copies) for x in part.values()]
    if size > budget.left:
        raise ValueError(
            f"the space takes {size:,} bytes when it is made, the spaces of a file may take "
            f"{_MOST_BYTES:,} in all; make its Boxes smaller, or of a smaller dtype"
        )
    budget.left -= size


def _number_bytes(box: Mapping[str, Any]) -> int:
    """Return the bytes for a number of a Box: two bounds, copied once, and flags beside them."""
    return 4 * int(_dtype(box).itemsize) + 6


def _space_from_json(data: Any) -> Space:
    kind = data["type"]
    if kind in _FIELDS and (more := data.keys() - _FIELDS[kind] - {"type"}):
        raise ValueError(f"a {kind} space has the unknown fields {sorted(more)}")
    if kind == "Box":
        return _box_from_json(data)
    if kind == "Discrete":
        n, start, dtype = int(data["n"]), int(data["start"]), _dtype(data)
        if dtype == np.int64:  # older versions of Gymnasium know no other, and no such argument
            return spaces.Discrete(n, start=start)
        return spaces.Discrete(n, start=start, dtype=dtype)
    if kind == "MultiDiscrete":
        dtype = _dtype(data)
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
        # older versions of Gymnasium do not have this argument either
        return spaces.Dict(pairs) if data["sort_keys"] else spaces.Dict(pairs, sort_keys=False)
    if kind == "Sequence":
        return spaces.Sequence(_space_from_json(data["space"]), stack=bool(data["stack"]))
    if kind == "Graph":
        nodes, edges = data["node_space"], data["edge_space"]
        if {part["type"] for part in (nodes, edges) if part} - {"Box", "Discrete"}:
            # Gymnasium would say so after it has written out all bounds of what is inside
            raise ValueError("the nodes and edges of a Graph space are Box or Discrete")
        return spaces.Graph(
            _space_from_json(nodes), None if edges is None else _space_from_json(edges)
        )
    raise ValueError(f"unknown space type {kind!r}; a newer version of ope_gym may know it")


def _dtype(data: Mapping[str, Any]) -> Any:
    if data["dtype"] not in _DTYPES:
        raise ValueError(f"the dtype of a space is {data['dtype']!r}, not one of {sorted(_DTYPES)}")
    return _DTYPES[data["dtype"]]


def _require_numeric(space: spaces.Box[Any]) -> None:
    if np.dtype(space.dtype).newbyteorder("<").str not in NUMERIC_DTYPES:
        raise TypeError(f"{space} has dtype {space.dtype}, which cannot be saved; use float64")
    size = math.prod(space.shape)
    if size * np.dtype(space.dtype).itemsize > _MOST_BYTES:  # before its bounds become a list
        raise ValueError(f"{space} has {size:,} numbers, too many to be saved")


def _bounds_to_json(values: NDArray[Any], bounded: NDArray[np.bool_]) -> Any:
    """Return bounds as nested lists, or one number if all are equal; None stands for unbounded."""
    if values.size and (values == values.flat[0]).all() and (bounded == bounded.flat[0]).all():
        values, bounded = values.reshape(-1)[0], bounded.reshape(-1)[0]
    listed = np.asarray(values).astype(object)
    listed[~bounded] = None
    return listed.tolist()


def _box_from_json(data: Mapping[str, Any]) -> Space:
    dtype = _dtype(data)
    shape = tuple(int(size) for size in data["shape"])
    if min(shape, default=0) < 0:
        raise ValueError(f"not a Box: shape {shape}")
    ends, bounded = [], []
    for name, unbounded in (("low", -np.inf), ("high", np.inf)):
        raw = np.array(data[name], dtype=object)
        if not all(x is None or isinstance(x, int | float) for x in raw.reshape(-1)):
            raise ValueError(f"the bounds {name} of a Box must be numbers")
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            unbounded = limits.min if name == "low" else limits.max
        known = np.asarray(raw != None, dtype=bool)  # noqa: E711  # element by element
        with np.errstate(all="ignore"):
            values = np.where(known, raw, unbounded).astype(dtype)
        if not np.isfinite(values[known]).all():
            raise ValueError(f"the bounds {name} of a Box do not fit its dtype {dtype}")
        if raw.ndim == 0:
            values, known = np.full(shape, values), np.full(shape, known)
        ends.append(values.reshape(shape))
        bounded.append(known.reshape(shape))
    box = spaces.Box(ends[0], ends[1], dtype=dtype)
    box.bounded_below, box.bounded_above = bounded  # Gymnasium cannot tell for integers
    return box


# Elements of spaces that are not columns ----------------------------------------------------
#
# Space.to_jsonable does not serve: that of OneOf keeps only the first part of a Tuple, and arrays
# without rows lose their shape.


def elements_to_json(space: Space, elements: NDArray[np.object_]) -> bytes:
    """Return the rows of an object column as JSON text."""
    rows = [json.dumps(_to_json(space, element)) for element in elements]
    for row, text in enumerate(rows):
        if _takes_too_much(text):
            raise ValueError(
                f"the element in row {row} has so many parts that no file may hold it; use a Box "
                "for what has a fixed number of parts"
            )
    return f"[{', '.join(rows)}]".encode()


def elements_from_json(space: Space, text: bytes) -> NDArray[np.object_]:
    """Return the object column that `elements_to_json` wrote; ValueError if the text is none."""
    try:
        return object_array([_from_json(space, data) for data in _rows(text.decode())])
    except (KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"not elements of {space}: {error!r}") from error


def _takes_too_much(text: str) -> bool:
    """Return whether an element would take more than `_MOST_BYTES`, or four times its text."""
    if len(text) < _SHORT:
        return False
    lists, parts, quotes = text.count("[") + text.count("{"), text.count(","), text.count('"')
    return 256 * lists + 56 * parts + 40 * quotes > _MOST_BYTES + 4 * len(text)


def _rows(text: str) -> Iterator[Any]:
    """Yield the elements of a list one by one: all of them as JSON take up to forty times more."""
    at = _after_blanks(text, 0)
    mark = text[at : at + 1]
    if mark != "[":
        raise ValueError("the text of a column is not a list")
    at = _after_blanks(text, at + 1)
    if text[at : at + 1] == "]":
        mark, at = "]", at + 1
    while mark != "]":
        row, at = _row(text, at)
        yield row
        at = _after_blanks(text, at)
        mark = text[at : at + 1]
        if mark not in ("]", ","):
            raise ValueError(f"the list of a column breaks off at character {at}")
        at = _after_blanks(text, at + 1)
    if _after_blanks(text, at) != len(text):
        raise ValueError(f"the text of a column goes on at character {at}, behind its list")


def _after_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return at if blanks is None else blanks.end()


def _row(text: str, at: int) -> tuple[Any, int]:
    """Return the element at a character of the text, and where it ends."""
    size = _SHORT
    while True:
        piece = whole = text[at : at + size]
        while _takes_too_much(piece):
            piece = piece[: len(piece) // 8 * 7]
        try:
            row, end = _DECODER.raw_decode(piece)
            if end < len(piece) or at + end == len(text):  # or else a number may go on
                return row, at + end
        except json.JSONDecodeError as error:
            if at + len(piece) == len(text):
                raise ValueError(f"the text of a column is not JSON: {error}") from error
        if len(piece) < len(whole):
            raise ValueError("an element of a column has too many parts")
        size *= 2


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
        if not isinstance(data, str):
            raise TypeError(f"text is of type {type(data).__name__}")
        return data
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
