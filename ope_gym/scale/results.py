"""From the sums of all passes over shards to estimates with intervals and verdicts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.reductions import WeightSums
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.estimators.weighted import Computed, Problem, blended, compute
from ope_gym.inference import bootstrap, regimes
from ope_gym.inference.conclude import Known, estimated
from ope_gym.inference.estimate import Sample
from ope_gym.results import Evaluation
from ope_gym.scale.cut import CALM, ROBUST, Cut
from ope_gym.scale.passes import Key, NormalisedPass, WeightPass
from ope_gym.weights.mixtures import joined


@dataclass(frozen=True)
class _Found:
    """The sums of all passes."""

    starts: FloatArray  # (n,) v of the q model; empty without one
    strata: IntArray  # (n,)
    second: WeightPass
    third: NormalisedPass
    cut: Cut | None

    @property
    def draws(self) -> bootstrap.PoissonDraws:
        assert self.third.draws is not None  # the interval is a bootstrap
        return self.third.draws


def estimates_of(
    second: WeightPass,
    third: NormalisedPass,
    origin: str | None,
    cut: Cut | None = None,
    q_model: str | None = None,
) -> Evaluation:
    """The estimates.

    Args:
        second: pass.
        third: pass.
        origin: as in `ope_gym.evaluate`.
        cut: what `auto` needs.
        q_model: its name, if an estimator uses one.
    """
    mixture, options = second.mixture, second.options
    ids = np.concatenate(second.ids)
    mixed = any(key.scheme != "basic" for key in second.sums)  # else no mixture was needed
    sample = Sample(
        mixture.trajectories,
        mixture.steps,
        joined(ids),
        mixture.names,
        mixture.counts,
        options.gamma,
        regimes.regime_of(mixture.summary, second.target, origin),
        bootstrap.fingerprint(np.concatenate(second.hashes)),
        mixture.partial if mixed else None,
        q_model,
    )
    report = second.propensities.finalise()
    notes = report.notes + ((second.mismatch,) if second.mismatch else ())
    known = Known(
        sample, ids, report.support, report.calibration, notes, joined=sample.strata is not ids
    )
    starts = np.concatenate([*second.starts, np.empty(0)])
    found = _Found(starts, sample.strata, second, third, cut)
    estimates = {}
    for name in options.estimators:
        computed = _computed(name, found)
        draw = partial(computed.replicates, None)
        estimates[name] = estimated(name, computed, known, options, draw)
    return Evaluation(estimates)


def _computed(name: str, found: _Found) -> Computed:
    """One estimator, from the sums of all passes."""
    c, starts = ESTIMATORS[name], found.starts
    if c.method == "direct":
        none = np.empty(0)
        problem = Problem(none, np.zeros(1, dtype=np.int64), found.strata, {}, 1.0, 1.0)
        problem.start = starts
        return dataclasses.replace(
            compute(name, problem), replicates=lambda _: found.draws.means(starts)
        )
    key = Key(c.scheme, c.capped, c.baseline)
    plain = _weighted(found, key, found.second.sums[key], found.third if c.normalised else None)
    if c.method != "auto" or found.cut is None:
        return plain
    cut = found.cut
    robust = _weighted(found, ROBUST, cut.found.sums[ROBUST], cut.normalised)
    calm = cut.normalised.influence[CALM].finalise()
    blend = blended(plain.moments, calm, robust.moments, starts, found.strata)
    return Computed(
        blend.moments,
        lambda draws: blend.replicates(plain, robust, draws),
        blend.cautions,
        {**blend.report, "truncated": cut.share},
    )


def _weighted(
    found: _Found, key: Key, sums: WeightSums, normalised: NormalisedPass | None
) -> Computed:
    """Plain or normalised, doubly robust or not."""
    influence = None if normalised is None else normalised.influence[key].finalise()
    result, starts = sums.finalise(influence), found.starts
    if key.baseline:
        mean = float(starts.mean())
        moved = result.influence + (starts if normalised is None else starts - mean)
        result = dataclasses.replace(result, value=result.value + mean, influence=moved)

    def replicates(_: object) -> FloatArray:
        draws = found.draws
        if normalised is None:
            return draws.means(result.influence)
        drawn = normalised.replicates[key].finalise()
        return drawn + draws.means(starts) if key.baseline else drawn

    return Computed(result, replicates)
