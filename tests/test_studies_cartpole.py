"""Table 2 in miniature, and a simulation that is Gymnasium's."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import evaluate_log_probs
from ope_gym.policies import LinearSigmoid
from studies.cartpole import simulation
from studies.cartpole import study as cartpole
from studies.harness import errors
from studies.harness.claims import FAILS, HOLDS, UNDECIDED
from studies.harness.registry import load_study
from studies.harness.runner import conduct
from studies.harness.seeds import seeds_of, streams
from studies.harness.study import Summary
from wrappers import RecordTrajectories
from wrappers import collect as play

SMALL = cartpole.CartPole(env="CartPole-v0", truth_rollouts=1000)
POLICIES = [
    LinearSigmoid(np.zeros(4)),
    LinearSigmoid(np.array([0.1, 0.5, 9.0, 3.0])),  # balances: some episodes meet the time limit
    LinearSigmoid(np.array([-40.0, 10.0, 500.0, 100.0]), bias=0.5),  # nearly deterministic
]


def make(name: str) -> gym.Env[NDArray[np.float32], np.int64]:
    with warnings.catch_warnings():  # Gymnasium says that v0 is out of date
        warnings.simplefilter("ignore", DeprecationWarning)
        return gym.make(name)


# --- simulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", simulation.HORIZON)
@pytest.mark.parametrize("policy", POLICIES)
def test_rollouts_are_those_recorded_from_gymnasium(name: str, policy: LinearSigmoid) -> None:
    env = RecordTrajectories(make(name))
    rng = np.random.default_rng(3)
    env.unwrapped.np_random = rng  # one generator for starts and actions, as in the simulation
    play(env, policy, 12, rng)
    theirs, horizon = env.buffer.view(), simulation.HORIZON[name]
    ours = simulation.rollouts(policy, 12, horizon, np.random.default_rng(3))
    assert horizon == theirs.horizon == ours.horizon
    np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    np.testing.assert_array_equal(ours.actions, theirs.actions)
    np.testing.assert_array_equal(ours.terminated, theirs.terminated)
    np.testing.assert_array_equal(ours.truncated, theirs.truncated)
    np.testing.assert_array_equal(ours.rewards, theirs.rewards)
    # cos and sin may differ by a rounding error, which grows; float32 shows little of it
    np.testing.assert_allclose(ours.observations, theirs.observations, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, rtol=1e-4, atol=1e-6)
    assert ours.observations.dtype == theirs.observations.dtype == np.float32


def test_states_are_gymnasiums_step_by_step() -> None:
    env, rng = make("CartPole-v1").unwrapped, np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(300):
        start = rng.normal(size=4) * [2.0, 2.0, 0.3, 3.0]
        action = rng.integers(2)
        env.state = start  # type: ignore[attr-defined]
        env.steps_beyond_terminated = None  # type: ignore[attr-defined]
        env.step(action)
        after = simulation.follow(start, np.array([action]))[1]
        np.testing.assert_allclose(after, env.state, rtol=1e-14, atol=1e-16)  # type: ignore[attr-defined]


# --- study ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Summary:
    return SMALL.summarise(SMALL.run(seeds_of(0, (0, 48))))


def test_values_are_those_of_the_door_for_arrays() -> None:
    seed = seeds_of(2, (0, 1))[0]
    training, fresh, _, elsewhere = streams(seed, 4)
    policies, trained, target = SMALL.train(training)
    targets = (target, SMALL.train(elsewhere)[-1])
    again = [simulation.rollouts(p, SMALL.rollouts, 200, fresh) for p in policies]
    run = SMALL.run([seed])
    for source, t in np.ndindex(2, 2):
        batches = (again, trained)[source]
        data = batches[0].merge(*batches[1:])
        assert len(data) == 300
        found = evaluate_log_probs(
            targets[t].log_prob(data.observations, data.actions),
            LinearSigmoid.log_prob_stack(policies, data.observations, data.actions),
            np.repeat(np.arange(10), 30),
            data.rewards,
            data.offsets,
            estimators=cartpole.NAMES,
        )
        values = [estimate.value for estimate in found.values()]
        np.testing.assert_allclose(run["values"][0, t, source], values, rtol=1e-9)
    by_policy = run["bis"][0] + run["truth"][0]
    np.testing.assert_allclose(by_policy.mean(), run["values"][0, 0, 0, 0], rtol=1e-9)


def test_fresh_data_are_held_out_and_in_sample_data_are_what_was_learned_from() -> None:
    policies, trained, target = SMALL.train(np.random.default_rng(0))
    assert len(policies) == len(trained) == SMALL.iterations
    assert [batch.policies[0] for batch in trained] == policies
    assert not any(batch.held_out.any() for batch in trained)
    assert (policies[0].theta == 0).all()
    assert target not in policies


def test_steady_claims_of_table_2(small: Summary) -> None:
    claims = {claim.words: claim for claim in SMALL.claims(small)}
    assert claims["OUIS has similar performance to FIS: RMSEs within 1%"].verdict == HOLDS
    for words in ("FIS dominates BIS", "normalising pays: BIS, BCIS > NBIS > NFIS"):
        assert claims[words].verdict != FAILS
        assert all(evidence.difference > 0 for evidence in claims[words].evidence)


def test_fresh_data_are_unbiased_and_in_sample_data_are_not(small: Summary) -> None:
    """FIS, paired by run: what the 48 runs can tell apart."""
    fis = small["names"].index("FIS")
    fresh, own = (small["sources"][source] for source in cartpole.SOURCES)
    assert abs(fresh["bias"][fis]) < 3 * fresh["bias_error"][fis]
    gap = small["optimism"]
    assert gap["mean"][fis] > 3 * gap["error"][fis]
    assert own["bias"][fis] > 3 * own["bias_error"][fis]


def test_summary_shows_truth_and_learning(small: Summary) -> None:
    assert small["learned"][0] == pytest.approx(22, abs=2)
    assert small["learned"][-1] > 2 * small["learned"][0]
    assert 0 < small["truth"][1] < 3
    for found in small["sources"].values():
        np.testing.assert_allclose(
            found["mse"],
            found["bias"] ** 2 + found["deviation"] ** 2 * 47 / 48 - small["truth"][1] ** 2 / 48,
            rtol=1e-9,
        )


def test_one_run_leaves_comparisons_undecided(tmp_path: Path) -> None:
    result = conduct(SMALL, tmp_path, runs=1, progress=False)
    assert {claim["verdict"] for claim in result["claims"]} == {UNDECIDED}
    assert "| BIS | 122.32 | 236.73 | 321.40 |" in result["table"]
    (picture,) = tmp_path.glob("cartpole-env-CartPole-v0-*.png")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("settings", [{"exploration": "parameters"}, {"weighting": "reward-to-go"}])
def test_other_kinds_of_power(settings: dict[str, Any]) -> None:
    study = cartpole.CartPole(env="CartPole-v0", truth_rollouts=50, rollouts=6, **settings)
    policies, trained, _ = study.train(np.random.default_rng(0))
    each = 6 if "exploration" in settings else 1
    assert len(policies) == len(set(policies)) == 10 * each
    assert [len(batch) for batch in trained] == [6] * 10
    runs = study.run(seeds_of(0, (0, 2)))
    assert runs["values"].shape == (2, 2, 2, len(cartpole.NAMES))
    assert np.isfinite(runs["values"]).all()


def test_what_power_cannot_combine_is_refused() -> None:
    with pytest.raises(ValueError, match="use exploration='action'"):
        load_study("cartpole", exploration="parameters", weighting="reward-to-go")


def test_unknown_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of CartPole-v0, CartPole-v1"):
        load_study("cartpole", env="CartPole-v2")


# --- errors -----------------------------------------------------------------------------------


def test_errors_in_numbers() -> None:
    two = np.array([[1.0, 2.0], [-1.0, 4.0], [1.0, 2.0], [-1.0, 4.0]])
    covered = np.array([[True, False]] * 4)
    found = errors.describe(two, np.full(4, 0.5), covered)
    np.testing.assert_allclose(found["mse"], [0.5, 9.5])
    np.testing.assert_allclose(found["bias"], [0.0, 3.0])
    np.testing.assert_allclose(found["deviation"] ** 2, [4 / 3 - 0.5, 4 / 3 - 0.5])
    np.testing.assert_allclose(found["coverage"], [1.0, 0.0])
    np.testing.assert_allclose(found["largest_share"], [0.25, 0.4])
    np.testing.assert_allclose(found["pairs"]["difference"], [[0.0, -9.0], [9.0, 0.0]])
    assert found["pairs"]["log_ratio"][1, 0] == pytest.approx(0.5 * math.log(19))
    assert found["pairs"]["larger"][1, 0] == 1.0
    np.testing.assert_allclose(found["mse_percentiles"][0], 0.5)
    assert found["batch_rmse"].shape == (4, 2)


@pytest.mark.parametrize(("runs", "size", "batches"), [(2000, 400, 5), (400, 50, 8), (3, 1, 3)])
def test_batches_are_of_400_runs_if_there_are_several(runs: int, size: int, batches: int) -> None:
    values = np.ones((runs, 1))
    found = errors.describe(values, np.zeros(runs), np.ones((runs, 1), dtype=np.bool_))
    assert (found["batch_size"], len(found["batch_rmse"])) == (size, batches)


def test_noise_above_the_error_leaves_no_number() -> None:
    found = errors.describe(np.ones((3, 1)), np.full(3, 2.0), np.ones((3, 1), dtype=np.bool_))
    assert np.isnan(found["rmse"]).all()
    evidence = errors.larger_rmse("here", found, ["BIS"], [("BIS", "BIS")])[0]
    assert evidence.verdict == UNDECIDED


def test_one_run_that_makes_the_mean_square_decides_nothing() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(400, 3)) * [1.0, 3.0, 1.0]
    values -= values.mean(axis=0)
    values[7, 2] = 60.0  # an estimator that is like the first but for one run
    found = errors.describe(values, np.zeros(400), np.ones((400, 3), dtype=np.bool_))
    names = ["a", "b", "c"]

    def verdicts(*pairs: tuple[str, str]) -> list[str]:
        return [e.verdict for e in errors.larger_rmse("", found, names, pairs)]

    assert found["rmse"][2] > 2.5
    assert verdicts(("b", "a"), ("a", "b")) == [HOLDS, FAILS]
    assert verdicts(("c", "a"), ("a", "c")) == [UNDECIDED, UNDECIDED]
    assert verdicts(("b", "c"), ("c", "b")) == [UNDECIDED, UNDECIDED]
    steady, heavy = errors.unbiased("", found, names, ("a", "c"), 10.0)
    assert (steady.verdict, heavy.verdict, heavy.open) == (HOLDS, UNDECIDED, "tail")


def test_streams_are_independent_of_what_was_drawn_before() -> None:
    seed = np.random.SeedSequence(1, spawn_key=(4,))
    first = [rng.random() for rng in streams(seed, 3)]
    assert first == [rng.random() for rng in streams(seed, 3)]
    assert first[:2] == [rng.random() for rng in streams(seed, 2)]
    assert len(set(first)) == 3
