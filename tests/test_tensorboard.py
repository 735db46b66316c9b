"""Test the event files of EvaluationWriter, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.tensorboard import SummaryWriter

from ope_gym import Evaluation, evaluate
from ope_gym.analysis.overlap import overlap
from ope_gym.inference.estimate import Behaviour
from ope_gym.report.documents import LARGEST, encode, evaluation_document
from ope_gym.report.scalars import scalars, undefined_ends
from ope_gym.report.tensorboard import EvaluationWriter
from ope_gym.report.text import headline
from ope_gym.verdict import Reason, Verdict
from tests import builders

NAMES = ["NFIS", "BIS", "NFCIS"]


@pytest.fixture(scope="module")
def made() -> builders.Recorded:
    return builders.recorded(1, (30, 30, 30))


@pytest.fixture(scope="module")
def evaluation(made: builders.Recorded) -> Evaluation:
    return evaluate(made.trajectories, made.target, estimators=NAMES)


@pytest.fixture
def broken(evaluation: Evaluation) -> Evaluation:
    """Return BIS without an interval, and NFIS as it is."""
    bis = evaluation["BIS"]
    return Evaluation(
        {
            "BIS": replace(bis, interval=replace(bis.interval, low=math.nan, high=math.inf)),
            "NFIS": evaluation["NFIS"],
        }
    )


def read(path: Path) -> EventAccumulator:
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def series(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def text(events: EventAccumulator) -> str:
    (event,) = events.Tensors("ope/report")
    return bytes(event.tensor_proto.string_val[0]).decode()


def layout(events: EventAccumulator) -> Any:
    (event,) = events.Tensors("custom_scalars__config__")
    return layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])


def test_scalars_hold_the_numbers(tmp_path: Path, evaluation: Evaluation) -> None:
    with EvaluationWriter(tmp_path) as writer:
        writer.add_return(3.5, 2)
        writer.add_evaluation(evaluation, 2, truth=0.75)
    events = read(tmp_path)
    # a colour of their own: TensorBoard gives one to each run
    assert series(read(tmp_path / "rollouts"), "rollout/return") == {2: 3.5}
    assert series(read(tmp_path / "fresh"), "ope/fresh/value") == {2: 0.75}
    assert "ope/fresh/low" not in read(tmp_path / "fresh").Tags()["scalars"]  # error unknown
    best = evaluation["NFIS"]  # recommended: auto is not there
    expected = {
        "ope/fresh_episodes": best.fresh_episodes,
        "ope/verdict": float(["red", "amber", "green"].index(best.verdict.colour)),
        "diagnostics/NFIS/ess": best.diagnostics.ess,
        "diagnostics/NFIS/max_share": best.diagnostics.max_share,
        "diagnostics/NFIS/mean_weight": best.diagnostics.mean_weight,
        "diagnostics/NFIS/support_violations": 0.0,
    }
    if math.isfinite(best.diagnostics.pareto_k):
        expected["diagnostics/NFIS/pareto_k"] = best.diagnostics.pareto_k
    for name, estimate in evaluation.items():
        expected |= {
            f"ope/{name}/value": estimate.value,
            f"ope/{name}/low": estimate.interval.low,
            f"ope/{name}/high": estimate.interval.high,
        }
    for tag, value in expected.items():
        assert series(events, tag) == {2: pytest.approx(value, rel=1e-6)}, tag
    assert set(events.Tags()["scalars"]) == set(expected)  # and no others


def test_a_recommended_estimate_with_a_cap_says_how_much_was_clipped(
    evaluation: Evaluation,
) -> None:
    found = scalars(evaluation.select(["NFCIS"]))
    assert found["diagnostics/NFCIS/capped_share"] == evaluation["NFCIS"].diagnostics.capped_share
    assert "diagnostics/NFIS/capped_share" not in scalars(evaluation)  # it has no cap


def test_scalars_leave_out_what_is_undefined(broken: Evaluation) -> None:
    found = scalars(broken)
    assert found["ope/BIS/value"] == broken["BIS"].value
    assert "ope/BIS/low" not in found
    assert found["diagnostics/NFIS/support_violations"] == 0.0
    assert all(math.isfinite(number) for number in found.values())
    assert undefined_ends(broken["BIS"]) == ["low", "high"]


def test_the_layout_has_four_charts_the_recommended_estimate_first(
    tmp_path: Path, evaluation: Evaluation
) -> None:
    with EvaluationWriter(tmp_path) as writer:
        for step in range(3):
            writer.add_evaluation(evaluation, step)
    first, more = layout(read(tmp_path)).category  # the reader would find three
    (chart,) = first.chart
    assert chart.title == "NFIS with its interval"
    (band,) = chart.margin.series
    assert (band.value, band.lower, band.upper) == (
        "ope/NFIS/value",
        "ope/NFIS/low",
        "ope/NFIS/high",
    )
    beside, all_of_them, sure = more.chart
    tags = ["ope/NFIS/value", "ope/settled/value", "rollout/return", "rollout/ep_rew_mean"]
    for tag in [*tags, "ope/provisional/value", "ope/fresh/value", "eval/mean_reward"]:
        assert any(re.match(pattern, tag) for pattern in beside.multiline.tag), tag
    assert not any(re.match(pattern, "ope/BIS/value") for pattern in beside.multiline.tag)
    assert list(all_of_them.multiline.tag) == [f"ope/{name}/value$" for name in NAMES]
    assert list(sure.multiline.tag) == ["ope/fresh_episodes$"]


def test_undefined_estimates_are_skipped_and_marked(
    tmp_path: Path, evaluation: Evaluation, broken: Evaluation
) -> None:
    with EvaluationWriter(tmp_path) as writer:
        writer.add_evaluation(evaluation, 0)
        writer.add_evaluation(broken, 1)
        writer.add_evaluation(evaluation, 2)
        writer.add_return(math.nan, 2)
    events = read(tmp_path)
    assert not (tmp_path / "rollouts").exists()
    for end in ("value", "low", "high"):  # a band is drawn only if all three have the same steps
        assert list(series(events, f"ope/BIS/{end}")) == [0, 2]
        assert list(series(events, f"ope/NFIS/{end}")) == [0, 1, 2]
    assert series(events, "diagnostics/BIS/undefined") == {1: 1.0, 2: 0.0}
    assert list(series(events, "diagnostics/NFIS/ess")) == [0, 1, 2]
    assert "diagnostics/NFIS/undefined" not in events.Tags()["scalars"]


def test_report(tmp_path: Path, made: builders.Recorded, evaluation: Evaluation) -> None:
    hparams = {"env": "Toy-v0", "seed": np.int64(7), "estimators": NAMES, "save": None, "cap": 10.0}
    with EvaluationWriter(tmp_path) as writer:
        writer.add_evaluation(evaluation, 5)
        shares = overlap(made.trajectories, made.target)
        writer.add_report(evaluation, 5, hparams, overlap=shares, truth=0.75, truth_error=0.1)
    events = read(tmp_path)
    assert not events.Tags()["images"]  # the OPE tab draws them
    assert list(series(events, "ope/BIS/value")) == [5]  # not a second time by the report
    table, regime = text(events).split("\n\n" + "The target", 1)
    assert table == "\n".join(
        f"    {line}" for line in evaluation.table(0.75, 0.1, verbose=True).splitlines()
    )
    assert regime.startswith(" was trained on these episodes")
    fresh = read(tmp_path / "fresh")
    assert series(fresh, "ope/fresh/low") == {5: pytest.approx(0.75 - 1.959964 * 0.1)}
    assert series(fresh, "ope/fresh/high") == {5: pytest.approx(0.75 + 1.959964 * 0.1)}

    start = hparams_of(events, "_hparams_/session_start_info").session_start_info
    assert {key: value.WhichOneof("kind") for key, value in start.hparams.items()} == {
        "env": "string_value",
        "seed": "number_value",
        "estimators": "string_value",
        "save": "string_value",
        "cap": "number_value",
    }
    assert start.hparams["seed"].number_value == 7
    experiment = hparams_of(events, "_hparams_/experiment").experiment
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics == [*(f"ope/{n}/value" for n in NAMES), "ope/fresh_episodes", "ope/verdict"]
    assert set(metrics) <= set(events.Tags()["scalars"])


def hparams_of(events: EventAccumulator, tag: str) -> Any:
    content = events.SummaryMetadata(tag).plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def test_report_alone_writes_the_scalars(
    tmp_path: Path, made: builders.Recorded, broken: Evaluation
) -> None:
    with EvaluationWriter(tmp_path) as writer:
        writer.add_report(broken, 4, {})
    events = read(tmp_path)
    assert list(series(events, "ope/NFIS/value")) == [4]
    assert series(events, "diagnostics/BIS/undefined") == {4: 1.0}
    experiment = hparams_of(events, "_hparams_/experiment").experiment
    assert "ope/BIS/value" not in [info.name.tag for info in experiment.metric_infos]


def test_a_writer_of_the_training_loop_is_left_open(tmp_path: Path, evaluation: Evaluation) -> None:
    with SummaryWriter(str(tmp_path)) as own:
        with EvaluationWriter(own) as writer:
            writer.add_evaluation(evaluation, 0, truth=0.5)
            writer.add_return(1.0, 0)
            writer.add_report(evaluation, 1, {"lr": 0.1})
        own.add_scalar("loss", 1.0, 0)
    assert len(list(tmp_path.iterdir())) == 1
    events = read(tmp_path)
    written = {"loss", "ope/NFIS/value", "rollout/return", "ope/fresh/value"}
    assert written <= set(events.Tags()["scalars"])
    assert [d["headline"] for d in documents(events)] == 2 * [headline(evaluation["NFIS"])]


def test_other_things_than_folders_and_writers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"logdir is a int; give the folder .*SummaryWriter"):
        EvaluationWriter(3)


def test_writing_to_a_folder_does_not_import_torch(tmp_path: Path) -> None:
    """In a process of its own: the tests have loaded it."""
    code = (
        "import sys; from ope_gym.report.tensorboard import EvaluationWriter; "
        f"EvaluationWriter({str(tmp_path)!r}).close(); "
        "assert not {'torch', 'matplotlib', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_a_report_of_more_estimators_keeps_worth_and_verdict(
    tmp_path: Path, evaluation: Evaluation
) -> None:
    """The recommended estimate was written before at this step; the others come with the report."""
    with EvaluationWriter(tmp_path) as writer:
        writer.add_evaluation(evaluation.select(["NFIS"]), 3)
        writer.add_report(evaluation, 3, {})
    events = read(tmp_path)
    (sure,) = events.Scalars("ope/fresh_episodes")
    assert sure.value == pytest.approx(evaluation["NFIS"].fresh_episodes, rel=1e-6)
    assert len(events.Scalars("ope/NFIS/value")) == len(events.Scalars("ope/BIS/value")) == 1


# Documents of the OPE tab -----------------------------------------------------------------


def documents(events: EventAccumulator, folder: str = "ope/details/") -> list[dict[str, Any]]:
    """Return the documents with their steps, in the order of steps."""
    found = [
        {"step": event.step, "tag": tag, **json.loads(event.tensor_proto.string_val[0])}
        for tag in events.Tags()["tensors"]
        if tag.startswith(folder)
        for event in events.Tensors(tag)
    ]
    return sorted(found, key=lambda document: document["step"])


def test_a_document_holds_what_the_tab_draws(
    tmp_path: Path, made: builders.Recorded, evaluation: Evaluation
) -> None:
    shares = overlap(made.trajectories, made.target)
    with EvaluationWriter(tmp_path) as writer:
        writer.add_report(evaluation.named("policy 3"), 3, {}, overlap=shares, truth=0.75)
    (found,) = documents(read(tmp_path))
    assert found["step"] == 3
    best = evaluation["NFIS"]
    assert found["headline"] == headline(best, "policy 3")
    assert found["recommended"] == "NFIS"
    assert [row["name"] for row in found["estimates"]] == ["NFIS", "BIS", "NFCIS"]
    for row in found["estimates"]:
        e = evaluation[row["name"]]
        ends = (e.value, e.interval.low, e.interval.high, e.diagnostics.ess, e.fresh_episodes)
        shown = [row[key] for key in ("value", "low", "high", "ess", "fresh_episodes")]
        assert shown == pytest.approx(ends, rel=5e-4), row["name"]
        assert row["verdict"] == e.verdict.colour
        assert row["reasons"] == [str(reason) for reason in e.verdict.reasons[:6]]
        assert row["advice"] == [str(advice) for advice in e.verdict.advice]
    assert found["truth"] == [0.75, None]
    first = found["ess"]["curves"][0]
    assert first["names"][0] == "NFIS"
    curve = best.diagnostics.ess_curve[found["ess"]["x"]]
    np.testing.assert_allclose(first["y"], curve, rtol=5e-4)
    weights = np.sort(np.exp(best.diagnostics.log_last))[::-1]
    taken = np.rint(np.array(found["concentration"]["x"]) * weights.size).astype(int)
    held = [sum(weights[:k]) / sum(weights) for k in taken]
    np.testing.assert_allclose(found["concentration"]["curves"][0]["y"], held, rtol=1e-3)
    np.testing.assert_allclose(
        found["behaviours"]["weight"], best.diagnostics.behaviour_shares, rtol=5e-4
    )
    np.testing.assert_allclose(found["overlap"]["matrix"], shares.matrix, rtol=5e-4)
    assert found["overlap"]["rows"][-1] == "target"


def test_undefined_numbers_are_null_in_documents(broken: Evaluation) -> None:
    rows = {row["name"]: row for row in evaluation_document(broken)["estimates"]}
    assert (rows["BIS"]["low"], rows["BIS"]["high"]) == (None, None)
    json.loads(encode(evaluation_document(broken)), parse_constant=pytest.fail)


def test_documents_are_bounded(evaluation: Evaluation) -> None:
    bis = evaluation["BIS"]
    n = 100_000
    advice = Reason("collect_from", episodes=1, behaviour="x" * 10_000)
    long = replace(
        bis,
        verdict=Verdict((Reason("adaptive"),) * 50, (advice,) * 50, (advice,) * 50),
        diagnostics=replace(
            bis.diagnostics,
            ess_curve=np.linspace(9.0, 1.0, n),
            behaviour_shares=np.full(n, 1 / n),
            log_last=np.zeros(n),
        ),
        sample=replace(
            bis.sample,
            trajectories=n,
            counts=np.ones(n, dtype=np.int64),
            behaviours=tuple(Behaviour(f"policy {k}", (k,)) for k in range(n)),
        ),
    )
    document = evaluation_document(Evaluation({f"e{k}": long for k in range(500)}))
    assert document["left_out"] == 460
    assert len(document["ess"]["x"]) == len(document["ess"]["curves"][0]["y"]) == 60
    assert document["behaviours"]["left_out"] == n - 24
    small = encode(evaluation_document(Evaluation({"BIS": long})))
    assert len(small) < LARGEST
    assert len(encode(document)) < 4 * LARGEST  # 40 estimators whose verdicts are all too long
    assert json.loads(encode(document))["ess"] is None  # pictures go first


def test_tensorboard_keeps_details_near_every_step(tmp_path: Path, evaluation: Evaluation) -> None:
    """With the reader of TensorBoard, which keeps ten of a tag."""
    with EvaluationWriter(tmp_path) as writer:
        for step in range(400):
            writer.add_evaluation(Evaluation({"NFIS": evaluation["NFIS"]}), step)
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 10})
    events.Reload()
    kept = {document["step"] for document in documents(events)}
    assert set(range(200)) <= kept  # all of the first two hundred
    assert 399 in kept  # the last one, for the headline
    assert max(min(abs(step - k) for k in kept) for step in range(400)) <= 2
    assert len(kept) <= 200 + 50 + 34 + 10  # every second and third of the others, and ten
