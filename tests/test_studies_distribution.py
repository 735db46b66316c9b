"""The study `distribution` in miniature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from studies.distribution.study import NUMBERS, Returns, true_returns
from studies.harness.claims import FAILS, HOLDS
from studies.harness.runner import plain
from studies.harness.small_grid import grid


def test_returns_of_the_target_average_to_its_exact_value() -> None:
    """Within 4 standard errors."""
    regime = grid(2)[2]
    returns = true_returns(regime, 4000)
    assert np.all(np.diff(returns) >= 0)
    error = returns.std() / math.sqrt(returns.size)
    assert returns.mean() == pytest.approx(regime.value(regime.target), abs=4 * error)


def test_a_run_takes_some_regimes() -> None:
    study = Returns(every=24, resamples=20, truth=2000)
    found = study.run_once(np.random.SeedSequence(0))
    taken = np.isfinite(found["band"])
    assert taken.sum() == len(grid(2)) // 24
    assert found["holds"].shape == (len(grid(2)), len(NUMBERS))
    assert np.isfinite(found["holds"][taken]).all()
    assert np.isnan(found["holds"][~taken]).all()


@pytest.mark.parametrize(("share", "verdict"), [(0.99, HOLDS), (0.85, FAILS)])
def test_claims_follow_the_coverage(share: float, verdict: str) -> None:
    rng, shape = np.random.default_rng(1), (60, len(grid(2)))
    holds = (rng.random((*shape, len(NUMBERS))) < share).astype(np.float64)
    band = (rng.random(shape) < share).astype(np.float64)
    study = Returns()
    runs = {"holds": holds, "band": band, "colour": np.zeros(shape)}
    summary = plain(study.summarise(runs), missing=math.nan)
    (covered,) = study.claims(summary)
    assert covered.verdict == verdict
    assert f"| all | {band.size} | {100 * holds[:, :, 0].mean():.1f} % |" in study.table(summary)
    assert "| red |" not in study.table(summary)
    assert study.picture(summary).axes


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="a level is between 0 and 1"):
        Returns(level=2.0)
