"""Recorded trajectories: n episodes of S steps in all, by K policies."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.arguments import discount, instance, real, refusal, whole
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.checks import checked
from ope_gym.data.database import SeenFile
from ope_gym.data.schedules import PolicyTable, Schedule
from ope_gym.data.schema import Chunk, Columns, Floats, Ints, join, renumber, take
from ope_gym.data.spaces import Space
from ope_gym.data.store import Store, require_closed
from ope_gym.data.stored import StoredEpisodes, read_stored
from ope_gym.data.tables.layout import Layout, Spec
from ope_gym.data.tables.rows import is_table
from ope_gym.data.tables.section import TableSection, open_frame, open_tables
from ope_gym.data.tables.write import arrow_table, to_library, write_parquet
from ope_gym.files import MALFORMED, PathLike, in_place_of
from ope_gym.policies import Policy, acting_log_probs, acts_unknown

__all__ = ["PropensityMismatch", "Trajectories", "Viewable", "nothing", "read_chunks"]


class PropensityMismatch(ValueError):
    """Raised where a logged probability is not that of the policy; names the first such step."""

    def __init__(self, message: str, *, episode: int, step: int) -> None:
        super().__init__(message)
        self.episode, self.step = episode, step

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return partial(type(self), episode=self.episode, step=self.step), self.args


class Viewable:
    """Questions that trajectories and buffers of them answer alike."""

    def view(self) -> Trajectories:
        """Return the recorded episodes."""
        raise NotImplementedError

    def returns(self, gamma: float = 1.0) -> Floats:
        """Return the sum (n,) of γ^t r_t over each episode."""
        gamma = discount(gamma)
        data = self.view()
        if len(data) == 0:
            return np.empty(0)
        paid = data.rewards if gamma == 1 else data.rewards * float(gamma) ** data.steps
        return np.add.reduceat(paid, data.offsets[:-1])

    def select(
        self,
        *,
        policies: int | Iterable[int] | None = None,
        held_out: bool | None = None,
        last: int | None = None,
        episodes: slice | ArrayLike | None = None,
    ) -> Trajectories:
        """Return the episodes that meet all conditions; policies keep their numbers.

        Args:
            policies: Numbers of the policies that acted at the first step.
            held_out: Whether the learner never trained on the episode.
            last: Only those of the `last` highest policy numbers among all episodes.
            episodes: Indices, a mask or a slice; indices also give the order.
        """
        data = self.view()
        if last is not None:
            whole("last", last)
        if held_out is not None and not isinstance(held_out, bool | np.bool_):
            raise refusal("held_out", held_out, "give True, False or None")
        chosen = np.arange(len(data)) if episodes is None else _episode_indices(episodes, len(data))
        first = data.first_policies[chosen]
        keep = np.ones(len(chosen), dtype=bool)
        if policies is not None:
            listed = policies if isinstance(policies, Iterable) else [policies]
            wanted = [whole("policies", k, 0, "give numbers of policies") for k in listed]
            unknown = [k for k in wanted if not 0 <= k < len(data.policies)]
            if unknown:
                raise ValueError(
                    f"policies={wanted}: number {unknown[0]} is unknown, there are "
                    f"{len(data.policies)} policies"
                )
            keep &= np.isin(first, wanted)
        if last is not None:
            keep &= np.isin(first, np.unique(data.first_policies)[-last:])
        if held_out is not None:
            keep &= data.held_out[chosen] == held_out
        return take(data, chosen[keep])

    def merge(self, *others: Viewable) -> Trajectories:
        """Put episodes of one environment together; equal policies get one number.

        Spaces and horizon must agree; only a part without episodes need not know them.
        """
        table = PolicyTable()
        parts: list[Trajectories] = []
        schedules: list[Schedule] = []
        for other in (self, *others):
            instance("others", other, Viewable, "give trajectories, buffers or recorders")
            part = other.view()
            numbers = [table.add(policy) for policy in part.policies]
            renumbered, own = renumber(part, numbers, first_schedule=len(schedules))
            parts.append(renumbered)
            schedules += own
        return dataclasses.replace(
            join(parts), policies=tuple(table.policies), schedules=tuple(schedules)
        )

    def audit(self, tolerance: float = 1e-4) -> None:
        """Recompute all probabilities from the policies and compare with the logged ones.

        Args:
            tolerance: Largest difference of the logs.

        Raises:
            PropensityMismatch: For the first step that differs by more.
        """
        real("tolerance", tolerance, "give the largest difference", lambda x: x >= 0.0)
        data = self.view()
        found = acting_log_probs(data.policies, data.policy_ids, data.observations, data.actions)
        wrong = np.flatnonzero(~(np.abs(found - data.log_probs) <= tolerance))
        if len(wrong):
            row = int(wrong[0])
            k, episode, step = data.policy_ids[row], data.episode_ids[row], data.steps[row]
            raise PropensityMismatch(
                f"episode {episode}, step {step}: the logged log-probability is "
                f"{data.log_probs[row]:.6g}, but policy {k}, {data.policies[k]!r}, gives "
                f"{found[row]:.6g} ({len(wrong):,} of {data.n_steps:,} steps differ by more than "
                f"{tolerance:g}); register the policy that acts before it acts, and log the "
                "probability of the action that was executed",
                episode=int(episode),
                step=int(step),
            )

    def save(self, path: PathLike) -> None:
        """Write everything to a file, which replaces an older one only when it is complete."""
        data = self.view()
        env = data.observation_space, data.action_space, data.horizon
        with in_place_of(path) as temporary:
            with Store(temporary, *env, whole=True) as store:
                for policy in data.policies:
                    store.add_policy(policy)
                for s, schedule in enumerate(data.schedules):
                    pairs = zip(schedule.clocks.tolist(), schedule.policies.tolist(), strict=True)
                    for clock, k in pairs:
                        store.change(s, clock, k, mid_episode=True)
                if len(data):
                    store.append(data)
            require_closed(path)

    def to_frame(self, library: str = "pandas") -> Any:
        """Return a table with a row for each step; `Trajectories.from_frame` reads it back.

        Its columns are those of the page on files: episode, step, observation, action, reward,
        log_prob, policy, terminated, truncated, held_out, start_clock, schedule. Policies, spaces
        and the time limit are beside them, in `frame.attrs` or in the metadata of the schema; only
        polars has no place for them.

        Args:
            library: "pandas", "polars" or "pyarrow".
        """
        return to_library(arrow_table(self.view()), library)

    def to_parquet(self, path: PathLike) -> None:
        """Write a Parquet file with a row for each step, and what `to_frame` has beside them.

        It replaces an older file only when it is complete. `evaluate`, the commands and
        `Trajectories.from_frame` read it.
        """
        require_closed(path)
        write_parquet(self.view(), path)


@dataclass(frozen=True, eq=False, repr=False)
class Trajectories(Columns, Viewable):
    """Episodes as read-only columns; rows `offsets[i]:offsets[i + 1]` are episode i.

    Build it with `from_arrays`, `load` or a `TrajectoryBuffer`; the constructor itself checks
    nothing.

    Attributes:
        observations: Batch of S rows, what the policy saw.
        actions: Batch of S rows, what it chose.
        rewards: (S,).
        log_probs: (S,) natural log of the probability (density) of the action when it was chosen;
            NaN where an `UnknownPolicy` acted and nobody recorded it.
        policy_ids: (S,) which policy acted.
        offsets: (n + 1,).
        terminated: (n,).
        truncated: (n,).
        held_out: (n,) whether the learner never trained on the episode.
        start_clock: (n,) step of the loop at which the episode began, -1 if unknown.
        schedule_ids: (n,) the schedule an episode would have followed had it lasted; -1 where its
            policy does not change inside episodes.
        schedules: Which policy acts when.
        policies: The K policies.
        observation_space: None if unknown.
        action_space: None if unknown.
        horizon: The time limit, None if there is none.
    """

    @classmethod
    def from_arrays(
        cls,
        observations: Tree,
        actions: Tree,
        rewards: ArrayLike,
        log_probs: ArrayLike,
        *,
        offsets: ArrayLike,
        policies: Sequence[Policy],
        terminated: ArrayLike,
        policy_ids: ArrayLike = 0,
        truncated: ArrayLike = False,
        held_out: ArrayLike = False,
        start_clock: ArrayLike = -1,
        schedules: Sequence[Schedule] = (),
        schedule_ids: ArrayLike = -1,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        horizon: int | None = None,
    ) -> Trajectories:
        """Check arrays, copy them, and return them as trajectories.

        The arguments are the attributes; a single value stands for all steps or episodes.

        >>> from ope_gym.policies import Uniform
        >>> Trajectories.from_arrays(
        ...     np.zeros((3, 4)), [0, 1, 1], [1.0, 1.0, 1.0], np.log([0.5, 0.5, 0.5]),
        ...     offsets=[0, 1, 3], policies=[Uniform(2)], terminated=True,
        ... )
        Trajectories(2 episodes, 3 steps, 1 policy, 0 held out, mean return 1.5, lengths 1-2)
        """
        columns: dict[str, Any] = {
            "rewards": rewards,
            "log_probs": log_probs,
            "policy_ids": policy_ids,
            "offsets": offsets,
            "terminated": terminated,
            "truncated": truncated,
            "held_out": held_out,
            "start_clock": start_clock,
            "schedule_ids": schedule_ids,
        }
        spaces.check_kind(observation_space, action_space)
        instance("policies", policies, Iterable, "give a list of policies")
        raw = cls(
            observations,
            actions,
            schedules=tuple(schedules),
            policies=tuple(policies),
            observation_space=observation_space,
            action_space=action_space,
            horizon=horizon,
            **columns,
        )
        return checked(raw, copy=True)

    @classmethod
    def from_frame(
        cls,
        table: Any,
        *,
        episode: str = "episode",
        step: str | None = "step",
        observation: Spec | None = None,
        action: Spec | None = None,
        reward: str = "reward",
        log_prob: str | None = None,
        policy: str | None = None,
        terminated: str | bool | None = None,
        truncated: str | bool | None = None,
        held_out: str | bool | None = None,
        start_clock: str | None = None,
        policies: Policy | Sequence[Policy] | Mapping[Any, Policy] | None = None,
        schedules: Sequence[Schedule] = (),
        observation_space: Space | None = None,
        action_space: Space | None = None,
        horizon: int | None = None,
    ) -> Trajectories:
        """Read a table with a row for each step.

        The rows of an episode must be together, in the order of time. A table with missing,
        duplicated or unordered rows, or with entries that are not numbers, is refused, with column
        and row. Tables that `to_frame` or `to_parquet` wrote need no further argument.

        >>> table = {"episode": ["a", "a", "b"], "step": [0, 1, 0], "x": [0.5, 0.1, 0.3],
        ...          "y": [1.0, 2.0, 3.0], "action": [0, 1, 1], "reward": [1.0, 0.0, 2.0],
        ...          "log_prob": np.log([0.5, 0.25, 0.5])}
        >>> Trajectories.from_frame(table, observation=["x", "y"])
        Trajectories(2 episodes, 3 steps, 1 policy, 0 held out, mean return 1.5, lengths 1-2)

        Args:
            table: A pandas, polars or pyarrow table, a dict of columns; or the path or URI (s3://,
                gs://) of a Parquet or CSV file or of a folder of them, or a list of these.
                `ope_gym.tables.scan_parquet` serves for files that do not fit into memory.
            episode: Column with a name or number of the episode.
            step: Column that counts the steps of each episode, from 0 or all from 1; None if the
                rows are in order and there is no such column.
            observation: Column of the observations; a list of columns for a vector; a tuple or
                dict of these for Tuple and Dict spaces. A column may hold lists of numbers, all of
                the same shape; flat lists take the shape of the space. By default "observation",
                or what the space asks for.
            action: Column or columns of the actions, by default "action".
            reward: Column of the rewards.
            log_prob: Column of the natural logs of the probabilities (densities) with which the
                actions were chosen; by default "log_prob", if there is one. Without it, the
                policies compute them if they are known; else they are unknown (`has_propensities`
                is false).
            policy: Column that says who acted; by default "policy", if there is one. Labels are
                numbered in the order in which they first appear.
            terminated: Column, true in the last row of an episode that ended by itself; or True or
                False for all. By default "terminated", if there is one. Where a table has neither
                this nor `truncated`, all episodes count as terminated.
            truncated: Column, true in the last row of an episode that a time limit ended.
            held_out: Column, one value for each episode; or True or False for all.
            start_clock: Column, the step of the loop at which the episode began.
            policies: The policy that acted; or a list, if the column `policy` has their numbers; or
                a dict from its labels to policies. By default, each label is an `UnknownPolicy`.
            schedules: Which policy acts when, for a column "schedule" of `to_frame`.
            observation_space: None if unknown.
            action_space: None if unknown.
            horizon: The time limit, None if there is none.
        """
        layout = Layout(
            episode,
            step,
            observation,
            action,
            reward,
            log_prob,
            policy,
            terminated,
            truncated,
            held_out,
            start_clock,
            policies,
            schedules,
            observation_space,
            action_space,
            horizon,
        )
        paths = table if isinstance(table, list | tuple) else [table]
        if paths and all(isinstance(path, str | os.PathLike) for path in paths):
            return _joined(open_tables(paths, layout))
        return _joined([open_frame(table, layout)])

    def __repr__(self) -> str:
        if len(self) == 0:
            return f"{type(self).__name__}(0 episodes, {_count(len(self.policies), 'policy')})"
        low, high = int(self.lengths.min()), int(self.lengths.max())
        return (
            f"{type(self).__name__}({_count(len(self), 'episode')}, "
            f"{_count(self.n_steps, 'step')}, {_count(len(self.policies), 'policy')}, "
            f"{int(self.held_out.sum()):,} held out, mean return {self.returns().mean():.4g}, "
            f"{f'lengths {low}-{high}' if low < high else f'length {low}'})"
        )

    @cached_property
    def has_propensities(self) -> bool:
        """Whether the probability of every action is known; all weights need them."""
        unknown = acts_unknown(self.policies, self.policy_ids)
        return unknown is None or not np.isnan(self.log_probs[unknown]).any()

    def view(self) -> Trajectories:
        """Return itself, so that buffers and trajectories can be used alike."""
        return self

    @classmethod
    def load(cls, path: PathLike, *, recover: bool = False) -> Trajectories:
        """Read the trajectories of a file that `save`, `to_parquet` or a recorder wrote.

        Args:
            path: The file, or a folder of tables.
            recover: Whether to leave out invalid episodes, and all from damage on, instead of
                raising `DamagedFileError`; not for tables.
        """
        if is_table(SeenFile.unread(path)):
            return cls.from_frame(path)
        return _joined([read_stored(path, recover=recover)])


def _joined(sections: Sequence[StoredEpisodes | TableSection]) -> Trajectories:
    """Return the episodes of all sections."""
    parts = [part for section in sections for part in read_chunks(section)]
    if not parts and sections:
        first = sections[0]
        empty = nothing(first.observation_space, first.action_space, first.horizon)
        return dataclasses.replace(empty, policies=first.policies, schedules=first.schedules)
    return parts[0].merge(*parts[1:]) if len(parts) > 1 else (parts or [nothing()])[0]


def nothing(
    observation_space: Space | None = None,
    action_space: Space | None = None,
    horizon: int | None = None,
) -> Trajectories:
    """Return trajectories without an episode."""
    return Trajectories.from_arrays(
        spaces.empty(observation_space),
        spaces.empty(action_space),
        np.empty(0),
        np.empty(0),
        offsets=[0],
        policies=(),
        terminated=True,
        observation_space=observation_space,
        action_space=action_space,
        horizon=horizon,
    )


def read_chunks(
    section: StoredEpisodes | TableSection, steps: int | None = None
) -> Iterator[Trajectories]:
    """Yield the episodes of a section of a file, about `steps` steps at a time; None yields all."""
    fields = [field.name for field in dataclasses.fields(Columns)]
    for chunk in section.chunks(steps):
        raw = Trajectories(**{name: getattr(chunk.columns, name) for name in fields})
        try:
            found = _checked(section, raw, chunk)
        except MALFORMED as error:
            if isinstance(section, TableSection) or not section.recover:
                raise section.damaged(chunk.offset, error) from error
            found = _valid(section, raw, chunk)
        yield found


def _checked(
    section: StoredEpisodes | TableSection, raw: Trajectories, chunk: Chunk
) -> Trajectories:
    if isinstance(section, StoredEpisodes):
        return checked(raw, copy=False, first=chunk.first)
    place = partial(_place, section, chunk.offset)
    return checked(raw, copy=False, first=chunk.first, place=place)


def _valid(section: StoredEpisodes, raw: Trajectories, chunk: Chunk) -> Trajectories:
    """Return the valid episodes of a chunk, and warn of the others.

    A recorder leaves invalid episodes out when it checks them; if it is killed before, or another
    one writes meanwhile, they stay in the file.
    """
    good, errors = [np.empty(0, dtype=np.int64)], []
    parts = [np.arange(len(raw))]
    while parts:  # in halves: few episodes are invalid
        part = parts.pop()
        try:
            _checked(section, take(raw, part), chunk._replace(first=chunk.first + int(part[0])))
        except MALFORMED as error:
            if len(part) > 1:
                parts += reversed(np.array_split(part, 2))
            else:
                errors.append(error)
        else:
            good.append(part)
    warnings.warn(
        f"left out {_count(len(errors), 'invalid episode')} of {section.name}: {errors[0]}",
        UserWarning,
        stacklevel=4,
    )
    return _checked(section, take(raw, np.concatenate(good)), chunk)


def _place(section: TableSection, first: int, row: int) -> str:
    """Name a row of a chunk of a table."""
    return section.place(first + row)


def _episode_indices(episodes: slice | ArrayLike, n: int) -> Ints:
    if isinstance(episodes, slice):
        return np.arange(*episodes.indices(n))
    index = np.atleast_1d(np.asarray(episodes))
    index = index.astype(np.int64) if index.size == 0 else index
    try:
        if index.dtype.kind == "i" and index.size and index.min() >= 0 and index.max() < n:
            return index.astype(np.int64)  # without a look at all episodes
        chosen: Ints = np.arange(n)[index]
    except IndexError as error:
        raise IndexError(f"episodes={episodes!r} does not fit {n} episodes: {error}") from error
    return chosen


def _count(n: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"
