"""Columns of Arrow tables as arrays, and back; errors name the column and the row.

Arrow is what pandas, polars and Parquet have in common, so every table becomes an Arrow table
first. A batch whose rows have a shape is a column of lists, nested as deep as the shape is long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces
from numpy.typing import NDArray

from ope_gym.batches import Tree
from ope_gym.data import space_json, spaces
from ope_gym.data.schema import Flags, Ints
from ope_gym.data.spaces import Space
from ope_gym.data.tables.layout import Spec

Place = Callable[[int], str]
"""Names a row of a table in an error message ("log.parquet, row 17")."""


def import_arrow() -> Any:
    """Return pyarrow, or say how to install it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            'tables need pyarrow, which is missing: pip install -e ".[tables]" -c constraints.txt'
        ) from error
    return pyarrow


class BadCell(ValueError):
    """Raised for a cell that cannot be used.

    Args:
        place: Where its row is.
        column: The name of its column.
        problem: What is wrong, and what to do.
    """

    def __init__(self, place: str, column: str, problem: str) -> None:
        super().__init__(f"{place}, column {column!r}: {problem}")


# Tables of any library -----------------------------------------------------------------------


def to_table(frame: Any) -> Any:
    """Return a pandas, polars or Arrow table, or a dict of columns, as an Arrow table."""
    pa = import_arrow()
    if isinstance(frame, pa.Table):
        return frame
    kind = type(frame).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(frame, "columns"):
        columns = [(str(name), frame.iloc[:, i]) for i, name in enumerate(frame.columns)]
        made = [_column_of(pa, name, series) for name, series in columns]
        table = pa.Table.from_arrays(made, names=[name for name, _ in columns])
        text = frame.attrs.get("ope_gym")
        return table.replace_schema_metadata({"ope_gym": text}) if text else table
    if kind == "polars":
        return (frame.collect() if hasattr(frame, "collect") else frame).to_arrow()
    if isinstance(frame, Mapping):
        made = [_column_of(pa, name, values) for name, values in frame.items()]
        return pa.Table.from_arrays(made, names=list(map(str, frame)))
    if hasattr(frame, "__arrow_c_stream__"):
        return pa.table(frame)
    raise TypeError(
        f"table is {type(frame).__name__}: give a pandas, polars or pyarrow table, a dict of "
        "columns, or the path of a Parquet file or of a folder of them"
    )


def _column_of(pa: Any, name: str, values: Any) -> Any:
    """Return a pandas column or a list as an Arrow array; NaN stays NaN."""
    array = getattr(values, "array", values)
    try:
        if hasattr(array, "__arrow_array__"):
            return pa.array(array)
        if isinstance(values, np.ndarray) and values.ndim > 1:
            return to_arrow(values, name)
        return pa.array(
            np.asarray(values) if hasattr(values, "iloc") else values, from_pandas=False
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise _mixed(name, list(values), error) from error


def _mixed(name: str, values: Sequence[Any], error: Exception) -> ValueError:
    """Return the error for a column whose cells are of several kinds."""
    first = next((value for value in values if not _is_missing(value)), None)
    for row, value in enumerate(values):
        if not _is_missing(value) and _kind(value) != _kind(first):
            return BadCell(
                f"row {row}",
                name,
                f"{value!r} is {_kind(value)}, but the rows before it hold {_kind(first)}: a "
                "column holds values of one kind",
            )
    return ValueError(f"column {name!r} cannot be read: {error}")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _kind(value: Any) -> str:
    if isinstance(value, str | bytes):
        return "text"
    if isinstance(value, bool | np.bool_):
        return "truth values"
    if isinstance(value, int | float | np.number):
        return "numbers"
    if isinstance(value, list | tuple | np.ndarray):
        return "lists"
    return f"{type(value).__name__} objects"


# Columns as arrays ---------------------------------------------------------------------------


def plain(column: Any) -> Any:
    """Return a column as one array without dictionaries and extension types."""
    pa = import_arrow()
    array = column
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # as older versions of pyarrow return it
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array


def labels(column: Any, name: str, place: Place) -> Any:
    """Return a column of labels, of whatever kind, as an Arrow array without gaps."""
    pa = import_arrow()
    array = plain(column)
    _require_values(array, name, place)
    if pa.types.is_floating(array.type):
        _require_finite(array.to_numpy(zero_copy_only=False), name, place)
    return array


def whole_numbers(column: Any, name: str, place: Place) -> Ints:
    """Return a column of whole numbers, which may be stored as floats."""
    array = numbers(column, name, place)
    if array.ndim != 1:
        raise BadCell(place(0), name, "holds lists, expected one whole number in each row")
    if array.dtype.kind == "f":
        _require_finite(array, name, place)
        wrong = array != np.floor(array)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise BadCell(place(row), name, f"{array[row]:g} is not a whole number")
    return array.astype(np.int64)


def flags(column: Any, name: str, place: Place) -> Flags:
    """Return a column of truth values, which may be stored as 0 and 1."""
    array = whole_numbers(column, name, place)
    wrong = (array != 0) & (array != 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadCell(place(row), name, f"{array[row]} is not a truth value, expected 0 or 1")
    return array.astype(np.bool_)


def floats(column: Any, name: str, place: Place, *, finite: bool = True) -> NDArray[np.float64]:
    """Return a column of numbers as float64."""
    array = numbers(column, name, place, gaps=not finite)
    if array.ndim != 1:
        raise BadCell(place(0), name, "holds lists, expected one number in each row")
    if finite:
        _require_finite(array, name, place)
    return array.astype(np.float64, copy=False)


def numbers(column: Any, name: str, place: Place, *, gaps: bool = False) -> NDArray[Any]:
    """Return a column of numbers, or of equally long lists of numbers, as an array.

    Args:
        column: An Arrow array.
        name: Its name.
        place: Names a row in messages.
        gaps: Whether a missing float is NaN.
    """
    pa = import_arrow()
    shape = getattr(column.type, "shape", None)  # tensors are flat lists with a shape
    if shape is not None:
        axes = getattr(column.type, "permutation", None)
        if axes is not None and list(axes) != sorted(axes):
            raise BadCell(place(0), name, "holds tensors with permuted axes: store them as lists")
        flat = numbers(plain(column), name, place, gaps=gaps)
        return flat.reshape(len(flat), *shape)
    array = plain(column)
    kind = array.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _require_values(array, name, place)
        size = _list_size(array, name, place)
        inner = numbers(array.flatten(), name, lambda i: place(i // max(size, 1)), gaps=gaps)
        return inner.reshape(len(array), size, *inner.shape[1:])
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not numeric:
        _refuse(pa, array, name, place)
    if not (gaps and pa.types.is_floating(kind)):
        _require_values(array, name, place)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _list_size(array: Any, name: str, place: Place) -> int:
    import pyarrow.compute as pc

    sizes = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    if not len(sizes):
        return int(getattr(array.type, "list_size", 0))
    wrong = sizes != sizes[0]
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadCell(
            place(row),
            name,
            f"a list of {sizes[row]}, but the first row has one of {sizes[0]}: all rows need the "
            "same length",
        )
    return int(sizes[0])


def _refuse(pa: Any, array: Any, name: str, place: Place) -> None:
    """Raise for a column that does not hold numbers."""
    kind, first = array.type, 0
    if array.null_count < len(array):
        first = int(np.argmax(array.is_valid().to_numpy(zero_copy_only=False)))
    if pa.types.is_null(kind):
        raise BadCell(place(0), name, "has no value, and nor has any other row of the column")
    if pa.types.is_temporal(kind):
        problem = (
            f"{array[first].as_py()} is a time stamp ({kind}), expected numbers; count the steps "
            "of each episode from 0, or turn times into numbers (seconds since its start)"
        )
    elif _is_text(kind):
        problem = (
            f"{array[first].as_py()!r} is text, expected numbers; number the different values "
            "from 0, or make a column of 0 and 1 for each"
        )
    else:
        problem = f"the column is of type {kind}, expected numbers; cast it to a number type"
    raise BadCell(place(first), name, problem)


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _require_values(array: Any, name: str, place: Place) -> None:
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise BadCell(place(row), name, "has no value; fill it, or leave the episode out")


def _require_finite(array: NDArray[Any], name: str, place: Place) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0, 0])
        value = array[row]
        raise BadCell(
            place(row), name, f"is {value}, it must be finite; fill it, or leave the episode out"
        )


# Batches -------------------------------------------------------------------------------------


def batch(table: Any, spec: Spec, space: Space | None, place: Place, *, finite: bool) -> Tree:
    """Return the columns of observations or actions as a batch.

    Args:
        table: An Arrow table.
        spec: Its columns.
        space: The space of one row; None if unknown.
        place: Names a row in messages.
        finite: Whether numbers must be finite.
    """
    parts: Any = getattr(space, "spaces", None)
    if isinstance(spec, tuple):
        known = isinstance(parts, tuple) and len(parts) == len(spec)
        inner = parts if known else (None,) * len(spec)
        return tuple(
            batch(table, one, part, place, finite=finite)
            for one, part in zip(spec, inner, strict=True)
        )
    if isinstance(spec, Mapping):
        by_key = dict(parts) if isinstance(space, gym_spaces.Dict) else {}
        return {
            key: batch(table, one, by_key.get(key), place, finite=finite)
            for key, one in spec.items()
        }
    if isinstance(spec, str):
        if space is not None and not spaces.is_column(space):
            return _elements(table[spec], spec, space, place)
        found = numbers(table[spec], spec, place, gaps=not finite)
        if finite:
            _require_finite(found, spec, place)
        row = getattr(space, "shape", None) or ()
        if found.ndim == 2 and len(row) > 1 and math.prod(row) == found.shape[1]:
            return found.reshape(len(found), *row)  # others store images as flat lists
        return found
    columns = [batch(table, name, None, place, finite=finite) for name in spec]
    for name, column in zip(spec, columns, strict=True):
        if column.ndim != 1:
            raise BadCell(place(0), name, "holds lists, but is one of several columns of a vector")
    return np.stack(columns, axis=1)


def _elements(column: Any, name: str, space: Space, place: Place) -> NDArray[np.object_]:
    """Return elements of a space that is no column of numbers: texts, or JSON."""
    array = plain(column)
    _require_values(array, name, place)
    if not _is_text(array.type):
        raise BadCell(place(0), name, f"is of type {array.type}, expected text for {space}")
    texts = array.to_pylist()
    if isinstance(space, gym_spaces.Text):
        return spaces.object_array(texts)
    return space_json.elements_from_json(space, f"[{','.join(texts)}]".encode())


def leaves_to_arrow(tree: Tree, spec: Spec, space: Space | None) -> dict[str, Any]:
    """Return the columns of a batch by name."""
    parts: Any = getattr(space, "spaces", None)
    if isinstance(tree, tuple):
        inner = parts if isinstance(parts, tuple) else (None,) * len(tree)
        trees: Any = zip(tree, spec, inner, strict=True)
    elif isinstance(tree, dict):
        known = dict(parts) if isinstance(space, gym_spaces.Dict) else {}
        trees = [(branch, spec[key], known.get(key)) for key, branch in tree.items()]
    else:
        return {spec: _leaf_to_arrow(tree, spec, space)}
    found: dict[str, Any] = {}
    for branch, names, part in trees:
        for name, column in leaves_to_arrow(branch, names, part).items():
            if name in found:
                raise ValueError(f"two parts of a batch would be column {name!r}: rename a key")
            found[name] = column
    return found


def _leaf_to_arrow(leaf: NDArray[Any], name: str, space: Space | None) -> Any:
    if leaf.dtype != object:
        return to_arrow(leaf, name)
    if space is None:
        raise TypeError(f"{name} holds Python objects; to store them, their space must be known")
    if isinstance(space, gym_spaces.Text):
        return import_arrow().array([str(text) for text in leaf], "string")
    rows = json.loads(space_json.elements_to_json(space, leaf))
    return import_arrow().array([json.dumps(row) for row in rows], "string")


def to_arrow(values: NDArray[Any], name: str) -> Any:
    """Return an array as an Arrow column, rows with a shape as nested lists."""
    pa = import_arrow()
    if 0 in values.shape[1:]:
        raise ValueError(f"{name} has rows of shape {values.shape[1:]}: a table has no empty cells")
    array = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    column = pa.array(array.reshape(-1), from_pandas=False)
    for size in reversed(values.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
