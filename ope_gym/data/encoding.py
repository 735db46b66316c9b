"""Bytes of chunks and of policies, and back.

The data of a chunk are its columns, one after the other: raw, little-endian, in C order. A layout
in JSON says what they are. An array is `{"dtype": "<f4", "shape": [4]}`, the shape of one row;
nested batches are `{"tuple": [...]}` and `{"dict": [[key, ...], ...]}`; rows that are no numbers
(Text, Sequence, Graph, OneOf) are `{"json": true}`, a JSON list behind its length, an int64. In a
tail, `{"by_row": layout}` stands for all columns of a row, and then those of the next row.
Reading runs no code, and takes no memory for what the bytes do not hold.
"""

from __future__ import annotations

import io
import json
import math
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.batches import Tree
from ope_gym.data import space_json
from ope_gym.data.schema import BY_STEP, space_of
from ope_gym.data.spaces import NUMERIC_DTYPES, Space

# The policy of a step follows from the episode and from the changes of policy.
STORED = tuple(name for name in BY_STEP if name != "policy_ids")
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_LENGTH = struct.Struct("<q")  # of a JSON list, before it
MOST_JSON = 2**18  # characters of a layout: as Python objects they take up to forty times more


def encode(data: Any, rows: slice = slice(None), described: Any = None) -> tuple[str, bytes]:
    """Return layout and bytes of some rows.

    Args:
        data: Has the columns of `STORED`.
        rows: Rows to take.
        described: Has both spaces, by default as `data` does.
    """
    columns = [getattr(data, name) for name in STORED]
    if all(type(x) is np.ndarray and x.dtype.str in NUMERIC_DTYPES for x in columns):
        kinds = tuple((x.dtype.str, x.shape[1:]) for x in columns)
        return _layout(kinds), b"".join([x[rows].tobytes() for x in columns])
    described = data if described is None else described
    pieces: list[bytes] = []
    layout = {
        name: _pack(tree, _space(described, name), name, rows, pieces)
        for name, tree in zip(STORED, columns, strict=True)
    }
    text = _ENCODER.encode(layout)
    if len(text) > MOST_JSON:
        raise ValueError(
            f"observations and actions have so many parts that their layout takes {len(text):,} "
            f"characters, a file may hold {MOST_JSON:,}; use a Box for what has a fixed number"
        )
    return text, b"".join(pieces)


@lru_cache
def _layout(kinds: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Return the layout of plain arrays; those of a recorder are all alike."""
    named = zip(STORED, kinds, strict=True)
    return _ENCODER.encode({name: {"dtype": d, "shape": list(shape)} for name, (d, shape) in named})


def decode(text: str, data: bytes, steps: int, described: Any) -> dict[str, Tree]:
    """Return the columns of a chunk by name, read-only; ValueError if the bytes hold none.

    Args:
        text: Layout.
        data: Bytes.
        steps: Number of rows.
        described: Has `observation_space` and `action_space`.
    """
    if len(text) > MOST_JSON:
        raise ValueError(f"a layout has {len(text):,} characters, more than {MOST_JSON:,}")
    layout = json.loads(text)
    by_row = layout.keys() == {"by_row"}
    layout = layout["by_row"] if by_row else layout
    if layout.keys() != set(STORED) or not 0 < steps <= len(data):
        raise ValueError(f"{steps} steps of the columns {sorted(layout)}")
    pieces = (_Rows if by_row else _Pieces)(data, steps)
    columns = {name: pieces.unpack(layout[name], _space(described, name)) for name in STORED}
    if pieces.at != len(data):
        raise ValueError(f"the columns have {pieces.at} bytes of {len(data)}")
    return columns


def no_rows(text: str, described: Any) -> dict[str, Tree]:
    """Return the columns of a layout without a row, to compare layouts."""
    layout, pieces = json.loads(text), _Pieces(b"", 0)
    return {name: pieces.unpack(layout[name], _space(described, name)) for name in STORED}


def _space(described: Any, name: str) -> Space | None:
    return space_of(described, name) if name in ("observations", "actions") else None


def _pack(tree: Tree, space: Space | None, name: str, rows: slice, pieces: list[bytes]) -> Any:
    """Add the bytes of a batch to `pieces`, and return its layout."""
    if isinstance(tree, tuple):
        parts = _parts(space)
        return {"tuple": [_pack(x, parts.get(i), name, rows, pieces) for i, x in enumerate(tree)]}
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"a dict of {name} needs string keys to be saved, got {list(tree)}")
        parts = _parts(space)
        pairs = [[key, _pack(x, parts.get(key), name, rows, pieces)] for key, x in tree.items()]
        return {"dict": pairs}
    if tree.dtype == object:
        if space is None:
            raise TypeError(
                f"{name} holds Python objects; to save them give the buffer their space"
            )
        text = space_json.elements_to_json(space, tree[rows])
        pieces += [_LENGTH.pack(len(text)), text]
        return {"json": True}
    dtype = tree.dtype.newbyteorder("<")
    if dtype.str not in NUMERIC_DTYPES:
        raise TypeError(f"{name} has dtype {tree.dtype}, which a file cannot hold")
    pieces.append(tree[rows].astype(dtype, copy=False).tobytes())
    return {"dtype": dtype.str, "shape": list(tree.shape[1:])}


class _Pieces:
    """Takes columns from the bytes of a chunk, one after the other."""

    def __init__(self, data: bytes, steps: int) -> None:
        self.data, self.steps, self.at = memoryview(data), steps, 0

    def unpack(self, layout: Any, space: Space | None) -> Tree:
        """Return the next column."""
        if layout.keys() == {"dtype", "shape"}:
            return self._array(layout["dtype"], layout["shape"])
        ((kind, content),) = layout.items()
        parts = _parts(space)
        if kind == "tuple":
            return tuple(self.unpack(x, parts.get(i)) for i, x in enumerate(content))
        if kind == "dict":
            return {str(key): self.unpack(x, parts.get(key)) for key, x in content}
        if kind != "json" or space is None:
            raise ValueError(f"unknown layout {kind!r} of a column")
        (size,) = _LENGTH.unpack(self._take(_LENGTH.size))
        elements = space_json.elements_from_json(space, bytes(self._take(size)))
        if len(elements) != self.steps:
            raise ValueError(f"{len(elements)} elements of {space} in {self.steps} steps")
        return elements

    def _array(self, dtype: Any, shape: Any) -> NDArray[Any]:
        known = isinstance(dtype, str) and dtype in NUMERIC_DTYPES
        if not known or not all(type(x) is int and x >= 0 for x in shape):
            raise ValueError(f"an array of dtype {dtype!r}, shape {shape}")
        whole = (self.steps, *shape)
        array = _view(self._take(math.prod(whole) * np.dtype(dtype).itemsize), dtype)
        return array.reshape(whole)

    def _take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self.data) - self.at:  # before anything of that size is allocated
            raise ValueError(f"its columns take more than its {len(self.data):,} bytes")
        self.at += size
        return self.data[self.at - size : self.at]


class _Rows(_Pieces):
    """Takes columns from the bytes of rows, one after the other."""

    def _take(self, size: int) -> memoryview:
        if len(self.data) % self.steps or size % self.steps:
            raise ValueError(f"{self.steps} rows in {len(self.data):,} bytes")
        rows = np.frombuffer(self.data, np.uint8).reshape(self.steps, -1)
        begin, width = self.at // self.steps, size // self.steps
        super()._take(size)
        return memoryview(rows[:, begin : begin + width].tobytes())


def _view(data: memoryview | bytes, dtype: str) -> NDArray[Any]:
    """Return bytes as an array in the byte order of this machine."""
    if dtype != "|b1":
        array: NDArray[Any] = np.frombuffer(data, dtype)
        # numba compiles its loops anew for arrays that are not aligned
        return array.astype(array.dtype.newbyteorder("="), copy=not array.flags.aligned)
    truths = np.frombuffer(data, np.uint8)
    if truths.size and truths.max() > 1:
        raise ValueError("a column has truth values other than 0 and 1")
    return truths.view(np.bool_)


def _parts(space: Space | None) -> dict[Any, Space]:
    inner = getattr(space, "spaces", None)
    return dict(enumerate(inner)) if isinstance(inner, tuple) else dict(inner or {})


def to_npy(array: NDArray[Any]) -> bytes:
    """Return the bytes of a .npy file."""
    array = np.asarray(array)
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in NUMERIC_DTYPES:
        raise TypeError(f"a policy has an array of dtype {array.dtype}, which a file cannot hold")
    file = io.BytesIO()
    np.lib.format.write_array(file, array.astype(dtype, copy=False), (1, 0), allow_pickle=False)
    return file.getvalue()


def from_npy(data: bytes) -> NDArray[Any]:
    """Return the array of a .npy file; ValueError if the bytes are none of numbers."""
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("it is not in version 1.0 of the npy format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # NumPy lets errors of Python's tokenizer through
        raise ValueError(f"an array cannot be read: {error}") from error
    begin = file.tell()
    if dtype.str not in NUMERIC_DTYPES or math.prod(shape) * dtype.itemsize != len(data) - begin:
        raise ValueError(f"an array of dtype {dtype}, shape {shape} in {len(data)} bytes")
    return _view(data[begin:], dtype.str).reshape(shape, order="F" if fortran else "C").copy()
