"""Columns of Arrow tables as arrays, and back; errors name the column and the row.

Arrow is what pandas, polars, Parquet and CSV have in common, so every table becomes an Arrow table
first. A batch whose rows have a shape is a column of lists, nested as deep as the shape is long. A
missing number of a column of floats is NaN, as pandas has it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces
from numpy.typing import NDArray

from ope_gym.batches import Tree
from ope_gym.data import space_json, spaces
from ope_gym.data.schema import Flags, Ints
from ope_gym.data.spaces import Space
from ope_gym.data.tables.layout import Spec
from ope_gym.files import import_arrow

Place = Callable[[int], str]
"""Names a row of a table in an error message ("log.parquet, row 17")."""


_REMEDY = "fill it, or leave the episode out"
_LARGEST = 2**63 - 1025  # the largest float below 2^63, and below it any integer of 64 bits


class BadCell(ValueError):
    """Raised for a cell that cannot be used.

    Args:
        place: Where its row is.
        column: The name of its column.
        problem: What is wrong, and what to do.
    """

    def __init__(self, place: str, column: str, problem: str) -> None:
        super().__init__(f"{place}, column {column!r}: {problem}")


def refuse(wrong: Flags, name: str, place: Place, problem: Callable[[int], str]) -> None:
    """Raise for the first row that is wrong, with the problem of that row."""
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadCell(place(row), name, problem(row))


# Tables of any library -----------------------------------------------------------------------


def to_table(frame: Any) -> Any:
    """Return a pandas, polars or Arrow table, or a dict of columns, as an Arrow table."""
    pa = import_arrow()
    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "iloc") and hasattr(frame, "columns"):  # pandas
        columns = [(str(name), frame.iloc[:, i]) for i, name in enumerate(frame.columns)]
        header = frame.attrs.get("ope_gym")
    elif isinstance(frame, Mapping):
        columns, header = [(str(name), values) for name, values in frame.items()], None
    elif hasattr(frame, "collect") or hasattr(frame, "__arrow_c_stream__"):  # polars and others
        return pa.table(frame.collect() if hasattr(frame, "collect") else frame)
    else:
        raise TypeError(
            f"table is {type(frame).__name__}: give a pandas, polars or pyarrow table, a dict of "
            "columns, or the path of a Parquet or CSV file or of a folder of them"
        )
    made = [_to_column(name, values) for name, values in columns]
    table = pa.Table.from_arrays(made, names=[name for name, _ in columns])
    return table.replace_schema_metadata({"ope_gym": header}) if header else table


def _to_column(name: str, values: Any) -> Any:
    """Return a pandas column, an array or a list as an Arrow array."""
    pa = import_arrow()
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return to_arrow(values, name)

    cells = getattr(values, "iloc", values)  # by position

    def problem(n: int) -> Exception | None:
        """Return what keeps the first n cells from being a column."""
        try:
            pa.array(cells[:n], from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            return error
        return None

    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        row = bisect_left(range(len(values)), True, key=lambda i: problem(i + 1) is not None)
        reason = f"{cells[row]!r} does not fit into a column with the cells before it ({error})"
        raise BadCell(f"row {row}", name, reason) from error


# Columns as arrays ---------------------------------------------------------------------------


def plain(column: Any) -> Any:
    """Return a column as one array without dictionaries and extension types."""
    pa = import_arrow()
    array = column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast("string") if str(array.type) == "string_view" else array


def labels(column: Any, name: str, place: Place) -> Any:
    """Return a column of labels, of whatever kind, as an Arrow array without gaps."""
    array = plain(column)
    _require_values(array, name, place)
    return array


def whole_numbers(column: Any, name: str, place: Place) -> Ints:
    """Return a column of whole numbers, which may be stored as floats."""
    array = floats(column, name, place, as_stored=True)
    if array.dtype.kind in "fu":
        wrong = (array != np.floor(array)) | (abs(array) > _LARGEST)
        refuse(wrong, name, place, lambda row: f"{array[row]:g} is not a whole number of 64 bits")
    return array.astype(np.int64)


def flags(column: Any, name: str, place: Place) -> Flags:
    """Return a column of truth values, which may be stored as 0 and 1."""
    array = whole_numbers(column, name, place)
    wrong = (array != 0) & (array != 1)
    refuse(wrong, name, place, lambda row: f"{array[row]} is not a truth value, expected 0 or 1")
    return array.astype(np.bool_)


def floats(
    column: Any, name: str, place: Place, *, finite: bool = True, as_stored: bool = False
) -> NDArray[Any]:
    """Return a column of single numbers, as float64 or as they are stored."""
    array = numbers(column, name, place)
    if array.ndim != 1:
        raise BadCell(place(0), name, "holds lists, expected one number in each row")
    if finite:
        _require_finite(array, name, place)
    return array if as_stored else array.astype(np.float64, copy=False)


def numbers(column: Any, name: str, place: Place) -> NDArray[Any]:
    """Return a column of numbers, or of equally long lists of numbers, as an array."""
    pa = import_arrow()
    shape = getattr(column.type, "shape", None)  # tensors are flat lists with a shape
    if shape is not None:
        axes = getattr(column.type, "permutation", None)
        if axes is not None and list(axes) != sorted(axes):
            raise BadCell(place(0), name, "holds tensors with permuted axes: store them as lists")
        return numbers(plain(column), name, place).reshape(len(column), *shape)
    array = plain(column)
    if _is_list(array.type):
        _require_values(array, name, place)
        sizes = np.asarray(import_compute().list_value_length(array))
        size = int(sizes[0]) if len(sizes) else getattr(array.type, "list_size", 0)
        refuse(
            *(sizes != size, name, place),
            lambda row: (
                f"a list of {sizes[row]}, but the first row has one of {size}: all rows "
                "need the same length"
            ),
        )
        inner = numbers(array.flatten(), name, lambda i: place(i // max(size, 1)))
        return inner.reshape(len(array), size, *inner.shape[1:])
    is_float = pa.types.is_floating(array.type)
    if not (is_float or pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
        raise _not_numbers(array, name, place)
    if not is_float:
        _require_values(array, name, place)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def import_compute() -> Any:
    """Return the functions of Arrow."""
    import pyarrow.compute

    return pyarrow.compute


def _is_list(kind: Any) -> bool:
    types = import_arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string")


def _not_numbers(array: Any, name: str, place: Place) -> BadCell:
    """Return the error for a column that does not hold numbers."""
    kind = array.type
    row = int(np.argmax(np.asarray(array.is_valid())))
    if import_arrow().types.is_null(kind):
        problem = "has no value, and nor has any other row of the column"
    elif import_arrow().types.is_temporal(kind):
        problem = (
            f"{array[row]} is a time stamp ({kind}), expected numbers; count the steps of each "
            "episode from 0, or turn times into numbers (seconds since its start)"
        )
    elif _is_text(kind):
        problem = (
            f"{array[row].as_py()!r} is text, expected numbers; number the different values from "
            "0, or make a column of 0 and 1 for each"
        )
    else:
        problem = f"the column is of type {kind}, expected numbers; cast it to a number type"
    return BadCell(place(row), name, problem)


def _require_values(array: Any, name: str, place: Place) -> None:
    wrong = np.asarray(array.is_null(nan_is_null=True))
    refuse(wrong, name, place, lambda row: f"has no value; {_REMEDY}")


def _require_finite(array: NDArray[Any], name: str, place: Place) -> None:
    if array.dtype.kind == "f":
        wrong = ~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        problem = f"it must be finite; {_REMEDY}"
        refuse(wrong, name, place, lambda row: f"is {array[row]}, {problem}")


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
            batch(table, name, part, place, finite=finite)
            for name, part in zip(spec, inner, strict=True)
        )
    if isinstance(spec, Mapping):
        by_key = dict(parts) if isinstance(space, gym_spaces.Dict) else {}
        return {
            key: batch(table, name, by_key.get(key), place, finite=finite)
            for key, name in spec.items()
        }
    if not isinstance(spec, str):
        columns = [floats(table[name], name, place, finite=finite, as_stored=True) for name in spec]
        return np.stack(columns, axis=1)
    if space is not None and not spaces.is_column(space):
        return _elements(table[spec], spec, space, place)
    values = numbers(table[spec], spec, place)
    if finite:
        _require_finite(values, spec, place)
    row = getattr(space, "shape", None) or ()
    if values.ndim == 2 and len(row) > 1 and math.prod(row) == values.shape[1]:
        return values.reshape(len(values), *row)  # others store images as flat lists
    return values


def _elements(column: Any, name: str, space: Space, place: Place) -> NDArray[np.object_]:
    """Return elements of a space that is no column of numbers: texts, or JSON."""
    array = labels(column, name, place)
    if not _is_text(array.type):
        raise BadCell(place(0), name, f"is of type {array.type}, expected text for {space}")
    texts = array.to_pylist()
    if isinstance(space, gym_spaces.Text):
        return spaces.object_array(texts)
    return space_json.elements_from_json(space, f"[{','.join(texts)}]".encode())


def to_columns(tree: Tree, spec: Spec, space: Space | None) -> list[tuple[str, Any]]:
    """Return the columns of a batch with their names."""
    parts: Any = getattr(space, "spaces", None)
    if isinstance(tree, tuple):
        inner = parts if isinstance(parts, tuple) else (None,) * len(tree)
        trees: Any = zip(tree, spec, inner, strict=True)
    elif isinstance(tree, dict):
        known = dict(parts) if isinstance(space, gym_spaces.Dict) else {}
        trees = [(branch, spec[key], known.get(key)) for key, branch in tree.items()]
    elif tree.dtype != object:
        return [(spec, to_arrow(tree, spec))]
    elif space is None:
        raise TypeError(f"{spec} holds Python objects; to store them, their space must be known")
    elif isinstance(space, gym_spaces.Text):
        return [(spec, import_arrow().array([str(text) for text in tree], "string"))]
    else:
        rows = json.loads(space_json.elements_to_json(space, tree))
        return [(spec, import_arrow().array([json.dumps(row) for row in rows], "string"))]
    return [column for branch in trees for column in to_columns(*branch)]


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
