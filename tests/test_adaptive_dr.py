"""Doubly robust estimates from adaptive data: exact means, past-only learning, coverage."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Bootstrap, evaluate
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.adaptive import weighted_mean
from ope_gym.estimators.run import sum_arrays, weigh_arrays
from ope_gym.inference.errors import standard_error
from ope_gym.models.base import ActionValues, Baseline, Problem, QModel
from ope_gym.models.folds import past_only
from ope_gym.weights.behaviours import behaviours_of
from ope_gym.weights.formula import log_weights
from ope_gym.weights.rounds import stable_weights
from studies.adaptive.exact import EXACT, two_round_bias
from tests import builders, reference, small_mdps
from tests.reference import Data

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def terms_of(data: Data, q: Baseline, gamma: float) -> Array:
    """Gamma of each episode."""
    log_w = log_weights(*data[:3], data.offsets, ["basic"])["basic"]
    residuals = q.residuals(data.rewards, data.offsets, gamma)
    return q.at_start(data.offsets) + sum_arrays(log_w, residuals, data.offsets, gamma).psi


# --- exact means ------------------------------------------------------------------------------


def win_stay(action: int, reward: float) -> Array:
    stay = 0.9 if reward else 0.1
    return np.where(np.arange(2) == action, stay, 1 - stay)


@pytest.mark.parametrize("h", [[1.0, 1.0, 1.0], [1.0, 4.0, 0.5], [0.0, 1.0, 2.0]])
def test_fixed_weights_have_no_bias_whatever_the_learners_did(h: list[float]) -> None:
    """Three rounds of one draw: the policy follows the last reward, q an odd rule of the past."""
    target, pays = np.array([0.3, 0.7]), np.array([0.5, 0.8])
    outcomes = list(itertools.product((0, 1), (0.0, 1.0)))
    mean = fused = 0.0
    for history in itertools.product(outcomes, repeat=3):
        policies, models, chance = [np.full(2, 0.5)], [np.zeros(2)], 1.0
        for t, (action, reward) in enumerate(history):
            chance *= policies[t][action] * (pays[action] if reward else 1 - pays[action])
            policies.append(win_stay(action, reward))
            seen = sum(r - 0.3 * a for a, r in history[: t + 1])
            models.append(np.array([seen**2, 1.0 - seen * reward]))
        actions = np.array([a for a, _ in history])
        behaviours = np.log(np.stack(policies[:3])[:, actions])
        data = Data(
            np.log(target[actions]),
            behaviours,
            np.arange(3),
            np.array([r for _, r in history]),
            np.arange(4),
        )
        q = np.stack(models[:3])
        terms = terms_of(data, Baseline(q[np.arange(3), actions], q @ target), 1.0)
        mean += chance * weighted_mean(terms, data.behaviour_ids, np.array(h)).mean()
        log_w = log_weights(*data[:3], data.offsets, ["fused"])["fused"]
        fused += chance * float(np.mean(np.exp(log_w) * data.rewards))
    truth = float(target @ pays)
    assert mean == pytest.approx(truth, abs=1e-13)
    assert abs(fused - truth) > 0.01


def test_the_two_rounds_of_the_study() -> None:
    """The same histories in which FIS is off by what the study reports."""
    half, mean, fused = np.array([0.5, 0.5]), 0.0, 0.0
    outcomes = list(itertools.product((0, 1), (0.0, 1.0)))
    for (a, x), (b, y) in itertools.product(outcomes, repeat=2):
        second = win_stay(a, x)
        policies, actions = np.stack([half, second]), np.array([a, b])
        data = Data(
            np.log(half[actions]),
            np.log(policies[:, actions]),
            np.arange(2),
            np.array([x, y]),
            np.arange(3),
        )
        q = Baseline(np.array([0.0, x]), np.array([0.0, x]))
        chance = 0.25 * second[b] * 0.5
        mean += chance * weighted_mean(terms_of(data, q, 1.0), np.arange(2), np.ones(2)).mean()
        log_w = log_weights(*data[:3], data.offsets, ["fused"])["fused"]
        fused += chance * float(np.mean(np.exp(log_w) * data.rewards))
    bias = float(two_round_bias(adaptive=True)[EXACT.index("FIS")])
    assert mean == pytest.approx(0.5, abs=1e-14)
    assert fused - 0.5 == pytest.approx(bias, abs=1e-12)
    assert abs(bias) > 0.03


def test_longer_episodes_of_a_policy_that_learned_from_the_first() -> None:
    rng = np.random.default_rng(0)
    mdp = small_mdps.random_mdp(rng, states=1, horizon=2)
    target, first, good, bad = (small_mdps.random_policy(rng, mdp) for _ in range(4))
    truth, mean, fused = small_mdps.value(mdp, target, 0.9), 0.0, 0.0
    every = small_mdps.paths(mdp)
    for one, two in itertools.product(every, every):
        second = good if sum(one.rewards) > 0 else bad
        chance = one.probability(first) * two.probability(second)
        data = small_mdps.arrays([one, two], [0, 1], target, [first, second])
        table = np.array([[0.0, 0.0], [one.rewards[0], len(one.rewards)]])  # q by (round, action)
        rounds = np.repeat([0, 1], np.diff(data.offsets))
        actions = np.concatenate([one.actions, two.actions])
        q = Baseline(table[rounds, actions], (table @ target[0])[rounds])
        found = weighted_mean(terms_of(data, q, 0.9), np.arange(2), np.array([1.0, 3.0]))
        mean += chance * found.mean()
        log_w = log_weights(*data[:3], data.offsets, ["fused"])["fused"]
        columns = sum_arrays(log_w, data.rewards, data.offsets, 0.9)
        fused += chance * float(columns.psi.mean())
    assert mean == pytest.approx(truth, abs=1e-12)
    assert abs(fused - truth) > 1e-3


# --- the weighted mean ------------------------------------------------------------------------


def test_the_weighted_mean_by_hand() -> None:
    got = weighted_mean(np.array([1.0, 3.0, 4.0]), np.array([0, 0, 2]), np.array([1.0, 9.0, 2.0]))
    np.testing.assert_allclose(got, 3 + 3 * np.array([-2.0, 0.0, 2.0]) / 4)
    assert got.mean() == pytest.approx(12 / 4)
    assert error_of(got) == pytest.approx(math.sqrt(4 + 0 + 4) / 4)


def error_of(influence: Array) -> float:
    """SE^2 = sum h^2 (Gamma - J)^2 / (sum h)^2, of the martingale."""
    return math.sqrt(np.sum((influence - influence.mean()) ** 2)) / influence.size


def test_standard_error_inside_rounds_is_that_of_a_stratified_mean() -> None:
    rng = np.random.default_rng(1)
    ids, h = np.repeat(np.arange(3), (5, 40, 20)), np.array([0.5, 2.0, 1.0])
    terms = rng.normal(size=65)
    got = weighted_mean(terms, ids, h)
    total = sum(h[k] for k in ids)
    want = 0.0
    for k in range(3):
        own = [float(x) for x, b in zip(terms, ids, strict=True) if b == k]
        middle = math.fsum(own) / len(own)
        spread = math.fsum((x - middle) ** 2 for x in own) / (len(own) - 1)
        want += (h[k] / total) ** 2 * len(own) * spread
    assert standard_error(got, ids) == pytest.approx(math.sqrt(want), rel=1e-12)
    assert error_of(got) == pytest.approx(math.sqrt(want), rel=0.1)


# --- weights known in advance -----------------------------------------------------------------


def slow_stable(data: Data, start: Array, residuals: Array, gamma: float) -> list[float]:
    """The definition as plain loops over products of probabilities."""
    target = [
        [math.exp(x) for x in row] for row in reference.rows(data.target_log_probs, data.offsets)
    ]
    pay = reference.rows(residuals, data.offsets)
    rounds, n = len(data.behaviour_log_probs), len(pay)
    probs = [
        [[math.exp(x) for x in row] for row in reference.rows(column, data.offsets)]
        for column in data.behaviour_log_probs
    ]
    ids = data.behaviour_ids.tolist()

    def spread(k: int, past: list[int]) -> float:
        u, values = [], []
        size = len(past)
        for i in past:
            whole = [math.prod(probs[j][i]) for j in range(rounds)]
            mixture = math.fsum(
                sum(ids[m] == j for m in past) / size * whole[j] for j in range(rounds)
            )
            u.append(whole[k] / mixture)
            total = start[i]
            for t, r in enumerate(pay[i]):
                ratio = math.prod(target[i][: t + 1]) / math.prod(probs[k][i][: t + 1])
                total += gamma**t * ratio * r
            values.append(total)
        if math.fsum(u) ** 2 / math.fsum(x * x for x in u) < 5:
            return math.nan
        mean = math.fsum(a * b for a, b in zip(u, values, strict=True)) / math.fsum(u)
        squares = (a * (b - mean) ** 2 for a, b in zip(u, values, strict=True))
        return math.fsum(squares) / math.fsum(u)

    h = [1.0]
    for k in range(1, rounds):
        past = [i for i in range(n) if ids[i] < k]
        ratio = spread(0, past) / spread(k, past)
        h.append(h[-1] if math.isnan(ratio) else min(max(math.sqrt(ratio), 0.1), 10.0))
    return h


def stable(data: Data, start: Array, residuals: Array) -> Array:
    return stable_weights(
        data.target_log_probs,
        data.behaviour_log_probs,
        data.behaviour_ids,
        data.offsets,
        0.9,
        start,
        residuals,
    )


@pytest.mark.parametrize("seed", range(4))
def test_stable_weights_are_those_of_plain_loops(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ope_gym.weights.formula._BLOCK", 40)
    rng = np.random.default_rng(seed)
    data = builders.recorded(seed, (14, 3, 8, 9), horizon=3).arrays
    start, residuals = rng.normal(size=34), rng.normal(size=data.rewards.size)
    got = stable(data, start, residuals)
    np.testing.assert_allclose(got, slow_stable(data, start, residuals, 0.9), rtol=1e-9)
    assert np.unique(got).size > 1
    assert got[0] == 1.0


def test_stable_weights_do_not_look_ahead() -> None:
    rng = np.random.default_rng(5)
    data = builders.recorded(5, (14, 9, 8, 9), horizon=3).arrays
    start, residuals = rng.normal(size=40), rng.normal(size=data.rewards.size)
    before = stable(data, start, residuals)
    for k in range(4):
        later = data.behaviour_ids >= k
        rows = np.repeat(later, np.diff(data.offsets))
        changed = stable(data, np.where(later, 50.0, start), np.where(rows, -90.0, residuals))
        np.testing.assert_array_equal(changed[: k + 1], before[: k + 1])
        assert k > 1 or np.any(changed[k + 1 :] != before[k + 1 :])


def test_stable_weights_follow_the_noise() -> None:
    """A round whose policy is close to the target gets more, by the ratio of deviations."""
    rng, n = np.random.default_rng(6), 4000
    policies, target = np.array([[0.9, 0.1], [0.5, 0.5]]), np.array([0.2, 0.8])
    ids = np.repeat([0, 1], n)
    actions = (rng.random(2 * n) > policies[ids, 0]).astype(np.int64)
    residuals = rng.normal(size=2 * n)
    h = stable_weights(
        np.log(target[actions]),
        np.log(policies[:, actions]),
        ids,
        np.arange(2 * n + 1),
        1.0,
        np.zeros(2 * n),
        residuals,
    )
    variances = [float(np.sum(target**2 / row)) for row in policies]
    assert h[1] == pytest.approx(math.sqrt(variances[0] / variances[1]), rel=0.1)
    same = stable_weights(
        np.log(target[actions]),
        np.log(policies[:, actions]),
        ids,
        np.arange(2 * n + 1),
        1.0,
        np.zeros(2 * n),
        np.zeros(2 * n),
    )
    np.testing.assert_array_equal(same, 1.0)  # nothing varies: nothing to choose by


@pytest.mark.parametrize("probs", [[[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [1.0, 0.0]]])
def test_actions_that_a_behaviour_cannot_take_give_finite_weights(probs: list[list[float]]) -> None:
    actions = np.tile([0, 1], 20)
    policies, ids = np.array(probs), np.repeat([0, 1], 20)
    actions[ids == (0 if probs[0][0] == 1.0 else 1)] = 0
    with np.errstate(divide="ignore"):
        logs = np.log(policies[:, actions])
    h = stable_weights(
        np.log(np.full(40, 0.5)), logs, ids, np.arange(41), 1.0, np.zeros(40), np.arange(40.0)
    )
    assert np.all(np.isfinite(h))
    assert h.min() >= 0.1


# --- past-only learning -----------------------------------------------------------------------


@dataclasses.dataclass
class ByAction(QModel):
    """q of an action: a multiple of the mean reward it got in the data; remembers the data."""

    scale: float = 1.0
    offer_all: bool = True
    seen: list[Trajectories] = dataclasses.field(default_factory=list)

    def fit(self, data: Trajectories, problem: Problem) -> ActionValues:
        self.seen.append(data)
        actions = np.asarray(data.actions)
        counts = np.maximum(np.bincount(actions, minlength=3), 1)
        table = self.scale * np.bincount(actions, data.rewards, minlength=3) / counts
        return _Table(table) if self.offer_all else _Single(table)


@dataclasses.dataclass
class _Single(ActionValues):
    table: Array

    def q(self, observations: Any, actions: Any, steps: Ints) -> Array:
        return np.asarray(self.table[np.asarray(actions)])


class _Table(_Single):
    def q_all(self, observations: Any, steps: Ints, actions: int = 0) -> Array:
        return np.tile(self.table, (steps.size, 1))


def fit_past(recorded: builders.Recorded, model: ByAction, data: Trajectories) -> Baseline:
    problem = Problem(recorded.target, 0.9, 6, np.random.default_rng(0))
    return past_only(model, data, behaviours_of(data).ids, problem)


@pytest.mark.parametrize("offer_all", [True, False])
def test_each_round_learns_from_the_rounds_before_it(offer_all: bool) -> None:
    recorded = builders.recorded(2, (5, 3, 8))
    data, model = recorded.trajectories, ByAction(offer_all=offer_all)
    ids = behaviours_of(data).ids
    got = fit_past(recorded, model, data)
    assert [len(part) for part in model.seen] == [5, 8]
    first = np.repeat(ids == 0, data.lengths)
    assert not got.q[first].any()
    assert not got.v[first].any()
    for k, part in ((1, model.seen[0]), (2, model.seen[1])):
        table = [float(np.mean(part.rewards[np.asarray(part.actions) == a])) for a in range(3)]
        rows = np.flatnonzero(np.repeat(ids == k, data.lengths))
        for row in rows:
            state, action = (
                int(np.asarray(data.observations)[row]),
                int(np.asarray(data.actions)[row]),
            )
            assert got.q[row] == pytest.approx(table[action])
            mean = math.fsum(recorded.target.table[state, a] * table[a] for a in range(3))
            assert got.v[row] == pytest.approx(mean)


@pytest.mark.parametrize("offer_all", [True, False])
def test_values_do_not_look_ahead_not_even_at_the_range_of_rewards(offer_all: bool) -> None:
    recorded = builders.recorded(3, (5, 4, 6))
    data = recorded.trajectories
    model = ByAction(scale=1e6, offer_all=offer_all)  # always at the bounds
    ids = np.repeat(behaviours_of(data).ids, data.lengths)
    before = fit_past(recorded, model, data)
    for k in (1, 2):
        loud = dataclasses.replace(data, rewards=np.where(ids >= k, 100.0, data.rewards))
        after = fit_past(recorded, model, loud)
        np.testing.assert_array_equal(after.q[ids <= k], before.q[ids <= k])
        np.testing.assert_array_equal(after.v[ids <= k], before.v[ids <= k])
        assert k == 2 or np.any(after.q[ids > k] != before.q[ids > k])


# --- coverage ---------------------------------------------------------------------------------

ARMS, ROUNDS, DRAWS, FLOOR = 10, 20, 100, 0.03


def greedy_rounds(rng: np.random.Generator) -> tuple[Array, Ints, Array, Array]:
    """Policies (K, A), actions, rewards and past mean rewards (K, A); no arm is better.

    Each round prefers the arm that has paid best so far and leaves FLOOR to each of the others.
    """
    policies, models = np.empty((ROUNDS, ARMS)), np.zeros((ROUNDS, ARMS))
    actions, rewards = np.empty((ROUNDS, DRAWS), dtype=np.int64), rng.normal(size=(ROUNDS, DRAWS))
    total, count = np.zeros(ARMS), np.zeros(ARMS)
    for k in range(ROUNDS):
        policies[k] = 1 / ARMS if k == 0 else FLOOR
        if k:
            models[k] = total / np.maximum(count, 1)
            policies[k, np.argmax(models[k])] = 1 - FLOOR * (ARMS - 1)
        actions[k] = rng.choice(ARMS, DRAWS, p=policies[k])
        total += np.bincount(actions[k], rewards[k], minlength=ARMS)
        count += np.bincount(actions[k], minlength=ARMS)
    return policies, actions.ravel(), rewards.ravel(), models


def estimates_of(rng: np.random.Generator) -> tuple[Array, Array, float, float]:
    """With equal and with stable weights, and NFIS with its standard error; the truth is 0."""
    policies, actions, rewards, models = greedy_rounds(rng)
    ids, offsets = np.repeat(np.arange(ROUNDS), DRAWS), np.arange(actions.size + 1)
    target = np.full(actions.size, -math.log(ARMS))
    behaviours = np.log(policies[:, actions])
    data = Data(target, behaviours, ids, rewards, offsets)
    q = Baseline(models[ids, actions], models.mean(axis=1)[ids])
    residuals, terms = q.residuals(rewards, offsets, 1.0), terms_of(data, q, 1.0)
    h = stable_weights(target, behaviours, ids, offsets, 1.0, q.at_start(offsets), residuals)
    log_w = log_weights(*data[:3], offsets, ["fused"])["fused"]
    fused = weigh_arrays(log_w, rewards, offsets, 1.0, normalised=True)
    return (
        weighted_mean(terms, ids, np.ones(ROUNDS)),
        weighted_mean(terms, ids, h),
        fused.value,
        standard_error(fused.influence, ids),
    )


def test_intervals_cover_where_those_of_fused_weights_do_not() -> None:
    """In 250 runs: .948 and .952 against .76 of NFIS, whose bias is more than its error."""
    runs, covered, errors = 150, np.zeros(3), []
    for seed in range(runs):
        equal, weighted, fused, error = estimates_of(np.random.default_rng([seed, 7]))
        pairs = [(float(x.mean()), error_of(x)) for x in (equal, weighted)]
        pairs.append((fused, error))
        covered += [abs(value) <= 1.96 * width for value, width in pairs]
        errors.append([value for value, _ in pairs])
    share, spread = covered / runs, math.sqrt(0.95 * 0.05 / runs)
    assert np.abs(share[:2] - 0.95).max() < 3 * spread
    assert share[2] < 0.95 - 6 * spread
    bias = np.mean(errors, axis=0) / (np.std(errors, axis=0) / math.sqrt(runs))
    assert np.abs(bias[:2]).max() < 3.5
    assert bias[2] < -10


def test_a_difference_with_adr_is_not_taken_from_draws_of_another_kind() -> None:
    """ADR draws from all episodes together, the others inside policies: they do not pair."""
    data = builders.recorded(5, (2,) * 20)
    found = evaluate(
        data.trajectories, data.target, ["ADR", "DR"], interval=Bootstrap(50), q_model="tabular"
    )
    assert found["ADR"].replicates is not None
    assert found["ADR"].difference(found["DR"]).interval.method == "ess-t"
    assert found["DR"].difference(found["DR"]).interval.method == "percentile"
