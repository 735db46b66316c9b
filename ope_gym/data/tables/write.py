"""Write trajectories as tables: one row a step, and what is not in the columns beside them."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from ope_gym.batches import Tree
from ope_gym.data.schema import COLUMNS, Columns, space_of
from ope_gym.data.tables import cells
from ope_gym.data.tables.header import KEY, header_to_json, sealed
from ope_gym.data.tables.layout import Spec
from ope_gym.files import PathLike, import_arrow, in_place_of

_NAMES = {
    "observations": "observation",
    "actions": "action",
    "rewards": "reward",
    "log_probs": "log_prob",
    "policy_ids": "policy",
    "schedule_ids": "schedule",
}
"""The columns of a table that have another name in trajectories."""

_AT_THE_END = ("terminated", "truncated")  # in the last row of an episode; false before it
_GROUP = 1 << 16  # steps of a row group


def arrow_table(data: Columns) -> Any:
    """Return trajectories as an Arrow table, with a header in the metadata of its schema."""
    pa = import_arrow()
    columns = [("episode", pa.array(data.episode_ids)), ("step", pa.array(data.steps))]
    header = header_to_json(data, "the table")
    is_last = np.zeros(data.n_steps, np.bool_)
    is_last[data.offsets[1:] - 1] = True
    for column in COLUMNS:
        values, name = getattr(data, column.name), _NAMES.get(column.name, column.name)
        if column.dtype is None:
            header[name] = _spec(values, name)
            columns += cells.to_columns(values, header[name], space_of(data, column.name))
            continue
        if column.per == "episode":
            values = np.repeat(values, data.lengths)
        if name in _AT_THE_END:
            values = values & is_last
        columns.append((name, cells.to_arrow(values, name)))
    names = [name for name, _ in columns]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two columns would be called {name!r}: rename a key of a space")
    text = json.dumps(sealed(header), allow_nan=False)
    return pa.table(dict(columns)).replace_schema_metadata({KEY: text})


def _spec(tree: Tree, name: str) -> Spec:
    """Return the columns of a batch, by the names of its parts."""
    if isinstance(tree, tuple):
        return tuple(_spec(part, f"{name}.{i}") for i, part in enumerate(tree))
    if isinstance(tree, dict):
        return {key: _spec(part, f"{name}.{key}") for key, part in tree.items()}
    return name


def to_library(table: Any, library: str) -> Any:
    """Return an Arrow table as a table of "pandas", "polars" or "pyarrow"."""
    if library not in ("pandas", "polars", "pyarrow"):
        raise ValueError(f"library is {library!r}; choose pandas, polars or pyarrow")
    try:
        module = import_module(library)
    except ImportError as error:
        raise ImportError(
            f"to_frame({library!r}) needs {library}: pip install {library}"
        ) from error
    if library == "polars":
        return module.from_arrow(table)
    if library == "pandas":
        frame = table.to_pandas()
        frame.attrs[KEY] = table.schema.metadata[KEY.encode()].decode()
        return frame
    return table


def write_parquet(data: Columns, path: PathLike) -> None:
    """Write a Parquet file, which replaces an older one only when it is complete.

    Row groups end where episodes do, so that large files are read in blocks.
    """
    table = arrow_table(data)
    from pyarrow.parquet import ParquetWriter

    small = ["episode", "step", "policy", "schedule", "start_clock"]
    with (
        in_place_of(path) as temporary,
        open(temporary, "wb") as file,
        ParquetWriter(
            file,
            table.schema,
            compression="zstd",
            use_dictionary=small,  # numbers as they are: a dictionary may take -0.0 for 0.0
            write_page_checksum=True,
        ) as writer,
    ):
        # episodes of one group: their first steps lie in one stretch of _GROUP steps
        firsts = np.unique(data.offsets[:-1] // _GROUP, return_index=True)[1]
        bounds = [*data.offsets[firsts].tolist(), data.n_steps]
        for begin, end in pairwise(bounds):
            writer.write_table(table.slice(begin, end - begin), row_group_size=end - begin)
