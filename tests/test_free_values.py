"""Test how the values of a training loop are shown: words, numbers, the tab, Custom Scalars."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from ope_gym.online import FreeEstimate
from ope_gym.report.documents import free_document
from ope_gym.report.free_values import (
    FreeWriter,
    band_in_words,
    free_headline,
    free_scalars,
    in_words,
)
from tests.test_tab import Tab


def estimate(step: int, value: float, error: float = 5.0, **changes: Any) -> FreeEstimate:
    """Return a value whose band is two errors on either side; one return deviates by 20."""
    ends = value - 2 * error, value + 2 * error
    shares = {"advantages": 0.75, "simulation": 0.25}
    return replace(FreeEstimate(step, value, error, *ends, False, 20.0, 31, shares), **changes)


def events_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def test_an_estimate_prints_its_value_first() -> None:
    assert str(estimate(4096, 100.0)) == (
        "100 in [90, 110], as sure as about 16 fresh episodes; provisional, of the policy after "
        "4,096 timesteps"
    )


def test_no_red_value_claims_to_be_as_sure_as_any_number_of_episodes() -> None:
    red = estimate(4096, 100.0, 12.0)
    assert red.verdict.colour == "red"
    assert red.fresh_episodes > 2.0
    assert str(red) == (
        "100 in [76, 124] (red: do not use it); provisional, of the policy after 4,096 timesteps"
    )
    assert "as sure" not in free_headline(red)
    assert "ope/fresh_episodes" not in free_scalars(red)
    assert free_document(red, "settled", headline="", level=0.9)["fresh_episodes"] is None


def test_a_value_that_is_not_known_makes_a_whole_sentence() -> None:
    unknown = estimate(4096, 100.0, deterministic=True, unseen=1.0, length=20.0)
    words = free_headline(unknown, subject="The deterministic policy")
    assert words.startswith("The deterministic policy after 4,096 timesteps is not known: no")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            5.0,
            "is worth 100.0 (95 %: 90.0 to 110.0), as sure as about 16 fresh episodes would make "
            "you.",
        ),
        (
            8.0,
            "is worth 100.0 (95 %: 84.0 to 116.0), as sure as about 6.2 fresh episodes would make "
            "you. Use with care (amber): 10 would be enough.",
        ),
        (
            20.0,
            "may be worth 100 (95 %: 60 to 140), but do not use this number (red): it tells less "
            "than 4 fresh episodes would.",
        ),
        (
            200.0,
            "may be worth 100 (95 %: -300 to 500), but do not use this number (red): it tells less "
            "than 4 fresh episodes would.",
        ),
    ],
)
def test_headlines(error: float, said: str) -> None:
    assert free_headline(estimate(4096, 100.0, error)) == f"The policy after 4,096 timesteps {said}"


def test_without_a_spread_nobody_knows_how_sure_it_is() -> None:
    assert "its error is unknown" in free_headline(estimate(1, 2.0, spread=math.nan))
    nothing = estimate(1, 0.0, math.inf, spread=math.nan)
    said = "may be worth 0, but do not use this number (red): its error is unknown."
    assert in_words(nothing) == said
    sure = estimate(1, 2.0, standard_error=0.0)
    assert band_in_words(2.0, -8.0, 12.0, 0.9) == "2.0 (90 %: -8.0 to 12.0)"
    assert in_words(sure, 0.9) == "worth 2.0 (90 %: -8.0 to 12.0)."


@pytest.mark.parametrize(
    ("ended", "verdict", "said"),
    [
        (1, "red", "but do not use this number (red): only 1 episode ended so far."),
        (3, "red", "but do not use this number (red): only 3 episodes ended so far."),
        (9, "amber", "9.0 fresh episodes would make you. Use with care (amber): only 9 episodes"),
        (10, "green", "as sure as about 400 fresh episodes would make you."),
    ],
)
def test_few_episodes_are_worth_no_more_than_themselves(
    ended: int, verdict: str, said: str
) -> None:
    found = estimate(1, 2.0, 1.0, ended=ended)
    assert found.fresh_episodes == (400.0 if ended >= 10 else ended)
    assert found.verdict.colour == verdict
    assert said in in_words(found)


@pytest.mark.parametrize(
    ("episodes", "verdict", "said"),
    [
        (1, "red", "(red): it rests on 1 fresh episode; 10 would be enough (n_eval_episodes=10)."),
        (5, "amber", ", from 5 fresh episodes. Use with care (amber): 10 would be enough (n_eval"),
        (10, "green", "worth 2.0 (95 %: -10.6 to 14.6), from 10 fresh episodes."),
    ],
)
def test_fresh_episodes_alone_are_counted_as_they_were_played(
    episodes: int, verdict: str, said: str
) -> None:
    for spread in (20.0, *(0.1 * k for k in range(1, 200))):  # not one of them rounded to below
        error = spread / episodes**0.5
        shares = {"fresh": 1.0}
        found = estimate(1, 2.0, error, spread=spread, episodes=episodes, shares=shares)
        assert found.verdict.colour == verdict
    found = estimate(1, 2.0, 20.0 / episodes**0.5, episodes=episodes, shares=shares)
    assert said in in_words(found)


def test_episodes_that_return_the_same_are_amber() -> None:
    found = estimate(1, -499.1, 5.0, spread=1.0, steady=True, ended=20)
    assert found.verdict.colour == "amber"
    assert in_words(found) == (
        "worth -499.1 (95 %: -509.1 to -489.1); its episodes all return about the same. "
        "Use with care (amber): how often other returns occur is unknown."
    )
    assert replace(found, ended=3).verdict.colour == "red"
    assert replace(found, spread=20.0).verdict.colour == "green"


def test_only_a_provisional_value_says_worth_and_verdict() -> None:
    found = free_scalars(estimate(1, 3.0, 8.0))
    assert found == {
        "ope/provisional/value": 3.0,
        "ope/provisional/low": -13.0,
        "ope/provisional/high": 19.0,
        "ope/fresh_episodes": 6.25,
        "ope/verdict": 1.0,
    }
    assert set(free_scalars(estimate(1, 3.0, settled=True))) == {
        f"ope/settled/{end}" for end in ("value", "low", "high")
    }
    assert free_scalars(estimate(1, math.nan)) == {}
    with pytest.raises(ValueError, match=r"kind='final' must be one of 'provisional'"):
        free_scalars(estimate(1, 3.0), "final")


@pytest.mark.parametrize("handed_in", [False, True])
def test_the_writer_writes_numbers_details_and_four_charts(tmp_path: Path, handed_in: bool) -> None:
    target = SummaryWriter(str(tmp_path)) if handed_in else tmp_path
    with FreeWriter(target, level=0.9) as writer:
        writer.add(estimate(100, 7.0))
        writer.add(estimate(200, math.inf))  # left out as a whole
        writer.add(estimate(100, 8.0, settled=True))
    if isinstance(target, SummaryWriter):
        target.add_scalar("loss", 1.0, 0)  # it is open still
        target.close()
    events = events_of(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("ope/provisional/value")] == [(100, 7.0)]
    assert [(e.step, e.value) for e in events.Scalars("ope/settled/value")] == [(100, 8.0)]
    (written,) = events.Tensors("ope/settled/details/0")
    document = json.loads(written.tensor_proto.string_val[0])
    assert document["headline"] == free_headline(estimate(100, 8.0), 0.9)
    assert "(90 %: " in document["headline"]
    shown = [document[key] for key in ("verdict", "fresh_episodes", "level")]
    assert shown == ["green", 16.0, 0.9]
    assert document["shares"] == {"advantages": 0.75, "simulation": 0.25}
    (layout,) = events.Tensors("custom_scalars__config__")
    charts = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0]).category
    assert [len(category.chart) for category in charts] == [2, 2]
    bands = [chart.margin.series[0] for chart in charts[0].chart]
    assert [band.value for band in bands] == ["ope/settled/value", "ope/provisional/value"]
    assert (bands[0].lower, bands[0].upper) == ("ope/settled/low", "ope/settled/high")


def test_the_tab_gets_the_values_of_one_policy(tmp_path: Path) -> None:
    values = {100: 10.0, 200: 50.0, 300: 40.0, 400: 55.0}
    with FreeWriter(tmp_path / "run") as writer:
        for step, value in values.items():
            writer.add(estimate(step, value))
        writer.add(estimate(100, 12.0, 1.0, settled=True))
        writer.add(estimate(200, 65.0, 1.0, settled=True))  # beyond 60, the end of its band
        writer.add(estimate(400, 54.0, 6.0), "fresh")
    tab = Tab(tmp_path)
    last = tab.get("/details?run=run")
    assert (last["evaluation"], last["ranking"]) == (None, None)
    assert last["free"]["step"] == 400
    assert last["free"]["provisional"]["value"] == 55.0
    assert last["free"]["settled"] is None
    assert last["free"]["fresh"]["value"] == 54.0
    early = tab.get("/details?run=run&step=130")["free"]
    assert early["step"] == 100
    assert (early["provisional"]["value"], early["settled"]["value"]) == (10.0, 12.0)
    record = last["record"]
    assert (record["within"], record["settled"], record["policies"]) == (1, 2, 4)
    # by the lower end: 63 settled, 45 and 30 provisional, 10 settled
    assert [(row["step"], row["settled"]) for row in record["best"]] == [
        (200, True),
        (400, False),
        (300, False),
        (100, True),
    ]


def test_the_best_of_fresh_values_are_listed_where_there_are_no_others(tmp_path: Path) -> None:
    with FreeWriter(tmp_path / "run") as writer:
        for step, value in ((100, 10.0), (200, 50.0)):
            writer.add(estimate(step, value, shares={"fresh": 1.0}), "fresh")
    record = Tab(tmp_path).get("/details?run=run")["record"]
    assert record["policies"] == 2
    assert [row["step"] for row in record["best"]] == [200, 100]


def test_an_evaluation_and_free_values_are_told_apart(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as own:
        own.add_scalar("ope/auto/value", 1.0, 7)
    assert Tab(tmp_path).get("/details?run=.") == {
        "evaluation": None,
        "ranking": None,
        "free": None,
        "record": None,
        "problem": None,
    }


def test_tensorboard_keeps_details_of_a_long_training(tmp_path: Path) -> None:
    with FreeWriter(tmp_path) as writer:
        for step in range(1000):
            writer.add(estimate(step, float(step)))
            if step >= 5:
                writer.add(estimate(step - 5, step - 5.0, settled=True))
    tab = Tab(tmp_path)
    assert tab.get("/details?run=.")["free"]["step"] == 999
    assert len(tab.get("/details?run=.")["record"]["best"]) == 5
    for asked in (3, 150, 600, 951):
        found = tab.get(f"/details?run=.&step={asked}")["free"]
        assert abs(found["step"] - asked) <= 10
        assert found["provisional"] is not None or found["settled"] is not None
