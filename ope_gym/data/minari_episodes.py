"""Episodes as Minari holds them: an observation after the last step, and infos of the reset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.spaces import Space
from ope_gym.data.trajectories import Trajectories


def write_episodes(data: Trajectories) -> Iterator[Any]:
    """One `EpisodeBuffer` after the other, so that only one is in memory twice."""
    from minari.data_collector import EpisodeBuffer

    for i in range(len(data)):
        first, last = int(data.offsets[i]), int(data.offsets[i + 1])
        steps = slice(first, last)
        n = last - first
        seen = np.append(np.arange(first, last), last - 1)
        ends = np.zeros((2, n), dtype=bool)
        ends[:, -1] = data.terminated[i], data.truncated[i]
        yield EpisodeBuffer(
            observations=_to_lists(batches.take(data.observations, seen)),
            actions=_to_lists(batches.take(data.actions, steps)),
            rewards=data.rewards[steps],
            terminations=ends[0],
            truncations=ends[1],
            infos={
                "log_prob": np.concatenate([[np.nan], data.log_probs[steps]]),
                "policy_id": np.concatenate([[np.int32(-1)], data.policy_ids[steps]]),
            },
        )


def _to_lists(tree: Tree) -> Any:
    """Columns as they are, but object columns (of Text) as lists."""
    if isinstance(tree, tuple):
        return tuple(_to_lists(branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: _to_lists(branch) for key, branch in tree.items()}
    return tree.tolist() if tree.dtype == object else tree


def read_columns(
    dataset: Any, seen: Space | None, chosen: Space | None, infos: Sequence[str]
) -> dict[str, Any]:
    """All episodes as columns, with the infos of these names."""
    parts: dict[str, list[Any]] = {name: [] for name in ("observations", "actions", "rewards")}
    parts |= {name: [] for name in infos}
    ends, lengths = [], []
    for i, episode in zip(dataset.episode_indices, dataset.iterate_episodes(), strict=True):
        n = len(episode.rewards)
        if n == 0:
            raise ValueError(f"episode {i} has no step: leave it out with filter_episodes")
        flags = np.stack([episode.terminations, episode.truncations]).astype(bool)
        if flags[:, :-1].any():
            step = int(np.argmax(flags[:, :-1].any(axis=0)))
            raise ValueError(
                f"episode {i} has ended at step {step}, but goes on for {n} steps: cut it there "
                "before you read it"
            )
        ends.append(flags[:, -1])
        lengths.append(n)
        parts["observations"].append(_rows(seen, episode.observations, n))
        parts["actions"].append(_rows(chosen, episode.actions, n))
        parts["rewards"].append(episode.rewards)
        for name in infos:
            parts[name].append(_info(episode.infos, name, n, i))
    if not lengths:
        raise ValueError("the dataset has no episode")
    columns: dict[str, Any] = {name: batches.concatenate(part) for name, part in parts.items()}
    columns["offsets"] = np.concatenate([[0], np.cumsum(lengths)])
    columns["terminated"], columns["truncated"] = np.stack(ends, axis=1)
    return columns


def _rows(space: Space | None, values: Any, n: int) -> Tree:
    """The first `n` rows: without what was seen after the last step. Keys in the space's order."""
    if isinstance(space, gym_spaces.Tuple):
        return tuple(_rows(part, x, n) for part, x in zip(space.spaces, values, strict=True))
    if isinstance(space, gym_spaces.Dict):
        return {key: _rows(part, values[key], n) for key, part in space.spaces.items()}
    if isinstance(space, gym_spaces.Text):
        return spaces.object_array(values[:n])
    return np.asarray(values)[:n]


def _info(infos: Mapping[str, Any] | None, name: str, n: int, episode: int) -> NDArray[Any]:
    """(n,) an info without the row of the reset."""
    if name not in (infos or {}):
        raise ValueError(
            f"episode {episode} has no info {name!r}, only {sorted(infos or {})}: name the one "
            "that holds the log-probabilities"
        )
    values = np.asarray((infos or {})[name])
    if values.shape not in ((n,), (n + 1,)):
        raise ValueError(
            f"episode {episode}: info {name!r} has shape {values.shape}, expected ({n + 1},), a "
            "row for the reset and one for each step"
        )
    return values[-n:]
