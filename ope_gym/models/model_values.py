"""The target's value inside a transition model, from episodes played in it.

V(s, t) = φ(s, t)·θ is fitted to the returns of played episodes after what luck gave is taken out.
With q and v made from V in the model, m_u = q(s_u, a_u) - v(s_u) has mean 0 whatever θ is, so

    y_t = sum_{u >= t} γ^(u-t) sum_a π(a|s_u) r(s_u, a)
    x_t = φ(s_t) + sum_{u >= t} γ^(u-t+1) [1(on) φ(s_{u+1}) - sum_a π(a|s_u) P(on|s_u, a) φ(s'_a)]

satisfy y_t = x_t·θ without any noise if V is right, and otherwise up to what φ cannot express.
Least squares of y on x is stable for γ = 1, unlike sweeps of fitted values, and far less noisy than
to regress returns on φ. Actions are drawn; next states and rewards are the model's means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.models.transition_model import TransitionModel, monomials

Probs = Callable[[FloatArray], FloatArray]
_CLIP = 4.0  # standardised states beyond are taken as at the border
_NEGLIGIBLE = 1e-6  # discounts below end a played episode
_RIDGE = 1e-3
_WIDTH = 2.0  # of a wave before the metric is known, in standard deviations
_SHIFT = 0.05  # for slopes of V, in standard deviations


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
    """Episodes from `states` at `times` on, all at once, those that last longest first."""
    episode = np.arange(len(states))
    life = np.zeros(len(states), dtype=np.int64)
    found: list[tuple[IntArray, Played]] = []
    longest = horizon
    if gamma < 1:
        longest = 1 if gamma == 0 else min(horizon, 1 + int(np.log(_NEGLIGIBLE) / np.log(gamma)))
    while episode.size and len(found) < longest:
        rows = np.arange(episode.size)
        chances = probs(states)
        luck = rng.random((2, len(life)))[:, episode]  # the same for like episodes of two models
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
    """Mean over the episodes of the discounted sum of rewards, each a mean over the actions."""
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


@dataclass(frozen=True, eq=False)
class ValueFeatures:
    """φ(s, t): products of z and random cosines of z; z is the standardised state and time left.

    Zero when no time is left.

    Args:
        centre: (d,) of the states.
        scale: (d,) of the states.
        horizon: longest possible episode.
        degree: of the products.
        waves: (cosines, d + 1) directions of the cosines.
        phases: (cosines,).
    """

    centre: FloatArray
    scale: FloatArray
    horizon: int
    degree: int
    waves: NDArray[np.float32]
    phases: NDArray[np.float32]

    @classmethod
    def around(
        cls,
        states: FloatArray,
        horizon: int,
        degree: int,
        cosines: int,
        rng: np.random.Generator,
        metric: FloatArray | None = None,
    ) -> ValueFeatures:
        """Features for `states`; a metric (d + 1, d + 1) stretches the directions that matter."""
        if metric is None:
            metric = np.eye(states.shape[1] + 1) / _WIDTH
        waves = rng.standard_normal((cosines, states.shape[1] + 1)) @ metric.T
        phases = rng.uniform(0.0, 2 * np.pi, cosines)
        scale = states.std(axis=0)
        return cls(
            states.mean(axis=0),
            np.where(scale > 0, scale, 1.0),
            horizon,
            degree,
            waves.astype(np.float32),
            phases.astype(np.float32),
        )

    def __call__(self, states: FloatArray, times: IntArray) -> NDArray[np.float32]:
        """(F, n): a row a feature, which is faster."""
        out = self.of(self.coordinates(states, times))
        out[:, times >= self.horizon] = 0.0
        return out

    def coordinates(self, states: FloatArray, times: IntArray) -> NDArray[np.float32]:
        """(d + 1, n) z."""
        z = np.empty((states.shape[1] + 1, len(states)), dtype=np.float32)
        z[:-1] = np.clip((states - self.centre) / self.scale, -_CLIP, _CLIP).T
        z[-1] = 2.0 * (self.horizon - times) / self.horizon - 1.0
        return z

    def of(self, z: NDArray[np.float32]) -> NDArray[np.float32]:
        """(F, n) features of coordinates."""
        products = monomials(z.T, self.degree).T
        out = np.empty((len(products) + len(self.phases), z.shape[1]), dtype=np.float32)
        out[: len(products)] = products
        angles = out[len(products) :]
        np.matmul(self.waves, z, out=angles)
        angles += self.phases[:, None]
        np.cos(angles, out=angles)
        return out


def learn_metric(
    features: ValueFeatures, theta: FloatArray, states: FloatArray, times: IntArray
) -> FloatArray:
    """(d + 1, d + 1) root of the mean of ∇V ∇V', scaled to mean square 1 in every direction.

    V changes fast along its large directions: cosines stretched by it spend their waves there.
    """
    z = features.coordinates(states, times)
    shifts = _SHIFT * np.eye(len(z), dtype=np.float32)[:, :, None]
    slopes = np.stack([theta @ (features.of(z + e) - features.of(z - e)) for e in shifts])
    size, axes = np.linalg.eigh(slopes @ slopes.T)
    if not size[-1] > 0:
        return np.eye(len(z))
    root = (axes * np.sqrt(np.maximum(size, 1e-9 * size[-1]))) @ axes.T
    return np.asarray(root * np.sqrt(len(size)) / np.linalg.norm(root))


def fit_value(
    model: TransitionModel,
    features: ValueFeatures,
    played: list[Played],
    *,
    gamma: float,
    rows: int,
    rng: np.random.Generator,
    luck_out: bool = True,
) -> FloatArray:
    """(F,) θ by least squares of y on x over about `rows` played steps and all first ones.

    First steps at time 0 together weigh half as much as all others, since the value is theirs.

    Args:
        model: where they were played.
        features: φ.
        played: episodes.
        gamma: discount.
        rows: played steps to fit to.
        rng: chooses them.
        luck_out: False for x = φ: cheap, but as noisy as returns are.
    """
    total = sum(len(step.times) for step in played)
    share = min(1.0, rows / total)
    start = played[0].times == 0
    heavy = max(1.0, 0.5 * share * total / max(int(np.count_nonzero(start)), 1))
    size = features(played[0].states[:1], played[0].times[:1]).shape[0]
    y = np.zeros(start.size)
    luck = np.zeros((size, start.size), dtype=np.float32)
    square, product, mass = np.zeros((size, size)), np.zeros(size), 0.0
    for u in range(len(played) - 1, -1, -1):
        step = played[u]
        m = len(step.times)
        y[:m] = gamma * y[:m] + step.rewards
        if luck_out:
            following, _, ending = model.step(step.states)
            part = -gamma * step.probs.T * (1.0 - ending)  # (A, m)
            part[step.actions, np.arange(m)] += gamma * ~step.ended
            luck[:, :m] *= np.float32(gamma)
            for factor, states in zip(part.astype(np.float32), following, strict=True):
                phi = features(states, step.times + 1)
                phi *= factor
                luck[:, :m] += phi
        chosen = np.flatnonzero(rng.random(m) < share) if u else np.arange(m)
        if not chosen.size:
            continue
        x = features(step.states[chosen], step.times[chosen]) + luck[:, chosen]
        weight = np.where(start, heavy, 1.0) if u == 0 else np.ones(chosen.size)
        weighted = x * weight.astype(np.float32)
        square += weighted @ x.T
        product += weighted @ y[chosen].astype(np.float32)
        mass += float(weight.sum())
    penalty = np.full(size, _RIDGE * mass)
    penalty[0] *= 1e-6  # the level of V is free
    return np.asarray(np.linalg.solve(square + np.diag(penalty), product))
