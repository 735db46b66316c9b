"""Recording a single environment."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

import wrappers.recording.single
from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import PropensityMismatch, Trajectories
from ope_gym.policies import LinearSigmoid, Uniform
from tests.scripted_envs import BOX, Constant, ScriptedEnv, reused, script
from wrappers import RecordTrajectories

EPISODES = script("..T", "C", ".B")
SIGMOID = LinearSigmoid(np.array([0.1, -0.2, 0.3]), 0.05)


def recorder(env: gym.Env[Any, Any] | None = None, **settings: Any) -> RecordTrajectories:
    """Return a recorder that follows a policy, by default around the usual script."""
    recording = RecordTrajectories(ScriptedEnv(EPISODES) if env is None else env, **settings)
    recording.follow(SIGMOID)
    return recording


def play(
    env: RecordTrajectories,
    episodes: int,
    log_prob: Callable[[int], SupportsFloat | None] | None = None,
) -> None:
    """Play whole episodes; actions and log-probabilities depend on the clock alone."""
    for _ in range(episodes):
        env.reset()
        over = False
        while not over:
            t = env.clock
            given = None if log_prob is None else log_prob(t)
            _, _, terminated, truncated, _ = env.step(t % 2, given)
            over = terminated or truncated


def seen(who: float, *steps: tuple[int, int]) -> NDArray[np.float32]:
    return np.array([(who, episode, step) for episode, step in steps], dtype=np.float32)


# What is recorded -----------------------------------------------------------------------------


def test_every_column() -> None:
    env = recorder()
    play(env, 3)
    data = env.buffer.view()
    expected = seen(0, (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))
    assert_array_equal(data.observations, expected)
    assert data.observations.dtype == np.float32
    assert_array_equal(data.actions, [0, 1, 0, 1, 0, 1])
    assert_array_equal(data.rewards, [1, 2, 3, 1, 1, 2])
    assert_array_equal(data.offsets, [0, 3, 4, 6])
    assert_array_equal(data.terminated, [True, False, True])
    assert_array_equal(data.truncated, [False, True, True])  # the last one is both
    assert_array_equal(data.held_out, [False] * 3)
    assert_array_equal(data.start_clock, [0, 3, 4])
    assert_array_equal(data.schedule_ids, [-1] * 3)
    assert_array_equal(data.policy_ids, [0] * 6)
    assert_array_equal(data.log_probs, SIGMOID.log_prob(expected, data.actions))
    assert data.policies == (SIGMOID,)
    assert data.observation_space == BOX
    assert data.action_space == spaces.Discrete(2)
    data.audit()


@pytest.mark.parametrize("made", [None, 7])
def test_the_time_limit_is_the_horizon(made: int | None) -> None:
    env = recorder(gym.make("CartPole-v1", max_episode_steps=made))
    assert env.buffer.horizon == (500 if made is None else made)
    assert recorder().buffer.horizon is None


def test_arrays_that_are_overwritten_later_are_recorded_as_they_were() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    env = RecordTrajectories(ScriptedEnv(EPISODES, action_space=space, observe=reused()))
    env.follow(Constant())
    action = np.zeros(2, dtype=np.float32)
    observation, _ = env.reset()
    for t in range(3):
        action[:] = t / 10
        observation, *_ = env.step(action)
        observation[:] = -1
        action[:] = -1
    data = env.buffer.view()
    # the loop may overwrite the array; the record keeps what the env gave
    assert_array_equal(data.observations, seen(0, (0, 0), (0, 1), (0, 2)))
    assert_array_equal(data.actions, np.array([[0, 0], [0.1, 0.1], [0.2, 0.2]], dtype=np.float32))


@pytest.mark.parametrize("odd", [4, (1, 2), (1, 3)])
def test_observations_may_change_their_dtype_but_not_their_shape(odd: Any) -> None:
    def observe(who: int, episode: int, step: int) -> Any:
        if episode == 1 and step == 1:
            return np.zeros(odd)
        return np.array([who, episode, step + 0.5 if step else 0])  # integers at first

    env = recorder(ScriptedEnv(script("..T", "..T", "..T"), observe=observe))
    play(env, 3)
    with pytest.raises(ValueError, match="the episode was dropped, not recorded"):
        len(env.buffer)
    assert (env.dropped_episodes, env.dropped_steps) == (1, 3)
    expected = [[0, 0, 0], [0, 0, 1.5], [0, 0, 2.5], [0, 2, 0], [0, 2, 1.5], [0, 2, 2.5]]
    assert_array_equal(env.buffer.view().observations, expected)


@pytest.mark.parametrize(("first", "odd"), [((3,), (4,)), ((2, 3), (3, 2)), ((), (1,))])
def test_observations_of_a_wrong_shape_are_an_error(
    first: tuple[int, ...], odd: tuple[int, ...]
) -> None:
    def observe(who: int, episode: int, step: int) -> NDArray[np.float64]:
        wrong = odd if (episode, step) == (1, 1) else first
        return np.arange(math.prod(wrong), dtype=np.float64).reshape(wrong) + step

    space = spaces.Box(-9, 9, first, np.float64)
    env = RecordTrajectories(ScriptedEnv(script("..T"), observation_space=space, observe=observe))
    env.follow(Constant())
    play(env, 3)
    with pytest.raises(ValueError, match="the episode was dropped, not recorded"):
        len(env.buffer)
    data = env.buffer.view()
    assert_array_equal(data.observations, [observe(0, 0, t) for t in [0, 1, 2] * 2])


def test_a_buffer_shows_episodes_that_end_after_it_was_taken() -> None:
    env = recorder()
    buffer = env.buffer
    for n in range(1, 5):
        play(env, 1)
        assert len(buffer) == n
        assert len(buffer.view()) == n
    play(env, 1)
    env.reset()
    env.step(0)
    assert len(buffer) == 5  # the open episode continues
    buffer.clear()
    env.step(0)
    assert_array_equal(buffer.view().observations, seen(0, (5, 0), (5, 1)))


def test_a_buffer_can_be_extended_with_other_trajectories() -> None:
    env, other = recorder(), recorder()
    play(other, 2)
    play(env, 1)
    env.buffer.extend(other.buffer)
    play(env, 1)
    assert_array_equal(env.buffer.view().lengths, [3, 3, 1, 1])


def test_finished_episodes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers.recording.single, "_WAITING_STEPS", 4)
    env = recorder()
    play(env, 3)
    assert TrajectoryBuffer.__len__(env.buffer) == 2
    assert_array_equal(env.buffer.view().lengths, [3, 1, 2])


EXOTIC: dict[str, tuple[gym.Space[Any], Callable[[int], Any]]] = {
    "Discrete": (spaces.Discrete(9, start=-4), lambda t: t - 4),
    "MultiDiscrete": (spaces.MultiDiscrete([9, 9]), lambda t: np.array([t, 8 - t])),
    "MultiBinary": (spaces.MultiBinary(3), lambda t: np.array([t % 2, 1, 0], dtype=np.int8)),
    "image": (spaces.Box(0, 255, (4, 4, 3), np.uint8), lambda t: np.full((4, 4, 3), t, np.uint8)),
    "Tuple": (
        spaces.Tuple([spaces.Discrete(9), spaces.Box(0, 9, (2,), np.float64)]),
        lambda t: (t, np.array([t, t + 0.5])),
    ),
    "Dict": (
        spaces.Dict(b=spaces.Discrete(9), a=spaces.Dict(word=spaces.Text(9))),
        lambda t: {"b": np.int64(t), "a": {"word": "x" * (t + 1)}},
    ),
    "Text": (spaces.Text(9), lambda t: "y" * (t + 1)),
    "Sequence": (
        spaces.Sequence(spaces.Discrete(9)),
        lambda t: tuple(np.int64(i) for i in range(t)),
    ),
    "Graph": (
        spaces.Graph(spaces.Box(0, 9, (1,), np.float32), None),
        lambda t: spaces.GraphInstance(np.full((t + 1, 1), t, np.float32), None, None),
    ),
    "OneOf": (
        spaces.OneOf([spaces.Discrete(9), spaces.Text(9)]),
        lambda t: (np.int64(0), np.int64(t)) if t % 2 else (np.int64(1), "z" * (t + 1)),
    ),
}


def same(a: Any, b: Any) -> bool:
    """Return whether two elements of any space are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or bool(np.all(a == b))


def row(tree: Tree, i: int) -> Any:
    return batches.map_leaves(lambda leaf: leaf[i], tree)


# Probabilities --------------------------------------------------------------------------------


@dataclass(eq=False)
class Asked:
    """Policy that counts the batches it computes log-probabilities for."""

    batches: list[int] = field(default_factory=list)

    def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
        self.batches.append(len(actions))
        return np.full(len(actions), -0.7)

    def sample(self, observations: Tree, rng: np.random.Generator) -> Any:
        raise NotImplementedError


@dataclass(eq=False)
class Failing(Asked):
    """Policy that fails where it sees a certain observation."""

    at: tuple[int, int] = (1, 0)  # episode, step

    def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
        if (observations[:, 1:] == self.at).all(axis=1).any():
            raise OSError("the server is away")
        return super().log_prob(observations, actions)


@pytest.mark.filterwarnings("ignore:Failing is not registered")
@pytest.mark.parametrize("stored", [False, True])
def test_a_policy_that_fails_in_the_audit_loses_one_episode(stored: bool, tmp_path: Path) -> None:
    path = tmp_path / "episodes" if stored else None
    env = RecordTrajectories(ScriptedEnv(EPISODES), path=path)
    env.follow(Failing())
    play(env, 1, lambda t: -0.7)
    env.reset()
    with pytest.raises(RuntimeError, match="the server is away; the episode was dropped") as caught:
        env.step(0, -0.7)  # the step that ends the episode
    assert isinstance(caught.value.__cause__, OSError)
    assert (env.dropped_episodes, env.dropped_steps) == (1, 1)
    play(env, 1, lambda t: -0.7)
    assert_array_equal(env.buffer.view().lengths, [3, 2])
    env.close()
    if path is not None:
        assert_array_equal(Trajectories.load(path).lengths, [3, 2])


def test_given_log_probs_are_kept_as_they_are() -> None:
    env = RecordTrajectories(ScriptedEnv(EPISODES))
    env.follow(Constant(-0.5))
    play(env, 3, lambda t: None if t in (1, 3) else np.float32(-0.5 + 1e-5 * t))
    expected = [-0.5 if t in (1, 3) else float(np.float32(-0.5 + 1e-5 * t)) for t in range(6)]
    assert_array_equal(env.buffer.view().log_probs, expected)


def test_a_mismatch_is_raised_at_the_end_of_its_episode() -> None:
    env = RecordTrajectories(ScriptedEnv(EPISODES))
    env.follow(Constant(-0.5))
    play(env, 1, lambda t: -0.5)
    env.reset()
    with pytest.raises(PropensityMismatch) as caught:
        env.step(0, -0.6)
    message = str(caught.value)
    for part in ("episode 1, step 0", "-0.6", "-0.5", "policy 0, Constant", "1 of 1 steps"):
        assert part in message
    assert "dropped, not recorded" in message
    assert (caught.value.episode, caught.value.step) == (1, 0)
    assert (env.dropped_episodes, env.dropped_steps) == (1, 1)
    with pytest.raises(ResetNeeded):
        env.step(0)
    play(env, 1, lambda t: -0.5)  # the recorder stays usable
    assert_array_equal(env.buffer.view().lengths, [3, 2])
    assert_array_equal(env.buffer.view().start_clock, [0, 4])


def test_a_mismatch_leaves_waiting_episodes_alone() -> None:
    env = RecordTrajectories(ScriptedEnv(EPISODES))
    env.follow(Constant(-0.5))
    play(env, 2)  # these wait
    with pytest.raises(PropensityMismatch, match=r"episode 2, step 1: .*1 of 2 steps"):
        play(env, 1, lambda t: -0.5 if t == 4 else -0.8)
    assert_array_equal(env.buffer.view().lengths, [3, 1])


def test_without_an_audit_given_log_probs_are_not_compared() -> None:
    env = RecordTrajectories(ScriptedEnv(EPISODES), audit=False)
    policy = Asked()
    env.follow(policy)
    play(env, 1, lambda t: -0.1 * (t + 1))
    assert_array_equal(env.buffer.view().log_probs, [-0.1, -0.2, -0.1 * 3])
    assert policy.batches == []
    with pytest.raises(PropensityMismatch):
        env.buffer.audit()


def test_log_probs_of_a_wrong_shape_are_an_error() -> None:
    @dataclass(frozen=True)
    class Scalar(Constant):
        def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
            return np.zeros((len(actions), 1))

    env = RecordTrajectories(ScriptedEnv(EPISODES))
    env.follow(Scalar())
    play(env, 1)
    with pytest.raises(
        ValueError, match=r"policy 0: log_prob gave shape \(3, 1\) instead of \(3,\)"
    ):
        env.buffer.view()


def test_a_reward_of_nan_is_an_error() -> None:
    class Broken(ScriptedEnv):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return (observation, math.nan if self._episode == 1 else np.float32(reward), *rest)

    env = recorder(Broken(EPISODES))
    play(env, 3)
    with pytest.raises(ValueError, match=r"rewards is nan.*was dropped, not recorded"):
        env.buffer.view()
    assert_array_equal(env.buffer.view().rewards, [1, 2, 3, 1, 2])


# Who acts -------------------------------------------------------------------------------------


def test_a_policy_that_changes_inside_an_episode() -> None:
    env = recorder()
    play(env, 2)  # they ended before the change, and still follow the schedule
    env.reset()  # clock 4
    env.step(0)
    assert env.follow(Constant(-0.25)) == 1
    env.step(1)
    data = env.buffer.view()
    assert_array_equal(data.policy_ids, [0, 0, 0, 0, 0, 1])
    assert_array_equal(data.schedule_ids, [0, 0, 0])
    assert_array_equal(data.start_clock, [0, 3, 4])
    assert_array_equal(data.schedules[0].clocks, [0, 5])
    assert_array_equal(data.schedules[0].policies, [0, 1])
    assert data.log_probs[-1] == -0.25
    data.audit(1e-12)


def test_a_step_before_follow_is_an_error() -> None:
    env = RecordTrajectories(ScriptedEnv(EPISODES))
    env.reset()
    with pytest.raises(RuntimeError, match=r"call follow\(policy\) before the first step"):
        env.step(0)
    env.follow(SIGMOID)  # after the reset is early enough
    for t in range(3):
        env.step(t % 2)
    assert len(env.buffer) == 1
    with pytest.raises(TypeError, match="log_prob and sample"):
        env.follow("a policy")  # type: ignore[arg-type]


# Held out -------------------------------------------------------------------------------------


def held_out_by_definition(n: int, share: float) -> list[bool]:
    return [math.floor((i + 1) * share) > math.floor(i * share) for i in range(n)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.7, 1.0])
def test_the_number_of_an_episode_decides_whether_it_is_held_out(share: float) -> None:
    env = recorder(held_out=share)
    told = []
    for _ in range(40):
        env.reset()
        env.reset()  # begins no episode of its own
        told.append(env.held_out)
        while not any(env.step(0)[2:4]):
            assert env.held_out == told[-1]
        assert env.held_out == told[-1]  # after its end it describes the last episode
    assert told == held_out_by_definition(40, share)
    assert_array_equal(env.buffer.view().held_out, told)
    assert sum(told) == math.floor(40 * share)


def test_dropped_episodes_keep_their_number() -> None:
    env = recorder(ScriptedEnv(script("..T")), held_out=0.5)
    play(env, 1)
    env.reset()
    assert env.held_out
    env.step(0)
    env.abandon()
    env.reset()
    assert not env.held_out
    play(env, 2)
    assert_array_equal(env.buffer.view().held_out, [False, False, True])


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan, None])
def test_held_out_must_be_a_share(share: float | None) -> None:
    with pytest.raises(ValueError, match=f"held_out={share}"):
        recorder(held_out=share)


# The same run with and without ----------------------------------------------------------------


def run(env: gym.Env[Any, Any], log_prob: float | None = None) -> list[Any]:
    """Return all that a seeded run yields, and the state of its random generator at the end."""
    given = {} if log_prob is None else {"log_prob": log_prob}
    found: list[Any] = [env.reset(seed=3)]
    rng = np.random.default_rng(4)
    for i in range(300):
        found.append(env.step(int(rng.integers(2)), **given))
        if found[-1][2] or found[-1][3]:
            found.append(env.reset(options={"low": -0.01, "high": 0.01} if i % 2 else None))
    found.append((env.unwrapped.np_random.bit_generator.state, {}))
    return found


@pytest.mark.parametrize("log_prob", [None, math.log(0.5)])
def test_recording_changes_nothing_for_the_loop(log_prob: float | None, tmp_path: Path) -> None:
    bare = run(gym.make("CartPole-v1"))
    env = RecordTrajectories(gym.make("CartPole-v1"), held_out=0.3, path=tmp_path / "episodes")
    env.follow(Uniform(2))
    recorded = run(env, log_prob)
    assert len(bare) == len(recorded)
    for a, b in zip(bare, recorded, strict=True):
        assert pickle.dumps(a) == pickle.dumps(b)
    rewards = np.concatenate([[x[1] for x in bare if len(x) == 5]])
    env.close()
    data = env.buffer.view()
    assert_array_equal(data.rewards, rewards[: data.n_steps])


def test_seeds_and_options_reach_the_environment_as_they_are() -> None:
    inner = ScriptedEnv(EPISODES)
    env = recorder(inner)
    options = {"a": 1}
    env.reset()
    env.reset(seed=5, options=options)
    assert inner.resets == [(None, None), (5, options)]
    assert inner.resets[1][1] is options


# Unfinished episodes and errors ---------------------------------------------------------------


def test_a_reset_in_the_middle_warns_once_and_counts() -> None:
    env = recorder()
    env.reset()
    env.step(0)
    env.step(0)
    with pytest.warns(UserWarning, match="1 unfinished episode.* of 2 steps") as caught:
        env.reset()
    assert caught[0].filename == __file__
    while not any(env.step(0)[2:4]):
        pass
    env.reset()
    env.step(0)
    env.reset()  # unfinished again, but the warning comes only once
    assert (env.dropped_episodes, env.dropped_steps) == (2, 3)
    assert_array_equal(env.buffer.view().start_clock, [2])
    assert_array_equal(env.buffer.view().truncated, [True])


def test_a_step_before_reset_or_after_the_end_is_an_error() -> None:
    env = recorder()
    with pytest.raises(ResetNeeded):
        env.step(0)
    play(env, 1)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(0)
    assert env.clock == 3
    env.reset()


def test_an_environment_that_raises_leaves_the_buffer_whole() -> None:
    env = recorder(ScriptedEnv(script("..T", "...T", ".T"), broken_at=(1, 1)))
    play(env, 1)
    env.reset()
    env.step(0)
    with pytest.raises(OSError, match="gone"):
        env.step(1)
    assert len(env.buffer) == 1
    # as in the bare environment the loop may go on, but these steps are not recorded
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]
    assert (env.dropped_episodes, env.dropped_steps) == (1, 1)
    with pytest.raises(ResetNeeded):
        env.step(0)
    play(env, 1)
    data = env.buffer.view()
    assert_array_equal(data.lengths, [3, 2])
    assert_array_equal(data.start_clock, [0, 7])
    assert_array_equal(data.observations[3:, 1], [2, 2])


def test_a_reset_that_raises_drops_the_open_episode() -> None:
    class Once(ScriptedEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if options == "fail":
                raise OSError("gone")
            return super().reset(seed=seed, options=options)

    env = recorder(Once(EPISODES))
    env.reset()
    env.step(0)
    with pytest.warns(UserWarning, match="unfinished"), pytest.raises(OSError, match="gone"):
        env.reset(options="fail")  # type: ignore[arg-type]
    with pytest.raises(ResetNeeded):
        env.step(0)
    play(env, 1)
    assert len(env.buffer) == 1


def test_a_log_prob_that_is_not_a_number_drops_the_episode() -> None:
    env = recorder()
    env.reset()
    env.step(0)
    with pytest.raises(TypeError):
        env.step(0, ())  # type: ignore[arg-type]
    env.step(0)
    assert len(env.buffer) == 0
    assert env.dropped_steps == 1


def test_an_interrupt_while_episodes_are_handed_over_loses_nothing() -> None:
    @dataclass(eq=False)
    class Interrupted(Asked):
        def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
            if not self.batches:
                self.batches.append(0)
                raise KeyboardInterrupt
            return super().log_prob(observations, actions)

    env = RecordTrajectories(ScriptedEnv(EPISODES))
    env.follow(Interrupted())
    play(env, 3)
    with pytest.raises(KeyboardInterrupt):
        env.buffer.view()
    assert_array_equal(env.buffer.view().lengths, [3, 1, 2])


# Gymnasium's rules ----------------------------------------------------------------------------


def test_rebuilt_from_its_spec(tmp_path: Path) -> None:
    env = RecordTrajectories(
        gym.make("CartPole-v1"),
        held_out=0.25,
        path=tmp_path / "episodes",
        append=True,
        audit=False,
    )
    spec = env.spec
    assert spec is not None
    (wrapper,) = (w for w in spec.additional_wrappers if w.name == "RecordTrajectories")
    path = str(tmp_path / "episodes")
    assert wrapper.kwargs == {"held_out": 0.25, "path": path, "append": True, "audit": False}
    for again in (spec, EnvSpec.from_json(spec.to_json())):
        rebuilt = gym.make(again)
        assert isinstance(rebuilt, RecordTrajectories)
        assert rebuilt.spec == spec
        rebuilt.follow(Uniform(2))
        play(rebuilt, 4)
        assert rebuilt.buffer.view().held_out.sum() == 1
        rebuilt.close()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_record_independently(duplicate: Callable[[Any], Any], tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = RecordTrajectories(gym.make("CartPole-v1"), path=path)
    env.follow(Uniform(2))
    play(env, 2)
    env.reset(seed=1)
    env.step(1)
    other = duplicate(env)
    lengths = []
    for each in (env, other):
        while not any(each.step(1)[2:4]):
            pass
        each.close()  # the file has one writer at a time
        lengths.append(each.buffer.view().lengths)
    assert len(lengths[0]) == 3
    assert_array_equal(lengths[0], lengths[1])
    assert_array_equal(Trajectories.load(path).lengths, [*lengths[0], lengths[0][-1]])


def test_a_buffer_can_be_pickled_by_itself() -> None:
    env = recorder()
    play(env, 2)
    buffer = pickle.loads(pickle.dumps(env.buffer))
    play(env, 1)
    assert (len(buffer), len(env.buffer)) == (2, 3)


def test_a_vector_env_is_refused() -> None:
    with pytest.raises(TypeError, match=r"wrappers\.vector\.RecordTrajectories"):
        RecordTrajectories(gym.make_vec("CartPole-v1", num_envs=2))  # type: ignore[arg-type]


def test_an_episode_begun_exactly_a_horizon_ago_is_settled() -> None:
    env = wrappers.RecordTrajectories(ScriptedEnv(script("...T")))
    env.follow(Uniform(2))
    play(env, 2)
    assert env.clock == 8
    assert env.settled(4).start_clock.tolist() == [0, 4]
    assert env.settled(5).start_clock.tolist() == [0]
