"""Files that several processes read: each must find the file that the first one saw."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from ope_gym.data.database import is_store, reading
from ope_gym.data.paths import PathLike, require_regular

_ENDS = 1 << 16  # bytes at either end of a file that tell it from others


class Mark(NamedTuple):
    """Tell a file from others: tables by their size and a digest of both ends, ours by identity."""

    size: int
    digest: bytes


@dataclass(frozen=True)
class SeenFile:
    """Remember a file as one process saw it, so that workers can tell if they find another.

    Args:
        name: The path as it was given, for messages.
        path: The absolute path: workers may have another working directory.
        node: The machine where it was seen.
        mark: Its mark, None if it cannot be read there; workers may still find it.
    """

    name: str
    path: str
    node: str
    mark: Mark | None

    @classmethod
    def of(cls, path: PathLike) -> SeenFile:
        """Return the file as this process sees it."""
        file = cls.unread(path)
        require_regular(path)
        with contextlib.suppress(OSError):
            return file.marked()
        return file

    @classmethod
    def unread(cls, path: PathLike) -> SeenFile:
        """Return a file at which nobody has looked yet."""
        return cls(os.fspath(path), os.path.abspath(path), platform.node(), None)

    def marked(self) -> SeenFile:
        """Return the file with its mark, which this process takes if it is the first to see it."""
        if self.mark is not None:
            return self
        if is_store(self.path):
            with reading(self.path, self.name) as db:
                return self.seen(db)
        with self.open() as file:
            return dataclasses.replace(self, mark=mark_of(file), node=platform.node())

    def seen(self, db: sqlite3.Connection) -> SeenFile:
        """Return a file of ours, which is open, with its mark."""
        if self.mark is not None:
            return self
        return dataclasses.replace(self, mark=_identity(db), node=platform.node())

    def open(self) -> BinaryIO:
        """Open a table, or raise if it is not the one that was seen."""
        require_regular(self.path)
        try:
            file = open(self.path, "rb")  # noqa: SIM115, the caller closes it
        except OSError as error:
            raise self._missing(error) from error
        if self.mark and self.mark.size and mark_of(file, self.mark.size) != self.mark:
            file.close()
            raise self._another()
        return file

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a file of ours, or raise if it is not the one that was seen; it may have grown."""
        if not os.path.exists(self.path):
            raise self._missing(FileNotFoundError(2, os.strerror(2)))
        with reading(self.path, self.name) as db:
            if self.mark is not None and _identity(db) != self.mark:
                raise self._another()
            yield db

    def _missing(self, error: OSError) -> OSError:
        here, words = platform.node(), error.strerror or str(error)
        if self.mark is not None or here != self.node:
            words += f" on {here} at {self.path}; all nodes need the file at the same path"
        return OSError(error.errno, words, self.name)

    def _another(self) -> ValueError:
        return ValueError(
            f"{self.name}: on {platform.node()} {self.path} is another file than the one that "
            f"{self.node} saw at first; all nodes need the same files, which must not change "
            "meanwhile"
        )


def mark_of(file: BinaryIO, size: int | None = None) -> Mark:
    """Return the mark of a table, or of its first `size` bytes; the file is then at its start."""
    size = os.fstat(file.fileno()).st_size if size is None else size
    file.seek(0)
    digest = hashlib.blake2b(file.read(min(size, _ENDS)), digest_size=16)
    file.seek(max(0, size - _ENDS))
    digest.update(file.read(min(size, _ENDS)))
    file.seek(0)
    return Mark(size, digest.digest())


def _identity(db: sqlite3.Connection) -> Mark:
    (identity,) = db.execute("SELECT identity FROM environment").fetchone() or ("",)
    return Mark(0, str(identity).encode())
