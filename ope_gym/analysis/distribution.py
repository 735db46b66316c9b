"""Estimate the distribution of a policy's returns: quantiles, tail, spread, chance of failure.

Each episode counts with the weight of all its actions, P_e / sum_k rho_k P_k at its last step, and
the weights are normalised. A return is one number for the whole episode, so unlike a mean it cannot
be taken apart into steps: where per-decision weights keep early rewards usable, here the last
weight alone decides. The verdict is that of NFIS, which has the same weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym.arguments import choice, real, whole
from ope_gym.arrays import FloatArray, finite
from ope_gym.evaluation import Evaluator
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.diagnostics import Diagnostics
from ope_gym.inference.estimate import Estimate, Sample, regime_label
from ope_gym.inference.intervals import Interval, widened
from ope_gym.inference.outcomes import Outcomes, RewardSums, tally
from ope_gym.inference.weighted_returns import WeightedReturns
from ope_gym.policies import Target
from ope_gym.report import text
from ope_gym.scale.sources import Episodes, Source
from ope_gym.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TAIL = 0.1
FEW = 10.0  # effective episodes below which a number is marked as a guess
_WEIGHTS = {"fused": "NFIS", "basic": "NBIS"}
_OTHER_MEAN = (
    "all lines use the weights of whole episodes; evaluate weighs each step by the actions up to "
    "it, and auto uses a q model, too: their mean differs and is usually more precise"
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
        level: probability with which the whole function lies inside.
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
        draws: bootstrap draws.
        outcomes: returns that are possible.
        estimate: the mean by NFIS (or NBIS), which has the same weights.
    """

    weighted: WeightedReturns = field(repr=False)
    level: float
    draws: Resamples = field(repr=False)
    outcomes: Outcomes = field(repr=False)
    estimate: Estimate = field(repr=False)

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
        """Return the mean, with room for outcomes that were not seen.

        `ope_gym.evaluate` has better estimates of it, by steps.
        """
        w, value = self.weighted, self.weighted.mean
        ends = w.mean_interval(self.level)
        if w.known:
            shares = np.empty_like(w.shares)
            shares[w.order] = w.shares  # in the order of the data
            majority = self.outcomes.majority(shares)
            unseen = self.outcomes.unseen(value, w.ess, majority)
            ends = widened(w.mean_interval, value, self.level, w.ess, unseen)
        ends = self.outcomes.shifted(ends, self.diagnostics.missing_mass or 0.0)
        return Quantity("mean", value, self.outcomes.cut(ends), self.ess)

    def variance(self) -> Quantity:
        """Return the variance of one return."""
        ends = self.weighted.variance_interval(self.level)
        return Quantity("variance", self.weighted.variance, ends, self.ess)

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
        known = "give a share within (0, 1), such as 0.05"
        level = real("quantile level", level, known, lambda x: 0.0 < x < 1.0)
        w, name = self.weighted, f"{100 * level:g} % quantile"
        value, ends = w.quantile(level), self.outcomes.cut(w.quantile_interval(level, self.level))
        return Quantity(name, value, ends, w.smaller_side(value))

    def cvar(self, tail: float = TAIL) -> Quantity:
        """Return the mean of the worst share of the episodes (conditional value at risk).

        This is the lower tail, because higher returns are better. With tail = 1 it is the mean.

        Args:
            tail: the share, within (0, 1].
        """
        known = f"give a share within (0, 1], such as {TAIL}"
        tail = real("tail", tail, known, lambda x: 0.0 < x <= 1.0)
        w, name = self.weighted, f"CVaR {100 * tail:g} %"
        if tail == 1.0:
            return dataclasses.replace(self.mean(), name=name)
        ends = self.outcomes.cut(w.cvar_interval(tail, self.level, self.outcomes.seen[0]))
        return Quantity(name, w.cvar(tail), ends, w.tail_ess(tail))

    def below(self, x: float) -> Quantity:
        """Return the probability of a return below x: of failure, if x is what must be reached."""
        x = real("x", x, "give a finite return")
        w, name = self.weighted, f"P(return < {x:g})"
        return Quantity(
            name, w.probability(x), w.probability_interval(x, self.level), w.smaller_side(x)
        )

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

    # Show ------------------------------------------------------------------------------------

    def table(
        self,
        quantiles: Sequence[float] = QUANTILES,
        tail: float = TAIL,
        below: Sequence[float] = (),
    ) -> str:
        """Return a table of the numbers of `quantities`, and the verdict."""
        quantities = self.quantities(quantiles, tail, below)
        table = text.table(
            quantities,
            {
                "": lambda q: q.name,
                "value": lambda q: text.number(q.value),
                f"{text.level(self.level)} interval": lambda q: text.interval(
                    q.interval.low, q.interval.high
                ),
                "rests on": lambda q: text.effective(q.rests_on, FEW),
            },
        )
        head = (
            f"returns of the target, from {text.size(self.sample)}, gamma {self.sample.gamma:g}; "
            f"data: {regime_label(self.sample.regime)}; ESS {self.ess:.1f}"
        )
        lines = [head, *table, text.wrap(str(self.verdict))]
        if any(q.rests_on < FEW for q in quantities):
            lines.append(f"? rests on fewer than {FEW:g} effective episodes: a guess")
        return "\n".join([*lines, text.wrap(_OTHER_MEAN)])

    def __str__(self) -> str:
        return self.table()

    def plot(self, tail: float = TAIL) -> Figure:
        """Draw the distribution function with its band, the median and the tail mean."""
        from ope_gym.report.figures import distribution_figure

        band, cvar = self.band, self.cvar(tail)
        return distribution_figure(
            (band.x, band.value, band.low, band.high),
            band.level,
            {"median": self.quantile(0.5).value, cvar.name: cvar.value},
        )

    def to_dict(
        self,
        quantiles: Sequence[float] = QUANTILES,
        tail: float = TAIL,
        below: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Return plain numbers, strings and lists; undefined and infinite numbers are None."""
        band = self.band
        return {
            "regime": regime_label(self.sample.regime),
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
    gamma: float = 1.0,
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
        gamma: discount of the returns, within [0, 1].
        level: confidence level. Intervals are Student's t for means, those of Clopper and Pearson
            with effective numbers for probabilities, and their inversion for quantiles.
        resamples: bootstrap replicates, of the band.
        seed: seed of the bootstrap draws.

    Returns:
        A `Distribution`; print it for a table.
    """
    choice("weights", weights, _WEIGHTS)
    whole("resamples", resamples, 2, "give at least 2, better 1000")
    name = _WEIGHTS[weights]
    evaluator = Evaluator(
        episodes, name, q_model=None, held_out=held_out, gamma=gamma, level=level, seed=seed
    )
    estimate = evaluator.evaluate(target, origin=origin)[name]
    returns, outcomes = _returns(evaluator.source, gamma)
    strata, log_weights = estimate.sample.strata, estimate.diagnostics.log_last
    weighted = WeightedReturns.of(returns, log_weights, strata)
    return Distribution(weighted, level, Resamples(strata, resamples, seed), outcomes, estimate)


def _returns(source: Source, gamma: float) -> tuple[FloatArray, Outcomes]:
    """Return the discounted returns of all episodes, and which returns are possible."""
    parts: list[FloatArray] = []
    rewards = RewardSums(np.inf, -np.inf, 0.0, 0)
    chunks = (
        [source.data]
        if source.data is not None
        else (chunk for task in source.tasks for _, chunk in source.chunks(task))
    )
    for chunk in chunks:
        _, returns, sums = tally(chunk.rewards, chunk.offsets, gamma)
        parts.append(returns)
        rewards.merge(sums)
    returns, roster = np.concatenate(parts), source.roster
    return returns, Outcomes.of(returns, rewards, gamma, roster.longest, roster.limited)
