"""Learn a model of one step (where the state goes, what it pays, whether it ends), and play in it.

    s' = s + f_a(s),    r = g_a(s),    P(end | s, a) = σ(h(s') + h_a)

f_a and g_a are polynomials of the standardised state, one an action, by least squares; h is a
polynomial of degree 2 of the next state and high powers of each of its numbers, on either side of
the middle, by logistic regression. The next state is the one that was seen, or the predicted one
after the last step of an episode, which is not recorded. The powers are for limits: where any of
several numbers ends the episode, a quadric rounds the corners off, and what it cannot express
becomes a chance to end anywhere. An episode cut off by the time limit did not end by itself. Only
the mean of the increment is learned: noise of the transitions is not. Played episodes (`play`) draw
actions and ends; next states and rewards are the means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray

_RCOND = 1e-7  # relative size of singular values that are noise
_WELL = 1e-6  # ratio of eigenvalues from which normal equations are solved to nine digits
_ENDING_DEGREE = 2
_OUTSIDE = 1.05  # where places are clipped: high powers would extrapolate wildly
_ENDING_RIDGE = 1e-4  # penalty of squared coefficients, which keeps a sharp edge finite
_NEWTON = 40
_NEAR, _FAR = 3072, 1024  # steps without an end from which ends are learned, near ones and others
_ROUGH = 8  # Newton steps to tell these apart
_MARGIN = 0.5  # a predicted state may leave the recorded range by this share of it
_NEGLIGIBLE = 1e-6  # discount below which a played episode stops

Probs = Callable[[FloatArray], FloatArray]
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
    first, row = 0, 1
    for k in range(1, degree + 1):
        begin = row
        for j in range(d):  # products of k - 1 columns, none after j, are neighbours
            size = comb(j + k - 1, k - 1)
            np.multiply(out[first : first + size], columns[j], out=out[row : row + size])
            row += size
        first = begin
    return out.T


def factors(d: int, degree: int) -> list[tuple[IntArray, IntArray]]:
    """Return how the monomials of each degree from 2 on are made of those of one degree less.

    With c = (1, z_1 … z_d) and m = c at first, m = m[i] * c[j] for each pair (i, j). For a few rows
    this is faster than `monomials`.

    >>> (i, j), = factors(2, 2)
    >>> c = np.array([1.0, 2.0, 3.0])
    >>> c[i] * c[j]
    array([1., 2., 3., 4., 6., 9.])
    """
    found, first, size = [], 1, 1 + d
    for k in range(2, degree + 1):
        i, j = list(range(size)), [0] * size
        for column in range(d):
            count = comb(column + k - 1, k - 1)
            i += range(first, first + count)
            j += [1 + column] * count
        found.append((np.array(i), np.array(j)))
        first, size = size, len(i)
    return found


@dataclass(frozen=True, eq=False)
class Steps:
    """Recorded steps as a model learns from them.

    Args:
        states: (S, d).
        actions: (S,) numbers 0 … A-1.
        rewards: (S,).
        ended: (S,) the episode terminated with this step.
        last: (S,) no state was recorded after this step.
    """

    states: FloatArray
    actions: IntArray
    rewards: FloatArray
    ended: NDArray[np.bool_]
    last: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TransitionModel:
    """A learned model of transitions; F features, A actions.

    Args:
        centre: (d,) of the states.
        scale: (d,) of the states; 1 where they never differ.
        low: (d,) least state that a prediction may reach.
        high: (d,) largest.
        increments: (A, F, d) coefficients.
        rewards: (A, F).
        ending: coefficients of the logit: (E,) of the next state, then (A,); None if no episode
            ended.
        degree: of the polynomials.
    """

    centre: FloatArray
    scale: FloatArray
    low: FloatArray
    high: FloatArray
    increments: FloatArray
    rewards: FloatArray
    ending: FloatArray | None
    degree: int

    def step(self, states: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return next states (A, n, d), rewards (A, n) and chances of the end (A, n)."""
        features = monomials((states - self.centre) / self.scale, self.degree)
        following = np.stack([self._move(states, features, c) for c in self.increments])
        return following, self.rewards @ features.T, self.ends(following)

    def ends(self, following: FloatArray) -> FloatArray:
        """Return the probability (A, n) that an episode ends at `following` (A, n, d)."""
        actions, rows = following.shape[:2]
        if self.ending is None:
            return np.zeros((actions, rows))
        logit = (
            self._ending_features(following.reshape(-1, following.shape[2]))
            @ (self.ending[:-actions])
        )
        return _sigmoid(logit.reshape(actions, rows) + self.ending[-actions:, None])

    def _move(self, states: FloatArray, features: FloatArray, weights: FloatArray) -> FloatArray:
        return within(states + features @ weights, self.low, self.high)

    def _ending_features(self, following: FloatArray) -> FloatArray:
        half = (self.high - self.low) / (2 + 4 * _MARGIN)  # of the recorded range
        half = np.where(half > 0, half, 1.0)
        middle = (self.low + self.high) / 2
        return _ending_features(following, self.centre, self.scale, middle, half)


@dataclass(frozen=True, eq=False)
class Ending:
    """The chance that an episode ends at a state, whichever action led there.

    Args:
        centre: (d,) of the states.
        scale: (d,) of the states.
        middle: (d,) of the recorded range.
        half: (d,) half the recorded range, above 0.
        weights: (E,) coefficients of the logit.
    """

    centre: FloatArray
    scale: FloatArray
    middle: FloatArray
    half: FloatArray
    weights: FloatArray

    def __call__(self, following: FloatArray) -> FloatArray:
        """Return (n,) the chances at states (n, d)."""
        smooth = monomials((following - self.centre) / self.scale, _ENDING_DEGREE)
        return self.chances(following, smooth)

    def chances(self, following: FloatArray, smooth: FloatArray) -> FloatArray:
        """Return (n,) the chances at states (n, d) with the monomials (n, m) of degree 2."""
        powers = _powers(following, self.middle, self.half)
        split = smooth.shape[1]
        return _sigmoid(smooth @ self.weights[:split] + powers @ self.weights[split:])


def fit_ending(
    following: FloatArray, ended: NDArray[np.bool_], centre: FloatArray, scale: FloatArray
) -> Ending:
    """Learn where episodes end from the states after each step.

    Of many steps that did not end, those count that came near the end, by a rough first fit; a few
    at random stand for all others.

    Args:
        following: (n, d) the states.
        ended: (n,) whether the episode ended there.
        centre: (d,) of the states.
        scale: (d,) of the states.
    """
    low, high = following.min(axis=0), following.max(axis=0)
    middle, half = (low + high) / 2, (high - low) / 2
    half = np.where(half > 0, half, 1.0)
    x = _ending_features(following, centre, scale, middle, half)
    over, on = np.flatnonzero(ended), np.flatnonzero(~ended)
    counts = np.ones(len(x))
    if on.size > _NEAR + _FAR:
        rng = np.random.default_rng(0)  # every fourth step would be of every fourth environment
        rough = np.append(over, rng.choice(on, _FAR, replace=False))
        guess = _logistic(x[rough], ended[rough], newton=_ROUGH)
        on = on[np.argsort(x[on] @ guess)]
        far = rng.choice(on[:-_NEAR], _FAR, replace=False)
        counts[far] = (on.size - _NEAR) / _FAR
        kept = np.concatenate([over, on[-_NEAR:], far])
        x, ended, counts = x[kept], ended[kept], counts[kept]
    return Ending(centre, scale, middle, half, _logistic(x, ended, counts))


def _ending_features(
    following: FloatArray,
    centre: FloatArray,
    scale: FloatArray,
    middle: FloatArray,
    half: FloatArray,
) -> FloatArray:
    smooth = monomials((following - centre) / scale, _ENDING_DEGREE)
    return np.concatenate([smooth, _powers(following, middle, half)], axis=1)


def _powers(following: FloatArray, middle: FloatArray, half: FloatArray) -> FloatArray:
    """Return (n, 4 d) powers 8 and 16 of where states are in their range, above and below."""
    place = within((following - middle) / half, -_OUTSIDE, _OUTSIDE)
    n, d = place.shape
    found = np.empty((4 * d, n)).T  # column by column
    sides = found[:, : 2 * d]
    np.maximum(place, 0.0, out=sides[:, :d])
    np.minimum(place, 0.0, out=sides[:, d:])
    for _ in range(3):
        np.multiply(sides, sides, out=sides)  # faster than **
    np.multiply(sides, sides, out=found[:, 2 * d :])
    return found


def within(values: FloatArray, low: FloatArray | float, high: FloatArray | float) -> FloatArray:
    """Return values between low and high, as np.clip does; for small arrays it is faster."""
    return np.asarray(np.minimum(np.maximum(values, low), high))


def fit_transitions(steps: Steps, actions: int, degree: int) -> TransitionModel:
    """Learn from recorded steps; an action never seen takes what all others do on average."""
    states = steps.states
    centre, scale = states.mean(axis=0), states.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    low, high = states.min(axis=0), states.max(axis=0)
    room = _MARGIN * (high - low)
    features = monomials((states - centre) / scale, degree)
    go = np.flatnonzero(~steps.last)
    moves = states[go + 1] - states[go]
    model = TransitionModel(
        centre,
        scale,
        low - room,
        high + room,
        by_action(features[go], moves, steps.actions[go], actions),
        by_action(features, steps.rewards[:, None], steps.actions, actions)[:, :, 0],
        None,
        degree,
    )
    if not steps.ended.any():
        return model
    following = np.empty_like(states)
    for a, weights in enumerate(model.increments):
        rows = steps.actions == a
        following[rows] = model._move(states[rows], features[rows], weights)
    following[go] = states[go + 1]
    chosen = (steps.actions[:, None] == np.arange(actions)).astype(np.float64)
    ending = _logistic(np.hstack([model._ending_features(following), chosen]), steps.ended)
    return TransitionModel(
        centre, scale, model.low, model.high, model.increments, model.rewards, ending, degree
    )


def by_action(
    features: FloatArray, values: FloatArray, taken: IntArray, actions: int
) -> FloatArray:
    """Return coefficients (A, F, k) of the least squares of values (m, k) for each action.

    The difference from the fit to all actions has the least norm, so few steps say little.
    """
    common: FloatArray = np.zeros((features.shape[1], values.shape[1]))
    if np.bincount(taken, minlength=actions).min() < features.shape[1] and taken.size:
        common = _least_squares(features, values)
    found = np.repeat(common[None], actions, axis=0)
    for a in range(actions):
        rows = np.flatnonzero(taken == a)
        if rows.size:
            x = features[rows]
            found[a] += _least_squares(x, values[rows] - x @ common)
    return found


def _least_squares(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return the coefficients of least norm; normal equations are faster where they are exact."""
    gram = x.T @ x
    sizes = np.linalg.eigvalsh(gram)
    if sizes[0] > _WELL * sizes[-1]:
        return np.asarray(np.linalg.solve(gram, x.T @ y))
    return np.asarray(np.linalg.lstsq(x, y, rcond=_RCOND)[0], dtype=np.float64)


def _logistic(
    x: FloatArray,
    y: NDArray[np.bool_],
    counts: FloatArray | float = 1.0,
    newton: int = _NEWTON,
) -> FloatArray:
    """Return the coefficients that minimise log loss + ridge / 2 · their squares, by Newton.

    Args:
        x: (n, E) features, 1 first.
        y: (n,) what came of it.
        counts: (n,) how many rows each stands for.
        newton: most iterations.
    """
    counts = np.broadcast_to(counts, y.shape)
    ridge = _ENDING_RIDGE * np.eye(x.shape[1])
    weights = np.zeros(x.shape[1])
    share = np.average(y, weights=counts)
    weights[0] = np.log(share + 1e-12) - np.log(1 - share + 1e-12)
    logit = x @ weights
    loss = _log_loss(logit, y, weights, counts)
    for _ in range(newton):
        p = _sigmoid(logit)
        rows = np.flatnonzero(np.abs(p - y) > 1e-9)  # the others add nothing to slope or curvature
        some, slope = x[rows], counts[rows] * (p[rows] - y[rows])
        bent = some * np.sqrt(counts[rows] * p[rows] * (1 - p[rows]))[:, None]
        curve = bent.T @ bent + ridge
        way = np.linalg.solve(curve, some.T @ slope + ridge @ weights)
        move = x @ way
        size = 1.0
        while True:
            new = _log_loss(logit - size * move, y, weights - size * way, counts)
            if new <= loss or size < 1e-8:
                break
            size /= 2
        weights, logit = weights - size * way, logit - size * move
        if loss - new <= 1e-7 * (1e-3 + loss):
            break
        loss = new
    return weights


def _log_loss(
    logit: FloatArray, y: NDArray[np.bool_], weights: FloatArray, counts: FloatArray
) -> float:
    signed = np.where(y, -logit, logit)
    losses = np.maximum(signed, 0.0) + np.log1p(np.exp(-np.abs(signed)))
    return float(losses @ counts + 0.5 * _ENDING_RIDGE * (weights @ weights))


def _sigmoid(logit: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-within(logit, -40.0, 40.0))))


@dataclass(frozen=True, eq=False)
class Played:
    """One step of all episodes that still run, which are the first m of all.

    Args:
        states: (m, d).
        times: (m,) number of the step.
        actions: (m,).
        probs: (m, A) of the target.
        rewards: (m,) mean over its actions.
        ended: (m,) terminated with this step.
    """

    states: FloatArray
    times: IntArray
    actions: IntArray
    probs: FloatArray
    rewards: FloatArray
    ended: NDArray[np.bool_]


def play(
    model: TransitionModel,
    probs: Probs,
    states: FloatArray,
    times: IntArray,
    *,
    gamma: float,
    horizon: int,
    rng: np.random.Generator,
) -> list[Played]:
    """Play episodes from `states` at `times` on, all at once; the longest come first."""
    episode = np.arange(len(states))
    life = np.zeros(len(states), dtype=np.int64)
    found: list[tuple[IntArray, Played]] = []
    longest = horizon
    if gamma < 1:
        longest = 1 if gamma == 0 else min(horizon, 1 + int(np.log(_NEGLIGIBLE) / np.log(gamma)))
    while episode.size and len(found) < longest:
        rows = np.arange(episode.size)
        chances = probs(states)
        luck = rng.random((2, len(life)))[:, episode]  # the same random numbers in two models
        actions = (luck[0][:, None] >= chances.cumsum(axis=1)[:, :-1]).sum(axis=1)
        following, rewards, ending = model.step(states)
        paid = np.einsum("na,an->n", chances, rewards)
        ended = luck[1] < ending[actions, rows]
        found.append((episode, Played(states, times, actions, chances, paid, ended)))
        life[episode] += 1
        on = np.flatnonzero(~ended & (times + 1 < horizon))
        states, times, episode = following[actions[on], on], times[on] + 1, episode[on]
    place = np.empty_like(life)
    place[np.argsort(-life, kind="stable")] = np.arange(life.size)
    return [_sorted(step, np.argsort(place[who])) for who, step in found]


def mean_return(played: list[Played], gamma: float) -> float:
    """Return the mean over the episodes of the discounted rewards, each a mean over the actions."""
    paid = [gamma**u * float(step.rewards.sum()) for u, step in enumerate(played)]
    return sum(paid) / len(played[0].times)


def _sorted(step: Played, order: IntArray) -> Played:
    return Played(
        step.states[order],
        step.times[order],
        step.actions[order],
        step.probs[order],
        step.rewards[order],
        step.ended[order],
    )
