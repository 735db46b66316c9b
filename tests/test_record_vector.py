"""Recording vector environments, the twin of the recorder of single environments."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

import wrappers
import wrappers.recording.rows
from ope_gym.batches import Tree
from ope_gym.data.trajectories import PropensityMismatch, Trajectories
from ope_gym.policies import LinearSigmoid, Uniform
from tests.scripted_envs import Constant, ScriptedEnv, reused, script
from tests.test_record import EXOTIC, held_out_by_definition, row, same
from wrappers.recording.autoreset import AUTORESETS
from wrappers.vector import RecordTrajectories

MODES = list(AutoresetMode)
TWINS = [None, *MODES]  # None is the recorder of a single env
SIGMOID = LinearSigmoid(np.array([0.1, -0.2, 0.3]), 0.05)
SCRIPTS = [script("..T", "C", ".B"), script(".....C", "T"), script("T", "...T", "T", ".C")]


def sync(
    scripts: Sequence[Sequence[str]] = SCRIPTS,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    **settings: Any,
) -> SyncVectorEnv:
    def make(who: int) -> Callable[[], gym.Env[Any, Any]]:
        return lambda: ScriptedEnv(scripts[who], who=who, observe=reused(), **settings)

    envs = [make(who) for who in range(len(scripts))]
    return SyncVectorEnv(envs, copy=False, autoreset_mode=mode)


def recorder(env: VectorEnv[Any, Any, Any] | None = None, **settings: Any) -> RecordTrajectories:
    recording = RecordTrajectories(sync() if env is None else env, **settings)
    recording.follow(SIGMOID)
    return recording


def drive(
    env: VectorEnv[Any, Any, Any],
    steps: int,
    actions: Callable[[int], Any] | None = None,
    log_prob: Callable[[int], Any] | None = None,
) -> None:
    """Take vector steps; in the disabled mode, reset sub-envs that have ended by hand."""
    by_hand = env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    for t in range(steps):
        action = np.full(env.num_envs, t % 2) if actions is None else actions(t)
        given = {} if log_prob is None else {"log_prob": log_prob(t)}
        _, _, terminations, truncations, _ = env.step(action, **given)
        if by_hand and (terminations | truncations).any():
            env.reset(options={"reset_mask": terminations | truncations})


def by_sub_env(data: Trajectories) -> dict[int, list[tuple[Any, ...]]]:
    """Return observations (episode, step), rewards and ends of each sub-env in order."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for i in range(len(data)):
        rows = slice(data.offsets[i], data.offsets[i + 1])
        seen = data.observations[rows]
        assert (seen[:, 0] == seen[0, 0]).all()
        found.setdefault(int(seen[0, 0]), []).append(
            (
                seen[:, 1:].tolist(),
                data.rewards[rows].tolist(),
                bool(data.terminated[i]),
                bool(data.truncated[i]),
            )
        )
    return found


# What is recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_twins_record_the_same(mode: AutoresetMode) -> None:
    env = recorder(sync(mode=mode))
    env.reset()
    drive(env, 40)
    data = env.buffer.view()
    found = by_sub_env(data)
    for who, episodes in enumerate(SCRIPTS):
        single = wrappers.RecordTrajectories(ScriptedEnv(episodes, who=who))
        single.follow(SIGMOID)
        for _ in range(len(found[who])):
            single.reset()
            while not any(single.step(0)[2:4]):
                pass
        assert found[who] == by_sub_env(single.buffer.view())[who]
    # only the unfinished episode of each sub-env is missing
    resets = 1 if mode is AutoresetMode.NEXT_STEP else 0
    for who, episodes in enumerate(SCRIPTS):
        lengths = [len(episodes[i % len(episodes)]) + resets for i in range(60)]
        assert len(found[who]) == int((np.cumsum(lengths) - resets <= 40).sum())
    data.audit(1e-12)
    assert_array_equal(data.actions, (data.start_clock[data.episode_ids] + data.steps) % 2)
    assert_array_equal(data.schedule_ids, np.full(len(data), -1))


@pytest.mark.parametrize(
    ("mode", "starts", "order"),
    [
        (AutoresetMode.NEXT_STEP, [0, 0, 4, 0, 2], [2, 0, 0, 1, 2]),
        (AutoresetMode.SAME_STEP, [0, 0, 3, 1, 4, 0, 5], [2, 0, 0, 2, 0, 1, 2]),
        (AutoresetMode.DISABLED, [0, 0, 3, 1, 4, 0, 5], [2, 0, 0, 2, 0, 1, 2]),
    ],
)
def test_order_and_clocks(mode: AutoresetMode, starts: list[int], order: list[int]) -> None:
    """Episodes are in the order of their ends; a clock ticks with every vector step."""
    env = recorder(sync(mode=mode))
    env.reset()
    drive(env, 6)
    data = env.buffer.view()
    assert_array_equal(data.observations[data.offsets[:-1], 0], order)
    assert_array_equal(data.start_clock, starts)
    assert env.clock == 6
    assert env.finished_episodes == len(data)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_random_runs_are_recorded_as_plain_lists_would(
    mode: AutoresetMode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare random scripts, resets, policy changes and reads with plain lists."""
    monkeypatch.setattr(wrappers.recording.rows, "_ROWS", 1)
    monkeypatch.setattr("wrappers.recording.batched._WAITING_ROWS", 30)
    rng = np.random.default_rng(seed)
    n = 4
    scripts = [
        script(*("." * int(rng.geometric(0.1 + 0.2 * who) - 1) + "T" for _ in range(30)))
        for who in range(n)
    ]
    env = recorder(sync(scripts, mode))
    policies = [SIGMOID, Constant(-0.25), Constant(-0.75)]
    observations, _ = env.reset()
    acting, waits = 0, np.zeros(n, dtype=bool)
    rows: list[list[Any]] = [[] for _ in range(n)]
    expected: list[Any] = []
    for t in range(300):
        if rng.random() < 0.05:
            acting = int(rng.integers(3))
            env.follow(policies[acting])
            acting = env.buffer.add_policy(policies[acting])
        actions = rng.integers(2, size=n)
        before = observations.copy()
        observations, rewards, terminations, truncations, _ = env.step(actions)
        done = terminations | truncations
        for i in range(n):
            if not waits[i]:
                rows[i].append((before[i].tolist(), actions[i], rewards[i], acting, t))
            if done[i]:
                expected.append(rows[i])
                rows[i] = []
        if mode is AutoresetMode.NEXT_STEP:
            waits = done
        elif mode is AutoresetMode.DISABLED and done.any():
            observations, _ = env.reset(options={"reset_mask": done})
        if rng.random() < 0.1:
            assert len(env.buffer) == len(expected)
        if rng.random() < 0.02:
            env.abandon()  # so that nothing warns
            observations, _ = env.reset()
            rows, waits = [[] for _ in range(n)], np.zeros(n, dtype=bool)
    data = env.buffer.view()
    assert_array_equal(data.lengths, [len(episode) for episode in expected])
    steps = [step for episode in expected for step in episode]
    for column, values in zip(
        (data.observations, data.actions, data.rewards, data.policy_ids),
        zip(*(step[:4] for step in steps), strict=True),
        strict=True,
    ):
        assert_array_equal(column, values)
    assert_array_equal(data.start_clock, [episode[0][4] for episode in expected])
    early, late = (data.start_clock[data.schedule_ids == k] for k in (-1, 0))
    assert len(late)
    assert not len(early) or early.max() < late.min()
    data.audit(1e-12)


def test_one_long_episode_does_not_hold_the_rows_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wrappers.recording.rows, "_ROWS", 500)
    scripts = [script("." * 999 + "T"), *([script("T")] * 7)]
    env = recorder(sync(scripts, AutoresetMode.SAME_STEP))
    env.reset()
    drive(env, 800)
    assert len(env.buffer) == 7 * 800
    assert len(env._session.rows._table) < 3 * 800
    drive(env, 200)
    data = env.buffer.view()
    assert data.lengths.max() == 1_000
    i = int(data.lengths.argmax())
    assert_array_equal(data.observations[data.offsets[i] : data.offsets[i + 1], 2], range(1_000))


def batched(space: gym.Space[Any], elements: list[Any]) -> Any:
    """Return actions as a vector environment takes them."""
    room: Any = gym.vector.utils.create_empty_array(space, len(elements))
    return gym.vector.utils.concatenate(space, elements, room)


def twin(
    mode: AutoresetMode | None,
    episodes: Sequence[str],
    *,
    path: Path | None = None,
    **settings: Any,
) -> Any:
    """Return a recorder of one environment, or of two equal ones in a vector environment."""
    if mode is None:
        return wrappers.RecordTrajectories(ScriptedEnv(episodes, **settings), path=path)
    envs = [lambda: ScriptedEnv(episodes, **settings)] * 2
    return RecordTrajectories(SyncVectorEnv(envs, copy=False, autoreset_mode=mode), path=path)


def play(env: Any, steps: int, action: Any = 0, log_prob: float | None = None) -> None:
    """Take steps with either recorder, all sub-envs alike."""
    if isinstance(env, RecordTrajectories):
        actions = batched(env.single_action_space, [action] * 2)
        drive(env, steps, lambda t: actions, lambda t: log_prob and np.full(2, log_prob))
        return
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(action, log_prob)
        if terminated or truncated:
            env.reset()


@pytest.mark.filterwarnings("ignore:Constant is not registered")
@pytest.mark.parametrize("mode", TWINS)
@pytest.mark.parametrize("name", EXOTIC)
def test_any_space(name: str, mode: AutoresetMode | None, tmp_path: Path) -> None:
    space, element = EXOTIC[name]
    env = twin(
        mode,
        script("...T"),
        path=tmp_path / "episodes",
        observation_space=space,
        action_space=space,
        observe=lambda who, episode, step: element(step),
    )
    env.follow(Constant())
    env.reset()
    for t in range(4):
        play(env, 1, element(t + 4))
    env.close()
    for data in (env.buffer.view(), Trajectories.load(tmp_path / "episodes")):
        assert_array_equal(data.lengths, [4] * (1 if mode is None else 2))
        for i in range(data.n_steps):
            assert same(row(data.observations, i), element(i % 4)), i
            assert same(row(data.actions, i), element(i % 4 + 4)), i


def test_wider_floats_are_recorded_in_full() -> None:
    env = RecordTrajectories(sync([script("..T"), script("..T")]))
    env.follow(Constant())
    env.env.step = lambda actions: (  # type: ignore[method-assign]
        np.full((2, 3), 0.1),  # float64 after the float32 of the reset
        np.ones(2),
        np.ones(2, dtype=bool) if env.clock else np.zeros(2, dtype=bool),
        np.zeros(2, dtype=bool),
        {},
    )
    env.reset()
    env.step(np.array([0, 1], dtype=np.int8))
    env.step([1, 0])
    data = env.buffer.view()
    assert_array_equal(data.observations[1], [0.1] * 3)
    assert_array_equal(data.actions, [0, 1, 1, 0])


@pytest.mark.parametrize("mode", MODES)
def test_sub_envs_in_other_processes_are_recorded(mode: AutoresetMode) -> None:
    inner = AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=mode)
    same_run = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=mode)
    found = []
    for each in (inner, same_run):
        env = RecordTrajectories(each)
        env.follow(Uniform(2))
        env.reset(seed=2)
        drive(env, 60)
        found.append(env.buffer.view())
        env.close()
        env.close()
    assert len(found[0]) > 2
    assert_array_equal(found[0].observations, found[1].observations)
    assert_array_equal(found[0].offsets, found[1].offsets)


@pytest.mark.parametrize(
    ("make", "horizon"),
    [
        (lambda: gym.make_vec("CartPole-v1", 2), 500),
        (lambda: gym.make_vec("CartPole-v1", 2, max_episode_steps=9), 9),
        (lambda: gym.make_vec("CartPole-v1", 2, "sync", max_episode_steps=9), 9),
        (lambda: gym.make_vec("CartPole-v1", 2, "sync", max_episode_steps=-1), None),
        (lambda: SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=8)]), 8),
        (sync, None),
    ],
)
def test_the_time_limit_is_the_horizon(
    make: Callable[[], VectorEnv[Any, Any, Any]], horizon: int | None
) -> None:
    assert RecordTrajectories(make()).buffer.horizon == horizon


# Probabilities --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Asked is not registered")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("mode", TWINS)
def test_a_policy_that_is_audited_is_asked_once(
    mode: AutoresetMode | None, stored: bool, tmp_path: Path
) -> None:
    asked: list[int] = []

    @dataclass(frozen=True)
    class Asked(Constant):
        def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
            asked.append(len(actions))
            return super().log_prob(observations, actions)

    env = twin(mode, script("..T", "C"), path=tmp_path / "episodes" if stored else None)
    env.follow(Asked(-0.5))
    env.reset()
    for t in range(8):
        play(env, 1, log_prob=(None, -0.50001, -0.5)[t % 3])
    data = env.buffer.view()
    assert sum(asked) == data.n_steps >= 8
    assert set(data.log_probs) == {-0.5, -0.50001}
    env.close()
    if stored:
        assert_array_equal(Trajectories.load(tmp_path / "episodes").log_probs, data.log_probs)


def test_a_mismatch_is_named_and_the_others_are_kept() -> None:
    env = RecordTrajectories(sync(mode=AutoresetMode.SAME_STEP))
    env.follow(Constant(-0.5))
    env.reset()
    wrong = np.array([-0.5, -0.5, -0.7])
    drive(env, 6, log_prob=lambda t: wrong if t == 2 else np.full(3, -0.5))
    with pytest.raises(PropensityMismatch) as caught:
        len(env.buffer)
    message = str(caught.value)
    for part in ("episode 3 (sub-env 2), step 1", "-0.7", "-0.5", "1 of 4 steps", "dropped"):
        assert part in message
    assert (caught.value.episode, caught.value.step) == (3, 1)
    assert (env.dropped_episodes, env.dropped_steps) == (1, 4)
    others = [([[episode, 0]], [1], True, False) for episode in (0, 2)]
    assert by_sub_env(env.buffer.view())[2] == others
    assert len(env.buffer) == env.finished_episodes - 1
    env.close()


def test_the_audit_does_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wrappers.recording.batched._WAITING_ROWS", 100)
    env = RecordTrajectories(sync([script("T")] * 8, AutoresetMode.SAME_STEP))
    env.follow(Constant(-0.5))
    env.reset()
    with pytest.raises(PropensityMismatch, match=r"episode 8 \(sub-env 0\), step 0"):
        drive(env, 100, log_prob=lambda t: np.full(8, -0.7 if t == 1 else -0.5))
    assert env.clock < 100
    assert env.dropped_episodes == 8
    drive(env, 10)
    env.close()


@pytest.mark.parametrize("shape", [(), (3, 1), (2,)])
def test_log_probs_of_a_wrong_shape_are_an_error(shape: tuple[int, ...]) -> None:
    env = recorder()
    env.reset()
    with pytest.raises(ValueError, match=r"log_prob has shape .*, expected \(3,\)"):
        env.step(np.zeros(3, dtype=int), np.zeros(shape))
    drive(env, 6)  # the error has changed nothing
    assert by_sub_env(env.buffer.view())[0][0][2]


# Who acts, what is held out -------------------------------------------------------------------


def test_a_change_of_policy_while_some_sub_envs_are_under_way() -> None:
    env = recorder(sync([script(".T"), script("...T")]))
    env.reset()
    drive(env, 2)
    assert env.follow(Constant(-0.25)) == 1
    drive(env, 4)
    data = env.buffer.view()
    assert_array_equal(data.policy_ids, [0, 0, 0, 0, 1, 1, 1, 1])
    assert_array_equal(data.schedule_ids, [0, 0, 0])
    assert_array_equal(data.schedules[0].clocks, [0, 2])
    assert_array_equal(data.start_clock, [0, 0, 3])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_the_number_of_an_episode_decides_whether_it_is_held_out(
    share: float, mode: AutoresetMode
) -> None:
    env = recorder(sync(mode=mode), held_out=share)
    env.reset()
    env.reset()  # begins no episode of its own
    assert_array_equal(env.held_out, held_out_by_definition(3, share))
    told: dict[tuple[int, int], bool] = {}
    observations, _ = env.reset()
    over = np.zeros(3, dtype=bool)
    for _ in range(60):
        for i in np.flatnonzero(~over):
            who, episode, _ = observations[i].astype(int).tolist()
            assert told.setdefault((who, episode), bool(env.held_out[i])) == env.held_out[i]
        observations, _, terminations, truncations, _ = env.step(np.zeros(3, dtype=int))
        done = terminations | truncations
        if mode is AutoresetMode.NEXT_STEP:
            over = done  # these show the last observation, and are reset by the next call
        elif mode is AutoresetMode.DISABLED and done.any():
            observations, _ = env.reset(options={"reset_mask": done})
    data = env.buffer.view()
    first = data.observations[data.offsets[:-1]].astype(int)
    assert_array_equal(data.held_out, [told[who, episode] for who, episode, _ in first])
    # by start, and by sub-env where several start at once
    starts = sorted(
        (int(clock), int(who)) for clock, (who, _, _) in zip(data.start_clock, first, strict=True)
    )
    flags = {
        (int(clock), int(who)): bool(held)
        for clock, (who, _, _), held in zip(data.start_clock, first, data.held_out, strict=True)
    }
    complete = [flags[start] for start in starts if start[0] < data.start_clock.max() - 6]
    assert complete == held_out_by_definition(len(complete), share)


# The same run with and without ----------------------------------------------------------------


def run(env: VectorEnv[Any, Any, Any]) -> list[Any]:
    found: list[Any] = [copy.deepcopy(env.reset(seed=3))]
    rng = np.random.default_rng(4)
    for _ in range(120):
        found.append(copy.deepcopy(env.step(rng.integers(2, size=3))))
        done = found[-1][2] | found[-1][3]
        if env.metadata["autoreset_mode"] is AutoresetMode.DISABLED and done.any():
            options = {"reset_mask": done, "low": -0.01}
            found.append((copy.deepcopy(env.reset(options=options)), sorted(options)))
    return found


@pytest.mark.parametrize("mode", [*MODES, None])
def test_recording_changes_nothing_for_the_loop(mode: AutoresetMode | None, tmp_path: Path) -> None:
    def make() -> VectorEnv[Any, Any, Any]:
        if mode is None:
            return gym.make_vec("CartPole-v1", 3, "vector_entry_point")
        settings = {"autoreset_mode": mode, "copy": False}
        return gym.make_vec("CartPole-v1", 3, "sync", vector_kwargs=settings)

    bare = run(make())
    env = RecordTrajectories(make(), held_out=0.3, path=tmp_path / "episodes")
    env.follow(Uniform(2))
    recorded = run(env)
    env.close()
    assert len(env.buffer) > 5
    assert pickle.dumps(bare) == pickle.dumps(recorded)


# Unfinished episodes and errors ---------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_in_the_middle_warns_once_and_counts(mode: AutoresetMode) -> None:
    env = recorder(sync([script("....T"), script("T"), script("....T")], mode))
    env.reset()
    env.step(np.zeros(3, dtype=int))
    with pytest.warns(UserWarning, match="2 unfinished episode.* of 2 steps") as caught:
        env.reset()
    assert caught[0].filename == __file__
    env.step(np.zeros(3, dtype=int))
    env.reset()
    assert (env.dropped_episodes, env.dropped_steps) == (4, 4)
    drive(env, 5)
    found = by_sub_env(env.buffer.view())
    assert [len(x[0]) for x in found[0] + found[2]] == [5, 5]
    assert found[0][0][0][0] == [2.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_of_some_sub_envs(mode: AutoresetMode) -> None:
    env = recorder(sync([script("...T")] * 3, mode))
    env.reset()
    drive(env, 2)
    mask = np.array([False, True, False])
    options = {"reset_mask": mask}
    with pytest.warns(UserWarning, match="1 unfinished episode.* of 2 steps"):
        env.reset(options=options)
    assert options == {}  # the environment took it out
    drive(env, 4)
    found = by_sub_env(env.buffer.view())
    assert found[0] == found[2] == [([[0, 0], [0, 1], [0, 2], [0, 3]], [1, 2, 3, 4], True, False)]
    assert found[1] == [([[1, 0], [1, 1], [1, 2], [1, 3]], [1, 2, 3, 4], True, False)]


def test_a_reset_mask_is_refused_where_the_environment_may_ignore_it() -> None:
    env = RecordTrajectories(gym.make_vec("CartPole-v1", 2, "vector_entry_point"))
    with pytest.raises(ValueError, match="reset_mask"):
        env.reset(options={"reset_mask": np.array([True, False])})


def test_a_step_before_reset_or_after_the_end_is_an_error() -> None:
    for mode in MODES:
        env = recorder(sync(mode=mode))
        with pytest.raises(ResetNeeded, match=r"sub-envs \[0, 1, 2\]"):
            env.step(np.zeros(3, dtype=int))
    env = recorder(sync(mode=AutoresetMode.DISABLED))
    env.reset()
    env.step(np.zeros(3, dtype=int))
    with pytest.raises(ResetNeeded, match=r"sub-envs \[2\] have ended.*reset_mask"):
        env.step(np.zeros(3, dtype=int))
    env.reset(options={"reset_mask": np.array([False, False, True])})
    env.step(np.zeros(3, dtype=int))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_environment_that_raises_leaves_the_buffer_whole(mode: AutoresetMode) -> None:
    sub_envs = [
        lambda: ScriptedEnv(script("T", "T", ".....T", "..T"), broken_at=(2, 1)),
        lambda: ScriptedEnv(script("....T"), who=1),
    ]
    env = recorder(SyncVectorEnv(sub_envs, autoreset_mode=mode))
    env.reset()
    with pytest.raises(OSError, match="gone"):
        drive(env, 20)
    n = len(env.buffer)
    assert n >= 2
    open_steps = env.dropped_steps
    # in the next-step mode sub-env 1 has just ended
    assert env.dropped_episodes == (1 if mode is AutoresetMode.NEXT_STEP else 2)
    drive(env, 12)  # not recorded: it is not known which sub-envs have moved
    assert len(env.buffer) == n
    assert env.dropped_steps == open_steps
    env.reset()
    drive(env, 6)
    fresh = by_sub_env(env.buffer.select(episodes=slice(n, None)))
    assert all(episode[0][0][1] == 0 for episodes in fresh.values() for episode in episodes)
    assert len(env.buffer) > n


def test_a_reset_that_raises_drops_the_open_episodes() -> None:
    env = recorder(sync([script("...T")] * 2, AutoresetMode.DISABLED))
    env.reset()
    drive(env, 1)
    with pytest.raises((TypeError, AssertionError)):  # the latter before Gymnasium 1.2
        env.reset(options={"reset_mask": [True, False]})
    drive(env, 3)
    assert len(env.buffer) == 0
    assert (env.dropped_episodes, env.dropped_steps) == (2, 2)
    drive(env, 4)  # both were reset in `drive`
    assert len(env.buffer) == 2


@pytest.mark.parametrize("mode", TWINS)
def test_an_action_of_probability_zero_is_an_error(mode: AutoresetMode | None) -> None:
    @dataclass(frozen=True)
    class Never(Constant):
        def log_prob(self, observations: Tree, actions: Tree) -> NDArray[np.float64]:
            return np.where(observations[:, 1] + observations[:, 2] == 2, -np.inf, -0.5)

    env = twin(mode, script("..T", "T", "T", "..T"))
    env.follow(Never())
    env.reset()
    play(env, 11)
    with pytest.raises(ValueError, match=r"step 2: log_probs is -inf.*was dropped, not recorded"):
        env.buffer.view()
    # the other episodes are kept, and the error is raised once
    data, n = env.buffer.view(), 1 if mode is None else 2
    assert_array_equal(data.observations[: 2 * n, 1], np.repeat([1, 3], [n, n]))
    assert (env.dropped_episodes, env.dropped_steps) == (2 * n, 4 * n)


def test_actions_of_a_wrong_shape_are_an_error() -> None:
    env = recorder()
    env.reset()
    for actions in (np.int64(1), np.zeros((3, 1), dtype=int), np.zeros(2, dtype=int)):
        with pytest.raises(ValueError, match=r"actions has shape .*, expected \(3,\)"):
            env.step(actions)
    drive(env, 6)  # the error has changed nothing
    assert len(env.buffer) > 0
    assert env.dropped_episodes == 0


def test_observations_of_a_wrong_shape_are_an_error() -> None:
    env = recorder()
    env.reset()
    drive(env, 2)
    wrong: Any = (np.zeros(3), np.zeros(3), np.zeros(3, dtype=bool), np.zeros(3, dtype=bool), {})
    env.env.step = lambda actions: wrong  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"observations has shape \(3,\), expected \(3, 3\)"):
        env.step(np.zeros(3, dtype=int))
    assert env.dropped_episodes == 3


# Gymnasium's rules ----------------------------------------------------------------------------


def test_every_autoreset_mode_of_gymnasium_is_in_the_table() -> None:
    assert set(AUTORESETS) == set(AutoresetMode)


def test_the_autoreset_mode_must_be_known() -> None:
    inner = sync()
    for metadata in ({}, {"autoreset_mode": "sometimes"}):
        inner.metadata = metadata
        with pytest.raises(ValueError, match="autoreset_mode"):
            RecordTrajectories(inner)
    with pytest.raises(TypeError, match=r"use wrappers\.RecordTrajectories for a single env"):
        RecordTrajectories(gym.make("CartPole-v1"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="held_out=2"):
        RecordTrajectories(sync(), held_out=2)


def test_copies_record_independently() -> None:
    env = RecordTrajectories(gym.make_vec("CartPole-v1", 4))
    env.follow(Uniform(2))
    env.reset(seed=1)
    drive(env, 15)
    other = pickle.loads(pickle.dumps(env))
    for each in (env, other):
        drive(each, 90)
    assert len(env.buffer) > 4
    assert_array_equal(env.buffer.view().observations, other.buffer.view().observations)
    assert env._saved_kwargs == {"held_out": 0.0, "path": None, "append": None, "audit": True}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("mode", TWINS)
def test_close_may_be_called_again(
    mode: AutoresetMode | None, stored: bool, tmp_path: Path
) -> None:
    env = twin(mode, script("..T"), path=tmp_path / "episodes" if stored else None)
    env.follow(SIGMOID)
    env.reset()
    play(env, 5)
    env.close()
    env.close()
    n = 1 if mode is None else 2
    assert (len(env.buffer), env.dropped_episodes) == (n, n)
