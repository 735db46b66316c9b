"""Test rankings: order, paired differences, probabilities, tables and figures."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import gammaincinv, ndtr, stdtr
from scipy.stats import chi2
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ope_gym import (
    Bootstrap,
    Compute,
    Ranking,
    Trajectories,
    TrajectoryBuffer,
    evaluate,
    evaluate_log_probs,
    rank,
)
from ope_gym.analysis.ranking import _widening, probability_best
from ope_gym.analysis.ranking import ranked as rank_estimates
from ope_gym.cli import main as command
from ope_gym.inference.errors import covariance_within, standard_error
from ope_gym.inference.estimate import Estimate
from ope_gym.policies import LinearSigmoid, SoftmaxLinear, UnavailablePolicy
from ope_gym.report.tensorboard import EvaluationWriter
from ope_gym.report.text import chance
from tests import builders, small_mdps
from tests.builders import Table


@pytest.fixture(scope="module")
def made() -> builders.Recorded:
    return builders.recorded(3, (60, 50, 70), held_out=True)


@pytest.fixture(scope="module")
def targets(made: builders.Recorded) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    new = {f"new {k}": Table(small_mdps.random_policy(rng, made.mdp, peak=0.5)) for k in range(3)}
    return {"target": made.target, "first": 0, **new}


@pytest.fixture(scope="module")
def ranking(made: builders.Recorded, targets: dict[str, Any]) -> Ranking:
    return rank(made.trajectories, targets, q_model=None)


def with_ess(estimate: Estimate, ess: float) -> Estimate:
    return dataclasses.replace(
        estimate, diagnostics=dataclasses.replace(estimate.diagnostics, ess=ess)
    )


def test_each_policy_has_the_numbers_of_its_own_evaluation(
    made: builders.Recorded, targets: dict[str, Any], ranking: Ranking
) -> None:
    assert set(ranking) == set(targets)
    for name, target in targets.items():
        policy = made.trajectories.policies[target] if isinstance(target, int) else target
        alone = evaluate(made.trajectories, policy, estimators="auto", q_model=None)["auto"]
        found = ranking[name].estimate
        assert found.value == alone.value
        assert found.standard_error == alone.standard_error
        assert found.interval == alone.interval
        assert found.verdict == alone.verdict
    values = [r.estimate.value for r in ranking.values()]
    assert values == sorted(values, reverse=True)
    assert ranking.best.name == next(iter(ranking))


def walks(acted: list[Any], episodes: int) -> TrajectoryBuffer:
    """Random walks on a line, pushed by actions; an episode ends at a distance of 2."""
    rng, buffer = np.random.default_rng(2), TrajectoryBuffer()
    for policy in acted:
        number = buffer.add_policy(policy)
        for _ in range(episodes):
            seen, taken = [rng.normal(size=2)], [0]
            while len(seen) < 12 and abs(seen[-1][0]) < 2.0:
                taken.append(int(policy.sample(seen[-1][None], rng)[0]))
                seen.append(seen[-1] + [0.3 * (2 * taken[-1] - 1), 0.0] + 0.2 * rng.normal(size=2))
            observations, actions = np.array(seen), np.array(taken)
            log_probs = policy.log_prob(observations, actions)
            rewards = observations[:, 0]
            buffer.append(observations, actions, rewards, log_probs, number, terminated=True)
    return buffer


@pytest.mark.parametrize("place", ["memory", "blocks"])
def test_sharing_between_targets_changes_no_number(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LinearQ, mixtures and passes over files are shared; some targets lack support."""
    monkeypatch.setattr("ope_gym.evaluation._TOGETHER", 3)
    small = {"estimators.markov": {"_MANY": 2, "_PIECE": 50}}
    for module, limits in small.items():
        for name, value in limits.items():
            monkeypatch.setattr(f"ope_gym.{module}.{name}", value)
    rng, path = np.random.default_rng(1), tmp_path / "episodes.ope"
    acted = [LinearSigmoid(rng.normal(size=2)) for _ in range(3)]
    sure = SoftmaxLinear(np.array([[0.0, 0.0], [1e5, 0.0]]))  # never takes some recorded actions
    walks(acted if place == "memory" else [sure], 40).save(path)
    targets = [acted[0], sure, LinearSigmoid(rng.normal(size=2)), acted[2]]
    compute = Compute() if place == "memory" else Compute(block_steps=200)
    found = rank(path, targets, compute=compute, gamma=0.97)
    for i, target in enumerate(targets):
        alone = evaluate(path, target, "auto", compute=compute, gamma=0.97)["auto"]
        shared = found[f"target {i}"].estimate
        assert str(shared.verdict) == str(alone.verdict)
        assert shared.diagnostics.support_violations == alone.diagnostics.support_violations
        for one, other in (
            (shared.value, alone.value),
            (shared.influence, alone.influence),
            (shared.interval.high, alone.interval.high),
            (shared.diagnostics.ess, alone.diagnostics.ess),
            (shared.diagnostics.missing_mass, alone.diagnostics.missing_mass),
        ):
            assert one is not None
            assert other is not None
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_rewards_of_several_files_count_once_for_each_policy(tmp_path: Path) -> None:
    """The mean reward of a step says what may be unseen; it differs between the files."""
    even, paths = LinearSigmoid(np.zeros(1)), [tmp_path / f"{i}.ope" for i in range(3)]
    for i, path in enumerate(paths):
        buffer = TrajectoryBuffer()
        acts = buffer.add_policy(even)
        for steps, reward in [(10 - 3 * i, 0.0), *[(2, 1.0)] * 15]:
            seen, taken = np.ones((steps, 1)), np.zeros(steps, dtype=np.int64)
            logs, rewards = even.log_prob(seen, taken), np.full(steps, reward)
            buffer.append(seen, taken, rewards, logs, acts, terminated=True)
        buffer.save(path)
    targets = {f"new {k}": LinearSigmoid(np.array([0.1 * k])) for k in range(1, 4)}
    compute = Compute(block_steps=50)
    found = rank(paths, targets, "NFIS", compute=compute)
    for name, target in targets.items():
        alone = evaluate(paths, target, "NFIS", compute=compute)["NFIS"]
        high = found[name].estimate.interval.high
        assert high == pytest.approx(alone.interval.high, rel=1e-9)


def test_differences_are_paired_within_strata(ranking: Ranking) -> None:
    best, strata = ranking.best, ranking.sample.strata
    assert best.difference is None
    for name, ranked in list(ranking.items())[1:]:
        gap = ranked.estimate.influence - best.estimate.influence
        square = 0.0
        for k in np.unique(strata):  # rho_k^2 s_k^2 / n_k
            own = gap[strata == k]
            square += (own.size / gap.size) ** 2 * own.var(ddof=1) / own.size
        assert ranked.difference is not None
        assert ranked.difference.value == ranked.estimate.value - best.estimate.value
        assert ranked.difference.standard_error == pytest.approx(math.sqrt(square), rel=1e-12)
        assert (ranked.difference.minuend, ranked.difference.subtrahend) == (name, best.name)


def test_covariance_has_the_squares_of_the_standard_errors() -> None:
    rng = np.random.default_rng(0)
    strata = np.array([0, 0, 0, 1, 1, 2, 3, 3])  # the single one joins a neighbour
    influence = rng.normal(size=(3, 8))
    found = covariance_within(influence, strata)
    for p in range(3):
        assert found[p, p] == pytest.approx(standard_error(influence[p], strata) ** 2, rel=1e-12)
        for q in range(3):
            both = standard_error(influence[p] - influence[q], strata) ** 2
            assert found[p, p] + found[q, q] - 2 * found[p, q] == pytest.approx(both, abs=1e-12)
    assert np.isnan(covariance_within(influence[:, :2], np.array([0, 1]))).all()


@pytest.mark.parametrize("ess", [3.0, 1e6])
def test_probability_of_two_policies_is_that_of_the_t_distribution(
    ranking: Ranking, ess: float
) -> None:
    """With one ESS for both the draws are a joint t, and their difference is a t as well."""
    a, b = (with_ess(r.estimate, ess) for r in list(ranking.values())[:2])
    d, draws = a.difference(b), 40_000
    scale = d.standard_error * math.sqrt(ess / (ess - 1))
    expected = float(stdtr(ess - 1, d.value / scale))
    found = probability_best([a, b], draws=draws, seed=5)
    assert found.sum() == pytest.approx(1.0)
    assert abs(found[0] - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_an_unknown_bias_leaves_open_who_is_best(ranking: Ranking) -> None:
    """With next to certain draws, N(0, 3^2) decides; freedom of a model stands in for the ESS."""
    a, b = (with_ess(r.estimate, 0.5) for r in list(ranking.values())[:2])
    assert np.isnan(probability_best([a, b])).all()
    a, b = (dataclasses.replace(e, freedom=1e6) for e in (a, b))
    d, draws = a.difference(b), 40_000
    bias = 3.0 * abs(d.value)
    spread = math.hypot(d.standard_error, bias)
    found = probability_best([dataclasses.replace(a, bias=bias), b], draws=draws)
    expected = float(ndtr(d.value / spread))
    assert 0.5 < expected < 0.7
    assert abs(found[0] - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_probabilities_agree_with_a_plain_simulation(ranking: Ranking) -> None:
    estimates = [
        with_ess(r.estimate, ess)
        for r, ess in zip(ranking.values(), (4.0, 30.0, 8.0, 60.0, 15.0), strict=True)
    ]
    rng, rounds = np.random.default_rng(11), 20_000
    cov = covariance_within(np.stack([e.influence for e in estimates]), estimates[0].sample.strata)
    normal = rng.multivariate_normal(np.zeros(5), cov, size=rounds)
    wins = np.zeros(5)
    for i in range(rounds):
        u, drawn = rng.random(), []
        for p, e in enumerate(estimates):
            ess = e.diagnostics.ess
            factor = math.sqrt(ess / (ess - 1)) * math.sqrt((ess - 1) / _quantile(ess, u))
            drawn.append(e.value + normal[i, p] * factor)
        wins[int(np.argmax(drawn))] += 1
    expected = wins / rounds
    found = probability_best(estimates, draws=20_000, seed=1)
    spread = np.sqrt(2 * np.maximum(expected * (1 - expected), 1 / rounds) / rounds)
    assert np.all(np.abs(found - expected) < 4.5 * spread)


_TABLE: dict[float, tuple[Any, Any]] = {}


def _quantile(ess: float, u: float) -> float:
    """Look up a quantile of chi2 with ESS - 1 degrees in a table: exact enough, and fast."""
    if ess not in _TABLE:
        grid = np.linspace(0, 1, 20_001)[1:-1]
        _TABLE[ess] = grid, chi2.ppf(grid, ess - 1)
    return float(np.interp(u, *_TABLE[ess]))


def test_bootstrap_probabilities_count_the_shared_replicates(
    made: builders.Recorded, targets: dict[str, Any]
) -> None:
    ranked = rank(made.trajectories, targets, q_model=None, seed=4, interval=Bootstrap(200))
    estimates = [with_ess(r.estimate, 1e9) for r in ranked.values()]  # nothing is widened
    wins = np.zeros(len(estimates))
    for r in range(200):
        wins[int(np.argmax([e.replicates[r] for e in estimates if e.replicates is not None]))] += 1
    np.testing.assert_allclose(probability_best(estimates), wins / 200, atol=1e-12)
    difference = ranked[list(ranked)[1]].difference
    assert difference is not None
    assert difference.interval.method == "percentile"


def one_step(mean: float, spread: float, seed: int, n: int = 200) -> Estimate:
    """Return the estimate of a policy that recorded all itself, with exactly this mean reward."""
    rewards = spread * np.random.default_rng(seed).standard_normal(n)
    rewards += mean - rewards.mean()
    nothing = np.zeros(n)
    return evaluate_log_probs(
        nothing, nothing[None], np.zeros(n, dtype=int), rewards, np.arange(n + 1), estimators="FIS"
    )["FIS"]


def test_of_many_policies_those_without_a_chance_take_no_part() -> None:
    """Two rivals among 100: their chances are those of the two alone."""
    rivals = [one_step(1.0, 1.0, 1), one_step(1.05, 1.0, 2)]
    hopeless = [one_step(-1.0 - 0.1 * k, 1.0, 3 + k) for k in range(98)]
    found = probability_best([*rivals, *hopeless])
    alone = probability_best(rivals)
    assert found[2:].max() == 0.0
    assert found.sum() == pytest.approx(1.0)
    assert abs(found[1] - alone[1]) < 4 * math.sqrt(2 * alone[0] * alone[1] / 20_000)


@pytest.mark.parametrize("spread", [1e7, 1e150])
def test_a_hopeless_policy_of_huge_spread_hides_no_difference(spread: float) -> None:
    rivals = [one_step(1.0, 1.0, 1), one_step(1.05, 1.0, 2)]
    alone = probability_best(rivals)
    assert 0.6 < alone[1] < 0.8
    found = probability_best([*rivals, one_step(-1e3 * spread, spread, 3)])
    assert found[2] == 0.0
    error = math.sqrt(2 * alone[0] * alone[1] / 20_000)
    assert abs(found[1] - alone[1]) < 4 * error
    twins = probability_best([rivals[0], rivals[1], rivals[1], one_step(-1e3 * spread, spread, 3)])
    assert twins[1] == twins[2] == pytest.approx(found[1] / 2, abs=4 * error)


def test_the_same_policy_under_two_names_shares_its_chance(made: builders.Recorded) -> None:
    found = rank(made.trajectories, {"a": made.target, "b": made.target, "c": 1}, q_model=None)
    assert found["a"].probability_best == pytest.approx(found["b"].probability_best)
    d = found.difference("a", "b")
    assert (d.value, d.standard_error) == (0.0, 0.0)
    assert sum(r.probability_best for r in found.values()) == pytest.approx(1.0)


def test_a_policy_without_support_comes_last_and_takes_no_part() -> None:
    table = np.array([[1.0, 0.0]])
    path = small_mdps.Path((0,), (0,), (1.0,), 1.0)
    other = small_mdps.Path((0,), (0,), (2.0,), 1.0)
    data = builders.buffer_of([path, other, path], [0, 0, 0], [table]).view()
    found = rank(data, {"never": Table(table[:, ::-1]), "same": 0}, estimator="NFIS", q_model=None)
    assert list(found) == ["same", "never"]
    assert math.isnan(found["never"].probability_best)
    assert found["same"].probability_best == 1.0
    assert "P(best) is rough where verdicts are red" in str(found)
    assert "P(best) leaves out never: the error is not known" in str(found)
    assert found.to_dict()["policies"]["never"]["probability_best"] is None
    assert found.plot().axes


def test_targets_are_named_by_number_or_place(made: builders.Recorded) -> None:
    chosen: list[Any] = [np.int64(2), made.target, 0]
    found = rank(made.trajectories, chosen, q_model=None)
    assert set(found) == {"policy 2", "target 1", "policy 0"}
    assert set(rank(made.trajectories, ["last", 0], q_model=None)) == {"policy 2", "policy 0"}
    named = rank(made.trajectories, {"new": "last"}, q_model=None)
    assert named["new"].estimate.value == found["policy 2"].estimate.value


@pytest.mark.parametrize(
    ("targets", "options", "words"),
    [
        ([], {}, "targets is empty"),
        ([0, 0], {}, "policy 0 twice"),
        ([7], {}, r"targets\[0\] is 7; .* \(0 to 2\)"),
        ({"a": "first"}, {}, r"targets\['a'\] is 'first'; give a policy"),
        ([0], {"origin": {"policy 1": "fixed"}}, "origin names 'policy 1'"),
        ([0], {"origin": "bought"}, "origin is 'bought'"),
        ([0], {"draws": 0}, "draws is 0"),
        ([0], {"estimator": ["NFIS"]}, "give the name of one"),
        ([0], {"estimator": "QIS"}, "'QIS'"),
    ],
)
def test_errors_name_what_is_wrong(
    made: builders.Recorded, targets: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        rank(made.trajectories, targets, q_model=None, **options)


def test_a_single_policy_or_an_unavailable_one_is_refused(made: builders.Recorded) -> None:
    with pytest.raises(TypeError, match="give policies by name"):
        rank(made.trajectories, made.target, q_model=None)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="was not ranked"):
        rank(made.trajectories, [0], q_model=None)["policy 1"]
    gone = dataclasses.replace(
        made.trajectories, policies=(UnavailablePolicy("x", {}), *made.trajectories.policies[1:])
    )
    with pytest.raises(ValueError, match="cannot be asked"):
        rank(gone, [0], estimator="BIS", q_model=None)


def test_table_tells_order_differences_chances_and_caution(ranking: Ranking) -> None:
    lines = str(ranking).splitlines()
    table = lines[lines.index("") + 1 :]
    assert table[0] == (
        "5 policies by auto, from 180 episodes of 3 behaviours, gamma 1; data: held-out"
    )
    assert table[3].startswith(f"{ranking.best.name} ")
    assert " best " in table[3]
    doubted = bool(ranking.best.estimate.verdict.against)
    assert any(line.startswith(f"{ranking.best.name}: ") for line in table) or not doubted
    assert " ".join(lines[: lines.index("")]) == ranking.headline
    low = {name: r.estimate.decisive.interval.low for name, r in ranking.items()}
    assert ranking.safest.name == max(low, key=lambda name: low[name])
    cautious = f"cautious choice: {ranking.safest.name}" in str(ranking)
    assert cautious == (ranking.safest is not ranking.best)


def test_a_ranking_has_the_verdict_of_its_best_and_of_its_place(ranking: Ranking) -> None:
    verdict, best = ranking.verdict, ranking.best
    assert set(best.estimate.verdict.against) <= set(verdict.reasons)
    doubtful = [reason for reason in verdict.reasons if reason.code == "best_doubtful"]
    assert bool(doubtful) == (best.probability_best < 0.5)
    cautious = [note["policy"] for note in verdict.notes if note.code == "safest"]
    assert cautious == ([ranking.safest.name] if ranking.safest is not best else [])
    assert ranking.to_dict()["verdict"]["colour"] == verdict.colour


def test_regimes_are_shown_by_policy_where_they_differ() -> None:
    made = builders.recorded(3, (20, 20))
    text = str(rank(made.trajectories, [0, 1], q_model=None))
    assert text.splitlines()[text.splitlines().index("") + 2].endswith("  data")
    assert "in-sample, optimistic" in text
    assert "adaptive" in text
    fixed = rank(made.trajectories, [0, 1], q_model=None, origin="fixed")
    assert "gamma 1; data: adaptive\n" in str(fixed)
    mixed = rank(made.trajectories, [0, 1], q_model=None, origin={"policy 0": "learned"})
    assert {r.estimate.sample.regime for r in mixed.values()} == {"in-sample"}


def test_results_go_to_json_and_pandas(tmp_path: Path, ranking: Ranking) -> None:
    path = tmp_path / "ranking.json"
    assert json.loads(ranking.to_json(path)) == json.loads(path.read_text())
    found = json.loads(path.read_text())
    assert found["best"] == ranking.best.name
    assert found["policies"][ranking.best.name]["to_best"] is None
    frame = ranking.to_frame()
    assert list(frame.index) == list(ranking)
    assert frame["probability_best"].sum() == pytest.approx(1.0)


def test_progress_is_told_after_each_policy(made: builders.Recorded) -> None:
    seen: list[int] = []
    rank(made.trajectories, [0, 1], q_model=None, compute=Compute(progress=seen.append))
    assert seen == [1, 1]


def test_figure_draws_every_policy_and_its_interval(ranking: Ranking) -> None:
    figure = ranking.plot()
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == list(ranking)
    points = [line for line in axes.lines if line.get_marker() in ("o", "D", "X")]
    values = [float(x) for line in points for x in np.asarray(line.get_xdata())]
    assert values == [r.estimate.value for r in ranking.values()]
    column = ["P(best)", *(chance(r.probability_best) for r in ranking.values())]
    assert set(column) <= {text.get_text() for text in axes.texts}
    few = ranking.plot(limit=2)
    assert len(few.axes[0].get_yticks()) == 2
    with pytest.raises(ValueError, match="limit is 0"):
        ranking.plot(limit=0)


def test_tensorboard_holds_the_ranking(tmp_path: Path, ranking: Ranking) -> None:
    with EvaluationWriter(tmp_path) as writer:
        writer.add_ranking(ranking, 7)
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    (event,) = events.Tensors("ope/ranking")
    document = json.loads(event.tensor_proto.string_val[0])
    assert event.step == 7
    assert [row["name"] for row in document["policies"]] == list(ranking)


def test_command_ranks_a_file(
    tmp_path: Path, made: builders.Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, picture = (str(tmp_path / name) for name in ("a.ope", "r.json", "r.png"))
    made.trajectories.save(path)
    more = ["--q-model", "none", "--json", out, "--figure", picture]
    assert command(["rank", path, "--policies", "0-1", "last", *more]) == 0
    text = capsys.readouterr().out
    assert "3 policies by auto" in text
    same = rank(made.trajectories, [0, 1, 2], q_model=None)
    assert json.loads(Path(out).read_text())["best"] == same.best.name
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert command(["rank", path, "--q-model", "none"]) == 0
    assert "3 policies" in capsys.readouterr().out
    trained = dataclasses.replace(made.trajectories, held_out=np.zeros(180, dtype=bool))
    trained.save(path)
    for more, regime in (([], "in-sample, optimistic"), (["--origin", "fixed"], "adaptive")):
        assert command(["evaluate", path, "--estimators", "NFIS", *more]) == 0
        assert f"data: {regime}" in capsys.readouterr().out
    for words, said in ((["x"], "--policies x: give"), (["0", "9"], "--policies 0 9: give")):
        assert command(["rank", path, "--policies", *words]) == 2
        assert said in capsys.readouterr().err


def test_policies_that_all_reach_the_maximum_are_not_told_apart() -> None:
    """Four policies near the one that acted, all episodes at the limit: a quarter each."""
    rng = np.random.default_rng(3)
    half = np.full(300 * 5, np.log(0.5))
    estimates = {}
    for name in "abcd":
        ratios = np.log(1 + 0.02 * rng.standard_normal(half.size))
        estimates[name] = evaluate_log_probs(
            half + ratios, [half], [0] * 300, np.ones(half.size), np.arange(0, half.size + 1, 5)
        )["NFIS"]
    found = rank_estimates(estimates)
    for row in found.values():
        assert row.probability_best == pytest.approx(0.25, abs=4 * np.sqrt(0.19 / 20_000))


def test_differences_know_actions_that_nobody_recorded() -> None:
    """The first target takes the third action in 30 % of its episodes, which pays anything."""
    rng = np.random.default_rng(5)
    n = 400
    actions = (rng.random(n) < 0.5).astype(np.int64)
    data = Trajectories.from_arrays(
        np.zeros(n, dtype=np.int64),
        actions,
        actions + 0.3 * rng.normal(size=n),
        np.full(n, math.log(0.5)),
        offsets=np.arange(n + 1),
        policies=[Table(np.array([[0.5, 0.5, 0.0]]))],
        policy_ids=0,
        terminated=True,
    )
    first, second = Table(np.array([[0.1, 0.6, 0.3]])), Table(np.array([[0.55, 0.45, 0.0]]))
    one, other = (evaluate(data, x, "NFIS", origin="fixed")["NFIS"] for x in (first, second))
    assert one.lost[0] > 0.1
    assert other.lost == (0.0, 0.0)
    for difference, truth in ((one.difference(other), 0.15), (other.difference(one), -0.15)):
        assert truth in difference.interval
    ranking = rank(data, {"first": first, "second": second}, "NFIS", origin="fixed")
    assert ranking["first"].probability_best < 0.99


def test_an_interval_that_is_undefined_loses_nothing() -> None:
    """Two episodes with one that has all the weight: no interval, and yet a ranking."""
    data = Trajectories.from_arrays(
        np.zeros(4, dtype=np.int64),
        np.array([0, 1, 1, 1]),
        np.array([1.0, 2.0, 3.0, 4.0]),
        np.log([0.999, 0.001, 0.001, 0.001]),
        offsets=np.array([0, 1, 4]),
        policies=[Table(np.array([[0.999, 0.001]]))],
        policy_ids=0,
        terminated=True,
    )
    targets: dict[str, Any] = {
        "a": Table(np.array([[0.1, 0.9]])),
        "b": Table(np.array([[0.0, 1.0]])),
    }
    for interval in ("ess-t", Bootstrap(20)):
        found = rank(data, targets, "NFIS", interval=interval, origin="fixed")
        for row in found.values():
            assert row.estimate.lost == (0.0, 0.0)
        assert len(found) == 2


@pytest.mark.parametrize("ess", [1.01, 1.1, 1.5, 3.0, 100.0])
def test_interpolated_factors_of_few_effective_episodes_are_those_of_chi2(ess: float) -> None:
    uniform = np.random.default_rng(0).random(5000)
    half = np.maximum(gammaincinv((ess - 1.0) / 2, uniform), 1e-300)
    want = np.minimum(np.sqrt(ess / 2 / half), 1e9)
    np.testing.assert_allclose(_widening(np.array([ess]), uniform)[:, 0], want, rtol=1e-6)
