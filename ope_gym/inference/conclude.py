"""Turn the numbers of an estimator into an estimate: error, interval, diagnostics and verdict.

Every estimator ends here; an estimator only says what its influence values are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ope_gym.arrays import FloatArray, IntArray, at_once
from ope_gym.estimators.table import ESTIMATORS, Composition
from ope_gym.inference import regimes
from ope_gym.inference.computed import Computed
from ope_gym.inference.diagnostics import (
    NOTED_LOSS,
    Diagnostics,
    Findings,
    Verdict,
    judge,
    weight_diagnostics,
)
from ope_gym.inference.errors import Spread, Tails, spread_of
from ope_gym.inference.estimate import Estimate, Sample
from ope_gym.inference.intervals import Evidence, IntervalKind, undefined, widened, with_bias
from ope_gym.inference.outcomes import Outcomes

_ROUNDING = 1e-12  # of the value: a smaller standard error is rounding
_BETTING = "betting with weights against a mixture assumes held-out episodes or fixed policies"
_NO_REWARD = (
    "every recorded reward is 0: how large a reward can be, and so how far off the value is, "
    "cannot be told"
)


@dataclass(frozen=True, eq=False)
class Known:
    """The facts about the data that verdicts need, beside the numbers.

    Args:
        sample: the trajectories.
        ids: (n,) behaviour of each.
        outcomes: the returns of the episodes, and those that may be unseen.
        deviation: standard deviation of one return of the target; NaN if unknown.
        support: by scheme, steps at which the target does what no behaviour can.
        missing: by scheme, share of the target's episodes that do so.
        calibration: of the propensities of each policy.
        alarms: reasons that make every estimate red.
        doubts: reasons that make every estimate amber at best.
        notes: remarks about estimates with weights against a mixture.
        held_out: whether some of the episodes are held out.
        certain: whether the target is deterministic.
        sizes: how many trajectories each stratum of the sample has; None where nobody counted.
    """

    sample: Sample
    ids: IntArray
    outcomes: Outcomes
    deviation: float = np.nan
    support: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, float] = field(default_factory=dict)
    calibration: FloatArray | None = None
    alarms: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    held_out: bool = False
    certain: bool = False
    sizes: IntArray | None = None


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
        name: of the estimator.
        composition: its row in the table.
        computed: its numbers.
        known: facts about the data.
        kind: of the interval.
        level: confidence level.
        seed: of the bootstrap draws.
    """
    sample, scheme = known.sample, composition.scheme
    strata = np.zeros_like(sample.strata) if computed.pooled else sample.strata
    values = computed.influence if computed.spread is None else computed.spread
    support = known.support.get(scheme)
    spread, described = at_once(
        values.size,
        lambda: spread_of(values, strata, None if computed.pooled else known.sizes),
        lambda: weight_diagnostics(
            computed, known.ids, sample.counts.size, support, known.calibration
        ),
    )
    if spread.error <= _ROUNDING * abs(computed.value):  # all trajectories agree
        spread = Spread(0.0, 0.0, Tails(0.0, np.inf, np.nan))
    error = float(np.hypot(spread.error, computed.bias))
    diagnostics = dataclasses.replace(
        described,
        influence_share=spread.tails.largest,
        missing_mass=known.missing.get(scheme or "fused"),
    )
    replicates = computed.replicates if np.isfinite(error) else None
    evidence = Evidence(
        computed.value,
        computed.influence,
        spread,
        strata,
        diagnostics.ess if computed.freedom is None else computed.freedom,
        sample.gamma,
        replicates,
        computed.bets,
    )
    interval = with_bias(kind.interval(evidence, level), computed.value, computed.bias)
    alarms, cautions = _reasons(computed, known, scheme, replicates)
    unseen = lost = (0.0, 0.0)
    if computed.bets is not None:
        if scheme != "basic" and sample.regime in ("adaptive", "in-sample"):
            cautions.append(_BETTING)
        if np.isnan(interval.low):
            alarms.append("no value agrees with the data: reward_range or a propensity is wrong")
    elif known.outcomes.allowed is None:
        interval = undefined(level, kind.name)
        alarms.append(_NO_REWARD)
    else:
        unseen = known.outcomes.unseen(computed.value, evidence.ess, computed.last)
        interval = widened(interval, computed.value, *unseen)
        missing = known.missing.get(scheme or "fused", 0.0)  # models know no more than all policies
        shifted = known.outcomes.shifted(interval, missing)
        moved = interval.low - shifted.low, shifted.high - interval.high
        lost = moved[0] if moved[0] > 0.0 else 0.0, moved[1] if moved[1] > 0.0 else 0.0  # not NaN
        interval = known.outcomes.cut(shifted)
    ratio = known.deviation / error if error > 0.0 and known.deviation > 0.0 else np.nan
    fresh = ratio * ratio  # the power would raise an error where this is infinite
    findings = Findings(
        computed.value,
        error,
        fresh,
        tuple(alarms),
        tuple(cautions),
        known.notes if scheme not in ("", "basic") else (),
        sample.regime == "in-sample" and not known.held_out,
        computed.freedom if computed.by_model else None,
        known.certain and bool(scheme),
        guess=_guess(known.outcomes.allowed),
        unsupported=_unsupported(known, scheme),
    )
    return Estimate(
        name,
        computed.value,
        error,
        interval,
        diagnostics,
        judge(diagnostics, findings, sample.counts, sample.behaviours),
        computed.influence,
        sample,
        replicates,
        # pooled draws are not those of the other estimators: they pair with nothing
        None if replicates is None or computed.pooled else seed,
        dict(computed.report),
        fresh,
        unseen,
        computed.basis,
        computed.bias,
        computed.freedom,
        lost,
    )


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
        name: of the estimator.
        composition: its row in the table.
        computed: its numbers.
        sample: the trajectories.
        known: makes the facts about the data.
        level: confidence level of the interval that is not made.
    """
    nothing: Any = None
    found = Estimate(
        name,
        computed.value,
        np.nan,
        undefined(level, "none"),
        nothing,
        nothing,
        computed.influence,
        sample,
        report=dict(computed.report),
        basis=computed.basis,
        bias=computed.bias,
        freedom=computed.freedom,
    )
    return found.judged_by(partial(_judge_weights, composition, computed, known))


def _judge_weights(
    composition: Composition, computed: Computed, known: Callable[[], Known]
) -> tuple[Diagnostics, Verdict]:
    """Describe the weights of a value alone, and judge by them."""
    facts, scheme = known(), composition.scheme
    sample = facts.sample
    diagnostics = dataclasses.replace(
        weight_diagnostics(
            computed, facts.ids, sample.counts.size, facts.support.get(scheme), facts.calibration
        ),
        missing_mass=facts.missing.get(scheme or "fused"),
    )
    alarms, cautions = _reasons(computed, facts, scheme, None)
    findings = Findings(
        computed.value,
        np.nan,
        alarms=tuple(alarms),
        cautions=tuple(cautions),
        notes=facts.notes if scheme not in ("", "basic") else (),
        in_sample=sample.regime == "in-sample" and not facts.held_out,
        effective=computed.freedom if computed.by_model else None,
        certain=facts.certain and bool(scheme),
        value_alone=True,
        unsupported=_unsupported(facts, scheme),
    )
    return diagnostics, judge(diagnostics, findings, sample.counts, sample.behaviours)


def with_deviation(known: Known, found: Mapping[str, Computed]) -> Known:
    """Add the standard deviation of one return of the target, by the least noisy weights.

    These are weights against the mixture of all behaviours, without a cap if possible; without any
    weights, all episodes count alike. So other estimators beside one do not change the result.
    """
    capped_first = sorted(found, key=lambda name: not ESTIMATORS[name].capped)
    schemes = {ESTIMATORS[name].scheme: found[name] for name in capped_first}
    chosen = next((schemes[s] for s in ("fused", "optimal", "basic") if s in schemes), None)
    weights = np.ones(known.ids.size) if chosen is None else chosen.last
    deviation = known.outcomes.deviation(weights, known.sample.strata, known.sizes)
    return dataclasses.replace(known, deviation=deviation)


def _reasons(
    computed: Computed, known: Known, scheme: str, replicates: FloatArray | None
) -> tuple[list[str], list[str]]:
    """Collect the reasons that make an estimate red, and those that make it amber."""
    alarms = [*known.alarms, *computed.notes]
    regime = known.sample.regime
    cautions = [*computed.cautions, *regimes.cautions(regime, scheme, known.held_out)]
    cautions += known.doubts
    steps = known.support.get("fused", 0)
    if not scheme and steps and "fused" not in known.missing:  # no weights to say how often
        cautions.append(
            f"at {steps} visited steps the target may take an action that no recorded policy "
            "takes; only weights can say how often, so ask for NFIS, too"
        )
    value, allowed = computed.value, known.outcomes.allowed
    if allowed is not None and not _within(value, allowed):
        alarms.append(
            f"the value {value:.4g} lies outside of what the recorded rewards allow, "
            f"[{allowed[0]:.4g}, {allowed[1]:.4g}]"
        )
    if replicates is not None:
        lost = int(np.count_nonzero(~np.isfinite(replicates)))
        if lost:
            alarms.append(f"{lost} of {replicates.size} bootstrap replicates have no weight left")
    return alarms, cautions


def _guess(allowed: tuple[float, float] | None) -> float:
    """Return the standard error of a value drawn evenly from those that the rewards allow."""
    return np.inf if allowed is None else (allowed[1] - allowed[0]) / np.sqrt(12.0) or np.inf


def _unsupported(known: Known, scheme: str) -> bool:
    """Tell whether the target takes actions that no recorded policy takes.

    Where there are weights that say how often, rare ones do not count.
    """
    missing = known.missing.get(scheme or "fused")
    return known.support.get("fused", 0) > 0 if missing is None else missing > NOTED_LOSS


def _within(value: float, allowed: tuple[float, float]) -> bool:
    """Tell whether a value lies within bounds, but for rounding; one that is not finite does."""
    slack = 1e-9 * max(abs(allowed[0]), abs(allowed[1]))
    return not np.isfinite(value) or allowed[0] - slack <= value <= allowed[1] + slack
