"""The bootstrap: Poisson draws that do not depend on how episodes are cut into chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ope_gym import Bootstrap, Estimate, evaluate
from ope_gym.arrays import FloatArray
from ope_gym.estimators.reductions import Column, Columns, Payer, Replicates
from ope_gym.estimators.run import sum_arrays
from ope_gym.estimators.table import WEIGHTED
from ope_gym.inference import bootstrap
from ope_gym.inference.bootstrap import PoissonDraws
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
    draws = PoissonDraws(behaviours.ids, 5, seed=3)
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


# Poisson draws --------------------------------------------------------------------------------


def test_draws_are_poisson_and_unrelated() -> None:
    def drawn(seed: int) -> NDArray[np.float64]:
        draws = PoissonDraws(np.zeros(4000, dtype=np.int64), 300, seed)
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
    for seed in (2, 2**64 + 1):  # of any size
        assert abs(np.mean(centred * (drawn(seed) - 1))) < 4 / np.sqrt(n)


def test_strata_keep_their_sizes_and_no_part_of_one_is_negative() -> None:
    strata = np.repeat(np.arange(40), 2)
    draws = PoissonDraws(strata, 50, seed=0)
    factors = draws.factors(0, 80).reshape(50, 40, 2)
    np.testing.assert_array_equal(
        np.sort(factors, axis=2), np.broadcast_to([0.0, 2.0], (50, 40, 2))
    )
    strata = np.repeat(np.arange(40), 3)
    draws = PoissonDraws(strata, 50, seed=0)
    assert (draws.drawn < 0).any()  # nothing was drawn, so one of them is taken
    factors = draws.factors(0, 120).reshape(50, 40, 3)
    np.testing.assert_allclose(factors.sum(axis=2), 3.0)
    assert factors.min() == 0
    alone = PoissonDraws(np.arange(3), 9, seed=0)
    np.testing.assert_array_equal(alone.factors(0, 3), 1.0)  # no spread can be seen


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 20, 32, 33])
def test_replicates_spread_like_the_standard_error_in_strata_of_any_size(size: int) -> None:
    strata = np.repeat(np.arange(240 // size), size)
    n, runs = strata.size, 40_000
    values = np.random.default_rng(0).standard_normal(n)
    error = standard_error(values, strata)
    draws = PoissonDraws(strata, runs, seed=0)
    means = draws.means(values)
    assert means.std() / error == pytest.approx(1.0, abs=4 / np.sqrt(2 * runs))
    assert means.mean() == pytest.approx(values.mean(), abs=4 * error / np.sqrt(runs))


def test_what_a_task_is_sent_of_the_draws_is_its_own() -> None:
    strata = np.repeat(np.arange(500), 4)
    draws = PoissonDraws(strata, 100, seed=0)
    columns = Columns(np.zeros(5), np.ones((3, 5)))
    asked = Replicates(Column("fused"), columns, draws, Payer(np.ones((5, 1))), 2000)
    part = asked.slice(slice(1002, 1010)).draws
    np.testing.assert_array_equal(part.factors(0, 8), draws.factors(1002, 1010))
    assert part.first == 1002
    assert part.strata.size == 8
    assert part.drawn.shape == (100, 3)
    again = part.part(slice(3, 5))
    np.testing.assert_array_equal(again.factors(0, 2), draws.factors(1005, 1007))
    assert again.first == 1005


@pytest.mark.parametrize("size", [2, 3, 8])
def test_pooled_draws_go_with_those_inside_strata(size: int) -> None:
    """Both count an episode more, the larger its hash, even where a stratum draws none."""
    strata = np.repeat(np.arange(40), size)
    draws = PoissonDraws(strata, 2000, seed=0)
    values = np.random.default_rng(size).normal(size=strata.size)
    together = np.corrcoef(draws.means(values), draws.pooled().means(values))[0, 1]
    assert together > 0.3


def test_long_episodes_take_no_more_memory_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicates of all trajectories at once are the same in blocks of steps and of replicates."""
    rng = np.random.default_rng(0)
    offsets = np.array([0, 40, 47, 90])
    log_w, pay = rng.normal(size=90), rng.normal(size=90)
    draws = PoissonDraws(np.zeros(3, dtype=np.int64), 30, seed=1)
    totals = sum_arrays(log_w, pay, offsets, 0.9)
    payer: FloatArray = np.power(0.9, np.arange(43.0))[:, None]
    peak = totals.columns.peak

    def replicates() -> FloatArray:
        return bootstrap.replicate_whole(draws, log_w, np.inf, pay, offsets, peak, payer)

    whole = replicates()
    monkeypatch.setattr(bootstrap, "_ELEMENTS", 30 * 7)
    np.testing.assert_allclose(replicates(), whole, rtol=1e-12)
    parts = bootstrap.Replicated.of(draws, 0, log_w, np.inf, pay, offsets, peak)
    np.testing.assert_allclose(parts.paid(payer), whole, rtol=1e-12)
