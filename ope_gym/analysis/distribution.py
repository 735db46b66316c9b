"""Estimate the distribution of a policy's returns: quantiles, tail, spread, chance of failure.

Each episode counts with the weight of all its actions, P_e / sum_k rho_k P_k at its last step, and
the weights are normalised. A return is one number for the whole episode, so unlike a mean it cannot
be taken apart into steps: where per-decision weights keep early rewards usable, here the last
weight alone decides. The verdict is that of NFIS, which has the same weights.

With a q model the numbers are those of `auto`, which corrects the weights as far as the data bear
the model out; see `ope_gym.analysis.scored_returns`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.analysis.ranking import named_targets
from ope_gym.analysis.scored_returns import ScoredReturns
from ope_gym.arrays import FloatArray, finite
from ope_gym.evaluation import Evaluator
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.diagnostics import Diagnostics
from ope_gym.inference.estimate import Estimate, Sample
from ope_gym.inference.intervals import Interval, percentile, widened
from ope_gym.inference.outcomes import Outcomes, RewardSums, tally
from ope_gym.inference.regimes import label
from ope_gym.inference.weighted_returns import (
    Statistic,
    WeightedReturns,
    cvar_of,
    mean_of,
    quantile_of,
    variance_of,
)
from ope_gym.models import QModel
from ope_gym.policies import Target
from ope_gym.report import text
from ope_gym.scale.sources import Episodes, Source
from ope_gym.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAIL = 0.1
BY = ("cvar", "quantile", "mean")
FEW = 10.0  # effective episodes below which a number is marked as a guess
_WEIGHTS = {"fused": "NFIS", "basic": "NBIS"}
_KINDS = ("ess-t", "percentile")
_OTHER_MEAN = (
    "all lines use the weights of whole episodes; evaluate weighs each step by the actions up to "
    "it, and auto uses a q model, too: their mean differs and is usually more precise"
)
_BY_AUTO = (
    "by auto, with a q model that also sees the return so far; the ESS is that of the weights"
)


@dataclass(frozen=True)
class Quantity:
    """Hold one number of a distribution.

    Args:
        name: such as "5 % quantile".
        value: the estimate; NaN if no episode has weight.
        interval: its confidence interval; an end is infinite where the data do not bound it.
        rests_on: effective episodes that decide it: those of the tail for a tail mean, those on
            the smaller side for a quantile or a probability.
    """

    name: str
    value: float
    interval: Interval
    rests_on: float

    def __str__(self) -> str:
        low, high = self.interval.low, self.interval.high
        return f"{self.name} {text.number(self.value)}, {text.interval(low, high)}"


@dataclass(frozen=True, eq=False)
class Band:
    """Hold the distribution function, with a band that contains all of it; m distinct returns.

    Args:
        x: (m,) returns, ascending.
        value: (m,) estimated probability of a return up to x.
        low: (m,) lower edge.
        high: (m,) upper edge.
        level: with which the whole function lies inside.
    """

    x: FloatArray
    value: FloatArray
    low: FloatArray
    high: FloatArray
    level: float


@dataclass(frozen=True, eq=False)
class Distribution:
    """Hold the estimated distribution of a target's returns; prints as a table.

    Args:
        weighted: returns with their weights.
        level: confidence level of all intervals.
        kind: kind of the intervals: "ess-t" or "percentile".
        draws: bootstrap draws.
        outcomes: returns that are possible.
        estimate: the mean by NFIS (or NBIS), which has the same weights.
        auto: the mean by auto, with a q model; None without one.
        scored: numbers of the distribution with a q model; None without one.
    """

    weighted: WeightedReturns = field(repr=False)
    level: float
    kind: str
    draws: Resamples = field(repr=False)
    outcomes: Outcomes = field(repr=False)
    estimate: Estimate = field(repr=False)
    auto: Estimate | None = field(default=None, repr=False)
    scored: ScoredReturns | None = field(default=None, repr=False)

    @property
    def verdict(self) -> Verdict:
        """Whether to trust it, and why; the verdict of NFIS with the same weights."""
        return self.estimate.verdict

    @property
    def diagnostics(self) -> Diagnostics:
        """Description of the weights."""
        return self.estimate.diagnostics

    @property
    def sample(self) -> Sample:
        """The data it rests on."""
        return self.estimate.sample

    @property
    def ess(self) -> float:
        """Effective sample size of the weights of whole episodes."""
        return self.weighted.ess

    def mean(self) -> Quantity:
        """Return the mean; `ope_gym.evaluate` has better estimates of it, by steps."""
        if self.auto is not None:
            return Quantity("mean", self.auto.value, self.auto.interval, self.ess)
        return self._quantity("mean", mean_of, self._mean_interval(), self.ess)

    def _mean_interval(self) -> Interval:
        """Return the interval of the mean, with room for outcomes that were not seen."""
        found, w = self.weighted.mean_interval(self.level), self.weighted
        if w.known:
            shares = np.empty_like(w.shares)
            shares[w.order] = w.shares  # in the order of the data
            value = float(mean_of(w.returns, w.shares))
            found = widened(found, value, *self.outcomes.unseen(value, w.ess, shares))
        return self._cut(self.outcomes.shifted(found, self.diagnostics.missing_mass or 0.0))

    def variance(self) -> Quantity:
        """Return the variance of one return."""
        corrected = self.scored and self.scored.variance(self.mean().value)
        if corrected:
            return Quantity("variance", *corrected, self.ess)
        found = self.weighted.variance_interval(self.level)
        return self._quantity("variance", variance_of, found, self.ess)

    def deviation(self) -> Quantity:
        """Return the standard deviation of one return."""
        v = self.variance()
        low, high = np.sqrt([v.interval.low, v.interval.high])
        ends = dataclasses.replace(v.interval, low=float(low), high=float(high))
        return Quantity("std. deviation", float(np.sqrt(v.value)), ends, v.rests_on)

    def quantile(self, level: float) -> Quantity:
        """Return the smallest return that a share `level` of the episodes does not exceed.

        Args:
            level: within (0, 1), 0.5 for the median.
        """
        _check_share(level, "level")
        few = self.weighted.smaller_side(self.weighted.quantile(level))
        name = f"{100 * level:g} % quantile"
        corrected = self.scored and self.scored.quantile(level)
        if corrected:
            return Quantity(name, corrected[0], self._cut(corrected[1]), few)
        ends = self.weighted.quantile_interval(level, self.level)
        return self._quantity(name, partial(_quantile, level), self._cut(ends), few)

    def cvar(self, tail: float = TAIL) -> Quantity:
        """Return the mean of the worst share of the episodes (conditional value at risk).

        This is the lower tail, because higher returns are better. With tail = 1 it is the mean.

        Args:
            tail: the share, within (0, 1].
        """
        if not 0.0 < tail <= 1.0:
            raise ValueError(f"tail is {tail!r}; give a share within (0, 1], such as {TAIL}")
        name = f"CVaR {100 * tail:g} %"
        if tail == 1.0:
            return dataclasses.replace(self.mean(), name=name)
        few = self.weighted.tail_ess(tail)
        corrected = self.scored and self.scored.cvar(tail)
        if corrected:
            return Quantity(name, corrected[0], self._cut(corrected[1]), few)
        ends = self.weighted.cvar_interval(tail, self.level, self.outcomes.seen[0])
        return self._quantity(name, partial(_cvar, tail), self._cut(ends), few)

    def below(self, x: float) -> Quantity:
        """Return the probability of a return below x: of failure, if x is what must be reached."""
        if not np.isfinite(x):
            raise ValueError(f"x is {x!r}; give a finite return")
        name, few = f"P(return < {x:g})", self.weighted.smaller_side(x)
        corrected = self.scored and self.scored.probability(x)
        if corrected:
            return Quantity(name, *corrected, few)
        ends = self.weighted.probability_interval(x, self.level)
        return self._quantity(name, partial(_below, x), ends, few)

    @cached_property
    def band(self) -> Band:
        """The distribution function at every return, and a band that contains all of it at once."""
        w = self.weighted
        last = np.append(np.flatnonzero(np.diff(w.returns) > 0), w.returns.size - 1)
        value = np.minimum(np.cumsum(w.shares)[last], 1.0)
        half = w.band(self.draws, self.level)
        low, high = np.maximum(value - half, 0.0), np.minimum(value + half, 1.0)
        return Band(w.returns[last], value, low, high, self.level)

    def quantities(
        self,
        quantiles: Sequence[float] = QUANTILES,
        tail: float = TAIL,
        below: Sequence[float] = (),
    ) -> tuple[Quantity, ...]:
        """Return what the table shows: mean, deviation, quantiles, tail mean, probabilities."""
        return (
            self.mean(),
            self.deviation(),
            *(self.quantile(q) for q in quantiles),
            self.cvar(tail),
            *(self.below(x) for x in below),
        )

    def _quantity(
        self, name: str, statistic: Statistic, interval: Interval, rests_on: float
    ) -> Quantity:
        w = self.weighted
        if not w.known:
            return Quantity(name, np.nan, interval, 0.0)
        if self.kind == "percentile":
            interval = percentile(w.replicates(statistic, self.draws), self.level)
        return Quantity(name, float(statistic(w.returns, w.shares)), interval, rests_on)

    def _cut(self, interval: Interval) -> Interval:
        """Return the interval without returns that the recorded rewards do not allow."""
        return self.outcomes.cut(interval)

    # Show ------------------------------------------------------------------------------------

    def table(
        self,
        quantiles: Sequence[float] = QUANTILES,
        tail: float = TAIL,
        below: Sequence[float] = (),
    ) -> str:
        """Return a table of the numbers of `quantities`, and the verdict."""
        found = self.quantities(quantiles, tail, below)
        rows = [["", "value", f"{100 * self.level:g} % interval", "rests on"]]
        for q in found:
            ends = text.interval(q.interval.low, q.interval.high)
            few = " " if q.rests_on >= FEW else "?"
            rows.append([q.name, text.number(q.value), ends, f"{q.rests_on:.1f}{few}"])
        head = (
            f"returns of the target, from {text.size(self.sample)}, gamma {self.sample.gamma:g}; "
            f"data: {label(self.sample.regime)}; ESS {self.ess:.1f}"
        )
        lines = [head, *text.align(rows), text.wrap(str(self.verdict))]
        if any(q.rests_on < FEW for q in found):
            lines.append(f"? rests on fewer than {FEW:g} effective episodes: a guess")
        lines.append(text.wrap(_OTHER_MEAN if self.scored is None else _BY_AUTO))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def plot(self, tail: float = TAIL) -> Figure:
        """Draw the distribution function with its band, the median and the tail mean."""
        from ope_gym.report.curve_figures import distribution_figure

        band, cvar = self.band, self.cvar(tail)
        return distribution_figure(
            (band.x, band.value, band.low, band.high),
            band.level,
            {"median": self.quantile(0.5).value, cvar.name: cvar.value},
        )

    def scalars(self, tail: float = TAIL) -> dict[str, float]:
        """Return all finite numbers by tag, `distribution/<quantity>/value|low|high`."""
        found: dict[str, float] = {"distribution/ess": self.ess}
        named = {
            "deviation": self.deviation(),
            "median": self.quantile(0.5),
            "cvar": self.cvar(tail),
        }
        for name, q in {**named, "quantile_05": self.quantile(0.05)}.items():
            ends = {"value": q.value, "low": q.interval.low, "high": q.interval.high}
            found |= {f"distribution/{name}/{end}": number for end, number in ends.items()}
        return {tag: float(number) for tag, number in found.items() if np.isfinite(number)}

    def to_dict(
        self,
        quantiles: Sequence[float] = QUANTILES,
        tail: float = TAIL,
        below: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return plain numbers, strings and lists; undefined and infinite numbers are None."""
        band = self.band
        return {
            "regime": label(self.sample.regime),
            **self.sample.to_dict(),
            "ess": finite(self.ess),
            "level": self.level,
            "quantities": {
                q.name: {
                    "value": finite(q.value),
                    "low": finite(q.interval.low),
                    "high": finite(q.interval.high),
                    "method": q.interval.method,
                    "rests_on": finite(q.rests_on),
                }
                for q in self.quantities(quantiles, tail, below)
            },
            "band": {
                name: [finite(number) for number in getattr(band, name).tolist()]
                for name in ("x", "value", "low", "high")
            },
            "verdict": self.verdict.to_dict(),
        }

    def to_json(self, path: str | Path | None = None, **shown: Any) -> str:
        """Return `to_dict` as JSON text, and write it to `path` if one is given."""
        return text.to_json(self.to_dict(**shown), path)


def distribution(
    episodes: Episodes,
    target: Target,
    *,
    weights: str = "fused",
    origin: str | None = None,
    held_out: bool | None = None,
    q_model: QModel | str | None = None,
    gamma: float = 1.0,
    interval: str = "ess-t",
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Distribution:
    """Estimate the distribution of the target's returns from recorded episodes.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`.
        target: the policy to evaluate, the number of a recorded one, or "last".
        weights: "fused" for weights against the mixture of all behaviours, "basic" for those
            against the policy that recorded the episode, for use where the other policies are
            unknown, and for adaptive data.
        origin: as in `ope_gym.evaluate`.
        held_out: as in `ope_gym.evaluate`.
        q_model: "default" or a model, as in `ope_gym.evaluate`: all numbers but the band are then
            those of auto, which needs ess-t intervals, fused weights and all episodes in memory.
        gamma: discount of the returns, within [0, 1].
        interval: "ess-t": Student's t for means, Clopper and Pearson with effective numbers for
            probabilities, and their inversion for quantiles; "percentile": of the bootstrap.
        level: confidence level.
        resamples: bootstrap replicates, of the band and of percentile intervals.
        seed: seed of the bootstrap draws.

    Returns:
        A `Distribution`; print it for a table.
    """
    _check(weights, interval, resamples, q_model)
    evaluator = Evaluator(
        episodes,
        _named(weights, q_model),
        held_out=held_out,
        q_model=q_model,
        gamma=gamma,
        level=level,
        seed=seed,
    )
    returns = _returns(evaluator.source, evaluator.options.gamma)
    return _distribution(evaluator, target, origin, interval, resamples, *returns)


def rank_by(
    episodes: Episodes,
    targets: Mapping[str, Target] | Sequence[Target],
    by: str = "cvar",
    *,
    share: float = TAIL,
    cautious: bool = False,
    origin: str | None = None,
    **options: Any,
) -> dict[str, Quantity]:
    """Rank policies by a number of their distributions of returns, the best first.

    Args:
        episodes: recorded episodes, as in `ope_gym.evaluate`.
        targets: policies by name, or a list of them, as in `ope_gym.rank`.
        by: "cvar", "quantile" or "mean".
        share: of the tail, or the level of the quantile.
        cautious: whether to rank by the lower end of the interval instead of the value.
        origin: as in `ope_gym.evaluate`, of all targets.
        options: others of `distribution`.

    Returns:
        The number of each policy by name, from the best to the worst; undefined ones come last.
    """
    if by not in BY:
        raise ValueError(f"by is {by!r}; choose one of {', '.join(BY)}")
    given = {"weights": "fused", "interval": "ess-t", "resamples": 1000, **options}
    weights, interval, resamples = (given.pop(k) for k in ("weights", "interval", "resamples"))
    q_model = given.setdefault("q_model", None)
    _check(weights, interval, resamples, q_model)
    evaluator = Evaluator(episodes, _named(weights, q_model), **given)
    returns = _returns(evaluator.source, evaluator.options.gamma)
    found = {}
    for key, policy in named_targets(targets, evaluator.source).items():
        one = _distribution(evaluator, policy, origin, interval, resamples, *returns)
        found[key] = (
            one.mean() if by == "mean" else one.cvar(share) if by == "cvar" else one.quantile(share)
        )

    def badness(key: str) -> float:
        number = found[key].interval.low if cautious else found[key].value
        return np.inf if np.isnan(number) else -number

    return {key: found[key] for key in sorted(found, key=badness)}


def _distribution(
    evaluator: Evaluator,
    target: Target,
    origin: str | None,
    kind: str,
    resamples: int,
    returns: FloatArray,
    outcomes: Outcomes,
) -> Distribution:
    found = evaluator.evaluate(target, origin=origin)
    (name,) = found.keys() - {"auto"}
    estimate, auto = found[name], found.get("auto")
    strata, options = estimate.sample.strata, evaluator.options
    weighted = WeightedReturns.of(returns, estimate.diagnostics.log_last, strata)
    draws = Resamples(strata, resamples, options.seed)
    scored = None
    if auto is not None and weighted.known:
        data = evaluator.source.data
        if data is None:
            raise ValueError(
                "q_model needs all episodes in memory: load the files with Trajectories.load, or "
                "leave q_model out"
            )
        scored = ScoredReturns.of(
            data,
            evaluator.source.policy(target),
            options.gamma,
            weighted,
            origin=origin,
            q_model=options.q_model,
            level=options.level,
            seed=options.seed,
        )
    return Distribution(weighted, options.level, kind, draws, outcomes, estimate, auto, scored)


def _returns(source: Source, gamma: float) -> tuple[FloatArray, Outcomes]:
    """Return the discounted returns of all episodes, and which returns are possible."""
    found: list[FloatArray] = []
    rewards = RewardSums(np.inf, -np.inf, 0.0, 0)
    chunks = (
        [source.data]
        if source.data is not None
        else (chunk for task in source.tasks for _, chunk in source.chunks(task))
    )
    for chunk in chunks:
        _, own, sums = tally(chunk.rewards, chunk.offsets, gamma)
        found.append(own)
        rewards.merge(sums)
    returns, roster = np.concatenate(found), source.roster
    return returns, Outcomes.of(returns, rewards, gamma, roster.longest, roster.limited)


def _named(weights: str, q_model: QModel | str | None) -> list[str]:
    return [_WEIGHTS[weights]] if q_model is None else [_WEIGHTS[weights], "auto"]


def _check(weights: str, interval: str, resamples: int, q_model: QModel | str | None) -> None:
    if weights not in _WEIGHTS:
        raise ValueError(f"weights is {weights!r}; choose one of {', '.join(_WEIGHTS)}")
    if interval not in _KINDS:
        raise ValueError(f"interval is {interval!r}; choose one of {', '.join(_KINDS)}")
    if not resamples >= 2 or resamples % 1:
        raise ValueError(f"resamples is {resamples!r}; give at least 2, better 1000")
    if q_model is not None and (weights != "fused" or interval != "ess-t"):
        raise ValueError(
            f"q_model goes with fused weights and ess-t intervals, not with {weights} and "
            f"{interval}: leave q_model out"
        )


def _check_share(share: float, name: str) -> None:
    if not 0.0 < share < 1.0:
        raise ValueError(f"{name} is {share!r}; give a share within (0, 1), such as 0.05")


def _quantile(level: float, returns: FloatArray, shares: FloatArray) -> FloatArray:
    return quantile_of(returns, shares, level)


def _cvar(tail: float, returns: FloatArray, shares: FloatArray) -> FloatArray:
    return cvar_of(returns, shares, tail)


def _below(x: float, returns: FloatArray, shares: FloatArray) -> FloatArray:
    return np.asarray(shares[..., : int(np.searchsorted(returns, x, "left"))].sum(axis=-1))
