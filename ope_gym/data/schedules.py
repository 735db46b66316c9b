"""Schedules, which say what policy acts when, and the numbers of policies."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym.arrays import IntArray, as_integers
from ope_gym.policies import Policy


@dataclass(frozen=True, eq=False)
class Schedule:
    """Say which policy acts when: `policies[j]` from step `clocks[j]` of the loop on.

    >>> Schedule([0, 100], [0, 1]).policy_at(np.array([0, 99, 100]))
    array([0, 0, 1], dtype=int32)
    """

    clocks: IntArray  # (C,) increasing
    policies: NDArray[np.int32]  # (C,)

    def __post_init__(self) -> None:
        clocks = as_integers(self.clocks, "clocks")
        policies = as_integers(self.policies, "policies", np.int32)
        if clocks.ndim != 1 or clocks.shape != policies.shape or not len(clocks):
            raise ValueError(
                f"a schedule needs as many clocks as policies, at least one: got shapes "
                f"{clocks.shape} and {policies.shape}"
            )
        if clocks[0] < 0 or (np.diff(clocks) <= 0).any() or policies.min() < 0:
            raise ValueError("the clocks of a schedule increase from 0 or more; policies are >= 0")
        object.__setattr__(self, "clocks", clocks)
        object.__setattr__(self, "policies", policies)

    def policy_at(self, clocks: ArrayLike) -> NDArray[np.int32]:
        """Return the policy that acts at each clock; -1 before the first."""
        place = np.searchsorted(self.clocks, clocks, side="right") - 1
        return np.where(place < 0, np.int32(-1), self.policies[place])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and np.array_equal(self.clocks, other.clocks)
            and np.array_equal(self.policies, other.policies)
        )

    def __hash__(self) -> int:
        return hash((self.clocks.tobytes(), self.policies.tobytes()))


def check_schedules(schedules: Sequence[Schedule], n_policies: int) -> None:
    """Raise if a schedule names a policy that does not exist."""
    for s, schedule in enumerate(schedules):
        if schedule.policies.max() >= n_policies:
            raise ValueError(
                f"schedules[{s}] names policy {schedule.policies.max()}, but there are "
                f"{n_policies} policies"
            )


class ChangeTable:
    """Collect the changes of policy of one loop, as they happen.

    A loop that changes its policy only between episodes would have let every episode keep its
    policy, however long it lasted: such changes make no schedule. Once a policy was replaced
    inside an episode, changes come by the clock, and an episode would have met them. They count
    from the start of the policy that was replaced first (`clocked_from`).
    """

    def __init__(self) -> None:
        # arrays, not lists: a loop may change its policy millions of times
        self.clocks = array("q")
        self.policies = array("i")
        self.clocked_from: int | None = None  # clock from which changes come by the clock

    def change(self, policy_id: int, clock: int, *, mid_episode: bool) -> None:
        """Record that from `clock` on `policy_id` acts."""
        last = self.clocks[-1] if self.clocks else 0
        if clock < last:
            raise ValueError(
                f"clock={clock} is before the last change of policy, at clock {last}: "
                "changes are recorded in order"
            )
        if self.policies and self.policies[-1] == policy_id:
            return
        if self.clocks and clock == last:  # the policy it replaces never acted
            self.policies[-1] = policy_id
            last = self.clocks[-2] if len(self.clocks) > 1 else last
        else:
            self.clocks.append(clock)
            self.policies.append(policy_id)
        if mid_episode and self.clocked_from is None:
            self.clocked_from = last

    def policy_at(self, clocks: IntArray) -> NDArray[np.int32]:
        """Return the policy that acts at each clock; -1 before the first change."""
        # only the part of the table that matters: a loop may change its policy at every step
        first = max(bisect_right(self.clocks, int(clocks.min())) - 1, 0)
        last = max(bisect_right(self.clocks, int(clocks.max())), first + 1)
        part = slice(first, last)
        return Schedule(np.array(self.clocks[part]), np.array(self.policies[part])).policy_at(
            clocks
        )

    def schedule(self) -> Schedule:
        """Return the changes so far as a schedule."""
        return Schedule(np.asarray(self.clocks), np.asarray(self.policies))  # which copies them


class PolicyTable:
    """Number policies; equal policies have the same number."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self.policies: list[Policy] = []
        self._numbers: dict[Policy, int] = {}
        for policy in policies:
            self.add(policy)

    def add(self, policy: Policy) -> int:
        """Return the number of the policy, a new one if no equal policy is known."""
        if not isinstance(policy, Policy):
            raise TypeError(
                f"policy is {policy!r}, which has no log_prob and sample: wrap it in a class that "
                "has them (ope_gym.policies.Policy), or use a snapshot of ope_gym.policies"
            )
        try:
            number = self._numbers.setdefault(policy, len(self.policies))
        except TypeError:  # unhashable
            number = self._search(policy)
        if number == len(self.policies):
            self.policies.append(policy)
        return number

    def _search(self, policy: Policy) -> int:
        for number, known in enumerate(self.policies):
            try:
                if known is policy or (type(known) is type(policy) and bool(known == policy)):
                    return number
            except ValueError:  # == gave an array: the class does not compare policies
                continue
        return len(self.policies)
