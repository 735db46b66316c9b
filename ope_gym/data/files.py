"""The contents of the blocks of a file: spaces, policies, their changes, episodes.

A `spaces` block opens a section; `policy`, `changes` and `episodes` blocks count policies and
schedules from the start of their section. So a second run may append to the file of a first. An
`ahead` block has finished episodes before a recorder has looked at them: nothing is checked yet,
one policy acted in all steps, and the log-probabilities are left to the reader if the policy is one
of ours.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import space_json
from ope_gym.data.block_writer import BlockWriter
from ope_gym.data.blocks import LAST_BYTE, Block
from ope_gym.data.schema import BATCHES, BY_EPISODE, COLUMNS, Columns, Ints, space_of
from ope_gym.data.spaces import NUMERIC_DTYPES, Space, mismatch
from ope_gym.policies import (
    POLICY_KINDS,
    UNREGISTERED,
    Policy,
    UnavailablePolicy,
    acting_log_probs,
    policy_from_arrays,
    policy_to_arrays,
)
from ope_gym.policies.base import is_ours

_ARRAYS = {c.name: np.dtype(c.dtype) for c in COLUMNS if c.per == "step" and c.dtype}
# Columns with a row an episode are whole numbers and truth values; a block has them in one table,
# "episodes", behind the lengths.
_DTYPES = {**_ARRAYS, "episodes": np.dtype(np.int64)}
_REQUIRED = 1 + sum(c.per == "episode" and c.default is None for c in COLUMNS)


def write_spaces(
    writer: BlockWriter,
    observation_space: Space | None,
    action_space: Space | None,
    horizon: int | None,
) -> None:
    """Open a section: the blocks after it have these spaces, own policies and an own clock."""
    meta = space_json.env_to_json(observation_space, action_space, horizon)
    writer.append("spaces", meta, {})


def write_policy(writer: BlockWriter, policy: Policy) -> None:
    """Write the next policy of the section; the first has number 0."""
    kind, arrays = describe_policy(policy, f"{writer.path}")
    writer.append("policy", {"policy": kind}, arrays)


def describe_policy(policy: Policy, place: str) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return kind and arrays of a policy; warn if its class is not registered.

    Args:
        policy: The policy.
        place: Where it will be stored, for the warning.
    """
    kind, arrays = policy_to_arrays(policy)
    if kind.startswith(UNREGISTERED) and not isinstance(policy, UnavailablePolicy):
        warnings.warn(
            f"{type(policy).__qualname__} is not registered: {place} will not hold its "
            "parameters; decorate the class with ope_gym.policies.register_policy",
            UserWarning,
            stacklevel=4,
        )
    return kind, arrays


def write_change(
    writer: BlockWriter, policy_id: int, clock: int, *, mid_episode: bool, schedule: int = 0
) -> None:
    """Write that from `clock` on `policy_id` acts; see `TrajectoryBuffer.change_policy`."""
    write_changes(writer, [clock], [policy_id], mid_episode=mid_episode, schedule=schedule)


def write_changes(
    writer: BlockWriter,
    clocks: ArrayLike,
    policies: ArrayLike,
    *,
    mid_episode: bool,
    schedule: int = 0,
) -> None:
    """Write several changes of one schedule, in order."""
    arrays: dict[str, NDArray[Any]] = {
        "clocks": np.asarray(clocks, dtype=np.int64),
        "policies": np.asarray(policies, dtype=np.int32),
    }
    writer.append("changes", {"schedule": schedule, "mid_episode": bool(mid_episode)}, arrays)


def write_episodes(writer: BlockWriter, data: Columns) -> None:
    """Write a block of episodes; schedule_ids are the numbers that `write_changes` was given."""
    arrays: dict[str, NDArray[Any]] = {name: getattr(data, name) for name in _ARRAYS}
    by_episode = [data.lengths, *(getattr(data, name) for name in BY_EPISODE)]
    arrays["episodes"] = np.stack(by_episode, axis=1).astype(np.int64)
    meta = {
        name: _pack(getattr(data, name), space_of(data, name), name, arrays) for name in BATCHES
    }
    writer.append("episodes", meta, arrays)


# Writing ahead -------------------------------------------------------------------------------


class RawColumn(NamedTuple):
    """The bytes of a column, with its name, dtype and shape of a row as JSON."""

    described: str
    data: bytes


def raw_column(name: str, array: Any, data: bytes | None = None) -> RawColumn | None:
    """Return the bytes of an array; None if it is none, or holds Python objects.

    Args:
        name: Of the column.
        array: The array.
        data: The bytes, if somebody has them already.
    """
    if array.__class__ is not np.ndarray:
        return None
    described = describe_rows(name, array.dtype, array.shape[1:])
    return RawColumn(described, array.tobytes() if data is None else data) if described else None


@lru_cache(64)
def describe_rows(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """Return the JSON that says what the bytes of a column are; nothing if a file has no such."""
    return f'["{name}","{dtype.str}",{list(shape)}]' if dtype.str in NUMERIC_DTYPES else ""


def says_its_probabilities(policy: Policy) -> bool:
    """Return whether whoever loads a file can ask this policy, without code of the user."""
    asked = is_ours(policy) and not isinstance(policy, UnavailablePolicy)
    return asked and POLICY_KINDS.get(getattr(policy, "kind", "")) is type(policy)


def write_ahead(
    writer: BlockWriter, policy: int, columns: Sequence[RawColumn], steps: int, episodes: bytes
) -> bool:
    """Write finished episodes ahead of their block; return False if there is no room.

    Args:
        writer: Of the file.
        policy: Number of the policy that acted.
        columns: Observations, actions and rewards, and log_probs if `says_its_probabilities` is
            false; all as they will be given to the buffer.
        steps: Number of their rows.
        episodes: The table of the block, a row of int64 for each episode.
    """
    described, pieces = zip(*columns, strict=True)
    payload = b"".join((*pieces, episodes, LAST_BYTE))
    return writer.append_ahead(
        f'"policy":{policy},"steps":{steps},"columns":[{",".join(described)}],'
        f'"arrays":{{"raw":{{"dtype":"|u1","shape":[{len(payload) - 1}],"offset":0}}}}',
        payload,
    )


def unpack_ahead(block: Block) -> dict[str, NDArray[Any]]:
    """Return the arrays of a block that was written ahead."""
    raw, steps = block.array("raw"), block.meta["steps"]
    arrays: dict[str, NDArray[Any]] = {}
    at = 0
    for name, dtype, shape in block.meta["columns"]:
        known = dtype in NUMERIC_DTYPES  # numpy is not asked about others
        width = math.prod(shape) * np.dtype(dtype).itemsize if known else 0
        if width < 1 or steps < 1 or name in arrays:
            raise ValueError(f"{steps} steps of {name!r} have dtype {dtype!r}, shape {shape}")
        part = raw[at : at + steps * width].tobytes()
        if dtype == "|b1" and max(part, default=0) > 1:
            raise ValueError(f"array {name!r} has truth values other than 0 and 1")
        arrays[name] = np.frombuffer(part, dtype).reshape(steps, *shape)
        at += steps * width
    table = np.frombuffer(raw[at:].tobytes(), "<i8")
    arrays["episodes"] = table.reshape(-1, 1 + len(BY_EPISODE))
    return arrays


def parse_ahead(policy: Any, arrays: Mapping[str, NDArray[Any]], section: Any) -> dict[str, Any]:
    """Return what `parse_episodes` returns of a block that was written ahead.

    Args:
        policy: Number of the policy that acted.
        arrays: What `unpack_ahead` returned, or rows of it that are whole episodes.
        section: Has the spaces and the policies so far.
    """
    if type(policy) is not int or not 0 <= policy < len(section.policies):
        raise ValueError(f"policy {policy!r} is none of the {len(section.policies)} of the file")
    found = dict(arrays)
    ids = found["policy_ids"] = np.full(len(found["rewards"]), policy, dtype=np.int32)
    if "log_probs" not in found:
        seen, chosen = (found[name] for name in BATCHES)
        try:
            with np.errstate(all="ignore"):  # what comes of NaN is refused later
                found["log_probs"] = acting_log_probs(section.policies, ids, seen, chosen)
        except RuntimeError as error:  # a policy that is not there
            raise ValueError(str(error)) from error
    return parse_episodes({name: name for name in BATCHES}, found, section)


# Reading blocks ------------------------------------------------------------------------------


class Change(NamedTuple):
    """Changes of policy in one schedule: from clocks[j] on policies[j] acts."""

    schedule: int
    clocks: NDArray[np.int64]
    policies: NDArray[np.int32]
    mid_episode: bool


class KnownSpaces:
    """The spaces of a file so far, with their JSON, and what further ones may take."""

    def __init__(self) -> None:
        self.budget = space_json.Budget()
        self.by_name: dict[str, tuple[Any, Space]] = {}


def parse_spaces(block: Block, known: KnownSpaces) -> tuple[Space | None, Space | None, Any]:
    """Return the spaces and the horizon of a section.

    Args:
        block: The block that opens the section.
        known: The spaces of earlier sections of the file; is added to. All sections that say their
            spaces must say the same, and share one object.
    """
    found: list[Space | None] = []
    for name in ("observation_space", "action_space"):
        data = block.meta[name]
        before, shared = known.by_name.get(name, (None, None))
        space = shared if data == before else space_json.space_from_json(data, known.budget)
        two = space is not None and shared is not None and space is not shared
        if two and space != shared:  # to compare large Boxes takes memory
            raise mismatch(name, shared, space)
        if space is not None and shared is None:
            known.by_name[name] = (data, space)
        found.append(space)
    return found[0], found[1], block.meta["horizon"]


def parse_policy(block: Block) -> Policy:
    """Return the policy of a block."""
    name = block.meta["policy"]
    if not isinstance(name, str):
        raise ValueError(f"the policy is of kind {name!r}")
    return policy_from_arrays(name, block.arrays)


def parse_changes(block: Block) -> Change:
    """Return the changes of policy of a block."""
    clocks, policies = block.array("clocks"), block.array("policies")
    if clocks.ndim != 1 or clocks.shape != policies.shape:
        raise ValueError("clocks and policies are not two equally long columns")
    if clocks.dtype != np.int64 or policies.dtype != np.int32:
        raise ValueError(f"clocks have dtype {clocks.dtype}, policies {policies.dtype}")
    schedule, mid_episode = int(block.meta["schedule"]), bool(block.meta["mid_episode"])
    return Change(schedule, clocks, policies, mid_episode)


def parse_episodes(
    meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], section: Any
) -> dict[str, Any]:
    """Return columns by name, and the table "episodes"; ValueError says what is wrong with them.

    Args:
        meta: JSON fields of the block.
        arrays: Its arrays, or rows of them that are whole episodes.
        section: Has the spaces.
    """
    for name in BATCHES:
        _require_once(name, meta[name])
    columns: dict[str, Any] = {
        name: unpack(meta[name], space_of(section, name), arrays) for name in BATCHES
    }
    n = len(arrays["rewards"])
    for column in COLUMNS:
        if column.name in _ARRAYS and column.default is not None and column.name not in arrays:
            columns[column.name] = np.full(n, column.default, dtype=column.dtype)
    for name in _DTYPES:
        if name not in columns:
            columns[name] = arrays[name]
            check_array(name, arrays[name])
    rows = [leaf for name in (*BATCHES, *_ARRAYS) for leaf in batches.leaves(columns[name])]
    if any(len(leaf) != n for leaf in rows):
        raise ValueError("its columns differ in length")
    columns["episodes"] = check_table(columns["episodes"], n)
    return columns


def _require_once(name: str, layout: Any) -> None:
    """Raise if a batch uses an array twice: a few bytes would stand for many columns."""
    found, waiting = set(), [layout]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            if part in found:
                raise ValueError(f"{name} has the array {part!r} twice")
            found.add(part)
        elif isinstance(part, dict):
            ((kind, content),) = part.items()
            waiting += (
                [x for _, x in content] if kind == "dict" else content if kind == "tuple" else []
            )


def check_array(name: str, array: NDArray[Any]) -> None:
    """Raise if rewards, log_probs, policy_ids or episodes have another dtype or shape."""
    if array.dtype != _DTYPES[name] or array.ndim != 1 + (name == "episodes"):
        raise ValueError(f"{name} has dtype {array.dtype}, shape {array.shape}")


def check_table(episodes: Ints, n_steps: int) -> Ints:
    """Return the table of episodes with all its columns; raise if it does not cut its rows."""
    width = episodes.shape[1]
    if not _REQUIRED <= width <= 1 + len(BY_EPISODE) or not len(episodes):
        raise ValueError(f"episodes has shape {episodes.shape}")
    lengths = episodes[:, 0]
    if lengths.sum() != n_steps:
        raise ValueError(f"its episodes have {lengths.sum()} steps, its columns {n_steps}")
    if lengths.min() < 1 or lengths.max() > n_steps:  # so large that the sum wrapped around
        raise ValueError(
            f"its episodes have {lengths.min()} to {lengths.max()} steps, but an episode has at "
            f"least one step, and here at most {n_steps}"
        )
    missing = [c.default for c in COLUMNS if c.per == "episode"][width - 1 :]
    return np.hstack([episodes, np.tile(missing, (len(episodes), 1))]) if missing else episodes


# Nested batches ------------------------------------------------------------------------------


def _pack(tree: Tree, space: Space | None, name: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """Add the leaves of a batch to `arrays`, and return how to put them together."""
    if isinstance(tree, tuple | dict) and name in BATCHES:
        name += "."
    if isinstance(tree, tuple):
        parts = _parts(space)
        return {"tuple": [_pack(x, parts.get(i), name, arrays) for i, x in enumerate(tree)]}
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(
                f"a dict of {name[:-1]} needs string keys to be saved, got {list(tree)}"
            )
        parts = _parts(space)
        return {"dict": [[key, _pack(x, parts.get(key), name, arrays)] for key, x in tree.items()]}
    if name.endswith("."):
        name += str(len(arrays))
    if tree.dtype != object:
        arrays[name] = tree
        return name
    if space is None:
        raise TypeError(f"{name} holds Python objects; to save them give the buffer their space")
    arrays[name] = np.frombuffer(space_json.elements_to_json(space, tree), dtype=np.uint8)
    return {"json": name}


def unpack(layout: Any, space: Space | None, arrays: Mapping[str, NDArray[Any]]) -> Tree:
    """Put a batch together from its leaves in `arrays`, as the layout says."""
    if isinstance(layout, str):
        return arrays[layout]
    ((kind, content),) = layout.items()
    parts = _parts(space)
    if kind == "tuple":
        return tuple(unpack(x, parts.get(i), arrays) for i, x in enumerate(content))
    if kind == "dict":
        return {str(key): unpack(x, parts.get(key), arrays) for key, x in content}
    if kind != "json" or space is None:
        raise ValueError(f"unknown layout {kind!r} of a column")
    return space_json.elements_from_json(space, arrays[content].tobytes())


def _parts(space: Space | None) -> dict[Any, Space]:
    inner = getattr(space, "spaces", None)
    return dict(enumerate(inner)) if isinstance(inner, tuple) else dict(inner or {})
