"""Prepare episodes in memory: all of them are one chunk, weighed once for each target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, step_numbers
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.empirical_average import OneStep
from ope_gym.estimators.reductions import Weighted
from ope_gym.estimators.run import Reduce, reduce_chunk
from ope_gym.models import default_model
from ope_gym.models.base import (
    Baseline,
    Problem,
    QModel,
    Visits,
    check_baseline,
)
from ope_gym.models.folds import cross_fit, cross_fit_targets, past_only
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.policies.base import ask_once
from ope_gym.preparing.survey import Survey
from ope_gym.preparing.weighing import (
    Held,
    Recorded,
    Redraws,
    Scatter,
    Shared,
    Weighing,
    has_densities,
)
from ope_gym.weights.answers import Answers, ask_together
from ope_gym.weights.formula import check_reward_model
from ope_gym.weights.rounds import stable_weights

_STEPS = 1 << 21  # steps times targets whose weights are held at a time
_PROBED = 64  # steps at which a policy is asked whether it is deterministic


class Memory:
    """Episodes in memory, to be evaluated.

    The mixtures of the behaviours do not depend on the target: they are computed for the first one
    and kept, so that a further target costs only its own log-probabilities and its q model.

    Args:
        survey: Who recorded them.
        data: The episodes.
        visits: Whether some estimator asks how often the target visits the recorded steps.
    """

    capacity = _STEPS

    def __init__(self, survey: Survey, data: Trajectories, visits: bool) -> None:
        self._survey, self._data, self._visits = survey, data, visits
        self._options = survey.options
        self._ids, self._shared = survey.behaviours.ids, Shared()
        self._defaults: dict[int, QModel | None] = {}  # q model by number of actions, 0: continuous
        self._redraws = Redraws(data, survey.behaviours, survey.draws)

    def policy(self, policy: Policy) -> Policy:
        """Return a policy as it can be asked."""
        return ask_once(policy, self._data.observations, self._data.actions)

    def lacks(self, target: Policy) -> dict[str, str]:
        """Return why needs of estimators are not met, in words."""
        lacks = dict(self._survey.lacks)
        if not self._survey.behaviours.available:
            lacks["rounds"] = lacks["policies"]
        if reason := _not_one_step(self._data, target):
            lacks["one step"] = reason
        return lacks

    def check_model(
        self, model: QModel | Baseline | None, target: Policy
    ) -> QModel | Baseline | None:
        """Return a q model for the target: any will do."""
        return model

    def default_model(self, target: Policy) -> QModel | None:
        """Return the default q model for these observations."""
        first = batches.take(self._data.observations, slice(0, 1))
        finite = isinstance(target, FinitePolicy)
        actions = target.probs(first).shape[1] if finite else 0  # type: ignore[attr-defined]
        if actions not in self._defaults:
            self._defaults[actions] = default_model(self._data, target)
        return self._defaults[actions]

    def model_name(self, model: Any) -> str | None:
        """Return the name of a q model; None without one."""
        return None if model is None else type(model).__name__

    def reward_model(self, model: Any, used: bool) -> str | tuple[FloatArray, FloatArray]:
        """Return the reward model with arrays that fit the data, or raise."""
        if used and isinstance(model, str) and model == "cross-fit" and self._survey.parted:
            raise ValueError(
                "reward_model='cross-fit' weighs two halves of the episodes against their own "
                f"mixtures of all behaviours, but mixtures are of {self._survey.parted}: give "
                "Weighting(mixture='all'), or 'deterministic' or (mean, variance)"
            )
        return check_reward_model(model, self._data.n_steps, self._data.offsets)

    def deterministic(self, target: Policy) -> bool:
        """Tell whether a policy takes one action for certain, at the first recorded steps.

        One without `probs` is asked for the recorded actions: all are certain or impossible.
        """
        first = slice(0, _PROBED)
        seen = batches.take(self._data.observations, first)
        if isinstance(target, FinitePolicy):
            return bool((np.max(target.probs(seen), axis=1) > 1.0 - 1e-9).all())
        own = np.asarray(target.log_prob(seen, batches.take(self._data.actions, first)))
        taken = np.abs(own) < 1e-9
        sure = taken.any() and (taken | np.isneginf(own)).all()
        return bool(sure and not has_densities(self._data))  # a density of 1 is not certain

    # Fit and weigh ---------------------------------------------------------------------------

    def prepare(
        self, weighing: Weighing, targets: Sequence[Policy], model: QModel | Baseline | None
    ) -> tuple[Reduce, Scatter]:
        """Ask and weigh the targets; return what answers requests, and what adds errors."""
        answers = [Answers(target, self._data) for target in targets]
        if weighing.schemes:
            ask_together(answers)
        values: list[Any] = [None] * len(answers)
        if model is not None:
            values = self._baselines(model, answers)
        held = [Held(one, model, v) for one, v in zip(answers, values, strict=True)]
        chunks = [self._weighed(weighing, one) for one in held]
        if self._options.compute.progress is not None:
            self._options.compute.progress(self._data.n_steps)
        return reduce_chunk(chunks), partial(self._redraws.scatter, weighing, held)

    def _weighed(self, weighing: Weighing, held: Held) -> Weighted:
        """Weigh the episodes for one target."""
        chunk = weighing.weigh(held.answers, self._ids, 0, held.baseline, self._shared)
        makers = {
            "rounds": lambda: self._rounds(chunk, held.model, held.answers),
            "one step": lambda: _one_step(self._data, held.answers.target),
        }
        return dataclasses.replace(chunk, whole=makers)

    def _baselines(self, model: QModel | Baseline, answers: Sequence[Answers]) -> list[Baseline]:
        """Return for each target q and v at every step."""
        if isinstance(model, Baseline):
            values = [check_baseline(model, self._data.n_steps, self._data.offsets)] * len(answers)
        else:
            problems = [self._problem(one) for one in answers]
            values = cross_fit_targets(model, self._data, self._ids, problems)
        return [
            self._with_visits(own, one) if self._visits and own.visits is None else own
            for own, one in zip(values, answers, strict=True)
        ]

    def _with_visits(self, baseline: Baseline, answers: Answers) -> Baseline:
        """Add ratios of visits to a q that has none: those of the default model."""
        usual = default_model(self._data, answers.target) if len(self._data) > 1 else None
        if usual is None:
            return baseline
        try:
            own = cross_fit(usual, self._data, self._ids, self._problem(answers)).visits
        except ValueError:  # observations that only the given q can read
            own = None
        if own is None:
            return baseline
        # with residuals of the given q, not of the usual one
        visits = Visits(own.ratio, unknown=own.unknown)
        return dataclasses.replace(baseline, visits=visits)

    def _problem(self, answers: Answers) -> Problem:
        """Return what the q model is to learn, with random numbers from the seed."""
        rng = np.random.default_rng(self._options.seed)
        longest = self._survey.roster.longest
        return Problem(answers.target, self._options.gamma, longest, rng, answers)

    def _rounds(
        self, chunk: Weighted, model: QModel | Baseline | None, answers: Answers
    ) -> tuple[Weighted, FloatArray]:
        """Return the episodes with residuals of past-only q models, and weights of the rounds."""
        assert model is not None  # ADR needs one
        data, offsets, gamma = self._data, self._data.offsets, self._options.gamma
        recorded: Recorded = chunk.episodes
        values = (
            self._baselines(model, [answers])[0]
            if isinstance(model, Baseline)
            else past_only(model, data, self._ids, self._problem(answers))
        )
        start, residuals = values.at_start(offsets), values.residuals(data.rewards, offsets, gamma)
        rows = self._survey.behaviours.rows(data)
        weights = stable_weights(recorded.own, rows, self._ids, offsets, gamma, start, residuals)
        kept = step_numbers(offsets) < np.diff(chunk.offsets).max()  # the steps within discount
        return dataclasses.replace(chunk, residuals=residuals[kept], start=start), weights


def _not_one_step(data: Trajectories, target: Policy) -> str:
    """Say why EA cannot be had, in words; empty if it can."""
    longest, actions = int(data.lengths.max()), data.actions
    if longest > 1:
        return (
            f"episode {int(np.argmax(data.lengths))} has {longest} steps: for longer episodes use "
            "its counterpart, the direct method (DM, fitted Q evaluation)"
        )
    if not isinstance(target, FinitePolicy):
        return "the target has no probs(observations): use FIS"
    if not isinstance(actions, np.ndarray):
        return "actions have several parts: use FIS"
    if actions.shape != (len(data),) or actions.dtype.kind not in "iub":
        return f"actions have shape {actions.shape} and type {actions.dtype}: use FIS"
    return ""


def _one_step(data: Trajectories, target: Any) -> OneStep:
    """Return one-step episodes as EA needs them."""
    contexts = batches.distinct(data.observations)
    actions = np.asarray(data.actions).astype(np.int64)
    return OneStep(contexts, actions, target.probs(data.observations), data.rewards)
