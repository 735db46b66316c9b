"""Rank policies: evaluate all of them on the same trajectories and find which may be best."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ope_gym.analysis.ranking_table import Ranked, Ranking
from ope_gym.arguments import whole
from ope_gym.arrays import FloatArray
from ope_gym.estimators.table import one_estimator
from ope_gym.evaluation import Evaluator
from ope_gym.inference.errors import covariance_within
from ope_gym.inference.estimate import Estimate
from ope_gym.options import (
    Options,
    OptionValues,
)
from ope_gym.policies import Policy, Target
from ope_gym.policies.base import is_saved
from ope_gym.scale.sources import Episodes, Source

if TYPE_CHECKING:
    from typing_extensions import Unpack

DRAWS = 20_000
_MANY, _FIRST = 50, 2_000  # from so many policies on, so many draws say who takes part in the rest
_TIE = 1e-9  # draws closer to the winner than this share of its spread tie with it
_ROUNDING = 1e-13  # smaller shares of the largest eigenvalue are rounding, not variance
_FAR = 7.0  # standard deviations beyond which no draw lies
_NODES = 128  # of the interpolation of a smooth function between these
_WIDEST = 1e9  # largest factor by which few effective episodes widen a draw


def rank(
    episodes: Episodes,
    targets: Mapping[str, Target] | Sequence[Target],
    estimator: str = "auto",
    *,
    origin: str | Mapping[str, str] | None = None,
    draws: int = DRAWS,
    **options: Unpack[OptionValues],
) -> Ranking:
    """Rank several policies from best to worst, each evaluated once on the same trajectories.

    Differences are paired: the luck of the same episodes cancels as far as two policies share it.
    The largest of several estimates tends to exceed the value behind it, the more so the noisier
    they are. The probability of being best and the cautious choice allow for that; the rank does
    not.

    Cost: by auto about a third of as many evaluations, mostly for a q model of each policy; by NFIS
    less than a tenth of that time. Of more than a few hundred, rank all by NFIS and then the best
    100 by auto. This is not done for you, because nothing makes it safe: the NFIS intervals of
    policies far from the data are too wide to rule them out, and their NFIS values say little.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`.
        targets: policies by name, or a list, which names them "target 0", "target 1", ... Each is
            a policy, a Stable-Baselines3 model or its .zip file, a torch module, the number of a
            recorded policy (named "policy 7" in a list), or "last".
        estimator: a name of `ope_gym.ESTIMATORS`.
        origin: "learned" or "fixed", for all targets or by name; as in `ope_gym.evaluate`.
        draws: joint draws behind the probability of being best, where there is no bootstrap.
        options: those of `ope_gym.Options`: `held_out`, `q_model`, `gamma`, `interval`, `level`,
            `weighting`, `compute`, `seed`.

    Returns:
        A mapping from name to `Ranked`, the best first; print it for a table.
    """
    whole("draws", draws, expected=f"give at least 1, better {DRAWS:,}")
    estimator = one_estimator(estimator)
    checked = Options(**options)
    checked.refuse_value_alone("rank")
    compute = checked.compute
    progress = compute.progress or (lambda _: None)  # counts policies here, not steps
    options["compute"] = dataclasses.replace(compute, progress=None)
    evaluator = Evaluator(episodes, estimator, **options)
    named = named_targets(targets, evaluator.source)
    origins = origin if isinstance(origin, Mapping) else dict.fromkeys(named, origin)
    unknown = [name for name in origins if name not in named]
    if unknown:
        raise ValueError(f"origin names {unknown[0]!r}; the targets are {', '.join(named)}")
    evaluations = evaluator.evaluate_all(
        list(named.values()), origins=[origins.get(name) for name in named], done=progress
    )
    estimates = {
        name: evaluation[estimator] for name, evaluation in zip(named, evaluations, strict=True)
    }
    return ranked(estimates, draws=draws, seed=evaluator.options.seed)


def named_targets(
    targets: Mapping[str, Target] | Sequence[Target], source: Source
) -> dict[str, Policy]:
    """Return the targets by name, with numbers replaced by the recorded policies."""
    if not isinstance(targets, Mapping | list | tuple | range | np.ndarray):
        raise TypeError(f"targets is {targets!r}; give policies by name, or a list of them")
    pairs: list[tuple[str, Target]] = []
    if isinstance(targets, Mapping):
        pairs += targets.items()
    else:
        for place, target in enumerate(targets):
            number = source.number(target, f"targets[{place}]")
            name = f"target {place}" if number is None else f"policy {number}"
            pairs.append((os.path.basename(target) if is_saved(target) else name, target))
    if not pairs:
        raise ValueError("targets is empty: give at least one policy, better two")
    named: dict[str, Policy] = {}
    for name, target in pairs:
        if name in named:
            raise ValueError(f"targets has {name} twice: give each policy once")
        named[name] = source.policy(target, f"targets[{name!r}]")
    return named


def ranked(estimates: Mapping[str, Estimate], *, draws: int = DRAWS, seed: int = 0) -> Ranking:
    """Rank estimates of one estimator on the same trajectories; undefined ones come last."""
    values = {name: e.value for name, e in estimates.items()}
    order = sorted(values, key=lambda name: -values[name] if np.isfinite(values[name]) else np.inf)
    deciding = [estimates[name].decisive for name in order]
    chances = probability_best(deciding, draws=draws, seed=seed)
    best = estimates[order[0]]
    rows = []
    for name, chance in zip(order, chances, strict=True):
        difference = None
        if name != order[0]:
            gap = estimates[name].difference(best)
            difference = dataclasses.replace(gap, minuend=name, subtrahend=order[0])
        rows.append(Ranked(name, estimates[name], difference, float(chance)))
    return Ranking(rows)


def probability_best(
    estimates: Sequence[Estimate], *, draws: int = DRAWS, seed: int = 0
) -> FloatArray:
    """Return (P,) the share of joint draws of the values in which each is the largest.

        J_p + D_p f_p + U_p + b_p Z_p + L_p,
        D ~ normal with the covariance of the influence values within strata, or the deviations of
            shared bootstrap replicates,
        f_p = sqrt(ESS / (ESS - 1)) sqrt((ESS - 1) / chi2)
        U_p = above_p X - below_p Y,    X, Y ~ exponential with mean 1
        L_p ~ uniform between what actions that no recorded policy takes may cost or bring

    With f_p every J_p has a t distribution with ESS - 1 degrees of freedom (and the plain standard
    error, not the cautious one of the ess-t interval): few effective episodes leave much open. One
    uniform number drives the chi2 of all policies, so that two policies that always agree also
    agree in their draws. Ties are shared. U_p is the room for outcomes that were not seen, see
    `ope_gym.inference.outcomes`: policies whose episodes all end alike are not told apart by
    rounding. b_p is the bound on a bias that the influence values do not show, and Z ~ normal; ESS
    is the effective number of episodes, of a q model where the estimate rests on one. Of more than
    50 policies, those that win none of 2,000 draws have no chance worth naming: the others take
    part in the rest.

    At an ESS of 4 or less the draws are overconfident: a red verdict holds for this number as well.

    An estimate whose error is unknown has probability NaN and takes no part.

    Args:
        estimates: estimates by one estimator on the same trajectories.
        draws: number of joint draws, where bootstrap replicates do not set their number.
        seed: seed of the draws.
    """
    result = np.full(len(estimates), np.nan)
    known = [
        p
        for p, e in enumerate(estimates)
        if np.isfinite(e.value) and np.isfinite(e.standard_error) and e.effective > 1 + 1e-9
    ]
    if not known:
        return result
    taking = [estimates[p] for p in known]
    rng = np.random.default_rng([seed, 1])  # not the stream of the bootstrap
    deviations = _replicates(taking)
    if deviations is None and len(taking) > _MANY:
        first = rng.standard_normal((min(_FIRST, draws), len(known))) @ _root(taking).T
        result[known] = 0.0
        known = [p for p, share in zip(known, _wins(taking, first, rng), strict=True) if share > 0]
        taking = [estimates[p] for p in known]
    if deviations is None:
        deviations = rng.standard_normal((draws, len(known))) @ _root(taking).T
    result[known] = _wins(taking, deviations, rng)
    return result


def _wins(
    estimates: Sequence[Estimate], deviations: FloatArray, rng: np.random.Generator
) -> FloatArray:
    """Return (P,) the share of joint draws in which each is the largest.

    Args:
        estimates: those that take part.
        deviations: (R, P) D of `probability_best`.
        rng: generator of all else.
    """
    values = np.array([e.value for e in estimates])
    ess = np.array([e.effective for e in estimates])
    drawn = _widening(ess, rng.random(len(deviations)))
    drawn *= deviations
    drawn += values
    unseen = np.array([e.unseen for e in estimates])
    if unseen.any():
        below, above = rng.exponential(size=(2, *drawn.shape))
        drawn += above * unseen[:, 1] - below * unseen[:, 0]
    bias = np.array([e.bias for e in estimates])
    if bias.any():
        drawn += bias * rng.standard_normal(drawn.shape)
    lost = np.array([e.lost for e in estimates])
    if lost.any():
        drawn += rng.uniform(-lost[:, 0], lost[:, 1], drawn.shape)
    winner = np.argmax(drawn, axis=1)
    best = drawn[np.arange(len(drawn)), winner]
    errors = np.array([e.standard_error for e in estimates])
    scale = np.abs(best - values[winner]) + errors[winner]  # its own: that of others may be huge
    winners = drawn >= (best - _TIE * scale)[:, None]
    return np.asarray(np.mean(winners / winners.sum(axis=1, keepdims=True), axis=0))


def _root(estimates: Sequence[Estimate]) -> FloatArray:
    """Return (P, P) a square root of the covariance: root of the correlations times errors."""
    influence = np.stack([e.influence for e in estimates])
    unit = np.abs(influence).max(axis=1, keepdims=True)  # so that no square overflows
    unit[unit == 0.0] = 1.0
    covariance = covariance_within(influence / unit, estimates[0].sample.strata)
    errors = np.sqrt(np.diag(covariance))
    divisor = np.where(errors > 0.0, errors, 1.0)
    values, vectors = np.linalg.eigh(covariance / np.outer(divisor, divisor))
    # Policies that are equal have an eigenvalue of 0; its rounding would tell them apart.
    values[values < _ROUNDING * values[-1]] = 0.0
    return np.asarray(unit * errors[:, None] * vectors * np.sqrt(np.maximum(values, 0.0)))


def _replicates(estimates: Sequence[Estimate]) -> FloatArray | None:
    """Return (R, P) deviations of the bootstrap replicates defined for all; None without."""
    columns = [e.replicates - e.value for e in estimates if e.replicates is not None]
    if len(columns) < len(estimates) or len({e.seed for e in estimates}) > 1:
        return None
    stacked = np.stack(columns, axis=1)
    stacked = stacked[np.isfinite(stacked).all(axis=1)]
    return stacked if len(stacked) > 1 else None


def _widening(ess: FloatArray, uniform: FloatArray) -> FloatArray:
    """Return (R, P) the factors f of `probability_best`.

    log f is smooth in the normal quantile z of the uniform number, so it is interpolated between
    nodes, within 1e-6 from an ESS of 1.01 on: the quantile of chi2 itself takes a microsecond a
    number.
    """
    from scipy.interpolate import make_interp_spline
    from scipy.special import gammaincinv, gammaln, log_ndtr, ndtr, ndtri

    nodes, shape = np.linspace(-_FAR, _FAR, _NODES)[:, None], (ess - 1.0) / 2
    # gammaincinv(a, u) is half the u-quantile of a chi2 with 2 a degrees of freedom; where it would
    # underflow, u = half^a / Gamma(a + 1)
    half, tail = gammaincinv(shape, ndtr(nodes)), (log_ndtr(nodes) + gammaln(shape + 1)) / shape
    log_half = np.log(half, out=tail, where=half > 1e-200)
    spline = make_interp_spline(nodes[:, 0], 0.5 * (np.log(ess / 2) - log_half), k=5)
    factors: FloatArray = spline(np.clip(ndtri(uniform), -_FAR, _FAR))
    return np.exp(np.minimum(factors, np.log(_WIDEST), out=factors), out=factors)
