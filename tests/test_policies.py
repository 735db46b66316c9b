"""The policy protocol, the closed-form snapshots and their registry."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym.policies import (
    POLICY_KINDS,
    DiagonalGaussian,
    EpsilonGreedyTable,
    FinitePolicy,
    LinearSigmoid,
    Policy,
    SoftmaxLinear,
    UnavailablePolicy,
    Uniform,
    log_prob_moments,
    numerics,
    policy_from_arrays,
    policy_to_arrays,
    register_policy,
    resolve_policy,
)

Array = NDArray[Any]


def make_linear(seed: int) -> LinearSigmoid:
    rng = np.random.default_rng(seed)
    return LinearSigmoid(rng.normal(size=3), rng.normal())


def make_softmax(seed: int, n_actions: int = 4) -> SoftmaxLinear:
    rng = np.random.default_rng(seed)
    return SoftmaxLinear(rng.normal(size=(n_actions, 3)), rng.normal(size=n_actions))


def make_pair(seed: int) -> SoftmaxLinear:
    return make_softmax(seed, n_actions=2)


def make_table(seed: int) -> EpsilonGreedyTable:
    rng = np.random.default_rng(seed)
    return EpsilonGreedyTable(rng.integers(0, 3, (5, 4)), rng.uniform(0.05, 0.9), 3)


def make_uniform(seed: int) -> Uniform:
    return Uniform(2 + seed)


def make_gaussian(seed: int) -> DiagonalGaussian:
    rng = np.random.default_rng(seed)
    return DiagonalGaussian(rng.normal(size=(2, 3)), rng.normal(size=2), rng.normal(size=2))


FINITE: dict[str, Callable[[int], FinitePolicy]] = {
    "linear": make_linear,
    "softmax": make_softmax,
    "pair": make_pair,
    "table": make_table,
    "uniform": make_uniform,
}
ALL: dict[str, Callable[[int], Any]] = {**FINITE, "gaussian": make_gaussian}


def observe(policy: Policy, n: int, seed: int = 7) -> Any:
    rng = np.random.default_rng(seed)
    if isinstance(policy, EpsilonGreedyTable):
        return rng.integers(0, 5, n), rng.integers(0, 4, n)
    return rng.normal(size=(n, 3))


# Hand-computed values ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5000], ids=["plain", "compiled"])
def test_linear_sigmoid_is_stable_at_any_score(n: int) -> None:
    policy = LinearSigmoid(np.array([1.0]))
    scores = np.array([1000.0, -1000.0, 50.0, -50.0, 1e300, -1e300, 0.0])
    got = policy.log_prob(np.repeat(scores, n)[:, None], np.ones(7 * n, dtype=np.int64))
    small = -np.exp(-50.0)
    expected = [0.0, -1000.0, small, -50.0, 0.0, -1e300, -np.log(2.0)]
    np.testing.assert_allclose(got, np.repeat(expected, n), rtol=1e-14, atol=1e-300)


def test_one_feature_needs_no_axis() -> None:
    policy, x = LinearSigmoid(np.array([2.0])), np.array([0.0, 1.0])
    np.testing.assert_array_equal(policy.probs(x), policy.probs(x[:, None]))


def test_large_stacks_agree_with_the_plain_formula() -> None:
    scores = np.concatenate([np.linspace(-45, 45, 200_001), np.linspace(-1, 1, 10_001)])
    got = LinearSigmoid(np.array([1.0])).log_prob(scores[:, None], np.ones(len(scores), np.int8))
    np.testing.assert_allclose(got, numerics.log_sigmoid(scores), rtol=1e-14, atol=0)


def test_numbers_that_are_not_finite_stay_where_they_are() -> None:
    """A large batch takes the compiled kernel, whose polynomial must not hide a NaN."""
    x = np.zeros(10_000)
    x[[3, 5_000, 9_000]] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        got = LinearSigmoid(np.array([1.0])).log_prob(x[:, None], np.ones(len(x), np.int8))
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(got)), [3])
    np.testing.assert_allclose(got[[0, 5_000, 9_000]], [-np.log(2.0), 0.0, -np.inf], atol=1e-15)


def test_softmax_is_stable_for_large_scores() -> None:
    policy = SoftmaxLinear(np.array([[1000.0], [0.0], [-1000.0]]))
    logs = policy.log_prob(np.ones((3, 1)), np.arange(3))
    np.testing.assert_array_equal(logs, [0.0, -1000.0, -2000.0])


def test_two_action_softmax_is_the_sigmoid_of_the_difference() -> None:
    rng = np.random.default_rng(0)
    weights, bias = rng.normal(size=(2, 3)), rng.normal(size=2)
    softmax = SoftmaxLinear(weights, bias)
    sigmoid = LinearSigmoid(weights[1] - weights[0], bias[1] - bias[0])
    x, a = rng.normal(size=(50, 3)), rng.integers(0, 2, 50)
    np.testing.assert_allclose(softmax.log_prob(x, a), sigmoid.log_prob(x, a), rtol=1e-13)
    np.testing.assert_allclose(softmax.log_prob(x, a), log_of_chosen(softmax, x, a), rtol=1e-12)


def test_epsilon_greedy_reads_tuples_and_multidiscrete_alike() -> None:
    policy = make_table(3)
    parts = observe(policy, 40)
    np.testing.assert_array_equal(policy.probs(parts), policy.probs(np.stack(parts, axis=1)))
    row, column = 4, 1
    got = policy.probs((np.array([row]), np.array([column])))
    assert got.argmax() == policy.greedy[row, column]


def test_epsilon_greedy_reads_blackjack_with_a_bool() -> None:
    policy = EpsilonGreedyTable(np.zeros((32, 11, 2), dtype=int), 0.1, 2)
    hand = (np.array([20]), np.array([10]), np.array([True]))
    np.testing.assert_allclose(policy.probs(hand), [[0.95, 0.05]])


def test_from_q_breaks_ties_to_the_lowest_action() -> None:
    q = np.array([[0.0, 0.0], [1.0, 2.0], [-np.inf, -1.0], [5.0, 5.0]])
    policy = EpsilonGreedyTable.from_q(q, epsilon=0.1)
    assert policy.greedy.tolist() == [0, 1, 1, 0]
    assert policy.n_actions == 2
    assert EpsilonGreedyTable.from_q(np.zeros((4, 3, 2)), 0.0).greedy.shape == (4, 3)


def test_a_bandit_has_one_state() -> None:
    policy = EpsilonGreedyTable.from_q(np.array([0.0, 3.0, 1.0]), epsilon=0.0)
    np.testing.assert_array_equal(policy.probs(np.zeros((2, 1))), [[0, 1, 0], [0, 1, 0]])
    assert policy_from_arrays(*policy_to_arrays(policy)) == policy


def test_impossible_actions_have_log_probability_minus_infinity() -> None:
    greedy = EpsilonGreedyTable(np.array([1]), epsilon=0.0, n_actions=2)
    got = greedy.log_prob(np.array([0, 0]), np.array([0, 1]))
    np.testing.assert_array_equal(got, [-np.inf, 0.0])
    moments = log_prob_moments(greedy, np.array([0]))
    assert moments is not None
    assert (moments[0].item(), moments[1].item()) == (0.0, 0.0)


def test_gaussian_takes_scalar_actions_with_or_without_an_axis() -> None:
    policy = DiagonalGaussian(np.array([[1.0]]), np.array([0.0]), np.array([0.0]))
    x, a = np.array([[0.0], [1.0]]), np.array([0.5, 0.5])
    np.testing.assert_array_equal(policy.log_prob(x, a), policy.log_prob(x, a[:, None]))
    assert policy.sample(x, np.random.default_rng(0)).shape == (2, 1)


# Relations every policy keeps ----------------------------------------------------------------


def log_of_chosen(policy: FinitePolicy, observations: Any, actions: Array) -> Array:
    return np.asarray(np.log(policy.probs(observations))[np.arange(len(actions)), actions])


@pytest.mark.parametrize("name", FINITE)
def test_log_prob_is_the_log_of_probs(name: str) -> None:
    policy = FINITE[name](1)
    observations = observe(policy, 300)
    probs = policy.probs(observations)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-14)
    for action in range(probs.shape[1]):
        actions = np.full(300, action)
        expected = log_of_chosen(policy, observations, actions)
        got = policy.log_prob(observations, actions)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", FINITE)
def test_sample_frequencies(name: str) -> None:
    policy = FINITE[name](2)
    n = 40_000
    one = observe(policy, 1)
    rows: Any = (
        tuple(np.repeat(part, n) for part in one)
        if isinstance(one, tuple)
        else np.repeat(one, n, axis=0)
    )
    probs = policy.probs(one)[0]
    actions = policy.sample(rows, np.random.default_rng(11))
    assert actions.dtype == np.int64
    counts = np.bincount(actions, minlength=len(probs))
    standard_errors = np.sqrt(n * probs * (1 - probs))
    assert np.all(np.abs(counts - n * probs) < 4 * standard_errors)


@pytest.mark.parametrize("name", ALL)
def test_sample_is_decided_by_the_generator_alone(name: str) -> None:
    policy = ALL[name](2)
    observations = observe(policy, 50)
    first = policy.sample(observations, np.random.default_rng(5))
    state = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    again = policy.sample(observations, np.random.default_rng(5))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_sampling_never_gives_an_impossible_action() -> None:
    class Extremes:
        """A generator that draws only the ends of its range."""

        def random(self, shape: tuple[int, int]) -> Array:
            return np.resize([0.0, 1.0 - 2**-53], shape)

    thirds = np.array([[0.0, 0.1, 0.2, 0.7 - 1e-16, 0.0]] * 2)
    drawn = numerics.sample_rows(thirds, Extremes())  # type: ignore[arg-type]
    assert drawn.tolist() == [1, 3]


def test_gaussian_density_integrates_to_one() -> None:
    policy = DiagonalGaussian(np.array([[0.3]]), np.array([0.1]), np.array([-0.5]))
    grid = np.linspace(-8, 8, 4001)
    density = np.exp(policy.log_prob(np.ones((len(grid), 1)), grid[:, None]))
    assert density.sum() * (grid[1] - grid[0]) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("n_policies", [1, 3, 150])
@pytest.mark.parametrize("name", ["linear", "softmax", "pair", "table"])
def test_stack_equals_loop(name: str, n_policies: int) -> None:
    policies = [ALL[name](seed) for seed in range(n_policies)]
    n = 9_001 if n_policies == 3 else 157
    observations = observe(policies[0], n)
    actions = policies[0].sample(observations, np.random.default_rng(0))
    stacked = type(policies[0]).log_prob_stack(policies, observations, actions)
    assert stacked.shape == (n_policies, n)
    assert stacked.flags.c_contiguous
    for row, policy in zip(stacked, policies, strict=True):
        by_rows = [policy.log_prob(_slice(observations, rows), actions[rows]) for rows in HALVES]
        np.testing.assert_allclose(row, np.concatenate(by_rows), rtol=1e-12, atol=1e-12)


HALVES = (slice(0, 80), slice(80, None))


def _slice(observations: Any, rows: slice) -> Any:
    if isinstance(observations, tuple):
        return tuple(part[rows] for part in observations)
    return observations[rows]


@pytest.mark.parametrize("name", ALL)
def test_no_rows_give_no_rows(name: str) -> None:
    policy = ALL[name](1)
    observations = observe(policy, 0)
    actions = policy.sample(observations, np.random.default_rng(0))
    assert len(actions) == 0
    assert policy.log_prob(observations, actions).shape == (0,)


@pytest.mark.parametrize("name", FINITE)
def test_moments_by_enumeration(name: str) -> None:
    policy = FINITE[name](3)
    observations = observe(policy, 20)
    moments = log_prob_moments(policy, observations)
    assert moments is not None
    probs = policy.probs(observations)
    logs = np.log(probs)
    np.testing.assert_allclose(moments[0], (probs * logs).sum(axis=1), rtol=1e-12)
    second = (probs * logs**2).sum(axis=1)
    np.testing.assert_allclose(moments[1], second - moments[0] ** 2, rtol=1e-9, atol=1e-12)


def test_gaussian_moments_by_monte_carlo() -> None:
    policy = make_gaussian(5)
    n = 40_000
    x = np.repeat(observe(policy, 1), n, axis=0)
    logs = policy.log_prob(x, policy.sample(x, np.random.default_rng(1)))
    moments = log_prob_moments(policy, x)
    assert moments is not None
    mean, variance = moments[0][0], moments[1][0]
    assert abs(logs.mean() - mean) < 4 * np.sqrt(variance / n)
    # The fourth central moment of chi-square_2 / 2 is 9, so the variance has standard error √(8/n).
    assert abs(logs.var() - variance) < 4 * np.sqrt(8 / n)


def test_moments_are_none_without_a_method_or_probs() -> None:
    class Bare:
        def log_prob(self, observations: Any, actions: Any) -> Array:
            return np.zeros(len(actions))

        def sample(self, observations: Any, rng: np.random.Generator) -> Array:
            return np.zeros(len(observations))

    policy = Bare()
    assert isinstance(policy, Policy)
    assert not isinstance(policy, FinitePolicy)
    assert log_prob_moments(policy, np.zeros(2)) is None


@pytest.mark.parametrize("name", ALL)
def test_protocol(name: str) -> None:
    policy = ALL[name](0)
    assert isinstance(policy, Policy)
    assert isinstance(policy, FinitePolicy) == (name in FINITE)


# Snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_equal_by_content(name: str) -> None:
    one, same, other = ALL[name](1), ALL[name](1), ALL[name](2)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert len({one, same, other}) == 2
    assert one != "something else"


@pytest.mark.parametrize("name", ALL)
def test_copies_are_equal_and_as_frozen(name: str) -> None:
    policy = ALL[name](1)
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin == policy
        stored = [value for value in vars(twin).values() if isinstance(value, np.ndarray)]
        assert not any(value.flags.writeable for value in stored)


def test_equality_looks_at_class_shape_and_every_field() -> None:
    assert LinearSigmoid(np.zeros(2)) != LinearSigmoid(np.zeros(3))
    assert LinearSigmoid(np.zeros(2)) != LinearSigmoid(np.zeros(2), 1.0)
    assert LinearSigmoid(np.array([0.0])) == LinearSigmoid(np.array([-0.0]))
    assert SoftmaxLinear(np.ones((2, 1))) == SoftmaxLinear(np.ones((2, 1)), np.zeros(2))
    table = np.zeros(2, dtype=np.int64)
    assert EpsilonGreedyTable(table, 0.1, 2) != EpsilonGreedyTable(table, 0.1, 3)
    assert EpsilonGreedyTable(table, 0.1, 2) == EpsilonGreedyTable(table.astype(np.int8), 0.1, 2)


def test_the_callers_array_may_change_later() -> None:
    theta, greedy = np.array([1.0, 2.0]), np.array([0, 1])
    weights, bias, log_std = np.ones((2, 1)), np.zeros(2), np.zeros(2)
    policies: list[Any] = [
        LinearSigmoid(theta),
        EpsilonGreedyTable(greedy, 0.1, 2),
        SoftmaxLinear(weights, bias),
        DiagonalGaussian(weights, bias, log_std),
    ]
    before = [{k: v.copy() for k, v in policy.arrays().items()} for policy in policies]
    for array in (theta, greedy, weights, bias, log_std):
        array += 1
    for policy, arrays in zip(policies, before, strict=True):
        for name, value in arrays.items():
            np.testing.assert_array_equal(policy.arrays()[name], value)


@pytest.mark.parametrize("name", ALL)
def test_frozen(name: str) -> None:
    policy = ALL[name](1)
    for field, value in policy.arrays().items():
        with pytest.raises(FrozenInstanceError):
            setattr(policy, field, value)
        stored = getattr(policy, field)
        if isinstance(stored, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                stored[...] = 0


# Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_round_trip_through_arrays(name: str) -> None:
    policy = ALL[name](1)
    kind, arrays = policy_to_arrays(policy)
    assert POLICY_KINDS[kind] is type(policy)
    assert all(value.dtype.kind in "fi" for value in arrays.values())
    back = policy_from_arrays(kind, arrays)
    assert back == policy
    assert repr(back) == repr(policy)


def test_an_unknown_kind_is_kept_but_cannot_act() -> None:
    arrays = {"w": np.arange(3.0)}
    policy = policy_from_arrays("from-the-future", arrays)
    arrays["w"][0] = 9.0
    assert isinstance(policy, UnavailablePolicy)
    assert isinstance(policy, Policy)
    assert not isinstance(policy, FinitePolicy)
    assert repr(policy) == "UnavailablePolicy('from-the-future': w(3,))"
    with pytest.raises(RuntimeError, match=r"'from-the-future'.*register_policy.*before load"):
        policy.log_prob(np.zeros(1), np.zeros(1))
    with pytest.raises(RuntimeError, match=r"sample of UnavailablePolicy\('from-the-future'"):
        policy.sample(np.zeros(1), np.random.default_rng(0))
    kind, kept = policy_to_arrays(policy)
    assert kind == "from-the-future"
    np.testing.assert_array_equal(kept["w"], [0.0, 1.0, 2.0])
    assert policy == policy_from_arrays(kind, kept)
    assert policy == pickle.loads(pickle.dumps(policy))
    assert log_prob_moments(policy, np.zeros(1)) is None


def test_an_unregistered_class_leaves_its_name() -> None:
    class Private(Uniform):
        pass

    kind, arrays = policy_to_arrays(Private(2))
    assert kind.startswith("unregistered:")
    assert kind.endswith("Private")
    assert arrays == {}
    first, second = policy_from_arrays(kind, arrays), policy_from_arrays(kind, arrays)
    assert first == first
    assert first != second  # nothing says that they were the same policy
    with pytest.raises(RuntimeError, match="Private was not registered when the file was written"):
        first.log_prob(np.zeros(1), np.zeros(1))


class Custom(Uniform):
    kind: ClassVar[str] = "test-custom"


def test_register_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ope_gym.policies.base.POLICY_KINDS", dict(POLICY_KINDS))
    assert register_policy(Custom) is Custom
    assert register_policy(Custom) is Custom  # a module may be imported anew
    back = policy_from_arrays(*policy_to_arrays(Custom(3)))
    assert type(back) is Custom
    assert back == Custom(3)
    assert back != Uniform(3)


def test_register_policy_refuses_names_that_clash() -> None:
    class Nameless(Uniform):
        pass

    class Thief(Uniform):
        kind: ClassVar[str] = "uniform"

    class Odd(Uniform):
        kind: ClassVar[str] = "unregistered:Odd"

    with pytest.raises(ValueError, match=r"Nameless\.kind is None"):
        register_policy(Nameless)
    with pytest.raises(ValueError, match=r"belongs to ope_gym\.policies\.closed_form\.Uniform"):
        register_policy(Thief)
    with pytest.raises(ValueError, match="does not begin with 'unregistered:'"):
        register_policy(Odd)
    assert POLICY_KINDS["uniform"] is Uniform


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        ("linear-sigmoid", {"theta": np.zeros(2)}),
        ("linear-sigmoid", {"theta": np.array([np.nan]), "bias": np.array(0.0)}),
        ("uniform", {"n_actions": np.array(2.5)}),
        ("uniform", {"n_actions": np.array([2, 3])}),
        ("epsilon-greedy-table", dict.fromkeys(("greedy", "epsilon", "n_actions"), np.array(5))),
    ],
)
def test_damaged_arrays_name_the_kind(kind: str, arrays: Mapping[str, Array]) -> None:
    with pytest.raises(ValueError, match=f"do not make a policy of kind '{kind}'"):
        policy_from_arrays(kind, arrays)


# Errors --------------------------------------------------------------------------------------

X = np.zeros((2, 3))
A = np.array([0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_linear(0).log_prob(X, np.array([0, 2])), r"actions\[1\] is 2: .* 0 … 1"),
        (lambda: make_softmax(0).log_prob(X, np.array([-1, 0])), r"actions\[0\] is -1: .* 0 … 3"),
        (lambda: Uniform(2).log_prob(X, np.array([0, 2])), r"actions\[1\] is 2"),
        (lambda: make_linear(0).log_prob(X, np.array([0.0, 1.0])), "dtype float64"),
        (lambda: make_linear(0).log_prob(X, A[:, None]), r"actions have shape \(2, 1\)"),
        (lambda: make_linear(0).log_prob(X[:, :2], A), r"shape \(2, 2\): .* \(n, 3\)"),
        (lambda: make_linear(0).probs(X[0]), r"shape \(3,\): .* \(n, 3\)"),
        (lambda: make_softmax(0).probs((X, X)), "observations are a tuple: .*Flatten"),
        (lambda: make_gaussian(0).log_prob(X, X), r"actions have shape \(2, 3\): .*\(2, 2\)"),
        (lambda: make_linear(0).sample(X * np.nan, np.random.default_rng(0)), "row 0 are nan"),
        (lambda: make_softmax(0).sample(X * np.nan, np.random.default_rng(0)), "row 0 are nan"),
        (lambda: make_table(0).probs((A, np.array([0, 4]))), r"observations\[1\]\[1\] is 4"),
        (lambda: make_table(0).probs(A), r"1 parts of shapes .* needs 2 of shape \(n,\)"),
        (lambda: make_table(0).probs((A * 1.0, A)), "a table needs integers"),
        (lambda: LinearSigmoid(np.array([0.0, np.nan])), r"theta\[1\] is nan"),
        (lambda: LinearSigmoid(np.zeros((1, 2))), r"theta has shape \(1, 2\): give it 1 axes"),
        (lambda: LinearSigmoid(np.zeros(1), np.inf), "bias is inf"),
        (lambda: SoftmaxLinear(np.zeros((2, 2)), np.zeros(3)), r"weights \(2, 2\) and bias \(3,\)"),
        (lambda: SoftmaxLinear(np.zeros((0, 2))), "at least one action"),
        (lambda: SoftmaxLinear(np.array([[0.0], [np.inf]])), r"weights\[1, 0\] is inf"),
        (lambda: EpsilonGreedyTable(np.array([0, 2]), 0.1, 2), r"greedy\[1\] is 2"),
        (lambda: EpsilonGreedyTable(np.array([[0, 0], [0, 5]]), 0.1, 2), r"greedy\[1, 1\] is 5"),
        (lambda: EpsilonGreedyTable(np.array([0]), 1.5, 2), "epsilon is 1.5"),
        (lambda: EpsilonGreedyTable(np.array([0]), float("nan"), 2), "epsilon is nan"),
        (lambda: EpsilonGreedyTable(np.array([0.0, 1.0]), 0.1, 2), "float64"),
        (lambda: EpsilonGreedyTable.from_q(np.array([[0.0, np.nan]]), 0.1), "NaN"),
        (lambda: Uniform(0), "n_actions is 0"),
        (lambda: DiagonalGaussian(np.zeros((1, 2)), np.zeros(2), np.zeros(1)), r"bias \(2,\)"),
        (lambda: LinearSigmoid.log_prob_stack([], X, A), "one or more"),
        (
            lambda: LinearSigmoid.log_prob_stack(
                [LinearSigmoid(np.zeros(3)), LinearSigmoid(np.zeros(2))], X, A
            ),
            r"theta of shapes \[\(2,\), \(3,\)\]",
        ),
    ],
)
def test_errors_name_the_argument_and_the_value(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_target_is_a_policy_a_number_or_the_last() -> None:
    policies: list[Policy] = [Uniform(2), UnavailablePolicy("gone", {}), Uniform(3)]
    assert resolve_policy(policies, "last") is policies[2]
    assert resolve_policy(policies, np.int64(0)) is policies[0]
    assert resolve_policy(policies, policies[0]) is policies[0]
    for target in (3, -1, "first"):
        with pytest.raises(ValueError, match=rf"whom is {target!r}; .* \(0 to 2\), 'last' or"):
            resolve_policy(policies, target, "whom")
    with pytest.raises(ValueError, match=r"policy 1 cannot be asked .* Import the module"):
        resolve_policy(policies, 1)
    with pytest.raises(TypeError, match="target is True, which has no log_prob"):
        resolve_policy(policies, True)
    with pytest.raises(ValueError, match="none is recorded"):
        resolve_policy([], "last")
