"""What ope_gym puts into the blocks of a file: spaces, policies, their changes, episodes.

A `spaces` block opens a section; `policy`, `changes` and `episodes` blocks count policies and
schedules from the start of their section. So a second run may append to the file of a first.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import space_json, spaces
from ope_gym.data.blocks import (
    MALFORMED,
    Block,
    BlockWriter,
    DamagedFileError,
    PathLike,
    read_blocks,
)
from ope_gym.data.schedules import ChangeTable
from ope_gym.data.schema import Ints
from ope_gym.data.spaces import Space
from ope_gym.policies.closed_form import (
    Policy,
    UnavailablePolicy,
    policy_from_arrays,
    policy_to_arrays,
)


def write_spaces(
    writer: BlockWriter,
    observation_space: Space | None,
    action_space: Space | None,
    horizon: int | None,
) -> None:
    """Open a section: what follows has these spaces, its own policies and its own clock."""
    meta = {
        "observation_space": space_json.space_to_json(observation_space),
        "action_space": space_json.space_to_json(action_space),
        "horizon": horizon,
    }
    writer.append("spaces", meta, {})


def write_policy(writer: BlockWriter, policy: Policy) -> None:
    """The next policy of the section; the first has number 0."""
    name, arrays = policy_to_arrays(policy)
    if name.startswith("unregistered:") and not isinstance(policy, UnavailablePolicy):
        warnings.warn(
            f"{type(policy).__qualname__} is not registered: {writer.path} will not hold its "
            "parameters; decorate the class with ope_gym.policies.closed_form.register_policy",
            UserWarning,
            stacklevel=2,
        )
    writer.append("policy", {"policy": name}, arrays)


def write_change(
    writer: BlockWriter, policy_id: int, clock: int, *, mid_episode: bool, schedule: int = 0
) -> None:
    """From `clock` on `policy_id` acts, as `TrajectoryBuffer.change_policy` has it."""
    write_changes(writer, [clock], [policy_id], mid_episode=mid_episode, schedule=schedule)


def write_changes(
    writer: BlockWriter,
    clocks: ArrayLike,
    policies: ArrayLike,
    *,
    mid_episode: bool,
    schedule: int = 0,
) -> None:
    """Several changes of one schedule, in order."""
    arrays: dict[str, NDArray[Any]] = {
        "clocks": np.asarray(clocks, dtype=np.int64),
        "policies": np.asarray(policies, dtype=np.int32),
    }
    writer.append("changes", {"schedule": schedule, "mid_episode": bool(mid_episode)}, arrays)


def write_episode(
    writer: BlockWriter,
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
    observation_space: Space | None = None,
    action_space: Space | None = None,
) -> None:
    """One finished episode, with the arguments that `TrajectoryBuffer.append` accepted.

    The spaces are those of the section. An episode with a `start_clock` follows schedule 0.
    """
    received = np.asarray(rewards, dtype=np.float64)
    n = len(received)
    schedule = -1 if start_clock is None else 0
    clock = -1 if start_clock is None else start_clock
    seen, chosen = (
        spaces.to_columns(space, batch, n, name=name, where=_unnamed, copy=False)
        for space, batch, name in (
            (observation_space, observations, "observations"),
            (action_space, actions, "actions"),
        )
    )
    write_episodes(
        writer,
        observations=seen,
        actions=chosen,
        rewards=received,
        log_probs=np.asarray(log_probs, dtype=np.float64),
        policy_ids=np.broadcast_to(np.asarray(policy_ids, dtype=np.int32), (n,)),
        episodes=np.array([[n, terminated, truncated, held_out, clock, schedule]], dtype=np.int64),
        observation_space=observation_space,
        action_space=action_space,
    )


def write_episodes(
    writer: BlockWriter,
    *,
    observations: Tree,
    actions: Tree,
    rewards: NDArray[np.float64],
    log_probs: NDArray[np.float64],
    policy_ids: NDArray[np.int32],
    episodes: NDArray[np.int64],
    observation_space: Space | None,
    action_space: Space | None,
) -> None:
    """Episodes as columns; `episodes` has the columns of `EPISODE_COLUMNS`."""
    arrays: dict[str, NDArray[Any]] = {
        "rewards": rewards,
        "log_probs": log_probs,
        "policy_ids": policy_ids,
        "episodes": episodes,
    }
    meta = {
        "observations": _pack(observations, observation_space, "observations", arrays),
        "actions": _pack(actions, action_space, "actions", arrays),
    }
    writer.append("episodes", meta, arrays)


_COLUMN_DTYPES = {"rewards": "f8", "log_probs": "f8", "policy_ids": "i4", "episodes": "i8"}
EPISODE_COLUMNS = ("length", "terminated", "truncated", "held_out", "start_clock", "schedule")


@dataclass
class Section:
    """What the blocks of one section hold, still in pieces, one for each block of episodes."""

    observation_space: Space | None
    action_space: Space | None
    horizon: int | None
    policies: list[Policy] = field(default_factory=list)
    changes: list[tuple[int, list[int], list[int], bool]] = field(default_factory=list)
    observations: list[Tree] = field(default_factory=list)
    actions: list[Tree] = field(default_factory=list)
    columns: dict[str, list[NDArray[Any]]] = field(
        default_factory=lambda: {name: [] for name in _COLUMN_DTYPES}
    )

    def column(self, name: str) -> NDArray[Any]:
        """All blocks' rewards, log_probs, policy_ids or episodes."""
        none = np.empty(
            (0, len(EPISODE_COLUMNS)) if name == "episodes" else 0, _COLUMN_DTYPES[name]
        )
        return np.concatenate(self.columns[name]) if self.columns[name] else none

    def clocked(self) -> dict[int, ChangeTable]:
        """The schedules, by number, in which a policy changed inside an episode."""
        tables: dict[int, ChangeTable] = {}
        for number, clocks, policies, mid_episode in self.changes:
            table = tables.setdefault(number, ChangeTable())
            for clock, policy_id in zip(clocks, policies, strict=True):
                table.change(policy_id, clock, mid_episode=mid_episode)
        return {k: table for k, table in tables.items() if table.clocked_from is not None}


def schedule_ids(
    clocked: Mapping[int, ChangeTable], start_clocks: Ints, schedules: Ints
) -> NDArray[np.int32]:
    """(n,) which of the clocked schedules, counted from 0, each episode follows; -1 if none.

    Where no policy changed inside an episode its policy says it all.
    """
    ids = np.full(len(start_clocks), -1, dtype=np.int32)
    for s, (number, table) in enumerate(clocked.items()):  # as in a buffer, see `append`, `view`
        known = start_clocks >= max(table.clocks[0], table.clocked_from or 0)
        ids[(schedules == number) & known] = s
    return ids


def read_sections(path: PathLike, *, recover: bool = False) -> list[Section]:
    """The sections of a file; see `read_blocks` for cut and damaged files."""
    sections: list[Section] = []
    known: dict[str, tuple[Any, Space]] = {}
    for block in read_blocks(path, recover=recover):
        try:
            if block.kind == "spaces":
                sections.append(open_section(block, known))
            elif not sections:
                raise ValueError("the first block is not of kind 'spaces'")
            else:
                add_block(sections[-1], block)
        except MALFORMED as error:
            damage = DamagedFileError(
                path,
                block.offset,
                f"malformed block of kind {block.kind!r}: {error}",
                "keep what precedes it: Trajectories.load(path, recover=True).save(new_path)",
            )
            if not recover:
                raise damage from error
            warnings.warn(f"recovered what precedes the damage: {damage}", stacklevel=2)
            break
    return sections


def open_section(block: Block, known: dict[str, tuple[Any, Space]] | None = None) -> Section:
    """The next section; all that say their spaces say the same, and share those `known`."""
    known = {} if known is None else known
    found: list[Space | None] = []
    for name in ("observation_space", "action_space"):
        data = block.meta[name]
        before, shared = known.get(name, (None, None))
        space = shared if data == before else space_json.space_from_json(data)
        if space is not None and shared is not None and space != shared:
            raise ValueError(
                f"{name} differs: {shared} and {space}; only trajectories of one environment can "
                "be put together"
            )
        if space is not None and shared is None:
            known[name] = (data, space)
        found.append(space)
    seen, chosen = found
    return Section(seen, chosen, block.meta["horizon"])


def add_block(section: Section, block: Block) -> None:
    """Add what a block holds, other than spaces; ValueError says what is wrong with it."""
    arrays = block.arrays
    if block.kind == "policy":
        name = block.meta["policy"]
        if not isinstance(name, str):
            raise ValueError(f"the policy is of kind {name!r}")
        section.policies.append(policy_from_arrays(name, arrays))
    elif block.kind == "changes":
        clocks, policies = arrays["clocks"], arrays["policies"]
        if clocks.ndim != 1 or clocks.shape != policies.shape or clocks.dtype.kind != "i":
            raise ValueError("clocks and policies are not two equally long columns")
        schedule, mid_episode = int(block.meta["schedule"]), bool(block.meta["mid_episode"])
        section.changes.append((schedule, clocks.tolist(), policies.tolist(), mid_episode))
    elif block.kind == "episodes":
        add_episodes(section, block)
    else:
        raise ValueError("unknown kind; a newer version of ope_gym may know it")


def add_episodes(section: Section, block: Block) -> None:
    """Add the episodes of a block; ValueError says what is wrong with them."""
    arrays = block.arrays
    n = len(arrays["rewards"])
    seen = unpack(block.meta["observations"], section.observation_space, arrays)
    chosen = unpack(block.meta["actions"], section.action_space, arrays)
    steps = [arrays["rewards"], arrays["log_probs"], arrays["policy_ids"]]
    for name in _COLUMN_DTYPES:
        check_column(name, arrays[name])
    if any(len(column) != n for column in (*steps, *batches.leaves(seen), *batches.leaves(chosen))):
        raise ValueError("its columns differ in length")
    check_table(arrays["episodes"], n)
    section.observations.append(seen)
    section.actions.append(chosen)
    for name in _COLUMN_DTYPES:
        section.columns[name].append(arrays[name])


def check_column(name: str, column: NDArray[Any]) -> None:
    """Refuse rewards, log_probs, policy_ids or episodes of another dtype or shape."""
    if column.dtype != _COLUMN_DTYPES[name] or column.ndim != 1 + (name == "episodes"):
        raise ValueError(f"{name} has dtype {column.dtype}, shape {column.shape}")


def check_table(episodes: NDArray[np.int64], n_steps: int) -> None:
    """Refuse a table of episodes that does not cut the rows of its own block."""
    if episodes.shape[1] != len(EPISODE_COLUMNS) or not len(episodes):
        raise ValueError(f"episodes has shape {episodes.shape}")
    lengths = episodes[:, 0]
    if lengths.sum() != n_steps:
        raise ValueError(f"its episodes have {lengths.sum()} steps, its columns {n_steps}")
    if lengths.min() < 1 or lengths.max() > n_steps:  # so large that the sum wrapped around
        raise ValueError(
            f"its episodes have {lengths.min()} to {lengths.max()} steps, but an episode has at "
            f"least one step, and here at most {n_steps}"
        )


def _pack(tree: Tree, space: Space | None, name: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """Add the leaves of a batch to `arrays`; the result says how to put them together."""
    if isinstance(tree, tuple | dict) and name in ("observations", "actions"):
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
    """The batch whose leaves are in `arrays`, put together as the layout says."""
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


def _unnamed(row: int | None) -> str:
    return "the episode" if row is None else f"step {row}"
