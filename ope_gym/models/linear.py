"""LinearQ: fitted Q evaluation with linear features, in closed form, one pass for all folds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import SAMPLES, checked_fold
from ope_gym.models.features import Learned, Map, Polynomial
from ope_gym.policies.closed_form import FinitePolicy, Policy
from ope_gym.policies.inputs import choices

NUMBERS = 1 << 22  # in the largest array of a block
WIDEST = 4000  # features times actions
_LARGEST_LOG_WEIGHT = 3.0


@dataclass(frozen=True)
class LinearQ:
    """Linear fitted Q evaluation: q(s, a, t) = phi(s, t)·theta_a solves the projected equation.

        A theta = b,   A = sum_t w_t phi_t (phi_t - gamma E_pi phi_{t+1})' + penalty
                       b = sum_t w_t r_t phi_t

    the sums over recorded steps, with phi = 0 after an end (LSTD-Q). The features are those of the
    observation times 1, u, ..., u^time with u the share of the horizon that is left. With
    continuous actions phi is of (observation, action) and the mean over the target is one of 16
    draws. The weights w_t = (prod_{u<=t} pi(a_u|s_u) / mu(a_u|s_u))^nearness, mu who acted, let the
    fit care most for where the target goes; w = 1 where mu is not known.

    Penalty, in units of the features' own squares: `ridge` on theta, and `pull` on what sets the
    actions apart, so that an action hardly ever taken has about the values of the others.

    Cost: one pass, O(steps × actions × d²), and (folds, (actions d)²) memory.
    Use it for Box observations of moderate size. Weakness: a value with edges is smoothed, and
    with gamma = 1 and long episodes errors add up over the steps; the values are cut to what the
    rewards allow. For more, give features, or use NetworkQ.

    Args:
        features: a callable from a batch of observations (of (observations, actions) if actions
            are continuous) to (n, d), or one that learns its scale; Polynomial(2) by default.
        ridge: penalty of all weights.
        pull: penalty of differences between actions.
        time: highest power of the share of the horizon that is left; 0: q does not depend on it.
        nearness: how much more steps near the target count, 0 (all alike) to 1.
    """

    features: Map | Learned | None = None
    ridge: float = 1e-5
    pull: float = 1e-2
    time: int = 3
    nearness: float = 0.35

    def __post_init__(self) -> None:
        for name in ("ridge", "pull", "time"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0")
        if not 0 <= self.nearness <= 1:
            raise ValueError(f"nearness is {self.nearness}: it must be within 0 … 1")
        if not (
            self.features is None or callable(self.features) or hasattr(self.features, "learn")
        ):
            raise TypeError(
                f"features is {self.features!r}: give a callable from a batch to (n, d)"
            )

    def fit(
        self,
        data: Trajectories,
        target: Policy,
        *,
        gamma: float,
        horizon: int,
        rng: np.random.Generator,
    ) -> LinearValues | FiniteLinearValues:
        """The values learned from all episodes."""
        nobody = np.zeros(len(data), dtype=np.int64)
        phi, sums = self._pass(data, nobody, target, gamma, horizon, rng)
        return phi.values(sums.solve(None, self.ridge, self.pull))

    def fit_folds(
        self,
        data: Trajectories,
        fold: IntArray,
        target: Policy,
        *,
        gamma: float,
        horizon: int,
        rng: np.random.Generator,
    ) -> Iterator[LinearValues | FiniteLinearValues]:
        """For each fold the values learned from the others, all from one pass.

        The scale of the features is that of all observations; rewards stay in their folds.
        """
        fold = checked_fold(fold, len(data))
        phi, sums = self._pass(data, fold, target, gamma, horizon, rng)
        return (
            phi.values(sums.solve(k, self.ridge, self.pull)) for k in range(int(fold.max()) + 1)
        )

    def _pass(
        self,
        data: Trajectories,
        fold: IntArray,
        target: Policy,
        gamma: float,
        horizon: int,
        rng: np.random.Generator,
    ) -> tuple[Phi, NormalEquations]:
        features = Polynomial() if self.features is None else self.features
        finite = isinstance(target, FinitePolicy)
        if isinstance(features, Learned):
            batch = data.observations if finite else (data.observations, data.actions)
            features = features.learn(batch)
        some = slice(0, 1)
        actions = (
            target.probs(batches.take(data.observations, some)).shape[1]
            if isinstance(target, FinitePolicy)
            else 0
        )
        phi = Phi(features, target, actions, int(self.time), horizon)
        width = phi.of(data, some).shape[1]
        sums = NormalEquations.empty(int(fold.max()) + 1, max(actions, 1), width)
        weights = near_weights(data, target, self.nearness)
        if not weights.any():  # the target never does what was done
            weights = np.ones(data.n_steps)
        ends = np.zeros(data.n_steps, dtype=np.bool_)
        ends[data.offsets[1:] - 1] = True
        part = fold[data.episode_ids]
        chosen = choices(data.actions, data.n_steps, actions) if actions else np.zeros_like(part)
        block = max(256, NUMBERS // (max(actions, 1) * width))
        for begin in range(0, data.n_steps, block):
            rows = slice(begin, min(begin + block, data.n_steps))
            now = phi.of(data, rows)
            ahead = phi.expected_next(data, rows, ends[rows], now, rng)
            sums.add(now, ahead, gamma, data.rewards[rows], weights[rows], part[rows], chosen[rows])
        return phi, sums


@dataclass(frozen=True)
class Phi:
    """The features of recorded steps; `actions` is 0 where they are continuous."""

    features: Map
    target: Policy
    actions: int
    powers: int
    horizon: int

    def values(self, theta: FloatArray) -> LinearValues | FiniteLinearValues:
        """The q of weights theta (A d,)."""
        kind = FiniteLinearValues if self.actions else LinearValues
        return kind(self, theta.reshape(max(self.actions, 1), -1))

    def __call__(self, batch: Tree, steps: IntArray) -> FloatArray:
        """(n, d) with the powers of the share of the horizon that is left."""
        found = np.asarray(self.features(batch), dtype=np.float64)
        if found.ndim != 2 or found.shape[0] != len(steps):
            raise ValueError(f"features gave shape {found.shape}; expected ({len(steps)}, d)")
        if found.shape[1] * (self.powers + 1) * max(self.actions, 1) > WIDEST:
            raise ValueError(
                f"features gave {found.shape[1]} columns, times {self.powers + 1} powers of time "
                f"and {max(self.actions, 1)} actions: more than {WIDEST} weights to solve for. "
                "Give features= with fewer columns"
            )
        if not np.all(np.isfinite(found)):
            row, column = np.argwhere(~np.isfinite(found))[0].tolist()
            raise ValueError(
                f"features gave {found[row, column]} in row {row}, column {column}: must be finite"
            )
        left = np.maximum(self.horizon - np.asarray(steps), 0) / self.horizon
        return np.hstack([found * (left**power)[:, None] for power in range(self.powers + 1)])

    def of(self, data: Trajectories, rows: slice) -> FloatArray:
        """(n, d) of some recorded steps."""
        seen = batches.take(data.observations, rows)
        batch = seen if self.actions else (seen, batches.take(data.actions, rows))
        return self(batch, data.steps[rows])

    def expected_next(
        self,
        data: Trajectories,
        rows: slice,
        ends: NDArray[np.bool_],
        now: FloatArray,
        rng: np.random.Generator,
    ) -> FloatArray:
        """(n, actions · d) mean over the target of the features of the next step, 0 at an end."""
        n, width = now.shape
        ahead = np.zeros((n, max(self.actions, 1), width))
        on = np.flatnonzero(~ends)
        following = np.arange(rows.start, rows.stop)[on] + 1
        if not on.size:
            return ahead.reshape(n, -1)
        seen, steps = batches.take(data.observations, following), data.steps[following]
        if isinstance(self.target, FinitePolicy):
            probs = self.target.probs(seen)
            ahead[on] = probs[:, :, None] * self(seen, steps)[:, None, :]
        else:
            for _ in range(SAMPLES):
                ahead[on, 0] += self((seen, self.target.sample(seen, rng)), steps) / SAMPLES
        return ahead.reshape(n, -1)


@dataclass(frozen=True)
class NormalEquations:
    """The normal equations by fold.

    Args:
        system: (folds, A d, A d).
        answer: (folds, A d).
        squares: (folds, d) of the features.
    """

    system: FloatArray
    answer: FloatArray
    squares: FloatArray

    @classmethod
    def empty(cls, folds: int, actions: int, width: int) -> NormalEquations:
        """Of no step."""
        size = actions * width
        return cls(np.zeros((folds, size, size)), np.zeros((folds, size)), np.zeros((folds, width)))

    def add(
        self,
        now: FloatArray,
        ahead: FloatArray,
        gamma: float,
        rewards: FloatArray,
        weights: FloatArray,
        part: IntArray,
        chosen: IntArray,
    ) -> None:
        """Add n steps: features (n, d), those of the next step (n, A d), folds and actions (n,)."""
        width = now.shape[1]
        actions = self.answer.shape[1] // width
        group = part * actions + chosen
        order = np.argsort(group, kind="stable")
        bounds = np.searchsorted(group[order], np.arange(self.answer.shape[0] * actions + 1))
        for g in np.flatnonzero(np.diff(bounds)):
            rows = order[bounds[g] : bounds[g + 1]]
            k, own = g // actions, slice(g % actions * width, (g % actions + 1) * width)
            some = now[rows]
            weighted = some * weights[rows, None]
            self.system[k, own, own] += weighted.T @ some
            self.system[k, own] -= gamma * (weighted.T @ ahead[rows])
            self.answer[k, own] += weighted.T @ rewards[rows]
            self.squares[k] += np.einsum("nd,nd->d", weighted, some)

    def solve(self, without: int | None, ridge: float, pull: float) -> FloatArray:
        """(A d,) from all folds but one."""
        keep = np.arange(self.answer.shape[0]) != (-1 if without is None else without)
        width = self.squares.shape[1]
        actions = self.answer.shape[1] // width
        squares = self.squares[keep].sum(axis=0) / actions
        scale = np.tile(1.0 / np.sqrt(np.where(squares > 0, squares, 1.0)), actions)
        system = self.system[keep].sum(axis=0) * scale[:, None] * scale
        apart = np.eye(actions) - 1.0 / actions
        system += np.kron(ridge * np.eye(actions) + pull * apart, np.eye(width))
        answer = self.answer[keep].sum(axis=0) * scale
        try:
            theta = np.linalg.solve(system, answer)
        except np.linalg.LinAlgError:  # features that never differ from 0, without a penalty
            theta = np.linalg.lstsq(system, answer, rcond=None)[0]
        return np.asarray(theta * scale)


@dataclass(frozen=True)
class LinearValues:
    """The fitted q of continuous actions."""

    phi: Phi
    theta: FloatArray  # (A, d); A is 1 for continuous actions

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """(n,)."""
        return np.asarray(self.phi((observations, actions), steps) @ self.theta[0])


class FiniteLinearValues(LinearValues):
    """The fitted q of a finite action set."""

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """(n,) of the chosen actions."""
        chosen = choices(actions, len(steps), len(self.theta))
        return np.asarray(self.q_all(observations, steps)[np.arange(chosen.size), chosen])

    def q_all(self, observations: Tree, steps: IntArray) -> FloatArray:
        """(n, A) of every action."""
        return np.asarray(self.phi(observations, steps) @ self.theta.T)


def near_weights(data: Trajectories, target: Policy, nearness: float) -> FloatArray:
    """(S,) tempered weights of the steps, cut at e^3; 1 where who acted is not known.

    Their scale cancels. All may be 0: `LinearQ` then takes all steps alike.
    """
    if nearness == 0 or np.isnan(data.log_probs).any():
        return np.ones(data.n_steps)
    from ope_gym import kernels

    ratio = np.asarray(target.log_prob(data.observations, data.actions)) - data.log_probs
    total = np.empty(data.n_steps)
    offsets = data.offsets.astype(np.int64, copy=False)
    kernels.cumulate(np.maximum(ratio, -1e6), 0, len(data), offsets, total)
    return np.exp(np.minimum(nearness * total, _LARGEST_LOG_WEIGHT))
