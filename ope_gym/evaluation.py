"""Evaluate a policy from recorded episodes.

This is the only place where policies meet estimators. An evaluation surveys who recorded the
episodes, fits the q model, weighs the episodes, runs the estimators side by side, and concludes:

    survey    the source's roster: behaviours, strata, groups of mixtures
    fit       q and v at every step, cross-fitted
    weigh     importance weights, chunk by chunk
    run       the estimators ask for sums over all episodes, a pass a round
    conclude  error, interval, diagnostics and verdict of each
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, one_blas_thread, step_numbers
from ope_gym.data.checks import repeated_episodes
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.chunks import Weighted
from ope_gym.estimators.empirical_average import OneStep
from ope_gym.estimators.methods import estimator
from ope_gym.estimators.run import Reduce, aim, ask, merge_all, reduce_chunk, run, together
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Setting
from ope_gym.inference.bootstrap import fingerprint, make_draws, marked
from ope_gym.inference.computed import Computed
from ope_gym.inference.conclude import Known, conclude, value_alone, with_deviation
from ope_gym.inference.errors import joined
from ope_gym.inference.estimate import Behaviour, PartialMixture, Sample
from ope_gym.inference.intervals import IntervalKind
from ope_gym.inference.outcomes import Outcomes
from ope_gym.models import default_linear, default_model, named_model
from ope_gym.models.base import (
    Baseline,
    Problem,
    QModel,
    Visits,
    check_baseline,
)
from ope_gym.models.folds import cross_fit, cross_fit_targets, past_only
from ope_gym.options import (
    Compute,
    Offer,
    Options,
    OptionValues,
    Weighting,
    candidates,
    estimator_names,
    refuse_betting,
)
from ope_gym.policies import FinitePolicy, Policy, Target
from ope_gym.policies.base import asked
from ope_gym.policies.convert import is_saved
from ope_gym.policies.estimated import fitted_models, logger_name, scatter_draws
from ope_gym.results import Evaluation
from ope_gym.scale.fitting import fit_chunks
from ope_gym.scale.passes import (
    Gathered,
    Gathering,
    Items,
    Job,
    Recorded,
    Shared,
    has_densities,
    one_pass,
    reduce_task,
)
from ope_gym.scale.sources import Episodes, open_source
from ope_gym.scale.workers import Workers
from ope_gym.verdict import Reason
from ope_gym.weights.answers import Answers, ask_together
from ope_gym.weights.behaviours import behaviours_of, redrawn
from ope_gym.weights.mixtures import groups_of
from ope_gym.weights.reward_model import check_reward_model
from ope_gym.weights.rounds import stable_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NONE = np.empty(0, dtype=np.int64)
_TOGETHER = 64  # most targets that are evaluated at a time
_IN_MEMORY = 1 << 21  # steps times targets whose weights are held at a time
_IN_FILES = 1 << 26  # the same in the folder for scratch
_KEPT_DRAWS = 1 << 20  # steps up to which the mixtures of drawn policies are kept
_PROBED = 64  # steps at which a policy is asked whether it is deterministic


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
        weighting: cap, mixture and reward model of the weights.
        compute: workers, cluster, memory and progress.
        seed: seed of the bootstrap draws and of the q model.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table. See `ope_gym.Options`
        for more about the options.
    """
    options = OptionValues(
        held_out=held_out,
        q_model=q_model,
        gamma=gamma,
        interval=interval,
        level=level,
        weighting=weighting,
        compute=compute,
        seed=seed,
    )
    Options(**options)  # raises before anything is read
    return Evaluator(episodes, estimators, **options).evaluate(target, origin=origin)


class _Held(NamedTuple):
    """Episodes in memory: the target's answers, the q model, and its values at every step."""

    answers: Answers
    model: QModel | Baseline | None
    baseline: Baseline | None


@dataclass
class _Block:
    """Targets that are evaluated together, with their q model and estimators."""

    targets: list[Policy]
    model: QModel | Baseline | None
    names: tuple[str, ...]


class Evaluator:
    """Prepare episodes once, to evaluate any number of targets.

    For episodes in memory, the mixtures of the behaviours do not depend on the target: they are
    computed for the first one and kept, so that a further target costs only its own
    log-probabilities and its q model. `evaluate_all` shares more. The arguments are those of
    `evaluate`.
    """

    def __init__(
        self,
        episodes: Episodes,
        estimators: str | Iterable[str] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        self.options = Options(**options)
        self._named = estimator_names(estimators)
        self._candidates = candidates(self._named)
        compute, held_out = self.options.compute, self.options.held_out
        self._workers = Workers(compute.workers, compute.ray)
        self.source = open_source(episodes, held_out, compute.block_steps, self._workers)
        self._roster, self._data = self.source.roster, self.source.data
        self._behaviours = behaviours_of(self._roster)
        self._strata = joined(self._behaviours.strata)
        mixture, policies = self.options.weighting.mixture, self.source.policies
        self._groups = groups_of(self._behaviours, policies, mixture)
        self._estimated = fitted_models([policies[k] for k in self._behaviours.policies])
        self._shared = Shared()
        self._defaults: dict[int, QModel | None] = {}  # q model by number of actions, 0: continuous
        self._draws = scatter_draws([policies[k] for k in self._behaviours.policies])
        self._drawn_ones: dict[int, tuple[Trajectories, Shared]] = {}
        self._betting = self.options.betting(self._roster.horizon)

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
        return self._roster.steps

    def name_of(self, target: Target) -> str:
        """Return the name of a target, such as "policy 3"; of several files, with the file."""
        return self.source.name_of(target)

    def passes(self, target: Target) -> int:
        """Return how many passes over all steps an evaluation makes, as its progress counts."""
        if self._data is not None:
            return 1
        policy = self._policy(target)
        model = self._model(policy)
        rows = [ESTIMATORS[name] for name in self._names(policy, model is not None)]
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
        found: list[Evaluation] = []
        with one_blas_thread():
            for block in self._blocks([self._policy(target) for target in targets]):
                for one in self._evaluate(block, given[len(found) :]):
                    found.append(one)
                    if done is not None:
                        done(1)
        return [self._titled(*pair) for pair in zip(found, targets, strict=True)]

    def _titled(self, found: Evaluation, target: Target) -> Evaluation:
        if is_saved(target):
            return found.named(os.path.basename(target))
        number = self.source.number(target)
        return found if number is None else found.named(self.name_of(target))

    def _policy(self, target: Target) -> Policy:
        policy = self.source.policy(target)
        if self._data is not None:
            return asked(policy, self._data.observations, self._data.actions)
        return policy

    def _blocks(self, targets: Sequence[Policy]) -> Iterator[_Block]:
        """Cut targets into blocks that are evaluated together: alike, and not too many."""
        room = (_IN_MEMORY if self._data is not None else _IN_FILES) // self._roster.steps
        most = min(max(room, 1), _TOGETHER)
        block: _Block | None = None
        for target in targets:
            model = self._model(target)
            names = self._names(target, model is not None)
            finite = isinstance(target, FinitePolicy)  # draws of continuous actions are its own
            if (
                block is not None
                and finite
                and isinstance(block.targets[0], FinitePolicy)
                and (block.model, block.names) == (model, names)
                and len(block.targets) < most
            ):
                block.targets.append(target)
                continue
            if block is not None:
                yield block
            block = _Block([target], model, names)
        if block is not None:
            yield block

    def _evaluate(self, block: _Block, origins: Sequence[str | None]) -> Iterator[Evaluation]:
        options, names = self.options, block.names
        self._require(names, block.model)
        uses_q = block.model is not None and any(ESTIMATORS[name].uses_q for name in names)
        model = block.model if uses_q else None
        wanted = {ESTIMATORS[name].scheme for name in names} - {""}
        if uses_q and "auto" in names:
            wanted.add("basic")  # for the memories that it compares
        schemes = tuple(sorted(wanted))
        job = Job(
            self.source,
            dataclasses.replace(self._behaviours, ids=_NONE, strata=_NONE),
            self._groups,
            tuple(block.targets),
            schemes,
            options.gamma,
            self._reward_model,
            done=options.compute.progress,
        )
        held: list[_Held] = []
        if self._data is None:
            reduce = self._reduce_files(job, model)
        else:
            held = self._held(job, model)
            reduce = self._reduce_memory(job, held)
        setting, betting = self._setting(uses_q), self._betting
        computed = run(
            [
                aim(
                    i,
                    together(
                        ask(Gathering(target, len(self.policies), options.gamma)),
                        *(estimator(name, setting, betting) for name in names),
                    ),
                )
                for i, target in enumerate(block.targets)
            ],
            reduce,
        )
        if held and self._draws and not options.value_alone:
            computed = [
                [gathered, *self._with_scatter(names, found, setting, job, one)]
                for one, (gathered, *found) in zip(held, computed, strict=True)
            ]
        for target, origin, found in zip(block.targets, origins, computed, strict=False):
            yield self._concluded(target, origin, names, model, *found)

    def _concluded(
        self,
        target: Policy,
        origin: str | None,
        names: Sequence[str],
        model: object,
        gathered: Gathered,
        *found: Computed,
    ) -> Evaluation:
        """Turn the numbers of the estimators into estimates of one target."""
        options = self.options
        known = self._known(gathered, target, origin, names, model)
        if options.value_alone:
            facts, level = partial(dataclasses.replace, known), options.level
            return Evaluation(
                {
                    name: value_alone(name, ESTIMATORS[name], computed, known.sample, facts, level)
                    for name, computed in zip(names, found, strict=True)
                }
            )
        known = with_deviation(known, dict(zip(names, found, strict=True)))
        kind, level, seed = self._betting or options.kind, options.level, options.seed
        return Evaluation(
            {
                name: conclude(name, ESTIMATORS[name], computed, known, kind, level, seed)
                for name, computed in zip(names, found, strict=True)
            }
        )

    # Survey ----------------------------------------------------------------------------------

    @property
    def _parted(self) -> bool:
        """Whether mixtures are of a part of the behaviours."""
        return int(self._groups.max()) > 0

    @cached_property
    def _has_propensities(self) -> bool:
        """Whether the probability of every action is known."""
        return self._roster.known if self._data is None else self._data.has_propensities

    @cached_property
    def _doubts(self) -> tuple[Reason, ...]:
        """Reasons why every estimate is amber at best: repeats, unrecorded propensities."""
        repeated = 0 if self._data is None else repeated_episodes(self._data)
        reasons = []
        if repeated:
            size = len(self._roster)
            reasons.append(Reason("episodes_repeated", repeated=repeated, trajectories=size))
        if self._estimated:
            reasons.append(Reason("propensities_estimated"))
        elif not self._has_propensities:
            reasons.append(Reason("propensities_unknown"))
        return tuple(reasons)

    @property
    def _who_acted(self) -> tuple[Behaviour, ...]:
        """(K,) policies, or loggers where propensities were estimated."""
        policies, plans = self.source.policies, self._behaviours.plans
        behaviours = []
        for name, plan in zip(self._behaviours.names, plans, strict=True):
            first = policies[plan[0][1]]
            shown = logger_name(first, fold=True) or name
            numbers = tuple(policy for _, policy in plan)
            behaviours.append(Behaviour(shown, numbers, logger_name(first)))
        return tuple(behaviours)

    @cached_property
    def _reward_model(self) -> str | tuple[FloatArray, FloatArray]:
        model = self.options.weighting.reward_model
        if isinstance(model, str) and (model == "deterministic" or self._data is not None):
            return model
        if self._data is None:
            raise ValueError(
                f"reward_model is {_short(model)}, which needs all episodes in memory, but these "
                "are read from files in blocks: load them with Trajectories.load, or raise "
                "Compute(block_steps=...)"
            )
        return check_reward_model(model, self._data.n_steps, self._data.offsets)

    def _names(self, target: Policy, q_model: bool) -> tuple[str, ...]:
        """Return the estimators: those that were named, and those of groups that can be had."""
        if all(name in ESTIMATORS for name in self._named):
            return self._named
        offer = Offer(
            self._behaviours.available,
            q_model,
            self.options.kind.name == "betting",
            self._has_propensities,
            whole=frozenset(self._whole(target)),
        )
        return offer.choose(self._named)

    def _whole(self, target: Policy) -> Iterator[str]:
        """Yield the needs of `Composition.whole` that these episodes meet."""
        if self._data is None:
            return
        if self._roster.horizon == 1 and hasattr(target, "probs"):
            yield "one step"
        if not self._parted and self._behaviours.available:
            yield "rounds"

    def _require(self, names: Sequence[str], model: object) -> None:
        """Raise for estimators that these data, or these options, cannot give."""
        if not names:
            raise ValueError(
                "episodes have no log_probs, so there are no weights, and without a q model "
                "there is no estimate: give q_model a model of ope_gym.models"
            )
        for name in names:
            c = ESTIMATORS[name]
            if c.scheme and self._data is not None and not self._has_propensities:
                raise ValueError(
                    f"estimators has {name!r}, which needs the probabilities of all actions, but "
                    "an unknown policy acted (trajectories.has_propensities is false): use DM or "
                    "MDR, estimate them with ope_gym.fit_behaviour, or select(policies=...) the "
                    "episodes of known ones"
                )
            if c.baseline and model is None:
                raise ValueError(
                    f"estimators has {name!r}, which needs a q model: give q_model a model of "
                    "ope_gym.models (there is no default for such observations, or for a single "
                    "episode)"
                )
            if c.whole and self._data is None:
                raise ValueError(
                    f"estimators has {name!r}, which needs all episodes in memory, but these are "
                    "read from files in blocks: load them with Trajectories.load, or raise "
                    "Compute(block_steps=...)"
                )
            refuse_betting(name, self.options.kind)
            if self._parted and c.whole == "rounds":
                raise ValueError(
                    f"estimators has {name!r}, which needs the probabilities of all episodes under "
                    f"all {self._groups.size:,} behaviours, but mixtures are of at most "
                    f"{np.bincount(self._groups).max()}: give Weighting(mixture='all') if you can "
                    f"wait, or leave {name} out"
                )
            if c.scheme == "optimal" and self._reward_model == "cross-fit":
                self._require_cross_fit()

    def _require_cross_fit(self) -> None:
        if self.options.kind.name == "betting":
            raise ValueError(
                "interval='betting' needs independent episodes, but the weights of "
                "reward_model='cross-fit' learn from each other's rewards: give (mean, variance)"
            )
        if self._parted:
            raise ValueError(
                "reward_model='cross-fit' weighs two halves of the episodes against their own "
                "mixtures of all behaviours, but mixtures are of at most "
                f"{np.bincount(self._groups).max()} of {self._groups.size:,}: give "
                "Weighting(mixture='all'), or 'deterministic' or (mean, variance)"
            )

    # Fit -------------------------------------------------------------------------------------

    def _model_given(self) -> Any:
        """Return the q model as it was given; None if no estimator uses one."""
        model = self.options.q_model
        if not any(ESTIMATORS[name].uses_q for name in self._candidates):
            return None
        if isinstance(model, type):
            raise TypeError(f"q_model is the class {model.__name__}: give {model.__name__}()")
        if not isinstance(model, QModel | Baseline | str | None):
            raise TypeError(
                f"q_model is {_short(model)}: give a model of ope_gym.models, one of your own "
                "derived from ope_gym.models.QModel, a Baseline, a name or None"
            )
        return model

    def _model(self, target: Policy) -> QModel | Baseline | None:
        """Return the q model: as given, or the default for these observations."""
        model = self._model_given()
        if isinstance(model, str) and model != "default":
            model = named_model(model)
        in_chunks = not isinstance(model, QModel) or model.survey(target) is not None
        if self._data is None and (isinstance(model, Baseline) or not in_chunks):
            raise TypeError(
                f"q_model is {_short(model)}, but episodes that are read from files in blocks take "
                "a LinearQ, 'default' or None: load them with Trajectories.load, or raise "
                "Compute(block_steps=...)"
            )
        if not isinstance(model, str):
            return model  # type: ignore[no-any-return]
        if len(self._roster) < 2:
            return None
        if self._data is not None:
            first = batches.take(self._data.observations, slice(0, 1))
            finite = isinstance(target, FinitePolicy)
            actions = target.probs(first).shape[1] if finite else 0  # type: ignore[attr-defined]
            if actions not in self._defaults:
                self._defaults[actions] = default_model(self._data, target)
            return self._defaults[actions]
        _, chunk = next(self.source.chunks(self.source.tasks[0]))
        if not isinstance(asked(target, chunk.observations, chunk.actions), FinitePolicy):
            return None
        return default_linear(chunk, target)

    def _baselines(self, model: QModel | Baseline, answers: Sequence[Answers]) -> list[Baseline]:
        """Return for each target q and v at every step of the episodes in memory."""
        assert self._data is not None
        if isinstance(model, Baseline):
            found = [check_baseline(model, self._data.n_steps, self._data.offsets)] * len(answers)
        else:
            problems = [self._problem(asked) for asked in answers]
            found = cross_fit_targets(model, self._data, self._behaviours.ids, problems)
        wanted = any(ESTIMATORS[name].uses_visits for name in self._candidates)
        return [
            self._with_visits(own, asked) if wanted and own.visits is None else own
            for own, asked in zip(found, answers, strict=True)
        ]

    def _with_visits(self, baseline: Baseline, answers: Answers) -> Baseline:
        """Add ratios of visits to a q that has none: those of the default model."""
        assert self._data is not None
        usual = default_model(self._data, answers.target) if len(self._data) > 1 else None
        if usual is None:
            return baseline
        try:
            own = cross_fit(usual, self._data, self._behaviours.ids, self._problem(answers)).visits
        except ValueError:  # observations that only the given q can read
            own = None
        if own is None:
            return baseline
        # with residuals of the given q, not of the usual one
        return dataclasses.replace(baseline, visits=Visits(own.ratio))

    def _problem(self, answers: Answers) -> Problem:
        """Return what the q model is to learn, with random numbers from the seed."""
        rng = np.random.default_rng(self.options.seed)
        return Problem(answers.target, self.options.gamma, self._roster.longest, rng, answers)

    # Weigh and run ---------------------------------------------------------------------------

    def _setting(self, has_q: bool) -> Setting:
        strata, behaviours = self._strata, self._behaviours
        lone = strata is not behaviours.strata  # single ones show no spread
        return Setting(
            len(self._roster),
            strata if lone else behaviours.ids,
            behaviours.ids,
            behaviours.counts,
            self.options.gamma,
            self.options.weighting.cap,
            has_q,
            make_draws(strata, self.options.resamples, self.options.seed),
            not self.options.value_alone,
        )

    def _held(self, job: Job, model: QModel | Baseline | None) -> list[_Held]:
        """Ask the targets about the episodes in memory, and fit the q model to them."""
        assert self._data is not None
        answers = [Answers(target, self._data) for target in job.targets]
        if job.schemes:
            ask_together(answers)
        found: list[Any] = [None] * len(answers)
        if model is not None:
            found = self._baselines(model, answers)
        return [_Held(asked, model, one) for asked, one in zip(answers, found, strict=True)]

    def _reduce_memory(self, job: Job, held: Sequence[_Held]) -> Reduce:
        """Answer requests from the episodes in memory: one chunk, weighed once a target."""
        assert self._data is not None
        chunks = [self._weighed(job, one) for one in held]
        if job.done is not None:
            job.done(self._data.n_steps)
        return reduce_chunk(chunks)

    def _weighed(self, job: Job, held: _Held) -> Weighted:
        """Weigh the episodes in memory for one target."""
        chunk = job.weigh(held.answers, self._behaviours.ids, 0, held.baseline, self._shared)
        makers = {
            "rounds": lambda: self._rounds(chunk, held.model, held.answers),
            "one step": lambda: one_step(chunk.episodes.data, held.answers.target),
        }
        return dataclasses.replace(chunk, whole=makers)

    def _with_scatter(
        self,
        names: Sequence[str],
        found: Sequence[Computed],
        setting: Setting,
        job: Job,
        held: _Held,
    ) -> list[Computed]:
        """Add the estimation error of the propensities to each bias.

        The estimators run anew with draws of the fitted models. The root mean square by which a
        value moves holds both: how much it varies with the models, and how far the middle of its
        values lies off, which plain weights do, because 1 / p is convex. In large samples a model
        that learned from the weighed episodes moves against their own chance (Hirano, Imbens and
        Ridder, 2003): the sum of both squares is on the safe side.
        """
        moved = [i for i, name in enumerate(names) if scatters(name)]
        plain, ids = dataclasses.replace(setting, draws=None), self._behaviours.ids
        away = np.empty((len(moved), self._draws))
        for r in range(self._draws):
            data, shared = self._drawn(r)
            chunk = job.weigh(held.answers.about(data), ids, 0, held.baseline, shared)
            some = run([estimator(names[i], plain) for i in moved], reduce_chunk(chunk))
            away[:, r] = [one.value - found[i].value for one, i in zip(some, moved, strict=True)]
        result = list(found)
        for i, off in zip(moved, away, strict=True):
            seen = off[np.isfinite(off)]  # without any weight left there is no value
            error = float(np.sqrt(np.mean(seen**2))) if seen.size else 0.0
            result[i] = dataclasses.replace(
                found[i],
                bias=float(np.hypot(found[i].bias, error)),
                report={**found[i].report, "propensities": error},
            )
        return result

    def _drawn(self, r: int) -> tuple[Trajectories, Shared]:
        """Return the episodes as recorded by the draw r of estimated policies, and its mixtures."""
        assert self._data is not None
        found = self._drawn_ones.get(r)
        if found is None:
            found = redrawn(self._data, self._behaviours.policies, r), Shared()
        if self._data.n_steps <= _KEPT_DRAWS:
            self._drawn_ones[r] = found
        return found

    def _reduce_files(self, job: Job, model: Any) -> Reduce:
        """Answer requests in passes over the files."""
        fold: IntArray | None = None
        job = dataclasses.replace(job, threads=job.fit_for_threads(model))
        if model is not None:
            ids, longest = self._behaviours.ids, self._roster.longest
            values, fold = fit_chunks(job, model, ids, longest, self._workers)
            job = dataclasses.replace(job, q=values)

        def reduce(requests: Sequence[Any]) -> list[Any]:
            items = Items(self.source.tasks, self._behaviours.ids, fold, requests)
            merged: list[Any] = []
            for parts in one_pass(job, self._workers, reduce_task, items):
                merge_all(merged, parts)
            return [r.total(parts) for r, parts in zip(requests, merged, strict=True)]

        return reduce

    def _rounds(
        self, chunk: Weighted, model: QModel | Baseline | None, answers: Answers
    ) -> tuple[Weighted, FloatArray]:
        """Return the episodes with residuals of past-only q models, and weights of the rounds."""
        assert self._data is not None
        assert model is not None  # `_require` saw to it
        data, offsets, gamma = self._data, self._data.offsets, self.options.gamma
        recorded: Recorded = chunk.episodes
        values = (
            self._baselines(model, [answers])[0]
            if isinstance(model, Baseline)
            else past_only(model, data, self._behaviours.ids, self._problem(answers))
        )
        start, residuals = values.at_start(offsets), values.residuals(data.rewards, offsets, gamma)
        rows, ids = self._behaviours.rows(data), self._behaviours.ids
        weights = stable_weights(recorded.own, rows, ids, offsets, gamma, start, residuals)
        kept = step_numbers(offsets) < np.diff(chunk.offsets).max()  # the steps within discount
        return dataclasses.replace(chunk, residuals=residuals[kept], start=start), weights

    # Conclude --------------------------------------------------------------------------------

    def _model_name(self, names: Sequence[str], model: object) -> str | None:
        """Return the name of the q model that was used, or why there is none."""
        if model is not None:
            return type(model).__name__
        wanted = any(ESTIMATORS[name].uses_q for name in names)
        if wanted and self._data is None and self.options.q_model is not None:
            return "none that can be fitted in blocks"
        return None

    def _propensity_model(self, names: Sequence[str]) -> Reason | None:
        """Say how propensities were estimated, and which intervals include their error."""
        if not self._estimated:
            return None
        weighted = [name for name in names if ESTIMATORS[name].scheme]
        if self.options.value_alone:
            weighted = []
        drawn = [name for name in weighted if self._draws and self._data and scatters(name)]
        fixed = tuple(name for name in weighted if name not in drawn)
        return Reason("propensities_from", model=self._estimated, drawn=tuple(drawn), fixed=fixed)

    def _known(
        self,
        gathered: Gathered,
        target: Policy,
        origin: str | None,
        names: Sequence[str],
        model: object,
    ) -> Known:
        report, estimated = gathered.propensities, self._estimated
        schemes = {ESTIMATORS[name].scheme for name in names}
        mixed = not schemes <= {"", "basic"}  # else no mixture was needed
        some = marked(len(self._roster))
        sample = Sample(
            len(self._roster),
            self._roster.steps,
            self._strata,
            self._who_acted,
            self._behaviours.counts,
            self.options.gamma,
            self._roster.regime(target, origin),
            fingerprint(
                gathered.returns,
                gathered.log_probs[some],
                self._roster.lengths[some],
                self._behaviours.ids[some],
            ),
            PartialMixture.of(self._groups) if mixed and not estimated else None,
            self._model_name(names, model),
            self._propensity_model(names),
        )
        roster, reasons = self._roster, report.misfit if estimated else report.reasons
        if gathered.mismatch is not None:
            reasons += (gathered.mismatch,)
        return Known(
            sample,
            self._behaviours.ids,
            Outcomes.of(
                gathered.discounted,
                gathered.rewards,
                self.options.gamma,
                roster.longest,
                roster.limited,
            ),
            support=report.support,
            missing=report.missing,
            calibration=report.calibration,
            reasons=reasons + self._doubts,
            clocked=roster.clocked,
            held_out=bool(roster.held_out.any()),
            deterministic=self._data is not None and always_certain(target, self._data),
        )


def scatters(name: str) -> bool:
    """Tell whether an estimator is run anew with draws of estimated propensities."""
    return bool(ESTIMATORS[name].scheme) and not ESTIMATORS[name].whole


def always_certain(target: Policy, data: Trajectories) -> bool:
    """Return whether a policy takes one action for certain, at the first recorded steps.

    One without `probs` is asked for the recorded actions: all of them are certain or impossible.
    """
    first = slice(0, _PROBED)
    seen = batches.take(data.observations, first)
    if isinstance(target, FinitePolicy):
        return bool((np.max(target.probs(seen), axis=1) > 1.0 - 1e-9).all())
    own = np.asarray(target.log_prob(seen, batches.take(data.actions, first)))
    taken = np.abs(own) < 1e-9
    sure = taken.any() and (taken | np.isneginf(own)).all()
    return bool(sure and not has_densities(data))  # a density of 1 is not certain


def one_step(data: Trajectories, target: Policy) -> OneStep:
    """Return one-step episodes as EA needs them, or raise if they are none."""
    longest = int(data.lengths.max())
    if longest > 1:
        episode = int(np.argmax(data.lengths))
        raise ValueError(
            f"EA is defined for one-step data, but episode {episode} has {longest} steps: for "
            "longer episodes, use its counterpart, the direct method (DM, fitted Q evaluation)"
        )
    if not isinstance(target, FinitePolicy):
        raise ValueError(
            "EA sums over a finite action set, but the target has no probs(observations): use FIS"
        )
    actions = np.asarray(data.actions)
    if actions.shape != (len(data),) or actions.dtype.kind not in "iub":
        raise ValueError(
            f"EA needs one whole number as an action, but actions have shape {actions.shape} and "
            f"type {actions.dtype}: use FIS"
        )
    contexts = batches.distinct(data.observations)
    probs = target.probs(data.observations)
    return OneStep(contexts, actions.astype(np.int64), probs, data.rewards)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
