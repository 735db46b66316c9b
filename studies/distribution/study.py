"""Measure how often intervals and bands of the distribution of returns contain the truth.

Quantiles, CVaR, deviation and probabilities of held-out data sets of the small MDPs, by the weights
alone and by auto with a q model, whose errors are compared. The truth is from many episodes of the
target, the same in all runs.
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
KINDS: dict[str, dict[str, Any]] = {
    "ess-t": {},
    "percentile": {"interval": "percentile"},
    "auto": {"q_model": "default"},
}
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
        """Return whether intervals hold and errors, (regimes, K, Q), bands, colours, (regimes,)."""
        regimes = grid(self.grid_seed)
        holds, errors = np.full((2, len(regimes), len(KINDS), len(NUMBERS)), math.nan)
        band, colour = np.full((2, len(regimes)), math.nan)
        first, *rngs = streams(seed, 1 + len(regimes))
        for r in range(int(first.integers(self.every)), len(regimes), self.every):
            truth = true_returns(regimes[r], self.truth)
            data, target, _ = regimes[r].simulate(rngs[r])
            for k, kind in enumerate(KINDS.values()):
                found = distribution(
                    data, target, level=self.level, resamples=self.resamples, **kind
                )
                holds[r, k], errors[r, k] = _compared(found, truth)
            band[r] = _band_held(found, truth)
            colour[r] = COLOURS.index(found.verdict.colour)
        return {"holds": holds, "errors": errors, "band": band, "colour": colour}

    def summarise(self, runs: Runs) -> Summary:
        """Return coverage (K, Q) and of the band, in all, by loggers and by colour; errors (Q,)."""
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
            "gain": _gains(runs["errors"]),
        }

    def claims(self, summary: Summary) -> list[Claim]:
        """Judge whether intervals and the band cover what they promise."""
        part, level = summary["parts"]["all"], summary["level"]
        rows = [
            Evidence(
                name if kind == "ess-t" else f"{name}, by auto",
                part["holds"][k][q] - level + 0.02,
                part["error"][k][q],
                note=f"{part['holds'][k][q]:.1%}",
            )
            for k, kind in enumerate(KINDS)
            if kind != "percentile"
            for q, name in enumerate(NUMBERS)
        ]
        gains = [
            Evidence(name, -log_ratio, error, note=f"{math.exp(log_ratio):.2f} of the error")
            for name, (log_ratio, error) in zip(NUMBERS, summary["gain"], strict=True)
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
            Claim(
                "our extension",
                "With a q model, the numbers of the distribution are more accurate.",
                "−ln(error by auto / error by the weights alone), mean over the problems",
                tuple(gains),
                "",
            ),
        ]

    def table(self, summary: Summary) -> str:
        """Tabulate coverage by loggers and by colour."""
        rows = []
        for name, part in summary["parts"].items():
            for k, kind in enumerate(KINDS):
                if part["sets"]:
                    cells = [_percent(value) for value in part["holds"][k]]
                    band = _percent(part["band"]) if k == 0 else ""
                    rows.append([name, part["sets"], kind, *cells, band])
        ratios = [f"{math.exp(log_ratio):.2f}" for log_ratio, _ in summary["gain"]]
        rows.append(["error of auto / of ess-t", summary["sets"], "", *ratios, ""])
        return "\n".join(
            [
                f"{summary['runs']} runs, {summary['sets']} held-out data sets of small MDPs: how "
                f"often {summary['level']:.0%} intervals contain the true number, and how often "
                "the band contains the whole distribution function. P(q) is the probability of a "
                "return below the target's q quantile. Rows are for all data sets, by kind of "
                "loggers, and by colour of the verdict. auto has a q model, the other two the "
                "weights alone; its band is theirs. The last row is a geometric mean over the "
                "problems of ratios of root mean square errors.",
                "",
                *table(["part", "sets", "interval", *NUMBERS, "band"], rows),
            ]
        )

    def picture(self, summary: Summary) -> Figure:
        """Draw the coverage of each number."""
        from studies.harness.pictures import BLUE, GREEN, RED, legend_below, new_figure

        figure = new_figure(6.0, 3.2)
        axes = figure.add_subplot()
        part = summary["parts"]["all"]
        for k, (kind, colour) in enumerate(zip(KINDS, (BLUE, RED, GREEN), strict=True)):
            error = 2 * np.array(part["error"][k])
            places = np.arange(len(NUMBERS)) + 0.2 * (k - 1)
            style: dict[str, Any] = {"fmt": "o", "ms": 4, "color": colour, "label": kind}
            axes.errorbar(places, part["holds"][k], yerr=error, **style)
        axes.axhline(summary["level"], color="black", linewidth=0.8)
        axes.set_xticks(range(len(NUMBERS)), NUMBERS, fontsize=7)
        axes.set_ylabel("coverage ± 2 standard errors", fontsize=8)
        legend_below(axes, len(KINDS))
        return figure


@cache
def true_returns(regime: Regime, episodes: int) -> FloatArray:
    """Return the returns of many episodes of the target, ascending."""
    many = dataclasses.replace(regime, policies=1, per_policy=episodes)
    logits = np.asarray(regime.target.weights).T
    played = many._play(logits[None], np.random.default_rng([regime.seed, 1]))
    return np.sort((played.rewards * played.alive).sum(axis=1))


def _compared(found: Distribution, truth: FloatArray) -> FloatArray:
    """Return (2, Q): whether each interval holds the truth, and the error of the number."""
    n = truth.size
    at = {q: float(truth[math.ceil(q * n) - 1]) for q in (0.05, 0.1, 0.5, 0.95)}
    pairs = (
        (found.mean(), truth.mean()),
        (found.deviation(), truth.std()),
        *((found.quantile(q), at[q]) for q in (0.05, 0.5, 0.95)),
        (found.cvar(0.1), truth[: n // 10].mean()),
        *((found.below(at[q]), np.mean(truth < at[q])) for q in (0.1, 0.5)),
    )
    holds = [q.interval.low - _ROUNDING <= x <= q.interval.high + _ROUNDING for q, x in pairs]
    return np.array([holds, [q.value - x for q, x in pairs]], dtype=np.float64)


def _band_held(found: Distribution, truth: FloatArray) -> float:
    """Return 1 if the band holds the whole function; between returns it is that at the left."""
    band, n = found.band, truth.size
    at = np.searchsorted(truth, band.x, "right") / n
    before = np.searchsorted(truth, band.x, "left") / n  # the highest since the return before
    half = found.weighted.band(found.draws, found.level)
    above = np.append(half, band.high[:-1])
    return float(np.all(band.low <= at + _TRUTH) and np.all(before <= above + _TRUTH))


def _gains(errors: FloatArray) -> FloatArray:
    """Return (Q, 2): ln(RMSE of auto / RMSE of the weights), mean over problems, and its error."""
    weights, auto = (list(KINDS).index(kind) for kind in ("ess-t", "auto"))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_mse = np.log(np.nanmean(errors**2, axis=0))  # (regimes, K, Q)
        ratios = 0.5 * (log_mse[:, auto] - log_mse[:, weights])
    ratios = np.where(np.isfinite(ratios), ratios, math.nan)
    count = np.isfinite(ratios).sum(axis=0)
    spread = np.nanstd(ratios, axis=0, ddof=1) / np.sqrt(count)
    return np.stack([np.nanmean(ratios, axis=0), spread], axis=1)


def _described(holds: FloatArray, band: FloatArray, mask: Any) -> dict[str, Any]:
    """Return means over the data sets in a mask, and standard errors over runs."""
    inside = np.where(mask, band, math.nan)  # (R, regimes)
    chosen = np.where(mask[..., None, None], holds, math.nan)
    if not np.isfinite(inside).any():
        empty = np.full(holds.shape[2:], math.nan)
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
