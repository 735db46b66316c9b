"""Torch modules as frozen policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributions import (
    Beta,
    Categorical,
    Distribution,
    Independent,
    Normal,
    TransformedDistribution,
)
from torch.distributions.transforms import TanhTransform

from ope_gym import Compute, Trajectories, evaluate
from ope_gym.policies import (
    DiagonalGaussian,
    FinitePolicy,
    Policy,
    SoftmaxLinear,
    UnavailablePolicy,
    log_prob_moments,
    policy_from_arrays,
    policy_to_arrays,
)
from ope_gym.policies import torch as torch_policy
from ope_gym.policies.torch import TorchPolicy

Array = NDArray[Any]


def mlp(outputs: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


class Head(nn.Module):
    """A linear layer whose output a function turns into a distribution."""

    def __init__(self, outputs: int, head: Callable[[torch.Tensor], Distribution]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, outputs)
        self.head = head

    def forward(self, x: torch.Tensor) -> Distribution:
        return self.head(self.layer(x))


def categorical(out: torch.Tensor) -> Distribution:
    return Categorical(logits=out)


def from_probs(out: torch.Tensor) -> Distribution:
    masked = torch.softmax(out, dim=1) * torch.tensor([1.0, 1.0, 0.0])
    return Categorical(probs=masked)


def normal(out: torch.Tensor) -> Distribution:
    return Normal(out, torch.tensor([0.5, 2.0]))


def independent(out: torch.Tensor) -> Distribution:
    return Independent(Normal(out, torch.tensor([0.5, 2.0])), 1)


def beta(out: torch.Tensor) -> Distribution:
    return Independent(Beta(1 + out.exp(), 1 + out.exp()), 1)


def squashed(out: torch.Tensor) -> Distribution:
    return Independent(TransformedDistribution(Normal(out, 1.0), TanhTransform()), 1)


def several_choices(out: torch.Tensor) -> Distribution:
    return Categorical(logits=out.reshape(-1, 2, 3))


def observations(n: int = 20, seed: int = 3) -> Array:
    return np.random.default_rng(seed).normal(size=(n, 4)).astype(np.float32)


def as_gaussian(module: Head) -> DiagonalGaussian:
    weights = module.layer.weight.detach().double().numpy()
    bias = module.layer.bias.detach().double().numpy()
    return DiagonalGaussian(weights, bias, np.log([0.5, 2.0]))


# Values --------------------------------------------------------------------------------------


def test_logits_are_a_softmax_in_float64() -> None:
    layer = nn.Linear(4, 3)
    twin = SoftmaxLinear(layer.weight.detach().numpy(), layer.bias.detach().numpy())
    policy, x, a = TorchPolicy(layer), observations(), np.arange(20) % 3
    got = policy.log_prob(x, a)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, twin.log_prob(x, a), atol=1e-6)  # the layer is float32
    np.testing.assert_allclose(policy.probs(x).sum(axis=1), 1.0, rtol=1e-15)
    np.testing.assert_allclose(got, np.log(policy.probs(x))[np.arange(20), a], rtol=1e-14)


def test_a_float64_module_gets_float64_observations() -> None:
    layer = nn.Linear(4, 3).double()
    twin = SoftmaxLinear(layer.weight.detach().numpy(), layer.bias.detach().numpy())
    x, a = observations().astype(np.float64), np.arange(20) % 3
    np.testing.assert_allclose(TorchPolicy(layer).log_prob(x, a), twin.log_prob(x, a), rtol=1e-13)


def test_a_categorical_equals_its_logits() -> None:
    module = Head(3, categorical)
    x, a = observations(), np.arange(20) % 3
    policy, plain = TorchPolicy(module), TorchPolicy(module.layer)
    np.testing.assert_allclose(policy.log_prob(x, a), plain.log_prob(x, a), atol=1e-6)
    np.testing.assert_allclose(policy.probs(x), plain.probs(x), atol=1e-6)


def test_a_masked_action_is_impossible() -> None:
    policy, x = TorchPolicy(Head(3, from_probs)), observations()
    assert np.all(policy.log_prob(x, np.full(20, 2)) == -np.inf)
    np.testing.assert_allclose(policy.probs(x).sum(axis=1), 1.0, rtol=1e-15)
    assert np.all(policy.sample(x, np.random.default_rng(0)) < 2)
    moments = log_prob_moments(policy, x)
    assert moments is not None
    assert np.isfinite(moments).all()


@pytest.mark.parametrize("head", [normal, independent])
def test_normal_and_independent_give_one_joint_density(
    head: Callable[[torch.Tensor], Distribution],
) -> None:
    module = Head(2, head)
    policy, twin = TorchPolicy(module), as_gaussian(module)
    x, a = observations(), np.random.default_rng(0).normal(size=(20, 2))
    np.testing.assert_allclose(policy.log_prob(x, a), twin.log_prob(x, a), atol=1e-5)
    got, expected = policy.log_prob_moments(x), twin.log_prob_moments(x)
    assert got is not None
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_scalar_action_does_not_broadcast() -> None:
    module = Head(1, lambda out: Normal(out[:, 0], 1.0))
    policy, x, a = TorchPolicy(module), observations(5), np.linspace(-1, 1, 5)
    assert policy.log_prob(x, a).shape == (5,)
    np.testing.assert_array_equal(policy.log_prob(x, a), policy.log_prob(x, a[:, None]))


def test_other_distributions_use_their_own_log_prob() -> None:
    module = Head(2, beta)
    policy, x = TorchPolicy(module), observations()
    a = np.random.default_rng(0).uniform(0.1, 0.9, size=(20, 2)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.tensor(x)).log_prob(torch.tensor(a)).numpy()
    np.testing.assert_allclose(policy.log_prob(x, a), expected, rtol=1e-5)
    assert policy.log_prob_moments(x) is None


def test_several_finite_choices_are_summed() -> None:
    module = Head(6, several_choices)
    policy, x = TorchPolicy(module), observations()
    a = np.random.default_rng(0).integers(0, 3, size=(20, 2))
    logits = module.layer(torch.tensor(x)).detach().double().reshape(20, 2, 3)
    table = torch.log_softmax(logits, dim=2).numpy()
    expected = sum(table[np.arange(20), part, a[:, part]] for part in range(2))
    np.testing.assert_allclose(policy.log_prob(x, a), expected, atol=1e-6)
    assert policy.sample(x, np.random.default_rng(0)).shape == (20, 2)


def test_blocks_of_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, x, a = TorchPolicy(mlp()), observations(), np.arange(20) % 3
    whole = policy.log_prob(x, a)
    monkeypatch.setattr(torch_policy, "ROWS", 7)
    np.testing.assert_allclose(policy.log_prob(x, a), whole, atol=1e-6)
    assert policy.probs(x).shape == (20, 3)
    assert policy.sample(x, np.random.default_rng(0)).shape == (20,)
    moments = policy.log_prob_moments(x)
    assert moments is not None
    assert moments[0].shape == (20,)


def test_read_only_and_reversed_observations() -> None:
    policy, x, a = TorchPolicy(mlp()), observations(), np.arange(20) % 3
    forwards = policy.log_prob(x, a)
    x.setflags(write=False)
    np.testing.assert_allclose(policy.log_prob(x[::-1], a[::-1]), forwards[::-1], atol=1e-6)


def test_nested_observations_and_a_forward_function() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(5, 3), nn.Linear(4, 3)

        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            total: torch.Tensor = self.embed(inputs["cell"].long()) + self.layer(inputs["vector"])
            return total

    x = {"cell": np.arange(20) % 5, "vector": observations()}
    assert TorchPolicy(TwoInputs()).probs(x).shape == (20, 3)
    embedding = TorchPolicy(nn.Embedding(5, 3), forward=lambda net, cell: net(cell.long()))
    assert embedding.probs(x["cell"]).shape == (20, 3)


def test_no_rows() -> None:
    policy = TorchPolicy(Head(2, independent))
    assert policy.log_prob(np.zeros((0, 4)), np.zeros((0, 2))).shape == (0,)
    assert TorchPolicy(mlp()).probs(np.zeros((0, 4))).shape == (0, 3)


# Sampling ------------------------------------------------------------------------------------


def test_sample_frequencies() -> None:
    policy, n = TorchPolicy(mlp()), 20_000
    x = np.repeat(observations(1), n, axis=0)
    probs = policy.probs(x[:1])[0]
    counts = np.bincount(policy.sample(x, np.random.default_rng(2)), minlength=3)
    assert np.all(np.abs(counts - n * probs) < 4 * np.sqrt(n * probs * (1 - probs)))


def test_normal_sample_moments() -> None:
    module = Head(2, independent)
    policy, n = TorchPolicy(module), 20_000
    x = np.repeat(observations(1), n, axis=0)
    drawn = policy.sample(x, np.random.default_rng(2))
    mean, std = module.layer(torch.tensor(x[:1])).detach().numpy()[0], np.array([0.5, 2.0])
    assert np.all(np.abs(drawn.mean(axis=0) - mean) < 4 * std / np.sqrt(n))
    assert np.all(np.abs(drawn.std(axis=0) / std - 1) < 4 / np.sqrt(2 * n))


@pytest.mark.parametrize(
    "module",
    [mlp(), Head(3, categorical), Head(2, normal), Head(2, beta), Head(6, several_choices)],
    ids=["logits", "categorical", "normal", "beta", "several"],
)
def test_the_numpy_generator_decides_and_torch_keeps_its_state(module: nn.Module) -> None:
    policy, x = TorchPolicy(module), observations()
    before = torch.get_rng_state()
    first = policy.sample(x, np.random.default_rng(4))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    np.testing.assert_array_equal(policy.sample(x, np.random.default_rng(4)), first)
    assert not np.array_equal(policy.sample(x, np.random.default_rng(5)), first)
    assert np.isfinite(policy.log_prob(x, first)).all()


# Snapshots -----------------------------------------------------------------------------------


def test_training_the_original_changes_nothing() -> None:
    module = nn.Sequential(mlp(), nn.Dropout(0.5))
    policy, x, a = TorchPolicy(module), observations(), np.arange(20) % 3
    before = policy.log_prob(x, a)
    optimiser = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(3):
        optimiser.zero_grad()
        module(torch.tensor(x)).square().sum().backward()
        optimiser.step()
    assert module.training
    np.testing.assert_array_equal(policy.log_prob(x, a), before)
    assert not np.allclose(TorchPolicy(module).log_prob(x, a), before)


def test_the_original_keeps_its_mode_and_gradients() -> None:
    module = mlp().train()
    TorchPolicy(module).probs(observations())
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_batch_normalisation_is_frozen() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    policy, x = TorchPolicy(module), observations()
    np.testing.assert_allclose(policy.probs(x)[:5], policy.probs(x[:5]), rtol=1e-6)


def test_equality_is_identity_and_repr_counts() -> None:
    module = mlp()
    policy = TorchPolicy(module)
    assert policy == policy
    assert policy != TorchPolicy(module)
    assert len({policy, TorchPolicy(module)}) == 2
    assert repr(policy) == "TorchPolicy(Sequential, 67 parameters)"


def test_protocol() -> None:
    finite, continuous = TorchPolicy(mlp()), TorchPolicy(Head(2, normal))
    assert isinstance(finite, Policy)
    assert isinstance(finite, FinitePolicy)
    with pytest.raises(TypeError, match="only a module that returns logits"):
        continuous.probs(observations())
    assert not hasattr(continuous, "probs")  # known now
    assert not isinstance(continuous, FinitePolicy)
    assert hasattr(finite, "probs")


def test_a_module_over_real_actions_is_evaluated_as_its_gaussian(tmp_path: Path) -> None:
    """In memory, and from a file in blocks; a policy made anew has never been asked."""
    head = Head(2, normal)
    logger = DiagonalGaussian(0.1 * np.ones((2, 4)), np.zeros(2), np.log([0.7, 2.0]))
    rng, seen = np.random.default_rng(0), observations(120)
    acts = logger.sample(seen, rng)
    data = Trajectories.from_arrays(
        seen,
        acts,
        rng.normal(size=120),
        logger.log_prob(seen, acts),
        offsets=np.arange(0, 121, 4),
        policies=[logger],
        terminated=True,
    )
    data.save(tmp_path / "run.ope")
    blocks = Compute(block_steps=50)
    for episodes, compute in ((data, Compute()), (tmp_path / "run.ope", blocks)):
        found, expected = (
            evaluate(episodes, policy, ["auto", "NFIS"], compute=compute)
            for policy in (TorchPolicy(head), as_gaussian(head))
        )
        for name in found:
            assert found[name].value == pytest.approx(expected[name].value, rel=1e-6)
            assert found[name].standard_error == pytest.approx(expected[name].standard_error)


def test_one_logit_is_told_from_a_bernoulli() -> None:
    net = nn.Linear(4, 1)
    x, a = observations(), np.arange(20) % 2
    with pytest.raises(ValueError, match=r"one logit a row.* actions\[1\] is another.*pad\(net"):
        TorchPolicy(net).log_prob(x, a)
    assert not TorchPolicy(net).log_prob(x, 0 * a).any()
    both = TorchPolicy(net, forward=lambda net, x: nn.functional.pad(net(x), (1, 0)))
    with torch.no_grad():
        z = net(torch.as_tensor(x, dtype=torch.float32)).double().numpy()[:, 0]
    np.testing.assert_allclose(both.probs(x)[:, 1], 1 / (1 + np.exp(-z)), rtol=1e-6)


# Files ---------------------------------------------------------------------------------------


def test_round_trip_through_arrays_and_restore() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    module(torch.tensor(observations()))  # moves the running statistics
    policy, x, a = TorchPolicy(module), observations(), np.arange(20) % 3
    kind, arrays = policy_to_arrays(policy)
    assert kind == "torch"
    assert set(arrays) == set(module.state_dict())
    stored = policy_from_arrays(kind, arrays)
    assert isinstance(stored, UnavailablePolicy)
    with pytest.raises(RuntimeError, match=r"load\(path\).*TorchPolicy\.restore\(this, module\)"):
        stored.log_prob(x, a)
    other = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    untouched = other[1].weight.detach().clone()  # type: ignore[operator]
    restored = TorchPolicy.restore(stored, other)
    np.testing.assert_array_equal(restored.log_prob(x, a), policy.log_prob(x, a))
    assert torch.equal(other[1].weight, untouched)  # type: ignore[arg-type]
    assert policy_to_arrays(stored)[0] == "torch"
    assert stored != policy_from_arrays(kind, arrays)  # the arrays alone do not say which policy


def test_arrays_are_copies() -> None:
    policy = TorchPolicy(mlp())
    before = policy.probs(observations())
    for array in policy.arrays().values():
        array[...] = 7.0
    np.testing.assert_array_equal(policy.probs(observations()), before)


def test_a_bfloat16_module_is_stored_as_float32() -> None:
    policy = TorchPolicy(mlp().bfloat16())
    assert {value.dtype for value in policy.arrays().values()} == {np.dtype(np.float32)}
    assert policy.probs(observations()).dtype == np.float64
    stored = policy_from_arrays(*policy_to_arrays(policy))
    assert isinstance(stored, UnavailablePolicy)
    restored = TorchPolicy.restore(stored, mlp(seed=5).bfloat16())
    np.testing.assert_array_equal(restored.probs(observations()), policy.probs(observations()))


def test_restore_refuses_what_does_not_fit() -> None:
    stored = TorchPolicy.from_arrays(TorchPolicy(mlp()).arrays())
    with pytest.raises(ValueError, match="not of the stored architecture"):
        TorchPolicy.restore(stored, mlp(outputs=4))
    with pytest.raises(ValueError, match="'uniform-2'"):
        TorchPolicy.restore(UnavailablePolicy("uniform-2", {}), mlp())


# Errors --------------------------------------------------------------------------------------


class Wrong(nn.Module):
    """Returns whatever it was given instead of logits."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output


def diverged() -> nn.Module:
    module = mlp()
    with torch.no_grad():
        next(module.parameters())[0, 0] = float("nan")
    return module


X = observations(2)
A = np.array([0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TorchPolicy(diverged()), r"0\.weight of the module is not finite"),
        (lambda: TorchPolicy(mlp(), forward=mlp().forward), r"bound method .*forward=Sequential"),
        (lambda: TorchPolicy(mlp()).log_prob(X, np.array([0, 3])), r"actions\[1\] is 3"),
        (lambda: TorchPolicy(mlp()).log_prob(X, A[:1]), r"actions have shape \(1,\)"),
        (lambda: TorchPolicy(mlp()).log_prob(X, A * 1.0), "dtype float64"),
        (lambda: TorchPolicy(Head(2, normal)).log_prob(X, A), r"Normal.* needs \(2, 2\)"),
        (lambda: TorchPolicy(Wrong(torch.zeros(2))).probs(X), r"logits of shape \(2,\)"),
        (lambda: TorchPolicy(Wrong(torch.zeros(5, 3))).probs(X), "for 2 observations"),
        (
            lambda: TorchPolicy(Head(2, squashed)).log_prob(X, np.ones((2, 2))),
            r"actions\[0\] is nan",
        ),
        (lambda: TorchPolicy(Head(2, squashed)).log_prob(X, np.full((2, 2), 1.5)), "support"),
    ],
)
def test_errors_name_the_argument_and_the_value(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_actions_that_are_not_those_of_the_module_are_described() -> None:
    policy, seen = TorchPolicy(mlp(2)), observations(3)
    with pytest.raises(ValueError, match=r"logits of 2 actions, but .* shape \(3, 1\): for real"):
        policy.log_prob(seen, np.zeros((3, 1)))


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="module is a list"):
        TorchPolicy([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"returned a tuple: .*forward=lambda"):
        TorchPolicy(Wrong((1, 2))).probs(X)


def test_probabilities_are_not_taken_for_logits() -> None:
    """A softmax of a softmax would be a policy that explores far more."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1))
    x, actions = np.ones((4, 2)), np.zeros(4, dtype=np.int64)
    with pytest.raises(ValueError, match=r"sum to 1 in each row: these are probabilities"):
        TorchPolicy(net).log_prob(x, actions)
    policy = TorchPolicy(net, forward=lambda module, seen: torch.log(module(seen)))
    same = TorchPolicy(net, forward=lambda module, seen: Categorical(probs=module(seen)))
    np.testing.assert_allclose(policy.probs(x), same.probs(x), rtol=1e-6)
    certain = nn.Linear(2, 1)
    assert TorchPolicy(certain).log_prob(x, actions).tolist() == [0.0] * 4
