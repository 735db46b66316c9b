"""Evaluate a policy from arrays of log-probabilities, without recorded episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ope_gym.arrays import (
    MANY,
    FloatArray,
    IntArray,
    as_floats,
    check_column,
    check_finite,
    check_offsets,
    keep_freed_memory,
    longest_of,
)
from ope_gym.estimation import Facts, Question
from ope_gym.estimators.reductions import Steps, Weighted, ask, within_discount
from ope_gym.estimators.run import reduce_chunk
from ope_gym.estimators.table import ESTIMATORS, choose, estimator_names
from ope_gym.inference import bootstrap
from ope_gym.inference.conclude import Known
from ope_gym.inference.errors import joined
from ope_gym.inference.estimate import REGIMES, Behaviour, Sample
from ope_gym.inference.intervals import IntervalKind
from ope_gym.inference.outcomes import Outcomes, tally
from ope_gym.models.base import baseline_of
from ope_gym.options import Options, Weighting
from ope_gym.results import Evaluation
from ope_gym.verdict import Reason
from ope_gym.weights.formula import check_reward_model, log_weights
from ope_gym.weights.propensities import StepRatios


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
    interval: str | IntervalKind | None = "ess-t",
    level: float = 0.95,
    return_range: tuple[float, float] | None = None,
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
        estimators: as in `evaluate`, except those that need more than arrays.
        baseline: q (S,) of the taken actions and v (S,), for the estimators that need a q model.
        regime: what is known about the data: "held-out", "fresh", "adaptive", "in-sample" or
            "unstated"; see `ope_gym.inference.estimate`.
        density: whether the numbers are log densities of continuous actions.
        gamma: discount within [0, 1].
        interval: as in `evaluate`; None for the values alone.
        level: confidence level.
        return_range: as in `evaluate`.
        weighting: cap and reward model of the weights; the mixture is that of all behaviours.
        seed: seed of the bootstrap draws.

    Returns:
        A mapping from estimator name to `Estimate`; print it for a table.

    >>> half = np.log(0.5)
    >>> evaluation = evaluate_log_probs(
    ...     [half, half, half], [[half, half, half]], [0, 0], [1.0, 1.0, 4.0], [0, 2, 3]
    ... )
    >>> evaluation["NFIS"].value
    3.0
    """
    options = Options(
        gamma=gamma,
        interval=interval,
        level=level,
        return_range=return_range,
        weighting=weighting,
        seed=seed,
    )
    if weighting.mixture not in ("auto", "all"):
        raise ValueError(
            f"mixture is {weighting.mixture!r}, but arrays are weighed against the mixture of all "
            "their behaviours: leave it out, or give fewer behaviours"
        )
    if regime not in REGIMES:
        raise ValueError(f"regime is {regime!r}; choose one of {', '.join(REGIMES)}")
    arrays = _Arrays.of(
        target_log_probs,
        behaviour_log_probs,
        behaviour_ids,
        rewards,
        offsets,
        options,
        regime,
    )
    elsewhere = "arrays have none: use evaluate(episodes, target)"
    lacks = dict.fromkeys(["visits", "rounds", "one step"], elsewhere) | options.lacks
    if baseline is None:
        lacks["q model"] = "there is none: give baseline=(q, v)"
    names = choose(estimator_names(estimators), lacks)
    schemes = {ESTIMATORS[name].scheme for name in names} - {""}
    checked = "basic" if schemes == {"basic"} else "fused"  # the scheme whose ratios are checked
    chunk = arrays.weigh(schemes | {checked}, density, weighting.reward_model)
    if baseline is not None:
        chunk = arrays.with_baseline(chunk, baseline)
    chunk = within_discount(chunk, options.gamma)
    strata = arrays.sample.strata
    question = Question.about(
        names,
        options,
        ids=arrays.ids,
        counts=arrays.sample.counts,
        strata=strata,
        groups=strata,
        has_q=baseline is not None,
    )
    facts = _later(arrays, chunk, checked) if options.value_alone else _now(arrays, checked)
    return question.answer(reduce_chunk([chunk]), [facts])[0]


@dataclass(frozen=True, eq=False)
class _Arrays:
    """Checked arrays; S steps, n trajectories, K behaviours.

    Args:
        target: (S,) log-probabilities under the target.
        rows: (K, S) the same under each behaviour.
        ids: (n,) behaviours.
        rewards: (S,).
        offsets: (n + 1,).
        ends: The lowest and the highest reward.
        sample: The trajectories.
        return_range: The lowest and the highest possible return, if somebody knows them.
    """

    target: FloatArray
    rows: FloatArray
    ids: IntArray
    rewards: FloatArray
    offsets: IntArray
    ends: tuple[float, float]
    sample: Sample
    return_range: tuple[float, float] | None

    @classmethod
    def of(
        cls,
        target_log_probs: ArrayLike,
        behaviour_log_probs: ArrayLike,
        behaviour_ids: ArrayLike,
        rewards: ArrayLike,
        offsets: ArrayLike,
        options: Options,
        regime: str,
    ) -> _Arrays:
        """Check the arguments of `evaluate_log_probs`."""
        rewards = check_column(rewards, "rewards")
        steps = rewards.size
        offsets = np.asarray(offsets)
        if offsets.ravel()[-1:].tolist() != [steps]:  # before the other columns are compared
            offsets = check_offsets(offsets, steps)
        target = check_column(target_log_probs, "target_log_probs", steps)
        rows = as_floats(behaviour_log_probs, "behaviour_log_probs")
        if rows.ndim != 2 or rows.shape[1] != steps or rows.shape[0] == 0:
            raise ValueError(
                f"behaviour_log_probs has shape {rows.shape}; expected (K, {steps}), one row per "
                "behaviour"
            )
        if steps >= MANY:
            keep_freed_memory()  # each evaluation takes some arrays of as many numbers
        offsets = check_offsets(offsets, steps)
        ids, counts = _check_ids(behaviour_ids, offsets.size - 1, rows.shape[0])
        ends = check_finite(rewards, "rewards", offsets)
        names = tuple(Behaviour(f"behaviour {k}", (k,)) for k in range(rows.shape[0]))
        strata = joined(ids, counts)
        sample = Sample(ids.size, steps, strata, names, counts, options.gamma, regime, ())
        return cls(target, rows, ids, rewards, offsets, ends, sample, options.return_range)

    def weigh(self, schemes: Iterable[str], density: bool, reward_model: Any) -> Weighted:
        """Compute the weights of all steps by some schemes."""
        model = check_reward_model(reward_model, self.rewards.size, self.offsets)
        if model == "cross-fit":
            raise ValueError(
                "reward_model='cross-fit' needs observations and actions: use evaluate(episodes, "
                "target), or pass the mean (S,) and the variance (S,)"
            )
        log_w = log_weights(
            self.target,
            self.rows,
            self.ids,
            self.offsets,
            sorted(schemes),
            counts=self.sample.counts,
            density=density,
            reward_model=model if isinstance(model, tuple) else None,
        )
        return Weighted(self.offsets, self.rewards, log_w)

    def with_baseline(self, chunk: Weighted, baseline: tuple[ArrayLike, ArrayLike]) -> Weighted:
        """Add q and v of the steps."""
        steps, offsets = self.rewards.size, self.offsets
        values = baseline_of(baseline, steps, offsets)
        residuals = values.residuals(self.rewards, offsets, self.sample.gamma)
        return dataclasses.replace(chunk, start=values.at_start(offsets), residuals=residuals)

    def checked(self, chunk: Weighted, scheme: str) -> Known:
        """Check the weights of a scheme, and return the facts."""
        (reasons,) = reduce_chunk(chunk)([StepRatios(scheme)])
        return self.known(reasons, marked=False)

    def known(self, reasons: tuple[Reason, ...], *, marked: bool) -> Known:
        """Return the facts that verdicts need.

        Args:
            reasons: What the ratios of the steps say, see `StepRatios`.
            marked: Whether to add a fingerprint, by which samples are told apart.
        """
        sample, offsets, ids = self.sample, self.offsets, self.ids
        returns, discounted, sums = tally(self.rewards, offsets, sample.gamma, self.ends)
        longest, possible = longest_of(offsets), self.return_range
        outcomes = Outcomes.of(discounted, sums, sample.gamma, longest, False, possible)
        if marked:
            some = bootstrap.marked(ids.size)
            stops, chosen = offsets[1:][some], ids[some]
            lengths = stops - offsets[:-1][some]
            mark = bootstrap.fingerprint(returns, self.rows[chosen, stops - 1], lengths, chosen)
            sample = dataclasses.replace(sample, fingerprint=mark)
        sizes = sample.counts if sample.strata is ids else None
        return Known(sample, ids, outcomes, reasons=reasons, sizes=sizes)


def _now(arrays: _Arrays, scheme: str) -> Steps[Facts]:
    """Collect the facts in the pass of the first sums, while the weights are in the cache."""
    known = arrays.known((yield from ask(StepRatios(scheme))), marked=True)
    return Facts(known.sample, lambda: known)


def _later(arrays: _Arrays, chunk: Weighted, scheme: str) -> Steps[Facts]:
    """Collect the facts when somebody asks for them, from the weights of a scheme."""
    yield ()
    return Facts(arrays.sample, partial(arrays.checked, chunk, scheme))


def _check_ids(behaviour_ids: ArrayLike, n: int, behaviours: int) -> tuple[IntArray, IntArray]:
    """Return (n,) numbers of behaviours, and how often each comes; raise if they are none."""
    ids = np.asarray(behaviour_ids)
    if ids.shape != (n,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"behaviour_ids has shape {ids.shape} and type {ids.dtype}; expected ({n},) integers, "
            "one per episode"
        )
    if ids.min() < 0 or ids.max() >= behaviours:
        episode = int(np.argmax((ids < 0) | (ids >= behaviours)))
        raise ValueError(
            f"behaviour_ids is {ids[episode]} at episode {episode}; behaviour_log_probs has "
            f"{behaviours} rows, so ids run from 0 to {behaviours - 1}"
        )
    return ids.astype(np.int64, copy=False), np.bincount(ids, minlength=behaviours)
