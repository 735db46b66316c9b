"""From an environment to an interval around the truth, by way of processes, files and Minari."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from ope_gym import ESTIMATORS, Trajectories, batches, evaluate
from ope_gym.data.schema import BY_EPISODE, BY_STEP
from ope_gym.policies import DiagonalGaussian, Policy, Uniform
from tests.builders import assert_same, plain_options
from wrappers import RecordTrajectories, collect
from wrappers import vector as vectors

MODES = list(AutoresetMode)
STEPS = 15  # time limit of the pendulum
WEIGHTED = [name for name, c in ESTIMATORS.items() if c.scheme and not c.baseline]
FUSED = ["FIS", "NFIS"]
UNBIASED = ["BIS", "NBIS", *FUSED]  # but for a ratio's bias, far below the interval


def pendulum() -> gym.Env[Any, Any]:
    return gym.make("Pendulum-v1", max_episode_steps=STEPS)


def push(gain: float, spread: float = 1.0) -> DiagonalGaussian:
    """Torque against the swing; with spread 1 some actions lie outside the bounds of ±2."""
    weights = np.array([[0.0, gain, 0.3 * gain]])
    return DiagonalGaussian(weights, np.zeros(1), np.log([spread]))


BEHAVIOURS = [push(0.8), push(-0.3, 1.1), push(-1.0)]
TARGET = push(-0.8)


def assert_same_data(a: Trajectories, b: Trajectories) -> None:
    for name in (*BY_STEP, "offsets", *BY_EPISODE):
        pairs = zip(batches.leaves(getattr(a, name)), batches.leaves(getattr(b, name)), strict=True)
        for x, y in pairs:
            assert x.dtype == y.dtype, name
            assert_array_equal(x, y, name)
    assert a.policies == b.policies
    assert a.schedules == b.schedules
    assert a.horizon == b.horizon


def record(envs: VectorEnv[Any, Any, Any], path: Path, episodes: int) -> Trajectories:
    env = vectors.RecordTrajectories(envs, held_out=0.5, path=path)
    for k, policy in enumerate(BEHAVIOURS):
        collect(env, policy, episodes, 100 + k, seed=10 * k)
    env.close()
    return env.buffer.view()


# Continuous actions --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trajectories]:
    """Held-out and other episodes of three Gaussian policies, and their file."""
    path = tmp_path_factory.mktemp("pendulum") / "episodes"
    return path, record(SyncVectorEnv([pendulum] * 16), path, 240)


@pytest.fixture(scope="module")
def truth() -> tuple[float, float]:
    """The target's value from fresh rollouts, and its standard error."""
    env = vectors.RecordTrajectories(SyncVectorEnv([pendulum] * 32))
    collect(env, TARGET, 1600, 7, seed=99_000)
    returns = env.buffer.view().returns()
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(len(returns)))


def test_the_file_holds_what_the_buffer_holds(swings: tuple[Path, Trajectories]) -> None:
    path, data = swings
    found = Trajectories.load(path)
    assert_same_data(found, data)
    found.audit(1e-9)
    assert found.horizon == STEPS
    assert found.held_out.sum() == 360
    assert np.abs(found.actions).max() > 2  # as chosen, not as clipped by the environment
    assert found.actions.dtype == np.float32  # as the environment received them


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_value_is_near_the_truth(
    name: str, swings: tuple[Path, Trajectories], truth: tuple[float, float]
) -> None:
    path, _ = swings
    data = Trajectories.load(path).select(held_out=True)
    for interval in ("ess-t", "percentile"):
        options = plain_options(interval=interval, resamples=400, level=0.999, q_model=None)
        estimate = evaluate(data, TARGET, name, **options)[name]
        low, high = estimate.interval.low, estimate.interval.high
        assert -np.inf < low < estimate.value < high < np.inf
        assert estimate.sample.regime == "held-out"
        if name in FUSED or (name in UNBIASED and interval == "ess-t"):
            assert low - 3 * truth[1] < truth[0] < high + 3 * truth[1]
        if name in FUSED:
            assert high - low < 0.5 * abs(truth[0])  # an interval that says something


def test_every_estimator_has_an_answer(swings: tuple[Path, Trajectories]) -> None:
    """But EA, which is for one step; those with a q model, too."""
    data = swings[1].select(held_out=True)
    names = [name for name in ESTIMATORS if name != "EA"]
    evaluation = evaluate(data, TARGET, estimators=names)
    assert list(evaluation) == names
    for name, estimate in evaluation.items():
        numbers = (estimate.value, estimate.interval.low, estimate.interval.high)
        assert np.isfinite(numbers).all(), name
    by_default = evaluate(data, TARGET)
    assert set(by_default) <= set(names)
    assert by_default["NFIS"].value == evaluation["NFIS"].value


def test_the_behaviours_are_not_the_target(
    swings: tuple[Path, Trajectories], truth: tuple[float, float]
) -> None:
    """Or the test above would pass without weights."""
    _, data = swings
    plain = data.select(policies=0).returns()
    error = np.hypot(plain.std(ddof=1) / np.sqrt(len(plain)), truth[1])
    assert abs(plain.mean() - truth[0]) > 4 * error


def test_by_way_of_minari(
    swings: tuple[Path, Trajectories], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("minari")
    from ope_gym.data.minari import from_minari, to_minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data = swings[1].select(held_out=True).select(episodes=slice(None, None, 4))
    to_minari(data, "pendulum/held-out-v0", env=pendulum())
    found = from_minari("pendulum/held-out-v0")
    assert_same_data(found, data)
    assert_same(
        evaluate(found, TARGET, estimators=UNBIASED), evaluate(data, TARGET, estimators=UNBIASED)
    )


# Processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_processes_record_what_one_process_records(mode: AutoresetMode, tmp_path: Path) -> None:
    spread, single = (
        record(kind([pendulum] * 3, autoreset_mode=mode), tmp_path / kind.__name__, 9)
        for kind in (AsyncVectorEnv, SyncVectorEnv)
    )
    assert len(spread) == 27
    for name in (*BY_STEP, "offsets", *BY_EPISODE):
        assert_array_equal(getattr(spread, name), getattr(single, name), name)
    found = Trajectories.load(tmp_path / "AsyncVectorEnv")
    assert_array_equal(found.observations, spread.observations)
    assert_array_equal(found.log_probs, spread.log_probs)
    found.audit(1e-9)
    assert found.horizon is None  # other processes do not tell their time limit: no end is cut
    alike = dataclasses.replace(found, horizon=single.horizon)
    assert_same(
        evaluate(alike, TARGET, estimators=UNBIASED), evaluate(single, TARGET, estimators=UNBIASED)
    )


def learn(
    env: vectors.RecordTrajectories, policies: list[Policy], steps: int
) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
    """Rollouts as PPO makes them, of a fixed number of steps.

    Returns observations, which rows are the learner's by `trainable`, and which by asking before
    each step.
    """
    rng = np.random.default_rng(3)
    mode = env.metadata["autoreset_mode"]
    observations, _ = env.reset(seed=1)
    over = np.zeros(env.num_envs, dtype=bool)
    seen, masks, asked = [], [], []
    for policy in policies:
        env.follow(policy)
        for _ in range(steps):
            seen.append(observations.copy())
            only_reset = over if mode is AutoresetMode.NEXT_STEP else np.zeros_like(over)
            asked.append(~env.held_out & ~only_reset)
            actions: Any = policy.sample(seen[-1], rng)
            observations, _, terminations, truncations, _ = env.step(actions)
            over = terminations | truncations
            if mode is AutoresetMode.DISABLED and over.any():
                observations, _ = env.reset(options={"reset_mask": over})
        masks.append(env.trainable())
    return np.array(seen), np.concatenate(masks), np.array(asked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_the_learner_gets_every_step_that_is_not_held_out(kind: Any, mode: AutoresetMode) -> None:
    """And no other: not the rows of resets, not those of held-out episodes."""
    inner = kind([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=mode)
    env = vectors.RecordTrajectories(inner, held_out=0.4)
    seen, mask, asked = learn(env, [Uniform(2)] * 3, 60)
    data = env.buffer.view()
    env.close()
    assert mask.shape == (180, 3)
    assert_array_equal(mask, asked)
    held_out = data.held_out[data.episode_ids]
    assert 0 < held_out.sum() < len(held_out)
    learned = {row.tobytes() for row in seen[mask]}
    assert [row.tobytes() in learned for row in data.observations] == (~held_out).tolist()


def test_nothing_was_done_yet() -> None:
    env = vectors.RecordTrajectories(SyncVectorEnv([pendulum] * 2))
    assert env.trainable().shape == (0, 2)


@pytest.mark.parametrize("mode", MODES)
def test_policies_that_change_inside_episodes(mode: AutoresetMode, tmp_path: Path) -> None:
    path = tmp_path / "episodes"
    env = vectors.RecordTrajectories(
        SyncVectorEnv([pendulum] * 4, autoreset_mode=mode), held_out=0.5, path=path
    )
    learn(env, list(BEHAVIOURS), 50)  # rollouts of 50 steps end inside episodes of 15
    data = env.buffer.view()
    env.close()
    assert (data.schedule_ids >= 0).any()
    changes = np.diff(data.policy_ids) != 0
    assert changes[np.setdiff1d(np.flatnonzero(changes), data.offsets[1:-1] - 1)].any()
    found = Trajectories.load(path)
    assert_same_data(found, data)
    assert_same(
        evaluate(found.select(held_out=True), TARGET, estimators=UNBIASED),
        evaluate(data.select(held_out=True), TARGET, estimators=UNBIASED),
    )


# In the middle of a run ----------------------------------------------------------------------

LONG = 20


class Coin(gym.Env[Any, Any]):
    """Half of the episodes have 1 step, the others LONG; a step earns 1."""

    observation_space = gym.spaces.Discrete(1)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = LONG if self.np_random.random() < 0.5 else 1
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return 0, 1.0, self._left == 0, False, {}


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_settled_episodes_are_not_the_short_ones(mode: AutoresetMode) -> None:
    env = vectors.RecordTrajectories(SyncVectorEnv([Coin] * 300, autoreset_mode=mode))
    env.follow(Uniform(2))
    env.reset(seed=1000)
    for _ in range(3 * LONG):
        env.step(np.zeros(300, dtype=np.int64))
    with pytest.raises(ValueError, match=r"names no time limit: give settled\(horizon\)"):
        env.settled()
    with pytest.raises(ValueError, match="horizon=0 must be at least 1"):
        env.settled(0)
    settled, everything = env.settled(LONG), env.buffer.view()
    value = (1 + LONG) / 2
    assert settled.start_clock.max() <= 2 * LONG
    spread = (LONG - 1) / 2  # standard deviation of the return
    assert abs(settled.returns().mean() - value) < 3 * spread / np.sqrt(len(settled))
    assert everything.returns().mean() < value - 5 * spread / np.sqrt(len(everything))


def test_settled_episodes_of_a_single_environment() -> None:
    env = RecordTrajectories(gym.make("CartPole-v1", max_episode_steps=10))
    env.follow(Uniform(2))
    for seed in range(5):
        env.reset(seed=seed)
        while not any(env.step(1)[2:4]):
            pass
    starts = env.buffer.view().start_clock
    assert_array_equal(env.settled().start_clock, starts[starts <= env.clock - 10])
    assert 0 < len(env.settled(20)) < len(env.settled()) <= len(env.settled(1)) == 5


def test_normalisers_beneath_a_recorder_are_pointed_out() -> None:
    rewards, seen = gym.wrappers.NormalizeReward, gym.wrappers.NormalizeObservation
    with pytest.warns(UserWarning, match=r"around NormalizeReward.*Record beneath it"):
        RecordTrajectories(rewards(pendulum()))
    with pytest.warns(UserWarning, match=r"around NormalizeObservation.*update_running_mean"):
        RecordTrajectories(gym.wrappers.ClipAction(seen(pendulum())))
    with pytest.warns(UserWarning, match="around NormalizeReward") as caught:
        vectors.RecordTrajectories(SyncVectorEnv([lambda: rewards(pendulum())] * 2))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="around NormalizeObservation"):
        vectors.RecordTrajectories(
            gym.wrappers.vector.NormalizeObservation(SyncVectorEnv([pendulum] * 2))
        )
    frozen = seen(pendulum())
    frozen.update_running_mean = False
    RecordTrajectories(frozen)  # warnings are errors
    inner = RecordTrajectories(pendulum())
    outer = rewards(inner)
    inner.follow(TARGET)
    outer.reset(seed=1)
    rescaled = [float(outer.step(np.zeros(1, dtype=np.float32))[1]) for _ in range(STEPS)]
    assert abs(inner.buffer.view().returns()[0] - sum(rescaled)) > 0.1


def test_both_recorders_play_the_same_policy() -> None:
    """Its mean return, from one environment and from several in every mode."""
    env = RecordTrajectories(pendulum())
    collect(env, TARGET, 150, 5, seed=4)
    alone = env.buffer.view().returns()
    for mode in MODES:
        envs = vectors.RecordTrajectories(SyncVectorEnv([pendulum] * 5, autoreset_mode=mode))
        collect(envs, TARGET, 150, 6, seed=2_000)
        several = envs.buffer.view().returns()
        error = np.sqrt((alone.var(ddof=1) + several.var(ddof=1)) / 150)
        assert abs(alone.mean() - several.mean()) < 4 * error
