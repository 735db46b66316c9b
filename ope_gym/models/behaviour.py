"""Learn the probabilities of actions: shares, counts, multinomial logit, network.

A learner takes observations as rows of numbers and the number of the chosen action, and returns a
policy of such rows, made of arrays. Every action that it is asked to learn has a probability above
0 everywhere: it was taken somewhere, perhaps in episodes that were left out here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.models.features import columns_of
from ope_gym.policies import FinitePolicy, SoftmaxLinear, SoftmaxMlp
from ope_gym.policies.estimated import StateTable, encode
from ope_gym.policies.mlp import Network
from ope_gym.policies.numerics import Columns, flat_leaves

DRAWS = 16  # of a fitted logit, with its estimation error
_RIDGES = (64.0, 16.0, 4.0, 1.0)  # of the weights of standardised columns, strongest first
_PLENTY = 100  # steps for each weight of a logit, from which on the ridge does not matter
_HALF = 0.5  # of a step of each action, at the mean observation, before any was seen
_FLAT = 1e-9  # of the largest curvature of a likelihood: a direction that no data can tell
_ROUGH = 1e-4  # tolerance of logits that only help to choose a ridge
_HIDDEN, _EPOCHS = (32, 32), 200  # of the network
_HELD_OUT = 20  # steps for each action from which on a tenth can tell when to stop

Fitted = tuple[FinitePolicy, NDArray[np.float32] | None]
"""A policy, and draws of the estimation error of its weights (DRAWS, A, d + 1) if it is a logit."""


@dataclass(frozen=True)
class Learner:
    """A way to learn the probabilities of actions.

    Args:
        fit: Function of inputs (m, d), actions (m,), their number and a generator.
        encoded: Whether observations are encoded; else they are rows of whole numbers.
        degree: 2 for products of the numbers, 0 for none of them.
    """

    fit: Callable[[NDArray[Any], IntArray, int, np.random.Generator], Fitted]
    encoded: bool = True
    degree: int = 1

    def columns(self, observations: Any) -> Columns | None:
        """Return how to encode observations like these; None for rows of whole numbers."""
        return columns_of(observations) if self.encoded else None

    def inputs(self, observations: Any, columns: Columns | None) -> NDArray[Any]:
        """Return the inputs (n, d) of observations."""
        return encode(observations, columns, self.degree)


def fit_shares(x: FloatArray, chosen: IntArray, actions: int, rng: np.random.Generator) -> Fitted:
    """Take the shares of the actions, whatever was observed: a logit with intercepts alone."""
    policy = SoftmaxLinear(np.zeros((actions, 0)), np.log(_shares(chosen, actions)))
    return policy, scatter_logit(policy, x, 0.0, rng)


def fit_counts(
    states: NDArray[Any], chosen: IntArray, actions: int, rng: np.random.Generator
) -> Fitted:
    """Count the actions in each state, shrunk towards their shares in all states.

    P(a | s) = (n_sa + c p_a) / (n_s + c). c is the number of steps of a state that count as much as
    all other states together: the one of 1/2, 1, 2, ... with the largest likelihood of the counts,
    where the probabilities of a state are Dirichlet(c p).
    """
    from scipy.special import gammaln

    distinct, number = np.unique(states, axis=0, return_inverse=True)
    counts = np.zeros((len(distinct), actions))
    np.add.at(counts, (number.ravel(), chosen), 1.0)
    total, shares = counts.sum(axis=1), _shares(chosen, actions)

    def likelihood(c: float) -> float:
        alone = gammaln(c) - gammaln(total + c)
        return float(alone.sum() + (gammaln(counts + c * shares) - gammaln(c * shares)).sum())

    c = float(max(2.0 ** np.arange(-1, 11), key=likelihood))
    table = (counts + c * shares) / (total[:, None] + c)
    return StateTable(distinct, np.vstack([table, shares])), None


def fit_logit(x: FloatArray, chosen: IntArray, actions: int, rng: np.random.Generator) -> Fitted:
    """Fit a multinomial logit with the ridge that predicts left-out thirds of the steps best.

    The thirds are stretches, so that hardly any episode is in two of them. Where there are many
    steps for each weight the smallest ridge is taken: none of them would matter.
    """
    n, ridge = len(x), _RIDGES[-1]
    if 3 <= n < _PLENTY * (x.shape[1] + 1) * actions:
        third = np.arange(n) * 3 // n

        def loss(ridge: float) -> float:
            total = 0.0
            for out in (third == k for k in range(3)):
                fitted = maximise_logit(x[~out], chosen[~out], actions, ridge, _ROUGH)
                total -= float(fitted.log_prob(x[out], chosen[out]).sum())
            return total

        ridge = min(_RIDGES, key=loss)
    policy = maximise_logit(x, chosen, actions, ridge)
    return policy, scatter_logit(policy, x, ridge, rng)


def maximise_logit(
    x: FloatArray, chosen: IntArray, actions: int, ridge: float, tol: float = 1e-8
) -> SoftmaxLinear:
    """Maximise the log-likelihood of a multinomial logit, less ridge / 2 times the squared weights.

    Half a step of each action, with x = 0, is added: the intercept of an action that was never
    taken here would go to minus infinity.

    Args:
        x: Inputs (n, d).
        chosen: Actions (n,).
        actions: Number of actions.
        ridge: Penalty of all weights but the intercepts.
        tol: Largest slope of the mean log-likelihood at the end.
    """
    if actions == 1 or not x.shape[1]:
        return SoftmaxLinear(np.zeros((actions, x.shape[1])), np.log(_shares(chosen, actions)))
    # with two actions scikit-learn has one row of weights w, where ours are -w / 2 and w / 2
    two = actions == 2
    model = _sklearn("linear_model").LogisticRegression(
        C=(2.0 if two else 1.0) / ridge, tol=tol, max_iter=1000
    )
    model.fit(
        np.vstack([x, np.zeros((actions, x.shape[1]))]),
        np.append(chosen, np.arange(actions)),
        np.append(np.ones(len(x)), np.full(actions, _HALF)),
    )
    weights = np.column_stack([model.coef_, model.intercept_])
    weights = np.vstack([-weights, weights]) / 2 if two else weights - weights.mean(axis=0)
    return SoftmaxLinear(weights[:, :-1], weights[:, -1])


def scatter_logit(
    policy: SoftmaxLinear, x: FloatArray, ridge: float, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Draw the estimation error of the weights and intercepts of a logit, (DRAWS, A, d + 1).

    Normal with the inverse of the curvature of minus the penalised log-likelihood at its minimum,
    H = sum_t (diag p_t - p_t p_t') ⊗ x_t x_t' + ridge (Laplace). H^-1/2 is the symmetric root, so
    that models of overlapping folds, given the same random numbers, move together as they should.
    """
    actions = len(policy.weights)
    rows = np.column_stack([np.vstack([x, np.zeros((1, x.shape[1]))]), np.ones(len(x) + 1)])
    times = np.append(np.ones(len(x)), _HALF * actions)  # the added steps are one row
    probs, width = policy.probs(rows[:, :-1]), rows.shape[1]
    curved = np.empty((actions, width, actions, width))
    for a in range(actions):
        for b in range(a + 1):
            each = times * probs[:, a] * ((a == b) - probs[:, b])
            curved[a, :, b] = curved[b, :, a] = (rows * each[:, None]).T @ rows
    penalty = np.full((actions, width), ridge)
    penalty[:, -1] = 0.0
    values, vectors = np.linalg.eigh(curved.reshape(actions * width, -1) + np.diag(penalty.ravel()))
    seen = values > _FLAT * values[-1]  # adding the same to all actions changes no probability
    root = np.where(seen, 1.0 / np.sqrt(np.where(seen, values, 1.0)), 0.0)
    normal = rng.standard_normal((DRAWS, values.size))
    drawn = ((normal @ vectors) * root) @ vectors.T
    return np.asarray(drawn.reshape(DRAWS, actions, width), dtype=np.float32)


def fit_network(x: FloatArray, chosen: IntArray, actions: int, rng: np.random.Generator) -> Fitted:
    """Train two layers of 32 units by cross-entropy until a tenth of the steps gains no more."""
    neural = _sklearn("neural_network")
    model = neural.MLPClassifier(
        _HIDDEN,
        activation="tanh",
        alpha=1e-2,
        learning_rate_init=1e-2,
        max_iter=_EPOCHS,
        early_stopping=len(x) >= _HELD_OUT * actions,
        n_iter_no_change=20,
        random_state=int(rng.integers(2**31)),
    )
    every = np.repeat(np.arange(actions), 2)
    with warnings.catch_warnings():  # the best of its epochs is kept, were it the last one
        warnings.simplefilter("ignore", _sklearn("exceptions").ConvergenceWarning)
        # two steps of each action more, one of which may be left out: an action that was never
        # taken here has to be known, too
        model.fit(np.vstack([x, np.zeros((every.size, x.shape[1]))]), np.append(chosen, every))
    numbers = zip(model.coefs_, model.intercepts_, strict=True)
    layers = [(w.T.astype(np.float32, order="C"), b.astype(np.float32)) for w, b in numbers]
    if actions == 2:  # scikit-learn has one output for the second of two actions
        w, b = layers[-1]
        layers[-1] = np.vstack([np.zeros_like(w), w]), np.append(np.zeros_like(b), b)
    return SoftmaxMlp(Network(tuple(layers), "Tanh")), None


def _shares(chosen: IntArray, actions: int) -> FloatArray:
    """Return (A,) the shares of the actions, each with half a step more than was seen."""
    counts = np.bincount(chosen, minlength=actions) + _HALF
    return np.asarray(counts / counts.sum())


def _sklearn(module: str) -> Any:
    """Import a module of scikit-learn."""
    from importlib import import_module

    try:
        return import_module(f"sklearn.{module}")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'logits and networks need scikit-learn: pip install "ope-gym[behaviour]", or take '
            "model='shares' or 'counts'"
        ) from None


LEARNERS = {
    "shares": Learner(fit_shares, degree=0),
    "counts": Learner(fit_counts, encoded=False),
    "logit": Learner(fit_logit),
    "logit2": Learner(fit_logit, degree=2),
    "network": Learner(fit_network),
}


def candidates(observations: Any) -> tuple[str, ...]:
    """Return the models that are worth a try for such observations, the plainest first."""
    whole = all(leaf.dtype.kind in "iub" for leaf in flat_leaves(observations))
    numbers = columns_of(observations).numbers
    wide = numbers * (numbers + 1) // 2 > 200
    more = "counts" if whole else "logit2"
    return ("shares", "logit") if wide and not whole else ("shares", "logit", more)
