"""Test what the server of the OPE tab answers, by requests to TensorBoard's own application."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client

from ope_gym import Evaluation, evaluate, rank
from ope_gym.policies import Target
from ope_gym.report import events
from ope_gym.report.documents import PLUGIN, encode, evaluation_document
from ope_gym.report.tab import reader
from ope_gym.report.tab.plugin import OPEPlugin
from ope_gym.report.tensorboard import EvaluationWriter
from tests import builders

ROOT = Path(__file__).parents[1]
KEPT = {"scalars": 1000}  # of each tag; TensorBoard keeps ten of everything else


@pytest.fixture(scope="module")
def made() -> builders.Recorded:
    return builders.recorded(1, (30, 30, 30))


@pytest.fixture(scope="module")
def evaluation(made: builders.Recorded) -> Evaluation:
    return evaluate(made.trajectories, made.target, estimators=["NFIS", "BIS"])


def plugin_of(logdir: Path) -> OPEPlugin:
    """Return the tab as TensorBoard makes it, after reading all runs."""
    runs = EventMultiplexer(size_guidance={"tensors": 10}, tensor_size_guidance=KEPT)
    runs.AddRunsFromDirectory(str(logdir))
    runs.Reload()
    return OPEPlugin(TBContext(data_provider=MultiplexerDataProvider(runs, str(logdir))))


class Tab:
    """Ask the tab as its page does."""

    def __init__(self, logdir: Path) -> None:
        self.plugin = plugin_of(logdir)
        self._apps = self.plugin.get_plugin_apps()

    def get(self, path: str, code: int = 200, **form: Any) -> Any:
        client = Client(self._apps[path.split("?")[0]])
        data = {key: json.dumps(value) for key, value in form.items()}
        answer = client.post(path, data=data) if form else client.get(path)
        assert answer.status_code == code
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        return json.loads(answer.get_data(), parse_constant=pytest.fail)


def test_the_entry_point_names_the_tab() -> None:
    """TensorBoard loads it by this line."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (entry,) = project["project"]["entry-points"]["tensorboard_plugins"].values()
    assert entry == f"{OPEPlugin.__module__}:{OPEPlugin.__name__}"
    assert "report/tab/static/*" in project["tool"]["setuptools"]["package-data"]["ope_gym"]
    assert reader.PLUGIN == PLUGIN == OPEPlugin.plugin_name


def test_every_module_of_the_page_is_served(tmp_path: Path) -> None:
    plugin = plugin_of(tmp_path)
    apps = plugin.get_plugin_apps()
    assert plugin.frontend_metadata().es_module_path in apps
    for path in (ROOT / "ope_gym" / "report" / "tab" / "static").iterdir():
        answer = Client(apps[f"/{path.name}"]).get(f"/{path.name}")
        assert answer.get_data() == path.read_bytes()
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        kind = {".js": "text/javascript", ".css": "text/css"}[path.suffix]
        assert answer.headers["Content-Type"].startswith(kind)
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"from '\./([\w.]+)'", text):
            assert f"/{name}" in apps
        # nothing comes from elsewhere; the namespace of SVG is a name, not an address
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_no_run_has_the_colour_of_a_verdict() -> None:
    """Differences in CIELAB; below 20, thin lines and small dots look alike."""
    style = (ROOT / "ope_gym/report/tab/static/style.css").read_text(encoding="utf-8")
    themes = re.findall(r":root[^{]*\{(.*?)\}", style, re.S)[:2]
    assert len(themes) == 2
    for theme in themes:
        tones = {name: lab(found) for name, found in re.findall(r"--(\w+): #(\w{6})", theme)}
        for verdict in ("green", "amber", "red"):
            near = {k: np.linalg.norm(tones[f"s{k}"] - tones[verdict]) for k in range(8)}
            assert min(near.values()) > 25, (verdict, near)


def lab(code: str) -> Any:
    """Return the place of a colour in CIELAB, for daylight (D65)."""
    shares = np.array([int(code[k : k + 2], 16) / 255 for k in (0, 2, 4)])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ linear / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_without_evaluations_the_tab_is_not_active(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("loss", 1.0, 0)
        writer.add_scalar("rollout/ep_rew_mean", 1.0, 0)
    tab = Tab(tmp_path)
    assert not tab.plugin.is_active()
    assert tab.get("/runs") == {"runs": []}
    assert tab.get("/series", runs=["other"], names=["auto"]) == {}
    none = tab.get("/details?run=missing")
    assert set(none.values()) == {None}


def test_series_of_estimators_and_returns(tmp_path: Path, evaluation: Evaluation) -> None:
    for run in ("a", "b"):
        with EvaluationWriter(tmp_path / run) as writer:
            for step in (3, 1, 2):
                writer.add_evaluation(evaluation, step, truth=0.5 if step == 3 else None)
                writer.add_return(float(step), step)
    tab = Tab(tmp_path)
    assert tab.plugin.is_active()
    runs = tab.get("/runs")["runs"]
    assert sorted(run["name"] for run in runs) == ["a", "b"]  # with the sub-runs inside
    for run in runs:
        assert run["series"] == ["fresh", "NFIS", "BIS"]  # `fresh` is among those that are listed
        assert run["returns"] == ["rollout/return"]
        assert run["documents"]
    found = tab.get("/series", runs=["a"], names=["NFIS", "fresh", "rollout/return"])
    assert list(found) == ["a"]
    nfis, level = evaluation["NFIS"], evaluation["NFIS"].interval
    assert found["a"]["series"]["NFIS"] == {
        "step": [1, 2, 3],
        "value": 3 * [pytest.approx(nfis.value)],
        "low": 3 * [pytest.approx(level.low)],
        "high": 3 * [pytest.approx(level.high)],
    }
    assert found["a"]["series"]["fresh"] == {"step": [3], "value": [0.5]}
    assert found["a"]["returns"]["rollout/return"] == {"step": [1, 2, 3], "value": [1.0, 2.0, 3.0]}
    colour = ["red", "amber", "green"].index(nfis.verdict.colour)
    assert found["a"]["numbers"]["verdict"]["value"] == 3 * [colour]


def test_many_estimators_have_no_scalars_and_yet_series(
    tmp_path: Path, made: builders.Recorded
) -> None:
    names = ["NFIS", "BIS", "FIS", "NBIS", "NFCIS"]
    evaluation = evaluate(made.trajectories, made.target, estimators=names)
    with EvaluationWriter(tmp_path) as writer:
        for step in (3, 1, 2):
            writer.add_evaluation(evaluation, step)
    tab = Tab(tmp_path)
    (run,) = tab.get("/runs")["runs"]
    assert run["series"] == names
    found = tab.get("/series", runs=["."], names=["NFIS", "BIS"])["."]["series"]
    bis = evaluation["BIS"]
    assert found.pop("BIS") == {
        "step": [1, 2, 3],
        "value": 3 * [pytest.approx(bis.value, rel=1e-3)],  # documents have four digits
        "low": 3 * [pytest.approx(bis.interval.low, rel=1e-3)],
        "high": 3 * [pytest.approx(bis.interval.high, rel=1e-3)],
        "verdict": 3 * [["red", "amber", "green"].index(bis.verdict.colour)],
    }
    assert found["NFIS"]["value"] == 3 * [pytest.approx(evaluation["NFIS"].value)]
    scalars = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {tag.split("/")[1] for tag in scalars} == {"NFIS", "fresh_episodes", "verdict"}


def test_any_name_below_ope_is_a_series(tmp_path: Path) -> None:
    """As a callback writes them: settled values belong to earlier steps than provisional ones."""
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (100, 200, 300):
            for end, value in {"value": 1.0, "low": 0.0, "high": 2.0}.items():
                writer.add_scalar(f"ope/provisional/{end}", value + step, step)
                if step > 100:
                    writer.add_scalar(f"ope/settled/{end}", value, step - 100)
            writer.add_scalar("ope/verdict", 1.0, step)
            writer.add_scalar("rollout/ep_rew_mean", math.nan if step == 200 else 7.0, step)
        writer.add_scalar("ope/fresh/value", 5.0, 200)
        writer.add_scalar("ope/fresh/value", 6.0, 200)  # again: the last one counts
        writer.add_scalar("eval/mean_reward", 4.0, 300)
        writer.add_scalar("ope/held_out", 1.0, 300)  # no series
    tab = Tab(tmp_path)
    assert tab.plugin.is_active()  # without a document
    (run,) = tab.get("/runs")["runs"]
    assert run["name"] == "."
    assert sorted(run["series"]) == ["fresh", "provisional", "settled"]
    assert run["returns"] == ["rollout/ep_rew_mean", "eval/mean_reward"]
    assert not run["documents"]
    found = tab.get("/series", runs=["."], names=[*run["series"], *run["returns"]])["."]
    assert found["series"]["settled"]["step"] == [100, 200]
    assert found["series"]["provisional"]["high"] == [102.0, 202.0, 302.0]
    assert found["series"]["fresh"] == {"step": [200], "value": [6.0]}
    assert found["returns"]["rollout/ep_rew_mean"] == {"step": [100, 300], "value": [7.0, 7.0]}
    assert found["returns"]["eval/mean_reward"] == {"step": [300], "value": [4.0]}


def test_an_undefined_end_leaves_the_value(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("ope/auto/value", 1.0, 0)
        writer.add_scalar("ope/auto/value", 2.0, 1)
        writer.add_scalar("ope/auto/low", 0.5, 1)
        writer.add_scalar("ope/auto/high", math.inf, 1)
    found = Tab(tmp_path).get("/series", runs=["."], names=["auto"])["."]["series"]["auto"]
    assert found == {"step": [0, 1], "value": [1.0, 2.0], "low": [None, 0.5], "high": [None, None]}


def test_details_of_the_nearest_step(
    tmp_path: Path, made: builders.Recorded, evaluation: Evaluation
) -> None:
    with EvaluationWriter(tmp_path / "run") as writer:
        for step in (10, 20, 30):
            shown = replace(evaluation["NFIS"], fresh_episodes=float(step))
            writer.add_evaluation(Evaluation({"NFIS": shown}), step)
        writer.add_report(evaluation.named("policy 30"), 30, {})
        targets: dict[str, Target] = {"first": 0, "new": made.target}
        writer.add_ranking(rank(made.trajectories, targets, "NFIS"), 20)
    tab = Tab(tmp_path)
    asked: Callable[[str], Any] = lambda step: tab.get(f"/details?run=run{step}")  # noqa: E731
    last = asked("")["evaluation"]
    assert last["step"] == 30
    assert last["headline"].startswith("Policy 30")  # of two at one step the one written last
    assert asked("&step=22")["evaluation"]["estimates"][0]["fresh_episodes"] == 20.0
    assert asked("&step=22")["evaluation"]["step"] == 20
    assert asked("&step=-5")["evaluation"]["step"] == 10
    ranking = asked("&step=30")["ranking"]
    assert ranking["step"] == 20
    assert {row["name"] for row in ranking["policies"]} == {"first", "new"}
    assert sum(row["chance"] for row in ranking["policies"]) == pytest.approx(1.0, abs=1e-3)


ODD = (
    '{"a": 1}',
    "[1]",
    "null",
    "[[]]",
    "[NaN]",
    "[" * 100_000,
    "5",
    "",
    '["' + 6000 * 'a","' + '"]',
)


def test_wrong_requests_are_told_why(tmp_path: Path) -> None:
    tab = Tab(tmp_path)
    for step in ("soon", "1.5", "1e3", "nan", "9" * 5000):
        assert "whole number" in tab.get(f"/details?run=x&step={step}", 400)["error"]
    assert "JSON lists" in tab.get("/series", 400)["error"]
    assert "JSON lists" in tab.get("/series", 400, runs="x")["error"]
    client = Client(tab.plugin.get_plugin_apps()["/series"])
    for odd in ODD:
        for form in ({"runs": odd, "names": "[]"}, {"runs": "[]", "names": odd}):
            assert client.post("/series", data=form).status_code == 400, odd[:20]
    for path in ("/details?run=%00%ff", "/details?run=../..&step=-1", "/names?run=toString&part=%"):
        tab.get(path)


def write(folder: Path, content: bytes, tag: str = "ope/details/0", about: bytes = b"[]") -> None:
    """Write a document as it is, which anybody may do."""
    log = events.EventLog(folder)
    log.add(events.document(tag, content, PLUGIN, about), 7)
    log.close()


def damaged(content: bytes) -> dict[str, bytes]:
    """Return a document in the ways in which it can be wrong."""
    document = json.loads(content)
    estimate = document["estimates"][0]
    changes: dict[str, Any] = {
        "without estimates": {k: v for k, v in document.items() if k != "estimates"},
        "without a headline": {k: v for k, v in document.items() if k != "headline"},
        "of a later version": {"kind": "evaluation", "version": 9, "answer": {}},
        "a list": [document],
        "a number": 3,
        "nothing": None,
        "a row without its name": document | {"estimates": [{**estimate, "name": None}]},
        "another verdict": document | {"estimates": [{**estimate, "verdict": "blue"}]},
        "a text for a number": document | {"estimates": [{**estimate, "value": "1"}]},
        "NaN": document | {"estimates": [{**estimate, "value": math.nan}]},
        "curves that are none": document | {"ess": {"x": 1}},
    }
    texts = {name: json.dumps(change).encode() for name, change in changes.items()}
    texts |= {"no JSON": b"{", "no text": b"\xff\xfe", "half": content[: len(content) // 2]}
    texts |= {
        "deep": b"[" * 100_000,
        "infinite": content.replace(b'"level":0.95', b'"level":1e999'),
    }
    return texts


def test_a_damaged_run_says_so_and_the_others_work(tmp_path: Path, evaluation: Evaluation) -> None:
    with EvaluationWriter(tmp_path / "good") as writer:
        writer.add_evaluation(evaluation, 7)
    whole = encode(evaluation_document(evaluation))
    wrong = damaged(whole)
    assert len(set(wrong.values())) == len(wrong)
    for number, content in enumerate(wrong.values()):
        write(tmp_path / f"bad{number}", content, about=b'["NFIS"]')
    for number, about in enumerate((b"{", b'{"a": 1}', b"[1, [2]]", b"[" * 100_000)):
        write(tmp_path / f"odd{number}", whole, about=about)
    write(tmp_path / "tags", whole, tag="ope")
    log = events.EventLog(tmp_path / "tensors")
    log.add(events.document("ope/details/0", whole, PLUGIN), 1)
    empty = events.document("ope/details/1", b"", PLUGIN)
    empty.value[0].tensor.ClearField("string_val")
    log.add(empty, 2)
    log.close()
    tab = Tab(tmp_path)
    assert tab.plugin.is_active()
    runs = [run["name"] for run in tab.get("/runs")["runs"]]
    assert len(runs) == 1 + len(wrong) + 4 + 2
    answers = tab.get("/series", runs=runs, names=["NFIS"])
    assert answers["good"]["series"]["NFIS"]["step"] == [7]
    for number, name in enumerate(wrong):
        details = tab.get(f"/details?run=bad{number}")
        assert details["problem"].startswith("cannot be read: evaluation ("), name
        assert details["evaluation"] is None
        assert answers[f"bad{number}"]["series"]["NFIS"]["step"] == []
    for run in ("good", "odd0", "odd1", "odd2", "odd3"):
        details = tab.get(f"/details?run={run}")
        assert details["problem"] is None
        assert details["evaluation"]["headline"] == evaluation.headline
    assert "cannot be read" in tab.get("/details?run=tensors")["problem"]


def test_of_very_many_series_the_first_are_listed_and_the_others_found(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path)
    for first in range(0, 5000, 500):
        many = {f"ope/e{k}/value": float(k) for k in range(first, first + 500)}
        log.add(events.scalars(many), 1)
    log.add(events.scalars({"ope/auto/value": 1.0, "ope/fresh/value": 2.0}), 1)
    log.close()
    tab = Tab(tmp_path)
    (run,) = tab.get("/runs")["runs"]
    assert run["series"][:3] == ["fresh", "auto", "e0"]
    assert (len(run["series"]), run["more"]) == (40, 4962)
    found = tab.get("/names?run=.&part=E499")
    assert found == {"names": ["e499", *(f"e{k}" for k in range(4990, 5000))], "count": 11}
    assert len(tab.get("/names?run=.")["names"]) == 200
    assert tab.get("/names?run=missing") == {"names": [], "count": 0}
    assert tab.get("/series", runs=["."], names=["e4999"])["."]["series"]["e4999"]["value"] == [
        4999
    ]


def test_many_points_are_thinned_to_those_of_tensorboard(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1100):
            writer.add_scalar("ope/auto/value", float(np.sin(step)), step)
            writer.add_scalar("ope/auto/low", float(np.sin(step)) - 1, step)
    found = Tab(tmp_path).get("/series", runs=["."], names=["auto"])["."]["series"]["auto"]
    assert len(found["step"]) == 1000
    assert found["step"] == sorted(found["step"])
    assert found["step"][-1] == 1099
    np.testing.assert_allclose(found["value"], np.sin(found["step"]), atol=1e-6)
    np.testing.assert_allclose(found["low"], np.sin(found["step"]) - 1, atol=1e-6)


def test_a_part_without_its_run_is_a_run_of_its_own() -> None:
    part = next(iter(reader._PARTS))
    assert reader._owner(f"a/{part}", {"a", f"a/{part}"}) == "a"
    assert reader._owner(f"a/{part}", {f"a/{part}"}) == f"a/{part}"
    assert reader._owner(part, {".", part}) == "."
    assert reader._owner(part, {part}) == part
