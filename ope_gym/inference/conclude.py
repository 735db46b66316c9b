"""Turn the numbers of an estimator into an estimate: error, interval, diagnostics and verdict.

Every estimator ends here; an estimator only says what its influence values are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import ESTIMATORS, Composition
from ope_gym.inference.computed import Computed, Weights
from ope_gym.inference.diagnostics import Diagnostics, weight_diagnostics
from ope_gym.inference.errors import Spread, Tails, spread_of, uncorrelated
from ope_gym.inference.estimate import Estimate, Sample, regime_doubts
from ope_gym.inference.intervals import (
    Evidence,
    Interval,
    IntervalKind,
    undefined,
    whatever_bias,
    widened,
    with_bias,
)
from ope_gym.inference.judging import NOTED_LOSS, Facts, judge
from ope_gym.inference.outcomes import Outcomes
from ope_gym.verdict import Reason, Verdict

T = TypeVar("T")
_ROUNDING = 1e-12  # of the value: a smaller standard error is rounding


@dataclass(frozen=True, eq=False)
class Known:
    """The facts about the data that verdicts need, beside the numbers.

    Args:
        sample: the trajectories.
        ids: (n,) behaviour of each.
        outcomes: the returns of the episodes, and those that may be unseen.
        deviation: standard deviation of one return of the target; NaN if unknown.
        support: visited steps outside the behaviours' support, by scheme.
        missing: share of the target's episodes that leave the support, by scheme.
        calibration: Z score of the propensities of each policy.
        reasons: what was found out about the data.
        clocked: whether policies changed during episodes.
        held_out: whether some of the episodes are held out.
        deterministic: whether the target is deterministic.
        sizes: how many trajectories each stratum of the sample has; None where nobody counted.
        kept: what is known of weights already.
    """

    sample: Sample
    ids: IntArray
    outcomes: Outcomes
    deviation: float = np.nan
    support: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, float] = field(default_factory=dict)
    calibration: FloatArray | None = None
    reasons: tuple[Reason, ...] = ()
    clocked: bool = False
    held_out: bool = False
    deterministic: bool = False
    sizes: IntArray | None = None
    kept: dict[tuple[Weights, str | None], Any] = field(default_factory=dict, init=False)

    def lost(self, scheme: str) -> float | None:
        """Return the share of the target's episodes that leave the support; None if unknown."""
        return self.missing.get(scheme or "fused")  # models know no more than all policies

    def unsupported(self, scheme: str) -> bool:
        """Tell whether the target takes actions that no recorded policy takes.

        Where there are weights that say how often, rare ones do not count.
        """
        lost = self.lost(scheme)
        return self.support.get("fused", 0) > 0 if lost is None else lost > NOTED_LOSS

    def doubts(self, scheme: str) -> tuple[Reason, ...]:
        """Return what speaks against estimates with these weights, whatever their numbers."""
        reasons = [*regime_doubts(self.sample.regime, scheme, self.held_out), *self.reasons]
        if self.clocked and scheme not in ("", "basic"):
            reasons.append(Reason("policies_follow"))
        steps = self.support.get("fused", 0)
        if not scheme and steps and "fused" not in self.missing:  # no weights to say how often
            reasons.append(Reason("support_unknown", steps=steps))
        return tuple(reasons)

    def describe(self, weights: Weights, scheme: str) -> Diagnostics:
        """Describe the weights of an estimate."""
        return self._once(
            (weights, scheme),
            lambda: weight_diagnostics(
                weights,
                self.ids,
                self.sample.counts.size,
                self.support.get(scheme),
                self.lost(scheme),
                self.calibration,
            ),
        )

    def majority(self, weights: Weights) -> float:
        """Return the share of the most common return, see `Outcomes.majority`."""
        return self._once((weights, None), lambda: self.outcomes.majority(weights.last))

    def _once(self, key: tuple[Weights, str | None], make: Callable[[], T]) -> T:
        """Return what `make` does of weights, made once for all estimates that share them."""
        if key not in self.kept:
            self.kept[key] = make()
        value: T = self.kept[key]
        return value

    def facts(
        self, computed: Computed, scheme: str, diagnostics: Diagnostics, error: float
    ) -> Facts:
        """Return what a verdict rests on, as far as it is known without an interval."""
        allowed = self.outcomes.allowed
        reasons = [*computed.reasons, *self.doubts(scheme)]
        if allowed is not None and not _within(computed.value, allowed):
            low, high = allowed
            reasons.append(Reason("value_impossible", value=computed.value, low=low, high=high))
        return Facts(
            computed.value,
            error,
            diagnostics,
            self.sample,
            tuple(reasons),
            model_ess=computed.freedom if computed.by_model else None,
            deterministic=self.deterministic and bool(scheme),
            guess=_guess(allowed),
            unsupported=self.unsupported(scheme),
        )


def conclude(
    name: str,
    composition: Composition,
    computed: Computed,
    known: Known,
    kind: IntervalKind,
    level: float,
    seed: int,
) -> Estimate:
    """Add error, interval, diagnostics and verdict to what an estimator computed.

    Args:
        name: Name of the estimator.
        composition: Its row in the table.
        computed: Its numbers.
        known: Facts about the data.
        kind: Way to make the interval.
        level: Confidence level.
        seed: Seed of the bootstrap draws.
    """
    sample, scheme, value = known.sample, composition.scheme, computed.value
    strata = np.zeros_like(sample.strata) if computed.pooled else sample.strata
    influence = computed.influence if computed.spread is None else computed.spread
    spread, described = spread_of(influence, strata), known.describe(computed.weights, scheme)
    error = float(np.hypot(spread.error, computed.bias))
    if error <= _ROUNDING * abs(value):  # all trajectories agree
        error, spread = 0.0, Spread(0.0, 0.0, Tails(0.0, np.inf, np.nan))
    diagnostics = dataclasses.replace(described, influence_share=spread.tails.largest)
    evidence = Evidence(
        value,
        computed.influence,
        spread,
        strata,
        diagnostics.ess if computed.freedom is None else computed.freedom,
        sample.gamma,
        computed.replicates if np.isfinite(error) else None,
        computed.bets,
    )
    replicates = evidence.replicates

    def ends(level: float) -> Interval:
        return with_bias(kind.interval(evidence, level), value, computed.bias)

    interval = ends(level)
    room = _Room(interval)
    if computed.bets is None and known.outcomes.allowed is None:
        room = _Room(undefined(level, kind.name))
    elif computed.bets is None:
        room = _make_room(ends, level, evidence, computed.weights, known, scheme)
    ratio = known.deviation / error if error > 0.0 and known.deviation > 0.0 else np.nan
    fresh = ratio * ratio  # the power would raise an error where this is infinite
    facts = known.facts(computed, scheme, diagnostics, error)
    doubts = _doubts_of_interval(evidence, interval, known, scheme)
    facts = dataclasses.replace(facts, reasons=facts.reasons + doubts, fresh_episodes=fresh)
    estimate = Estimate(
        name,
        value,
        error,
        room.interval,
        diagnostics,
        judge(facts),
        computed.influence,
        sample,
        replicates,
        # pooled draws are not those of the other estimators: they pair with nothing
        None if replicates is None or computed.pooled else seed,
        dict(computed.report),
        fresh,
        room.unseen,
        computed.bias,
        computed.freedom,
        room.lost,
        computed.share,
        _breakdown(room.interval, value, spread.cautious, computed.share),
    )
    if computed.plain is None or computed.model is None or computed.share == 0.0:
        return estimate
    weights_alone = dataclasses.replace(computed.plain, bets=computed.bets)
    plain = conclude(name, composition, weights_alone, known, kind, level, seed)
    model_free = _model_free(plain, computed.model, known.outcomes)
    return dataclasses.replace(estimate, model_free=model_free, plain=plain)


def _breakdown(interval: Interval, value: float, error: float, share: float) -> float:
    """Return the bias of a model up to which an interval misses at most twice as often."""
    from scipy.special import ndtri

    if share == 0.0:
        return np.inf
    half = min(value - interval.low, interval.high - value)
    room = half - float(ndtri(1.0 - 2.0 * (1.0 - interval.level))) * error
    return room / share if not room < 0.0 else 0.0  # NaN stays


def _model_free(plain: Estimate, model: tuple[float, FloatArray], outcomes: Outcomes) -> Interval:
    """Return the interval of the weights, with the model as a guess whose bias does not matter."""
    if not (np.isfinite(plain.value) and np.isfinite(plain.interval.low)):
        return undefined(plain.interval.level, plain.interval.method)
    guess = uncorrelated(model, (plain.value, plain.influence), plain.sample.strata)
    return outcomes.cut(whatever_bias(plain.interval, plain.value, guess))


@dataclass(frozen=True)
class _Room:
    """An interval with room for what the episodes cannot show; see `Estimate` for the rest."""

    interval: Interval
    unseen: tuple[float, float] = (0.0, 0.0)
    lost: tuple[float, float] = (0.0, 0.0)


def _make_room(
    ends: Callable[[float], Interval],
    level: float,
    evidence: Evidence,
    weights: Weights,
    known: Known,
    scheme: str,
) -> _Room:
    """Widen an interval by outcomes that may be unseen, and by episodes that leave the support."""
    outcomes = known.outcomes
    unseen = outcomes.unseen(evidence.value, evidence.ess, known.majority(weights))
    interval = widened(ends, evidence.value, level, evidence.ess, unseen)
    shifted = outcomes.shifted(interval, known.lost(scheme) or 0.0)
    moved = interval.low - shifted.low, shifted.high - interval.high
    lost = moved[0] if moved[0] > 0.0 else 0.0, moved[1] if moved[1] > 0.0 else 0.0  # not NaN
    return _Room(outcomes.cut(shifted), unseen, lost)


def _doubts_of_interval(
    evidence: Evidence, interval: Interval, known: Known, scheme: str
) -> tuple[Reason, ...]:
    """Return what speaks against the interval: lost draws, lost bets, no reward to go by."""
    reasons = []
    if evidence.replicates is not None:
        size = evidence.replicates.size
        lost = size - int(np.count_nonzero(np.isfinite(evidence.replicates)))
        if lost:
            reasons.append(Reason("draws_without_weight", lost=lost, draws=size))
    if evidence.bets is None:
        if known.outcomes.allowed is None:
            reasons.append(Reason("rewards_all_zero"))
        return tuple(reasons)
    if scheme != "basic" and known.sample.regime in ("adaptive", "in-sample"):
        reasons.append(Reason("bets_adaptive"))
    if np.isnan(interval.low):
        reasons.append(Reason("bets_all_lost"))
    return tuple(reasons)


def value_alone(
    name: str,
    composition: Composition,
    computed: Computed,
    sample: Sample,
    known: Callable[[], Known],
    level: float,
) -> Estimate:
    """Return an estimate without error and interval; weights are judged when somebody asks.

    Args:
        name: Name of the estimator.
        composition: Its row in the table.
        computed: Its numbers.
        sample: the trajectories.
        known: makes the facts about the data.
        level: confidence level of the interval that is not made.
    """
    later: Any = None
    estimate = Estimate(
        name,
        computed.value,
        np.nan,
        undefined(level, "none"),
        later,
        later,
        computed.influence,
        sample,
        report=dict(computed.report),
        bias=computed.bias,
        freedom=computed.freedom,
    )
    return estimate.judged_by(partial(_judge_weights, composition.scheme, computed, known))


def _judge_weights(
    scheme: str, computed: Computed, known: Callable[[], Known]
) -> tuple[Diagnostics, Verdict]:
    """Describe the weights of a value alone, and judge by them."""
    about = known()
    diagnostics = about.describe(computed.weights, scheme)
    facts = about.facts(computed, scheme, diagnostics, np.nan)
    return diagnostics, judge(dataclasses.replace(facts, error_wanted=False))


def with_deviation(known: Known, found: Mapping[str, Computed]) -> Known:
    """Add the standard deviation of one return of the target, by the least noisy weights.

    These are weights against the mixture of all behaviours, without a cap if possible; without any
    weights, all episodes count alike. So other estimators beside one do not change the result.
    """
    capped_first = sorted(found, key=lambda name: not ESTIMATORS[name].capped)
    schemes = {ESTIMATORS[name].scheme: found[name] for name in capped_first}
    chosen = next((schemes[s] for s in ("fused", "optimal", "basic") if s in schemes), None)
    weights = np.ones(known.ids.size) if chosen is None else chosen.weights.last
    deviation = known.outcomes.deviation(weights, known.sample.strata, known.sizes)
    return dataclasses.replace(known, deviation=deviation)


def _guess(allowed: tuple[float, float] | None) -> float:
    """Return the standard error of a value drawn evenly from those that the rewards allow."""
    return np.inf if allowed is None else (allowed[1] - allowed[0]) / np.sqrt(12.0) or np.inf


def _within(value: float, allowed: tuple[float, float]) -> bool:
    """Tell whether a value lies within bounds, but for rounding; one that is not finite does."""
    slack = 1e-9 * max(abs(allowed[0]), abs(allowed[1]))
    return not np.isfinite(value) or allowed[0] - slack <= value <= allowed[1] + slack
