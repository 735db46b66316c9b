"""From recorded policies to results: real policies, changes inside episodes, and what is shown."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from ope_gym import ESTIMATORS, Evaluation, Weighting, evaluate, evaluate_log_probs
from ope_gym.arrays import folds_within
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.schedules import Schedule
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import WEIGHTED
from ope_gym.policies import (
    DiagonalGaussian,
    EpsilonGreedyTable,
    LinearSigmoid,
    UnavailablePolicy,
    Uniform,
)
from ope_gym.weights.behaviours import behaviours_of
from ope_gym.weights.reward_model import cross_fitted_log_weights, fit_rewards
from tests import reference, small_mdps
from tests.builders import (
    LogProbOnly,
    Table,
    arrays_of,
    assert_same,
    buffer_of,
    plain_options,
    recorded,
)
from tests.reference import Data
from tests.small_mdps import MDP

ALL = list(WEIGHTED)
ASKED = [*ALL, "DM", "MDR", "FWDR", "auto"]
SHOWN = ["auto", "NFIS", *(name for name in ASKED if name not in ("auto", "NFIS"))]
BASIC = [name for name in ALL if ESTIMATORS[name].scheme == "basic"]


def agrees_with_the_reference(got: Evaluation, data: Data, **options: Any) -> None:
    for name in reference.ESTIMATORS:
        want = reference.estimate(name, data, **options)
        assert got[name].value == pytest.approx(want.value, rel=1e-10), name
        np.testing.assert_allclose(got[name].diagnostics.ess_curve, want.ess_curve, rtol=1e-9)


# --- real policies ----------------------------------------------------------------------------


def test_blackjack_with_its_tuple_observations(tmp_path: Path) -> None:
    env = gym.make("Blackjack-v1")
    rng = np.random.default_rng(0)
    policies = [
        EpsilonGreedyTable.from_q(np.array([0.5, 0.0]) + rng.normal(size=(32, 11, 2, 2)), epsilon)
        for epsilon in (0.6, 0.3, 0.2)
    ]
    buffer = TrajectoryBuffer(env.observation_space, env.action_space)
    for game in range(60):
        policy, number = policies[game % 2], buffer.add_policy(policies[game % 2])
        seen, chosen, paid, over = [], [], [], False
        observation, _ = env.reset(seed=game)
        while not over:
            batch = tuple(np.array([part]) for part in observation)
            action = int(policy.sample(batch, rng)[0])
            seen.append(observation)
            chosen.append(action)
            observation, reward, over, _, _ = env.step(action)
            paid.append(float(reward))
        columns = tuple(np.array(part) for part in zip(*seen, strict=True))
        buffer.append(
            columns,
            np.array(chosen),
            paid,
            policy.log_prob(columns, np.array(chosen)),
            number,
            terminated=True,
            held_out=True,
        )
    got = evaluate(buffer, policies[2], "paper", gamma=0.9, weighting=Weighting(cap=1.5))
    data = buffer.view()
    rows = np.stack([p.log_prob(data.observations, data.actions) for p in policies[:2]])
    target = policies[2].log_prob(data.observations, data.actions)
    arrays = Data(target, rows, behaviours_of(data).ids, data.rewards, data.offsets)
    agrees_with_the_reference(got, arrays, gamma=0.9, cap=1.5)
    assert [b.name for b in got.sample.behaviours] == ["policy 0", "policy 1"]
    assert got.sample.counts.tolist() == [30, 30]
    assert got.sample.regime == "held-out"
    assert all(abs(z) < 4 for z in got["NFIS"].diagnostics.calibration)  # type: ignore[union-attr]
    buffer.save(tmp_path / "games")
    assert_same(
        evaluate(
            Trajectories.load(tmp_path / "games"),
            policies[2],
            "paper",
            gamma=0.9,
            weighting=Weighting(cap=1.5),
        ),
        got,
    )


@pytest.mark.parametrize("space", [spaces.Box(-np.inf, np.inf, (1,), np.float64), None])
def test_continuous_actions_have_densities_above_one(space: spaces.Box | None) -> None:
    rng = np.random.default_rng(1)
    narrow = [
        DiagonalGaussian(np.array([[1.0]]), np.array([shift]), np.array([-3.0]))
        for shift in (0.0, 0.05, 0.02)
    ]
    seen = spaces.Box(-np.inf, np.inf, (1,), np.float64) if space else None
    buffer = TrajectoryBuffer(seen, space)
    for i in range(40):
        x = rng.normal(size=(3, 1))
        acting = narrow[i % 2]
        actions = acting.sample(x, rng)
        k = buffer.add_policy(acting)
        rewards = (actions - x)[:, 0]
        log_probs = acting.log_prob(x, actions)
        buffer.append(x, actions, rewards, log_probs, k, terminated=True, held_out=True)
    data = buffer.view()
    assert data.log_probs.max() > 1  # a density, not a probability
    got = evaluate(data, narrow[2], gamma=0.9, estimators=ALL)
    rows = np.stack([p.log_prob(data.observations, data.actions) for p in narrow[:2]])
    target = narrow[2].log_prob(data.observations, data.actions)
    arrays = Data(target, rows, behaviours_of(data).ids, data.rewards, data.offsets)
    again = evaluate_log_probs(*arrays, estimators=ALL, gamma=0.9, density=True)
    assert_same(again, got, rtol=1e-12)
    for name in ("BIS", "FIS", "NFIS"):
        want = reference.estimate(name, arrays, gamma=0.9)
        assert got[name].value == pytest.approx(want.value, rel=1e-10)
    assert got["OUIS"].value == pytest.approx(got["FIS"].value)  # one path has no probability
    truth = 0.02 * (1 + 0.9 + 0.81)
    assert got["NFIS"].value == pytest.approx(truth, abs=4 * got["NFIS"].standard_error)
    crossed = evaluate(
        data, narrow[2], gamma=0.9, estimators="OUIS", weighting=Weighting(reward_model="cross-fit")
    )
    assert crossed["OUIS"].value == pytest.approx(got["FIS"].value)


def test_policies_of_one_class_are_evaluated_together_and_others_one_by_one() -> None:
    rng = np.random.default_rng(2)
    policies: list[Any] = [LinearSigmoid(rng.normal(size=2)) for _ in range(3)]
    x = rng.normal(size=(60, 2))

    def record(policies: Sequence[Any]) -> Trajectories:
        ids = [int(k) for k in np.repeat(np.arange(30) % len(policies), 2)]
        actions = np.concatenate(
            [policies[k].sample(x[[i]], np.random.default_rng(i)) for i, k in enumerate(ids)]
        )
        logs = np.concatenate(
            [policies[k].log_prob(x[[i]], actions[[i]]) for i, k in enumerate(ids)]
        )
        return Trajectories.from_arrays(
            x,
            actions,
            rng.normal(size=60),
            logs,
            offsets=np.arange(0, 61, 2),
            policies=policies,
            policy_ids=ids,
            terminated=True,
        )

    for mixed in (policies, [*policies, Uniform(2)]):
        data = record(mixed)
        target = LinearSigmoid(np.array([0.5, -0.5]))
        rows = np.stack([p.log_prob(x, data.actions) for p in mixed])
        arrays = Data(
            target.log_prob(x, data.actions),
            rows,
            behaviours_of(data).ids,
            data.rewards,
            data.offsets,
        )
        agrees_with_the_reference(evaluate(data, target, "paper"), arrays)


def test_policies_are_asked_in_blocks_that_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorded(3)
    want = evaluate(data.trajectories, data.target)
    monkeypatch.setattr("ope_gym.weights.behaviours.ROWS", 4)
    monkeypatch.setattr("ope_gym.weights.propensities.ROWS", 4)
    monkeypatch.setattr("ope_gym.weights.formula._BLOCK", 20)
    got = evaluate(data.trajectories, data.target)
    assert_same(got, want, rtol=1e-12)
    for name in got:
        one, other = got[name].diagnostics, want[name].diagnostics
        assert one.support_violations == other.support_violations
        np.testing.assert_allclose(one.calibration, other.calibration, rtol=1e-12)  # type: ignore[arg-type]


# --- policies that change inside episodes -----------------------------------------------------


def may_stop() -> MDP:
    """Three steps at most: action 0 ends the episode and pays 1, action 1 pays 0.5 and goes on."""
    return MDP(
        start=np.ones(1),
        moves=np.array([[[0.0, 1.0], [1.0, 0.0]]]),
        rewards=np.array([1.0, 0.5]),
        reward_probs=np.array([[[1.0, 0.0], [0.0, 1.0]]]),
        horizon=3,
    )


BEFORE, AFTER = np.array([[0.5, 0.5]]), np.array([[0.1, 0.9]])
TARGET = Table(np.array([[0.3, 0.7]]))
UPDATE = 2  # the clock of the first step of the second policy
STARTS = (0, 1, 1, 2)  # clocks at which the episodes begin


def acting(start: int, step: int) -> int:
    return int(start + step >= UPDATE)


def chance(path: small_mdps.Path, start: int) -> float:
    """The probability of a path that began at this clock."""
    tables = (BEFORE, AFTER)
    steps = zip(path.states, path.actions, strict=True)
    return math.prod(float(tables[acting(start, t)][s, a]) for t, (s, a) in enumerate(steps))


def clocked(episodes: Sequence[small_mdps.Path], starts: Sequence[int] = STARTS) -> Trajectories:
    """What a loop that updates its policy at a fixed clock records."""
    buffer = TrajectoryBuffer(spaces.Discrete(1), spaces.Discrete(2))
    for clock, table in ((0, BEFORE), (UPDATE, AFTER)):
        k = buffer.add_policy(Table(table))
        buffer.change_policy(k, clock, mid_episode=clock > 0)
    for path, start in zip(episodes, starts, strict=True):
        ids = np.array([acting(start, t) for t in range(len(path.states))])
        actions = np.array(path.actions)
        logs = np.log(np.concatenate([BEFORE, AFTER])[ids, actions])
        buffer.append(
            np.zeros(len(ids), dtype=int),
            actions,
            path.rewards,
            logs,
            ids,
            terminated=True,
            start_clock=start,
        )
    return buffer.view()


def fused_by_what_was_followed(data: Trajectories) -> float:
    """The estimator that groups episodes by the policies they did follow: do not use."""
    followed = [tuple(data.policy_ids[a:b].tolist()) for a, b in itertools.pairwise(data.offsets)]
    shares = Counter(followed)
    tables, total = (BEFORE, AFTER), 0.0
    for i in range(len(data)):
        log_target, logs = 0.0, dict.fromkeys(shares, 0.0)
        for t, row in enumerate(range(int(data.offsets[i]), int(data.offsets[i + 1]))):
            action = int(data.actions[row])
            log_target += math.log(TARGET.table[0, action])
            for plan in logs:
                policy = plan[min(t, len(plan) - 1)]  # the last one acts on
                logs[plan] += math.log(tables[policy][0, action])
            mixture = sum(shares[plan] / len(data) * math.exp(logs[plan]) for plan in shares)
            total += math.exp(log_target) / mixture * float(data.rewards[row])
    return total / len(data)


def test_behaviours_are_the_sequences_episodes_would_have_followed() -> None:
    """The mean over every possible data set is the truth; grouping by what was followed is not."""
    mdp = may_stop()
    truth = small_mdps.value(mdp, TARGET.table, 1.0)
    every = small_mdps.paths(mdp)
    names, wrong = ("BIS", "FIS", "OUIS"), []
    means: dict[str, list[float]] = {name: [] for name in names}
    for episodes in itertools.product(every, repeat=len(STARTS)):
        p = math.prod(chance(path, start) for path, start in zip(episodes, STARTS, strict=True))
        data = clocked(episodes)
        got = evaluate(data, TARGET, estimators=names)
        for name in names:
            means[name].append(p * got[name].value)
        wrong.append(p * fused_by_what_was_followed(data))
    for name in names:
        assert math.fsum(means[name]) == pytest.approx(truth, abs=1e-12), name
    assert abs(math.fsum(wrong) - truth) > 0.02


def test_clocks_that_depend_on_earlier_outcomes_leave_only_basic_weights_exact() -> None:
    """Back to back, an episode begins where the one before ended: an adaptive recording."""
    mdp = may_stop()
    truth = small_mdps.value(mdp, TARGET.table, 1.0)
    means = {"BIS": 0.0, "FIS": 0.0}
    for first, second in itertools.product(small_mdps.paths(mdp), repeat=2):
        starts = (0, len(first.states))
        p = chance(first, starts[0]) * chance(second, starts[1])
        for name, found in evaluate(
            clocked([first, second], starts), TARGET, estimators=means
        ).items():
            means[name] += p * found.value
    assert means["BIS"] == pytest.approx(truth, abs=1e-12)
    assert abs(means["FIS"] - truth) > 0.1  # of two episodes; it falls with their number


def test_an_episode_that_ended_early_has_the_behaviour_of_one_that_did_not() -> None:
    every = sorted(small_mdps.paths(may_stop()), key=lambda p: len(p.states))
    short, long = every[0], every[-1]
    data = clocked([short, long, short, long], (0, 0, 2, 1))
    found = behaviours_of(data)
    assert found.plans == (((0, 0), (1, 1)), ((0, 0), (2, 1)), ((0, 1),))
    assert found.names == (
        "policy 0, then 1 from step 1",
        "policy 0, then 1 from step 2",
        "policy 1",
    )
    assert found.ids.tolist() == [1, 1, 2, 0]
    assert found.counts.tolist() == [1, 2, 1]
    assert found.strata.tolist() == [0, 0, 1, 0]  # by the policy at the start: plans seldom repeat
    only_short = clocked([short, short], (0, 1))  # within one step they are the same behaviour
    assert behaviours_of(only_short).plans == (((0, 0),),)


def test_changes_inside_episodes_agree_with_the_arrays_of_the_sequences() -> None:
    every = small_mdps.paths(may_stop())
    data = clocked([*every, *every], [0, 1, 2, 0, 1, 1, 0, 2])
    actions, logs = data.actions, np.log(np.concatenate([BEFORE, AFTER]))
    rows = np.empty((3, data.n_steps))
    for k, start in enumerate((1, 0, 2)):  # in the order of the plans
        rows[k] = [logs[acting(start, t), a] for t, a in zip(data.steps, actions, strict=True)]
    ids = np.array([1, 0, 2, 1, 0, 0, 1, 2])
    arrays = Data(
        TARGET.log_prob(data.observations, actions), rows, ids, data.rewards, data.offsets
    )
    got = evaluate(data, TARGET, "paper", gamma=0.9, q_model=None)
    for name, other in evaluate_log_probs(*arrays, "paper", gamma=0.9).items():
        assert got[name].value == pytest.approx(other.value, rel=1e-12)
        np.testing.assert_allclose(got[name].influence, other.influence, rtol=1e-12)
    agrees_with_the_reference(got, arrays, gamma=0.9)
    assert got.to_dict()["behaviours"] == {
        "policy 0, then 1 from step 1": 3,
        "policy 0, then 1 from step 2": 3,
        "policy 1": 2,
    }
    assert " steps, 2 policies (3 sequences of them), gamma 0.9;" in str(got)


def test_strata_that_were_joined_have_the_spread_of_all_their_episodes() -> None:
    """Of behaviours with one episode each; the other door counts them anew."""
    data = recorded(6, [1] * 30)
    one = evaluate(data.trajectories, data.target, "FIS")["FIS"]
    other = evaluate_log_probs(*data.arrays, "FIS")["FIS"]
    assert other.fresh_episodes == pytest.approx(one.fresh_episodes, rel=1e-9)


def test_clocked_and_plain_recordings_can_be_put_together() -> None:
    every = small_mdps.paths(may_stop())
    data = clocked(every)
    other = buffer_of(every[:2], [0, 0], [AFTER])
    both = data.merge(other)
    found = behaviours_of(both)
    assert found.names[-1] == "policy 1"
    assert found.counts.sum() == 6
    assert found.counts[-1] == 3  # one that began after the update, two that know no clock
    assert math.isfinite(evaluate(both, TARGET)["NFIS"].value)


def test_a_policy_that_comes_back_is_one_phase() -> None:
    step = small_mdps.Path((0, 0, 0), (1, 1, 1), (1.0, 1.0, 1.0), 1.0)
    states, actions = np.zeros(3, dtype=int), np.array(step.actions)
    data = Trajectories.from_arrays(
        states,
        actions,
        step.rewards,
        np.log([0.5, 0.5, 0.5]),
        offsets=[0, 3],
        policies=[Table(BEFORE)],
        terminated=True,
        start_clock=[4],
        schedule_ids=[0],
        schedules=[Schedule(np.array([0, 5, 6]), np.array([0, 0, 0]))],
    )
    assert behaviours_of(data).plans == (((0, 0),),)


# --- policies that a file could not hold ------------------------------------------------------


def test_without_the_policies_there_are_only_basic_weights(tmp_path: Path) -> None:
    data = recorded(4)
    silent = [LogProbOnly(policy.log_prob) for policy in data.trajectories.policies]
    with pytest.warns(UserWarning, match="LogProbOnly is not registered"):
        dataclasses.replace(data.trajectories, policies=tuple(silent)).save(tmp_path / "file")
    loaded = Trajectories.load(tmp_path / "file")
    assert all(isinstance(policy, UnavailablePolicy) for policy in loaded.policies)
    assert list(evaluate(loaded, data.target)) == ["BIS", "NBIS"]
    got = evaluate(loaded, data.target, "all")
    assert list(got) == [*BASIC, "DM", "MDR", "DR", "WDR"]
    want = evaluate(data.trajectories, data.target, estimators=BASIC)
    for name in BASIC:
        assert got[name].value == want[name].value
        assert got[name].diagnostics.support_violations is None
        assert np.isnan(got[name].diagnostics.calibration).all()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'FIS', which needs .*LogProbOnly.*register_policy"):
        evaluate(loaded, data.target, estimators="FIS")
    with pytest.raises(RuntimeError, match="log_prob of UnavailablePolicy"):
        evaluate(data.trajectories, loaded.policies[0], estimators="BIS")


def test_basic_weights_ask_no_behaviour_for_anything() -> None:
    data = recorded(5)

    def refuse(observations: Any, actions: Any) -> Any:
        raise AssertionError("the logged numbers are enough")

    silent = tuple(LogProbOnly(refuse) for _ in data.trajectories.policies)
    other = dataclasses.replace(data.trajectories, policies=silent)
    got = evaluate(other, data.target, estimators=BASIC)
    want = evaluate(data.trajectories, data.target, estimators=BASIC)
    assert {name: e.value for name, e in got.items()} == {n: e.value for n, e in want.items()}


# --- EA ---------------------------------------------------------------------------------------


def test_ea_is_for_one_step_data() -> None:
    data = recorded(6)
    longest = int(data.trajectories.lengths.argmax())
    with pytest.raises(ValueError, match=rf"EA.*episode {longest} has .* steps.*DM, fitted Q"):
        evaluate(data.trajectories, data.target, estimators=["FIS", "EA"])
    assert "EA" not in evaluate(data.trajectories, data.target)


def test_ea_needs_all_probabilities_of_the_target() -> None:
    data = recorded(7, horizon=1)
    silent = LogProbOnly(data.target.log_prob)
    assert "EA" not in evaluate(data.trajectories, silent)
    with pytest.raises(ValueError, match=r"'EA'.*the target has no probs"):
        evaluate(data.trajectories, silent, estimators="EA")


def test_ea_makes_no_bets() -> None:
    data = recorded(8, horizon=1)
    options = plain_options(interval="betting", reward_range=(-1, 2))
    found = evaluate(data.trajectories, data.target, "paper", **options)
    assert set(found) == {*ALL, "auto"}
    with pytest.raises(ValueError, match=r"'EA'.*betting"):
        evaluate(data.trajectories, data.target, estimators="EA", **options)


def test_ea_refuses_actions_that_are_not_one_number() -> None:
    pairs = Trajectories.from_arrays(
        np.zeros(3, dtype=int),
        np.zeros((3, 2), dtype=int),
        np.ones(3),
        np.full(3, -1.0),
        offsets=np.arange(4),
        policies=[Uniform(2)],
        terminated=True,
    )

    class Pairs(LogProbOnly):
        def probs(self, observations: Any) -> Any:
            return np.full((len(observations), 2), 0.5)

    target = Pairs(lambda observations, actions: np.full(len(observations), -1.0))
    with pytest.raises(ValueError, match=r"'EA'.*actions have shape \(3, 2\)"):
        evaluate(pairs, target, estimators="EA")


def test_ea_of_tuple_and_continuous_contexts() -> None:
    """Contexts are equal when all their parts are; a context of its own weighs pi(a|x) / 1."""
    first, second = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    actions, rewards = np.array([0, 1, 0, 0]), np.array([1.0, 2.0, 4.0, 8.0])
    greedy = EpsilonGreedyTable(np.zeros((2, 2), dtype=int), 0.4, 2)  # .8 and .2
    data = Trajectories.from_arrays(
        (first, second),
        actions,
        rewards,
        np.log([0.8, 0.2, 0.8, 0.8]),
        offsets=np.arange(5),
        policies=[greedy],
        terminated=True,
    )
    got = evaluate(data, greedy, estimators="EA")["EA"]
    assert got.value == pytest.approx((2 * (0.8 + 0.2 * 2) + 0.8 * 4 + 0.8 * 8) / 4)
    x = np.random.default_rng(0).normal(size=(4, 1))
    sigmoid = LinearSigmoid(np.array([1.0]))
    lone = Trajectories.from_arrays(
        x,
        actions,
        rewards,
        sigmoid.log_prob(x, actions),
        offsets=np.arange(5),
        policies=[sigmoid],
        terminated=True,
    )
    chosen = np.exp(sigmoid.log_prob(x, actions))
    assert evaluate(lone, sigmoid, estimators="EA")["EA"].value == pytest.approx(
        np.mean(chosen * rewards)
    )


def test_the_influence_of_ea_is_its_derivative() -> None:
    data = recorded(9, (8,), horizon=1, states=1, actions=2)
    got = evaluate(data.trajectories, data.target, estimators="EA")["EA"]
    copies = 1000
    for i in range(8):
        picks = [j for j in range(8) for _ in range(copies + (j == i))]
        moved = evaluate(data.trajectories.select(episodes=picks), data.target, estimators="EA")[
            "EA"
        ]
        slope = (moved.value - got.value) * 8 * copies
        assert slope == pytest.approx(float(got.influence[i]) - got.value, rel=5e-3, abs=5e-3)


# --- OUIS with noisy rewards ------------------------------------------------------------------


def noisy() -> MDP:
    return MDP(
        start=np.ones(1),
        moves=np.array([[[0.0, 1.0], [0.0, 1.0]]]),
        rewards=np.array([-1.0, 2.0]),
        reward_probs=np.array([[[0.3, 0.7], [0.6, 0.4]]]),
        horizon=1,
    )


@pytest.mark.parametrize("ids", [(0, 0), (0, 0, 1, 1), (1, 0, 0, 1, 1), (0, 0, 0)])
def test_cross_fitted_weights_are_unbiased(ids: tuple[int, ...]) -> None:
    """The mean over every data set; a model fitted on the reward it weighs would be biased."""
    mdp, target = noisy(), Table(np.array([[0.4, 0.6]]))
    behaviours = [np.array([[0.8, 0.2]]), np.array([[0.3, 0.7]])]
    truth, terms = small_mdps.value(mdp, target.table, 1.0), []
    for episodes, p in small_mdps.data_sets(mdp, behaviours, ids):
        data = buffer_of(episodes, ids, behaviours)
        got = evaluate(
            data, target, estimators="OUIS", weighting=Weighting(reward_model="cross-fit")
        )["OUIS"]
        terms.append(p * got.value)
    assert math.fsum(terms) == pytest.approx(truth, abs=1e-12)


def test_a_model_fitted_on_its_own_rewards_is_biased() -> None:
    """What the test above would see."""
    mdp, target = noisy(), Table(np.array([[0.4, 0.6]]))
    behaviours, ids = [np.array([[0.8, 0.2]]), np.array([[0.3, 0.7]])], (0, 0, 1)
    truth, terms = small_mdps.value(mdp, target.table, 1.0), []
    for episodes, p in small_mdps.data_sets(mdp, behaviours, ids):
        data = buffer_of(episodes, ids, behaviours).view()
        own = fit_rewards(data, np.ones(len(data), dtype=bool))
        got = evaluate_log_probs(
            *arrays_of(data, target), estimators="OUIS", weighting=Weighting(reward_model=own)
        )
        terms.append(p * got["OUIS"].value)
    assert abs(math.fsum(terms) - truth) > 1e-3


def test_cross_fitting_learns_the_rewards_of_the_other_half() -> None:
    data = recorded(10, (8, 6), horizon=2)
    t = data.trajectories
    fold = folds_within(behaviours_of(t).ids, 2)
    for k in range(2):
        counts = np.bincount(fold[behaviours_of(t).ids == k], minlength=2)
        assert abs(counts[0] - counts[1]) <= 1
    inside = np.repeat(fold == 0, t.lengths)
    mean, variance = fit_rewards(t, ~inside)
    for row in np.flatnonzero(inside):
        alike = (t.observations == t.observations[row]) & (t.actions == t.actions[row]) & ~inside
        rewards = t.rewards[alike] if alike.any() else t.rewards[~inside]
        assert mean[row] == pytest.approx(rewards.mean())
        assert variance[row] == pytest.approx(rewards.var(), abs=1e-12)
    half = t.select(episodes=np.flatnonzero(fold == 0))
    arrays = arrays_of(half, data.target)
    a = reference.reward_share(mean[inside].tolist(), variance[inside].tolist())
    want = np.concatenate(reference.log_weights("optimal", arrays, a))
    behaviours = behaviours_of(t)
    logs = data.target.log_prob(t.observations, t.actions)
    got = cross_fitted_log_weights(t, logs, behaviours, behaviours.rows(t))
    np.testing.assert_allclose(got[inside], want, atol=1e-9)


def test_rewards_of_continuous_observations_are_learnt_by_regression() -> None:
    rng = np.random.default_rng(11)
    x = rng.normal(size=(400, 2))
    actions = rng.integers(2, size=400)
    rewards = 1 + x @ [2.0, -1.0] + 3 * actions + 0.5 * rng.normal(size=400)
    data = Trajectories.from_arrays(
        x,
        actions,
        rewards,
        np.full(400, np.log(0.5)),
        offsets=np.arange(401),
        policies=[Uniform(2)],
        terminated=True,
    )
    fit = np.arange(400) < 300
    mean, variance = fit_rewards(data, fit)
    np.testing.assert_allclose(mean, 1 + x @ [2.0, -1.0] + 3 * actions, atol=0.25)
    np.testing.assert_allclose(variance, 0.25, rtol=0.3)
    target = LinearSigmoid(np.array([0.3, 0.0]))
    got = evaluate(data, target, "paper", weighting=Weighting(reward_model="cross-fit"))
    assert got["OUIS"].value == pytest.approx(got["FIS"].value, abs=3 * got["FIS"].standard_error)


def test_rewards_of_objects_cannot_be_learnt() -> None:
    words = np.empty(4, dtype=object)
    words[:] = ["a", "b", "a", "b"]
    space = spaces.Text(1)
    data = Trajectories.from_arrays(
        words,
        np.zeros(4, dtype=int),
        np.arange(4.0),
        np.full(4, -1.0),
        offsets=np.arange(5),
        policies=[Uniform(2)],
        terminated=True,
        observation_space=space,
        action_space=spaces.Discrete(2),
    )
    target = LogProbOnly(lambda observations, actions: np.full(len(actions), -1.0))
    with pytest.raises(ValueError, match=r"cross-fit.*object.*\(mean, variance\)"):
        evaluate(data, target, estimators="OUIS", weighting=Weighting(reward_model="cross-fit"))


# --- results ----------------------------------------------------------------------------------


def results() -> Evaluation:
    data = recorded(12, (4, 5))
    return evaluate(data.trajectories, data.target, ASKED, gamma=0.9)


def test_an_evaluation_is_a_mapping_that_names_what_it_has() -> None:
    got = results()
    assert list(got) == ASKED
    assert len(got) == len(ASKED)
    assert "FIS" in got
    assert "EA" not in got
    with pytest.raises(KeyError, match="'EA' was not evaluated; there are BIS, BCIS, NBIS"):
        got["EA"]
    assert repr(got).startswith("Evaluation(BIS=")
    for attribute in ("value", "interval", "verdict"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(got["FIS"], attribute, 0)


def test_the_order_is_that_asked_for() -> None:
    data = recorded(12)
    names = ["NFIS", "BIS", "FIS"]
    assert list(evaluate(data.trajectories, data.target, estimators=iter(names))) == names
    assert list(evaluate(data.trajectories, data.target, estimators="FIS")) == ["FIS"]


def test_the_table_says_what_it_rests_on_and_why_not_to_trust_it() -> None:
    got = results()
    lines = str(got).splitlines()
    assert " ".join(lines[: lines.index("")]) == got.headline
    lines = lines[lines.index("") + 1 :]
    steps = got.sample.steps
    assert (
        lines[0]
        == f"9 episodes, {steps} steps, 2 behaviours, gamma 0.9; data: in-sample, optimistic; "
        "q model: TabularQ"
    )
    assert lines[1].split() == [
        "estimator",
        "value",
        "std.err",
        "95",
        "%",
        "interval",
        "ESS",
        "fresh",
        "episodes",
        "verdict",
    ]
    assert set(lines[2]) == {"-"}
    for line, name in zip(lines[3:17], SHOWN, strict=True):
        cells = line.split()
        assert cells[0] == name
        assert abs(float(cells[1]) - got[name].value) <= got[name].standard_error / 20
        assert cells[-1] == got[name].verdict.colour != "green"
    assert lines[17].startswith("auto, DM, MDR: 6 % of the target's visits fall on actions")
    optimistic = "all: optimistic, because the policy learned, or may have learned"
    assert any(line.startswith(optimistic) for line in lines[17:])
    said = " ".join(line.strip() for line in lines[17:])
    assert all(str(reason) in said for e in got.values() for reason in e.verdict.reasons)
    assert f"what would help: {got.best.verdict.advice[0]}" in said
    assert " c = " not in said
    assert "auto: c = " in got.table(verbose=True)
    assert "interval (ess-t)" in got.table(verbose=True)


def test_the_table_of_undefined_numbers() -> None:
    data = recorded(13, (1,))
    text = str(evaluate(data.trajectories, data.target, estimators="FIS"))
    assert "[undefined, undefined]" in text
    assert "nan" not in text


def test_a_known_truth_adds_the_distance_in_standard_errors() -> None:
    got = results()
    rows = got.table(truth=1.0, truth_error=0.3).splitlines()
    rows = rows[rows.index("") + 1 :]
    assert rows[1].endswith("from truth")
    distance = (got["auto"].value - 1.0) / math.hypot(got["auto"].standard_error, 0.3)
    assert rows[3].endswith(f"{distance:+.1f} se")
    lone = recorded(13, (1,))
    assert "undefined" in evaluate(lone.trajectories, lone.target).table(truth=1.0)
    half = np.log([0.5, 0.5])
    certain = evaluate_log_probs(half, [half], [0, 0], [1.0, 1.0], [0, 1, 2], estimators="FIS")
    assert certain["FIS"].standard_error == 0
    assert certain.table(truth=1.0).count("+0.0 se") == 1
    assert certain.table(truth=2.0).count("-inf se") == 1


def test_the_table_says_once_what_estimates_from_a_model_rest_on() -> None:
    data = recorded(12)
    got = evaluate(data.trajectories, data.target, estimators=["FIS", "DM", "MDR"])
    assert got["FIS"].verdict.basis == ()
    (basis,) = got["DM"].verdict.basis
    assert got["MDR"].verdict.basis == (basis,)
    lines = " ".join(str(got).split())
    assert f"DM, MDR: {basis}" in lines
    assert lines.count("assumes a Markov state") == 1


def test_green_results_give_no_reasons() -> None:
    n = 100
    half = np.full(n, np.log(0.5))
    got = evaluate_log_probs(half, [half], [0] * n, np.arange(n) % 2, np.arange(n + 1))
    assert {e.verdict.colour for e in got.values()} == {"green"}
    lines = str(got).splitlines()
    assert len(lines[lines.index("") :]) == 4 + len(got)  # an empty line, the head and the rows
    assert got.headline.endswith("fresh episodes would make you.")
    assert not any(e.verdict.advice for e in got.values())


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("counts", [(4, 5), (1,)])
def test_json_is_strict_and_complete(counts: tuple[int, ...], tmp_path: Path) -> None:
    data = recorded(14, counts)
    got = evaluate(data.trajectories, data.target, gamma=np.float32(0.5), level=np.float32(0.5))  # type: ignore[arg-type]
    text = got.to_json(tmp_path / "result.json")
    assert (tmp_path / "result.json").read_text(encoding="utf-8") == text + "\n"
    found = strict(text)
    assert found == got.to_dict()
    assert found["trajectories"] == sum(counts)
    assert found["gamma"] == 0.5
    assert found["regime"] == "in-sample, optimistic"
    for name, estimate in found["estimates"].items():
        assert estimate["estimator"] == name
        assert estimate["value"] == got[name].value
        assert estimate["interval"]["level"] == 0.5
        d = estimate["diagnostics"]
        fields = {field.name for field in dataclasses.fields(got[name].diagnostics)}
        assert fields - {"log_last"} <= set(d)
        steps = 1 if name in ("DM", "MDR") else int(data.trajectories.lengths.max())
        assert len(d["ess_curve"]) == steps
        if counts == (1,):
            assert estimate["standard_error"] is None
            assert estimate["interval"]["low"] is None
        assert estimate["verdict"]["colour"] == got[name].verdict.colour != "green"
        first = got[name].verdict.reasons[0]
        said = estimate["verdict"]["reasons"][0]
        assert said == {"code": first.code, **dict(first.facts), "text": str(first)}


def test_infinite_values_become_none() -> None:
    data = Data(
        np.zeros(2), np.full((1, 2), -900.0), np.zeros(2, np.int64), np.ones(2), np.arange(3)
    )
    found = strict(evaluate_log_probs(*data, "paper").to_json())
    assert found["estimates"]["FIS"]["value"] is None
    assert found["estimates"]["NFIS"]["value"] == 1.0
    assert found["regime"] == "unstated"


def test_a_frame_has_a_row_an_estimator() -> None:
    pytest.importorskip("pandas")
    got = results()
    frame = got.to_frame()
    assert list(frame.index) == ASKED
    assert frame.loc["NFIS", "value"] == got["NFIS"].value
    assert set(frame.columns) >= {"standard_error", "low", "high", "ess", "verdict"}


def test_a_frame_without_pandas_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas, or use to_dict"):
        results().to_frame()


def test_estimates_show_themselves_briefly() -> None:
    got = results()["FIS"]
    assert "value=" in repr(got)
    assert "influence" not in repr(got)
    assert len(repr(got)) < 1000


def test_steps_that_gamma_leaves_no_weight_are_not_judged() -> None:
    """Full support at step 0, none at step 1: with gamma = 0 only the first counts."""
    half = np.log(0.5)
    got = evaluate_log_probs(
        [half, -np.inf] * 50,
        [[half, half] * 50],
        [0] * 50,
        [1.0, 5.0] * 50,
        np.arange(51) * 2,
        gamma=0.0,
    )
    for name, estimate in got.items():
        assert estimate.value == pytest.approx(1.0), name
        assert estimate.diagnostics.ess == pytest.approx(50)
        assert estimate.verdict.colour != "red"


def test_a_rare_legal_action_raises_no_alarm() -> None:
    """Peaked policies make Z far from normal; right propensities must not be called wrong."""
    rng, red = np.random.default_rng(0), 0
    tables = [np.array([[0.998, 0.002]]), np.array([[0.005, 0.995]])]
    for _ in range(100):
        ids = [0] * 30 + [1] * 30
        steps = [
            small_mdps.Path((0,), (int(rng.random() < tables[k][0, 1]),), (1.0,), 1.0) for k in ids
        ]
        got = evaluate(buffer_of(steps, ids, tables), Table(np.array([[0.5, 0.5]])), "FIS")
        red += "wrongly recorded" in str(got["FIS"].verdict)
    assert red == 0


def test_cross_fit_needs_two_episodes_of_each_behaviour() -> None:
    sure = [np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])]
    steps = [small_mdps.Path((0,), (k,), (1.0,), 1.0) for k in (0, 1)]
    data, target = buffer_of(steps, [0, 1], sure), Table(np.array([[0.5, 0.5]]))
    with pytest.raises(ValueError, match="policy 0 has only 1"):
        evaluate(data, target, estimators="OUIS", weighting=Weighting(reward_model="cross-fit"))
    assert evaluate(data, target, estimators="OUIS")["OUIS"].value == 1.0


def test_the_error_of_ea_allows_for_its_fitted_means() -> None:
    """Uniform bandit, 10 contexts and 2 actions, 200 draws: coverage within 3 standard errors."""
    rng, target, hits = np.random.default_rng(5), Table(np.full((10, 2), 0.5)), 0
    for _ in range(200):
        states, actions = rng.integers(10, size=200), rng.integers(2, size=200)
        data = Trajectories.from_arrays(
            states,
            actions,
            rng.normal(size=200),
            np.full(200, np.log(0.5)),
            offsets=np.arange(201),
            policies=[target],
            terminated=True,
        )
        got = evaluate(data, target, estimators="EA", level=0.9)["EA"]
        hits += 0.0 in got.interval
    assert hits / 200 > 0.9 - 3 * np.sqrt(0.9 * 0.1 / 200)


def test_no_spread_is_not_green() -> None:
    half = [np.log(0.5)] * 60
    got = evaluate_log_probs(half, [half], [0] * 60, [2.0] * 60, np.arange(61))["NFIS"]
    assert (got.value, got.standard_error) == (2.0, 0.0)
    assert got.verdict.colour == "amber"
    assert "the error is unknown" in str(got.verdict)


def test_differences_need_one_level() -> None:
    half = [np.log(0.5)] * 6
    a, b = (
        evaluate_log_probs(half, [half], [0] * 6, [0.0, 1.0] * 3, np.arange(7), level=level)
        for level in (0.5, 0.95)
    )
    with pytest.raises(ValueError, match="evaluate both at one level"):
        a.difference(b)


def test_a_later_change_inside_an_episode_leaves_earlier_behaviours_alone(tmp_path: Path) -> None:
    """Policies that changed between episodes stay the behaviours of the episodes before."""
    first, second, third = (Table(np.array([[p, 1 - p]])) for p in (0.5, 0.6, 0.7))
    buffer = TrajectoryBuffer(spaces.Discrete(1), spaces.Discrete(2))
    clock = 0

    def play(acting: Sequence[int]) -> None:
        nonlocal clock
        n = len(acting)
        logs = [buffer.policies[k].log_prob(np.zeros(1, int), np.zeros(1, int))[0] for k in acting]
        buffer.append(
            np.zeros(n, int),
            np.zeros(n, int),
            np.ones(n),
            logs,
            np.array(acting),
            terminated=True,
            start_clock=clock,
        )
        clock += n

    for policy in (first, second):
        buffer.change_policy(buffer.add_policy(policy), clock, mid_episode=False)
        play([len(buffer.policies) - 1] * 3)
        play([len(buffer.policies) - 1] * 2)
    before = behaviours_of(buffer.view())
    assert [len(plan) for plan in before.plans] == [1, 1]
    buffer.change_policy(buffer.add_policy(third), clock + 2, mid_episode=True)
    play([1, 1, 2])
    after = behaviours_of(buffer.view())
    assert after.plans[after.ids[0]] == after.plans[after.ids[1]] == ((0, 0),)
    assert after.plans[after.ids[4]] == ((0, 1), (2, 2))
    buffer.save(tmp_path / "file.ope")
    again = behaviours_of(Trajectories.load(tmp_path / "file.ope"))
    assert [again.plans[k] for k in again.ids] == [after.plans[k] for k in after.ids]


def test_a_vanishing_error_beside_huge_returns_is_no_overflow() -> None:
    """The squared ratio of deviation and error is beyond floats: infinitely many fresh episodes."""
    rewards = np.tile([1.0, 0.0], 10)
    rewards[0] = 1e200
    target = np.full(20, -0.7)
    target[0] = -600.0  # hardly does what was paid so much
    found = evaluate_log_probs(
        target, np.full((1, 20), -0.7), np.zeros(20, np.int64), rewards, np.arange(21), ["NFIS"]
    )
    assert found["NFIS"].fresh_episodes == np.inf
    assert "NFIS" in str(found)
