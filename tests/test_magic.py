"""MAGIC against plain loops, the conditions of its optimum, and what it is for."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ope_gym.estimators import run as engine
from ope_gym.estimators.magic import (
    Magic,
    _payer,
    blend,
    bootstrap_magic,
    distance,
    mix,
    spread_cuts,
)
from ope_gym.estimators.reductions import Column, Weighted
from ope_gym.estimators.weighted import Payer, Replicates, Setting, StepSums
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.errors import standard_error
from ope_gym.inference.intervals import Interval, ess_t
from ope_gym.models.base import Baseline
from ope_gym.weights.formula import log_weights
from tests import builders, reference, small_mdps
from tests.reference import Data

Array = NDArray[np.float64]
GAMMA = 0.9


def ragged(seed: int, counts: tuple[int, ...] = (5, 3, 8)) -> tuple[Data, Baseline]:
    """Episodes of one to nine steps, and a q model that knows nothing."""
    rng = np.random.default_rng(seed)
    data = builders.recorded(seed, counts, horizon=9).arrays
    size = data.rewards.size
    return data, Baseline(rng.normal(size=size), rng.normal(size=size))


def run(data: Data, q: Baseline, scheme: str = "fused", cap: float | None = None) -> Magic:
    log_w = weights_of(data, scheme)
    residuals = q.residuals(data.rewards, data.offsets, GAMMA)
    return on_weights(log_w, residuals, data, q, cap)


def weights_of(data: Data, scheme: str = "fused") -> Array:
    return log_weights(*data[:3], data.offsets, [scheme])[scheme]


def on_weights(
    log_w: Array, residuals: Array, data: Data, q: Baseline, cap: float | None = None
) -> Magic:
    start = q.at_start(data.offsets)
    return magic(log_w, residuals, data.offsets, GAMMA, start, data.behaviour_ids, cap=cap)


def magic(
    log_w: Array,
    residuals: Array,
    offsets: NDArray[np.int64],
    gamma: float,
    start: Array,
    strata: NDArray[np.int64],
    *,
    cap: float | None = None,
    cuts: NDArray[np.int64] | None = None,
) -> Magic:
    """Mix on any log weights, all trajectories in one chunk."""
    chunk = Weighted(offsets, residuals, {"given": log_w}, residuals, start)
    column = Column("given", cap, baseline=True)
    request = StepSums(column, gamma)
    columns = request.total(request.part(chunk)).columns
    cuts = spread_cuts(columns.peak.size) if cuts is None else cuts
    setting = Setting(start.size, strata, strata, np.bincount(strata), gamma, has_q=True)
    mixing = mix(column, columns, start, cuts, setting)
    (found,) = engine.run([mixing], engine.reduce_chunk(chunk))
    assert isinstance(found, Magic)
    return found


# --- the slow reference ---------------------------------------------------------------------


def slow_parts(
    data: Data, q: Baseline, scheme: str, cap: float | None, cuts: list[int]
) -> tuple[list[float], list[list[float]]]:
    """g_j and their influence values in the textbook form: w (r - q) + w_before v, step by step."""
    logs = reference.capped(reference.log_weights(scheme, data), cap)
    rewards = reference.rows(data.rewards, data.offsets)
    qs, vs = reference.rows(q.q, data.offsets), reference.rows(q.v, data.offsets)
    n = len(logs)
    parts, influence = [], []
    for cut in cuts:
        values = [math.fsum(v[0] for v in vs) / n]
        terms = [[v[0] - values[0]] for v in vs]
        for t in range(cut + 1):
            share = reference.shares(logs, t)
            for kind in ("reward", "q", "v next"):
                now = [
                    reference.reward_at(rewards[i], t)
                    if kind == "reward"
                    else -reference.reward_at(qs[i], t)
                    if kind == "q"
                    else GAMMA * reference.reward_at(vs[i], t + 1)
                    for i in range(n)
                ]
                mean = math.fsum(w * x for w, x in zip(share, now, strict=True))
                values.append(GAMMA**t * mean)
                for i in range(n):
                    terms[i].append(GAMMA**t * n * share[i] * (now[i] - mean))
        parts.append(math.fsum(values))
        influence.append([math.fsum(row) for row in terms])
    return parts, influence


@pytest.mark.parametrize(("scheme", "cap"), [("fused", None), ("basic", None), ("basic", 1.5)])
@pytest.mark.parametrize("seed", range(3))
def test_parts_errors_and_influence_are_those_of_plain_loops(
    seed: int, scheme: str, cap: float | None
) -> None:
    data, q = ragged(seed)
    got = run(data, q, scheme, cap)
    parts, influence = slow_parts(data, q, scheme, cap, got.cuts.tolist())
    np.testing.assert_allclose(got.parts, parts, rtol=1e-10, atol=1e-12)
    assert got.cuts.size > 5
    want = np.array(influence)
    np.testing.assert_allclose(got.influence, got.weights @ want, rtol=1e-10, atol=1e-11)
    errors = [reference.standard_error(row, data.behaviour_ids) for row in influence]
    np.testing.assert_allclose(np.sqrt(np.diag(got.covariance)), errors, rtol=1e-10)
    a, b = got.cuts.size // 2, got.cuts.size - 1
    both = reference.standard_error((want[a] + want[b]).tolist(), data.behaviour_ids)
    covariance = (both**2 - errors[a] ** 2 - errors[b] ** 2) / 2
    assert got.covariance[a, b] == pytest.approx(covariance, rel=1e-8, abs=1e-12)
    assert got.value == pytest.approx(float(got.weights @ parts), rel=1e-10)
    mixed = reference.standard_error((got.weights @ want).tolist(), data.behaviour_ids)
    assert standard_error(got.influence, data.behaviour_ids) == pytest.approx(mixed, rel=1e-9)


def test_the_ends_are_the_direct_method_and_wdr() -> None:
    data, q = ragged(3)
    log_w, residuals = weights_of(data), q.residuals(data.rewards, data.offsets, GAMMA)
    got = run(data, q)
    wdr = engine.weigh_arrays(log_w, residuals, data.offsets, GAMMA, normalised=True)
    start = q.at_start(data.offsets)
    assert got.cuts[0] == -1
    assert got.parts[0] == pytest.approx(start.mean())
    assert got.cuts[-1] == np.diff(data.offsets).max() - 1
    assert got.parts[-1] == pytest.approx(start.mean() + wdr.value)
    error = standard_error(start + wdr.influence, data.behaviour_ids)
    want = ess_t(float(got.parts[-1]), error, float(wdr.weights.ess.min()), 0.5)
    assert (got.interval.low, got.interval.high) == pytest.approx((want.low, want.high))


@pytest.mark.parametrize("shift", [-900.0, 900.0])
def test_only_ratios_of_weights_count(shift: float) -> None:
    data, q = ragged(4)
    log_w, residuals = weights_of(data), q.residuals(data.rewards, data.offsets, GAMMA)
    one = on_weights(log_w, residuals, data, q)
    other = on_weights(log_w + shift, residuals, data, q)
    np.testing.assert_allclose(one.influence, other.influence, rtol=1e-9, atol=1e-11)
    assert one.value == pytest.approx(other.value, rel=1e-10)


def test_influence_is_the_derivative_of_the_mixture() -> None:
    """Counting episode i (1 + h) times moves the value by h psi_i / n."""
    data, q = ragged(5, (6,))
    got, n, copies = run(data, q), 6, 1000
    for i in range(n):
        picks = [j for j in range(n) for _ in range(copies + (j == i))]
        rows = np.concatenate([np.arange(data.offsets[j], data.offsets[j + 1]) for j in picks])
        moved = run(builders.pick(data, picks), Baseline(q.q[rows], q.v[rows]))
        slope = float(got.weights @ (moved.parts - got.parts)) * n * copies
        assert slope == pytest.approx(float(got.influence[i]), rel=5e-3, abs=2e-3)


# --- the programme --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 10), scale=st.floats(-6, 6))
def test_blend_meets_the_conditions_of_the_optimum(seed: int, size: int, scale: float) -> None:
    """On the simplex: gradients equal where x > 0, and not smaller elsewhere."""
    rng = np.random.default_rng(seed)
    root = 10**scale * rng.normal(size=(size, size)) * rng.lognormal(sigma=2, size=(size, 1))
    covariance, bias = root @ root.T, 10**scale * rng.normal(size=size) * rng.integers(0, 2, size)
    x = blend(covariance, bias)
    assert x.min() >= 0
    assert x.sum() == pytest.approx(1.0)
    error = covariance + np.outer(bias, bias)
    gradient, least = error @ x, float(x @ error @ x)
    size_of = float(np.diag(error).max())
    assert gradient.min() >= least - 1e-8 * size_of
    assert np.abs(gradient - least)[x > 1e-9].max() <= 1e-8 * size_of


def test_of_mixtures_without_error_the_evenest_is_taken_whatever_is_rounded() -> None:
    """Two trajectories show one direction of errors; of x with u x = 0 that is the shortest."""
    u = np.array([1.0, -1.0, 0.5, 2.0])
    for rounding in (0.0, 1e-16, -1e-15):
        got = blend(np.outer(u, u) + rounding * np.diag([1.0, 2.0, 3.0, 4.0]), np.zeros(4))
        np.testing.assert_allclose(got, np.array([3.0, 7.0, 4.0, 1.0]) / 15, atol=1e-6)


def test_blend_of_two_by_hand() -> None:
    # variances 1 and 4, independent: weights 4/5 and 1/5; a bias of 2 in the first: 4/9 and 5/9
    np.testing.assert_allclose(blend(np.diag([1.0, 4.0]), np.zeros(2)), [0.8, 0.2], rtol=1e-12)
    biased = blend(np.diag([1.0, 4.0]), np.array([2.0, 0.0]))
    np.testing.assert_allclose(biased, [4 / 9, 5 / 9], rtol=1e-12)
    np.testing.assert_allclose(blend(np.zeros((3, 3)), np.zeros(3)), [1 / 3] * 3)
    assert np.isnan(blend(np.full((2, 2), np.nan), np.zeros(2))).all()


def test_bias_is_what_lies_outside_the_interval() -> None:
    got = distance(np.array([-2.0, 0.5, 4.0]), Interval(0.0, 1.0, 0.5, "ess-t"))
    np.testing.assert_array_equal(got, [-2.0, 0.0, 3.0])
    data, q = ragged(6)
    found = run(data, q)
    np.testing.assert_array_equal(found.bias, distance(found.parts, found.interval))


@pytest.mark.parametrize("horizon", [1, 2, 5, 10, 500])
def test_cuts_rise_from_the_model_to_the_last_step(horizon: int) -> None:
    cuts = spread_cuts(horizon)
    assert cuts[0] == -1
    assert cuts[-1] == horizon - 1
    assert np.all(np.diff(cuts) > 0)
    assert 2 <= cuts.size <= 10
    assert horizon < 100 or cuts.size == 10


def test_no_weights_or_no_known_error_is_nan() -> None:
    data, q = ragged(7)
    residuals = q.residuals(data.rewards, data.offsets, GAMMA)
    nothing = on_weights(np.full(data.rewards.size, -np.inf), residuals, data, q)
    assert math.isnan(nothing.value)
    assert np.isnan(nothing.influence).all()
    alone = run(data._replace(behaviour_ids=np.arange(16) % 3), q)
    assert math.isfinite(alone.value)
    single = builders.recorded(7, (1,) * 6, horizon=9).arrays
    blind = run(single, Baseline(single.rewards, single.rewards))
    assert math.isnan(blind.value)


# --- bootstrap ------------------------------------------------------------------------------


def test_replicates_are_the_estimator_on_weighted_episodes() -> None:
    data, q = ragged(8)
    log_w, residuals = weights_of(data), q.residuals(data.rewards, data.offsets, GAMMA)
    got, start = run(data, q), q.at_start(data.offsets)
    chunk = Weighted(data.offsets, residuals, {"given": log_w})
    column = Column("given")
    request = StepSums(column, GAMMA)
    columns = request.total(request.part(chunk)).columns
    draws = Resamples(data.behaviour_ids, 20, 0)
    payer = Payer(_payer(got.cuts, columns.peak.size, GAMMA))
    whole = Replicates(column, columns, draws, payer)
    stretches = whole.total(whole.part(chunk))
    found = bootstrap_magic(got, stretches, draws.means(start))
    for counts, replicate in zip(draws.factors(0, 16), found, strict=True):
        parts = np.array(
            [
                float(counts @ start / 16)
                + sum(
                    weighted_step(log_w, residuals, data.offsets, t, counts) for t in range(cut + 1)
                )
                for cut in got.cuts
            ]
        )
        moved = parts - parts[-1] + got.parts[-1]
        weights = blend(got.covariance, distance(moved, got.interval))
        assert replicate == pytest.approx(float(weights @ parts), rel=1e-9, abs=1e-12)


def weighted_step(
    log_w: Array, pay: Array, offsets: NDArray[np.int64], t: int, counts: Array
) -> float:
    weight, paid = 0.0, 0.0
    for count, (begin, end) in zip(counts, itertools.pairwise(offsets.tolist()), strict=True):
        w = count * math.exp(log_w[min(begin + t, end - 1)])
        weight += w
        paid += w * pay[begin + t] if begin + t < end else 0.0
    return float(GAMMA**t * paid / weight)


# --- what it is for -------------------------------------------------------------------------


def mean_squares(wrong: float, n: int, runs: int, seed: int) -> tuple[Array, Array]:
    """Mean squared errors of the model, WDR and MAGIC, and the mean weights of the cuts.

    Six steps of two actions that pay action + noise; the q model is the truth plus `wrong` a step.
    """
    rng, steps = np.random.default_rng(seed), 6
    target, behaviour = 0.85, 0.35
    truth, squares, weights = steps * target, np.zeros(3), np.zeros(7)
    offsets, ids = np.arange(n + 1) * steps, np.arange(n) % 2
    left = np.tile(np.arange(float(steps), 0.0, -1.0), n)
    for _ in range(runs):
        actions = rng.random(n * steps) < behaviour
        rewards = actions + rng.normal(size=actions.size)
        chance = np.where(actions, behaviour, 1 - behaviour)
        aim = np.where(actions, target, 1 - target)
        log_w = log_weights(np.log(aim), np.log([chance, chance]), ids, offsets, ["fused"])["fused"]
        q = Baseline(actions + (left - 1) * target + wrong * left, left * (target + wrong))
        residuals, start = q.residuals(rewards, offsets, 1.0), q.at_start(offsets)
        got = magic(log_w, residuals, offsets, 1.0, start, ids, cuts=np.arange(-1, 6))
        squares += (np.array([got.parts[0], got.parts[-1], got.value]) - truth) ** 2
        weights += got.weights
    return squares / runs, weights / runs


def test_a_good_model_is_believed_and_a_bad_one_is_not() -> None:
    (_, wdr, good), weights = mean_squares(0.0, 200, 100, 0)
    assert good < 0.5 * wdr
    assert weights[0] > 0.5
    (model, wdr, bad), weights = mean_squares(1.0, 200, 100, 1)
    assert bad < 0.1 * model
    assert bad < 2.0 * wdr
    assert weights[0] < 0.05


def test_wdr_is_the_truth_whatever_q_when_episodes_come_in_their_proportions() -> None:
    rng = np.random.default_rng(9)
    mdp = small_mdps.random_mdp(rng, states=1, actions=3, horizon=3)
    target, behaviour = (small_mdps.random_policy(rng, mdp) for _ in range(2))
    episodes = small_mdps.paths(mdp)
    data = small_mdps.arrays(episodes, [0] * len(episodes), target, [behaviour])
    # an episode drawn with its probability: a prefix is seen as often as the sum of its endings
    chance = np.array([p.probability(behaviour) for p in episodes])
    log_w = weights_of(data, "basic") + np.repeat(np.log(chance), np.diff(data.offsets))
    table = rng.normal(size=3)
    actions = np.concatenate([p.actions for p in episodes]).astype(np.int64)
    q = Baseline(table[actions], np.full(actions.size, target[0] @ table))
    got = on_weights(log_w, q.residuals(data.rewards, data.offsets, GAMMA), data, q)
    truth = small_mdps.value(mdp, target, GAMMA)
    assert got.parts[-1] == pytest.approx(truth, rel=1e-12)
    assert abs(got.parts[0] - truth) > 0.1
