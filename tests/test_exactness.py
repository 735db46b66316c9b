"""The estimators against exact expectations, a slow reference, and formulas they must not be."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import Weighting, evaluate_log_probs
from ope_gym.weights.formula import log_weights
from studies import oracle
from tests import reference, small_mdps
from tests.builders import one_step, value_of
from tests.reference import Data
from tests.small_mdps import MDP, Policy, Population

Array = NDArray[np.float64]
PLAIN = ["BIS", "FIS", "OUIS"]
ALL = list(reference.ESTIMATORS)
COUNTS = [(3,), (1, 2), (4, 1, 2), (1, 3, 2, 1)]  # of one to four behaviours


def plain_moments(
    population: Population, gamma: float, model: str | tuple[Array, Array] = "deterministic"
) -> dict[str, tuple[float, float]]:
    """Exact mean and variance of the library's plain estimators."""
    found = evaluate_log_probs(
        *population.data, estimators=PLAIN, gamma=gamma, weighting=Weighting(reward_model=model)
    )
    return {name: population.moments(np.asarray(found[name].influence)) for name in PLAIN}


def problem(
    seed: int, counts: Sequence[int], *, rewards: Sequence[float] = (-1.0, 2.0), horizon: int = 3
) -> tuple[MDP, Policy, list[Policy]]:
    rng = np.random.default_rng(seed)
    mdp = small_mdps.random_mdp(rng, horizon=horizon, rewards=rewards)
    behaviours = [small_mdps.random_policy(rng, mdp, peak=0.7) for _ in counts]
    return mdp, small_mdps.random_policy(rng, mdp), behaviours


# --- exact expectations ---------------------------------------------------------------------


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("seed", range(3))
def test_plain_estimators_are_unbiased(seed: int, counts: tuple[int, ...]) -> None:
    mdp, target, behaviours = problem(seed, counts)
    population = small_mdps.population(mdp, target, behaviours, counts)
    model = small_mdps.reward_model(mdp, population.episodes)
    for gamma in (1.0, 0.9):
        truth = small_mdps.value(mdp, target, gamma)
        for name, (mean, _) in plain_moments(population, gamma).items():
            assert mean == pytest.approx(truth, abs=1e-12), name
        assert plain_moments(population, gamma, model)["OUIS"][0] == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_one_step_variances_are_the_oracles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts, mdp = (2, 1, 3), small_mdps.random_mdp(rng, states=1, actions=3, horizon=1)
    behaviours = [small_mdps.random_policy(rng, mdp) for _ in counts]
    target = small_mdps.random_policy(rng, mdp)
    population = small_mdps.population(mdp, target, behaviours, counts)
    model = small_mdps.reward_model(mdp, population.episodes)
    got = plain_moments(population, 1.0, model)
    table, e = np.concatenate(behaviours), target[0]
    truth = (e, mdp.reward_mean[0], mdp.reward_variance[0], counts)
    assert got["BIS"][1] == pytest.approx(oracle.variance_bis(table, *truth), rel=1e-11)
    assert got["FIS"][1] == pytest.approx(oracle.variance_fis(table, *truth), rel=1e-11)
    assert got["OUIS"][1] == pytest.approx(oracle.variance_ouis(table, *truth), rel=1e-11)
    assert oracle.variance_optimal(table, *truth) <= min(v for _, v in got.values()) + 1e-14


def chain(rewards: Sequence[Sequence[float]]) -> MDP:
    """Two steps: action 0 ends the episode in state 0, action 1 leads to state 1, then it ends."""
    values = np.unique(np.asarray(rewards, dtype=np.float64))
    return MDP(
        start=np.array([1.0, 0.0]),
        moves=np.array([[[0, 0, 1], [0, 1, 0]], [[0, 0, 1], [0, 0, 1]]], dtype=np.float64),
        rewards=values,
        reward_probs=(np.asarray(rewards)[..., None] == values).astype(np.float64),
        horizon=2,
    )


def test_fis_can_have_more_variance_than_bis_when_later_rewards_undo_earlier_ones() -> None:
    """The lemma is one-step: here, fusing the first step breaks up a pair that cancelled."""
    mdp = chain([[0.0, 1.0], [0.0, -1.0]])
    target = np.array([[0.0, 1.0], [0.0, 1.0]])
    behaviours = [np.array([[0.1, 0.9], [0.5, 0.5]]), np.array([[0.5, 0.5], [0.1, 0.9]])]
    got = plain_moments(small_mdps.population(mdp, target, behaviours, (1, 1)), 1.0)
    assert got["BIS"][0] == pytest.approx(0.0, abs=1e-15)
    assert got["BIS"][1] == pytest.approx((10 / 9 + 2 / 9) / 4)
    # Weights 1/.7 and 1/.45; the means of the two behaviours are .9/.7 − 1 and .5/.7 − 1.
    one, pair = (1 / 0.7) ** 2, (1 / 0.45 - 1 / 0.7) ** 2
    fused = 0.45 * one + 0.45 * pair + 0.05 * one + 0.45 * pair - 2 * (2 / 7) ** 2
    assert got["FIS"][0] == pytest.approx(0.0, abs=1e-15)
    assert got["FIS"][1] == pytest.approx(fused / 4)
    assert got["FIS"][1] > 1.06 * got["BIS"][1]


@pytest.mark.parametrize("seed", range(3))
def test_fis_needs_support_of_the_mixture_only(seed: int) -> None:
    mdp, target, behaviours = problem(seed, (2, 1))
    behaviours[0] = np.array([[1.0, 0.0], [0.5, 0.5]])  # never takes action 1 in state 0
    population = small_mdps.population(mdp, target, behaviours, (2, 1))
    got, truth = plain_moments(population, 1.0), small_mdps.value(mdp, target, 1.0)
    assert got["FIS"][0] == pytest.approx(truth, abs=1e-12)
    assert got["OUIS"][0] == pytest.approx(truth, abs=1e-12)
    # BIS loses what its first behaviour cannot reach: its share of the value of the other prefixes.
    seen = math.fsum(
        p.probability(target) * r
        for p in small_mdps.paths(mdp)
        for t, r in enumerate(p.rewards)
        if all(behaviours[0][s, a] > 0 for s, a in zip(p.states[: t + 1], p.actions, strict=False))
    )
    assert got["BIS"][0] == pytest.approx(2 / 3 * seen + truth / 3, abs=1e-12)
    assert got["BIS"][0] != pytest.approx(truth, abs=1e-3)


def test_fis_is_biased_where_later_policies_depend_on_earlier_rewards_and_bis_is_not() -> None:
    """Two rounds; the second policy prefers action 0 if the first reward was 1. J = 1/2."""
    target, first = np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]])
    outcomes = [(0, 0.0, 0.5), (0, 1.0, 0.5), (1, 0.0, 1.0)]  # action, reward, its probability
    means: dict[str, list[float]] = {name: [] for name in PLAIN}
    for a1, r1, p1 in outcomes:
        second = np.array([[0.9, 0.1]]) if r1 else np.array([[0.1, 0.9]])
        for a2, r2, p2 in outcomes:
            chance = first[0, a1] * p1 * second[0, a2] * p2
            episodes = [small_mdps.Path((0,), (a,), (r,), 1.0) for a, r in ((a1, r1), (a2, r2))]
            data = small_mdps.arrays(episodes, (0, 1), target, (first, second))
            for name, found in evaluate_log_probs(*data, estimators=PLAIN).items():
                # Where all weights are 0 the library declines (NaN); the formula itself says 0.
                value = 0.0 if found.diagnostics.ess == 0 else found.value
                means[name].append(float(chance) * value)
    assert math.fsum(means["BIS"]) == pytest.approx(0.5, abs=1e-14)
    # Round one: (1/4) / (.5 + .9); round two: (3/4 · .1 / .6 + 1/4 · .9 / 1.4) / 2.
    assert math.fsum(means["FIS"]) == pytest.approx(0.25 / 1.4 + 0.0625 + 0.1125 / 1.4)
    assert abs(math.fsum(means["FIS"]) - 0.5) > 0.1
    assert abs(math.fsum(means["OUIS"]) - 0.5) > 0.1


def test_a_behaviour_is_what_would_have_been_followed() -> None:
    """A policy change after the first step; grouping by the sequence that was seen is biased."""
    mdp = chain([[1.0, 0.0], [3.0, 5.0]])
    a, b = np.array([[0.7, 0.3], [0.1, 0.9]]), np.array([[0.5, 0.5], [0.8, 0.2]])
    target = np.array([[0.4, 0.6], [0.2, 0.8]])
    changed = np.stack([a[0], b[1]])
    truth, right, wrong = small_mdps.value(mdp, target, 1.0), [], []
    for episodes, chance in small_mdps.data_sets(mdp, (changed, b), (0, 1)):
        data = small_mdps.arrays(episodes, (0, 1), target, (changed, b))
        right.append(chance * value_of("FIS", data))
        seen = 2 if len(episodes[0].states) == 1 else 0  # "a" alone if it never saw the change
        data = small_mdps.arrays(episodes, (seen, 1), target, (changed, b, a))
        wrong.append(chance * value_of("FIS", data))
    assert math.fsum(right) == pytest.approx(truth, abs=1e-12)
    assert abs(math.fsum(wrong) - truth) > 0.1 * truth


# --- agreement with the reference -----------------------------------------------------------


def ragged(
    seed: int, counts: Sequence[int], lengths: Sequence[int], *, scale: float, spread: float
) -> Data:
    """Binary actions with a common logit (size `scale`) and a policy's own deviation (`spread`)."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    drawn = rng.choice(np.asarray(lengths), size=ids.size)
    drawn[0] = max(lengths)
    offsets = np.concatenate([[0], np.cumsum(drawn)])
    steps = int(offsets[-1])
    common = scale * rng.normal(size=steps)
    deviation = rng.normal(size=(len(counts) + 1, steps))
    deviation = deviation / np.repeat(np.sqrt(drawn), drawn) * spread
    logits = common + deviation  # (K + 1, S), the target last
    own = logits[np.repeat(ids, drawn), np.arange(steps)]
    sign = np.where(rng.random(steps) < np.exp(-np.logaddexp(0.0, -own)), 1.0, -1.0)
    logs = -np.logaddexp(0.0, -sign * logits)
    rewards = rng.normal(loc=1.0, size=steps)
    return Data(logs[-1], logs[:-1], ids.astype(np.int64), rewards, offsets.astype(np.int64))


def with_zeros(data: Data, seed: int, *, target: bool) -> Data:
    """Some behaviours give some actions of others probability 0 (and the target some of all)."""
    rng = np.random.default_rng(seed)
    lengths = np.diff(data.offsets)
    own = np.repeat(data.behaviour_ids, lengths)
    mine = np.arange(len(data.behaviour_log_probs))[:, None] == own
    zero = (rng.random(mine.shape) < 0.5 / np.repeat(lengths, lengths)) & ~mine
    logs = np.where(zero, -np.inf, data.behaviour_log_probs)
    lost = rng.random(own.size) < (0.2 if target else 0.0) / np.repeat(lengths, lengths)
    return data._replace(
        behaviour_log_probs=logs, target_log_probs=np.where(lost, -np.inf, data.target_log_probs)
    )


CASES: dict[str, Callable[[], Data]] = {
    "one step": lambda: ragged(0, (5, 9), [1], scale=1.0, spread=1.0),
    "one behaviour": lambda: ragged(1, (20,), [1, 3, 10], scale=1.0, spread=1.0),
    "ragged": lambda: ragged(2, (4, 11, 2, 7), [1, 2, 7, 30], scale=1.0, spread=1.5),
    "heavy weights": lambda: ragged(3, (6, 6, 6), [5, 40], scale=0.5, spread=4.0),
    "a thousand steps": lambda: ragged(4, (2, 2, 2), [1, 50, 1000], scale=1.0, spread=1.5),
    "peaked": lambda: ragged(5, (5, 5, 5), [1, 4, 20], scale=8.0, spread=2.0),
    "nearly certain": lambda: ragged(6, (4, 6, 3), [1, 3, 200], scale=25.0, spread=2.0),
    "zeros": lambda: with_zeros(
        ragged(7, (4, 8, 3, 5), [1, 6, 25], scale=1.0, spread=1.5), 7, target=False
    ),
    "zeros of the target": lambda: with_zeros(
        ragged(8, (6, 9), [1, 3, 12], scale=1.0, spread=1.0), 8, target=True
    ),
    "zeros in a thousand steps": lambda: with_zeros(
        ragged(10, (2, 2, 2), [10, 1000], scale=2.0, spread=1.5), 10, target=False
    ),
}


def assert_agrees(name: str, data: Data, *, gamma: float, cap: float) -> None:
    got = evaluate_log_probs(*data, estimators=[name], gamma=gamma, weighting=Weighting(cap=cap))[
        name
    ]
    want = reference.estimate(name, data, gamma=gamma, cap=cap)
    psi, size = np.asarray(want.influence), float(np.abs(want.influence).max())
    assert float(got.value) == pytest.approx(want.value, rel=1e-10, nan_ok=True)
    np.testing.assert_allclose(got.influence, psi, rtol=1e-10, atol=1e-10 * size)
    assert float(got.standard_error) == pytest.approx(want.standard_error, rel=1e-9, nan_ok=True)
    seen = got.diagnostics
    np.testing.assert_allclose(seen.ess_curve, want.ess_curve, rtol=1e-10)
    assert seen.ess == pytest.approx(want.ess, rel=1e-10)
    assert seen.max_share == pytest.approx(want.max_share, rel=1e-10)
    assert seen.mean_weight == pytest.approx(want.mean_weight, rel=1e-10)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", CASES)
def test_agreement_with_the_reference(case: str, name: str) -> None:
    data = CASES[case]()
    assert_agrees(name, data, gamma=1.0, cap=10.0)
    if "thousand" not in case:
        assert_agrees(name, data, gamma=0.93, cap=1.5)


@pytest.mark.parametrize(("name", "fused"), [("OUIS", "FIS"), ("NOUIS", "NFIS")])
def test_a_path_of_continuous_actions_is_never_certain(name: str, fused: str) -> None:
    """So OUIS is FIS, also where the density of 200 steps of a narrow Gaussian overflows."""
    rng = np.random.default_rng(0)
    rows = 8.0 + 0.1 * rng.standard_normal((2, 2000))
    data = Data(rows.mean(axis=0), rows, np.arange(10) % 2, rng.random(2000), 200 * np.arange(11))
    got = evaluate_log_probs(*data, estimators=[name, fused], density=True)
    np.testing.assert_array_equal(got[name].influence, got[fused].influence)
    assert np.isfinite(got[name].value)


@pytest.mark.parametrize("name", ["OUIS", "NOUIS"])
@pytest.mark.parametrize("case", ["ragged", "a thousand steps", "nearly certain", "zeros"])
def test_agreement_with_the_reference_for_given_reward_moments(case: str, name: str) -> None:
    data = CASES[case]()
    rng = np.random.default_rng(11)
    mean, variance = rng.normal(size=data.rewards.size), rng.exponential(size=data.rewards.size)
    mean[rng.random(mean.size) < 0.2] = 0.0
    variance[rng.random(mean.size) < 0.2] = 0.0  # some steps have neither: any f will do, a = 0
    got = evaluate_log_probs(
        *data, estimators=[name], gamma=0.95, weighting=Weighting(reward_model=(mean, variance))
    )
    a = reference.reward_share(list(mean), list(variance))
    want = reference.estimate(name, data, gamma=0.95, a=a)
    assert float(got[name].value) == pytest.approx(want.value, rel=1e-10)
    size = float(np.abs(want.influence).max())
    np.testing.assert_allclose(got[name].influence, want.influence, rtol=1e-10, atol=1e-10 * size)
    np.testing.assert_allclose(got[name].diagnostics.ess_curve, want.ess_curve, rtol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_log_weights_agree_with_the_reference_and_take_given_counts(case: str) -> None:
    data = CASES[case]()
    arrays = (data.target_log_probs, data.behaviour_log_probs, data.behaviour_ids, data.offsets)
    schemes = ["basic", "fused", "optimal"]
    counts = np.bincount(data.behaviour_ids)
    # Fused weights of other proportions: w = P_e / Σ_k ρ_k P_k, on an extra copy of behaviour 0.
    ids = np.concatenate([data.behaviour_ids, np.zeros(data.behaviour_ids.size, dtype=np.int64)])
    doubled = Data(
        np.tile(data.target_log_probs, 2),
        np.tile(data.behaviour_log_probs, 2),
        ids,
        np.tile(data.rewards, 2),
        np.concatenate([data.offsets, data.offsets[1:] + data.offsets[-1]]),
    )
    for scheme, got in log_weights(*arrays, schemes).items():
        want = np.concatenate(reference.log_weights(scheme, data))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
        same = log_weights(*arrays, [scheme], counts=10 * counts)[scheme]
        np.testing.assert_allclose(same, got, rtol=0, atol=1e-12)
    other = log_weights(*arrays, ["fused"], counts=np.bincount(ids))["fused"]
    want = np.concatenate(reference.log_weights("fused", doubled))[: data.rewards.size]
    np.testing.assert_allclose(other, want, rtol=0, atol=1e-10)


# --- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_behaviour_without_trajectories_changes_nothing(name: str) -> None:
    data = ragged(12, (5, 4), [1, 3, 9], scale=1.0, spread=1.0)
    for idle in (0.0, -np.inf):  # certain of everything, or of nothing: the pole must not count
        row = np.full((1, data.rewards.size), idle)
        more = data._replace(behaviour_log_probs=np.concatenate([data.behaviour_log_probs, row]))
        assert value_of(name, more) == pytest.approx(value_of(name, data), rel=1e-12)
        assert_agrees(name, more, gamma=1.0, cap=10.0)


def scaled(size: float) -> Data:
    """Two steps, three episodes, every weight times exp(size) at the second step."""
    data = ragged(14, (3,), [2], scale=1.0, spread=1.0)
    last = np.arange(6) % 2 == 1
    if size > 0:  # a probability cannot exceed 1: the behaviour's becomes small instead
        logs = data.behaviour_log_probs - size * last
        return data._replace(behaviour_log_probs=logs)
    return data._replace(target_log_probs=data.target_log_probs + size * last)


@pytest.mark.parametrize("size", [-2000.0, -800.0, 800.0, 2000.0])
@pytest.mark.parametrize("name", ["NBIS", "NFIS", "NOUIS"])
def test_normalised_estimators_see_ratios_of_weights_beyond_the_range_of_floats(
    name: str, size: float
) -> None:
    got = evaluate_log_probs(*scaled(size), estimators=[name])[name]
    want = reference.estimate(name, scaled(size))
    assert float(got.value) == pytest.approx(want.value, rel=1e-10)
    np.testing.assert_allclose(got.influence, want.influence, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got.diagnostics.ess_curve, want.ess_curve, rtol=1e-9)
    assert got.diagnostics.max_share == pytest.approx(want.max_share, rel=1e-9)


# --- formulas it must not be ----------------------------------------------------------------


def flat_weights(data: Data) -> tuple[list[list[float]], list[list[float]]]:
    """Fused weights and rewards as lists per trajectory, from the reference."""
    logs = reference.log_weights("fused", data)
    return [[math.exp(x) for x in row] for row in logs], reference.rows(data.rewards, data.offsets)


def test_not_a_normaliser_of_survivors_only() -> None:
    """Episodes in their exact proportions: J = 1 + .9, and survivors alone see the longest, 2."""
    mdp = chain([[1.0, 1.0], [1.0, 1.0]])
    behaviour, target = np.full((2, 2), 0.5), np.array([[0.1, 0.9], [0.3, 0.7]])
    every = small_mdps.paths(mdp)
    short, one, two = sorted(every, key=lambda p: (len(p.states), p.actions))
    data = small_mdps.arrays([short, short, one, two], [0] * 4, target, [behaviour])
    weights, rewards = flat_weights(data)
    survivors = 0.0
    for t in range(2):
        alive = [i for i in range(4) if len(rewards[i]) > t]
        total = math.fsum(weights[i][t] for i in alive)
        survivors += math.fsum(weights[i][t] * rewards[i][t] for i in alive) / total
    assert survivors == pytest.approx(2.0)
    for name in ("NBIS", "NFIS", "NOUIS"):
        assert value_of(name, data) == pytest.approx(1.9, abs=1e-14)
        assert small_mdps.value(mdp, target, 1.0) == pytest.approx(1.9, abs=1e-14)


def test_the_cap_comes_before_normalising() -> None:
    data = one_step([0.8, 0.2, 0.2, 0.2], [[0.04, 0.4, 0.4, 0.4]], [0] * 4, [1, 0, 0, 0])
    w = np.array([20.0, 0.5, 0.5, 0.5])
    after = np.minimum(4 * w / w.sum(), 10.0)[0] / 4
    assert after == pytest.approx(20 / 21.5)
    for name in ("NBCIS", "NFCIS"):
        assert value_of(name, data) == pytest.approx(10 / 11.5, rel=1e-14)
    for name in ("BCIS", "FCIS"):
        assert value_of(name, data) == pytest.approx(10 / 4, rel=1e-14)


@pytest.mark.parametrize("name", ["NBIS", "NFIS", "NOUIS"])
def test_normalised_influence_is_the_derivative_of_the_value(name: str) -> None:
    """Counting episode i (1 + h) times moves the normalised value by h ψ_i / n."""
    data = ragged(15, (6,), [1, 4, 9], scale=1.0, spread=1.0)  # one behaviour: copies keep ρ
    n, copies = 6, 1_000
    got = evaluate_log_probs(*data, estimators=[name], gamma=0.9)[name]
    for i in range(n):
        picks = [j for j in range(n) for _ in range(copies + (j == i))]
        rows = np.concatenate([np.arange(data.offsets[j], data.offsets[j + 1]) for j in picks])
        lengths = [int(data.offsets[j + 1] - data.offsets[j]) for j in picks]
        moved = Data(
            data.target_log_probs[rows],
            data.behaviour_log_probs[:, rows],
            np.zeros(len(picks), dtype=np.int64),
            data.rewards[rows],
            np.cumsum([0, *lengths]),
        )
        slope = (value_of(name, moved, gamma=0.9) - float(got.value)) * n * copies
        assert slope == pytest.approx(float(got.influence[i]), rel=5e-3, abs=1e-3)
