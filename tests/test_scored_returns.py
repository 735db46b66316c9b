"""The distribution of returns with a q model: a problem in which the last step pays h(G)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ope_gym import Compute, Trajectories, distribution, evaluate, fit_behaviour
from ope_gym.analysis.distribution import rank_by
from ope_gym.analysis.scored_returns import ScoredReturns, blind
from ope_gym.cli import main
from ope_gym.policies import DiagonalGaussian, FinitePolicy, LinearSigmoid
from studies.distribution.study import true_returns
from studies.harness.small_grid import grid
from tests.builders import recorded
from tests.test_distribution import whole_population

OPTIONS = {"origin": None, "q_model": "default", "level": 0.95, "seed": 0}


def scored(data: Trajectories, target: object, gamma: float = 1.0) -> ScoredReturns:
    weighted = distribution(data, target, gamma=gamma).weighted
    return ScoredReturns.of(data, target, gamma, weighted, **OPTIONS)  # type: ignore[arg-type]


def test_the_return_so_far_stands_beside_the_observation() -> None:
    policy = LinearSigmoid(np.array([1.0]))
    x, actions = np.arange(5.0)[:, None], np.array([0, 1, 1, 0, 1])
    data = Trajectories.from_arrays(
        x,
        actions,
        np.array([1.0, 4.0, -2.0, 8.0, 3.0]),
        policy.log_prob(x, actions),
        offsets=np.array([0, 3, 5]),
        policies=[policy],
        policy_ids=0,
        terminated=True,
    )
    found = scored(data, LinearSigmoid(np.array([0.5])), gamma=0.5)
    seen, so_far = found.data.observations
    assert seen is data.observations
    assert so_far.tolist() == [0.0, 1.0, 3.0, 0.0, 8.0]


def test_the_policies_do_not_see_it() -> None:
    policy = LinearSigmoid(np.array([1.0, -1.0]))
    x, extra = np.random.default_rng(0).normal(size=(7, 2)), np.full(7, np.nan)
    one = blind(policy)
    assert isinstance(one, FinitePolicy)
    assert one == blind(LinearSigmoid(np.array([1.0, -1.0])))
    assert one.probs((x, extra)).tolist() == policy.probs(x).tolist()
    actions = one.sample((x, extra), np.random.default_rng(1))
    assert actions.tolist() == policy.sample(x, np.random.default_rng(1)).tolist()
    assert one.log_prob((x, extra), actions).tolist() == policy.log_prob(x, actions).tolist()
    normal = DiagonalGaussian(np.zeros((1, 2)), np.zeros(1), np.zeros(1))
    assert not isinstance(blind(normal), FinitePolicy)


def test_the_weights_are_those_of_the_problem_itself() -> None:
    found = recorded(3, (30, 25, 28), horizon=4)
    one = scored(found.trajectories, found.target)
    mean = one.estimate(np.sin(one.weighted.returns))
    assert mean is not None
    plain = evaluate(found.trajectories, found.target, "NFIS")["NFIS"]
    assert_array_equal(mean.diagnostics.log_last, plain.diagnostics.log_last)
    assert mean.sample.regime == plain.sample.regime


def test_in_the_limit_the_numbers_are_those_of_the_target() -> None:
    """Every path as often as expected: the weights are right, and the model is nearly so.

    A quadratic of the return so far is not the probability, and auto takes a model that is off by
    less than can be seen: within one standard error.
    """
    data, target, returns, chance = whole_population((1024, 2048))
    found = distribution(data, target, q_model="default")
    mean = float(chance @ returns)
    exact = {
        found.mean(): mean,
        found.variance(): float(chance @ (returns - mean) ** 2),
        **{found.below(x): float(chance[returns < x].sum()) for x in (0.5, 1.0, 2.5)},
    }
    for number, truth in exact.items():
        error = (number.interval.high - number.interval.low) / 4
        assert number.value == pytest.approx(truth, abs=error), number.name
    plain = distribution(data, target)
    for level in (0.2, 0.5, 0.9):
        assert found.quantile(level).value == plain.quantile(level).value


def test_numbers_are_more_accurate_and_their_intervals_hold() -> None:
    """30 data sets of a small MDP; 3 standard errors below 95 % of 90 intervals is 88 %."""
    regime = grid(9)[8]
    truth = true_returns(regime, 50_000)
    at = np.quantile(truth, [0.5, 0.9])
    exact = [float(np.mean(truth < x)) for x in at] + [float(truth.std())]
    rng = np.random.default_rng(4)
    errors, held = [], []
    for _ in range(30):
        data, target, _ = regime.simulate(rng)
        pair = [distribution(data, target, q_model=model) for model in (None, "default")]
        numbers = [[*(one.below(x) for x in at), one.deviation()] for one in pair]
        errors.append([[q.value - t for q, t in zip(row, exact, strict=True)] for row in numbers])
        held += [t in q.interval for q, t in zip(numbers[1], exact, strict=True)]
    squares = np.mean(np.square(errors), axis=0)
    assert np.all(squares[1] < squares[0])
    assert np.mean(held) >= 0.88


def test_every_number_agrees_with_its_own_interval() -> None:
    found = recorded(7, (40, 30), horizon=3)
    result = distribution(found.trajectories, found.target, q_model="default", gamma=0.9)
    for q in (*result.quantities(below=[0.0, 1.0]), result.variance()):
        assert q.interval.low <= q.value <= q.interval.high, q
    for x in (-0.5, 0.0, 0.5):
        low, high = result.below(x).interval.low, result.below(x).interval.high
        assert 0.0 <= low <= high <= 1.0
    auto = evaluate(found.trajectories, found.target, "auto", gamma=0.9)["auto"]
    assert result.mean().value == auto.value
    assert "by auto, with a q model" in str(result)


def test_where_episodes_agree_the_weights_have_to_do() -> None:
    found = recorded(7, (20, 20), horizon=3)
    plain = distribution(found.trajectories, found.target)
    result = distribution(found.trajectories, found.target, q_model="default")
    assert result.below(-99.0) == plain.below(-99.0)  # nothing was ever so low
    scores = ScoredReturns.of(found.trajectories, found.target, 1.0, plain.weighted, **OPTIONS)
    assert scores.estimate(np.ones(40)) is None
    flat = Trajectories.from_arrays(
        found.trajectories.observations,
        found.trajectories.actions,
        np.zeros(found.trajectories.n_steps),
        found.trajectories.log_probs,
        offsets=found.trajectories.offsets,
        policies=found.trajectories.policies,
        policy_ids=found.trajectories.policy_ids,
        terminated=True,
    )
    same = distribution(flat, found.target, q_model="default")
    assert same.cvar().value == 0.0  # a majority in the tail
    assert same.deviation().value == 0.0


def test_continuous_actions_are_taken() -> None:
    rng = np.random.default_rng(0)
    *policies, target = (
        DiagonalGaussian(np.array([[w]]), np.zeros(1), np.array([-0.5])) for w in (0.0, 0.4, 0.3)
    )
    x = rng.normal(size=(120, 1))
    ids = np.repeat([0, 1], 60)
    actions = np.where(ids[:, None] == 0, policies[0].sample(x, rng), policies[1].sample(x, rng))
    data = Trajectories.from_arrays(
        x,
        actions,
        -((actions - x)[:, 0] ** 2),
        np.concatenate([policies[k].log_prob(x[ids == k], actions[ids == k]) for k in (0, 1)]),
        offsets=np.arange(0, 121, 3),
        policies=policies,
        policy_ids=ids,
        terminated=True,
    )
    result = distribution(data, target, q_model="default")
    low = result.below(float(np.median(data.returns())))
    assert 0.0 < low.value < 1.0
    assert low.value != distribution(data, target).below(float(np.median(data.returns()))).value


def test_errors_say_what_to_leave_out(tmp_path: Path) -> None:
    found = recorded(4, (9, 11), horizon=3)
    data, target = found.trajectories, found.target
    for options in ({"weights": "basic"}, {"interval": "percentile"}):
        with pytest.raises(ValueError, match="q_model goes with fused weights and ess-t"):
            distribution(data, target, q_model="default", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q_model is 'linar'"):
        distribution(data, target, q_model="linar")
    fitted = fit_behaviour(data).trajectories
    with pytest.raises(ValueError, match="propensities are estimated: leave q_model out"):
        distribution(fitted, target, q_model="default")
    path = tmp_path / "episodes.ope"
    data.save(path)
    with pytest.raises(ValueError, match="q_model needs all episodes in memory"):
        rank_by(path, [target], q_model="default", compute=Compute(block_steps=10))


def test_rankings_and_the_command_take_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = recorded(2, (40, 30), horizon=3)
    ranked = rank_by(found.trajectories, {"a": 0, "b": 1}, "cvar", share=0.4, q_model="linear")
    one = distribution(found.trajectories, 0, q_model="linear")
    assert ranked["a"] == one.cvar(0.4)
    path, told = tmp_path / "episodes.ope", tmp_path / "told.json"
    found.trajectories.save(path)
    flags = ["--target", "0", "--q-model", "linear", "--below", "0.5", "--json", str(told)]
    assert main(["distribution", str(path), *flags]) == 0
    assert "by auto, with a q model" in capsys.readouterr().out
    number = json.loads(told.read_text())["quantities"]["P(return < 0.5)"]["value"]
    assert number == one.below(0.5).value
    assert not math.isclose(number, distribution(found.trajectories, 0).below(0.5).value)
