"""The study `duel` in miniature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from studies.duel.simulation import differences, duels, small
from studies.duel.study import HEALTHY, NAMES, NULL, Duels, equal, turned
from studies.harness.claims import FAILS, HOLDS
from studies.harness.registry import load_study
from studies.harness.runner import plain
from studies.harness.study import Runs


def made_up(*, wrong: float, part: float) -> Runs:
    """40 runs of 50 duels: 100 rounds without data, a part of it with, up to a little noise."""
    rng = np.random.default_rng(0)
    shape = (40, len(NAMES), 2, 50)
    rounds = np.full(shape, 100.0) + rng.normal(size=shape)
    rounds[:, :, 1] *= part
    winner = np.ones(shape)
    null = [i for i, name in enumerate(NAMES) if name in NULL]
    winner[:, null] = rng.random((40, len(null), 2, 50)) < wrong
    mean = np.where([name in NULL for name in NAMES], 0.0, 2.0) * np.ones((40, 1))
    return {"rounds": rounds, "winner": winner, "mean": mean, "deviation": 10.0 + 0.0 * mean}


@pytest.mark.parametrize(
    ("wrong", "part", "verdicts"),
    [(0.02, 0.5, [HOLDS] * 5), (0.09, 1.2, [FAILS] * 4 + [HOLDS])],
)
def test_claims_hold_and_fail(wrong: float, part: float, verdicts: list[str]) -> None:
    study = Duels()
    summary = plain(study.summarise(made_up(wrong=wrong, part=part)), missing=math.nan)
    assert [claim.verdict for claim in study.claims(summary)] == verdicts
    saved = 1 - np.exp(summary["log"][NAMES.index(HEALTHY[0])])
    assert saved == pytest.approx(1 - part, abs=0.01)
    fixed = (1.959964 + 1.281552) ** 2 * 25
    assert summary["fixed"][0] == pytest.approx(fixed)
    table = study.table(summary)
    assert f"| {HEALTHY[0]} | {fixed:.0f} | 100 | {100 * part:.0f} |" in table
    assert study.picture(summary).axes


def test_a_pool_stands_for_the_environment() -> None:
    """With and without recorded episodes, on the same rounds; equal policies differ by 0."""
    problem = small("similar", 0.6, 200, np.random.default_rng(1), 3)
    same = equal(problem)
    assert differences(same).mean() == pytest.approx(0.0, abs=1e-12)
    assert differences(problem).mean() > 0
    other = turned(problem)
    assert other.data.rewards == pytest.approx(1 - problem.data.rewards)
    assert other.pools is problem.pools
    found = duels(problem, 8, 150, np.random.default_rng(2))
    assert set(found) == {"without", "with"}
    for outcome in found.values():
        assert outcome.rounds.shape == outcome.winner.shape == (8,)
        assert np.all(outcome.winner >= 0)
        assert np.all((outcome.winner != 0) | (outcome.rounds == 150))


def test_settings_are_checked() -> None:
    assert isinstance(load_study("duel"), Duels)
    with pytest.raises(ValueError, match="at least 1"):
        Duels(duels=0)
