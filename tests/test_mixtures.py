"""Test evaluation with many behaviours: partial mixtures and strata of neighbours."""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ope_gym import Bootstrap, Trajectories, Weighting, evaluate, evaluate_log_probs, rank
from ope_gym.cli import main
from ope_gym.data.schedules import Schedule
from ope_gym.estimators.run import sum_arrays
from ope_gym.inference.errors import join_single, joined, standard_error
from ope_gym.inference.estimate import PartialMixture
from ope_gym.policies import LinearSigmoid
from ope_gym.weights import behaviours as many
from ope_gym.weights.behaviours import Behaviours, behaviours_of
from ope_gym.weights.formula import log_weights
from tests import reference, small_mdps
from tests.builders import LogProbOnly, Recorded, Table, assert_same, buffer_of, recorded
from tests.reference import Data

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FUSED = ["FIS", "FCIS", "NFIS", "NFCIS", "OUIS", "NOUIS"]


def drifting(
    episodes: int, drift: float = 1.0, length: int = 20, seed: int = 0, share: int = 1
) -> tuple[Trajectories, LinearSigmoid]:
    """Linear policies that drift as those of a training loop, `share` episodes each; a target."""
    rng, number = np.random.default_rng(seed), episodes // share
    scale = np.linspace(0.0, drift, number + 1)
    known = [LinearSigmoid(np.array([1.0, -0.5]) * x) for x in scale]
    ids, steps = np.repeat(np.arange(number), share), number * share * length
    theta = np.stack([policy.theta for policy in known])[ids]
    x = rng.standard_normal((ids.size, length, 2))
    score = np.einsum("ntd,nd->nt", x, theta).reshape(steps)
    actions = (rng.random(steps) < 1 / (1 + np.exp(-score))).astype(np.int64)
    log_probs = -np.log1p(np.exp(np.where(actions, -score, score)))
    data = Trajectories.from_arrays(
        x.reshape(steps, 2),
        actions,
        rng.random(steps) + actions,
        log_probs,
        offsets=np.arange(ids.size + 1) * length,
        policies=known[:-1],
        terminated=True,
        policy_ids=np.repeat(ids, length),
        held_out=True,
    )
    return data, known[-1]


def plain_loops(data: Data, groups: Ints) -> Floats:
    """Log fused weights, trajectory by trajectory and step by step."""
    counts = np.bincount(data.behaviour_ids, minlength=groups.size)
    found = np.empty(data.rewards.size)
    for i, own in enumerate(data.behaviour_ids):
        members = [k for k in range(groups.size) if groups[k] == groups[own]]
        total = sum(counts[k] for k in members)
        target, logs = 0.0, dict.fromkeys(members, 0.0)
        for row in range(data.offsets[i], data.offsets[i + 1]):
            target += data.target_log_probs[row]
            for k in members:
                logs[k] += data.behaviour_log_probs[k, row]
            terms = [math.log(counts[k] / total) + logs[k] for k in members if counts[k]]
            found[row] = target - reference.log_sum_exp(terms)
    return found


def partial(made: Recorded, groups: Ints, scheme: str = "fused") -> Floats:
    """Log weights of the target by the library."""
    data, arrays = made.trajectories, made.arrays
    base = many.partial_log_weights(data, behaviours_of(data), groups, [scheme])[0][scheme]
    prefix = [np.cumsum(r) for r in np.split(arrays.target_log_probs, data.offsets[1:-1])]
    return np.asarray(base + np.concatenate(prefix))


# --- the weights ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    seed=st.integers(0, 50),
    labels=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_any_partition_agrees_with_plain_loops(
    counts: list[int], seed: int, labels: list[int]
) -> None:
    made, groups = recorded(seed, counts), np.array(labels[: len(counts)])
    got = partial(made, groups)
    np.testing.assert_allclose(got, plain_loops(made.arrays, groups), rtol=1e-11, atol=1e-11)
    renamed = 7 - groups  # the numbers of groups, and gaps between them, mean nothing
    np.testing.assert_array_equal(partial(made, renamed), got)


@pytest.mark.parametrize("scheme", ["fused", "optimal"])
def test_one_group_is_the_whole_mixture_to_the_bit(scheme: str) -> None:
    made = recorded(3, (5, 3, 8, 1))
    data = made.trajectories
    behaviours = behaviours_of(data)
    nobody = np.zeros(4, dtype=np.int64)
    got = many.partial_log_weights(data, behaviours, nobody, [scheme])[0][scheme]
    want = log_weights(
        np.zeros(data.n_steps), behaviours.rows(data), behaviours.ids, data.offsets, [scheme]
    )[scheme]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scheme", ["fused", "optimal"])
def test_groups_of_one_are_basic_weights(scheme: str) -> None:
    made = recorded(4, (5, 3, 8))
    basic = partial(made, np.arange(3), "basic")
    np.testing.assert_allclose(partial(made, np.arange(3), scheme), basic, rtol=0, atol=1e-12)
    found = evaluate(
        made.trajectories,
        made.target,
        estimators=["BIS", "FIS", "NFIS"],
        weighting=Weighting(mixture=1),
    )
    assert found["FIS"].value == pytest.approx(found["BIS"].value, rel=1e-12)


def test_options_that_take_all_behaviours_change_no_bit() -> None:
    made = recorded(5, (5, 3, 8))
    want = evaluate(made.trajectories, made.target)
    for mixture in ("all", 3, 100):
        found = evaluate(made.trajectories, made.target, weighting=Weighting(mixture=mixture))
        assert_same(found, want)
        assert found.sample.mixture is None
    assert want.to_dict()["mixture"] is None


def test_a_group_uses_the_policies_an_episode_would_have_followed() -> None:
    tables = [np.array([[p, 1 - p]]) for p in (0.2, 0.5, 0.7)]
    schedules = (
        Schedule(np.array([0, 2]), np.array([0, 1])),
        Schedule(np.array([0, 1]), np.array([1, 2])),
        Schedule(np.array([0]), np.array([2])),
    )
    actions, acted = np.array([0, 1, 1, 0, 0, 1, 1, 0]), np.array([0, 0, 1, 1, 2, 2, 2, 2])
    states = np.zeros(8, dtype=np.int64)
    logs = np.stack([Table(t).log_prob(states, actions) for t in tables])
    data = Trajectories.from_arrays(
        states,
        actions,
        np.arange(8.0),
        logs[acted, np.arange(8)],
        policies=[Table(t) for t in tables],
        policy_ids=acted,
        offsets=[0, 3, 6, 8],
        terminated=True,
        schedules=schedules,
        schedule_ids=[0, 1, 2],
        start_clock=[0, 0, 0],
    )
    behaviours = behaviours_of(data)
    assert len(behaviours.plans) == 3
    rows = behaviours.rows(data).block(0, 8)
    groups = np.array([0, 0, 1])
    got = many.partial_log_weights(data, behaviours, groups, ["fused"])[0]["fused"]
    arrays = Data(np.zeros(8), rows, behaviours.ids, data.rewards, data.offsets)
    np.testing.assert_allclose(got, plain_loops(arrays, groups), atol=1e-13)


def test_an_error_in_a_group_names_the_episode_and_the_behaviour_of_the_whole() -> None:
    made = recorded(6, (2, 2, 2, 2))
    behaviours = behaviours_of(made.trajectories)
    episode = int(np.flatnonzero(behaviours.ids == 3)[0])
    liar = LogProbOnly(lambda observations, actions: np.full(len(actions), 0.5))
    policies = [*made.trajectories.policies[:2], liar, made.trajectories.policies[3]]
    bad = dataclasses.replace(made.trajectories, policies=tuple(policies))
    with pytest.raises(ValueError, match=r"0\.5 of behaviour=2 at episode \d+, step 0: the log"):
        many.partial_log_weights(bad, behaviours_of(bad), np.array([1, 1, 0, 0]), ["fused"])
    logged = made.trajectories.log_probs.copy()
    row = int(made.trajectories.offsets[episode])
    logged[row] -= 0.3
    other = dataclasses.replace(made.trajectories, log_probs=logged)
    found = evaluate(other, made.target, estimators="FIS", weighting=Weighting(mixture=2))["FIS"]
    assert f"contradict the policy: episode {episode}, step 0" in str(found.verdict)


# --- exact expectations -----------------------------------------------------------------------


@pytest.mark.parametrize("groups", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 2], [3, 2, 1, 0]])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_fis_is_unbiased_for_any_partition(groups: list[int], gamma: float) -> None:
    rng, counts = np.random.default_rng(7), (1, 3, 2, 1)
    mdp = small_mdps.random_mdp(rng, horizon=2)
    policies = [small_mdps.random_policy(rng, mdp, peak=0.7) for _ in counts]
    target = small_mdps.random_policy(rng, mdp)
    every = small_mdps.population(mdp, target, policies, counts)
    ids = every.data.behaviour_ids.tolist()
    data = buffer_of(every.episodes, ids, policies, horizon=2).view()
    made = Recorded(mdp, policies, Table(target), data)
    for scheme in ("fused", "optimal"):
        log_w = partial(made, np.array(groups), scheme)
        psi = sum_arrays(log_w, data.rewards, data.offsets, gamma).psi
        truth = small_mdps.value(mdp, target, gamma)
        assert every.moments(psi)[0] == pytest.approx(truth, abs=1e-12), scheme


@pytest.mark.parametrize(("mixture", "kept"), [(2, [0, 1, 2, 3]), ("all", [1, 3]), (1, [0, 2, 3])])
def test_values_average_to_the_truth_over_all_data_sets(
    mixture: str | int, kept: list[int]
) -> None:
    rng, mdp = np.random.default_rng(8), small_mdps.bandit([1.0, -2.0, 0.5])
    policies = [small_mdps.random_policy(rng, mdp) for _ in range(4)]
    target = small_mdps.random_policy(rng, mdp)
    means: dict[str, list[float]] = {"FIS": [], "OUIS": []}
    for episodes, chance in small_mdps.data_sets(mdp, policies, range(4)):
        data = buffer_of(episodes, range(4), policies, horizon=1).view().select(policies=kept)
        found = evaluate(
            data,
            Table(target),
            estimators=list(means),
            q_model=None,
            weighting=Weighting(mixture=mixture),
        )
        for name, terms in means.items():
            terms.append(chance * found[name].value)
    for name, terms in means.items():
        assert math.fsum(terms) == pytest.approx(small_mdps.value(mdp, target, 1.0), abs=1e-12), (
            name
        )


# --- the groups -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=80), size=st.integers(1, 90))
def test_groups_are_few_alike_and_across_all_history(counts: list[int], size: int) -> None:
    groups = many.interleaved(np.array(counts), size)
    sizes = np.bincount(groups)
    assert sizes.max() <= size
    assert sizes.size == -(-len(counts) // size)
    assert sizes.max() - sizes.min() <= 1
    for begin in range(0, len(counts), sizes.size):  # one of every G neighbours
        some = groups[begin : begin + sizes.size]
        assert np.unique(some).size == some.size
    totals = np.bincount(groups, counts)
    assert totals.max() - totals.min() <= 2 * max(counts)


def test_the_largest_count_goes_to_the_smallest_group() -> None:
    counts = np.tile([1, 9], 20)
    assert np.bincount(many.interleaved(counts, 20), counts).tolist() == [100, 100]


def test_equal_counts_are_dealt_in_order() -> None:
    assert many.interleaved(np.full(7, 5), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_auto_takes_all_of_a_few_hundred_and_groups_of_more() -> None:
    assert many.group_size("auto", 256) == 256
    assert many.group_size("auto", 257) == many.SIZE
    assert many.group_size("all", 10_000) == 10_000
    assert many.group_size(100, 7) == 7


@pytest.mark.parametrize("mixture", [0, -3, 2.5, True, "some", None])
def test_a_mixture_that_makes_no_sense_is_refused(mixture: Any) -> None:
    made = recorded(9)
    with pytest.raises(ValueError, match=f"mixture is {mixture!r}; give 'all', 'auto'"):
        evaluate(made.trajectories, made.target, weighting=Weighting(mixture=mixture))


def test_a_cross_fitted_reward_model_is_refused() -> None:
    made = recorded(9, (4, 4, 4))
    with pytest.raises(ValueError, match=r"'cross-fit' weighs two halves .*mixture='all'"):
        evaluate(
            made.trajectories,
            made.target,
            estimators="OUIS",
            weighting=Weighting(mixture=2, reward_model="cross-fit"),
        )


def test_support_is_what_the_group_covers() -> None:
    sure = [
        np.array([[x, 1.0 - x], [0.5 + k / 9, 0.5 - k / 9]])
        for k, x in enumerate((1.0, 0.5, 1.0, 0.5))
    ]
    made = buffer_of(
        [small_mdps.Path((0,), (0,), (1.0,), 1.0)] * 8, [0, 1, 2, 3] * 2, sure, horizon=1
    ).view()
    target = Table(np.full((2, 2), 0.5))
    whole = evaluate(made, target, estimators=["FIS", "BIS"])
    assert whole["FIS"].diagnostics.support_violations == 0
    assert whole["BIS"].diagnostics.support_violations == 4
    parted = evaluate(
        made, target, estimators=["FIS", "BIS"], weighting=Weighting(mixture=2)
    )  # 0, 2; 1, 3
    assert parted["FIS"].diagnostics.support_violations == 4
    assert parted["BIS"].diagnostics.support_violations == 4


def test_a_reward_model_follows_its_rows_into_the_groups() -> None:
    made = recorded(10, (3, 2, 4, 3))
    data = made.trajectories
    rng = np.random.default_rng(0)
    model = rng.normal(size=data.n_steps), rng.random(data.n_steps)
    groups = many.interleaved(behaviours_of(data).counts, 2)
    found = evaluate(
        data, made.target, estimators="OUIS", weighting=Weighting(mixture=2, reward_model=model)
    )["OUIS"]
    terms = np.empty(len(data))
    for g in range(2):
        episodes = np.flatnonzero(groups[behaviours_of(data).ids] == g)
        rows = np.concatenate([np.arange(data.offsets[i], data.offsets[i + 1]) for i in episodes])
        alone = evaluate(
            data.select(episodes=episodes),
            made.target,
            estimators="OUIS",
            weighting=Weighting(reward_model=(model[0][rows], model[1][rows])),
        )["OUIS"]
        terms[episodes] = alone.influence
    np.testing.assert_allclose(found.influence, terms, rtol=1e-12)


# --- what is said of it ------------------------------------------------------------------------


def test_interleaved_groups_lose_little_and_blocks_of_history_much() -> None:
    data, target = drifting(600, 6.0)
    behaviours = behaviours_of(data)
    prefix = np.concatenate(
        [np.cumsum(r) for r in np.split(target.log_prob(data.observations, data.actions), 600)]
    )

    def ess(groups: Ints) -> float:
        base = many.partial_log_weights(data, behaviours, groups, ["fused"])[0]["fused"]
        summed = sum_arrays(base + prefix, data.rewards, data.offsets, 1.0)
        total, square, _ = summed.columns.sums
        return float(np.min(total**2 / square))

    whole = ess(np.zeros(600, dtype=np.int64))
    assert ess(many.interleaved(behaviours.counts, 32)) > 0.9 * whole
    assert ess(np.arange(600) // 32) < 0.3 * whole


def test_a_partial_mixture_is_shown_and_written() -> None:
    data, target = drifting(300)
    found = evaluate(data, target)
    assert found.sample.mixture == PartialMixture(300, 5, 60)
    assert "partial mixtures of 60 of 300 behaviours" in str(found).splitlines()
    written = json.loads(found.to_json())["mixture"]
    assert written == {"behaviours": 300, "groups": 5, "size": 60}
    ranking = rank(data, {"a": target, "b": data.policies[0]}, estimator="NFIS")
    assert "partial mixtures of 60 of 300 behaviours" in str(ranking)
    assert ranking.to_dict()["policies"]["a"]["mixture"] == written
    assert evaluate(data, target, estimators="BIS").sample.mixture is None
    assert evaluate(data, target, estimators="OUIS").sample.mixture is not None


def test_the_command_line_takes_a_mixture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, _ = drifting(40)
    data.save(tmp_path / "data.ope")
    line = ["evaluate", str(tmp_path / "data.ope"), "--estimators", "NFIS"]
    assert main([*line, "--mixture", "8"]) == 0
    assert "partial mixtures of 8 of 40 behaviours" in capsys.readouterr().out
    assert main([*line, "--mixture", "few"]) == 2
    assert "--mixture few: give" in capsys.readouterr().err
    assert main([*line, "--mixture", "-2"]) == 2
    assert "--mixture -2: give" in capsys.readouterr().err


# --- an update per episode --------------------------------------------------------------------


def test_neighbours_of_one_episode_each_show_their_spread() -> None:
    strata = np.random.default_rng(0).permutation(np.arange(70) * 3)
    groups = joined(strata)
    assert np.bincount(groups).tolist() == [8] * 7 + [14]
    assert np.all(np.diff(groups[np.argsort(strata)]) >= 0)
    few, several = np.arange(15), np.repeat(np.arange(40), 2)
    assert joined(few) is few
    assert joined(several) is several
    one_pair = joined(np.append(np.arange(40), 0))  # policy 0 has two episodes
    assert np.bincount(one_pair).tolist() == [8] * 3 + [15, 2]
    assert one_pair[0] == one_pair[-1] == 4


def test_errors_of_single_episodes_are_right_or_a_little_large() -> None:
    rng, n, runs = np.random.default_rng(1), 200, 400
    means, spread = np.linspace(0.0, 2.0, n), np.linspace(1.0, 3.0, n)
    truth = float(np.sum(spread**2)) / n**2
    strata = joined(np.arange(n))
    squares = [
        standard_error(means + spread * rng.standard_normal(n), strata) ** 2 for _ in range(runs)
    ]
    error = float(np.std(squares)) / math.sqrt(runs)
    assert abs(np.mean(squares) - truth) < 4 * error + 0.01 * truth


def test_an_update_per_episode_has_intervals_and_a_calibrated_auto() -> None:
    data, target = drifting(64)
    found = evaluate(data, target, interval=Bootstrap(50))
    for name, estimate in found.items():
        assert np.isfinite(estimate.standard_error), name
        assert np.isfinite(estimate.interval.low), name
        assert estimate.diagnostics.behaviour_shares.size == 64, name
    assert found["auto"].report["c"] > 0
    again = np.append(np.arange(64), 0)  # an episode of the first policy comes twice
    pair = evaluate(data.select(episodes=again), target, estimators=["auto", "NFIS"])
    assert abs(pair["auto"].report["c"] - found["auto"].report["c"]) < 0.1
    assert np.array_equal(join_single(found.sample.strata), found.sample.strata)


def test_both_doors_join_the_same_neighbours() -> None:
    made = recorded(12, (1,) * 40)
    names = ["FIS", "NFIS", "BIS"]
    found = evaluate(made.trajectories, made.target, estimators=names)
    assert_same(evaluate_log_probs(*made.arrays, estimators=names), found)
    assert np.isfinite(found["NFIS"].standard_error)


def test_memory_does_not_grow_with_behaviours_times_steps() -> None:
    data, target = drifting(2000, length=50)
    small, _ = drifting(300, length=50)
    evaluate(small, target, estimators=["FIS", "NFIS"])  # compiles
    tracemalloc.start()
    evaluate(data, target, estimators=["FIS", "NFIS"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = 8 * data.n_steps * len(data)  # 1.6 GB
    assert peak < whole / 20


def test_parts_cover_every_row_once() -> None:
    made = recorded(11, (3, 1, 4, 2, 2))
    data = made.trajectories
    behaviours: Behaviours = behaviours_of(data)
    groups = many.interleaved(behaviours.counts, 2)
    seen = np.concatenate([part.rows for part in many.parts(data, behaviours, groups)])
    assert np.array_equal(np.sort(seen), np.arange(data.n_steps))
    for part in many.parts(data, behaviours, groups):
        assert np.array_equal(part.data.rewards, data.rewards[part.rows])
        assert np.array_equal(part.members[part.behaviours.ids], behaviours.ids[part.episodes])
        assert np.array_equal(
            part.behaviours.counts, np.bincount(part.behaviours.ids, minlength=part.members.size)
        )
