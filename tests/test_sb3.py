"""The Stable-Baselines3 callback in real training: its records, evaluations and errors."""

from __future__ import annotations

import copy
import csv
import errno
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("stable_baselines3")

from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ope_gym
from ope_gym.data import store
from ope_gym.data.stored import read_stored
from ope_gym.policies import GaussianMlp, SoftmaxMlp
from ope_gym.policies.torch import TorchPolicy
from tests.file_builders import as_if_killed
from wrappers.sb3 import OPECallback, Recording
from wrappers.sb3.snapshots import actor_module, known_policy, snapshot, why_no_snapshot

ROOT = Path(__file__).parents[1]


def small(**more: Any) -> dict[str, Any]:
    return {"net_arch": [8]} | more  # a new one each time: SB3 writes into it


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def envs(name: str, n: int = 2, seed: int = 0, limit: int | None = 40) -> VecEnv:
    return make_vec_env(name, n, seed=seed, env_kwargs={"max_episode_steps": limit})


def ppo(env: Any, **options: Any) -> PPO:
    chosen: dict[str, Any] = {
        "n_steps": 64,
        "n_epochs": 2,
        "batch_size": 64,
        "policy_kwargs": small(),
    }
    return PPO("MlpPolicy", env, **(chosen | {"seed": 0, "device": "cpu"} | options))


def dqn(env: Any, **options: Any) -> DQN:
    chosen: dict[str, Any] = {"learning_starts": 50, "buffer_size": 500, "policy_kwargs": small()}
    return DQN("MlpPolicy", env, **(chosen | {"seed": 0, "device": "cpu"} | options))


def recording(env: Any, **options: Any) -> OPECallback:
    """Return a callback that records held-out episodes and those of the training."""
    return OPECallback(env, recording=Recording(training=True), verbose=0, **options)


class Witness(BaseCallback):
    """Callback that writes every step down in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.policies: list[Any] = []
        self.open: dict[int, list[Any]] = {}
        self.episodes: list[tuple[list[Any], bool]] = []  # steps, cut by the time limit?

    def _on_rollout_start(self) -> None:
        actor: Any = copy.copy(self.model.policy)
        actor.action_dist = copy.copy(actor.action_dist)
        actor.action_dist.distribution = None
        actor.__dict__.pop("optimizer")
        self.policies.append(copy.deepcopy(actor))

    def _on_step(self) -> bool:
        seen, model = self.locals, self.model
        assert isinstance(model._last_obs, np.ndarray)
        for i in range(seen["env"].num_envs):
            step = (
                model._last_obs[i].copy(),
                seen["actions"][i].copy(),
                float(seen["rewards"][i]),
                float(seen["log_probs"][i]),
                len(self.policies) - 1,
                self.n_calls - 1,
            )
            self.open.setdefault(i, []).append(step)
            if seen["dones"][i]:
                cut = seen["infos"][i]["TimeLimit.truncated"]
                self.episodes.append((self.open.pop(i), cut))
        return True

    def log_probs(self, steps: list[Any]) -> Any:
        """Compute log-probabilities by the policies that acted, as SB3 does."""
        found = []
        for observation, action, _, _, k, _ in steps:
            seen, done = torch.tensor(observation[None]), torch.tensor(action[None])
            with torch.no_grad():
                found.append(self.policies[k].evaluate_actions(seen, done)[1].item())
        return np.array(found)


# Recording -----------------------------------------------------------------------------------

RUNS: dict[str, Callable[[], Any]] = {
    "PPO CartPole": lambda: ppo(envs("CartPole-v1")),
    "PPO Pendulum": lambda: ppo(envs("Pendulum-v1", limit=25), n_steps=32, batch_size=32),
    "A2C CartPole": lambda: A2C(
        "MlpPolicy", envs("CartPole-v1", 3), n_steps=7, seed=1, policy_kwargs=small(), device="cpu"
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_training_is_recorded_as_it_happened(run: str) -> None:
    model = RUNS[run]()
    witness, ope = Witness(), recording(None)
    model.learn(420, callback=CallbackList([witness, ope]))
    recorded = ope.training.view()
    assert len(recorded) == len(witness.episodes) > 5
    straddling = cut = 0
    for i, (steps, truncated) in enumerate(witness.episodes):
        rows = slice(*recorded.offsets[i : i + 2])
        seen, chosen, rewards, log_probs, ids, clocks = (
            np.array(column) for column in zip(*steps, strict=True)
        )
        np.testing.assert_array_equal(recorded.observations[rows], seen)
        np.testing.assert_array_equal(recorded.actions[rows], chosen)
        np.testing.assert_array_equal(recorded.rewards[rows], rewards)
        np.testing.assert_array_equal(recorded.log_probs[rows], log_probs)
        np.testing.assert_array_equal(recorded.policy_ids[rows], ids)
        assert recorded.start_clock[i] == clocks[0]
        assert (recorded.terminated[i], recorded.truncated[i]) == (not truncated, truncated)
        np.testing.assert_allclose(witness.log_probs(steps), log_probs, atol=1e-5)
        straddling += ids[0] != ids[-1]
        cut += truncated
    assert straddling > 2
    assert cut > 0 or run == "A2C CartPole"
    recorded.audit()
    monitored = [
        (start + length, env, r)
        for env, sub_env in enumerate(model.get_env().envs)
        for start, length, r in zip(
            np.cumsum([0, *sub_env.get_episode_lengths()]),
            sub_env.get_episode_lengths(),
            sub_env.get_episode_rewards(),
            strict=False,
        )
    ]
    returns = [r for _, _, r in sorted(monitored)]
    np.testing.assert_allclose(recorded.returns(), returns, rtol=1e-6)
    assert not recorded.held_out.any()


def test_rewards_are_those_of_the_environment_not_with_the_value_of_the_last_state() -> None:
    model = ppo(envs("Pendulum-v1", 1, limit=10))
    added: list[float] = []

    class After(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            added.extend(self.model.rollout_buffer.rewards[:, 0].tolist())  # type: ignore[attr-defined]

    ope = recording(None)
    model.learn(64, callback=CallbackList([ope, After()]))
    kept = ope.training.view().rewards
    last = np.arange(9, 60, 10)
    assert np.abs(kept[last] - np.array(added)[last]).min() > 0  # SB3 did add something
    others = np.setdiff1d(np.arange(60), last)
    np.testing.assert_allclose(kept[others], np.array(added)[others], rtol=1e-6)


def test_a_second_learn_goes_on_with_open_episodes() -> None:
    model, ope = ppo(envs("CartPole-v1")), recording(envs("CartPole-v1"))
    model.learn(128, callback=ope)
    before = len(ope.training)
    model.learn(128, callback=ope, reset_num_timesteps=False)
    recorded = ope.training.view()
    monitored = model.get_env().env_method("get_episode_rewards")  # type: ignore[union-attr]
    assert len(recorded) == sum(map(len, monitored)) > before
    assert recorded.returns().sum() == sum(map(sum, monitored))

    late = recording(envs("CartPole-v1"))  # starts in the middle of episodes
    already = [len(x) for x in monitored]
    model.learn(256, callback=late, reset_num_timesteps=False)
    monitored = model.get_env().env_method("get_episode_rewards")  # type: ignore[union-attr]
    begun_since = [r for x, n in zip(monitored, already, strict=True) for r in x[n + 1 :]]
    assert sorted(late.training.view().returns()) == sorted(begun_since)

    open_steps = model.get_env()
    assert open_steps is not None
    model.learn(128, callback=late)  # from the beginning: open episodes are dropped
    late.training.audit()
    with pytest.raises(ValueError, match="another model"):
        ppo(envs("CartPole-v1")).learn(128, callback=late)


def test_learning_that_goes_on_evaluates_once_at_each_end() -> None:
    for every, expected in ((10_000, 3), (1, 6), (256, 3)):
        model = ppo(envs("CartPole-v1"))
        ope = OPECallback(envs("CartPole-v1"), eval_freq=every, verbose=0)
        for _ in range(3):
            model.learn(256, callback=ope, reset_num_timesteps=False)
        steps = [e.timesteps for e in ope.evaluations]
        assert steps == sorted(set(steps))
        assert {256, 512, 768} <= set(steps)
        assert len(ope.held_out) == 10 * len(steps) == 10 * expected


# Held-out episodes ---------------------------------------------------------------------------


def test_held_out_episodes_are_played_by_frozen_policies_in_fixed_shares() -> None:
    model = ppo(envs("CartPole-v1", limit=15))
    ope = recording(envs("CartPole-v1", 2, limit=15), n_eval_episodes=5, eval_freq=1)
    model.learn(256, callback=ope)
    held = ope.held_out.view()
    assert held.held_out.all()
    assert not (held.schedule_ids >= 0).any()
    np.testing.assert_array_equal(held.policy_ids[held.offsets[:-1]], np.repeat([0, 1], 5))
    assert held.truncated.any()  # 15 steps
    assert held.lengths.max() == 15
    held.audit(1e-9)
    assert [e.timesteps for e in ope.evaluations] == [128, 256]
    assert [e.value for e in ope.fresh] == held.returns().reshape(2, 5).mean(axis=1).tolist()
    assert all(0 < e.shares["fresh"] < 1 for e in ope.evaluations)  # beside the free evidence
    everything = ope.trajectories()
    assert len(everything) == len(held) + len(ope.training)
    assert len(everything.policies) == 3  # shared by the two


def test_continuous_actions_are_recorded_before_they_are_clipped() -> None:
    model = ppo(envs("Pendulum-v1"), policy_kwargs=small(log_std_init=1.5))
    ope = recording(envs("Pendulum-v1", 3), n_eval_episodes=3, eval_freq=1)
    model.learn(128, callback=ope)
    for data in (ope.held_out.view(), ope.training.view()):
        assert np.abs(data.actions).max() > 2.5  # the bound is 2
        assert data.actions.dtype == np.float32
        data.audit()
    assert isinstance(ope.policy, GaussianMlp)


# VecNormalize --------------------------------------------------------------------------------


def test_snapshots_freeze_the_statistics_of_a_normaliser_that_learns(tmp_path: Path) -> None:
    env = VecNormalize(envs("Pendulum-v1", limit=20))
    model = ppo(env)
    with pytest.raises(ValueError, match="VecNormalize updates its statistics"):
        model.learn(64, callback=OPECallback(path=tmp_path / "run.ope"))
    ope = OPECallback(
        VecNormalize(envs("Pendulum-v1", limit=20), training=False), eval_freq=1, verbose=0
    )
    model.learn(256, callback=ope)
    assert len(ope.training) == 0
    held = ope.held_out.view()
    held.audit(1e-9)
    np.testing.assert_allclose(
        np.hypot(*held.observations[:, :2].T), 1, atol=1e-6
    )  # not normalised
    assert held.rewards.min() < -1  # normalised ones are small
    normalised = torch.tensor(env.normalize_obs(held.observations))
    with torch.no_grad():
        expected = model.policy.evaluate_actions(normalised, torch.tensor(held.actions))[1].numpy()
    final = known_policy(model)
    found = final.log_prob(held.observations, held.actions)  # with the final statistics
    np.testing.assert_allclose(found, expected, atol=2e-5)
    early = held.policies[0].log_prob(held.observations, held.actions)
    assert np.abs(found - early).max() > 0.01


def test_a_frozen_normaliser_is_part_of_the_policy() -> None:
    env = VecNormalize(envs("CartPole-v1"))
    env.reset()
    for _ in range(30):
        env.step(np.array([0, 1]))
    env.training = False
    played = [len(x) for x in env.env_method("get_episode_rewards")]
    model = ppo(env)
    ope = recording(envs("CartPole-v1"), eval_freq=1)
    model.learn(256, callback=ope)
    recorded = ope.training.view()
    recorded.audit()
    assert (recorded.rewards == 1).all()  # not the normalised ones
    assert isinstance(ope.policy, SoftmaxMlp)
    assert ope.policy.network.standardiser is not None
    monitored = env.env_method("get_episode_rewards")
    assert len(recorded) == sum(map(len, monitored)) - sum(played)
    starts = recorded.observations[recorded.offsets[:-1]]
    assert np.abs(starts).max() <= 0.05  # as CartPole begins, not normalised
    assert "put VecNormalize outermost" in why_no_snapshot(ppo(VecFrameStack(env, 2)))


def test_rewards_and_observations_that_were_normalised_are_not_recorded() -> None:
    def wrapped(wrapper: Any) -> VecEnv:
        return make_vec_env("CartPole-v1", 1, wrapper_class=wrapper)

    rewards, seen = gym.wrappers.NormalizeReward, gym.wrappers.NormalizeObservation
    model = ppo(wrapped(None))
    plain = DummyVecEnv([lambda: gym.make("CartPole-v1")])
    inner = VecMonitor(VecNormalize(plain, norm_obs=False))
    with pytest.raises(ValueError, match="VecMonitor around VecNormalize"):
        model.learn(64, callback=OPECallback(inner))
    with pytest.raises(ValueError, match=r"eval_env has .*NormalizeReward: values would be"):
        model.learn(64, callback=OPECallback(wrapped(rewards)))
    with pytest.raises(ValueError, match=r"eval_env has .*NormalizeObservation, whose stat"):
        model.learn(64, callback=OPECallback(wrapped(seen)))
    with pytest.raises(ValueError, match=r"the training env has .*NormalizeObservation"):
        ppo(wrapped(seen)).learn(64, callback=OPECallback(wrapped(None)))
    with pytest.raises(ValueError, match=r"the training env has .*NormalizeReward"):
        ppo(wrapped(rewards)).learn(64, callback=recording(wrapped(None)))
    ope = OPECallback(wrapped(None), verbose=0)  # rewards that are not recorded may be rescaled
    ppo(wrapped(rewards)).learn(64, callback=ope)
    assert (ope.held_out.view().rewards == 1).all()


# What cannot be done -------------------------------------------------------------------------


def test_the_environment_for_held_out_episodes_is_checked() -> None:
    env = gym.make("CartPole-v1")
    for own in (env, envs("CartPole-v1")):
        model = ppo(own)
        with pytest.raises(ValueError, match="eval_env is the environment of the training"):
            model.learn(10, callback=OPECallback(own))
    with pytest.raises(ValueError, match="observation_space of eval_env"):
        model.learn(10, callback=OPECallback(gym.make("Pendulum-v1")))
    with pytest.raises(ValueError, match=r"limit of 30 steps, but the training env has .* 40"):
        model.learn(10, callback=OPECallback(envs("CartPole-v1", limit=30)))


def test_episodes_that_never_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ppo(envs("MountainCar-v0"))
    with pytest.raises(ValueError, match=r"no time limit, but the training env has .* of 40 steps"):
        model.learn(10, callback=OPECallback(envs("MountainCar-v0", limit=-1)))
    endless = ppo(envs("MountainCar-v0", limit=-1))
    monkeypatch.setattr("wrappers.sb3.episodes._MOST_STEPS", 300)
    ope = OPECallback(envs("MountainCar-v0", limit=-1), verbose=0)
    with pytest.raises(RuntimeError, match=r"not over after 300 steps.*same max_ep"):
        endless.learn(10, callback=ope)
    assert len(ope.held_out) == 0


def test_options_and_files_are_checked_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="estimators has 'QIS'"):
        Recording(estimators=["NFIS", "QIS"])
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        OPECallback(gamma=1.5)
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        OPECallback(path=tmp_path / "nowhere" / "run.ope")
    (tmp_path / "run.ope").write_text("something else")
    with pytest.raises(ValueError, match="not an ope_gym file"):
        OPECallback(path=tmp_path / "run.ope")
    with pytest.raises(FileExistsError, match="exists and append=False"):
        OPECallback(path=tmp_path / "run.ope", recording=Recording(append=False))
    assert (tmp_path / "run.ope").read_text() == "something else"


def test_without_stable_baselines3_the_error_names_the_remedy() -> None:
    code = "import sys; sys.modules['stable_baselines3'] = None; import wrappers.sb3"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(r"needs Stable-Baselines3.*pip install .stable-baselines3>=", last)


def test_a_path_that_becomes_impossible_ends_the_training_at_its_start(tmp_path: Path) -> None:
    """Only a full or failing disk is worth patience: it may have room again."""
    path = tmp_path / "run.ope"
    ope = OPECallback(path=path, verbose=0)
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        ppo(envs("CartPole-v1")).learn(64, callback=ope)


def test_a_disk_that_is_full_at_the_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.ope"
    ope = OPECallback(path=path, eval_freq=1, verbose=0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("wrappers.recording.file.Store", full)
    with pytest.warns(UserWarning, match="device: 0 episodes are in the buffer.*the next") as seen:
        ppo(envs("CartPole-v1")).learn(64, callback=ope)
    assert len(seen) == 1


def test_a_file_that_exists_is_continued_with_a_warning(tmp_path: Path) -> None:
    """As recorders do: a seeded script that runs again would double its episodes in silence."""
    path = tmp_path / "run.ope"
    kept = []
    for append in (None, True):
        ope = OPECallback(path=path, recording=Recording(append=append), verbose=0)
        ppo(envs("CartPole-v1")).learn(128, callback=ope)
        kept.append(len(ope.training))
    with pytest.warns(UserWarning, match=rf"appended to the {sum(kept)} of earlier runs") as seen:
        OPECallback(path=path)
    assert seen[0].filename == __file__
    assert len(ope_gym.Trajectories.load(path)) == sum(kept)


def test_a_file_that_would_stay_empty_is_refused_with_what_helps(tmp_path: Path) -> None:
    path, play = tmp_path / "a.ope", envs("Pendulum-v1", 1, limit=10)
    with pytest.raises(ValueError, match=r"SAC does not tell how probable .* Leave path out$"):
        SAC("MlpPolicy", play, device="cpu").learn(10, callback=OPECallback(path=path))
    ope = OPECallback(path=path, recording=Recording(training=False))
    with pytest.raises(ValueError, match=r"training=False\), .* or give an eval_env$"):
        ppo(envs("CartPole-v1")).learn(10, callback=ope)
    settings = Recording(training=False)
    ope = OPECallback(envs("CartPole-v1"), path=path, deterministic=True, recording=settings)
    with pytest.raises(ValueError, match=r"Leave path out, or deterministic=True$"):
        ppo(envs("CartPole-v1")).learn(10, callback=ope)


# Policies ------------------------------------------------------------------------------------


class Squares(BaseFeaturesExtractor):
    """Feature extractor of a user: x and x²."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, 2 * space.shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x**2], dim=1)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_other_networks_are_copied_as_modules(name: str, normalised: bool, tmp_path: Path) -> None:
    env = VecNormalize(envs(name), training=False) if normalised else envs(name)
    if isinstance(env, VecNormalize):
        statistics: Any = env.obs_rms
        statistics.mean += 0.3
    model = ppo(env, policy_kwargs=small(features_extractor_class=Squares))
    ope = OPECallback(envs(name), eval_freq=1, path=tmp_path / "all.ope", verbose=0)
    model.learn(128, callback=ope)
    ope.trajectories().audit()
    assert isinstance(ope.policy, TorchPolicy)
    stored = ope_gym.Trajectories.load(tmp_path / "all.ope")
    restored = TorchPolicy.restore(stored.policies[1], actor_module(model))  # type: ignore[arg-type]
    seen, chosen = stored.observations, stored.actions
    np.testing.assert_array_equal(
        restored.log_prob(seen, chosen), ope.policy.log_prob(seen, chosen)
    )


def test_snapshots_of_images_hold_the_actor_once() -> None:
    space = spaces.Box(0, 255, (36, 36, 1), dtype=np.uint8)
    env: Any = gym.wrappers.TransformObservation(
        gym.make("CartPole-v1"), lambda x: np.full(space.shape, 9, np.uint8), space
    )
    model = PPO("CnnPolicy", env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")
    policy: Any = model.policy
    needed = [*policy.features_extractor.parameters(), *policy.action_net.parameters()]
    kind, arrays = ope_gym.policies.policy_to_arrays(known_policy(model))
    assert kind == "torch"
    assert sum(x.size for x in arrays.values()) == sum(p.numel() for p in needed)
    assert isinstance(policy.value_net, torch.nn.Linear)  # the model keeps its own
    model.learn(16, callback=OPECallback(copy.deepcopy(env), n_eval_episodes=1, verbose=0))


class Louder(ActorCriticPolicy):
    """Policy that acts by other probabilities than `get_distribution` gives."""

    def forward(self, obs: Any, deterministic: bool = False) -> Any:
        return super().forward(obs + 1.0, deterministic)


def test_a_policy_that_acts_unlike_its_distribution_is_refused() -> None:
    model = PPO(Louder, envs("CartPole-v1"), n_steps=32, batch_size=32, seed=0, device="cpu")
    policy: Any = model.policy
    policy.action_net.weight.data *= 100
    for callback in (recording, partial(OPECallback, verbose=0)):
        with pytest.raises(ValueError, match=r"SB3 says, but .* gives .*get_distribution"):
            model.learn(64, callback=callback(envs("CartPole-v1")))


def test_a_normaliser_may_not_begin_to_learn_later() -> None:
    env = VecNormalize(envs("CartPole-v1"), training=False)
    model, ope = ppo(env), recording(envs("CartPole-v1"))
    model.learn(128, callback=ope)
    env.training = True
    with pytest.raises(ValueError, match=r"Recording\(training=False\)"):
        model.learn(128, callback=ope, reset_num_timesteps=False)


@pytest.mark.parametrize("activation", ["Tanh", "ReLU", "ELU", "LeakyReLU", "SiLU", "Softplus"])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_snapshots_have_the_probabilities_of_sb3(activation: str, name: str) -> None:
    kind = getattr(torch.nn, activation)
    model = ppo(
        envs(name), policy_kwargs={"net_arch": [7, 5], "activation_fn": kind, "ortho_init": False}
    )
    found = known_policy(model)
    assert isinstance(found, TorchPolicy) is (activation == "Softplus")
    rng = np.random.default_rng(0)
    space = model.observation_space
    if isinstance(space, spaces.Discrete):
        seen = rng.integers(space.n, size=30)
    else:
        seen = rng.normal(size=(30, *space.shape)).astype(np.float32)  # type: ignore[misc]
    actions = found.sample(seen, rng)
    with torch.no_grad():
        expected = model.policy.evaluate_actions(torch.tensor(seen), torch.tensor(actions))[1]
    np.testing.assert_allclose(found.log_prob(seen, actions), expected.numpy(), atol=1e-5)
    assert found.log_prob(seen[:0], actions[:0]).shape == (0,)


def test_snapshots_are_equal_by_content_and_do_not_follow_the_training() -> None:
    model = ppo(envs("CartPole-v1"))
    first, again = snapshot(model), snapshot(model)
    assert first == again
    assert hash(first) == hash(again)
    seen = np.ones((3, 4), dtype=np.float32)
    before = first.probs(seen)  # type: ignore[attr-defined]
    model.learn(128)
    assert snapshot(model) != first
    np.testing.assert_array_equal(first.probs(seen), before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "DQN"])
def test_files_hold_the_policies_completely(name: str, tmp_path: Path) -> None:
    make, env_name = (dqn, "CartPole-v1") if name == "DQN" else (ppo, name)
    path = tmp_path / "run.ope"
    ope = OPECallback(envs(env_name), path=path, verbose=0)
    make(VecNormalize(envs(env_name))).learn(128, callback=ope)
    loaded = ope_gym.Trajectories.load(path)
    assert loaded.policies == ope.trajectories().policies
    values = [
        ope_gym.evaluate(x, x.policies[-1])["NFIS"].value for x in (loaded, ope.held_out.view())
    ]
    assert values[0] == values[1]
    if name != "CartPole-v1":
        return
    code = (  # a new process, where torch is not loaded
        "import sys; from ope_gym.cli import main; "
        f"assert main(['evaluate', {str(path)!r}, '--target', 'last']) == 0; "
        f"import ope_gym; ope_gym.Trajectories.load({str(path)!r}).audit(); "
        "assert not {'torch', 'stable_baselines3'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"^NFIS +-?\d", done.stdout, re.MULTILINE)
    assert "data: held-out" in done.stdout


class _At(BaseCallback):
    """Calls a function at some timesteps."""

    def __init__(self, moments: dict[int, Callable[[], None]]) -> None:
        super().__init__()
        self._moments = moments

    def _on_step(self) -> bool:
        self._moments.get(self.num_timesteps, lambda: None)()
        return True


def _interrupt() -> None:
    raise KeyboardInterrupt


def assert_holds(path: Path, ope: OPECallback) -> None:
    """Compare a file with the record in memory, which has another order."""
    loaded, kept = ope_gym.Trajectories.load(path), ope.trajectories()
    assert set(loaded.policies) == set(kept.policies)
    assert len(loaded) == len(kept)
    for held_out in (False, True):
        here, there = (x.select(held_out=held_out) for x in (loaded, kept))
        for name in ("observations", "actions", "rewards", "log_probs", "start_clock", "lengths"):
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
        acted = [[x.policies[k] for k in x.policy_ids] for x in (here, there)]
        assert acted[0] == acted[1]
    loaded.audit()


def test_an_interrupted_run_leaves_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run.ope"
    ope = OPECallback(envs("CartPole-v1"), eval_freq=1, path=path, verbose=0)
    model = ppo(envs("CartPole-v1"))
    with pytest.raises(KeyboardInterrupt):
        model.learn(1000, callback=CallbackList([ope, _At({300: _interrupt})]))
    found = ope_gym.Trajectories.load(as_if_killed(path))
    assert found.held_out.sum() == 20  # of two evaluations
    ended = (found.start_clock + found.lengths)[~found.held_out].max()
    assert 128 < ended <= 150  # in the rollout that was stopped
    for _ in range(2):
        model.learn(128, callback=ope)
        assert_holds(path, ope)
    assert len(read_stored(path).policies) == len(ope.trajectories().policies)


_TRAIN = """
import sys
import torch
from stable_baselines3.common.callbacks import CallbackList
from tests.test_sb3 import *

class Loud(gym.Wrapper):
    ended = 0
    def step(self, action):
        found = self.env.step(action)
        Loud.ended += found[2] or found[3]
        return found

class Announce(BaseCallback):
    ended = 0
    def _on_step(self):
        self.ended += int(self.locals["dones"].sum())
        print(self.ended, Loud.ended, flush=True)
        return True

torch.set_num_threads(1)
fresh = Loud(gym.make("CartPole-v1", max_episode_steps=40))
ope = OPECallback(fresh, eval_freq=192, path=sys.argv[1], verbose=0)
model = ppo(envs("CartPole-v1"), n_steps=32, n_epochs=1)
model.learn(10**9, callback=CallbackList([ope, Announce()]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_training_loses_its_open_episodes_and_no_more(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "run.ope"
    command = [sys.executable, "-W", "ignore", "-c", _TRAIN, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [b"0 0\n"]
        while int(lines[-1].split()[0]) <= 10:
            lines.append(process.stdout.readline())
        time.sleep(random.Random(number).uniform(0.0, 1.0))
        process.send_signal(number)
        lines += process.stdout.read().splitlines(keepends=True)
    assert process.returncode == -number
    training, held_out = map(int, [x for x in lines if x.endswith(b"\n")][-1].split())
    assert held_out >= 10
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*ends inside its last block")
        found = ope_gym.Trajectories.load(path)
    # what ended after the last line, in the last step or in an evaluation, comes on top
    assert training <= (~found.held_out).sum() <= training + 2
    assert held_out <= found.held_out.sum() <= held_out + 10
    found.audit()


@pytest.mark.parametrize("until", [400, 10_000])
def test_a_full_disk_is_a_warning(
    until: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = store._write_chunks, [False]

    def write_some(*args: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(store, "_write_chunks", write_some)
    path = tmp_path / "run.ope"
    ope = OPECallback(envs("CartPole-v1"), eval_freq=1, path=path, verbose=0)
    moments = {200: lambda: full.insert(0, True), until: lambda: full.insert(0, False)}
    model = ppo(envs("CartPole-v1"))
    with pytest.warns(UserWarning, match=r"run.ope: No space left.*tries again") as seen:
        model.learn(640, callback=CallbackList([ope, _At(moments)]))
    assert len(seen) == 1
    assert len(ope.evaluations) == 5
    if until > 640:  # until the end
        some = ope_gym.Trajectories.load(path)
        assert 0 < len(some) < len(ope.trajectories())
        full.insert(0, False)
        model.learn(128, callback=ope)
    assert_holds(path, ope)


# What it shows -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ppo, dqn])
def test_training_and_its_logs_are_the_same_with_and_without_the_callback(
    make: Any, tmp_path: Path
) -> None:
    found, weights = [], []
    for run in ("with", "without"):
        ope = OPECallback(envs("CartPole-v1"), eval_freq=128 if make is ppo else 80, verbose=0)
        model = make(envs("CartPole-v1", 1), tensorboard_log=str(tmp_path / run))
        model.learn(256, callback=ope if run == "with" else None, log_interval=2)
        weights.append(torch.cat([p.flatten() for p in model.policy.parameters()]))
        (folder,) = (tmp_path / run).iterdir()
        events = EventAccumulator(str(folder)).Reload()
        found.append(
            {
                tag: [(e.step, e.value) for e in events.Scalars(tag)]
                for tag in events.Tags()["scalars"]
                if not tag.startswith(("ope/", "diagnostics/"))
            }
        )
        for values in (x for tag, x in found[-1].items() if tag == "time/fps"):
            values[:] = [(step, 0.0) for step, _ in values]
    assert found[0] == found[1]
    assert {"rollout/ep_rew_mean", "train/loss"} <= set(found[0])
    assert torch.equal(*weights)


def test_values_go_to_the_logger_of_sb3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ppo(envs("CartPole-v1"), tensorboard_log=str(tmp_path))
    ope = OPECallback(envs("CartPole-v1"), eval_freq=1, recording=Recording(estimators="NFIS"))
    model.learn(256, callback=ope)
    events = EventAccumulator(str(tmp_path / "PPO_1")).Reload()
    tags = events.Tags()
    for kind, estimates in (("provisional", ope.evaluations), ("fresh", ope.fresh)):
        for end in ("value", "low", "high"):
            shown = [(e.step, e.value) for e in events.Scalars(f"ope/{kind}/{end}")]
            expected = [(e.timesteps, getattr(e, end)) for e in estimates]
            np.testing.assert_allclose(shown, expected, rtol=1e-6)
    counts = [e.value for e in events.Scalars("ope/fresh_episodes")]
    np.testing.assert_allclose(counts, [e.fresh_episodes for e in ope.evaluations], rtol=1e-6)
    verdicts = [e.value for e in events.Scalars("ope/verdict")]
    assert verdicts == [0.0 if w < 4 else 1.0 if w < 10 else 2.0 for w in counts]
    (layout,) = events.Tensors("custom_scalars__config__")
    (shape,) = layout.tensor_proto.string_val
    assert b"rollout/(return|ep_rew_mean)$" in shape
    assert b"ope/settled/low" in shape
    assert "ope/report" in tags["tensors"]
    assert ope.report is not None
    out = capsys.readouterr().out
    assert "\n128 timesteps: worth " in out
    assert "\n256 timesteps: worth " not in out  # the closing lines say it
    assert "The policy after 256 timesteps is worth " in out
    assert "data: held-out" in out


def test_other_outputs_get_the_values_too(tmp_path: Path) -> None:
    model = ppo(envs("CartPole-v1"))
    model.set_logger(configure(str(tmp_path), ["csv"]))
    ope = OPECallback(eval_freq=1, verbose=0)
    model.learn(256, callback=ope)
    model.logger.close()
    with open(tmp_path / "progress.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["ope/provisional/value"]]
    assert len(rows) == len(ope.evaluations) == 2
    assert [int(float(row["ope/timesteps"])) for row in rows] == [128, 256]
    assert not any(row["train/loss"] for row in rows)  # rows of their own


def test_the_training_is_kept_only_where_it_is_needed(tmp_path: Path) -> None:
    for options, kept in (
        ({}, False),
        ({"recording": Recording(training=True)}, True),
        ({"path": tmp_path / "run.ope"}, True),
        ({"recording": Recording(estimators="NFIS")}, True),
    ):
        ope = OPECallback(verbose=0, **options)
        ppo(envs("CartPole-v1")).learn(128, callback=ope)
        assert (len(ope.training) > 0) is kept
