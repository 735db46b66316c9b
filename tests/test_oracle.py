"""Each closed form of the oracle against a sum over all data sets, and the paper's misprints."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from studies import oracle

Array = NDArray[np.float64]
Draw = tuple[int, int, float]  # behaviour, action, reward
SEEDS = range(6)
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Problem:
    """Rewards r̄ ± √V with probability 1/2 each have mean r̄ and variance V and can be enumerated."""

    policies: Array
    counts: Array
    target: Array
    mean: Array
    variance: Array

    @property
    def value(self) -> float:
        return math.fsum(self.target * self.mean)

    @property
    def rewards(self) -> tuple[Array, Array, Array]:
        return self.target, self.mean, self.variance

    def exact(self, estimator: Callable[[Sequence[Draw]], float]) -> tuple[float, float]:
        """Mean and variance of the estimator over all data sets."""
        ids = [k for k, n in enumerate(self.counts) for _ in range(int(n))]
        draws = [
            [
                (float(p) / 2, (k, a, float(self.mean[a] + sign * math.sqrt(self.variance[a]))))
                for a, p in enumerate(self.policies[k])
                for sign in (-1, 1)
                if p > 0
            ]
            for k in ids
        ]
        found = [
            (math.prod(p for p, _ in data), estimator([d for _, d in data]))
            for data in itertools.product(*draws)
        ]
        centre = math.fsum(p * x for p, x in found)
        return centre, math.fsum(p * (x - centre) ** 2 for p, x in found)


def random_problem(
    seed: int, *, actions: int = 3, counts: Sequence[int] = (1, 2), variance: float = 1.0
) -> Problem:
    rng = np.random.default_rng(seed)
    return Problem(
        policies=rng.dirichlet(np.ones(actions), size=len(counts)),
        counts=np.asarray(counts, dtype=np.float64),
        target=rng.dirichlet(np.ones(actions)),
        mean=rng.normal(size=actions),
        variance=variance * rng.exponential(size=actions),
    )


def alpha_estimator(problem: Problem, alpha: Array) -> Callable[[Sequence[Draw]], float]:
    def estimator(data: Sequence[Draw]) -> float:
        return math.fsum(
            float(alpha[k, a] * problem.target[a] / problem.policies[k, a]) * r for k, a, r in data
        ) / len(data)

    return estimator


def omega_estimator(
    problem: Problem, omega: Callable[[NDArray[np.int64]], Array]
) -> Callable[[Sequence[Draw]], float]:
    def estimator(data: Sequence[Draw]) -> float:
        got: dict[int, list[float]] = {}
        for _, a, r in data:
            got.setdefault(a, []).append(r)
        counts = np.array([len(got.get(a, [])) for a in range(problem.target.size)])
        w = omega(counts)
        return math.fsum(
            float(w[a] * problem.target[a]) * math.fsum(rs) / len(rs) for a, rs in got.items()
        )

    return estimator


# --- the α family ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_variances_of_bis_fis_and_ouis_are_those_of_all_data_sets(seed: int) -> None:
    p = random_problem(seed, counts=[(4,), (1, 2), (2, 2), (1, 1, 2), (3, 1), (1, 1, 1, 1)][seed])
    for alpha, variance in [
        (np.ones_like(p.policies), oracle.variance_bis),
        (oracle.alpha_fis(p.policies, p.counts), oracle.variance_fis),
        (
            oracle.alpha_ouis(p.policies, p.counts, mean=p.mean, variance=p.variance),
            oracle.variance_ouis,
        ),
        (oracle.optimal_alpha(p.policies, *p.rewards, p.counts), oracle.variance_optimal),
    ]:
        centre, spread = p.exact(alpha_estimator(p, alpha))
        assert centre == pytest.approx(p.value, abs=TOLERANCE)
        assert oracle.bias_alpha(alpha, p.policies, p.target, p.mean, p.counts) == pytest.approx(
            0.0, abs=TOLERANCE
        )
        assert variance(p.policies, *p.rewards, p.counts) == pytest.approx(spread, rel=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_printed_closed_forms_of_bis_and_fis_hold_before_the_misprints(seed: int) -> None:
    p = random_problem(seed, actions=4, counts=(1, 1, 1))
    n, total, second = 3, p.policies.sum(axis=0), p.mean**2 + p.variance
    bis = (p.target**2 * second * (1 / p.policies).sum(axis=0)).sum() / n**2 - p.value**2 / n
    inner = (p.target * p.mean * p.policies / total).sum(axis=1)
    fis = (p.target**2 * second / total).sum() - (inner**2).sum()
    assert oracle.variance_bis(p.policies, *p.rewards) == pytest.approx(bis, rel=TOLERANCE)
    assert oracle.variance_fis(p.policies, *p.rewards) == pytest.approx(fis, rel=TOLERANCE)
    assert fis <= bis


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_support_biases_bis_but_not_fis(seed: int) -> None:
    p = random_problem(seed, counts=(2, 1))
    policies = p.policies.copy()
    policies[0] = policies[0] * [0, 1, 1] / policies[0, 1:].sum()
    p = Problem(policies, p.counts, *p.rewards)
    lost = -2 / 3 * float(p.target[0] * p.mean[0])
    ones = np.ones_like(policies)
    assert oracle.bias_alpha(ones, policies, p.target, p.mean, p.counts) == pytest.approx(lost)
    centre, spread = p.exact(alpha_estimator(p, ones))
    assert centre - p.value == pytest.approx(lost, abs=TOLERANCE)
    assert oracle.variance_bis(policies, *p.rewards, p.counts) == pytest.approx(spread)
    centre, spread = p.exact(alpha_estimator(p, oracle.alpha_fis(policies, p.counts)))
    assert centre == pytest.approx(p.value, abs=TOLERANCE)
    assert oracle.variance_fis(policies, *p.rewards, p.counts) == pytest.approx(spread)


def test_the_example_in_which_ouis_is_not_optimal() -> None:
    policies, target = [[0.9, 0.1], [0.5, 0.5]], [0.5, 0.5]
    one, zero = np.ones(2), np.zeros(2)
    assert oracle.variance_bis(policies, target, one, zero) == pytest.approx(4 / 9, abs=TOLERANCE)
    assert round(oracle.variance_bis(policies, target, one, zero), 3) == 0.444
    assert round(oracle.variance_fis(policies, target, one, zero), 3) == 0.077
    assert round(oracle.variance_ouis(policies, target, one, zero), 3) == 0.160
    assert oracle.variance_optimal(policies, target, one, zero) == pytest.approx(0, abs=1e-28)
    # With the optimal α each behaviour's term is a constant, whatever it draws.
    weights = oracle.optimal_alpha(policies, target, one, zero) * target / policies
    np.testing.assert_allclose(weights[:, 0], weights[:, 1], atol=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_feasible_step_away_from_the_optimal_alpha_reduces_the_variance(seed: int) -> None:
    p = random_problem(seed, actions=4, counts=(1, 3, 2), variance=[0.0, 1e-6, 1, 1, 5, 100][seed])
    alpha = oracle.optimal_alpha(p.policies, *p.rewards, p.counts)
    least = oracle.variance_alpha(alpha, p.policies, *p.rewards, p.counts)
    rho = p.counts / p.counts.sum()
    np.testing.assert_allclose(rho @ alpha, 1.0, rtol=1e-9)
    rng = np.random.default_rng(seed)
    for size in (1e-3, 1.0):
        for _ in range(50):
            step = rng.normal(size=alpha.shape)
            step -= rho @ step  # keeps Σ_k ρ_k α_k = 1, as Σ_k ρ_k = 1
            other = oracle.variance_alpha(alpha + size * step, p.policies, *p.rewards, p.counts)
            assert other >= least - 1e-14
    assert least <= oracle.variance_fis(p.policies, *p.rewards, p.counts) + 1e-14
    assert least <= oracle.variance_ouis(p.policies, *p.rewards, p.counts) + 1e-14


@pytest.mark.parametrize("seed", SEEDS)
def test_ouis_is_optimal_for_the_sum_of_single_action_variances_only(seed: int) -> None:
    """The paper's objective: it adds up the actions as if they were drawn independently."""
    p = random_problem(seed, actions=3, counts=(1, 1))

    def paper_objective(alpha: Array) -> float:
        a2 = alpha**2 * p.target**2
        return float((a2 * (p.mean**2 * (1 / p.policies - 1) + p.variance / p.policies)).sum() / 4)

    ouis = oracle.alpha_ouis(p.policies, mean=p.mean, variance=p.variance)
    best = oracle.optimal_alpha(p.policies, *p.rewards)
    assert paper_objective(ouis) <= paper_objective(best)
    assert oracle.variance_alpha(best, p.policies, *p.rewards) <= oracle.variance_alpha(
        ouis, p.policies, *p.rewards
    )


def test_alpha_ouis_limits() -> None:
    policies = [[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]
    certain = oracle.alpha_ouis(policies)
    np.testing.assert_allclose(certain, np.array([[1.5, 0], [0, 3], [1.5, 0]]))
    np.testing.assert_allclose(np.mean(certain, axis=0), 1.0)
    # A certain behaviour without draws takes no weight.
    np.testing.assert_allclose(oracle.alpha_ouis(policies, [0, 2, 0])[1], 1.0)
    # V → ∞ is the fused weight, and so is r̄ = V = 0.
    fused = oracle.alpha_fis(policies)
    np.testing.assert_allclose(oracle.alpha_ouis(policies, mean=0.0, variance=0.0), fused)
    np.testing.assert_allclose(oracle.alpha_ouis(policies, mean=1.0, variance=1e12), fused)


def test_optimal_alpha_names_an_uncovered_action() -> None:
    with pytest.raises(ValueError, match=r"policy takes action 1, .* probability 0\.5"):
        oracle.optimal_alpha([[1.0, 0.0]], [0.5, 0.5], [1, 1], [0, 0])
    # A behaviour without draws covers nothing; an action worth nothing needs no cover.
    with pytest.raises(ValueError, match="action 1"):
        oracle.optimal_alpha([[1, 0], [0, 1]], [0.5, 0.5], [1, 1], [0, 0], [3, 0])
    alpha = oracle.optimal_alpha([[1.0, 0.0]], [0.5, 0.5], [1, 0], [0, 0])
    np.testing.assert_allclose(alpha, [[1, 0]])
    np.testing.assert_allclose(oracle.optimal_alpha([[1.0, 0.0]], [1, 0], [0, 0], [0, 0]), [[1, 0]])


# --- the ω family ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["BIS", "NIS", "EA", "optimal"])
def test_bias_and_both_variances_are_those_of_all_data_sets(name: str, seed: int) -> None:
    p = random_problem(seed, counts=(4,))
    policy, n = p.policies[0], 4
    omega: dict[str, Callable[[NDArray[np.int64]], Array]] = {
        "BIS": lambda k: oracle.weights_bis(k, policy),
        "NIS": lambda k: oracle.weights_nis(k, policy, p.target),
        "EA": lambda k: np.ones(k.size),
        "optimal": lambda k: oracle.optimal_weights(k, p.mean, p.variance, p.target),
    }
    centre, spread = p.exact(omega_estimator(p, omega[name]))
    got = oracle.moments_by_enumeration(omega[name], policy, n, *p.rewards)
    assert got.bias == pytest.approx(centre - p.value, abs=TOLERANCE)
    assert got.variance == pytest.approx(spread, rel=TOLERANCE)
    assert got.mse == pytest.approx(spread + (centre - p.value) ** 2, rel=TOLERANCE)
    # V_path is what remains when rewards are replaced by their means.
    known = Problem(p.policies, p.counts, p.target, p.mean, np.zeros(3))
    assert got.path == pytest.approx(known.exact(omega_estimator(p, omega[name]))[1], rel=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_closed_forms_of_bis_and_ea(seed: int, n: int) -> None:
    p = random_problem(seed, actions=4, counts=(n,))
    policy = p.policies[0]
    if seed == 0:
        policy = np.array([0.0, 0.6, 0.4, 0.0])  # unreachable actions: BIS and EA lose them alike
    if seed == 1:
        policy = np.array([1.0, 0.0, 0.0, 0.0])
    for got, omega in [
        (oracle.moments_bis(policy, n, *p.rewards), lambda k: oracle.weights_bis(k, policy)),
        (oracle.moments_ea(policy, n, *p.rewards), lambda k: np.ones(k.size)),
    ]:
        want = oracle.moments_by_enumeration(omega, policy, n, *p.rewards)
        assert got.bias == pytest.approx(want.bias, abs=TOLERANCE)
        assert got.internal == pytest.approx(want.internal, abs=TOLERANCE)
        assert got.path == pytest.approx(want.path, abs=TOLERANCE)
        assert got.mse == pytest.approx(want.mse, abs=TOLERANCE)
    assert oracle.moments_bis(policy, n, *p.rewards).variance == pytest.approx(
        oracle.variance_bis(policy, *p.rewards, [n]), abs=TOLERANCE
    )


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.02, 0.5, 0.97, 1.0])
def test_mean_inverse_count(p: float, n: int) -> None:
    want = math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) / k for k in range(1, n + 1))
    assert oracle.mean_inverse_count([p], n)[0] == pytest.approx(
        want, rel=1e-7 if p < 1e-6 else TOLERANCE
    )


def test_ea_has_path_variance_and_bias_where_actions_can_be_missed() -> None:
    """The paper's V_path(EA) = 0: one action in two, one draw, r̄ = (1, 0), V = 0."""
    got = oracle.moments_ea([0.5, 0.5], 1, [1.0, 0.0], [1.0, 0.0], [0.0, 0.0])
    assert (got.bias, got.internal, got.path) == (-0.5, 0.0, 0.25)
    many = oracle.moments_ea([0.5, 0.5], 2_000, [1.0, 0.0], [1.0, 0.0], [0.0, 0.0])
    assert (many.bias, many.path) == (0.0, 0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("known", [0, 1, 2])
def test_optimal_weights_minimise_the_mse_given_the_counts(seed: int, known: int) -> None:
    p = random_problem(seed, actions=4, counts=(1,))
    variance, target = p.variance.copy(), p.target.copy()
    variance[:known] = 0.0
    if seed % 2:
        target[3] = 0.0  # drawn, but of no use
    counts = np.array([2, 1, 3, 2]) if seed < 4 else np.array([2, 0, 3, 2])
    omega = oracle.optimal_weights(counts, p.mean, variance, target)
    least = oracle.mse_given_counts(omega, counts, p.mean, variance, target)
    rng = np.random.default_rng(seed)
    for size in (1e-4, 1e-2, 1.0):
        for step in size * rng.normal(size=(50, 4)):
            other = oracle.mse_given_counts(omega + step, counts, p.mean, variance, target)
            assert other >= least - 1e-14
    usable = (counts > 0) & (target > 0)
    if known:
        assert least == pytest.approx(0.0, abs=1e-24)
    else:
        precision = (counts * p.mean**2 / variance)[usable].sum()
        want = (target * p.mean).sum() ** 2 / (1 + precision)
        assert least == pytest.approx(want, rel=TOLERANCE)


def test_optimal_weights_limits() -> None:
    target, mean = np.array([0.3, 0.7]), np.array([1.0, 2.0])
    # Every action drawn and no noise: EA, as the paper says.
    np.testing.assert_array_equal(oracle.optimal_weights([1, 5], mean, [0, 0], target), np.ones(2))
    # One known action stands in for the one that was not drawn.
    omega = oracle.optimal_weights([1, 0], mean, [0, 0], target)
    np.testing.assert_allclose(omega, [1.7 / 0.3, 0.0])
    assert oracle.mse_given_counts(omega, [1, 0], mean, [0, 0], target) == pytest.approx(0)
    # Tiny variances neither overflow nor divide by zero.
    tiny = oracle.optimal_weights([1, 5], mean, [1e-300, 1e-300], target)
    assert np.isfinite(tiny).all()
    assert oracle.mse_given_counts(tiny, [1, 5], mean, [0, 0], target) == pytest.approx(0)
    # r̄ = 0 carries nothing; a single action shrinks by r̄² / (r̄² + V / k).
    np.testing.assert_array_equal(oracle.optimal_weights([1, 1], [0, 0], [1, 0], target), [0, 1])
    np.testing.assert_allclose(oracle.optimal_weights([3], [2.0], [5.0], [1.0]), 4 / (4 + 5 / 3))


def test_nis_is_bis_at_one_end_and_ea_at_the_other() -> None:
    """Figure 1's caption has it between EA and NIS; the second end is BIS."""
    counts, policy = np.array([3, 1]), np.array([0.4, 0.6])
    bis = oracle.weights_bis(counts, policy)
    np.testing.assert_allclose(bis, [3 / 1.6, 1 / 2.4])
    # Σ_a π_e ω_BIS is 1 at this target: nothing is left to normalise.
    share = float((1 - bis[1]) / (bis[0] - bis[1]))
    np.testing.assert_allclose(oracle.weights_nis(counts, policy, [share, 1 - share]), bis)
    np.testing.assert_allclose(oracle.weights_nis(counts, policy, [1.0, 0.0])[0], 1.0)
    assert np.isnan(oracle.weights_nis([0, 4], policy, [1.0, 0.0])).all()


# --- the paper's misprints ------------------------------------------------------------------


def test_each_misprint_of_the_difference_of_variances_is_wrong() -> None:
    p = Problem(
        policies=np.array([[0.6, 0.4], [0.3, 0.7]]),
        counts=np.array([1.0, 1.0]),
        target=np.array([0.5, 0.5]),
        mean=np.array([2.0, 0.5]),
        variance=np.array([0.3, 0.6]),
    )
    total, n = p.policies.sum(axis=0), 2
    truth = p.exact(alpha_estimator(p, np.ones_like(p.policies)))[1]
    truth -= p.exact(alpha_estimator(p, oracle.alpha_fis(p.policies)))[1]

    def difference(bis_mean: Array, j_square: float, fis_mean: Array) -> float:
        bis = p.target**2 * (bis_mean + p.variance) * (1 / p.policies).sum(axis=0) / n**2
        fis = p.target**2 * (p.mean**2 + p.variance) / total
        inner = (p.target * fis_mean * p.policies / total).sum(axis=1)
        return float(bis.sum() - j_square - fis.sum() + (inner**2).sum())

    right = p.value**2 / n
    assert difference(p.mean**2, right, p.mean) == pytest.approx(truth, rel=1e-10)
    assert difference(p.mean, right, p.mean) != pytest.approx(truth, rel=0.1)
    assert difference(p.mean**2, n * right, p.mean) != pytest.approx(truth, rel=0.1)
    assert difference(p.mean**2, right, p.mean**2) != pytest.approx(truth, rel=0.1)


def test_the_lemma_on_harmonic_means_has_no_factor_in_its_identity() -> None:
    a = np.array([0.2, 0.5, 0.9])
    product, double = (1 / a).sum() * a.sum(), np.divide.outer(a, a).sum()
    assert product == pytest.approx(double)
    assert product != pytest.approx(double / 9)
    assert product >= 9


def test_optimal_weights_need_the_target_in_their_sum() -> None:
    behaviour, target = np.array([0.9, 0.1]), np.array([0.2, 0.8])
    counts, mean, variance = np.array([9, 1]), np.array([1.0, 3.0]), np.array([0.5, 2.0])
    right = oracle.optimal_weights(counts, mean, variance, target)
    printed = right * (behaviour @ mean) / (target @ mean)
    assert oracle.mse_given_counts(printed, counts, mean, variance, target) > (
        5 * oracle.mse_given_counts(right, counts, mean, variance, target)
    )


def test_the_family_has_one_convention() -> None:
    """Section 3.1's α (sum N, factor 1/N) and 3.2's (sum 1) differ by N; mixed, they are biased."""
    policies = np.array([[0.9, 0.1], [0.5, 0.5]])
    fused = oracle.alpha_fis(policies)
    np.testing.assert_allclose(fused.sum(axis=0), 2.0)
    mixed = oracle.bias_alpha(fused / 2, policies, [0.5, 0.5], [1, 1])
    assert mixed == pytest.approx(-0.5)


def test_ea_underestimates_when_the_policy_stops_at_the_first_zero() -> None:
    series = math.fsum(0.5 ** (k + 1) * k / (k + 1) for k in range(1_100))
    assert series == pytest.approx(1 - math.log(2), abs=1e-15)
    assert oracle.mean_ea_stopped_at_zero() == pytest.approx(series, abs=1e-15)
    assert series - 0.5 == pytest.approx(0.5 - math.log(2), abs=1e-15)  # negative, not log 2 − 1/2
    assert series < 0.5
    general = math.fsum(0.8**k * 0.2 * k / (k + 1) for k in range(1_000))
    assert oracle.mean_ea_stopped_at_zero(0.8) == pytest.approx(general, abs=1e-14)
