"""The compiled passes against plain loops: extreme numbers, cuts into pieces, one-step data."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import (
    Compute,
    arrays,
    evaluate,
    evaluate_log_probs,
    kernels,
    leave_one_policy_out,
    rank,
)
from ope_gym.arrays import offsets_of
from ope_gym.estimators import run as engine
from ope_gym.estimators.reductions import Column, Weighted, pieces
from ope_gym.estimators.weighted import StepSums
from ope_gym.inference import conclude, outcomes
from ope_gym.inference.diagnostics import _largest, weight_diagnostics
from ope_gym.inference.errors import spread_of
from ope_gym.inference.outcomes import tally
from ope_gym.verdict import Reason
from ope_gym.weights import formula
from ope_gym.weights.formula import log_weights
from ope_gym.weights.propensities import StepRatios
from tests import reference
from tests.builders import recorded
from tests.reference import Data


def logged(lengths: list[int], behaviours: int, seed: int = 0, spread: float = 0.1) -> Data:
    """Two-action policies near each other: probabilities .5 and a little more or less."""
    rng, offsets = np.random.default_rng(seed), offsets_of(lengths)
    shape = (behaviours + 1, int(offsets[-1]))
    logs = -np.log1p(np.exp(spread * rng.standard_normal(shape)))
    ids = np.arange(len(lengths)) % behaviours
    return Data(logs[0], logs[1:], ids, rng.standard_normal(shape[1]), offsets)


def fused(data: Data) -> NDArray[np.float64]:
    found = log_weights(
        data.target_log_probs,
        data.behaviour_log_probs,
        data.behaviour_ids,
        data.offsets,
        ["fused"],
    )
    return found["fused"]


def wanted(data: Data) -> list[float]:
    return [x for row in reference.log_weights("fused", data) for x in row]


@pytest.mark.parametrize("behaviours", [1, 3, 6])
@pytest.mark.parametrize("lengths", [[2000, 2000, 1, 300], [1] * 40, [3, 1, 2, 700, 255, 1, 2, 4]])
def test_mixtures_of_prefixes_are_those_of_plain_loops(lengths: list[int], behaviours: int) -> None:
    data = logged([*lengths, *[5] * behaviours], behaviours)
    np.testing.assert_allclose(fused(data), wanted(data), rtol=0, atol=1e-12)


@pytest.mark.parametrize("at", [0, 3, 9])
def test_mixtures_with_actions_that_others_never_take_or_hardly_ever(at: int) -> None:
    data = logged([10, 10, 600, 2, 1, 1], 3)
    logs = data.behaviour_log_probs.copy()
    logs[1, [at, 10 + at, 300]] = -np.inf  # never; episodes 1 and 4 are of behaviour 1
    logs[1, 10 + at] = math.log(1e-300)
    logs[2, 21:25] = math.log(1e-300)  # and beyond the range of floats together
    data = data._replace(behaviour_log_probs=logs)
    got, want = fused(data), np.array(wanted(data))
    assert np.isfinite(want).all()
    size = np.maximum(1.0, np.abs(want))  # log P itself is up to 2,800 here
    assert (np.abs(got - want) / size).max() < 1e-12
    for name in ("FIS", "NFIS"):
        found = evaluate_log_probs(*data, estimators=[name])[name]
        assert found.value == pytest.approx(reference.estimate(name, data).value, rel=1e-12)


def test_a_behaviour_far_above_the_own_one_is_not_cut_off() -> None:
    data = logged([400, 400], 2)
    logs = data.behaviour_log_probs.copy()
    logs[0, :300] = math.log(1e-200)  # the own one of episode 0: exp(138,000) below the other
    data = data._replace(behaviour_log_probs=logs)
    rounding = 1e-15 * 138_000  # of the own prefix, which is taken away and added again
    np.testing.assert_allclose(fused(data), by_the_mixture(data), rtol=0, atol=rounding)


@pytest.mark.parametrize("far", [1, 4])
def test_sums_that_underflow_or_overflow_are_done_again(far: int) -> None:
    """Each step is likely under one behaviour alone, of which the kernel looks at some first."""
    data = logged([100, 1, 100, 30, 7, 2, 1], 7)
    logs = data.behaviour_log_probs.copy()
    rng = np.random.default_rng(1)
    logs += math.log(1e-100) * (rng.integers(7, size=logs.shape[1]) != np.arange(7)[:, None])
    logs[far, :60] = -0.1
    data = data._replace(behaviour_log_probs=logs)
    size = np.maximum(1.0, np.abs(by_the_mixture(data)))
    assert (np.abs(fused(data) - by_the_mixture(data)) / size).max() < 1e-12


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_long_trajectories_of_policies_that_differ(spread: float) -> None:
    """At the end the likeliest behaviour is up to exp(20,000) times as likely as the own one."""
    data = logged([30, 3000, 2100], 3, spread=spread)
    rounding = -1e-15 * float(data.behaviour_log_probs.sum(axis=1).min())  # of the reference
    np.testing.assert_allclose(fused(data), by_the_mixture(data), rtol=0, atol=rounding)


@pytest.mark.parametrize("behaviours", [1, 3, 6])
def test_many_single_steps_are_weighed_like_any_others(
    behaviours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = logged([1] * 300, behaviours)
    logs = data.behaviour_log_probs
    logs[:, 7] = math.log(1e-300) - 100.0  # below the smallest float
    if behaviours > 1:
        logs[1, 6] = -np.inf  # recorded by another
    usual = fused(data)
    monkeypatch.setattr(formula, "_THREADS", 0)
    arguments = (data.target_log_probs, logs, data.behaviour_ids, data.offsets)
    both = log_weights(*arguments, ["fused", "basic"])
    np.testing.assert_allclose(both["fused"], usual, rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(both["basic"], log_weights(*arguments, ["basic"])["basic"])
    for value in (np.nan, -np.inf, 0.1):
        logs[11 % behaviours, 11] = value
        with pytest.raises(ValueError, match="at episode 11, step 0"):
            fused(data)


def test_threads_keep_the_order_and_raise_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "cores", lambda: 4)
    assert arrays.in_threads(lambda x: x * x, range(50)) == [x * x for x in range(50)]
    assert arrays.in_threads(lambda x: x, []) == []
    seen: list[int] = []

    def fail(x: int) -> None:
        seen.append(x)
        if x >= 3:
            raise ValueError(f"item {x}")

    with pytest.raises(ValueError, match="item 3"):
        arrays.in_threads(fail, range(1000))
    assert len(seen) < 1000


def by_the_mixture(data: Data) -> NDArray[np.float64]:
    """log P_e - log mixture, where the reference takes the own prefix away and adds it again."""
    rho = np.bincount(data.behaviour_ids) / data.behaviour_ids.size
    target = [
        reference.prefix_sums(row) for row in reference.rows(data.target_log_probs, data.offsets)
    ]
    prefixes = [
        [reference.prefix_sums(row) for row in reference.rows(column, data.offsets)]
        for column in data.behaviour_log_probs
    ]
    found = [
        target[i][t]
        - reference.log_sum_exp([math.log(r) + p[i][t] for r, p in zip(rho, prefixes, strict=True)])
        for i in range(len(target))
        for t in range(len(target[i]))
    ]
    return np.array(found)


@pytest.mark.parametrize("gamma", [1.0, 0.97])
@pytest.mark.parametrize("lengths", [[1] * 500, list(range(1, 40))])
def test_pieces_in_threads_give_the_sums_of_one_chunk(
    lengths: list[int], gamma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = logged(lengths, 4)
    names = ["FIS", "NFIS", "BCIS", "NBIS"]
    whole = evaluate_log_probs(*data, estimators=names, gamma=gamma)
    monkeypatch.setattr(engine, "_PIECE", 37)
    cut = evaluate_log_probs(*data, estimators=names, gamma=gamma)
    for name in names:
        a, b = whole[name], cut[name]
        assert a.value == pytest.approx(b.value, rel=1e-13)
        assert a.standard_error == pytest.approx(b.standard_error, rel=1e-12)
        np.testing.assert_allclose(a.influence, b.influence, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(a.diagnostics.ess_curve, b.diagnostics.ess_curve, rtol=1e-12)


def test_pieces_hold_every_trajectory_once() -> None:
    data = logged([5, 1, 90, 2, 2, 40], 2)
    chunk = Weighted(data.offsets, data.rewards, {"fused": fused(data)}, first=3)
    cut = pieces(chunk, 20)
    assert len(cut) > 2
    assert [piece.first for piece in cut] == [
        3 + sum(p.offsets.size - 1 for p in cut[:i]) for i in range(len(cut))
    ]
    np.testing.assert_array_equal(np.concatenate([p.rewards for p in cut]), data.rewards)
    lengths = np.concatenate([np.diff(p.offsets) for p in cut])
    np.testing.assert_array_equal(lengths, np.diff(data.offsets))


@pytest.mark.parametrize("cap", [None, 1.0])
def test_one_step_sums_are_those_of_the_general_loop(cap: float | None) -> None:
    """A second step that pays nothing, and changes no weight, takes the other branch."""
    rng = np.random.default_rng(3)
    log_w, rewards = rng.standard_normal(200), rng.standard_normal(200)
    log_w[::7] = -np.inf
    one = Weighted(np.arange(201), rewards, {"fused": log_w})
    paid = np.stack([rewards, np.zeros(200)], axis=1).ravel()
    two = Weighted(np.arange(201) * 2, paid, {"fused": np.repeat(log_w, 2)})
    request = StepSums(Column("fused", cap), 1.0)
    a, b = (request.total(request.part(chunk)) for chunk in (one, two))
    np.testing.assert_allclose(a.columns.sums[:, 0], b.columns.sums[:, 0], rtol=1e-14)
    np.testing.assert_allclose(a.psi, b.psi, rtol=1e-14)
    np.testing.assert_array_equal(a.weights.log_last, b.weights.log_last)
    assert a.weights.capped_share == b.weights.capped_share


def test_ratios_of_steps_are_summed_where_the_weight_before_is_not_zero() -> None:
    rng = np.random.default_rng(4)
    for lengths in ([1] * 30, [4, 1, 7, 2]):
        offsets = offsets_of(lengths)
        log_w = rng.standard_normal(int(offsets[-1]))
        log_w[[2, 5]] = -np.inf
        rows = reference.rows(log_w, offsets)
        before = [[0.0, *row[:-1]] for row in rows]
        pairs = [
            p for row, old in zip(rows, before, strict=True) for p in zip(row, old, strict=True)
        ]
        ratios = [math.exp(new - old) for new, old in pairs if old > -math.inf]
        got = StepRatios("fused").part(Weighted(offsets, log_w, {"fused": log_w}))
        assert got.steps == len(ratios)
        assert math.exp(got.log_top) == pytest.approx(max(ratios), rel=1e-14)
        assert got.total == pytest.approx(math.fsum(r - 1 for r in ratios), rel=1e-12)
        assert got.square == pytest.approx(math.fsum((r - 1) ** 2 for r in ratios), rel=1e-12)


def test_rewards_are_summed_in_one_pass() -> None:
    rng, offsets = np.random.default_rng(5), offsets_of([3, 1, 5])
    rewards = rng.standard_normal(9)
    rows = reference.rows(rewards, offsets)
    for gamma in (1.0, 0.5, 0.0):
        returns, discounted, sums = tally(rewards, offsets, gamma)
        np.testing.assert_allclose(returns, [math.fsum(row) for row in rows], rtol=1e-14)
        want = [math.fsum(gamma**t * r for t, r in enumerate(row)) for row in rows]
        np.testing.assert_allclose(discounted, want, rtol=1e-14)
        assert (sums.low, sums.high, sums.steps) == (rewards.min(), rewards.max(), 6)
        assert sums.running == pytest.approx(math.fsum(r for row in rows for r in row[:-1]))


def test_a_majority_of_the_weight_is_found_wherever_it_is() -> None:
    rng = np.random.default_rng(6)
    found = 0
    for _ in range(100):
        values = rng.integers(4, size=19) + 1e-9 * rng.random(19)
        values[rng.random(19) < 0.3] = 2.0
        weights = rng.random(19)
        shares = [weights[values.round() == v].sum() / weights.sum() for v in range(4)]
        got = outcomes.majority_share(values, weights, 1e-6)
        if max(shares) > 0.5:
            found += 1
            assert got == pytest.approx(max(shares), rel=1e-14)
        else:
            assert got <= 0.5 + 1e-12
    assert 20 < found < 80
    assert np.isnan(outcomes.majority_share(np.ones(9), np.zeros(9), 1e-6))


def test_the_deviation_of_a_return_is_between_that_of_the_weights_and_that_inside_strata() -> None:
    rng = np.random.default_rng(10)
    returns, weights = rng.standard_normal(90) + 1e3, rng.random(90)
    strata = rng.integers(3, size=90)
    seen = outcomes.Outcomes(returns, (0.0, 1e3), (0.0, 1e3), False, 1e3)
    whole = seen.deviation(weights, strata)
    share = weights / weights.sum()
    size = 1.0 / np.sum(share**2)
    apart = np.sum(share * (returns - share @ returns) ** 2) * size / (size - 1.0)
    inside = sum(np.sum((x - x.mean()) ** 2) for x in (returns[strata == k] for k in range(3))) / 87
    want = np.sqrt((size * apart + 5.0 * inside) / (size + 5.0))
    assert whole == pytest.approx(want, rel=1e-10)


def test_the_deviation_of_equal_returns_is_no_rounding() -> None:
    """Else it decides the colour: 1e-30 fresh episodes are red, and an unknown number is not."""
    rng = np.random.default_rng(0)
    returns = np.full(300, 0.1 + 0.2)
    seen = outcomes.Outcomes(returns, (0.0, 1.0), (0.0, 1.0), False, 0.3)
    weights, strata = rng.random((5, 300)), rng.integers(40, size=300)
    assert [seen.deviation(w, strata) for w in weights] == [0.0] * 5


def test_the_error_of_the_mean_weight_is_made_where_it_could_matter() -> None:
    calm = evaluate_log_probs(*logged([1] * 300, 3), estimators=["FIS"])["FIS"].diagnostics
    assert "mean_weight_error" not in vars(calm)
    data = logged([1] * 300, 3)
    data.target_log_probs[:] -= 1.0  # most of what the target does is missing
    found = evaluate_log_probs(*data, estimators=["FIS"])["FIS"]
    assert found.diagnostics.mean_weight_error < 0.2
    assert "the data miss much" in str(found.verdict)


def test_log_ratios_are_summed_as_exactly_as_floats_can() -> None:
    data = logged([3000, 1, 40], 2, spread=1.0)
    data.target_log_probs[3010] = -np.inf
    own = np.repeat(data.behaviour_ids, np.diff(data.offsets))
    ratios = data.target_log_probs - data.behaviour_log_probs[own, np.arange(own.size)]
    want = [
        math.fsum(row[: t + 1])
        for row in reference.rows(ratios, data.offsets)
        for t in range(len(row))
    ]
    got = log_weights(*data[:3], data.offsets, ["basic"])["basic"]
    np.testing.assert_allclose(got, want, rtol=1e-15, atol=1e-15)


def test_the_largest_values_are_the_largest() -> None:
    rng = np.random.default_rng(7)
    sets: dict[str, Any] = {
        "random": rng.standard_normal(100_000),
        "sorted": np.arange(100_000.0),
        "equal": np.ones(50_000),
        "few": rng.standard_normal(30),
        "hidden": np.where(np.arange(100_000) % 6, 2.0, 0.0),  # none of those that suggest
    }
    for values in sets.values():
        for size in (1, 6, values.size // 5):
            np.testing.assert_array_equal(np.sort(_largest(values, size)), np.sort(values)[-size:])


def test_spread_over_one_stratum_is_that_of_zeros() -> None:
    values = np.random.default_rng(8).standard_normal(40)
    assert spread_of(values) == spread_of(values, np.zeros(40, dtype=np.int64))


# --- the values alone -----------------------------------------------------------------------


def test_the_value_alone_is_the_value_of_every_estimator(tmp_path: Path) -> None:
    data = recorded(4)
    every: dict[str, Any] = {"estimators": "all", "q_model": "linear", "gamma": 0.9}
    usual = evaluate(data.trajectories, data.target, **every)
    alone = evaluate(data.trajectories, data.target, interval=None, **every)
    assert list(usual) == list(alone)
    for name, estimate in alone.items():
        assert estimate.value == usual[name].value
        assert math.isnan(estimate.standard_error)
        assert math.isnan(estimate.interval.low)
        assert estimate.interval.method == "none"
        got, want = estimate.diagnostics.to_dict(), usual[name].diagnostics.to_dict()
        assert {**got, "influence_share": 0.0} == {**want, "influence_share": 0.0}
        assert Reason("weights_alone") in estimate.verdict.notes
    path = tmp_path / "run.ope"
    data.trajectories.save(path)
    in_blocks = Compute(block_steps=8)
    blocks = evaluate(path, data.target, ["FIS", "NFIS"], interval=None, compute=in_blocks)
    for name, estimate in blocks.items():
        whole = evaluate(data.trajectories, data.target, name)[name].value
        assert estimate.value == pytest.approx(whole, rel=1e-12)


def test_the_value_alone_asks_for_no_second_pass_and_judges_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = logged([6] * 50, 3)
    made: list[Any] = []

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return weight_diagnostics(*arguments)

    monkeypatch.setattr(conclude, "weight_diagnostics", counted)
    monkeypatch.setattr(kernels, "segment_influence", None)
    found = evaluate_log_probs(*data, estimators=["NFIS", "FIS"], interval=None)
    assert found["NFIS"].value > -np.inf
    assert not made
    again = pickle.loads(pickle.dumps(found))
    assert found["NFIS"].verdict.colour == "green"
    assert found["NFIS"].diagnostics.ess > 40
    assert len(made) == 1
    assert again["NFIS"].verdict == found["NFIS"].verdict
    assert "(no error was asked for)" in found.headline
    assert "std.err" not in str(found)
    with pytest.raises(AttributeError, match="colour"):
        getattr(found["FIS"], "colour")  # noqa: B009, not one that mypy may know
    with pytest.raises(ValueError, match="interval=None, for its value alone"):
        found.difference(found)


def test_what_compares_by_errors_refuses_values_alone() -> None:
    data = recorded(4)
    with pytest.raises(ValueError, match="interval is None, but rank compares"):
        rank(data.trajectories, [0, 1], interval=None)
    with pytest.raises(ValueError, match="interval is None, but leave_one_policy_out compares"):
        leave_one_policy_out(data.trajectories, interval=None)


def test_wrong_propensities_are_found_by_the_weights_that_are_used() -> None:
    data = logged([20] * 100, 2, spread=1.0)
    wrong = data._replace(target_log_probs=data.target_log_probs + 0.0)
    wrong.behaviour_log_probs[0] -= 0.7  # half of what it was
    for name in ("BIS", "FIS", "OUIS"):
        (found,) = evaluate_log_probs(*wrong, estimators=[name]).values()
        assert "look wrongly recorded" in str(found.verdict), name
