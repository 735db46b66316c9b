"""Test contributions of past policies, and the predicted error of a larger sample."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import contributions, episodes_needed, evaluate
from ope_gym.analysis.fused_weights import FusedWeights
from ope_gym.analysis.planning import Prediction
from ope_gym.cli import main as command
from ope_gym.policies import UnavailablePolicy
from ope_gym.weights.behaviours import behaviours_of
from ope_gym.weights.formula import log_weights
from tests import builders, small_mdps
from tests.builders import Table
from tests.test_evaluate import TARGET, clocked, may_stop

NAMES = ("NFIS", "FIS")


@pytest.fixture(scope="module")
def made() -> builders.Recorded:
    return builders.recorded(3, (60, 50, 70), held_out=True)


def prediction(data: Any, target: Any, policy: Any, estimator: str = "NFIS") -> Prediction:
    made = FusedWeights(data, target, estimator=estimator, held_out=False, gamma=1.0)
    return Prediction(made, made.prefix(policy, "policy"))


# --- contributions ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_without_a_policy_is_the_evaluation_of_the_others(
    made: builders.Recorded, name: str, gamma: float
) -> None:
    found = contributions(made.trajectories, made.target, estimator=name, gamma=gamma)
    options: dict[str, Any] = {"estimators": name, "gamma": gamma, "q_model": None}
    whole = evaluate(made.trajectories, made.target, **options)[name]
    assert found.estimate.value == pytest.approx(whole.value)
    assert found.estimate.standard_error == pytest.approx(whole.standard_error)
    for k, row in enumerate(found):
        rest = made.trajectories.select(policies=[j for j in range(3) if j != k])
        other = evaluate(rest, made.target, **options)[name]
        assert row.value_without == pytest.approx(other.value, rel=1e-9)
        assert row.standard_error_without == pytest.approx(other.standard_error, rel=1e-9)
        assert row.ess_without == pytest.approx(other.diagnostics.ess, rel=1e-9)
        assert row.episodes == (60, 50, 70)[k]


def test_shares_are_those_of_a_plain_loop(made: builders.Recorded) -> None:
    found = contributions(made.trajectories, made.target)
    whole = evaluate(made.trajectories, made.target, estimators="NFIS", q_model=None)["NFIS"]
    np.testing.assert_allclose([r.weight_share for r in found], whole.diagnostics.behaviour_shares)
    np.testing.assert_allclose([r.ess for r in found], whole.diagnostics.behaviour_ess)
    ids, n = whole.sample.strata, len(made.trajectories)
    for k, row in enumerate(found):
        own = whole.influence[ids == k]
        part = own.size * own.var(ddof=1) / n**2
        assert row.variance_share == pytest.approx(part / whole.standard_error**2)
        assert row.ess_share == pytest.approx(row.ess / sum(r.ess for r in found))
    for key in ("weight_share", "ess_share", "variance_share"):
        assert sum(getattr(row, key) for row in found) == pytest.approx(1.0)


def test_episodes_whose_policy_changed_count_for_the_policy_at_their_start() -> None:
    every = small_mdps.paths(may_stop())
    data = clocked([*every, *every], [0, 1, 2, 0, 1, 1, 0, 2])
    found = contributions(data, TARGET)
    assert [row.name for row in found] == ["policy 0", "policy 1"]
    assert [row.episodes for row in found] == [6, 2]
    for k, row in enumerate(found):
        rest = data.select(policies=1 - k)
        other = evaluate(rest, TARGET, estimators="NFIS", q_model=None)["NFIS"]
        assert row.value_without == pytest.approx(other.value)
        assert row.standard_error_without == pytest.approx(other.standard_error)
    assert episodes_needed(data, TARGET, 0.05).best is not None


def test_of_many_policies_the_heaviest_are_left_out_in_turn(made: builders.Recorded) -> None:
    every, one = (contributions(made.trajectories, made.target, limit=k) for k in (3, 1))
    heaviest = max(range(3), key=lambda k: every[k].weight_share)
    assert one[heaviest] == every[heaviest]
    assert [math.isnan(row.ess_without) for row in one] == [k != heaviest for k in range(3)]
    assert str(one).count("undefined") == 0


def test_contributions_print_and_go_to_json(made: builders.Recorded) -> None:
    found = contributions(made.trajectories, made.target)
    lines = str(found).splitlines()
    assert lines[0].startswith("NFIS 1.6476 ± 0.519, ESS 66.7")
    assert len(lines) == 3 + 3
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["policies"][1]["episodes"] == 50
    alone = contributions(made.trajectories.select(policies=1), made.target)
    assert math.isnan(alone[0].standard_error_without)
    assert "undefined?" in str(alone)
    assert "an ESS below 10" in str(alone)
    assert tuple(alone) == alone.rows


# --- prediction -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_nothing_more_predicts_the_present_error(made: builders.Recorded, name: str) -> None:
    whole = evaluate(made.trajectories, made.target, estimators=name, q_model=None)[name]
    for policy in (*made.trajectories.policies, made.target):
        found = prediction(made.trajectories, made.target, policy, name)(0)
        assert found == pytest.approx(whole.standard_error, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_prediction_is_the_formula_in_a_plain_loop(made: builders.Recorded, name: str) -> None:
    data, target, m, j = made.trajectories, made.target, 35, 1
    behaviours = behaviours_of(data)
    counts = behaviours.counts.copy()
    counts[j] += m
    rows = behaviours.rows(data).block(0, data.n_steps)
    own = target.log_prob(data.observations, data.actions)
    now, then = (
        np.exp(log_weights(own, rows, behaviours.ids, data.offsets, ["fused"], counts=c)["fused"])
        for c in (behaviours.counts, counts)
    )
    n, longest = len(data), int(data.lengths.max())
    spans = list(zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True))
    weight, paid = np.zeros(longest), np.zeros(longest)
    for a, b in spans:
        for t in range(longest):
            weight[t] += now[min(a + t, b - 1)] / n
            paid[t] += now[a + t] * data.rewards[a + t] / n if a + t < b else 0.0
    psi, u = np.zeros(n), np.zeros(n)
    for i, (a, b) in enumerate(spans):
        mixture = np.exp(rows[:, a:b].sum(axis=1)) @ (behaviours.counts / n)
        u[i] = math.exp(rows[j, a:b].sum()) / mixture
        for t in range(longest):
            reward = data.rewards[a + t] if a + t < b else 0.0
            w = then[min(a + t, b - 1)]
            psi[i] += (
                w * reward if name == "FIS" else w / weight[t] * (reward - paid[t] / weight[t])
            )
    square = sum(np.var(psi[behaviours.ids == k], ddof=1) * behaviours.counts[k] for k in range(3))
    mean = np.average(psi, weights=u)
    ess = u.sum() ** 2 / np.sum(u**2)
    square += m * np.average((psi - mean) ** 2, weights=u) * ess / (ess - 1)
    predict = prediction(data, target, data.policies[j], name)
    assert predict(m) == pytest.approx(math.sqrt(square) / (n + m), rel=1e-9)
    assert predict.ess == pytest.approx(ess)


class Design:
    """Hold a small MDP whose every episode is known, to be sampled in bulk."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.mdp = small_mdps.random_mdp(self.rng, horizon=3)
        self.policies = [small_mdps.random_policy(self.rng, self.mdp) for _ in range(3)]
        self.target = small_mdps.random_policy(self.rng, self.mdp)
        self.paths = small_mdps.paths(self.mdp)
        self._chances: dict[bytes, NDArray[np.float64]] = {}

    def _steps(self, values: list[list[float]]) -> NDArray[np.float64]:
        """Return (paths, T), the rows filled up with 0."""
        return np.array([row + [0.0] * (self.mdp.horizon - len(row)) for row in values])

    def _logs(self, policy: NDArray[np.float64]) -> NDArray[np.float64]:
        logs = np.log(policy)
        rows = [
            [float(logs[s, a]) for s, a in zip(p.states, p.actions, strict=True)]
            for p in self.paths
        ]
        return np.cumsum(self._steps(rows), axis=1)

    def weights(self, counts: list[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return fused weights and weighted rewards of every path (last count: the target)."""
        shares = np.array(counts) / sum(counts)
        acting = [*self.policies, self.target]
        mixture = sum(s * np.exp(self._logs(p)) for s, p in zip(shares, acting, strict=True))
        w = np.exp(self._logs(self.target)) / mixture
        return w, w * self._steps([list(p.rewards) for p in self.paths])

    def chances(self, policy: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of every path under a policy."""
        key = policy.tobytes()
        if key not in self._chances:
            p = np.array([path.probability(policy) for path in self.paths])
            self._chances[key] = np.asarray(p / p.sum())
        return self._chances[key]

    def exact_plain(self, counts: list[int]) -> float:
        """Return the standard deviation of FIS, by enumeration."""
        psi, total = self.weights(counts)[1].sum(axis=1), 0.0
        for n, policy in zip(counts, [*self.policies, self.target], strict=True):
            p = self.chances(policy)
            total += n * float(p @ psi**2 - (p @ psi) ** 2)
        return math.sqrt(total) / sum(counts)

    def simulated_normalised(self, counts: list[int], rounds: int) -> float:
        """Return the standard deviation of NFIS over simulated data sets."""
        w, paid = self.weights(counts)
        drawn = sum(
            self.rng.multinomial(n, self.chances(policy), size=rounds)
            for n, policy in zip(counts, [*self.policies, self.target], strict=True)
        )
        return float(((drawn @ paid) / (drawn @ w)).sum(axis=1).std())

    def record(self, counts: list[int]) -> Any:
        ids = np.repeat(np.arange(3), counts).tolist()
        drawn = [
            self.rng.choice(len(self.paths), size=n, p=self.chances(policy))
            for n, policy in zip(counts, self.policies, strict=True)
        ]
        chosen = [self.paths[i] for i in np.concatenate(drawn)]
        return builders.buffer_of(chosen, ids, self.policies, horizon=3).view()


@pytest.mark.parametrize("j", [0, 3])
def test_predictions_meet_the_error_of_the_larger_sample(j: int) -> None:
    """FIS against enumeration, NFIS against simulation; j = 3 is the target itself."""
    design, counts, more, rounds = Design(2), [40, 30, 50], 150, 60
    larger = [*counts, 0]
    larger[j] += more
    policy, target = Table([*design.policies, design.target][j]), Table(design.target)
    squares: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        data = design.record(counts)
        for name in NAMES:
            squares[name].append(prediction(data, target, policy, name)(more) ** 2)
    plain, error = np.mean(squares["FIS"]), np.std(squares["FIS"]) / math.sqrt(rounds)
    assert abs(plain - design.exact_plain(larger) ** 2) < 4 * error
    ratios = np.sqrt(squares["NFIS"]) / design.simulated_normalised(larger, 4000)
    assert abs(ratios.mean() - 1) < 0.05
    assert ratios.std() < 0.2


@pytest.mark.parametrize("rare", [False, True])
def test_the_error_that_was_asked_for_is_reached(rare: bool) -> None:
    """One step of two actions; where rewards are rare, so is a large one in the pilot."""
    rng, ratios, n = np.random.default_rng(1), [], 80
    tables = [np.array([[0.7, 0.3]]), np.array([[0.3, 0.7]])]

    def play(policy: int, episodes: int) -> Any:
        actions = (rng.random(episodes) > tables[policy][0, 0]).astype(int)
        paid = rng.normal(actions, 1.0)
        rewards = (rng.random(episodes) < 0.1) * (1.0 + actions) if rare else paid
        paths = [
            small_mdps.Path((0,), (a,), (float(r),), 1.0)
            for a, r in zip(actions.tolist(), rewards.tolist(), strict=True)
        ]
        return builders.buffer_of(paths, [policy] * episodes, tables).view()

    for _ in range(40):
        data, target = play(0, n), Table(tables[1])
        before = evaluate(data, target, "NFIS", q_model=None)["NFIS"].standard_error
        need = episodes_needed(data, target, before / 2, policy=1).needs[0]
        assert need.episodes is not None
        larger = evaluate(data.merge(play(1, need.episodes)), target, "NFIS", q_model=None)["NFIS"]
        ratios.append(larger.standard_error / (before / 2))
    assert np.median(ratios) <= 1.05
    assert np.mean(np.array(ratios) <= 1.1) >= 0.8 - 3 * math.sqrt(0.8 * 0.2 / 40)
    assert np.median(ratios) > 0.7  # not by collecting far too many


def test_the_fewest_episodes_are_found(made: builders.Recorded) -> None:
    plan = episodes_needed(made.trajectories, made.target, 0.3)
    assert [need.episodes for need in plan.needs] == sorted(
        need.episodes for need in plan.needs if need.episodes is not None
    )
    for need in plan.needs:
        policy = made.target if need.policy is None else made.trajectories.policies[need.policy]
        predict = prediction(made.trajectories, made.target, policy)
        assert need.episodes is not None
        assert need.standard_error == predict(need.episodes) <= 0.3
        assert predict.bound(need.episodes) <= 0.33
        assert predict.bound(need.episodes - 1 - need.episodes // 200) > 0.33
    assert plan.best is not None
    assert plan.best.name == "the target itself"
    assert f"collect {plan.best.episodes} more episodes of the target itself" in str(plan)
    (only,) = episodes_needed(made.trajectories, made.target, 0.3, policy=1).needs
    assert only == next(need for need in plan.needs if need.policy == 1)
    (itself,) = episodes_needed(made.trajectories, made.target, 0.3, policy="target").needs
    assert itself == plan.best
    (given,) = episodes_needed(made.trajectories, made.target, 0.3, policy=made.target).needs
    assert given.episodes == itself.episodes


def test_what_cannot_be_reached_is_said(made: builders.Recorded) -> None:
    plan = episodes_needed(made.trajectories, made.target, 0.01, limit=50)
    assert plan.best is None
    assert ">50" in str(plan)
    assert "none of them gets there" in str(plan)
    assert all(need.standard_error > 0.01 for need in plan.needs)
    done = episodes_needed(made.trajectories, made.target, 5.0)
    assert done.best is not None
    assert done.best.episodes == 0
    assert "nothing more is needed" in str(done)
    for said in (str(plan), str(done)):  # which estimator, and that auto differs
        assert "\nby NFIS, because its error after more episodes can be predicted; auto" in said
    json.dumps(plan.to_dict(), allow_nan=False)


def test_a_policy_that_never_does_what_the_target_does_is_of_no_use() -> None:
    """One step: policy 1 never takes action 0, which alone has a spread."""
    rng = np.random.default_rng(0)
    tables = [np.array([[0.5, 0.5]]), np.array([[0.0, 1.0]])]
    ids = [0] * 40 + [1] * 10
    actions = [int(rng.random() < 0.5) if k == 0 else 1 for k in ids]
    paths = [
        small_mdps.Path((0,), (a,), (0.0 if a else float(rng.normal()),), 1.0) for a in actions
    ]
    data = builders.buffer_of(paths, ids, tables).view()
    target = Table(np.array([[0.5, 0.5]]))
    plan = episodes_needed(data, target, 0.05)
    useful, useless = plan.needs
    assert (useful.policy, useless.policy) == (0, 1)
    assert useful.name == "policy 0, the target itself"
    assert useless.episodes is None
    assert useless.standard_error > 0.05
    never = Table(np.array([[0.0, 1.0]]))
    nothing = data.select(episodes=np.flatnonzero(np.array(actions) == 0))
    (unknown,) = episodes_needed(nothing, target, 0.01, policy=never).needs
    assert unknown.episodes is None
    assert math.isnan(unknown.standard_error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"standard_error": 0.0}, "standard_error is 0.0"),
        ({"standard_error": math.nan}, "standard_error is nan"),
        ({"limit": 0}, "limit is 0"),
        ({"policy": 8}, r"policy is 8; .* \(0 to 2\)"),
        ({"policy": "best"}, "policy is 'best'"),
        ({"estimator": "BIS"}, "choose one of NFIS, FIS"),
        ({"gamma": 2.0}, "gamma is 2.0"),
        ({"held_out": "some"}, "held_out is 'some'"),
    ],
)
def test_errors_name_what_is_wrong(
    made: builders.Recorded, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        episodes_needed(made.trajectories, made.target, **{"standard_error": 0.1, **options})


def test_data_that_cannot_tell_are_refused(made: builders.Recorded) -> None:
    data = made.trajectories
    with pytest.raises(ValueError, match="present standard error is not known"):
        episodes_needed(data.select(episodes=[0]), made.target, 0.1)
    with pytest.raises(ValueError, match="is empty"):
        contributions(data.select(episodes=[]), made.target)
    gone = dataclasses.replace(data, policies=(*data.policies[:2], UnavailablePolicy("x", {})))
    with pytest.raises(ValueError, match=r"policy 2 .* cannot be asked: no class of that kind is"):
        contributions(gone, made.target)
    few = gone.select(policies=[0, 1])
    with pytest.raises(ValueError, match="policy is 2, but policy 2 cannot be asked"):
        episodes_needed(few, made.target, 0.1, policy=2)


def test_command_plans(
    tmp_path: Path, made: builders.Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(tmp_path / "a.ope"), tmp_path / "plan.json"
    made.trajectories.save(path)
    assert command(["plan", path, "--target", "0", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("value of policy 0: NFIS ")
    assert "more episodes of policy" in text
    found = json.loads(out.read_text())
    assert found["plan"]["wanted"] == pytest.approx(found["contributions"]["standard_error"] / 2)
    assert command(["plan", path, "--standard-error", "9", "--collect", "target"]) == 0
    assert "nothing more is needed" in capsys.readouterr().out
    made.trajectories.select(episodes=[0]).save(path)
    assert command(["plan", path]) == 2
    assert "which cannot be halved" in capsys.readouterr().err
    assert command(["plan", path, "--standard-error", "1", "--collect", "best"]) == 2
    assert "--collect best: give" in capsys.readouterr().err
