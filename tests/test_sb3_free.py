"""Free values inside Stable-Baselines3: the steps they rest on, the best policy, the files."""

from __future__ import annotations

import copy
import errno
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ope_gym.online import FreeEstimate
from ope_gym.online.fresh import fresh_value
from ope_gym.online.stream import Window
from ope_gym.report.free_values import in_words
from wrappers.sb3 import OPECallback
from wrappers.sb3.checkpoints import Checkpoints, Progress, selection_bias, winning_chance
from wrappers.sb3.closing import closing_lines, leading, weighted_line
from wrappers.sb3.convert import load_policy
from wrappers.sb3.fresh import Tally
from wrappers.sb3.saved import Patience, SavedModels
from wrappers.sb3.schedule import affordable_spacing
from wrappers.sb3.snapshots import snapshot


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def envs(name: str, n: int = 2, limit: int = 30) -> VecEnv:
    return make_vec_env(name, n, seed=0, env_kwargs={"max_episode_steps": limit})


def ppo(env: Any, **options: Any) -> PPO:
    chosen: dict[str, Any] = {"n_steps": 64, "n_epochs": 1, "batch_size": 64, "seed": 0}
    small = {"net_arch": [8]}
    return PPO("MlpPolicy", env, policy_kwargs=small, device="cpu", **(chosen | options))


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
    assert ope._free is not None
    stream = ope._free.free.stream
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


def test_long_trainings_are_valued_about_fifty_times() -> None:
    model, ope = a2c(envs("CartPole-v1", 8)), OPECallback(budget=1.0, verbose=0)
    model.learn(600_000, callback=CallbackList([ope, _StopAt(12_100)]))
    assert ope.evaluations[0].timesteps == 12_000


def test_evaluations_are_spaced_by_a_share_of_the_training() -> None:
    """In counted milliseconds: (count + 1) evaluations would take more than the share."""
    cheap, dear = a2c(envs("CartPole-v1", 8)), ppo(envs("CartPole-v1", 8), n_epochs=10)
    for model, updates in ((cheap, 1), (dear, 10 * 8)):
        work = 0.42 * model.n_steps + 1.5 * updates  # of a rollout
        work *= 1_000_000 / (8 * model.n_steps)
        free = 0.03 * work - 0.008 * 1_000_000 / 8  # for evaluations
        again = 25.0 + 0.5 * (15 + 30) + 1e-3 * 15**2
        first = again + 10.0 + 0.11 * 30 + 0.5 * 30
        count = 1_000_000 / affordable_spacing(model, 30, 1_000_000, 0.03)
        assert count * first + (count - 1) * again <= free * 1.001
        assert (count + 1) * first + count * again > free * 0.999
    spacings = [affordable_spacing(cheap, 30, t, 0.03) for t in (1000, 10**6, 10**7, 10**8)]
    assert spacings[0] == 1000  # the last evaluation alone
    np.testing.assert_allclose(spacings[1:], spacings[1], rtol=0.05)  # however long the training is
    ratio = affordable_spacing(dear, 30, 10**6, 0.03) / spacings[1]
    cheap_step, dear_step = 0.03 * (0.42 + 1.5 / 5), 0.03 * (0.42 + 1.5 * 80 / 64)
    assert ratio == pytest.approx((cheap_step - 0.008) / (dear_step - 0.008), rel=0.05)
    assert affordable_spacing(cheap, None, 10**6, 0.03) < spacings[1]  # nothing is simulated


def test_the_spacing_holds_unless_the_user_says_when(capsys: pytest.CaptureFixture[str]) -> None:
    model = a2c(envs("CartPole-v1", 8))
    half = 12_000 - 20  # two evaluations at least; the end of the rollout that is nearest
    for options, every in (({}, half), ({"eval_freq": 2000}, 2000), ({"budget": 0.5}, 10_000)):
        ope = OPECallback(**options)
        model.learn(24_000, callback=CallbackList([ope, _StopAt(400)]))
        assert ope._every == every
        assert len(ope.evaluations) == 1  # at the end
        said = (
            "2 in all, which take more than 3 % of the CPU time: eval_freq"
            in capsys.readouterr().out
        )
        assert said == (not options)
    budgets: tuple[Any, ...] = (0, -1.0, math.inf, math.nan, "0.03", None)
    for budget in budgets:
        with pytest.raises(ValueError, match=r"budget=.* must be a number above 0: 0\.03 stands"):
            OPECallback(budget=budget)


def test_short_rollouts_are_valued_and_settle() -> None:
    model, ope = a2c(envs("CartPole-v1", 8)), OPECallback(eval_freq=4000, verbose=0)
    model.learn(16_000, callback=ope)
    assert [e.timesteps for e in ope.evaluations] == [4000, 8000, 12_000, 16_000]
    assert [e.timesteps for e in ope.settled] == [4000, 8000]
    assert all(e.settled for e in ope.settled)


# The best policy -----------------------------------------------------------------------------


def estimate(timesteps: int, value: float, error: float, *, settled: bool = False) -> FreeEstimate:
    ends = value - 2 * error, value + 2 * error
    return FreeEstimate(timesteps, value, error, *ends, settled, 10.0, 5, {})


def test_the_best_has_the_highest_lower_end_or_value() -> None:
    given = [estimate(1, 10.0, 1.0), estimate(2, 14.0, 4.0), estimate(3, 12.0, 0.5)]
    for select, new, best in (("lower", [True, False, True], 3), ("value", [True, True, False], 2)):
        found = Checkpoints(select)
        assert [found.add(e) for e in given] == new
        assert found.leader == best
    assert found.revise(estimate(1, 20.0, 1.0, settled=True))
    assert found.estimate.value == 20.0
    assert not found.revise(estimate(9, 99.0, 1.0))  # of a policy that is not known


def test_a_leader_that_falls_gives_way_to_the_best_that_is_settled() -> None:
    found = Checkpoints("lower")
    assert found.add(estimate(1, 60.0, 5.0))
    assert not found.revise(estimate(1, 60.0, 4.0, settled=True))
    assert found.add(estimate(2, 100.0, 10.0))
    assert found.contenders() == {1, 2}
    assert found.revise(estimate(2, 40.0, 5.0, settled=True))
    assert found.leader == 1
    assert found.contenders() == {1}


def test_counting_anew_keeps_the_best_of_before() -> None:
    found = Checkpoints("value")
    found.add(estimate(500, 9.0, 1.0))
    found.begin_again()
    assert not found.add(estimate(500, 3.0, 1.0))
    assert found.estimate.value == 9.0
    assert found.add(estimate(600, 10.0, 1.0))


def test_values_without_an_error_are_chosen_by_themselves() -> None:
    found, progress = Checkpoints("lower"), Progress(2)
    for step, value in enumerate((10.0, 50.0, 40.0, 300.0, 200.0)):
        found.add(estimate(step, value, np.inf))
        assert not progress.is_over(estimate(step, value, np.inf))
    assert found.leader == 3
    best = found.best()
    assert best is not None
    assert 0.05 < best.probability < 0.9


@pytest.mark.parametrize(
    ("truth", "raw"),
    [(np.zeros(20), 1.87), (np.append(np.linspace(-20, 0, 10), np.zeros(10)), 1.54)],
    ids=["equal", "ramp, then plateau"],
)
def test_the_correction_takes_out_nearly_all_of_the_winners_curse(
    truth: np.ndarray, raw: float
) -> None:
    """The mean of the largest of 20 or 10 normal numbers is 1.87 or 1.54."""
    rng = np.random.default_rng(0)
    left, errors = [], np.ones(20)
    for _ in range(150):
        values = truth + rng.standard_normal(20)
        best = int(np.argmax(values))
        curse = selection_bias(values, errors, np.zeros(20))
        left.append((values[best] - truth[best], values[best] - curse - truth[best]))
    before, after = np.mean(left, axis=0)
    noise = np.std(left, axis=0) / np.sqrt(150)
    assert before == pytest.approx(raw, abs=4 * noise[0])
    assert abs(after) < 0.1 * raw + 4 * noise[1]


def test_the_value_of_the_chosen_one_is_corrected() -> None:
    """Policies of one value: the highest of k estimates is too high by the mean of a maximum."""
    found = Checkpoints("value")
    for step in range(1, 3):
        found.add(estimate(step, 5.0, 1.0))
    best = found.best()
    assert best is not None
    assert best.probability == pytest.approx(0.5, abs=1e-6)
    # mean of the larger of two standard normals is 1/sqrt(pi); 1,000 draws: error 0.026
    assert best.value == pytest.approx(5.0 - np.pi**-0.5, abs=4 * 0.026)
    alone = Checkpoints("value")
    alone.add(estimate(1, 5.0, 1.0))
    only = alone.best()
    assert only is not None
    assert only.value == pytest.approx(5.0)
    assert only.probability == pytest.approx(1.0)


def test_the_closing_lines_name_the_policy_to_keep() -> None:
    found = Checkpoints("lower")
    found.add(estimate(100, 50.0, 1.0))
    found.add(estimate(200, 49.0, 3.0))
    lines = closing_lines(
        estimate(200, 49.0, 3.0),
        found.best(),
        level=0.95,
        regime="in-sample",
        deterministic=False,
        saved="It is in best/best_model.zip.",
    )
    assert lines[0].startswith("The policy after 200 timesteps is worth 49.0 (95 %: 43.0 to 55.0)")
    assert lines[1].startswith("The one to keep is the policy after 100 timesteps, worth 4")
    # P(N(50, 1) > N(49, 3)) = Phi(1 / sqrt(10))
    assert lines[1].endswith(
        "of 2 it is the best with probability 62.4 %. It is in best/best_model.zip."
    )


def test_where_no_policy_stands_out_the_closing_lines_say_so() -> None:
    """Among equals, none of which can be worth less than -200."""
    found = Checkpoints("value")
    for step in (1, 2, 3):
        found.add(replace(estimate(step, -200.0, 2.0), low=-200.0, bounds=(-200.0, -100.0)))
    best, last = found.best(), estimate(3, -200.0, 2.0)
    assert best is not None
    assert best.value == -200.0
    how: dict[str, Any] = {"level": 0.95, "regime": "in-sample", "deterministic": False}
    how["select"] = "value"
    lines = closing_lines(last, best, **how, saved="")
    assert lines[1].startswith(
        "The best guess is the policy after 1 timesteps, worth -200.0 (95 %: -200.0 to -19"
    )
    assert lines[2].endswith("none was played for this.")
    learned = replace(last, timesteps=1, shares={"advantages": 0.3, "simulation": 0.7})
    lines = closing_lines(learned, best, **how, saved="")
    assert lines[1].startswith(
        "The best guess is this one: it has the highest value. Another may be better: of 3 it is"
    )
    assert lines[2].endswith("learned from its steps, has 70 % of the weight.")


def test_a_choice_that_is_not_the_most_probable_is_called_the_safest() -> None:
    found = Checkpoints("lower")
    found.add(replace(estimate(1, -1282.0, 160.0), low=-1730.0, high=-833.0))
    calm = replace(estimate(2, -1400.0, 40.0), low=-1513.0, high=-1286.0, spread=90.0)
    assert found.add(calm)
    assert found.highest == -1282.0
    assert leading(calm, found.highest) == (
        " The safest choice so far: its interval has the highest lower end."
    )
    assert leading(calm, calm.value) == " The best so far."
    lines = closing_lines(calm, found.best(), level=0.95, regime="", deterministic=False, saved="")
    assert lines[1].startswith(
        "The safest choice is this one: its interval has the highest lower end. Another may be "
        "better: of 2 it is the best with probability 23."
    )


def test_a_red_value_is_not_praised() -> None:
    found = Checkpoints("lower")
    found.add(estimate(1, 50.0, 1.0))
    red = replace(estimate(2, 159.0, 20.0), spread=20.0)
    found.add(red)
    assert leading(red, 159.0) == ""
    how: dict[str, Any] = {"level": 0.95, "regime": "in-sample", "deterministic": False}
    assert closing_lines(red, found.best(), **how, saved="It is in best_model.zip.")[1] == (
        "No policy can be called the best: this one has a red value, but its interval has the "
        "highest lower end. It is in best_model.zip."
    )
    later = closing_lines(estimate(3, 60.0, 1.0), found.best(), **how, saved="")[1]
    assert later.startswith("No policy can be called the best: the one after 2 timesteps has a red")


def test_the_closing_report_says_why_it_differs() -> None:
    assert "far less sure than the value above" in weighted_line(free=True)
    assert "value above" not in weighted_line(free=False)


def test_a_training_in_which_no_episode_ends_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    env = make_vec_env("Pendulum-v1", 1, seed=0)
    PPO("MlpPolicy", env, n_steps=64, seed=0, device="cpu").learn(64, callback=OPECallback())
    assert capsys.readouterr().out.startswith("No episode has ended in 64 timesteps, so nothing")


def test_chances_are_those_of_normal_numbers() -> None:
    values, errors = np.array([1.0, 0.5, -1.0]), np.array([0.5, 1.0, 2.0])
    found = [winning_chance(values, errors, i) for i in range(3)]
    drawn = np.random.default_rng(0).normal(values, errors, (200_000, 3)).argmax(axis=1)
    expected = np.bincount(drawn) / len(drawn)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / np.sqrt(len(drawn)))
    assert selection_bias(values, np.zeros(3), np.zeros(3)) == 0.0


def test_progress_ends_when_values_rise_by_less_than_their_error() -> None:
    progress = Progress(2)
    # 10 -> 11 is within the joint error of 1.41, 10 -> 11.5 is not
    assert [
        progress.is_over(estimate(i, v, 1.0)) for i, v in enumerate((10, 11, 11.5, 12, 12.9))
    ] == [
        False,
        False,
        False,
        False,
        True,
    ]
    never = Progress(None)
    assert not any(never.is_over(estimate(i, 0.0, 1.0)) for i in range(9))


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
        select="value",
        verbose=0,
    )
    model = ppo(envs("CartPole-v1"))
    model.learn(512, callback=ope)
    assert after.n_calls == len(ope.evaluations) == 4
    best = ope.best
    assert best is not None
    assert told == sorted(told)
    assert told[-1] == best.estimate.value == max(e.value for e in ope.evaluations)
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
    ope = OPECallback(
        eval_freq=1, best_model_save_path=tmp_path, log_path=tmp_path, select="value", verbose=0
    )
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
            several[i].keep(models[i], 1, best=True, pending=False)

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


def test_rare_evaluations_settle_between_them() -> None:
    """The steps of the first policy would be forgotten before the second evaluation."""
    ope = OPECallback(eval_freq=70_000, verbose=0)
    model = ppo(envs("CartPole-v1", 16), n_steps=256, batch_size=4096, n_epochs=1)
    model.learn(80_000, callback=ope)
    assert len(ope.evaluations) == 2
    assert [e.timesteps for e in ope.settled] == [ope.evaluations[0].timesteps]


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


def test_deterministic_episodes_are_another_quantity(capsys: pytest.CaptureFixture[str]) -> None:
    ope = OPECallback(envs("CartPole-v1"), deterministic=True, eval_freq=1)
    ppo(envs("CartPole-v1")).learn(256, callback=ope)
    assert len(ope.fresh) == len(ope.evaluations) == 2
    assert all("fresh" not in e.shares for e in ope.evaluations)
    assert ope.best is not None
    assert ope.best.estimate in ope.fresh
    assert "The deterministic policy after 256 timesteps is worth" in capsys.readouterr().out


# Fresh episodes ------------------------------------------------------------------------------


def test_episodes_are_tallied_in_fixed_shares() -> None:
    tally = Tally(3, 2, 0.5)  # two of the first sub-env, one of the second
    script = [  # rewards, dones
        ([1.0, 8.0], [False, True]),
        ([4.0, 8.0], [True, True]),
        ([2.0, 8.0], [True, False]),
    ]
    for rewards, dones in script:
        assert not tally.done
        infos = [{"is_success": True}, {}]
        tally.step(np.array(rewards), np.array(dones), infos)
    assert tally.done
    played = tally.played()
    assert played.returns.tolist() == [8.0, 1.0 + 0.5 * 4.0, 2.0]
    assert played.lengths.tolist() == [1, 2, 1]
    assert played.successes == [True, True]


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


def test_images_are_valued_too() -> None:
    space = gym.spaces.Box(0, 255, (36, 36, 1), dtype=np.uint8)
    env: Any = gym.wrappers.TransformObservation(
        gym.make("CartPole-v1", max_episode_steps=9),
        lambda x: (100 + 50 * np.resize(x, space.shape)).astype(np.uint8),
        space,
    )
    model = PPO("CnnPolicy", env, n_steps=64, batch_size=64, n_epochs=1, seed=0, device="cpu")
    ope = OPECallback(verbose=0)
    model.learn(64, callback=ope)
    assert len(ope.evaluations) == 1
    assert ope._free is not None
    assert ope._free.free.stream.starts().size == 0  # no frame is kept
    assert 1 <= ope.evaluations[0].value <= 9
