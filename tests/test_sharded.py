"""Shards give what all episodes together give, however they are cut, and never hold them all."""

from __future__ import annotations

import dataclasses
import pickle
import re
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ope_gym.scale.census import _mark
from ope_gym.scale.sharded import evaluate_shards, evaluate_survey, passes

from benchmarks.fuzz import write_episode
from ope_gym import (
    Bootstrap,
    Compute,
    Estimate,
    Evaluation,
    LinearSigmoid,
    Trajectories,
    Uniform,
    evaluate,
)
from ope_gym.data import reader
from ope_gym.data.block_writer import BlockWriter
from ope_gym.data.blocks import Block, DamagedFileError
from ope_gym.data.files import write_change, write_policy, write_spaces
from ope_gym.data.seen_files import SeenFile
from ope_gym.data.trajectories import nothing
from ope_gym.estimators.table import WEIGHTED
from ope_gym.inference import bootstrap
from ope_gym.inference.errors import standard_error
from ope_gym.inference.intervals import Resamples
from ope_gym.models.features import Columns, ColumnSums, OneHot, Polynomial
from ope_gym.models.linear import FeatureSurvey, LinearQ
from ope_gym.options import check_options
from ope_gym.policies import UnknownPolicy
from ope_gym.scale.passes import WeightPass
from ope_gym.scale.sources import survey
from ope_gym.scale.workers import Workers
from ope_gym.weights.behaviours import behaviours_of
from ope_gym.weights.propensities import PropensitySums
from tests import small_mdps
from tests.builders import LogProbOnly, Recorded, Table, assert_same, buffer_of, draw, recorded

ALL = [*WEIGHTED, "auto"]
BOTH = ["FIS", "NFIS"]


def compact(part: Trajectories, rng: np.random.Generator) -> Trajectories:
    """The same with a policy table of its own: those that acted, in any order."""
    acted = rng.permutation(np.unique(part.policy_ids))
    table = np.zeros(len(part.policies), dtype=np.int32)
    table[acted] = np.arange(acted.size)
    policies = tuple(part.policies[k] for k in acted)
    return dataclasses.replace(part, policies=policies, policy_ids=table[part.policy_ids])


def split(data: Trajectories, seed: int, cuts: int) -> list[Trajectories]:
    """Episodes in random order, cut at random places, each part with its own policy table."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data))
    places = np.sort(rng.integers(1, len(data), size=cuts if len(data) > 1 else 0))
    parts = [data.select(episodes=chosen) for chosen in np.split(order, places) if len(chosen)]
    return [compact(part, rng) for part in parts]


def whole(parts: list[Trajectories], target: Any, **options: Any) -> Evaluation:
    return evaluate(parts[0].merge(*parts[1:]), target, q_model=None, **options)


def sharded(shards: Any, target: Any, **options: Any) -> Evaluation:
    """Without a q model."""
    return evaluate_shards(shards, target, q_model=None, **options)


def words(estimate: Estimate) -> str:
    """The verdict; steps may have the same effective sample size but for the last bit."""
    return re.sub(r"(at|from) step \d+", "at a step", str(estimate.verdict))


def assert_equal(sharded: Evaluation, together: Evaluation) -> None:
    assert_same(sharded, together, rtol=1e-9)
    mine, theirs = sharded.sample, together.sample
    assert (mine.trajectories, mine.steps, mine.regime) == (
        theirs.trajectories,
        theirs.steps,
        theirs.regime,
    )
    assert mine.behaviours == theirs.behaviours
    np.testing.assert_array_equal(mine.counts, theirs.counts)
    np.testing.assert_array_equal(mine.strata, theirs.strata)
    for name, one in sharded.items():
        other = together[name]
        assert words(one) == words(other)
        a, b = one.diagnostics, other.diagnostics
        assert a.support_violations == b.support_violations
        np.testing.assert_allclose(a.log_last, b.log_last, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(a.capped_share, b.capped_share, rtol=1e-12)
        assert a.calibration is not None
        assert b.calibration is not None
        np.testing.assert_allclose(a.calibration, b.calibration, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.integers(0, 40),
    gamma=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    cap=st.sampled_from([0.3, 1.5, 10.0]),
    block_steps=st.sampled_from([1, 7, 1000]),
)
def test_any_split_gives_what_all_episodes_together_give(
    seed: int, counts: list[int], cuts: int, gamma: float, cap: float, block_steps: int
) -> None:
    r = recorded(seed, counts)
    parts = split(r.trajectories, seed, cuts)
    options: dict[str, Any] = {"estimators": ALL, "gamma": gamma, "cap": cap}
    found = sharded(parts, r.target, block_steps=block_steps, **options)
    assert_equal(found, whole(parts, r.target, **options))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.integers(0, 20),
    zeros=st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
def test_weights_of_zero(seed: int, cuts: int, zeros: list[int]) -> None:
    """Shards, steps or all episodes may have no weight at all."""
    r = recorded(seed, (2, 4, 3))
    table = r.target.table.copy()
    table[np.arange(3), zeros] = 0.0
    table[0] = [0.0, 0.0, 1.0]
    target = Table(table / table.sum(axis=1, keepdims=True))
    parts = split(r.trajectories, seed, cuts)
    assert_equal(sharded(parts, target, estimators=ALL), whole(parts, target, estimators=ALL))


def test_no_weight_at_all_is_no_value() -> None:
    r = recorded(1, (4, 4), horizon=3)
    seen = r.trajectories
    first = seen.select(episodes=np.flatnonzero(seen.actions[seen.offsets[:-1]] != 0))
    assert len(first) > 1
    target = Table(np.eye(3)[[0, 0, 0]])  # only ever takes the action that no episode begins with
    parts = [first.select(episodes=[i]) for i in range(len(first))]
    found = sharded(parts, target, estimators=ALL)
    assert_equal(found, whole(parts, target, estimators=ALL))
    assert all(np.isnan(e.value) and e.verdict.colour == "red" for e in found.values())


@pytest.mark.parametrize("scale", [150.0, 2000.0])
def test_weights_beyond_the_floats(scale: float) -> None:
    """Behaviours that hardly ever do what the target does: weights of e^±700 and more."""
    rng = np.random.default_rng(0)
    n, length = 12, 9
    x = rng.standard_normal((n * length, 1)) + 0.1
    policies = [LinearSigmoid(np.array([k * scale / 20])) for k in (-1.0, 0.3, 0.5)]
    ids = np.repeat(np.arange(n) % 3, length)
    actions = (rng.random(n * length) < 0.5).astype(np.int64)
    lp = np.stack([p.log_prob(x, actions) for p in policies])[ids, np.arange(n * length)]
    data = Trajectories.from_arrays(
        x,
        actions,
        rng.standard_normal(n * length),
        lp,
        offsets=np.arange(n + 1) * length,
        policies=policies,
        terminated=True,
        policy_ids=ids,
    )
    target = LinearSigmoid(np.array([scale / 3]))
    parts = split(data, 3, 5)
    options: dict[str, Any] = {"estimators": [n for n in ALL if "O" not in n]}
    found = sharded(parts, target, **options)
    together = whole(parts, target, **options)
    for name, estimate in found.items():
        np.testing.assert_allclose(estimate.value, together[name].value, rtol=1e-9)
        np.testing.assert_allclose(
            estimate.diagnostics.ess_curve, together[name].diagnostics.ess_curve, rtol=1e-9
        )
        assert words(estimate) == words(together[name])


def test_normalised_estimates_of_shards_are_not_averaged() -> None:
    r = recorded(5, (6, 6))
    parts = split(r.trajectories, 0, 3)
    value = evaluate_shards(parts, r.target, estimators="NFIS")["NFIS"].value
    own = [evaluate_shards([p], r.target, estimators="NFIS")["NFIS"].value for p in parts]
    assert abs(np.average(own, weights=[len(p) for p in parts]) - value) > 1e-3


# The q model ----------------------------------------------------------------------------------

WITH_Q = ["DM", "DR", "WDR", "FDR", "FWDR", "NFIS", "auto"]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.integers(0, 20),
    gamma=st.sampled_from([1.0, 0.8, 0.0]),
    block_steps=st.sampled_from([1, 30, 1000]),
)
def test_linear_q_models_of_any_split(seed: int, cuts: int, gamma: float, block_steps: int) -> None:
    """Whole numbers become categories; cross-fitted over the folds of all episodes together."""
    r = recorded(seed, (6, 4, 5))
    parts = split(r.trajectories, seed, cuts)
    options: dict[str, Any] = {"estimators": WITH_Q, "gamma": gamma}
    together = evaluate(parts[0].merge(*parts[1:]), r.target, q_model=LinearQ(), **options)
    found = evaluate_shards(
        parts, r.target, q_model=LinearQ(), compute=Compute(block_steps=block_steps), **options
    )
    assert_equal(found, together)
    for name, number in together["auto"].report.items():
        assert found["auto"].report[name] == pytest.approx(number, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("features", [None, Polynomial(3), lambda x: np.tanh(np.asarray(x))])
def test_linear_q_models_of_numbers(features: Any, tmp_path: Path) -> None:
    data, target = made(0, episodes=60, length=12), LinearSigmoid(np.full(3, 0.3))
    parts, model = split(data, 0, 5), LinearQ(features)
    options: dict[str, Any] = {"estimators": WITH_Q, "gamma": 0.95}
    together = evaluate(parts[0].merge(*parts[1:]), target, q_model=model, **options)
    found = evaluate_shards(
        parts, target, q_model=model, compute=Compute(scratch=tmp_path), **options
    )
    assert_equal(found, together)
    options |= {"interval": "percentile", "resamples": 400}
    drawn = evaluate_shards(parts, target, q_model=model, **options)
    for name, estimate in drawn.items():
        assert estimate.replicates is not None
        assert estimate.replicates.std() == pytest.approx(estimate.standard_error, rel=0.2), name


@pytest.mark.parametrize("block_steps", [1, 30, 1000])
@pytest.mark.parametrize("case", ["greedy", "never", "unknown"])
def test_steps_of_no_weight_and_of_unknown_policies(case: str, block_steps: int) -> None:
    """How near steps are to the target is decided once for all of them, not by chunk."""
    r = recorded(3, (8, 6, 7), horizon=6)
    data, target = r.trajectories, r.target
    if case == "greedy":
        target = Table(np.eye(3)[[1, 0, 2]])
    if case == "never":  # the target does nothing that was done
        data = dataclasses.replace(data, actions=np.where(data.actions == 2, 0, data.actions))
        target = Table(np.eye(3)[[2, 2, 2]])
    parts = split(data, 0, 5)
    if case == "unknown":
        steps = parts[2].n_steps
        parts[2] = dataclasses.replace(
            parts[2],
            policies=(UnknownPolicy(),),
            policy_ids=np.zeros(steps, np.int32),
            log_probs=np.full(steps, np.nan),
        )
    options: dict[str, Any] = {"estimators": "DM" if case == "unknown" else ["DM", "DR", "FWDR"]}
    together = evaluate(parts[0].merge(*parts[1:]), target, q_model=LinearQ(), **options)
    assert together["DM"].value != 0
    seen: list[int] = []
    found = evaluate_shards(
        parts,
        target,
        q_model=LinearQ(),
        compute=Compute(block_steps=block_steps, progress=seen.append),
        **options,
    )
    for name, estimate in found.items():
        expected = together[name]
        np.testing.assert_allclose(estimate.value, expected.value, rtol=1e-9)
        np.testing.assert_allclose(estimate.standard_error, expected.standard_error, rtol=1e-9)
    assert sum(seen) % data.n_steps == 0
    asked = check_options(options["estimators"], 1.0, 10.0, "ess-t", 0.95, 0, 10, None, None)
    assert sum(seen) == passes(asked, LinearQ()) * data.n_steps


def test_normal_equations_and_scales_can_be_merged() -> None:
    data, target = made(0, episodes=30, length=12), LinearSigmoid(np.full(3, 0.3))
    fold = np.arange(30) % 3
    cuts = [slice(0, 1), slice(1, 11), slice(11, 30)]
    parts = [data.select(episodes=cut) for cut in cuts]
    scales = [ColumnSums() for _ in parts]
    for scale, part in zip(scales, parts, strict=True):
        scale.update((part.observations, part.actions))
    for scale in scales[1:]:
        scales[0].merge(scale)
    one, other = scales[0].columns(), Columns.of((data.observations, data.actions))
    for field in ("mean", "scale", "is_number", "category", "value"):
        np.testing.assert_allclose(getattr(one, field), getattr(other, field), rtol=1e-12)
    survey = FeatureSurvey(LinearQ(), target)
    survey.update(data)
    fits = [survey.equations(gamma=0.9, horizon=12, folds=3) for _ in range(5)]
    fits[0].update(data, fold)
    for fit, part, cut in zip(fits[1:4], parts, cuts, strict=True):
        fit.update(part, fold[cut])
    for fit in fits[2:]:
        fits[1].merge(fit)  # the last has seen nothing
    a, b = (fit.cross_fitted().of(data, fold) for fit in fits[:2])
    np.testing.assert_allclose(a.q, b.q, rtol=1e-9)
    np.testing.assert_allclose(a.v, b.v, rtol=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    counts=st.sampled_from([[1] * 20, [2, 1, 1, 3, 1, 2, 1, 1, 1], [1] * 5]),
    cuts=st.integers(0, 20),
    mixture=st.sampled_from([1, 3, 7, "all"]),
)
def test_partial_mixtures_of_any_split(
    seed: int, counts: list[int], cuts: int, mixture: int | str
) -> None:
    """Also where strata join behaviours of one episode each.

    Five episodes leave the usual model's equations nearly singular, and solving them makes 1e-16
    of rounding 1e-9: a firmer penalty, so that the sums are compared and not the solver.
    """
    r = recorded(seed, counts)
    parts, model = split(r.trajectories, seed, cuts), LinearQ(ridge=1e-3)
    options: dict[str, Any] = {"estimators": [*ALL, "FWDR"], "mixture": mixture, "q_model": model}
    together = evaluate(parts[0].merge(*parts[1:]), r.target, **options)
    found = evaluate_shards(parts, r.target, compute=Compute(block_steps=30), **options)
    assert_equal(found, together)
    told, whole_told = found.sample.mixture, together.sample.mixture
    assert told == whole_told


def test_basic_weights_need_no_mixture_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded(5, [1] * 20)
    parts = split(r.trajectories, 5, 3)
    options: dict[str, Any] = {"estimators": ["BIS", "NBIS"], "q_model": None, "mixture": 4}
    together = evaluate(parts[0].merge(*parts[1:]), r.target, **options)

    def never(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("weights against one's own policy were taken against a group")

    monkeypatch.setattr("ope_gym.scale.passes.partial_log_weights", never)
    found = evaluate_shards(parts, r.target, compute=Compute(block_steps=30), **options)
    assert_equal(found, together)
    assert found.sample.mixture is None
    assert together.sample.mixture is None


# The bootstrap --------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.integers(0, 30), block_steps=st.sampled_from([1, 1000]))
def test_the_bootstrap_does_not_see_the_sharding(seed: int, cuts: int, block_steps: int) -> None:
    """Short episodes of few states: many are equal, and must be drawn apart all the same."""
    r = recorded(7, (9, 6, 12), states=1, actions=2, horizon=2, rewards=(0.0, 1.0))
    options: dict[str, Any] = {"estimators": ALL, "interval": "percentile", "resamples": 60}
    first = evaluate_shards([r.trajectories], r.target, **options)
    parts = split(r.trajectories, seed, cuts)
    found = evaluate_shards(parts, r.target, compute=Compute(block_steps=block_steps), **options)
    for name, estimate in found.items():
        one, other = estimate.replicates, first[name].replicates
        assert one is not None
        assert other is not None
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=name)


class Unregistered:
    """Cannot be stored."""

    def __init__(self, table: Any) -> None:
        self.table = np.asarray(table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unregistered) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash(self.table.tobytes())

    def log_prob(self, observations: Any, actions: Any) -> Any:
        return np.log(self.table[observations, actions])

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        return (rng.random(len(observations)) < self.table[observations, 1]).astype(np.int64)


@pytest.mark.parametrize("kind", [Table, Unregistered])
def test_equal_episodes_of_different_policies_keep_their_draws(kind: Any) -> None:
    """They act alike in state 0; of one policy after the other, or in turn."""
    tables = np.array([[[0.5, 0.5], [0.3, 0.7]], [[0.5, 0.5], [0.7, 0.3]]])
    rng, ids = np.random.default_rng(0), np.arange(60) % 2
    states = rng.integers(2, size=60)
    actions = (rng.random(60) < tables[ids, states, 1]).astype(np.int64)
    data = Trajectories.from_arrays(
        states,
        actions,
        actions.astype(float),
        np.log(tables[ids, states, actions]),
        offsets=np.arange(61),
        policies=[kind(t) for t in tables],
        policy_ids=ids,
        terminated=True,
    )
    options: dict[str, Any] = {"estimators": BOTH, "interval": "percentile", "resamples": 50}
    target = kind([[0.2, 0.8], [0.2, 0.8]])
    one = evaluate_shards([data], target, **options)
    parts = [data.select(episodes=np.flatnonzero(ids == k)) for k in (1, 0)]
    other = evaluate_shards(parts, target, **options)
    for name in BOTH:
        a, b = one[name].replicates, other[name].replicates
        assert a is not None
        assert b is not None
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_episodes_that_differ_in_what_was_seen_keep_their_draws() -> None:
    x = np.random.default_rng(0).standard_normal((40, 1))
    data = Trajectories.from_arrays(
        x,
        np.ones(40, dtype=np.int64),
        np.ones(40),
        np.full(40, np.log(0.5)),
        offsets=np.arange(41),
        policies=[LinearSigmoid(np.zeros(1))],
        terminated=True,
    )
    options: dict[str, Any] = {"estimators": "FIS", "interval": "percentile", "resamples": 50}
    target = LinearSigmoid(np.full(1, 2.0))
    one, other = (
        evaluate_shards([data.select(episodes=order)], target, **options)["FIS"].replicates
        for order in (np.arange(40), np.arange(40)[::-1])
    )
    assert one is not None
    assert other is not None
    np.testing.assert_allclose(one, other, rtol=1e-9)


def test_replicates_are_the_whole_estimator_on_drawn_trajectories() -> None:
    """A replicate is the estimate from the weights, each counted as often as it was drawn."""
    r = recorded(11, (5, 7))
    data, gamma = r.trajectories, 0.8
    found = evaluate_shards(
        [data], r.target, estimators=BOTH, gamma=gamma, seed=3, interval=Bootstrap(5)
    )
    second = WeightPass(
        _mixture([data]),
        r.target,
        check_options(BOTH, gamma, 10.0, "ess-t", 0.95, 3, 5, None, None),
    )
    chunk = second.update("", data)
    draws = bootstrap.PoissonDraws(
        bootstrap.identities(second.hashes[0]), second.ids[0], replicates=5, seed=3
    )
    factors, w = draws.factors(0, len(data)), np.exp(chunk.columns["fused"])
    longest = int(data.lengths.max())
    for b in range(5):
        top, bottom, plain = np.zeros(longest), np.zeros(longest), 0.0
        for i, (start, stop) in enumerate(zip(data.offsets[:-1], data.offsets[1:], strict=True)):
            for t in range(longest):
                row = min(start + t, stop - 1)
                paid = w[row] * data.rewards[row] if start + t < stop else 0.0
                bottom[t] += factors[b, i] * w[row]
                top[t] += factors[b, i] * paid
                plain += gamma**t * factors[b, i] * paid / len(data)
        for name, value in (("FIS", plain), ("NFIS", gamma ** np.arange(longest) @ (top / bottom))):
            replicates = found[name].replicates
            assert replicates is not None
            assert replicates[b] == pytest.approx(value, rel=1e-12)


def test_draws_are_poisson_and_unrelated() -> None:
    hashes = bootstrap.identities(
        np.zeros(4000, dtype=np.uint64)
    )  # all equal: told apart by number
    assert np.unique(hashes).size == hashes.size

    def drawn(seed: int) -> NDArray[np.float64]:
        draws = bootstrap.PoissonDraws(hashes, np.zeros(4000, dtype=np.int64), 300, seed)
        return np.asarray(np.round(draws.factors(0, 4000) * draws.drawn / 4000))

    counts = drawn(1)
    n = counts.size
    expected = np.array([np.exp(-1), np.exp(-1), np.exp(-1) / 2, np.exp(-1) / 6])
    share = np.array([np.mean(counts == j) for j in range(4)])
    assert np.all(np.abs(share - expected) < 4 * np.sqrt(expected / n))
    assert abs(counts.var() - 1) < 4 * np.sqrt(3 / n)
    centred = counts - 1.0
    for other in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1)):
        assert abs(np.mean(centred * other)) < 4 / np.sqrt(n)
    for seed in (2, 2**64 + 1):  # of any size, as in memory
        assert abs(np.mean(centred * (drawn(seed) - 1))) < 4 / np.sqrt(n)


@pytest.mark.parametrize("name", ["FIS", "NFIS", "NBIS"])
def test_the_bootstrap_varies_as_the_estimate(name: str) -> None:
    r = recorded(2, (300, 200, 250))
    found = evaluate_shards([r.trajectories], r.target, estimators=name, interval=Bootstrap(2000))[
        name
    ]
    other = evaluate(r.trajectories, r.target, estimators=name, interval=Bootstrap(2000))[name]
    assert found.replicates is not None
    assert found.replicates.std() == pytest.approx(found.standard_error, rel=0.08)
    width = other.interval.high - other.interval.low
    assert found.interval.low == pytest.approx(other.interval.low, abs=0.1 * width)
    assert found.interval.high == pytest.approx(other.interval.high, abs=0.1 * width)
    assert found.seed == 0
    bca = evaluate_shards([r.trajectories], r.target, estimators=name, interval="bca")[name]
    assert bca.interval.low == pytest.approx(found.interval.low, abs=0.2 * width)


def test_strata_keep_their_sizes_and_no_part_of_one_is_negative() -> None:
    strata = np.repeat(np.arange(40), 2)
    draws = bootstrap.PoissonDraws(np.arange(80, dtype=np.uint64), strata, 50, seed=0)
    factors = draws.factors(0, 80).reshape(50, 40, 2)
    np.testing.assert_array_equal(
        np.sort(factors, axis=2), np.broadcast_to([0.0, 2.0], (50, 40, 2))
    )
    assert Resamples(strata, 50, 0).strata.max() == 39  # the other bootstrap has these strata too
    strata = np.repeat(np.arange(40), 3)
    draws = bootstrap.PoissonDraws(np.arange(120, dtype=np.uint64), strata, 50, seed=0)
    assert (draws.drawn < 0).any()  # nothing was drawn, so one of them is taken
    factors = draws.factors(0, 120).reshape(50, 40, 3)
    np.testing.assert_allclose(factors.sum(axis=2), 3.0)
    assert factors.min() == 0
    alone = bootstrap.PoissonDraws(np.arange(3, dtype=np.uint64), np.arange(3), 9, seed=0)
    np.testing.assert_array_equal(alone.factors(0, 3), 1.0)  # no spread can be seen


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 20, 32, 33])
def test_replicates_spread_like_the_standard_error_in_strata_of_any_size(size: int) -> None:
    strata = np.repeat(np.arange(240 // size), size)
    n, runs = strata.size, 40_000
    values = np.random.default_rng(0).standard_normal(n)
    error = standard_error(values, strata)
    draws = bootstrap.PoissonDraws(np.arange(n, dtype=np.uint64), strata, runs, seed=0)
    means = draws.means(values)
    assert means.std() / error == pytest.approx(1.0, abs=4 / np.sqrt(2 * runs))
    assert means.mean() == pytest.approx(values.mean(), abs=4 * error / np.sqrt(runs))


def test_what_is_sent_of_the_draws_belongs_to_the_task() -> None:
    strata = np.repeat(np.arange(500), 4)
    draws = bootstrap.PoissonDraws(np.arange(2000, dtype=np.uint64), strata, 100, seed=0)
    part = draws.part(slice(1002, 1010))
    np.testing.assert_array_equal(part.factors(0, 8), draws.factors(1002, 1010))
    assert part.drawn.shape == (100, 3)
    replicates = bootstrap.NormalisedReplicates(part, 1.0, None, np.zeros(5))
    assert not hasattr(pickle.loads(pickle.dumps(replicates)), "draws")


def test_paired_differences_share_the_draws() -> None:
    r = recorded(4, (40, 40))
    parts = split(r.trajectories, 0, 5)
    other = Table(np.asarray(r.policies[0]))
    a, b = (
        evaluate_shards(parts, target, estimators=BOTH, interval=Bootstrap(200))
        for target in (r.target, other)
    )
    gap = a["FIS"].difference(b["FIS"])
    assert gap.interval.method == "percentile"
    assert gap.value == a["FIS"].value - b["FIS"].value
    moved = evaluate_shards(parts[::-1], other, estimators=BOTH)
    with pytest.raises(ValueError, match="other trajectories"):
        a["FIS"].difference(moved["FIS"])  # influence values are in another order


# Files ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Recorded, list[Trajectories], list[Path]]:
    r = recorded(8, (15, 9, 12))
    parts = split(r.trajectories, 1, 4)
    paths = [tmp_path / f"{i}.ope" for i in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        part.save(path)
    return r, parts, paths


@pytest.mark.parametrize("limit", [1 << 24, 0])
@pytest.mark.parametrize("block_steps", [1, 10, 10**6])
def test_files_whole_or_in_stretches(
    saved: tuple[Recorded, list[Trajectories], list[Path]],
    limit: int,
    block_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "_WHOLE", limit)
    r, parts, paths = saved
    found = sharded(paths, r.target, estimators=ALL, block_steps=block_steps)
    assert_equal(found, whole(parts, r.target, estimators=ALL))
    longest = max(int(part.lengths.max()) for part in parts)
    if limit == 0:
        first = survey(paths, "all", block_steps, Workers())
        for piece in (piece for task in first.tasks for piece in task.pieces):
            for chunk in piece.chunks(block_steps, first.mixture):
                assert chunk.n_steps < block_steps + max(block_steps, longest)


def test_one_file(saved: tuple[Recorded, list[Trajectories], list[Path]]) -> None:
    r, _, paths = saved
    r.trajectories.save(paths[0])
    found = sharded(paths[0], r.target, estimators=ALL)
    assert_equal(found, whole([r.trajectories], r.target, estimators=ALL))
    found = sharded(str(paths[0]), r.target, estimators=ALL, block_steps=20)
    assert_equal(found, whole([r.trajectories], r.target, estimators=ALL))


def record(data: Trajectories, path: Path, *, mid_episode: bool = False) -> None:
    """Episode by episode, as a recorder writes them, policies where they first act."""
    numbers: dict[int, int] = {}
    with BlockWriter(path) as writer:
        write_spaces(writer, data.observation_space, data.action_space, data.horizon)
        clock = 0
        for i, (start, stop) in enumerate(zip(data.offsets[:-1], data.offsets[1:], strict=True)):
            k = int(data.policy_ids[start])
            if k not in numbers:
                numbers[k] = len(numbers)
                write_policy(writer, data.policies[k])
            write_change(writer, numbers[k], clock, mid_episode=mid_episode and i > 0)
            write_episode(
                writer,
                data.observations[start:stop],
                data.actions[start:stop],
                data.rewards[start:stop],
                data.log_probs[start:stop],
                numbers[k],
                terminated=True,
                held_out=bool(data.held_out[i]),
                start_clock=clock,
                observation_space=data.observation_space,
                action_space=data.action_space,
            )
            clock += int(stop - start)


@pytest.mark.parametrize("block_steps", [1, 10**6])
def test_files_of_recorders_and_of_several_runs(tmp_path: Path, block_steps: int) -> None:
    r = recorded(9, (6, 5))
    path = tmp_path / "runs.ope"
    for part in split(r.trajectories, 2, 1):
        record(part, path)  # a second run appends a section
    together = Trajectories.load(path)
    found = sharded(path, r.target, estimators=ALL, block_steps=block_steps)
    assert_equal(found, whole([together], r.target, estimators=ALL))


def test_policies_that_change_during_episodes_are_refused(tmp_path: Path) -> None:
    r = recorded(9, (6, 5))
    record(r.trajectories, tmp_path / "run.ope", mid_episode=True)
    assert (Trajectories.load(tmp_path / "run.ope").schedule_ids >= 0).any()
    with pytest.raises(ValueError, match=r"run\.ope has policies that change during episodes"):
        evaluate_shards(tmp_path / "run.ope", r.target)
    with pytest.raises(ValueError, match="shard 0 has policies that change during episodes"):
        evaluate_shards([Trajectories.load(tmp_path / "run.ope")], r.target)


def test_damage_is_found_and_a_cut_file_read_to_its_last_whole_block(
    tmp_path: Path, saved: tuple[Recorded, list[Trajectories], list[Path]]
) -> None:
    r, _, _ = saved
    path = tmp_path / "run.ope"
    record(r.trajectories, path)
    good = path.read_bytes()
    for place in range(20, len(good), 397):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(DamagedFileError):
            evaluate_shards(path, r.target)
    path.write_bytes(good[:-3])
    with pytest.warns(UserWarning, match="ends inside its last block"):
        together = Trajectories.load(path)
    with pytest.warns(UserWarning, match="ends inside its last block"):
        found = evaluate_shards(path, r.target, estimators=BOTH)
    assert_equal(found, whole([together], r.target, estimators=BOTH))
    path.write_bytes(b"something else")
    with pytest.raises(DamagedFileError, match="not an ope_gym file"):
        evaluate_shards(path, r.target)


# Sums and passes ------------------------------------------------------------------------------


def _mixture(parts: list[Trajectories]) -> Any:
    return survey(parts, "all", 1 << 17, Workers()).mixture


def test_propensity_sums_are_merged_in_every_part() -> None:
    """A jump of the first keeps the alarm quiet, a policy without probs makes support unknown."""
    r = recorded(6, (5, 4))
    data, behaviours = r.trajectories, behaviours_of(r.trajectories)
    left, right, nothing_seen = (PropensitySums(r.target, 2) for _ in range(3))
    left.update(data, behaviours)
    expected = left.jump.copy()
    assert expected.min() > 0
    left.merge(nothing_seen)
    np.testing.assert_array_equal(left.jump, expected)
    right.merge(left)
    np.testing.assert_array_equal(right.jump, expected)
    assert right.finite
    assert right.finalise().support == left.finalise().support != {}
    right.merge(PropensitySums(r.target, 2, finite=False))
    assert right.finalise().support == {}


def test_tasks_know_their_own_behaviours_alone() -> None:
    """What all tasks hold grows with the episodes, not with tasks times policies."""
    r = recorded(6, [1] * 30 + [3, 2])
    parts = split(r.trajectories, 0, 12)
    found = survey(parts, "all", 10, Workers())
    ids = np.concatenate([_behaviours(found.mixture, i, part) for i, part in enumerate(parts)])
    assert len(found.tasks) > 5
    for task in found.tasks:
        before, own = ids[: task.episodes.start], ids[task.episodes]
        np.testing.assert_array_equal(task.behaviours, np.unique(own))
        for k, earlier, count in zip(task.behaviours, task.before, task.counts, strict=True):
            assert (earlier, count) == (np.sum(before == k), np.sum(own == k))
    assert found.mixture.marks is found.mixture.marks


def _behaviours(mixture: Any, i: int, part: Trajectories) -> NDArray[np.int64]:
    found: NDArray[np.int64] = mixture.behaviours(mixture.renumbered(i, part)).ids
    return found


def test_passes_can_be_merged() -> None:
    """Two workers that each saw some parts are one that saw them all."""
    r = recorded(6, (5, 4, 3))
    parts = split(r.trajectories, 0, 6)
    mixture = _mixture(parts)
    options = check_options(ALL, 0.9, 2.0, "ess-t", 0.95, 0, 10, None, None)
    one, left, right = (WeightPass(mixture, r.target, options) for _ in range(3))
    for i, part in enumerate(parts):
        data = mixture.renumbered(i, part)
        one.update("", data)
        (left if i < 3 else right).update("", data)
    left.merge(right)
    for key, sums in one.sums.items():
        a, b = sums.finalise(), left.sums[key].finalise()
        np.testing.assert_allclose(a.sums, b.sums, rtol=1e-12)
        np.testing.assert_array_equal(a.influence, b.influence)
        assert a.value == pytest.approx(b.value, rel=1e-12)
        assert a.capped_share == b.capped_share
    np.testing.assert_allclose(
        one.propensities.finalise().calibration, left.propensities.finalise().calibration
    )


def test_the_weights_of_the_second_pass_may_be_kept_on_disk(tmp_path: Path) -> None:
    r = recorded(6, (8, 7))
    parts = split(r.trajectories, 0, 4)
    asked: list[int] = []
    counting = [_counting(part, asked) for part in parts]
    options: dict[str, Any] = {"estimators": ALL, "interval": "percentile", "resamples": 40}
    kept = sharded(counting, r.target, scratch=tmp_path, **options)
    assert len(asked) == 2 * len(parts)
    again = sharded(counting, r.target, **options)
    assert len(asked) == 5 * len(parts)
    assert_same(kept, again)
    assert not list(tmp_path.iterdir())
    sharded(counting, r.target, estimators=["FIS", "BCIS"])
    assert len(asked) == 7 * len(parts)  # plain ones need no third pass


def _counting(part: Trajectories, asked: list[int]) -> Callable[[], Trajectories]:
    def make() -> Trajectories:
        asked.append(1)
        return part

    return make


def test_progress_counts_steps() -> None:
    r = recorded(6, (8, 7))
    for estimators, q_model, count in (
        (["BIS"], None, 1),
        (["BIS"], LinearQ(), 1),
        (["BIS", "NFIS"], None, 2),
        (["DR"], LinearQ(), 3),  # two for the q model: scale, normal equations
        (["DR"], LinearQ(lambda x: np.asarray(x, dtype=np.float64).reshape(-1, 1)), 3),
        (["auto"], LinearQ(), 5),
    ):
        seen: list[int] = []
        evaluate_shards(
            split(r.trajectories, 0, 4),
            r.target,
            estimators=estimators,
            q_model=q_model,
            compute=Compute(progress=seen.append),
        )
        assert sum(seen) == count * r.trajectories.n_steps
        options = check_options(estimators, 1.0, 10.0, "ess-t", 0.95, 0, 10, None, None)
        assert passes(options, q_model) == count


def test_held_out_episodes_alone() -> None:
    r, rng = recorded(6, (30, 25, 1)), np.random.default_rng(0)
    data = dataclasses.replace(r.trajectories, held_out=rng.random(len(r.trajectories)) < 0.4)
    parts = [*split(data, 0, 4), data.select(held_out=False, episodes=[0, 1])]
    for which in ("held-out", "all"):
        for origin in (None, "fixed"):
            options: dict[str, Any] = {"estimators": BOTH, "data": which, "origin": origin}
            found = evaluate_shards(parts, r.target, **options)
            assert_equal(found, whole(parts, r.target, **options))
    none = dataclasses.replace(data, held_out=np.zeros(len(data), dtype=bool))
    with pytest.raises(ValueError, match="no held-out episode"):
        evaluate_shards([none], r.target, held_out=True)


def test_wrong_propensities_are_found() -> None:
    r = recorded(3, (60, 40))
    data = dataclasses.replace(r.trajectories, log_probs=r.trajectories.log_probs - 0.5)
    parts = split(data, 0, 4)
    found = evaluate_shards(parts, r.target, estimators=BOTH)
    together = whole(parts, r.target, estimators=BOTH)
    for name, estimate in found.items():
        assert estimate.verdict.colour == together[name].verdict.colour == "red"
        assert any("contradict the policy" in reason for reason in estimate.verdict.reasons)
        assert any("wrongly recorded" in reason for reason in estimate.verdict.reasons)


def test_missing_support_is_counted() -> None:
    """One behaviour never takes action 2, the other not in state 0: own and common gaps differ."""
    rng = np.random.default_rng(0)
    mdp = small_mdps.random_mdp(rng, states=3, actions=3, horizon=4)
    first = np.tile([0.5, 0.5, 0.0], (3, 1))
    second = np.array([[0.4, 0.6, 0.0], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]])
    ids = [0, 1] * 15
    episodes = [draw(rng, mdp, (first, second)[k]) for k in ids]
    data = buffer_of(episodes, ids, [first, second]).view()
    parts, target = split(data, 0, 6), Table(np.full((3, 3), 1 / 3))
    found = evaluate_shards(parts, target, estimators=["BIS", "FIS"])
    assert_equal(found, whole(parts, target, estimators=["BIS", "FIS"]))
    own, common = (found[name].diagnostics.support_violations for name in ("BIS", "FIS"))
    assert own is not None
    assert common is not None
    assert own > common > 0


# Memory ---------------------------------------------------------------------------------------


def made(shard: int, episodes: int = 40, length: int = 250) -> Trajectories:
    """A shard of linear policies, the same whenever it is made."""
    rng = np.random.default_rng([5, shard])
    steps = episodes * length
    x = rng.standard_normal((steps, 3))
    policies = [LinearSigmoid(np.full(3, 0.02 * k)) for k in range(8)]
    ids = np.repeat(rng.integers(8, size=episodes), length)
    actions: NDArray[np.int64] = (rng.random(steps) < 0.5).astype(np.int64)
    table = LinearSigmoid.log_prob_stack(policies, x, actions)
    return Trajectories.from_arrays(
        x,
        actions,
        rng.random(steps),
        table[ids, np.arange(steps)],
        policies=policies,
        offsets=np.arange(episodes + 1) * length,
        terminated=True,
        policy_ids=ids,
    )


def mixed_files(folder: Path) -> list[Path]:
    """Files that were saved in one block or recorded episode by episode, large and small."""
    sizes = [1, 30, 2, 3, 25]
    paths = [folder / f"{i}.ope" for i in range(len(sizes))]
    for i, path in enumerate(paths):
        data = made(i, episodes=sizes[i], length=20)
        record(data, path) if i % 2 else data.save(path)
    return paths


def test_memory_does_not_grow_with_the_number_of_shards() -> None:
    target = LinearSigmoid(np.full(3, 0.2))

    def peak(shards: int) -> int:
        tracemalloc.start()
        try:
            evaluate_shards(
                [partial(made, i) for i in range(shards)],
                target,
                estimators=ALL,
                compute=Compute(block_steps=10_000),
            )
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)  # compiles
    few, many = peak(2), peak(12)
    assert many < 1.1 * few


def test_a_large_file_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_WHOLE", 1 << 16)
    path, target = tmp_path / "large.ope", LinearSigmoid(np.full(3, 0.2))
    data = made(0, episodes=800)
    data.save(path)
    together = evaluate(data, target, estimators=BOTH)
    del data
    evaluate_shards(path, target, estimators=BOTH, compute=Compute(block_steps=5000))  # compiles
    tracemalloc.start()
    try:
        found = evaluate_shards(path, target, estimators=BOTH, compute=Compute(block_steps=5000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_equal(found, together)
    assert peak < path.stat().st_size / 3


# Bad input ------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_refused() -> None:
    r = recorded(1, (3, 3))
    data = r.trajectories
    with pytest.raises(ValueError, match="can be read only once"):
        evaluate_shards(iter([data]), r.target)
    with pytest.raises(ValueError, match="'MAGIC', which cannot be evaluated in shards"):
        evaluate_shards([data], r.target, estimators=["NFIS", "MAGIC"])
    with pytest.raises(ValueError, match="'FWDR', which needs a q model"):
        evaluate_shards([data], r.target, estimators=["NFIS", "FWDR"], q_model=None)
    with pytest.raises(TypeError, match="q_model is 'tabular'; shards need a LinearQ, 'default'"):
        evaluate_shards([data], r.target, q_model="tabular")
    learned = LinearQ(OneHot())
    with pytest.raises(ValueError, match="learns from all episodes at once"):
        evaluate_shards(
            [data], r.target, estimators="DM", q_model=learned, compute=Compute(block_steps=4)
        )
    with pytest.raises(ValueError, match="at least 2 episodes"):
        evaluate_shards([data.select(episodes=[0])], r.target, estimators="DM", q_model=LinearQ())
    log_prob_only = LogProbOnly(r.target.log_prob)
    with pytest.raises(ValueError, match="needs a finite action set"):
        evaluate_shards([data], log_prob_only, estimators="DM", q_model=LinearQ())
    with pytest.raises(ValueError, match="betting"):
        evaluate_shards([data], r.target, interval="betting")
    with pytest.raises(ValueError, match="data is 'some'"):
        evaluate_shards([data], r.target, data="some")
    for steps in (0, "x", None):
        with pytest.raises(ValueError, match=f"block_steps is {steps!r}"):
            evaluate_shards([data], r.target, compute=Compute(block_steps=steps))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shards is None: give files"):
        evaluate_shards(None, r.target)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="scratch is 'missing': No such file or directory; give a"):
        evaluate_shards([data], r.target, compute=Compute(scratch="missing"))
    with pytest.raises(TypeError, match="target is 3"):
        evaluate_shards([data], 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shard 1 is 7"):
        evaluate_shards([data, 7], r.target)  # type: ignore[list-item]
    for empty in ([], [nothing()]):
        with pytest.raises(ValueError, match="no episode"):
            evaluate_shards(empty, r.target)
    with pytest.raises(ValueError, match="shard 1: horizon differs"):
        evaluate_shards([data, dataclasses.replace(data, horizon=99)], r.target)


def test_by_default_a_model_is_fitted_where_one_is_used() -> None:
    r = recorded(1, (30, 30))
    given = evaluate_shards(r.trajectories, r.target, q_model=LinearQ())
    found = evaluate_shards(r.trajectories, r.target)
    assert list(found) == ["BIS", "NBIS", "FIS", "NFIS", "auto"]
    assert found["auto"].value == given["auto"].value != found["NFIS"].value
    assert "; q model: LinearQ\n" in str(found)
    without = evaluate_shards(r.trajectories, r.target, q_model=None)
    assert without["auto"].value == without["NFIS"].value
    assert "; q model: none\n" in str(without)
    assert "q model" not in str(evaluate_shards(r.trajectories, r.target, estimators="NFIS"))
    log_prob_only = LogProbOnly(r.target.log_prob)  # no finite action set, so no model
    assert "; q model: none\n" in str(evaluate_shards(r.trajectories, log_prob_only))
    with pytest.raises(ValueError, match=r"'DM', which needs a q model, and shards have none"):
        evaluate_shards(r.trajectories, log_prob_only, estimators="DM")


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    r, path = recorded(1, (3, 3)), tmp_path / "run.ope"
    r.trajectories.save(path)
    link = tmp_path / "link.ope"
    link.symlink_to(path)
    with pytest.raises(ValueError, match=r"run\.ope twice: .* give each file once"):
        evaluate_shards([path, str(path)], r.target)
    with pytest.raises(ValueError, match=r"link\.ope twice, which is .*run\.ope: its episodes"):
        evaluate_shards([path, r.trajectories, link], r.target)
    hard = tmp_path / "hard.ope"
    hard.hardlink_to(path)
    with pytest.raises(ValueError, match=r"hard\.ope twice, which is .*run\.ope: its episodes"):
        evaluate_shards([path, hard], r.target)
    copy = tmp_path / "copy.ope"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"copy\.ope, a copy of .*run\.ope: its episodes"):
        evaluate_shards([path, copy], r.target)


def test_workers_read_the_files_that_were_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are, and not others of the same name."""
    r, others = recorded(1, (30, 30)), tmp_path / "others"
    others.mkdir()
    monkeypatch.chdir(tmp_path)
    r.trajectories.save("run.ope")
    recorded(2, (30, 30)).trajectories.save(others / "run.ope")
    expected = evaluate_shards("run.ope", r.target, compute=Compute(block_steps=50))

    class Moved(Workers):
        """Works in another folder."""

        def in_order(self, function: Any, items: Any) -> Any:
            monkeypatch.chdir(others)
            yield from super().in_order(function, items)

    found = survey(["run.ope"], "all", 50, Moved())
    assert Path.cwd() == others
    options = check_options(BOTH, 1.0, 10.0, "ess-t", 0.95, 0, 10, None, None)
    again = evaluate_survey(found, r.target, options, Moved())
    assert again["NFIS"].value == expected["NFIS"].value
    (tmp_path / "run.ope").write_bytes((others / "run.ope").read_bytes())
    with pytest.raises(ValueError, match=rf"^run\.ope: on .* {tmp_path}/run\.ope is another file"):
        evaluate_survey(found, r.target, options, Workers())
    (tmp_path / "run.ope").unlink()
    with pytest.raises(FileNotFoundError, match=r"No such .* all nodes need .*: 'run\.ope'"):
        evaluate_survey(found, r.target, options, Workers())
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: 'none\.ope'"):
        evaluate_shards("none.ope", r.target)


def test_a_file_may_grow_while_it_is_read(tmp_path: Path) -> None:
    r, path = recorded(1, (30, 30)), tmp_path / "run.ope"
    record(r.trajectories, path)
    seen = SeenFile.of(path)
    with path.open("ab") as file:
        file.write(b"more")
    with seen.open() as file:
        assert file.tell() == 0


def test_shards_that_change_are_refused() -> None:
    r = recorded(1, (3, 3))
    for sizes in ([6, 5], [6, 6, 5]):
        left = iter(sizes)
        with pytest.raises(ValueError, match="6 episodes in the first pass and 5 in pass "):
            evaluate_shards(lambda: r.trajectories.select(episodes=slice(next(left))), r.target)  # noqa: B023


@pytest.mark.parametrize("mixture", ["all", 1])
@pytest.mark.parametrize("block_steps", [1, 20, 1000])
def test_episodes_are_counted_over_all_shards(block_steps: int, mixture: Any) -> None:
    r = recorded(1, (20, 15), horizon=4, early=False)
    data = r.trajectories
    row = data.offsets[23] + 2
    log_probs = data.log_probs.copy()
    log_probs[row] -= 0.3
    wrong = dataclasses.replace(data, log_probs=log_probs)
    parts = [wrong.select(episodes=slice(0, 7)), wrong.select(episodes=slice(7, 35))]
    options: dict[str, Any] = {"estimators": "NFIS", "block_steps": block_steps, "mixture": mixture}
    found = evaluate_shards(parts, r.target, **options)["NFIS"]
    assert any("episode 23, step 2 has" in reason for reason in found.verdict.reasons)
    seen = data.observations.astype(np.int64)
    seen[row] = 3  # a state of its own, which the target cannot stand
    policies = tuple(Table(np.vstack([p.table, p.table[:1]])) for p in data.policies)  # type: ignore[attr-defined]
    marked = dataclasses.replace(data, observations=seen, policies=policies, observation_space=None)

    class Wrong(Table):
        def log_prob(self, observations: Any, actions: Any) -> Any:
            return np.where(np.asarray(observations) == 3, 0.5, -0.5)

    parts = [marked.select(episodes=slice(0, 7)), marked.select(episodes=slice(7, 35))]
    with pytest.raises(ValueError, match=r"shard.*target_log_probs is 0.5 at episode 23, step 2"):
        evaluate_shards(parts, Wrong(np.full((4, 3), 1 / 3)), **options)


def test_files_may_come_as_an_array_and_seeds_of_any_size(
    saved: tuple[Recorded, list[Trajectories], list[Path]],
) -> None:
    r, _, paths = saved
    options: dict[str, Any] = {"interval": "percentile", "resamples": 20, "rng": 2**64 + 7}
    evaluate_shards(np.array(str(paths[0])), r.target, **options)  # a single one is a path, too
    found = evaluate_shards(np.array([str(path) for path in paths]), r.target, **options)
    assert_same(found, evaluate_shards(paths, r.target, **options))


def test_who_acted_is_read_in_stretches(
    monkeypatch: pytest.MonkeyPatch, saved: tuple[Recorded, list[Trajectories], list[Path]]
) -> None:
    r, parts, paths = saved
    together = whole(parts, r.target, estimators=BOTH)
    seen: list[int] = []
    read = Block.rows

    def watched(block: Block, name: str, begin: int, end: int) -> Any:
        if name == "policy_ids":
            seen.append(end - begin)
        return read(block, name, begin, end)

    monkeypatch.setattr(reader, "_ROWS", 5)
    monkeypatch.setattr(Block, "rows", watched)
    assert_equal(evaluate_shards(paths, r.target, estimators=BOTH), together)
    assert max(seen) == 5


def test_a_bad_target_is_named_with_its_shard() -> None:
    r = recorded(1, (3, 3))

    class Wrong(Table):
        def log_prob(self, observations: Any, actions: Any) -> Any:
            return np.where(np.asarray(observations) == 1, 0.5, -0.5)

    with pytest.raises(ValueError, match=r"shard \d.*target_log_probs is 0.5"):
        evaluate_shards(split(r.trajectories, 0, 2), Wrong(r.target.table))


def test_where_the_default_model_would_be_too_wide_there_is_none() -> None:
    rng = np.random.default_rng(0)
    data = Trajectories.from_arrays(
        rng.standard_normal((60, 40)),
        rng.integers(2, size=60),
        rng.random(60),
        np.log(np.full(60, 0.5)),
        offsets=np.arange(21) * 3,
        policies=[Uniform(2)],
        terminated=True,
        held_out=True,
    )
    found = evaluate_shards([data], Uniform(2), estimators=["NFIS", "auto"])
    assert found.sample.q_model == "none"
    assert found["auto"].value == found["NFIS"].value
    with pytest.raises(ValueError, match=r"'FWDR'.*give q_model=LinearQ\(features"):
        evaluate_shards([data], Uniform(2), estimators=["FWDR"])


def test_marks_of_policies_that_count_their_calls() -> None:
    class Counting(Uniform):
        def __init__(self) -> None:
            super().__init__(2)
            self.calls, self.seed = 0, 2**100

    busy, idle = Counting(), Counting()
    busy.calls = 7
    assert _mark(busy) == _mark(idle)
    other = Counting()
    other.weights = np.ones(2)  # type: ignore[attr-defined]
    assert _mark(other) != _mark(idle)
