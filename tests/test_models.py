"""Q models: exact on small problems, learned without leaks, one pass for all folds."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Trajectories
from ope_gym.arrays import folds_within
from ope_gym.models import (
    ActionValues,
    Baseline,
    Critic,
    LinearQ,
    NetworkQ,
    Polynomial,
    Problem,
    QModel,
    TabularQ,
    cross_fit,
    default_model,
)
from ope_gym.models.base import SAMPLES
from ope_gym.models.features import near_weights
from ope_gym.models.folds import baselines, cross_fit_targets
from ope_gym.models.linear import FeatureSurvey
from ope_gym.policies import DiagonalGaussian, Uniform
from ope_gym.weights.answers import Answers
from ope_gym.weights.behaviours import behaviours_of
from tests import small_mdps
from tests.builders import Recorded, Table, buffer_of, recorded

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def indicators(states: Any) -> Floats:
    """Return a 0/1 column for each of so many states, more than there are in any test."""
    return np.asarray(np.asarray(states).reshape(-1, 1) == np.arange(8), dtype=np.float64)


PLAIN = LinearQ(indicators, ridge=0.0, pull=0.0, time=0, nearness=0.0)


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def problem(target: Any, gamma: float, horizon: int) -> Problem:
    return Problem(target, gamma, horizon, seeded())


def fitted(model: Any, record: Recorded, gamma: float = 0.9, horizon: int = 6) -> Any:
    return model.fit(record.trajectories, problem(record.target, gamma, horizon))


def fitted_across(model: Any, record: Recorded) -> Baseline:
    data = record.trajectories
    return cross_fit(model, data, behaviours_of(data).ids, problem(record.target, 0.9, 6))


def exact_q(mdp: small_mdps.MDP, policy: Floats, gamma: float) -> Floats:
    """(T, S, A) by backward induction, from the true probabilities."""
    found = np.zeros((mdp.horizon, *policy.shape))
    ahead = np.zeros(mdp.start.size + 1)
    for t in reversed(range(mdp.horizon)):
        found[t] = mdp.reward_mean + gamma * mdp.moves @ ahead
        ahead = np.append((policy * found[t]).sum(axis=1), 0.0)
    return found


def proportional(horizon: int, ends: bool = True) -> tuple[small_mdps.MDP, Trajectories]:
    """Every episode of an MDP with fractions of 4 as chances, as often as it is expected."""
    moves = (
        np.array(
            [[[2, 1, 1], [0, 2, 2]], [[1, 2, 1], [2, 0, 2]]]
            if ends
            else [[[2, 2, 0], [1, 3, 0]], [[1, 3, 0], [3, 1, 0]]]
        )
        / 4
    )
    mdp = small_mdps.MDP(
        start=np.array([0.5, 0.5]),
        moves=moves,
        rewards=np.array([-1.0, 2.0]),
        reward_probs=np.array([[[2, 2], [1, 3]], [[4, 0], [0, 4]]]) / 4,
        horizon=horizon,
    )
    behaviour = np.array([[0.5, 0.5], [0.25, 0.75]])
    every = small_mdps.paths(mdp)
    chance = np.array([path.probability(behaviour) for path in every])
    counts = chance * 2 * (4 * 4 * 4) ** horizon
    assert np.allclose(counts, np.round(counts))
    divisor = np.gcd.reduce(np.round(counts).astype(np.int64))
    times = np.round(counts / divisor).astype(int)
    episodes = [path for path, count in zip(every, times, strict=True) for _ in range(count)]
    data = buffer_of(episodes, [0] * len(episodes), [behaviour], horizon=horizon).view()
    return mdp, data


@pytest.mark.parametrize("ends", [True, False])
def test_tabular_q_is_that_of_dynamic_programming(ends: bool) -> None:
    mdp, data = proportional(2, ends)
    policy = np.array([[0.9, 0.1], [0.3, 0.7]])
    values = TabularQ().fit(data, problem(Table(policy), 0.9, 2))
    truth = exact_q(mdp, policy, 0.9)
    for t in range(2):
        found = values.q_all(np.arange(2), np.full(2, t))
        np.testing.assert_allclose(found, truth[t], rtol=0, atol=1e-9)
    states, actions, steps = np.array([0, 1, 1]), np.array([1, 0, 1]), np.array([0, 1, 0])
    np.testing.assert_allclose(
        values.q(states, actions, steps), truth[steps, states, actions], rtol=0, atol=1e-9
    )
    start = truth[0] * policy
    np.testing.assert_allclose(
        mdp.start @ start.sum(axis=1), small_mdps.value(mdp, policy, 0.9), atol=1e-12
    )


def test_tabular_q_iterates_the_empirical_model_for_long_horizons() -> None:
    """The same as a plain loop over dense arrays, at steps in any order."""
    record = recorded(3, (30, 30), horizon=12)
    data, horizon = record.trajectories, 12
    counts = np.zeros((3, 3, 4))
    paid, seen = np.zeros((3, 3)), np.zeros((3, 3))
    for i in range(len(data)):
        for row in range(data.offsets[i], data.offsets[i + 1]):
            s, a = data.observations[row], data.actions[row]
            paid[s, a] += data.rewards[row]
            seen[s, a] += 1
            if row + 1 < data.offsets[i + 1]:
                counts[s, a, data.observations[row + 1]] += 1
            elif data.lengths[i] < horizon:
                counts[s, a, 3] += 1
    assert (seen > 0).all()
    moves = counts / counts.sum(axis=2, keepdims=True)
    q = [np.zeros((3, 3))]
    for _ in range(horizon):
        v = np.append((record.target.table * q[-1]).sum(axis=1), 0.0)
        q.append(paid / seen + 0.95 * moves @ v)
    values = fitted(TabularQ(), record, 0.95, horizon)
    steps = np.array([11, 0, 5, 0])
    states = np.array([0, 1, 2, 0])
    expected = np.stack([q[horizon - t][s] for t, s in zip(steps, states, strict=True)])
    np.testing.assert_allclose(values.q_all(states, steps), expected, rtol=0, atol=1e-9)


def test_the_stationary_table_solves_its_equation_and_equals_linear_one_hot() -> None:
    record = recorded(1, (40, 40, 40))
    table, linear = fitted(TabularQ(time=False), record), fitted(PLAIN, record)
    states, steps = np.arange(3), np.zeros(3, dtype=np.int64)
    found = table.q_all(states, steps)
    np.testing.assert_allclose(linear.q_all(states, steps), found, rtol=0, atol=1e-9)
    np.testing.assert_allclose(table.q_all(states, steps + 4), found, rtol=0, atol=0)
    long = fitted(TabularQ(), dataclasses.replace(record), 0.9, 2000)  # the limit never bites
    np.testing.assert_allclose(long.q_all(states, steps), found, rtol=0, atol=1e-9)


def test_without_ends_and_discount_the_fixed_point_is_refused() -> None:
    data = Trajectories.from_arrays(
        np.array([0, 0, 0, 1]),
        [0, 0, 0, 0],
        np.ones(4),
        np.zeros(4),
        offsets=[0, 3, 4],
        policies=[Uniform(1)],
        terminated=True,
    )
    circle = dataclasses.replace(data, observations=np.array([0, 0, 1, 2]))
    target = Table(np.ones((3, 1)))
    values = TabularQ(time=False).fit(circle, problem(target, 1.0, 3))
    assert np.isfinite(values.q_all(np.arange(3), np.zeros(3, dtype=np.int64))).all()
    looped = dataclasses.replace(data, actions=np.array([0, 0, 1, 1]))
    target = Table(np.array([[1.0, 0.0], [1.0, 0.0]]))
    with pytest.raises(ValueError, match="never reach an end"):
        TabularQ(time=False).fit(looped, problem(target, 1.0, 3))


def test_what_was_never_seen_is_given_a_mean() -> None:
    data = Trajectories.from_arrays(
        np.array([5, 5, 5, 7]),
        [0, 1, 0, 2],
        [1.0, 3.0, 1.0, 10.0],
        np.zeros(4),
        offsets=np.arange(5),
        policies=[Uniform(3)],
        terminated=True,
    )
    values = TabularQ().fit(data, problem(Uniform(3), 1.0, 1))
    zero = np.zeros(4, dtype=np.int64)
    found = values.q_all(np.array([5, 7, 6, -9]), zero)
    everywhere = (1 + 3 + 1 + 10) / 4
    expected = np.array([[1.0, 3.0, 2.0], [10.0] * 3, [everywhere] * 3, [everywhere] * 3])
    np.testing.assert_allclose(found, expected, atol=1e-12)


FIXED = Polynomial(2).learn(np.linspace(0.0, 2.0, 50))


@pytest.mark.parametrize(
    "model",
    [
        TabularQ(),
        TabularQ(time=False),
        PLAIN,
        LinearQ(FIXED),
        LinearQ(lambda x: np.stack([np.ones(len(x)), x, x**2], axis=1), time=1),
    ],
)
def test_one_pass_for_all_folds_is_one_fit_for_each(model: Any) -> None:
    record = recorded(4, (20, 15, 25))
    data = record.trajectories
    fold = folds_within(behaviours_of(data).ids, 4)
    task = problem(record.target, 0.9, 6)
    (values,) = model.fit_folds(data, fold, [task])
    together = list(values)
    assert len(together) == 5  # one for each fold, and one that learned from all
    weighted = isinstance(model, LinearQ) and model.nearness > 0
    for k, values in enumerate(together):
        alone = model.fit(data.select(episodes=np.flatnonzero(fold != k)), task)
        np.testing.assert_allclose(
            values.q_all(data.observations, data.steps),
            alone.q_all(data.observations, data.steps),
            rtol=0,
            atol=1e-9,
            err_msg="weights are scaled by their mean" if weighted else "",
        )


@pytest.mark.parametrize("model", [TabularQ(), LinearQ(), PLAIN])
def test_the_values_of_an_episode_do_not_know_its_rewards(model: Any) -> None:
    record = recorded(5, (10, 10))
    data = record.trajectories
    before = fitted_across(model, record)
    for i in (0, 7, 13):
        own = slice(data.offsets[i], data.offsets[i + 1])
        changed = data.rewards.copy()
        changed[own] = 50.0  # beyond all others, whose bounds clip q
        other = dataclasses.replace(record, trajectories=dataclasses.replace(data, rewards=changed))
        after = fitted_across(model, other)
        np.testing.assert_array_equal(after.q[own], before.q[own])
        np.testing.assert_array_equal(after.v[own], before.v[own])
        assert np.abs(after.q - before.q).max() > 0.1


@dataclasses.dataclass
class Fixed(QModel, ActionValues):
    """Known values, which also are a model."""

    table: Floats

    def fit(self, data: Trajectories, problem: Problem) -> Fixed:
        return self

    def q(self, observations: Any, actions: Any, steps: Ints) -> Floats:
        return np.asarray(self.table[observations, actions])


def test_v_is_the_mean_of_the_clipped_q() -> None:
    record = recorded(6, (6, 6), rewards=(0.0, 1.0))
    data, target = record.trajectories, record.target
    table = seeded(1).normal(scale=8.0, size=(3, 3))
    found = fitted_across(Fixed(table), record)
    left = np.array([sum(0.9**j for j in range(6 - t)) for t in data.steps])
    clipped = np.clip(table[data.observations], 0.0, left[:, None])
    assert not np.array_equal(clipped, table[data.observations])
    np.testing.assert_allclose(found.q, clipped[np.arange(data.n_steps), data.actions], atol=1e-12)
    v = (target.probs(data.observations) * clipped).sum(axis=1)
    np.testing.assert_allclose(found.v, v, atol=1e-12)
    np.testing.assert_array_equal(found.at_start(data.offsets), found.v[data.offsets[:-1]])


def test_cross_fit_refuses_one_episode_and_values_that_are_not_finite() -> None:
    record = recorded(8, (4,))
    one = dataclasses.replace(record, trajectories=record.trajectories.select(episodes=[0]))
    with pytest.raises(ValueError, match="at least 2 episodes"):
        fitted_across(TabularQ(), one)
    with pytest.raises(ValueError, match=r"not finite at episode \d+, step \d+"):
        fitted_across(Fixed(np.full((3, 3), np.nan)), record)


# -- continuous actions ------------------------------------------------------------------------


def gaussian(weight: float, log_std: float) -> DiagonalGaussian:
    return DiagonalGaussian(np.array([[weight]]), np.zeros(1), np.array([log_std]))


def pushed(seed: int, episodes: int, horizon: int) -> tuple[Trajectories, DiagonalGaussian]:
    """x' = x / 2 + a + noise, reward -x² - a²: the values of a linear policy are quadratic."""
    rng = seeded(seed)
    behaviour = gaussian(0.1, 0.0)
    x = np.empty((episodes, horizon, 1))
    a = np.empty((episodes, horizon, 1))
    x[:, 0, 0] = rng.normal(size=episodes)
    for t in range(horizon):
        a[:, t] = behaviour.sample(x[:, t], rng)
        if t + 1 < horizon:
            x[:, t + 1] = x[:, t] / 2 + a[:, t] + 0.1 * rng.standard_normal((episodes, 1))
    flat, acts = x.reshape(-1, 1), a.reshape(-1, 1)
    data = Trajectories.from_arrays(
        flat,
        acts,
        -(flat**2)[:, 0] - (acts**2)[:, 0],
        behaviour.log_prob(flat, acts),
        offsets=np.arange(episodes + 1) * horizon,
        policies=[behaviour],
        terminated=False,
        truncated=True,
        horizon=horizon,
    )
    return data, gaussian(-0.3, -1.0)


def quadratic_q(x: Floats, a: Floats, left: int) -> Floats:
    """The exact q of the target of `pushed`: V(x) = -(p x² + c), by recursion."""
    p = c = 0.0
    for _ in range(left - 1):
        gain, noise = 0.5 - 0.3, np.exp(-2.0)
        p, c = 1 + 0.09 + p * gain**2, noise + p * (noise + 0.01) + c
    return np.asarray(-(x**2) - a**2 - p * ((x / 2 + a) ** 2 + 0.01) - c)


def test_linear_q_of_continuous_actions_nears_the_exact_values() -> None:
    data, target = pushed(0, 3000, 4)
    model = LinearQ(time=3, nearness=0.0, ridge=1e-8)
    values = model.fit(data, problem(target, 1.0, 4))
    x, a = seeded(1).normal(size=(2, 200))
    for t in range(4):
        found = values.q(x[:, None], a[:, None], np.full(200, t))
        exact = quadratic_q(x, a, 4 - t)
        assert np.sqrt(np.mean((found - exact) ** 2)) < 0.1 * exact.std()


def test_cross_fit_draws_the_target_s_continuous_actions() -> None:
    data, target = pushed(1, 60, 3)

    class Action(QModel, ActionValues):
        def fit(self, data: Trajectories, problem: Problem) -> Action:
            return self

        def q(self, observations: Any, actions: Any, steps: Ints) -> Floats:
            return np.asarray(-np.abs(actions[:, 0]))

    groups = np.zeros(len(data), dtype=np.int64)
    found = cross_fit(Action(), data, groups, problem(target, 1.0, 3))
    np.testing.assert_allclose(found.q, -np.abs(data.actions[:, 0]), atol=0)
    spread = np.exp(-1.0)
    mean = -0.3 * data.observations[:, 0]
    draws = mean[:, None] + spread * seeded(3).standard_normal((data.n_steps, 4000))
    exact = -np.abs(draws).mean(axis=1)
    error = np.abs(draws).std(axis=1) / np.sqrt(SAMPLES)
    z = (found.v - exact) / error
    assert abs(z.mean()) < 4 / np.sqrt(z.size)
    assert 0.8 < z.std() < 1.2


# -- linear features ---------------------------------------------------------------------------


def test_polynomials_are_monomials_of_standardised_numbers_and_categories() -> None:
    rng = seeded(0)
    batch = {"n": rng.normal(3.0, 2.0, size=(40, 2)), "c": rng.integers(4, 7, size=40)}
    found = Polynomial(2).learn(batch)(batch)
    z = (batch["n"] - batch["n"].mean(axis=0)) / batch["n"].std(axis=0)
    x, y = z.T
    hot = batch["c"][:, None] == np.array([4, 5, 6])
    expected = np.column_stack([np.ones(40), x, y, hot, x * x, x * y, y * y])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    new = {"n": np.full((1, 2), 1e9), "c": np.array([9])}
    cut = Polynomial(1).learn(batch)(new)
    np.testing.assert_allclose(cut, [[1, 10, 10, 0, 0, 0]])
    assert Polynomial(1).learn(np.ones((5, 1)))(np.full((2, 1), 3.0)).tolist() == [[1, 0], [1, 0]]


def test_an_action_never_taken_has_the_values_of_the_others() -> None:
    data = recorded(9, (30,), actions=2).trajectories
    target = Table(np.full((3, 3), 1 / 3))
    model: Any = LinearQ(indicators, time=0)
    values = model.fit(data, problem(target, 0.9, 6))
    found = values.q_all(np.arange(3), np.zeros(3, dtype=np.int64))
    np.testing.assert_allclose(found[:, 2], found[:, :2].mean(axis=1), rtol=0.02)


def test_nearness_weighs_steps_by_the_likelihood_of_the_target() -> None:
    """One state, two behaviours whose rewards differ: the fit goes with the likelier episodes."""
    actions = np.array([0, 1] * 2)
    policies = [Table(np.array([[0.5, 0.5]])), Table(np.array([[0.9, 0.1]]))]
    ids = np.array([0, 0, 1, 1])
    log_probs = np.log([0.5, 0.5, 0.9, 0.1])
    rewards = np.array([0.0, 0.0, 1.0, 1.0])
    data = Trajectories.from_arrays(
        np.zeros(4, dtype=np.int64),
        actions,
        rewards,
        log_probs,
        offsets=np.arange(5),
        policies=policies,
        policy_ids=ids,
        terminated=True,
    )
    target = Table(np.array([[0.8, 0.2]]))
    model: Any = LinearQ(indicators, ridge=0.0, pull=0.0, time=0, nearness=0.5)
    found = model.fit(data, problem(target, 1.0, 1)).q_all(
        np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    )
    w = np.sqrt(np.array([0.8, 0.2, 0.8, 0.2]) / np.exp(log_probs))
    expected = [w[2] / (w[0] + w[2]), w[3] / (w[1] + w[3])]
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)
    hidden = dataclasses.replace(data, log_probs=np.full(4, np.nan))
    plain = model.fit(hidden, problem(target, 1.0, 1))
    zero = np.zeros(1, dtype=np.int64)
    np.testing.assert_allclose(plain.q_all(zero, zero)[0], [0.5, 0.5], rtol=1e-12)


def test_weights_of_an_episode_do_not_feel_those_before_it() -> None:
    """Ratios of 0 in other episodes cost no digits, and none at all leaves all steps alike."""
    record = recorded(2, (400, 400))
    data, target = record.trajectories, Table(np.eye(3)[[1, 0, 2]])
    last = data.select(episodes=[len(data) - 1])
    found = near_weights(Answers(target, data), 0.35)[-last.n_steps :]
    np.testing.assert_array_equal(found, near_weights(Answers(target, last), 0.35))
    never = dataclasses.replace(data, actions=np.minimum(data.actions, 1))
    target = Table(np.eye(3)[[2, 2, 2]])
    assert not near_weights(Answers(target, never), 0.35).any()
    task = problem(target, 0.9, 6)
    one, alike = (LinearQ(nearness=nearness).fit(never, task).theta for nearness in (0.35, 0.0))
    np.testing.assert_array_equal(one, alike)


@pytest.mark.parametrize("model", [LinearQ(), TabularQ()])
def test_several_targets_are_fitted_as_one_is(model: Any) -> None:
    record = recorded(3, (20, 25))
    data, groups = record.trajectories, behaviours_of(record.trajectories).ids
    tables = np.random.default_rng(3).dirichlet(np.ones(3), (7, 3))
    problems = [problem(Table(table), 0.9, 6) for table in tables]
    together = cross_fit_targets(model, data, groups, problems)
    for task, found in zip(problems, together, strict=True):
        alone = cross_fit(model, data, groups, task)
        np.testing.assert_allclose(found.q, alone.q, atol=1e-10)
        np.testing.assert_allclose(found.v, alone.v, atol=1e-10)
        assert found.visits is not None
        assert alone.visits is not None
        np.testing.assert_allclose(found.visits.ratio, alone.visits.ratio, atol=1e-10)


@pytest.mark.parametrize("time", [0, 3])
def test_how_sums_are_cut_makes_no_difference(monkeypatch: pytest.MonkeyPatch, time: int) -> None:
    record = recorded(10, (300, 300))
    whole = fitted(LinearQ(time=time), record)
    constants = [("_SORTED", 1), ("_CACHED", 1)]  # 256 rows at once, 64 of one group
    constants += [("_CALL", -(10**9)), ("_CALL", 10**9)]  # each time by itself, or every step
    for name, value in constants:
        monkeypatch.setattr(f"ope_gym.models.equations.{name}", value)
        parts = fitted(LinearQ(time=time), record)
        np.testing.assert_allclose(parts.theta, whole.theta, rtol=1e-6)


CUTS = [[0, 25], [0, 1, 9, 9, 25], list(range(26))]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", ["known", "unknown", "never", "seldom"])
def test_chunks_give_the_values_of_all_episodes(cuts: list[int], kind: str) -> None:
    """One chunk gives the same bits; more differ by rounding, also where weights are 0."""
    record = recorded(3, (10, 15))
    data, target, groups = (
        record.trajectories,
        record.target,
        behaviours_of(record.trajectories).ids,
    )
    if kind == "unknown":
        hidden = np.where(data.episode_ids == 20, np.nan, data.log_probs)
        data = dataclasses.replace(data, log_probs=hidden)
    if kind in ("never", "seldom"):  # the target's own action is never taken, or in the last alone
        target = Table(np.eye(3)[[2, 2, 2]])
        taken = np.where(data.episode_ids < (25 if kind == "never" else 24), 0, 2)
        data = dataclasses.replace(data, actions=taken)
    model = LinearQ(Polynomial(2))
    options: dict[str, Any] = {"gamma": 0.9, "horizon": 6}
    whole = cross_fit(model, data, groups, problem(target, **options))
    spans = list(itertools.pairwise(cuts))
    chunks = [data.select(episodes=slice(*span)) for span in spans]
    survey, other = FeatureSurvey(model, target), FeatureSurvey(model, target)
    for i, chunk in enumerate(chunks):
        (survey, other)[i % 2].update(chunk)
    survey.merge(other)
    folds = folds_within(groups, 5)
    fold = [folds[slice(*span)] for span in spans]
    sums = [survey.equations(1, folds=5, **options) for _ in range(3)]
    answers = [Answers(target, chunk) for chunk in chunks]
    for i, (chunk, own) in enumerate(zip(chunks, fold, strict=True)):
        sums[i % 2].update(chunk, own, [answers[i]])
    sums[0].merge(sums[1])
    sums[2].update(data, folds, [Answers(target, data)])
    for name in ("sums", "starts", "bounds"):
        one, all_ = (getattr(sums[i], name) for i in (0, 2))
        np.testing.assert_allclose(one, all_, rtol=0, atol=1e-12 * np.abs(all_).max())
    values = sums[0].cross_fitted()
    found = [baselines(values, own, [asked])[0] for own, asked in zip(fold, answers, strict=True)]
    q, v = (np.concatenate([getattr(part, name) for part in found]) for name in "qv")
    tolerance = 0.0 if len(chunks) == 1 else 1e-9
    np.testing.assert_allclose(q, whole.q, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(v, whole.v, rtol=tolerance, atol=tolerance)


def test_what_needs_all_episodes_in_one_chunk_says_so() -> None:
    record = recorded(1, (4, 4))
    data = record.trajectories
    survey = FeatureSurvey(LinearQ(), record.target)
    with pytest.raises(ValueError, match="there is no episode to learn from"):
        survey.equations(1, gamma=1.0, horizon=6, folds=2)
    shape = (data.n_steps, 1)
    moved = dataclasses.replace(data, observations=np.ones(shape), actions=np.ones(shape))
    zero = np.zeros(1)
    target = DiagonalGaussian(zero[:, None], zero, zero)
    survey = FeatureSurvey(LinearQ(), target)
    survey.update(moved)
    equations = survey.equations(1, gamma=1.0, horizon=6, folds=2)
    fold = np.arange(len(data)) % 2
    rngs = [seeded()]
    equations.update(moved, fold, [Answers(target, moved)], rngs)
    with pytest.raises(ValueError, match=r"target is DiagonalGaussian.*in several chunks"):
        equations.update(moved, fold, [Answers(target, moved)], rngs)


@pytest.mark.parametrize(
    ("width", "actions", "expected"),
    [
        (20, 2, LinearQ()),
        (40, 2, LinearQ(Polynomial(1))),  # 861 monomials of degree 2 are too many to solve for
        (10, 50, LinearQ(Polynomial(1), time=1)),
        (64, 16, None),
        (65, 2, None),
    ],
)
def test_the_default_model_can_be_fitted(width: int, actions: int, expected: Any) -> None:
    rng, target = seeded(0), Uniform(actions)
    data = Trajectories.from_arrays(
        rng.normal(size=(60, width)),
        rng.integers(actions, size=60),
        rng.normal(size=60),
        np.full(60, -np.log(actions)),
        offsets=np.arange(0, 61, 3),
        policies=[target],
        terminated=True,
    )
    assert default_model(data, target) == expected
    if expected is not None:
        groups = np.zeros(len(data), dtype=np.int64)
        cross_fit(expected, data, groups, Problem(target, 1.0, 3, rng))


@pytest.mark.parametrize("make", [LinearQ, TabularQ])
def test_memory_is_of_the_order_of_the_steps(make: Any) -> None:
    n = 60_000
    rng = seeded(0)
    seen: Any = rng.normal(size=(n, 4)) if make is LinearQ else rng.integers(3000, size=n)
    data = Trajectories.from_arrays(
        seen,
        rng.integers(4, size=n),
        rng.normal(size=n),
        np.full(n, np.log(0.25)),
        offsets=np.arange(0, n + 1, 60),
        policies=[Uniform(4)],
        terminated=True,
        horizon=60,
    )
    groups = np.zeros(len(data), dtype=np.int64)
    model = make()
    task = Problem(Uniform(4), 1.0, 60, rng)
    cross_fit(model, data.select(episodes=np.arange(20)), groups[:20], task)  # loads what it needs
    tracemalloc.start()
    cross_fit(model, data, groups, task)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6  # (S, actions · features) would be 240 steps · 8 bytes, and several of them


# -- critics -----------------------------------------------------------------------------------


def test_a_critic_of_values_is_the_same_for_every_action() -> None:
    record = recorded(11, (6, 6), rewards=(0.0, 1.0))
    data = record.trajectories
    known = np.array([0.3, 0.5, 0.1])
    found = fitted_across(Critic(v=lambda seen: known[seen]), record)
    np.testing.assert_allclose(found.v, known[data.observations], atol=1e-12)
    np.testing.assert_allclose(found.q, known[data.observations], atol=1e-12)


def test_a_critic_of_actions_may_give_one_or_all() -> None:
    record = recorded(11, (6, 6), rewards=(0.0, 1.0))
    table = seeded(0).uniform(0.0, 0.9, size=(3, 3))
    one = fitted_across(Critic(q=lambda seen, chosen: table[seen, chosen]), record)
    every = fitted_across(Critic(q=lambda seen: table[seen], all_actions=True), record)
    np.testing.assert_array_equal(one.q, every.q)
    np.testing.assert_array_equal(one.v, every.v)
    values = Critic(q=lambda seen: table[seen], all_actions=True).fit(
        record.trajectories, problem(record.target, 1.0, 6)
    )
    ask = np.array([2, 0]), np.array([1, 2]), np.zeros(2, dtype=np.int64)
    np.testing.assert_array_equal(values.q(*ask), [table[2, 1], table[0, 2]])


def test_a_torch_critic_is_asked_without_gradients_and_left_as_it_was() -> None:
    import torch

    data, target = pushed(2, 8, 3)
    module: Any = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    with torch.no_grad():
        module[0].weight.fill_(2.0)
        module[0].bias.fill_(-30.0)
    values = Critic(v=module).fit(data, problem(target, 1.0, 3))
    found = values.q(data.observations, data.actions, data.steps)
    np.testing.assert_allclose(found, 2.0 * data.observations[:, 0] - 30.0, rtol=1e-5)
    assert module.training
    tensors = Critic(v=lambda seen: module[0](torch.as_tensor(np.array(seen)).float()))
    again = tensors.fit(data, problem(target, 1.0, 3))
    np.testing.assert_allclose(
        again.q(data.observations, data.actions, data.steps), found, rtol=1e-5
    )


# -- networks ----------------------------------------------------------------------------------

SMALL = NetworkQ(hidden=(32,), epochs=20, batch=64, learning_rate=1e-2, tau=0.1, patience=20)


def test_a_network_learns_a_small_problem_and_is_reproducible() -> None:
    import torch

    record = recorded(12, (150, 150), horizon=3)
    errors: list[tuple[int, float]] = []
    model = dataclasses.replace(SMALL, progress=lambda *epoch: errors.append(epoch))
    state = torch.random.get_rng_state()
    values = fitted(model, record, 0.9, 3)
    assert torch.equal(state, torch.random.get_rng_state())
    data = record.trajectories
    found = values.q_all(data.observations, data.steps)
    chosen = values.q(data.observations, data.actions, data.steps)
    np.testing.assert_allclose(chosen, found[np.arange(data.n_steps), data.actions], rtol=1e-6)
    # the table is what these data say; its own sampling error is no matter of the network
    table = fitted(TabularQ(), record, 0.9, 3).q(data.observations, data.actions, data.steps)
    assert np.sqrt(np.mean((chosen - table) ** 2)) < 0.5 * table.std()
    assert [epoch for epoch, _ in errors] == list(range(len(errors)))
    assert all(0.0 < error < np.inf for _, error in errors)
    assert len(errors) <= model.epochs
    short = dataclasses.replace(SMALL, epochs=2)
    one, two = (fitted(short, record, 0.9, 3) for _ in range(2))
    np.testing.assert_array_equal(
        one.q_all(data.observations, data.steps), two.q_all(data.observations, data.steps)
    )


def test_a_network_learns_continuous_actions() -> None:
    data, target = pushed(3, 300, 3)
    model = dataclasses.replace(SMALL, hidden=(32, 32))
    values = model.fit(data, problem(target, 1.0, 3))
    x, a = 0.7 * seeded(1).normal(size=(2, 300))
    for t in (0, 2):
        exact = quadratic_q(x, a, 3 - t)
        found = values.q(x[:, None], a[:, None], np.full(300, t))
        assert np.sqrt(np.mean((found - exact) ** 2)) < 0.5 * exact.std()


def edged(episodes: int) -> Trajectories:
    """One-step episodes that pay 1 for action 1 beyond an edge, which no polynomial follows."""
    rng = seeded(4)
    x, action = rng.normal(size=(episodes, 1)), rng.integers(0, 2, episodes)
    return Trajectories.from_arrays(
        x,
        action,
        ((np.abs(x[:, 0]) > 1.0) & (action == 1)).astype(np.float64),
        np.full(episodes, np.log(0.5)),
        offsets=np.arange(episodes + 1),
        policies=[Uniform(2)],
        terminated=True,
    )


def test_a_network_starts_from_linear_values_and_learns_what_they_leave() -> None:
    data, task = edged(1500), problem(Uniform(2), 1.0, 1)
    linear = LinearQ().fit(data, task).q_all(data.observations, data.steps)
    start = dataclasses.replace(SMALL, learning_rate=1e-12, epochs=2)
    found = start.fit(data, task)
    np.testing.assert_allclose(
        found.q_all(data.observations, data.steps), np.clip(linear, 0.0, 1.0), atol=1e-6
    )
    learned = dataclasses.replace(start, learning_rate=1e-2, epochs=40).fit(data, task)
    exact = np.where(np.abs(np.asarray(data.observations)) > 1.0, [[0.0, 1.0]], 0.0)
    left = np.mean((np.clip(linear, 0.0, 1.0) - exact) ** 2)
    assert np.mean((learned.q_all(data.observations, data.steps) - exact) ** 2) < 0.5 * left


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NetworkQ(tau=0.0), "tau is 0.0; give a share"),
        (lambda: Critic(), "either q or v"),
        (lambda: Critic(v=len, all_actions=True), "only v"),
    ],
)
def test_bad_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="features is 3"):
        LinearQ(features=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="v is 3"):
        Critic(v=3)  # type: ignore[arg-type]


def test_models_say_what_they_cannot_do() -> None:
    data, target = pushed(4, 4, 2)
    task = problem(Uniform(2), 1.0, 2)
    with pytest.raises(ValueError, match="finite action set"):
        TabularQ().fit(data, problem(target, 1.0, 2))
    chosen = np.zeros(data.n_steps, dtype=np.int64)
    finite = dataclasses.replace(data, actions=chosen)
    with pytest.raises(ValueError, match="use LinearQ"):
        TabularQ().fit(finite, task)
    wide = dataclasses.replace(finite, observations=np.arange(8 * 64).reshape(8, 64) * 10**9)
    with pytest.raises(ValueError, match="too many for a table"):
        TabularQ().fit(wide, task)
    images = dataclasses.replace(
        finite, observations=seeded().integers(256, size=(8, 80, 80), dtype=np.uint8)
    )
    many = dataclasses.replace(finite, observations=np.zeros((8, 80, 80)))
    with pytest.raises(ValueError, match="6400 numbers a step: NetworkQ takes at most 4096 beside"):
        NetworkQ().fit(many, task)
    with pytest.raises(ValueError, match="more than 4000 weights"):
        LinearQ(lambda seen: seen.reshape(len(seen), -1)).fit(images, task)
    with pytest.raises(ValueError, match=r"features gave shape \(3,\)"):
        LinearQ(lambda seen: np.zeros(3)).fit(finite, task)
    with pytest.raises(ValueError, match="features gave nan in row 0, column 1"):
        LinearQ(lambda seen: np.full((len(seen), 2), [1.0, np.nan])).fit(finite, task)
    text = dataclasses.replace(finite, observations=np.array(["a"] * 8, dtype=object))
    with pytest.raises(ValueError, match="dtype object"):
        LinearQ().fit(text, task)
    with pytest.raises(ValueError, match="at least 2 episodes"):
        NetworkQ().fit(finite.select(episodes=[0]), task)
    short = Critic(v=lambda seen: np.zeros(2)).fit(finite, task)
    with pytest.raises(ValueError, match=r"v of the critic gave shape \(2,\)"):
        short.q(finite.observations, finite.actions, finite.steps)
