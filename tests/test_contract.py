"""One battery over the table of estimators: a new one is tested by existing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ope_gym import (
    ESTIMATORS,
    Betting,
    Bootstrap,
    Compute,
    Evaluation,
    Weighting,
    evaluate,
    evaluate_log_probs,
)
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.run import METHODS
from ope_gym.estimators.table import WEIGHTED, Composition
from ope_gym.inference.intervals import KINDS
from ope_gym.models import Baseline, LinearQ
from ope_gym.weights import formula
from tests import reference, small_mdps
from tests.builders import (
    Recorded,
    Table,
    assert_same,
    buffer_of,
    draw,
    one_step,
    pick,
    plain_options,
    recorded,
    value_of,
)
from tests.reference import Data

ALL = list(WEIGHTED)
PLAIN = [name for name in ALL if not ESTIMATORS[name].normalised]
NORMALISED = [name for name in ALL if ESTIMATORS[name].normalised]
CAPPED = [name for name in ALL if ESTIMATORS[name].capped]

every = pytest.mark.parametrize("name", ALL)
of_all = pytest.mark.parametrize("name", ESTIMATORS)  # EA and those with a q model, too
normalised = pytest.mark.parametrize("name", NORMALISED)
plain = pytest.mark.parametrize("name", PLAIN)


def both_kinds(seed: int = 0) -> list[Recorded]:
    """Ragged episodes of many steps, and one-step data, on which EA joins by default."""
    return [recorded(seed), recorded(seed, (6, 9), horizon=1)]


def betting(data: Recorded) -> dict[str, Any]:
    return {"reward_range": (-1.0, 2.0), "horizon": data.mdp.horizon}


# --- what every estimator must do -------------------------------------------------------------


@every
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_on_policy_the_value_is_the_mean_discounted_return(name: str, gamma: float) -> None:
    data = recorded(1, (12,))
    acting = Table(data.policies[0])
    got = evaluate(data.trajectories, acting, estimators=name, gamma=gamma)[name]
    returns = data.trajectories.returns(gamma)
    assert got.value == pytest.approx(returns.mean(), rel=1e-12)
    assert got.standard_error == pytest.approx(returns.std(ddof=1) / math.sqrt(12), rel=1e-12)
    np.testing.assert_allclose(got.diagnostics.ess_curve, 12, rtol=1e-12)
    assert got.diagnostics.max_share == pytest.approx(1 / 12)
    assert got.diagnostics.mean_weight == pytest.approx(1)
    assert got.diagnostics.capped_share == 0


@pytest.mark.parametrize("method", list(KINDS))
def test_the_order_of_trajectories_does_not_matter(method: str) -> None:
    for data in both_kinds():
        options: dict[str, Any] = {"interval": method, "gamma": 0.95} | betting(data)
        options["q_model"] = None  # the folds of a fitted one follow the order
        order = np.random.default_rng(3).permutation(len(data.trajectories))
        one = evaluate(data.trajectories, data.target, **plain_options(**options))
        other = evaluate(
            data.trajectories.select(episodes=order), data.target, **plain_options(**options)
        )
        for name in one:
            a, b = one[name], other[name]
            assert a.value == pytest.approx(b.value, rel=1e-12)
            assert a.standard_error == pytest.approx(b.standard_error, rel=1e-12)
            np.testing.assert_allclose(a.influence[order], b.influence, rtol=1e-11, atol=1e-12)
            if method in ("ess-t", "betting"):  # draws follow the order
                assert a.interval.low == pytest.approx(b.interval.low, rel=1e-9)
                assert a.interval.high == pytest.approx(b.interval.high, rel=1e-9)


@every
def test_the_order_of_behaviours_does_not_matter(name: str) -> None:
    data = recorded(2, (4, 3, 7)).arrays
    order = np.array([2, 0, 1])  # new row j is old row order[j]
    swapped = data._replace(
        behaviour_log_probs=data.behaviour_log_probs[order],
        behaviour_ids=np.argsort(order)[data.behaviour_ids],
    )
    one, other = (evaluate_log_probs(*d, estimators=name)[name] for d in (data, swapped))
    assert one.value == pytest.approx(other.value, rel=1e-12)
    assert one.standard_error == pytest.approx(other.standard_error, rel=1e-12)
    shares = one.diagnostics.behaviour_shares[order]
    np.testing.assert_allclose(shares, other.diagnostics.behaviour_shares, rtol=1e-12)


@pytest.mark.parametrize("factor", [3.0, -0.25, 1e-200, 1e200])
@pytest.mark.parametrize("method", ["ess-t", "percentile"])
def test_rewards_scale_everything(method: str, factor: float) -> None:
    for data in both_kinds():
        scaled = buffer_with_rewards(data, data.trajectories.rewards * factor)
        one = evaluate(data.trajectories, data.target, interval=method, gamma=0.9)
        other = evaluate(scaled, data.target, interval=method, gamma=0.9)
        for name in one:
            ends = sorted(factor * x for x in (one[name].interval.low, one[name].interval.high))
            got = (other[name].interval.low, other[name].interval.high)
            assert other[name].value == pytest.approx(factor * one[name].value, rel=1e-11)
            if 1e-100 < abs(factor) < 1e100:  # squares leave the range of floats beyond
                error = abs(factor) * one[name].standard_error
                assert other[name].standard_error == pytest.approx(error, rel=1e-11)
                np.testing.assert_allclose(got, ends, rtol=1e-9, atol=1e-12)


def buffer_with_rewards(data: Recorded, rewards: NDArray[np.float64]) -> Trajectories:
    old = data.trajectories
    return Trajectories.from_arrays(
        old.observations,
        old.actions,
        rewards,
        old.log_probs,
        offsets=old.offsets,
        policies=old.policies,
        terminated=old.terminated,
        policy_ids=old.policy_ids,
        observation_space=old.observation_space,
        action_space=old.action_space,
        horizon=old.horizon,
    )


@normalised
@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_a_constant_on_all_rewards_shifts_a_normalised_value_by_its_sum(
    name: str, gamma: float
) -> None:
    data = recorded(4, (5, 6), early=False).arrays
    shift = 7.0
    moved = value_of(name, data._replace(rewards=data.rewards + shift), gamma=gamma, cap=1.5)
    total = shift * sum(gamma**t for t in range(6))
    assert moved - value_of(name, data, gamma=gamma, cap=1.5) == pytest.approx(total, rel=1e-12)


def test_splitting_and_merging_changes_nothing() -> None:
    for data in both_kinds(6):
        whole = data.trajectories
        order = np.argsort(np.arange(len(whole)) % 3, kind="stable")
        parts = [whole.select(episodes=order[k::2]) for k in range(2)]
        rejoined = parts[0].merge(parts[1])
        extended = TrajectoryBuffer()
        for part in parts:
            extended.extend(part)
        shuffled = whole.select(episodes=np.concatenate([order[0::2], order[1::2]]))
        options: dict[str, Any] = {"gamma": 0.9, "interval": Bootstrap(20)}
        options["q_model"] = None  # the folds of a fitted one follow the order
        want = evaluate(shuffled, data.target, **options)
        assert_same(evaluate(rejoined, data.target, **options), want)
        assert_same(evaluate(extended, data.target, **options), want)
        for name in want:
            got = evaluate(whole, data.target, estimators=name, gamma=0.9, q_model=None)[name]
            whole_value = got.value
            assert want[name].value == pytest.approx(whole_value, rel=1e-12)


@pytest.mark.parametrize("method", list(KINDS))
def test_both_doors_give_the_same_numbers(method: str) -> None:
    data = recorded(9)
    options = plain_options(gamma=0.97, cap=1.3, interval=method, **betting(data))
    assert_same(
        evaluate(data.trajectories, data.target, estimators=ALL, **options),
        evaluate_log_probs(*data.arrays, estimators=ALL, **options),
    )


@pytest.mark.parametrize("mean", [0.5, 0.0])
def test_both_doors_take_the_same_reward_model(mean: float) -> None:
    data = recorded(10)
    steps = data.trajectories.n_steps
    model = (np.full(steps, mean), np.linspace(0, 2, steps))
    options: dict[str, Any] = plain_options(estimators=["OUIS", "NOUIS"], reward_model=model)
    one = evaluate(data.trajectories, data.target, **options)
    assert_same(one, evaluate_log_probs(*data.arrays, **options))
    if mean == 0:  # a reward without a mean is all noise: f(p) = p
        fused = evaluate(data.trajectories, data.target, estimators=["FIS", "NFIS"])
        for name, other in (("OUIS", "FIS"), ("NOUIS", "NFIS")):
            np.testing.assert_allclose(one[name].influence, fused[other].influence, rtol=1e-14)


def test_inputs_may_be_lists_strided_or_of_other_types() -> None:
    data = recorded(11, (4, 5)).arrays
    want = evaluate_log_probs(*data)
    lists = [column.tolist() for column in data]
    assert_same(evaluate_log_probs(*lists), want)
    steps = data.rewards.size
    fortran = np.asfortranarray(data.behaviour_log_probs)
    wide = np.full((4, 2 * steps), 9.0)
    wide[::2, ::2] = data.behaviour_log_probs
    column = np.full(2 * steps, 9.0)
    column[::2] = data.target_log_probs
    for rows in (fortran, wide[::2, ::2]):
        assert not rows.flags.c_contiguous
        strided = data._replace(behaviour_log_probs=rows, target_log_probs=column[::2])
        assert_same(evaluate_log_probs(*strided), want)
    small = data._replace(
        behaviour_ids=data.behaviour_ids.astype(np.uint8), offsets=data.offsets.astype(np.int32)
    )
    assert_same(evaluate_log_probs(*small), want)
    target, table = (column.astype(np.float32) for column in data[:2])
    rounded = data._replace(
        target_log_probs=target.astype(np.float64), behaviour_log_probs=table.astype(np.float64)
    )
    assert_same(evaluate_log_probs(target, table, *data[2:]), evaluate_log_probs(*rounded))
    before = [column.copy() for column in data]
    evaluate_log_probs(*data, interval=Bootstrap(10, "bca"))
    for old, new in zip(before, data, strict=True):
        np.testing.assert_array_equal(old, new)


def heavy(seed: int, *, spread: float = 3.0) -> Data:
    """Five behaviours, 60 episodes of up to 900 steps, weights over hundreds of decades."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 900, size=60)
    steps = int(lengths.sum())
    logs = -rng.exponential(spread, size=(6, steps))
    ids = np.arange(60) % 5
    return Data(logs[0], logs[1:], ids, rng.normal(size=steps), np.cumsum([0, *lengths]))


@pytest.mark.parametrize("spread", [0.02, 3.0, 30.0])
def test_block_size_and_threads_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    data = heavy(12, spread=spread)
    arrays = (data.target_log_probs, data.behaviour_log_probs, data.behaviour_ids, data.offsets)

    def run() -> tuple[dict[str, NDArray[np.float64]], Evaluation]:
        return formula.log_weights(*arrays, formula.SCHEMES), evaluate_log_probs(*data, gamma=0.99)

    monkeypatch.setattr("ope_gym.arrays.cores", lambda: 1)
    log_w, one = run()
    for block, cores in ((1, 1), (1, 4), (5000, 1), (5000, 3)):
        monkeypatch.setattr(formula, "_BLOCK", block)
        monkeypatch.setattr(formula, "_THREADS", 0)
        monkeypatch.setattr("ope_gym.arrays.cores", lambda cores=cores: cores)
        again, other = run()
        for scheme in log_w:  # an episode's weights are its own affair: not a bit may change
            np.testing.assert_array_equal(log_w[scheme], again[scheme], err_msg=scheme)
        assert_same(one, other, rtol=1e-10)
        monkeypatch.setattr("ope_gym.arrays.cores", lambda: 7)
        assert_same(run()[1], other)  # the number of threads never matters


@pytest.mark.parametrize("behaviours", [1, 2, 3, 4, 5, 7, 8, 9])
def test_weights_across_hundreds_of_decades_agree_with_the_reference(behaviours: int) -> None:
    """Any number of behaviours, prefixes so far apart that no common scale holds them."""
    rng = np.random.default_rng(behaviours)
    lengths = rng.integers(1, 200, size=10)
    steps = int(lengths.sum())
    logs = -rng.exponential(60.0, size=(behaviours + 1, steps))
    ids = np.arange(10) % behaviours
    data = Data(logs[0], logs[1:], ids, rng.normal(size=steps), np.cumsum([0, *lengths]))
    arrays = (data.target_log_probs, data.behaviour_log_probs, data.behaviour_ids, data.offsets)
    for scheme, got in formula.log_weights(*arrays, formula.SCHEMES).items():
        want = np.concatenate(reference.log_weights(scheme, data))
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-10, err_msg=scheme)


@every
def test_ten_thousand_steps_do_not_underflow(name: str) -> None:
    """Prefix probabilities around exp(-13,000), weights of a known size."""
    rng = np.random.default_rng(13)
    steps, n = 10_000, 4
    row = np.log(rng.uniform(0.1, 0.5, size=n * steps))
    target = row.copy()
    target[::steps] += np.log([0.5, 1.5, 1.2, 0.8])  # a weight that stays from the first step on
    data = Data(
        target,
        np.stack([row, row]),
        np.array([0, 1, 1, 0]),
        np.ones(n * steps),
        np.arange(n + 1) * steps,
    )
    w = np.minimum([0.5, 1.5, 1.2, 0.8], 1.25 if name in CAPPED else np.inf)
    got = evaluate_log_probs(*data, estimators=name, weighting=Weighting(cap=1.25))[name]
    expected = steps if name in NORMALISED else w.mean() * steps
    assert got.value == pytest.approx(expected, rel=1e-10)
    assert got.diagnostics.ess == pytest.approx(w.sum() ** 2 / (w**2).sum(), rel=1e-10)


@pytest.mark.parametrize("name", ["OUIS", "NOUIS"])
def test_deterministic_prefixes_share_all_the_weight_of_ouis(name: str) -> None:
    """Behaviour 0 is certain for two steps; what else went the same way weighs nothing there."""
    logs = np.log([[1, 1, 0.5], [0.5, 1, 0.5], [1, 1, 0.5]])  # three behaviours of one path
    target = np.log([0.6, 0.5, 0.4])
    data = Data(
        np.tile(target, 3),
        np.tile(logs, 3),
        np.array([0, 1, 2]),
        np.ones(9),
        np.array([0, 3, 6, 9]),
    )
    got = evaluate_log_probs(*data, estimators=name)[name]
    p, f = 0.6 * 0.5 * 0.4, [0.5 / 0.5, 0.25 / 0.75, 0.5 / 0.5]  # third step: f(p) = p / (1 - p)
    last = [p / q * g / (sum(f) / 3) for q, g in zip([0.5, 0.25, 0.5], f, strict=True)]
    w = np.array([[0.9, 0.45, last[0]], [0, 0, last[1]], [0.9, 0.45, last[2]]])
    want = (w.sum(0) / w.sum(0)).sum() if name == "NOUIS" else w.sum() / 3
    assert got.value == pytest.approx(want, rel=1e-13)
    if name == "OUIS":
        np.testing.assert_allclose(got.influence, w.sum(1), rtol=1e-13)


@every
@pytest.mark.parametrize("method", list(KINDS))
def test_all_weights_zero_is_undefined_and_red(name: str, method: str) -> None:
    data = one_step([0, 0, 0, 0], [[0.5] * 4, [0.4] * 4], [0, 0, 1, 1], [1.0, 2.0, 0.5, 0.0])
    got = evaluate_log_probs(
        *data, name, **plain_options(interval=method, reward_range=(0, 2), horizon=1)
    )[name]
    assert math.isnan(got.value)
    assert math.isnan(got.standard_error)
    if method == "betting":  # still true: nothing was learnt
        assert (got.interval.low, got.interval.high) == (0.0, 2.0)
    else:
        assert math.isnan(got.interval.low)
        assert math.isnan(got.interval.high)
    assert got.interval.method == method
    assert got.diagnostics.ess == 0
    assert got.diagnostics.behaviour_shares.tolist() == [0, 0]
    assert got.verdict.colour == "red"
    assert "all weights are 0" in str(got.verdict)
    assert "step 0" in str(got.verdict)


@every
def test_weights_that_become_zero_are_red_and_say_where(name: str) -> None:
    with np.errstate(divide="ignore"):
        target = np.log([0.5, 0.0, 0.5, 0.0])
    data = Data(
        target, np.full((1, 4), np.log(0.5)), np.zeros(2, np.int64), np.ones(4), np.array([0, 2, 4])
    )
    got = evaluate_log_probs(*data, estimators=name)[name]
    assert math.isnan(got.value) if name in NORMALISED else got.value == 1.0
    assert math.isnan(got.interval.low)
    assert got.verdict.colour == "red"
    assert "from step 1 on" in str(got.verdict)
    assert got.diagnostics.ess_curve.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_partial_mixtures_are_used_or_refused(name: str) -> None:
    horizon = 1 if ESTIMATORS[name].method == "average" else 6
    data = recorded(31, (4, 5, 3, 4), horizon=horizon)
    whole = evaluate(
        data.trajectories, data.target, estimators=name, weighting=Weighting(mixture="all")
    )
    if ESTIMATORS[name].method == "adaptive":
        with pytest.raises(ValueError, match=rf"'{name}', which needs .*mixture='all'"):
            evaluate(
                data.trajectories, data.target, estimators=name, weighting=Weighting(mixture=2)
            )
        return
    found = evaluate(
        data.trajectories, data.target, estimators=name, weighting=Weighting(mixture=2)
    )
    against = ESTIMATORS[name].scheme not in ("", "basic")
    assert (found.sample.mixture is not None) == against
    assert (found[name].value != whole[name].value) == against
    assert math.isfinite(found[name].standard_error)


@every
@pytest.mark.parametrize("method", ["ess-t", "percentile", "bca"])
def test_one_trajectory_per_behaviour_has_no_interval(name: str, method: str) -> None:
    data = recorded(15, (1, 1, 1)).arrays
    got = evaluate_log_probs(*data, estimators=name, interval=method)[name]
    assert got.value == pytest.approx(reference.estimate(name, data).value, rel=1e-12)
    assert math.isnan(got.standard_error)
    assert math.isnan(got.interval.low)
    assert got.verdict.colour == "red"
    assert "one trajectory per behaviour" in str(got.verdict)


@every
def test_a_single_trajectory_is_counted_with_a_neighbour(name: str) -> None:
    data = recorded(16, (4, 1, 3)).arrays
    got = evaluate_log_probs(*data, estimators=name)[name]
    joined = np.where(data.behaviour_ids == 1, 0, data.behaviour_ids)
    want = reference.standard_error(list(got.influence), joined)
    assert got.standard_error == pytest.approx(want, rel=1e-12)
    assert math.isfinite(got.interval.low)
    first = recorded(16, (1, 4, 3)).arrays  # nobody stands before the first
    got = evaluate_log_probs(*first, estimators=name)[name]
    joined = np.maximum(first.behaviour_ids, 1)
    want = reference.standard_error(list(got.influence), joined)
    assert got.standard_error == pytest.approx(want, rel=1e-12)


@plain
def test_weights_beyond_floats_are_infinite_and_red(name: str) -> None:
    """Rewards of both signs under weights of exp(900): no number, no warning, and a reason."""
    for rewards in ([1.0, 2.0], [1.0, -1.0]):
        data = Data(
            np.zeros(2),
            np.full((1, 2), -900.0),
            np.zeros(2, np.int64),
            np.array(rewards),
            np.array([0, 1, 2]),
        )
        got = evaluate_log_probs(*data, estimators=name)[name]
        if name in CAPPED:
            assert got.value == pytest.approx(10 * np.mean(rewards))
            assert math.isfinite(got.standard_error)
            continue
        assert not math.isfinite(got.value)
        assert math.isnan(got.interval.low)
        assert got.verdict.colour == "red"
        assert "overflow" in str(got.verdict)


@plain
def test_discounts_undo_weights_beyond_floats(name: str) -> None:
    """Nothing is paid after the first step when gamma is 0, whatever the weights do there."""
    data = Data(
        np.zeros(4),
        np.tile([-1.0, -900.0], (1, 2)),
        np.zeros(2, np.int64),
        np.array([1.0, 5.0, 2.0, -5.0]),
        np.array([0, 2, 4]),
    )
    got = value_of(name, data, gamma=0.0, cap=1e307)
    assert got == pytest.approx(1.5 * math.e)


# --- the table can grow -----------------------------------------------------------------------


def test_a_new_estimator_is_a_line_and_a_new_scheme_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = recorded(17)
    monkeypatch.setitem(ESTIMATORS, "NOUCIS", Composition("optimal", True, True))
    monkeypatch.setitem(ESTIMATORS, "HIS", Composition("halfway"))
    monkeypatch.setitem(formula.SCHEMES, "halfway", lambda prefix: -prefix.mixture / 2)
    got = evaluate(
        data.trajectories, data.target, estimators=["NOUCIS", "HIS"], weighting=Weighting(cap=1.2)
    )
    want = reference.evaluate("optimal", data.arrays, normalised=True, cap=1.2)
    assert got["NOUCIS"].value == pytest.approx(want.value, rel=1e-12)
    basic, fused = (
        np.concatenate(reference.log_weights(s, data.arrays)) for s in ("basic", "fused")
    )
    psi = np.add.reduceat(
        np.exp((basic + fused) / 2) * data.trajectories.rewards, data.trajectories.offsets[:-1]
    )
    np.testing.assert_allclose(got["HIS"].influence, psi, rtol=1e-12)


# --- properties -------------------------------------------------------------------------------


@st.composite
def ragged(draw: st.DrawFn, *, zeros: bool = True, low: float = -3.0) -> Data:
    """Any data: some trajectories of some behaviours, with impossible actions if `zeros`."""
    behaviours = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    steps = sum(lengths)

    def column(values: st.SearchStrategy[Any], size: int = steps) -> NDArray[Any]:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)))

    ids = column(st.integers(0, behaviours - 1), len(lengths))
    finite = st.floats(-6.0, 0.0, width=32)
    other = st.one_of(finite, st.just(-math.inf)) if zeros else finite
    rows = np.stack([column(other) for _ in range(behaviours)])
    rows[np.repeat(ids, lengths), np.arange(steps)] = column(finite)
    rewards = column(st.floats(low, 3.0, width=32))
    return Data(column(other), rows, ids, rewards, np.cumsum([0, *lengths]))


properties = settings(max_examples=40, deadline=None, derandomize=True)
gammas = st.sampled_from([1.0, 0.7, 0.0])


def padded(data: Data) -> NDArray[np.float64]:
    """(n, T) rewards, 0 after the end."""
    rows = reference.rows(data.rewards, data.offsets)
    horizon = max(map(len, rows))
    return np.array([row + [0.0] * (horizon - len(row)) for row in rows])


@properties
@given(data=ragged(), gamma=gammas)
def test_everything_agrees_with_the_reference(data: Data, gamma: float) -> None:
    got = evaluate_log_probs(*data, "paper", gamma=gamma, weighting=Weighting(cap=2.0))
    if gamma == 0:  # only the first step counts, whatever the weights are later
        first = data.offsets[:-1]
        data = Data(
            data.target_log_probs[first],
            data.behaviour_log_probs[:, first],
            data.behaviour_ids,
            data.rewards[first],
            np.arange(first.size + 1),
        )
    for name in reference.ESTIMATORS:
        want = reference.estimate(name, data, gamma=gamma, cap=2.0)
        if all(x == 0 for x in want.ess_curve):
            assert math.isnan(got[name].value)
            continue
        assert got[name].value == pytest.approx(want.value, rel=1e-10, abs=1e-12, nan_ok=True)
        np.testing.assert_allclose(got[name].diagnostics.ess_curve, want.ess_curve, rtol=1e-10)


@properties
@given(data=ragged(), gamma=gammas)
def test_normalised_values_lie_between_the_rewards_of_each_step(data: Data, gamma: float) -> None:
    rewards = padded(data)
    discount = gamma ** np.arange(rewards.shape[1])
    low, high = rewards.min(axis=0) @ discount, rewards.max(axis=0) @ discount
    got = evaluate_log_probs(*data, gamma=gamma, estimators=NORMALISED)
    for name, estimate in got.items():
        if not math.isnan(estimate.value):
            assert low - 1e-12 <= estimate.value <= high + 1e-12, name


@properties
@given(data=ragged(), gamma=gammas)
def test_diagnostics_and_influence_are_consistent(data: Data, gamma: float) -> None:
    n = data.behaviour_ids.size
    for name, e in evaluate_log_probs(*data, gamma=gamma).items():
        d = e.diagnostics
        supported = d.ess_curve[d.ess_curve > 0]
        assert np.all(supported >= 1 - 1e-9), name
        assert np.all(supported <= n + 1e-9)
        assert d.ess == d.ess_curve.min()
        # the first of equal steps, which may differ in their last bits
        assert d.ess_curve[d.ess_step] == pytest.approx(d.ess, rel=1e-9)
        assert np.all(d.ess_curve[: d.ess_step] > d.ess)
        assert 1 / n - 1e-12 <= d.max_share <= 1 + 1e-12
        if d.ess > 0:
            assert d.ess >= 1 / d.max_share - 1e-9
            assert d.behaviour_shares.sum() == pytest.approx(1)
        assert np.all(d.behaviour_shares >= 0)
        assert np.all(
            d.behaviour_ess
            <= np.bincount(data.behaviour_ids, minlength=3)[: d.behaviour_ess.size] + 1e-9
        )
        assert 0 <= d.capped_share <= 1
        if math.isnan(e.value):
            assert e.verdict.colour == "red"
        elif ESTIMATORS[name].normalised:
            scale = 1 + np.abs(e.influence).max()
            assert e.influence.sum() == pytest.approx(0, abs=1e-10 * scale)
        else:
            assert e.influence.mean() == pytest.approx(e.value, rel=1e-12)


@properties
@given(data=ragged(low=0.0), caps=st.lists(st.floats(0.05, 50.0), min_size=2, max_size=4))
def test_a_higher_cap_never_lowers_a_plain_value_of_rewards_above_zero(
    data: Data, caps: list[float]
) -> None:
    for name in (name for name in CAPPED if name in PLAIN):
        uncapped = next(
            other
            for other in ALL
            if ESTIMATORS[other] == Composition(ESTIMATORS[name].scheme, use=ESTIMATORS[other].use)
        )
        top = value_of(uncapped, data)
        values = [value_of(name, data, cap=cap) for cap in sorted(caps)]
        if math.isnan(top):
            assert all(map(math.isnan, values))
            continue
        for lower, higher in zip(values, [*values[1:], top], strict=True):
            assert lower <= higher * (1 + 1e-12)
        assert value_of(name, data, cap=1e12) == pytest.approx(top, rel=1e-12)
        assert value_of(name, data, cap=np.inf) == pytest.approx(top, rel=1e-12)


@properties
@given(data=ragged(zeros=False))
def test_copies_of_all_data_change_no_value_and_shrink_the_error(data: Data) -> None:
    n = data.behaviour_ids.size
    twice = pick(data, np.tile(np.arange(n), 2))
    one = evaluate_log_probs(*data, estimators=ALL)  # the truncation of auto follows n
    other = evaluate_log_probs(*twice, estimators=ALL)
    for name in one:
        same = pytest.approx(one[name].value, rel=1e-10, abs=1e-12, nan_ok=True)
        assert other[name].value == same
        assert other[name].diagnostics.ess == pytest.approx(2 * one[name].diagnostics.ess, rel=1e-9)


def test_an_empirical_average_of_hand_made_data() -> None:
    """EA = sum over contexts of their share times sum_a pi(a|x) mean r, 0 where never sampled."""
    policies = [np.array([[0.5, 0.5], [0.5, 0.5]])]
    target = Table(np.array([[0.25, 0.75], [1.0, 0.0]]))
    steps = [((0,), (0,), 1.0), ((0,), (0,), 3.0), ((0,), (1,), 4.0), ((1,), (1,), 9.0)]
    episodes = [small_mdps.Path(s, a, (r,), 1.0) for s, a, r in steps]
    data = buffer_of(episodes, [0] * 4, policies)
    got = evaluate(data, target, estimators=[*ALL, "EA"])
    assert got["EA"].value == pytest.approx(0.75 * (0.25 * 2 + 0.75 * 4) + 0.25 * 0.0)
    np.testing.assert_allclose(
        got["EA"].influence, [3.5 - 0.375, 3.5 + 0.375, 3.5, 0.0], rtol=1e-14
    )
    assert got["EA"].diagnostics.mean_weight == pytest.approx(0.75)
    assert "25.0 % of the target's actions were never sampled" in str(got["EA"].verdict)


def test_an_empirical_average_without_any_sampled_action_is_undefined() -> None:
    policies = [np.array([[0.5, 0.5]])]
    episodes = [small_mdps.Path((0,), (0,), (r,), 1.0) for r in (1.0, 2.0, 3.0)]
    target = Table(np.array([[0.0, 1.0]]))
    for method in ("ess-t", "percentile", "bca"):
        data = buffer_of(episodes, [0] * 3, policies)
        got = evaluate(data, target, estimators="EA", interval=method)["EA"]
        assert math.isnan(got.value)
        assert math.isnan(got.interval.low)
        assert got.verdict.colour == "red"
        assert "all weights are 0" in str(got.verdict)


# --- what every name of the table must do, whatever it is made of --------------------------------

INTERVALS: dict[str, Any] = {
    "ess-t": "ess-t",
    "percentile": Bootstrap(50),
    "bca": Bootstrap(50, "bca"),
    "betting": Betting((-1.0, 2.0)),
}


def data_for(name: str, seed: int = 0, counts: tuple[int, ...] = (20, 25, 30)) -> Recorded:
    """EA is for one step."""
    return recorded(seed, counts, horizon=1 if name == "EA" else 5, held_out=True)


def ask(name: str, data: Recorded, episodes: Any = None, **options: Any) -> Any:
    chosen = data.trajectories if episodes is None else episodes
    return evaluate(chosen, data.target, estimators=name, **options)[name]


@of_all
def test_the_table_says_how_and_when(name: str) -> None:
    c = ESTIMATORS[name]
    assert c.use
    assert c.method in METHODS


@of_all
@pytest.mark.parametrize("interval", INTERVALS)
def test_value_interval_verdict_and_files(name: str, interval: str) -> None:
    data = data_for(name)
    if interval == "betting" and not ESTIMATORS[name].scheme:
        with pytest.raises(ValueError, match=f"{name!r}.* interval='betting' bounds"):
            ask(name, data, interval=INTERVALS[interval])
        return
    got = ask(name, data, interval=INTERVALS[interval])
    assert math.isfinite(got.value)
    assert got.standard_error > 0
    assert got.interval.low < got.interval.high
    if interval == "ess-t":
        assert got.value in got.interval
    assert got.verdict.colour in ("green", "amber", "red")
    assert got.influence.shape == (75,)
    told = json.loads(Evaluation({name: got}).to_json())["estimates"][name]
    assert told["value"] == got.value
    assert told["regime"] == "held-out"
    assert f"\n{name} " in str(Evaluation({name: got}))


@of_all
def test_files_whole_and_in_blocks(name: str, tmp_path: Path) -> None:
    """To the bit if read whole; in blocks the same, or an error that names the estimator."""
    data, paths = data_for(name), [tmp_path / "a.ope", tmp_path / "b.ope"]
    halves = [data.trajectories.select(episodes=some) for some in (slice(0, 31), slice(31, 75))]
    for half, path in zip(halves, paths, strict=True):
        half.save(path)
    memory = ask(name, data, q_model=LinearQ())
    whole = ask(name, data, paths, q_model=LinearQ())
    assert whole.value == memory.value
    assert whole.interval == memory.interval
    np.testing.assert_array_equal(whole.influence, memory.influence)
    compute = Compute(block_steps=20)
    if ESTIMATORS[name].whole:
        with pytest.raises(ValueError, match=f"{name!r}, which needs all episodes in memory"):
            ask(name, data, paths, q_model=LinearQ(), compute=compute)
        return
    blocks = ask(name, data, paths, q_model=LinearQ(), compute=compute)
    assert blocks.value == pytest.approx(memory.value, rel=1e-9)
    assert blocks.standard_error == pytest.approx(memory.standard_error, rel=1e-9)
    assert blocks.verdict.colour == memory.verdict.colour


@of_all
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    data = data_for(name)
    one, two = (ask(name, data, interval=Bootstrap(20), seed=5) for _ in range(2))
    assert one.value == two.value
    assert one.interval == two.interval
    np.testing.assert_array_equal(one.influence, two.influence)


def test_errors_are_of_about_the_right_size() -> None:
    """Over 60 data sets of one problem the mean SE is about the spread of the values.

    Both are known to about 10 % of each other (relative error of a standard deviation from 60
    values: 1 / sqrt(120) = 9 %); the bound is a factor of 1.6, five of these, either way.
    """
    names = [name for name in ESTIMATORS if name != "EA"]
    first = data_for("NFIS", 2)
    found = [
        evaluate(_again(first, seed).trajectories, first.target, estimators=names)
        for seed in range(60)
    ]
    for name in names:
        errors = np.array([evaluation[name].standard_error for evaluation in found])
        spread = np.std([evaluation[name].value for evaluation in found], ddof=1)
        ratio = float(np.sqrt(np.mean(errors**2)) / spread)
        # DM is blind to the error of its model, MAGIC supposes that of FWDR: both say so
        assert ratio < 1.6 or name == "MAGIC", (name, ratio)
        assert ratio > 1 / 1.6 or name == "DM", (name, ratio)


def _again(data: Recorded, seed: int) -> Recorded:
    """New episodes of the same policies in the same MDP."""
    rng = np.random.default_rng(1000 + seed)
    ids = np.repeat(np.arange(3), (20, 25, 30))
    episodes = [draw(rng, data.mdp, data.policies[k]) for k in ids]
    buffer = buffer_of(
        episodes, ids.tolist(), data.policies, horizon=data.mdp.horizon, held_out=True
    )
    return Recorded(data.mdp, data.policies, data.target, buffer.view())


@of_all
def test_one_episode_or_none_is_told(name: str) -> None:
    data = data_for(name)
    one = data.trajectories.select(episodes=[3])
    if ESTIMATORS[name].baseline:
        with pytest.raises(ValueError, match=r"needs a q model|at least 2 episodes"):
            ask(name, data, one)
        return
    got = ask(name, data, one)
    assert got.verdict.colour == "red"
    assert math.isnan(got.interval.low)
    with pytest.raises(ValueError, match="episodes is empty"):
        ask(name, data, one.select(episodes=[]))


WHOLE = ("EA", "DM", "MDR", "auto")


@pytest.mark.parametrize("gamma", [0.0, 1e-200])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in WHOLE])
def test_a_discount_that_forgets_leaves_the_first_step(name: str, gamma: float) -> None:
    """As if the first step of each episode were all that was recorded.

    But for ADR, whose rounds are weighed by whole trajectories; and for MDR and what takes its
    error from it: they count recorded visits at all steps.
    """
    data = data_for(name, 3)
    old = data.trajectories
    first = old.offsets[:-1]
    short = Trajectories.from_arrays(
        np.asarray(old.observations)[first],
        np.asarray(old.actions)[first],
        old.rewards[first],
        old.log_probs[first],
        offsets=np.arange(len(old) + 1),
        policies=old.policies,
        policy_ids=old.policy_ids[first],
        terminated=True,
        held_out=True,
        observation_space=old.observation_space,
        action_space=old.action_space,
        horizon=1,
    )
    q, v = np.random.default_rng(0).normal(size=(2, old.n_steps))
    whole = ask(name, data, gamma=gamma, q_model=Baseline(q, v))
    part = ask(name, data, short, q_model=Baseline(q[first], v[first]))
    if name == "ADR":
        assert whole.value == pytest.approx(part.value, abs=0.2 * part.standard_error)
    elif name != "MAGIC" or gamma == 0.0:  # two steps are left of the other, and their ESS
        assert whole.value == pytest.approx(part.value, rel=1e-10)
        assert whole.standard_error == pytest.approx(part.standard_error, rel=1e-10)


@pytest.mark.parametrize("interval", ["percentile", "bca"])
def test_rounds_of_an_adaptive_experiment_are_drawn_together(interval: str) -> None:
    """40 rounds of two episodes: replicates spread like the error, 1,000 of them to 2 %."""
    data = recorded(4, (2,) * 40, horizon=3, held_out=True)
    got = ask("ADR", data, interval=interval)
    assert got.replicates.std() == pytest.approx(got.standard_error, rel=0.1)
