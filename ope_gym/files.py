"""Write files as a whole: whoever opens one, at any time and after any crash, finds old or new."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["in_place_of", "require_regular", "write_file"]


def require_regular(path: str | os.PathLike[str]) -> None:
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
def in_place_of(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the name of a new file, which takes the place of `path` at the end, if all went well.

    The new file is on the disk before it gets its name, and nobody else writes to its own: two
    processes that save to one path leave the file of one of them.
    """
    target = Path(os.path.realpath(path))
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


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write text or bytes to a file as a whole; a pipe or a device gets them as they come."""
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
