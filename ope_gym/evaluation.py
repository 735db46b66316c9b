"""Evaluate a policy from recorded episodes, or from arrays of log-probabilities.

The only place where policies meet estimators. An evaluation surveys who recorded the episodes, fits
the q model, weighs the episodes, runs the estimators side by side, and concludes:

    survey    the source's roster: behaviours, strata, groups of mixtures
    fit       q and v at every step, cross-fitted
    weigh     importance weights, chunk by chunk
    run       the estimators ask for sums over all episodes, a pass a round
    conclude  error, interval, diagnostics and verdict of each
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ope_gym import batches
from ope_gym.arrays import (
    FloatArray,
    IntArray,
    as_floats,
    check_column,
    check_finite,
    check_log_probs,
    check_offsets,
    folds_within,
    place,
    step_numbers,
)
from ope_gym.data.trajectories import Trajectories
from ope_gym.estimators.empirical_average import OneStep
from ope_gym.estimators.methods import estimator
from ope_gym.estimators.reductions import Bets, Column, Reduction, Weighted
from ope_gym.estimators.run import Reduce, ask, reduce_chunk, run
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Setting, Steps
from ope_gym.inference import regimes
from ope_gym.inference.bootstrap import PoissonDraws, fingerprint
from ope_gym.inference.computed import Computed
from ope_gym.inference.conclude import Known, conclude
from ope_gym.inference.errors import joined
from ope_gym.inference.estimate import PartialMixture, Sample
from ope_gym.inference.intervals import Betting, IntervalKind
from ope_gym.models import default_linear, default_model, named_model
from ope_gym.models.base import (
    FOLDS,
    Baseline,
    CrossFitted,
    QModel,
    cross_fit,
    past_only,
)
from ope_gym.models.linear import FeatureSurvey, LinearQ, NormalEquations
from ope_gym.options import Compute, Options, OptionValues, Weighting, estimator_names
from ope_gym.policies import FinitePolicy, Policy
from ope_gym.results import Evaluation
from ope_gym.scale.passes import (
    Gathered,
    Gathering,
    Item,
    Items,
    Job,
    Recorded,
    merge_all,
    one_pass,
    reduce_task,
    within_discount,
)
from ope_gym.scale.sources import Episodes, open_source
from ope_gym.scale.spool import scratch_folder
from ope_gym.scale.workers import Workers, start_workers
from ope_gym.weights.behaviours import behaviours_of
from ope_gym.weights.formula import log_weights, path_log_probs
from ope_gym.weights.mixtures import group_size, interleaved
from ope_gym.weights.rounds import stable_weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NONE = np.empty(0, dtype=np.int64)
_FOLLOWING = (
    "the policy changed during episodes: where one follows the other, its start depends on how "
    "long the last one lived, and weights against a mixture are not exactly unbiased"
)


def evaluate(
    episodes: Episodes,
    target: Policy | int | str,
    estimators: str | Iterable[str] | None = None,
    *,
    origin: str | None = None,
    held_out: bool | None = None,
    q_model: QModel | Baseline | str | None = "default",
    gamma: float = 1.0,
    interval: str | IntervalKind = "ess-t",
    level: float = 0.95,
    weighting: Weighting = Weighting(),  # noqa: B008, frozen
    compute: Compute = Compute(),  # noqa: B008, frozen
    seed: int = 0,
) -> Evaluation:
    """Estimate the value of a policy from episodes that other policies recorded.

    Args:
        episodes: recorded episodes with the policies that acted: trajectories, a buffer, a
            recorder, a file, or a list of files, which need not fit into memory.
        target: the policy to evaluate; or the number of a recorded one, or "last".
        estimators: names from `ope_gym.ESTIMATORS`; by default the common ones that the data
            allow, "EA" only where the time limit is one step.
        origin: "learned" if the target was trained on episodes that are not held out, "fixed" if
            it was not; None to tell it from the recorded policies.
        held_out: True for held-out episodes alone, False for all, None for the held-out ones if
            there are any.
        q_model: a model of `ope_gym.models`, or its name, for the estimators that need one;
            "default" chooses by the observations; None for none; or a `Baseline`.
        gamma: discount within [0, 1].
        interval: "ess-t", "percentile", "bca", or an object such as `Bootstrap(2000)` or
            `Betting(reward_range=(0, 1))`.
        level: confidence level of the intervals.
        weighting: cap, mixture and reward model of the weights.
        compute: workers, cluster, memory and progress.
        seed: of the bootstrap draws and of the q model.

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
        weighting=weighting,
        compute=compute,
        seed=seed,
    )
    return evaluator.evaluate(target, origin=origin)


class Evaluator:
    """Episodes made ready once, to evaluate any number of targets.

    For episodes in memory the mixtures of the behaviours, which do not depend on the target, are
    computed for the first and kept: a further target costs its own log-probabilities and its q
    model. The arguments are those of `evaluate`.
    """

    def __init__(
        self,
        episodes: Episodes,
        estimators: str | Iterable[str] | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        self.options = Options(**options)
        self._named = None if estimators is None else estimator_names(estimators)
        compute = self.options.compute
        with start_workers(compute.workers, compute.ray) as crew:
            self._source = open_source(episodes, self.options.held_out, compute.block_steps, crew)
        self._roster, self._data = self._source.roster, self._source.data
        self._behaviours = behaviours_of(self._roster)
        self._strata = joined(self._behaviours.strata)
        size = group_size(self.options.weighting.mixture, len(self._behaviours.plans))
        self._groups = interleaved(self._behaviours.counts, size)
        self._bases: dict[str, FloatArray] = {}
        self._mismatch = ""
        self._betting = self.options.betting(self._roster.horizon)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The recorded policies, by number."""
        return self._source.policies

    @property
    def held_out(self) -> bool:
        """Whether held-out episodes alone are used."""
        return self._source.held_out

    @property
    def steps(self) -> int:
        """Number of recorded steps that are used."""
        return self._roster.steps

    def name_of(self, target: Policy | int | str) -> str:
        """Return the name of a target: "policy 3", with a file that has it of several."""
        return self._source.name_of(target)

    def passes(self, target: Policy | int | str) -> int:
        """Return how often an evaluation does all steps, as its progress counts them."""
        if self._data is not None:
            return 1
        policy = self._source.policy(target)
        model = self._model(policy)
        rows = [ESTIMATORS[name] for name in self._names(policy, model is not None)]
        fits = 2 if model is not None and any(c.uses_q for c in rows) else 0
        blends = bool(fits) and any(c.method == "auto" for c in rows)
        return fits + 1 + any(c.normalised for c in rows) + blends

    def evaluate(self, target: Policy | int | str, *, origin: str | None = None) -> Evaluation:
        """Estimate the value of `target` by every estimator.

        Args:
            target: a policy, the number of a recorded one, or "last".
            origin: as in `ope_gym.evaluate`.
        """
        policy, compute = self._source.policy(target), self.options.compute
        with (
            scratch_folder(compute.scratch) as folder,
            start_workers(compute.workers, compute.ray) as crew,
        ):
            return self._evaluate(policy, origin, crew, folder)

    def _evaluate(
        self, target: Policy, origin: str | None, crew: Workers, folder: Path | None
    ) -> Evaluation:
        options = self.options
        model = self._model(target)
        names = self._names(target, model is not None)
        self._require(names, model)
        schemes = tuple(sorted({ESTIMATORS[name].scheme for name in names} - {""}))
        uses_q = model is not None and any(ESTIMATORS[name].uses_q for name in names)
        job = Job(
            self._source,
            dataclasses.replace(self._behaviours, ids=_NONE, strata=_NONE),
            self._groups,
            target,
            schemes,
            options.gamma,
            self._reward_model,
            scratch=folder,
            done=options.compute.progress,
        )
        reduce = (
            self._reduce_files(job, model if uses_q else None, crew)
            if self._data is None
            else self._reduce_memory(job, model if uses_q else None, names)
        )
        setting = self._setting(uses_q)
        gathering = Gathering(target, len(self.policies))
        found = run_all(names, setting, reduce, self._betting, gathering)
        gathered: Gathered = found.gathered
        self._mismatch = self._mismatch or gathered.mismatch
        known = self._known(gathered, target, origin, schemes, model if uses_q else None)
        return conclude_all(names, found, known, options, self._betting)

    # Survey ----------------------------------------------------------------------------------

    @property
    def _parted(self) -> bool:
        """Whether mixtures are of a part of the behaviours."""
        return int(self._groups.max()) > 0

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
        """Return the estimators: those that were named, or the common ones that the data allow."""
        if self._named is not None:
            return self._named
        propensities = self._data is None or self._data.has_propensities
        return common_estimators(
            self._behaviours.available,
            q_model,
            self.options.kind,
            one_step=self._data is not None
            and self._roster.horizon == 1
            and hasattr(target, "probs"),
            propensities=propensities,
        )

    def _require(self, names: Sequence[str], model: object) -> None:
        """Raise for estimators that these data, or these options, cannot give."""
        if not names:
            raise ValueError(
                "episodes have no log_probs, so there are no weights, and without a q model "
                "there is no estimate: give q_model a model of ope_gym.models"
            )
        for name in names:
            c = ESTIMATORS[name]
            if c.scheme and self._data is not None and not self._data.has_propensities:
                raise ValueError(
                    f"estimators has {name!r}, which needs the probabilities of all actions, but "
                    "an unknown policy acted (trajectories.has_propensities is false): use 'DM', "
                    "or select(policies=...) the episodes of known ones"
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
            if self._parted and c.whole in ("path probabilities", "rounds"):
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
        if self._named is not None and not any(ESTIMATORS[n].uses_q for n in self._named):
            return None
        if isinstance(model, type):
            raise TypeError(f"q_model is the class {model.__name__}: give {model.__name__}()")
        return model

    def _model(self, target: Policy) -> QModel | Baseline | None:
        """Return the q model: as given, or the default for these observations."""
        model = self._model_given()
        if isinstance(model, str) and model != "default":
            model = named_model(model)
        if self._data is None and not (model is None or isinstance(model, LinearQ | str)):
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
            return default_model(self._data, target)
        if not isinstance(target, FinitePolicy):
            return None
        _, chunk = next(self._source.chunks(self._source.tasks[0]))
        return default_linear(chunk, target)

    def _baseline(self, model: QModel | Baseline, target: Policy) -> Baseline:
        """Return q and v at every step of the episodes in memory."""
        assert self._data is not None
        if isinstance(model, Baseline):
            return check_baseline(model, self._data.n_steps, self._data.offsets)
        return cross_fit(
            model,
            self._data,
            target,
            self._behaviours.ids,
            gamma=self.options.gamma,
            horizon=self._roster.longest,
            rng=np.random.default_rng(self.options.seed),
        )

    def _fit_chunks(self, job: Job, model: LinearQ, crew: Workers) -> tuple[CrossFitted, IntArray]:
        """Fit the q model to chunks, in two passes; return its values and the folds (n,)."""
        folds = min(FOLDS, len(self._roster))
        if folds < 2:
            raise ValueError("q_model needs at least 2 episodes: it learns from one for another")
        if not isinstance(job.target, FinitePolicy):
            raise ValueError(
                f"q_model is {_short(model)}, which draws actions of a target that has no "
                "probs(observations), but these are read from files in blocks, on which the draws "
                "would depend: load them with Trajectories.load, raise Compute(block_steps=...), "
                "or give q_model=None"
            )
        fold = folds_within(self._behaviours.ids, folds)
        items = Items(self._source.tasks, self._behaviours.ids, fold)
        survey = FeatureSurvey(model, job.target)
        for seen in one_pass(job, crew, _Survey(survey), items):
            survey.merge(seen)
        make = partial(
            survey.equations, gamma=self.options.gamma, horizon=self._roster.longest, folds=folds
        )
        equations = make()
        for part in one_pass(job, crew, _Equations(make), items):
            equations.merge(part)
        return equations.cross_fitted(), fold

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
            make_draws(strata, self.options),
        )

    def _reduce_memory(
        self, job: Job, model: QModel | Baseline | None, names: Sequence[str]
    ) -> Reduce:
        """Answer requests from the episodes in memory: one chunk, weighed once."""
        assert self._data is not None
        baseline = None if model is None else self._baseline(model, job.target)
        chunk = job.weigh(self._data, self._behaviours.ids, 0, baseline, self._bases)
        makers = {
            "path probabilities": lambda: self._path_log_probs,
            "rounds": lambda: self._rounds(chunk, model, job.target),
            "one step": lambda: one_step(chunk.episodes.data, job.target),
        }
        if job.done is not None:
            job.done(self._data.n_steps)
        return reduce_chunk(dataclasses.replace(chunk, whole=makers))

    def _reduce_files(self, job: Job, model: Any, crew: Workers) -> Reduce:
        """Answer requests in passes over the files."""
        fold: IntArray | None = None
        if model is not None:
            values, fold = self._fit_chunks(job, model, crew)
            job = dataclasses.replace(job, q=values)

        def reduce(requests: Sequence[Reduction]) -> list[Any]:
            items = Items(self._source.tasks, self._behaviours.ids, fold, requests)
            merged: list[Any] = []
            for parts in one_pass(job, crew, reduce_task, items):
                merge_all(merged, parts)
            return [r.total(parts) for r, parts in zip(requests, merged, strict=True)]

        return reduce

    @cached_property
    def _path_log_probs(self) -> FloatArray:
        """(n, K) log-probabilities of whole episodes."""
        assert self._data is not None
        return path_log_probs(self._behaviours.rows(self._data), self._data.offsets)

    def _rounds(
        self, chunk: Weighted, model: QModel | Baseline | None, target: Policy
    ) -> tuple[Weighted, FloatArray]:
        """Return the episodes with residuals of past-only q models, and weights of the rounds."""
        assert self._data is not None
        assert model is not None  # `_require` saw to it
        data, offsets, gamma = self._data, self._data.offsets, self.options.gamma
        recorded: Recorded = chunk.episodes
        values = (
            self._baseline(model, target)
            if isinstance(model, Baseline)
            else past_only(
                model,
                data,
                target,
                self._behaviours.ids,
                gamma=gamma,
                horizon=self._roster.longest,
                rng=np.random.default_rng(self.options.seed),
            )
        )
        start, residuals = values.at_start(offsets), values.residuals(data.rewards, offsets, gamma)
        rows, ids = self._behaviours.rows(data), self._behaviours.ids
        weights = stable_weights(recorded.own, rows, ids, offsets, gamma, start, residuals)
        kept = step_numbers(offsets) < np.diff(chunk.offsets).max()  # the steps within discount
        return dataclasses.replace(chunk, residuals=residuals[kept], start=start), weights

    # Conclude --------------------------------------------------------------------------------

    def _known(
        self,
        gathered: Gathered,
        target: Policy,
        origin: str | None,
        schemes: Sequence[str],
        model: object,
    ) -> Known:
        report = gathered.propensities
        mixed = any(scheme != "basic" for scheme in schemes)  # else no mixture was needed
        sample = Sample(
            len(self._roster),
            self._roster.steps,
            self._strata,
            self._behaviours.names,
            self._behaviours.counts,
            self.options.gamma,
            self._roster.regime(target, origin),
            fingerprint(
                gathered.returns, gathered.log_probs, self._roster.lengths, self._behaviours.ids
            ),
            PartialMixture.of(self._groups) if mixed else None,
            None if model is None else type(model).__name__,
        )
        return Known(
            sample,
            self._behaviours.ids,
            report.support,
            report.calibration,
            report.notes + ((self._mismatch,) if self._mismatch else ()),
            (_FOLLOWING,) if self._roster.clocked else (),
        )


class _Survey:
    """Survey the features of the chunks of a task, for a q model."""

    def __init__(self, empty: FeatureSurvey) -> None:
        self._empty = empty

    def __call__(self, job: Job, item: Item) -> FeatureSurvey:
        found = FeatureSurvey(self._empty.model, self._empty.target)
        for _, chunk, _ in job.chunks(item.task, item.ids):
            found.update(chunk)
        return found


class _Equations:
    """Accumulate the q model's normal equations over the chunks of a task."""

    def __init__(self, make: Callable[[], NormalEquations]) -> None:
        self._make = make

    def __call__(self, job: Job, item: Item) -> NormalEquations:
        found = self._make()
        assert item.fold is not None
        for _, chunk, here in job.chunks(item.task, item.ids):
            found.update(chunk, item.fold[here])
        return found


def evaluate_log_probs(
    target_log_probs: ArrayLike,
    behaviour_log_probs: ArrayLike,
    behaviour_ids: ArrayLike,
    rewards: ArrayLike,
    offsets: ArrayLike,
    estimators: str | Iterable[str] | None = None,
    *,
    baseline: tuple[ArrayLike, ArrayLike] | None = None,
    regime: str = "unstated",
    density: bool = False,
    gamma: float = 1.0,
    interval: str | IntervalKind = "ess-t",
    level: float = 0.95,
    weighting: Weighting = Weighting(),  # noqa: B008, frozen
    seed: int = 0,
) -> Evaluation:
    """Estimate the value of a policy from arrays; S steps, n trajectories, K behaviours.

    Args:
        target_log_probs: (S,) log-probability of each taken action under the target.
        behaviour_log_probs: (K, S) the same under each behaviour. Where the policy changed during
            an episode, row k holds the sequence of policies that behaviour k would have followed.
        behaviour_ids: (n,) which behaviour each trajectory came from.
        rewards: (S,).
        offsets: (n + 1,) trajectory i is rows offsets[i]:offsets[i + 1].
        estimators: as in `evaluate`, but for those that need more than arrays.
        baseline: q (S,) of the taken actions and v (S,), for the estimators that need a q model.
        regime: what is known of the data: "held-out", "fresh", "adaptive", "in-sample" or
            "unstated"; see `ope_gym.inference.regimes`.
        density: the numbers are log densities of continuous actions.
        gamma: discount within [0, 1].
        interval: as in `evaluate`.
        level: confidence level.
        weighting: cap and reward model of the weights; the mixture is that of all behaviours.
        seed: of the bootstrap draws.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table.

    >>> half = np.log(0.5)
    >>> evaluation = evaluate_log_probs(
    ...     [half, half, half], [[half, half, half]], [0, 0], [1.0, 1.0, 4.0], [0, 2, 3]
    ... )
    >>> evaluation["NFIS"].value
    3.0
    """
    options = Options(gamma=gamma, interval=interval, level=level, weighting=weighting, seed=seed)
    rewards = check_column(rewards, "rewards")
    steps = rewards.size
    offsets = check_offsets(offsets, steps)
    check_finite(rewards, "rewards", offsets)
    target = check_column(target_log_probs, "target_log_probs", steps)
    check_log_probs(target, "target_log_probs", offsets, density)
    rows = as_floats(behaviour_log_probs, "behaviour_log_probs")
    if rows.ndim != 2 or rows.shape[1] != steps or rows.shape[0] == 0:
        raise ValueError(
            f"behaviour_log_probs has shape {rows.shape}; expected (K, {steps}), a row a behaviour"
        )
    ids = check_ids(behaviour_ids, offsets.size - 1, rows.shape[0])
    if regime not in regimes.REGIMES:
        raise ValueError(f"regime is {regime!r}; choose one of {', '.join(regimes.REGIMES)}")
    names = (
        common_estimators(True, baseline is not None, options.kind)
        if estimators is None
        else estimator_names(estimators)
    )
    for name in names:
        if ESTIMATORS[name].whole in ("rounds", "one step"):
            raise ValueError(
                f"estimators has {name!r}, which needs observations and policies: use "
                "evaluate(episodes, target)"
            )
        if ESTIMATORS[name].baseline and baseline is None:
            raise ValueError(f"estimators has {name!r}, which needs baseline=(q, v)")
        refuse_betting(name, options.kind)
    model = check_reward_model(weighting.reward_model, steps, offsets)
    if model == "cross-fit":
        raise ValueError(
            "reward_model='cross-fit' needs observations and actions: use evaluate(episodes, "
            "target), or pass the mean (S,) and the variance (S,)"
        )
    log_w = log_weights(
        target,
        rows,
        ids,
        offsets,
        sorted({ESTIMATORS[name].scheme for name in names} - {""}),
        density=density,
        reward_model=model if isinstance(model, tuple) else None,
    )
    chunk = Weighted(
        offsets,
        rewards,
        log_w,
        whole={"path probabilities": lambda: path_log_probs(rows, offsets)},
    )
    if baseline is not None:
        values = Baseline(*(check_column(x, "baseline", steps) for x in baseline))
        values = check_baseline(values, steps, offsets)
        chunk = dataclasses.replace(
            chunk,
            start=values.at_start(offsets),
            residuals=values.residuals(rewards, offsets, options.gamma),
        )
    counts, strata = np.bincount(ids, minlength=rows.shape[0]), joined(ids)
    setting = Setting(
        ids.size,
        strata,
        ids,
        counts,
        options.gamma,
        weighting.cap,
        baseline is not None,
        make_draws(strata, options),
    )
    betting = options.betting(None)
    reduce = reduce_chunk(within_discount(chunk, options.gamma))
    found = run_all(names, setting, reduce, betting)
    sample = Sample(
        ids.size,
        steps,
        strata,
        tuple(f"behaviour {k}" for k in range(rows.shape[0])),
        counts,
        options.gamma,
        regime,
        fingerprint(
            np.add.reduceat(rewards, offsets[:-1]),
            rows[ids, offsets[1:] - 1],
            np.diff(offsets),
            ids,
        ),
    )
    return conclude_all(names, found, Known(sample, ids), options, betting)


# Run and conclude ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The results of all estimators, the sums for betting by (scheme, capped), and the facts."""

    computed: dict[str, Computed]
    bets: dict[tuple[str, bool], FloatArray]
    gathered: Any = None


def run_all(
    names: Sequence[str],
    setting: Setting,
    reduce: Reduce,
    betting: Betting | None,
    gathering: Gathering | None = None,
) -> Found:
    """Run all estimators side by side.

    Args:
        names: of the estimators.
        setting: what they share.
        reduce: answers their requests.
        betting: the interval, if it is one by betting.
        gathering: asks for the facts about the recorded data, in the first pass.
    """
    keys = {(ESTIMATORS[name].scheme, ESTIMATORS[name].capped) for name in names} if betting else ()
    bets = [_bets(key, setting, betting) for key in keys]
    first = [] if gathering is None else [ask(gathering)]
    results = run([*first, *bets, *(estimator(name, setting) for name in names)], reduce)
    gathered = results.pop(0) if gathering is not None else None
    placed = dict(zip(keys, results, strict=False))
    return Found(dict(zip(names, results[len(placed) :], strict=True)), placed, gathered)


def make_draws(strata: IntArray, options: Options) -> PoissonDraws | None:
    """Return the draws of the bootstrap; None without one."""
    if not options.resamples:
        return None
    return PoissonDraws(strata, options.resamples, options.seed)


def _bets(key: tuple[str, bool], setting: Setting, betting: Betting | None) -> Steps[FloatArray]:
    assert betting is not None
    assert betting.reward_range is not None
    assert betting.horizon is not None
    column = Column(key[0], setting.cap if key[1] else None)
    return ask(Bets(column, setting.gamma, betting.reward_range, betting.horizon))


def conclude_all(
    names: Sequence[str], found: Found, known: Known, options: Options, betting: Betting | None
) -> Evaluation:
    """Turn the results of all estimators into an evaluation."""
    kind = betting or options.kind
    return Evaluation(
        {
            name: conclude(
                name,
                ESTIMATORS[name],
                found.computed[name],
                known,
                kind,
                options.level,
                options.seed,
                found.bets.get((ESTIMATORS[name].scheme, ESTIMATORS[name].capped)),
            )
            for name in names
        }
    )


def common_estimators(
    policies: bool,
    q_model: bool,
    kind: IntervalKind,
    *,
    one_step: bool = False,
    propensities: bool = True,
) -> tuple[str, ...]:
    """Return the common estimators that can be had.

    Without the policies only basic weights can, without propensities none.
    """
    betting = kind.name == "betting"
    return tuple(
        name
        for name, c in ESTIMATORS.items()
        if (c.common or (one_step and c.method == "average"))
        and (policies or c.scheme in ("", "basic"))
        and (propensities or not c.scheme)
        and (q_model or not c.baseline)
        and (c.scheme or not betting)
    )


# Checks ----------------------------------------------------------------------------------------


def refuse_betting(name: str, kind: IntervalKind) -> None:
    """Raise if an estimator without weights is to be bounded by betting."""
    if kind.name == "betting" and not ESTIMATORS[name].scheme:
        raise ValueError(
            f"interval='betting' bounds weighted means; {name} is none: use FIS or BIS"
        )


def check_baseline(baseline: Baseline, steps: int, offsets: IntArray) -> Baseline:
    """Return a baseline of finite numbers, one a step, or raise."""
    for name, values in (("q", baseline.q), ("v", baseline.v)):
        check_finite(check_column(values, f"baseline {name}", steps), f"baseline {name}", offsets)
    return baseline


def check_reward_model(
    model: str | tuple[ArrayLike, ArrayLike], steps: int, offsets: IntArray
) -> str | tuple[FloatArray, FloatArray]:
    """Return a reward model with arrays that fit the data, or raise."""
    if isinstance(model, str):
        return model
    mean = check_column(model[0], "reward_model mean", steps)
    variance = check_column(model[1], "reward_model variance", steps)
    check_finite(mean, "reward_model mean", offsets)
    check_finite(variance, "reward_model variance", offsets)
    negative = np.flatnonzero(variance < 0)
    if negative.size:
        episode, step = place(int(negative[0]), offsets)
        raise ValueError(
            f"reward_model variance is {variance[negative[0]]} at episode {episode}, step {step}: "
            "a variance is not negative"
        )
    return mean, variance


def check_ids(behaviour_ids: ArrayLike, n: int, behaviours: int) -> IntArray:
    """Return (n,) numbers of behaviours, or raise."""
    ids = np.asarray(behaviour_ids)
    if ids.shape != (n,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"behaviour_ids has shape {ids.shape} and type {ids.dtype}; expected ({n},) integers, "
            "one an episode"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= behaviours))
    if outside.size:
        episode = int(outside[0])
        raise ValueError(
            f"behaviour_ids is {ids[episode]} at episode {episode}; behaviour_log_probs has "
            f"{behaviours} rows, so ids run from 0 to {behaviours - 1}"
        )
    return ids.astype(np.int64)


def one_step(data: Trajectories, target: Policy) -> OneStep:
    """Return one-step episodes as EA needs them, or raise if they are none."""
    longest = int(data.lengths.max())
    if longest > 1:
        episode = int(np.argmax(data.lengths))
        raise ValueError(
            f"EA is defined for one-step data, but episode {episode} has {longest} steps: for "
            "longer episodes the like of it is a direct method (DM, fitted Q evaluation)"
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
