"""Diagnostics by hand on tiny data, and the verdict in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import scipy.stats

from ope_gym import Weighting, evaluate, evaluate_log_probs
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.table import WEIGHTED
from ope_gym.inference.diagnostics import Diagnostics, pareto_k
from ope_gym.inference.estimate import Behaviour, Sample
from ope_gym.inference.judging import Facts, judge
from ope_gym.policies import DiagonalGaussian, LinearSigmoid, UnknownPolicy
from ope_gym.verdict import Reason, Verdict
from ope_gym.weights.propensities import PropensityReport
from tests import small_mdps
from tests.builders import LogProbOnly, Table, buffer_of, one_step, recorded
from tests.reference import Data
from wrappers import RecordTrajectories, collect


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


@pytest.mark.parametrize("shape", [-0.3, 0.5, 1.5])
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
        got = evaluate(data, target, "paper")
        for name, composition in WEIGHTED.items():
            count = basic if composition.scheme == "basic" else fused
            assert got[name].diagnostics.support_violations == count, name
        alarm = "of its episodes the target takes an action that no usable"
        assert (alarm in str(got["NFIS"].verdict)) == bool(fused)
    alone = data.select(policies=0)
    assert evaluate(alone, within, "FIS")["FIS"].diagnostics.support_violations == 2


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


def chain(rng: np.random.Generator, temperature: float, n: int) -> tuple[Any, Any, Any, Any, Any]:
    """Return arrays of 20-step episodes of two policies whose actions had another temperature.

    The recorded log-probabilities are those at temperature 1; 6 states, 3 actions, random logits.
    """
    logits = np.random.default_rng(0).normal(size=(3, 6, 3))  # of two loggers and the target,
    logits[2] = logits[:2].sum(axis=0)  # which likes what they like
    logs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    ids, steps = np.arange(n) % 2, 20 * n
    states, acting = rng.integers(6, size=steps), np.repeat(ids, 20)
    preferred = logs[acting, states] / temperature + rng.gumbel(size=(steps, 3))
    seen = logs[:, states, np.argmax(preferred, axis=1)]
    return seen[2], seen[:2], ids, rng.normal(size=steps), np.arange(n + 1) * 20


@pytest.mark.parametrize("temperature", [1 / 1.3, 1.3])
def test_arrays_with_a_wrong_temperature_are_found(temperature: float) -> None:
    """Ratios of each step average to 1 if the propensities are right; nothing else tells."""
    rng = np.random.default_rng(11)
    found = 0
    for _ in range(30):
        arrays = chain(rng, temperature, 400)
        verdict = evaluate_log_probs(*arrays, estimators="NFIS")["NFIS"].verdict
        wrong = bool(codes(verdict) & {"ratios_high", "ratios_low"})
        found += wrong
        assert verdict.colour == "red" or not wrong
    assert found >= 24


def test_right_arrays_raise_no_alarm() -> None:
    rng = np.random.default_rng(12)
    for _ in range(150):
        arrays = chain(rng, 1.0, 200)
        found = evaluate_log_probs(*arrays, estimators="NFIS")["NFIS"]
        assert not codes(found.verdict) & {"ratios_high", "ratios_low", "mean_weight_high"}
        assert not codes(found.verdict) & {"mean_weight_very_low"}


def test_steps_that_explore_too_seldom_to_be_seen_raise_no_alarm() -> None:
    """A sure target, and a behaviour that does something else in one step of a thousand."""
    logs = np.full((1, 500), math.log(0.999))
    got = evaluate_log_probs(np.zeros(500), logs, [0] * 50, np.ones(500), np.arange(51) * 10)
    assert not codes(got["NFIS"].verdict) & {"ratios_high", "ratios_low"}


def test_a_wrong_temperature_of_all_policies_is_found_from_all_of_them_together() -> None:
    """Twenty policies with ten one-step episodes each: none of them tells by itself."""
    rng = np.random.default_rng(13)
    logits = rng.normal(size=(20, 2, 4))
    tables = [np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in logits]
    ids = np.repeat(np.arange(20), 20).tolist()
    for temperature, wrong in ((1.0, False), (0.6, True)):
        sharp = np.exp(logits / temperature)
        sharp /= sharp.sum(axis=2, keepdims=True)
        paths = []
        for k in ids:
            state = int(rng.integers(2))
            action = int(rng.choice(4, p=sharp[k, state]))
            paths.append(small_mdps.Path((state,), (action,), (1.0,), 1.0))
        got = evaluate(buffer_of(paths, ids, tables), Table(tables[0]), "NFIS", origin="fixed")
        found = {code for code in codes(got["NFIS"].verdict) if code.startswith("propensities")}
        assert found <= {"propensities_wrong_together", "propensities_wrong_squared"}
        assert bool(found) == wrong


def test_the_missing_mass_is_the_share_of_episodes_that_leave_the_support() -> None:
    """Each path of the loggers once in four: the target goes to state 0 with .7, leaves with .2."""
    logger = np.array([[1.0, 0.0], [0.5, 0.5]])
    target = Table(np.array([[0.8, 0.2], [0.3, 0.7]]))
    paths = [
        small_mdps.Path((1, 1), (0, 0), (0.0, 1.0), 1.0),
        small_mdps.Path((1, 1), (0, 1), (0.0, 2.0), 1.0),
        small_mdps.Path((1, 0), (1, 0), (0.0, 4.0), 1.0),
        small_mdps.Path((1, 0), (1, 0), (0.0, 3.0), 1.0),
    ]
    for times, colour in ((1, "red"), (20, "red")):
        data = buffer_of(paths * times, [0] * 4 * times, [logger], horizon=2)
        got = evaluate(data, target, ["NFIS", "BIS"], origin="fixed")
        for estimate in got.values():
            assert estimate.diagnostics.missing_mass == pytest.approx(0.14)
            assert estimate.verdict.colour == colour
            assert "in 14.0 % of its episodes the target takes an action" in str(estimate.verdict)
    found = got["NFIS"]
    whole = evaluate(data, Table(np.array([[1.0, 0.0], [0.3, 0.7]])), "NFIS", origin="fixed")
    plain = whole["NFIS"].interval  # the same without the part that leaves
    assert found.interval.low < 0.9 * plain.low  # .86 low + .14 · 0
    assert found.interval.high - found.interval.low > 0.14 * 4  # any return from 0 to 4


def test_a_tiny_missing_mass_is_a_note() -> None:
    for mass, colour in ((0.004, "green"), (0.01, "amber"), (0.03, "red")):
        got = verdict(diagnostics(missing_mass=mass, support_violations=3))
        assert got.colour == colour
        assert bool(got.notes) == (colour == "green")


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


def sample(n: int, *plans: tuple[int, ...]) -> Sample:
    """Return a sample of n episodes, as many of each plan."""
    names = [" then ".join(f"policy {k}" for k in plan) for plan in plans]
    return Sample(
        n,
        4 * n,
        np.zeros(n, dtype=np.int64),
        tuple(Behaviour(*named) for named in zip(names, plans, strict=True)),
        np.array([n // 2, n - n // 2]),
        1.0,
        "held-out",
        (),
    )


def codes(verdict: Verdict) -> set[str]:
    return {reason.code for reason in verdict.reasons}


def verdict(
    d: Diagnostics, value: float = 1.0, error: float = 0.1, n: int = 200, **found: Any
) -> Verdict:
    return judge(Facts(value, error, d, sample(n, (4,), (9,)), **found))


@pytest.mark.parametrize(
    ("ess", "share", "colour", "words"),
    [
        (20.0, 0.5, "green", "effective sample size 20"),
        (19.9, 0.05, "amber", "falls to 19.9 of 200 episodes at step 3; 20 would be enough"),
        (4.0, 0.05, "amber", "the effective sample size falls to 4 of 200 episodes at step 3; 20"),
        (3.9, 0.05, "red", "falls to 3.9 of 200 episodes at step 3: too few to use"),
        (0.0, 1.0, "red", "from step 3 on all weights are 0"),
    ],
)
def test_thresholds(ess: float, share: float, colour: str, words: str) -> None:
    got = verdict(diagnostics(ess, max_share=share))
    assert got.colour == colour
    assert words in str(got)
    assert str(got).startswith(f"{colour}: ")
    assert bool(got.advice) == (ess < 20)


def test_pareto_k_is_never_the_judge() -> None:
    assert verdict(diagnostics(pareto_k=5.0)).colour == "green"


def test_reasons_add_up() -> None:
    got = verdict(diagnostics(10.0, support_violations=7, missing_mass=0.01))
    assert got.colour == "amber"
    assert [reason.code for reason in got.reasons] == ["support_thin", "ess_low"]
    careful = verdict(diagnostics(), reasons=(Reason("adaptive"),))
    assert (careful.colour, careful.reasons) == ("amber", (Reason("adaptive"),))
    alarmed = verdict(diagnostics(10.0), reasons=(Reason("adaptive"), Reason("visits_unknown")))
    assert alarmed.colour == "red"
    assert [reason.code for reason in alarmed.reasons] == ["visits_unknown", "adaptive", "ess_low"]
    noted = verdict(diagnostics(), reasons=(Reason("no_past"),))
    assert (noted.colour, noted.against, noted.notes) == ("green", (), (Reason("no_past"),))
    assert codes(verdict(diagnostics(), value=math.inf)) == {"weights_overflow"}
    assert codes(verdict(diagnostics(1.0), error=math.nan, n=1)) == {"one_trajectory"}
    assert codes(verdict(diagnostics(), error=math.nan)) == {"one_trajectory_each"}


def test_without_propensities_nothing_is_green() -> None:
    """Who acted may have seen more than the observations hold, which no data can show."""
    made = recorded(3, (100, 100), held_out=True)
    known = evaluate(made.trajectories, made.target, "DM")["DM"].verdict
    unknown = dataclasses.replace(
        made.trajectories,
        policies=(UnknownPolicy(), UnknownPolicy()),
        log_probs=np.full(made.trajectories.n_steps, np.nan),
    )
    got = evaluate(unknown, made.target, "DM", origin="fixed")["DM"].verdict
    assert "propensities_unknown" not in codes(known)
    assert got.colour == "amber"
    assert "propensities_unknown" in codes(got)


class Always:
    """The same probabilities whatever is observed."""

    def __init__(self, logs: Any) -> None:
        self.logs = np.asarray(logs)

    def probs(self, observations: Any) -> Any:
        return np.tile(np.exp(self.logs), (len(observations), 1))

    def log_prob(self, observations: Any, actions: Any) -> Any:
        return self.logs[actions]

    def sample(self, observations: Any, rng: np.random.Generator) -> Any:
        return (rng.random(len(observations)) > np.exp(self.logs[0])).astype(np.int64)


def test_a_green_verdict_says_how_much_the_episodes_tell() -> None:
    said = "effective sample size 100 of 200 episodes"
    assert str(verdict(diagnostics())) == f"green: {said}"
    sure = verdict(diagnostics(), fresh_episodes=29.3)
    assert str(sure) == f"green: as sure as about 29 fresh episodes of the target ({said})"


def test_one_episode_that_makes_much_of_the_error_is_amber() -> None:
    """The limit is twice the largest share of normal values, 2 ln n / n, or a tenth."""
    limit = 4 * math.log(100) / 100
    assert verdict(diagnostics(influence_share=0.99 * limit)).colour == "green"
    rare = verdict(diagnostics(influence_share=1.2 * limit), fresh_episodes=100.0)
    assert rare.colour == "amber"
    assert "one episode makes up 22 % of the squared error" in str(rare)
    assert rare.advice == (Reason("collect_from_target", episodes=20),)
    many = diagnostics(5000.0, influence_share=0.09)
    assert verdict(many).colour == "green"


def test_advice_is_a_number_of_episodes_of_a_policy() -> None:
    got = verdict(diagnostics(11.0))  # 9 short; an episode of policy 9 is worth .6
    assert got.advice == (Reason("collect_from", episodes=15, behaviour="policy 9"),)
    poor = verdict(diagnostics(3.0, behaviour_ess=np.array([2.0, 1.0])))
    assert poor.advice == (Reason("collect_from_target", episodes=17),)
    none = verdict(
        diagnostics(0.0, behaviour_ess=np.zeros(2), behaviour_shares=np.zeros(2)), value=math.nan
    )
    assert none.advice == (Reason("collect_from_target", episodes=20),)
    learned = verdict(diagnostics(), reasons=(Reason("in_sample"),))
    assert learned.advice == (Reason("hold_out", episodes=20),)


def test_advice_names_nobody_who_cannot_help() -> None:
    """Where the target does what no recorded policy does, more of theirs would not tell."""
    got = verdict(diagnostics(11.0), unsupported=True)
    assert got.advice == (Reason("collect_from_target", episodes=20),)


def test_what_is_no_better_than_a_guess_is_red() -> None:
    assert verdict(diagnostics(), error=0.99, guess=1.0).colour == "green"
    guessed = verdict(diagnostics(), error=1.0, guess=1.0)
    assert guessed.colour == "red"
    assert "no more accurate than a guess between the worst and the best" in str(guessed)


def test_a_model_that_never_saw_the_target_is_a_guess() -> None:
    """All episodes of CartPole end at the limit, under a policy that is certain everywhere."""

    class Certain(LinearSigmoid):
        def probs(self, observations: Any) -> Any:
            return np.eye(2)[super().probs(observations).argmax(axis=1)]

        def log_prob(self, observations: Any, actions: Any) -> Any:
            with np.errstate(divide="ignore"):
                return np.log(self.probs(observations)[np.arange(len(actions)), actions])

        def sample(self, observations: Any, rng: np.random.Generator) -> Any:
            return self.probs(observations).argmax(axis=1)

    env = RecordTrajectories(gym.make("CartPole-v1"))
    rng = np.random.default_rng(0)
    collect(env, Certain(np.array([0.1, 0.5, 2.0, 2.0])), 20, rng, seed=1)
    target = Certain(np.array([0.0, 0.2, 1.0, 1.0]))
    got = evaluate(env, target, ["DM"], origin="fixed")["DM"]
    assert math.isnan(got.fresh_episodes)
    assert got.standard_error > 500.0 / math.sqrt(12.0)
    assert got.verdict.reasons[0] == Reason("guess")


def test_advice_where_the_target_does_what_nobody_did() -> None:
    """Twenty long episodes of one action, and a target that takes the other."""
    rng, n, steps = np.random.default_rng(2), 20, 60
    data = Trajectories.from_arrays(
        rng.normal(size=(n * steps, 2)),
        np.zeros(n * steps, dtype=np.int64),
        np.tile(np.append(np.ones(steps - 1), 0.0), n),
        np.zeros(n * steps),
        offsets=np.arange(n + 1) * steps,
        policies=[Always(np.array([0.0, -np.inf]))],
        terminated=True,
    )
    target = Always(np.array([-np.inf, 0.0]))
    got = evaluate(data, target, ["DM"], q_model="linear", origin="fixed")["DM"]
    assert got.verdict.advice == (Reason("collect_from_target", episodes=20),)


def test_an_alarm_by_squares_says_so() -> None:
    """Policies that are off in different directions, so that their sum says nothing."""
    z = np.array([4.0, -4.0, 3.0, -3.0])
    squared = Reason("propensities_wrong_squared", square=12.5)
    assert PropensityReport(z, 0.1, (), True, {}, {}).reasons == (squared,)
    together = Reason("propensities_wrong_together", z=4.5)
    assert PropensityReport(z, 4.5, (), True, {}, {}).reasons == (together,)


def test_advice_never_names_a_sequence_of_policies() -> None:
    got = judge(Facts(1.0, 0.1, diagnostics(11.0), sample(200, (4, 5), (9, 10, 11))))
    assert got.advice == (Reason("collect_from_target", episodes=9),)


def test_advice_is_about_right() -> None:
    """Episodes of the advised policy, in the advised number, are worth 20 of the target."""
    rng = np.random.default_rng(4)
    data = acted(rng, RIGHT, RIGHT, n=14)
    data = dataclasses.replace(data, rewards=rng.normal(size=data.n_steps))
    target = Table(np.array([[0.6, 0.4], [0.2, 0.8]]))
    first = evaluate(data, target, estimators="NFIS", origin="fixed")["NFIS"]
    assert first.verdict.colour == "amber"
    (advice,) = first.verdict.advice
    assert (advice.code, advice["behaviour"]) == ("collect_from", "policy 0")
    added = acted(rng, RIGHT, RIGHT, n=advice["episodes"])
    added = dataclasses.replace(added, rewards=rng.normal(size=added.n_steps))
    second = evaluate(data.merge(added), target, estimators="NFIS", origin="fixed")["NFIS"]
    have = min(second.diagnostics.ess, second.fresh_episodes)
    assert have == pytest.approx(20, abs=5)


def test_fresh_episodes_are_as_many_as_would_have_this_error() -> None:
    """On-policy it is their number; a constant reward at every other step changes nothing."""
    rng = np.random.default_rng(5)
    half = np.full(120, math.log(0.5))
    rewards = rng.normal(size=120)
    got = evaluate_log_probs(half, [half], [0] * 120, rewards, np.arange(121), ("NFIS", "BIS"))
    for name in ("NFIS", "BIS"):
        assert got[name].fresh_episodes == pytest.approx(120, rel=1e-9)
    assert got.to_dict()["estimates"]["BIS"]["fresh_episodes"] == got["BIS"].fresh_episodes
    discounted = evaluate_log_probs(
        half, [half], [0] * 60, rewards, np.arange(0, 121, 2), "NFIS", gamma=0.5
    )["NFIS"]
    spread = np.var(rewards[::2] + 0.5 * rewards[1::2], ddof=1)
    want = spread / discounted.standard_error**2
    assert discounted.fresh_episodes == pytest.approx(want, rel=1e-9)


def test_fresh_episodes_by_hand_with_weights() -> None:
    data = by_weights()
    got = evaluate_log_probs(*data, estimators="FIS")["FIS"]
    w, returns = np.exp(got.diagnostics.log_last), np.array([1.0, 2.0, 12.0])
    size = w.sum() ** 2 / (w @ w)
    mean = w @ returns / w.sum()
    weighted = w @ (returns - mean) ** 2 / w.sum() * size / (size - 1)
    inside = 0.5 / 1  # 1 and 2 share a behaviour, 12 is alone
    want = (size * weighted + 5 * inside) / (size + 5)
    assert got.fresh_episodes == pytest.approx(want / got.standard_error**2)


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
    assert "3.1 % of the weights were clipped at the cap" in str(cut)
    assert verdict(diagnostics(capped_share=0.031, mean_weight=0.5)).colour == "red"


def test_a_mean_weight_far_below_one_is_named() -> None:
    rng = np.random.default_rng(6)
    for mean, colour, words in (
        (0.85, "green", ""),
        (0.7, "amber", "0.70 instead of 1: the episodes lack some"),
        (0.5, "red", "0.50 instead of 1: the data miss"),
        (1.2, "amber", "1.20 instead of 1: a propensity"),
    ):
        weights = mean * rng.uniform(0.9, 1.1, size=200)
        got = verdict(diagnostics(mean_weight=mean, log_last=np.log(weights)))
        assert got.colour == colour
        assert words in str(got)


def test_a_mean_weight_that_is_low_by_chance_is_no_alarm() -> None:
    """Lognormal weights with sigma 1.5 have mean 1, and most samples of 200 lie below."""
    rng = np.random.default_rng(7)
    low = alarms = 0
    for _ in range(50):
        logs = rng.normal(-1.125, 1.5, size=200)
        d = diagnostics(mean_weight=float(np.exp(logs).mean()), log_last=logs)
        low += d.uncovered > 0.2
        alarms += "mean_weight_very_low" in codes(verdict(d))
    assert low >= 5
    assert alarms <= 2


def test_rounding_is_no_spread() -> None:
    """Equal rewards leave NFIS influence values that are rounding errors, not zeros."""
    rng, n = np.random.default_rng(0), 60
    logs = np.log(rng.uniform(0.2, 0.8, (3, n)))
    found = evaluate_log_probs(
        logs[0], logs[1:], np.arange(n) % 2, np.full(n, 0.9), np.arange(n + 1), "NFIS"
    )["NFIS"]
    assert found.influence.std() > 0.0
    assert found.standard_error == 0.0
    assert "all episodes agree" in str(found.verdict)
