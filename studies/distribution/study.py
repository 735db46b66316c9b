"""Measure how often intervals and bands of the distribution of returns contain the truth.

Quantiles, CVaR, deviation and probabilities of held-out data sets of the small MDPs. The truth is
from many episodes of the target, the same in all runs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ope_gym import Distribution, distribution
from ope_gym.arrays import FloatArray
from studies.harness.claims import Claim, Evidence
from studies.harness.errors import standard_errors
from studies.harness.markdown import table
from studies.harness.seeds import streams
from studies.harness.small_grid import LOGGERS, Regime, grid
from studies.harness.study import Runs, Study, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = ("mean", "deviation", "5 %", "50 %", "95 %", "CVaR 10 %", "P(10 %)", "P(50 %)")
COLOURS = ("green", "amber", "red")
_ROUNDING = 1e-9
_TRUTH = 2e-3  # by which the distribution function of so many episodes may be off


@dataclass(frozen=True)
class Returns(Study):
    """Draw in each run a data set for some regimes of the grid."""

    level: float = 0.95
    resamples: int = 200  # of the bootstrap
    every: int = 8  # a run takes every 8th regime of the grid, starting at random
    grid_seed: int = 2
    truth: int = 200_000  # episodes of the target

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0 or self.every < 1 or self.truth < 100:
            raise ValueError(
                f"level={self.level}, every={self.every}, truth={self.truth}: a level is between "
                "0 and 1, the others are at least 1 and 100"
            )

    def run_once(self, seed: np.random.SeedSequence) -> dict[str, Any]:
        """Return whether intervals hold, (regimes, Q), bands and colours, (regimes,)."""
        regimes = grid(self.grid_seed)
        holds = np.full((len(regimes), len(NUMBERS)), math.nan)
        band, colour = np.full((2, len(regimes)), math.nan)
        first, *rngs = streams(seed, 1 + len(regimes))
        for r in range(int(first.integers(self.every)), len(regimes), self.every):
            truth = true_returns(regimes[r], self.truth)
            data, target, _ = regimes[r].simulate(rngs[r])
            found = distribution(data, target, level=self.level, resamples=self.resamples)
            holds[r] = _held(found, truth)
            band[r] = _band_held(found, truth)
            colour[r] = COLOURS.index(found.verdict.colour)
        return {"holds": holds, "band": band, "colour": colour}

    def summarise(self, runs: Runs) -> Summary:
        """Return coverage (Q,) and of the band, in all, by loggers and by colour."""
        holds, band = runs["holds"], runs["band"]
        loggers = np.array([regime.loggers for regime in grid(self.grid_seed)])
        masks = {"all": np.ones(band.shape, dtype=np.bool_)}
        masks |= {name: np.broadcast_to(loggers == name, band.shape) for name in LOGGERS}
        masks |= {name: runs["colour"] == c for c, name in enumerate(COLOURS)}
        return {
            "runs": len(band),
            "level": self.level,
            "sets": int(np.isfinite(band).sum()),
            "parts": {name: _described(holds, band, mask) for name, mask in masks.items()},
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge whether intervals and the band cover what they promise."""
        part, level = summary["parts"]["all"], summary["level"]
        rows = [
            Evidence(name, holds - level + 0.02, error, note=f"{holds:.1%}")
            for name, holds, error in zip(NUMBERS, part["holds"], part["error"], strict=True)
        ]
        whole = Evidence(
            "band", part["band"] - level + 0.02, part["band_error"], note=f"{part['band']:.1%}"
        )
        return [
            Claim(
                "our extension",
                "Intervals of the distribution of returns, and its band, contain the truth at "
                "least as often as they say, less two percentage points.",
                f"coverage − {level - 0.02:.0%}",
                (*rows, whole),
                "",
            ),
        ]

    def table(self, summary: Summary) -> str:
        """Tabulate coverage by loggers and by colour."""
        rows = [
            [name, part["sets"], *map(_percent, [*part["holds"], part["band"]])]
            for name, part in summary["parts"].items()
            if part["sets"]
        ]
        return "\n".join(
            [
                f"{summary['runs']} runs, {summary['sets']} held-out data sets of small MDPs: how "
                f"often {summary['level']:.0%} intervals contain the true number, and how often "
                "the band contains the whole distribution function. P(q) is the probability of a "
                "return below the target's q quantile. Rows are for all data sets, by kind of "
                "loggers, and by colour of the verdict.",
                "",
                *table(["part", "sets", *NUMBERS, "band"], rows),
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw the coverage of each number."""
        from studies.harness.pictures import BLUE, new_figure

        figure = new_figure(6.0, 3.2)
        axes = figure.add_subplot()
        part = summary["parts"]["all"]
        style: dict[str, Any] = {"fmt": "o", "ms": 4, "color": BLUE}
        error = 2 * np.array(part["error"])
        axes.errorbar(np.arange(len(NUMBERS)), part["holds"], yerr=error, **style)
        axes.axhline(summary["level"], color="black", linewidth=0.8)
        axes.set_xticks(range(len(NUMBERS)), NUMBERS, fontsize=7)
        axes.set_ylabel("coverage ± 2 standard errors", fontsize=8)
        return figure


@cache
def true_returns(regime: Regime, episodes: int) -> FloatArray:
    """Return the returns of many episodes of the target, ascending."""
    many = dataclasses.replace(regime, policies=1, per_policy=episodes)
    logits = np.asarray(regime.target.weights).T
    played = many._play(logits[None], np.random.default_rng([regime.seed, 1]))
    return np.sort((played.rewards * played.alive).sum(axis=1))


def _held(found: Distribution, truth: FloatArray) -> list[bool]:
    """Return whether each interval holds the truth."""
    n = truth.size
    at = {q: float(truth[math.ceil(q * n) - 1]) for q in (0.05, 0.1, 0.5, 0.95)}
    pairs = (
        (found.mean(), truth.mean()),
        (found.deviation(), truth.std()),
        *((found.quantile(q), at[q]) for q in (0.05, 0.5, 0.95)),
        (found.cvar(0.1), truth[: n // 10].mean()),
        *((found.below(at[q]), np.mean(truth < at[q])) for q in (0.1, 0.5)),
    )
    return [q.interval.low - _ROUNDING <= x <= q.interval.high + _ROUNDING for q, x in pairs]


def _band_held(found: Distribution, truth: FloatArray) -> float:
    """Return 1 if the band holds the whole function; between returns it is that at the left."""
    band, n = found.band, truth.size
    at = np.searchsorted(truth, band.x, "right") / n
    before = np.searchsorted(truth, band.x, "left") / n  # the highest since the return before
    half = found.weighted.band(found.draws, found.level)
    above = np.append(half, band.high[:-1])
    return float(np.all(band.low <= at + _TRUTH) and np.all(before <= above + _TRUTH))


def _described(holds: FloatArray, band: FloatArray, mask: Any) -> dict[str, Any]:
    """Return means over the data sets in a mask, and standard errors over runs."""
    inside = np.where(mask, band, math.nan)  # (R, regimes)
    chosen = np.where(mask[..., None], holds, math.nan)
    if not np.isfinite(inside).any():
        empty = np.full(len(NUMBERS), math.nan)
        return {"sets": 0, "holds": empty, "error": empty, "band": math.nan, "band_error": math.nan}
    full = np.isfinite(inside).any(axis=1)
    return {
        "sets": int(np.isfinite(inside).sum()),
        "holds": np.nanmean(chosen, axis=(0, 1)),
        "error": standard_errors(np.nanmean(chosen[full], axis=1)),
        "band": float(np.nanmean(inside)),
        "band_error": float(standard_errors(np.nanmean(inside[full], axis=1))),
    }


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
