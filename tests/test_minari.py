"""Tests of Minari datasets: ours come back unchanged, and those of others without policies."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.minari import from_minari, to_minari
from ope_gym.data.tables.header import sealed
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import (
    LinearSigmoid,
    Policy,
    UnavailablePolicy,
    Uniform,
    UnknownPolicy,
)
from tests.file_builders import assert_identical, constant_buffer, recording
from tests.test_record import EXOTIC
from wrappers import RecordTrajectories, collect

minari = pytest.importorskip("minari")
EpisodeBuffer = pytest.importorskip("minari.data_collector").EpisodeBuffer
ID = "ope/test-v0"
STORABLE = [name for name in EXOTIC if name not in ("Sequence", "Graph", "OneOf")]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


# There and back ------------------------------------------------------------------------------


def test_everything_comes_back() -> None:
    data = recording()
    dataset = to_minari(data, ID, description="four episodes")
    for found in (from_minari(dataset), from_minari(ID)):
        assert_identical(found, data)
        assert found.policies == data.policies
        assert found.has_propensities


def test_what_others_see_is_what_minari_promises() -> None:
    data = recording()
    to_minari(data, ID, env="CartPole-v1")
    dataset = minari.load_dataset(ID)
    assert (dataset.total_episodes, dataset.total_steps) == (4, 10)
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    for i, episode in enumerate(dataset.iterate_episodes()):
        rows = slice(data.offsets[i], data.offsets[i + 1])
        n = int(data.lengths[i])
        assert len(episode.rewards) == len(episode.actions) == n
        assert len(episode.observations) == n + 1
        assert np.array_equal(episode.observations[-1], episode.observations[-2])
        assert np.array_equal(episode.observations[:-1], data.observations[rows])
        assert episode.terminations.tolist() == [False] * (n - 1) + [bool(data.terminated[i])]
        assert episode.truncations.tolist() == [False] * (n - 1) + [bool(data.truncated[i])]
        assert np.isnan(episode.infos["log_prob"][0])
        assert np.array_equal(episode.infos["log_prob"][1:], data.log_probs[rows])
        assert episode.infos["policy_id"].tolist() == [-1, *data.policy_ids[rows]]
    stored = dataset.storage.metadata["ope_gym"]
    assert stored["last_observation"] == "repeated"
    labels = list(dataset.storage.get_episode_metadata([0, 1]))
    assert [(bool(x["held_out"]), int(x["start_clock"])) for x in labels] == [
        (True, 10),
        (False, -1),
    ]


@pytest.mark.parametrize("name", STORABLE)
def test_any_space_that_minari_has(name: str) -> None:
    data = constant_buffer(*EXOTIC[name])
    to_minari(data, ID)
    assert_identical(from_minari(ID), data)


@pytest.mark.parametrize("name", ["Sequence", "Graph", "OneOf"])
def test_spaces_that_minari_lacks(name: str, root: Path) -> None:
    data = constant_buffer(*EXOTIC[name])
    with pytest.raises(ValueError, match=r"observation_space is .* which Minari cannot store"):
        to_minari(data, ID)
    assert not list(root.iterdir())


def test_nested_spaces_keep_the_order_of_their_keys() -> None:
    space = spaces.Dict(
        {
            "z": spaces.Tuple([spaces.Discrete(5, start=2), spaces.Dict(a=spaces.MultiBinary(3))]),
            "a": spaces.Box(0, 255, (2, 2), np.uint8),
        },
        sort_keys=False,
    )
    space.seed(3)
    samples = [space.sample() for _ in range(9)]
    data = constant_buffer(space, lambda t: samples[t])
    assert list(data.observations) == ["z", "a"]
    to_minari(data, ID)
    assert_identical(from_minari(ID), data)


def test_a_dict_key_that_hdf5_would_split(root: Path) -> None:
    space = spaces.Dict({"a/b": spaces.Discrete(9)})
    data = constant_buffer(space, lambda t: {"a/b": np.int64(t)})
    with pytest.raises(ValueError, match=r"observation_space has the key 'a/b'"):
        to_minari(data, ID)
    assert not list(root.iterdir())


def test_some_episodes_of_a_dataset() -> None:
    data = recording()
    dataset = to_minari(data, ID)
    some = dataset.filter_episodes(lambda episode: len(episode) > 1)
    assert_identical(from_minari(some), data.select(episodes=[0, 2, 3]))


def test_policies_that_files_cannot_hold() -> None:
    class Mine:
        def log_prob(self, observations: Any, actions: Any) -> Any:
            return np.full(len(actions), -0.5)

        def sample(self, observations: Any, rng: Any) -> Any:
            raise NotImplementedError

    data = dataclasses.replace(recording(), policies=(Mine(), Uniform(2), Uniform(3)))
    with pytest.warns(UserWarning, match=r"Mine is not registered: the dataset will not"):
        to_minari(data, ID)
    found = from_minari(ID).policies
    assert isinstance(found[0], UnavailablePolicy)
    assert found[1:] == (Uniform(2), Uniform(3))
    to_minari(from_minari(ID), "again-v0")  # what is lost already needs no warning


# What cannot be written ----------------------------------------------------------------------


def test_a_name_that_is_taken_is_left_alone() -> None:
    data = recording()
    to_minari(data, ID)
    with pytest.raises(ValueError, match=r"dataset_id='ope/test-v0' exists already: .*delete"):
        to_minari(data.select(episodes=[0]), ID)
    assert_identical(from_minari(ID), data)


def test_no_episode() -> None:
    with pytest.raises(ValueError, match="trajectories is empty"):
        to_minari(TrajectoryBuffer(spaces.Discrete(2), spaces.Discrete(2)), ID)


def test_unknown_spaces() -> None:
    data = dataclasses.replace(recording(), action_space=None)
    with pytest.raises(ValueError, match=r"action_space of the trajectories is unknown.*replace"):
        to_minari(data, ID)


def test_a_failure_leaves_nothing_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minari.dataset._storages.hdf5_storage import HDF5Storage

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(HDF5Storage, "update_episode_metadata", full)
        with pytest.raises(OSError, match="No space left"):
            to_minari(recording(), ID)
    assert not (root / "ope" / "test-v0").exists()
    to_minari(recording(), ID)  # the name is free


# What others wrote ---------------------------------------------------------------------------


def write_foreign(
    lengths: tuple[int, ...] = (3, 2),
    *,
    env: str | None = None,
    infos: Callable[[int], dict[str, Any]] = lambda n: {},
    ends: Callable[[int], list[bool]] = lambda n: [False] * (n - 1) + [True],
) -> Any:
    buffers = [
        EpisodeBuffer(
            observations=np.arange((n + 1) * 4, dtype=np.float32).reshape(n + 1, 4) + i,
            actions=np.arange(n) % 2,
            rewards=np.full(n, 1.0 + i),
            terminations=np.array(ends(n)),
            truncations=np.zeros(n, dtype=bool),
            infos=infos(n),
        )
        for i, n in enumerate(lengths)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minari.create_dataset_from_buffers(
            "foreign-v0",
            buffers,
            env=env,
            observation_space=spaces.Box(-np.inf, np.inf, (4,), np.float32),
            action_space=spaces.Discrete(2),
        )


def test_without_propensities_nothing_is_made_up(tmp_path: Path) -> None:
    write_foreign(env="CartPole-v1")
    data = from_minari("foreign-v0")
    assert data.observations[:, 0].tolist() == [0, 4, 8, 1, 5]  # without the last ones
    assert data.rewards.tolist() == [1, 1, 1, 2, 2]
    assert data.horizon == 500
    assert not data.has_propensities
    assert np.isnan(data.log_probs).all()
    (policy,) = data.policies
    assert isinstance(policy, UnknownPolicy)
    with pytest.raises(RuntimeError, match=r"log_prob of UnknownPolicy\(\): nothing recorded"):
        data.audit()
    data.save(tmp_path / "file")  # and it stays so
    again = Trajectories.load(tmp_path / "file")
    assert_identical(again, data)
    assert isinstance(again.policies[0], UnknownPolicy)
    to_minari(data, ID)
    assert_identical(from_minari(ID), data)
    assert not from_minari(ID).has_propensities


def test_two_unknown_policies_are_not_one() -> None:
    write_foreign()
    data = from_minari("foreign-v0")
    both = data.merge(from_minari("foreign-v0"))
    assert both.policy_ids.tolist() == [0] * 5 + [1] * 5
    assert len(both.merge(both).policies) == 2  # but each is itself


@pytest.mark.parametrize("rows", [0, 1])
def test_propensities_by_the_name_of_their_info(rows: int) -> None:
    write_foreign(infos=lambda n: {"logp": -np.arange(n + rows, dtype=np.float64)})
    data = from_minari("foreign-v0", log_prob="logp")
    assert data.has_propensities
    first = float(rows)
    assert data.log_probs.tolist() == [-first, -first - 1, -first - 2, -first, -first - 1]
    assert not from_minari("foreign-v0").has_propensities


def test_infos_that_are_no_propensities() -> None:
    write_foreign(infos=lambda n: {"x": np.zeros(n + 1), "y": np.zeros((n + 1, 2))})
    with pytest.raises(ValueError, match=r"episode 0 has no info 'logp', only \['x', 'y'\]"):
        from_minari("foreign-v0", log_prob="logp")
    with pytest.raises(ValueError, match=r"episode 0: info 'y' has shape \(4, 2\), expected \(4,"):
        from_minari("foreign-v0", log_prob="y")


def test_missing_propensities_only_where_nobody_knows_who_acted() -> None:
    arguments: dict[str, Any] = {"offsets": [0, 2], "terminated": True}
    known: list[list[Policy]] = [[Uniform(2)], [UnknownPolicy(), Uniform(2)]]
    for policies in known:
        with pytest.raises(ValueError, match="episode 0, step 1: log_probs is nan"):
            Trajectories.from_arrays(
                np.zeros((2, 1)),
                [0, 1],
                [0.0, 0.0],
                [-0.5, np.nan],
                policies=policies,
                policy_ids=len(policies) - 1,
                **arguments,
            )
    with pytest.raises(ValueError, match="episode 0, step 0: log_probs is -inf"):
        Trajectories.from_arrays(
            np.zeros((2, 1)),
            [0, 1],
            [0.0, 0.0],
            [-np.inf, np.nan],
            policies=[UnknownPolicy()],
            **arguments,
        )


def test_a_recording_that_outlasts_the_time_limit_has_none() -> None:
    write_foreign((501, 3), env="CartPole-v1")
    assert from_minari("foreign-v0").horizon is None


def test_unfinished_episodes_are_refused() -> None:
    dataset = write_foreign((3, 2), ends=lambda n: [False] * (n - 1) + [n == 3])
    with pytest.raises(ValueError, match="episode 1: terminated and truncated are both false"):
        from_minari(dataset)
    assert len(from_minari(dataset.filter_episodes(lambda e: e.terminations[-1]))) == 1


def test_episodes_that_go_on_after_their_end_are_refused() -> None:
    dataset = write_foreign((2, 3), ends=lambda n: [False, True, True][:n])
    with pytest.raises(ValueError, match="episode 1 has ended at step 1, but goes on for 3 steps"):
        from_minari(dataset)


def test_an_episode_that_somebody_added() -> None:
    dataset = to_minari(recording(), ID)
    before = from_minari(dataset)
    episode = EpisodeBuffer(
        observations=np.zeros((2, 4)),
        actions=np.zeros(1, dtype=int),
        rewards=[1.0],
        terminations=[True],
        truncations=[False],
        infos={"log_prob": np.array([np.nan, -0.5]), "policy_id": np.array([-1, 0])},
    )
    dataset.update_dataset_from_buffer([episode])
    with pytest.raises(ValueError, match=r"episode 4 was added .* somebody else; .*log_prob="):
        from_minari(dataset)
    without = from_minari(dataset, log_prob="log_prob")
    assert np.array_equal(without.log_probs[:-1], before.log_probs)
    assert isinstance(without.policies[0], UnknownPolicy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.update(version=2), "version 2 is not known; update"),
        (lambda meta: meta.pop("policies"), "'policies'"),
        (lambda meta: meta["policies"].pop(), "names policy 2"),
        (lambda meta: meta["policies"][0]["arrays"].update(theta="AAAA"), "array cannot be read"),
        (lambda meta: meta["policies"][0]["arrays"].update(theta="!"), "cannot be read"),
        (lambda meta: meta.update(schedules=[5]), "cannot be read"),
        (lambda meta: meta.update(horizon=2), "horizon=2 is less"),
    ],
)
def test_forged_metadata(change: Callable[[Any], object], message: str, root: Path) -> None:
    to_minari(recording(), ID)
    path = root / "ope" / "test-v0" / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    change(metadata["ope_gym"])
    metadata["ope_gym"] = sealed(metadata["ope_gym"])
    path.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=message):
        from_minari(ID)


def test_damaged_datasets(root: Path) -> None:
    to_minari(recording(), ID)
    path = root / "ope" / "test-v0" / "data" / "main_data.hdf5"
    content = path.read_bytes()
    for damaged in (content[:-1000], content[:96] + bytes(400) + content[496:], b"", b"no HDF5"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="dataset ope/test-v0 cannot be read: "):
            from_minari(ID)
    path.write_bytes(content)
    with pytest.importorskip("h5py").File(path, "r+") as file:
        file["episode_2/rewards"][0] += 1
    with pytest.raises(ValueError, match="episode 2 does not match its checksum"):
        from_minari(ID)


# Evaluation without propensities --------------------------------------------------------------


def logged_by_nobody() -> Trajectories:
    """Make episodes of CartPole of which only observations, actions and rewards are known."""
    env = RecordTrajectories(gym.make("CartPole-v1", max_episode_steps=20), held_out=1.0)
    collect(env, LinearSigmoid(np.zeros(4)), 60, 7, seed=3)
    data = env.buffer.view()
    missing = np.full(data.n_steps, np.nan)
    to_minari(dataclasses.replace(data, policies=(UnknownPolicy(),), log_probs=missing), ID)
    return from_minari(ID)


def test_without_propensities_only_models_are_evaluated() -> None:
    from ope_gym import evaluate

    data, target = logged_by_nobody(), LinearSigmoid(np.array([0.0, 0.0, 1.0, 0.5]))
    evaluation = evaluate(data, target)
    assert list(evaluation) == ["DM", "MDR"]
    assert 15 < evaluation["DM"].value < 20
    other = evaluate(data, LinearSigmoid(np.zeros(4)))
    assert np.isfinite(evaluation.difference(other)["DM"].value)  # the same data, and known to be


def test_the_message_names_what_can_be_had() -> None:
    from ope_gym import evaluate

    write_foreign(infos=lambda n: {"logp": np.full(n + 1, np.log(0.5))})
    data, target = from_minari("foreign-v0", log_prob="logp"), LinearSigmoid(np.zeros(4))
    with pytest.raises(ValueError, match=r"NFIS.*policies that acted, .*nothing recorded how"):
        evaluate(data, target, estimators="NFIS")
    assert list(evaluate(data, target, estimators=["BIS", "NBIS"])) == ["BIS", "NBIS"]
    assert list(evaluate(data, target, estimators="FQE")) == ["DM"]  # as others call it


def test_held_out_can_be_stated() -> None:
    from ope_gym import evaluate

    write_foreign(infos=lambda n: {"logp": np.full(n + 1, np.log(0.5))})
    assert not from_minari("foreign-v0", log_prob="logp").held_out.any()
    data = from_minari("foreign-v0", log_prob="logp", held_out=True)
    assert data.held_out.all()
    assert not data.held_out.flags.writeable
    found = evaluate(data, LinearSigmoid(np.zeros(4)), estimators="BIS", held_out=True)
    assert found.sample.regime == "held-out"
    to_minari(data, ID)
    assert from_minari(ID).held_out.all()
    assert not from_minari(ID, held_out=False).held_out.any()


def test_combined_datasets_have_lost_their_policies() -> None:
    env = RecordTrajectories(gym.make("CartPole-v1"), held_out=0.5)
    names = ["ope/first-v0", "ope/second-v0"]
    for k, name in enumerate(names):
        collect(env, LinearSigmoid(np.full(4, 0.1 * k)), 6, k, seed=k)
        to_minari(env.buffer.select(policies=k), name, env="CartPole-v1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minari.combine_datasets([minari.load_dataset(name) for name in names], ID)
    with pytest.warns(UserWarning, match=r"combine_datasets drops them.*merge\(from_minari"):
        assert not from_minari(ID).has_propensities
    assert from_minari(ID, log_prob="log_prob").has_propensities
    merged = from_minari(names[0]).merge(from_minari(names[1]))
    merged.audit(1e-9)
    assert len(merged) == 12
