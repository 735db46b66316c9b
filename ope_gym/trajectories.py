"""Recorded trajectories as columns: S steps, n episodes, K policies."""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import spaces, storage, trees
from ope_gym.policies import Policy
from ope_gym.spaces import Space, Where
from ope_gym.trees import Tree

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

LOG_PROB_TOLERANCE = 1e-9  # rounding may lift the log of a probability of 1 a little above 0


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


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which policy acts when: `policies[j]` from step `clocks[j]` of the loop on.

    >>> Schedule([0, 100], [0, 1]).policy_at(np.array([0, 99, 100]))
    array([0, 0, 1], dtype=int32)
    """

    clocks: Ints  # (C,) increasing
    policies: NDArray[np.int32]  # (C,)

    def __post_init__(self) -> None:
        clocks = _integers(self.clocks, "clocks", np.int64)
        policies = _integers(self.policies, "policies", np.int32)
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
        """The policy that acts at each clock; -1 before the first."""
        found = np.searchsorted(self.clocks, clocks, side="right") - 1
        return np.where(found < 0, np.int32(-1), self.policies[found])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and np.array_equal(self.clocks, other.clocks)
            and np.array_equal(self.policies, other.policies)
        )

    def __hash__(self) -> int:
        return hash((self.clocks.tobytes(), self.policies.tobytes()))


class ChangeTable:
    """The changes of policy of one loop, as they happen."""

    def __init__(self) -> None:
        self.clocks: list[int] = []
        self.policies: list[int] = []
        self.clocked = False  # whether a policy ever changed inside an episode

    def change(self, policy_id: int, clock: int, *, mid_episode: bool) -> None:
        """From `clock` on `policy_id` acts."""
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
        else:
            self.clocks.append(clock)
            self.policies.append(policy_id)
        self.clocked |= mid_episode

    def policy_over(self, start: int, n: int) -> int | None:
        """The one policy of the `n` steps from `start` on; -1 before the first, None if several."""
        first = bisect_right(self.clocks, start) - 1
        last = bisect_right(self.clocks, start + n - 1) - 1
        if first != last:
            return None
        return -1 if first < 0 else self.policies[first]

    def schedule(self) -> Schedule:
        """The table as it stands."""
        return Schedule(np.array(self.clocks), np.array(self.policies))


class PolicyTable:
    """Policies with their numbers; an equal policy has the same number."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self.policies: list[Policy] = []
        self._numbers: dict[Policy, int] = {}
        for policy in policies:
            self.add(policy)

    def add(self, policy: Policy) -> int:
        """The number of the policy, a new one if no equal policy is known."""
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
            except ValueError:  # the truth value of an array: its class compares no policies
                continue
        return len(self.policies)


class Steps(NamedTuple):
    """Checked columns of one or more episodes."""

    observations: Tree
    actions: Tree
    rewards: Floats
    log_probs: Floats


def check_steps(
    steps: Steps,
    observation_space: Space | None,
    action_space: Space | None,
    *,
    discrete: bool | None,
    where: Where,
    copy: bool = True,
) -> Steps:
    """The columns as arrays of equal length; ValueError names what is wrong, and where."""
    rewards = _floats(steps.rewards, "rewards", where, copy)
    n = len(rewards)
    log_probs = _floats(steps.log_probs, "log_probs", where, copy)
    if len(log_probs) != n:
        raise ValueError(f"{where(None)}: {n} rewards but {len(log_probs)} log_probs")
    seen = spaces.to_columns(
        observation_space, steps.observations, n, name="observations", where=where, copy=copy
    )
    chosen = spaces.to_columns(
        action_space, steps.actions, n, name="actions", where=where, copy=copy
    )
    if n == 0:
        return Steps(seen, chosen, rewards, log_probs)
    _require_finite(rewards, "rewards", where)
    for leaf in trees.leaves(chosen):
        if leaf.dtype.kind == "f":
            _require_finite(leaf, "actions", where)
    if discrete is None:  # whole numbers are actions with probabilities
        discrete = all(leaf.dtype.kind in "iub" for leaf in trees.leaves(chosen))
    limit = LOG_PROB_TOLERANCE if discrete else np.finfo(np.float64).max
    if not (log_probs.min() > -np.inf and log_probs.max() <= limit):  # false for NaN, too
        row = int(np.flatnonzero(~((log_probs > -np.inf) & (log_probs <= limit)))[0])
        raise ValueError(f"{where(row)}: log_probs is {log_probs[row]}, {_why(log_probs[row])}")
    return Steps(seen, chosen, rewards, log_probs)


def check_policy_ids(
    policy_ids: ArrayLike, n: int, n_policies: int, where: Where
) -> NDArray[np.int32]:
    """Policy numbers of `n` steps as a column; one number stands for all steps."""
    ids = np.asarray(policy_ids)
    if ids.dtype.kind not in "iu" or ids.shape not in ((), (n,)):
        raise ValueError(
            f"{where(None)}: policy_ids has dtype {ids.dtype} and shape {ids.shape}, expected one "
            f"policy number or {n} of them"
        )
    if n and (ids.min() < 0 or ids.max() >= n_policies):
        row = int(np.flatnonzero((ids < 0) | (ids >= n_policies))[0])
        raise ValueError(
            f"{where(row)}: policy_ids is {ids.reshape(-1)[row]}, but the policies known are "
            f"numbered 0 to {n_policies - 1}; add_policy gives a policy its number"
            if n_policies
            else f"{where(row)}: policy_ids is {ids.reshape(-1)[row]}, but no policy is known; "
            "add_policy gives a policy its number"
        )
    return np.full(n, ids, dtype=np.int32)


def _floats(values: ArrayLike, name: str, where: Where, copy: bool) -> Floats:
    try:
        array = np.asarray(values).astype(np.float64, order="C", copy=copy)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where(None)}: {name} are not numbers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{where(None)}: {name} has shape {array.shape}, expected (steps,)")
    return array


def _integers(values: ArrayLike, name: str, dtype: Any) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name} has dtype {array.dtype}, expected integers")
    array = array.astype(dtype)
    array.setflags(write=False)
    return array


def _require_finite(array: Floats, name: str, where: Where) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        row = int(np.argwhere(~finite)[0, 0])
        raise ValueError(f"{where(row)}: {name} is {array[row]}, it must be finite")


def _why(log_prob: float) -> str:
    if np.isnan(log_prob):
        return "which is no number: the policy or its observation is broken"
    if log_prob == -np.inf:
        return "but an action that was executed cannot have probability zero"
    if log_prob == np.inf:
        return "an infinite density: the policy puts all its mass on one point"
    return "above 0, but these are natural logarithms of probabilities, which are at most 1"


@dataclass(frozen=True, eq=False, repr=False)
class Trajectories:
    """Episodes as read-only columns; rows `offsets[i]:offsets[i + 1]` are episode i.

    Build it with `from_arrays`, `load` or a `TrajectoryBuffer`; the constructor itself checks
    nothing.

    Attributes:
        observations: Batch of S rows, what the policy saw.
        actions: Batch of S rows, what it chose.
        rewards: (S,).
        log_probs: (S,) natural log of the probability (density) of the action when it was chosen.
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
        by_step = ("observations", "actions", "rewards", "log_probs", "policy_ids")
        taken = {name: trees.take(getattr(self, name), rows) for name in by_step}
        taken |= {name: getattr(self, name)[chosen] for name in _BY_EPISODE}
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
            seen, chosen = trees.take(self.observations, rows), trees.take(self.actions, rows)
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

    def save(self, path: storage.PathLike) -> None:
        """Write everything to a file, which replaces an older one only when it is complete."""
        with storage.replacing(path) as writer:
            storage.write_spaces(writer, self.observation_space, self.action_space, self.horizon)
            for policy in self.policies:
                storage.write_policy(writer, policy)
            for s, schedule in enumerate(self.schedules):
                storage.write_changes(
                    writer, schedule.clocks, schedule.policies, mid_episode=True, schedule=s
                )
            if len(self) == 0:
                return
            by_episode = [getattr(self, name) for name in _BY_EPISODE]
            storage.write_episodes(
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
    def load(cls, path: storage.PathLike, *, recover: bool = False) -> Trajectories:
        """The trajectories of a file that `save` or a recorder wrote.

        Args:
            path: The file. If it ends inside its last block, the rest is read, with a warning.
            recover: Whether to read what precedes damage, instead of raising `DamagedFileError`.
        """
        try:
            parts = [_from_section(part) for part in storage.read_sections(path, recover=recover)]
            return parts[0].merge(*parts[1:]) if len(parts) > 1 else (parts or [nothing()])[0]
        except storage.DamagedFileError:
            raise
        except ValueError as error:
            raise storage.DamagedFileError(
                os.fspath(path), 0, f"the contents contradict each other: {error}", "not readable"
            ) from error


_BY_EPISODE = ("terminated", "truncated", "held_out", "start_clock", "schedule_ids")


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


def freeze(trajectories: Trajectories) -> Trajectories:
    """The same object, its arrays made read-only in place."""
    for field in dataclasses.fields(trajectories)[:11]:
        for leaf in trees.leaves(getattr(trajectories, field.name)):
            leaf.setflags(write=False)
    return trajectories


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
        name: trees.concatenate([getattr(part, name) for part in full])
        for name in ("observations", "actions", "rewards", "log_probs", "policy_ids", *_BY_EPISODE)
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
            if value != agreed[name]:
                raise ValueError(
                    f"{name} differs: {agreed[name]} and {value}; only trajectories of one "
                    "environment can be put together"
                )
    return agreed


def renumber(
    part: Trajectories, numbers: Sequence[int], *, first_schedule: int
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


def checked(raw: Trajectories, *, copy: bool) -> Trajectories:
    """The columns as checked arrays; ValueError names what is wrong, with episode and step."""
    rewards = _floats(raw.rewards, "rewards", lambda row: "Trajectories", copy=False)
    offsets = _check_offsets(raw.offsets, len(rewards))
    n = len(offsets) - 1

    def where(row: int | None) -> str:
        if row is None:
            return "Trajectories"
        episode = int(np.searchsorted(offsets, row, side="right")) - 1
        return f"episode {episode}, step {row - offsets[episode]}"

    steps = check_steps(
        Steps(raw.observations, raw.actions, raw.rewards, raw.log_probs),
        raw.observation_space,
        raw.action_space,
        discrete=raw.discrete,
        where=where,
        copy=copy,
    )
    found = dataclasses.replace(
        raw,
        **steps._asdict(),
        policy_ids=check_policy_ids(raw.policy_ids, len(rewards), len(raw.policies), where),
        offsets=offsets,
        terminated=_flags(raw.terminated, n, "terminated"),
        truncated=_flags(raw.truncated, n, "truncated"),
        held_out=_flags(raw.held_out, n, "held_out"),
        start_clock=_per_episode(raw.start_clock, n, "start_clock", np.int64),
        schedule_ids=_per_episode(raw.schedule_ids, n, "schedule_ids", np.int32),
        horizon=check_horizon(raw.horizon),
        policies=tuple(raw.policies),
    )
    for k, policy in enumerate(found.policies):
        if not isinstance(policy, Policy):
            raise TypeError(f"policies[{k}] is {policy!r}, which has no log_prob and sample")
    _check_episodes(found)
    return freeze(found)


def check_horizon(horizon: Any) -> int | None:
    """A time limit of at least one step, or None."""
    if horizon is None:
        return None
    if not isinstance(horizon, int | np.integer) or horizon < 1:
        raise ValueError(f"horizon={horizon!r} must be a number of steps, at least 1, or None")
    return int(horizon)


def _check_offsets(values: ArrayLike, n_steps: int) -> Ints:
    offsets = _integers(values, "offsets", np.int64)
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"offsets has shape {offsets.shape}, expected (episodes + 1,)")
    if offsets[0] != 0 or offsets[-1] != n_steps:
        raise ValueError(
            f"offsets goes from {offsets[0]} to {offsets[-1]}, but must go from 0 to the number of "
            f"rewards, {n_steps}"
        )
    short = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if len(short):
        i = int(short[0])
        raise ValueError(
            f"episode {i}: offsets[{i}]={offsets[i]} and offsets[{i + 1}]={offsets[i + 1]}, but an "
            "episode has at least one step"
        )
    return offsets


def _check_episodes(data: Trajectories) -> None:
    """Ends, time limit, and that the policies that acted are those that should have."""
    if not (data.terminated | data.truncated).all():
        i = int(np.flatnonzero(~(data.terminated | data.truncated))[0])
        raise ValueError(
            f"episode {i}: terminated and truncated are both false: an unfinished episode has no "
            "return; leave it out"
        )
    if data.horizon is not None and (data.lengths > data.horizon).any():
        i = int(np.flatnonzero(data.lengths > data.horizon)[0])
        raise ValueError(f"episode {i} has {data.lengths[i]} steps, horizon={data.horizon} is less")
    if (data.start_clock < -1).any() or (data.schedule_ids < -1).any():
        raise ValueError("start_clock and schedule_ids must be at least 0, or -1 for none")
    for s, schedule in enumerate(data.schedules):
        if schedule.policies.max() >= len(data.policies):
            raise ValueError(
                f"schedules[{s}] names policy {schedule.policies.max()}, but there are "
                f"{len(data.policies)} policies"
            )
    if (data.schedule_ids >= len(data.schedules)).any():
        i = int(np.flatnonzero(data.schedule_ids >= len(data.schedules))[0])
        raise ValueError(
            f"episode {i}: schedule_ids is {data.schedule_ids[i]}, but there are "
            f"{len(data.schedules)} schedules"
        )
    if ((data.schedule_ids >= 0) & (data.start_clock < 0)).any():
        i = int(np.flatnonzero((data.schedule_ids >= 0) & (data.start_clock < 0))[0])
        raise ValueError(f"episode {i} follows a schedule, so its start_clock must be known")
    expected = np.repeat(data.policy_ids[data.offsets[:-1]], data.lengths)
    for s in np.unique(data.schedule_ids[data.schedule_ids >= 0]):
        rows = np.flatnonzero(data.schedule_ids[data.episode_ids] == s)
        clocks = data.start_clock[data.episode_ids[rows]] + data.steps[rows]
        expected[rows] = data.schedules[s].policy_at(clocks)
    wrong = np.flatnonzero(expected != data.policy_ids)
    if len(wrong):
        row = int(wrong[0])
        i = int(data.episode_ids[row])
        raise ValueError(
            f"episode {i}, step {data.steps[row]}: policy_ids is {data.policy_ids[row]}, but "
            f"policy {expected[row]} should act there: "
            + ("so says its schedule" if data.schedule_ids[i] >= 0 else CHANGES_NEED_A_CLOCK)
        )


CHANGES_NEED_A_CLOCK = (
    "an episode whose policy changes needs its start_clock and the clocks of all changes, since "
    "its behaviour is the sequence of policies it would have followed had it lasted"
)


def _flags(values: ArrayLike, n: int, name: str) -> NDArray[np.bool_]:
    array = np.asarray(values)
    if array.dtype.kind not in "biu" or (array.size and (array.min() < 0 or array.max() > 1)):
        raise ValueError(f"{name} has dtype {array.dtype}, expected truth values")
    return _per_episode(array.astype(bool), n, name, np.bool_)


def _per_episode(values: ArrayLike, n: int, name: str, dtype: Any) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "biu" or array.shape not in ((), (n,)):
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}, expected one value or {n}, "
            "one for each episode"
        )
    return np.full(n, array, dtype=dtype)


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


def _from_section(section: storage.Section) -> Trajectories:
    tables: dict[int, ChangeTable] = {}
    for number, clocks, policies, mid_episode in section.changes:
        table = tables.setdefault(number, ChangeTable())
        for clock, policy_id in zip(clocks, policies, strict=True):
            table.change(policy_id, clock, mid_episode=mid_episode)
    # where no policy changed inside an episode its policy says it all
    clocked = [number for number, table in tables.items() if table.clocked]
    episodes = section.column("episodes")
    ids = np.full(len(episodes), -1, dtype=np.int32)
    for s, number in enumerate(clocked):
        known = episodes[:, 4] >= tables[number].clocks[0]  # as in a buffer, see `append`
        ids[(episodes[:, 5] == number) & known] = s
    n = len(episodes)
    raw = Trajectories(
        trees.concatenate(section.observations) if n else spaces.empty(section.observation_space),
        trees.concatenate(section.actions) if n else spaces.empty(section.action_space),
        rewards=section.column("rewards"),
        log_probs=section.column("log_probs"),
        policy_ids=section.column("policy_ids"),
        offsets=np.concatenate([[0], np.cumsum(episodes[:, 0])]),
        terminated=episodes[:, 1],
        truncated=episodes[:, 2],
        held_out=episodes[:, 3],
        start_clock=episodes[:, 4],
        schedule_ids=ids,
        schedules=tuple(tables[number].schedule() for number in clocked),
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
