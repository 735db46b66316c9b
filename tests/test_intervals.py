"""Intervals: formulas by hand, resampling loops, exact coverage, paired differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from numpy.typing import ArrayLike, NDArray

from ope_gym import ESTIMATORS, Betting, Bootstrap, Weighting, evaluate, evaluate_log_probs
from ope_gym.estimators.table import WEIGHTED
from ope_gym.inference import bootstrap, intervals
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.errors import Spread, cautious_error, spread_of, standard_error, tails
from ope_gym.inference.estimate import Estimate
from ope_gym.inference.intervals import Interval, betting_lower, ess_t, widened
from ope_gym.inference.outcomes import Outcomes
from tests import reference, small_mdps
from tests.builders import Table, buffer_of, one_step, pick, plain_options, recorded, value_of
from tests.reference import Data
from tests.small_mdps import MDP, Policy

Array = NDArray[np.float64]
ALL = list(WEIGHTED)
NORMALISED = [name for name in ALL if ESTIMATORS[name].normalised]


def test_an_interval_contains_what_lies_between_its_ends() -> None:
    interval = Interval(-1.0, 2.0, 0.9, "ess-t")
    assert -1.0 in interval
    assert 2.0 in interval
    assert 2.1 not in interval
    assert 0.0 not in intervals.undefined(0.9, "bca")


# --- ess-t ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_ess_t_by_hand(level: float) -> None:
    """Weights 2, 1, 1, .5 of one behaviour: BIS and NBIS on paper."""
    data = one_step([0.8, 0.4, 0.4, 0.2], [[0.4] * 4], [0] * 4, [1.0, 2.0, 0.0, 4.0])
    w, r = np.array([2, 1, 1, 0.5]), np.array([1.0, 2.0, 0.0, 4.0])
    ess = 4.5**2 / 6.25
    got = evaluate_log_probs(*data, ["BIS", "NBIS"], level=level)
    for name, value, psi in (
        ("BIS", 1.5, w * r),
        ("NBIS", 6 / 4.5, 4 * w / 4.5 * (r - 6 / 4.5)),
    ):
        u = (psi - psi.mean()) * math.sqrt(4 / 3) / 4
        se = math.sqrt(np.sum(u**2))
        error = math.sqrt(np.sum(u**2) + u.max() ** 2 + u.min() ** 2)
        freedom = 2 / (np.sum(u**4) / np.sum(u**2) ** 2 - 1 / 4)
        t = float(scipy.stats.t.ppf(0.5 + level / 2, min(ess - 1, freedom)))
        half = t * error * math.sqrt(ess / (ess - 1))
        z = float(scipy.stats.norm.ppf(0.5 + level / 2))
        reach = np.sum(u**3) / np.sum(u**2) * (2 * z**2 + 1) / 6
        low, high = value - half + min(reach, 0), value + half + max(reach, 0)
        assert got[name].value == pytest.approx(value)
        assert got[name].standard_error == pytest.approx(se)
        assert got[name].diagnostics.ess == pytest.approx(ess)
        assert got[name].interval.low == pytest.approx(max(low, 0))  # no reward is below 0
        assert got[name].interval.high == pytest.approx(high)
        assert got[name].interval.level == level
        assert got[name].interval.method == "ess-t"
        assert got[name].replicates is None


def test_ess_t_takes_the_smallest_effective_sample_size_over_the_steps() -> None:
    logs = np.log([0.5, 0.9, 0.5, 0.1, 0.5, 0.1])  # three episodes of two steps
    data = Data(
        logs,
        np.full((1, 6), np.log(0.5)),
        np.zeros(3, np.int64),
        np.arange(6.0),
        np.array([0, 2, 4, 6]),
    )
    got = evaluate_log_probs(*data, estimators="FIS")["FIS"]
    w = np.array([1.8, 0.2, 0.2])
    ess = w.sum() ** 2 / (w**2).sum()
    assert got.diagnostics.ess_step == 1
    error = cautious_error(got.influence, data.behaviour_ids)
    want = intervals.ess_t(got.value, error, ess, 0.95, tails(got.influence, data.behaviour_ids))
    assert (got.interval.low, got.interval.high) == pytest.approx((max(want.low, 0.0), want.high))


def test_ess_t_of_one_effective_episode_is_undefined() -> None:
    for arguments in ((1.0, 0.1, 1.0), (math.nan, 0.1, 9.0), (1.0, math.nan, 9.0)):
        interval = intervals.ess_t(*arguments, 0.95)
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)


@pytest.mark.parametrize(
    "strata", [[0] * 9, [0, 1, 0, 1, 0, 1, 1, 0, 1], [3, 3, 0, 0, 0, 7, 3, 3, 3]]
)
def test_the_cautious_error_is_a_loop(strata: list[int]) -> None:
    """The last case has a stratum of one trajectory, which goes to the one before it."""
    psi = np.random.default_rng(0).exponential(size=9)
    home = [3 if k == 7 else k for k in strata]
    parts = []
    for i in range(9):
        mine = [psi[j] for j in range(9) if home[j] == home[i]]
        step = math.sqrt(len(mine) / (len(mine) - 1)) / 9
        parts.append(step * (psi[i] - math.fsum(mine) / len(mine)))
    want = math.fsum([u * u for u in parts] + [max(parts) ** 2, min(parts) ** 2])
    assert cautious_error(psi, np.array(strata)) == pytest.approx(math.sqrt(want), rel=1e-12)


def test_the_cautious_error_of_what_has_none() -> None:
    one = np.zeros(4, dtype=np.int64)
    assert cautious_error(np.ones(4), one) == 0.0
    assert math.isnan(cautious_error(np.arange(4.0), np.arange(4)))
    for bad in (np.nan, np.inf):
        assert math.isnan(cautious_error(np.array([1.0, 2.0, 3.0, bad]), one))
    large = cautious_error(np.array([1e200, -1e200, 1e200, 1e199]), one)
    small = cautious_error(np.array([1e-200, -1e-200, 1e-200, 1e-201]), one)
    assert math.isfinite(large)
    assert small / 1e-200 == pytest.approx(large / 1e200)


# --- outcomes that were not seen ---------------------------------------------------------------


def on_policy(rewards: Any, level: float = 0.95, interval: Any = "ess-t") -> Estimate:
    """Evaluate the very policy that acted, in one-step episodes with these rewards."""
    n = len(rewards)
    half = np.full(n, math.log(0.5))
    return evaluate_log_probs(
        half, [half], [0] * n, rewards, np.arange(n + 1), "NFIS", level=level, interval=interval
    )["NFIS"]


@pytest.mark.parametrize("kind", ["ess-t", Bootstrap(50), Bootstrap(50, "bca")])
def test_episodes_that_all_agree_leave_room_for_the_unseen(kind: Any) -> None:
    """An outcome that returns 0 is missing with a chance of 0.025 if its probability is p."""
    got = on_policy([500.0] * 200, interval=kind).interval
    p = 1 - 0.025 ** (1 / 200)
    assert got.high == pytest.approx(500, rel=1e-12)
    assert got.low == pytest.approx(500 * (1 - p))


def test_the_room_changes_little_when_one_episode_differs() -> None:
    all_agree = on_policy([500.0] * 200).interval.low
    one_apart = on_policy([500.0] * 199 + [499.0]).interval.low
    assert one_apart == pytest.approx(all_agree, abs=0.15)


def test_no_reward_at_all_leaves_the_interval_undefined_and_says_why() -> None:
    got = on_policy([0.0] * 60)
    assert got.value == 0
    assert math.isnan(got.interval.low)
    assert math.isnan(got.interval.high)
    assert got.verdict.colour == "red"
    assert "every recorded reward is 0" in str(got.verdict)


def test_room_is_for_the_returns_that_are_possible() -> None:
    """Rewards of last steps count once; those of other steps until the longest episode."""
    logs = np.full(60, math.log(0.5))
    ends = np.arange(0, 61, 6)
    goal = np.zeros(60)
    goal[ends[1:] - 1] = 1.0
    for rewards, low, high in ((goal, 0.0, 1.0), (np.ones(60), 0.0, 6.0)):
        got = evaluate_log_probs(logs, [logs], [0] * 10, rewards, ends, "NFIS")["NFIS"]
        chance = 1 - 0.025 ** (1 / 10)
        assert got.interval.low == pytest.approx(got.value - chance * (got.value - low))
        assert got.interval.high == pytest.approx(got.value + chance * (high - got.value))


def test_a_value_that_rewards_do_not_allow_is_an_alarm_and_an_interval_is_cut() -> None:
    data = one_step([0.9] * 20, [[0.5] * 20], [0] * 20, [1.0] * 19 + [0.5])
    got = evaluate_log_probs(*data, estimators=["FIS", "NFIS"])
    assert got["FIS"].value > 1
    assert got["FIS"].verdict.colour == "red"
    assert "outside of what the recorded rewards allow, [0, 1]" in str(got["FIS"].verdict)
    assert "outside" not in str(got["NFIS"].verdict)
    step = small_mdps.Path((0,), (0,), (1.0,), 1.0)
    near = buffer_of([step] * 5, [0] * 5, [np.array([[0.9, 0.1]])])
    few = evaluate(near, Table(np.array([[0.8, 0.2]])), "NBIS", origin="fixed")["NBIS"]
    assert 0 <= few.interval.low < few.interval.high


# --- bootstrap --------------------------------------------------------------------------------


def draws(strata: ArrayLike, replicates: int, seed: int) -> Array:
    strata = np.asarray(strata)
    return Resamples(strata, replicates, seed).factors(0, strata.size)


def copies(strata: ArrayLike, replicates: int, seed: int) -> NDArray[np.int64]:
    """The draws as whole numbers: each replicate times what makes it so."""
    times = math.lcm(*(max(int(size) - 1, 1) for size in np.bincount(strata)))
    found = draws(strata, replicates, seed) * times
    whole = np.rint(found)
    np.testing.assert_allclose(found, whole, atol=1e-6)
    return np.asarray(whole, dtype=np.int64)


@pytest.mark.parametrize("name", ALL)
def test_the_bootstrap_is_a_loop_that_resamples_and_estimates_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = recorded(1, (6, 4, 6)).arrays
    options: dict[str, Any] = {"gamma": 0.9, "cap": 1.3}
    made = plain_options(level=0.8, seed=5, interval="percentile", resamples=25, **options)
    counts = copies(data.behaviour_ids.tolist(), 25, 5)
    loop = np.array(
        [value_of(name, pick(data, np.repeat(np.arange(16), row)), **options) for row in counts]
    )
    slow = reference.estimate(name, pick(data, np.repeat(np.arange(16), counts[0])), **options)
    for elements in (bootstrap._ELEMENTS, 3 * 25):  # whole, and three episodes at a time
        monkeypatch.setattr(bootstrap, "_ELEMENTS", elements)
        got = evaluate_log_probs(*data, name, **made)[name]
        assert got.replicates is not None
        np.testing.assert_allclose(got.replicates, loop, rtol=1e-12, atol=1e-13)
        assert (got.interval.low, got.interval.high) == pytest.approx(np.quantile(loop, [0.1, 0.9]))
        assert got.replicates[0] == pytest.approx(slow.value, rel=1e-10)


def test_the_bootstrap_of_the_empirical_average_is_such_a_loop() -> None:
    data = recorded(2, (9, 7), horizon=1)
    got = evaluate(
        data.trajectories, data.target, estimators="EA", seed=3, interval=Bootstrap(30, "bca")
    )["EA"]
    starts = data.trajectories.policy_ids[data.trajectories.offsets[:-1]]
    counts = copies(starts.tolist(), 30, 3)
    loop = [
        evaluate(
            data.trajectories.select(episodes=np.repeat(np.arange(16), row)),
            data.target,
            estimators="EA",
        )["EA"].value
        for row in counts
    ]
    assert got.replicates is not None
    np.testing.assert_allclose(got.replicates, np.array(loop), rtol=1e-12, atol=1e-13)
    want = bca_by_hand(np.array(loop), got.value, got.influence, starts, 0.95)
    assert (got.interval.low, got.interval.high) == pytest.approx(want, rel=1e-10)


def bca_by_hand(
    replicates: Array, value: float, psi: Array, strata: NDArray[Any], level: float
) -> tuple[float, float]:
    """The textbook formula, with the influence values for the jackknife."""
    normal = scipy.stats.norm
    share = (np.sum(replicates < value) + 0.5 * np.sum(replicates == value)) / replicates.size
    z0 = normal.ppf(share)
    u = np.concatenate([psi[strata == k] - psi[strata == k].mean() for k in np.unique(strata)])
    a = np.sum(u**3) / (6 * np.sum(u**2) ** 1.5)
    ends = []
    for tail in (0.5 - level / 2, 0.5 + level / 2):
        z = z0 + normal.ppf(tail)
        ends.append(float(np.quantile(replicates, normal.cdf(z0 + z / (1 - a * z)))))
    return ends[0], ends[1]


def test_bca_is_that_of_scipy_for_a_plain_mean() -> None:
    data = recorded(4, (40,)).arrays
    got = evaluate_log_probs(*data, estimators="BIS", interval=Bootstrap(999, "bca"))["BIS"]
    given = SimpleNamespace(bootstrap_distribution=got.replicates)
    want = scipy.stats.bootstrap(
        (got.influence,), np.mean, n_resamples=0, method="BCa", bootstrap_result=given
    ).confidence_interval
    assert (got.interval.low, got.interval.high) == pytest.approx((want.low, want.high), rel=1e-9)


def test_bca_stays_in_order_under_one_huge_episode() -> None:
    """The acceleration nears its bound of 1/6 and the correction its pole."""
    psi = np.append(np.zeros(30), 1000.0)
    strata = np.zeros(31, dtype=np.int64)
    for sign in (1.0, -1.0):
        replicates = Resamples(strata, 2000, 0).means(sign * psi)
        for level in (0.5, 0.95, 0.999, 1 - 1e-9):
            got = intervals.bca(replicates, float(sign * psi.mean()), sign * psi, strata, level)
            assert replicates.min() <= got.low <= got.high <= replicates.max()
    replicates = np.arange(1000.0)  # and a value above nearly all of them
    ends = [
        intervals.bca(replicates, 998.0, psi, strata, level)
        for level in (0.5, 0.9, 0.99, 0.999, 1 - 1e-9)
    ]
    for inner, outer in itertools.pairwise(ends):
        assert outer.low <= inner.low <= inner.high <= outer.high


@pytest.mark.parametrize("name", ["FIS", "NFIS"])
def test_bca_of_rewards_without_spread(name: str) -> None:
    data = one_step([0.5, 0.5, 0.25, 0.25], [[0.5] * 4], [0] * 4, [1.0] * 4)
    data = data._replace(target_log_probs=data.behaviour_log_probs[0])
    got = evaluate_log_probs(*data, estimators=name, interval=Bootstrap(50, "bca"))[name]
    assert got.replicates == pytest.approx(1.0)
    exact = intervals.bca(
        np.array([1.0, 1.0 + 1e-16, 1 + 1e-15]), 1.0, np.zeros(4), np.zeros(4, np.int64), 0.9
    )
    assert 1.0 <= exact.low <= exact.high <= 1 + 1e-14


def test_percentiles_of_too_few_replicates_are_undefined() -> None:
    for replicates in (np.array([np.nan, np.nan, 1.0]), np.full(5, np.nan)):
        assert math.isnan(intervals.percentile(replicates, 0.9).low)
        strata = np.zeros(4, np.int64)
        assert math.isnan(intervals.bca(replicates, 1.0, np.arange(4.0), strata, 0.9).low)


def test_replicates_that_lost_all_weight_are_counted_and_red() -> None:
    data = one_step([0.5, 0, 0, 0, 0], [[0.5] * 5], [0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    got = evaluate_log_probs(*data, estimators="NFIS", interval=Bootstrap(200))["NFIS"]
    assert got.replicates is not None
    lost = int(np.isnan(got.replicates).sum())
    assert lost == int(np.sum(draws([0] * 5, 200, 0)[:, 0] == 0)) > 0
    assert f"{lost} of 200 bootstrap replicates have no weight left" in str(got.verdict)
    assert got.verdict.colour == "red"
    assert (got.interval.low, got.interval.high) == (1.0, 1.0)


# --- betting ----------------------------------------------------------------------------------


def test_a_betting_bound_by_hand() -> None:
    """Two values: the wealth at the bound is exactly 1 / alpha."""
    x, alpha = np.array([1.0, 3.0]), 0.2
    low = betting_lower(x, alpha)
    odds = [2.0**k * math.sqrt(2 * math.log(1 / alpha) / 2) for k in range(-8, 9)]
    shares = np.array([1 / (1 + abs(k)) ** 2 for k in range(-8, 9)])
    bets = np.array([odd / (1 + odd) for odd in odds])
    wealth = np.prod(1 + bets[:, None] * (x / low - 1), axis=1) @ shares / shares.sum()
    assert wealth == pytest.approx(1 / alpha, rel=1e-9)
    assert 0 < low < 2


def test_betting_bounds_move_as_they_should() -> None:
    rng = np.random.default_rng(0)
    x = rng.exponential(size=200)
    low = betting_lower(x, 0.05)
    assert 0.5 < low < x.mean()
    assert betting_lower(x, 0.01) < low < betting_lower(x, 0.2)
    assert betting_lower(7 * x, 0.05) == pytest.approx(7 * low, rel=1e-12)
    assert betting_lower(x[::-1], 0.05) == pytest.approx(low, rel=1e-12)
    for i in range(5):
        more = x.copy()
        more[i] += 1
        assert betting_lower(more, 0.05) > low
    assert betting_lower(np.tile(x, 100), 0.05) > low  # a longer record, also in two blocks
    assert betting_lower(np.zeros(5), 0.05) == 0
    assert betting_lower(np.array([0.0, 1e-300]), 0.05) >= 0
    assert betting_lower(np.array([np.inf, 1.0]), 0.05) == 0
    assert intervals._crossing(lambda m: 0.0, 1.0, 1.0) == 0.0


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def multinomial(counts: Sequence[int], chances: Sequence[float]) -> float:
    ways = math.factorial(sum(counts))
    for count in counts:
        ways //= math.factorial(count)
    return ways * math.prod(p**c for p, c in zip(chances, counts, strict=True))


def every_data_set(
    mdp: MDP, target: Policy, behaviours: Sequence[Policy], counts: Sequence[int]
) -> Iterator[tuple[Data, float]]:
    """All data sets with n_k episodes of behaviour k, but for their order, with their chances."""
    possible = [[p for p in small_mdps.paths(mdp) if p.probability(b) > 0] for b in behaviours]
    chances = [[p.probability(b) for p in own] for own, b in zip(possible, behaviours, strict=True)]
    ways = [compositions(n, len(own)) for n, own in zip(counts, possible, strict=True)]
    ids = np.repeat(np.arange(len(counts)), counts).tolist()
    for chosen in itertools.product(*map(list, ways)):
        chance = math.prod(multinomial(c, p) for c, p in zip(chosen, chances, strict=True))
        episodes = [
            path
            for own, times in zip(possible, chosen, strict=True)
            for path, copies in zip(own, times, strict=True)
            for _ in range(copies)
        ]
        yield small_mdps.arrays(episodes, ids, target, behaviours), chance


def misses(
    mdp: MDP,
    target: Policy,
    behaviours: Sequence[Policy],
    counts: Sequence[int],
    find: Callable[[Data], Interval],
    gamma: float = 1.0,
) -> tuple[float, float]:
    """Exact probabilities that the truth lies below the interval, and above it."""
    truth = small_mdps.value(mdp, target, gamma)
    below, above, total = [], [], []
    for data, chance in every_data_set(mdp, target, behaviours, counts):
        interval = find(data)
        total.append(chance)
        if not interval.low <= truth + 1e-12:  # an empty interval misses on both sides
            below.append(chance)
        if not interval.high >= truth - 1e-12:
            above.append(chance)
    assert math.fsum(total) == pytest.approx(1)
    return math.fsum(below), math.fsum(above)


def ends_early() -> MDP:
    """Action 0 ends the episode; rewards of both signs, so that the end itself is worth knowing."""
    return MDP(
        start=np.array([1.0, 0.0]),
        moves=np.array([[[0, 0, 1.0], [0, 1.0, 0]], [[0, 0, 1.0], [0, 0, 1.0]]]),
        rewards=np.array([-1.0, 0.0, 2.0]),
        reward_probs=np.array([[[1.0, 0, 0], [0, 1.0, 0]], [[0, 0, 1.0], [0, 0, 1.0]]]),
        horizon=2,
    )


ONE, TWO = np.array([[0.9, 0.1]]), np.array([[0.2, 0.8]])
CASES: dict[str, tuple[MDP, Policy, list[Policy], tuple[int, ...], tuple[float, float]]] = {
    "one behaviour": (
        small_mdps.bandit([1.0, 0.0]),
        np.array([[0.3, 0.7]]),
        [ONE],
        (60,),
        (0.0, 1.0),
    ),
    "unequal counts": (
        small_mdps.bandit([1.0, 0.0]),
        np.array([[0.8, 0.2]]),
        [ONE, TWO],
        (5, 17),
        (0.0, 1.0),
    ),
    "unequal counts, rare reward": (
        small_mdps.bandit([0.0, 1.0]),
        np.array([[0.5, 0.5]]),
        [ONE, TWO],
        (20, 3),
        (0.0, 1.0),
    ),
    "early ends, both signs": (
        ends_early(),
        np.array([[0.4, 0.6], [0.5, 0.5]]),
        [np.array([[0.7, 0.3], [1.0, 0.0]]), np.array([[0.2, 0.8], [0.0, 1.0]])],
        (7, 12),
        (-1.0, 2.0),
    ),
    "an action that no behaviour takes": (
        small_mdps.bandit([1.0, 0.5]),
        np.array([[0.6, 0.4]]),
        [np.array([[1.0, 0.0]])],
        (40,),
        (0.0, 1.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["BIS", "FIS", "FCIS"])
def test_betting_covers_at_its_level_for_every_n(case: str, name: str) -> None:
    """Not a simulation: the sum over all data sets of the chance of those that miss."""
    mdp, target, behaviours, counts, reward_range = CASES[case]
    level, gamma = 0.2, 0.9

    def find(data: Data) -> Interval:
        return evaluate_log_probs(
            *data,
            estimators=name,
            level=level,
            gamma=gamma,
            weighting=Weighting(cap=1.2),
            interval=Betting(reward_range, mdp.horizon),
        )[name].interval

    below, above = misses(mdp, target, behaviours, counts, find, gamma)
    assert below <= (1 - level) / 2
    assert above <= (1 - level) / 2


@pytest.mark.parametrize("name", ["BIS", "FIS", "OUIS"])
def test_the_wealth_of_a_bet_on_the_truth_is_at_most_one_on_average(name: str) -> None:
    """What makes betting valid, with `test_a_betting_bound_by_hand`: then Markov's inequality.

    Basic weights have the mean J in every behaviour: exactly 1. Fused and optimal weights have it
    only on average over the behaviours: less.
    """
    mdp, target, behaviours, counts, _ = CASES["unequal counts"]
    truth, bets = small_mdps.value(mdp, target, 1.0), np.linspace(0.1, 1.0, 10)
    mean = np.zeros(10)
    for data, chance in every_data_set(mdp, target, behaviours, counts):
        x = evaluate_log_probs(*data, estimators=name)[name].influence
        mean += chance * np.prod(1 + bets[:, None] * (x / truth - 1), axis=1)
    if name == "BIS":
        np.testing.assert_allclose(mean, 1, rtol=1e-10)
    else:
        assert np.all(mean < 1)
        assert mean[-1] < 0.9


def test_a_recorded_time_limit_is_the_horizon_of_betting() -> None:
    data = recorded(9, (8, 8), rewards=(0.0, 1.0), horizon=4)
    options: dict[str, Any] = {"estimators": "FIS", "interval": "betting", "reward_range": (0, 1)}

    def interval(**more: int) -> Interval:
        made = plain_options(**options, **more)
        return evaluate(data.trajectories, data.target, **made)["FIS"].interval

    default = interval()
    assert default == interval(horizon=4)
    longer = interval(horizon=40)
    assert longer.high > default.high
    assert longer.low == pytest.approx(default.low)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_betting_by_hand(gamma: float) -> None:
    """Two episodes, one of which ends after a step and then pays 0 with its last weight."""
    logs = np.log([0.5, 0.4, 0.2])
    rewards = np.array([1.0, -1.0, 3.0])
    data = Data(
        logs, np.full((1, 3), np.log(0.4)), np.zeros(2, np.int64), rewards, np.array([0, 2, 3])
    )
    got = evaluate_log_probs(
        *data, estimators="BIS", level=0.5, gamma=gamma, interval=Betting((-2.0, 4.0), 3)
    )["BIS"].interval
    w = [[1.25, 1.25, 1.25], [0.5, 0.5, 0.5]]
    r = [[1.0, -1.0, 0.0], [3.0, 0.0, 0.0]]
    discount = gamma ** np.arange(3)
    up = np.sum(w * (np.array(r) + 2) * discount, axis=1)
    down = np.sum(w * (4 - np.array(r)) * discount, axis=1)
    low = betting_lower(up, 0.25) - 2 * discount.sum()
    high = 4 * discount.sum() - betting_lower(down, 0.25)
    assert (got.low, got.high) == pytest.approx((low, high), rel=1e-9)


@pytest.mark.parametrize("name", ["FIS", "NFIS"])
def test_an_empty_betting_interval_is_undefined_and_red(name: str) -> None:
    """Weights of 5 on every episode, though they average 1: no value agrees."""
    n = 200
    data = one_step([0.5] * n, [[0.1] * n], [0] * n, [1.0, 0.0] * (n // 2))
    got = evaluate_log_probs(*data, estimators=name, interval=Betting((0, 1), 1))[name]
    assert math.isnan(got.interval.low)
    assert math.isnan(got.interval.high)
    assert got.verdict.colour == "red"
    assert "no value agrees with the data" in str(got.verdict)


def test_weights_beyond_floats_leave_betting_valid() -> None:
    """A weight of exp(900) on a reward of 0 is no evidence of a high value, nor a warning."""
    data = Data(
        np.zeros(3),
        np.array([[-900.0, -1.0, -1.0]]),
        np.zeros(3, np.int64),
        np.array([0.0, 0.5, 0.5]),
        np.arange(4),
    )
    options: dict[str, Any] = {"estimators": "FIS", "interval": "betting", "horizon": 1}
    given = plain_options(reward_range=(0, 1), **options)
    got = evaluate_log_probs(*data, **given)["FIS"].interval
    small = betting_lower(np.array([0.0, 0.5 * math.e, 0.5 * math.e]), 0.025)
    assert math.isnan(got.low) or got.low == pytest.approx(small)
    wide = plain_options(reward_range=(0, 1e9), **options)
    x = evaluate_log_probs(*data, **wide)["FIS"].interval
    assert math.isnan(x.high) or x.high <= 1e9


def test_betting_and_cross_fitted_weights_do_not_go_together() -> None:
    """Weights that learn from each other's rewards are not independent, as the bound needs."""
    data = recorded(10, (6, 6), horizon=1)
    with pytest.raises(ValueError, match=r"betting.*cross-fit"):
        evaluate(
            data.trajectories,
            data.target,
            estimators="OUIS",
            weighting=Weighting(reward_model="cross-fit"),
            interval=Betting((-1, 2)),
        )


# --- coverage, simulated ----------------------------------------------------------------------


def test_ess_t_and_bootstrap_cover_about_as_they_say() -> None:
    """Seeded; the share of intervals that hold the truth, within its own standard errors."""
    runs, n, level = 400, 80, 0.9
    rng = np.random.default_rng(12)
    target, behaviours = np.array([0.3, 0.7]), np.array([[0.7, 0.3], [0.4, 0.6]])
    means = np.array([0.2, 0.6])
    truth, ids = float(target @ means), np.arange(n) % 2
    hits = {"ess-t": 0, "percentile": 0, "bca": 0}
    for run in range(runs):
        actions = (rng.random(n) < behaviours[ids, 1]).astype(int)
        rewards = (rng.random(n) < means[actions]).astype(float)
        data = Data(
            np.log(target)[actions], np.log(behaviours)[:, actions], ids, rewards, np.arange(n + 1)
        )
        for method in hits:
            options = plain_options(interval=method, level=level, resamples=200, seed=run)
            interval = evaluate_log_probs(*data, "NFIS", **options)["NFIS"].interval
            hits[method] += truth in interval
    error = math.sqrt(level * (1 - level) / runs)
    for method, count in hits.items():
        # discrete data and 200 replicates: a bootstrap may lose a point or two, ess-t none
        floor = level - 3 * error - (0.0 if method == "ess-t" else 0.02)
        assert floor <= count / runs <= level + 4 * error, method


def test_room_for_the_unseen_is_left_beside_a_majority_alone() -> None:
    """Where the most common return holds 0.7 of the weight, 2 * 0.7 - 1 of it; where 0.4, none."""
    returns = np.array([1.0, 1.0, 0.0, 2.0, 3.0])
    outcomes = Outcomes(returns, (0.0, 3.0), (0.0, 5.0), True, 3.0)
    share = outcomes.majority(np.array([4.0, 3.0, 1.0, 1.0, 1.0]))
    assert outcomes.unseen(1.2, 8.0, share) == pytest.approx((0.4 * 1.2 / 8, 0.4 * 1.8 / 8))
    share = outcomes.majority(np.array([2.0, 2.0, 3.0, 2.0, 1.0]))
    assert outcomes.unseen(1.2, 8.0, share) == (0.0, 0.0)


@pytest.mark.parametrize("n", [10, 50])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("expected", [0.2, 1.0, 3.0])
def test_an_interval_with_room_covers_whether_the_rare_return_was_seen_or_not(
    n: int, spread: float, expected: float
) -> None:
    """An episode returns about 1, or -1 with probability p = expected / n; between -1 and 2."""
    rng, p, runs, hits = np.random.default_rng(n), expected / n, 400, 0
    for _ in range(runs):
        returns = np.where(rng.random(n) < p, -1.0, 1.0 + spread * rng.standard_normal(n))
        value, shape = float(returns.mean()), spread_of(returns)
        ends = partial(_ess_t_of, value, shape, n)
        got = widened(ends, value, 0.95, n, ((value + 1) / n, (2 - value) / n))
        hits += 1 - 2 * p in got
    assert hits / runs >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs)


def _ess_t_of(value: float, shape: Spread, ess: float, level: float) -> Interval:
    return ess_t(value, shape.cautious, ess, level, shape.tails)


@pytest.mark.parametrize("expected", [0.5, 1.5, 3.0])
def test_a_stated_range_of_returns_allows_for_a_catastrophe_that_weights_multiply(
    expected: float,
) -> None:
    """The target takes action 1 more often than who acted, and that one may return -50."""
    target, acted = np.array([0.1, 0.9]), np.array([0.6, 0.4])
    rng, n, runs, hits = np.random.default_rng(0), 50, 100, 0
    chance = np.array([0.0, expected / n])
    value = float(target @ ((1 - chance) * [1.0, 2.0] + chance * -50.0))
    for _ in range(runs):
        actions = (rng.random(n) < acted[1]).astype(int)
        returns = 1.0 + actions + 0.3 * rng.standard_normal(n)
        returns[rng.random(n) < chance[actions]] = -50.0
        logs = np.log(target)[actions], [np.log(acted)[actions]]
        data = (*logs, [0] * n, returns, np.arange(n + 1))
        got = evaluate_log_probs(*data, "NFIS", return_range=(-50.0, 4.0))["NFIS"]
        hits += value in got.interval
    assert hits / runs >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs)  # .19 to .66 without the range


def test_a_range_of_returns_makes_zeros_an_answer() -> None:
    n = 50
    half = np.full(n, math.log(0.5))
    data = half, [half], [0] * n, np.zeros(n), np.arange(n + 1)
    got = evaluate_log_probs(*data, "NFIS", return_range=(0, 1))["NFIS"]
    assert got.interval.low == 0.0
    assert got.interval.high == pytest.approx(1 - 0.025 ** (1 / n))


def test_room_that_is_small_beside_the_spread_changes_nothing() -> None:
    ends = partial(ess_t, 0.0, 1.0, 100.0)
    assert widened(ends, 0.0, 0.95, 100.0, (0.4, 0.4)) == ends(0.95)


# --- paired differences -----------------------------------------------------------------------


def nearby(data: Any, amount: float) -> Table:
    table = data.target.table
    return Table((1 - amount) * table + amount / table.shape[1])


@pytest.mark.parametrize("method", ["ess-t", "percentile", "bca", "betting"])
def test_a_paired_difference_of_targets(method: str) -> None:
    data = recorded(13, (25, 25))
    other = nearby(data, 0.1)
    options = plain_options(interval=method, reward_range=(-1, 2), resamples=300, estimators=ALL)
    one = evaluate(data.trajectories, data.target, **options)
    two = evaluate(data.trajectories, other, **options)
    found = one.difference(two)
    assert list(found) == ALL
    for name, difference in found.items():
        a, b = one[name], two[name]
        assert difference.value == pytest.approx(a.value - b.value)
        strata = data.arrays.behaviour_ids
        error = reference.standard_error(list(a.influence - b.influence), strata)
        assert difference.standard_error == pytest.approx(error, rel=1e-10)
        apart = math.hypot(a.standard_error, b.standard_error)
        assert difference.standard_error < 0.5 * apart  # what pairing is for
        if method in ("percentile", "bca"):
            assert a.replicates is not None
            assert b.replicates is not None
            ends = np.quantile(a.replicates - b.replicates, [0.025, 0.975])
            assert (difference.interval.low, difference.interval.high) == pytest.approx(ends)
        else:
            ess = min(a.diagnostics.ess, b.diagnostics.ess)
            error = cautious_error(a.influence - b.influence, strata)
            shape = tails(a.influence - b.influence, strata)
            want = intervals.ess_t(difference.value, error, ess, 0.95, shape)
            assert difference.interval == want
        assert difference.value in difference.interval
        text = str(difference)
        assert text.startswith(f"{name} - {name}: ")
        assert "95 % [" in text


def test_a_difference_supposes_what_its_estimates_do() -> None:
    """Their freedom, not the ESS of weights that hardly count in them, and bounds on biases."""
    data = recorded(13, (25, 25))
    one, two = (
        evaluate(data.trajectories, t, "NFIS")["NFIS"] for t in (data.target, nearby(data, 0.1))
    )
    model = replace(one, freedom=30.0, bias=0.3), replace(two, freedom=20.0, bias=0.4)
    apart, strata = one.influence - two.influence, one.sample.strata
    found, value = model[0].difference(model[1]), one.value - two.value
    error, shape = cautious_error(apart, strata), tails(apart, strata)
    plain = intervals.ess_t(value, error, 20.0, 0.95, shape)
    z = scipy.stats.norm.ppf(0.975)
    assert found.interval.low == pytest.approx(value - math.hypot(value - plain.low, z * 0.5))
    assert found.interval.high == pytest.approx(value + math.hypot(plain.high - value, z * 0.5))
    assert found.standard_error == pytest.approx(math.hypot(standard_error(apart, strata), 0.5))
    same = model[0].difference(model[0])
    assert (same.standard_error, same.interval.low, same.interval.high) == (0.0, 0.0, 0.0)


def test_estimators_can_be_compared_on_one_evaluation() -> None:
    data = recorded(15, (20, 20)).arrays
    got = evaluate_log_probs(*data, ["FIS", "NFIS"], interval=Bootstrap(50))
    difference = got["FIS"].difference(got["NFIS"])
    assert (difference.minuend, difference.subtrahend) == ("FIS", "NFIS")
    assert difference.value == pytest.approx(got["FIS"].value - got["NFIS"].value)
    nothing = got["FIS"].difference(got["FIS"])
    assert (nothing.value, nothing.standard_error) == (0, 0)
    assert (nothing.interval.low, nothing.interval.high) == (0, 0)


def test_draws_that_are_not_shared_are_not_subtracted() -> None:
    data = recorded(16, (10, 10)).arrays
    one = evaluate_log_probs(*data, estimators="FIS", interval="percentile", seed=1)["FIS"]
    for other in (
        evaluate_log_probs(*data, estimators="FIS", interval="percentile", seed=2)["FIS"],
        evaluate_log_probs(*data, estimators="FIS", seed=1, interval=Bootstrap(7))["FIS"],
        evaluate_log_probs(*data, estimators="FIS")["FIS"],
    ):
        assert one.difference(other).interval.method == "ess-t"
        assert other.difference(one).value == 0


def other_data() -> Iterator[Any]:
    """Data sets that resemble the one of seed 18 in one respect after another."""
    data = recorded(18, (8, 8), early=False, horizon=3).arrays
    yield pick(data, np.arange(15))
    yield pick(data, np.arange(16)[::-1])
    yield data._replace(rewards=data.rewards * 2)
    yield data._replace(behaviour_ids=1 - data.behaviour_ids)
    constant = data._replace(rewards=np.ones_like(data.rewards))
    yield (
        constant,
        recorded(19, (8, 8), early=False, horizon=3).arrays._replace(
            rewards=constant.rewards, behaviour_ids=data.behaviour_ids
        ),
    )


def test_estimates_on_other_data_are_not_compared() -> None:
    data = recorded(18, (8, 8), early=False, horizon=3).arrays
    for other in other_data():
        one, two = (data, other) if isinstance(other, Data) else other
        a, b = evaluate_log_probs(*one), evaluate_log_probs(*two)
        with pytest.raises(ValueError, match="rests on other trajectories than auto"):
            a.difference(b)


def test_values_of_other_discounts_are_not_compared() -> None:
    data = recorded(18, (8, 8)).arrays
    a, b = (evaluate_log_probs(*data, gamma=gamma) for gamma in (1.0, 0.9))
    with pytest.raises(ValueError, match=r"gamma.*0\.9.*1"):
        a.difference(b)


def test_evaluations_without_a_common_estimator_are_not_compared() -> None:
    data = recorded(19).arrays
    with pytest.raises(ValueError, match=r"none of the estimators BIS; it has FIS, NFIS"):
        evaluate_log_probs(*data, estimators="BIS").difference(
            evaluate_log_probs(*data, estimators=["FIS", "NFIS"])
        )
