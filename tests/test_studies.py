"""Each study in miniature, its exact claims, and a frame that neither workers nor kills change."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from matplotlib.figure import Figure

from ope_gym import oracle
from studies import STUDIES, adaptive, bandit, integrals, lemmas, load_study
from studies.__main__ import main
from studies.claims import FAILS, HOLDS, UNDECIDED, Claim, Evidence, agreement, number, paired
from studies.frame import Runs, Seeds, Study, Summary, collect, conduct, fingerprint, seeds_of
from studies.report import write_report

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Coin(Study):
    """The least of a study; `broken` runs fail, as a kill would make them."""

    name: ClassVar[str] = "coin"
    title: ClassVar[str] = "A fair coin"
    runs: ClassVar[int] = 10
    chunk: ClassVar[int] = 3

    bias: float = 0.5

    def run(self, seeds: Seeds) -> Runs:
        keys = [seed.spawn_key[0] for seed in seeds]
        done.extend(keys)
        if broken.intersection(keys):
            raise KeyboardInterrupt
        draws = [np.random.default_rng(seed).random() < self.bias for seed in seeds]
        return {"heads": np.array(draws), "key": np.array(keys)}

    def summarise(self, runs: Runs) -> Summary:
        return {"heads": runs["heads"].mean(), "keys": runs["key"], "none": np.nan}

    def claims(self, summary: Summary) -> list[Claim]:
        evidence = Evidence("n = 10", summary["heads"] - 0.5, 0.16, equal=True)
        return [
            Claim("folklore", "coins are fair", "share of heads − 1/2", (evidence,), "Why not.")
        ]

    def table(self, summary: Summary) -> str:
        return f"| heads |\n|---|\n| {number(summary['heads'])} |"

    def picture(self, summary: Summary) -> Figure:
        return Figure(figsize=(1, 1))


done: list[int] = []
broken: set[int] = set()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    done.clear()
    broken.clear()


# --- frame ------------------------------------------------------------------------------------


def test_seeds_are_those_that_spawn_gives() -> None:
    spawned = np.random.SeedSequence(7).spawn(5)[3:]
    for ours, theirs in zip(seeds_of(7, (3, 5)), spawned, strict=True):
        assert (ours.generate_state(4) == theirs.generate_state(4)).all()


def test_finished_runs_are_used_again_in_any_order_and_number(tmp_path: Path) -> None:
    broken.add(7)
    with pytest.raises(KeyboardInterrupt):
        conduct(Coin(), tmp_path, progress=False)
    assert not (tmp_path / "coin.json").exists()
    done.clear()
    broken.clear()
    result = conduct(Coin(), tmp_path, progress=False)
    assert done == [6, 7, 8, 9]
    assert result["summary"]["keys"] == list(range(10))
    whole = conduct(Coin(), tmp_path / "whole", progress=False)
    assert whole == result
    done.clear()
    assert conduct(Coin(), tmp_path, runs=5, progress=False)["summary"]["keys"] == list(range(5))
    assert done == []
    conduct(Coin(), tmp_path, runs=12, progress=False)
    assert done == [10, 11]


def test_a_gap_between_finished_runs_is_filled(tmp_path: Path) -> None:
    collect(Coin(), tmp_path, runs=10, seed=0, progress=False)
    done.clear()
    folder = tmp_path / "chunks" / f"coin-{fingerprint(Coin(), 0)}"
    next(folder.glob("00000003-*")).unlink()
    damaged = next(folder.glob("00000009-*"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    data = collect(Coin(), tmp_path, runs=10, seed=0, progress=False)
    assert done == [3, 4, 5, 9]
    assert data["key"].tolist() == list(range(10))


def test_other_settings_or_another_seed_use_nothing(tmp_path: Path) -> None:
    conduct(Coin(), tmp_path, progress=False)
    for study, seed in ((Coin(bias=0.6), 0), (Coin(), 1)):
        done.clear()
        conduct(study, tmp_path, seed=seed, progress=False)
        assert done == list(range(10))


def test_a_study_writes_plain_json_markdown_and_a_picture(tmp_path: Path) -> None:
    conduct(Coin(), tmp_path, seed=3, progress=False)
    result = json.loads((tmp_path / "coin.json").read_text(encoding="utf-8"))
    assert (result["runs"], result["seed"], result["settings"]) == (10, 3, {"bias": 0.5})
    assert result["summary"]["none"] is None
    assert result["claims"][0]["verdict"] == HOLDS
    text = (tmp_path / "coin.md").read_text(encoding="utf-8")
    assert "**Holds**: “coins are fair”" in text
    assert "--runs 10 --seed 3" in text
    assert (tmp_path / "coin.png").stat().st_size > 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_matplotlib_the_picture_is_skipped_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert conduct(Coin(), tmp_path, progress=False)["picture"] is None
    assert "no picture without matplotlib" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"workers": 0}, {"seed": -1}])
def test_impossible_numbers_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give at least"):
        conduct(Coin(), tmp_path, progress=False, **wrong)


def test_results_do_not_depend_on_workers_or_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = bandit.Bandit(sizes=(20, 50), probabilities=(0.1, 0.9, 1.0))
    monkeypatch.setattr(bandit.Bandit, "chunk", 15)
    one = collect(study, tmp_path / "one", runs=40, seed=1, progress=False)
    two = collect(study, tmp_path / "two", runs=40, seed=1, workers=2, progress=False)
    monkeypatch.setattr(bandit.Bandit, "chunk", 7)
    small = collect(study, tmp_path / "small", runs=40, seed=1, progress=False)
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
        np.testing.assert_array_equal(one[name], small[name])


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_killed_command_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "studies", "lemmas", "--runs", "150", "--workers", "2"]
    started = subprocess.Popen(
        [*command, "--out", str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("chunks/*/*.npz")) and time.monotonic() < deadline:
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("chunks/*/*.npz")}
    assert kept
    assert not (tmp_path / "lemmas.json").exists()
    study = load_study("lemmas")
    resumed = conduct(study, tmp_path, runs=150, progress=False)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert resumed == conduct(study, tmp_path / "whole", runs=150, progress=False)
    while _alive(started.pid) and time.monotonic() < deadline:  # the workers end by themselves
        time.sleep(0.05)
    assert not _alive(started.pid)


def _alive(group: int) -> bool:
    """Whether a process of the group still runs; one that only nobody has waited for does not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, parent_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(parent_group) == group and state != "Z":
                return True
    return False


# --- claims -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        (Evidence("", 1.0, 0.1), HOLDS),
        (Evidence("", 0.2, 0.1), UNDECIDED),
        (Evidence("", -1.0, 0.1), FAILS),
        (Evidence("", -1.0, 0.1, exact=0.5), HOLDS),
        (Evidence("", 1.0, 0.1, exact=-0.5), FAILS),
        (Evidence("", -1e-13, tolerance=1e-12), HOLDS),
        (Evidence("", 0.2, 0.1, equal=True), HOLDS),
        (Evidence("", -0.4, 0.1, equal=True), FAILS),
        (Evidence("", math.nan, 0.1), UNDECIDED),
        (Evidence("", 1.0, math.nan), UNDECIDED),
    ],
)
def test_verdict_of_a_difference(evidence: Evidence, verdict: str) -> None:
    assert evidence.verdict == verdict


def test_a_claim_holds_if_all_of_it_does() -> None:
    good, bad, open_ = Evidence("", 1.0), Evidence("", -1.0), Evidence("", 1.0, 1.0)
    for evidence, verdict in [
        ((good, good), HOLDS),
        ((good, open_), UNDECIDED),
        ((good, open_, bad), FAILS),
    ]:
        assert Claim("", "", "", evidence, "").verdict == verdict


def test_paired_evidence_has_the_error_of_the_differences() -> None:
    base = np.array([0.0, 10.0, 20.0, 30.0])
    evidence = paired("here", base + np.array([1.0, 2.0, 1.0, 2.0]), base)
    assert evidence.difference == 1.5
    assert evidence.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert math.isnan(paired("here", base[:1], base[:1]).standard_error)


def test_agreement_allows_for_the_number_of_comparisons() -> None:
    one = agreement("", np.array([3.5]), np.zeros(1), np.ones(1))
    many = agreement("", np.append(np.zeros(99), 3.5), np.zeros(100), np.ones(100))
    assert one.verdict == FAILS
    assert one.limit == pytest.approx(3.0)
    assert (many.verdict, many.difference) == (HOLDS, 3.5)
    assert "1 are beyond 3" in many.note
    assert agreement("", np.append(np.zeros(99), 5.0), np.zeros(100), np.ones(100)).verdict == FAILS


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (-0.12345, "−0.123"), (1e-7, "1e−7"), (None, "undefined")]
)
def test_numbers_in_tables(value: float | None, text: str) -> None:
    assert number(value) == text


# --- exact integrals --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("seed", range(3))
def test_integrals_are_the_sums_over_all_counts(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy, target = rng.dirichlet(np.ones(3), size=2)
    given = (policy, n, target, rng.normal(size=3), rng.exponential(size=3))
    _, _, _, mean, variance = given
    for integral, weights in [
        (integrals.moments_nis, lambda k: oracle.weights_nis(k, policy, target)),
        (integrals.moments_optimal, lambda k: oracle.optimal_weights(k, mean, variance, target)),
    ]:
        found, summed = integral(*given), oracle.moments_by_enumeration(weights, *given)
        for part in ("bias", "internal", "path"):
            assert getattr(found, part) == pytest.approx(getattr(summed, part), rel=1e-9, abs=1e-11)


def test_weight_given_a_count_is_the_mean_over_paths() -> None:
    rng = np.random.default_rng(0)
    policy, target = rng.dirichlet(np.ones(4), size=2)
    others = np.delete(policy, 2) / (1 - policy[2])
    counts = np.insert(rng.multinomial(7, others, size=20_000), 2, 3, axis=1)
    seen = np.array([oracle.weights_nis(k, policy, target)[2] for k in counts])
    mean, deviation = integrals.weight_nis_given_count(policy, 10, target, 2, 3)
    assert abs(seen.mean() - mean) < 4 * deviation / math.sqrt(seen.size)
    assert seen.std() == pytest.approx(deviation, rel=0.05)


def test_a_ratio_that_can_be_undefined_is_refused() -> None:
    with pytest.raises(ValueError, match="and no others"):
        integrals.moments_nis(np.array([0.5, 0.5]), 3, np.array([1.0, 0.0]), *np.ones((2, 2)))


# --- bandit -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_bandit() -> tuple[bandit.Bandit, Summary]:
    study = bandit.Bandit(sizes=(50, 200), probabilities=(0.01, 0.4, 0.97, 1.0))
    return study, study.summarise(study.run(seeds_of(0, (0, 2000))))


def test_bandit_is_that_of_the_paper() -> None:
    problem = bandit.Problem(20)
    assert problem.policy.sum() == pytest.approx(1.0)
    assert problem.target.sum() == pytest.approx(1.0)
    assert problem.scale[19] == 0.0
    assert (problem.scale[:9] == problem.scale[18:9:-1]).all()


def test_vectorised_estimates_are_those_of_the_library() -> None:
    study = bandit.Bandit(sizes=(5, 40), probabilities=(0.2, 1.0))
    problem, rng = bandit.Problem(20), np.random.default_rng(0)
    actions, luck = rng.choice(20, p=problem.policy, size=(6, 40)), rng.random((6, 40))
    sizes, grid = np.array(study.sizes), np.array(study.probabilities)
    counts, wins = bandit.tally(actions, luck, sizes, grid, 20)
    values = bandit.estimates(problem, sizes, grid, counts, wins)
    for r, i, j in np.ndindex(6, 2, 2):
        rewards = problem.scale[actions[r]] * (luck[r] < grid[j]) / np.sqrt(grid[j])
        n = sizes[i]
        one = bandit.library(problem, float(grid[j]), actions[r, :n], rewards[:n])
        np.testing.assert_allclose(values[r, :, i, j], one, rtol=1e-12, atol=1e-14)


def test_claims_of_the_bandit(small_bandit: tuple[bandit.Bandit, Summary]) -> None:
    study, summary = small_bandit
    verdicts = [(claim.source, claim.verdict) for claim in study.claims(summary)]
    assert verdicts == [
        ("section 2.2, i", HOLDS),
        ("section 2.2, i", HOLDS),
        ("section 2.1", FAILS),
        ("section 2.2, ii", HOLDS),
        ("section 2.2.1 and introduction", FAILS),
        ("section 2.2, iii", HOLDS),
        ("section 2.2, iii", FAILS),
        ("section 2.2", FAILS),
        ("table 1", HOLDS),
        ("section 2.3", HOLDS),
    ]


def test_curves_cross_where_the_exact_errors_are_equal(
    small_bandit: tuple[bandit.Bandit, Summary],
) -> None:
    p = small_bandit[1]["crossings"]["EA, NIS"][0]
    bias, internal, path = bandit.exact_moments(bandit.Problem(20), np.array([50]), np.array([p]))
    mse = (bias**2 + internal + path)[:, 0, 0]
    assert mse[1] == pytest.approx(mse[2], rel=1e-9)


# --- lemmas -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_lemmas() -> tuple[lemmas.Lemmas, Summary]:
    study = lemmas.Lemmas()
    return study, study.summarise(study.run(seeds_of(0, (0, 60))))


def test_claims_of_the_lemmas(small_lemmas: tuple[lemmas.Lemmas, Summary]) -> None:
    study, summary = small_lemmas
    verdicts = [claim.verdict for claim in study.claims(summary)]
    assert verdicts == [HOLDS, FAILS, HOLDS, FAILS, HOLDS, FAILS, FAILS]
    assert max(summary["gap"]) < 1e-9
    assert summary["dominated"] == summary["problems"] == 60
    assert [row["above"] for row in list(summary["multi_step"].values())[1:]] == [0, 0]


def test_the_optimal_unbiased_estimator_is_not_optimal() -> None:
    np.testing.assert_allclose(
        lemmas.closed_forms(lemmas.EXAMPLE), [4 / 9, 0.0771, 0.16, 0.0], atol=5e-5
    )


def test_fused_weights_can_be_noisier_than_basic_ones_over_two_steps() -> None:
    np.testing.assert_allclose(lemmas.step_variances(*lemmas.UNDONE), [1 / 3, 157 / 441])


def test_rewards_of_random_steps_depend_on_the_prefix_alone() -> None:
    for seed in range(5):  # else "only the last" and "one sign" would be no theorem
        bis, fis = lemmas.random_steps(np.random.default_rng(seed))[1:].T
        assert (fis <= bis).all()


# --- adaptive ---------------------------------------------------------------------------------


def test_stopping_at_the_first_zero_biases_the_average() -> None:
    for ones in (0, 1, 5):
        np.testing.assert_allclose(adaptive.stopped_estimates(ones), ones / (ones + 1))


def test_exact_biases_of_the_two_round_example() -> None:
    fixed = dict(zip(adaptive.EXACT, adaptive.two_round_bias(adaptive=False), strict=True))
    learned = dict(zip(adaptive.EXACT, adaptive.two_round_bias(adaptive=True), strict=True))
    assert [fixed[name] for name in ("BIS", "FIS", "OUIS")] == pytest.approx([0, 0, 0], abs=1e-15)
    assert learned["BIS"] == pytest.approx(0.0, abs=1e-15)
    assert learned["FIS"] == pytest.approx(-5 / 42)  # (5/14 + 17/42) / 2 − 1/2
    assert learned["OUIS"] == pytest.approx(-1 / 5)
    assert learned["NFIS"] == pytest.approx(-1 / 20)


def test_claims_of_adaptive_data() -> None:
    study = adaptive.Adaptive(stopped=50)
    summary = study.summarise(study.run(seeds_of(0, (0, 80))))
    verdicts = [claim.verdict for claim in study.claims(summary)]
    assert verdicts[:6] == [HOLDS, FAILS, FAILS, HOLDS, FAILS, HOLDS]
    assert FAILS not in verdicts[6:]
    assert summary["stopped"]["series"][0] == pytest.approx(1 - math.log(2), abs=1e-15)
    for name, in_sample, held_out in zip(
        adaptive.LEARNED, *(summary["learned"][key][0] for key in ("in_sample", "held_out")),
        strict=True,
    ):  # fmt: skip
        assert in_sample > held_out, name


# --- command and report -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    for name, runs in (("bandit", "30"), ("lemmas", "20"), ("adaptive", "6")):
        small = ["--set", "sizes=[50, 100]"] if name == "bandit" else []
        command = [name, "--runs", runs, "--seed", "1", "--workers", "1", "--out", str(out)]
        assert main([*command, *small]) == 0
    return out


def test_report_has_all_studies_in_order_with_their_pictures(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "docs" / "reproduction.md"
    assert write_report(results, path) == ["bandit", "lemmas", "adaptive"]
    text = path.read_text(encoding="utf-8")
    places = [text.index(f"`python -m studies {name} ") for name in ("bandit", "lemmas")]
    assert places == sorted(places)
    for name in ("bandit", "lemmas", "adaptive"):
        assert f"(images/study-{name}.png)" in text
        assert (path.parent / "images" / f"study-{name}.png").stat().st_size > 10_000
    assert (results / "reproduction.md").read_text(encoding="utf-8").count("![") == 3


def test_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python -m studies all"):
        write_report(tmp_path, tmp_path / "page.md")


def test_command_writes_the_report(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.md"
    assert main(["report", "--out", str(results), "--report", str(path)]) == 0
    assert "bandit, lemmas, adaptive" in capsys.readouterr().out
    assert path.exists()


@pytest.mark.parametrize(
    "study",
    [bandit.Bandit(sizes=(50,), probabilities=(0.5, 1.0)), lemmas.Lemmas(), adaptive.Adaptive()],
)
def test_a_single_run_leaves_what_is_simulated_undecided(study: Study, tmp_path: Path) -> None:
    result = conduct(study, tmp_path, runs=1, progress=False)
    for claim in result["claims"]:
        for evidence in claim["evidence"]:
            if evidence["standard_error"] is None and evidence["exact"] is None:
                assert evidence["verdict"] == UNDECIDED


def test_command_refuses_an_unknown_field() -> None:
    with pytest.raises(SystemExit, match="lemmas has the fields actions, behaviours, draws"):
        main(["lemmas", "--set", "colour=red"])


def test_table_of_studies_names_classes_that_exist() -> None:
    for name in ("bandit", "lemmas", "adaptive"):
        study: Any = load_study(name)
        assert study.name == name
        assert STUDIES[name].endswith(type(study).__name__)
