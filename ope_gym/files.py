"""Paths, and files that are written as a whole: whoever opens one finds the old or the new."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ope_gym.arguments import path_of

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


def require_regular(path: PathLike) -> None:
    """Raise if a path names a pipe, a device or a socket: opening one may wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # whoever opens it says what is wrong
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(
            f"{os.fspath(path)} is a pipe, a device or a socket, and episodes are kept in regular "
            "files, which can be read twice: copy it to a file, or choose another path"
        )


@contextlib.contextmanager
def in_place_of(path: PathLike) -> Iterator[Path]:
    """Give the name of a new file, which takes the place of `path` at the end, if all went well.

    The new file is on the disk before it gets its name, and nobody else writes to its own: two
    processes that save to one path leave the file of one of them.
    """
    target = Path(os.path.realpath(path_of("path", path)))
    require_regular(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot save {path}: the folder {target.parent} does not exist")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        _sync(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            reason = f"cannot save, {os.strerror(error.errno)}; what was there is as it was"
            raise OSError(error.errno, reason, os.fspath(path)) from error
        raise
    if sys.platform != "win32":  # a name is on the disk when its folder is
        _sync(target.parent)


def write_file(path: PathLike, content: str | bytes) -> None:
    """Write text or bytes to a file as a whole; a pipe or a device gets them as they come."""
    path_of("path", path)
    data = content.encode() if isinstance(content, str) else content
    if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/stdout
        Path(path).write_bytes(data)
        return
    with in_place_of(path) as temporary:
        temporary.write_bytes(data)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
