"""Steps of Gymnasium vector environments for free evaluations: equal in every autoreset mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ope_gym.online import FreeEvaluation
from ope_gym.online.stream import Stream, Window
from ope_gym.policies import LinearSigmoid, Uniform
from tests.scripted_envs import ScriptedEnv, script
from wrappers import collect
from wrappers.free import VectorSteps
from wrappers.free_recorder import FreeRecorder

SCRIPTS = (script("..T", "C", "....B"), script(".C", "T"))
NAMES = ("observations", "following", "actions", "rewards", "ended", "step", "place")


def played(mode: AutoresetMode, steps: int) -> Window:
    """Return the episodes of a loop, two vector steps handed over at a time."""
    makers = [partial(ScriptedEnv, s, who=i) for i, s in enumerate(SCRIPTS)]
    envs = SyncVectorEnv(makers, autoreset_mode=mode)
    found, stream = VectorSteps(envs), Stream(2, 1000)
    observations, _ = envs.reset(seed=0)
    found.restart(observations)
    for t in range(steps):
        actions = np.array([t % 2, 1])
        result: Any = envs.step(actions)
        found.step(actions, *result)
        done = result[2] | result[3]
        if mode is AutoresetMode.DISABLED and done.any():
            observations, _ = envs.reset(options={"reset_mask": done})
            found.restart(observations, done)
        if t % 2:
            stream.add(**found.take())
    return stream.window(0, stream.clock)


def rows_of(window: Window, env: int, count: int) -> dict[str, Any]:
    mine = np.flatnonzero(window.observations[:, 0] == env)[:count]
    return {name: getattr(window, name)[mine] for name in NAMES}


def test_all_modes_give_equal_streams() -> None:
    """In the next-step mode resets take vector steps, and the actions of t are others."""
    same, next_step, by_hand = (
        played(mode, 30)
        for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)
    )
    for env in range(2):
        count = int((next_step.observations[:, 0] == env).sum())
        assert 10 < count < 30
        expected = rows_of(same, env, count)
        for other in (next_step, by_hand):
            found = rows_of(other, env, count)
            for name in NAMES:
                if name != "actions" or other is by_hand:
                    np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_rows_are_those_of_the_script(mode: AutoresetMode) -> None:
    window = played(mode, 16)
    who, episode, step = window.observations.T
    np.testing.assert_array_equal(window.following[:, 2], step + 1)  # never the next episode's
    np.testing.assert_array_equal(window.following[:, 1], episode)
    np.testing.assert_array_equal(window.rewards, step + 1)
    np.testing.assert_array_equal(window.step, step)
    for env, episodes in enumerate(SCRIPTS):
        for number, marks in enumerate(episodes):
            rows = (who == env) & (episode == number)
            ended = [mark in "TCB" for mark in marks][: rows.sum()]
            assert window.ended[rows].tolist() == ended


def test_misuse_is_named() -> None:
    envs = SyncVectorEnv([partial(ScriptedEnv, script("T"))], autoreset_mode="Disabled")
    found = VectorSteps(envs)
    with pytest.raises(RuntimeError, match="call restart"):
        found.step(*(np.zeros(1),) * 5, {})
    with pytest.raises(RuntimeError, match="no steps since"):
        found.take()
    found.restart(envs.reset()[0])
    found.step(np.zeros(1), *envs.step(np.zeros(1, dtype=int)))
    with pytest.raises(RuntimeError, match=r"sub-envs \[0\] have ended: reset them"):
        found.step(*(np.zeros(1),) * 5, {})
    same = SyncVectorEnv([partial(ScriptedEnv, script("T"))], autoreset_mode="SameStep")
    steps = VectorSteps(same)
    steps.restart(same.reset()[0])
    seen, rewards, ended, cut, _ = same.step(np.zeros(1, dtype=int))
    with pytest.raises(ValueError, match="infos have no final_obs"):
        steps.step(np.zeros(1), seen, rewards, ended, cut, {})


def test_the_recorder_hands_over_what_is_held_out() -> None:
    free = FreeEvaluation(4, horizon=500)
    envs = FreeRecorder(gym.make_vec("CartPole-v1", 4), free, held_out=0.5)
    rng = np.random.default_rng(0)
    for policy in (Uniform(2), LinearSigmoid(np.zeros(4))):
        collect(envs, policy, 20, rng, seed=1)
    envs.follow(Uniform(2))
    window = free.stream.window(0, free.stream.clock)
    held_out = envs.buffer.select(held_out=True)
    assert int(window.ended.sum()) == len(held_out) == 20
    assert window.size == held_out.n_steps
    assert free.evaluate() is not None


def test_tuples_become_columns() -> None:
    free = FreeEvaluation(2, horizon=100)
    envs = FreeRecorder(gym.make_vec("Blackjack-v1", 2), free)
    collect(envs, Uniform(2), 6, np.random.default_rng(0), seed=1)
    envs.follow(Uniform(2))
    assert free.stream.window(0, free.stream.clock).observations.shape[1:] == (3,)
