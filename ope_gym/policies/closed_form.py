"""Policies in closed form: linear, tabular, uniform and Gaussian ones.

A snapshot copies its parameters as read-only arrays, is equal to another by content and answers
for n rows at once. Many policies of a run are asked together, by `log_prob_stack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ope_gym import batches
from ope_gym.arguments import probability
from ope_gym.arrays import FloatArray
from ope_gym.batches import Tree
from ope_gym.policies.base import Finite, Gaussian, register_policy
from ope_gym.policies.numerics import (
    action_count,
    cells,
    choices,
    epsilon_greedy,
    features,
    log_sigmoid,
    log_softmax,
    parameters,
    refuse_nan,
    same_shape,
    within,
)

_TILE = 256  # rows of which a compiled loop has the scores of one policy in the cache
_CACHED = 32_768  # float64 numbers: a few temporaries of them are a mebibyte
_SHOWN = 24  # actions that a repr lists


def _log_sigmoids(theta: FloatArray, observations: Tree, actions: Tree) -> FloatArray:
    """Return ln σ(±θ_k·(x, 1)), (K, n), plus for action 1: theta (K, d + 1)."""
    from ope_gym import kernels  # numba takes a moment to load

    x = np.ascontiguousarray(features(observations, theta.shape[1] - 1))
    out, scratch = np.empty((len(theta), len(x))), np.empty((theta.shape[1] + 1, _TILE))
    kernels.log_sigmoids(theta, x, choices(actions, len(x), 2), scratch[:-1], scratch[-1], out)
    return out


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class LinearSigmoid(Finite):
    """Two actions, P(a = 1 | x) = σ(x·θ + bias).

    >>> LinearSigmoid(theta=[0.0, 1.0]).probs(np.array([[5.0, 0.0]]))
    array([[0.5, 0.5]])
    """

    kind: ClassVar[str] = "linear-sigmoid"
    theta: FloatArray  # (d,)
    bias: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", parameters("theta", self.theta, ndim=1))
        object.__setattr__(self, "bias", float(parameters("bias", self.bias, ndim=0)))

    @classmethod
    def log_prob_stack(
        cls, policies: Sequence[LinearSigmoid], observations: Tree, actions: Tree
    ) -> FloatArray:
        """Return `log_prob` of K policies as one (K, n) array."""
        same_shape("theta", [policy.theta for policy in policies])
        theta = np.array([[*policy.theta, policy.bias] for policy in policies])
        return _log_sigmoids(theta, observations, actions)

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return ln σ(±(x·θ + bias)), plus for action 1; shape (n,)."""
        score = self._score(observations)
        return log_sigmoid((2.0 * choices(actions, len(score), 2) - 1.0) * score)

    def log_table(self, observations: Tree) -> FloatArray:
        """Return [ln P(0), ln P(1)] for each row, shape (n, 2)."""
        score = self._score(observations)
        return log_sigmoid(np.stack([-score, score])).T

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one action a row; written out because rollouts ask for one row at a time."""
        likely = np.exp(log_sigmoid(self._score(observations)))
        refuse_nan(likely)
        return (rng.random(len(likely)) < likely).astype(np.int64)

    def _score(self, observations: Tree) -> FloatArray:
        return np.asarray(features(observations, len(self.theta)) @ self.theta + self.bias)


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxLinear(Finite):
    """A actions, P(a | x) = softmax(W x + bias)_a.

    >>> SoftmaxLinear(weights=[[0.0], [0.0]], bias=[0.0, np.log(3.0)]).probs(np.ones((1, 1)))
    array([[0.25, 0.75]])
    """

    kind: ClassVar[str] = "softmax-linear"
    weights: FloatArray  # (A, d)
    bias: FloatArray | None = None  # (A,); None means zeros

    def __post_init__(self) -> None:
        weights = parameters("weights", self.weights, ndim=2)
        given = np.zeros(len(weights)) if self.bias is None else self.bias
        bias = parameters("bias", given, ndim=1)
        if len(weights) == 0 or len(bias) != len(weights):
            raise ValueError(
                f"weights {weights.shape} and bias {bias.shape}: both need one row per action, "
                "and at least one action"
            )
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "bias", bias)

    @classmethod
    def log_prob_stack(
        cls, policies: Sequence[SoftmaxLinear], observations: Tree, actions: Tree
    ) -> FloatArray:
        """Return `log_prob` of K policies as one (K, n) array."""
        same_shape("weights", [policy.weights for policy in policies])
        if len(policies[0].weights) == 2:  # a sigmoid of the difference
            theta = [np.column_stack([policy.weights, policy._bias]) for policy in policies]
            return _log_sigmoids(np.diff(theta, axis=1)[:, 0], observations, actions)
        stacked = np.stack([policy.weights for policy in policies], axis=1)  # (A, K, d)
        weights = stacked.reshape(len(stacked) * len(policies), stacked.shape[2])
        bias = np.stack([policy._bias for policy in policies], axis=1).reshape(-1, 1)
        x = features(observations, weights.shape[1])
        chosen = choices(actions, len(x), len(stacked))
        out = np.empty((len(policies), len(x)))
        size = max(64, _CACHED // len(weights))
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            scores = weights @ x[rows].T
            scores += bias
            scores = scores.reshape(-1, *out[:, rows].shape)  # (A, K, rows)
            scores -= scores.max(axis=0)
            picked = scores[chosen[rows], :, np.arange(scores.shape[2])].T
            np.subtract(picked, np.log(np.exp(scores, out=scores).sum(axis=0)), out=out[:, rows])
        return out

    def log_table(self, observations: Tree) -> FloatArray:
        """Return the log-softmax, shape (n, A)."""
        scores = self.weights @ features(observations, self.weights.shape[1]).T
        scores += self._bias[:, None]
        return log_softmax(scores).T

    @property
    def _bias(self) -> FloatArray:
        return np.asarray(self.bias)  # no longer None


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class EpsilonGreedyTable(Finite):
    """A greedy action for every state; with probability ε, one of all A actions instead.

    States are the cells of a table: one Discrete space (observations an int array) or several
    (a tuple of int arrays as for Blackjack, or the columns of a MultiDiscrete array).

    >>> EpsilonGreedyTable(greedy=[0, 1], epsilon=0.2, n_actions=2).probs(np.array([1]))
    array([[0.1, 0.9]])
    """

    kind: ClassVar[str] = "epsilon-greedy-table"
    greedy: NDArray[np.int64]  # one axis for each Discrete part of the observation
    epsilon: float
    n_actions: int

    def __post_init__(self) -> None:
        n_actions = action_count(self.n_actions)
        greedy = np.array(self.greedy, order="C")
        if greedy.dtype.kind not in "iub" or greedy.size == 0:
            raise ValueError(
                f"greedy is {greedy.dtype} of shape {greedy.shape}: give one integer per state"
            )
        within("greedy", greedy, n_actions)
        epsilon = probability("epsilon", self.epsilon)
        greedy = greedy.astype(np.int64)
        greedy.setflags(write=False)
        object.__setattr__(self, "greedy", greedy)
        object.__setattr__(self, "epsilon", epsilon + 0.0)
        object.__setattr__(self, "n_actions", n_actions)

    @classmethod
    def from_q(cls, q: ArrayLike, epsilon: float) -> EpsilonGreedyTable:
        """Return the policy greedy in q of shape (*dims, A); a tie goes to the lowest action."""
        values = np.asarray(q, dtype=np.float64)
        if values.ndim == 0 or values.size == 0 or np.isnan(values).any():
            raise ValueError(
                f"q of shape {values.shape} is empty or has NaN: give a number for every action"
            )
        return cls(values.argmax(axis=-1), epsilon, values.shape[-1])

    @classmethod
    def log_prob_stack(
        cls, policies: Sequence[EpsilonGreedyTable], observations: Tree, actions: Tree
    ) -> FloatArray:
        """Return `log_prob` of K policies as one (K, n) array."""
        same_shape("greedy", [policy.greedy for policy in policies])
        states = cells(observations, policies[0].greedy.shape)
        chosen = choices(actions, len(states), min(policy.n_actions for policy in policies))
        out = np.empty((len(policies), len(states)))
        for row, policy in zip(out, policies, strict=True):
            is_greedy = policy.greedy.take(states) == chosen
            # Looked up with the bool as a number: np.where waits for mispredicted branches.
            policy._log_levels.take(is_greedy.view(np.int8), out=row, mode="clip")
        return out

    def log_prob(self, observations: Tree, actions: Tree) -> FloatArray:
        """Return the log-probability of each action, -inf where it is impossible; shape (n,)."""
        return np.asarray(self.log_prob_stack([self], observations, actions)[0])

    def probs(self, observations: Tree) -> FloatArray:
        """Return ε/A for each action, and 1 - ε more for the greedy one; shape (n, A)."""
        best = self.greedy.take(cells(observations, self.greedy.shape))
        return epsilon_greedy(best, self.epsilon, self.n_actions)

    @cached_property
    def _log_levels(self) -> FloatArray:
        """Return the log-probability of an action that is not greedy, and of the greedy one."""
        other = self.epsilon / self.n_actions
        with np.errstate(divide="ignore"):
            return np.log([other, other + (1.0 - self.epsilon)])

    def __repr__(self) -> str:
        shares = np.bincount(self.greedy.ravel(), minlength=min(self.n_actions, _SHOWN))
        listed = [str(share) for share in shares[:_SHOWN]] + ["..."] * (self.n_actions > _SHOWN)
        return (
            f"EpsilonGreedyTable({self.greedy.size} states {self.greedy.shape}, "
            f"epsilon={self.epsilon:.6g}, n_actions={self.n_actions}, greedy in "
            f"[{', '.join(listed)}] states)"
        )


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class Uniform(Finite):
    """Every action equally likely, whatever is observed.

    >>> Uniform(4).probs(np.zeros((1, 3)))
    array([[0.25, 0.25, 0.25, 0.25]])
    """

    kind: ClassVar[str] = "uniform"
    n_actions: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_actions", action_count(self.n_actions))

    def probs(self, observations: Tree) -> FloatArray:
        """Return 1/A, shape (n, A)."""
        return np.full((batches.length(observations), self.n_actions), 1.0 / self.n_actions)

    def sample(self, observations: Tree, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one integer a row."""
        return rng.integers(self.n_actions, size=batches.length(observations))


@register_policy
@dataclass(frozen=True, eq=False, repr=False)
class DiagonalGaussian(Gaussian):
    """Continuous actions of m parts, a ~ N(W x + bias, diag exp(log_std)²); a density.

    >>> standard = DiagonalGaussian(weights=[[0.0]], bias=[0.0], log_std=[0.0])
    >>> round(standard.log_prob(np.ones((1, 1)), np.zeros((1, 1))).item(), 6)  # -ln √(2π)
    -0.918939
    """

    kind: ClassVar[str] = "diagonal-gaussian"
    weights: FloatArray  # (m, d)
    bias: FloatArray  # (m,)
    log_std: FloatArray  # (m,)

    def __post_init__(self) -> None:
        weights = parameters("weights", self.weights, ndim=2)
        bias = parameters("bias", self.bias, ndim=1)
        log_std = parameters("log_std", self.log_std, ndim=1)
        if not len(weights) == len(bias) == len(log_std) > 0:
            raise ValueError(
                f"weights {weights.shape}, bias {bias.shape} and log_std {log_std.shape}: all need "
                "one row per part of the action, and at least one"
            )
        for name, value in (("weights", weights), ("bias", bias), ("log_std", log_std)):
            object.__setattr__(self, name, value)

    def mean(self, observations: Tree) -> FloatArray:
        """Return W x + bias, shape (n, m)."""
        mean: FloatArray = features(observations, self.weights.shape[1]) @ self.weights.T
        mean += self.bias
        return mean
