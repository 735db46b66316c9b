"""Free values inside Stable-Baselines3: the steps they rest on, the best policy, the files."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

pytest.importorskip("stable_baselines3")
pytest.importorskip("sb3_contrib")

import sb3_contrib
import stable_baselines3
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.noise import (
    NormalActionNoise,
    OrnsteinUhlenbeckActionNoise,
    VectorizedActionNoise,
)
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ope_gym.online import FreeEstimate
from ope_gym.online.fresh import fresh_value
from ope_gym.online.stream import Window
from ope_gym.policies.acting import Squashed
from ope_gym.report.free_values import in_words
from wrappers.checkpoints import Checkpoints, smooth
from wrappers.sb3 import OPECallback, Recording
from wrappers.sb3.closing import closing_lines
from wrappers.sb3.convert import load_policy
from wrappers.sb3.saved import Patience, SavedModels
from wrappers.sb3.schedule import Schedule
from wrappers.sb3.snapshots import snapshot


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def envs(name: str, n: int = 2, limit: int = 30) -> VecEnv:
    return make_vec_env(name, n, seed=0, env_kwargs={"max_episode_steps": limit})


def ppo(env: Any, kind: str = "MlpPolicy", **options: Any) -> PPO:
    chosen: dict[str, Any] = {"n_steps": 64, "n_epochs": 1, "batch_size": 64, "seed": 0}
    small = {"net_arch": [8]}
    return PPO(kind, env, policy_kwargs=small, device="cpu", **(chosen | options))


def a2c(env: Any) -> A2C:
    return A2C("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, seed=0, device="cpu")


class Witness(BaseCallback):
    """Callback that writes down what `FreeEvaluation.add` should be given, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Any, ...]] = []
        self.raw: Any = None

    def _on_training_start(self) -> None:
        self.raw = self._raw(self.model._last_obs)

    def _raw(self, seen: Any) -> Any:
        normaliser = self.model.get_vec_normalize_env()
        return copy.deepcopy(seen if normaliser is None else normaliser.get_original_obs())

    def _on_step(self) -> bool:
        seen, normaliser = self.locals, self.model.get_vec_normalize_env()
        after = self._raw(seen["new_obs"])
        following = after.copy()
        cut = np.zeros(len(after), dtype=bool)
        for i, done in enumerate(seen["dones"]):
            if done:
                last = seen["infos"][i]["terminal_observation"]
                following[i] = last if normaliser is None else normaliser.unnormalize_obs(last)
                cut[i] = seen["infos"][i]["TimeLimit.truncated"]
        paid = seen["rewards"] if normaliser is None else normaliser.get_original_reward()
        ended = np.array(seen["dones"]) & ~cut
        self.rows.append((self.raw, seen["actions"].copy(), paid.copy(), ended, cut, following))
        self.raw = after
        return True


RUNS: dict[str, Callable[[], Any]] = {
    "PPO CartPole": lambda: ppo(envs("CartPole-v1")),
    "PPO Pendulum": lambda: ppo(envs("Pendulum-v1", 1)),
    "A2C CartPole": lambda: a2c(envs("CartPole-v1", 3)),
    "normalised": lambda: ppo(VecNormalize(envs("CartPole-v1"))),
    "PPO FrozenLake": lambda: ppo(envs("FrozenLake-v1")),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_steps_of_the_training_are_handed_over_as_they_happened(run: str) -> None:
    model, witness = RUNS[run](), Witness()
    ope = OPECallback(eval_freq=200, verbose=0)
    given: list[Any] = []
    inner = ope._new_steps

    def spied() -> Any:
        steps = inner()
        add = steps.free.add

        def noted(*rows: Any) -> None:
            given.append(rows)
            add(*rows)

        steps.free.add = noted  # type: ignore[method-assign, assignment]
        return steps

    ope._new_steps = spied  # type: ignore[method-assign]
    model.learn(420, callback=CallbackList([witness, ope]))
    expected = [np.stack(column) for column in zip(*witness.rows, strict=True)]
    found = [np.concatenate(column) for column in zip(*given, strict=True)]
    assert len(found) == len(expected) == 6
    for here, there in zip(found, expected, strict=True):
        np.testing.assert_array_equal(here, there)
    assert expected[3].any() or expected[4].any()  # some episodes ended
    assert len(ope.evaluations) >= 2
    assert len(ope.training) == len(ope.held_out) == 0  # nothing grows
    assert all(e.low <= e.value <= e.high for e in ope.evaluations)  # FrozenLake pays nothing yet


def began(window: Window) -> list[int]:
    return [int(clock) for clock in window.clock[window.step == 0]]


def test_a_training_that_goes_on_keeps_its_open_episodes() -> None:
    model, ope = ppo(envs("Pendulum-v1")), OPECallback(verbose=0)
    model.learn(128, callback=ope)
    assert ope._steps is not None
    stream = ope._steps.free.stream
    model.learn(128, callback=ope, reset_num_timesteps=False)
    window = stream.window(0, stream.clock)
    assert began(window) == [0, 30, 60, 90, 120] * 2  # 64 steps, then 64 more
    model.learn(128, callback=CallbackList([ope, _StopAt(290)]), reset_num_timesteps=False)
    model.learn(128, callback=ope, reset_num_timesteps=False)  # one step was lost on the way
    window = stream.window(0, stream.clock)
    assert began(window) == [0, 30, 60, 90, 120, 150, 180] * 2


class _StopAt(BaseCallback):
    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self._timesteps = timesteps

    def _on_step(self) -> bool:
        return self.num_timesteps < self._timesteps


def test_short_rollouts_are_valued_and_settle() -> None:
    model, ope = a2c(envs("CartPole-v1", 8)), OPECallback(eval_freq=4000, verbose=0)
    model.learn(18_000, callback=ope)
    assert [e.timesteps for e in ope.evaluations] == [4000, 8000, 12_000, 16_000, 18_000]
    assert [e.timesteps for e in ope.settled] == [4000, 8000]
    assert all(e.settled for e in ope.settled)


# The best policy -----------------------------------------------------------------------------


def test_a_training_in_which_no_episode_ends_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    env = make_vec_env("Pendulum-v1", 1, seed=0)
    PPO("MlpPolicy", env, n_steps=64, seed=0, device="cpu").learn(64, callback=OPECallback())
    assert "\nNo episode has ended in 64 timesteps, so nothing" in capsys.readouterr().out


def test_the_best_model_is_saved_and_told(tmp_path: Path) -> None:
    told: list[float] = []

    class Told(BaseCallback):
        def _on_step(self) -> bool:
            assert isinstance(self.parent, OPECallback)
            told.append(self.parent.best_mean_reward)
            return True

    class After(BaseCallback):
        def _on_step(self) -> bool:
            return True

    after = After()
    ope = OPECallback(
        eval_freq=1,
        best_model_save_path=tmp_path / "best",
        log_path=tmp_path / "logs",
        callback_on_new_best=Told(),
        callback_after_eval=after,
        verbose=0,
    )
    model = ppo(envs("CartPole-v1"))
    model.learn(512, callback=ope)
    assert after.n_calls == len(ope.evaluations) == 4
    best = ope.best
    assert best is not None
    assert told[-1] == best.estimate.value == ope.best_mean_reward
    loaded = PPO.load(tmp_path / "best" / "best_model.zip", device="cpu")
    assert loaded.num_timesteps == best.timesteps
    saved = np.load(tmp_path / "logs" / "evaluations.npz")
    assert saved["timesteps"].tolist() == [128, 256, 384, 512]
    np.testing.assert_array_equal(saved["results"][:, 0], [e.value for e in ope.evaluations])
    np.testing.assert_array_equal(saved["low"], [e.low for e in ope.evaluations])
    assert saved["results"].shape == saved["ep_lengths"].shape == (4, 1)
    assert not list((tmp_path / "logs").glob("*.part*"))


@pytest.mark.parametrize("fails", ["makedirs", "fsync", "replace"])
def test_a_full_disk_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Of the folders of models and evaluations; the files follow when there is room again."""
    ope = OPECallback(eval_freq=1, best_model_save_path=tmp_path, log_path=tmp_path, verbose=0)
    model, right, full = ppo(envs("CartPole-v1")), getattr(os, fails), [True]

    model.set_logger(configure(None, []))  # SB3's own folders are not ours

    def fail(*args: Any, **options: Any) -> Any:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(*args, **options)

    class Room(BaseCallback):
        def _on_step(self) -> bool:
            full[0] = self.num_timesteps < 600
            return True

    monkeypatch.setattr(os, fails, fail)
    with pytest.warns(UserWarning, match=r"cannot be written now: .*tries again") as seen:
        model.learn(768, callback=CallbackList([Room(), ope]))
    assert len(seen) == 2 + (fails == "makedirs")  # one for each file, or folder
    assert sorted(os.listdir(tmp_path)) == ["best_model.zip", "evaluations.npz"]
    assert ope.best is not None
    assert PPO.load(tmp_path / "best_model.zip").num_timesteps == ope.best.timesteps
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].size == 6


def test_tensorboard_that_failed_once_goes_on_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ppo(envs("CartPole-v1"))
    model.set_logger(configure(str(tmp_path), ["tensorboard"]))
    (output,) = model.logger.output_formats
    writer: Any = output.writer  # type: ignore[attr-defined]
    broken = writer.file_writer.event_writer

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(broken, "add_event", fail)
    with pytest.warns(UserWarning, match="TensorBoard's file cannot be written now"):
        model.learn(512, callback=OPECallback(eval_freq=1, verbose=0))
    model.logger.close()
    broken.close()
    events = EventAccumulator(str(max(tmp_path.iterdir()))).Reload()
    assert [e.step for e in events.Scalars("ope/provisional/value")] == [256, 384, 512]


def test_the_best_model_has_its_normaliser_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = VecNormalize(envs("Pendulum-v1"))
    model = ppo(env)
    model.learn(512, callback=OPECallback(eval_freq=1, best_model_save_path=tmp_path))
    path = tmp_path / "best_model.zip"
    words = f"It is in {path}, its VecNormalize in {tmp_path / 'best_model_vecnormalize.pkl'}."
    assert words in capsys.readouterr().out
    loaded: Any = VecNormalize.load(
        str(tmp_path / "best_model_vecnormalize.pkl"), envs("Pendulum-v1")
    )
    best = PPO.load(path, env=loaded, device="cpu")
    expected = int(loaded.obs_rms.count)
    assert expected == best.num_timesteps + 2  # the observations of all resets, roughly
    assert load_policy(str(path)) == snapshot(best)

    (tmp_path / "best_model_vecnormalize.pkl").write_bytes(b"of an earlier run")
    ppo(envs("Pendulum-v1")).learn(128, callback=OPECallback(best_model_save_path=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["best_model.zip"]  # it would mislead


def test_two_trainings_with_one_folder_do_not_mix_their_models(tmp_path: Path) -> None:
    """The second one of a pair is never that of another training."""
    models: list[Any] = [ppo(VecNormalize(envs("Pendulum-v1"))) for _ in range(2)]
    for i, model in enumerate(models):
        model.num_timesteps = model.get_vec_normalize_env().obs_rms.count = i
    several = [SavedModels(tmp_path, Patience()) for _ in models]

    def save(i: int) -> None:
        for _ in range(40):
            several[i].keep(models[i], 1)
            several[i].promote(1)
            several[i].write({1})

    threads = [threading.Thread(target=save, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        read = PPO.load(tmp_path / "best_model.zip", device="cpu")
        assert read.num_timesteps in (0, 1)
    with open(tmp_path / "best_model_vecnormalize.pkl", "rb") as file:
        assert (
            pickle.load(file).obs_rms.count
            == PPO.load(tmp_path / "best_model.zip", device="cpu").num_timesteps
        )


def test_evaluations_have_the_layout_of_eval_callback_where_episodes_are_played(
    tmp_path: Path,
) -> None:
    ope = OPECallback(
        envs("CartPole-v1"), n_eval_episodes=3, eval_freq=1, log_path=tmp_path, verbose=0
    )
    ppo(envs("CartPole-v1")).learn(256, callback=ope)
    saved = np.load(tmp_path / "evaluations.npz")
    held = ope.held_out.view()
    assert saved["results"].shape == saved["ep_lengths"].shape == (2, 3)
    assert sorted(saved["results"].ravel()) == sorted(held.returns())
    assert sorted(saved["ep_lengths"].ravel()) == sorted(held.lengths)


def test_a_policy_is_settled_by_steps_that_follow_its_rollout() -> None:
    """PPO's rollouts are longer than what must follow a policy: the next one settles it."""
    ope = OPECallback(eval_freq=1, verbose=0)
    model = ppo(envs("CartPole-v1", 8), n_steps=1024, batch_size=1024, n_epochs=1)
    model.learn(4 * 8192, callback=ope)
    assert [e.timesteps for e in ope.evaluations] == [8192, 16_384, 24_576, 32_768]
    assert [e.timesteps for e in ope.settled] == [8192, 16_384, 24_576]
    known = ope._checkpoints._known
    assert [known[t].settled for t in known] == [True, True, True, False]


def test_training_stops_when_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    model = ppo(envs("CartPole-v1"), learning_rate=1e-9)
    model.learn(10_000, callback=OPECallback(eval_freq=1, stop_after=2))
    assert model.num_timesteps < 1500
    assert "2 evaluations (stop_after=2): the training stops" in capsys.readouterr().out

    good = StopTrainingOnRewardThreshold(1.0, verbose=0)
    other = ppo(envs("CartPole-v1"))
    other.learn(10_000, callback=OPECallback(eval_freq=1, callback_on_new_best=good, verbose=0))
    assert other.num_timesteps == 128 + 2  # the first step after the first evaluation


class Stops(BaseCallback):
    """Ends the training at once, and counts how often it was called."""

    def _on_step(self) -> bool:
        return False


def test_a_callback_that_ended_the_training_is_not_called_again() -> None:
    stops, model = Stops(), ppo(envs("CartPole-v1"))
    ope = OPECallback(eval_freq=1, callback_after_eval=stops, verbose=0)
    model.learn(10_000, callback=ope)
    assert (len(ope.evaluations), stops.n_calls) == (2, 1)  # not for the closing one
    model.learn(10_000, callback=ope, reset_num_timesteps=False)
    assert (len(ope.evaluations), stops.n_calls) == (4, 2)


# Fresh episodes ------------------------------------------------------------------------------


def test_fresh_values_have_t_intervals() -> None:
    found = fresh_value(np.array([1.0, 2.0, 3.0, 6.0]), 7, 0.95)
    assert (found.value, found.episodes, found.timesteps) == (3.0, 4, 7)
    error = np.std([1, 2, 3, 6], ddof=1) / 2
    assert found.standard_error == pytest.approx(error)
    assert found.high - 3.0 == pytest.approx(3.182446 * error, rel=1e-6)  # t of 3 degrees
    assert found.fresh_episodes == pytest.approx(4.0)
    equal = fresh_value(np.full(5, 500.0), 7, 0.95, seen=np.array([100.0, 500.0]))
    assert equal.low == pytest.approx(500.0 * 0.025**0.2)  # five equal returns are not certainty
    assert equal.fresh_episodes == pytest.approx(5.0)
    zero = fresh_value(np.zeros(5), 7, 0.95)  # FrozenLake, at first
    assert (zero.low, zero.high) == (-np.inf, np.inf)
    assert zero.verdict.colour == "red"
    assert "its error is unknown" in in_words(zero)
    seen_since = fresh_value(np.zeros(5), 7, 0.95, seen=np.array([0.0, 1.0]))
    assert seen_since.high == pytest.approx(1 - 0.025**0.2)
    assert np.isinf(fresh_value(np.array([1.0]), 7, 0.95).high)
    alone = fresh_value(np.array([1.0]), 7, 0.95, seen=np.array([1.0, 2.0, 3.0, 6.0]))
    assert alone.standard_error == pytest.approx(2 * error)


# Every learner -------------------------------------------------------------------------------


class Dicts(gym.Env[Any, Any]):
    """Environment with dict observations, or with any action space."""

    def __init__(self, action_space: Any = None) -> None:
        box: Any = spaces.Box(-1, 1, (1,))
        self.observation_space = spaces.Dict(x=box) if action_space is None else box
        self.action_space = spaces.Discrete(2) if action_space is None else action_space

    def action_masks(self) -> Any:
        return np.array([True, False])

    def reset(self, **_: Any) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), float(np.sum(action)), True, False, {}


def images() -> gym.Env[Any, Any]:
    space = spaces.Box(0, 255, (36, 36, 1), dtype=np.uint8)
    return gym.wrappers.TransformObservation(
        gym.make("CartPole-v1", max_episode_steps=9),
        lambda x: (100 + 50 * np.resize(x, space.shape)).astype(np.uint8),
        space,
    )


def off_policy(name: str, **options: Any) -> Any:
    kind = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name)
    env = envs("CartPole-v1" if "DQN" in name else "Pendulum-v1", 1, limit=20)
    chosen: dict[str, Any] = {"buffer_size": 500, "learning_starts": 50, "train_freq": 8, "seed": 0}
    if name in ("TD3", "DDPG"):
        chosen["action_noise"] = NormalActionNoise(np.zeros(1), np.full(1, 0.3))
    small = {"net_arch": [8]}
    return kind("MlpPolicy", env, policy_kwargs=small, device="cpu", **(chosen | options))


OFF_POLICY = ["DQN", "QRDQN", "SAC", "TQC", "TD3", "DDPG"]


@pytest.mark.parametrize("name", OFF_POLICY)
def test_off_policy_learners_are_valued_from_their_steps(name: str) -> None:
    weights = []
    for run in range(2):
        ope = OPECallback(eval_freq=200, verbose=0)
        model = off_policy(name)
        model.learn(400, callback=ope if run else None)
        weights.append(torch.cat([p.flatten() for p in model.policy.parameters()]))
    assert torch.equal(*weights)  # the random numbers of the training are left alone
    assert [e.timesteps for e in ope.evaluations] == [200, 400]
    assert all(e.low < e.value < e.high for e in ope.evaluations)
    assert "fresh" not in ope.evaluations[-1].shares
    assert ope._steps is not None
    assert ope._steps.unknown == ""
    assert ope._steps.free.stream.clock == 400
    both = OPECallback(envs("CartPole-v1" if "DQN" in name else "Pendulum-v1", 1, 20), verbose=0)
    model.learn(100, callback=both)
    assert 0.0 < both.evaluations[-1].shares["fresh"] < 1.0
    assert (len(both.held_out) > 0) is ("DQN" in name)  # where probabilities are known


@pytest.mark.parametrize("name", OFF_POLICY)
def test_snapshots_act_as_the_learner_does(name: str) -> None:
    model = off_policy(name)
    model.learn(100)
    rng, seen = np.random.default_rng(0), model.observation_space.sample()
    many = np.stack([model.observation_space.sample() for _ in range(50)])
    greedy = snapshot(model, deterministic=True).sample(many, rng)
    expected = model.predict(many, deterministic=True)[0]
    np.testing.assert_allclose(greedy, expected, atol=1e-4)

    same, acting = np.repeat(seen[None], 4000, axis=0), snapshot(model)
    drawn = acting.sample(same, rng)
    model._last_obs = same
    noise = model.action_noise and VectorizedActionNoise(model.action_noise, len(same))
    theirs, _ = model._sample_action(0, noise, len(same))
    if "DQN" in name:
        assert np.mean(drawn == 0) == pytest.approx(np.mean(theirs == 0), abs=0.04)
        return
    moments: Any = acting
    mean, variance = moments.action_moments(many[:1])
    for part in (acting.sample(np.repeat(many[:1], 4000, axis=0), rng),):
        assert part.mean() == pytest.approx(mean.item(), abs=5 * (variance.item() / 4000) ** 0.5)
        assert part.var() == pytest.approx(variance.item(), rel=0.15)
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, quantile) == pytest.approx(
            np.quantile(theirs, quantile), abs=0.15
        )


@pytest.mark.parametrize("make", [lambda: ppo(envs("CartPole-v1")), lambda: off_policy("SAC")])
def test_the_greedy_policy_is_valued_too(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = make()
    name = "CartPole-v1" if isinstance(model, PPO) else "Pendulum-v1"
    for eval_env in (None, envs(name, 1, 30 if isinstance(model, PPO) else 20)):
        ope = OPECallback(eval_env, deterministic=True, eval_freq=150)
        model.learn(300, callback=ope)
        assert len(ope.evaluations) >= 2
        assert all(e.deterministic for e in (*ope.evaluations, *ope.settled))
        assert all(("fresh" in e.shares) is (eval_env is not None) for e in ope.evaluations)
        assert "The deterministic policy after" in capsys.readouterr().out


def test_squashed_moments_are_those_of_their_definition() -> None:
    """u = tanh(mu + sigma z) on [-2, 2], by a fine sum over z."""
    z = np.linspace(-8, 8, 20_001)
    weights = np.exp(-0.5 * z**2)
    for mu, sigma in ((0.3, 0.5), (-1.0, 1.0), (2.0, 0.1)):
        outputs = np.array([[mu, np.log(sigma)]])
        policy = Squashed(partial(np.add, outputs), *np.array([[-2.0], [2.0]]))
        mean, variance = policy.action_moments(np.zeros((1, 2)))
        actions = 2.0 * np.tanh(mu + sigma * z)
        expected = np.average(actions, weights=weights)
        assert mean.item() == pytest.approx(expected, abs=2e-3)
        spread = np.average((actions - expected) ** 2, weights=weights)
        assert variance.item() == pytest.approx(spread, rel=0.02)


BLIND: dict[str, tuple[Callable[[], Any], str]] = {
    "gSDE": (lambda: ppo(envs("Pendulum-v1"), use_sde=True), "gSDE .* keeps one noise matrix"),
    "dicts": (lambda: ppo(Dicts(), kind="MultiInputPolicy"), "observations are dicts"),
    "actions": (lambda: ppo(Dicts(spaces.MultiDiscrete([2, 2]))), "only Discrete and Box"),
    "images": (lambda: ppo(images(), kind="CnnPolicy"), "1,296 numbers, such as images"),
    "masks": (
        lambda: sb3_contrib.MaskablePPO("MlpPolicy", Dicts(spaces.Discrete(2)), n_steps=64),
        "MaskableActorCriticPolicy is not derived",
    ),
    "recurrent": (
        lambda: sb3_contrib.RecurrentPPO("MlpLstmPolicy", envs("CartPole-v1"), n_steps=64),
        "hidden state",
    ),
    "noise": (
        lambda: off_policy("TD3", action_noise=OrnsteinUhlenbeckActionNoise(*np.ones((2, 1)))),
        "not independent from step to step",
    ),
}


@pytest.mark.parametrize("case", BLIND)
def test_where_nothing_can_be_modelled_returns_count(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, why = BLIND[case]
    model = make()
    ope = OPECallback(eval_freq=100)
    model.learn(200, callback=ope)
    assert ope.evaluations
    assert ope._steps is not None
    assert ope._steps.free.basis.code == "free_returns"
    out = capsys.readouterr().out
    assert re.match(
        rf"Values of \w+ come from the returns of the training \(.*{why}.*no extra", out
    )
    with pytest.raises(ValueError, match=rf"{why}.*give an eval_env"):
        make().learn(10, callback=OPECallback(deterministic=True))


@pytest.mark.parametrize("space", [None, spaces.Discrete(2), spaces.MultiDiscrete([2, 2])])
def test_fresh_episodes_are_played_by_predict_where_there_is_no_snapshot(space: Any) -> None:
    kind = "MlpPolicy" if space is not None else "MultiInputPolicy"
    algorithm = sb3_contrib.MaskablePPO if space == spaces.Discrete(2) else PPO
    model = algorithm(kind, Dicts(space), n_steps=8, batch_size=8, device="cpu", seed=0)
    ope = OPECallback(Dicts(space), deterministic=True, verbose=0)
    model.learn(8, callback=ope)
    (estimate,) = ope.evaluations
    assert estimate.shares == {"fresh": 1.0}
    if algorithm is not PPO:
        assert estimate.value == 0.0  # the other action is masked


# The best policy -----------------------------------------------------------------------------


def estimate(step: int, value: float, error: float, **more: Any) -> FreeEstimate:
    ends = value - 2 * error, value + 2 * error
    shares = {"advantages": 1.0}
    about: dict[str, Any] = {"settled": False, "spread": 10.0, "episodes": 9, "shares": shares}
    return FreeEstimate(step, value, error, *ends, **(about | more))


def test_a_random_walk_is_smoothed_as_by_its_definition() -> None:
    """With dense matrices, and tau by a fine search."""
    rng = np.random.default_rng(1)
    truth = np.cumsum(rng.normal(0, 3, 12))
    errors = rng.uniform(1, 4, 12)
    values = truth + errors * rng.standard_normal(12)
    later = np.maximum.outer(np.arange(12), np.zeros(12))
    walk = np.minimum(later, later.T)  # covariance of the walk, in units of tau^2

    def fit(tau: float) -> tuple[float, NDArray[np.float64]]:
        level = 1e6  # nearly nothing is known of where it begins
        covariance = tau**2 * walk + level
        total = covariance + np.diag(errors**2)
        solved = np.linalg.solve(total, values)
        return -0.5 * float(np.linalg.slogdet(total)[1] + values @ solved), covariance @ solved

    scale = np.hypot(np.ptp(values), errors.max())
    best = max((fit(scale * tau) for tau in np.geomspace(1e-3, 10, 30)), key=lambda x: x[0])
    np.testing.assert_allclose(smooth(values, errors)[0], best[1], atol=1e-2)
    drawn = smooth(values, errors, 4000)[1]
    np.testing.assert_allclose(drawn.mean(axis=1), best[1], atol=0.3)


def test_a_wide_band_does_not_make_the_worst_policy_the_choice() -> None:
    """The lowest end of a narrow band is no reason; nor is a high value that nothing supports."""
    found = Checkpoints()
    assert found.add(estimate(1, 10.0, 1.0))
    for step, value, error in ((2, 60.0, 40.0), (3, 80.0, 45.0), (4, 75.0, 40.0)):
        found.add(estimate(step, value, error))
    assert found.leader != 1
    lucky = Checkpoints()
    for step, value, error in ((1, 50.0, 3.0), (2, 52.0, 3.0), (3, 51.0, 3.0), (4, 70.0, 30.0)):
        lucky.add(estimate(step, value, error))
    best = lucky.best()
    assert best is not None
    assert best.value < 56.0


def test_values_without_an_error_are_chosen_by_themselves() -> None:
    found = Checkpoints()
    for step, value in enumerate((10.0, 50.0, 40.0, 300.0, 200.0)):
        found.add(estimate(step, value, np.inf))
    assert found.leader == 3
    best = found.best()
    assert best is not None
    assert 0.05 < best.probability < 0.9


def test_a_leader_that_falls_gives_way() -> None:
    found = Checkpoints()
    assert found.add(estimate(1, 60.0, 5.0))
    assert found.add(estimate(2, 100.0, 10.0))
    assert not found.revise(estimate(9, 99.0, 1.0))  # of a policy that is not known
    assert found.revise(estimate(2, 40.0, 1.0, settled=True))
    assert found.leader == 1
    assert {1, 2} <= found.held
    found.begin_again()
    assert not found.add(estimate(1, 3.0, 1.0))
    assert found.estimate.value == 60.0


def test_the_closing_lines_name_the_policy_to_keep() -> None:
    found = Checkpoints()
    found.add(estimate(100, 70.0, 1.0))
    found.add(estimate(200, 49.0, 3.0))
    lines = closing_lines(
        estimate(200, 49.0, 3.0), found.best(), level=0.95, saved="It is in best/best_model.zip."
    )
    assert lines[0].startswith("The policy after 200 timesteps is worth 49.0 (95 %: 43.0 to 55.0)")
    assert lines[1].startswith("The one to keep is the policy after 100 timesteps, worth 70")
    assert lines[1].endswith("best with probability >99.9 %. It is in best/best_model.zip.")
    assert lines[2].endswith("none was played for this.")
    learned = estimate(200, 49.0, 3.0, shares={"advantages": 0.3, "simulation": 0.7})
    last = closing_lines(learned, found.best(), level=0.95, saved="")[-1]
    assert last.endswith("learned from its steps, has 70 % of the weight.")

    red = Checkpoints()
    for step in (1, 2):
        red.add(estimate(step, 10.0 * step, 20.0, spread=20.0))
    words = closing_lines(estimate(2, 20.0, 20.0, spread=20.0), red.best(), level=0.95, saved="")[1]
    assert words.startswith("No policy can be called the best: this one has the highest value")


def test_progress_ends_when_values_rise_by_less_than_their_error() -> None:
    ope = OPECallback(stop_after=2, verbose=0)
    # 10 -> 11 is within the joint error of 1.41, 10 -> 11.5 is not
    ends = []
    for step, value in enumerate((10, 11, 11.5, 12, 12.9)):
        ope._stop_without_progress(estimate(step, value, 1.0))
        ends.append(ope._stop)
    assert ends == [False, False, False, False, True]


# When, and with what -------------------------------------------------------------------------


def _evaluated_at(cost: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return when a training of 100 s and 100,000 timesteps is evaluated, `cost` s at a time."""
    clock = [0.0]
    monkeypatch.setattr("wrappers.sb3.schedule.process_time", lambda: clock[0])
    schedule, times = Schedule(None), []
    schedule.begin(SimpleNamespace(num_timesteps=0, _total_timesteps=100_000))
    for timesteps in range(1000, 100_000, 1000):
        clock[0] += 1.0
        if schedule.due(timesteps):
            times.append(timesteps)
            with schedule.evaluating(timesteps):
                clock[0] += cost
    return times


def test_evaluations_are_spaced_by_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _evaluated_at(1e-3, monkeypatch) == [*range(10_000, 100_000, 10_000)]  # often enough
    for cost in (0.3, 0.5, 0.9):  # with the closing one within 2 s
        times = _evaluated_at(cost, monkeypatch)
        assert len(times) + 1 == int(2.0 / cost)
        assert np.ptp(np.diff([*times, 100_000])) <= 2000
    assert _evaluated_at(30.0, monkeypatch) == [10_000]  # the first tells what it costs


def test_the_first_line_says_how_often(capsys: pytest.CaptureFixture[str]) -> None:
    ope = OPECallback(eval_freq=2000)
    a2c(envs("CartPole-v1", 8)).learn(24_000, callback=CallbackList([ope, _StopAt(400)]))
    assert len(ope.evaluations) == 1  # at the end
    assert "at least 2,000 timesteps apart (eval_freq)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"eval_frequency": 9}, r"'eval_frequency': did you mean eval_freq\?"),
        ({"render": True}, "EvalCallback has no counterpart, leave it out"),
        ({"window": 9}, r"OPECallback\(recording=Recording\(window=\.\.\.\)\)"),
        ({"best_model_path": "x"}, "did you mean best_model_save_path"),
        ({"zzz": 1}, "there are eval_env, callback_on_new_best"),
    ],
)
def test_unknown_arguments_are_answered_with_known_ones(wrong: dict[str, Any], hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        OPECallback(**wrong)


def test_arguments_that_make_no_sense_are_refused() -> None:
    for name in ("n_eval_episodes", "eval_freq", "stop_after"):
        with pytest.raises(ValueError, match=f"{name} is 0; give a whole number of at least 1"):
            OPECallback(**{name: 0})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{name} is 2.5; give a whole number"):
            OPECallback(**{name: 2.5})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"recording is True: give Recording\(\.\.\.\)"):
        OPECallback(recording=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"eval_env is 'CartPole-v1': .*gym\.make"):
        OPECallback("CartPole-v1")
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        Recording(window=0)
    with pytest.raises(RuntimeError, match=r"call model\.learn first"):
        _ = OPECallback().policy
