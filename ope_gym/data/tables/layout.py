"""The names of the columns of a table of steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gymnasium import spaces

from ope_gym.data.database import SeenFile
from ope_gym.data.paths import PathLike
from ope_gym.data.schedules import Schedule
from ope_gym.data.spaces import Space
from ope_gym.data.tables.header import Header
from ope_gym.policies import Policy

Spec: TypeAlias = Any
"""Columns of a batch: a name, a list of names that make a vector, a tuple or dict of these."""

Policies: TypeAlias = Policy | Sequence[Policy] | Mapping[Any, Policy]


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
    """Parquet files of steps with the names of their columns, to be read when they are needed.

    Args:
        paths: The files and folders.
        layout: The names of the columns.
    """

    paths: tuple[PathLike | SeenFile, ...]
    layout: Layout

    def seen(self) -> TableFiles:
        """Return it with full paths: workers may have other working directories."""
        paths = (path if isinstance(path, SeenFile) else SeenFile.of(path) for path in self.paths)
        return dataclasses.replace(self, paths=tuple(paths))


def scan_parquet(paths: PathLike | Sequence[PathLike], **names: Any) -> TableFiles:
    """Describe Parquet files of steps, which `evaluate` then reads without loading them whole.

    Args:
        paths: A file, a folder, or a list of them; episodes may go on in the next file.
        **names: The arguments of `Trajectories.from_frame`: names of columns, policies, spaces.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    unknown = sorted(names.keys() - Layout.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(Layout.__dataclass_fields__)
        raise TypeError(f"scan_parquet has no argument {unknown[0]!r}; it takes {known}")
    return TableFiles(tuple(listed), Layout(**names))


@dataclass(frozen=True, eq=False)
class Plan:
    """The columns to read from one table.

    Args:
        episode: Which episode a row belongs to.
        step: The number of the step; None where rows are in order.
        observation: Columns of the observations.
        action: Columns of the actions.
        reward: The rewards.
        log_prob: Log-probabilities; None where nobody recorded them.
        policy: Labels or numbers of the policies; None where one policy acted.
        terminated: A column, or the value for all episodes.
        truncated: A column, or the value for all episodes.
        held_out: A column, or the value for all episodes.
        start_clock: None if unknown.
        schedule: Numbers of schedules; None where no policy changes inside episodes.
        observation_space: None if unknown.
        action_space: None if unknown.
        finite: Whether observations and log-probabilities must be finite: not where NaN was
            there when the table was written.
        labels: The label of each policy; None where the column has numbers.
        grows: Whether labels are those found in the table.
    """

    episode: str
    step: str | None
    observation: Spec
    action: Spec
    reward: str
    log_prob: str | None
    policy: str | None
    terminated: str | bool
    truncated: str | bool
    held_out: str | bool
    start_clock: str | None
    schedule: str | None
    observation_space: Space | None
    action_space: Space | None
    finite: bool
    labels: tuple[Any, ...] | None
    grows: bool

    @property
    def structure(self) -> list[str]:
        """The columns that say which rows are which episode."""
        names = (self.episode, self.step, self.policy, self.terminated, self.truncated)
        found = (*names, self.held_out, self.start_clock, self.schedule)
        return list(dict.fromkeys(name for name in found if isinstance(name, str)))

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        values = [*names_of(self.observation), *names_of(self.action), self.reward]
        values += [] if self.log_prob is None else [self.log_prob]
        return list(dict.fromkeys([*self.structure, *values]))


def names_of(spec: Spec) -> Iterator[str]:
    """Yield the columns of a batch."""
    if isinstance(spec, str):
        yield spec
    else:
        for part in spec.values() if isinstance(spec, Mapping) else spec:
            yield from names_of(part)


def spec_of(space: Space | None, name: str) -> Spec:
    """Return the columns in which our tables have a batch of a space."""
    if isinstance(space, spaces.Tuple):
        return tuple(spec_of(part, f"{name}.{i}") for i, part in enumerate(space.spaces))
    if isinstance(space, spaces.Dict):
        return {key: spec_of(part, f"{name}.{key}") for key, part in space.spaces.items()}
    return name


def make_plan(layout: Layout, names: Sequence[str], header: Header | None) -> Plan:
    """Find the columns of a layout in a table with these names; raise if one is missing."""
    seen = layout.observation_space or (header.observation_space if header else None)
    chosen = layout.action_space or (header.action_space if header else None)
    observation, action = layout.observation, layout.action
    if observation is None:
        observation = header.observation if header else spec_of(seen, "observation")
    if action is None:
        action = header.action if header else spec_of(chosen, "action")

    def optional(given: str | bool | None, default: str) -> Any:
        return default if given is None and default in names else given

    terminated = optional(layout.terminated, "terminated")
    truncated = optional(layout.truncated, "truncated")
    policy = optional(layout.policy, "policy")
    if _is_policy(layout.policies):
        policy = None
    if terminated is None:
        terminated = truncated is None  # nothing tells of ends: all episodes have ended
    plan = Plan(
        layout.episode,
        layout.step,
        observation,
        action,
        layout.reward,
        optional(layout.log_prob, "log_prob"),
        policy,
        terminated=terminated,
        truncated=False if truncated is None else truncated,
        held_out=optional(layout.held_out, "held_out") or False,
        start_clock=optional(layout.start_clock, "start_clock"),
        schedule="schedule" if layout.schedules or (header and header.schedules) else None,
        observation_space=seen,
        action_space=chosen,
        finite=header is None or header.finite,
        **_labels(layout.policies, policy, header),
    )
    _check_names(plan, names)
    return plan


def policies_of(layout: Layout, header: Header | None) -> tuple[Policy, ...]:
    """Return the policies that are known before the table is read."""
    given: Any = layout.policies
    if given is None:
        return header.policies if header else ()
    if _is_policy(given):
        return (given,)
    return tuple(given.values() if isinstance(given, Mapping) else given)


def _is_policy(given: Any) -> bool:
    return hasattr(given, "log_prob") and hasattr(given, "sample")


def _labels(given: Any, policy: str | None, header: Header | None) -> dict[str, Any]:
    """Return the labels of policies, and whether they are found in the table."""
    if given is None and header is None:
        return {"labels": (), "grows": True}
    listed: Any = given.values() if isinstance(given, Mapping) else given
    several = isinstance(given, Mapping | Sequence) and all(map(_is_policy, listed))
    if given is not None and not _is_policy(given) and not several:
        raise TypeError(
            f"policies is {given!r}: give a policy, a list of policies whose numbers the column "
            "policy=... has, or a dict from its labels to policies"
        )
    if isinstance(given, Mapping):
        if policy is None:
            raise ValueError(
                "policies is a dict from labels to policies, but no column has the labels: name "
                "it, policy=..."
            )
        return {"labels": tuple(given), "grows": False}
    if isinstance(given, Sequence) and policy is None and len(given) > 1:
        raise ValueError(
            f"policies has {len(given)} policies, but no column says which one acted: name it, "
            "policy=..."
        )
    return {"labels": None, "grows": False}


def _check_names(plan: Plan, names: Sequence[str]) -> None:
    """Raise if a column is missing, or if a name stands for two columns."""
    for argument in ("episode", "step", "observation", "action", "reward", "log_prob", "policy"):
        _check_name(argument, getattr(plan, argument), names)
    for argument in ("terminated", "truncated", "held_out", "start_clock", "schedule"):
        value = getattr(plan, argument)
        if not isinstance(value, bool):
            _check_name(argument, value, names)


def _check_name(argument: str, spec: Spec | None, names: Sequence[str]) -> None:
    for name in names_of(() if spec is None else spec):
        if names.count(name) != 1:
            what = f"appears {names.count(name)} times in" if name in names else "is missing from"
            listed = ", ".join(dict.fromkeys(names[:30])) + (", ..." if len(names) > 30 else "")
            remedy = (
                "name it, step=..., or give step=None if the rows of each episode are in order"
                if argument == "step"
                else f"name the right one, {argument}=... (for the command line: "
                f"Trajectories.from_frame(file, {argument}=...).to_parquet(new_file))"
            )
            raise ValueError(
                f"column {name!r} ({argument}) {what} the table, which has {listed}: {remedy}"
            )
