"""Paths of files of episodes, and what may be wrong with them."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

PathLike: TypeAlias = str | os.PathLike[str]
# Errors of code that takes data of the wrong shape apart.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class DamagedFileError(ValueError):
    """Raised for a file of episodes whose contents are not those that were written."""


class ForeignFileError(DamagedFileError):
    """Raised for a file that ope_gym did not write: nothing in it can be recovered."""


def is_uri(path: PathLike) -> bool:
    """Return whether a path names a file of another system, such as s3://bucket/log.parquet."""
    return "://" in os.fspath(path)


def import_arrow() -> Any:
    """Return pyarrow, or say how to install it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            'tables need pyarrow, which is missing: pip install -e ".[tables]" -c constraints.txt'
        ) from error
    return pyarrow


def file_system(path: str) -> tuple[Any, str]:
    """Return the file system of Arrow that a full path or URI names, and the path in it."""
    import_arrow()  # says how to install it
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, LocalFileSystem

    if not is_uri(path):
        return LocalFileSystem(), path
    try:
        system, inside = FileSystem.from_uri(path)
        return system, inside
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be opened: {error}") from error
