"""Trajectories as Minari datasets, and back.

Minari has no place for the probabilities of actions. They go into the infos, `log_prob` and
`policy_id`, which have a row for the reset (NaN and -1) and one for each step. `held_out`,
`start_clock`, `schedule` and a CRC-32 are metadata of episodes; policies, schedules, spaces and the
time limit are JSON under the key `ope_gym` of the dataset's metadata. There is no pickle.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gym_spaces
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import offsets_of
from ope_gym.batches import Tree
from ope_gym.data import spaces
from ope_gym.data.schema import BY_EPISODE, BY_STEP, read_only
from ope_gym.data.spaces import Space
from ope_gym.data.tables.header import KEY, Header, header_from_json, header_to_json, sealed
from ope_gym.data.trajectories import Trajectories, Viewable
from ope_gym.files import MALFORMED
from ope_gym.policies import UnknownPolicy

__all__ = ["from_minari", "to_minari"]

# Minari has own fields for the ends of episodes; the other columns are metadata by these names.
_BY_EPISODE = {
    {"schedule_ids": "schedule"}.get(name, name): name
    for name in BY_EPISODE
    if name not in ("terminated", "truncated")
}
_STORABLE = (
    *(gym_spaces.Box, gym_spaces.Discrete, gym_spaces.MultiDiscrete, gym_spaces.MultiBinary),
    *(gym_spaces.Text, gym_spaces.Dict, gym_spaces.Tuple),
)


def to_minari(
    trajectories: Viewable,
    dataset_id: str,
    *,
    env: str | gym.Env[Any, Any] | gym.envs.registration.EnvSpec | None = None,
    description: str | None = None,
) -> Any:
    """Write trajectories as a new Minari dataset, from which `from_minari` reads them unchanged.

    Minari has an observation after the last step, trajectories do not: the last one is repeated,
    and the metadata say so. Further metadata (author, algorithm, ...) can be added to the result
    with `dataset.storage.update_metadata`.

    Args:
        trajectories: Trajectories or a buffer, whose spaces must be known.
        dataset_id: Minari's name for it, such as "cartpole/training-v0".
        env: The environment, its id or spec, so that others can recover it.
        description: A few words about the dataset.

    Returns:
        The `minari.MinariDataset`.
    """
    minari = _import_minari()
    from minari.storage.datasets_root_dir import get_dataset_path

    data = trajectories.view()
    if not len(data):
        raise ValueError("trajectories is empty: a Minari dataset has at least one episode")
    for name in ("observation_space", "action_space"):
        _require_storable(getattr(data, name), name)
    header = header_to_json(data, "the dataset")
    header |= {"last_observation": "repeated", "has_propensities": data.has_propensities}
    path = get_dataset_path(dataset_id)
    if os.path.exists(path):
        raise ValueError(
            f"dataset_id={dataset_id!r} exists already: choose another name or version, or remove "
            "it with minari.delete_dataset"
        )
    try:
        with warnings.catch_warnings():
            # Minari warns of every optional field that is left out
            warnings.filterwarnings("ignore", "(`.*` is set to|env_spec is) None", UserWarning)
            dataset = minari.create_dataset_from_buffers(
                dataset_id,
                _episodes(data),
                env=env,
                description=description,
                observation_space=data.observation_space,
                action_space=data.action_space,
                jpeg_encoding=False,
            )
        columns = [getattr(data, name).tolist() for name in _BY_EPISODE.values()]
        rows = zip(*columns, _checksums(data), strict=True)
        facts = (dict(zip((*_BY_EPISODE, "crc"), row, strict=True)) for row in rows)
        dataset.storage.update_episode_metadata(facts)
        dataset.storage.update_metadata({KEY: sealed(header)})
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return dataset


def _checksums(data: Trajectories) -> Iterator[int]:
    """Yield the CRC-32 of the columns of each episode: HDF5 itself has none."""
    ends = np.stack([data.terminated, data.truncated], axis=1)
    leaves = [leaf for name in BY_STEP for leaf in batches.leaves(getattr(data, name))]
    for begin, end, flags in zip(data.offsets[:-1], data.offsets[1:], ends, strict=True):
        crc = zlib.crc32(flags.tobytes())
        for leaf in leaves:
            part = leaf[begin:end]
            content = repr(part.tolist()).encode() if part.dtype == object else part.tobytes()
            crc = zlib.crc32(content, crc)
        yield crc


def _require_storable(space: Space | None, name: str) -> None:
    if space is None:
        raise ValueError(
            f"{name} of the trajectories is unknown, and Minari needs it: give it to the buffer, "
            f"or dataclasses.replace(trajectories, {name}=...)"
        )
    if type(space) not in _STORABLE:
        raise ValueError(
            f"{name} is {space}, which Minari cannot store; keep such trajectories in a file of "
            "ope_gym, trajectories.save(path)"
        )
    parts: Any = getattr(space, "spaces", ())
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        if "/" in str(key) or key in ("", "."):
            raise ValueError(
                f"{name} has the key {key!r}, which cannot be the name of an HDF5 group: rename it "
                "to a string without '/'"
            )
        _require_storable(part, f"{name}[{key!r}]")


def _episodes(data: Trajectories) -> Iterator[Any]:
    """Yield one `EpisodeBuffer` after the other, so that only one is in memory twice."""
    from minari.data_collector import EpisodeBuffer

    for i in range(len(data)):
        first, last = int(data.offsets[i]), int(data.offsets[i + 1])
        steps = slice(first, last)
        seen = np.append(np.arange(first, last), last - 1)
        ends = np.zeros((2, last - first), dtype=bool)
        ends[:, -1] = data.terminated[i], data.truncated[i]
        yield EpisodeBuffer(
            observations=_to_lists(batches.take(data.observations, seen)),
            actions=_to_lists(batches.take(data.actions, steps)),
            rewards=data.rewards[steps],
            terminations=ends[0],
            truncations=ends[1],
            infos={
                "log_prob": np.append(np.nan, data.log_probs[steps]),
                "policy_id": np.append(np.int32(-1), data.policy_ids[steps]),
            },
        )


def _to_lists(tree: Tree) -> Any:
    """Return columns as they are, but object columns (of Text) as lists."""
    if isinstance(tree, tuple):
        return tuple(map(_to_lists, tree))
    if isinstance(tree, dict):
        return {key: _to_lists(branch) for key, branch in tree.items()}
    return tree.tolist() if tree.dtype == object else tree


def from_minari(
    dataset: Any, *, log_prob: str | None = None, held_out: bool | None = None
) -> Trajectories:
    """Read the trajectories of a Minari dataset.

    A dataset that `to_minari` wrote comes back exactly. Other datasets do not say who acted: their
    policy is an `UnknownPolicy`, and without `log_prob` the probabilities are unknown too (NaN,
    and `has_propensities` is false). Only DM and MDR, which have no importance weights, can use
    such data; with `log_prob`, so can the estimators with basic weights (BIS, NBIS and the like).

    `minari.combine_datasets` drops the policies that `to_minari` wrote. Read the parts, and
    `merge` them.

    An episode that neither terminates nor is truncated is refused, since it has no return; leave
    it out with `dataset.filter_episodes`.

    Args:
        dataset: A `minari.MinariDataset` or the id of a local one.
        log_prob: Which of the infos of another dataset holds the natural logs of the
            probabilities (densities) of its actions.
        held_out: Whether the learner of the policies that will be evaluated never saw these
            episodes; None for what `to_minari` wrote, and False for other datasets.
    """
    name = dataset if isinstance(dataset, str) else dataset.id
    with _explained(name):
        if isinstance(dataset, str):
            dataset = _import_minari().load_dataset(dataset)
        stored = dataset.storage.metadata.get(KEY) if log_prob is None else None
        if stored is not None:
            found = _ours(dataset, header_from_json(stored, "its metadata"))
        else:
            found = Trajectories.from_arrays(**_foreign(dataset, log_prob))
        if held_out is None:
            return found
        return dataclasses.replace(found, held_out=read_only(np.full(len(found), held_out)))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Name the dataset in errors, and turn those of forged contents into ours."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (*MALFORMED, AssertionError, OSError, RuntimeError) as error:  # also those of HDF5
        raise ValueError(f"dataset {name} cannot be read: {error}") from error


def _import_minari() -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError(
            'Minari is missing: pip install -e ".[minari]" -c constraints.txt'
        ) from error
    return minari


def _ours(dataset: Any, header: Header) -> Trajectories:
    """Return the episodes of a dataset that `to_minari` wrote."""
    facts = list(dataset.storage.get_episode_metadata(dataset.episode_indices))
    for i, fact in zip(dataset.episode_indices, facts, strict=True):
        if not fact.keys() >= {*_BY_EPISODE, "crc"}:
            raise ValueError(
                f"episode {i} was added to the dataset by somebody else; "
                "from_minari(dataset, log_prob='log_prob') reads it without the policies"
            )
    columns, infos = _columns(dataset, header, ("log_prob", "policy_id"))
    by_episode: dict[str, Any] = {
        name: np.array([x[key] for x in facts]) for key, name in _BY_EPISODE.items()
    }
    found = Trajectories.from_arrays(
        **columns,
        **by_episode,
        log_probs=infos["log_prob"],
        policy_ids=infos["policy_id"],
        policies=header.policies,
        schedules=header.schedules,
        horizon=header.horizon,
    )
    for i, fact, crc in zip(dataset.episode_indices, facts, _checksums(found), strict=True):
        if int(fact["crc"]) != crc:
            raise ValueError(f"episode {i} does not match its checksum: it was changed or damaged")
    return found


def _foreign(dataset: Any, log_prob: str | None) -> dict[str, Any]:
    """Return the arguments for a dataset of others."""
    columns, infos = _columns(dataset, dataset, () if log_prob is None else (log_prob,))
    if log_prob is None:
        infos["log_prob"] = np.full(len(columns["rewards"]), np.nan)
        first = next(iter(dataset.iterate_episodes())).infos
        if {"log_prob", "policy_id"} <= set(first or {}):
            warnings.warn(
                f"{dataset.id} has the infos that ope_gym writes, but not its policies: "
                "minari.combine_datasets drops them. Read the parts instead, "
                "from_minari(a).merge(from_minari(b)); or, for basic weights only, "
                "from_minari(dataset, log_prob='log_prob')",
                UserWarning,
                stacklevel=3,
            )
    limit = None if dataset.env_spec is None else dataset.env_spec.max_episode_steps
    if limit is not None and np.diff(columns["offsets"]).max() > limit:
        limit = None  # it was recorded without the time limit of its environment
    known = {"policies": [UnknownPolicy()], "horizon": limit}
    return columns | known | {"log_probs": infos[log_prob or "log_prob"]}


def _columns(
    dataset: Any, described: Any, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what every dataset has, and the infos of these names, of all episodes.

    Args:
        dataset: The dataset.
        described: Has `observation_space` and `action_space`.
        names: Names of infos.
    """
    seen, chosen = described.observation_space, described.action_space
    rows: list[list[Any]] = []
    lengths, ends = [], []
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
        lengths.append(n)
        ends.append(flags[:, -1])
        rows.append(
            [
                _rows(seen, episode.observations, n),
                _rows(chosen, episode.actions, n),
                np.asarray(episode.rewards),
                *(_info(episode.infos, name, n, i) for name in names),
            ]
        )
    if not rows:
        raise ValueError("the dataset has no episode")
    seen_rows, chosen_rows, rewards, *infos = map(batches.concatenate, zip(*rows, strict=True))
    terminated, truncated = np.stack(ends, axis=1)
    columns = {
        "observations": seen_rows,
        "actions": chosen_rows,
        "rewards": rewards,
        "offsets": offsets_of(lengths),
        "terminated": terminated,
        "truncated": truncated,
        "observation_space": seen,
        "action_space": chosen,
    }
    return columns, dict(zip(names, infos, strict=True))


def _rows(space: Space | None, values: Any, n: int) -> Tree:
    """Return the first n rows, without the observation after the last step.

    Keys come in the order of the space.
    """
    if isinstance(space, gym_spaces.Tuple):
        return tuple(_rows(part, x, n) for part, x in zip(space.spaces, values, strict=True))
    if isinstance(space, gym_spaces.Dict):
        return {key: _rows(part, values[key], n) for key, part in space.spaces.items()}
    if isinstance(space, gym_spaces.Text):
        return spaces.object_array(values[:n])
    return np.asarray(values)[:n]


def _info(infos: Mapping[str, Any] | None, name: str, n: int, episode: int) -> NDArray[Any]:
    """Return an info (n,) without the row of the reset."""
    infos = infos or {}
    if name not in infos:
        raise ValueError(
            f"episode {episode} has no info {name!r}, only {sorted(infos)}: name the one that "
            "holds the log-probabilities"
        )
    values = np.asarray(infos[name])
    if values.shape not in ((n,), (n + 1,)):
        raise ValueError(
            f"episode {episode}: info {name!r} has shape {values.shape}, expected ({n + 1},), a "
            "row for the reset and one for each step"
        )
    return values[-n:]
