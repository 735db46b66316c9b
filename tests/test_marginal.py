"""MDR, DM, the check for a Markov state, and auto's use of them: enumeration, loops, gains."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from ope_gym import Evaluation, Trajectories, evaluate, evaluate_log_probs
from ope_gym.arrays import FloatArray, IntArray, step_numbers
from ope_gym.estimators.auto import (
    Part,
    blend,
    least_error,
    parts_of_weights,
    rest_on,
    slope,
    squared_bias,
    widened,
)
from ope_gym.estimators.marginal import UNKNOWN, Corrections, Marginal, Support, marginal
from ope_gym.estimators.markov import (
    ALPHA,
    MarkovCheck,
    PastColumns,
    PastSquares,
    PastSums,
    Root,
    _chance,
    check_markov,
)
from ope_gym.estimators.reductions import Column, Reduction, Weighted
from ope_gym.estimators.run import Reduce, aim, reduce_chunk, run
from ope_gym.estimators.weighted import Setting
from ope_gym.inference.computed import Computed, Weights
from ope_gym.inference.errors import cautious_error, standard_error, uncorrelated
from ope_gym.inference.intervals import Interval, whatever_bias
from ope_gym.models import Baseline, TabularQ
from ope_gym.models.base import Problem, Visits
from ope_gym.models.folds import cross_fit
from ope_gym.policies import LinearSigmoid
from ope_gym.preparing.weighing import past_columns
from ope_gym.verdict import Reason
from studies.outside.families import bandit
from studies.outside.finite import Process, Setup, TablePolicy
from studies.outside.problems import delayed, ring
from tests import reference, small_mdps
from tests.builders import Table, recorded


def setting_for(n: int, gamma: float = 1.0) -> Setting:
    nobody = np.zeros(n, dtype=np.int64)
    return Setting(n, nobody, nobody, np.array([n]), gamma, has_q=True)


# Unbiased if q is right, or if the ratios are: every episode of a small problem, enumerated.


def enumerated(wrong: str, gamma: float, greedy: bool) -> tuple[Weighted, FloatArray, float]:
    """Return all episodes as one chunk, their probabilities, and the value of the target."""
    rng = np.random.default_rng(7)
    mdp = small_mdps.random_mdp(rng, horizon=3)
    target, behaviour = small_mdps.random_policy(rng, mdp), small_mdps.random_policy(rng, mdp)
    if greedy:
        target[0] = [0.0, 1.0]
    episodes = small_mdps.paths(mdp)
    chance = np.array([path.probability(behaviour) for path in episodes])
    data = small_mdps.arrays(episodes, [0] * len(episodes), target, [behaviour])
    q, ratio = np.zeros((2, mdp.horizon, *target.shape))
    ahead = np.zeros(mdp.start.size + 1)
    for t in reversed(range(mdp.horizon)):
        q[t] = mdp.reward_mean + gamma * mdp.moves @ ahead
        ahead[:-1] = (target * q[t]).sum(axis=1)
    for t in range(mdp.horizon):
        for s, a in np.ndindex(*target.shape):
            on = [p for p in episodes if p.states[t : t + 1] == (s,) and p.actions[t] == a]
            often, recorded_often = (
                math.fsum(p.probability(x) for p in on) for x in (target, behaviour)
            )
            ratio[t, s, a] = gamma**t * often / recorded_often
    (q if wrong == "q" else ratio)[...] = rng.normal(size=q.shape)
    v = (target * q).sum(axis=2)
    steps = step_numbers(data.offsets)
    states = np.concatenate([p.states for p in episodes]).astype(np.int64)
    actions = np.concatenate([p.actions for p in episodes]).astype(np.int64)
    at = steps, states, actions
    visited = Visits(ratio[at], np.full(steps.size, np.nan))
    baseline = Baseline(q[at], v[steps, states], visited)
    with np.errstate(divide="ignore"):
        ratios = np.log(target[states, actions] / behaviour[states, actions])
    visits = baseline.marginal(baseline.residuals(data.rewards, data.offsets, gamma))
    start = baseline.at_start(data.offsets)
    chunk = Weighted(data.offsets, data.rewards, {}, start=start, visits=visits, step_ratios=ratios)
    return chunk, chance, small_mdps.value(mdp, target, gamma)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.6])
@pytest.mark.parametrize("wrong", ["q", "ratios"])
def test_every_memory_is_doubly_robust(wrong: str, gamma: float, greedy: bool) -> None:
    """MDR is memory 0; all rows are right on the mean, in which DM with a wrong q is not."""
    chunk, chance, value = enumerated(wrong, gamma, greedy)
    assert chance.sum() == pytest.approx(1.0)
    generator = marginal(setting_for(chance.size, gamma), (0, 1, 2, 4))
    (found,) = run([generator], reduce_chunk(chunk))
    assert chance @ found.influence == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(found.gaps @ chance, 0.0, atol=1e-12)
    assert (abs(chance @ found.start - value) > 0.1) == (wrong == "q")
    assert np.isnan(found.markov.chance)


def test_rows_of_longer_memory_against_a_plain_loop() -> None:
    """Ratios of k steps earlier, and the actions since; from the start on if there are fewer."""
    rng, memories, gamma = np.random.default_rng(2), (0, 1, 2, 4, 50), 0.9
    offsets = np.array([0, 1, 4, 10, 17, 19])
    ratio, residuals = rng.gamma(1.0, size=19), rng.normal(size=19)
    logs = reference.rows(rng.normal(size=19), offsets)
    logs[3][2] = -math.inf  # the target never does this: soon forgotten, not by the last row
    sums = [reference.prefix_sums(row) for row in logs]
    visits, ratios = np.stack([ratio, residuals]), np.concatenate(logs)
    chunk = Weighted(offsets, residuals, {}, visits=visits, step_ratios=ratios)
    request = Corrections(gamma, memories)
    found = request.total(request.part(chunk))
    expected = np.zeros((5, 5))
    for m, k in enumerate(memories):
        for i, row in enumerate(logs):
            for t in range(len(row)):
                weight = ratio[offsets[i] + t - k] if t >= k else 1.0
                for u in range(max(t - k + 1, 0), t + 1):
                    weight *= gamma * math.exp(row[u])
                if t < k:
                    weight /= gamma  # the first step is not discounted
                expected[m, i] += weight * residuals[offsets[i] + t]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
    per_decision = reference.influence(sums, reference.rows(residuals, offsets), gamma, False)
    np.testing.assert_allclose(found[-1], per_decision, rtol=1e-12)


# The check for a Markov state.


def weighed(data: Trajectories, target: Any) -> Weighted:
    """Return recorded episodes as one chunk, with the q of a table."""
    assert data.horizon is not None
    problem = Problem(target, 1.0, data.horizon, np.random.default_rng(0))
    baseline = cross_fit(TabularQ(), data, np.zeros(len(data), dtype=np.int64), problem)
    return Weighted(
        data.offsets,
        data.rewards,
        {},
        visits=baseline.marginal(baseline.residuals(data.rewards, data.offsets, 1.0)),
        past=past_columns(data, target),
        unit=float(np.abs(data.rewards).max()),
    )


def in_parts(chunk: Weighted, cuts: Sequence[int]) -> Reduce:
    """Answer requests from parts of a chunk, cut before some episodes."""
    bounds = [0, *cuts, chunk.offsets.size - 1]
    parts = []
    for first, stop in itertools.pairwise(bounds):
        begin, end = chunk.offsets[first], chunk.offsets[stop]
        assert chunk.visits is not None
        assert chunk.past is not None
        parts.append(
            dataclasses.replace(
                chunk,
                offsets=chunk.offsets[first : stop + 1] - begin,
                rewards=chunk.rewards[begin:end],
                visits=chunk.visits[:, begin:end],
                past=(chunk.past[0][begin:end], chunk.past[1][begin:end]),
                kept={},
            )
        )

    def total(request: Reduction) -> Any:
        whole, *others = (request.part(part) for part in parts)
        for other in others:
            whole.merge(other)
        return request.total(whole)

    return lambda requests: [total(request) for request in requests]


def checked(setup: Setup, n: int, seed: int) -> float:
    """Return the p-value of the check on n episodes."""
    data = setup.simulate(n, np.random.default_rng(seed))
    (found,) = run([check_markov()], reduce_chunk(weighed(data, setup.policy)))
    return float(found.chance)


@pytest.mark.parametrize("actions", [2, 3])
@pytest.mark.parametrize("everywhere", [True, False])
def test_steps_of_one_action_may_be_summed_apart(actions: int, everywhere: bool) -> None:
    """Where actions are not known to exclude each other, all are multiplied with all columns."""
    rng, steps = np.random.default_rng(0), 300
    taken = rng.integers(actions, size=steps)[:, None] == np.arange(actions - 1)
    others = rng.standard_normal((steps, 2)).astype(np.float32)
    chunk = Weighted(
        np.append(np.arange(0, steps, 7), steps),
        rng.random(steps),
        {},
        visits=np.stack([(rng.random(steps) < 0.9) | everywhere, rng.standard_normal(steps)]),
        past=(taken, others),
    )
    plain = dataclasses.replace(chunk, past=(taken.astype(float), others), kept={})
    one, other = (PastSums().part(x) for x in (chunk, plain))
    for a, b in zip([*one.square, *one.product], [*other.square, *other.product], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    request = PastSquares(tuple(map(Root.of, one.square, one.product)))
    for a, b in zip(request.part(chunk).sums, request.part(plain).sums, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def noisy(setup: Setup) -> Setup:
    """Add N(0, 1) to the rewards."""
    return dataclasses.replace(setup, process=dataclasses.replace(setup.process, noise="normal"))


def test_targets_checked_together_are_checked_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All steps of the first five count, and not all of the others."""
    monkeypatch.setattr("ope_gym.estimators.markov._PIECE", 100)
    rng = np.random.default_rng(4)
    setup = noisy(ring(rng, 1, states=5, horizon=7))
    data = setup.simulate(60, rng)
    one, targets = weighed(data, setup.policy), list[Weighted]()
    for i in range(7):
        ratio = np.where(rng.random(data.n_steps) < 0.1 * (i > 4), 0.0, 1.0)
        visits = np.stack([ratio, rng.normal(size=data.n_steps)])
        targets.append(dataclasses.replace(one, visits=visits, kept=one.kept))
    together = run([aim(i, check_markov()) for i in range(7)], reduce_chunk(targets))
    alone = [run([check_markov()], reduce_chunk(own))[0].chance for own in targets]
    np.testing.assert_allclose([found.chance for found in together], alone, rtol=1e-9)
    assert len({round(chance, 6) for chance in alone}) > 3  # it can tell targets apart


def test_a_markov_state_is_rejected_as_rarely_as_said() -> None:
    """Twenty rings, ten data sets each; at most 4 binomial standard errors above the level."""
    chances = []
    for k in range(20):
        setup = ring(np.random.default_rng(100 + k), 1, states=5, horizon=8)
        chances += [checked(noisy(setup), 60, seed) for seed in range(10)]
    assert not np.isnan(chances).any()
    rejected = np.mean(np.array(chances) < ALPHA)
    assert rejected <= ALPHA + 4 * np.sqrt(ALPHA * (1 - ALPHA) / len(chances))


def test_the_chance_of_coefficients_by_hand() -> None:
    """Hotelling's T^2, with the variance of residuals whose q saw four of five folds."""
    b, square = np.array([0.3, -0.5]), np.array([[0.04, 0.01], [0.01, 0.09]])
    root, steps = Root(np.eye(2), b), 50.0

    def expected(covariance: FloatArray) -> float:
        statistic = b @ np.linalg.solve(covariance, b)
        return float(scipy.stats.f.sf(statistic * 48 / (2 * 49), 2, 48))

    assert _chance(root, square, steps, 0.0) == pytest.approx(expected(1.25 * square))
    assert _chance(root, square, steps, 3.0) == pytest.approx(expected(3.0 * np.eye(2)))
    assert np.isnan(_chance(root, square, 9.9, 0.0))  # five steps a column


def test_a_hidden_state_is_found() -> None:
    """The action before decides the reward, and no observation shows it."""
    for k in range(12):
        setup = delayed(np.random.default_rng(k), 1, lag=1, horizon=6)
        assert checked(setup, 100, k) < 0.001


def test_what_was_done_long_ago_is_found() -> None:
    """The reward depends on the action ten steps ago, beyond the lags: sums of actions show it."""
    rng = np.random.default_rng(1)
    episodes, steps, lag = 200, 60, 10
    actions = rng.integers(2, size=(episodes, steps))
    rewards = (rng.random((episodes, steps)) < 0.5).astype(np.float64)
    rewards[:, lag:] = actions[:, lag:] == actions[:, :-lag]
    data = Trajectories.from_arrays(
        np.zeros(episodes * steps, dtype=np.int64),
        actions.ravel(),
        rewards.ravel(),
        np.full(episodes * steps, np.log(0.5)),
        offsets=np.arange(episodes + 1) * steps,
        policies=[Table(np.array([[0.5, 0.5]]))],
        policy_ids=0,
        terminated=True,
    )
    target = Table(np.array([[0.4, 0.6]]))
    found = evaluate(data, target, ["auto", "NFIS", "DM"], origin="fixed")
    assert "past steps predict the residuals" in str(found["DM"].verdict)
    assert found["auto"].report["s"] < 0.5
    truth = (steps - lag) * (0.6**2 + 0.4**2) + lag * 0.5
    assert truth in found["auto"].interval


def test_sums_of_actions_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ope_gym.estimators.markov._BLOCK", 7)
    rng, lengths = np.random.default_rng(0), [1, 12, 3, 9]
    actions = rng.standard_normal((sum(lengths), 2))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    past = (actions, np.empty((len(actions), 0)))
    columns = PastColumns(Weighted(offsets, rng.random(len(actions)), {}, past=past))
    found = np.concatenate([columns._taken(slice(b, min(b + 7, 25))) for b in range(0, 25, 7)])
    plain = np.concatenate(
        [
            np.array([actions[a : a + t].sum(axis=0) for t in range(n)])
            for a, n in zip(offsets, lengths, strict=False)
        ]
    )
    np.testing.assert_allclose(found, plain, atol=1e-12)


def test_without_a_past_the_shape_of_a_table_needs_no_check_but_that_of_a_line_does() -> None:
    """One step, a reward that bends with the context, and a q that cannot."""
    rng, n = np.random.default_rng(3), 2000
    logger, target = LinearSigmoid(np.array([-1.0])), LinearSigmoid(np.array([1.0]))
    x = rng.uniform(-3, 3, (n, 1))
    actions = logger.sample(x, rng)
    data = Trajectories.from_arrays(
        x,
        actions,
        actions * np.sin(3 * x[:, 0]) + 0.5 * rng.normal(size=n),
        logger.log_prob(x, actions),
        offsets=np.arange(n + 1),
        policies=[logger],
        policy_ids=0,
        terminated=True,
    )
    for name in ("DM", "MDR"):
        verdict = evaluate(data, target, name, origin="fixed")[name].verdict
        assert verdict.colour == "amber"
        assert "cannot show whether it has the right shape" in str(verdict)


def test_without_a_past_there_is_nothing_to_check() -> None:
    setup = ring(np.random.default_rng(0), 1, states=5, horizon=1)
    chunk = weighed(noisy(setup).simulate(50, np.random.default_rng(0)), setup.policy)
    (found,) = run([check_markov()], reduce_chunk(chunk))
    assert (found.past, found.failed, found.unchecked) == (False, False, False)
    assert found.reasons == (Reason("no_past"),)


def test_a_check_that_could_not_be_done_has_neither_passed_nor_failed() -> None:
    setup = noisy(ring(np.random.default_rng(0), 1, states=5, horizon=3))
    chunk = weighed(setup.simulate(2, np.random.default_rng(0)), setup.policy)  # six steps
    (found,) = run([check_markov()], reduce_chunk(chunk))
    assert (found.past, found.failed, found.unchecked) == (True, False, True)
    assert found.reasons == (Reason("markov_untested"),)


@pytest.mark.parametrize("make", [ring, delayed])
def test_the_check_is_the_same_from_several_chunks(make: Callable[..., Setup]) -> None:
    options = {"states": 5} if make is ring else {"lag": 1}
    setup = noisy(make(np.random.default_rng(3), 1, horizon=7, **options))
    found = []
    for seed in range(5):
        chunk = weighed(setup.simulate(40, np.random.default_rng(seed)), setup.policy)
        for answers in (reduce_chunk(chunk), in_parts(chunk, [1, 9, 10, 33])):
            found.append(run([check_markov()], answers)[0].chance)
    assert 0 < min(found) < 1
    np.testing.assert_allclose(found[1::2], found[::2], rtol=1e-9)


# auto, and how far it rests on the model.


def test_a_squared_bias_is_a_squared_deviation_less_what_chance_explains() -> None:
    """Its mean is that of the square of the bias, where it is not cut at 0."""
    drawn = np.random.default_rng(0).normal(3.0, 1.0, 20_000)
    squares = [squared_bias(d, 1.0) for d in drawn]
    assert np.mean(squares) == pytest.approx(9.0, rel=0.03)
    assert squared_bias(0.5, 1.0) == squared_bias(np.nan, 1.0) == squared_bias(1.0, np.nan) == 0.0


@pytest.mark.parametrize(
    ("first", "second", "covariance", "biases"),
    [
        (2.0, 1.0, 0.5, (0.0, 0.0)),
        (1.0, 2.0, 0.9, (0.0, 0.3)),
        (1.0, 1.0, -0.5, (1.5, 2.0)),
        (3.0, 1.0, 1.0, (0.0, 0.0)),
    ],
)
def test_the_share_has_the_least_mean_square_error(
    first: float, second: float, covariance: float, biases: tuple[float, float]
) -> None:
    """Against a grid of shares; 1 if both estimates are exact."""
    s, nobody = np.linspace(0.0, 1.0, 100_001), np.zeros(2)
    error = (1 - s) ** 2 * (first**2 + biases[0] ** 2) + s**2 * (second**2 + biases[1] ** 2)
    error += 2 * s * (1 - s) * covariance
    a = Part(nobody, first**2, biases[0] ** 2, 10.0)
    m = Part(nobody, second**2, biases[1] ** 2, 10.0)
    assert least_error(a, m, covariance) == pytest.approx(s[error.argmin()], abs=1e-5)
    exact = Part(nobody, 0.0, 0.0, 10.0)
    assert least_error(exact, exact, 0.0) == 1.0


def parts_by_hand(
    chance: float,
    support: Support = Support(0.0, 0.0, 0.0),  # noqa: B008, a tuple
) -> tuple[Computed, Marginal, FloatArray]:
    """Return A = 3 with an error of 0.2, M = 1.2 with one of 0.05, and a row of memory."""
    own, influence, further = np.random.default_rng(0).normal(size=(3, 400)) * [[4.0], [1.0], [0.1]]
    ones = np.array([[400.0], [400.0], [0.0]])
    weights = Computed(3.0, own - own.mean(), Weights(ones, np.zeros(400)))
    steady, gap = influence - influence.mean(), further - further.mean() + 0.02
    model = Marginal(1.2, np.ones(400), steady + 1.1, gap[None], MarkovCheck(chance), support)
    return weights, model, steady


@pytest.mark.parametrize("failed", [False, True])
def test_moving_an_estimate_towards_the_model_by_hand(failed: bool) -> None:
    """The bias of the model is the gap less chance; if the check failed, the gap and its error."""
    weights, model, steady = parts_by_hand(1e-9 if failed else 0.5)
    nobody = np.zeros(400, dtype=np.int64)
    error, calm = (cautious_error(x, nobody) for x in (weights.influence, steady))
    apart = widened(cautious_error(weights.influence - steady, nobody), 400.0)
    if not failed:
        error = widened(error, 400.0)
    bias = 1.8 + apart if failed else math.sqrt(1.8**2 - apart**2)
    covariance = np.cov(weights.influence, steady)[0, 1] / 400
    a, m = Part(steady, error**2, 0.0, 400.0), Part(steady, calm**2, bias**2, 400.0)
    share = least_error(a, m, covariance)
    found = rest_on(weights, model, np.zeros(400), setting_for(400))
    assert 0 < share < 0.1
    assert found.report["s"] == pytest.approx(share, rel=1e-6)
    assert found.value == pytest.approx(3.0 + share * (1.2 - 3.0))
    assert found.bias == pytest.approx(share * bias, rel=1e-6)
    expected = (1 - share) * weights.influence + share * steady
    np.testing.assert_allclose(found.influence, expected, atol=1e-12)
    assert (found.by_model, found.reasons) == (False, weights.reasons)


def test_what_no_episode_shows_is_a_bias_and_pooled_residuals_are_a_variance() -> None:
    weights, model, _ = parts_by_hand(0.5)
    plain = rest_on(weights, model, np.zeros(400), setting_for(400))
    for support in (Support(0.0, 0.6, 4.0), Support(3.0, 0.0, 0.0)):
        thin = dataclasses.replace(model, support=support)
        found = rest_on(weights, thin, np.zeros(400), setting_for(400))
        assert found.report["s"] < 0.9 * plain.report["s"]
        size = math.hypot(support.guess, thin.hidden_error(np.zeros(400, dtype=np.int64)))
        expected = math.hypot(
            found.report["s"] * size, found.report["s"] * plain.bias / plain.report["s"]
        )
        assert found.bias == pytest.approx(expected, rel=1e-6)


def test_resting_on_a_model_that_passed_by_hand() -> None:
    """No bias; the spread of returns bounds the error of A from below; Satterthwaite's freedom."""
    rng, n, ess = np.random.default_rng(1), 400, 16.0
    nobody = np.zeros(n, dtype=np.int64)
    own, steady, returns = rng.normal(size=(3, n)) * [[1.5], [1.0], [0.6]]
    own, steady = own - own.mean(), steady - steady.mean()
    sums = np.array([[20.0], [20.0**2 / ess], [0.0]])
    weights = Computed(1.25, own, Weights(sums, np.zeros(n)))
    nothing = Support(0.0, 0.0, 0.0)
    passed = MarkovCheck(0.5)
    model = Marginal(1.2, np.full(n, 1.2), steady + 1.2, np.zeros((1, n)), passed, nothing)
    covariance = np.cov(np.stack([own, steady])) / n
    calm, wide = cautious_error(steady, nobody), widened(cautious_error(own, nobody), ess)
    least = standard_error(returns, nobody) * np.sqrt(n / ess)
    assert least > 1.2 * wide
    for paid, error in ((returns, least), (np.zeros(n), wide)):
        found = rest_on(weights, model, paid, setting_for(n))
        a, m = Part(own, error**2, 0.0, ess), Part(steady, calm**2, 0.0, n)
        share = least_error(a, m, covariance[0, 1])
        assert 0.5 < share < 1.0
        assert found.report["s"] == pytest.approx(share, rel=1e-9)
        assert (found.bias, found.by_model) == (0.0, True)
        assert [reason.code for reason in found.reasons] == ["markov_passed"]
        first, second = ((1 - share) * error) ** 2, (share * calm) ** 2
        expected = (first + second) ** 2 / (first**2 / ess + second**2 / n)
        assert found.freedom == pytest.approx(expected, rel=1e-6)
    unchecked = dataclasses.replace(model, markov=MarkovCheck(np.nan))
    doubted = rest_on(weights, unchecked, np.zeros(n), setting_for(n))
    assert (doubted.value, doubted.bias) == (found.value, 0.0)  # the same number, and a caution
    assert doubted.reasons == unchecked.markov.reasons


@pytest.mark.parametrize("seed", range(3))
def test_a_sparse_table_says_how_much_it_does_not_know(seed: int) -> None:
    """Nearly every cell is empty: DM covers, says why it is doubtful, and auto stays away."""
    setup = bandit(np.random.default_rng(seed), 1, contexts=5, arms=200)
    data = setup.simulate(200, np.random.default_rng(seed))
    found = evaluate(data, setup.policy, ["auto", "DM", "NFIS"])
    assert setup.truth in found["DM"].interval
    assert "actions_unknown" in {r.code for r in found["DM"].verdict.reasons}
    assert found["auto"].report["unknown"] > 0.5
    assert found["auto"].report["s"] < 0.2


def test_the_share_of_fwdr_has_the_least_error_with_what_no_episode_shows() -> None:
    """Against a grid: the variance of the blend, and the square of its part of the bias."""
    rng, nobody = np.random.default_rng(0), np.zeros(50, dtype=np.int64)
    plain = rng.normal(size=50) * 3.0
    corrected = 0.5 * plain + rng.normal(size=50)
    c = np.linspace(0.0, 1.0, 100_001)[:, None]
    psi = [x - x.mean() for x in (plain, corrected)]
    for bias in (0.0, 0.2, 1.0):
        moments = [psi[i] @ psi[j] / 50**2 for i, j in ((0, 0), (0, 1), (1, 1))]
        spread = (1 - c) ** 2 * moments[0] + 2 * c * (1 - c) * moments[1] + c**2 * moments[2]
        error = spread + c**2 * bias**2
        least = float(c[error.argmin(), 0])
        assert slope(plain, corrected, bias, nobody) == pytest.approx(least, abs=1e-5)


def test_a_guess_about_rare_actions_is_said_whatever_the_estimate_rests_on() -> None:
    """The logger takes an action in 1 %, the target in 20 %; it pays more than it looks."""
    mean = np.random.default_rng(0).normal([0.0, 0.0, 0.0, 2.0], 1.0, (5, 4))
    played, target = (
        np.tile([0.5, 0.3, 0.19, 0.01], (1, 5, 1)),
        np.tile([0.3, 0.3, 0.2, 0.2], (5, 1)),
    )
    one = np.ones((5, 4, 1))
    start, none = np.full(5, 0.2), np.zeros((5, 4, 1), dtype=np.int64)
    process = Process(start, one, none, mean[..., None], one > 0, np.arange(5), 1, "normal")
    found = repeated(Setup(process, played, target), 100, 40, ["auto", "NFIS"])
    value = process.value(target)
    lean = [e for e in found if e["auto"].report["unknown"] > UNKNOWN]
    assert len(lean) > 20
    for e in lean:
        assert "actions_unknown" in {reason.code for reason in e["auto"].verdict.reasons}
        assert e.best.name == "auto"  # NFIS guesses there as well, and does not know it
    assert any(e["NFIS"].verdict.colour == "green" for e in lean)
    held = [np.mean([value in e[name].interval for e in found]) for name in ("auto", "NFIS")]
    assert held[0] > held[1]
    assert error_of("auto", found, value) < error_of("NFIS", found, value)


def test_a_model_alone_that_the_episodes_refute_is_red() -> None:
    """What pays is to repeat the action before, which no observation shows."""
    found = evaluate(repeating(0), TablePolicy(np.array([[0.9, 0.1]])), ["DM", "MDR", "auto"])
    for name in ("DM", "MDR"):
        assert found[name].verdict.colour == "red"
        assert found[name].verdict.reasons[0].code == "model_refuted"
    assert "model_refuted" not in {reason.code for reason in found["auto"].verdict.reasons}


def test_lost_weight_is_a_bias_of_the_estimate_by_weights() -> None:
    """The same weights, a third as large: they average 1/3, so most of the target is missing."""
    weights, model, _ = parts_by_hand(0.5)
    low = Weights(weights.weights.sums, np.full(400, math.log(1 / 3)))
    lost = dataclasses.replace(weights, weights=low)
    returns = np.random.default_rng(1).normal(size=400) * 5.0
    shares = [rest_on(w, model, returns, setting_for(400)).report["s"] for w in (weights, lost)]
    assert shares[0] < 0.1 < 0.9 < shares[1]


def test_auto_without_visits_is_the_estimate_by_weights() -> None:
    """At the door of arrays a baseline has none."""
    r = recorded(1, (12, 14), horizon=4)
    q, v = np.random.default_rng(0).normal(size=(2, r.trajectories.n_steps))
    found = evaluate_log_probs(*r.arrays, ["auto", "NFIS"], baseline=(q, v))["auto"]
    assert "s" not in found.report
    data, rows = r.arrays, Baseline(q, v)
    logs = np.concatenate(reference.log_weights("fused", data))
    residuals = rows.residuals(data.rewards, data.offsets, 1.0)
    chunk = Weighted(data.offsets, data.rewards, {"fused": logs}, residuals, v[data.offsets[:-1]])
    ids = data.behaviour_ids
    setting = Setting(ids.size, ids, ids, np.bincount(ids), has_q=True)
    (parts,) = run([parts_of_weights(Column("fused"), setting)], reduce_chunk(chunk))
    expected = blend(parts, 0.0, ids)
    assert found.value == pytest.approx(expected.value, rel=1e-12)


def repeated(setup: Setup, n: int, times: int, names: Sequence[str]) -> list[Evaluation]:
    return [
        evaluate(setup.simulate(n, np.random.default_rng(seed)), setup.policy, list(names))
        for seed in range(times)
    ]


def error_of(name: str, found: Sequence[Evaluation], truth: float) -> float:
    return float(np.sqrt(np.mean([(e[name].value - truth) ** 2 for e in found])))


def test_auto_rests_on_the_model_in_long_episodes() -> None:
    setup = ring(np.random.default_rng(11), 1, states=10, horizon=120)
    found = repeated(setup, 40, 20, ["auto", "NFIS", "DM"])
    errors = {name: error_of(name, found, setup.truth) for name in ("auto", "NFIS", "DM")}
    assert errors["auto"] < 1.3 * errors["DM"]
    assert errors["auto"] < 0.7 * errors["NFIS"]
    assert all(0.0 <= e["auto"].report["s"] <= 1.0 for e in found)
    alone = [
        e["auto"] for e in found if e["auto"].diagnostics.ess < 4 and e["auto"].report["s"] >= 0.5
    ]
    assert len(alone) > 10
    assert all("the weights can hardly confirm it" in str(e.verdict) for e in alone)


def test_the_error_of_dm_knows_that_q_was_learned() -> None:
    """It is that of MDR; its intervals cover."""
    setup = ring(np.random.default_rng(12), 1, states=6, horizon=15)
    found = repeated(setup, 50, 60, ["DM", "MDR"])
    covered = [e["DM"].interval.low <= setup.truth <= e["DM"].interval.high for e in found]
    assert np.mean(covered) >= 0.9 - 3 * np.sqrt(0.9 * 0.1 / len(found))
    for e in found:
        assert e["DM"].standard_error == pytest.approx(e["MDR"].standard_error, rel=1e-12)


def test_auto_leaves_a_model_that_misses_the_state() -> None:
    setup = delayed(np.random.default_rng(1), 1, lag=1, horizon=8)
    found = repeated(setup, 100, 40, ["auto", "NFIS"])
    errors = {name: error_of(name, found, setup.truth) for name in ("auto", "NFIS")}
    assert errors["auto"] < 1.1 * errors["NFIS"]
    for e in found:
        assert 0.0 <= e["auto"].report["s"] <= 1.0
        alone = standard_error(e["auto"].influence, e["auto"].sample.strata)
        assert (e["auto"].standard_error > alone) == (e["auto"].report["s"] > 0)  # s b is in it


def logged(
    states: IntArray, actions: IntArray, rewards: FloatArray, length: int, chance: Sequence[float]
) -> Trajectories:
    """Return episodes of one length, held out, recorded by a policy with these probabilities."""
    chances, steps = np.tile(chance, (int(states.max()) + 1, 1)), states.size
    return Trajectories.from_arrays(
        states,
        actions,
        rewards,
        np.log(np.take(chance, actions)),
        offsets=np.arange(0, steps + 1, length),
        policies=[TablePolicy(chances)],
        policy_ids=np.zeros(steps, dtype=np.int64),
        terminated=False,
        truncated=True,
        held_out=True,
        horizon=length,
    )


def repeating(seed: int) -> Trajectories:
    """Return 100 episodes of 15 steps with one observation: to repeat the last action pays 1."""
    actions = np.random.default_rng(seed).integers(2, size=(100, 15))
    rewards = np.zeros((100, 15))
    rewards[:, 1:] = actions[:, 1:] == actions[:, :-1]
    nothing = np.zeros(1500, dtype=np.int64)
    return logged(nothing, actions.ravel(), rewards.ravel(), 15, (0.5, 0.5))


def test_a_model_that_failed_the_check_is_not_taken_because_the_weights_are_noisy() -> None:
    """The weights have an ESS of about two."""
    target, value = TablePolicy(np.array([[0.9, 0.1]])), 14 * 0.82
    found = [evaluate(repeating(seed), target, ["auto", "NFIS"]) for seed in range(12)]
    errors = np.array([[e[name].value - value for name in ("auto", "NFIS")] for e in found])
    rmse = np.sqrt(np.mean(errors**2, axis=0))
    assert rmse[0] < 1.05 * rmse[1]
    assert max(e["auto"].report["s"] for e in found) < 0.2


def test_a_model_that_failed_the_check_knows_it_where_no_weights_are_left() -> None:
    """The target always takes action 0, which pays 14; the model has seen repetition pay half."""
    found = evaluate(repeating(0), TablePolicy(np.array([[1.0, 0.0]])), ["auto", "NFIS"])
    auto = found["auto"]
    assert np.isnan(found["NFIS"].value)
    assert auto.report["s"] == 1.0
    assert "markov_failed" in {reason.code for reason in auto.verdict.reasons}
    assert auto.value < 8.0
    assert auto.standard_error > 14.0 - auto.value
    assert auto.interval.low < 14.0 < auto.interval.high


def test_rare_rewards_are_no_sign_of_a_hidden_state() -> None:
    """A reward of 10 with probability .05, independent of everything."""
    rejected = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        states, actions = rng.integers(3, size=1200), rng.integers(2, size=1200)
        rewards = np.where(rng.random(1200) < 0.05, 10.0, 0.0)
        data = logged(states, actions, rewards, 6, (0.5, 0.5))
        found = evaluate(data, TablePolicy(np.tile([0.7, 0.3], (3, 1))), ["MDR"])["MDR"]
        rejected += "markov_failed" in {reason.code for reason in found.verdict.reasons}
    assert rejected <= 40 * ALPHA + 4 * np.sqrt(40 * ALPHA * (1 - ALPHA))


def test_a_model_without_support_is_not_green() -> None:
    """The recorded policy always takes action 0, the target always action 1."""
    rng = np.random.default_rng(0)
    states, actions = rng.integers(3, size=300), np.zeros(300, dtype=np.int64)
    data = logged(states, actions, rng.normal(size=300), 3, (1.0, 0.0))
    target = TablePolicy(np.tile([0.0, 1.0], (3, 1)))
    for names, colour in ((["DM", "MDR", "NFIS"], "red"), (["DM", "MDR"], "amber")):
        found = evaluate(data, target, names)
        assert [found[name].verdict.colour for name in ("DM", "MDR")] == [colour] * 2
        assert "an action that no " in str(found["DM"].verdict)


# Whatever the model.


@pytest.mark.parametrize("bias", [0.0, 0.7, 2.0, 6.0])
def test_the_interval_whatever_the_model_covers_at_any_bias(bias: float) -> None:
    """A normal estimate with error 1, and a guess with error .5: 95 % within 4 standard errors."""
    rng, n = np.random.default_rng(int(10 * bias)), 4000
    values, guesses = rng.normal(0.0, 1.0, n), rng.normal(bias, 0.5, n)
    found = [
        whatever_bias(Interval(v - 1.96, v + 1.96, 0.95, "ess-t"), v, g)
        for v, g in zip(values, guesses, strict=True)
    ]
    assert np.mean([0.0 in i for i in found]) == pytest.approx(0.95, abs=4 * 0.0035)
    width = np.mean([i.high - i.low for i in found]) / (2 * 1.96)
    assert 0.86 < width < 1.10
    alone = whatever_bias(Interval(-1.96, 1.96, 0.95, "ess-t"), 0.0, math.nan)
    assert (alone.low, alone.high) == (-1.96, 1.96)


def test_a_guess_loses_what_it_shares_with_the_estimate() -> None:
    rng, nobody = np.random.default_rng(0), np.zeros(500, dtype=np.int64)
    psi, other = rng.normal(size=(2, 500))
    psi -= psi.mean()
    other -= other.mean() + (other @ psi) / (psi @ psi) * psi  # uncorrelated
    value = uncorrelated((1.5, 0.4 * psi + other), (1.0, psi), nobody)
    assert value == pytest.approx((1.5 - 0.4) / 0.6, rel=1e-9)
    assert math.isnan(uncorrelated((1.5, psi), (1.0, psi), nobody))


def test_an_unconfirmed_model_is_left_out_of_decisions() -> None:
    """Long episodes: auto rests on the model, and the weights can hardly confirm it."""
    setup = ring(np.random.default_rng(11), 1, states=10, horizon=200)
    data = setup.simulate(30, np.random.default_rng(0))
    auto, plain = evaluate(data, setup.policy, ["auto", "NFIS"]).values()
    assert auto.report["s"] > 0.5
    assert auto.model_free is not None
    assert "by_model" in {reason.code for reason in auto.verdict.reasons}
    assert auto.decisive.value == plain.value
    assert auto.decisive.interval == auto.model_free
    wide = auto.model_free.high - auto.model_free.low
    assert wide > 2 * (auto.interval.high - auto.interval.low)
    assert 0.0 < auto.breakdown < wide
    assert plain.breakdown == math.inf
    assert plain.decisive is plain
