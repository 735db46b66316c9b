"""Read files of episodes: first which episodes there are, then their contents chunk by chunk.

`read_layout` goes through a file once, compares everything with its checksums, and returns its
sections: spaces, policies, schedules, and a table of the episodes. `FileSection.chunks` then reads
the episodes, never more than about so many steps at a time. A file that a recorder wrote has a
block for every few episodes, one that `Trajectories.save` wrote a single block for all; small
blocks are read whole and joined, large ones in stretches of whole episodes. `Trajectories.load`
reads with `keep=True` and takes all episodes as one chunk.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import warnings
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import offsets_of
from ope_gym.batches import Tree
from ope_gym.data import files, spaces
from ope_gym.data.blocks import (
    AHEAD,
    KEEP_THE_REST,
    MALFORMED,
    Block,
    DamagedFileError,
    FileCut,
    PathLike,
    read_block,
    scan,
)
from ope_gym.data.checks import check_horizon, check_policy_ids, checked
from ope_gym.data.schedules import ChangeTable, Schedule, check_schedules
from ope_gym.data.schema import (
    BATCHES,
    BY_EPISODE,
    BY_STEP,
    COLUMNS,
    Columns,
    Ints,
    agree,
    check_alike,
    space_of,
)
from ope_gym.data.seen_files import SeenFile, mark_of
from ope_gym.data.spaces import Space
from ope_gym.policies import Policy

_WHOLE = 1 << 24  # bytes of a block that is read in one piece
_ROWS = 1 << 16  # rows of policy_ids, to see who acted first, or of changes, that are read at once
# the table of a section: the lengths and the columns per episode of the file, who acted first
_TABLE = ("lengths", *BY_EPISODE, "first_policies")


class FileSchedule(NamedTuple):
    """One of a file's schedules in which policies change inside episodes.

    Args:
        number: Its number in the file.
        known_from: Episodes that began at this clock or later follow it.
        schedule: Which policy acts when.
    """

    number: int
    known_from: int
    schedule: Schedule


class Chunk(NamedTuple):
    """Some episodes of a section as they are in the file, not checked yet.

    Args:
        offset: Byte where their first block begins.
        first: Number of their first episode in the section.
        columns: The episodes.
    """

    offset: int
    first: int
    columns: Columns


@dataclass(frozen=True)
class FileSection:
    """A section of a file: its policies, its schedules, and where its blocks of episodes begin.

    Args:
        file: The file.
        observation_space: None if unknown.
        action_space: None if unknown.
        horizon: The time limit, None if there is none.
        policies: The policies, by number.
        file_schedules: Those in which policies change inside episodes.
        blocks: (B,) byte where each block of episodes begins.
        counts: (B,) their episodes; nothing if the contents are kept.
        table: (n, 7) the columns of `_TABLE`; no rows in a part, or if all contents are kept.
        first: Number of the first episode.
        last: Checksum of the last block of the file, which depends on all before it.
        kept: Contents of blocks, by the byte where they begin; the others are read from the file.
            Episodes that were written ahead are always kept: a recorder moves them.
    """

    file: SeenFile
    observation_space: Space | None
    action_space: Space | None
    horizon: int | None
    policies: tuple[Policy, ...]
    file_schedules: tuple[FileSchedule, ...]
    blocks: Ints
    counts: Ints
    table: Ints
    first: int = 0
    last: int = 0
    kept: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of blocks of episodes; each has an episode."""
        return len(self.blocks)

    @property
    def files(self) -> tuple[SeenFile, ...]:
        """The file that it reads."""
        return (self.file,)

    @property
    def name(self) -> str:
        """The name of the file, for messages."""
        return self.file.name

    @property
    def lengths(self) -> Ints:
        """(n,) steps of each episode."""
        return self._column("lengths")

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """(n,) whether the learner never trained on the episode."""
        return np.asarray(self._column("held_out") != 0)

    @property
    def start_clock(self) -> Ints:
        """(n,) step of the loop at which each episode began, -1 if unknown."""
        return self._column("start_clock")

    @property
    def first_policies(self) -> NDArray[np.int32]:
        """(n,) the policy that acted first in each episode."""
        return self._column("first_policies").astype(np.int32)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Which policy acts when, for schedules that change policies inside episodes."""
        return tuple(found.schedule for found in self.file_schedules)

    @property
    def schedule_ids(self) -> NDArray[np.int32]:
        """(n,) which of `schedules` each episode follows; -1 if its policy does not change."""
        return self._schedule_ids(self.start_clock, self._column("schedule_ids"))

    @property
    def clocked(self) -> bool:
        """Whether an episode follows a schedule in which policies change inside episodes."""
        return bool((self.schedule_ids >= 0).any())

    def _column(self, name: str) -> Ints:
        return self.table[:, _TABLE.index(name)].copy()

    def _schedule_ids(self, start_clock: Ints, numbers: Ints) -> NDArray[np.int32]:
        """Turn the numbers of schedules in the file into positions in `schedules`.

        Where no policy changed inside an episode, an episode's own policy says it all, as in
        `TrajectoryBuffer.view`.
        """
        ids = np.full(len(numbers), -1, dtype=np.int32)
        for s, found in enumerate(self.file_schedules):
            ids[(numbers == found.number) & (start_clock >= found.known_from)] = s
        return ids

    def part(self, first: int, stop: int) -> FileSection:
        """Return blocks first:stop, to be read elsewhere; without the table of their episodes."""
        some = slice(first, stop)
        here = set(self.blocks[some].tolist())
        return dataclasses.replace(
            self,
            blocks=self.blocks[some],
            counts=self.counts[some],
            table=self.table[:0],
            first=self.first + int(self.counts[:first].sum()),
            kept={offset: columns for offset, columns in self.kept.items() if offset in here},
        )

    def chunks(self, steps: int | None = None) -> Iterator[Chunk]:
        """Yield the episodes, about `steps` steps at a time; None yields all of them at once."""
        waiting: list[dict[str, Any]] = []
        begin, first, held = 0, self.first, 0
        for offset, columns in self._contents(steps):
            begin = begin if waiting else offset
            waiting.append(columns)
            held += len(columns["rewards"])
            if steps is not None and held >= steps:
                yield Chunk(begin, first, self._join(waiting, begin))
                first += sum(len(part["episodes"]) for part in waiting)
                waiting, held = [], 0
        if waiting or steps is None:
            yield Chunk(begin, first, self._join(waiting, begin))

    def _contents(self, steps: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the columns of whole blocks or of stretches, and where their block begins."""
        offsets = self.blocks.tolist()
        if len(self.kept) == len(offsets):
            yield from ((offset, self.kept[offset]) for offset in offsets)
            return
        with self.file.open() as file:
            size = os.fstat(file.fileno()).st_size
            for offset in offsets:
                if offset in self.kept:
                    yield offset, self.kept[offset]
                    continue
                try:
                    block = read_block(file, offset, size, whole=_WHOLE, verify=False)
                    for arrays in _stretches(block, steps):
                        yield offset, files.parse_episodes(block.meta, arrays, self)
                except (*MALFORMED, FileCut) as error:
                    raise self.damaged(offset, error) from error

    def _join(self, parts: list[dict[str, Any]], offset: int) -> Columns:
        if not parts:
            parts = [self._no_rows()]
        try:
            by_step = {
                name: batches.concatenate([part[name] for part in parts])
                if len(parts) > 1
                else parts[0][name]
                for name in BY_STEP
            }
        except MALFORMED as error:
            raise self.damaged(offset, error) from error
        table = np.concatenate([part["episodes"] for part in parts])
        by_episode = dict(zip(BY_EPISODE, table.T[1:], strict=True))
        ids = self._schedule_ids(by_episode["start_clock"], by_episode["schedule_ids"])
        return Columns(
            **by_step,
            offsets=offsets_of(table[:, 0]),
            **(by_episode | {"schedule_ids": ids}),
            schedules=self.schedules,
            policies=self.policies,
            observation_space=self.observation_space,
            action_space=self.action_space,
            horizon=self.horizon,
        )

    def written_ahead(self) -> Columns | None:
        """Return the episodes that were written ahead, their schedules numbered as in the file."""
        parts = list(self.kept.values())
        if not parts:
            return None
        numbers = np.concatenate([part["episodes"] for part in parts])[:, -1]
        return dataclasses.replace(self._join(parts, 0), schedule_ids=numbers.astype(np.int32))

    def _no_rows(self) -> dict[str, Any]:
        none = {
            column.name: spaces.empty(space_of(self, column.name))
            if column.dtype is None
            else np.empty(0, column.dtype)
            for column in COLUMNS
        }
        return none | {"episodes": np.empty((0, 1 + len(BY_EPISODE)), np.int64)}

    def damaged(self, offset: int, error: Exception) -> DamagedFileError:
        """Return the error for contents that have the right checksums, but cannot be."""
        return _contradiction(self.file.name, offset, error)


def _contradiction(path: str, offset: int, error: Exception) -> DamagedFileError:
    reason = f"the contents contradict each other: {error}"
    remedy = "the checksums are right, so it was written like this; record the episodes again"
    return DamagedFileError(path, offset, reason, remedy)


def _stretches(block: Block, steps: int | None) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Yield the arrays of a block of episodes: whole if it is in memory, else some episodes."""
    names = [name for name in block.entries if name != "episodes"]
    rows = {block.entries[name].shape[:1] for name in names}
    if block.payload is not None or steps is None:
        yield block.arrays
    elif len(rows) != 1:  # the text of JSON elements has no rows that could be cut
        yield read_block(block.file, block.offset, block.end).arrays
    else:
        episodes = block.array("episodes")
        files.check_array("episodes", episodes)
        ends = offsets_of(files.check_table(episodes, *rows.pop())[:, 0])
        first = 0
        while first < len(episodes):
            last = int(np.searchsorted(ends, ends[first] + steps, side="right")) - 1
            last = max(last, first + 1)
            arrays = {name: block.rows(name, int(ends[first]), int(ends[last])) for name in names}
            yield {**arrays, "episodes": episodes[first:last]}
            first = last


# The first pass ------------------------------------------------------------------------------


def read_layout(
    path: PathLike | SeenFile, *, recover: bool = False, keep: bool = False
) -> list[FileSection]:
    """Return the sections of a file, with tables of their episodes but not their contents.

    All contents are compared with their checksums. A file that ends inside its last block, as a
    crash leaves it, is read up to there, with a warning.

    Args:
        path: The file.
        recover: Whether to read what precedes damage, instead of raising `DamagedFileError`.
        keep: Whether to keep the contents of the episodes, so that the file is read only once.
    """
    seen = path if isinstance(path, SeenFile) else SeenFile.unread(path)
    drafts: list[_Draft] = []
    known = files.KnownSpaces()
    last = 0
    with seen.open() as file:
        if seen.mark is None:  # this process is the first to see it
            seen = dataclasses.replace(seen, mark=mark_of(file), node=platform.node())
        for block in scan(file, seen.name, recover=recover, whole=None if keep else _WHOLE):
            try:
                if block.kind == "spaces":
                    drafts.append(_Draft(*files.parse_spaces(block, known)))
                elif not drafts:
                    raise ValueError("the first block is not of kind 'spaces'")
                else:
                    drafts[-1].add(block, keep=keep)
            except MALFORMED as error:
                reason = f"malformed block of kind {block.kind!r}: {error}"
                remedy = f"the blocks before it are readable: {KEEP_THE_REST}"
                damage = DamagedFileError(seen.name, block.offset, reason, remedy)
                if not recover:
                    raise damage from error
                warnings.warn(f"recovered what precedes the damage: {damage}", stacklevel=3)
                break
            last = block.checksum
    try:
        found = [draft.finalise(seen, last, keep=keep) for draft in drafts]
        agree(found)
        for name in BATCHES:
            check_alike(name, [draft.rows[name] for draft in drafts if name in draft.rows])
    except ValueError as error:
        raise _contradiction(seen.name, 0, error) from error
    return found


class _Draft:
    """Collect the blocks of a section while they are read.

    Numbers are kept in arrays of bytes, not in lists: a file may have millions of blocks.
    """

    def __init__(
        self, observation_space: Space | None, action_space: Space | None, horizon: Any
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.horizon = horizon
        self.policies: list[Policy] = []
        self.changes: dict[int, ChangeTable] = {}  # by the number of the schedule
        self.rows: dict[str, Tree] = {}  # batches of no rows, where their space is unknown
        self.blocks, self.counts, self.table = array("q"), array("q"), array("q")
        self.kept: dict[int, dict[str, Any]] = {}

    def add(self, block: Block, *, keep: bool) -> None:
        """Add a block; ValueError says what is wrong with it."""
        if block.kind == "policy":
            self.policies.append(files.parse_policy(block))
        elif block.kind == "changes":
            self._change(files.parse_changes(block))
        elif block.kind == "episodes":
            for name in BATCHES:
                if space_of(self, name) is None:
                    self._check_alike(name, block)
            if keep:
                self.kept[block.offset] = files.parse_episodes(block.meta, block.arrays, self)
            else:
                self._count(_table_of(block))
            self.blocks.append(block.offset)
        elif block.kind == AHEAD:
            self._add_ahead(block, keep=keep)
        else:
            raise ValueError("unknown kind; a newer version of ope_gym may know it")

    def _change(self, found: files.Change) -> None:
        table = self.changes.setdefault(found.schedule, ChangeTable())
        for begin in range(0, len(found.clocks), _ROWS):  # as Python's numbers they take more room
            rows = slice(begin, begin + _ROWS)
            pairs = zip(found.clocks[rows].tolist(), found.policies[rows].tolist(), strict=True)
            for clock, policy_id in pairs:
                table.change(policy_id, clock, mid_episode=found.mid_episode)

    def _count(self, table: Ints) -> None:
        self.counts.append(len(table))
        self.table.frombytes(table.tobytes())

    def _add_ahead(self, block: Block, *, keep: bool) -> None:
        """Add episodes that were written ahead, but those that the recorder would have refused."""
        arrays, policy = files.unpack_ahead(block), block.meta["policy"]
        try:
            columns = self._checked(policy, arrays)
        except MALFORMED:
            columns = self._accepted(policy, arrays)
            if not columns:
                return
        self.kept[block.offset] = columns
        self.blocks.append(block.offset)
        if not keep:
            first = columns["policy_ids"][offsets_of(columns["episodes"][:, 0])[:-1]]
            self._count(np.column_stack([columns["episodes"], first]).astype(np.int64))

    def _checked(self, policy: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns of episodes that were written ahead, or raise if they cannot be."""
        columns = files.parse_ahead(policy, arrays, self)
        table = columns["episodes"]
        found = Columns(
            **{name: columns[name] for name in BY_STEP},
            offsets=offsets_of(table[:, 0]),
            **(dict(zip(BY_EPISODE, table.T[1:], strict=True)) | {"schedule_ids": -1}),
            policies=tuple(self.policies),
            observation_space=self.observation_space,
            action_space=self.action_space,
            horizon=self.horizon,
        )
        checked(found, copy=False)
        return columns

    def _accepted(self, policy: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of those episodes that can be; warn of the others."""
        good: list[dict[str, Any]] = []
        table, refused = arrays["episodes"], list[Exception]()
        ends = offsets_of(table[:, 0])
        for i in range(len(table)):
            rows = slice(int(ends[i]), int(ends[i + 1]))
            one = {name: array[rows] for name, array in arrays.items()}
            try:
                good.append(self._checked(policy, one | {"episodes": table[i : i + 1]}))
            except MALFORMED as error:
                refused.append(error)
        warnings.warn(
            f"the run ended before it had checked its last episodes, and {len(refused)} of them "
            f"cannot be: {refused[0] if refused else ''}",
            UserWarning,
            stacklevel=5,
        )
        names = (*BY_STEP, "episodes")
        return {x: batches.concatenate([part[x] for part in good]) for x in names} if good else {}

    def _check_alike(self, name: str, block: Block) -> None:
        """Raise if a batch without a space is not like those of the blocks before."""
        none = {key: np.empty((0, *x.shape[1:]), x.dtype) for key, x in block.entries.items()}
        rows = files.unpack(block.meta[name], None, none)
        check_alike(name, [self.rows.setdefault(name, rows), rows])

    def finalise(self, file: SeenFile, last: int, *, keep: bool) -> FileSection:
        """Return the section; ValueError says which policies or changes cannot be."""
        table = np.array(self.table, dtype=np.int64).reshape(-1, len(_TABLE))
        found = FileSection(
            file,
            self.observation_space,
            self.action_space,
            check_horizon(self.horizon),
            tuple(self.policies),
            tuple(_file_schedules(self.changes)),
            np.array(self.blocks, dtype=np.int64),
            np.array(self.counts, dtype=np.int64),
            table,
            last=last,
            kept=self.kept,
        )
        check_schedules(found.schedules, len(self.policies))
        check_policy_ids(
            table[:, -1], len(table), len(self.policies), lambda i: f"episode {i or 0}"
        )
        return found


def _file_schedules(tables: Mapping[int, ChangeTable]) -> Iterator[FileSchedule]:
    for number, table in tables.items():
        if table.clocked_from is not None:
            known_from = max(table.clocks[0], table.clocked_from)
            yield FileSchedule(number, known_from, table.schedule())


def _table_of(block: Block) -> Ints:
    """Return the rows of `_TABLE` for the episodes of a block."""
    episodes = block.array("episodes")
    files.check_array("episodes", episodes)
    files.check_array("policy_ids", block.rows("policy_ids", 0, 0))
    steps = block.entry("policy_ids").shape[0]
    table = files.check_table(episodes, steps)
    starts = offsets_of(table[:, 0])[:-1]
    first = np.empty(len(starts), dtype=np.int64)
    for begin in range(0, steps, _ROWS):  # never the whole column of a large block
        end = min(begin + _ROWS, steps)
        here = slice(*np.searchsorted(starts, [begin, end]))
        first[here] = block.rows("policy_ids", begin, end)[starts[here] - begin]
    return np.column_stack([table, first])
