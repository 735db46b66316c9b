"""Learn the probabilities of recorded actions: counts, multinomial logit, neighbours, network.

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
_HIDDEN, _EPOCHS, _PATIENCE, _BATCH, _RATE = (32, 32), 200, 20, 256, 1e-2


@dataclass(frozen=True)
class Learner:
    """A way to learn the probabilities of actions.

    Args:
        name: of the model.
        fit: from inputs (m, d), actions (m,), how many actions and a seed to a policy.
        encoded: whether observations are encoded; else they are rows of whole numbers.
        degree: 2 for products of the numbers.
    """

    name: str
    fit: Callable[[NDArray[Any], IntArray, int, int], FinitePolicy]
    encoded: bool = True
    degree: int = 1

    def columns(self, observations: Any) -> Columns | None:
        """Return how to encode observations like these; None for rows of whole numbers."""
        return columns_of(observations) if self.encoded else None

    def inputs(self, observations: Any, columns: Columns | None) -> NDArray[Any]:
        """Return the inputs (n, d) of observations."""
        return encode(observations, columns, self.degree)


def fit_counts(states: NDArray[Any], chosen: IntArray, actions: int, seed: int) -> StateTable:
    """Count the actions in each state, shrunk towards their shares in all states.

    P(a | s) = (n_sa + c p_a) / (n_s + c). c is the number of steps of a state that count as much as
    all other states together: the one of 1/2, 1, 2, ... with the largest likelihood of the counts,
    where the probabilities of a state are Dirichlet(c p).
    """
    from scipy.special import gammaln

    distinct, number = np.unique(states, axis=0, return_inverse=True)
    counts = np.zeros((len(distinct), actions))
    np.add.at(counts, (number.ravel(), chosen), 1.0)
    shares = _shares(chosen, actions)
    total = counts.sum(axis=1)

    def likelihood(c: float) -> float:
        alone = gammaln(c) - gammaln(total + c)
        return float(alone.sum() + (gammaln(counts + c * shares) - gammaln(c * shares)).sum())

    c = max(2.0 ** np.arange(-1, 11), key=likelihood)
    table = (counts + c * shares) / (total[:, None] + c)
    return StateTable(distinct, np.vstack([table, shares]))


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

    Args:
        x: (n, d).
        chosen: (n,).
        actions: how many.
        ridge: of all weights but the intercepts.
        start: where to begin; by default at the shares of the actions.
    """
    from scipy.optimize import minimize

    n, width = x.shape
    inputs = np.hstack([x, np.ones((n, 1))])
    hit = np.zeros((n, actions))
    hit[np.arange(n), chosen] = 1.0
    each = np.append(np.full(width, ridge), 0.0)

    def loss(flat: FloatArray) -> tuple[float, FloatArray]:
        weights = flat.reshape(actions, width + 1)
        scores = inputs @ weights.T
        scores -= scores.max(axis=1, keepdims=True)
        parts = np.exp(scores)
        total = parts.sum(axis=1, keepdims=True)
        value = np.log(total).sum() - np.einsum("na,na->", hit, scores)
        slope = (parts / total - hit).T @ inputs + each * weights
        return float(value + 0.5 * np.sum(each * weights**2)), slope.ravel()

    first = np.zeros((actions, width + 1))
    first[:, -1] = np.log(_shares(chosen, actions))
    if start is not None:
        first = np.column_stack([start.weights, np.asarray(start.bias)])
    found = minimize(loss, first.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    weights = found.x.reshape(actions, width + 1)
    weights = weights - weights.mean(axis=0)
    return SoftmaxLinear(weights[:, :-1], weights[:, -1])


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
    "counts": Learner("counts", fit_counts, encoded=False),
    "logit": Learner("logit", fit_logit),
    "logit2": Learner("logit2", fit_logit, degree=2),
    "neighbours": Learner("neighbours", fit_neighbours),
    "network": Learner("network", fit_network),
}


def candidates(observations: Any) -> tuple[str, ...]:
    """Return the models that are worth a try for such observations, the plainest first."""
    whole = all(leaf.dtype.kind in "iub" for leaf in flat_leaves(observations))
    numbers = columns_of(observations).numbers
    wide = numbers * (numbers + 1) // 2 > 200
    return ("logit", "counts") if whole else ("logit",) if wide else ("logit", "logit2")
