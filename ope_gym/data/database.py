"""The file of recorded episodes: a SQLite database of seven tables, and one way to read it.

Episodes and their steps are numbered through the whole file, in the order in which the episodes
ended, and keep their numbers: a reader finds step 1,000 where it was, however many follow.
`ope_gym.data.store` appends episodes, `ope_gym.data.stored` reads them. Nothing in a file is code,
and no view or trigger is ever run: a file with other tables than these is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import platform
import sqlite3
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym.arguments import path_of
from ope_gym.data import encoding
from ope_gym.data.schema import Ints
from ope_gym.files import (
    DamagedFileError,
    ForeignFileError,
    PathLike,
    file_system,
    is_uri,
    require_regular,
)

SCHEMA = """
CREATE TABLE environment (        -- one row
    identity TEXT NOT NULL,       -- drawn by chance when the file was made; copies share it
    observation_space TEXT,       -- JSON, NULL if unknown
    action_space TEXT,            -- JSON, NULL if unknown
    horizon INTEGER,              -- time limit in steps, NULL if there is none
    crc INTEGER NOT NULL,         -- CRC-32 of the values above
    policies_crc INTEGER NOT NULL,-- of all rows of policies and their arrays, in order
    changes_crc INTEGER NOT NULL  -- of all rows of changes, in order
);
CREATE TABLE policies (           -- in the order in which they first acted
    id INTEGER PRIMARY KEY,       -- from 0
    kind TEXT NOT NULL            -- name of the class, such as "softmax"
);
CREATE TABLE policy_arrays (      -- parameters of the policies
    policy INTEGER NOT NULL REFERENCES policies,
    name TEXT NOT NULL,
    npy BLOB NOT NULL,            -- bytes of a .npy file
    PRIMARY KEY (policy, name)
) WITHOUT ROWID;
CREATE TABLE changes (            -- from step `clock` of a loop on, `policy` acts
    id INTEGER PRIMARY KEY,       -- from 0
    loop INTEGER NOT NULL,        -- number of the training loop, from 0
    clock INTEGER NOT NULL,       -- (vector) steps of the loop so far
    policy INTEGER NOT NULL REFERENCES policies,
    mid_episode INTEGER NOT NULL  -- 1 if an episode was under way
);
CREATE TABLE episodes (           -- in the order in which they ended
    id INTEGER PRIMARY KEY,       -- from 0
    policy INTEGER NOT NULL REFERENCES policies, -- that acted first
    length INTEGER NOT NULL,      -- steps
    return REAL NOT NULL,         -- sum of the rewards
    terminated INTEGER NOT NULL,  -- 1 if the environment ended it
    truncated INTEGER NOT NULL,   -- 1 if it was cut, for example by a time limit
    held_out INTEGER NOT NULL,    -- 1 if the learner never trained on it
    start_clock INTEGER,          -- step of the loop at which it began, NULL if unknown
    loop INTEGER,                 -- whose changes say who acted, NULL if its policy did not change
    first_step INTEGER NOT NULL   -- number of its first step among those of all episodes
);
CREATE TABLE chunks (             -- the steps of all episodes, one after the other
    first_step INTEGER PRIMARY KEY, -- number of its first step, from 0
    steps INTEGER NOT NULL,
    first_episode INTEGER NOT NULL, -- of those episodes that begin in it
    episodes INTEGER NOT NULL,    -- how many begin in it
    layout TEXT NOT NULL,         -- JSON: which columns the data are
    crc INTEGER NOT NULL,         -- CRC-32 of the values above and of the data
    episodes_crc INTEGER NOT NULL, -- of the rows of the episodes that begin in it
    data BLOB NOT NULL            -- the columns; last, so that SQLite can skip it
);
CREATE TABLE tails (              -- files beside this one, of recorders at work or killed
    owner INTEGER PRIMARY KEY,    -- drawn by chance; the entries of the tail have it, too
    batch INTEGER NOT NULL        -- of its entries, the last that is in this file
);
"""
APPLICATION = 0x6F706547  # "opeG": tells our databases from others
VERSION = 1
PATIENCE = 10.0  # seconds for which a writer or reader waits for another one
_HEAD = b"SQLite format 3\0"
_ROOM = 2**23  # bytes that a row may be larger than the file was: a recorder may be at work
# A row of `episodes` as five whole numbers; the CRC is that of these.
_ROSTER = (
    "SELECT policy, length, terminated + 2 * truncated + 4 * held_out, COALESCE(start_clock, -1), "
    "COALESCE(loop, -1) FROM episodes WHERE id >= ? AND id < ? ORDER BY id"
)
_ENDS = 1 << 16  # bytes at either end of a file that tell it from others
_AT_ONCE = 2**16  # rows that are read at once: as Python's numbers they take more room
CHUNK = (
    "SELECT first_step, steps, first_episode, episodes, layout, crc, episodes_crc, data FROM chunks"
)


class LostFileError(OSError):
    """Raised by a store whose file was deleted, replaced or cut by somebody else."""


class ChunkRow(NamedTuple):
    """A row of `chunks`."""

    first_step: int
    steps: int
    first_episode: int
    episodes: int
    layout: str
    crc: int
    episodes_crc: int
    data: bytes

    def checksum(self) -> int:
        """Return the CRC-32 of what it holds."""
        head = struct.pack("<4q", *self[:4]) + self.layout.encode()
        return zlib.crc32(self.data, zlib.crc32(head))

    def check_episodes(self, table: Ints, first: int) -> None:
        """Raise if the rows of the episodes that begin in it are not those that were written.

        Args:
            table: Rows of `read_roster`.
            first: Number of its first episode.
        """
        begin = self.first_episode - first
        rows = table[max(begin, 0) : begin + self.episodes]
        if len(rows) != self.episodes or crc_of_numbers(rows) != self.episodes_crc:
            last = self.first_episode + self.episodes - 1
            raise ValueError(
                f"rows {self.first_episode} to {last} of episodes do not match their checksum"
            )

    def columns(self, described: Any) -> dict[str, Any]:
        """Return its columns by name; ValueError if its data are not those that were written."""
        if self.checksum() != self.crc:
            raise ValueError(f"row {self.first_step} of chunks does not match its checksum")
        return encoding.decode(self.layout, self.data, self.steps, described)


def read_roster(db: sqlite3.Connection, first: int, stop: int) -> Ints:
    """Return (n, 5) policy, length, flags, clock at the start and loop of episodes first:stop."""
    parts = [np.empty(0, dtype=np.int64)]
    found = db.execute(_ROSTER, (first, stop))
    while rows := found.fetchmany(_AT_ONCE):
        numbers = itertools.chain.from_iterable(rows)
        parts.append(np.fromiter(numbers, np.int64, 5 * len(rows)))
    return np.concatenate(parts).reshape(-1, 5)


def crc_of_numbers(table: NDArray[Any], crc: int = 0) -> int:
    """Return the CRC-32 of whole numbers."""
    return zlib.crc32(table.astype("<i8", copy=False).tobytes(), crc)


def crc_of_text(*values: Any, crc: int = 0) -> int:
    """Return the CRC-32 of values as JSON."""
    return zlib.crc32(json.dumps(values).encode(), crc)


def crc_of_policy(k: int, kind: str, arrays: Sequence[tuple[str, bytes]], crc: int) -> int:
    """Return the CRC-32 of a policy and of those before it."""
    crc = crc_of_text(k, kind, crc=crc)
    for name, npy in arrays:
        crc = zlib.crc32(npy, crc_of_text(name, len(npy), crc=crc))
    return crc


# Opening -------------------------------------------------------------------------------------


def is_store(path: PathLike) -> bool:
    """Return whether a file is a SQLite database."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except OSError:
        return False


class _State(NamedTuple):
    """Signs of writers: at the beginning of a file, and beside it."""

    logged: bool  # a write-ahead log belongs to it
    changes: bytes  # counts transactions
    at_work: bool  # a recorder is at work, or was killed

    @classmethod
    def of(cls, path: str) -> _State:
        with open(path, "rb") as file:
            head = file.read(28)
        beside = any(os.path.exists(path + end) for end in ("-wal", "-journal"))
        return cls(head[18:20] == b"\2\2", head[24:28], beside)


@contextlib.contextmanager
def reading(path: PathLike, name: str | None = None) -> Iterator[sqlite3.Connection]:
    """Open a file for reading, and explain what goes wrong.

    A file that no recorder has open is read without locks, so that network file systems serve.

    Args:
        path: The file.
        name: Its name in messages.
    """
    path = os.path.abspath(path)
    name = path if name is None else name
    require_regular(path)
    with open(path, "rb") as file:  # for the errors that everybody knows
        if file.read(len(_HEAD)) != _HEAD:
            size = os.fstat(file.fileno()).st_size
            what = "is not an ope_gym file" if size else "is empty, without an episode"
            raise ForeignFileError(f"{name} {what}; check the path, nothing in it is readable")
    state = _State.of(path)
    if state.logged and not state.at_work:
        warnings.warn(
            f"{name} was copied while a recorder was writing it, or its recorder was killed, and "
            f"{os.path.basename(path)}-wal is not beside it: the latest episodes are missing if "
            "they were there; copy both, or close the recorder first",
            UserWarning,
            stacklevel=4,
        )
    try:
        with explained(name):
            if os.path.exists(f"{path}-journal"):  # a killed recorder has left a transaction open
                with contextlib.suppress(sqlite3.OperationalError):
                    undo = connect(path, "mode=rw")
                    undo.execute("SELECT 1 FROM sqlite_master").close()
                    undo.close()
            with contextlib.closing(
                connect(path, "mode=ro" if state.at_work else "immutable=1")
            ) as db:
                db.execute("PRAGMA query_only=ON")
                size = sum(os.path.getsize(x) for x in (path, f"{path}-wal") if os.path.exists(x))
                limit = min(size + _ROOM, 10**9)  # no text or blob can be larger
                db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limit)
                check_tables(db, name)
                yield db
    except DamagedFileError as error:
        if not state.at_work and _State.of(path) != state:
            words = "a recorder has begun to write while it was read; read it again"
            raise ValueError(f"{name}: {words}") from error
        raise


def connect(path: str, query: str) -> sqlite3.Connection:
    """Open a database without trust in what it holds."""
    quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    db = sqlite3.connect(
        f"file:{quoted}?{query}",
        uri=True,
        isolation_level=None,
        timeout=PATIENCE,
        check_same_thread=False,
    )
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA cell_size_check=ON")
    db.execute("PRAGMA mmap_size=0")  # a file that is cut meanwhile must not end the process
    return db


_TABLES = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"


@cache
def _tables() -> list[tuple[str, ...]]:
    """Return what SQLite keeps of our tables."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return db.execute(_TABLES).fetchall()


def require_ours(db: sqlite3.Connection, name: str) -> None:
    """Raise unless a database says that ope_gym made it."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION:
        raise ForeignFileError(f"{name} is a SQLite database, but not an ope_gym file")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise ForeignFileError(f"{name}: format version {version} is not known; update ope_gym")


def check_tables(db: sqlite3.Connection, name: str) -> None:
    """Raise unless a database has our tables and nothing else."""
    require_ours(db, name)
    expected = _tables()
    if db.execute(_TABLES).fetchmany(len(expected) + 1) != expected:
        raise ForeignFileError(f"{name} has other tables than those of an ope_gym file")


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn errors of SQLite into ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            reason = f"another program has been writing to it for {PATIENCE:g} s: {error}"
            raise OSError(errno.EAGAIN, reason, name) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            beside = [x for x in ("-wal", "-journal") if os.path.exists(name + x)]
            reason = f"it cannot be opened ({error})" + (
                f"; its recorder was killed or is at work, so that {name + beside[0]} belongs to "
                "it: copy both to a folder that you may write to"
                if beside
                else ""
            )
            raise PermissionError(errno.EACCES, reason, name) from error
        if code == sqlite3.SQLITE_IOERR:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} ({error})", name) from error
        raise damaged(name, str(error)) from error
    except UnicodeDecodeError as error:  # of a message of SQLite about damaged names
        raise damaged(name, str(error)) from error
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
            raise ForeignFileError(f"{name} is not an ope_gym file; check the path") from error
        raise damaged(name, str(error)) from error


def damaged(name: str, reason: object) -> DamagedFileError:
    """Return the error for contents that were not written so."""
    return DamagedFileError(
        f"{name}: the file is damaged, {reason}; keep what precedes the damage by "
        "Trajectories.load(path, recover=True).save(new_path)"
    )


# Files that several processes read ------------------------------------------------------------


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
        name = os.fspath(path_of("path", path))
        return cls(name, name if is_uri(name) else os.path.abspath(name), platform.node(), None)

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

    def open(self) -> Any:
        """Open a table, or raise if it is not the one that was seen."""
        require_regular(self.path)
        try:
            if is_uri(self.path):
                system, path = file_system(self.path)
                file = system.open_input_file(path)
            else:
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
        return OSError(error.errno or errno.EIO, words, self.name)

    def _another(self) -> ValueError:
        return ValueError(
            f"{self.name}: on {platform.node()} {self.path} is another file than the one that "
            f"{self.node} saw at first; all nodes need the same files, which must not change "
            "meanwhile"
        )


def mark_of(file: Any, size: int | None = None) -> Mark:
    """Return the mark of a table, or of its first `size` bytes; the file is then at its start."""
    size = file.seek(0, os.SEEK_END) if size is None else size
    file.seek(0)
    digest = hashlib.blake2b(file.read(min(size, _ENDS)), digest_size=16)
    file.seek(max(0, size - _ENDS))
    digest.update(file.read(min(size, _ENDS)))
    file.seek(0)
    return Mark(size, digest.digest())


def _identity(db: sqlite3.Connection) -> Mark:
    (identity,) = db.execute("SELECT identity FROM environment").fetchone() or ("",)
    return Mark(0, str(identity).encode())
