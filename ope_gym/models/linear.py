"""LinearQ: fitted Q evaluation with linear features, in closed form, for all folds in one pass.

Why a linear solve is enough. The values of the target satisfy q = r + gamma E_pi q(next). With
q = phi·theta, ask that the error of this equation be uncorrelated with the features:

    sum_t w_t phi_t (phi_t·theta - r_t - gamma E_pi phi_{t+1}·theta) = 0

which is linear in theta (LSTD-Q, the fixed point of fitted Q evaluation). Both sides are sums over
steps, and what a fold may learn from is the sum over all other folds. So the sums can be gathered
chunk by chunk, by several processes, and merged; episodes in memory are the case of one chunk:

    survey = FeatureSurvey(model, target)
    for chunk in chunks:
        survey.update(chunk)                              # first pass: the scale of the features
    equations = survey.equations(gamma=gamma, horizon=horizon, folds=folds)
    for chunk in chunks:
        equations.update(chunk, fold)                     # second pass: the sums, by fold
    fitted = equations.cross_fitted()
    baseline = fitted.of(chunk, fold)                     # q and v of the steps of any chunk

where `fold` (n,) holds the folds of the chunk's episodes. Other processes begin with an empty
`FeatureSurvey(model, target)` or `survey.equations(...)`, and `merge(other)` adds what they have
gathered. Memory is that of the sums and of one chunk. Two things need all episodes in one chunk:
continuous actions, because the mean over the target is estimated by draws, which would depend on
the chunks, and features that learn more than a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import (
    CrossFitted,
    Problem,
    bounds_of_others,
    checked_fold,
    of_chosen,
    reward_bounds,
)
from ope_gym.models.features import ColumnSums, Learned, Map, Phi, Polynomial, Scaled
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.numerics import choices
from ope_gym.weights.answers import Answers

NUMBERS = 1 << 22  # elements of the largest temporary array
_CACHED = 1 << 19  # of one that is read again at once and should stay in the cache
MOST_NUMBERS = 64  # in an observation, for a default
WIDEST = 4000  # weights to solve for: features times powers of time times actions
_LARGEST_LOG_WEIGHT = 3.0


@dataclass(frozen=True)
class LinearQ:
    """Linear fitted Q evaluation: q(s, a, t) = phi(s, t)·theta_a solves the projected equation.

        A theta = b,   A = sum_t w_t phi_t (phi_t - gamma E_pi phi_{t+1})' + penalty
                       b = sum_t w_t r_t phi_t

    the sums over recorded steps, with phi = 0 after an end (LSTD-Q). The features are those of the
    observation times 1, u, ..., u^time with u the share of the horizon that is left. With
    continuous actions phi is a function of (observation, action) and the mean over the target that
    of 16 draws. The weights w_t = (prod_{u<=t} pi(a_u|s_u) / mu(a_u|s_u))^nearness, with the
    behaviour policy mu, make the fit most accurate where the target goes; w = 1 if mu is unknown.

    Penalty, in units of the features' own squares: `ridge` on theta, and `pull` on what sets the
    actions apart, so that an action hardly ever taken has about the values of the others.

    Cost: one pass, O(steps × actions × d²), and (folds, (actions d)²) memory.
    Use it for Box observations of moderate size. Weakness: a value with edges is smoothed, and
    with gamma = 1 and long episodes errors add up over the steps; the values are clipped to what
    the rewards allow. For more flexibility give features, or use NetworkQ.

    Args:
        features: a callable from a batch of observations (of (observations, actions) if actions
            are continuous) to (n, d), or one that learns its scale; Polynomial(2) by default.
        ridge: penalty of all weights.
        pull: penalty of differences between actions.
        time: highest power of the share of the horizon that is left; 0: q does not depend on it.
        nearness: how much more steps count that the target would reach, 0 (all equally) to 1.
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

    def fit(self, data: Trajectories, problem: Problem) -> LinearValues | FiniteLinearValues:
        """Return the values learned from all episodes."""
        nobody = np.zeros(len(data), dtype=np.int64)
        return self._gather(data, nobody, problem).values(None)

    def fit_folds(
        self, data: Trajectories, fold: IntArray, problem: Problem
    ) -> Iterator[LinearValues | FiniteLinearValues]:
        """Return for each fold the values learned from the others, then those learned from all.

        The scale of the features is that of all observations; rewards stay in their folds.
        """
        fold = checked_fold(fold, len(data))
        equations = self._gather(data, fold, problem)
        return (equations.values(k) for k in [*range(int(fold.max()) + 1), None])

    def _gather(self, data: Trajectories, fold: IntArray, problem: Problem) -> NormalEquations:
        survey = FeatureSurvey(self, problem.target)
        survey.update(data)
        found = survey.equations(
            gamma=problem.gamma, horizon=problem.horizon, folds=int(fold.max()) + 1
        )
        found.update(data, fold, problem.rng, problem.answers)
        return found


@dataclass
class FeatureSurvey:
    """Gather what must be known before the normal equations can be summed.

    Args:
        model: the model to fit.
        target: the policy to evaluate.
        scale: of the columns, for features that ask for no more.
        learned: the map, for features that ask for more.
        known: whether the probabilities of all recorded actions are known.
        example: the first recorded step, (observations, actions); None before the first chunk.
    """

    model: LinearQ
    target: Policy
    scale: ColumnSums = field(default_factory=ColumnSums)
    learned: Map | None = None
    known: bool = True
    example: tuple[Tree, Tree] | None = None

    def update(self, data: Trajectories) -> None:
        """Add a chunk of whole episodes."""
        if not len(data):
            return
        features, part = self._features, FeatureSurvey(self.model, self.target)
        batch = self._batch(data.observations, data.actions)
        if isinstance(features, Scaled):
            part.scale.update(batch)
        elif isinstance(features, Learned):
            part.learned = features.learn(batch)
        part.known = not np.isnan(data.log_probs).any()
        first = slice(0, 1)
        part.example = batches.take(data.observations, first), batches.take(data.actions, first)
        self.merge(part)

    def merge(self, other: FeatureSurvey) -> None:
        """Add the chunks that another one has seen."""
        if self.learned is not None and other.learned is not None:
            raise ValueError(
                f"features is {self._features!r}, which learns from all episodes at once, but they "
                "come in several chunks: give a Polynomial, a Fourier, or a callable from a batch "
                "to (n, d), or load all episodes"
            )
        self.scale.merge(other.scale)
        self.learned = other.learned if self.learned is None else self.learned
        self.known = self.known and other.known
        self.example = other.example if self.example is None else self.example

    def phi(self, horizon: int) -> Phi:
        """Return the features, fixed to the data seen, for episodes of at most `horizon` steps."""
        if self.example is None:
            raise ValueError("there is no episode to learn from: LinearQ needs at least one")
        features, target = self._features, self.target
        if isinstance(features, Scaled):
            features = features.fixed(self.scale.columns())
        elif self.learned is not None:
            features = self.learned
        assert callable(features)
        actions = target.probs(self.example[0]).shape[1] if isinstance(target, FinitePolicy) else 0
        shape = np.shape(features(self._batch(*self.example)))
        if len(shape) != 2:
            raise ValueError(f"features gave shape {shape} for one step; expected (1, d)")
        return Phi(features, target, actions, shape[1], int(self.model.time), horizon)

    def equations(self, *, gamma: float, horizon: int, folds: int) -> NormalEquations:
        """Return empty normal equations for these features.

        Args:
            gamma: discount.
            horizon: longest possible episode.
            folds: number of folds.
        """
        phi = self.phi(horizon)
        if phi.weights > WIDEST:
            raise ValueError(
                f"features gave {phi.columns} columns, times {phi.powers + 1} powers of time and "
                f"{max(phi.actions, 1)} actions: more than {WIDEST} weights to solve for. "
                "Give features= with fewer columns"
            )
        model = self.model if self.known else replace(self.model, nearness=0.0)
        return NormalEquations.empty(model, phi, gamma, folds)

    @property
    def _features(self) -> Map | Learned:
        return Polynomial() if self.model.features is None else self.model.features

    def _batch(self, observations: Tree, actions: Tree) -> Tree:
        return observations if isinstance(self.target, FinitePolicy) else (observations, actions)


@dataclass
class NormalEquations:
    """The sums of the normal equations, by fold, and the range of the rewards.

    Steps are weighted by `near_weights`. If these are 0 at all steps, because the target never
    takes the recorded actions, all steps count equally. A chunk cannot know this of the others: so
    as long as no weight was above 0, chunks are summed with weights 1, and the first weight above 0
    clears these sums, to which the chunks before it should have added 0.

    Args:
        model: the model to fit; its nearness is 0 if some propensity is unknown.
        phi: the features.
        gamma: discount.
        system: (folds, A d, A d).
        answer: (folds, A d).
        squares: (folds, d) sums of the squares of the features.
        bounds: (2, folds) lowest and highest reward in each fold.
        starts: (A d,) sum of E_pi phi over the first steps.
        near: whether some step had a weight above 0.
        chunks: how many there were.
    """

    model: LinearQ
    phi: Phi
    gamma: float
    system: FloatArray
    answer: FloatArray
    squares: FloatArray
    bounds: FloatArray
    starts: FloatArray
    near: bool = False
    chunks: int = 0

    @classmethod
    def empty(cls, model: LinearQ, phi: Phi, gamma: float, folds: int) -> NormalEquations:
        """Return equations to which no step was added."""
        size = phi.weights
        return cls(
            model,
            phi,
            gamma,
            system=np.zeros((folds, size, size)),
            answer=np.zeros((folds, size)),
            squares=np.zeros((folds, phi.width)),
            bounds=np.array([[np.inf] * folds, [-np.inf] * folds]),
            starts=np.zeros(size),
        )

    def update(
        self,
        data: Trajectories,
        fold: IntArray,
        rng: np.random.Generator | None = None,
        answers: Answers | None = None,
    ) -> None:
        """Add a chunk of whole episodes.

        Args:
            data: the chunk.
            fold: (n,) of its episodes.
            rng: source of the target's actions, if they are continuous.
            answers: of the target about the chunk, if it was asked already.
        """
        if not len(data):
            return
        self._count(1)
        self._widen(reward_bounds(data, fold, len(self.answer)))
        rng = np.random.default_rng(0) if rng is None else rng
        answers = Answers(self.phi.target, data) if answers is None else answers
        finite, begins = bool(self.phi.actions), data.offsets[:-1]
        probs = answers.probs(begins) if finite else None
        self.starts += self.phi.expected(data, begins, rng, probs).sum(axis=0)
        weights = near_weights(data, self.model.nearness, answers)
        if not self._keeps(bool(weights.any())):
            return
        if not self.near:
            weights = np.ones(data.n_steps)
        ends = np.zeros(data.n_steps, dtype=np.bool_)
        ends[data.offsets[1:] - 1] = True
        part = fold[data.episode_ids]
        chosen = choices(data.actions, data.n_steps, self.phi.actions) if finite else 0 * part
        group = part * max(self.phi.actions, 1) + chosen
        roots = np.sqrt(weights)  # on both sides of a product: with itself it is half the work
        block = max(256, (_CACHED if finite else NUMBERS) // self.phi.weights)
        for begin in range(0, data.n_steps, block):
            rows = slice(begin, min(begin + block, data.n_steps))
            order = np.argsort(group[rows], kind="stable")
            some, root = begin + order, roots[begin + order]
            if finite:
                now, ahead = self._finite_block(data, rows, order, ends[rows], answers, root)
            else:
                now = self.phi.of(data, rows).T[:, order] * root
                ahead = self.phi.expected_next(data, rows, ends[rows], rng).T[:, order] * root
            self._add(now, ahead, data.rewards[some] * root, group[some])

    def _finite_block(
        self,
        data: Trajectories,
        rows: slice,
        order: IntArray,
        ends: NDArray[np.bool_],
        answers: Answers,
        root: FloatArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return phi (d, n) and E_pi phi of the next step (A d, n) of some steps, in an order.

        Both are multiplied by the roots (n,) of the weights.

        The features of a step are those of the step after the one before: they are made once, and
        put in order before they are multiplied by time and probabilities.
        """
        phi, size = self.phi, rows.stop - rows.start
        seen = slice(rows.start, min(rows.stop + 1, data.n_steps))
        plain = phi.plain(batches.take(data.observations, seen), seen.stop - seen.start)
        steps, following = data.steps[rows][order], np.minimum(order + 1, plain.shape[1] - 1)
        probs = answers.probs(seen)[following] * (root * ~ends[order])[:, None]
        next_one = phi.raised(plain[:, following], steps + 1)
        ahead = np.empty((phi.actions, phi.width, size))
        for action in range(phi.actions):
            np.multiply(next_one, probs[:, action], out=ahead[action])
        return phi.raised(plain[:, order] * root, steps), ahead.reshape(phi.weights, size)

    def merge(self, other: NormalEquations) -> None:
        """Add the chunks that another one has summed."""
        self._count(other.chunks)
        self._widen(other.bounds)
        self.starts += other.starts
        if self._keeps(other.near):
            self.system += other.system
            self.answer += other.answer
            self.squares += other.squares

    def values(self, without: int | None) -> LinearValues | FiniteLinearValues:
        """Return the q of all folds but one."""
        kind = FiniteLinearValues if self.phi.actions else LinearValues
        shape = max(self.phi.actions, 1), -1
        theta, dual = self._solve(without).reshape(shape), self._dual.reshape(shape)
        return kind(self.phi, theta, dual, self._near_weights)

    def cross_fitted(self) -> CrossFitted:
        """Return for each fold the values learned from the others, and those learned from all."""
        values = [self.values(k) for k in [*range(len(self.answer)), None]]
        bounds = bounds_of_others(self.bounds)
        return CrossFitted(values, self.phi.target, self.gamma, self.phi.horizon, bounds, True)

    def _count(self, chunks: int) -> None:
        self.chunks += chunks
        if self.chunks > 1 and not self.phi.actions:
            raise ValueError(
                f"target is {self.phi.target!r}, which has no probs(observations), and the "
                "episodes come in several chunks: LinearQ draws continuous actions, and the draws "
                "would depend on the chunks; load all episodes, or leave q_model=None"
            )

    def _widen(self, bounds: FloatArray) -> None:
        self.bounds[0] = np.minimum(self.bounds[0], bounds[0])
        self.bounds[1] = np.maximum(self.bounds[1], bounds[1])

    def _keeps(self, near: bool) -> bool:
        """Return whether a part is to be added, given whether some of its weights are above 0."""
        if near and not self.near:
            for sums in (self.system, self.answer, self.squares):
                sums[...] = 0.0
            self.near = True
        return near or not self.near

    def _add(
        self,
        now: FloatArray,
        ahead: FloatArray,
        rewards: FloatArray,
        group: IntArray,
    ) -> None:
        """Add n steps sorted by group, all of them times the roots of their weights.

        Args:
            now: (d, n) phi.
            ahead: (A d, n) that of the next step.
            rewards: (n,).
            group: (n,) fold times actions plus action.
        """
        width, actions = self.phi.width, max(self.phi.actions, 1)
        bounds = np.searchsorted(group, np.arange(len(self.answer) * actions + 1))
        for g in np.flatnonzero(np.diff(bounds)):
            rows = slice(bounds[g], bounds[g + 1])
            k, own = g // actions, slice(g % actions * width, (g % actions + 1) * width)
            some = now[:, rows]
            square = some @ some.T
            self.system[k, own, own] += square
            self.system[k, own] -= self.gamma * (some @ ahead[:, rows].T)
            self.answer[k, own] += some @ rewards[rows]
            self.squares[k] += np.diagonal(square)

    def _solve(self, without: int | None) -> FloatArray:
        """Return theta (A d,) from all folds but one."""
        keep = np.arange(len(self.answer)) != (-1 if without is None else without)
        system, scale = self._system(keep)
        return _solved(system, self.answer[keep].sum(axis=0) * scale) * scale

    @cached_property
    def _near_weights(self) -> NearWeights:
        """The weights of the steps, shared by all folds so that the target is asked once."""
        return NearWeights(self.phi.target, self.model.nearness if self.near else 0.0)

    @cached_property
    def _dual(self) -> FloatArray:
        """The weights (A d,) alpha of the visits, from all folds: A' alpha = sum of E_pi phi."""
        system, scale = self._system(np.ones(len(self.answer), dtype=np.bool_))
        return _solved(system.T, self.starts * scale) * scale

    def _system(self, keep: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
        """Return the matrix (A d, A d) of some folds with its penalty, and the scale (A d,).

        The features are first divided by the roots of their squares, so that one penalty serves
        features of any scale. `pull` is on the differences from the mean over the actions.
        """
        width, actions = self.phi.width, max(self.phi.actions, 1)
        squares = self.squares[keep].sum(axis=0) / actions
        scale = np.tile(1.0 / np.sqrt(np.where(squares > 0, squares, 1.0)), actions)
        system = self.system[keep].sum(axis=0) * scale[:, None] * scale
        apart = np.eye(actions) - 1.0 / actions
        penalty = self.model.ridge * np.eye(actions) + self.model.pull * apart
        system += np.kron(penalty, np.eye(width))
        return system, scale


def _solved(system: FloatArray, right: FloatArray) -> FloatArray:
    """Solve a system, by least squares if some features are always 0 and there is no penalty."""
    try:
        return np.asarray(np.linalg.solve(system, right))
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(system, right, rcond=None)[0])


@dataclass(frozen=True)
class LinearValues:
    """The fitted q of continuous actions.

    Args:
        phi: the features.
        theta: (A, d) weights; A is 1 for continuous actions.
        dual: (A, d) weights of the visits.
        near: weights of the steps in the equations.
    """

    phi: Phi
    theta: FloatArray
    dual: FloatArray
    near: NearWeights

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        return np.asarray(self.phi((observations, actions), steps) @ self.theta[0])

    def visits(self, data: Trajectories, rows: IntArray) -> tuple[FloatArray, None]:
        """Return the ratio of visits (n,) at recorded steps, w alpha·phi(s, a).

        The mean value at the start is b0'A^-1 b with b = sum w phi r, so a reward, or a residual,
        of that step counts w b0'A^-1 phi in it: no product of ratios over time.
        """
        seen, actions = batches.take(data.observations, rows), batches.take(data.actions, rows)
        return self.near.of(data)[rows] * self._visits(seen, actions, data.steps[rows]), None

    def _visits(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        return np.asarray(self.phi((observations, actions), steps) @ self.dual[0])


class FiniteLinearValues(LinearValues):
    """The fitted q of a finite action set."""

    def q(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        """Return q (n,) of the chosen actions."""
        return of_chosen(self.q_all(observations, steps), actions)

    def q_all(self, observations: Tree, steps: IntArray) -> FloatArray:
        """Return q (n, A) of every action."""
        plain = self.phi.plain(observations, len(steps))
        return self.phi.weigh(self.theta, plain, steps).T

    @staticmethod
    def of_folds(
        values: Sequence[FiniteLinearValues],
        answers: Answers,
        rows: IntArray,
        bounds: IntArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return q (n, A) and the ratio of visits (n,) at recorded steps of several folds.

        The features are made once, for the values of all folds.

        Args:
            values: of each fold.
            answers: of the target about the episodes.
            rows: (n,) the steps, sorted by fold.
            bounds: (folds + 1,) where each fold begins among them.
        """
        data, phi = answers.data, values[0].phi
        seen, steps = batches.take(data.observations, rows), data.steps[rows]
        plain, q = phi.plain(seen, rows.size), np.empty((phi.actions, rows.size))
        for own, begin, end in zip(values, bounds[:-1], bounds[1:], strict=True):
            here = slice(begin, end)
            q[:, here] = phi.weigh(own.theta, plain[:, here], steps[here])
        visits = phi.weigh(values[0].dual, plain, steps).T  # one for all folds
        ratio = of_chosen(visits, batches.take(data.actions, rows))
        return q.T, ratio * values[0].near.of(data, answers)[rows]

    def _visits(self, observations: Tree, actions: Tree, steps: IntArray) -> FloatArray:
        plain = self.phi.plain(observations, len(steps))
        return of_chosen(self.phi.weigh(self.dual, plain, steps).T, actions)


def default_linear(data: Trajectories, target: Policy) -> LinearQ | None:
    """Return a LinearQ for such episodes, or None if their numbers are too many, or no numbers."""
    seen, actions = batches.leaves(data.observations), batches.leaves(data.actions)
    finite = isinstance(target, FinitePolicy) and actions[0].ndim == 1
    plain = len(actions) == 1 and actions[0].dtype.kind in ("iub" if finite else "f")
    numbers = all(leaf.dtype.kind in "iubf" for leaf in seen)
    if numbers and plain and sum(leaf[0].size for leaf in seen) <= MOST_NUMBERS:
        return widest_fit(data, target)
    return None


def widest_fit(data: Trajectories, target: Policy) -> LinearQ | None:
    """Return LinearQ with features of degree 2, or 1 if these are too many, or None."""
    for features in (None, Polynomial(1)):
        survey = FeatureSurvey(LinearQ(features), target)
        survey.update(data)
        if survey.phi(1).weights <= WIDEST:
            return survey.model
    return None


class NearWeights:
    """The weights of the steps in the equations; those of the last episodes are kept.

    Args:
        target: the policy to evaluate.
        nearness: of the model.
    """

    def __init__(self, target: Policy, nearness: float) -> None:
        self._target, self._nearness = target, nearness
        self._last: tuple[Trajectories, FloatArray] | None = None

    def of(self, data: Trajectories, answers: Answers | None = None) -> FloatArray:
        """Return the weights (S,) of episodes; `answers` if the target was asked about them."""
        if self._last is None or self._last[0] is not data:
            answers = Answers(self._target, data) if answers is None else answers
            self._last = data, near_weights(data, self._nearness, answers)
        return self._last[1]

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_last": None}  # other processes have other episodes


def near_weights(data: Trajectories, nearness: float, answers: Answers) -> FloatArray:
    """Return the tempered weights (S,) of the steps, clipped at e^3; their scale cancels."""
    if nearness == 0:
        return np.ones(data.n_steps)
    from ope_gym import kernels

    total = np.empty(data.n_steps)
    offsets = data.offsets.astype(np.int64, copy=False)
    ratio = np.maximum(answers.log_probs - data.log_probs, -1e6)
    kernels.cumulate(ratio, 0, len(data), offsets, total)
    return np.exp(np.minimum(nearness * total, _LARGEST_LOG_WEIGHT))
