"""The study `duel` in miniature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ope_gym.inference.rounds import fewest_episodes
from studies.duel.simulation import KINDS, differences, duels, log_ratios, oracle, small
from studies.duel.study import APART, NAMES, NULL, Duels
from studies.duel.tails import ASSUMPTIONS, CASES, free_duels, holds, made_up
from studies.harness.claims import FAILS, HOLDS
from studies.harness.registry import load_study
from studies.harness.runner import plain
from studies.harness.study import Runs


def runs_of(*, wrong: float, part: float) -> Runs:
    """40 runs of 50 duels: 150 episodes of pairs, a part of them as a duel, and noise."""
    rng = np.random.default_rng(0)
    shape = (40, len(NAMES), len(KINDS), 50)
    episodes = np.array([150.0, 150 * part])[:, None] + rng.normal(size=shape)
    winner = np.ones(shape)
    null = [i for i, name in enumerate(NAMES) if name in NULL]
    winner[:, null] = rng.random((40, len(null), *shape[2:])) < wrong
    mean = np.where([name in NULL for name in NAMES], 0.0, 2.0) * np.ones((40, 1))
    free = (40, len(CASES), len(ASSUMPTIONS), 2, 50)
    about = {name: 150.0 + 0.0 * mean for name in ("fixed", "oracle", "floor")}
    return {
        "episodes": episodes,
        "winner": winner,
        "mean": mean,
        "free_episodes": np.ones(free),
        "free_winner": (rng.random(free) < wrong).astype(np.float64),
        **about,
    }


@pytest.mark.parametrize(
    ("wrong", "part", "verdicts"),
    [(0.02, 0.5, [HOLDS] * 4), (0.09, 1.2, [FAILS] * 4)],
)
def test_claims_hold_and_fail(wrong: float, part: float, verdicts: list[str]) -> None:
    study = Duels()
    summary = plain(study.summarise(runs_of(wrong=wrong, part=part)), missing=math.nan)
    assert [claim.verdict for claim in study.claims(summary)] == verdicts
    saved = 1 - np.exp(summary["over of pairs"][NAMES.index(APART[0])])
    assert saved == pytest.approx(1 - part, abs=0.01)
    table = study.table(summary)
    assert f"| {APART[0]} | 150 | 150 | 150 | 150 | {150 * part:.0f} |" in table
    assert f"| {CASES[2]} | symmetric (not so here) |" in table
    if wrong < 0.05:
        assert study.picture(summary).axes


def test_a_pool_stands_for_the_environment() -> None:
    """Two kinds of duels on the same episodes; single ones say the same as pairs in the mean."""
    problem = small(0.6, 2000, np.random.default_rng(1), 3)
    raw = differences(problem)
    assert raw.mean() > 0
    returns = np.stack([pool.returns() for pool in problem.pools], axis=1)
    single = (2 * np.tanh(log_ratios(problem) / 2) * (returns - 4)).mean(axis=1)
    assert abs(single.mean() - raw.mean()) < 3 * np.std(single - raw) / math.sqrt(2000)
    equals = small(0.0, 2000, np.random.default_rng(1), 3)
    raw = differences(equals)
    assert abs(raw.mean()) < 3 * raw.std() / math.sqrt(2000)
    assert np.abs(log_ratios(equals)).max() > 0.5
    found = duels(problem, 8, 150, np.random.default_rng(2))
    assert len(found) == len(KINDS)
    for outcome in found:
        assert outcome.episodes.shape == outcome.winner.shape == (8,)
        assert np.all(outcome.winner >= 0)
        assert np.all((outcome.winner != 0) | (outcome.episodes == 300))
    floor = fewest_episodes(differences(problem).mean(), 8, 0.95)
    assert floor < oracle(problem) < 2 * floor


def test_made_up_returns_have_equal_means() -> None:
    rng = np.random.default_rng(3)
    for case in range(len(CASES)):
        apart = np.diff(made_up(case, (400, 50), rng), axis=-1)
        assert abs(apart.mean()) < 4 * apart.std() / math.sqrt(apart.size)
    found = free_duels(2, "deviation", 1.2, 10, 150, rng)
    assert np.all(found.winner == 1)
    assert holds(0, "symmetric")
    assert not holds(1, "deviation")


def test_settings_are_checked() -> None:
    assert isinstance(load_study("duel"), Duels)
    with pytest.raises(ValueError, match="at least 1"):
        Duels(duels=0)
