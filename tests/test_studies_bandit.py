"""The study of the bandit: its exact moments, its simulation and its claims."""

from __future__ import annotations

import math

import numpy as np
import pytest

from studies import oracle
from studies.bandit import integrals
from studies.bandit.exact import exact_moments
from studies.bandit.simulation import Problem, estimates, library, tally
from studies.bandit.study import Bandit
from studies.harness.claims import FAILS, HOLDS, UNDECIDED
from studies.harness.seeds import seeds_of
from studies.harness.study import Summary


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("seed", range(3))
def test_integrals_are_the_sums_over_all_counts(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy, target = rng.dirichlet(np.ones(3), size=2)
    given = (policy, n, target, rng.normal(size=3), rng.exponential(size=3))
    _, _, _, mean, variance = given
    for integral, weights in [
        (integrals.moments_nis, lambda k: oracle.weights_nis(k, policy, target)),
        (integrals.moments_optimal, lambda k: oracle.optimal_weights(k, mean, variance, target)),
    ]:
        found, summed = integral(*given), oracle.moments_by_enumeration(weights, *given)
        for part in ("bias", "internal", "path"):
            assert getattr(found, part) == pytest.approx(getattr(summed, part), rel=1e-9, abs=1e-11)


def test_weight_given_a_count_is_the_mean_over_paths() -> None:
    rng = np.random.default_rng(0)
    policy, target = rng.dirichlet(np.ones(4), size=2)
    others = np.delete(policy, 2) / (1 - policy[2])
    counts = np.insert(rng.multinomial(7, others, size=20_000), 2, 3, axis=1)
    seen = np.array([oracle.weights_nis(k, policy, target)[2] for k in counts])
    mean, deviation = integrals.weight_nis_given_count(policy, 10, target, 2, 3)
    assert abs(seen.mean() - mean) < 4 * deviation / math.sqrt(seen.size)
    assert seen.std() == pytest.approx(deviation, rel=0.05)


def test_a_ratio_that_can_be_undefined_is_refused() -> None:
    with pytest.raises(ValueError, match="and no others"):
        integrals.moments_nis(np.array([0.5, 0.5]), 3, np.array([1.0, 0.0]), *np.ones((2, 2)))


@pytest.fixture(scope="module")
def small_bandit() -> tuple[Bandit, Summary]:
    study = Bandit(sizes=(50, 200), probabilities=(0.01, 0.4, 0.97, 1.0))
    return study, study.summarise(study.run(seeds_of(0, (0, 4000))))


def test_bandit_is_that_of_the_paper() -> None:
    problem = Problem(20)
    assert problem.policy.sum() == pytest.approx(1.0)
    assert problem.target.sum() == pytest.approx(1.0)
    assert problem.scale[19] == 0.0
    assert (problem.scale[:9] == problem.scale[18:9:-1]).all()


def test_vectorised_estimates_are_those_of_the_library() -> None:
    study = Bandit(sizes=(5, 40), probabilities=(0.2, 1.0))
    problem, rng = Problem(20), np.random.default_rng(0)
    actions, luck = rng.choice(20, p=problem.policy, size=(6, 40)), rng.random((6, 40))
    sizes, grid = np.array(study.sizes), np.array(study.probabilities)
    counts, wins = tally(actions, luck, sizes, grid, 20)
    values = estimates(problem, sizes, grid, counts, wins)
    for r, i, j in np.ndindex(6, 2, 2):
        rewards = problem.scale[actions[r]] * (luck[r] < grid[j]) / np.sqrt(grid[j])
        n = sizes[i]
        one = library(problem, float(grid[j]), actions[r, :n], rewards[:n])
        np.testing.assert_allclose(values[r, :, i, j], one, rtol=1e-12, atol=1e-14)


def test_claims_of_the_bandit(small_bandit: tuple[Bandit, Summary]) -> None:
    study, summary = small_bandit
    verdicts = [(claim.source, claim.verdict) for claim in study.claims(summary)[:-1]]
    assert verdicts == [
        ("section 2.2, i", HOLDS),
        ("section 2.2, i", HOLDS),
        ("our extension", FAILS),
        ("section 2.2, ii", HOLDS),
        ("section 2.2.1 and introduction", FAILS),
        ("section 2.2, iii", HOLDS),
        ("our extension", FAILS),
        ("section 2.2", HOLDS),
        ("our extension", FAILS),
        ("table 1", HOLDS),
    ]
    check = {evidence.where: evidence.verdict for evidence in study.claims(summary)[-1].evidence}
    assert FAILS not in check.values()
    assert check["MSE of BIS"] == check["V_int of BIS, NIS, EA"] == HOLDS


def test_the_library_checks_at_least_the_first_run() -> None:
    study = Bandit(sizes=(20,), probabilities=(0.5, 1.0))
    first, later = (study.summarise(study.run(seeds_of(0, (i, i + 1)))) for i in (0, 1))
    assert first["library"][1] == 1
    assert first["library"][0] < 1e-9
    assert later["library"][1] == 0
    assert study.claims(later)[-1].evidence[-1].verdict == UNDECIDED


def test_curves_cross_where_the_exact_errors_are_equal(
    small_bandit: tuple[Bandit, Summary],
) -> None:
    p = small_bandit[1]["crossings"]["EA, NIS"][0]
    bias, internal, path = exact_moments(Problem(20), np.array([50]), np.array([p]))
    mse = (bias**2 + internal + path)[:, 0, 0]
    assert mse[1] == pytest.approx(mse[2], rel=1e-9)
