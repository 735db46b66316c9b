"""The study `outside` in miniature."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from studies import STUDIES
from studies.harness.registry import chosen_studies, load_study
from studies.harness.runner import plain
from studies.harness.seeds import seeds_of
from studies.harness.study import Runs
from studies.outside import study as module
from studies.outside.cells import Cell, Fault
from studies.outside.claims import outside_claims
from studies.outside.findings import found_faults, found_groups
from studies.outside.study import NAMES, Outside, evaluated

FEW = [
    Cell("graph", "graph 4, slips, N(0, 1), sparse", False, 200, 8),
    Cell("ModelFail", "ModelFail 2", True, 50, 1),
    Cell("queues", "queues: queue, as numbers", False, 50, 8),
]
DOORS: tuple[tuple[Fault, bool], ...] = (
    ("", False),
    ("", True),
    ("wrong propensities", False),
    ("wrong propensities", True),
    ("missing action", False),
)
FAULTS = [
    Cell("faults", "small MDP, 10 steps", False, 200, 1, fault=fault, arrays=arrays)
    for fault, arrays in DOORS
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(module, "cells", lambda seed=0: FEW)
    monkeypatch.setattr(module, "fault_cells", lambda seed=0: FAULTS)
    return Outside()


def test_runs_summary_claims_table_and_picture(small: Outside) -> None:
    runs = small.run(seeds_of(0, (0, 3), small.name))
    count = len(FEW) + len(FAULTS)
    assert runs["value"].shape == (3, count, len(NAMES))
    assert np.isfinite(runs["value"][:, :3]).all()
    assert np.isnan(runs["value"][:, 3:, NAMES.index("DM")]).all()
    assert set(np.unique(runs["colour"][:, :3])) <= {0.0, 1.0, 2.0}
    again = small.run(seeds_of(0, (1, 2), small.name))
    np.testing.assert_array_equal(again["value"][0], runs["value"][1])
    summary = plain(small.summarise(runs), missing=math.nan)
    assert list(summary["groups"]) == ["graph", "ModelFail", "queues"]
    assert summary["groups"]["ModelFail"]["hidden"]
    claims = small.claims(summary)
    assert len(claims) == 8
    assert {claim.with_runs(3).verdict for claim in claims} == {"undecided"}
    table = small.table(summary)
    assert "| ModelFail | hidden | 1 |" in table
    assert "| wrong propensities | arrays | 200 |" in table
    assert len(small.picture(summary).axes) == 2


def test_a_study_of_faults_alone_has_no_groups(small: Outside) -> None:
    only = Outside(groups=("faults",))
    summary = plain(only.summarise(only.run(seeds_of(0, (0, 2), "x"))), missing=math.nan)
    assert summary["groups"] == {}
    assert len(only.claims(summary)) == 2
    assert only.table(summary).startswith("Alarms")
    assert len(only.picture(summary).axes) == 2


def made_up(values: Any, cells: list[Cell], **columns: Any) -> Runs:
    """Runs of two estimators, NFIS and auto, with truth 0 and intervals ± 1."""
    value = np.asarray(values, dtype=np.float64)  # (R, C, 2)
    flat = value.shape[:2]
    runs: Runs = {
        "value": value,
        "low": value - 1.0,
        "high": value + 1.0,
        "colour": np.zeros(value.shape),
        "truth": np.zeros(flat),
        "free_low": np.full(flat, math.nan),
        "free_high": np.full(flat, math.nan),
        "share": np.zeros(flat),
        "ess": np.full(flat, 100.0),
    }
    return runs | columns


def test_ratios_and_coverage_by_hand() -> None:
    cells = [Cell("graph", f"made up {i}", False, 50, 1) for i in range(2)]
    runs = made_up(
        [[[2.0, 1.0], [0.5, 1.5]], [[-2.0, 1.0], [-0.5, -1.5]]],
        cells,
        free_low=np.array([[0.0, -1.0], [np.nan, 1.0]]),
        free_high=np.array([[1.0, 1.0], [np.nan, 2.0]]),
        share=np.array([[0.2, 0.6], [0.9, 0.7]]),
        colour=np.array([[[0, 0], [0, 1]], [[0, 0], [0, 2]]], dtype=np.float64),
    )
    found = found_groups(runs, cells, ("NFIS", "auto"))["graph"]
    nfis, auto = np.array([2.0, 0.5]), np.array([1.0, 1.5])
    np.testing.assert_allclose(np.exp(found["to_nfis"]), auto / nfis)
    np.testing.assert_allclose(np.exp(found["to_best"])[:, 1], [1.0, auto[1] / nfis[1]])
    assert found["best"] == ["auto", "NFIS"]
    assert np.exp(found["to_best_mean"][1]) == pytest.approx(np.sqrt(auto[1] / nfis[1]))
    coverage = found["coverage"]["auto"]
    assert coverage["green"] == pytest.approx(
        {"share": 0.5, "sets": 2, "coverage": 1.0, "error": 0.25}
    )
    assert coverage["amber"]["coverage"] == coverage["red"]["coverage"] == 0.0
    assert coverage["all"]["coverage"] == 0.5
    assert found["by_cell"] == [1.0, 0.0]
    assert found["red"] == (0.25, 4)
    assert found["width"] == 1.0
    assert found["free"] == 0.5  # of the two that rest on the model and have an interval


def test_rounding_errors_are_neither_misses_nor_ratios() -> None:
    cells = [Cell("graph", "made up", False, 50, 1)]
    values = [[[1.0, 1e-14]], [[-1.0, -1e-15]]]
    runs = made_up(values, cells)
    runs["low"] = runs["high"] = runs["value"]
    found = found_groups(runs, cells, ("NFIS", "auto"))["graph"]
    assert np.exp(found["to_nfis"][0]) == pytest.approx(0.01)
    assert found["coverage"]["auto"]["all"]["coverage"] == 1.0
    assert found["coverage"]["NFIS"]["all"]["coverage"] == 0.0


def test_undefined_intervals_are_counted_apart() -> None:
    cells = [Cell("graph", "made up", False, 50, 1)]
    runs = made_up([[[0.0, 0.0]], [[0.0, 0.0]]], cells)
    runs["low"] = np.array([[[-1.0, math.nan]], [[-1.0, -1.0]]])
    found = found_groups(runs, cells, ("NFIS", "auto"))["graph"]["coverage"]["auto"]
    assert found["undefined"] == 0.5
    assert found["all"]["sets"] == 1


def test_alarms_by_hand() -> None:
    listed = FAULTS[:1] + FAULTS[2:3]
    runs = made_up(np.zeros((4, 2, 2)), listed)
    runs["colour"][:, :, 1] = [[2, 2], [2, 2], [0, 2], [1, 1]]
    runs["ess"][0] = 10.0  # too few data to call the first false
    whole, wrong = found_faults(runs, listed, 1)
    assert (whole["share"], whole["sets"]) == (pytest.approx(1 / 3), 3)
    assert (wrong["share"], wrong["sets"]) == (0.75, 4)
    gone = replace(FAULTS[0], fault="missing action")
    part: Runs = {name: array[:, :1] for name, array in runs.items()}
    part["value"][1, 0, 1] = 5.0  # red and missed
    part["low"][3, 0, 1] = 0.5  # amber and missed
    (missing,) = found_faults(part, [gone], 1)
    assert (missing["red"], missing["share"]) == (0.5, 0.75)
    claims = outside_claims({"groups": {}, "faults": [whole, wrong], "names": ("NFIS", "auto")})
    assert [claim.words.split()[0] for claim in claims] == ["Faults", "Without"]
    assert claims[0].evidence[0].difference == pytest.approx(0.05)
    assert claims[1].evidence[0].difference == pytest.approx(0.01 - 1 / 3)


def test_a_bad_auto_is_found_out() -> None:
    """Twice the error of NFIS where the state is hidden, and intervals that miss."""
    cells = [Cell("ModelFail", "made up", True, 50, 1), Cell("ring", "made up", False, 50, 1)]
    draws = np.random.default_rng(0).normal(size=(200, 2))
    runs = made_up(np.stack([0.5 * draws, draws], axis=2), cells)
    groups = found_groups(runs, cells, ("NFIS", "auto"))
    for g in groups.values():
        g["coverage"]["DM"] = g["coverage"]["auto"]
    claims = outside_claims({"groups": groups, "faults": [], "names": ("NFIS", "auto")})
    assert [claim.verdict for claim in claims] == ["does not hold"] * 6


def test_the_array_door_knows_no_policies() -> None:
    data, target, _ = FAULTS[1].simulate(np.random.default_rng(0))
    found = evaluated(FAULTS[1], data, target)
    whole = evaluated(FAULTS[0], data, target)
    assert set(found) == {"NFIS", "auto"}
    assert found["NFIS"].value == pytest.approx(whole["NFIS"].value)
    assert found["auto"].value == pytest.approx(found["NFIS"].value)  # no q model


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="rings"):
        Outside(groups=("rings",))
    with pytest.raises(ValueError, match="problems=-1"):
        Outside(problems=-1)


def test_coverage_runs_it_too() -> None:
    assert isinstance(load_study("outside"), Outside)
    assert [study.name for study in chosen_studies("coverage", [])] == ["coverage", "outside"]
    everything = [study.name for study in chosen_studies("all", []) if study.name == "outside"]
    assert everything == ["outside"]
    assert STUDIES["outside"].also == ()
