"""Control variates on the mixture: known means, exact enumeration, plain loops."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym.estimators.control_variates import (
    Controlled,
    control_variates,
    mixture_ratios,
)
from ope_gym.estimators.run import sum_arrays
from ope_gym.inference.errors import standard_error
from ope_gym.weights.formula import log_weights, path_log_probs
from studies import oracle
from tests import builders, reference, small_mdps
from tests.reference import Data

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class Blocks:
    """Log-probabilities that come only in blocks."""

    def __init__(self, table: Array) -> None:
        self.table, self.asked = table, 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.table.shape[0], self.table.shape[1]

    def block(self, start: int, stop: int) -> Array:
        self.asked += 1
        return np.ascontiguousarray(self.table[:, start:stop])


def parts_of(data: Data, gamma: float = 0.9) -> tuple[Array, Array, Array]:
    """Terms of FIS, ratios of the behaviours, last log weights."""
    log_w = log_weights(*data[:3], data.offsets, ["fused"])["fused"]
    psi = sum_arrays(log_w, data.rewards, data.offsets, gamma).psi
    counts = np.bincount(data.behaviour_ids, minlength=len(data.behaviour_log_probs))
    ratios = mixture_ratios(path_log_probs(data.behaviour_log_probs, data.offsets), counts)
    return psi, ratios, log_w[data.offsets[1:] - 1]


# --- the controls -----------------------------------------------------------------------------


def test_path_log_probs_in_blocks_are_the_sums_of_plain_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = builders.recorded(0, (5, 3, 8), horizon=9).arrays
    want = [
        [reference.prefix_sums(row)[-1] for row in reference.rows(column, data.offsets)]
        for column in data.behaviour_log_probs
    ]
    monkeypatch.setattr("ope_gym.weights.formula._BLOCK", 30)
    source = Blocks(data.behaviour_log_probs)
    np.testing.assert_allclose(path_log_probs(source, data.offsets), np.transpose(want), rtol=1e-13)
    assert source.asked > 3
    again = path_log_probs(data.behaviour_log_probs, data.offsets)
    np.testing.assert_allclose(again, np.transpose(want), rtol=1e-13)


def test_ratios_by_hand_and_beyond_the_range_of_floats() -> None:
    log_last = np.log([[0.9, 0.5, 0.1], [0.1, 0.5, 0.2]])
    counts = np.array([1, 3, 0])  # the last behaviour has no episode: no control
    want = np.array([[0.9, 0.5], [0.1, 0.5]]) / [[0.6], [0.4]]
    np.testing.assert_allclose(mixture_ratios(log_last, counts), want, rtol=1e-13)
    np.testing.assert_allclose(mixture_ratios(log_last - 2000.0, counts), want, rtol=1e-12)
    np.testing.assert_allclose(want @ [0.25, 0.75], 1.0)
    with pytest.raises(ValueError, match="episode 1: no behaviour could"):
        mixture_ratios(np.array([[0.0], [-np.inf]]), np.array([2]))
    with pytest.raises(ValueError, match="no behaviour has an episode"):
        mixture_ratios(log_last, np.zeros(3, dtype=np.int64))


@pytest.mark.parametrize("counts", [(2, 1), (4, 1, 2)])
def test_every_control_has_mean_one_and_a_fixed_beta_no_bias(counts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    mdp = small_mdps.random_mdp(rng, horizon=3)
    behaviours = [small_mdps.random_policy(rng, mdp, peak=0.7) for _ in counts]
    behaviours[0] = np.array([[1.0, 0.0], [0.5, 0.5]])  # never takes action 1 in state 0
    target = small_mdps.random_policy(rng, mdp)
    population = small_mdps.population(mdp, target, behaviours, counts)
    psi, ratios, log_last = parts_of(population.data)
    controls = np.column_stack([ratios, np.exp(log_last)])
    for column in controls.T:
        assert population.moments(column)[0] == pytest.approx(1.0, abs=1e-12)
    beta = rng.normal(size=controls.shape[1])
    mean, _ = population.moments(psi - (controls - 1.0) @ beta)
    assert mean == pytest.approx(small_mdps.value(mdp, target, 0.9), abs=1e-12)


# --- the regression ---------------------------------------------------------------------------


def slow_slope(psi: Array, controls: Array, ids: Sequence[int]) -> Array:
    """Normal equations of least squares inside behaviours, each weighted by n_k / (n_k - 1)."""
    n, p = controls.shape
    matrix, right = np.zeros((p, p)), np.zeros(p)
    for k in sorted(set(ids)):
        own = [i for i in range(n) if ids[i] == k]
        middle = [math.fsum(controls[i, a] for i in own) / len(own) for a in range(p)]
        mean = math.fsum(psi[i] for i in own) / len(own)
        factor = len(own) / (len(own) - 1)
        for i in own:
            for a in range(p):
                right[a] += factor * (controls[i, a] - middle[a]) * (psi[i] - mean)
                for b in range(p):
                    matrix[a, b] += (
                        factor * (controls[i, a] - middle[a]) * (controls[i, b] - middle[b])
                    )
    return np.asarray(np.linalg.solve(matrix, right))


@pytest.mark.parametrize("seed", range(3))
def test_the_value_is_that_of_plain_normal_equations(seed: int) -> None:
    data = builders.recorded(seed, (9, 14, 11), horizon=4).arrays
    psi, ratios, log_last = parts_of(data)
    got = control_variates(psi, ratios, log_last, data.behaviour_ids)
    free = np.column_stack([ratios[:, :2], np.exp(log_last)])  # the third follows from the others
    ids = data.behaviour_ids.tolist()
    slope = slow_slope(psi, free, ids)
    terms = psi - (free - 1.0) @ slope
    assert got.value == pytest.approx(math.fsum(terms) / psi.size, rel=1e-9)
    assert got.rank == 3
    assert got.plain == pytest.approx(math.fsum(psi) / psi.size)
    # 34 episodes less 3 means leave 31 degrees of freedom, and beta has used 3
    error = reference.standard_error(terms.tolist(), ids) * math.sqrt(31 / 28)
    assert standard_error(got.influence, data.behaviour_ids) == pytest.approx(error, rel=1e-8)
    assert got.influence.mean() == pytest.approx(got.value, rel=1e-12)
    before = reference.standard_error(psi.tolist(), ids)
    assert got.variance_ratio == pytest.approx((error / before) ** 2, rel=1e-8)
    np.testing.assert_allclose(got.means, [*ratios.mean(axis=0), np.exp(log_last).mean()])
    without = control_variates(psi, ratios, None, data.behaviour_ids)
    slope = slow_slope(psi, ratios[:, :2], ids)
    want = math.fsum(psi - (ratios[:, :2] - 1.0) @ slope) / psi.size
    assert without.value == pytest.approx(want, rel=1e-9)
    assert without.coefficients.size == 3


def test_an_episode_that_says_nothing_about_beta_leaves_fis() -> None:
    psi, ones = np.array([1.0, 2.0, 4.0]), np.ones((3, 1))
    for ids in ([0, 0, 0], [0, 1, 2]):
        got = control_variates(psi, ones, None, np.array(ids))
        assert got.value == pytest.approx(7 / 3)
        assert got.rank == 0
        assert got.variance_ratio == 1.0
        np.testing.assert_array_equal(got.influence, psi)


def test_at_most_a_quarter_of_the_degrees_of_freedom_are_spent() -> None:
    rng = np.random.default_rng(2)
    ids = np.repeat(np.arange(10), 3)
    ratios = rng.lognormal(size=(30, 10))
    got = control_variates(rng.normal(size=30), ratios, None, ids)
    assert got.rank == 5  # of 20


def test_weights_beyond_floats_are_nan() -> None:
    got = control_variates(
        np.ones(4), np.ones((4, 1)), np.array([0.0, 0, 0, 800]), np.zeros(4, int)
    )
    assert math.isnan(got.value)
    assert np.isnan(got.influence).all()


# --- exact enumeration of one-step problems ---------------------------------------------------


def bandit_data_sets(policies: Array, sizes: Sequence[int]) -> Iterator[tuple[Ints, Ints, float]]:
    """Actions, behaviours and probability of every data set, up to the order of its draws."""
    tables = []
    for row, size in zip(policies, sizes, strict=True):
        table = []
        for counts in oracle.count_vectors(size, row.size):
            ways = math.factorial(size) / math.prod(math.factorial(int(c)) for c in counts)
            chance = ways * math.prod(float(p) ** int(c) for p, c in zip(row, counts, strict=True))
            table.append((np.repeat(np.arange(row.size), counts), chance))
        tables.append(table)
    ids = np.repeat(np.arange(len(sizes)), sizes)
    for drawn in itertools.product(*tables):
        actions, chances = zip(*drawn, strict=True)
        yield np.concatenate(actions), ids, math.prod(chances)


def on_bandit(
    policies: Array, target: Array, rewards: Array, actions: Ints, ids: Ints, *, aim: bool
) -> Controlled:
    counts = np.bincount(ids)
    mixture = counts / counts.sum() @ policies
    log_w = np.log(target / mixture)[actions]
    ratios = mixture_ratios(np.log(policies[:, actions]).T, counts)
    psi = np.exp(log_w) * rewards[actions]
    return control_variates(psi, ratios, log_w if aim else None, ids)


SKEWED = np.array([[0.9, 0.1], [0.5, 0.5]])


@pytest.mark.parametrize("aim", [False, True])
def test_the_example_in_which_fis_is_noisy_without_need(aim: bool) -> None:
    """Uniform target, r = 1: the value is 1 in every data set that can teach beta.

    There are none with probability .08 for 4 draws of each, .003 for 8.
    """
    half, ones = np.full(2, 0.5), np.ones(2)
    # with the coefficient of the whole population nothing varies
    mixture = SKEWED.mean(axis=0)
    psi, control = half / mixture, SKEWED[0] / mixture
    beta = (psi[0] - psi[1]) / (control[0] - control[1])
    np.testing.assert_allclose(psi - beta * (control - 1.0), 1.0, rtol=1e-14)
    assert oracle.variance_fis(SKEWED, half, ones, 0.0) == pytest.approx(0.077, abs=5e-4)
    assert oracle.variance_optimal(SKEWED, half, ones, 0.0) == pytest.approx(0.0, abs=1e-12)
    losses = []
    for size in (4, 8, 12):
        lost = square = 0.0
        for actions, ids, chance in bandit_data_sets(SKEWED, (size, size)):
            got = on_bandit(SKEWED, half, ones, actions, ids, aim=aim)
            square += chance * (got.value - 1) ** 2
            taught = any(np.ptp(actions[ids == k]) > 0 for k in (0, 1))  # somebody did both
            share = np.count_nonzero(actions) / actions.size  # expected .3
            if taught and 0.1 < share < 0.5:
                assert got.value == pytest.approx(1.0, abs=1e-12)
                assert standard_error(got.influence, ids) == pytest.approx(0.0, abs=1e-12)
            assert abs(got.value - 1) <= abs(got.plain - 1) + 1e-12
            lost += chance * (abs(got.value - 1) > 1e-12)
        losses.append(lost)
        assert square < 0.5 * oracle.variance_fis(SKEWED, half, ones, 0.0, (size, size))
    assert losses[0] < 0.1
    assert losses[2] < 0.02 * losses[0]


THREE = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])

EVEN = np.array([[0.3, 0.4, 0.3]])


@pytest.mark.parametrize(
    ("policies", "aim", "sizes"), [(THREE, False, (5, 10)), (EVEN, True, (16, 32, 64))]
)
def test_the_bias_falls_like_one_over_n_and_the_variance_is_below_that_of_fis(
    policies: Array, aim: bool, sizes: tuple[int, ...]
) -> None:
    """One control, of the two behaviours or of the target: with two of them it would be exact."""
    target, rewards = np.array([0.3, 0.2, 0.5]), np.array([1.0, -1.0, 3.0])
    truth, biases = float(target @ rewards), []
    for size in sizes:
        mean = square = plain = 0.0
        counts = (size,) * len(policies)
        for actions, ids, chance in bandit_data_sets(policies, counts):
            got = on_bandit(policies, target, rewards, actions, ids, aim=aim)
            mean += chance * (got.value - truth)
            square += chance * (got.value - truth) ** 2
            plain += chance * (got.plain - truth)
        assert plain == pytest.approx(0.0, abs=1e-12)
        biases.append(size * mean)
        fis = oracle.variance_fis(policies, target, rewards, 0.0, counts)
        assert square < fis
    assert abs(biases[-1]) > 1e-3  # there is one
    assert abs(biases[-1] / biases[-2] - 1.0) < 0.35


def test_a_large_weight_that_was_not_drawn_does_no_harm() -> None:
    """Action 2 has weight 5 and chance .1: a slope seen between .5 and .67 says nothing of it."""
    target, rewards = np.array([0.3, 0.2, 0.5]), np.array([1.0, -1.0, 3.0])
    for size in (8, 16, 32):
        square = 0.0
        for actions, ids, chance in bandit_data_sets(THREE[:1], (size,)):
            got = on_bandit(THREE[:1], target, rewards, actions, ids, aim=True)
            square += chance * (got.value - target @ rewards) ** 2
            deviation = math.sqrt(size) * reference.standard_error(
                (target / THREE[0] * rewards)[actions].tolist(), ids
            )
            assert abs(got.value - got.plain) <= deviation * math.sqrt(size / (size - 1)) + 1e-9
        assert square < 0.5 * oracle.variance_fis(THREE[:1], target, rewards, 0.0, (size,))


def test_the_standard_error_is_right_with_noise() -> None:
    """Over 400 data sets of three behaviours: mean of SE^2 against the variance of the values."""
    rng = np.random.default_rng(3)
    policies = rng.dirichlet(np.ones(6), size=3)
    target, rewards = rng.dirichlet(np.ones(6)), rng.normal(size=6)
    ids = np.repeat(np.arange(3), (20, 30, 25))
    rho = np.bincount(ids) / ids.size
    values, squares, plain = [], [], []
    for _ in range(400):
        actions = np.concatenate([rng.choice(6, 75, p=policies[k])[ids == k] for k in range(3)])
        log_w = np.log(target / (rho @ policies))[actions]
        ratios = mixture_ratios(np.log(policies[:, actions]).T, np.bincount(ids))
        psi = np.exp(log_w) * (rewards[actions] + rng.normal(size=75))
        got = control_variates(psi, ratios, log_w, ids)
        values.append(got.value)
        plain.append(got.plain)
        squares.append(standard_error(got.influence, ids) ** 2)
    variance, spread = np.var(values, ddof=1), math.sqrt(2 / 400)
    assert abs(np.mean(squares) / variance - 1) < 3.5 * spread
    assert abs(np.mean(values) - target @ rewards) < 3.5 * math.sqrt(variance / 400)
    assert variance < np.var(plain, ddof=1)
