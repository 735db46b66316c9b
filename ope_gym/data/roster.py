"""The roster of episodes: who recorded each and how long it was, without what happened in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ope_gym.arguments import refusal
from ope_gym.arrays import IntArray
from ope_gym.data.schedules import PolicyTable, Schedule
from ope_gym.data.schema import agree
from ope_gym.data.spaces import Space
from ope_gym.data.stored import StoredEpisodes
from ope_gym.data.tables.section import TableSection
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import Policy, UnknownPolicy

ORIGINS = ("learned", "fixed")
_MOST_STEPS = 2**20  # of a time limit


@dataclass(frozen=True, eq=False)
class Roster:
    """A row for each episode, and what all episodes share; n episodes.

    Args:
        lengths: (n,) steps.
        first_policies: (n,) the policy that acted first.
        start_clock: (n,) step of the loop at which the episode began, -1 if unknown.
        schedule_ids: (n,) which of the schedules it follows; -1 if its policy does not change.
        held_out: (n,) whether the learner never trained on it.
        schedules: which policy acts when, where policies change inside episodes.
        policies: Policies by number.
        observation_space: None if unknown.
        action_space: None if unknown.
        horizon: time limit, None if there is none.
        recorded: whether all log-probabilities are there, also where an unknown policy acted;
            False where it takes reading the episodes to tell.
    """

    lengths: IntArray
    first_policies: NDArray[np.int32]
    start_clock: IntArray
    schedule_ids: NDArray[np.int32]
    held_out: NDArray[np.bool_]
    schedules: tuple[Schedule, ...]
    policies: tuple[Policy, ...]
    observation_space: Space | None = None
    action_space: Space | None = None
    horizon: int | None = None
    recorded: bool = False

    @classmethod
    def of(cls, data: Trajectories | StoredEpisodes | TableSection) -> Roster:
        """List the episodes of trajectories, of a section of a file or of a table."""
        episodes = data.episodes if isinstance(data, TableSection) else data
        return cls(
            episodes.lengths,
            episodes.first_policies,
            episodes.start_clock,
            episodes.schedule_ids,
            episodes.held_out,
            data.schedules,
            data.policies,
            data.observation_space,
            data.action_space,
            data.horizon,
            isinstance(data, TableSection) and data.recorded,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def steps(self) -> int:
        """Number of steps in all."""
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """The time limit, or the longest episode if there is no limit."""
        return max(int(self.lengths.max()), (self.limited and self.horizon) or 0)

    @property
    def limited(self) -> bool:
        """Whether there is a time limit; one of millions of steps stands for none.

        There are columns with a number for each step up to the limit.
        """
        return self.horizon is not None and self.horizon <= _MOST_STEPS

    @property
    def clocked(self) -> bool:
        """Whether policies change inside episodes."""
        return bool((self.schedule_ids >= 0).any())

    @cached_property
    def acted(self) -> NDArray[np.bool_]:
        """(2, policies) whether each acted in episodes that are not held out, and in others."""
        acted = np.zeros((2, len(self.policies)), dtype=bool)
        plain = self.schedule_ids < 0
        acted[self.held_out[plain].astype(np.int64), self.first_policies[plain]] = True
        for s, schedule in enumerate(self.schedules):
            for tag in (False, True):
                mine = (self.schedule_ids == s) & (self.held_out == tag)
                start, end = self.start_clock[mine], (self.start_clock + self.lengths)[mine]
                first = np.searchsorted(schedule.clocks, start, side="right") - 1
                stop = np.searchsorted(schedule.clocks, end, side="left")
                begun = np.zeros(schedule.clocks.size + 1, dtype=np.int64)
                np.add.at(begun, first, 1)
                np.add.at(begun, np.maximum(stop, first + 1), -1)
                acted[int(tag), schedule.policies[np.cumsum(begun)[:-1] > 0]] = True
        return acted

    @property
    def known(self) -> bool:
        """Whether the probabilities of all actions are known, so that weights can be made."""
        if self.recorded:
            return True
        acted = np.flatnonzero(self.acted.any(axis=0))
        return not any(isinstance(self.policies[k], UnknownPolicy) for k in acted)

    def select(self, chosen: NDArray[np.bool_]) -> Roster:
        """Return the roster of some episodes; policies and schedules keep their numbers."""
        return dataclasses.replace(
            self,
            lengths=self.lengths[chosen],
            first_policies=self.first_policies[chosen],
            start_clock=self.start_clock[chosen],
            schedule_ids=self.schedule_ids[chosen],
            held_out=self.held_out[chosen],
        )

    def regime(self, target: Policy, origin: str | None = None) -> str:
        """Return the regime in which these episodes tell of a target.

        Args:
            target: the policy to evaluate.
            origin: "learned" if the target was trained on episodes here that are not held out,
                "fixed" if it was chosen before them or apart from them. None: a target that is one
                of the recorded policies learned from the episodes of the policies before it; any
                other is taken for a learner that saw everything.

        Returns:
            One of `ope_gym.inference.estimate.REGIMES`.
        """
        if origin is not None and origin not in ORIGINS:
            raise refusal("origin", origin, f"choose one of {', '.join(ORIGINS)}")
        if self.held_out.all():
            return "held-out"
        seen = np.flatnonzero(self.acted[0])
        if origin is None:
            known = [k for k, policy in enumerate(self.policies) if _same(policy, target)]
            origin = "fixed" if known and known[0] <= seen[0] else "learned"
        if origin == "learned":
            return "in-sample"
        return "fresh" if np.count_nonzero(self.acted.any(axis=0)) == 1 else "adaptive"


@dataclass(frozen=True)
class Numbers:
    """The numbers that the policies and schedules of a part have among those of all parts."""

    policies: NDArray[np.int32]
    first_schedule: int


def join_rosters(parts: Sequence[tuple[str, Roster]]) -> tuple[Roster, list[Numbers]]:
    """Join the rosters of several parts; equal policies become one.

    Args:
        parts: where each is from, for messages, and its roster.
    """
    table, schedules = PolicyTable(), list[Schedule]()
    numbers: list[Numbers] = []
    first, ids = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    described: Roster | None = None
    for name, part in parts:
        if len(part):
            try:
                agree([described or part, part])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            described = described or part
        own = np.array([table.add(policy) for policy in part.policies], dtype=np.int32)
        numbers.append(Numbers(own, len(schedules)))
        first.append(own[part.first_policies] if len(part) else part.first_policies)
        ids.append(np.where(part.schedule_ids < 0, -1, part.schedule_ids + len(schedules)))
        schedules += [Schedule(s.clocks, own[s.policies]) for s in part.schedules]
    rosters = [part for _, part in parts]
    described = described or rosters[0]
    whole = dataclasses.replace(
        described,
        lengths=np.concatenate([part.lengths for part in rosters]),
        first_policies=np.concatenate(first),
        start_clock=np.concatenate([part.start_clock for part in rosters]),
        schedule_ids=np.concatenate(ids).astype(np.int32),
        held_out=np.concatenate([part.held_out for part in rosters]),
        schedules=tuple(schedules),
        policies=tuple(table.policies),
        recorded=all(part.known for part in rosters if len(part)),
    )
    return whole, numbers


def _same(policy: Policy, target: Policy) -> bool:
    try:
        return policy is target or bool(policy == target)
    except Exception:  # a foreign policy may compare as it likes
        return False
