"""Recorded trajectories as columns: S steps, n episodes, K policies."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import blocks, files, spaces
from ope_gym.data.schedules import PolicyTable, Schedule
from ope_gym.data.schema import BY_EPISODE, BY_STEP, Floats, Ints, checked, freeze
from ope_gym.data.spaces import Space
from ope_gym.policies.closed_form import Policy
from ope_gym.policies.unknown import acts_unknown

__all__ = ["PropensityMismatch", "Schedule", "Trajectories", "Viewable"]


class Viewable(Protocol):
    """Trajectories, or a buffer of them."""

    def view(self) -> Trajectories:
        """The trajectories."""
        ...


class PropensityMismatch(ValueError):
    """A logged probability that is not the acting policy's; names the first such step."""

    def __init__(self, message: str, *, episode: int, step: int) -> None:
        super().__init__(message)
        self.episode, self.step = episode, step


@dataclass(frozen=True, eq=False, repr=False)
class Trajectories:
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

    observations: Tree
    actions: Tree
    rewards: Floats
    log_probs: Floats
    policy_ids: NDArray[np.int32]
    offsets: Ints
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    held_out: NDArray[np.bool_]
    start_clock: Ints
    schedule_ids: NDArray[np.int32]
    schedules: tuple[Schedule, ...] = ()
    policies: tuple[Policy, ...] = ()
    observation_space: Space | None = None
    action_space: Space | None = None
    horizon: int | None = None

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
        """Trajectories from arrays, which are checked and copied.

        The arguments are the attributes; a single value stands for all steps or episodes.

        >>> from ope_gym.policies.closed_form import Uniform
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

    def __len__(self) -> int:
        return len(self.offsets) - 1

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

    @property
    def n_steps(self) -> int:
        """S."""
        return len(self.rewards)

    @cached_property
    def lengths(self) -> Ints:
        """(n,) number of steps of each episode."""
        return _frozen(np.diff(self.offsets))

    @cached_property
    def steps(self) -> Ints:
        """(S,) number of the step inside its episode, from 0."""
        return _frozen(np.arange(self.n_steps) - np.repeat(self.offsets[:-1], self.lengths))

    @cached_property
    def episode_ids(self) -> Ints:
        """(S,) episode of each step."""
        return _frozen(np.repeat(np.arange(len(self)), self.lengths))

    @cached_property
    def has_propensities(self) -> bool:
        """Whether the probability of every action is known; all weights need them."""
        unknown = acts_unknown(self.policies, self.policy_ids)
        return unknown is None or not np.isnan(self.log_probs[unknown]).any()

    @property
    def discrete(self) -> bool | None:
        """Whether actions have probabilities, not densities; None if their space is unknown."""
        return spaces.is_discrete(self.action_space)

    def returns(self, gamma: float = 1.0) -> Floats:
        """(n,) sum of γ^t r_t over each episode."""
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma={gamma} must be between 0 and 1")
        if len(self) == 0:
            return np.empty(0)
        paid = self.rewards if gamma == 1 else self.rewards * float(gamma) ** self.steps
        return np.add.reduceat(paid, self.offsets[:-1])

    def view(self) -> Trajectories:
        """Itself, so that a buffer and its trajectories can be used alike."""
        return self

    def select(
        self,
        *,
        policies: int | Iterable[int] | None = None,
        held_out: bool | None = None,
        last: int | None = None,
        episodes: slice | ArrayLike | None = None,
    ) -> Trajectories:
        """The episodes that meet all conditions; policies keep their numbers.

        Args:
            policies: Numbers of the policies that acted at the first step.
            held_out: Whether the learner never trained on the episode.
            last: Only those of the `last` highest policy numbers among all episodes.
            episodes: Indices, a mask or a slice; indices also give the order.
        """
        chosen = _episode_indices(episodes, len(self))
        first = self.policy_ids[self.offsets[:-1]]
        keep = np.ones(len(self), dtype=bool)
        if policies is not None:
            wanted = [policies] if isinstance(policies, int | np.integer) else list(policies)
            unknown = [k for k in wanted if not 0 <= k < len(self.policies)]
            if unknown:
                raise ValueError(
                    f"policies={wanted}: number {unknown[0]} is unknown, there are "
                    f"{len(self.policies)} policies"
                )
            keep &= np.isin(first, wanted)
        if last is not None:
            if last < 1:
                raise ValueError(f"last={last} must be at least 1")
            keep &= np.isin(first, np.unique(first)[-last:])
        if held_out is not None:
            keep &= self.held_out == held_out
        return self._take(chosen[keep[chosen]])

    def _take(self, chosen: Ints) -> Trajectories:
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(self.offsets[:-1][chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        taken = {name: batches.take(getattr(self, name), rows) for name in BY_STEP}
        taken |= {name: getattr(self, name)[chosen] for name in BY_EPISODE}
        return freeze(dataclasses.replace(self, offsets=offsets, **taken))

    def merge(self, *others: Viewable) -> Trajectories:
        """One set of trajectories; equal policies become one, schedules are kept apart.

        Spaces and horizon must agree, except with what holds no episode and does not know them.
        """
        table = PolicyTable()
        parts: list[Trajectories] = []
        schedules: list[Schedule] = []
        for other in (self, *others):
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
        found = np.empty(self.n_steps)
        for k in np.unique(self.policy_ids):
            rows = np.flatnonzero(self.policy_ids == k)
            seen, chosen = batches.take(self.observations, rows), batches.take(self.actions, rows)
            found[rows] = self.policies[k].log_prob(seen, chosen)
        wrong = np.flatnonzero(~(np.abs(found - self.log_probs) <= tolerance))
        if len(wrong):
            row = int(wrong[0])
            k, episode, step = self.policy_ids[row], self.episode_ids[row], self.steps[row]
            raise PropensityMismatch(
                f"episode {episode}, step {step}: the logged log-probability is "
                f"{self.log_probs[row]:.6g}, but policy {k}, {self.policies[k]!r}, gives "
                f"{found[row]:.6g} ({len(wrong):,} of {self.n_steps:,} steps differ by more than "
                f"{tolerance:g}); register the policy that acts before it acts, and log the "
                "probability of the action that was executed",
                episode=int(episode),
                step=int(step),
            )

    def save(self, path: blocks.PathLike) -> None:
        """Write everything to a file, which replaces an older one only when it is complete."""
        with blocks.replacing(path) as writer:
            files.write_spaces(writer, self.observation_space, self.action_space, self.horizon)
            for policy in self.policies:
                files.write_policy(writer, policy)
            for s, schedule in enumerate(self.schedules):
                files.write_changes(
                    writer, schedule.clocks, schedule.policies, mid_episode=True, schedule=s
                )
            if len(self) == 0:
                return
            by_episode = [getattr(self, name) for name in BY_EPISODE]
            files.write_episodes(
                writer,
                observations=self.observations,
                actions=self.actions,
                rewards=self.rewards,
                log_probs=self.log_probs,
                policy_ids=self.policy_ids,
                episodes=np.stack([self.lengths, *by_episode], axis=1).astype(np.int64),
                observation_space=self.observation_space,
                action_space=self.action_space,
            )

    @classmethod
    def load(cls, path: blocks.PathLike, *, recover: bool = False) -> Trajectories:
        """The trajectories of a file that `save` or a recorder wrote.

        Args:
            path: The file. If it ends inside its last block, the rest is read, with a warning.
            recover: Whether to read what precedes damage, instead of raising `DamagedFileError`.
        """
        try:
            parts = [from_section(part) for part in files.read_sections(path, recover=recover)]
            return parts[0].merge(*parts[1:]) if len(parts) > 1 else (parts or [nothing()])[0]
        except blocks.DamagedFileError:
            raise
        except ValueError as error:
            raise blocks.DamagedFileError(
                os.fspath(path), 0, f"the contents contradict each other: {error}", "not readable"
            ) from error


def nothing(
    observation_space: Space | None = None,
    action_space: Space | None = None,
    horizon: int | None = None,
) -> Trajectories:
    """Trajectories of no episode."""
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


def join(parts: Sequence[Trajectories]) -> Trajectories:
    """The columns of all parts in order, with nothing renumbered; policies are left out."""
    full = [part for part in parts if len(part)] or [parts[0]]
    agreed = agree(parts)
    if len(full) == 1:
        return dataclasses.replace(full[0], policies=(), schedules=(), **agreed)
    for name in ("observations", "actions"):
        kinds = [spaces.signature(getattr(part, name)) for part in full]
        if agreed[f"{name[:-1]}_space"] is None and any(kind != kinds[0] for kind in kinds):
            other = next(kind for kind in kinds if kind != kinds[0])
            raise ValueError(f"{name} differ in structure, shape or dtype: {kinds[0]} and {other}")
    columns: dict[str, Any] = {
        name: batches.concatenate([getattr(part, name) for part in full])
        for name in (*BY_STEP, *BY_EPISODE)
    }
    lengths = np.concatenate([part.lengths for part in full])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return freeze(Trajectories(offsets=offsets, **columns, **agreed))


def agree(parts: Sequence[Any]) -> dict[str, Any]:
    """Spaces and horizon of trajectories or buffers; one without episodes need not know them."""
    agreed: dict[str, Any] = {}
    for name in ("observation_space", "action_space", "horizon"):
        values = [getattr(part, name) for part in parts]
        stated = [v for v, part in zip(values, parts, strict=True) if v is not None or len(part)]
        agreed[name] = stated[0] if stated else None
        for value in stated:
            # comparing two large Boxes takes long
            if value is not agreed[name] and value != agreed[name]:
                raise ValueError(
                    f"{name} differs: {agreed[name]} and {value}; only trajectories of one "
                    "environment can be put together"
                )
    return agreed


def renumber(
    part: Trajectories, numbers: Sequence[int] | NDArray[np.int32], *, first_schedule: int
) -> tuple[Trajectories, list[Schedule]]:
    """The part with policy k called numbers[k] and its schedules counted from first_schedule."""
    table = np.array(numbers, dtype=np.int32)
    schedules = [Schedule(s.clocks, table[s.policies]) for s in part.schedules]
    ids = np.where(part.schedule_ids < 0, -1, part.schedule_ids + first_schedule)
    policy_ids = table[part.policy_ids] if len(part) else part.policy_ids
    changed = dataclasses.replace(
        part, policy_ids=_frozen(policy_ids), schedule_ids=_frozen(ids.astype(np.int32))
    )
    return changed, schedules


def _episode_indices(episodes: slice | ArrayLike | None, n: int) -> Ints:
    if episodes is None or isinstance(episodes, slice):
        return np.arange(n)[slice(None) if episodes is None else episodes]
    index = np.atleast_1d(np.asarray(episodes))
    index = index.astype(np.int64) if index.size == 0 else index
    try:
        chosen: Ints = np.arange(n)[index]
    except IndexError as error:
        raise IndexError(f"episodes={episodes!r} does not fit {n} episodes: {error}") from error
    return chosen


def from_section(section: files.Section) -> Trajectories:
    """The episodes of a section of a file, checked; ValueError says what is wrong with them."""
    clocked, episodes = section.clocked(), section.column("episodes")
    ids = files.schedule_ids(clocked, episodes[:, 4], episodes[:, 5])
    n = len(episodes)
    raw = Trajectories(
        batches.concatenate(section.observations) if n else spaces.empty(section.observation_space),
        batches.concatenate(section.actions) if n else spaces.empty(section.action_space),
        rewards=section.column("rewards"),
        log_probs=section.column("log_probs"),
        policy_ids=section.column("policy_ids"),
        offsets=np.concatenate([[0], np.cumsum(episodes[:, 0])]),
        terminated=episodes[:, 1],
        truncated=episodes[:, 2],
        held_out=episodes[:, 3],
        start_clock=episodes[:, 4],
        schedule_ids=ids,
        schedules=tuple(table.schedule() for table in clocked.values()),
        policies=tuple(section.policies),
        observation_space=section.observation_space,
        action_space=section.action_space,
        horizon=section.horizon,
    )
    return checked(raw, copy=False)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


def _count(n: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"
