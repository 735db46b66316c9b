"""Recorded episodes that come in shards, one chunk after the other.

A shard is a file, trajectories in memory, or a function that makes some. All are visited once for
each pass, so a shard must give the same episodes every time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ope_gym.shard_census import Described, Part
from ope_gym.shard_files import FileSection, read_layout
from ope_gym.storage import PathLike
from ope_gym.trajectories import Trajectories, Viewable

Shard: TypeAlias = PathLike | Viewable | Callable[[], Viewable]


@dataclass(frozen=True)
class Shards:
    """All shards, to be visited again and again.

    Args:
        shards: files, trajectories or buffers, or functions that make them; or one of these.
        steps: about how many to hold at once.
    """

    shards: Shard | Iterable[Shard]
    steps: int = 1 << 17

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"block_steps is {self.steps}; hold at least 1 step at once")
        if isinstance(self.shards, Iterator):
            raise ValueError(
                f"shards is {self.shards!r}, which can be read only once, but every pass reads all "
                "shards: give a list of files, of trajectories or of functions that make them"
            )

    def parts(self) -> Iterator[Part]:
        """What the first pass needs."""
        for name, shard in self._named():
            if isinstance(shard, list):
                yield from (_part_of_file(section) for section in shard)
            else:
                yield _part_of(name, shard)

    def chunks(self) -> Iterator[tuple[int, str, Trajectories]]:
        """The number of the part, its name and some of its episodes, in order."""
        number = 0
        for name, shard in self._named(first=False):
            if isinstance(shard, list):
                for section in shard:
                    for chunk in section.chunks(self.steps):
                        yield number, name, chunk
                    number += 1
            else:
                for chunk in _cut(shard, self.steps):
                    yield number, name, chunk
                number += 1

    def _named(self, first: bool = True) -> Iterator[tuple[str, list[FileSection] | Trajectories]]:
        for i, shard in enumerate(self._listed()):
            if isinstance(shard, str | os.PathLike):
                yield os.fspath(shard), read_layout(shard, verify=first, tables=first)
            elif hasattr(shard, "view"):
                yield f"shard {i}", shard.view()
            elif callable(shard):
                yield f"shard {i}", shard().view()
            else:
                raise TypeError(
                    f"shard {i} is {shard!r}: give the path of a file, trajectories, a buffer, or "
                    "a function that makes one"
                )

    def _listed(self) -> Iterable[Shard]:
        given = self.shards
        single = isinstance(given, str | os.PathLike) or hasattr(given, "view") or callable(given)
        return [given] if single else given  # type: ignore[list-item, return-value]


def _cut(data: Trajectories, steps: int) -> Iterator[Trajectories]:
    """Stretches of about so many steps."""
    first = 0
    while first < len(data):
        last = int(np.searchsorted(data.offsets, data.offsets[first] + steps, side="right")) - 1
        last = max(last, first + 1)
        whole = first == 0 and last == len(data)
        yield data if whole else data.select(episodes=slice(first, last))
        first = last


def _part_of(name: str, data: Trajectories) -> Part:
    described = Described(data.observation_space, data.action_space, data.horizon)
    return Part(
        name, data.policies, data.policy_ids[data.offsets[:-1]], data.lengths, data.held_out,
        described, bool((data.schedule_ids >= 0).any()),
    )  # fmt: skip


def _part_of_file(section: FileSection) -> Part:
    own, none = section.section, np.empty(0, dtype=np.int64)
    return Part(
        os.fspath(section.path), tuple(own.policies),
        np.concatenate([none.astype(np.int32), *section.first_policies]),
        np.concatenate([none, *section.lengths]),
        np.concatenate([none.astype(bool), *section.held_out]),
        Described(own.observation_space, own.action_space, own.horizon), section.clocked,
    )  # fmt: skip
