"""The rows of a table: in memory, or in files that are read a stretch at a time.

Parquet files are read in batches of rows. A CSV file is read whole each time: the types of its
columns follow from all of its rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from ope_gym.arrays import offsets_of
from ope_gym.data.database import SeenFile
from ope_gym.data.schema import Ints
from ope_gym.data.tables.header import KEY
from ope_gym.files import MALFORMED, PathLike, file_system, import_arrow, is_uri

_MAGIC = b"PAR1"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ENDINGS = (".parquet", *_DELIMITERS)
_BATCH = 1 << 16  # rows that are read at once, at most


@dataclass(frozen=True)
class Rows:
    """The rows of files, one after the other, or of a table in memory.

    Args:
        files: The files; none for a table in memory.
        sizes: Rows of the row groups of each file.
        types: Types of the columns of each file, by name.
        names: Names of the columns of the first file; one that is there twice is here twice.
        header: What ope_gym wrote beside the columns; None for tables of others.
        table: The table in memory, None for files.
    """

    files: tuple[SeenFile, ...]
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[dict[str, str], ...]
    names: list[str]
    header: bytes | None
    table: Any = None

    @property
    def name(self) -> str:
        """A name for messages."""
        if not self.files:
            return "the table"
        first, last = self.files[0].name, self.files[-1].name
        return first if first == last else f"{first} to {last}"

    @property
    def groups(self) -> Ints:
        """(G + 1,) first row of each row group of all files, and the number of rows."""
        return offsets_of([rows for sizes in self.sizes for rows in sizes])

    def check_alike(self, columns: Sequence[str]) -> None:
        """Raise if a file lacks one of these columns, or has it in another type than the first."""
        first = self.files[0].name if self.files else ""
        for file, types in zip(self.files, self.types, strict=True):
            for name in columns:
                kind, expected = types.get(name, "missing"), self.types[0][name]
                if kind != expected:
                    raise ValueError(
                        f"{file.name}: column {name!r} is {kind}, and in {first} it is {expected}: "
                        "files that are read together need the same columns"
                    )

    def place(self, row: int) -> str:
        """Name a row in messages."""
        if not self.files:
            return f"row {row}"
        starts = offsets_of([sum(sizes) for sizes in self.sizes])
        i = min(int(np.searchsorted(starts, row, side="right")), len(self.files)) - 1
        return f"{self.files[i].name}, row {row - int(starts[i])}"

    def read(
        self, columns: Sequence[str], first: int, stop: int, steps: int | None = None
    ) -> Iterator[Any]:
        """Yield rows first:stop as Arrow tables, those of Parquet files of at most `steps` rows."""
        if not self.files:
            if first < stop:
                yield self.table.select(list(columns)).slice(first, stop - first)
            return
        begin = 0
        for file, sizes in zip(self.files, self.sizes, strict=True):
            starts = begin + offsets_of(sizes)
            begin = int(starts[-1])
            if begin <= first or starts[0] >= stop:
                continue
            group = max(int(np.searchsorted(starts, first, side="right")) - 1, 0)
            row = int(starts[group])
            for table in _tables(file, list(columns), group, min(steps or _BATCH, _BATCH)):
                low, high = max(first - row, 0), min(stop - row, len(table))
                if low < high:
                    yield table.slice(low, high - low)
                row += len(table)
                if row >= stop:
                    return
            if row != begin:
                raise ValueError(f"{file.name} holds other rows than it says")


def rows_in_memory(table: Any) -> Rows:
    """Return the rows of an Arrow table."""
    header = (table.schema.metadata or {}).get(KEY.encode())
    return Rows((), ((len(table),),), (), list(table.column_names), header, table)


def rows_of(file: SeenFile) -> Rows:
    """Return the rows of a file."""
    marked = file.marked()
    with _explained(marked), marked.open() as stream:
        if _delimiter(marked) is None:
            parquet = _parquet(stream)
            metadata, schema = parquet.metadata, parquet.schema_arrow
            sizes = tuple(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))
            header = (metadata.metadata or {}).get(KEY.encode())
        else:
            table = _read_csv(marked, stream)
            schema, sizes, header = table.schema, (len(table),), None
        types = {field.name: str(field.type) for field in schema}
    return Rows((marked,), (sizes,), (types,), list(schema.names), header)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several files as those of one table."""
    return Rows(
        tuple(file for part in parts for file in part.files),
        tuple(sizes for part in parts for sizes in part.sizes),
        tuple(types for part in parts for types in part.types),
        parts[0].names,
        parts[0].header,
    )


def is_table(file: SeenFile) -> bool:
    """Return whether a path is a Parquet or CSV file, or a folder, which may hold some."""
    if is_uri(file.path) or os.path.isdir(file.path) or _delimiter(file) is not None:
        return True
    with file.open() as stream:
        return bytes(stream.read(len(_MAGIC))) == _MAGIC


def table_files(paths: Sequence[PathLike | SeenFile]) -> list[SeenFile]:
    """Return the tables at paths and in the folders among them, in order of their names."""
    listed: list[SeenFile] = []
    for path in paths:
        seen = path if isinstance(path, SeenFile) else SeenFile.unread(path)
        inside = _inside(seen)
        listed += [seen] if inside is None else inside
    return listed


def _inside(folder: SeenFile) -> list[SeenFile] | None:
    """Return the tables of a folder and of those in it; None for a file."""
    system, path = file_system(folder.path)
    from pyarrow.fs import FileSelector, FileType

    if system.get_file_info(path).type != FileType.Directory:
        return None
    files = [x.path for x in system.get_file_info(FileSelector(path, recursive=True))]
    names = sorted(PurePath(x).relative_to(PurePath(path)) for x in files)
    names = [x for x in names if not any(part.startswith(("_", ".")) for part in x.parts)]
    inside = [
        SeenFile(f"{folder.name}/{x}", f"{folder.path}/{x}", folder.node, None)
        for x in names
        if x.suffix in _ENDINGS
    ]
    if not inside:
        problem = f"the folder {folder.name} holds no file with the ending {' or '.join(_ENDINGS)}"
        ours = [f"{folder.name}/{x}" for x in names if x.suffix == ".ope"]
        if ours:
            more = f" (and {len(ours) - 3} more)" if len(ours) > 3 else ""
            problem += f"; give its files of episodes by name: {', '.join(ours[:3])}{more}"
        raise ValueError(problem)
    return inside


def _delimiter(file: SeenFile) -> str | None:
    """Return what separates the cells of a text file; None for Parquet."""
    return _DELIMITERS.get(PurePath(file.path).suffix.lower())


@contextmanager
def _explained(file: SeenFile) -> Iterator[None]:
    """Turn the errors of Arrow, and those of forged contents, into ours."""
    kind = "Parquet" if _delimiter(file) is None else "CSV"
    try:
        yield
    except FileNotFoundError:
        raise
    except (import_arrow().ArrowException, OSError, *MALFORMED) as error:
        raise ValueError(f"{file.name} cannot be read as a {kind} file: {error}") from error


def _tables(file: SeenFile, columns: list[str], group: int, size: int) -> Iterator[Any]:
    """Yield rows of a file from a row group on as Arrow tables."""
    pa = import_arrow()
    with _explained(file), file.open() as stream:
        if _delimiter(file) is not None:
            batches = _read_csv(file, stream).to_batches(max_chunksize=size)
        else:
            parquet = _parquet(stream)
            groups = list(range(group, parquet.metadata.num_row_groups))
            batches = parquet.iter_batches(size, row_groups=groups, columns=columns)
        for batch in batches:
            yield pa.Table.from_batches([batch]).select(columns)


def _parquet(stream: Any) -> Any:
    """Open a Parquet file; its pages are read when needed, and their checksums are compared."""
    import_arrow()
    from pyarrow.parquet import ParquetFile

    return ParquetFile(
        stream,
        pre_buffer=False,  # a column of a row group is not read whole
        buffer_size=1 << 20,
        page_checksum_verification=True,
        thrift_string_size_limit=2**31 - 1,  # policies make long footers
    )


def _read_csv(file: SeenFile, stream: Any) -> Any:
    """Return a CSV file as an Arrow table; empty cells have no value."""
    import_arrow()
    from pyarrow import csv

    return csv.read_csv(
        stream,
        # a thread of Arrow that ends after the interpreter aborts the process
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(delimiter=_delimiter(file)),
        convert_options=csv.ConvertOptions(strings_can_be_null=True),
    )
