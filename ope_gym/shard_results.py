"""From the sums of all passes over shards to estimates with intervals and verdicts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ope_gym import intervals, poisson, regimes
from ope_gym.diagnostics import judge, weight_diagnostics
from ope_gym.estimators import ESTIMATORS, Moments, standard_error
from ope_gym.methods import Computed, Problem, compute
from ope_gym.results import Estimate, Evaluation, Sample
from ope_gym.shard_passes import Key, NormalisedPass, WeightPass
from ope_gym.weights import FloatArray


@dataclass(frozen=True)
class _Known:
    """What all estimates share."""

    sample: Sample
    starts: FloatArray  # (n,) v of the q model; empty without one
    second: WeightPass
    third: NormalisedPass


def estimates_of(second: WeightPass, third: NormalisedPass, origin: str | None) -> Evaluation:
    """The estimates, `origin` as in `ope_gym.evaluate`."""
    mixture, options = second.mixture, second.options
    sample = Sample(
        mixture.trajectories, mixture.steps, np.concatenate(second.ids), mixture.names,
        mixture.counts, options.gamma, regimes.regime_of(mixture.summary, second.target, origin),
        poisson.fingerprint(np.concatenate(second.hashes)),
    )  # fmt: skip
    starts = np.concatenate([*second.starts, np.empty(0)])
    known = _Known(sample, starts, second, third)
    return Evaluation({name: _estimate(name, known) for name in options.estimators})


def _computed(name: str, known: _Known) -> tuple[Moments, tuple[str, ...]]:
    """Value, influence and sums of an estimator, and cautions of its own."""
    c, starts = ESTIMATORS[name], known.starts
    if c.method == "direct":
        none = np.empty(0)
        problem = Problem(none, np.zeros(1, dtype=np.int64), known.sample.strata, {}, 1.0, 1.0)
        problem.start = starts
        direct: Computed = compute(name, problem)
        return direct.moments, direct.cautions
    key = Key(c.scheme, c.capped, c.baseline)
    influence = known.third.influence[key].finalise() if c.normalised else None
    found = known.second.sums[key].finalise(influence)
    if c.baseline:
        mean = float(starts.mean())
        moved = found.influence + (starts - mean if c.normalised else starts)
        found = dataclasses.replace(found, value=found.value + mean, influence=moved)
    return found, ()


def _replicates(name: str, found: Moments, known: _Known) -> FloatArray:
    c, draws = ESTIMATORS[name], known.third.draws
    assert draws is not None  # the interval is a bootstrap
    if not c.normalised:
        return draws.means(found.influence)
    drawn = known.third.replicates[Key(c.scheme, c.capped, c.baseline)].finalise()
    return drawn + draws.means(known.starts) if c.baseline else drawn


def _estimate(name: str, known: _Known) -> Estimate:
    """One estimator: its value, error, interval, diagnostics and verdict."""
    c, options, sample, second = ESTIMATORS[name], known.second.options, known.sample, known.second
    found, own_cautions = _computed(name, known)
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
        replicates = _replicates(name, found, known)
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
        notes=notes, cautions=[*own_cautions, *regimes.cautions(sample.regime, c.scheme)],
    )  # fmt: skip
    return Estimate(
        name, found.value, error, interval, diagnostics, verdict, found.influence, sample,
        replicates, options.seed if replicates is not None else None,
    )  # fmt: skip
