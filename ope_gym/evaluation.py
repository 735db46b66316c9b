"""The two doors: evaluate a policy from trajectories, or from arrays of log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ope_gym import intervals, trees
from ope_gym.diagnostics import judge, weight_diagnostics
from ope_gym.estimators import (
    ESTIMATORS,
    Columns,
    Composition,
    column_sums,
    moments,
    standard_error,
)
from ope_gym.results import Estimate, Evaluation, Sample
from ope_gym.validation import (
    Options,
    as_floats,
    check_column,
    check_finite,
    check_log_probs,
    check_offsets,
    check_options,
    place,
)
from ope_gym.weights import FloatArray, IntArray, log_weights

if TYPE_CHECKING:
    from ope_gym.buffer import TrajectoryBuffer
    from ope_gym.policies import Policy
    from ope_gym.trajectories import Trajectories


@dataclass(frozen=True, eq=False)
class _Data:
    """What every estimator needs beside its weights; support counts are by scheme."""

    rewards: FloatArray
    offsets: IntArray
    behaviour_ids: IntArray
    sample: Sample
    support: dict[str, int]
    calibration: FloatArray | None = None
    notes: tuple[str, ...] = ()  # red for all
    cautions: tuple[str, ...] = ()  # amber for weights against a mixture


_FOLLOWING = (
    "the policy changed during episodes: where one follows the other, its start depends on how "
    "long the last one lived, and weights against a mixture are not exactly unbiased"
)
_BETTING = "betting with weights against a mixture supposes held-out episodes or fixed policies"


def evaluate(
    trajectories: Trajectories | TrajectoryBuffer,
    target: Policy,
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
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """The value of `target`, from trajectories that other policies recorded.

    Args:
        trajectories: recorded episodes with the policies that acted.
        target: the policy to evaluate.
        estimators: names from `ope_gym.ESTIMATORS`, or "EA" for one-step data; all by default, EA
            only where the time limit is one step.
        gamma: discount within [0, 1].
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile" or "bca" (bootstrap), or "betting" (bounded rewards; made
            from the plain weights, so it holds the value, not always the normalised estimate).
        level: confidence level of the intervals.
        rng: seed or generator of the bootstrap draws; a fixed seed by default, so that two
            evaluations of the same trajectories share their draws.
        resamples: bootstrap replicates.
        reward_range: lowest and highest possible reward; needed by "betting".
        horizon: longest possible episode, needed by "betting"; by default the recorded time limit.
        reward_model: for OUIS: "deterministic", "cross-fit" (mean and variance of the rewards
            learned from other episodes), or a pair of arrays (S,): mean and variance.
        progress: called with the number of bootstrap replicates just finished, for a progress bar.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table.
    """
    from ope_gym import kernels
    from ope_gym.likelihood import (
        behaviours_of,
        check_propensities,
        policy_log_probs,
    )
    from ope_gym.reward_model import cross_fitted_log_weights

    if not (hasattr(target, "log_prob") and hasattr(target, "sample")):
        raise TypeError(
            f"target is {target!r}, which has no log_prob and sample: give a policy of "
            "ope_gym.policies, wrap a network in ope_gym.torch_policy.TorchPolicy, or write one"
        )
    data = trajectories.view()
    if not len(data):
        raise ValueError("trajectories is empty: record at least one episode first")
    offsets = check_offsets(data.offsets, data.n_steps)
    behaviours = behaviours_of(data)
    if estimators is None:
        estimators = _default_estimators(data, target, behaviours.available, interval)
    options = check_options(
        estimators, gamma, cap, interval, level, rng, resamples, reward_range,
        data.horizon if horizon is None else horizon,
    )  # fmt: skip
    density = _has_densities(data)
    steps = data.n_steps
    check_finite(data.rewards, "rewards", offsets)
    target_log_probs = policy_log_probs(target, "target", data)
    check_log_probs(target_log_probs, "target_log_probs", offsets, density)
    schemes = _schemes(options)
    model = _check_reward_model(reward_model, steps, offsets)
    if interval == "betting" and model == "cross-fit" and "optimal" in schemes:
        raise ValueError(
            "interval='betting' needs independent episodes, but the weights of "
            "reward_model='cross-fit' learn from each other's rewards: give (mean, variance)"
        )

    log_w = {}
    rows = behaviours.rows(data, only_own=schemes in ([], ["basic"]))
    if "optimal" in schemes and model == "cross-fit" and not density:
        log_w["optimal"] = cross_fitted_log_weights(data, target_log_probs, behaviours, rows)
        schemes = [scheme for scheme in schemes if scheme != "optimal"]
    if schemes:
        log_w |= log_weights(
            target_log_probs, rows, behaviours.ids, offsets, schemes,
            counts=behaviours.counts, density=density,
            reward_model=model if isinstance(model, tuple) else None,
        )  # fmt: skip
    report = check_propensities(data, target, behaviours)
    sample = Sample(
        len(data), steps, behaviours.strata, behaviours.names, behaviours.counts, options.gamma,
        "held-out" if data.held_out.all() else "not held out",
        kernels.fingerprint(
            data.rewards, offsets, behaviours.ids, data.log_probs[_some_ends(offsets)]
        ),
    )  # fmt: skip
    notes = report.notes + ((rows.mismatch,) if rows.mismatch else ())
    cautions = (_FOLLOWING,) if (data.schedule_ids >= 0).any() else ()
    bundle = _Data(
        data.rewards, offsets, behaviours.ids, sample, report.support, report.calibration, notes,
        cautions,
    )  # fmt: skip
    draws = intervals.Resamples(sample.strata, options.resamples, options.seed, progress)
    estimates = _estimate(log_w, bundle, options, draws)
    if "EA" in options.estimators:
        from ope_gym.empirical import empirical_average

        estimates["EA"] = empirical_average(data, target, sample, behaviours.ids, options, draws)
    return Evaluation({name: estimates[name] for name in options.estimators})


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
        estimators: as in `evaluate`, but for EA, which needs all action probabilities.
        gamma: as in `evaluate`, and so are the other options.
        cap: upper bound of the weights of capped estimators.
        interval: "ess-t", "percentile", "bca" or "betting".
        level: confidence level.
        rng: seed or generator of the bootstrap draws.
        resamples: bootstrap replicates.
        reward_range: lowest and highest possible reward, for "betting".
        horizon: longest possible episode, needed by "betting".
        reward_model: "deterministic", or mean (S,) and variance (S,) of the rewards, for OUIS.
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
    options = check_options(
        ESTIMATORS if estimators is None else estimators,
        gamma, cap, interval, level, rng, resamples, reward_range, horizon,
    )  # fmt: skip
    if "EA" in options.estimators:
        raise ValueError(
            "estimators has 'EA', which needs the target's probability of every action: "
            "use evaluate(trajectories, target)"
        )
    model = _check_reward_model(reward_model, steps, offsets)
    if model == "cross-fit":
        raise ValueError(
            "reward_model='cross-fit' needs observations and actions: use evaluate(trajectories, "
            "target), or pass the mean (S,) and the variance (S,)"
        )
    log_w = log_weights(
        target, rows, ids, offsets, _schemes(options), density=density,
        reward_model=model if isinstance(model, tuple) else None,
    )  # fmt: skip
    names = tuple(f"behaviour {k}" for k in range(rows.shape[0]))
    counts = np.bincount(ids, minlength=rows.shape[0])
    sample = Sample(
        offsets.size - 1, steps, ids, names, counts, options.gamma, "unstated",
        kernels.fingerprint(
            rewards, offsets, ids, rows[ids[_some(ids.size)], _some_ends(offsets)]
        ),
    )  # fmt: skip
    draws = intervals.Resamples(ids, options.resamples, options.seed)
    estimates = _estimate(log_w, _Data(rewards, offsets, ids, sample, {}), options, draws)
    return Evaluation({name: estimates[name] for name in options.estimators})


def _estimate(
    log_w: dict[str, FloatArray],
    data: _Data,
    options: Options,
    resamples: intervals.Resamples,
) -> dict[str, Estimate]:
    """Every estimator of the table that was asked for."""
    log_w, data = _within_discount(log_w, data, options.gamma)
    columns: dict[tuple[str, bool], Columns] = {}
    estimates = {}
    for name in options.estimators:
        if name not in ESTIMATORS:
            continue
        composition = ESTIMATORS[name]
        weights, key = log_w[composition.scheme], (composition.scheme, composition.capped)
        if key not in columns:
            cap = options.cap if composition.capped else None
            columns[key] = column_sums(weights, data.rewards, data.offsets, options.gamma, cap)
        estimates[name] = _estimate_one(
            name, composition, weights, columns[key], data, options, resamples
        )
    return estimates


def _estimate_one(
    name: str,
    composition: Composition,
    weights: FloatArray,
    columns: Columns,
    data: _Data,
    options: Options,
    resamples: intervals.Resamples,
) -> Estimate:
    cap = options.cap if composition.capped else None
    result = moments(
        weights, data.rewards, data.offsets, options.gamma, columns,
        normalised=composition.normalised,
    )  # fmt: skip
    sample = data.sample
    diagnostics = weight_diagnostics(
        result.sums, result.ess, result.log_last, data.behaviour_ids, sample.counts.size,
        result.capped_share, data.support.get(composition.scheme), data.calibration,
    )  # fmt: skip
    error = standard_error(result.influence, sample.strata)
    replicates = None
    notes = list(data.notes)
    cautions = [] if composition.scheme == "basic" else list(data.cautions)
    if options.interval == "betting":
        if composition.scheme != "basic" and sample.regime == "not held out":
            cautions.append(_BETTING)
        interval = _betting(weights, cap, data, options)
        if np.isnan(interval.low):
            notes.append("no value agrees with the data: reward_range or a propensity is wrong")
    elif options.interval == "ess-t":
        interval = intervals.ess_t(result.value, error, diagnostics.ess, options.level)
    elif not np.isfinite(error):
        interval = intervals.undefined(options.level, options.interval)
    else:
        if composition.normalised:
            replicates = intervals.bootstrap_normalised(
                weights, cap, data.rewards, data.offsets, options.gamma, result.peak, resamples
            )
        else:
            replicates = intervals.bootstrap_plain(result.influence, resamples)
        lost = int(np.count_nonzero(~np.isfinite(replicates)))
        if lost:
            notes.append(f"{lost} of {replicates.size} bootstrap replicates have no weight left")
        interval = (
            intervals.bca(replicates, result.value, result.influence, sample.strata, options.level)
            if options.interval == "bca"
            else intervals.percentile(replicates, options.level)
        )
    verdict = judge(
        diagnostics, result.value, error, sample.trajectories, sample.counts, sample.behaviours,
        notes=notes, cautions=cautions,
    )  # fmt: skip
    return Estimate(
        name, result.value, error, interval, diagnostics, verdict, result.influence, sample,
        replicates, options.seed if replicates is not None else None,
    )  # fmt: skip


def _within_discount(
    log_w: dict[str, FloatArray], data: _Data, gamma: float
) -> tuple[dict[str, FloatArray], _Data]:
    """The steps that gamma leaves any weight: the first ones alone if gamma is 0."""
    lengths = np.diff(data.offsets)
    counted = int(np.count_nonzero(gamma ** np.arange(lengths.max()) > 0))
    if counted == lengths.max():
        return log_w, data
    steps = np.arange(data.rewards.size) - np.repeat(data.offsets[:-1], lengths)
    kept = steps < counted
    offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, counted))])
    data = dataclasses.replace(data, rewards=data.rewards[kept], offsets=offsets)
    return {scheme: weights[kept] for scheme, weights in log_w.items()}, data


def _betting(
    log_w: FloatArray, cap: float | None, data: _Data, options: Options
) -> intervals.Interval:
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
        log_w, cap, data.rewards, data.offsets, options.gamma, options.horizon,
        options.reward_range, options.level,
    )  # fmt: skip


def _some(n: int) -> slice:
    """At most some thousand trajectories, evenly spread."""
    return slice(None, None, 1 + n // 4096)


def _some_ends(offsets: IntArray) -> IntArray:
    """The last rows of those."""
    return (offsets[1:] - 1)[_some(offsets.size - 1)]


def _default_estimators(
    data: Trajectories, target: Policy, available: bool, interval: str
) -> list[str]:
    """All that the data allow: without the policies only the basic weights can be had."""
    names = [name for name, c in ESTIMATORS.items() if available or c.scheme == "basic"]
    if data.horizon == 1 and hasattr(target, "probs") and interval != "betting":
        names.append("EA")
    return names


def _has_densities(data: Trajectories) -> bool:
    """Whether actions are continuous; without a space, as the buffer saw it: not whole numbers."""
    if data.discrete is not None:
        return not data.discrete
    return any(leaf.dtype.kind not in "iub" for leaf in trees.leaves(data.actions))


def _schemes(options: Options) -> list[str]:
    wanted = {ESTIMATORS[name].scheme for name in options.estimators if name in ESTIMATORS}
    return sorted(wanted)


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
