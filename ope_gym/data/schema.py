"""Checks of the columns of trajectories; errors name what is wrong, with episode and step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.spaces import Space, Where
from ope_gym.policies.closed_form import Policy
from ope_gym.policies.unknown import acts_unknown

if TYPE_CHECKING:
    from ope_gym.data.trajectories import Trajectories

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

BY_STEP = ("observations", "actions", "rewards", "log_probs", "policy_ids")
BY_EPISODE = ("terminated", "truncated", "held_out", "start_clock", "schedule_ids")

LOG_PROB_TOLERANCE = 1e-9  # rounding may lift the log of a probability of 1 a little above 0
CHANGES_NEED_A_CLOCK = (
    "an episode whose policy changes needs its start_clock and the clocks of all changes, since "
    "its behaviour is the sequence of policies it would have followed had it lasted"
)


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
    unknown: NDArray[np.bool_] | None = None,
) -> Steps:
    """The columns as arrays of equal length; ValueError names what is wrong, and where.

    Where `unknown` is true, nobody knows who acted, and NaN may stand for the log-probability.
    """
    rewards = floats(steps.rewards, "rewards", where, copy)
    n = len(rewards)
    log_probs = floats(steps.log_probs, "log_probs", where, copy)
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
    for leaf in batches.leaves(chosen):
        if leaf.dtype.kind == "f":
            _require_finite(leaf, "actions", where)
    if discrete is None:  # whole numbers are actions with probabilities
        discrete = all(leaf.dtype.kind in "iub" for leaf in batches.leaves(chosen))
    limit = LOG_PROB_TOLERANCE if discrete else np.finfo(np.float64).max
    if not (log_probs.min() > -np.inf and log_probs.max() <= limit):  # false for NaN, too
        wrong = ~((log_probs > -np.inf) & (log_probs <= limit))
        if unknown is not None:
            wrong &= ~(unknown & np.isnan(log_probs))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(f"{where(row)}: log_probs is {log_probs[row]}, {_why(log_probs[row])}")
    return Steps(seen, chosen, rewards, log_probs)


def check_policy_ids(
    policy_ids: ArrayLike, n: int, n_policies: int, where: Where, copy: bool = True
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
    return ids.astype(np.int32, copy=copy) if ids.ndim else np.full(n, ids, dtype=np.int32)


def check_horizon(horizon: Any) -> int | None:
    """A time limit of at least one step, or None."""
    if horizon is None:
        return None
    if not isinstance(horizon, int | np.integer) or horizon < 1:
        raise ValueError(f"horizon={horizon!r} must be a number of steps, at least 1, or None")
    return int(horizon)


def checked(raw: Trajectories, *, copy: bool) -> Trajectories:
    """The columns as checked arrays; ValueError names what is wrong, with episode and step."""
    rewards = floats(raw.rewards, "rewards", lambda row: "Trajectories", copy=False)
    offsets = _check_offsets(raw.offsets, len(rewards))
    n = len(offsets) - 1

    def where(row: int | None) -> str:
        if row is None:
            return "Trajectories"
        episode = int(np.searchsorted(offsets, row, side="right")) - 1
        return f"episode {episode}, step {row - offsets[episode]}"

    policy_ids = check_policy_ids(raw.policy_ids, len(rewards), len(raw.policies), where)
    steps = check_steps(
        Steps(raw.observations, raw.actions, raw.rewards, raw.log_probs),
        raw.observation_space,
        raw.action_space,
        discrete=raw.discrete,
        where=where,
        copy=copy,
        unknown=acts_unknown(raw.policies, policy_ids),
    )
    found = dataclasses.replace(
        raw,
        **steps._asdict(),
        policy_ids=policy_ids,
        offsets=offsets,
        terminated=flags(raw.terminated, n, "terminated"),
        truncated=flags(raw.truncated, n, "truncated"),
        held_out=flags(raw.held_out, n, "held_out"),
        start_clock=per_episode(raw.start_clock, n, "start_clock", np.int64),
        schedule_ids=per_episode(raw.schedule_ids, n, "schedule_ids", np.int32),
        horizon=check_horizon(raw.horizon),
        policies=tuple(raw.policies),
    )
    if not all(issubclass(kind, Policy) for kind in set(map(type, found.policies))):
        for k, policy in enumerate(found.policies):  # slow; methods may be attributes
            if not isinstance(policy, Policy):
                raise TypeError(f"policies[{k}] is {policy!r}, which has no log_prob and sample")
    _check_episodes(found)
    return freeze(found)


def _check_offsets(values: ArrayLike, n_steps: int) -> Ints:
    offsets = integers(values, "offsets", np.int64)
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


def check_lengths(values: ArrayLike, n_steps: int) -> tuple[Ints, Ints]:
    """(n,) lengths of the episodes that `n_steps` rows are cut into, and (n + 1,) offsets."""
    lengths = integers(values, "lengths", np.int64)
    if lengths.ndim != 1:
        raise ValueError(f"lengths has shape {lengths.shape}, expected (episodes,)")
    if len(lengths) and lengths.min() < 1:
        i = int(np.argmax(lengths < 1))
        raise ValueError(f"lengths[{i}] is {lengths[i]}, but an episode has at least one step")
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    lengths.cumsum(out=offsets[1:])
    if offsets[-1] != n_steps:
        raise ValueError(f"lengths add up to {offsets[-1]}, but there are {n_steps} rewards")
    return lengths, offsets


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


def freeze(trajectories: Trajectories) -> Trajectories:
    """The same object, its arrays made read-only in place."""
    for name in (*BY_STEP, "offsets", *BY_EPISODE):
        column = getattr(trajectories, name)
        for leaf in (column,) if isinstance(column, np.ndarray) else batches.leaves(column):
            leaf.setflags(write=False)
    return trajectories


def floats(values: ArrayLike, name: str, where: Where, copy: bool) -> Floats:
    """A column of float64, one number a step."""
    try:
        array = np.asarray(values).astype(np.float64, order="C", copy=copy)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where(None)}: {name} are not numbers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{where(None)}: {name} has shape {array.shape}, expected (steps,)")
    return array


def integers(values: ArrayLike, name: str, dtype: Any) -> NDArray[Any]:
    """A read-only copy, of whole numbers only."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name} has dtype {array.dtype}, expected integers")
    array = array.astype(dtype)
    array.setflags(write=False)
    return array


def flags(values: ArrayLike, n: int, name: str) -> NDArray[np.bool_]:
    """(n,) truth values; one stands for all episodes."""
    array = np.asarray(values)
    kind = array.dtype.kind
    if kind not in "biu" or (kind != "b" and array.size and (array.min() < 0 or array.max() > 1)):
        raise ValueError(f"{name} has dtype {array.dtype}, expected truth values")
    return per_episode(array, n, name, np.bool_)


def per_episode(values: ArrayLike, n: int, name: str, dtype: Any) -> NDArray[Any]:
    """(n,) whole numbers or truth values, copied; one stands for all episodes."""
    array = np.asarray(values)
    if array.dtype.kind not in "biu" or array.shape not in ((), (n,)):
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}, expected one value or {n}, "
            "one for each episode"
        )
    return array.astype(dtype) if array.ndim else np.full(n, array, dtype=dtype)


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
