"""Learn how the environment moves from the latest steps, play the policy there, and correct that.

    s' = s + f(s, a),    r = g(s, a) + b 1(end),    P(end | s') = sigma(h(s'))

f and g are polynomials, h is the logit of `ope_gym.models.transitions`. How the environment moves
does not depend on who acts, so all recent steps count, whichever policy took them. Where states are
a few numbers that move smoothly, this is worth more than all episodes of the training.

What the learned environment gets wrong shows in the recorded steps. With v, the value of the policy
there, and hats for what it predicts (the simulation lemma),

    V = V_simulated + E sum_t [r - r_hat + gamma (v(s') - v(s_hat'))]

The bracket compares one recorded step with its prediction, given state and action, so it is right
for steps of any policy, and of those near the one in question the sum is right but for products of
two errors. Where the learned environment is right the sum has no noise; where it is wrong the sum
is large and noisy, and the value counts for little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray
from ope_gym.models.features import Polynomial
from ope_gym.models.transitions import (
    Ending,
    by_action,
    factors,
    fit_ending,
    monomials,
    within,
)
from ope_gym.online.advantages import Advantages, timed, timed_sum
from ope_gym.online.stream import Window, blocks
from ope_gym.policies import FinitePolicy, Policy

_MOST_FEATURES = 84  # of a polynomial: degree 3 of up to six numbers, degree 2 of up to eleven
_EPISODES = 100  # played for a value
_VALUED = 8192  # played steps that v is fitted to
_MARGIN = 0.5  # a state may leave the recorded range by this share of it


@dataclass(frozen=True, eq=False)
class Played:
    """Episodes played in a learned environment, m of them with M steps in all.

    Args:
        returns: (m,).
        states: (M, d).
        step: (M,) number of the step in its episode.
        ahead: (M,) what was paid from this step on.
    """

    returns: FloatArray
    states: FloatArray
    step: NDArray[np.int64]
    ahead: FloatArray


@dataclass(frozen=True, eq=False)
class Simulator:
    """A learned environment; states of d numbers, F features, A blocks of coefficients.

    Args:
        centre: of the inputs: the state, and the action where it is made of real numbers.
        scale: of the inputs.
        degree: of the polynomials.
        coefficients: (F, A (d + 1)) of the increments and the reward, action by action; A is 1 for
            actions of real numbers.
        last: what the reward of an ending step has more.
        low: (d,) least state.
        high: (d,) largest.
        ending: chance of the end; None if no episode terminated.
    """

    centre: FloatArray
    scale: FloatArray
    degree: int
    coefficients: FloatArray
    last: float
    low: FloatArray
    high: FloatArray
    ending: Ending | None

    def play(
        self,
        policy: Policy,
        starts: NDArray[Any],
        *,
        horizon: int,
        gamma: float,
        rng: np.random.Generator,
        bounds: tuple[FloatArray, FloatArray] | None = None,
    ) -> Played:
        """Play episodes from `starts` on; bounds clip actions, as SB3 does."""
        finite, shape = isinstance(policy, FinitePolicy), starts.shape[1:]
        states = starts.reshape(len(starts), -1).astype(np.float64)
        alive = np.arange(len(states))
        pairs, ends = factors(len(self.centre), self.degree), factors(states.shape[1], 2)
        weights = np.ascontiguousarray(self.coefficients.T)
        columns = self._standardised(states)
        seen_states, seen_rewards, seen_who = [], [], []
        for _ in range(horizon):
            seen_states.append(states)
            seen_who.append(alive)
            seen = states.astype(starts.dtype).reshape(-1, *shape)
            actions = np.asarray(policy.sample(seen, rng)).reshape(len(states), -1)
            inputs, taken = columns, actions[:, 0] if finite else 0
            if not finite:
                actions = actions if bounds is None else np.clip(actions, *bounds)
                inputs = np.vstack([columns, self._standardised(actions, states.shape[1])[1:]])
            found = weights @ _products(inputs, pairs)
            states, rewards = self._move(states, found.T, taken)
            columns = self._standardised(states)
            over = np.zeros(len(states), dtype=bool)
            if self.ending is not None:
                chances = self.ending.chances(states, _products(columns, ends).T)
                over = rng.random(len(states)) < chances
                rewards = rewards + self.last * over
            seen_rewards.append(rewards)
            if over.any():
                states, alive, columns = states[~over], alive[~over], columns[:, ~over]
                if not alive.size:
                    break
        paid, ahead = np.zeros(len(starts)), []
        for who, rewards in zip(seen_who[::-1], seen_rewards[::-1], strict=True):
            paid[who] = rewards + gamma * paid[who]
            ahead.append(paid[who])
        step = np.repeat(np.arange(len(seen_who)), [len(who) for who in seen_who])
        return Played(paid, np.concatenate(seen_states), step, np.concatenate(ahead[::-1]))

    def step(
        self, states: FloatArray, actions: NDArray[Any], finite: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Return next states (n, d) and rewards (n,), without what an ending step has more."""
        inputs = states if finite else np.hstack([states, actions])
        features = monomials((inputs - self.centre) / self.scale, self.degree)
        taken = actions[:, 0].astype(np.int64) if finite else 0
        return self._move(states, features @ self.coefficients, taken)

    def _move(
        self, states: FloatArray, found: FloatArray, taken: Any
    ) -> tuple[FloatArray, FloatArray]:
        """Return what `step` does, from the increments and rewards (n, A (d + 1)) of all blocks."""
        chosen = found.reshape(len(states), -1, states.shape[1] + 1)[np.arange(len(states)), taken]
        return within(states + chosen[:, :-1], self.low, self.high), chosen[:, -1]

    def _standardised(self, values: FloatArray, first: int = 0) -> FloatArray:
        """Return a line of 1 and (k, n) standardised values (n, k), inputs from `first` on."""
        columns = np.empty((1 + values.shape[1], len(values)))
        columns[0] = 1.0
        part = slice(first, first + values.shape[1])
        np.subtract(values.T, self.centre[part, None], out=columns[1:])
        columns[1:] /= self.scale[part, None]
        return columns


def _products(columns: FloatArray, pairs: Sequence[tuple[Any, Any]]) -> FloatArray:
    """Return the monomials (F, n) of columns (1 + d, n), 1 first; see `factors`."""
    found = columns
    for i, j in pairs:
        found = found.take(i, axis=0) * columns.take(j, axis=0)
    return found


def learn_simulator(
    columns: dict[str, NDArray[Any]],
    n_actions: int,
    bounds: tuple[FloatArray, FloatArray] | None = None,
) -> Simulator | None:
    """Learn from steps (S, ...); None if states are not a few numbers.

    Args:
        columns: observations, following, actions, rewards, and terminated: the episode ended with
            this step, before its time limit.
        n_actions: how many there are, 0 for real numbers.
        bounds: lowest and highest action, to which the loop clips.
    """
    if columns["observations"].dtype.kind != "f":
        return None
    rows = len(columns["rewards"])
    states = columns["observations"].reshape(rows, -1).astype(np.float64)
    following = columns["following"].reshape(rows, -1).astype(np.float64)
    actions = columns["actions"].reshape(rows, -1)
    inputs = states
    if not n_actions:
        inputs = np.hstack([states, np.clip(actions, *bounds) if bounds else actions])
    width = inputs.shape[1]
    degree = max((k for k in (1, 2, 3) if comb(width + k, k) <= _MOST_FEATURES), default=0)
    if not degree or rows < 4 * comb(width + degree, degree) * max(n_actions, 1):
        return None
    centre, scale = inputs.mean(axis=0), inputs.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    features = monomials((inputs - centre) / scale, degree)
    taken = actions[:, 0].astype(np.int64) if n_actions else np.zeros(rows, dtype=np.int64)
    blocks, ended = max(n_actions, 1), columns["terminated"]
    moves = by_action(features, following - states, taken, blocks)
    go = np.flatnonzero(~ended)
    rewards = by_action(features[go], columns["rewards"][go, None], taken[go], blocks)[:, :, 0]
    low, high = following.min(axis=0), following.max(axis=0)
    room = _MARGIN * (high - low)
    last = 0.0
    if ended.any():
        usual = np.einsum("nf,nf->n", features[ended], rewards[taken[ended]])
        last = float(np.mean(columns["rewards"][ended] - usual))
    d = states.shape[1]
    ending = fit_ending(following, ended, centre[:d], scale[:d]) if ended.any() else None
    both = np.concatenate([moves, rewards[:, :, None]], axis=2)  # (A, F, d + 1)
    coefficients = both.transpose(1, 0, 2).reshape(features.shape[1], -1)
    return Simulator(centre, scale, degree, coefficients, last, low - room, high + room, ending)


@dataclass(frozen=True, eq=False)
class Simulation:
    """The value of a policy in a learned environment.

    Args:
        simulator: the learned environment.
        value: mean return of the played episodes.
        noise: its squared error: the episodes are finitely many.
        v: value of states (n, d) at steps (n,).
        finite: whether there are finitely many actions.
        horizon: time limit.
        gamma: discount.
        bounds: of the actions.
    """

    simulator: Simulator
    value: float
    noise: float
    v: Callable[[FloatArray, NDArray[np.int64]], FloatArray]
    finite: bool
    horizon: int
    gamma: float
    bounds: tuple[FloatArray, FloatArray] | None

    def corrected(self, window: Window) -> Advantages:
        """Return the value with its corrections at each step of a window."""
        names = ("observations", "following", "actions", "rewards", "ended")
        parts = [
            self.wrong({name: getattr(window, name)[part] for name in names}, window.step[part])
            for part in blocks(window.size)
        ]
        wrong = np.concatenate(parts) * self.gamma**window.step
        return Advantages(window, np.stack([wrong, np.zeros_like(wrong)]), self.value)

    def wrong(self, rows: Mapping[str, NDArray[Any]], step: NDArray[np.int64]) -> FloatArray:
        """Return (S,) what the learned environment gets wrong at some steps.

        Args:
            rows: observations, following, actions, rewards and ended, (S, ...) each.
            step: (S,) number of each step in its episode.
        """
        count, simulator = len(step), self.simulator
        states = rows["observations"].reshape(count, -1).astype(np.float64)
        following = rows["following"].reshape(count, -1).astype(np.float64)
        actions = rows["actions"].reshape(count, -1)
        if self.bounds is not None and not self.finite:
            actions = np.clip(actions, *self.bounds)
        predicted, rewards = simulator.step(states, actions, self.finite)
        end = np.zeros(count) if simulator.ending is None else simulator.ending(predicted)
        in_time = step + 1 < self.horizon
        here = np.where(rows["ended"], 0.0, self.v(following, step + 1)) * in_time
        there = (1.0 - end) * self.v(predicted, step + 1) * in_time
        missed = rows["rewards"] - rewards - simulator.last * end
        return np.asarray(missed + self.gamma * (here - there))


def simulate(
    simulator: Simulator,
    policy: Policy,
    starts: NDArray[Any],
    *,
    horizon: int,
    gamma: float,
    rng: np.random.Generator,
    bounds: tuple[FloatArray, FloatArray] | None = None,
) -> Simulation:
    """Play a policy in a learned environment."""
    chosen = starts[rng.integers(len(starts), size=_EPISODES)]
    played = simulator.play(policy, chosen, horizon=horizon, gamma=gamma, rng=rng, bounds=bounds)
    value, noise = played.returns.mean(), played.returns.var(ddof=1) / len(played.returns)
    v, finite = _fit_v(played, horizon, rng), isinstance(policy, FinitePolicy)
    return Simulation(simulator, float(value), float(noise), v, finite, horizon, gamma, bounds)


def _fit_v(
    played: Played, horizon: int, rng: np.random.Generator
) -> Callable[[FloatArray, NDArray[np.int64]], FloatArray]:
    """Return v(states, step), fitted to what the played episodes were paid from each step on."""
    some = rng.integers(len(played.step), size=min(len(played.step), _VALUED))
    features = Polynomial(2 if played.states.shape[1] <= 16 else 1).learn(played.states)
    phi = timed(features(played.states[some]), played.step[some], horizon)
    gram = phi.T @ phi
    gram[np.diag_indices_from(gram)] *= 1.0 + 1e-4
    gram[np.diag_indices_from(gram)] += 1e-9 * np.trace(gram)
    theta = np.asarray(np.linalg.solve(gram, phi.T @ played.ahead[some]), dtype=np.float64)
    low, high = played.ahead.min(), played.ahead.max()

    def v(states: FloatArray, step: NDArray[np.int64]) -> FloatArray:
        return np.asarray(np.clip(timed_sum(features(states), step, horizon, theta), low, high))

    return v
