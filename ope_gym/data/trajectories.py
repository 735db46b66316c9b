"""Recorded trajectories as columns: S steps, n episodes, K policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import blocks, files, spaces
from ope_gym.data.checks import checked
from ope_gym.data.reader import FileSection, read_layout
from ope_gym.data.schedules import PolicyTable, Schedule
from ope_gym.data.schema import Columns, Floats, Ints, join, renumber, take
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
class Trajectories(Columns):
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
        return take(self, chosen[keep[chosen]])

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
            if len(self):
                files.write_episodes(writer, self)

    @classmethod
    def load(cls, path: blocks.PathLike, *, recover: bool = False) -> Trajectories:
        """The trajectories of a file that `save` or a recorder wrote.

        Args:
            path: The file. If it ends inside its last block, the rest is read, with a warning.
            recover: Whether to read what precedes damage, instead of raising `DamagedFileError`.
        """
        sections = read_layout(path, recover=recover, keep=True)
        parts = [part for section in sections for part in read_chunks(section)]
        return parts[0].merge(*parts[1:]) if len(parts) > 1 else (parts or [nothing()])[0]


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


def read_chunks(section: FileSection, steps: int | None = None) -> Iterator[Trajectories]:
    """Yield the episodes of a section of a file, about `steps` steps at a time; None yields all."""
    fields = [field.name for field in dataclasses.fields(Columns)]
    for chunk in section.chunks(steps):
        raw = Trajectories(**{name: getattr(chunk.columns, name) for name in fields})
        try:
            found = checked(raw, copy=False, first=chunk.first)
        except blocks.MALFORMED as error:
            raise section.damaged(chunk.offset, error) from error
        yield found


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


def _count(n: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"
