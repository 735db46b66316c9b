"""The study of the lemmas: its claims and its two counterexamples."""

from __future__ import annotations

import numpy as np
import pytest

from studies.harness.claims import FAILS, HOLDS
from studies.harness.seeds import seeds_of
from studies.harness.study import Summary
from studies.lemmas.problems import EXAMPLE, UNDONE, closed_forms, random_steps, step_variances
from studies.lemmas.study import Lemmas


@pytest.fixture(scope="module")
def small_lemmas() -> tuple[Lemmas, Summary]:
    study = Lemmas()
    return study, study.summarise(study.run(seeds_of(0, (0, 60))))


def test_claims_of_the_lemmas(small_lemmas: tuple[Lemmas, Summary]) -> None:
    study, summary = small_lemmas
    verdicts = [claim.verdict for claim in study.claims(summary)]
    assert verdicts == [HOLDS, FAILS, HOLDS, FAILS, HOLDS, FAILS, FAILS]
    assert max(summary["gap"]) < 1e-9
    assert summary["dominated"] == summary["problems"] == 60
    assert [row["above"] for row in list(summary["multi_step"].values())[1:]] == [0, 0]


def test_the_optimal_unbiased_estimator_is_not_optimal() -> None:
    np.testing.assert_allclose(closed_forms(EXAMPLE), [4 / 9, 0.0771, 0.16, 0.0], atol=5e-5)


def test_fused_weights_can_be_noisier_than_basic_ones_over_two_steps() -> None:
    np.testing.assert_allclose(step_variances(*UNDONE), [1 / 3, 157 / 441])


def test_rewards_of_random_steps_depend_on_the_prefix_alone() -> None:
    for seed in range(5):  # else "only the last" and "one sign" would be no theorem
        bis, fis = random_steps(np.random.default_rng(seed))[1:].T
        assert (fis <= bis).all()
