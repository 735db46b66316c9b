"""Learn how the environment moves from recorded steps, and play policies in what was learned.

    s' = s + f_a(s),    r = g_a(s) + b 1(end),    P(end | s', a) = σ(h(s') + c_a)

f_a and g_a are polynomials of the standardised state, one for each action, by least squares; where
actions are real numbers, there is one polynomial of state and action. How the environment moves
does not depend on who acts, so the steps of all policies count alike. b is what the reward of an
ending step has more than that of others. h is a polynomial of degree 2 of the next state and high
powers of each of its numbers, on either side of the middle, by logistic regression. The powers are
for limits: where any of several numbers ends the episode, a quadric rounds the corners off, and
what it cannot express becomes a chance to end anywhere. An episode cut off by a time limit did not
end by itself. Only the mean of the increment is learned: the noise of the transitions is not.

    environment = learn(steps, degree=3)
    played = environment.play(sampling(policy, observations, rng), starts, horizon=500, rng=rng)
    played.returns.mean(), played.states

`learn` takes any degree, so an environment can be compared with one of a degree less; `play` takes
any rule from states to actions, so a policy can be played without chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.models.features import monomials
from ope_gym.policies.acting import ActingPolicy, count_actions

_RCOND = 1e-7  # relative size of singular values that are noise
_WELL = 1e-6  # ratio of eigenvalues from which normal equations are solved to nine digits
_ENDING_DEGREE = 2
_OUTSIDE = 1.05  # where places in the range are clipped: high powers would extrapolate wildly
_ENDING_RIDGE = 1e-4  # penalty of squared coefficients, which keeps a sharp edge finite
_NEWTON = 40
_NEAR, _FAR = 3072, 1024  # steps without an end from which ends are learned, near ones and others
_ROUGH = 8  # Newton steps to tell these apart
_MARGIN = 0.5  # a predicted state may leave the recorded range by this share of it
_NEGLIGIBLE = 1e-6  # discount below which a played episode stops

ActionRule: TypeAlias = Callable[[FloatArray], NDArray[Any]]
"""From states (m, d) to actions (m,), or (m, k) if real."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Recorded steps as an environment is learned from them.

    Args:
        states: (S, d).
        following: (S, d) next states; the state itself where the next one was not recorded.
        known: (S,) whether it was recorded.
        actions: (S,) numbers 0 … A-1, or (S, k) real numbers.
        rewards: (S,).
        terminated: (S,) whether the episode ended by itself with this step.
        n_actions: A; 0 for real numbers.
    """

    states: FloatArray
    following: FloatArray
    known: NDArray[np.bool_]
    actions: NDArray[Any]
    rewards: FloatArray
    terminated: NDArray[np.bool_]
    n_actions: int

    @property
    def width(self) -> int:
        """Number of inputs: those of a state, and of an action where it is made of real numbers."""
        return int(self.states.shape[1] + (0 if self.n_actions else self.actions.shape[1]))


@dataclass(frozen=True, eq=False)
class Played:
    """Episodes played in a learned environment, m of them with M steps, in the order of play.

    Args:
        returns: (m,) discounted from the first played step on.
        episodes: (M,) number of each step's episode.
        states: (M, d).
        times: (M,) number of the step in its episode.
        actions: (M,), or (M, k) if real.
        ended: (M,) whether the episode ended by itself with this step.
        ahead: (M,) discounted rewards from this step on.
    """

    returns: FloatArray
    episodes: IntArray
    states: FloatArray
    times: IntArray
    actions: NDArray[Any]
    ended: NDArray[np.bool_]
    ahead: FloatArray

    def longest_first(self) -> list[IntArray]:
        """Return the rows of each step of play, those of longer episodes first.

        Episodes that go on are then the first ones of the step before.
        """
        life = np.bincount(self.episodes)
        rank = np.empty_like(life)
        rank[np.argsort(-life, kind="stable")] = np.arange(life.size)
        going = np.bincount(life)[:0:-1].cumsum()[::-1]  # episodes that last to each step
        rows = np.split(np.arange(self.episodes.size), going.cumsum()[:-1])
        return [some[np.argsort(rank[self.episodes[some]])] for some in rows]


@dataclass(frozen=True, eq=False)
class Ending:
    """The chance that an episode ends at a state.

    Args:
        centre: (d,) of the states.
        scale: (d,) of the states.
        middle: (d,) of the recorded range.
        half: (d,) half the recorded range, above 0.
        weights: (E,) coefficients of the logit.
        offsets: (A,) of the logit, by the action that led to the state; 0 if it does not matter.
    """

    centre: FloatArray
    scale: FloatArray
    middle: FloatArray
    half: FloatArray
    weights: FloatArray
    offsets: FloatArray

    def __call__(self, following: FloatArray, taken: IntArray | int = 0) -> FloatArray:
        """Return the chances (n,) at states (n, d) that actions led to."""
        logit = self.features(following) @ self.weights + self.offsets[taken]
        return _sigmoid(logit)

    def features(self, following: FloatArray) -> FloatArray:
        """Return the inputs (n, E) of the logit."""
        place = _within((following - self.middle) / self.half, -_OUTSIDE, _OUTSIDE).T
        z = (following - self.centre) / self.scale
        d, smooth = len(place), monomials(z.T, _ENDING_DEGREE)
        columns = np.empty((len(smooth) + 4 * d, len(following)))
        columns[: len(smooth)] = smooth
        eighth, sixteenth = columns[len(smooth) : -2 * d], columns[-2 * d :]
        np.maximum(place, 0.0, out=eighth[:d])
        np.minimum(place, 0.0, out=eighth[d:])
        for _ in range(3):
            np.multiply(eighth, eighth, out=eighth)  # faster than **
        np.multiply(eighth, eighth, out=sixteenth)
        return columns.T


@dataclass(frozen=True, eq=False)
class Environment:
    """A learned environment; states of d numbers, F monomials, A actions (1 if they are real).

    Args:
        centre: Centre of the inputs: the state, and the action where it is made of real numbers.
        scale: Scale of the inputs; 1 where they never differ.
        degree: Degree of the polynomials.
        coefficients: (A, d + 1, F) of the increments and the reward.
        terminal_bonus: extra reward of a terminal step.
        low: (d,) least state that a prediction may reach.
        high: (d,) largest.
        ending: the chance of the end; None if no episode terminated.
    """

    centre: FloatArray
    scale: FloatArray
    degree: int
    coefficients: FloatArray
    terminal_bonus: float
    low: FloatArray
    high: FloatArray
    ending: Ending | None

    def step(
        self, states: FloatArray, actions: NDArray[Any]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return next states (n, d), rewards (n,) and chances of the end (n,) after some actions.

        Rewards are those of steps that do not end the episode, see `terminal_bonus`.
        """
        taken: Any = actions if actions.ndim == 1 else 0
        rows = np.arange(len(states))
        changes = self._changes(states, actions)[taken, :, rows]
        following = self._moved(states, changes[:, :-1])
        return following, changes[:, -1], self._ends(following, taken)

    def outcomes(self, states: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return what `step` does, (A, n, d), (A, n) and (A, n), after each of A actions."""
        changes = self._changes(states)
        actions, rows = len(changes), len(states)
        following = self._moved(states, changes[:, :-1].swapaxes(1, 2))
        taken = np.repeat(np.arange(actions), rows)
        ends = self._ends(following.reshape(actions * rows, -1), taken)
        return following, changes[:, -1], ends.reshape(actions, rows)

    def play(
        self,
        act: ActionRule,
        starts: FloatArray,
        *,
        horizon: int,
        rng: np.random.Generator,
        gamma: float = 1.0,
        times: IntArray | None = None,
    ) -> Played:
        """Play episodes from `starts` (m, d) on, all at once.

        Next states and rewards are the means, ends are drawn.

        Args:
            act: how actions are chosen.
            starts: first states.
            horizon: time limit.
            rng: source of the ends.
            gamma: discount.
            times: (m,) number of the first step in its episode; 0 by default.
        """
        states, alive = starts, np.arange(len(starts))
        clock = np.zeros(len(starts), dtype=np.int64) if times is None else times
        parts, paid = [], []
        for _ in range(_longest(horizon, gamma)):
            actions = act(states)
            following, rewards, ends = self.step(states, actions)
            ended = np.zeros(alive.size, dtype=np.bool_)
            if self.ending is not None:
                ended = rng.random(alive.size) < ends
                rewards = rewards + self.terminal_bonus * ended
            parts.append((alive, states, clock, actions, ended))
            paid.append(rewards)
            on = ~ended & (clock + 1 < horizon)
            states, alive, clock = following[on], alive[on], clock[on] + 1
            if not alive.size:
                break
        returns, ahead = np.zeros(len(starts)), []
        for (who, *_), rewards in zip(parts[::-1], paid[::-1], strict=True):
            returns[who] = rewards + gamma * returns[who]
            ahead.append(returns[who])
        columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
        episodes, visited, numbers, taken, over = columns
        return Played(returns, episodes, visited, numbers, taken, over, np.concatenate(ahead[::-1]))

    def _changes(self, states: FloatArray, actions: NDArray[Any] | None = None) -> FloatArray:
        """Return increments and rewards (A, d + 1, n) of the blocks of all actions."""
        real = actions is not None and actions.ndim > 1
        inputs = np.hstack([states, actions]) if real else states  # type: ignore[list-item]
        features = monomials(((inputs - self.centre) / self.scale).T, self.degree)
        weights = self.coefficients.reshape(-1, len(features))
        return (weights @ features).reshape(*self.coefficients.shape[:2], -1)

    def _moved(self, states: FloatArray, increments: FloatArray) -> FloatArray:
        return _within(states + increments, self.low, self.high)

    def _ends(self, following: FloatArray, taken: Any) -> FloatArray:
        return np.zeros(len(following)) if self.ending is None else self.ending(following, taken)


def sampling(
    policy: ActingPolicy,
    like: NDArray[Any],
    rng: np.random.Generator,
    bounds: tuple[FloatArray, FloatArray] | None = None,
) -> ActionRule:
    """Return the rule that draws a policy's actions.

    Args:
        policy: the policy to play.
        like: (n, ...) recorded observations; the policy is shown states of their shape and type.
        rng: source of the actions.
        bounds: lowest and highest action, to which real numbers are clipped.
    """
    finite = count_actions(policy, like) > 0

    def act(states: FloatArray) -> NDArray[Any]:
        seen = states.astype(like.dtype).reshape(-1, *like.shape[1:])
        actions = np.asarray(policy.sample(seen, rng)).reshape(len(states), -1)
        if finite:
            return actions[:, 0]
        return actions if bounds is None else np.clip(actions, *bounds)

    return act


def learn(steps: Steps, degree: int, *, ends_by_action: bool = False) -> Environment:
    """Learn from recorded steps; an action never seen takes what all others do on average.

    Args:
        steps: Steps to learn from.
        degree: Degree of the polynomials.
        ends_by_action: whether an action may end an episode wherever it leads.
    """
    inputs = steps.states if steps.n_actions else np.hstack([steps.states, steps.actions])
    centre, scale = inputs.mean(axis=0), inputs.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    features = monomials(((inputs - centre) / scale).T, degree).T
    actions, rows, d = max(steps.n_actions, 1), len(features), steps.states.shape[1]
    taken = steps.actions if steps.n_actions else np.zeros(rows, dtype=np.int64)
    moves = by_action(features, steps.following - steps.states, taken, actions, steps.known)
    # the reward of a step that goes on, where there are enough of them to learn it
    on = ~steps.terminated
    on = on if np.count_nonzero(on) >= features.shape[1] else np.ones_like(on)
    rewards = by_action(features, steps.rewards[:, None], taken, actions, on)
    last = ~on
    usual = np.einsum("nf,nf->n", features[last], rewards[taken[last], :, 0])
    bonus = float(np.mean(steps.rewards[last] - usual)) if last.any() else 0.0
    low, high = steps.following.min(axis=0), steps.following.max(axis=0)
    room = _MARGIN * (high - low)
    coefficients = np.concatenate([moves, rewards], axis=2).swapaxes(1, 2)
    environment = Environment(
        centre, scale, degree, coefficients.copy(), bonus, low - room, high + room, None
    )
    if not steps.terminated.any():
        return environment
    following, hidden = steps.following, ~steps.known
    if hidden.any():
        following = following.copy()
        following[hidden] = environment.step(steps.states[hidden], steps.actions[hidden])[0]
    by = taken if ends_by_action else None
    span = low, high
    ending = fit_ending(following, steps.terminated, centre[:d], scale[:d], span, by, actions)
    return replace(environment, ending=ending)


def by_action(
    features: FloatArray,
    values: FloatArray,
    taken: IntArray,
    actions: int,
    used: NDArray[np.bool_],
) -> FloatArray:
    """Return coefficients (A, F, k) of the least squares of values (n, k) for each action.

    The difference from the fit to all actions has the least norm, so few steps say little.

    Args:
        features: (n, F).
        values: (n, k).
        taken: (n,) actions.
        actions: A.
        used: (n,) the rows to fit to.
    """
    common: FloatArray = np.zeros((features.shape[1], values.shape[1]))
    counts = np.bincount(taken[used], minlength=actions)
    if counts.min() < features.shape[1] and counts.any():
        common = _least_squares(features[used], values[used])
    coefficients = np.repeat(common[None], actions, axis=0)
    for a in np.flatnonzero(counts):
        rows = np.flatnonzero(used & (taken == a))
        x = features[rows]
        coefficients[a] += _least_squares(x, values[rows] - x @ common)
    return coefficients


def _least_squares(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return the coefficients of least norm; normal equations are faster where they are exact."""
    gram = x.T @ x
    sizes = np.linalg.eigvalsh(gram)
    if sizes[0] > _WELL * sizes[-1]:
        return np.asarray(np.linalg.solve(gram, x.T @ y))
    return np.asarray(np.linalg.lstsq(x, y, rcond=_RCOND)[0], dtype=np.float64)


def fit_ending(
    following: FloatArray,
    ended: NDArray[np.bool_],
    centre: FloatArray,
    scale: FloatArray,
    span: tuple[FloatArray, FloatArray],
    taken: IntArray | None = None,
    actions: int = 1,
) -> Ending:
    """Learn where episodes end from the states after each step.

    Of many steps that did not end, those count that came near the end, by a rough first fit; a few
    at random stand for all others, with the outermost states, which hold the polynomial down where
    no episode ended.

    Args:
        following: (n, d) the states.
        ended: (n,) whether the episode ended there.
        centre: (d,) of the states.
        scale: (d,) of the states.
        span: (d,) least and largest of the recorded states; not of predicted ones.
        taken: (n,) actions that led there; None if they do not matter.
        actions: how many there are.
    """
    low, high = span
    half = np.where(high > low, (high - low) / 2, 1.0)
    ending = Ending(centre, scale, (low + high) / 2, half, np.empty(0), np.zeros(actions))
    x = ending.features(following)
    width = x.shape[1]
    if taken is not None:
        x = np.hstack([x, taken[:, None] == np.arange(actions)])
    over, on = np.flatnonzero(ended), np.flatnonzero(~ended)
    counts = np.ones(len(x))
    if on.size > _NEAR + _FAR:
        rng = np.random.default_rng(0)  # every fourth step would be of every fourth environment
        rough = np.append(over, rng.choice(on, _FAR, replace=False))
        guess = _logistic(x[rough], ended[rough], newton=_ROUGH)
        on = on[np.argsort(x[on] @ guess)]
        far = rng.choice(on[:-_NEAR], _FAR, replace=False)
        counts[far] = (on.size - _NEAR) / _FAR
        outermost = np.append(following.argmin(axis=0), following.argmax(axis=0))
        kept = np.unique(np.concatenate([over, on[-_NEAR:], far, outermost]))
        x, ended, counts = x[kept], ended[kept], counts[kept]
    weights = _logistic(x, ended, counts)
    offsets = ending.offsets if taken is None else weights[width:]
    return replace(ending, weights=weights[:width], offsets=offsets)


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
    return np.asarray(1.0 / (1.0 + np.exp(-_within(logit, -40.0, 40.0))))


def _within(values: FloatArray, low: FloatArray | float, high: FloatArray | float) -> FloatArray:
    """Return values between low and high, as np.clip does; for small arrays it is faster."""
    return np.asarray(np.minimum(np.maximum(values, low), high))


def _longest(horizon: int, gamma: float) -> int:
    """Return the number of steps after which nothing counts."""
    if gamma in (0.0, 1.0):
        return horizon if gamma else 1
    return min(horizon, 1 + int(math.log(_NEGLIGIBLE) / math.log(gamma)))
