"""Test the event files of EvaluationWriter, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
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

from ope_gym import Evaluation, Weighting, evaluate, evaluate_log_probs
from ope_gym.analysis.overlap import overlap
from ope_gym.report.scalars import scalars, undefined_ends
from ope_gym.report.tensorboard import EvaluationWriter, evaluation_markdown
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
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def series(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def text(events: EventAccumulator) -> str:
    (event,) = events.Tensors("ope/report/text_summary")
    return bytes(event.tensor_proto.string_val[0]).decode()


def layout(events: EventAccumulator) -> Any:
    (event,) = events.Tensors("custom_scalars__config__")
    return layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])


def test_scalars_hold_the_numbers(tmp_path: Path, evaluation: Evaluation) -> None:
    with EvaluationWriter(tmp_path) as writer:
        writer.add_return(3.5, 2)
        writer.add_evaluation(evaluation, 2, truth=0.75)
    events = read(tmp_path)
    assert series(events, "rollout/return") == {2: 3.5}
    assert series(events, "ope/truth") == {2: 0.75}
    for name, estimate in evaluation.items():
        expected = {
            f"ope/{name}/value": estimate.value,
            f"ope/{name}/low": estimate.interval.low,
            f"ope/{name}/high": estimate.interval.high,
            f"diagnostics/{name}/ess": estimate.diagnostics.ess,
            f"diagnostics/{name}/max_share": estimate.diagnostics.max_share,
            f"diagnostics/{name}/mean_weight": estimate.diagnostics.mean_weight,
        }
        if math.isfinite(estimate.diagnostics.pareto_k):
            expected[f"diagnostics/{name}/pareto_k"] = estimate.diagnostics.pareto_k
        for tag, value in expected.items():
            assert series(events, tag) == {2: pytest.approx(value, rel=1e-6)}, tag
        assert series(events, f"diagnostics/{name}/support_violations") == {2: 0.0}
    tags = events.Tags()["scalars"]
    assert "diagnostics/NFCIS/capped_share" in tags
    assert "diagnostics/NFIS/capped_share" not in tags  # it has no cap
    assert not [tag for tag in tags if tag.endswith("undefined")]


def test_scalars_leave_out_what_is_undefined(broken: Evaluation) -> None:
    found = scalars(broken)
    assert found["ope/BIS/value"] == broken["BIS"].value
    assert "ope/BIS/low" not in found
    assert found["diagnostics/NFIS/support_violations"] == 0.0
    assert all(math.isfinite(number) for number in found.values())
    assert undefined_ends(broken["BIS"]) == ["low", "high"]


def test_the_layout_is_written_once_with_bands_in_order(
    tmp_path: Path, evaluation: Evaluation
) -> None:
    with EvaluationWriter(tmp_path) as writer:
        for step in range(3):
            writer.add_evaluation(evaluation, step)
    value, diagnostics = layout(read(tmp_path)).category  # the reader would find three
    assert (value.title, diagnostics.title) == ("Value of the policy", "Diagnostics")
    first, *bands = value.chart
    assert first.title == "estimates and mean return"
    assert list(first.multiline.tag) == [
        "rollout/(return|ep_rew_mean)$",
        "ope/truth$",
        *(f"ope/{name}/value$" for name in NAMES),
    ]
    assert [chart.title for chart in bands] == NAMES[::-1]  # TensorBoard turns them round again
    for chart in bands:
        (band,) = chart.margin.series
        assert (band.value, band.lower, band.upper) == tuple(
            f"ope/{chart.title}/{end}" for end in ("value", "low", "high")
        )
    (ess,) = diagnostics.chart
    assert list(ess.multiline.tag) == [f"diagnostics/{name}/ess$" for name in NAMES]


def test_undefined_estimates_are_skipped_and_marked(
    tmp_path: Path, evaluation: Evaluation, broken: Evaluation
) -> None:
    with EvaluationWriter(tmp_path) as writer:
        writer.add_evaluation(evaluation, 0)
        writer.add_evaluation(broken, 1)
        writer.add_evaluation(evaluation, 2)
        writer.add_return(math.nan, 2)
    events = read(tmp_path)
    for end in ("value", "low", "high"):  # a band is drawn only if all three have the same steps
        assert list(series(events, f"ope/BIS/{end}")) == [0, 2]
        assert list(series(events, f"ope/NFIS/{end}")) == [0, 1, 2]
    assert series(events, "diagnostics/BIS/undefined") == {1: 1.0, 2: 0.0}
    assert list(series(events, "diagnostics/BIS/ess")) == [0, 1, 2]
    assert "diagnostics/NFIS/undefined" not in events.Tags()["scalars"]
    assert "rollout/return" not in events.Tags()["scalars"]


def test_report(tmp_path: Path, made: builders.Recorded, evaluation: Evaluation) -> None:
    pytest.importorskip("matplotlib")
    hparams = {"env": "Toy-v0", "seed": np.int64(7), "estimators": NAMES, "save": None, "cap": 10.0}
    with EvaluationWriter(tmp_path) as writer:
        writer.add_evaluation(evaluation, 5)
        shares = overlap(made.trajectories, made.target)
        writer.add_report(evaluation, 5, hparams, overlap=shares, truth=0.75)
    events = read(tmp_path)
    assert sorted(events.Tags()["images"]) == [
        "ope/ess_over_time",
        "ope/forest",
        "ope/policy_overlap",
        "ope/weights",
    ]
    for tag in events.Tags()["images"]:
        (image,) = events.Images(tag)
        assert image.encoded_image_string.startswith(b"\x89PNG")
        assert (image.step, image.width > 300, image.height > 300) == (5, True, True)
    assert sorted(events.Tags()["histograms"]) == sorted(f"log10_weight/{n}" for n in NAMES)
    (histogram,) = events.Histograms("log10_weight/NFIS")
    logs = evaluation["NFIS"].diagnostics.log_last / np.log(10)
    assert histogram.histogram_value.num == logs.size
    assert histogram.histogram_value.min == pytest.approx(logs.min())
    assert histogram.histogram_value.max == pytest.approx(logs.max())
    assert list(series(events, "ope/BIS/value")) == [5]  # not a second time by the report
    assert text(events) == evaluation_markdown(evaluation, truth=0.75, notes=[])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []  # one run, one folder

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
    assert metrics == [t for n in NAMES for t in (f"ope/{n}/value", f"diagnostics/{n}/ess")]
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
    assert "Undefined, so not drawn: BIS (low, high)." in text(events)
    experiment = hparams_of(events, "_hparams_/experiment").experiment
    assert "ope/BIS/value" not in [info.name.tag for info in experiment.metric_infos]


def test_report_without_matplotlib_says_so(
    tmp_path: Path,
    made: builders.Recorded,
    evaluation: Evaluation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with EvaluationWriter(tmp_path) as writer:
        writer.add_report(evaluation, 0, {})
    events = read(tmp_path)
    assert events.Tags()["images"] == []
    assert text(events).count("No figures: figures need matplotlib") == 1
    assert len(events.Tags()["histograms"]) == len(NAMES)


def test_weights_of_zero_are_counted_in_words(tmp_path: Path, made: builders.Recorded) -> None:
    table = made.target.table.copy()
    table[:, 0] = 0.0
    target = builders.Table(table / table.sum(axis=1, keepdims=True))
    evaluation = evaluate(made.trajectories, target, estimators="FIS")
    zeros = int(np.isneginf(evaluation["FIS"].diagnostics.log_last).sum())
    assert 0 < zeros < 90
    never = builders.Table(np.eye(3)[[0, 0, 0]])  # only ever takes action 0, for the next report
    with EvaluationWriter(tmp_path / "some") as writer:
        writer.add_report(evaluation, 0, {})
    assert f"FIS: {zeros} of 90 episodes have weight 0." in text(read(tmp_path / "some"))

    data = made.trajectories.select(
        episodes=made.trajectories.actions[made.trajectories.offsets[:-1]] != 0
    )
    empty = evaluate(data, never, estimators="NFIS")
    assert math.isnan(empty["NFIS"].value)
    with EvaluationWriter(tmp_path / "all") as writer:
        writer.add_report(empty, 0, {})
    events = read(tmp_path / "all")
    assert events.Tags()["histograms"] == []
    assert "ope/NFIS/value" not in events.Tags()["scalars"]
    assert "Undefined, so not drawn: NFIS (value, low, high)." in text(events)


def test_markdown_has_table_regime_and_reasons(made: builders.Recorded) -> None:
    few = made.trajectories.select(episodes=slice(0, 6))
    evaluation = evaluate(few, made.target, estimators=["BIS", "NBIS"])
    lines = evaluation_markdown(evaluation, notes=["A note."]).splitlines()
    assert lines[0].startswith("6 episodes, ")
    assert lines[2].startswith("**Data: in-sample, optimistic.** The target was trained")
    header, rule, *rows = [line for line in lines if line.startswith("|")]
    assert header.count("|") == rule.count("|") == rows[0].count("|") == 9
    assert [row.split(" | ")[0] for row in rows] == ["| BIS", "| NBIS"]
    assert f"| {evaluation['BIS'].value:.5g} |" in rows[0]
    assert rows[0].endswith("**red** |")
    verdict = evaluation["BIS"].verdict
    assert f"- **BIS, NBIS** {verdict}" in lines
    assert verdict.reasons[0] in "\n".join(lines)
    assert lines[-1] == "A note."


def test_markdown_says_what_estimates_from_a_model_rest_on(made: builders.Recorded) -> None:
    evaluation = evaluate(made.trajectories, made.target, estimators=["DM", "MDR"])
    basis = evaluation["DM"].basis
    assert basis
    assert f"DM, MDR: {basis}." in evaluation_markdown(evaluation, notes=[]).splitlines()


@pytest.mark.parametrize(("held_out", "words"), [(True, "never trained"), (False, "very episodes")])
def test_markdown_says_the_regime(held_out: bool, words: str) -> None:
    made = builders.recorded(1, (3, 3), held_out=held_out)
    assert words in evaluation_markdown(evaluate(made.trajectories, made.target), notes=[])


def test_markdown_of_arrays_whose_regime_nobody_stated() -> None:
    evaluation = evaluate_log_probs([-0.7, -0.7], [[-0.7, -0.7]], [0, 0], [1.0, 2.0], [0, 1, 2])
    assert "**Data: unstated.** It is not known" in evaluation_markdown(evaluation, notes=[])


def test_the_report_says_that_mixtures_are_partial(made: builders.Recorded) -> None:
    parted = evaluate(
        made.trajectories, made.target, estimators=NAMES, weighting=Weighting(mixture=2)
    )
    assert f"Weights: {parted.sample.mixture}." in evaluation_markdown(parted, notes=[])
    assert "mixtures of 2 of 3 behaviours" in evaluation_markdown(parted, notes=[])


def test_a_writer_of_the_training_loop_is_left_open(tmp_path: Path, evaluation: Evaluation) -> None:
    with SummaryWriter(str(tmp_path)) as own:
        with EvaluationWriter(own) as writer:
            writer.add_evaluation(evaluation, 0)
        own.add_scalar("loss", 1.0, 0)
    assert len(list(tmp_path.iterdir())) == 1
    tags = read(tmp_path).Tags()["scalars"]
    assert {"loss", "ope/NFIS/value"} <= set(tags)
