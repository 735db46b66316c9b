"""From the sums of all passes over shards to estimates with intervals and verdicts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ope_gym import intervals, poisson, regimes
from ope_gym.diagnostics import judge, weight_diagnostics
from ope_gym.estimators import ESTIMATORS, standard_error
from ope_gym.methods import Computed, Problem, blended, compute
from ope_gym.results import Estimate, Evaluation, Sample
from ope_gym.shard_cut import CALM, ROBUST, Cut
from ope_gym.shard_passes import Key, NormalisedPass, WeightPass
from ope_gym.shard_sums import WeightSums
from ope_gym.weights import FloatArray


@dataclass(frozen=True)
class _Known:
    """What all estimates share."""

    sample: Sample
    starts: FloatArray  # (n,) v of the q model; empty without one
    second: WeightPass
    third: NormalisedPass
    cut: Cut | None


def estimates_of(
    second: WeightPass, third: NormalisedPass, origin: str | None, cut: Cut | None = None
) -> Evaluation:
    """The estimates, `origin` as in `ope_gym.evaluate`; `cut` is what `auto` needs."""
    mixture, options = second.mixture, second.options
    sample = Sample(
        mixture.trajectories, mixture.steps, np.concatenate(second.ids), mixture.names,
        mixture.counts, options.gamma, regimes.regime_of(mixture.summary, second.target, origin),
        poisson.fingerprint(np.concatenate(second.hashes)),
    )  # fmt: skip
    starts = np.concatenate([*second.starts, np.empty(0)])
    known = _Known(sample, starts, second, third, cut)
    return Evaluation({name: _estimate(name, known) for name in options.estimators})


def _computed(name: str, known: _Known) -> Computed:
    """One estimator, from the sums of all passes."""
    c, starts = ESTIMATORS[name], known.starts
    if c.method == "direct":
        none = np.empty(0)
        problem = Problem(none, np.zeros(1, dtype=np.int64), known.sample.strata, {}, 1.0, 1.0)
        problem.start = starts
        return dataclasses.replace(
            compute(name, problem), replicates=lambda _: _drawn(known).means(starts)
        )
    key = Key(c.scheme, c.capped, c.baseline)
    plain = _weighted(known, key, known.second.sums[key], known.third if c.normalised else None)
    if c.method != "auto" or known.cut is None:
        return plain
    cut = known.cut
    robust = _weighted(known, ROBUST, cut.found.sums[ROBUST], cut.normalised)
    calm = cut.normalised.influence[CALM].finalise()
    blend = blended(plain.moments, calm, robust.moments, starts, known.sample.strata)
    return Computed(
        blend.moments,
        lambda draws: blend.mixed(plain.replicates(draws), robust.replicates(draws)),
        report={**blend.report, "truncated": cut.share},
    )


def _weighted(
    known: _Known, key: Key, sums: WeightSums, normalised: NormalisedPass | None
) -> Computed:
    """Plain or normalised, doubly robust or not."""
    influence = None if normalised is None else normalised.influence[key].finalise()
    found = sums.finalise(influence)
    starts = known.starts
    if key.baseline:
        mean = float(starts.mean())
        moved = found.influence + (starts if normalised is None else starts - mean)
        found = dataclasses.replace(found, value=found.value + mean, influence=moved)

    def replicates(_: object) -> FloatArray:
        draws = _drawn(known)
        if normalised is None:
            return draws.means(found.influence)
        drawn = normalised.replicates[key].finalise()
        return drawn + draws.means(starts) if key.baseline else drawn

    return Computed(found, replicates)


def _drawn(known: _Known) -> poisson.PoissonDraws:
    assert known.third.draws is not None  # the interval is a bootstrap
    return known.third.draws


def _estimate(name: str, known: _Known) -> Estimate:
    """One estimator: its value, error, interval, diagnostics and verdict."""
    c, options, sample, second = ESTIMATORS[name], known.second.options, known.sample, known.second
    computed = _computed(name, known)
    found = computed.moments
    report = second.propensities.finalise()
    diagnostics = weight_diagnostics(
        found.sums, found.ess, found.log_last, sample.strata, sample.counts.size,
        found.capped_share, report.support.get(c.scheme), report.calibration,
    )  # fmt: skip
    error = standard_error(found.influence, sample.strata)
    notes = [*report.notes, *([second.mismatch] if second.mismatch else [])]
    replicates = None
    if options.interval == "ess-t":
        cautious = intervals.cautious_error(found.influence, sample.strata)
        interval = intervals.ess_t(found.value, cautious, diagnostics.ess, options.level)
    elif not np.isfinite(error):
        interval = intervals.undefined(options.level, options.interval)
    else:
        replicates = computed.replicates(known.third.draws)
        lost = int(np.count_nonzero(~np.isfinite(replicates)))
        if lost:
            notes.append(f"{lost} of {replicates.size} bootstrap replicates have no weight left")
        interval = (
            intervals.bca(replicates, found.value, found.influence, sample.strata, options.level)
            if options.interval == "bca"
            else intervals.percentile(replicates, options.level)
        )
    verdict = judge(
        diagnostics, found.value, error, sample.trajectories, sample.counts, sample.behaviours,
        notes=notes, cautions=[*computed.cautions, *regimes.cautions(sample.regime, c.scheme)],
    )  # fmt: skip
    return Estimate(
        name, found.value, error, interval, diagnostics, verdict, found.influence, sample,
        replicates, options.seed if replicates is not None else None, dict(computed.report),
    )  # fmt: skip
