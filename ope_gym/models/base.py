"""What a Q model is, and its values on recorded steps: cross-fitted, clipped, v from the same q.

A Q model learns q(s, a, t), the expected return of the target from step t on, from recorded
episodes. Doubly robust estimators subtract it from the rewards; the direct method (DM) is its mean
at the start. An episode that ends, by itself or at the time limit, pays nothing afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies.closed_form import FinitePolicy, Policy
from ope_gym.weights.reward_model import folds_within

FOLDS = 5
SAMPLES = 16  # actions drawn from the target for v where actions are continuous
_ROWS = 1 << 16  # steps evaluated at once


@runtime_checkable
class ActionValues(Protocol):
    """A fitted q."""

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """(n,) expected return of the target from step `steps` on, after `actions`."""
        ...


@runtime_checkable
class QModel(Protocol):
    """A way to learn q. It may also offer `fit_folds`, and its values `q_all(observations, steps)`.

    `fit_folds(data, fold, target, *, gamma, horizon, rng)` returns for each fold 0, 1, ... the
    values learned from all episodes outside of it; `fold` is (n,).
    """

    def fit(
        self,
        data: Trajectories,
        target: Policy,
        *,
        gamma: float,
        horizon: int,
        rng: np.random.Generator,
    ) -> ActionValues:
        """Learn from all episodes of `data`; an episode lasts at most `horizon` steps."""
        ...


@dataclass(frozen=True, eq=False)
class Baseline:
    """A Q model's values on the recorded steps.

    Args:
        q: (S,) of the action taken.
        v: (S,) mean of q over the target's actions, from the same clipped q.
    """

    q: FloatArray
    v: FloatArray

    def at_start(self, offsets: IntArray) -> FloatArray:
        """(n,) v at the first step of each episode."""
        return self.v[offsets[:-1]]

    def residuals(self, rewards: FloatArray, offsets: IntArray, gamma: float) -> FloatArray:
        """(S,) e_t = r_t - q_t + gamma v_{t+1}, with v = 0 after the end.

        The doubly robust estimate is the mean of v at the start plus the weighted estimate of e
        in the place of r: sum_t gamma^t [w_t (r_t - q_t) + w_{t-1} v_t] sorted by weight.
        """
        following = np.append(self.v[1:], 0.0)
        following[offsets[1:] - 1] = 0.0
        return np.asarray(rewards - self.q + gamma * following)


def cross_fit(
    model: QModel,
    data: Trajectories,
    target: Policy,
    groups: IntArray,
    *,
    gamma: float,
    horizon: int,
    rng: np.random.Generator,
    folds: int = FOLDS,
) -> Baseline:
    """The values at each episode, learned from the other folds; folds are cut inside groups.

    Args:
        model: what learns.
        data: recorded episodes.
        target: the policy to evaluate.
        groups: (n,) behaviour of each episode.
        gamma: discount.
        horizon: longest possible episode.
        rng: of the learner, and of the target's continuous actions.
        folds: how many; fewer where there are fewer episodes.
    """
    folds = min(folds, len(data))
    if folds < 2:
        raise ValueError("a Q model needs at least 2 episodes: it learns from one to judge another")
    fold = folds_within(groups, folds)
    if hasattr(model, "fit_folds"):
        fitted = model.fit_folds(data, fold, target, gamma=gamma, horizon=horizon, rng=rng)
    else:
        fitted = (
            model.fit(
                data.select(episodes=np.flatnonzero(fold != k)),
                target,
                gamma=gamma,
                horizon=horizon,
                rng=rng,
            )
            for k in range(folds)
        )
    q, v = np.empty(data.n_steps), np.empty(data.n_steps)
    part = fold[data.episode_ids]
    annuity = np.append(0.0, np.cumsum(gamma ** np.arange(horizon)))
    for k, values in enumerate(fitted):
        rows, others = np.flatnonzero(part == k), data.rewards[part != k]
        # returns from a step on, if rewards stay within those of the other episodes (and 0)
        low, high = min(float(others.min()), 0.0) * annuity, max(float(others.max()), 0.0) * annuity
        for begin in range(0, rows.size, _ROWS):
            some = rows[begin : begin + _ROWS]
            q[some], v[some] = values_at(values, data, target, some, (low, high), rng)
    return Baseline(q, v)


def values_at(
    values: ActionValues,
    data: Trajectories,
    target: Policy,
    rows: IntArray,
    bounds: tuple[FloatArray, FloatArray],
    rng: np.random.Generator,
) -> tuple[FloatArray, FloatArray]:
    """The q and v of some rows, both from q clipped to the bounds by the number of steps left."""
    observations, actions = batches.take(data.observations, rows), batches.take(data.actions, rows)
    steps = data.steps[rows]
    left = np.maximum(bounds[0].size - 1 - steps, 1)
    low, high = bounds[0][left], bounds[1][left]
    if isinstance(target, FinitePolicy):
        probs = target.probs(observations)
        everything = np.clip(
            q_all(values, observations, steps, probs.shape[1]), low[:, None], high[:, None]
        )
        chosen = np.asarray(actions, dtype=np.int64).reshape(-1, 1)
        q = np.take_along_axis(everything, chosen, axis=1)[:, 0]
        v = np.einsum("na,na->n", probs, everything)
    else:
        q = np.clip(values.q(observations, actions, steps), low, high)
        v = np.zeros(rows.size)
        for _ in range(SAMPLES):
            drawn = target.sample(observations, rng)
            v += np.clip(values.q(observations, drawn, steps), low, high)
        v /= SAMPLES
    if not (np.all(np.isfinite(q)) and np.all(np.isfinite(v))):
        row = int(rows[np.flatnonzero(~(np.isfinite(q) & np.isfinite(v)))[0]])
        episode = int(data.episode_ids[row])
        raise ValueError(
            f"q_model gave a value that is not finite at episode {episode}, step "
            f"{int(data.steps[row])}: check its features, or take another model"
        )
    return q, v


def q_all(values: ActionValues, observations: Tree, steps: IntArray, actions: int) -> FloatArray:
    """(n, A) q of every action."""
    own = getattr(values, "q_all", None)
    if own is not None:
        return np.asarray(own(observations, steps), dtype=np.float64)
    return np.stack(
        [values.q(observations, np.full(steps.size, a), steps) for a in range(actions)], axis=1
    )


def checked_fold(fold: IntArray, episodes: int) -> IntArray:
    """The folds that a `fit_folds` was given: one of 0, 1, ... an episode, at least two of them."""
    found = np.asarray(fold)
    if found.shape != (episodes,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"fold has shape {found.shape} and dtype {found.dtype}: {episodes} episodes need "
            f"({episodes},) whole numbers"
        )
    if found.min() < 0 or np.unique(found).size < max(2, int(found.max()) + 1):
        raise ValueError(
            f"fold has the numbers {np.unique(found).tolist()}: give 0, 1, ..., each at least once"
        )
    return found.astype(np.int64)
