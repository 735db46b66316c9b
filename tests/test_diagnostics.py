"""Diagnostics by hand on tiny data, and the verdict in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from ope_gym import Weighting, evaluate, evaluate_log_probs
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import WEIGHTED
from ope_gym.inference.diagnostics import Diagnostics, Verdict, judge, pareto_k
from ope_gym.policies import DiagonalGaussian
from tests import small_mdps
from tests.builders import LogProbOnly, Table, buffer_of, one_step, recorded
from tests.reference import Data


def by_weights() -> Data:
    """Three episodes of two behaviours whose basic weights are 2 1 | 1 | 4 .5 .25."""
    ratio = np.log([2, 1 / 2, 1, 4, 1 / 8, 1 / 2])
    rows = np.full((2, 6), math.log(0.2))
    return Data(rows[0] + ratio, rows, np.array([0, 0, 1]), np.arange(6.0), np.array([0, 2, 3, 6]))


def test_every_field_by_hand() -> None:
    got = evaluate_log_probs(
        *by_weights(), estimators=["BIS", "BCIS"], weighting=Weighting(cap=1.5)
    )
    d = got["BIS"].diagnostics
    curve = [7**2 / 21, 2.5**2 / 2.25, 2.25**2 / 2.0625]  # 2 1 4, then 1 1 .5, then 1 1 .25
    np.testing.assert_allclose(d.ess_curve, curve, rtol=1e-14)
    assert d.ess_step == 0
    assert d.ess == pytest.approx(49 / 21)
    np.testing.assert_allclose(d.behaviour_shares, [2 / 2.25, 0.25 / 2.25], rtol=1e-14)
    np.testing.assert_allclose(d.behaviour_ess, [2, 1], rtol=1e-14)
    assert d.max_share == pytest.approx(4 / 7)
    assert d.mean_weight == pytest.approx(0.75)
    assert d.uncovered == pytest.approx(0.25)
    np.testing.assert_allclose(d.log_last, np.log([1, 1, 0.25]), atol=1e-15)
    assert d.capped_share == 0
    assert math.isnan(d.pareto_k)
    assert d.support_violations is None  # the arrays do not say
    assert d.calibration is None
    capped = got["BCIS"].diagnostics
    assert capped.capped_share == pytest.approx(2 / 6)
    assert capped.ess_curve[0] == pytest.approx(4**2 / (1.5**2 + 1 + 1.5**2))
    assert capped.max_share == pytest.approx(1 / 2.25)  # of the last step now


def test_a_behaviour_without_episodes_has_no_share() -> None:
    data = by_weights()
    idle = data._replace(behaviour_log_probs=np.vstack([data.behaviour_log_probs, np.zeros(6)]))
    d = evaluate_log_probs(*idle, estimators="NFIS")["NFIS"].diagnostics
    assert d.behaviour_shares[2] == 0
    assert d.behaviour_ess[2] == 0
    assert d.behaviour_shares.sum() == pytest.approx(1)


def test_the_mean_weight_averages_to_one_and_falls_short_where_the_data_do_not_reach() -> None:
    target = np.array([[0.5, 0.5]])
    for behaviour, reached in ((np.array([[0.9, 0.1]]), 1.0), (np.array([[1.0, 0.0]]), 0.5)):
        every = small_mdps.population(small_mdps.bandit([1.0, 2.0]), target, [behaviour], (1,))
        got = evaluate_log_probs(*every.data, estimators="FIS")["FIS"].diagnostics
        mean, _ = every.moments(np.exp(got.log_last))
        assert mean == pytest.approx(reached)


# --- Pareto k ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [-0.3, 0.1, 0.5, 0.9, 1.5])
def test_pareto_k_of_generalised_pareto_samples(shape: float) -> None:
    """The tail of such a sample has the shape of the whole; the prior pulls a little to 1/2."""
    found = [
        pareto_k(scipy.stats.genpareto.rvs(shape, size=20_000, random_state=seed))
        for seed in range(8)
    ]
    tail = 3 * math.sqrt(20_000)
    pulled = (tail * shape + 5) / (tail + 10)
    error = math.sqrt((1 + shape) ** 2 / tail / len(found))
    assert np.mean(found) == pytest.approx(pulled, abs=4 * error + 0.03)


def test_pareto_k_depends_on_no_scale_and_no_order() -> None:
    w = np.random.default_rng(0).pareto(1.5, size=400)
    k = pareto_k(w)
    assert pareto_k(1e-200 * w[::-1]) == pytest.approx(k, rel=1e-9)
    assert pareto_k(1e200 * w) == pytest.approx(k, rel=1e-9)


@pytest.mark.parametrize(
    "weights", [np.ones(24), np.arange(24.0), np.ones(500), np.append(np.zeros(499), 1.0)]
)
def test_pareto_k_of_few_or_equal_weights_is_undefined(weights: Any) -> None:
    assert math.isnan(pareto_k(weights))


def test_pareto_k_of_the_largest_range_of_weights() -> None:
    assert math.isfinite(pareto_k(np.exp(-np.linspace(0, 708, 1000))))


# --- calibration ------------------------------------------------------------------------------


def acted(rng: np.random.Generator, acting: Any, recorded_as: Any, n: int = 60) -> Trajectories:
    """One-step episodes in two states, propensities as the recorded policy gives them."""
    states = rng.integers(2, size=n)
    actions = (rng.random(n) < acting[states, 1]).astype(int)
    episodes = [
        small_mdps.Path((s,), (a,), (1.0,), 1.0)
        for s, a in zip(states.tolist(), actions.tolist(), strict=True)
    ]
    return buffer_of(episodes, [0] * n, [recorded_as]).view()


RIGHT, WRONG = np.array([[0.7, 0.3], [0.1, 0.9]]), np.array([[0.3, 0.7], [0.5, 0.5]])


def test_calibration_by_hand() -> None:
    data = acted(np.random.default_rng(0), RIGHT, RIGHT, n=5)
    states, actions = data.observations, data.actions
    entropy = -np.sum(RIGHT * np.log(RIGHT), axis=1)[states]
    variance = np.sum(RIGHT * np.log(RIGHT) ** 2, axis=1)[states] - entropy**2
    z = np.sum(np.log(RIGHT[states, actions]) + entropy) / math.sqrt(variance.sum())
    got = evaluate(data, Table(WRONG), estimators="FIS")["FIS"].diagnostics.calibration
    assert got is not None
    assert got == pytest.approx([z])


def test_calibration_is_about_standard_normal_when_all_is_right() -> None:
    rng = np.random.default_rng(1)
    z = []
    for _ in range(200):
        data = acted(rng, RIGHT, RIGHT)
        calibration = evaluate(data, Table(RIGHT), estimators="BIS")["BIS"].diagnostics.calibration
        assert calibration is not None
        z.append(float(calibration[0]))
    assert np.mean(z) == pytest.approx(0, abs=4 / math.sqrt(200))
    assert np.var(z) == pytest.approx(1, abs=4 * math.sqrt(2 / 200))


def test_calibration_finds_a_wrongly_recorded_policy() -> None:
    """The propensities agree with the snapshot, and yet another policy acted."""
    data = acted(np.random.default_rng(2), RIGHT, WRONG)
    got = evaluate(data, Table(WRONG), estimators="NFIS")["NFIS"]
    assert got.diagnostics.calibration is not None
    assert abs(got.diagnostics.calibration[0]) > 4
    assert got.diagnostics.mean_weight == pytest.approx(1)  # which sees nothing
    assert got.verdict.colour == "red"
    assert "the propensities of policy 0 look wrongly recorded (Z = " in str(got.verdict)


def test_calibration_of_deterministic_and_idle_and_opaque_policies() -> None:
    sure, never, unknown = np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]]), LogProbOnly
    step = small_mdps.Path((0,), (0,), (1.0,), 1.0)
    buffer = buffer_of([step, step], [0, 0], [sure, never])
    k = buffer.add_policy(unknown(lambda states, actions: np.full(len(states), -1.0)))
    buffer.append(np.array([0]), np.array([1]), [1.0], [-1.0], k, terminated=True)
    got = evaluate(buffer, Table(never), estimators=["BIS", "FIS"])
    calibration = got["BIS"].diagnostics.calibration
    assert calibration is not None
    assert calibration[0] == 0  # certain, and did what it had to
    assert np.isnan(calibration[1:]).all()  # one never acted, one cannot say
    assert got["BIS"].diagnostics.support_violations is None


def test_a_deterministic_policy_that_did_something_else_is_infinitely_surprising() -> None:
    sure = np.array([[1.0, 0.0]])
    step = small_mdps.Path((0,), (0,), (1.0,), 1.0)
    data = buffer_of([step] * 3, [0] * 3, [sure]).view()
    lied = dataclasses.replace(data, log_probs=np.array([0.0, -0.5, 0.0]))
    got = evaluate(lied, Table(sure), estimators="NFIS")["NFIS"]
    assert got.diagnostics.calibration is not None
    assert np.isinf(got.diagnostics.calibration[0])
    assert got.verdict.colour == "red"
    assert "Z = -inf" in str(got.verdict)


def test_calibration_of_continuous_actions() -> None:
    """The log density of a Gaussian is a constant minus half a chi-square."""
    rng = np.random.default_rng(3)
    acting = DiagonalGaussian(np.eye(1), np.zeros(1), np.zeros(1))
    x = rng.normal(size=(500, 1))
    for shift, wrong in ((0.0, False), (1.0, True)):
        actions = acting.sample(x, rng) + shift
        data = Trajectories.from_arrays(
            x,
            actions,
            np.ones(500),
            acting.log_prob(x, actions),
            offsets=np.arange(501),
            policies=[acting],
            terminated=True,
        )
        got = evaluate(data, acting, estimators="FIS")["FIS"].diagnostics
        assert got.calibration is not None
        assert (abs(got.calibration[0]) > 4) == wrong
        assert got.support_violations is None


# --- support ----------------------------------------------------------------------------------


def test_support_of_one_behaviour_and_of_all() -> None:
    """Policy 0 never takes action 1 in state 0, where policy 1 does; nobody takes action 2."""
    zero = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    one = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    episodes = [
        small_mdps.Path((0, 1, 0), (0, 0, 0), (1.0, 1.0, 1.0), 1.0),
        small_mdps.Path((0, 1), (0, 1), (1.0, 1.0), 1.0),
    ]
    data = buffer_of(episodes, [0, 1], [zero, one])
    within = Table(np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]))
    beyond = Table(np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]))
    for target, basic, fused in ((within, 2, 0), (beyond, 4, 2)):
        got = evaluate(data, target)
        for name, composition in WEIGHTED.items():
            count = basic if composition.scheme == "basic" else fused
            assert got[name].diagnostics.support_violations == count, name
        if fused:
            words = f"at {fused} visited steps the target may take an action that no usable"
            assert words in str(got["NFIS"].verdict)
    alone = data.select(policies=0)
    assert evaluate(alone, within)["FIS"].diagnostics.support_violations == 2


@pytest.mark.parametrize("opaque", ["behaviour", "target"])
def test_support_is_unknown_where_a_policy_does_not_tell_all_its_probabilities(opaque: str) -> None:
    half = np.array([[0.5, 0.5]])
    buffer = buffer_of([small_mdps.Path((0,), (0,), (1.0,), 1.0)] * 2, [0, 0], [half])
    silent = LogProbOnly(Table(half).log_prob)
    target: Any = Table(half)
    if opaque == "behaviour":
        k = buffer.add_policy(silent)
        buffer.append(np.array([0]), np.array([1]), [1.0], [math.log(0.5)], k, terminated=True)
    else:
        target = silent
    got = evaluate(buffer, target, estimators=["BIS", "FIS"])
    for estimate in got.values():
        assert estimate.diagnostics.support_violations is None
        assert estimate.value == pytest.approx(1)


# --- the verdict ------------------------------------------------------------------------------


def diagnostics(ess: float = 100.0, **changes: Any) -> Diagnostics:
    fields: dict[str, Any] = {
        "ess": ess,
        "ess_step": 3,
        "ess_curve": np.array([200.0, 150.0, 120.0, ess]),
        "behaviour_shares": np.array([0.25, 0.75]),
        "behaviour_ess": np.array([30.0, 60.0]),
        "max_share": 0.01,
        "mean_weight": 1.0,
        "pareto_k": 0.2,
        "capped_share": 0.0,
        "log_last": np.zeros(200),
    }
    return Diagnostics(**(fields | changes))


def verdict(d: Diagnostics, value: float = 1.0, error: float = 0.1, n: int = 200) -> Verdict:
    return judge(d, value, error, np.array([n // 2, n - n // 2]), ["policy 4", "policy 9"])


@pytest.mark.parametrize(
    ("ess", "share", "colour", "words"),
    [
        (40.0, 0.05, "green", "effective sample size 40"),
        (39.9, 0.05, "amber", "effective sample size 40 at step 3, below 40"),
        (10.0, 0.05, "amber", "effective sample size 10 at step 3, below 40"),
        (9.99, 0.05, "red", "effective sample size 10.0 at step 3 is below 10"),
        (40.0, 0.051, "amber", "one episode holds 5.1% of the weight"),
        (5.0, 0.5, "red", "effective sample size 5.0"),
        (0.0, 1.0, "red", "from step 3 on all weights are 0"),
    ],
)
def test_thresholds(ess: float, share: float, colour: str, words: str) -> None:
    got = verdict(diagnostics(ess, max_share=share))
    assert got.colour == colour
    assert words in str(got)
    assert str(got).startswith(f"{colour}: ")
    assert bool(got.advice) == (ess < 40)


def test_pareto_k_is_never_the_judge() -> None:
    assert verdict(diagnostics(pareto_k=5.0)).colour == "green"


def test_reasons_add_up() -> None:
    got = verdict(
        diagnostics(20.0, max_share=0.2, support_violations=7, calibration=np.array([0.1, np.nan]))
    )
    assert got.colour == "amber"
    assert len(got.reasons) == 3
    careful = judge(diagnostics(), 1.0, 0.1, np.array([200]), ["policy 0"], cautions=["a caution"])
    assert careful.colour == "amber"
    assert careful.reasons == ("a caution",)
    noted = judge(diagnostics(), 1.0, 0.1, np.array([200]), ["policy 0"], notes=["a note"])
    assert noted.colour == "red"
    assert noted.reasons == ("a note",)
    assert verdict(diagnostics(), value=math.inf).reasons[0].startswith("the weights overflow")
    assert "one trajectory only" in str(verdict(diagnostics(1.0), error=math.nan, n=1))
    assert "one trajectory per behaviour" in str(verdict(diagnostics(), error=math.nan))


def test_advice_names_the_behaviour_that_helps_most_and_how_many_episodes() -> None:
    got = verdict(diagnostics(22.0))  # 18 short; an episode of policy 9 is worth .6
    assert got.advice == ("collect about 30 more episodes of policy 9",)
    poor = verdict(diagnostics(3.0, behaviour_ess=np.array([2.0, 1.0])))
    assert poor.advice == ("collect about 37 episodes of the target itself",)
    none = verdict(
        diagnostics(0.0, behaviour_ess=np.zeros(2), behaviour_shares=np.zeros(2)), value=math.nan
    )
    assert none.advice == ("collect about 40 episodes of the target itself",)


def test_advice_is_about_right() -> None:
    """Episodes of the advised policy, in the advised number, lift the verdict to green."""
    rng = np.random.default_rng(4)
    data = acted(rng, RIGHT, RIGHT, n=25)
    target = Table(np.array([[0.6, 0.4], [0.2, 0.8]]))
    first = evaluate(data, target, estimators="NFIS")["NFIS"]
    assert first.verdict.colour == "amber"
    (advice,) = first.verdict.advice
    assert advice.endswith("more episodes of policy 0")
    more = data.merge(acted(rng, RIGHT, RIGHT, n=int(advice.split()[2])))
    second = evaluate(more, target, estimators="NFIS")["NFIS"]
    assert second.diagnostics.ess == pytest.approx(40, abs=3)


def test_a_logged_number_that_the_snapshot_contradicts_is_named() -> None:
    data = recorded(5, (3, 3)).trajectories
    row = int(data.offsets[2]) if data.lengths[2] == 1 else int(data.offsets[2]) + 1
    episode, step = 2, row - int(data.offsets[2])
    logs = data.log_probs.copy()
    logs[row] -= 0.1
    wrong = dataclasses.replace(data, log_probs=logs)
    target = Table(np.full((3, 3), 1 / 3))
    got = evaluate(wrong, target, estimators=["BIS", "FIS"])["FIS"]
    assert got.verdict.colour == "red"
    assert (
        f"logged propensities contradict the policy: episode {episode}, step {step} has "
        f"{logs[row]:.6g} but policy {data.policy_ids[row]} gives {data.log_probs[row]:.6g}"
    ) in str(got.verdict)
    logs[row] += 0.1 - 1e-6  # what float32 networks differ by
    near = dataclasses.replace(data, log_probs=logs)
    assert "contradict" not in str(evaluate(near, target, estimators="FIS")["FIS"].verdict)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_snapshot_that_gives_no_number_for_what_it_did_is_a_contradiction(value: float) -> None:
    half = np.array([[0.5, 0.5]])
    data = buffer_of([small_mdps.Path((0,), (0,), (1.0,), 1.0)] * 2, [0, 0], [half]).view()
    broken = LogProbOnly(lambda states, actions: np.full(len(states), value))
    wrong = dataclasses.replace(data, policies=(broken,))
    got = evaluate(wrong, Table(half), estimators="FIS")["FIS"]
    assert "contradict the policy: episode 0, step 0" in str(got.verdict)


def test_the_order_of_shares_is_that_of_the_behaviours() -> None:
    data = one_step([0.5, 0.1, 0.5], [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], [1, 0, 1], [1, 1, 1])
    d = evaluate_log_probs(*data, estimators="BIS")["BIS"].diagnostics
    np.testing.assert_allclose(d.behaviour_shares, [0.2 / 2.2, 2 / 2.2], rtol=1e-14)


def test_a_cap_that_bites_is_never_green() -> None:
    assert verdict(diagnostics(capped_share=0.0)).colour == "green"
    cut = verdict(diagnostics(capped_share=0.031))
    assert cut.colour == "amber"
    assert "3.1% of the weights were clipped at the cap" in str(cut)
    assert verdict(diagnostics(capped_share=0.031, mean_weight=0.7)).colour == "red"


def test_a_mean_weight_far_below_one_is_named() -> None:
    assert verdict(diagnostics(mean_weight=0.85)).colour == "green"
    assert verdict(diagnostics(mean_weight=0.7)).colour == "amber"
    missing = verdict(diagnostics(mean_weight=0.5))
    assert missing.colour == "red"
    assert "the mean weight is 0.50 instead of 1" in str(missing)
