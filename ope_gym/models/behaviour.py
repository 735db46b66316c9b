"""Learn the probabilities of actions: shares, counts, multinomial logit, neighbours, network.

Each learner takes encoded observations and the number of the chosen action, and returns a policy of
them. Every action that it is asked to learn has a probability above 0 everywhere: it was taken
somewhere, perhaps in episodes that were left out here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.models.features import columns_of
from ope_gym.policies import FinitePolicy, SoftmaxLinear, SoftmaxMlp
from ope_gym.policies.encoding import Columns, flat_leaves
from ope_gym.policies.estimated import Neighbours, StateTable, encode
from ope_gym.policies.mlp import Network

_RIDGES = (64.0, 16.0, 4.0, 1.0)  # of the weights of standardised columns, strongest first
_PLENTY = 100  # steps for each weight of a logit, from which on the ridge does not matter
_NEAREST = (10, 200)  # fewest and most neighbours
_HALF = 0.5  # of a step of each action, at the mean observation, before any was seen
DRAWS = 16  # of a fitted model, with its estimation error
_FLAT = 1e-9  # of the largest curvature of a likelihood: a direction that no data can tell
_FEW, _MOST = 128, 500  # weights for Newton's method, and steps of any
_EXACT = 1e-13  # of a likelihood, a gain too small to go on
_HIDDEN, _EPOCHS, _PATIENCE, _BATCH, _RATE = (32, 32), 200, 20, 256, 1e-2


@dataclass(frozen=True)
class Learner:
    """A way to learn the probabilities of actions.

    Args:
        name: of the model.
        fit: from inputs (m, d), actions (m,), how many actions and a seed to a policy.
        encoded: whether observations are encoded; else they are rows of whole numbers.
        degree: 2 for products of the numbers, 0 for none of them.
        scatter: draws of the estimation error of the fitted weights, from the fitted policy, its
            inputs (m, d), actions (m,) and a generator; None if its law is unknown.
    """

    name: str
    fit: Callable[[NDArray[Any], IntArray, int, int], FinitePolicy]
    encoded: bool = True
    degree: int = 1
    scatter: (
        Callable[[Any, NDArray[Any], IntArray, np.random.Generator], NDArray[np.float32]] | None
    ) = None

    def columns(self, observations: Any) -> Columns | None:
        """Return how to encode observations like these; None for rows of whole numbers."""
        return columns_of(observations) if self.encoded else None

    def inputs(self, observations: Any, columns: Columns | None) -> NDArray[Any]:
        """Return the inputs (n, d) of observations."""
        return encode(observations, columns, self.degree)


def fit_shares(x: FloatArray, chosen: IntArray, actions: int, seed: int) -> SoftmaxLinear:
    """Take the shares of the actions, whatever was observed: a logit with intercepts alone."""
    return SoftmaxLinear(np.zeros((actions, 0)), np.log(_shares(chosen, actions)))


def fit_counts(states: NDArray[Any], chosen: IntArray, actions: int, seed: int) -> StateTable:
    """Count the actions in each state, shrunk towards their shares in all states.

    P(a | s) = (n_sa + c p_a) / (n_s + c). c is the number of steps of a state that count as much as
    all other states together: the one of 1/2, 1, 2, ... with the largest likelihood of the counts,
    where the probabilities of a state are Dirichlet(c p).
    """
    distinct, counts, shares = _counted(states, chosen, actions)
    c = _prior_steps(counts, shares)
    table = (counts + c * shares) / (counts.sum(axis=1, keepdims=True) + c)
    return StateTable(distinct, np.vstack([table, shares]))


def _counted(
    states: NDArray[Any], chosen: IntArray, actions: int
) -> tuple[NDArray[Any], FloatArray, FloatArray]:
    """Return the distinct states (m, columns), counts (m, A) in them and shares (A,) in all."""
    distinct, number = np.unique(states, axis=0, return_inverse=True)
    counts = np.zeros((len(distinct), actions))
    np.add.at(counts, (number.ravel(), chosen), 1.0)
    return distinct, counts, _shares(chosen, actions)


def _prior_steps(counts: FloatArray, shares: FloatArray) -> float:
    """Return c, see `fit_counts`."""
    from scipy.special import gammaln

    total = counts.sum(axis=1)

    def likelihood(c: float) -> float:
        alone = gammaln(c) - gammaln(total + c)
        return float(alone.sum() + (gammaln(counts + c * shares) - gammaln(c * shares)).sum())

    return float(max(2.0 ** np.arange(-1, 11), key=likelihood))


def fit_logit(x: FloatArray, chosen: IntArray, actions: int, seed: int) -> SoftmaxLinear:
    """Fit a multinomial logit with the ridge that predicts left-out thirds of the steps best.

    The thirds are stretches, so that hardly any episode is in two of them. Where there are many
    steps for each weight the smallest ridge is taken: none of them would matter.
    """
    n = len(x)
    if n >= _PLENTY * (x.shape[1] + 1) * actions or n < 3:
        return maximise_logit(x, chosen, actions, _RIDGES[-1])
    third = np.arange(n) * 3 // n
    losses = np.zeros(len(_RIDGES))
    for k in range(3):
        found = None
        for i, ridge in enumerate(_RIDGES):
            found = maximise_logit(x[third != k], chosen[third != k], actions, ridge, found)
            losses[i] -= found.log_prob(x[third == k], chosen[third == k]).sum()
    return maximise_logit(x, chosen, actions, _RIDGES[int(np.argmin(losses))])


def maximise_logit(
    x: FloatArray,
    chosen: IntArray,
    actions: int,
    ridge: float,
    start: SoftmaxLinear | None = None,
) -> SoftmaxLinear:
    """Maximise the log-likelihood of a multinomial logit, less ridge / 2 times the squared weights.

    Half a step of each action, with x = 0, is added: the intercept of an action that was never
    taken here would go to minus infinity. Newton's method where the weights are few, L-BFGS else.

    Args:
        x: (n, d).
        chosen: (n,).
        actions: how many.
        ridge: of all weights but the intercepts.
        start: where to begin; by default at the shares of the actions.
    """
    likelihood = _Likelihood.of(x, chosen, actions, ridge)
    first = np.zeros((actions, x.shape[1] + 1))
    first[:, -1] = np.log(_shares(chosen, actions))
    if start is not None:
        first = np.column_stack([start.weights, np.asarray(start.bias)])
    if first.size <= _FEW:
        found = _newton(likelihood, first.ravel())
    else:
        from scipy.optimize import minimize

        options = {"maxiter": _MOST}
        result = minimize(likelihood, first.ravel(), jac=True, method="L-BFGS-B", options=options)
        found = result.x
    weights = found.reshape(first.shape)
    weights = weights - weights.mean(axis=0)
    return SoftmaxLinear(weights[:, :-1], weights[:, -1])


@dataclass(frozen=True, eq=False)
class _Likelihood:
    """Minus the penalised log-likelihood of a logit, of weights and intercepts (A (d + 1),).

    Args:
        inputs: (n + 1, d + 1) with a column of ones; the last row is 0 but for it.
        hit: (n + 1, A) how often each action was taken: once, or half of it in the last row.
        penalty: (A, d + 1).
    """

    inputs: FloatArray
    hit: FloatArray
    penalty: FloatArray

    @classmethod
    def of(cls, x: FloatArray, chosen: IntArray, actions: int, ridge: float) -> _Likelihood:
        n, width = x.shape
        inputs, hit = np.zeros((n + 1, width + 1)), np.zeros((n + 1, actions))
        inputs[:n, :-1], inputs[:, -1] = x, 1.0
        hit[np.arange(n), chosen], hit[n] = 1.0, _HALF
        penalty = np.full((actions, width + 1), ridge)
        penalty[:, -1] = 0.0
        return cls(inputs, hit, penalty)

    def __call__(self, flat: FloatArray) -> tuple[float, FloatArray]:
        """Return the value and its slope (A (d + 1),)."""
        weights = flat.reshape(self.penalty.shape)
        scores, probs, total = self._scores(weights)
        value = np.sum(self._count * np.log(total)) - np.einsum("na,na->", self.hit, scores)
        slope = (self._count * probs - self.hit).T @ self.inputs + self.penalty * weights
        return float(value + 0.5 * np.sum(self.penalty * weights**2)), slope.ravel()

    def curvature(self, flat: FloatArray) -> FloatArray:
        """Return sum_t (diag p_t - p_t p_t') ⊗ x_t x_t' + penalty, square."""
        actions, width = self.penalty.shape
        probs = self._scores(flat.reshape(self.penalty.shape))[1]
        found = np.empty((actions, width, actions, width))
        for a in range(actions):
            for b in range(a + 1):
                each = self._count[:, 0] * probs[:, a] * ((a == b) - probs[:, b])
                found[a, :, b] = found[b, :, a] = (self.inputs * each[:, None]).T @ self.inputs
        return found.reshape(flat.size, flat.size) + np.diag(self.penalty.ravel())

    def _scores(self, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        scores = self.inputs @ weights.T
        scores -= scores.max(axis=1, keepdims=True)
        parts = np.exp(scores)
        total = parts.sum(axis=1, keepdims=True)
        return scores, parts / total, total

    @property
    def _count(self) -> FloatArray:
        return np.asarray(self.hit.sum(axis=1, keepdims=True))


def _newton(likelihood: _Likelihood, flat: FloatArray) -> FloatArray:
    """Return the minimum, by steps that are halved until they gain."""
    value, slope = likelihood(flat)
    for _ in range(_MOST):
        curved = likelihood.curvature(flat)
        curved[np.diag_indices_from(curved)] += _FLAT * np.trace(curved)  # intercepts may shift
        step = np.linalg.solve(curved, slope)
        gain = float(step @ slope)
        while gain > _EXACT * (1.0 + abs(value)):
            further, other = likelihood(flat - step)
            if further <= value - 0.25 * gain:
                break
            step, gain = step / 2, gain / 2
        else:
            return flat
        flat, value, slope = flat - step, further, other
    return flat


def scatter_logit(
    policy: SoftmaxLinear, x: FloatArray, chosen: IntArray, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Draw the estimation error of the weights and intercepts, (DRAWS, A, d + 1).

    Normal with the inverse of the curvature H of the penalised log-likelihood at its maximum
    (Laplace). H^-1/2 is the symmetric root, so that models of overlapping folds, given the same
    random numbers, move together as they should. The ridge is the one for which the weights are the
    maximum: where the slope of the likelihood is ridge times the weights.
    """
    flat = np.column_stack([policy.weights, np.asarray(policy.bias)]).ravel()
    _, slope = _Likelihood.of(x, chosen, len(policy.weights), 0.0)(flat)
    own, size = slope.reshape(-1, x.shape[1] + 1)[:, :-1], float(np.sum(policy.weights**2))
    ridge = max(-float(np.sum(own * policy.weights)) / size, 0.0) if size > 0.0 else _RIDGES[0]
    curved = _Likelihood.of(x, chosen, len(policy.weights), ridge).curvature(flat)
    values, vectors = np.linalg.eigh(curved)
    seen = values > _FLAT * values[-1]  # adding the same to all actions changes no probability
    root = np.where(seen, 1.0 / np.sqrt(np.where(seen, values, 1.0)), 0.0)
    normal = rng.standard_normal((DRAWS, flat.size))
    found = ((normal @ vectors) * root) @ vectors.T
    return np.asarray(found.reshape(DRAWS, len(policy.weights), -1), dtype=np.float32)


def fit_neighbours(x: FloatArray, chosen: IntArray, actions: int, seed: int) -> Neighbours:
    """Keep the points; k is the square root of their number, within bounds."""
    k = int(np.clip(round(np.sqrt(len(x))), *_NEAREST))
    return Neighbours(x.astype(np.float32), chosen, _shares(chosen, actions), k)


def fit_network(x: FloatArray, chosen: IntArray, actions: int, seed: int) -> SoftmaxMlp:
    """Train a small network by cross-entropy, and keep the best on a fifth of the steps."""
    import torch
    from torch import nn

    rng = np.random.default_rng(seed)
    kept = np.zeros(len(x), dtype=np.bool_)
    kept[rng.permutation(len(x))[: max(1, len(x) // 5)]] = True
    inputs, labels = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(chosen)
    learn, test = np.flatnonzero(~kept), torch.from_numpy(np.flatnonzero(kept))
    with torch.random.fork_rng(devices=[]):  # torch's own random state stays as it was
        torch.manual_seed(seed)
        sizes = [x.shape[1], *_HIDDEN, actions]
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    adam = torch.optim.AdamW(net.parameters(), lr=_RATE, weight_decay=1e-2)
    entropy = nn.CrossEntropyLoss()
    best, least, waited = {k: v.clone() for k, v in net.state_dict().items()}, np.inf, 0
    for _ in range(_EPOCHS):
        order = rng.permutation(learn)
        for begin in range(0, order.size, _BATCH):
            rows = torch.from_numpy(order[begin : begin + _BATCH])
            adam.zero_grad()
            entropy(net(inputs[rows]), labels[rows]).backward()
            adam.step()
        with torch.no_grad():
            error = float(entropy(net(inputs[test]), labels[test]))
        waited += 1
        if error < least:
            best, least, waited = {k: v.clone() for k, v in net.state_dict().items()}, error, 0
        if waited >= _PATIENCE:
            break
    net.load_state_dict(best)
    numbers = [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in layers]
    return SoftmaxMlp(Network(tuple(numbers), "Tanh"))


def _shares(chosen: IntArray, actions: int) -> FloatArray:
    """Return (A,) the shares of the actions, each with half a step more than was seen."""
    counts = np.bincount(chosen, minlength=actions) + 0.5
    return np.asarray(counts / counts.sum())


LEARNERS = {
    "shares": Learner("shares", fit_shares, degree=0, scatter=scatter_logit),
    "counts": Learner("counts", fit_counts, encoded=False),
    "logit": Learner("logit", fit_logit, scatter=scatter_logit),
    "logit2": Learner("logit2", fit_logit, degree=2, scatter=scatter_logit),
    "neighbours": Learner("neighbours", fit_neighbours),
    "network": Learner("network", fit_network),
}


def candidates(observations: Any) -> tuple[str, ...]:
    """Return the models that are worth a try for such observations, the plainest first."""
    whole = all(leaf.dtype.kind in "iub" for leaf in flat_leaves(observations))
    numbers = columns_of(observations).numbers
    wide = numbers * (numbers + 1) // 2 > 200
    more = "counts" if whole else "logit2"
    return ("shares", "logit") if wide and not whole else ("shares", "logit", more)
