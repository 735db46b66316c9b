"""Steps of other libraries as free values take them; their whole loops run in `test_train`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ope_gym.policies import Uniform
from wrappers.free import VectorSteps
from wrappers.loops import FreeValues
from wrappers.loops.rllib import Pieces, SampleHook
from wrappers.loops.tianshou import StepHook
from wrappers.loops.torchrl import steps_of


def played(values: FreeValues, vector_steps: int) -> None:
    """Play with random actions, 50 vector steps handed over at a time."""
    envs = gym.make_vec("CartPole-v1", 4)
    steps, rng = VectorSteps(envs), np.random.default_rng(0)
    steps.restart(envs.reset(seed=0)[0])
    for t in range(vector_steps):
        actions = rng.integers(2, size=4)
        steps.step(actions, *envs.step(actions))
        if t % 50 == 49:
            values.add(**steps.take())


def test_values_come_when_they_are_due(capsys: pytest.CaptureFixture[str]) -> None:
    values = FreeValues(lambda: Uniform(2), 4, horizon=500, eval_freq=3000)
    played(values, 4000)
    at = [estimate.timesteps for estimate in values.evaluations]
    assert all(3000 <= b - a < 3200 for a, b in zip([0, *at], at, strict=False))
    assert [e.timesteps for e in values.settled] == at[: len(values.settled)] != []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(at)
    assert lines[0].startswith(f"{at[0]:,} timesteps: worth ")
    assert all(abs(e.value - 22) < 4 for e in values.evaluations)


def test_batches_of_torchrl() -> None:
    class Batch(dict[str, Any]):
        ndim = 2

    ended = torch.zeros(2, 5, 1, dtype=torch.bool)
    ended[1, 3] = True
    seen = torch.arange(60.0).reshape(2, 6, 5)
    batch = Batch(
        observation=seen[:, :5],
        action=torch.nn.functional.one_hot(torch.tensor([[0, 1, 0, 1, 1]] * 2)).bool(),
        next={
            "observation": seen[:, 1:],
            "reward": torch.ones(2, 5, 1),
            "terminated": ended,
            "truncated": ~ended & False,
        },
    )
    steps = steps_of(batch)
    assert {column.shape[:2] for column in steps.values()} == {(5, 2)}
    assert steps["actions"][:, 0].tolist() == [0, 1, 0, 1, 1]
    assert steps["terminated"].T.tolist() == [[False] * 5, [False] * 3 + [True, False]]
    np.testing.assert_array_equal(steps["following"][2, 1], seen[1, 3])


def test_steps_of_tianshou() -> None:
    values = FreeValues(lambda: Uniform(2), 2, horizon=10, eval_freq=10**6)
    hook = StepHook(values)
    row = {
        "obs": np.zeros((2, 1)),
        "act": np.zeros(2, dtype=int),
        "rew": np.ones(2),
        "terminated": np.array([False, True]),
        "truncated": np.zeros(2, dtype=bool),
        "obs_next": np.ones((2, 1)),
    }

    class Rows(dict[str, Any]):
        def __len__(self) -> int:
            return len(self["rew"])

    for _ in range(64):
        hook(None, Rows(row))
    assert (values.timesteps, values.free.stream.ends) == (128, 64)
    with pytest.raises(ValueError, match="stepped 1 environments, not all 2"):
        hook(None, Rows({name: column[:1] for name, column in row.items()}))


def test_pieces_of_episodes_become_columns() -> None:
    """Two environments, sampled in pieces of 4 steps: no step is lost, and none out of order."""
    rng = np.random.default_rng(0)
    pieces, taken = Pieces(2), []
    episodes = [[0, 0], [1, 0]]  # number of the episode and its next step, by environment
    fed, number = 0, 2
    for _ in range(50):
        for env in range(2):
            left = 4
            while left:
                count = int(rng.integers(1, left + 1))
                over = count < left
                episode, step = episodes[env]
                last = np.arange(count) == count - 1
                pieces.append(
                    str(episode),
                    {
                        "observations": np.column_stack(
                            [np.full(count, episode), step + np.arange(count)]
                        ),
                        "rewards": np.ones(count),
                        "terminated": last & over,
                        "truncated": last & False,
                    },
                )
                fed, left = fed + count, left - count
                episodes[env] = [number, 0] if over else [episode, step + count]
                number += over
        taken.append(pieces.take())
    for env in range(2):
        seen = np.concatenate([t["observations"][:, env] for t in taken if t])
        ended = np.concatenate([t["terminated"][:, env] for t in taken if t])
        follows = (np.diff(seen[:, 0]) == 0) & (np.diff(seen[:, 1]) == 1)
        begins = (seen[1:, 1] == 0) & ended[:-1]
        assert (follows | begins).all()
    assert sum(t["rewards"].size for t in taken if t) >= fed - 8


def test_a_hook_of_rllib_leaves_its_evaluation_alone() -> None:
    class Runner:
        class config:
            in_evaluation = True

    hook = SampleHook()
    hook(env_runner=Runner(), metrics_logger=None, samples=[])
    assert hook.values is None
