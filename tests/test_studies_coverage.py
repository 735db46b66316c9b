"""The grid of small MDPs, and the coverage study in miniature."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ope_gym import Betting, Bootstrap, evaluate
from studies.coverage.claims import coverage_claims
from studies.coverage.intervals import KINDS, Found, all_intervals
from studies.coverage.study import NAMES, Coverage
from studies.harness import small_grid
from studies.harness.claims import FAILS, HOLDS, UNDECIDED
from studies.harness.registry import load_study
from studies.harness.runner import conduct, plain
from studies.harness.small_grid import LOGGERS, NOISES, SOURCES, Regime, grid, states_of, table

TINY = Coverage(every=24, resamples=40, cartpole=1, truth_rollouts=300)


# --- the grid ---------------------------------------------------------------------------------


def test_the_grid_has_all_kinds_once() -> None:
    regimes = grid()
    assert len({regime.name for regime in regimes}) == len(regimes) >= 40
    assert {(r.loggers, r.noise) for r in regimes} == {(a, b) for a in LOGGERS for b in NOISES}
    assert {r.horizon for r in regimes} >= {1, 50}
    assert grid() == regimes
    other = grid(1)
    assert [r.name for r in other] == [r.name for r in regimes]
    assert not {r.seed for r in other} & {r.seed for r in regimes}


def value_by_paths(regime: Regime, probs: np.ndarray, state: int, t: int) -> float:
    """Expected return from step t on: plain recursion over everything that can happen."""
    if t == regime.horizon:
        return 0.0
    world, total = regime.world, 0.0
    for a in range(regime.actions):
        ahead = sum(
            world.moves[state, a, s] * value_by_paths(regime, probs, s, t + 1)
            for s in range(regime.states)
        )
        total += probs[state, a] * (world.means[state, a] + (1 - world.ends[state, a]) * ahead)
    return float(total)


@pytest.mark.parametrize("horizon", [1, 3])
def test_values_and_q_are_those_of_a_recursion(horizon: int) -> None:
    regime = Regime("drifting", "high", horizon, states=2, actions=2, seed=5)
    probs = table(regime.target, 2)
    q = regime.exact_q(regime.target)
    assert q.shape == (horizon, 2, 2)
    for t in range(horizon):
        for state in range(2):
            want = value_by_paths(regime, probs, state, t)
            assert np.sum(probs[state] * q[t, state]) == pytest.approx(want, rel=1e-12)
    starts = [value_by_paths(regime, probs, state, 0) for state in range(2)]
    assert regime.value(regime.target) == pytest.approx(regime.world.start @ starts, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    loggers=st.sampled_from(LOGGERS),
    noise=st.sampled_from(NOISES),
    source=st.sampled_from(SOURCES),
    horizon=st.integers(1, 12),
    policies=st.integers(1, 4),
    per_policy=st.integers(1, 6),
    seed=st.integers(0, 5),
)
def test_episodes_are_what_they_say(
    loggers: small_grid.Loggers,
    noise: small_grid.Noise,
    source: small_grid.Source,
    horizon: int,
    policies: int,
    per_policy: int,
    seed: int,
) -> None:
    regime = Regime(loggers, noise, horizon, policies, per_policy, seed=seed)
    data, target, truth = regime.simulate(np.random.default_rng(seed), source)
    assert len(data) == policies * per_policy
    assert data.lengths.max() <= horizon == data.horizon
    assert data.rewards.min() >= 0.0
    assert data.rewards.max() <= 1.0
    assert data.held_out.all() == (source == "held-out")
    assert 0.0 < truth < horizon
    assert truth == pytest.approx(regime.value(target))
    if source != "in-sample":
        np.testing.assert_array_equal(target.weights, regime.target.weights)
    for k, policy in enumerate(data.policies):
        rows = data.policy_ids == k
        np.testing.assert_allclose(
            data.log_probs[rows],
            policy.log_prob(data.observations[rows], data.actions[rows]),
            atol=1e-12,
        )
    again, _, same = regime.simulate(np.random.default_rng(seed), source)
    np.testing.assert_array_equal(again.rewards, data.rewards)
    assert same == truth


@pytest.mark.parametrize("noise", NOISES)
def test_simulated_episodes_have_the_moments_of_the_world(noise: small_grid.Noise) -> None:
    """One logger, many episodes: rewards, ends, moves and the value, within 4.5 standard errors."""
    regime = Regime("similar", noise, 4, 1, 20_000, states=3, actions=2, seed=3)
    data, _, _ = regime.simulate(np.random.default_rng(3003))
    (logger,), world = data.policies, regime.world
    states, actions = states_of(data.observations), np.asarray(data.actions)
    last = np.zeros(data.n_steps, dtype=bool)
    last[data.offsets[1:] - 1] = True
    step = np.arange(data.n_steps) - np.repeat(data.offsets[:-1], data.lengths)
    for s in range(3):
        for a in range(2):
            mine = (states == s) & (actions == a)
            rewards, count = data.rewards[mine], mine.sum()
            error = rewards.std(ddof=1) / math.sqrt(count)
            assert abs(rewards.mean() - world.means[s, a]) < 4.5 * error
            early = mine & (step < 3)
            ended, p = last[early], world.ends[s, a]
            assert abs(ended.mean() - p) < 4.5 * math.sqrt(p * (1 - p) / ended.size)
            after = states[np.flatnonzero(early & ~last) + 1]
            for to in range(3):
                p = world.moves[s, a, to]
                assert abs(np.mean(after == to) - p) < 4.5 * math.sqrt(p * (1 - p) / after.size)
    returns = data.returns()
    error = returns.std(ddof=1) / math.sqrt(returns.size)
    assert abs(returns.mean() - regime.value(logger)) < 4.5 * error  # type: ignore[arg-type]


def test_kinds_of_loggers_are_as_near_as_they_say() -> None:
    def share(loggers: small_grid.Loggers, estimator: str = "NFIS") -> float:
        data, target, _ = Regime(loggers, "low", 8, seed=1).simulate(np.random.default_rng(0))
        return evaluate(data, target, estimators=estimator)[estimator].diagnostics.ess / len(data)

    near, far = share("similar"), [share(kind) for kind in LOGGERS if kind != "similar"]
    assert near > 0.9
    assert max(far) < 0.8
    assert share("one good", "NBIS") < 0.5 * share("one good")


def test_learning_from_the_data_raises_the_estimate_above_the_value() -> None:
    """In-sample NFIS is too high on average, held-out NFIS is not."""
    regime = Regime("similar", "high", 8, 4, 10, seed=2)
    off = {}
    for source in SOURCES:
        errors = []
        for seed in range(3100, 3160):
            data, target, truth = regime.simulate(np.random.default_rng(seed), source)
            errors.append(evaluate(data, target, estimators="NFIS")["NFIS"].value - truth)
        off[source] = np.mean(errors) / (np.std(errors) / math.sqrt(len(errors)))
    assert off["in-sample"] > 4
    assert abs(off["held-out"]) < 4


# --- intervals --------------------------------------------------------------------------------


def test_intervals_are_those_of_evaluate() -> None:
    regime = Regime("drifting", "high", 4, 3, 20, seed=6)
    data, target, truth = regime.simulate(np.random.default_rng(2))
    names = ["FIS", "NFIS"]
    found = all_intervals(
        data, target, names, level=0.9, resamples=50, reward_range=(0.0, 1.0), horizon=4
    )
    kinds: dict[str, str | Bootstrap | Betting] = {
        "ess-t": "ess-t",
        "percentile": Bootstrap(50),
        "bca": Bootstrap(50, "bca"),
        "betting": Betting((0.0, 1.0), 4),
    }
    for kind, interval in kinds.items():
        got = evaluate(data, target, names, level=0.9, interval=interval)
        for e, name in enumerate(names):
            k = KINDS.index(kind)
            if kind == "betting" and name == "NFIS":
                assert math.isnan(found.low[e, k])
                continue
            ends = found.low[e, k], found.high[e, k]
            assert ends == (got[name].interval.low, got[name].interval.high)
            assert found.holds(truth)[e, k] == (truth in got[name].interval)
    np.testing.assert_allclose(found.width(0.9)[:, 0], 1.0, rtol=1e-12)
    assert found.width(0.9)[0, KINDS.index("betting")] > 1


def test_undefined_intervals_neither_hold_nor_miss_and_empty_ones_miss() -> None:
    low, high = np.array([[0.0, math.nan, math.inf]]), np.array([[2.0, math.nan, -math.inf]])
    found = Found(low, high, np.array([0.5]))
    np.testing.assert_array_equal(found.holds(1.0), [[1.0, math.nan, 0.0]])
    np.testing.assert_array_equal(found.holds(3.0), [[0.0, math.nan, 0.0]])
    width = found.width(0.95)
    assert width[0, 0] == pytest.approx(2 / (2 * 1.959964 * 0.5), rel=1e-6)
    assert np.isnan(width[0, 1:]).all()


# --- the study --------------------------------------------------------------------------------


def test_the_study_in_miniature(tmp_path: Path) -> None:
    result = conduct(TINY, tmp_path, runs=2, seed=3004, progress=False)
    summary, names = result["summary"], result["summary"]["names"]
    assert "NFIS" in names
    assert list(summary["parts"]) == [*SOURCES, "CartPole-v1"]
    for part in summary["parts"].values():
        coverage = np.array(part["coverage"], dtype=np.float64)
        assert coverage.shape == (len(names), len(KINDS))
        made = ~np.isnan(coverage)
        assert made[:, KINDS.index("ess-t")].all()
        assert made[:, KINDS.index("betting")].sum() == 2
        assert np.all((coverage[made] >= 0) & (coverage[made] <= 1))
        np.testing.assert_allclose(np.array(part["width"])[:, 0].astype(float), 1.0, rtol=1e-9)
    assert {claim["verdict"] for claim in result["claims"]} <= {HOLDS, FAILS, UNDECIDED}
    files = {path.suffix for path in tmp_path.iterdir() if path.is_file()}
    assert files == {".json", ".md", ".png"}
    (text,) = (path.read_text(encoding="utf-8") for path in tmp_path.glob("*.md"))
    assert "| held-out | normal | ess-t |" in text
    (kept,) = (json.loads(p.read_text(encoding="utf-8")) for p in tmp_path.glob("*.json"))
    assert kept["summary"] == summary


def test_the_numbers_of_the_summary_are_plain_means() -> None:
    """Two runs, with holes, of what a run gives."""
    study, rng = Coverage(cartpole=2), np.random.default_rng(0)
    shape = (2, 3, 48, len(NAMES), len(KINDS))
    holds, width = rng.integers(0, 2, shape).astype(float), rng.uniform(1, 2, shape)
    holds[:, :, ::2] = math.nan  # regimes that no run took
    holds[0, 0, 1, 0, 1] = math.nan  # an undefined interval
    runs = {
        "holds": holds,
        "width": np.where(np.isnan(holds), math.nan, width),
        "cart_holds": holds[:, 0, 1:4:2],
        "cart_width": width[:, 0, 1:4:2],
    }
    summary = study.summarise(runs)
    assert summary["data_sets"] == {"small": 2 * 3 * 24, "CartPole-v1": 4}
    part = summary["parts"]["held-out"]
    seen = holds[:, 0, 1::2, 0, 1]
    assert part["coverage"][0, 1] == pytest.approx(np.nanmean(seen))
    assert part["undefined"][0, 1] == pytest.approx(1 / 48)
    assert part["undefined"][1, 2] == 0
    by_run = np.nanmean(seen, axis=1)
    assert part["error"][0, 1] == pytest.approx(np.std(by_run, ddof=1) / math.sqrt(2))
    loggers = np.array([regime.loggers for regime in grid()])
    by_kind = [np.nanmean(holds[:, 0, loggers == kind, 0, 1]) for kind in LOGGERS]
    assert [part["by_loggers"][kind][0, 1] for kind in LOGGERS] == pytest.approx(by_kind)
    assert part["lowest"][0, 1] == pytest.approx(min(by_kind))
    assert math.isnan(summary["parts"]["CartPole-v1"]["lowest"][0, 1])
    assert part["width"][1, 2] == pytest.approx(np.median(width[:, 0, 1::2, 1, 2]))
    gain = np.nanmean(holds[:, 0, :, 1, 1] - holds[:, 0, :, 1, 0])
    assert summary["paired"]["held-out"]["gain"][0][1] == pytest.approx(gain)
    loss = np.nanmean(holds[:, 0, :, 1, 3]) - np.nanmean(holds[:, 2, :, 1, 3])
    assert summary["paired"]["in-sample"]["loss"][0][1, 3] == pytest.approx(loss)


def test_claims_follow_the_numbers() -> None:
    names, kinds = list(NAMES), list(KINDS)

    def summary(coverage: float, betting: float) -> dict[str, object]:
        table = np.full((len(names), len(kinds)), coverage)
        table[:, kinds.index("betting")] = betting
        error = np.full((len(names), len(kinds)), 0.004)
        part = {"coverage": table, "error": error, "width": table, "lowest": table}
        both = {"gain": [np.full(len(names), 0.02), np.full(len(names), 0.004)]}
        return {
            "runs": 100,
            "level": 0.95,
            "names": names,
            "kinds": kinds,
            "parts": dict.fromkeys(("held-out", "adaptive", "in-sample", "CartPole-v1"), part),
            "paired": {
                "held-out": both,
                "CartPole-v1": both,
                "in-sample": {"loss": [table, error]},
            },
        }

    def verdicts(*numbers: float) -> list[str]:
        return [claim.verdict for claim in coverage_claims(plain(summary(*numbers), math.nan))]

    assert verdicts(0.95, 0.99) == [HOLDS] * 4
    assert verdicts(0.90, 0.99)[0] == FAILS
    assert verdicts(0.935, 0.99)[0] == UNDECIDED
    assert verdicts(0.95, 0.90)[2] == FAILS


@pytest.mark.parametrize("setting", [{"level": 1.0}, {"every": 0}, {"cartpole": 0}])
def test_settings_that_make_no_study(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        load_study("coverage", **setting)
