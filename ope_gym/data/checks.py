"""Checks of columns where they enter; errors name what is wrong, with episode and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.arguments import whole
from ope_gym.arrays import LOG_PROB_TOLERANCE, as_integers, offsets_of
from ope_gym.arrays import place as place_of
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.schedules import check_schedules
from ope_gym.data.schema import BY_EPISODE, COLUMNS, C, Column, Columns, Flags, Floats, Ints, freeze
from ope_gym.data.spaces import Space, Where
from ope_gym.policies import Policy, acts_unknown

_BY_EPISODE = tuple(column for column in COLUMNS if column.per == "episode")
CHANGES_NEED_A_CLOCK = (
    "an episode whose policy changes needs its start_clock and the clocks of all changes, since "
    "its behaviour is the sequence of policies it would have followed had it lasted"
)


class Steps(NamedTuple):
    """Checked columns of the steps of one or more episodes."""

    observations: Tree
    actions: Tree
    rewards: Floats
    log_probs: Floats


# Whole sets of episodes ----------------------------------------------------------------------


def checked(raw: C, *, copy: bool, first: int = 0, place: Callable[[int], str] | None = None) -> C:
    """Return the columns as checked read-only arrays; one value stands for all rows.

    Args:
        raw: Columns as a person or a file gives them.
        copy: Whether observations, actions, rewards and log_probs must be copied.
        first: The number in messages of the first episode.
        place: Names a row in messages; by default its episode and step.
    """
    rewards = floats(raw.rewards, "rewards", lambda row: "Trajectories", copy=False)
    offsets = _check_offsets(raw.offsets, len(rewards))

    def where(row: int | None) -> str:
        if row is None:
            return "Trajectories"
        if place is not None:
            return place(row)
        episode, step = place_of(row, offsets)
        return f"episode {first + episode}, step {step}"

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
        **check_by_episode({name: getattr(raw, name) for name in BY_EPISODE}, len(offsets) - 1),
        horizon=check_horizon(raw.horizon),
        policies=tuple(raw.policies),
    )
    _check_policies(found.policies)
    check_schedules(found.schedules, len(found.policies))
    _check_episodes(found, first)
    return freeze(found)


def _check_policies(policies: tuple[Policy, ...]) -> None:
    # isinstance of a protocol is slow (methods may be attributes), issubclass by type is not
    if all(issubclass(kind, Policy) for kind in set(map(type, policies))):
        return
    for k, policy in enumerate(policies):
        if not isinstance(policy, Policy):
            raise TypeError(f"policies[{k}] is {policy!r}, which has no log_prob and sample")


def _check_offsets(values: ArrayLike, n_steps: int) -> Ints:
    offsets = as_integers(values, "offsets")
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"offsets has shape {offsets.shape}, expected (episodes + 1,)")
    if offsets[0] != 0 or offsets[-1] != n_steps:
        raise ValueError(
            f"offsets goes from {offsets[0]} to {offsets[-1]}, but must go from 0 to the number of "
            f"rewards, {n_steps}"
        )
    short = offsets[1:] <= offsets[:-1]
    if short.any():
        i = int(np.argmax(short))
        raise ValueError(
            f"episode {i}: offsets[{i}]={offsets[i]} and offsets[{i + 1}]={offsets[i + 1]}, but an "
            "episode has at least one step"
        )
    return offsets


def check_lengths(values: ArrayLike, n_steps: int) -> tuple[Ints, Ints]:
    """Return lengths (n,) of the episodes that `n_steps` rows are cut into, and their offsets."""
    lengths = as_integers(values, "lengths")
    if lengths.ndim != 1:
        raise ValueError(f"lengths has shape {lengths.shape}, expected (episodes,)")
    if len(lengths) and lengths.min() < 1:
        i = int(np.argmax(lengths < 1))
        raise ValueError(f"lengths[{i}] is {lengths[i]}, but an episode has at least one step")
    offsets = offsets_of(lengths)
    if offsets[-1] != n_steps:
        raise ValueError(f"lengths add up to {offsets[-1]}, but there are {n_steps} rewards")
    return lengths, offsets


def check_horizon(horizon: Any) -> int | None:
    """Return a time limit of at least one step, or None."""
    if horizon is None:
        return None
    return whole("horizon", horizon, 1, "give a number of steps, at least 1, or None")


def check_ends(name: str, *, ended: bool, steps: int, horizon: int | None) -> None:
    """Raise if an episode has not ended, or is longer than the time limit."""
    if not ended:
        raise ValueError(
            f"{name}: terminated and truncated are both false: an unfinished episode has no "
            "return; leave it out, or append it when it has ended"
        )
    if horizon is not None and steps > horizon:
        raise ValueError(f"{name} has {steps} steps, horizon={horizon} is less")


def _check_episodes(data: Columns, first: int) -> None:
    """Raise if an episode has not ended, is too long, or another policy should have acted."""

    def name(wrong: NDArray[np.bool_]) -> tuple[int, str]:
        i = int(np.argmax(wrong))
        return i, f"episode {first + i}"

    ended = data.terminated | data.truncated
    longer = data.lengths > (data.horizon or np.inf)
    if not ended.all() or longer.any():
        i, who = name(~ended if not ended.all() else longer)
        check_ends(who, ended=bool(ended[i]), steps=int(data.lengths[i]), horizon=data.horizon)
    ids, clocks = data.schedule_ids, data.start_clock
    if (clocks < -1).any() or (ids < -1).any():
        raise ValueError("start_clock and schedule_ids must be at least 0, or -1 for none")
    if (ids >= len(data.schedules)).any():
        i, who = name(ids >= len(data.schedules))
        raise ValueError(
            f"{who}: schedule_ids is {ids[i]}, but there are {len(data.schedules)} schedules"
        )
    if ((ids >= 0) & (clocks < 0)).any():
        _, who = name((ids >= 0) & (clocks < 0))
        raise ValueError(f"{who} follows a schedule, so its start_clock must be known")
    _check_acting(data, first)


def _check_acting(data: Columns, first: int) -> None:
    """Raise if the policy that acted is not the one of the schedule, or of the first step."""
    expected = np.repeat(data.policy_ids[data.offsets[:-1]], data.lengths)
    for s in np.unique(data.schedule_ids[data.schedule_ids >= 0]):
        rows = np.flatnonzero(data.schedule_ids[data.episode_ids] == s)
        clocks = data.start_clock[data.episode_ids[rows]] + data.steps[rows]
        expected[rows] = data.schedules[s].policy_at(clocks)
    wrong = expected != data.policy_ids
    if wrong.any():
        row = int(np.argmax(wrong))
        i = int(data.episode_ids[row])
        raise ValueError(
            f"episode {first + i}, step {data.steps[row]}: policy_ids is {data.policy_ids[row]}, "
            f"but policy {expected[row]} should act there: "
            + ("so says its schedule" if data.schedule_ids[i] >= 0 else CHANGES_NEED_A_CLOCK)
        )


# Columns with a row a step -------------------------------------------------------------------


def check_steps(
    steps: Steps,
    observation_space: Space | None,
    action_space: Space | None,
    *,
    discrete: bool | None,
    where: Where,
    copy: bool = True,
    unknown: Flags | None = None,
) -> Steps:
    """Return the columns as arrays of equal length; raise if a value cannot be.

    Args:
        steps: Anything that can become the columns.
        observation_space: The space of one observation, None if unknown.
        action_space: The space of one action, None if unknown.
        discrete: Whether actions have probabilities, not densities; None to tell by their dtype.
        where: Names a row in messages.
        copy: Whether the columns may not share memory with what was given.
        unknown: (S,) where nobody knows who acted: there, log_probs may be NaN.
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
    if n:
        _require_finite(rewards, "rewards", where)
        for leaf in batches.leaves(chosen):
            if leaf.dtype.kind == "f":
                _require_finite(leaf, "actions", where)
        if discrete is None:  # whole numbers are actions with probabilities
            discrete = all(leaf.dtype.kind in "iub" for leaf in batches.leaves(chosen))
        _check_log_probs(log_probs, where, discrete=discrete, unknown=unknown)
    return Steps(seen, chosen, rewards, log_probs)


def _check_log_probs(
    log_probs: Floats, where: Where, *, discrete: bool, unknown: Flags | None
) -> None:
    limit = LOG_PROB_TOLERANCE if discrete else np.finfo(np.float64).max
    if log_probs.min() > -np.inf and log_probs.max() <= limit:  # false if one of them is NaN
        return
    wrong = ~((log_probs > -np.inf) & (log_probs <= limit))
    if unknown is not None:
        wrong &= ~(unknown & np.isnan(log_probs))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{where(row)}: log_probs is {log_probs[row]}, {_why(log_probs[row])}")


def check_policy_ids(
    policy_ids: ArrayLike, n: int, n_policies: int, where: Where, copy: bool = True
) -> NDArray[np.int32]:
    """Return the policy numbers of `n` steps as a column; one number stands for all steps."""
    ids = np.asarray(policy_ids)
    if ids.dtype.kind not in "iu" or ids.shape not in ((), (n,)):
        raise ValueError(
            f"{where(None)}: policy_ids has dtype {ids.dtype} and shape {ids.shape}, expected one "
            f"policy number or {n} of them"
        )
    if n and (ids.min() < 0 or ids.max() >= n_policies):
        row = int(np.argmax((ids < 0) | (ids >= n_policies)))
        known = "the policies known are numbered 0 to" if n_policies else "no policy is known"
        raise ValueError(
            f"{where(row)}: policy_ids is {ids.reshape(-1)[row]}, but {known}"
            f"{f' {n_policies - 1}' if n_policies else ''}; add_policy gives a policy its number"
        )
    return ids.astype(np.int32, copy=copy) if ids.ndim else np.full(n, ids, dtype=np.int32)


def floats(values: ArrayLike, name: str, where: Where, copy: bool) -> Floats:
    """Return a column of float64, one number a step."""
    try:
        array = np.asarray(values).astype(np.float64, order="C", copy=copy)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where(None)}: {name} are not numbers: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{where(None)}: {name} has shape {array.shape}, expected (steps,)")
    return array


def _require_finite(array: Floats, name: str, where: Where) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        row = int(np.argwhere(~finite)[0, 0])
        raise ValueError(f"{where(row)}: {name} is {array[row]}, it must be finite")


def _why(log_prob: float) -> str:
    if np.isnan(log_prob):
        return "which is not a number: the policy or its observation is broken"
    if log_prob == -np.inf:
        return "but an action that was executed cannot have probability zero"
    if log_prob == np.inf:
        return "an infinite density: the policy puts all its mass on one point"
    return "above 0, but these are natural logarithms of probabilities, which are at most 1"


# Columns with a row an episode ---------------------------------------------------------------


def check_by_episode(values: dict[str, Any], n: int) -> dict[str, Any]:
    """Return the columns of `n` episodes by name, copied; one value stands for all episodes."""
    return {column.name: _check_column(column, values[column.name], n) for column in _BY_EPISODE}


def _check_column(column: Column, values: ArrayLike, n: int) -> NDArray[Any]:
    array = np.asarray(values)
    kind, name = array.dtype.kind, column.name
    if column.dtype is np.bool_ and (
        kind not in "biu" or (kind != "b" and array.size and (array.min() < 0 or array.max() > 1))
    ):
        raise ValueError(f"{name} has dtype {array.dtype}, expected truth values")
    if kind not in "biu" or array.shape not in ((), (n,)):
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}, expected one value or {n}, "
            "one for each episode"
        )
    return array.astype(column.dtype) if array.ndim else np.full(n, array, dtype=column.dtype)
