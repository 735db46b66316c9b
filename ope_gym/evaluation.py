"""Evaluate a policy from recorded episodes.

This is the only place where policies meet estimators. An evaluation goes one way:

    survey    who recorded the episodes: behaviours, strata, groups of mixtures
    fit       q and v at every step, cross-fitted
    weigh     importance weights, chunk by chunk
    run       the estimators ask for sums over all episodes, a pass a round
    conclude  error, interval, diagnostics and verdict of each

`ope_gym.preparing` surveys, fits and weighs, episodes in memory and in files differently; either
then answers the same requests.
`ope_gym.estimation` runs and concludes, here and for `ope_gym.log_probs`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ope_gym.arguments import refusal
from ope_gym.arrays import one_blas_thread
from ope_gym.estimation import Facts, Question
from ope_gym.estimators.reductions import Steps, ask
from ope_gym.estimators.table import ESTIMATORS, candidates, choose, estimator_names
from ope_gym.inference.intervals import IntervalKind
from ope_gym.models import named_model
from ope_gym.models.base import Baseline, QModel
from ope_gym.options import Compute, Options, OptionValues, Weighting
from ope_gym.policies import FinitePolicy, Policy, Target
from ope_gym.policies.base import is_saved
from ope_gym.preparing.files import Files
from ope_gym.preparing.memory import Memory
from ope_gym.preparing.survey import Gathering, Survey
from ope_gym.preparing.weighing import Weighing
from ope_gym.results import Evaluation
from ope_gym.scale.sources import Episodes, open_source
from ope_gym.scale.workers import Workers

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TOGETHER = 64  # most targets that are evaluated at a time


def evaluate(
    episodes: Episodes,
    target: Target,
    estimators: str | Iterable[str] | None = None,
    *,
    origin: str | None = None,
    held_out: bool | None = None,
    q_model: QModel | Baseline | str | None = "default",
    gamma: float = 1.0,
    interval: str | IntervalKind | None = "ess-t",
    level: float = 0.95,
    return_range: tuple[float, float] | None = None,
    weighting: Weighting = Weighting(),  # noqa: B008, frozen
    compute: Compute = Compute(),  # noqa: B008, frozen
    seed: int = 0,
) -> Evaluation:
    """Estimate the value of a policy from episodes that other policies recorded.

    Args:
        episodes: recorded episodes with the policies that acted: trajectories, a buffer, a
            recorder, a file (also a Parquet file, or a folder of them), or a list of files, which
            need not fit into memory.
        target: the policy to evaluate: one of `ope_gym.policies` or of your own, a
            Stable-Baselines3 model or its .zip file, a torch module that returns logits or a
            distribution; or the number of a recorded one, or "last".
        estimators: names from `ope_gym.ESTIMATORS`, or groups: "default" is auto and NFIS, "paper"
            the estimators of the paper and auto, "all" all of them, each as far as the data allow.
        origin: "learned" if the target was trained on episodes that are not held out, "fixed" if
            it was not; None to infer it from the recorded policies.
        held_out: True for held-out episodes alone, False for all, None for the held-out ones if
            there are any.
        q_model: a model of `ope_gym.models`, or its name, for the estimators that need one;
            "default" chooses by the observations; None for none; or a `Baseline`.
        gamma: discount within [0, 1].
        interval: "ess-t", "percentile", "bca", or an object such as `Bootstrap(2000)` or
            `Betting(reward_range=(0, 1))`; None for the values alone, without errors.
        level: confidence level of the intervals.
        return_range: lowest and highest return that an episode can have: intervals then allow for
            any of them that may not have been seen yet.
        weighting: cap, mixture and reward model of the weights.
        compute: workers, cluster, memory and progress.
        seed: seed of the bootstrap draws and of the q model.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table. See `ope_gym.Options`
        for more about the options.
    """
    evaluator = Evaluator(
        episodes,
        estimators,
        held_out=held_out,
        q_model=q_model,
        gamma=gamma,
        interval=interval,
        level=level,
        return_range=return_range,
        weighting=weighting,
        compute=compute,
        seed=seed,
    )
    return evaluator.evaluate(target, origin=origin)


@dataclass
class _Block:
    """Targets that are evaluated together, with their q model and estimators."""

    targets: list[Policy]
    model: QModel | Baseline | None
    names: tuple[str, ...]

    @property
    def shared(self) -> tuple[Any, ...]:
        """The part that must be the same of all; draws of continuous actions are a target's own."""
        drawn = None if isinstance(self.targets[0], FinitePolicy) else self
        return self.model, self.names, drawn


class Evaluator:
    """Prepare episodes once, to evaluate any number of targets; `evaluate_all` shares the most.

    The arguments are those of `evaluate`.
    """

    def __init__(
        self,
        episodes: Episodes,
        estimators: str | Iterable[str] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        self.options = Options(**options)
        self._named = estimator_names(estimators)
        rows = [ESTIMATORS[name] for name in candidates(self._named)]
        self._uses_q = any(c.uses_q for c in rows)
        compute = self.options.compute
        workers = Workers(compute.workers, compute.ray)
        self.source = open_source(episodes, self.options.held_out, compute.block_steps, workers)
        self._survey = Survey.of(self.source, self.options)
        data, visits = self.source.data, any(c.uses_visits for c in rows)
        self._episodes: Memory | Files = (
            Files(self._survey) if data is None else Memory(self._survey, data, visits)
        )
        self.options.betting(self._survey.roster.horizon)  # raises if it cannot be had

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The recorded policies, by number."""
        return self.source.policies

    @property
    def held_out(self) -> bool:
        """Whether held-out episodes alone are used."""
        return self.source.held_out

    @property
    def steps(self) -> int:
        """Number of recorded steps that are used."""
        return self._survey.roster.steps

    def name_of(self, target: Target) -> str:
        """Return the name of a target, such as "policy 3"; of several files, with the file."""
        return self.source.name_of(target)

    def passes(self, target: Target) -> int:
        """Return how many passes over all steps an evaluation makes, as its progress counts."""
        if self.source.data is not None:
            return 1
        policy = self._policy(target)
        model = self._model(policy)
        rows = [ESTIMATORS[name] for name in self._names(policy, model)]
        fits = 2 if model is not None and any(c.uses_q for c in rows) else 0
        blends = bool(fits) and any(c.method == "auto" for c in rows)
        alone = self.options.value_alone and not fits
        again = any((c.normalised and not alone) or c.uses_visits for c in rows)
        return fits + 1 + again + blends

    def evaluate(self, target: Target, *, origin: str | None = None) -> Evaluation:
        """Estimate the value of `target` by every estimator.

        Args:
            target: a policy, the number of a recorded one, or "last".
            origin: as in `ope_gym.evaluate`.
        """
        return self.evaluate_all([target], origins=[origin])[0]

    def evaluate_all(
        self,
        targets: Sequence[Target],
        *,
        origins: Sequence[str | None] | None = None,
        done: Callable[[int], object] | None = None,
    ) -> list[Evaluation]:
        """Estimate the values of several targets, as `evaluate` does those of one.

        Features, mixtures and passes over files are shared by many targets at a time.

        Args:
            targets: policies, numbers of recorded ones, or "last".
            origins: the origin of each, as in `ope_gym.evaluate`.
            done: called with 1 after each target; those of a group finish at about the same time.
        """
        given = [None] * len(targets) if origins is None else origins
        evaluations: list[Evaluation] = []
        with one_blas_thread():
            for block in self._blocks([self._policy(target) for target in targets]):
                some = given[len(evaluations) : len(evaluations) + len(block.targets)]
                for evaluation in self._evaluate(block, some):
                    evaluations.append(evaluation)
                    if done is not None:
                        done(1)
        return [self._titled(*pair) for pair in zip(evaluations, targets, strict=True)]

    def _titled(self, evaluation: Evaluation, target: Target) -> Evaluation:
        if is_saved(target):
            return evaluation.named(os.path.basename(target))
        number = self.source.number(target)
        return evaluation if number is None else evaluation.named(self.name_of(target))

    def _policy(self, target: Target) -> Policy:
        return self._episodes.policy(self.source.policy(target))

    # What is asked ---------------------------------------------------------------------------

    def _blocks(self, targets: Sequence[Policy]) -> list[_Block]:
        """Cut targets into blocks that are evaluated together: alike, and not too many."""
        most = min(max(self._episodes.capacity // self.steps, 1), _TOGETHER)
        blocks: list[_Block] = []
        for target in targets:
            model = self._model(target)
            block = _Block([target], model, self._names(target, model))
            last = blocks[-1] if blocks else None
            if last and last.shared == block.shared and len(last.targets) < most:
                last.targets.append(target)
            else:
                blocks.append(block)
        return blocks

    def _names(self, target: Policy, model: object) -> tuple[str, ...]:
        """Return the estimators: those that were named, and those of groups that can be had."""
        lacks = {**self._episodes.lacks(target), **self.options.lacks}
        if model is None:
            lacks["q model"] = (
                "there is none: give q_model a model of ope_gym.models (there is no default for "
                "such observations, or for a single episode)"
            )
        return choose(self._named, lacks)

    def _model(self, target: Policy) -> QModel | Baseline | None:
        """Return the q model, as given or the default; None if no estimator uses one."""
        model: Any = self.options.q_model if self._uses_q else None
        if isinstance(model, type):
            raise TypeError(f"q_model is the class {model.__name__}: give {model.__name__}()")
        if isinstance(model, str) and model == "default":
            few = len(self._survey.roster) < 2
            return None if few else self._episodes.default_model(target)
        if isinstance(model, str):
            model = named_model(model)
        if not isinstance(model, QModel | Baseline | None):
            known = "give a model of ope_gym.models, one of your own derived from "
            raise refusal(
                "q_model", model, known + "ope_gym.models.QModel, a Baseline, a name or None"
            )
        return self._episodes.check_model(model, target)

    # Fit, weigh, run and conclude ------------------------------------------------------------

    def _evaluate(self, block: _Block, origins: Sequence[str | None]) -> list[Evaluation]:
        names, options, survey = block.names, self.options, self._survey
        uses_q = block.model is not None and any(ESTIMATORS[name].uses_q for name in names)
        model = block.model if uses_q else None
        schemes = {ESTIMATORS[name].scheme for name in names} - {""}
        if uses_q and "auto" in names:
            schemes.add("basic")  # for the memories that it compares
        behaviours = survey.behaviours
        weighing = Weighing(
            behaviours.shared,
            survey.groups,
            tuple(sorted(schemes)),
            options.gamma,
            self._episodes.reward_model(options.weighting.reward_model, "optimal" in schemes),
        )
        reduce, scatter = self._episodes.prepare(weighing, block.targets, model)
        lone = survey.strata is not behaviours.strata  # single ones show no spread
        question = Question.about(
            names,
            options,
            ids=behaviours.ids,
            counts=behaviours.counts,
            strata=survey.strata,
            groups=survey.strata if lone else behaviours.ids,
            has_q=uses_q,
            horizon=survey.roster.horizon,
        )
        facts = [
            self._facts(target, origin, names, model)
            for target, origin in zip(block.targets, origins, strict=True)
        ]
        if scatter is None or options.value_alone:
            return question.answer(reduce, facts)
        return question.answer(reduce, facts, partial(scatter, names, question.setting))

    def _facts(
        self, target: Policy, origin: str | None, names: Sequence[str], model: object
    ) -> Steps[Facts]:
        """Collect the facts about the recorded episodes beside the estimators."""
        gathered = yield from ask(Gathering(target, len(self.policies), self.options.gamma))
        wanted = any(ESTIMATORS[name].uses_q for name in names)
        known = self._survey.known(
            gathered,
            target,
            names,
            origin=origin,
            q_model=self._episodes.model_name(model) if wanted else None,
            deterministic=self._episodes.deterministic(target),
        )
        return Facts(known.sample, lambda: known)
