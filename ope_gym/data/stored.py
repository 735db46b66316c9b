"""Read files of episodes: first which episodes there are, then their contents chunk by chunk.

`read_stored` lists the episodes of a file, with its policies and schedules, and reads no step.
`StoredEpisodes.chunks` then reads some of them, never more than about so many steps at a time.
Episodes and steps keep their numbers, so that a recorder may go on appending between two passes:
all of them see the episodes that were listed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import offsets_of
from ope_gym.batches import Tree
from ope_gym.data import encoding, space_json, spaces
from ope_gym.data.checks import check_horizon, checked
from ope_gym.data.database import (
    CHUNK,
    ChunkRow,
    SeenFile,
    check_tables,
    connect,
    crc_of_numbers,
    crc_of_policy,
    crc_of_text,
    damaged,
    explained,
    read_roster,
)
from ope_gym.data.schedules import ChangeTable, PolicyTable, Schedule, check_schedules
from ope_gym.data.schema import (
    BATCHES,
    COLUMNS,
    Chunk,
    Columns,
    Ints,
    check_alike,
    space_of,
    take,
)
from ope_gym.data.spaces import Space
from ope_gym.data.store import close_log, transaction, write_episodes
from ope_gym.data.tail import Entry, Tail, tails_of
from ope_gym.files import MALFORMED, DamagedFileError, PathLike
from ope_gym.policies import (
    Policy,
    UnavailablePolicy,
    UnknownPolicy,
    acting_log_probs,
    policy_from_arrays,
)

_AT_ONCE = 2**16  # rows that are read at once: as Python's numbers they take more room
_HEADS = CHUNK.replace(", data", ", length(data)")
_STEP_BYTES = 16  # reward and log-probability, which every step has


class FileSchedule(NamedTuple):
    """The changes of policy of one loop, where policies change inside episodes.

    Args:
        loop: Number of the loop in the file.
        known_from: Episodes that began at this clock or later follow it.
        schedule: Which policy acts when.
    """

    loop: int
    known_from: int
    schedule: Schedule


@dataclass(frozen=True)
class StoredEpisodes:
    """Episodes first:stop of a file, with its policies and schedules.

    Args:
        file: The file.
        observation_space: None if unknown.
        action_space: None if unknown.
        horizon: The time limit, None if there is none.
        policies: The policies, equal ones once.
        numbers: Which of them each policy of the file is.
        file_schedules: Those in which policies change inside episodes.
        first: Number of the first episode.
        stop: Number behind the last one.
        offsets: (n + 1,) number of the first step of each episode in the file, and behind the last.
        table: (n, 5) what `read_roster` returns; no rows in a part.
        recover: Whether damage ends the episodes, and invalid ones are left out, with a warning
            instead of an error.
    """

    file: SeenFile
    observation_space: Space | None
    action_space: Space | None
    horizon: int | None
    policies: tuple[Policy, ...]
    numbers: NDArray[np.int32]
    file_schedules: tuple[FileSchedule, ...]
    first: int
    stop: int
    offsets: Ints
    table: Ints
    recover: bool = False

    def __len__(self) -> int:
        """Return the number of blocks that `part` can cut; here each is an episode."""
        return self.stop - self.first

    @property
    def counts(self) -> Ints:
        """Episodes of each block."""
        return np.ones(len(self), dtype=np.int64)

    @property
    def files(self) -> tuple[SeenFile, ...]:
        """The file that it reads."""
        return (self.file,)

    @property
    def name(self) -> str:
        """The name of the file, for messages."""
        return self.file.name

    @property
    def first_policies(self) -> NDArray[np.int32]:
        """(n,) the policy that acted first in each episode."""
        return self.numbers[self.table[:, 0]]

    @property
    def lengths(self) -> Ints:
        """(n,) steps of each episode."""
        return self.table[:, 1].copy()

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """(n,) whether the learner never trained on the episode."""
        return np.asarray(self.table[:, 2] & 4 != 0)

    @property
    def start_clock(self) -> Ints:
        """(n,) step of the loop at which each episode began, -1 if unknown."""
        return self.table[:, 3].copy()

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Which policy acts when, for loops that change policies inside episodes."""
        return tuple(x.schedule for x in self.file_schedules)

    @property
    def schedule_ids(self) -> NDArray[np.int32]:
        """(n,) which of `schedules` each episode follows; -1 if its policy does not change."""
        return self._schedule_ids(self.table)

    def _schedule_ids(self, table: Ints) -> NDArray[np.int32]:
        ids = np.full(len(table), -1, dtype=np.int32)
        for s, (loop, known_from, _) in enumerate(self.file_schedules):
            ids[(table[:, 4] == loop) & (table[:, 3] >= known_from)] = s
        return ids

    def part(self, first: int, stop: int) -> StoredEpisodes:
        """Return blocks first:stop, to be read elsewhere; without the table of their episodes."""
        begin = self.first
        return dataclasses.replace(
            self,
            first=begin + first,
            stop=begin + stop,
            offsets=self.offsets[first : stop + 1],
            table=self.table[:0],
        )

    def chunks(self, steps: int | None = None) -> Iterator[Chunk]:
        """Yield the episodes, about `steps` steps at a time; None yields all of them at once."""
        with self.file.reading() as db:
            table = self.table if len(self.table) else read_roster(db, self.first, self.stop)
            ends, done = self.offsets, 0
            waiting: list[dict[str, Tree]] = []
            held = 0
            for part in self._steps(db, table):
                waiting.append(part)
                held += len(part["rewards"])
                while steps is not None and held >= steps:
                    last = int(np.searchsorted(ends, ends[done] + steps, side="right")) - 1
                    last = max(last, done + 1)
                    rows = int(ends[last] - ends[done])
                    if rows > held:  # a long episode goes on in the next chunk
                        break
                    columns, rest = _cut(waiting, rows)
                    yield self._chunk(columns, table[done:last], self.first + done)
                    done, waiting, held = last, [rest], held - rows
            last = int(np.searchsorted(ends, ends[done] + held, side="right")) - 1
            if last > done or steps is None:
                columns, _ = _cut(waiting, int(ends[last] - ends[done]))
                yield self._chunk(columns, table[done:last], self.first + done)

    def _steps(self, db: sqlite3.Connection, table: Ints) -> Iterator[dict[str, Tree]]:
        """Yield the columns of the chunks, as far as they belong to episodes of the table."""
        if not np.array_equal(np.diff(self.offsets), table[:, 1]):
            raise damaged(self.name, "lengths of episodes have changed since they were listed")
        at, end = int(self.offsets[0]), int(self.offsets[-1])
        while at < end:
            try:
                found = db.execute(
                    f"{CHUNK} WHERE first_step <= ? ORDER BY first_step DESC LIMIT 1", (at,)
                ).fetchone()
                row = ChunkRow._make(found)
                if self.first <= row.first_episode <= self.stop - row.episodes:
                    row.check_episodes(table, self.first)
                columns = row.columns(self)
                if row.first_step + row.steps <= at:
                    raise ValueError(f"step {at} is missing in chunks")
            except (*MALFORMED, sqlite3.DatabaseError) as error:
                if not self.recover:
                    raise damaged(self.name, error) from error
                _tell_recovered(self.name, error)
                return
            rows = slice(at - row.first_step, end - row.first_step)
            yield {name: batches.take(tree, rows) for name, tree in columns.items()}
            at = row.first_step + row.steps

    def _chunk(self, columns: dict[str, Tree], table: Ints, first: int) -> Chunk:
        """Return columns of whole episodes, not checked yet."""
        if not columns:
            columns = {
                x.name: np.empty(0, x.dtype) if x.dtype else spaces.empty(space_of(self, x.name))
                for x in COLUMNS
                if x.name in encoding.STORED
            }
        offsets, schedule_ids = offsets_of(table[:, 1]), self._schedule_ids(table)
        policy_ids = np.repeat(self.numbers[table[:, 0]], table[:, 1])
        for s in np.unique(schedule_ids[schedule_ids >= 0]):
            chosen = schedule_ids == s
            lengths = table[chosen, 1]
            begins = np.repeat(offsets_of(lengths)[:-1], lengths)
            steps = np.arange(lengths.sum()) - begins
            clocks = np.repeat(table[chosen, 3], lengths) + steps
            acted = self.file_schedules[s].schedule.policy_at(clocks)
            policy_ids[np.repeat(chosen, table[:, 1])] = acted
        return Chunk(
            int(first),
            int(first),
            Columns(
                **columns,
                policy_ids=policy_ids,
                offsets=offsets,
                terminated=table[:, 2] & 1 != 0,
                truncated=table[:, 2] & 2 != 0,
                held_out=table[:, 2] & 4 != 0,
                start_clock=table[:, 3].copy(),
                schedule_ids=schedule_ids,
                schedules=self.schedules,
                policies=self.policies,
                observation_space=self.observation_space,
                action_space=self.action_space,
                horizon=self.horizon,
            ),
        )

    def damaged(self, offset: int, error: Exception) -> DamagedFileError:
        """Return the error for contents that have the right checksums, but cannot be."""
        return DamagedFileError(
            f"{self.name}: an episode from row {offset} of episodes on is invalid: {error}; the "
            "checksums are right, so it was written like this; keep the others by "
            "Trajectories.load(path, recover=True).save(new_path)"
        )


def _cut(parts: list[dict[str, Tree]], rows: int) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Join columns, and return the first rows and the others."""
    if not parts:
        return {}, {}
    whole = {name: batches.concatenate([x[name] for x in parts]) for name in parts[0]}
    if rows == len(whole["rewards"]):
        return whole, {name: batches.take(tree, slice(0, 0)) for name, tree in whole.items()}
    cut = (slice(0, rows), slice(rows, None))
    first, rest = ({name: batches.take(x, some) for name, x in whole.items()} for some in cut)
    return first, rest


def _tell_recovered(name: str, error: Exception) -> None:
    warnings.warn(
        f"recovered what precedes the damage of {name}: {error}", UserWarning, stacklevel=3
    )


# Listing what there is -----------------------------------------------------------------------


def read_stored(path: PathLike | SeenFile, *, recover: bool = False) -> StoredEpisodes:
    """Return the episodes of a file, without their steps.

    Args:
        path: The file.
        recover: Whether to leave out invalid episodes, and all from damage on, instead of raising
            `DamagedFileError`.
    """
    file = path if isinstance(path, SeenFile) else SeenFile.unread(path)
    take_in_tails(file)
    return _read(file, recover)


def _read(file: SeenFile, recover: bool) -> StoredEpisodes:
    with file.reading() as db:
        file = file.seen(db)
        db.execute("BEGIN")  # one state of the file, whatever a recorder does meanwhile
        try:
            observation_space, action_space, horizon, policies_crc, changes_crc = _environment(db)
            policies = _policies(db, policies_crc)
            known = PolicyTable()
            numbers = np.array([known.add(policy) for policy in policies], dtype=np.int32)
            schedules = _schedules(db, changes_crc, numbers)
            table = _listed(db, file.name, recover)
            _check_roster(table, len(policies))
            found = StoredEpisodes(
                file,
                observation_space,
                action_space,
                horizon,
                tuple(known.policies),
                numbers,
                schedules,
                0,
                len(table),
                offsets_of(table[:, 1]),
                table,
                recover,
            )
            _check_layouts(db, found)
        except DamagedFileError:
            raise
        except (*MALFORMED, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise damaged(file.name, error) from error
    return found


def _environment(db: sqlite3.Connection) -> tuple[Any, ...]:
    rows = db.execute("SELECT * FROM environment").fetchmany(2)
    if len(rows) != 1:
        raise ValueError(f"environment has {len(rows)} rows")
    *described, crc, policies_crc, changes_crc = rows[0]
    if crc_of_text(*described) != crc:
        raise ValueError("the row of environment does not match its checksum")
    budget = space_json.Budget()
    both = []
    for text in described[1:3]:
        if text is not None and len(text) > encoding.MOST_JSON * 4:
            raise ValueError(f"a space has {len(text):,} characters")
        both.append(text and space_json.space_from_json(json.loads(text), budget))
    return *both, check_horizon(described[3]), policies_crc, changes_crc


def _policies(db: sqlite3.Connection, expected: int) -> tuple[Policy, ...]:
    arrays: dict[int, list[tuple[str, bytes]]] = {}
    for k, name, npy in db.execute("SELECT policy, name, npy FROM policy_arrays"):
        arrays.setdefault(k, []).append((name, npy))
    policies: list[Policy] = []
    crc = 0
    for k, kind in db.execute("SELECT id, kind FROM policies ORDER BY id"):
        parts = arrays.pop(k, [])
        crc = crc_of_policy(k, kind, parts, crc)
        if k != len(policies):
            raise ValueError(f"row {len(policies)} of policies is missing")
        named = {name: encoding.from_npy(npy) for name, npy in parts}
        policies.append(policy_from_arrays(kind, named))
    if arrays or crc != expected:
        raise ValueError("policies and policy_arrays do not match their checksum")
    return tuple(policies)


def _schedules(
    db: sqlite3.Connection, expected: int, numbers: NDArray[np.int32]
) -> tuple[FileSchedule, ...]:
    tables: dict[int, ChangeTable] = {}
    crc = count = 0
    rows = db.execute("SELECT id, loop, clock, policy, mid_episode FROM changes ORDER BY id")
    while some := rows.fetchmany(_AT_ONCE):
        table = np.array(some, dtype=np.int64)
        crc = crc_of_numbers(table, crc)
        if not np.array_equal(table[:, 0], count + np.arange(len(table))):
            raise ValueError(f"rows of changes from {count} on are missing")
        count += len(table)
        for _, loop, clock, policy, mid_episode in table.tolist():
            changes = tables.setdefault(loop, ChangeTable())
            changes.change(policy, clock, mid_episode=bool(mid_episode))
    if crc != expected:
        raise ValueError("the rows of changes do not match their checksum")
    found = tuple(
        FileSchedule(loop, max(x.clocks[0], x.clocked_from), _renumbered(x.schedule(), numbers))
        for loop, x in tables.items()
        if x.clocked_from is not None
    )
    return found


def _renumbered(schedule: Schedule, numbers: NDArray[np.int32]) -> Schedule:
    check_schedules([schedule], len(numbers))
    return Schedule(schedule.clocks, numbers[schedule.policies])


def _listed(db: sqlite3.Connection, name: str, recover: bool) -> Ints:
    """Return the rows of all episodes, or of those that precede damage."""
    episodes = steps = 0
    table = np.empty((0, 5), dtype=np.int64)
    try:
        table = read_roster(db, 0, 2**62)
        for *values, size in db.execute(f"{_HEADS} ORDER BY first_step"):
            row = ChunkRow._make((*values, b""))
            if (row.first_step, row.first_episode) != (steps, episodes):
                raise ValueError(f"row {row.first_step} of chunks follows step {steps - 1}")
            if row.steps < 1 or row.steps * _STEP_BYTES > size:
                raise ValueError(f"row {row.first_step} of chunks has {row.steps} steps")
            row.check_episodes(table, 0)
            steps, episodes = steps + row.steps, episodes + row.episodes
        if episodes != len(table) or int(table[:, 1].sum()) != steps:
            raise ValueError(f"{len(table)} episodes, but chunks have {steps} steps of {episodes}")
    except (*MALFORMED, sqlite3.DatabaseError) as error:
        if not recover:
            raise
        _tell_recovered(name, error)
        ends = offsets_of(table[:episodes, 1])
        return table[: int(np.searchsorted(ends, steps, side="right")) - 1]
    return table


def _check_roster(table: Ints, n_policies: int) -> None:
    """Raise if a row of episodes cannot be; the checksum says only who wrote it."""
    steps = table[:, 1]
    wrong = (
        (steps < 1)
        | (steps > 2**40)
        | (table[:, 0] < 0)
        | (table[:, 0] >= n_policies)
        | (table[:, 2] < 0)
        | (table[:, 2] > 7)
        | (table[:, 3] < -1)
        | (table[:, 4] < -1)
    )
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(f"row {i} of episodes is {table[i].tolist()}")


def _check_layouts(db: sqlite3.Connection, found: StoredEpisodes) -> None:
    """Raise if batches without a space differ in structure; those with one are checked by it."""
    names = [name for name in BATCHES if space_of(found, name) is None]
    if names and len(found):
        layouts = [x for (x,) in db.execute("SELECT DISTINCT layout FROM chunks")]
        rows = [encoding.no_rows(x, found) for x in layouts]
        for name in names:
            check_alike(name, [x[name] for x in rows])


# Tails of recorders that were killed ----------------------------------------------------------


def take_in_tails(file: SeenFile) -> None:
    """Take the latest episodes of recorders that were killed into their file."""
    for name in tails_of(file.path):
        _take_in(file, name)


def _take_in(file: SeenFile, name: str) -> None:
    tail = None
    try:
        tail = Tail(name, create=False)
        entries = list(tail.entries())
        if entries:
            _write_missing(file, entries)
        tail.remove()
    except (BlockingIOError, FileNotFoundError):  # its recorder is at work, or has just ended
        return
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{name} has the latest episodes of a recorder that was killed, and they cannot be "
            f"taken into {file.name}: {error}",
            UserWarning,
            stacklevel=4,
        )
    finally:
        if tail is not None:
            tail.close()


def _write_missing(file: SeenFile, entries: Sequence[Entry]) -> None:
    """Write the episodes of a batch to the file, unless it has them."""
    owner, batch = entries[0][:2]
    listed = _read(file, False)
    with explained(file.name), contextlib.closing(connect(file.path, "mode=rw")) as db:
        check_tables(db, file.name)
        try:
            with transaction(db):
                row = db.execute("SELECT batch FROM tails WHERE owner=?", (owner,)).fetchone()
                if row is None:
                    raise ValueError(
                        "it belongs to another file, or the log with the beginning of its record "
                        "is lost; delete it if you do not have that"
                    )
                if row[0] < batch - 1:
                    _tell_gap(db, file, entries)
                for entry in entries if row[0] < batch else ():
                    data, roster = _completed(listed, entry)
                    write_episodes(db, data, roster)
                db.execute("UPDATE tails SET batch=? WHERE owner=?", (batch, owner))
        finally:
            close_log(db)


def _tell_gap(db: sqlite3.Connection, file: SeenFile, entries: Sequence[Entry]) -> None:
    """Warn of episodes missing before a batch; raise if it is unknown who acted in the batch."""
    last, latest = entries[-1], sum(len(entry.roster) for entry in entries)
    counts = (
        "SELECT count(*) FROM episodes WHERE loop=?",
        "SELECT count(*) FROM changes WHERE loop=?",
    )
    loop = int(last.roster[0, 4])
    episodes, changes = (db.execute(count, (loop,)).fetchone()[0] for count in counts)
    gap = (
        f"the log {file.name}-wal was damaged or incomplete, and "
        f"{max(last.episodes - episodes, 0):,} episodes are missing before the latest {latest:,}"
    )
    if changes < last.changes:
        raise ValueError(f"{gap}, and with them which policies acted in these; delete the tail")
    warnings.warn(f"{gap}, which were taken in", UserWarning, stacklevel=6)


def _completed(listed: StoredEpisodes, entry: Entry) -> tuple[Columns, Ints]:
    """Return the valid episodes of an entry, with the propensities of their policies."""
    roster = entry.roster
    _check_roster(roster, listed.numbers.size)
    columns = encoding.decode(entry.layout, entry.data, int(roster[:, 1].sum()), listed)
    raw = listed._chunk(columns, roster, 0).columns
    try:
        return _with_log_probs(raw), roster
    except MALFORMED:
        valid = []
        for i in range(len(raw)):
            try:
                _with_log_probs(take(raw, np.array([i])))
                valid.append(i)
            except MALFORMED as error:
                warnings.warn(
                    f"left out an episode of {listed.name}, which was invalid: {error}",
                    UserWarning,
                    stacklevel=6,
                )
        chosen = np.array(valid, dtype=np.int64)
        return _with_log_probs(take(raw, chosen)), roster[chosen]


def _with_log_probs(data: Columns) -> Columns:
    """Return checked episodes with log-probabilities of the policies where nobody gave any."""
    silent = np.array([isinstance(p, UnknownPolicy | UnavailablePolicy) for p in data.policies])
    log_probs = data.log_probs.copy()
    rows = np.flatnonzero(np.isnan(log_probs) & ~silent[data.policy_ids])
    seen, chosen = (batches.take(getattr(data, name), rows) for name in BATCHES)
    try:
        log_probs[rows] = acting_log_probs(data.policies, data.policy_ids[rows], seen, chosen)
    except Exception as error:  # of any policy, about rows that it did not choose
        raise ValueError(f"a policy cannot tell the propensities: {error}") from error
    return checked(dataclasses.replace(data, log_probs=log_probs), copy=False)
