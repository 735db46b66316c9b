"""Doubly robust estimators and auto: a plain-loop reference, exact expectations, properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ope_gym import ESTIMATORS, Betting, evaluate, evaluate_log_probs
from ope_gym.inference.bootstrap import Resamples
from ope_gym.models import Baseline, LinearQ, TabularQ
from tests import reference, small_mdps
from tests.builders import Recorded, pick, plain_options, recorded
from tests.reference import Data, Rows

Array = NDArray[np.float64]
DOUBLY = {
    "DR": ("basic", False),
    "WDR": ("basic", True),
    "FDR": ("fused", False),
    "FWDR": ("fused", True),
}
WITH_Q = [*DOUBLY, "DM", "auto"]


def q_table(seed: int, data: Recorded) -> Array:
    """Some q(t, s, a), right or wrong."""
    rng = np.random.default_rng(seed)
    states, actions = data.target.table.shape
    return rng.normal(size=(data.mdp.horizon, states, actions))


def exact_q(data: Recorded, gamma: float) -> Array:
    """q(t, s, a) of the target by backward recursion."""
    mdp, policy = data.mdp, data.target.table
    q = np.zeros((mdp.horizon, *policy.shape))
    ahead = np.zeros(policy.shape[0] + 1)
    for t in reversed(range(mdp.horizon)):
        q[t] = mdp.reward_mean + gamma * mdp.moves @ ahead
        ahead = np.append((policy * q[t]).sum(1), 0.0)
    return q


def on_steps(q: Array, data: Recorded) -> tuple[Array, Array]:
    """q and v at the recorded steps."""
    d = data.trajectories
    states, actions = np.asarray(d.observations), np.asarray(d.actions)
    v = (data.target.table * q).sum(-1)
    return q[d.steps, states, actions], v[d.steps, states]


def doubly_robust(
    logs: Rows, data: Data, q: Array, v: Array, gamma: float, normalised: bool
) -> tuple[float, list[float]]:
    """sum_t gamma^t [w_t (r_t - q_t) + w_{t-1} v_t], w_{-1} = 1, and influence values, by loops."""
    n = len(logs)
    rewards = reference.rows(data.rewards, data.offsets)
    qs, vs = reference.rows(q, data.offsets), reference.rows(v, data.offsets)
    total, psi = [], [[] for _ in range(n)]  # type: tuple[list[float], list[list[float]]]
    for t in range(reference.horizon(logs)):
        gap = [r[t] - x[t] if t < len(r) else 0.0 for r, x in zip(rewards, qs, strict=True)]
        now = [x[t] if t < len(x) else 0.0 for x in vs]
        if normalised:
            weight = reference.shares(logs, t)
            before = reference.shares(logs, t - 1) if t else [1 / n] * n
        else:
            weight = [math.exp(reference.at(row, t)) / n for row in logs]
            before = [math.exp(reference.at(row, t - 1)) / n if t else 1 / n for row in logs]
        mean_gap = math.fsum(w * x for w, x in zip(weight, gap, strict=True))
        mean_now = math.fsum(w * x for w, x in zip(before, now, strict=True))
        total.append(gamma**t * (mean_gap + mean_now))
        for i in range(n):
            a, b = gap[i], now[i]
            if normalised:
                a, b = a - mean_gap, b - mean_now
            psi[i].append(gamma**t * n * (weight[i] * a + before[i] * b))
    return math.fsum(total), [math.fsum(row) for row in psi]


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("name", DOUBLY)
@pytest.mark.parametrize("seed", range(3))
def test_values_and_influence_are_the_references(seed: int, name: str, gamma: float) -> None:
    data = recorded(seed)
    q, v = on_steps(q_table(seed, data), data)
    got = evaluate_log_probs(*data.arrays, estimators=name, gamma=gamma, baseline=(q, v))[name]
    scheme, normalised = DOUBLY[name]
    logs = reference.log_weights(scheme, data.arrays)
    value, psi = doubly_robust(logs, data.arrays, q, v, gamma, normalised)
    assert got.value == pytest.approx(value, rel=1e-11, abs=1e-12)
    np.testing.assert_allclose(got.influence, psi, rtol=1e-10, atol=1e-11)
    error = reference.standard_error(psi, data.arrays.behaviour_ids)
    assert got.standard_error == pytest.approx(error, rel=1e-10)


@pytest.mark.parametrize("with_q", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_auto_is_the_references(seed: int, with_q: bool) -> None:
    """A peaked target, so that the truncation at sqrt(n) times the mean bites in some."""
    data = recorded(seed, (9, 14, 11))
    q, v = on_steps(q_table(seed, data), data)
    arrays = data.arrays
    n, ids = len(arrays.behaviour_ids), arrays.behaviour_ids
    logs = reference.log_weights("fused", arrays)
    cut: Rows = [[] for _ in logs]
    for t in range(reference.horizon(logs)):
        mean = math.fsum(math.exp(reference.at(row, t)) for row in logs) / n
        for row, out in zip(logs, cut, strict=True):
            if t < len(row):
                out.append(min(row[t], math.log(math.sqrt(n) * mean)))
    zero = np.zeros(q.size)
    plain, psi = doubly_robust(logs, arrays, zero, zero, 0.9, True)
    want, c = plain, 0.0
    if with_q:
        other, phi = doubly_robust(cut, arrays, q, v, 0.9, True)
        x = np.array(doubly_robust(cut, arrays, zero, zero, 0.9, True)[1])
        y = x - np.array(phi)
        for b in range(3):
            x[ids == b] -= x[ids == b].mean()
            y[ids == b] -= y[ids == b].mean()
        c = min(max(float(x @ y / (y @ y)), 0.0), 1.0)
        want = plain - c * (plain - other)
        psi = [a - c * (a - b) for a, b in zip(psi, phi, strict=True)]
    got = evaluate_log_probs(
        *arrays, estimators="auto", gamma=0.9, baseline=(q, v) if with_q else None
    )["auto"]
    assert got.value == pytest.approx(want, rel=1e-11, abs=1e-12)
    np.testing.assert_allclose(got.influence, psi, rtol=1e-9, atol=1e-10)
    assert got.report.get("c", 0.0) == pytest.approx(c, abs=1e-10)
    share = np.mean(np.concatenate(logs) > np.concatenate(cut))
    assert got.report.get("truncated", share) == pytest.approx(share)
    assert got.diagnostics.ess == pytest.approx(min(reference.ess_curve(logs)))


def test_truncation_happens_in_the_data_of_the_test_above() -> None:
    shares = []
    for seed in range(4):
        data = recorded(seed, (9, 14, 11))
        baseline = on_steps(q_table(seed, data), data)
        found = evaluate_log_probs(*data.arrays, estimators="auto", baseline=baseline)
        shares.append(found["auto"].report["truncated"])
    assert max(shares) > 0


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_with_any_fixed_q_the_plain_ones_are_unbiased(seed: int, gamma: float) -> None:
    """Exact: every trajectory of every behaviour with its probability."""
    rng = np.random.default_rng(seed)
    mdp = small_mdps.random_mdp(rng, horizon=3, rewards=(-1.0, 2.0))
    behaviours = [small_mdps.random_policy(rng, mdp, peak=0.7) for _ in range(3)]
    target = small_mdps.random_policy(rng, mdp)
    population = small_mdps.population(mdp, target, behaviours, (2, 1, 3))
    table = rng.normal(size=(mdp.horizon, *target.shape))
    states = np.concatenate([p.states for p in population.episodes]).astype(np.int64)
    actions = np.concatenate([p.actions for p in population.episodes]).astype(np.int64)
    steps = np.concatenate([np.arange(len(p.states)) for p in population.episodes])
    baseline = table[steps, states, actions], (target * table).sum(-1)[steps, states]
    truth = small_mdps.value(mdp, target, gamma)
    found = evaluate_log_probs(
        *population.data, estimators=["DR", "FDR", "BIS"], gamma=gamma, baseline=baseline
    )
    for name in ("DR", "FDR"):
        mean, variance = population.moments(np.asarray(found[name].influence))
        assert mean == pytest.approx(truth, abs=1e-12), name
        assert variance > 0


@pytest.mark.parametrize("name", [*DOUBLY, "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_a_right_q_leaves_the_noise_of_the_world_alone(seed: int, name: str) -> None:
    """With certain rewards and moves and the exact q every episode says the same: J itself."""
    data = recorded(seed, states=1, rewards=(1.5,), early=False, horizon=4)
    baseline = on_steps(exact_q(data, 0.9), data)
    found = evaluate_log_probs(*data.arrays, estimators=name, gamma=0.9, baseline=baseline)[name]
    truth = small_mdps.value(data.mdp, data.target.table, 0.9)
    assert found.value == pytest.approx(truth, rel=1e-12)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "same"), [("DR", "BIS"), ("WDR", "NBIS"), ("FDR", "FIS"), ("FWDR", "NFIS")]
)
def test_a_q_of_zero_changes_no_bit(seed: int, name: str, same: str) -> None:
    data = recorded(seed)
    zero = np.zeros(data.arrays.rewards.size)
    for interval in ("ess-t", "percentile", "bca"):
        found = evaluate_log_probs(
            *data.arrays, estimators=[name, same], interval=interval, baseline=(zero, zero)
        )
        assert found[name].value == found[same].value
        assert found[name].interval == found[same].interval
        np.testing.assert_array_equal(found[name].influence, found[same].influence)


@pytest.mark.parametrize("seed", range(5))
def test_auto_varies_no_more_than_either_part(seed: int) -> None:
    """c is the least-squares share, so the spread within behaviours is at most that of both."""
    data = recorded(seed, (20, 25, 30))
    baseline = on_steps(exact_q(data, 1.0) + 0.3 * q_table(seed, data), data)
    found = evaluate_log_probs(*data.arrays, estimators=["auto", "NFIS", "FWDR"], baseline=baseline)
    auto = found["auto"]
    if auto.report["truncated"] == 0:
        least = min(found["NFIS"].standard_error, found["FWDR"].standard_error)
        # the error counts with n - 1 in each behaviour, c with n: equal up to that
        assert auto.standard_error <= least * math.sqrt(20 / 19)
    assert 0.0 <= auto.report["c"] <= 1.0


def test_where_no_correction_is_taken_a_huge_one_does_no_harm() -> None:
    data = recorded(3, (9, 14, 11))
    huge = np.where(np.arange(len(data.arrays.rewards)) % 2, 1e307, -1e307)
    found = evaluate_log_probs(
        *data.arrays, estimators=["auto", "NFIS"], interval="percentile", baseline=(huge, huge)
    )
    assert found["auto"].report["c"] == 0.0
    assert found["auto"].value == found["NFIS"].value
    assert found["auto"].interval == found["NFIS"].interval


@pytest.mark.parametrize("interval", ["ess-t", "bca"])
def test_where_the_correction_only_adds_noise_auto_is_nfis(interval: str) -> None:
    """c is 0: nothing is left of the model, and nothing of the weights that were cut."""
    data = recorded(4, (9, 14, 11))
    q, v = on_steps(-exact_q(data, 1.0), data)  # of the wrong sign
    found = evaluate_log_probs(
        *data.arrays, estimators=["auto", "NFIS"], interval=interval, baseline=(q, v)
    )
    auto, plain = found["auto"], found["NFIS"]
    assert auto.report["c"] == 0.0
    assert auto.report["truncated"] > 0.0
    assert (auto.value, auto.interval) == (plain.value, plain.interval)
    bare = evaluate_log_probs(*data.arrays, estimators="auto", interval=interval)["auto"]
    assert (bare.value, bare.interval) == (plain.value, plain.interval)


@pytest.mark.parametrize("name", WITH_Q)
@pytest.mark.parametrize("interval", ["percentile", "bca"])
def test_replicates_are_the_whole_estimator_on_drawn_episodes(name: str, interval: str) -> None:
    data = recorded(2, (6, 7, 8))
    q, v = on_steps(q_table(2, data), data)
    options = plain_options(interval=interval, resamples=5, seed=3)
    got = evaluate_log_probs(*data.arrays, name, baseline=(q, v), **options)[name]
    assert got.replicates is not None
    if name == "auto":
        assert 0 < got.report["c"] < 1
        assert got.report["truncated"] == 0
    draws = Resamples(data.arrays.behaviour_ids, 5, 3)
    counts = np.rint(draws.factors(0, 21) * (5 * 6 * 7))  # n_k - 1 of each are drawn: whole numbers
    lengths = np.diff(data.arrays.offsets)
    starts = data.arrays.offsets[:-1]
    for drawn, replicate in zip(counts.astype(int), got.replicates, strict=True):
        chosen = np.repeat(np.arange(drawn.size), drawn)
        rows = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in chosen])
        again = evaluate_log_probs(
            *pick(data.arrays, chosen),
            estimators=[name, "NFIS", "FWDR"],
            baseline=(q[rows], v[rows]),
        )
        if name == "auto":  # c stays as it was found
            if got.report["truncated"] or again["auto"].report["truncated"]:
                continue
            c = got.report["c"]
            want = (1 - c) * again["NFIS"].value + c * again["FWDR"].value
        else:
            want = again[name].value
        assert replicate == pytest.approx(want, rel=1e-9, abs=1e-10)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([2.0, -0.5, 1e3]))
def test_rewards_and_q_scale_everything(seed: int, scale: float) -> None:
    data = recorded(seed, (4, 6))
    q, v = on_steps(q_table(seed, data), data)
    arrays = data.arrays
    one = evaluate_log_probs(*arrays, estimators=WITH_Q, baseline=(q, v))
    scaled = arrays._replace(rewards=arrays.rewards * scale)
    two = evaluate_log_probs(*scaled, estimators=WITH_Q, baseline=(q * scale, v * scale))
    for name in WITH_Q:
        assert two[name].value == pytest.approx(scale * one[name].value, rel=1e-9, abs=1e-9)
        error = abs(scale) * one[name].standard_error
        assert two[name].standard_error == pytest.approx(error, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 1e-200])
@pytest.mark.parametrize("name", WITH_Q)
def test_a_discount_that_forgets(name: str, gamma: float) -> None:
    data = recorded(2)
    q, v = on_steps(q_table(2, data), data)
    got = evaluate_log_probs(*data.arrays, estimators=name, gamma=gamma, baseline=(q, v))[name]
    assert math.isfinite(got.value)
    if name == "FDR" and gamma == 0.0:
        first = data.arrays.offsets[:-1]
        logs = [row[0] for row in reference.log_weights("fused", data.arrays)]
        want = np.mean(v[first] + np.exp(logs) * (data.arrays.rewards - q)[first])
        assert got.value == pytest.approx(want)


def test_both_doors_agree_on_a_given_baseline() -> None:
    data = recorded(4, held_out=True)
    q, v = on_steps(q_table(4, data), data)
    one = evaluate(data.trajectories, data.target, estimators=WITH_Q, q_model=Baseline(q, v))
    two = evaluate_log_probs(*data.arrays, estimators=WITH_Q, baseline=(q, v), regime="held-out")
    for name in WITH_Q:
        if name in ("DM", "MDR", "auto"):  # arrays do not tell how often the target visits a state
            continue
        assert one[name].value == pytest.approx(two[name].value, rel=1e-12)
        assert one[name].standard_error == pytest.approx(two[name].standard_error, rel=1e-12)
        assert one[name].report == pytest.approx(two[name].report, rel=1e-12)
        assert one[name].verdict.colour == two[name].verdict.colour


def test_the_direct_method_says_what_its_interval_is_blind_to() -> None:
    data = recorded(5, (60, 60, 60), held_out=True)
    q, v = on_steps(q_table(5, data), data)
    got = evaluate_log_probs(*data.arrays, estimators="DM", baseline=(q, v))["DM"]
    assert got.value == pytest.approx(v[data.arrays.offsets[:-1]].mean())
    assert got.verdict.colour == "amber"
    assert "q model" in str(got.verdict)


@pytest.mark.parametrize("name", [n for n, c in ESTIMATORS.items() if c.baseline])
def test_without_a_q_model_it_is_refused(name: str) -> None:
    data = recorded(1)
    with pytest.raises(ValueError, match=f"estimators has '{name}', which needs"):
        evaluate_log_probs(*data.arrays, estimators=name)
    with pytest.raises(ValueError, match=f"estimators has '{name}', which needs a q model"):
        evaluate(data.trajectories, data.target, estimators=name, q_model=None)


def test_bad_baselines_are_named() -> None:
    data = recorded(1)
    steps = data.arrays.rewards.size
    good, bad = np.zeros(steps), np.zeros(steps)
    bad[data.arrays.offsets[3] + 1] = np.nan
    with pytest.raises(ValueError, match="baseline q is nan at episode 3, step 1"):
        evaluate_log_probs(*data.arrays, estimators="DR", baseline=(bad, good))
    with pytest.raises(ValueError, match=r"baseline q has shape \(2,\)"):
        evaluate_log_probs(*data.arrays, estimators="DR", baseline=(good[:2], good))
    with pytest.raises(TypeError, match=r"q_model is the class LinearQ: give LinearQ\(\)"):
        evaluate(data.trajectories, data.target, estimators="DR", q_model=LinearQ)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"file\.ope"):
        evaluate("file.ope", data.target)
    named = evaluate(data.trajectories, data.target, estimators="DM", q_model="tabular")["DM"]
    model = evaluate(data.trajectories, data.target, estimators="DM", q_model=TabularQ())["DM"]
    assert named.value == model.value
    with pytest.raises(ValueError, match="q_model is 'lineal'; give 'default', 'tabular'"):
        evaluate(data.trajectories, data.target, estimators="DR", q_model="lineal")
    with pytest.raises(ValueError, match=r"'DM'.* interval='betting' bounds weighted"):
        evaluate(
            data.trajectories,
            data.target,
            estimators="DM",
            q_model=Baseline(good, good),
            interval=Betting((-1, 2)),
        )
