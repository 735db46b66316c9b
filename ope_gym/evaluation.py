"""The two doors: evaluate a policy from trajectories, or from arrays of log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

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
    place,
)
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Problem, compute
from ope_gym.inference import intervals, regimes
from ope_gym.inference.conclude import Known, estimated
from ope_gym.inference.estimate import Estimate, PartialMixture, Sample
from ope_gym.options import Options, check_options
from ope_gym.policies import Policy, check_target
from ope_gym.results import Evaluation
from ope_gym.weights.formula import log_weights

if TYPE_CHECKING:
    from ope_gym.data.buffer import TrajectoryBuffer
    from ope_gym.data.trajectories import Trajectories
    from ope_gym.models.base import Baseline, QModel


_FOLLOWING = (
    "the policy changed during episodes: where one follows the other, its start depends on how "
    "long the last one lived, and weights against a mixture are not exactly unbiased"
)


def evaluate(
    trajectories: Trajectories | TrajectoryBuffer,
    target: Policy,
    *,
    estimators: str | Iterable[str] | None = None,
    data: str = "all",
    origin: str | None = None,
    q_model: QModel | Baseline | str | None = "default",
    gamma: float = 1.0,
    cap: float = 10.0,
    interval: str = "ess-t",
    level: float = 0.95,
    rng: int | np.random.Generator | None = None,
    resamples: int = 1000,
    reward_range: tuple[float, float] | None = None,
    horizon: int | None = None,
    reward_model: str | tuple[ArrayLike, ArrayLike] = "deterministic",
    mixture: str | int = "auto",
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """The value of `target`, from trajectories that other policies recorded.

    Args:
        trajectories: recorded episodes with the policies that acted.
        target: the policy to evaluate.
        estimators: names from `ope_gym.ESTIMATORS`; by default the common ones that the data
            allow, "EA" only where the time limit is one step.
        data: "all" episodes, or only the "held-out" ones.
        origin: "learned" if the target was trained on episodes that are not held out, "fixed" if
            it was not; None to tell it from the recorded policies (`ope_gym.inference.regimes`).
        q_model: a model of `ope_gym.models` for the estimators that need one, or its name
            ("tabular", "linear", "dynamics", "network"); "default" is tabular for discrete
            observations and linear for arrays of numbers; None for none; or a `Baseline`, the
            values q and v at every step.
        gamma: discount within [0, 1].
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile" or "bca" (bootstrap), or "betting" (bounded rewards; made
            from the plain weights, so it holds the value, not always the normalised estimate).
        level: confidence level of the intervals.
        rng: seed or generator of the bootstrap draws and of the q model; a fixed seed by default,
            so that two evaluations of the same trajectories share their draws.
        resamples: bootstrap replicates.
        reward_range: lowest and highest possible reward; needed by "betting".
        horizon: longest possible episode, needed by "betting"; by default the recorded time limit.
        reward_model: for OUIS: "deterministic", "cross-fit" (mean and variance of the rewards
            learned from other episodes), or a pair of arrays (S,): mean and variance.
        mixture: which behaviours the weights of an episode are against: "all"; a number: its own
            and others from all over the training history, so many in all, which costs so many
            policy evaluations a step; "auto": all up to 256 behaviours, 64 of more; see
            `ope_gym.weights.mixtures`.
        progress: called with the number of bootstrap replicates just finished, for a progress bar.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table.
    """
    evaluator = Evaluator(
        trajectories,
        estimators=estimators,
        data=data,
        q_model=q_model,
        gamma=gamma,
        cap=cap,
        interval=interval,
        level=level,
        rng=rng,
        resamples=resamples,
        reward_range=reward_range,
        horizon=horizon,
        reward_model=reward_model,
        mixture=mixture,
        progress=progress,
    )
    return evaluator.evaluate(target, origin=origin)


class Evaluator:
    """Trajectories made ready once, to evaluate any number of targets.

    The mixtures of the behaviours do not depend on the target, so they are computed for the first
    and kept: a further target costs its own log-probabilities and its q model. The options are
    those of `evaluate`.
    """

    def __init__(
        self,
        trajectories: Trajectories | TrajectoryBuffer,
        *,
        estimators: str | Iterable[str] | None = None,
        data: str = "all",
        q_model: QModel | Baseline | str | None = "default",
        gamma: float = 1.0,
        cap: float = 10.0,
        interval: str = "ess-t",
        level: float = 0.95,
        rng: int | np.random.Generator | None = None,
        resamples: int = 1000,
        reward_range: tuple[float, float] | None = None,
        horizon: int | None = None,
        reward_model: str | tuple[ArrayLike, ArrayLike] = "deterministic",
        mixture: str | int = "auto",
        progress: Callable[[int], object] | None = None,
    ) -> None:
        from ope_gym import kernels
        from ope_gym.weights.behaviours import behaviours_of
        from ope_gym.weights.mixtures import group_size, interleaved, joined

        self.data = regimes.held_out_only(_recorded(trajectories), data)
        self._offsets = check_offsets(self.data.offsets, self.data.n_steps)
        self._behaviours = behaviours_of(self.data)
        self._strata = joined(self._behaviours.strata)
        size = group_size(mixture, len(self._behaviours.plans))
        self._groups = interleaved(self._behaviours.counts, size)
        self._density = has_densities(self.data)
        self._named = None if estimators is None else _names(estimators)
        self._options = check_options(
            list(ESTIMATORS) if self._named is None else self._named,
            gamma,
            cap,
            interval,
            level,
            rng,
            resamples,
            reward_range,
            self.data.horizon if horizon is None else horizon,
        )
        check_finite(self.data.rewards, "rewards", self._offsets)
        self._reward_model = _check_reward_model(reward_model, self.data.n_steps, self._offsets)
        self._q_model = q_model
        self._bases: dict[str, FloatArray] = {}
        self._mismatch = ""
        self._fingerprint = kernels.fingerprint(
            self.data.rewards,
            self._offsets,
            self._behaviours.ids,
            np.nan_to_num(self.data.log_probs[_some_ends(self._offsets)]),  # NaN: not recorded
        )
        self._draws = intervals.Resamples(
            self._strata, self._options.resamples, self._options.seed, progress
        )

    def evaluate(self, target: Policy, *, origin: str | None = None) -> Evaluation:
        """The value of `target` by every estimator.

        Args:
            target: the policy to evaluate.
            origin: as in `ope_gym.evaluate`.
        """
        from ope_gym import kernels
        from ope_gym.weights.behaviours import policy_log_probs
        from ope_gym.weights.propensities import check_propensities

        check_target(target)
        data, offsets, options = self.data, self._offsets, self._options
        model = self._resolve(target)
        names = self._named or _common(
            self._behaviours.available,
            model is not None,
            options.interval,
            one_step=data.horizon == 1 and hasattr(target, "probs"),
            propensities=data.has_propensities,
        )
        self._require(names, model)
        schemes = {ESTIMATORS[name].scheme for name in names} - {""}
        own = policy_log_probs(target, "target", data)
        check_log_probs(own, "target_log_probs", offsets, self._density)
        prefix = np.empty(own.size)
        kernels.cumulate(own, 0, len(data), offsets, prefix)
        self._prepare(schemes)
        log_w = {scheme: self._bases[scheme] + prefix for scheme in schemes}
        regime = regimes.regime_of(data, target, origin)
        mixture = PartialMixture.of(self._groups) if schemes - {"basic"} else None
        report = check_propensities(
            data, target, self._behaviours, self._groups if self._parted else None
        )
        known = Known(
            Sample(
                len(data),
                data.n_steps,
                self._strata,
                self._behaviours.names,
                self._behaviours.counts,
                options.gamma,
                regime,
                self._fingerprint,
                mixture,
            ),
            self._behaviours.ids,
            report.support,
            report.calibration,
            report.notes + ((self._mismatch,) if self._mismatch else ()),
            (_FOLLOWING,) if (data.schedule_ids >= 0).any() else (),
            self._strata is not self._behaviours.strata,
        )
        problem = Problem(
            data.rewards,
            offsets,
            self._behaviours.ids,
            log_w,
            options.gamma,
            options.cap,
            counts=self._behaviours.counts,
            endings=lambda: self._endings,
            rounds=lambda: self._rounds(model, target, own),
        )
        if model is not None and any(ESTIMATORS[name].uses_q for name in names):
            baseline = self._baseline(model, target)
            problem.start = baseline.at_start(offsets)
            problem.residuals = baseline.residuals(data.rewards, offsets, options.gamma)
        problem = problem.within_discount()
        estimates = {}
        for name in names:
            if ESTIMATORS[name].method == "average":
                from ope_gym.estimators.empirical_average import empirical_average

                estimates[name] = empirical_average(
                    data, target, known.sample, self._behaviours.ids, options, self._draws
                )
            else:
                estimates[name] = _estimate(name, problem, known, options, self._draws)
        return Evaluation(estimates)

    def _resolve(self, target: Policy) -> QModel | Baseline | None:
        """The q model, if one may be needed: as given, or the default for these observations."""
        if self._named is not None and not any(ESTIMATORS[name].uses_q for name in self._named):
            return None
        from ope_gym.models.base import default_model, named_model

        model = self._q_model
        if isinstance(model, type):
            raise TypeError(f"q_model is the class {model.__name__}: give {model.__name__}()")
        if not isinstance(model, str):
            return model
        if model != "default":
            return named_model(model)
        return default_model(self.data, target) if len(self.data) > 1 else None

    def _require(self, names: Iterable[str], model: object) -> None:
        """Refuse estimators that these data, or these options, cannot give."""
        if not names:
            raise ValueError(
                "trajectories have no log_probs, so there are no weights, and without a q model "
                "there is no estimate: give q_model a model of ope_gym.models"
            )
        for name in names:
            c = ESTIMATORS[name]
            if c.scheme and not self.data.has_propensities:
                raise ValueError(
                    f"estimators has {name!r}, which needs the probabilities of all actions, but "
                    "an unknown policy acted (trajectories.has_propensities is false): use 'DM', "
                    "or select(policies=...) the episodes of known ones"
                )
            if c.baseline and model is None:
                raise ValueError(
                    f"estimators has {name!r}, which needs a q model: give q_model a model of "
                    "ope_gym.models (there is no default for such observations, or for a "
                    "single episode)"
                )
            _refuse_betting(name, self._options.interval)
            if self._parted and c.method in _NEED_ALL:
                raise ValueError(
                    f"estimators has {name!r}, which needs the probabilities of all episodes under "
                    f"all {self._groups.size:,} behaviours, but mixtures are of at most "
                    f"{self._largest}: give mixture='all' if you can wait, or leave {name} out"
                )
            if (
                self._options.interval == "betting"
                and c.scheme == "optimal"
                and (self._reward_model == "cross-fit")
            ):
                raise ValueError(
                    "interval='betting' needs independent episodes, but the weights of "
                    "reward_model='cross-fit' learn from each other's rewards: give (mean, "
                    "variance)"
                )

    def _prepare(self, schemes: set[str]) -> None:
        """Log weights of a target that is certain of everything: those of any other add its own."""
        from ope_gym.weights.reward_model import cross_fitted_log_weights

        missing = sorted(schemes - self._bases.keys())
        if not missing:
            return
        if self._parted and missing != ["basic"]:
            self._prepare_parts(missing)
            return
        certain = np.zeros(self.data.n_steps)
        rows = self._behaviours.rows(self.data, only_own=missing == ["basic"])
        model = self._reward_model
        if "optimal" in missing and model == "cross-fit" and not self._density:
            self._bases["optimal"] = cross_fitted_log_weights(
                self.data, certain, self._behaviours, rows
            )
            missing.remove("optimal")
        if missing:
            self._bases |= log_weights(
                certain,
                rows,
                self._behaviours.ids,
                self._offsets,
                missing,
                counts=self._behaviours.counts,
                density=self._density,
                reward_model=model if isinstance(model, tuple) else None,
            )
        self._mismatch = self._mismatch or rows.mismatch

    def _prepare_parts(self, missing: list[str]) -> None:
        """The same, each episode against the behaviours of its group."""
        from ope_gym.weights.mixtures import partial_log_weights

        model = self._reward_model
        if "optimal" in missing and model == "cross-fit" and not self._density:
            raise ValueError(
                "reward_model='cross-fit' weights two halves of the episodes against their own "
                f"mixtures of all behaviours, but mixtures are of at most {self._largest} of "
                f"{self._groups.size:,}: give mixture='all', or 'deterministic' or (mean, variance)"
            )
        found, mismatch = partial_log_weights(
            self.data,
            self._behaviours,
            self._groups,
            missing,
            density=self._density,
            reward_model=model if isinstance(model, tuple) else None,
        )
        self._bases |= found
        self._mismatch = self._mismatch or mismatch

    @property
    def _parted(self) -> bool:
        """Whether mixtures are of a part of the behaviours."""
        return int(self._groups.max()) > 0

    @property
    def _largest(self) -> int:
        """Behaviours of the largest group."""
        return int(np.bincount(self._groups).max())

    @cached_property
    def _endings(self) -> FloatArray:
        """(n, K) log-probabilities of whole trajectories."""
        from ope_gym.estimators.control_variates import last_log_probs

        return last_log_probs(self._behaviours.rows(self.data), self._offsets)

    def _rounds(
        self, model: QModel | Baseline | None, target: Policy, own: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Past-only v at the start and residuals, and the weights of the behaviours, for ADR."""
        from ope_gym.estimators.adaptive import past_only, stable_weights
        from ope_gym.models.base import Baseline

        assert model is not None  # `_require` saw to it
        data, offsets, gamma = self.data, self._offsets, self._options.gamma
        values = (
            self._baseline(model, target)
            if isinstance(model, Baseline)
            else past_only(
                model,
                data,
                target,
                self._behaviours,
                gamma,
                self._longest,
                np.random.default_rng(self._options.seed),
            )
        )
        start, residuals = values.at_start(offsets), values.residuals(data.rewards, offsets, gamma)
        rows = self._behaviours.rows(data)
        ids = self._behaviours.ids
        return start, residuals, stable_weights(own, rows, ids, offsets, gamma, start, residuals)

    @property
    def _longest(self) -> int:
        """The time limit; `horizon` is for betting, and may be loose."""
        return max(int(self.data.lengths.max()), self.data.horizon or 0)

    def _baseline(self, model: QModel | Baseline, target: Policy) -> Baseline:
        from ope_gym.models.base import Baseline, cross_fit

        if isinstance(model, Baseline):
            return _check_baseline(model, self.data.n_steps, self._offsets)
        return cross_fit(
            model,
            self.data,
            target,
            self._behaviours.ids,
            gamma=self._options.gamma,
            horizon=self._longest,
            rng=np.random.default_rng(self._options.seed),
        )


def evaluate_log_probs(
    target_log_probs: ArrayLike,
    behaviour_log_probs: ArrayLike,
    behaviour_ids: ArrayLike,
    rewards: ArrayLike,
    offsets: ArrayLike,
    *,
    estimators: str | Iterable[str] | None = None,
    gamma: float = 1.0,
    cap: float = 10.0,
    interval: str = "ess-t",
    level: float = 0.95,
    rng: int | np.random.Generator | None = None,
    resamples: int = 1000,
    reward_range: tuple[float, float] | None = None,
    horizon: int | None = None,
    reward_model: str | tuple[ArrayLike, ArrayLike] = "deterministic",
    baseline: tuple[ArrayLike, ArrayLike] | None = None,
    regime: str = "unstated",
    density: bool = False,
) -> Evaluation:
    """The value of a target policy, from arrays; S steps, n trajectories, K behaviours.

    Args:
        target_log_probs: (S,) log-probability of each taken action under the target.
        behaviour_log_probs: (K, S) the same under each behaviour. Where the policy changed during
            an episode, row k holds the sequence of policies that behaviour k would have followed.
        behaviour_ids: (n,) which behaviour each trajectory came from.
        rewards: (S,).
        offsets: (n + 1,) trajectory i is rows offsets[i]:offsets[i + 1].
        estimators: as in `evaluate`, but for those that need more than arrays.
        gamma: as in `evaluate`, and so are the other options.
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile", "bca" or "betting".
        level: confidence level.
        rng: seed or generator of the bootstrap draws.
        resamples: bootstrap replicates.
        reward_range: lowest and highest possible reward, for "betting".
        horizon: longest possible episode, needed by "betting".
        reward_model: "deterministic", or mean (S,) and variance (S,) of the rewards, for OUIS.
        baseline: q (S,) of the taken actions and v (S,), for the estimators that need a q model.
        regime: what is known of the data: "held-out", "fresh", "adaptive", "in-sample" or
            "unstated"; see `ope_gym.inference.regimes`.
        density: the numbers are log densities of continuous actions.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table.

    >>> half = np.log(0.5)
    >>> evaluation = evaluate_log_probs(
    ...     [half, half, half], [[half, half, half]], [0, 0], [1.0, 1.0, 4.0], [0, 2, 3]
    ... )
    >>> evaluation["NFIS"].value
    3.0
    """
    from ope_gym import kernels
    from ope_gym.estimators.control_variates import last_log_probs
    from ope_gym.weights.mixtures import joined

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
    ids = _check_ids(behaviour_ids, offsets.size - 1, rows.shape[0])
    if regime not in regimes.REGIMES:
        raise ValueError(f"regime is {regime!r}; choose one of {', '.join(regimes.REGIMES)}")
    names = (
        _common(True, baseline is not None, interval) if estimators is None else _names(estimators)
    )
    options = check_options(
        names, gamma, cap, interval, level, rng, resamples, reward_range, horizon
    )
    for name in names:
        if ESTIMATORS[name].method in _NEED_POLICIES:
            raise ValueError(
                f"estimators has {name!r}, which needs observations and policies: use "
                "evaluate(trajectories, target)"
            )
        if ESTIMATORS[name].baseline and baseline is None:
            raise ValueError(f"estimators has {name!r}, which needs baseline=(q, v)")
        _refuse_betting(name, interval)
    model = _check_reward_model(reward_model, steps, offsets)
    if model == "cross-fit":
        raise ValueError(
            "reward_model='cross-fit' needs observations and actions: use evaluate(trajectories, "
            "target), or pass the mean (S,) and the variance (S,)"
        )
    schemes = {ESTIMATORS[name].scheme for name in names} - {""}
    log_w = log_weights(
        target,
        rows,
        ids,
        offsets,
        sorted(schemes),
        density=density,
        reward_model=model if isinstance(model, tuple) else None,
    )
    behaviours = tuple(f"behaviour {k}" for k in range(rows.shape[0]))
    counts = np.bincount(ids, minlength=rows.shape[0])
    strata = joined(ids)
    sample = Sample(
        offsets.size - 1,
        steps,
        strata,
        behaviours,
        counts,
        options.gamma,
        regime,
        kernels.fingerprint(rewards, offsets, ids, rows[ids[_some(ids.size)], _some_ends(offsets)]),
    )
    draws = intervals.Resamples(strata, options.resamples, options.seed)
    problem = Problem(
        rewards,
        offsets,
        ids,
        log_w,
        options.gamma,
        options.cap,
        counts=counts,
        endings=lambda: last_log_probs(rows, offsets),
    )
    if baseline is not None:
        from ope_gym.models.base import Baseline

        values = Baseline(*(check_column(x, "baseline", steps) for x in baseline))
        values = _check_baseline(values, steps, offsets)
        problem.start = values.at_start(offsets)
        problem.residuals = values.residuals(rewards, offsets, options.gamma)
    problem = problem.within_discount()
    known = Known(sample, ids, {}, joined=strata is not ids)
    return Evaluation({name: _estimate(name, problem, known, options, draws) for name in names})


def _estimate(
    name: str, problem: Problem, known: Known, options: Options, resamples: intervals.Resamples
) -> Estimate:
    """One estimator: its value, error, interval, diagnostics and verdict."""
    c, strata = ESTIMATORS[name], known.sample.strata
    if known.joined and c.method != "adaptive":
        problem = dataclasses.replace(problem, ids=strata)  # single ones show no spread
    computed = compute(name, problem)

    def draw() -> FloatArray:
        draws = resamples
        if computed.pooled:
            one = np.zeros_like(strata)
            draws = intervals.Resamples(one, resamples.replicates, resamples.seed)
        replicates = computed.replicates(draws)
        resamples.done(replicates.size)
        return replicates

    return estimated(
        name, computed, known, options, draw, lambda: _betting(c.scheme, c.capped, problem, options)
    )


def _betting(scheme: str, capped: bool, data: Problem, options: Options) -> intervals.Interval:
    assert options.reward_range is not None  # check_options saw to both
    assert options.horizon is not None
    low, high = options.reward_range
    outside = np.flatnonzero((data.rewards < low) | (data.rewards > high))
    if outside.size:
        episode, step = place(int(outside[0]), data.offsets)
        raise ValueError(
            f"reward_range is {options.reward_range}, but the reward is "
            f"{data.rewards[outside[0]]} at episode {episode}, step {step}: widen it"
        )
    lengths = np.diff(data.offsets)
    if lengths.max() > options.horizon:
        raise ValueError(
            f"horizon is {options.horizon}, but episode {lengths.argmax()} has {lengths.max()} "
            "steps: give the longest possible"
        )
    return intervals.betting(
        data.log_w[scheme],
        options.cap if capped else None,
        data.rewards,
        data.offsets,
        options.gamma,
        options.horizon,
        options.reward_range,
        options.level,
    )


def _some(n: int) -> slice:
    """At most some thousand trajectories, evenly spread."""
    return slice(None, None, 1 + n // 4096)


def _some_ends(offsets: IntArray) -> IntArray:
    """The last rows of those."""
    return (offsets[1:] - 1)[_some(offsets.size - 1)]


_NEED_POLICIES = ("average", "adaptive")  # methods that need more than arrays
_NEED_ALL = ("control variates", "adaptive")  # and those that need (n, K) log-probabilities


def _recorded(trajectories: Trajectories | TrajectoryBuffer) -> Trajectories:
    if not hasattr(trajectories, "view"):
        raise TypeError(
            f"trajectories is {trajectories!r}: give Trajectories or a TrajectoryBuffer, such "
            "as the `buffer` of a recorder, or Trajectories.load(path)"
        )
    whole = trajectories.view()
    if not len(whole):
        raise ValueError("trajectories is empty: record at least one episode first")
    return whole


def _names(estimators: str | Iterable[str]) -> tuple[str, ...]:
    return (estimators,) if isinstance(estimators, str) else tuple(estimators)


def _common(
    policies: bool,
    q_model: bool,
    interval: str,
    *,
    one_step: bool = False,
    propensities: bool = True,
) -> tuple[str, ...]:
    """The common estimators that can be had.

    Without the policies only basic weights can, without propensities none.
    """
    betting = interval == "betting"
    return tuple(
        name
        for name, c in ESTIMATORS.items()
        if (c.common or (one_step and c.method == "average"))
        and (policies or c.scheme in ("", "basic"))
        and (propensities or not c.scheme)
        and (q_model or not c.baseline)
        and (c.scheme or not betting)
    )


def _refuse_betting(name: str, interval: str) -> None:
    if interval == "betting" and not ESTIMATORS[name].scheme:
        raise ValueError(
            f"interval='betting' bounds weighted means; {name} is none: use FIS or BIS"
        )


def _check_baseline(baseline: Baseline, steps: int, offsets: IntArray) -> Baseline:
    for name, values in (("q", baseline.q), ("v", baseline.v)):
        check_finite(check_column(values, f"baseline {name}", steps), f"baseline {name}", offsets)
    return baseline


def has_densities(data: Trajectories) -> bool:
    """Whether actions are continuous; without a space, as the buffer saw it: not whole numbers."""
    if data.discrete is not None:
        return not data.discrete
    return any(leaf.dtype.kind not in "iub" for leaf in batches.leaves(data.actions))


def _check_reward_model(
    model: str | tuple[ArrayLike, ArrayLike], steps: int, offsets: IntArray
) -> str | tuple[FloatArray, FloatArray]:
    if isinstance(model, str) and model in ("deterministic", "cross-fit"):
        return model
    if not isinstance(model, tuple | list | np.ndarray) or len(model) != 2:
        raise ValueError(
            f"reward_model is {model!r}; give 'deterministic', 'cross-fit' or (mean, variance)"
        )
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


def _check_ids(behaviour_ids: ArrayLike, n: int, behaviours: int) -> IntArray:
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
