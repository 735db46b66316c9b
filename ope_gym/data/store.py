"""Append to files of recorded episodes.

Each `append` is a transaction in a write-ahead log (`file-wal` beside the file while a recorder is
at work): what it wrote survives the death of the process from then on. It is brought to the disk,
safe from a power cut, by the first `append` that comes a second after the last time, and by
`close`. Small chunks are joined from time to time, so that reading is fast.

A recorder need not check each episode, and ask its policy for propensities, before the episode is
safe: `keep` writes episodes as they came to a tail beside the file, in a few microseconds. The next
`append` has the same episodes, checked and complete. Readers see them from then on, at the latest
with the first episode that ends a second after the last `append`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import sqlite3
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.data import encoding, space_json
from ope_gym.data.database import (
    APPLICATION,
    CHUNK,
    SCHEMA,
    VERSION,
    ChunkRow,
    LostFileError,
    check_tables,
    connect,
    crc_of_numbers,
    crc_of_policy,
    crc_of_text,
    damaged,
    explained,
    read_roster,
    require_ours,
)
from ope_gym.data.schema import Columns, Floats, Ints
from ope_gym.data.spaces import Space
from ope_gym.data.tail import Tail, tails_of
from ope_gym.files import MALFORMED, PathLike, require_regular
from ope_gym.policies import POLICY_KINDS, UNREGISTERED, Policy, UnavailablePolicy, policy_to_arrays

_CHUNK_BYTES = 2**22  # of a chunk, about: large enough to read fast, small enough for any memory
_MERGE_ROWS = 1024  # small chunks that are joined at the latest
_ROWS = 2**16  # episodes that are written at once: as Python's numbers they take more room
_OBJECT_BYTES = 2**10  # that an element takes that is no array of numbers, about
_PAGE = 2**14  # bytes of a page: large ones halve the time of a transaction of some megabytes
_SYNC_SECONDS = 1.0  # between two times at which all is brought to the disk
# Of the log, at which SQLite moves them to the file; each time it waits for the disk.
_LOG_PAGES = 1000

# Appending -----------------------------------------------------------------------------------


class Store:
    """Appends policies, their changes and finished episodes to a file.

    What could not be written, because the disk is full, waits in memory for the next attempt.
    Several stores may write to one file at once, also in several processes: they take turns.

    Args:
        path: The file; made, or continued if it exists.
        observation_space: The space of one observation, None if unknown.
        action_space: The space of one action, None if unknown.
        horizon: The time limit of the episodes, None if there is none.
        whole: Whether nobody reads the file before it is closed, so that no log is needed.
    """

    def __init__(
        self,
        path: PathLike,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        horizon: int | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.path = os.path.abspath(path)
        env = space_json.env_to_json(observation_space, action_space, horizon)
        texts = [
            json.dumps(env[x]) if env[x] else None for x in ("observation_space", "action_space")
        ]
        self._env = (*texts, horizon)
        self._spaces = SimpleNamespace(
            observation_space=observation_space, action_space=action_space
        )
        self._whole = whole
        self._policies: list[int] = []  # numbers in the file of ours
        self._loops: dict[int, int] = {}
        self._new_policies: list[tuple[str, list[tuple[str, bytes]]]] = []
        self._new_changes: list[tuple[int, int, int, bool]] = []
        self._waiting: list[Columns] = []
        self._tails: dict[int, Tail] = {}  # of the loops
        self._kept: Counter[int] = Counter()  # episodes that wait, of loops whose tails hold them
        self._all_answer = True  # whether the file holds all that its policies need
        self._small = 0  # chunks that may be merged
        self._synced = time.monotonic()
        self._process = os.getpid()
        self._db: sqlite3.Connection | None = None
        self._mark: tuple[int, int] | None = None
        self._size = 0
        self._open()

    def _open(self) -> sqlite3.Connection:
        """Open the file, for the first time or after `close`."""
        if self._db is not None:
            return self._db
        require_regular(self.path)
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if self._mark is not None:
            self._require_file()
        with explained(self.path):
            db = connect(self.path, "mode=rwc")
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            if not self._whole:
                db.execute("PRAGMA wal_checkpoint")  # so that a copy without the log is a file
        self._db = db
        self._size, self._mark = os.path.getsize(self.path), _mark(self.path)
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Make the tables of a new file, or check those of an old one."""
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():  # new, or hardly begun
            db.execute(f"PRAGMA page_size={_PAGE}")
            db.execute(f"PRAGMA application_id={APPLICATION}")
        require_ours(db, self.path)
        if self._whole:
            db.execute("PRAGMA journal_mode=OFF")
            db.execute("PRAGMA synchronous=OFF")
        else:
            _open_log(db, self.path)
        with transaction(db):
            if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in SCHEMA.split(";\n")[:-1]:
                    db.execute(statement)
                row = (secrets.token_hex(8), *self._env)
                values = (*row, crc_of_text(*row))
                db.execute("INSERT INTO environment VALUES (?,?,?,?,?,0,0)", values)
                db.execute(f"PRAGMA user_version={VERSION}")
            check_tables(db, self.path)
            env = "SELECT observation_space, action_space, horizon FROM environment"
            if (theirs := db.execute(env).fetchone()) != self._env:
                raise ValueError(
                    f"path={self.path!r} holds episodes of another environment ({theirs}), this "
                    f"one has {self._env}; choose another file"
                )

    @property
    def policies(self) -> int:
        """Number of policies that were added."""
        return len(self._policies) + len(self._new_policies)

    def add_policy(self, policy: Policy) -> int:
        """Note a policy for the next write, and return its number."""
        kind, arrays = describe_policy(policy, self.path)
        npy = [(name, encoding.to_npy(array)) for name, array in sorted(arrays.items())]
        self._new_policies.append((kind, npy))
        # a reader knows the kinds of this package, but not whether another package is there
        module = type(policy).__module__
        ours = module.startswith("ope_gym.policies.") and kind in POLICY_KINDS
        self._all_answer &= ours and kind != "torch"
        return self.policies - 1

    def change(self, loop: int, clock: int, policy: int, *, mid_episode: bool) -> None:
        """Note for the next write that from a clock of a loop on a policy acts."""
        self._new_changes.append((loop, clock, policy, mid_episode))

    def append(self, episodes: Columns, kept: int | None = None) -> None:
        """Append finished episodes, and all that was noted before.

        Args:
            episodes: Their policies are numbers that `add_policy` returned, their schedules the
                loops given to `change`.
            kept: The loop if they are all that it gave to `keep` since the last time, without
                those that turned out to be invalid.
        """
        self._waiting.append(episodes)
        if kept is not None:
            self._kept[kept] += len(episodes)
        self.flush()

    @property
    def answers(self) -> bool:
        """Whether every reader can ask the policies in the file for propensities."""
        return self._all_answer

    def keep(self, layout: str, data: bytes, facts: Ints, policies: Ints | int, loop: int) -> bool:
        """Write finished episodes as they came to the tail; the next `append` has them checked.

        Args:
            layout: Layout of the columns, see `ope_gym.data.encoding`.
            data: Columns, with NaN where the policies in the file are to be asked.
            facts: (5, n) clock at the start, length, terminated, truncated and held out.
            policies: (n,) numbers of the policies that acted first, or one for all.
            loop: Loop in which they were played, as given to `change`.

        Returns:
            Whether they are safe. If not (something waits, a second has passed, or the batch is
            full), `append` should follow at once.
        """
        tail = self._tails.get(loop)
        if tail is None or not tail.batch or self._waiting or self._new_changes or self.inherited:
            return False
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            return False
        roster = np.empty((facts.shape[1], 5), dtype=np.int64)
        if isinstance(policies, int):
            roster[:, 0] = self._policies[policies]
        else:
            roster[:, 0] = [self._policies[k] for k in policies.tolist()]
        roster[:, 3], roster[:, 1], terminated, truncated, held_out = facts
        roster[:, 2] = terminated + 2 * truncated + 4 * held_out
        roster[:, 4] = self._loops.get(loop, -1)
        return tail.append(layout, roster, data)

    @property
    def waiting(self) -> int:
        """Number of episodes that are not in the file yet."""
        return sum(map(len, self._waiting))

    @property
    def inherited(self) -> bool:
        """Whether a parent process has opened the file, of which this one is a fork."""
        return self._process != os.getpid()

    def flush(self) -> None:
        """Write all that waits, in one transaction."""
        if self.inherited:
            raise RuntimeError(
                f"{self.path} was opened by process {self._process}, of which this one, "
                f"{os.getpid()}, is a fork: make a recorder of its own here, with a file of its own"
            )
        if not (self._waiting or self._new_policies or self._new_changes):
            return
        db = self._open()
        self._require_file()
        now = time.monotonic()
        due = now - self._synced > _SYNC_SECONDS and not (self._whole or db.in_transaction)
        policies, loops, small = self._policies, self._loops, self._small
        self._add_tails()
        done = {i: x for i, x in self._tails.items() if i in self._kept or not x.pending}
        if self._new_policies or self._new_changes:  # which count when they are in the file
            policies, loops = list(policies), dict(loops)
        with explained(self.path):
            if due:
                db.execute("PRAGMA synchronous=FULL")
            try:
                with transaction(db):
                    if self._new_policies or self._new_changes:
                        self._write_changes(db, policies, loops)
                    small += self._write_waiting(db, policies, loops)
                    batches_done = [(tail.owner, tail.batch) for tail in done.values()]
                    db.executemany("INSERT OR REPLACE INTO tails VALUES (?,?)", batches_done)
                    if small >= _MERGE_ROWS:
                        small = _merge(db, self.path, self._spaces)
            finally:
                if due:
                    db.execute("PRAGMA synchronous=NORMAL")
        self._policies, self._loops, self._small = policies, loops, small
        for loop, *_ in self._new_changes:
            if loop in self._tails:
                self._tails[loop].changes += 1
        for loop, tail in done.items():
            tail.begin_batch(self._kept[loop])
        self._new_policies, self._new_changes, self._waiting = [], [], []
        self._kept.clear()
        self._synced = now if due else self._synced

    def _add_tails(self) -> None:
        """Give the loops that begin a tail each."""
        for loop in {loop for loop, *_ in self._new_changes} - self._loops.keys():
            if not (self._whole or loop in self._tails) and (tail := Tail.new(self.path)):
                self._tails[loop] = tail

    def _write_waiting(
        self, db: sqlite3.Connection, policies: list[int], loops: dict[int, int]
    ) -> int:
        """Write the episodes that wait, and return how many chunks are small."""
        small = 0
        for episodes in list(self._waiting):
            try:
                small += write_episodes(db, episodes, _roster(episodes, policies, loops))
            except (TypeError, ValueError):  # no later attempt would go better
                self._waiting.remove(episodes)
                raise
        return small

    def close(self) -> None:
        """Write all that waits, bring it to the disk and release the file; may be called again."""
        if self.inherited:
            return  # the file and its locks are those of the parent
        self.flush()  # if that fails, a later call tries again
        db = self._db
        if db is None:
            return
        try:
            with explained(self.path):
                for tail in self._tails.values():
                    if tail.pending:  # nobody handed them over: the next reader takes them in
                        tail.close()
                    else:
                        tail.remove()
                        db.execute("DELETE FROM tails WHERE owner=?", (tail.owner,))
                if self._small:
                    with transaction(db):
                        self._small = _merge(db, self.path, self._spaces)
                if self._whole:
                    _sync(self.path)
                    return
                db.execute("PRAGMA synchronous=FULL")
                close_log(db)
        finally:
            self.release()

    def release(self) -> None:
        """Close the file without writing anything."""
        if not self.inherited and self._db is not None:
            self._db.close()
            self._db = None
            for tail in self._tails.values():
                tail.remove()
            self._tails = {}

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _require_file(self) -> None:
        """Raise if the file is no longer the one that was opened."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            raise LostFileError(errno.ENOENT, "it was deleted", self.path) from None
        if (status.st_dev, status.st_ino) != self._mark:
            raise LostFileError(errno.ESTALE, "another file has taken its place", self.path)
        if status.st_size < self._size:
            raise LostFileError(errno.EIO, "somebody else has cut it", self.path)
        self._size = status.st_size

    def _write_changes(
        self, db: sqlite3.Connection, policies: list[int], loops: dict[int, int]
    ) -> None:
        """Write new policies and changes; add their numbers in the file to the arguments."""
        policies_crc, changes_crc = db.execute(
            "SELECT policies_crc, changes_crc FROM environment"
        ).fetchone()
        for kind, arrays in self._new_policies:
            (k,) = db.execute("SELECT COALESCE(max(id) + 1, 0) FROM policies").fetchone()
            db.execute("INSERT INTO policies VALUES (?,?)", (k, kind))
            db.executemany(
                "INSERT INTO policy_arrays VALUES (?,?,?)",
                [(k, name, npy) for name, npy in arrays],
            )
            policies_crc = crc_of_policy(k, kind, arrays, policies_crc)
            policies.append(k)
        (row,) = db.execute("SELECT COALESCE(max(id) + 1, 0) FROM changes").fetchone()
        rows = []
        for i, (loop, clock, policy, mid_episode) in enumerate(self._new_changes):
            if loop not in loops:
                (free,) = db.execute("SELECT COALESCE(max(loop) + 1, 0) FROM changes").fetchone()
                loops[loop] = max([free, *(x + 1 for x in loops.values())])
            rows.append((row + i, loops[loop], int(clock), policies[policy], int(mid_episode)))
        db.executemany("INSERT INTO changes VALUES (?,?,?,?,?)", rows)
        changes_crc = crc_of_numbers(np.array(rows, dtype=np.int64), changes_crc)
        db.execute(
            "UPDATE environment SET policies_crc=?, changes_crc=?", (policies_crc, changes_crc)
        )


def write_episodes(db: sqlite3.Connection, data: Columns, roster: Ints) -> int:
    """Write episodes behind all others, and return how many chunks are small."""
    if not len(data):
        return 0
    (episode,) = db.execute("SELECT COALESCE(max(id) + 1, 0) FROM episodes").fetchone()
    last = db.execute(
        "SELECT first_step + steps FROM chunks ORDER BY first_step DESC LIMIT 1"
    ).fetchone()
    step = last[0] if last else 0
    starts = data.offsets[:-1]
    returns = np.add.reduceat(data.rewards, starts)
    for begin in range(0, len(data), _ROWS):
        rows = slice(begin, begin + _ROWS)
        _insert_episodes(db, episode + begin, roster[rows], returns[rows], starts[rows] + step)
    return _write_chunks(db, data, roster, episode, step)


def _roster(data: Columns, policies: list[int], loops: dict[int, int]) -> Ints:
    """Return (n, 5) the rows of episodes, as `read_roster` does."""
    loop_of = np.array([*(loops.get(i, -1) for i in range(max(loops, default=-1) + 1)), -1])
    flags = data.terminated + 2 * data.truncated + 4 * data.held_out
    acted = [policies[k] for k in data.policy_ids[data.offsets[:-1]].tolist()]
    columns = [acted, data.lengths, flags, data.start_clock, loop_of[data.schedule_ids]]
    return np.array(columns, dtype=np.int64).T


def _insert_episodes(
    db: sqlite3.Connection, episode: int, roster: Ints, returns: Floats, first_steps: Ints
) -> None:
    """Insert rows of episodes, numbered from `episode`."""
    columns = (*roster.T.tolist(), returns.tolist(), first_steps.tolist())
    db.executemany(
        "INSERT INTO episodes VALUES (?1, ?2, ?3, ?7, ?4 & 1, ?4 / 2 & 1, ?4 / 4, "
        "nullif(?5, -1), nullif(?6, -1), ?8)",
        zip(range(episode, episode + len(roster)), *columns, strict=True),
    )


def _write_chunks(
    db: sqlite3.Connection, data: Columns, roster: Ints, episode: int, step: int
) -> int:
    """Write the steps of episodes, so many bytes at a time; return how many are small."""
    leaves = [x for name in encoding.STORED for x in batches.leaves(getattr(data, name))]
    width = sum(x[:1].nbytes if x.dtype != object else _OBJECT_BYTES for x in leaves)
    begins = np.arange(0, data.n_steps, max(1, _CHUNK_BYTES // width))
    ends = [*begins[1:].tolist(), data.n_steps]
    firsts = data.offsets[:-1].searchsorted(begins).tolist()
    stops = [*firsts[1:], len(data)]
    small = 0
    for begin, end, first, stop in zip(begins.tolist(), ends, firsts, stops, strict=True):
        layout, payload = encoding.encode(data, slice(begin, end))
        row = ChunkRow(
            step + begin, end - begin, episode + first, stop - first, layout, 0, 0, payload
        )
        _insert(db, row, roster[first:stop])
        small += len(payload) < _CHUNK_BYTES // 2
    return small


def _insert(db: sqlite3.Connection, row: ChunkRow, roster: Ints) -> None:
    db.execute(
        "INSERT INTO chunks VALUES (?,?,?,?,?,?,?,?)",
        row._replace(crc=row.checksum(), episodes_crc=crc_of_numbers(roster)),
    )


def _merge(db: sqlite3.Connection, path: str, described: Any) -> int:
    """Join the small chunks at the end of the file; return how many are left."""
    rows: list[ChunkRow] = []
    size = 0
    for found in db.execute(f"{CHUNK} ORDER BY first_step DESC"):
        row = ChunkRow(*found)
        size += len(row.data)
        if rows and (size > _CHUNK_BYTES or row.layout != rows[0].layout):
            break
        rows.insert(0, row)
    if len(rows) < 2:
        return 0
    first, last = rows[0], rows[-1]
    episodes = last.first_episode + last.episodes - first.first_episode
    roster = read_roster(db, first.first_episode, first.first_episode + episodes)
    try:
        for row in rows:
            row.check_episodes(roster, first.first_episode)
        parts = [row.columns(described) for row in rows]
    except MALFORMED as error:
        raise damaged(path, error) from error
    columns = {name: batches.concatenate([x[name] for x in parts]) for name in encoding.STORED}
    layout, data = encoding.encode(SimpleNamespace(**columns, **vars(described)))
    db.execute("DELETE FROM chunks WHERE first_step >= ?", (first.first_step,))
    steps = last.first_step + last.steps - first.first_step
    merged = first._replace(steps=steps, episodes=episodes, layout=layout, data=data)
    _insert(db, merged, roster)
    return 0


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit at the end of the block, or take everything back."""
    if db.in_transaction:  # an interrupt came before `with` was there to end it
        db.execute("ROLLBACK")
    try:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _open_log(db: sqlite3.Connection, path: str) -> None:
    """Switch to a write-ahead log, or say that there is none."""
    try:
        (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith(("SQLITE_IOERR_SHMMAP", "SQLITE_IOERR_SHMOPEN")):
            raise
        mode = "none"
    if mode != "wal":
        db.execute("PRAGMA journal_mode=DELETE")
        warnings.warn(
            f"{path}: the file system has no shared memory for a write-ahead log, so the recorder "
            "waits for the disk and for readers; record to a local disk if that takes too long",
            UserWarning,
            stacklevel=6,
        )
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")


def close_log(db: sqlite3.Connection) -> None:
    """Move the log into the file, unless others have it open."""
    with contextlib.suppress(sqlite3.OperationalError):
        db.execute("PRAGMA busy_timeout=0")
        db.execute("PRAGMA wal_checkpoint")
        db.execute("PRAGMA journal_mode=DELETE")


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mark(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def require_closed(path: PathLike) -> None:
    """Raise if a recorder is writing to a file; remove what a killed one left beside it.

    A log or tail that stays behind would be taken for that of the next file of this name.
    """
    path = os.path.realpath(path)
    beside = [path + end for end in ("-wal", "-shm", "-journal") if os.path.exists(path + end)]
    if beside and os.path.exists(path):
        with explained(path), contextlib.closing(connect(path, "mode=rw")) as db:
            try:
                db.execute("PRAGMA busy_timeout=0")
                db.execute("PRAGMA journal_mode=DELETE")
            except sqlite3.OperationalError as error:
                raise _in_use(path) from error
    else:
        for name in beside:
            os.unlink(name)
    for name in tails_of(path):
        try:
            Tail(name, create=False).remove()
        except BlockingIOError as error:
            raise _in_use(path) from error


def _in_use(path: str) -> RuntimeError:
    return RuntimeError(
        f"cannot save {path}: a recorder is writing to it, and its later episodes would be lost; "
        "close it or save to another file"
    )


def describe_policy(policy: Policy, place: str) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return kind and arrays of a policy; warn if its class is not registered.

    Args:
        policy: The policy.
        place: Where it will be stored, for the warning.
    """
    kind, arrays = policy_to_arrays(policy)
    if kind.startswith(UNREGISTERED) and not isinstance(policy, UnavailablePolicy):
        warnings.warn(
            f"{type(policy).__qualname__} is not registered: {place} will not hold its "
            "parameters; decorate the class with ope_gym.policies.register_policy",
            UserWarning,
            stacklevel=4,
        )
    return kind, arrays
