"""The rows of a table: in memory, or in Parquet files that are read a stretch at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ope_gym.arrays import offsets_of
from ope_gym.data.database import SeenFile
from ope_gym.data.paths import PathLike
from ope_gym.data.schema import Ints
from ope_gym.data.tables.cells import import_arrow
from ope_gym.data.tables.header import KEY

MAGIC = b"PAR1"
_BATCH = 1 << 16  # rows that are read at once, at most


@dataclass(frozen=True)
class MemoryRows:
    """The rows of an Arrow table."""

    table: Any

    @property
    def files(self) -> tuple[SeenFile, ...]:
        """No file."""
        return ()

    @property
    def name(self) -> str:
        """A name for messages."""
        return "the table"

    @property
    def groups(self) -> Ints:
        """(1,) all rows in one group."""
        return np.array([len(self.table)])

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.table.column_names)

    @property
    def header(self) -> bytes | None:
        """Facts that ope_gym wrote beside the columns, None if it wrote nothing."""
        found: bytes | None = (self.table.schema.metadata or {}).get(KEY.encode())
        return found

    def check_alike(self, columns: Sequence[str]) -> None:
        """Do nothing: there is one table."""

    def place(self, row: int) -> str:
        """Name a row in messages."""
        return f"row {row}"

    def read(self, columns: Sequence[str], first: int, steps: int | None) -> Iterator[Any]:
        """Yield the rows as one Arrow table."""
        yield self.table.select(list(columns))


@dataclass(frozen=True)
class FileRows:
    """The rows of Parquet files, one after the other.

    Args:
        files: The files.
        sizes: For each file, the rows of its row groups.
        types: For each file, the names and types of its columns.
        header: What ope_gym wrote beside the columns; None for files of others.
    """

    files: tuple[SeenFile, ...]
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[tuple[tuple[str, str], ...], ...]
    header: bytes | None

    @property
    def name(self) -> str:
        """A name for messages."""
        first, last = self.files[0].name, self.files[-1].name
        return first if first == last else f"{first} to {last}"

    @property
    def names(self) -> list[str]:
        """The names of the columns of the first file."""
        return [name for name, _ in self.types[0]]

    def check_alike(self, columns: Sequence[str]) -> None:
        """Raise if a file lacks one of these columns, or has it in another type than the first."""
        first = dict(self.types[0])
        for file, listed in zip(self.files, self.types, strict=True):
            types = dict(listed)
            for name in columns:
                if name not in types:
                    raise ValueError(
                        f"{file.name} has no column {name!r}, which {self.files[0].name} has: "
                        "files that are read together need the same columns"
                    )
                if types[name] != first[name]:
                    raise ValueError(
                        f"{file.name}: column {name!r} is of type {types[name]}, and in "
                        f"{self.files[0].name} of type {first[name]}: files that are read together "
                        "need columns of the same type"
                    )

    @property
    def groups(self) -> Ints:
        """(G,) rows of each row group of all files."""
        return np.array([rows for sizes in self.sizes for rows in sizes], dtype=np.int64)

    def place(self, row: int) -> str:
        """Name a row in messages."""
        starts = offsets_of([sum(sizes) for sizes in self.sizes])
        i = min(int(np.searchsorted(starts, row, side="right")), len(self.files)) - 1
        return f"{self.files[i].name}, row {row - int(starts[i])}"

    def read(self, columns: Sequence[str], first: int, steps: int | None) -> Iterator[Any]:
        """Yield the rows from row group `first` on as Arrow tables of at most `steps` rows."""
        pa = import_arrow()
        size = _BATCH if steps is None else max(1, min(steps, _BATCH))
        for file, sizes in zip(self.files, self.sizes, strict=True):
            if first < len(sizes):
                with opened(file) as parquet:
                    groups = list(range(first, len(sizes)))
                    for batch in parquet.iter_batches(size, row_groups=groups, columns=columns):
                        yield pa.Table.from_batches([batch]).select(list(columns))
            first = max(0, first - len(sizes))


@contextmanager
def opened(file: SeenFile) -> Iterator[Any]:
    """Open a Parquet file, or raise if it is not the one that was seen."""
    pa = import_arrow()
    import pyarrow.parquet as pq

    with file.open() as stream:
        try:
            # a column of a row group is not read whole; policies make long footers
            yield pq.ParquetFile(
                stream,
                pre_buffer=False,
                buffer_size=1 << 20,
                page_checksum_verification=True,
                thrift_string_size_limit=2**31 - 1,
            )
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file.name} cannot be read as a Parquet file: {error}") from error


def rows_of(file: SeenFile) -> FileRows:
    """Return the rows of a Parquet file."""
    marked = file.marked()
    with opened(marked) as parquet:
        found = parquet.metadata
        sizes = tuple(found.row_group(g).num_rows for g in range(found.num_row_groups))
        schema = parquet.schema_arrow
        header = (found.metadata or {}).get(KEY.encode())
    types = tuple((field.name, str(field.type)) for field in schema)
    return FileRows((marked,), (sizes,), (types,), header)


def join_rows(parts: Sequence[FileRows]) -> FileRows:
    """Return the rows of several files as those of one table."""
    return FileRows(
        tuple(file for part in parts for file in part.files),
        tuple(sizes for part in parts for sizes in part.sizes),
        tuple(types for part in parts for types in part.types),
        parts[0].header,
    )


def is_parquet(file: SeenFile) -> bool:
    """Return whether a path is a Parquet file or a folder, which may hold some."""
    if os.path.isdir(file.path):
        return True
    with file.open() as stream:
        return stream.read(len(MAGIC)) == MAGIC


def parquet_files(paths: Sequence[PathLike | SeenFile]) -> list[SeenFile]:
    """Return the Parquet files of paths and of the folders among them, in order of their names."""
    found: list[SeenFile] = []
    for path in paths:
        seen = path if isinstance(path, SeenFile) else SeenFile.unread(path)
        folder = Path(seen.path)
        if not folder.is_dir():
            found.append(seen)
            continue
        inside = sorted(
            one
            for one in folder.rglob("*.parquet")
            if not any(part.startswith(("_", ".")) for part in one.relative_to(folder).parts)
        )
        if not inside:
            said = f"the folder {seen.name} holds no file with the ending .parquet"
            ours = [os.path.join(seen.name, x.relative_to(folder)) for x in folder.rglob("*.ope")]
            if ours:
                more = f" (and {len(ours) - 3} more)" if len(ours) > 3 else ""
                said += f"; give its files of episodes by name: {', '.join(sorted(ours)[:3])}{more}"
            raise ValueError(said)
        for one in inside:
            name = os.path.join(seen.name, one.relative_to(folder))
            found.append(SeenFile(name, str(one), seen.node, None))
    return found
