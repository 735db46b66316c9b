"""From what an estimator computed to an estimate: error, interval, diagnostics and verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import ESTIMATORS, standard_error
from ope_gym.estimators.weighted import Computed
from ope_gym.inference import intervals, regimes
from ope_gym.inference.diagnostics import judge, weight_diagnostics
from ope_gym.inference.estimate import Estimate, Sample
from ope_gym.options import Options

_BETTING = "betting with weights against a mixture supposes held-out episodes or fixed policies"


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of the data beside the numbers.

    Args:
        sample: the trajectories.
        ids: (n,) behaviour of each.
        support: by scheme, steps at which the target does what no behaviour can.
        calibration: of the propensities of each policy.
        notes: red for all.
        cautions: amber for weights against a mixture.
        joined: strata of the sample join behaviours of one episode each.
    """

    sample: Sample
    ids: IntArray
    support: dict[str, int]
    calibration: FloatArray | None = None
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    joined: bool = False


def estimated(
    name: str,
    computed: Computed,
    known: Known,
    options: Options,
    draw: Callable[[], FloatArray],
    bet: Callable[[], intervals.Interval] | None = None,
) -> Estimate:
    """One estimator.

    Args:
        name: in `ope_gym.ESTIMATORS`.
        computed: its value and influence.
        known: of the data.
        options: of the evaluation.
        draw: makes the bootstrap replicates, if they are asked for.
        bet: makes the interval by betting, where that can be.
    """
    scheme, sample, result = ESTIMATORS[name].scheme, known.sample, computed.moments
    diagnostics = weight_diagnostics(
        result.sums,
        result.ess,
        result.log_last,
        known.ids,
        sample.counts.size,
        result.capped_share,
        known.support.get(scheme),
        known.calibration,
    )
    spread = result.influence if computed.spread is None else computed.spread
    strata = np.zeros_like(sample.strata) if computed.pooled else sample.strata
    error = standard_error(spread, strata)
    replicates = None
    notes = list(known.notes)
    cautions = [*computed.cautions, *regimes.cautions(sample.regime, scheme)]
    if scheme not in ("", "basic"):
        cautions += known.cautions
    if options.interval == "betting":
        assert bet is not None  # refused where it cannot be
        if scheme != "basic" and sample.regime in ("adaptive", "in-sample"):
            cautions.append(_BETTING)
        interval = bet()
        if np.isnan(interval.low):
            notes.append("no value agrees with the data: reward_range or a propensity is wrong")
    elif options.interval == "ess-t":
        cautious = intervals.cautious_error(spread, strata)
        interval = intervals.ess_t(result.value, cautious, diagnostics.ess, options.level)
    elif not np.isfinite(error):
        interval = intervals.undefined(options.level, options.interval)
    else:
        replicates = draw()
        lost = int(np.count_nonzero(~np.isfinite(replicates)))
        if lost:
            notes.append(f"{lost} of {replicates.size} bootstrap replicates have no weight left")
        interval = (
            intervals.bca(replicates, result.value, result.influence, strata, options.level)
            if options.interval == "bca"
            else intervals.percentile(replicates, options.level)
        )
    verdict = judge(
        diagnostics,
        result.value,
        error,
        sample.trajectories,
        sample.counts,
        sample.behaviours,
        notes=notes,
        cautions=cautions,
    )
    return Estimate(
        name,
        result.value,
        error,
        interval,
        diagnostics,
        verdict,
        result.influence,
        sample,
        replicates,
        options.seed if replicates is not None else None,
        dict(computed.report),
    )
