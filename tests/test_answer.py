"""The answer first: headlines, digits, groups and names of estimators, what stands for a policy."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ope_gym import ESTIMATORS, Evaluation, Trajectories, evaluate, evaluate_log_probs, rank
from ope_gym.analysis.overlap import overlap
from ope_gym.cli import main as command
from ope_gym.estimators.table import ALIASES, GROUPS, PAPER, choose, estimator_names, one_estimator
from ope_gym.inference.estimate import Estimate
from ope_gym.inference.intervals import Interval
from ope_gym.policies import EpsilonGreedyTable, SoftmaxLinear, as_policy, register_converter
from ope_gym.report import html, text
from ope_gym.report.page import report_page
from ope_gym.report.scalars import scalars
from ope_gym.verdict import Reason, Verdict
from tests.builders import LogProbOnly, Recorded, Table, recorded
from wrappers import RecordTrajectories, collect


@pytest.fixture(scope="module")
def made() -> Recorded:
    return recorded(3, (30, 30, 30), held_out=True)


@pytest.fixture(scope="module")
def evaluation(made: Recorded) -> Evaluation:
    return evaluate(made.trajectories, made.target)


FIRST = {  # reasons by colour
    "green": Reason("precise", ess=50.0, trajectories=60, fresh=37.4),
    "amber": Reason("no_spread"),
    "red": Reason("one_trajectory"),
}


def changed(estimate: Estimate, colour: str = "green", **changes: Any) -> Estimate:
    """Return an estimate with another verdict, and other numbers."""
    sample = dataclasses.replace(estimate.sample, regime=changes.pop("regime", "held-out"))
    reasons = (FIRST[colour], *changes.pop("reasons", ()))
    verdict = Verdict(reasons, changes.pop("advice", ()))
    usual: dict[str, Any] = {"value": 281.354, "standard_error": 10.2, "fresh_episodes": 37.4}
    usual["interval"] = Interval(256.16, 306.26, 0.95, "ess-t")
    changes = {"share": 0.0, **usual, **changes}
    return dataclasses.replace(estimate, verdict=verdict, sample=sample, **changes)


def test_how_sure_an_estimate_is_does_not_depend_on_those_beside_it(made: Recorded) -> None:
    found = [
        evaluate(made.trajectories, made.target, names)["NFIS"].fresh_episodes
        for names in (["NFIS"], ["NFIS", "NFCIS"], ["FCIS", "NFIS", "BIS"], "paper")
    ]
    assert len(set(found)) == 1


# Headlines ---------------------------------------------------------------------------------------

SURE = "is worth 281 (95 %: 256 to 306), as sure as about 37 fresh episodes would make you."


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({}, "policy 10", f"Policy 10 {SURE}"),
        ({}, "ppo.zip", f"ppo.zip {SURE}"),
        ({"colour": "amber"}, "it", f"It {SURE} Use with care: {FIRST['amber']}."),
        (
            {"colour": "red"},
            "the policy",
            "The policy may be worth 281 (95 %: 256 to 306), but do not use this number: "
            f"{FIRST['red']}.",
        ),
        ({"fresh_episodes": math.nan}, "policy 1", "Policy 1 is worth 281 (95 %: 256 to 306)."),
        (
            {"colour": "red", "value": math.nan},
            "policy 1",
            f"The value of policy 1 is unknown: {FIRST['red']}.",
        ),
        ({"colour": "red", "value": math.inf}, "it", f"Its value is unknown: {FIRST['red']}."),
        (
            {"colour": "amber", "regime": "in-sample", "reasons": (Reason("in_sample"),)},
            "policy 1",
            f"Policy 1 is worth 281 (95 %: 256 to 306). Use with care: {Reason('in_sample')}.",
        ),
        (
            {"interval": Interval(math.nan, math.nan, 0.95, "ess-t"), "standard_error": math.nan},
            "policy 1",
            "Policy 1 is worth 281.4 (how sure that is cannot be known).",
        ),
    ],
)
def test_headlines(evaluation: Evaluation, changes: dict[str, Any], name: str, said: str) -> None:
    assert text.headline(changed(evaluation.best, **changes), name) == said


def test_every_result_begins_with_its_headline(made: Recorded, evaluation: Evaluation) -> None:
    assert evaluation.headline == text.headline(evaluation["auto"], "the policy")
    assert " ".join(str(evaluation).split("\n\n")[0].split("\n")) == evaluation.headline
    assert evaluation.to_dict()["headline"] == evaluation.headline
    numbered = evaluate(made.trajectories, 1)
    assert numbered.target == "policy 1"
    assert numbered.headline.startswith("Policy 1 ")
    last = f"policy {len(made.trajectories.policies) - 1}"
    assert evaluate(made.trajectories, "last").target == last
    assert evaluation.named("mine").headline.startswith("mine ")
    ranking = rank(made.trajectories, {"mine": made.target, "first": 0})
    assert " ".join(str(ranking).split("\n\n")[0].split("\n")) == ranking.headline
    assert ranking.headline.startswith(ranking.best.name)
    assert text.chance(ranking.best.probability_best) in ranking.headline


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (281.354, 10.2, "281"),
        (9.6726, 0.51, "9.67"),
        (9.6726, 0.0996, "9.67"),  # rounds to 0.10
        (0.5, 0.0004, "0.50000"),
        (-12345.6, 300.0, "-12,346"),
        (-0.004, 0.3, "0.00"),
        (2.5e12, 3e9, "2.5e+12"),
    ],
)
def test_digits_follow_the_error(
    evaluation: Evaluation, value: float, error: float, said: str
) -> None:
    estimate = changed(evaluation.best, value=value, standard_error=error)
    assert text.rounded(estimate.value, text.decimals(estimate)) == said


def test_rows_share_their_decimals_but_show_their_errors(evaluation: Evaluation) -> None:
    first = changed(evaluation.best)
    close = changed(evaluation.best, standard_error=8.4)
    sharp = changed(evaluation.best, standard_error=0.0123)
    assert text.estimate_cells(first, first)[:2] == ["281", "10"]
    assert text.estimate_cells(close, first)[:2] == ["281", "8"]
    assert text.estimate_cells(sharp, first)[:2] == ["281.35", "0.01"]


# Estimators --------------------------------------------------------------------------------------


def test_a_table_shows_the_recommended_first_whatever_the_order(made: Recorded) -> None:
    names = ["BIS", "NFIS", "DM", "auto"]
    found = evaluate(made.trajectories, made.target, names)
    assert list(found) == names  # as they were asked for: code may go by it
    assert list(found.ranked()) == ["auto", "NFIS", "BIS", "DM"]
    rows = [line.split()[0] for line in str(found).splitlines() if line.strip()]
    assert [word for word in rows if word in names] == list(found.ranked())
    assert found.best is found["auto"]
    assert list(found.select(["DM", "NFIS"])) == ["NFIS", "DM"]
    assert list(found.select(["ADR"])) == list(found)
    assert evaluate(made.trajectories, made.target, ["FIS", "BIS"]).best.name == "FIS"


def test_without_auto_and_nfis_the_headline_is_the_first_reliable_one_and_names_it(
    evaluation: Evaluation,
) -> None:
    """By weights against all before one, without a cap, normalised before plain; models last."""
    nfis = evaluation["NFIS"]

    def asked(**colours: str) -> Evaluation:
        made = {n: changed(nfis, colour, name=n) for n, colour in colours.items()}
        return Evaluation(made, "policy 1")

    for colours, want in (
        ({"BIS": "amber", "DM": "green", "FIS": "red"}, "BIS"),  # DM: green is no sign of a right q
        ({"DM": "green", "BIS": "green", "FCIS": "green", "FIS": "green"}, "FIS"),
        ({"DM": "amber", "NBIS": "red", "BIS": "amber"}, "BIS"),
        ({"DM": "red", "BIS": "red", "NBIS": "red"}, "NBIS"),
        ({"BIS": "green", "auto": "red"}, "auto"),
        ({"BIS": "green", "NFIS": "red"}, "NFIS"),
    ):
        found = asked(**colours)
        assert found.best.name == want == next(iter(found.ranked()))
        assert list(found) == list(colours)
        named = "" if want in ("auto", "NFIS") else f" by {want}"
        assert f"worth 281{named} (95 %: 256 to 306)" in found.headline
    first = asked(BIS="green", FIS="red")
    assert first.headline.startswith("Policy 1 is worth 281 by BIS (95 %")
    assert list(first.ranked()) == ["BIS", "FIS"]
    assert scalars(first)["ope/verdict"] == 0.0  # FIS: the same one at every step of a run
    lost = Evaluation({"BIS": changed(nfis, "red", name="BIS", value=math.nan)}, "policy 1")
    assert lost.headline == f"The value of policy 1 by BIS is unknown: {FIRST['red']}."


def test_groups_give_what_the_data_allow(made: Recorded) -> None:
    data, target = made.trajectories, made.target
    assert list(evaluate(data, target)) == ["auto", "NFIS"]
    assert set(evaluate(data, target, "paper")) == {*PAPER, "auto"} - {"EA"}
    everything = evaluate(data, target, "all")
    assert set(everything) == {*ESTIMATORS} - {"EA"}
    assert list(evaluate(data, target, ["default", "DM"])) == ["auto", "NFIS", "DM"]
    assert set(evaluate(data, target, "all", q_model=None)) == {
        name for name, c in ESTIMATORS.items() if not c.baseline and name != "EA"
    }
    one_step = recorded(8, horizon=1)
    assert "EA" in evaluate(one_step.trajectories, one_step.target, "paper")
    arrays = evaluate_log_probs(*made.arrays, "all")
    assert set(arrays) == {*PAPER, "auto"} - {"EA"}


def test_a_group_is_empty_of_what_cannot_be_had() -> None:
    nothing = {"policies": "gone", "q model": "none"}
    assert choose(["default"], nothing) == ("BIS", "NBIS")
    models = {"policies": "gone", "propensities": "nobody knows", "one step": "long"}
    assert choose(["default", "paper"], models) == ("DM", "MDR")
    words = "'NFIS', which needs the probabilities of all actions, but nobody knows"
    with pytest.raises(ValueError, match=words):
        choose(["paper", "NFIS"], models)
    for name, lines in GROUPS.items():
        assert {member for line in lines for member in line} <= set(ESTIMATORS), name


def test_names_of_others_are_understood(made: Recorded) -> None:
    assert set(ALIASES.values()) <= set(ESTIMATORS)
    assert not set(ALIASES) & {*ESTIMATORS, *GROUPS}
    found = evaluate(made.trajectories, made.target, ["WIS", "PDIS", "IS"])
    assert list(found) == ["NBIS", "BIS"]
    assert found["WIS"] is found["NBIS"]
    assert rank(made.trajectories, [0, 1], "WIS").best.estimate.name == "NBIS"
    for given, meant in (("nfis", "NFIS"), ("NIFS", "NFIS"), ("Auto", "auto"), ("FQEE", "FQE")):
        with pytest.raises(ValueError, match=f"has '{given}'; did you mean '{meant}'"):
            estimator_names(given)
    with pytest.raises(ValueError, match=r"has 'zzz'; Known are BIS"):
        estimator_names("zzz")
    with pytest.raises(ValueError, match="estimator is 'paper'; give the name of one"):
        one_estimator("paper")


# Pages -------------------------------------------------------------------------------------------


def test_the_page_holds_its_data_and_loads_nothing(made: Recorded) -> None:
    found = evaluate(made.trajectories, 1, "paper")
    hostile = "</script><b>first</b><!--"
    ranking = rank(made.trajectories, {hostile: 0, "second": 1, "third": made.target})
    page = report_page(found, ranking=ranking, overlap=overlap(made.trajectories, 1), title=hostile)
    assert escape(found.headline) in page
    assert escape(hostile) in page
    assert hostile not in page
    assert page.count("</script>") == 2
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=|url\((?!#)|^(import|export) ", page, re.MULTILINE)
    (data,) = re.findall(r'id="documents">(.*?)</script>', page)
    documents = json.loads(data)
    assert [row["name"] for row in documents["evaluation"]["estimates"]] == list(found.ranked())
    assert {row["name"] for row in documents["ranking"]["policies"]} == set(ranking)
    assert page.count("<tr>") == 2 + len(found) + len(ranking)
    assert "ranking" not in re.findall(r'id="documents">(.*?)</script>', report_page(found))[0]


def test_a_notebook_shows_the_answer_the_table_and_the_reasons(evaluation: Evaluation) -> None:
    shown = evaluation._repr_html_()
    assert escape(evaluation.headline) in shown
    assert shown.count("<tr>") == 1 + len(evaluation)
    for e in evaluation.values():
        assert f'{e.verdict.colour}">{e.verdict.colour}</td>' in shown
    named = Reason("collect_from", episodes=3, behaviour="<b>")
    hostile = changed(evaluation.best, "red", advice=(named,), name="<i>")
    assert "<b>" not in html.reasons({"<i>": hostile}) + html.estimate_table({"<i>": hostile})


def test_the_report_command_writes_a_page(
    made: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = [EpsilonGreedyTable(np.array([0, 1, 2]), epsilon, 3) for epsilon in (0.9, 0.7, 0.5)]
    data = made.trajectories
    rng = np.random.default_rng(0)
    actions = rng.integers(3, size=data.n_steps)
    ids = np.repeat(np.arange(len(data)) % 3, data.lengths)
    logs = np.stack([p.log_prob(data.observations, actions) for p in policies])
    stored = Trajectories.from_arrays(
        data.observations,
        actions,
        data.rewards,
        logs[ids, np.arange(ids.size)],
        offsets=data.offsets,
        policies=policies,
        policy_ids=ids.tolist(),
        terminated=True,
    )
    file, page = tmp_path / "some.ope", tmp_path / "out.html"
    stored.save(file)
    assert command(["report", str(file), "--html", str(page), "--target", "2"]) == 0
    said = capsys.readouterr().out
    written = page.read_text(encoding="utf-8")
    assert said.startswith("Policy 2 ")
    assert escape(said.splitlines()[0]) in written
    assert "<h3>All policies</h3>" in written
    assert '"overlap": {"rows"' in written
    assert command(["report", str(file), "--html", str(tmp_path / "no" / "out.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# Policies ----------------------------------------------------------------------------------------


class Weights:
    """Stand for a model of another library."""


def test_others_can_register_a_converter(monkeypatch: pytest.MonkeyPatch, made: Recorded) -> None:
    monkeypatch.setattr("ope_gym.policies.base._CONVERTERS", {})
    model = Weights()
    assert as_policy(model) is model
    with pytest.raises(TypeError, match=r"target is .*Weights.*which has no log_prob and sample"):
        evaluate(made.trajectories, model)
    register_converter(__name__.partition(".")[0], lambda _: made.target)
    found, wanted = evaluate(made.trajectories, model), evaluate(made.trajectories, made.target)
    assert found["NFIS"].value == wanted["NFIS"].value


def test_functions_and_missing_files_are_refused_in_words(made: Recorded) -> None:
    with pytest.raises(TypeError, match=r"target is the function .*how probable they were"):
        evaluate(made.trajectories, lambda observation: 0)
    with pytest.raises(FileNotFoundError, match=r"target is 'none.zip', and there is no such"):
        evaluate(made.trajectories, "none.zip")
    with pytest.raises(ValueError, match=r"target is 'best'; give a policy, .*'last' or a .zip"):
        evaluate(made.trajectories, "best")


def test_a_name_instead_of_an_environment() -> None:
    from wrappers import vector

    doors: list[tuple[Any, str]] = [
        (RecordTrajectories, "RecordTrajectories(gym.make('CartPole-v1'))"),
        (vector.RecordTrajectories, "RecordTrajectories(gym.make_vec('CartPole-v1', num_envs=8))"),
        (lambda env: collect(env, Table(np.ones((1, 2)) / 2), 1, 0), "give a recorder"),
    ]
    for make, words in doors:
        with pytest.raises(TypeError, match=re.escape(words)):
            make("CartPole-v1")


def test_a_deterministic_policy_gets_a_clear_word(made: Recorded) -> None:
    certain = Table(np.eye(3)[[0, 1, 2]])
    found = evaluate(made.trajectories, certain, ["NFIS", "DM"])
    assert found["NFIS"].verdict.colour != "green"
    assert found["NFIS"].verdict.advice == (Reason("explore"),)
    assert Reason("explore") not in found["DM"].verdict.advice
    silent = evaluate(made.trajectories, LogProbOnly(certain.log_prob), "NFIS")
    assert silent["NFIS"].verdict.advice == found["NFIS"].verdict.advice
    partly = Table(np.array([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]))
    for soft in (made.target, LogProbOnly(made.target.log_prob), LogProbOnly(partly.log_prob)):
        (other,) = evaluate(made.trajectories, soft, "NFIS").values()
        assert Reason("explore") not in other.verdict.advice


def test_a_density_of_one_is_not_certain() -> None:
    """A uniform target where the logger's density of action a is 2 a, and 6 steps are too many."""
    rng = np.random.default_rng(0)
    space, root = gym.spaces.Box(0.0, 1.0, (1,), np.float64), np.sqrt(rng.random((180, 1)))
    logged = np.log(2.0 * root[:, 0])
    data = Trajectories.from_arrays(
        rng.random((180, 1)),
        root,
        rng.random(180),
        logged,
        offsets=np.arange(31) * 6,
        policies=[LogProbOnly(lambda _, actions: np.log(2.0 * actions[:, 0]))],
        policy_ids=0,
        terminated=True,
        action_space=space,
    )
    even = LogProbOnly(lambda _, actions: np.zeros(len(actions)))
    verdict = evaluate(data, even, "NFIS", origin="fixed")["NFIS"].verdict
    assert verdict.advice[0].code.startswith("collect")


def cartpole(policy: Any, episodes: int = 12) -> RecordTrajectories:
    import gymnasium as gym

    env = RecordTrajectories(gym.make("CartPole-v1", max_episode_steps=15), held_out=0.5)
    collect(env, policy, episodes, 0, seed=1)
    return env


def network() -> Any:
    """Return the module of the policies in `test_torch_modules_...`; also named by --policy."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(1)  # one whose episodes do not all reach the limit
        return torch.nn.Linear(4, 2)


def test_torch_modules_are_policies_and_come_back_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch import nn

    module = network()
    env = cartpole(module)
    by_hand = evaluate(env, module)
    assert by_hand["NFIS"].value == pytest.approx(env.buffer.select(held_out=True).returns().mean())
    with pytest.raises(
        ValueError, match=r"takes 5 numbers, but the observations have shape \(4,\)"
    ):
        evaluate(env, nn.Linear(5, 2))
    file = tmp_path / "torch.ope"
    env.buffer.save(file)
    assert command(["evaluate", str(file)]) == 2
    said = capsys.readouterr().err
    assert "cannot be asked" in said
    assert "on the command line give --policy PACKAGE:FACTORY" in said
    assert command(["rank", str(file)]) == 2
    assert "give --policy PACKAGE:FACTORY" in capsys.readouterr().err
    place = f"{__name__}:network"
    for name in ("distribution", "plan"):
        assert command([name, str(file), "--policy", place]) == 0
        assert "policy 0" in capsys.readouterr().out
    assert command(["evaluate", str(file), "--policy", place, "--estimators", "NFIS"]) == 0
    assert by_hand.select(["NFIS"]).headline.partition(" is ")[2] in " ".join(
        capsys.readouterr().out.split("\n\n")[0].split("\n")
    )
    assert command(["evaluate", str(file), "--policy", f"{__name__}:nothing"]) == 2
    assert "give package.module:function" in capsys.readouterr().err
    assert command(["evaluate", str(file), "--target", place, "--policy", place]) == 0


def test_sb3_models_and_their_files_are_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stable = pytest.importorskip("stable_baselines3")
    from wrappers.sb3.snapshots import snapshot

    models = [
        stable.PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, seed=0, device="cpu"),
        stable.A2C("MlpPolicy", "CartPole-v1", seed=1, device="cpu"),
        stable.DQN("MlpPolicy", "CartPole-v1", buffer_size=10, seed=2, device="cpu"),
    ]
    env = cartpole(models[0])
    assert env.buffer.policies == (snapshot(models[0]),)
    for model in models:
        path = tmp_path / f"{type(model).__name__}.zip"
        model.save(path)
        direct, saved = evaluate(env, model), evaluate(env, str(path))
        assert saved["NFIS"].value == direct["NFIS"].value
        assert saved.target == path.name
        assert as_policy(path) == snapshot(model)
    file = tmp_path / "a.ope"
    env.buffer.save(file)
    assert command(["rank", str(file), "--policies", "0", str(tmp_path / "A2C.zip")]) == 0
    assert re.search(r"^A2C\.zip +\d", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(TypeError, match=r"give the model itself, evaluate\(data, model\)"):
        evaluate(env, models[0].policy)
    other = tmp_path / "other.zip"
    other.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"other.zip is not a model that Stable-Baselines3 saved"):
        evaluate(env, other)


def test_a_trained_dqn_cannot_tell_whether_its_observations_were_normalised(
    tmp_path: Path,
) -> None:
    stable = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    small: dict[str, Any] = {"seed": 0, "device": "cpu"}
    dqn = stable.DQN("MlpPolicy", "CartPole-v1", buffer_size=50, learning_starts=10, **small)
    dqn.learn(60)
    dqn.save(tmp_path / "dqn.zip")
    with pytest.warns(UserWarning, match=r"dqn.zip does not say whether .* VecNormalize; if so"):
        assert as_policy(tmp_path / "dqn.zip") == as_policy(dqn)
    ppo = stable.PPO(
        "MlpPolicy", VecNormalize(make_vec_env("CartPole-v1")), n_steps=8, batch_size=8, **small
    )
    ppo.learn(8)
    ppo.save(tmp_path / "ppo.zip")
    with pytest.raises(ValueError, match=r"ppo.zip was trained with VecNormalize"):
        as_policy(tmp_path / "ppo.zip")


def test_converters_are_not_imported_before_they_are_needed() -> None:
    import subprocess

    code = "import sys, ope_gym.policies.base as c; c.as_policy(3); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "stable_baselines3", "wrappers"} & set(run.stdout.split())


def test_linear_policies_are_left_as_they_are() -> None:
    policy = SoftmaxLinear(np.zeros((4, 2)))
    assert as_policy(policy) is policy
