"""Test estimates of each policy from the others' episodes against its own returns."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from ope_gym import Calibration, Compute, evaluate, leave_one_policy_out
from ope_gym.analysis.leave_one_out import Check
from ope_gym.cli import main as command
from ope_gym.inference.estimate import Estimate
from ope_gym.inference.intervals import Betting
from ope_gym.policies import UnavailablePolicy
from ope_gym.verdict import Reason
from tests import builders, small_mdps
from tests.test_evaluate import clocked, may_stop


@pytest.fixture(scope="module")
def made() -> builders.Recorded:
    return builders.recorded(3, (60, 50, 70, 1), held_out=True)


@pytest.fixture(scope="module")
def found(made: builders.Recorded) -> Calibration:
    return leave_one_policy_out(made.trajectories, estimator="NFIS", q_model=None, gamma=0.9)


def test_estimates_know_nothing_of_the_own_episodes(
    made: builders.Recorded, found: Calibration
) -> None:
    data = made.trajectories
    assert list(found) == [0, 1, 2]
    for k, check in found.items():
        others = data.select(policies=[j for j in range(4) if j != k])
        alone = evaluate(others, data.policies[k], estimators="NFIS", q_model=None, gamma=0.9)
        assert check.estimate.value == alone["NFIS"].value
        assert check.estimate.standard_error == alone["NFIS"].standard_error
        assert check.estimate.sample.counts.sum() == len(data) - check.episodes
        returns = []
        for i in range(len(data)):  # the plain way
            rows = range(int(data.offsets[i]), int(data.offsets[i + 1]))
            if data.policy_ids[rows[0]] == k:
                returns.append(sum(0.9**t * data.rewards[row] for t, row in enumerate(rows)))
        assert check.episodes == len(returns)
        assert check.own == pytest.approx(np.mean(returns))
        assert check.own_error == pytest.approx(np.std(returns, ddof=1) / math.sqrt(len(returns)))


def test_agreement_is_welchs_test(found: Calibration) -> None:
    for check in found.values():
        ess = check.estimate.diagnostics.ess
        a = check.estimate.standard_error**2 * ess / (ess - 1)
        b = check.own_error**2
        freedom = (a + b) ** 2 / (a**2 / (ess - 1) + b**2 / (check.episodes - 1))
        assert check.z == pytest.approx((check.estimate.value - check.own) / math.sqrt(a + b))
        assert check.agrees == (abs(check.z) <= stdtrit(freedom, 0.975))


def test_sums_are_those_of_the_checks(found: Calibration) -> None:
    checks = list(found.values())
    assert found.agreement == (sum(bool(c.agrees) for c in checks), 3)
    assert found.rmse == pytest.approx(math.sqrt(np.mean([c.difference**2 for c in checks])))
    assert found.expected_rmse == pytest.approx(math.sqrt(np.mean([c.error**2 for c in checks])))
    assert sum(n for n, _ in found.colours.values()) == 3
    for colour, (n, agree) in found.colours.items():
        own = [c for c in checks if c.estimate.verdict.colour == colour]
        assert (n, agree) == (len(own), sum(bool(c.agrees) for c in own))


def changed(estimate: Estimate, error: float, ess: float) -> Estimate:
    return dataclasses.replace(
        estimate,
        standard_error=error,
        diagnostics=dataclasses.replace(estimate.diagnostics, ess=ess),
    )


def test_without_errors_only_equal_values_agree(found: Calibration) -> None:
    check = Check(0, 9, 1.0, 0.0, changed(found[0].estimate, 0.0, 20.0), 0.95)
    assert check.z == math.copysign(math.inf, check.difference)
    assert check.agrees is False
    same = dataclasses.replace(check, own=check.estimate.value)
    assert same.z == 0.0
    assert same.agrees is True


def test_an_unknown_error_agrees_with_nothing_and_contradicts_nothing(found: Calibration) -> None:
    check = dataclasses.replace(found[0], estimate=changed(found[0].estimate, 0.1, 1.0))
    assert check.agrees is None
    assert math.isnan(check.z)
    text = str(Calibration([check], {}, "all"))
    assert "agree: 0 of 0" in text
    assert " ? " in text


def test_policies_that_cannot_be_checked_are_named(made: builders.Recorded) -> None:
    data = made.trajectories
    found = leave_one_policy_out(data, estimator="NFIS", q_model=None)
    assert found.skipped == {3: Reason("few_own")}
    assert "skipped 3: fewer than 2 episodes of its own" in str(found)
    with pytest.raises(KeyError, match="policy 3 was not checked: fewer than 2"):
        found[3]
    gone = dataclasses.replace(data, policies=(UnavailablePolicy("x", {}), *data.policies[1:]))
    found = leave_one_policy_out(gone, estimator="BIS", q_model=None)
    assert list(found) == [1, 2]
    asked = "the policy cannot be asked for probabilities: no class of that kind is registered"
    assert str(found.skipped[0]).startswith(asked)
    alone = leave_one_policy_out(data.select(policies=1), q_model=None)
    assert alone.skipped == {1: Reason("no_others")}
    assert "no policy could be checked" in str(alone)
    assert math.isnan(alone.rmse + alone.expected_rmse)


def test_episodes_that_could_have_changed_their_policy_are_no_own_ones() -> None:
    every = small_mdps.paths(may_stop())
    data = clocked([*every, *every], [0, 1, 2, 0, 2, 2, 0, 2])
    found = leave_one_policy_out(data, estimator="NFIS", q_model=None)
    assert list(found) == [1]
    assert found[1].episodes == 4
    assert found[1].estimate.sample.trajectories == 4
    assert found.skipped == {0: Reason("few_own")}


def test_held_out_episodes_are_taken_where_there_are_any() -> None:
    made = builders.recorded(3, (20, 20))
    some = dataclasses.replace(made.trajectories, held_out=np.arange(40) % 2 == 0)
    clean = leave_one_policy_out(some, estimator="NFIS", q_model=None)
    assert clean.data == "held-out"
    assert sum(check.episodes for check in clean.values()) == 20
    assert {c.estimate.sample.regime for c in clean.values()} == {"held-out"}
    both = leave_one_policy_out(some, estimator="NFIS", q_model=None, held_out=False)
    assert sum(check.episodes for check in both.values()) == 40
    trained = leave_one_policy_out(made.trajectories, estimator="NFIS", q_model=None)
    assert trained.data == "all"
    assert trained[1].estimate.sample.regime == "in-sample"  # learned from what it is judged by
    assert trained[0].estimate.sample.regime == "fresh"


def test_of_many_policies_some_are_checked(made: builders.Recorded) -> None:
    found = leave_one_policy_out(made.trajectories, estimator="NFIS", q_model=None, limit=2)
    assert list(found) == [0, 2]
    assert "1 more policies were left out" in str(found)
    seen: list[int] = []
    one = leave_one_policy_out(
        made.trajectories,
        estimator="NFIS",
        q_model=None,
        policies=[1],
        compute=Compute(progress=seen.append),
    )
    assert list(one) == [1]
    assert seen == [1]


def test_about_as_many_agree_as_the_level_says() -> None:
    """Compare policies near each other 200 times."""
    agree = told = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        mdp = small_mdps.random_mdp(rng, horizon=3)
        middle = small_mdps.random_policy(rng, mdp)
        near = [0.7 * middle + 0.3 * small_mdps.random_policy(rng, mdp) for _ in range(4)]
        ids = np.repeat(np.arange(4), 25).tolist()
        data = builders.buffer_of([builders.draw(rng, mdp, near[k]) for k in ids], ids, near)
        found = leave_one_policy_out(data, estimator="NFIS", q_model=None).agreement
        agree, told = agree + found[0], told + found[1]
    assert told == 200
    assert abs(agree / told - 0.95) < 4 * math.sqrt(0.95 * 0.05 / told)


def test_a_policy_whose_rewards_are_other_than_the_others_disagrees() -> None:
    made = builders.recorded(4, (80, 80, 80), held_out=True)
    data = made.trajectories
    paid = np.where(data.policy_ids == 1, data.rewards + 3.0, data.rewards)  # the env changed
    found = leave_one_policy_out(
        dataclasses.replace(data, rewards=paid), estimator="NFIS", q_model=None
    )
    assert found[1].agrees is False
    assert found[1].z < -3
    assert " NO " in str(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"interval": Betting(reward_range=(-9, 9))}, "take 'ess-t'"),
        ({"policies": [9]}, r"policies is 9; .* \(0 to 3\)"),
        ({"held_out": "some"}, "held_out is 'some'"),
        ({"estimator": "QIS"}, "'QIS'"),
    ],
)
def test_errors_name_what_is_wrong(
    made: builders.Recorded, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        leave_one_policy_out(made.trajectories, q_model=None, **options)
    with pytest.raises(ValueError, match="is empty"):
        leave_one_policy_out(made.trajectories.select(episodes=[]), q_model=None)


def test_table_and_json_and_command(
    tmp_path: Path, made: builders.Recorded, found: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = str(found).splitlines()
    assert lines[0] == "each policy estimated from the episodes of the others; data: held-out"
    assert len(lines) == 3 + 3 + 3 + 1
    assert lines[6].startswith(f"agree: {found.agreement[0]} of 3; about 2.8 would")
    path, out = str(tmp_path / "a.ope"), tmp_path / "check.json"
    made.trajectories.save(path)
    more = ["--estimator", "NFIS", "--q-model", "none", "--gamma", "0.9", "--json", str(out)]
    assert command(["check", path, *more]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert json.loads(out.read_text()) == json.loads(found.to_json())
    assert command(["check", path, "--policies", "0", "2", *more]) == 0
    assert command(["check", path, "--policies", "7"]) == 2
    assert (
        "--policies 7: give a policy, the number of a recorded one (0 to 3)"
        in capsys.readouterr().err
    )
