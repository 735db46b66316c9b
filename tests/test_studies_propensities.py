"""The study `propensities` in miniature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from studies.harness.claims import FAILS, HOLDS
from studies.harness.runner import plain
from studies.harness.small_grid import grid
from studies.propensities.study import KINDS, NAMES, Propensities, forgotten


def test_a_run_takes_some_regimes() -> None:
    study = Propensities(every=len(grid(2)))
    found = study.run_once(np.random.SeedSequence(2))
    taken = np.isfinite(found["off"]).all(axis=(1, 2))
    assert taken.sum() == 1
    assert np.isin(found["holds"][taken], (0.0, 1.0)).all()
    assert np.isnan(found["holds"][~taken]).all()
    assert np.any(found["off"][taken][:, 0] != found["off"][taken][:, 1])


def test_nothing_is_left_of_the_propensities() -> None:
    data, _, _ = grid(2)[0].simulate(np.random.default_rng(0))
    assert data.has_propensities
    assert not forgotten(data).has_propensities


@pytest.mark.parametrize(("share", "verdict"), [(0.99, HOLDS), (0.8, FAILS)])
def test_claims_follow_the_coverage(share: float, verdict: str) -> None:
    rng, shape = np.random.default_rng(1), (60, len(grid(2)), len(KINDS), len(NAMES))
    holds = (rng.random(shape) < share).astype(np.float64)
    runs = {"holds": holds, "off": 0.1 * rng.standard_normal(shape), "colour": np.ones(shape)}
    study = Propensities()
    summary = plain(study.summarise(runs))
    (claim,) = study.claims(summary)
    assert claim.verdict == verdict
    part = summary["parts"]["all"]
    assert part["holds"][1][0] == pytest.approx(holds[:, :, 1, 0].mean())
    assert part["rmse"][1][2] == pytest.approx(math.sqrt(np.mean(runs["off"][:, :, 1, 2] ** 2)))
    assert part["holds"] == summary["parts"]["not red"]["holds"]
    assert "estimated" in study.table(summary)


def test_red_estimates_are_left_out_where_it_says_so() -> None:
    shape = (4, len(grid(2)), len(KINDS), len(NAMES))
    holds, colour = np.ones(shape), np.ones(shape)
    holds[:, ::2], colour[:, ::2] = 0.0, 2.0
    runs = {"holds": holds, "off": np.zeros(shape), "colour": colour}
    parts = Propensities().summarise(runs)["parts"]
    assert parts["all"]["holds"][0][0] == pytest.approx(0.5)
    assert parts["not red"]["holds"][0][0] == 1.0
