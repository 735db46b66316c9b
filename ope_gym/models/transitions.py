"""Learn a model of one step (where the state goes, what it pays, whether it ends), and play in it.

    s' = s + f_a(s),    r = g_a(s) + b 1(end),    P(end | s, a) = σ(h(s') + h_a)

f_a and g_a are polynomials of the standardised state, one an action, by least squares; actions of
real numbers enter the polynomials beside the state instead. h is a polynomial of degree 2 of the
next state and high powers of each of its numbers, on either side of the middle, by logistic
regression. The next state is the one that was seen, or the predicted one where none was recorded.
The powers are for limits: where any of several numbers ends the episode, a quadric rounds the
corners off, and what it cannot express becomes a chance to end anywhere. An episode cut off by the
time limit did not end by itself. Only the mean of the increment is learned: noise of the
transitions is not. Played episodes (`play`) draw actions and ends; next states and rewards are the
means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import comb
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray

_RCOND = 1e-12  # relative size of eigenvalues of a Gram matrix that are noise
_ENDING_DEGREE = 2
_OUTSIDE = 1.05  # where places are clipped: high powers would extrapolate wildly
_ENDING_RIDGE = 1e-4  # penalty of squared coefficients, which keeps a sharp edge finite
_NEWTON = 40
_ENOUGH = 1e-3  # gain of log-likelihood below which it stops: chance alone is 1/2 a coefficient
_MARGIN = 0.5  # a predicted state may leave the recorded range by this share of it
_NEGLIGIBLE = 1e-6  # discount below which a played episode stops

Ask = Callable[[FloatArray], FloatArray]
"""From states (n, d) to the probabilities (n, A) of a policy's actions.

Of a policy whose actions are real numbers: to actions (n, m) that it draws.
"""
_Real = TypeVar("_Real", np.float32, np.float64)


def monomials(z: NDArray[_Real], degree: int) -> NDArray[_Real]:
    """Return the products (n, F) of at most `degree` columns of z, 1 first.

    >>> monomials(np.array([[2.0, 3.0]]), 2)
    array([[1., 2., 3., 4., 6., 9.]])
    """
    columns = np.ascontiguousarray(z.T)
    d = len(columns)
    out = np.empty((comb(d + degree, degree), len(z)), dtype=z.dtype)  # contiguous by product
    out[0] = 1.0
    for j, factors, products in _products(d, degree):
        np.multiply(out[factors], columns[j], out=out[products])
    return out.T


@cache
def _products(d: int, degree: int) -> list[tuple[int, slice, slice]]:
    """Return which rows of the products so far times which column make which further rows."""
    found = []
    first, row = 0, 1
    for k in range(1, degree + 1):
        begin = row
        for j in range(d):  # products of k - 1 columns, none after j, are neighbours
            size = comb(j + k - 1, k - 1)
            found.append((j, slice(first, first + size), slice(row, row + size)))
            row += size
        first = begin
    return found


@dataclass(frozen=True, eq=False)
class Steps:
    """Recorded steps as a model learns from them.

    Args:
        states: (S, d).
        actions: (S,) numbers 0 … A-1, or (S, m) real numbers.
        rewards: (S,).
        ended: (S,) the episode terminated with this step.
        last: (S,) no state was recorded after this step.
        following: (S, d) the states after each step; None if each is the state of the next row.
    """

    states: FloatArray
    actions: NDArray[Any]
    rewards: FloatArray
    ended: NDArray[np.bool_]
    last: NDArray[np.bool_]
    following: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class TransitionModel:
    """A learned model of transitions; F features, A actions (1 if they are real numbers).

    Args:
        centre: of the inputs: the d numbers of the state, then the action if it is real numbers.
        scale: of the inputs; 1 where they never differ.
        low: (d,) least state that a prediction may reach.
        high: (d,) largest.
        coefficients: (F, A, d + 1) of the increments and, last, of the reward.
        bonus: what the reward of an ending step has more.
        ending: coefficients of the logit: (E,) of the next state, then (A,); None if no episode
            ended.
        degree: of the polynomials.
    """

    centre: FloatArray
    scale: FloatArray
    low: FloatArray
    high: FloatArray
    coefficients: FloatArray
    bonus: float
    ending: FloatArray | None
    degree: int

    @property
    def finite(self) -> bool:
        """Whether actions are numbers 0 … A-1."""
        return self.centre.size == self.low.size

    def step(self, states: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return next states (A, n, d), rewards (A, n) and chances of the end (A, n)."""
        found = self._predict(states).transpose(1, 0, 2)
        following = within(states + found[:, :, :-1], self.low, self.high)
        ends = self.ends(following)
        return following, found[:, :, -1] + self.bonus * ends, ends

    def take(
        self, states: FloatArray, actions: NDArray[Any], probs: FloatArray | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return next states (n, d), rewards (n,) and chances of the end (n,) after `actions`.

        Args:
            states: (n, d).
            actions: (n,) numbers, or (n, m) real numbers.
            probs: (n, A) weigh the rewards of all actions; None for that of the action taken.
        """
        found = self._predict(states if self.finite else np.hstack([states, actions]))
        taken = actions if self.finite else np.zeros(len(states), dtype=np.int64)
        chosen = found[np.arange(len(states)), taken]
        following = within(states + chosen[:, :-1], self.low, self.high)
        ends = self.ends(following, taken)
        paid = chosen[:, -1] if probs is None else (probs * found[:, :, -1]).sum(axis=1)
        return following, paid + self.bonus * ends, ends

    def ends(self, following: FloatArray, actions: IntArray | None = None) -> FloatArray:
        """Return the probability (n,) that an episode ends at `following` (n, d) after `actions`.

        Without these, following is (A, n, d), action by action, and so is the result, (A, n).
        """
        shape = following.shape[:-1]
        if self.ending is None:
            return np.zeros(shape)
        if actions is None:
            actions = np.arange(len(following))[:, None]
        blocks = self.coefficients.shape[1]
        features = self._ending_features(following.reshape(-1, following.shape[-1]))
        logit = (features @ self.ending[:-blocks]).reshape(shape)
        return _sigmoid(logit + self.ending[-blocks:][actions])

    def _predict(self, inputs: FloatArray) -> FloatArray:
        """Return increments and rewards (n, A, d + 1)."""
        features = monomials((inputs - self.centre) / self.scale, self.degree)
        shape = self.coefficients.shape
        return (features @ self.coefficients.reshape(shape[0], -1)).reshape(-1, *shape[1:])

    @cached_property
    def _range(self) -> tuple[FloatArray, FloatArray]:
        """The middle and half of the recorded range, (d,) each; 1 where states never differ."""
        half = (self.high - self.low) / (2 + 4 * _MARGIN)
        return (self.low + self.high) / 2, np.where(half > 0, half, 1.0)

    def _ending_features(self, following: FloatArray) -> FloatArray:
        d, (middle, half) = following.shape[1], self._range
        products = comb(d + _ENDING_DEGREE, _ENDING_DEGREE)
        out = np.empty((products + 4 * d, len(following)))
        z = (following - self.centre[:d]) / self.scale[:d]
        out[:products] = monomials(z, _ENDING_DEGREE).T
        place = ((following - middle) / half).T
        eighth, sixteenth = out[products : -2 * d], out[-2 * d :]
        np.minimum(np.maximum(place, 0.0), _OUTSIDE, out=eighth[:d])  # on either side apart
        np.maximum(np.minimum(place, 0.0), -_OUTSIDE, out=eighth[d:])
        for _ in range(3):  # squaring is faster than **
            eighth *= eighth
        np.multiply(eighth, eighth, out=sixteenth)
        return out.T


def within(values: FloatArray, low: FloatArray | float, high: FloatArray | float) -> FloatArray:
    """Return values between low and high, as np.clip does; for small arrays it is faster."""
    return np.asarray(np.minimum(np.maximum(values, low), high))


def fit_transitions(
    steps: Steps, actions: int, degree: int, most: int | None = None
) -> TransitionModel:
    """Learn from recorded steps; an action never seen takes what all others do on average.

    Args:
        steps: recorded.
        actions: how many there are, 0 for real numbers.
        degree: of the polynomials.
        most: learn ends from about so many steps that are none; None for all. A part of them moves
            the logit by the log of its share.
    """
    states, d = steps.states, steps.states.shape[1]
    inputs = states if actions else np.hstack([states, steps.actions])
    blocks, taken = max(actions, 1), np.zeros(len(states), dtype=np.int64)
    if actions:
        taken = steps.actions
    centre, scale = inputs.mean(axis=0), inputs.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    features = monomials((inputs - centre) / scale, degree)
    go = np.flatnonzero(~steps.last)
    following = states.copy() if steps.following is None else steps.following
    if steps.following is None:
        following[go] = states[go + 1]
    low = np.minimum(states.min(axis=0), following.min(axis=0))
    high = np.maximum(states.max(axis=0), following.max(axis=0))
    room = _MARGIN * (high - low)
    values = np.column_stack([following - states, steps.rewards, steps.ended])
    fitted = by_action(features, values, taken, blocks)
    if go.size < len(states):
        fitted[:, :, :d] = by_action(features[go], values[go, :d], taken[go], blocks)
    missed = values[:, d:]
    for a, rows in enumerate(_rows_of(taken, blocks)):
        missed[rows] -= features[rows] @ fitted[a, :, d:]
    # Least squares with a column 1(end) more: b is the slope of what is left of the two.
    square = float(missed[:, 1] @ missed[:, 1])
    bonus = float(missed[:, 0] @ missed[:, 1]) / square if square > 1e-6 else 0.0
    fitted[:, :, d] -= bonus * fitted[:, :, d + 1]
    coefficients = np.ascontiguousarray(fitted[:, :, : d + 1].transpose(1, 0, 2))
    model = TransitionModel(
        centre, scale, low - room, high + room, coefficients, bonus, None, degree
    )
    if not steps.ended.any():
        return model
    if go.size < len(states):
        unseen = np.flatnonzero(steps.last)
        following[unseen] = model.take(states[unseen], steps.actions[unseen])[0]
    on = np.flatnonzero(~steps.ended)
    stride = 1 if most is None else max(1, on.size // most)
    kept = np.sort(np.append(np.flatnonzero(steps.ended), on[::stride]))
    chosen = (taken[kept, None] == np.arange(blocks)).astype(np.float64)
    x = np.hstack([model._ending_features(following[kept]), chosen])
    ending = _logistic(x, steps.ended[kept])
    ending[0] -= np.log(stride)
    return replace(model, ending=ending)


def by_action(
    features: FloatArray, values: FloatArray, taken: IntArray, actions: int
) -> FloatArray:
    """Return coefficients (A, F, k) of the least squares of values (m, k) for each action.

    The difference from the fit to all actions has the least norm, so few steps say little.
    """
    parts = [(features[rows], values[rows]) for rows in _rows_of(taken, actions)]
    grams = np.stack([x.T @ x for x, _ in parts])
    aims = np.stack([x.T @ y for x, y in parts])
    common: FloatArray = np.zeros(aims.shape[1:])
    if min(len(x) for x, _ in parts) < features.shape[1]:
        common = _solve(grams.sum(axis=0), aims.sum(axis=0))
    return np.stack([common + _solve(g, b - g @ common) for g, b in zip(grams, aims, strict=True)])


def _rows_of(taken: IntArray, actions: int) -> list[Any]:
    """Return the rows of each action."""
    return [slice(None)] if actions == 1 else [np.flatnonzero(taken == a) for a in range(actions)]


def _solve(gram: FloatArray, aim: FloatArray) -> FloatArray:
    """Return the solution of least norm; directions that the data hardly have count as none."""
    size, axes = np.linalg.eigh(gram)
    kept = size > _RCOND * max(size[-1], 1e-300)
    axes = axes[:, kept]
    return np.asarray(axes @ ((axes.T @ aim) / size[kept, None]))


def _logistic(x: FloatArray, y: NDArray[np.bool_]) -> FloatArray:
    """Return the coefficients that minimise log loss + ridge / 2 · their squares, by Newton."""
    ridge = _ENDING_RIDGE * np.eye(x.shape[1])
    weights = np.zeros(x.shape[1])
    weights[0] = np.log(y.mean() + 1e-12) - np.log(1 - y.mean() + 1e-12)
    logit = x @ weights
    loss = _log_loss(logit, y, weights)
    for _ in range(_NEWTON):
        p = _sigmoid(logit)
        rows = np.flatnonzero(np.abs(p - y) > 1e-9)  # the others add nothing to slope or curvature
        some, slope = x[rows], p[rows] - y[rows]
        curve = (some.T * (p[rows] * (1 - p[rows]))) @ some + ridge
        way = np.linalg.solve(curve, some.T @ slope + ridge @ weights)
        move = x @ way
        size = 1.0
        while True:
            new = _log_loss(logit - size * move, y, weights - size * way)
            if new <= loss or size < 1e-8:
                break
            size /= 2
        weights, logit = weights - size * way, logit - size * move
        if loss - new <= _ENOUGH:
            break
        loss = new
    return weights


def _log_loss(logit: FloatArray, y: NDArray[np.bool_], weights: FloatArray) -> float:
    signed = np.where(y, -logit, logit)
    return float(np.logaddexp(0.0, signed).sum() + 0.5 * _ENDING_RIDGE * (weights @ weights))


def _sigmoid(logit: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-within(logit, -40.0, 40.0))))


@dataclass(frozen=True, eq=False)
class Played:
    """One step of all episodes that still run.

    Args:
        who: (m,) numbers of these episodes.
        states: (m, d).
        times: (m,) number of the step.
        actions: (m,) numbers, or real numbers.
        probs: (m, A) of the target; None if its actions are real numbers.
        rewards: (m,) mean over its actions, if these are finitely many.
        ended: (m,) terminated with this step.
    """

    who: IntArray
    states: FloatArray
    times: IntArray
    actions: NDArray[Any]
    probs: FloatArray | None
    rewards: FloatArray
    ended: NDArray[np.bool_]


def play(
    model: TransitionModel,
    ask: Ask,
    states: FloatArray,
    times: IntArray,
    *,
    gamma: float,
    horizon: int,
    rng: np.random.Generator,
) -> list[Played]:
    """Play episodes from `states` at `times` on, all at once."""
    who, count = np.arange(len(states)), len(states)
    found: list[Played] = []
    longest = horizon
    if gamma < 1:
        longest = 1 if gamma == 0 else min(horizon, 1 + int(np.log(_NEGLIGIBLE) / np.log(gamma)))
    while who.size and len(found) < longest:
        actions, probs = ask(states), None
        luck = rng.random((2, count))[:, who]  # the same random numbers in two models
        if model.finite:
            probs = actions
            actions = (luck[0][:, None] >= probs.cumsum(axis=1)[:, :-1]).sum(axis=1)
        following, rewards, ending = model.take(states, actions, probs)
        ended = luck[1] < ending
        found.append(Played(who, states, times, actions, probs, rewards, ended))
        states, times = following, times + 1
        on = ~ended & (times < horizon)
        if not on.all():
            states, times, who = states[on], times[on], who[on]
    return found


def longest_first(played: list[Played]) -> list[Played]:
    """Return the steps with the episodes that last longest first: those that run are a prefix."""
    life = np.zeros(len(played[0].who), dtype=np.int64)
    for step in played:
        life[step.who] += 1
    place = np.empty_like(life)
    place[np.argsort(-life, kind="stable")] = np.arange(life.size)
    return [_sorted(step, np.argsort(place[step.who])) for step in played]


def mean_return(played: list[Played], gamma: float) -> float:
    """Return the mean over the episodes of the discounted rewards."""
    paid = [gamma**u * float(step.rewards.sum()) for u, step in enumerate(played)]
    return sum(paid) / len(played[0].times)


def _sorted(step: Played, order: IntArray) -> Played:
    columns: dict[str, Any] = vars(step)
    return Played(**{name: x if x is None else x[order] for name, x in columns.items()})
