"""Turn the numbers of an estimator into an estimate: error, interval, diagnostics and verdict.

Every estimator ends here; an estimator only says what its influence values are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import Composition
from ope_gym.inference import regimes
from ope_gym.inference.computed import Computed
from ope_gym.inference.diagnostics import judge, weight_diagnostics
from ope_gym.inference.errors import standard_error
from ope_gym.inference.estimate import Estimate, Sample
from ope_gym.inference.intervals import Evidence, IntervalKind

_BETTING = "betting with weights against a mixture supposes held-out episodes or fixed policies"


@dataclass(frozen=True, eq=False)
class Known:
    """The facts about the data that verdicts need, beside the numbers.

    Args:
        sample: the trajectories.
        ids: (n,) behaviour of each.
        support: by scheme, steps at which the target does what no behaviour can.
        calibration: of the propensities of each policy.
        notes: reasons that make every estimate red.
        cautions: reasons that make estimates with weights against a mixture amber.
    """

    sample: Sample
    ids: IntArray
    support: Mapping[str, int] = field(default_factory=dict)
    calibration: FloatArray | None = None
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


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
    diagnostics = weight_diagnostics(
        computed, known.ids, sample.counts.size, known.support.get(scheme), known.calibration
    )
    spread = computed.influence if computed.spread is None else computed.spread
    strata = np.zeros_like(sample.strata) if computed.pooled else sample.strata
    error = standard_error(spread, strata)
    replicates = computed.replicates if np.isfinite(error) else None
    evidence = Evidence(
        computed.value,
        computed.influence,
        spread,
        strata,
        error,
        diagnostics.ess,
        sample.gamma,
        replicates,
        computed.bets,
    )
    interval = kind.interval(evidence, level)
    notes, cautions = _reasons(computed, known, scheme, replicates)
    if computed.bets is not None:
        if scheme != "basic" and sample.regime in ("adaptive", "in-sample"):
            cautions.append(_BETTING)
        if np.isnan(interval.low):
            notes.append("no value agrees with the data: reward_range or a propensity is wrong")
    verdict = judge(
        diagnostics,
        computed.value,
        error,
        sample.counts,
        sample.behaviours,
        notes=notes,
        cautions=cautions,
    )
    return Estimate(
        name,
        computed.value,
        error,
        interval,
        diagnostics,
        verdict,
        computed.influence,
        sample,
        replicates,
        # pooled draws are not those of the other estimators: they pair with nothing
        None if replicates is None or computed.pooled else seed,
        dict(computed.report),
    )


def _reasons(
    computed: Computed, known: Known, scheme: str, replicates: FloatArray | None
) -> tuple[list[str], list[str]]:
    """Collect the reasons that make an estimate red, and those that make it amber."""
    notes = [*known.notes, *computed.notes]
    cautions = [*computed.cautions, *regimes.cautions(known.sample.regime, scheme)]
    if scheme not in ("", "basic"):
        cautions += known.cautions
    if replicates is not None:
        lost = int(np.count_nonzero(~np.isfinite(replicates)))
        if lost:
            notes.append(f"{lost} of {replicates.size} bootstrap replicates have no weight left")
    return notes, cautions
