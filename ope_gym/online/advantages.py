"""Evaluate a policy from the steps of policies near it, without a product of ratios.

By the performance-difference lemma V_j - V_k = E_j sum_t A_k(s_t, a_t): what policy j collects more
than policy k is the sum of the advantages, under k, of the actions that j takes. So from steps of
policies j near k,

    V_k = mean v(s_0) + sum_t S_t mean_t [r + v(s', t+1) - v(s, t) - c A(s, a)]

by the life table of a window (`ope_gym.online.stream`). Along an episode the terms of v cancel, so
v need not be right: a good one takes out noise, and stands in for what lies beyond the window. A
good A takes out the luck of the actions too, and moves the value from the policies that acted to
the one that is asked for.

v is LSTD(0.9) on features of the observation times (1, share of the time that is left); in a large
window by transitions of several steps each, which say nearly as much as all steps do. A is a
linear function of psi = (features of the action - their mean under k) x features of the
observation, by ridge regression on the generalised advantages of v, so its mean under k is 0
whatever its coefficients are. A is fitted without the group of steps it is applied to, and its
penalty is the one that predicts these best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.models.features import Map, Polynomial
from ope_gym.online.stream import Window, blocks, rows_by_place, runs
from ope_gym.policies.acting import ActingPolicy, action_moments, probs_of

_LAMBDA = 0.9  # of LSTD and of the generalised advantages, for one step
_TRANSITIONS = 8192  # of LSTD, if the window has as many steps
_RIDGE = 1e-3  # of v, relative to the size of its features: v takes out noise and no bias
_PENALTIES = (10.0, 100.0, 1000.0)  # of A, in steps
_MOST_NUMBERS = 16  # an observation with more enters without products
_CHANCE = 2.0  # squared differences of windows, in units of their noise, that are chance


@dataclass(frozen=True, eq=False)
class Sums:
    """The two sums that make a value, base - c moved, and what they are without each group.

    Args:
        base: mean v at the start plus the sum of the temporal differences.
        moved: the sum of the advantages.
        without: (groups, 2) both sums without one group of steps.
        steps: number of steps.
    """

    base: float
    moved: float
    without: FloatArray
    steps: int

    def value(self, c: float) -> float:
        """Return the value with the share c of the advantages."""
        return self.base - c * self.moved

    def error(self, c: float) -> float:
        """Return the standard error by leaving out one group at a time; NaN with fewer than two."""
        g = len(self.without)
        if g < 2:
            return float("nan")
        left = self.without @ np.array([1.0, -c])
        return float(np.sqrt((g - 1) / g * np.sum((left - left.mean()) ** 2)))


@dataclass(frozen=True, eq=False)
class Terms:
    """Terms of a value, one for each step of a window.

    Args:
        window: the steps.
        columns: (2, S) discounted: what is added, and the advantage, of which a share is taken off.
        start: what all of it is added to, such as mean v at the start of an episode.
    """

    window: Window
    columns: FloatArray
    start: float
    _known: dict[int, FloatArray] = field(default_factory=dict, init=False)

    def sums(self, start: int, stop: int) -> Sums | None:
        """Sum over the steps between two clocks; None if there are none."""
        rows = (self.window.clock >= start) & (self.window.clock < stop)
        if not rows.any():
            return None
        table = self.window.life_table(self.columns, rows, self._known)
        table[:, 0] += self.start
        base, moved = table[0].tolist()
        return Sums(base, moved, table[1:], int(np.count_nonzero(rows)))


def best_span(found: Sequence[Sums], c: float) -> tuple[Sums, float]:
    """Choose among windows of growing span; return its sums and its squared error.

    A wider window has less noise and more steps of policies further away. What it differs from a
    narrower one by more than their noise explains is bias, and counts as error (Lepski's method).

    Args:
        found: sums of the windows, the narrowest first; each is a part of the next.
        c: share of the advantages.
    """
    values = np.array([sums.value(c) for sums in found])
    squares = noise_of(found, c)
    errors = squares.copy()
    for i in range(1, len(found)):
        noise = squares[:i] - squares[i]  # of the difference, because one is a part of the other
        bias = (values[i] - values[:i]) ** 2 - _CHANCE * noise
        errors[i] += max(float(np.max(bias)), 0.0)
    best = int(np.argmin(errors))
    return found[best], float(errors[best])


def noise_of(found: Sequence[Sums], c: float) -> FloatArray:
    """Return the squared standard errors of windows: their own, or by the widest if that is more.

    The spread over groups is known best from the widest window, but returns may vary more lately.
    """
    own = np.array([sums.error(c) ** 2 for sums in found])
    steps = np.array([sums.steps for sums in found])
    return np.asarray(np.fmax(own, own[-1] * steps[-1] / steps))


@dataclass(frozen=True, eq=False)
class ValueFit:
    """v along the steps of a window: the part of a value that all policies share.

    Args:
        window: the steps.
        features: (S, d) of the observations.
        delta: (S,) temporal differences of v.
        start: mean v at the start of an episode.
        gamma: discount.
    """

    window: Window
    features: FloatArray
    delta: FloatArray
    start: float
    gamma: float

    @classmethod
    def of(
        cls, window: Window, *, horizon: int | None, gamma: float, starts: NDArray[Any]
    ) -> ValueFit:
        """Fit v to the steps of a window.

        Args:
            window: the steps.
            horizon: time limit, None without one.
            gamma: discount.
            starts: (m, ...) first observations.
        """
        features = learn_features(window.observations)
        now = features(window.observations)
        theta = _fit_v(window, features, horizon, gamma)
        low, high = _returns_ahead(window, gamma)

        def v(some: FloatArray, step: NDArray[Any]) -> FloatArray:
            return np.asarray(np.clip(timed_sum(some, step, horizon, theta), low, high))

        ahead = [v(features(window.following[b]), window.step[b] + 1) for b in blocks(window.size)]
        then = np.where(window.ended, 0.0, np.concatenate(ahead))
        delta = window.rewards + gamma * then - v(now, window.step)
        at_start = v(features(starts), np.zeros(len(starts)))
        return cls(window, now, delta, float(at_start.mean()), gamma)

    def advantages(self, psi: FloatArray | None) -> Terms:
        """Fit the advantages of a policy.

        Args:
            psi: (S, p) what `centred_actions` makes of its actions; None for no advantages.
        """
        window, advantage = self.window, np.zeros(self.window.size)
        if psi is not None:
            gain = _discounted(self.delta, window.rows_by_place, self.gamma * _LAMBDA)
            advantage = _fit_psi(psi, gain, window)
        columns = np.stack([self.delta, advantage]) * self.gamma**window.step
        return Terms(window, columns, self.start)


def _returns_ahead(window: Window, gamma: float) -> tuple[float, float]:
    """Return between what v must lie: what was paid from any step on, and half as much again."""
    paid = _discounted(window.rewards, window.rows_by_place, gamma)
    low, high = float(paid.min()), float(paid.max())
    room = 0.5 * (high - low)
    return low - room, high + room


def learn_features(observations: NDArray[Any]) -> Map:
    """Return the map from observations to features (n, d), 1 first, with the scale of these."""
    size = int(np.prod(observations.shape[1:]))
    if not size:  # not kept: only the age of an episode is known
        return lambda batch: np.ones((len(batch), 1))
    return Polynomial(2 if size <= _MOST_NUMBERS else 1).learn(observations)


def timed(features: FloatArray, step: NDArray[Any], horizon: int | None) -> FloatArray:
    """Return the features (n, d), and again times the share of the time that is left."""
    if horizon is None:
        return features
    left = np.maximum(horizon - step, 0) / horizon
    return np.hstack([features, features * left[:, None]])


def timed_sum(
    features: FloatArray, step: NDArray[Any], horizon: int | None, theta: FloatArray
) -> FloatArray:
    """Return `timed(features, step, horizon) @ theta`, (n,), without the wide array."""
    if horizon is None:
        return np.asarray(features @ theta)
    found = features @ theta.reshape(2, -1).T
    return np.asarray(found[:, 0] + np.maximum(horizon - step, 0) / horizon * found[:, 1])


def _fit_v(window: Window, features: Map, horizon: int | None, gamma: float) -> FloatArray:
    """Return the coefficients theta of v by LSTD.

        sum_t e_t (phi_t - gamma^k phi_t+k)' theta = sum_t e_t r_t
        e_t = phi_t + (gamma lambda)^k e_t-k

    over transitions of k steps, r_t their discounted rewards.
    """
    k = max(1, window.size // _TRANSITIONS)
    rows = np.flatnonzero(window.place % k == 0)
    length = np.diff(rows, append=window.size)  # k, or less at the end of an episode's part
    last, step = rows + length - 1, window.step[rows]
    rewards = np.add.reduceat(window.rewards * gamma ** (window.place % k), rows)
    phi = timed(features(window.observations[rows]), step, horizon)
    ahead = timed(features(window.following[last]), step + length, horizon)
    change = phi - np.where(window.ended[last], 0.0, gamma**length)[:, None] * ahead
    trace = _traces(phi, rows_by_place(window.place[rows] // k), (gamma * _LAMBDA) ** k)
    size = np.einsum("ij,ij->j", phi, phi)
    ridge = _RIDGE * (size + 1e-9 * size.max()) / (1 - _LAMBDA**k)
    return np.asarray(np.linalg.solve(trace.T @ change + np.diag(ridge), trace.T @ rewards))


@dataclass(frozen=True, eq=False)
class Actions:
    """The recorded actions of a window, as a policy sees them.

    Args:
        centred: Features (S, k) of the actions less their mean under the policy.
        squares: The same (S, m) of squared real actions; None for finitely many.
        distances: (S,) signed. Their mean is Σ π (π - b), of real actions that of the squared
            distance in σ, where policies b acted: 0 for the policy itself, and an approximate χ²
            where it is the surer one of the two.
    """

    centred: FloatArray
    squares: FloatArray | None
    distances: FloatArray

    @classmethod
    def of(
        cls,
        policy: ActingPolicy,
        window: Window,
        rng: np.random.Generator,
        explorer: ActingPolicy | None = None,
    ) -> Actions:
        """Compare actions with a policy.

            finite:  1(a) - π(a),           Σ π² - π(a)
            real:    z = (a - μ) / σ and z² less their means,     Σ z² - 1

        Args:
            policy: whose value is asked for.
            window: the steps.
            rng: for policies that cannot tell the moments of their actions.
            explorer: the policy that acts, if the one asked for is greedy: σ is of its actions.
        """
        probs = probs_of(policy, window.observations)
        if probs is not None:
            taken = window.actions.reshape(-1).astype(np.int64)
            centred = (taken[:, None] == np.arange(probs.shape[1])) - probs
            chosen = probs[np.arange(taken.size), taken]
            distances = np.einsum("na,na->n", probs, probs) - chosen
            return cls(centred[:, 1:], None, distances)  # the columns of all actions add up to 0
        mean, variance = action_moments(policy, window.observations, rng)
        own = 1.0
        if explorer is not None:
            own, (_, variance) = 0.0, action_moments(explorer, window.observations, rng)
        scale = np.sqrt(np.maximum(variance, 1e-12))
        z = (window.actions.reshape(len(mean), -1) - mean) / scale
        return cls(z, z**2 - own, np.sum(z**2 - 1.0, axis=1))

    def psi(self, features: FloatArray) -> FloatArray:
        """Return (S, p) the products with features (S, d) of the observations."""
        parts = [(self.centred, features)]
        if self.squares is not None:
            parts.append((self.squares, features[:, : 1 + _MOST_NUMBERS]))
        products = [(x[:, :, None] * f[:, None, :]).reshape(len(x), -1) for x, f in parts]
        return np.hstack(products)


def _fit_psi(psi: FloatArray, gain: FloatArray, window: Window) -> FloatArray:
    """Return (S,) the advantage of each step, fitted without its own group."""
    groups = int(window.group.max()) + 1
    parts = [(g, part, psi[part]) for g, part in runs(window.group)]
    grams, aims = np.zeros((groups, psi.shape[1], psi.shape[1])), np.zeros((groups, psi.shape[1]))
    for g, part, x in parts:
        grams[g] += x.T @ x
        aims[g] += x.T @ gain[part]
    if len({g for g, _, _ in parts}) < 2:
        return np.zeros(len(psi))
    gram, aim = grams.sum(axis=0), aims.sum(axis=0)
    size = np.diag(gram) / len(psi)
    ridge = np.diag(size + 1e-9 * max(size.max(), 1e-300))
    found = np.zeros((len(psi), 1 + len(_PENALTIES)))  # first no advantage at all
    theta = np.stack(
        [np.linalg.solve(gram - grams + p * ridge, (aim - aims)[:, :, None]) for p in _PENALTIES],
        axis=-1,
    )[:, :, 0]  # (groups, p, penalties)
    for g, part, x in parts:
        found[part, 1:] = x @ theta[g]
    losses = np.sum((gain[:, None] - found) ** 2, axis=0)
    return found[:, int(np.argmin(losses))]


def _traces(phi: FloatArray, places: list[IntArray], decay: float) -> FloatArray:
    """Return e_t = phi_t + decay e_t-1 along each episode, for all episodes at once."""
    found = phi.copy(order="C")
    for rows in places[1:]:
        found[rows] += decay * found[rows - 1]
    return found


def _discounted(values: FloatArray, places: list[IntArray], decay: float) -> FloatArray:
    """Return g_t = value_t + decay g_t+1 along each episode, for values (S,) or (S, m)."""
    found = values.copy()
    for rows in places[:0:-1]:
        found[rows - 1] += decay * found[rows]
    return found
