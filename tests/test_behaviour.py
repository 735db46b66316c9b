"""Propensities that nobody recorded: estimated, cross-fitted, and said to be so."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ope_gym
from ope_gym import Weighting, evaluate, fit_behaviour, leave_one_policy_out
from ope_gym.analysis.behaviour import BehaviourFit, calibration_slope, marginal_loss
from ope_gym.cli import main
from ope_gym.data.trajectories import Trajectories
from ope_gym.models import behaviour
from ope_gym.models.behaviour import (
    LEARNERS,
    fit_counts,
    fit_logit,
    fit_network,
    maximise_logit,
    scatter_logit,
)
from ope_gym.policies import EstimatedPolicy, SoftmaxLinear, UnknownPolicy
from ope_gym.policies.estimated import ALL
from ope_gym.verdict import Reason

Floats = NDArray[np.float64]
WEIGHTS = np.array([[0.9, -0.4], [-0.5, 0.6], [0.1, 0.3]])
TARGET = SoftmaxLinear(0.5 * WEIGHTS)


def log(
    episodes: int = 40, seed: int = 0, *, whole: bool = False, steps: int = 3, loggers: int = 2
) -> Trajectories:
    """Return a log of several sites that act by a logit, without propensities."""
    rng = np.random.default_rng(seed)
    size = (episodes * steps, 2)
    seen: Any = rng.integers(0, 3, size) if whole else rng.standard_normal(size)
    site = np.repeat(np.arange(episodes) % loggers, steps)
    acting = [SoftmaxLinear(WEIGHTS * (1.0 - 0.5 * g)) for g in range(loggers)]
    actions = np.empty(len(seen), dtype=np.int64)
    for g, policy in enumerate(acting):
        actions[site == g] = policy.sample(seen[site == g].astype(np.float64), rng)
    return Trajectories.from_arrays(
        seen,
        actions,
        seen[:, 0] + (actions == 1) + 0.1 * rng.standard_normal(len(seen)),
        np.full(len(seen), np.nan),
        offsets=np.arange(episodes + 1) * steps,
        policies=[UnknownPolicy() for _ in range(loggers)],
        policy_ids=site,
        terminated=True,
        held_out=True,
    )


@cache
def fitted() -> BehaviourFit:
    """Return a fit that several tests look at."""
    return fit_behaviour(log(), model="logit")


# The models ------------------------------------------------------------------------------------


def test_counts_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    states, chosen = rng.integers(0, 3, (60, 2)), rng.integers(0, 3, 60)
    shares = [(np.count_nonzero(chosen == a) + 0.5) / 61.5 for a in range(3)]
    cells: dict[tuple[int, int], list[int]] = {}
    for (x, y), a in zip(states.tolist(), chosen.tolist(), strict=True):
        cells.setdefault((x, y), [0, 0, 0])[a] += 1

    def likelihood(c: float) -> float:
        total = 0.0
        for counts in cells.values():
            total += math.lgamma(c) - math.lgamma(c + sum(counts))
            for a in range(3):
                total += math.lgamma(c * shares[a] + counts[a]) - math.lgamma(c * shares[a])
        return total

    c = max((2.0**power for power in range(-1, 11)), key=likelihood)
    found, _ = fit_counts(states, chosen, 3, rng)
    for state, counts in cells.items():
        expected = [(counts[a] + c * shares[a]) / (sum(counts) + c) for a in range(3)]
        np.testing.assert_allclose(found.probs(np.array([state]))[0], expected, rtol=1e-12)
    np.testing.assert_allclose(found.probs(np.array([[7, 7]]))[0], shares, rtol=1e-12)


def penalised(x: Floats, chosen: Any, weights: Any, bias: Any, ridge: float) -> float:
    """Return the penalised log-likelihood of a logit, as a plain loop."""
    total = -0.5 * ridge * float(np.sum(np.asarray(weights) ** 2))
    for row, a in zip(x, chosen, strict=True):
        scores = [float(np.dot(w, row) + b) for w, b in zip(weights, bias, strict=True)]
        total += scores[a] - math.log(sum(math.exp(s) for s in scores))
    for b in bias:  # half a step of each action at the mean observation
        total += 0.5 * (float(b) - math.log(sum(math.exp(float(other)) for other in bias)))
    return total


@pytest.mark.parametrize("actions", [2, 3])
def test_a_logit_has_no_better_neighbour(actions: int) -> None:
    """The penalised log-likelihood falls in every direction."""
    rng = np.random.default_rng(2)
    x, chosen = rng.standard_normal((80, 2)), rng.integers(0, actions, 80)
    found = maximise_logit(x, chosen, actions, 1.0)
    best = penalised(x, chosen, found.weights, found.bias, 1.0)
    bias = np.asarray(found.bias)
    for _ in range(12):
        w, b = 1e-3 * rng.standard_normal((actions, 2)), 1e-3 * rng.standard_normal(actions)
        assert penalised(x, chosen, found.weights + w, bias + b, 1.0) < best
    assert np.linalg.norm(found.weights) > 0.05


def test_a_logit_without_an_action_stays_finite() -> None:
    """An action that only other folds took has about half a step of all."""
    x, chosen = np.random.default_rng(2).standard_normal((50, 1)), np.arange(50) % 2
    probs = maximise_logit(x, chosen, 3, 1.0).probs(np.zeros((1, 1)))[0]
    assert 0.003 < probs[2] < 0.03


def test_draws_of_a_logit_have_the_inverse_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the plain loop, by differences; within 5 standard errors of 20,000 draws."""
    rng = np.random.default_rng(8)
    x, chosen = rng.standard_normal((40, 1)), rng.integers(0, 2, 40)
    found = maximise_logit(x, chosen, 2, 4.0)
    centre = np.column_stack([found.weights, np.asarray(found.bias)]).ravel()

    def at(step: Floats) -> float:
        moved = (centre + step).reshape(2, 2)
        return penalised(x, chosen, moved[:, :1], moved[:, 1], 4.0)

    h, unit = 1e-3, np.eye(4)
    curved = np.array(
        [
            [
                -(at(h * (a + b)) - at(h * (a - b)) - at(h * (b - a)) + at(-h * (a + b)))
                / (4 * h * h)
                for b in unit
            ]
            for a in unit
        ]
    )
    expected = np.linalg.pinv(curved, rcond=1e-4)  # a shift of both intercepts is no change
    monkeypatch.setattr(behaviour, "DRAWS", 20_000)
    drawn = scatter_logit(found, x, 4.0, rng).reshape(20_000, 4).astype(np.float64)
    spread = np.sqrt(np.diag(expected))
    tolerance = 5 * np.sqrt(2 / 20_000) * np.outer(spread, spread) + 1e-4
    assert np.all(np.abs(np.cov(drawn.T) - expected) < tolerance)
    assert spread.min() > 0.1


def test_the_ridge_is_the_one_that_predicts_best() -> None:
    """Noise calls for the strongest, a clear rule for the weakest, and much data for no search."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((60, 3))
    noise, rule = rng.integers(0, 2, 60), (x[:, 0] > 0).astype(np.int64)
    for chosen, ridge in ((noise, 64.0), (rule, 1.0)):
        expected = maximise_logit(x, chosen, 2, ridge)
        fitted, _ = fit_logit(x, chosen, 2, rng)
        assert fitted == expected
    many, chosen = rng.standard_normal((400, 1)), rng.integers(0, 2, 400)
    assert fit_logit(many, chosen, 2, rng)[0] == maximise_logit(many, chosen, 2, 1.0)


def test_a_network_finds_what_a_logit_cannot() -> None:
    """Action 1 where x is far from 0: held-out loss clearly below that of the shares."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((1500, 1))
    chosen = (rng.random(1500) < np.where(np.abs(x[:, 0]) > 1, 0.95, 0.05)).astype(np.int64)
    (net, _), (logit, _) = (
        fit(x[:1000], chosen[:1000], 2, rng) for fit in (fit_network, fit_logit)
    )
    loss = -net.log_prob(x[1000:], chosen[1000:]).mean()
    plain = -logit.log_prob(x[1000:], chosen[1000:]).mean()
    exact = -(0.95 * math.log(0.95) + 0.05 * math.log(0.05))
    assert exact - 0.08 < loss < exact + 0.08 < plain


# Cross-fitting ---------------------------------------------------------------------------------


def test_no_model_of_a_fold_saw_its_episodes() -> None:
    data, fit = log(), fitted()
    k = int(fit.trajectories.policy_ids[0])
    mine = fit.trajectories.policy_ids == k
    actions = np.where(mine, 2 - np.asarray(data.actions), data.actions)
    other = fit_behaviour(dataclasses.replace(data, actions=actions), model="logit")
    for number, (a, b) in enumerate(
        zip(fit.trajectories.policies, other.trajectories.policies, strict=True)
    ):
        assert isinstance(a, EstimatedPolicy)
        same_logger = a.logger == fit.trajectories.policies[k].logger  # type: ignore[attr-defined]
        assert (a == b) == (number == k or not same_logger)


def test_weights_are_against_the_models_that_left_an_episode_out() -> None:
    """NFIS as a plain loop, with a mixture of the loggers' models for each fold."""
    fit = fitted()
    data = fit.trajectories
    models: dict[int, list[EstimatedPolicy]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for i in range(len(data)):
        p = data.policies[data.policy_ids[data.offsets[i]]]
        assert isinstance(p, EstimatedPolicy)
        sizes[p.fold, p.logger] = sizes.get((p.fold, p.logger), 0) + 1
        if p not in models.setdefault(p.fold, []):
            models[p.fold].append(p)
    steps = int(data.lengths[0])
    weights = np.empty((len(data), steps))
    for i in range(len(data)):
        rows = slice(int(data.offsets[i]), int(data.offsets[i + 1]))
        x, a = np.asarray(data.observations)[rows], np.asarray(data.actions)[rows]
        own = data.policies[data.policy_ids[rows.start]]
        assert isinstance(own, EstimatedPolicy)
        fold = own.fold
        total = sum(n for (f, _), n in sizes.items() if f == fold)
        above = np.cumprod(np.exp(TARGET.log_prob(x, a)))
        below = np.zeros(steps)
        for p in models[fold]:
            share = sizes[fold, p.logger] / total
            below += share * np.cumprod(np.exp(p.log_prob(x, a)))
        weights[i] = above / below
    rewards = data.rewards.reshape(len(data), steps)
    expected = sum((weights[:, t] @ rewards[:, t]) / weights[:, t].sum() for t in range(steps))
    assert evaluate(data, TARGET, "NFIS")["NFIS"].value == pytest.approx(expected, rel=1e-12)


def test_an_action_that_was_never_taken_has_no_support() -> None:
    data = log()
    actions = np.where(np.asarray(data.actions) == 2, 1, data.actions)
    fit = fit_behaviour(dataclasses.replace(data, actions=actions), model="logit", actions=3)
    probs = fit.policies["policy 0"].probs(data.observations)
    assert np.all(probs[:, 2] == 0.0)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0)
    reasons = evaluate(fit.trajectories, TARGET, "NFIS")["NFIS"].verdict.reasons
    assert "support_lost" in {reason.code for reason in reasons}


# What is said ----------------------------------------------------------------------------------


def test_every_result_says_that_propensities_are_estimated() -> None:
    fit = fit_behaviour(log(200, loggers=1), model="logit")
    found = evaluate(fit.trajectories, TARGET, ["auto", "NFIS", "DM"])
    for estimate in found.values():
        assert estimate.verdict.colour == "amber"
        assert Reason("propensities_estimated") in estimate.verdict.reasons
    assert "1 logger" in found.table()
    assert "propensities: estimated by logit" in found.table()
    assert found.to_dict()["propensities"] == "estimated by logit (their error is in the intervals)"
    assert "partial mixtures" not in found.table()
    known = evaluate(_with_policies(log(200, loggers=1), [SoftmaxLinear(WEIGHTS)]), TARGET, "NFIS")
    assert known["NFIS"].verdict.colour == "green"
    assert known.to_dict()["propensities"] is None


def _with_policies(data: Trajectories, policies: list[Any]) -> Trajectories:
    probs = np.empty(data.n_steps)
    for k, policy in enumerate(policies):
        mine = data.policy_ids == k
        probs[mine] = policy.log_prob(
            np.asarray(data.observations)[mine], np.asarray(data.actions)[mine]
        )
    return dataclasses.replace(data, policies=tuple(policies), log_probs=probs)


def test_models_of_overlapping_folds_are_drawn_together() -> None:
    """Else their errors would average out over the folds, which learned from the same episodes."""
    fit = fit_behaviour(log(200), model="logit").trajectories
    first, *others = [
        p.scatter.reshape(behaviour.DRAWS, -1)  # type: ignore[attr-defined]
        for p in fit.policies
        if p.logger == 0  # type: ignore[attr-defined]
    ]
    assert len(others) == 4
    for other in others:
        for a, b in zip(first.T, other.T, strict=True):
            assert np.corrcoef(a, b)[0, 1] > 0.95


def test_intervals_hold_the_error_of_estimated_propensities() -> None:
    """The root mean square move under draws of the models, as a loop over evaluations of them."""
    data = fit_behaviour(log(30), model="logit").trajectories
    names = ("FIS", "NFIS", "FWDR", "DM")
    found = evaluate(data, TARGET, names)
    known = [dataclasses.replace(p, scatter=None) for p in data.policies]  # type: ignore[type-var]
    fixed = evaluate(dataclasses.replace(data, policies=tuple(known)), TARGET, names)
    moves: dict[str, list[float]] = {name: [] for name in names[:2]}
    for r in range(behaviour.DRAWS):
        drawn = [p.drawn(r) for p in data.policies]  # type: ignore[attr-defined]
        for name, estimate in evaluate(_with_policies(data, drawn), TARGET, names[:2]).items():
            moves[name].append(estimate.value - found[name].value)
    for name, off in moves.items():
        error = float(np.sqrt(np.mean(np.square(off))))
        assert error > 0.01 * found[name].standard_error
        assert found[name].report["propensities"] == pytest.approx(error)
        both = math.hypot(fixed[name].standard_error, error)
        assert found[name].standard_error == pytest.approx(both)
    for name in names:
        assert found[name].value == fixed[name].value
        wide, narrow = (e[name].interval.high - e[name].interval.low for e in (found, fixed))
        assert wide > narrow if name != "DM" else wide == narrow
    assert "intervals take them as known" in fixed.table()
    alone = evaluate(data, TARGET, names, interval=None)
    assert "propensities" not in alone["FIS"].report
    assert "in the intervals" not in alone.table()


def test_the_result_says_which_intervals_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fitted().trajectories
    all_of = Weighting(mixture="all")
    found = evaluate(data, TARGET, ("NFIS", "ADR"), weighting=all_of)
    assert "intervals take them as known in ADR" in found.table()
    blocks = evaluate(data, TARGET, "NFIS", compute=ope_gym.Compute(block_steps=20))
    assert "their error is in the intervals" in blocks.table()  # they are in memory all the same
    monkeypatch.setattr(behaviour, "_EPOCHS", 1)
    network = fit_behaviour(log(), model="network").trajectories
    assert "intervals take them as known" in evaluate(network, TARGET, "NFIS").table()
    assert "intervals" not in evaluate(network, TARGET, "DM").to_dict()["propensities"]


def test_propensities_that_do_not_fit_are_an_alarm() -> None:
    data = fit_behaviour(log(200, loggers=1), model="logit").trajectories
    sharp = []
    for policy in data.policies:
        assert isinstance(policy, EstimatedPolicy)
        inner = policy.policy
        assert isinstance(inner, SoftmaxLinear)
        bias = np.asarray(inner.bias)
        sharp.append(
            dataclasses.replace(policy, policy=SoftmaxLinear(2.5 * inner.weights, 2.5 * bias))
        )
    verdict = evaluate(_with_policies(data, sharp), TARGET, "NFIS")["NFIS"].verdict
    assert verdict.colour == "red"
    assert verdict.reasons[0].code == "estimated_propensities_misfit"
    assert verdict.advice == (Reason("refit_propensities"),)


def test_the_slope_is_the_root_of_its_score() -> None:
    """And probabilities to the power of 2 have a slope of 1/2, within 4 standard errors."""
    rng = np.random.default_rng(5)
    right = rng.dirichlet([1.0, 1.0, 1.0], 3000)
    chosen = (rng.random((3000, 1)) > right.cumsum(axis=1)).sum(axis=1)
    sharp = right**2 / np.sum(right**2, axis=1, keepdims=True)
    slope, error = calibration_slope(sharp, chosen, np.arange(3000) // 3)
    score = 0.0
    for p, a in zip(sharp, chosen, strict=True):
        tilted = p**slope / np.sum(p**slope)
        score += math.log(p[a]) - float(np.dot(tilted, np.log(p)))
    assert abs(score) < 1e-6
    assert slope == pytest.approx(0.5, abs=4 * error)
    assert 0.005 < error < 0.05
    assert calibration_slope(np.full((6, 2), 0.5), np.zeros(6, np.int64), np.arange(6))[0] == 1.0


def test_the_marginal_is_that_of_a_plain_loop() -> None:
    chosen = np.random.default_rng(6).integers(0, 2, 50)
    fold = np.arange(50) % 3
    total = 0.0
    for s in range(50):
        others = [chosen[u] for u in range(50) if fold[u] != fold[s]]
        total -= math.log((others.count(chosen[s]) + 0.5) / (len(others) + 1.0))
    assert marginal_loss(chosen, fold, 2) == pytest.approx(total / 50)


def test_auto_takes_the_model_that_predicts_best() -> None:
    fit = fit_behaviour(log(200, whole=True))
    assert set(fit.losses) == {"shares", "logit", "counts"}
    assert fit.model == min(fit.losses, key=lambda name: fit.losses[name])
    assert set(fit_behaviour(log()).losses) == {"shares", "logit", "logit2"}
    for one in fit.loggers:
        assert one.log_loss < one.marginal
        assert one.calibrated
    assert fit.to_dict()["loggers"][0]["episodes"] == 100
    assert "calibrated" in str(fit)


# Files, loggers, commands ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parquet"), [*((name, False) for name in LEARNERS), ("logit", True)]
)
def test_files_hold_estimated_policies(
    model: str, parquet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behaviour, "_EPOCHS", 2)
    monkeypatch.setattr(behaviour, "_PLENTY", 0)  # takes the smallest ridge without a search
    data = fit_behaviour(log(20, whole=model == "counts"), model=model).trajectories
    path = tmp_path / ("fit.parquet" if parquet else "fit.ope")
    data.to_parquet(path) if parquet else data.save(path)
    again = Trajectories.load(path)
    assert again.policies == data.policies
    assert [p.model for p in again.policies] == [p.model for p in data.policies]  # type: ignore[attr-defined]
    value = evaluate(data, TARGET, "NFIS")["NFIS"]
    from_file = evaluate(str(path), TARGET, "NFIS")["NFIS"]
    assert from_file.value == value.value
    assert from_file.interval == value.interval
    assert from_file.verdict == value.verdict


def test_loggers_by_name_and_left_out_in_turn() -> None:
    data = log(60, loggers=3)
    names = np.array(["west", "north", "east"])[np.arange(60) % 3]
    fit = fit_behaviour(data, model="logit", by=names)
    assert [one.name for one in fit.loggers] == ["east", "north", "west"]
    assert list(fit.policies) == ["east", "north", "west"]
    assert all(p.fold == ALL for p in fit.policies.values())
    one = fit_behaviour(data, model="logit", by=None)
    assert [x.episodes for x in one.loggers] == [60]
    left = leave_one_policy_out(fit.trajectories, "NFIS")
    assert [check.episodes for check in left.values()] == [20, 20, 20]
    own = data.returns()
    assert [c.own for c in left.values()] == pytest.approx(
        [own[names == name].mean() for name in ("east", "north", "west")]
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": "forest"}, "choose one of auto, shares, counts"),
        ({"model": "counts"}, "observations have fractions"),
        ({"folds": 1}, "at least 2"),
        ({"by": "site"}, "give 'policy', None"),
        ({"by": ["a", "b"]}, "or a name for each of 40 episodes"),
        ({"by": ["alone", *["b"] * 39]}, "'alone' has 1 episode"),
        ({"actions": 2}, "actions go from 0 to 2, but there are 2"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit_behaviour(log(), **change)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ModuleNotFoundError, match=r"ope-gym\[behaviour\].*model='shares'"):
        fit_behaviour(log(), model="logit")
    fit_behaviour(log(), model="shares")


def test_continuous_actions_and_changing_policies_are_refused() -> None:
    data = log()
    with pytest.raises(ValueError, match="whole numbers"):
        fit_behaviour(dataclasses.replace(data, actions=np.zeros(data.n_steps)))
    ids = np.arange(data.n_steps, dtype=np.int32) % 2
    with pytest.raises(ValueError, match="changes during episodes"):
        fit_behaviour(dataclasses.replace(data, policy_ids=ids))


def test_the_command_writes_episodes_that_others_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, fitted, report = (tmp_path / name for name in ("log.parquet", "fit.ope", "fit.json"))
    log().to_parquet(table)
    words = ["fit-behaviour", str(table), "--model", "logit", "--save", str(fitted)]
    target = ["--target", "tests.test_behaviour:target"]
    assert main([*words, "--json", str(report)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "propensities estimated by logit" in said
    assert json.loads(report.read_text())["model"] == "logit"
    assert main(["evaluate", str(fitted), *target]) == 0
    assert "propensities are estimated" in capsys.readouterr().out


def target() -> SoftmaxLinear:
    """Return the policy that the command line evaluates."""
    return TARGET


def test_shares_are_not_called_calibrated() -> None:
    """Whatever the loggers did: these look at what they see."""
    fit = fit_behaviour(log(200), model="shares")
    assert [one.calibrated for one in fit.loggers] == [None, None]
    found = fit.to_dict()
    assert found["calibrated"] is None
    assert found["loggers"][0]["calibrated"] is None
    assert "calibrated" not in str(fit)
    assert "try another model" not in str(fit)
    one, *others = fit_behaviour(log(200), model="logit").loggers
    assert one.calibrated
    wrong = dataclasses.replace(one, slope=0.5)
    for loggers, known in (((one, *others), True), ((wrong, fit.loggers[0]), False)):
        assert dataclasses.replace(fit, loggers=loggers).calibrated is known


def test_loggers_are_told_apart_however_long_their_names_are(tmp_path: Path) -> None:
    names = [f"{'north-western ' * 5}{'abc'[i % 3]}" for i in range(60)]
    data = fit_behaviour(log(60, loggers=3), by=names, model="logit").trajectories
    found = evaluate(data, TARGET, "NFIS")
    assert "3 loggers" in str(found)
    assert names[0][:20] in repr(data.policies[0])
    assert len(found.to_dict()["behaviours"]) == 15
    left = leave_one_policy_out(data, "NFIS")
    shown = [check["logger"] for check in left.to_dict()["policies"].values()]
    assert len(set(shown)) == 3
    for name in shown:
        assert len(name) == 60
        assert name in str(left)
