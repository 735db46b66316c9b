"""The harness of the studies: kept runs, claims, settings, the commands and the report."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from studies import STUDIES, Plan
from studies.__main__ import main
from studies.adaptive.study import Adaptive
from studies.bandit.study import Bandit
from studies.harness.claims import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Claim,
    Evidence,
    agreement,
)
from studies.harness.kept import fingerprint, folder_of
from studies.harness.markdown import claim_section, number, tidy
from studies.harness.registry import chosen_studies, load_study
from studies.harness.report import read_results, write_report
from studies.harness.runner import collect, conduct, label
from studies.harness.seeds import seeds_of
from studies.harness.study import Runs, Seeds, Study, Summary
from studies.lemmas.study import Lemmas
from tests.test_architecture import imported, module_of, sources, tops

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Coin(Study):
    """The least of a study; `broken` runs fail, as a kill would make them."""

    bias: float = 0.5

    @property
    def name(self) -> str:
        return "coin"

    @property
    def plan(self) -> Plan:
        return Plan("heads or tails", runs=10, chunk=3)

    def run(self, seeds: Seeds) -> Runs:
        keys = [seed.spawn_key[-1] for seed in seeds]
        done.extend(keys)
        if broken.intersection(keys):
            raise KeyboardInterrupt
        draws = [np.random.default_rng(seed).random() < self.bias for seed in seeds]
        return {"heads": np.array(draws), "key": np.array(keys)}

    def summarise(self, runs: Runs) -> Summary:
        return {"heads": runs["heads"].mean(), "keys": runs["key"], "none": np.nan}

    def claims(self, summary: Summary) -> list[Claim]:
        evidence = Evidence("n = 10", summary["heads"] - 0.5, 0.01, equal=True, margin=0.5)
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


def test_no_two_studies_seeds_or_runs_share_a_stream() -> None:
    states = [
        tuple(seed.generate_state(4))
        for study in ("bandit", "lemmas")
        for base in (0, 1)
        for seed in seeds_of(base, (0, 3), study)
    ]
    assert len(set(states)) == 12
    again = seeds_of(1, (2, 3), "lemmas")[0]
    assert tuple(again.generate_state(4)) == states[-1]


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
    assert done == [9, 10, 11]  # the chunk that was cut short


def test_a_gap_between_finished_runs_is_filled(tmp_path: Path) -> None:
    collect(Coin(), tmp_path, runs=10, seed=0, progress=False)
    done.clear()
    folder = folder_of(Coin(), tmp_path, 0)
    next(folder.glob("00000003-*")).unlink()
    damaged = next(folder.glob("00000009-*"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    (folder / "foo.npz").write_bytes(b"not ours")
    data = collect(Coin(), tmp_path, runs=10, seed=0, progress=False)
    assert done == [3, 4, 5, 9]
    assert data["key"].tolist() == list(range(10))


def test_other_settings_or_another_seed_use_nothing(tmp_path: Path) -> None:
    conduct(Coin(), tmp_path, progress=False)
    for study, seed in ((Coin(bias=0.6), 0), (Coin(), 1)):
        done.clear()
        conduct(study, tmp_path, seed=seed, progress=False)
        assert done == list(range(10))


def test_other_settings_do_not_overwrite_the_default(tmp_path: Path) -> None:
    usual = conduct(Coin(), tmp_path, progress=False)
    other = conduct(Coin(bias=0.6), tmp_path, progress=False)
    assert (usual["label"], other["label"]) == ("coin", "coin-bias-0.6")
    assert json.loads((tmp_path / "coin.json").read_text(encoding="utf-8")) == usual
    assert (tmp_path / "coin-bias-0.6.png").exists()
    assert label(Bandit(sizes=(50, 100))) == "bandit-sizes-_50_100"
    assert len(label(Bandit(sizes=tuple(range(1, 60))))) <= 100


def test_a_study_writes_plain_json_markdown_and_a_picture(tmp_path: Path) -> None:
    conduct(Coin(), tmp_path, runs=40, seed=3, progress=False)
    result = json.loads((tmp_path / "coin.json").read_text(encoding="utf-8"))
    assert (result["runs"], result["seed"], result["settings"]) == (40, 3, {"bias": 0.5})
    assert result["summary"]["none"] is None
    assert result["claims"][0]["verdict"] != UNDECIDED
    assert result["fingerprint"] == fingerprint(Coin(), 3)
    text = (tmp_path / "coin.md").read_text(encoding="utf-8")
    assert f"**{result['claims'][0]['verdict'].capitalize()}**: “coins are fair”" in text
    assert "--runs 40 --seed 3" in text
    assert result["fingerprint"] in text
    assert (tmp_path / "coin.png").stat().st_size > 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_matplotlib_the_picture_is_skipped_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert conduct(Coin(), tmp_path, progress=False)["picture"] is None
    said = capsys.readouterr().err
    assert 'no picture without matplotlib: pip install -e ".[plots]" -c constraints.txt' in said


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"workers": 0}, {"seed": -1}])
def test_impossible_numbers_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give at least"):
        conduct(Coin(), tmp_path, progress=False, **wrong)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_killed_command_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "studies", "lemmas", "--runs", "150", "--workers", "2"]
    started = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
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
        (Evidence("", 0.2, 0.1, equal=True), UNDECIDED),
        (Evidence("", 0.2, 0.1, equal=True, margin=0.4), UNDECIDED),
        (Evidence("", 0.2, 0.1, equal=True, margin=0.51), HOLDS),
        (Evidence("", -0.4, 0.1, equal=True, margin=9.0), FAILS),
        (Evidence("", 1e-13, equal=True, tolerance=1e-12), HOLDS),
        (Evidence("", 1e-11, equal=True, tolerance=1e-12), FAILS),
        (Evidence("", 1.0, 0.1, open="tail"), UNDECIDED),
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


def test_few_runs_decide_nothing_that_is_simulated() -> None:
    rows = (Evidence("", 1.0, 0.1), Evidence("", 1.0, 0.1, exact=1.0), Evidence("", 1.0))
    claim = Claim("", "", "", rows, {UNDECIDED: "few", HOLDS: "enough"})
    few = claim.with_runs(29).to_dict()
    assert [row["verdict"] for row in few["evidence"]] == [UNDECIDED, HOLDS, HOLDS]
    assert (few["verdict"], few["reason"], few["why"]) == (UNDECIDED, "fewer than 30 runs", "few")
    enough = claim.with_runs(30).to_dict()
    assert (enough["verdict"], enough["reason"], enough["why"]) == (HOLDS, "", "enough")


def test_section_of_a_claim_has_the_exact_column_only_if_needed() -> None:
    simulated, both = Evidence("here", -0.5, 0.1), Evidence("there", 1.0, 0.1, exact=2.0)
    one = claim_section(Claim("s", "w", "m", (simulated,), "").to_dict())
    two = claim_section(Claim("s", "w", "m", (simulated, both), "").to_dict(), "x-1")
    assert "| where | measured | std. error | verdict; note |" in one
    assert "| here | −0.5 | 0.1 | does not hold |" in one
    assert "| where | measured | std. error | exact value | verdict; note |" in two
    assert "| there | 1 | 0.1 | 2 | holds |" in two
    assert two.startswith('<a id="x-1"></a>**Does not hold**')


def test_agreement_allows_for_the_number_of_comparisons() -> None:
    exact = np.full(100, 50.0)
    one = agreement("", exact[:1] + 3.5, exact[:1], np.ones(1))
    many = agreement("", exact + np.append(np.zeros(99), 3.5), exact, np.ones(100))
    assert one.verdict == FAILS
    assert one.limit == pytest.approx(3.0)
    assert (many.verdict, many.difference) == (HOLDS, 3.5)
    assert "1 are beyond 3" in many.note
    far = exact + np.append(np.zeros(99), 5.0)
    assert agreement("", far, exact, np.ones(100)).verdict == FAILS
    coarse = agreement("", exact, exact, np.full(100, 2.0))
    assert (coarse.verdict, coarse.open) == (UNDECIDED, "coarse")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (-0.12345, "−0.123"), (1e-7, "1e−7"), (None, "undefined")]
)
def test_numbers_in_tables(value: float | None, text: str) -> None:
    assert number(value) == text


def test_one_kind_of_minus_and_none_before_zero() -> None:
    assert tidy("| -0.12 | -0.000000 | +0.00 | 1e-5 | x-1 | (-.5)") == (
        "| −0.12 | 0.000000 | 0.00 | 1e-5 | x-1 | (−.5)"
    )
    assert tidy("`--seed 1`, +0.10, −0.01") == "`--seed 1`, +0.10, −0.01"
    assert tidy("95 % cover 93%, +0.0%") == "95 % cover 93 %, 0.0 %"


# --- command and report -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    usual = ["--seed", "1", "--workers", "1", "--out", str(out)]
    assert main(["bandit", "--runs", "30", "--set", "sizes=[50,100]", *usual]) == 0
    assert main(["lemmas", "--runs", "20", *usual]) == 0
    assert main(["lemmas", "--runs", "10", "--set", "draws=3", *usual]) == 0
    assert main(["adaptive", "--runs", "6", *usual]) == 0
    return out


LABELS = ["bandit-sizes-_50_100", "lemmas", "lemmas-draws-3", "adaptive"]


def test_report_has_all_studies_in_order_with_their_pictures(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "docs" / "reproduction.md"
    assert write_report(results, path) == LABELS
    text = path.read_text(encoding="utf-8")
    places = [text.index(f"(images/study-{name}.png)") for name in LABELS]
    assert places == sorted(places)
    for name in LABELS:
        assert (path.parent / "images" / f"study-{name}.png").stat().st_size > 10_000
    assert (results / "reproduction.md").read_text(encoding="utf-8").count("![") == 4
    assert "--set 'draws=3'" in text


def test_links_of_the_report_lead_somewhere(results: Path) -> None:
    text = (results / "reproduction.md").read_text(encoding="utf-8")
    links, anchors = re.findall(r"\]\(#([^)]+)\)", text), re.findall(r'<a id="([^"]+)">', text)
    assert len(links) > 20
    assert set(links) <= set(anchors)
    assert len(anchors) == len(set(anchors))


def test_report_counts_the_papers_claims_of_default_settings(results: Path) -> None:
    text = (results / "reproduction.md").read_text(encoding="utf-8")
    usual = [r for r in read_results(results) if not r["changed"]]
    counted = [
        claim["verdict"]
        for result in usual
        for claim in result["claims"]
        if claim["source"] not in ("our extension", "beyond the paper", "check")
    ]
    assert len(usual) == 2
    assert f"Of {len(counted)} claims of the paper {counted.count(HOLDS)} hold" in text


def test_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python -m studies all"):
        write_report(tmp_path, tmp_path / "page.md")


def test_a_broken_result_is_named_and_left_out(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lemmas.json").write_bytes((results / "lemmas.json").read_bytes())
    (tmp_path / "bandit.json").write_text("{", encoding="utf-8")
    (tmp_path / "adaptive.json").write_text("[]", encoding="utf-8")
    assert write_report(tmp_path, tmp_path / "page.md") == ["lemmas"]
    said = capsys.readouterr().err
    assert f"{tmp_path / 'bandit.json'} is not the result" in said
    assert f"{tmp_path / 'adaptive.json'} is not the result" in said


def test_command_writes_the_report_beside_the_results(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in results.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    page = Path("studies/reports/reproduction.md")
    before = page.read_bytes() if page.exists() else b""
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert ", ".join(LABELS) in capsys.readouterr().out
    assert (tmp_path / "reproduction.md").exists()
    assert (page.read_bytes() if page.exists() else b"") == before
    assert main(["report", "--out", str(tmp_path), "--report", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").exists()


@pytest.mark.parametrize(
    "study",
    [Bandit(sizes=(50,), probabilities=(0.5, 1.0)), Lemmas(), Adaptive()],
)
def test_a_single_run_leaves_what_is_simulated_undecided(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pictures take longest
    result = conduct(study, tmp_path, runs=1, progress=False)
    for claim in result["claims"]:
        for evidence in claim["evidence"]:
            if evidence["standard_error"] is None and evidence["exact"] is None:
                assert evidence["verdict"] == UNDECIDED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lemmas", "--set", "colour=red"], "lemmas has actions, behaviours, draws"),
        (["bandit", "--set", "sizes"], "give FIELD=VALUE"),
        (["bandit", "--set", "sizes="], "give FIELD=VALUE"),
        (["bandit", "--set", "sizes=50"], "bandit wants [int, …]"),
        (["bandit", "--set", 'sizes=["a"]'], "bandit wants [int, …]"),
        (["bandit", "--set", "sizes=[]"], "bandit wants [int, …]"),
        (["bandit", "--set", "sizes=[true]"], "bandit wants [int, …]"),
        (["bandit", "--set", "sizes=[0]"], "must be whole numbers from 1 on"),
        (["bandit", "--set", "sizes=[100,50]"], "ascending"),
        (["bandit", "--set", "probabilities=[0.5,2]"], "up to 1"),
        (["bandit", "--set", "actions=7"], "even number"),
        (["lemmas", "--set", "draws=1"], "as many draws as behaviours"),
        (["lemmas", "--set", "actions=40"], "give less"),
        (["adaptive", "--set", "epsilon=0"], "more than 0"),
        (["all", "--set", "env=CartPole-v2"], "CartPole-v1 or CartPole-v0"),
        (["cartpole", "--set", "rollouts=0"], "rollouts=0"),
        (["blackjack", "--set", "greedy_target=1"], "blackjack wants bool"),
        (["blackjack", "--set", "truth_rollouts=1"], "truth_rollouts=1"),
        (["bandit", "--runs", "0"], "argument --runs: '0' must be a whole number from 1 on"),
        (["bandit", "--workers", "x"], "argument --workers: 'x'"),
        (["bandit", "--seed", "-1"], "argument --seed: '-1' must be a whole number from 0 on"),
        (["report", "--set", "sizes=[50]"], "has no settings"),
    ],
)
def test_wrong_arguments_are_named_before_anything_runs(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--out", str(tmp_path / "new")])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for arguments in (["lemmas"], ["report"]):
        with pytest.raises(SystemExit):
            main([*arguments, "--out", str(tmp_path / "file")])
        assert str(tmp_path / "file") in capsys.readouterr().err


def test_all_gives_a_setting_to_the_studies_that_have_it() -> None:
    studies = chosen_studies("all", ["weighting=reward-to-go"])
    assert [label(s) for s in studies if s.name == "cartpole"] == [
        "cartpole-weighting-reward-to-go"
    ]
    assert [s.name for s in studies] == list(STUDIES)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_stopping_twice_ends_the_workers_and_says_what_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "studies", "lemmas", "--runs", "5000", "--workers", "2"]
    started = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell starts its background jobs with Ctrl-C ignored, and so would be their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("chunks/*/*.npz")) and time.monotonic() < deadline:
        assert started.poll() is None
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "of 5000 runs of lemmas are kept in" in said
    assert "Traceback" not in said
    assert "leaked" not in said
    while _alive(started.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(started.pid)


def test_each_study_has_the_name_of_its_folder() -> None:
    assert {path.parent.name for path in (ROOT / "studies").glob("*/study.py")} == {
        *STUDIES,
        "harness",
    }
    assert [load_study(name).name for name in STUDIES] == list(STUDIES)


def test_the_list_names_all_studies_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^  (\w+):", said, re.MULTILINE) == list(STUDIES)
    assert "weighting=return  (return or reward-to-go)" in said


def test_no_module_of_the_studies_imports_itself_by_way_of_others() -> None:
    files = {module_of(path): path for path in sources("studies")}
    graph = {
        module: set(imported(path)) & files.keys() - {module, "studies"}
        for module, path in files.items()
    }
    while free := {module for module, needs in graph.items() if not needs}:
        graph = {module: needs - free for module, needs in graph.items() if module not in free}
    assert not graph


def test_folders_of_the_studies_stay_small_and_nobody_imports_them() -> None:
    for folder in (ROOT / "studies").iterdir():
        assert len(list(folder.glob("*.py"))) <= 15, folder
    for path in (ROOT / "train.py", *sources("examples")):
        assert "studies" not in tops(path), path
