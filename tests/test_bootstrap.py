"""The bootstrap: draws that do not depend on how episodes are cut into chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ope_gym import Bootstrap, Estimate, evaluate
from ope_gym.estimators.reductions import Column
from ope_gym.estimators.run import sum_arrays
from ope_gym.estimators.table import WEIGHTED
from ope_gym.estimators.weighted import Columns, Payer, Replicates
from ope_gym.inference import bootstrap
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.errors import standard_error
from ope_gym.inference.intervals import bca
from ope_gym.weights.behaviours import behaviours_of
from ope_gym.weights.formula import log_weights
from tests.builders import recorded
from tests.file_builders import in_blocks, in_memory, split

ALL = [*WEIGHTED, "auto"]
BOTH = ["FIS", "NFIS"]


def replicates_of(estimate: Estimate) -> NDArray[np.float64]:
    assert estimate.replicates is not None
    return estimate.replicates


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.integers(0, 30), block_steps=st.sampled_from([1, 1000]))
def test_cuts_change_no_replicate(seed: int, cuts: int, block_steps: int) -> None:
    """Short episodes of few states: many are equal, and are drawn apart all the same."""
    r = recorded(7, (9, 6, 12), states=1, actions=2, horizon=2, rewards=(0.0, 1.0))
    options: dict[str, Any] = {"interval": Bootstrap(60), "q_model": None}
    parts = split(r.trajectories, seed, cuts)
    first = in_memory(parts, r.target, ALL, **options)
    found = in_blocks(parts, r.target, ALL, block_steps=block_steps, **options)
    for name, estimate in found.items():
        one, other = replicates_of(estimate), replicates_of(first[name])
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=name)


# What a replicate is --------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [False, True])
def test_replicates_are_the_whole_estimator_on_drawn_trajectories(blocks: bool) -> None:
    """A replicate is the estimate from the weights, each counted as often as it was drawn."""
    r = recorded(11, (5, 7))
    data, gamma = r.trajectories, 0.8
    options: dict[str, Any] = {"gamma": gamma, "seed": 3, "interval": Bootstrap(5)}
    found = (
        in_blocks([data], r.target, BOTH, block_steps=9, **options)
        if blocks
        else evaluate(data, r.target, BOTH, **options)
    )
    behaviours = behaviours_of(data)
    arrays = r.arrays
    w = np.exp(
        log_weights(
            arrays.target_log_probs,
            arrays.behaviour_log_probs,
            behaviours.ids,
            data.offsets,
            ["fused"],
        )["fused"]
    )
    draws = Resamples(behaviours.ids, 5, seed=3)
    factors, longest = draws.factors(0, len(data)), int(data.lengths.max())
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
            assert replicates_of(found[name])[b] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", ["FIS", "NFIS", "NBIS"])
def test_the_bootstrap_varies_as_the_estimate(name: str) -> None:
    r = recorded(2, (300, 200, 250))
    found = in_blocks([r.trajectories], r.target, name, interval=Bootstrap(2000), block_steps=500)
    one = found[name]
    assert replicates_of(one).std() == pytest.approx(one.standard_error, rel=0.08)
    assert one.seed == 0
    width = one.interval.high - one.interval.low
    bca = evaluate(r.trajectories, r.target, name, interval=Bootstrap(2000, "bca"))[name]
    assert bca.interval.low == pytest.approx(one.interval.low, abs=0.2 * width)
    other = evaluate(r.trajectories, r.target, name, interval=Bootstrap(2000), seed=1)[name]
    assert replicates_of(other)[0] != replicates_of(one)[0]
    assert other.interval.high == pytest.approx(one.interval.high, abs=0.1 * width)


def test_rounding_does_not_decide_on_which_side_of_the_estimate_a_replicate_is() -> None:
    """One that draws every trajectory once is the estimate, summed in another order."""
    values, strata = np.array([0.1, 0.7, 2.5]), np.zeros(3, dtype=np.int64)
    value = float(values.mean())
    tied = np.array([0.1, 0.5, value, value, value, 1.4, 2.5])
    found = {
        bca(np.where(tied == value, moved, tied), value, values, strata, 0.9)
        for moved in (value, np.nextafter(value, 0.0), np.nextafter(value, 9.0))
    }
    low, high = ([getattr(one, end) for one in found] for end in ("low", "high"))
    assert np.ptp(low) < 1e-12
    assert np.ptp(high) < 1e-12


# Draws ----------------------------------------------------------------------------------------


def test_draws_are_with_replacement_inside_strata() -> None:
    strata = np.array([2, 0, 2, 2, 0, 5, 5])
    draws = Resamples(strata, 4000, 1)
    counts = draws.factors(0, 7)
    for k, values in ((0, {0.0, 2.0}), (2, {0.0, 1.5, 3.0}), (5, {0.0, 2.0})):
        assert set(np.unique(counts[:, strata == k])) == values
        np.testing.assert_allclose(counts[:, strata == k].sum(axis=1), np.sum(strata == k))
    np.testing.assert_allclose(counts.mean(axis=0), 1, atol=4 / np.sqrt(4000))
    np.testing.assert_array_equal(counts, Resamples(strata, 4000, 1).factors(0, 7))
    assert not np.array_equal(counts, Resamples(strata, 4000, 2**64 + 1).factors(0, 7))
    assert np.ptp(Resamples(np.zeros(1025, dtype=np.int64), 9, 0).factors(1024, 1025)) > 0
    alone = Resamples(np.arange(3), 9, seed=0)
    np.testing.assert_array_equal(alone.factors(0, 3), 1.0)  # no spread can be seen


@pytest.mark.parametrize("size", [2, 3, 8, 30, 240])
def test_replicates_spread_like_the_standard_error_in_strata_of_any_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in blocks that cut strata, where a single one is drawn with its neighbours."""
    strata = np.repeat(np.arange(240 // size), size)
    n, runs = strata.size, 40_000
    values = np.random.default_rng(0).standard_normal(n)
    error = standard_error(values, strata)
    for block in (1024, 60):
        monkeypatch.setattr(bootstrap, "_BLOCK", block)
        means = Resamples(strata, runs, seed=0).means(values)
        assert means.mean() == pytest.approx(values.mean(), abs=4 * error / np.sqrt(runs))
        if block > size or size == 240:
            some = 4 / np.sqrt(2 * runs) if block == 1024 else 0.1  # other means inside blocks
            assert means.std() / error == pytest.approx(1.0, abs=some)


@pytest.mark.parametrize("size", [2, 30])
def test_replicates_spread_where_trajectories_of_a_stratum_are_far_apart(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policies that take turns: no block of neighbours has two trajectories of one of them."""
    monkeypatch.setattr(bootstrap, "_BLOCK", 240 // size)
    strata = np.tile(np.arange(240 // size), size)
    values = np.random.default_rng(0).standard_normal(240)
    means = Resamples(strata, 10_000, seed=0).means(values)
    assert means.std() == pytest.approx(standard_error(values, strata), rel=0.2)


def test_a_task_draws_its_own_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_BLOCK", 16)
    strata = np.random.default_rng(0).integers(5, size=50)
    draws = Resamples(strata, 30, 7)
    whole = draws.factors(0, 50)
    columns = Columns(np.zeros(5), np.ones((3, 5)))
    asked = Replicates(Column("fused"), columns, draws, Payer(np.ones((5, 1))))
    part = asked.slice(slice(20, 41)).draws
    np.testing.assert_array_equal(part.factors(20, 41), whole[:, 20:41])
    np.testing.assert_array_equal(part.part(slice(33, 35)).factors(33, 35), whole[:, 33:35])
    monkeypatch.setattr(bootstrap, "_ELEMENTS", 5 * 50)
    some = list(draws.by_replicates())
    assert max(len(block) for block in some) == 5
    np.testing.assert_array_equal(np.concatenate(some), whole)
    monkeypatch.setattr(bootstrap, "_KEEP", 0)  # draws are made again
    np.testing.assert_array_equal(draws.factors(3, 49), whole[:, 3:49])


def test_sums_in_blocks_of_trajectories_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    offsets = np.array([0, 40, 47, 90])
    log_w, pay = rng.normal(size=90), rng.normal(size=90)
    draws = Resamples(np.zeros(3, dtype=np.int64), 30, seed=1)
    peak = sum_arrays(log_w, pay, offsets, 0.9).columns.peak
    whole = bootstrap.ReplicateSums.of(draws, 0, log_w, pay, offsets, peak)
    monkeypatch.setattr(bootstrap, "_ELEMENTS", 1)
    parts = bootstrap.ReplicateSums.of(draws, 0, log_w, pay, offsets, peak)
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-12)
