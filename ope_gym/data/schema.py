"""The table of columns of recorded episodes, and what is done to all columns alike.

Whatever copies, slices, joins, writes or reads columns loops over `COLUMNS`, so a new column is one
field of `Columns` here, and code where it is filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym import arrays, batches
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.schedules import Schedule
from ope_gym.data.spaces import Space
from ope_gym.policies import Policy

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """Describe one column.

    Args:
        name: Its field in `Columns`.
        per: "step" or "episode".
        dtype: Its dtype; None for a nested batch, whose dtypes follow from a Gymnasium space.
        default: The value of every row of a file that lacks the column, as files written before
            it existed do; None if every file must have it. Such columns come last of their kind.
    """

    name: str
    per: str
    dtype: Any = None
    default: Any = None


def _per_step(dtype: Any = None, default: Any = None) -> dict[str, Any]:
    return {"per": "step", "dtype": dtype, "default": default}


def _per_episode(dtype: Any, default: Any = None) -> dict[str, Any]:
    return {"per": "episode", "dtype": dtype, "default": default}


@dataclass(frozen=True, eq=False, repr=False)
class Columns:
    """Episodes as columns; rows `offsets[i]:offsets[i + 1]` are episode i.

    `Trajectories`, which describes the fields, adds what a person asks of them. The order of the
    columns is the order in files.
    """

    observations: Tree = field(metadata=_per_step())
    actions: Tree = field(metadata=_per_step())
    rewards: Floats = field(metadata=_per_step(np.float64))
    log_probs: Floats = field(metadata=_per_step(np.float64))
    policy_ids: NDArray[np.int32] = field(metadata=_per_step(np.int32))
    offsets: Ints
    terminated: Flags = field(metadata=_per_episode(np.bool_))
    truncated: Flags = field(metadata=_per_episode(np.bool_))
    held_out: Flags = field(metadata=_per_episode(np.bool_))
    start_clock: Ints = field(metadata=_per_episode(np.int64))
    schedule_ids: NDArray[np.int32] = field(metadata=_per_episode(np.int32))
    schedules: tuple[Schedule, ...] = ()
    policies: tuple[Policy, ...] = ()
    observation_space: Space | None = None
    action_space: Space | None = None
    horizon: int | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_steps(self) -> int:
        """Number of steps S of all episodes."""
        return len(self.rewards)

    @cached_property
    def lengths(self) -> Ints:
        """(n,) number of steps of each episode."""
        return read_only(np.diff(self.offsets))

    @cached_property
    def first_policies(self) -> NDArray[np.int32]:
        """(n,) the policy that acted at the first step of each episode."""
        return read_only(self.policy_ids[self.offsets[:-1]])

    @cached_property
    def steps(self) -> Ints:
        """(S,) number of the step within its episode, from 0."""
        return read_only(arrays.step_numbers(self.offsets))

    @cached_property
    def episode_ids(self) -> Ints:
        """(S,) episode of each step."""
        return read_only(arrays.episode_ids(self.offsets))

    @property
    def discrete(self) -> bool | None:
        """Whether actions have probabilities, not densities; None if their space is unknown."""
        return spaces.is_discrete(self.action_space)


class Chunk(NamedTuple):
    """Some episodes as they are in a file or a table, not checked yet.

    Args:
        offset: Number of their first row there.
        first: Number of their first episode.
        columns: The episodes.
    """

    offset: int
    first: int
    columns: Columns


COLUMNS = tuple(Column(x.name, **x.metadata) for x in dataclasses.fields(Columns) if x.metadata)
BY_STEP = tuple(column.name for column in COLUMNS if column.per == "step")
BY_EPISODE = tuple(column.name for column in COLUMNS if column.per == "episode")
BATCHES = tuple(column.name for column in COLUMNS if column.dtype is None)
AGREED = ("observation_space", "action_space", "horizon")

C = TypeVar("C", bound=Columns)


def space_of(data: Any, column: str) -> Space | None:
    """Return the Gymnasium space of one row of a batch: of "actions", the action space."""
    space: Space | None = getattr(data, f"{column[:-1]}_space")
    return space


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same array, made read-only."""
    array.setflags(write=False)
    return array


def freeze(data: C) -> C:
    """Return the same object, its arrays made read-only in place."""
    for name in (*BY_STEP, "offsets", *BY_EPISODE):
        for leaf in batches.leaves(getattr(data, name)):
            leaf.setflags(write=False)
    return data


def take(data: C, episodes: Ints) -> C:
    """Copy some episodes, in the order of their indices."""
    begins = data.offsets[:-1][episodes]
    lengths = data.offsets[1:][episodes] - begins
    offsets = arrays.offsets_of(lengths)
    # row r of the result is row r + (start of its episode there - its start here)
    rows = np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])
    taken = {name: batches.take(getattr(data, name), rows) for name in BY_STEP}
    taken |= {name: getattr(data, name)[episodes] for name in BY_EPISODE}
    return freeze(dataclasses.replace(data, offsets=offsets, **taken))


def join(parts: Sequence[C]) -> C:
    """Put the columns of all parts together, in order and with nothing renumbered.

    The result has no policies and no schedules: only who renumbers the parts knows them.
    """
    full = [part for part in parts if len(part)] or [parts[0]]
    changed = agree(parts) | {"policies": (), "schedules": ()}
    if len(full) > 1:
        for name in BATCHES:
            if changed[f"{name[:-1]}_space"] is None:
                check_alike(name, [getattr(part, name) for part in full])
        for name in (*BY_STEP, *BY_EPISODE):
            changed[name] = batches.concatenate([getattr(part, name) for part in full])
        changed["offsets"] = arrays.offsets_of(np.concatenate([part.lengths for part in full]))
    return freeze(dataclasses.replace(full[0], **changed))


def check_alike(name: str, parts: Sequence[Tree]) -> None:
    """Raise if batches without a space differ in structure, shape or kind of number."""
    kinds = [spaces.signature(part) for part in parts]
    for kind in kinds:
        if kind != kinds[0]:
            raise ValueError(f"{name} differ in structure, shape or dtype: {kinds[0]} and {kind}")


def agree(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the spaces and the horizon that all parts share, or raise if they differ.

    Args:
        parts: Columns or buffers; one without episodes need not know its spaces and horizon.
    """
    agreed: dict[str, Any] = {}
    for name in AGREED:
        values = [getattr(part, name) for part in parts]
        stated = [v for v, part in zip(values, parts, strict=True) if v is not None or len(part)]
        agreed[name] = stated[0] if stated else None
        for value in stated:
            # identity first: comparing two large Boxes takes long
            if value is not agreed[name] and value != agreed[name]:
                raise spaces.mismatch(name, agreed[name], value)
    return agreed


def renumber(
    part: C, numbers: Sequence[int] | NDArray[np.int32], *, first_schedule: int
) -> tuple[C, list[Schedule]]:
    """Rename policy k to numbers[k], and count the schedules of a part from first_schedule.

    Returns:
        The part and its schedules, both with the new numbers.
    """
    table = np.array(numbers, dtype=np.int32)
    schedules = [Schedule(s.clocks, table[s.policies]) for s in part.schedules]
    ids = np.where(part.schedule_ids < 0, -1, part.schedule_ids + first_schedule)
    same = np.array_equal(table, np.arange(table.size))
    policy_ids = part.policy_ids if same or not len(part) else table[part.policy_ids]
    changed = dataclasses.replace(
        part, policy_ids=read_only(policy_ids), schedule_ids=read_only(ids.astype(np.int32))
    )
    return changed, schedules
