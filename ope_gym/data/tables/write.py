"""Write trajectories as tables: one row a step, and what is not in the columns beside them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import numpy as np

from ope_gym.batches import Tree
from ope_gym.data.paths import PathLike, in_place_of
from ope_gym.data.schema import COLUMNS, Columns
from ope_gym.data.tables import cells
from ope_gym.data.tables.header import KEY, header_to_json

NAMES = {
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
    pa = cells.import_arrow()
    columns: dict[str, Any] = {"episode": pa.array(data.episode_ids), "step": pa.array(data.steps)}
    specs: dict[str, Any] = {}
    for column in COLUMNS:
        values, name = getattr(data, column.name), NAMES.get(column.name, column.name)
        if column.dtype is None:
            specs[name] = _spec(values, name)
            space = getattr(data, f"{name}_space")
            added = cells.leaves_to_arrow(values, specs[name], space)
        elif column.per == "step":
            added = {name: cells.to_arrow(values, name)}
        else:
            repeated = np.repeat(values, data.lengths)
            if name in _AT_THE_END:
                repeated[np.setdiff1d(np.arange(data.n_steps), data.offsets[1:] - 1)] = False
            added = {name: cells.to_arrow(repeated, name)}
        taken = columns.keys() & added.keys()
        if taken:
            raise ValueError(f"two columns would be called {min(taken)!r}: rename a key of a space")
        columns |= added
    text = header_to_json(data, specs["observation"], specs["action"])
    return pa.table(columns).replace_schema_metadata({KEY: text})


def _spec(tree: Tree, name: str) -> Any:
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
        frame.attrs["ope_gym"] = table.schema.metadata[KEY.encode()].decode()
        return frame
    return table


def write_parquet(data: Columns, path: PathLike) -> None:
    """Write a Parquet file, which replaces an older one only when it is complete.

    Row groups end where episodes do, so that large files are read in blocks.
    """
    cells.import_arrow()
    import pyarrow.parquet as pq

    table = arrow_table(data)
    small = ["episode", "step", "policy", "schedule", "start_clock"]
    with (
        in_place_of(path) as temporary,
        open(temporary, "wb") as file,
        pq.ParquetWriter(
            file,
            table.schema,
            compression="zstd",
            use_dictionary=small,  # numbers as they are: a dictionary may take -0.0 for 0.0
            write_page_checksum=True,
        ) as writer,
    ):
        first = 0
        while first < len(data):
            stop = int(np.searchsorted(data.offsets, data.offsets[first] + _GROUP, side="right"))
            last = max(stop - 1, first + 1)
            begin, end = int(data.offsets[first]), int(data.offsets[last])
            writer.write_table(table.slice(begin, end - begin), row_group_size=end - begin)
            first = last
        writer.close()
        file.flush()
        os.fsync(file.fileno())
