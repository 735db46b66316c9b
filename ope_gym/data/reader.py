"""Files of episodes read a stretch at a time: never more than some steps in memory.

A file that a recorder wrote has a block for every few episodes, one that `Trajectories.save` wrote
has a single block for all. Small blocks are read whole and joined, large ones in stretches of whole
episodes. The layout of a file is described in `ope_gym.data.blocks` and `ope_gym.data.files`; what
they refuse is refused here, too: a file gives the episodes of `Trajectories.load`, or an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import platform
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.blocks import (
    MAGIC,
    MALFORMED,
    Block,
    DamagedFileError,
    FileCut,
    Head,
    PathLike,
    check_magic,
    read_array,
    read_block,
    read_entry,
    read_head,
    what_is_wrong,
)
from ope_gym.data.files import (
    Section,
    add_block,
    add_episodes,
    check_column,
    check_table,
    open_section,
    schedule_ids,
    unpack,
)
from ope_gym.data.schema import check_policy_ids
from ope_gym.data.spaces import Space
from ope_gym.data.trajectories import Trajectories, agree, from_section

_WHOLE = 1 << 24  # bytes of a block that is read in one piece
_ENDS = 1 << 16  # bytes at either end of a file that tell it from others
_ROWS = 1 << 16  # of a column that are read in one piece, to see who acted
_KEEP = "keep what precedes it: Trajectories.load(path, recover=True).save(new_path)"


class Mark(NamedTuple):
    """What tells a file from others: its size, and a digest of both its ends."""

    size: int
    digest: bytes


@dataclass(frozen=True)
class SeenFile:
    """A file as the process saw it that was asked for it; others must find the same one.

    Args:
        name: as it was given, for people.
        path: of any working directory.
        node: where it was seen.
        mark: None if it cannot be read there; it may still be found where the work is done.
    """

    name: str
    path: str
    node: str
    mark: Mark | None

    @classmethod
    def of(cls, path: PathLike) -> SeenFile:
        """As this process sees it."""
        mark, place = None, os.path.abspath(path)
        with suppress(OSError), open(place, "rb") as file:
            mark = _mark(file)
        return cls(os.fspath(path), place, platform.node(), mark)

    def open(self) -> BinaryIO:
        """To be read, if it is the file that was seen; it may have grown."""
        here = platform.node()
        try:
            file = open(self.path, "rb")  # noqa: SIM115, whoever called closes it
        except OSError as error:
            words = error.strerror or str(error)
            if self.mark is not None or here != self.node:
                words += f" on {here} at {self.path}; all nodes need the file at the same path"
            raise OSError(error.errno, words, self.name) from error
        if self.mark is not None and _mark(file, self.mark.size) != self.mark:
            file.close()
            raise ValueError(
                f"{self.name}: on {here} {self.path} is another file than the one that {self.node} "
                "saw at first; all nodes need the same files, which must not change meanwhile"
            )
        return file


def _mark(file: BinaryIO, size: int | None = None) -> Mark:
    """Of a file, or of its first `size` bytes; what is read next is its beginning."""
    size = os.fstat(file.fileno()).st_size if size is None else size
    digest = hashlib.blake2b(file.read(min(size, _ENDS)), digest_size=16)
    file.seek(max(0, size - _ENDS))
    digest.update(file.read(min(size, _ENDS)))
    file.seek(0)
    return Mark(size, digest.digest())


@dataclass
class FileSection:
    """A section of a file: its policies, and where its blocks of episodes begin.

    Numbers of blocks and episodes are kept as plain bytes: a file may have millions of them.

    Args:
        file: where it is.
        section: spaces, policies and changes of policy, without episodes.
        blocks: where its blocks of episodes begin in the file.
        sizes: bytes of their payloads.
        counts: their episodes.
        rows: observations and actions of no row, where their space is not known.
        table: (n, 5) in a row: length, held out, start clock, schedule, who acted first.
        last: checksum of the last block of the file, which depends on all before it.
    """

    file: SeenFile
    section: Section
    blocks: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    counts: array[int] = field(default_factory=lambda: array("q"))
    rows: dict[str, Tree] = field(default_factory=dict)
    table: array[int] = field(default_factory=lambda: array("q"))
    last: int = 0

    def __len__(self) -> int:
        """Of blocks; each has an episode."""
        return len(self.blocks)

    @property
    def observation_space(self) -> Space | None:
        """None if unknown."""
        return self.section.observation_space

    @property
    def action_space(self) -> Space | None:
        """None if unknown."""
        return self.section.action_space

    @property
    def horizon(self) -> int | None:
        """None if unknown."""
        return self.section.horizon

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) steps of each episode."""
        return self._column(0)

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """(n,) whether the learner never trained on the episode."""
        return np.asarray(self._column(1) != 0)

    @property
    def first_policies(self) -> NDArray[np.int32]:
        """(n,) who acted first in each episode."""
        return self._column(4).astype(np.int32)

    @property
    def clocked(self) -> bool:
        """Whether an episode follows a schedule in which policies change during episodes."""
        ids = schedule_ids(self.section.clocked(), self._column(2), self._column(3))
        return bool((ids >= 0).any())

    def _column(self, number: int) -> NDArray[np.int64]:
        return np.asarray(self.table, dtype=np.int64).reshape(-1, 5)[:, number].copy()

    def check(self) -> None:
        """Refuse policies that do not exist, and changes that cannot be; ValueError says which."""
        from_section(self.section)  # without episodes
        first = self._column(4)
        check_policy_ids(
            first, len(first), len(self.section.policies), lambda i: f"episode {i or 0}"
        )

    def part(self, first: int, stop: int) -> FileSection:
        """Blocks first:stop, to be read; without the table of their episodes."""
        return FileSection(self.file, self.section, self.blocks[first:stop], self.sizes[first:stop])

    def chunks(self, steps: int) -> Iterator[Trajectories]:
        """The episodes, about so many steps at a time."""
        with self.file.open() as file:
            size, waiting, held = os.fstat(file.fileno()).st_size, self._nothing(), 0
            offset = 0
            try:
                for offset, length in zip(self.blocks, self.sizes, strict=True):
                    for block in _stretches(file, offset, size, length, steps):
                        add_episodes(waiting, block)
                        held += len(block.arrays["rewards"])
                        if held >= steps:
                            yield from_section(waiting)
                            waiting, held = self._nothing(), 0
                if held:
                    yield from_section(waiting)
            except (*MALFORMED, FileCut) as error:
                reason = f"up to this block, the contents contradict each other: {error}"
                raise DamagedFileError(self.file.name, offset, reason, "not readable") from error

    def _nothing(self) -> Section:
        own = self.section
        return Section(
            own.observation_space, own.action_space, own.horizon, policies=list(own.policies)
        )


def read_layout(path: PathLike | SeenFile) -> list[FileSection]:
    """The sections of a file, with the tables of their episodes: who acted, lengths, held out.

    All contents are compared with their checksums. A file that ends inside its last block, as a
    crash leaves it, is read up to there, with a warning.
    """
    found: list[FileSection] = []
    known: dict[str, tuple[Any, Space]] = {}
    seen = path if isinstance(path, SeenFile) else SeenFile.of(path)
    path = seen.name
    with seen.open() as file:
        if seen.mark is None:  # the first to see it
            seen = dataclasses.replace(seen, mark=_mark(file), node=platform.node())
        check_magic(file, path)
        size, offset, last = os.fstat(file.fileno()).st_size, len(MAGIC), 0
        try:
            while offset < size:
                head = read_head(file, offset, size, last, verify=True)
                if head.kind == "spaces":
                    block = read_block(file, offset, size)[0]
                    found.append(FileSection(seen, open_section(block, known)))
                elif not found:
                    raise ValueError("the first block is not of kind 'spaces'")
                elif head.kind != "episodes":
                    add_block(found[-1].section, read_block(file, offset, size)[0])
                else:
                    _note(found[-1], file, head)
                offset, last = head.end, head.checksum
        except FileCut as cut:
            cut.warn(path, stacklevel=2)
        except MALFORMED as error:
            raise DamagedFileError(path, offset, what_is_wrong(error), _KEEP) from error
    try:
        for section in found:
            section.last = last
            section.check()
        _check_alike(found)
    except ValueError as error:
        reason = f"the contents contradict each other: {error}"
        raise DamagedFileError(path, 0, reason, "not readable") from error
    return found


def _note(section: FileSection, file: BinaryIO, head: Head) -> None:
    """Add the place of a block of episodes, and its table."""
    section.blocks.append(head.offset)
    section.sizes.append(head.end - head.start)
    for name in ("observations", "actions"):
        if getattr(section, f"{name[:-1]}_space") is None:
            rows = _no_rows(head, name)
            before = section.rows.get(name, rows)
            section.rows[name] = batches.concatenate([before, rows])  # refuses what differs
    episodes = _read_rows(file, head, "episodes")
    check_column("episodes", episodes)
    check_column("policy_ids", _read_rows(file, head, "policy_ids", 0, 0))
    steps = read_entry("policy_ids", head.entries["policy_ids"], head.end - head.start)[1][0]
    check_table(episodes, steps)
    starts = np.cumsum(episodes[:, 0]) - episodes[:, 0]
    first = np.empty(len(starts), dtype=np.int64)
    for begin in range(0, steps, _ROWS):  # never the whole column of a large block
        end = min(begin + _ROWS, steps)
        here = slice(*np.searchsorted(starts, [begin, end]))
        first[here] = _read_rows(file, head, "policy_ids", begin, end)[starts[here] - begin]
    table = np.column_stack([episodes[:, [0, 3, 4, 5]], first])
    section.counts.append(len(episodes))
    section.table.frombytes(table.astype(np.int64).tobytes())


def _no_rows(head: Head, name: str) -> Tree:
    """What `Trajectories.load` would find in a block of no rows: structure, shapes, dtypes."""
    entries = {
        key: read_entry(key, entry, head.end - head.start) for key, entry in head.entries.items()
    }
    empty = {key: np.empty((0, *shape[1:]), dtype) for key, (dtype, shape, _) in entries.items()}
    return unpack(head.meta[name], None, empty)


def _check_alike(found: list[FileSection]) -> None:
    """Refuse sections of different environments, as `Trajectories.merge` does."""
    if not found:
        return
    agree(found)
    for name in ("observations", "actions"):
        kinds = [spaces.signature(part.rows[name]) for part in found if name in part.rows]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"{name} differ in structure, shape or dtype: {kinds}")


def _read_rows(
    file: BinaryIO, head: Head, name: str, begin: int = 0, end: int | None = None
) -> NDArray[Any]:
    """Rows begin:end of one array of a block."""
    dtype, shape, offset = read_entry(name, head.entries.get(name), head.end - head.start)
    stop = shape[0] if end is None else end
    if not 0 <= begin <= stop <= shape[0]:
        raise ValueError(f"array {name!r} of shape {shape} has no rows {begin} to {stop}")
    row = np.dtype(dtype).itemsize * math.prod(shape[1:])
    file.seek(head.start + offset + begin * row)
    part = {"dtype": dtype, "shape": [stop - begin, *shape[1:]], "offset": 0}
    return read_array(name, part, file.read((stop - begin) * row))


def _stretches(file: BinaryIO, offset: int, size: int, length: int, steps: int) -> Iterator[Block]:
    """A block of episodes, whole if its payload is not long, else cut between episodes."""
    if length <= _WHOLE:
        yield read_block(file, offset, size)[0]
        return
    head = read_head(file, offset, size, verify=False)
    columns = [name for name in head.entries if name != "episodes"]
    shapes = [read_entry(name, head.entries[name], head.end - head.start)[1] for name in columns]
    cut = len({shape[:1] for shape in shapes}) == 1
    if not cut:  # objects come as a whole
        yield read_block(file, offset, size)[0]
        return
    episodes = _read_rows(file, head, "episodes")
    check_column("episodes", episodes)
    check_table(episodes, *shapes[0][:1])
    ends = np.append(0, np.cumsum(episodes[:, 0]))
    first = 0
    while first < len(episodes):
        last = int(np.searchsorted(ends, ends[first] + steps, side="right")) - 1
        last = max(last, first + 1)
        rows = int(ends[first]), int(ends[last])
        arrays = {name: _read_rows(file, head, name, *rows) for name in columns}
        yield Block("episodes", head.meta, {**arrays, "episodes": episodes[first:last]}, offset)
        first = last
