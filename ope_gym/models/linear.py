"""LinearQ: fitted Q evaluation with linear features, in closed form, for all folds in one pass.

Why a linear solve is enough. The values of the target satisfy q = r + gamma E_pi q(next). With
q = phi·theta, ask that the error of this equation be uncorrelated with the features:

    sum_t w_t phi_t (phi_t·theta - r_t - gamma E_pi phi_{t+1}·theta) = 0

which is linear in theta (LSTD-Q, the fixed point of fitted Q evaluation). Both sides are sums over
steps, and what a fold may learn from is the sum over all other folds. So the sums can be gathered
chunk by chunk, by several processes, and merged; episodes in memory are the case of one chunk:

    survey = model.survey(target)
    for chunk in chunks:
        survey.update(chunk)                        # first pass: the scale of the features
    equations = survey.equations(len(targets), gamma=gamma, horizon=horizon, folds=folds)
    for chunk in chunks:
        equations.update(chunk, fold, answers)      # second pass: the sums, by fold
    fitted = equations.cross_fitted()
    baselines(fitted, fold, answers)                # q and v of the steps of any chunk

where `fold` (n,) holds the folds of the chunk's episodes, and `answers` what each target says of
it. Other processes begin with an empty survey or `survey.equations(...)`, and `merge(other)` adds
what they have gathered. Memory is that of the sums and of one chunk. Continuous
actions need all episodes in one chunk, because the mean over the target is estimated by draws,
which would depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from ope_gym import batches
from ope_gym.arguments import probability, real
from ope_gym.arrays import IntArray
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.models.base import ActionValues, Problem, QModel
from ope_gym.models.equations import NormalEquations
from ope_gym.models.features import ColumnSums, LinearValues, Map, Phi, Polynomial
from ope_gym.models.tabular import TabularQ
from ope_gym.policies import FinitePolicy, Policy

_TOGETHER = 1 << 24  # elements of the sums of targets that are fitted together
MOST_NUMBERS = 64  # in an observation, for a default
_SLOW = 2000  # weights that take over a second to solve for, once for each fold
QUADRATIC = Polynomial(2)
WIDEST = 4000  # weights to solve for: features times powers of time times actions


@dataclass(frozen=True)
class LinearQ(QModel):
    """Linear fitted Q evaluation: q(s, a, t) = phi(s, t)·theta_a solves the projected equation.

        A theta = b,   A = sum_t w_t phi_t (phi_t - gamma E_pi phi_{t+1})' + penalty
                       b = sum_t w_t r_t phi_t

    the sums over recorded steps, with phi = 0 after an end (LSTD-Q). The features are those of the
    observation times 1, u, ..., u^time with u the share of the horizon that is left. With
    continuous actions phi is a function of (observation, action) and the mean over the target that
    of 16 draws. The weights w_t = (prod_{u<=t} pi(a_u|s_u) / mu(a_u|s_u))^nearness, with the
    behaviour policy mu, make the fit most accurate where the target goes; w = 1 if mu is unknown.

    Penalty, in units of the features' own squares: `ridge` on theta, and `pull` on the differences
    between actions, so that an action that was hardly ever taken gets about the values of the
    others.

    Cost: one pass, O(steps × actions × d c) for c features without time, and memory of folds ×
    actions² × d c; several targets share the pass.
    Use it for Box observations of moderate size. Weakness: it smooths edges of the value, and with
    gamma = 1 and long episodes errors add up over the steps; the values are clipped to what the
    rewards allow. For more flexibility give features, or use NetworkQ.

    Args:
        features: a callable from a batch of observations (of (observations, actions) if actions
            are continuous) to (n, d), or a Polynomial of the standardised numbers.
        ridge: penalty on all weights.
        pull: penalty on differences between actions.
        time: highest power of the share of the horizon that is left; 0: q does not depend on it.
        nearness: how much more the steps count that the target is likely to reach, from 0 (all
            steps count alike) to 1.
    """

    one_pass: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    features: Map | Polynomial = QUADRATIC
    ridge: float = 1e-5
    pull: float = 1e-2
    time: int = 3
    nearness: float = 0.35

    def __post_init__(self) -> None:
        for name in ("ridge", "pull", "time"):
            real(name, getattr(self, name), "give 0 or more", lambda x: 0.0 <= x < np.inf)
        probability("nearness", self.nearness)
        if not (callable(self.features) or isinstance(self.features, Polynomial)):
            raise TypeError(
                f"features is {self.features!r}: give a Polynomial, or a callable from a batch to "
                "(n, d)"
            )

    def fit(self, data: Trajectories, problem: Problem) -> LinearValues:
        """Return the values learned from all episodes."""
        nobody = np.zeros(len(data), dtype=np.int64)
        (equations,) = self._gather(data, nobody, [problem])
        return equations.values(0, [None])[0]

    def fit_folds(
        self, data: Trajectories, fold: IntArray, problems: Sequence[Problem]
    ) -> list[Iterable[ActionValues | None]]:
        """Return for each target the values of each fold, then those learned from all episodes.

        The features are made once. Their scale is that of all observations; rewards stay in their
        folds.
        """
        return [
            fitted.values
            for equations in self._gather(data, fold, problems)
            for fitted in equations.cross_fitted()
        ]

    def survey(self, target: Policy) -> FeatureSurvey:
        """Return what gathers the scale of the features."""
        return FeatureSurvey(self, target)

    def _gather(
        self, data: Trajectories, fold: IntArray, problems: Sequence[Problem]
    ) -> Iterator[NormalEquations]:
        """Yield the equations of the targets, of as many at once as the memory allows."""
        first, folds = problems[0], int(fold.max(initial=0)) + 1
        survey = self.survey(first.target)
        survey.update(data)
        for some in survey.at_once(first.horizon, folds, len(problems)):
            part = problems[some]
            equations = survey.equations(
                len(part), gamma=first.gamma, horizon=first.horizon, folds=folds
            )
            answers = [problem.asked(data) for problem in part]
            equations.update(data, fold, answers, [problem.rng for problem in part])
            yield equations


@dataclass
class FeatureSurvey:
    """Gather what must be known before the normal equations can be summed.

    Args:
        model: the model to fit.
        target: the policy to evaluate.
        scale: Scale of the columns, for a Polynomial.
        known: whether the probabilities of all recorded actions are known.
        example: the first recorded step, (observations, actions); None before the first chunk.
    """

    model: LinearQ
    target: Policy
    scale: ColumnSums = field(default_factory=ColumnSums)
    known: bool = True
    example: tuple[Tree, Tree] | None = None

    def update(self, data: Trajectories) -> None:
        """Add a chunk of whole episodes."""
        if not len(data):
            return
        part = FeatureSurvey(self.model, self.target)
        if isinstance(self.model.features, Polynomial):
            part.scale.update(self._batch(data.observations, data.actions))
        part.known = not np.isnan(data.log_probs).any()
        first = slice(0, 1)
        part.example = batches.take(data.observations, first), batches.take(data.actions, first)
        self.merge(part)

    def merge(self, other: FeatureSurvey) -> None:
        """Add the chunks that another one has seen."""
        self.scale.merge(other.scale)
        self.known = self.known and other.known
        self.example = other.example if self.example is None else self.example

    def phi(self, horizon: int) -> Phi:
        """Return the features, fixed to the data seen, for episodes of at most `horizon` steps."""
        if self.example is None:
            raise ValueError("there is no episode to learn from: LinearQ needs at least one")
        features, target = self.model.features, self.target
        if isinstance(features, Polynomial):
            features = features.fixed(self.scale.columns())
        actions = target.probs(self.example[0]).shape[1] if isinstance(target, FinitePolicy) else 0
        shape = np.shape(features(self._batch(*self.example)))
        if len(shape) != 2:
            raise ValueError(f"features gave shape {shape} for one step; expected (1, d)")
        return Phi(features, actions, shape[1], int(self.model.time), horizon)

    def equations(self, targets: int, *, gamma: float, horizon: int, folds: int) -> NormalEquations:
        """Return empty normal equations for these features.

        Args:
            targets: how many, all with the same actions.
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
        return NormalEquations.empty(model, phi, gamma, folds, targets)

    def at_once(self, horizon: int, folds: int, targets: int) -> list[slice]:
        """Return which of so many targets to sum equations for at once: as memory allows."""
        size = NormalEquations.size(self.phi(horizon), folds)
        step = max(1, _TOGETHER // size)
        return [slice(begin, begin + step) for begin in range(0, targets, step)]

    def _batch(self, observations: Tree, actions: Tree) -> Tree:
        return observations if isinstance(self.target, FinitePolicy) else (observations, actions)


def default_model(data: Trajectories, target: Policy) -> QModel | None:
    """Return TabularQ for whole numbers, LinearQ for small arrays of numbers, else None.

    Images, texts and the like need a model of their own, and so do actions with several parts that
    are not plain numbers.
    """
    seen = batches.leaves(data.observations)
    whole = all(leaf.dtype.kind in "iub" for leaf in seen)
    if whole and isinstance(target, FinitePolicy) and sum(x[0].size for x in seen) <= MOST_NUMBERS:
        return TabularQ()
    return default_linear(data, target)


def default_linear(data: Trajectories, target: Policy) -> LinearQ | None:
    """Return a LinearQ for such episodes, or None if their numbers are too many, or no numbers."""
    seen, actions = batches.leaves(data.observations), batches.leaves(data.actions)
    finite = isinstance(target, FinitePolicy) and actions[0].ndim == 1
    plain = len(actions) == 1 and actions[0].dtype.kind in ("iub" if finite else "f")
    numbers = all(leaf.dtype.kind in "iubf" for leaf in seen)
    if numbers and plain and sum(leaf[0].size for leaf in seen) <= MOST_NUMBERS:
        return widest_fit(data, target)
    return None


def widest_fit(
    data: Trajectories,
    target: Policy,
    offered: Sequence[Map | Polynomial] = (QUADRATIC, Polynomial(1)),
) -> LinearQ | None:
    """Return LinearQ with the first features that are not too many: of degree 2, or 1, or None.

    Where that would be slow to solve, as with 10 numbers and 50 actions, it has one power of time.
    """
    for features in offered:
        survey = FeatureSurvey(LinearQ(features), target)
        survey.update(data)
        weights = survey.phi(1).weights
        if weights <= WIDEST:
            return survey.model if weights <= _SLOW else replace(survey.model, time=1)
    return None
