"""Sources of episodes: trajectories in memory, or files that are read a block at a time.

Files are our own, or Parquet files, alone or in a folder.

A source has a roster of its episodes, which says who recorded them, and gives them in chunks. A
task is a stretch of all episodes: several small files, one, or some blocks of a large one. How they
are cut depends on the files alone, and a task knows how many episodes come before it, so tasks can
be done anywhere and in any order. Every pass reads the files again: they must not change meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from ope_gym.arrays import IntArray
from ope_gym.data.database import SeenFile
from ope_gym.data.roster import Numbers, Roster, join_rosters
from ope_gym.data.schema import join, renumber
from ope_gym.data.stored import StoredEpisodes, read_stored
from ope_gym.data.tables.layout import Layout, TableFiles
from ope_gym.data.tables.rows import is_table
from ope_gym.data.tables.section import TableSection, open_tables
from ope_gym.data.trajectories import Trajectories, Viewable, nothing, read_chunks
from ope_gym.files import is_uri
from ope_gym.policies import Policy, Target, policy_number, resolve_policy
from ope_gym.scale.workers import Workers


class HasBuffer(Protocol):
    """A recorder, with the episodes that it finished."""

    @property
    def buffer(self) -> Viewable:
        """The finished episodes."""
        ...


_One: TypeAlias = str | os.PathLike[str] | TableFiles | Viewable | Callable[[], Viewable]
Episodes: TypeAlias = "_One | HasBuffer | Source | Iterable[_One]"
Section: TypeAlias = StoredEpisodes | TableSection


@dataclass(frozen=True)
class Piece:
    """Episodes of one part of a source.

    Args:
        name: Name of its file or function, for messages.
        content: some blocks of a section of a file or table, without its policies, which the
            source has once for all pieces; or a function that makes trajectories.
        numbers: Numbers of its policies and schedules in the whole source.
    """

    name: str
    content: Section | Callable[[], Viewable]
    numbers: Numbers

    def chunks(self, source: Source) -> Iterator[Trajectories]:
        """Yield the episodes, about as many steps at a time as the source holds at once."""
        if isinstance(self.content, Section):
            policies = tuple(source.policies[k] for k in self.numbers.policies)
            content: Section = dataclasses.replace(self.content, policies=policies)
            parts = read_chunks(content, source.block_steps)
        else:
            parts = _stretches(self.content().view(), source.block_steps)
        for part in parts:
            chosen = part
            if source.held_out and not part.held_out.all():
                chosen = part.select(held_out=True)
            if len(chosen):
                first = self.numbers.first_schedule
                renumbered, _ = renumber(chosen, self.numbers.policies, first_schedule=first)
                policies = source.policies
                yield dataclasses.replace(renumbered, policies=policies, schedules=source.schedules)


@dataclass(frozen=True)
class Task:
    """A stretch of all episodes.

    Args:
        number: Number of the task.
        pieces: Pieces to be read in order.
        steps: Number of steps of the chosen episodes.
        episodes: their place among all chosen episodes.
    """

    number: int
    pieces: tuple[Piece, ...]
    steps: int
    episodes: slice

    @property
    def name(self) -> str:
        """The names of the files or functions of its episodes, for messages."""
        return _span([piece.name for piece in self.pieces])


@dataclass(frozen=True, eq=False)
class Source:
    """Episodes to evaluate a policy from.

    Args:
        roster: Roster of the chosen episodes; empty where a source is sent to workers.
        policies: all that are known, equal ones once.
        schedules: which policy acts when, where policies change inside episodes.
        held_out: whether held-out episodes alone are chosen.
        block_steps: about how many steps to hold in memory at once.
        data: all chosen episodes, where they are in memory; None where they are in files.
        tasks: the chosen episodes of files, in order.
        owners: Numbers of the policies of each file, by its name.
    """

    roster: Roster
    policies: tuple[Policy, ...]
    schedules: tuple[Any, ...]
    held_out: bool
    block_steps: int
    data: Trajectories | None = None
    tasks: tuple[Task, ...] = ()
    owners: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def policy(self, target: Target, name: str = "target") -> Policy:
        """Return the target: a policy, or the recorded one of a number, or the "last"."""
        number = self.number(target, name)
        return resolve_policy(self.policies, target if number is None else number, name)

    def number(self, target: Target, name: str = "target") -> int | None:
        """Return the number of a recorded policy; None if the target is a policy itself.

        The "last" one is the last policy of the last file.
        """
        if not (isinstance(target, str) and target == "last" and self.owners):
            return policy_number(self.policies, target, name)
        file, own = self.owners[-1]
        if not own:
            raise ValueError(
                f"{name} is 'last', but {file}, the last file, holds no policy: give the number "
                "of one, see `ope-gym info` with all files"
            )
        return own[-1]

    def name_of(self, target: Target) -> str:
        """Return a name such as "policy 3 of run.ope"; "the target" if it was not recorded.

        The file is the first that has the policy; the last one if the target is "last".
        """
        number = self.number(target)
        if number is None:
            return "the target"
        owners = self.owners[-1:] if isinstance(target, str) else self.owners
        owner = next((name for name, own in owners if number in own), "")
        return f"policy {number}" + (f" of {owner}" if len(self.owners) > 1 and owner else "")

    def with_policies(self, policies: tuple[Policy, ...]) -> Source:
        """Return the same episodes with other objects for the recorded policies."""
        data = self.data and dataclasses.replace(self.data, policies=policies)
        roster = dataclasses.replace(self.roster, policies=policies)
        return dataclasses.replace(self, policies=policies, data=data, roster=roster)

    def chunks(self, task: Task) -> Iterator[tuple[str, Trajectories]]:
        """Yield the episodes of a task with the name of their origin; small pieces are joined.

        Raises if the episodes are not those listed when the source was opened.
        """
        names: list[str] = []
        waiting: list[Trajectories] = []
        count, expected = 0, task.episodes.stop - task.episodes.start
        for piece in task.pieces:
            for chunk in piece.chunks(self):
                names.append(piece.name)
                waiting.append(chunk)
                count += len(chunk)
                if count > expected:
                    raise changed(task, count)
                if sum(part.n_steps for part in waiting) >= self.block_steps:
                    yield _span(names), self._joined(waiting)
                    names, waiting = [], []
        if count != expected:
            raise changed(task, count)
        if waiting:
            yield _span(names), self._joined(waiting)

    def _joined(self, parts: list[Trajectories]) -> Trajectories:
        if len(parts) == 1:
            return parts[0]
        return dataclasses.replace(join(parts), policies=self.policies, schedules=self.schedules)


def changed(task: Task, count: int) -> ValueError:
    """Return the error for files that changed between two passes."""
    expected = task.episodes.stop - task.episodes.start
    return ValueError(
        f"{task.name} had {expected} episodes in the first pass and {count} in a later one, or "
        "episodes of other policies: files must not change while they are read; close the "
        "recorder, and give functions that always make the same episodes"
    )


def in_memory(data: Trajectories, held_out: bool | None, block_steps: int = 0) -> Source:
    """Return the source of trajectories in memory.

    Args:
        data: all episodes.
        held_out: as in `ope_gym.Options`.
        block_steps: as in `ope_gym.Compute`.
    """
    if not len(data):
        raise ValueError("episodes is empty: record at least one episode first")
    chosen = _held_out(data.held_out, held_out)
    if chosen:
        data = data.select(held_out=True)
    roster = Roster.of(data)
    return Source(roster, data.policies, data.schedules, chosen, block_steps, data)


def _held_out(tags: Any, wanted: bool | None) -> bool:
    """Return whether to take the held-out episodes alone."""
    if wanted and not tags.any():
        raise ValueError(
            f"held_out is True (--data held-out), but none of the {len(tags)} episodes is held "
            "out: record with a held-out share, or take all with held_out=False (--data all) and "
            "expect an optimistic result"
        )
    return bool(tags.any()) if wanted is None else wanted


def open_source(
    episodes: Episodes,
    held_out: bool | None,
    block_steps: int,
    workers: Workers,
) -> Source:
    """Open a source of episodes: list who recorded them, and how to read them.

    Files with at most `block_steps` steps in all are read into memory.

    Args:
        episodes: trajectories, a buffer, a recorder, a file, a folder of Parquet files, a function
            that makes trajectories, or a list of these; or a source that is open already.
        held_out: True for the held-out episodes alone, False for all, None for the held-out ones
            if there are any.
        block_steps: about how many steps to hold in memory at once.
        workers: who reads the files.
    """
    if isinstance(episodes, Source):
        return episodes
    if hasattr(episodes, "buffer"):  # a recorder
        episodes = episodes.buffer
    if hasattr(episodes, "view") and not isinstance(episodes, np.ndarray):
        return in_memory(episodes.view(), held_out, block_steps)
    listed = _listed(episodes)
    views = [one.view() for one in listed if hasattr(one, "view")]
    if len(views) == len(listed):
        whole = views[0].merge(*views[1:]) if len(views) > 1 else views[0]
        return in_memory(whole, held_out, block_steps)
    seen = [_seen(i, one) for i, one in enumerate(listed)]
    files = [one for one in seen if isinstance(one, SeenFile)]
    if not workers.ray:  # else other machines may have them
        _check_there(files)
    _check_different(files)
    threads = all(isinstance(one, SeenFile | TableFiles) for one in seen)
    lists = workers.in_order(_parts, list(enumerate(seen)), threads=threads)
    parts = [part for some in lists for part in some]
    _check_copies(parts)
    if not (threads or workers.alone) and len(listed) > 1:
        for part in parts:
            _check_comparable(part)
    return _source(parts, held_out, block_steps)


def load_source(episodes: Episodes, held_out: bool | None = None) -> Source:
    """Open a source of episodes and read all of them into memory; see `open_source`."""
    return open_source(episodes, held_out, sys.maxsize, Workers())


@dataclass(frozen=True)
class _Part:
    """A section of a file, or what a function makes.

    Args:
        name: Name of its file or function, for messages.
        roster: Roster of its episodes.
        content: the section without its policies and its table, or the function.
        counts: (B,) episodes of each block.
    """

    name: str
    roster: Roster
    content: Section | Callable[[], Viewable]
    counts: IntArray


def _parts(numbered: tuple[int, Any]) -> list[_Part]:
    """List the parts of a file or of a function."""
    i, one = numbered
    if isinstance(one, SeenFile | TableFiles):
        sections = _sections(one)
        parts = [
            _Part(
                section.name,
                Roster.of(section),
                dataclasses.replace(section.part(0, len(section)), policies=()),
                section.counts,
            )
            for section in sections
        ]
        # a file in which nothing was recorded has its place, too: it may be the last one
        name = one.name if isinstance(one, SeenFile) else f"episodes[{i}]"
        return parts or [_Part(name, Roster.of(nothing()), nothing, np.empty(0, np.int64))]
    data = one().view()
    return [_Part(f"episodes[{i}]", Roster.of(data), one, np.array([len(data)]))]


def _sections(one: SeenFile | TableFiles) -> Sequence[Section]:
    """List the sections of a file of episodes, of a table, or of a folder of tables."""
    if isinstance(one, TableFiles):
        return open_tables(one.paths, one.layout)
    if is_table(one):
        return open_tables([one], Layout())
    return [read_stored(one)]


def _source(parts: Sequence[_Part], held_out: bool | None, block_steps: int) -> Source:
    """Cut the chosen episodes of all parts into tasks, or read them if they are few."""
    whole, numbers = join_rosters([(part.name, part.roster) for part in parts])
    if not len(whole):
        raise ValueError("episodes is empty: record at least one episode first")
    chosen = _held_out(whole.held_out, held_out)
    if held_out is None and chosen:
        _tell_unused(parts)
    roster = whole.select(whole.held_out) if chosen else whole
    owners: dict[str, list[int]] = {}
    pieces: list[tuple[int, int, Piece]] = []  # steps, episodes
    for part, own in zip(parts, numbers, strict=True):
        owners.setdefault(part.name, []).extend(own.policies.tolist())
        pieces += _pieces(part, own, chosen, block_steps)
    source = Source(
        roster,
        whole.policies,
        whole.schedules,
        chosen,
        block_steps,
        tasks=tuple(_tasks(pieces, block_steps)),
        owners=tuple((name, tuple(own)) for name, own in owners.items()),
    )
    if roster.steps > block_steps:
        return source
    read = [chunk for task in source.tasks for _, chunk in source.chunks(task)]
    data = dataclasses.replace(join(read), policies=whole.policies, schedules=whole.schedules)
    return dataclasses.replace(source, data=data, tasks=())


def _pieces(
    part: _Part, numbers: Numbers, held_out: bool, block_steps: int
) -> Iterator[tuple[int, int, Piece]]:
    """Cut a part into pieces of about so many steps; yield steps, episodes and the piece."""
    if not len(part.roster):
        return
    chosen = part.roster.held_out if held_out else np.ones(len(part.roster), dtype=bool)
    starts = np.cumsum(part.counts) - part.counts
    steps = np.add.reduceat(np.where(chosen, part.roster.lengths, 0), starts)
    episodes = np.add.reduceat(chosen.astype(np.int64), starts)
    stretch = (np.cumsum(steps) - steps) // block_steps  # of each block, by the steps before it
    firsts = np.append(0, np.flatnonzero(np.diff(stretch)) + 1)
    for first, stop in zip(firsts, np.append(firsts[1:], starts.size), strict=True):
        content = part.content
        if isinstance(content, Section):
            content = content.part(int(first), int(stop))
        if size := int(episodes[first:stop].sum()):
            yield int(steps[first:stop].sum()), size, Piece(part.name, content, numbers)


def _tasks(pieces: Sequence[tuple[int, int, Piece]], block_steps: int) -> Iterator[Task]:
    """Join pieces in a row to tasks of about so many steps."""
    sizes = np.array([steps for steps, _, _ in pieces])
    stretch = (np.cumsum(sizes) - sizes) // block_steps  # of each piece, by the steps before it
    begin = 0
    for number, some in enumerate(
        np.split(np.arange(sizes.size), np.flatnonzero(np.diff(stretch)) + 1)
    ):
        end = begin + sum(pieces[i][1] for i in some)
        own = tuple(pieces[i][2] for i in some)
        yield Task(number, own, int(sizes[some].sum()), slice(begin, end))
        begin = end


def _listed(episodes: Any) -> list[Any]:
    """Return the given episodes as a list."""
    if isinstance(episodes, Iterator):
        raise ValueError(
            f"episodes is {episodes!r}, which can be read only once, but every pass reads all: "
            "give a list of files, of trajectories or of functions that make them"
        )
    if isinstance(episodes, np.ndarray):  # of paths
        episodes = np.atleast_1d(episodes).tolist()
    if isinstance(episodes, str | os.PathLike | TableFiles) or callable(episodes):
        return [episodes]
    table = isinstance(episodes, Mapping) or hasattr(episodes, "columns")
    if table or not isinstance(episodes, Iterable):
        raise TypeError(
            f"episodes is a {type(episodes).__name__}: give Trajectories, a TrajectoryBuffer, a "
            "recorder, a file of episodes or a list of files, and the policy after them; tables go "
            "through Trajectories.from_frame"
        )
    listed = list(episodes)
    if not listed:
        raise ValueError("episodes is an empty list: give at least one file")
    return listed


def _seen(i: int, one: Any) -> Any:
    """Return a file with its full path and state: workers may have other working directories."""
    if isinstance(one, str | os.PathLike):
        return SeenFile.of(one)
    if isinstance(one, TableFiles):
        return one.seen()
    if hasattr(one, "view"):
        return one.view
    if callable(one):
        return one
    raise TypeError(
        f"episodes[{i}] is {one!r}: give the path of a file, trajectories, a buffer, a function "
        "that makes one, or ope_gym.tables.scan_parquet(...)"
    )


def _check_there(files: Sequence[SeenFile]) -> None:
    """Refuse a path at which there is no file, or a word that is no path."""
    for file in files:
        if not (is_uri(file.path) or os.path.exists(file.path)):
            hint = (
                "it is the name of an environment; record episodes of it, with "
                f"RecordTrajectories(gym.make({file.name!r}))"
                if re.search(r"-v\d+$", file.name)
                else "give a file that train.py, a recorder or save() wrote"
            )
            raise FileNotFoundError(
                f"episodes has {file.name!r}, and there is no such file: {hint}"
            )


def _check_different(files: Sequence[SeenFile]) -> None:
    """Refuse a file that is named twice: its episodes would count twice."""
    known: dict[object, str] = {}
    for file in files:
        place: object = os.path.realpath(file.path)
        with suppress(OSError):
            status = os.stat(file.path)
            place = status.st_dev, status.st_ino  # links have them in common
        if place in known:
            same = "" if known[place] == file.name else f", which is {known[place]}"
            raise ValueError(
                f"episodes has the file {file.name} twice{same}: its episodes would count twice; "
                "give each file once"
            )
        known[place] = file.name


def _check_copies(parts: Sequence[_Part]) -> None:
    """Refuse a copy of a file: its episodes would count twice."""
    known: dict[object, str] = {}
    for part in parts:
        if isinstance(part.content, Section) and len(part.roster):
            for file in part.content.files:
                again = file.mark in known
                same = known.setdefault(file.mark, file.name)
                if again:
                    what = " twice" if same == file.name else f", a copy of {same}"
                    raise ValueError(
                        f"episodes has {file.name}{what}: its episodes would count twice; give "
                        "each file once"
                    )


def _check_comparable(part: _Part) -> None:
    """Refuse policies made by a function in a worker if equal ones cannot be recognised."""
    if isinstance(part.content, Section):
        return
    for policy in part.roster.policies:
        if type(policy).__eq__ is object.__eq__:
            raise TypeError(
                f"{part.name} has the policy {policy!r}, of a class without __eq__: copies from "
                "other processes cannot be compared; give files or trajectories, define "
                "__eq__ and __hash__, or use workers=1 without Ray"
            )


def _tell_unused(parts: Sequence[_Part]) -> None:
    """Warn of files without a held-out episode beside others with some."""
    used: dict[str, list[int]] = {}
    for part in parts:
        counts = used.setdefault(part.name, [0, 0])
        counts[0] += int(np.count_nonzero(part.roster.held_out))
        counts[1] += len(part.roster)
    unused = [(name, count) for name, (chosen, count) in used.items() if count and not chosen]
    if unused:
        said = [f"{name}: 0 of {count:,} episodes used" for name, count in unused[:3]]
        more = f" (and {len(unused) - 3} more files)" if len(unused) > 3 else ""
        warnings.warn(
            f"{', '.join(said)}{more}, as none is held out; held_out=False (--data all) takes them",
            stacklevel=5,
        )


def _span(names: Sequence[str]) -> str:
    """Return one name for several origins in a row."""
    return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"


def _stretches(data: Trajectories, steps: int) -> Iterator[Trajectories]:
    """Cut trajectories into stretches of about so many steps."""
    first = 0
    while first < len(data):
        last = int(np.searchsorted(data.offsets, data.offsets[first] + steps, side="right")) - 1
        last = max(last, first + 1)
        whole = first == 0 and last == len(data)
        yield data if whole else data.select(episodes=slice(first, last))
        first = last
