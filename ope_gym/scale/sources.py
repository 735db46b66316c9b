"""Recorded episodes that come in shards: who recorded them, and tasks that read some of them.

A shard is a file, trajectories in memory, or a function that makes some. All are visited once for
each pass, so a shard must give the same episodes every time. A task is a stretch of all episodes:
several small shards, one, or some blocks of a large file. How they are cut depends on the shards
alone, and a task knows what comes before it, so that tasks can be done anywhere and in any order.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ope_gym.arrays import IntArray, positive
from ope_gym.data.blocks import PathLike
from ope_gym.data.reader import FileSection, read_layout
from ope_gym.data.seen_files import SeenFile
from ope_gym.data.trajectories import Trajectories, Viewable, read_chunks
from ope_gym.scale.census import Census, Described, Mixture, Part
from ope_gym.scale.workers import Workers

Shard: TypeAlias = PathLike | Viewable | Callable[[], Viewable]
_DATA = ("held-out", "all", "auto")


@dataclass(frozen=True)
class Piece:
    """Episodes of one part.

    Args:
        part: its number.
        name: where it is from, for people.
        source: some blocks of a section of a file, without its policies, which the mixture of
            all shards has once for all pieces; or the shard.
        steps: of the chosen episodes.
        acted: (m,) the policies of the part that acted in the chosen episodes.
        counts: (m,) their chosen episodes.
    """

    part: int
    name: str
    source: FileSection | Shard | SeenFile
    steps: int
    acted: IntArray
    counts: IntArray

    def chunks(self, steps: int, mixture: Mixture) -> Iterator[Trajectories]:
        """The episodes, about so many steps at a time."""
        if isinstance(self.source, FileSection):
            policies = tuple(mixture.policies[k] for k in mixture.numbers[self.part])
            yield from read_chunks(dataclasses.replace(self.source, policies=policies), steps)
        else:
            yield from _cut(_view(self.source), steps)


@dataclass(frozen=True)
class Task:
    """A stretch of all episodes, by m of the behaviours.

    Args:
        number: of the task.
        pieces: to be read in order.
        steps: of the chosen episodes.
        begin: chosen episodes in the tasks before.
        behaviours: (m,) those that acted in the chosen episodes, rising.
        before: (m,) their chosen episodes in the tasks before.
        counts: (m,) their chosen episodes in this one.
    """

    number: int
    pieces: tuple[Piece, ...]
    steps: int
    begin: int
    behaviours: IntArray
    before: IntArray
    counts: IntArray

    @property
    def name(self) -> str:
        """Where its episodes are from, for people."""
        return span([piece.name for piece in self.pieces])

    @property
    def episodes(self) -> slice:
        """Its place among all chosen episodes."""
        return slice(self.begin, self.begin + int(self.counts.sum()))


def span(names: Sequence[str]) -> str:
    """One name for all."""
    return names[0] if names[0] == names[-1] else f"{names[0]} to {names[-1]}"


@dataclass(frozen=True)
class Survey:
    """What the first pass found.

    Args:
        mixture: the behaviours of all chosen episodes.
        tasks: all chosen episodes, in order.
        held_out: whether held-out episodes alone are chosen.
        steps: about how many to hold in memory at once.
        names: where the parts are from, for people.
    """

    mixture: Mixture
    tasks: tuple[Task, ...]
    held_out: bool
    steps: int
    names: tuple[str, ...]

    def policies_of(self, name: str) -> list[int]:
        """The numbers of the policies of a file."""
        parts = zip(self.names, self.mixture.numbers, strict=True)
        return [k for part, numbers in parts if part == name for k in numbers]


def survey(shards: Shard | Iterable[Shard], data: str, steps: int, crew: Workers) -> Survey:
    """The first pass: who recorded the episodes, and how to read them again.

    Args:
        shards: files, trajectories or buffers, or functions that make them; or one of these.
        data: "all" episodes, the "held-out" ones, or "auto": the held-out ones if there are any.
        steps: about how many to hold in memory at once.
        crew: who reads.
    """
    if data not in _DATA:
        raise ValueError(f"data is {data!r}; choose 'held-out', 'all' or 'auto'")
    if not positive(steps):
        raise ValueError(f"block_steps is {steps!r}; hold at least 1 step at once")
    listed = list(enumerate(map(_seen, _listed(shards))))
    _check_different([shard for _, shard in listed])
    drafts = [_Draft(tag) for tag in (True, False) if data in ("auto", _DATA[0 if tag else 1])]
    sent = crew.in_order(_parts, [(i, shard) for i, shard in listed if not _is_here(shard)])
    known: dict[object, str] = {}
    for i, shard in listed:  # what is in memory need not be sent, and keeps its very policies
        for found in _parts((i, shard)) if _is_here(shard) else next(sent):
            if crew.remote and callable(shard) and len(listed) > 1:
                _check_comparable(found.part)
            _check_new(found, known)
            for draft in drafts:
                draft.add(found, shard, steps)
    chosen = next((draft for draft in drafts if draft.census.trajectories), drafts[-1])
    if data == "auto" and chosen.census.held_out:  # nobody asked for them alone
        chosen.tell_unused()
    return chosen.finalise(steps)


@dataclass(frozen=True)
class _Found:
    """A part, and for a file how to read it again, the episodes of each block, its checksum."""

    part: Part
    section: FileSection | None
    blocks: IntArray
    last: int = 0


def _seen(shard: Shard) -> Shard | SeenFile:
    """A file as it is here and now: workers may have other working directories, or other files."""
    return SeenFile.of(shard) if isinstance(shard, str | os.PathLike) else shard


def _parts(numbered: tuple[int, Shard | SeenFile]) -> list[_Found]:
    i, shard = numbered
    if isinstance(shard, SeenFile):
        return [_part_of_file(section) for section in read_layout(shard)]
    if not (hasattr(shard, "view") or callable(shard)):
        raise TypeError(
            f"shard {i} is {shard!r}: give the path of a file, trajectories, a buffer, or a "
            "function that makes one"
        )
    data = _view(shard)
    described = Described(data.observation_space, data.action_space, data.horizon)
    part = Part(
        f"shard {i}",
        data.policies,
        data.policy_ids[data.offsets[:-1]],
        data.lengths,
        data.held_out,
        described,
        bool((data.schedule_ids >= 0).any()),
    )
    return [_Found(part, None, np.array([len(data)]))]


def _part_of_file(section: FileSection) -> _Found:
    part = Part(
        section.file.name,
        section.policies,
        section.first_policies,
        section.lengths,
        section.held_out,
        Described(section.observation_space, section.action_space, section.horizon),
        section.clocked,
    )
    return _Found(part, section.part(0, len(section)), section.counts, section.last)


class _Draft:
    """Survey of the parts so far."""

    def __init__(self, held_out: bool) -> None:
        self.census = Census(held_out=held_out)
        self._pieces: list[Piece] = []
        self._names: list[str] = []
        self._used: dict[str, list[int]] = {}  # by name, episodes that are chosen, and all

    def add(self, found: _Found, shard: Shard | SeenFile, steps: int) -> None:
        """A part of a shard, cut into pieces of about so many steps."""
        part, section = found.part, found.section
        number = len(self.census.numbers)
        self.census.update(part)
        self._names.append(part.name)
        if not len(part):
            return
        chosen = part.held_out if self.census.held_out else np.ones(len(part), dtype=bool)
        used = self._used.setdefault(part.name, [0, 0])
        used[0] += int(np.count_nonzero(chosen))
        used[1] += len(part)
        ends = np.cumsum(found.blocks)
        sizes = np.add.reduceat(np.where(chosen, part.lengths, 0), ends - found.blocks)
        stretch = (np.cumsum(sizes) - sizes) // steps  # of each block, by the steps before it
        firsts = np.append(0, np.flatnonzero(np.diff(stretch)) + 1)
        if section is not None:  # equal policies of many files are held once, by the census
            section = dataclasses.replace(section, policies=())
        for first, stop in zip(firsts, np.append(firsts[1:], ends.size), strict=True):
            rows = slice(ends[first] - found.blocks[first], ends[stop - 1])
            source: FileSection | Shard | SeenFile = shard
            if section is not None:
                source = section.part(first, stop)
            who, counts = np.unique(part.first_policies[rows][chosen[rows]], return_counts=True)
            if who.size:
                size = int(sizes[first:stop].sum())
                self._pieces.append(Piece(number, part.name, source, size, who, counts))

    def finalise(self, steps: int) -> Survey:
        """Pieces in a row make a task of about so many steps."""
        mixture = self.census.finalise()
        sizes = np.array([piece.steps for piece in self._pieces])
        stretch = (np.cumsum(sizes) - sizes) // steps  # of each piece, by the steps before it
        begin, before = 0, np.zeros_like(mixture.counts)
        tasks: list[Task] = []
        for chosen in np.split(np.arange(sizes.size), np.flatnonzero(np.diff(stretch)) + 1):
            pieces = tuple(self._pieces[i] for i in chosen)
            who, counts = mixture.counted((p.part, p.acted, p.counts) for p in pieces)
            size = int(sizes[chosen].sum())
            tasks.append(Task(len(tasks), pieces, size, begin, who, before[who], counts))
            before[who] += counts
            begin += int(counts.sum())
        return Survey(mixture, tuple(tasks), self.census.held_out, steps, tuple(self._names))

    def tell_unused(self) -> None:
        """Warn of shards without a held-out episode beside others with some."""
        unused = [(name, count) for name, (used, count) in self._used.items() if not used]
        if unused:
            said = [f"{name}: 0 of {count:,} episodes used" for name, count in unused[:3]]
            more = f" (and {len(unused) - 3} more shards)" if len(unused) > 3 else ""
            warnings.warn(
                f"{', '.join(said)}{more}, as none is held out; data='all' (--data all) takes them",
                stacklevel=3,
            )


def _listed(shards: Shard | Iterable[Shard]) -> Iterable[Shard]:
    if isinstance(shards, Iterator):
        raise ValueError(
            f"shards is {shards!r}, which can be read only once, but every pass reads all shards: "
            "give a list of files, of trajectories or of functions that make them"
        )
    if isinstance(shards, np.ndarray):  # of paths; it has a view, too
        return list(np.atleast_1d(shards).tolist())
    if isinstance(shards, str | os.PathLike) or hasattr(shards, "view") or callable(shards):
        return [shards]  # type: ignore[list-item]
    if not isinstance(shards, Iterable):
        raise TypeError(
            f"shards is {shards!r}: give files, trajectories, buffers or functions that make them"
        )
    return shards


def _check_different(shards: Sequence[Shard | SeenFile]) -> None:
    """Refuse a file that is named twice: its episodes would be taken for twice as many."""
    known: dict[object, str] = {}
    for shard in shards:
        if isinstance(shard, SeenFile):
            place: object = os.path.realpath(shard.path)
            with suppress(OSError):
                status = os.stat(shard.path)
                place = status.st_dev, status.st_ino  # links have them in common
            if place in known:
                same = "" if known[place] == shard.name else f", which is {known[place]}"
                raise ValueError(
                    f"shards has the file {shard.name} twice{same}: its episodes would count "
                    "twice; give each file once"
                )
            known[place] = shard.name


def _check_new(found: _Found, known: dict[object, str]) -> None:
    """Refuse a copy of a file; `known` are the files so far, by what they hold."""
    if found.section is not None and len(found.part):
        file = found.section.file
        same = known.setdefault((file.mark, found.last), file.name)
        if same != file.name:
            raise ValueError(
                f"shards has {file.name}, a copy of {same}: its episodes would count twice; give "
                "each file once"
            )


def _is_here(shard: Shard | SeenFile) -> bool:
    return hasattr(shard, "view")


def _check_comparable(part: Part) -> None:
    """Refuse policies that a function made elsewhere, if their copies would be different ones."""
    for policy in part.policies:
        if type(policy).__eq__ is object.__eq__:
            raise TypeError(
                f"{part.name} has the policy {policy!r}, of a class without __eq__: made in other "
                "processes, equal ones could not be told; give files or trajectories, define "
                "__eq__ and __hash__, or use workers=1 without Ray"
            )


def _view(shard: Shard | SeenFile) -> Trajectories:
    """Of trajectories, a buffer, or a function that makes one."""
    return shard.view() if hasattr(shard, "view") else shard().view()  # type: ignore[operator]


def _cut(data: Trajectories, steps: int) -> Iterator[Trajectories]:
    """Stretches of about so many steps."""
    first = 0
    while first < len(data):
        last = int(np.searchsorted(data.offsets, data.offsets[first] + steps, side="right")) - 1
        last = max(last, first + 1)
        whole = first == 0 and last == len(data)
        yield data if whole else data.select(episodes=slice(first, last))
        first = last
