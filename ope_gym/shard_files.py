"""Files of episodes read a stretch at a time: never more than some steps in memory.

A file that a recorder wrote has a block for every few episodes, one that `Trajectories.save` wrote
has a single block for all. Small blocks are read whole and joined, large ones in stretches of whole
episodes. The layout of a file is described in `ope_gym.storage` and `ope_gym.episode_files`.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ope_gym.episode_files import Section, _add, _add_episodes, _open_section
from ope_gym.schedules import ChangeTable
from ope_gym.storage import (
    _BLOCK_MAGIC,
    _HEADER,
    MAGIC,
    MALFORMED,
    Block,
    DamagedFileError,
    PathLike,
    _FileCut,
    _read_array,
    _read_block,
)
from ope_gym.trajectories import Trajectories, _from_section

_WHOLE = 1 << 24  # bytes of a block that is read in one piece
_PIECE = 1 << 20  # bytes checked at once


@dataclass(frozen=True)
class _Head:
    """The head of a block: everything but its payload, which lies at start:end of the file."""

    kind: str
    meta: dict[str, Any]
    entries: dict[str, Any]
    offset: int
    start: int
    end: int


@dataclass
class FileSection:
    """A section of a file: its policies, and where its blocks of episodes begin.

    Args:
        path: the file.
        section: spaces, policies and changes of policy, without episodes.
        blocks: (blocks,) where they begin in the file.
        first_policies: (n,) in parts, who acted first in each episode.
        lengths: (n,) in parts, steps of each episode.
        held_out: (n,) in parts, whether the learner never trained on the episode.
        starts: (n, 2) in parts, the clock at which each episode began, and its schedule.
    """

    path: PathLike
    section: Section
    blocks: list[int] = field(default_factory=list)
    first_policies: list[NDArray[np.int32]] = field(default_factory=list)
    lengths: list[NDArray[np.int64]] = field(default_factory=list)
    held_out: list[NDArray[np.bool_]] = field(default_factory=list)
    starts: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def clocked(self) -> bool:
        """Whether an episode follows a schedule in which policies change during episodes."""
        changes: dict[int, ChangeTable] = {}
        for number, clocks, policies, mid_episode in self.section.changes:
            table = changes.setdefault(number, ChangeTable())
            for clock, policy in zip(clocks, policies, strict=True):
                table.change(policy, clock, mid_episode=mid_episode)
        return any(
            bool(np.any((starts[:, 1] == number) & (starts[:, 0] >= table.clocked_from)))
            for number, table in changes.items()
            if table.clocked_from is not None
            for starts in self.starts
        )

    def chunks(self, steps: int) -> Iterator[Trajectories]:
        """The episodes, about so many steps at a time."""
        with open(self.path, "rb") as file:
            size, waiting = os.fstat(file.fileno()).st_size, self._nothing()
            for offset in self.blocks:
                try:
                    for block in _stretches(file, offset, size, steps):
                        _add_episodes(waiting, block)
                        if sum(map(len, waiting.columns["rewards"])) >= steps:
                            yield _from_section(waiting)
                            waiting = self._nothing()
                except (*MALFORMED, _FileCut) as error:
                    raise DamagedFileError(
                        self.path, offset, f"malformed block of episodes, {error!r}", "not readable"
                    ) from error
            if waiting.columns["rewards"]:
                yield _from_section(waiting)

    def _nothing(self) -> Section:
        own = self.section
        return Section(
            own.observation_space, own.action_space, own.horizon, policies=list(own.policies)
        )


def read_layout(path: PathLike, *, verify: bool, tables: bool) -> list[FileSection]:
    """The sections of a file, without their episodes.

    A file that ends inside its last block, as a crash leaves it, is read up to there, with a
    warning.

    Args:
        path: the file.
        verify: compare all contents with their checksums.
        tables: read the tables of the episodes as well: who acted, lengths, held out.
    """
    found: list[FileSection] = []
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedFileError(path, 0, "not an ope_gym file of this version", "check the path")
        size, offset = os.fstat(file.fileno()).st_size, len(MAGIC)
        while offset < size:
            try:
                head = _read_head(file, offset, size, verify=verify)
                _note(found, path, file, head, size, tables)
            except _FileCut as cut:
                warnings.warn(
                    f"{os.fspath(path)} ends inside its last block: {cut.dropped} bytes from byte "
                    f"{cut.offset} on were dropped (a run was interrupted, or is still writing)",
                    UserWarning,
                    stacklevel=2,
                )
                break
            except MALFORMED as error:
                raise DamagedFileError(
                    path, offset, f"malformed block, {error!r}",
                    "keep what precedes it: Trajectories.load(path, recover=True).save(new_path)",
                ) from error  # fmt: skip
            offset = head.end
    return found


def _note(
    found: list[FileSection], path: PathLike, file: BinaryIO, head: _Head, size: int, tables: bool
) -> None:
    if head.kind == "spaces":
        file.seek(head.offset)
        found.append(FileSection(path, _open_section(_read_block(file, head.offset, size)[0])))
        return
    if not found:
        raise ValueError("the first block is not of kind 'spaces'")
    last = found[-1]
    if head.kind != "episodes":
        file.seek(head.offset)
        _add(last.section, _read_block(file, head.offset, size)[0])
        return
    last.blocks.append(head.offset)
    if not tables:
        return
    episodes = _column(file, head, "episodes")
    if episodes.ndim != 2 or not len(episodes) or (episodes[:, 0] < 1).any():
        raise ValueError(f"its table of episodes has shape {episodes.shape} or empty episodes")
    ids = _column(file, head, "policy_ids")
    if episodes[:, 0].sum() != len(ids):
        raise ValueError(f"its episodes have {episodes[:, 0].sum()} steps, its columns {len(ids)}")
    last.lengths.append(episodes[:, 0])
    last.held_out.append(episodes[:, 3] != 0)
    last.first_policies.append(ids[np.append(0, np.cumsum(episodes[:-1, 0]))])
    last.starts.append(episodes[:, 4:6])


def _read_head(file: BinaryIO, offset: int, size: int, *, verify: bool) -> _Head:
    """The head of the block at `offset`; ValueError says what is wrong with it."""
    file.seek(offset)
    raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size:
        raise _FileCut(offset, size - offset)
    magic, json_length, payload_length, body_crc, head_crc = _HEADER.unpack(raw)
    if zlib.crc32(raw[:-4]) != head_crc or magic != _BLOCK_MAGIC:
        raise ValueError("the header of a block does not match its checksum")
    start = offset + _HEADER.size + json_length
    if start + payload_length > size:
        raise _FileCut(offset, size - offset)
    text = file.read(json_length)
    if verify:
        crc, left = zlib.crc32(text), payload_length
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise _FileCut(offset, size - offset)
            crc, left = zlib.crc32(piece, crc), left - len(piece)
        if crc != body_crc:
            raise ValueError("the contents of a block do not match their checksum")
    meta = json.loads(text)
    kind, entries = meta.pop("kind"), meta.pop("arrays")
    return _Head(kind, meta, entries, offset, start, start + payload_length)


def _column(
    file: BinaryIO, head: _Head, name: str, begin: int = 0, end: int | None = None
) -> NDArray[Any]:
    """Rows begin:end of one array of a block."""
    entry = head.entries[name]
    shape = entry["shape"]
    if not all(type(number) is int and number >= 0 for number in (*shape, entry["offset"])):
        raise ValueError(f"array {name!r} has the impossible shape {shape}")
    stop = shape[0] if end is None else end
    row = np.dtype(entry["dtype"]).itemsize * math.prod(shape[1:])
    inside = entry["offset"] + row * shape[0] <= head.end - head.start
    if not (0 <= begin <= stop <= shape[0] and inside):
        raise ValueError(f"array {name!r} of shape {shape} does not fit into its block")
    file.seek(head.start + entry["offset"] + begin * row)
    part = {"dtype": entry["dtype"], "shape": [stop - begin, *shape[1:]], "offset": 0}
    return _read_array(name, part, file.read((stop - begin) * row))


def _stretches(file: BinaryIO, offset: int, size: int, steps: int) -> Iterator[Block]:
    """A block of episodes, whole if it is small, else cut between episodes."""
    head = _read_head(file, offset, size, verify=False)
    columns = [name for name in head.entries if name != "episodes"]
    total = head.entries["rewards"]["shape"][0]
    objects = any(head.entries[name]["shape"][:1] != [total] for name in columns)  # JSON of objects
    if head.end - head.start <= _WHOLE or objects:
        file.seek(offset)
        yield _read_block(file, offset, size)[0]
        return
    episodes = _column(file, head, "episodes")
    ends = np.append(0, np.cumsum(episodes[:, 0]))
    first = 0
    while first < len(episodes):
        last = int(np.searchsorted(ends, ends[first] + steps, side="right")) - 1
        last = max(last, first + 1)
        rows = int(ends[first]), int(ends[last])
        arrays = {name: _column(file, head, name, *rows) for name in columns}
        yield Block("episodes", head.meta, {**arrays, "episodes": episodes[first:last]}, offset)
        first = last
