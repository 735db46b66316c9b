"""Playing a number of episodes with either recorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

import wrappers
import wrappers.vector
from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data.spaces import stack
from ope_gym.policies import DiagonalGaussian, LinearSigmoid, Uniform
from tests.scripted_envs import Constant, ScriptedEnv, script
from tests.test_record import EXOTIC
from wrappers import collect

MODES = list(AutoresetMode)
SCRIPTS = [script("..T", "C", ".B"), script("." * 30 + "T"), script("T")]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def vector(mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> wrappers.vector.RecordTrajectories:
    envs = [partial(ScriptedEnv, episodes, who=who) for who, episodes in enumerate(SCRIPTS)]
    return wrappers.vector.RecordTrajectories(SyncVectorEnv(envs, autoreset_mode=mode))


def test_a_single_environment() -> None:
    env = wrappers.RecordTrajectories(ScriptedEnv(SCRIPTS[0]))
    told: list[int] = []
    assert collect(env, Uniform(2), 4, rng(), on_episode=told.append) == 0
    assert told == [1, 2, 3, 4]
    assert collect(env, Constant(), 1, rng()) == 1
    assert collect(env, Uniform(2), 1, rng()) == 0
    data = env.buffer.view()
    assert_array_equal(data.lengths, [3, 1, 2, 3, 1, 2])
    assert_array_equal(data.policy_ids[data.offsets[:-1]], [0, 0, 0, 0, 1, 0])
    assert data.schedules == ()
    assert env.dropped_episodes == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("episodes", "shares"), [(7, [3, 2, 2]), (2, [1, 1, 0]), (3, [1, 1, 1])])
def test_every_sub_env_plays_its_share(
    mode: AutoresetMode, episodes: int, shares: list[int]
) -> None:
    env = vector(mode)
    told: list[int] = []
    for k, policy in enumerate((Uniform(2), Constant())):
        assert collect(env, policy, episodes, rng(), on_episode=told.append) == k
    assert told == [*range(1, episodes + 1)] * 2
    data = env.buffer.view()
    assert len(data) == 2 * episodes
    for k in range(2):
        who = data.select(policies=k).observations[data.select(policies=k).offsets[:-1], 0]
        assert_array_equal(np.bincount(who.astype(int), minlength=3), shares)
    assert data.schedules == ()  # no policy has changed inside an episode
    assert env.dropped_episodes == 0


def test_the_autoreset_mode_may_be_a_string() -> None:
    env = vector(AutoresetMode.DISABLED)
    env.env.metadata = {"autoreset_mode": AutoresetMode.DISABLED.value}
    again = wrappers.vector.RecordTrajectories(env.env)
    collect(again, Uniform(2), 7, rng())
    assert len(again.buffer) == 7


@pytest.mark.parametrize("mode", MODES)
def test_long_episodes_are_not_left_out(mode: AutoresetMode) -> None:
    """Play fixed shares: the first three to end would come from the quick sub-envs."""
    env = vector(mode)
    collect(env, Uniform(2), 3, rng())
    assert_array_equal(np.sort(env.buffer.view().lengths), [1, 3, 31])


def test_held_out_shares_are_exact_in_every_call() -> None:
    """Give no numbers to extra episodes of sub-envs that have played their share."""
    envs = gym.make_vec("CartPole-v1", 4)
    env = wrappers.vector.RecordTrajectories(envs, held_out=0.25)
    for k in range(5):
        assert collect(env, LinearSigmoid(np.full(4, 0.1 * k)), 8, rng()) == k
        assert env.buffer.select(policies=k).held_out.sum() == 2


@pytest.mark.parametrize("kind", ["single", "vector"])
def test_an_open_episode_is_dropped_without_a_warning(kind: str) -> None:
    env: Any = vector()
    action: Any = np.zeros(3, dtype=int)
    if kind == "single":
        env, action = wrappers.RecordTrajectories(ScriptedEnv(SCRIPTS[0])), 0
    env.follow(Uniform(2))
    env.reset()
    env.step(action)
    assert collect(env, Constant(), 3, rng()) == 1
    assert len(env.buffer.select(policies=1)) == 3
    assert env.dropped_episodes == (1 if kind == "single" else 2)
    assert env.buffer.view().schedules == ()


def test_afterwards_everything_is_recorded_again() -> None:
    env = vector()
    collect(env, Uniform(2), 2, rng())
    for _ in range(40):
        env.step(np.zeros(3, dtype=int))  # episodes that are under way are not recorded
    data = env.buffer.view()
    assert len(data) > 10
    assert (data.observations[data.offsets[:-1], 2] == 0).all()


@pytest.mark.parametrize("kind", ["single", "vector"])
def test_the_same_seeds_give_the_same_episodes(kind: str) -> None:
    found = []
    for seed in (5, 5, 6):
        env: Any
        if kind == "single":
            env = wrappers.RecordTrajectories(gym.make("CartPole-v1"))
        else:
            env = wrappers.vector.RecordTrajectories(gym.make_vec("CartPole-v1", 3))
        collect(env, LinearSigmoid(np.array([0.0, 0.5, 1.0, 1.0])), 5, rng(), seed=seed)
        found.append(env.buffer.view())
    assert len(found[0]) == 5
    assert_array_equal(found[0].observations, found[1].observations)
    assert found[0].n_steps != found[2].n_steps or (found[0].actions != found[2].actions).any()
    found[0].audit(1e-12)


def test_the_mean_return_is_that_of_single_episodes() -> None:
    policy = LinearSigmoid(np.array([0.0, 0.5, 1.0, 1.0]))
    means, errors = [], []
    for inner, n in ((gym.make_vec("CartPole-v1", 30), 400), (None, 100)):
        env: Any = (
            wrappers.RecordTrajectories(gym.make("CartPole-v1"))
            if inner is None
            else wrappers.vector.RecordTrajectories(inner)
        )
        collect(env, policy, n, rng(), seed=1)
        returns = env.buffer.view().returns()
        means.append(returns.mean())
        errors.append(returns.std() / np.sqrt(n))
    assert abs(means[0] - means[1]) < 4 * np.hypot(*errors)


def test_actions_in_the_precision_of_the_environment() -> None:
    policy = DiagonalGaussian(np.full((1, 3), 0.1), np.zeros(1), np.zeros(1))
    single = wrappers.RecordTrajectories(gym.make("Pendulum-v1", max_episode_steps=4))
    several = wrappers.vector.RecordTrajectories(
        gym.make_vec("Pendulum-v1", 2, "sync", max_episode_steps=4)
    )
    for env in (single, several):
        collect(env, policy, 2, rng(), seed=1)
        data = env.buffer.view()
        assert data.actions.dtype == np.float32
        data.audit(1e-12)


@dataclass(frozen=True)
class Repeats(Constant):
    """Policy over any action space that insists on batches as they are recorded."""

    element: Callable[[int], Any] | None = None
    space: gym.Space[Any] | None = None

    def sample(self, observations: Tree, rng: np.random.Generator) -> Any:
        n = batches.length(observations)  # raises if they are not a batch
        return stack(self.space, [self.element(i + 1) for i in range(n)])  # type: ignore[misc]


@pytest.mark.parametrize("name", EXOTIC)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_any_space(name: str, mode: AutoresetMode | None) -> None:
    space, element = EXOTIC[name]

    def make() -> gym.Env[Any, Any]:
        return ScriptedEnv(
            script("..T", "C"),
            observation_space=space,
            action_space=space,
            observe=lambda who, episode, step: element(step),
        )

    env: Any = (
        wrappers.RecordTrajectories(make())
        if mode is None
        else wrappers.vector.RecordTrajectories(SyncVectorEnv([make] * 2, autoreset_mode=mode))
    )
    collect(env, Repeats(-0.5, element, space), 4, rng())
    assert_array_equal(np.sort(env.buffer.view().lengths), [1, 1, 3, 3])


def test_a_policy_that_fails_leaves_the_recorder_usable() -> None:
    class Tired:
        asked = 0

        def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
            return np.full(len(actions), -0.5)

        def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[np.int64]:
            self.asked += 1
            if self.asked == 3:
                raise KeyboardInterrupt
            return rng.integers(2, size=len(observations))

    for env in (vector(), wrappers.RecordTrajectories(ScriptedEnv(SCRIPTS[1]))):
        with pytest.raises(KeyboardInterrupt):
            collect(env, Tired(), 3, rng())
        n = len(env.buffer)
        collect(env, Uniform(2), 4, rng())
        assert len(env.buffer) == n + 4


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="not a recorder"):
        collect(ScriptedEnv(SCRIPTS[0]), Uniform(2), 1, rng())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"episodes has shape \(2,\), expected \(3,\)"):
        vector().limit([1, 2])


def test_spaces_of_the_recorder_are_those_of_one_environment() -> None:
    env = vector()
    assert env.buffer.action_space == spaces.Discrete(2)
