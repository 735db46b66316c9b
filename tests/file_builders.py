"""Recorded episodes in files and in parts, for tests that read them a chunk at a time."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from ope_gym import Compute, Evaluation, Evaluator, Trajectories, batches, evaluate
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schedules import Schedule
from ope_gym.data.schema import BY_EPISODE, BY_STEP
from ope_gym.data.spaces import stack
from ope_gym.data.store import Store
from ope_gym.policies import LinearSigmoid, Uniform
from ope_gym.scale.sources import open_source
from ope_gym.scale.workers import Workers
from tests.builders import Table


def split(data: Trajectories, seed: int, cuts: int) -> list[Trajectories]:
    """Cut episodes, in random order, at random places; each part has its own policy table."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data))
    places = np.sort(rng.integers(1, len(data), size=cuts if len(data) > 1 else 0))
    parts = [data.select(episodes=chosen) for chosen in np.split(order, places) if len(chosen)]
    return [_compact(part, rng) for part in parts]


def _compact(part: Trajectories, rng: np.random.Generator) -> Trajectories:
    """Keep the policies that acted, in any order."""
    acted = rng.permutation(np.unique(part.policy_ids))
    table = np.zeros(len(part.policies), dtype=np.int32)
    table[acted] = np.arange(acted.size)
    policies = tuple(part.policies[k] for k in acted)
    return dataclasses.replace(part, policies=policies, policy_ids=table[part.policy_ids])


def merged(parts: Sequence[Trajectories]) -> Trajectories:
    """Join parts in memory."""
    return parts[0].merge(*parts[1:])


def functions(parts: Iterable[Trajectories]) -> list[Callable[[], Trajectories]]:
    """Return functions that make the parts, which `evaluate` reads as it reads files."""
    return [partial(_itself, part) for part in parts]


def _itself(part: Trajectories) -> Trajectories:
    return part


def in_memory(
    parts: Sequence[Trajectories], target: Any, estimators: Any, **options: Any
) -> Evaluation:
    """Evaluate all parts at once."""
    return evaluate(merged(parts), target, estimators, **options)


def in_blocks(
    parts: Sequence[Trajectories],
    target: Any,
    estimators: Any,
    *,
    block_steps: int = 30,
    **options: Any,
) -> Evaluation:
    """Evaluate parts a block at a time, at least two blocks."""
    steps = sum(part.n_steps for part in parts)
    compute = Compute(block_steps=max(1, min(block_steps, steps - 1)))
    evaluator = Evaluator(functions(parts), estimators, compute=compute, **options)
    assert evaluator.source.data is None
    return evaluator.evaluate(target)


def in_one_chunk(data: Trajectories, target: Any, estimators: Any, **options: Any) -> Evaluation:
    """Evaluate all episodes as a file that is read in blocks, but in a single chunk."""
    source = open_source(functions([data]), options.get("held_out"), 1, Workers())
    assert source.data is None
    source = dataclasses.replace(source, block_steps=data.n_steps)
    (task,) = source.tasks
    assert len(list(source.chunks(task))) == 1
    return Evaluator(source, estimators, **options).evaluate(target)


def made(part: int, episodes: int = 40, length: int = 250) -> Trajectories:
    """Make episodes of linear policies, the same whenever they are made."""
    rng = np.random.default_rng([5, part])
    steps = episodes * length
    x = rng.standard_normal((steps, 3))
    policies = [LinearSigmoid(np.full(3, 0.02 * k)) for k in range(8)]
    ids = np.repeat(rng.integers(8, size=episodes), length)
    actions: NDArray[np.int64] = (rng.random(steps) < 0.5).astype(np.int64)
    table = LinearSigmoid.log_prob_stack(policies, x, actions)
    return Trajectories.from_arrays(
        x,
        actions,
        rng.random(steps),
        table[ids, np.arange(steps)],
        policies=policies,
        offsets=np.arange(episodes + 1) * length,
        terminated=True,
        policy_ids=ids,
    )


def mixed_files(folder: Path) -> list[Path]:
    """Write files, large and small, that were saved in one block or recorded one by one."""
    sizes = [1, 30, 2, 3, 25]
    paths = [folder / f"{i}.ope" for i in range(len(sizes))]
    for i, path in enumerate(paths):
        data = made(i, episodes=sizes[i], length=20)
        record(data, path) if i % 2 else data.save(path)
    return paths


def record(data: Trajectories, path: Path) -> None:
    """Write episode by episode, as a recorder does, policies where they first act."""
    numbers: dict[int, int] = {}
    clock = 0
    with Store(path, data.observation_space, data.action_space, data.horizon) as store:
        for i in range(len(data)):
            episode = data.select(episodes=[i])
            k = int(episode.policy_ids[0])
            if k not in numbers:
                numbers[k] = store.add_policy(data.policies[k])
            store.change(0, clock, numbers[k], mid_episode=False)
            changed = {"policy_ids": numbers[k], "schedule_ids": 0, "start_clock": clock}
            columns = {
                name: np.full_like(getattr(episode, name), value) for name, value in changed.items()
            }
            store.append(dataclasses.replace(episode, **columns))
            clock += episode.n_steps


def clocked(seed: int, tables: ArrayLike, episodes: int = 12) -> TrajectoryBuffer:
    """Record a loop whose policy changes every few steps, also in the midst of episodes.

    Args:
        seed: of everything.
        tables: (policies, states, 2) of the policies.
        episodes: to be recorded, of 1 to 6 steps.
    """
    from gymnasium.spaces import Discrete

    known = np.asarray(tables, dtype=np.float64)
    rng, states = np.random.default_rng(seed), known.shape[1]
    buffer = TrajectoryBuffer(Discrete(states), Discrete(2), horizon=6)
    numbers = [buffer.add_policy(Table(table)) for table in known]
    clock, acting, due = 0, 0, 0
    for _ in range(episodes):
        length = int(rng.integers(1, 7))
        ids = []
        for step in range(length):
            if clock + step >= due:
                acting = int(rng.integers(len(known)))
                buffer.change_policy(numbers[acting], clock + step, mid_episode=step > 0)
                due = clock + step + int(rng.integers(2, 10))
            ids.append(acting)
        seen = rng.integers(states, size=length)
        chances = known[ids, seen]
        actions = (rng.random(length) < chances[:, 1]).astype(np.int64)
        buffer.append(
            seen,
            actions,
            rng.random(length),
            np.log(chances[np.arange(length), actions]),
            [numbers[k] for k in ids],
            terminated=True,
            start_clock=clock,
        )
        clock += length
    return buffer


def assert_identical(a: Trajectories, b: Trajectories) -> None:
    """Assert equality bit by bit, with dtypes and structure."""
    for name in (*BY_STEP, "offsets", *BY_EPISODE):
        one, other = getattr(a, name), getattr(b, name)
        assert type(one) is type(other), name
        if isinstance(one, dict):
            assert list(one) == list(other)  # also their order
        for x, y in zip(batches.leaves(one), batches.leaves(other), strict=True):
            assert x.dtype == y.dtype, name
            assert x.shape == y.shape, name
            same = x.tolist() == y.tolist() if x.dtype == object else x.tobytes() == y.tobytes()
            assert same, name
    assert a.schedules == b.schedules
    for name in ("observation_space", "action_space", "horizon"):
        assert getattr(a, name) == getattr(b, name), name


def recording() -> Trajectories:
    """Return episodes whose policies change inside and between them, with ends of all kinds."""
    rng = np.random.default_rng(5)
    lengths = np.array([3, 1, 4, 2])
    steps = int(lengths.sum())
    return Trajectories.from_arrays(
        rng.standard_normal((steps, 4)),  # float64 in a float32 space: kept as they are
        rng.integers(2, size=steps),
        rng.standard_normal(steps),
        np.log(rng.random(steps)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        policies=[LinearSigmoid(rng.standard_normal(4)), Uniform(2), LinearSigmoid(np.zeros(4))],
        policy_ids=[0, 0, 1, 2, 1, 1, 1, 2, 0, 0],
        terminated=[True, False, True, True],
        truncated=[False, True, True, False],
        held_out=[True, False, False, True],
        start_clock=[10, -1, 20, -1],
        schedules=[Schedule(np.array([0, 12, 23]), np.array([0, 1, 2], dtype=np.int32))],
        schedule_ids=[0, -1, 0, -1],
        observation_space=spaces.Box(-np.inf, np.inf, (4,), np.float32),
        action_space=spaces.Discrete(2),
        horizon=7,
    )


def constant_buffer(space: gym.Space[Any], element: Callable[[int], Any]) -> Trajectories:
    buffer = TrajectoryBuffer(space, space)
    k = buffer.add_policy(Uniform(2))
    for first in (0, 2):
        seen = stack(space, [element(first + t) for t in range(2)])
        chosen = stack(space, [element(first + t + 3) for t in range(2)])
        buffer.append(seen, chosen, [1.0, 2.0], [-0.5, -0.25], k, terminated=True)
    return buffer.view()


def as_if_killed(path: Path) -> Path:
    """Return a copy of a file and of all beside it, as its recorder would leave it if it died."""
    folder = path.parent / f"copy-{len(os.listdir(path.parent))}"
    folder.mkdir()
    for name in path.parent.glob(f"{path.name}*"):
        if not name.name.endswith("-shm"):
            shutil.copy(name, folder)
    return folder / path.name
