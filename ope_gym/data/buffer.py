"""The buffer a training loop appends its episodes to."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.arrays import place
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.checks import (
    CHANGES_NEED_A_CLOCK,
    Steps,
    check_by_episode,
    check_ends,
    check_horizon,
    check_lengths,
    check_policy_ids,
    check_steps,
    floats,
)
from ope_gym.data.schedules import ChangeTable, PolicyTable, Schedule
from ope_gym.data.schema import (
    agree,
    freeze,
    join,
    renumber,
)
from ope_gym.data.spaces import Space
from ope_gym.data.trajectories import Trajectories, Viewable, nothing
from ope_gym.files import PathLike
from ope_gym.policies import Policy, as_policy

# An object for every part costs more memory than a few rows: so many small parts are joined.
_SMALL_ROWS, _SMALL_PARTS = 4_096, 256
# Inside the buffer, schedule 0 is that of its own loop, and those that `extend` brought follow.
_OWN = 0


class TrajectoryBuffer(Viewable):
    """Collect the finished episodes of a training loop, with the policies that acted.

    Appending keeps the arrays as they are, and the next `view` joins them. Besides what is listed
    here, a buffer has the methods of `Trajectories`: `returns`, `select`, `merge`, `audit`, `save`.

    >>> from ope_gym.policies import Uniform
    >>> buffer = TrajectoryBuffer()
    >>> k = buffer.add_policy(Uniform(2))
    >>> buffer.append([[0.1], [0.2]], [0, 1], [1.0, 1.0], np.log([0.5, 0.5]), k, terminated=True)
    0
    >>> buffer
    TrajectoryBuffer(1 episode, 2 steps, 1 policy, 0 held out, mean return 2, length 2)

    Args:
        observation_space: The space of one observation; None takes arrays as they come.
        action_space: The space of one action; None takes arrays as they come.
        horizon: The time limit of the episodes, None if there is none.
    """

    def __init__(
        self,
        observation_space: Space | None = None,
        action_space: Space | None = None,
        *,
        horizon: int | None = None,
    ) -> None:
        spaces.check_kind(observation_space, action_space)
        self.observation_space = observation_space
        self.action_space = action_space
        self.horizon = check_horizon(horizon)
        self._discrete = spaces.is_discrete(action_space)
        self._policies = PolicyTable()
        self._changes = ChangeTable()
        self._foreign: list[Schedule] = []  # schedules of trajectories that `extend` brought
        self._parts: list[Trajectories] = []  # all episodes; schedules are numbered as at _OWN
        self._small = 0  # how many of the last parts have few rows
        self._n = 0
        self._signature: Any = None  # structure of observations and actions without a space
        self._latest = 0  # all steps so far were taken before this clock
        self._view: Trajectories | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Policies by number."""
        return tuple(self._policies.policies)

    def add_policy(self, policy: Policy) -> int:
        """Register a policy and return its number; equal policies have the same number.

        Args:
            policy: A frozen snapshot: its probabilities must not change later. A torch module or
                a Stable-Baselines3 model is copied into one.
        """
        self._view = None
        return self._policies.add(as_policy(policy, "policy"))

    def change_policy(self, policy_id: int, clock: int, *, mid_episode: bool) -> None:
        """Record that the policy `policy_id` acts from step `clock` of the loop on.

        After the first change inside an episode, the behaviour policy of every episode with a
        start clock is the schedule: the policies it would have followed had it lasted.

        Args:
            policy_id: The number that `add_policy` returned.
            clock: Number of the first step that it takes, counted like `start_clock`.
            mid_episode: Whether an episode is under way.
        """
        clock = _as_clock(clock, "clock")
        check_policy_ids(policy_id, 1, len(self.policies), lambda row: "change_policy")
        if clock < self._latest and self._changes.policies[-1:] != [policy_id]:
            raise ValueError(
                f"clock={clock}: the buffer already has an episode with steps up to clock "
                f"{self._latest - 1}; record a change before the episodes that follow it"
            )
        if mid_episode and not self._changes.clocks:
            raise ValueError(
                f"clock={clock}: the policy changes inside an episode, but the policy that acted "
                "before is unknown; call change_policy for the first policy, too, before it acts"
            )
        self._changes.change(int(policy_id), clock, mid_episode=mid_episode)
        self._view = None

    def append(
        self,
        observations: Tree,
        actions: Tree,
        rewards: ArrayLike,
        log_probs: ArrayLike,
        policy_ids: ArrayLike,
        *,
        terminated: bool,
        truncated: bool = False,
        held_out: bool = False,
        start_clock: int | None = None,
    ) -> int:
        """Add a finished episode of T steps and return its index; an invalid one changes nothing.

        Args:
            observations: Batch of T rows that the policy saw; copied.
            actions: Batch of T rows that it chose.
            rewards: (T,).
            log_probs: (T,) natural log of the probability (density) of each action.
            policy_ids: The policy that acted, or (T,) of them.
            terminated: Whether the environment ended the episode.
            truncated: Whether it was cut, for example by a time limit.
            held_out: Whether the learner will never train on it.
            start_clock: Step of the loop at which it began; needed where policies change inside
                episodes.
        """
        if start_clock is not None:
            _as_clock(start_clock, f"episode {self._n}: start_clock")
        rows = len(floats(rewards, "rewards", lambda row: f"episode {self._n}", copy=False))
        if rows == 0:
            raise ValueError(f"episode {self._n} has no steps; an episode has at least one")
        self.append_many(
            observations,
            actions,
            rewards,
            log_probs,
            policy_ids,
            lengths=[rows],
            terminated=bool(terminated),
            truncated=bool(truncated),
            held_out=bool(held_out),
            start_clock=-1 if start_clock is None else start_clock,
        )
        return self._n - 1

    def append_many(
        self,
        observations: Tree,
        actions: Tree,
        rewards: ArrayLike,
        log_probs: ArrayLike,
        policy_ids: ArrayLike,
        *,
        lengths: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike = False,
        held_out: ArrayLike = False,
        start_clock: ArrayLike = -1,
        copy: bool = True,
    ) -> Trajectories:
        """Add finished episodes at once, faster than one by one; all of them or none.

        Args:
            observations: Batch of S rows, one episode after the other.
            actions: Batch of S rows.
            rewards: (S,).
            log_probs: (S,).
            policy_ids: The policy that acted, or (S,) of them.
            lengths: (n,) number of steps of each episode.
            terminated: (n,), or one value for all episodes, like the others below.
            truncated: (n,).
            held_out: (n,).
            start_clock: (n,), -1 where it is unknown.
            copy: Whether to copy the batches. Otherwise the buffer keeps them, read-only.

        Returns:
            The episodes as the buffer keeps them, without the policies.
        """
        first, n_steps = self._n, len(floats(rewards, "rewards", _of_many, copy=False))
        sizes, offsets = check_lengths(lengths, n_steps)
        n = len(sizes)

        def where(row: int | None) -> str:
            if row is None:
                if n == 1:
                    return f"episode {first}"
                return f"episodes {first} to {first + n - 1}" if n else _of_many(row)
            episode, step = place(row, offsets)
            return f"episode {first + episode}, step {step}"

        steps = check_steps(
            Steps(observations, actions, rewards, log_probs),  # type: ignore[arg-type]
            self.observation_space,
            self.action_space,
            discrete=self._discrete,
            where=where,
            copy=copy,
        )
        by_episode = check_by_episode(
            {
                "terminated": terminated,
                "truncated": truncated,
                "held_out": held_out,
                "start_clock": start_clock,
                "schedule_ids": _OWN if self._changes.clocks else -1,
            },
            n,
        )
        clocks = by_episode["start_clock"]
        by_episode["schedule_ids"][clocks < 0] = -1
        part = Trajectories(
            **steps._asdict(),
            policy_ids=check_policy_ids(
                policy_ids, n_steps, len(self._policies.policies), where, copy
            ),
            offsets=offsets,
            **by_episode,
            observation_space=self.observation_space,
            action_space=self.action_space,
            horizon=self.horizon,
        )
        if n == 0:
            return part
        self._check_ends(part)
        self._check_policies(part, where)
        signature = self._check_signature(
            steps, where(None), self.observation_space, self.action_space
        )
        # everything is checked: from here on nothing can fail
        self._signature = signature
        for column in steps:  # the caller has these arrays, too; `view` freezes the others
            for leaf in batches.leaves(column):
                leaf.setflags(write=False)
        self._parts.append(part)
        self._n += n
        self._latest = max(self._latest, int((clocks + sizes)[clocks >= 0].max(initial=0)))
        self._view = None
        self._join_small(n_steps)
        return part

    def _join_small(self, n_steps: int) -> None:
        """Join the last parts if there are many small ones, after a part of `n_steps`."""
        self._small = self._small + 1 if n_steps < _SMALL_ROWS else 0
        if self._small == _SMALL_PARTS:
            self._parts[-_SMALL_PARTS:] = [join(self._parts[-_SMALL_PARTS:])]
            self._small = 0

    def _check_ends(self, part: Trajectories) -> None:
        """Raise for the first episode that has not ended, is too long or has no such clock."""
        clocks, ended = part.start_clock, part.terminated | part.truncated
        wrong = ~ended | (part.lengths > (self.horizon or np.inf)) | (clocks < -1)
        if wrong.any():
            i = int(np.argmax(wrong))
            name, steps = f"episode {self._n + i}", int(part.lengths[i])
            check_ends(name, ended=bool(ended[i]), steps=steps, horizon=self.horizon)
            _as_clock(int(clocks[i]), f"{name}: start_clock")

    def _check_policies(self, part: Trajectories, where: spaces.Where) -> None:
        """Raise if a policy acted that the recorded changes do not name."""
        clocks, changes, ids = part.start_clock, self._changes, part.policy_ids
        expected: Any
        if changes.clocks and clocks.min() >= changes.clocks[-1]:
            expected = changes.policies[-1]
        else:
            expected = np.repeat(part.first_policies, part.lengths)
            scheduled = np.repeat(part.schedule_ids == _OWN, part.lengths)
            if scheduled.any():
                at = np.repeat(clocks, part.lengths) + part.steps
                expected[scheduled] = changes.policy_at(at[scheduled])
        wrong = ids != expected
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        i, step = place(row, part.offsets)
        if part.schedule_ids[i] != _OWN:
            before = part.first_policies[i]
            raise ValueError(
                f"{where(row)}: policy_ids is {ids[row]} after {before}, but {CHANGES_NEED_A_CLOCK}"
            )
        due = np.broadcast_to(expected, ids.shape)[row]
        raise ValueError(
            f"{where(row)}: policy_ids is {ids[row]} at clock {clocks[i] + step}, but by the "
            f"recorded changes {f'policy {due} acts' if due >= 0 else 'no policy acts yet'} there; "
            "call change_policy when the policy changes"
        )

    def _check_signature(
        self, steps: Steps, name: str, observation_space: Space | None, action_space: Space | None
    ) -> Any:
        """Return the structure of the batches; without a space, all must be like the first."""
        if observation_space is not None and action_space is not None:
            return None
        found = (spaces.signature(steps.observations), spaces.signature(steps.actions))
        if self._signature not in (None, found):
            raise ValueError(
                f"{name}: observations and actions are {found}, but those before are "
                f"{self._signature} (structure, kind of number, shape of a row)"
            )
        return found

    def extend(self, trajectories: Trajectories | TrajectoryBuffer) -> None:
        """Add recorded episodes, with their policies and schedules.

        Spaces and horizon must be those of the buffer; an empty buffer that knows none takes them
        over.
        """
        other = trajectories.view()
        agreed = agree([self, other])
        signature = self._signature
        if len(other):
            steps = Steps(other.observations, other.actions, other.rewards, other.log_probs)
            signature = self._check_signature(
                steps, "the trajectories", agreed["observation_space"], agreed["action_space"]
            )
        numbers = [self._policies.add(policy) for policy in other.policies]
        part, schedules = renumber(other, numbers, first_schedule=_OWN + 1 + len(self._foreign))
        self.observation_space, self.action_space = (
            agreed["observation_space"],
            agreed["action_space"],
        )
        self.horizon, self._signature = agreed["horizon"], signature
        self._discrete = spaces.is_discrete(self.action_space)
        self._parts.append(part)
        self._small = 0
        self._foreign += schedules
        self._n += len(other)
        self._view = None

    def view(self) -> Trajectories:
        """Return everything recorded so far, as read-only columns."""
        if self._view is None:
            whole = nothing(self.observation_space, self.action_space, self.horizon)
            if self._parts:
                self._parts, self._small = [join(self._parts)], 0
                whole = self._parts[0]
            schedules = tuple(self._foreign)
            if self._changes.clocked_from is not None:
                schedules = (self._changes.schedule(), *schedules)
            self._view = freeze(
                dataclasses.replace(
                    whole,
                    schedule_ids=self._schedule_ids(whole),
                    schedules=schedules,
                    policies=self.policies,
                )
            )
        return self._view

    def _schedule_ids(self, whole: Trajectories) -> NDArray[np.int32]:
        """Return the schedules of all episodes, numbered as `view` shows them."""
        ids, clocked_from = whole.schedule_ids, self._changes.clocked_from
        if (
            clocked_from is None
        ):  # own ones need no schedule: their policy never changes inside them
            return np.maximum(ids - 1, -1)
        return np.where((ids == _OWN) & (whole.start_clock < clocked_from), np.int32(-1), ids)

    def clear(self) -> None:
        """Drop all episodes; policies keep their numbers, and the loop its clock and changes."""
        self._parts, self._small = [], 0
        self._foreign, self._n, self._signature, self._view = [], 0, None, None

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return repr(self.view()).replace("Trajectories", "TrajectoryBuffer", 1)

    @property
    def n_steps(self) -> int:
        """Number of steps S of all episodes."""
        return self.view().n_steps

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) number of steps of each episode."""
        return self.view().lengths

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """(n,) whether the learner never trained on the episode."""
        return self.view().held_out

    @property
    def has_propensities(self) -> bool:
        """Whether the probability of every action is known; importance weights need them."""
        return self.view().has_propensities

    @classmethod
    def load(cls, path: PathLike, *, recover: bool = False) -> TrajectoryBuffer:
        """Return a buffer with the episodes of a file; its own clock starts anew."""
        buffer = cls()
        buffer.extend(Trajectories.load(path, recover=recover))
        return buffer


def _of_many(row: int | None) -> str:
    return "append_many"


def _as_clock(value: Any, name: str) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}={value!r} must be a number of steps, 0 or more")
    return int(value)
