"""The names of the columns of a table of steps, and of tables that are read when needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from gymnasium import spaces

from ope_gym.data.checks import check_horizon
from ope_gym.data.database import SeenFile
from ope_gym.data.schedules import Schedule
from ope_gym.data.spaces import Space
from ope_gym.data.tables.header import Header
from ope_gym.files import PathLike
from ope_gym.policies import Policy, UnknownPolicy

Spec: TypeAlias = Any
"""Columns of a batch: a name, a list of names that make a vector, a tuple or dict of these."""

Policies: TypeAlias = Policy | Sequence[Policy] | Mapping[Any, Policy]

_UNKNOWN = (UnknownPolicy(""),)
NAMING = (
    *("episode", "step", "observation", "action", "reward", "log_prob", "policy"),
    *("terminated", "truncated", "held_out", "start_clock"),
)
"""Arguments that name columns."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Name the columns of a table, and say what is not in it; see `Trajectories.from_frame`."""

    episode: str = "episode"
    step: str | None = "step"
    observation: Spec | None = None
    action: Spec | None = None
    reward: str = "reward"
    log_prob: str | None = None
    policy: str | None = None
    terminated: str | bool | None = None
    truncated: str | bool | None = None
    held_out: str | bool | None = None
    start_clock: str | None = None
    policies: Policies | None = None
    schedules: Sequence[Schedule] = ()
    observation_space: Space | None = None
    action_space: Space | None = None
    horizon: int | None = None


@dataclass(frozen=True)
class TableFiles:
    """Files of steps with the names of their columns, to be read when they are needed.

    Args:
        paths: Files and folders.
        layout: Names of the columns.
    """

    paths: tuple[PathLike | SeenFile, ...]
    layout: Layout

    def seen(self) -> TableFiles:
        """Return it with full paths: workers may have other working directories."""
        paths = (path if isinstance(path, SeenFile) else SeenFile.of(path) for path in self.paths)
        return dataclasses.replace(self, paths=tuple(paths))


def scan_parquet(paths: PathLike | Sequence[PathLike], **names: Any) -> TableFiles:
    """Describe Parquet or CSV files of steps, which `evaluate` reads when it needs them.

    Parquet files are never loaded whole, CSV files are.

    Args:
        paths: A file, a folder, or a list of them; episodes may go on in the next file.
        **names: The arguments of `Trajectories.from_frame`: names of columns, policies, spaces.
    """
    known = Layout.__dataclass_fields__
    for name in names.keys() - known.keys():
        raise TypeError(
            f"scan_parquet has no argument {name!r}; {did_you_mean(name, list(known))}it takes "
            f"{', '.join(known)}"
        )
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return TableFiles(tuple(listed), Layout(**names))


@dataclass(frozen=True, eq=False)
class Plan(Layout):
    """A layout whose names are all in the table; those that are None still are not there.

    Args:
        schedule: Column with the numbers of schedules; None where no policy changes inside
            episodes.
        labels: Number of each label of the column `policy`; None where it has the numbers.
        grows: Whether the labels are those found in the table.
        finite: Whether observations and log-probabilities must be finite: not where NaN was
            there when the table was written.
    """

    terminated: str | bool = True
    truncated: str | bool = False
    held_out: str | bool = False
    policies: tuple[Policy, ...] = ()
    schedule: str | None = None
    labels: dict[Any, int] | None = None
    grows: bool = False
    finite: bool = True

    @property
    def structure(self) -> list[str]:
        """Columns that say which rows are which episode."""
        names = (self.episode, self.step, self.policy, self.terminated, self.truncated)
        listed = (*names, self.held_out, self.start_clock, self.schedule)
        return list(dict.fromkeys(name for name in listed if isinstance(name, str)))

    @property
    def values(self) -> list[str]:
        """Columns that are read with the steps."""
        names = [*names_of(self.observation), *names_of(self.action), self.reward]
        return list(dict.fromkeys([*names, *filter(None, (self.log_prob, self.policy))]))


def names_of(spec: Spec) -> Iterator[str]:
    """Yield the columns of a batch."""
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec, Mapping | Sequence):
        for part in spec.values() if isinstance(spec, Mapping) else spec:
            yield from names_of(part)
    elif not (spec is None or isinstance(spec, bool)):
        raise TypeError(f"{spec!r} is no name of a column: give text, or a list of names")


def spec_of(space: Space | None, name: str) -> Spec:
    """Return the columns in which our tables have a batch of a space."""
    if isinstance(space, spaces.Tuple):
        return tuple(spec_of(part, f"{name}.{i}") for i, part in enumerate(space.spaces))
    if isinstance(space, spaces.Dict):
        return {key: spec_of(part, f"{name}.{key}") for key, part in space.spaces.items()}
    return name


def make_plan(layout: Layout, names: Sequence[str], header: Header | None) -> Plan:
    """Find the columns of a layout in a table with these names; raise if one is missing."""
    header = header or Header()
    given = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    for name in ("log_prob", "policy", "terminated", "truncated", "held_out", "start_clock"):
        if given[name] is None and name in names:
            given[name] = name
    for name in ("observation_space", "action_space", "horizon", "schedules"):
        given[name] = given[name] or getattr(header, name)
    for name in ("observation", "action"):
        if given[name] is None:
            given[name] = getattr(header, name) or spec_of(given[f"{name}_space"], name)
    if given["terminated"] is None:
        given["terminated"] = given["truncated"] is None  # nothing tells of ends: all have ended
    given["horizon"] = check_horizon(given["horizon"])
    given["truncated"] = given["truncated"] or False
    given["held_out"] = given["held_out"] or False
    if _is_policy(layout.policies):
        given["policy"] = None
    given |= _policies(layout.policies, given["policy"], header)
    schedule = "schedule" if given["schedules"] else None
    plan = Plan(**given, schedule=schedule, finite=header.finite)
    for argument in (*NAMING, "schedule"):
        for name in names_of(getattr(plan, argument)):
            if names.count(name) != 1:
                raise ValueError(_missing(argument, name, names))
    return plan


def _missing(argument: str, name: str, names: Sequence[str]) -> str:
    """Return the message for a column that is not there, or there twice."""
    what = f"appears {names.count(name)} times in" if name in names else "is missing from"
    listed = ", ".join(dict.fromkeys(names[:30])) + (", ..." if len(names) > 30 else "")
    remedy = (
        "name it, step=..., or give step=None if the rows of each episode are in order"
        if argument == "step"
        else f"name the right one, {argument}=..."
    )
    return (
        f"column {name!r} ({argument}) {what} the table, which has {listed}; "
        f"{did_you_mean(name, names)}{remedy} (--column {argument}=... on the command line)"
    )


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a hint at the known name that is spelt most alike; empty if none is."""
    close = [] if name in known else get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}? " if close else ""


def _is_policy(given: Any) -> bool:
    return hasattr(given, "log_prob") and hasattr(given, "sample")


def _policies(given: Any, column: str | None, header: Header) -> dict[str, Any]:
    """Return the policies, the labels that the column has for them, and whether these grow."""
    if given is None and header.version is not None:
        return {"policies": header.policies}
    if given is None:  # each label of the column is an unknown policy
        return {"policies": (), "labels": {}, "grows": True} if column else {"policies": _UNKNOWN}
    if _is_policy(given):
        return {"policies": (given,)}
    listed: list[Any] = [given]
    if isinstance(given, Mapping | Sequence):
        listed = list(given.values() if isinstance(given, Mapping) else given)
    if not all(map(_is_policy, listed)):
        raise TypeError(
            f"policies is {given!r}: give a policy, a list of policies whose numbers the column "
            "policy=... has, or a dict from its labels to policies"
        )
    if column is None and (isinstance(given, Mapping) or len(listed) > 1):
        raise ValueError(
            "policies has several, but no column says which acted: name it, policy=..."
        )
    labels = {label: k for k, label in enumerate(given)} if isinstance(given, Mapping) else None
    return {"policies": tuple(listed), "labels": labels}
